"""External memory, mapped buffers, and copies."""

from __future__ import annotations

from gpuinterop.backend import Address
from gpuinterop.handles import MemoryHandle

from . import descriptors
from .driver import Context, Driver, Made
from .streams import Stream


class Memory(Made):
    """An imported memory object."""

    __slots__ = ()
    back = "cuDestroyExternalMemory"


class Mapping(Made):
    """A mapped object; ``cuDestroyExternalMemory`` does not free it."""

    __slots__ = ("address",)
    back = "cuMemFree"
    address: Address


def load(driver: Driver, context: Context, handle: MemoryHandle, *, size: int, dedicated: bool) -> Memory:
    """``cuImportExternalMemory``."""
    desc, _keep = descriptors.memory(driver.api, handle, size=size, dedicated=dedicated)
    return Memory(context).create("cuImportExternalMemory", desc)


def map_buffer(driver: Driver, memory: Memory, *, size: int) -> tuple[Mapping, Address]:
    """``cuExternalMemoryGetMappedBuffer``."""
    desc = driver.api.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
    desc.offset, desc.size, desc.flags = 0, size, 0
    mapping = Mapping(memory.context)

    def work() -> None:
        mapping.make("cuExternalMemoryGetMappedBuffer", memory.handle, desc)
        mapping.address = int(mapping.handle)

    return memory.context.create(mapping, work), mapping.address


def copy(stream: Stream, target: Address, source: Address, size: int) -> None:
    """``cuMemcpyAsync``, which finds out by itself what the two addresses are."""
    stream.context.call("cuMemcpyAsync", target, source, size, stream.handle, aside=False)


def fill(stream: Stream, target: Address, byte: int, size: int) -> None:
    stream.context.call("cuMemsetD8Async", target, byte, size, stream.handle, aside=False)


def memory_type(driver: Driver, context: Context, address: Address) -> int | None:
    """The ``CUmemorytype`` of an address; None where the driver knows nothing of it."""
    attribute = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    result = context.status("cuPointerGetAttribute", attribute, address)
    return None if result[0] else int(result[1])
