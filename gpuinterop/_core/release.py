"""Releases: what frees objects that are closed and no longer in use, also at the exit. One such run is a drain.

One thread releases one object, and threads do not wait for each other's drains. A closed object is in one place at a
time: in the queue `to_release`, among the waiters of a fence, at the gate, or kept by an array or a dependent object.
It stays in the queue while threads check it, so two threads may check one object.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from .. import system
from ..errors import ResourceBusyError, report, warn_leak
from .lifetime import (
    FINAL,
    LEAKED,
    LIVE,
    MARK,
    RELEASED,
    RELEASING,
    RETIRED,
    Dependency,
    Lifetime,
    after_fork,
    alive,
    callbacks_due,
    dropped,
    interrupted,
    lingering,
    locked,
    note_released,
    retire,
    retire_dropped,
    to_release,
)  # fmt: skip
from .streams import (
    MANY,
    MOMENT_S,
    TOO_MANY,
    CapturedError,
    Fence,
    Gate,
    KnownStream,
    block,
    blocking,
    fenced,
    set_limit,
    unblock,
)

T = TypeVar("T")

_MANY_DROPPED: Final = 256
_MANY_OPEN: Final = 10  # objects that the warning at the exit names
BACKLOG: Final = 256  # with more pending fences on a stream, a call that makes memory waits
BACKLOG_S: Final = 0.1  # at most so many seconds: the stream may wait for something unknown
_exiting = False


class _ThisThread(threading.local):
    calling_back = False  # the thread runs callbacks


_this_thread: Final = _ThisThread()


def drain() -> None:
    """Release whatever is ready, on all devices. Never waits. The caller must hold no lock: callbacks run here."""
    try:
        _drain()
    finally:
        if callbacks_due:
            call_back()


def make_room() -> None:
    """Drain before memory is made. If the device is far behind, give it a moment to catch up.

    Otherwise a loop that makes, uses and closes memory would accumulate it, until the work on it has run.
    """
    drain()
    stream = next((each for each in list(fenced) if len(each.fences) > BACKLOG and not each.pending()), None)
    if stream is not None:
        system.until(lambda: len(stream.poll_fences()) <= BACKLOG, BACKLOG_S)
        drain()


def _drain() -> None:
    if interrupted():  # called by a signal handler inside a transition; the next drain releases
        return
    lingering.clear()
    for gate in list(blocking):
        if shown(gate.held_by) == "":
            unblock(gate)
    while True:
        if dropped:
            retire_dropped()
        for stream in list(fenced):
            shown(stream.poll_fences)
        if not (to_release and _release_ready()):
            return


def wait_for(lifetime: Lifetime, timeout: float | None) -> bool:
    """Drain until `lifetime` is released and its callbacks have run; return False if it is not, or never will be."""

    def is_over() -> bool:
        drain()
        # A callback does not wait for other callbacks, because those of its thread run after it.
        called_back = _this_thread.calling_back or (lifetime not in callbacks_due and not lifetime.callback_runs)
        return bool(lifetime.state in FINAL and called_back) or lifetime.stays

    return system.until(is_over, timeout) and not lifetime.stays


def tidy() -> None:
    """Close dropped objects in calls that make something and do not drain, so that they do not accumulate."""
    if len(dropped) > _MANY_DROPPED:
        drain()


def run_blocked_releases(gate: Gate) -> None:
    """Delay a wait that is about to be enqueued, so that blocked releases can run. The caller must hold nothing.

    Otherwise a pipeline that always has a pending wait would never release anything.
    """
    shut = gate.shut
    shut += MARK
    try:
        set_limit(gate, 2 * gate.limit)  # other waits are at the gate; unless this works, try half as often
        if system.until(lambda: not gate.held_by(), MOMENT_S):
            set_limit(gate, MANY)
            _drain()
    finally:
        del shut[-1]
    if callbacks_due:
        call_back()  # after the gate is open, because a callback may wait


def once_default_is_free(gate: Gate, call: Callable[[], T], what: str) -> T:
    """Make a call that blocks until the default stream reaches it, when no known wait delays that stream.

    Raises `ResourceBusyError` if only the calling thread could signal.
    """
    shut = gate.shut
    while True:
        shut += MARK
        try:
            if system.until(lambda: gate.delays_default() is None, MOMENT_S):
                return call()
        finally:
            del shut[-1]
        stream = gate.delays_default()
        if stream is not None and threading.active_count() == 1 and (wait := stream.stuck_on()):
            raise ResourceBusyError(
                f"{what} blocks until {stream.label} is done, which waits for {wait}, and only this thread could "
                "signal that; signal first, or map before the wait."
            )
        system.until(lambda: gate.delays_default() is None, 10 * MOMENT_S)


def _release_ready() -> bool:
    moved = False
    ends: dict[KnownStream, Fence | None] = {}  # at most one event per stream
    for lifetime in _ready():
        try:
            moved |= _advance(lifetime, ends)
        except Exception as error:  # an error in the backend, for which the caller is not responsible
            _leak(lifetime, error)
    return moved


@locked
def _ready() -> list[Lifetime]:
    """Return the objects that may be released. Remove objects from the queue that something still keeps."""
    ready = []
    for lifetime in list(to_release):
        if lifetime.state is RETIRED:
            if lifetime.calls.copy():  # a copy, for a defined order with the marks of other threads
                continue
            dependents = lifetime.dependents.values()
            if not (Dependency.CHILD in dependents or Dependency.HOLDS in dependents or lifetime.arrays.copy()):
                ready.append(lifetime)
                continue
        del to_release[lifetime]
    return ready


def _advance(lifetime: Lifetime, ends: dict[KnownStream, Fence | None]) -> bool:
    """Release an object, or put it where it waits. Return whether anything has changed."""
    fences = lifetime.awaits
    if fences is None and (streams := lifetime.streams()):
        if any(stream.unfenced and stream.of_other_thread for stream in streams):  # only its thread can see its end
            return False
        try:
            for stream in streams:
                if stream not in ends:
                    ends[stream] = _end_of(stream)
        except CapturedError:
            return False
        fences = [end for stream in streams if (end := ends[stream]) is not None]
    if fences is not None and _park(lifetime, fences):
        return False
    if lifetime.dependents:
        _end_events(lifetime)
        return True
    if lifetime.gate is None:
        return _release(lifetime)
    return _release_at_gate(lifetime, lifetime.gate)


def _end_of(stream: KnownStream) -> Fence | None:
    """Return a fence after all work of the stream; None if the work is done."""
    if stream.awaits is not None:  # the stream is closed, so its end is known
        return next((fence for fence in stream.awaits if fence.state is LIVE), None)
    if stream.state in FINAL or stream.is_idle():
        return None
    if stream.of_other_thread:  # each call has made a fence
        return stream.last_fence()
    return stream.fence()


@locked
def _park(lifetime: Lifetime, fences: list[Fence]) -> bool:
    """Wait for the first pending fence; return False if all are reached."""
    if lifetime.state is not RETIRED:  # it was reopened
        return False
    lifetime.awaits = fences
    for fence in fences:
        if fence.state is LIVE:
            fence.waiters[lifetime] = None
            to_release.pop(lifetime, None)
            return True
    return False


@locked
def _end_events(lifetime: Lifetime) -> None:
    """Release the events of an idle stream, which are reached. The last event puts the stream in the queue again."""
    for event, dependency in list(lifetime.dependents.items()):
        to_release.pop(lifetime, None)
        if dependency is Dependency.YIELDS:
            retire(event)


def _release_at_gate(lifetime: Lifetime, gate: Gate) -> bool:
    shut = gate.shut
    shut += MARK  # first: a wait that is noted after the check below sees it
    try:
        waits = "the exit" if _exiting else gate.held_by()
        if not waits:
            return _release(lifetime)
    finally:
        del shut[-1]
    block(gate, lifetime, waits)
    if len(gate.blocked) == TOO_MANY:
        warn_leak(
            f"{TOO_MANY} closed objects cannot be released, because {waits} always had a pending semaphore wait: "
            "synchronize it now and then, or call Device.drain(timeout)"
        )
    return False


def _release(lifetime: Lifetime) -> bool:
    try:
        if not _begin(lifetime):
            return False
        if (release := lifetime.release) is not None:
            release(lifetime.handle)
        _end(lifetime, None)
    except BaseException as error:
        _end(lifetime, error)
        raise
    return True


def _leak(lifetime: Lifetime, problem: BaseException) -> None:
    """Do not release an object, because that may be unsafe."""
    if _begin(lifetime):
        _end(lifetime, problem)
    if lifetime.state not in (RELEASING, RELEASED):  # otherwise another drain releases it
        warn_leak(f"releasing {lifetime.label} failed: {problem}")


def shown(call: Callable[[], T]) -> T | None:
    """Report a failure instead of raising it, because the caller did not cause it."""
    try:
        return call()
    except Exception as error:
        report(error)
        return None


@locked
def _begin(lifetime: Lifetime) -> bool:
    if lifetime.state is not RETIRED:  # it was reopened, or another thread releases it
        return False
    if lifetime.dependents or lifetime.calls.copy():
        return False
    lifetime.state = RELEASING
    to_release.pop(lifetime, None)
    return True


@locked
def _end(lifetime: Lifetime, problem: BaseException | None) -> None:
    if lifetime.state is not RELEASING:
        return
    lifetime.uses = {}
    if lifetime.callbacks or lifetime.keep is not None:
        callbacks_due[lifetime] = lifetime.keep
    lifetime.keep = None
    if problem is None:
        note_released(lifetime)
        lifetime.release = None
        lifetime.state = RELEASED
    else:  # the parents stay, because the driver may still have the object
        lifetime.problem = str(problem) or repr(problem)
        lifetime.state = LEAKED


def call_back() -> None:
    """Run the callbacks of released objects, and drop what the objects kept. The caller must hold nothing.

    Objects that are released meanwhile come afterwards, so that a chain of callbacks does not nest.
    """
    while callbacks_due and not _this_thread.calling_back:
        for lifetime in callbacks_due.copy():
            _this_thread.calling_back = True
            try:
                _call_back(lifetime)
            finally:
                _this_thread.calling_back = False


def _call_back(lifetime: Lifetime) -> None:
    callback_runs = lifetime.callback_runs
    callback_runs += MARK
    try:
        callbacks, _kept = _take(lifetime)
        for callback in callbacks:
            shown(callback)
    finally:
        del callback_runs[-1]


@locked
def _take(lifetime: Lifetime) -> tuple[list[Callable[[], None]], object]:
    """Return the callbacks of a released object, and what it kept, for the caller to drop."""
    callbacks, lifetime.callbacks = lifetime.callbacks, []
    return callbacks, callbacks_due.pop(lifetime, None)


@after_fork
def _forked() -> None:
    _this_thread.calling_back = False  # even if the fork was in a callback


@atexit.register
def _drain_at_exit() -> None:
    global _exiting  # noqa: PLW0603 - it is the process that exits
    system.end_threads()
    _exiting = True

    def is_over() -> bool:
        drain()
        return not any(lifetime.state is RETIRED and lifetime.awaits and not lifetime.stays for lifetime in alive())

    system.until(is_over, system.left_of_exit(last=True))


def open_at_exit() -> str:
    """Return the warning about open objects at the exit; empty without any. A parent covers children that it closes."""
    open_ones = {lifetime: None for lifetime in alive() if lifetime.warns and lifetime.state is LIVE}

    def closes_with_another(lifetime: Lifetime) -> bool:
        above = [parent for parent in lifetime.parents if parent.dependents.get(lifetime) is Dependency.CHILD]
        return any(parent in open_ones or closes_with_another(parent) for parent in above)

    left = [f"{lifetime.label}{lifetime.made_at}" for lifetime in open_ones if not closes_with_another(lifetime)]
    more = f" and {len(left) - _MANY_OPEN:,} more" if left[_MANY_OPEN:] else ""
    names = f"{', '.join(left[:_MANY_OPEN])}{more}"
    return f"open at the exit: {names}; close() each before, or use it in a `with` block" if names else ""
