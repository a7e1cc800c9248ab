"""Foreign semaphores as the CPU sees them: what a bridge's watcher waits for and signals."""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import select
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final

from .. import system, timeline
from .._core.semaphore import ExternalSemaphore
from ..capabilities import Capability, Cell, Operation, Scope
from ..errors import (
    ArgumentTypeError,
    DriverError,
    HandleError,
    InvalidArgumentError,
    ResourceClosedError,
    SemaphoreTimeoutError,
)
from ..handles import Binary, DrmSyncobjFd, EventFd, SyncFd, Timeline, TimelineFd

if TYPE_CHECKING:
    from ._bridge import BridgedSemaphore

if sys.platform != "win32":
    import fcntl

__all__ = [
    "Endpoint",
    "EventFdEndpoint",
    "OwnTimelineEndpoint",
    "SemaphoreEndpoint",
    "SyncFdEndpoint",
    "SyncobjEndpoint",
]


class Endpoint(ABC):
    """A foreign semaphore, as a thread of the CPU uses it. Subclass it for what this library does not know.

    The library calls `wait` with a time-out of 0 only, for as long as a stream waits, so a look should be cheap.
    Neither that nor `signal` may block, since all semaphores of the bridge wait meanwhile, nor call into the device's
    compute driver (HIP, CUDA). They are called by one thread at a time. An exception ends the semaphore: streams that
    wait are let go, and fail with it.

    Attributes
    ----------
    kind : type
        ``Timeline`` or ``Binary``.
    label : str
        For messages.
    cannot_signal : Capability, optional
        The gap, where it can only be waited for.
    """

    kind: type
    label: str
    cannot_signal: Capability | None = None

    @abstractmethod
    def wait(self, value: int, timeout: float) -> bool:
        """Whether the semaphore has reached `value`; waits up to `timeout` seconds for it, with the GIL released.

        The library passes 0.0. A binary one ignores `value`, and True consumes the signal.
        """

    @abstractmethod
    def signal(self, value: int) -> None:
        """Signal it, without blocking; a timeline to `value`."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds. Called once, when no stream uses it any more; never while a call is stuck in it."""

    def _bridged(self, semaphore: BridgedSemaphore[Any]) -> None:  # noqa: B027 - for those that somebody else lends
        """Take note of what uses it until that is released; what this raises refuses the use."""


class SemaphoreEndpoint(Endpoint):
    """A semaphore of this library that the calling thread can wait for: of the host backend, or one of our own.

    Parameters
    ----------
    semaphore : ExternalSemaphore
        Stays the caller's: keep it open for as long as the bridge uses it.

    Raises
    ------
    UnsupportedError
        Its backend's semaphores cannot be waited for without a stream.
    """

    def __init__(self, semaphore: ExternalSemaphore[Any]) -> None:
        if not isinstance(semaphore, ExternalSemaphore):
            raise ArgumentTypeError("semaphore", f"must be an ExternalSemaphore, not {type(semaphore).__name__}.")
        semaphore.check_host_side()
        self._semaphore = semaphore
        self.kind = semaphore.kind
        self.label = semaphore.label

    def wait(self, value: int, timeout: float) -> bool:
        try:
            self._semaphore.host_wait(*self._value(value), timeout=timeout)
        except SemaphoreTimeoutError:
            return False
        return True

    def signal(self, value: int) -> None:
        self._semaphore.host_signal(*self._value(value))

    def close(self) -> None:
        """It is the caller's."""

    def _value(self, value: int) -> tuple[int, ...]:
        return (value,) if self.kind is Timeline else ()


class OwnTimelineEndpoint(Endpoint):
    """One of our own timelines (`gpuinterop.timeline`), by its descriptor.

    Parameters
    ----------
    handle : TimelineFd
        Its fd becomes the endpoint's; after an error it is the caller's, open and untouched.

    Raises
    ------
    HandleError
        This is no timeline of `Device.create_semaphore`.
    ResourceClosedError
        The handle was consumed or closed.
    DriverError
        It cannot be mapped.
    """

    kind = Timeline

    def __init__(self, handle: TimelineFd) -> None:
        fd = handle.fd
        if not timeline.is_ours(fd):
            raise HandleError("handle: this is no timeline of Device.create_semaphore.")
        self._fd = fd
        self._address = system.map_shared(fd, system.PAGE)
        self.label = f"timeline semaphore {os.fstat(fd).st_ino}"
        self._page: timeline.Page | None = timeline.Page(self._fd, self._address, self.label)

    def wait(self, value: int, timeout: float) -> bool:
        return self._open().wait(value, time.monotonic() + timeout, _nothing)

    def signal(self, value: int) -> None:
        self._open().signal(value)

    def close(self) -> None:
        self._page = None
        system.unmap(self._address, system.PAGE)
        os.close(self._fd)

    def _open(self) -> timeline.Page:
        if self._page is None:
            raise ResourceClosedError(f"{self.label} was closed.")
        return self._page


def _nothing() -> None:
    """Nobody cancels a look."""


