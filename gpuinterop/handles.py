"""Typed operating-system handles, with their ownership and origin.

Ownership is the same for every vendor:

- A handle from ``export()``, from an exporter or from :mod:`gpuinterop.ipc` **owns** its descriptor. If you drop it
  without closing it, it closes the descriptor and warns.
- A handle that you make from a number **borrows** the descriptor until an import consumes it. If other code keeps the
  number and closes it later, use `FdHandle.adopt_duplicate`.
- A successful import **consumes** a handle with a file descriptor, owned or borrowed: the driver then owns the
  descriptor. After a failed import you still have the handle, open and untouched.
- If one thread closes a handle while another imports or duplicates it, the close takes effect afterwards.
- You still own an NT handle after an import, as its API requires. KMT handles hold no reference.

Examples
--------
>>> handle = gi.OpaqueFd(fd)  # borrows the descriptor
>>> with device.import_memory(handle, size=65536) as memory:
...     handle  # the driver owns the descriptor now
<OpaqueFd consumed>
>>> with device.allocate(4096) as allocation, allocation.export() as handle:
...     handle.owned
True
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, Flag, auto
from multiprocessing import context, reduction
from typing import Any, ClassVar, Final, Generic, NamedTuple, Self, TypeAlias, TypeVar, get_args, get_origin

from . import system
from ._arguments import NoCopy, check_int, check_type
from .errors import DEV_MODE, ArgumentTypeError, DriverError, HandleError, InvalidArgumentError, place, warn_leak

__all__ = [
    "AllocationHandle",
    "ArrayLayout",
    "ArrayUsage",
    "Binary",
    "D3D11Fence",
    "D3D11Resource",
    "D3D11ResourceKmt",
    "D3D12Fence",
    "D3D12Heap",
    "D3D12Resource",
    "DeviceIdentity",
    "DmaBufFd",
    "DrmSyncobjFd",
    "EventFd",
    "FabricHandle",
    "FdHandle",
    "Fence",
    "Granularity",
    "Handle",
    "HandleOrigin",
    "IpcMemHandle",
    "Keyed",
    "KeyedMutex",
    "KeyedMutexKmt",
    "MemoryHandle",
    "NvSciBuf",
    "NvSciSync",
    "OpaqueFd",
    "OpaqueWin32",
    "OpaqueWin32Kmt",
    "OriginKind",
    "PointerHandle",
    "SciSync",
    "SemaphoreHandle",
    "SyncFd",
    "Texel",
    "Timeline",
    "TimelineFd",
    "TimelineWin32",
    "VmmFd",
    "Win32Handle",
    "handle_types",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """Identity of a physical device across APIs.

    Attributes
    ----------
    name : str
        Name in messages.
    uuid : bytes, optional
        16 bytes: Vulkan's ``deviceUUID``, CUDA's device UUID.
    luid : bytes, optional
        8 bytes: Direct3D's adapter LUID.
    pci_bus_id : str, optional
        ``dddd:bb:dd.f``, lower case.
    driver_uuid : bytes, optional
        16 bytes: Vulkan's ``driverUUID``.
    is_cpu : bool
        A software device. It matches the host backend's device, and a device with the same identifiers.

    Examples
    --------
    >>> identity = gi.DeviceIdentity(name="another process's GPU", uuid=bytes(range(16)))
    >>> identity.conflicts(device.identity)
    True
    >>> gi.match_device(gi.DeviceIdentity(is_cpu=True))
    <Device host:0 ...>
    """

    name: str = ""
    uuid: bytes | None = None
    luid: bytes | None = None
    pci_bus_id: str | None = None
    driver_uuid: bytes | None = None
    is_cpu: bool = False

    def conflicts(self, other: DeviceIdentity) -> bool:
        """Whether the two are certainly different devices: a PCI address, UUID or LUID that both have differs."""
        return not all(self._agreements(other))

    def matches(self, other: DeviceIdentity) -> bool:
        """Whether the two are certainly one device: both are CPUs, or all identifiers that both have are equal."""
        agreements = self._agreements(other)
        return bool(agreements) and all(agreements)

    def _agreements(self, other: DeviceIdentity) -> list[bool]:
        """Return for each identifier that both devices have whether the two are equal."""
        if self.is_cpu and other.is_cpu:
            return [True]
        pairs = ((self.pci_bus_id, other.pci_bus_id), (self.uuid, other.uuid), (self.luid, other.luid))
        agreements = [own == others for own, others in pairs if own is not None and others is not None]
        # A GPU that is simulated on the CPU may have the identifiers of a software device.
        return agreements or ([False] if self.is_cpu or other.is_cpu else [])


class OriginKind(Enum):
    """Kind of object that a handle was exported from.

    Examples
    --------
    >>> from gpuinterop.handles import OriginKind
    >>> handle = gi.OpaqueFd(fd, origin=gi.HandleOrigin(kind=OriginKind.MEMORY))
    >>> device.import_semaphore(handle)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.HandleError: handle: this OpaqueFd was exported from a memory object, and the driver does not ...
    """

    MEMORY = "memory"
    ALLOCATION = "allocation"
    BINARY = "binary"
    TIMELINE = "timeline"
    FENCE = "fence"
    KEYED = "keyed"
    MULTICAST = "multicast"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleOrigin:
    """Origin of a handle. With it gpuinterop refuses mistakes that drivers accept.

    Attributes
    ----------
    kind : OriginKind
        Kind of object.
    device : DeviceIdentity, optional
        Device that holds the object.
    size : int, optional
        Size of the memory object in bytes.
    dedicated : bool, optional
        Whether the exporting allocation was dedicated.
    trusted : bool
        True if an exporter or backend of this process made the handle. An untrusted origin can only refuse a use.

    Examples
    --------
    >>> with device.allocate(4096) as allocation, allocation.export() as handle:
    ...     origin = handle.origin
    >>> origin.size, origin.trusted, origin.device == device.identity
    (4096, True, True)
    """

    kind: OriginKind
    device: DeviceIdentity | None = None
    size: int | None = None
    dedicated: bool | None = None
    trusted: bool = False

    def untrusted(self) -> HandleOrigin:
        """Return an untrusted copy, for another process."""
        return replace(self, trusted=False)


K = TypeVar("K")
T = TypeVar("T")


class _State(Enum):
    OPEN = "open"
    CLOSED = "closed"
    CONSUMED = "consumed"
    DETACHED = "detached"


_CONCRETE: list[type[Handle]] = []
"""The types with a `type_name`, in the order of tables."""
_NO_FD = 2**31  # descriptors are C ints


class Handle(NoCopy):
    """Base of all handles. Construct one of :func:`handle_types`; the type tells the driver what the handle refers to.

    Examples
    --------
    >>> with gi.OpaqueFd(fd) as handle:
    ...     handle.type_name, handle.closed
    ('opaque_fd', False)
    >>> handle.closed
    True
    """

    type_name: ClassVar[str] = ""
    """The name in tables, in JSON and in ``GPUINTEROP_DISABLE``, for example ``timeline_fd``."""

    origin: HandleOrigin | None
    _state = _State.CLOSED  # until the handle's own checks have passed

    def __init_subclass__(cls, name: str = "") -> None:
        super().__init_subclass__()
        if name:
            cls.type_name = name
            _CONCRETE.append(cls)

    def __new__(cls, *_args: object, **_kwargs: object) -> Self:
        if not cls.type_name:
            kinds = ", ".join(kind.__name__ for kind in types_here(_CONCRETE, cls))
            raise ArgumentTypeError(
                "handle", f"expected a type of handle that can be constructed, got {cls.__name__}; use one of {kinds}."
            )
        return super().__new__(cls)

    def __init__(self, *, origin: HandleOrigin | None) -> None:
        self.origin = origin
        self._state = _State.OPEN
        self._user = ""

    @property
    def closed(self) -> bool:
        """Whether the handle was closed, consumed or detached."""
        return self._state is not _State.OPEN

    def close(self) -> None:
        """Close the handle. Idempotent. An owned handle closes its descriptor; a borrowed one leaves it open."""
        if self._state is _State.OPEN:
            self._state = _State.CLOSED

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc_info: object) -> None:
        try:
            self.close()
        except HandleError:
            if kind is None:  # otherwise the exception that is being raised matters more
                raise

    def _check_open(self) -> None:
        if self._state is _State.OPEN:
            return
        name = type(self).__name__
        if self._state is _State.CONSUMED:
            raise HandleError(
                f"handle: this {name} was consumed by {self._user or 'an import'}; "
                "use handle.duplicate() before the first import to import it twice."
            )
        raise HandleError(f"handle: this {name} is {self._state.value}; make or export a new one.")


def this_thread() -> tuple[int, int]:
    """The running process and thread."""
    return os.getpid(), threading.get_ident()


class FdHandle(Handle):
    """A POSIX file descriptor.

    Parameters
    ----------
    fd : int
        File descriptor. The handle borrows it: you own it until an import consumes the handle.
    origin : HandleOrigin, optional
        Origin of the handle.
    trusted : bool, optional
        True if you trust every process that holds the object; see `trusted`. By default the origin decides.

    Raises
    ------
    ArgumentTypeError
        `fd` is not an int.
    HandleError
        `fd` is not open, or out of range.

    Examples
    --------
    >>> handle = gi.OpaqueFd(fd)
    >>> handle.fd == fd, handle.owned
    (True, False)
    >>> with handle.duplicate() as second:  # for a second import
    ...     second.owned
    True
    """

    _instead = (
        "duplicate() makes a second handle. To send this one to another process use gpuinterop.ipc.send_handle, or "
        "multiprocessing: as an argument of a Process or through a Pipe, which pass the descriptor itself. Not "
        "through a Queue, which pickles only after put() has returned, when the handle may be closed."
    )
    _owned = False  # for __del__, if a check below fails
    _made_at = ""

    def __init__(self, fd: int, *, origin: HandleOrigin | None = None, trusted: bool | None = None) -> None:
        fd = check_int(fd, "fd")
        if not 0 <= fd < _NO_FD:
            raise HandleError(f"fd: invalid file descriptor {fd}; check the call that returned it.")
        try:
            os.get_inheritable(fd)  # F_GETFD; fstat may wait for a process that serves the file
        except OSError as error:
            raise HandleError(f"fd: {fd} is not open ({error.strerror}); was it closed or consumed already?") from None
        super().__init__(origin=origin)
        self._fd = fd
        self._number = [fd]  # the thread that pops it owns it; only one thread can
        self.calls: list[tuple[int, int]] = []  # threads that use it now; each adds itself before it checks the state
        self._trusted: bool | None = None
        if trusted is not None:
            self.trusted = trusted

    @classmethod
    def adopt(cls, fd: int, *, origin: HandleOrigin | None = None, trusted: bool | None = None) -> Self:
        """Wrap an fd and **own** it: the handle closes it. Backends and exporters use this.

        Parameters
        ----------
        fd : int
            Open descriptor. If this succeeds, the handle owns it, and programs that this process starts do not inherit
            it: drivers return descriptors that they would inherit.
        origin, trusted
            As in the constructor.
        """
        handle = cls(fd, origin=origin, trusted=trusted)
        system.call("ioctl(FIOCLEX)", os.set_inheritable, handle.fd, False)
        handle._owned = True
        handle._made_at = place() if DEV_MODE else ""
        return handle

    @classmethod
    def adopt_duplicate(cls, fd: int, *, origin: HandleOrigin | None = None, trusted: bool | None = None) -> Self:
        """Wrap and **own** a close-on-exec duplicate (``dup``) of an fd that other code keeps and closes later.

        An import consumes the duplicate. If the handle had the number itself, the import would close it, and the other
        code would later close whatever file has the number by then.

        Parameters
        ----------
        fd : int
            Open descriptor. Its owner keeps it, and can close it as soon as this returns.
        origin, trusted
            As in the constructor.

        Raises
        ------
        ArgumentTypeError
            `fd` is not an int.
        HandleError
            `fd` is not open, or out of range.
        DriverError
            The system refuses the duplicate (``dup``).
        """
        borrowed = cls(fd, origin=origin, trusted=trusted)  # all checks, before a duplicate exists that could leak
        return cls.adopt(system.call("dup", os.dup, borrowed.fd), origin=origin, trusted=trusted)

    @property
    def fd(self) -> int:
        """Number of the descriptor. Raises `HandleError` once the handle is closed, consumed or detached."""
        if self._state is not _State.OPEN:
            self._check_open()
        return self._fd

    def fileno(self) -> int:
        """Return `fd`, for ``select`` and ``fcntl``."""
        return self.fd

    @property
    def owned(self) -> bool:
        """Whether closing the handle closes the fd."""
        return self._owned

    @property
    def trusted(self) -> bool:
        """Whether imports accept objects that another process can use against this one.

        True if an exporter or driver of this process made the handle, or if you set it: with ``trusted=True``, or on a
        handle from :mod:`gpuinterop.ipc`. The host backend requires it for SwiftShader's memory and semaphores, because
        a process that holds them can kill this process (SIGBUS) or make its signals fail.
        """
        if self._trusted is not None:
            return self._trusted
        return self.origin is not None and self.origin.trusted

    @trusted.setter
    def trusted(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise ArgumentTypeError("trusted", f"expected a bool, got {value!r}; pass True if you trust its holders.")
        self._trusted = value

    def close(self) -> None:
        """Close the handle. Idempotent. An owned fd is closed; a borrowed fd stays open.

        Raises
        ------
        HandleError
            The handle owned the fd, and other code has closed it. The handle is closed anyway.
        """
        super().close()
        if _passed:
            _close_passed()
        if not self._owned:
            self._let_calls_end()
        if not self._owned:
            self._number.clear()
            return
        if (error := self._settle()) is not None:
            raise HandleError(
                f"fd: {self._fd}, which this {type(self).__name__} owned, could not be closed "
                f"({error.strerror}); was it closed elsewhere? detach() hands it over."
            ) from error

    def _with_fd(self, fd: int) -> Self:
        """Return a copy of this handle with a duplicate of its number, which it does not own."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _state=_State.OPEN, _owned=False, _fd=fd, _number=[fd], calls=[])
        return twin

    def _use(self, call: Callable[[int], T]) -> T:
        """Pass the number to `call`. The descriptor stays open until `call` returns."""
        calls, mark = self.calls, (this_thread(),)
        calls += mark
        try:
            return call(self.fd)
        finally:
            calls.remove(mark[0])
            self._settle()

    def _settle(self) -> OSError | None:
        """Close the number of a finished handle once; return the system's error if it was not open.

        If a call still uses the number, that call closes it when it ends.
        """
        ended = self._number and self._owned and self._state in (_State.CLOSED, _State.CONSUMED)
        if ended and not self._threads():
            at_once = self._state is _State.CONSUMED or self.trusted  # otherwise close() may block on the file
            try:
                (os.close if at_once else system.close)(self._number.pop())
            except IndexError:
                pass  # already closed, or another thread has popped it
            except OSError as error:
                return error
        return None

    def _let_calls_end(self) -> None:
        """Wait until no other thread uses the number."""
        own_mark = this_thread()  # a signal handler may run inside such a call
        system.until(lambda: not self._threads() - {own_mark}, None)

    def _threads(self) -> set[tuple[int, int]]:
        """Threads that use the number now. A forked child ignores the parent's."""
        return {mark for mark in self.calls.copy() if mark[0] == os.getpid()}

    def detach(self) -> int:
        """Return the fd, which you must close from now on, and end the handle.

        Raises
        ------
        HandleError
            The handle is already closed, consumed or detached.
        """
        self._check_open()
        self._state = _State.DETACHED
        self._let_calls_end()
        try:
            return self._number.pop()
        except IndexError:
            raise HandleError(
                f"handle: this {type(self).__name__} was closed or consumed in another thread; make or export another."
            ) from None

    def duplicate(self) -> Self:
        """Return a second handle that owns a duplicate of the fd (close-on-exec).

        Raises
        ------
        HandleError
            The handle is closed, or other code has closed its fd.
        DriverError
            The system refuses the duplicate (``dup``): too many descriptors are open.
        """
        try:
            return self._use(
                lambda fd: self.adopt(system.call("dup", os.dup, fd), origin=self.origin, trusted=self._trusted)
            )
        except DriverError as error:
            if error.code != errno.EBADF:
                raise
            raise HandleError(f"fd: {self._fd} cannot be duplicated ({error}); was it closed elsewhere?") from error

    def __del__(self) -> None:
        if not self._owned or not self._number:
            return
        dropped = self._state is _State.OPEN
        self._state = _State.CLOSED
        if self._settle() is None and dropped:  # otherwise the interpreter or the user has already closed it
            name = f"{type(self).__name__}(fd={self._fd}){self._made_at}"
            warn_leak(f"{name} was dropped without close(), detach() or an import")

    def __repr__(self) -> str:
        if self.closed:
            return f"<{type(self).__name__} {self._state.value}>"
        return f"<{type(self).__name__} fd={self._fd}{' owned' if self._owned else ''}>"


