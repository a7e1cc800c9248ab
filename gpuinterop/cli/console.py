"""Where the commands print: results to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.text import Text

__all__ = ["complain", "note", "stderr", "stdout"]


_ASCII = str.maketrans({"✓": "+", "○": "o", "·": ".", "✗": "x"})


class _Console(Console):
    """One whose marks are ASCII where its output is no Unicode; rich does the same with its boxes."""

    def render_str(self, text: str, **options: Any) -> Text:
        if not self.encoding.startswith("utf"):
            text = text.translate(_ASCII)
        return super().render_str(text, **options)


def stdout() -> Console:
    """Return a console on what ``sys.stdout`` is now."""
    _make_tolerant(sys.stdout)
    return _Console(highlight=False)


def stderr() -> Console:
    """Return a console on what ``sys.stderr`` is now."""
    _make_tolerant(sys.stderr)
    return _Console(stderr=True, highlight=False)


def _make_tolerant(stream: TextIO) -> None:
    """What the encoding has no character for (a device's name, a path) is escaped, as Python does on stderr."""
    if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")


def complain(markup: str) -> None:
    """Print one red line to stderr, however long."""
    stderr().print(f"[red]{markup}[/red]", soft_wrap=True)


def note(text: str) -> None:
    """Print one line to stderr that explains a choice."""
    stderr().print(f"[yellow]note:[/yellow] {escape(text)}", soft_wrap=True)
