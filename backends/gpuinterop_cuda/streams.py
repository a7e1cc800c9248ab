"""Streams and events.

The numbers 0, 1 and 2 are no streams by themselves: each names the default stream of whatever context is current in
the calling thread. A call on one of them would otherwise land on whichever GPU is current there, so it is made with the
device's own context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Final, TypeVar

from gpuinterop.errors import InvalidArgumentError

from .driver import NOT_READY, Context, Driver, Made

_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
_NORMAL, _HIGHEST = 0, -100  # a number beyond the device's range stands for the end of the range
_DISABLE_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING
_IMPLICIT: Final = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
_LEGACY, _PER_THREAD = 1, 2  # CU_STREAM_LEGACY, CU_STREAM_PER_THREAD

_T = TypeVar("_T")


class Stream(Made):
    """A stream of one context, of ours or of others."""

    __slots__ = ("key", "pointer", "relative")
    back = "cuStreamDestroy"

    def know(self, pointer: int) -> None:
        self.pointer = pointer
        self.relative = pointer <= _PER_THREAD
        # 0 is the legacy stream everywhere but in the bindings, where a variable turns it into the thread's own.
        self.handle = self.context.driver.api.CUstream(pointer or _LEGACY)
        self.key: Hashable = pointer if pointer != _LEGACY else 0

    def name(self) -> None:
        """Ask for its id, which makes a capture invalid (measured)."""
        driver = self.context.driver
        if driver.has_stream_id:
            code, *found = driver.status("cuStreamGetId", self.handle)
            if not code:
                self.key = ("id", int(found[0]))

    def run(self, work: Callable[[], _T]) -> _T:
        """For a call that a default stream may be given."""
        return self.context.run(work, aside=False) if self.relative else work()


def create(context: Context, *, high_priority: bool) -> Stream:
    """``cuStreamCreateWithPriority`` with ``CU_STREAM_NON_BLOCKING``: one that blocks stalls the default stream."""
    stream = Stream(context)

    def work() -> None:
        stream.make("cuStreamCreateWithPriority", _NON_BLOCKING, _HIGHEST if high_priority else _NORMAL)
        stream.know(int(stream.handle))
        stream.name()

    return context.create(stream, work)


def adopt(driver: Driver, context: Context, pointer: int) -> Stream:
    """Wrap a stream, after a look whether it is this device's (``cuStreamGetCtx``).

    A stream that is being captured is not asked: the documentation does not say whether a capture survives that.
    """
    stream = Stream(context)
    stream.know(pointer)
    if stream.relative or is_capturing(driver, stream):
        return stream
    stream.name()
    result = driver.status("cuStreamGetCtx", stream.handle)
    if result[0] or int(result[1]) == context.pointer:  # a green context's stream may have no context to tell
        return stream
    owner = ctypes.c_void_p(int(result[1]))
    ordinal = int(driver.run(partial(driver.call, "cuCtxGetDevice"), (owner,), aside=False))
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
    result = stream.run(partial(driver.status, "cuStreamIsCapturing", stream.handle))
    if result[0] == _IMPLICIT:  # a default stream, which waits for one that is being captured: it takes nothing else
        return True
    return int(driver.check("cuStreamIsCapturing", result)) != 0


def synchronize(stream: Stream) -> None:
    stream.context.call("cuStreamSynchronize", stream.handle)


def is_idle(driver: Driver, stream: Stream) -> bool:
    return _reached(driver, "cuStreamQuery", stream.context.status("cuStreamQuery", stream.handle)[0])


class Event(Made):
    """A point in a stream's work."""

    __slots__ = ()
    back = "cuEventDestroy"


def record(driver: Driver, stream: Stream) -> Event:
    """``cuEventCreate``, ``cuEventRecord``."""
    event = Event(stream.context)

    def work() -> None:
        event.make("cuEventCreate", _DISABLE_TIMING)
        driver.call("cuEventRecord", event.handle, stream.handle)

    return stream.context.create(event, work, aside=False)


def wait_event(stream: Stream, event: Event) -> None:
    stream.context.call("cuStreamWaitEvent", stream.handle, event.handle, 0, aside=False)


def is_done(driver: Driver, event: Event) -> bool:
    return _reached(driver, "cuEventQuery", driver.run(partial(driver.status, "cuEventQuery", event.handle))[0])


def _reached(driver: Driver, call: str, code: Any) -> bool:
    if code == NOT_READY:
        return False
    if code:
        raise driver.error(call, code)
    return True
