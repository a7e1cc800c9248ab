"""Lifetime: close, retire, warn.

`close()` ends use at once and never blocks. The native release is *retired*: it happens once the events recorded at
close are done, the children are released and no exported array is left. Retired releases drain at the next import,
close, synchronize and at exit.

A resource has its `Retirement` from birth. It holds no reference to the resource, so a resource that is dropped is
collected, and its retirement outlives it. What must not be released yet stands in the retirement's `gates`: its
children's retirements, and calls that are under way.

Finalizers run at any moment, also while this module's own code runs in the same thread. So shared state is kept in
dicts and lists that are read by copying them in one step, and no lock is held while anything else runs.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import operator
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Self, cast

from .. import system
from ..errors import (
    ArgumentTypeError,
    GpuInteropError,
    InvalidArgumentError,
    ResourceBusyError,
    ResourceClosedError,
    again,
    report,
    warn_leak,
)

if TYPE_CHECKING:
    from ..backend import Backend, Native
    from .stream import Stream

_FAILURES = 256  # of streams, which nobody has been told yet; the oldest go
_EXIT_GRACE_S = 2.0  # at exit pending work gets this long; what is still busy then is left to the process's end
_serials = itertools.count(1)


def check_int(value: object, argument: str) -> int:
    """An int, also NumPy's; no bool, which is most often an argument in the wrong place."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(argument, f"must be an int, not {type(value).__name__}.") from None


