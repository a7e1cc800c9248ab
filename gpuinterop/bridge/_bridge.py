"""The bridge: turns foreign semaphores into ordinary `ExternalSemaphore`s."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, overload

from .._arguments import check_timeout, check_type
from .._core.device import Device, check_device
from .._core.importing import import_duplicate
from .._core.lifetime import Lifetime
from .._core.own_timeline import PinnedWords, WordCalls, refuse_capture, spare_words, stream_words
from .._core.resource import Resource
from .._core.semaphore import ExternalSemaphore
from ..capabilities import Capability, Cell, Operation, Scope
from ..errors import (
    ArgumentTypeError,
    GpuInteropError,
    InvalidArgumentError,
    ResourceBusyError,
    ResourceClosedError,
    UnsupportedError,
)
from ..handles import (
    Binary,
    DrmSyncobjFd,
    EventFd,
    FdHandle,
    Handle,
    OpaqueFd,
    SemaphoreHandle,
    SyncFd,
    Timeline,
    TimelineFd,
)
from ._endpoints import Endpoint, EventFdEndpoint, OwnTimelineEndpoint, SyncFdEndpoint, SyncobjEndpoint, render_nodes
from ._watcher import Lane, Peer, Watcher

if TYPE_CHECKING:
    from .._core.streams import KnownStream, Wait

K = TypeVar("K")

_ENDPOINTS: Final[Mapping[type[FdHandle], tuple[Callable[[Any], Endpoint], str]]] = {
    TimelineFd: (OwnTimelineEndpoint, "gpuinterop's own page, which the watcher reads."),
    DrmSyncobjFd: (SyncobjEndpoint, "uses the kernel's DRM ioctls; not yet run on a GPU."),
    SyncFd: (SyncFdEndpoint, "poll() reports when it is signalled; the bridge cannot signal it."),
    EventFd: (EventFdEndpoint, "a signal adds 1, a wait takes 1."),
}
"""The endpoint of each type, and the reason in its capability."""


class _Calls(WordCalls):
    """The calls of bridged semaphores; they replace a driver's. Handles are lanes."""

    def wait(self, batch: Sequence[Lane], stream: KnownStream, values: Sequence[int], wait: Wait) -> None:
        (lane,) = batch
        refuse_capture(stream, lane.endpoint.label)
        lane.wait(stream, values[0], wait)

    def signal(self, batch: Sequence[Lane], stream: KnownStream, values: Sequence[int]) -> None:
        refuse_capture(stream, batch[0].endpoint.label)
        for lane, value in zip(batch, values, strict=True):
            lane.signal(stream, value)

    def destroy(self, handle: Lane) -> None:
        handle.end()

    def abandon(self, handle: Lane) -> None:
        handle.cancel(ResourceClosedError(f"{handle.endpoint.label} was closed while a stream still waited for it."))

    def host_value(self, handle: Lane) -> int:
        return handle.call(handle.endpoint.counter)

    def host_signal(self, handle: Lane, value: int) -> None:
        if (gap := handle.endpoint.cannot_signal) is not None:
            raise UnsupportedError(gap, context=handle.endpoint.label)
        handle.call(handle.endpoint.signal, value)

    host_wait = staticmethod(Lane.host_wait)


_CALLS: Final = _Calls()


