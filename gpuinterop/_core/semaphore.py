"""External semaphores, batches of them, and how their calls and a graph's launch are enqueued.

`wait` and `signal` are a hot path: little more than the driver call. The import decides as much as it can in advance.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
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
    GpuInteropError,
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
    OpaqueFd,
    OriginKind,
    SciSync,
    SemaphoreHandle,
    Timeline,
    TimelineFd,
)
from .lifetime import FINAL, LIVE, MARK, Lifetime, locked, note_use, retire
from .release import run_blocked_releases
from .resource import Resource
from .stream import Stream, check_stream
from .streams import CapturedError, KnownStream, Wait, Waits, waiting

if TYPE_CHECKING:
    from ..backend import DriverHandle
    from .device import Device
    from .graph import Graph

K = TypeVar("K")
T = TypeVar("T")

Valued: TypeAlias = (  # semaphores whose calls take a value
    "ExternalSemaphore[Timeline] | ExternalSemaphore[Fence] | ExternalSemaphore[Keyed] | ExternalSemaphore[SciSync]"
)
LastSignalled: TypeAlias = tuple[list[int], int]  # (values, index): calls store the last value that a stream signals

_SEQUENCES = (tuple, list)
_COUNTING = (Timeline, Fence)
_VALUE_NAMES: dict[type, str] = {Keyed: "a key", SciSync: "the address of a fence"}


class SemaphoreCalls:
    """Makes a semaphore's calls: through the driver, stream memory operations, or the bridge."""

    max_value: int = MAX_64  # largest value that a stream can wait for
    blocks: bool = False  # whether `destroy` waits for the whole device
    direct: Backend | None = None  # set if its `wait` and `signal` are the whole call

    prepare: Callable[[Sequence[DriverHandle]], Any]  # prepare a batch for `wait` and `signal`
    wait: Callable[[Any, KnownStream, Sequence[int], Wait], None]  # not set if `direct` is
    signal: Callable[[Any, KnownStream, Sequence[int]], None]  # not set if `direct` is
    destroy: Callable[[DriverHandle], None]  # release a handle that no stream uses any more

    def abandon(self, handle: DriverHandle) -> None:
        """Cancel the pending waits of streams, if possible."""

    def gap(self, cell: tuple[Operation, type[AnySemaphoreHandle]]) -> Capability | None:
        """Return why streams cannot signal, wait, or wait with a timeout; None if they can."""
        return None

    def host_gap(self, handle_type: type[AnySemaphoreHandle]) -> Capability | None:
        """Return why the calling thread cannot read, wait or signal without a stream; None if it can."""
        return None

    host_value: Callable[[Any], int]  # return the counter of a timeline or fence
    host_signal: Callable[[Any, int], None]  # signal from the calling thread
    host_wait: Callable[[Any, int, float], bool]  # block the calling thread; return False after the timeout
    export: Callable[[Any], AnySemaphoreHandle]  # return a new handle; called only for exportable semaphores

    def register(self, semaphore: ExternalSemaphore[Any]) -> None:
        """Remember a new semaphore, and pass on its label for messages."""


class DriverSemaphores(SemaphoreCalls):
    def __init__(self, device: Device) -> None:
        backend = device.driver
        self.device = device
        self.driver = self.direct = backend
        self.prepare, self.destroy = backend.prepare, backend.destroy_semaphore
        if isinstance(backend, HostSemaphoreBackend):
            self.host_value, self.export = backend.host_value, backend.export_semaphore
            self.host_signal, self.host_wait = backend.host_signal, backend.host_wait
        self.blocks = backend.releases_block
        self.register = device._know  # type: ignore[method-assign]

    def abandon(self, handle: DriverHandle) -> None:
        self.driver.abandon_semaphore(handle)

    def gap(self, cell: tuple[Operation, type[AnySemaphoreHandle]]) -> Capability | None:
        capability = self.device.capabilities.of(cell)
        return None if capability else capability

    def host_gap(self, handle_type: type[AnySemaphoreHandle]) -> Capability | None:
        if isinstance(self.driver, HostSemaphoreBackend):
            return None
        return Cell(Operation.WAIT_SEMAPHORE, handle_type).gap(
            Scope.RUNTIME,
            f"{self.device.backend} has no call to read, await or signal an imported semaphore from a thread.",
            "gpuinterop.backend.HostSemaphoreBackend",
            "let a stream wait or signal, and check stream.record().done; or use the API that made the semaphore "
            "(vkGetSemaphoreCounterValue); or share a timeline of create_semaphore(TimelineFd); the CPU can read it.",
        )