class EventFdEndpoint(Endpoint):
    """An eventfd: a signal adds 1 to its counter, a wait takes 1 away.

    Without EFD_SEMAPHORE a read takes all that there is: the endpoint keeps what is left for its next waits, and puts
    that back when it is closed.

    Parameters
    ----------
    handle : EventFd
        Its fd becomes the endpoint's; after an error it is the caller's, open and untouched. With EFD_SEMAPHORE others
        may wait for it at the same time; a wait of ours and one of theirs take a signal each.

    Raises
    ------
    HandleError
        This is no eventfd.
    ResourceClosedError
        The handle was consumed or closed.
    """

    kind = Binary

    def __init__(self, handle: EventFd) -> None:
        self._fd = fd = handle.fd
        _check_link(fd, "anon_inode:[eventfd]", "an eventfd, such as os.eventfd() makes")
        self._credits = 0
        """Signals that a read has taken, and no wait yet."""
        self.label = f"eventfd {fd}"

    def wait(self, value: int, timeout: float) -> bool:
        if self._credits:
            self._credits -= 1
            return True
        if not _readable(self._fd, timeout):
            return False
        # Somebody else may take the signal between the look and the read. Whether the descriptor blocks is its owner's
        # affair, since the flag is the open file's, which others use as well: so this read says it for itself.
        counter = bytearray(8)
        try:
            os.preadv(self._fd, [counter], -1, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise system.driver_error("preadv2(eventfd)", error.errno or 0) from error
        self._credits = int.from_bytes(counter, sys.byteorder) - 1
        return True

    def signal(self, value: int) -> None:
        self._add(1)

    def close(self) -> None:
        try:
            if self._credits:
                self._add(self._credits)
        finally:
            os.close(self._fd)

    def _add(self, count: int) -> None:
        try:
            if not _polls(self._fd, select.POLLOUT, 0.0):  # full: the write would block
                raise system.driver_error("write(eventfd)", errno.EAGAIN)
            os.write(self._fd, struct.pack("=Q", count))
        except OSError as error:
            raise system.driver_error("write(eventfd)", error.errno or 0) from error


class SyncFdEndpoint(Endpoint):
    """A sync file: signalled once, by whoever made it; from then on every wait passes.

    A fence that ended in error (a GPU that was reset) has not done its work: the wait raises.

    Parameters
    ----------
    handle : SyncFd
        Its fd becomes the endpoint's; after an error it is the caller's, open and untouched.

    Raises
    ------
    HandleError
        This is no sync file.
    ResourceClosedError
        The handle was consumed or closed.
    """

    kind = Binary
    cannot_signal = Cell(Operation.SIGNAL_SEMAPHORE, SyncFd).gap(
        Scope.PLATFORM,
        "a sync file is signalled by the driver that made it, and by nobody else.",
        "Linux: Documentation/driver-api/sync_file.rst",
        "signal by a DRM syncobj (DrmSyncobjFd) or an eventfd.",
    )

    # struct sync_file_info of linux/sync_file.h: name, status, flags, num_fences, pad, sync_fence_info
    _INFO: ClassVar[struct.Struct] = struct.Struct("=32siIIIQ")
    _FILE_INFO: ClassVar[int] = 0xC0383E04

    def __init__(self, handle: SyncFd) -> None:
        self._fd = fd = handle.fd
        _check_link(fd, "anon_inode:sync_file", "a sync file")
        self._signalled = False
        self.label = f"sync file {fd}"

    def wait(self, value: int, timeout: float) -> bool:
        if not self._signalled and _readable(self._fd, timeout):
            self._check_status()
            self._signalled = True
        return self._signalled

    def signal(self, value: int) -> None:
        raise InvalidArgumentError("semaphore", f"{self.label} cannot be signalled from here.")

    def close(self) -> None:
        os.close(self._fd)

    def _check_status(self) -> None:
        """poll() calls a fence signalled that ended in error."""
        request = bytearray(self._INFO.size)  # of no fence: then the status is that of them all
        try:
            fcntl.ioctl(self._fd, self._FILE_INFO, request, True)
        except OSError as error:
            raise system.driver_error("SYNC_IOC_FILE_INFO", error.errno or 0) from error
        status = self._INFO.unpack(request)[1]
        if status < 0:
            raise system.driver_error(
                "SYNC_IOC_FILE_INFO", -status, f"{self.label}: the fence was in error, so its work was not done."
            )


def _readable(fd: int, timeout: float) -> bool:
    return _polls(fd, select.POLLIN, timeout)


def _polls(fd: int, wanted: int, timeout: float) -> bool:
    poller = select.poll()  # not select(): descriptors may be large
    poller.register(fd, wanted)
    for _, events in poller.poll(timeout * 1000):
        if events & (select.POLLERR | select.POLLNVAL):
            raise system.driver_error("poll", errno.EBADF, f"descriptor {fd} is closed, or in error.")
        return bool(events & wanted)
    return False


def _check_link(fd: int, wanted: str, what: str) -> None:
    """Refuse a descriptor that /proc calls otherwise: any other question may go to a process that never answers."""
    try:
        link = os.readlink(f"/proc/self/fd/{fd}")
    except OSError as error:
        mounted = os.path.isdir("/proc/self/fd")
        why = f"it cannot be read: {error}" if mounted else "/proc is not mounted, which alone can tell; mount it"
        raise HandleError(f"handle: expected {what}, got descriptor {fd}, of an unknown kind: {why}.") from error
    if link != wanted:
        raise HandleError(f"handle: expected {what}, got {link}.")


class SyncobjEndpoint(Endpoint):
    """A DRM syncobj with a timeline, which is what Mesa's drivers export a timeline semaphore as.

    Unverified: no machine with DRM has run it. The calls are the kernel's (``drm.h``): FD_TO_HANDLE, TIMELINE_WAIT with
    WAIT_FOR_SUBMIT, TIMELINE_SIGNAL, DESTROY.

    Parameters
    ----------
    handle : DrmSyncobjFd
        Its fd becomes the endpoint's; after an error it is the caller's, open and untouched.
    node : str, optional
        The render node to use it on; by default the first of /dev/dri/renderD* that can be opened and knows syncobjs.
        A syncobj belongs to no device, so any does.

    Raises
    ------
    InvalidArgumentError
        No render node can be opened.
    DriverError
        The descriptor is no syncobj, or no node's driver knows them (EOPNOTSUPP).
    ResourceClosedError
        The handle was consumed or closed.
    """

    kind = Timeline

    _FD_TO_HANDLE: ClassVar[int] = 0xC01064C2
    _DESTROY: ClassVar[int] = 0xC00864C0
    _TIMELINE_WAIT: ClassVar[int] = 0xC02864CA
    _TIMELINE_SIGNAL: ClassVar[int] = 0xC01864CD
    _WAIT_FOR_SUBMIT: ClassVar[int] = 1 << 1

    def __init__(self, handle: DrmSyncobjFd, *, node: str | None = None) -> None:
        self._fd = fd = handle.fd
        request = bytearray(struct.pack("=IIiI", 0, 0, fd, 0))
        refusal: DriverError | None = None
        for self._node in _open_nodes(node):
            try:
                self._ioctl("DRM_IOCTL_SYNCOBJ_FD_TO_HANDLE", self._FD_TO_HANDLE, request)
            except DriverError as error:
                os.close(self._node)
                if error.code != errno.EOPNOTSUPP:
                    raise
                refusal = error
            except BaseException:
                os.close(self._node)
                raise
            else:
                break
        else:
            assert refusal is not None  # no node at all is an error of its own
            raise refusal
        (self._handle,) = struct.unpack_from("=I", request)
        self.label = f"DRM syncobj {self._handle}"

    def wait(self, value: int, timeout: float) -> bool:
        handles = ctypes.c_uint32(self._handle)
        points = ctypes.c_uint64(value)
        # The kernel takes the time of the monotonic clock at which to stop.
        deadline = time.monotonic_ns() + int(timeout * 1e9) if timeout > 0 else 0
        request = struct.pack(
            "=QQqIIII",
            ctypes.addressof(handles), ctypes.addressof(points), deadline, 1, self._WAIT_FOR_SUBMIT, 0, 0,
        )  # fmt: skip
        try:
            self._ioctl("DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT", self._TIMELINE_WAIT, bytearray(request))
        except DriverError as error:
            if error.code == errno.ETIME:
                return False
            raise
        return True

    def signal(self, value: int) -> None:
        handles = ctypes.c_uint32(self._handle)
        points = ctypes.c_uint64(value)
        request = struct.pack("=QQII", ctypes.addressof(handles), ctypes.addressof(points), 1, 0)
        self._ioctl("DRM_IOCTL_SYNCOBJ_TIMELINE_SIGNAL", self._TIMELINE_SIGNAL, bytearray(request))

    def close(self) -> None:
        try:
            self._ioctl("DRM_IOCTL_SYNCOBJ_DESTROY", self._DESTROY, bytearray(struct.pack("=II", self._handle, 0)))
        finally:
            os.close(self._node)
            os.close(self._fd)

    def _ioctl(self, call: str, number: int, request: bytearray) -> None:
        try:
            fcntl.ioctl(self._node, number, request, True)
        except OSError as error:
            raise system.driver_error(call, error.errno or 0) from error


_NODES: Final = "/dev/dri/renderD*"


def render_nodes() -> list[str]:
    """The DRM devices that are there, whether or not this process may open them."""
    return sorted(glob.glob(_NODES))


def _open_nodes(node: str | None) -> Iterator[int]:
    """The render nodes that can be opened, one after the other; the caller's."""
    tried: list[str] = []
    opened = False
    for path in [node] if node is not None else render_nodes():
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            tried.append(f"{path}: {error.strerror}")
            continue
        opened = True
        yield fd
    if not opened:
        raise InvalidArgumentError(
            "node", f"no DRM render node can be opened ({', '.join(tried) or f'there is no {_NODES}'})."
        )
