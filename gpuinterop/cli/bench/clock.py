"""Measure contenders alternately, so that a disturbance affects all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias

from ...errors import DeviceNotFoundError, UnsupportedError
from ..console import cell_name

__all__ = [
    "OURS", "Contender", "Figure", "NotMeasured", "Spread", "Times", "Values", "calls_of", "in_turns", "why"
]  # fmt: skip

OURS: Final = "gpuinterop"
"""gpuinterop's name among the contenders; the others are yardsticks."""
BUDGET_S: Final = 2.0
"""Longest time for the rounds of a figure (`Times.rounds`): a round takes milliseconds or seconds, by machine."""

Contender: TypeAlias = Callable[[int], object]
"""Makes this many calls, one after the other."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Microseconds per call or frame. Each of the `samples` can be the mean of several calls."""

    median: float
    p10: float
    p90: float
    p99: float
    samples: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """Summarize times in microseconds."""
        cuts = statistics.quantiles(times, n=100, method="inclusive") if len(times) > 1 else [times[0]] * 99
        median, p10, p90, p99 = (round(cuts[percent - 1], 3) for percent in (50, 10, 90, 99))
        return cls(median, p10, p90, p99, len(times))


@dataclass(slots=True)
class Figure:
    """What a call, frame or batch (the `unit`) costs with gpuinterop and with other means.

    `times` has gpuinterop's first. The ratio compares the part of the spread that `judged_by` names, ``median`` or
    ``p99``. `problem` is why times are missing, or what was counted besides; `failed` is True if that was a failure,
    and False if the device cannot do it or something is not installed.
    """

    name: str
    unit: str = "call"
    times: dict[str, Spread] = field(default_factory=dict)
    judged_by: str = "median"
    problem: str = ""
    failed: bool = False

    def ratio(self, yardstick: str) -> float | None:
        """The ratio of gpuinterop's time to the yardstick's; None for gpuinterop itself, or without its time."""
        if yardstick == OURS or OURS not in self.times:
            return None
        ours, theirs = (float(getattr(self.times[name], self.judged_by)) for name in (OURS, yardstick))
        return round(ours / theirs, 3)


class NotMeasured(Exception):
    """A contender has no times, with the `problem` and `failed` of its `Figure`."""

    def __init__(self, problem: str, failed: bool) -> None:
        super().__init__(problem, failed)
        self.problem, self.failed = problem, failed


def why(error: Exception) -> tuple[str, bool]:
    """Return `problem` and `failed` of a `Figure`."""
    if isinstance(error, NotMeasured):
        return error.problem, error.failed
    if isinstance(error, UnsupportedError):
        return f"{cell_name(error.capability.cell)}: {error.capability.reason}", False
    if isinstance(error, DeviceNotFoundError):
        return str(error), False
    return f"it failed: {str(error) or type(error).__name__}", True


class Times:
    """Microseconds by figure and contender, and why some are missing. Processes send these objects to each other."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, list[float]]] = {}
        self._problems: dict[str, tuple[str, bool]] = {}
        self._short = ""

    @contextmanager
    def measuring(self, contender: str) -> Iterator[None]:
        """Note why a contender cannot be measured, and continue with the others."""
        try:
            yield
        except Exception as error:
            self._problems.setdefault(contender, why(error))

    def add(self, contender: str, took: Mapping[str, float]) -> None:
        for figure, microseconds in took.items():
            self._found.setdefault(figure, {}).setdefault(contender, []).append(microseconds)

    def rounds(self, wanted: int, contenders: Mapping[str, Callable[[], Mapping[str, float]]]) -> Self:
        """Run the contenders alternately until `BUDGET_S` is over; each returns times by figure.

        A contender that raises is not run again.
        """
        turns, until = list(contenders.items()), time.monotonic() + BUDGET_S
        with _undisturbed():
            for number in range(wanted):
                if number and time.monotonic() > until:
                    self._short = f"{number} of {wanted} rounds, in {BUDGET_S:g} s"
                    break
                for name, run in turns:
                    with self.measuring(name):
                        self.add(name, run())
                turns = [turn for turn in turns[1:] + turns[:1] if turn[0] not in self._problems]
        return self

    def update(self, other: Times) -> None:
        """Add another process's times."""
        self._short = other._short or self._short
        self._problems = other._problems | self._problems
        for figure, contenders in other._found.items():
            for name, took in contenders.items():
                self._found.setdefault(figure, {}).setdefault(name, []).extend(took)

    def sums(self, *figures: str) -> list[float]:
        """Sum gpuinterop's times of these figures. Raises `NotMeasured` if gpuinterop has a problem."""
        if OURS in self._problems:
            raise NotMeasured(*self._problems[OURS])
        return [sum(times) for times in zip(*(self._found[figure][OURS] for figure in figures), strict=False)]

    def figure(self, key: str, name: str, unit: str = "call") -> Figure:
        """Make the figure of this key, without each contender's first time if it has more."""
        found = self._found.get(key, {})
        times = {one: Spread.of(found[one][1:] or found[one]) for one in sorted(found, key=lambda one: one != OURS)}
        lacking = {text: one for one, (text, _) in sorted(self._problems.items(), key=lambda one: one[0] == OURS)}
        problems = [text if one == OURS else f"{one}: {text}" for text, one in lacking.items()]
        problem = "; ".join(filter(None, [*problems, self._short]))
        return Figure(name, unit, times, problem=problem, failed=any(failed for _, failed in self._problems.values()))


class Values:
    """The values of a timeline, which only grow; `taken` values were signalled before."""

    def __init__(self, taken: int = 0) -> None:
        self._next = taken + 1

    def take(self, count: int, step: int = 1) -> range:
        """Take the next values, `step` apart."""
        taken = range(self._next, self._next + count * step, step)
        self._next = taken.stop
        return taken


def calls_of(call: Callable[[int], object], values: Values | None = None) -> Contender:
    """Make calls with growing values; without `values`, with 2, which was signalled before."""

    def run(count: int) -> None:
        for value in (2,) * count if values is None else values.take(count):
            call(value)

    return run


def in_turns(
    contenders: Mapping[str, Contender], *, calls: int, rounds: int, settle: Callable[[], Any] = lambda: None
) -> dict[str, Spread]:
    """Time each contender in each round; one time is the mean of `calls` calls.

    A few more rounds run first and are not counted. `settle` is called after each contender, untimed: it empties
    queues.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    turns = list(contenders.items())
    early = max(1, rounds // 10)
    with _undisturbed():
        for number in range(early + rounds):
            for name, run in turns:
                began = time.perf_counter_ns()
                run(calls)
                took = time.perf_counter_ns() - began
                settle()
                if number >= early:
                    times[name].append(took / calls / 1000)
            turns.append(turns.pop(0))  # each contender is the first once in a while
    return {name: Spread.of(found) for name, found in times.items()}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Turn the garbage collector off, as `timeit` does."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
