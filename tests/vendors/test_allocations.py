"""Shareable allocations on several devices.

On a simulated driver what it keeps and what it noted is the oracle; everywhere, bytes that the other device, or another
process, has written.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.peer import BackendPeer
from tests.simulated.driver import Simulator

from .parties import MODE
from .table import VENDOR

MIB = 1 << 20


def content(buffer: gi.Buffer, size: int | None = None) -> bytes:
    data = bytearray(buffer.size if size is None else size)
    buffer.copy_to_host(data)
    return bytes(data)


def exported(allocation: gi.Allocation, *, known: bool = True) -> gi.VmmFd:
    """A handle; not `known`: nothing says where its memory is."""
    handle = allocation.export()
    assert isinstance(handle, gi.VmmFd)
    if not known:
        handle.origin = None
    return handle


# -- one allocation, several devices -------------------------------------------------------------------------


def test_both_granularities_are_the_drivers(simulator: Simulator, devices: list[gi.Device]) -> None:
    """The simulated driver's two sizes differ."""
    simulator.forget_log()
    assert devices[1].allocation_granularity() == gi.Granularity(2 * MIB, 4 * MIB)
    call = f"{VENDOR.prefix}MemGetAllocationGranularity"
    assert simulator.trace(call) == [call, call]


def test_no_program_inherits_an_exported_descriptor(simulator: Simulator, device: gi.Device) -> None:
    """Neither that of an allocation nor that of an array's memory; the driver returns descriptors that they would."""
    driver: Any = device.driver
    with device.allocate(1) as allocation:
        block = driver.find_blocks()(allocation.buffer.ptr)
        for handle in (exported(allocation), driver.export_block(device._handle, block)):
            with handle:
                assert not os.get_inheritable(handle.fd)


# -- devices without access ----------------------------------------------------------------------------------


def test_a_device_that_cannot_is_refused_before_the_driver(simulator: Simulator, devices: list[gi.Device]) -> None:
    first, second = devices
    simulator.set_peer_access(1, 0, False)
    simulator.forget_log()
    with pytest.raises(gi.UnsupportedError) as caught:
        first.allocate(1, access=[second])
    _names_both(caught.value, first, gi.Operation.EXPORT_ALLOCATION)
    assert simulator.trace(f"{VENDOR.prefix}MemCreate") == []
    assert not second.can_access(first)
    assert first not in second.peers
    with second.allocate(1, access=[first]) as allocation:  # the other way round it can
        assert allocation.buffer_on(first).ptr == allocation.buffer.ptr


def test_a_real_device_that_cannot_is_refused(devices: list[gi.Device]) -> None:
    """As the machine has it; the simulated one has peer access."""
    first, second = devices
    if second.can_access(first):
        pytest.skip("the devices have peer access")
    with first.allocate(1) as allocation, exported(allocation) as handle:
        with pytest.raises(gi.UnsupportedError) as caught:
            second.import_allocation(handle, allocation.size)
        _names_both(caught.value, first, gi.Operation.IMPORT_ALLOCATION)


def _names_both(error: gi.UnsupportedError, first: gi.Device, operation: gi.Operation) -> None:
    capability = error.capability
    assert (capability.operation, capability.handle_type) == (operation, gi.VmmFd)
    assert capability.scope is gi.Scope.DEVICE
    assert f"device 0, {first.name}" in capability.reason
    assert "device 1" in capability.reason
    assert "can_access" in capability.workaround


# -- where memory is -----------------------------------------------------------------------------------------


@pytest.mark.xfail(MODE == "amd", reason="it names the device that has imported it (hip_vm.cpp:238)", strict=True)
def test_where_imported_memory_is(peers: list[gi.Device], scope: ExitStack) -> None:
    """The driver says it, whatever device has imported it."""
    first, second = peers
    allocation = scope.enter_context(first.allocate(1))
    for device in (first, second):
        again = scope.enter_context(
            device.import_allocation(exported(allocation, known=False), allocation.size, access=peers)
        )
        told = VENDOR.tells_own or device is not first
        assert again.driver.location(again._handle) == (0 if told else None)
        assert set(again.devices) == set(peers)
        again.buffer_on(first).fill(device.ordinal + 7)
        assert content(again.buffer_on(second), 4) == bytes([device.ordinal + 7]) * 4 == content(allocation.buffer, 4)


def test_access_that_the_driver_refuses_is_named(backend: Any) -> None:
    """A refusal takes the mapping back: tests/simulated/unknown_status.py."""
    error = backend._driver.error("MemSetAccess", 801)
    assert (error.call, error.code) == (f"{VENDOR.prefix}MemSetAccess", 801)
    assert "no peer access" in str(error)


# -- two processes -------------------------------------------------------------------------------------------


