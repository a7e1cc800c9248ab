"""Our own timeline semaphore: one page in a memfd. Version 1; this page is its specification.

The host backend makes it, waits for it and signals it. GPUs whose streams write and wait for 64-bit words
(`StreamMemoryBackend`) use its `value` directly: the same object orders two processes, two GPUs of whatever vendor,
and the host.

The object is a memfd of exactly one page (``sysconf(_SC_PAGESIZE)`` bytes), sealed with F_SEAL_SHRINK and F_SEAL_GROW
(and F_SEAL_SEAL), passed as a file descriptor. Integers are in the machine's byte order, everything not named is zero.

======  ====  ===================================================================================================
offset  size  content
======  ====  ===================================================================================================
0       8     magic: the ASCII bytes ``GIPTLSM1``; written last by the creator
8       4     u32 version: 1
12      4     u32 sequence: the futex word; one more (modulo 2**32) after every signal of a CPU
16      8     u64 value: the counter; it only grows
24      4     u32 devices: 1 from when a device's streams may write `value`; never back to 0
28      36    zero
64      64    a ``pthread_mutex_t`` (40 bytes on x86-64, 48 on aarch64, glibc), the rest zero: the writers' lock,
              initialised by the creator with PTHREAD_PROCESS_SHARED and PTHREAD_MUTEX_ROBUST, default type
128           zero, to the end of the page
======  ====  ===================================================================================================

**Signal to v** (a CPU): lock the mutex; if v is not greater than `value`, or is 2**63 or more where `devices` is 1,
unlock and fail; store `value` = v (one aligned 8-byte store); then store `sequence` + 1; unlock; then
``futex(&sequence, FUTEX_WAKE, INT_MAX)``.

**Signal to v** (a device's stream): store `value` = v, one aligned 8-byte store behind a fence to system scope. It
takes no lock, wakes nobody, and does not look whether v is greater: who enqueues it answers for that. Whoever is to
do that stores `devices` = 1 before.

**Wait for v** (a CPU): read `sequence`, then `value`; if `value` >= v, done; else ``futex(&sequence, FUTEX_WAIT, the
sequence read, a relative time-out)`` and begin again. Both futex calls are the shared kind (no FUTEX_PRIVATE_FLAG).
Time-outs are short (50 ms here; 20 us to 1 ms, growing, where `devices` is 1), so that a missed wake, a signaller that
died before its wake, or a device's store, costs one of them and no more. On machines that reorder loads (aarch64),
lock and unlock the mutex once after the value was seen, before the data that it guards is read; readers take the lock
for nothing else.

**Wait for v** (a device's stream): until `value` >= v. Devices compare cyclically or signed: v is below 2**63.

**A writer that dies inside the lock** leaves nothing half done, because the only state is the one 8-byte store. Who
locks next gets EOWNERDEAD, calls ``pthread_mutex_consistent``, adds one to `sequence` (the dead writer may have stored
the value but not that), and goes on.

The creator may close its descriptor and die at any time: the object lives as long as any descriptor or mapping.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

from . import system
from .errors import DriverError, PeerError

if sys.platform != "win32":
    import fcntl

__all__ = ["MAGIC", "NAME", "VALUE", "Page", "create", "is_ours", "problem"]

NAME: Final = "gpuinterop.timeline"
"""The memfd's name, for people who look into /proc; importers do not rely on it."""
MAGIC: Final = b"GIPTLSM1"
VERSION: Final = 1
SEQUENCE: Final = 12
VALUE: Final = 16
DEVICES: Final = 24
MUTEX: Final = 64

MAX_DEVICE_VALUE: Final = 2**63 - 1
"""The largest value that a device's streams can wait for."""

LOCK_LIMIT: Final = 1.0
"""Seconds that a lock may be held by somebody else: its holders need microseconds."""

_FIXED: Final = system.SEAL_SHRINK | system.SEAL_GROW


def initialise(address: int, value: int = 0) -> None:
    """Make a timeline semaphore of a zeroed page."""
    system.init_mutex(address + MUTEX, robust=True)
    ctypes.c_uint64.from_address(address + VALUE).value = value
    ctypes.c_uint32.from_address(address + 8).value = VERSION
    ctypes.memmove(address, MAGIC, len(MAGIC))


def create() -> tuple[int, int]:
    """A new one: its descriptor, and the address it is mapped at. Both are the caller's."""
    fd = system.create_memfd(NAME, system.PAGE)
    try:
        address = system.map_shared(fd, system.PAGE)
        try:
            initialise(address)
        except BaseException:
            system.unmap(address, system.PAGE)
            raise
    except BaseException:
        os.close(fd)
        raise
    return fd, address


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


