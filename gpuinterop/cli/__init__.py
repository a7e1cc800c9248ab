"""The command line: ``gpuinterop info``, ``demo`` and ``selftest``."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line on ``sys.argv``, and exit."""
    try:
        from .app import run

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # also among the imports, which take a while
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
