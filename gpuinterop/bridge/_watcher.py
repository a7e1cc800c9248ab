"""The watcher: one thread a bridge, which looks at words and at foreign semaphores, and never calls a GPU's driver.

A call into HIP or CUDA may block behind whatever another thread is doing there (a synchronisation, a free), and that
may be waiting for us. What the collector finalizes here is left to the next drain, as everywhere.

A lane is one bridged semaphore. Its word 0, `arrived`, is what streams wait for: the foreign value (a timeline), or how
many waits have passed (a binary one). Each stream that signals has a word of its own, which counts its signals: a
stream's writes are in order, those of two streams are not.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import itertools
import operator
import os
import queue
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from .. import system
from .._arguments import check_int
from .._core.monitor import after_fork, locked
from .._core.native_stream import Wait, fail_stream, fail_wait, order
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
    from .._core.native_stream import NativeStream
    from ._endpoints import Endpoint

T = TypeVar("T")

_SPIN_S: Final = 1e-3  # a handoff of two sides that both work takes less
_LONGEST_PAUSE_S: Final = 2e-3
_PAUSE_SHARE: Final = 1 / 16  # of the time that was waited so far: what a pause may add to it
_PEER_CHECK_S: Final = 5e-3
_RELEASED: Final = 2**63 - 1
_LOCK_LIMIT_S: Final = 1.0  # an endpoint that takes longer than this for a look is taken to be stuck
_HOST_SLICE_S: Final = 0.05  # after which a thread that waits for such an endpoint looks whether it is to stop
_LAST_LOOK_S: Final = 0.01  # for which a `host_wait` whose time is over waits for the watcher's look
_LONGEST_SLEEP_S: Final = 3600.0  # locks take no infinity


class _Waiting(NamedTuple):
    """A wait that was enqueued, or is about to be."""

    value: int
    """What is stored for it."""
    wait: Wait


class _Signal:
    """A signal that a stream was given, or is about to be."""

    __slots__ = ("number", "serial", "stream", "value")

    def __init__(self, value: int, number: int, stream: NativeStream) -> None:
        self.value = value
        self.number = number
        """What the stream stores."""
        self.stream = stream
        self.serial = next(order)

    @property
    def is_void(self) -> bool:
        """It was signalled behind a wait that did not come: nobody is told."""
        return self.stream.is_void(self.serial)


class _Out:
    """The word by which one stream signals."""

    __slots__ = ("index", "key", "pending", "written")

    def __init__(self, index: int, key: NativeStream) -> None:
        self.index = index
        self.key = key
        self.written = 0
        """How many signals were enqueued."""
        self.pending: deque[_Signal] = deque()

    def ready(self, stored: int) -> list[_Signal]:
        """Those that the stream has come to."""
        try:
            most = stored - self.pending[0].number + 1  # one may be left out, and none is there twice
        except IndexError:  # it could not be enqueued
            return []
        return [pending for pending in list(itertools.islice(self.pending, max(0, most))) if pending.number <= stored]


def _with(lock: threading.RLock, call: Callable[[bool], T], limit: float = -1) -> T:
    """Run `call` with the lock, or after `limit` seconds without: it is told which. An interrupt does not keep it."""
    try:  # as in `monitor.locked`
        return call(lock.acquire(timeout=limit))
    finally:
        try:  # noqa: SIM105
            lock.release()
        except RuntimeError:
            pass


class Lane:
    """One bridged semaphore: its words, its endpoint, and what is pending.

    The application's threads append to what is pending and then enqueue; the watcher takes away. `lock` is held for as
    long as a look takes, by the watcher, and by whoever ends the lane.
    """

    def __init__(self, watcher: Watcher, spare: Spare[PinnedWords], endpoint: Endpoint, peer: int | None) -> None:
        self.watcher = watcher
        self.endpoint = endpoint
        self.lock = threading.RLock()
        self.refusal: GpuInteropError | None = None
        """Why no more is taken: it was cancelled, or it has failed. Unless it has failed, what is signalled is told."""
        self.failed = False
        self.closed = False
        self._stuck = False
        """Somebody may store a word at any time, without the lock."""
        self._timeline = endpoint.kind is Timeline
        self._waits: deque[_Waiting] = deque()
        self._ordered = True
        """Whether the first of a timeline's waits is the least."""
        self._passed = 0
        """What `arrived` was last set to."""
        self._numbers = itertools.count(1)  # of a binary semaphore's waits
        self._unclaimed: deque[None] = deque()  # signals that were taken for waits that could not be enqueued
        self._outs: dict[NativeStream, _Out] = {}
        self._forwarded = 0
        self._enqueuing = threading.RLock()
        self._peer_number = peer
        self._peer_checked = 0.0
        self._spare = spare
        # What is released once, however often an interrupt makes `end` begin again.
        self._made: list[PinnedWords] = []
        self._peers: list[int] = []
        self._words_once, self._peers_once = iter(self._made), iter(self._peers)
        self._endpoint_once: Iterator[Callable[[], None]] = iter(())

    @property
    def words(self) -> PinnedWords:
        return self._made[0]

    def open(self, device: Device) -> None:
        """Make what it needs; what it has made is released by `end`."""
        if self._peer_number is not None:
            self._peers.extend(map(open_peer, (self._peer_number,)))
        self._made.extend(map(self._spare.take, (functools.partial(PinnedWords, device),)))
        self.watcher.add(self)

    # -- the application's threads -------------------------------------------------------------------------------

    def adopt(self, once: Iterator[Callable[[], None]]) -> None:
        """From now on `end` closes the endpoint, by `once`. Raises if that was called: it is still the caller's."""
        _with(self.lock, functools.partial(self._adopt, once))

    def _adopt(self, once: Iterator[Callable[[], None]], held: bool) -> None:
        if self.closed:
            raise ResourceClosedError("the bridge was closed meanwhile.")
        self._endpoint_once = once

    def wait(self, stream: NativeStream, value: int, wait: Wait) -> None:
        """Enqueue a wait."""
        self._check()
        pending = self._note(value, wait)  # first: the calling thread's own stream blocks in the next call
        self.watcher.poke()
        try:
            self.words.wait(stream, 0, pending.value)
        except Exception:  # not Ctrl-C, which may strike behind the call
            try:
                self._waits.remove(pending)
            except ValueError:  # a signal was taken for it
                if not self._timeline:
                    self._unclaimed.append(None)
            raise
        if self.refusal is not None:  # since the look above: nobody else sees to this one
            self.cancel(self.refusal)

    @locked
    def _note(self, value: int, wait: Wait) -> _Waiting:
        """Binary waits pass in the order of their numbers."""
        pending = _Waiting(value if self._timeline else next(self._numbers), wait)
        wait.reached = functools.partial(self._has_stored, pending.value)
        try:
            self._ordered = pending.value >= self._waits[-1].value and self._ordered
        except IndexError:
            self._ordered = True
        self._waits.append(pending)
        return pending

    def _has_stored(self, value: int) -> bool:
        """Whether streams that wait for the value go on by themselves."""
        return self._passed >= value

    def signal(self, stream: NativeStream, value: int) -> None:
        """Enqueue a signal."""
        self._check()
        _with(self._enqueuing, functools.partial(self._signal, stream, value))
        self.watcher.poke()
        if self.failed:  # since the look above
            _with(self.lock, self._drop_signals, _LOCK_LIMIT_S)

    def _signal(self, stream: NativeStream, value: int, held: bool) -> None:
        """The stream's word counts in the order in which it is written."""
        out = self._out(stream)
        out.written += 1  # in this order: Ctrl-C in between leaves out a number, and that is all
        pending = _Signal(value, out.written, stream)
        if (failure := stream.tell_failure()) is not None:  # before it was numbered, so `is_void` would not say so
            raise again(failure)
        out.pending.append(pending)
        self.watcher.poke()  # Ctrl-C may strike behind the call
        try:
            self.words.write(stream, out.index, out.written)
        except Exception:
            out.written -= 1
            out.pending.remove(pending)
            raise

    def host_wait(self, value: int, deadline: float) -> bool:
        """Block the calling thread; other calls of the endpoint come in between."""
        pauses = system.pauses()
        checked = time.monotonic()
        gone = False
        while True:
            self._check()
            left = deadline - time.monotonic()
            # The watcher may be stuck in a look; wait for one that is not: a time-out of 0 is to find what is there.
            limit = max(_LAST_LOOK_S, min(left, _HOST_SLICE_S))
            if _with(self.lock, lambda held: held and self._take(value), limit):
                return True
            if gone:
                raise self._peer_died()
            now = time.monotonic()
            if self._peers and now - checked >= _PEER_CHECK_S:
                checked = now
                if gone := ended(self._peers[0]):
                    continue  # it may have signalled before it died
            if now >= deadline:
                return False
            time.sleep(min(next(pauses), deadline - now))

    def host_signal(self, value: int) -> None:
        self._check()
        _with(self.lock, functools.partial(self._host_signal, value), _LOCK_LIMIT_S)

    def _host_signal(self, value: int, held: bool) -> None:
        if not held:
            raise ResourceBusyError(f"{self.endpoint.label} is stuck in a look that was to take no time.")
        self.endpoint.signal(value)

    def cancel(self, error: GpuInteropError) -> None:
        """Let every stream go that waits here; it fails with `error`, and so does what is done with the lane.

        What streams signal that do not fail is still told.
        """
        _with(self.lock, functools.partial(self._cancel, error), _LOCK_LIMIT_S)

    def _cancel(self, error: GpuInteropError, held: bool) -> None:
        self._stuck = self._stuck or not held  # before the look: `end` closes first
        if not self.closed:
            self._refuse(error)

    def end(self) -> None:
        """Forward what was signalled to the last, and release everything; no stream uses the words any more."""
        held = _with(self.lock, self._end, _LOCK_LIMIT_S)
        self.watcher.remove(self)
        # Without the lock, which the watcher may be waiting for.
        done: list[object] = []
        try:
            if held:
                done.extend(map(os.close, self._peers_once))
                done.extend(map(operator.call, self._endpoint_once))
        finally:
            if not self._stuck:
                self._spare.give(self._words_once)
        if self._stuck:
            what = "a page of words is" if held else "it and a page of words are"
            warn_leak(f"{self.endpoint.label} was stuck in a look that was to take no time; {what} left behind")

    def _end(self, held: bool) -> bool:
        if held:
            self._look(time.monotonic())
        self.closed = True
        self._stuck = self._stuck or not held
        self.refusal = self.refusal or ResourceClosedError(f"{self.endpoint.label} is closed.")
        return held

    def _check(self) -> None:
        if self.refusal is not None:
            raise again(self.refusal)
        self.watcher.start()  # what cannot be is to fail here, before anything waits

    def _out(self, key: NativeStream) -> _Out:
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
        """One whose stores have all been seen: another stream's may follow them."""
        for out in list(self._outs.values()):
            if not out.pending:
                return out
        raise InvalidArgumentError(
            "stream",
            f"{PinnedWords.COUNT - 1} streams have still to signal this bridged semaphore: signal from fewer, or "
            "bridge it once more.",
        )

    # -- the watcher ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something is pending."""
        return not (self.failed or self.closed) and (
            bool(self._waits) or any(out.pending for out in list(self._outs.values()))
        )

    def step(self, now: float) -> bool:
        """Look once; whether anything has happened."""
        with self.lock:  # in this thread no interrupt strikes
            return self._look(now)

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
        except BaseException as error:  # of an endpoint that is not ours; and nothing may end this thread
            failure = PeerError(f"{self.endpoint.label} failed in the bridge's watcher: {error!r}.")
            failure.__cause__ = error
            self._fail(failure)
            return True
        return moved or arrived

    def _arrive(self) -> bool:
        """Store what the foreign semaphore has reached."""
        moved = False
        while (pending := self._next()) is not None:
            if pending.value > self._passed:
                if not self._take(pending.value):
                    return moved
                self.words.store(0, pending.value)
                self._passed = pending.value
                if self.refusal is not None:  # `cancel` did not wait for us
                    self._let_go(self.refusal)
                    return True
            with contextlib.suppress(ValueError):
                self._waits.remove(pending)
            moved = True
        return moved

    def _next(self) -> _Waiting | None:
        """The wait that is to pass first. Other threads add to them, and take away what could not be enqueued."""
        # Streams may wait out of order: the least comes first, or the one behind it would hold it up.
        if self._timeline and not self._ordered:
            return min(list(self._waits), key=_value_of, default=None)
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
        """Signal what streams have signalled."""
        done = [(out, out.ready(self.words.load(out.index))) for out in list(self._outs.values()) if out.pending]
        if self._timeline:  # several at once: the largest says it all
            told = [pending.value for _, ready in done for pending in ready if not pending.is_void]
            if told and (value := max(told)) > self._forwarded:
                self.endpoint.signal(value)
                self._forwarded = value
        for out, ready in done:
            for pending in ready:
                # What a failed stream does is not told.
                if not self._timeline and not pending.is_void:
                    self.endpoint.signal(0)
                out.pending.popleft()
        return any(ready for _, ready in done)

    def _check_peer(self, now: float) -> None:
        if not self._peers or not self._waits or now - self._peer_checked < _PEER_CHECK_S:
            return
        self._peer_checked = now
        if ended(self._peers[0]) and not self._arrive():  # it may have signalled before it died
            raise self._peer_died()

    def _peer_died(self) -> PeerError:
        return PeerError(f"process {self._peer_number}, which was to signal {self.endpoint.label}, has died.")

    def _fail(self, error: GpuInteropError) -> None:
        """The endpoint is of no use any more."""
        self.failed = True
        self._refuse(error)
        self._drop_signals(True)

    def _drop_signals(self, held: bool) -> None:
        """What streams have signalled, and have yet to, reaches nobody: they are told."""
        assert self.refusal is not None
        for out in list(self._outs.values()):
            while out.pending:
                fail_stream(out.pending.popleft().stream, self.refusal)

    def _refuse(self, error: GpuInteropError) -> None:
        if self.refusal is None:
            self.refusal = error
        self._let_go(self.refusal)

    def _let_go(self, error: GpuInteropError) -> None:
        """Release the streams that wait; first they are told, so that nobody takes what follows for right."""
        while self._waits:
            try:
                pending = self._waits.popleft()
            except IndexError:
                break
            fail_wait(pending.wait, error)
        self.words.store(0, _RELEASED)
        self._passed = _RELEASED


