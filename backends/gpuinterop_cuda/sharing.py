"""Memory that other libraries have allocated: what is at a pointer, and its way to another process."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Final

from gpuinterop.backend import Address, Behind, Block
from gpuinterop.handles import AllocationHandle, Handle, OpaqueWin32, VmmFd
from gpuinterop.native_driver.allocations import Allocation, NativeSharing
from gpuinterop.native_driver.driver import NativeDevice
from gpuinterop.native_driver.memory import BUFFER_ID, HOST, IS_MANAGED, MEMORY_TYPE, ORDINAL, pointer_attribute

_LEGACY_IPC, _HANDLE_TYPES, _POOL = 10, 14, 17  # CUpointer_attribute
_ALLOCATION: Final = (11, 12, BUFFER_ID)  # RANGE_START_ADDR, RANGE_SIZE: several may lie in one mapping
_MAPPING: Final = (19, 18, 20)  # MAPPING_BASE_ADDR, MAPPING_SIZE, MEMORY_BLOCK_ID: a range may be of many
_POSIX_FD: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


# Windows' OBJECT_ATTRIBUTES without any, with which the driver makes an NT handle: its length and five fields.
_OBJECT_ATTRIBUTES: Final = ctypes.create_string_buffer(struct.pack("=I44x", 48))


class Sharing(NativeSharing):
    """Shareable allocations, and arrays of other libraries."""

    joins_blocks = True

    def properties(self, device: NativeDevice, kind: type[AllocationHandle], metadata: int = 0) -> bytes:
        if kind is OpaqueWin32 and sys.platform == "win32":
            metadata = ctypes.addressof(_OBJECT_ATTRIBUTES)
        return super().properties(device, kind, metadata)

    def find_blocks(self) -> Callable[[Address], Block]:
        return self.block_at

    def block_at(self, address: Address) -> Block:
        """``cuPointerGetAttribute``."""

        def ask(attribute: int) -> int:
            return pointer_attribute(self._driver, address, attribute)

        if not (place := ask(MEMORY_TYPE)):
            return Block(behind=Behind.NOTHING)
        ordinal = ask(ORDINAL)
        if place == HOST or ask(IS_MANAGED):
            return Block(behind=Behind.HOST if place == HOST else Behind.MANAGED, ordinal=ordinal)
        if ask(_LEGACY_IPC):
            behind, numbers = Behind.IPC, _ALLOCATION
        elif ask(_POOL):
            return Block(behind=Behind.POOL, ordinal=ordinal)
        else:
            behind, numbers = Behind.VMM if ask(_HANDLE_TYPES) & _POSIX_FD else Behind.CLOSED, _MAPPING
        start, size, key = map(ask, numbers)
        return Block(behind=behind, address=start, size=size, key=key, ordinal=ordinal)

    def is_there(self, block: Block) -> bool:
        """``cuPointerGetAttribute``."""
        *_, key = _MAPPING if block.behind is Behind.VMM else _ALLOCATION
        return pointer_attribute(self._driver, block.address, key) == block.key

    def export_block(self, device: NativeDevice, block: Block) -> Handle:
        """``cuIpcGetMemHandle``; ``cuMemRetainAllocationHandle`` and ``cuMemExportToShareableHandle``."""
        if block.behind is Behind.IPC:
            return super().export_block(device, block)
        allocation = Allocation(device, block.size, VmmFd).create("MemRetainAllocationHandle", block.address)
        try:
            return allocation.export(VmmFd)
        finally:
            allocation.release()
