"""Parse the commands' arguments. An error prints one line that says what to do, and exits with status 2."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from .. import __version__
from ..errors import GpuInteropError
from . import info, matrix, multicast, selftest
from .console import complain, wrap
from .demo import command as demo

__all__ = ["run"]

_ABOUT: Final = """\
Share GPU memory and semaphores between a graphics API, another process, and compute.

GPUINTEROP_BACKEND chooses a backend, GPUINTEROP_DISABLE turns capabilities off. `pytest --help`
lists gpuinterop's options for your own tests.
"""
_EXAMPLES: Final = """\
examples:
  gpuinterop info --json | jq .exporters
  gpuinterop demo --driver lavapipe
  gpuinterop demo --exporter process
  gpuinterop selftest --backend host -k timeline
  gpuinterop matrix nvidia.xml amd.xml

a simulated driver, to test without a GPU:
  python -m gpuinterop.testing.simulated cuda -- pytest
"""
_COMMANDS: Final = {
    "info": (info, "what works here, what does not, and why"),
    "demo": (demo, "Vulkan or another process and a compute stream alternate on one buffer"),
    "selftest": (selftest, "run the conformance suite for a backend on this machine"),
    "selftest multicast": (multicast, "whether multicast works; run it on a machine you do not share"),
    "matrix": (matrix, "the reports of several machines as one table"),
}


class _Formatter(argparse.HelpFormatter):
    """Keep paragraphs and indented lines; break lines that are too wide at spaces."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.strip().split("\n\n"):
            kept = paragraph if "\n " in paragraph else " ".join(paragraph.split())
            paragraphs.append("\n".join(wrap(kept, width)))
        return "\n\n".join(paragraphs)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return list(wrap(text, width))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        complain(f"error: {message}")
        sys.exit(2)


def run(arguments: Sequence[str]) -> int:
    """Run a command with the arguments that follow ``gpuinterop``, and return the exit status."""
    parser = _Parser("gpuinterop", description=_ABOUT, epilog=_EXAMPLES, formatter_class=_Formatter)
    parser.add_argument("--version", action="version", version=f"gpuinterop {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, (room, what) in _COMMANDS.items():
        one = commands.add_parser(
            name, help=what, description=inspect.getdoc(room.command), formatter_class=_Formatter, allow_abbrev=False
        )
        room.add_arguments(one)
        one.set_defaults(run=room.command)
    words = list(arguments)
    if words[:2] == ["selftest", "multicast"]:  # a separate command; selftest passes all other words to pytest
        words[:2] = ["selftest multicast"]
    given, rest = parser.parse_known_args(words)
    if given.command is None:
        parser.print_help()
        return 0
    if given.command == "selftest":
        given.pytest_arguments = [word for word in rest if word != "--"]
    elif rest:
        parser.error(f"{given.command} has no argument {' '.join(rest)}; see gpuinterop {given.command} --help.")
    try:
        return int(given.run(given))
    except GpuInteropError as error:
        complain(f"error: {error}")
        return 2
