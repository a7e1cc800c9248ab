"""Public calls beside each other, in two threads, in all orders (`pairs`).

`make explore` searches deeper: with one pre-emption more, and also the pairs that are excluded here.
"""

from __future__ import annotations

import os
import time

import pytest

from . import pairs
from .explored import Core
from .explorer import Failed
from .fake import VIOLATIONS

DEEP = bool(os.environ.get("GPUINTEROP_EXPLORE"))
ACTIONS = pairs.actions()


def test_every_public_method_is_in_a_pair_or_has_a_reason() -> None:
    """METHODS in pairs.py says of each which actions call it, or REASONS why none does."""
    assert not pairs.METHODS.keys() & pairs.excused()
    assert set(pairs.public_methods()) == pairs.METHODS.keys() | pairs.excused()


@pytest.mark.timeout(1200 if DEEP else 300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(len(ACTIONS)), ids=[action.name for action in ACTIONS])
def test_no_order_of_two_calls_does_harm(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(monkeypatch)
    one = ACTIONS[index]
    failed: list[str] = []
    runs = points = met = excluded = 0
    began = time.perf_counter()
    for other in ACTIONS[index:]:
        if pairs.exclusion(one, other) and not DEEP:
            excluded += 1
            continue
        met += 1
        try:
            budget = pairs.preemptions(one, other) + DEEP
            found = pairs.meet(core, one, other, budget=budget, reduce=DEEP)
            runs, points = runs + found.runs, points + found.points
        except Failed as error:
            failed.append(f"beside {other.name}: {str(error)[:1500]}")
        VIOLATIONS.clear()
    seconds = time.perf_counter() - began
    print(f"\n{one.name}: {met} pairs, {excluded} excluded, {runs} schedules, {points} points, {seconds:.1f} s")
    assert not failed, f"{len(failed)} of {met} pairs fail:\n" + "\n".join(failed)
