"""External semaphores and batches of them.

`wait` and `signal` are the hot path: the driver call and little else. What can be decided at import is decided there
(capability, kind, the batch of one); what is left is one check that the objects fit together.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from ..backend import HostSemaphoreBackend
from ..capabilities import Capability, Operation
from ..errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    ResourceBusyError,
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
from .resource import Resource, check_int, check_timeout
from .stream import Stream, check_stream

if TYPE_CHECKING:
    from ..backend import Native
    from .device import Device

K = TypeVar("K")

_MAX_VALUE = 2**64 - 1
_MAX_MILLISECONDS = 2**31 - 1
_NOWHERE = object()
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
    """What stands in for the driver where a semaphore is not the driver's: stream words, or the bridge.

    Natives are whatever it has made its semaphores of; a batch is a sequence of them.
    """

    max_value: int = _MAX_VALUE
    """The largest value that streams can wait for."""
    timeout_gap: Capability | None = None
    """Why a stream's wait takes no time-out."""

    @abstractmethod
    def wait(self, batch: Sequence[Native], stream: Stream, values: Sequence[int], timeout_ms: int | None) -> None:
        """Enqueue."""

    @abstractmethod
    def signal(self, batch: Sequence[Native], stream: Stream, values: Sequence[int]) -> None:
        """Enqueue."""

    @abstractmethod
    def destroy(self, native: Native) -> None:
        """Release; no stream uses it any more."""

    @abstractmethod
    def abandon(self, native: Native) -> None:
        """Cancel what is pending, where that can be."""

    def export(self, native: Native) -> AnySemaphoreHandle:
        """A new handle that the caller owns; asked only where semaphores are made exportable."""
        raise NotImplementedError

    @abstractmethod
    def host_signal(self, native: Native, value: int) -> None:
        """Signal from the calling thread."""

    @abstractmethod
    def host_wait(self, native: Native, value: int, deadline: float | None) -> bool:
        """Block the calling thread; False when ``time.monotonic()`` has reached `deadline`."""