class _Semaphore(Lifetime):
    __slots__ = ("counter", "remark", "unsignalled")


class Enqueueable(ABC):
    """An object whose calls a stream executes: one or several semaphores, or a graph."""

    _batch: Any
    _direct: bool  # a wait or signal is a single call of the driver

    def _init_calls(self, marked: Lifetime, device: Device, noted: dict[KnownStream, Any]) -> None:
        """Set the object that each call marks, besides the stream, and where the notes on each stream are."""
        self._marked = marked
        self.device = device
        self.gate = device.gate
        self._notes = noted

    @abstractmethod
    def _check_closely(self, stream: Stream) -> None:
        """Raise if something is closed or of another device, or the stream has failed or begins a capture."""

    @abstractmethod
    def _note_use(self, stream: Stream, known: KnownStream) -> Any:
        """Note a stream's first use, and return the stream's notes."""

    @abstractmethod
    def _hold_in(self, graph: Graph) -> None:
        """Make the graph that captures the call keep what the call uses."""

    def _enqueue(
        self,
        stream: Stream,
        known: KnownStream,
        notes: Any,
        call: Callable[..., None],
        numbers: Sequence[int] = (),
        pending: Wait | None = None,
    ) -> Any:
        """Mark, check, note, call, unmark. Return the stream's notes; None if a graph captures the call.

        `notes` is None before the stream's first use. `call` gets the batch, the stream (its handle, if `call` is the
        driver's), the values, and for a wait the `Wait` (the milliseconds, if `call` is the driver's).
        """
        if pending is not None and (gate := self.gate).delays_waits:
            run_blocked_releases(gate)  # before the marks, because callbacks run here
        marked = self._marked
        calls, streams = marked.calls, known.calls
        calls += MARK
        streams += MARK
        try:
            if (needs_checks := known.needs_checks) or marked.state is not LIVE or stream.lifetime.state is not LIVE:
                self._check_closely(stream)
                known.unfenced = known.thread is not None  # until `after_call` records an event
            if notes is None:  # before the call, because the release must wait even if the call fails half-way
                notes = self._note_use(stream, known)
            if needs_checks and (graph := known.graph) is not None:  # the graph's launches will wait and signal
                self._hold_in(graph)
                notes = None
            elif pending is not None:
                known.waits.append(pending)  # as `KnownStream.note` does
                waiting[known] = None  # before the check of the gate; module `streams` says why
                if gate.shut:
                    gate.let_releases_end()
            if pending is None:
                call(self._batch, known.handle if self._direct else known, numbers)
            elif self._direct:
                call(self._batch, known.handle, numbers, pending.ms)
            else:
                call(self._batch, known, numbers, pending)
            if (needs_checks or pending is not None) and len(known.waits) > known.limit:
                if pending is not None:
                    pending.enqueued = True
                known.after_call()
        except GpuInteropError:  # nothing was enqueued
            if pending is not None:
                pending.passed = True
            raise
        finally:
            if pending is not None:
                pending.enqueued = True
            del calls[-1], streams[-1]
        return notes


