"""Runs the threads of a test one at a time, in every order that up to two pre-emptions can give (as loom and CHESS do).

A thread hands over only at a *point*: a lock taken or given back, a mark set or counted, a look at the
state, the start, inside and end of each native call, a finalizer's note, a sleep, a thread's end. These are enough
where shared state is written under the monitor only, which `Watched` and `Guarded` hold tests to. `by_opcode` makes
every instruction of chosen functions a point.

One run is a list of choices, one for each point at which more than one thread could go on: the numbers of the threads
that did. `explore` tries them all, depth first; what fails is printed with its list, and `replay` runs that again.

Locks, sleeps and waits are the explorer's own. A thread that waits is a condition, so a deadlock is seen and not waited
for; the clock is the explorer's too, and jumps when all sleep.
"""

from __future__ import annotations

import _thread
import functools
import gc
import math
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeAlias

LIMIT = 20.0
"""Real seconds after which a thread that has not come back blocks outside of the explorer."""
MOST_POINTS = 20_000
MOST_JUMPS = 400
"""How often the clock may jump: then nobody does anything but wait for time to pass, for ever."""

Op: TypeAlias = tuple[str, object]
Body: TypeAlias = Callable[[], object]

_now: Run | None = None


class Failed(AssertionError):
    """A schedule that fails, and how to run it again."""

    def __init__(self, why: str, run: Run) -> None:
        self.script = [branch.chosen for branch in run.branches]
        self.why = why
        self.runs = 0
        """How many schedules it took."""
        shown = [f"  {step}" for step in run.told[-60:]]
        super().__init__("\n".join([why, f"replay: {self.script}, budget={run.budget}", *shown]))


class _Unwind(BaseException):
    """Ends a thread of a run that is over."""


class Task:
    """One thread of a run."""

    def __init__(self, number: int, name: str, body: Body) -> None:
        self.number = number
        self.name = name
        self.body = body
        self.go = _thread.allocate_lock()
        self.go.acquire()
        self.op: Op = ("begin", number)
        self.condition: Callable[[], bool] | None = None
        self.wakes: float | None = None  # asleep until then, or waiting for the condition no longer
        self.done = False
        self.unwinding = 0
        self.error: BaseException | None = None
        self.told = ""

    def ready(self) -> bool:
        return not self.done and (self.condition is None or self.condition())

    @property
    def asleep(self) -> bool:
        return self.condition is None and self.wakes is not None


@dataclass
class Branch:
    """A point at which several threads could have gone on."""

    options: list[int]
    chosen: int
    free: frozenset[int]
    """Those for which no thread is pre-empted: one that can go on does, and one that sleeps comes last."""
    used: int
    redundant: frozenset[int]
    """Threads whose step would only repeat what another run has shown (sleep set)."""

    def cost(self, option: int) -> int:
        return int(option not in self.free)


