"""The timeline semaphore of the host: one page in a memfd. Version 1; this page is its specification.

The object is a memfd of exactly one page (``sysconf(_SC_PAGESIZE)`` bytes), sealed with F_SEAL_SHRINK and F_SEAL_GROW
(and F_SEAL_SEAL), passed as a file descriptor. Integers are in the machine's byte order, everything not named is zero.

======  ====  ===================================================================================================
offset  size  content
======  ====  ===================================================================================================
0       8     magic: the ASCII bytes ``GIPTLSM1``; written last by the creator
8       4     u32 version: 1
12      4     u32 sequence: the futex word; one more (modulo 2**32) after every signal
16      8     u64 value: the counter; it only grows
24      4     u32, reserved for a count of waiters: written as 0, never read
28      36    zero
64      64    a ``pthread_mutex_t`` (40 bytes on x86-64, 48 on aarch64, glibc), the rest zero: the writers' lock,
              initialised by the creator with PTHREAD_PROCESS_SHARED and PTHREAD_MUTEX_ROBUST, default type
128           zero, to the end of the page
======  ====  ===================================================================================================

**Signal to v**: lock the mutex; if v is not greater than `value`, unlock and fail; store `value` = v (one aligned
8-byte store); then store `sequence` + 1; unlock; then ``futex(&sequence, FUTEX_WAKE, INT_MAX)``.

**Wait for v**: read `sequence`, then `value`; if `value` >= v, done; else ``futex(&sequence, FUTEX_WAIT, the sequence
read, a relative time-out)`` and begin again. Both futex calls are the shared kind (no FUTEX_PRIVATE_FLAG). Time-outs
are short (50 ms here), so that a missed wake, or a signaller that died before its wake, costs one of them and no more.
On machines that reorder loads (aarch64), lock and unlock the mutex once after the value was seen, before the data that
it guards is read; readers take the lock for nothing else.

**A writer that dies inside the lock** leaves nothing half done, because the only state is the one 8-byte store. Who
locks next gets EOWNERDEAD, calls ``pthread_mutex_consistent``, adds one to `sequence` (the dead writer may have stored
the value but not that), and goes on.

The creator may close its descriptor and die at any time: the object lives as long as any descriptor or mapping.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Final

from .. import system

NAME: Final = "gpuinterop.timeline"
"""The memfd's name, for people who look into /proc; importers do not rely on it."""
MAGIC: Final = b"GIPTLSM1"
VERSION: Final = 1
SEQUENCE: Final = 12
VALUE: Final = 16
MUTEX: Final = 64


def initialise(address: int, value: int = 0) -> None:
    """Make a timeline semaphore of a zeroed page."""
    system.init_mutex(address + MUTEX, robust=True)
    ctypes.c_uint64.from_address(address + VALUE).value = value
    ctypes.c_uint32.from_address(address + 8).value = VERSION
    ctypes.memmove(address, MAGIC, len(MAGIC))


def problem(page: bytes) -> str | None:
    """Why a page is no timeline semaphore of this version, or None."""
    assert system.LAYOUT is not None
    magic, version = struct.unpack_from("8sI", page)
    if magic != MAGIC:
        return f"it begins with {magic!r}, not with {MAGIC!r}"
    if version != VERSION:
        return f"its version is {version}, not {VERSION}"
    (kind,) = struct.unpack_from("i", page, MUTEX + system.LAYOUT.kind)
    if kind != system.KIND_SHARED_ROBUST:
        return f"its lock is of kind {kind:#x}: no process-shared, robust mutex"
    return None