def use_all(handles: Sequence[FdHandle], call: Callable[[Sequence[int]], T], numbers: Sequence[int] = ()) -> T:
    """Pass the numbers of all handles to `call`. The descriptors stay open until `call` returns.

    `call` must not block, because a thread that closes one of the handles may wait for it.
    """
    if not handles:
        return call(numbers)
    return handles[0]._use(lambda fd: use_all(handles[1:], call, (*numbers, fd)))


class Win32Handle(Handle):
    """An NT handle, or the name of a shared object. Pass exactly one of them.

    Parameters
    ----------
    handle : int, optional
        Value of the NT handle. You own it, even after an import.
    name : str, optional
        Name of the object. The driver opens it (`Operation.IMPORT_BY_NAME`).

    Raises
    ------
    ArgumentTypeError
        `handle` is not an int, or `name` is not a str.
    InvalidArgumentError
        Both or neither were given; or `name` is empty, or objects of this type have no name.
    HandleError
        `handle` is 0 or negative.

    Examples
    --------
    >>> gi.D3D12Heap(handle=0x1A4)
    <D3D12Heap handle=0x1a4>
    >>> gi.D3D12Heap(name="renderer/heap 3")
    <D3D12Heap name='renderer/heap 3'>

    Imports refuse such a handle on systems other than Windows:

    >>> device.import_memory(gi.D3D12Heap(handle=0x1A4), size=65536)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.UnsupportedError: import_memory:d3d12_heap is unsupported on ...
    """

    nameable: ClassVar[bool] = True

    def __init__(
        self, *, handle: int | None = None, name: str | None = None, origin: HandleOrigin | None = None
    ) -> None:
        if (handle is None) == (name is None):
            raise InvalidArgumentError(
                "handle", f"expected one of handle= and name=, got {'none' if handle is None else 'both'}."
            )
        if handle is not None and (handle := check_int(handle, "handle")) <= 0:
            raise HandleError(f"handle: invalid NT handle {handle}; check the call that returned it.")
        if name is not None:
            check_type(name, str, "name", "a str")
            if not name or "\0" in name:
                raise InvalidArgumentError("name", f"expected a non-empty str without NUL, got {name!r}.")
            if not self.nameable:
                raise InvalidArgumentError("name", f"{type(self).__name__} objects have no name; pass handle=.")
        super().__init__(origin=origin)
        self._handle = handle
        self._name = name

    @property
    def handle(self) -> int | None:
        """Value of the NT handle; None for a named object. Raises `HandleError` once the handle is closed."""
        self._check_open()
        return self._handle

    @property
    def name(self) -> str | None:
        """Name of the object; None for a handle. Raises `HandleError` once the handle is closed."""
        self._check_open()
        return self._name

    def detach(self) -> int | None:
        """Return the value, which you must close, and end the handle."""
        handle = self.handle
        self._state = _State.DETACHED
        return handle

    def duplicate(self) -> Self:
        """Return a second wrapper of the same NT handle. Imports do not consume it, so it needs no duplicate."""
        self._check_open()
        return type(self)(handle=self._handle, name=self._name, origin=self.origin)

    def __repr__(self) -> str:
        what = f"name={self._name!r}" if self._name is not None else f"handle={self._handle:#x}"
        return f"<{type(self).__name__} {what}>"


