"""Ctrl-C at every place of every public call: no lock is held, no mark is left, and nothing that was made is lost.

Once, and twice: right behind each other, and later, in what cleans up.
"""

from __future__ import annotations

import os

import pytest

from .fake import VIOLATIONS
from .interrupted import CALLS, interrupted

pytestmark = pytest.mark.usefixtures("garbage_is_collected")

DEEP = bool(os.environ.get("GPUINTEROP_EXPLORE"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("second", [0, 1, 30, *([3, 10, 100] if DEEP else [])])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_nothing_behind(name: str, second: int) -> None:
    count, failed = interrupted(name, second=second)
    print(f"\n{name}: {count} strikes")
    VIOLATIONS.clear()
    assert failed == [], f"{len(failed)} of {count} places"
