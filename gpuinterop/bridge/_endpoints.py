"""Endpoints: foreign semaphores that a bridge's watcher waits for and signals from the CPU."""

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
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from .. import system, timeline
from .._arguments import NoCopy, check_int, check_type
from .._core.semaphore import ExternalSemaphore
from ..capabilities import Capability, Cell, Operation, Scope
from ..errors import (
    DriverError,
    HandleError,
    InvalidArgumentError,
    ResourceClosedError,
    SemaphoreTimeoutError,
    UnsupportedError,
)
from ..handles import Binary, DrmSyncobjFd, FdHandle, SyncFd, Timeline, TimelineFd

if TYPE_CHECKING:
    from ._bridge import BridgedSemaphore

if sys.platform != "win32":
    import fcntl

_Call: TypeAlias = tuple[str, int]  # name and number of an ioctl
_NO_COUNTER: Final = Cell(Operation.WAIT_SEMAPHORE, TimelineFd).gap(
    Scope.RUNTIME,
    "the endpoint does not report its counter, only whether a value is reached.",
    "Endpoint.counter",
    "give the endpoint a method `counter`, or wait for a value with host_wait.",
)


class Endpoint(NoCopy, ABC):
    """A foreign semaphore that a CPU thread can use. Subclass it for semaphores that gpuinterop does not support.

    gpuinterop polls: while a stream waits, it calls `wait` with a timeout of 0, so the call should be cheap. `wait` and
    `signal` must not block, because all semaphores of the bridge wait meanwhile. They must not call the device's
    compute driver (HIP, CUDA). One thread at a time calls them. An exception ends the semaphore: waiting streams
    continue and fail with it.

    Attributes
    ----------
    kind : type
        ``Timeline`` or ``Binary``.
    label : str
        Name in messages. The bridge sets it to the name of the semaphore that it creates, which ends in a number.
    cannot_signal : Capability, optional
        The gap, if the semaphore can only be waited for.

    Examples
    --------
    >>> import threading
    >>> class Frames(gi.bridge.Endpoint):
    ...     kind, label = gi.Binary, "frames of the decoder"
    ...     def __init__(self):
    ...         self.ready = threading.Semaphore(0)
    ...     def wait(self, value, timeout):
    ...         return self.ready.acquire(timeout=timeout)
    ...     def signal(self, value):
    ...         self.ready.release()
    ...     def close(self):
    ...         pass
    >>> frames = Frames()
    >>> with gi.bridge.Bridge(device) as bridge:
    ...     semaphore = bridge.from_endpoint(frames)
    ...     semaphore.wait(stream)
    ...     frames.signal(0)  # the decoder's thread signals
    ...     stream.synchronize(timeout=10)
    """

    kind: type
    label: str
    cannot_signal: Capability | None = None

    @abstractmethod
    def wait(self, value: int, timeout: float) -> bool:
        """Wait up to `timeout` seconds without the GIL; return whether the semaphore has reached `value`.

        gpuinterop passes 0.0. A binary semaphore ignores `value`, and True consumes the signal.
        """

    @abstractmethod
    def signal(self, value: int) -> None:
        """Signal the semaphore without blocking. A timeline is set to `value`."""

    def counter(self) -> int:
        """Return a timeline's current value. Without this method `ExternalSemaphore.value` is a gap."""
        raise UnsupportedError(_NO_COUNTER, context=self.label)

    @abstractmethod
    def close(self) -> None:
        """Release the endpoint's resources. Called once after the streams' last use, never while a call is stuck."""

    def _bridged(self, semaphore: BridgedSemaphore[Any]) -> None:
        """Record the semaphore that uses the endpoint until its release; raise to refuse it."""


class SemaphoreEndpoint(Endpoint):
    """A gpuinterop semaphore that a thread can wait for: the host backend's, or gpuinterop's timeline.

    Parameters
    ----------
    semaphore : ExternalSemaphore
        The semaphore. You own it, and must keep it open as long as the bridge uses it.

    Raises
    ------
    UnsupportedError
        Its backend cannot wait for semaphores without a stream.

    Examples
    --------
    >>> with device.create_semaphore(gi.TimelineFd) as semaphore:
    ...     endpoint = gi.bridge.SemaphoreEndpoint(semaphore)
    ...     endpoint.signal(1)
    ...     endpoint.wait(1, timeout=0)
    True
    """

    def __init__(self, semaphore: ExternalSemaphore[Any]) -> None:
        check_type(semaphore, ExternalSemaphore, "semaphore", "an ExternalSemaphore")
        semaphore._check_host_side()
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

    def counter(self) -> int:
        return self._semaphore.value

    def close(self) -> None:
        """Do nothing, because the caller owns the semaphore."""

    def _value(self, value: int) -> tuple[int, ...]:
        return (value,) if self.kind is Timeline else ()