def check_timeout(timeout: float | None) -> float | None:
    """Seconds as a float; None for no limit."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise ArgumentTypeError("timeout", f"must be seconds or None, not {type(timeout).__name__}.")
    if not timeout >= 0:
        raise InvalidArgumentError("timeout", f"must be 0 or more seconds, not {timeout!r}.")
    try:
        return None if timeout == float("inf") else float(timeout)
    except OverflowError:
        raise InvalidArgumentError("timeout", "is too large for a float; None sets no limit.") from None


_kept_off: set[int] = set()
_orphans: deque[tuple[Backend, Native]] = deque()  # events that such a thread's collector has found


@contextmanager
def kept_off_drivers() -> Generator[None]:
    """Make no driver call in the calling thread: not even of what is collected there.

    For a thread that others' driver calls may be waiting for.
    """
    thread = threading.get_ident()
    _kept_off.add(thread)
    try:
        yield
    finally:
        _kept_off.discard(thread)


def is_kept_off() -> bool:
    """Whether the calling thread must leave drivers alone."""
    return threading.get_ident() in _kept_off


def destroy_event(backend: Backend, native: Native) -> None:
    """From a finalizer: at once, or at the next drain."""
    if is_kept_off():
        _orphans.append((backend, native))
    else:
        backend.destroy_event(native)


class Exports:
    """Counts the arrays that others hold over one mapping."""

    def __init__(self) -> None:
        self._tokens: dict[int, weakref.ref[ExportToken]] = {}

    def __len__(self) -> int:
        for sweep in _sweeps:
            sweep()
        return len(self._tokens)

    def token(self, keep: object) -> ExportToken:
        """A new export; it lasts as long as the token, and the token keeps `keep` alive."""
        token = ExportToken(keep)
        serial = next(_serials)
        tokens = self._tokens
        tokens[serial] = weakref.ref(token, lambda _: tokens.pop(serial, None))
        return token


class ExportToken:
    """Alive as long as one exported array."""

    __slots__ = ("__weakref__", "keep")

    def __init__(self, keep: object) -> None:
        self.keep = keep


_sweeps: list[Callable[[], None]] = []  # what lets go of exports that nobody took (interchange)


class Retirement:
    """One native release, and what it has to wait for.

    Parameters
    ----------
    label : str
        For messages.
    release : callable, optional
        The native release; runs once.
    streams : callable, optional
        The streams whose work so far the release waits for, and the retirements of those that are closed already.
        Asked when the resource is closed and no array is left: an array may cause work as long as it lives.
    exports : Exports, optional
        The arrays to wait for.
    blocks : bool
        The native release waits for all work of the device (`Backend.releases_block`).
    """

    def __init__(
        self,
        label: str,
        release: Callable[[], None] | None = None,
        *,
        streams: Callable[[], tuple[Iterable[Stream], Iterable[Retirement]]] | None = None,
        exports: Exports | None = None,
        blocks: bool = False,
    ) -> None:
        self.label = label
        self.blocks = blocks
        self.held_by = ""
        """The stream whose pending wait `blocks` has last kept this from going, for messages."""
        self.serial = next(_serials)
        self.done = False
        self.gates: dict[int, Retirement | str] = {}
        """What must go first, by serial: children, and calls under way."""
        self.exports = exports
        self._release = release
        self._parents: list[Retirement] = []
        self._streams = streams
        self._events: dict[int, Native] | None = None
        self._owners: list[object] = []
        """Of wrapped streams: on HIP an event must not outlive its stream."""
        self._recording = [True]
        self._after: list[Retirement] = []
        self._callbacks: list[Callable[[], None]] = []

    def hang_on(self, parent: Retirement) -> None:
        """The parent goes after this. There may be several."""
        self._parents.append(parent)
        parent.gates[self.serial] = self

    def record(self, backend: Backend) -> None:
        """Take the events, unless exported arrays can still cause work that they would miss.

        Nor while a stream is being captured: the event would go into the graph. The next drain tries again.
        """
        if self._events is not None or (self.exports is not None and len(self.exports)):
            return
        streams, closed = self._work()
        natives = [stream._native for stream in streams if not stream.closed]
        if any(is_capturing(backend, native) for native in natives):
            return
        try:
            self._recording.pop()  # the closing thread and a draining one may both get here
        except IndexError:
            return
        self._after = [earlier for earlier in closed if not earlier.done]
        self._after += [stream._retirement for stream in streams if stream.closed]
        events: dict[int, Native] = {}
        for native in natives:
            record_on(backend, native, events)
        self._owners = [stream._keepalive for stream in streams]
        self._events = events

    def _work(self) -> tuple[list[Stream], list[Retirement]]:
        if self._streams is None:
            return [], []
        streams, closed = self._streams()
        return list(streams), list(closed)

    def ready(self, backend: Backend) -> bool:
        """Whether the release may run; never blocks."""
        if not self.gates:
            self.record(backend)
        # Also where it may not: an event holds its stream, and that what the release waits for.
        if not self._work_is_done(backend) or self.gates:
            return False
        self._after = [earlier for earlier in self._after if not earlier.done]
        return not self._after

    def _work_is_done(self, backend: Backend) -> bool:
        if self._events is None:
            return False
        for serial, event in list(self._events.items()):
            try:
                if not backend.is_done(event):
                    return False
            except Exception as error:  # the stream has failed: nothing behind the failure will ever run
                if not isinstance(error, GpuInteropError):
                    report(error)
            del self._events[serial]
            backend.destroy_event(event)
        self._owners.clear()
        return True

    @property
    def pending(self) -> bool:
        """Whether work on a stream is what it waits for: that will end by itself."""
        return bool(self._events) or any(earlier.pending for earlier in self._after)

    def blockers(self) -> str:
        """What the release waits for, for messages."""
        if self.exports is not None and (count := len(self.exports)):
            return f"{count} exported array(s) are still alive"
        for gate in list(self.gates.values()):
            return gate if isinstance(gate, str) else f"{gate.label} is still in use ({gate.blockers()})"
        for earlier in self._after:
            if not earlier.done:
                return f"{earlier.label} still has work pending"
        if self.held_by:
            return (
                f"the driver's release waits for the whole device, and {self.held_by} may be waiting for a semaphore: "
                "synchronize that first"
            )
        return "work enqueued before close() is still pending"

    def finish(self) -> Exception | None:
        """Release; what has failed in it, for `tell`."""
        release, self._release = self._release, None
        problem = None
        try:
            if release is not None:
                release()
        except Exception as error:
            problem = error
        finally:
            self._streams = None
            for parent in self._parents:
                parent.gates.pop(self.serial, None)
            self._parents.clear()
            self.done = True
        return problem

    def tell(self, problem: Exception | None) -> None:
        """Run the callbacks, and report what has failed; raised to nobody: the caller only happened to drain."""
        self._call_back()
        if problem is not None:
            warn_leak(f"releasing {self.label} failed: {problem}")

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` after the release; at once if that was."""
        self._callbacks.append(callback)
        if self.done:  # `finish` may have come between the two lines, and run it already
            self._call_back()

    def _call_back(self) -> None:
        while True:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return
            try:
                callback()
            except Exception as error:
                report(error)


