"""Plain memfds as the independent exporter: shared memory, semaphores and a worker thread. Linux only.

It must be independent, so that it does not repeat a backend's mistakes. The semaphores' layouts are documented
(SwiftShader's binary semaphore in ``gpuinterop_host.formats``, the timeline page in ``gpuinterop.timeline``), but this
code was written from the documents and shares nothing with a backend. Nothing here may import one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import queue
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ... import system
from ..._arguments import check_nbytes, check_type
from ..._core.importing import import_duplicate
from ...capabilities import DOMAIN, Capabilities, Capability, Cell, Operation, Scope
from ...errors import (
    ArgumentTypeError,
    BackendUnavailableError,
    HandleError,
    InvalidArgumentError,
    PeerError,
    ResourceClosedError,
)
from ...handles import (
    AllocationHandle,
    AnySemaphoreHandle,
    Binary,
    DeviceIdentity,
    Handle,
    HandleOrigin,
    MemoryHandle,
    OpaqueFd,
    OriginKind,
    Timeline,
    TimelineFd,
    VmmFd,
)
from .base import Exporter, ExporterMemory, ExporterSemaphore, Fill, Submission

if sys.platform != "win32":
    import fcntl

__all__ = ["MemfdExporter", "MemfdMemory", "MemfdSemaphore"]

_PATIENCE = 5.0
"""Seconds that a close waits for work before it cancels the work's waits."""
_SLICE = 0.05
"""Longest sleep in seconds, after which a wait checks whether it was cancelled."""
_LOCK_LIMIT = 1.0
"""Seconds that another process may hold a lock; microseconds are normal."""

_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4  # F_ADD_SEALS; F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_GET_SEALS = 1034
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # shared between processes
_OURS, _A_DRIVER_S = b"GIPTLSM1", b"GIPTLSMD"  # the first bytes of a timeline's page
# Machine: sizeof(pthread_mutex_t), SYS_futex. pthread_cond_t has 48 bytes on both.
_MACHINES = {"x86_64": (40, 202), "aarch64": (48, 98)}
_COND_SIZE = 48


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _timespec(seconds: float) -> _Timespec:
    return _Timespec(int(seconds), int(seconds % 1 * 1e9))


