"""What cannot be enqueued strands no stream, and leaves nothing pinned."""

from __future__ import annotations

import os
import struct
import sys
from contextlib import ExitStack, suppress
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge, Endpoint, _watcher
from gpuinterop.handles import Binary, Timeline

from ..fake import fake_device
from .scripted import (
    LIMIT,
    RELEASED,
    Scripted,
    WordsBackend,
    count_of,
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
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(Scripted()))
    stream = scope.enter_context(device.create_stream())
    backend.capturing.add(stream.ptr)
    for call in (semaphore.wait, semaphore.signal):
        with pytest.raises(gi.InvalidArgumentError, match="is being captured"):
            call(stream, 1)
    backend.capturing.clear()
    assert (backend.waits, backend.writes) == ([], [])
    assert not lane_of(semaphore).busy


@pytest.mark.parametrize("kind", [Binary, Timeline])
def test_a_wait_that_fails_is_nobodys(device: Device, backend: WordsBackend, scope: ExitStack, kind: type) -> None:
    endpoint = Scripted(kind)
    semaphore: Any = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    backend.before_wait = fails
    with pytest.raises(gi.DriverError, match="the test says so"):
        semaphore.wait(stream, *([7] if kind is Timeline else []))
    assert not lane_of(semaphore).busy
    assert backend.waits == []
    backend.before_wait = lambda: None
    semaphore.wait(stream, *([8] if kind is Timeline else []))
    endpoint.reached, endpoint.signals = 8, 1
    until(lambda: word_of(semaphore) == backend.waits[0][2])


def test_a_signal_taken_for_a_wait_that_failed_is_not_lost(
    device: Device, backend: WordsBackend, scope: ExitStack
) -> None:
    endpoint = Scripted(Binary)
    semaphore: Any = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    endpoint.signals = 1

    def late() -> None:
        until(lambda: endpoint.signals == 0 and not lane_of(semaphore)._waits)
        fails()

    backend.before_wait = late
    with pytest.raises(gi.DriverError):
        semaphore.wait(stream)
    backend.before_wait = lambda: None
    semaphore.wait(stream)
    until(lambda: word_of(semaphore) >= backend.waits[0][2])
    semaphore.wait(stream)
    until(lambda: lane_of(semaphore).busy)
    assert word_of(semaphore) < backend.waits[1][2], "one signal, two waits"