class BridgedSemaphore(ExternalSemaphore[K]):
    """A semaphore that streams use through a bridge. `Bridge` creates it; use it like any `ExternalSemaphore`.

    Values must be below 2**63, and streams that are being captured are refused. If the endpoint fails, the process that
    signals exits, or the bridge is closed while a stream waits, the stream continues instead of hanging, and fails:
    `Stream.synchronize`, `Stream.query` and all later calls that enqueue work raise the reason. Signals enqueued after
    that wait are not forwarded. Discard the results of work enqueued after it, because it ran without the wait.

    ``close(timeout=s)`` gives pending waits that time. Then their streams continue and fail with `ResourceClosedError`.
    `host_signal` raises the errors of `Endpoint.signal`, `UnsupportedError` if the endpoint cannot be signalled
    (`Endpoint.cannot_signal`), and `ResourceBusyError` if the watcher is stuck in `Endpoint.wait`.

    Attributes
    ----------
    endpoint : Endpoint
        The bridged endpoint.

    Examples
    --------
    >>> import os
    >>> with gi.bridge.Bridge(device) as bridge:
    ...     semaphore = bridge.import_semaphore(gi.EventFd(os.eventfd(0)))
    ...     semaphore.wait(stream)
    ...     semaphore.host_signal()  # or other code writes to the eventfd
    ...     stream.synchronize(timeout=10)
    """

    def __init__(self, bridge: Bridge, endpoint: Endpoint, label: str | None) -> None:
        handle_type: Any = TimelineFd if endpoint.kind is Timeline else OpaqueFd
        noun, parents = f"bridged {endpoint.label}", (bridge.lifetime,)
        super().__init__(bridge.device, handle_type, _CALLS, parents=parents, noun=noun, label=label)
        self.lifetime.counter = None  # a wait checks itself (`Wait.reached`)
        self._parents = (bridge,)
        self.endpoint = endpoint
        self._cannot_signal = endpoint.cannot_signal
        if self._cannot_signal is not None:
            self._signals_below = -1  # so a signal takes the slow path, which refuses it


