"""The same work by hip-python alone, for ``gpuinterop bench``.

A program without gpuinterop does this at its fastest: it makes structs once, and looks at no status. What fails would
be fast, so each call is made and checked once before it is measured. HIP has no semaphores on Linux, so there are no
yardsticks for them.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any, Final

from gpuinterop.handles import OpaqueFd
from gpuinterop.native_driver import NON_BLOCKING, answer

from . import descriptors
from .driver import Driver
from .stream_memory import EVERY_BIT, GTE

_REGISTERED: Final = 1 | 2  # hipHostRegisterPortable, hipHostRegisterMapped


class Yardsticks:
    """One device's calls by hand.

    Parameters
    ----------
    ordinal : int
        Number of the device.
    """

    def __init__(self, ordinal: int) -> None:
        driver = Driver()
        self._hip, self._is_new = driver.api, driver.is_new
        self.check(self._hip.hipSetDevice(ordinal))

    check = staticmethod(answer)

    def stream(self) -> Any:
        """A non-blocking stream."""
        return self.check(self._hip.hipStreamCreateWithFlags(NON_BLOCKING))

    def synchronize(self, stream: Any) -> None:
        """Wait for the stream."""
        self.check(self._hip.hipStreamSynchronize(stream))

    def word(self, stream: Any) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
        """A 64-bit word in a page that is registered: how a stream writes it, and how it waits for it."""
        hip, check = self._hip, self.check
        write_value, wait_value = hip.hipStreamWriteValue64, hip.hipStreamWaitValue64
        page = mmap.mmap(-1, mmap.PAGESIZE)
        place = ctypes.addressof(ctypes.c_char.from_buffer(page))
        check(hip.hipHostRegister(place, mmap.PAGESIZE, _REGISTERED))
        word = int(check(hip.hipHostGetDevicePointer(place, 0)))

        def write(value: int, page: object = page) -> Any:  # `page` keeps the word
            return write_value(stream, word, value, 0)

        def wait(value: int, page: object = page) -> Any:
            return wait_value(stream, word, value, GTE, EVERY_BIT)

        check(write(1))
        check(wait(1))
        self.synchronize(stream)
        return write, wait

    def memory(self, size: int) -> Callable[[int], None]:
        """Make a call that imports, maps and closes a memory of `size` bytes from its file descriptor.

        HIP leaves the descriptor open, so `memory` needs no duplicate of it.
        """
        hip, check, is_new = self._hip, self.check, self._is_new
        desc = hip.hipExternalMemoryHandleDesc_st()
        desc.type = hip.hipExternalMemoryHandleType_enum(descriptors.MEMORY_TYPES[OpaqueFd])
        desc.size = size
        where = hip.hipExternalMemoryBufferDesc_st()
        where.size = size
        place = ctypes.c_void_p()
        out = ctypes.addressof(place)

        def once(fd: int) -> None:
            desc.handle.fd = fd
            if is_new:
                memory = check(hip.hipImportExternalMemory(desc))
            else:
                check(hip.hipImportExternalMemory(out, desc))
                memory = place.value
            pointer = check(hip.hipExternalMemoryGetMappedBuffer(memory, where))
            check(hip.hipFree(pointer))
            check(hip.hipDestroyExternalMemory(memory))

        return once
