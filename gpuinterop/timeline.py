"""gpuinterop's timeline semaphore: one page in a memfd. Version 2; this docstring is its specification.

The host backend creates, waits for and signals it. GPUs whose streams write and wait for 64-bit words
(`StreamMemoryBackend`) use its `value` directly. So one object can order two processes, two GPUs of any vendor and the
host.

The object is a memfd of exactly one page (``sysconf(_SC_PAGESIZE)`` bytes), sealed with F_SEAL_SHRINK and F_SEAL_GROW
(and F_SEAL_SEAL). Processes pass its file descriptor. Integers have the machine's byte order; other bytes are zero.

======  ====  ===================================================================================================
offset  size  content
======  ====  ===================================================================================================
0       8     magic: the ASCII bytes ``GIPTLSM1``; the creator writes it last
8       4     u32 version: 2
12      4     u32 sequence: the futex word; every signal by a CPU adds 1 (modulo 2**32)
16      8     u64 value: the counter; it only grows
24      4     u32 devices: 1 once a device's streams may write `value`; never 0 again
28            zero to the end of the page
======  ====  ===================================================================================================

The page contains only numbers. A process that writes wrong numbers can make a wait return too early or never, but it
cannot reach anything outside the page. (Version 1 is refused: it contained a robust ``pthread_mutex_t``, through whose
list pointers a process could write anywhere in another process.)

**A CPU signals v**: it opens ``/proc/self/fd/N`` of the memfd, which creates a new open file description, and takes
``flock(LOCK_EX)`` on it. If v is not greater than `value`, or if `devices` is 1 and v is 2**63 or more, it unlocks and
fails. Otherwise it stores `value` = v (one aligned 8-byte store after a store barrier), stores `sequence` + 1, calls
``futex(&sequence, FUTEX_WAKE, INT_MAX)``, and unlocks before or after that call. The lock only keeps two signallers
from moving the value back; waiters do not lock. (A descriptor that was passed or inherited shares its open file
description with the other process, and a lock on it would not exclude that process. The signaller closes the new
description, or keeps it for later signals if no other thread and no forked child uses it.) If another signaller keeps
the lock for longer than a second, the signaller gives up.

**A device's stream signals v**: it stores `value` = v, one aligned 8-byte store after a fence to system scope. It does
not lock, wake waiters or check that v is greater. The process that enqueues the store must check that, and must have
stored `devices` = 1 before.

**A CPU waits for v**: it reads `sequence`, then `value`. If `value` >= v, it is done after a load barrier. Otherwise it
calls ``futex(&sequence, FUTEX_WAIT, the sequence read, a relative timeout)`` and begins again. Both futex calls are
shared (no FUTEX_PRIVATE_FLAG). Timeouts are short: 50 ms here, or 20 us growing to 1 ms if `devices` is 1. So a missed
wake, a signaller killed before its wake, or a device's store delays a waiter by one timeout at most.

**A device's stream waits for v**: until `value` >= v. Device comparisons wrap around or are signed, so v < 2**63.

**A signaller that is killed inside the lock** leaves no partial state, because the only state is one 8-byte store. The
kernel unlocks when it closes the last copy of the description: children forked at that moment have copies too. (If
Python forks, this module closes them in the child.)

The creator may close its descriptor and exit at any time. The object exists as long as any descriptor or mapping.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar, TypeVarTuple
from weakref import WeakSet

from . import system
from ._arguments import NoCopy
from .errors import DriverError, HandleError, PeerError

if sys.platform != "win32":
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

__all__ = ["MAGIC", "NAME", "VALUE", "Lock", "Page", "create", "is_ours", "problem"]

NAME: Final = "gpuinterop.timeline"
"""Name of the memfd in /proc, for people; importers ignore it."""
MAGIC: Final = b"GIPTLSM1"
VERSION: Final = 2
SEQUENCE: Final = 12
VALUE: Final = 16
DEVICES: Final = 24

MAX_DEVICE_VALUE: Final = 2**63 - 1
"""Largest value that a device's streams can wait for."""

