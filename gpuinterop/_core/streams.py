"""Native streams: the pending work, failure and capture of each; and the gate between waits and blocking releases.

Several wrappers can exist for a native stream. `Streams` knows it once, so all share its waits, failure and capture.

A release such as ``cuMemFree`` waits for all work of its device, and blocks all other calls of the process. So it runs
only while no stream waits for a missing signal, and new waits are delayed until it is over. A wait notes itself, then
checks the gate. A release shuts the gate, then checks the notes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar, cast

from .. import system
from ..errors import GpuInteropError, InvalidArgumentError, SemaphoreTimeoutError, again
from .lifetime import (
    FINAL,
    LIVE,
    MARK,
    RELEASING,
    RETIRED,
    Dependency,
    Lifetime,
    Marks,
    after_fork,
    locked,
    retire,
    revive,
    to_release,
)

if TYPE_CHECKING:
    from ..backend import Backend, DriverHandle
    from .graph import Graph

T = TypeVar("T")

_USABLE: Final = frozenset({LIVE, RETIRED})
_PER_THREAD: Final = 2  # number of the calling thread's own default stream in CUDA and HIP
_MANY_WAITS: Final = 128  # with more noted waits, the driver is asked which have passed
_FENCES: Final = 8  # events that are enough to show which waits have passed
_REMEMBERED: Final = 256  # closed native streams in the table

order = itertools.count(1)  # numbers enqueued work, to show later which work ran after a failed wait

fenced: dict[KnownStream, None] = {}  # streams with fences that may be pending


# -- the gate ---------------------------------------------------------------------------------------------------------

MOMENT_S: Final = 0.004  # seconds by which waits are delayed when too many releases are blocked
MANY: Final = 8  # with so many blocked releases, the next wait is delayed
TOO_MANY: Final = 256  # with so many blocked releases, a warning is issued

waiting: dict[KnownStream, None] = {}  # streams of all devices with waits that may be pending
blocking: dict[Gate, None] = {}  # gates with blocked releases


class Gate:
    """One per device, or one per backend if its releases wait for the work of all its devices."""

    def __init__(self) -> None:
        self.shut: list[None] = Marks()  # one mark for each release that is running or about to begin
        self.blocked: dict[Lifetime, str] = {}  # releases delayed by a pending wait, each with that stream's label
        self.limit = MANY
        self.delays_waits = False  # so many releases are blocked that the next wait runs them first
        self.devices: list[Streams] = []

    def let_releases_end(self) -> None:
        """Block while a release is running. Waits do not delay a running release."""
        system.until(lambda: not self.shut, None)

    def held_by(self) -> str:
        """Return the label of a stream that may wait for a missing signal; empty if there is none. Never blocks.

        Asks the driver about a stream only if those that have waited longer have passed, so the cost does not grow.
        """
        for stream in self._waiting():
            if _holds_up(stream):
                return stream.label
        # If the release holds the GIL, no thread of this process can signal what another library's work waits for.
        streams = [stream for device in self.devices if device.backend.releases_hold_gil for stream in device.known()]
        return next((stream.label for stream in streams if not stream.is_idle()), "")

    def delays_default(self) -> KnownStream | None:
        """Return a stream whose wait for a missing signal delays the default stream. Asks the driver.

        gpuinterop's streams delay it only if both share a hardware queue. Other libraries' streams always do.
        """
        for stream in self._waiting():
            if not stream.owned and stream.backend.blocks_default(stream.handle) and _holds_up(stream):
                return stream
        return None

    def _waiting(self) -> list[KnownStream]:
        return [stream for stream in list(waiting) if stream.device.gate is self]


def _holds_up(stream: KnownStream) -> bool:
    stream.poll()
    return not all(wait.is_there() for wait in stream.waits.copy())


@locked
def block(gate: Gate, lifetime: Lifetime, held_by: str) -> None:
    if lifetime.state is not RETIRED:
        return
    if len(gate.blocked) >= gate.limit:
        gate.delays_waits = True
    gate.blocked[lifetime] = held_by
    blocking[gate] = None
    to_release.pop(lifetime, None)


@locked
def unblock(gate: Gate) -> None:
    """Make the next drain check all blocked releases again."""
    to_release.update(dict.fromkeys(gate.blocked))
    gate.blocked.clear()
    blocking.pop(gate, None)


@locked
def set_limit(gate: Gate, limit: int) -> None:
    """Delay the next wait once `limit` releases are blocked."""
    gate.limit = limit
    gate.delays_waits = False


after_fork(waiting.clear)
after_fork(blocking.clear)


# -- waits ------------------------------------------------------------------------------------------------------------


class CapturedError(InvalidArgumentError):
    """The stream is being captured. The driver would refuse the call too, and abandon the capture."""

    def __init__(self, stream: KnownStream) -> None:
        super().__init__("stream", f"{stream.label} is being captured: its work runs when the graph is launched.")


class Wait:
    """A wait for a semaphore that a stream was given, or that it inherits because it waits for another stream."""

    semaphore: Lifetime
    value: int | None = None
    ms: int | None = None  # after so many milliseconds, the driver ends its wait for a keyed mutex
    number = 0  # when the stream got the wait; 0 for a wait in the driver, which cannot be ended early
    reached: Callable[[], bool] | None = None  # whether it passes without another signal, if there is no counter
    enqueued = False  # the driver has it
    covered = False  # a fence follows it: when the fence is reached, the wait has passed
    passed = False
    implied = False  # the stream has it only through the rules of the default stream, and does not fail with it
    failure: GpuInteropError | None = None  # why the signal will not come; the waiting streams were released
    _origin: Wait | None = None

    @classmethod
    def of(cls, semaphore: Lifetime, value: int | None = None) -> Wait:
        """Make a wait. `ExternalSemaphore.wait` does this inline to save a call."""
        wait = cls()
        wait.semaphore = semaphore
        wait.value = value
        return wait

    @property
    def origin(self) -> Wait:
        """The wait that a stream was given, if this one is inherited."""
        return self._origin or self

    def inherited(self, *, implied: bool) -> Wait:
        """Return a wait for a stream that waits for this wait's stream. It passes when this wait passes."""
        wait = Wait.of(self.semaphore)
        wait.implied = implied
        wait._origin = self.origin
        wait.reached = self.origin.is_there
        return wait

    def unsignalled(self) -> GpuInteropError | None:
        """Why the wait passes although its value was not signalled: the process that should signal has exited."""
        semaphore, value = self.semaphore, self.value
        if semaphore.unsignalled is None or semaphore.counter is None or value is None:
            return None
        counter = semaphore.try_use(semaphore.counter, None)
        return None if counter is None else semaphore.unsignalled(counter, value)

    def is_there(self) -> bool:
        """Whether the wait passes without another signal. Calls `reached` only until the semaphore is released."""
        return self.passed or self.semaphore.try_use(self._is_signalled, True)

    def _is_signalled(self, handle: DriverHandle) -> bool:
        if self.reached is not None:
            return self.reached()
        counter = self.semaphore.counter
        return counter is not None and self.value is not None and counter(handle) >= self.value

    def __str__(self) -> str:
        if self._origin is not None:
            return str(self._origin)
        semaphore = self.semaphore
        reach = "" if self.value is None else f" to reach {self.value}"
        remark = "" if semaphore.remark is None else f" ({semaphore.remark(self.value)})"
        return f"{semaphore.label}{reach}{remark}"


