"""Meaning of the driver's errors, call by call, with the likely cause and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuinterop.native_driver import GENERAL

NEWER_NAMES: Final[Mapping[int, str]] = {47: "CUDA_ERROR_MULTICAST_RESOURCE_FULL"}
"""Names that the oldest supported bindings (12.9.1) lack."""

_STREAM: Final = "the stream must belong to the device's primary context, and the semaphore must be alive."
_NOT_EXPORTED: Final = "the object was not created for handles of this type."
_CHANNEL: Final = (
    "fabric handles need an IMEX channel (/dev/nvidia-caps-imex-channels) that this process may open, "
    "the same one in every process that shares them, and the IMEX daemon running on each machine. Within one machine "
    "use VmmFd, which does not need them."
)
_SHARING: Final = ("cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle")
_NO_PEER: Final = "a device has no peer access to the device that the memory lies on."
_SIZES: Final = (
    "sizes and offsets must be multiples of the minimum granularity, and lie within the object and the memory"
)
_MANAGER: Final = (
    "if all of that is right, the fabric manager's state is corrupt: restart nvidia-fabricmanager and reset the GPUs"
)
_KEPT_OUT: Final = (
    "a container, a virtual machine or confidential computing may keep multicast from this process. "
    f"If the object is for fabric handles: {_CHANNEL}"
)
_NO_MULTICAST: Final = (
    "multicast does not work here, although the device's attribute reports it: it needs GPUs behind one NVSwitch and a "
    "running fabric manager, without MIG and confidential computing. `gpuinterop selftest multicast` shows what works. "
    "One allocation that each device maps (Device.allocate(access=...)) works without multicast."
)
_CLIQUE: Final = (
    "the device does not support multicast, or is not in the NVLink clique or fabric manager partition of the devices "
    "added before it: nvidia-smi -q shows the clique of each."
)
_FULL: Final = (
    "the hardware's multicast resources are used up: close other multicast objects, of other processes too, or use "
    "fewer and larger ones."
)
_NO_MEMORY: Final = (
    "out of memory, or not enough resources to bind: close other multicast objects and allocations, of other processes "
    "too."
)
_SICK: Final = (
    "the system's configuration is in an illegal state: the fabric manager or an NVSwitch has failed. Restart "
    "nvidia-fabricmanager if it does not run; reset the GPUs if nvidia-smi -q does not report Completed and Success of "
    "the fabric."
)
_STARTING: Final = (
    "system software is not ready: the fabric manager or IMEX daemon is still starting; try again later, as "
    "gpuinterop.exchange does on all ranks together."
)

_BINDS: Final = ("cuMulticastBindMem", "cuMulticastBindMem_v2", "cuMulticastBindAddr", "cuMulticastBindAddr_v2")
_CALLS: Final = ("cuMulticastGetGranularity", "cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastUnbind", *_BINDS)
MEANINGS: Final[Mapping[tuple[str, int], str]] = {
    ("cuImportExternalMemory", 999): "this GPU's driver has not exported the descriptor as memory: it is another "
    "GPU's, another kind of object, or another driver's. Use the device that gpuinterop.match_device returns.",
    ("cuImportExternalSemaphore", 999): "a driver of this GPU has not exported the descriptor as a semaphore.",
    ("cuImportExternalMemory", 801): "this driver does not import that type on this platform.",
    ("cuImportExternalSemaphore", 801): "this driver does not import that type on this platform.",
    ("cuExternalMemoryGetMappedBuffer", 1): "the range is beyond the exported object. Import with the allocation's "
    "size, which the driver checks only now.",
    ("cuExternalMemoryGetMappedMipmappedArray", 1): "the layout does not fit the memory: format, extent, levels, "
    "layers, usage and offset must be those of the exporter's image, and dedicated= that of its memory.",
    ("cuWaitExternalSemaphoresAsync", 1): _STREAM,
    ("cuSignalExternalSemaphoresAsync", 1): _STREAM,
    ("cuStreamBeginCapture", 900): "default streams, and streams that are being captured already, cannot be captured; "
    "use one of create_stream.",
    # Allocations.
    ("cuMemSetAccess", 101): f"{_NO_PEER} For a multicast object: the device was not added to it.",
    ("cuMemSetAccess", 801): _NO_PEER,
    ("cuMemMap", 2): "not enough memory or driver resources to map it.",
    ("cuMemImportFromShareableHandle", 1): "the handle is not an allocation or multicast object of its kind, or its "
    "exporter has released it.",
    ("cuMemImportFromShareableHandle", 999): "a CUDA driver of this machine has not exported the handle.",
    ("cuMemImportFromShareableHandle", 801): "this driver does not import handles of this type on this platform.",
    ("cuMemExportToShareableHandle", 1): _NOT_EXPORTED,
    ("cuMemExportToShareableHandle", 801): _NOT_EXPORTED,
    **{(call, 800): f"no permission: {_CHANNEL}" for call in _SHARING},
    # Multicast objects.
    ("cuMulticastGetGranularity", 1): "the driver does not support this number of devices, or these handle types.",
    ("cuMulticastCreate", 1): "the size must be a multiple of the minimum granularity (Device.multicast_granularity) "
    f"and the fabric must have that many devices; {_MANAGER}.",
    ("cuMulticastAddDevice", 1): f"the device was added before, or all of the team were; {_MANAGER}.",
    ("cuMulticastUnbind", 1): "the range was not bound: an unbind must equal its bind.",
    **{
        (call, 1): f"{_SIZES}; the memory must be on a device of the team, that device must have no binding in the "
        f"range, and the memory must be shareable (Device.allocate) if the object is; {_MANAGER}."
        for call in _BINDS
    },
    **{(call, 2): _NO_MEMORY for call in ("cuMulticastCreate", "cuMulticastAddDevice", *_BINDS)},
    **{(call, 47): _FULL for call in _BINDS},
    ("cuMulticastCreate", 101): "the fabric has fewer devices, or they do not support multicast.",
    ("cuMulticastAddDevice", 101): _CLIQUE,
    ("cuMulticastUnbind", 101): "the device was not added to this multicast object.",
    **{(call, 101): f"the memory's device was not added to this object; else: {_CLIQUE}" for call in _BINDS},
    ("cuMemMap", 1): "the size is not that of the memory or multicast object, or not a multiple of its minimum "
    f"granularity. For a multicast object: {_MANAGER}.",
    ("cuMemMap", 101): f"the device that the memory lies on cannot be used here. For a multicast object: {_CLIQUE}",
    **{(call, 401): _SICK for call in ("cuMemMap", *_BINDS)},
    ("cuMemMap", 800): f"no permission to map it. For a multicast object: {_KEPT_OUT}",
    **{(call, 800): f"no permission: {_KEPT_OUT}" for call in _CALLS},
    ("cuMemMap", 801): f"the device cannot map such memory. For a multicast object: {_NO_MULTICAST}",
    **{(call, 801): _NO_MULTICAST for call in _CALLS},
    **{(call, 802): _STARTING for call in ("cuMemMap", *_BINDS)},
}
"""Meaning of a code from a given call."""

OTHERS: Final[Mapping[int, str]] = {
    **GENERAL,
    46: "another process uses the device exclusively.",
    201: "no context is current, or it was destroyed.",
}
"""Meaning of a code from any other call."""
