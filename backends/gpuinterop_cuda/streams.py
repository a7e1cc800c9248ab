"""Streams. They have ids and belong to a context."""

from __future__ import annotations

from ctypes import byref, c_uint64, c_void_p
from typing import ClassVar

from gpuinterop.errors import InvalidArgumentError
from gpuinterop.native_driver.streams import NativeStream, NativeStreams

from .driver import Context


class Stream(NativeStream):
    """A stream of one context, created here or adopted."""

    def open(self, priority: int) -> None:
        super().open(priority)
        self.name()

    def name(self) -> None:
        """``cuStreamGetId``. It invalidates a capture (measured)."""
        driver, number = self.device.driver, c_uint64()
        if driver.has_stream_id and not driver.status("StreamGetId", self.argument, byref(number)):
            self.key = ("id", number.value)


class Streams(NativeStreams):
    """Streams and events."""

    stream_type: ClassVar[type[NativeStream]] = Stream

    def ordinal_of(self, stream: NativeStream) -> int:
        """``cuStreamGetCtx``: whether the stream belongs to this device.

        Not called during a capture, because it is not documented whether the capture survives it.
        """
        assert isinstance(stream, Stream)
        device, driver, context = stream.device, self._driver, c_void_p()
        assert isinstance(device, Context)
        if self.is_capturing(stream):
            return device.ordinal
        stream.name()
        code = driver.status("StreamGetCtx", stream.argument, byref(context))
        if code or context.value == device.pointer:  # the call may fail for a green context's stream
            return device.ordinal
        ordinal = driver.run(context.value, driver.ask, "CtxGetDevice", relaxed=False)
        if ordinal != device.ordinal:
            return int(ordinal)
        raise InvalidArgumentError(
            "stream",
            "expected a stream of the device's primary context, which torch, CuPy, JAX and numba use, got "
            f"{stream.pointer:#x} of another context, which cannot use this context's imports; create it in the "
            "primary context.",
        )
