"""An exception of a signal handler at a chosen point of the library, for tests that try each point in turn."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

from gpuinterop._core.lifetime import LEAKED, Lifetime, alive, struck

ROOT: Final = Path(__file__).parents[1]
LIBRARY: Final = (f"{ROOT}/gpuinterop/", f"{ROOT}/backends/")


def strikes(call: Callable[[], object], number: int) -> bool:
    """Make the call, with Ctrl-C at the entry of its `number`-th call of a function of the library, if there is one."""
    entered = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal entered
        code = frame.f_code
        if event != "call" or code.co_flags & inspect.CO_GENERATOR:  # no handler runs as `throw` resumes a generator
            return
        if code.co_filename.startswith(LIBRARY):
            entered += 1
            if entered == number:
                raise KeyboardInterrupt  # Python takes the profiler off

    sys.setprofile(look)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            call()
    finally:
        sys.setprofile(None)
        struck.clear()  # which the drain of a later test would tell
    return entered == number


def unnamed(before: set[Lifetime]) -> list[Lifetime]:
    """What is alive beside `before`, but for what a drain names, what that stands on, and other libraries' streams."""
    made = [one for one in set(alive()) - before if getattr(one, "owned", True)]
    return [one for one in made if not (one.stays or one.state is LEAKED)]
