"""Meaning of the driver's errors, call by call, with the likely cause and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuinterop.native_driver.errors import NO_PEER

_STREAM: Final = "the stream must belong to the device's primary context, and the semaphore must be alive."
_CHANNEL: Final = (
    "fabric handles need an IMEX channel (/dev/nvidia-caps-imex-channels) that this process may open, "
    "the same one in every process that shares them, and the IMEX daemon running on each machine. Within one machine "
    "use VmmFd, which does not need them."
)
_SHARING: Final = ("MemCreate", "MemExportToShareableHandle", "MemImportFromShareableHandle")
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

_BINDS: Final = ("MulticastBindMem", "MulticastBindMem_v2", "MulticastBindAddr", "MulticastBindAddr_v2")
_CALLS: Final = ("MulticastGetGranularity", "MulticastCreate", "MulticastAddDevice", "MulticastUnbind", *_BINDS)
MEANINGS: Final[Mapping[tuple[str, int], str]] = {
    ("ImportExternalMemory", 999): "this GPU's driver has not exported the descriptor as memory: it is another "
    "GPU's, another kind of object, or another driver's. Use the device that gpuinterop.match_device returns.",
    ("ImportExternalSemaphore", 999): "a driver of this GPU has not exported the descriptor as a semaphore.",
    ("WaitExternalSemaphoresAsync", 1): _STREAM,
    ("SignalExternalSemaphoresAsync", 1): _STREAM,
    ("StreamBeginCapture", 900): "default streams, and streams that are being captured already, cannot be captured; "
    "use one of create_stream.",
    # Allocations.
    ("MemSetAccess", 101): f"{NO_PEER} For a multicast object: the device was not added to it.",
    ("MemMap", 2): "not enough memory or driver resources to map it.",
    ("MemImportFromShareableHandle", 1): "the handle is not an allocation or multicast object of its kind, or its "
    "exporter has released it.",
    **{(call, 800): f"no permission: {_CHANNEL}" for call in _SHARING},
    # Multicast objects.
    ("MulticastGetGranularity", 1): "the driver does not support this number of devices, or these handle types.",
    ("MulticastCreate", 1): "the size must be a multiple of the minimum granularity (Device.multicast_granularity) "
    f"and the fabric must have that many devices; {_MANAGER}.",
    ("MulticastAddDevice", 1): f"the device was added before, or all of the team were; {_MANAGER}.",
    ("MulticastUnbind", 1): "the range was not bound: an unbind must equal its bind.",
    **{
        (call, 1): f"{_SIZES}; the memory must be on a device of the team, that device must have no binding in the "
        f"range, and the memory must be shareable (Device.allocate) if the object is; {_MANAGER}."
        for call in _BINDS
    },
    **{(call, 2): _NO_MEMORY for call in ("MulticastCreate", "MulticastAddDevice", *_BINDS)},
    **{(call, 47): _FULL for call in _BINDS},
    ("MulticastCreate", 101): "the fabric has fewer devices, or they do not support multicast.",
    ("MulticastAddDevice", 101): _CLIQUE,
    ("MulticastUnbind", 101): "the device was not added to this multicast object.",
    **{(call, 101): f"the memory's device was not added to this object; else: {_CLIQUE}" for call in _BINDS},
    ("MemMap", 1): "the size is not that of the memory or multicast object, or not a multiple of its minimum "
    f"granularity. For a multicast object: {_MANAGER}.",
    ("MemMap", 101): f"the device that the memory lies on cannot be used here. For a multicast object: {_CLIQUE}",
    **{(call, 401): _SICK for call in ("MemMap", *_BINDS)},
    ("MemMap", 800): f"no permission to map it. For a multicast object: {_KEPT_OUT}",
    **{(call, 800): f"no permission: {_KEPT_OUT}" for call in _CALLS},
    ("MemMap", 801): f"the device cannot map such memory. For a multicast object: {_NO_MULTICAST}",
    **{(call, 801): _NO_MULTICAST for call in _CALLS},
    **{(call, 802): _STARTING for call in ("MemMap", *_BINDS)},
}
"""Meaning of a code from a given call."""

OTHER_MEANINGS: Final[Mapping[int, str]] = {
    46: "another process uses the device exclusively.",
    201: "no context is current, or it was destroyed.",
}
"""Meaning of a code from any other call."""
