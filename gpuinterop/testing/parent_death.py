"""End a process with the one that has started it, even if it hangs in a driver."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

__all__ = ["die_with"]

_SET_PARENT_DEATH_SIGNAL: Final = 1


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread of `parent` (a process ID) that started it ends.

    That works on Linux; elsewhere the process must check for its parent.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has exited already
        os._exit(1)
