"""What the runtime's errors mean, call by call, with the likely cause and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OUT_OF_MEMORY: Final = 2
CAPTURE_IMPLICIT: Final = 906  # hipErrorStreamCaptureImplicit

_NOT_EXPORTED: Final = "the allocation was not made for handles of this type."
MEANINGS: Final[Mapping[tuple[str, int], str]] = {
    ("hipImportExternalMemory", OUT_OF_MEMORY): "which HIP says of every import that fails, whatever the reason: most "
    "likely the descriptor is no memory that the driver of this GPU has exported (on Linux it must be a dma-buf). Take "
    "the device that gpuinterop.match_device gives.",
    ("hipImportExternalMemory", 1): "this runtime does not import that type, or the descriptor is 0.",
    ("hipImportExternalMemory", 801): "this runtime does not import that type on this platform.",
    ("hipImportExternalSemaphore", 1): "this runtime does not import that type: it takes opaque Win32, KMT and D3D12 "
    "fence handles, by handle.",
    ("hipImportExternalSemaphore", 801): "HIP has no external semaphores on this platform.",
    ("hipExternalMemoryGetMappedBuffer", 1): "the range reaches beyond the imported object. The size given to the "
    "import must be the allocation's; the driver does not check it before this.",
    ("hipExternalMemoryGetMappedMipmappedArray", 1): "the layout does not fit the memory: format, extent, levels, "
    "layers, usage and offset must be those of the exporter's image, and its memory dedicated where it was.",
    ("hipSignalExternalSemaphoresAsync", 1): "a semaphore of the batch is not alive; those before it are signalled.",
    ("hipWaitExternalSemaphoresAsync", 1): "a semaphore of the batch is not alive; those before it are waited for.",
    ("hipStreamWaitValue64", 1): "HIP does not know the address as memory that a stream may wait for. With "
    "GPU_STREAMOPS_CP_WAIT=1 in the environment it takes hipMallocSignalMemory only: unset it.",
    ("hipStreamWriteValue64", 1): "HIP does not know the address as memory that a stream may write.",
    ("hipMemSetAccess", 801): "a device has no peer access to the device that the memory lies on.",
    ("hipMemImportFromShareableHandle", 1): "the handle is no allocation that a HIP runtime on this machine exported.",
    (
        "hipMemImportFromShareableHandle",
        999,
    ): "the handle is no allocation that a HIP runtime on this machine exported.",
    ("hipMemExportToShareableHandle", 1): _NOT_EXPORTED,
    ("hipMemExportToShareableHandle", 801): _NOT_EXPORTED,
    ("hipMemCreate", 801): "the runtime makes no memory for handles of this type here.",
    ("hipMemImportFromShareableHandle", 801): "the runtime imports no handles of this type here.",
    ("hipHostRegister", 712): "the pages are registered already, by this process.",
}
_CAPTURE: Final = "a graph is being captured that this call is not allowed in; make the call before or after."
_LOST: Final = "earlier work on the device has failed, and is lost: the process must be started again."
GENERAL: Final[Mapping[int, str]] = {
    3: "HIP is not initialised in this process. After a fork it never can be: start processes with the "
    "multiprocessing start method 'spawn'.",
    4: "the runtime is being shut down: the process is ending.",
    100: "the runtime has no device that it may use.",
    101: "there is no device of this number.",
    400: "the stream, event or allocation was destroyed, or is none of HIP's.",
    700: _LOST,
    709: "the stream was destroyed, or is none of HIP's.",
    715: _LOST,
    719: _LOST,
    900: _CAPTURE,
    901: "the capture of a graph was made invalid by an earlier call; end it and capture again.",
    905: "a wait in a capture for work outside of it; use semaphores, or record the event in the same capture.",
    CAPTURE_IMPLICIT: "an operation on the default stream would wait for a stream that is being captured.",
    907: "an event that was recorded in a capture has no state of its own.",
}
