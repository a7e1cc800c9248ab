"""Streams and events: a stream is a thread with a queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from gpuinterop.backend import Backend


class Event:
    """Set by its stream when earlier work is done."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.failure: BaseException | None = None


class Stream:
    """A thread with a queue; after a failure it does nothing more."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self.failure: BaseException | None = None
        self.ended = False
        self._queue: queue.SimpleQueue[Callable[[], None] | Event | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def record(self) -> Event:
        event = Event()
        self._queue.put(event)
        return event

    def end(self) -> None:
        self.ended = True
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Event):
                item.failure = self.failure
                item.done.set()
            elif self.failure is None:
                try:
                    item()
                except BaseException as error:
                    self.failure = error


class Caller(Stream):
    """The default stream: the calling thread."""

    def __init__(self) -> None:
        self.pointer = 0
        self.failure = None
        self.ended = False

    def put(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        event = Event()
        event.done.set()
        return event


class Streams(Backend):
    """Streams and events. Each docstring names CUDA's call for it."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {0: Caller()}
        self._next = 100

    def create_stream(self, device: int, *, high_priority: bool = False) -> Stream:
        """``cuStreamCreateWithPriority``."""
        self._next += 1
        stream = self._streams[self._next] = Stream(self._next)
        return stream

    def adopt_stream(self, device: int, pointer: int) -> Stream:
        """No call: wrap the pointer, which another library owns."""
        return self._streams[pointer]

    def stream_pointer(self, stream: Stream) -> int:
        """No call: the ``CUstream`` as a number."""
        return stream.pointer

    def destroy_stream(self, stream: Stream) -> None:
        """``cuStreamDestroy``."""
        del self._streams[stream.pointer]
        stream.end()

    def synchronize(self, stream: Stream) -> None:
        """``cuStreamSynchronize``."""
        self.wait_done(stream.record(), None)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """``cuStreamWaitEvent``."""

        def work() -> None:
            event.done.wait()
            if event.failure is not None:
                raise event.failure

        stream.put(work)

    def record(self, stream: Stream) -> Event:
        """``cuEventCreate`` and ``cuEventRecord``."""
        return stream.record()

    def is_done(self, event: Event) -> bool:
        """``cuEventQuery``."""
        if event.done.is_set() and event.failure is not None:
            raise event.failure
        return event.done.is_set()

    def destroy_event(self, event: Event) -> None:
        """``cuEventDestroy``."""
