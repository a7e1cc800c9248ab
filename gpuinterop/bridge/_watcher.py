"""The watcher: one thread a bridge, which looks at words and at foreign semaphores, and never calls a GPU's driver.

A call into HIP or CUDA may block behind whatever another thread is doing there (a synchronisation, a free), and that
may be waiting for us. So what is kept here holds no stream: those are known by a `Token`. And what the collector, or
the last reference to something, happens to finalize here is left to others (`kept_off_drivers`).

A lane is one bridged semaphore. Its word 0, `arrived`, is what streams wait for: the foreign value (a timeline), or how
many waits have passed (a binary one). Each stream that signals has a word of its own, which counts its signals: a
stream's writes are in order, those of two streams are not.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import os
import queue
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Final

from .. import system
from .._core.resource import check_int, kept_off_drivers
from .._core.stream import order
from .._core.words import PinnedWords
from ..errors import GpuInteropError, InvalidArgumentError, PeerError, ResourceBusyError, ResourceClosedError, again
from ..handles import Timeline

if TYPE_CHECKING:
    from .._core.resource import Reclaimer
    from .._core.stream import Stream
    from ._endpoints import Endpoint

_SPIN_S: Final = 1e-3  # a handoff of two sides that both work takes less
_LONGEST_PAUSE_S: Final = 2e-3
_PAUSE_SHARE: Final = 1 / 16  # of the time that was waited so far: what a pause may add to it
_PEER_CHECK_S: Final = 5e-3
_RELEASED: Final = 2**63 - 1
_LOCK_LIMIT_S: Final = 1.0  # an endpoint that takes longer than this for a look is taken to be stuck
_HOST_SLICE_S: Final = 0.05  # after which a thread that waits for such an endpoint looks whether it is to stop
_LAST_LOOK_S: Final = 0.01  # for which a `host_wait` whose time is over waits for the watcher's look
_LONGEST_SLEEP_S: Final = 3600.0  # locks take no infinity
_PER_THREAD: Final = 2  # the number by which CUDA and HIP call a default stream of each thread's own


class Token:
    """Stands for a native stream, whatever wrappers it has, without keeping one alive."""

    __slots__ = ("__weakref__", "_reclaimer", "failures", "pointer")

    def __init__(self, stream: Stream) -> None:
        self.pointer = stream._ptr
        self._reclaimer = stream._reclaimer
        self.failures: list[tuple[int, int]] = []
        """From the serial of a wait that did not come to that of when the stream was let go."""

    def fail(self, serial: int) -> None:
        """The wait of that serial will not come."""
        self.failures.append((serial, next(order)))

    def voids(self, serial: int) -> bool:
        """Whether what was enqueued then ran behind a wait that did not come."""
        return any(first <= serial < end for first, end in self.failures)


class _Tokens:
    """All there are: what is pending keeps them."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[tuple[int, int, int], Token] = weakref.WeakValueDictionary()
        self.lock = threading.Lock()

    def of(self, stream: Stream) -> Token:
        """The one of the native stream, in whatever bridge."""
        key = (id(stream._reclaimer), *_number(stream))
        found = self._known.get(key)
        if found is None:
            with self.lock:
                found = self._known.get(key)
                if found is None:
                    found = self._known[key] = Token(stream)
        return found

    def all_of(self, reclaimer: Reclaimer, pointer: int) -> list[Token]:
        """Those of a pointer; several where each thread has a stream of that name."""
        return [token for key, token in list(self._known.items()) if key[:2] == (id(reclaimer), pointer)]


_tokens: Final = _Tokens()


class _Here(threading.local):
    """What the calling thread is called. Its ident would not do, which is another thread's when it has ended."""

    def __init__(self) -> None:
        self.serial = next(order)


_here: Final = _Here()


def _number(stream: Stream) -> tuple[int, int]:
    """What no other native stream has."""
    pointer = stream._ptr
    return pointer, _here.serial if pointer == _PER_THREAD else 0


class _Pending:
    """A wait that was enqueued, or a signal."""

    __slots__ = ("number", "serial", "token", "value")

    def __init__(self, token: Token, value: int, number: int = 0) -> None:
        self.serial = next(order)
        self.token = token
        self.value = value
        self.number = number
        """What a signal has its stream store."""


