"""Shared memory: which objects are taken, how they are mapped, and allocations of our own.

**The rule.** What is mapped must not shrink under the mapping: a page beyond the end of the object kills the process
with SIGBUS. So an object is taken only

1. if it is sealed against shrinking (F_SEAL_SHRINK): lavapipe's memory is, and so is everything made here;
2. or if it can be sealed (made with MFD_ALLOW_SEALING and not F_SEAL_SEAL): then F_SEAL_SHRINK is added, which its
   owner will notice only if he wanted to truncate it; growing stays allowed;
3. or if it can never be sealed, but is known by its name as a driver's that does not truncate it, SwiftShader's, and
   the handle is trusted (`FdHandle.trusted`): a name proves nothing against a peer of bad will.

Everything else is refused: regular files and /dev/shm objects (anybody who can open them can truncate them), other
memfds that cannot be sealed, pipes, sockets, devices; descriptors that are not open for reading and writing; memfds
sealed against writing. The seal is added last, when nothing else speaks against the object, and the size is looked at
again behind it; then the whole object is mapped once. Timelines and allocations must bring their seals along.
"""

from __future__ import annotations

import ctypes
import operator
import os
import sys
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Final

from gpuinterop import system, timeline
from gpuinterop.backend import Address, Backend
from gpuinterop.errors import ArgumentTypeError, HandleError
from gpuinterop.handles import FdHandle, MemoryHandle, OpaqueFd

from .formats import lavapipe, swiftshader
from .streams import Device

if sys.platform != "win32":
    import fcntl


MEMORY_DRIVERS: Final = (swiftshader.MEMORY_NAME,)
SEMAPHORE_DRIVERS: Final = (swiftshader.SEMAPHORE_NAME,)
BINARY_NAME: Final = "gpuinterop.binary"
NO_MEMORY = (swiftshader.SEMAPHORE_NAME, BINARY_NAME, timeline.NAME)
_LINK = "/memfd:"
MAY_TRUNCATE: Final = "; and they can truncate it, which ends this process with SIGBUS"


@dataclass(frozen=True, slots=True)
class Object:
    """What was found behind a descriptor; nothing has been changed yet."""

    fd: int
    size: int
    seals: int
    name: str
    """The memfd's; "" where /proc is not mounted."""

    @property
    def fixed(self) -> bool:
        """Whether it can neither shrink nor grow."""
        return self.seals & _FIXED == _FIXED

    def secure(self) -> None:
        """Make sure that it does not shrink from now on. Called last, when nothing else speaks against it."""
        if not self.seals & (system.SEAL_SHRINK | system.SEAL_SEAL):
            try:
                fcntl.fcntl(self.fd, system.F_ADD_SEALS, system.SEAL_SHRINK)
            except OSError as error:
                raise system.driver_error("fcntl(F_ADD_SEALS)", error.errno or 0) from error
        if os.fstat(self.fd).st_size < self.size:
            raise HandleError("handle: the memfd was truncated while it was being imported.")


_FIXED = system.SEAL_SHRINK | system.SEAL_GROW


def examine(fd: int, what: str, drivers: tuple[str, ...]) -> Object:
    """Apply the rule above to `fd`, which is to be `what` ("memory", "a binary semaphore").

    Raises
    ------
    HandleError
        The object is refused; the message says why, and what would be taken.
    """
    link = _link(fd)
    seals = system.seals(fd)
    if seals is None:
        raise HandleError(
            f"handle: {link!r} cannot be {what} on the host, which takes memfds; make it with "
            "memfd_create(MFD_ALLOW_SEALING)."
        )
    status = os.fstat(fd)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDWR:
        raise HandleError("handle: the descriptor is not open for reading and writing; export it with O_RDWR.")
    if seals & system.SEAL_WRITE:
        raise HandleError("handle: the memfd is sealed against writing (F_SEAL_WRITE); it cannot be shared both ways.")
    name = link.removeprefix(_LINK).removesuffix(" (deleted)") if link.startswith(_LINK) else ""
    never = seals & system.SEAL_SEAL and not seals & system.SEAL_SHRINK
    if never and not (status.st_nlink == 0 and name.startswith(drivers)):
        raise HandleError(
            f"handle: {link!r} is not sealed against shrinking, cannot be, and is not "
            f"known as a driver's: whoever truncates it would kill this process. As {what} the host takes memfds "
            "made with MFD_ALLOW_SEALING."
        )
    return Object(fd, status.st_size, seals, name)


