"""What a bridge costs while it waits, and how it ends: in every order, dropped, from many threads."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core import monitor
from gpuinterop._core.device import Device
from gpuinterop._core.known_stream import Wait
from gpuinterop._core.semaphore import SemaphoreBatch
from gpuinterop.bridge import Bridge, SemaphoreEndpoint
from gpuinterop.bridge._watcher import _Out, _Signal, _Waiting
from gpuinterop.handles import Binary
from tests.beside import beside

from .scripted import LIMIT, Script, Scripted, blocked, end, until


def share_of(thread: system.Thread, seconds: float) -> float:
    """The share of a core that a thread uses."""
    clock = time.pthread_getcpuclockid(thread.ident)
    used, began = time.clock_gettime(clock), time.monotonic()
    threading.Event().wait(seconds)
    return (time.clock_gettime(clock) - used) / (time.monotonic() - began)


def test_a_bridge_that_waits_costs_next_to_nothing(bridge: Bridge, stream: gi.Stream, scope: ExitStack) -> None:
    endpoint = Scripted()
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
    assert not _watcher_of(bridge), "no thread before there is work for it"
    semaphore.wait(stream, 1)
    (thread,) = _watcher_of(bridge)
    share_of(thread, 0.1)  # it is quick at first
    assert share_of(thread, 0.5) < 0.1, "a stream waits, and nothing happens"
    endpoint.reached = 1
    stream.synchronize(LIMIT)
    until(lambda: bridge._watcher._sleeping)
    assert share_of(thread, 0.3) < 0.01, "nobody waits"


def _watcher_of(bridge: Bridge) -> list[system.Thread]:
    thread = bridge._watcher._thread
    return [] if thread is None else [thread]


@pytest.mark.parametrize("order", list(itertools.permutations(("bridge", "semaphore", "stream"))), ids="-".join)
@pytest.mark.parametrize("reached", [True, False], ids=["reached", "never"])
def test_closed_in_every_order(host: Device, order: tuple[str, ...], reached: bool) -> None:
    endpoint = Scripted()
    bridge = Bridge(host, grace=LIMIT if reached else 0.05)
    semaphore = bridge.from_endpoint(endpoint)
    stream = host.create_stream()
    semaphore.wait(stream, 1)
    semaphore.signal(stream, 2)
    things = {"bridge": bridge, "semaphore": semaphore, "stream": stream}
    for name in order:
        things[name].close()
        if reached:
            endpoint.reached = 1
    for name in order:
        with suppress(gi.ResourceBusyError):
            things[name].close(timeout=LIMIT)
    assert endpoint.closed == 1
    assert endpoint.told == ([2] if reached else [])
    thread = bridge._watcher._thread
    assert thread is not None
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_dropped_without_close(host: Device) -> None:
    """A warning each, and nothing hangs or stays."""
    gc.collect()
    host.drain()
    before = len(os.listdir("/proc/self/fd"))
    mine = os.eventfd(0, os.EFD_NONBLOCK)
    with pytest.warns(gi.LeakedResourceWarning, match="Bridge #"), pytest.warns(match="bridged eventfd"):
        bridge = Bridge(host, grace=0.05)
        semaphore = bridge.import_semaphore(gi.EventFd(os.dup(mine)))
        stream = host.create_stream()
        semaphore.wait(stream)
        thread = bridge._watcher._thread
        del bridge, semaphore
        gc.collect()
    with pytest.raises(gi.ResourceClosedError):
        stream.synchronize(LIMIT)
    end(stream)
    assert thread is not None

    def ended() -> bool:
        host.drain()
        return not thread.is_alive()

    until(ended)
    os.close(mine)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_close_that_was_put_off_leaves_its_limit_to_no_later_one(
    host: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close in a signal handler that strikes inside a state change is queued: the next one has its own limit."""
    bridge = Bridge(host, grace=2.0)
    told: list[float] = []
    monkeypatch.setattr(bridge._watcher, "cancel_after", told.append)
    with monitor._lock:
        bridge.close(timeout=float("inf"))
        bridge.close(timeout=5)
    bridge.close(timeout=LIMIT)
    assert told == [2.0 + LIMIT]


