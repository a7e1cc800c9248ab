"""External memory, mapped buffers, and copies."""

from __future__ import annotations

import ctypes
import os
from functools import partial

from gpuinterop.backend import Address
from gpuinterop.handles import FdHandle, MemoryHandle

from . import descriptors
from .driver import Driver, Gpu, Made
from .streams import Stream

_UNREGISTERED = 0  # hipMemoryTypeUnregistered


class Memory(Made):
    """An imported memory object: a ``hipExternalMemory_t``."""

    __slots__ = ()
    back = "hipDestroyExternalMemory"


class Mapping(Made):
    """A mapped object; ``hipDestroyExternalMemory`` drops the handle only, and leaves what is mapped."""

    __slots__ = ()
    back = "hipFree"


def load(driver: Driver, gpu: Gpu, handle: MemoryHandle, *, size: int, dedicated: bool) -> Memory:
    """``hipImportExternalMemory``. HIP never takes the descriptor, so it is closed here when it has succeeded."""
    desc, _keep = descriptors.memory(driver.api, handle, size=size, dedicated=dedicated)
    memory = Memory(gpu)

    def work() -> None:
        memory.make("hipImportExternalMemory", desc)
        if isinstance(handle, FdHandle):
            os.close(handle.fd)

    return gpu.create(memory, work)


def map_buffer(driver: Driver, memory: Memory, *, size: int) -> Mapping:
    """``hipExternalMemoryGetMappedBuffer``, from offset 0.

    With another one, stream writes, fills and copies of runtimes before rocm-systems #1749 go to the object's start.
    """
    desc = driver.api.hipExternalMemoryBufferDesc_st()
    desc.offset, desc.size, desc.flags = 0, size, 0
    return Mapping(memory.gpu).create("hipExternalMemoryGetMappedBuffer", memory.handle, desc)


def unmap_buffer(mapping: Mapping) -> None:
    """``hipFree``.

    It waits for the work of device 0, whichever has imported the memory (hip_memory.cpp, ihipFree). A byte that was
    allocated on the device makes it wait for that one: to synchronise the device would end every capture there is.
    """
    byte = Mapping(mapping.gpu)

    def work() -> None:
        if mapping.gpu.ordinal:
            byte.make("hipMalloc", 1)
            byte.free()
        mapping.free()

    mapping.gpu.create(byte, work)


def copy(driver: Driver, stream: Stream, target: Address, source: Address, size: int) -> None:
    """``hipMemcpyAsync``, which finds out by itself what the two addresses are."""
    kind = driver.api.hipMemcpyKind.hipMemcpyDefault
    stream.gpu.call("hipMemcpyAsync", target, source, size, kind, stream.handle, aside=False)


def fill(stream: Stream, target: Address, byte: int, size: int) -> None:
    stream.gpu.call("hipMemsetD8Async", target, byte, size, stream.handle, aside=False)


def knows(gpu: Gpu, address: Address) -> bool:
    """Whether HIP knows an address: else it answers with an error, or from ROCm 6 on with a type of its own."""
    driver = gpu.driver
    attribute = driver.api.hipPointer_attribute.HIP_POINTER_ATTRIBUTE_MEMORY_TYPE
    found = ctypes.c_uint(_UNREGISTERED)
    (code,) = gpu.run(partial(driver.status, "hipPointerGetAttribute", ctypes.addressof(found), attribute, address))
    return not code and found.value != _UNREGISTERED