def test_two_processes_with_a_device_each(peers: list[gi.Device], scope: ExitStack) -> None:
    """What one allocates on its device is imported by the other on its own: bytes both ways, either allocating."""
    first, second = peers
    peer = scope.enter_context(BackendPeer(second))
    ours = scope.enter_context(first.allocate(3 * MIB))
    ours.buffer.fill(0x21)
    peer.import_allocation(exported(ours), ours.size)
    assert peer.read(0, ours.size) == b"\x21" * ours.size
    peer.fill(0x22, 5, 1000)
    assert content(ours.buffer, 1006) == b"\x21" * 5 + b"\x22" * 1000 + b"\x21"
    handle, size = peer.allocate(3 * MIB, gi.VmmFd.type_name)
    theirs = scope.enter_context(first.import_allocation(handle, size))
    peer.fill(0x31, 0, size)
    assert content(theirs.buffer) == b"\x31" * size
    theirs.buffer.fill(0x32, offset=size - 1, size=1)
    assert peer.read(size - 2, 2) == b"\x31\x32"
    peer.kill()
    assert content(theirs.buffer)[-2:] == b"\x31\x32"


# -- fabric handles ----------------------------------------------------------------------------------------------------

FABRIC: str = """
import os, subprocess, sys
import gpuinterop as gi
from gpuinterop.testing.simulated import assert_simulated
from tests.simulated.driver import Simulator
vendor, attribute, importing = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
assert_simulated(vendor)
if vendor == "cuda":  # the simulated driver's channel is no device node
    from gpuinterop_cuda import capabilities
    capabilities.imex_channel = lambda: True
simulator = Simulator.attach(vendor)
for ordinal in (0, 1):
    simulator.set_attribute(ordinal, attribute, 1)  # as it is where the machine has no channel, too
first, second = gi.get_backend(vendor).devices()

def content(buffer):
    data = bytearray(8)
    buffer.copy_to_host(data)
    return data.hex()

if not importing:
    before = simulator.live()
    try:
        allocation = first.allocate(1, gi.FabricHandle, access=[second])
    except gi.DriverError as error:
        print("refused", error.call, error.code, simulator.live()["vmm_handle"] == before["vmm_handle"], error)
        sys.exit()
    allocation.buffer.fill(0x11)
    handle = allocation.export()
    assert isinstance(handle, gi.FabricHandle) and allocation.size == first.allocation_granularity(gi.FabricHandle)[0]
    child = subprocess.run(
        [sys.executable, "-c", os.environ["PROGRAM"], vendor, str(attribute), handle.data.hex(), str(allocation.size)],
        env=dict(os.environ, GPUINTEROP_SIM_FABRIC=os.environ["CHANNEL"]), capture_output=True, text=True, timeout=300,
    )
    assert child.returncode == 0, child.stderr
    print(child.stdout.strip(), content(allocation.buffer_on(second)))
    allocation.close(timeout=300)
else:
    handle, size = gi.FabricHandle(bytes.fromhex(importing[0])), int(importing[1])
    try:
        allocation = second.import_allocation(handle, size)
    except gi.DriverError as error:
        print("refused", error.call, error.code, simulator.live()["vmm_handle"] == 0, error)
        sys.exit()
    print("imported", content(allocation.buffer))
    allocation.buffer.fill(0x22, size=4)
    allocation.close(timeout=300)
assert simulator.violations() == [], simulator.violations()
"""


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ("7", "7", "imported 1111111111111111 2222222211111111"),
        ("7", "8", "refused MemImportFromShareableHandle"),
        ("7", "", "refused MemImportFromShareableHandle"),
        ("", "7", "refused MemCreate"),
    ],
)
def test_fabric_handles(
    simulator: Simulator, device: gi.Device, bindings: Any, ours: str, theirs: str, found: str
) -> None:
    """Two processes on two devices, which need the same channel; empty: none. Else the error says what is missing."""
    if VENDOR.name == "hip" and not hasattr(bindings.hipMemAllocationHandleType, "hipMemHandleTypeFabric"):
        with pytest.raises(gi.UnsupportedError, match="hip-python before 10"):
            device.allocate(1, gi.FabricHandle)
        return
    program = f"import sys; sys.argv[1:] = {[VENDOR.name, str(VENDOR.channel)]!r}\n{FABRIC}"
    printed = simulator.run(program, GPUINTEROP_SIM_FABRIC=ours, CHANNEL=theirs, PROGRAM=FABRIC).strip()
    if found.startswith("refused"):
        found = f"{found.replace('refused ', 'refused ' + VENDOR.prefix)} {VENDOR.without_channel} True"
        assert all(word in printed for word in VENDOR.without_channel_says)
    assert printed.startswith(found)
