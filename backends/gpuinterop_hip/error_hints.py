"""Meaning of the runtime's errors, call by call, with the likely cause and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuinterop.native_driver.errors import OUT_OF_MEMORY

MEANINGS: Final[Mapping[tuple[str, int], str]] = {
    ("ImportExternalMemory", OUT_OF_MEMORY): "HIP returns this for every failed import: most likely this GPU's "
    "driver has not exported the descriptor as memory (on Linux it must be a dma-buf). Use the device that "
    "gpuinterop.match_device returns.",
    ("ImportExternalMemory", 1): "this runtime does not import that type, or the descriptor is 0.",
    ("ImportExternalSemaphore", 1): "this runtime does not import that type: it takes opaque Win32, KMT and D3D12 "
    "fence handles, by handle.",
    ("ImportExternalSemaphore", 801): "HIP has no external semaphores on this platform.",
    ("SignalExternalSemaphoresAsync", 1): "a semaphore of the batch is not alive; those before it are signalled.",
    ("WaitExternalSemaphoresAsync", 1): "a semaphore of the batch is not alive; those before it are waited for.",
    ("StreamWaitValue64", 1): "HIP does not know the address as memory that a stream may wait for. With "
    "GPU_STREAMOPS_CP_WAIT=1 in the environment it takes hipMallocSignalMemory only: unset it.",
    ("StreamWriteValue64", 1): "HIP does not know the address as memory that a stream may write.",
    ("MemImportFromShareableHandle", 1): "a HIP runtime of this machine has not exported the handle.",
    ("MemCreate", 801): "the runtime cannot create memory for handles of this type here.",
    ("MemHostRegister", 712): "this process has registered the pages already.",
}
OTHER_MEANINGS: Final[Mapping[int, str]] = {
    100: "the runtime has no device that it may use.",
    101: "there is no device of this number.",
    400: "the stream, event or allocation was destroyed, or is not one of HIP.",
    709: "the stream was destroyed, or is not one of HIP.",
}
"""Meaning of a code from any other call."""
