"""64-bit words that streams write and wait for. A store wakes no thread, so waits poll with growing pauses."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from gpuinterop import system
from gpuinterop.backend import Address, StreamMemoryBackend

from .streams import Device, Stream


class StreamMemory(StreamMemoryBackend):
    """Words in any memory of the process. The worker stores and polls them."""

    def pin(self, device: Device, address: Address, size: int) -> tuple[None, Address]:
        """Return the address, because the worker can access all memory of the process."""
        return None, address

    def unpin(self, pin: None) -> None:
        """Do nothing, like `pin`."""

    def write_value(self, stream: Stream, word: Address, value: int) -> None:
        """Let the worker store."""
        stream.submit(_write, (word, value))

    def wait_value(self, stream: Stream, word: Address, value: int) -> None:
        """Let the worker poll until the value is reached."""
        stream.submit(_wait, (word, value, stream.check))


def _write(address: int, value: int) -> None:
    system.fence()
    ctypes.c_uint64.from_address(address).value = value


def _wait(address: int, value: int, check: Callable[[], None]) -> None:
    """Block the calling thread without the GIL until the word is at least `value`."""
    word = ctypes.c_uint64.from_address(address)
    pauses = system.pauses()
    while word.value < value:
        check()
        if pause := next(pauses):
            time.sleep(pause)
    system.fence()
