"""A third party's backend, as small as one can be: the CPU, with memfds, timeline semaphores and threads.

It is found through the entry-point group only, imports what a backend may import, and shares no code with the host
backend. What it does not implement becomes a gap by itself.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpuinterop.backend import ArrayBackend, Backend, DeviceInfo
from gpuinterop.capabilities import Capability, Operation, Scope, Support
from gpuinterop.errors import DriverError, HandleError, PeerError
from gpuinterop.handles import (
    AnySemaphoreHandle,
    ArrayLayout,
    ArrayUsage,
    FdHandle,
    MemoryHandle,
    OpaqueFd,
    TimelineFd,
)

_F_GET_SEALS, _SEAL_SHRINK = 1034, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
for _name in ("timedlock", "consistent", "unlock"):
    getattr(_libc, f"pthread_mutex_{_name}").argtypes = (ctypes.c_void_p, ctypes.c_void_p)[: 1 + (_name == "timedlock")]
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())


def sealed_size(fd: int) -> int:
    """The size of a memfd that cannot shrink; SwiftShader's memory is believed not to."""
    if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:SwiftShader.Memory"):
        return os.fstat(fd).st_size
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        raise HandleError("handle: this is no memfd.") from error
    if not seals & _SEAL_SHRINK:
        raise HandleError("handle: this memfd may shrink.")
    return os.fstat(fd).st_size


def map_shared(fd: int, size: int, flags: int = mmap.MAP_SHARED) -> int:
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise DriverError("mmap", ctypes.get_errno(), errno.errorcode.get(ctypes.get_errno(), "?"))
    return int(address)


class Memory:
    """The whole object, mapped once."""

    def __init__(self, fd: int, size: int, flags: int = mmap.MAP_SHARED) -> None:
        self.size = size
        self.address = map_shared(fd, size, flags)

    def unmap(self) -> None:
        _libc.munmap(self.address, self.size)


class Timeline:
    """The host's timeline page: value at 16, sequence at 12; signallers lock the file."""

    def __init__(self, fd: int) -> None:
        if sealed_size(fd) != mmap.PAGESIZE:
            raise HandleError("handle: this is no timeline semaphore: it has another size.")
        self.address = map_shared(fd, mmap.PAGESIZE)
        self._fd = os.dup(fd)
        if ctypes.string_at(self.address, 8) not in (b"GIPTLSM1", b"GIPTLSMD"):
            self.unmap()
            raise HandleError("handle: this is no timeline semaphore: it begins with something else.")
        self.value = ctypes.c_uint64.from_address(self.address + 16)
        self._sequence = ctypes.c_uint32.from_address(self.address + 12)

    def signal(self, value: int) -> None:
        with open(f"/proc/self/fd/{self._fd}", "rb+", buffering=0) as own:
            fcntl.flock(own, fcntl.LOCK_EX)
            try:
                if value <= self.value.value:
                    raise DriverError("signal", errno.EINVAL, "NOT_GREATER")
                self.value.value = value
                self._sequence.value += 1
            finally:
                fcntl.flock(own, fcntl.LOCK_UN)
        _libc.syscall(_FUTEX, ctypes.c_void_p(self.address + 12), 1, 0x7FFFFFFF, None, None, 0)

    def reached(self, value: int) -> bool:
        return bool(self.value.value >= value)

    def unmap(self) -> None:
        _libc.munmap(self.address, mmap.PAGESIZE)
        os.close(self._fd)


class Binary:
    """SwiftShader's page: a mutex, a condition behind it, then the count of references and the flag."""

    def __init__(self, fd: int) -> None:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(("/memfd:SwiftShader.", "/memfd:gpuinterop.exporter.b")):
            raise HandleError("handle: this is no binary semaphore.")
        self.address = map_shared(fd, mmap.PAGESIZE)
        self._condition = self.address + {"x86_64": 40}.get(platform.machine(), 48)
        self._flag = ctypes.c_uint8.from_address(self._condition + 48 + 4)

    def _lock(self) -> None:
        if code := _libc.pthread_mutex_timedlock(self.address, (ctypes.c_long * 2)(int(time.time()) + 2, 0)):
            raise PeerError(f"binary: its lock cannot be taken ({errno.errorcode[code]}).")

    def signal(self, value: int) -> None:
        self._lock()
        self._flag.value = 1
        _libc.pthread_cond_broadcast(ctypes.c_void_p(self._condition))
        _libc.pthread_mutex_unlock(self.address)

    def reached(self, value: int) -> bool:
        """Whether it was signalled; takes the signal."""
        if not self._flag.value:
            return False
        self._lock()
        taken, self._flag.value = bool(self._flag.value), 0
        _libc.pthread_mutex_unlock(self.address)
        return taken

    def unmap(self) -> None:
        _libc.munmap(self.address, mmap.PAGESIZE)


