"""What the commands print: results on stdout, everything else on stderr. Lines break only at spaces."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Final, TextIO

from ..handles import handle_types

__all__ = [
    "bar",
    "columns",
    "complain",
    "handle_name",
    "note",
    "paint",
    "progress",
    "say",
    "table",
    "wrap",
]

_CODES: Final = {"red": 31, "green": 32, "yellow": 33, "dim": 2, "bold": 1}
_CODE: Final = re.compile(r"\x1b\[\d+m")
ASCII: Final = str.maketrans({"✓": "+", "○": "o", "·": ".", "✗": "x", "█": "#"})
"""Replacements for an output without Unicode."""


def columns() -> int:
    """Width of the terminal; 80 without one."""
    return shutil.get_terminal_size().columns


def handle_name(type_name: str) -> str:
    """``OpaqueFd``: the API's name for the ``opaque_fd`` of files and variables."""
    return handle_types()[type_name].__name__


def complain(text: str) -> None:
    """Print one red line to stderr, whatever its length."""
    _print(sys.stderr, (text, "red"))


def note(text: str) -> None:
    """Print one line to stderr that explains a choice."""
    _print(sys.stderr, ("note: ", "yellow"), (text, ""))


def say(*parts: tuple[str, str], hang: int | None = None) -> None:
    """Print one line to stdout, wrapped at the terminal's width (`hang`: see `wrap`).

    Each part is a text and its style: red, green, yellow, dim, bold, or empty.
    """
    _print(sys.stdout, *parts, hang=hang)


def progress(text: str) -> None:
    """Show progress on a terminal until the next line is printed."""
    if _is_terminal(sys.stderr):
        print(f"\r\x1b[K{_encodable(text, sys.stderr)[: columns() - 1]}", end="", file=sys.stderr, flush=True)


def bar(part: float, width: int) -> str:
    """Draw a fraction as a bar of `width` characters."""
    return "█" * round(min(part, 1) * width)


def paint(text: str, style: str) -> str:
    """Add the codes of a style, if stdout shows them."""
    return _painted(text, style, sys.stdout)


def wrap(text: str, width: int, hang: int | None = None) -> Iterator[str]:
    """Break each line of a text at spaces; a word longer than the width stays whole.

    Continuation lines get `hang` spaces, by default as many as the first line has.
    """
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip(" ")) if hang is None else hang)
        current = ""
        for word in re.findall(r" *[^ ]+", line):
            if current.strip() and _length(current + word) > width:
                yield current
                current = indent + word.lstrip(" ")
            else:
                current += word
        yield current


def table(rows: Sequence[Sequence[str]], width: int, keys: int = 1) -> Iterator[str]:
    """Lay out texts in columns; columns that do not fit follow below, after the first columns again, the `keys`."""
    least, most = [], []
    for column in zip(*rows, strict=True):
        least.append(max(_length(word) for text in column for word in (text.split() or [""])))
        most.append(max(map(_length, column)))
    count = len(least)
    while count > keys + 1 and sum(least[:count]) + 2 * (count - 1) > width:
        count -= 1
    widths = most[:count]
    while sum(widths) + 2 * (count - 1) > width and widths != least[:count]:
        widest = max((one for one in range(count) if widths[one] > least[one]), key=widths.__getitem__)
        widths[widest] -= 1
    for row in rows:
        cells = [list(wrap(text, one)) for text, one in zip(row, widths, strict=False)]
        for number in range(max(map(len, cells))):
            line = [cell[number] if number < len(cell) else "" for cell in cells]
            yield "  ".join(text + " " * (one - _length(text)) for text, one in zip(line, widths, strict=True)).rstrip()
    if count < len(least):
        yield ""
        yield from table([[*row[:keys], *row[count:]] for row in rows], width, keys)


def _length(text: str) -> int:
    return len(_CODE.sub("", text))


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _painted(text: str, style: str, stream: TextIO) -> str:
    colours = style and _is_terminal(stream) and "NO_COLOR" not in os.environ
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if colours else text


def _encodable(text: str, stream: TextIO) -> str:
    return text if (stream.encoding or "").lower().startswith("utf") else text.translate(ASCII)


def _print(stream: TextIO, *parts: tuple[str, str], hang: int | None = None) -> None:
    # A device's name or a path can contain characters the encoding lacks: escape them, as Python does on stderr.
    if getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    progress("")
    line = _encodable("".join(_painted(text, style, stream) for text, style in parts), stream)
    if stream is sys.stdout or stream.isatty():  # an error in a log stays on one line
        line = "\n".join(wrap(line, columns(), hang))
    print(line, file=stream, flush=True)
