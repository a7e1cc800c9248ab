"""External memory, mapped buffers, and copies."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from gpuinterop.backend import Address
from gpuinterop.handles import FdHandle, MemoryHandle

from . import descriptors
from .driver import Driver, Gpu
from .streams import Stream

_UNREGISTERED = 0  # hipMemoryTypeUnregistered


@dataclass(frozen=True, slots=True)
class Memory:
    """An imported memory object: a ``hipExternalMemory_t``."""

    gpu: Gpu
    handle: int


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapped object."""

    gpu: Gpu
    pointer: Address


def load(driver: Driver, gpu: Gpu, handle: MemoryHandle, *, size: int, dedicated: bool) -> Memory:
    """``hipImportExternalMemory``. HIP never takes the descriptor, so it is closed here when it has succeeded."""
    desc, keep = descriptors.memory(driver.api, handle, size=size, dedicated=dedicated)
    with gpu.aside():
        native = driver.load("hipImportExternalMemory", desc)
    del keep
    if isinstance(handle, FdHandle):
        os.close(handle.fd)
    return Memory(gpu, native)


def map_buffer(driver: Driver, memory: Memory, *, size: int) -> tuple[Mapping, Address]:
    """``hipExternalMemoryGetMappedBuffer``, from offset 0.

    With another one, stream writes, fills and copies of runtimes before rocm-systems #1749 go to the object's start.
    """
    desc = driver.api.hipExternalMemoryBufferDesc_st()
    desc.offset, desc.size, desc.flags = 0, size, 0
    with memory.gpu.aside():
        pointer = int(driver.call("hipExternalMemoryGetMappedBuffer", memory.handle, desc))
    return Mapping(memory.gpu, pointer), pointer


def unmap_buffer(driver: Driver, mapping: Mapping) -> None:
    """``hipFree``: ``hipDestroyExternalMemory`` drops the handle only, and leaves what is mapped.

    It waits for the work of device 0, whichever has imported the memory (hip_memory.cpp, ihipFree). A byte that was
    allocated on the device makes it wait for that one: to synchronise the device would end every capture there is.
    """
    with mapping.gpu.aside():
        if mapping.gpu.ordinal:
            driver.call("hipFree", driver.call("hipMalloc", 1))
        driver.call("hipFree", mapping.pointer)


def destroy(driver: Driver, memory: Memory) -> None:
    """``hipDestroyExternalMemory``."""
    with memory.gpu.aside():
        driver.call("hipDestroyExternalMemory", memory.handle)


def copy(driver: Driver, stream: Stream, target: Address, source: Address, size: int) -> None:
    """``hipMemcpyAsync``, which finds out by itself what the two addresses are."""
    kind = driver.api.hipMemcpyKind.hipMemcpyDefault
    with stream.gpu.current():
        driver.call("hipMemcpyAsync", target, source, size, kind, stream.handle)


def fill(driver: Driver, stream: Stream, target: Address, byte: int, size: int) -> None:
    with stream.gpu.current():
        driver.call("hipMemsetD8Async", target, byte, size, stream.handle)


def knows(driver: Driver, gpu: Gpu, address: Address) -> bool:
    """Whether HIP knows an address: else it answers with an error, or from ROCm 6 on with a type of its own."""
    attribute = driver.api.hipPointer_attribute.HIP_POINTER_ATTRIBUTE_MEMORY_TYPE
    found = ctypes.c_uint(_UNREGISTERED)
    with gpu.aside():
        (code,) = driver.status("hipPointerGetAttribute", ctypes.addressof(found), attribute, address)
    return not code and found.value != _UNREGISTERED
