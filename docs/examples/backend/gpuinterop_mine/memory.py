"""External memory, and copies: the memory is a memfd that cannot shrink."""

from __future__ import annotations

import ctypes
import os

from gpuinterop import system
from gpuinterop.backend import Address, Backend
from gpuinterop.errors import HandleError
from gpuinterop.handles import FdHandle, MemoryHandle

from .streams import Stream


class Imported:
    """The object, mapped once and completely."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self.address = system.map_shared(fd, size)

    def unmap(self) -> None:
        system.unmap(self.address, self.size)


class Memory(Backend):
    """External memory, and copies between any two addresses. Each docstring names CUDA's call for it."""

    def import_memory(self, device: int, handle: MemoryHandle, *, size: int, dedicated: bool) -> Imported:
        """``cuImportExternalMemory``.

        The handle's descriptor is a duplicate for this call. On success the driver owns it, or this method closes it.
        If this method raises, it leaves the descriptor open.
        """
        assert isinstance(handle, FdHandle)
        if size > self.size_of(handle.fd):
            raise HandleError("size: beyond the memfd.")
        memory = Imported(handle.fd, size)
        os.close(handle.fd)
        return memory

    def size_of(self, fd: int) -> int:
        """No call: the kernel reports the size of a memfd that cannot shrink."""
        seals = system.seals(fd)
        if seals is None:
            raise HandleError("handle: expected a memfd, got another kind of file.")
        if not seals & system.SEAL_SHRINK:
            raise HandleError("handle: this memfd may shrink; seal it with F_SEAL_SHRINK.")
        return os.fstat(fd).st_size

    def map_buffer(self, memory: Imported, *, size: int) -> tuple[Imported, Address]:
        """``cuExternalMemoryGetMappedBuffer`` from offset 0; returns the mapping and its address."""
        return memory, memory.address

    def unmap_buffer(self, mapping: Imported) -> None:
        """``cuMemFree``."""

    def destroy_memory(self, memory: Imported) -> None:
        """``cuDestroyExternalMemory``."""
        memory.unmap()

    def copy(self, stream: Stream, target: Address, source: Address, size: int) -> None:
        """``cuMemcpyAsync``."""
        stream.put(lambda: ctypes.memmove(target, source, size))  # type: ignore[arg-type]

    def fill(self, stream: Stream, target: Address, byte: int, size: int) -> None:
        """``cuMemsetD8Async``."""
        stream.put(lambda: ctypes.memset(target, byte, size))  # type: ignore[arg-type]
