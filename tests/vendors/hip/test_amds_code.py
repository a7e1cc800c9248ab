"""What AMD's runtime does otherwise than its documentation says, and this library's users must not meet.

Each fails on AMD's runtime where the backend does not allow for it. docs/backends/hip.md names the versions.
"""

from __future__ import annotations

import copy
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.bridge import Bridge
from tests.beside import beside
from tests.limits import LIMIT
from tests.simulated.driver import Simulator
from tests.simulated.stand_in import StandIn

from ..parties import PARTIES, open_party
from .runtime import Runtime, word

ROUNDS = int(os.environ.get("GPUINTEROP_TEST_ROUNDS", "200"))


def test_an_address_range_is_reserved_once(simulator: Simulator, device: gi.Device) -> None:
    device.allocate(1).close(timeout=LIMIT)
    with device.allocate(1) as first:
        first.buffer.fill(1)
    calls = "hipMemAddressReserve", "hipMemAddressFree"
    before = [simulator.calls(call) for call in calls]
    for _ in range(50):
        with device.allocate(1) as allocation:
            allocation.buffer.fill(2)
            allocation.close(timeout=LIMIT)
    assert [simulator.calls(call) for call in calls] == before


@pytest.mark.parametrize("whose", ["ours", "another library's"])
def test_an_event_goes_before_its_stream(device: gi.Device, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's runtime reads the stream of an event that it is asked for (hip_event.cpp:439, 461; ROCm/clr #157)."""
    backend: Any = device.driver
    theirs = backend.create_stream(device._handle)
    there: set[Any] = set()
    left: list[int] = []

    def watch(name: str, watched: Callable[[Any, Any], object]) -> Callable[[Any], None]:
        call = getattr(backend, name)

        def watching(native: Any) -> Any:
            found = call(native)
            watched(native, found)
            return found

        monkeypatch.setattr(backend, name, watching)
        return call  # type: ignore[no-any-return]

    watch("record", lambda stream, event: there.add(event))
    watch("destroy_event", lambda event, nothing: there.discard(event))
    destroy = watch("destroy_stream", lambda stream, nothing: left.append(len(there)))

    class Theirs:
        cuda_stream = theirs.pointer

        def __del__(self) -> None:
            backend.destroy_stream(theirs)

    stream = device.create_stream() if whose == "ours" else device.wrap_stream(Theirs())
    gate: Any = device.create_semaphore(gi.TimelineFd)
    gate.wait(stream, 1)
    kept = stream.record()
    stream.close()
    device.drain()
    assert (left, kept.done) == ([], False)
    gate.host_signal(1)
    limit = time.monotonic() + LIMIT
    while not left:
        assert time.monotonic() < limit
        device.drain()
    assert left == [0], "an event was there still"
    assert kept.done, "it can be asked all the same"
    gate.close(timeout=LIMIT)
    if whose == "ours":
        destroy(theirs)


@pytest.fixture
def peer() -> gi.Device:
    """One that is not device 0."""
    devices = gi.get_backend("hip").devices()
    if len(devices) < 2:
        pytest.skip("there is one device")
    return devices[1]


def test_the_work_of_a_device_is_waited_for_before_its_memory_goes(peer: gi.Device, scope: ExitStack) -> None:
    """``hipFree`` of an import waits for device 0, whichever has imported it; this work only HIP knows of."""
    if peer.driver.holds_gil:
        pytest.skip("a call of this binding that blocks holds all threads")
    hip = Runtime("libamdhip64.so")
    exporter = scope.enter_context(open_party("memfd", peer))
    theirs = scope.enter_context(exporter.create_memory(1 << 16))
    memory = peer.import_memory(theirs.export(), size=theirs.size)
    buffer = memory.map_buffer()
    released = threading.Event()
    memory.on_released(released.set)
    place = scope.enter_context(hip.pinned())
    hip.ok("hipSetDevice", peer.ordinal)
    stream = hip.object("hipStreamCreateWithFlags", 1)
    hip.ok("hipSetDevice", 0)
    hip.ok("hipStreamWaitValue64", stream, place, 1, 0, 2**64 - 1)
    hip.ok("hipMemsetD8Async", buffer.ptr, 7, 1 << 16, stream)
    with beside(lambda: memory.close(LIMIT)):
        early = released.wait(0.2)
        word(place).value = 1
    assert not early, "the memory was released while work on it was pending"
    assert released.is_set()
    assert theirs.read(0, 1 << 16) == b"\x07" * (1 << 16)
    hip.ok("hipStreamSynchronize", stream)
    hip.ok("hipStreamDestroy", stream)


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread", "relaxed"])
def test_a_capture_survives_a_release_on_another_device(peer: gi.Device, scope: ExitStack, mode: int) -> None:
    """``hipDeviceSynchronize`` would make every capture of the process invalid, and fail."""
    hip = Runtime("libamdhip64.so")
    exporter = scope.enter_context(open_party("memfd", peer))
    theirs = scope.enter_context(exporter.create_memory(1 << 16))
    memory = peer.import_memory(theirs.export(), size=theirs.size)
    with memory.map_buffer() as buffer:
        buffer.fill(1)
        peer.synchronize(LIMIT)
        with hip.stream() as stream:
            hip.ok("hipStreamBeginCapture", stream, mode)
            released: list[str] = []
            memory.on_released(lambda: released.append("memory"))
            memory.close(timeout=LIMIT)
            graph = ctypes.c_size_t()
            hip.ok("hipStreamEndCapture", stream, ctypes.byref(graph))
            hip.ok("hipGraphDestroy", graph.value)
    assert released == ["memory"]


def test_a_release_on_one_device_stands_behind_a_wait_on_device_0(scope: ExitStack) -> None:
    """Else ``hipFree`` would block until that signal."""
    first, *others = gi.get_backend("hip").devices()
    if not others:
        pytest.skip("one device")
    gate: Any = scope.enter_context(first.create_semaphore(gi.TimelineFd))
    stream = scope.enter_context(first.create_stream(high_priority=True))
    exporter = scope.enter_context(open_party("memfd", others[0]))
    theirs = scope.enter_context(exporter.create_memory(1 << 16))
    memory = others[0].import_memory(theirs.export(), size=theirs.size)
    released: list[str] = []
    memory.on_released(lambda: released.append("memory"))
    buffer = memory.map_buffer()
    buffer.fill(1)
    gate.wait(stream, 1)
    try:
        memory.close()
        others[0].drain()
        assert released == []
        assert buffer.closed
    finally:
        gate.host_signal(1)
    stream.synchronize(LIMIT)
    memory.close(timeout=LIMIT)
    assert released == ["memory"]


def test_streams_that_wait_stall_no_others(device: gi.Device, scope: ExitStack) -> None:
    """Three of eight wait for a bridge: the others share hardware queues, and not with streams of high priority."""
    bridge = scope.enter_context(Bridge(device))
    waiting = [scope.enter_context(device.create_stream(high_priority=True)) for _ in range(3)]
    others = [scope.enter_context(device.create_stream()) for _ in range(5)]
    events = []
    for stream in waiting:
        events.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE))
        scope.callback(os.close, events[-1])
        gate: Any = scope.enter_context(bridge.import_semaphore(gi.EventFd(os.dup(events[-1]))))
        gate.wait(stream)
    try:
        with device.allocate(1) as allocation:
            buffer = allocation.buffer
            for index, stream in enumerate(others):
                buffer.fill(index + 1, offset=index, size=1, stream=stream)
            for stream in others:
                stream.synchronize(LIMIT)
            out = np.zeros(5, np.uint8)
            buffer.copy_to_host(out)
            assert out.tolist() == [1, 2, 3, 4, 5]
        assert not any(stream.query() for stream in waiting)
    finally:
        for event in events:
            os.eventfd_write(event, 1)
    for stream in waiting:
        stream.synchronize(LIMIT)


