"""What CUDA alone is told, field by field: NvSci, dma-bufs, keyed mutexes, batches of every kind, arrays.

Windows is only here: the simulator's Windows personality takes the types, and keeps what it was given.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
from cuda.bindings import driver as cuda

import gpuinterop as gi
from gpuinterop.handles import AnySemaphoreHandle
from gpuinterop.native_driver import allocations, memory
from gpuinterop_cuda import arrays, multicast
from gpuinterop_cuda.backend import CudaBackend
from gpuinterop_cuda.driver import Context
from tests.simulated.driver import Simulator

from ..test_descriptors import NT, only

INFINITE = 0xFFFF_FFFF


@pytest.fixture
def context(backend: CudaBackend) -> Context:
    return backend.open_device(0)


def test_nvsci_memory(backend: CudaBackend, context: Context, windows: Simulator) -> None:
    windows.forget_descriptors()
    native = backend.import_memory(context, gi.NvSciBuf(pointer=0xABC000), size=4096, dedicated=False)
    desc = only(windows.descriptors("cuImportExternalMemory"))
    assert (desc.type, desc.pointer, desc.size, desc.flags) == (8, 0xABC000, 4096, 0)
    backend.destroy_memory(native)


def test_a_dma_bufs_flags_are_none(backend: CudaBackend, context: Context, simulator: Simulator) -> None:
    simulator.forget_descriptors()
    read, write = os.pipe()
    with pytest.raises(gi.DriverError) as caught:
        backend.import_memory(context, gi.DmaBufFd(read), size=4096, dedicated=True)
    assert (caught.value.call, caught.value.code, caught.value.symbol) == (
        "cuImportExternalMemory",
        801,
        "CUDA_ERROR_NOT_SUPPORTED",
    )
    desc = only(simulator.descriptors("cuImportExternalMemory"))
    assert (desc.type, desc.fd, desc.size, desc.flags) == (9, read, 4096, 0)
    os.close(read)
    os.close(write)


def test_nvscisync(backend: CudaBackend, context: Context, windows: Simulator) -> None:
    """The value is a fence's address: filled by a signal, read by a wait."""
    windows.forget_descriptors()
    native = backend.import_semaphore(context, gi.NvSciSync(pointer=0xDEF000))
    assert (only(windows.descriptors("cuImportExternalSemaphore"))).pointer == 0xDEF000
    batch, stream = backend.prepare([native]), backend.create_stream(context)
    fence = ctypes.create_string_buffer(64)
    address = ctypes.addressof(fence)
    backend.signal(batch, stream, (address,))
    backend.synchronize(stream)
    assert fence.raw[:48] != bytes(48), "the fence is the driver's to fill"
    backend.wait(batch, stream, (address,), None)
    backend.synchronize(stream)
    (signal,) = only(windows.descriptors("cuSignalExternalSemaphoresAsync"))
    (wait,) = only(windows.descriptors("cuWaitExternalSemaphoresAsync"))
    assert (signal.fence, signal.value, signal.key, signal.flags) == (address, 0, 0, 0)
    assert (wait.fence, wait.value, wait.key, wait.flags) == (address, 0, 0, 0)
    backend.destroy_stream(stream)
    backend.destroy_semaphore(native)


@pytest.mark.parametrize("kind", [gi.KeyedMutex, gi.KeyedMutexKmt])
def test_a_keyed_mutex_has_key_and_timeout(
    backend: CudaBackend, context: Context, windows: Simulator, kind: type[Any]
) -> None:
    windows.forget_descriptors()
    native = backend.import_semaphore(context, kind(handle=NT))
    batch, stream = backend.prepare([native]), backend.create_stream(context)
    backend.wait(batch, stream, (7,), 250)
    backend.wait(batch, stream, (8,), None)
    backend.signal(batch, stream, (9,))
    backend.synchronize(stream)
    waits = [entry for (entry,) in windows.descriptors("cuWaitExternalSemaphoresAsync")]
    assert [(wait.key, wait.timeout_ms, wait.value) for wait in waits] == [(7, 250, 0), (8, INFINITE, 0)]
    (signal,) = only(windows.descriptors("cuSignalExternalSemaphoresAsync"))
    assert (signal.key, signal.value, signal.flags) == (9, 0, 0)
    backend.destroy_stream(stream)
    backend.destroy_semaphore(native)


