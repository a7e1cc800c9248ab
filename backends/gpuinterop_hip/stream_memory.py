"""64-bit words in host memory that streams write and wait for (HIP: stream memory operations).

AMD documents the address as memory of ``hipMallocSignalMemory``. By default the wait is a kernel of one thread that
spins on any address that HIP knows, so pinned host memory should work; no AMD GPU has shown it. With
``GPU_STREAMOPS_CP_WAIT=1`` in the environment the command processor waits instead, and accepts only signal memory.
"""

from __future__ import annotations

from typing import Final

from gpuinterop.backend import Address, StreamMemoryBackend

from .driver import Gpu, Made, Room
from .streams import Stream

_PORTABLE, _MAPPED = 1, 2  # hipHostRegisterPortable, hipHostRegisterMapped
GTE: Final = 0  # hipStreamWaitValueGte
EVERY_BIT: Final = 2**64 - 1


class Pin(Made):
    """Host memory that is registered with the runtime."""

    back = "hipHostUnregister"
    blocks = True
    there: Address


class StreamMemory(Room, StreamMemoryBackend):
    """Words in pinned host memory."""

    def pin(self, device: Gpu, address: Address, size: int) -> tuple[Pin, Address]:
        """``hipHostRegister`` pins the pages, and ``hipHostGetDevicePointer`` returns their device address."""
        made = Pin(device)

        def work() -> None:
            made.add("hipHostRegister", address, size, _PORTABLE | _MAPPED)
            made.there = int(self._driver.call("hipHostGetDevicePointer", address, 0))

        return device.create(made, work), made.there

    def write_value(self, stream: Stream, word: Address, value: int) -> None:
        """``hipStreamWriteValue64``."""
        stream.run(self._driver.call, "hipStreamWriteValue64", stream.handle, word, value, 0)

    def wait_value(self, stream: Stream, word: Address, value: int) -> None:
        """``hipStreamWaitValue64`` waits until the word is `value` or more."""
        stream.run(self._driver.call, "hipStreamWaitValue64", stream.handle, word, value, GTE, EVERY_BIT)
