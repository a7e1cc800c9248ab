"""Meaning of the runtime's errors, call by call, with the likely cause and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuinterop.native_driver import GENERAL, OUT_OF_MEMORY

_NOT_EXPORTED: Final = "the allocation was not created for handles of this type."
MEANINGS: Final[Mapping[tuple[str, int], str]] = {
    ("hipImportExternalMemory", OUT_OF_MEMORY): "HIP returns this for every failed import: most likely this GPU's "
    "driver has not exported the descriptor as memory (on Linux it must be a dma-buf). Use the device that "
    "gpuinterop.match_device returns.",
    ("hipImportExternalMemory", 1): "this runtime does not import that type, or the descriptor is 0.",
    ("hipImportExternalMemory", 801): "this runtime does not import that type on this platform.",
    ("hipImportExternalSemaphore", 1): "this runtime does not import that type: it takes opaque Win32, KMT and D3D12 "
    "fence handles, by handle.",
    ("hipImportExternalSemaphore", 801): "HIP has no external semaphores on this platform.",
    ("hipExternalMemoryGetMappedBuffer", 1): "the range is beyond the imported object. Import with the allocation's "
    "size, which the driver checks only now.",
    ("hipExternalMemoryGetMappedMipmappedArray", 1): "the layout does not fit the memory: format, extent, levels, "
    "layers, usage and offset must be those of the exporter's image, and dedicated= that of its memory.",
    ("hipSignalExternalSemaphoresAsync", 1): "a semaphore of the batch is not alive; those before it are signalled.",
    ("hipWaitExternalSemaphoresAsync", 1): "a semaphore of the batch is not alive; those before it are waited for.",
    ("hipStreamWaitValue64", 1): "HIP does not know the address as memory that a stream may wait for. With "
    "GPU_STREAMOPS_CP_WAIT=1 in the environment it takes hipMallocSignalMemory only: unset it.",
    ("hipStreamWriteValue64", 1): "HIP does not know the address as memory that a stream may write.",
    ("hipMemSetAccess", 801): "a device has no peer access to the device that the memory lies on.",
    ("hipMemImportFromShareableHandle", 1): "a HIP runtime of this machine has not exported the handle.",
    ("hipMemImportFromShareableHandle", 999): "a HIP runtime of this machine has not exported the handle.",
    ("hipMemExportToShareableHandle", 1): _NOT_EXPORTED,
    ("hipMemExportToShareableHandle", 801): _NOT_EXPORTED,
    ("hipMemCreate", 801): "the runtime cannot create memory for handles of this type here.",
    ("hipMemImportFromShareableHandle", 801): "the runtime cannot import handles of this type here.",
    ("hipHostRegister", 712): "this process has registered the pages already.",
}
OTHERS: Final[Mapping[int, str]] = {
    **GENERAL,
    100: "the runtime has no device that it may use.",
    101: "there is no device of this number.",
    400: "the stream, event or allocation was destroyed, or is not one of HIP.",
    709: "the stream was destroyed, or is not one of HIP.",
}
"""Meaning of a code from any other call."""