class _Out:
    """The word by which one stream signals."""

    __slots__ = ("index", "key", "pending", "written")

    def __init__(self, index: int, key: tuple[int, int]) -> None:
        self.index = index
        self.key = key
        self.written = 0
        """How many signals were enqueued."""
        self.pending: deque[_Pending] = deque()

    def ready(self, stored: int) -> list[_Pending]:
        """Those that the stream has come to."""
        try:
            most = stored - self.pending[0].number + 1  # one may be left out, and none is there twice
        except IndexError:  # it could not be enqueued
            return []
        return [pending for pending in list(itertools.islice(self.pending, max(0, most))) if pending.number <= stored]


class Lane:
    """One bridged semaphore: its words, its endpoint, and what is pending.

    The application's threads append to what is pending and then enqueue; the watcher takes away. `lock` is held for as
    long as a look takes, by the watcher, and by whoever ends the lane.
    """

    def __init__(
        self, watcher: Watcher, words: PinnedWords, endpoint: Endpoint, watch: int | None, peer: int | None
    ) -> None:
        self.watcher = watcher
        self.words = words
        self.endpoint = endpoint
        self.lock = threading.RLock()  # a finalizer may come in between
        self.refusal: GpuInteropError | None = None
        """Why no more is taken: it was cancelled, or it has failed. Unless it has failed, what is signalled is told."""
        self.failed = False
        self.closed = False
        self.stopped = False
        """Threads in `host_wait` are to leave it."""
        self._adopted = False
        self._timeline = endpoint.kind is Timeline
        self._waits: deque[_Pending] = deque()
        self._ordered = True
        """Whether the first of a timeline's waits is the least."""
        self._appending = threading.Lock()
        self._passed = 0
        """What `arrived` was last set to."""
        self._numbers = itertools.count(1)  # of a binary semaphore's waits
        self._unclaimed: deque[None] = deque()  # signals that were taken for waits that could not be enqueued
        self._outs: dict[tuple[int, int], _Out] = {}
        self._forwarded = 0
        self.enqueuing = threading.Lock()
        self._peer = watch
        self._peer_number = peer
        self._peer_checked = 0.0

    # -- the application's threads -------------------------------------------------------------------------------

    def adopt(self) -> None:
        """From now on `end` closes the endpoint. Raises if that was called: then it is still the caller's."""
        with self.lock:
            if self.closed:
                raise ResourceClosedError("the bridge was closed meanwhile.")
            self._adopted = True

    def wait(self, stream: Stream, value: int) -> None:
        """Enqueue a wait."""
        self._check()
        token = _tokens.of(stream)
        # First: the calling thread's own stream blocks in the next call.
        with self._appending:  # binary waits pass in the order of their numbers
            pending = _Pending(token, value if self._timeline else next(self._numbers))
            try:
                self._ordered = pending.value >= self._waits[-1].value and self._ordered
            except IndexError:
                self._ordered = True
            self._waits.append(pending)
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
            with self._looked():
                if not self.closed:
                    self._let_go(self.refusal)

    def signal(self, stream: Stream, value: int) -> None:
        """Enqueue a signal."""
        self._check()
        token = _tokens.of(stream)
        with self.enqueuing:  # the stream's word counts in the order in which it is written
            out = self._out(stream)
            out.written += 1  # in this order: Ctrl-C in between leaves out a number, and that is all
            pending = _Pending(token, value, out.written)
            out.pending.append(pending)
            self.watcher.poke()  # Ctrl-C may strike behind the call
            try:
                self.words.write(stream, out.index, out.written)
            except Exception:
                out.written -= 1
                out.pending.remove(pending)
                raise
        self.watcher.poke()
        if self.failed:  # since the look above
            with self._looked():
                self._drop_signals()

    def host_wait(self, value: int, deadline: float | None) -> bool:
        """Block the calling thread; other calls of the endpoint come in between."""
        pauses = system.pauses()
        checked = time.monotonic()
        gone = False
        while True:
            self._check()
            if self.stopped:
                raise ResourceClosedError(f"{self.endpoint.label} was closed while this thread waited for it.")
            left = _HOST_SLICE_S if deadline is None else deadline - time.monotonic()
            # The watcher may be stuck in a look; wait for one that is not: a time-out of 0 is to find what is there.
            if self.lock.acquire(timeout=max(_LAST_LOOK_S, min(left, _HOST_SLICE_S))):
                try:
                    if self._take(value):
                        return True
                finally:
                    self.lock.release()
            if gone:
                raise self._peer_died()
            now = time.monotonic()
            if self._peer is not None and now - checked >= _PEER_CHECK_S:
                checked = now
                if gone := ended(self._peer):
                    continue  # it may have signalled before it died
            if deadline is not None and now >= deadline:
                return False
            pause = next(pauses)
            time.sleep(pause if deadline is None else min(pause, deadline - now))

    def host_signal(self, value: int) -> None:
        self._check()
        with self._looked() as held:
            if not held:
                raise ResourceBusyError(f"{self.endpoint.label} is stuck in a look that was to take no time.")
            self.endpoint.signal(value)

    @contextlib.contextmanager
    def _looked(self) -> Generator[bool]:
        """Behind the look that is under way. An endpoint may be stuck in one: then without the lock, which it gives."""
        held = self.lock.acquire(timeout=_LOCK_LIMIT_S)
        try:
            yield held
        finally:
            if held:
                self.lock.release()

    def cancel(self, error: GpuInteropError) -> None:
        """Let every stream go that waits here; it fails with `error`, and so does what is done with the lane.

        What streams signal that do not fail is still told.
        """
        with self._looked():
            if not self.closed:
                self._refuse(error)

    def forked(self, error: GpuInteropError) -> None:
        """In a child: the words, what is behind the endpoint and the driver are the parent's."""
        self.lock = threading.RLock()
        self.enqueuing, self._appending = threading.Lock(), threading.Lock()
        self.refusal = self.refusal or error
        self.failed = self.closed = True
        self._waits.clear()
        self._outs.clear()

    def end(self) -> None:
        """Forward what was signalled to the last, and release everything; no stream uses the words any more."""
        if not self.lock.acquire(timeout=_LOCK_LIMIT_S):
            self.watcher.remove(self)
            raise ResourceBusyError(
                f"{self.endpoint.label} is stuck in a look that was to take no time; it and a page of words are left "
                "behind."
            )
        try:
            if self.closed:
                return
            if not self.failed:
                self.step(time.monotonic())
            self.closed = True
            self.refusal = self.refusal or ResourceClosedError(f"{self.endpoint.label} is closed.")
            adopted = self._adopted
        finally:
            self.lock.release()
        self.watcher.remove(self)
        # Without the lock, which the watcher may be waiting for: unpinning may take its time.
        if self._peer is not None:
            os.close(self._peer)
        try:
            if adopted:
                self.endpoint.close()
        finally:
            self.words.close()

    def _check(self) -> None:
        if self.refusal is not None:
            raise again(self.refusal)
        self.watcher.start()  # what cannot be is to fail here, before anything waits

    def _out(self, stream: Stream) -> _Out:
        key = _number(stream)
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
        return not self.failed and (bool(self._waits) or any(out.pending for out in list(self._outs.values())))

    def step(self, now: float) -> bool:
        """Look once; whether anything has happened."""
        with self.lock:
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
                self._passed = pending.value
                self.words.store(0, pending.value)
                if self.refusal is not None:  # `cancel` did not wait for us
                    self._let_go(self.refusal)
                    return True
            with contextlib.suppress(ValueError):
                self._waits.remove(pending)
            moved = True
        return moved

    def _next(self) -> _Pending | None:
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
            told = [pending.value for _, ready in done for pending in ready if not pending.token.voids(pending.serial)]
            if told and (value := max(told)) > self._forwarded:
                self.endpoint.signal(value)
                self._forwarded = value
        for out, ready in done:
            for pending in ready:
                # What a failed stream does is not told.
                if not self._timeline and not pending.token.voids(pending.serial):
                    self.endpoint.signal(0)
                out.pending.popleft()
        return any(ready for _, ready in done)

    def _check_peer(self, now: float) -> None:
        if self._peer is None or not self._waits or now - self._peer_checked < _PEER_CHECK_S:
            return
        self._peer_checked = now
        if ended(self._peer) and not self._arrive():  # it may have signalled before it died
            raise self._peer_died()

    def _peer_died(self) -> PeerError:
        return PeerError(f"process {self._peer_number}, which was to signal {self.endpoint.label}, has died.")

    def _fail(self, error: GpuInteropError) -> None:
        """The endpoint is of no use any more."""
        self.failed = True
        self._refuse(error)
        self._drop_signals()

    def _drop_signals(self) -> None:
        """What streams have signalled, and have yet to, reaches nobody: they are told."""
        assert self.refusal is not None
        for out in list(self._outs.values()):
            while out.pending:
                self._tell_streams(out.pending.popleft(), self.refusal)

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
            pending.token.fail(pending.serial)
            self._tell_streams(pending, error)
        self._passed = _RELEASED
        self.words.store(0, _RELEASED)

    def _tell_streams(self, pending: _Pending, error: GpuInteropError) -> None:
        """All wrappers of the native stream, and the streams that were ordered behind it since."""
        told = [(pending.token._reclaimer, pending.token.pointer, pending.serial)]
        for reclaimer, pointer, serial in told:  # it grows
            if pointer != _PER_THREAD:  # a name that each thread has for another stream
                reclaimer.leave_failure(pointer, error)
            for stream in reclaimer.all_streams():
                if stream._ptr == pointer:
                    stream.fail(error)
            for follower in reclaimer.followers(pointer, serial):
                for behind in _tokens.all_of(*follower[:2]):
                    behind.fail(follower[2])
                if all(follower[:2] != known[:2] for known in told):
                    told.append(follower)


