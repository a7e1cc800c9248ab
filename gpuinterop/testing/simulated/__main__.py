"""Run a command on a simulated driver: ``python -m gpuinterop.testing.simulated cuda -- python -m pytest tests``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from ... import __version__
from ...errors import BackendUnavailableError
from . import environment
from .build import LIBRARIES

_TRY = """
import sys

import gpuinterop as gi
from gpuinterop.testing.simulated import assert_simulated

try:
    assert_simulated(sys.argv[1])
    gi.device()
except (AssertionError, gi.GpuInteropError) as error:
    sys.exit(str(error))
"""


def _vendor(name: str) -> str:
    if name in LIBRARIES:
        return name
    raise argparse.ArgumentTypeError(
        f"expected {' or '.join(sorted(LIBRARIES))}, got {name!r}; the host backend needs no driver: "
        "GPUINTEROP_BACKEND=host COMMAND"
    )


def main() -> int:
    """Replace this process with the command; returns only if that cannot start."""
    parser = argparse.ArgumentParser(
        "python -m gpuinterop.testing.simulated",
        description="Run a command on a simulated CUDA driver or HIP runtime: no GPU, no driver, a C compiler.",
        epilog="example: python -m gpuinterop.testing.simulated cuda -- python -m pytest tests",
    )
    parser.add_argument("--version", action="version", version=f"gpuinterop {__version__}")
    vendors = f"{{{','.join(sorted(LIBRARIES))}}}"
    parser.add_argument("vendor", type=_vendor, metavar=vendors, help="the backend whose driver is simulated")
    parser.add_argument("command", nargs=argparse.PARSER, metavar="COMMAND", help="the command and its options")
    given = parser.parse_args()
    if sys.platform != "linux":
        parser.error(f"expected Linux, because the drivers' memory is in memfds, got {sys.platform}; use a container.")
    try:
        variables = environment(given.vendor)
    except BackendUnavailableError as error:
        parser.exit(1, f"{error}\n")
    # Report errors here: the command may hide them, as a suite does that skips what does not work.
    tried = subprocess.run([sys.executable, "-c", _TRY, given.vendor], env=variables, check=False)
    if tried.returncode != 0:
        return tried.returncode
    sys.stdout.flush()
    try:
        os.execvpe(given.command[0], given.command, variables)
    except OSError as error:
        parser.exit(127, f"{given.command[0]}: {error.strerror}\n")


if __name__ == "__main__":
    sys.exit(main())
