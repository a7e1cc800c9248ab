"""A failure reaches the owner of each stream behind it, and no other."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop._core.streams import KnownStream
from gpuinterop.bridge import Bridge
from tests.limits import LIMIT

from ..fake import fake_device
from .scripted import Script, Scripted, WordsBackend, bridged, fails, lane_of, until


def breaks(endpoint: Scripted, semaphore: Any) -> Callable[[], None]:
    """Return what fails the semaphore, and comes back once it has failed."""

    def fail() -> None:
        endpoint.on_wait = fails
        until(lambda: lane_of(semaphore).ended)

    return fail


def test_who_is_ordered_behind_a_wait_fails_with_it(host: Device, bridge: Bridge, scope: ExitStack) -> None:
    """`wait_stream` behind a bridged wait, twice over: they ran without it, too, and what they signal is not told."""
    broken, told = Scripted(), Scripted()
    first, second = (scope.enter_context(bridge.from_endpoint(endpoint)) for endpoint in (broken, told))
    waiting, behind, last, before = (scope.enter_context(host.create_stream()) for _ in range(4))
    before.wait_stream(waiting)  # nothing is pending there yet
    first.wait(waiting, 1)
    behind.wait_stream(waiting)
    last.wait_stream(behind)
    second.signal(last, 8)
    last.wait_stream(behind)  # it has been so all along
    broken.on_wait = fails
    until(lambda: last._known_as().failure is not None)
    for stream in (waiting, behind, last):
        with pytest.raises(gi.DriverError, match="the test says so"):
            stream.synchronize(LIMIT)
    before.synchronize(LIMIT)
    second.signal(before, 9)
    until(lambda: told.told)
    assert told.told == [9]


def test_what_another_devices_stream_signals_behind_a_failed_wait_is_not_told(
    device: Device, backend: WordsBackend, scope: ExitStack
) -> None:
    """Streams of two devices may have one number."""
    peer, _ = fake_device(backend=backend)
    broken, first, _ = bridged(device, scope)
    told, second, healthy = bridged(peer, scope)
    waiting, theirs = device.wrap_stream(64), peer.wrap_stream(64)
    first.wait(waiting, 1)
    theirs.wait_stream(waiting)
    second.signal(theirs, 9)
    breaks(broken, first)()
    for stream in (waiting, theirs):
        assert stream._known_as().failure is not None
    backend.run_writes()
    second.signal(healthy, 8)
    backend.run_writes()
    until(lambda: told.told)
    assert told.told == [8]


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_wait_that_fails_while_a_stream_is_ordered_behind_it(
    device: Device, scope: ExitStack, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Before or behind the note of it, in another thread: whoever follows fails."""
    broken, semaphore, waiting = bridged(device, scope)
    behind = scope.enter_context(device.create_stream())
    semaphore.wait(waiting, 1)
    note, fail = KnownStream.note, breaks(broken, semaphore)

    def noted(stream: KnownStream, wait: Any) -> None:
        for step in (fail, lambda: note(stream, wait))[:: 1 if when == "before" else -1]:
            step()

    with monkeypatch.context() as patch:
        patch.setattr(KnownStream, "note", noted)
        with pytest.raises(gi.DriverError, match="the test says so"):
            behind.wait_stream(waiting)
    for stream in (waiting, behind):
        with pytest.raises(gi.DriverError, match="the test says so"):
            stream.synchronize(LIMIT)


def test_a_stream_that_fails_as_it_signals_tells_nobody(
    device: Device, backend: WordsBackend, scope: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the call's own look at the stream."""
    broken, first, stream = bridged(device, scope)
    _, second, _ = bridged(device, scope)
    first.wait(stream, 1)
    monkeypatch.setattr(lane_of(second).watcher, "start", breaks(broken, first))
    with pytest.raises(gi.DriverError, match="the test says so"):
        second.signal(stream, 1)
    assert backend.writes == []
    assert not lane_of(second).busy


def test_one_native_stream_of_several_wrappers(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """A library's stream is wrapped anew each frame: the failure of a wait through one wrapper is that of all.

    What was enqueued before the stream was let go is not told, through whichever; what a later wrapper does is.
    """
    broken, first, _ = bridged(device, scope)
    told, second, _ = bridged(device, scope)
    one = device.wrap_stream(64)
    second.signal(one, 1)
    first.wait(one, 1)
    del one
    gc.collect()
    two = device.wrap_stream(64)
    second.signal(two, 2)
    breaks(broken, first)()
    backend.run_writes()
    until(lambda: told.told)
    calls: list[Script] = [lambda: two.synchronize(LIMIT), lambda: second.signal(two, 3), lambda: second.wait(two, 3)]
    for call in calls:
        with pytest.raises(gi.DriverError, match="the test says so"):
            call()
    second.signal(device.wrap_stream(64), 5)
    backend.run_writes()
    until(lambda: told.told[-1] == 5)
    assert told.told == [1, 5]


def test_an_event_before_the_failure_was_reached(host: Device, scope: ExitStack) -> None:
    endpoint, semaphore, stream = bridged(host, scope)
    before = stream.record()
    before.wait(LIMIT)
    semaphore.wait(stream, 1)
    behind = stream.record()
    endpoint.on_wait = fails
    with pytest.raises(gi.DriverError):
        behind.wait(LIMIT)
    before.wait(LIMIT)
    with pytest.raises(gi.DriverError):
        _ = behind.done
