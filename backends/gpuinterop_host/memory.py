"""Shared memory: the objects that are accepted, and how they are mapped.

**The rule.** A mapped object must not shrink, because access beyond its end kills the process with SIGBUS. So an object
is accepted only

1. if it is sealed against shrinking (F_SEAL_SHRINK), like lavapipe's memory and this backend's objects;
2. or if it can be sealed (made with MFD_ALLOW_SEALING and without F_SEAL_SEAL). F_SEAL_SHRINK is then added. The owner
   cannot truncate the object any more, but can still grow it;
3. or if it cannot be sealed, but has the name of a driver that does not truncate it (SwiftShader), and the handle is
   trusted (`FdHandle.trusted`), because a hostile process can choose any name.

All other objects are refused: regular files and /dev/shm objects (any process that can open them can truncate them),
other memfds that cannot be sealed, pipes, sockets, devices, descriptors that are not open for reading and writing, and
memfds sealed against writing. The seal is added after all other checks, and the size is checked again after the seal.
Then the whole object is mapped once. Timelines and allocations must already be sealed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gpuinterop import system, timeline
from gpuinterop.backend import Address, Backend
from gpuinterop.errors import ArgumentTypeError, HandleError
from gpuinterop.handles import FdHandle, MemoryHandle, OpaqueFd

from .formats import lavapipe, swiftshader
from .streams import Device

if sys.platform != "win32":
    import fcntl

_FdHandle = TypeVar("_FdHandle", bound=FdHandle)

MEMORY_DRIVERS: Final = (swiftshader.MEMORY_NAME,)
SEMAPHORE_DRIVERS: Final = (swiftshader.SEMAPHORE_NAME,)
BINARY_NAME: Final = "gpuinterop.binary"
NO_MEMORY = (swiftshader.SEMAPHORE_NAME, BINARY_NAME, timeline.NAME)
_LINK = "/memfd:"
MAY_TRUNCATE: Final = "; or truncate the memfd, which ends this process with SIGBUS"


@dataclass(frozen=True, slots=True)
class Object:
    """The object of a descriptor, not changed yet."""

    fd: int
    size: int
    seals: int
    name: str  # of the memfd; "" if /proc is not mounted

    @property
    def fixed(self) -> bool:
        """Whether the memfd can neither shrink nor grow."""
        return self.seals & system.FIXED == system.FIXED

    def secure(self) -> None:
        """Seal the memfd against shrinking. Called after all other checks."""
        if not self.seals & (system.SEAL_SHRINK | system.SEAL_SEAL):
            system.call("fcntl(F_ADD_SEALS)", fcntl.fcntl, self.fd, system.F_ADD_SEALS, system.SEAL_SHRINK)
        if os.fstat(self.fd).st_size < self.size:
            raise HandleError(
                "handle: expected a memfd that keeps its size, got one that was truncated while it was imported."
            )


def examine(fd: int, what: str, drivers: tuple[str, ...]) -> Object:
    """Apply the module's rule to `fd`, to be imported as `what`. `HandleError` has the reason for a refusal."""
    link = system.link(fd)
    seals = system.seals(fd)
    if seals is None:
        raise HandleError(
            f"handle: {link!r} cannot be {what} on the host, which accepts memfds; make it with "
            "memfd_create(MFD_ALLOW_SEALING)."
        )
    status = os.fstat(fd)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDWR:
        raise HandleError("handle: the descriptor is not open for reading and writing; export it with O_RDWR.")
    if seals & system.SEAL_WRITE:
        raise HandleError("handle: the memfd is sealed against writing; share one without F_SEAL_WRITE.")
    name = link.removeprefix(_LINK).removesuffix(" (deleted)") if link.startswith(_LINK) else ""
    unsealable = seals & system.SEAL_SEAL and not seals & system.SEAL_SHRINK
    if unsealable and not (status.st_nlink == 0 and name.startswith(drivers)):
        raise HandleError(
            f"handle: expected a memfd of a known driver, or one that can be sealed against shrinking, got {link!r}: a "
            f"process that truncates it would kill this one; make {what} with MFD_ALLOW_SEALING."
        )
    return Object(fd, status.st_size, seals, name)


def check_size(size: int, available: int, what: str) -> None:
    if size > available:
        raise HandleError(
            f"size: expected {available} bytes or fewer for this {what}, got {size}; pass the allocation's own size."
        )


class Owned:
    """Kernel objects, each with the call that releases it."""

    def __init__(self) -> None:
        self.releases: list[tuple[Any, ...]] = []  # C functions and their arguments; the latest is called first

    def release(self) -> None:
        """Release everything, once."""
        while self.releases:
            release, *arguments = self.releases.pop()
            if release(*arguments) == -1:
                raise system.driver_error("munmap", ctypes.get_errno())


class Mapping(Owned):
    """Mapped shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.data = 0  # address of the first byte of data

    def map(self, fd: int, size: int, offset: int = 0) -> None:
        self.releases.append((system.munmap, system.map_shared(fd, size), size))
        self.data = self.releases[0][1] + offset


class Memory(Backend):
    """Memory is a memfd that is mapped completely when it is imported."""

    def import_memory(self, device: Device, handle: MemoryHandle, *, size: int, dedicated: bool) -> Mapping:
        """Map the memory (``mmap``) and close the descriptor; leave the descriptor alone on an exception."""
        handle = checked(handle, OpaqueFd)
        fd = handle.fd
        memfd = examine(fd, "memory", MEMORY_DRIVERS)
        if memfd.name.startswith(MEMORY_DRIVERS) and not handle.trusted:
            raise HandleError(
                "handle: expected memory that cannot shrink, or a handle that you trust; got the memfd "
                f"{memfd.name!r}, whose other holders are unknown. A holder can truncate it, which kills this process "
                "with SIGBUS. If a driver of this process made it, or you trust its other holders, pass "
                "OpaqueFd(fd, trusted=True)."
            )
        if memfd.name.startswith(NO_MEMORY):
            raise HandleError(f"handle: expected memory, got the memfd {memfd.name!r} of a semaphore.")
        offset = lavapipe.data_offset(fd, memfd.size) if memfd.name == lavapipe.NAME else 0
        check_size(size, memfd.size - offset, "memory object")
        memfd.secure()
        memory = Mapping()
        memory.map(fd, memfd.size, offset)
        os.close(fd)
        return memory

    def map_buffer(self, memory: Mapping, *, size: int) -> tuple[Mapping, Address]:
        """Return the mapping. The import has mapped the whole object."""
        return memory, memory.data

    def unmap_buffer(self, mapping: Mapping) -> None:
        """Do nothing, because the object stays mapped until it is destroyed."""

    destroy_memory: Any = staticmethod(Owned.release)
    """``munmap``."""


def checked(handle: object, kind: type[_FdHandle]) -> _FdHandle:
    """Return the handle if it has this type."""
    if not isinstance(handle, kind):
        raise ArgumentTypeError("handle", f"expected {kind.__name__} on the host, got {type(handle).__name__}.")
    return handle
