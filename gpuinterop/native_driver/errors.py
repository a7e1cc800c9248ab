"""Meanings of the errors that the drivers have in common, with the likely cause and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OUT_OF_MEMORY: Final = 2
NOT_READY: Final = 600
CAPTURE_IMPLICIT: Final = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, hipErrorStreamCaptureImplicit

_CAPTURE: Final = "this call is not allowed in the graph that is being captured; make it before or after the capture."
_LOST: Final = "earlier work on the device has failed and its context is lost: restart the process."
_NOT_EXPORTED: Final = "the object was not created for handles of this type."
NO_PEER: Final = "a device has no peer access to the device that holds the memory."

MEANINGS: Final[Mapping[tuple[str, int], str]] = {
    ("ImportExternalMemory", 801): "this driver does not import that type on this platform.",
    ("ImportExternalSemaphore", 801): "this driver does not import that type on this platform.",
    ("ExternalMemoryGetMappedBuffer", 1): "the range is larger than the exported object. Import with the allocation's "
    "size; the driver checks it only now.",
    ("ExternalMemoryGetMappedMipmappedArray", 1): "the layout does not fit the memory: pass the exporter's format, "
    "extent, levels, layers, usage, offset and dedicated=.",
    ("MemSetAccess", 801): NO_PEER,
    ("MemExportToShareableHandle", 1): _NOT_EXPORTED,
    ("MemExportToShareableHandle", 801): _NOT_EXPORTED,
    ("MemImportFromShareableHandle", 801): "this driver does not import handles of this type on this platform.",
    ("MemImportFromShareableHandle", 999): "no driver of this vendor on this machine exported the handle.",
}
"""Meaning of a status from a given call."""

OTHER_MEANINGS: Final[Mapping[int, str]] = {
    3: "the driver is not initialized in this process, and cannot be in a forked one: use the multiprocessing start "
    "method 'spawn'.",
    4: "the driver is shutting down because the process is ending.",
    700: _LOST,
    715: _LOST,
    719: _LOST,
    900: _CAPTURE,
    901: "an earlier call invalidated the graph's capture; end it and capture again.",
    905: "a captured stream cannot wait for work outside its capture; use semaphores, or record the event in it.",
    CAPTURE_IMPLICIT: "an operation on the default stream would wait for a stream that is being captured.",
    907: "an event that was recorded in a capture cannot be queried.",
}
"""Meaning of a status from any other call."""
