"""The bridge: makes semaphores of foreign ones, which streams use as any other."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, overload

from .. import system, timeline
from .._arguments import check_timeout
from .._core.device import Device
from .._core.native import Native
from .._core.ownership import lend
from .._core.resource import Resource
from .._core.semaphore import ExternalSemaphore
from .._core.stream_memory import WordCalls, spare_words, stream_words
from ..capabilities import Capability, Cell, Operation, Scope
from ..errors import (
    ArgumentTypeError,
    HandleError,
    InvalidArgumentError,
    ResourceBusyError,
    ResourceClosedError,
    UnsupportedError,
    again,
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
from ._watcher import Lane, Watcher

if TYPE_CHECKING:
    from .._core.native_stream import NativeStream, Wait

__all__ = ["Bridge", "BridgedSemaphore"]

K = TypeVar("K")

_GRACE_S: Final = 2.0
_ENDPOINTS: Final[Mapping[type[FdHandle], Callable[[Any], Endpoint]]] = {
    TimelineFd: OwnTimelineEndpoint,
    DrmSyncobjFd: SyncobjEndpoint,
    SyncFd: SyncFdEndpoint,
    EventFd: EventFdEndpoint,
}


class _Calls(WordCalls):
    """What a bridged semaphore does in place of the driver; handles are lanes."""

    def wait(
        self, batch: Sequence[Lane], stream: NativeStream, values: Sequence[int], ms: int | None, waits: Sequence[Wait]
    ) -> None:
        for lane, value, wait in zip(batch, values, waits, strict=True):
            lane.wait(stream, value, wait)
        # Whoever is let go already, as the calling thread's own stream is, must not go on with it.
        if any(lane.refusal is not None for lane in batch) and (failure := stream.tell_failure()) is not None:
            raise again(failure)

    def signal(self, batch: Sequence[Lane], stream: NativeStream, values: Sequence[int]) -> None:
        for lane, value in zip(batch, values, strict=True):
            lane.signal(stream, value)

    def destroy(self, handle: Lane) -> None:
        handle.end()

    def host_signal(self, handle: Lane, value: int) -> None:
        handle.host_signal(value)

    def host_wait(self, handle: Lane, value: int, timeout: float) -> bool:
        return handle.host_wait(value, time.monotonic() + timeout)


_CALLS: Final = _Calls()


class BridgedSemaphore(ExternalSemaphore[K]):
    """A semaphore that streams reach through a bridge. Made by `Bridge`; used as any `ExternalSemaphore`.

    Values stay below 2**63, waits take no time-out, and a stream that is being captured is refused. What goes wrong on
    the other side (it fails, its process dies, the bridge is closed while a stream waits) lets the stream go on, so
    that it does not hang, and makes it fail: `Stream.synchronize`, `Stream.query` and everything that is enqueued
    from then on raise the reason, and what the stream signals is told to nobody. What the stream does after the wait
    has run without it: discard it.
    """

    def __init__(self, bridge: Bridge, endpoint: Endpoint) -> None:
        handle_type: Any = TimelineFd if endpoint.kind is Timeline else OpaqueFd
        super().__init__(
            bridge.device, handle_type, _CALLS, parents=(bridge._lifetime,), label=f"bridged {endpoint.label}"
        )
        self._parents = (bridge,)
        self._endpoint = endpoint
        self._cannot_signal = endpoint.cannot_signal

    @property
    def endpoint(self) -> Endpoint:
        """What it stands for."""
        return self._endpoint

    def close(self, timeout: float | None = None) -> None:
        """End use at once; pending waits stay pending, unless the bridge is closed as well.

        Parameters
        ----------
        timeout : float, optional
            Seconds that they get; then their streams are let go, and fail with `ResourceClosedError`.

        Raises
        ------
        ResourceBusyError
            `timeout` passed.
        """
        try:
            super().close(timeout)
        except ResourceBusyError:
            error = ResourceClosedError(f"{self._endpoint.label} was closed while a stream still waited for it.")
            cast(Lane, self._native).cancel(error)
            raise

    def host_signal(self, value: int | None = None) -> None:
        """Signal from the calling thread, at once; no stream is involved.

        Raises
        ------
        UnsupportedError
            The endpoint can only be waited for (`Endpoint.cannot_signal`).
        ResourceBusyError
            The watcher is stuck in a look at the endpoint.
        GpuInteropError
            What `Endpoint.signal` raises, or why the semaphore has failed.
        """
        if self._cannot_signal is not None:
            raise UnsupportedError(self._cannot_signal, context=self.label)
        super().host_signal(value)


class _Watch(Native):
    """A bridge's watcher: it ends behind what is pending, and cuts that off in a while."""

    __slots__ = ("_watcher", "grace")

    def __init__(self, watcher: Watcher, grace: float) -> None:
        super().__init__("Bridge", lambda _: watcher.stop())
        self._watcher = watcher
        self.grace = grace

    def ending(self) -> None:
        self._watcher.cancel_after(self.grace)


