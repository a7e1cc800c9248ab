"""External semaphores: the timeline of the host backend, a page that processes share."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import time
from collections.abc import Sequence
from typing import Any

from gpuinterop.backend import Backend
from gpuinterop.errors import DriverError, HandleError
from gpuinterop.handles import AnySemaphoreHandle, FdHandle

from .memory import libc, map_shared, sealed_size
from .streams import Stream

FUTEX = {"x86_64": 202, "aarch64": 98}


class Timeline:
    """The page: the value at 16, a sequence that waiters sleep on at 12; signallers lock the file."""

    def __init__(self, fd: int) -> None:
        if sealed_size(fd) != mmap.PAGESIZE:
            raise HandleError("handle: expected a timeline semaphore, got a memfd of another size.")
        self.address = map_shared(fd, mmap.PAGESIZE)
        self._fd = os.dup(fd)
        if ctypes.string_at(self.address, 8) not in (b"GIPTLSM1", b"GIPTLSMD"):
            self.unmap()
            raise HandleError("handle: expected a timeline semaphore, got a page that begins otherwise.")
        self.value = ctypes.c_uint64.from_address(self.address + 16)
        self._sequence = ctypes.c_uint32.from_address(self.address + 12)

    def signal(self, value: int) -> None:
        with open(f"/proc/self/fd/{self._fd}", "rb+", buffering=0) as own:
            fcntl.flock(own, fcntl.LOCK_EX)
            try:
                if value <= self.value.value:
                    raise DriverError("signal", errno.EINVAL, "NOT_GREATER")
                self.value.value = value
                self._sequence.value += 1
            finally:
                fcntl.flock(own, fcntl.LOCK_UN)
        libc.syscall(FUTEX[platform.machine()], ctypes.c_void_p(self.address + 12), 1, 0x7FFFFFFF, None, None, 0)

    def reached(self, value: int) -> bool:
        return bool(self.value.value >= value)

    def unmap(self) -> None:
        libc.munmap(self.address, mmap.PAGESIZE)
        os.close(self._fd)


class Semaphores(Backend):
    """External semaphores. In each docstring: the call that CUDA has for it."""

    def import_semaphore(self, device: int, handle: AnySemaphoreHandle) -> Any:
        """``cuImportExternalSemaphore``; the descriptor goes as in `import_memory`."""
        assert isinstance(handle, FdHandle)
        semaphore = Timeline(handle.fd)
        os.close(handle.fd)
        return semaphore

    def prepare(self, semaphores: Sequence[Any]) -> Any:
        """No call: what `signal` and `wait` pass to the driver, made once for a batch."""
        return tuple(semaphores)

    def signal(self, batch: Any, stream: Stream, values: Sequence[int]) -> None:
        """``cuSignalExternalSemaphoresAsync``."""

        def work() -> None:
            for semaphore, value in zip(batch, values, strict=True):
                semaphore.signal(value)

        stream.put(work)

    def wait(self, batch: Any, stream: Stream, values: Sequence[int], timeout_ms: int | None) -> None:
        """``cuWaitExternalSemaphoresAsync``."""

        def work() -> None:
            for semaphore, value in zip(batch, values, strict=True):
                while not semaphore.reached(value):
                    if stream.ended:
                        raise DriverError("wait", errno.ECANCELED, "ECANCELED")
                    time.sleep(1e-4)

        stream.put(work)

    def destroy_semaphore(self, semaphore: Any) -> None:
        """``cuDestroyExternalSemaphore``."""
        semaphore.unmap()
