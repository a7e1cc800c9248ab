"""External semaphores and batches of them.

`wait` and `signal` are the hot path: the driver call and little else. Import decides all it can (capability, kind, the
batch of one). The calls only set marks and check once that the objects fit together.
"""

from __future__ import annotations

import operator
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from .. import system
from .._arguments import MAX_64, Sole, check_int, check_timeout, check_type
from ..backend import Backend, HostSemaphoreBackend
from ..capabilities import Capability, Operation
from ..errors import (
    ArgumentTypeError,
    DriverError,
    InvalidArgumentError,
    ResourceBusyError,
    ResourceClosedError,
    SemaphoreTimeoutError,
    UnsupportedError,
)
from ..handles import (
    AnySemaphoreHandle,
    Binary,
    Fence,
    HandleOrigin,
    Keyed,
    OriginKind,
    SciSync,
    SemaphoreHandle,
    Timeline,
)
from .drain import relieve
from .gate import waiting
from .monitor import dropped, locked
from .native import LIVE, MARK, Native, note_use, retire
from .native_stream import NativeStream, Wait, Waits, order
from .resource import Resource
from .stream import Stream, check_stream

if TYPE_CHECKING:
    from ..backend import Native as Handle
    from .device import Device
    from .graph import Graph

K = TypeVar("K")
T = TypeVar("T")

_SEQUENCES = (tuple, list)
_MAX_MILLISECONDS = 2**31 - 1
_ORIGINS: dict[type, OriginKind] = {
    Binary: OriginKind.BINARY,
    Timeline: OriginKind.TIMELINE,
    Fence: OriginKind.FENCE,
    Keyed: OriginKind.KEYED,
}
_VALUE_NAMES: dict[type, str] = {
    Timeline: "a value",
    Fence: "a value",
    Keyed: "a key",
    SciSync: "the address of a fence",
}


class SemaphoreCalls(ABC):
    """Makes a semaphore's calls: through the driver, stream words, or the bridge.

    Handles are objects that it made; a batch is the result of `prepare` for several.
    """

    max_value: int = MAX_64
    """Largest value that a stream can wait for."""
    blocks: bool = False
    """Whether `destroy` waits for the whole device."""
    in_graphs: bool = True
    """Whether a stream that is being captured accepts the calls."""
    driver: Backend | None = None
    """The backend whose `wait` and `signal` are all there is to a call; None if `wait` and `signal` here do more."""

    @abstractmethod
    def prepare(self, handles: Sequence[Handle]) -> Any:
        """Prepare a batch for `wait` and `signal`."""

    @abstractmethod
    def wait(self, batch: Any, stream: NativeStream, values: Sequence[int], ms: int | None, waits: list[Wait]) -> None:
        """Enqueue."""

    @abstractmethod
    def signal(self, batch: Any, stream: NativeStream, values: Sequence[int]) -> None:
        """Enqueue."""

    @abstractmethod
    def destroy(self, handle: Handle) -> None:
        """Release the handle, which streams no longer use."""

    def abandon(self, handle: Handle) -> None:  # noqa: B027 - most drivers cannot cancel waits
        """Cancel pending waits of streams, if that is possible."""

    @abstractmethod
    def gap(self, cell: tuple[Operation, type[AnySemaphoreHandle]]) -> Capability | None:
        """Why streams cannot signal, wait, or wait with a timeout; None if they can."""

    def looks(self, kind: type) -> Callable[[Handle, int], bool] | None:
        """A function that tells whether a handle of the kind has a value; None if only the driver knows."""
        return None

    def host_gap(self, handle_type: type[AnySemaphoreHandle]) -> Capability | None:
        """Why the calling thread can neither wait nor signal; None if it can."""
        return None

    @abstractmethod
    def host_signal(self, handle: Handle, value: int) -> None:
        """Signal from the calling thread."""

    @abstractmethod
    def host_wait(self, handle: Handle, value: int, timeout: float) -> bool:
        """Block the calling thread; False if `timeout` seconds passed."""

    def export(self, handle: Handle) -> AnySemaphoreHandle:
        """Return a new handle that the caller owns. Called only if its semaphores are exportable."""
        raise NotImplementedError

    def know(self, semaphore: ExternalSemaphore[Any]) -> None:  # noqa: B027 - only the driver's graphs need it
        """Remember a new semaphore."""


