"""Drivers that fail: what the caller still has, what is undone, and what the error says."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

import gpuinterop as gi
from tests.simulated.driver import Simulator

from .parties import open_party

LIMIT = 20.0
OUT_OF_MEMORY, UNKNOWN, NOT_SUPPORTED, ILLEGAL_ADDRESS = 2, 999, 801, 700


@pytest.fixture
def device() -> gi.Device:
    return gi.get_backend("cuda").device()


@pytest.fixture
def memfd(device: gi.Device) -> Iterator[Any]:
    with open_party("memfd", device) as exporter:
        yield exporter


def fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("fate", ["closed", "open"])
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, UNKNOWN, NOT_SUPPORTED])
def test_a_failed_import_leaves_the_handle_alone(
    simulator: Simulator, device: gi.Device, memfd: Any, code: int, fate: Literal["open", "closed"]
) -> None:
    """Whether the driver closes its descriptor or not: the caller's is open, and there is neither one more nor less."""
    memory, semaphore = memfd.create_memory(4096), memfd.create_semaphore(gi.Timeline)
    imports: list[tuple[str, Callable[[Any], Any], Any]] = [
        ("cuImportExternalMemory", lambda handle: device.import_memory(handle, size=4096), memory),
        ("cuImportExternalSemaphore", device.import_semaphore, semaphore),
    ]
    for call, load, owner in imports:
        handle = owner.export()
        before = fds()
        simulator.fail(call, code=code, fd=fate)
        with pytest.raises(gi.DriverError) as caught:
            load(handle)
        assert caught.value.call == call
        assert caught.value.code == code
        assert isinstance(caught.value, MemoryError) == (code == OUT_OF_MEMORY)
        assert fds() == before
        with load(handle) as imported:  # the same handle, once more
            assert handle.closed
            assert not imported.closed
        device.drain()
    memory.close()
    semaphore.close()


def test_imports_of_many_threads_never_close_each_others_descriptors(
    simulator: Simulator, device: gi.Device, memfd: Any
) -> None:
    """Every second import fails with its descriptor closed; what other threads have open stays theirs."""
    with memfd.create_memory(4096) as memory:
        problems: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(30):
                    read, write = os.pipe()
                    mark = os.fstat(read)
                    handle = memory.export()
                    try:
                        device.import_memory(handle, size=4096).close()
                    except gi.DriverError:
                        handle.close()
                    assert os.fstat(read).st_ino == mark.st_ino
                    os.close(read)
                    os.close(write)
            except BaseException as error:
                problems.append(error)

        simulator.fail("cuImportExternalMemory", code=UNKNOWN, fd="closed", every=2)
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not problems
        simulator.clear_faults()
        device.drain()


@pytest.mark.parametrize(
    "call", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle"]
)
def test_an_allocation_that_fails_half_way_is_undone(simulator: Simulator, device: gi.Device, call: str) -> None:
    before = simulator.live()
    simulator.fail(call, code=OUT_OF_MEMORY)
    with pytest.raises(gi.OutOfMemoryError) as caught, device.allocate(1) as allocation:
        _ = allocation.buffer
        allocation.export().close()
    assert caught.value.call == call
    device.drain()
    assert simulator.live() == before


@pytest.mark.parametrize("call", ["cuExternalMemoryGetMappedBuffer", "cuExternalMemoryGetMappedMipmappedArray"])
def test_a_mapping_that_fails_leaves_the_memory(simulator: Simulator, device: gi.Device, memfd: Any, call: str) -> None:
    with memfd.create_memory(1 << 16) as theirs, device.import_memory(theirs.export(), size=theirs.size) as memory:
        simulator.fail(call, code=1)
        with pytest.raises(gi.DriverError) as caught:
            if call.endswith("Buffer"):
                memory.map_buffer()
            else:
                memory.map_mipmapped_array("R8_UNORM", (16, 16))
        assert caught.value.symbol == "CUDA_ERROR_INVALID_VALUE"
        assert "exported object" in str(caught.value) or "layout" in str(caught.value)
        memory.map_buffer().close()


