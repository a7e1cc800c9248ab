"""Descriptors of this process, looked at past gpuinterop."""

from __future__ import annotations

import contextlib
import os


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def named_fds() -> set[str]:
    """What is open: the numbers, and what they are."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found
