"""What a bridge costs while it waits, and how it ends: in every order, dropped, with a limit."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from contextlib import ExitStack, suppress

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge
from tests.limits import LIMIT

from .scripted import Scripted, end, until


def share_of(thread: system.Thread, seconds: float) -> float:
    """The share of a core that a thread uses."""
    clock = time.pthread_getcpuclockid(thread.ident)
    used, began = time.clock_gettime(clock), time.monotonic()
    threading.Event().wait(seconds)
    return (time.clock_gettime(clock) - used) / (time.monotonic() - began)


def thread_of(bridge: Bridge) -> system.Thread:
    thread = bridge._watcher._thread
    assert thread is not None
    return thread


def test_a_bridge_that_waits_costs_next_to_nothing(bridge: Bridge, stream: gi.Stream, scope: ExitStack) -> None:
    endpoint = Scripted()
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
    assert bridge._watcher._thread is None, "no thread before there is work for it"
    semaphore.wait(stream, 1)
    thread = thread_of(bridge)
    share_of(thread, 0.1)  # it is quick at first
    assert share_of(thread, 0.5) < 0.1, "a stream waits, and nothing happens"
    endpoint.reached = 1
    stream.synchronize(LIMIT)
    share_of(thread, 0.1)
    assert share_of(thread, 0.3) < 0.01, "nobody waits"


def test_a_watcher_that_is_held_up_looks_again(bridge: Bridge, stream: gi.Stream, scope: ExitStack) -> None:
    """It sleeps with a time-out. A signal wakes it, and it gets the GIL when the time-out has passed."""
    endpoint = Scripted()
    looks: list[None] = []
    endpoint.on_wait = lambda: looks.append(None)
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
    semaphore.wait(stream, 1)
    thread = thread_of(bridge)
    scope.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, lambda *_: None))
    for _ in range(20):
        seen = len(looks)
        signal.pthread_kill(thread.ident, signal.SIGUSR1)
        sum(range(10**6))  # keeps the GIL longer than the watcher sleeps
        until(lambda seen=seen: len(looks) > seen)
    endpoint.reached = 1
    stream.synchronize(LIMIT)


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
    assert thread_of(bridge).join(LIMIT)
    for call in (lambda: bridge.from_endpoint(Scripted()), lambda: semaphore.host_wait(1)):
        with pytest.raises(gi.ResourceClosedError):
            call()


def test_two_threads_of_a_watcher_end(bridge: Bridge) -> None:
    """Ctrl-C while one is started can leave two."""
    watcher = bridge._watcher
    threads = []
    for _ in range(2):
        watcher.start()
        threads.append(thread_of(bridge))
        watcher._thread = None
    bridge.close()
    assert all(thread.join(LIMIT) for thread in threads)


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
        thread = thread_of(bridge)
        del bridge, semaphore
        gc.collect()
    with pytest.raises(gi.ResourceClosedError):
        stream.synchronize(LIMIT)
    end(stream)

    def ended() -> bool:
        host.drain()
        return not thread.is_alive()

    until(ended)
    os.close(mine)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_close_that_does_not_wait_lets_streams_go_after_its_grace(host: Device, stream: gi.Stream) -> None:
    bridge = Bridge(host, grace=0.01)
    semaphore = bridge.from_endpoint(Scripted())
    semaphore.wait(stream, 1)
    bridge.close()
    with pytest.raises(gi.ResourceClosedError):
        stream.synchronize(LIMIT)
    bridge.close(timeout=LIMIT)


@pytest.mark.parametrize("timeout", [LIMIT, float("inf")])
def test_a_bridge_waits_as_long_as_it_is_told_to(host: Device, stream: gi.Stream, timeout: float) -> None:
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
    bridge.close(timeout=timeout)
    stream.synchronize(LIMIT)
