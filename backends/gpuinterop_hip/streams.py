"""Streams and events.

The numbers 0 and 1 name the default stream of the calling thread's current device. A call on one of them would
otherwise use the GPU that is current there, so the backend makes the stream's own device current for it.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import defaultdict
from functools import partial

from gpuinterop.errors import InvalidArgumentError
from gpuinterop.native_driver import CAPTURE_IMPLICIT, HIGHEST, NON_BLOCKING, NORMAL, NOT_READY, Calls, NativeStream

from .driver import Gpu, Made, Room

_NULL, _LEGACY, _PER_THREAD = 0, 1, 2  # hipStreamLegacy, hipStreamPerThread

_numbers = itertools.count()


class _HipStream(Made):
    """A stream of the runtime."""

    back = "hipStreamDestroy"

    def is_whole(self) -> bool:
        """Whether the stream can be reused: it has not failed, and has no open capture."""
        if not self.made:
            return False
        # The work is done, but the first query may only discover that, and report it the second time.
        return self.device.driver.status("hipStreamQuery", self.handle)[0] in (0, NOT_READY)


Kept = list[tuple[int, _HipStream]]
"""Our closed streams, by device and priority, kept for reuse; each with its number.

In a call on a default stream, AMD's runtime reads streams that another thread is destroying, and crashes
(hip_device.cpp:197). So a stream is destroyed only if it cannot be reused.
"""


class Stream(Made, NativeStream):
    """A stream of one device, created here or adopted. The created one has a stream of the runtime, from `Kept`."""

    def __init__(self, gpu: Gpu, kept: Kept | None = None) -> None:
        super().__init__(gpu)
        self._kept: Kept = [] if kept is None else kept
        self._taken: tuple[int, _HipStream] | None = None

    def take(self, priority: int) -> None:
        """Take the oldest kept stream: the runtime spreads streams over its hardware queues in order of creation."""
        self._kept.sort(reverse=True)
        try:
            self._taken = self._kept.pop()
        except IndexError:
            made = _HipStream(self.device)
            made.make("hipStreamCreateWithPriority", NON_BLOCKING, priority)
            self._taken = next(_numbers), made
        self.know(self._taken[1].handle)

    def free(self) -> None:
        """Keep the runtime's stream for reuse, or destroy it."""
        if (kept := self._taken) is None:
            return
        if kept[1].is_whole():
            self._kept.append(kept)
        else:
            kept[1].free()
        self._taken = None

    def know(self, pointer: int) -> None:
        self.pointer = pointer
        self.relative = pointer <= _LEGACY
        # The name for the legacy stream is newer than the number 0, which every runtime accepts.
        self.handle = _NULL if pointer == _LEGACY else pointer


class Event(Made):
    """A point in a stream's work."""

    back = "hipEventDestroy"


class Streams(Room):
    """Streams and events."""

    native = Calls._make("hip" + name for name in Calls._fields)
    event_type = Event
    create_event = "hipEventCreateWithFlags"

    def __init__(self) -> None:
        super().__init__()
        self._kept_streams: defaultdict[tuple[int, bool], Kept] = defaultdict(list)

    def create_stream(self, device: Gpu, *, high_priority: bool = False) -> Stream:
        """``hipStreamCreateWithPriority`` with ``hipStreamNonBlocking``: a blocking one stalls the default stream."""
        stream = Stream(device, self._kept_streams[device.ordinal, high_priority])
        return device.create(stream, partial(stream.take, HIGHEST if high_priority else NORMAL))

    def adopt_stream(self, device: Gpu, pointer: int) -> Stream:
        """Wrap a stream; ``hipStreamGetDevice`` tells whether it is one, of this runtime and device.

        That call comes first: ``hipStreamIsCapturing`` and ``hipStreamQuery`` of 7.1 die of any other pointer. A
        capture does not mind it (clr: hip_stream.cpp).
        """
        self._driver.check_runtime()
        if pointer == _PER_THREAD:
            raise InvalidArgumentError(
                "stream",
                "expected a stream that outlives its thread, got 2: when a thread ends, HIP deletes the thread's own "
                "default stream, and later reads it for every event that was recorded there; pass 0, or work on a "
                "stream of create_stream.",
            )
        stream = Stream(device)
        stream.know(pointer)
        if stream.relative:
            return stream
        ordinal = self._driver.call("hipStreamGetDevice", stream.handle)
        if ordinal != device.ordinal:
            raise InvalidArgumentError(
                "stream",
                f"expected a stream of device {device.ordinal}, got {pointer:#x} of HIP device {ordinal}; wrap it by "
                f"gpuinterop.device({ordinal}).",
            )
        return stream

    def blocks_default(self, stream: Stream) -> bool:
        """``hipStreamGetFlags``."""
        if stream.relative:
            return True
        flags = ctypes.c_uint()
        code = self._driver.library.hipStreamGetFlags(ctypes.c_void_p(stream.handle), ctypes.byref(flags))
        return bool(code) or flags.value != NON_BLOCKING

    def stream_key(self, stream: Stream) -> int:
        return stream.handle

    def is_capturing(self, stream: Stream) -> bool:
        """``hipStreamIsCapturing``; an invalid capture that was not ended yet counts too."""
        code, status = stream.run(self._driver.capture_status, stream.handle)
        if code == CAPTURE_IMPLICIT:  # a default stream that waits for a captured one refuses other calls
            return True
        if code:
            raise self._driver.error("hipStreamIsCapturing", code)
        return bool(status)
