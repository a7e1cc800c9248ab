"""libc: mappings, seals, futexes and process-shared pthread mutexes, and their errors; how waits look and pause.

What the host backend and our own timeline semaphores stand on. Every call here releases the GIL (``ctypes.CDLL``).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from .errors import DriverError, OutOfMemoryError

if sys.platform != "win32":
    import fcntl

T = TypeVar("T")

PAGE: Final = mmap.PAGESIZE
SLICE: Final = 0.05
"""The longest single blocking call, in seconds: how long a cancellation or a Ctrl-C may take to be noticed."""

SPINS: Final = 30 if (os.cpu_count() or 1) > 1 else 0
"""How often a wait that nobody wakes looks before it pauses, letting others run in between."""

# <linux/fcntl.h>; Python has no names for the seals before 3.12 and for some not at all.
F_ADD_SEALS: Final = 1033
F_GET_SEALS: Final = 1034
SEAL_SEAL: Final = 0x1
SEAL_SHRINK: Final = 0x2
SEAL_GROW: Final = 0x4
SEAL_WRITE: Final = 0x8 | 0x10  # F_SEAL_WRITE, F_SEAL_FUTURE_WRITE

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: other processes take part
_CLOCK_MONOTONIC = 1
_PROCESS_SHARED = 1
_ROBUST = 1
_ALL = 0x7FFFFFFF


def pauses() -> Iterator[float]:
    """Seconds to sleep between looks, for waits that nobody wakes: 20 us at first, growing to 1 ms."""
    pause = 20e-6
    while True:
        yield pause
        pause = min(pause * 1.5, 1e-3)


def until(condition: Callable[[], bool], timeout: float | None) -> bool:
    """Look until it is so, with `pauses` between looks; False when `timeout` seconds have passed, None for ever."""
    deadline = None if timeout is None else time.monotonic() + timeout
    gaps = pauses()
    while not condition():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(next(gaps))
    return True


def mapped_files() -> Iterator[tuple[range, str]]:
    """The addresses at which this process has files mapped, and which; nothing where the system does not say."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/"):
                    start, _, end = fields[0].partition("-")
                    yield range(int(start, 16), int(end, 16)), fields[5]
    except OSError:
        return


def loaded_library(*names: str) -> str | None:
    """The file of the first library that is loaded and whose name begins so."""
    return next((path for _, path in mapped_files() if path.rpartition("/")[2].startswith(names)), None)


class Timespec(ctypes.Structure):
    """``struct timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@dataclass(frozen=True, slots=True)
class PthreadLayout:
    """Where glibc keeps things in its process-shared objects, for the machines where that was looked up."""

    mutex_size: int
    cond_size: int
    sys_futex: int
    strongly_ordered: bool
    lock: int = 0  # u32: 0 free, else held (low 30 bits: the owner's thread id in a robust mutex)
    owner: int = 8  # i32: the owner's thread id
    kind: int = 16  # i32


KIND_SHARED: Final = 0x80
"""glibc's ``__kind`` of a plain PTHREAD_PROCESS_SHARED mutex."""
KIND_SHARED_ROBUST: Final = 0x90
"""The same with PTHREAD_MUTEX_ROBUST."""


def _layout() -> PthreadLayout | None:
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8 or libc_version()[0] != "glibc":
        return None
    return {
        "x86_64": PthreadLayout(mutex_size=40, cond_size=48, sys_futex=202, strongly_ordered=True),
        "aarch64": PthreadLayout(mutex_size=48, cond_size=48, sys_futex=98, strongly_ordered=False),
    }.get(platform.machine())


def libc_version() -> tuple[str, str]:
    """("glibc", "2.36"), or ("unknown libc", "") where it does not say."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        text = ""
    name, _, version = text.partition(" ")
    return (name, version) if name else ("unknown libc", "")


_STRONGLY_ORDERED: Final = platform.machine() in ("x86_64", "AMD64")
_fence_lock = threading.Lock()

LAYOUT: Final = _layout()
"""None where glibc's layout is not known (another machine, another libc): no semaphores there."""

