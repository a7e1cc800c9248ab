"""Binary semaphores in SwiftShader's layout, and timeline semaphores in gpuinterop's.

Waits block the calling thread without the GIL, in slices of at most 50 ms (:data:`.system.SLICE`), and check for
cancellation between them.

**Why a binary wait polls instead of sleeping on the condition.** ``pthread_cond_timedwait`` locks the mutex again
before it returns, without a limit: a process killed inside the lock would block every waiter forever. And a waiter that
is killed inside the call leaves the condition in a state in which SwiftShader's later broadcast can block. So a wait
here reads `signaled` without the lock, at first continuously, then with growing pauses (20 us to 1 ms). It locks, with
a limit, only to take the signal. A process that is killed in such a wait cannot harm the others.

**Limitation.** SwiftShader's mutex is not robust. If a process is killed inside the lock, or while it waits on the
condition, the semaphore becomes unusable. After :data:`LOCK_LIMIT` seconds it is marked, and all later calls on it
raise the same `PeerError`. Nothing is repaired. Closing tries the lock once. If that fails, `ref_count` stays too high,
which is harmless, because the page exists only as long as its mappings. Each broadcast runs in its own thread; a
broadcast that never returns keeps the page mapped.

**After a fork** the child has the parent's mappings, but not the counted reference, which only the parent returns.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeAlias, TypeVar
from weakref import WeakSet

from gpuinterop import system, timeline
from gpuinterop.backend import HostSemaphoreBackend
from gpuinterop.errors import (
    ArgumentTypeError,
    GpuInteropError,
    HandleError,
    PeerError,
    ResourceClosedError,
    again,
)
from gpuinterop.handles import AnySemaphoreHandle, FdHandle, OpaqueFd, TimelineFd

from . import memory
from .formats import swiftshader
from .streams import Device, Stream

_T = TypeVar("_T")
_Kind = TypeVar("_Kind", bound="Semaphore")

LOCK_LIMIT: Final = timeline.LOCK_LIMIT  # seconds for which another process may hold the lock
IMPORT_LIMIT: Final = 0.05  # during an import, for which all other imports of the process wait (the core's lock)

Check: TypeAlias = Callable[[], None]  # raises an error to stop a wait


class Semaphore(memory.Owned, ABC):
    """One page of shared memory, with its fd for `export`."""

    kind: ClassVar[str]
    handle_type: ClassVar[Any]

    def __init__(self, fd: int, address: int) -> None:
        super().__init__()
        self.fd = fd
        self._address = address
        self.label = f"this {self.kind} semaphore"  # in messages; the core replaces it
        self._users: list[int] = []  # threads that use the page, one entry per use
        self._closed = False
        self._releaser: dict[None, int] = {}  # the thread that releases the objects in `ends`
        self.releases += (os.close, fd), (system.munmap, address, system.PAGE)
        self._failure: GpuInteropError | None = None
        _live.add(self)

    @abstractmethod
    def signal(self, value: int) -> None: ...

    @abstractmethod
    def wait(self, value: int, deadline: float | None, check: Check) -> bool:
        """Block until the semaphore is signalled; False when ``time.monotonic()`` reaches `deadline`."""

    def export(self) -> OpaqueFd | TimelineFd:
        """Return a new handle of a duplicate of the descriptor."""
        # Under `_use`, because another thread could close the number, which could then be another file's.
        handle: OpaqueFd | TimelineFd = self._use(self.handle_type.adopt_duplicate, self.fd)
        return handle

    def abandon(self) -> None:
        """Make pending and later operations raise `ResourceClosedError`, so that waiting streams fail."""
        failure = ResourceClosedError(f"{self.label} was abandoned: it was closed while operations were pending.")
        self._failure = self._failure or failure
        self._stop(closed=False)

    def close(self) -> None:
        """End use. Unmap the page at once (``munmap``), or let its last user unmap it."""
        self._stop(closed=True)

    def _stop(self, *, closed: bool) -> None:
        users, thread = self._users, threading.get_ident()
        users += (thread,)  # see `_use`
        try:
            if not self._closed:
                self._closed = closed
                self._wake()
        finally:
            users.remove(thread)
        self._release_if_last()

    def _use(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Call `work` with the page mapped. A user records itself, then checks; a closer sets a mark, then checks.

        There is no lock: a fork could leave it held, and a finalizer could run in the thread that holds it.
        """
        users, thread = self._users, threading.get_ident()
        users += (thread,)
        try:
            if self._closed or self._failure is not None:
                self._check()
            return work(*arguments)
        finally:
            users.remove(thread)
            if self._closed:
                self._release_if_last()

    def _release_if_last(self) -> None:
        thread = threading.get_ident()
        if self._closed and not self._users.copy() and self._releaser.setdefault(None, thread) == thread:
            self.release()

    def _check(self) -> None:
        if self._failure is not None:
            raise again(self._failure)
        if self._closed:
            raise ResourceClosedError(f"{self.label} is closed.")

    def _wake(self) -> None:
        """Wake this process's waiters, which then call `_check`. Called with the page mapped."""

    def _forked(self) -> None:
        thread = threading.get_ident()  # the parent's other threads do not exist in the child
        self._users[:] = [user for user in self._users if user == thread]