def _value_of(pending: _Pending) -> int:
    return pending.value


def open_peer(pid: int | None) -> int | None:
    """A pidfd of the process whose death is to be noticed; the caller's."""
    if pid is None:
        return None
    if sys.platform != "linux":
        raise InvalidArgumentError("peer", "a process can be watched on Linux only.")
    if not 0 < check_int(pid, "peer") < 2**31:
        raise InvalidArgumentError("peer", f"{pid} is no process's number.")
    try:
        return os.pidfd_open(pid)
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
        self._lanes: dict[int, Lane] = {}
        # No Event: the collector may end a bridge in this very thread, in the middle of its wait(), and its lock is not
        # reentrant. A SimpleQueue's put() is.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._sleeping = False
        self._stopping = False
        self._cancel_at: float | None = None
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure: GpuInteropError | None = None
        _live.add(self)

    # -- the application's threads -------------------------------------------------------------------------------

    def add(self, lane: Lane) -> None:
        self._lanes[id(lane)] = lane

    def remove(self, lane: Lane) -> None:
        self._lanes.pop(id(lane), None)
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
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # "can't start new thread"
                    raise system.driver_error("pthread_create", errno.EAGAIN, str(error)) from error
                self._thread = thread

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
        for lane in list(self._lanes.values()):
            lane.cancel(error)

    def exiting(self) -> None:
        """The interpreter ends: what waits is let go, and nothing more is taken."""
        self._failure = ResourceClosedError("the interpreter is exiting while a stream still waits.")
        self.cancel(self._failure)
        self.stop()

    def forked(self) -> None:
        """In a child there is no thread: nothing that is enqueued from now on would ever come.

        What was is the parent's, words included: whatever the child closes, and its exit, leaves them alone.
        """
        self._failure = error = ResourceClosedError(
            "the bridge belongs to the parent process; make one after the fork."
        )
        self._stopping = True
        self._thread = None
        self._starting = threading.Lock()
        self._wake = queue.SimpleQueue()
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.forked(error)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with kept_off_drivers():
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
            for lane in list(self._lanes.values()):
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
            if self._stopping or (idle and any(lane.busy for lane in list(self._lanes.values()))):
                return True  # it came before we could be poked
            self._wake.get(timeout=None if seconds is None else min(seconds, _LONGEST_SLEEP_S))
        except queue.Empty:
            return False
        finally:
            self._sleeping = False
        return True


_live: weakref.WeakSet[Watcher] = weakref.WeakSet()
_EXIT_LIMIT_S: Final = 0.5


def _exit() -> None:
    watchers = list(_live)
    for watcher in watchers:
        watcher.exiting()
    deadline = time.monotonic() + _EXIT_LIMIT_S
    for watcher in watchers:
        watcher.stop(max(0.0, deadline - time.monotonic()))


def _forked() -> None:
    _tokens.lock = threading.Lock()
    for watcher in list(_live):
        watcher.forked()


atexit.register(_exit)  # what is registered last runs first: streams are drained afterwards, and come to their ends
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
