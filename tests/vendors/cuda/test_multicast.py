"""What CUDA is told of multicast objects, and each documented error, on the simulated driver and on no other.

The rules are tested in tests/core/test_multicast.py; what a store reaches, by the suite of the kit. What a test
believes is the simulated driver: what is alive, and which calls came in which order.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from cuda.bindings import driver as cuda

import gpuinterop as gi
from gpuinterop._core import capability_table
from gpuinterop.testing.peer import BackendPeer
from gpuinterop.testing.simulated import assert_simulated
from gpuinterop_cuda import capabilities
from gpuinterop_cuda.backend import CudaBackend
from tests.beside import beside
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

from ..foreign_memory import memory as foreign_memory
from ..parties import REAL, native, watch

pytestmark = pytest.mark.skipif(REAL, reason="multicast is never run on a real driver")

MIB = 1 << 20
SIZE = 4 * MIB
SECOND = hasattr(cuda, "cuMulticastBindMem_v2") and os.environ.get("GPUINTEROP_SIM_CUDA_VERSION", "13010") >= "13010"
BIND_MEMORY, BIND_ADDRESS = (f"cuMulticastBind{what}{'_v2' if SECOND else ''}" for what in ("Mem", "Addr"))


@pytest.fixture(scope="module", autouse=True)
def _on_the_simulated_driver() -> None:
    assert_simulated()


@pytest.fixture
def memory(devices: list[gi.Device], scope: ExitStack) -> list[gi.Allocation]:
    """Shareable memory of each device, mapped."""
    made = [scope.enter_context(device.allocate(SIZE)) for device in devices]
    for allocation in made:
        allocation.buffer.fill(0)
    return made


@pytest.fixture
def group(devices: list[gi.Device], scope: ExitStack) -> gi.MulticastObject:
    return scope.enter_context(gi.create_multicast(devices, SIZE, gi.VmmFd))


def exported(group: gi.MulticastObject) -> gi.VmmFd:
    handle = group.export()
    assert isinstance(handle, gi.VmmFd)
    return handle


def backend() -> CudaBackend:
    native = gi.get_backend("cuda").driver
    assert isinstance(native, CudaBackend)
    return native


def test_a_mapping_is_aligned(group: gi.MulticastObject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is a multiple of the granularity, because the driver was asked for that."""
    asked: list[tuple[int, int]] = []
    watch(monkeypatch, group.devices[0], "MemAddressReserve", lambda _, *given: asked.append(given[:2]))
    with group.map() as mapping:
        assert asked == [(SIZE, group.granularity.minimum)]
        assert mapping.ptr % group.granularity.minimum == 0


def test_memory_that_cannot_be_shared_is_told_apart(devices: list[gi.Device], memory: list[gi.Allocation]) -> None:
    """A shared object takes no such memory: tests/core/test_multicast.py."""
    first, host = native(devices[0]), (ctypes.c_ubyte * 64)()
    assert backend().is_shareable(first, memory[0].buffer.ptr)
    assert not backend().is_shareable(first, ctypes.addressof(host))  # the driver says: INVALID_VALUE
    with foreign_memory("legacy", SIZE) as it:
        assert not backend().is_shareable(first, it.ptr)


# -- what is not supported --------------------------------------------------------------------------------------------


MULTICAST = (gi.Operation.CREATE_MULTICAST, gi.Operation.EXPORT_MULTICAST, gi.Operation.IMPORT_MULTICAST)
WORDS = {(gi.Operation.STREAM_MEMORY_OPS, None), (gi.Operation.CREATE_SEMAPHORE, gi.TimelineFd)}


def table(device: int = 0) -> dict[tuple[gi.Operation, Any], gi.Capability]:
    return {(cell.operation, cell.handle_type): cell for cell in capabilities.table(backend()._driver, device)}


@pytest.mark.parametrize(
    ("attribute", "gaps", "scope"),
    [
        (132, {(operation, kind) for operation in MULTICAST for kind in (None, gi.VmmFd)}, gi.Scope.DEVICE),
        (103, {(operation, gi.VmmFd) for operation in MULTICAST}, gi.Scope.PLATFORM),
        (122, WORDS, gi.Scope.DEVICE),
    ],
)
def test_what_the_device_says_no_to(simulator: Simulator, attribute: int, gaps: set[Any], scope: gi.Scope) -> None:
    before = {key: bool(found) for key, found in table().items()}
    simulator.set_attribute(0, attribute, 0)
    cells = table()
    for key, found in cells.items():
        if key in gaps:
            assert before[key]
            assert not found
            assert found.scope is scope
            assert f"attribute {attribute} is 0" in found.reason
            assert found.workaround
        elif key[0] in MULTICAST:
            assert bool(found) == before[key]
    if attribute == 132:
        assert "Device.allocate" in cells[gi.Operation.CREATE_MULTICAST, None].workaround