def test_closed_things_are_refused(bridge: Bridge, stream: gi.Stream) -> None:
    semaphore: Any = bridge.from_endpoint(Scripted())
    end(semaphore)
    calls: list[Script] = [
        lambda: semaphore.wait(stream, 1), lambda: semaphore.host_signal(1), lambda: semaphore.host_wait(1),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(gi.ResourceClosedError):
            call()
    end(bridge)
    with pytest.raises(gi.ResourceClosedError), gi.EventFd.adopt(os.eventfd(0)) as handle:
        bridge.import_semaphore(handle)
    with pytest.raises(gi.ResourceClosedError):
        bridge.from_endpoint(Scripted())
    end(bridge)


def test_a_thread_in_host_wait_is_let_go_by_close(bridge: Bridge, stream: gi.Stream) -> None:
    """At once, and alone: a stream's wait stays pending, as without that thread."""
    endpoint = Scripted()
    semaphore: Any = bridge.from_endpoint(endpoint)
    semaphore.wait(stream, 1)
    with pytest.raises(gi.ResourceClosedError), beside(lambda: semaphore.host_wait(1, timeout=LIMIT)):
        until(lambda: semaphore.lifetime.calls)
        semaphore.close()
    assert blocked(stream)
    endpoint.reached = 1
    stream.synchronize(LIMIT)
    semaphore.close(timeout=LIMIT)


def test_a_semaphore_that_is_closed_with_a_timeout_lets_its_streams_go(bridge: Bridge, stream: gi.Stream) -> None:
    semaphore = bridge.from_endpoint(Scripted())
    semaphore.wait(stream, 1)
    with pytest.raises(gi.ResourceBusyError):
        semaphore.close(timeout=0.01)
    with pytest.raises(gi.ResourceClosedError, match="was closed while a stream still waited"):
        stream.synchronize(LIMIT)


def test_a_bridge_waits_as_long_as_it_is_told_to(host: Device, stream: gi.Stream) -> None:
    """Longer than what pending waits get otherwise."""
    endpoint = Scripted()
    bridge = Bridge(host, grace=0.0)
    semaphore = bridge.from_endpoint(endpoint)
    semaphore.wait(stream, 1)
    looks = itertools.count()

    def late() -> None:
        if bridge.closed and next(looks) == 20:
            endpoint.reached = 1

    endpoint.on_wait = late
    bridge.close(timeout=LIMIT)
    stream.synchronize(LIMIT)


def test_batches(host: Device, bridge: Bridge, stream: gi.Stream, scope: ExitStack) -> None:
    endpoints = [Scripted(), Scripted(Binary)]
    one, other = (scope.enter_context(bridge.from_endpoint(endpoint)) for endpoint in endpoints)
    own: Any = scope.enter_context(host.create_semaphore(gi.TimelineFd))
    with pytest.raises(gi.InvalidArgumentError, match="batches of their own"):
        SemaphoreBatch(one, own)
    batch = SemaphoreBatch(one, other)
    batch.wait(stream, (3, None))
    endpoints[0].reached = 3
    assert blocked(stream)
    endpoints[1].signals = 1
    stream.synchronize(LIMIT)
    batch.signal(stream, (4, None))
    until(lambda: (endpoints[0].told, endpoints[1].told) == ([4], [0]))
    with pytest.raises(gi.UnsupportedError, match="waits until it is stored"):
        batch.wait(stream, (5, None), timeout=1.0)


class OfSeveralThreads(deque[Any]):
    """A deque as it is without the GIL: while one thread iterates, another appends. A copy is one step."""

    def __iter__(self) -> Iterator[Any]:
        for thing in super().__iter__():
            self.append(thing)
            yield thing

    def copy(self) -> Any:
        return deque(super().__iter__())


def test_the_watcher_looks_at_signals_that_others_append() -> None:
    stream: Any = None
    out = _Out(1, stream)
    out.pending = OfSeveralThreads(_Signal(value, number, stream) for value, number in ((5, 1), (6, 2), (7, 4)))
    assert [signal.value for signal in out.ready(3)] == [5, 6]


def test_the_watcher_looks_at_waits_that_others_append(host: Device, scope: ExitStack) -> None:
    with host.create_semaphore(gi.TimelineFd) as own, Bridge(host) as bridge:
        semaphore = scope.enter_context(bridge.from_endpoint(SemaphoreEndpoint(own)))
        lane = semaphore._handle
        least, *_ = waits = [_Waiting(value, Wait.of(own.lifetime, value)) for value in (1, 3, 2)]
        lane._waits, lane._ordered = OfSeveralThreads(reversed(waits)), False
        assert lane._next() is least
        lane._waits.clear()