class Event:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.failure: BaseException | None = None


class Stream:
    """A thread behind a queue; after a failure it does nothing more."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self.failure: BaseException | None = None
        self.ended = False
        self._queue: queue.SimpleQueue[Callable[[], None] | Event | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def record(self) -> Event:
        event = Event()
        self._queue.put(event)
        return event

    def end(self) -> None:
        self.ended = True
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Event):
                item.failure = self.failure
                item.done.set()
            elif self.failure is None:
                try:
                    item()
                except BaseException as error:
                    self.failure = error


class Caller(Stream):
    """The default stream: the calling thread."""

    def __init__(self) -> None:
        self.pointer = 0
        self.failure = None
        self.ended = False

    def put(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        event = Event()
        event.done.set()
        return event


class ToyBackend(Backend):
    """See the module."""

    name = "toy"
    priority = -10
    pageable_copies_block = False

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {0: Caller()}
        self._next = 100

    def versions(self) -> Mapping[str, str]:
        return {"toy": "0.1"}

    def devices(self) -> Sequence[DeviceInfo]:
        return [DeviceInfo(ordinal=0, name="Toy", is_cpu=True, dlpack=(1, 0), array_interface="__array_interface__")]

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        for operation, kind in (
            (Operation.IMPORT_MEMORY, OpaqueFd),
            (Operation.MAP_BUFFER, OpaqueFd),
            (Operation.IMPORT_SEMAPHORE, TimelineFd),
            (Operation.SIGNAL_SEMAPHORE, TimelineFd),
            (Operation.WAIT_SEMAPHORE, TimelineFd),
        ):
            yield usable(operation, kind)

    def open_device(self, ordinal: int) -> int:
        return ordinal

    # -- streams -------------------------------------------------------------------------------------------------

    def create_stream(self, device: int, *, high_priority: bool = False) -> Stream:
        self._next += 1
        stream = self._streams[self._next] = Stream(self._next)
        return stream

    def adopt_stream(self, device: int, pointer: int) -> Stream:
        return self._streams[pointer]

    def stream_pointer(self, stream: Stream) -> int:
        return stream.pointer

    def destroy_stream(self, stream: Stream) -> None:
        del self._streams[stream.pointer]
        stream.end()

    def synchronize(self, stream: Stream) -> None:
        self.wait_done(stream.record(), None)

    def wait_event(self, stream: Stream, event: Event) -> None:
        stream.put(lambda: self._join(event))

    @staticmethod
    def _join(event: Event) -> None:
        event.done.wait()
        if event.failure is not None:
            raise event.failure

    def record(self, stream: Stream) -> Event:
        return stream.record()

    def is_done(self, event: Event) -> bool:
        if event.done.is_set() and event.failure is not None:
            raise event.failure
        return event.done.is_set()

    def destroy_event(self, event: Event) -> None:
        pass

    def copy(self, stream: Stream, target: int, source: int, size: int) -> None:
        stream.put(lambda: ctypes.memmove(target, source, size))  # type: ignore[arg-type]

    def fill(self, stream: Stream, target: int, byte: int, size: int) -> None:
        stream.put(lambda: ctypes.memset(target, byte, size))  # type: ignore[arg-type]

    # -- memory --------------------------------------------------------------------------------------------------

    def import_memory(self, device: int, handle: MemoryHandle, *, size: int, dedicated: bool) -> Any:
        assert isinstance(handle, FdHandle)
        if size > sealed_size(handle.fd):
            raise HandleError("size: beyond the memfd.")
        memory = Memory(handle.fd, size)
        os.close(handle.fd)
        return memory

    def map_buffer(self, memory: Any, *, size: int) -> tuple[Any, int]:
        return memory, memory.address

    def unmap_buffer(self, mapping: Any) -> None:
        pass

    def destroy_memory(self, memory: Any) -> None:
        memory.unmap()

    # -- semaphores ----------------------------------------------------------------------------------------------

    def import_semaphore(self, device: int, handle: AnySemaphoreHandle) -> Any:
        assert isinstance(handle, FdHandle)
        semaphore = Timeline(handle.fd)
        os.close(handle.fd)
        return semaphore

    def prepare(self, semaphores: Sequence[Any]) -> Any:
        return tuple(semaphores)

    def signal(self, batch: Any, stream: Stream, values: Sequence[int]) -> None:
        def run() -> None:
            for semaphore, value in zip(batch, values, strict=True):
                semaphore.signal(value)

        stream.put(run)

    def wait(self, batch: Any, stream: Stream, values: Sequence[int], timeout_ms: int | None) -> None:
        def run() -> None:
            for semaphore, value in zip(batch, values, strict=True):
                while not semaphore.reached(value):
                    if stream.ended:
                        raise DriverError("wait", errno.ECANCELED, "ECANCELED")
                    time.sleep(1e-4)

        stream.put(run)

    def destroy_semaphore(self, semaphore: Any) -> None:
        semaphore.unmap()


class ToyGpu(ToyBackend):
    """The same, said to be a GPU: what a backend on a simulated driver is."""

    count = 1

    def devices(self) -> Sequence[DeviceInfo]:
        return [
            DeviceInfo(
                ordinal=ordinal,
                name="Toy GPU",
                uuid=bytes([ordinal + 1]) * 16,
                dlpack=(2, ordinal),
                array_interface="__cuda_array_interface__",
            )
            for ordinal in range(self.count)
        ]

    def adopt_stream(self, device: int, pointer: int) -> Stream:
        return self._streams[0 if pointer in (1, 2) else pointer]  # CUDA's names of default streams


def usable(operation: Operation, kind: Any) -> Capability:
    return Capability(
        operation=operation,
        handle_type=kind,
        support=Support.UNVERIFIED,
        scope=Scope.PLATFORM,
        reason="a toy, on whatever machine runs its tests.",
        reference="toybackend",
    )


class TwoToyGpus(ToyGpu):
    """Two of them, of one name."""

    count = 2


class Array:
    """A mapped image: the bytes from the layout's offset on, laid out as SwiftShader lays out what it tiles."""

    def __init__(self, memory: Memory, layout: ArrayLayout) -> None:
        self.address = memory.address + layout.offset
        self.layout = layout
        self.texel = _TEXEL_BYTES[layout.format]
        self.border = 1 if layout.usage & ArrayUsage.CUBEMAP else 0

    def level_extent(self, level: int) -> tuple[int, int, int]:
        width, height, depth = (max(1, edge >> level) for edge in self.layout.extent)
        return width, height, depth

    def rows(self, level: int) -> Iterator[tuple[int, int]]:
        """(address, size) of each row of texels, in the order of tightly packed ones."""
        width, height, depth = self.level_extent(level)
        pitch, slice_size, _ = self._sizes(level)
        before = sum(self._sizes(index)[2] for index in range(level))
        layer_size = sum(self._sizes(index)[2] for index in range(self.layout.levels))
        for layer in range(max(1, self.layout.layers)):
            for z in range(depth):
                start = self.address + layer * layer_size + before + z * slice_size
                for y in range(height):
                    yield start + (y + self.border) * pitch + self.border * self.texel, width * self.texel

    def _sizes(self, level: int) -> tuple[int, int, int]:
        """Of a row, a slice and the level. Sides are even, a cube's faces have a border, a level ends at 16 bytes."""
        width, height, depth = self.level_extent(level)
        pitch = -(-(width + 2 * self.border) // 2) * 2 * self.texel
        slice_size = pitch * -(-(height + 2 * self.border) // 2) * 2
        return pitch, slice_size, -(-slice_size * depth // 16) * 16


_TEXEL_BYTES = {
    "R8_UNORM": 1,
    "R16_UINT": 2,
    "R8G8B8A8_UNORM": 4,
    "R16G16_SFLOAT": 4,
    "R32_SFLOAT": 4,
    "R16G16B16A16_SFLOAT": 8,
    "R32G32B32A32_SFLOAT": 16,
}


class ToyArrays(ToyGpu, ArrayBackend):
    """The toy GPU with SwiftShader's images and semaphores: all that a simulated driver shares with it."""

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        yield from super().capabilities(ordinal)
        yield usable(Operation.MAP_MIPMAPPED_ARRAY, OpaqueFd)
        for operation in (Operation.IMPORT_SEMAPHORE, Operation.SIGNAL_SEMAPHORE, Operation.WAIT_SEMAPHORE):
            yield usable(operation, OpaqueFd)

    def import_semaphore(self, device: int, handle: AnySemaphoreHandle) -> Any:
        if not isinstance(handle, OpaqueFd):
            return super().import_semaphore(device, handle)
        semaphore = Binary(handle.fd)
        os.close(handle.fd)
        return semaphore

    def map_array(self, memory: Any, layout: ArrayLayout) -> Array:
        return Array(memory, layout)

    def copy_level(self, stream: Stream, array: Array, level: int, address: int, size: int, *, to_array: bool) -> None:
        def run() -> None:
            packed = address
            for row, count in array.rows(level):
                target, source = (row, packed) if to_array else (packed, row)
                ctypes.memmove(target, source, count)
                packed += count
            assert packed == address + size

        stream.put(run)

    def destroy_array(self, array: Array) -> None:
        pass