class Waits(Wait):
    """A wait for several semaphores in one driver call; `semaphore` is one of them."""

    semaphores: Sequence[Lifetime]
    values: Sequence[int | None]

    def is_there(self) -> bool:
        return self.passed or all(wait.is_there() for wait in self._each())

    def __str__(self) -> str:
        each = self._each()
        return ", ".join(map(str, [wait for wait in each if not wait.is_there()] or each))

    def _each(self) -> list[Wait]:
        return [Wait.of(*pair) for pair in zip(self.semaphores, self.values, strict=True)]


@locked
def fail_wait(wait: Wait, error: GpuInteropError) -> None:
    """Fail a wait whose signal will not come, and the streams that it held. Makes no driver calls (for the watcher)."""
    wait.failure = error  # first: from now on, streams that note the wait see this
    for stream in list(waiting):
        _fail_after(stream, wait, error)


def fail_waits(semaphore: Lifetime) -> None:
    """Fail all pending waits for a semaphore whose signals will not come. The caller then stores the value."""
    for stream in list(waiting):
        for wait in stream.pending():
            if wait.origin.semaphore is semaphore and (error := wait.origin.unsignalled()) is not None:
                fail_wait(wait.origin, error)


def awaited(semaphore: Lifetime) -> bool:
    """Whether a stream may still wait for a semaphore. Asks the driver."""
    for stream in list(waiting):
        stream.poll()
    return any(wait.origin.semaphore is semaphore for stream in list(waiting) for wait in stream.pending())