@pytest.mark.parametrize(("multicast", "profile"), [(1, "cuda-linux"), (0, "cuda-no-multicast")])
def test_a_profile_is_what_such_a_device_has(simulator: Simulator, multicast: int, profile: str) -> None:
    """The gaps of ``GPUINTEROP_DISABLE=profile:...`` are those of the device that it describes."""
    simulator.set_attribute(0, 132, multicast)
    cuda = gi.get_backend("cuda")
    here = cuda._table(cuda._infos()[0]).values()
    assert {gap.cell: gap for gap in capability_table._gaps_of(profile)} == {gap.cell: gap for gap in here if not gap}
    assert any(gap.cell.operation in MULTICAST and gap.cell.handle_type is None for gap in here if not gap) != multicast


def test_fabric_handles_need_a_channel(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    for operation in MULTICAST[1:]:
        simulator.set_attribute(0, 128, 1)
        monkeypatch.setattr(capabilities, "imex_channel", lambda: False)
        found = table()[operation, gi.FabricHandle]
        assert not found
        assert "IMEX channel" in found.reason
        assert "VmmFd" in found.workaround
        monkeypatch.setattr(capabilities, "imex_channel", lambda: True)
        assert table()[operation, gi.FabricHandle].support is gi.Support.UNVERIFIED


# -- what the driver says ---------------------------------------------------------------------------------------------

DOCUMENTED: dict[str, tuple[int, ...]] = {
    "cuMulticastGetGranularity": (1, 801),
    "cuMulticastCreate": (1, 3, 4, 101, 800),
    "cuMulticastAddDevice": (1, 101),
    **dict.fromkeys(
        (f"cuMulticastBind{what}{version}" for what in ("Mem", "Addr") for version in ("", "_v2")), (1, 2, 47, 401, 802)
    ),
    "cuMemMap": (1, 2),
    "cuMemSetAccess": (101,),
    "cuMemExportToShareableHandle": (1,),
    "cuMemImportFromShareableHandle": (1, 801),
}
"""By call, codes that the driver's documentation names."""


@pytest.mark.parametrize(
    ("call", "code"), [(call, code) for call, codes in DOCUMENTED.items() for code in codes], ids=str
)
def test_a_documented_error_is_named(call: str, code: int) -> None:
    """Class, call, code, symbol, and a meaning; tests/simulated/unknown_status.py has what a failed call leaves."""
    driver = backend()._driver
    error = driver.error(call.removeprefix("cu"), code)
    assert type(error) is (gi.OutOfMemoryError if code == 2 else gi.DriverError)
    newest = "CUDA_ERROR_MULTICAST_RESOURCE_FULL"  # of 47, which cuda-bindings 12.9 does not name
    assert (error.call, error.code, error.symbol) == (call, code, newest if code == 47 else cuda.CUresult(code).name)
    _, text = driver.describe(code)
    assert f"{error.symbol} ({code}): " in str(error)
    assert not str(error).endswith((text, f"{text}.")), "expected a meaning of ours, got the driver's text"


# -- the versions of the binds ----------------------------------------------------------------------------------------


def test_the_device_is_told_where_the_driver_takes_it(
    devices: list[gi.Device], memory: list[gi.Allocation], group: gi.MulticastObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second version has the device as its second argument, and the first has none.

    In either the device's own context is the current one.
    """
    seen: list[tuple[Any, ...]] = []
    contexts: list[int] = []

    def called(name: str, *arguments: int) -> None:
        seen.append((name, *arguments[1:]))
        contexts.append(int(cuda.cuCtxGetCurrent()[1]))

    for name in (BIND_MEMORY, BIND_ADDRESS):
        watch(monkeypatch, devices[1], name.removeprefix("cu"), partial(called, name))
    group.bind_memory(memory[1], 0, start=2 * MIB, size=2 * MIB)
    group.bind_address(devices[1], memory[1].buffer.ptr + 2 * MIB, 2 * MIB, 2 * MIB)
    handle, address = memory[1]._handle.handle, memory[1].buffer.ptr + 2 * MIB
    of_memory, of_address = seen
    assert of_memory[0] == BIND_MEMORY
    assert of_address[0] == BIND_ADDRESS
    told = [1] if SECOND else []
    assert of_memory[1:] == (*told, 0, int(handle), 2 * MIB, 2 * MIB, 0)
    assert of_address[1:] == (*told, 2 * MIB, address, 2 * MIB, 0)
    assert contexts == [native(devices[1]).pointer] * 2


# -- several processes ------------------------------------------------------------------------------------------------


def test_a_bind_blocks_until_the_other_process_has_added_its_device(
    simulator: Simulator, devices: list[gi.Device], scope: ExitStack
) -> None:
    """Who says assume_all_added too early blocks; other calls go on meanwhile, as do those of other threads."""
    peer = scope.enter_context(BackendPeer(devices[1]))
    group = scope.enter_context(gi.create_multicast(2, SIZE, gi.VmmFd, device=devices[0]))
    group.add_device(devices[0])
    peer.import_multicast(exported(group), 2, SIZE)
    memory = scope.enter_context(devices[0].allocate(SIZE))
    with beside(lambda: group.bind_memory(memory, assume_all_added=True)):
        assert simulator.held("cuMulticastBindMem", LIMIT)
        memory.buffer.fill(3)
        assert simulator.live()["multicast_binding"] == 0
        peer.add_device()
    assert len(group.bindings) == 1