class Bridge(Resource):
    """Bridges foreign semaphores to the streams of one device.

    Parameters
    ----------
    device : Device
        Device that supports `Operation.STREAM_MEMORY_OPS`.
    grace : float
        Seconds that pending waits have after `close`. Then their streams continue and fail.
    label : str, optional
        Name of the object in messages, warnings and its `repr`.

    Raises
    ------
    UnsupportedError
        The device's streams cannot write and wait for words.

    Attributes
    ----------
    device : Device
        Device whose streams use the bridge's semaphores.

    Notes
    -----
    `close` ends use at once and does not block. The watcher still serves pending waits for up to `grace` seconds, so
    that streams do not stay blocked, and pending signals until the streams reach them. ``close(timeout=s)`` waits
    that long, however short `grace` is, then cancels pending waits and raises `ResourceBusyError`. Only the first
    `close` counts. Closing a bridge closes its semaphores. An endpoint is closed when the streams have finished with
    it, but never while it is stuck in `wait`.

    **Code on the watcher's thread.** Endpoints' `wait` and `signal` run on it, and so do finalizers when the garbage
    collector runs there. gpuinterop's finalizers make no driver calls, but other libraries' may, for example to free an
    array's device memory. If such a call blocks until a bridged wait is over, it deadlocks.

    **Blocking calls.** The watcher is a Python thread and needs the GIL briefly in each handoff. gpuinterop's blocking
    calls release it (`Backend.holds_gil`). If you call a binding that keeps it (hip-python 7: ``hipStreamSynchronize``,
    ``hipMemcpy``...) on a stream with a bridged wait, the program deadlocks. Use `Stream.synchronize`.

    Examples
    --------
    >>> import os
    >>> with gi.bridge.Bridge(device) as bridge, gi.EventFd.adopt(os.eventfd(0)) as mine:
    ...     semaphore = bridge.import_semaphore(mine.duplicate())
    ...     buffer.fill(7, stream=stream)
    ...     semaphore.signal(stream)
    ...     os.eventfd_read(mine.fd)  # blocks until the stream has signalled
    1
    """

    def __init__(self, device: Device, *, grace: float = 2.0, label: str | None = None) -> None:
        check_device(device, "device")
        seconds = check_timeout(grace, "grace")
        if seconds is None:
            raise InvalidArgumentError("grace", "expected a finite time, after which streams continue, got no limit.")
        stream_words(device)
        self.device = device
        watcher = self._watcher = Watcher()
        self._grace = seconds
        super().__init__(Lifetime("Bridge", lambda _: watcher.stop(), device=device.streams, label=label))
        self.lifetime.open()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "lifetime") and not self.closed and not _ending():
            self._watcher.cancel_after(self._grace)  # a thread that waits for a stream does not drain
        super().__del__()

    @staticmethod
    def capabilities(device: Device) -> Mapping[type[Handle], Capability]:
        """Return the handle types that `import_semaphore` accepts on a device, with a reason for every gap.

        `from_endpoint` accepts any semaphore for which you write an `Endpoint`.
        """
        return MappingProxyType({kind: _capability(kind, device) for kind in (*_ENDPOINTS, OpaqueFd)})

    @overload
    def import_semaphore(
        self, handle: SemaphoreHandle[Timeline] | DrmSyncobjFd, *, peer: int | None = None, label: str | None = None
    ) -> BridgedSemaphore[Timeline]: ...
    @overload
    def import_semaphore(
        self, handle: SyncFd | EventFd | SemaphoreHandle[Binary], *, peer: int | None = None, label: str | None = None
    ) -> BridgedSemaphore[Binary]: ...
    def import_semaphore(
        self, handle: Handle, *, peer: int | None = None, label: str | None = None
    ) -> BridgedSemaphore[Any]:
        """Bridge the semaphore of a descriptor. You close what it returns; closing the bridge closes it too.

        Parameters
        ----------
        handle : DrmSyncobjFd, SyncFd, EventFd or TimelineFd
            `Device.create_semaphore` of any backend and process exports a `TimelineFd`. A successful call consumes the
            handle; after an error you still own it, open and untouched.
        peer : int, optional
            PID of the process that signals. If it exits, waiting streams continue and fail with `PeerError`.
        label : str, optional
            Name of the object in messages, warnings and its `repr`.

        Raises
        ------
        ArgumentTypeError
            `handle` is a plain int, or bridges cannot import its type.
        HandleError
            The descriptor does not match its type.
        InvalidArgumentError
            `peer` is not a PID, or this process may not watch it.
        PeerError
            The process `peer` has already exited.
        ResourceClosedError
            The bridge is closed, or the parent process created it.
        DriverError
            A system call failed, or the page with the words could not be pinned.
        UnsupportedError
            The type cannot be bridged here. An `OpaqueFd` never can: it does not show what kind of object it is.
        """
        check_type(handle, Handle, "handle", "a typed handle such as gpuinterop.EventFd(fd)")
        self._check_open()
        endpoint = self._endpoint_of(handle)
        try:
            semaphore = self._bridge(endpoint, peer, label)
        except GpuInteropError:  # after other exceptions the bridge may have it
            endpoint.close()
            raise
        try:  # last, because another thread may consume the handle meanwhile
            user = f"a bridge of {self.device.backend}"
            import_duplicate(cast(FdHandle, handle), lambda duplicate: os.close(duplicate.fd), user=user)
        except BaseException:
            semaphore.close()
            raise
        return semaphore

    def _endpoint_of(self, handle: Handle) -> Endpoint:
        """The endpoint owns a duplicate, so that after a later failure the handle still has its descriptor."""
        kind = type(handle)
        if kind not in (*_ENDPOINTS, OpaqueFd):
            names = ", ".join(each.__name__ for each in _ENDPOINTS)
            raise ArgumentTypeError("handle", f"a bridge expects one of {names}, got {kind.__name__}.")
        if not (capability := _capability(cast(type[FdHandle], kind), self.device)):
            raise UnsupportedError(capability, context=f"a bridge of {self.device.name}")
        with cast(FdHandle, handle).duplicate() as duplicate:
            return _ENDPOINTS[type(duplicate)][0](duplicate)

    def from_endpoint(
        self, endpoint: Endpoint, *, peer: int | None = None, label: str | None = None
    ) -> BridgedSemaphore[Any]:
        """Bridge the semaphore of an endpoint. If the call succeeds, the bridge owns the endpoint and closes it.

        For `peer`, `label` and the semaphore see `import_semaphore`, which also raises the same errors for them.

        Raises
        ------
        ArgumentTypeError
            `endpoint` is not an Endpoint.
        InvalidArgumentError
            The endpoint's `kind` or `label` is invalid.
        """
        check_type(endpoint, Endpoint, "endpoint", "a gpuinterop.bridge.Endpoint")
        kind = getattr(endpoint, "kind", None)
        if kind is not Timeline and kind is not Binary:
            raise InvalidArgumentError("endpoint", f"expected kind gpuinterop.Timeline or Binary, got {kind!r}.")
        name = getattr(endpoint, "label", None)
        if not isinstance(name, str):
            raise InvalidArgumentError("endpoint", f"expected a str as label, for messages, got {name!r}.")
        self._check_open()
        return self._bridge(endpoint, peer, label)

    def _bridge(self, endpoint: Endpoint, peer: int | None, label: str | None) -> BridgedSemaphore[Any]:
        """Bridge the endpoint. The semaphore closes it; after an error the caller still owns it."""
        self._watcher.check()
        semaphore: BridgedSemaphore[Any] = BridgedSemaphore(self, endpoint, label)
        semaphore._make(lambda: self._new_lane(endpoint, peer))
        try:
            endpoint._bridged(semaphore)
            with contextlib.suppress(AttributeError):  # `label` may be a property
                endpoint.label = semaphore.label
            cast(Lane, semaphore._handle).adopt()
        except BaseException:
            semaphore.close()
            raise
        return semaphore

    def _new_lane(self, endpoint: Endpoint, peer: int | None) -> Lane:
        signaller = None if peer is None else Peer(peer)
        spare = spare_words(self.device)
        try:
            words = spare.take(functools.partial(PinnedWords, self.device))
        except GpuInteropError:
            if signaller is not None:
                signaller.close()
            raise
        return Lane(self._watcher, endpoint, signaller, words, spare)

    def close(self, timeout: float | None = None) -> None:
        """End use at once, and wait up to `timeout` seconds. The class describes pending waits and signals.

        Raises
        ------
        ResourceBusyError
            `timeout` passed. Pending waits were cancelled.
        """
        check_timeout(timeout)
        if not self.closed:  # this thread releases the streams; if it is interrupted, the watcher does
            self._watcher.cancel_after(self._grace + (timeout or 0.0))
        try:
            super().close(timeout)
        except ResourceBusyError:
            self._watcher.cancel(ResourceClosedError("the bridge was closed while a stream still waited."))
            raise


