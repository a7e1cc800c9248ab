"""Lifetime streams: the pending work, the failure and the capture of each.

Wrappers come and go, but `Streams` knows each native stream once: all its wrappers share its waits, its failure and its
capture.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar, cast

from ..errors import GpuInteropError, InvalidArgumentError, SemaphoreTimeoutError, again
from .gate import Gate, waiting
from .lifetime import GONE, LIVE, MARK, RELEASING, RETIRED, Lifetime, Standing, retire, revive, waiting_for_a_look
from .monitor import after_fork, locked

if TYPE_CHECKING:
    from ..backend import Backend, DriverHandle
    from .graph import Graph

T = TypeVar("T")

_ASKED: Final = frozenset({LIVE, RETIRED})
_PER_THREAD: Final = 2  # CUDA's and HIP's number for the calling thread's own default stream
_MANY_WAITS: Final = 128  # from this number of noted waits on, the driver is asked which have passed
_FENCES: Final = 8  # this many events show soon enough which waits have passed
_REMEMBERED: Final = 256  # closed native streams that are remembered

order = itertools.count(1)
"""Numbers enqueued work, to tell later which work was behind a wait that failed."""

fenced: dict[KnownStream, None] = {}
"""Streams with fences that may not be reached."""


class CapturedError(InvalidArgumentError):
    """The stream's work goes into a graph; the driver would refuse the call too, and abandon the capture."""

    def __init__(self, stream: KnownStream) -> None:
        super().__init__("stream", f"{stream.label} is being captured: its work runs when the graph is launched.")


class Wait:
    """A semaphore wait that a stream was given, or that it was ordered behind.

    Attributes
    ----------
    semaphore : Lifetime
    value : int or None
    ms : int or None
        Milliseconds after which the driver's wait for a keyed mutex ends.
    number : int
        When the stream was ordered behind it; 0 for a driver's own, which cannot be let go on.
    reached : callable or None
        Tells whether the wait passes by itself, where the semaphore cannot tell (`Lifetime.counter`).
    enqueued : bool
        Whether the driver has it.
    covered : bool
        Whether a fence stands behind it: once that is reached, the wait has passed.
    passed : bool
    implied : bool
        Whether the stream stands behind it only by the default stream's rules. It does not fail with the wait.
    failure : GpuInteropError or None
        Why the signal will not come; the waiting streams were let go on.
    """

    semaphore: Lifetime
    value: int | None = None
    ms: int | None = None
    number = 0
    reached: Callable[[], bool] | None = None
    enqueued = False
    covered = False
    passed = False
    implied = False
    failure: GpuInteropError | None = None
    _origin: Wait | None = None

    @classmethod
    def of(cls, semaphore: Lifetime, value: int | None = None) -> Wait:
        """Make a wait. `ExternalSemaphore.wait` does so in line: a call costs as much as all else."""
        wait = cls()
        wait.semaphore = semaphore
        wait.value = value
        return wait

    @property
    def origin(self) -> Wait:
        """The wait that a stream was given; others inherit it."""
        return self._origin or self

    def inherited(self, *, implied: bool) -> Wait:
        """Make the wait of a stream that is ordered behind this wait, and passes with it."""
        wait = Wait.of(self.semaphore)
        wait.implied = implied
        wait._origin = self.origin
        wait.reached = self.origin.is_there
        return wait

    def is_there(self) -> bool:
        """Whether the wait passes without a further signal. `reached` is not called once the semaphore is released."""
        return self.passed or self.semaphore.ask(self._is_signalled, True)

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
    """A wait for several semaphores in one call, which only the driver knows; `semaphore` is one of them.

    Attributes
    ----------
    semaphores : sequence of Lifetime
    values : sequence of int or None
    """

    semaphores: Sequence[Lifetime]
    values: Sequence[int | None]

    def is_there(self) -> bool:
        return self.passed or all(one.is_there() for one in self._each())

    def __str__(self) -> str:
        each = self._each()
        return ", ".join(map(str, [one for one in each if not one.is_there()] or each))

    def _each(self) -> list[Wait]:
        return [Wait.of(*one) for one in zip(self.semaphores, self.values, strict=True)]


