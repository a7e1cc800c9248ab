"""External memory, mapped buffers, and copies."""

from __future__ import annotations

import ctypes

from gpuinterop.backend import Address
from gpuinterop.handles import MemoryHandle

from . import descriptors
from .driver import Gpu, Made, Room
from .streams import Stream

_UNREGISTERED = 0  # hipMemoryTypeUnregistered


class ImportedMemory(Made):
    """An imported memory object."""

    back = "hipDestroyExternalMemory"


class MappedBuffer(Made):
    """A mapped object; ``hipDestroyExternalMemory`` drops only the handle, not the mapping."""

    back = "hipFree"
    blocks = True


class _Byte(MappedBuffer):
    """A byte that is freed to wait for its device: an undo may wait as well, and is not left to the core."""

    blocks = False


class Memory(Room):
    """External memory, and copies between any two addresses."""

    def import_memory(self, device: Gpu, handle: MemoryHandle, *, size: int, dedicated: bool) -> ImportedMemory:
        """``hipImportExternalMemory``, which never takes over the descriptor."""
        desc, _keep = descriptors.memory(self._driver.api, handle, size=size, dedicated=dedicated)
        return ImportedMemory(device).load(handle, "hipImportExternalMemory", desc)

    def map_buffer(self, memory: ImportedMemory, *, size: int) -> tuple[MappedBuffer, Address]:
        """``hipExternalMemoryGetMappedBuffer``, from offset 0.

        Runtimes before rocm-systems #1749 ignore other offsets: stream writes, fills and copies go to the object's
        start.
        """
        desc = self._driver.api.hipExternalMemoryBufferDesc_st()
        desc.offset, desc.size, desc.flags = 0, size, 0
        mapping = MappedBuffer(memory.device).create("hipExternalMemoryGetMappedBuffer", memory.handle, desc)
        return mapping, mapping.handle

    def unmap_buffer(self, mapping: MappedBuffer) -> None:
        """``hipFree``.

        For imported memory it waits for the work of device 0, even if another device imported it (hip_memory.cpp,
        ihipFree). So this also frees a byte allocated on the importing device, which waits for that device.
        Synchronising the device instead would end every capture.
        """
        byte = _Byte(mapping.device)

        def work() -> None:
            if mapping.device.ordinal:
                byte.make("hipMalloc", 1)
                byte.free()
            mapping.free()

        mapping.device.create(byte, work)

    def copy(self, stream: Stream, target: Address, source: Address, size: int) -> None:
        """``hipMemcpyAsync``, which recognises the kinds of the two addresses."""
        kind = self._driver.api.hipMemcpyKind.hipMemcpyDefault
        stream.device.call("hipMemcpyAsync", target, source, size, kind, stream.handle, aside=False)

    def is_pageable(self, device: Gpu, address: Address) -> bool:
        """``hipPointerGetAttribute``."""
        return not knows(device, address)


def knows(gpu: Gpu, address: Address) -> bool:
    """Whether HIP knows an address: if not, it returns an error, or from ROCm 6 on a type for unregistered memory."""
    attribute = gpu.driver.api.hipPointer_attribute.HIP_POINTER_ATTRIBUTE_MEMORY_TYPE
    found = ctypes.c_uint(_UNREGISTERED)
    (code,) = gpu.status("hipPointerGetAttribute", ctypes.addressof(found), attribute, address)
    return not code and found.value != _UNREGISTERED
