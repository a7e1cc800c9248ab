"""The capability table: every cell has a reference, a gap says what to do instead, and nothing claims to be shown."""

from __future__ import annotations

import dataclasses
import platform as platform_module
from types import SimpleNamespace
from typing import Any, cast

import pytest

import gpuinterop as gi
from gpuinterop import handles as h
from gpuinterop._core import capability_table
from gpuinterop.capabilities import DOMAIN, Capability, Cell
from gpuinterop_hip import capabilities
from gpuinterop_hip.backend import HipBackend
from gpuinterop_hip.driver import Driver
from tests.simulated.driver import Simulator

from ..parties import SIMULATED, WITHOUT_GPU

Op = gi.Operation
LINUX_SEMAPHORES = (Op.IMPORT_SEMAPHORE, Op.SIGNAL_SEMAPHORE, Op.WAIT_SEMAPHORE)
WINDOWS_SEMAPHORES: set[type[Any]] = {h.OpaqueWin32, h.OpaqueWin32Kmt, h.D3D12Fence, h.TimelineWin32}
WINDOWS_MEMORY: set[type[Any]] = {
    h.OpaqueWin32,
    h.OpaqueWin32Kmt,
    h.D3D12Heap,
    h.D3D12Resource,
    h.D3D11Resource,
    h.D3D11ResourceKmt,
}


@pytest.fixture
def driver() -> Driver:
    native = gi.get_backend("hip").driver
    assert isinstance(native, HipBackend)
    return cast(Driver, native._driver)


