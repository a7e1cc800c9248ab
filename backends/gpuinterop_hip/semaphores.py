"""External semaphores. On Windows only.

On Linux the import aborts the process or fails, and signal and wait return success and do nothing. So the capability
table refuses them all, and this module is not called there.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuinterop.errors import InvalidArgumentError, UnsupportedError
from gpuinterop.handles import AnySemaphoreHandle, Win32Handle
from gpuinterop.native_driver.driver import NativeDevice
from gpuinterop.native_driver.semaphores import Batch, ImportedSemaphore, NativeSemaphores
from gpuinterop.native_driver.streams import NativeStream

from .capabilities import nameless
from .streams import Streams


class Semaphores(Streams, NativeSemaphores):
    """External semaphores, and streams."""

    def import_semaphore(self, device: NativeDevice, handle: AnySemaphoreHandle) -> ImportedSemaphore:
        """``hipImportExternalSemaphore``; by handle, because HIP ignores the name of a semaphore."""
        if isinstance(handle, Win32Handle) and handle.name is not None:
            raise UnsupportedError(nameless(type(handle)), context="hip")
        return super().import_semaphore(device, handle)

    def signal(self, batch: Batch, stream: NativeStream, values: Sequence[int]) -> None:
        """``hipSignalExternalSemaphoresAsync``."""
        self._refuse_capture(stream)
        super().signal(batch, stream, values)

    def wait(self, batch: Batch, stream: NativeStream, values: Sequence[int], timeout_ms: int | None) -> None:
        """``hipWaitExternalSemaphoresAsync``, which has no timeouts."""
        self._refuse_capture(stream)
        super().wait(batch, stream, values, timeout_ms)

    def _refuse_capture(self, stream: NativeStream) -> None:
        if self.is_capturing(stream):  # HIP would not record the call, but run it at once (hip_stream_ops.cpp)
            raise InvalidArgumentError(
                "stream",
                "expected one that is not being captured, got one that is; HIP's graphs hold no semaphores: signal and "
                "wait before and after their launches.",
            )