def _link(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def check_size(size: int, there: int, what: str) -> None:
    if size > there:
        raise HandleError(
            f"size: {size} bytes is beyond the {what}, which has {there}; pass the allocation's own size."
        )


class Owned:
    """What the kernel has given, and how it is given back: each once, whatever interrupts.

    CPython looks at signals after a call of C's, at the entry of a function, and where a loop turns back. So C stores
    what was given with its end, and takes an end out in the step that calls it.
    """

    __slots__ = ("ends",)

    def __init__(self) -> None:
        self.ends: list[tuple[Any, ...]] = []
        """Functions of C's and what they are given, the latest first to go."""

    def release(self) -> None:
        """Called again it goes on."""
        told: list[int | None] = []
        while self.ends:
            told.extend(starmap(operator.call, starmap(self.ends.pop, ((),))))
        if -1 in told:
            raise system.driver_error("munmap", ctypes.get_errno())


class Mapping(Owned):
    """Shared memory, mapped."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        super().__init__()
        self.data = 0
        """The address of the first byte of data."""

    def map(self, fd: int, size: int, offset: int = 0) -> None:
        self.ends.append((system.munmap, system.map_shared(fd, size), size))
        self.data = self.ends[0][1] + offset


class Memory(Backend):
    """Memory is a memfd, mapped whole when it is imported."""

    def import_memory(self, device: Device, handle: MemoryHandle, *, size: int, dedicated: bool) -> Mapping:
        """Map the memory (``mmap``) and close the descriptor; after an exception the descriptor is left alone."""
        fd, trusted = descriptor(handle, OpaqueFd), is_trusted(handle)
        found = examine(fd, "memory", MEMORY_DRIVERS)
        if found.name.startswith(MEMORY_DRIVERS) and not trusted:
            raise HandleError(
                "handle: expected memory that cannot shrink, or that a driver of this process has made; got the memfd "
                f"{found.name!r} from elsewhere. Its holders can truncate it, which ends this process with SIGBUS. Say "
                "that you trust them: OpaqueFd(fd, trusted=True)."
            )
        if found.name.startswith(NO_MEMORY):
            raise HandleError(f"handle: the memfd {found.name!r} is a semaphore, not memory.")
        offset = lavapipe.data_offset(fd, found.size) if found.name == lavapipe.NAME else 0
        check_size(size, found.size - offset, "memory object")
        found.secure()
        memory = Mapping()
        try:
            memory.map(fd, found.size, offset)
            os.close(fd)
            return memory
        except BaseException:
            memory.release()
            raise

    def map_buffer(self, memory: Mapping, *, size: int) -> tuple[Mapping, Address]:
        """The object is mapped already."""
        return memory, memory.data

    def unmap_buffer(self, mapping: Mapping) -> None:
        """The object stays mapped until it is destroyed."""

    def destroy_memory(self, memory: Mapping) -> None:
        """``munmap``."""
        memory.release()


def descriptor(handle: object, kind: type[FdHandle]) -> int:
    """The descriptor of a handle of this type."""
    if not isinstance(handle, kind):
        raise ArgumentTypeError("handle", f"the host takes {kind.__name__} here, not {type(handle).__name__}.")
    return handle.fd


def is_trusted(handle: object) -> bool:
    """Whether the caller vouches for all who hold the object."""
    return isinstance(handle, FdHandle) and handle.trusted
