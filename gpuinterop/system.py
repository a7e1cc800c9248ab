"""libc: mappings, seals and futexes with their errors, and the polling of waits.

The host backend and our own timeline semaphores use it. Every call here releases the GIL (``ctypes.CDLL``).
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
import shlex
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from time import perf_counter
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar, TypeVarTuple, cast

from .errors import DriverError, OutOfMemoryError, ResourceClosedError, report

if sys.platform != "win32":
    import fcntl

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PAGE: Final = mmap.PAGESIZE
SLICE: Final = 0.05
"""Limit of a single blocking call in seconds: a cancellation or a Ctrl-C is noticed within it."""

EXIT_S: Final = 2.0
"""Seconds that the exit of the interpreter may take for all waits together."""
_EXIT_DRAIN_S: Final = 1.0
"""Seconds of `EXIT_S` that are reserved for the core's drain, which comes last."""
_exit_began: list[float] = []

SPIN_S: Final = 60e-6 if (os.cpu_count() or 1) > 1 else 0.0
"""Seconds for which a wait looks again and again; with one CPU, what it waits for cannot happen meanwhile."""
_YIELD_S: Final = 1e-3
"""Seconds for which a polling wait then lets others run between its looks: most frames of a GPU end within them."""

# <linux/fcntl.h>; Python names the seals only from 3.12 on, and some not at all.
F_ADD_SEALS: Final = 1033
F_GET_SEALS: Final = 1034
SEAL_SEAL: Final = 0x1
SEAL_SHRINK: Final = 0x2
SEAL_GROW: Final = 0x4
SEAL_WRITE: Final = 0x8 | 0x10  # F_SEAL_WRITE, F_SEAL_FUTURE_WRITE
FIXED: Final = SEAL_SHRINK | SEAL_GROW

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: other processes take part
_ALL = 0x7FFFFFFF
_CLOSE_LIMIT = 1.0


relax: Final[Callable[[], object]] = getattr(os, "sched_yield", partial(time.sleep, 0))
"""Let other threads and processes run, GIL released; on Linux ``time.sleep(0)`` would sleep for some 70 us."""


def pauses() -> Iterator[float]:
    """Seconds to sleep between the looks of a polling wait.

    Each sleep takes some 70 us more. So this yields 0 at first: for `SPIN_S`, then for about a millisecond, in which it
    lets others run before each look. Then it yields 20 us, growing to 1 ms. A look that does not release the GIL keeps
    other threads waiting for `SPIN_S`, which is short beside the 5 ms after which they ask for the GIL.
    """
    now = perf_counter()  # not `time`'s: tests have one of their own, which only a sleep moves
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
    """Poll until `condition` is true, with `pauses`; False if `timeout` seconds passed, None sets no limit."""
    deadline = None if timeout is None else time.monotonic() + timeout
    gaps = pauses()
    while not condition():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        if pause := next(gaps):
            time.sleep(pause)
    return True


def seconds_left(limit: float | None) -> Callable[[], float | None]:
    """Tell at each call how many of `limit` seconds are left; None if there is no limit."""
    deadline = None if limit is None else time.monotonic() + limit
    return lambda: None if deadline is None else max(0.0, deadline - time.monotonic())


def left_of_exit(*, last: bool = False) -> float:
    """Seconds that the exit of the interpreter may still take. `last` is the core's drain, whose share others leave."""
    if not _exit_began:
        _exit_began.append(time.monotonic())
    return max(0.0, _exit_began[0] + EXIT_S - (0.0 if last else _EXIT_DRAIN_S) - time.monotonic())


class Mapped(NamedTuple):
    """Memory that this process has mapped: of a file, with its path and its inode, or of none."""

    addresses: range
    access: str
    """Letters such as ``rw-s``: may be read, written, executed; is shared or private."""
    offset: int
    file: tuple[int, int]
    """Its device and its inode."""
    path: str


def mappings(of: str = "", within: range = range(1 << 64)) -> Iterator[Mapped]:
    """What this process has mapped, by address: what has these letters, and bytes within; nothing if it is not told."""
    read = partial(open, "/proc/self/maps", encoding="utf-8", errors="replace")
    with contextlib.suppress(OSError), opened("open(/proc/self/maps)", read) as lines:
        for line in lines:
            if of not in line:
                continue
            place, _, facts = line.rstrip("\n").partition(" ")
            addresses = range(*(int(one, 16) for one in place.split("-")))
            if addresses.stop <= within.start or within.stop <= addresses.start:
                continue
            access, offset, device, inode, *path = facts.split(maxsplit=4)
            major, minor = device.split(":")
            file = os.makedev(int(major, 16), int(minor, 16)), int(inode)
            yield Mapped(addresses, access, int(offset, 16), file, "".join(path))


def loaded_library(*names: str) -> str | None:
    """The file of the first loaded library whose name begins with one of `names`."""
    return next((one.path for one in mappings() if one.path.rpartition("/")[2].startswith(names)), None)