class KmtHandle(Win32Handle):
    """A global share handle. It holds no reference: keep the exporting object alive.

    Parameters
    ----------
    handle : int
        Value of the handle.
    keepalive : object, optional
        Object to keep alive as long as the objects that are imported from this handle.
    """

    nameable = False

    def __init__(self, *, handle: int, keepalive: object = None, origin: HandleOrigin | None = None) -> None:
        super().__init__(handle=handle, origin=origin)
        self.keepalive = keepalive

    def duplicate(self) -> Self:
        self._check_open()
        assert self._handle is not None  # a KMT handle has no name
        return type(self)(handle=self._handle, keepalive=self.keepalive, origin=self.origin)


class PointerHandle(Handle):
    """The address of another library's object in this process (NvSci).

    Parameters
    ----------
    pointer : int
        Address of the object, which you still own.
    keepalive : object, optional
        Object to keep alive as long as the objects that are imported from this handle.

    Examples
    --------
    >>> gi.NvSciBuf(0x7F0000, keepalive=buffer)
    <NvSciBuf pointer=0x7f0000>
    """

    def __init__(self, pointer: int, *, keepalive: object = None, origin: HandleOrigin | None = None) -> None:
        if (pointer := check_int(pointer, "pointer")) <= 0:
            raise HandleError("pointer: expected an object's address, got null; check the call that made the object.")
        super().__init__(origin=origin)
        self._pointer = pointer
        self.keepalive = keepalive

    @property
    def pointer(self) -> int:
        """Address of the object. Raises `HandleError` once the handle is closed."""
        self._check_open()
        return self._pointer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} pointer={self._pointer:#x}>"


# -- kinds of semaphore: the values that their calls accept ------------------------------------------------------


class Binary:
    """A semaphore that is signalled or not. Its calls accept no value.

    Examples
    --------
    >>> with device.create_semaphore(gi.OpaqueFd) as semaphore:
    ...     semaphore.kind is gi.Binary
    ...     semaphore.signal(stream)
    ...     semaphore.wait(stream)
    True
    """


class Timeline:
    """A counter that only grows. Its calls accept a value.

    Examples
    --------
    >>> with device.create_semaphore(gi.TimelineFd) as semaphore:
    ...     semaphore.kind is gi.Timeline
    ...     semaphore.signal(stream, 1)
    ...     semaphore.wait(stream, 1)
    True
    """


class Fence:
    """A Direct3D fence. Its calls accept a value.

    Examples
    --------
    >>> gi.D3D12Fence.kind is gi.Fence  # fence.wait(stream, 1), fence.signal(stream, 2)
    True
    """


class Keyed:
    """A keyed mutex. Its calls accept a key, and its waits also a timeout.

    Examples
    --------
    >>> gi.KeyedMutex.kind is gi.Keyed  # mutex.wait(stream, 0, timeout=1), mutex.signal(stream, 1)
    True
    """


class SciSync:
    """NvSciSync. Its calls accept the address of an ``NvSciSyncFence``.

    Examples
    --------
    >>> gi.NvSciSync.kind is gi.SciSync  # semaphore.wait(stream, address_of_fence)
    True
    """


class MemoryHandle(Handle):
    """A handle that ``Device.import_memory`` accepts.

    Examples
    --------
    >>> from gpuinterop.handles import MemoryHandle, handle_types
    >>> [name for name, kind in handle_types().items() if issubclass(kind, MemoryHandle)][:2]
    ['opaque_fd', 'dma_buf_fd']
    """


class SemaphoreHandle(Handle, Generic[K]):
    """A handle that ``Device.import_semaphore`` accepts; `K` is the kind of semaphore.

    Examples
    --------
    >>> from gpuinterop.handles import SemaphoreHandle, handle_types
    >>> [name for name, kind in handle_types().items() if issubclass(kind, SemaphoreHandle)][:2]
    ['opaque_fd', 'timeline_fd']
    """

    kind: ClassVar[type]

    def __init_subclass__(cls, name: str = "") -> None:
        super().__init_subclass__(name)
        for base in cls.__dict__.get("__orig_bases__", ()):
            if get_origin(base) is SemaphoreHandle:
                (cls.kind,) = get_args(base)


class AllocationHandle(Handle):
    """A handle that ``Device.import_allocation`` accepts.

    Examples
    --------
    >>> from gpuinterop.handles import AllocationHandle, handle_types
    >>> [name for name, kind in handle_types().items() if issubclass(kind, AllocationHandle)]
    ['vmm_fd', 'opaque_win32', 'opaque_win32_kmt', 'fabric']
    """


class OpaqueFd(FdHandle, MemoryHandle, SemaphoreHandle[Binary], name="opaque_fd"):
    """``VK_EXTERNAL_*_HANDLE_TYPE_OPAQUE_FD``: memory, or a binary semaphore.

    Examples
    --------
    >>> with device.import_memory(gi.OpaqueFd(fd), size=65536) as memory:
    ...     buffer = memory.map_buffer()
    """


class TimelineFd(FdHandle, SemaphoreHandle[Timeline], name="timeline_fd"):
    """``OPAQUE_FD`` of a timeline semaphore. Drivers cannot distinguish it from a binary one; this type does.

    Examples
    --------
    >>> with device.import_semaphore(gi.TimelineFd(timeline_fd)) as semaphore:
    ...     semaphore.signal(stream, 1)
    """


class DmaBufFd(FdHandle, MemoryHandle, name="dma_buf_fd"):
    """A Linux dma-buf.

    Examples
    --------
    The host backend refuses the import:

    >>> device.import_memory(gi.DmaBufFd(fd), size=65536)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.UnsupportedError: import_memory:dma_buf_fd is unsupported on ...
    """


class VmmFd(FdHandle, AllocationHandle, name="vmm_fd"):
    """A shareable virtual-memory allocation (``cuMemExportToShareableHandle``), or the host backend's memfd.

    Examples
    --------
    >>> with device.allocate(65536, gi.VmmFd) as allocation, allocation.export() as handle:
    ...     with device.import_allocation(handle, allocation.size) as imported:  # in another process
    ...         imported.buffer.fill(7)
    """


class OpaqueWin32(Win32Handle, MemoryHandle, SemaphoreHandle[Binary], AllocationHandle, name="opaque_win32"):
    """``VK_EXTERNAL_*_HANDLE_TYPE_OPAQUE_WIN32``.

    Examples
    --------
    >>> memory = gi.OpaqueWin32(handle=0x1A4)  # of vkGetMemoryWin32HandleKHR
    """


class OpaqueWin32Kmt(KmtHandle, MemoryHandle, SemaphoreHandle[Binary], AllocationHandle, name="opaque_win32_kmt"):
    """``VK_EXTERNAL_*_HANDLE_TYPE_OPAQUE_WIN32_KMT``.

    Examples
    --------
    >>> handle = gi.OpaqueWin32Kmt(handle=0x40000002, keepalive=buffer)
    """


class TimelineWin32(Win32Handle, SemaphoreHandle[Timeline], name="timeline_win32"):
    """A timeline semaphore's NT handle.

    Examples
    --------
    >>> timeline = gi.TimelineWin32(name="renderer/timeline")
    """


class D3D12Heap(Win32Handle, MemoryHandle, name="d3d12_heap"):
    """A shared ``ID3D12Heap``.

    Examples
    --------
    >>> heap = gi.D3D12Heap(handle=0x1A4)  # of ID3D12Device::CreateSharedHandle
    """


class D3D12Resource(Win32Handle, MemoryHandle, name="d3d12_resource"):
    """A shared committed ``ID3D12Resource``; always dedicated.

    Examples
    --------
    >>> texture = gi.D3D12Resource(name="renderer/colour")
    """


class D3D12Fence(Win32Handle, SemaphoreHandle[Fence], name="d3d12_fence"):
    """A shared ``ID3D12Fence``.

    Examples
    --------
    >>> fence = gi.D3D12Fence(handle=0x1A8)  # of ID3D12Device::CreateSharedHandle
    """


class D3D11Resource(Win32Handle, MemoryHandle, name="d3d11_resource"):
    """A shared ``ID3D11Resource``'s NT handle; always dedicated.

    Examples
    --------
    >>> texture = gi.D3D11Resource(handle=0x1AC)  # of IDXGIResource1::CreateSharedHandle
    """


class D3D11ResourceKmt(KmtHandle, MemoryHandle, name="d3d11_resource_kmt"):
    """A shared ``ID3D11Resource``'s global share handle; always dedicated.

    Examples
    --------
    >>> texture = object()  # the application's ID3D11Texture2D
    >>> handle = gi.D3D11ResourceKmt(handle=0x40000002, keepalive=texture)  # of IDXGIResource::GetSharedHandle
    """


class D3D11Fence(Win32Handle, SemaphoreHandle[Fence], name="d3d11_fence"):
    """A shared ``ID3D11Fence``.

    Examples
    --------
    >>> fence = gi.D3D11Fence(handle=0x1B0)  # of ID3D11Fence::CreateSharedHandle
    """


class KeyedMutex(Win32Handle, SemaphoreHandle[Keyed], name="keyed_mutex"):
    """An ``IDXGIKeyedMutex``'s NT handle.

    Examples
    --------
    >>> mutex = gi.KeyedMutex(handle=0x1AC)  # the handle of the shared resource
    """


class KeyedMutexKmt(KmtHandle, SemaphoreHandle[Keyed], name="keyed_mutex_kmt"):
    """An ``IDXGIKeyedMutex``'s global share handle.

    Examples
    --------
    >>> texture = object()  # the application's ID3D11Texture2D
    >>> mutex = gi.KeyedMutexKmt(handle=0x40000002, keepalive=texture)
    """


class NvSciBuf(PointerHandle, MemoryHandle, name="nvscibuf"):
    """An ``NvSciBufObj``.

    Examples
    --------
    >>> memory = gi.NvSciBuf(0x7F0000)  # the address of the NvSciBufObj
    """


class NvSciSync(PointerHandle, SemaphoreHandle[SciSync], name="nvscisync"):
    """An ``NvSciSyncObj``.

    Examples
    --------
    >>> semaphore = gi.NvSciSync(0x7F0000)  # the address of the NvSciSyncObj
    """


class BytesHandle(Handle):
    """A handle of 64 bytes. It holds no reference, so you can send it any way you like.

    Parameters
    ----------
    data : bytes
        The 64 bytes.

    Examples
    --------
    >>> gi.FabricHandle(bytes(64)).data == bytes(64)
    True
    """

    SIZE: ClassVar[int] = 64

    def __init__(self, data: bytes, *, origin: HandleOrigin | None = None) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ArgumentTypeError("data", f"expected bytes, got {type(data).__name__}.")
        if len(data) != self.SIZE:
            raise InvalidArgumentError("data", f"expected {self.SIZE} bytes, got {len(data)}.")
        super().__init__(origin=origin)
        self._data = bytes(data)

    @property
    def data(self) -> bytes:
        """The 64 bytes. Raises `HandleError` once the handle is closed."""
        self._check_open()
        return self._data

    def duplicate(self) -> Self:
        """Return a second handle of the same bytes."""
        return type(self)(self.data, origin=self.origin)

    def __reduce__(self) -> Any:
        return _rebuild_bytes, (type(self), self.data, self.origin.untrusted() if self.origin else None)


def _rebuild_bytes(kind: type[BytesHandle], data: bytes, origin: HandleOrigin | None) -> BytesHandle:
    return kind(data, origin=origin)


class FabricHandle(BytesHandle, AllocationHandle, name="fabric"):
    """A fabric handle: 64 bytes that are valid on every node of an NVLink domain.

    Examples
    --------
    Send the bytes any way you like, for example with MPI or pickle:

    >>> import pickle
    >>> handle = gi.FabricHandle(bytes(range(64)))
    >>> pickle.loads(pickle.dumps(handle)).data == handle.data
    True
    """


class IpcMemHandle(BytesHandle, name="ipc_mem_handle"):
    """A legacy IPC handle: 64 bytes that name memory of ``cudaMalloc`` or ``hipMalloc`` until its process exits.

    `gpuinterop.share` and `gpuinterop.attach` use it automatically.

    Examples
    --------
    >>> gi.IpcMemHandle(bytes(16))
    Traceback (most recent call last):
        ...
    gpuinterop.errors.InvalidArgumentError: data: expected 64 bytes, got 16.
    """


class DrmSyncobjFd(FdHandle, name="drm_syncobj_fd"):
    """A DRM syncobj. Only :mod:`gpuinterop.bridge` accepts it.

    Examples
    --------
    Without a render node (``/dev/dri/renderD*``) the bridge refuses it:

    >>> with gi.bridge.Bridge(device) as bridge:
    ...     try:
    ...         semaphore = bridge.import_semaphore(gi.DrmSyncobjFd(fd))
    ...     except gi.GpuInteropError as error:
    ...         reason = str(error)
    """


class SyncFd(FdHandle, name="sync_fd"):
    """A Linux sync file. Only :mod:`gpuinterop.bridge` accepts it.

    Examples
    --------
    A bridge refuses a descriptor of another kind:

    >>> with gi.bridge.Bridge(device) as bridge:
    ...     bridge.import_semaphore(gi.SyncFd(fd))
    Traceback (most recent call last):
        ...
    gpuinterop.errors.HandleError: handle: expected a sync file, got ...
    """


class EventFd(FdHandle, name="event_fd"):
    """An eventfd. Only :mod:`gpuinterop.bridge` accepts it.

    Examples
    --------
    >>> import os
    >>> with gi.bridge.Bridge(device) as bridge:
    ...     semaphore = bridge.import_semaphore(gi.EventFd(os.eventfd(1)))
    ...     semaphore.wait(stream)
    ...     stream.synchronize(timeout=10)
    """


AnySemaphoreHandle: TypeAlias = SemaphoreHandle[Any]


def is_here(kind: type[Handle]) -> bool:
    """Whether this platform has such handles."""
    return not issubclass(kind, (FdHandle, PointerHandle) if sys.platform == "win32" else Win32Handle)


def types_here(kinds: Iterable[type[Handle] | None], base: type[Handle] = Handle) -> list[type[Handle]]:
    """Return the subtypes of `base` that this platform has, for lists in errors; if it has none, all of them."""
    below = [kind for kind in kinds if kind is not None and issubclass(kind, base)]
    return list(filter(is_here, below)) or below


def handle_types() -> dict[str, type[Handle]]:
    """Return every concrete handle type by its :attr:`Handle.type_name`.

    Examples
    --------
    >>> from gpuinterop.handles import handle_types
    >>> handle_types()["timeline_fd"] is gi.TimelineFd
    True
    """
    return {kind.type_name: kind for kind in _CONCRETE}


# -- multiprocessing passes the descriptor itself ----------------------------------------------------------------
# ForkingPickler uses this table; plain pickle calls Handle.__reduce__, which refuses. Process.start() and a Pipe's
# send() pickle before they return, so the caller can close the handle afterwards. A Queue pickles later in a thread,
# which this code cannot detect: there a closed handle only prints an error, and an open one is dropped unclosed.


def _rebuild_fd(kind: type[FdHandle], duplicate: Any, origin: HandleOrigin | None) -> FdHandle:
    return kind.adopt(system.opened("recvmsg", duplicate.detach), origin=origin)


def _reduce_fd(handle: FdHandle) -> Any:
    if handle.closed:
        raise HandleError(
            f"handle: this {type(handle).__name__} is {handle._state.value}; was it put into a multiprocessing Queue, "
            "which pickles later? Pass it as an argument of the Process, or through a Pipe."
        )
    origin = handle.origin.untrusted() if handle.origin else None
    return _rebuild_fd, (type(handle), handle._use(_pass), origin)


_passed: list[weakref.finalize[Any, Any]] = []
"""Finalizers that close the duplicates for processes that may not have started yet."""


def _pass(fd: int) -> Any:
    _close_passed()
    starting = context.get_spawning_popen()
    if starting is not None:  # otherwise DupFd duplicates it; here it only records the number for start()
        fd = system.call("dup", os.dup, fd)
        _passed.append(weakref.finalize(starting, os.close, fd))
    return system.opened("dup", reduction.DupFd, fd)


def _close_passed() -> None:
    """Close the duplicates of processes that have started, or never will start."""
    for close in _passed.copy():
        alive = close.peek()
        if alive is None or getattr(alive[0], "finalizer", None):  # set once start() has passed the numbers
            close()
            with suppress(ValueError):  # another thread has removed it
                _passed.remove(close)


if sys.platform != "win32":
    for _kind in _CONCRETE:
        if issubclass(_kind, FdHandle):
            reduction.register(_kind, _reduce_fd)


class ArrayUsage(Flag):
    """Usage of an image in external memory. The exporter must have created the image for the same usage.

    The drivers' flags are ``CUDA_ARRAY3D_SURFACE_LDST``, ``CUDA_ARRAY3D_COLOR_ATTACHMENT``, ``CUDA_ARRAY3D_CUBEMAP``.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> usage = gi.ArrayUsage.SURFACE | gi.ArrayUsage.COLOR_ATTACHMENT
    >>> with device.import_memory(gi.OpaqueFd(fd), size=65536) as memory:
    ...     image = memory.map_mipmapped_array("R8G8B8A8_UNORM", (64, 32), usage=usage)
    ...     image.layout.usage is usage
    True
    """

    NONE = 0
    SURFACE = auto()
    """Kernels load and store texels (``VK_IMAGE_USAGE_STORAGE_BIT``)."""
    COLOR_ATTACHMENT = auto()
    """The graphics API renders into it."""
    CUBEMAP = auto()
    """Six layers are the faces of a cube."""


def usage_of(flags: int) -> ArrayUsage:
    """Return the usage of an image that Vulkan created with these ``VkImageUsageFlags``."""
    usage = ArrayUsage.SURFACE if flags & 0x8 else ArrayUsage.NONE  # VK_IMAGE_USAGE_STORAGE_BIT
    return usage | ArrayUsage.COLOR_ATTACHMENT if flags & 0x10 else usage  # VK_IMAGE_USAGE_COLOR_ATTACHMENT_BIT


class Texel(NamedTuple):
    """A texel's content: equal channels of `bits` bits each.

    Attributes
    ----------
    numeric : str
        ``UNORM``, ``SNORM``, ``UINT``, ``SINT`` or ``SFLOAT``, as in the format's name.
    bits : int
        Bits of one channel.
    channels : int
        Number of channels.

    Examples
    --------
    >>> from gpuinterop.handles import Texel
    >>> Texel("SFLOAT", bits=32, channels=4).nbytes
    16
    """

    numeric: str
    bits: int
    channels: int

    @property
    def nbytes(self) -> int:
        """The size of the texel in bytes."""
        return self.bits // 8 * self.channels


TEXELS: Final = {
    f"{order.format(bits)}{bits}_{numeric}": Texel(numeric, bits, order.count("{") + 1)
    for order in ("R", "R{0}G", "R{0}G{0}B{0}A")
    for numeric, widths in {"UNORM": (8, 16), "SNORM": (8, 16), "UINT": (8, 16, 32), "SINT": (8, 16, 32),
                            "SFLOAT": (16, 32)}.items()
    for bits in widths
} | {"B8G8R8A8_UNORM": Texel("UNORM", 8, 4)}  # fmt: skip
"""Vulkan's formats that every API lays out alike. Others are refused: a wrong guess would read outside the image."""


def texel_of(format: str) -> Texel:
    """Return the texel of a Vulkan format, with or without the prefix ``VK_FORMAT_``."""
    if not isinstance(format, str):
        raise ArgumentTypeError(
            "format", f"expected a format's name, got {format!r}; use Vulkan's, e.g. 'R32G32B32A32_SFLOAT'."
        )
    try:
        return TEXELS[format.removeprefix("VK_FORMAT_")]
    except KeyError:
        raise InvalidArgumentError(
            "format", f"expected a format that every API lays out alike, got {format!r}; use {', '.join(TEXELS)}."
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayLayout:
    """Layout of an image in external memory.

    Attributes
    ----------
    format : str
        Name of a Vulkan format without the prefix, e.g. ``R32G32B32A32_SFLOAT``.
    extent : tuple of int
        Width, height and depth in texels. Height and depth are 0 if the image does not have that dimension.
    levels : int
        Number of mip levels.
    layers : int
        Number of array layers; 0 if the image is not an array.
    offset : int
        Offset from the start of the memory in bytes.
    usage : ArrayUsage
        Usage of the image.

    Examples
    --------
    >>> from gpuinterop.handles import ArrayLayout
    >>> layout = ArrayLayout(format="R8G8B8A8_UNORM", extent=(64, 32, 0), levels=2)
    >>> layout.texel
    Texel(numeric='UNORM', bits=8, channels=4)
    """

    format: str
    extent: tuple[int, int, int]
    levels: int = 1
    layers: int = 0
    offset: int = 0
    usage: ArrayUsage = ArrayUsage.SURFACE

    @property
    def layered(self) -> bool:
        """Whether drivers treat it as an array of layers. A single cube map is not one."""
        return self.layers != 0 and not (self.usage & ArrayUsage.CUBEMAP and self.layers == 6)

    @property
    def texel(self) -> Texel:
        """The texel of the format."""
        return texel_of(self.format)


class Granularity(NamedTuple):
    """Granularity of sizes and offsets in bytes.

    Attributes
    ----------
    minimum : int
        Sizes and offsets must be multiples of it.
    recommended : int
        Granularity for the best performance; a multiple of the minimum.

    Examples
    --------
    >>> step = device.allocation_granularity()
    >>> step.minimum, step.recommended
    (4096, 4096)
    """

    minimum: int
    recommended: int
