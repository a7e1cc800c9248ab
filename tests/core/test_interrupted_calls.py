"""Ctrl-C at every place of every public call: no lock is held, no mark is left, and nothing that was made is lost.

Once, and twice: the second strikes in what cleans up, and `make explore` tries more distances.
"""

from __future__ import annotations

import functools
import os
import threading

import pytest

import gpuinterop as gi
from gpuinterop._core.drain import wait_for
from gpuinterop._core.native import retire
from tests.strikes import OURS, Strikes

from .fake import VIOLATIONS, FakeEverything, fake_team
from .interrupted import CALLS, interrupted

DEEP = bool(os.environ.get("GPUINTEROP_EXPLORE"))
TWICE = CALLS if DEEP else ("Buffer.copy_from_host", "Device.allocate", "Device.drain", "Graph.close", "Stream.capture")
"""Marks, births, the gate and the drain are cleaned up in these."""
STRIKES = [
    *((name, 0) for name in CALLS),
    *((name, second) for name in TWICE for second in ((1, 3, 10, 30, 100) if DEEP else (30,))),
]
"""A call, and how many instructions behind the first strike a second one comes."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "second"), STRIKES)
def test_an_interrupt_leaves_nothing_behind(name: str, second: int) -> None:
    count, failed = interrupted(name, second=second)
    print(f"\n{name}: {count} strikes")
    VIOLATIONS.clear()
    assert failed == [], f"{len(failed)} of {count} places"


@pytest.mark.filterwarnings("ignore")
def test_every_callback_is_called_and_told() -> None:
    """Ctrl-C may end a callback that has begun. It skips none, calls none twice, and makes no other thread wait."""

    class Two:
        def __init__(self) -> None:
            self.device = fake_team(backend=FakeEverything())[0][0]
            self.memories = [self.device.import_memory(gi.OpaqueWin32(handle=8), size=4096) for _ in range(2)]
            self.called = [0, 0]
            for number, memory in enumerate(self.memories):
                memory.on_released(functools.partial(self.count, number))

        def count(self, number: int) -> None:
            self.called[number] += 1

    found: list[str] = []
    strikes = Strikes(OURS)

    def close(two: Two) -> None:
        retire(two.memories[1]._lifetime)
        two.memories[0].close()

    def finish(struck: bool, two: Two, made: object) -> None:
        for memory in two.memories:
            memory.close()
        two.device.drain(timeout=5)
        told: list[bool] = []
        other = threading.Thread(target=lambda: told.extend(wait_for(one._lifetime, 0) for one in two.memories))
        other.start()
        other.join(20)
        if told != [True, True]:
            found.append(f"told {told}, struck{strikes.where}")
        if two.called != [1, 1] and __file__ not in strikes.where:
            found.append(f"called {two.called}, struck{strikes.where}")

    assert strikes.everywhere(Two, close, finish) > 100
    assert found == []
