"""The translation: each call of the contract, handed to the driver."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import ClassVar

from gpuinterop import system
from gpuinterop.backend import (
    Address,
    ArrayBackend,
    DeviceInfo,
    GraphBackend,
    MulticastBackend,
    SemaphoreNode,
    StreamMemoryBackend,
    pci_bus_id,
)
from gpuinterop.capabilities import Capability
from gpuinterop.handles import AllocationHandle, AnySemaphoreHandle, ArrayLayout, Granularity, MemoryHandle

from . import allocations, arrays, capabilities, graphs, memory, multicast, semaphores, stream_memory, streams
from .driver import Context, Driver

_WINDOWS = sys.platform.startswith("win")


class CudaBackend(ArrayBackend, MulticastBackend, GraphBackend, StreamMemoryBackend):
    """NVIDIA GPUs. Every device is used through its primary context, as torch, CuPy, JAX and numba do."""

    name = "cuda"
    priority = 20
    pageable_copies_block: ClassVar[bool] = True
    releases_block: ClassVar[bool] = True

    def __init__(self) -> None:
        self._driver = Driver()
        # Measured: 12.9.0 keeps the GIL in every call, 12.9.1 and all later ones let go of it.
        self.holds_gil = self._driver.bindings_version == "12.9.0"
        self._semaphores = semaphores.Semaphores(self._driver)
        self._kernels = multicast.Kernels()
        self._infos: tuple[DeviceInfo, ...] | None = None

    def versions(self) -> Mapping[str, str]:
        major, minor = divmod(self._driver.version, 1000)
        found = {"CUDA": f"{major}.{minor // 10}", "cuda-bindings": self._driver.bindings_version}
        if kernel := _kernel_module():
            found["driver"] = kernel
        return found

    def libraries(self) -> Mapping[str, str]:
        path = system.loaded_library("libcuda.so")
        return {"libcuda": path} if path else {}

    def devices(self) -> Sequence[DeviceInfo]:
        if self._infos is None:
            count = self._driver.call("cuDeviceGetCount")
            self._infos = tuple(self._info(ordinal) for ordinal in range(count))
        return self._infos

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return capabilities.table(self._driver, ordinal)

    def open_device(self, ordinal: int) -> Context:
        return Context(self._driver, ordinal)

    # -- streams and events --------------------------------------------------------------------------------------

    def create_stream(self, device: Context, *, high_priority: bool = False) -> streams.Stream:
        return streams.create(device, high_priority=high_priority)

    def adopt_stream(self, device: Context, pointer: int) -> streams.Stream:
        return streams.adopt(self._driver, device, pointer)

    def stream_pointer(self, stream: streams.Stream) -> int:
        return stream.pointer

    def stream_key(self, stream: streams.Stream) -> Hashable:
        return stream.key

    def destroy_stream(self, stream: streams.Stream) -> None:
        stream.release()

    def is_idle(self, stream: streams.Stream) -> bool:
        return streams.is_idle(self._driver, stream)

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
        memory.copy(stream, target, source, size)

    def fill(self, stream: streams.Stream, target: Address, byte: int, size: int) -> None:
        memory.fill(stream, target, byte, size)

    def is_pageable(self, device: Context, address: Address) -> bool:
        return memory.memory_type(self._driver, device, address) is None

    # -- external memory -----------------------------------------------------------------------------------------

    def import_memory(self, device: Context, handle: MemoryHandle, *, size: int, dedicated: bool) -> memory.Memory:
        return memory.load(self._driver, device, handle, size=size, dedicated=dedicated)

    def map_buffer(self, memory_: memory.Memory, *, size: int) -> tuple[memory.Mapping, Address]:
        return memory.map_buffer(self._driver, memory_, size=size)

    def unmap_buffer(self, mapping: memory.Mapping) -> None:
        mapping.release()

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

    # -- external semaphores -------------------------------------------------------------------------------------

    def import_semaphore(self, device: Context, handle: AnySemaphoreHandle) -> semaphores.Semaphore:
        return semaphores.load(self._driver, device, handle)

    def prepare(self, semaphores_: Sequence[semaphores.Semaphore]) -> semaphores.Batch:
        return semaphores.Batch(self._driver, semaphores_)

    def signal(self, batch: semaphores.Batch, stream: streams.Stream, values: Sequence[int]) -> None:
        self._semaphores.signal(batch, stream, values)

    def wait(
        self, batch: semaphores.Batch, stream: streams.Stream, values: Sequence[int], timeout_ms: int | None
    ) -> None:
        self._semaphores.wait(batch, stream, values, timeout_ms)

    def destroy_semaphore(self, semaphore: semaphores.Semaphore) -> None:
        semaphore.release()

    # -- shareable allocations -----------------------------------------------------------------------------------

    def granularity(self, device: Context, handle_type: type[AllocationHandle]) -> Granularity:
        return allocations.granularity(self._driver, device, handle_type)

    def allocate(self, device: Context, size: int, handle_type: type[AllocationHandle]) -> allocations.Allocation:
        return allocations.allocate(self._driver, device, size, handle_type)

    def export_allocation(self, allocation: allocations.Allocation) -> AllocationHandle:
        return allocations.export(self._driver, allocation, allocation.kind)

    def import_allocation(self, device: Context, handle: AllocationHandle, *, size: int) -> allocations.Allocation:
        return allocations.Allocation(device, size, type(handle)).load(handle)

    def map_allocation(
        self, allocation: allocations.Mappable, devices: Sequence[Context]
    ) -> tuple[allocations.Reservation, Address]:
        return allocations.map_allocation(self._driver, allocation, devices)

    def unmap_allocation(self, mapping: allocations.Reservation) -> None:
        mapping.release()

    def release_allocation(self, allocation: allocations.Mappable) -> None:
        allocation.release()

    def can_access(self, ordinal: int, peer: int) -> bool:
        return allocations.can_access(self._driver, ordinal, peer)

    def location(self, allocation: allocations.Allocation) -> int | None:
        return allocations.location(self._driver, allocation)

    # -- multicast -----------------------------------------------------------------------------------------------

    def multicast_granularity(
        self, devices: int, size: int, handle_types: Sequence[type[AllocationHandle]]
    ) -> Granularity:
        return multicast.granularity(self._driver, devices, size, handle_types)

    def create_multicast(
        self, device: Context, devices: int, size: int, handle_types: Sequence[type[AllocationHandle]]
    ) -> multicast.Group:
        return multicast.create(self._driver, device, devices, size, handle_types)

    def export_multicast(self, group: multicast.Group, handle_type: type[AllocationHandle]) -> AllocationHandle:
        return allocations.export(self._driver, group, handle_type)

    def import_multicast(
        self, device: Context, handle: AllocationHandle, *, devices: int, size: int
    ) -> multicast.Group:
        return multicast.load(self._driver, device, handle, devices=devices, size=size)

    def add_device(self, group: multicast.Group, device: Context) -> None:
        multicast.add_device(group, device)

    def bind_memory(
        self,
        group: multicast.Group,
        device: Context,
        offset: int,
        allocation: allocations.Allocation,
        start: int,
        size: int,
    ) -> None:
        multicast.bind_memory(self._driver, group, device, offset, allocation, start, size)

    def bind_address(self, group: multicast.Group, device: Context, offset: int, address: Address, size: int) -> None:
        multicast.bind_address(self._driver, group, device, offset, address, size)

    def unbind(self, group: multicast.Group, device: Context, offset: int, size: int) -> None:
        multicast.unbind(group, device, offset)

    def is_shareable(self, device: Context, address: Address) -> bool:
        return multicast.is_shareable(self._driver, device, address)

    def multimem_store(self, stream: streams.Stream, address: Address, value: int, count: int) -> None:
        self._kernels.store(stream, address, value, count)

    def multimem_add(self, stream: streams.Stream, target: Address, address: Address, count: int) -> None:
        self._kernels.add(stream, target, address, count)

    # -- stream memory operations --------------------------------------------------------------------------------

    def pin(self, device: Context, address: Address, size: int) -> tuple[stream_memory.Pin, Address]:
        return stream_memory.pin(self._driver, device, address, size)

    def unpin(self, pin: stream_memory.Pin) -> None:
        pin.release()

    def write_value(self, stream: streams.Stream, word: Address, value: int) -> None:
        stream_memory.write_value(self._driver, stream, word, value)

    def wait_value(self, stream: streams.Stream, word: Address, value: int) -> None:
        stream_memory.wait_value(self._driver, stream, word, value)

    # -- graphs --------------------------------------------------------------------------------------------------

    def is_capturing(self, stream: streams.Stream) -> bool:
        return streams.is_capturing(self._driver, stream)

    def begin_capture(self, stream: streams.Stream) -> None:
        graphs.begin(self._driver, stream)

    def end_capture(self, stream: streams.Stream) -> int:
        return graphs.end(stream)

    def instantiate(self, device: Context, graph: int) -> int:
        return graphs.instantiate(self._driver, device, graph)

    def launch(self, executable: int, stream: streams.Stream) -> None:
        graphs.launch(self._driver, stream, executable)

    def destroy_graph(self, device: Context, graph: int) -> None:
        graphs.destroy(graph)

    def destroy_executable(self, device: Context, executable: int) -> None:
        graphs.destroy(executable)

    def semaphore_pointer(self, semaphore: semaphores.Semaphore) -> int:
        return int(semaphore.handle)

    def semaphore_nodes(self, graph: int) -> Sequence[SemaphoreNode]:
        return graphs.nodes(self._driver, graph)

    def set_node(
        self, executable: int, node: SemaphoreNode, semaphores_: Sequence[semaphores.Semaphore], values: Sequence[int]
    ) -> None:
        graphs.set_node(self._driver, executable, node, semaphores_, values)

    # -- inside --------------------------------------------------------------------------------------------------

    def _info(self, ordinal: int) -> DeviceInfo:
        driver = self._driver
        device = driver.call("cuDeviceGet", ordinal)
        name = driver.call("cuDeviceGetName", 128, device)
        uuid = bytes(_uuid(driver, device))
        bus = driver.call("cuDeviceGetPCIBusId", 32, device)
        return DeviceInfo(
            ordinal=ordinal,
            name=_text(name),
            uuid=uuid,
            pci_bus_id=pci_bus_id(_text(bus)),
            luid=_luid(driver, device),
            dlpack=(2, ordinal),  # kDLCUDA
            array_interface="__cuda_array_interface__",
            note=_mig(driver, device, uuid),
        )


def _text(value: bytes) -> str:
    return value.partition(b"\0")[0].decode()


def _uuid(driver: Driver, device: object) -> bytes:
    """Under MIG the instance's, which no other API has."""
    # 13.x has one function, which is the second version; 12.9 has both.
    call = "cuDeviceGetUuid_v2" if hasattr(driver.api, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    found: bytes = driver.call(call, device).bytes
    return found


def _mig(driver: Driver, device: object, uuid: bytes) -> str:
    """What the driver says of MIG: the first version of the call still gives the whole GPU's UUID."""
    address = driver.address("cuDeviceGetUuid", 9020)
    if not address:
        return ""
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(address)
    whole = ctypes.create_string_buffer(16)
    if function(whole, int(device)) != 0 or whole.raw == uuid:  # type: ignore[call-overload]
        return ""
    return (
        f"a MIG instance of the GPU with UUID {whole.raw.hex()}: its own UUID is the instance's, which Vulkan does not "
        "know, so nothing that Vulkan exports matches it"
    )


def _luid(driver: Driver, device: object) -> bytes | None:
    if not _WINDOWS:
        return None
    result = driver.status("cuDeviceGetLuid", device)
    return None if result[0] else bytes(result[1])[:8]


def _kernel_module() -> str:
    """The kernel module's version, where the system shows it."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
