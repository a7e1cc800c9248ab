"""External semaphores and batches of them.

`wait` and `signal` are the hot path: the driver call and little else. Import decides all it can (capability, kind, the
batch of one). The calls only set marks and check once that the objects fit together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast, overload

from .. import system
from .._arguments import MAX_64, NoCopy, check_int, check_timeout, check_type
from ..backend import Backend, HostSemaphoreBackend
from ..capabilities import Capability, Cell, Operation, Scope
from ..errors import (
    ArgumentTypeError,
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
from .enqueue import Enqueues
from .known_stream import CapturedError, KnownStream, Wait, Waits
from .lifetime import GONE, LIVE, MARK, Lifetime, note_use, retire
from .monitor import locked
from .resource import Resource
from .stream import Stream, check_stream

if TYPE_CHECKING:
    from ..backend import DriverHandle
    from .device import Device
    from .graph import Graph

K = TypeVar("K")
T = TypeVar("T")

Valued: TypeAlias = (
    "ExternalSemaphore[Timeline] | ExternalSemaphore[Fence] | ExternalSemaphore[Keyed] | ExternalSemaphore[SciSync]"
)
"""Semaphores whose calls take a value."""
Told: TypeAlias = tuple[list[int], int]
"""The list that has the value which a stream was told to signal last, and the place in it. Calls change it there."""

_SEQUENCES = (tuple, list)
_COUNTING = (Timeline, Fence)
_VALUE_NAMES: dict[type, str] = {Keyed: "a key", SciSync: "the address of a fence"}


class SemaphoreCalls:
    """Makes a semaphore's calls: through the driver, stream words, or the bridge.

    A subclass makes the calls that stand here without a body. Handles are objects that it made; a batch is the result
    of `prepare` for several.
    """

    max_value: int = MAX_64
    """Largest value that a stream can wait for."""
    blocks: bool = False
    """Whether `destroy` waits for the whole device."""
    direct: Backend | None = None
    """The backend, if its `wait` and `signal` are all there is to a call; None if `wait` and `signal` here are."""

    prepare: Callable[[Sequence[DriverHandle]], Any]
    """Prepare a batch for `wait` and `signal`."""
    wait: Callable[[Any, KnownStream, Sequence[int], Wait], None]
    """Enqueue. Missing where `direct` has it."""
    signal: Callable[[Any, KnownStream, Sequence[int]], None]
    """Enqueue. Missing where `direct` has it."""
    destroy: Callable[[DriverHandle], None]
    """Release the handle, which streams no longer use."""

    def abandon(self, handle: DriverHandle) -> None:
        """Cancel pending waits of streams, if that is possible."""

    def gap(self, cell: tuple[Operation, type[AnySemaphoreHandle]]) -> Capability | None:
        """Why streams cannot signal or wait, or a wait takes no timeout; None if they can, or it does."""
        return None

    def host_gap(self, handle_type: type[AnySemaphoreHandle]) -> Capability | None:
        """Why the calling thread can neither read, wait nor signal, so that these calls are missing; None if it can."""
        return None

    host_value: Callable[[Any], int]
    """The counter of a timeline or fence."""
    host_signal: Callable[[Any, int], None]
    """Signal from the calling thread."""
    host_wait: Callable[[Any, int, float], bool]
    """Block the calling thread; False if so many seconds passed."""
    export: Callable[[Any], AnySemaphoreHandle]
    """Return a new handle that the caller owns. Called only if its semaphores are exportable."""

    def know(self, semaphore: ExternalSemaphore[Any]) -> None:
        """Remember a new semaphore, and give it the label for messages."""


class DriverSemaphores(SemaphoreCalls):
    """Calls of one device's driver."""

    def __init__(self, device: Device) -> None:
        backend = device.driver
        self.device = device
        self.driver = self.direct = backend
        self.prepare, self.destroy = backend.prepare, backend.destroy_semaphore
        if isinstance(backend, HostSemaphoreBackend):
            self.host_value, self.export = backend.host_value, backend.export_semaphore
            self.host_signal, self.host_wait = backend.host_signal, backend.host_wait
        self.blocks = backend.releases_block
        self.know = device._know  # type: ignore[method-assign]

    def abandon(self, handle: DriverHandle) -> None:
        self.driver.abandon_semaphore(handle)

    def gap(self, cell: tuple[Operation, type[AnySemaphoreHandle]]) -> Capability | None:
        found = self.device.capabilities.of(cell)
        return None if found else found

    def host_gap(self, handle_type: type[AnySemaphoreHandle]) -> Capability | None:
        if isinstance(self.driver, HostSemaphoreBackend):
            return None
        return Cell(Operation.WAIT_SEMAPHORE, handle_type).gap(
            Scope.RUNTIME,
            f"{self.device.backend} has no call by which a thread reads, awaits or signals an imported semaphore.",
            "gpuinterop.backend.HostSemaphoreBackend",
            "let a stream wait or signal, and ask stream.record().done; or ask the API that made the semaphore, as by "
            "vkGetSemaphoreCounterValue; or share a timeline of create_semaphore(TimelineFd), which the CPU can read.",
        )


