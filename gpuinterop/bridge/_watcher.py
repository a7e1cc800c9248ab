"""The watcher: one thread a bridge, which looks at words and at foreign semaphores, and never calls a GPU's driver.

A call into HIP or CUDA may block behind whatever another thread is doing there (a synchronisation, a free), and that
may be waiting for us. So what is kept here holds no stream: dropping the last reference to one would call the driver
from this thread. Streams are known by a `Token`; a stream that had to be told something is parked until one of the
application's threads comes by. And what the collector happens to finalize here is left to others as well
(`kept_off_drivers`).

A lane is one bridged semaphore. Its word 0, `arrived`, is what streams wait for: the foreign value (a timeline), or how
many waits have passed (a binary one). Each stream that signals has a word of its own, which counts its signals: a
stream's writes are in order, those of two streams are not.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

from .._core.resource import kept_off_drivers
from .._core.words import PinnedWords
from ..errors import GpuInteropError, InvalidArgumentError, PeerError, ResourceClosedError, again
from ..handles import Timeline

if TYPE_CHECKING:
    from .._core.stream import Stream
    from ._endpoints import Endpoint

_SPIN_S: Final = 1e-3  # a handoff of two sides that both work takes less
_LONGEST_PAUSE_S: Final = 2e-3
_PAUSE_SHARE: Final = 1 / 16  # of the time that was waited so far: what a pause may add to it
_PEER_CHECK_S: Final = 5e-3
_RELEASED: Final = 2**63 - 1
_serials = itertools.count(1)


class Token:
    """Stands for a stream without keeping it alive."""

    __slots__ = ("failed_at", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = weakref.ref(stream)
        self.failed_at: int | None = None
        """The serial of the wait that did not come."""


class _Pending:
    """A wait that was enqueued, or a signal."""

    __slots__ = ("serial", "token", "value")

    def __init__(self, token: Token, value: int) -> None:
        self.serial = next(_serials)
        self.token = token
        self.value = value


class _Out:
    """The word by which one stream signals."""

    __slots__ = ("index", "pending", "pointer", "seen", "token", "written")

    def __init__(self, index: int, pointer: int, token: Token) -> None:
        self.index = index
        self.pointer = pointer
        self.token = token
        self.written = 0
        """How many signals were enqueued."""
        self.seen = 0
        """How many of them were seen to be done."""
        self.pending: deque[_Pending] = deque()


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
        self._timeline = endpoint.kind is Timeline
        self._waits: deque[_Pending] = deque()
        self._passed = 0
        """What `arrived` was last set to."""
        self._numbers = itertools.count(1)  # of a binary semaphore's waits
        self._outs: dict[int, _Out] = {}
        self._forwarded = 0
        self._enqueuing = threading.Lock()
        self._peer = watch
        self._peer_number = peer
        self._peer_checked = 0.0

    # -- the application's threads -------------------------------------------------------------------------------

    def wait(self, stream: Stream, value: int) -> None:
        """Enqueue a wait."""
        self._check()
        pending = _Pending(self.watcher.token(stream), value if self._timeline else next(self._numbers))
        self._waits.append(pending)  # first: the calling thread's own stream blocks in the next call
        self.watcher.poke()
        try:
            self.words.wait(stream, 0, pending.value)
        except BaseException:
            with contextlib.suppress(ValueError):
                self._waits.remove(pending)
            raise
        if self.refusal is not None:  # since the look above: nobody else sees to this one
            with self.lock:
                self._let_go(self.refusal)

    def signal(self, stream: Stream, value: int) -> None:
        """Enqueue a signal."""
        self._check()
        token = self.watcher.token(stream)
        with self._enqueuing:  # the stream's word counts in the order in which it is written
            out = self._out(stream, token)
            pending = _Pending(token, value)
            out.pending.append(pending)
            out.written += 1
            try:
                self.words.write(stream, out.index, out.written)
            except BaseException:
                out.written -= 1
                out.pending.remove(pending)
                raise
        self.watcher.poke()

    def host_wait(self, value: int, deadline: float | None) -> bool:
        """Block the calling thread; other calls of the endpoint come in between."""
        pause = 20e-6
        while True:
            self._check()
            with self.lock:
                if self.endpoint.wait(value, 0.0):
                    return True
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            time.sleep(pause if deadline is None else min(pause, deadline - now))
            pause = min(pause * 1.5, 1e-3)

    def host_signal(self, value: int) -> None:
        self._check()
        with self.lock:
            self.endpoint.signal(value)

    def cancel(self, error: GpuInteropError) -> None:
        """Let every stream go that waits here; it fails with `error`, and so does what is done with the lane.

        What streams signal that do not fail is still told.
        """
        with self.lock:
            if not self.closed:
                self._refuse(error)

    def end(self) -> None:
        """Forward what was signalled to the last, and release everything; no stream uses the words any more."""
        with self.lock:
            if self.closed:
                return
            if not self.failed:
                self.step(time.monotonic())
            self.closed = True
        self.watcher.remove(self)
        self.watcher.let_go_of_parked()
        # Without the lock, which the watcher may be waiting for: unpinning may take its time.
        if self._peer is not None:
            os.close(self._peer)
        try:
            self.endpoint.close()
        finally:
            self.words.close()

    def _check(self) -> None:
        self.watcher.let_go_of_parked()
        if self.refusal is not None:
            raise again(self.refusal)

    def _out(self, stream: Stream, token: Token) -> _Out:
        pointer = stream.ptr
        out = self._outs.get(pointer)
        if out is None:
            taken = {entry.index for entry in self._outs.values()}
            free = next((index for index in range(1, PinnedWords.COUNT) if index not in taken), None)
            if free is None:
                out = self._idle_out()
                del self._outs[out.pointer]
                out.pointer = pointer
            else:
                out = _Out(free, pointer, token)
            self._outs[pointer] = out
        out.token = token
        return out

    def _idle_out(self) -> _Out:
        for out in list(self._outs.values()):
            if not out.pending and ((stream := out.token.stream()) is None or stream.closed):
                return out
        raise InvalidArgumentError(
            "stream",
            f"{PinnedWords.COUNT - 1} streams signal this bridged semaphore already: signal from fewer, or bridge it "
            "once more.",
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
            except Exception as error:  # of an endpoint that is not ours
                failure = PeerError(f"{self.endpoint.label} failed in the bridge's watcher: {error!r}.")
                failure.__cause__ = error
                self._fail(failure)
                return True
            return moved or arrived

    def _arrive(self) -> bool:
        """Store what the foreign semaphore has reached."""
        if not self._waits:
            return False
        moved = False
        while self._waits:
            # Streams may wait out of order: the least comes first, or the one behind it would hold it up.
            pending = min(list(self._waits), key=_value_of) if self._timeline else self._waits[0]
            if pending.value > self._passed:
                if not self.endpoint.wait(pending.value if self._timeline else 0, 0.0):
                    return moved
                self._passed = pending.value
                self.words.store(0, pending.value)
            self._waits.remove(pending)
            moved = True
        return moved

    def _forward(self) -> bool:
        """Signal what streams have signalled."""
        moved = False
        for out in list(self._outs.values()):
            if not out.pending:
                continue
            done = self.words.load(out.index)
            while out.seen < done and out.pending:
                pending = out.pending[0]
                failed_at = pending.token.failed_at
                if failed_at is None or pending.serial < failed_at:  # else: what a failed stream does is not told
                    self._tell(pending.value)
                out.seen += 1
                out.pending.popleft()
                moved = True
        return moved

    def _tell(self, value: int) -> None:
        if not self._timeline:
            self.endpoint.signal(0)
        elif value > self._forwarded:  # several at once: the last says it all
            self.endpoint.signal(value)
            self._forwarded = value

    def _check_peer(self, now: float) -> None:
        if self._peer is None or now - self._peer_checked < _PEER_CHECK_S:
            return
        self._peer_checked = now
        if select.select([self._peer], [], [], 0)[0] and not self._arrive():  # it may have signalled before it died
            raise PeerError(f"process {self._peer_number}, which was to signal {self.endpoint.label}, has died.")

    def _fail(self, error: GpuInteropError) -> None:
        """The endpoint is of no use any more."""
        self.failed = True
        self._refuse(error)
        for out in self._outs.values():
            for pending in list(out.pending):  # what they have signalled reaches nobody
                self._tell_stream(pending, self.refusal or error)
            out.pending.clear()

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
            token = pending.token
            if token.failed_at is None or pending.serial < token.failed_at:
                token.failed_at = pending.serial
            self._tell_stream(pending, error)
        self._passed = _RELEASED
        self.words.store(0, _RELEASED)

    def _tell_stream(self, pending: _Pending, error: GpuInteropError) -> None:
        if (stream := pending.token.stream()) is not None:
            stream.fail(error)
            self.watcher.park(stream)


def _value_of(pending: _Pending) -> int:
    return pending.value


def open_peer(pid: int | None) -> int | None:
    """A pidfd of the process whose death is to be noticed; the caller's."""
    if pid is None:
        return None
    if sys.platform != "linux":
        raise InvalidArgumentError("peer", "a process can be watched on Linux only.")
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise PeerError(f"there is no process {pid}; has it died already?") from None
    except OSError as error:
        raise InvalidArgumentError("peer", f"process {pid} cannot be watched ({error.strerror}).") from error