@locked
def fail_wait(wait: Wait, error: GpuInteropError) -> None:
    """Fail a wait whose signal will not come, and the streams that waited for it and were let go on.

    Makes no driver calls: the bridge's watcher calls it.
    """
    wait.failure = error  # first: a stream that notes the wait from now on checks this
    for stream in list(waiting):
        _fail_behind(stream, wait, error)


def fail_waits(semaphore: Lifetime, error: GpuInteropError, *, passed: bool = False) -> None:
    """Fail all pending waits for a semaphore whose signals will not come. The caller then stores the value.

    With `passed` also those that pass by the value as it is, which another may have stored so.
    """
    for stream in list(waiting):
        for wait in stream.pending():
            if wait.origin.semaphore is semaphore and (passed or not wait.is_there()):
                fail_wait(wait.origin, error)


def awaited(semaphore: Lifetime) -> bool:
    """Whether a stream may still be waiting for a semaphore; asks the driver."""
    for stream in list(waiting):
        stream.look()
    return any(wait.origin.semaphore is semaphore for stream in list(waiting) for wait in stream.pending())


@locked
def _fail_behind(stream: KnownStream, wait: Wait, error: GpuInteropError) -> None:
    first = next((one.number for one in stream.waits.copy() if one.origin is wait and not one.implied), None)
    if first is not None:
        stream.fail(error)
        stream.voids.append((first, next(order)))  # numbered last: what is enqueued behind this sees the failure


class NativeEvent(Lifetime):
    """An event behind everything that a stream was given before it.

    On AMD an event must not outlive its stream, so it keeps the stream's owner and stands on the stream, which ends it,
    or waits for it.
    """

    __slots__ = ("covers",)

    def __init__(self, noun: str, stream: KnownStream, how: Standing = Standing.YIELDS) -> None:
        super().__init__(noun, stream.backend.destroy_event, parents=(stream,), how=how, keep=stream.keep)
        self.covers = [wait for wait in stream.enqueued() if not wait.covered]


class Fence(NativeEvent):
    """An event that drains look at. It keeps its stream, also that of a thread that has ended, until it is reached."""

    __slots__ = ("stream", "waiters")
    noted_of_closed = True  # the end of a closed stream is a fence

    def __init__(self, stream: KnownStream) -> None:
        super().__init__("event", stream, Standing.HOLDS)
        self.stream = stream
        self.waiters: dict[Lifetime, None] = {}
        """Objects that a drain looks at again once the fence is reached."""

    def is_reached(self) -> bool:
        """Ask the driver; never blocks."""
        try:
            if not self.ask(self.stream.backend.is_done, True):
                return False
        except GpuInteropError:
            pass  # the stream has failed: the rest of its work never runs
        _reached(self)
        return True


@locked
def _came_behind(fence: Fence) -> None:
    if fence.state is LIVE and fence not in fence.stream.fences:
        fenced[fence.stream] = None
        fence.stream.fences.append(fence)
        for wait in fence.covers:
            wait.covered = True


@locked
def _reached(fence: Fence) -> None:
    stream = fence.stream
    settle(stream, fence.covers)
    waiting_for_a_look.update(fence.waiters)
    fence.waiters = {}
    retire(fence)  # first: off the stream's list, no drain looks at the fence
    if fence in stream.fences:
        stream.fences.remove(fence)
    if not stream.fences:
        fenced.pop(stream, None)


@locked
def _note_anew(stream: KnownStream, wait: Wait) -> None:
    """Note an inherited wait in place of an earlier one: the stream may have passed that one's event, and not this."""
    twin = next((one for one in stream.waits.copy() if one.origin is wait.origin), None)
    wait.number = next(order) if twin is None else twin.number
    stream.waits.append(wait)
    waiting[stream] = None
    if twin is not None:
        wait.implied = wait.implied and twin.implied
        stream.waits.remove(twin)


