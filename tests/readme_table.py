"""The README's table of what works: what it says of each backend, by cell."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def column(backend: str) -> dict[str, str]:
    """`supported`, `unverified` or `-` of each row's cell."""
    rows = [line.strip("| ").split(" | ") for line in README.read_text(encoding="utf-8").splitlines() if "|" in line]
    header = next(row for row in rows if backend in row)
    at = header.index(backend)
    return {found[1]: row[at] for row in rows if (found := re.match(r"`([\w:]+)`: ", row[0]))}
