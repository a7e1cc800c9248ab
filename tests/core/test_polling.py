"""How waits poll: first without a sleep, then with sleeps that grow to a limit."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from gpuinterop import system


def test_a_millisecond_without_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes true meanwhile is seen at the next look, and other threads run between the later looks."""
    clock = itertools.count(0.0, 10e-6)
    yields: list[None] = []
    slept: list[float] = []
    looks = 0

    def condition() -> bool:
        nonlocal looks
        looks += 1
        return len(slept) == 20

    monkeypatch.setattr(system, "SPIN_S", 50e-6)
    monkeypatch.setattr(system, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(system, "relax", lambda: yields.append(None))
    monkeypatch.setattr(system, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append))
    assert system.until(condition, 1.0)
    assert 90 < len(yields) < 101  # a millisecond of that clock
    assert 3 < looks - len(yields) - len(slept) < 7  # 50 us, and the last look
    assert slept[0] == 20e-6
    assert slept == sorted(slept)
    assert slept[-1] == 1e-3
