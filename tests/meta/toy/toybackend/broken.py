"""The toy with one rule broken in each class. The docstring says which."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuinterop_mine.memory import Imported
from gpuinterop_mine.streams import Event, Stream

from gpuinterop import capabilities
from gpuinterop.backend import DeviceInfo
from gpuinterop.capabilities import Capability, Operation, Scope, Support
from gpuinterop.errors import BackendUnavailableError, DriverError
from gpuinterop.handles import AnySemaphoreHandle, ArrayLayout, FdHandle, MemoryHandle, OpaqueFd

from . import Array, ToyArrays, ToyBackend, usable


def replace_mapping(memory: Imported, fd: int = -1) -> None:
    """Map a private copy of the file, or zeros, in its place: a plain munmap would take the whole test run along."""
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    fixed = 0x10 | mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if fd < 0 else 0)
    libc.mmap(memory.address, memory.size, mmap.PROT_READ | mmap.PROT_WRITE, fixed, fd, 0)


class NoWait(ToyBackend):
    """A wait does nothing."""

    def wait(self, batch: Any, stream: Stream, values: Sequence[int], timeout_ms: int | None) -> None:
        pass


class NoSignal(ToyBackend):
    """A signal does nothing."""

    def signal(self, batch: Any, stream: Stream, values: Sequence[int]) -> None:
        pass


class EarlySignal(ToyBackend):
    """A signal does not wait for the work before it."""

    def signal(self, batch: Any, stream: Stream, values: Sequence[int]) -> None:
        for semaphore, value in zip(batch, values, strict=True):
            semaphore.signal(value)


class EarlyEvents(ToyBackend):
    """An event is done when it is recorded."""

    def record(self, stream: Stream) -> Event:
        event = Event()
        event.done.set()
        return event

    # What is released on the word of such events is still in use, and would take the test run along.

    def destroy_memory(self, memory: Any) -> None:
        pass

    def destroy_semaphore(self, semaphore: Any) -> None:
        pass


class NoStreamOrder(ToyBackend):
    """A stream does not wait for another."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        pass


class OneStream(ToyBackend):
    """All streams are one."""

    def create_stream(self, device: int, *, high_priority: bool = False) -> Stream:
        return self._streams.setdefault(16, Stream(16)) if 16 not in self._streams else self._streams[16]

    def destroy_stream(self, stream: Stream) -> None:
        pass


class FirstOfBatch(ToyBackend):
    """A batch waits for the first of its semaphores only."""

    def wait(self, batch: Any, stream: Stream, values: Sequence[int], timeout_ms: int | None) -> None:
        super().wait(batch[:1], stream, values[:1], timeout_ms)


class ExactWait(ToyBackend):
    """A timeline wait passes at its value alone, not from it on."""

    def import_semaphore(self, device: int, handle: AnySemaphoreHandle) -> Any:
        semaphore = super().import_semaphore(device, handle)

        def wait(value: int, deadline: float | None, check: Callable[[], None]) -> None:
            while semaphore.value != value:
                check()
                time.sleep(1e-4)

        semaphore.wait = wait
        return semaphore


class PrivateMapping(ToyBackend):
    """What the device writes stays with it."""

    def import_memory(self, device: int, handle: MemoryHandle, *, size: int, dedicated: bool) -> Any:
        assert isinstance(handle, FdHandle)
        fd = os.dup(handle.fd)
        try:
            memory = super().import_memory(device, handle, size=size, dedicated=dedicated)
            replace_mapping(memory, fd)
        finally:
            os.close(fd)
        return memory


class NeverUnmap(ToyBackend):
    """Memory stays mapped after its end."""

    def destroy_memory(self, memory: Any) -> None:
        pass


class UnmapForGood(ToyBackend):
    """What was unmapped once is other memory when it is mapped again."""

    def unmap_buffer(self, mapping: Any) -> None:
        replace_mapping(mapping)


class LeakedFd(ToyBackend):
    """An import leaves a descriptor open."""

    def import_memory(self, device: int, handle: MemoryHandle, *, size: int, dedicated: bool) -> Any:
        assert isinstance(handle, FdHandle)
        os.dup(handle.fd)
        return super().import_memory(device, handle, size=size, dedicated=dedicated)


class LeakedFdOfFailure(ToyBackend):
    """An import that fails leaves a descriptor open."""

    def import_memory(self, device: int, handle: MemoryHandle, *, size: int, dedicated: bool) -> Any:
        assert isinstance(handle, FdHandle)
        try:
            return super().import_memory(device, handle, size=size, dedicated=dedicated)
        except BaseException:
            os.dup(handle.fd)
            raise


class TakesAnything(ToyBackend):
    """A file is taken for memory."""

    def import_memory(self, device: int, handle: MemoryHandle, *, size: int, dedicated: bool) -> Any:
        assert isinstance(handle, FdHandle)
        memory = Imported(handle.fd, size)
        os.close(handle.fd)
        return memory


class WrongByte(ToyBackend):
    """A fill sets another byte."""

    def fill(self, stream: Stream, target: int, byte: int, size: int) -> None:
        super().fill(stream, target, byte ^ 1, size)


class LongFill(ToyBackend):
    """A fill sets one byte too many."""

    def fill(self, stream: Stream, target: int, byte: int, size: int) -> None:
        super().fill(stream, target, byte, size + (size < 4096))


class ShortCopy(ToyBackend):
    """A copy leaves out the last byte."""

    def copy(self, stream: Stream, target: int, source: int, size: int) -> None:
        super().copy(stream, target, source, size - 1)


