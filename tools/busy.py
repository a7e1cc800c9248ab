"""Run a command, and report every ten seconds that it still runs.

Usage: python tools/busy.py WORDS COMMAND...

It writes to the descriptor in GPUINTEROP_TEST_PROGRESS instead of standard error: the terminal's, when make holds back
the output of its commands.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

EVERY_S = 10.0


def main(words: str, *command: str) -> int:
    to = int(os.environ.get("GPUINTEROP_TEST_PROGRESS") or 2)
    begin, wait = time.monotonic(), 1.0
    with subprocess.Popen(command, close_fds=False) as process:  # its children can write there too
        while True:
            try:
                return process.wait(wait)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(OSError):
                    os.write(to, f"{words}: {time.monotonic() - begin:.0f} s\n".encode())
                wait = EVERY_S


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
