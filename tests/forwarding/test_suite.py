"""The HIP backend over the forwarding runtime over the simulated CUDA driver: the conformance suite, unchanged.

Each is a run of pytest in a process of its own, whose result is the test's. On a GPU it is started by hand:
``GPUINTEROP_TEST_HIP=forwarding pytest tests/vendors/test_conformance.py``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.simulated.build import build

from .conftest import MODE

pytestmark = [
    pytest.mark.skipif(MODE != "simulated", reason="of the simulated driver"),
    pytest.mark.timeout(550),
]


@pytest.fixture(autouse=True)
def _bindings() -> None:
    """Where make has installed hip-python for this run, its absence is no reason to skip."""
    if importlib.util.find_spec("hip") is None and importlib.util.find_spec("rocm") is None:
        assert not os.environ.get("GPUINTEROP_TEST_HIP_BINDINGS"), "hip-python is not here"
        pytest.skip("hip-python is not here")


ROOT: Final = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> tuple[str, dict[str, int]]:
    """What pytest printed, and its outcomes by name."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        env={
            **os.environ,
            "GPUINTEROP_TEST_VENDOR": "hip",
            "GPUINTEROP_TEST_HIP": "forwarding",
            "GPUINTEROP_TEST_CUDA": "simulated",
            "GPUINTEROP_SIM_DEVICES": "1",
            **environment,
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    summary = done.stdout.strip().splitlines()[-1]
    return done.stdout, {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", summary)}


def test_conformance() -> None:
    printed, outcomes = run(
        *(f"tests/vendors/{name}" for name in ("test_conformance.py", "test_release.py", "hip/test_release.py"))
    )
    assert "0 unexpected skips" in printed
    assert outcomes["passed"] > 250
    assert not outcomes.keys() & {"failed", "error", "errors"}


def test_conformance_of_arrays() -> None:
    """On the variant that exports what AMD's library for Linux does not."""
    build("forwarding", extra=("-DGIP_MIPMAP=1",))
    printed, outcomes = run("tests/vendors/test_conformance.py", "-k", "Array", GPUINTEROP_TEST_HIP_MIPMAP="1")
    assert "0 unexpected skips" in printed
    assert outcomes["passed"] > 80
    assert not outcomes.keys() & {"failed", "error", "errors"}
