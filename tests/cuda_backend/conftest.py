"""Tests of CUDA: on the simulated driver, or on a real one (GPUINTEROP_TEST_CUDA=real).

A process has one CUDA driver, and keeps it: these run in a process of their own, ``pytest tests/cuda_backend``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Final

import pytest

from tests.several_devices import first_device_only
from tests.simulated.build import build
from tests.simulated.driver import Simulator, loaded, preload

_MODE: Final = os.environ.get("GPUINTEROP_TEST_CUDA") or "simulated"
_MARKER: Final = "gpuinterop_simulated_driver"
_SIMULATOR = pytest.StashKey[Simulator]()


def pytest_configure(config: pytest.Config) -> None:
    if _MODE not in ("simulated", "real"):
        pytest.exit(f"GPUINTEROP_TEST_CUDA is simulated or real, not {_MODE!r}.", 4)
    config.option.gpuinterop_backend = ["cuda"]
    config.option.gpuinterop_require = ["cuda"]
    if _MODE == "real":
        return
    if drivers := loaded("/libcuda.so"):
        pytest.exit(
            f"this process has a CUDA driver already ({', '.join(drivers)}): "
            "run `pytest tests/cuda_backend` by itself.",
            4,
        )
    os.environ.setdefault("GPUINTEROP_SIM_DEVICES", "2")  # what devices share with their peers is tested as well
    library = build()
    preload(library)
    if not hasattr(ctypes.CDLL("libcuda.so.1"), _MARKER):
        pytest.exit("libcuda.so.1 is not the simulated driver, although that was loaded first.", 4)
    config.stash[_SIMULATOR] = Simulator(library)
    config.option.gpuinterop_simulated = ["cuda"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _MODE == "simulated":
        first_device_only(items, "cuda")


def pytest_report_header() -> str:
    return f"CUDA driver under test: {_MODE}"


@pytest.fixture(scope="session", autouse=True)
def _bindings_use_it(pytestconfig: pytest.Config) -> None:
    """What cuda.bindings call is the simulated driver: its counter shows it. And they are the version that is meant."""
    if wanted := os.environ.get("GPUINTEROP_TEST_CUDA_BINDINGS"):
        import cuda.bindings

        assert cuda.bindings.__version__ == wanted
    simulator = pytestconfig.stash.get(_SIMULATOR, None)
    if simulator is None:
        return
    from cuda.bindings import driver

    before = simulator.calls("cuInit")
    assert int(driver.cuInit(0)[0]) in (0, 100)
    assert simulator.calls("cuInit") == before + 1
    assert len(loaded("/libcuda.so")) == 1


@pytest.fixture
def simulator(pytestconfig: pytest.Config) -> Simulator:
    """The control of the simulated driver."""
    found = pytestconfig.stash.get(_SIMULATOR, None)
    if found is None:
        pytest.skip("needs the simulated driver")
    return found


@pytest.fixture(autouse=True)
def _kept_the_rules(pytestconfig: pytest.Config) -> Iterator[None]:
    """On the simulated driver: no fault outlives its test, nothing is left over or against the documentation."""
    simulator = pytestconfig.stash.get(_SIMULATOR, None)
    if simulator is None:
        yield
        return
    with simulator.kept_rules("cuda"):
        yield
