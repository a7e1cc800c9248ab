"""64-bit words that streams write and wait for. A store wakes nobody, so waits look, with growing pauses."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

from gpuinterop import system


def write(address: int, value: int) -> None:
    system.fence()
    ctypes.c_uint64.from_address(address).value = value


def wait(address: int, value: int, check: Callable[[], None]) -> None:
    """Block the calling thread, GIL released, until the word is `value` or more."""
    word = ctypes.c_uint64.from_address(address)
    spins = system.SPINS
    pauses = system.pauses()
    while word.value < value:
        if spins:
            spins -= 1
            os.sched_yield()
            continue
        check()
        time.sleep(next(pauses))
    system.fence()