class Run:
    """One schedule of some threads.

    Parameters
    ----------
    script : sequence of int
        The first choices; behind them threads go on as long as they can.
    redundant : frozenset of int
        The sleep set behind the script.
    budget : float
        Pre-emptions behind which a thread goes on as long as it can, and its points are none of the script's.
    tells : bool
        Note what each thread does; the runs of a search do not, for it takes a tenth of their time.
    """

    def __init__(
        self, script: Sequence[int] = (), redundant: frozenset[int] = frozenset(), codes: Iterable[CodeType] = (), *,
        budget: float = math.inf, tells: bool = True,
    ) -> None:  # fmt: skip
        self.script = list(script)
        self.budget = budget
        self.tells = tells
        self.redundant = redundant
        self.codes = frozenset(codes)
        self.sleeping: frozenset[int] = frozenset() if script else redundant
        self.tasks: list[Task] = []
        self.branches: list[Branch] = []
        self.told: list[str] = []
        self.points = 0
        self.used = 0
        self.going = 0
        """Threads that have not ended."""
        self.clock = 1000.0
        self.jumps = 0
        self.idle: Callable[[], bool] = lambda: False
        """When all wait or sleep: what the other side, which is no thread, does then; whether it did anything."""
        self.why = ""
        self.pruned = False
        self._over = False
        self._finished = _thread.allocate_lock()
        self._finished.acquire()
        self._by_ident: dict[int, Task] = {}

    # -- what a test says -------------------------------------------------------------------------------------------

    def thread(self, body: Body, name: str = "") -> None:
        number = len(self.tasks)
        self.tasks.append(Task(number, name or f"thread {number}", body))

    def go(self, allowed: tuple[type[BaseException], ...] = ()) -> None:
        """Run them to their ends. `why` says what was wrong."""
        global _now  # noqa: PLW0603 - the locks of what is tested look here
        before, _now = _now, self
        collecting = gc.isenabled()
        gc.disable()  # a collection is a test's to call
        self.going = len(self.tasks)
        try:
            for task in self.tasks:
                _thread.start_new_thread(self._work, (task,))
            (self._choose(None) or self.tasks[0]).go.release()
            if not self._finished.acquire(timeout=LIMIT):
                self.why = self.why or "a thread blocks outside of the explorer:\n" + self._stacks()
                raise Failed(self.why, self)
        finally:
            _now = before
            if collecting:
                gc.enable()
        for task in self.tasks:
            if task.error is not None and not isinstance(task.error, allowed) and not self.why:
                self.why = f"{task.name}: {task.error!r}\n{task.told}"

    def fail(self, why: str) -> None:
        """What this schedule shows; the run is over."""
        self.why = self.why or why
        self._over = True

    # -- what is tested calls these ---------------------------------------------------------------------------------

    def me(self) -> Task | None:
        return self._by_ident.get(_thread.get_ident())

    def point(self, what: str, thing: object = None) -> None:
        """Another thread may go on here, before this one does `what`."""
        me = self._by_ident.get(_thread.get_ident())
        if me is None or me.done:
            return
        if self._over:
            me.unwinding += 1
            if me.unwinding in (1, MOST_POINTS):
                raise _Unwind
            return
        self.points += 1
        if self.points > MOST_POINTS:
            self.fail(f"no end after {MOST_POINTS} points")
            raise _Unwind
        me.op = (what, thing)
        if self.sleeping or (self.going > 1 and self.used < self.budget):  # else there is no choice
            self._switch(me)
        if self.tells:
            self.told.append(f"{me.name}: {what} {_name(thing)}")
        if self.sleeping:
            self.sleeping = frozenset(
                number for number in self.sleeping if independent(self.tasks[number].op, me.op) and number != me.number
            )

    def block_until(self, condition: Callable[[], bool], what: str, timeout: float | None = None) -> bool:
        """Wait; `condition` has no effects. False when `timeout` seconds of the explorer's have passed."""
        me = self.me()
        if me is None:
            assert condition(), f"{what}: nobody is there to end it"
            return True
        if self._over:
            raise _Unwind
        if condition():
            return True
        me.op = (f"wait: {what}", None)
        me.condition, me.wakes = condition, None if timeout is None else self.clock + timeout
        self._switch(me)
        me.condition, me.wakes = None, None
        return condition()

    def sleep(self, seconds: float) -> None:
        """Others go on first; this thread too, when a pre-emption says so."""
        me = self.me()
        if me is None or self._over:
            return
        me.wakes = self.clock + seconds
        me.op = ("sleep", None)
        self._switch(me)
        me.wakes = None

    # -- inside -----------------------------------------------------------------------------------------------------

    def _work(self, me: Task) -> None:
        self._by_ident[_thread.get_ident()] = me
        me.go.acquire()
        try:
            if not self._over:
                if self.codes:
                    sys.settrace(self._trace)
                me.body()
        except _Unwind:
            pass
        except BaseException as error:
            me.told = "".join(traceback.format_exception(error)[-6:])
            me.error = error.with_traceback(None)  # whose frames would keep alive what is to be released
            error.__context__ = error.__cause__ = None
        finally:
            if self.codes:  # without the GIL it stops all threads
                sys.settrace(None)
            me.done = True
            self.going -= 1
            self._by_ident.pop(_thread.get_ident(), None)
            try:
                self._end()
            except BaseException as error:
                self.fail(f"the explorer itself: {error!r}")
                self._finished.release()

    def _end(self) -> None:
        following = None if self._over else self._choose(None)
        if self._over:
            following = next((task for task in self.tasks if not task.done), None)
        (self._finished if following is None else following.go).release()

    def _switch(self, me: Task) -> None:
        chosen = self._choose(me)
        if chosen is not None and chosen is not me and not self._over:
            chosen.go.release()
            me.go.acquire()
        if self._over:
            me.unwinding += 1
            raise _Unwind

    def _choose(self, me: Task | None) -> Task | None:
        """Who goes on: nobody when all are done, or the run is over."""
        ready = [task for task in self.tasks if task.ready()]
        awake = [task for task in ready if not task.asleep]
        if not awake and not all(task.done for task in self.tasks) and self.idle():
            ready = [task for task in self.tasks if task.ready()]
            awake = [task for task in ready if not task.asleep]
        if not awake:
            waiting = [task for task in self.tasks if not task.done and task.wakes is not None]
            if not waiting:
                stuck = [task for task in self.tasks if not task.done]
                if stuck:
                    self.fail("deadlock: " + "; ".join(f"{task.name}: {task.op[0]}" for task in stuck))
                return None
            self.jumps += 1
            if self.jumps > MOST_JUMPS:
                self.fail("all wait for time to pass: " + "; ".join(f"{task.name}: {task.op[0]}" for task in waiting))
                return None
            ready = [min(waiting, key=lambda task: task.wakes or 0.0)]
            awake = ready
        stays = me if me in awake else None
        options = [task for task in ready if task.number not in self.sleeping]
        if not options or not any(task in awake for task in options):  # those that poll would do so for ever
            self.pruned = self._over = True
            return None
        default = stays if stays in options else next((task for task in options if task in awake), options[0])
        chosen = default
        if len(ready) > 1:  # whatever is redundant: a script names every such point
            if len(self.branches) < len(self.script):
                number = self.script[len(self.branches)]
                chosen = self.tasks[number]
                assert chosen in ready, f"the script asks for thread {number}, which cannot go on"
            numbers = [task.number for task in options]
            free = frozenset(task.number for task in ([stays] if stays is not None else awake))
            self.branches.append(Branch(numbers, chosen.number, free, self.used, self.sleeping))
            self.used += self.branches[-1].cost(chosen.number)
            if len(self.branches) == len(self.script):
                self.sleeping = self.redundant
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

    def _stacks(self) -> str:
        frames = sys._current_frames()
        return "\n".join(
            f"{task.name}, in {task.op[0]}:\n" + "".join(traceback.format_stack(frames[ident])[-8:])
            for ident, task in list(self._by_ident.items())
            if ident in frames
        )