class ExternalSemaphore(Resource, Generic[K]):
    """A semaphore that another API or process shares. Made by `Device.import_semaphore` or `create_semaphore`.

    `K` is its kind: ``Binary`` calls take no value, ``Timeline`` and ``Fence`` calls one, ``Keyed`` calls a key,
    ``SciSync`` calls the address of an ``NvSciSyncFence``.

    `close()` leaves a stream's pending waits pending, as every GPU driver does; ``close(timeout=...)`` gives them that
    long and then cancels them where the driver can (the host backend: the stream fails with `ResourceClosedError`). A
    thread in `host_wait` is cancelled by `close()` at once.
    """

    _noun = "ExternalSemaphore"

    def __init__(
        self,
        device: Device,
        native: Native,
        handle_type: type[SemaphoreHandle[K]],
        *,
        exportable: bool = False,
        keepalive: object = None,
        calls: SemaphoreCalls | None = None,
        parent: Resource | None = None,
        label: str = "",
    ) -> None:
        backend = device._backend
        destroy = backend.destroy_semaphore if calls is None else calls.destroy
        # The streams that used it, by pointer: the latest wrapper of each, and the last value signalled there.
        used: dict[int, tuple[Stream, int]] = {}

        def release(_keepalive: object = keepalive) -> None:
            destroy(native)

        # Before the rest: a parent that another thread has closed meanwhile ends this one in its constructor.
        self._used = used
        self._device = device
        self._backend = backend
        self._native = native
        self._exportable = exportable
        self._host_waits: dict[int, None] = {}
        self.handle_type = handle_type
        self.kind: type = handle_type.kind
        self._calls = calls
        super().__init__(
            device._reclaimer,
            release,
            parents=() if parent is None else (parent,),
            label=label or f"{handle_type.type_name} semaphore",
            streams=lambda: ([stream for stream, _ in list(used.values())], ()),
            blocks=True,
        )
        self._takes_value = self.kind is not Binary
        self._grows = self.kind is Timeline
        self._cannot_signal: Capability | None = None
        self._cannot_wait: Capability | None = None
        if calls is None:
            self._batch = backend.prepare([native])
            self._max_value = _MAX_VALUE
            device._know(self)
            self._cannot_signal = _gap(device, Operation.SIGNAL_SEMAPHORE, handle_type)
            self._cannot_wait = _gap(device, Operation.WAIT_SEMAPHORE, handle_type)
            self._cannot_time_out = _gap(device, Operation.WAIT_TIMEOUT, handle_type)
        else:  # who has made it has seen that it can do both
            self._batch = [native]
            self._max_value = calls.max_value
            self._cannot_time_out = calls.timeout_gap
        # What a stream's `_open_on` is compared with: one look says that both are open, of one device, and able.
        self._signal_on: object = device if self._cannot_signal is None else _NOWHERE
        self._wait_on: object = device if self._cannot_wait is None else _NOWHERE
        if self._closed:  # before these two were set: its parent was, by another thread
            self._signal_on = self._wait_on = _NOWHERE

    @property
    def device(self) -> Device:
        return self._device

    @property
    def takes_timeout(self) -> bool:
        """Whether a stream's `wait` takes a time-out."""
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
        """Enqueue: what follows on `stream` runs after the semaphore is signalled. Returns at once.

        ``cuWaitExternalSemaphoresAsync`` / ``hipWaitExternalSemaphoresAsync``

        Parameters
        ----------
        stream : Stream
            Of the same device.
        value : int
            Timeline, fence: wait until the counter is at least this. Keyed mutex: the key to acquire with. None for
            a binary semaphore, whose signal the wait consumes.
        timeout : float, optional
            Seconds; only where the driver has it (`Operation.WAIT_TIMEOUT`: keyed mutexes, the host backend). On
            expiry the stream fails with `SemaphoreTimeoutError`.

        Raises
        ------
        InvalidArgumentError
            A value for a binary semaphore, none for another, one below 0, or a stream of another device.
        UnsupportedError
            The device cannot wait for this kind, or not with a time-out.
        """
        if type(stream) is not Stream or stream._open_on is not self._wait_on:
            self._refuse(stream, self._cannot_wait)
        if type(value) is int and self._takes_value and 0 <= value <= self._max_value:
            number = value
        else:
            number = self._check_value(value)
        milliseconds = None if timeout is None else self._milliseconds(timeout)
        # Before the call: whatever interrupts this thread behind it, the release waits for the stream.
        if (entry := self._used.get(stream._ptr)) is None or entry[0] is not stream:
            self._used[stream._ptr] = (stream, self._last_value(stream))
        gate, thread = self._reclaimer.gate, get_ident()
        gate.waiting[thread] = None  # before the look at `releasing`: see Gate
        try:
            if gate.releasing:
                gate.let_release_end()
            if self._calls is None:
                self._backend.wait(self._batch, stream._native, (number,), milliseconds)
            else:
                self._calls.wait(self._batch, stream, (number,), milliseconds)
            stream._waits.append((self._label, value))
        except KeyboardInterrupt:  # behind the call, perhaps
            stream._waits.append((self._label, value))
            raise
        finally:
            gate.waiting.pop(thread, None)
        if stream._graph is not None:
            stream._graph.hold(self)

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
        """Enqueue: signal the semaphore when the work before it on `stream` is done. Returns at once.

        ``cuSignalExternalSemaphoresAsync`` / ``hipSignalExternalSemaphoresAsync``

        Parameters
        ----------
        stream : Stream
            Of the same device.
        value : int
            Timeline, fence: the counter's new value; a timeline only grows. Keyed mutex: the key to release with.
            None for a binary semaphore.

        Raises
        ------
        InvalidArgumentError
            A value for a binary semaphore, none for another, a timeline that would not grow on this stream (drivers
            accept that, and later waits never return), or a stream of another device.
        UnsupportedError
            The device cannot signal this kind.
        """
        if type(stream) is not Stream or stream._open_on is not self._signal_on:
            self._refuse(stream, self._cannot_signal)
        if type(value) is int and self._takes_value and 0 <= value <= self._max_value:
            number = value
        else:
            number = self._check_value(value)
        if self._grows and number <= (last := self._last_value(stream)) and not stream.capturing:
            raise InvalidArgumentError(
                "value", f"{number} after {last} on the same stream: a timeline only grows; signal {last + 1} or more."
            )
        if (entry := self._used.get(stream._ptr)) is None or entry[0] is not stream:  # as for a wait
            self._used[stream._ptr] = (stream, self._last_value(stream))
        if self._calls is None:
            self._backend.signal(self._batch, stream._native, (number,))
        else:
            self._calls.signal(self._batch, stream, (number,))
        if stream._graph is not None:  # signalled by its launches, not now
            stream._graph.hold(self)
            number = self._last_value(stream)
        self._used[stream._ptr] = (stream, number)

    # -- on the calling thread -----------------------------------------------------------------------------------

    def host_wait(self, value: int | None = None, *, timeout: float | None = None) -> None:
        """Block the calling thread until the semaphore is signalled; no stream is involved.

        Raises
        ------
        UnsupportedError
            The backend's semaphores cannot be waited for without a stream.
        SemaphoreTimeoutError
            `timeout` seconds passed.
        """
        number = self._check_value(value)
        limit = check_timeout(timeout)
        with self._in_use():
            serial = threading.get_ident()
            self._host_waits[serial] = None
            try:
                self._check_open()  # again: a close() of just before has not seen this thread, one from now on does
                if self._calls is None:
                    done = self._host_backend().host_wait(self._native, number, limit)
                else:
                    deadline = None if limit is None else time.monotonic() + limit
                    done = self._calls.host_wait(self._native, number, deadline)
            finally:
                del self._host_waits[serial]
        if not done:
            raise SemaphoreTimeoutError(
                f"{self._label} was not signalled{f' to {value}' if self._takes_value else ''} in {timeout:g} s; "
                "is the other side alive?"
            )

    def host_signal(self, value: int | None = None) -> None:
        """Signal from the calling thread, at once; no stream is involved.

        Raises
        ------
        UnsupportedError
            The backend's semaphores cannot be signalled without a stream.
        """
        number = self._check_value(value)
        with self._in_use():
            if self._calls is None:
                self._host_backend().host_signal(self._native, number)
            else:
                self._calls.host_signal(self._native, number)

    def export(self) -> SemaphoreHandle[K]:
        """A new handle that the caller owns; only of semaphores made by `Device.create_semaphore`."""
        self._check_open()
        if not self._exportable:
            raise InvalidArgumentError(
                "semaphore",
                f"{self._label} was imported; duplicate() the handle before the import, or create the semaphore here.",
            )
        with self._in_use():
            if self._calls is None:
                handle: AnySemaphoreHandle = self._host_backend().export_semaphore(self._native)
            else:
                handle = self._calls.export(self._native)
        # One of our own lies in no device's memory: any device takes it.
        device = self._device.identity if self._calls is None else None
        handle.origin = HandleOrigin(kind=origin_kind(self.kind), device=device, trusted=True)
        return handle

    def close(self, timeout: float | None = None) -> None:
        """End use at once; see the class for pending waits, and `Resource.close` for `timeout`."""
        try:
            super().close(timeout)
        except ResourceBusyError:
            self._abandon()
            raise

    def check_host_side(self) -> None:
        """Raise `UnsupportedError` where `host_wait` and `host_signal` would."""
        if self._calls is None:
            self._host_backend()

    # -- inside ------------------------------------------------------------------------------------------------

    def _host_backend(self) -> HostSemaphoreBackend:
        if not isinstance(self._backend, HostSemaphoreBackend):
            found = self._device.capabilities.of((Operation.CREATE_SEMAPHORE, self.handle_type))
            raise UnsupportedError(found, context=f"{self._device.name}, without a stream")
        return self._backend

    def _check_value(self, value: int | None) -> int:
        if not self._takes_value:
            if value is not None:
                raise InvalidArgumentError(
                    "value", f"a binary semaphore takes none, not {value!r}; is the handle a timeline's (TimelineFd)?"
                )
            return 0
        if value is None:
            raise InvalidArgumentError(
                "value",
                f"a {self.kind.__name__.lower()} semaphore wants {_VALUE_NAMES[self.kind]}; "
                "is the handle a binary one's (OpaqueFd)?",
            )
        number = check_int(value, "value")
        if not 0 <= number <= self._max_value:
            raise InvalidArgumentError(
                "value", f"must be 0 to 2**{self._max_value.bit_length()} - 1 for {self._label}, not {number}."
            )
        return number

    def _milliseconds(self, timeout: float) -> int | None:
        seconds = check_timeout(timeout)
        if self._cannot_time_out is not None:
            raise UnsupportedError(self._cannot_time_out, context=self._device.name)
        return None if seconds is None else min(round(seconds * 1000), _MAX_MILLISECONDS)

    def _refuse(self, stream: object, gap: Capability | None) -> None:
        self._check_open()
        if gap is not None:
            raise UnsupportedError(gap, context=self._device.name)
        check_stream(self._device, stream)

    def _last_value(self, stream: Stream) -> int:
        """The last value signalled on this stream, by whatever wrapper; 0, where a timeline starts, before that."""
        entry = self._used.get(stream._ptr)
        # A closed stream's number may be another stream's by now.
        return 0 if entry is None or (entry[0] is not stream and entry[0].closed and entry[0]._owned) else entry[1]

    def _last_signalled(self) -> int:
        """The largest value that streams were given to signal here."""
        return max((value for _, value in list(self._used.values())), default=0)

    def _forget_values(self) -> None:
        """Begin anew with what grows: a capture noted values here that nobody has signalled."""
        for pointer, (stream, _) in list(self._used.items()):
            self._used[pointer] = (stream, 0)

    def _ended(self) -> None:
        self._signal_on = self._wait_on = _NOWHERE
        if self._host_waits:  # threads that only wait for what will not be used any more
            self._abandon()

    def _abandon(self) -> None:
        if self._calls is None:
            self._backend.abandon_semaphore(self._native)
        else:
            self._calls.abandon(self._native)