class DriverSemaphores(SemaphoreCalls):
    """Calls of one device's driver."""

    def __init__(self, device: Device) -> None:
        backend = device._backend
        self._device = device
        self._backend = backend
        self.driver = backend
        self._on_host = cast(HostSemaphoreBackend, backend)  # where `host_gap` is None
        self.blocks = backend.releases_block
        self.know = device._know  # type: ignore[method-assign]

    def prepare(self, handles: Sequence[Handle]) -> Any:
        return self._backend.prepare(handles)

    def wait(self, batch: Any, stream: NativeStream, values: Sequence[int], ms: int | None, waits: list[Wait]) -> None:
        self._backend.wait(batch, stream.handle, values, ms)

    def signal(self, batch: Any, stream: NativeStream, values: Sequence[int]) -> None:
        self._backend.signal(batch, stream.handle, values)

    def destroy(self, handle: Handle) -> None:
        self._backend.destroy_semaphore(handle)

    def abandon(self, handle: Handle) -> None:
        self._backend.abandon_semaphore(handle)

    def gap(self, cell: tuple[Operation, type[AnySemaphoreHandle]]) -> Capability | None:
        found = self._device.capabilities.of(cell)
        return None if found else found

    def looks(self, kind: type) -> Callable[[Handle, int], bool] | None:
        if kind is Timeline and isinstance(self._backend, HostSemaphoreBackend):  # no look uses it up
            return lambda handle, value: self.host_wait(handle, value, 0.0)
        return None

    def host_gap(self, handle_type: type[AnySemaphoreHandle]) -> Capability | None:
        if isinstance(self._backend, HostSemaphoreBackend):
            return None
        return self._device.capabilities.of((Operation.CREATE_SEMAPHORE, handle_type))

    def host_signal(self, handle: Handle, value: int) -> None:
        self._on_host.host_signal(handle, value)

    def host_wait(self, handle: Handle, value: int, timeout: float) -> bool:
        return self._on_host.host_wait(handle, value, timeout)

    def export(self, handle: Handle) -> AnySemaphoreHandle:
        return self._on_host.export_semaphore(handle)


class _Semaphore(Native):
    __slots__ = ("looks",)