class Watcher:
    """The thread, started when something is first pending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lanes: dict[int, Lane] = {}
        self._tokens: weakref.WeakKeyDictionary[Stream, Token] = weakref.WeakKeyDictionary()
        self._parked: list[Stream] = []
        self._wake = threading.Event()
        self._sleeping = False
        self._stopping = False
        self._cancel_at: float | None = None
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        _live.add(self)

    # -- the application's threads -------------------------------------------------------------------------------

    def add(self, lane: Lane) -> None:
        self._lanes[id(lane)] = lane

    def remove(self, lane: Lane) -> None:
        self._lanes.pop(id(lane), None)
        self.poke()

    def token(self, stream: Stream) -> Token:
        found = self._tokens.get(stream)
        if found is None:
            found = self._tokens.setdefault(stream, Token(stream))
        return found

    def park(self, stream: Stream) -> None:
        self._parked.append(stream)

    def let_go_of_parked(self) -> None:
        if self._parked:
            self._parked.clear()

    def poke(self) -> None:
        """Something is pending, or has changed."""
        if self._thread is None:
            self._start()
        if self._sleeping:
            self._wake.set()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def cancel_after(self, seconds: float) -> None:
        """What is still pending then is let go."""
        self._cancel_at = time.monotonic() + seconds
        self._wake.set()

    def stop(self, limit: float | None = None) -> None:
        """End the thread; from any thread but itself. Waits up to `limit` seconds for it."""
        self._stopping = True
        self._wake.set()
        thread = self._thread
        if limit is not None and thread is not None and thread is not threading.current_thread():
            thread.join(limit)

    def cancel(self, error: GpuInteropError) -> None:
        for lane in list(self._lanes.values()):
            lane.cancel(error)

    def forked(self) -> None:
        """In a child there is no thread: nothing that is enqueued from now on would ever come."""
        error = ResourceClosedError("the bridge belongs to the parent process; make one after the fork.")
        self._stopping = True
        for lane in list(self._lanes.values()):
            lane.lock = threading.RLock()
            lane.refusal = lane.refusal or error
            lane.failed = True

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with kept_off_drivers():
            self._watch()

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
                self._sleep(None if self._cancel_at is None else max(0.0, self._cancel_at - now))
                since = time.monotonic()
            elif now - since < _SPIN_S:
                time.sleep(0)  # lets go of the GIL
            elif self._sleep(min((now - since) * _PAUSE_SHARE, _LONGEST_PAUSE_S)):
                since = time.monotonic()

    def _sleep(self, seconds: float | None) -> bool:
        """Until something new is pending, or for that long; whether it was the former."""
        self._wake.clear()
        self._sleeping = True
        try:
            if seconds is None and (self._stopping or any(lane.busy for lane in list(self._lanes.values()))):
                return True  # it came before we could be poked
            return self._wake.wait(seconds)
        finally:
            self._sleeping = False


_live: weakref.WeakSet[Watcher] = weakref.WeakSet()
_EXIT_LIMIT_S: Final = 0.5


def _exit() -> None:
    watchers = list(_live)
    for watcher in watchers:
        watcher.cancel(ResourceClosedError("the interpreter is exiting while a stream still waits."))
        watcher.stop()
    deadline = time.monotonic() + _EXIT_LIMIT_S
    for watcher in watchers:
        watcher.stop(max(0.0, deadline - time.monotonic()))


def _forked() -> None:
    for watcher in list(_live):
        watcher.forked()


atexit.register(_exit)  # what is registered last runs first: streams are drained afterwards, and come to their ends
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
