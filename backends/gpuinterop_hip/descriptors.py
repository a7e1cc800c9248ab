"""HIP's descriptors of handles: the number of each type, and the member of the union that it sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuinterop import handles
from gpuinterop.handles import Handle
from gpuinterop.native_driver import describe, number_of

# The numbers of hipExternalMemoryHandleType. The runtime refuses all others, although its enum names them.
MEMORY_TYPES: Final[Mapping[type[Handle], int]] = {
    handles.OpaqueFd: 1,
    handles.DmaBufFd: 1,  # HIP treats an opaque descriptor as a dma-buf
    handles.OpaqueWin32: 2,
    handles.OpaqueWin32Kmt: 3,
    handles.D3D12Heap: 4,
    handles.D3D12Resource: 5,
    handles.D3D11Resource: 6,
    handles.D3D11ResourceKmt: 7,
}
# The numbers of hipExternalSemaphoreHandleType; likewise.
SEMAPHORE_TYPES: Final[Mapping[type[Handle], int]] = {
    handles.OpaqueWin32: 2,
    handles.OpaqueWin32Kmt: 3,
    handles.D3D12Fence: 4,
    # HIP refuses its own number, 10; a timeline works as an opaque one (OpenImageDenoise #288).
    handles.TimelineWin32: 2,
}
_DEDICATED: Final = 1  # hipExternalMemoryDedicated: accepted, and without effect


def memory(api: Any, handle: Handle, *, size: int, dedicated: bool) -> tuple[Any, object]:
    """A ``hipExternalMemoryHandleDesc``, and the object to keep alive until the call."""
    desc = api.hipExternalMemoryHandleDesc_st()
    desc.type = api.hipExternalMemoryHandleType_enum(number_of(MEMORY_TYPES, handle, "HIP"))
    keep = describe(desc.handle, handle)
    desc.size = size
    desc.flags = _DEDICATED if dedicated else 0
    return desc, keep


def semaphore(api: Any, handle: Handle) -> Any:
    """A ``hipExternalSemaphoreHandleDesc``; by handle, since HIP ignores the name of a semaphore."""
    desc = api.hipExternalSemaphoreHandleDesc_st()
    desc.type = api.hipExternalSemaphoreHandleType_enum(number_of(SEMAPHORE_TYPES, handle, "HIP"))
    describe(desc.handle, handle)
    return desc
