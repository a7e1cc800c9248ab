"""The translation: each call of the contract, handed to HIP."""

from __future__ import annotations

import ctypes
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from gpuinterop.backend import Address, AllocationBackend, ArrayBackend, DeviceInfo, StreamMemoryBackend, pci_bus_id
from gpuinterop.capabilities import Capability
from gpuinterop.handles import AllocationHandle, AnySemaphoreHandle, ArrayLayout, Granularity, MemoryHandle

from . import allocations, arrays, capabilities, memory, semaphores, stream_memory, streams
from .driver import Driver, Gpu, text_of, version_text

_WINDOWS = sys.platform.startswith("win")
_LUID_OFFSET = 272  # in hipDeviceProp_t, behind name and uuid


class HipBackend(ArrayBackend, AllocationBackend, StreamMemoryBackend):
    """AMD GPUs, as torch and CuPy on ROCm use them: through the runtime, and each device's only context."""

    name = "hip"
    priority = 10
    pageable_copies_block: ClassVar[bool] = True
    synchronize_blocks_others: ClassVar[bool] = True  # ROCm/rocm-systems #11678
    releases_block: ClassVar[bool] = True
    releases_block_for_all: ClassVar[bool] = True  # hipFree waits for device 0, whichever has imported the memory
    unmap_allocation_blocks: ClassVar[bool] = True  # hipMemUnmap goes through the null stream

    def __init__(self) -> None:
        self._driver = Driver()
        self.holds_gil = not self._driver.is_new  # 7.2 keeps the GIL in every call, 10 lets go of it
        self._semaphores = semaphores.Semaphores(self._driver)
        self._ranges = allocations.Ranges()
        self._kept_streams: defaultdict[tuple[int, bool], streams.Kept] = defaultdict(list)
        self._infos: tuple[DeviceInfo, ...] | None = None

    def versions(self) -> Mapping[str, str]:
        driver = self._driver
        return {
            "HIP": version_text(driver.version),
            "HIP driver": version_text(driver.call("hipDriverGetVersion")),
            "hip-python": driver.bindings_version,
        }

    def libraries(self) -> Mapping[str, str]:
        path = self._driver.library_file()
        return {"libamdhip64": path} if path else {}

    def devices(self) -> Sequence[DeviceInfo]:
        if self._infos is None:
            count = self._driver.call("hipGetDeviceCount")
            self._infos = tuple(self._info(ordinal) for ordinal in range(count))
        return self._infos

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return capabilities.table(self._driver, ordinal)

    def open_device(self, ordinal: int) -> Gpu:
        return Gpu(self._driver, ordinal)

    # -- streams and events --------------------------------------------------------------------------------------

    def create_stream(self, device: Gpu, *, high_priority: bool = False) -> streams.Stream:
        kept = self._kept_streams[device.ordinal, high_priority]
        return streams.create(device, kept, high_priority=high_priority)

    def adopt_stream(self, device: Gpu, pointer: int) -> streams.Stream:
        return streams.adopt(self._driver, device, pointer)

    def stream_pointer(self, stream: streams.Stream) -> int:
        return stream.pointer

    def stream_key(self, stream: streams.Stream) -> int:
        return stream.handle

    def destroy_stream(self, stream: streams.Stream) -> None:
        stream.release()

    def is_idle(self, stream: streams.Stream) -> bool:
        return streams.is_idle(self._driver, stream)

    def is_capturing(self, stream: streams.Stream) -> bool:
        return streams.is_capturing(self._driver, stream)

    def synchronize(self, stream: streams.Stream) -> None:
        streams.synchronize(stream)

    def wait_event(self, stream: streams.Stream, event: streams.Event) -> None:
        streams.wait_event(stream, event)

    def record(self, stream: streams.Stream) -> streams.Event:
        return streams.record(self._driver, stream)

    def is_done(self, event: streams.Event) -> bool:
        return streams.is_done(self._driver, event)

    def destroy_event(self, event: streams.Event) -> None:
        event.release()

    def copy(self, stream: streams.Stream, target: Address, source: Address, size: int) -> None:
        memory.copy(self._driver, stream, target, source, size)

    def fill(self, stream: streams.Stream, target: Address, byte: int, size: int) -> None:
        memory.fill(stream, target, byte, size)

    def is_pageable(self, device: Gpu, address: Address) -> bool:
        return not memory.knows(device, address)

    # -- external memory -----------------------------------------------------------------------------------------

    def import_memory(self, device: Gpu, handle: MemoryHandle, *, size: int, dedicated: bool) -> memory.Memory:
        return memory.load(self._driver, device, handle, size=size, dedicated=dedicated)

    def map_buffer(self, memory_: memory.Memory, *, size: int) -> tuple[memory.Mapping, Address]:
        mapping = memory.map_buffer(self._driver, memory_, size=size)
        return mapping, mapping.handle

    def unmap_buffer(self, mapping: memory.Mapping) -> None:
        memory.unmap_buffer(mapping)

    def destroy_memory(self, memory_: memory.Memory) -> None:
        memory_.release()

    def map_array(self, memory_: memory.Memory, layout: ArrayLayout) -> arrays.Array:
        return arrays.map_array(self._driver, memory_, layout)

    def copy_level(
        self, stream: streams.Stream, array: arrays.Array, level: int, address: Address, size: int, *, to_array: bool
    ) -> None:
        arrays.copy_level(self._driver, stream, array, level, address, to_array=to_array)

    def destroy_array(self, array: arrays.Array) -> None:
        array.release()

    # -- external semaphores: on Windows -------------------------------------------------------------------------

    def import_semaphore(self, device: Gpu, handle: AnySemaphoreHandle) -> semaphores.Semaphore:
        return semaphores.load(self._driver, device, handle)

    def prepare(self, semaphores_: Sequence[semaphores.Semaphore]) -> semaphores.Batch:
        return semaphores.Batch(semaphores_)

    def signal(self, batch: semaphores.Batch, stream: streams.Stream, values: Sequence[int]) -> None:
        self._semaphores.signal(batch, stream, values)

    def wait(
        self, batch: semaphores.Batch, stream: streams.Stream, values: Sequence[int], timeout_ms: int | None
    ) -> None:
        self._semaphores.wait(batch, stream, values)

    def destroy_semaphore(self, semaphore: semaphores.Semaphore) -> None:
        semaphore.release()

    # -- stream memory operations --------------------------------------------------------------------------------

    def pin(self, device: Gpu, address: Address, size: int) -> tuple[stream_memory.Pin, Address]:
        return stream_memory.pin(self._driver, device, address, size)

    def unpin(self, pin: stream_memory.Pin) -> None:
        pin.release()

    def write_value(self, stream: streams.Stream, word: Address, value: int) -> None:
        stream_memory.write(self._driver, stream, word, value)

    def wait_value(self, stream: streams.Stream, word: Address, value: int) -> None:
        stream_memory.wait(self._driver, stream, word, value)

    # -- shareable allocations -----------------------------------------------------------------------------------

    def granularity(self, device: Gpu, handle_type: type[AllocationHandle]) -> Granularity:
        return allocations.granularity(self._driver, device, handle_type)

    def allocate(self, device: Gpu, size: int, handle_type: type[AllocationHandle]) -> allocations.Allocation:
        return allocations.allocate(device, size, handle_type)

    def export_allocation(self, allocation: allocations.Allocation) -> AllocationHandle:
        return allocations.export(allocation)

    def import_allocation(self, device: Gpu, handle: AllocationHandle, *, size: int) -> allocations.Allocation:
        return allocations.load(self._driver, device, handle, size)

    def map_allocation(
        self, allocation: allocations.Allocation, devices: Sequence[Gpu]
    ) -> tuple[allocations.Reservation, Address]:
        place = allocations.map_allocation(self._driver, self._ranges, allocation, devices)
        return place, place.handle

    def unmap_allocation(self, mapping: allocations.Reservation) -> None:
        mapping.release()

    def release_allocation(self, allocation: allocations.Allocation) -> None:
        allocation.release()

    def can_access(self, ordinal: int, peer: int) -> bool:
        return allocations.can_access(self._driver, ordinal, peer)

    def location(self, allocation: allocations.Allocation) -> int | None:
        return allocations.location(self._driver, allocation)

    # -- inside --------------------------------------------------------------------------------------------------

    def _info(self, ordinal: int) -> DeviceInfo:
        driver = self._driver
        return DeviceInfo(
            ordinal=ordinal,
            name=text_of(driver.call("hipDeviceGetName", 256, ordinal)),
            uuid=None,  # hipDeviceGetUuid gives another one than Vulkan has (ROCm/hipamd #50)
            pci_bus_id=pci_bus_id(text_of(driver.call("hipDeviceGetPCIBusId", 32, ordinal))),
            luid=_luid(driver, ordinal) if _WINDOWS else None,
            dlpack=(10, ordinal),  # kDLROCM
            array_interface="__cuda_array_interface__",  # CuPy and torch on ROCm use it, too
            note="HIP's own UUID is not the one that Vulkan knows: it is matched by its PCI bus id",
        )


def _luid(driver: Driver, ordinal: int) -> bytes | None:
    """Of ``hipGetDeviceProperties``; 8 bytes of 0 where it is not known."""
    if driver.is_new:
        properties: Any = driver.call("hipGetDeviceProperties", ordinal)
    else:
        properties = driver.api.hipDeviceProp_t()
        driver.call("hipGetDeviceProperties", properties, ordinal)
    found = ctypes.string_at(int(properties) + _LUID_OFFSET, 8)
    return found if any(found) else None