class OwnTimelineEndpoint(Endpoint):
    """The descriptor of a gpuinterop timeline (`gpuinterop.timeline`).

    Parameters
    ----------
    handle : TimelineFd
        If the call succeeds, the endpoint owns the fd; after an error you still own it, open and untouched.

    Raises
    ------
    HandleError
        `handle` is not a timeline of `Device.create_semaphore`, or it was consumed or closed.
    DriverError
        The timeline cannot be mapped.

    Examples
    --------
    >>> with device.create_semaphore(gi.TimelineFd) as semaphore:
    ...     number = semaphore.export().detach()
    ...     endpoint = gi.bridge.OwnTimelineEndpoint(gi.TimelineFd(number))
    ...     semaphore.signal(stream, 1)
    ...     endpoint.wait(1, timeout=10)
    ...     endpoint.close()  # closes the descriptor too
    True
    """

    kind = Timeline
    label = "timeline_fd semaphore"

    def __init__(self, handle: TimelineFd) -> None:
        self._address = handle._use(_map_timeline)
        try:
            self._fd = handle.detach()
        except HandleError:  # another thread has closed it
            system.unmap(self._address, system.PAGE)
            raise
        self._closed = False
        self._page = timeline.Page(self._fd, self._address, self.label)

    def wait(self, value: int, timeout: float) -> bool:
        return self._open().wait(value, time.monotonic() + timeout)

    def signal(self, value: int) -> None:
        self._open().signal(check_int(value, "value", minimum=0))

    def counter(self) -> int:
        return self._open().value

    def close(self) -> None:
        self._closed = True
        self._page.close()
        system.unmap(self._address, system.PAGE)
        os.close(self._fd)

    def _bridged(self, semaphore: BridgedSemaphore[Any]) -> None:
        self._page.label = semaphore.label

    def _open(self) -> timeline.Page:
        if self._closed:
            raise ResourceClosedError(f"{self.label} was closed.")
        return self._page


class _FdEndpoint(Endpoint):
    """A binary semaphore of the kernel that is polled through its descriptor."""

    kind = Binary
    _what: ClassVar[str]
    _link: ClassVar[str]  # the descriptor's, in /proc

    def __init__(self, handle: FdHandle) -> None:
        handle._use(self._check)
        self._fd = handle.detach()
        self.label = f"{self._what.split(maxsplit=1)[1]} {self._fd}"

    def close(self) -> None:
        os.close(self._fd)

    def _check(self, fd: int) -> None:
        """Refuse a wrong descriptor by its link. Other queries may block on a process that serves the file."""
        if (link := system.link(fd)) != self._link:
            shown = link or f"descriptor {fd}, which has no link in /proc/self/fd; check that /proc is mounted"
            raise HandleError(f"handle: expected {self._what}, got {shown}.")

    def _poll(self, wanted: int, timeout: float) -> bool:
        events = system.poll(self._fd, wanted, timeout * 1000)
        if events & (select.POLLERR | select.POLLNVAL):
            raise system.driver_error("poll", errno.EBADF, f"{self.label} is closed, or in error.")
        return bool(events & wanted)


class EventFdEndpoint(_FdEndpoint):
    """An eventfd. A signal adds 1 to its counter, and a wait takes 1.

    Without EFD_SEMAPHORE a read takes the whole count. The endpoint then keeps the rest for its next waits, and adds it
    back when it is closed. With EFD_SEMAPHORE other code can wait for it at the same time; each wait takes one signal.

    Parameters
    ----------
    handle : EventFd
        If the call succeeds, the endpoint owns the fd; after an error you still own it, open and untouched.

    Raises
    ------
    HandleError
        `handle` is not an eventfd, or it was consumed or closed.

    Examples
    --------
    >>> import os
    >>> endpoint = gi.bridge.EventFdEndpoint(gi.EventFd(os.eventfd(0)))
    >>> endpoint.signal(0)
    >>> endpoint.wait(0, timeout=0), endpoint.wait(0, timeout=0)
    (True, False)
    >>> endpoint.close()
    """

    _what = "an eventfd"
    _link = "anon_inode:[eventfd]"
    _credits = 0  # signals that were read, but that no wait has taken yet

    def wait(self, value: int, timeout: float) -> bool:
        if self._credits:
            self._credits -= 1
            return True
        if not self._poll(select.POLLIN, timeout):
            return False
        # Other code may take the signal after the poll, so the read must not block. O_NONBLOCK would change the open
        # file for its other users; RWF_NOWAIT applies only to this read.
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
            super().close()

    def _add(self, count: int) -> None:
        if not self._poll(select.POLLOUT, 0.0):  # full: the write would block
            raise system.driver_error("write(eventfd)", errno.EAGAIN)
        system.call("write(eventfd)", os.write, self._fd, struct.pack("=Q", count))


