"""``gpuinterop selftest``: the conformance suite, in a separate process."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from .._core.discovery import get_backend
from ..errors import InvalidArgumentError
from .records import (
    EXPORTERS,
    add_record_arguments,
    check_record_arguments,
    need,
    recorded_runs,
    verified_file,
)

__all__ = ["add_arguments", "command"]

# The current folder may be a project, such as this one's checkout. Its modules, settings and conftest.py are only for
# its own tests.
_PYTEST: Final = (
    sys.executable, "-P", "-m", "pytest", "-c", os.devnull, "--rootdir", str(Path(__file__).parents[2]), "--noconftest",
    "-p", "no:cacheprovider",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments; all others are pytest's."""
    add_record_arguments(parser, "passed")


def command(given: argparse.Namespace) -> int:
    """Run the conformance suite for a backend on this machine; further arguments are passed to pytest.

    --report writes what passed, with the date, into the backend's verified.toml, and for the Vulkan drivers into that
    of gpuinterop.vulkan. From then on their capability tables say SUPPORTED there.

    Multicast is not included, because it can block: `gpuinterop selftest multicast` tries it.
    """
    if given.pytest_arguments[:1] == ["multicast"]:
        raise InvalidArgumentError("selftest", "write `gpuinterop selftest multicast`, and its options after that.")
    need("pytest", "the conformance suite")
    chosen = get_backend(given.backend).name
    check_record_arguments(given)
    # Require the backend: then a test that is skipped for any reason but a declared gap fails.
    words = [*_PYTEST, "--pyargs", "gpuinterop.testing", f"--gpuinterop-require={chosen}"]
    if given.report:
        words.append(f"--gpuinterop-report={verified_file(chosen)}")
        words.append(f"--gpuinterop-exporter-report={EXPORTERS}")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables["GPUINTEROP_BACKEND"] = chosen  # the option overrides the variable, and the two must agree
    status = subprocess.run([*words, *given.pytest_arguments], check=False, env=variables).returncode
    if given.document is not None and status == 0:
        from ..testing.report import write_document

        write_document(given.document, recorded_runs())
    return status
