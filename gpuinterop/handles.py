"""Typed operating-system handles: what they are, who owns them, and where they came from.

Ownership, the same on every vendor:

- A handle made by ``export()``, by an exporter or by :mod:`gpuinterop.ipc` **owns** its descriptor: dropping it
  unclosed closes the descriptor and warns.
- A handle wrapped around a number of the caller's **borrows** it until an import consumes it.
- A successful import **consumes** a handle of a file descriptor, owned or borrowed: the descriptor is the driver's.
  After a failed import it is the caller's, open and untouched.
- What ends use in one thread while another imports or duplicates the handle takes effect afterwards.
- NT handles stay the caller's after an import, as their APIs say; KMT handles hold no reference at all.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, Flag, auto
from multiprocessing import reduction
from typing import Any, ClassVar, Final, Generic, NamedTuple, Self, TypeAlias, TypeVar

from . import system
from ._arguments import check_int
from .errors import ArgumentTypeError, DriverError, HandleError, InvalidArgumentError, LeakedResourceWarning

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
    """What identifies a physical device across APIs.

    Attributes
    ----------
    name : str
        For messages.
    uuid : bytes, optional
        16 bytes: Vulkan's ``deviceUUID``, CUDA's device UUID.
    luid : bytes, optional
        8 bytes: Direct3D's adapter LUID.
    pci_bus_id : str, optional
        ``dddd:bb:dd.f``, lower case.
    driver_uuid : bytes, optional
        16 bytes: Vulkan's ``driverUUID``.
    is_cpu : bool
        A software device; it matches the host backend's device.
    """

    name: str = ""
    uuid: bytes | None = None
    luid: bytes | None = None
    pci_bus_id: str | None = None
    driver_uuid: bytes | None = None
    is_cpu: bool = False

    def conflicts(self, other: DeviceIdentity) -> bool:
        """Whether the two are certainly different devices: some mark that both have differs.

        Marks that only one side knows prove nothing.
        """
        if self.is_cpu and other.is_cpu:
            return False
        if self.is_cpu != other.is_cpu:
            return True
        return any(
            mine is not None and theirs is not None and mine != theirs
            for mine, theirs in (
                (self.pci_bus_id, other.pci_bus_id),
                (self.uuid, other.uuid),
                (self.luid, other.luid),
            )
        )

    def matches(self, other: DeviceIdentity) -> bool:
        """Whether the two are certainly one device.

        Both are CPUs, or a mark that both have is equal and none differs.
        """
        if self.is_cpu or other.is_cpu:
            return self.is_cpu and other.is_cpu
        if self.conflicts(other):
            return False
        pairs = ((self.uuid, other.uuid), (self.pci_bus_id, other.pci_bus_id), (self.luid, other.luid))
        return any(mine is not None and mine == theirs for mine, theirs in pairs)


class OriginKind(Enum):
    """What kind of object a handle was exported from."""

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
    """Where a handle came from; it lets the library refuse what drivers swallow.

    Attributes
    ----------
    kind : OriginKind
    device : DeviceIdentity, optional
    size : int, optional
        Of the memory object, in bytes.
    dedicated : bool, optional
        Whether the exporting allocation was a dedicated one.
    trusted : bool
        True where an exporter or backend of this process made the handle; else the origin can refuse, but never vouch.
    """

    kind: OriginKind
    device: DeviceIdentity | None = None
    size: int | None = None
    dedicated: bool | None = None
    trusted: bool = False

    def untrusted(self) -> HandleOrigin:
        return replace(self, trusted=False)


K = TypeVar("K")
T = TypeVar("T")


class _State(Enum):
    OPEN = "open"
    CLOSED = "closed"
    CONSUMED = "consumed"
    DETACHED = "detached"


_NO_FD = 2**31  # the first number that no C int, and so no descriptor, can have


class Handle:
    """Base of all handles. Only the types of :func:`handle_types` are constructed; a driver must know what it gets."""

    type_name: ClassVar[str] = ""
    """The name in tables, in JSON and in ``GPUINTEROP_DISABLE``, e.g. ``timeline_fd``."""

    origin: HandleOrigin | None

    def __new__(cls, *_args: object, **_kwargs: object) -> Self:
        if not cls.type_name:
            kinds = ", ".join(kind.__name__ for kind in _CONCRETE if issubclass(kind, cls))
            raise ArgumentTypeError(
                "handle", f"a {cls.__name__} does not say what the handle is of; construct one of {kinds}."
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
        """End use. Idempotent. Closes what the handle owns; a borrowed number stays open."""
        if self._state is _State.OPEN:
            self._state = _State.CLOSED

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc_info: object) -> None:
        try:
            self.close()
        except HandleError:
            if kind is None:  # else the exception in flight says more
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

    def __reduce__(self) -> Any:
        raise ArgumentTypeError(
            "handle",
            f"a {type(self).__name__} cannot be pickled: a number means nothing in another process. Send it with "
            "gpuinterop.ipc.send_handle, or through multiprocessing as an argument of a Process or through a Pipe, "
            "which pass the descriptor itself. Not through a Queue, which pickles after put() has returned, when the "
            "handle may be closed.",
        )


class FdHandle(Handle):
    """A POSIX file descriptor.

    Parameters
    ----------
    fd : int
        Borrowed: it stays the caller's until an import consumes the handle.
    origin : HandleOrigin, optional
        Where it came from.
    trusted : bool, optional
        True: the caller vouches for all who hold the object; see `trusted`. By default what the origin says.

    Raises
    ------
    ArgumentTypeError
        `fd` is not an int.
    HandleError
        `fd` is not open, or a number that no descriptor has.
    """

    # Until the checks below have passed, and where an interrupt has come before: __del__ may see us.
    _owned = False
    _state = _State.CLOSED

    def __init__(self, fd: int, *, origin: HandleOrigin | None = None, trusted: bool | None = None) -> None:
        fd = check_int(fd, "fd")
        if not 0 <= fd < _NO_FD:
            raise HandleError(f"fd: invalid file descriptor {fd}; check the call that returned it.")
        try:
            os.get_inheritable(fd)  # F_GETFD: fstat may have to wait for a process that serves the file
        except OSError as error:
            raise HandleError(f"fd: {fd} is not open ({error.strerror}); was it closed or consumed already?") from None
        super().__init__(origin=origin)
        self._fd = fd
        self._number = [fd]  # who takes it out closes it, or has it: a list gives it to one thread only
        self._calls: list[int] = []  # the threads that use it just now. They note that, look whether it is open, use it
        self._trusted: bool | None = None
        if trusted is not None:
            self.trusted = trusted

    @classmethod
    def adopt(cls, fd: int, *, origin: HandleOrigin | None = None) -> Self:
        """Wrap an fd and **own** it: from now on the handle closes it. For backends and exporters."""
        return cls._adopt_made([fd], origin=origin)

    @classmethod
    def adopt_duplicate(cls, fd: int, *, origin: HandleOrigin | None = None) -> Self:
        """Wrap and **own** a close-on-exec duplicate of an fd, which stays the caller's. For backends and exporters.

        Raises
        ------
        DriverError
            The system refuses (``dup``).
        """
        made: list[int] = []
        try:
            made.extend(map(os.dup, (fd,)))  # stored by C: no interrupt takes it away
            return cls._adopt_made(made, origin=origin)
        except OSError as error:
            raise system.driver_error("dup", error.errno or 0) from error
        except BaseException:
            while made:
                os.close(made.pop())
            raise

    @classmethod
    def _adopt_made(cls, made: list[int], *, origin: HandleOrigin | None) -> Self:
        """Adopt the fd in a list. Whoever takes it out closes it: the handle, or the `except` of the caller."""
        handle = cls(made[0], origin=origin)
        handle._number = made
        handle._owned = True
        return handle

    @property
    def fd(self) -> int:
        """The number. Raises `HandleError` once the handle is closed, consumed or detached."""
        self._check_open()
        return self._fd

    def fileno(self) -> int:
        return self.fd

    @property
    def owned(self) -> bool:
        """Whether closing the handle closes the fd."""
        return self._owned

    @property
    def trusted(self) -> bool:
        """Whether objects are taken that a peer can use against this process.

        True where an exporter or driver of this process has made the handle, or the caller says so: with
        ``trusted=True``, or by setting it on a handle that :mod:`gpuinterop.ipc` brought. The host backend asks for it:
        who holds SwiftShader's memory or semaphore can end this process (SIGBUS) or make its signals fail.
        """
        if self._trusted is not None:
            return self._trusted
        return self.origin is not None and self.origin.trusted

    @trusted.setter
    def trusted(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise ArgumentTypeError("trusted", f"expected a bool, got {value!r}; say True if you trust its holders.")
        self._trusted = value

    def close(self) -> None:
        """End use. Idempotent. Closes an owned fd; a borrowed one stays open.

        Raises
        ------
        HandleError
            The fd is owned, and somebody else has closed it. The handle is closed all the same.
        """
        super().close()
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

    def _use(self, call: Callable[[int], T]) -> T:
        """Give `call` the number, which is nobody else's before it returns."""
        calls, mark = self._calls, (threading.get_ident(),)
        calls += mark
        try:
            return call(self.fd)
        finally:
            calls.remove(mark[0])
            self._settle()

    def _settle(self) -> OSError | None:
        """Close the number, once, of a handle that is done; what the system said if it was not open.

        Where a call still uses it, that one does so at its end.
        """
        if self._owned and self._state in (_State.CLOSED, _State.CONSUMED) and not self._threads():
            at_once = self.trusted or self._state is _State.CONSUMED  # else it may be a file that makes close() wait
            close = os.close if at_once else system.closer(self._fd)
            closed: list[object] = []
            try:
                closed.extend(map(close, map(list.pop, (self._number,))))  # C alone: no interrupt comes in between
            except IndexError:
                pass  # it is closed, or another thread's
            except OSError as error:
                return error
        return None

    def _let_calls_end(self) -> None:
        """Wait until no other thread uses the number: one that does has found the handle open."""
        mine = threading.get_ident()  # a signal handler may have come in the middle of such a call
        system.until(lambda: not self._threads() - {mine}, None)

    def _threads(self) -> set[int]:
        """Those that use the number just now; in the child of a fork none of the parent's."""
        calls = self._calls.copy()
        return set(calls).intersection(sys._current_frames()) if calls else set()

    def detach(self) -> int:
        """Return the fd; it is the caller's to close from now on, and the handle is done."""
        self._check_open()
        if threading.get_ident() in self._calls.copy():
            raise HandleError(
                f"handle: this {type(self).__name__} is being imported or duplicated by the call that this signal "
                "handler came into; detach it when that has returned."
            )
        self._state = _State.DETACHED
        self._let_calls_end()
        try:
            return self._number.pop()
        except IndexError:
            raise HandleError(
                f"handle: this {type(self).__name__} was closed or consumed in another thread; make or export another."
            ) from None

    def duplicate(self) -> Self:
        """A second handle that owns a duplicate of the fd (close-on-exec).

        Raises
        ------
        HandleError
            The handle is closed, or its fd cannot be duplicated: somebody else has closed it, or there are too many.
        """
        try:
            twin = self._use(lambda fd: self.adopt_duplicate(fd, origin=self.origin))
        except DriverError as error:
            raise HandleError(f"fd: {self._fd} cannot be duplicated ({error}); was it closed elsewhere?") from error
        twin._trusted = self._trusted
        return twin

    def __del__(self) -> None:
        if not self._owned or not self._number:
            return
        dropped = self._state is _State.OPEN
        self._state = _State.CLOSED
        if self._settle() is None and dropped:  # else the interpreter or the user was faster: nothing is left open
            warnings.warn(
                f"{type(self).__name__}(fd={self._fd}) was dropped without close(), detach() or an import",
                LeakedResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        if self.closed:
            return f"<{type(self).__name__} {self._state.value}>"
        return f"<{type(self).__name__} fd={self._fd}{' owned' if self._owned else ''}>"


class Win32Handle(Handle):
    """An NT handle, or the name of one.

    Parameters
    ----------
    handle : int, optional
        The NT handle's value. Stays the caller's, also after an import.
    name : str, optional
        The object's name. Exactly one of the two is given.
    """

    nameable: ClassVar[bool] = True

    def __init__(
        self, *, handle: int | None = None, name: str | None = None, origin: HandleOrigin | None = None
    ) -> None:
        self._state = _State.CLOSED
        if (handle is None) == (name is None):
            raise InvalidArgumentError("handle", "give exactly one of handle= and name=.")
        if handle is not None and (handle := check_int(handle, "handle")) <= 0:
            raise HandleError(f"handle: invalid NT handle {handle}; check the call that returned it.")
        if name is not None and not isinstance(name, str):
            raise ArgumentTypeError("name", f"must be a str, not {type(name).__name__}.")
        if name is not None and (not name or "\0" in name):
            raise InvalidArgumentError("name", "must be neither empty nor contain NUL.")
        if name is not None and not self.nameable:
            raise InvalidArgumentError("name", f"{type(self).__name__} objects have no name; give handle=.")
        super().__init__(origin=origin)
        self._handle = handle
        self._name = name

    @property
    def handle(self) -> int | None:
        self._check_open()
        return self._handle

    @property
    def name(self) -> str | None:
        self._check_open()
        return self._name

    def detach(self) -> int | None:
        """Return the handle's value; the caller closes it."""
        handle = self.handle
        self._state = _State.DETACHED
        return handle

    def duplicate(self) -> Self:
        """A second wrapper of the same NT handle: imports do not consume it, so nothing is duplicated."""
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
        The handle's value.
    keepalive : object, optional
        Kept alive as long as what is imported from this handle.
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
    """The address of an object of another library in this process (NvSci).

    Parameters
    ----------
    pointer : int
        The object's address; the object stays the caller's.
    keepalive : object, optional
        Kept alive as long as what is imported from this handle.
    """

    def __init__(self, pointer: int, *, keepalive: object = None, origin: HandleOrigin | None = None) -> None:
        self._state = _State.CLOSED
        pointer = check_int(pointer, "pointer")
        if pointer <= 0:
            raise HandleError("pointer: expected an object's address, got null; check the call that made the object.")
        super().__init__(origin=origin)
        self._pointer = pointer
        self.keepalive = keepalive

    @property
    def pointer(self) -> int:
        self._check_open()
        return self._pointer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} pointer={self._pointer:#x}>"


# -- kinds of semaphore: what values their calls take ------------------------------------------------------------


class Binary:
    """Signalled or not; calls take no value."""


class Timeline:
    """A counter that only grows; calls take a value."""


class Fence:
    """A Direct3D fence; calls take a value."""


class Keyed:
    """A keyed mutex; calls take a key, waits a time-out."""


class SciSync:
    """NvSciSync; calls take the address of an ``NvSciSyncFence``."""


class MemoryHandle(Handle):
    """Can be given to ``Device.import_memory``."""


class SemaphoreHandle(Handle, Generic[K]):
    """Can be given to ``Device.import_semaphore``; `K` is the kind."""

    kind: ClassVar[type]


class AllocationHandle(Handle):
    """Can be given to ``Device.import_allocation``."""


class OpaqueFd(FdHandle, MemoryHandle, SemaphoreHandle[Binary]):
    """``VK_EXTERNAL_*_HANDLE_TYPE_OPAQUE_FD``: memory, or a binary semaphore."""

    type_name = "opaque_fd"
    kind = Binary


class TimelineFd(FdHandle, SemaphoreHandle[Timeline]):
    """A timeline semaphore's ``OPAQUE_FD``. The driver does not tell it from a binary one's: you must."""

    type_name = "timeline_fd"
    kind = Timeline


class DmaBufFd(FdHandle, MemoryHandle):
    """A Linux dma-buf."""

    type_name = "dma_buf_fd"


class VmmFd(FdHandle, AllocationHandle):
    """A shareable virtual-memory allocation (``cuMemExportToShareableHandle``), or the host backend's memfd."""

    type_name = "vmm_fd"


class DrmSyncobjFd(FdHandle):
    """A DRM syncobj. Only :mod:`gpuinterop.bridge` takes it."""

    type_name = "drm_syncobj_fd"


class SyncFd(FdHandle):
    """A Linux sync file. Only :mod:`gpuinterop.bridge` takes it."""

    type_name = "sync_fd"


class EventFd(FdHandle):
    """An eventfd. Only :mod:`gpuinterop.bridge` takes it."""

    type_name = "event_fd"


class OpaqueWin32(Win32Handle, MemoryHandle, SemaphoreHandle[Binary], AllocationHandle):
    """``VK_EXTERNAL_*_HANDLE_TYPE_OPAQUE_WIN32``."""

    type_name = "opaque_win32"
    kind = Binary


class OpaqueWin32Kmt(KmtHandle, MemoryHandle, SemaphoreHandle[Binary], AllocationHandle):
    """``VK_EXTERNAL_*_HANDLE_TYPE_OPAQUE_WIN32_KMT``."""

    type_name = "opaque_win32_kmt"
    kind = Binary


class TimelineWin32(Win32Handle, SemaphoreHandle[Timeline]):
    """A timeline semaphore's NT handle."""

    type_name = "timeline_win32"
    kind = Timeline


class D3D12Heap(Win32Handle, MemoryHandle):
    """A shared ``ID3D12Heap``."""

    type_name = "d3d12_heap"


class D3D12Resource(Win32Handle, MemoryHandle):
    """A shared committed ``ID3D12Resource``; always dedicated."""

    type_name = "d3d12_resource"


class D3D12Fence(Win32Handle, SemaphoreHandle[Fence]):
    """A shared ``ID3D12Fence``."""

    type_name = "d3d12_fence"
    kind = Fence


class D3D11Resource(Win32Handle, MemoryHandle):
    """A shared ``ID3D11Resource``'s NT handle; always dedicated."""

    type_name = "d3d11_resource"


class D3D11ResourceKmt(KmtHandle, MemoryHandle):
    """A shared ``ID3D11Resource``'s global share handle; always dedicated."""

    type_name = "d3d11_resource_kmt"


class D3D11Fence(Win32Handle, SemaphoreHandle[Fence]):
    """A shared ``ID3D11Fence``."""

    type_name = "d3d11_fence"
    kind = Fence


class KeyedMutex(Win32Handle, SemaphoreHandle[Keyed]):
    """An ``IDXGIKeyedMutex``'s NT handle."""

    type_name = "keyed_mutex"
    kind = Keyed


class KeyedMutexKmt(KmtHandle, SemaphoreHandle[Keyed]):
    """An ``IDXGIKeyedMutex``'s global share handle."""

    type_name = "keyed_mutex_kmt"
    kind = Keyed


class NvSciBuf(PointerHandle, MemoryHandle):
    """An ``NvSciBufObj``."""

    type_name = "nvscibuf"


class NvSciSync(PointerHandle, SemaphoreHandle[SciSync]):
    """An ``NvSciSyncObj``."""

    type_name = "nvscisync"
    kind = SciSync


class FabricHandle(AllocationHandle):
    """A fabric handle: 64 bytes that mean the same on every node of an NVLink domain.

    Parameters
    ----------
    data : bytes
        64 bytes.
    """

    type_name = "fabric"
    SIZE: ClassVar[int] = 64

    def __init__(self, data: bytes, *, origin: HandleOrigin | None = None) -> None:
        self._state = _State.CLOSED
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ArgumentTypeError("data", f"must be bytes, not {type(data).__name__}.")
        if len(data) != self.SIZE:
            raise InvalidArgumentError("data", f"a fabric handle has {self.SIZE} bytes, not {len(data)}.")
        super().__init__(origin=origin)
        self._data = bytes(data)

    @property
    def data(self) -> bytes:
        self._check_open()
        return self._data

    def duplicate(self) -> Self:
        return type(self)(self.data, origin=self.origin)

    def __reduce__(self) -> Any:
        return _rebuild_fabric, (self.data, self.origin.untrusted() if self.origin else None)


def _rebuild_fabric(data: bytes, origin: HandleOrigin | None) -> FabricHandle:
    return FabricHandle(data, origin=origin)


AnySemaphoreHandle: TypeAlias = SemaphoreHandle[Any]

_CONCRETE: tuple[type[Handle], ...] = (
    OpaqueFd, TimelineFd, DmaBufFd, VmmFd, OpaqueWin32, OpaqueWin32Kmt, TimelineWin32, D3D12Heap, D3D12Resource,
    D3D12Fence, D3D11Resource, D3D11ResourceKmt, D3D11Fence, KeyedMutex, KeyedMutexKmt, NvSciBuf, NvSciSync,
    FabricHandle, DrmSyncobjFd, SyncFd, EventFd,
)  # fmt: skip


def handle_types() -> dict[str, type[Handle]]:
    """Every concrete handle type by its :attr:`Handle.type_name`."""
    return {kind.type_name: kind for kind in _CONCRETE}


# -- multiprocessing passes the descriptor itself ----------------------------------------------------------------
# ForkingPickler consults this table; plain pickle does not, and meets Handle.__reduce__, which refuses.
# Process.start() and a Pipe's send() pickle in the call: the handle is the caller's to close as soon as it returns. A
# Queue pickles in a feeder thread some time after put(): a handle closed by then fails there, where the error is
# printed and nobody can catch it; one left open is dropped there, unclosed. Nothing can tell them apart from here.


def _rebuild_fd(kind: type[FdHandle], duplicate: Any, origin: HandleOrigin | None) -> FdHandle:
    return kind.adopt(duplicate.detach(), origin=origin)


def _reduce_fd(handle: FdHandle) -> Any:
    if handle.closed:
        raise HandleError(
            f"handle: this {type(handle).__name__} is {handle._state.value}; was it put into a multiprocessing Queue, "
            "which pickles later? Pass it as an argument of the Process, or through a Pipe."
        )
    origin = handle.origin.untrusted() if handle.origin else None
    return _rebuild_fd, (type(handle), reduction.DupFd(handle.fd), origin)


if sys.platform != "win32":
    for _kind in _CONCRETE:
        if issubclass(_kind, FdHandle):
            reduction.register(_kind, _reduce_fd)


class ArrayUsage(Flag):
    """What an image in external memory is used as; the exporter created it for the same.

    The drivers' flags: ``CUDA_ARRAY3D_SURFACE_LDST``, ``CUDA_ARRAY3D_COLOR_ATTACHMENT``, ``CUDA_ARRAY3D_CUBEMAP``.
    """

    NONE = 0
    SURFACE = auto()
    """Kernels load and store texels (``VK_IMAGE_USAGE_STORAGE_BIT``)."""
    COLOR_ATTACHMENT = auto()
    """The graphics side renders into it."""
    CUBEMAP = auto()
    """Six layers are the faces of a cube."""


class Texel(NamedTuple):
    """What a texel consists of: equal channels, each of `bits` bits.

    Attributes
    ----------
    numeric : str
        ``UNORM``, ``SNORM``, ``UINT``, ``SINT`` or ``SFLOAT``, as in the format's name.
    bits, channels : int
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
"""Vulkan's formats that every side lays out alike. Others are refused: a wrong guess would read beside the image."""


def texel_of(format: str) -> Texel:
    """What a texel of a Vulkan format consists of; the prefix ``VK_FORMAT_`` may be left out."""
    if not isinstance(format, str):
        raise ArgumentTypeError(
            "format", f"expected a format's name, got {format!r}; give Vulkan's, e.g. 'R32G32B32A32_SFLOAT'."
        )
    try:
        return TEXELS[format.removeprefix("VK_FORMAT_")]
    except KeyError:
        raise InvalidArgumentError(
            "format", f"expected a format that every side lays out alike, got {format!r}; take {', '.join(TEXELS)}."
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayLayout:
    """How an image lies in external memory, as ``map_mipmapped_array`` takes it.

    Attributes
    ----------
    format : str
        A Vulkan format's name without the prefix, e.g. ``R32G32B32A32_SFLOAT``.
    extent : tuple of int
        Width, height, depth in texels; height and depth are 0 where the image has none.
    levels, layers : int
        Mip levels; array layers (0: no array).
    offset : int
        In bytes, from the start of the memory.
    usage : ArrayUsage
    """

    format: str
    extent: tuple[int, int, int]
    levels: int = 1
    layers: int = 0
    offset: int = 0
    usage: ArrayUsage = ArrayUsage.SURFACE

    @property
    def texel(self) -> Texel:
        """What a texel of the format consists of; see `texel_of`."""
        return texel_of(self.format)


class Granularity(NamedTuple):
    """What sizes and offsets are multiples of.

    Attributes
    ----------
    minimum : int
        In bytes; anything else is refused.
    recommended : int
        In bytes, for the best performance; a multiple of the minimum.
    """

    minimum: int
    recommended: int