def _name(thing: object) -> str:
    if thing is None:
        return ""
    if isinstance(thing, tuple) and len(thing) == 2 and isinstance(thing[0], str):
        return f"{thing[0]} {thing[1]}"
    if isinstance(thing, list | tuple):
        return ", ".join(map(_name, thing))
    return str(getattr(thing, "label", None) or thing)


_LIGHT = ("mark", "marks", "look")


def independent(one: Op, other: Op) -> bool:
    """Whether two steps have the same effect in either order. Marks and looks of different things have.

    So have a mark and what happens under the monitor (which counts marks at points of their own), and a look and a
    native call (which changes no state).
    """
    first, second = one[0] in _LIGHT, other[0] in _LIGHT
    if first and second:
        return one[1] is not other[1] or (one[0] == other[0] == "look")
    if first or second:
        light, heavy = (one, other) if first else (other, one)
        return heavy[0] not in ("acquire", "release", "sleep") or light[0] != "look"
    return False


# -- all schedules ----------------------------------------------------------------------------------------------------


@dataclass
class Explored:
    """What was tried."""

    runs: int = 0
    points: int = 0
    pruned: int = 0
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return f"{self.runs} schedules, {self.points} points, {self.pruned} pruned, {self.seconds:.1f} s"


def explore(
    build: Callable[[Run], Callable[[], object] | None],
    *,
    budget: int = 2,
    reduce: bool = False,
    allowed: tuple[type[BaseException], ...] = (),
    by_opcode: Iterable[Callable[..., object]] = (),
    most: int = 1_000_000,
) -> Explored:
    """All schedules of the threads that `build` gives a run, with up to `budget` pre-emptions.

    Parameters
    ----------
    build : callable
        Makes everything anew, calls `Run.thread`, and returns what is to be looked at when the threads have ended.
    reduce : bool
        Leave out what only swaps independent steps (sleep sets). With a budget that may leave out a little more.
    allowed : tuple of type
        What threads may raise.
    by_opcode : iterable of function
        Each of their instructions is a point.
    most : int
        Schedules; more is an error, so that a test does not grow unseen.

    Raises
    ------
    Failed
    """
    codes = [function.__code__ for function in by_opcode]
    found, began = Explored(), time.perf_counter()
    stack: list[tuple[list[int], frozenset[int]]] = [([], frozenset())]
    gc.collect()
    gc.freeze()  # so that a collection looks at what the runs have made, and at nothing else; all tests have theirs so
    try:
        _search(build, stack, budget, reduce, allowed, codes, most, found)
    except Failed as error:
        error.runs = found.runs
        raise
    finally:
        gc.collect()
    found.seconds = time.perf_counter() - began
    return found


