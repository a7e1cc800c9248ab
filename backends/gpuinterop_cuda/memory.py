"""External memory, mapped buffers, and copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuinterop.backend import Address
from gpuinterop.handles import MemoryHandle

from . import descriptors
from .driver import Context, Driver
from .streams import Stream


@dataclass(frozen=True, slots=True)
class Memory:
    """An imported memory object."""

    context: Context
    handle: Any


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapped object."""

    context: Context
    pointer: Any


def load(driver: Driver, context: Context, handle: MemoryHandle, *, size: int, dedicated: bool) -> Memory:
    """``cuImportExternalMemory``."""
    desc, keep = descriptors.memory(driver.api, handle, size=size, dedicated=dedicated)
    with context.aside():
        native = driver.call("cuImportExternalMemory", desc)
    del keep
    return Memory(context, native)


def map_buffer(driver: Driver, memory: Memory, *, size: int) -> tuple[Mapping, Address]:
    """``cuExternalMemoryGetMappedBuffer``."""
    api = driver.api
    desc = api.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
    desc.offset, desc.size, desc.flags = 0, size, 0
    with memory.context.aside():
        pointer = driver.call("cuExternalMemoryGetMappedBuffer", memory.handle, desc)
    return Mapping(memory.context, pointer), int(pointer)


def unmap_buffer(driver: Driver, mapping: Mapping) -> None:
    """``cuMemFree``: ``cuDestroyExternalMemory`` does not free what is mapped."""
    with mapping.context.aside():
        driver.call("cuMemFree", mapping.pointer)


def destroy(driver: Driver, memory: Memory) -> None:
    """``cuDestroyExternalMemory``."""
    with memory.context.aside():
        driver.call("cuDestroyExternalMemory", memory.handle)


def copy(driver: Driver, stream: Stream, target: Address, source: Address, size: int) -> None:
    """``cuMemcpyAsync``, which finds out by itself what the two addresses are."""
    with stream.context.current():
        driver.call("cuMemcpyAsync", target, source, size, stream.handle)


def fill(driver: Driver, stream: Stream, target: Address, byte: int, size: int) -> None:
    with stream.context.current():
        driver.call("cuMemsetD8Async", target, byte, size, stream.handle)


def memory_type(driver: Driver, context: Context, address: Address) -> int | None:
    """The ``CUmemorytype`` of an address; None where the driver knows nothing of it."""
    attribute = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    with context.aside():
        result = driver.status("cuPointerGetAttribute", attribute, address)
    return None if result[0] else int(result[1])
