"""Ctrl-C at every place of every public call: no lock is held, no mark is left, and nothing that was made is lost.

`make explore` strikes twice.
"""

from __future__ import annotations

import os

import pytest

from .fake import VIOLATIONS
from .interrupted import interrupted
from .pairs import actions

pytestmark = pytest.mark.usefixtures("garbage_is_collected")

DEEP = bool(os.environ.get("GPUINTEROP_EXPLORE"))
# One of a kind in every run; all take minutes.
NAMES = [
    name
    for name in (action.name for action in actions())
    if DEEP or name in ("Buffer.close", "ExternalSemaphore.wait", "ExternalSemaphore.signal", "Stream.close")
]


@pytest.mark.timeout(1200 if DEEP else 300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("second", [0, *([1, 10, 30] if DEEP else [])])
@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_leaves_nothing_behind(name: str, second: int) -> None:
    count, failed = interrupted(name, second=second)
    print(f"\n{name}: {count} strikes")
    VIOLATIONS.clear()
    assert failed == [], f"{len(failed)} of {count} places"