@locked
def _fail_after(stream: KnownStream, wait: Wait, error: GpuInteropError) -> None:
    first = next((noted.number for noted in stream.waits.copy() if noted.origin is wait and not noted.implied), None)
    if first is not None:
        stream.fail(error)
        stream.voids.append((first, next(order)))  # later work gets higher numbers, and sees the failure


class NativeEvent(Lifetime):
    """An event after all earlier work of a stream. It keeps the stream, because on AMD it must not outlive it."""

    __slots__ = ("covers",)

    def __init__(self, noun: str, stream: KnownStream, dependency: Dependency = Dependency.YIELDS) -> None:
        super().__init__(noun, stream.backend.destroy_event, parents=(stream,), dependency=dependency, keep=stream.keep)
        self.covers = [wait for wait in stream.enqueued() if not wait.covered]


class Fence(NativeEvent):
    """An event that drains check. Until it is reached it keeps its stream, even after the stream's thread has ended."""

    __slots__ = ("stream", "waiters")
    allows_closed_parent = True  # closing a stream makes a fence

    def __init__(self, stream: KnownStream) -> None:
        super().__init__("event", stream, Dependency.HOLDS)
        self.stream = stream
        self.waiters: dict[Lifetime, None] = {}  # a drain checks these again when the fence is reached

    def is_reached(self) -> bool:
        try:
            if not self.try_use(self.stream.backend.is_done, True):
                return False
        except GpuInteropError:
            _mark_passed(self.covers)  # the stream has failed, so the rest of its work never runs
        _reached(self)
        return True


@locked
def _note_fence(fence: Fence) -> None:
    if fence.state is LIVE and fence not in fence.stream.fences:
        fenced[fence.stream] = None
        fence.stream.fences.append(fence)
        for wait in fence.covers:
            wait.covered = True


@locked
def _reached(fence: Fence) -> None:
    stream = fence.stream
    note_passed(stream, fence.covers)
    to_release.update(fence.waiters)
    fence.waiters = {}
    retire(fence)  # before it leaves the list, because drains check only listed fences
    if fence in stream.fences:
        stream.fences.remove(fence)
    if not stream.fences:
        fenced.pop(stream, None)


@locked
def _replace_inherited(stream: KnownStream, wait: Wait) -> None:
    """Note an inherited wait instead of an earlier one, whose event the stream may already have passed."""
    earlier = next((noted for noted in stream.waits.copy() if noted.origin is wait.origin), None)
    wait.number = next(order) if earlier is None else earlier.number
    stream.waits.append(wait)
    waiting[stream] = None
    if earlier is not None:
        wait.implied = wait.implied and earlier.implied
        stream.waits.remove(earlier)


def _mark_passed(waits: list[Wait]) -> None:
    for wait in waits:
        wait.passed = True


