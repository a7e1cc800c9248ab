"""Where a native release waits for the whole device, it is not called while a semaphore wait may be pending.

Such a call would hold every other call of the process until the wait is over (measured: ``cuMemFree``,
``cuDestroyExternalSemaphore``), also the one that was to end it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core import release
from gpuinterop._core.device import Device
from gpuinterop._core.streams import MANY
from tests.beside import elsewhere
from tests.limits import LIMIT

from .fake import FakeDriver, fake_device, memory_of, semaphore_of


@pytest.fixture
def fake() -> tuple[Device, FakeDriver]:
    backend = FakeDriver()
    device, _ = fake_device(backend=backend)
    return device, backend


def test_nothing_that_blocks_is_released_behind_a_pending_wait(device: Device, backend: FakeDriver) -> None:
    gate, other, memory = semaphore_of(device), semaphore_of(device), memory_of(device)
    _held = memory.map_buffer(), memory.map_mipmapped_array("R8_UNORM", (4, 4))
    with device.create_stream() as stream:
        gate.wait(stream, 1)
        other.close()
        memory.close()
        device.drain()
        assert backend.count("semaphore") == 2
        assert (backend.count("mapping"), backend.count("array"), backend.count("memory")) == (1, 1, 1)
        with pytest.raises(gi.ResourceBusyError, match=rf"{stream.label}\b.* semaphore"):
            other.close(timeout=0)
        backend.pass_all()
        device.drain()
        assert backend.count("semaphore") == 1
        assert (backend.count("mapping"), backend.count("array"), backend.count("memory")) == (0, 0, 0)
        gate.close()


def test_a_wait_whose_value_is_there_stands_behind_the_earlier_ones(device: Device, backend: FakeDriver) -> None:
    """The CPU sees the value of our own timeline, and not how far the stream is."""
    gate, ours, memory = semaphore_of(device), device.create_semaphore(gi.TimelineFd), memory_of(device)
    _held = memory.map_buffer()
    with device.create_stream() as stream:
        gate.wait(stream, 1)
        ours.host_signal(1)
        ours.wait(stream, 1)
        memory.close()
        device.drain()
        assert backend.count("mapping") == 1
        backend.arrive(gate._handle, 1)
        device.drain()
        assert backend.count("mapping") == 0
    gate.close(timeout=LIMIT)
    ours.close(timeout=LIMIT)


def test_a_wait_whose_call_an_exception_struck_may_be_pending(device: Device, backend: FakeDriver) -> None:
    """A driver's error says that nothing was enqueued. An interrupt says nothing, and here the driver has the wait."""
    gate, other, quiet = semaphore_of(device), semaphore_of(device), backend.at

    def strike(call: str, place: str, _handles: object) -> None:
        if (call, place) == ("wait", "end"):
            raise KeyboardInterrupt

    with device.create_stream() as stream:
        backend.at = strike
        with pytest.raises(KeyboardInterrupt):
            gate.wait(stream, 1)
        backend.at = quiet
        other.close()
        device.drain()
        assert backend.count("semaphore") == 2
        backend.arrive(gate._handle, 1)
        device.drain()
        assert backend.count("semaphore") == 1
    gate.close(timeout=LIMIT)


def test_a_callback_runs_without_the_lock(device: Device, backend: FakeDriver) -> None:
    """It may do what it likes, also wait for a thread that enqueues a wait."""
    gate, other = semaphore_of(device), semaphore_of(device)
    with device.create_stream() as stream:
        done: list[bool] = []

        def callback() -> None:
            thread = threading.Thread(target=lambda: gate.wait(stream, 1))
            thread.start()
            thread.join(LIMIT)
            done.append(not thread.is_alive())

        other.on_released(callback)
        other.close()
        assert done == [True]
        backend.pass_all()
    gate.close(timeout=LIMIT)


@pytest.mark.parametrize("by", ["wait", "batch", "follow"])
def test_a_callback_waits_while_blocked_releases_go(device: Device, backend: FakeDriver, by: str) -> None:
    """It runs with nothing held: not the gate, which its wait would stand at for ever, and no mark of the call."""
    gate, one = semaphore_of(device), semaphore_of(device)
    batch = gi.SemaphoreBatch(one)
    with device.create_stream() as stream, device.create_stream() as other:
        gate.wait(stream, 1)
        closed = [semaphore_of(device) for _ in range(MANY + 1)]
        waited = list[str]()

        def callback() -> None:
            gate.wait(other, 1)
            waited.append(by)

        closed[0].on_released(callback)
        for semaphore in closed:
            semaphore.close()
        backend.pass_all()
        calls = {
            "wait": lambda: gate.wait(stream, 2),
            "batch": lambda: batch.wait(stream, (2,)),
            "follow": lambda: other.wait_stream(stream),
        }
        elsewhere(calls[by])
        assert waited == [by]
        backend.pass_all()
    gate.close(timeout=LIMIT)
    one.close(timeout=LIMIT)