LOCK_LIMIT: Final = 1.0
"""Seconds for which a signal waits for the signallers' lock. Holders need microseconds."""


class _Patience(threading.local):
    """How long the calling thread waits for a lock of another process."""

    seconds = LOCK_LIMIT


patience: Final = _Patience()


def initialise(address: int, value: int = 0) -> None:
    """Turn a zeroed page into a timeline semaphore."""
    ctypes.c_uint64.from_address(address + VALUE).value = value
    ctypes.c_uint32.from_address(address + 8).value = VERSION
    ctypes.memmove(address, MAGIC, len(MAGIC))


def create() -> tuple[int, int]:
    """Create a timeline; return its descriptor and its mapping's address. The caller owns both."""
    return system.create_page(NAME, initialise)


def problem(page: bytes) -> str | None:
    """Why a page is not a timeline semaphore of this version; None if it is one."""
    magic, version = struct.unpack_from("8sI", page)
    if magic != MAGIC:
        return f"it begins with {magic!r}, not with {MAGIC!r}"
    if version != VERSION:
        why = ", whose lock let a peer write into this process" if version == 1 else ""
        return f"its version is {version}{why}, not {VERSION}; use one version of gpuinterop on both sides"
    return None


def is_ours(fd: int) -> bool:
    """Whether a descriptor is such a semaphore and safe to map. False for a driver's, which is not a memfd.

    Raises
    ------
    HandleError
        It is such a semaphore of another version.
    """
    if system.SYS_FUTEX is None or not system.is_fixed(fd, system.PAGE):
        return False
    try:
        page = os.pread(fd, system.PAGE, 0)
    except OSError:  # not readable
        return False
    if not page.startswith(MAGIC):
        return False
    if reason := problem(page):
        raise HandleError(f"handle: expected a timeline semaphore that can be used, got one that cannot: {reason}.")
    return True