def _value_of(pending: _Waiting) -> int:
    return pending.value


def open_peer(pid: int) -> int:
    """A pidfd of the process whose death is to be noticed; the caller's."""
    if sys.platform != "linux":
        raise InvalidArgumentError("peer", "a process can be watched on Linux only.")
    number = check_int(pid, "peer", minimum=1, maximum=2**31 - 1)
    try:
        return os.pidfd_open(number)
    except ProcessLookupError:
        raise PeerError(f"there is no process {pid}; has it died already?") from None
    except OSError as error:
        raise InvalidArgumentError("peer", f"process {pid} cannot be watched ({error.strerror}).") from error


def ended(process: int) -> bool:
    """Whether a pidfd's process has."""
    poller = select.poll()  # not select(): descriptors may be large
    poller.register(process, select.POLLIN)
    return bool(poller.poll(0))


class Watcher:
    """The thread, started when something is first pending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lanes: dict[Lane, None] = {}
        # No Event: the collector may end a bridge in this very thread, in the middle of its wait(), and its lock is not
        # reentrant. A SimpleQueue's put() is.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._sleeping = False
        self._stopping = False
        self._cancel_at: float | None = None
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._failure: GpuInteropError | None = None
        _live.add(self)

    # -- the application's threads -------------------------------------------------------------------------------

    def add(self, lane: Lane) -> None:
        self._lanes[lane] = None

    def remove(self, lane: Lane) -> None:
        self._lanes.pop(lane, None)
        self.poke()

    def poke(self) -> None:
        """Something is pending, or has changed."""
        if self._sleeping:
            self._wake.put(None)

    def check(self) -> None:
        """Raise if it looks at nothing any more."""
        if self._failure is not None:
            raise again(self._failure)

    def start(self) -> None:
        """Start the thread, if that was not done."""
        self.check()
        if self._thread is not None or self._stopping:
            return
        _with(self._starting, self._start)

    def _start(self, held: bool) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # "can't start new thread"
                raise system.driver_error("pthread_create", errno.EAGAIN, str(error)) from error
            self._thread = thread  # an interrupt before this: then there are two, which is harmless

    def cancel_after(self, seconds: float) -> None:
        """What is still pending then is let go."""
        self._cancel_at = time.monotonic() + seconds
        self._wake.put(None)

    def stop(self, limit: float | None = None) -> None:
        """End the thread; from any thread but itself. Waits up to `limit` seconds for it."""
        self._stopping = True
        self._wake.put(None)
        thread = self._thread
        if limit is not None and thread is not None and thread is not threading.current_thread():
            thread.join(limit)

    def cancel(self, error: GpuInteropError) -> None:
        for lane in list(self._lanes):
            lane.cancel(error)

    def exiting(self) -> None:
        """The interpreter ends: what waits is let go, and nothing more is taken."""
        self._failure = ResourceClosedError("the interpreter is exiting while a stream still waits.")
        self.cancel(self._failure)
        self.stop()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:  # a mistake of ours; no stream is to pay for it with its life
            failure = PeerError(f"the bridge's watcher has failed: {error!r}.")
            failure.__cause__ = error
            self._failure = failure
            self.cancel(failure)
            raise

    def _watch(self) -> None:
        since = time.monotonic()  # when something has last happened
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
                time.sleep(0)  # lets go of the GIL
            elif self._sleep(min((now - since) * _PAUSE_SHARE, _LONGEST_PAUSE_S)):
                since = time.monotonic()

    def _sleep(self, seconds: float | None, *, idle: bool = False) -> bool:
        """Until something new is pending, or for that long; whether it was the former."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._wake.get_nowait()
        self._sleeping = True
        try:
            if self._stopping or (idle and any(lane.busy for lane in list(self._lanes))):
                return True  # it came before we could be poked
            self._wake.get(timeout=None if seconds is None else min(seconds, _LONGEST_SLEEP_S))
        except queue.Empty:
            return False
        finally:
            self._sleeping = False
        return True


_live: weakref.WeakSet[Watcher] = weakref.WeakSet()


def _exit() -> None:
    watchers = list(_live)
    for watcher in watchers:
        watcher.exiting()
    for watcher in watchers:
        watcher.stop(system.left_of_exit())


after_fork(_live.clear)  # in a child there is no thread, and its exit stores nothing in the parent's words
atexit.register(_exit)  # before the core's drain: what is registered last runs first
