"""The same work by hip-python alone, for ``gpuinterop bench``.

HIP has no semaphores on Linux, so there are no yardsticks for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from gpuinterop.handles import OpaqueFd
from gpuinterop.native_driver.yardsticks import NativeYardsticks

from .driver import Driver
from .table import HIP


class Yardsticks(NativeYardsticks):
    """One device's calls by hand.

    Parameters
    ----------
    ordinal : int
        Number of the device.
    """

    def __init__(self, ordinal: int) -> None:
        driver = Driver()
        super().__init__(HIP, driver.api)
        self._is_new = driver.is_new
        self.check(self.api.hipSetDevice(ordinal))

    def memory(self, size: int) -> Callable[[int], None]:
        """Make a call that imports, maps and closes a memory of `size` bytes from its file descriptor.

        HIP leaves the descriptor open, so `memory` needs no duplicate of it.
        """
        hip, check, is_new = self.api, self.check, self._is_new
        desc = hip.hipExternalMemoryHandleDesc_st()
        desc.type = hip.hipExternalMemoryHandleType_enum(HIP.memory_types[OpaqueFd])
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
