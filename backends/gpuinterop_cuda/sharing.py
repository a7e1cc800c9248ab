"""Memory that other libraries have allocated: finds it at a pointer, and shares it with other processes."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Final

from gpuinterop.backend import Address, Block, MemoryKind
from gpuinterop.handles import AllocationHandle, Handle, OpaqueWin32, VmmFd
from gpuinterop.native_driver.allocations import Allocation, NativeSharing
from gpuinterop.native_driver.driver import NativeDevice
from gpuinterop.native_driver.memory import BUFFER_ID, HOST, IS_MANAGED, MEMORY_TYPE, ORDINAL, pointer_attribute

_LEGACY_IPC, _HANDLE_TYPES, _POOL = 10, 14, 17  # CUpointer_attribute
_ALLOCATION: Final = (11, 12, BUFFER_ID)  # RANGE_START_ADDR, RANGE_SIZE; one mapping may contain several allocations
_MAPPING: Final = (19, 18, 20)  # MAPPING_BASE_ADDR, MAPPING_SIZE, MEMORY_BLOCK_ID; a range may consist of several
_ATTRIBUTES: Final = (MEMORY_TYPE, ORDINAL, IS_MANAGED, _LEGACY_IPC, _POOL, _HANDLE_TYPES, *_ALLOCATION)
_POSIX_FD: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


# Empty OBJECT_ATTRIBUTES of Windows, which the driver needs for an NT handle: the length and five fields.
_OBJECT_ATTRIBUTES: Final = ctypes.create_string_buffer(struct.pack("=I44x", 48))


class Sharing(NativeSharing):
    """Shareable allocations, and arrays of other libraries."""

    joins_blocks = True

    def properties(self, device: NativeDevice, kind: type[AllocationHandle], metadata: int = 0) -> bytes:
        if kind is OpaqueWin32 and sys.platform == "win32":
            metadata = ctypes.addressof(_OBJECT_ATTRIBUTES)
        return super().properties(device, kind, metadata)

    def find_blocks(self) -> Callable[[Address], Block]:
        """``cuPointerGetAttributes``; ``cuPointerGetAttribute`` for the mappings of virtual memory."""
        driver, count = self._driver, len(_ATTRIBUTES)
        numbers, values = (ctypes.c_int * count)(*_ATTRIBUTES), (ctypes.c_uint64 * count)()
        places = (ctypes.c_void_p * count)(*(ctypes.addressof(values) + 8 * index for index in range(count)))
        ask = driver.function("PointerGetAttributes")

        def block_at(address: Address) -> Block:
            ctypes.memset(values, 0, ctypes.sizeof(values))  # some attributes have fewer bytes
            if ask(count, numbers, places, ctypes.c_void_p(address)):
                driver.forget_error()
            place, ordinal, managed, legacy, pool, kinds, start, size, key = values
            if not place:
                return Block(kind=MemoryKind.NOTHING)
            if place == HOST or managed:
                return Block(kind=MemoryKind.HOST if place == HOST else MemoryKind.MANAGED, ordinal=ordinal)
            if not legacy:
                if pool:
                    return Block(kind=MemoryKind.POOL, ordinal=ordinal)
                start, size, key = (pointer_attribute(driver, address, attribute) for attribute in _MAPPING)
            kind = MemoryKind.IPC if legacy else MemoryKind.VMM if kinds & _POSIX_FD else MemoryKind.CLOSED
            return Block(kind=kind, address=start, size=size, key=key, ordinal=ordinal)

        return block_at

    def is_there(self, block: Block) -> bool:
        """``cuPointerGetAttribute``."""
        *_, key = _MAPPING if block.kind is MemoryKind.VMM else _ALLOCATION
        return pointer_attribute(self._driver, block.address, key) == block.key

    def export_block(self, device: NativeDevice, block: Block) -> Handle:
        """``cuIpcGetMemHandle``; ``cuMemRetainAllocationHandle``, ``cuMemExportToShareableHandle``."""
        if block.kind is MemoryKind.IPC:
            return super().export_block(device, block)
        allocation = Allocation(device, block.size, VmmFd).create("MemRetainAllocationHandle", block.address)
        try:
            return allocation.export(VmmFd)
        finally:
            allocation.release()
