"""``gpuinterop selftest``: the conformance suite, in a separate process."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from .._core.discovery import get_backend
from ..errors import BackendUnavailableError, InvalidArgumentError
from ..installing import pip_install

__all__ = ["add_arguments", "begin_report", "command"]

# The current folder may be a project, such as this one's checkout. Its modules, settings and conftest.py are only for
# its own tests.
_PYTEST: Final = (
    sys.executable, "-P", "-m", "pytest", "-c", os.devnull, "--rootdir", str(Path(__file__).parents[2]), "--noconftest",
    "-p", "no:cacheprovider",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--backend`` and ``--report``; all other arguments are pytest's."""
    parser.add_argument("--backend", metavar="NAME", help="by default the backend that gpuinterop chooses here")
    parser.add_argument("--report", metavar="FILE", type=Path, help="write the results as JUnit XML, for an issue")


def begin_report(file: Path | None) -> None:
    """Empty the file, so that a run that is killed leaves no older report. Raises `InvalidArgumentError`."""
    try:
        if file is not None:
            file.write_bytes(b"")
    except OSError as error:
        raise InvalidArgumentError("--report", f"expected a file that can be written, got {error}.") from error


def command(given: argparse.Namespace) -> int:
    """Run the conformance suite for a backend on this machine; further arguments are passed to pytest.

    --report writes one file, JUnit XML with all results, versions and devices. Attach it to an issue: only runs that
    this project has recorded make a capability SUPPORTED.

    Multicast is not included, because it can block: `gpuinterop selftest multicast` tries it.
    """
    if given.pytest_arguments[:1] == ["multicast"]:
        raise InvalidArgumentError("selftest", "write `gpuinterop selftest multicast`, and its options after that.")
    if importlib.util.find_spec("pytest") is None:
        raise BackendUnavailableError("the conformance suite needs pytest.", fix=pip_install("test"))
    chosen = get_backend(given.backend).name
    begin_report(given.report)
    # Require the backend: then a test that is skipped for any reason but a declared gap fails.
    words = [*_PYTEST, "--pyargs", "gpuinterop.testing", f"--gpuinterop-require={chosen}"]
    if given.report is not None:
        words.append(f"--junitxml={given.report}")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables["GPUINTEROP_BACKEND"] = chosen  # the option overrides the variable, and the two must agree
    return subprocess.run([*words, *given.pytest_arguments], check=False, env=variables).returncode
