"""Shareable allocations: made here, imported here and in another process."""

from __future__ import annotations

import gc
import mmap
import os
import stat
from contextlib import ExitStack

import pytest

from ..._core.device import Device
from ...capabilities import Operation
from ...errors import HandleError, InvalidArgumentError, ResourceClosedError
from ...handles import OriginKind, VmmFd
from ..kit import requires
from ..peer import BackendPeer
from .base import LIMIT, Suite, fds, mappings, pattern, raises, read, write

EXPORT = (Operation.EXPORT_ALLOCATION, VmmFd)
IMPORT = (Operation.IMPORT_ALLOCATION, VmmFd)


class AllocationSuite(Suite):
    """Allocations passed on as descriptors."""

    @requires(EXPORT)
    def test_allocate(self, device: Device, scope: ExitStack) -> None:
        """An allocation has at least the size asked for, and its bytes are the device's to use."""
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
        """An exported handle is the caller's, says where it comes from, and can be had many times."""
        allocation = scope.enter_context(device.allocate(1 << 16))
        with allocation.export() as first, allocation.export() as second:
            assert isinstance(first, VmmFd)
            assert isinstance(second, VmmFd)
            assert first.owned
            assert first.fd != second.fd
            assert first.origin is not None
            assert first.origin.kind is OriginKind.ALLOCATION
            assert first.origin.size == allocation.size
            assert first.origin.device is not None
            assert not first.origin.device.conflicts(device.identity)

    @requires(EXPORT)
    def test_bytes_by_other_means(self, device: Device, scope: ExitStack) -> None:
        """Where the descriptor is a memory object of the system's, its bytes are the allocation's."""
        allocation = scope.enter_context(device.allocate(1 << 16))
        with allocation.export() as handle:
            assert isinstance(handle, VmmFd)
            if not stat.S_ISREG(os.fstat(handle.fd).st_mode):
                return  # a driver's own object: only another import can look into it, as the next tests do
            with mmap.mmap(handle.fd, allocation.size) as mapped:
                allocation.buffer.fill(0x29)
                assert mapped[:] == b"\x29" * allocation.size
                mapped[100:104] = b"abcd"
        assert read(allocation.buffer, 100, 4) == b"abcd"

    @requires(EXPORT, IMPORT)
    def test_import_here(self, device: Device, scope: ExitStack) -> None:
        """An import in the same process is the same memory; it consumes the handle."""
        allocation = scope.enter_context(device.allocate(1 << 16))
        handle = allocation.export()
        again = scope.enter_context(device.import_allocation(handle, allocation.size))
        assert handle.closed
        allocation.buffer.fill(0x17)
        assert read(again.buffer) == b"\x17" * allocation.size
        again.buffer.fill(0x18)
        assert read(allocation.buffer) == b"\x18" * allocation.size
        raises(InvalidArgumentError, again.export, argument="allocation")

    @requires(EXPORT, IMPORT)
    def test_import_elsewhere(self, device: Device, scope: ExitStack) -> None:
        """Another process imports it and sees the same bytes, both ways."""
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
        """What another process allocated is imported here; it stays when that process dies."""
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
    def test_refused(self, device: Device, scope: ExitStack) -> None:
        """A size of zero, beyond the object, beside the granularity, and a consumed handle are refused."""
        allocation = scope.enter_context(device.allocate(1 << 16))
        handle = allocation.export()
        for size in (0, -1, allocation.size * 2, 1 << 64):
            raises(InvalidArgumentError, lambda size=size: device.import_allocation(handle, size), argument="size")
        assert not handle.closed
        with device.import_allocation(handle, allocation.size) as again:
            raises(HandleError, lambda: device.import_allocation(handle, allocation.size))
        raises(ResourceClosedError, lambda: again.buffer)
        for size in (0, -5, 1 << 64):
            raises(InvalidArgumentError, lambda size=size: device.allocate(size), argument="size")

    @requires(EXPORT, IMPORT)
    def test_exporter_may_close_first(self, device: Device, scope: ExitStack) -> None:
        """The memory lives as long as anybody has it."""
        allocation = device.allocate(1 << 16)
        allocation.buffer.fill(0x2D)
        again = scope.enter_context(device.import_allocation(allocation.export(), allocation.size))
        allocation.close(timeout=LIMIT)
        raises(ResourceClosedError, allocation.export)
        assert read(again.buffer) == b"\x2d" * again.size

    @requires(EXPORT, IMPORT)
    def test_nothing_is_left_over(self, device: Device) -> None:
        """Round after round leaves no descriptor and no mapping behind."""

        def round_trip() -> None:
            allocation = device.allocate(1 << 16)
            again = device.import_allocation(allocation.export(), allocation.size)
            again.buffer.fill(1)
            assert read(allocation.buffer, 0, 1) == b"\x01"
            again.close(timeout=LIMIT)
            allocation.close(timeout=LIMIT)

        for _ in range(3):
            round_trip()
        gc.collect()
        open_before, mapped_before = fds(), mappings()
        for _ in range(10):
            round_trip()
        assert len(fds()) <= len(open_before), f"descriptors leak: {sorted(fds() - open_before)}"
        assert mappings() <= mapped_before, "mappings leak"

    @requires(EXPORT)
    @pytest.mark.parametrize("size", [1, 4096, 4097, 1 << 20])
    def test_sizes(self, device: Device, size: int) -> None:
        """Any size is rounded up to what the device can do, and all of it is usable."""
        with device.allocate(size) as allocation:
            assert allocation.size >= size
            allocation.buffer.fill(0x3E)
            assert read(allocation.buffer, allocation.size - 1, 1) == b"\x3e"