def pip_install(extra: str = "") -> str:
    """The command that installs what an extra of gpuinterop brings, or gpuinterop itself, for this machine's shell.

    The name alone does, however gpuinterop was installed: pip and uv keep an installation that satisfies it, even an
    editable one and without an index that has gpuinterop. Only a checkout that was not installed needs its path.
    """
    # Not at the top: a message alone needs it, and it takes milliseconds.
    from importlib.metadata import PackageNotFoundError, distribution

    command, what = "pip install", "gpuinterop"
    try:
        distribution(what)
    except PackageNotFoundError:
        checkout = Path(__file__).parents[1]
        if (checkout / "pyproject.toml").is_file():
            command, what = f"{command} -e", str(checkout)
    what += extra and f"[{extra}]"
    return f'{command} "{what}"' if sys.platform == "win32" else f"{command} {shlex.quote(what)}"


_VULKAN: Final = {
    "apt": "apt install mesa-vulkan-drivers",
    "dnf": "dnf install vulkan-loader mesa-vulkan-drivers",
    "pacman": "pacman -S vulkan-icd-loader vulkan-swrast",
}


def install_vulkan() -> str:
    """Say how Vulkan comes to this machine: the command for a loader and a software driver."""
    import shutil  # with the archives that it knows

    tool = next(filter(shutil.which, _VULKAN), "")
    checkout = Path(__file__).parents[1]
    command = f"sudo {_VULKAN[tool]}" if tool else "install your system's Vulkan loader and Mesa's lavapipe"
    if tool == "apt" and (checkout / "tools" / "fetch_vulkan.py").is_file():  # needs no root
        folder = shlex.quote(str(checkout))
        command = f"make -C {folder} vulkan; . {folder}/.vulkan/env"
    return f"Install the GPU's Vulkan driver, or a software driver: {command}"


# -- threads -----------------------------------------------------------------------------------------------------


def under(lock: threading.RLock, call: Callable[[*Ts], T], *arguments: *Ts, limit: float = -1) -> T:
    """Call with a lock held; after `limit` seconds without it (`holds` tells), a negative number sets no limit.

    The core and the bridge hold their locks this way, because an interrupt can leave one locked on CPython 3.14 where
    ``with`` takes it (cpython #148874). The monitor does so without this frame (`_core.monitor.locked`).
    """
    try:
        lock.acquire(True, limit)
        return call(*arguments)
    finally:
        try:  # noqa: SIM105 - a call in between could be interrupted
            lock.release()
        except RuntimeError:  # the interrupt came before the lock, or the limit has passed
            pass


def locked(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Run a method with the object's ``_lock`` held, as `under` does."""

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


_NO_THREAD: Final = (
    "expected a new thread, got none: the process is at its limit of threads or of memory; close streams and bridges, "
    "or raise the limit (ulimit -u, ulimit -v)"
)
_threads: dict[Thread, Callable[[], object]] = {}
_ending = False


class Thread:
    """A thread of this library, made by `start_thread`."""

    def __init__(self) -> None:
        self._begun = _thread.allocate_lock()  # held until the thread has begun, the other to its end
        self._running = _thread.allocate_lock()
        self._begun.acquire()
        self._running.acquire()
        self.ident = 0

    def join(self, limit: float) -> bool:
        """Wait up to `limit` seconds for its end; return whether it has ended."""
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
            if stop is not None and _ending:  # the exit may have looked before
                stop()
            work()
        finally:
            _threads.pop(self, None)
            self._running.release()


def start_thread(work: Callable[[], object], stop: Callable[[], object] | None = None) -> Thread:
    """Start a thread, and wait until it has begun.

    ``threading.Thread`` waits for ever for a thread that finds no memory to begin with.

    Parameters
    ----------
    work : callable
        What the thread does.
    stop : callable, optional
        Tells it to end, without waiting for it. The exit waits only for threads that have one.

    Raises
    ------
    DriverError
        The process has no memory for it, or as many threads as it may have.
    ResourceClosedError
        The interpreter is exiting.
    """
    check_exit()
    return _start(work, stop)


def _start(work: Callable[[], object], stop: Callable[[], object] | None) -> Thread:
    try:
        thread = Thread()
        run = partial(thread._run, work, stop)
        alive = weakref.ref(run)
        _thread.start_new_thread(run, ())
        del run  # now the thread alone has it
        gone = False
        while not thread._begun.acquire(timeout=SLICE):
            if gone:  # since before this wait, so it never began: it found no memory
                raise MemoryError
            gone = alive() is None
    except (RuntimeError, MemoryError) as error:
        code = errno.ENOMEM if isinstance(error, MemoryError) else errno.EAGAIN
        raise driver_error("pthread_create", code, _NO_THREAD) from error
    return thread


def check_exit() -> None:
    """Raise if the interpreter is exiting, which ends all waits."""
    if _ending:
        raise ResourceClosedError("the interpreter is exiting.")


def end_threads() -> None:
    """End all threads, because the interpreter exits. The core's drain calls it first.

    A daemon that returns from libc while the interpreter is being finalized may crash it.
    """
    global _ending  # noqa: PLW0603 - it is the interpreter that exits
    if _ending:
        return
    _ending = True
    threads = _threads.copy()
    for stop in threads.values():
        try:
            stop()
        except Exception as error:  # the others are told all the same
            report(error)
    for thread in threads:
        thread.join(left_of_exit())


atexit.register(end_threads)  # for programs without the core
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.clear)


