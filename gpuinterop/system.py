"""The operating system: waits with limits, locks, threads, descriptors, memfds, mappings and futexes, and its errors.

Calls of libc release the GIL (``ctypes.CDLL``).
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import errno
import mmap
import os
import platform
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from time import perf_counter
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar, TypeVarTuple, cast

from .errors import DriverError, OutOfMemoryError, ResourceClosedError, report

if sys.platform != "win32":
    import fcntl

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PAGE: Final = mmap.PAGESIZE
SLICE: Final = 0.05  # limit of one blocking call in seconds; a wait notices a cancellation or a Ctrl-C within it
EXIT_S: Final = 2.0  # seconds that all waits together may take while the interpreter exits
_EXIT_DRAIN_S: Final = 1.0  # seconds of `EXIT_S` for the core's drain, which runs last
_exit_began: list[float] = []

SPIN_S: Final = 60e-6 if (os.cpu_count() or 1) > 1 else 0.0
"""Seconds for which a wait spins. With one CPU spinning is useless, because the other side cannot run meanwhile."""
_YIELD_S: Final = 1e-3
"""Seconds for which a polling wait then yields the CPU between checks. Most frames of a GPU end within them."""

# <linux/fcntl.h>; Python names the seals only from 3.12 on, and not all of them.
F_ADD_SEALS: Final = 1033
F_GET_SEALS: Final = 1034
SEAL_SEAL: Final = 0x1
SEAL_SHRINK: Final = 0x2
SEAL_GROW: Final = 0x4
SEAL_WRITE: Final = 0x8 | 0x10  # F_SEAL_WRITE, F_SEAL_FUTURE_WRITE
FIXED: Final = SEAL_SHRINK | SEAL_GROW

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG, because other processes use the word too
_ALL = 0x7FFFFFFF
_CLOSE_LIMIT = 1.0


# -- waits and their limits ----------------------------------------------------------------------------------------


relax: Final[Callable[[], object]] = getattr(os, "sched_yield", partial(time.sleep, 0))
"""Let other threads and processes run, without the GIL. On Linux ``time.sleep(0)`` would sleep for some 70 us."""


def pauses() -> Iterator[float]:
    """Seconds to sleep between the checks of a polling wait.

    A sleep takes some 70 us longer than asked. So this yields 0 for `SPIN_S`, then 0 for about a millisecond while it
    lets others run before each check, then 20 us growing to 1 ms. A check that keeps the GIL delays other threads by
    `SPIN_S`, which is short compared to the 5 ms after which they request the GIL.
    """
    now = perf_counter()  # not `time`'s: tests replace that one
    spins, yields = now + SPIN_S, now + SPIN_S + _YIELD_S
    while (now := perf_counter()) < yields:
        if now >= spins:
            relax()
        yield 0.0
    pause = 20e-6
    while True:
        yield pause
        pause = min(pause * 1.5, 1e-3)


def until(condition: Callable[[], bool], timeout: float | None) -> bool:
    """Poll with `pauses` until `condition` is true; False after `timeout` seconds, None sets no limit."""
    deadline = None if timeout is None else time.monotonic() + timeout
    gaps = pauses()
    while not condition():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        if pause := next(gaps):
            time.sleep(pause)
    return True


def seconds_left(limit: float | None) -> Callable[[], float | None]:
    """Return a function that returns how many of `limit` seconds are left; None if there is no limit."""
    deadline = None if limit is None else time.monotonic() + limit
    return lambda: None if deadline is None else max(0.0, deadline - time.monotonic())


def left_of_exit(*, last: bool = False) -> float:
    """Seconds that the exit of the interpreter may still take. Only the core's drain, `last`, may use its share."""
    if not _exit_began:
        _exit_began.append(time.monotonic())
    return max(0.0, _exit_began[0] + EXIT_S - (0.0 if last else _EXIT_DRAIN_S) - time.monotonic())


# -- locks ---------------------------------------------------------------------------------------------------------


