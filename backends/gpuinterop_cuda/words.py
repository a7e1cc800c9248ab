"""64-bit words that streams write and wait for (stream memory operations)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpuinterop.backend import Address

from .driver import Context, Driver
from .streams import Stream

# CUmemhostregister_flags: other contexts use the page as well, and streams want its address on the device.
_PORTABLE, _DEVICE_MAP = 0x1, 0x2
_GEQ: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ
_WRITE_DEFAULT: Final = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: behind a fence to system scope


@dataclass(frozen=True, slots=True)
class Pin:
    """Host memory that the driver knows."""

    context: Context
    address: Address


def pin(driver: Driver, context: Context, address: Address, size: int) -> tuple[Pin, Address]:
    """``cuMemHostRegister``, ``cuMemHostGetDevicePointer``."""
    with context.aside():
        driver.call("cuMemHostRegister", address, size, _PORTABLE | _DEVICE_MAP)
        try:
            pointer = driver.call("cuMemHostGetDevicePointer", address, 0)
        except BaseException:
            driver.undo("cuMemHostUnregister", address)
            raise
    return Pin(context, address), int(pointer)


def unpin(driver: Driver, pin: Pin) -> None:
    """``cuMemHostUnregister``."""
    with pin.context.aside():
        driver.call("cuMemHostUnregister", pin.address)


def write_value(driver: Driver, stream: Stream, word: Address, value: int) -> None:
    """``cuStreamWriteValue64``."""
    with stream.in_context():
        driver.call("cuStreamWriteValue64", stream.handle, word, value, _WRITE_DEFAULT)


def wait_value(driver: Driver, stream: Stream, word: Address, value: int) -> None:
    """``cuStreamWaitValue64``, greater or equal: cyclically, which is why values stay below 2**63."""
    with stream.in_context():
        driver.call("cuStreamWaitValue64", stream.handle, word, value, _GEQ)
