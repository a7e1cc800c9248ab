"""Our own timeline semaphore: one page in a memfd. Version 2; this page is its specification.

The host backend makes it, waits for it and signals it. GPUs whose streams write and wait for 64-bit words
(`StreamMemoryBackend`) use its `value` directly: the same object orders two processes, two GPUs of whatever vendor,
and the host.

The object is a memfd of exactly one page (``sysconf(_SC_PAGESIZE)`` bytes), sealed with F_SEAL_SHRINK and F_SEAL_GROW
(and F_SEAL_SEAL), passed as a file descriptor. Integers are in the machine's byte order, everything not named is zero.

======  ====  ===================================================================================================
offset  size  content
======  ====  ===================================================================================================
0       8     magic: the ASCII bytes ``GIPTLSM1``; written last by the creator
8       4     u32 version: 2
12      4     u32 sequence: the futex word; one more (modulo 2**32) after every signal of a CPU
16      8     u64 value: the counter; it only grows
24      4     u32 devices: 1 from when a device's streams may write `value`; never back to 0
28            zero, to the end of the page
======  ====  ===================================================================================================

The page holds numbers only. A peer that writes other numbers can make a wait return too early or never; it reaches
nothing outside the page. (Version 1 held a robust ``pthread_mutex_t``, whose list pointers libc follows: a peer that
wrote them wrote anywhere in this process. Version 1 is refused.)

**Signal to v** (a CPU): open ``/proc/self/fd/N`` of the memfd, which makes an open file description of the signaller's
own, and take ``flock(LOCK_EX)`` on it; if v is not greater than `value`, or is 2**63 or more where `devices` is 1,
unlock and fail; store `value` = v (one aligned 8-byte store behind a store barrier); then store `sequence` + 1; unlock
and close; then ``futex(&sequence, FUTEX_WAKE, INT_MAX)``. The lock serves signallers only, so that none moves the
value back beside another; a waiter takes no lock. (A descriptor that was passed or inherited shares its open file
description, and a lock on it excludes neither side: hence the new one.) A signaller gives up where another keeps the
lock for longer than a second.

**Signal to v** (a device's stream): store `value` = v, one aligned 8-byte store behind a fence to system scope. It
takes no lock, wakes nobody, and does not look whether v is greater: who enqueues it answers for that. Whoever is to
do that stores `devices` = 1 before.

**Wait for v** (a CPU): read `sequence`, then `value`; if `value` >= v, done, behind a load barrier; else
``futex(&sequence, FUTEX_WAIT, the sequence read, a relative time-out)`` and begin again. Both futex calls are the
shared kind (no FUTEX_PRIVATE_FLAG). Time-outs are short (50 ms here; 20 us to 1 ms, growing, where `devices` is 1), so
that a missed wake, a signaller that died before its wake, or a device's store, costs one of them and no more.

**Wait for v** (a device's stream): until `value` >= v. Devices compare cyclically or signed: v is below 2**63.

**A signaller that dies inside the lock** leaves nothing half done, because the only state is the one 8-byte store; the
kernel closes its description, and so unlocks, once no child that was forked in that moment has it either.

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
from .errors import DriverError, HandleError, PeerError

if sys.platform != "win32":
    import fcntl

__all__ = ["MAGIC", "NAME", "VALUE", "Page", "create", "is_ours", "problem"]

NAME: Final = "gpuinterop.timeline"
"""The memfd's name, for people who look into /proc; importers do not rely on it."""
MAGIC: Final = b"GIPTLSM1"
VERSION: Final = 2
SEQUENCE: Final = 12
VALUE: Final = 16
DEVICES: Final = 24

MAX_DEVICE_VALUE: Final = 2**63 - 1
"""The largest value that a device's streams can wait for."""

LOCK_LIMIT: Final = 1.0
"""Seconds that somebody else may hold the signallers' lock: its holders need microseconds."""

_FIXED: Final = system.SEAL_SHRINK | system.SEAL_GROW


