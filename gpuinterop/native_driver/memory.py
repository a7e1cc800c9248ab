"""External memory, mapped buffers and mipmapped arrays, copies, and pinned words."""

from __future__ import annotations

from abc import abstractmethod
from ctypes import byref, c_uint64, c_void_p
from struct import Struct
from typing import Final

from ..backend import Address, ArrayBackend, StreamMemoryBackend
from ..handles import ArrayLayout, MemoryHandle
from . import descriptors
from .driver import NativeBackend, NativeDevice, NativeDriver, NativeObject
from .streams import NativeStream

# Attributes of a pointer, CUpointer_attribute and hipPointer_attribute.
MEMORY_TYPE, BUFFER_ID, IS_MANAGED, ORDINAL = 2, 7, 8, 9
HOST: Final = 1  # CU_MEMORYTYPE_HOST, hipMemoryTypeHost
# Offset, size, flags: CUDA_EXTERNAL_MEMORY_BUFFER_DESC, hipExternalMemoryBufferDesc.
_RANGE: Final = Struct("=QQI68x")
_LAYERED: Final = 0x01  # CUDA_ARRAY3D_LAYERED, hipArrayLayered
# CUmemhostregister_flags, hipHostRegister*: other contexts use the page too, and streams need its device address.
_PORTABLE, _MAPPED = 1, 2
_AT_LEAST: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ, hipStreamWaitValueGte
_WRITE_DEFAULT: Final = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: after a fence to system scope


class ImportedMemory(NativeObject):
    """An imported memory object."""

    release_call = "DestroyExternalMemory"


class MappedBuffer(NativeObject):
    """A mapped object. Releasing its memory does not free it."""

    release_call = "MemFree"
    blocks = True


class NativeMemory(NativeBackend):
    """External memory, and copies between any two addresses."""

    def import_memory(
        self, device: NativeDevice, handle: MemoryHandle, *, size: int, dedicated: bool
    ) -> ImportedMemory:
        """``cuImportExternalMemory``; ``hipImportExternalMemory``, which never owns the descriptor."""
        table = self._driver.table
        descriptor, _name = descriptors.memory(table, handle, size=size, dedicated=dedicated)
        open_handle = None if table.import_takes_fd else handle
        return ImportedMemory(device).create("ImportExternalMemory", descriptor, closes=open_handle)

    def map_buffer(self, memory: ImportedMemory, *, size: int) -> tuple[MappedBuffer, Address]:
        """``cuExternalMemoryGetMappedBuffer``, ``hipExternalMemoryGetMappedBuffer``, always at offset 0.

        HIP's runtimes before rocm-systems #1749 ignore other offsets and use the object's start.
        """
        place = _RANGE.pack(0, size, 0)
        mapping = MappedBuffer(memory.device).create("ExternalMemoryGetMappedBuffer", memory.handle, place)
        return mapping, mapping.handle

    def copy(self, stream: NativeStream, target: Address, source: Address, size: int) -> None:
        """``cuMemcpyAsync``, ``hipMemcpyAsync``. They detect the kinds of both addresses."""
        kind = self._driver.table.copy_kind
        stream.device.call("MemcpyAsync", target, source, size, *kind, stream.handle, relaxed=False)

    def fill(self, stream: NativeStream, target: Address, byte: int, size: int) -> None:
        """``cuMemsetD8Async``, ``hipMemsetD8Async``."""
        stream.device.call("MemsetD8Async", target, byte, size, stream.handle, relaxed=False)

    def is_pageable(self, device: NativeDevice, address: Address) -> bool:
        """``cuPointerGetAttribute``, ``hipPointerGetAttribute``: pageable memory is unknown to the driver."""
        return not device.run(pointer_attribute, self._driver, address, MEMORY_TYPE)


def pointer_attribute(driver: NativeDriver, address: Address, attribute: int) -> int:
    """An attribute of a pointer, of at most 8 bytes; 0 if the driver does not know the address.

    For an unknown address HIP returns an error, or the type 0 from ROCm 6 on.
    """
    value = c_uint64()
    if driver.function("PointerGetAttribute")(byref(value), attribute, c_void_p(address)):  # hot path
        driver.forget_error()
        return 0
    return value.value


