"""External semaphores, on Windows only.

On Linux the import aborts the process or fails, and signal and wait return success without doing anything. So the
capability table refuses all of them, and this module is not called there.
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
        """``hipImportExternalSemaphore``. HIP ignores the name of a semaphore, so a name is refused."""
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
        if self.is_capturing(stream):  # HIP would run the call at once instead of recording it (hip_stream_ops.cpp)
            raise InvalidArgumentError(
                "stream",
                "expected one that is not being captured, got one that is; HIP's graphs hold no semaphores: signal and "
                "wait before and after their launches.",
            )