class Timespec(ctypes.Structure):
    """``struct timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_STRONGLY_ORDERED: Final = platform.machine() in ("x86_64", "AMD64")

SYS_FUTEX: Final = (
    {"x86_64": 202, "aarch64": 98}.get(platform.machine())
    if sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8 and os.path.isdir("/proc/self/fd")
    else None
)
"""Number of the system call; None, so without our timelines, on other machines and without /proc."""

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
    """Make the error of a system call that failed with `code`."""
    kind = OutOfMemoryError if code == errno.ENOMEM else DriverError
    return kind(call, code, errno.errorcode.get(code, "UNKNOWN"), meaning or os.strerror(code))


def call(name: str, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Make a system call; its failure is the `DriverError` of that name."""
    try:
        return function(*arguments)
    except OSError as error:
        raise driver_error(name, error.errno or 0) from error


def opened(name: str, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Make a system call whose failures are the caller's to explain, but for want of descriptors: a `DriverError`."""
    try:
        return function(*arguments)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise driver_error(name, error.errno) from error
        raise


# -- memfds and mappings -----------------------------------------------------------------------------------------


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
    """A memfd's seals; None for other files. Call it first on a descriptor that came from elsewhere.

    The kernel answers it by itself, and for a memfd also fstat and pread. For other files those, fstatfs, lseek, poll,
    ioctl and close may wait for ever for a process that serves the file (FUSE), and signals do not end them. For any
    file, the kernel answers its link in /proc/self/fd and its page in /proc/self/fdinfo by itself.
    """
    if sys.platform != "linux":
        return None
    try:
        return fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        return None


def is_fixed(fd: int, size: int) -> bool:
    """Whether a descriptor that came from elsewhere is a memfd of `size` bytes, which can neither shrink nor grow."""
    return (seals(fd) or 0) & FIXED == FIXED and os.fstat(fd).st_size == size


def close(*fds: int) -> None:
    """Close descriptors that came from elsewhere. A file that another process may serve is closed in a thread.

    The caller waits for that thread `_CLOSE_LIMIT` seconds, then leaves it behind: its descriptor stays open until the
    thread is done, and the process cannot end before that.

    Raises
    ------
    OSError
        A descriptor is not open.
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
        return True  # an fd that is not open: os.close says so
    # The link of an eventfd, a pipe, a socket or similar, unlike a file's, begins with no slash.
    return seals(fd) is not None or link(fd)[:1] not in ("", "/")


def link(fd: int) -> str:
    """What a descriptor is of, by its link in /proc; "" if the system does not say."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _close_aside(fd: int) -> Thread | None:
    def work() -> None:
        with contextlib.suppress(OSError):
            os.close(fd)

    try:
        return _start(work, None)  # also at the exit, which a file's server must not hold up
    except DriverError:  # no thread can be started
        work()
        return None


def map_shared(fd: int, size: int) -> int:
    """Map the first `size` bytes, readable and writable; return the address."""
    # Not Python's mmap: it keeps a duplicate of the fd, and gives its address only through an exported buffer.
    address: int | None = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _FAILED:
        raise driver_error("mmap", ctypes.get_errno())
    return address


def unmap(address: int, size: int) -> None:
    """End `map_shared`."""
    if munmap(address, size) != 0:
        raise driver_error("munmap", ctypes.get_errno())


def fence() -> None:
    """Order this thread's earlier stores before its later ones, for other CPUs and for devices."""
    if not _STRONGLY_ORDERED:
        full_fence()


def full_fence() -> None:
    """Order this thread's earlier stores also before its later loads, as a locked instruction does."""
    lock = threading.Lock()  # this call's own
    for _ in range(2):  # the first round releases it, the second acquires it
        lock.acquire()
        lock.release()


def poll(fd: int, event: int, timeout_ms: float | None) -> int:
    """The events of a descriptor, 0 after the time-out. Not ``select()``: descriptors may be large."""
    poller = select.poll()
    poller.register(fd, event)
    return sum(events for _, events in poller.poll(timeout_ms))


# -- futex -------------------------------------------------------------------------------------------------------


def futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleep while the u32 at `address` is `expected`, for at most `seconds`. May return early: look again."""
    assert SYS_FUTEX is not None
    whole = int(seconds)
    limit = Timespec(whole, int((seconds - whole) * 1e9))
    _syscall(SYS_FUTEX, address, _FUTEX_WAIT, expected, ctypes.byref(limit), None, 0)


def futex_waker(address: int) -> Callable[[], object]:
    """Return what wakes all threads that sleep in `futex_wait` on `address`: one C call, which no interrupt divides."""
    assert SYS_FUTEX is not None
    return partial(_syscall, SYS_FUTEX, address, _FUTEX_WAKE, _ALL, None, None, 0)
