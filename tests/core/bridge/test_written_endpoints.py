"""Endpoints that others write: whatever they do, the watcher goes on."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop._core.stream_memory import spare_words
from gpuinterop.bridge import Bridge
from gpuinterop.capabilities import Operation

from ..fake import fake_device
from .scripted import LIMIT, RELEASED, Scripted, end, lane_of, until


def test_an_endpoint_that_exits_the_interpreter_fails_its_streams_alone(host: Device, scope: ExitStack) -> None:
    """Whatever it raises, SystemExit among it: the watcher goes on with the others."""
    bridge = scope.enter_context(Bridge(host))
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
    bridge = scope.enter_context(Bridge(host))
    endpoint = Scripted()

    def refuse() -> None:
        raise gi.InvalidArgumentError("value", "it stands at 9 already.")

    endpoint.on_signal = refuse
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
    stream = scope.enter_context(host.create_stream())
    semaphore.signal(stream, 1)
    until(lambda: stream._known_as().failure is not None)
    with pytest.raises(gi.InvalidArgumentError, match="it stands at 9"):
        stream.synchronize(LIMIT)
    assert endpoint.told == []


@pytest.mark.parametrize("kind", [gi.Timeline, gi.Binary])
def test_an_endpoint_that_can_only_be_waited_for_takes_no_signal(
    host: Device, bridge: Bridge, scope: ExitStack, kind: Any
) -> None:
    endpoint = Scripted(kind)
    endpoint.cannot_signal = gi.bridge.SyncFdEndpoint.cannot_signal
    semaphore: Any = scope.enter_context(bridge.from_endpoint(endpoint))
    stream = scope.enter_context(host.create_stream())
    values = (1,) if kind is gi.Timeline else ()
    for call in (
        lambda: semaphore.signal(stream, *values),
        lambda: gi.SemaphoreBatch(semaphore).signal(stream, values or None),
        lambda: semaphore.host_signal(*values),
    ):
        with pytest.raises(gi.UnsupportedError, match="only the driver that made a sync file"):
            call()
    stream.synchronize(LIMIT)
    assert endpoint.told == []


def test_a_slow_endpoint_holds_up_nobody_for_good(host: Device, bridge: Bridge, scope: ExitStack) -> None:
    slow, quick = Scripted(), Scripted()
    slow.on_wait = lambda: time.sleep(0.01)
    first, second = (scope.enter_context(bridge.from_endpoint(endpoint)) for endpoint in (slow, quick))
    one, other = (scope.enter_context(host.create_stream()) for _ in range(2))
    first.wait(one, 1)
    for value in range(1, 6):
        second.wait(other, value)
        quick.reached = value
        other.synchronize(LIMIT)
    slow.reached = 1
    one.synchronize(LIMIT)


def test_an_endpoint_that_is_stuck_cannot_keep_a_stream(host: Device, stream: gi.Stream, scope: ExitStack) -> None:
    """Its look never ends: close() lets the stream go all the same."""
    stuck, inside = threading.Event(), threading.Event()
    scope.callback(stuck.set)
    endpoint = Scripted()

    def block() -> None:
        inside.set()
        stuck.wait(60)

    endpoint.on_wait = block
    bridge = Bridge(host)
    semaphore = bridge.from_endpoint(endpoint)
    semaphore.wait(stream, 1)
    assert inside.wait(LIMIT)
    behind = stream.record()
    with pytest.raises(gi.SemaphoreTimeoutError):
        semaphore.host_wait(1, timeout=0.01)
    with pytest.raises(gi.ResourceBusyError, match="not to block"):
        semaphore.host_signal(1)
    with pytest.raises(gi.ResourceBusyError):
        bridge.close(timeout=0.01)
    lane = lane_of(semaphore)
    with pytest.raises(gi.ResourceClosedError, match="bridge was closed"):
        behind.wait(LIMIT)
    endpoint.reached = 1  # the look ends late, and with a yes: it must not take the release back
    with pytest.warns(gi.LeakedResourceWarning, match="must not block"):
        host.drain()
    thread = bridge._watcher._thread
    assert thread is not None
    stuck.set()
    end(bridge)
    thread.join(LIMIT)
    assert lane.words.load(0) == RELEASED
    assert endpoint.closed == 0
    assert lane.words not in spare_words(host)._pages
    lane.words.close()


def test_what_is_no_endpoint_is_refused(host: Device, bridge: Bridge) -> None:
    for wrong in (None, 3, Scripted, gi.EventFd):
        with pytest.raises(gi.ArgumentTypeError, match="endpoint"):
            bridge.from_endpoint(wrong)  # type: ignore[arg-type]
    for kind in ("timeline", gi.Fence, None):
        strange = Scripted(kind)  # type: ignore[arg-type]
        with pytest.raises(gi.InvalidArgumentError, match="expected kind"):
            bridge.from_endpoint(strange)
    nameless = Scripted()
    nameless.label = None  # type: ignore[assignment]
    with pytest.raises(gi.InvalidArgumentError, match="as label"):
        bridge.from_endpoint(nameless)
    others: list[Any] = [5, "fd", None, gi.OpaqueWin32(handle=8)]
    for other in others:
        with pytest.raises(gi.ArgumentTypeError, match="handle"):
            bridge.import_semaphore(other)
    with pytest.raises(gi.ArgumentTypeError, match="device"):
        Bridge(bridge)  # type: ignore[arg-type]
    for grace in (-1, float("nan"), None, float("inf")):
        with pytest.raises(gi.InvalidArgumentError, match=r"grace|timeout"):
            Bridge(host, grace=grace)  # type: ignore[arg-type]


def test_a_device_without_stream_words_has_no_bridge() -> None:
    device, _ = fake_device(Operation.STREAM_MEMORY_OPS)
    with pytest.raises(gi.UnsupportedError, match="stream_memory_ops"):
        Bridge(device)
    found = Bridge.capabilities(device)
    assert not any(found.values())
    assert all(cell.reason == "the test says so." for cell in found.values())