# -- mipmapped arrays: Vulkan's format names, copies of whole levels -------------------------------------------------


class MappedArray(NativeObject):
    """A mapped mipmapped array."""

    release_call = "MipmappedArrayDestroy"
    blocks = True
    layout: ArrayLayout


class NativeArrays(NativeMemory, ArrayBackend):
    """Mipmapped arrays. Each vendor has its own structs."""

    @abstractmethod
    def array_descriptor(self, layout: ArrayLayout, extent: tuple[int, ...], flags: int) -> bytes:
        """The driver's descriptor of a mipmapped array. Its depth is the number of layers."""

    @abstractmethod
    def level_copy(
        self, array: MappedArray, plane: int, extent: tuple[int, ...], address: Address, to_array: bool
    ) -> bytes:
        """The driver's parameters for a copy between a level (layers as depth) and tightly packed bytes."""

    def map_array(self, memory: ImportedMemory, layout: ArrayLayout) -> MappedArray:
        """``cuExternalMemoryGetMappedMipmappedArray``, ``hipExternalMemoryGetMappedMipmappedArray``."""
        uses = self._driver.table.array_uses
        flags = (_LAYERED if layout.layered else 0) | sum(flag for use, flag in uses.items() if layout.usage & use)
        width, height, depth = layout.extent
        descriptor = self.array_descriptor(layout, (width, height, layout.layers or depth), flags)
        array = MappedArray(memory.device)
        array.layout = layout
        return array.create("ExternalMemoryGetMappedMipmappedArray", memory.handle, descriptor)

    def copy_level(
        self, stream: NativeStream, array: MappedArray, level: int, address: Address, size: int, *, to_array: bool
    ) -> None:
        """``cuMemcpy3DAsync``, ``hipMemcpy3DAsync`` between a level with all its layers and tightly packed bytes."""
        plane = self._driver.ask("MipmappedArrayGetLevel", array.handle, level, kind=c_void_p)
        width, height, depth = (max(1, edge >> level) for edge in array.layout.extent)
        extent = width, height, array.layout.layers or depth
        job = self.level_copy(array, plane, extent, address, to_array)
        stream.device.call("Memcpy3DAsync", job, stream.handle, relaxed=False)


# -- 64-bit words in pinned host memory that streams write and wait for (stream memory operations) ------------------


class Pin(NativeObject):
    """Host memory that is registered with the driver."""

    release_call = "MemHostUnregister"
    blocks = True
    device_address: Address

    def register(self, address: Address, size: int) -> None:
        self.add("MemHostRegister", address, size, _PORTABLE | _MAPPED)
        self.device_address = self.device.driver.ask("MemHostGetDevicePointer", address, 0, kind=c_void_p)


class NativeStreamMemory(NativeBackend, StreamMemoryBackend):
    """Words in pinned host memory."""

    def __init__(self) -> None:
        super().__init__()
        self._write = self._driver.function("StreamWriteValue64")
        self._wait_for = self._driver.function("StreamWaitValue64")
        self._how = _AT_LEAST, *map(c_uint64, self._driver.table.wait_mask)

    def pin(self, device: NativeDevice, address: Address, size: int) -> tuple[Pin, Address]:
        """``cuMemHostRegister``, ``cuMemHostGetDevicePointer``; ``hipHostRegister``, ``hipHostGetDevicePointer``."""
        pin = Pin(device)
        return device.create(pin, pin.register, address, size), pin.device_address

    def write_value(self, stream: NativeStream, word: Address, value: int) -> None:
        """``cuStreamWriteValue64``, ``hipStreamWriteValue64``."""
        if code := stream.run(self._write, stream.argument, c_uint64(word), c_uint64(value), _WRITE_DEFAULT):
            raise self._driver.error("StreamWriteValue64", code)

    def wait_value(self, stream: NativeStream, word: Address, value: int) -> None:
        """``cuStreamWaitValue64``, ``hipStreamWaitValue64``: wait until the word is at least `value`."""
        if code := stream.run(self._wait_for, stream.argument, c_uint64(word), c_uint64(value), *self._how):
            raise self._driver.error("StreamWaitValue64", code)
