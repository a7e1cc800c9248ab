"""The scripted backend refuses what a driver would crash on; else the tests that stand on it prove little."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

import gpuinterop as gi

from .fake import VIOLATIONS, FakeBackend, FakeDriver, Handle


@pytest.fixture
def noted() -> Iterator[list[str]]:
    yield VIOLATIONS
    VIOLATIONS.clear()


def stream_of(backend: FakeBackend, device: int = 0) -> Handle:
    made: Handle = backend.create_stream(device)
    return made


def semaphore_of(backend: FakeBackend, device: int = 0) -> Handle:
    made: Handle = backend.import_semaphore(device, gi.TimelineWin32(handle=8))
    return made


def test_what_is_dead_is_refused_also_where_nobody_sees_the_error(noted: list[str]) -> None:
    backend = FakeBackend()
    stream, semaphore = stream_of(backend), semaphore_of(backend)
    event = backend.record(stream)
    backend.destroy_semaphore(semaphore)
    backend.destroy_stream(stream)
    uses: list[Callable[[], object]] = [
        lambda: backend.record(stream),
        lambda: backend.signal((semaphore,), stream_of(backend), (1,)),
        lambda: backend.is_done(event),
        lambda: backend.destroy_stream(stream),
    ]
    for use in uses:
        with contextlib.suppress(AssertionError):
            use()
    assert len(noted) == len(backend.violations) == len(uses)
    backend.destroy_event(event)


@pytest.mark.parametrize("place", ["start", "inside"])
def test_nothing_is_released_while_a_call_with_it_is_under_way(noted: list[str], place: str) -> None:
    backend = FakeBackend()
    stream, semaphore = stream_of(backend), semaphore_of(backend)
    backend.at = lambda call, where, handles: (
        backend.destroy_semaphore(semaphore) if (call, where) == ("signal", place) else None
    )
    with pytest.raises(AssertionError):
        backend.signal((semaphore,), stream, (1,))
    assert noted


def test_a_parent_goes_last_and_work_is_done_first(noted: list[str]) -> None:
    backend = FakeBackend()
    stream, memory = stream_of(backend), backend.import_memory(0, gi.OpaqueWin32(handle=8), size=64, dedicated=False)
    mapping, address = backend.map_buffer(memory, size=64)
    with pytest.raises(AssertionError, match="stands on it"):
        backend.destroy_memory(memory)
    backend.fill(stream, address, 1, 64)
    backend.blocked.add(stream[1])
    with pytest.raises(AssertionError, match="before the work"):
        backend.unmap_buffer(mapping)
    backend.blocked.clear()
    backend.unmap_buffer(mapping)
    with pytest.raises(AssertionError, match="unmapped"):
        backend.fill(stream, address, 1, 64)
    assert len(noted) == 3


def test_a_release_behind_a_wait_of_its_device_is_refused(noted: list[str]) -> None:
    backend = FakeDriver()
    gate, mine, theirs = semaphore_of(backend), semaphore_of(backend), semaphore_of(backend, device=1)
    backend.wait((gate,), stream_of(backend), (1,), None)
    backend.destroy_semaphore(theirs)
    with pytest.raises(AssertionError, match="blocks while streams wait"):
        backend.destroy_semaphore(mine)
    backend.pass_all()
    backend.destroy_semaphore(mine)
    assert len(noted) == 1