class Bridge(Resource):
    """Foreign semaphores for the streams of one device.

    Parameters
    ----------
    device : Device
        With `Operation.STREAM_MEMORY_OPS`.
    grace : float
        Seconds that pending waits get after `close`; then their streams are let go, and fail.

    Raises
    ------
    UnsupportedError
        The device's streams neither write nor wait for words.

    Notes
    -----
    `close` ends use at once and does not block: the watcher goes on with what is pending, waits for `grace` seconds
    and no longer, so that no stream is left blocked; signals until the streams have come to them. ``close(timeout=s)``
    waits that long, however short `grace` is, cancels what is still waited for, and raises `ResourceBusyError`. The
    first `close` counts. Closing a bridge closes its semaphores; their endpoints are closed when the streams are done
    with them, but for one that is stuck in a look: that is never closed.

    **Whose code runs on the watcher.** Endpoints' `wait` and `signal`, and whatever the collector happens to finalize
    there. This library's finalizers make no driver call on that thread; those of other libraries, such as an array's
    that frees device memory, may, and a call that blocks behind a bridged wait holds up its own end.

    **What blocks.** The watcher is a Python thread: it needs the GIL for some microseconds a handoff. This library's
    own blocking calls never keep it (`Backend.holds_gil`); calls that you make into a binding that keeps it (hip-python
    7: ``hipStreamSynchronize``, ``hipMemcpy``...) behind a bridged wait deadlock. Use `Stream.synchronize`.
    """

    def __init__(self, device: Device, *, grace: float = _GRACE_S) -> None:
        if not isinstance(device, Device):
            raise ArgumentTypeError("device", f"must be a gpuinterop Device, not {type(device).__name__}.")
        seconds = check_timeout(grace)
        if seconds is None:
            raise InvalidArgumentError("grace", "must be finite: a stream would be left blocked for ever.")
        stream_words(device)
        self._device = device
        self._grace = seconds
        self._watcher = Watcher(f"gpuinterop-bridge-{device.backend}-{device.ordinal}")
        self._watch = _Watch(self._watcher, seconds)
        super().__init__(self._watch)
        self._lifetime.open()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_lifetime") and not self.closed and not _ending():
            self._watcher.cancel_after(self._grace)  # who waits for a stream does not drain
        super().__del__()

    @property
    def device(self) -> Device:
        """Whose streams use its semaphores."""
        return self._device

    @staticmethod
    def capabilities(device: Device) -> Mapping[type[Handle], Capability]:
        """What `import_semaphore` takes on a device, by handle type, with the reason for every gap.

        `from_endpoint` takes more: whatever somebody has written an `Endpoint` for.
        """
        words = device.capabilities.of(Operation.STREAM_MEMORY_OPS)
        return MappingProxyType({kind: _capability(kind, words) for kind in (*_ENDPOINTS, OpaqueFd)})

    @overload
    def import_semaphore(
        self, handle: SemaphoreHandle[Timeline] | DrmSyncobjFd, *, peer: int | None = None
    ) -> BridgedSemaphore[Timeline]: ...
    @overload
    def import_semaphore(
        self, handle: SyncFd | EventFd | SemaphoreHandle[Binary], *, peer: int | None = None
    ) -> BridgedSemaphore[Binary]: ...
    def import_semaphore(self, handle: Handle, *, peer: int | None = None) -> BridgedSemaphore[Any]:
        """Bridge what a descriptor stands for.

        Parameters
        ----------
        handle : DrmSyncobjFd, SyncFd, EventFd or TimelineFd
            A `TimelineFd` is one of `Device.create_semaphore`, of whatever backend and process. Consumed by success;
            after an error it is the caller's, open and untouched.
        peer : int, optional
            The process (its pid) that is to signal: when it dies, streams that wait are let go and fail with
            `PeerError`.

        Raises
        ------
        ArgumentTypeError
            `handle` is a bare int or of a type that no bridge knows.
        HandleError
            The descriptor is not what its type says.
        InvalidArgumentError
            `peer` is no process's number, or may not be watched.
        PeerError
            The process `peer` has died already.
        ResourceClosedError
            The bridge was closed, or is the parent process's.
        DriverError
            A call of the kernel's failed, or the page with the words could not be pinned.
        UnsupportedError
            The type cannot be bridged here: an `OpaqueFd` never, because nothing tells what is behind it.
        """
        if not isinstance(handle, Handle):
            raise ArgumentTypeError(
                "handle", f"must be a typed handle such as gpuinterop.EventFd(fd), not {type(handle).__name__}."
            )
        self._check_open()
        handle._check_open()
        kind = type(handle)
        found = self.capabilities(self._device).get(kind)
        if found is None:
            names = ", ".join(each.__name__ for each in _ENDPOINTS)
            raise ArgumentTypeError("handle", f"a bridge takes one of {names}, not a {kind.__name__}.")
        if not found:
            raise UnsupportedError(found, context=f"a bridge of {self._device.name}")
        if isinstance(handle, TimelineFd) and not timeline.is_ours(handle.fd):
            raise HandleError(
                "handle: a driver's timeline semaphore cannot be waited for by the CPU through its descriptor. For one "
                "of a Vulkan device of this process use Bridge.from_endpoint(gpuinterop.vulkan.TimelineEndpoint(vk, "
                "semaphore)); one of another process is imported on a Vulkan device of the same UUID first."
            )
        make = _ENDPOINTS[cast("type[FdHandle]", kind)]
        # A duplicate is the endpoint's, so that nothing has to be taken back from it when a later step fails.
        duplicate = cast(FdHandle, handle).duplicate().detach()
        try:
            endpoint = make(cast("type[FdHandle]", kind)(duplicate, origin=handle.origin))
        except BaseException:
            system.close(duplicate)
            raise
        once = iter((endpoint.close,))
        try:
            semaphore = self._bridge(endpoint, peer, once)
        except BaseException:
            for close in once:
                close()
            raise
        try:  # consumed last; another thread may have done so meanwhile
            lend(handle, _close, user=f"a bridge of {self._device.backend}")
        except BaseException:
            semaphore.close()
            raise
        return semaphore

    def from_endpoint(self, endpoint: Endpoint, *, peer: int | None = None) -> BridgedSemaphore[Any]:
        """Bridge whatever the endpoint stands for.

        Parameters
        ----------
        endpoint : Endpoint
            The bridge's from now on, which closes it; after an error it stays the caller's.
        peer : int, optional
            As for `import_semaphore`.

        Raises
        ------
        ArgumentTypeError
            `endpoint` is none, or `peer` no int.
        InvalidArgumentError
            The endpoint's `kind` or `label` is none; `peer` is no process's number, or may not be watched.
        PeerError
            The process `peer` has died already.
        ResourceClosedError
            The bridge was closed, or is the parent process's.
        DriverError
            The page with the words could not be pinned.
        """
        if not isinstance(endpoint, Endpoint):
            raise ArgumentTypeError("endpoint", f"must be a gpuinterop.bridge.Endpoint, not {endpoint!r}.")
        kind = getattr(endpoint, "kind", None)
        if kind is not Timeline and kind is not Binary:
            raise InvalidArgumentError("endpoint", f"its kind must be gpuinterop.Timeline or Binary, not {kind!r}.")
        label = getattr(endpoint, "label", None)
        if not isinstance(label, str):
            raise InvalidArgumentError("endpoint", f"its label must be a str, for messages, not {label!r}.")
        self._check_open()
        return self._bridge(endpoint, peer, iter((endpoint.close,)))

    def _bridge(
        self, endpoint: Endpoint, peer: int | None, once: Iterator[Callable[[], None]]
    ) -> BridgedSemaphore[Any]:
        """Bridge it; the semaphore closes the endpoint by `once`. After an error the endpoint is the caller's."""
        self._watcher.check()
        semaphore: BridgedSemaphore[Any] = BridgedSemaphore(self, endpoint)
        semaphore._create(lambda: self._new_lane(endpoint, peer))
        try:
            endpoint._bridged(semaphore)
            cast(Lane, semaphore._native).adopt(once)
        except BaseException:
            semaphore.close()
            raise
        return semaphore

    def _new_lane(self, endpoint: Endpoint, peer: int | None) -> Lane:
        lane = Lane(self._watcher, spare_words(self._device), endpoint, peer)
        try:
            lane.open(self._device)
        except BaseException:
            lane.end()
            raise
        return lane

    def close(self, timeout: float | None = None) -> None:
        """End use at once; see the class for what is pending.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for it.

        Raises
        ------
        ResourceBusyError
            `timeout` passed. What was waited for is cancelled.
        """
        limit = check_timeout(timeout)
        if timeout is not None:  # who waits here lets the streams go; the watcher does if he is interrupted
            self._watch.grace = self._grace + (math.inf if limit is None else limit)
        try:
            super().close(timeout)
        except ResourceBusyError:
            self._watcher.cancel(ResourceClosedError("the bridge was closed while a stream still waited."))
            raise


