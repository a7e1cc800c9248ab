"""Measures contenders in turns, so that what disturbs one disturbs the others as well."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

__all__ = ["OURS", "Contender", "Figure", "Spread", "Values", "calls_of", "in_turns"]

OURS: Final = "gpuinterop"
"""This library among the contenders; the others are yardsticks."""

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
        Why there are no times; empty if there are.
    failed : bool
        Whether the reason is a failure, and not that the device cannot do it, or that something is not installed.
    """

    name: str
    unit: str = "call"
    times: dict[str, Spread] = field(default_factory=dict)
    judged_by: str = "median"
    problem: str = ""
    failed: bool = False

    def ratio(self, yardstick: str) -> float:
        """How often this library's time holds the yardstick's."""
        ours, theirs = (float(getattr(self.times[name], self.judged_by)) for name in (OURS, yardstick))
        return round(ours / theirs, 3)


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
