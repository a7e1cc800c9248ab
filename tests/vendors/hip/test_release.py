"""Both halves of a mapping are given back, and pinned pages; what HIP's calls wait for; words at their edges."""

from __future__ import annotations

import textwrap
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from tests.limits import LIMIT
from tests.programs import printed
from tests.simulated.driver import Simulator

from ..parties import open_party

BEHIND = """
import faulthandler
import threading
import gpuinterop as gi
from tests.vendors.hip.runtime import Runtime
device = gi.get_backend("hip").device()
gate, other = (device.create_semaphore(gi.TimelineFd) for _ in range(2))
default, ours, allocation = device.wrap_stream(0), device.create_stream(high_priority=True), device.allocate(1)
faulthandler.dump_traceback_later(300, exit=True)  # in C: a call that keeps the GIL ends as well
"""


def mapped(program: str) -> list[str]:
    """What a program prints that maps an allocation."""
    program = BEHIND + textwrap.dedent(program)
    return printed("-c", program, PYTHONUNBUFFERED="1").splitlines()  # the first stream compiles kernels


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
            print(f"{gate.label} to reach {value}" in str(error))
    gate.wait(default, 1)
    refused(1)
    gate.host_signal(1)
    default.synchronize(300)
    other.wait(default, 1)  # a stream will signal it, once it may
    gate.wait(ours, 2)
    other.signal(ours, 1)
    refused(2)
    gate.host_signal(2)
    allocation.buffer.fill(7, stream=ours)
    ours.synchronize(300)
    """
    assert mapped(program) == ["True", "True"]


def test_a_mapping_waits_for_no_stream_of_ours_and_for_what_streams_will_signal() -> None:
    program = """
    gate.wait(ours, 1)
    theirs = device.wrap_stream(Runtime("libamdhip64.so").object("hipStreamCreateWithPriority", 1, -1))  # non-blocking
    gate.wait(theirs, 1)
    allocation.buffer
    gate.host_signal(1)
    theirs.synchronize(300)
    batch = gi.SemaphoreBatch(gate, other)
    batch.signal(ours, (2, 1))
    batch.signal(ours, (3, 2))
    ours.synchronize(300)
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
