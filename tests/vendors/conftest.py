"""Tests of one vendor's backend: of the vendor, and on the driver, that the run has.

GPUINTEROP_TEST_VENDOR is ``cuda`` or ``hip``. GPUINTEROP_TEST_CUDA or GPUINTEROP_TEST_HIP says which driver that is:

- ``simulated``: our own test double, with the vendor's documented behaviour. The default.
- ``real``: the vendor's driver and GPU.
- ``amd``, of HIP alone: AMD's runtime, built from AMD's sources (``python -m tests.simulated.amd``;
  GPUINTEROP_TEST_HIP_AMD names the library), on a stand-in for the HSA runtime below it, which is ours. It shows AMD's
  code above HSA, not hardware.

A process has one driver of a vendor, and keeps it: these run in a process of their own, ``pytest tests/vendors``.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import gpuinterop as gi
from gpuinterop.testing.plugin import is_ours
from gpuinterop.testing.simulated import build
from tests import leftovers
from tests.simulated.driver import Simulator, hide_rocm, loaded, preload
from tests.simulated.stand_in import StandIn

from .parties import MODE, PARTIES, REAL, SEVERAL, WITHOUT_GPU, open_party
from .table import VENDOR, VENDORS

_HERE: Final = Path(__file__).parent
_MARKERS: Final = {
    "simulated": "gpuinterop_simulated_driver",
    "amd": "gpuinterop_stand_in_device",  # of the library below it, which is loaded with it
}
_SIMULATOR = pytest.StashKey[Simulator]()
_STAND_IN = pytest.StashKey[StandIn]()

# Tests of the subfolder that come first import suites.
pytest.register_assert_rewrite("gpuinterop.testing.suites")
collect_ignore = [name for name in VENDORS if name != VENDOR.name]


def pytest_configure(config: pytest.Config) -> None:
    if MODE not in VENDOR.modes:
        pytest.exit(f"GPUINTEROP_TEST_{VENDOR.name.upper()} is one of {', '.join(VENDOR.modes)}, not {MODE!r}.", 4)
    for other in collect_ignore:
        if any((_HERE / other) in (path, *path.parents) for path in map(_path, config.args)):
            pytest.exit(f"these are tests of {other}: set GPUINTEROP_TEST_VENDOR={other}.", 4)
    config.option.gpuinterop_backend = [VENDOR.name]
    config.option.gpuinterop_require = [VENDOR.name]
    if MODE in ("amd", "real"):  # the runtime's own threads and memory come and go
        leftovers.kept_by_drivers.extend([r"thread \d+, ", r"descriptor \d+ of (/memfd:stand-in|/dev/)"])
    if MODE == "real":
        leftovers.kept_by_drivers.append(r"descriptor \d+ of (anon_inode:\[eventfd\]|pipe:)")
    if REAL:
        return
    # As AMD's builds with assertions do (ROCm/clr #72): a call that no gate is in front of ends the run. "0" gives the
    # others, which say hipErrorNotSupported.
    os.environ.setdefault("GPUINTEROP_SIM_HIP_ABORT", "1")
    if drivers := loaded(f"/{VENDOR.library.partition('.')[0]}.so"):
        pytest.exit(
            f"this process has a driver of {VENDOR.title} already ({', '.join(drivers)}): "
            "run `pytest tests/vendors` by itself.",
            4,
        )
    # What devices share with their peers is tested as well.
    os.environ.setdefault("GPUINTEROP_SIM_DEVICES", "2")
    os.environ.setdefault("GPUINTEROP_STANDIN_DEVICES", "2")
    try:
        library = _driver()
    except gi.BackendUnavailableError as error:
        pytest.exit(str(error), 4)
    if VENDOR.name == "hip":
        hide_rocm(library.parent)
    preload(library)
    if not hasattr(ctypes.CDLL(VENDOR.library), _MARKERS[MODE]):
        pytest.exit(f"{VENDOR.library} is not the {MODE} one, although that was loaded first.", 4)
    if MODE == "simulated":
        config.stash[_SIMULATOR] = Simulator(library)
    else:
        config.stash[_STAND_IN] = StandIn()
    config.option.gpuinterop_simulated = [VENDOR.name]


def _path(argument: str) -> Path:
    return Path(argument.partition("::")[0]).resolve()


def _driver() -> Path:
    """The library, built if need be."""
    if MODE == "amd":
        return Path(os.environ["GPUINTEROP_TEST_HIP_AMD"]).resolve()
    # AMD's library for Linux has no mipmapped arrays; one run has them, to try the calls.
    extra = ("-DGIP_MIPMAP=1",) if os.environ.get("GPUINTEROP_TEST_HIP_MIPMAP") else ()
    return build(VENDOR.name, extra=extra if VENDOR.name == "hip" else ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if WITHOUT_GPU:
        # The others are there as its peers.
        others = re.compile(rf"\b{VENDOR.name}:[1-9]")
        items[:] = [item for item in items if not (is_ours(item) and others.search(item.name))]


def pytest_report_header() -> str:
    aborts = MODE != "real" and VENDOR.name == "hip" and os.environ.get("GPUINTEROP_SIM_HIP_ABORT", "0") != "0"
    return f"{VENDOR.title} under test: {MODE}{', which aborts in an import of a semaphore' if aborts else ''}"


@pytest.fixture(scope="session")
def bindings() -> Any:
    """The bindings' module, as the backend imports it."""
    for name in VENDOR.bindings:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise AssertionError(f"expected {' or '.join(VENDOR.bindings)}, got none of them")