def _search(
    build: Callable[[Run], Callable[[], object] | None], stack: list[tuple[list[int], frozenset[int]]], budget: int,
    reduce: bool, allowed: tuple[type[BaseException], ...], codes: list[CodeType], most: int, found: Explored,
) -> None:  # fmt: skip
    limit = math.inf if reduce else budget  # a sleep set may take the choice from a thread that could go on
    while stack:
        script, redundant = stack.pop()
        found.runs += 1
        try:
            run = _one(build, Run(script, redundant, codes, budget=limit, tells=False), allowed)
        except Failed as error:
            _one(build, Run(error.script, codes=codes, budget=limit), allowed)  # which tells, and fails as well
            raise
        found.points += run.points
        found.pruned += run.pruned
        assert found.runs <= most, f"more than {most} schedules"
        for index in range(len(script), len(run.branches)):
            branch = run.branches[index]
            done = {branch.chosen}
            for option in branch.options:
                if option not in done and branch.used + branch.cost(option) <= budget:
                    prefix = [earlier.chosen for earlier in run.branches[:index]]
                    asleep = branch.redundant | done if reduce else frozenset()
                    stack.append(([*prefix, option], frozenset(asleep)))
                    done.add(option)


def replay(
    build: Callable[[Run], Callable[[], object] | None],
    script: Sequence[int],
    *,
    budget: float = 2,
    allowed: tuple[type[BaseException], ...] = (),
    by_opcode: Iterable[Callable[..., object]] = (),
) -> Run:
    """The one schedule that `Failed` printed, with its `budget`: points behind that are none of the script's."""
    codes = [function.__code__ for function in by_opcode]
    return _one(build, Run(script, codes=codes, budget=budget), allowed)


def _one(
    build: Callable[[Run], Callable[[], object] | None], run: Run, allowed: tuple[type[BaseException], ...]
) -> Run:
    check = build(run)
    run.go(allowed)
    if not run.why and not run.pruned and check is not None:
        try:
            check()
        except Exception as error:
            run.why = f"afterwards: {error!r}\n" + "".join(traceback.format_exception(error)[-4:])
    if run.why:
        raise Failed(run.why, run)
    return run


