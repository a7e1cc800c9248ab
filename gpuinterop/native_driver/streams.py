"""Streams and events.

The number of a default stream means the default stream of the current context or device. So for a call on a default
stream, the backend makes the stream's device current; otherwise the call could use another GPU.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Hashable
from ctypes import byref, c_int
from functools import partial
from typing import Any, ClassVar, Final

from ..errors import InvalidArgumentError
from .driver import NativeBackend, NativeDevice, NativeObject, as_pointer
from .errors import CAPTURE_IMPLICIT, NOT_READY

NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING, hipStreamNonBlocking
_NORMAL, _HIGHEST = 0, -100  # priorities; drivers clamp them to the device's range
_DISABLE_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING, hipEventDisableTiming


class NativeEvent(NativeObject):
    """A point in a stream's work."""

    release_call = "EventDestroy"


class NativeStream(NativeObject):
    """A stream that was created here or adopted."""

    release_call = "StreamDestroy"
    key: Hashable
    pointer: int
    relative: bool  # whether this is a default stream
    run: Callable[..., Any]  # calls a function on the stream; for a default stream with its device current

    def open(self, priority: int) -> None:
        """Create the stream, non-blocking because a blocking stream would stall the default stream."""
        self.make("StreamCreateWithPriority", NON_BLOCKING, priority)
        self.set_pointer(self.handle)

    def set_pointer(self, pointer: int) -> None:
        table = self.device.driver.table
        self.pointer = pointer
        self.relative = pointer <= table.last_default_stream
        self.handle = self.key = table.default_stream if pointer <= 1 else pointer
        self.argument = as_pointer(self.handle)
        self.status = c_int()  # threads may share it, because each answer is about this stream
        self.place = byref(self.status)
        self.run = partial(self.device.run, relaxed=False) if self.relative else operator.call


class NativeStreams(NativeBackend):
    """Streams and events. Functions that are called often are looked up once."""

    stream_type: ClassVar[type[NativeStream]] = NativeStream

    def __init__(self) -> None:
        super().__init__()
        self._is_capturing = self._driver.function("StreamIsCapturing")

    def create_stream(self, device: NativeDevice, *, high_priority: bool = False) -> NativeStream:
        """``cuStreamCreateWithPriority`` with ``CU_STREAM_NON_BLOCKING``, ``hipStreamCreateWithPriority``."""
        stream = self.stream_type(device)
        return device.create(stream, stream.open, _HIGHEST if high_priority else _NORMAL)

    def adopt_stream(self, device: NativeDevice, pointer: int) -> NativeStream:
        """Wrap a stream. A stream of another device is refused."""
        stream = self.stream_type(device)
        stream.set_pointer(pointer)
        ordinal = device.ordinal if stream.relative else self.ordinal_of(stream)
        if ordinal != device.ordinal:
            raise InvalidArgumentError(
                "stream",
                f"expected a stream of device {device.ordinal}, got {pointer:#x} of {self._driver.table.title} device "
                f"{ordinal}; wrap it with gpuinterop.device({ordinal}).",
            )
        return stream

    @abstractmethod
    def ordinal_of(self, stream: NativeStream) -> int:
        """The ordinal of the device to which another library's stream belongs."""

    def stream_pointer(self, stream: NativeStream) -> int:
        return stream.pointer

    def stream_key(self, stream: NativeStream) -> Hashable:
        return stream.key

    def is_capturing(self, stream: NativeStream) -> bool:
        """``cuStreamIsCapturing``, ``hipStreamIsCapturing``; also True until an invalid capture is ended."""
        code = stream.run(self._is_capturing, stream.argument, stream.place)
        if code == CAPTURE_IMPLICIT:  # a default stream that would wait for a captured stream
            self._driver.forget_error()
            return True
        if code:
            raise self._driver.error("StreamIsCapturing", code)
        return stream.status.value != 0

    def synchronize(self, stream: NativeStream) -> None:
        """``cuStreamSynchronize``, ``hipStreamSynchronize``."""
        stream.device.call("StreamSynchronize", stream.handle)

    def is_idle(self, stream: NativeStream) -> bool:
        """``cuStreamQuery``, ``hipStreamQuery``."""
        return bool(stream.device.run(self._is_reached, "StreamQuery", stream.argument))

    def is_done(self, event: NativeEvent) -> bool:
        """``cuEventQuery``, ``hipEventQuery`` with any device current."""
        return bool(self._driver.run(None, self._is_reached, "EventQuery", event.handle))

    def _is_reached(self, name: str, what: Any) -> bool:
        code = self._driver.status(name, what)
        if code and code != NOT_READY:
            raise self._driver.error(name, code)
        return not code

    def record(self, stream: NativeStream) -> NativeEvent:
        """``cuEventCreate``, ``hipEventCreateWithFlags``; then ``cuEventRecord``, ``hipEventRecord``."""
        event = NativeEvent(stream.device)

        def work() -> None:
            event.make("EventCreate", _DISABLE_TIMING)
            self._driver.call("EventRecord", event.handle, stream.argument)

        return stream.device.create(event, work, relaxed=False)

    def wait_event(self, stream: NativeStream, event: NativeEvent) -> None:
        """``cuStreamWaitEvent``, ``hipStreamWaitEvent``."""
        stream.device.call("StreamWaitEvent", stream.argument, event.handle, 0, relaxed=False)
