"""Tests of HIP: on the simulated runtime, the forwarding one, AMD's on a stand-in, or a real one (GPUINTEROP_TEST_HIP).

- ``simulated``: our own test double, with AMD's documented behaviour. The default.
- ``forwarding``: ours as well, and it turns HIP's calls into those of the CUDA driver: the machine's, or with
  ``GPUINTEROP_TEST_CUDA=simulated`` our simulated one. It shows our calls, not AMD's behaviour.
- ``amd``: AMD's runtime, built from AMD's sources (``python -m tests.simulated.amd``; GPUINTEROP_TEST_HIP_AMD names the
  library), on a stand-in for the HSA runtime below it, which is ours. It shows AMD's code above HSA, not hardware.
- ``real``: AMD's runtime and GPU.

A process has one HIP runtime, and keeps it: these run in a process of their own, ``pytest tests/hip_backend``.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import gpuinterop as gi
from tests.several_devices import first_device_only
from tests.simulated.build import build
from tests.simulated.driver import Simulator, hide_rocm, loaded, preload
from tests.simulated.stand_in import StandIn

from .amds_own import AMDS_OWN
from .parties import ON_CPU

_MODE: Final = os.environ.get("GPUINTEROP_TEST_HIP") or "simulated"
_MARKERS: Final = {
    "simulated": "gpuinterop_simulated_driver",
    "forwarding": "gpuinterop_forwarding_hip",
    "amd": "gpuinterop_stand_in_device",  # of the library below it, which is loaded with it
}
_SIMULATOR = pytest.StashKey[Simulator]()
_FORWARDING = pytest.StashKey[Any]()
_STAND_IN = pytest.StashKey[StandIn]()


def pytest_configure(config: pytest.Config) -> None:
    if _MODE not in (*_MARKERS, "real"):
        pytest.exit(f"GPUINTEROP_TEST_HIP is simulated, forwarding, amd or real, not {_MODE!r}.", 4)
    config.option.gpuinterop_backend = ["hip"]
    config.option.gpuinterop_require = ["hip"]
    if _MODE == "real":
        return
    # As AMD's builds with assertions do (ROCm/clr #72): a call that no gate is in front of ends the run. "0" gives the
    # others, which say hipErrorNotSupported.
    os.environ.setdefault("GPUINTEROP_SIM_HIP_ABORT", "1")
    if runtimes := loaded("/libamdhip64.so"):
        pytest.exit(
            f"this process has a HIP runtime already ({', '.join(runtimes)}): "
            "run `pytest tests/hip_backend` by itself.",
            4,
        )
    # What devices share with their peers is tested as well.
    os.environ.setdefault("GPUINTEROP_SIM_DEVICES", "2")
    os.environ.setdefault("GPUINTEROP_STANDIN_DEVICES", "2")
    over_simulated = _MODE == "forwarding" and os.environ.get("GPUINTEROP_TEST_CUDA") == "simulated"
    if over_simulated:
        preload(build("cuda"))
    # AMD's library for Linux has no mipmapped arrays; one run has them, to try the calls.
    extra = ("-DGIP_MIPMAP=1",) if os.environ.get("GPUINTEROP_TEST_HIP_MIPMAP") else ()
    if _MODE == "amd":
        library = Path(os.environ["GPUINTEROP_TEST_HIP_AMD"]).resolve()
    else:
        library = build("hip" if _MODE == "simulated" else "forwarding", extra=extra)
    hide_rocm(library.parent)
    preload(library)
    if not hasattr(ctypes.CDLL("libamdhip64.so"), _MARKERS[_MODE]):
        pytest.exit(f"libamdhip64.so is not the {_MODE} one, although that was loaded first.", 4)
    if _MODE == "simulated":
        config.stash[_SIMULATOR] = Simulator(library)
    elif _MODE == "amd":
        config.stash[_STAND_IN] = StandIn()
    else:
        config.stash[_FORWARDING] = forwarding = ctypes.CDLL(str(library))
        forwarding.gfw_calls.restype = ctypes.c_uint64
    if _MODE != "forwarding" or over_simulated:
        config.option.gpuinterop_simulated = ["hip"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_CPU:
        first_device_only(items, "hip")
    if _MODE == "amd":
        for item in items:
            if reason := AMDS_OWN.get(item.nodeid.partition("::")[2]):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def pytest_report_header() -> str:
    aborts = os.environ.get("GPUINTEROP_SIM_HIP_ABORT", "0") != "0"
    return f"HIP runtime under test: {_MODE}{', which aborts in an import of a semaphore' if aborts else ''}"


@pytest.fixture(scope="session")
def hip() -> Any:
    """hip-python's module, as the backend imports it."""
    for name in ("rocm.bindings.hip", "hip.hip"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise AssertionError("there is no hip-python here")


@pytest.fixture(scope="session", autouse=True)
def _bindings_use_it(pytestconfig: pytest.Config, hip: Any) -> None:
    """What hip-python calls is our library: its counter shows it. And hip-python is the version that is meant."""
    if wanted := os.environ.get("GPUINTEROP_TEST_HIP_BINDINGS"):
        is_new = hip.__name__.startswith("rocm.")
        version = importlib.import_module("rocm.version" if is_new else "hip._version").__version__
        assert version == wanted
    gi.get_backend("hip")  # required in every mode
    simulator = pytestconfig.stash.get(_SIMULATOR, None)
    forwarding: Any = pytestconfig.stash.get(_FORWARDING, None)
    if simulator is None and forwarding is None:
        return

    def calls() -> int:
        return simulator.calls("hipInit") if simulator is not None else int(forwarding.gfw_calls(b"hipInit"))

    before = calls()
    assert int(hip.hipInit(0)[0]) == 0
    assert calls() == before + 1
    assert len(loaded("/libamdhip64.so")) == 1


@pytest.fixture
def device() -> gi.Device:
    return gi.get_backend("hip").device()


@pytest.fixture
def simulator(pytestconfig: pytest.Config) -> Simulator:
    """The control of the simulated runtime."""
    found = pytestconfig.stash.get(_SIMULATOR, None)
    if found is None:
        pytest.skip("needs the simulated runtime")
    return found


@pytest.fixture
def stand_in(pytestconfig: pytest.Config) -> StandIn:
    """The control of the stand-in below AMD's runtime."""
    found = pytestconfig.stash.get(_STAND_IN, None)
    if found is None:
        pytest.skip("needs AMD's runtime on the stand-in")
    return found


@pytest.fixture(autouse=True)
def _kept_the_rules(pytestconfig: pytest.Config) -> Iterator[None]:
    """On the simulated runtime and the stand-in: no fault outlives its test, nothing is left over.

    The simulated one also notes what is against the documentation.
    """
    simulator = pytestconfig.stash.get(_SIMULATOR, None)
    stand_in = pytestconfig.stash.get(_STAND_IN, None)
    if simulator is not None:
        with simulator.kept_rules("hip"):
            yield
    elif stand_in is not None:
        with stand_in.kept_rules():
            yield
    else:
        yield
