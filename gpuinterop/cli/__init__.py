"""The command line: ``gpuinterop info``, ``demo`` and ``selftest``."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Run the command line on ``sys.argv``, and exit."""
    try:
        from .app import app

        app(prog_name="gpuinterop")
    except KeyboardInterrupt:  # among the imports, which take a while
        interrupted()


def interrupted() -> NoReturn:
    """Exit as after Ctrl-C: one line, and the shells' status for it."""
    print("interrupted", file=sys.stderr)  # not through rich, which may be what was being imported
    sys.exit(128 + signal.SIGINT)