# -- what takes the place of Python's ---------------------------------------------------------------------------------


def point(what: str, thing: object = None) -> None:
    """A point of the run that is on, if there is one."""
    if _now is not None:
        _now.point(what, thing)


def block_until(condition: Callable[[], bool], what: str, timeout: float | None = None) -> bool:
    if _now is None:
        assert condition(), f"{what}: nobody is there to end it"
        return True
    return _now.block_until(condition, what, timeout)


class Lock:
    """`threading.RLock`, or `threading.Lock` where `again` is false."""

    def __init__(self, label: str = "lock", *, again: bool = True, ends: bool = True) -> None:
        self.label = label
        self._ends = ends
        """A release is a point: not needed where whatever else is shared is one."""
        self.owner: object = None
        self.depth = 0
        self._again = again

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._again and self.owner == _thread.get_ident():
            self.depth += 1
            return True
        point("acquire", self)
        if self.owner is not None:
            if not blocking:
                return False
            limit = None if timeout < 0 else timeout
            if not block_until(lambda: self.owner is None, f"lock {self.label}", limit):
                return False
        self.owner, self.depth = _thread.get_ident(), 1
        return True

    def release(self) -> None:
        if self._again and self.owner != _thread.get_ident():
            if _now is not None and _now._over:
                return
            raise RuntimeError("cannot release un-acquired lock")
        self.depth -= 1
        if self.depth <= 0:
            self.owner = None
            if self._ends:
                point("release", self)

    def locked(self) -> bool:
        return self.owner is not None

    def _is_owned(self) -> bool:
        return self.owner == _thread.get_ident()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        point("set", self)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        point("wait for event", self)
        return block_until(self.is_set, "event", timeout)


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or Lock("condition")
        self._told = 0
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def wait(self, timeout: float | None = None) -> bool:
        seen = self._told
        self._lock.release()
        try:
            return block_until(lambda: self._told > seen, "condition", timeout)
        finally:
            self._lock.acquire()

    def notify(self, n: int = 1) -> None:
        self._told += 1

    notify_all = notify

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def sleep(seconds: float) -> None:
    if _now is not None and _now.me() is not None:
        _now.sleep(seconds)
    else:
        time.sleep(seconds)


def monotonic() -> float:
    return _now.clock if _now is not None and _now.me() is not None else time.monotonic()


def pauses() -> Iterator[float]:
    """As `gpuinterop.system.pauses`, without its upper end: the clock has little else to do."""
    pause = 20e-6
    while True:
        yield pause
        pause *= 2


class _Stands:
    """A module, but for a few names."""

    def __init__(self, module: ModuleType, **names: object) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def stand_in(module: ModuleType) -> Any:
    """`threading` or `time`, with the explorer's own locks, sleeps and clock."""
    if module.__name__ == "time":
        return _Stands(module, sleep=sleep, monotonic=monotonic)
    return _Stands(
        module, Lock=functools.partial(Lock, again=False), RLock=Lock, Event=Event, Condition=Condition
    )  # fmt: skip


# -- what is watched --------------------------------------------------------------------------------------------------


class Marks(list[Any]):
    """The calls under way with a native: each mark and each count is a point.

    The end of one is none: between it and the point before, and the one behind, a thread touches nothing shared.
    """

    thing: object = None

    def __iadd__(self, marks: Iterable[Any]) -> Marks:  # type: ignore[misc]
        point("mark", self.thing)
        super().__iadd__(marks)
        return self

    def append(self, mark: Any) -> None:
        point("mark", self.thing)
        super().append(mark)

    def copy(self) -> list[Any]:
        point("marks", self.thing)
        return super().copy()

    def __len__(self) -> int:  # `if shut:`
        point("marks", self.thing)
        return super().__len__()