@locked
def note_passed(stream: KnownStream, passed: list[Wait]) -> None:
    """Note waits that have passed. Fail the stream if one passed because its process has exited."""
    for wait in passed:
        origin = wait.origin
        if not wait.passed and origin.failure is None and (error := origin.unsignalled()) is not None:
            fail_wait(origin, error)
        wait.passed = True
    while stream.waits and stream.waits[0].passed:
        stream.waits.popleft()
    if not stream.waits:
        waiting.pop(stream, None)
        if stream.waits:  # another thread has added one, perhaps before the stream was removed
            waiting[stream] = None


class KnownStream(Lifetime):
    """One native stream of a device. `Streams` makes it."""

    device: Streams

    __slots__ = (
        "backend", "broken", "captured", "failure", "failure_raised", "fences", "graph", "key", "limit", "needs_checks",
        "owned", "pointer", "thread", "unfenced", "voids", "waits",
    )  # fmt: skip

    def __init__(self, device: Streams, *, owned: bool, label: str | None = None) -> None:
        super().__init__("Stream", device.backend.destroy_stream if owned else None, device=device, label=label)
        self.backend = device.backend
        self.owned = owned
        self.ends_with_children = not owned
        self.key: Hashable = None
        self.pointer = 0
        self.thread: weakref.ref[_Thread] | None = None  # of a thread's default stream: only that thread uses it
        self.waits: deque[Wait] = deque()  # that may be pending
        self.fences: list[Fence] = []  # that may be pending
        self.limit = _MANY_WAITS  # with more waits, the driver is asked which have passed; -1 for a thread's own stream
        self.unfenced = False  # a thread's own stream has work after its last fence: other threads cannot see its end
        self.broken = False  # a `Stream.capture` could not be ended, so the captured work will never run
        self.captured = False  # a `Stream.capture` is running, or about to begin
        self.graph: Graph | None = None  # the graph of that capture
        self.failure: GpuInteropError | None = None
        self.failure_raised = False  # the failure was raised to a caller
        self.needs_checks = False  # calls must check the stream closely; see `update_checks`
        self.voids: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # numbers of work that ran after a failed wait

    def streams(self) -> list[KnownStream]:
        return [self] if self.owned else []

    def update_checks(self) -> None:
        """Update `needs_checks`, under the monitor: it is captured, has failed, or belongs to a thread."""
        self.needs_checks = self.captured or self.failure is not None or self.thread is not None

    @property
    def is_over(self) -> bool:
        """Whether no call can use it again. Another library's stream can be reopened while the table has it."""
        return self.state in FINAL and (self.owned or self.device.table.get(self.key) is not self)

    def note(self, wait: Wait) -> None:
        """Note a wait before the driver gets it. The caller then checks the gate."""
        if wait.origin is wait:
            wait.number = next(order)
            self.waits.append(wait)
            waiting[self] = None
        else:
            _replace_inherited(self, wait)
        if (failure := wait.origin.failure) is not None:  # `fail_wait` may have missed the stream
            _fail_after(self, wait.origin, failure)

    def streams_ahead(self) -> list[KnownStream]:
        """Return the streams whose waits can hold it up: itself, and for another library's stream also the default."""
        device = None if self.owned else self.device
        return [stream for stream in list(waiting) if stream is self or (stream.device is device and not stream.owned)]

    def pending(self) -> list[Wait]:
        return [wait for wait in self.waits.copy() if not wait.passed]

    def inherited_from(self, other: KnownStream) -> list[Wait]:
        """Return the waits that this stream gets when it waits for `other`, except its own.

        Inherited waits are included: the stream may have passed the event of then, but not the next one.
        """
        own = set(self.waits.copy())
        waits = {wait.origin: wait.inherited(implied=True) for it in other.streams_ahead() for wait in it.pending()}
        waits.update((wait.origin, wait.inherited(implied=wait.implied)) for wait in other.pending())
        return [wait for origin, wait in waits.items() if origin not in own]

    def enqueued(self) -> list[Wait]:
        """Return the waits that new work follows."""
        return [wait for wait in self.waits.copy() if wait.enqueued]

    def stuck_on(self, *seen: KnownStream) -> Wait | None:
        """Return a wait that only a signal from this thread can end: no other process or stream will signal it."""
        seen = (*seen, self)
        for wait in (pending.origin for pending in self.pending()):
            semaphore, value = wait.semaphore, wait.value
            if value is None or wait.is_there() or getattr(semaphore.handle, "exported", True):
                continue
            uses = semaphore.uses.copy().items()  # the last value that each stream signals
            before = [
                None if stream in seen else stream.stuck_on(*seen)
                for stream, (values, at) in uses
                if values[at] >= value
            ]
            if all(before):
                return before[0] if before else wait
        return None

    def waiting_for(self) -> str:
        """Describe the waits that may be pending, for messages; empty if there are none."""
        waits = dict.fromkeys(str(wait) for wait in self.pending() if not wait.is_there())
        return f"; it may be waiting for {', '.join(list(waits)[-16:])}" if waits else ""

    def is_held(self) -> bool:
        """Whether the stream waits for a missing signal, or another thread is about to enqueue such a wait."""
        self.is_idle()  # notes which waits have passed
        return bool(self.waiting_for())

    def timeout_error(self, what: str) -> SemaphoreTimeoutError:
        """Return the error for an expired wait for the stream: what it waits for, and how to release it."""
        is_done = self.backend.is_done
        self.poll_fences()
        for event in self.dependents.copy():  # all events, so that the message names no wait that has passed
            with contextlib.suppress(GpuInteropError):  # the stream has failed
                if isinstance(event, NativeEvent) and event.state is LIVE and event.try_use(is_done, False):
                    note_passed(self, event.covers)
        waits = self.waiting_for()
        way_out = " If the process that should signal has exited, signal it here with host_signal or on another stream."
        return SemaphoreTimeoutError(f"{self.label}{what}{waits}.{way_out if waits else ''}")

    @property
    def of_other_thread(self) -> bool:
        """Whether it is another thread's own default stream, which only that thread can use."""
        return self.thread is not None and self.thread() is not _this_thread.token

    def is_capturing(self) -> bool:
        """Whether the stream is being captured; False if the driver cannot tell."""
        if self.broken or self.captured:
            return not self.broken
        calls = self.calls
        calls += MARK
        try:  # inlined from `try_use` because this is a hot path
            return self.state in _USABLE and self.backend.is_capturing(self.handle)
        except GpuInteropError:
            return False
        finally:
            del calls[-1]

    def refuse_capture_change(self) -> None:
        """Raise while `Stream.capture` begins or ends: the call might or might not be captured. The caller marks."""
        if self.captured and self.graph is None:
            raise CapturedError(self)

    def uncaptured(self, call: Callable[[DriverHandle], T], default: T) -> T:
        """Like `try_use`, but raise `CapturedError` during a capture. The mark delays `Stream.capture`."""

        def checked(handle: DriverHandle) -> T:
            if self.is_capturing():
                raise CapturedError(self)
            return call(handle)

        return cast(T, self.try_use(checked, default))

    def is_idle(self) -> bool:
        """Whether all work is done or has failed; False if the driver cannot be asked.

        For another thread's own default stream, the fences decide, even after the thread has ended.
        """
        seen = self.enqueued()
        if self.of_other_thread:
            return not (self.fences or self.unfenced)
        try:
            if not self.uncaptured(self.backend.is_idle, True):
                return False
        except GpuInteropError as error:
            if isinstance(error, CapturedError) or self.is_capturing():  # another library began one after the check
                return False
            _mark_passed(seen)  # the stream has failed, so the rest of its work never runs
        note_passed(self, seen)
        self.unfenced = False
        return True

    def with_event(self, use: Callable[[DriverHandle], T]) -> T | None:
        """Call `use` with an event after all earlier work, and return its result; None if the stream is gone."""
        if self.of_other_thread:
            return None if (last := self.last_fence()) is None else last.try_use(use, None)

        def recorded(handle: DriverHandle) -> T:
            event = self.backend.record(handle)
            try:
                return use(event)
            finally:
                self.backend.destroy_event(event)

        return cast("T | None", self.try_use(recorded, None))

    def synchronize(self, timeout: float | None) -> bool:
        """Block until all work is done; return False after `timeout` seconds. Raise the stream's failure."""
        seen, backend = [wait for wait in self.enqueued() if wait.covered or not self.of_other_thread], self.backend

        def poll(_: DriverHandle) -> bool | None:
            return self.with_event(lambda event: backend.wait_done(event, timeout))

        polls = timeout is not None or backend.holds_gil or backend.synchronize_blocks_others
        wait: Callable[[DriverHandle], bool | None] = poll if polls else backend.synchronize
        if (poll(None) if self.of_other_thread else self.uncaptured(wait, None)) is False:
            return False
        note_passed(self, seen)
        return True

    def after_call(self) -> None:
        """Clean up after a call, before its marks are removed. A thread's own stream gets the event that others see."""
        if self.thread is not None:
            self.poll_fences()
            with contextlib.suppress(CapturedError):
                self.unfenced = self.fence() is None
        elif len(self.waits) > self.limit:
            self.poll()
            self.limit = max(_MANY_WAITS, 2 * len(self.waits))  # do not check pending waits at every call

    def fence(self) -> Fence | None:
        """Record an event after all earlier work; None if that is no longer possible. Raises `CapturedError`."""
        fence = Fence(self)
        try:
            self.uncaptured(lambda handle: fence.create(lambda: self.backend.record(handle)), None)
            _note_fence(fence)
        except CapturedError:
            raise
        except GpuInteropError:
            return None
        return fence

    def last_fence(self) -> Fence | None:
        """Return the latest fence that may be pending. Other threads can remove fences at any time."""
        return next(reversed(self.fences.copy()), None)

    def poll(self) -> None:
        """Ask the driver which waits have passed. Never blocks."""
        # A pending fence is enough. When a busy stream is queried, AMD's runtime enqueues a marker and keeps it until
        # the stream has continued.
        fences = self.poll_fences()
        if self.of_other_thread or (not fences and self.is_idle()):
            return
        if len(fences) < _FENCES and not all(wait.covered for wait in self.enqueued()):
            with contextlib.suppress(CapturedError):
                self.fence()

    def poll_fences(self) -> list[Fence]:
        fences = self.fences.copy()
        while fences and fences[0].is_reached():
            del fences[0]
        return fences

    @locked
    def fail(self, error: GpuInteropError) -> None:
        """Fail the stream, whose wait was released without its signal: its wrappers raise a copy of `error` once."""
        if self.failure is None or self.failure_raised:
            copy = cast(GpuInteropError, again(error))
            if copy is not error:
                copy.__cause__ = None  # do not keep it alive
            self.failure = copy
            self.failure_raised = False
            self.update_checks()

    def take_failure(self) -> GpuInteropError | None:
        return None if self.failure is None else _take_failure(self)

    def is_void(self, number: int) -> bool:
        """Whether the work with this number ran after a failed wait."""
        return any(first <= number < end for first, end in self.voids.copy())


