"""Where the commands print: results to stdout, everything else to stderr."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

__all__ = ["complain", "note", "stderr", "stdout"]


def stdout() -> Console:
    """Return a console on what ``sys.stdout`` is now."""
    return Console(highlight=False)


def stderr() -> Console:
    """Return a console on what ``sys.stderr`` is now."""
    return Console(stderr=True, highlight=False)


def complain(markup: str) -> None:
    """Print one red line to stderr, however long."""
    stderr().print(f"[red]{markup}[/red]", soft_wrap=True)


def note(text: str) -> None:
    """Print one line to stderr that explains a choice."""
    stderr().print(f"[yellow]note:[/yellow] {escape(text)}", soft_wrap=True)