class SyncFdEndpoint(_FdEndpoint):
    """A sync file. The driver that made it signals it once; after that every wait passes.

    If the fence ended in error (such as a GPU reset), its work was not done, and the wait raises.

    Parameters
    ----------
    handle : SyncFd
        If the call succeeds, the endpoint owns the fd; after an error you still own it, open and untouched.

    Raises
    ------
    HandleError
        `handle` is not a sync file, or it was consumed or closed.

    Examples
    --------
    >>> print(gi.bridge.SyncFdEndpoint.cannot_signal.reason)
    only the driver that made a sync file can signal it.
    >>> gi.bridge.SyncFdEndpoint(gi.SyncFd(fd))
    Traceback (most recent call last):
        ...
    gpuinterop.errors.HandleError: handle: expected a sync file, got ...
    """

    _what = "a sync file"
    _link = "anon_inode:sync_file"
    cannot_signal = Cell(Operation.SIGNAL_SEMAPHORE, SyncFd).gap(
        Scope.PLATFORM,
        "only the driver that made a sync file can signal it.",
        "Linux: Documentation/driver-api/sync_file.rst",
        "signal a DRM syncobj (DrmSyncobjFd) or an eventfd.",
    )

    # struct sync_file_info of linux/sync_file.h: name, status, flags, num_fences, pad, sync_fence_info
    _INFO: ClassVar[struct.Struct] = struct.Struct("=32siIIIQ")
    _FILE_INFO: ClassVar[_Call] = ("SYNC_IOC_FILE_INFO", 0xC0383E04)

    def wait(self, value: int, timeout: float) -> bool:
        if not self._poll(select.POLLIN, timeout):
            return False
        request = bytes(self._INFO.size)  # asks for no fence in particular, so the status covers all of them
        status = self._INFO.unpack(_ioctl(self._fd, self._FILE_INFO, request))[1]
        if status < 0:  # poll() reports this as signalled
            raise system.driver_error(
                self._FILE_INFO[0], -status, f"{self.label}: the fence was in error, so its work was not done."
            )
        return True

    def signal(self, value: int) -> None:
        raise InvalidArgumentError("semaphore", f"expected one that can be signalled from here, got {self.label}.")


def _map_timeline(fd: int) -> int:
    if not timeline.is_ours(fd):
        raise HandleError(
            "handle: expected a timeline of Device.create_semaphore, got another descriptor; the CPU cannot wait for a "
            "driver's semaphore through it. If a Vulkan device of this process made it, use Bridge.from_endpoint("
            "gpuinterop.vulkan.TimelineEndpoint(vk, semaphore)). If another process made it, import it first on a "
            "Vulkan device of the same UUID."
        )
    return system.map_shared(fd, system.PAGE)


def _ioctl(fd: int, call: _Call, request: bytes) -> bytearray:
    """Make the call; return the request as changed by the kernel."""
    name, number = call
    answer = bytearray(request)
    system.call(name, fcntl.ioctl, fd, number, answer, True)
    return answer


