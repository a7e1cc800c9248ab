"""The pages that the words are in: kept, given once, unpinned when nothing waits."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest

from gpuinterop._core.device import Device
from gpuinterop._core.native import GONE
from gpuinterop._core.stream_memory import SPARE, spare_words
from gpuinterop.backend import Native
from gpuinterop.bridge import Bridge, _watcher

from ..fake import fake_device
from .scripted import LIMIT, Scripted, WordsBackend, end, lane_of, spare, until, word_of


class Blocking(WordsBackend):
    """To unpin a page waits for all work of the device, as on CUDA."""

    releases_block = True

    def unpin(self, pin: Native) -> None:
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


def test_an_interrupted_release_gives_its_page_once(
    words: tuple[Device, WordsBackend], scope: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is released anew, and meanwhile another semaphore may have the page: that is its own."""
    device, backend = words
    bridge = scope.enter_context(Bridge(device))
    semaphore = bridge.from_endpoint(endpoint := Scripted())
    give = spare_words(device).give
    others: list[Any] = []

    def interrupted(page: Any) -> None:
        give(page)
        if not others:
            others.append(bridge.from_endpoint(Scripted()))
            lane_of(others[0]).words.store(0, 5)
            raise KeyboardInterrupt

    monkeypatch.setattr(spare_words(device), "give", interrupted)
    with pytest.raises(KeyboardInterrupt):
        semaphore.close()
    until(lambda: semaphore._lifetime.state in GONE)
    others.append(bridge.from_endpoint(Scripted()))
    assert endpoint.closed == 1
    assert (word_of(others[0]), word_of(others[1])) == (5, 0)
    assert len(backend.pins) == 2
    end(*others)


def test_a_lock_outlives_no_interrupt() -> None:
    """One strikes behind acquire(): the watcher, or whoever comes next, must not wait for ever."""
    lock = threading.RLock()

    class Struck:
        release = staticmethod(lock.release)

        @staticmethod
        def acquire(timeout: float) -> bool:
            lock.acquire(timeout=timeout)
            raise KeyboardInterrupt

    def free() -> bool:
        taken: list[bool] = []
        thread = threading.Thread(target=lambda: taken.append(_watcher._with(lock, bool, 0.0)))
        thread.start()
        thread.join(LIMIT)
        return taken[0]

    with pytest.raises(KeyboardInterrupt):
        _watcher._with(Struck(), bool)  # type: ignore[arg-type]
    assert free()
    with lock:
        assert not free()
        assert _watcher._with(lock, bool)
        assert not free(), "another's hold was given up"
    assert free()