def under(lock: threading.RLock, call: Callable[[*Ts], T], *arguments: *Ts, limit: float = -1) -> T:
    """Call with a lock held, or after `limit` seconds without it (check with `holds`); a negative number: no limit.

    On CPython 3.14 an interrupt can leave a lock locked that ``with`` acquires (cpython #148874), so the core and the
    bridge use this. The monitor does it without this frame (`_core.lifetime.locked`).
    """
    try:
        lock.acquire(True, limit)
        return call(*arguments)
    finally:
        try:  # noqa: SIM105 - a call in between could be interrupted
            lock.release()
        except RuntimeError:  # interrupted before it had the lock, or the limit has passed
            pass


def locked(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Run a method with the object's ``_lock`` held, like `under`."""

    @wraps(method)
    def entered(self: Any, *arguments: P.args, **named: P.kwargs) -> T:
        lock: threading.RLock = self._lock
        try:
            lock.acquire()
            return method(self, *arguments, **named)
        finally:
            try:  # noqa: SIM105 - see `under`
                lock.release()
            except RuntimeError:
                pass

    return cast("Callable[Concatenate[Any, P], T]", entered)


def holds(lock: threading.RLock) -> bool:
    """Whether the calling thread holds a lock."""
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]


# -- threads -------------------------------------------------------------------------------------------------------


_NO_THREAD: Final = (
    "expected a new thread, got none: the process is at its limit of threads or of memory; close streams and bridges, "
    "or raise the limit (ulimit -u, ulimit -v)"
)
_threads: dict[Thread, Callable[[], object]] = {}
_ending = False


class Thread:
    """A thread of gpuinterop, created by `start_thread`."""

    def __init__(self) -> None:
        self._begun = _thread.allocate_lock()  # held until the thread has begun; `_running` until it has ended
        self._running = _thread.allocate_lock()
        self._begun.acquire()
        self._running.acquire()
        self.ident = 0

    def join(self, limit: float) -> bool:
        """Wait up to `limit` seconds for the thread's end; return whether it has ended."""
        ended = self.ident != _thread.get_ident() and self._running.acquire(timeout=limit)
        if ended:
            self._running.release()
        return ended

    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._running.locked()

    def _run(self, work: Callable[[], object], stop: Callable[[], object] | None) -> None:
        if stop is not None:
            _threads[self] = stop
        self.ident = _thread.get_ident()
        self._begun.release()
        try:
            if stop is not None and _ending:  # end_threads may have run before this thread was registered
                stop()
            work()
        finally:
            _threads.pop(self, None)
            self._running.release()


def start_thread(work: Callable[[], object], stop: Callable[[], object] | None = None) -> Thread:
    """Start a thread, and wait until it has begun. ``threading.Thread`` would wait forever if memory runs out.

    `stop` asks the thread to end, without waiting for it; the exit waits only for threads with a `stop`. Raises
    `DriverError` if memory or the limit of threads is used up, and `ResourceClosedError` if the interpreter is exiting.
    """
    check_exit()
    return _start(work, stop)


def _start(work: Callable[[], object], stop: Callable[[], object] | None) -> Thread:
    try:
        thread = Thread()
        run = partial(thread._run, work, stop)
        alive = weakref.ref(run)
        _thread.start_new_thread(run, ())
        del run  # now only the thread holds it
        dropped = False
        while not thread._begun.acquire(timeout=SLICE):
            if dropped:  # already before this wait, so the thread never began: it found no memory
                raise MemoryError
            dropped = alive() is None
    except (RuntimeError, MemoryError) as error:
        code = errno.ENOMEM if isinstance(error, MemoryError) else errno.EAGAIN
        raise driver_error("pthread_create", code, _NO_THREAD) from error
    return thread


def check_exit() -> None:
    """Raise if the interpreter is exiting. The exit ends all waits."""
    if _ending:
        raise ResourceClosedError("the interpreter is exiting.")


def end_threads() -> None:
    """End all threads at the exit of the interpreter. The core's drain calls this first.

    A daemon thread that returns from libc while the interpreter is finalized may crash it.
    """
    global _ending  # noqa: PLW0603 - the interpreter exits once
    if _ending:
        return
    _ending = True
    threads = _threads.copy()
    for stop in threads.values():
        try:
            stop()
        except Exception as error:  # still stop the others
            report(error)
    for thread in threads:
        thread.join(left_of_exit())


atexit.register(end_threads)  # for programs without the core
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.clear)


# -- libc, and the errors of its calls -----------------------------------------------------------------------------