class BinarySemaphore(Semaphore):
    """A semaphore in SwiftShader's layout."""

    kind = "binary"
    handle_type = OpaqueFd

    def __init__(self, fd: int, address: int) -> None:
        super().__init__(fd, address)
        self._page = swiftshader.Page(address)
        self._process = 0  # the process whose reference `ref_count` includes

    @classmethod
    def create(cls) -> BinarySemaphore:
        return _make(cls, lambda: system.create_page(memory.BINARY_NAME, swiftshader.initialise), cls._count_own)

    @classmethod
    def load(cls, fd: int, *, trusted: bool) -> BinarySemaphore:
        """Import and own `fd`; leave it alone on an exception."""
        memfd = memory.examine(fd, "a binary semaphore", memory.SEMAPHORE_DRIVERS)
        if problem := _wrong_size(memfd.size) or swiftshader.problem(os.pread(fd, system.PAGE, 0)):
            raise _other_object("a binary semaphore of SwiftShader or the host", problem)
        if not trusted:
            raise HandleError(
                "handle: expected a handle that you trust, got a binary semaphore whose other holders are unknown. "
                "A holder can keep its lock or break it permanently, so that signals of this process fail"
                f"{'' if memfd.fixed else memory.MAY_TRUNCATE}. Use a timeline (TimelineFd). If a driver of this "
                "process made the semaphore, or you trust its other holders, pass OpaqueFd(fd, trusted=True)."
            )
        memfd.secure()
        return _make(cls, lambda: (fd, system.map_shared(fd, system.PAGE)), cls._add_reference, fd=fd)

    def signal(self, value: int) -> None:
        self._use(lambda: self._wake_sleepers() if self._locked(self._set) else None)

    def wait(self, value: int, deadline: float | None, check: Check) -> bool:
        def work() -> bool:
            pauses = system.pauses()
            checked = time.monotonic()
            while True:
                if self._page.signaled.value and self._locked(self._take):
                    return True
                now = time.monotonic()
                pause = next(pauses)
                if deadline is not None:
                    if now >= deadline:
                        return False
                    pause = min(pause, deadline - now)
                if now - checked >= system.SLICE:
                    checked = now
                    # A process killed inside the lock will never signal. Notice that here.
                    if self._page.mutex.held and self._locked(self._take):
                        return True
                self._check()
                check()
                if pause:
                    time.sleep(pause)

        return self._use(work)

    def _count_own(self) -> None:
        self._process = os.getpid()

    def _add_reference(self) -> None:
        process = os.getpid()

        def add() -> None:
            self._page.references.value += 1
            self._process = process  # no call between the two

        self._locked(add, IMPORT_LIMIT)

    def _drop_reference(self) -> None:
        self._process = 0
        self._page.references.value -= 1

    def _set(self) -> bool:
        self._page.signaled.value = True
        return self._page.slept_on

    def _wake_sleepers(self) -> None:
        """Broadcast in a thread, because the call never returns if a waiter was killed in its sleep."""

        def broadcast() -> None:
            with contextlib.suppress(GpuInteropError):
                self._use(self._page.broadcast)

        if not system.start_thread(broadcast).join(LOCK_LIMIT):
            raise self._unusable(
                f"the broadcast to its waiters did not return in {LOCK_LIMIT:g} s: a process was killed in its wait"
            )

    def _take(self) -> bool:
        signaled = self._page.signaled.value != 0
        if signaled:
            self._page.signaled.value = 0
        return signaled

    def _locked(self, action: Callable[[], bool | None], limit: float | None = None) -> bool | None:
        seconds = LOCK_LIMIT if limit is None else limit
        try:
            return self._page.mutex.run(action, seconds)
        except TimeoutError:
            raise self._unusable(self._holder(seconds)) from None

    def _holder(self, seconds: float) -> str:
        owner = self._page.mutex.owner
        what = f"thread {owner} has held its lock for more than {seconds:g} s"
        if owner and not os.path.exists(f"/proc/{owner}"):
            what = f"thread {owner}, which no longer exists here, holds its lock"
        return what + ": that process was killed or stopped between lock and unlock"

    def _unusable(self, why: str) -> BaseException:
        self._failure = self._failure or PeerError(f"{self.label} is unusable: {why}. Make a new one on both sides.")
        return again(self._failure)

    def release(self) -> None:
        mapped = self.releases and self.releases[-1][0] is system.munmap
        if mapped and self._process == os.getpid():
            # Do not wait: a drop must not block, and if the lock is lost the count is useless.
            with contextlib.suppress(TimeoutError):
                self._page.mutex.run(self._drop_reference, 0)
        super().release()