class ExternalSemaphore(Resource, Generic[K]):
    """A semaphore that another API or process shares. Made by `Device.import_semaphore` or `create_semaphore`.

    `K` is its kind: calls of ``Binary`` take no value, those of ``Timeline`` and ``Fence`` a value, those of ``Keyed``
    a key, and those of ``SciSync`` the address of an ``NvSciSyncFence``.

    `close()` leaves a stream's pending waits pending, as every GPU driver does. ``close(timeout=...)`` waits that long
    for them, then cancels them if the driver can (on the host backend the stream fails with `ResourceClosedError`).
    `close()` cancels threads in `host_wait` at once. The native release follows when the streams have finished their
    work with the semaphore (``cuDestroyExternalSemaphore`` / ``hipDestroyExternalSemaphore``).

    Attributes
    ----------
    handle_type : type
        Type of the handle that it was imported from, or is exported as.
    kind : type
        ``Binary``, ``Timeline``, ``Fence``, ``Keyed`` or ``SciSync``.

    Notes
    -----
    **If the process that was to signal has died**, a stream waits for ever: neither a driver nor this library sees the
    death. `Stream.synchronize` with a timeout names the semaphore and the value (see its example). To let the stream go
    on, signal the value here, by `host_signal` or on another stream, before you close the semaphore. Discard the
    results of the work behind the wait: it ran on what the process had left. To be told at once, import a timeline of
    `create_semaphore` by ``Bridge.import_semaphore(handle, peer=pid)``: the stream then goes on by itself, and fails
    with `PeerError`.

    Examples
    --------
    >>> with device.create_semaphore(gi.TimelineFd) as semaphore:
    ...     semaphore.wait(stream, 1)
    ...     buffer.fill(7, stream=stream)
    ...     semaphore.signal(stream, 2)
    ...     semaphore.host_signal(1)  # the stream goes on
    ...     semaphore.host_wait(2, timeout=10)
    """

    _promised = 0
    """The last value that a handoff told the graphics side to signal."""

    def __init__(
        self,
        device: Device,
        handle_type: type[SemaphoreHandle[K]],
        calls: SemaphoreCalls,
        *,
        exportable: bool = False,
        keepalive: object = None,
        parents: Sequence[Native] = (),
        label: str = "",
    ) -> None:
        noun = label or f"{handle_type.type_name} semaphore"
        gate = device._gate if calls.blocks else None
        native = _Semaphore(noun, calls.destroy, parents=parents, gate=gate, keep=keepalive, device=device._streams)
        native.looks = calls.looks(handle_type.kind)
        super().__init__(native)
        self._device = device
        self._gate = device._gate
        self._calls = calls
        self._batch: Any = None
        self._exportable = exportable
        self.handle_type = handle_type
        self.kind: type = handle_type.kind
        self._takes_value = self.kind is not Binary
        self._grows = self.kind is Timeline
        self._max_value = calls.max_value
        # Bound here: the hot path makes a driver's calls without a detour.
        self._enqueue_wait = None if calls.driver is None else calls.driver.wait
        self._enqueue_signal = None if calls.driver is None else calls.driver.signal
        self._cannot_on_host = calls.host_gap(handle_type)
        self._cannot_signal, self._cannot_wait, self._cannot_time_out = (
            calls.gap((operation, handle_type))
            for operation in (Operation.SIGNAL_SEMAPHORE, Operation.WAIT_SEMAPHORE, Operation.WAIT_TIMEOUT)
        )
        # Values that need no closer look. There are none if it takes no values, or cannot wait or signal at all.
        self._waits_below, self._signals_below = (
            calls.max_value if self._takes_value and gap is None else -1
            for gap in (self._cannot_wait, self._cannot_signal)
        )

    def _create(self, call: Callable[[], Handle]) -> None:
        """Make or import it."""
        try:
            handle = self._lifetime.create(call)
            if hasattr(handle, "label"):
                with suppress(AttributeError):  # its own, to read alone
                    handle.label = self.label
            self._batch = self._calls.prepare([handle])
            self._calls.know(self)
        except BaseException:
            retire(self._lifetime)
            raise

    @property
    def device(self) -> Device:
        """Device whose streams use it."""
        return self._device

    @property
    def takes_timeout(self) -> bool:
        """Whether a stream's `wait` takes a timeout."""
        return self._cannot_time_out is None

    # -- on a stream -------------------------------------------------------------------------------------------

    @overload
    def wait(self: ExternalSemaphore[Binary], stream: Stream, *, timeout: float | None = None) -> None: ...
    @overload
    def wait(
        self: ExternalSemaphore[Timeline] | ExternalSemaphore[Fence] | ExternalSemaphore[Keyed]
        | ExternalSemaphore[SciSync],
        stream: Stream,
        value: int,
        *,
        timeout: float | None = None,
    ) -> None: ...  # fmt: skip
    def wait(self, stream: Stream, value: int | None = None, *, timeout: float | None = None) -> None:
        """Make `stream` wait for the semaphore before its later work.

        Returns at once, but on the host backend's stream 0, ``device.wrap_stream(0)``: that is the calling thread,
        which waits here. Pass `timeout` there, or wait on a stream of `Device.create_stream` and call
        ``stream.synchronize(timeout)``.

        ``cuWaitExternalSemaphoresAsync`` / ``hipWaitExternalSemaphoresAsync``

        Parameters
        ----------
        stream : Stream
            Stream of the same device.
        value : int
            Timeline, fence: wait until the counter is at least this. Keyed mutex: the key to acquire with. None for
            a binary semaphore, whose signal the wait consumes.
        timeout : float, optional
            Seconds; only if the driver supports it (`Operation.WAIT_TIMEOUT`: keyed mutexes, the host backend). On
            expiry the stream fails with `SemaphoreTimeoutError`.

        Raises
        ------
        InvalidArgumentError
            A binary semaphore got a value, another kind got None or a value below 0, or the stream is of another
            device.
        UnsupportedError
            The device cannot wait for this kind, or cannot wait with a timeout.

        Examples
        --------
        >>> with device.import_semaphore(gi.TimelineFd(timeline_fd)) as semaphore, device.create_stream() as producer:
        ...     semaphore.wait(stream, 1)
        ...     buffer.fill(7, stream=stream)  # behind the wait
        ...     semaphore.signal(producer, 1)
        ...     stream.synchronize(timeout=10)
        """
        if type(stream) is not Stream:
            check_stream(self._device, stream)
        lifetime, native, gate = self._lifetime, stream._stream or stream._known_as(), self._gate
        if gate.crowded:
            relieve(gate)  # before the marks: callbacks run here
        pending: Wait | None = None
        calls, streams = lifetime.calls, native.calls
        calls += MARK
        streams += MARK
        try:
            odd = native.odd
            if odd or lifetime.state is not LIVE or stream._lifetime.state is not LIVE:
                self._refuse(stream)
            if type(value) is int and 0 <= value <= self._waits_below:
                number = value
            else:
                number = self._check_value(value, self._cannot_wait)
            ms = None if timeout is None else self._milliseconds(timeout)
            if native not in lifetime.uses:  # before the call: the release waits even if an interrupt strikes after it
                self._note_use(stream, native)
            pending = Wait()
            pending.semaphore = lifetime
            pending.value = value
            enqueue = self._enqueue_wait
            if enqueue is None:
                if not self._calls.in_graphs:
                    _refuse_capture(native, self.label)
                pending.number = next(order)
            waits = native.waits
            if odd and (graph := native.graph) is not None:  # it waits when the graph is launched
                graph.hold(lifetime)
            else:
                waits.append(pending)  # as in `NativeStream.note`
                waiting[native] = None  # before the look at the gate: see there
                if gate.shut:
                    gate.let_releases_end()
            if enqueue is not None:
                enqueue(self._batch, native.handle, (number,), ms)
            else:
                self._calls.wait(self._batch, native, (number,), ms, [pending])
            if len(waits) > native.limit:
                pending.enqueued = True
                native.came_along()
        except DriverError:  # it has enqueued nothing
            if pending is not None:
                pending.passed = True
            raise
        finally:
            if pending is not None:
                pending.enqueued = True
            del calls[-1], streams[-1]

    @overload
    def signal(self: ExternalSemaphore[Binary], stream: Stream) -> None: ...
    @overload
    def signal(
        self: ExternalSemaphore[Timeline] | ExternalSemaphore[Fence] | ExternalSemaphore[Keyed]
        | ExternalSemaphore[SciSync],
        stream: Stream,
        value: int,
    ) -> None: ...  # fmt: skip
    def signal(self, stream: Stream, value: int | None = None) -> None:
        """Make `stream` signal the semaphore when its earlier work is done. Returns at once.

        ``cuSignalExternalSemaphoresAsync`` / ``hipSignalExternalSemaphoresAsync``

        Parameters
        ----------
        stream : Stream
            Stream of the same device.
        value : int
            Timeline, fence: the counter's new value; a timeline only grows. Keyed mutex: the key to release with.
            None for a binary semaphore.

        Raises
        ------
        InvalidArgumentError
            A binary semaphore got a value, another kind got None, the timeline would not grow on this stream (drivers
            accept that, and later waits never return), or the stream is of another device.
        UnsupportedError
            The device cannot signal this kind.

        Examples
        --------
        >>> with device.import_semaphore(gi.TimelineFd(timeline_fd)) as semaphore:
        ...     semaphore.signal(stream, 1)
        ...     semaphore.signal(stream, 1)
        Traceback (most recent call last):
            ...
        gpuinterop.errors.InvalidArgumentError: value: 1 after 1 on the same stream for ...: a timeline only grows; ...
        """
        if type(stream) is not Stream:
            check_stream(self._device, stream)
        lifetime, native = self._lifetime, stream._stream or stream._known_as()
        calls, streams = lifetime.calls, native.calls
        calls += MARK
        streams += MARK
        try:
            odd = native.odd
            if odd or lifetime.state is not LIVE or stream._lifetime.state is not LIVE:
                self._refuse(stream)
            if type(value) is int and 0 <= value <= self._signals_below:
                number = value
            else:
                number = self._check_value(value, self._cannot_signal)
            last = lifetime.uses.get(native)
            if last is None:
                last = self._note_use(stream, native)
            if self._grows and number <= last[0]:
                self._check_growth(native, number, last, "value")
            enqueue = self._enqueue_signal
            if enqueue is None and not self._calls.in_graphs:
                _refuse_capture(native, self.label)
            graph = native.graph if odd else None
            if graph is not None:  # its launches signal, not this call
                graph.hold(lifetime)
            if enqueue is not None:
                enqueue(self._batch, native.handle, (number,))
            else:
                self._calls.signal(self._batch, native, (number,))
            if graph is None:
                last[0] = number
            if odd and native.thread is not None:
                native.came_along()
        finally:
            del calls[-1], streams[-1]

    # -- on the calling thread -----------------------------------------------------------------------------------

    def host_wait(self, value: int | None = None, *, timeout: float | None = None) -> None:
        """Block the calling thread until the semaphore is signalled, without a stream.

        Parameters
        ----------
        value : int
            See `wait`.
        timeout : float, optional
            Seconds to wait; None sets no limit.

        Raises
        ------
        UnsupportedError
            The backend cannot wait for semaphores without a stream.
        SemaphoreTimeoutError
            `timeout` seconds passed.

        Examples
        --------
        >>> with device.create_semaphore(gi.TimelineFd) as semaphore:
        ...     semaphore.host_wait(1, timeout=0.01)
        Traceback (most recent call last):
            ...
        gpuinterop.errors.SemaphoreTimeoutError: ... was not signalled to 1 in 0.01 s; is the other side alive?
        """
        if type(value) is int and self._takes_value and 0 <= value <= self._max_value:
            number = value
        else:
            number = self._check_value(value)
        limit = check_timeout(timeout)
        lifetime = self._lifetime
        calls = lifetime.calls
        calls += MARK
        try:
            if lifetime.state is not LIVE or self._cannot_on_host is not None:
                self._check_open()
                self.check_host_side()
            reached = self._wait_in_slices(lifetime, number, limit)
        finally:
            del calls[-1]
        if not reached:
            raise SemaphoreTimeoutError(
                f"{self.label} was not signalled{f' to {value}' if self._takes_value else ''} in {timeout:g} s; "
                "is the other side alive?"
            )

    def _wait_in_slices(self, lifetime: Native, value: int, limit: float | None) -> bool:
        """Wait in slices, so that close() can end it.

        A function of its own: from CPython 3.13 on no `finally` covers the jump back from an `if` in a loop.
        """
        deadline = None if limit is None else time.monotonic() + limit
        piece = system.SLICE
        while True:
            if deadline is not None:
                piece = min(piece, max(0.0, deadline - time.monotonic()))
            if self._calls.host_wait(lifetime.handle, value, piece):
                return True
            if lifetime.state is not LIVE:
                raise ResourceClosedError(f"{self.label} was closed while this thread waited for it.")
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def host_signal(self, value: int | None = None) -> None:
        """Signal from the calling thread at once, without a stream.

        Parameters
        ----------
        value : int
            See `signal`.

        Raises
        ------
        UnsupportedError
            The backend cannot signal semaphores without a stream.

        Examples
        --------
        >>> with device.create_semaphore(gi.TimelineFd) as semaphore:
        ...     semaphore.wait(stream, 1)
        ...     semaphore.host_signal(1)
        ...     stream.synchronize(timeout=10)
        """
        if type(value) is int and self._takes_value and 0 <= value <= self._max_value:
            number = value
        else:
            number = self._check_value(value)
        lifetime = self._lifetime
        calls = lifetime.calls
        calls += MARK
        try:
            if lifetime.state is not LIVE or self._cannot_on_host is not None:
                self._check_open()
                self.check_host_side()
            self._calls.host_signal(lifetime.handle, number)
        finally:
            del calls[-1]

    def export(self) -> SemaphoreHandle[K]:
        """Return a new handle that the caller owns; only `Device.create_semaphore` makes exportable semaphores.

        Returns
        -------
        SemaphoreHandle
            Handle of the type that `Device.create_semaphore` was given, with its origin.

        Raises
        ------
        InvalidArgumentError
            The semaphore was imported.

        Examples
        --------
        >>> with device.create_semaphore(gi.TimelineFd) as semaphore, semaphore.export() as handle:
        ...     handle.origin.kind  # send it with gi.ipc.send_handle(connection, handle)
        <OriginKind.TIMELINE: 'timeline'>
        """
        self._check_open()
        if not self._exportable:
            raise InvalidArgumentError(
                "semaphore",
                f"{self.label} was imported; duplicate() the handle before the import, or create the semaphore here.",
            )
        self._lifetime.gate = self._gate if self._calls.blocks else None  # others may have it
        handle = self._lifetime.use(self._calls.export)
        # Our own timelines lie in host memory: any device imports them.
        device = self._device.identity if isinstance(self._calls, DriverSemaphores) else None
        handle.origin = HandleOrigin(kind=origin_kind(self.kind), device=device, trusted=True)
        return handle

    def close(self, timeout: float | None = None) -> None:
        """End use at once. See the class for pending waits, and `Resource.close` for `timeout`."""
        try:
            super().close(timeout)
        except ResourceBusyError:
            self._lifetime.ask(self._calls.abandon, None)
            raise

    def check_host_side(self) -> None:
        """Raise `UnsupportedError` if `host_wait` and `host_signal` would."""
        if self._cannot_on_host is not None:
            raise UnsupportedError(self._cannot_on_host, context=f"{self._device.name}, without a stream")

    # -- inside ------------------------------------------------------------------------------------------------

    def _note_use(self, stream: Stream, native: NativeStream) -> list[Any]:
        """Note a stream's first use; return what `last_signalled` does."""
        check_stream(self._device, stream)
        return last_signalled(self._lifetime, native)

    def _check_growth(self, native: NativeStream, number: int, last: list[Any], argument: str) -> None:
        """Raise if a stream would signal a value that it has signalled, or a smaller one."""
        told = value_of(last)
        if number <= told and not native.is_capturing():
            raise InvalidArgumentError(
                argument,
                f"{number} after {told} on the same stream for {self.label}: a timeline only grows; signal {told + 1} "
                "or more.",
            )

    def _check_value(self, value: int | None, gap: Capability | None = None) -> int:
        if gap is not None:
            raise UnsupportedError(gap, context=self._device.name)
        if not self._takes_value:
            if value is not None:
                raise InvalidArgumentError(
                    "value", f"expected None for {self.label}, got {value!r}; import timelines as TimelineFd."
                )
            return 0
        if value is None:
            raise InvalidArgumentError(
                "value",
                f"expected {_VALUE_NAMES[self.kind]} for {self.label}, got None; pass one, or import a binary "
                "semaphore as OpaqueFd.",
            )
        return check_int(value, "value", minimum=0, maximum=self._max_value)

    def _milliseconds(self, timeout: float) -> int | None:
        seconds = check_timeout(timeout)
        if self._cannot_time_out is not None:
            raise UnsupportedError(self._cannot_time_out, context=self._device.name)
        return None if seconds is None else min(round(seconds * 1000), _MAX_MILLISECONDS)

    def _refuse(self, stream: Stream) -> None:
        self._check_open()
        check_stream(self._device, stream)
        stream._known_as().refuse_edge()

    def _last_signalled(self) -> int:
        """The largest value that streams of this process were told to signal."""
        return max(map(value_of, self._lifetime.uses.copy().values()), default=0)

    def _forget_values(self) -> None:
        """Forget the signalled values: a capture noted some that its graph has not signalled."""
        for last in self._lifetime.uses.copy().values():
            value_of(last)
            last[0] = 0


