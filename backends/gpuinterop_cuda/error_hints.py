"""What the driver's errors mean, call by call, with the likely cause and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

NEWER_NAMES: Final[Mapping[int, str]] = {47: "CUDA_ERROR_MULTICAST_RESOURCE_FULL"}
"""Names that the oldest bindings in use (12.9) do not have."""

_STREAM: Final = "the stream must be of the device's primary context, and the semaphore alive."
_NOT_EXPORTED: Final = "the object was not made for handles of this type."
_CHANNEL: Final = (
    "fabric handles need an IMEX channel (/dev/nvidia-caps-imex-channels) that this process may open, "
    "the same one in every process that shares them, and the IMEX daemon running on each machine. VmmFd needs none, "
    "within one machine."
)
_IMEX: Final = f"no permission: {_CHANNEL}"
_NO_PEER: Final = "a device has no peer access to the device that the memory lies on."
_EXTERNAL: Final[Mapping[tuple[str, int], str]] = {
    ("cuImportExternalMemory", 999): "the descriptor is no memory that this GPU's driver has exported: it is another "
    "GPU's, another kind of object, or of another driver. Take the device that gpuinterop.match_device gives.",
    ("cuImportExternalSemaphore", 999): "the descriptor is no semaphore that a driver of this GPU has exported.",
    ("cuImportExternalMemory", 801): "this driver does not import that type on this platform.",
    ("cuImportExternalSemaphore", 801): "this driver does not import that type on this platform.",
    ("cuExternalMemoryGetMappedBuffer", 1): "the range reaches beyond the exported object. The size given to the "
    "import must be the allocation's; the driver does not check it before this.",
    ("cuExternalMemoryGetMappedMipmappedArray", 1): "the layout does not fit the memory: format, extent, levels, "
    "layers, usage and offset must be those of the exporter's image, and its memory dedicated where it was.",
    ("cuWaitExternalSemaphoresAsync", 1): _STREAM,
    ("cuSignalExternalSemaphoresAsync", 1): _STREAM,
    ("cuStreamBeginCapture", 900): "a default stream cannot be captured (create_stream makes one that can), nor can "
    "one that is being captured already.",
}
_ALLOCATIONS: Final[Mapping[tuple[str, int], str]] = {
    ("cuMemSetAccess", 101): f"{_NO_PEER} Of a multicast object: the device was not added to it.",
    ("cuMemSetAccess", 801): _NO_PEER,
    ("cuMemMap", 2): "no memory, or not enough of the driver's resources, to map it.",
    ("cuMemImportFromShareableHandle", 1): "the handle is no allocation or multicast object of its kind, or its "
    "exporter has released it.",
    ("cuMemImportFromShareableHandle", 999): "the handle is no allocation that a CUDA driver on this machine exported.",
    ("cuMemImportFromShareableHandle", 801): "this driver imports no handles of this type on this platform.",
    ("cuMemExportToShareableHandle", 1): _NOT_EXPORTED,
    ("cuMemExportToShareableHandle", 801): _NOT_EXPORTED,
    **dict.fromkeys(
        (("cuMemCreate", 800), ("cuMemExportToShareableHandle", 800), ("cuMemImportFromShareableHandle", 800)), _IMEX
    ),
}

_SIZES: Final = (
    "sizes and offsets must be multiples of the minimum granularity, and lie within the object and the memory"
)
_MANAGER: Final = (
    "where all of that is right, the fabric manager's state is corrupt: restart nvidia-fabricmanager and reset the GPUs"
)
_KEPT_OUT: Final = (
    "a container, a virtual machine or confidential computing may keep multicast from this process. "
    f"Where the object is for fabric handles: {_CHANNEL}"
)
_NO_MULTICAST: Final = (
    "no multicast here, although the device's attribute says that it has it: it takes GPUs behind one NVSwitch, the "
    "fabric manager running, no MIG, and no confidential computing. `gpuinterop selftest multicast` shows what works; "
    "one allocation that each device maps (Device.allocate(access=...)) works without."
)
_CLIQUE: Final = (
    "the device is not of the same NVLink clique or fabric manager partition as those added before it, or is none "
    "that takes part in multicast: nvidia-smi -q shows the clique of each."
)
_FULL: Final = (
    "the hardware's multicast resources are used up: close other multicast objects, of other processes too, or take "
    "fewer and larger ones."
)
_NO_MEMORY: Final = (
    "out of memory, or not enough resources to bind: close other multicast objects and allocations, of other processes "
    "too."
)
_SICK: Final = (
    "the system's configuration is in an illegal state: the fabric manager or an NVSwitch is unwell. See that "
    "nvidia-fabricmanager runs, and that nvidia-smi -q says Completed and Success of the fabric; restart the one, and "
    "reset the GPUs where the other is not so."
)
_STARTING: Final = (
    "system software is not ready: the fabric manager or IMEX daemon is still starting. That passes: try again; "
    "gpuinterop.exchange does, on all ranks together."
)

_BINDS: Final = ("cuMulticastBindMem", "cuMulticastBindMem_v2", "cuMulticastBindAddr", "cuMulticastBindAddr_v2")
_CALLS: Final = ("cuMulticastGetGranularity", "cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastUnbind", *_BINDS)
_MULTICAST: Final[Mapping[tuple[str, int], str]] = {
    ("cuMulticastGetGranularity", 1): "the number of devices or the handle types are none that the driver takes.",
    ("cuMulticastCreate", 1): "the size must be a multiple of the minimum granularity (Device.multicast_granularity) "
    f"and the number of devices one that the fabric has; {_MANAGER}.",
    ("cuMulticastAddDevice", 1): f"the device was added before, or all of the team were; {_MANAGER}.",
    ("cuMulticastUnbind", 1): "the range is none that was bound: an unbind must equal its bind.",
    **{
        (call, 1): f"{_SIZES}; the memory must be of a device of the team, bound nowhere else in the range, and "
        f"shareable (Device.allocate) where the object is; {_MANAGER}."
        for call in _BINDS
    },
    ("cuMulticastCreate", 2): _NO_MEMORY,
    ("cuMulticastAddDevice", 2): _NO_MEMORY,
    **{(call, 2): _NO_MEMORY for call in _BINDS},
    **{(call, 47): _FULL for call in _BINDS},
    ("cuMulticastCreate", 101): "more devices than the fabric has, or none of them takes part in multicast.",
    ("cuMulticastAddDevice", 101): _CLIQUE,
    ("cuMulticastUnbind", 101): "the device was not added to this multicast object.",
    **{(call, 101): f"the memory is of no device that was added to this object; else: {_CLIQUE}" for call in _BINDS},
    ("cuMemMap", 1): "the size is not that of the memory or multicast object, or no multiple of its minimum "
    f"granularity. Of a multicast object: {_MANAGER}.",
    ("cuMemMap", 101): f"the device that the memory lies on cannot be used here. Of a multicast object: {_CLIQUE}",
    ("cuMemMap", 401): _SICK,
    **{(call, 401): _SICK for call in _BINDS},
    ("cuMemMap", 800): f"no permission to map it. Of a multicast object: {_KEPT_OUT}",
    **{(call, 800): f"no permission: {_KEPT_OUT}" for call in _CALLS},
    ("cuMemMap", 801): f"the device maps no such memory. Of a multicast object: {_NO_MULTICAST}",
    **{(call, 801): _NO_MULTICAST for call in _CALLS},
    ("cuMemMap", 802): _STARTING,
    **{(call, 802): _STARTING for call in _BINDS},
}

MEANINGS: Final[Mapping[tuple[str, int], str]] = {**_EXTERNAL, **_ALLOCATIONS, **_MULTICAST}
"""What a code means where a call returns it."""

_CAPTURE: Final = "a graph is being captured that this call is not allowed in; make the call before or after."
_LOST: Final = "earlier work on the device has failed, and its context is lost: the process must be started again."
GENERAL: Final[Mapping[int, str]] = {
    3: "CUDA is not initialised in this process. After a fork it never can be: start processes with the "
    "multiprocessing start method 'spawn'.",
    4: "the driver is being shut down: the process is ending.",
    46: "the device is in use by another process, exclusively.",
    201: "no context is current, or it was destroyed.",
    700: _LOST,
    715: _LOST,
    719: _LOST,
    900: _CAPTURE,
    901: "the capture of a graph was made invalid by an earlier call; end it and capture again.",
    905: "a wait in a capture for work outside of it; use semaphores, or record the event in the same capture.",
    906: "an operation on the default stream would wait for a stream that is being captured.",
    907: "an event that was recorded in a capture has no state of its own.",
}
"""What a code means where the call gives it no meaning of its own."""