def test_the_least_granularity(device: gi.Device) -> None:
    """RDNA4 says 4 KiB, and its kernels fault below 2 MiB (#9360)."""
    found = device.allocation_granularity()
    assert found.minimum >= 2 << 20
    assert found.recommended >= found.minimum
    with device.allocate(1) as allocation:
        assert allocation.size % (2 << 20) == 0


def test_a_map_that_has_failed_is_not_unmapped(device: gi.Device) -> None:
    """``hipMemMap`` says success of it, and to unmap what is not mapped ends the process (hip_vm.cpp:252, 353)."""
    backend: Any = device.driver
    with device.allocate(1) as allocation:
        too_large = copy.copy(allocation._handle)
        too_large.size *= 2
        for _ in range(3):
            with pytest.raises(gi.DriverError) as caught:
                backend.map_allocation(too_large, [device._handle])
            assert caught.value.call == "hipMemSetAccess"
        allocation.buffer.fill(1)
        assert allocation.buffer.view(1).nbytes == 1


def rounds(device: gi.Device, scope: ExitStack) -> Iterator[int]:
    """Round after round of all that shares memory; how many imports of allocations there were, every 20 rounds."""
    exporter = scope.enter_context(open_party(PARTIES[0], device))
    for turn in range(ROUNDS):
        with device.allocate(1) as allocation, device.import_allocation(allocation.export(), allocation.size) as again:
            allocation.buffer.fill(turn % 251)
            again.buffer.fill(turn % 251)
        with exporter.create_memory(1 << 16) as theirs:
            memory = device.import_memory(theirs.export(), size=theirs.size)
            with memory.map_buffer() as buffer:
                buffer.fill(turn % 251)
                assert theirs.read(0, 1) == bytes([turn % 251])
            memory.close(timeout=LIMIT)
        if turn % 20 == 0:
            device.synchronize(LIMIT)
            allocation.close(timeout=LIMIT)
            again.close(timeout=LIMIT)
            yield turn


@pytest.mark.timeout(1000 + ROUNDS // 10)
def test_round_after_round_leaves_what_amd_keeps(
    stand_in: StandIn, device: gi.Device, scope: ExitStack, holds: dict[str, bool]
) -> None:
    """An imported allocation's handle, where the version keeps imports, and nothing else."""
    kept = holds["imports are kept"]
    kinds = ("interop_mapping", "mapping", "registration", "reservation", "queue", "handle")
    live = [[stand_in.live(kind) for kind in kinds] for _ in rounds(device, scope)]
    first = live[0]
    assert live == [[*first[:-1], first[-1] + kept * turn] for turn in range(0, ROUNDS, 20)]