_UNKNOWN = 2**64
"""More than any value, in place of one that a batch has: each look at it is then a closer one."""


@locked
def last_signalled(semaphore: Native, stream: NativeStream) -> list[Any]:
    """The last value that the stream was told to signal, in a list, which calls change; notes the use.

    If a batch was told last, the list is ``[_UNKNOWN, told]``: ask `value_of`.
    """
    if stream not in semaphore.uses:
        note_use(semaphore, stream, [0])
    last: list[Any] = semaphore.uses[stream]
    return last


@locked
def value_of(last: list[Any]) -> int:
    """The value in a list of `last_signalled`, which has it alone from now on."""
    if len(last) > 1:
        last[1].give_back()
    value: int = last[0]
    return value


class _Told:
    """What a batch told one stream to signal, last.

    The semaphores' own lists (`last_signalled`) are out of date while it is `owner`: a call of the batch then writes
    one attribute instead of one entry for each semaphore.
    """

    __slots__ = ("lasts", "owner", "values")

    def __init__(self, lasts: list[list[Any]]) -> None:
        self.lasts = lasts
        self.owner = False
        self.values: Sequence[int] = ()

    def give_back(self) -> None:
        """Write the values into the semaphores' lists. Under the monitor."""
        self.owner = False
        for last, value in zip(self.lasts, self.values, strict=True):
            last[:] = [value]

    def note(self, values: Sequence[int]) -> None:
        """Note what was signalled."""
        before, self.values = self.values, values
        if not self.owner:
            _write(self, before)


