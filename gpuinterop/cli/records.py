"""The files of recorded runs."""

from __future__ import annotations

import argparse
import importlib.util
import os
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

from .._core.entry_points import GROUP, package_folder, top_package
from ..capabilities import VerifiedRun, read_verified
from ..errors import BackendUnavailableError, InvalidArgumentError
from ..installing import pip_install

__all__ = ["EXPORTERS", "add_record_arguments", "check_record_arguments", "need", "recorded_runs", "verified_file"]

EXPORTERS = Path(__file__).parents[1] / "vulkan" / "verified.toml"
"""The Vulkan drivers' recorded runs."""


def recorded_runs() -> dict[str, list[VerifiedRun]]:
    """Every recorded run, by backend name; the Vulkan drivers' are among them."""
    runs = {"Vulkan driver": read_verified(EXPORTERS)}
    for entry_point in entry_points(group=GROUP):
        with suppress(BackendUnavailableError):  # a backend that has no file for its runs
            runs[entry_point.name] = read_verified(verified_file(entry_point.name))
    return runs


def verified_file(backend: str) -> Path:
    """Return the file of an installed backend's recorded runs, in its package.

    Raises `BackendUnavailableError` if the backend is a single module, or cannot be found.
    """
    entry_point = next(iter(entry_points(group=GROUP, name=backend)))
    package = top_package(entry_point)
    if (folder := package_folder(package)) is None:
        raise BackendUnavailableError(
            f"expected {backend} = {entry_point.value!r} to be in a package, which contains its recorded runs, got "
            f"{package!r}."
        )
    return folder / "verified.toml"


def need(module: str, what: str, extra: str = "test") -> None:
    """Raise `BackendUnavailableError` if `module` of an extra is not installed, which `what` needs."""
    if importlib.util.find_spec(module) is None:
        raise BackendUnavailableError(f"{what} needs {module.replace('_', '-')}.", fix=pip_install(extra))


def add_record_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--backend``, ``--report`` and ``--document``, for a command that can record `what`."""
    parser.add_argument("--backend", metavar="NAME", help="by default the backend that gpuinterop chooses here")
    parser.add_argument("--report", action="store_true", help=f"record what {what} in the backend's verified.toml")
    parser.add_argument(
        "--document",
        metavar="FILE",
        type=_existing_file,
        help="with --report: also write all recorded runs into this Markdown file, between its two marks",
    )


def check_record_arguments(given: argparse.Namespace) -> None:
    """Refuse ``--document`` without ``--report``."""
    if given.document is not None and not given.report:
        raise InvalidArgumentError("--document", "needs --report, which records the runs that it shows.")


def _existing_file(text: str) -> Path:
    """Return the path of an existing, writable file."""
    path = Path(text)
    if not path.is_file() or not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text!r}.")
    return path
