"""The command line: ``gpuinterop info``, ``demo``, ``selftest`` and ``matrix``."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line on ``sys.argv``, and exit."""
    try:
        from .app import run

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # also during the imports, which take a while
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # `gpuinterop info | head`: the rest of the buffer cannot be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + getattr(signal, "SIGPIPE", 13))
