"""Streams and events.

The numbers 0, 1 and 2 are no streams by themselves: each names the default stream of whatever device is current in the
calling thread. A call on one of them would otherwise land on whichever GPU is current there, so it is made with the
stream's own device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Final, TypeVar

from gpuinterop.errors import InvalidArgumentError

from .driver import NOT_READY, Driver, Gpu, Made
from .error_hints import CAPTURE_IMPLICIT

_NON_BLOCKING: Final = 1  # hipStreamNonBlocking
_DISABLE_TIMING: Final = 2  # hipEventDisableTiming
_NORMAL, _HIGHEST = 0, -100  # a number beyond the device's range stands for the end of the range
_NULL, _LEGACY, _PER_THREAD = 0, 1, 2  # hipStreamLegacy, hipStreamPerThread

_T = TypeVar("_T")
_numbers = itertools.count()


class _Native(Made):
    """What the runtime knows as a stream."""

    __slots__ = ()
    back = "hipStreamDestroy"

    def is_whole(self) -> bool:
        """Whether it can be used again: it has not failed, and no capture was left in it."""
        if not self.made or self._left is not None:
            return False
        # Its work is done; but the query may be what finds that out, and then says so the next time.
        return self.gpu.driver.status("hipStreamQuery", self.handle)[0] in (0, NOT_READY)


Kept = list[tuple[int, _Native]]
"""Streams of ours that were closed, of one device and priority, for the next ones; each with its number.

In a call on a default stream AMD's runtime reads streams that another thread destroys meanwhile, and crashes
(hip_device.cpp:197). So a stream is destroyed only where it is of no more use.
"""


class Stream(Made):
    """A stream of one device, of ours or of others. One of ours has its native from `Kept`, and gives it back."""

    __slots__ = ("_kept", "_native", "pointer", "relative")

    def __init__(self, gpu: Gpu, kept: Kept | None = None) -> None:
        super().__init__(gpu)
        self._kept: Kept = [] if kept is None else kept
        self._native: Kept = []

    def take(self, priority: int) -> None:
        """The oldest that is kept: the runtime spreads streams over its hardware queues as they are made."""
        self._kept.sort(reverse=True)
        try:
            self._native.extend(starmap(self._kept.pop, ((),)))
        except IndexError:
            self._native.append((next(_numbers), _Native(self.gpu)))
            self._native[0][1].make("hipStreamCreateWithPriority", _NON_BLOCKING, priority)
        self.know(self._native[0][1].handle)

    def free(self) -> None:
        """Keep its native, once; or destroy it."""
        if not self._native:
            return
        native = self._native[0][1]
        if native.is_whole():
            self._kept.extend(starmap(self._native.pop, ((),)))
        else:
            native.free()

    def know(self, pointer: int) -> None:
        self.pointer = pointer
        self.relative = pointer <= _PER_THREAD
        # The name for the legacy stream is newer than the number 0, which every runtime knows.
        self.handle = _NULL if pointer == _LEGACY else pointer

    def run(self, work: Callable[[], _T]) -> _T:
        """For a call that a default stream may be given."""
        return self.gpu.run(work, aside=False) if self.relative else work()


def create(gpu: Gpu, kept: Kept, *, high_priority: bool) -> Stream:
    """``hipStreamCreateWithPriority`` with ``hipStreamNonBlocking``: one that blocks stalls the default stream."""
    stream = Stream(gpu, kept)
    return gpu.create(stream, partial(stream.take, _HIGHEST if high_priority else _NORMAL))


def adopt(driver: Driver, gpu: Gpu, pointer: int) -> Stream:
    """Wrap a stream, after a look whether it is this runtime's and this device's (``hipStreamGetDevice``).

    A stream that is being captured is not asked: the documentation does not say whether a capture survives that.
    """
    driver.check_runtime()
    stream = Stream(gpu)
    stream.know(pointer)
    if stream.relative or is_capturing(driver, stream):
        return stream
    ordinal = driver.call("hipStreamGetDevice", stream.handle)
    if ordinal != gpu.ordinal:
        raise InvalidArgumentError(
            "stream",
            f"{pointer:#x} is a stream of HIP device {ordinal}, and this is device {gpu.ordinal}: wrap it with "
            f"gpuinterop.device({ordinal}).",
        )
    return stream


def is_capturing(driver: Driver, stream: Stream) -> bool:
    """``hipStreamIsCapturing``; also where the capture was made invalid and is still to be ended."""
    code, status = stream.run(partial(driver.capture_status, stream.handle))
    if code == CAPTURE_IMPLICIT:  # a default stream, which waits for one that is being captured: it takes nothing else
        return True
    if code:
        raise driver.error("hipStreamIsCapturing", code)
    return status != 0


def synchronize(stream: Stream) -> None:
    stream.gpu.call("hipStreamSynchronize", stream.handle)


def is_idle(driver: Driver, stream: Stream) -> bool:
    (code,) = stream.gpu.run(partial(driver.status, "hipStreamQuery", stream.handle))
    return _reached(driver, "hipStreamQuery", code)


class Event(Made):
    """A point in a stream's work."""

    __slots__ = ()
    back = "hipEventDestroy"


def record(driver: Driver, stream: Stream) -> Event:
    """``hipEventCreateWithFlags``, ``hipEventRecord``."""
    event = Event(stream.gpu)

    def work() -> None:
        event.make("hipEventCreateWithFlags", _DISABLE_TIMING)
        driver.call("hipEventRecord", event.handle, stream.handle)

    return stream.gpu.create(event, work, aside=False)


def wait_event(stream: Stream, event: Event) -> None:
    stream.gpu.call("hipStreamWaitEvent", stream.handle, event.handle, 0, aside=False)


def is_done(driver: Driver, event: Event) -> bool:
    (code,) = driver.run(partial(driver.status, "hipEventQuery", event.handle))
    return _reached(driver, "hipEventQuery", code)


def _reached(driver: Driver, call: str, code: int) -> bool:
    if code == NOT_READY:
        return False
    if code:
        raise driver.error(call, code)
    return True