@locked
def settle(stream: KnownStream, passed: list[Wait]) -> None:
    """Note that waits have passed."""
    for wait in passed:
        wait.passed = True
    while stream.waits and stream.waits[0].passed:
        stream.waits.popleft()
    if not stream.waits:
        waiting.pop(stream, None)
        if stream.waits:  # another thread added one, perhaps before the line above removed the stream
            waiting[stream] = None


class KnownStream(Lifetime):
    """One native stream of a device. Made by `Streams`.

    Attributes
    ----------
    waits : deque of Wait
        Waits that may be pending.
    voids : deque of (int, int)
        Periods in which it ran on behind a failed wait: its work from those is wrong.
    """

    device: Streams

    __slots__ = (
        "backend", "bare", "broken", "captured", "failure", "fences", "graph", "key", "limit", "odd", "owned",
        "pointer", "thread", "told", "voids", "waits",
    )  # fmt: skip

    def __init__(self, device: Streams, *, owned: bool, label: str | None = None) -> None:
        super().__init__("Stream", device.backend.destroy_stream if owned else None, device=device, label=label)
        self.backend = device.backend
        self.owned = owned
        self.ends_with_children = not owned
        self.key: Hashable = None
        self.pointer = 0
        self.thread: weakref.ref[_Me] | None = None
        """The thread whose own default stream this is: only that thread can query it and record on it."""
        self.waits: deque[Wait] = deque()
        self.fences: list[Fence] = []
        """Fences that may not be reached yet."""
        self.limit = _MANY_WAITS
        """Number of waits above which the driver is asked which have passed; less than 0 for a thread's own stream."""
        self.bare = False
        """Whether no event stands behind the last work on a thread's own stream: other threads cannot tell its end."""
        self.broken = False
        """Whether one of our captures could not be ended: the captured work will never run."""
        self.captured = False
        """Whether one of our captures is on or about to begin."""
        self.graph: Graph | None = None
        """The graph that `Stream.capture` makes of the work."""
        self.failure: GpuInteropError | None = None
        self.told = False
        """Whether the failure was raised to a caller."""
        self.odd = False
        """Whether the stream has failed, is captured, or is a thread's own: calls look closer. See `note_odd`."""
        self.voids: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def streams(self) -> list[KnownStream]:
        """The release waits for the stream's end."""
        return [self] if self.owned else []

    def note_odd(self) -> None:
        """Set `odd` anew. Under the monitor, after each change of what it stands for."""
        self.odd = self.captured or self.failure is not None or self.thread is not None

    @property
    def is_over(self) -> bool:
        """Whether no call reaches it again. A released stream of another library is opened again while it is known."""
        return self.state in GONE and (self.owned or self.device.table.get(self.key) is not self)

    # -- waits ---------------------------------------------------------------------------------------------------

    def note(self, wait: Wait) -> None:
        """Note a wait, before the driver has it; then look at the gate."""
        if wait.origin is wait:
            wait.number = next(order)
            self.waits.append(wait)
            waiting[self] = None
        else:
            _note_anew(self, wait)
        if (failure := wait.origin.failure) is not None:  # `fail_wait` may have missed the stream
            _fail_behind(self, wait.origin, failure)

    def before(self) -> list[KnownStream]:
        """Streams whose waits the stream may stand behind: itself; if another library's, also the default stream."""
        device = None if self.owned else self.device
        return [one for one in list(waiting) if one is self or (one.device is device and not one.owned)]

    def pending(self) -> list[Wait]:
        """The waits that may be pending."""
        return [wait for wait in self.waits.copy() if not wait.passed]

    def inherits(self, other: KnownStream) -> list[Wait]:
        """The waits, except its own, that this stream stands behind once it is ordered behind `other`.

        Also those that it has inherited: it may have passed the event that it stood behind then, but not the next one.
        """
        own = set(self.waits.copy())
        found = {wait.origin: wait.inherited(implied=True) for one in other.before() for wait in one.pending()}
        found.update((wait.origin, wait.inherited(implied=wait.implied)) for wait in other.pending())
        return [wait for origin, wait in found.items() if origin not in own]

    def enqueued(self) -> list[Wait]:
        """The waits that newly enqueued work stands behind."""
        return [wait for wait in self.waits.copy() if wait.enqueued]

    def stuck_behind(self, *seen: KnownStream) -> Wait | None:
        """A wait that the stream passes only if this thread signals: no other process could, and no stream will."""
        seen = (*seen, self)
        for wait in (one.origin for one in self.pending()):
            semaphore, value = wait.semaphore, wait.value
            if value is None or wait.is_there() or getattr(semaphore.handle, "exported", True):
                continue
            uses = semaphore.uses.copy().items()  # what each stream was told last
            before = [None if one in seen else one.stuck_behind(*seen) for one, (told, at) in uses if told[at] >= value]
            if all(before):
                return before[0] if before else wait
        return None

    def waiting_for(self) -> str:
        """The waits that may be pending, for messages; empty without any."""
        waits = dict.fromkeys(str(wait) for wait in self.pending() if not wait.is_there())
        return f"; it may be waiting for {', '.join(list(waits)[-16:])}" if waits else ""

    def is_held(self) -> bool:
        """Whether it waits for a signal that is not there yet; also if another thread is about to enqueue the wait."""
        self.is_idle()  # notes what has passed
        return bool(self.waiting_for())

    def late(self, what: str) -> SemaphoreTimeoutError:
        """Make the error of a wait for the stream that has expired: what it waits for, and how it is let go on."""
        self.poll()
        for one in self.standing.copy():  # every event, so that no message names a wait that has passed
            with contextlib.suppress(GpuInteropError):  # the stream has failed
                if isinstance(one, NativeEvent) and one.state is LIVE and one.ask(self.backend.is_done, False):
                    settle(self, one.covers)
        waits = self.waiting_for()
        way_out = " If what was to signal has died, signal it here: by host_signal, or on another stream."
        return SemaphoreTimeoutError(f"{self.label}{what}{waits}.{way_out if waits else ''}")

    # -- what the driver says ------------------------------------------------------------------------------------

    @property
    def elsewhere(self) -> bool:
        """Whether the stream is another thread's own default stream, which only that thread can name."""
        return self.thread is not None and self.thread() is not _here.me

    def is_capturing(self) -> bool:
        """Whether the work goes into a graph; False if the driver cannot tell."""
        if self.broken or self.captured:
            return not self.broken
        calls = self.calls
        calls += MARK
        try:  # as `ask`: each call that is refused in a capture comes here
            return self.state in _ASKED and self.backend.is_capturing(self.handle)
        except GpuInteropError:
            return False
        finally:
            del calls[-1]

    def refuse_edge(self) -> None:
        """Raise while one of our captures begins or ends: a call might or might not be captured. The caller marks."""
        if self.captured and self.graph is None:
            raise CapturedError(self)

    def uncaptured(self, call: Callable[[DriverHandle], T], gone: T) -> T:
        """Ask as `ask`, but raise `CapturedError` if the work goes into a graph; the mark holds our captures up."""

        def asked(handle: DriverHandle) -> T:
            if self.is_capturing():
                raise CapturedError(self)
            return call(handle)

        return cast(T, self.ask(asked, gone))

    def is_idle(self) -> bool:
        """Whether all work is done, or has failed; False if the driver cannot be asked.

        Of another thread's own default stream the fences tell, also after the thread's end.
        """
        seen = self.enqueued()
        if self.elsewhere:
            return not (self.fences or self.bare)
        try:
            if not self.uncaptured(self.backend.is_idle, True):
                return False
        except GpuInteropError as error:
            if isinstance(error, CapturedError) or self.is_capturing():  # another library's began after the check
                return False
            # Else the stream has failed: the rest of its work never runs.
        settle(self, seen)
        self.bare = False
        return True

    def with_event(self, use: Callable[[DriverHandle], T]) -> T | None:
        """Return what `use` gives for an event behind all earlier work; None if the stream is gone."""
        if self.elsewhere:
            return None if (last := self.last_fence()) is None else last.ask(use, None)

        def recorded(handle: DriverHandle) -> T:
            event = self.backend.record(handle)
            try:
                return use(event)
            finally:
                self.backend.destroy_event(event)

        return cast("T | None", self.ask(recorded, None))

    def synchronize(self, timeout: float | None) -> bool:
        """Block until all work is done; False if `timeout` seconds passed. Raises the stream's failure."""
        seen, backend = [one for one in self.enqueued() if one.covered or not self.elsewhere], self.backend

        def poll(_: DriverHandle) -> bool | None:
            return self.with_event(lambda event: backend.wait_done(event, timeout))

        polls = timeout is not None or backend.holds_gil or backend.synchronize_blocks_others
        wait: Callable[[DriverHandle], bool | None] = poll if polls else backend.synchronize
        if (poll(None) if self.elsewhere else self.uncaptured(wait, None)) is False:
            return False
        settle(self, seen)
        return True

    def came_along(self) -> None:
        """Tidy up behind a call, before the call's marks go: waits would pile up.

        Only its thread can query a thread's own default stream, so without a mark there must be an event.
        """
        if self.thread is not None:
            self.poll()
            with contextlib.suppress(CapturedError):
                self.bare = self.fence() is None
        elif len(self.waits) > self.limit:
            self.look()
            self.limit = max(_MANY_WAITS, 2 * len(self.waits))  # do not ask for the pending ones at each call

    def fence(self) -> Fence | None:
        """Record an event behind all earlier work; None if the stream can no longer record.

        Raises `CapturedError` if the event would go into a graph.
        """
        fence = Fence(self)
        try:
            self.uncaptured(lambda handle: fence.create(lambda: self.backend.record(handle)), None)
            _came_behind(fence)
        except CapturedError:
            raise
        except GpuInteropError:
            return None
        return fence

    def last_fence(self) -> Fence | None:
        """The latest fence that may not be reached. Other threads may take fences off the list at any time."""
        return next(reversed(self.fences.copy()), None)

    def look(self) -> None:
        """Ask the driver which waits have passed; never blocks."""
        # A fence that is not reached tells as much. At each query of a stream with work AMD's runtime enqueues a marker
        # and keeps it until the stream has gone on.
        fences = self.poll()
        if self.elsewhere or (not fences and self.is_idle()):
            return
        if len(fences) < _FENCES and not all(wait.covered for wait in self.enqueued()):
            with contextlib.suppress(CapturedError):
                self.fence()

    def poll(self) -> list[Fence]:
        """Look which fences were reached; return the others."""
        fences = self.fences.copy()
        while fences and fences[0].is_reached():
            del fences[0]
        return fences

    # -- failure -------------------------------------------------------------------------------------------------

    @locked
    def fail(self, error: GpuInteropError) -> None:
        """Fail the stream: a signal that it waited for will not come, and it was let go on.

        A driver's stream cannot fail by itself. From now on its wrappers raise a copy of `error`. The failure stays
        until it was raised: a wrapper made afterwards starts without it.
        """
        if self.failure is None or self.told:
            fresh = cast(GpuInteropError, again(error))
            if fresh is not error:
                fresh.__cause__ = None  # not kept alive
            self.failure = fresh
            self.told = False
            self.note_odd()

    def tell_failure(self) -> GpuInteropError | None:
        """Return the stream's failure, for the caller to raise."""
        return None if self.failure is None else _tell(self)

    def is_void(self, number: int) -> bool:
        """Whether work enqueued at `number` ran behind a failed wait."""
        return any(first <= number < end for first, end in self.voids.copy())