@locked
def _take_failure(stream: KnownStream) -> GpuInteropError | None:
    """Note that the caller will raise the failure. One step, because a new wrapper drops a failure that was raised."""
    stream.failure_raised = stream.failure is not None
    return stream.failure


class _Thread:
    __slots__ = ("__weakref__",)


class _ThisThread(threading.local):
    """Identifies the calling thread. Its ident does not: a later thread can get the same ident."""

    def __init__(self) -> None:
        self.token = _Thread()


_this_thread: Final = _ThisThread()


class Streams:
    """The known native streams of one device. Each is known once."""

    def __init__(self, backend: Backend, gate: Gate) -> None:
        self.backend = backend
        self.gate = gate
        self.table: dict[Hashable, KnownStream] = {}
        self.limit = _REMEMBERED
        gate.devices.append(self)

    def known(self) -> list[KnownStream]:
        return [stream for stream in self.table.copy().values() if stream.state not in FINAL]

    def create(self, call: Callable[[], DriverHandle], wrap: Callable[[KnownStream], T], label: str | None) -> T:
        """Create a stream with `call`, and return the result of `wrap`, which keeps it open."""
        stream = KnownStream(self, owned=True, label=label)
        try:
            handle = stream.create(call)
            _register(stream, self.backend.stream_key(handle), self.backend.stream_pointer(handle))
            return wrap(stream)
        except BaseException:
            retire(stream)
            raise

    def adopt(
        self, handle: DriverHandle, keep: object, wrap: Callable[[KnownStream, Lifetime], T], label: str | None = None
    ) -> T:
        """Return the result of `wrap` for another library's stream: a wrapper with a separate lifetime."""
        wrapper = Lifetime("Stream", keep=keep, label=label)
        try:
            return wrap(self._find(handle, wrapper), wrapper)
        except BaseException:
            retire(wrapper)
            raise

    def of_this_thread(self, handle: DriverHandle) -> KnownStream:
        stream = self.table.get((_PER_THREAD, id(_this_thread.token)))
        if stream is not None and stream.state is LIVE and not stream.of_other_thread:
            return stream
        return self._find(handle, None)

    def _find(self, handle: DriverHandle, wrapper: Lifetime | None) -> KnownStream:
        pointer = self.backend.stream_pointer(handle)
        thread = _this_thread.token if pointer == _PER_THREAD else None
        key: Hashable = (self.backend.stream_key(handle) if thread is None else pointer, thread and id(thread))
        if key not in self.table and thread is None and self.backend.is_capturing(handle):  # its key may be wrong
            key = next((known.key for known in self.known() if known.pointer == pointer), key)
        return _known_stream(self, key, pointer, handle, wrapper, thread)


