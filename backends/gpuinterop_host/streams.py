"""Streams and events. A stream is an ordered queue with a daemon thread; the default stream is the calling thread.

If an operation fails, its stream keeps the error and skips later operations, even signals, so that no other process
treats unfinished work as finished. Later events are done with that error, and `synchronize` always raises it.

A stream without a worker (it was destroyed, the interpreter is exiting, or the worker stayed in the parent of a fork)
refuses work with `ResourceClosedError`, so that skipped work does not count as done.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias

from gpuinterop import system
from gpuinterop.backend import Address, Backend
from gpuinterop.errors import InvalidArgumentError, ResourceClosedError, again

FIRST_POINTER: Final = 16  # CUDA and HIP use smaller numbers for their default streams; 0 is the default one here


@dataclass(frozen=True, slots=True)
class Device:
    """The only device."""

    ordinal: int


class Event:
    """An event. It is done once, with or without a failure. Only waiters have locks, so an event is cheap to create."""

    __slots__ = ("_waiters", "done", "failure")

    def __init__(self, *, done: bool = False) -> None:
        self.done = done
        self.failure: BaseException | None = None
        self._waiters: list[LockType] = []

    def finish(self, failure: BaseException | None) -> None:
        self.failure = failure
        self.done = True
        for waiter in tuple(self._waiters):
            waiter.release()

    def query(self) -> bool:
        """Whether the event is done; raises the failure."""
        if self.done and self.failure is not None:
            raise again(self.failure)
        return self.done

    def wait(self, timeout: float | None) -> bool:
        """Block until done; False after `timeout` seconds. Raises the failure."""
        if not self.done and not self._block(-1 if timeout is None else timeout):
            return False
        return self.query()

    def join(self, check: Callable[[], None]) -> None:
        """Block until done, in cancellable slices. Raises the failure, or the error of `check`."""
        while not self.done and not self._block(system.SLICE):
            check()
        self.query()

    def _block(self, timeout: float) -> bool:
        gate = allocate_lock()
        gate.acquire()
        self._waiters.append(gate)
        try:
            # If `finish` ran between the caller's check and the append, it does not open the gate.
            if self.done:
                return True
            return gate.acquire(timeout=timeout) or self.done
        finally:
            self._waiters.remove(gate)


Work: TypeAlias = "tuple[Callable[..., Any], tuple[Any, ...]]"

_ENTRY: Final = (None,)


class Stream:
    """A worker thread with a queue."""

    thread: system.Thread

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self._queue: SimpleQueue[Work | Event | None] = SimpleQueue()
        # One entry for each unfinished operation. A deque's += and pop are atomic; a counter's += is not.
        self._unfinished: deque[None] = deque()
        self._refusal = ""  # why the stream refuses work; set before the queued None that ends the worker
        self._ended = False
        self._failure: BaseException | None = None

    def submit(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        refusal = self._refusal
        if refusal:
            raise ResourceClosedError(refusal)
        unfinished, put, work = self._unfinished, self._queue.put, (function, arguments)
        unfinished += _ENTRY  # no call between this and `put`, or an interrupt could leave an entry without work
        put(work)
        if self._refusal:  # since the check above; the worker may or may not have seen the work before its end
            if self._ended:
                self._refuse()
            raise ResourceClosedError(self._refusal)

    def is_idle(self) -> bool:
        """Whether everything submitted so far is finished. Raises the failure."""
        if self._unfinished:
            return False
        if self._failure is not None:
            raise again(self._failure)
        return True

    def record(self) -> Event:
        """Return an event that the worker sets."""
        if self._refusal:
            raise ResourceClosedError(self._refusal)
        if not (self._unfinished or self._failure):
            return Event(done=True)  # the worker is idle and need not run
        event = Event()
        self._queue.put(event)
        if self._ended:
            self._refuse()
        return event

    def synchronize(self) -> None:
        """Block until everything submitted so far is finished."""
        self.record().wait(None)

    def check(self) -> None:
        """Raise if the stream's thread must stop waiting."""
        system.check_exit()
        if self._refusal:
            raise ResourceClosedError(f"the host stream {self.pointer} was destroyed with work pending.")

    def destroy(self) -> None:
        """End the worker. Cancel its pending wait and skip the operations after it in the queue."""
        self._refusal = self._refusal or f"the host stream {self.pointer} was destroyed."
        _live.pop(self.pointer, None)
        self._queue.put(None)

    def _exit(self) -> None:
        self._refusal = self._refusal or f"the host stream {self.pointer} has ended: the interpreter is exiting."
        self._queue.put(None)

    def _run(self) -> None:
        try:
            get = self._queue.get
            while (item := get()) is not None:
                if isinstance(item, Event):
                    item.finish(self._failure)
                else:
                    if self._failure is None:
                        try:
                            function, arguments = item
                            function(*arguments)
                        except BaseException as error:
                            self._failure = error
                    self._unfinished.pop()
                item = function = arguments = None  # type: ignore[assignment]  # keep nothing alive while idle
        finally:  # if memory runs out, any line above may raise
            self._refusal = self._refusal or "the host stream has ended: its thread ran out of memory; make a new one."
            self._ended = True
            self._refuse()

    def _refuse(self) -> None:
        """Fail the operations that are queued after the worker's end, so that no thread waits for them."""
        failure = self._failure or ResourceClosedError(self._refusal)
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                return
            if isinstance(item, Event):
                item.finish(failure)
            elif item is not None:
                self._unfinished.pop()

    def _forked(self) -> None:
        self._refusal = f"the host stream {self.pointer} belongs to the parent process; create a stream after the fork."
        self._failure = ResourceClosedError(self._refusal)
        self._ended = True
        self._refuse()  # no worker in the child finishes the queued events
        # The copy of the queue's lock may stay held, because its thread is in the parent: get_nowait does not wait.
        self._queue = SimpleQueue()
        self._unfinished = deque()


