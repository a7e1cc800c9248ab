"""Streams. They are kept for reuse, because AMD's runtime crashes when one is destroyed."""

from __future__ import annotations

import ctypes
import itertools
from typing import ClassVar

from gpuinterop.errors import InvalidArgumentError
from gpuinterop.native_driver.driver import NativeDevice, NativeObject
from gpuinterop.native_driver.errors import NOT_READY
from gpuinterop.native_driver.streams import NON_BLOCKING, NativeStream, NativeStreams

_PER_THREAD = 2  # hipStreamPerThread

_numbers = itertools.count()


class _RuntimeStream(NativeObject):
    """A stream of the runtime.

    In a call on a default stream, AMD's runtime reads streams that another thread is destroying, and crashes
    (hip_device.cpp:197). So a stream is destroyed only if it cannot be reused.
    """

    release_call = "StreamDestroy"

    def is_reusable(self) -> bool:
        """Whether the stream can be reused: it has not failed and has no open capture."""
        # The work is done, but the first query may only discover that and report it the second time.
        return self.made and self.device.driver.status("StreamQuery", self.handle) in (0, NOT_READY)


class Stream(NativeStream):
    """A stream of one device, created here or adopted. A created one uses an idle stream of the runtime."""

    _numbered: tuple[int, _RuntimeStream] | None = None

    def open(self, priority: int) -> None:
        """Use the oldest idle stream: the runtime assigns streams to hardware queues in order of creation."""
        self._idle_streams = self.device.driver.idle_streams[self.device.ordinal, priority]
        self._idle_streams.sort(reverse=True)
        try:
            self._numbered = self._idle_streams.pop()
        except IndexError:
            stream = _RuntimeStream(self.device)
            stream.make("StreamCreateWithPriority", NON_BLOCKING, priority)
            self._numbered = next(_numbers), stream
        self.set_pointer(self._numbered[1].handle)

    def free(self) -> None:
        """Keep the runtime's stream for reuse, or destroy it."""
        if (numbered := self._numbered) is None:
            return
        if numbered[1].is_reusable():
            self._idle_streams.append(numbered)
        else:
            numbered[1].free()
        self._numbered = None


class Streams(NativeStreams):
    """Streams and events."""

    stream_type: ClassVar[type[NativeStream]] = Stream

    def adopt_stream(self, device: NativeDevice, pointer: int) -> NativeStream:
        """Wrap a stream of this runtime."""
        self._driver.check_runtime()
        if pointer == _PER_THREAD:
            raise InvalidArgumentError(
                "stream",
                "expected a stream that outlives its thread, got 2: when a thread ends, HIP deletes that thread's "
                "default stream, and later reads it for every event that was recorded on it; pass 0, or create a "
                "stream with create_stream.",
            )
        return super().adopt_stream(device, pointer)

    def ordinal_of(self, stream: NativeStream) -> int:
        """``hipStreamGetDevice``: checks that the pointer is a stream, and returns its device.

        This must be the first call, because ``hipStreamIsCapturing`` and ``hipStreamQuery`` of 7.1 crash on any other
        pointer. It does not affect a capture (clr: hip_stream.cpp).
        """
        ordinal = ctypes.c_int()
        self._driver.call("StreamGetDevice", stream.argument, ctypes.byref(ordinal))
        return ordinal.value

    def blocks_default(self, stream: NativeStream) -> bool:
        """``hipStreamGetFlags``."""
        flags = ctypes.c_uint()
        return (
            stream.relative
            or bool(self._driver.status("StreamGetFlags", stream.argument, ctypes.byref(flags)))
            or flags.value != NON_BLOCKING
        )
