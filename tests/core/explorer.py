"""Runs the threads of a test one at a time, in every order that up to two pre-emptions can give (as loom and CHESS do).

A thread hands over only at a *point*: a lock taken, a mark set or counted, a look at a state without the monitor, the
start, inside and end of each native call, a finalizer's note, a sleep, a thread's end. These are enough where a state
is written under the monitor only; one that is not fails the run. `by_opcode` makes every instruction of chosen
functions a point.

A run is a list of choices, one for each point at which more than one thread could go on: the numbers of the threads
that did. `explore` tries them all, depth first; what fails is printed with its list, and `replay` runs that again.

Locks, sleeps and the clock are the explorer's own: it sees a deadlock, and does not wait for it. `Core` puts them and
the points into the core by monkeypatch.
"""

from __future__ import annotations

import _thread
import faulthandler
import gc
import importlib
import pkgutil
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest

from gpuinterop import _core, system
from gpuinterop._core import lifetime, streams
from gpuinterop._core.device import Device
from tests.limits import LIMIT
from tests.spare_pages import unpin_spare_pages

from .fake import FakeDriver, table

MOST_POINTS = 20_000

_now: Run | None = None


class Failed(AssertionError):
    """A schedule that fails, and how to run it again."""

    def __init__(self, run: Run) -> None:
        self.script = [branch.chosen for branch in run.branches]
        told = [f"  thread {number}: {what}" for number, what in run.told[-60:]]
        super().__init__("\n".join([run.why, f"replay: {self.script}, budget={run.budget}", *told]))


class _Unwind(BaseException):
    """Ends a thread of a run that is over."""


class Task:
    """One thread of a run."""

    def __init__(self, number: int, body: Callable[[], object]) -> None:
        self.number = number
        self.body = body
        self.go = _thread.allocate_lock()
        self.go.acquire()
        self.what = "begin"
        self.condition: Callable[[], bool] = lambda: True
        self.wakes: float | None = None  # asleep until then, or waiting for the condition no longer
        self.asleep = self.done = False
        self.unwinding = 0


@dataclass
class Branch:
    """A point at which several threads could have gone on."""

    options: list[int]
    chosen: int
    free: list[int]
    """Those for which no thread is pre-empted: one that can go on does, and one that sleeps comes last."""
    used: int
    """Pre-emptions before it."""