def test_a_batch_of_every_kind_is_one_call(backend: CudaBackend, context: Context, windows: Simulator) -> None:
    windows.forget_descriptors()
    kinds: list[AnySemaphoreHandle] = [
        gi.OpaqueWin32(handle=1),
        gi.TimelineWin32(handle=2),
        gi.D3D12Fence(handle=3),
        gi.KeyedMutex(handle=4),
        gi.D3D11Fence(handle=5),
    ]
    natives = [backend.import_semaphore(context, handle) for handle in kinds]
    batch, stream = backend.prepare(natives), backend.create_stream(context)
    before = windows.calls("cuSignalExternalSemaphoresAsync")
    backend.signal(batch, stream, (0, 2**63 + 5, 11, 12, 13))
    backend.wait(batch, stream, (0, 2**64 - 1, 21, 22, 23), 99)
    backend.synchronize(stream)
    assert windows.calls("cuSignalExternalSemaphoresAsync") == before + 1
    signal = only(windows.descriptors("cuSignalExternalSemaphoresAsync"))
    wait = only(windows.descriptors("cuWaitExternalSemaphoresAsync"))
    assert [(one.value, one.key) for one in signal] == [(0, 0), (2**63 + 5, 0), (11, 0), (0, 12), (13, 0)]
    assert [(one.value, one.key) for one in wait] == [(0, 0), (2**64 - 1, 0), (21, 0), (0, 22), (23, 0)]
    assert [one.timeout_ms for one in wait] == [0, 0, 0, 99, 0]
    for native in natives:
        backend.destroy_semaphore(native)
    backend.destroy_stream(stream)


def test_structs_are_those_of_the_bindings() -> None:
    """Byte for byte: the bindings are made from NVIDIA's header, and the simulated driver's structs are ours."""

    def filled(struct: Any, **values: Any) -> bytes:
        for path, value in values.items():
            *ways, last = path.split("__")
            target = struct
            for way in ways:
                target = getattr(target, way)
            setattr(target, last, value)
        return ctypes.string_at(int(struct.getPtr()), sizes[type(struct)])

    sizes = {
        cuda.CUDA_EXTERNAL_MEMORY_BUFFER_DESC: 88, cuda.CUmemAllocationProp: 32, cuda.CUmemAccessDesc: 12,
        cuda.CUmulticastObjectProp: 32, cuda.CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC: 120, cuda.CUDA_MEMCPY3D: 200,
    }  # fmt: skip
    assert memory._RANGE.pack(5, 1 << 40, 3) == filled(
        cuda.CUDA_EXTERNAL_MEMORY_BUFFER_DESC(), offset=5, size=1 << 40, flags=3
    )
    kinds, place = cuda.CUmemAllocationHandleType, cuda.CUmemLocationType(1)
    assert allocations._PROPERTIES.pack(1, 8, 1, 3, 0x99) == filled(
        cuda.CUmemAllocationProp(), type=cuda.CUmemAllocationType(1), requestedHandleTypes=kinds(8),
        location__type=place, location__id=3, win32HandleMetaData=0x99,
    )  # fmt: skip
    assert allocations._ACCESS.pack(1, 2, 3) == filled(
        cuda.CUmemAccessDesc(), location__type=place, location__id=2, flags=cuda.CUmemAccess_flags(3)
    )
    assert multicast._PROPERTIES.pack(4, 1 << 33, 9, 0) == filled(
        cuda.CUmulticastObjectProp(), numDevices=4, size=1 << 33, handleTypes=9
    )
    assert arrays._DESCRIPTOR.pack(65536, 37, 21, 6, 0x10, 2, 0x22, 3) == filled(
        cuda.CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC(), offset=65536, arrayDesc__Width=37, arrayDesc__Height=21,
        arrayDesc__Depth=6, arrayDesc__Format=cuda.CUarray_format(0x10), arrayDesc__NumChannels=2,
        arrayDesc__Flags=0x22, numLevels=3,
    )  # fmt: skip
    assert arrays._COPY.pack(1, 0x1000, 0, 0, 64, 7, 3, 0, 0, 0x5555, 0, 0, 64, 7, 2) == filled(
        cuda.CUDA_MEMCPY3D(), srcMemoryType=cuda.CUmemorytype(1), srcHost=0x1000, srcPitch=64, srcHeight=7,
        dstMemoryType=cuda.CUmemorytype(3), dstArray=cuda.CUarray(0x5555), WidthInBytes=64, Height=7, Depth=2,
    )  # fmt: skip
