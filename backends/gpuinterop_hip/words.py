"""64-bit words in host memory that streams write and wait for (HIP: stream memory operations).

AMD documents the address as memory of ``hipMallocSignalMemory``. By default the wait is a kernel of one thread that
spins on any address that HIP knows, so pinned host memory should do; no AMD GPU has shown it. With
``GPU_STREAMOPS_CP_WAIT=1`` in the environment the command processor waits instead, and takes signal memory only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpuinterop.backend import Address

from .driver import Driver, Gpu
from .streams import Stream

_PORTABLE, _MAPPED = 1, 2  # hipHostRegisterPortable, hipHostRegisterMapped
_GTE: Final = 0  # hipStreamWaitValueGte
_EVERY_BIT: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Pin:
    """Registered host memory."""

    gpu: Gpu
    address: Address


def pin(driver: Driver, gpu: Gpu, address: Address, size: int) -> tuple[Pin, Address]:
    """``hipHostRegister``, ``hipHostGetDevicePointer``."""
    with gpu.aside():
        driver.call("hipHostRegister", address, size, _PORTABLE | _MAPPED)
        try:
            there = int(driver.call("hipHostGetDevicePointer", address, 0))
        except BaseException:
            driver.undo("hipHostUnregister", address)
            raise
    return Pin(gpu, address), there


def unpin(driver: Driver, pinned: Pin) -> None:
    """``hipHostUnregister``."""
    with pinned.gpu.aside():
        driver.call("hipHostUnregister", pinned.address)


def write(driver: Driver, stream: Stream, word: Address, value: int) -> None:
    """``hipStreamWriteValue64``."""
    with stream.on_device():
        driver.call("hipStreamWriteValue64", stream.handle, word, value, 0)


def wait(driver: Driver, stream: Stream, word: Address, value: int) -> None:
    """``hipStreamWaitValue64``, until the word is `value` or more."""
    with stream.on_device():
        driver.call("hipStreamWaitValue64", stream.handle, word, value, _GTE, _EVERY_BIT)
