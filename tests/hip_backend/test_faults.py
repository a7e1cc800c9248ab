"""Runtimes that fail: what the caller still has, what is undone, and what the error says."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpuinterop as gi
from tests.kept_streams import destroy_kept_streams
from tests.simulated.driver import Simulator
from tests.spare_pages import unpin_spare_pages

from .parties import SIMULATED, open_party

pytestmark = pytest.mark.skipif(not SIMULATED, reason="needs the simulated runtime")

LIMIT = 20.0
INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS, NOT_SUPPORTED, UNKNOWN = 1, 2, 700, 801, 999


@pytest.fixture
def memfd(device: gi.Device) -> Iterator[Any]:
    with open_party("memfd", device) as exporter:
        yield exporter


def fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("code", [INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED, UNKNOWN])
def test_a_failed_import_leaves_the_handle_alone(
    simulator: Simulator, device: gi.Device, memfd: Any, code: int
) -> None:
    """The caller's is open, there is neither one descriptor more nor less, and it can be imported afterwards."""
    with memfd.create_memory(4096) as memory:
        handle = memory.export()
        before = fds()
        simulator.fail("hipImportExternalMemory", code=code)
        with pytest.raises(gi.DriverError) as caught:
            device.import_memory(handle, size=4096)
        assert (caught.value.call, caught.value.code) == ("hipImportExternalMemory", code)
        assert not isinstance(caught.value, MemoryError), "of an import this code says nothing of memory"
        assert fds() == before
        with device.import_memory(handle, size=4096) as imported:
            assert handle.closed
            assert not imported.closed
            assert len(fds()) <= len(before), "HIP closes no descriptor: the backend has"


def test_what_is_no_memory_is_said_so(device: gi.Device) -> None:
    """By the runtime's own rule: out of memory, which is not what it means."""
    read, write = os.pipe()
    before = fds()
    with pytest.raises(gi.DriverError, match="no memory that the driver of this GPU has exported") as caught:
        device.import_memory(gi.OpaqueFd(read), size=4096)
    assert caught.value.symbol == "hipErrorOutOfMemory"
    assert fds() == before
    os.close(read)
    os.close(write)


def test_out_of_memory_is_said_where_it_is_meant(simulator: Simulator, device: gi.Device) -> None:
    simulator.fail("hipMemCreate", code=OUT_OF_MEMORY)
    with pytest.raises(gi.OutOfMemoryError, match="hipMemCreate"):
        device.allocate(1)


def test_imports_of_many_threads_never_close_each_others_descriptors(
    simulator: Simulator, device: gi.Device, memfd: Any
) -> None:
    """Every second import fails; what other threads have open stays theirs."""
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

        simulator.fail("hipImportExternalMemory", code=OUT_OF_MEMORY, every=2)
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not problems
        simulator.clear_faults()
        device.drain()


@pytest.mark.parametrize(
    ("size", "call"),  # sizes of their own: of each the backend reserves an address range once
    [
        (40 << 20, "hipMemCreate"), (42 << 20, "hipMemAddressReserve"), (44 << 20, "hipMemMap"),
        (46 << 20, "hipMemSetAccess"), (48 << 20, "hipMemExportToShareableHandle"),
    ],
)  # fmt: skip
def test_an_allocation_that_fails_half_way_is_undone(
    simulator: Simulator, device: gi.Device, size: int, call: str
) -> None:
    before = simulator.live()
    simulator.fail(call, code=OUT_OF_MEMORY)
    with pytest.raises(gi.OutOfMemoryError) as caught, device.allocate(size) as allocation:
        _ = allocation.buffer
        allocation.export().close()
    assert caught.value.call == call
    device.drain()
    assert simulator.live() == before


