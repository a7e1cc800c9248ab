"""Closing while a stream waits: no call of ours may block behind it, and both halves of a mapping are given back.

``hipFree`` synchronises the device. A backend that called it at once would hang here behind a wait whose store is
still to come, on the GPU and on the simulator alike. Streams wait for words here: HIP has no semaphores on Linux.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import gpuinterop as gi
from tests.simulated.driver import Simulator

from .parties import PARTIES, open_party

LIMIT = 20.0


@pytest.fixture(params=PARTIES)
def exporter(request: pytest.FixtureRequest, device: gi.Device) -> Iterator[Any]:
    with open_party(request.param, device) as exporter:
        yield exporter


def test_a_close_behind_a_wait_blocks_nobody(device: gi.Device, exporter: Any) -> None:
    theirs = exporter.create_memory(1 << 16)
    memory = device.import_memory(theirs.export(), size=theirs.size)
    buffer = memory.map_buffer()
    gate: Any = device.create_semaphore(gi.TimelineFd)
    with device.create_stream() as waiting, device.create_stream() as signalling:
        gate.wait(waiting, 1)
        released: list[str] = []
        buffer.on_released(lambda: released.append("buffer"))
        memory.on_released(lambda: released.append("memory"))
        buffer.close()
        memory.close()
        device.drain()
        with device.import_memory(theirs.export(), size=theirs.size):  # imports drain, too
            pass
        assert released == [], "released behind a pending wait"
        with pytest.raises(gi.ResourceBusyError, match="still in use"):
            memory.close(timeout=0.01)
        gate.signal(signalling, 1)
        memory.close(timeout=LIMIT)
        assert released == ["buffer", "memory"]
        signalling.synchronize(LIMIT)
    gate.close(timeout=LIMIT)
    theirs.close()


def test_a_wait_that_came_after_the_close(device: gi.Device, exporter: Any) -> None:
    """hipFree waits for all work of the device, also for what was enqueued since: it is not called meanwhile."""
    theirs = exporter.create_memory(1 << 16)
    memory = device.import_memory(theirs.export(), size=theirs.size)
    buffer = memory.map_buffer()
    gate: Any = device.create_semaphore(gi.TimelineFd)
    with device.create_stream() as using, device.create_stream() as waiting:
        released: list[str] = []
        buffer.on_released(lambda: released.append("buffer"))
        gate.wait(using, 1)
        buffer.fill(1, stream=using)
        buffer.close()
        gate.wait(waiting, 2)
        gate.host_signal(1)
        using.synchronize(LIMIT)
        device.drain()
        assert released == [], "hipFree would have blocked until a signal"
        gate.host_signal(2)
        buffer.close(timeout=LIMIT)
        assert released == ["buffer"]
    memory.close()
    gate.close(timeout=LIMIT)
    theirs.close()


def test_an_unmapping_waits_for_no_default_stream(device: gi.Device) -> None:
    """``hipMemUnmap`` goes through the null stream (hip_vm.cpp:362): behind a wait there it would block."""
    allocation = device.allocate(1)
    allocation.buffer.fill(1)
    gate: Any = device.create_semaphore(gi.TimelineFd)
    with device.wrap_stream(0) as default:
        gate.wait(default, 1)
        opening = threading.Timer(LIMIT / 4, gate.host_signal, (1,))
        opening.start()
        start = time.monotonic()
        allocation.close()
        device.drain()
        assert time.monotonic() - start < LIMIT / 8
        opening.cancel()
        opening.join()
        gate.host_signal(1)
        default.synchronize(LIMIT)
    allocation.close(timeout=LIMIT)
    gate.close(timeout=LIMIT)


def test_free_comes_before_destroy(simulator: Simulator, device: gi.Device) -> None:
    """Both are needed: ``hipDestroyExternalMemory`` leaves what is mapped, ``hipFree`` leaves the handle."""
    with open_party("memfd", device) as exporter, exporter.create_memory(1 << 16) as theirs:
        before = simulator.live()
        calls = ("hipFree", "hipDestroyExternalMemory")
        counts = [simulator.calls(call) for call in calls]
        memory = device.import_memory(theirs.export(), size=theirs.size)
        first, second = memory.map_buffer(0, 4096), memory.map_buffer(8192, 4096)
        assert second.ptr == first.ptr + 8192, "base and offset"
        memory.close()
        device.drain()
        assert [simulator.calls(call) for call in calls] == [counts[0] + 1, counts[1] + 1]
        assert simulator.live() == before


def test_no_address_is_given_twice(simulator: Simulator, device: gi.Device) -> None:
    """HIP gives the same pointer for the same offset, and to free it twice is an error: an object is mapped once."""
    with open_party("memfd", device) as exporter, exporter.create_memory(1 << 16) as theirs:
        memory = device.import_memory(theirs.export(), size=theirs.size)
        before = simulator.calls("hipExternalMemoryGetMappedBuffer")
        whole, again, part = memory.map_buffer(), memory.map_buffer(), memory.map_buffer(4096, 4096)
        assert simulator.calls("hipExternalMemoryGetMappedBuffer") == before + 1
        assert (again.ptr, part.ptr) == (whole.ptr, whole.ptr + 4096)
        freed = simulator.calls("hipFree")
        for buffer in (whole, again):
            buffer.close()
        device.drain()
        assert simulator.calls("hipFree") == freed, "still in use"
        part.fill(5)
        part.close()
        assert simulator.calls("hipFree") == freed + 1
        # Closed and mapped anew, from the same offset: another mapping, freed by itself.
        memory.map_buffer().close()
        assert simulator.calls("hipFree") == freed + 2
        # A second import of the same object is a mapping of its own.
        with device.import_memory(theirs.export(), size=theirs.size) as other:
            mine, its = memory.map_buffer(), other.map_buffer()
            mine.fill(7)
            assert theirs.read(0, 8) == bytes([7]) * 8
            its.fill(8)
            assert theirs.read(0, 8) == bytes([8]) * 8
            mine.close()
            its.fill(9)
            assert theirs.read(0, 8) == bytes([9]) * 8
        memory.close()
        assert simulator.violations() == []


def test_pinned_pages_are_given_back(simulator: Simulator, device: gi.Device) -> None:
    before = simulator.live()
    counts = [simulator.calls(call) for call in ("hipHostRegister", "hipHostUnregister")]
    semaphore: Any = device.create_semaphore(gi.TimelineFd)
    with device.create_stream() as stream:
        semaphore.signal(stream, 3)
        stream.synchronize(LIMIT)
        handle = semaphore.export()
        page = mmap.mmap(handle.fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)
        assert (3).to_bytes(8, "little") in page[:64], "the word that another process reads"
        page.close()
        handle.close()
    semaphore.close(timeout=LIMIT)
    device.drain()
    now = [simulator.calls(call) for call in ("hipHostRegister", "hipHostUnregister")]
    assert now[0] - counts[0] == now[1] - counts[1] == 1
    after = simulator.live()
    assert {kind: after[kind] for kind in after if "host" in kind or "regist" in kind} == {
        kind: before[kind] for kind in before if "host" in kind or "regist" in kind
    }


def test_words_at_their_edges(device: gi.Device) -> None:
    """Through the interface itself: what is stored is there for the CPU, and a wait ends with the CPU's store."""
    backend: Any = device._backend
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    word = ctypes.c_uint64.from_buffer(memory)
    host = ctypes.addressof(word)
    pin, there = backend.pin(device._native, host, mmap.PAGESIZE)
    stream = backend.create_stream(device._native)
    for value in (1, 2**31, 2**32 + 7, 2**63 - 1):
        backend.write_value(stream, there, value)
        backend.synchronize(stream)
        assert word.value == value
    word.value = 4
    backend.wait_value(stream, there, 5)
    event = backend.record(stream)
    assert not backend.is_done(event)
    word.value = 6  # more than it waits for will do
    assert backend.wait_done(event, LIMIT)
    backend.destroy_event(event)
    backend.destroy_stream(stream)
    backend.unpin(pin)
    del word
    memory.close()
