"""Memory that other libraries have allocated: what is behind a pointer, and its way to another process."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from gpuinterop.backend import Address, Behind, Block, SharingBackend
from gpuinterop.handles import Handle, IpcMemHandle, VmmFd

from .allocations import Allocation, Mapped, access_of, native_handle_type
from .driver import Context, Made, Room

# CUpointer_attribute by number. The bindings 13.3 cannot ask for the last three.
_MEMORY_TYPE, _MANAGED, _ORDINAL, _LEGACY_IPC, _HANDLE_TYPES, _POOL = 2, 8, 9, 10, 14, 17
_ALLOCATION: Final = (11, 12, 7)  # RANGE_START_ADDR, RANGE_SIZE, BUFFER_ID: several may lie in one mapping
_MAPPING: Final = (19, 18, 20)  # MAPPING_BASE_ADDR, MAPPING_SIZE, MEMORY_BLOCK_ID: a range may be of many
_HOST: Final = 1  # CU_MEMORYTYPE_HOST
_POSIX_FD: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_LAZY_PEERS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Opened(Made):
    """Memory of another process, opened by an IPC handle."""

    back = "cuIpcCloseMemHandle"
    blocks = True


class Joined(Made):
    """Address range with another process's VMM allocations, one behind the other."""

    back = "cuMemAddressFree"

    def __init__(self, context: Context, size: int) -> None:
        super().__init__(context, size)
        self.pieces: list[Mapped] = []

    def join(self, handles: Sequence[Handle], sizes: Sequence[int]) -> None:
        (size,), driver = self.more, self.device.driver
        kind = native_handle_type(driver, VmmFd)
        self.make("cuMemAddressReserve", size, 0, 0, 0)
        place = int(self.handle)
        for handle, count in zip(handles, sizes, strict=True):
            assert isinstance(handle, VmmFd)
            allocation, piece = Allocation(self.device, count, VmmFd), Mapped(self.device, count)
            allocation.make("cuMemImportFromShareableHandle", handle.fd, kind)
            try:
                self.pieces.append(piece)
                piece.add("cuMemMap", driver.api.CUdeviceptr(place), count, 0, allocation.handle, 0)
            finally:
                allocation.free()  # the mapping keeps the memory
            place += count
        driver.call("cuMemSetAccess", self.handle, size, [access_of(self.device)], 1)

    def free(self) -> None:
        for piece in self.pieces:
            piece.free()
        super().free()


class Sharing(Room, SharingBackend):
    """Arrays of other libraries, by legacy IPC or by the VMM handles that they consist of."""

    joins_blocks = True

    def block_at(self, address: Address) -> Block:
        """``cuPointerGetAttribute``."""
        if not (place := self._ask(address, _MEMORY_TYPE)):
            return Block(behind=Behind.NOTHING)
        ordinal = self._ask(address, _ORDINAL)
        if place == _HOST or self._ask(address, _MANAGED):
            return Block(behind=Behind.HOST if place == _HOST else Behind.MANAGED, ordinal=ordinal)
        if self._ask(address, _LEGACY_IPC):
            behind, numbers = Behind.IPC, _ALLOCATION
        elif self._ask(address, _POOL):
            return Block(behind=Behind.POOL, ordinal=ordinal)
        else:
            behind, numbers = Behind.VMM if self._ask(address, _HANDLE_TYPES) & _POSIX_FD else Behind.CLOSED, _MAPPING
        start, size, key = (self._ask(address, number) for number in numbers)
        return Block(behind=behind, address=start, size=size, key=key, ordinal=ordinal)

    def export_block(self, device: Context, block: Block) -> Handle:
        """``cuIpcGetMemHandle``; ``cuMemRetainAllocationHandle`` and ``cuMemExportToShareableHandle``."""
        if block.behind is Behind.IPC:
            native = device.call("cuIpcGetMemHandle", block.address)
            return IpcMemHandle(ctypes.string_at(native.getPtr(), IpcMemHandle.SIZE))
        allocation = Allocation(device, block.size, VmmFd)
        device.run(allocation.make, "cuMemRetainAllocationHandle", block.address)
        try:
            return allocation.export(VmmFd)
        finally:
            allocation.release()

    def attach_blocks(
        self, device: Context, handles: Sequence[Handle], sizes: Sequence[int]
    ) -> tuple[Opened | Joined, Address]:
        """``cuIpcOpenMemHandle``; ``cuMemImportFromShareableHandle`` and ``cuMemMap``, then ``cuMemSetAccess``."""
        if isinstance(handle := handles[0], IpcMemHandle):
            native = self._driver.api.CUipcMemHandle()
            ctypes.memmove(native.getPtr(), handle.data, IpcMemHandle.SIZE)
            opened = Opened(device).create("cuIpcOpenMemHandle", native, _LAZY_PEERS)
            return opened, int(opened.handle)
        joined = Joined(device, sum(sizes))
        return device.create(joined, lambda: joined.join(handles, sizes)), int(joined.handle)

    detach_blocks: Any = staticmethod(Made.release)
    """``cuIpcCloseMemHandle``; ``cuMemUnmap`` and ``cuMemAddressFree``."""

    def _ask(self, address: Address, attribute: int) -> int:
        """An attribute, 0 if the driver does not know the address; all are written as 8 bytes or fewer."""
        found = ctypes.c_uint64()
        code = self._driver.entry("cuPointerGetAttribute")(ctypes.byref(found), attribute, ctypes.c_uint64(address))
        return 0 if code else found.value
