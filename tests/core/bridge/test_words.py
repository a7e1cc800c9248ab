"""Words: what is enqueued, what is stored, what is told."""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop._core.semaphore import SemaphoreBatch
from gpuinterop.handles import Binary
from tests.beside import beside
from tests.limits import LIMIT

from .scripted import WordsBackend, bridged, end, fails, lane_of, until, word_of


def test_values_may_be_skipped_and_signals_are_told_once(
    device: Device, backend: WordsBackend, scope: ExitStack
) -> None:
    endpoint, semaphore, stream = bridged(device, scope)
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


def test_a_signal_is_told_when_its_own_number_is_written(
    device: Device, backend: WordsBackend, scope: ExitStack
) -> None:
    """And a timeline is never set back by a stream that is slower."""
    endpoint, semaphore, stream = bridged(device, scope)
    slow = scope.enter_context(device.create_stream())
    semaphore.signal(slow, 1)
    for value in (4, 5):
        semaphore.signal(stream, value)
    (_, behind, number), (_, word, first), (_, _, second) = backend.writes
    for stored, told in ((first - 1, []), (first, [4]), (second, [4, 5])):
        ctypes.c_uint64.from_address(word).value = stored
        until(lambda told=told: endpoint.told == told)
    ctypes.c_uint64.from_address(behind).value = number
    until(lambda: not lane_of(semaphore).busy)
    assert endpoint.told == [4, 5]


def test_every_signal_lets_one_binary_wait_pass(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """Eight threads enqueue at once."""
    endpoint, semaphore, _ = bridged(device, scope, Binary)
    streams = [scope.enter_context(device.create_stream()) for _ in range(8)]
    with beside(*(lambda stream=stream: [semaphore.wait(stream) for _ in range(5)] for stream in streams)):
        pass
    numbers = sorted(value for _, _, value in backend.waits)
    assert len(set(numbers)) == 40
    for number in numbers:
        assert word_of(semaphore) < number
        endpoint.signals = 1
        until(lambda number=number: word_of(semaphore) == number)


def test_no_more_streams_signal_at_once_than_there_are_words(
    device: Device, backend: WordsBackend, scope: ExitStack
) -> None:
    """A word is another stream's as soon as its signals have been told, not before."""
    most = os.sysconf("SC_PAGESIZE") // 64 - 1  # one is for the waits
    endpoint, semaphore, last = bridged(device, scope, Binary)
    streams = [scope.enter_context(device.create_stream()) for _ in range(most)]
    for stream in streams:
        semaphore.signal(stream)
    assert len({word for _, word, _ in backend.writes}) == most
    streams[5].close()
    with pytest.raises(gi.InvalidArgumentError, match=rf"^stream: .*\b{most}\b"):
        semaphore.signal(last)
    _, taken, number = backend.writes.pop(5)
    ctypes.c_uint64.from_address(taken).value = number
    until(lambda: endpoint.told)
    semaphore.signal(last)
    assert backend.writes[-1][1] == taken
    assert endpoint.told == [0], "what the other stream wrote there is not this one's"
    backend.run_writes()
    until(lambda: len(endpoint.told) == most + 1)


@pytest.mark.parametrize("batch", [False, True], ids=["semaphore", "batch"])
def test_the_calling_threads_own_stream_raises_what_has_failed(host: Device, scope: ExitStack, batch: bool) -> None:
    """It has no synchronize() later on: NumPy works on what it gets as soon as the wait returns."""
    endpoint, semaphore, _ = bridged(host, scope)
    endpoint.on_wait = fails
    with pytest.raises(gi.DriverError, match="the test says so"):
        if batch:
            SemaphoreBatch(semaphore).wait(host.wrap_stream(0), (1,))
        else:
            semaphore.wait(host.wrap_stream(0), 1)


def test_a_wait_out_of_order_stands_behind_no_greater_one(host: Device, scope: ExitStack) -> None:
    """Also where a later wait is in order with the one before it."""
    endpoint, semaphore, last = bridged(host, scope)
    others = [scope.enter_context(host.create_stream()) for _ in range(2)]
    for stream, value in zip((last, *others), (5, 3, 4), strict=True):
        semaphore.wait(stream, value)
    endpoint.reached = 4
    for stream in others:
        stream.synchronize(LIMIT)
    assert not last.query()
    endpoint.reached = 5
    last.synchronize(LIMIT)


def test_a_closed_semaphores_page_is_the_next_ones(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """Its words stand at 0 again. Nothing is unpinned, so it is released while another stream waits."""
    never, pending, waiting = bridged(device, scope)
    pending.wait(waiting, 1)
    for _ in range(3):
        endpoint, semaphore, stream = bridged(device, scope)
        page = lane_of(semaphore).words
        assert [page.load(index) for index in range(page.COUNT)] == [0] * page.COUNT
        semaphore.signal(stream, 7)
        semaphore.wait(stream, 9)
        assert not stream.query()
        endpoint.reached = 9
        backend.run_writes()
        until(lambda told=endpoint.told: told == [7])
        end(semaphore)
        assert len(backend.pins) == 2
    assert word_of(pending) == 0
    never.reached = 1
