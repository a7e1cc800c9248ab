"""Streams and events.

The numbers 0, 1 and 2 are no streams by themselves: each names the default stream of whatever context is current in
the calling thread. A call on one of them would otherwise land on whichever GPU is current there, so the backend makes
the device's own context current for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

from gpuinterop.errors import InvalidArgumentError

from .driver import NOT_READY, Context, Made, Room

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
        """``cuStreamGetId`` tells the stream's id, and makes a capture invalid (measured)."""
        driver = self.context.driver
        if driver.has_stream_id:
            code, *found = driver.status("cuStreamGetId", self.handle)
            if not code:
                self.key = ("id", int(found[0]))

    def run(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Call `work` on the stream: with its context current, if it is a default stream."""
        return self.context.run(work, *arguments, aside=False) if self.relative else work(*arguments)


class Event(Made):
    """A point in a stream's work."""

    __slots__ = ()
    back = "cuEventDestroy"


class Streams(Room):
    """Streams and events."""

    def create_stream(self, device: Context, *, high_priority: bool = False) -> Stream:
        """``cuStreamCreateWithPriority`` with ``CU_STREAM_NON_BLOCKING``: a blocking one stalls the default stream."""
        stream = Stream(device)

        def work() -> None:
            stream.make("cuStreamCreateWithPriority", _NON_BLOCKING, _HIGHEST if high_priority else _NORMAL)
            stream.know(int(stream.handle))
            stream.name()

        return device.create(stream, work)

    def adopt_stream(self, device: Context, pointer: int) -> Stream:
        """Wrap a stream; ``cuStreamGetCtx`` tells whether it is this device's.

        Nobody asks for the context of a stream that is being captured: the documentation does not say whether the
        capture survives that.
        """
        stream = Stream(device)
        stream.know(pointer)
        if stream.relative or self.is_capturing(stream):
            return stream
        stream.name()
        code, *found = self._driver.status("cuStreamGetCtx", stream.handle)
        if code or int(found[0]) == device.pointer:  # a green context's stream may have no context to tell
            return stream
        owner = ctypes.c_void_p(int(found[0]))
        ordinal = int(self._driver.run(self._driver.call, "cuCtxGetDevice", contexts=(owner,), aside=False))
        if ordinal != device.ordinal:
            raise InvalidArgumentError(
                "stream",
                f"{pointer:#x} is a stream of CUDA device {ordinal}, and this is device {device.ordinal}: wrap it with "
                f"gpuinterop.device({ordinal}).",
            )
        raise InvalidArgumentError(
            "stream",
            f"{pointer:#x} is a stream of another context than the device's primary one, which torch, CuPy, JAX and "
            "numba use: what is imported in one context cannot be used in another. Create it in the primary context.",
        )

    def stream_pointer(self, stream: Stream) -> int:
        return stream.pointer

    def stream_key(self, stream: Stream) -> Hashable:
        return stream.key

    def destroy_stream(self, stream: Stream) -> None:
        """``cuStreamDestroy``."""
        stream.release()

    def synchronize(self, stream: Stream) -> None:
        """``cuStreamSynchronize``."""
        stream.context.call("cuStreamSynchronize", stream.handle)

    def is_idle(self, stream: Stream) -> bool:
        """``cuStreamQuery``."""
        return self._is_reached("cuStreamQuery", stream.context.status("cuStreamQuery", stream.handle)[0])

    def is_capturing(self, stream: Stream) -> bool:
        """``cuStreamIsCapturing``; it also says so of an invalid capture that nobody has ended yet."""
        result = stream.run(self._driver.status, "cuStreamIsCapturing", stream.handle)
        if result[0] == _IMPLICIT:  # a default stream waits for one that is being captured: it takes nothing else
            return True
        return int(self._driver.check("cuStreamIsCapturing", result)) != 0

    def record(self, stream: Stream) -> Event:
        """``cuEventCreate`` makes an event, and ``cuEventRecord`` enqueues it."""
        event = Event(stream.context)

        def work() -> None:
            event.make("cuEventCreate", _DISABLE_TIMING)
            self._driver.call("cuEventRecord", event.handle, stream.handle)

        return stream.context.create(event, work, aside=False)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """``cuStreamWaitEvent``."""
        stream.context.call("cuStreamWaitEvent", stream.handle, event.handle, 0, aside=False)

    def is_done(self, event: Event) -> bool:
        """``cuEventQuery``."""
        return self._is_reached("cuEventQuery", self._driver.run(self._driver.status, "cuEventQuery", event.handle)[0])

    def destroy_event(self, event: Event) -> None:
        """``cuEventDestroy``."""
        event.release()

    def _is_reached(self, call: str, code: Any) -> bool:
        if code and code != NOT_READY:
            raise self._driver.error(call, code)
        return not code