class TimelineSemaphore(Semaphore):
    """A semaphore in the layout of :mod:`gpuinterop.timeline`."""

    kind = "timeline"
    handle_type = TimelineFd

    def __init__(self, fd: int, address: int) -> None:
        self._page = timeline.Page(fd, address, "")
        super().__init__(fd, address)

    @classmethod
    def create(cls) -> TimelineSemaphore:
        return _make(cls, timeline.create)

    @classmethod
    def load(cls, fd: int, *, trusted: bool) -> TimelineSemaphore:
        """Import and own `fd`; leave it alone on an exception. The other processes need not be trusted."""
        memfd = memory.examine(fd, "a timeline semaphore", ())
        if not memfd.fixed:
            raise _other_object("a timeline semaphore of gpuinterop", "it is not sealed against shrinking and growing")
        if problem := _wrong_size(memfd.size) or timeline.problem(os.pread(fd, system.PAGE, 0)):
            raise _other_object("a timeline semaphore of gpuinterop", problem)
        return _make(cls, lambda: (fd, system.map_shared(fd, system.PAGE)), fd=fd)

    @property
    def label(self) -> str:
        return self._page.label

    @label.setter
    def label(self, label: str) -> None:
        self._page.label = label

    @property
    def value(self) -> int:
        return self._use(lambda: self._page.value)

    def signal(self, value: int) -> None:
        self._use(self._page.signal, value)

    def wait(self, value: int, deadline: float | None, check: Check) -> bool:
        def stop() -> None:
            self._check()
            check()

        return self._use(self._page.wait, value, deadline, stop)

    def _wake(self) -> None:
        self._page.wake()

    def release(self) -> None:
        self._page.close()
        super().release()


_live: Final[WeakSet[Semaphore]] = WeakSet()


def _forked() -> None:
    for semaphore in _live:
        semaphore._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _make(
    kind: type[_Kind],
    pages: Callable[[], tuple[int, int]],
    count: Callable[[_Kind], object] = lambda _: None,
    *,
    fd: int | None = None,
) -> _Kind:
    """Create a semaphore on the descriptor and address from `pages`. An exception leaves only `fd` open."""
    semaphore = kind(*pages())
    try:
        count(semaphore)
    except GpuInteropError:
        semaphore.releases[: fd is not None] = ()
        semaphore.release()
        raise
    return semaphore


def _wrong_size(size: int) -> str | None:
    return None if size == system.PAGE else f"it has {size} bytes, not one page ({system.PAGE})"


def _other_object(expected: str, why: str) -> HandleError:
    return HandleError(
        f"handle: expected {expected}, got another object: {why}. Import memory with import_memory, a timeline "
        "semaphore as a TimelineFd, and a binary one as an OpaqueFd."
    )


_Batch: TypeAlias = tuple[Semaphore, ...]
_TYPES: Final[Mapping[type, type[BinarySemaphore | TimelineSemaphore]]] = {
    kind.handle_type: kind for kind in (BinarySemaphore, TimelineSemaphore)
}


class Semaphores(HostSemaphoreBackend):
    """Semaphores are pages that processes share. Streams wait for them in their threads."""

    def import_semaphore(self, device: Device, handle: AnySemaphoreHandle) -> Semaphore:
        """Map the page (``mmap``)."""
        descriptor = memory.checked(handle, FdHandle)
        return _type(type(handle)).load(descriptor.fd, trusted=descriptor.trusted)

    prepare: Any = staticmethod(tuple)

    def signal(self, batch: _Batch, stream: Stream, values: Sequence[int]) -> None:
        """Let the worker signal."""
        stream.submit(_signal_all, (batch, values))

    def wait(self, batch: _Batch, stream: Stream, values: Sequence[int], timeout_ms: int | None) -> None:
        """Let the worker wait."""
        stream.submit(_wait_all, (batch, values, stream.check))

    destroy_semaphore: Any = staticmethod(Semaphore.close)
    abandon_semaphore: Any = staticmethod(Semaphore.abandon)
    export_semaphore: Any = staticmethod(Semaphore.export)

    def create_semaphore(self, device: Device, handle_type: type[AnySemaphoreHandle]) -> Semaphore:
        """Create a page (``memfd_create``)."""
        return _type(handle_type).create()

    def host_value(self, semaphore: TimelineSemaphore) -> int:
        """Read the counter."""
        return semaphore.value

    def host_signal(self, semaphore: Semaphore, value: int) -> None:
        """Signal from the calling thread."""
        semaphore.signal(value)

    def host_wait(self, semaphore: Semaphore, value: int, timeout: float | None) -> bool:
        """Wait in the calling thread."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return semaphore.wait(value, deadline, system.check_exit)


def _type(handle_type: type) -> type[BinarySemaphore | TimelineSemaphore]:
    semaphore_type = _TYPES.get(handle_type)
    if semaphore_type is None:
        raise ArgumentTypeError(
            "handle", f"expected OpaqueFd or TimelineFd for a semaphore of the host, got {handle_type.__name__}."
        )
    return semaphore_type


def _signal_all(semaphores: Sequence[Semaphore], values: Sequence[int]) -> None:
    for semaphore, value in zip(semaphores, values, strict=True):
        semaphore.signal(value)


def _wait_all(semaphores: Sequence[Semaphore], values: Sequence[int], check: Check) -> None:
    """Wait for one after the other. If one fails, the earlier waits have consumed their binary semaphores."""
    for semaphore, value in zip(semaphores, values, strict=True):
        semaphore.wait(value, None, check)
