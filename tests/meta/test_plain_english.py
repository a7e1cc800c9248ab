"""tools/plain_english.py finds what it is there to find, and leaves plain sentences alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import python

TOOL = Path(__file__).parents[2] / "tools" / "plain_english.py"


def said(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    done = python(str(TOOL), str(file), seconds=30)
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
        '"""Drain until it is released."""',
        '"""Whether it can no longer be found."""',
        '"""What closes the duplicates."""',
        '"""How to open a party."""',
        "z = 3  # else: it stays until then",
        "# Unless one of\n# them waits, continue.",
    ],
)
def test_what_readers_stumble_over(tmp_path: Path, text: str) -> None:
    lines = enumerate(text.split("\n"), 1)
    line = 1 if text.startswith("#") else max(index for index, one in lines if one.strip(' "'))
    assert said(tmp_path / "module.py", text).startswith(f"{tmp_path / 'module.py'}:{line}: ")
    if text.startswith(("raise", "x", "y")):
        assert said(tmp_path / "page.md", text)


@pytest.mark.parametrize(
    "text",
    [
        '"""Invalid NT handle 0: check the call.\n\nThere is no driver. Nothing is no longer in use.\n"""\n',
        '"""Drain until the native is released and its callbacks have run."""',
        '"""Synchronize. It blocks."""',
        '"""Whether `close` has ended it."""',
        '"""What a texel consists of: one of those channels."""',
        "x = 1  # another thread may close the number: it looks first",
    ],
)
def test_plain_sentences(tmp_path: Path, text: str) -> None:
    assert said(tmp_path / "module.py", text) == ""
