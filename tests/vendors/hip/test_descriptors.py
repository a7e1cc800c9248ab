"""What HIP alone is told, field by field: batches, captures, its two kinds of descriptors, arrays.

Windows is only here: the simulator's Windows personality takes the types, and keeps what it was given.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop_hip.backend import HipBackend
from gpuinterop_hip.driver import Gpu
from tests.simulated.driver import Simulator

from ..parties import SIMULATED
from ..test_descriptors import only

pytestmark = pytest.mark.skipif(not SIMULATED, reason="needs the simulated runtime")


@pytest.fixture
def gpu(backend: HipBackend) -> Gpu:
    return backend.open_device(0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_batch_is_one_call(backend: HipBackend, gpu: Gpu, windows: Simulator, count: int) -> None:
    """An array of structs, 144 bytes apart: each semaphore gets its own value."""
    natives = [backend.import_semaphore(gpu, gi.D3D12Fence(handle=index + 1)) for index in range(count)]
    batch, stream = backend.prepare(natives), backend.create_stream(gpu)
    values = tuple(2**63 + 5 + 7 * index for index in range(count))
    for turn in range(3):  # the second time the structs are used again
        windows.forget_descriptors()
        before = windows.calls("hipSignalExternalSemaphoresAsync"), windows.calls("hipWaitExternalSemaphoresAsync")
        mine = tuple(value + turn for value in values)
        backend.signal(batch, stream, mine)
        backend.wait(batch, stream, mine, None)
        backend.synchronize(stream)
        after = windows.calls("hipSignalExternalSemaphoresAsync"), windows.calls("hipWaitExternalSemaphoresAsync")
        assert after == (before[0] + 1, before[1] + 1)
        for call in ("hipSignalExternalSemaphoresAsync", "hipWaitExternalSemaphoresAsync"):
            params = only(windows.descriptors(call))
            assert tuple(one.value for one in params) == mine
            assert [one.semaphore for one in params] == [native.handle for native in natives]
            assert all(one.stream == stream.pointer and one.flags == 0 for one in params)
            assert not any(word for one in params for word in one.reserved)
    for native in natives:
        backend.destroy_semaphore(native)
    backend.destroy_stream(stream)


def test_a_batch_that_fails_in_the_middle_says_what_was_done(backend: HipBackend, gpu: Gpu, windows: Simulator) -> None:
    """HIP goes entry by entry: what comes before a bad one was enqueued."""
    good = backend.import_semaphore(gpu, gi.D3D12Fence(handle=1))
    bad = type(good)(gpu, good.kind)
    batch, stream = backend.prepare([good, bad]), backend.create_stream(gpu)
    with pytest.raises(gi.DriverError, match="signalled") as caught:
        backend.signal(batch, stream, (1, 1))
    assert caught.value.code == 1
    backend.synchronize(stream)
    windows.violations()
    backend.destroy_semaphore(good)
    backend.destroy_stream(stream)


def test_in_a_capture_semaphores_are_refused(backend: HipBackend, gpu: Gpu, windows: Simulator) -> None:
    """HIP would signal and wait at once, and its graph would hold neither."""
    native = backend.import_semaphore(gpu, gi.D3D12Fence(handle=1))
    batch, stream = backend.prepare([native]), backend.create_stream(gpu)
    calls = "hipSignalExternalSemaphoresAsync", "hipWaitExternalSemaphoresAsync"
    before = [windows.calls(call) for call in calls]
    library = ctypes.CDLL("libamdhip64.so")
    assert library.hipStreamBeginCapture(ctypes.c_void_p(stream.pointer), 0) == 0
    with pytest.raises(gi.InvalidArgumentError, match="not being captured"):
        backend.signal(batch, stream, (1,))
    with pytest.raises(gi.InvalidArgumentError, match="not being captured"):
        backend.wait(batch, stream, (1,), None)
    graph = ctypes.c_void_p()
    assert library.hipStreamEndCapture(ctypes.c_void_p(stream.pointer), ctypes.byref(graph)) == 0
    assert library.hipGraphDestroy(graph) == 0
    assert [windows.calls(call) for call in calls] == before
    backend.signal(batch, stream, (1,))
    backend.synchronize(stream)
    backend.destroy_semaphore(native)
    backend.destroy_stream(stream)


@pytest.mark.skipif(sys.platform != "linux", reason="file descriptors")
@pytest.mark.parametrize("kind", [gi.OpaqueFd, gi.DmaBufFd])
def test_both_descriptors_of_linux_are_opaque_ones(
    backend: HipBackend, gpu: Gpu, simulator: Simulator, kind: type[Any]
) -> None:
    """HIP never closes them: the backend does when the import has succeeded, and else leaves them open."""
    fd = os.memfd_create("gpuinterop.exporter.memory", os.MFD_CLOEXEC)
    os.ftruncate(fd, 8192)
    lent = os.dup(fd)
    native = backend.import_memory(gpu, kind(lent), size=8192, dedicated=True)
    desc = only(simulator.descriptors("hipImportExternalMemory"))
    assert (desc.type, desc.fd, desc.size, desc.flags) == (1, lent, 8192, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lent)
    backend.destroy_memory(native)
    read, write = os.pipe()
    with pytest.raises(gi.DriverError, match="HIP returns this for every failed import") as caught:
        backend.import_memory(gpu, kind(read), size=4096, dedicated=False)
    assert (caught.value.code, caught.value.symbol) == (2, "hipErrorOutOfMemory")
    assert not isinstance(caught.value, MemoryError), "it says nothing of memory"
    os.fstat(read)
    for number in (fd, read, write):
        os.close(number)


@pytest.mark.skipif(sys.platform != "linux", reason="file descriptors")
def test_a_size_beyond_the_object_is_refused_before_the_call(simulator: Simulator) -> None:
    """HIP takes it: four times the size of a dma-buf was imported."""
    device = gi.get_backend("hip").device()
    fd = os.memfd_create("memory", os.MFD_CLOEXEC)
    os.ftruncate(fd, 8192)
    before = simulator.calls("hipImportExternalMemory")
    for kind in (gi.OpaqueFd, gi.DmaBufFd):
        with pytest.raises(gi.InvalidArgumentError, match="8192"):
            device.import_memory(kind(fd), size=4 * 8192)
    assert simulator.calls("hipImportExternalMemory") == before
    os.close(fd)
