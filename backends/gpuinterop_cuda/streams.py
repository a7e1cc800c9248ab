"""Streams and events.

The numbers 0, 1 and 2 each name the default stream of the calling thread's current context. A call on one of them would
otherwise use the GPU that is current there, so the backend makes the device's own context current for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable

from gpuinterop.errors import InvalidArgumentError
from gpuinterop.native_driver import CAPTURE_IMPLICIT, HIGHEST, NON_BLOCKING, NORMAL, Calls, NativeStream

from .driver import Context, Made, Room, at

_LEGACY, _PER_THREAD = 1, 2  # CU_STREAM_LEGACY, CU_STREAM_PER_THREAD


class Stream(Made, NativeStream):
    """A stream of one context, created here or adopted."""

    back = "cuStreamDestroy"

    def know(self, pointer: int) -> None:
        self.pointer = pointer
        self.relative = pointer <= _PER_THREAD
        # 0 is the legacy stream, except that an environment variable makes the bindings use the per-thread one.
        self.handle = self.device.driver.api.CUstream(pointer or _LEGACY)
        self.argument = at(pointer or _LEGACY)  # the same for ctypes
        self.key: Hashable = pointer if pointer != _LEGACY else 0

    def name(self) -> None:
        """``cuStreamGetId`` returns the stream's id, and makes a capture invalid (measured)."""
        driver = self.device.driver
        if driver.has_stream_id:
            code, *found = driver.status("cuStreamGetId", self.handle)
            if not code:
                self.key = ("id", int(found[0]))


class Event(Made):
    """A point in a stream's work."""

    back = "cuEventDestroy"


class Streams(Room):
    """Streams and events."""

    native = Calls._make("cu" + name for name in Calls._fields)
    event_type = Event
    create_event = "cuEventCreate"

    def __init__(self) -> None:
        super().__init__()
        self._is_capturing = self._driver.entry("cuStreamIsCapturing")

    def create_stream(self, device: Context, *, high_priority: bool = False) -> Stream:
        """``cuStreamCreateWithPriority`` with ``CU_STREAM_NON_BLOCKING``: a blocking one stalls the default stream."""
        stream = Stream(device)

        def work() -> None:
            stream.make("cuStreamCreateWithPriority", NON_BLOCKING, HIGHEST if high_priority else NORMAL)
            stream.know(int(stream.handle))
            stream.name()

        return device.create(stream, work)

    def adopt_stream(self, device: Context, pointer: int) -> Stream:
        """Wrap a stream; ``cuStreamGetCtx`` tells whether it belongs to this device.

        A stream that is being captured is not asked: the documentation does not say whether the capture survives that.
        """
        stream = Stream(device)
        stream.know(pointer)
        if stream.relative or self.is_capturing(stream):
            return stream
        stream.name()
        code, *found = self._driver.status("cuStreamGetCtx", stream.handle)
        if code or int(found[0]) == device.pointer:  # the call may fail for a green context's stream
            return stream
        ordinal = int(self._driver.run(int(found[0]), self._driver.call, "cuCtxGetDevice", aside=False))
        if ordinal != device.ordinal:
            raise InvalidArgumentError(
                "stream",
                f"expected a stream of device {device.ordinal}, got {pointer:#x} of CUDA device {ordinal}; wrap it by "
                f"gpuinterop.device({ordinal}).",
            )
        raise InvalidArgumentError(
            "stream",
            f"expected a stream of the device's primary context, which torch, CuPy, JAX and numba use, got {pointer:#x}"
            " of another context, which cannot use this context's imports; create it in the primary context.",
        )

    def stream_key(self, stream: Stream) -> Hashable:
        return stream.key

    def is_capturing(self, stream: Stream) -> bool:
        """``cuStreamIsCapturing``; an invalid capture that was not ended yet counts too."""
        status = ctypes.c_int()
        code = stream.run(self._is_capturing, stream.argument, ctypes.byref(status))
        if code == CAPTURE_IMPLICIT:  # a default stream that waits for a captured one refuses other calls
            return True
        if code:
            raise self._driver.error("cuStreamIsCapturing", code)
        return status.value != 0
