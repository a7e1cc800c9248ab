"""Streams and events.

The numbers 0, 1 and 2 are no streams by themselves: each names the default stream of whatever device is current in the
calling thread. A call on one of them would otherwise land on whichever GPU is current there, so it is made with the
stream's own device.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from gpuinterop.errors import InvalidArgumentError

from .driver import CAPTURE_IMPLICIT, NOT_READY, Driver, Gpu

_NON_BLOCKING: Final = 1  # hipStreamNonBlocking
_DISABLE_TIMING: Final = 2  # hipEventDisableTiming
_NORMAL, _HIGHEST = 0, -100  # a number beyond the device's range stands for the end of the range
_NULL, _LEGACY, _PER_THREAD = 0, 1, 2  # hipStreamLegacy, hipStreamPerThread


class Stream:
    """A stream of one device.

    The native one goes after the last of its events: AMD's runtime asks an event's stream whether it captures, and
    reads freed memory where that was destroyed (hip_event.cpp, ROCm/clr #157).
    """

    __slots__ = ("_holders", "_lock", "gpu", "handle", "pointer", "relative")

    def __init__(self, gpu: Gpu, pointer: int) -> None:
        self.gpu = gpu
        self.pointer = pointer
        self.relative = pointer <= _PER_THREAD
        # The name for the legacy stream is newer than the number 0, which every runtime knows.
        self.handle = _NULL if pointer == _LEGACY else pointer
        self._lock = threading.Lock()
        self._holders = 1  # the owner, and the events

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def let_go(self) -> bool:
        """Whether that was the last holder."""
        with self._lock:
            self._holders -= 1
            return not self._holders

    @contextmanager
    def on_device(self) -> Generator[None]:
        """For a call that a default stream may be given."""
        if self.relative:
            with self.gpu.current():
                yield
        else:
            yield


def create(driver: Driver, gpu: Gpu, *, high_priority: bool) -> Stream:
    """``hipStreamCreateWithPriority`` with ``hipStreamNonBlocking``: one that blocks stalls the default stream."""
    with gpu.aside():
        priority = _HIGHEST if high_priority else _NORMAL
        return Stream(gpu, int(driver.call("hipStreamCreateWithPriority", _NON_BLOCKING, priority)))


def adopt(driver: Driver, gpu: Gpu, pointer: int) -> Stream:
    """Wrap a stream, after a look whether it is this runtime's and this device's (``hipStreamGetDevice``).

    A stream that is being captured is not asked: the documentation does not say whether a capture survives that.
    """
    driver.check_runtime()
    stream = Stream(gpu, pointer)
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
    with stream.on_device():
        code, status = driver.capture_status(stream.handle)
    if code == CAPTURE_IMPLICIT:  # a default stream, which waits for one that is being captured: it takes nothing else
        return True
    if code:
        raise driver.error("hipStreamIsCapturing", code)
    return status != 0


def destroy(driver: Driver, stream: Stream) -> None:
    """``hipStreamDestroy``, now or with the last event."""
    if stream.let_go():
        with stream.gpu.aside():
            driver.call("hipStreamDestroy", stream.handle)


def synchronize(driver: Driver, stream: Stream) -> None:
    with stream.gpu.aside():
        driver.call("hipStreamSynchronize", stream.handle)


def is_idle(driver: Driver, stream: Stream) -> bool:
    with stream.gpu.aside():
        (code,) = driver.status("hipStreamQuery", stream.handle)
    return _reached(driver, "hipStreamQuery", code)


class Event:
    """A point in a stream's work; it holds the stream."""

    __slots__ = ("handle", "stream")

    def __init__(self, stream: Stream, handle: int) -> None:
        self.stream = stream
        self.handle = handle
        stream.hold()


def record(driver: Driver, stream: Stream) -> Event:
    """``hipEventCreateWithFlags``, ``hipEventRecord``."""
    with stream.gpu.current():
        event = Event(stream, int(driver.call("hipEventCreateWithFlags", _DISABLE_TIMING)))
        try:
            driver.call("hipEventRecord", event.handle, stream.handle)
        except BaseException:
            driver.undo("hipEventDestroy", event.handle)
            if stream.let_go():
                driver.undo("hipStreamDestroy", stream.handle)
            raise
    return event


def wait_event(driver: Driver, stream: Stream, event: Event) -> None:
    with stream.gpu.current():
        driver.call("hipStreamWaitEvent", stream.handle, event.handle, 0)


def is_done(driver: Driver, event: Event) -> bool:
    with driver.relaxed():
        (code,) = driver.status("hipEventQuery", event.handle)
    return _reached(driver, "hipEventQuery", code)


def destroy_event(driver: Driver, event: Event) -> None:
    try:
        with event.stream.gpu.aside():
            driver.call("hipEventDestroy", event.handle)
    finally:
        destroy(driver, event.stream)


def _reached(driver: Driver, call: str, code: int) -> bool:
    if code == NOT_READY:
        return False
    if code:
        raise driver.error(call, code)
    return True