def test_a_range_that_stays_mapped_is_not_used_again(
    simulator: Simulator, device: gi.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = device._backend
    ranges, size, taken = backend._ranges, 50 << 20, list[int]()
    take = ranges.take

    def noted(place: Any, wanted: int) -> int:
        taken.append(take(place, wanted))
        return taken[-1]

    monkeypatch.setitem(vars(ranges), "take", noted)
    simulator.fail("hipMemSetAccess", code=INVALID_VALUE)
    simulator.fail("hipMemUnmap", code=INVALID_VALUE)
    with pytest.warns(gi.LeakedResourceWarning, match="hipMemUnmap"), device.allocate(size) as allocation:
        with pytest.raises(gi.DriverError, match="hipMemSetAccess"):
            _ = allocation.buffer
        allocation.buffer.fill(1)
    assert len(set(taken)) == 2
    assert ctypes.CDLL("libamdhip64.so").hipMemUnmap(ctypes.c_void_p(taken[0]), ctypes.c_size_t(size)) == 0


@pytest.mark.parametrize("call", ["hipHostRegister", "hipHostGetDevicePointer"])
def test_a_page_that_cannot_be_pinned_is_undone(simulator: Simulator, device: gi.Device, call: str) -> None:
    before, descriptors = simulator.live(), fds()
    simulator.fail(call, code=UNKNOWN)
    with pytest.raises(gi.DriverError) as caught:
        device.create_semaphore(gi.TimelineFd)
    assert caught.value.call == call
    assert (simulator.live(), fds()) == (before, descriptors)
    device.create_semaphore(gi.TimelineFd).close()


def test_a_mapping_that_fails_leaves_the_memory(simulator: Simulator, device: gi.Device, memfd: Any) -> None:
    with memfd.create_memory(1 << 16) as theirs, device.import_memory(theirs.export(), size=theirs.size) as memory:
        simulator.fail("hipExternalMemoryGetMappedBuffer", code=INVALID_VALUE)
        with pytest.raises(gi.DriverError, match="beyond the imported object") as caught:
            memory.map_buffer()
        assert caught.value.symbol == "hipErrorInvalidValue"
        memory.map_buffer().close()


def test_a_stream_that_has_failed_says_so(simulator: Simulator, device: gi.Device, memfd: Any) -> None:
    """An asynchronous failure: later calls raise it, with the symbol and what it means; closing goes on."""
    with memfd.create_memory(4096) as theirs, device.import_memory(theirs.export(), size=4096) as memory:
        buffer, stream = memory.map_buffer(), device.create_stream()
        simulator.fail_stream(stream.ptr, code=ILLEGAL_ADDRESS)
        buffer.fill(1, stream=stream)
        with pytest.raises(gi.DriverError) as caught:
            stream.synchronize(LIMIT)
        assert caught.value.symbol == "hipErrorIllegalAddress"
        assert "process must be started again" in str(caught.value)
        stream.close()
        buffer.close()
    device.drain()


def test_every_call_that_fails_is_named(simulator: Simulator, device: gi.Device, memfd: Any) -> None:
    """Whatever call fails, the error has its name, the number, the symbol, and a meaning."""
    with memfd.create_memory(4096) as theirs, device.import_memory(theirs.export(), size=4096) as memory:
        buffer, stream = memory.map_buffer(), device.create_stream()
        calls: dict[str, Callable[[], object]] = {
            "hipStreamCreateWithPriority": device.create_stream,
            "hipStreamQuery": stream.query,
            "hipStreamSynchronize": lambda: device._backend.synchronize(stream._native),  # the core asks instead
            "hipEventRecord": stream.record,
            "hipStreamIsCapturing": lambda: device._backend.is_capturing(stream._native),
            "hipMemsetD8Async": lambda: buffer.fill(1, stream=stream),
            "hipMemCreate": lambda: device.allocate(1),
        }
        destroy_kept_streams(device._backend)
        for call, attempt in calls.items():
            simulator.fail(call, code=UNKNOWN)
            with pytest.raises(gi.DriverError, match=call) as caught:
                attempt()
            assert (caught.value.call, caught.value.code, caught.value.symbol) == (call, UNKNOWN, "hipErrorUnknown")
            assert str(caught.value).startswith(f"{call} failed with hipErrorUnknown (999): ")
        stream.close()
        buffer.close()


def test_a_code_that_the_bindings_do_not_know(simulator: Simulator, device: gi.Device) -> None:
    stream = device.create_stream()
    event = stream.record()
    calls: dict[str, Callable[[], object]] = {
        "hipStreamCreateWithPriority": device.create_stream,
        "hipStreamQuery": stream.query,
        "hipStreamIsCapturing": lambda: device._backend.is_capturing(stream._native),
        "hipEventQuery": lambda: event.done,
    }
    destroy_kept_streams(device._backend)
    for call, attempt in calls.items():
        simulator.fail(call, code=12345)
        with pytest.raises(gi.DriverError, match="12345") as caught:
            attempt()
        assert (caught.value.call, caught.value.code) == (call, 12345)
    stream.close()


def test_no_error_of_ours_is_left_for_others(simulator: Simulator, device: gi.Device, hip: Any) -> None:
    """torch asks for the thread's last error behind its launches: it must not find one that was told already."""
    stream = device.create_stream()
    word: Any = device.create_semaphore(gi.TimelineFd)
    hip.hipGetLastError()
    word.wait(stream, 1)
    assert not stream.query()  # hipErrorNotReady
    with pytest.raises(gi.DriverError):
        device.import_memory(gi.OpaqueFd(os.pipe2(os.O_CLOEXEC)[0]), size=4096)
    assert device._backend.is_pageable(device._native, id(stream))  # no address of HIP's: hipErrorInvalidValue
    assert int(hip.hipPeekAtLastError()[0]) == 0
    word.host_signal(1)
    stream.synchronize(LIMIT)
    stream.close()
    word.close(timeout=LIMIT)


def test_a_release_that_fails_is_a_warning_that_names_it(simulator: Simulator, device: gi.Device, memfd: Any) -> None:
    theirs = memfd.create_memory(4096)
    memory = device.import_memory(theirs.export(), size=4096)
    simulator.fail("hipDestroyExternalMemory", code=UNKNOWN)
    with pytest.warns(gi.LeakedResourceWarning, match="hipDestroyExternalMemory failed with hipErrorUnknown"):
        memory.close()
    device._backend.destroy_memory(memory._native)  # the second time it works
    theirs.close()


def test_nothing_is_left_after_thousands_of_rounds(simulator: Simulator, device: gi.Device, memfd: Any) -> None:
    """Objects counted by the runtime, and descriptors."""
    stream = device.create_stream()
    with memfd.create_memory(4096) as theirs:

        def round_(value: int) -> None:
            semaphore: Any = device.create_semaphore(gi.TimelineFd)
            with device.import_memory(theirs.export(), size=4096) as memory, memory.map_buffer() as buffer:
                buffer.fill(value % 256, stream=stream)
                semaphore.signal(stream, value)
            semaphore.close()

        for value in range(1, 11):
            round_(value)
        stream.synchronize(LIMIT)
        device.drain()
        unpin_spare_pages(device)
        before, descriptors = simulator.live(), len(fds())
        for value in range(11, 1011):
            round_(value)
        stream.synchronize(LIMIT)
        device.drain()
        unpin_spare_pages(device)
        assert simulator.live() == before
        assert len(fds()) == descriptors
        assert theirs.read(0, 1) == bytes([1010 % 256])
    stream.close()