def test_a_stream_that_has_failed_says_so(simulator: Simulator, device: gi.Device, memfd: Any) -> None:
    """An asynchronous failure: later calls raise it, with the symbol and what it means; closing goes on."""
    with memfd.create_memory(4096) as theirs, device.import_memory(theirs.export(), size=4096) as memory:
        buffer, stream = memory.map_buffer(), device.create_stream()
        simulator.fail_stream(stream.ptr, code=ILLEGAL_ADDRESS)
        buffer.fill(1, stream=stream)
        with pytest.raises(gi.DriverError) as caught:
            stream.synchronize(LIMIT)
        assert caught.value.symbol == "CUDA_ERROR_ILLEGAL_ADDRESS"
        assert "process must be started again" in str(caught.value)
        stream.close()
        buffer.close()
    device.drain()


def test_every_call_that_fails_is_named(simulator: Simulator, device: gi.Device, memfd: Any) -> None:
    """Whatever call fails, the error has its name, the number, the symbol, and a meaning."""
    with memfd.create_memory(4096) as theirs, device.import_memory(theirs.export(), size=4096) as memory:
        buffer, stream = memory.map_buffer(), device.create_stream()
        calls: dict[str, Callable[[], object]] = {
            "cuStreamCreateWithPriority": device.create_stream,
            "cuStreamQuery": stream.query,
            **({} if device._backend.holds_gil else {"cuStreamSynchronize": stream.synchronize}),
            "cuEventRecord": stream.record,
            "cuMemsetD8Async": lambda: buffer.fill(1, stream=stream),
            "cuMemCreate": lambda: device.allocate(1),
        }
        for call, attempt in calls.items():
            simulator.fail(call, code=UNKNOWN)
            with pytest.raises(gi.DriverError) as caught:
                attempt()
            assert (caught.value.call, caught.value.code, caught.value.symbol) == (call, UNKNOWN, "CUDA_ERROR_UNKNOWN")
            assert str(caught.value).startswith(f"{call} failed with CUDA_ERROR_UNKNOWN (999): ")
        stream.close()
        buffer.close()


def test_a_code_that_the_bindings_do_not_know(simulator: Simulator, device: gi.Device) -> None:
    stream = device.create_stream()
    event = stream.record()
    calls: dict[str, Callable[[], object]] = {
        "cuStreamCreateWithPriority": device.create_stream,
        "cuStreamQuery": stream.query,
        "cuEventQuery": lambda: event.done,
    }
    for call, attempt in calls.items():
        simulator.fail(call, code=12345)
        with pytest.raises(gi.DriverError, match="12345") as caught:
            attempt()
        assert (caught.value.call, caught.value.code) == (call, 12345)
    stream.close()


def test_a_release_that_fails_is_a_warning_that_names_it(simulator: Simulator, device: gi.Device, memfd: Any) -> None:
    theirs = memfd.create_memory(4096)
    memory = device.import_memory(theirs.export(), size=4096)
    simulator.fail("cuDestroyExternalMemory", code=UNKNOWN)
    with pytest.warns(gi.LeakedResourceWarning, match="cuDestroyExternalMemory failed with CUDA_ERROR_UNKNOWN"):
        memory.close()
    device._backend.destroy_memory(memory._native)  # the second time it works
    theirs.close()


def test_nothing_is_left_after_thousands_of_rounds(simulator: Simulator, device: gi.Device, memfd: Any) -> None:
    """Objects counted by the driver; on the GPU the same rounds are counted in descriptors and in device memory."""
    stream = device.create_stream()
    with memfd.create_memory(4096) as theirs, memfd.create_semaphore(gi.Timeline) as counter:

        def round_(value: int) -> None:
            semaphore = device.import_semaphore(counter.export())
            with device.import_memory(theirs.export(), size=4096) as memory, memory.map_buffer() as buffer:
                buffer.fill(value % 256, stream=stream)
                semaphore.signal(stream, value)
            semaphore.close()

        for value in range(1, 11):
            round_(value)
        stream.synchronize(LIMIT)
        before, descriptors = simulator.live(), len(fds())
        for value in range(11, 2011):
            round_(value)
        stream.synchronize(LIMIT)
        device.drain()
        assert simulator.live() == before
        assert len(fds()) == descriptors
        assert counter.wait(2010, timeout=LIMIT)
    stream.close()