def record_on(backend: Backend, native: Native, events: dict[int, Native]) -> None:
    """Record an event on a stream; one that cannot record any more runs nothing either."""
    with contextlib.suppress(GpuInteropError):
        events[next(_serials)] = backend.record(native)


def is_capturing(backend: Backend, native: Native) -> bool:
    """Whether the stream's work goes into a graph; one that cannot say captures nothing."""
    try:
        return backend.is_capturing(native)
    except GpuInteropError:
        return False


def undo(what: str, release: Callable[[], None]) -> None:
    """Release what a call has made that then failed; when this fails too, the first failure is still what is raised."""
    try:
        release()
    except Exception as error:
        warn_leak(f"releasing {what} failed: {error}")


class Gate:
    """Between releases that block and waits that are being enqueued: each announces itself, then looks for the other.

    One a device, or for all of a backend's whose releases wait for one another's work. A wait takes no lock, unless a
    release is under way.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, None] = {}
        """The threads that are enqueuing a wait just now."""
        self.releasing = False
        """A release that blocks is under way, or about to be."""
        self.members: list[weakref.ref[Reclaimer]] = []
        self._lock = threading.RLock()

    @contextmanager
    def closed(self) -> Generator[None]:
        """Round a release that blocks, and the look for pending waits before it."""
        with self._lock:
            self.releasing = True
            try:
                yield
            finally:
                self.releasing = False

    @contextmanager
    def enqueuing_wait(self) -> Generator[None]:
        """Round a call that enqueues waits, and the note of them in the stream."""
        thread = threading.get_ident()
        self.waiting[thread] = None
        try:
            if self.releasing:
                self.let_release_end()
            yield
        finally:
            self.waiting.pop(thread, None)

    def let_release_end(self) -> None:
        """Block until the release that is under way has ended; no wait holds that up."""
        with self._lock:
            pass

    def forked(self) -> None:
        """In a child: the parent's threads are gone."""
        self._lock = threading.RLock()
        self.releasing = False
        self.waiting.clear()


_gates: weakref.WeakKeyDictionary[Backend, Gate] = weakref.WeakKeyDictionary()  # of all devices together