if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
    _pointer, _int, _size, _long = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_long
    _timespec = ctypes.POINTER(Timespec)

    _mmap = _libc.mmap
    _mmap.argtypes, _mmap.restype = (_pointer, _size, _int, _int, _int, _long), _pointer
    _munmap = _libc.munmap
    _munmap.argtypes = (_pointer, _size)
    _syscall = _libc.syscall
    _syscall.argtypes, _syscall.restype = (_long, _pointer, _int, ctypes.c_uint32, _timespec, _pointer, _int), _long

    _mutex_trylock = _libc.pthread_mutex_trylock
    _mutex_trylock.argtypes = (_pointer,)
    _mutex_unlock = _libc.pthread_mutex_unlock
    _mutex_unlock.argtypes = (_pointer,)
    _mutex_consistent = _libc.pthread_mutex_consistent
    _mutex_consistent.argtypes = (_pointer,)
    _cond_broadcast = _libc.pthread_cond_broadcast
    _cond_broadcast.argtypes = (_pointer,)
    # clocklock (glibc 2.30) is immune to changes of the wall clock
    _mutex_clocklock = getattr(_libc, "pthread_mutex_clocklock", None)
    if _mutex_clocklock is not None:
        _mutex_clocklock.argtypes = (_pointer, _int, _timespec)
    _mutex_timedlock = _libc.pthread_mutex_timedlock
    _mutex_timedlock.argtypes = (_pointer, _timespec)


def driver_error(call: str, code: int, meaning: str = "") -> DriverError:
    """The error of a system call that failed with `code`."""
    kind = OutOfMemoryError if code == errno.ENOMEM else DriverError
    return kind(call, code, errno.errorcode.get(code, "UNKNOWN"), meaning or os.strerror(code))


# -- memfds and mappings -----------------------------------------------------------------------------------------


def create_memfd(name: str, size: int) -> int:
    """A zeroed memfd of `size` bytes that can neither shrink nor grow."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise driver_error("memfd_create", error.errno or 0) from error
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW | SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise driver_error("ftruncate", error.errno or 0) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def duplicate(fd: int) -> int:
    """A close-on-exec duplicate."""
    try:
        return os.dup(fd)
    except OSError as error:
        raise driver_error("dup", error.errno or 0) from error


def map_shared(fd: int, size: int) -> int:
    """Map the first `size` bytes, readable and writable; returns the address."""
    # Not Python's mmap: that one keeps a duplicate of the fd, and its address only through an exported buffer.
    address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise driver_error("mmap", ctypes.get_errno())
    return int(address)


def unmap(address: int, size: int) -> None:
    """End `map_shared`."""
    if _munmap(address, size) != 0:
        raise driver_error("munmap", ctypes.get_errno())


def fence() -> None:
    """Order this thread's stores before with those after it, for other CPUs and for devices."""
    if not _STRONGLY_ORDERED:
        for _ in range(2):  # released by the first, acquired by the second
            with _fence_lock:
                pass


# -- futex -------------------------------------------------------------------------------------------------------


def futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleep while the u32 at `address` is `expected`, for at most `seconds`. May return early: look again."""
    assert LAYOUT is not None
    whole = int(seconds)
    limit = Timespec(whole, int((seconds - whole) * 1e9))
    _syscall(LAYOUT.sys_futex, address, _FUTEX_WAIT, expected, ctypes.byref(limit), None, 0)


def futex_wake_all(address: int) -> None:
    """Wake whoever sleeps in `futex_wait` there."""
    assert LAYOUT is not None
    _syscall(LAYOUT.sys_futex, address, _FUTEX_WAKE, _ALL, None, None, 0)


# -- pthread objects in shared memory ----------------------------------------------------------------------------


def init_mutex(address: int, *, robust: bool) -> None:
    """``pthread_mutex_init`` with PTHREAD_PROCESS_SHARED, and PTHREAD_MUTEX_ROBUST if wanted."""
    attributes = ctypes.create_string_buffer(64)  # 4 bytes in glibc
    _succeed("pthread_mutexattr_init", _libc.pthread_mutexattr_init(attributes))
    _succeed("pthread_mutexattr_setpshared", _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
    if robust:
        _succeed("pthread_mutexattr_setrobust", _libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
    _succeed("pthread_mutex_init", _libc.pthread_mutex_init(ctypes.c_void_p(address), attributes))
    _libc.pthread_mutexattr_destroy(attributes)


def init_cond(address: int) -> None:
    """``pthread_cond_init`` with PTHREAD_PROCESS_SHARED."""
    attributes = ctypes.create_string_buffer(64)
    _succeed("pthread_condattr_init", _libc.pthread_condattr_init(attributes))
    _succeed("pthread_condattr_setpshared", _libc.pthread_condattr_setpshared(attributes, _PROCESS_SHARED))
    _succeed("pthread_cond_init", _libc.pthread_cond_init(ctypes.c_void_p(address), attributes))
    _libc.pthread_condattr_destroy(attributes)


def broadcast(cond: int) -> None:
    """``pthread_cond_broadcast``."""
    _succeed("pthread_cond_broadcast", _cond_broadcast(cond))


def _succeed(call: str, code: int) -> None:
    if code != 0:
        raise driver_error(call, code)


class SharedMutex:
    """A process-shared mutex that somebody has initialised; only ever locked with a time limit."""

    def __init__(self, address: int) -> None:
        assert LAYOUT is not None
        self._address = address
        self._lock = ctypes.c_uint32.from_address(address + LAYOUT.lock)
        self._owner = ctypes.c_int32.from_address(address + LAYOUT.owner)

    @property
    def held(self) -> bool:
        """Whether anybody holds it just now; a glance, not a lock."""
        return self._lock.value != 0

    @property
    def owner(self) -> int:
        """The thread id of the holder, as its own process sees it; 0 when nobody holds it."""
        return self._owner.value

    def run(self, action: Callable[[], T], lost: Callable[[int], None], limit: float) -> T:
        """Call `action` while holding the lock.

        Parameters
        ----------
        action : callable
            Short: other processes wait.
        lost : callable
            Given the code when locking did not just succeed: ETIMEDOUT after `limit` seconds, EOWNERDEAD when the
            holder died (the lock is then ours, and made consistent already), or what else the call returned. Raises,
            except after EOWNERDEAD.
        limit : float
            In seconds.
        """
        code: int | None = None
        try:
            code = self._acquire(limit)
            if code == errno.EOWNERDEAD:
                _mutex_consistent(self._address)
            if code != 0:
                lost(code)
            return action()
        finally:
            # A KeyboardInterrupt may strike between the lock and the assignment of its result; then the owner tells.
            if code in (0, errno.EOWNERDEAD) or (code is None and self.owner == threading.get_native_id()):
                _mutex_unlock(self._address)

    def _acquire(self, limit: float) -> int:
        code: int = _mutex_trylock(self._address)
        if code != errno.EBUSY:
            return code
        deadline = time.monotonic() + limit
        while True:  # in slices: a blocked lock call serves no Ctrl-C
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return errno.ETIMEDOUT
            code = self._acquire_slice(min(remaining, SLICE))
            if code != errno.ETIMEDOUT:
                return code

    def _acquire_slice(self, seconds: float) -> int:
        nanoseconds = int(seconds * 1e9)
        nanoseconds += time.monotonic_ns() if _mutex_clocklock is not None else time.time_ns()
        until = ctypes.byref(Timespec(*divmod(nanoseconds, 1_000_000_000)))
        if _mutex_clocklock is not None:
            return int(_mutex_clocklock(self._address, _CLOCK_MONOTONIC, until))
        return int(_mutex_timedlock(self._address, until))