def is_ours(fd: int) -> bool:
    """Whether a descriptor is such a semaphore, and safe to map; never a driver's, which is no memfd."""
    if system.LAYOUT is None:
        return False
    try:
        if fcntl.fcntl(fd, system.F_GET_SEALS) & _FIXED != _FIXED or os.fstat(fd).st_size != system.PAGE:
            return False
        return problem(os.pread(fd, system.PAGE, 0)) is None
    except OSError:  # no memfd, or not readable
        return False


class Page:
    """A mapped timeline semaphore, as a CPU uses it. Whoever has mapped it keeps it mapped.

    Parameters
    ----------
    address : int
        Of the mapping.
    label : str
        For messages.
    """

    __slots__ = ("_devices", "_futex", "_mutex", "_sequence", "_value", "address", "label")

    def __init__(self, address: int, label: str) -> None:
        self.address = address
        self.label = label
        self._value = ctypes.c_uint64.from_address(address + VALUE)
        self._sequence = ctypes.c_uint32.from_address(address + SEQUENCE)
        self._devices = ctypes.c_uint32.from_address(address + DEVICES)
        self._futex = address + SEQUENCE
        self._mutex = system.SharedMutex(address + MUTEX)

    @property
    def value(self) -> int:
        return self._value.value

    def give_to_device(self) -> None:
        """From now on a device's streams may write the value."""
        self._devices.value = 1

    def signal(self, value: int) -> None:
        """Set the counter, and wake who waits for it.

        Raises
        ------
        DriverError
            `value` is not greater than the counter.
        PeerError
            Another process holds the lock, and does not let go.
        """

        def store() -> None:
            current = self._value.value
            if value <= current:
                raise DriverError(
                    "host timeline signal",
                    errno.EINVAL,
                    "VALUE_NOT_GREATER",
                    f"{self.label} stands at {current}; a signal must be greater, and {value} is not.",
                )
            if value > MAX_DEVICE_VALUE and self._devices.value:
                raise DriverError(
                    "host timeline signal",
                    errno.EINVAL,
                    "VALUE_TOO_LARGE",
                    f"{self.label} is also a device's, whose streams compare what is below 2**63, and {value} is not.",
                )
            self._value.value = value  # one aligned 8-byte store
            self._advance()

        self._mutex.run(store, self._lost, LOCK_LIMIT)
        self.wake()

    def wait(self, value: int, deadline: float | None, check: Callable[[], None]) -> bool:
        """Block the calling thread, GIL released, until the counter is `value` or more.

        Parameters
        ----------
        value : int
        deadline : float, optional
            Of ``time.monotonic()``.
        check : callable
            Called now and then; raises when whoever waits is to stop.

        Returns
        -------
        bool
            False when the deadline has passed.
        """
        spins = system.SPINS if deadline is None or deadline > time.monotonic() else 0  # a look only
        pauses = system.pauses()
        while True:
            sequence = self._sequence.value  # before the value: a signal in between ends the sleep at once
            if self._value.value >= value:
                self._acquire()
                return True
            if spins:
                spins -= 1
                os.sched_yield()
                continue
            check()
            piece = system.SLICE
            if self._devices.value:  # its stores wake nobody
                piece = next(pauses)
            if deadline is not None:
                piece = min(piece, deadline - time.monotonic())
                if piece <= 0:
                    return False
            system.futex_wait(self._futex, sequence, piece)

    def wake(self) -> None:
        """Let all who wait look again."""
        system.futex_wake_all(self._futex)

    def _advance(self) -> None:
        self._sequence.value = (self._sequence.value + 1) & 0xFFFFFFFF

    def _acquire(self) -> None:
        """Order what is read from now on behind the value that was just seen."""
        assert system.LAYOUT is not None
        if not system.LAYOUT.strongly_ordered:
            self._mutex.run(lambda: None, self._lost, LOCK_LIMIT)

    def _lost(self, code: int) -> None:
        if code == errno.EOWNERDEAD:
            self._advance()  # the dead writer may have stored the value and not this
            return
        owner = self._mutex.owner
        if code == errno.ETIMEDOUT:
            raise PeerError(
                f"{self.label}: thread {owner} has held its lock for more than {LOCK_LIMIT:g} s; was it stopped?"
            )
        raise PeerError(f"{self.label}: its lock cannot be taken ({errno.errorcode.get(code, code)}).")
