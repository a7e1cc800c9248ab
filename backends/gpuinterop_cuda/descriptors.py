"""The driver's descriptors of handles: the number of each type, and the member of the union that it sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuinterop import handles
from gpuinterop.handles import Handle
from gpuinterop.native_driver import describe, number_of

# The numbers of CUexternalMemoryHandleType, because 12.9 does not name the last one.
MEMORY_TYPES: Final[Mapping[type[Handle], int]] = {
    handles.OpaqueFd: 1,
    handles.OpaqueWin32: 2,
    handles.OpaqueWin32Kmt: 3,
    handles.D3D12Heap: 4,
    handles.D3D12Resource: 5,
    handles.D3D11Resource: 6,
    handles.D3D11ResourceKmt: 7,
    handles.NvSciBuf: 8,
    handles.DmaBufFd: 9,
}
# The numbers of CUexternalSemaphoreHandleType.
SEMAPHORE_TYPES: Final[Mapping[type[Handle], int]] = {
    handles.OpaqueFd: 1,
    handles.OpaqueWin32: 2,
    handles.OpaqueWin32Kmt: 3,
    handles.D3D12Fence: 4,
    handles.D3D11Fence: 5,
    handles.NvSciSync: 6,
    handles.KeyedMutex: 7,
    handles.KeyedMutexKmt: 8,
    handles.TimelineFd: 9,
    handles.TimelineWin32: 10,
}
_DEDICATED: Final = 1  # CUDA_EXTERNAL_MEMORY_DEDICATED


def memory(api: Any, handle: Handle, *, size: int, dedicated: bool) -> tuple[Any, object]:
    """A ``CUDA_EXTERNAL_MEMORY_HANDLE_DESC``, and the object to keep alive until the call."""
    desc = api.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
    desc.type = api.CUexternalMemoryHandleType(number_of(MEMORY_TYPES, handle, "CUDA"))
    keep = describe(desc.handle, handle, "nvSciBufObject")
    desc.size = size
    # A dma-buf takes no flags, even if it is dedicated.
    desc.flags = _DEDICATED if dedicated and not isinstance(handle, handles.DmaBufFd) else 0
    return desc, keep


def semaphore(api: Any, handle: Handle) -> tuple[Any, object]:
    """A ``CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC``, and the object to keep alive until the call."""
    desc = api.CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC()
    desc.type = api.CUexternalSemaphoreHandleType(number_of(SEMAPHORE_TYPES, handle, "CUDA"))
    return desc, describe(desc.handle, handle, "nvSciSyncObj")
