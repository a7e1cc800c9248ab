"""The same work with only hip-python, for ``gpuinterop bench``. Without semaphores, which HIP lacks on Linux."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from gpuinterop.handles import OpaqueFd
from gpuinterop.native_driver.yardsticks import NativeYardsticks

from .driver import Driver
from .table import HIP


class Yardsticks(NativeYardsticks):
    """Direct calls for the device `ordinal`."""

    def __init__(self, ordinal: int) -> None:
        driver = Driver()
        super().__init__(HIP, driver.api)
        self._is_new = driver.is_new
        self.check(self.api.hipSetDevice(ordinal))

    def memory(self, size: int) -> Callable[[int], None]:
        """Return a call that imports, maps and closes memory of `size` bytes. HIP leaves the descriptor open."""
        hip, check, is_new = self.api, self.check, self._is_new
        desc = hip.hipExternalMemoryHandleDesc_st()
        desc.type = hip.hipExternalMemoryHandleType_enum(HIP.memory_types[OpaqueFd])
        desc.size = size
        where = hip.hipExternalMemoryBufferDesc_st()
        where.size = size
        place = ctypes.c_void_p()
        out = ctypes.addressof(place)

        def run(fd: int) -> None:
            desc.handle.fd = fd
            if is_new:
                memory = check(hip.hipImportExternalMemory(desc))
            else:
                check(hip.hipImportExternalMemory(out, desc))
                memory = place.value
            pointer = check(hip.hipExternalMemoryGetMappedBuffer(memory, where))
            check(hip.hipFree(pointer))
            check(hip.hipDestroyExternalMemory(memory))

        return run