class Run:
    """One schedule of some threads.

    Parameters
    ----------
    script : sequence of int
        The first choices. Afterwards threads go on as long as they can.
    budget : int
        Pre-emptions after which a thread goes on as long as it can, and its points are none of the script's.
    """

    def __init__(self, script: Sequence[int], budget: int) -> None:
        self.script, self.budget = list(script), budget
        self.codes: set[CodeType] = set()
        """Code of which each instruction is a point."""
        self.allowed: tuple[type[BaseException], ...] = ()
        """What a thread may raise."""
        self.tasks: list[Task] = []
        self.branches: list[Branch] = []
        self.told: list[tuple[int, str]] = []
        self.why = ""
        self.clock = 1000.0
        self.idle: Callable[[], bool] = lambda: False
        """When all wait or sleep: what the other side, which is no thread, does then; whether it did anything."""
        self.over = False
        self._points = self._used = 0
        self._finished = _thread.allocate_lock()
        self._finished.acquire()
        self._by_ident: dict[int, Task] = {}

    def thread(self, body: Callable[[], object]) -> None:
        self.tasks.append(Task(len(self.tasks), body))

    def go(self) -> None:
        """Run them to their ends. `why` says what was wrong."""
        global _now  # noqa: PLW0603 - the locks of what is tested look here
        _now = self
        gc.disable()  # a collection is a test's to call
        try:
            for task in self.tasks:
                _thread.start_new_thread(self._work, (task,))
            self._hand_over(None)
            if not self._finished.acquire(timeout=LIMIT):
                faulthandler.dump_traceback()
                self.why = self.why or "a thread blocks outside of the explorer"
                raise Failed(self)
        finally:
            _now = None
            gc.enable()

    def fail(self, why: str) -> None:
        """What this schedule shows; the run is over."""
        self.why = self.why or why
        self.over = True

    # -- what is tested calls these ---------------------------------------------------------------------------------

    def me(self) -> Task | None:
        return self._by_ident.get(_thread.get_ident())

    def point(self, what: str) -> None:
        """Another thread may go on here, before this one does `what`."""
        me = self.me()
        if me is None or me.done:
            return
        if self.over:
            me.unwinding += 1
            if me.unwinding in (1, MOST_POINTS):
                raise _Unwind
            return
        me.what = what
        self._hand_over(me)
        self.told.append((me.number, what))

    def block_until(self, condition: Callable[[], bool], what: str, timeout: float = -1) -> bool:
        """Wait; `condition` has no effects. False after `timeout` seconds of the explorer's, if it is not negative."""
        me = self.me()
        if me is None:
            assert condition(), f"{what}: nobody is there to end it"
        elif self.over or not condition():
            me.what, me.condition = f"wait: {what}", condition
            me.wakes = None if timeout < 0 else self.clock + timeout
            self._hand_over(me)
            me.condition, me.wakes = lambda: True, None
        return condition()

    def sleep(self, seconds: float) -> None:
        """Others go on first; this thread too, when a pre-emption says so."""
        me = self.me()
        if me is not None and not self.over:
            me.what, me.asleep, me.wakes = "sleep", True, self.clock + seconds
            self._hand_over(me)
            me.asleep, me.wakes = False, None

    # -- inside -----------------------------------------------------------------------------------------------------

    def _work(self, me: Task) -> None:
        self._by_ident[_thread.get_ident()] = me
        me.go.acquire()
        try:
            if not self.over:
                if self.codes:
                    sys.settrace(self._trace)
                me.body()
        except _Unwind:
            pass
        except BaseException as error:
            if not isinstance(error, self.allowed) and not self.why:
                self.why = f"thread {me.number}: {error!r}\n" + "".join(traceback.format_exception(error)[-6:])
        finally:
            if self.codes:  # without the GIL it stops all threads
                sys.settrace(None)
            me.done = True
            self._by_ident.pop(_thread.get_ident(), None)
            self._hand_over(None)

    def _hand_over(self, me: Task | None) -> None:
        """Let the next one go on: `me`, another, or nobody when all are done. A run that is over ends its threads."""
        following = None if self.over else self._choose(me)
        if self.over and me is not None:
            me.unwinding += 1
            raise _Unwind
        if self.over:
            following = next((task for task in self.tasks if not task.done), None)
        if following is None:
            self._finished.release()
        elif following is not me:
            following.go.release()
            if me is not None:
                me.go.acquire()
                if self.over:
                    me.unwinding += 1
                    raise _Unwind

    def _choose(self, me: Task | None) -> Task | None:
        self._points += 1
        if self._points > MOST_POINTS:
            self.fail(f"no end after {MOST_POINTS} points")
            return None

        def awake() -> list[Task]:
            return [task for task in self.tasks if not task.done and not task.asleep and task.condition()]

        free = awake()
        left = [task for task in self.tasks if not task.done]
        if not free and left and self.idle():
            free = awake()
        ready = [task for task in left if task.asleep or task in free]
        if not free:  # the first for whom time ends the wait
            sleeping = [task for task in left if task.wakes is not None]
            ready = free = sorted(sleeping, key=lambda task: task.wakes or 0.0)[:1]
        if not free and left:
            self.fail("deadlock: " + "; ".join(f"thread {task.number}: {task.what}" for task in left))
        if not free:
            return None
        if me in free:
            free = [me]
        chosen = free[0]
        if len(ready) > 1:
            if len(self.branches) < len(self.script):
                chosen = self.tasks[self.script[len(self.branches)]]
                assert chosen in ready, f"the script asks for thread {chosen.number}, which cannot go on"
            numbers = [task.number for task in ready]
            self.branches.append(Branch(numbers, chosen.number, [task.number for task in free], self._used))
            self._used += chosen not in free
        if chosen.wakes is not None:
            self.clock = max(self.clock, chosen.wakes)
        return chosen

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code not in self.codes:
            return None
        # From Python 3.12 on code tells of its instructions only where its frame has a function to tell already.
        frame.f_trace = self._trace_opcode
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace_opcode

    def _trace_opcode(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self.point(f"{frame.f_code.co_name}+{frame.f_lasti}")
        return self._trace_opcode


# -- all schedules ----------------------------------------------------------------------------------------------------

Build = Callable[[Run], Callable[[], object]]
"""Makes everything anew, calls `Run.thread`, and returns what is to be looked at when the threads have ended."""


def explore(build: Build, budget: int = 2) -> int:
    """Try all schedules with up to `budget` pre-emptions; return how many.

    Raises
    ------
    Failed
        One fails.
    """
    stack: list[list[int]] = [[]]
    runs = 0
    gc.collect()
    gc.freeze()  # so that a collection looks at what the runs have made, and at nothing else; all tests have theirs so
    while stack:
        script = stack.pop()
        runs += 1
        branches = replay(build, script, budget).branches
        for index, branch in list(enumerate(branches))[len(script) :]:
            before = [earlier.chosen for earlier in branches[:index]]
            affordable = branch.options if branch.used < budget else branch.free
            stack += ([*before, option] for option in affordable if option != branch.chosen)
    return runs


def replay(build: Build, script: Sequence[int], budget: int = 2) -> Run:
    """The one schedule that `Failed` printed, with its `budget`."""
    run = Run(script, budget)
    check = build(run)
    run.go()
    if not run.why:
        try:
            check()
        except Exception as error:
            run.why = f"afterwards: {error!r}\n" + "".join(traceback.format_exception(error)[-4:])
    if run.why:
        raise Failed(run)
    return run


# -- what takes the place of Python's ---------------------------------------------------------------------------------


def point(what: str) -> None:
    """A point of the run that is on, if there is one."""
    if _now is not None:
        _now.point(what)


class Lock:
    """`threading.RLock`. A release is no point: whatever else is shared is one."""

    def __init__(self) -> None:
        self.owner = self.depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._is_owned():
            point("acquire a lock")
            if self.owner and (_now is None or not _now.block_until(self._is_free, "lock", timeout)):
                return False
            self.owner = _thread.get_ident()
        self.depth += 1
        return True

    def release(self) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        self.depth -= 1
        if not self.depth:
            self.owner = 0

    def _is_free(self) -> bool:
        return not self.owner

    def _is_owned(self) -> bool:
        return self.owner == _thread.get_ident()


def _sleep(seconds: float) -> None:
    if _now is not None and _now.me() is not None:
        _now.sleep(seconds)
    else:
        time.sleep(seconds)


def _monotonic() -> float:
    return _now.clock if _now is not None and _now.me() is not None else time.monotonic()


_TIME = SimpleNamespace(**{**vars(time), "sleep": _sleep, "monotonic": _monotonic})


def _pauses() -> Iterator[float]:
    """As `gpuinterop.system.pauses`, without its upper end: the clock has little else to do."""
    pause = 20e-6
    while True:
        yield pause
        pause *= 2


def _pointed(base: type, **methods: str) -> Any:
    """A class whose methods are points, called so. (Taking a mark off is none: a thread touches nothing beside it.)"""

    def pointed(name: str, what: str) -> Any:
        own = getattr(base, name)

        def call(self: Any, *arguments: Any) -> Any:
            point(what)
            return own(self, *arguments)

        return call

    return type(base.__name__, (base,), {name: pointed(name, what) for name, what in methods.items()})


Marks = _pointed(list, __iadd__="mark", append="mark", copy="look at marks", __len__="look at marks")
Queue = _pointed(deque, __iadd__="append", append="append", popleft="popleft", copy="look at a queue")
Notes = _pointed(dict, __setitem__="note", copy="look at notes")


class _State:
    """In place of `Lifetime.state`: a look without the monitor is a point, and only its holder writes."""

    def __init__(self, slot: Any, holds: Callable[[], bool]) -> None:
        self._slot, self._holds = slot, holds

    def __get__(self, one: Any, kind: type) -> Any:
        if one is None:
            return self
        if not self._holds():
            point(f"look at a {one.naming[0]}")
        return self._slot.__get__(one, kind)

    def __set__(self, one: Any, state: lifetime.State) -> None:
        if state is not lifetime.BORN and not self._holds() and _now is not None:
            _now.fail(f"the state of {one!r} is written outside of the monitor")
        self._slot.__set__(one, state)


# -- the core, as the explorer runs it ---------------------------------------------------------------------------------

_QUIET = frozenset({"stream_pointer", "stream_key", "prepare", "open_device", "granularity"})
"""Calls that reach no driver, or once in a process."""
_QUESTIONS = frozenset({"is_idle", "is_done", "is_capturing"})
"""Calls that change nothing: what comes inside and at the end is found at the start, or at the next point."""


def _holds() -> bool:
    """Whether the running thread may write a state. What no run is about may."""
    return _now is None or _now.me() is None or lifetime.interrupted()


class Core:
    """Puts the points into the core by monkeypatch: nothing in the core knows of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        names = [found.name for found in pkgutil.iter_modules(_core.__path__, "gpuinterop._core.")]
        self._locks: list[Lock] = []
        self._ended: list[Device] = []
        new: dict[int, object] = {id(time): _TIME, id(deque): Queue}
        new |= {id(streams.waiting): Notes(), id(lifetime.dropped): Queue()}
        for module in [system, *map(importlib.import_module, names)]:
            for name, value in list(vars(module).items()):
                if isinstance(value, type(threading.RLock())):
                    self._locks.append(Lock())
                    patch.setattr(module, name, self._locks[-1])
                elif name == "Marks":
                    patch.setattr(module, name, Marks)
                elif id(value) in new:
                    patch.setattr(module, name, new[id(value)])
        patch.setattr(system, "pauses", _pauses)
        patch.setattr(lifetime.Lifetime, "state", _State(lifetime.Lifetime.__dict__["state"], _holds))
        warnings.simplefilter("ignore")

    def devices(self, run: Run, backend: FakeDriver) -> list[Device]:
        """The devices of a scripted backend, whose calls are points of the run. All earlier ones are over."""
        for lock in self._locks:
            lock.owner = lock.depth = 0
        forget()
        for device in self._ended:  # or each schedule would leave its pages
            device.driver.at = lambda call, place, handles: None  # type: ignore[attr-defined]
            unpin_spare_pages(device)

        def at(call: str, place: str, handles: Any) -> None:
            if call not in _QUIET and (place == "start" or call not in _QUESTIONS):
                run.point(f"{call} {place}")

        backend.at = at
        backend.block = run.block_until  # type: ignore[assignment]
        self._ended = known = list[Device]()
        known += (Device(backend, info, table(), lambda: known) for info in backend.devices())
        return known


def forget() -> None:
    """What is still to be released, in the whole process, is nobody's any more: a test that has failed left it."""
    for registry in (
        lifetime._alive, lifetime.to_release, lifetime.callbacks_due, streams.fenced, streams.waiting,
        streams.blocking, lifetime.dropped, lifetime.lingering,
    ):  # fmt: skip
        registry.clear()


def unsound() -> list[str]:
    """What is wrong when no call is under way."""
    found = ["the monitor is held"] if lifetime.interrupted() else []
    for one in lifetime.alive():
        if one.gate is not None and one.gate.shut:
            found.append(f"the gate of {one!r} is shut")
        if one.calls:
            found.append(f"{one!r} is marked")
        if one.state not in (lifetime.LIVE, lifetime.RETIRED, lifetime.LEAKED):
            found.append(f"{one!r} is left so")
        if isinstance(one, streams.KnownStream) and one.waits and one not in streams.waiting:
            found.append(f"{one!r} waits, and is not noted")
        for parent in one.parents:
            how = parent.dependents.get(one)
            is_over = parent.state in (lifetime.RELEASED, lifetime.OF_PARENT)
            outlives = how is lifetime.Dependency.CHILD and one.state is lifetime.LIVE is not parent.state
            if how is None or is_over or outlives:
                found.append(f"{one!r} stands on {parent!r}")
    return found