def initialise(address: int, value: int = 0) -> None:
    """Make a timeline semaphore of a zeroed page."""
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
    magic, version = struct.unpack_from("8sI", page)
    if magic != MAGIC:
        return f"it begins with {magic!r}, not with {MAGIC!r}"
    if version != VERSION:
        why = ", whose lock let a peer write into this process" if version == 1 else ""
        return f"its version is {version}{why}, not {VERSION}; use one version of gpuinterop on both sides"
    return None


def is_ours(fd: int) -> bool:
    """Whether a descriptor is such a semaphore, and safe to map; never a driver's, which is no memfd.

    Raises
    ------
    HandleError
        It is one, of another version.
    """
    if system.SYS_FUTEX is None:
        return False
    seals = system.seals(fd)
    if seals is None or seals & _FIXED != _FIXED:
        return False
    try:
        if os.fstat(fd).st_size != system.PAGE:
            return False
        page = os.pread(fd, system.PAGE, 0)
    except OSError:  # not readable
        return False
    if not page.startswith(MAGIC):
        return False
    if found := problem(page):
        raise HandleError(f"handle: this timeline semaphore cannot be used: {found}.")
    return True


class Page:
    """A mapped timeline semaphore, as a CPU uses it. The caller keeps it mapped, and its descriptor open.

    Parameters
    ----------
    fd : int
        The memfd's; borrowed.
    address : int
        Of the mapping.
    label : str
        For messages.
    """

    __slots__ = ("_devices", "_fd", "_futex", "_sequence", "_value", "address", "label")

    def __init__(self, fd: int, address: int, label: str) -> None:
        self.address = address
        self.label = label
        self._fd = fd
        self._value = ctypes.c_uint64.from_address(address + VALUE)
        self._sequence = ctypes.c_uint32.from_address(address + SEQUENCE)
        self._devices = ctypes.c_uint32.from_address(address + DEVICES)
        self._futex = address + SEQUENCE

    @property
    def value(self) -> int:
        return self._value.value

    def reset(self) -> None:
        """Begin anew at 0; nobody else has it."""
        self._value.value = 0

    def give_to_device(self) -> None:
        """From now on a device's streams may write the value."""
        self._devices.value = 1

    def signal(self, value: int) -> None:
        """Set the counter, and wake who waits for it.

        Raises
        ------
        DriverError
            `value` is not greater than the counter, or ``/proc`` is not there to open the descriptor anew.
        PeerError
            Another process holds the signallers' lock, and does not let go.
        """
        path = f"/proc/self/fd/{self._fd}"
        own: list[int] = []  # an open file description of this call's own: other threads and forks have others
        try:
            try:
                # Stored by C: no interrupt comes between the call and the store.
                own.extend(map(os.open, (path,), (os.O_RDWR | os.O_CLOEXEC,)))
            except OSError as error:
                raise system.driver_error(f"open({path})", error.errno or 0) from error
            if not system.until(lambda: _lock(own[0]), LOCK_LIMIT):
                raise PeerError(
                    f"expected the signallers' lock of {self.label} within {LOCK_LIMIT:g} s, got none: another process "
                    "holds it. Let that process go on, or end it."
                )
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
            system.fence()  # what the value announces is there before it
            self._value.value = value  # one aligned 8-byte store
            self._sequence.value = (self._sequence.value + 1) & 0xFFFFFFFF
        finally:  # each call is C's: what an interrupt behind one raises leaves none out
            for fd in own:
                try:
                    fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the description too
                finally:
                    os.close(fd)
        self.wake()

    def wait(self, value: int, deadline: float | None, check: Callable[[], None]) -> bool:
        """Block the calling thread, GIL released, until the counter is `value` or more.

        Parameters
        ----------
        value : int
        deadline : float, optional
            Of ``time.monotonic()``.
        check : callable
            Called now and then; raises when the wait is to stop.

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
                system.fence()  # what the value announces is read after it
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


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
