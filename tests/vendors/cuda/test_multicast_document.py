"""What docs/howto/multicast.md says beside its samples, which tests/manual runs."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[3] / "docs" / "howto" / "multicast.md"


def test_what_it_says_of_the_rest() -> None:
    """The picture is there, and every error that it names is one whose meaning the backend tells."""
    from gpuinterop_cuda.error_hints import MEANINGS

    text = DOCUMENT.read_text(encoding="utf-8")
    assert (DOCUMENT.parent / re.findall(r"!\[.*?\]\((.*?)\)", text)[0]).is_file()
    named = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert named == {code for call, code in MEANINGS if call.startswith("Multicast")}
