"""Measures contenders in turns, so that what disturbs one disturbs the others as well."""

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
"""This library among the contenders; the others are yardsticks."""
BUDGET_S: Final = 2.0
"""How long a figure may go on whose rounds take some ms on one machine, and seconds on another (`Times.rounds`)."""

Contender: TypeAlias = Callable[[int], object]
"""Makes so many calls, one after the other."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Microseconds of a call, or of a frame.

    Attributes
    ----------
    median, p10, p90, p99 : float
    samples : int
        How many times were taken; each may be the mean of several calls.
    """

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
    """Cost of a call, frame or batch here, and beside it by other means.

    Attributes
    ----------
    name : str
    unit : str
        What is counted: a call, a frame, a batch.
    times : dict of str to Spread
        Each contender's, this library's first.
    judged_by : str
        Which part of the spread the ratio compares: ``median`` or ``p99``.
    problem : str
        Why there are no times, or not those of all, or what was counted beside them; else empty.
    failed : bool
        Whether the reason is a failure, and not that the device cannot do it, or that something is not installed.
    """

    name: str
    unit: str = "call"
    times: dict[str, Spread] = field(default_factory=dict)
    judged_by: str = "median"
    problem: str = ""
    failed: bool = False

    def ratio(self, yardstick: str) -> float | None:
        """How often this library's time holds the yardstick's; None for this library's own, or without one."""
        if yardstick == OURS or OURS not in self.times:
            return None
        ours, theirs = (float(getattr(self.times[name], self.judged_by)) for name in (OURS, yardstick))
        return round(ours / theirs, 3)


class NotMeasured(Exception):
    """A contender has no times.

    Parameters
    ----------
    problem : str
    failed : bool
        See `Figure`.
    """

    def __init__(self, problem: str, failed: bool) -> None:
        super().__init__(problem, failed)
        self.problem, self.failed = problem, failed


def why(error: Exception) -> tuple[str, bool]:
    """Why there are no times, and whether that is a failure (see `Figure`)."""
    if isinstance(error, NotMeasured):
        return error.problem, error.failed
    if isinstance(error, UnsupportedError):
        return f"{cell_name(error.capability.cell)}: {error.capability.reason}", False
    if isinstance(error, DeviceNotFoundError):
        return str(error), False
    return f"it failed: {str(error) or type(error).__name__}", True


class Times:
    """Microseconds by figure and contender, and why some are missing. Processes send them to each other."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, list[float]]] = {}
        self._problems: dict[str, tuple[str, bool]] = {}
        self._short = ""

    @contextmanager
    def measuring(self, contender: str) -> Iterator[None]:
        """Note why a contender cannot be measured, and go on."""
        try:
            yield
        except Exception as error:  # of whatever kind: the others are worth more
            self._problems.setdefault(contender, why(error))

    def add(self, contender: str, took: Mapping[str, float]) -> None:
        """Add a time of each of these figures."""
        for figure, microseconds in took.items():
            self._found.setdefault(figure, {}).setdefault(contender, []).append(microseconds)

    def rounds(self, wanted: int, contenders: Mapping[str, Callable[[], Mapping[str, float]]]) -> Self:
        """Let contenders take turns, until `BUDGET_S` have passed; each returns times by figure.

        One that cannot is asked no more.
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
        """Add another process's."""
        self._short = other._short or self._short
        self._problems = other._problems | self._problems
        for figure, contenders in other._found.items():
            for name, took in contenders.items():
                self._found.setdefault(figure, {}).setdefault(name, []).extend(took)

    def sums(self, *figures: str) -> list[float]:
        """Sums of this library's times of these figures. Raises `NotMeasured` where it has a problem."""
        if OURS in self._problems:
            raise NotMeasured(*self._problems[OURS])
        return [sum(times) for times in zip(*(self._found[figure][OURS] for figure in figures), strict=False)]

    def figure(self, key: str, name: str, unit: str = "call") -> Figure:
        """The figure of this key; without the first time of each contender, if there are more."""
        found = self._found.get(key, {})
        times = {one: Spread.of(found[one][1:] or found[one]) for one in sorted(found, key=lambda one: one != OURS)}
        lacking = {text: one for one, (text, _) in sorted(self._problems.items(), key=lambda one: one[0] == OURS)}
        problems = [text if one == OURS else f"{one}: {text}" for text, one in lacking.items()]
        problem = "; ".join(filter(None, [*problems, self._short]))
        return Figure(name, unit, times, problem=problem, failed=any(failed for _, failed in self._problems.values()))


class Values:
    """The values of a timeline, which only grow.

    Parameters
    ----------
    taken : int
        How many of them were signalled before.
    """

    def __init__(self, taken: int = 0) -> None:
        self._next = taken + 1

    def take(self, count: int, step: int = 1) -> range:
        """The next values, `step` apart."""
        taken = range(self._next, self._next + count * step, step)
        self._next = taken.stop
        return taken


def calls_of(call: Callable[[int], object], values: Values | None = None) -> Contender:
    """Calls with growing values; without `values`, with 2, which was signalled before."""

    def run(count: int) -> None:
        for value in (2,) * count if values is None else values.take(count):
            call(value)

    return run


def in_turns(
    contenders: Mapping[str, Contender], *, calls: int, rounds: int, settle: Callable[[], Any] = lambda: None
) -> dict[str, Spread]:
    """Time each contender in each round.

    Parameters
    ----------
    contenders : mapping of str to callable
    calls : int
        How many calls one time is the mean of.
    rounds : int
        How many times are taken of each, after some that are not counted.
    settle : callable
        Called behind each contender, outside of the time: it empties queues.

    Returns
    -------
    dict of str to Spread
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
            turns.append(turns.pop(0))  # so that each is the first in turn
    return {name: Spread.of(found) for name, found in times.items()}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the garbage collector away, as `timeit` does."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