@locked
def _tell(stream: KnownStream) -> GpuInteropError | None:
    """Note that the caller will raise the failure: in one step, for a new wrapper forgets a failure that was told."""
    stream.told = stream.failure is not None
    return stream.failure


class _Me:
    __slots__ = ("__weakref__",)


class _Here(threading.local):
    """The calling thread, as long as it lives. Its ident does not identify it: a later thread may have the same."""

    def __init__(self) -> None:
        self.me = _Me()


_here: Final = _Here()


class Streams:
    """The known native streams of one device, each once."""

    def __init__(self, backend: Backend, gate: Gate) -> None:
        self.backend = backend
        self.gate = gate
        self.table: dict[Hashable, KnownStream] = {}
        self.limit = _REMEMBERED
        gate.devices.append(self)

    def known(self) -> list[KnownStream]:
        """Streams that may have work."""
        return [stream for stream in self.table.copy().values() if stream.state not in GONE]

    def create(self, call: Callable[[], DriverHandle], wrap: Callable[[KnownStream], T], label: str | None) -> T:
        """Make a stream of ours with `call`, and what keeps it open with `wrap`."""
        stream = KnownStream(self, owned=True, label=label)
        try:
            handle = stream.create(call)
            _name(stream, self.backend.stream_key(handle), self.backend.stream_pointer(handle))
            return wrap(stream)
        except BaseException:
            retire(stream)
            raise

    def adopt(
        self, handle: DriverHandle, keep: object, wrap: Callable[[KnownStream, Lifetime], T], label: str | None = None
    ) -> T:
        """Make, with `wrap`, what keeps another library's stream open: a wrapper with a lifetime of its own."""
        wrapper = Lifetime("Stream", keep=keep, label=label)
        try:
            return wrap(self._find(handle, wrapper), wrapper)
        except BaseException:
            retire(wrapper)
            raise

    def of_this_thread(self, handle: DriverHandle) -> KnownStream:
        """The calling thread's own default stream."""
        found = self.table.get((_PER_THREAD, id(_here.me)))
        return found if found is not None and found.state is LIVE and not found.elsewhere else self._find(handle, None)

    def _find(self, handle: DriverHandle, wrapper: Lifetime | None) -> KnownStream:
        pointer = self.backend.stream_pointer(handle)
        thread = _here.me if pointer == _PER_THREAD else None
        key: Hashable = (self.backend.stream_key(handle) if thread is None else pointer, thread and id(thread))
        if key not in self.table and thread is None and self.backend.is_capturing(handle):  # and cannot be asked
            key = next((known.key for known in self.known() if known.pointer == pointer), key)
        return _intern(self, key, pointer, handle, wrapper, thread)


