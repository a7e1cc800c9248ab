"""The one thread of this process that waits for others: links, readers that leave, and what is to be looked at again.

It starts when it is needed, and ends with the process. Where the user's own loop serves (`ArrayShare.serve`), that
makes the passes until then.
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
from .._core.drain import shown
from .._core.monitor import after_fork
from ..errors import GpuInteropError, ResourceClosedError, report

T = TypeVar("T", bound=Any)
TICK_S: Final = 0.02
"""Seconds between the looks at what has to be looked at again."""
_LONG_S: Final = 5.0
"""Seconds between two passes where nothing happens."""


class Loop(NoCopy):
    """Calls what waits for descriptors, and what is to be called again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._passing = threading.RLock()
        """Held by the thread that makes the passes."""
        self._thread: system.Thread | None = None
        self._calls: dict[int, Callable[[int], object]] = {}
        """What is called with the events of a descriptor."""
        self._again: deque[Callable[[], object]] = deque()
        self.on_pass: Callable[[], object] = bool
        """Called at each pass."""
        self.exits = False
        """Whether the interpreter exits."""
        self._epoll = system.call("epoll_create", select.epoll)
        self._wake = system.call("eventfd", os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._wake, lambda _: os.eventfd_read(self._wake))

    def watch(self, fd: int, call: Callable[[int], object], events: int = select.EPOLLIN) -> None:
        """Call with the events of a descriptor, until `unwatch`."""
        self._calls[fd] = call
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Wait for other events of a descriptor."""
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Watch a descriptor no more. The caller then closes it."""
        if self._calls.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def look_again(self, look: Callable[[], object]) -> None:
        """Call `look` in the loop, again and again while it returns False."""
        self._again.append(look)
        if system.holds(self._passing):
            return  # this pass calls it, or the next
        try:
            self.start()
        except ResourceClosedError:
            self.exits = True
        if self.exits:  # the thread may have ended: this one does what is left
            system.under(self._passing, self._look, limit=0)
        self.wake()

    def start(self) -> None:
        """Start the thread, if it has not started."""
        if self._thread is None:
            system.under(self._lock, self._start)

    def _start(self) -> None:
        self._thread = self._thread or system.start_thread(self._run, self._stop)

    def wake(self) -> None:
        """Have the loop make a pass."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def run(self, left: Callable[[], float | None], over: Callable[[], bool]) -> None:
        """Make the passes in the calling thread, where no other does, until it is over or the time has passed."""
        while True:
            rest = left()
            system.under(
                self._passing, self._pass, rest, limit=system.SLICE if rest is None else min(rest, system.SLICE)
            )
            if rest == 0 or over():
                return

    def _stop(self) -> None:
        self.exits = True
        self.wake()

    def _run(self) -> None:
        with self._passing:
            while not self.exits:
                try:
                    self._pass(None)
                except BaseException as error:  # of an array's library: it ends no loop that serves others
                    report(error)
            self._look()

    def _pass(self, timeout: float | None) -> None:
        if not system.holds(self._passing):
            return
        patience, timeline.patience.seconds = timeline.patience.seconds, 0.0  # a lock that a peer holds is tried again
        limits = [TICK_S if self._again else _LONG_S, *([] if timeout is None else [timeout])]
        try:
            for fd, events in self._epoll.poll(min(limits)):
                if (call := self._calls.get(fd)) is not None:
                    call(events)
            self._look()
            with contextlib.suppress(GpuInteropError):  # of the next call that needs it
                self.on_pass()
        finally:
            timeline.patience.seconds = patience

    def _look(self) -> None:
        if not system.holds(self._passing):
            return
        for _ in range(len(self._again)):
            if shown(self._again[0]) is False:
                self._again.append(self._again[0])
            self._again.popleft()  # after the call: an exception may strike in it

    def forget(self) -> None:
        """Close the descriptors: this is a child's copy."""
        self._epoll.close()
        os.close(self._wake)


class One(Generic[T]):
    """What a process has one of: a call returns it, and makes it on first use. A child of a fork makes its own."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self.made, self.lock = make, list[T](), threading.RLock()
        after_fork(self._forked)

    def __call__(self) -> T:
        return self.made[0] if self.made else system.under(self.lock, self._first)

    def _first(self) -> T:
        if not self.made:
            self.made.append(self._make())
        return self.made[0]

    def _forked(self) -> None:
        for one in self.made:
            one.forget()
        self.made.clear()
        self.lock._at_fork_reinit()  # type: ignore[attr-defined]


loop: Final = One(Loop)
"""This process's loop."""