class Reclaimer:
    """The retired releases of one device, and its live streams."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._pending: dict[int, Retirement] = {}
        self._draining = threading.Lock()
        self._streams: dict[int, weakref.ref[Stream]] = {}
        self.gate = _gates.setdefault(backend, Gate()) if backend.releases_block_for_all else Gate()
        self.gate.members.append(weakref.ref(self))
        self.peers: tuple[Reclaimer, ...] = ()
        """Those of other devices whose releases wait for ours, or ours for theirs: drained together (`link`)."""
        self.failures: dict[int, GpuInteropError] = {}
        """Failures of native streams, by pointer, that nobody has been told yet: what wraps one next inherits it."""
        self._followers: dict[int, dict[tuple[Reclaimer, int], tuple[int, int]]] = {}
        _reclaimers.add(self)

    def note_follower(self, leader: int, follower: tuple[Reclaimer, int], number: int) -> None:
        """`wait_stream`, by native pointers, with its number in `order`; of note only while the leader may be waiting.

        Wrappers come and go: what one has been given, another one of the same stream is ordered behind. The leader is
        ours, the follower may be another device's.
        """
        waits = any(stream._waits for stream in self.all_streams() if stream._ptr == leader)
        if not waits and not any(isinstance(it, StreamRetirement) and it.waits for it in self.closed_streams()):
            self._followers.pop(leader, None)
            return
        known = self._followers.setdefault(leader, {})
        known[follower] = (known.get(follower, (number, number))[0], number)

    def followers(self, leader: int, since: int) -> list[tuple[Reclaimer, int, int]]:
        """Who is behind work that the leader was given after number `since`, and from which number on."""
        found = list(self._followers.get(leader, {}).items())
        return [(*follower, max(first, since + 1)) for follower, (first, last) in found if last > since]

    def leave_failure(self, pointer: int, error: GpuInteropError) -> None:
        """For whoever wraps the native stream next. Without what it was raised from, which would be kept alive."""
        while len(self.failures) >= _FAILURES:
            with contextlib.suppress(StopIteration, KeyError):
                del self.failures[next(iter(self.failures))]
        fresh = cast(GpuInteropError, again(error))
        if fresh is not error:
            fresh.__cause__ = None
        self.failures.setdefault(pointer, fresh)

    def add_stream(self, stream: Stream) -> None:
        serial, streams = next(_serials), self._streams
        streams[serial] = weakref.ref(stream, lambda _: streams.pop(serial, None))

    def streams(self) -> list[Stream]:
        """Those that are open."""
        return [stream for stream in self.all_streams() if not stream.closed]

    def all_streams(self) -> list[Stream]:
        """Also those that are closed, and that somebody has still."""
        found = [reference() for reference in list(self._streams.values())]
        return [stream for stream in found if stream is not None]

    def work(self) -> tuple[list[Stream], list[Retirement]]:
        """All that may still use the device's memory: open streams, and closed ones whose work is not done."""
        return self.streams(), self.closed_streams()

    def closed_streams(self) -> list[Retirement]:
        return [entry for entry in list(self._pending.values()) if isinstance(entry, StreamRetirement)]

    def retire(self, retirement: Retirement) -> None:
        self._pending[retirement.serial] = retirement
        if not is_kept_off():  # else whoever drains next records
            retirement.record(self.backend)

    def drain(self) -> None:
        """Release whatever is ready, here and at the peers; never blocks.

        Not re-entered: a finalizer that runs while this thread drains, or a second thread, leaves the work to the one
        that is at it. An entry stays in place until it is finished: whoever closes something meanwhile sees it.
        """
        if is_kept_off():
            return
        # What one has released may be what another's release was waiting for.
        while any(reclaimer._drain() for reclaimer in (self, *self.peers)) and self.peers:
            pass

    def _drain(self) -> bool:
        """Whether anything was released."""
        if not self._draining.acquire(blocking=False):
            return False
        released = False
        try:
            self._destroy_orphans()
            progress = True
            held_by = ""
            while progress:
                progress = False
                for serial, entry in list(self._pending.items()):
                    if entry.blocks and held_by:  # asked once: the answer is the same for all
                        entry.held_by = held_by
                    elif entry.ready(self.backend):
                        held_by = self._finish(serial, entry)
                        progress |= not held_by
                released |= progress
        finally:
            self._draining.release()
        return released

    def _destroy_orphans(self) -> None:
        while True:
            try:
                backend, native = _orphans.popleft()
            except IndexError:
                return
            try:
                backend.destroy_event(native)
            except Exception as error:  # whoever drains has nothing to do with it
                report(error)

    def _finish(self, serial: int, entry: Retirement) -> str:
        """Release; else the stream because of which that would block the device, and whoever is to end its wait."""
        problem = None
        try:
            if entry.blocks:
                with self.gate.closed():
                    entry.held_by = self._pending_wait()
                    if entry.held_by:
                        return entry.held_by
                    problem = entry.finish()
            else:
                problem = entry.finish()
        finally:
            if entry.done:
                self._pending.pop(serial, None)
        entry.tell(problem)  # without the lock: a callback is somebody else's code
        return ""

    def _pending_wait(self) -> str:
        """The label of a stream that may be waiting for a semaphore; empty when none is."""
        if self.gate.waiting:
            return "another thread's stream"
        for reference in list(self.gate.members):
            one = reference()
            if one is None:
                continue
            for retirement in (*(stream._retirement for stream in one.streams()), *one.closed_streams()):
                if isinstance(retirement, StreamRetirement) and retirement.may_wait(self.backend):
                    return retirement.label
        return ""

    def wait(self, retirement: Retirement, timeout: float | None) -> bool:
        """Drain until `retirement` is done; False when `timeout` seconds passed."""
        return self._wait_until(lambda: retirement.done, timeout)

    def wait_for_work(self, timeout: float) -> None:
        """Drain until nothing waits for a stream's work any more: what waits for arrays would wait for ever."""
        self._wait_until(lambda: not any(entry.pending for entry in list(self._pending.values())), timeout)

    def _wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        def look() -> bool:
            self.drain()
            return condition()

        return system.until(look, timeout)

    def forked(self) -> None:
        """In a child: what the parent has retired is the parent's to release."""
        self._draining = threading.Lock()
        self.gate.forked()
        self._pending.clear()