class ExternalSemaphore(Resource, Enqueueable, Generic[K]):
    """A semaphore shared with another API or process. `Device.import_semaphore` and `create_semaphore` return it.

    `K` is its kind. Calls with ``Timeline`` and ``Fence`` take a value, with ``Keyed`` a key, with ``SciSync`` the
    address of an ``NvSciSyncFence``, and with ``Binary`` no value.

    `close()` does not cancel a stream's pending waits; no GPU driver does. ``close(timeout=...)`` waits for them, and
    cancels them after the timeout if the driver can (on the host backend, the stream then fails with
    `ResourceClosedError`). `close()` cancels threads in `host_wait` at once. The native release follows when no stream
    uses the semaphore (``cuDestroyExternalSemaphore`` / ``hipDestroyExternalSemaphore``).

    Attributes
    ----------
    device : Device
        Device whose streams use it.
    handle_type : type
        Type of the imported handle, or of the handles that `export` returns.
    kind : type
        ``Binary``, ``Timeline``, ``Fence``, ``Keyed`` or ``SciSync``.

    Notes
    -----
    **If the process that should signal has exited**, the stream waits forever: neither the driver nor gpuinterop
    notices. `Stream.synchronize` with a timeout names the semaphore and the value. To let the stream continue, signal
    the value with `host_signal` or on another stream, before you close the semaphore. Then discard the results of the
    work after the wait, because it ran on unfinished data. To be notified at once, import a timeline of
    `create_semaphore` with ``Bridge.import_semaphore(handle, peer=pid)``: the stream then continues by itself and fails
    with `PeerError`.

    Examples
    --------
    >>> with device.create_semaphore(gi.TimelineFd) as semaphore:
    ...     semaphore.wait(stream, 1)
    ...     buffer.fill(7, stream=stream)
    ...     semaphore.signal(stream, 2)
    ...     semaphore.host_signal(1)  # the stream continues
    ...     semaphore.host_wait(2, timeout=10)
    ...     semaphore.value
    2
    """

    lifetime: _Semaphore
    _promised = 0  # the last value that a handoff told the graphics side to signal

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
        self._init_calls(lifetime, device, lifetime.uses)
        self._calls = calls
        self._batch: Any = None
        self._exportable = exportable
        self.handle_type = handle_type
        self.kind: type = handle_type.kind
        self.takes_value = self.kind is not Binary
        self._grows = self.kind is Timeline
        self.max_value = calls.max_value
        # Bound here, so that the hot path calls the driver directly.
        self._direct = calls.direct is not None
        target = calls.direct or calls
        self._call_wait: Callable[..., None] = target.wait
        self._call_signal: Callable[..., None] = target.signal
        self._cannot_on_host = calls.host_gap(handle_type)
        lifetime.counter = calls.host_value if self._grows and self._cannot_on_host is None else None
        lifetime.unsignalled = lifetime.remark = None
        self._cannot_signal, self._cannot_wait, self._cannot_time_out = (
            calls.gap((operation, handle_type))
            for operation in (Operation.SIGNAL_SEMAPHORE, Operation.WAIT_SEMAPHORE, Operation.WAIT_TIMEOUT)
        )
        # Values up to these limits need no further checks; -1 if each call must be checked.
        self._waits_below = calls.max_value if self.takes_value and self._cannot_wait is None else -1
        self._signals_below = calls.max_value if self.takes_value and self._cannot_signal is None else -1

    def _make(self, call: Callable[[], DriverHandle]) -> None:
        try:
            self._batch = self._calls.prepare([self.lifetime.create(call)])
            self._calls.register(self)
        except BaseException:
            retire(self.lifetime)
            raise

    @overload
    def wait(self: ExternalSemaphore[Binary], stream: Stream | object, *, timeout: float | None = None) -> None: ...
    @overload
    def wait(self: Valued, stream: Stream | object, value: int, *, timeout: float | None = None) -> None: ...
    def wait(self, stream: Stream | object, value: int | None = None, *, timeout: float | None = None) -> None:
        """Make `stream` wait before its later work (``cu/hipWaitExternalSemaphoresAsync``).

        Returns at once, unless you pass `timeout`. On stream 0 of the host backend, the calling thread itself waits.

        Parameters
        ----------
        stream : Stream, int, or stream of torch, CuPy or numba
        value : int
            Timeline and fence: the counter must reach at least this value. Keyed mutex: the key to acquire with. Binary
            semaphore: None; the wait consumes its signal.
        timeout : float, optional
            Seconds that the calling thread waits first, until the stream's wait would succeed. For a binary semaphore,
            the thread consumes the signal itself. This works for semaphores that support `host_wait`. A keyed mutex
            instead limits the driver's own wait, and the call returns at once.

        Raises
        ------
        InvalidArgumentError
            `value` does not fit the kind, `stream` belongs to another device, or it is being captured and you pass
            `timeout`.
        UnsupportedError
            The device cannot wait for this kind, or not with a timeout (`Operation.WAIT_TIMEOUT`).
        SemaphoreTimeoutError
            `timeout` seconds passed. Nothing was enqueued and no signal was consumed.
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
        self._enqueue(stream, known, self._notes.get(known), self._call_wait, (number,), pending)

    @overload
    def signal(self: ExternalSemaphore[Binary], stream: Stream | object) -> None: ...
    @overload
    def signal(self: Valued, stream: Stream | object, value: int) -> None: ...
    def signal(self, stream: Stream | object, value: int | None = None) -> None:
        """Make `stream` signal after its earlier work (``cu/hipSignalExternalSemaphoresAsync``). Returns at once.

        Parameters
        ----------
        stream : Stream, int, or stream of torch, CuPy or numba
        value : int
            Timeline and fence: the new value of the counter; a timeline only grows. Keyed mutex: the key to release
            with. Binary semaphore: None.

        Raises
        ------
        InvalidArgumentError
            `value` does not fit the kind, or `stream` belongs to another device. Also if a timeline would not grow on
            this stream: drivers accept that, but later waits never end.
        UnsupportedError
            The device cannot signal this kind.
        """
        number = (
            value
            if type(value) is int and 0 <= value <= self._signals_below
            else self._checked(value, self._cannot_signal)
        )
        if type(stream) is not Stream or (known := stream.known) is None:
            known = (stream := check_stream(self.device, stream))._known_as()
        notes = self._notes.get(known)
        if notes is not None:
            values, at = notes
            if number <= values[at] and self._grows:
                self._check_growth(known, number, values[at], "value")
        if (notes := self._enqueue(stream, known, notes, self._call_signal, (number,))) is not None:
            values, at = notes
            values[at] = number

    @property
    def value(self) -> int:
        """The counter of a timeline or fence (64 bits), read by the calling thread without a stream.

        It does not include signals that streams have not reached yet. The calling thread sees everything that was
        written before the signals that it includes.

        Raises
        ------
        InvalidArgumentError
            The semaphore is of a kind without a counter.
        UnsupportedError
            The CPU cannot read it, as for `host_wait`; or a bridged semaphore's `Endpoint` has no `counter`.
        """
        self._check_open()
        if self.kind not in _COUNTING:
            raise InvalidArgumentError(
                "semaphore", f"expected a timeline or a fence, got {self.label}, which has no counter; wait for it."
            )
        self._check_host_side()
        counter = self.lifetime.use(self._calls.host_value)
        system.fence()  # loads after this see what was written before the signal
        return counter

    def host_wait(self, value: int | None = None, *, timeout: float | None = None) -> None:
        """Block the calling thread until the semaphore is signalled, without using a stream. For `value`, see `wait`.

        Raises
        ------
        UnsupportedError
            The backend cannot wait for semaphores without a stream.
        SemaphoreTimeoutError
            `timeout` seconds passed.
        ResourceClosedError
            The semaphore is closed, or was closed meanwhile.
        """
        limit = check_timeout(timeout)
        left = system.seconds_left(limit)

        def wait(handle: DriverHandle, number: int) -> bool:
            while True:  # in slices, so that close() can end the wait
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
        """Signal from the calling thread at once, without using a stream. For `value`, see `signal`.

        Raises
        ------
        UnsupportedError
            The backend cannot signal semaphores without a stream.
        """
        self._on_host(value, lambda handle, number: self._calls.host_signal(handle, number))  # noqa: PLW0108 - or none

    def _on_host(self, value: int | None, call: Callable[[Any, int], T]) -> T:
        number = self._checked(value)
        self._check_open()
        self._check_host_side()
        return self.lifetime.use(lambda handle: call(handle, number))

    @overload
    def export(self: ExternalSemaphore[Timeline]) -> TimelineFd: ...
    @overload
    def export(self: ExternalSemaphore[Binary]) -> OpaqueFd: ...
    @overload
    def export(self) -> SemaphoreHandle[K]: ...
    def export(self) -> Any:
        """Return a new handle that you own, of the type passed to `Device.create_semaphore`, with its origin.

        Raises
        ------
        InvalidArgumentError
            The semaphore was imported.
        """
        self._check_open()
        if not self._exportable:
            raise InvalidArgumentError(
                "semaphore",
                f"{self.label} was imported; duplicate() the handle before the import, or create the semaphore here.",
            )
        self.lifetime.gate = self.gate if self._calls.blocks else None  # another process can now use the semaphore
        handle = self.lifetime.use(self._calls.export)
        # The core's timelines are in host memory, so any device can import them.
        device = self.device.identity if isinstance(self._calls, DriverSemaphores) else None
        handle.origin = HandleOrigin(kind=origin_kind(self.kind), device=device, trusted=True)
        return handle

    def close(self, timeout: float | None = None) -> None:
        """Close the semaphore. The class describes pending waits; for `timeout`, see `Resource.close`."""
        try:
            super().close(timeout)
        except ResourceBusyError:
            self.lifetime.try_use(self._calls.abandon, None)
            raise

    def _check_host_side(self) -> None:
        if self._cannot_on_host is not None:
            raise UnsupportedError(self._cannot_on_host, context=f"{self.device.name}, without a stream")

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
        self._enqueue(stream, known, self._notes.get(known), self._call_wait, (number,), pending)

    def _check_closely(self, stream: Stream) -> None:
        self._check_open()
        check_stream(self.device, stream)
        stream._known_as().refuse_capture_change()

    def _note_use(self, stream: Stream, known: KnownStream) -> LastSignalled:
        check_stream(self.device, stream)
        return note_signalled([self.lifetime], known)[0]

    def _hold_in(self, graph: Graph) -> None:
        graph._hold(self.lifetime)
        graph._semaphores.append(self)

    def _check_growth(self, known: KnownStream, number: int, last: int, argument: str) -> None:
        """Raise if a stream would signal `number`, which is not above `last`, its last value."""
        self._check_open()
        if not known.is_capturing():
            raise InvalidArgumentError(
                argument,
                f"{number} after {last} on the same stream for {self.label}: a timeline only grows; signal {last + 1} "
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
        limit = check_timeout(timeout)
        if limit is not None and self._cannot_time_out is not None:
            raise UnsupportedError(self._cannot_time_out, context=self.device.name)
        return limit

    def _last_signalled(self) -> int:
        return max((values[at] for values, at in self.lifetime.uses.copy().values()), default=0)

    def _forget_values(self) -> None:
        """Forget the signalled values, because a capture noted some that its graph has not signalled."""
        for values, at in self.lifetime.uses.copy().values():
            values[at] = 0


@locked
def note_signalled(semaphores: Sequence[Lifetime], stream: KnownStream) -> list[LastSignalled]:
    """Note a stream's use of semaphores. Return for each where the last value that the stream signals is stored.

    Semaphores that are noted together share one list, so that a batch stores all values in one C call.
    """
    new = [semaphore for semaphore in semaphores if stream not in semaphore.uses]
    values = [0] * len(new)
    for at, semaphore in enumerate(new):
        note_use(semaphore, stream, (values, at))
    return [semaphore.uses[stream] for semaphore in semaphores]


def origin_kind(kind: type) -> OriginKind:
    """Return the origin kind of a semaphore's handles; OTHER if origins have no word for the kind."""
    return OriginKind.__members__.get(kind.__name__.upper(), OriginKind.OTHER)


