"""The command line: ``gpuinterop info``, ``demo`` and ``selftest``."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line on ``sys.argv``, and exit."""
    from .app import app

    app(prog_name="gpuinterop")