_linking = threading.RLock()  # a finalizer may link, too


def link(reclaimers: Iterable[Reclaimer]) -> None:
    """Drain these together from now on: something of one device will wait for another's work."""
    wanted = list(dict.fromkeys(reclaimers))
    if all(other in one.peers for one in wanted for other in wanted if other is not one):
        return
    with _linking:
        group = dict.fromkeys(one for reclaimer in wanted for one in (reclaimer, *reclaimer.peers))
        for member in group:
            member.peers = tuple(other for other in group if other is not member)


def work_of(reclaimers: Iterable[Reclaimer]) -> tuple[list[Stream], list[Retirement]]:
    """`Reclaimer.work` of several devices."""
    found = [reclaimer.work() for reclaimer in reclaimers]
    return [it for streams, _ in found for it in streams], [it for _, closed in found for it in closed]


class StreamRetirement(Retirement):
    """A stream: waits for its own work, and for no other.

    Also one of somebody else's: what it was given through us may use our memory.
    """

    native: Native = None
    waits: deque[tuple[str, int | None]]
    """The latest semaphore waits since the stream was last seen idle, for messages. Labels, not semaphores:
    remembering must not keep anything alive."""

    def forget(self, seen: Iterable[tuple[str, int | None]]) -> None:
        """Take out waits that have passed; another thread may add to them meanwhile."""
        for entry in seen:
            with contextlib.suppress(IndexError):
                if self.waits[0] is entry:
                    self.waits.popleft()

    def may_wait(self, backend: Backend) -> bool:
        """Whether a semaphore wait may be pending; never blocks."""
        seen = list(self.waits)  # first: what is added behind this line is not taken out
        if not seen:
            return False
        if is_capturing(backend, self.native):
            return True  # the driver must not be asked
        try:
            if not backend.is_idle(self.native):
                return True
        except GpuInteropError:
            pass  # it has failed: what is left on it never runs
        self.forget(seen)
        return False

    def record(self, backend: Backend) -> None:
        if self._events is not None or is_capturing(backend, self.native):
            return
        try:
            self._recording.pop()
        except IndexError:
            return
        events: dict[int, Native] = {}
        record_on(backend, self.native, events)
        self._events = events


_reclaimers: weakref.WeakSet[Reclaimer] = weakref.WeakSet()


@atexit.register
def _drain_at_exit() -> None:
    for reclaimer in list(_reclaimers):
        reclaimer.wait_for_work(_EXIT_GRACE_S)


