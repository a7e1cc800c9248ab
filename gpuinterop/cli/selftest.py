"""``gpuinterop selftest``: the conformance suite, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from .._core.registry import get_backend
from .multicast import multicast
from .records import EXPORTERS, need, recorded_runs, verified_file

__all__ = ["selftest"]


class _Selftest(click.Command):
    """``selftest multicast`` is a command of its own; all other words are pytest's."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == [multicast.name]:
            return multicast.make_context(f"{info_name} {multicast.name}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_Selftest, context_settings={"ignore_unknown_options": True})
@click.option("--backend", metavar="NAME", help="By default the one that gpuinterop chooses here.")
@click.option("--report", is_flag=True, help="Record what passed in the backend's verified.toml.")
@click.option(
    "--document",
    type=click.Path(dir_okay=False, exists=True, writable=True, path_type=Path),
    help="With --report: also write all recorded runs into this Markdown file, between its two marks.",
)
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED)
def selftest(backend: str | None, report: bool, document: Path | None, pytest_arguments: tuple[str, ...]) -> None:
    """Run the conformance suite for a backend on this machine; more arguments go to pytest.

    With --report what was exercised and passed is written, dated, into the backend's verified.toml, and for the Vulkan
    drivers into that of gpuinterop.exporters: from then on their capability tables say SUPPORTED there.

    Multicast is not among it: `gpuinterop selftest multicast` tries that, because it may block; see its --help.
    """
    if pytest_arguments[:1] == (multicast.name,):
        raise click.UsageError("write `gpuinterop selftest multicast`, and its options behind that.")
    need("pytest", "the conformance suite")
    chosen = get_backend(backend).name
    # Required, not only chosen: a test that is skipped for anything but a declared gap is a failure.
    command = [sys.executable, "-m", "pytest", "--pyargs", "gpuinterop.testing", f"--gpuinterop-require={chosen}"]
    if report:
        command.append(f"--gpuinterop-report={verified_file(chosen)}")
        command.append(f"--gpuinterop-exporter-report={EXPORTERS}")
    elif document is not None:
        raise click.UsageError("--document goes with --report: it shows what that has recorded.")
    status = subprocess.run([*command, *pytest_arguments], check=False).returncode
    if document is not None and status == 0:
        from ..testing.report import write_document

        write_document(document, recorded_runs())
    sys.exit(status)
