"""The pages that the words are in: kept, given once, unpinned when nothing waits."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from gpuinterop._core.device import Device
from gpuinterop._core.stream_memory import SPARE
from gpuinterop.backend import DriverHandle
from gpuinterop.bridge import Bridge

from ..fake import fake_device
from .scripted import LIMIT, Scripted, WordsBackend, end, lane_of, spare, until, word_of


class Blocking(WordsBackend):
    """To unpin a page waits for all work of the device, as on CUDA."""

    releases_block = True

    def unpin(self, pin: DriverHandle) -> None:
        assert not self.is_waiting(), "it would block"
        super().unpin(pin)


@pytest.fixture
def blocking() -> tuple[Device, Blocking]:
    backend = Blocking()
    return fake_device(backend=backend)[0], backend


def test_a_closed_semaphores_page_is_the_next_ones(blocking: tuple[Device, Blocking], scope: ExitStack) -> None:
    """Its words stand at 0 again. Nothing is unpinned, so it is released while another stream waits."""
    device, backend = blocking
    bridge = scope.enter_context(Bridge(device))
    waiting, stream = (scope.enter_context(device.create_stream()) for _ in range(2))
    scope.enter_context(pending := bridge.from_endpoint(never := Scripted())).wait(waiting, 1)
    for frame in range(5):
        endpoint = Scripted()
        semaphore = bridge.from_endpoint(endpoint)
        page = lane_of(semaphore).words
        assert [page.load(index) for index in range(page.COUNT)] == [0] * page.COUNT
        semaphore.signal(stream, 7)
        semaphore.wait(stream, 9)
        assert not stream.query()
        endpoint.reached = 9
        backend.run_writes()
        until(lambda told=endpoint.told: told == [7])
        end(semaphore)
        assert len(backend.pins) == 2, frame
    assert word_of(pending) == 0
    never.reached = 1


def test_pages_that_are_not_kept_are_unpinned_when_nobody_waits(
    blocking: tuple[Device, Blocking], scope: ExitStack
) -> None:
    device, backend = blocking
    bridge = scope.enter_context(Bridge(device))
    stream = scope.enter_context(device.create_stream())
    waited = scope.enter_context(bridge.from_endpoint(endpoint := Scripted()))
    many = [bridge.from_endpoint(Scripted()) for _ in range(SPARE + 3)]
    waited.wait(stream, 1)
    end(*many)  # each is released
    assert len(backend.pins) == SPARE + 4
    endpoint.reached = 1
    until(stream.query)
    device.drain(LIMIT)
    assert spare(device) == SPARE
    assert len(backend.pins) == SPARE + 1
    assert word_of(waited) == 1