class SemaphoreBatch(NoCopy, Enqueueable):
    """Several semaphores of one device that one driver call waits for or signals.

    You still own them; the batch needs no `close`. They can be of different kinds.

    Raises
    ------
    InvalidArgumentError
        The semaphores belong to several devices, one is passed twice, or they are a mix of the driver's, a bridge's and
        gpuinterop's own timelines.

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
                "semaphores", "expected all from the driver, all bridged or all own timelines; make a batch for each."
            )
        self._batch = self._calls.prepare([semaphore._handle for semaphore in semaphores])
        self._takes_values = all(semaphore.takes_value for semaphore in semaphores)
        self.max_value = min(semaphore.max_value for semaphore in semaphores)
        gaps = zip(*((semaphore._cannot_wait, semaphore._cannot_signal) for semaphore in semaphores), strict=True)
        self._cannot_wait, self._cannot_signal = (next((gap for gap in each if gap is not None), None) for each in gaps)
        self._direct = semaphores[0]._direct
        self._call_wait, self._call_signal = semaphores[0]._call_wait, semaphores[0]._call_signal
        self._lifetimes = [semaphore.lifetime for semaphore in semaphores]
        # One mark for all: each semaphore is released after the batch, and closing a semaphore closes the batch.
        self.lifetime = Lifetime("SemaphoreBatch", parents=self._lifetimes)
        self.lifetime.open()
        self._init_calls(self.lifetime, self.device, {})

    __del__ = Resource.__del__

    def wait(
        self, stream: Stream | object, values: Sequence[int | None] | None = None, *, timeout: float | None = None
    ) -> None:
        """Make `stream` wait for all semaphores. Raises as `ExternalSemaphore.wait`.

        Parameters
        ----------
        stream : Stream, int, or stream of torch, CuPy or numba
        values : sequence of int or None
            One per semaphore, in the constructor's order; None for a binary semaphore, or if all are binary.
        timeout : float, optional
            Seconds in total; see `ExternalSemaphore.wait`.
        """
        limit = None if timeout is None else [semaphore._check_limit(timeout) for semaphore in self._semaphores][-1]
        numbers = self._check_values(values, self._cannot_wait)
        if limit is not None or not self._direct:  # one wait per semaphore
            if self.lifetime.state is not LIVE:  # checked first, so that the stream gets all waits or none
                self._check_closely(check_stream(self.device, stream))
            left, taken = None if limit is None else system.seconds_left(limit), []
            try:
                for semaphore, number in zip(self._semaphores, numbers, strict=True):
                    semaphore.wait(
                        stream, cast(int, number if semaphore.takes_value else None), timeout=left and left()
                    )
                    if left and not semaphore.takes_value:
                        taken.append(semaphore)
            except BaseException:
                for semaphore in taken:  # give the signals back, so that the caller can try again
                    with suppress(UnsupportedError):  # a sync file stays signalled
                        semaphore.host_signal()
                raise
            return
        pending = Waits()
        pending.semaphore = self._lifetimes[0]  # its release waits for the stream too
        pending.semaphores, pending.values = self._lifetimes, self._given(numbers)
        if type(stream) is not Stream or (known := stream.known) is None:
            known = (stream := check_stream(self.device, stream))._known_as()
        self._enqueue(stream, known, self._notes.get(known), self._call_wait, numbers, pending)

    def signal(self, stream: Stream | object, values: Sequence[int | None] | None = None) -> None:
        """Make `stream` signal all semaphores. Returns at once. If a value is refused, none is signalled.

        For the parameters see `wait`. Raises as `ExternalSemaphore.signal`.
        """
        numbers = self._check_values(values, self._cannot_signal)
        if type(stream) is not Stream or (known := stream.known) is None:
            known = (stream := check_stream(self.device, stream))._known_as()
        notes = self._notes.get(known)
        lasts = (notes and notes[0]) or self._lasts(known)
        if any(map(operator.le, numbers, lasts)):  # runs in C
            self._check_each(known, numbers, lasts)
        if (notes := self._enqueue(stream, known, notes, self._call_signal, numbers)) is not None:
            shared, places = notes
            if shared is not None:
                shared[:] = numbers
                return
            for number, (last, at) in zip(numbers, places):  # noqa: B905
                last[at] = number

    def _lasts(self, known: KnownStream) -> Sequence[int]:
        """Return the values that the stream signals last; 0 if there was none."""
        places = (semaphore._notes.get(known, ([0], 0)) for semaphore in self._semaphores)
        return [values[at] for values, at in places]

    def _check_each(self, known: KnownStream, numbers: Sequence[int], lasts: Sequence[int]) -> None:
        for semaphore, number, last in zip(self._semaphores, numbers, lasts, strict=True):
            if semaphore._grows and number <= last:
                semaphore._check_growth(known, number, last, "values")

    def _check_closely(self, stream: Stream) -> None:
        for semaphore in self._semaphores:
            semaphore._check_closely(stream)

    def _note_use(self, stream: Stream, known: KnownStream) -> tuple[list[int] | None, list[LastSignalled]]:
        """Note a stream's first use. Return the list of all values, if the semaphores share one, and their places."""
        check_stream(self.device, stream)
        for noted in self._notes.copy():
            if noted.state in FINAL:
                self._notes.pop(noted, None)
        places = note_signalled(self._lifetimes, known)
        values = places[0][0]
        shared = len(places) == len(values) and all(  # `is`: equal lists can belong to two batches
            last is values and at == place for place, (last, at) in enumerate(places)
        )
        notes = self._notes[known] = (values if shared else None, places)
        return notes

    def _hold_in(self, graph: Graph) -> None:
        for semaphore in self._semaphores:
            semaphore._hold_in(graph)

    def _check_values(self, values: Sequence[int | None] | None, gap: Capability | None) -> Sequence[int]:
        listed: Any = [None] * len(self._semaphores) if values is None else values
        if not isinstance(listed, _SEQUENCES):
            raise ArgumentTypeError("values", f"expected a tuple or a list, got {listed!r}.")
        given: tuple[Any, ...] = tuple(listed)  # a copy: the caller may change a list
        if len(given) != len(self._semaphores):
            raise InvalidArgumentError(
                "values", f"expected {len(self._semaphores)}, one for each semaphore, got {len(given)}."
            )
        # Sum and minimum of ints run in C. Minimum 2 excludes bools, and the sum limits each value.
        try:
            bounded = type(total := sum(given)) is int and total <= self.max_value
            if bounded and gap is None and self._takes_values and min(given) >= 2:
                return given
        except (TypeError, ValueError):  # `_checked` below raises the right error
            pass
        return list(map(ExternalSemaphore._checked, self._semaphores, given, repeat(gap)))

    def _given(self, numbers: Sequence[int]) -> Sequence[int | None]:
        """The values for messages: None for a binary semaphore."""
        if self._takes_values:
            return numbers
        each = zip(self._semaphores, numbers, strict=True)
        return [number if semaphore.takes_value else None for semaphore, number in each]
