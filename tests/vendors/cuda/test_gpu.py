"""What only a GPU can show: array libraries, their graphs, leaks in device memory, two GPUs, and what a call costs."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.testing.exporters import open_exporter
from gpuinterop.testing.exporters.vulkan import list_drivers
from tests.limits import LIMIT

from ..parties import REAL, native

pytestmark = pytest.mark.skipif(not REAL, reason="a simulated GPU runs no kernels")
LIBRARIES = pytest.mark.parametrize("library", ["torch", "cupy"])
SHAPE = (256, 256)
SIZE = 4 * SHAPE[0] * SHAPE[1]


@pytest.fixture
def exporter() -> Iterator[Any]:
    with open_exporter("vulkan", driver="nvidia") as exporter:
        yield exporter


@pytest.fixture
def shared(device: gi.Device, exporter: Any) -> Iterator[tuple[Any, gi.Buffer]]:
    with exporter.create_memory(SIZE) as theirs:
        memory = device.import_memory(theirs.export(), size=theirs.size)
        yield theirs, memory.map_buffer()
        gc.collect()  # arrays of it
        memory.close(timeout=LIMIT)


def array_of(library: Any, buffer: gi.Buffer) -> Any:
    return library.from_dlpack(buffer.view(SHAPE, "float32"))


@LIBRARIES
def test_the_librarys_own_capture(
    device: gi.Device, exporter: Any, shared: tuple[Any, gi.Buffer], library: str
) -> None:
    """Signals and waits go into its graph, and each of its launches has values of its own."""
    module: Any = importlib.import_module(library)
    theirs, buffer = shared
    theirs.write(0, np.ones(SHAPE, np.float32).tobytes())
    array = array_of(module, buffer)
    array *= 1  # compiled before the capture
    counter = exporter.create_semaphore(gi.Timeline)
    semaphore: Any = device.import_semaphore(counter.export())
    pending = exporter.create_semaphore(gi.Binary)
    if library == "torch":
        module.cuda.synchronize()
        graph = module.cuda.CUDAGraph(keep_graph=True)
        with module.cuda.graph(graph):  # in torch's default mode, which any thread's event query would make invalid
            stream = device.wrap_stream(module.cuda.current_stream())
            semaphore.wait(stream, 1)
            array.mul_(2.0)
            semaphore.signal(stream, 2)
            stream.close()
            device.import_semaphore(pending.export()).close()
            device.drain()
        graph.instantiate()
        native, executable, launch = graph.raw_cuda_graph(), graph.raw_cuda_graph_exec(), graph.replay
    else:
        foreign = module.cuda.Stream(non_blocking=True)
        with foreign:
            foreign.synchronize()
            foreign.begin_capture()
            stream = device.wrap_stream(foreign)
            semaphore.wait(stream, 1)
            array *= 2.0
            semaphore.signal(stream, 2)
            stream.close()
            device.import_semaphore(pending.export()).close()
            device.drain()
            graph = foreign.end_capture()
        native, executable = int(graph.graph), int(graph.graphExec)

        def launch() -> None:
            graph.launch(foreign)

    with gi.GraphSemaphores(device, native, executable) as semaphores:
        assert [step.values for step in semaphores.steps] == [(1,), (2,)]
        for turn in range(10):
            counter.signal(2 * turn + 1)
            launch()
            semaphores.advance(2)
            assert counter.wait(2 * turn + 2, timeout=LIMIT)
            assert theirs.read(0, 4) == np.float32(2.0 ** (turn + 1)).tobytes()
    module.cuda.synchronize() if library == "torch" else foreign.synchronize()
    semaphore.close(timeout=LIMIT)
    counter.close()
    pending.close()


def test_pinned_memory_may_be_copied_behind_a_pending_wait(
    device: gi.Device, exporter: Any, shared: tuple[Any, gi.Buffer]
) -> None:
    """The driver is asked what it has pinned: torch's and CuPy's pinned arrays are NumPy arrays by then."""
    torch: Any = importlib.import_module("torch")
    cupyx: Any = importlib.import_module("cupyx")
    theirs, buffer = shared
    counter = exporter.create_semaphore(gi.Timeline)
    semaphore: Any = device.import_semaphore(counter.export())
    with device.create_stream() as stream:
        for turn, array in enumerate(
            (torch.empty(SHAPE, pin_memory=True).numpy(), cupyx.empty_pinned(SHAPE, np.float32)), 1
        ):
            theirs.write(0, np.full(SHAPE, turn, np.float32).tobytes())
            array[...] = -1
            semaphore.wait(stream, turn)
            with pytest.raises(gi.ResourceBusyError, match="pinned"):
                buffer.copy_to_host(np.empty(SHAPE, np.float32), stream=stream)
            buffer.copy_to_host(array, stream=stream)
            assert array[0, 0] == -1
            counter.signal(turn)
            stream.synchronize(LIMIT)
            assert (array == turn).all()
    semaphore.close(timeout=LIMIT)
    counter.close()


def test_ten_thousand_rounds_lose_nothing(device: gi.Device, exporter: Any) -> None:
    """Import, map and close: descriptors, device memory and host memory are what they were."""

    def state() -> tuple[int, int, int]:
        free = int(native(device).call("cuMemGetInfo")[0])
        with open("/proc/self/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return len(os.listdir("/proc/self/fd")), free, resident

    with exporter.create_memory(1 << 20) as theirs, exporter.create_semaphore(gi.Timeline) as counter:

        def rounds(count: int) -> None:
            for _ in range(count):
                with device.import_memory(theirs.export(), size=theirs.size) as memory:
                    memory.map_buffer().close()
                device.import_semaphore(counter.export()).close()

        rounds(500)
        gc.collect()
        device.synchronize(LIMIT)
        before = state()
        rounds(10_000)
        gc.collect()
        device.synchronize(LIMIT)
        after = state()
        print(f"descriptors, free device memory, resident: {before} before, {after} after")
        assert after[0] == before[0]
        assert after[1] == before[1]
        assert after[2] - before[2] < 4 << 20, "host memory is lost"


def test_two_gpus_are_not_taken_for_each_other(device: gi.Device) -> None:
    """A handle of GPU 0 on GPU 1: refused by its origin; without one the driver refuses memory, and the fd is ours."""
    devices = gi.get_backend("cuda").devices()
    if len(devices) < 2:
        pytest.skip("there is one GPU")
    drivers = [found for found in list_drivers() if "nvidia" in f"{found.name} {found.driver}".lower()]
    assert {gi.match_device(found.identity).ordinal for found in drivers} == {one.ordinal for one in devices}
    first = next(found for found in drivers if gi.match_device(found.identity) is devices[0])
    with open_exporter("vulkan", device_index=first.index) as exporter, exporter.create_memory(1 << 16) as memory:
        handle: Any = memory.export()
        with pytest.raises(gi.HandleError, match="match_device"):
            devices[1].import_memory(handle, size=memory.size)
        with exporter.create_semaphore(gi.Timeline) as counter:
            theirs = counter.export()
            with pytest.raises(gi.HandleError, match="match_device"):
                devices[1].import_semaphore(theirs)
            theirs.close()
        handle.origin = None
        with pytest.raises(gi.DriverError, match="cuImportExternalMemory failed with CUDA_ERROR_UNKNOWN"):
            devices[1].import_memory(handle, size=memory.size)
        assert os.fstat(handle.fd)
        devices[0].import_memory(handle, size=memory.size).close()


def test_each_gpu_works_while_the_other_is_current(device: gi.Device) -> None:
    """torch's current device is 1: streams 0 of device 0 still run on GPU 0."""
    torch: Any = importlib.import_module("torch")
    devices = gi.get_backend("cuda").devices()
    if len(devices) < 2:
        pytest.skip("there is one GPU")
    drivers = [found for found in list_drivers() if "nvidia" in f"{found.name} {found.driver}".lower()]
    for found in drivers:
        mine = gi.match_device(found.identity)
        other = next(one for one in devices if one is not mine)
        torch.cuda.set_device(other.ordinal)
        with open_exporter("vulkan", device_index=found.index) as exporter:
            counter, memory = exporter.create_semaphore(gi.Timeline), exporter.create_memory(4096)
            semaphore: Any = mine.import_semaphore(counter.export())
            imported = mine.import_memory(memory.export(), size=memory.size)
            buffer = imported.map_buffer()
            for turn, pointer in enumerate((0, 1, 2), 1):
                stream = mine.wrap_stream(pointer)
                semaphore.wait(stream, 2 * turn - 1)
                buffer.fill(turn, stream=stream)
                semaphore.signal(stream, 2 * turn)
                counter.signal(2 * turn - 1)
                assert counter.wait(2 * turn, timeout=LIMIT)
                assert memory.read(0, 4096) == bytes([turn]) * 4096
                stream.close()
            with pytest.raises(gi.InvalidArgumentError, match=rf"gpuinterop\.device\({other.ordinal}\)"):
                mine.wrap_stream(torch.cuda.current_stream())
            assert torch.cuda.current_device() == other.ordinal
            buffer.close()
            imported.close(timeout=LIMIT)
            semaphore.close(timeout=LIMIT)
            memory.close()
            counter.close()
    torch.cuda.set_device(0)