class Timespec(ctypes.Structure):
    """``struct timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_STRONGLY_ORDERED: Final = platform.machine() in ("x86_64", "AMD64")

SYS_FUTEX: Final = (
    {"x86_64": 202, "aarch64": 98}.get(platform.machine())
    if sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8 and os.path.isdir("/proc/self/fd")
    else None
)
"""Number of the system call. None on other machines and without /proc, where timeline semaphores do not work."""

if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
    _pointer, _int, _size, _long = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_long
    _timespec = ctypes.POINTER(Timespec)

    _FAILED: Final = ctypes.c_void_p(-1).value
    _mmap = _libc.mmap
    _mmap.argtypes, _mmap.restype = (_pointer, _size, _int, _int, _int, _long), _pointer
    munmap = _libc.munmap
    munmap.argtypes = (_pointer, _size)
    _syscall = _libc.syscall
    _syscall.argtypes, _syscall.restype = (_long, _pointer, _int, ctypes.c_uint32, _timespec, _pointer, _int), _long


def driver_error(call: str, code: int, meaning: str = "") -> DriverError:
    """Return the error of a system call that failed with `code`."""
    kind = OutOfMemoryError if code == errno.ENOMEM else DriverError
    return kind(call, code, errno.errorcode.get(code, "UNKNOWN"), meaning or os.strerror(code))


def call(name: str, function: Callable[[*Ts], T], *arguments: *Ts, advice: str = "") -> T:
    """Make a system call; if it fails, raise a `DriverError` with that name, and the advice unless descriptors lack."""
    try:
        return function(*arguments)
    except OSError as error:
        code = error.errno or 0
        advises = advice and code not in (errno.EMFILE, errno.ENFILE)
        raise driver_error(name, code, f"{os.strerror(code)}; {advice}" if advises else "") from error


def opened(name: str, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Make a system call. Only a lack of descriptors raises `DriverError`; the caller explains other failures."""
    try:
        return function(*arguments)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise driver_error(name, error.errno) from error
        raise


# -- descriptors ---------------------------------------------------------------------------------------------------


def close(*fds: int) -> None:
    """Close descriptors from other processes. If another process may serve the file, a thread closes it.

    The caller waits `_CLOSE_LIMIT` seconds for the thread. After that the descriptor stays open until the thread is
    done, and the process cannot end before. Raises `OSError` if a descriptor is not open.
    """
    closing = []
    for fd in fds:
        if _closes_at_once(fd):
            os.close(fd)
        elif (thread := _close_aside(fd)) is not None:
            closing.append(thread)
    deadline = time.monotonic() + _CLOSE_LIMIT
    for thread in closing:
        thread.join(max(0.0, deadline - time.monotonic()))


def _closes_at_once(fd: int) -> bool:
    try:
        os.get_inheritable(fd)  # F_GETFD
    except OSError:
        return True  # not open: os.close raises
    # The link of an eventfd, a pipe or a socket does not begin with a slash, as a file's does.
    return seals(fd) is not None or link(fd)[:1] not in ("", "/")


