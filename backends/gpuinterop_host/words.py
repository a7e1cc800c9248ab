"""64-bit words that streams write and wait for. A store wakes nobody, so waits look, with growing pauses."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Final

from gpuinterop import system

_SPINS: Final = 30 if (os.cpu_count() or 1) > 1 else 0
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3


def write(address: int, value: int) -> None:
    system.fence()
    ctypes.c_uint64.from_address(address).value = value


def wait(address: int, value: int, check: Callable[[], None]) -> None:
    """Block the calling thread, GIL released, until the word is `value` or more."""
    word = ctypes.c_uint64.from_address(address)
    spins = _SPINS
    pause = _FIRST_PAUSE
    while word.value < value:
        if spins:
            spins -= 1
            os.sched_yield()
            continue
        check()
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    system.fence()
