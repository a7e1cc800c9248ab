"""HIP's own names and constants."""

from __future__ import annotations

from typing import Final

from gpuinterop import handles
from gpuinterop.handles import ArrayUsage
from gpuinterop.native_driver.table import Table

from .error_hints import MEANINGS, OTHER_MEANINGS

HIP: Final = Table(
    title="HIP",
    prefix="hip",
    names={
        "GetCurrent": "hipGetDevice",
        "MakeCurrent": "hipSetDevice",
        "RestoreCurrent": "hipSetDevice",
        "DeviceGetCount": "hipGetDeviceCount",
        "StreamCreate": "hipStreamCreateWithFlags",
        "EventCreate": "hipEventCreateWithFlags",
        "MemFree": "hipFree",
        "MemHostRegister": "hipHostRegister",
        "MemHostUnregister": "hipHostUnregister",
        "MemHostGetDevicePointer": "hipHostGetDevicePointer",
        "MipmappedArrayDestroy": "hipFreeMipmappedArray",
        "MipmappedArrayGetLevel": "hipGetMipmappedArrayLevel",
    },
    # The numbers of hipExternalMemoryHandleType. The runtime refuses all others, although its enum names them.
    memory_types={
        handles.OpaqueFd: 1,
        handles.DmaBufFd: 1,  # HIP treats an opaque descriptor as a dma-buf
        handles.OpaqueWin32: 2,
        handles.OpaqueWin32Kmt: 3,
        handles.D3D12Heap: 4,
        handles.D3D12Resource: 5,
        handles.D3D11Resource: 6,
        handles.D3D11ResourceKmt: 7,
    },
    # The numbers of hipExternalSemaphoreHandleType; likewise.
    semaphore_types={
        handles.OpaqueWin32: 2,
        handles.OpaqueWin32Kmt: 3,
        handles.D3D12Fence: 4,
        # HIP refuses its own number, 10; a timeline works as an opaque one (OpenImageDenoise #288).
        handles.TimelineWin32: 2,
    },
    default_stream=0,  # every runtime accepts 0; the newer name for it is 1
    last_default_stream=1,  # hipStreamLegacy
    dlpack=10,  # kDLROCM
    array_uses={ArrayUsage.SURFACE: 0x02, ArrayUsage.CUBEMAP: 0x04},  # there is no flag for colour attachments
    import_takes_fd=False,
    copy_kind=(4,),  # hipMemcpyDefault
    wait_mask=(2**64 - 1,),
    # RDNA4 reports 4 KiB, but kernels fault in smaller mappings than this (rocm-systems #9360).
    least_granularity=2 << 20,
    meanings=MEANINGS,
    other_meanings=OTHER_MEANINGS,
    not_out_of_memory=("ImportExternalMemory",),
)
