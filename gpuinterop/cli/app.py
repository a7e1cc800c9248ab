"""The commands' arguments, and what becomes of errors: one line that says what to do, and exit status 2."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from typing import Final

from .. import __version__
from ..errors import GpuInteropError
from . import info, matrix, multicast, selftest
from .bench import command as bench
from .console import complain
from .demo import command as demo

__all__ = ["run"]

_ABOUT: Final = """\
Share GPU memory and semaphores between a graphics API, another process, and compute.

examples:
  gpuinterop info                         what works here, what does not, and why
  gpuinterop info --json | jq .exporters  the same for programs
  gpuinterop demo                         Vulkan steps a wave, the backend disturbs it in place
  gpuinterop demo --driver lavapipe       over another Vulkan driver
  gpuinterop demo --exporter process      the other side is a process with NumPy: no GPU, no Vulkan
  gpuinterop bench                        what calls and frames cost, beside the same by hand
  gpuinterop selftest --backend host      the conformance suite, for the backend on this machine
  gpuinterop selftest multicast           whether multicast works; on a machine that is yours
  gpuinterop matrix nvidia.json amd.json  what ran where, of several machines' reports

GPUINTEROP_BACKEND chooses a backend, GPUINTEROP_DISABLE turns capabilities off.
"""
_COMMANDS: Final = {"info": info, "demo": demo, "bench": bench, "selftest": selftest, "matrix": matrix}


def run(arguments: Sequence[str]) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str
        Those behind ``gpuinterop``.

    Returns
    -------
    int
        The exit status.
    """
    parser = argparse.ArgumentParser("gpuinterop", description=_ABOUT, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--version", action="version", version=f"gpuinterop {__version__}")
    commands = parser.add_subparsers(dest="command", metavar=f"{{{','.join(_COMMANDS)}}}")
    for name, room in {**_COMMANDS, "selftest multicast": multicast}.items():
        one = commands.add_parser(
            name, description=inspect.getdoc(room.command), formatter_class=argparse.RawTextHelpFormatter,
            allow_abbrev=False,
        )  # fmt: skip
        room.add_arguments(one)
        one.set_defaults(run=room.command)
    words = list(arguments)
    if words[:2] == ["selftest", "multicast"]:  # a command of its own; all other words are pytest's
        words[:2] = ["selftest multicast"]
    given, rest = parser.parse_known_args(words)
    if given.command is None:
        parser.print_help()
        return 0
    if given.command == "selftest":
        given.pytest_arguments = [word for word in rest if word != "--"]
    elif rest:
        parser.error(f"{given.command} does not know {' '.join(rest)}; see gpuinterop {given.command} --help.")
    try:
        return int(given.run(given))
    except GpuInteropError as error:
        complain(f"error: {error}")
        return 2
