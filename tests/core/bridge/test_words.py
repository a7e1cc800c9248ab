"""Words: what is enqueued, what is stored, what is told."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop._core.semaphore import SemaphoreBatch
from gpuinterop.bridge import Bridge, _watcher
from gpuinterop.handles import Binary
from tests.beside import elsewhere

from .scripted import LIMIT, Scripted, WordsBackend, end, fails, lane_of, until, word_of


def test_values_may_be_skipped_and_signals_are_told_once(
    device: Device, backend: WordsBackend, scope: ExitStack
) -> None:
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    semaphore.wait(stream, 10)
    endpoint.reached = 9
    semaphore.wait(stream, 5)
    until(lambda: word_of(semaphore) == 5)
    assert [value for _, _, value in backend.waits] == [10, 5]
    endpoint.reached = 1 << 40
    until(lambda: word_of(semaphore) == 10)
    for value in (11, 12, 20):
        semaphore.signal(stream, value)
    assert endpoint.told == []
    _, word, last = backend.writes[-1]
    ctypes.c_uint64.from_address(word).value = last  # all three at once, as far as the watcher sees
    until(lambda: endpoint.told)
    end(semaphore)
    assert endpoint.told == [20]


def test_two_streams_have_words_of_their_own(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """Their stores are not in order with each other: the second one's says nothing about the first one's."""
    endpoint = Scripted(Binary)
    semaphore: Any = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    one, other = (scope.enter_context(device.create_stream()) for _ in range(2))
    semaphore.signal(one)
    semaphore.signal(one)
    semaphore.signal(other)
    first, second, third = backend.writes
    assert first[1] == second[1] != third[1]
    ctypes.c_uint64.from_address(third[1]).value = third[2]
    until(lambda: len(endpoint.told) == 1)
    backend.run_writes()
    until(lambda: len(endpoint.told) == 3)


def test_every_signal_lets_one_binary_wait_pass(device: Device, scope: ExitStack) -> None:
    """Eight threads enqueue at once; numbers and queue stay in one order, however they interleave."""
    endpoint = Scripted(Binary)
    semaphore: Any = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    numbers = itertools.count(1)

    class Slow:
        def __next__(self) -> int:
            number = next(numbers)
            time.sleep(0.002 if number % 2 else 0.0)
            return number

    lane = lane_of(semaphore)
    lane._numbers = Slow()  # type: ignore[assignment]
    streams = [scope.enter_context(device.create_stream()) for _ in range(8)]
    threads = [
        threading.Thread(target=lambda stream=stream: [semaphore.wait(stream) for _ in range(5)]) for stream in streams
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert [pending.value for pending in lane._waits] == list(range(1, 41))
    for passed in range(1, 41):
        endpoint.signals = 1
        until(lambda passed=passed: len(lane._waits) == 40 - passed)
        assert word_of(semaphore) == passed


def test_no_more_streams_signal_at_once_than_there_are_words(
    device: Device, backend: WordsBackend, scope: ExitStack
) -> None:
    most = os.sysconf("SC_PAGESIZE") // 64 - 1  # one is for the waits
    endpoint = Scripted(Binary)
    semaphore: Any = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    streams = [scope.enter_context(device.create_stream()) for _ in range(most + 1)]
    for stream in streams[:most]:
        semaphore.signal(stream)
    assert len({word for _, word, _ in backend.writes}) == most
    with pytest.raises(gi.InvalidArgumentError, match=f"{most} streams have still to signal"):
        semaphore.signal(streams[most])
    taken = backend.writes[5][1]
    streams[5].close()
    with pytest.raises(gi.InvalidArgumentError, match=f"{most} streams"):  # its signal is still to come
        semaphore.signal(streams[most])
    ctypes.c_uint64.from_address(taken).value = 1
    until(lambda: endpoint.told)
    del backend.writes[5]
    semaphore.signal(streams[most])
    assert backend.writes[-1][1:] == (taken, 2), "the word goes on counting"
    backend.run_writes()
    until(lambda: len(endpoint.told) == most + 1)


def test_words_go_from_stream_to_stream(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """Also of streams that are open: there may be as many as one likes, as long as few signal at once."""
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    streams = [scope.enter_context(device.create_stream()) for _ in range(100)]
    for value, stream in enumerate(streams + streams, 1):
        semaphore.signal(stream, value)
        backend.run_writes()
        until(lambda value=value: endpoint.told[-1:] == [value])
    assert not lane_of(semaphore).busy


def test_the_default_stream_of_each_thread_is_another(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """CUDA and HIP call every thread's own by the number 2."""
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = device.wrap_stream(2)
    semaphore.signal(stream, 1)
    for value in range(2, 10):  # one after the other: a new thread gets the ident of one that has ended
        elsewhere(semaphore.signal, stream, value)
    assert len({word for _, word, _ in backend.writes}) == 9


@pytest.mark.parametrize("batch", [False, True], ids=["semaphore", "batch"])
def test_the_calling_threads_own_stream_raises_what_has_failed(host: Device, scope: ExitStack, batch: bool) -> None:
    """It has no synchronize() later on: NumPy works on what it gets as soon as the wait returns."""
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(host)).from_endpoint(endpoint))
    lane, stream = lane_of(semaphore), host.wrap_stream(0)

    def fail_when_it_waits() -> None:
        if lane._waits:
            fails()

    endpoint.on_wait = fail_when_it_waits
    with pytest.raises(gi.DriverError, match="the test says so"):
        if batch:
            SemaphoreBatch(semaphore).wait(stream, (1,))
        else:
            semaphore.wait(stream, 1)


def test_many_waits_queued_ahead_are_looked_at_one_by_one(
    device: Device, scope: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    compared = itertools.count()
    value_of = _watcher._value_of

    def counted(pending: Any) -> int:
        next(compared)
        return value_of(pending)

    monkeypatch.setattr(_watcher, "_value_of", counted)
    for value in range(1, 501):
        semaphore.wait(stream, value)
    endpoint.reached = 500
    until(lambda: word_of(semaphore) == 500)
    assert next(compared) == 0, "in order, the first is the least"
    semaphore.wait(stream, 700)
    semaphore.wait(stream, 600)
    endpoint.reached = 600
    until(lambda: word_of(semaphore) == 600)
    endpoint.reached = 700
    until(lambda: word_of(semaphore) == 700)


def test_a_wait_out_of_order_stands_behind_no_greater_one(host: Device, bridge: Bridge, scope: ExitStack) -> None:
    """Also where a later wait is in order with the one before it."""
    endpoint = Scripted()
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
    streams = [scope.enter_context(host.create_stream()) for _ in range(3)]
    last, *others = streams
    for stream, value in zip(streams, (5, 3, 4), strict=True):
        semaphore.wait(stream, value)
    endpoint.reached = 4
    for stream in others:
        stream.synchronize(LIMIT)
    assert not last.query()
    endpoint.reached = 5
    last.synchronize(LIMIT)