class Queue(deque[Any]):
    """A deque that threads and finalizers add to without a lock."""

    def append(self, thing: Any) -> None:
        point("append", thing)
        super().append(thing)

    def __iadd__(self, things: Iterable[Any]) -> Queue:
        point("append", self)
        super().__iadd__(things)
        return self

    def popleft(self) -> Any:
        point("popleft", self)
        return super().popleft()

    def copy(self) -> Any:
        point("look", self)
        return super().copy()


class Notes(dict[Any, Any]):
    """A dict that threads note something in without a lock."""

    def __setitem__(self, key: Any, value: Any) -> None:
        point("note", key)
        super().__setitem__(key, value)

    def copy(self) -> dict[Any, Any]:
        point("look", self)
        return super().copy()


class Guarded(dict[Any, Any]):
    """A dict that is written under the monitor only."""

    label = ""
    holds: Callable[[], bool] = staticmethod(lambda: True)
    fixed = True
    """Also a key that is there is set by the holder only."""


def _guard(name: str) -> Any:
    method = getattr(dict, name)

    def call(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        known = not self.fixed and name == "__setitem__" and args[0] in self
        if not known and not self.holds():
            _refuse(f"{self.label} is written outside of the monitor")
        return method(self, *args, **kwargs)

    return call


for _method in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(Guarded, _method, _guard(_method))


class Watched:
    """A data descriptor in place of an attribute: reads are points, and writes are the monitor's holder's.

    The first write is the constructor's, before anybody knows the thing. What the holder reads nobody else can write,
    so that is no point.

    Parameters
    ----------
    cls : type
    name : str
    holds : callable
        Whether the running thread holds the monitor; None where anybody may write.
    wrap : callable, optional
        Makes what is stored of what is written.
    """

    def __init__(
        self, cls: type, name: str, *, holds: Callable[[], bool] | None = None,
        wrap: Callable[[object, Any], Any] | None = None, looks: bool = True,
    ) -> None:  # fmt: skip
        self.name = name
        self._slot = cls.__dict__.get(name)  # of `__slots__`
        if not hasattr(self._slot, "__set__"):
            self._slot = None
        self._holds = holds
        self._wrap = wrap
        self._looks = looks

    def _load(self, thing: Any) -> Any:
        if self._slot is not None:
            return self._slot.__get__(thing, type(thing))
        try:
            return thing.__dict__[self.name]
        except KeyError:
            raise AttributeError(self.name) from None

    def _is_set(self, thing: Any) -> bool:
        try:
            self._load(thing)
        except AttributeError:
            return False
        return True

    def __get__(self, thing: Any, kind: type) -> Any:
        if thing is None:
            return self
        if self._looks and _now is not None and not (self._holds is not None and self._holds()):
            point("look", thing)
        return self._load(thing)

    def __set__(self, thing: Any, value: Any) -> None:
        if self._holds is not None and not self._holds() and self._is_set(thing):
            _refuse(f"{self.name} of {_name(thing)} is written outside of the monitor")
        if self._wrap is not None:
            value = self._wrap(thing, value)
        if self._slot is not None:
            self._slot.__set__(thing, value)
        else:
            thing.__dict__[self.name] = value  # where it is found once nobody watches


def _refuse(why: str) -> None:
    if _now is not None and _now.me() is not None and not _now._over:
        _now.fail(why)
        raise _Unwind


def marks_of(thing: object, value: Iterable[Any]) -> Marks:
    """For `Watched`: a list whose changes are points."""
    marks = Marks(value)
    marks.thing = thing
    return marks


def guarded_by(holds: Callable[[], bool], *, fixed: bool = True) -> Callable[[object, dict[Any, Any]], Guarded]:
    """For `Watched`: a dict that only the holder writes; or adds to and takes from, where it is not `fixed`."""

    def wrap(thing: object, value: dict[Any, Any]) -> Guarded:
        guarded = Guarded(value)
        guarded.label, guarded.holds, guarded.fixed = f"a dict of {_name(thing)}", holds, fixed
        return guarded

    return wrap