class CallingThread(Stream):
    """The default stream. The caller runs each operation at once.

    NumPy and other CPU libraries work in the calling thread, so this stream is ordered with their work. A failure is
    raised at once and does not stop the stream.
    """

    def submit(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        function(*arguments)


_pointers = itertools.count(FIRST_POINTER)
_live: dict[int, Stream] = {}


class Streams(Backend):
    """Streams are threads. The default stream is the calling thread."""

    _calling_thread = CallingThread(0)

    def create_stream(self, device: Device, *, high_priority: bool = False) -> Stream:
        """Start a worker thread (``pthread_create``)."""
        stream = Stream(next(_pointers))
        stream.thread = system.start_thread(stream._run, stream._exit)
        _live[stream.pointer] = stream
        return stream

    def adopt_stream(self, device: Device, pointer: int) -> Stream:
        """Return the stream with this number."""
        if pointer == 0:
            return self._calling_thread
        if (stream := _live.get(pointer)) is not None:
            return stream
        raise InvalidArgumentError(
            "stream",
            f"expected 0, the calling thread, or the `ptr` of an open stream of the host's create_stream(), got "
            f"{pointer:#x}.",
        )

    def stream_pointer(self, stream: Stream) -> int:
        """The stream's number."""
        return stream.pointer

    destroy_stream: Any = staticmethod(Stream.destroy)
    is_idle: Any = staticmethod(Stream.is_idle)
    synchronize: Any = staticmethod(Stream.synchronize)
    record: Any = staticmethod(Stream.record)
    is_done: Any = staticmethod(Event.query)
    wait_done: Any = staticmethod(Event.wait)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let the worker wait for the event."""
        stream.submit(event.join, (stream.check,))

    def destroy_event(self, event: Event) -> None:
        """Do nothing, because an event holds no resources."""

    def copy(self, stream: Stream, target: Address, source: Address, size: int) -> None:
        """Let the worker copy (``memmove``)."""
        stream.submit(ctypes.memmove, (target, source, size))

    def fill(self, stream: Stream, target: Address, byte: int, size: int) -> None:
        """Let the worker fill (``memset``)."""
        stream.submit(ctypes.memset, (target, byte, size))


def _forked() -> None:
    for stream in _live.copy().values():
        stream._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