class _Semaphore(Lifetime):
    __slots__ = ("counter", "remark")


class ExternalSemaphore(Resource, Enqueues, Generic[K]):
    """A semaphore that another API or process shares. Made by `Device.import_semaphore` or `create_semaphore`.

    `K` is its kind: calls of ``Binary`` take no value, those of ``Timeline`` and ``Fence`` a value, those of ``Keyed``
    a key, and those of ``SciSync`` the address of an ``NvSciSyncFence``.

    `close()` leaves a stream's pending waits pending, as every GPU driver does. ``close(timeout=...)`` waits that long
    for them, then cancels them if the driver can (on the host backend the stream fails with `ResourceClosedError`).
    `close()` cancels threads in `host_wait` at once. The native release follows when the streams have finished their
    work with the semaphore (``cuDestroyExternalSemaphore`` / ``hipDestroyExternalSemaphore``).

    Attributes
    ----------
    device : Device
        Device whose streams use it.
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

    lifetime: _Semaphore
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
        parents: Sequence[Lifetime] = (),
        noun: str = "",
        label: str | None = None,
    ) -> None:
        noun = noun or f"{handle_type.type_name} semaphore"
        gate, streams = device.gate if calls.blocks else None, device.streams
        lifetime = _Semaphore(
            noun, calls.destroy, parents=parents, gate=gate, keep=keepalive, device=streams, label=label
        )
        super().__init__(lifetime)
        self._gives(lifetime, device, lifetime.uses)
        self._calls = calls
        self._batch: Any = None
        self._exportable = exportable
        self.handle_type = handle_type
        self.kind: type = handle_type.kind
        self.takes_value = self.kind is not Binary
        self._grows = self.kind is Timeline
        self.max_value = calls.max_value
        # Bound here: the hot path makes a driver's calls without a detour.
        self._direct = calls.direct is not None
        giver = calls.direct or calls
        self._give_wait: Callable[..., None] = giver.wait
        self._give_signal: Callable[..., None] = giver.signal
        # For a caller that has asked the driver whether the stream is being captured.
        self._give_wait_asked: Callable[..., None] = getattr(giver, "wait_asked", giver.wait)
        self._give_signal_asked: Callable[..., None] = getattr(giver, "signal_asked", giver.signal)
        self._cannot_on_host = calls.host_gap(handle_type)
        lifetime.counter = calls.host_value if self._grows and self._cannot_on_host is None else None
        lifetime.remark = None
        self._cannot_signal, self._cannot_wait, self._cannot_time_out = (
            calls.gap((operation, handle_type))
            for operation in (Operation.SIGNAL_SEMAPHORE, Operation.WAIT_SEMAPHORE, Operation.WAIT_TIMEOUT)
        )
        # Values that need no closer look. There are none if it takes no values, or cannot wait or signal at all.
        self._waits_below, self._signals_below = (
            calls.max_value if self.takes_value and gap is None else -1
            for gap in (self._cannot_wait, self._cannot_signal)
        )

    def _make(self, call: Callable[[], DriverHandle]) -> None:
        """Make or import the semaphore."""
        try:
            self._batch = self._calls.prepare([self.lifetime.create(call)])
            self._calls.know(self)
        except BaseException:
            retire(self.lifetime)
            raise

    # -- on a stream -------------------------------------------------------------------------------------------

    @overload
    def wait(self: ExternalSemaphore[Binary], stream: Stream | object, *, timeout: float | None = None) -> None: ...
    @overload
    def wait(self: Valued, stream: Stream | object, value: int, *, timeout: float | None = None) -> None: ...
    def wait(self, stream: Stream | object, value: int | None = None, *, timeout: float | None = None) -> None:
        """Make `stream` wait for the semaphore before its later work.

        Without a `timeout` it returns at once, but on the host backend's stream 0, which is the calling thread and
        waits here.

        ``cuWaitExternalSemaphoresAsync`` / ``hipWaitExternalSemaphoresAsync``

        Parameters
        ----------
        stream : Stream, or torch's, CuPy's, numba's, an int
            Stream of the same device.
        value : int
            Timeline, fence: wait until the counter is at least this. Keyed mutex: the key to acquire with. None for
            a binary semaphore, whose signal the wait consumes.
        timeout : float, optional
            Seconds. The calling thread first waits at most that long until the stream's wait would succeed, and only
            then makes the stream wait; a binary semaphore's signal it takes itself. For semaphores that the calling
            thread can wait for (`host_wait`); for keyed mutexes the driver's own wait has the limit, and the call
            returns at once. Default: the stream waits, without a limit.

        Raises
        ------
        InvalidArgumentError
            A binary semaphore got a value, another kind got None or a value below 0, or the stream is of another
            device. Or `timeout` is no time, or was given for a stream that is being captured.
        UnsupportedError
            The device cannot wait for this kind, or cannot wait with a timeout (`Operation.WAIT_TIMEOUT`).
        SemaphoreTimeoutError
            `timeout` passed. Nothing was enqueued, and no signal taken.

        Examples
        --------
        >>> with device.import_semaphore(gi.TimelineFd(timeline_fd)) as semaphore, device.create_stream() as producer:
        ...     semaphore.wait(stream, 1)
        ...     buffer.fill(7, stream=stream)  # behind the wait
        ...     semaphore.signal(producer, 1)
        ...     stream.synchronize(timeout=10)
        """
        if timeout is not None and (limit := self._check_limit(timeout)) is not None:
            self._wait_within(limit, stream, value)
            return
        number = (
            value if type(value) is int and 0 <= value <= self._waits_below else self._checked(value, self._cannot_wait)
        )
        pending = Wait()
        pending.semaphore = self.lifetime
        pending.value = value
        if type(stream) is not Stream or (known := stream.known) is None:
            known = (stream := check_stream(self.device, stream))._known_as()
        self._enqueue(stream, known, self._noted.get(known), self._give_wait, (number,), pending)

    @overload
    def signal(self: ExternalSemaphore[Binary], stream: Stream | object) -> None: ...
    @overload
    def signal(self: Valued, stream: Stream | object, value: int) -> None: ...
    def signal(self, stream: Stream | object, value: int | None = None) -> None:
        """Make `stream` signal the semaphore when its earlier work is done. Returns at once.

        ``cuSignalExternalSemaphoresAsync`` / ``hipSignalExternalSemaphoresAsync``

        Parameters
        ----------
        stream : Stream, or torch's, CuPy's, numba's, an int
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
        number = (
            value
            if type(value) is int and 0 <= value <= self._signals_below
            else self._checked(value, self._cannot_signal)
        )
        if type(stream) is not Stream or (known := stream.known) is None:
            known = (stream := check_stream(self.device, stream))._known_as()
        noted = self._noted.get(known)
        if noted is not None:
            told, at = noted
            if number <= told[at] and self._grows:
                self._check_growth(known, number, told[at], "value")
        if (noted := self._enqueue(stream, known, noted, self._give_signal, (number,))) is not None:
            told, at = noted
            told[at] = number

    # -- on the calling thread -----------------------------------------------------------------------------------

    @property
    def value(self) -> int:
        """The counter of a timeline or a fence now, as the calling thread reads it, without a stream.

        Signals that streams have yet to reach are not in it. What was written before a signal that is in it, the
        calling thread can read.

        Returns
        -------
        int
            Counter, from 0 to 2**64 - 1.

        Raises
        ------
        InvalidArgumentError
            The semaphore is of another kind, which has no counter.
        UnsupportedError
            The CPU cannot read it: as for `host_wait`, or the `Endpoint` of a bridged semaphore has no `counter`.
        ResourceClosedError
            The semaphore was closed.

        Examples
        --------
        >>> with device.create_semaphore(gi.TimelineFd) as semaphore:
        ...     semaphore.signal(stream, 3)
        ...     stream.synchronize(timeout=10)
        ...     semaphore.value
        3
        """
        self._check_open()
        if self.kind not in _COUNTING:
            raise InvalidArgumentError(
                "semaphore", f"expected a timeline or a fence, got {self.label}, which has no counter; wait for it."
            )
        self._check_host_side()
        found = self.lifetime.use(self._calls.host_value)
        system.fence()  # later loads come after the value that announces the data
        return found

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
        limit = check_timeout(timeout)
        left = system.seconds_left(limit)

        def wait(handle: DriverHandle, number: int) -> bool:
            while True:  # in slices, so that close() can end it
                rest = left()
                if self._calls.host_wait(handle, number, system.SLICE if rest is None else min(system.SLICE, rest)):
                    return True
                if self.closed:
                    raise ResourceClosedError(f"{self.label} was closed while this thread waited for it.")
                if rest == 0:
                    return False

        if not self._on_host(value, wait):
            raise SemaphoreTimeoutError(
                f"{self.label} was not signalled{f' to {value}' if self.takes_value else ''} in {limit:g} s; "
                "is the other side alive?"
            )

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
        calls = self._calls
        self._on_host(value, lambda handle, number: calls.host_signal(handle, number))  # noqa: PLW0108 - some have none

    def _on_host(self, value: int | None, call: Callable[[Any, int], T]) -> T:
        number = self._checked(value)
        lifetime = self.lifetime
        calls = lifetime.calls
        calls += MARK
        try:
            if lifetime.state is not LIVE or self._cannot_on_host is not None:
                self._check_open()
                self._check_host_side()
            return call(lifetime.handle, number)
        finally:
            del calls[-1]

    def export(self) -> SemaphoreHandle[K]:
        """Return a new handle that the caller owns; only `Device.create_semaphore` makes exportable semaphores.

        Returns
        -------
        SemaphoreHandle
            DriverHandle of the type that `Device.create_semaphore` was given, with its origin.

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
        self.lifetime.gate = self.gate if self._calls.blocks else None  # others may have the semaphore
        handle = self.lifetime.use(self._calls.export)
        # Our own timelines lie in host memory: any device imports them.
        device = self.device.identity if isinstance(self._calls, DriverSemaphores) else None
        handle.origin = HandleOrigin(kind=origin_kind(self.kind), device=device, trusted=True)
        return handle

    def close(self, timeout: float | None = None) -> None:
        """End use at once. See the class for pending waits, and `Resource.close` for `timeout`."""
        try:
            super().close(timeout)
        except ResourceBusyError:
            self.lifetime.ask(self._calls.abandon, None)
            raise

    def _check_host_side(self) -> None:
        """Raise `UnsupportedError` if `value`, `host_wait` and `host_signal` would."""
        if self._cannot_on_host is not None:
            raise UnsupportedError(self._cannot_on_host, context=f"{self.device.name}, without a stream")

    # -- inside ------------------------------------------------------------------------------------------------

    def _wait_within(self, limit: float, given: object, value: int | None) -> None:
        """Wait on the calling thread for `limit` seconds, then on the stream."""
        number = self._checked(value, self._cannot_wait)
        stream = check_stream(self.device, given)
        known, pending = stream._known_as(), Wait.of(self.lifetime, value)
        if self._cannot_on_host is not None:  # keyed mutexes
            pending.ms = round(limit * 1000)
        elif known.is_capturing():
            raise CapturedError(known)
        else:
            self.host_wait(value, timeout=limit)
            if not self.takes_value:
                return
        self._enqueue(stream, known, self._noted.get(known), self._give_wait, (number,), pending)

    def _wait_asked(self, stream: Stream, value: int) -> None:
        """Wait on a stream of the device that nothing captures, as the caller has asked."""
        known, pending = stream._known_as(), Wait.of(self.lifetime, value)
        self._enqueue(stream, known, self._noted.get(known), self._give_wait_asked, (value,), pending)

    def _signal_asked(self, stream: Stream, value: int) -> None:
        """Signal on such a stream."""
        known = stream._known_as()
        if (noted := self._noted.get(known)) is not None and value <= noted[0][noted[1]]:
            self._check_growth(known, value, noted[0][noted[1]], "value")
        if (noted := self._enqueue(stream, known, noted, self._give_signal_asked, (value,))) is not None:
            noted[0][noted[1]] = value

    def _look_closer(self, stream: Stream) -> None:
        self._check_open()
        check_stream(self.device, stream)
        stream._known_as().refuse_edge()

    def _note_use(self, stream: Stream, known: KnownStream) -> Told:
        check_stream(self.device, stream)
        return note_told([self.lifetime], known)[0]

    def _hold_in(self, graph: Graph) -> None:
        graph._hold(self.lifetime)
        graph._kept.append(self)

    def _check_growth(self, known: KnownStream, number: int, told: int, argument: str) -> None:
        """Raise if a stream would signal the value `told`, which it has signalled, or a smaller one."""
        self._check_open()
        if not known.is_capturing():
            raise InvalidArgumentError(
                argument,
                f"{number} after {told} on the same stream for {self.label}: a timeline only grows; signal {told + 1} "
                "or more.",
            )

    def _checked(self, value: int | None, gap: Capability | None = None) -> int:
        if gap is not None:
            raise UnsupportedError(gap, context=self.device.name)
        if not self.takes_value:
            if value is not None:
                raise InvalidArgumentError(
                    "value", f"expected None for {self.label}, got {value!r}; import timelines as TimelineFd."
                )
            return 0
        if value is None:
            raise InvalidArgumentError(
                "value",
                f"expected {_VALUE_NAMES.get(self.kind, 'a value')} for {self.label}, got None; pass one, or import a "
                "binary semaphore as OpaqueFd.",
            )
        return check_int(value, "value", minimum=0, maximum=self.max_value)

    def _check_limit(self, timeout: float) -> float | None:
        """Return the seconds of a wait with a limit; None if there is none."""
        limit = check_timeout(timeout)
        if limit is not None and self._cannot_time_out is not None:
            raise UnsupportedError(self._cannot_time_out, context=self.device.name)
        return limit

    def _last_signalled(self) -> int:
        """The largest value that streams of this process were told to signal."""
        return max((told[at] for told, at in self.lifetime.uses.copy().values()), default=0)

    def _forget_values(self) -> None:
        """Forget the signalled values: a capture noted some that its graph has not signalled."""
        for told, at in self.lifetime.uses.copy().values():
            told[at] = 0


@locked
def note_told(semaphores: Sequence[Lifetime], stream: KnownStream) -> list[Told]:
    """Note a stream's use of semaphores. Return where each has the last value that the stream was told to signal.

    Semaphores that are noted together share a list, so that a batch tells all of them by one copy in C.
    """
    new = [one for one in semaphores if stream not in one.uses]
    values = [0] * len(new)
    for at, one in enumerate(new):
        note_use(one, stream, (values, at))
    return [one.uses[stream] for one in semaphores]


def origin_kind(kind: type) -> OriginKind:
    """The origin kind of handles of such a semaphore: it has the kind's name, if the origin can tell it at all."""
    return OriginKind.__members__.get(kind.__name__.upper(), OriginKind.OTHER)


