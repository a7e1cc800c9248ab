"""External memory, mapped buffers, and copies."""

from __future__ import annotations

from gpuinterop.backend import Address
from gpuinterop.handles import MemoryHandle

from . import descriptors
from .driver import Context, Made, Room
from .streams import Stream


class ImportedMemory(Made):
    """An imported memory object."""

    back = "cuDestroyExternalMemory"


class MappedBuffer(Made):
    """A mapped object; ``cuDestroyExternalMemory`` does not free it."""

    back = "cuMemFree"
    blocks = True


class Memory(Room):
    """External memory, and copies between any two addresses."""

    def import_memory(self, device: Context, handle: MemoryHandle, *, size: int, dedicated: bool) -> ImportedMemory:
        """``cuImportExternalMemory``."""
        desc, _keep = descriptors.memory(self._driver.api, handle, size=size, dedicated=dedicated)
        return ImportedMemory(device).create("cuImportExternalMemory", desc)

    def map_buffer(self, memory: ImportedMemory, *, size: int) -> tuple[MappedBuffer, Address]:
        """``cuExternalMemoryGetMappedBuffer``."""
        desc = self._driver.api.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
        desc.offset, desc.size, desc.flags = 0, size, 0
        mapping = MappedBuffer(memory.device).create("cuExternalMemoryGetMappedBuffer", memory.handle, desc)
        return mapping, int(mapping.handle)

    def copy(self, stream: Stream, target: Address, source: Address, size: int) -> None:
        """``cuMemcpyAsync``, which recognises the kinds of the two addresses."""
        stream.device.call("cuMemcpyAsync", target, source, size, stream.handle, aside=False)

    def is_pageable(self, device: Context, address: Address) -> bool:
        """``cuPointerGetAttribute`` fails for memory that the driver does not know, which is pageable."""
        attribute = self._driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        return bool(device.status("cuPointerGetAttribute", attribute, address)[0])