class Lock(NoCopy):
    """A lock that all processes with a memfd share. The kernel frees it when its holder is killed.

    Parameters
    ----------
    fd : int
        Descriptor of the memfd, borrowed.
    label : str
        Name in messages.
    """

    def __init__(self, fd: int, label: str) -> None:
        self.label = label
        self._fd = fd
        self._files: list[int] = []  # open file descriptions; each call takes one and returns it

    def run(self, call: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Call with the lock held.

        Raises
        ------
        DriverError
            ``/proc`` is not mounted, through which the descriptor is reopened.
        PeerError
            Another process holds the lock and does not release it.
        """
        forks = _forks
        held: list[int] = []
        try:
            try:
                try:
                    own = self._files.pop()
                except IndexError:  # the first call, or other threads use all
                    own = self._open()
                held.append(own)
                try:
                    flock(own, LOCK_EX | LOCK_NB)
                except BlockingIOError:
                    self._wait(own)
                return call(*arguments)
            finally:
                self._unlock(held, forks)
        except BaseException:
            self._unlock(held, forks)  # again, because an interrupt in the first must not keep other processes waiting
            raise

    def _unlock(self, held: list[int], forks: int) -> None:
        while held:
            flock(held[-1], LOCK_UN)  # first, because other processes wait for it
            self._files.append(held.pop())
            if forks != _forks:  # a child shares the description and would keep the lock after this process
                self._forget()

    def close(self) -> None:
        """Close the open files. Later calls fail, because another file may have the borrowed number by then."""
        self._fd = -1
        self._forget()

    def _forget(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # `os` may be gone by then
        for fd in getattr(self, "_files", ()):  # if a backend does not call `close`
            _close(fd)

    def _open(self) -> int:
        path = f"/proc/self/fd/{self._fd}"
        _opened.add(self)
        return system.call(f"open({path})", os.open, path, os.O_RDWR | os.O_CLOEXEC)

    def _wait(self, fd: int) -> None:
        if not system.until(partial(take_lock, fd), patience.seconds):
            raise PeerError(
                f"another process held the lock of {self.label} for longer than {patience.seconds:g} s: let that "
                "process go on, or end it."
            )


def take_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock a file, unless another open file description has its lock. Shared locks go together."""
    with contextlib.suppress(BlockingIOError):
        flock(fd, (LOCK_SH if shared else LOCK_EX) | LOCK_NB)
        return True
    return False


class Page(NoCopy):
    """A mapped timeline semaphore for the CPU. The caller keeps the mapping and the descriptor open.

    Parameters
    ----------
    fd : int
        Descriptor of the memfd, borrowed.
    address : int
        Address of the mapping.
    label : str
        Name in messages.
    """

    def __init__(self, fd: int, address: int, label: str) -> None:
        self.address = address
        self.counter = ctypes.c_uint64.from_address(address + VALUE)
        self._sequence = ctypes.c_uint32.from_address(address + SEQUENCE)
        self._devices = ctypes.c_uint32.from_address(address + DEVICES)
        self._futex = address + SEQUENCE
        self.lock = Lock(fd, label)
        self.wake = system.futex_waker(self._futex)  # makes all waiting threads check again

    def close(self) -> None:
        """Close the lock's open files. No thread uses the timeline by then."""
        self.lock.close()

    @property
    def value(self) -> int:
        return self.counter.value

    def reset(self) -> None:
        """Set the counter to 0. No other process or device may have the semaphore."""
        self.counter.value = 0

    def let_devices_write(self) -> None:
        """Allow a device's streams to write the value from now on."""
        self._devices.value = 1

    def signal(self, value: int) -> None:
        """Set the counter and wake the threads that wait for it.

        Raises
        ------
        DriverError
            `value` is not greater than the counter, or is 2**63 or more and a device uses the semaphore. Or ``/proc``
            is not mounted.
        PeerError
            Another process holds the signallers' lock and does not release it.
        """
        self.lock.run(self._store, value)

    def _store(self, value: int) -> None:
        if value <= self.counter.value:
            why = f"is at {self.counter.value}; expected a greater value, got {value}."
            raise self._refused("VALUE_NOT_GREATER", why)
        if value > MAX_DEVICE_VALUE and self._devices.value:
            why = f"is shared with a device, whose streams need values below 2**63, got {value}."
            raise self._refused("VALUE_TOO_LARGE", why)
        system.fence()  # earlier stores become visible before the value that announces them
        self.counter.value = value  # one aligned 8-byte store
        self._sequence.value = (self._sequence.value + 1) & 0xFFFFFFFF
        self.wake()  # before the unlock, because waiters do not need the lock

    @property
    def label(self) -> str:
        """Name in messages."""
        return self.lock.label

    @label.setter
    def label(self, label: str) -> None:
        self.lock.label = label

    def _refused(self, symbol: str, why: str) -> DriverError:
        return DriverError("host timeline signal", errno.EINVAL, symbol, f"{self.label} {why}")

    def wait(self, value: int, deadline: float | None, check: Callable[[], None] = lambda: None) -> bool:
        """Block the calling thread, without the GIL, until the counter is at least `value`.

        Parameters
        ----------
        value : int
        deadline : float, optional
            Time of ``time.monotonic()``.
        check : callable, optional
            Called now and then; it raises an error to stop the wait.

        Returns
        -------
        bool
            False if the deadline passed.
        """
        if self.counter.value >= value:
            system.fence()
            return True
        spins = time.monotonic() + system.SPIN_S
        pauses = system.pauses()
        while True:
            sequence = self._sequence.value  # before the value, so that a signal in between ends the sleep at once
            if self.counter.value >= value:
                system.fence()  # later loads happen after the value that announces the data
                return True
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            if self._devices.value:  # a device's store wakes no thread
                piece = next(pauses)
            elif now < spins:
                system.relax()
                continue
            else:
                piece = system.SLICE
            if piece:
                check()
                system.futex_wait(self._futex, sequence, piece if deadline is None else min(piece, deadline - now))


_opened: Final[WeakSet[Lock]] = WeakSet()
_forks = 0  # how often this process has forked


def _count() -> None:
    global _forks  # noqa: PLW0603 - a count of the process
    _forks += 1


def _forked() -> None:
    _count()
    for lock in _opened:  # a child shares the parent's descriptions, and so would share its locks
        lock._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_count, after_in_child=_forked)
