"""Draining: releases whatever was closed and is no longer in use.

Import, create, allocate, close, synchronize and drain do it. One thread releases one native; threads do not wait for
each other's drains. A retired native is in exactly one place, which hands it on: in `waiting_for_a_look`, with a thread
that looks at it, behind a point, at the gate, or under what stands on it, also an array. (A drain after the end of an
array may find the mapping in another place already. It then looks once more than it needs to.)
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from .. import system
from ..errors import ResourceBusyError, report, warn_leak
from .gate import MANY, MOMENT_S, TOO_MANY, Gate, block, blocking, relieved, unblock
from .monitor import after_fork, dropped, interrupted, lingering, locked
from .native import (
    GONE,
    LEAKED,
    LIVE,
    MARK,
    RELEASED,
    RELEASING,
    RETIRED,
    Marks,
    Native,
    Standing,
    alive,
    endings,
    leave,
    retire,
    retire_dropped,
    strike,
    struck,
    waiting_for_a_look,
)  # fmt: skip
from .native_stream import CapturedError, NativeStream, Point, pointed

T = TypeVar("T")

_MANY_DROPPED: Final = 256
BACKLOG: Final = 256
"""Points of a stream that may not be reached, above which a call that makes memory waits."""
BACKLOG_S: Final = 0.1
"""Seconds for which it does: the stream may wait for what this library does not know."""
_exiting = False


class _Here(threading.local):
    """What this thread is about."""

    def __init__(self) -> None:
        self.calling_back: list[None] = Marks()
        """A mark while it runs callbacks."""


_here: Final = _Here()


def drain() -> None:
    """Release whatever is ready, on all devices; never waits. The caller holds nothing: callbacks run here."""
    try:
        _drain()
    finally:
        if endings:
            call_back()


def make_room() -> None:
    """Drain before memory is made. Where the device has fallen far behind, let it catch up for a moment.

    What is closed stays until the work on it has run: a loop that makes, uses and closes would pile it up.
    """
    drain()
    for stream in pointed.copy():
        if len(stream.points) > BACKLOG and not stream.pending():
            system.until(partial(_has_caught_up, stream), BACKLOG_S)
            drain()
            return


def _has_caught_up(stream: NativeStream) -> bool:
    return len(stream.poll()) <= BACKLOG


def _drain() -> None:
    if interrupted():  # a signal handler struck inside a transition: the next drain releases it
        return
    held_by: dict[Gate, str] = {}  # asked once: the answer is the same for all
    lingering.clear()
    while True:
        if dropped:
            retire_dropped()
        if pointed:
            for stream in pointed.copy():
                _shown(stream.poll)
        if blocking:
            for gate in blocking.copy():
                if not _held_by(gate, held_by):
                    unblock(gate)
        if not (waiting_for_a_look and _release_ready(held_by)):
            return


def wait_for(native: Native, timeout: float | None) -> bool:
    """Drain until it is released and its callbacks have run; False if `timeout` passed, or if it never will be."""

    def over() -> bool:
        drain()
        # A callback does not wait for others: those of its own thread run after it.
        told = _here.calling_back or (native not in endings and not native.tellers)
        return bool(native.state in GONE and told) or native.stays

    return system.until(over, timeout) and not native.stays


def tidy() -> None:
    """Retire dropped objects in calls that make something and do not drain, so that they do not pile up."""
    if len(dropped) > _MANY_DROPPED:
        drain()


def relieve(gate: Gate) -> None:
    """Hold back a wait that is about to be enqueued for a moment, so that blocked releases can run.

    Otherwise a pipeline that always has a wait pending would never release anything. The caller holds nothing.
    """
    shut = gate.shut
    shut += MARK
    try:
        relieved(gate, 2 * gate.limit)  # other waits stand at the gate; try half as often, unless it succeeds
        if system.until(lambda: not gate.look(), MOMENT_S):
            relieved(gate, MANY)
            _drain()
    finally:
        del shut[-1]
    if endings:
        call_back()  # with the gate open: a callback may wait


def behind_default_stream(gate: Gate, call: Callable[[], T], what: str) -> T:
    """Make a call that blocks until the default stream gets there, once no wait that is known holds that stream up.

    Raises `ResourceBusyError` where the calling thread itself would have to signal.
    """
    made: list[T] = []
    while not _made_shut(gate, call, made):
        stream = gate.before_default()
        if stream is not None and threading.active_count() == 1 and (wait := stream.stuck_behind()):
            raise ResourceBusyError(
                f"{what} blocks until {stream.label} gets there, which waits for {wait}, and this thread alone could "
                "signal that: signal first, or map before the wait."
            )
        system.until(lambda: gate.before_default() is None, 10 * MOMENT_S)
    return made[0]


def _made_shut(gate: Gate, call: Callable[[], T], made: list[T]) -> bool:
    """Make the call while no wait can come; False if a wait is still pending after a moment."""
    shut = gate.shut
    shut += MARK
    try:
        if not system.until(lambda: gate.before_default() is None, MOMENT_S):
            return False
        made.append(call())
        return True
    finally:
        del shut[-1]


def _release_ready(held_by: dict[Gate, str]) -> bool:
    """Look once at what may be ready; return whether anything was released."""
    claimed: list[Native] = []
    moved = False
    try:
        _claim(claimed)
        ends: dict[NativeStream, Point | None] = {}  # one event a stream, however many wait for it
        for native in claimed.copy():
            try:
                moved |= _advance(native, ends, held_by)
            except Exception as error:  # a backend's mistake, which the draining caller did not cause
                _leak(native, error)
            del claimed[0]
        return moved
    finally:
        for native in claimed:
            _put_back(native)


@locked
def _claim(claimed: list[Native]) -> None:
    for native in list(waiting_for_a_look):
        if native.state is RETIRED:
            if native.calls.copy():  # always a copy: it has one order with the marks of other threads
                continue
            kept = native.standing and any(how is not Standing.YIELDS for how in native.standing.values())
            if not kept and not native.arrays.copy():
                claimed += (native,)
        del waiting_for_a_look[native]


@locked
def _put_back(native: Native) -> None:
    if native.state is RETIRED:
        waiting_for_a_look[native] = None


def _advance(native: Native, ends: dict[NativeStream, Point | None], held_by: dict[Gate, str]) -> bool:
    """Release it, or leave it where it waits; return whether anything has moved."""
    behind = native.behind
    if behind is None and (streams := native.streams()):
        try:
            for stream in streams:
                if stream not in ends:
                    ends[stream] = _end_of(stream)
        except CapturedError:
            _put_back(native)
            return False
        behind = [end for stream in streams if (end := ends[stream]) is not None]
    if behind is not None and _park(native, behind):
        return False
    if native.standing:
        _end_events(native)
        return True
    if native.gate is None:
        return _release(native)
    return _release_at_gate(native, native.gate, held_by)


def _end_of(stream: NativeStream) -> Point | None:
    """A point behind all of the stream's work; None if that is done."""
    if stream.behind is not None:  # it is closed, and its end is known
        return next((point for point in stream.behind if point.state is LIVE), None)
    if stream.state in GONE or stream.is_idle():
        return None
    if stream.elsewhere:  # it has one behind each call
        return stream.last_point()
    return stream.point()