@locked
def _write(told: _Told, before: Sequence[int]) -> None:
    """Write the lists; if the batch alone has written them since its last call, it owns them from now on."""
    found = [value_of(last) for last in told.lasts]
    told.values = [*map(max, told.values, found)]
    if found == [*before] and min(found) >= 1:
        told.owner = True
    for last, value in zip(told.lasts, told.values, strict=True):
        last[:] = [_UNKNOWN, told] if told.owner else [value]


def _refuse_capture(stream: NativeStream, label: str) -> None:
    if stream.is_capturing():
        raise InvalidArgumentError(
            "stream",
            f"{stream.label} is being captured, and each launch would repeat the value of {label}, which is made of "
            "stream words: signal and wait outside of the graph, before and after its launch.",
        )


def origin_kind(kind: type) -> OriginKind:
    """The origin kind of handles of such a semaphore."""
    return _ORIGINS.get(kind, OriginKind.OTHER)


class SemaphoreBatch(Sole):
    """Several semaphores of one device, waited for or signalled by one driver call.

    Parameters
    ----------
    *semaphores : ExternalSemaphore
        The caller still owns them; a batch needs no `close`. Each may have another kind.

    Raises
    ------
    InvalidArgumentError
        The semaphores are of several devices, or one is named twice; or some are the driver's, and others are a
        bridge's or our own timelines.

    Examples
    --------
    >>> with device.create_semaphore(gi.TimelineFd) as depth, device.create_semaphore(gi.TimelineFd) as colour:
    ...     batch = gi.SemaphoreBatch(depth, colour)
    ...     batch.signal(stream, (1, 5))
    ...     batch.wait(stream, (1, 5))
    ...     stream.synchronize(timeout=10)
    """

    def __init__(self, *semaphores: ExternalSemaphore[Any]) -> None:
        if not semaphores:
            raise InvalidArgumentError("semaphores", "expected one or more, got none.")
        for semaphore in semaphores:
            check_type(semaphore, ExternalSemaphore, "semaphores", "ExternalSemaphores")
            semaphore._check_open()
            if semaphore._device is not semaphores[0]._device:
                raise InvalidArgumentError("semaphores", "belong to different devices; make a batch for each.")
        if len(set(map(id, semaphores))) != len(semaphores):
            raise InvalidArgumentError("semaphores", "expected each semaphore once, got one twice.")
        self._semaphores = semaphores
        self._device = semaphores[0]._device
        self._calls = semaphores[0]._calls
        if any(semaphore._calls is not self._calls for semaphore in semaphores):
            raise InvalidArgumentError(
                "semaphores", "a driver's, the bridge's and our own need batches of their own; make one for each."
            )
        self._batch = self._calls.prepare([semaphore._native for semaphore in semaphores])
        self._takes_values = all(semaphore._takes_value for semaphore in semaphores)
        self._max_value = min(semaphore._max_value for semaphore in semaphores)
        self._cannot_wait = next((gap for gap in (one._cannot_wait for one in semaphores) if gap is not None), None)
        self._cannot_signal = next((gap for gap in (one._cannot_signal for one in semaphores) if gap is not None), None)
        self._enqueue_wait = semaphores[0]._enqueue_wait
        self._enqueue_signal = semaphores[0]._enqueue_signal
        self._gate = semaphores[0]._gate
        self._natives = [semaphore._lifetime for semaphore in semaphores]
        self._told: dict[NativeStream, _Told] = {}
        """What each stream that used it was told last."""
        # One mark for all: each semaphore is released after the batch, and closing one closes the batch.
        self._lifetime = Native("SemaphoreBatch", parents=self._natives)
        self._lifetime.open()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:  # by then there may be no `sys`
        if hasattr(self, "_lifetime") and not _ending():
            dropped.append(self._lifetime)

    def wait(self, stream: Stream, values: Sequence[int | None] | None = None, *, timeout: float | None = None) -> None:
        """Make `stream` wait for all. Returns at once.

        Parameters
        ----------
        stream : Stream
            Stream of the same device.
        values : sequence of int or None
            One value per semaphore, in the constructor's order; None for a binary one, or for all.
        timeout : float, optional
            See `ExternalSemaphore.wait`.

        Raises
        ------
        InvalidArgumentError, UnsupportedError
            See `ExternalSemaphore.wait`.
        """
        if type(stream) is not Stream:
            check_stream(self._device, stream)
        lifetime, native, gate = self._lifetime, stream._stream or stream._known_as(), self._gate
        numbers = self._check_values(values)
        ms = None if timeout is None else self._milliseconds(timeout)
        if gate.crowded:
            relieve(gate)  # before the marks: callbacks run here
        pending: Waits | None = None
        calls, streams = lifetime.calls, native.calls
        calls += MARK
        streams += MARK
        try:  # as `ExternalSemaphore.wait`
            odd = native.odd
            if odd or lifetime.state is not LIVE or stream._lifetime.state is not LIVE or self._cannot_wait is not None:
                self._refuse(stream, self._cannot_wait)
            if native not in self._told:
                self._note_uses(stream, native)
            graph = native.graph if odd else None
            if graph is not None:
                self._hold(graph)
            enqueue = self._enqueue_wait
            if enqueue is None:
                self._wait_each(stream, native, numbers)
                return
            pending = Waits()
            pending.semaphore = self._natives[0]  # its release waits for the stream, too
            pending.semaphores, pending.values = self._natives, self._given(numbers)
            waits = native.waits
            if graph is None:
                waits.append(pending)
                waiting[native] = None
                if gate.shut:
                    gate.let_releases_end()
            enqueue(self._batch, native.handle, numbers, ms)
            if len(waits) > native.limit:
                pending.enqueued = True
                native.came_along()
        except DriverError:
            if pending is not None:
                pending.passed = True
            raise
        finally:
            if pending is not None:
                pending.enqueued = True
            del calls[-1], streams[-1]

    def signal(self, stream: Stream, values: Sequence[int | None] | None = None) -> None:
        """Make `stream` signal all. Returns at once. If one value is refused, no semaphore is signalled.

        Parameters
        ----------
        stream, values
            See `wait`.

        Raises
        ------
        InvalidArgumentError, UnsupportedError
            See `ExternalSemaphore.signal`.
        """
        if type(stream) is not Stream:
            check_stream(self._device, stream)
        lifetime, native = self._lifetime, stream._stream or stream._known_as()
        told = self._told.get(native)
        # Values that are more than those of the batch's last call are 2 or more.
        numbers = self._check_values(values, grow=told is not None and told.owner)
        calls, streams = lifetime.calls, native.calls
        calls += MARK
        streams += MARK
        try:  # as `ExternalSemaphore.signal`
            odd = native.odd
            if (
                odd
                or lifetime.state is not LIVE
                or stream._lifetime.state is not LIVE
                or self._cannot_signal is not None
            ):
                self._refuse(stream, self._cannot_signal)
            if told is None:
                told = self._note_uses(stream, native)
            if not told.owner or any(map(operator.le, numbers, told.values)):
                self._check_growth(native, numbers, told.lasts)
            enqueue = self._enqueue_signal
            graph = native.graph if odd else None
            if graph is not None:
                self._hold(graph)
            if enqueue is not None:
                enqueue(self._batch, native.handle, numbers)
            else:
                self._signal_each(native, numbers)
            if graph is None:
                told.note(numbers)
            if odd and native.thread is not None:
                native.came_along()
        finally:
            del calls[-1], streams[-1]

    # -- inside ------------------------------------------------------------------------------------------------

    def _wait_each(self, stream: Stream, native: NativeStream, numbers: Sequence[int]) -> None:
        """Wait by stream words, or through the bridge, which have a wait for each semaphore."""
        if not self._calls.in_graphs:
            _refuse_capture(native, self._semaphores[0].label)
        waits = []
        for semaphore, value in zip(self._semaphores, self._given(numbers), strict=True):
            waits.append(Wait.of(semaphore._lifetime, value))
        stream._call_behind(native, waits, lambda _: self._calls.wait(self._batch, native, numbers, None, waits))

    def _signal_each(self, native: NativeStream, numbers: Sequence[int]) -> None:
        if not self._calls.in_graphs:
            _refuse_capture(native, self._semaphores[0].label)
        self._calls.signal(self._batch, native, numbers)

    def _check_growth(self, native: NativeStream, numbers: Sequence[int], lasts: Sequence[list[Any]]) -> None:
        for semaphore, number, last in zip(self._semaphores, numbers, lasts, strict=True):
            if semaphore._takes_value:
                semaphore._check_value(number)
            if semaphore._grows and number <= last[0]:
                semaphore._check_growth(native, number, last, "values")

    def _note_uses(self, stream: Stream, native: NativeStream) -> _Told:
        """Note the use before the call, which may fail half-way: the releases wait for the stream."""
        for known in [known for known in self._told.copy() if known.forgotten]:
            self._told.pop(known, None)
        told = self._told[native] = _Told([one._note_use(stream, native) for one in self._semaphores])
        return told

    def _hold(self, graph: Graph) -> None:
        for semaphore in self._semaphores:
            graph.hold(semaphore._lifetime)

    def _refuse(self, stream: Stream, gap: Capability | None) -> None:
        for semaphore in self._semaphores:
            semaphore._refuse(stream)
        if gap is not None:
            raise UnsupportedError(gap, context=self._device.name)

    def _check_values(self, values: Sequence[int | None] | None, *, grow: bool = False) -> Sequence[int]:
        """The values as a driver takes them; with `grow`, if each is more than what it was, which the caller checks."""
        told: Any = [None] * len(self._semaphores) if values is None else values
        if not isinstance(told, _SEQUENCES):
            raise ArgumentTypeError("values", f"expected a tuple or a list, got {values!r}.")
        given: tuple[Any, ...] = tuple(told)  # the caller may change a list meanwhile
        if len(given) != len(self._semaphores):
            raise InvalidArgumentError("values", f"has {len(given)} entries for {len(self._semaphores)} semaphores.")
        # Sums and minima of ints run in C. A bool is less than 2, and the sum bounds each of its parts.
        try:
            bounded = type(total := sum(given)) is int and total <= self._max_value
            if bounded and self._takes_values and (grow or min(given) >= 2):
                return given
        except (TypeError, ValueError):  # the closer look below has the words for it
            pass
        return [one._check_value(value) for one, value in zip(self._semaphores, given, strict=True)]

    def _given(self, numbers: Sequence[int]) -> Sequence[int | None]:
        """The values for messages: None for a binary semaphore."""
        if self._takes_values:
            return numbers
        return [number if one._takes_value else None for one, number in zip(self._semaphores, numbers, strict=True)]

    def _milliseconds(self, timeout: float) -> int | None:
        return [semaphore._milliseconds(timeout) for semaphore in self._semaphores][-1]
