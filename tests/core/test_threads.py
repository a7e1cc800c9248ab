"""Threads of ours that cannot start: the call that needs one says so, nothing is left behind, and nothing hangs."""

from __future__ import annotations

import _thread
import gc
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.lifetime import alive
from gpuinterop.testing.exporters import open_exporter
from tests.limits import LIMIT

from .bridge.scripted import Scripted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads and descriptors in /proc")


def left(host: gi.Device) -> tuple[int, int, int]:
    """Threads, descriptors and natives."""
    gc.collect()
    host.drain()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(alive())


def refused(function: Callable[..., object], arguments: tuple[Any, ...]) -> int:
    raise RuntimeError("can't start new thread")


def starved(function: Callable[..., object], arguments: tuple[Any, ...], begin: Any = _thread.start_new_thread) -> int:
    """A thread that is there, but has no memory for its first call, ends without it."""
    ident: int = begin(lambda: None, ())
    return ident


def bridged(host: gi.Device, scope: ExitStack) -> Callable[[], object]:
    semaphore = scope.enter_context(scope.enter_context(gi.bridge.Bridge(host)).from_endpoint(Scripted()))
    stream = scope.enter_context(host.create_stream())
    return lambda: semaphore.signal(stream, 1)


NEED_ONE: dict[str, Callable[[gi.Device, ExitStack], Callable[[], Any]]] = {
    "create_stream": lambda host, scope: host.create_stream,
    "a bridged signal": bridged,
    "memfd exporter": lambda host, scope: lambda: open_exporter("memfd"),
}


@pytest.mark.parametrize(
    ("call", "start"),
    [
        ("create_stream", refused),
        ("create_stream", starved),
        ("a bridged signal", starved),
        ("memfd exporter", starved),
    ],
)
def test_a_thread_that_cannot_start(
    host: gi.Device, scope: ExitStack, monkeypatch: pytest.MonkeyPatch, call: str, start: Any
) -> None:
    needs_one = NEED_ONE[call](host, scope)
    before = left(host)
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", start)
        with pytest.raises(gi.DriverError, match="pthread_create"):
            needs_one()

    def nothing_left() -> bool:  # an earlier test's thread may end meanwhile
        return all(now <= then for now, then in zip(left(host), before, strict=True))

    assert system.until(nothing_left, LIMIT), (before, left(host))
    made = needs_one()
    if made is not None:
        made.close()
