"""Tests of the forwarding HIP runtime: over our simulated CUDA driver, or a real one (GPUINTEROP_TEST_CUDA=real).

A process has one runtime and one driver, and keeps them: these run in a process of their own, ``pytest
tests/forwarding``.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from typing import Final

import pytest

from gpuinterop.exporters import open_exporter
from gpuinterop.exporters.base import Exporter
from gpuinterop.exporters.vulkan import list_drivers
from gpuinterop.testing.missing_vulkan import give_up
from tests.simulated.build import build
from tests.simulated.driver import Simulator, hide_rocm, loaded

from .runtime import Runtime

MODE: Final = os.environ.get("GPUINTEROP_TEST_CUDA") or "simulated"
PARTIES: Final = ("memfd", "swiftshader") if MODE == "simulated" else ("nvidia",)
_SIMULATOR = pytest.StashKey[Simulator]()
_RUNTIME = pytest.StashKey[Runtime]()


def pytest_configure(config: pytest.Config) -> None:
    if MODE not in ("simulated", "real"):
        pytest.exit(f"GPUINTEROP_TEST_CUDA is simulated or real, not {MODE!r}.", 4)
    if libraries := loaded("/libcuda.so", "/libamdhip64.so"):
        pytest.exit(
            f"this process has a driver already ({', '.join(libraries)}): run `pytest tests/forwarding` by itself.", 4
        )
    # libcuda.so.1 and libamdhip64.so are what glibc finds loaded under these names.
    if MODE == "simulated":
        os.environ.setdefault("GPUINTEROP_SIM_DEVICES", "2")
        driver = build("cuda")
        ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
        config.stash[_SIMULATOR] = Simulator(driver)
    library = build("forwarding")
    hide_rocm(library.parent)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    config.stash[_RUNTIME] = Runtime(library)


def pytest_report_header() -> str:
    return f"CUDA driver beneath: {MODE}"


@pytest.fixture(scope="session")
def hip(pytestconfig: pytest.Config) -> Runtime:
    return pytestconfig.stash[_RUNTIME]


@pytest.fixture
def simulator(pytestconfig: pytest.Config) -> Simulator:
    """The control of the simulated CUDA driver."""
    found = pytestconfig.stash.get(_SIMULATOR, None)
    if found is None:
        pytest.skip("needs the simulated CUDA driver")
    return found


@pytest.fixture
def memfd(simulator: Simulator) -> Iterator[Exporter]:
    with open_exporter("memfd") as exporter:
        yield exporter


@pytest.fixture(params=PARTIES)
def party(request: pytest.FixtureRequest) -> Iterator[Exporter]:
    """Whoever makes the memory."""
    if request.param == "memfd":
        with open_exporter("memfd") as exporter:
            yield exporter
        return
    if not any(request.param in f"{found.name} {found.driver}".lower() for found in list_drivers()):
        give_up(f"there is no Vulkan driver {request.param!r}")
    with open_exporter("vulkan", driver=request.param) as exporter:
        yield exporter


def pytest_count_left(config: pytest.Config) -> Counter[str]:
    """The simulated driver's objects, and what it noted against the documentation."""
    simulator = config.stash.get(_SIMULATOR, None)
    return Counter() if simulator is None else simulator.left()


@pytest.fixture(autouse=True)
def _no_fault_lasts(pytestconfig: pytest.Config, hip: Runtime) -> Iterator[None]:
    """On device 0, without an error."""
    simulator = pytestconfig.stash.get(_SIMULATOR, None)
    hip.ok("hipSetDevice", 0)
    hip("hipGetLastError")
    if simulator is not None:
        simulator.begin()
    yield
    if simulator is not None:
        simulator.reset()
