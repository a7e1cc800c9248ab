"""Meanings of the driver's errors, call by call, with the likely cause and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuinterop.native_driver.errors import NO_PEER

_STREAM: Final = "the stream must belong to the device's primary context, and the semaphore must still exist."
_CHANNEL: Final = (
    "fabric handles need an IMEX channel (/dev/nvidia-caps-imex-channels) that this process can open. Every process "
    "that shares them must use the same channel, and the IMEX daemon must run on each machine. Within one machine "
    "use VmmFd, which needs neither."
)
_SHARING: Final = ("MemCreate", "MemExportToShareableHandle", "MemImportFromShareableHandle")
_SIZES: Final = "sizes and offsets must be multiples of the minimum granularity and within the object and the memory"
_MANAGER: Final = (
    "if all of that is right, the fabric manager's state is corrupt: restart nvidia-fabricmanager and reset the GPUs"
)
_NOT_ALLOWED: Final = (
    "a container, a virtual machine or confidential computing may prevent multicast in this process. "
    f"If the object is for fabric handles: {_CHANNEL}"
)
_NO_MULTICAST: Final = (
    "multicast does not work here, although the device's attribute reports it: it needs GPUs on one NVSwitch and a "
    "running fabric manager, without MIG and confidential computing. `gpuinterop selftest multicast` shows what works. "
    "An allocation that several devices map (Device.allocate(access=...)) works without multicast."
)
_CLIQUE: Final = (
    "the device does not support multicast, or is not in the NVLink clique or fabric manager partition of the devices "
    "added before it: nvidia-smi -q shows each device's clique."
)
_FULL: Final = (
    "the hardware's multicast resources are used up: close other multicast objects, also in other processes, or use "
    "fewer and larger ones."
)
_NO_MEMORY: Final = (
    "out of memory, or not enough resources to bind: close other multicast objects and allocations, also in other "
    "processes."
)
_SICK: Final = (
    "the system's configuration is in an illegal state: the fabric manager or an NVSwitch has failed. If "
    "nvidia-fabricmanager does not run, restart it. If nvidia-smi -q does not report Completed and Success for the "
    "fabric, reset the GPUs."
)
_STARTING: Final = (
    "system software is not ready: the fabric manager or IMEX daemon is still starting. Try again later; "
    "gpuinterop.exchange retries on all ranks together."
)

_BINDS: Final = ("MulticastBindMem", "MulticastBindMem_v2", "MulticastBindAddr", "MulticastBindAddr_v2")
_CALLS: Final = ("MulticastGetGranularity", "MulticastCreate", "MulticastAddDevice", "MulticastUnbind", *_BINDS)
MEANINGS: Final[Mapping[tuple[str, int], str]] = {
    ("ImportExternalMemory", 999): "this GPU's driver did not export the descriptor as memory: it is from another GPU "
    "or driver, or another kind of object. Use the device that gpuinterop.match_device returns.",
    ("ImportExternalSemaphore", 999): "no driver of this GPU exported the descriptor as a semaphore.",
    ("WaitExternalSemaphoresAsync", 1): _STREAM,
    ("SignalExternalSemaphoresAsync", 1): _STREAM,
    ("StreamBeginCapture", 900): "default streams, and streams that are already being captured, cannot be captured; "
    "create a stream with create_stream.",
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
    ("MulticastAddDevice", 1): f"the device, or all devices of the team, were already added; {_MANAGER}.",
    ("MulticastUnbind", 1): "the range was not bound: an unbind must have the range of its bind.",
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
    ("MemMap", 1): "the size differs from the memory's or multicast object's, or is not a multiple of the minimum "
    f"granularity. For a multicast object: {_MANAGER}.",
    ("MemMap", 101): f"the device that holds the memory cannot be used here. For a multicast object: {_CLIQUE}",
    **{(call, 401): _SICK for call in ("MemMap", *_BINDS)},
    ("MemMap", 800): f"no permission to map it. For a multicast object: {_NOT_ALLOWED}",
    **{(call, 800): f"no permission: {_NOT_ALLOWED}" for call in _CALLS},
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