def _capability(kind: type[FdHandle], device: Device) -> Capability:
    cell = Cell(Operation.IMPORT_SEMAPHORE, kind)
    words = device.capabilities.of(Operation.STREAM_MEMORY_OPS)
    if not words:
        assert words.scope is not None
        return cell.gap(words.scope, words.reason, words.reference, words.workaround)
    if kind is OpaqueFd:
        return cell.gap(
            Scope.RUNTIME,
            "an opaque descriptor does not show its kind: it may be a DRM syncobj, or an object that only its own "
            "driver can wait for.",
            "docs/reference/bridge.md",
            "use DrmSyncobjFd for Mesa's, gpuinterop.vulkan.TimelineEndpoint for a semaphore of this process.",
        )
    if sys.platform != "linux":
        return cell.gap(
            Scope.PLATFORM,
            "only Linux has these descriptors.",
            "docs/reference/bridge.md",
            "use Bridge.from_endpoint(gpuinterop.vulkan.TimelineEndpoint(vk, semaphore)).",
        )
    if kind is DrmSyncobjFd and not any(os.access(path, os.R_OK | os.W_OK) for path in render_nodes()):
        return cell.gap(
            Scope.PLATFORM,
            "there is no DRM render node (/dev/dri/renderD*) that this process can open.",
            "Linux: DRM_IOCTL_SYNCOBJ_FD_TO_HANDLE",
            "use gpuinterop.vulkan.TimelineEndpoint(vk, semaphore) for a Vulkan timeline of this process.",
        )
    return cell.unverified(Scope.PLATFORM, _ENDPOINTS[kind][1], "docs/reference/bridge.md")