class _Libc:
    """Calls of libc; all release the GIL."""

    def __init__(self) -> None:
        machine = _MACHINES.get(platform.machine())
        glibc = sys.platform == "linux" and (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
        if machine is None or not glibc:
            raise BackendUnavailableError(
                "the memfd exporter needs Linux, and glibc on x86-64 or aarch64 (the layout of pthread objects).",
                fix="Use the Vulkan exporter here.",
            )
        self.mutex_size, self._futex_number = machine
        c = ctypes.CDLL(None, use_errno=True)
        pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
        c.syscall.argtypes = (long, pointer, integer, ctypes.c_uint32, pointer, pointer, integer)
        c.syscall.restype = long
        for name in ("mutex_lock", "mutex_unlock", "cond_broadcast"):
            getattr(c, f"pthread_{name}").argtypes = (pointer,)
        for name in ("mutex_timedlock", "mutex_init", "cond_init"):
            getattr(c, f"pthread_{name}").argtypes = (pointer, pointer)
        self.c = c

    def init(self, kind: str, address: int) -> None:
        """Initialize a ``mutex`` or a ``cond`` for use by several processes."""
        attributes = ctypes.create_string_buffer(64)
        getattr(self.c, f"pthread_{kind}attr_init")(attributes)
        getattr(self.c, f"pthread_{kind}attr_setpshared")(attributes, 1)
        getattr(self.c, f"pthread_{kind}_init")(address, attributes)

    @contextlib.contextmanager
    def locked(self, mutex: int) -> Iterator[None]:
        """Hold a binary semaphore's mutex."""
        until = time.time() + _LOCK_LIMIT  # timedlock uses the wall clock
        if code := self.c.pthread_mutex_timedlock(mutex, ctypes.byref(_timespec(until))):
            raise _no_lock("a binary semaphore", errno.errorcode.get(code, str(code)))
        try:
            yield
        finally:
            self.c.pthread_mutex_unlock(mutex)

    def futex_wait(self, address: int, expected: int, seconds: float) -> None:
        limit = ctypes.byref(_timespec(seconds))
        self.c.syscall(self._futex_number, address, _FUTEX_WAIT, expected, limit, None, 0)

    def futex_wake(self, address: int) -> None:
        self.c.syscall(self._futex_number, address, _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)


def _no_lock(what: str, why: str) -> PeerError:
    return PeerError(
        f"the lock of {what} was not free within {_LOCK_LIMIT:g} s ({why}): did the process that held it crash?"
    )


@contextlib.contextmanager
def _alone(fd: int) -> Iterator[None]:
    """Hold a timeline's lock, on an open file description for this call only."""
    with open(f"/proc/self/fd/{fd}", "rb+", buffering=0) as file:
        until = time.monotonic() + _LOCK_LIMIT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise _no_lock("a timeline semaphore", "EWOULDBLOCK") from error
                time.sleep(50e-6)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


class _Object:
    """A mapped memfd and its descriptor; it is unmapped when its last user is gone."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self._mapped: mmap.mmap | None = mmap.mmap(fd, size)

    @classmethod
    def make(cls, name: str, size: int) -> _Object:
        """Create a sealed one."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @property
    def closed(self) -> bool:
        return self._mapped is None

    def mapped(self) -> mmap.mmap:
        """The bytes; they stay mapped while the caller keeps the result."""
        if (found := self._mapped) is None:
            raise ResourceClosedError("the exporter's object was closed.")
        return found

    def duplicate(self) -> int:
        self.mapped()
        return os.dup(self.fd)

    def close(self) -> None:
        if not self.closed:
            self._mapped = None
            os.close(self.fd)


class _Pending(Submission):
    """One piece of work for the exporter's thread."""

    def __init__(self, run: Callable[[_Pending], None], objects: Sequence[Any], waits_for: Sequence[Any]) -> None:
        self._run = run
        self.objects = objects
        self.waits_for = waits_for
        self.cancelled = threading.Event()
        self._finished = threading.Event()
        self._failure: BaseException | None = None

    def execute(self) -> None:
        try:
            if not self.cancelled.is_set():
                self._run(self)
        except _Cancelled:
            pass
        except BaseException as error:
            self._failure = error
        finally:
            self._finished.set()

    def done(self, timeout: float = 0.0) -> bool:
        if not self._finished.wait(timeout):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def settled(self, timeout: float) -> bool:
        """As `done`, but raises nothing."""
        return self._finished.wait(timeout)

    def close(self) -> None:
        """Wait for the work. Work that waits for a missing signal stays pending until the exporter closes."""
        self.settled(_PATIENCE)


class _Cancelled(Exception):
    """A wait was cancelled: the work after it is not done, and nothing is signalled."""


class MemfdMemory(ExporterMemory):
    """A sealed memfd, or a memfd that a device has allocated."""

    dedicated = False

    def __init__(self, exporter: MemfdExporter, size: int, handle: VmmFd | None = None) -> None:
        size = check_nbytes(size)
        self.exporter = exporter
        self._imported = handle is not None
        if handle is None:
            self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            self.object = _Object.make("gpuinterop.exporter.memory", self.size)
        else:
            self.size = size

            def take(duplicate: Handle) -> _Object:
                assert isinstance(duplicate, VmmFd)
                try:
                    fcntl.fcntl(duplicate.fd, _GET_SEALS)  # before fstat, which can block on other kinds of files
                except OSError as error:
                    raise HandleError(f"handle: expected a memfd ({error.strerror}).") from None
                if (there := os.fstat(duplicate.fd).st_size) < size:
                    raise InvalidArgumentError("size", f"expected at most the memfd's {there} bytes, got {size}.")
                return _Object(duplicate.fd, size)

            self.object = import_duplicate(handle, take, user="MemfdExporter.import_memory()")
        exporter.children.append(self)

    def export(self) -> MemoryHandle:
        if self._imported:
            raise InvalidArgumentError("memory", "was imported; export it where it was allocated.")
        origin = HandleOrigin(
            kind=OriginKind.MEMORY,
            device=self.exporter.identity,
            size=self.size,
            dedicated=self.dedicated,
            trusted=True,
        )
        return OpaqueFd.adopt(self.object.duplicate(), origin=origin)

    def write(self, offset: int, data: bytes) -> None:
        self.check(offset, len(data))
        self.object.mapped()[offset : offset + len(data)] = data

    def read(self, offset: int, size: int) -> bytes:
        self.check(offset, size)
        return self.object.mapped()[offset : offset + size]

    def check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise InvalidArgumentError(
                "offset", f"expected bytes within 0 to {self.size}, got {offset} to {offset + size}."
            )

    def close(self) -> None:
        self.exporter.settle(self)
        self.object.close()
        self.exporter.forget(self)


class _Page:
    """A semaphore's page: its fields by offset, as ctypes objects."""

    def __init__(self, memory: mmap.mmap, mutex_size: int) -> None:
        self._memory = memory
        first = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(first)
        del first
        self.condition = self.address + mutex_size
        # Binary: one reference for this object, and one for descriptors that are sent and never opened. At 0
        # SwiftShader destroys the mutex, which later imports would use.
        self.references = ctypes.c_int32.from_address(self.condition + _COND_SIZE)
        self.flag = ctypes.c_uint8.from_address(self.condition + _COND_SIZE + 4)
        self.version, self.sequence = (ctypes.c_uint32.from_address(self.address + offset) for offset in (8, 12))
        self.counter = ctypes.c_uint64.from_address(self.address + 16)


class MemfdSemaphore(ExporterSemaphore):
    """A page in a memfd, in SwiftShader's layout (binary) or that of `gpuinterop.timeline` (timeline)."""

    def __init__(self, exporter: MemfdExporter, kind: type) -> None:
        if kind not in (Binary, Timeline):
            raise ArgumentTypeError("kind", f"expected Binary or Timeline, got {kind!r}.")
        self.kind = kind
        self._order = threading.Lock()
        self.exporter = exporter
        self.libc = libc = exporter.libc
        self.object = _Object.make(f"gpuinterop.exporter.{kind.__name__.lower()}", mmap.PAGESIZE)
        page = self._page()
        if kind is Binary:
            libc.init("mutex", page.address)
            libc.init("cond", page.condition)
            page.references.value = 2
        else:
            page.version.value = 2
            self.object.mapped()[:8] = exporter._magic
        exporter.children.append(self)

    def _page(self) -> _Page:
        return _Page(self.object.mapped(), self.libc.mutex_size)

    def export(self) -> AnySemaphoreHandle:
        device = self.exporter.identity
        if self.kind is Binary:
            origin = HandleOrigin(kind=OriginKind.BINARY, device=device, trusted=True)
            return OpaqueFd.adopt(self.object.duplicate(), origin=origin)
        origin = HandleOrigin(kind=OriginKind.TIMELINE, device=device, trusted=True)
        return TimelineFd.adopt(self.object.duplicate(), origin=origin)

    def signal(self, value: int = 0) -> None:
        page = self._page()
        if self.kind is Binary:
            with self.libc.locked(page.address):
                page.flag.value = 1
                self.libc.c.pthread_cond_broadcast(page.condition)
            return
        with _alone(self.object.fd):
            if value <= page.counter.value:
                raise InvalidArgumentError("value", f"expected more than {page.counter.value}, got {value}.")
            page.counter.value = value
            page.sequence.value += 1
        self.libc.futex_wake(page.address + 12)

    def wait(self, value: int = 0, *, timeout: float) -> bool:
        try:
            return self._wait(value, time.monotonic() + timeout, lambda: False)
        except _Cancelled:
            raise ResourceClosedError("the exporter's object was closed during the wait.") from None

    def _wait(self, value: int, deadline: float | None, cancelled: Callable[[], bool]) -> bool:
        page, pause = self._page(), 20e-6
        while True:
            sequence = page.sequence.value  # read before the value, to miss no wake-up
            if self._passed(page, value):
                return True
            left = _SLICE if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            if self.object.closed or cancelled():
                raise _Cancelled
            if self.kind is Timeline:
                self.libc.futex_wait(page.address + 12, sequence, min(left, _SLICE))
                continue
            # Poll instead of sleeping: a process killed inside pthread_cond_timedwait leaves a waiter in the
            # condition, and the other side's next broadcast fails on it.
            time.sleep(min(left, pause))
            pause = min(pause * 1.5, 1e-3)

    def _passed(self, page: _Page, value: int) -> bool:
        if self.kind is Timeline:
            if page.counter.value < value:
                return False
            if platform.machine() != "x86_64":  # order reads of the data after the counter's
                with self._order:
                    pass
            return True
        if not page.flag.value:
            return False
        with self.libc.locked(page.address):
            taken = bool(page.flag.value)
            page.flag.value = 0
        return taken

    def hold_lock(self) -> None:
        """Take the object's lock and keep it, for tests of a process that is killed while it holds the lock."""
        self._held = self.libc.locked(self._page().address) if self.kind is Binary else _alone(self.object.fd)
        self._held.__enter__()

    def close(self) -> None:
        self.exporter.settle(self)
        if self.kind is Binary and not self.object.closed:
            page = self._page()
            with contextlib.suppress(PeerError), self.libc.locked(page.address):
                page.references.value -= 1
        self.object.close()
        self.exporter.forget(self)


class MemfdExporter(Exporter):
    """The CPU with plain memfds, and one thread that does submitted work in order.

    With an `identity` (see :func:`gpuinterop.testing.exporters.open_exporter`) it simulates that device's driver, and
    its timelines have a different magic number, so that they are not taken for those of `gpuinterop.timeline`. Raises
    `BackendUnavailableError` if the system is not Linux, or the libc's pthread objects have an unknown layout.
    """

    name = "memfd"
    device = "CPU"

    def __init__(self, *, identity: DeviceIdentity | None = None) -> None:
        self.libc = _Libc()
        self.driver = f"memfd {platform.release().partition('-')[0]}"
        self.identity = identity or DeviceIdentity(name="CPU (memfd exporter)", is_cpu=True)
        self._magic = _OURS if identity is None else _A_DRIVER_S
        self.children: list[Any] = []
        self._pending: list[_Pending] = []
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = system.start_thread(self._work, self._end)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(map(_capability, DOMAIN), owner=self.device)

    def create_memory(self, size: int) -> MemfdMemory:
        self.check_open()
        return MemfdMemory(self, size)

    def import_memory(self, handle: AllocationHandle, size: int) -> MemfdMemory:
        self.check_open()
        return MemfdMemory(self, size, check_type(handle, VmmFd, "handle", "a VmmFd"))

    def create_semaphore(self, kind: type, *, exportable: bool = True) -> MemfdSemaphore:
        self.check_open()
        return MemfdSemaphore(self, kind)

    def submit(
        self,
        *,
        wait: Sequence[tuple[ExporterSemaphore, int]] = (),
        fill: Sequence[Fill] = (),
        signal: Sequence[tuple[ExporterSemaphore, int]] = (),
    ) -> Submission:
        waits = [(self._own(semaphore, MemfdSemaphore), value) for semaphore, value in wait]
        signals = [(self._own(semaphore, MemfdSemaphore), value) for semaphore, value in signal]
        fills = tuple(fill)
        for item in fills:
            if item.offset % 4 or item.size % 4 or item.size <= 0:
                raise InvalidArgumentError(
                    "fill", f"expected multiples of 4, got offset {item.offset} and size {item.size}."
                )
            self._own(item.memory, MemfdMemory).check(item.offset, item.size)

        def work(pending: _Pending) -> None:
            for semaphore, value in waits:
                semaphore._wait(value, None, pending.cancelled.is_set)
            for item in fills:
                item.memory.write(item.offset, struct.pack("=I", item.word) * (item.size // 4))
            for semaphore, value in signals:
                semaphore.signal(value)

        objects = [*(item.memory for item in fills), *(semaphore for semaphore, _ in (*waits, *signals))]
        return self._enqueue(work, objects, [semaphore for semaphore, _ in waits])

    def close(self) -> None:
        if self._closed:
            return
        for child in list(reversed(self.children)):
            child.close()
        self._closed = True
        self._queue.put(None)
        self._thread.join(_PATIENCE)

    # -- used by the objects -----------------------------------------------------------------------------------

    def _enqueue(self, run: Callable[[_Pending], None], objects: Sequence[Any], waits_for: Sequence[Any]) -> _Pending:
        self.check_open()
        pending = _Pending(run, objects, waits_for)
        with self._lock:
            self._pending = [entry for entry in self._pending if not entry._finished.is_set()]
            self._pending.append(pending)
        self._queue.put(pending)
        return pending

    def _end(self) -> None:
        """Cancel pending work, because the interpreter exits."""
        for entry in self._pending:
            entry.cancelled.set()
        self._queue.put(None)

    def _work(self) -> None:
        while (pending := self._queue.get()) is not None:
            pending.execute()

    def settle(self, closing: Any) -> None:
        """Before `closing` closes, cancel work that waits for it, and wait for other work that uses it."""
        with self._lock:
            users = [entry for entry in self._pending if closing in entry.objects]
        for entry in users:
            if closing in entry.waits_for:
                entry.cancelled.set()
        if users and not users[-1].settled(_PATIENCE):
            with self._lock:  # work is done in order, so earlier work may block it
                for entry in self._pending[: self._pending.index(users[-1]) + 1]:
                    entry.cancelled.set()
            users[-1].settled(_PATIENCE)

    def forget(self, child: Any) -> None:
        with contextlib.suppress(ValueError):
            self.children.remove(child)

    def check_open(self) -> None:
        if self._closed:
            raise ResourceClosedError("the memfd exporter was closed.")

    def _own(self, thing: Any, kind: type[Any]) -> Any:
        if not isinstance(thing, kind) or thing.exporter is not self:
            raise ArgumentTypeError("submit", f"expected objects of this exporter, got {type(thing).__name__}.")
        return thing


_SEMAPHORES = (
    Operation.IMPORT_SEMAPHORE,
    Operation.SIGNAL_SEMAPHORE,
    Operation.WAIT_SEMAPHORE,
    Operation.WAIT_TIMEOUT,
)
_USABLE = frozenset(
    (
        Cell(Operation.IMPORT_MEMORY, OpaqueFd),
        Cell(Operation.MAP_BUFFER, OpaqueFd),
        Cell(Operation.EXPORT_ALLOCATION, VmmFd),
        *(Cell(operation, kind) for operation in _SEMAPHORES for kind in (OpaqueFd, TimelineFd)),
    )
)


def _capability(cell: Cell) -> Capability:
    home = "gpuinterop.testing.exporters.memfd"
    if cell in _USABLE:
        return cell.unverified(Scope.PLATFORM, "the exporter makes, or maps, the other side with plain memfds.", home)
    if cell.operation is Operation.MAP_MIPMAPPED_ARRAY:
        return cell.gap(Scope.PLATFORM, "plain memfds contain bytes: they have no images, and no tiling.", home)
    return cell.gap(Scope.PLATFORM, "plain memfds have nothing of this kind.", home)
