"""The translation: each call of the contract, handed to streams, memory and semaphores."""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from gpuinterop import system
from gpuinterop.backend import Address, AllocationBackend, DeviceInfo, HostSemaphoreBackend, StreamMemoryBackend
from gpuinterop.capabilities import Capability
from gpuinterop.errors import ArgumentTypeError, BackendUnavailableError, InvalidArgumentError
from gpuinterop.handles import (
    AllocationHandle,
    AnySemaphoreHandle,
    FdHandle,
    Granularity,
    MemoryHandle,
    OpaqueFd,
    TimelineFd,
    VmmFd,
)

from . import capabilities, memory, semaphores, stream_memory, streams

Batch: TypeAlias = tuple[semaphores.Semaphore, ...]

_SEMAPHORES: Mapping[type, type[semaphores.BinarySemaphore | semaphores.TimelineSemaphore]] = {
    OpaqueFd: semaphores.BinarySemaphore,
    TimelineFd: semaphores.TimelineSemaphore,
}


@dataclass(frozen=True, slots=True)
class Device:
    """The one device there is."""

    ordinal: int


class HostBackend(HostSemaphoreBackend, AllocationBackend, StreamMemoryBackend):
    """The CPU as a device. Streams are threads; memory and semaphores are memfds that other processes share."""

    name = "host"
    priority = -1
    pageable_copies_block: ClassVar[bool] = False  # a copy is the worker's, whatever memory it touches
    survives_fork: ClassVar[bool] = True

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise BackendUnavailableError(
                f"the host backend shares memfds and futexes, which {sys.platform} does not have.",
                fix="Use it on Linux.",
            )
        self._info = DeviceInfo(
            ordinal=0, name=_cpu_name(), is_cpu=True, dlpack=(1, 0), array_interface="__array_interface__"
        )
        self._calling_thread = streams.CallingThread()

    def versions(self) -> Mapping[str, str]:
        return {
            "python": platform.python_version(),
            "libc": " ".join(system.libc_version()).strip(),
            "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        }

    def libraries(self) -> Mapping[str, str]:
        path = system.loaded_library("libc.so", "libc-", "ld-musl")
        return {"libc": path} if path else {}

    def devices(self) -> Sequence[DeviceInfo]:
        return (self._info,)

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return capabilities.table()

    def open_device(self, ordinal: int) -> Device:
        return Device(ordinal)

    # -- streams and events --------------------------------------------------------------------------------------

    def create_stream(self, device: Device, *, high_priority: bool = False) -> streams.Stream:
        return streams.create()

    def adopt_stream(self, device: Device, pointer: int) -> streams.AnyStream:
        if pointer == 0:
            return self._calling_thread
        if (stream := streams.find(pointer)) is not None:
            return stream
        raise InvalidArgumentError(
            "stream",
            f"{pointer:#x} is no stream of the host: it takes 0, the calling thread, and the `ptr` of a stream made by "
            "create_stream() that is not closed.",
        )

    def stream_pointer(self, stream: streams.AnyStream) -> int:
        return stream.pointer

    def destroy_stream(self, stream: streams.AnyStream) -> None:
        stream.destroy()

    def is_idle(self, stream: streams.AnyStream) -> bool:
        return stream.idle

    def synchronize(self, stream: streams.AnyStream) -> None:
        stream.synchronize()

    def wait_event(self, stream: streams.AnyStream, event: streams.Event) -> None:
        stream.submit(event.join, (stream.check,))

    def record(self, stream: streams.AnyStream) -> streams.Event:
        return stream.record()

    def is_done(self, event: streams.Event) -> bool:
        return event.query()

    def destroy_event(self, event: streams.Event) -> None:
        """Nothing is held."""

    def wait_done(self, event: streams.Event, timeout: float | None) -> bool:
        return event.wait(timeout)

    def copy(self, stream: streams.AnyStream, target: Address, source: Address, size: int) -> None:
        stream.submit(ctypes.memmove, (target, source, size))

    def fill(self, stream: streams.AnyStream, target: Address, byte: int, size: int) -> None:
        stream.submit(ctypes.memset, (target, byte, size))

    # -- external memory -----------------------------------------------------------------------------------------

    def import_memory(self, device: Device, handle: MemoryHandle, *, size: int, dedicated: bool) -> memory.Mapping:
        return memory.import_memory(_fd(handle, OpaqueFd), size, trusted=_trusted(handle))

    def map_buffer(self, memory: memory.Mapping, *, size: int) -> tuple[memory.Mapping, Address]:
        return memory, memory.data

    def unmap_buffer(self, mapping: memory.Mapping) -> None:
        """The object is mapped as a whole, until it is destroyed."""

    def destroy_memory(self, memory: memory.Mapping) -> None:
        memory.release()

    # -- external semaphores -------------------------------------------------------------------------------------

    def import_semaphore(self, device: Device, handle: AnySemaphoreHandle) -> semaphores.Semaphore:
        return _semaphore(type(handle)).load(_fd(handle, FdHandle), trusted=_trusted(handle))

    def prepare(self, semaphores: Sequence[semaphores.Semaphore]) -> Batch:
        return tuple(semaphores)

    def signal(self, batch: Batch, stream: streams.AnyStream, values: Sequence[int]) -> None:
        stream.submit(semaphores.signal_all, (batch, values))

    def wait(self, batch: Batch, stream: streams.AnyStream, values: Sequence[int], timeout_ms: int | None) -> None:
        stream.submit(semaphores.wait_all, (batch, values, timeout_ms, stream.check))

    def destroy_semaphore(self, semaphore: semaphores.Semaphore) -> None:
        semaphore.close()

    def abandon_semaphore(self, semaphore: semaphores.Semaphore) -> None:
        semaphore.abandon()

    # -- semaphores made here ------------------------------------------------------------------------------------

    def create_semaphore(self, device: Device, handle_type: type[AnySemaphoreHandle]) -> semaphores.Semaphore:
        return _semaphore(handle_type).create()

    def export_semaphore(self, semaphore: semaphores.Semaphore) -> AnySemaphoreHandle:
        if isinstance(semaphore, semaphores.BinarySemaphore):
            return semaphore.export(OpaqueFd)
        return semaphore.export(TimelineFd)

    def host_signal(self, semaphore: semaphores.Semaphore, value: int) -> None:
        semaphore.signal(value)

    def host_wait(self, semaphore: semaphores.Semaphore, value: int, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        return semaphore.wait(value, deadline, streams.check_exit)

    # -- stream memory operations --------------------------------------------------------------------------------

    def pin(self, device: Device, address: Address, size: int) -> tuple[None, Address]:
        return None, address

    def unpin(self, pin: None) -> None:
        """Nothing was done to it."""

    def write_value(self, stream: streams.AnyStream, word: Address, value: int) -> None:
        stream.submit(stream_memory.write, (word, value))

    def wait_value(self, stream: streams.AnyStream, word: Address, value: int) -> None:
        stream.submit(stream_memory.wait, (word, value, stream.check))

    # -- shareable allocations -----------------------------------------------------------------------------------

    def granularity(self, device: Device, handle_type: type[AllocationHandle]) -> Granularity:
        return Granularity(system.PAGE, system.PAGE)

    def allocate(self, device: Device, size: int, handle_type: type[AllocationHandle]) -> memory.Allocation:
        return memory.allocate(size)

    def export_allocation(self, allocation: memory.Allocation) -> AllocationHandle:
        return memory.export(VmmFd, allocation.fd)

    def import_allocation(self, device: Device, handle: AllocationHandle, *, size: int) -> memory.Allocation:
        return memory.import_allocation(_fd(handle, VmmFd), size)

    def map_allocation(
        self, allocation: memory.Allocation, devices: Sequence[Device]
    ) -> tuple[memory.Mapping, Address]:
        mapping = allocation.map()
        return mapping, mapping.data

    def unmap_allocation(self, mapping: memory.Mapping) -> None:
        mapping.release()

    def release_allocation(self, allocation: memory.Allocation) -> None:
        allocation.release()


def _fd(handle: object, kind: type[FdHandle]) -> int:
    if not isinstance(handle, kind):
        raise ArgumentTypeError("handle", f"the host takes {kind.__name__} here, not {type(handle).__name__}.")
    return handle.fd


def _trusted(handle: object) -> bool:
    return isinstance(handle, FdHandle) and handle.trusted


def _semaphore(kind: type) -> type[semaphores.BinarySemaphore | semaphores.TimelineSemaphore]:
    found = _SEMAPHORES.get(kind)
    if found is None:
        raise ArgumentTypeError("handle", f"the host has no semaphores of {kind.__name__}; OpaqueFd and TimelineFd.")
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model") and value.strip():
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"
