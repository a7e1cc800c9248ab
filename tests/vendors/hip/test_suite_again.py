"""Where semaphores abort, as everywhere in these tests; and the suites once more where arrays can be mapped."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Final

import pytest

from gpuinterop.testing.simulated import build
from tests.limits import LIMIT
from tests.programs import printed, python
from tests.simulated.driver import Simulator

from ..parties import SIMULATED

pytestmark = pytest.mark.skipif(not SIMULATED, reason="needs the simulated runtime")

ROOT: Final = Path(__file__).resolve().parents[3]
ABORTING: Final = "GPUINTEROP_SIM_HIP_ABORT"
MIPMAP: Final = "GPUINTEROP_TEST_HIP_MIPMAP"


def run(*arguments: str, **environment: str) -> dict[str, int]:
    """pytest's outcomes, by name."""
    clean = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    clean["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in libraries if "/gpuinterop/simulated/" not in path)
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments)
    summary = printed(*command, cwd=ROOT, env=clean, seconds=3 * LIMIT, **environment).strip().splitlines()[-1]
    return {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", summary)}


def test_it_does_abort(simulator: Simulator) -> None:
    """ROCm/clr #72. All tests here run so, and would show nothing if the very call, past the gate, ended no process."""
    program = (
        "import gpuinterop as gi; device = gi.get_backend('hip').device(); "
        "print('before', flush=True); "
        "device.driver.import_semaphore(device._handle, gi.TimelineWin32(handle=5))"
    )
    for aborts in ("1", "0"):
        done = python("-c", program, env=simulator.environment(**{ABORTING: aborts}))
        assert done.stdout == "before\n"
        if aborts == "1":
            assert done.returncode == -signal.SIGABRT
        else:
            assert done.returncode == 1
            assert "hipErrorNotSupported" in done.stderr


def test_arrays_where_the_runtime_has_them() -> None:
    """ROCm/hip #3779: AMD's library for Linux does not export the call, as the table says. Here is one that does."""
    if os.environ.get(MIPMAP):
        pytest.skip("this is that run")
    build("hip", extra=("-DGIP_MIPMAP=1",))
    files = ("test_descriptors.py", "hip/test_capabilities.py", "test_conformance.py")
    outcomes = run(*(f"tests/vendors/{name}" for name in files), "-k", "rray", **{MIPMAP: "1"})
    assert outcomes["passed"] > 5
    assert not outcomes.keys() & {"failed", "error", "errors"}