@locked
def _park(native: Native, behind: list[Point]) -> bool:
    """Wait for the first point that is not reached; False if all were reached."""
    if native.state is not RETIRED:  # it was opened again
        return False
    native.behind = behind
    for point in behind:
        if point.state is LIVE:
            point.waiters[native] = None
            return True
    return False


@locked
def _end_events(native: Native) -> None:
    """End the events of a stream that others hold: all its work is done, so they are reached."""
    for one, how in list(native.standing.items()):
        if how is Standing.YIELDS:
            retire(one)


def _held_by(gate: Gate, held_by: dict[Gate, str]) -> str:
    if gate not in held_by:
        held_by[gate] = _shown(gate.look) or ""
    return held_by[gate]


def _release_at_gate(native: Native, gate: Gate, held_by: dict[Gate, str]) -> bool:
    shut = gate.shut
    shut += MARK  # first: a wait that is noted after the look below finds it shut
    try:
        waits = "the exit" if _exiting else _held_by(gate, held_by) or gate.held_by()
        if not waits:
            return _release(native)
    finally:
        del shut[-1]
    block(native, waits)
    if len(gate.blocked) == TOO_MANY:
        warn_leak(
            f"{TOO_MANY} closed objects cannot be released, because {waits} always had a pending semaphore wait: "
            "synchronize it now and then, or call Device.drain(timeout)"
        )
    return False


