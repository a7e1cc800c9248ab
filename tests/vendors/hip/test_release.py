"""Both halves of a mapping are given back, and pinned pages; what HIP's calls wait for; words at their edges."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from tests.simulated.driver import Simulator

from ..parties import open_party

LIMIT = 20.0


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


BEHIND = """
import faulthandler
import threading
import gpuinterop as gi
from tests.vendors.hip.runtime import Runtime
device = gi.get_backend("hip").device()
gate, other = (device.create_semaphore(gi.TimelineFd) for _ in range(2))
default, ours, allocation = device.wrap_stream(0), device.create_stream(high_priority=True), device.allocate(1)
faulthandler.dump_traceback_later(30, exit=True)  # in C: a call that keeps the GIL ends as well
"""


def mapped(program: str) -> list[str]:
    """What a program prints that maps an allocation."""
    done = subprocess.run(
        [sys.executable, "-c", BEHIND + textwrap.dedent(program)],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=100,  # the first stream compiles AMD's kernels
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_mapping_stands_aside_for_the_default_stream() -> None:
    """``hipMemMap`` goes through the null stream (hip_vm.cpp:252): behind a wait there it blocks, under AMD's lock.

    So would the call of the thread that is about to signal, with hip-python 7.2 under the GIL as well.
    """
    program = """
    def signal():
        default.query()
        gate.host_signal(1)
    gate.wait(default, 1)
    signaller = threading.Timer(0.3, signal)
    signaller.start()
    allocation.buffer.fill(7, stream=ours)
    print(gate.host_wait(1, timeout=0))
    signaller.join()
    """
    assert mapped(program) == ["None"]


def test_a_mapping_that_this_thread_alone_could_let_go_on_is_refused() -> None:
    program = """
    def refused(value):
        try:
            allocation.buffer
        except gi.ResourceBusyError as error:
            print(f"waits for {gate.label} to reach {value}, and this thread alone" in str(error))
    gate.wait(default, 1)
    refused(1)
    gate.host_signal(1)
    default.synchronize(10)
    other.wait(default, 1)  # a stream will signal it, once it may
    gate.wait(ours, 2)
    other.signal(ours, 1)
    refused(2)
    gate.host_signal(2)
    allocation.buffer.fill(7, stream=ours)
    ours.synchronize(10)
    """
    assert mapped(program) == ["True", "True"]


def test_a_mapping_waits_for_no_stream_of_ours_and_for_what_streams_will_signal() -> None:
    program = """
    gate.wait(ours, 1)
    theirs = device.wrap_stream(Runtime("libamdhip64.so").object("hipStreamCreateWithPriority", 1, -1))  # non-blocking
    gate.wait(theirs, 1)
    allocation.buffer
    gate.host_signal(1)
    theirs.synchronize(10)
    batch = gi.SemaphoreBatch(gate, other)
    batch.signal(ours, (2, 1))
    batch.signal(ours, (3, 2))
    ours.synchronize(10)
    gate.wait(default, 4)
    try:
        device.allocate(1).buffer
    except gi.ResourceBusyError:
        print("refused")
    gate.host_signal(4)
    for value in range(5, 50):
        gate.wait(default, value)
        gate.signal(ours, value)
        with device.allocate(1) as fresh:
            fresh.buffer
    print("mapped")
    """
    assert mapped(program) == ["refused", "mapped"]


def test_a_threads_own_default_stream_is_refused(device: gi.Device) -> None:
    """When the thread ends HIP deletes it, and its events keep the pointer (hip_stream.cpp:216, hip_event.cpp:363)."""
    with pytest.raises(gi.InvalidArgumentError, match="outlives its thread, got 2"):
        device.wrap_stream(2)
    for default in (0, 1):
        device.wrap_stream(default).synchronize(LIMIT)


def test_a_release_asks_no_stream_that_waits_for_nothing(
    simulator: Simulator, device: gi.Device, scope: ExitStack
) -> None:
    """With hip-python 7.2 as well: its releases are made by ctypes, which lets other threads run."""
    streams = [scope.enter_context(device.create_stream()) for _ in range(100)]
    exporter = scope.enter_context(open_party("memfd", device))
    theirs = scope.enter_context(exporter.create_memory(4096))
    device.drain()
    before = simulator.calls("hipStreamQuery")
    for stream in streams[:10]:
        with device.import_memory(theirs.export(), size=theirs.size) as memory, memory.map_buffer() as buffer:
            buffer.fill(1, stream=stream)
            stream.synchronize(LIMIT)
    assert simulator.calls("hipStreamQuery") - before <= 100


def test_a_stream_that_waits_is_looked_at_by_its_events(
    simulator: Simulator, device: gi.Device, scope: ExitStack
) -> None:
    """``hipStreamQuery`` of one with work enqueues a marker, which AMD's runtime keeps until the stream goes on."""
    exporter = scope.enter_context(open_party("memfd", device))
    theirs = scope.enter_context(exporter.create_memory(4096))
    gate: Any = scope.enter_context(device.create_semaphore(gi.TimelineFd))
    stream = scope.enter_context(device.create_stream(high_priority=True))
    gate.wait(stream, 1)
    before = simulator.calls("hipStreamQuery")
    for _ in range(100):
        with device.import_memory(theirs.export(), size=theirs.size) as memory, memory.map_buffer():
            pass
    asked = simulator.calls("hipStreamQuery") - before
    gate.host_signal(1)
    stream.synchronize(LIMIT)
    assert asked <= 10


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
    backend: Any = device.driver
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    word = ctypes.c_uint64.from_buffer(memory)
    host = ctypes.addressof(word)
    pin, there = backend.pin(device.handle, host, mmap.PAGESIZE)
    stream = backend.create_stream(device.handle)
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
