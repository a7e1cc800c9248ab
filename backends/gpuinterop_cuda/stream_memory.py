"""64-bit words that streams write and wait for (stream memory operations)."""

from __future__ import annotations

from ctypes import c_uint64
from typing import Final

from gpuinterop.backend import Address, StreamMemoryBackend

from .driver import Context, Made, Room
from .streams import Stream

# CUmemhostregister_flags: other contexts use the page too, and streams need its device address.
_PORTABLE, _DEVICE_MAP = 0x1, 0x2
_GEQ: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ
_WRITE_DEFAULT: Final = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: behind a fence to system scope


class Pin(Made):
    """Host memory that is registered with the driver."""

    back = "cuMemHostUnregister"
    blocks = True
    there: Address


class StreamMemory(Room, StreamMemoryBackend):
    """Words in pinned host memory."""

    def __init__(self) -> None:
        super().__init__()
        self._write = self._driver.entry("cuStreamWriteValue64")
        self._wait_for = self._driver.entry("cuStreamWaitValue64")

    def pin(self, device: Context, address: Address, size: int) -> tuple[Pin, Address]:
        """``cuMemHostRegister`` pins the pages, and ``cuMemHostGetDevicePointer`` returns their device address."""
        made = Pin(device)

        def work() -> None:
            made.add("cuMemHostRegister", address, size, _PORTABLE | _DEVICE_MAP)
            made.there = int(self._driver.call("cuMemHostGetDevicePointer", address, 0))

        return device.create(made, work), made.there

    def write_value(self, stream: Stream, word: Address, value: int) -> None:
        """``cuStreamWriteValue64``."""
        if code := stream.run(self._write, stream.argument, c_uint64(word), c_uint64(value), _WRITE_DEFAULT):
            raise self._driver.error("cuStreamWriteValue64", code)

    def wait_value(self, stream: Stream, word: Address, value: int) -> None:
        """``cuStreamWaitValue64``, whose comparison wraps around; so values stay below 2**63."""
        if code := stream.run(self._wait_for, stream.argument, c_uint64(word), c_uint64(value), _GEQ):
            raise self._driver.error("cuStreamWaitValue64", code)