def _release(native: Native) -> bool:
    if not _begin(native):
        return False
    problem: BaseException | None = None
    try:
        if (release := native.release) is not None:
            release(native.handle)
    except BaseException as error:
        problem = error
        if not isinstance(error, Exception):
            raise
    finally:
        _end(native, problem)
    if problem is not None:
        _warn(native, problem)
    return True


def _leak(native: Native, problem: BaseException) -> None:
    """Leave it unreleased: whether its release is safe is unknown."""
    if _begin(native):
        _end(native, problem)
    _warn(native, problem)


def _warn(native: Native, problem: BaseException) -> None:
    warn_leak(f"releasing {native.label} failed: {problem}")


def _shown(call: Callable[[], T]) -> T | None:
    """Report a failure in a drain instead of raising it: the caller did not cause it."""
    try:
        return call()
    except Exception as error:
        report(error)
        return None


@locked
def _begin(native: Native) -> bool:
    if native.state is not RETIRED:  # it was opened again, or another thread has it
        return False
    if native.standing or native.calls.copy():
        waiting_for_a_look[native] = None
        return False
    native.state = RELEASING
    return True


@locked
def _end(native: Native, problem: BaseException | None) -> None:
    native.uses = {}
    if native.callbacks or native.keep is not None:
        endings[native] = native.keep
    native.keep = None
    if problem is None:
        leave(native)
        native.release = None
        native.state = RELEASED
    elif isinstance(problem, Exception):  # its parents stay: the driver may still have it
        native.problem = str(problem)
        native.state = LEAKED
    else:
        strike(native, "released")


def tell_struck() -> None:
    """Warn in one line of what exceptions have left since the last time."""
    if struck:
        names = ", ".join(native.label for native in struck)
        struck.clear()
        warn_leak(f"{names}: an exception struck there; these stay until the exit, with what they stand on")


def call_back() -> None:
    """Run the callbacks of released natives and drop what these kept, with nothing held: either may do anything.

    What ends meanwhile has its turn afterwards: a chain of callbacks does not nest.
    """
    calling_back = _here.calling_back
    if calling_back:
        return
    calling_back += MARK
    try:
        _call_back_all()
    finally:
        del calling_back[-1]


def _call_back_all() -> None:
    while endings:
        _call_back()


def _call_back() -> None:
    """Run the callbacks of one released native."""
    marked: list[list[Any]] = []
    try:
        callbacks, _kept = _take(marked)
        for callback in callbacks:
            _shown(callback)
    finally:
        for tellers in marked:
            del tellers[-1]


@locked
def _take(marked: list[list[Any]]) -> tuple[list[Callable[[], None]], object]:
    """Take what a released native has to tell, and what it has kept, which the caller drops."""
    if not endings:  # another thread was first
        return [], None
    native = next(iter(endings))
    kept = endings.pop(native)
    callbacks, native.callbacks = native.callbacks, []
    marked += (native.tellers,)
    native.tellers += MARK
    return callbacks, kept


@after_fork
def _forked() -> None:
    _here.calling_back = Marks()  # the child begins anew, also where the fork was in a callback


@atexit.register
def _drain_at_exit() -> None:
    """Release what can be released without blocking."""
    global _exiting  # noqa: PLW0603 - it is the process that exits
    system.end_threads()
    _exiting = True

    def is_over() -> bool:
        drain()
        return not any(native.state is RETIRED and native.behind and not native.stays for native in alive())

    system.until(is_over, system.left_of_exit(last=True))
    tell_struck()