def link(fd: int) -> str:
    """The link of a descriptor in /proc, which shows its kind; "" if the system has none."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _close_aside(fd: int) -> Thread | None:
    def work() -> None:
        with contextlib.suppress(OSError):
            os.close(fd)

    try:
        return _start(work, None)  # also during the exit, which a file's server must not delay
    except DriverError:  # no thread can start
        work()
        return None


def poll(fd: int, event: int, timeout_ms: float | None) -> int:
    """The events of a descriptor, 0 after the time-out. Unlike ``select()`` it accepts large descriptors."""
    poller = select.poll()
    poller.register(fd, event)
    return sum(events for _, events in poller.poll(timeout_ms))


# -- memfds and mappings -------------------------------------------------------------------------------------------


def create_memfd(name: str, size: int) -> int:
    """Create a zeroed memfd of `size` bytes that can neither shrink nor grow."""
    fd = call("memfd_create", os.memfd_create, name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        call("ftruncate", os.ftruncate, fd, size)
        call("fcntl(F_ADD_SEALS)", fcntl.fcntl, fd, F_ADD_SEALS, FIXED | SEAL_SEAL)
    except DriverError:
        os.close(fd)
        raise
    return fd


def create_page(name: str, initialise: Callable[[int], object]) -> tuple[int, int]:
    """Create a memfd of one page and `initialise` it; return its descriptor and address, both owned by the caller."""
    fd = create_memfd(name, PAGE)
    try:
        address = map_shared(fd, PAGE)
        try:
            initialise(address)
        except BaseException:
            unmap(address, PAGE)
            raise
    except BaseException:
        os.close(fd)
        raise
    return fd, address


def seals(fd: int) -> int | None:
    """A memfd's seals; None for other files. Call it first on a descriptor from another process.

    If a process serves the file (FUSE), fstat, pread, fstatfs, lseek, poll, ioctl and close may wait for it forever,
    even after a signal. This call never waits, nor do fstat and pread of a memfd, nor the descriptor's link in
    /proc/self/fd and its page in /proc/self/fdinfo.
    """
    if sys.platform != "linux":
        return None
    try:
        return fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        return None


def is_fixed(fd: int, size: int) -> bool:
    """Whether a descriptor from another process is a memfd of `size` bytes that can neither shrink nor grow."""
    return (seals(fd) or 0) & FIXED == FIXED and os.fstat(fd).st_size == size


def map_shared(fd: int, size: int) -> int:
    """Map the first `size` bytes, readable and writable; return the address."""
    # Not Python's mmap, which duplicates the fd and reveals its address only through an exported buffer.
    address: int | None = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _FAILED:
        raise driver_error("mmap", ctypes.get_errno())
    return address


def unmap(address: int, size: int) -> None:
    """Undo `map_shared`."""
    if munmap(address, size) != 0:
        raise driver_error("munmap", ctypes.get_errno())


class Mapped(NamedTuple):
    """Memory that this process has mapped, with its file's path and inode if it has one."""

    addresses: range
    access: str  # letters such as rw-s: readable, writable, executable; shared or private
    offset: int
    file: tuple[int, int]  # device and inode
    path: str


def mappings(of: str = "", within: range = range(1 << 64)) -> Iterator[Mapped]:
    """Mappings of this process by address that contain `of` in their line and overlap `within`; none without /proc."""
    read = partial(open, "/proc/self/maps", encoding="utf-8", errors="replace")
    with contextlib.suppress(OSError), opened("open(/proc/self/maps)", read) as lines:
        for line in lines:
            if of not in line:
                continue
            place, _, facts = line.rstrip("\n").partition(" ")
            addresses = range(*(int(edge, 16) for edge in place.split("-")))
            if addresses.stop <= within.start or within.stop <= addresses.start:
                continue
            access, offset, device, inode, *path = facts.split(maxsplit=4)
            major, minor = device.split(":")
            file = os.makedev(int(major, 16), int(minor, 16)), int(inode)
            yield Mapped(addresses, access, int(offset, 16), file, "".join(path))


def loaded_library(*names: str) -> str | None:
    """The file of the first loaded library whose name begins with one of `names`."""
    return next((mapping.path for mapping in mappings() if mapping.path.rpartition("/")[2].startswith(names)), None)


# -- memory order and futexes --------------------------------------------------------------------------------------


def fence() -> None:
    """Order this thread's earlier stores before its later ones, for other CPUs and for devices."""
    if not _STRONGLY_ORDERED:
        full_fence()


def full_fence() -> None:
    """Order this thread's earlier stores also before its later loads, like a locked instruction."""
    lock = threading.Lock()
    for _ in range(2):  # the first round releases it, the second acquires it
        lock.acquire()
        lock.release()


def futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleep while the u32 at `address` is `expected`, for at most `seconds`. May return early, so check again."""
    assert SYS_FUTEX is not None
    full = int(seconds)
    limit = Timespec(full, int((seconds - full) * 1e9))
    _syscall(SYS_FUTEX, address, _FUTEX_WAIT, expected, ctypes.byref(limit), None, 0)


def futex_waker(address: int) -> Callable[[], object]:
    """Return a call that wakes all threads in `futex_wait` on `address`: one C call, which no interrupt can split."""
    assert SYS_FUTEX is not None
    return partial(_syscall, SYS_FUTEX, address, _FUTEX_WAKE, _ALL, None, None, 0)
