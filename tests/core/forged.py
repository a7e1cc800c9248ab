"""Pages that look like our own timelines (`gpuinterop.timeline`), with one thing wrong."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Final

from gpuinterop import system, timeline

PAGE: Final = mmap.PAGESIZE
_ADD_SEALS: Final = 1033
SHRINK: Final = 2
GROW: Final = 4


def forge(
    change: Callable[[bytearray], object] = lambda page: None, *, size: int = PAGE, seals: int = SHRINK | GROW
) -> int:
    """A copy of a timeline's page, changed; its descriptor is the caller's."""
    with contextlib.ExitStack() as scope:
        fd, address = timeline.create()
        scope.callback(os.close, fd)
        scope.callback(system.unmap, address, PAGE)
        page = bytearray(os.pread(fd, PAGE, 0))
    change(page)
    forged = os.memfd_create("gpuinterop.timeline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(forged, size)
    os.pwrite(forged, bytes(page)[:size], 0)
    if seals:
        fcntl.fcntl(forged, _ADD_SEALS, seals)
    return forged


def put(at: int, data: bytes) -> Callable[[bytearray], object]:
    """A change: `data` at `at`."""

    def change(page: bytearray) -> None:
        page[at : at + len(data)] = data

    return change


"""Each makes a descriptor that is none of our timelines; a driver takes none of them either."""
