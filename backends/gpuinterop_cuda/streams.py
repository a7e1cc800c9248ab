"""Streams and events.

The numbers 0, 1 and 2 are no streams by themselves: each names the default stream of whatever context is current in
the calling thread. A call on one of them would otherwise land on whichever GPU is current there, so it is made with the
device's own context.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from gpuinterop.errors import InvalidArgumentError

from .driver import NOT_READY, Context, Driver

_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
_NORMAL, _HIGHEST = 0, -100  # a number beyond the device's range stands for the end of the range
_DISABLE_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING
_IMPLICIT: Final = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
_LEGACY, _PER_THREAD = 1, 2  # CU_STREAM_LEGACY, CU_STREAM_PER_THREAD


class Stream:
    """A stream of one context."""

    __slots__ = ("context", "handle", "pointer", "relative")

    def __init__(self, driver: Driver, context: Context, pointer: int) -> None:
        self.context = context
        self.pointer = pointer
        self.relative = pointer <= _PER_THREAD
        # 0 is the legacy stream everywhere but in the bindings, where a variable turns it into the thread's own.
        self.handle = driver.api.CUstream(pointer or _LEGACY)

    @contextmanager
    def in_context(self) -> Generator[None]:
        """For a call that a default stream may be given."""
        if not self.relative or self.context.is_current:
            yield
        else:
            with self.context.current():
                yield


def create(driver: Driver, context: Context, *, high_priority: bool) -> Stream:
    """``cuStreamCreateWithPriority`` with ``CU_STREAM_NON_BLOCKING``: one that blocks stalls the default stream."""
    with context.aside():
        priority = _HIGHEST if high_priority else _NORMAL
        return Stream(driver, context, int(driver.call("cuStreamCreateWithPriority", _NON_BLOCKING, priority)))


def adopt(driver: Driver, context: Context, pointer: int) -> Stream:
    """Wrap a stream, after a look whether it is this device's (``cuStreamGetCtx``).

    A stream that is being captured is not asked: the documentation does not say whether a capture survives that.
    """
    stream = Stream(driver, context, pointer)
    if stream.relative or is_capturing(driver, stream):
        return stream
    result = driver.status("cuStreamGetCtx", stream.handle)
    if result[0] or int(result[1]) == context.pointer:  # a green context's stream may have no context to tell
        return stream
    owner = result[1]
    driver.call("cuCtxPushCurrent", owner)
    try:
        ordinal = int(driver.call("cuCtxGetDevice"))
    finally:
        driver.undo("cuCtxPopCurrent")
    if ordinal != context.ordinal:
        raise InvalidArgumentError(
            "stream",
            f"{pointer:#x} is a stream of CUDA device {ordinal}, and this is device {context.ordinal}: wrap it with "
            f"gpuinterop.device({ordinal}).",
        )
    raise InvalidArgumentError(
        "stream",
        f"{pointer:#x} is a stream of another context than the device's primary one, which torch, CuPy, JAX and numba "
        "use: what is imported in one context cannot be used in another. Create it in the primary context.",
    )


def is_capturing(driver: Driver, stream: Stream) -> bool:
    """``cuStreamIsCapturing``; also where the capture was made invalid and is still to be ended."""
    with stream.in_context():
        result = driver.status("cuStreamIsCapturing", stream.handle)
    if result[0] == _IMPLICIT:  # a default stream, which waits for one that is being captured: it takes nothing else
        return True
    return int(driver.check("cuStreamIsCapturing", result)) != 0


def destroy(driver: Driver, stream: Stream) -> None:
    with stream.context.aside():
        driver.call("cuStreamDestroy", stream.handle)


def synchronize(driver: Driver, stream: Stream) -> None:
    with stream.context.aside():
        driver.call("cuStreamSynchronize", stream.handle)


def is_idle(driver: Driver, stream: Stream) -> bool:
    with stream.context.aside():
        (code,) = driver.status("cuStreamQuery", stream.handle)
    return _reached(driver, "cuStreamQuery", code)


class Event:
    """A point in a stream's work."""

    __slots__ = ("context", "handle")

    def __init__(self, context: Context, handle: Any) -> None:
        self.context = context
        self.handle = handle


def record(driver: Driver, stream: Stream) -> Event:
    """``cuEventCreate``, ``cuEventRecord``."""
    with stream.context.current():
        event = Event(stream.context, driver.call("cuEventCreate", _DISABLE_TIMING))
        try:
            driver.call("cuEventRecord", event.handle, stream.handle)
        except BaseException:
            driver.undo("cuEventDestroy", event.handle)
            raise
    return event


def wait_event(driver: Driver, stream: Stream, event: Event) -> None:
    with stream.context.current():
        driver.call("cuStreamWaitEvent", stream.handle, event.handle, 0)


def is_done(driver: Driver, event: Event) -> bool:
    with driver.relaxed():
        (code,) = driver.status("cuEventQuery", event.handle)
    return _reached(driver, "cuEventQuery", code)


def destroy_event(driver: Driver, event: Event) -> None:
    with event.context.aside():
        driver.call("cuEventDestroy", event.handle)


def _reached(driver: Driver, call: str, code: Any) -> bool:
    if code == NOT_READY:
        return False
    if code:
        raise driver.error(call, code)
    return True
