"""The thread of this process that waits for other processes: links, leaving readers, and repeated checks.

It starts on first use, and ends with the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from .. import system, timeline
from .._arguments import NoCopy
from .._core.lifetime import after_fork
from .._core.release import shown
from ..errors import GpuInteropError, InvalidArgumentError, ResourceClosedError, report

T = TypeVar("T", bound=Any)
TICK_S: Final = 0.02
"""Seconds between two repeated checks."""
_LONG_S: Final = 5.0
"""Seconds between two passes if nothing happens."""


class Loop(NoCopy):
    """Calls the callbacks of ready descriptors, and the repeated checks."""

    def __init__(self) -> None:
        self._lock, self._passing = threading.RLock(), threading.RLock()
        """`_passing` is held by the thread that makes the passes."""
        self._thread: system.Thread | None = None
        self._calls: dict[int, Callable[[int], object]] = {}
        self._repeated: deque[Callable[[], object]] = deque()
        self.on_pass: dict[Callable[[], object], None] = {}  # called at each pass
        self.exits = False  # whether the interpreter exits
        if not hasattr(select, "epoll"):
            problem = "expected Python's own, got gevent's, without epoll; call patch_all(select=False, thread=False)."
            raise InvalidArgumentError("select", problem)
        self._epoll = system.call("epoll_create", select.epoll)
        self._wake = system.call("eventfd", os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._wake, lambda _: os.eventfd_read(self._wake))

    def watch(self, fd: int, call: Callable[[int], object], events: int = select.EPOLLIN) -> None:
        """Call a function with a descriptor's events, until `unwatch`."""
        self._calls[fd] = call
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor, which the caller then closes."""
        if self._calls.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def repeat(self, call: Callable[[], object]) -> None:
        """Call a function in the loop, again and again while it returns False."""
        self._repeated.append(call)
        if system.holds(self._passing):
            return  # this pass or the next one calls it
        try:
            self.start()
        except ResourceClosedError:
            self.exits = True
        if self.exits:  # the thread may have ended, so this one makes the calls
            system.under(self._passing, self._poll, limit=0)
        self.wake()

    def start(self) -> None:
        if self._thread is None:
            self._start()

    @system.locked
    def _start(self) -> None:
        self._thread = self._thread or system.start_thread(self._run, self._stop)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _stop(self) -> None:
        self.exits = True
        self.wake()

    def _run(self) -> None:
        with self._passing:
            while not self.exits:
                try:
                    self._pass()
                except BaseException as error:  # from an array library; the loop must still serve the others
                    report(error)
            self._poll()

    def _pass(self) -> None:
        patience, timeline.patience.seconds = timeline.patience.seconds, 0.0  # do not wait for a peer's lock; try again
        try:
            for fd, events in self._epoll.poll(TICK_S if self._repeated else _LONG_S):
                if (call := self._calls.get(fd)) is not None:
                    call(events)
            self._poll()
            for check in list(self.on_pass):
                with contextlib.suppress(GpuInteropError):  # the next call that needs it raises
                    check()
        finally:
            timeline.patience.seconds = patience

    def _poll(self) -> None:
        if not system.holds(self._passing):
            return
        for _ in range(len(self._repeated)):
            if shown(self._repeated[0]) is False:
                self._repeated.append(self._repeated[0])
            self._repeated.popleft()  # after the call, so that an interrupt does not lose it

    def forget(self) -> None:
        """Close the descriptors of a forked child's copy."""
        self._epoll.close()
        os.close(self._wake)


class Singleton(Generic[T]):
    """An object that the first call makes. A forked child makes its own."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self.made, self._lock = make, list[T](), threading.RLock()
        after_fork(self._forked)

    def __call__(self) -> T:
        return self.made[0] if self.made else self._first()

    @system.locked
    def _first(self) -> T:
        if not self.made:
            self.made.append(self._make())
        return self.made[0]

    def _forked(self) -> None:
        for made in self.made:
            made.forget()
        self.made.clear()
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]


loop: Final = Singleton(Loop)