class EagerCopy(ToyBackend):
    """A copy does not wait for its turn in the stream."""

    def copy(self, stream: Stream, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)


class EmptyPromise(ToyBackend):
    """A capability says usable, and the call fails."""

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        yield from super().capabilities(ordinal)
        for operation in (Operation.IMPORT_SEMAPHORE, Operation.SIGNAL_SEMAPHORE, Operation.WAIT_SEMAPHORE):
            yield usable(operation, OpaqueFd)

    def import_semaphore(self, device: int, handle: AnySemaphoreHandle) -> Any:
        if isinstance(handle, OpaqueFd):
            raise DriverError("import_semaphore", 1, "NOT_YET")
        return super().import_semaphore(device, handle)


class ThinReason(ToyBackend):
    """A gap without a real reason."""

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        yield from super().capabilities(ordinal)
        yield Capability(
            operation=Operation.GRAPH_CAPTURE,
            support=Support.UNSUPPORTED,
            scope=Scope.DRIVER,
            reason="no",
            reference="-",
        )


class ClaimsSupported(ToyBackend):
    """SUPPORTED without a run."""

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        for found in super().capabilities(ordinal):
            yield replace(found, support=Support.SUPPORTED)


class OddIdentity(ToyBackend):
    """A UUID that is none."""

    def devices(self) -> Sequence[DeviceInfo]:
        return [replace(info, uuid=b"toy") for info in super().devices()]


class WrongAddressKind(ToyBackend):
    """Host memory that says of itself it is a GPU's."""

    def devices(self) -> Sequence[DeviceInfo]:
        return [replace(info, array_interface="__array__") for info in super().devices()]


class Careless(ToyBackend):
    """Gaps are not refused: what the core checks is taken out of it, as a careless change to it would."""

    def __init__(self) -> None:
        super().__init__()
        capabilities.Capabilities.require = lambda self, *requirements: None  # type: ignore[method-assign]


class Unavailable(ToyBackend):
    """It does not work on this machine, and says why."""

    def __init__(self) -> None:
        raise BackendUnavailableError("the toy box is locked.", fix="Find the key.")


class Crashing(ToyBackend):
    """It loads, and fails when it is asked for its devices."""

    def devices(self) -> Sequence[DeviceInfo]:
        raise RuntimeError("the toy broke")


class Mute(ToyBackend):
    """It does not say what it calls, so the kit cannot tell whether that is a test double."""

    def libraries(self) -> Mapping[str, str]:
        raise RuntimeError("the toy is mute")


# -- arrays --------------------------------------------------------------------------------------------------------


class NoPitch(ToyArrays):
    """Rows are taken for as long as their texels: right for even widths only."""

    def map_array(self, memory: Any, layout: ArrayLayout) -> Array:
        array = super().map_array(memory, layout)

        def sizes(level: int) -> tuple[int, int, int]:
            width, height, depth = array.level_extent(level)
            pitch = (width + 2 * array.border) * array.texel
            slice_size = pitch * (height + 2 * array.border)
            return pitch, slice_size, -(-slice_size * depth // 16) * 16

        array._sizes = sizes  # type: ignore[method-assign]
        return array


class FirstLayer(ToyArrays):
    """Of an image with layers every one is the first."""

    def map_array(self, memory: Any, layout: ArrayLayout) -> Array:
        array = super().map_array(memory, layout)
        rows = array.rows

        def first(level: int) -> Iterator[tuple[int, int]]:
            found = list(rows(level))
            layers = max(1, layout.layers)
            return iter(found[: len(found) // layers] * layers)

        array.rows = first  # type: ignore[method-assign]
        return array


class ShortLevel(ToyArrays):
    """The last row of a level is left out."""

    def map_array(self, memory: Any, layout: ArrayLayout) -> Array:
        array = super().map_array(memory, layout)
        rows, scratch = array.rows, ctypes.create_string_buffer(1 << 16)

        def all_but_one(level: int) -> Iterator[tuple[int, int]]:
            *found, (_, size) = rows(level)
            return iter([*found, (ctypes.addressof(scratch), size)])

        array.rows = all_but_one  # type: ignore[method-assign]
        return array


class LevelsFromZero(ToyArrays):
    """Every level begins where level 0 does."""

    def map_array(self, memory: Any, layout: ArrayLayout) -> Array:
        array = super().map_array(memory, layout)
        rows = array.rows

        def moved(level: int) -> Iterator[tuple[int, int]]:
            before = sum(array._sizes(index)[2] for index in range(level))
            return ((address - before, size) for address, size in rows(level))

        array.rows = moved  # type: ignore[method-assign]
        return array


class OneWay(ToyArrays):
    """Copies into an array copy out of it."""

    def copy_level(self, stream: Stream, array: Array, level: int, address: int, size: int, *, to_array: bool) -> None:
        scratch = (ctypes.c_char * size)() if to_array else None
        target = ctypes.addressof(scratch) if scratch is not None else address
        super().copy_level(stream, array, level, target, size, to_array=False)
        stream.put(lambda scratch=scratch: None)  # type: ignore[misc]  # it lives until then


class EagerLevel(ToyArrays):
    """A level's copy does not wait for its turn in the stream."""

    def copy_level(self, stream: Stream, array: Array, level: int, address: int, size: int, *, to_array: bool) -> None:
        super().copy_level(self._streams[0], array, level, address, size, to_array=to_array)
