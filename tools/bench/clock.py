"""Measure contenders alternately, so that a disturbance affects all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias

from gpuinterop import BackendUnavailableError, DeviceNotFoundError, UnsupportedError

OURS: Final = "gpuinterop"
"""gpuinterop's name among the contenders; the others are yardsticks."""

PERCENTILES: Final = {"median": 50, "p10": 10, "p90": 90, "p99": 99}
Calls: TypeAlias = Callable[[int], object]
"""Makes this many calls, one after the other."""
Turn: TypeAlias = Callable[[], Mapping[str, float]]
"""Does its work once; returns microseconds by key."""


Action: TypeAlias = Callable[[], object]


def number(microseconds: float) -> str:
    """Write a time as pages and terminals show it."""
    return f"{microseconds:.2f}" if microseconds < 100 else f"{microseconds:,.0f}"


def nothing() -> None:
    """Do nothing."""


@dataclass(slots=True)
class Figure:
    """What a call, frame or list (the `unit`) costs: microseconds of each contender, gpuinterop first.

    `problem` says why times are missing; `failed` is False if the device cannot do it, or something is not installed.
    """

    name: str
    unit: str = "call"
    times: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    failed: bool = False


class NotMeasured(Exception):
    """Another process's error: the `problem` and `failed` of a `Figure`."""


def explain(error: Exception) -> tuple[str, bool]:
    """Return `problem` and `failed` of a `Figure`."""
    if isinstance(error, NotMeasured):
        return error.args[0], error.args[1]
    if isinstance(error, ModuleNotFoundError):
        return f"expected {error.name}, which is not installed", False
    if isinstance(error, UnsupportedError | DeviceNotFoundError | BackendUnavailableError):
        return str(error), False
    return f"it failed: {str(error) or type(error).__name__}", True


class Comparison:
    """Contenders that do the same work, and their times. Without `checks`, what they have done is not looked at."""

    def __init__(self, rounds: int, *, checks: bool) -> None:
        self._rounds, self._checks = rounds, checks
        self._contenders: dict[str, tuple[Turn, Action]] = {}
        self._times: dict[tuple[str, str], list[float]] = {}
        self._problems: dict[str, tuple[str, bool]] = {}

    @contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Note why a contender cannot be measured, and continue with the others."""
        try:
            yield
        except Exception as error:
            self._problems[name] = explain(error)
            self._contenders.pop(name, None)

    def add(self, name: str, turn: Turn, check: Action = nothing) -> None:
        """Add a contender. `check` runs after all rounds, and raises if the contender has not done its work."""
        self._contenders[name] = turn, check

    def add_calls(
        self, name: str, calls: Mapping[str, Calls], count: int = 1, settle: Action = nothing, check: Action = nothing
    ) -> None:
        """Add a contender whose times are means of `count` calls; `settle` empties the queues after them, untimed."""

        def turn() -> Mapping[str, float]:
            times = {}
            for key, run in calls.items():
                began = time.perf_counter_ns()
                run(count)
                times[key] = (time.perf_counter_ns() - began) / count / 1000
                settle()
            return times

        self.add(name, turn, check)

    def measure(self) -> Self:
        """Run the contenders in turns. A few rounds run first and are not counted."""
        early = max(1, self._rounds // 10)
        gc.collect()
        for number in range(early + self._rounds):
            names = deque(self._contenders)
            names.rotate(-number)  # each contender is the first once in a while
            for name in names:
                with self.noting(name):
                    for key, microseconds in self._contenders[name][0]().items():
                        if number >= early:
                            self._times.setdefault((key, name), []).append(microseconds)
        for name, (_, check) in list(self._contenders.items()):
            if self._checks:
                with self.noting(name):
                    check()
        return self

    def figure(self, name: str, unit: str = "call", key: str = "") -> Figure:
        """Make the figure of this key: the times of all contenders that have done their work."""
        times = []
        for contender in self._contenders:
            samples = self._times[key, contender]
            cuts = statistics.quantiles(samples, n=100, method="inclusive")
            spread = {part: round(cuts[percent - 1], 3) for part, percent in PERCENTILES.items()}
            times.append({"name": contender, **spread, "samples": len(samples)})
        problems = (text if who == OURS else f"{who}: {text}" for who, (text, _) in self._problems.items())
        return Figure(name, unit, times, "; ".join(problems), any(failed for _, failed in self._problems.values()))


class Values:
    """The values of a timeline, which only grow; `last` was taken last."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def take(self, count: int, step: int = 1) -> range:
        """Take the next values, `step` apart."""
        first, self.last = self.last + step, self.last + step * count
        return range(first, self.last + 1, step)
