"""Streams that were closed are given out again: AMD's runtime reads, in other threads, one that is destroyed."""

from __future__ import annotations

import ctypes
import sys
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.suites.base import together
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

from .runtime import Runtime

CALLS = "hipStreamCreateWithPriority", "hipStreamDestroy"
UNKNOWN = 999


def calls(simulator: Simulator) -> list[int]:
    return [simulator.calls(call) for call in CALLS]


def test_one_after_the_other_they_are_one(simulator: Simulator, device: gi.Device) -> None:
    device.create_stream().close(timeout=LIMIT)
    before = calls(simulator)
    for _ in range(100):
        with device.create_stream() as stream:
            stream.synchronize(LIMIT)
        stream.close(timeout=LIMIT)
    assert calls(simulator) == before


def test_two_threads_never_have_the_same(device: gi.Device) -> None:
    opened: set[int] = set()
    problems: list[int] = []

    def work() -> None:
        for _ in range(100):
            with device.create_stream() as stream:
                if stream.ptr in opened:
                    problems.append(stream.ptr)
                opened.add(stream.ptr)
                opened.remove(stream.ptr)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        together([work] * 4)
    finally:
        sys.setswitchinterval(interval)
    assert (problems, opened) == ([], set())


def test_each_has_its_device_and_priority(scope: ExitStack) -> None:
    hip = Runtime("libamdhip64.so")
    found = ctypes.c_int()
    for _ in range(3):
        opened = [
            (device, high, scope.enter_context(device.create_stream(high_priority=high)))
            for device in gi.get_backend("hip").devices()
            for high in (True, False)
            for _ in range(3)
        ]
        for device, high, stream in opened:
            hip.ok("hipStreamGetPriority", stream.ptr, ctypes.byref(found))
            assert (found.value < 0) is high
            hip.ok("hipStreamGetDevice", stream.ptr, ctypes.byref(found))
            assert found.value == device.ordinal
        for _, _, stream in opened:
            stream.close(timeout=LIMIT)


def test_the_first_that_was_made_is_the_next(device: gi.Device) -> None:
    """AMD's runtime spreads streams over its hardware queues in the order in which they are made."""
    with ExitStack() as scope:
        streams = [scope.enter_context(device.create_stream()) for _ in range(6)]
        pointers = [stream.ptr for stream in streams]
        for index in (3, 0, 5, 1, 4, 2):
            streams[index].close(timeout=LIMIT)
        assert [scope.enter_context(device.create_stream()).ptr for _ in range(6)] == pointers


def test_nothing_is_left_of_its_life_before(device: gi.Device, scope: ExitStack) -> None:
    gate: Any = scope.enter_context(device.create_semaphore(gi.TimelineFd))
    first = device.create_stream()
    pointer, native = first.ptr, first._known_as()
    wrapper = device.wrap_stream(pointer)
    gate.wait(first, 1)
    event = first.record()
    first.close()
    with device.create_stream() as meanwhile:
        assert meanwhile.ptr != pointer, "the first one has work still"
    gate.host_signal(1)
    first.close(timeout=LIMIT)
    assert event.done
    native.fail(gi.GpuInteropError("of the life before"))

    second = scope.enter_context(device.create_stream())
    assert second.ptr == pointer
    assert second._known_as() is not native
    assert (second.capturing, second._known_as().waiting_for()) == (False, "")
    second.synchronize(LIMIT)
    gate.wait(second, 2)
    assert not second.record().done
    for old in (first, wrapper):
        with pytest.raises(gi.ResourceClosedError):
            gate.wait(old, 3)
    assert device.wrap_stream(pointer)._known_as() is second._known_as()
    gate.host_signal(2)
    second.synchronize(LIMIT)


@pytest.mark.parametrize("why", ["failed", "captured"])
def test_one_that_can_do_no_more_is_destroyed(simulator: Simulator, device: gi.Device, why: str) -> None:
    hip = Runtime("libamdhip64.so")
    backend: Any = device.driver
    stream = backend.create_stream(device._handle)
    if why == "failed":
        with device.allocate(1) as allocation:
            simulator.fail_stream(stream.pointer, code=UNKNOWN)
            backend.fill(stream, allocation.buffer.ptr, 1, 64)
            with pytest.raises(gi.DriverError):
                backend.synchronize(stream)
    else:
        hip.ok("hipStreamBeginCapture", stream.pointer, 2)
    before = calls(simulator)
    with simulator.expect_violation("is being captured") if why == "captured" else nullcontext():  # the core never does
        for _ in range(2):
            backend.destroy_stream(stream)
    assert calls(simulator) == [before[0], before[1] + 1]


def test_a_destroy_that_fails_is_told_and_tried_again(simulator: Simulator, device: gi.Device) -> None:
    backend: Any = device.driver
    stream = backend.create_stream(device._handle)
    for call in ("hipStreamQuery", "hipStreamDestroy"):
        simulator.fail(call, code=UNKNOWN)
    with pytest.raises(gi.DriverError, match="hipStreamDestroy"):
        backend.destroy_stream(stream)
    simulator.fail("hipStreamQuery", code=UNKNOWN)
    before = calls(simulator)
    for _ in range(2):
        backend.destroy_stream(stream)
    assert calls(simulator) == [before[0], before[1] + 1]