@locked
def _name(stream: KnownStream, key: Hashable, pointer: int) -> None:
    stream.key, stream.pointer = (key, None), pointer
    stream.device.table[stream.key] = stream
    _forget(stream.device)


@locked
def _intern(
    device: Streams, key: Hashable, pointer: int, handle: DriverHandle, wrapper: Lifetime | None, thread: _Me | None
) -> KnownStream:
    stream = device.table.get(key)
    if stream is not None and stream.owned and stream.state in (RETIRED, RELEASING):
        stream.check()
    if (
        stream is None
        or (stream.owned and stream.state is not LIVE)  # the number may now be another stream's
        or (stream.thread is not None and stream.thread() is not thread)
        or not revive(stream)
    ):
        if stream is not None:
            retire(stream)  # of a thread that has ended: another has its number now
        stream = KnownStream(device, owned=False)
        stream.key, stream.pointer, stream.handle = key, pointer, handle
        if thread is not None:
            stream.thread = weakref.ref(thread)
            stream.limit = -1
            stream.note_odd()
        revive(stream)
        device.table[key] = stream
        _forget(device)
    if stream.told:  # a caller knows of the failure: this wrapper starts without it
        stream.failure = None
        stream.told = False
        stream.note_odd()
    if wrapper is not None:
        revive(wrapper)
        if not stream.owned:
            stream.keep = wrapper.keep
            if wrapper.naming[2] or not (stream.naming[2] and Standing.CHILD in stream.standing.copy().values()):
                stream.naming = wrapper.naming
        wrapper.uses[stream] = None  # the owner is kept until the stream's work is done
        wrapper.parents = (stream,)
        stream.standing[wrapper] = Standing.CHILD
    return stream


def _forget(device: Streams) -> None:
    """Keep few closed streams; only one in many calls looks."""
    if len(device.table) <= device.limit:
        return
    for key, stream in list(device.table.items()):
        if stream.thread is not None and stream.thread() is None:
            retire(stream)
        if stream.state in GONE:
            del device.table[key]
    device.limit = max(_REMEMBERED, 2 * len(device.table))


after_fork(fenced.clear)