@pytest.fixture(params=["linux", "win32"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(capabilities, "sys", SimpleNamespace(platform=request.param))
    return str(request.param)


def table(driver: Driver) -> dict[Cell, Capability]:
    return {found.cell: found for found in capabilities.table(driver, 0)}


def usable(cells: dict[Cell, Capability], operation: gi.Operation) -> set[Any]:
    return {cell.handle_type for cell, found in cells.items() if cell.operation is operation and found}


def test_every_cell_is_filled(driver: Driver, platform: str) -> None:
    """`gpuinterop info --json` prints exactly these."""
    cells = table(driver)
    assert [cell for cell in DOMAIN if cell in cells] == list(cells)
    for found in cells.values():
        assert found.support in (gi.Support.UNVERIFIED, gi.Support.UNSUPPORTED), f"{found.cell}: nobody has shown it"
        assert found.scope
        assert found.reason.endswith("."), found
        assert found.reference
        assert found.usable or found.workaround, found


def test_what_linux_has(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "sys", SimpleNamespace(platform="linux"))
    cells = table(driver)
    for operation in (Op.IMPORT_MEMORY, Op.MAP_BUFFER):
        assert usable(cells, operation) == {h.OpaqueFd, h.DmaBufFd}
    for operation in (*LINUX_SEMAPHORES, Op.WAIT_TIMEOUT, Op.IMPORT_BY_NAME, Op.GRAPH_CAPTURE):
        assert usable(cells, operation) == set()
    assert usable(cells, Op.CREATE_SEMAPHORE) == {h.TimelineFd}
    assert usable(cells, Op.STREAM_MEMORY_OPS) == {None}
    assert h.VmmFd in usable(cells, Op.EXPORT_ALLOCATION) & usable(cells, Op.IMPORT_ALLOCATION)
    for operation in (Op.CREATE_MULTICAST, Op.EXPORT_MULTICAST, Op.IMPORT_MULTICAST):
        assert usable(cells, operation) == set()
    for kind in (h.OpaqueFd, h.TimelineFd):
        reasons = [cells[Cell(operation, kind)] for operation in LINUX_SEMAPHORES]
        assert "aborts the process" in reasons[0].reason
        assert all("does nothing" in found.reason for found in reasons[1:])
        assert all("gpuinterop.bridge.Bridge(device)" in found.workaround for found in reasons)
        assert all("ROCm/clr #72" in found.reference for found in reasons)


def test_what_windows_has(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "sys", SimpleNamespace(platform="win32"))
    cells = table(driver)
    for operation in (Op.IMPORT_MEMORY, Op.MAP_BUFFER):
        assert usable(cells, operation) == WINDOWS_MEMORY
    for operation in LINUX_SEMAPHORES:
        assert usable(cells, operation) == WINDOWS_SEMAPHORES
    # A name is read for memory alone.
    assert usable(cells, Op.IMPORT_BY_NAME) == {kind for kind in WINDOWS_MEMORY if kind.nameable}
    assert usable(cells, Op.CREATE_SEMAPHORE) == set()
    assert usable(cells, Op.EXPORT_ALLOCATION) == set()
    assert "#288" in cells[Cell(Op.IMPORT_SEMAPHORE, h.TimelineWin32)].reference


@pytest.mark.skipif(not SIMULATED, reason="needs the simulated runtime")
@pytest.mark.parametrize(
    ("attribute", "operation", "kind", "scope"),
    [
        (10013, Op.STREAM_MEMORY_OPS, None, gi.Scope.DEVICE),
        (10013, Op.CREATE_SEMAPHORE, h.TimelineFd, gi.Scope.DEVICE),
        (89, Op.EXPORT_ALLOCATION, h.VmmFd, gi.Scope.DEVICE),
        (89, Op.IMPORT_ALLOCATION, h.VmmFd, gi.Scope.DEVICE),
    ],
)
def test_a_device_that_says_no(
    simulator: Simulator,
    driver: Driver,
    attribute: int,
    operation: gi.Operation,
    kind: Any,
    scope: gi.Scope,
) -> None:
    cell = Cell(operation, kind)
    assert table(driver)[cell]
    simulator.set_attribute(0, attribute, 0)
    found = table(driver)[cell]
    assert not found
    assert found.scope is scope
    assert str(attribute) in found.reason


@pytest.mark.parametrize(("value", "gap"), [("1", True), ("0", False), ("", False)])
def test_the_command_processor_waits_for_signal_memory_only(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, value: str, gap: bool
) -> None:
    monkeypatch.setenv("GPU_STREAMOPS_CP_WAIT", value)
    cells = table(driver)
    for cell in (Cell(Op.STREAM_MEMORY_OPS), Cell(Op.CREATE_SEMAPHORE, h.TimelineFd)):
        found = cells[cell]
        assert bool(found) is not gap
        if gap:
            assert "hipMallocSignalMemory" in found.reason
            assert "unset GPU_STREAMOPS_CP_WAIT" in found.workaround


def test_arrays_only_where_the_symbol_is(driver: Driver) -> None:
    found = table(driver)[Cell(Op.MAP_MIPMAPPED_ARRAY, h.OpaqueFd)]
    there = hasattr(driver.library, "hipExternalMemoryGetMappedMipmappedArray")
    assert bool(found) is there
    if not there:
        assert found.reference == "ROCm/hip #3779"
        assert "does not export" in found.reason


@pytest.mark.parametrize(
    ("symbol", "cells", "reference"),
    [
        ("hipDestroyExternalMemory", {Cell(Op.IMPORT_MEMORY, h.OpaqueFd)}, "External Resource Interoperability"),
        ("hipMemRelease", {Cell(Op.EXPORT_ALLOCATION, h.VmmFd), Cell(Op.IMPORT_ALLOCATION, h.VmmFd)}, "Virtual Memory"),
        ("hipMemUnmap", {Cell(Op.EXPORT_ALLOCATION, h.VmmFd), Cell(Op.IMPORT_ALLOCATION, h.VmmFd)}, "Virtual Memory"),
        ("hipMemCreate", {Cell(Op.EXPORT_ALLOCATION, h.VmmFd)}, "Virtual Memory"),
        (
            "hipHostGetDevicePointer",
            {Cell(Op.STREAM_MEMORY_OPS), Cell(Op.CREATE_SEMAPHORE, h.TimelineFd)},
            "Stream Memory Operations",
        ),
        (
            "hipHostUnregister",
            {Cell(Op.STREAM_MEMORY_OPS), Cell(Op.CREATE_SEMAPHORE, h.TimelineFd)},
            "Stream Memory Operations",
        ),
    ],
)
def test_a_symbol_that_is_missing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, symbol: str, cells: set[Cell], reference: str
) -> None:
    """What cannot be done without it is a gap that names it, under the heading where AMD documents it."""
    before = table(driver)
    has = Driver.has
    monkeypatch.setattr(Driver, "has", lambda self, name: name != symbol and has(self, name))
    after = table(driver)
    assert all(before[cell] for cell in cells)
    assert {cell for cell in DOMAIN if before[cell] and not after[cell]} >= cells
    for cell in cells:
        assert symbol in after[cell].reason
        assert reference in after[cell].reference
        assert after[cell].scope is gi.Scope.RUNTIME


@pytest.mark.parametrize(("machine", "words"), [("x86_64", "pip install 'hip-python>=10'"), ("aarch64", "PyPI has")])
def test_fabric_handles_name_bindings_that_there_are(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, machine: str, words: str
) -> None:
    monkeypatch.setattr(capabilities, "has_fabric_type", lambda driver: False)
    monkeypatch.setattr(platform_module, "machine", lambda: machine)
    found = table(driver)[Cell(Op.EXPORT_ALLOCATION, h.FabricHandle)]
    assert found.scope is gi.Scope.BINDINGS
    assert found.workaround.startswith(words)
    assert found.workaround.endswith(".")


def test_the_device_is_matched_by_its_bus() -> None:
    """HIP's UUID is not Vulkan's: it must not be offered, or a wrong match would look right."""
    device = gi.get_backend("hip").device()
    assert device.uuid is None
    assert device.pci_bus_id is not None
    assert gi.get_backend("hip").driver is device.driver
    found = gi.DeviceIdentity(name="as Vulkan sees it", uuid=bytes(range(16)), pci_bus_id=device.pci_bus_id)
    assert device.identity.pci_bus_id == found.pci_bus_id
    assert "PCI bus id" in device.info.note
    assert device.info.dlpack == (10, 0)
    assert dataclasses.asdict(device.info)["array_interface"] == "__cuda_array_interface__"


@pytest.mark.skipif(not WITHOUT_GPU, reason="needs the simulated runtime or AMD's own")
def test_the_profile_is_what_this_runtime_has(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gaps of ``GPUINTEROP_DISABLE=profile:hip-linux`` are this device's, with the newest bindings."""
    if driver.has("hipExternalMemoryGetMappedMipmappedArray"):
        pytest.skip("this runtime is built with what AMD's lacks")
    monkeypatch.delenv("GPU_STREAMOPS_CP_WAIT", raising=False)
    monkeypatch.setattr(capabilities, "has_fabric_type", lambda driver: True)
    backend = gi.get_backend("hip")
    here = backend._table(backend._infos()[0]).values()
    assert {gap.cell: gap for gap in capability_table._gaps_of("hip-linux")} == {
        gap.cell: gap for gap in here if not gap
    }
