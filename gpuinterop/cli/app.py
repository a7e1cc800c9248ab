"""The command group, and what becomes of errors: one line that says what to do, and exit status 2; 130 at Ctrl-C."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.markup import escape

from .. import __version__
from ..errors import GpuInteropError
from . import interrupted
from .console import complain
from .demo import demo
from .info import info
from .selftest import selftest

__all__ = ["app"]


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GpuInteropError as error:
            complain(f"[bold]error:[/bold] {escape(str(error))}")
            sys.exit(2)
        except KeyboardInterrupt:  # before click, whose status for it is 1
            interrupted()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="gpuinterop")
def app() -> None:
    r"""Share GPU memory and semaphores between a graphics API, another process, and compute.

    \b
    Examples:
      gpuinterop info                         what works here, what does not, and why
      gpuinterop info --json | jq .exporters  the same for programs
      gpuinterop demo                         Vulkan steps a wave, the backend disturbs it in place
      gpuinterop demo --driver lavapipe       over another Vulkan driver
      gpuinterop demo --exporter process      the other side is a process with NumPy: no GPU, no Vulkan
      gpuinterop selftest --backend host      the conformance suite, for the backend on this machine
      gpuinterop selftest multicast           whether multicast works; on a machine that is yours

    GPUINTEROP_BACKEND chooses a backend, GPUINTEROP_DISABLE turns capabilities off.
    """


app.add_command(info)
app.add_command(demo)
app.add_command(selftest)
