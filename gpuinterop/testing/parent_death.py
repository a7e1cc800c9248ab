"""Processes that do not outlive the one that has started them, also where they hang in a driver."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

__all__ = ["die_with"]

_SET_PARENT_DEATH_SIGNAL: Final = 1


def die_with(parent: int) -> None:
    """Let the kernel end this process when `parent`, which has started it, ends: by then no thread here may run.

    On Linux; elsewhere the process ends when it next looks for its parent.

    Parameters
    ----------
    parent : int
        Its process id. What counts is its thread that has started this process.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent had ended before
        os._exit(1)
