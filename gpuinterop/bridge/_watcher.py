"""The watcher: one thread per bridge, which polls words and foreign semaphores and never calls a GPU's driver.

A call into HIP or CUDA may block behind another thread's call (a synchronisation, a free), which may itself be waiting
for the watcher. Objects that the collector finalizes here are left to the next drain, as everywhere.

A lane is one bridged semaphore. Streams wait for its word 0, `arrived`: the foreign value of a timeline, or the number
of passed waits of a binary semaphore. Each signalling stream has its own word, which counts its signals: one stream's
writes are ordered, those of two streams are not.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, TypeVarTuple

from .. import system
from .._arguments import check_int
from .._core.known_stream import Wait, fail_wait, order
from .._core.monitor import locked
from .._core.stream_memory import PinnedWords, Spare
from ..errors import (
    GpuInteropError,
    InvalidArgumentError,
    PeerError,
    ResourceBusyError,
    ResourceClosedError,
    again,
    warn_leak,
)
from ..handles import Timeline

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.known_stream import KnownStream
    from ._endpoints import Endpoint

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_SPIN_S: Final = 1e-3  # a handoff takes less if both sides are working
_LONGEST_PAUSE_S: Final = 2e-3
_PAUSE_SHARE: Final = 1 / 16  # longest pause, as a share of the time waited so far
_PEER_CHECK_S: Final = 5e-3
_RELEASED: Final = 2**63 - 1
_LOCK_LIMIT_S: Final = 1.0  # an endpoint whose poll takes longer is considered stuck
_LAST_LOOK_S: Final = 0.01  # how long an expired `host_wait` waits for the watcher's poll
_LONGEST_SLEEP_S: Final = 3600.0  # locks do not accept infinity


class _Waiting(NamedTuple):
    """A wait that is enqueued or about to be."""

    value: int
    """The value to store."""
    wait: Wait


class _Signal:
    """A signal that is enqueued on a stream or about to be."""

    __slots__ = ("number", "serial", "stream", "value")

    def __init__(self, value: int, number: int, stream: KnownStream) -> None:
        self.value = value
        self.number = number
        """The count that the stream stores."""
        self.stream = stream
        self.serial = next(order)

    @property
    def is_void(self) -> bool:
        """Whether the signal was enqueued after a wait that failed: it is not forwarded."""
        return self.stream.is_void(self.serial)


class _Out:
    """The word by which one stream signals."""

    __slots__ = ("index", "key", "pending", "written")

    def __init__(self, index: int, key: KnownStream) -> None:
        self.index = index
        self.key = key
        self.written = 0
        """Number of signals enqueued so far."""
        self.pending: deque[_Signal] = deque()

    def ready(self, stored: int) -> list[_Signal]:
        """The signals that the stream has reached."""
        try:
            if self.pending[0].number > stored:
                return []
        except IndexError:  # another thread withdrew it: it could not be enqueued
            return []
        # A copy: without the GIL other threads append while this one iterates. Numbers may be missing.
        return list(itertools.takewhile(lambda pending: pending.number <= stored, self.pending.copy()))


class Lane:
    """One bridged semaphore: its words, its endpoint, and its pending waits and signals.

    The application's threads append pending operations, then enqueue them; the watcher removes them. The watcher holds
    `lock` during each poll, and so does the thread that ends the lane.
    """

    def __init__(self, watcher: Watcher, spare: Spare[PinnedWords], endpoint: Endpoint, peer: int | None) -> None:
        self.watcher = watcher
        self.endpoint = endpoint
        self.lock = threading.RLock()
        self.refusal: GpuInteropError | None = None
        """Why the lane refuses calls: it was cancelled, or failed. If it was cancelled, signals are still forwarded."""
        self.failed = False
        self.closed = False
        self._stuck = False
        """Whether an endpoint is stuck, so that a word may be stored at any time without the lock."""
        self._timeline = endpoint.kind is Timeline
        self._waits: deque[_Waiting] = deque()
        self._ordered = True
        """Whether the first of a timeline's waits has the least value."""
        self._passed = 0
        """The last value stored in `arrived`."""
        self._numbers = itertools.count(1)  # numbers a binary semaphore's waits
        self._unclaimed: deque[None] = deque()  # signals taken for waits that then could not be enqueued
        self._outs: dict[KnownStream, _Out] = {}
        self._forwarded = 0
        self._enqueuing = threading.RLock()
        self._peer_number = peer
        self._peer_checked = 0.0
        self._spare = spare
        self._peer: int | None = None
        self._adopted = False
        """Whether `end` closes the endpoint."""
        self._opened = False

    def open(self, device: Device) -> None:
        """Allocate the lane's words and the peer's pidfd, which `end` releases."""
        if self._peer_number is not None:
            self._peer = open_peer(self._peer_number)
        self.words = self._spare.take(functools.partial(PinnedWords, device))
        self._opened = True
        self.watcher.add(self)

    # -- the application's threads -------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Let `end` close the endpoint. Raises if `end` was called: the caller then still owns it."""
        system.under(self.lock, self._adopt)

    def _adopt(self) -> None:
        if self.closed:
            raise ResourceClosedError("the bridge was closed meanwhile; make a new one.")
        self._adopted = True

    def wait(self, stream: KnownStream, value: int, wait: Wait) -> None:
        """Enqueue a wait."""
        self._check()
        pending = self._note(value, wait)  # first: the calling thread's own stream blocks in the next call
        self.watcher.poke()
        try:
            self.words.wait(stream, 0, pending.value)
        except GpuInteropError:  # not Ctrl-C, which may strike after the call
            try:
                self._waits.remove(pending)
            except ValueError:  # the watcher has taken a signal for it
                if not self._timeline:
                    self._unclaimed.append(None)
            raise
        if self.refusal is not None:  # since the check above: only this thread can release the wait
            self.cancel(self.refusal)

    @locked
    def _note(self, value: int, wait: Wait) -> _Waiting:
        """Note a pending wait. Binary waits pass in the order of their numbers."""
        pending = _Waiting(value if self._timeline else next(self._numbers), wait)
        wait.reached = functools.partial(self._has_stored, pending.value)
        try:
            self._ordered = pending.value >= self._waits[-1].value and self._ordered
        except IndexError:
            self._ordered = True
        self._waits.append(pending)
        return pending

    def _has_stored(self, value: int) -> bool:
        """Whether `arrived` has the value, so that streams that wait for it go on."""
        return self._passed >= value

    def signal(self, stream: KnownStream, value: int) -> None:
        """Enqueue a signal."""
        self._check()
        system.under(self._enqueuing, self._signal, stream, value)
        self.watcher.poke()
        if self.failed:  # since the check above
            system.under(self.lock, self._drop_signals, limit=_LOCK_LIMIT_S)

    def _signal(self, stream: KnownStream, value: int) -> None:
        """Enqueue the next count of the stream's word, in the order in which the stream writes it."""
        out = self._out(stream)
        out.written += 1  # in this order: Ctrl-C in between only skips a number
        pending = _Signal(value, out.written, stream)
        if (failure := stream.tell_failure()) is not None:  # failed before the numbering: `is_void` misses this
            raise again(failure)
        out.pending.append(pending)
        self.watcher.poke()  # Ctrl-C may strike after the call
        try:
            self.words.write(stream, out.index, out.written)
        except GpuInteropError:
            out.written -= 1
            with contextlib.suppress(ValueError):  # the lane has failed, and dropped it
                out.pending.remove(pending)
            raise

    def host_wait(self, value: int, timeout: float) -> bool:
        """Block the calling thread, for `system.SLICE` at most. Other calls of the endpoint may come in between."""

        def look() -> bool:
            self._check()
            # The watcher may be stuck in a poll. Otherwise wait for its poll: a timeout of 0 must still see a signal.
            limit = max(_LAST_LOOK_S, timeout)
            return system.under(self.lock, lambda: system.holds(self.lock) and self._take(value), limit=limit)

        if system.until(look, timeout):
            return True
        if self._peer is None or not ended(self._peer):
            return False
        if look():  # the peer may have signalled before it died
            return True
        raise self._peer_died()

    def call(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Call the endpoint in the application's thread."""
        self._check()
        return system.under(self.lock, self._call, function, *arguments, limit=_LOCK_LIMIT_S)

    def _call(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        if not system.holds(self.lock):
            raise ResourceBusyError(
                f"expected wait(timeout=0) of {self.endpoint.label} not to block, got no answer in {_LOCK_LIMIT_S:g} s."
            )
        return function(*arguments)

    def cancel(self, error: GpuInteropError) -> None:
        """Let the waiting streams go on; they, and later calls on the lane, fail with `error`.

        Signals of streams that do not fail are still forwarded.
        """
        system.under(self.lock, self._cancel, error, limit=_LOCK_LIMIT_S)

    def _cancel(self, error: GpuInteropError) -> None:
        self._stuck = self._stuck or not system.holds(self.lock)  # before the check: `end` closes first
        if not self.closed:
            self._refuse(error)

    def end(self) -> None:
        """Forward the last signals and release everything. Streams no longer use the words."""
        held = system.under(self.lock, self._end, limit=_LOCK_LIMIT_S)
        self.watcher.remove(self)
        # Without the lock, which the watcher may be waiting for.
        try:
            if held and self._peer is not None:
                os.close(self._peer)
            if held and self._adopted:
                self.endpoint.close()
        finally:
            if self._opened and not self._stuck:
                self._spare.give(self.words)
        if self._stuck:
            what = "a page of words is" if held else "it and a page of words are"
            warn_leak(f"{self.endpoint.label} was stuck in wait(timeout=0), which must not block; {what} left behind")

    def _end(self) -> bool:
        if held := system.holds(self.lock):
            self._look(time.monotonic())
        self.closed = True
        self._stuck = self._stuck or not held
        self.refusal = self.refusal or ResourceClosedError(f"{self.endpoint.label} is closed.")
        return held

    def _check(self) -> None:
        if self.refusal is not None:
            raise again(self.refusal)
        self.watcher.start()  # a failure to start must show here, before a stream waits

    def _out(self, key: KnownStream) -> _Out:
        out = self._outs.get(key)
        if out is None:
            taken = {entry.index for entry in self._outs.values()}
            free = next((index for index in range(1, PinnedWords.COUNT) if index not in taken), None)
            if free is None:
                out = self._idle_out()
                del self._outs[out.key]
                out.key = key
            else:
                out = _Out(free, key)
            self._outs[key] = out
        return out

    def _idle_out(self) -> _Out:
        """Find a word whose stores have all been seen, so that another stream may use it."""
        for out in list(self._outs.values()):
            if not out.pending:
                return out
        raise InvalidArgumentError(
            "stream",
            f"{PinnedWords.COUNT - 1} streams have still to signal {self.endpoint.label}; signal from fewer, or "
            "bridge it once more.",
        )

    # -- the watcher ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether waits or signals are pending."""
        return not (self.failed or self.closed) and (
            _has_any(self._waits) or any(_has_any(out.pending) for out in list(self._outs.values()))
        )

    def step(self, now: float) -> bool:
        """Poll once; return whether anything has happened."""
        return system.under(self.lock, self._look, now)

    def _look(self, now: float) -> bool:
        if self.closed or self.failed:
            return False
        try:
            moved = self._forward()
            arrived = self._arrive()
            if not (moved or arrived):
                self._check_peer(now)
        except GpuInteropError as error:
            self._fail(error)
            return True
        except BaseException as error:  # a user's endpoint may raise anything, which must not end this thread
            failure = PeerError(f"{self.endpoint.label} failed in the bridge's watcher: {error!r}.")
            failure.__cause__ = error
            self._fail(failure)
            return True
        return moved or arrived

    def _arrive(self) -> bool:
        """Store the foreign semaphore's state in `arrived`."""
        moved = False
        while (pending := self._next()) is not None:
            if pending.value > self._passed:
                if not self._take(pending.value):
                    return moved
                self.words.store(0, pending.value)
                self._passed = pending.value
                if self.refusal is not None:  # `cancel` did not wait for this thread
                    self._let_go(self.refusal)
                    return True
            with contextlib.suppress(ValueError):
                self._waits.remove(pending)
            moved = True
        return moved

    def _next(self) -> _Waiting | None:
        """The wait that must pass first. Other threads add waits, and remove those that could not be enqueued."""
        # Streams may wait out of order: the least value comes first, or an earlier wait would hold it up.
        if self._timeline and not self._ordered:
            return min(self._waits.copy(), key=_value_of, default=None)
        try:
            return self._waits[0]
        except IndexError:
            return None

    def _take(self, value: int) -> bool:
        """Whether a wait may pass."""
        if self._timeline:
            return self.endpoint.wait(value, 0.0)
        if self._unclaimed:
            self._unclaimed.popleft()
            return True
        return self.endpoint.wait(0, 0.0)

    def _forward(self) -> bool:
        """Forward the signals of streams to the endpoint."""
        done = [(out, out.ready(self.words.load(out.index))) for out in list(self._outs.values()) if out.pending]
        if self._timeline:  # the largest of several covers the others
            told = [pending.value for _, ready in done for pending in ready if not pending.is_void]
            if told and (value := max(told)) > self._forwarded:
                self.endpoint.signal(value)
                self._forwarded = value
        for out, ready in done:
            for pending in ready:
                # Signals of a failed stream are not forwarded.
                if not self._timeline and not pending.is_void:
                    self.endpoint.signal(0)
                out.pending.popleft()
        return any(ready for _, ready in done)

    def _check_peer(self, now: float) -> None:
        if self._peer is None or not self._waits or now - self._peer_checked < _PEER_CHECK_S:
            return
        self._peer_checked = now
        if ended(self._peer) and not self._arrive():  # the peer may have signalled before it died
            raise self._peer_died()

    def _peer_died(self) -> PeerError:
        return PeerError(f"process {self._peer_number}, which was to signal {self.endpoint.label}, has died.")

    def _fail(self, error: GpuInteropError) -> None:
        """Fail the lane: its endpoint is unusable."""
        self.failed = True
        self._refuse(error)
        self._drop_signals()

    def _drop_signals(self) -> None:
        """Fail the streams whose signals, enqueued or pending, can no longer be forwarded."""
        assert self.refusal is not None
        for out in list(self._outs.values()):
            for pending in _taken(out.pending):
                pending.stream.fail(self.refusal)

    def _refuse(self, error: GpuInteropError) -> None:
        self.refusal = self.refusal or error
        self._let_go(self.refusal)

    def _let_go(self, error: GpuInteropError) -> None:
        """Fail the waiting streams, then release them: in this order, later results are never taken as valid."""
        for pending in _taken(self._waits):
            fail_wait(pending.wait, error)
        self.words.store(0, _RELEASED)
        self._passed = _RELEASED


def _taken(entries: deque[T]) -> Iterator[T]:
    """Take one entry after the other off, until there is none; other threads may take them too."""
    while True:
        try:
            entry = entries.popleft()
        except IndexError:
            return
        yield entry


def _has_any(entries: deque[T]) -> bool:
    """Whether there are entries. Indexing has one order with other threads' appends; without the GIL `bool` has not.

    So either `Watcher._sleep` sees an append, or `Watcher.poke`, which follows the append, sees that the thread sleeps.
    """
    try:
        entries[0]
    except IndexError:
        return False
    return True


def _value_of(pending: _Waiting) -> int:
    return pending.value


def open_peer(pid: int) -> int:
    """Open a pidfd of the process to watch; the caller closes it."""
    if sys.platform != "linux":
        raise InvalidArgumentError(
            "peer", f"expected none on {sys.platform}, which cannot watch a process, got {pid!r}."
        )
    number = check_int(pid, "peer", minimum=1, maximum=2**31 - 1)
    try:
        return system.opened("pidfd_open", os.pidfd_open, number)
    except ProcessLookupError:
        raise PeerError(f"there is no process {pid}; has it died already?") from None
    except OSError as error:
        raise InvalidArgumentError(
            "peer", f"expected a process that can be watched, got {pid} ({error.strerror})."
        ) from error


def ended(process: int) -> bool:
    """Whether the process of a pidfd has ended."""
    return system.poll(process, select.POLLIN, 0) != 0


class Watcher:
    """The watcher's thread, started when the first operation is pending."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, None] = {}
        # Not an Event: the collector may end a bridge in this very thread, inside Event.wait(), whose lock is not
        # reentrant. SimpleQueue.put() is.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._sleeping = False
        self._stopping = False
        self._cancel_at: float | None = None
        self._starting = threading.RLock()
        self._thread: system.Thread | None = None
        self._failure: GpuInteropError | None = None

    # -- the application's threads -------------------------------------------------------------------------------

    def add(self, lane: Lane) -> None:
        self._lanes[lane] = None

    def remove(self, lane: Lane) -> None:
        self._lanes.pop(lane, None)
        self.poke()

    def poke(self) -> None:
        """Wake the thread: an operation is pending, or something has changed."""
        if self._sleeping:
            self._wake.put(None)

    def check(self) -> None:
        """Raise if the thread has stopped polling, or stops because the interpreter is exiting."""
        system.check_exit()
        if self._failure is not None:
            raise again(self._failure)

    def start(self) -> None:
        """Start the thread, if it is not running."""
        self.check()
        if self._thread is None and not self._stopping:
            system.under(self._starting, self._start)

    def _start(self) -> None:
        if self._thread is None:
            # An interrupt before the assignment leaves two threads, which is harmless.
            self._thread = system.start_thread(self._run, self._exit)

    def cancel_after(self, seconds: float) -> None:
        """Cancel operations that are still pending after `seconds`."""
        self._cancel_at = time.monotonic() + seconds
        self._wake.put(None)

    def stop(self) -> None:
        """Tell the thread to end."""
        self._stopping = True
        self._wake.put(None)

    def cancel(self, error: GpuInteropError) -> None:
        for lane in list(self._lanes):
            lane.cancel(error)

    def _exit(self) -> None:
        """Let waiting streams go on and refuse further calls, because the interpreter is exiting."""
        self.cancel(ResourceClosedError("the interpreter is exiting while a stream still waits."))
        self.stop()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:  # a mistake of ours, which must not leave streams blocked
            failure = PeerError(f"the bridge's watcher has failed: {error!r}.")
            failure.__cause__ = error
            self._failure = failure
            self.cancel(failure)
            raise

    def _watch(self) -> None:
        since = time.monotonic()  # the time of the last event
        while not self._stopping:
            now = time.monotonic()
            if self._cancel_at is not None and now >= self._cancel_at:
                self._cancel_at = None
                self.cancel(ResourceClosedError("the bridge was closed while a stream still waited."))
            moved = busy = False
            for lane in list(self._lanes):
                if lane.busy:
                    busy = True
                    moved |= lane.step(now)
            if moved:
                since = now
            elif not busy:
                if self._cancel_at is not None and not self._lanes:
                    self._cancel_at = None
                self._sleep(None if self._cancel_at is None else max(0.0, self._cancel_at - now), idle=True)
                since = time.monotonic()
            elif now - since < _SPIN_S:
                time.sleep(0)  # releases the GIL
            elif self._sleep(min((now - since) * _PAUSE_SHARE, _LONGEST_PAUSE_S)):
                since = time.monotonic()

    def _sleep(self, seconds: float | None, *, idle: bool = False) -> bool:
        """Sleep until something new is pending, at most `seconds`; return whether something is."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._wake.get_nowait()
        self._sleeping = True
        try:
            if self._stopping or (idle and any(lane.busy for lane in list(self._lanes))):
                return True  # the entry came before `poke` could wake us
            self._wake.get(timeout=None if seconds is None else min(seconds, _LONGEST_SLEEP_S))
        except queue.Empty:
            return False
        finally:
            self._sleeping = False
        return True
