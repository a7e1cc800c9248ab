"""The example of docs/examples/backend as a third party's backend, and what the tests of the kit need beyond it.

It is found through the entry-point group only, and imports what a backend may import.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuinterop_mine.backend import MyBackend
from gpuinterop_mine.memory import Imported
from gpuinterop_mine.semaphores import Timeline
from gpuinterop_mine.streams import Stream

from gpuinterop import system
from gpuinterop.backend import ArrayBackend, DeviceInfo
from gpuinterop.capabilities import Capability, Operation, Scope, Support
from gpuinterop.errors import HandleError, PeerError
from gpuinterop.handles import AnySemaphoreHandle, ArrayLayout, ArrayUsage, FdHandle, OpaqueFd

_libc = ctypes.CDLL(None)
for _name in ("timedlock", "consistent", "unlock"):
    getattr(_libc, f"pthread_mutex_{_name}").argtypes = (ctypes.c_void_p, ctypes.c_void_p)[: 1 + (_name == "timedlock")]


class Binary:
    """SwiftShader's page: a mutex, a condition behind it, then the count of references and the flag."""

    def __init__(self, fd: int) -> None:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(("/memfd:SwiftShader.", "/memfd:gpuinterop.exporter.b")):
            raise HandleError("handle: this is no binary semaphore.")
        self.label = "binary semaphore"  # until the core gives it its name
        self.address = system.map_shared(fd, system.PAGE)
        self._condition = self.address + {"x86_64": 40}.get(platform.machine(), 48)
        self._flag = ctypes.c_uint8.from_address(self._condition + 48 + 4)

    def _lock(self) -> None:
        if code := _libc.pthread_mutex_timedlock(self.address, (ctypes.c_long * 2)(int(time.time()) + 2, 0)):
            raise PeerError(f"{self.label}: its lock cannot be taken ({errno.errorcode[code]}).")

    def signal(self, value: int) -> None:
        self._lock()
        self._flag.value = 1
        _libc.pthread_cond_broadcast(ctypes.c_void_p(self._condition))
        _libc.pthread_mutex_unlock(self.address)

    def wait(self, value: int, deadline: float | None, check: Callable[[], None]) -> None:
        """Until it was signalled; takes the signal."""
        taken = False
        while not taken:
            while not self._flag.value:
                check()
                time.sleep(1e-4)
            self._lock()
            taken, self._flag.value = bool(self._flag.value), 0
            _libc.pthread_mutex_unlock(self.address)

    def unmap(self) -> None:
        system.unmap(self.address, system.PAGE)


class ToyBackend(MyBackend):
    """The example under a name of its own."""

    name = "toy"

    def versions(self) -> Mapping[str, str]:
        return {"toy": "0.1"}

    def devices(self) -> Sequence[DeviceInfo]:
        return [replace(info, name="Toy") for info in super().devices()]

    def size_of(self, fd: int) -> int:
        """SwiftShader's memory is believed not to shrink."""
        if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:SwiftShader.Memory"):
            return os.fstat(fd).st_size
        return super().size_of(fd)


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

    def import_semaphore(self, device: int, handle: AnySemaphoreHandle) -> Any:
        """Also a simulated driver's own timeline, whose page differs in how it begins."""
        assert isinstance(handle, FdHandle)
        if system.seals(handle.fd) is not None and os.pread(handle.fd, 8, 0) == b"GIPTLSMD":
            return Timeline(handle.fd)
        return super().import_semaphore(device, handle)


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

    def __init__(self, memory: Imported, layout: ArrayLayout) -> None:
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
