"""The explorer finds what it is to find: races, deadlocks, writes outside of the monitor; and replays them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from . import explorer
from .explorer import Failed, Lock, Run, Watched, explore, replay

MARK = (None,)


class Driver:
    """Refuses what is dead at the start and inside of each call."""

    def __init__(self) -> None:
        self.alive = True

    def use(self) -> None:
        for place in ("start", "inside"):
            explorer.point(f"use {place}", self)
            assert self.alive, "a dead handle reached the driver"

    def release(self) -> None:
        explorer.point("release start", self)
        assert self.alive, "released twice"
        self.alive = False


class Toy:
    """One thing with a native half, as the core's: calls mark it and look, a close retires it, a drain releases it."""

    def __init__(self, monitor: Lock) -> None:
        self.monitor = monitor
        self.driver = Driver()
        self.calls = explorer.marks_of(self, ())
        self.state = "live"

    def use(self) -> bool:
        mine = self.calls
        mine += MARK
        try:
            if self.state != "live":
                return False
            self.driver.use()
            return True
        finally:
            del mine[-1]

    def use_marked_late(self) -> bool:
        if self.state != "live":
            return False
        mine = self.calls
        mine += MARK
        try:
            self.driver.use()
            return True
        finally:
            del mine[-1]

    def close(self) -> None:
        with self.monitor:
            if self.state == "live":
                self.state = "retired"
        self.drain()

    def drain(self) -> None:
        with self.monitor:
            if self.state != "retired" or self.calls.copy():
                return
            self.state = "releasing"
        self.driver.release()
        with self.monitor:
            self.state = "released"


class Hasty(Toy):
    """Counts the marks before it retires."""

    def close(self) -> None:
        busy = self.calls.copy()
        with self.monitor:
            self.state = "retired"
            if busy:
                return
            self.state = "releasing"
        self.driver.release()


class Unlocked(Toy):
    def close(self) -> None:
        self.state = "retired"


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monitors: list[Lock] = []
    init = Toy.__init__

    def begin(self: Toy, monitor: Lock) -> None:
        monitors[:] = [monitor]
        init(self, monitor)

    monkeypatch.setattr(Toy, "__init__", begin)

    def holds() -> bool:
        return monitors[0]._is_owned()

    monkeypatch.setattr(Toy, "state", Watched(Toy, "state", holds=holds), raising=False)


def closing(kind: type[Toy], use: Callable[[Toy], object]) -> Callable[[Run], Callable[[], None]]:
    def build(run: Run) -> Callable[[], None]:
        toy = kind(Lock("monitor"))
        run.thread(lambda: use(toy), "user")
        run.thread(toy.close, "closer")

        def check() -> None:
            toy.drain()
            assert not toy.driver.alive, "never released"

        return check

    return build


def test_mark_then_look_is_right() -> None:
    found = explore(closing(Toy, Toy.use))
    print(f"\nmark, look, call beside close: {found}")
    assert 20 < found.runs < 2000


@pytest.mark.parametrize(
    ("kind", "use"), [(Toy, Toy.use_marked_late), (Hasty, Toy.use)], ids=["a mark taken late", "a count taken early"]
)
def test_a_known_race_is_found_and_replayed(kind: type[Toy], use: Callable[[Toy], object]) -> None:
    build = closing(kind, use)
    with pytest.raises(Failed, match="dead handle") as first:
        explore(build)
    with pytest.raises(Failed, match="dead handle"):
        replay(build, first.value.script)
    with pytest.raises(Failed, match="dead handle"):
        explore(build, budget=3, reduce=True)


def test_a_write_outside_of_the_monitor_fails_at_once() -> None:
    with pytest.raises(Failed, match="written outside of the monitor"):
        explore(closing(Unlocked, Toy.use))


def test_a_deadlock_is_seen_not_waited_for() -> None:
    def build(run: Run) -> None:
        first, second = Lock("first"), Lock("second")

        def take(one: Lock, other: Lock) -> None:
            with one, other:
                pass

        run.thread(lambda: take(first, second))
        run.thread(lambda: take(second, first))

    with pytest.raises(Failed, match="deadlock: thread 0: wait: lock second; thread 1: wait: lock first") as found:
        explore(build)
    with pytest.raises(Failed, match="deadlock"):
        replay(build, found.value.script)


def test_what_waits_for_nothing_but_time_is_found() -> None:
    def build(run: Run) -> None:
        def poll() -> None:
            while True:
                explorer.sleep(1.0)

        run.thread(poll)

    with pytest.raises(Failed, match="all wait for time"):
        explore(build)


class Count:
    value = 0

    def add(self) -> None:
        self.value += 1


def test_a_count_that_is_not_atomic_is_found_by_opcode() -> None:
    def build(run: Run) -> Callable[[], None]:
        count = Count()
        for _ in range(2):
            run.thread(count.add)

        def check() -> None:
            assert count.value == 2, "lost"

        return check

    explore(build)
    with pytest.raises(Failed, match="lost"):
        explore(build, by_opcode=[Count.add])


def test_sleep_sets_leave_out_what_repeats_and_keep_what_does_not() -> None:
    def build(run: Run) -> Callable[[], None]:
        things = [explorer.marks_of(f"thing {number}", ()) for number in range(2)]

        def mark(number: int) -> None:
            mine = things[number]
            for _ in range(4):
                mine += MARK
                del mine[-1]

        for number in range(2):
            run.thread(lambda number=number: mark(number))  # type: ignore[misc]
        return lambda: None

    whole, reduced = explore(build, budget=3), explore(build, budget=3, reduce=True)
    print(f"\nindependent marks: {whole}; with sleep sets: {reduced}")
    assert reduced.runs < whole.runs / 2


def test_an_error_of_a_thread_fails_unless_it_is_allowed() -> None:
    def build(run: Run) -> None:
        def fail() -> None:
            raise ValueError("mine")

        run.thread(fail)

    with pytest.raises(Failed, match="ValueError"):
        explore(build)
    explore(build, allowed=(ValueError,))


def test_a_thread_that_blocks_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "LIMIT", 0.2)
    stuck = threading.Event()

    def build(run: Run) -> None:
        run.thread(lambda: stuck.wait(5), "sleepy")

    with pytest.raises(Failed, match=r"outside of the explorer:\nsleepy(.|\n)*stuck.wait"):
        explore(build)
    stuck.set()