def origin_kind(kind: type) -> OriginKind:
    """What the origin of a handle of such a semaphore says."""
    return _ORIGINS.get(kind, OriginKind.OTHER)


def _gap(device: Device, operation: Operation, handle_type: type[AnySemaphoreHandle]) -> Capability | None:
    found = device.capabilities.of((operation, handle_type))
    return None if found else found


class SemaphoreBatch:
    """Several semaphores of one device in one driver call.

    Parameters
    ----------
    *semaphores : ExternalSemaphore
        They stay their owners': the batch has nothing to close.
    """

    def __init__(self, *semaphores: ExternalSemaphore[Any]) -> None:
        if not semaphores:
            raise InvalidArgumentError("semaphores", "a batch has one or more.")
        for semaphore in semaphores:
            if not isinstance(semaphore, ExternalSemaphore):
                raise ArgumentTypeError("semaphores", f"a {type(semaphore).__name__} is no ExternalSemaphore.")
            semaphore._check_open()
            if semaphore._device is not semaphores[0]._device:
                raise InvalidArgumentError("semaphores", "belong to different devices; make a batch for each.")
        if len(set(map(id, semaphores))) != len(semaphores):
            raise InvalidArgumentError("semaphores", "one of them is given twice.")
        self._semaphores = semaphores
        self._device = semaphores[0]._device
        self._backend = self._device._backend
        self._calls = semaphores[0]._calls
        if any(semaphore._calls is not self._calls for semaphore in semaphores):
            raise InvalidArgumentError(
                "semaphores", "a driver's, the bridge's and our own go into batches of their own: make one for each."
            )
        natives = [semaphore._native for semaphore in semaphores]
        self._batch = self._backend.prepare(natives) if self._calls is None else natives

    def wait(self, stream: Stream, values: Sequence[int | None] | None = None, *, timeout: float | None = None) -> None:
        """Wait for all; `values` in the order of the constructor, None where one is binary."""
        numbers = self._check(stream, values, Operation.WAIT_SEMAPHORE)
        milliseconds = None
        if timeout is not None:
            for semaphore in self._semaphores:
                milliseconds = semaphore._milliseconds(timeout)
        self._note_use(stream)
        with self._device._reclaimer.gate.enqueuing_wait():
            waits = [
                (semaphore._label, number if semaphore._takes_value else None)
                for semaphore, number in zip(self._semaphores, numbers, strict=True)
            ]
            try:
                if self._calls is None:
                    self._backend.wait(self._batch, stream._native, numbers, milliseconds)
                else:
                    self._calls.wait(self._batch, stream, numbers, milliseconds)
            except BaseException:  # it may be waiting for those before the one that failed
                if not stream.capturing:
                    stream._waits.extend(waits)
                raise
            stream._waits.extend(waits)
        for semaphore in self._semaphores:
            if stream._graph is not None:
                stream._graph.hold(semaphore)

    def signal(self, stream: Stream, values: Sequence[int | None] | None = None) -> None:
        """Signal all; `values` in the order of the constructor, None where one is binary.

        Nothing is signalled when one value is refused.
        """
        numbers = self._check(stream, values, Operation.SIGNAL_SEMAPHORE)
        for semaphore, number in zip(self._semaphores, numbers, strict=True):
            if semaphore._grows and number <= (last := semaphore._last_value(stream)) and not stream.capturing:
                raise InvalidArgumentError(
                    "values", f"{number} after {last} on the same stream for {semaphore._label}: a timeline only grows."
                )
        self._note_use(stream)
        if self._calls is None:
            self._backend.signal(self._batch, stream._native, numbers)
        else:
            self._calls.signal(self._batch, stream, numbers)
        for semaphore, number in zip(self._semaphores, numbers, strict=True):
            if stream._graph is not None:
                stream._graph.hold(semaphore)
                number = semaphore._last_value(stream)
            semaphore._used[stream._ptr] = (stream, number)

    def _note_use(self, stream: Stream) -> None:
        """Before the call, which may fail half-way: the releases wait for the stream."""
        for semaphore in self._semaphores:
            semaphore._used[stream._ptr] = (stream, semaphore._last_value(stream))

    def _check(self, stream: Stream, values: Sequence[int | None] | None, operation: Operation) -> list[int]:
        everything: Any = [None] * len(self._semaphores) if values is None else values
        if not isinstance(everything, tuple | list):
            raise ArgumentTypeError("values", f"must be a tuple or a list, one entry a semaphore, not {values!r}.")
        given: Sequence[int | None] = everything
        if len(given) != len(self._semaphores):
            raise InvalidArgumentError("values", f"has {len(given)} entries for {len(self._semaphores)} semaphores.")
        check_stream(self._device, stream)
        numbers = []
        for semaphore, value in zip(self._semaphores, given, strict=True):
            semaphore._check_open()
            gap = semaphore._cannot_wait if operation is Operation.WAIT_SEMAPHORE else semaphore._cannot_signal
            if gap is not None:
                raise UnsupportedError(gap, context=self._device.name)
            numbers.append(semaphore._check_value(value))
        return numbers
