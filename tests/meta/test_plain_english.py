"""tools/plain_english.py finds what it is there to find, and leaves plain sentences alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "plain_english.py"


def said(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, TOOL, file], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == (1 if done.stdout else 0), done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "text",
    [
        'raise ValueError("0 is no NT handle")',
        "x = 1  # nobody waits",
        'raise ValueError(f"x: must be an int, not {x}")',
        '"""Of a word that streams wait for."""',
        'def f(size):\n    """Copy.\n\n    Parameters\n    ----------\n    size : int\n        In bytes.\n    """',
        "y = 2  # who waits waits",
    ],
)
def test_what_readers_stumble_over(tmp_path: Path, text: str) -> None:
    line = max(index for index, one in enumerate(text.split("\n"), 1) if one.strip(' "'))
    assert said(tmp_path / "module.py", text).startswith(f"{tmp_path / 'module.py'}:{line}: ")
    if text.startswith(("raise", "x", "y")):
        assert said(tmp_path / "page.md", text)


def test_plain_sentences(tmp_path: Path) -> None:
    text = '"""Invalid NT handle 0: check the call.\n\nThere is no driver. Nothing is no longer in use.\n"""\n'
    assert said(tmp_path / "module.py", text) == ""
