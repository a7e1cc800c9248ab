"""Endpoints that others write: whatever they do, the watcher goes on."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge
from gpuinterop.capabilities import Operation
from tests.limits import LIMIT

from ..fake import fake_device
from .scripted import Scripted, bridged, end, fails, lane_of, until, word_of


def test_an_endpoint_that_exits_the_interpreter_fails_its_streams_alone(
    host: Device, bridge: Bridge, scope: ExitStack
) -> None:
    """Whatever it raises, SystemExit among it: the watcher goes on with the others."""
    bad, good = Scripted(), Scripted()
    bad.on_wait = sys.exit
    first, second = (scope.enter_context(bridge.from_endpoint(endpoint)) for endpoint in (bad, good))
    one, other = (scope.enter_context(host.create_stream()) for _ in range(2))
    first.wait(one, 1)
    second.wait(other, 1)
    with pytest.raises(gi.PeerError, match="SystemExit"):
        one.synchronize(LIMIT)
    good.reached = 1
    other.synchronize(LIMIT)
    with pytest.raises(gi.PeerError):
        first.host_wait(1, timeout=LIMIT)


def test_a_signal_that_the_endpoint_refuses_reaches_the_owner(host: Device, scope: ExitStack) -> None:
    endpoint, semaphore, stream = bridged(host, scope)

    def refuse() -> None:
        raise gi.InvalidArgumentError("value", "it is at 9.")

    endpoint.on_signal = refuse
    semaphore.signal(stream, 1)
    until(lambda: stream._known_as().failure is not None)
    with pytest.raises(gi.InvalidArgumentError, match="it is at 9"):
        stream.synchronize(LIMIT)
    assert endpoint.told == []


@pytest.mark.parametrize("kind", [gi.Timeline, gi.Binary])
def test_an_endpoint_that_can_only_be_waited_for_takes_no_signal(
    host: Device, bridge: Bridge, stream: gi.Stream, scope: ExitStack, kind: Any
) -> None:
    endpoint = Scripted(kind)
    endpoint.cannot_signal = gi.bridge.SyncFdEndpoint.cannot_signal
    semaphore: Any = scope.enter_context(bridge.from_endpoint(endpoint))
    values = (1,) if kind is gi.Timeline else ()
    for call in (
        lambda: semaphore.signal(stream, *values),
        lambda: gi.SemaphoreBatch(semaphore).signal(stream, values or None),
        lambda: semaphore.host_signal(*values),
    ):
        with pytest.raises(gi.UnsupportedError, match="sync file"):
            call()
    assert endpoint.told == []


def test_an_endpoint_that_is_stuck_cannot_keep_a_stream(host: Device, stream: gi.Stream, scope: ExitStack) -> None:
    """Its look never ends: close() lets the stream go all the same, and its words are another's."""
    stuck, inside = threading.Event(), threading.Event()
    scope.callback(stuck.set)
    endpoint = Scripted()

    def block() -> None:
        inside.set()
        stuck.wait(LIMIT)
        fails()

    endpoint.on_wait = block
    bridge = Bridge(host)
    semaphore = bridge.from_endpoint(endpoint)
    lane = lane_of(semaphore)
    semaphore.wait(stream, 1)
    assert inside.wait(LIMIT)
    behind = stream.record()
    with pytest.raises(gi.SemaphoreTimeoutError):
        semaphore.host_wait(1, timeout=0.01)
    with pytest.raises(gi.ResourceBusyError, match="not to block"):
        semaphore.host_signal(1)
    with pytest.raises(gi.ResourceBusyError):
        bridge.close(timeout=0.01)
    with pytest.raises(gi.ResourceClosedError, match="bridge was closed"):
        behind.wait(LIMIT)
    with pytest.warns(gi.LeakedResourceWarning, match="must not block"):
        host.drain()
    thread = bridge._watcher._thread
    assert thread is not None
    other, again, waiting = bridged(host, scope)
    again.wait(waiting, 5)
    assert lane_of(again).words is lane.words
    stuck.set()  # the look ends, and fails
    end(bridge)
    assert thread.join(LIMIT)
    assert (word_of(again), endpoint.closed) == (0, 0)
    other.reached = 5
    waiting.synchronize(LIMIT)


def test_what_is_no_endpoint_is_refused(host: Device, bridge: Bridge) -> None:
    wrong: Any
    for wrong in ("timeline", gi.Fence, None):
        with pytest.raises(gi.InvalidArgumentError, match="expected kind"):
            bridge.from_endpoint(Scripted(wrong))
    wrong = Scripted()
    wrong.label = None
    with pytest.raises(gi.InvalidArgumentError, match="as label"):
        bridge.from_endpoint(wrong)
    with pytest.raises(gi.ArgumentTypeError, match="handle"):
        bridge.import_semaphore(gi.OpaqueWin32(handle=8))
    for wrong in (-1, None, float("inf")):
        with pytest.raises(gi.InvalidArgumentError, match=r"grace|timeout"):
            Bridge(host, grace=wrong)


def test_a_device_without_stream_words_has_no_bridge() -> None:
    device, _ = fake_device(Operation.STREAM_MEMORY_OPS)
    with pytest.raises(gi.UnsupportedError, match="stream_memory_ops"):
        Bridge(device)
    found = Bridge.capabilities(device)
    assert not any(found.values())
    assert all(cell.reason == "the test says so." for cell in found.values())