class SemaphoreBatch(NoCopy, Enqueues):
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
            if semaphore.device is not semaphores[0].device:
                raise InvalidArgumentError("semaphores", "belong to different devices; make a batch for each.")
        if len(set(map(id, semaphores))) != len(semaphores):
            raise InvalidArgumentError("semaphores", "expected each semaphore once, got one twice.")
        self._semaphores = semaphores
        self.device = semaphores[0].device
        self._calls = semaphores[0]._calls
        if any(semaphore._calls is not self._calls for semaphore in semaphores):
            raise InvalidArgumentError(
                "semaphores", "a driver's, the bridge's and our own need batches of their own; make one for each."
            )
        self._batch = self._calls.prepare([semaphore._handle for semaphore in semaphores])
        self._takes_values = all(semaphore.takes_value for semaphore in semaphores)
        self.max_value = min(semaphore.max_value for semaphore in semaphores)
        self._cannot_wait = next((gap for gap in (one._cannot_wait for one in semaphores) if gap is not None), None)
        self._cannot_signal = next((gap for gap in (one._cannot_signal for one in semaphores) if gap is not None), None)
        self._direct = semaphores[0]._direct
        self._give_wait, self._give_signal = semaphores[0]._give_wait, semaphores[0]._give_signal
        self._lifetimes = [semaphore.lifetime for semaphore in semaphores]
        # One mark for all: each semaphore is released after the batch, and closing one closes the batch.
        self.lifetime = Lifetime("SemaphoreBatch", parents=self._lifetimes)
        self.lifetime.open()
        self._gives(self.lifetime, self.device, {})

    __del__ = Resource.__del__

    def wait(
        self, stream: Stream | object, values: Sequence[int | None] | None = None, *, timeout: float | None = None
    ) -> None:
        """Make `stream` wait for all.

        Parameters
        ----------
        stream : Stream, or torch's, CuPy's, numba's, an int
            Stream of the same device.
        values : sequence of int or None
            One value per semaphore, in the constructor's order; None for a binary one, or for all.
        timeout : float, optional
            Seconds for all together; see `ExternalSemaphore.wait`.

        Raises
        ------
        InvalidArgumentError, UnsupportedError, SemaphoreTimeoutError
            See `ExternalSemaphore.wait`.
        """
        limit = None if timeout is None else [semaphore._check_limit(timeout) for semaphore in self._semaphores][-1]
        numbers = self._check_values(values, self._cannot_wait)
        if limit is not None or not self._direct:  # the host waits for each, and so do stream words and the bridge
            if self.lifetime.state is not LIVE:  # before the first: the stream would have that one's wait
                self._look_closer(check_stream(self.device, stream))
            left, taken = None if limit is None else system.seconds_left(limit), []
            try:
                for semaphore, number in zip(self._semaphores, numbers, strict=True):
                    semaphore.wait(
                        stream, cast(int, number if semaphore.takes_value else None), timeout=left and left()
                    )
                    if left and not semaphore.takes_value:
                        taken.append(semaphore)
            except BaseException:
                for semaphore in taken:  # the caller may try again
                    with suppress(UnsupportedError):  # a sync file stays signalled
                        semaphore.host_signal()
                raise
            return
        pending = Waits()
        pending.semaphore = self._lifetimes[0]  # the semaphore's release waits for the stream, too
        pending.semaphores, pending.values = self._lifetimes, self._given(numbers)
        if type(stream) is not Stream or (known := stream.known) is None:
            known = (stream := check_stream(self.device, stream))._known_as()
        self._enqueue(stream, known, self._noted.get(known), self._give_wait, numbers, pending)

    def signal(self, stream: Stream | object, values: Sequence[int | None] | None = None) -> None:
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
        numbers = self._check_values(values, self._cannot_signal)
        if type(stream) is not Stream or (known := stream.known) is None:
            known = (stream := check_stream(self.device, stream))._known_as()
        noted = self._noted.get(known)
        lasts = (noted and noted[0]) or self._lasts(known)
        if any(map(operator.le, numbers, lasts)):  # in C
            self._check_each(known, numbers, lasts)
        if (noted := self._enqueue(stream, known, noted, self._give_signal, numbers)) is not None:
            told, places = noted
            if told is not None:
                told[:] = numbers
                return
            for number, (told, at) in zip(numbers, places):  # noqa: B905
                told[at] = number

    # -- inside ------------------------------------------------------------------------------------------------

    def _lasts(self, known: KnownStream) -> Sequence[int]:
        """The values that the stream was told to signal last; 0 where it was told none."""
        places = (semaphore._noted.get(known, ([0], 0)) for semaphore in self._semaphores)
        return [values[at] for values, at in places]

    def _check_each(self, known: KnownStream, numbers: Sequence[int], lasts: Sequence[int]) -> None:
        for semaphore, number, last in zip(self._semaphores, numbers, lasts, strict=True):
            if semaphore._grows and number <= last:
                semaphore._check_growth(known, number, last, "values")

    def _look_closer(self, stream: Stream) -> None:
        for semaphore in self._semaphores:
            semaphore._look_closer(stream)

    def _note_use(self, stream: Stream, known: KnownStream) -> tuple[list[int] | None, list[Told]]:
        """Note a stream's first use; return the list of all values, if the batch's semaphores share one, and places."""
        check_stream(self.device, stream)
        for one in [one for one in self._noted.copy() if one.state in GONE]:
            self._noted.pop(one, None)
        places = note_told(self._lifetimes, known)
        values = places[0][0]
        shared = len(places) == len(values) and all(  # the same list: equal ones may be of two batches
            told is values and at == place for place, (told, at) in enumerate(places)
        )
        noted = self._noted[known] = (values if shared else None, places)
        return noted

    def _hold_in(self, graph: Graph) -> None:
        for semaphore in self._semaphores:
            semaphore._hold_in(graph)

    def _check_values(self, values: Sequence[int | None] | None, gap: Capability | None) -> Sequence[int]:
        """Check the values; return them as a driver takes them."""
        told: Any = [None] * len(self._semaphores) if values is None else values
        if not isinstance(told, _SEQUENCES):
            raise ArgumentTypeError("values", f"expected a tuple or a list, got {values!r}.")
        given: tuple[Any, ...] = tuple(told)  # the caller may change a list meanwhile
        if len(given) != len(self._semaphores):
            raise InvalidArgumentError(
                "values", f"expected {len(self._semaphores)}, one a semaphore, got {len(given)}."
            )
        # Sums and minima of ints run in C. A bool is less than 2, and the sum bounds each of its parts.
        try:
            bounded = type(total := sum(given)) is int and total <= self.max_value
            if bounded and gap is None and self._takes_values and min(given) >= 2:
                return given
        except (TypeError, ValueError):  # the closer look below has the words for it
            pass
        return list(map(ExternalSemaphore._checked, self._semaphores, given, repeat(gap)))

    def _given(self, numbers: Sequence[int]) -> Sequence[int | None]:
        """The values for messages: None for a binary semaphore."""
        if self._takes_values:
            return numbers
        return [number if one.takes_value else None for one, number in zip(self._semaphores, numbers, strict=True)]
