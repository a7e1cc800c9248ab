"""Plain output of the commands: results go to stdout, everything else to stderr. Tables need rich: see `tables`."""

from __future__ import annotations

import os
import sys
from typing import Final, TextIO

__all__ = ["complain", "note", "progress", "say"]

_CODES: Final = {"red": 31, "green": 32, "yellow": 33, "dim": 2, "bold": 1}
ASCII: Final = str.maketrans({"✓": "+", "○": "o", "·": ".", "✗": "x"})
"""The marks, for an output without Unicode."""


def complain(text: str) -> None:
    """Print one red line to stderr, however long."""
    _print(sys.stderr, (text, "red"))


def note(text: str) -> None:
    """Print one line to stderr that explains a choice."""
    _print(sys.stderr, ("note: ", "yellow"), (text, ""))


def say(*parts: tuple[str, str]) -> None:
    """Print one line to stdout.

    Parameters
    ----------
    *parts : (str, str)
        A text, and its style: red, green, yellow, dim, bold, or empty.
    """
    _print(sys.stdout, *parts)


def progress(text: str) -> None:
    """Show on a terminal what goes on, until the next line is printed; elsewhere nothing."""
    if _is_terminal(sys.stderr):
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def make_tolerant(stream: TextIO) -> None:
    """Escape what the encoding has no character for (a device's name, a path), as Python does on stderr."""
    if getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _print(stream: TextIO, *parts: tuple[str, str]) -> None:
    make_tolerant(stream)
    progress("")
    colours = _is_terminal(stream) and "NO_COLOR" not in os.environ
    line = "".join(f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style and colours else text for text, style in parts)
    if not (stream.encoding or "").lower().startswith("utf"):
        line = line.translate(ASCII)
    print(line, file=stream, flush=True)