class SyncobjEndpoint(Endpoint):
    """A DRM syncobj with a timeline. Mesa's drivers export timeline semaphores as syncobjs.

    Unverified: it has not run on a machine with DRM. It uses the kernel's calls (``drm.h``) FD_TO_HANDLE, TIMELINE_WAIT
    with WAIT_FOR_SUBMIT, TIMELINE_SIGNAL, QUERY and DESTROY.

    Parameters
    ----------
    handle : DrmSyncobjFd
        If the call succeeds, the endpoint owns the fd; after an error you still own it, open and untouched.
    node : str, optional
        Render node to use. Any node works, because a syncobj belongs to no device. Default: the first /dev/dri/renderD*
        that can be opened and supports syncobjs.

    Raises
    ------
    InvalidArgumentError
        No render node can be opened.
    DriverError
        The descriptor is not a syncobj, or no node's driver supports them (EOPNOTSUPP).
    HandleError
        The handle was consumed or closed.

    Examples
    --------
    The kernel's calls need a render node:

    >>> gi.bridge.SyncobjEndpoint(gi.DrmSyncobjFd(fd), node="/dev/dri/renderD999")
    Traceback (most recent call last):
        ...
    gpuinterop.errors.InvalidArgumentError: node: expected a DRM render node that can be opened, got ...
    """

    kind = Timeline

    _FD_TO_HANDLE: ClassVar[_Call] = ("DRM_IOCTL_SYNCOBJ_FD_TO_HANDLE", 0xC01064C2)
    _DESTROY: ClassVar[_Call] = ("DRM_IOCTL_SYNCOBJ_DESTROY", 0xC00864C0)
    _TIMELINE_WAIT: ClassVar[_Call] = ("DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT", 0xC02864CA)
    _QUERY: ClassVar[_Call] = ("DRM_IOCTL_SYNCOBJ_QUERY", 0xC01864CB)
    _TIMELINE_SIGNAL: ClassVar[_Call] = ("DRM_IOCTL_SYNCOBJ_TIMELINE_SIGNAL", 0xC01864CD)
    _WAIT_FOR_SUBMIT: ClassVar[int] = 1 << 1

    def __init__(self, handle: DrmSyncobjFd, *, node: str | None = None) -> None:
        self._node, self._handle = handle._use(lambda fd: self._open(fd, node))
        try:
            os.close(handle.detach())  # the node holds the syncobj now
        except HandleError:  # another thread has closed it
            self.close()
            raise
        self.label = f"DRM syncobj {self._handle}"

    def _open(self, fd: int, node: str | None) -> tuple[int, int]:
        """Open a render node; return its descriptor and the syncobj's number on it."""
        tried: list[str] = []
        refusal: DriverError | None = None
        for path in [node] if node is not None else render_nodes():
            try:
                opened = system.opened(f"open({path})", os.open, path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                tried.append(f"{path}: {error.strerror}")
                continue
            try:
                answer = _ioctl(opened, self._FD_TO_HANDLE, struct.pack("=IIiI", 0, 0, fd, 0))
                return opened, struct.unpack_from("=I", answer)[0]
            except DriverError as error:
                os.close(opened)
                if error.code != errno.EOPNOTSUPP:
                    raise
                refusal = error  # this driver has no syncobjs; another node's may
        raise refusal or InvalidArgumentError(
            "node", f"expected a DRM render node that can be opened, got {', '.join(tried) or f'no {_NODES}'}."
        )

    def wait(self, value: int, timeout: float) -> bool:
        handles = ctypes.c_uint32(self._handle)
        points = ctypes.c_uint64(check_int(value, "value", minimum=0))
        # The kernel expects a deadline on the monotonic clock.
        deadline = time.monotonic_ns() + int(timeout * 1e9) if timeout > 0 else 0
        request = struct.pack(
            "=QQqIIII",
            ctypes.addressof(handles), ctypes.addressof(points), deadline, 1, self._WAIT_FOR_SUBMIT, 0, 0,
        )  # fmt: skip
        try:
            _ioctl(self._node, self._TIMELINE_WAIT, request)
        except DriverError as error:
            if error.code == errno.ETIME:
                return False
            raise
        return True

    def signal(self, value: int) -> None:
        self._point(self._TIMELINE_SIGNAL, value)

    def counter(self) -> int:
        return self._point(self._QUERY, 0)

    def _point(self, call: _Call, value: int) -> int:
        handles = ctypes.c_uint32(self._handle)
        points = ctypes.c_uint64(check_int(value, "value", minimum=0))
        _ioctl(self._node, call, struct.pack("=QQII", ctypes.addressof(handles), ctypes.addressof(points), 1, 0))
        return points.value

    def close(self) -> None:
        try:
            _ioctl(self._node, self._DESTROY, struct.pack("=II", self._handle, 0))
        finally:
            os.close(self._node)


_NODES: Final = "/dev/dri/renderD*"


def render_nodes() -> list[str]:
    """The DRM render nodes of this machine, including those that this process may not open."""
    return sorted(glob.glob(_NODES))
