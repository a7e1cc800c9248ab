"""What cannot be enqueued strands no stream, and leaves nothing pinned."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge, Endpoint, _watcher
from gpuinterop.handles import Binary, Timeline
from tests.limits import LIMIT

from .scripted import (
    RELEASED,
    Scripted,
    WordsBackend,
    bridged,
    end,
    fails,
    interrupts,
    lane_of,
    spare,
    until,
    word_of,
)


def test_a_stream_that_is_captured_is_refused(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """Each launch of the graph would write, and wait for, the same value again."""
    _, semaphore, stream = bridged(device, scope)
    backend.capturing.add(stream.ptr)
    for call in (semaphore.wait, semaphore.signal):
        with pytest.raises(gi.InvalidArgumentError, match="is being captured"):
            call(stream, 1)
    backend.capturing.clear()
    assert (backend.waits, backend.writes, lane_of(semaphore).busy) == ([], [], False)


@pytest.mark.parametrize("kind", [Binary, Timeline])
def test_a_wait_that_fails_is_nobodys(device: Device, backend: WordsBackend, scope: ExitStack, kind: type) -> None:
    endpoint, semaphore, stream = bridged(device, scope, kind)
    backend.before_wait = fails
    with pytest.raises(gi.DriverError, match="the test says so"):
        semaphore.wait(stream, *([7] if kind is Timeline else []))
    assert not lane_of(semaphore).busy
    backend.before_wait = lambda: None
    semaphore.wait(stream, *([8] if kind is Timeline else []))
    endpoint.reached, endpoint.signals = 8, 1
    until(lambda: word_of(semaphore) == backend.waits[0][2])


def test_a_signal_taken_for_a_wait_that_failed_is_not_lost(
    device: Device, backend: WordsBackend, scope: ExitStack
) -> None:
    endpoint, semaphore, stream = bridged(device, scope, Binary)
    endpoint.signals = 1

    def late() -> None:
        until(lambda: endpoint.signals == 0 and not lane_of(semaphore).busy)
        fails()

    backend.before_wait = late
    with pytest.raises(gi.DriverError):
        semaphore.wait(stream)
    backend.before_wait = lambda: None
    semaphore.wait(stream)
    until(lambda: word_of(semaphore) >= backend.waits[0][2])
    semaphore.wait(stream)
    assert word_of(semaphore) < backend.waits[1][2], "one signal, two waits"
    assert lane_of(semaphore).busy


def test_a_signal_that_fails_is_not_told(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    endpoint, semaphore, stream = bridged(device, scope, Binary)
    backend.before_write = fails
    with pytest.raises(gi.DriverError):
        semaphore.signal(stream)
    assert not lane_of(semaphore).busy
    backend.before_write = lambda: None
    for _ in range(2):
        semaphore.signal(stream)
    backend.run_writes()
    until(lambda: endpoint.told)
    end(semaphore)
    assert endpoint.told == [0, 0]


def test_ctrl_c_strands_nobody(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """The stream may wait already: the wait is seen to all the same, and later ones are."""
    endpoint, semaphore, stream = bridged(device, scope)
    backend.before_wait = backend.before_write = interrupts
    with pytest.raises(KeyboardInterrupt):
        semaphore.wait(stream, 3)
    endpoint.reached = 3
    until(lambda: word_of(semaphore) == 3)
    with pytest.raises(KeyboardInterrupt):
        semaphore.signal(stream, 4)
    backend.before_write = lambda: None
    semaphore.signal(stream, 5)
    backend.run_writes()
    until(lambda: endpoint.told == [5])
    end(semaphore)


def test_cancelled_while_a_wait_is_being_enqueued(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """Its stream fails first, and goes on then. What others signal is told all the same."""
    endpoint, semaphore, stream = bridged(device, scope)
    other = scope.enter_context(device.create_stream())
    words, failures = lane_of(semaphore).words, []

    def store(index: int, value: int) -> None:
        failures.append(stream._known_as().failure)
        type(words).store(words, index, value)

    words.store = store  # type: ignore[method-assign]
    semaphore.signal(other, 1)
    backend.before_wait = lambda: lane_of(semaphore).cancel(gi.ResourceClosedError("cancelled"))
    with pytest.raises(gi.ResourceClosedError, match="cancelled"):
        semaphore.wait(stream, 3)
    assert word_of(semaphore) == RELEASED
    assert [str(failure) for failure in failures] == ["cancelled"]
    with pytest.raises(gi.ResourceClosedError, match="cancelled"):
        stream.synchronize(LIMIT)
    for call in (semaphore.wait, semaphore.signal):
        with pytest.raises(gi.ResourceClosedError, match="cancelled"):
            call(other, 2)
    backend.run_writes()
    until(lambda: endpoint.told == [1])


def test_failed_while_a_signal_is_being_enqueued(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """Nobody forwards it any more: its stream fails."""
    endpoint, semaphore, stream = bridged(device, scope)
    other = scope.enter_context(device.create_stream())
    endpoint.on_wait = fails

    def fail() -> None:
        semaphore.wait(other, 1)
        until(lambda: lane_of(semaphore).refusal is not None)

    backend.before_write = fail
    semaphore.signal(stream, 1)
    with pytest.raises(gi.DriverError):
        stream.synchronize(LIMIT)
    assert endpoint.told == []


def test_what_is_refused_is_the_callers_and_nothing_stays(
    device: Device, backend: WordsBackend, scope: ExitStack
) -> None:
    """Nothing is pinned before the checks: to unpin may block behind a stream that waits for the caller (CUDA)."""
    bridge, endpoint = scope.enter_context(Bridge(device)), Scripted()
    gone = subprocess.Popen(["true"])
    gone.wait()
    (pipe, other), fd = os.pipe(), os.eventfd(0)
    handle = gi.EventFd(fd)
    before = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
    backend.on_pin = lambda: pytest.fail("pinned before the checks")
    for message, call in (
        ("expected an eventfd, got pipe", lambda: bridge.import_semaphore(gi.EventFd(pipe))),
        ("expected a sync file, got pipe", lambda: bridge.import_semaphore(gi.SyncFd(pipe))),
        (r"TimelineEndpoint\(", lambda: bridge.import_semaphore(gi.TimelineFd(pipe))),
        ("TimelineEndpoint for", lambda: bridge.import_semaphore(gi.OpaqueFd(pipe))),
        (rf"\b{gone.pid}\b", lambda: bridge.import_semaphore(handle, peer=gone.pid)),
        (rf"\b{gone.pid}\b", lambda: bridge.from_endpoint(endpoint, peer=gone.pid)),
    ):
        with pytest.raises(gi.GpuInteropError, match=message):
            call()
    backend.on_pin = fails
    for call in (
        lambda: bridge.import_semaphore(handle, peer=os.getpid()),
        lambda: bridge.from_endpoint(endpoint, peer=os.getpid()),
    ):
        with pytest.raises(gi.DriverError):
            call()
    assert (handle.fd, endpoint.closed, backend.pins) == (fd, 0, {})
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
    for one in (pipe, other, fd):
        os.close(one)


@pytest.mark.parametrize("when", ["pinned", "bridged"])
def test_closed_while_a_semaphore_is_being_made(
    device: Device, backend: WordsBackend, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another thread closes the bridge: the call fails, and what it was given is still the caller's."""
    handle, endpoint = gi.EventFd(os.eventfd(0)), Scripted()
    fd, before = handle.fd, len(os.listdir("/proc/self/fd"))
    for give in ("import_semaphore", "from_endpoint"):
        bridge = Bridge(device)
        if when == "pinned":
            backend.on_pin = bridge.close
            monkeypatch.setattr("gpuinterop._core.own_timeline.SPARE", 0)  # no page is used again
        else:
            monkeypatch.setattr(Endpoint, "_bridged", lambda endpoint, semaphore, bridge=bridge: bridge.close())
        with pytest.raises(gi.ResourceClosedError):
            getattr(bridge, give)(handle if give == "import_semaphore" else endpoint)
        bridge.close(timeout=LIMIT)
    device.drain()
    assert (endpoint.closed, handle.fd) == (0, fd)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(backend.pins) == spare(device)
    backend.on_pin = lambda: None
    monkeypatch.undo()
    with Bridge(device) as anew:  # and can be used once more
        end(anew.from_endpoint(endpoint), anew.import_semaphore(handle))
    assert endpoint.closed == 1


def test_a_mistake_in_the_watcher_strands_nobody(
    bridge: Bridge, stream: gi.Stream, scope: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    semaphore = scope.enter_context(bridge.from_endpoint(Scripted()))

    def wrong(watcher: Any) -> None:
        until(lambda: lane_of(semaphore).busy)
        raise ZeroDivisionError("ours")

    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    monkeypatch.setattr(_watcher.Watcher, "_watch", wrong)
    with suppress(gi.PeerError):  # it may be known by then
        semaphore.wait(stream, 1)
    with pytest.raises(gi.PeerError, match=r"watcher has failed.*ours"):
        stream.synchronize(LIMIT)
    with pytest.raises(gi.PeerError, match="watcher has failed"):
        bridge.from_endpoint(Scripted())
    until(lambda: shown)
    assert shown[0].exc_type is ZeroDivisionError
