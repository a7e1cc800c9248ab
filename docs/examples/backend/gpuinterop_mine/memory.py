"""External memory, and copies: the memory is a memfd that cannot shrink."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

from gpuinterop.backend import Address, Backend
from gpuinterop.errors import DriverError, HandleError
from gpuinterop.handles import FdHandle, MemoryHandle

from .streams import Stream

_F_GET_SEALS, _SEAL_SHRINK = 1034, 2
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def sealed_size(fd: int) -> int:
    """The size of a memfd that cannot shrink."""
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        raise HandleError("handle: expected a memfd, got another kind of file.") from error
    if not seals & _SEAL_SHRINK:
        raise HandleError("handle: this memfd may shrink; seal it with F_SEAL_SHRINK.")
    return os.fstat(fd).st_size


def map_shared(fd: int, size: int, flags: int = mmap.MAP_SHARED) -> Address:
    """The address of a new mapping."""
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise DriverError("mmap", ctypes.get_errno(), errno.errorcode.get(ctypes.get_errno(), "?"))
    return int(address)


class Imported:
    """The whole object, mapped once."""

    def __init__(self, fd: int, size: int, flags: int = mmap.MAP_SHARED) -> None:
        self.size = size
        self.address = map_shared(fd, size, flags)

    def unmap(self) -> None:
        libc.munmap(self.address, self.size)


class Memory(Backend):
    """External memory, and copies between any two addresses. In each docstring: the call that CUDA has for it."""

    def import_memory(self, device: int, handle: MemoryHandle, *, size: int, dedicated: bool) -> Imported:
        """``cuImportExternalMemory``.

        The handle's descriptor is a duplicate, made for this call: it is the driver's, or closed here, when this
        returns; and left alone when this raises.
        """
        assert isinstance(handle, FdHandle)
        if size > self.size_of(handle.fd):
            raise HandleError("size: beyond the memfd.")
        memory = Imported(handle.fd, size)
        os.close(handle.fd)
        return memory

    def size_of(self, fd: int) -> int:
        """No call: the kernel knows it."""
        return sealed_size(fd)

    def map_buffer(self, memory: Imported, *, size: int) -> tuple[Imported, Address]:
        """``cuExternalMemoryGetMappedBuffer``, from offset 0; the mapping and its address."""
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