def _close(handle: Handle) -> None:
    """Takes a handle that is of no more use."""
    os.close(cast(FdHandle, handle).fd)


def _capability(kind: type[FdHandle], words: Capability) -> Capability:
    cell = Cell(Operation.IMPORT_SEMAPHORE, kind)
    if not words:
        assert words.scope is not None
        return cell.gap(words.scope, words.reason, words.reference, words.workaround)
    if kind is OpaqueFd:
        return cell.gap(
            Scope.RUNTIME,
            "nothing tells what is behind an opaque descriptor: an object that only its own driver waits for, or a DRM "
            "syncobj.",
            "docs/bridge.md",
            "say what it is: DrmSyncobjFd (Mesa's), gpuinterop.vulkan.TimelineEndpoint (a semaphore of this process).",
        )
    if sys.platform != "linux":
        return cell.gap(
            Scope.PLATFORM,
            "these descriptors exist on Linux only.",
            "docs/bridge.md",
            "Bridge.from_endpoint(gpuinterop.vulkan.TimelineEndpoint(vk, semaphore)).",
        )
    if kind is DrmSyncobjFd and not any(os.access(path, os.R_OK | os.W_OK) for path in render_nodes()):
        return cell.gap(
            Scope.PLATFORM,
            "there is no DRM render node (/dev/dri/renderD*) that this process may open.",
            "Linux: DRM_IOCTL_SYNCOBJ_FD_TO_HANDLE",
            "a Vulkan timeline of this process: gpuinterop.vulkan.TimelineEndpoint(vk, semaphore).",
        )
    return cell.unverified(
        Scope.PLATFORM,
        {
            TimelineFd: "our own page, which the watcher looks at",
            DrmSyncobjFd: "by the kernel's DRM ioctls; nobody has run it on a GPU yet",
            SyncFd: "poll() says when it has been signalled; it cannot be signalled from here",
            EventFd: "a signal adds 1, a wait takes 1",
        }[kind]
        + ".",
        "docs/bridge.md",
    )
