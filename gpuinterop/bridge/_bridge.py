"""The bridge: exposes foreign semaphores as ordinary `ExternalSemaphore`s."""

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
from .._core.lifetime import Lifetime
from .._core.ownership import import_duplicate
from .._core.resource import Resource
from .._core.semaphore import ExternalSemaphore
from .._core.stream_memory import PinnedWords, WordCalls, refuse_capture, spare_words, stream_words
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
    from .._core.known_stream import KnownStream, Wait

K = TypeVar("K")

_ENDPOINTS: Final[Mapping[type[FdHandle], tuple[Callable[[Any], Endpoint], str]]] = {
    TimelineFd: (OwnTimelineEndpoint, "our own page, which the watcher reads."),
    DrmSyncobjFd: (SyncobjEndpoint, "by the kernel's DRM ioctls; not yet run on a GPU."),
    SyncFd: (SyncFdEndpoint, "poll() tells when it is signalled; the bridge cannot signal it."),
    EventFd: (EventFdEndpoint, "a signal adds 1, a wait takes 1."),
}
"""The endpoint of each type, and the remark on its capability."""


class _Calls(WordCalls):
    """The calls of bridged semaphores, in place of a driver's; handles are lanes."""

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
    """A semaphore that streams reach through a bridge. Made by `Bridge`; used as any `ExternalSemaphore`.

    Values stay below 2**63, and streams that are being captured are refused. If the other side
    fails, its process dies, or the bridge is closed while a stream waits, the stream goes on, so that it does not hang,
    and fails: `Stream.synchronize`, `Stream.query` and all later calls that enqueue raise the reason. Signals enqueued
    after that wait are not forwarded. Discard the results of work enqueued after it, which ran without the wait.

    ``close(timeout=s)`` waits that long for pending waits; then their streams go on and fail with
    `ResourceClosedError`. `host_signal` raises what `Endpoint.signal` raises; `UnsupportedError` if the endpoint can
    only be waited for (`Endpoint.cannot_signal`); and `ResourceBusyError` if the watcher is stuck in `Endpoint.wait`.

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
        self.lifetime.counter = None  # a wait knows by itself (`Wait.reached`)
        self._parents = (bridge,)
        self.endpoint = endpoint
        self._cannot_signal = endpoint.cannot_signal
        if self._cannot_signal is not None:
            self._signals_below = -1  # a signal takes the closer look, which refuses it


class Bridge(Resource):
    """Foreign semaphores for the streams of one device.

    Parameters
    ----------
    device : Device
        Device that supports `Operation.STREAM_MEMORY_OPS`.
    grace : float
        Seconds that pending waits get after `close`; then their streams go on and fail.
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
    `close` ends use at once and does not block. The watcher serves pending waits for up to `grace` seconds, so that
    streams do not stay blocked, and pending signals until the streams have reached them. ``close(timeout=s)`` waits
    that long, however short `grace` is, then cancels pending waits and raises `ResourceBusyError`. The first `close`
    counts. Closing a bridge closes its semaphores. Each endpoint is closed when the streams are done with it; one that
    is stuck in `wait` is never closed.

    **Code on the watcher's thread.** Endpoints' `wait` and `signal` run there, and finalizers that the garbage
    collector calls there. This library's finalizers make no driver calls. Those of other libraries may, such as an
    array's that frees device memory; if such a call blocks behind a bridged wait, it deadlocks.

    **Blocking calls.** The watcher is a Python thread and needs the GIL for some microseconds per handoff. This
    library's blocking calls release it (`Backend.holds_gil`). If you call a binding that keeps it (hip-python 7:
    ``hipStreamSynchronize``, ``hipMemcpy``...) behind a bridged wait, the program deadlocks. Use `Stream.synchronize`.

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
            raise InvalidArgumentError("grace", "expected a finite time, after which streams are let go on, got none.")
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
        """Return which handle types `import_semaphore` takes on a device, with the reason for every gap.

        `from_endpoint` takes any semaphore for which you write an `Endpoint`.

        Parameters
        ----------
        device : Device
            Device whose streams would use the semaphores.

        Examples
        --------
        >>> table = gi.bridge.Bridge.capabilities(device)
        >>> bool(table[gi.EventFd]), bool(table[gi.OpaqueFd])
        (True, False)
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
        """Bridge the semaphore of a descriptor.

        Parameters
        ----------
        handle : DrmSyncobjFd, SyncFd, EventFd or TimelineFd
            A `TimelineFd` comes from `Device.create_semaphore` of any backend and process. Success consumes the handle;
            after an error the caller still owns it, open and untouched.
        peer : int, optional
            Pid of the process that signals: if it dies, waiting streams go on and fail with `PeerError`.
        label : str, optional
            Name of the object in messages, warnings and its `repr`.

        Returns
        -------
        BridgedSemaphore
            The semaphore, which the caller closes; closing the bridge closes it too.

        Raises
        ------
        ArgumentTypeError
            `handle` is a bare int, or bridges cannot import its type.
        HandleError
            The descriptor is not what its type says.
        InvalidArgumentError
            `peer` is not a pid, or this process may not watch it.
        PeerError
            The process `peer` has died already.
        ResourceClosedError
            The bridge was closed, or the parent process made it.
        DriverError
            A system call failed, or the page with the words could not be pinned.
        UnsupportedError
            The type cannot be bridged here. An `OpaqueFd` never can, because it does not show what is behind it.

        Examples
        --------
        >>> import os
        >>> with gi.bridge.Bridge(device) as bridge:
        ...     semaphore = bridge.import_semaphore(gi.EventFd(os.eventfd(1)), peer=os.getppid())
        ...     semaphore.wait(stream)
        ...     stream.synchronize(timeout=10)
        """
        check_type(handle, Handle, "handle", "a typed handle such as gpuinterop.EventFd(fd)")
        self._check_open()
        endpoint = self._endpoint_of(handle)
        try:
            semaphore = self._bridge(endpoint, peer, label)
        except GpuInteropError:  # of any other exception it is not known whether the bridge has it
            endpoint.close()
            raise
        try:  # consumed last; another thread may have consumed it meanwhile
            user = f"a bridge of {self.device.backend}"
            import_duplicate(cast(FdHandle, handle), lambda duplicate: os.close(duplicate.fd), user=user)
        except BaseException:
            semaphore.close()
            raise
        return semaphore

    def _endpoint_of(self, handle: Handle) -> Endpoint:
        """The endpoint gets a duplicate, so that a later failure need not take the descriptor back from it."""
        kind = type(handle)
        if kind not in (*_ENDPOINTS, OpaqueFd):
            names = ", ".join(each.__name__ for each in _ENDPOINTS)
            raise ArgumentTypeError("handle", f"a bridge expects one of {names}, got {kind.__name__}.")
        if not (found := _capability(cast(type[FdHandle], kind), self.device)):
            raise UnsupportedError(found, context=f"a bridge of {self.device.name}")
        with cast(FdHandle, handle).duplicate() as duplicate:
            return _ENDPOINTS[type(duplicate)][0](duplicate)

    def from_endpoint(
        self, endpoint: Endpoint, *, peer: int | None = None, label: str | None = None
    ) -> BridgedSemaphore[Any]:
        """Bridge the semaphore of an endpoint.

        Parameters
        ----------
        endpoint : Endpoint
            Success gives it to the bridge, which closes it; after an error the caller still owns it.
        peer, label
            See `import_semaphore`.

        Returns
        -------
        BridgedSemaphore
            See `import_semaphore`.

        Raises
        ------
        ArgumentTypeError
            `endpoint` is not an Endpoint, or `peer` is not an int.
        InvalidArgumentError
            The endpoint's `kind` or `label` is invalid; or `peer` is not a pid, or this process may not watch it.
        PeerError
            The process `peer` has died already.
        ResourceClosedError
            The bridge was closed, or the parent process made it.
        DriverError
            The page with the words could not be pinned.

        Examples
        --------
        >>> with device.create_semaphore(gi.TimelineFd) as semaphore, gi.bridge.Bridge(device) as bridge:
        ...     bridged = bridge.from_endpoint(gi.bridge.SemaphoreEndpoint(semaphore))
        ...     bridged.signal(stream, 1)
        ...     semaphore.host_wait(1, timeout=10)
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
        """Bridge the endpoint; the semaphore then closes it. After an error the caller still owns it."""
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
        """End use at once. See the class for pending waits and signals.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for them.

        Raises
        ------
        ResourceBusyError
            `timeout` passed. Pending waits were cancelled.
        """
        check_timeout(timeout)
        if not self.closed:  # this thread lets the streams go; if it is interrupted, the watcher does
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
            "an opaque descriptor does not show what is behind it: an object that only its own driver waits for, or a "
            "DRM syncobj.",
            "docs/reference/bridge.md",
            "use DrmSyncobjFd for Mesa's, gpuinterop.vulkan.TimelineEndpoint for a semaphore of this process.",
        )
    if sys.platform != "linux":
        return cell.gap(
            Scope.PLATFORM,
            "these descriptors exist on Linux only.",
            "docs/reference/bridge.md",
            "Bridge.from_endpoint(gpuinterop.vulkan.TimelineEndpoint(vk, semaphore)).",
        )
    if kind is DrmSyncobjFd and not any(os.access(path, os.R_OK | os.W_OK) for path in render_nodes()):
        return cell.gap(
            Scope.PLATFORM,
            "there is no DRM render node (/dev/dri/renderD*) that this process may open.",
            "Linux: DRM_IOCTL_SYNCOBJ_FD_TO_HANDLE",
            "use gpuinterop.vulkan.TimelineEndpoint(vk, semaphore) for a Vulkan timeline of this process.",
        )
    return cell.unverified(Scope.PLATFORM, _ENDPOINTS[kind][1], "docs/reference/bridge.md")
