"""The suites once more, where arrays can be mapped."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import pytest

from gpuinterop.testing.simulated import build
from tests.limits import LIMIT
from tests.programs import printed

from ..parties import SIMULATED

pytestmark = pytest.mark.skipif(not SIMULATED, reason="needs the simulated runtime")

ROOT: Final = Path(__file__).resolve().parents[3]
MIPMAP: Final = "GPUINTEROP_TEST_HIP_MIPMAP"


def run(*arguments: str, **environment: str) -> dict[str, int]:
    """pytest's outcomes, by name."""
    clean = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    clean["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in libraries if "/gpuinterop/simulated/" not in path)
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments)
    summary = printed(*command, cwd=ROOT, env=clean, seconds=3 * LIMIT, **environment).strip().splitlines()[-1]
    return {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", summary)}


def test_arrays_where_the_runtime_has_them() -> None:
    """ROCm/hip #3779: AMD's library for Linux does not export the call, as the table says. Here is one that does."""
    if os.environ.get(MIPMAP):
        pytest.skip("this is that run")
    build("hip", extra=("-DGIP_MIPMAP=1",))
    files = ("test_descriptors.py", "hip/test_capabilities.py", "test_conformance.py")
    outcomes = run(*(f"tests/vendors/{name}" for name in files), "-k", "rray", **{MIPMAP: "1"})
    assert outcomes["passed"] > 5
    assert not outcomes.keys() & {"failed", "error", "errors"}
