"""Meanings of the runtime's errors, call by call, with the likely cause and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuinterop.native_driver.errors import OUT_OF_MEMORY

MEANINGS: Final[Mapping[tuple[str, int], str]] = {
    ("ImportExternalMemory", OUT_OF_MEMORY): "HIP returns this for every failed import: most likely this GPU's driver "
    "did not export the descriptor as memory (on Linux it must be a dma-buf). Use the device that "
    "gpuinterop.match_device returns.",
    ("ImportExternalMemory", 1): "this runtime does not import that type, or the descriptor is 0.",
    ("ImportExternalSemaphore", 1): "this runtime does not import that type: it accepts opaque Win32, KMT and D3D12 "
    "fence handles, without names.",
    ("ImportExternalSemaphore", 801): "HIP has no external semaphores on this platform.",
    ("SignalExternalSemaphoresAsync", 1): "a semaphore of the batch does not exist; those before it are signalled.",
    ("WaitExternalSemaphoresAsync", 1): "a semaphore of the batch does not exist; those before it are waited for.",
    ("StreamWaitValue64", 1): "HIP does not accept the address as memory that a stream can wait for. With "
    "GPU_STREAMOPS_CP_WAIT=1 in the environment it accepts only hipMallocSignalMemory: unset it.",
    ("StreamWriteValue64", 1): "HIP does not accept the address as memory that a stream can write.",
    ("MemImportFromShareableHandle", 1): "no HIP runtime on this machine exported the handle.",
    ("MemCreate", 801): "the runtime cannot create memory for handles of this type here.",
    ("MemHostRegister", 712): "this process has already registered the pages.",
}
OTHER_MEANINGS: Final[Mapping[int, str]] = {
    100: "the runtime finds no device.",
    101: "there is no device with this number.",
    400: "the stream, event or allocation was destroyed, or is not HIP's.",
    709: "the stream was destroyed, or is not HIP's.",
}
"""Meaning of a code from any other call."""
