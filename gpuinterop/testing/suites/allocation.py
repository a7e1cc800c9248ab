"""Shareable allocations: made here, and imported here and in another process."""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import ExitStack

import pytest

from ..._core import discovery
from ..._core.allocation import Allocation
from ..._core.device import Device
from ...capabilities import Operation
from ...errors import InvalidArgumentError, ResourceClosedError
from ...handles import VmmFd
from ..exporters.base import ExporterMemory, Fill
from ..peer import BackendPeer
from ..requirements import requires
from .base import (
    GRACE,
    LIMIT,
    Gate,
    Harness,
    Suite,
    becomes_idle,
    held,
    leaves_nothing,
    new_stream,
    pattern,
    raises,
    read,
    word,
    write,
)

EXPORT = (Operation.EXPORT_ALLOCATION, VmmFd)
IMPORT = (Operation.IMPORT_ALLOCATION, VmmFd)


class AllocationSuite(Suite):
    """Allocations that are passed on as descriptors."""

    @requires(EXPORT)
    def test_allocate(self, device: Device, scope: ExitStack) -> None:
        """An allocation has at least the requested size, and the device can use its bytes."""
        allocation = scope.enter_context(device.allocate(5000))
        assert allocation.size >= 5000
        assert allocation.handle_type is VmmFd
        assert allocation.buffer.size == allocation.size
        assert allocation.buffer is allocation.buffer
        write(allocation.buffer, pattern(allocation.size))
        assert read(allocation.buffer) == pattern(allocation.size)
        allocation.buffer.fill(0x66, offset=3, size=5)
        assert read(allocation.buffer, 2, 7)[1:6] == b"\x66" * 5

    @requires(EXPORT)
    def test_export(self, device: Device, scope: ExitStack) -> None:
        """An exported handle is the caller's; each export returns a new one."""
        allocation = scope.enter_context(device.allocate(1 << 16))
        with allocation.export() as first, allocation.export() as second:
            assert isinstance(first, VmmFd)
            assert isinstance(second, VmmFd)
            assert first.owned
            assert first.fd != second.fd

    @requires(EXPORT)
    def test_bytes_by_other_means(self, device: Device, scope: ExitStack) -> None:
        """The descriptor's bytes are the allocation's, if it is a memory object of the system."""
        allocation = scope.enter_context(device.allocate(1 << 16))
        with allocation.export() as handle:
            assert isinstance(handle, VmmFd)
            if not stat.S_ISREG(os.fstat(handle.fd).st_mode):
                return  # a driver's own object: only another import can read it, as the next tests do
            with mmap.mmap(handle.fd, allocation.size) as mapped:
                allocation.buffer.fill(0x29)
                assert mapped[:] == b"\x29" * allocation.size
                mapped[100:104] = b"abcd"
        assert read(allocation.buffer, 100, 4) == b"abcd"

    @requires(EXPORT, IMPORT)
    def test_import_here(self, device: Device, scope: ExitStack) -> None:
        """An import in the same process is the same memory, and consumes the handle."""
        allocation = scope.enter_context(device.allocate(1 << 16))
        handle = allocation.export()
        again = scope.enter_context(device.import_allocation(handle, allocation.size))
        assert handle.closed
        allocation.buffer.fill(0x17)
        assert read(again.buffer) == b"\x17" * allocation.size
        again.buffer.fill(0x18)
        assert read(allocation.buffer) == b"\x18" * allocation.size

    @requires(EXPORT, IMPORT)
    def test_import_elsewhere(self, device: Device, scope: ExitStack) -> None:
        """Another process imports it; both see each other's bytes."""
        allocation = scope.enter_context(device.allocate(1 << 16))
        write(allocation.buffer, pattern(allocation.size, 1))
        peer = scope.enter_context(BackendPeer(device))
        handle = allocation.export()
        assert isinstance(handle, VmmFd)
        peer.import_allocation(handle, allocation.size)
        assert peer.read(0, allocation.size) == pattern(allocation.size, 1)
        peer.fill(0x71, 8, 8)
        assert read(allocation.buffer, 8, 8) == b"\x71" * 8

    @requires(EXPORT, IMPORT)
    def test_import_from_elsewhere(self, device: Device, scope: ExitStack) -> None:
        """Memory that another process allocated is imported here, and stays valid when that process is killed."""
        peer = scope.enter_context(BackendPeer(device))
        handle, size = peer.allocate(1 << 16, VmmFd.type_name)
        assert handle.origin is not None
        assert not handle.origin.trusted
        allocation = scope.enter_context(device.import_allocation(handle, size))
        peer.fill(0x72, 0, size)
        assert read(allocation.buffer) == b"\x72" * size
        allocation.buffer.fill(0x73)
        assert peer.read(0, 4) == b"\x73" * 4
        peer.kill()
        assert read(allocation.buffer) == b"\x73" * size

    @requires(EXPORT, IMPORT)
    def test_exporter_may_close_first(self, device: Device, scope: ExitStack) -> None:
        """The memory stays valid while one side holds it."""
        allocation = device.allocate(1 << 16)
        allocation.buffer.fill(0x2D)
        again = scope.enter_context(device.import_allocation(allocation.export(), allocation.size))
        allocation.close(timeout=LIMIT)
        raises(ResourceClosedError, allocation.export)
        assert read(again.buffer) == b"\x2d" * again.size

    @requires(EXPORT, IMPORT)
    def test_nothing_is_left_over(self, device: Device) -> None:

        def round_trip(_turn: int) -> None:
            allocation = device.allocate(1 << 16)
            again = device.import_allocation(allocation.export(), allocation.size)
            again.buffer.fill(1)
            assert read(allocation.buffer, 0, 1) == b"\x01"
            again.close(timeout=LIMIT)
            allocation.close(timeout=LIMIT)

        leaves_nothing(round_trip)

    # -- several devices ---------------------------------------------------------------------------------------------

    @requires(EXPORT)
    def test_granularity(self, device: Device) -> None:
        """Minimum and recommended granularity are positive; the second is a multiple of the first; sizes round up."""
        found = device.allocation_granularity()
        assert found.minimum > 0
        assert found.recommended >= found.minimum
        assert found.recommended % found.minimum == 0
        for size in (1, found.minimum, found.minimum + 1):
            with device.allocate(size) as allocation:
                assert allocation.size == -(-size // found.minimum) * found.minimum

    @requires(EXPORT)
    def test_access(self, device: Device, scope: ExitStack) -> None:
        """Every device with access sees the same bytes at the same address; the list names each once, its own first."""
        others = _that_can_use(device)
        allocation = scope.enter_context(device.allocate(1 << 16, access=[*others, device, *others]))
        assert allocation.device is device
        assert allocation.devices == (device, *others)
        assert allocation.buffer_on(device) is allocation.buffer
        for index, one in enumerate(allocation.devices):
            buffer = allocation.buffer_on(one)
            assert (buffer.ptr, buffer.size) == (allocation.buffer.ptr, allocation.size)
            assert buffer is allocation.buffer_on(one)
            write(buffer, pattern(allocation.size, index))
            for reader in allocation.devices:
                assert read(allocation.buffer_on(reader)) == pattern(allocation.size, index)

    @requires(EXPORT)
    def test_streams_of_all(self, device: Device, scope: ExitStack) -> None:
        """Streams of each device work on it."""
        allocation = scope.enter_context(device.allocate(1 << 16, access=_that_can_use(device)))
        for index, one in enumerate(allocation.devices):
            stream = new_stream(one, scope)
            allocation.buffer_on(one).fill(0x30 + index, offset=16 * index, size=16, stream=stream)
            stream.synchronize(LIMIT)
        for index in range(len(allocation.devices)):
            assert read(allocation.buffer, 16 * index, 16) == bytes([0x30 + index]) * 16

    @requires(EXPORT, IMPORT)
    def test_import_for_several(self, device: Device, scope: ExitStack) -> None:
        """An import can be mapped for several devices too, by any device that can use the memory."""
        allocation = scope.enter_context(device.allocate(1 << 16))
        users = [device, *_that_can_use(device)]
        for one in users:
            rest = [user for user in users if user is not one]
            again = scope.enter_context(one.import_allocation(allocation.export(), allocation.size, access=rest))
            assert again.devices == (one, *rest)
            for index, user in enumerate(again.devices):
                again.buffer_on(user).fill(0x40 + index)
                assert read(allocation.buffer) == bytes([0x40 + index]) * allocation.size


def _that_can_use(device: Device) -> list[Device]:
    """The other devices that can use its memory."""
    every = discovery.get_backend(device.backend).devices()
    return [one for one in every if one is not device and one.can_access(device)]


@requires(EXPORT)
class SharedAllocationSuite(Suite):
    """The device's allocations, imported by an exporter."""

    def _share(self, harness: Harness, size: int) -> tuple[ExporterMemory, Allocation]:
        ours = harness.scope.enter_context(harness.device.allocate(size))
        handle = ours.export()
        theirs = harness.scope.enter_context(harness.exporter.import_memory(handle, ours.size))
        assert handle.closed, "the exporter has consumed it"
        assert theirs.size == ours.size
        return theirs, ours

    @pytest.mark.parametrize("size", [1, 1 << 16, (4 << 20) + 1])
    def test_device_writes_exporter_reads(self, harness: Harness, size: int) -> None:
        """The exporter reads what the device writes, from the first byte to the last."""
        theirs, ours = self._share(harness, size)
        write(ours.buffer, pattern(ours.size, 1))
        assert theirs.read(0, ours.size) == pattern(ours.size, 1)

    @pytest.mark.parametrize("size", [1, 1 << 16, (4 << 20) + 1])
    def test_exporter_writes_device_reads(self, harness: Harness, size: int) -> None:
        """The device reads what the exporter writes, from the first byte to the last."""
        theirs, ours = self._share(harness, size)
        theirs.write(0, pattern(ours.size, 2))
        assert read(ours.buffer) == pattern(ours.size, 2)

    def test_exporters_work(self, harness: Harness) -> None:
        """The exporter's own work writes the requested bytes, and no others."""
        theirs, ours = self._share(harness, 1 << 16)
        ours.buffer.fill(0x11)
        fill = [Fill(memory=theirs, offset=4096, size=256, word=word(0x22))]
        assert harness.exporter.submit(fill=fill).done(LIMIT)
        expected = bytearray(b"\x11" * ours.size)
        expected[4096 : 4096 + 256] = b"\x22" * 256
        assert read(ours.buffer) == bytes(expected)

    def test_streams_work_is_ordered(self, harness: Harness) -> None:
        """Work after a pending wait changes the allocation after the signal, and not before."""
        theirs, ours = self._share(harness, 1 << 16)
        gate, stream = Gate(harness), harness.stream()
        ours.buffer.fill(0x33)
        gate.block(stream)
        ours.buffer.fill(0x44, stream=stream)
        assert held(stream, GRACE)
        assert theirs.read(0, 16) == b"\x33" * 16
        gate.open()
        assert becomes_idle(stream)
        assert theirs.read(0, ours.size) == b"\x44" * ours.size

    def test_several(self, harness: Harness) -> None:
        """Every export of an allocation is the same memory; an imported one cannot be exported again."""
        first, ours = self._share(harness, 1 << 16)
        second = harness.scope.enter_context(harness.exporter.import_memory(ours.export(), ours.size))
        first.write(8, b"abcd")
        assert second.read(8, 4) == b"abcd" == read(ours.buffer, 8, 4)
        raises(InvalidArgumentError, first.export, argument="memory")

    def test_device_may_close_first(self, harness: Harness) -> None:
        """The memory stays valid while the exporter holds it."""
        ours = harness.device.allocate(1 << 16)
        write(ours.buffer, pattern(ours.size, 3))
        size = ours.size
        theirs = harness.scope.enter_context(harness.exporter.import_memory(ours.export(), size))
        ours.close(timeout=LIMIT)
        assert theirs.read(0, size) == pattern(size, 3)

    def test_nothing_is_left_over(self, harness: Harness) -> None:

        def round_trip(seed: int) -> None:
            ours = harness.device.allocate(1 << 16)
            with harness.exporter.import_memory(ours.export(), ours.size) as theirs:
                ours.buffer.fill(seed)
                assert theirs.read(0, 1) == bytes([seed])
            ours.close(timeout=LIMIT)

        leaves_nothing(round_trip)