def test_a_signal_that_fails_is_not_counted(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    backend.before_write = fails
    with pytest.raises(gi.DriverError):
        semaphore.signal(stream, 1)
    backend.before_write = lambda: None
    semaphore.signal(stream, 2)
    assert [value for _, _, value in backend.writes] == [1]
    backend.run_writes()
    until(lambda: endpoint.told == [2])


def test_ctrl_c_behind_the_call_strands_nobody(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """It may strike when the stream waits already: the wait is seen to all the same."""
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    backend.before_wait = interrupts
    with pytest.raises(KeyboardInterrupt):
        semaphore.wait(stream, 3)
    endpoint.reached = 3
    until(lambda: word_of(semaphore) == 3)
    backend.before_write = interrupts
    with pytest.raises(KeyboardInterrupt):
        semaphore.signal(stream, 4)
    backend.before_write = lambda: None
    semaphore.signal(stream, 5)
    assert backend.writes[0][2] == 2, "the one before may have been written"


def test_cancelled_while_a_wait_is_being_enqueued(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(Scripted()))
    stream = scope.enter_context(device.create_stream())
    lane = lane_of(semaphore)
    late: list[Any] = []

    def cancel() -> None:
        late.extend(lane._waits)  # as if the other thread's look had come before this one's append
        lane._waits.clear()
        lane.cancel(gi.ResourceClosedError("cancelled"))
        lane._waits.extend(late)

    backend.before_wait = cancel
    with pytest.raises(gi.ResourceClosedError, match="cancelled"):  # it is idle: nobody is to go on with it
        semaphore.wait(stream, 3)
    assert word_of(semaphore) == RELEASED
    assert not lane._waits
    with pytest.raises(gi.ResourceClosedError, match="cancelled"):
        stream.synchronize(LIMIT)


def test_failed_while_a_signal_is_being_enqueued(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """Nobody looks at that lane any more: the stream is told by the call itself."""
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream, other = (scope.enter_context(device.create_stream()) for _ in range(2))
    lane = lane_of(semaphore)
    endpoint.on_wait = fails

    def fail() -> None:
        backend.before_write = lambda: None
        kept = list(lane._outs.values())
        lane._outs.clear()  # as if the entry came after the watcher's look
        semaphore.wait(other, 1)
        until(lambda: lane.failed)
        lane._outs.update((out.key, out) for out in kept)

    backend.before_write = fail
    semaphore.signal(stream, 1)
    with pytest.raises(gi.DriverError):
        stream.synchronize(LIMIT)
    assert endpoint.told == []


def test_a_page_that_cannot_be_pinned(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(device))
    endpoint = Scripted()
    backend.on_pin = fails
    fd = os.eventfd(0)
    handle = gi.EventFd(fd)
    before = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
    with pytest.raises(gi.DriverError):
        bridge.from_endpoint(endpoint)
    with pytest.raises(gi.DriverError):
        bridge.import_semaphore(handle, peer=os.getpid())
    assert handle.fd == fd
    assert endpoint.closed == 0
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
    os.close(fd)
    assert backend.pins == {}


def test_what_is_refused_has_pinned_nothing(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    """To unpin may block behind a stream that waits for the caller (CUDA)."""
    bridge = scope.enter_context(Bridge(device))
    backend.on_pin = lambda: pytest.fail("pinned before the checks")
    fd, other = os.pipe()
    for call in (
        lambda: bridge.import_semaphore(gi.EventFd(fd)),
        lambda: bridge.import_semaphore(gi.SyncFd(fd)),
        lambda: bridge.from_endpoint(Scripted(), peer=2**31 - 1),
    ):
        with pytest.raises((gi.HandleError, gi.PeerError)):
            call()
    os.close(fd)
    os.close(other)


@pytest.mark.parametrize("when", ["pinned", "bridged"])
def test_closed_while_a_semaphore_is_being_made(
    device: Device, backend: WordsBackend, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another thread closes the bridge: the call fails, and what it was given is still the caller's."""
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    handle = gi.EventFd(fd)
    endpoint = Scripted()
    before = len(os.listdir("/proc/self/fd"))
    devices = [device, fake_device(backend=backend)[0]]  # the first one's page is used again
    for give, on in zip(("endpoint", "handle"), devices, strict=True):
        bridge = Bridge(on)
        if when == "pinned":
            backend.on_pin = bridge.close
        else:
            monkeypatch.setattr(Endpoint, "_bridged", lambda endpoint, semaphore, bridge=bridge: bridge.close())
        with pytest.raises(gi.ResourceClosedError):
            if give == "endpoint":
                bridge.from_endpoint(endpoint)
            else:
                bridge.import_semaphore(handle)
        bridge.close(timeout=LIMIT)
    device.drain()
    assert endpoint.closed == 0
    assert handle.fd == fd
    os.write(fd, struct.pack("=Q", 1))
    assert count_of(fd) == 1
    assert len(os.listdir("/proc/self/fd")) == before
    assert [spare(one) for one in devices] == [1, 1]
    assert len(backend.pins) == 2
    backend.on_pin = lambda: None
    monkeypatch.undo()
    with Bridge(device) as anew:  # and can be used once more
        end(anew.from_endpoint(endpoint), anew.import_semaphore(handle))
    assert endpoint.closed == 1
    assert spare(device) == len(backend.pins) - 1 == 2


def test_a_mistake_in_the_watcher_strands_nobody(
    host: Device, bridge: Bridge, stream: gi.Stream, scope: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    semaphore = scope.enter_context(bridge.from_endpoint(Scripted()))

    def wrong(watcher: Any) -> None:
        raise ZeroDivisionError("ours")

    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    monkeypatch.setattr(_watcher.Watcher, "_watch", wrong)
    with suppress(gi.PeerError):  # it may be known by then
        semaphore.wait(stream, 1)
        with pytest.raises(gi.PeerError, match=r"watcher has failed.*ours"):
            stream.synchronize(LIMIT)
    other = scope.enter_context(host.create_stream())
    for call in (lambda: bridge.from_endpoint(Scripted()), lambda: semaphore.wait(other, 1)):
        with pytest.raises(gi.PeerError, match="watcher has failed"):
            call()
    until(lambda: shown)
    assert shown[0].exc_type is ZeroDivisionError