@pytest.fixture(scope="session", autouse=True)
def _bindings_use_it(pytestconfig: pytest.Config, bindings: Any) -> None:
    """What the bindings call is our library: its counter shows it. And they are the version that is meant."""
    if wanted := os.environ.get(f"GPUINTEROP_TEST_{VENDOR.name.upper()}_BINDINGS"):
        assert importlib.import_module(VENDOR.bindings[bindings.__name__]).__version__ == wanted
    gi.get_backend(VENDOR.name)  # required in every mode
    simulator = pytestconfig.stash.get(_SIMULATOR, None)
    if simulator is None:
        return
    init = VENDOR.call("Init")
    before = simulator.calls(init)
    assert int(getattr(bindings, init)(0)[0]) == 0
    assert simulator.calls(init) == before + 1
    assert len(loaded(f"/{VENDOR.library.partition('.')[0]}.so")) == 1


@pytest.fixture
def device() -> gi.Device:
    return gi.get_backend(VENDOR.name).device()


@pytest.fixture
def devices() -> list[gi.Device]:
    found = list(gi.get_backend(VENDOR.name).devices())
    assert len(found) >= 2 or not SEVERAL
    if len(found) < 2:
        pytest.skip("needs two devices")
    return found[:2]


@pytest.fixture
def peers(devices: list[gi.Device]) -> list[gi.Device]:
    """Two devices that can use each other's memory."""
    first, second = devices
    if not (first.can_access(second) and second.can_access(first)):
        pytest.skip("the devices have no peer access")
    return devices


@pytest.fixture
def backend() -> Any:
    """What the core calls, whose type is the vendor's own."""
    return gi.get_backend(VENDOR.name).driver


@pytest.fixture
def memfd(device: gi.Device) -> Iterator[Any]:
    with open_party("memfd", device) as exporter:
        yield exporter


@pytest.fixture(params=PARTIES)
def exporter(request: pytest.FixtureRequest, device: gi.Device) -> Iterator[Any]:
    with open_party(request.param, device) as exporter:
        yield exporter


@pytest.fixture
def simulator(pytestconfig: pytest.Config) -> Simulator:
    """The control of the simulated driver."""
    found = pytestconfig.stash.get(_SIMULATOR, None)
    if found is None:
        pytest.skip("needs the simulated driver")
    return found


@pytest.fixture
def windows(simulator: Simulator) -> Iterator[Simulator]:
    """The simulated driver takes what drivers take on Windows, and keeps what it was given."""
    simulator.set_platform("windows")
    yield simulator
    simulator.set_platform("linux")


@pytest.fixture
def stand_in(pytestconfig: pytest.Config) -> StandIn:
    """The control of the stand-in below AMD's runtime."""
    found = pytestconfig.stash.get(_STAND_IN, None)
    if found is None:
        pytest.skip("needs AMD's runtime on the stand-in")
    return found


def pytest_count_left(config: pytest.Config) -> Counter[str]:
    """A simulated driver's objects, and what it noted against the documentation."""
    simulator = config.stash.get(_SIMULATOR, None)
    return Counter() if simulator is None else simulator.left()


@pytest.fixture(autouse=True)
def _no_fault_lasts(pytestconfig: pytest.Config) -> Iterator[None]:
    """On a simulated driver and the stand-in no fault outlives its test."""
    simulator = pytestconfig.stash.get(_SIMULATOR, None)
    stand_in = pytestconfig.stash.get(_STAND_IN, None)
    if simulator is not None:
        simulator.begin()
        yield
        simulator.reset()
    elif stand_in is not None:
        with stand_in.kept_rules():
            yield
    else:
        yield
