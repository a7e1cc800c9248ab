"""The watcher: one thread per bridge. It polls words and foreign semaphores and never calls a GPU's driver.

A call into HIP or CUDA could block until another thread's call (a synchronization, a free) returns, which may itself
wait for the watcher. The next drain releases objects that the garbage collector finalizes here, as everywhere.

A lane is one bridged semaphore. Streams wait for its word 0, `arrived`: a timeline's foreign value, or the number of a
binary semaphore's last wait that has passed. Each stream that signals has its own word, to which it writes the number
of each signal, because only the writes of one stream are ordered.

A thread records each wait and each signal, then enqueues it; if the driver refuses, the thread removes the record. When
the endpoint has reached a recorded wait's value, the watcher stores `arrived`. When a stream has written the number of
a recorded signal, the watcher calls the endpoint, unless the stream ran on after a failed wait. If the endpoint fails,
all of them fail; if the lane is cancelled, its waits fail. The monitor protects the records and the words that the CPU
writes, but is not held while the endpoint is called, because that call may never return.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import select
import sys
import threading
import time
from bisect import insort
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, TypeVarTuple

from .. import system
from .._arguments import check_int
from .._core.lifetime import locked
from .._core.own_timeline import PinnedWords, Spare
from .._core.streams import Wait, fail_wait, order
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
    from .._core.streams import KnownStream
    from ._endpoints import Endpoint

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_SPIN_S: Final = 1e-3  # a handoff takes less if both sides are working
_LONGEST_PAUSE_S: Final = 2e-3
_PAUSE_SHARE: Final = 1 / 16  # longest pause, as a share of the time waited so far
_RELEASED: Final = 2**63 - 1
_CALL_LIMIT_S: Final = 1.0  # if a poll takes longer, the endpoint is considered stuck
_LAST_LOOK_S: Final = 0.01  # how long an expired `host_wait` waits for the watcher's poll
_LONGEST_SLEEP_S: Final = 3600.0  # locks do not accept infinity


class _Waiting(NamedTuple):
    """A recorded wait."""

    value: int  # that `arrived` must reach
    wait: Wait


class _Signal(NamedTuple):
    """A recorded signal."""

    value: int
    stream: KnownStream
    word: int
    number: int  # that the stream writes to the word: its position in the order of all enqueued work


class Lane:
    """One bridged semaphore: its words, its endpoint, and its recorded waits and signals."""

    def __init__(
        self, watcher: Watcher, endpoint: Endpoint, peer: Peer | None, words: PinnedWords, spare: Spare[PinnedWords]
    ) -> None:
        self.watcher = watcher
        self.endpoint = endpoint
        self.words = words
        self.refusal: GpuInteropError | None = None  # of calls; a cancelled lane still forwards signals
        self.ended = False  # the endpoint has failed or is being closed: the watcher uses neither it nor the words
        self._peer = peer
        self._spare = spare
        self._adopted = False  # whether `end` closes the endpoint
        self._timeline = endpoint.kind is Timeline
        self._calling = threading.RLock()  # held during each call of the endpoint
        self._enqueuing = threading.RLock()  # held to record and enqueue a signal: a stream writes numbers in order
        self._waits: list[_Waiting] = []  # in the order of values, in which they must pass
        self._passed = 0  # the last value stored in `arrived`
        self._unclaimed: list[None] = []  # a binary semaphore's signals, taken for waits that the driver then refused
        self._signals: list[_Signal] = []
        self._forwarded = 0
        watcher.lanes[self] = None

    # -- the application's threads -------------------------------------------------------------------------------

    @locked
    def adopt(self) -> None:
        """Let `end` close the endpoint. Raises if `end` was called; then the caller still owns the endpoint."""
        if self.ended:
            raise ResourceClosedError("the bridge was closed meanwhile; make a new one.")
        self._adopted = True

    def wait(self, stream: KnownStream, value: int, wait: Wait) -> None:
        """Enqueue a wait."""
        self.watcher.start()
        record = self._note_wait(value, wait)  # first, because the calling thread's own stream blocks in the next call
        self.watcher.poke()
        try:
            self.words.wait(stream, 0, record.value)
        except GpuInteropError:  # not Ctrl-C, which may arrive after the call
            self._settle(record, 0)
            raise
        # A stream that was released during the call, for example the calling thread's own, must raise here.
        if self.refusal is not None:
            _raise_failure(stream)

    @locked
    def _note_wait(self, value: int, wait: Wait) -> _Waiting:
        self._check()
        wait.number = next(order)
        record = _Waiting(value if self._timeline else wait.number, wait)
        wait.reached = lambda: self._passed >= record.value
        insort(self._waits, record, key=operator.attrgetter("value"))
        return record

    def signal(self, stream: KnownStream, value: int) -> None:
        """Enqueue a signal."""
        self.watcher.start()
        system.under(self._enqueuing, self._signal, stream, value)

    def _signal(self, stream: KnownStream, value: int) -> None:
        record = self._note_signal(stream, value)
        self.watcher.poke()
        try:
            _raise_failure(stream)  # if it failed before the record, `is_void` would miss it
            self.words.write(stream, record.word, record.number)
        except GpuInteropError:
            self._forget(record)
            raise

    @locked
    def _note_signal(self, stream: KnownStream, value: int) -> _Signal:
        self._check()
        word = next((record.word for record in reversed(self._signals) if record.stream is stream), 0)
        if not word:
            taken = {record.word for record in self._signals}
            word = next((number for number in range(1, PinnedWords.COUNT) if number not in taken), 0)
        if not word:
            what = f"expected at most {len(taken)} streams with pending signals of {self.endpoint.label}, got one more"
            raise InvalidArgumentError("stream", f"{what}; signal from fewer streams, or bridge it a second time.")
        record = _Signal(value, stream, word, next(order))
        self._signals.append(record)
        return record

    def host_wait(self, value: int, timeout: float) -> bool:
        """Block the calling thread, for `system.SLICE` at most. The endpoint may be called meanwhile."""

        def to_release() -> bool:
            self._check()
            # Unless the watcher is stuck, wait for its poll, because a timeout of 0 must still see a signal.
            limit = max(_LAST_LOOK_S, timeout)
            return system.under(self._calling, lambda: system.holds(self._calling) and self._take(value), limit=limit)

        return system.until(to_release, timeout)

    def call(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Call the endpoint in the application's thread."""
        self._check()
        return system.under(self._calling, self._call, function, *arguments, limit=_CALL_LIMIT_S)

    def _call(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        if not system.holds(self._calling):
            raise ResourceBusyError(
                f"expected wait(timeout=0) of {self.endpoint.label} not to block, got no answer in {_CALL_LIMIT_S:g} s."
            )
        return function(*arguments)

    def _check(self) -> None:
        self.watcher.check()
        if self.refusal is not None:
            raise again(self.refusal)

    @locked
    def cancel(self, error: GpuInteropError) -> None:
        """Release the waiting streams. They and later calls on the lane fail; other streams' signals are forwarded."""
        if not self.ended:
            self._let_go(error)

    def end(self) -> None:
        """Forward the last signals and release everything. Streams do not use the words any more."""
        held = system.under(self._calling, self._end, limit=_CALL_LIMIT_S)
        self.watcher.lanes.pop(self, None)
        self._spare.put_back(self.words)
        if not held:
            warn_leak(f"{self.endpoint.label} was stuck in wait(timeout=0), which must not block; it stays open")
            return
        if self._peer is not None:
            self._peer.close()
        if self._adopted:
            self.endpoint.close()

    def _end(self) -> bool:
        if held := system.holds(self._calling):
            self._poll()
        self._finish()
        return held

    @locked
    def _finish(self) -> None:
        self.ended = True
        self.refusal = self.refusal or ResourceClosedError(f"{self.endpoint.label} is closed.")
        self._waits.clear()
        self._signals.clear()

    # -- the watcher ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether waits or signals are recorded."""
        return bool(self._waits or self._signals)

    def step(self) -> bool:
        """Poll once; return whether anything has happened."""
        return system.under(self._calling, self._poll)

    def _poll(self) -> bool:
        try:
            moved = self._forward()
            return self._arrive() or moved
        except BaseException as error:  # an endpoint may raise anything, which must not end this thread
            self._fail(_explained(error, f"{self.endpoint.label} failed in the bridge's watcher"))
        return True

    def _arrive(self) -> bool:
        """Let the waits pass whose values the endpoint has reached."""
        moved = False
        while (record := next(iter(self._waits), None)) and (record.value <= self._passed or self._take(record.value)):
            self._settle(record, record.value)
            moved = True
        return moved

    def _take(self, value: int) -> bool:
        """Whether a wait may pass. A binary semaphore's signal is taken."""
        # Check this first: signals that the peer made before it exited still count.
        death = None if self._peer is None else self._peer.death(self.endpoint.label)
        if self._unclaimed:
            self._unclaimed.pop()
            return True
        if self.endpoint.wait(value, 0.0):
            return True
        if death is not None:
            raise death
        return False

    @locked
    def _settle(self, record: _Waiting, arrived: int) -> None:
        """Let a wait pass, or remove it (`arrived` is 0). If both happen, a signal remains that no wait needs."""
        if record in self._waits:
            self._waits.remove(record)
            if arrived > self._passed:
                self.words.store(0, arrived)
                self._passed = arrived
        elif not self._timeline:
            self._unclaimed.append(None)

    def _forward(self) -> bool:
        """Forward the signals that their streams have reached."""
        reached = self._reached()
        for record in reached:
            if not record.stream.is_void(record.number) and not (self._timeline and record.value <= self._forwarded):
                self.endpoint.signal(record.value)
                self._forwarded = record.value
            self._forget(record)
        return bool(reached)

    @locked
    def _reached(self) -> list[_Signal]:
        """The signals that their streams have written. The largest is first; a timeline needs only that one."""
        stored = {word: self.words.load(word) for word in {record.word for record in self._signals}}
        reached = [record for record in self._signals if record.number <= stored[record.word]]
        return sorted(reached, key=operator.attrgetter("value"), reverse=True)

    @locked
    def _forget(self, record: _Signal) -> None:
        """Remove the record of a signal."""
        with contextlib.suppress(ValueError):  # the lane has failed
            self._signals.remove(record)

    @locked
    def _fail(self, error: GpuInteropError) -> None:
        """Fail the lane and all streams with a pending wait or signal, because the endpoint is unusable."""
        if not self.ended:
            self._let_go(error)
            self.ended = True
            for record in self._signals:
                record.stream.fail(error)
            self._signals.clear()

    def _let_go(self, error: GpuInteropError) -> None:
        """Fail the waiting streams, then release them. In this order no later result looks valid."""
        self.refusal = self.refusal or error
        for record in self._waits:
            fail_wait(record.wait, self.refusal)
        self._waits.clear()
        self.words.store(0, _RELEASED)
        self._passed = _RELEASED


def _explained(error: BaseException, what: str) -> GpuInteropError:
    """The error with which streams fail."""
    if isinstance(error, GpuInteropError):
        return error
    failure = PeerError(f"{what}: {error!r}.")
    failure.__cause__ = error
    return failure


def _raise_failure(stream: KnownStream) -> None:
    if (failure := stream.take_failure()) is not None:
        raise again(failure)


class Peer:
    """The process that signals. Raises `InvalidArgumentError` if it cannot be watched, `PeerError` if it has exited."""

    def __init__(self, pid: int) -> None:
        if sys.platform != "linux":
            raise InvalidArgumentError("peer", f"expected None, because only Linux can watch a process, got {pid!r}.")
        self._pid = check_int(pid, "peer", minimum=1, maximum=2**31 - 1)
        try:
            self._process = system.opened("pidfd_open", os.pidfd_open, self._pid)
        except ProcessLookupError:
            raise PeerError(f"expected a running process, got {pid}; pass the signalling process's PID.") from None
        except OSError as error:
            raise InvalidArgumentError(
                "peer", f"expected a process that can be watched, got {pid} ({error.strerror})."
            ) from error

    def death(self, label: str) -> PeerError | None:
        """The error of waits for the process's signals, if it has exited."""
        died = system.poll(self._process, select.POLLIN, 0)
        return PeerError(f"process {self._pid}, which was to signal {label}, has died.") if died else None

    def close(self) -> None:
        os.close(self._process)


class Watcher:
    """The watcher's thread, which starts when the first operation is recorded."""

    def __init__(self) -> None:
        self.lanes: dict[Lane, None] = {}
        # A release wakes the thread, which acquires it. Not an Event: the collector may end a bridge in this thread
        # inside Event.wait(), whose lock is not reentrant. Not a SimpleQueue: before CPython 3.13, get(timeout) blocks
        # forever if the thread gets the CPU, or after a signal the GIL, only when the timeout has passed.
        self._wake = threading.Lock()
        self._stopping = False
        self._cancel_at = math.inf
        self._starting = threading.RLock()
        self._thread: system.Thread | None = None
        self._failure: GpuInteropError | None = None

    # -- the application's threads -------------------------------------------------------------------------------

    def poke(self) -> None:
        """Make the thread check again, because something was recorded or has changed."""
        try:  # noqa: SIM105 - faster, and each wait and signal of a stream calls this
            self._wake.release()
        except RuntimeError:  # the thread is already going to check
            pass

    def check(self) -> None:
        """Raise if the thread has stopped polling, or stops because the interpreter is exiting."""
        system.check_exit()
        if self._failure is not None:
            raise again(self._failure)

    def start(self) -> None:
        """Start the thread if it is not running. A failure must show before a stream waits."""
        if self._thread is None and not self._stopping:
            system.under(self._starting, self._start)

    def _start(self) -> None:
        if self._thread is None:
            # An interrupt before the assignment leaves two threads, which is harmless.
            self._thread = system.start_thread(self._run, self._exit)

    def cancel_after(self, seconds: float) -> None:
        """Cancel operations that are still pending after `seconds`."""
        self._cancel_at = time.monotonic() + seconds
        self.poke()

    def stop(self) -> None:
        """Tell the thread to end."""
        self._stopping = True
        self.poke()

    def cancel(self, error: GpuInteropError) -> None:
        for lane in list(self.lanes):
            lane.cancel(error)

    def _exit(self) -> None:
        """Release waiting streams and refuse further calls, because the interpreter is exiting."""
        self.cancel(ResourceClosedError("the interpreter is exiting while a stream still waits."))
        self.stop()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:  # a bug in this module, which must not leave streams blocked
            self._failure = _explained(error, "the bridge's watcher has failed")
            self.cancel(self._failure)
            raise

    def _watch(self) -> None:
        since = time.monotonic()  # the time of the last event
        while not self._stopping:
            self._wake.acquire(blocking=False)  # before the check, so that a later record ends the sleep
            now = time.monotonic()
            if now >= self._cancel_at:
                self._cancel_at = math.inf
                self.cancel(ResourceClosedError("the bridge was closed while a stream still waited."))
            busy = [lane for lane in list(self.lanes) if lane.busy]
            moved = [lane.step() for lane in busy]
            if any(moved):
                since = now
            elif busy and now - since < _SPIN_S:
                time.sleep(0)  # releases the GIL
            else:
                pause = min((now - since) * _PAUSE_SHARE, _LONGEST_PAUSE_S) if busy else self._cancel_at - now
                woken = self._wake.acquire(timeout=min(pause, _LONGEST_SLEEP_S))
                if woken or not busy:
                    since = time.monotonic()
        self.poke()  # wakes the other thread if there are two (`_start`)
