"""Threads of ours that cannot start: the call that needs one says so, nothing is left behind, and nothing hangs."""

from __future__ import annotations

import _thread
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.lifetime import alive
from gpuinterop.exporters import open_exporter
from tests.programs import printed

from .bridge.scripted import LIMIT, Scripted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads and descriptors in /proc")


def left(host: gi.Device) -> tuple[int, int, int]:
    """Threads, descriptors and natives."""
    gc.collect()
    host.drain()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(alive())


LITTLE_MEMORY = """
import resource, threading
import gpuinterop as gi
from gpuinterop._core.lifetime import alive
device = gi.get_backend("host").device()
allocation = device.allocate(4096)
allocation.buffer.fill(0)
streams, refused = [], []
before = len(alive())
threading.stack_size(1 << 20)
room_for_this_thread = [bytes(64) for _ in range(1 << 16)][::4096]  # the pages between these are Python's, and free
def size():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
def limit(most):
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
for room in (*range(-4 << 10, 64 << 10, 4 << 10), 1 << 30):  # beside the stack: what a thread needs to begin
    limit(size() + (1 << 20) + room)
    try:
        streams.append(device.create_stream())
    except gi.DriverError as error:
        limit(resource.RLIM_INFINITY)
        refused.append(str(error))
    else:
        allocation.buffer.fill(1, stream=streams[-1])
        try:
            streams[-1].synchronize(5)
        finally:
            limit(resource.RLIM_INFINITY)
assert refused and streams and all("expected a new thread, got none" in text for text in refused), refused
device.drain()
assert len(alive()) == before + len(streams)
"""


def test_a_stream_whose_thread_finds_no_memory() -> None:
    """It starts or it does not: no stream is handed out whose work never runs."""
    printed("-c", LITTLE_MEMORY)


def refused(function: Callable[..., object], arguments: tuple[Any, ...]) -> int:
    raise RuntimeError("can't start new thread")


def starved(function: Callable[..., object], arguments: tuple[Any, ...], begin: Any = _thread.start_new_thread) -> int:
    """A thread that is there, but has no memory for its first call, ends without it."""
    ident: int = begin(lambda: None, ())
    return ident


def test_a_thread_that_begins_late_and_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins, works and ends just when its starter, who has waited for long, looks whether it is there."""
    looked, worked = threading.Event(), list[None]()

    def late(function: Callable[..., object], arguments: Any, begin: Any = _thread.start_new_thread) -> object:
        return begin(lambda: (looked.wait(LIMIT), function(*arguments)), ())

    def look(target: Any) -> Callable[[], Any]:
        found = weakref.ref(target)

        def gone() -> None:
            looked.set()
            assert system.until(lambda: found() is None, LIMIT)

        del target
        return gone

    monkeypatch.setattr(_thread, "start_new_thread", late)
    monkeypatch.setattr(system, "weakref", SimpleNamespace(ref=look))
    assert system.start_thread(lambda: worked.append(None)).join(LIMIT)
    assert worked == [None]


def bridged(host: gi.Device, scope: ExitStack) -> Callable[[], object]:
    semaphore = scope.enter_context(scope.enter_context(gi.bridge.Bridge(host)).from_endpoint(Scripted()))
    stream = scope.enter_context(host.create_stream())
    return lambda: semaphore.signal(stream, 1)


NEED_ONE: dict[str, Callable[[gi.Device, ExitStack], Callable[[], Any]]] = {
    "create_stream": lambda host, scope: host.create_stream,
    "a bridged signal": bridged,
    "memfd exporter": lambda host, scope: lambda: open_exporter("memfd"),
    "process exporter": lambda host, scope: lambda: open_exporter("memfd", process=True),
}


@pytest.mark.parametrize(
    ("call", "start"),
    [
        ("create_stream", refused),
        ("create_stream", starved),
        ("a bridged signal", starved),
        ("memfd exporter", starved),
        ("process exporter", refused),
    ],
)
def test_a_thread_that_cannot_start(
    host: gi.Device, scope: ExitStack, monkeypatch: pytest.MonkeyPatch, call: str, start: Any
) -> None:
    needs_one = NEED_ONE[call](host, scope)
    before = left(host)
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", start)
        with pytest.raises(gi.DriverError, match=r"pthread_create.*expected a new thread, got none.*raise the limit"):
            needs_one()

    def nothing_left() -> bool:  # an earlier test's thread may end meanwhile
        return all(now <= then for now, then in zip(left(host), before, strict=True))

    assert system.until(nothing_left, LIMIT), (before, left(host))
    made = needs_one()
    if made is not None:
        made.close()
