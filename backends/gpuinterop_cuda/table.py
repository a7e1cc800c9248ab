"""CUDA's own names and constants."""

from __future__ import annotations

from typing import Final

from gpuinterop import handles
from gpuinterop.handles import ArrayUsage
from gpuinterop.native_driver.table import Table

from .error_hints import MEANINGS, OTHER_MEANINGS

CUDA: Final = Table(
    title="CUDA",
    prefix="cu",
    names={"GetCurrent": "cuCtxGetCurrent", "MakeCurrent": "cuCtxPushCurrent", "RestoreCurrent": "cuCtxPopCurrent"},
    # The numbers of CUexternalMemoryHandleType.
    memory_types={
        handles.OpaqueFd: 1,
        handles.OpaqueWin32: 2,
        handles.OpaqueWin32Kmt: 3,
        handles.D3D12Heap: 4,
        handles.D3D12Resource: 5,
        handles.D3D11Resource: 6,
        handles.D3D11ResourceKmt: 7,
        handles.NvSciBuf: 8,
        handles.DmaBufFd: 9,
    },
    # The numbers of CUexternalSemaphoreHandleType.
    semaphore_types={
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
    },
    default_stream=1,  # CU_STREAM_LEGACY; an environment variable can make 0 the per-thread stream in the bindings
    last_default_stream=2,  # CU_STREAM_PER_THREAD
    dlpack=2,  # kDLCUDA
    array_uses={ArrayUsage.SURFACE: 0x02, ArrayUsage.CUBEMAP: 0x04, ArrayUsage.COLOR_ATTACHMENT: 0x20},
    import_takes_fd=True,
    types_without_flags=(handles.DmaBufFd,),  # even if it is dedicated
    meanings=MEANINGS,
    other_meanings=OTHER_MEANINGS,
)