def _forked() -> None:
    global _linking  # noqa: PLW0603 - another thread of the parent may have held it
    _linking = threading.RLock()
    _kept_off.clear()  # the child's threads may have their numbers
    _orphans.clear()  # the parent's, as all that is retired
    for reclaimer in list(_reclaimers):
        reclaimer.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Resource:
    """Something with a native half. Made by factories only; ends with `close()`."""

    _noun: ClassVar[str] = "resource"
    _warns: bool = True

    def __init__(
        self,
        reclaimer: Reclaimer,
        release: Callable[[], None] | None,
        *,
        parents: Sequence[Resource] = (),
        label: str | None = None,
        streams: Callable[[], tuple[Iterable[Stream], Iterable[Retirement]]] | None = None,
        exports: Exports | None = None,
        kind: type[Retirement] = Retirement,
        blocks: bool = False,
    ) -> None:
        self._reclaimer = reclaimer
        self._parents = tuple(parents)  # children hold parents
        self._children: dict[int, weakref.ref[Resource]] = {}
        self._closed = False
        self._once = [True]  # popped by the one close that counts: list.pop is atomic, and safe in a finalizer
        self._retirement = kind(
            label or self._noun,
            release,
            streams=streams or reclaimer.work,
            exports=exports,
            blocks=blocks and reclaimer.backend.releases_block,
        )
        self._label = self._retirement.label = f"{self._retirement.label} #{self._retirement.serial}"
        for parent in self._parents:  # all of them before any of them knows: the first may be closed meanwhile
            self._retirement.hang_on(parent._retirement)
        serial = self._retirement.serial
        for parent in self._parents:
            parent._adopt(serial, self)
        for parent in self._parents:
            if parent._closed:  # by another thread meanwhile, which may have missed this child
                self._retire()
                reclaimer.drain()
                parent._check_open()

    # -- public ------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return self._label

    @property
    def closed(self) -> bool:
        """Whether `close` was called, here or on the parent."""
        return self._closed

    def close(self, timeout: float | None = None) -> None:
        """End use at once. Idempotent; never blocks unless `timeout` is given.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the native release; without it the release happens later, by itself.

        Raises
        ------
        ResourceBusyError
            `timeout` passed, and pending work or exported arrays still use the object. It stays closed, and is
            released later all the same.
        """
        limit = check_timeout(timeout)
        self._retire()
        self._reclaimer.drain()
        if timeout is not None and not self._reclaimer.wait(self._retirement, limit):
            raise ResourceBusyError(
                f"{self._label} is still in use {timeout:g} s after close(): {self._retirement.blockers()}."
            )

    def on_released(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the native release has happened; at once if it has.

        For owners of the memory or semaphore on the other side, who may free theirs only afterwards. The callback
        runs on whichever thread drains; it must not block. What it raises is shown, and raised to nobody.
        """
        self._retirement.when_done(callback)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:  # by then there may be no `sys`
        if not getattr(self, "_once", None) or _ending():
            return
        self._retire()  # before the warning, which may be an error
        if self._warns:
            warn_leak(f"{self._label} was dropped without close()", self)

    def __repr__(self) -> str:
        return f"<{self._label}{' closed' if self._closed else ''}>"

    # -- inside --------------------------------------------------------------------------------------------------

    def _adopt(self, serial: int, child: Resource) -> None:
        children = self._children
        children[serial] = weakref.ref(child, lambda _: children.pop(serial, None))

    def _open_children(self) -> list[Resource]:
        found = [reference() for reference in list(self._children.values())]
        return [child for child in found if child is not None and not child._closed]

    def _retire(self) -> None:
        try:
            self._once.pop()
        except IndexError:
            return
        self._closed = True
        try:
            for child in self._open_children():
                child._retire()
            self._ended()
        finally:
            self._reclaimer.retire(self._retirement)

    def _ended(self) -> None:
        """What a subclass does when use ends, once."""

    @contextmanager
    def _in_use(self) -> Generator[None]:
        """Keep the native half until the block is left; raises if the resource is closed."""
        gates, serial = self._retirement.gates, next(_serials)
        gates[serial] = "a call is under way"
        try:
            self._check_open()
            yield
        finally:
            del gates[serial]

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceClosedError(f"{self._label} is closed; make a new one, or close it later.")
