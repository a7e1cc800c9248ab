"""``gpuinterop selftest``: the conformance suite, in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import click

from .._core.registry import GROUP, get_backend
from ..capabilities import VerifiedRun, read_verified
from ..errors import BackendUnavailableError

__all__ = ["recorded_runs", "selftest"]

_EXPORTERS = Path(__file__).parents[1] / "exporters" / "verified.toml"


@click.command(context_settings={"ignore_unknown_options": True})
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
    """
    if importlib.util.find_spec("pytest") is None:
        raise BackendUnavailableError(
            "the conformance suite needs pytest.", fix="Install gpuinterop with its extra 'test'."
        )
    chosen = get_backend(backend).name
    # Required, not only chosen: a test that is skipped for anything but a declared gap is a failure.
    command = [sys.executable, "-m", "pytest", "--pyargs", "gpuinterop.testing", f"--gpuinterop-require={chosen}"]
    if report:
        command.append(f"--gpuinterop-report={verified_file(chosen)}")
        command.append(f"--gpuinterop-exporter-report={_EXPORTERS}")
    elif document is not None:
        raise click.UsageError("--document goes with --report: it shows what that has recorded.")
    status = subprocess.run([*command, *pytest_arguments], check=False).returncode
    if document is not None and status == 0:
        from ..testing.report import write_document

        write_document(document, recorded_runs())
    sys.exit(status)


def recorded_runs() -> dict[str, list[VerifiedRun]]:
    """Every recorded run, by the backend's name, or as the Vulkan drivers'."""
    runs = {entry.name: read_verified(verified_file(entry.name)) for entry in entry_points(group=GROUP)}
    return {**runs, "Vulkan driver": read_verified(_EXPORTERS)}


def verified_file(backend: str) -> Path:
    """Return where a backend keeps its recorded runs: beside its package's code.

    Parameters
    ----------
    backend : str
        The name of an installed backend.
    """
    (entry_point,) = set(entry_points(group=GROUP, name=backend))
    spec = importlib.util.find_spec(entry_point.module.partition(".")[0])
    assert spec is not None  # it was imported to get here
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "verified.toml"