def test_the_wait_that_a_thread_gave_its_own_default_stream_last_is_seen_to_pass(
    device: Device, backend: FakeDriver
) -> None:
    """By others, who cannot ask that stream, and after the thread's end."""
    gate, other = semaphore_of(device), semaphore_of(device)
    elsewhere(gate.wait, device.wrap_stream(2), 1)
    other.close()
    device.drain()
    assert backend.count("semaphore") == 2
    backend.arrive(gate._handle, 1)
    device.drain()
    assert backend.count("semaphore") == 1
    gate.close(timeout=LIMIT)


def test_a_blocked_release_costs_the_same_beside_many_streams(device: Device, backend: FakeDriver) -> None:
    """One stream holds it up, and that one is asked alone."""
    gate, other = semaphore_of(device), semaphore_of(device)
    streams = [device.create_stream() for _ in range(200)]
    for stream in streams:
        gate.wait(stream, 1)
    other.close()
    device.drain()
    backend.looks = 0
    for _ in range(10):
        memory_of(device).close()
    assert backend.looks <= 4 * 10
    backend.pass_all()
    device.drain()
    assert backend.count("semaphore") == 1
    for stream in streams:
        stream.close()
    gate.close(timeout=LIMIT)


def test_a_wait_stands_aside_also_if_more_are_held_than_the_next_attempt_asks_for(
    device: Device, backend: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many were closed at once, and the first attempt was in vain: the next one is made all the same."""
    gate, signalled = semaphore_of(device), 0

    def stand_aside(condition: Callable[[], bool], _timeout: float | None) -> bool:
        backend.arrive(gate._handle, signalled)  # what is on its way comes meanwhile
        return condition()

    with device.create_stream() as stream:
        monkeypatch.setattr(system, "until", stand_aside)
        gate.wait(stream, 1)
        for _ in range(5 * MANY):
            semaphore_of(device).close()
        gate.wait(stream, 2)
        assert backend.count("semaphore") == 1 + 5 * MANY
        semaphore_of(device).close()
        signalled = 2
        gate.wait(stream, 3)  # the stream is not idle, before and after
        assert backend.count("semaphore") == 1
        monkeypatch.undo()
        backend.arrive(gate._handle, 3)
    gate.close(timeout=LIMIT)


def test_a_backend_whose_releases_do_not_block_is_not_held_up() -> None:
    device, backend = fake_device()
    gate, other = semaphore_of(device), semaphore_of(device)
    with device.create_stream() as stream:
        gate.wait(stream, 1)
        other.close()
        assert backend.count("semaphore") == 1
        gate.close()


@pytest.mark.parametrize("for_all", [True, False])
def test_a_release_may_wait_for_other_devices_too(monkeypatch: pytest.MonkeyPatch, for_all: bool) -> None:
    """HIP's waits for device 0, whichever has imported the memory; CUDA's for its own device alone."""
    monkeypatch.setattr(FakeDriver, "releases_block_for_all", for_all)
    backend = FakeDriver()
    (first, _), (second, _) = fake_device(backend=backend), fake_device(backend=backend, ordinal=1)
    gate, memory = semaphore_of(first), memory_of(second)
    _held = memory.map_buffer()
    with first.create_stream() as stream:
        gate.wait(stream, 1)
        memory.close()
        second.drain()
        assert backend.count("mapping") == int(for_all)
        backend.pass_all()
        second.drain()
        assert backend.count("mapping") == 0
    gate.close()


@pytest.mark.parametrize("waits", [False, True])
def test_what_makes_memory_waits_for_a_device_that_fell_behind(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """What is closed stays until its work has run; behind a wait nobody waits, for this thread may have to signal."""
    device, backend = fake_device()
    gate, stream, caught_up = semaphore_of(device), device.create_stream(), list[int]()

    def let_it_catch_up(condition: Callable[[], bool], timeout: float | None) -> bool:
        assert timeout == release.BACKLOG_S
        caught_up.append(backend.count("memory"))
        backend.blocked.clear()
        return condition()

    monkeypatch.setattr(release, "BACKLOG", 4)
    monkeypatch.setattr(system, "until", let_it_catch_up)
    if waits:
        gate.wait(stream, 1)
    for _ in range(20):
        memory = memory_of(device)
        with memory, memory.map_buffer() as buffer:
            backend.blocked.add(stream.ptr)
            buffer.fill(1, stream=stream)
    monkeypatch.undo()
    assert caught_up == ([] if waits else [5] * 3)
    backend.blocked.clear()
    backend.pass_all()
    device.drain()
    stream.close()
    gate.close()
    device.drain()
    assert backend.count("memory") == 0