@locked
def _register(stream: KnownStream, key: Hashable, pointer: int) -> None:
    stream.key, stream.pointer = (key, None), pointer
    stream.device.table[stream.key] = stream
    _drop_closed(stream.device)


@locked
def _known_stream(
    device: Streams, key: Hashable, pointer: int, handle: DriverHandle, wrapper: Lifetime | None, me: _Thread | None
) -> KnownStream:
    stream = device.table.get(key)
    if stream is not None and stream.owned and stream.state in (RETIRED, RELEASING):
        stream.check()
    if (
        stream is None
        or (stream.owned and stream.state is not LIVE)  # the number may belong to another stream now
        or (stream.thread is not None and stream.thread() is not me)
        or not revive(stream)
    ):
        if stream is not None:
            retire(stream)  # its thread has ended, and another has the number now
        stream = KnownStream(device, owned=False)
        stream.key, stream.pointer, stream.handle = key, pointer, handle
        if me is not None:
            stream.thread = weakref.ref(me)
            stream.limit = -1
            stream.update_checks()
        revive(stream)
        device.table[key] = stream
        _drop_closed(device)
    if stream.failure_raised:  # a caller has got the failure, so this wrapper starts without it
        stream.failure = None
        stream.failure_raised = False
        stream.update_checks()
    if wrapper is not None:
        revive(wrapper)
        if not stream.owned:
            stream.keep = wrapper.keep
            if wrapper.naming[2] or not (stream.naming[2] and Dependency.CHILD in stream.dependents.copy().values()):
                stream.naming = wrapper.naming
        wrapper.uses[stream] = None  # keeps the owner until the stream's work is done
        wrapper.parents = (stream,)
        stream.dependents[wrapper] = Dependency.CHILD
    return stream


def _drop_closed(device: Streams) -> None:
    """Remove closed streams from the table, once it has grown."""
    if len(device.table) <= device.limit:
        return
    for key, stream in list(device.table.items()):
        if stream.thread is not None and stream.thread() is None:
            retire(stream)
        if stream.state in FINAL:
            del device.table[key]
    device.limit = max(_REMEMBERED, 2 * len(device.table))


after_fork(fenced.clear)
