"""External semaphores: the host backend's timeline, a page that processes share."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from gpuinterop import system, timeline
from gpuinterop.backend import Backend
from gpuinterop.errors import DriverError, HandleError
from gpuinterop.handles import AnySemaphoreHandle, FdHandle

from .streams import Stream


class Timeline(timeline.Page):
    """The mapped page and its descriptor. With a driver, use the driver's object instead."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, system.map_shared(fd, system.PAGE), "the timeline")
        self.fd = fd

    def unmap(self) -> None:
        system.unmap(self.address, system.PAGE)
        os.close(self.fd)


class Semaphores(Backend):
    """External semaphores. Each docstring names CUDA's call for it."""

    def import_semaphore(self, device: int, handle: AnySemaphoreHandle) -> Any:
        """``cuImportExternalSemaphore``; it owns the descriptor, as `import_memory` does: the timeline keeps it."""
        assert isinstance(handle, FdHandle)
        if not timeline.is_ours(handle.fd):
            raise HandleError("handle: expected a timeline semaphore of gpuinterop, got another kind of file.")
        return Timeline(handle.fd)

    def prepare(self, semaphores: Sequence[Any]) -> Any:
        """No call: make the arguments of `signal` and `wait` once for a batch."""
        return tuple(semaphores)

    def signal(self, batch: Any, stream: Stream, values: Sequence[int]) -> None:
        """``cuSignalExternalSemaphoresAsync``."""

        def work() -> None:
            for semaphore, value in zip(batch, values, strict=True):
                semaphore.signal(value)

        stream.put(work)

    def wait(self, batch: Any, stream: Stream, values: Sequence[int], timeout_ms: int | None) -> None:
        """``cuWaitExternalSemaphoresAsync``."""

        def check() -> None:
            if stream.ended:
                raise DriverError("wait", errno.ECANCELED, "ECANCELED")

        def work() -> None:
            for semaphore, value in zip(batch, values, strict=True):
                semaphore.wait(value, None, check)

        stream.put(work)

    def destroy_semaphore(self, semaphore: Any) -> None:
        """``cuDestroyExternalSemaphore``."""
        semaphore.unmap()
