"""What the tests move by hand: an endpoint, and a backend whose streams store and wait for words."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop._core.own_timeline import spare_words
from gpuinterop.backend import DriverHandle
from gpuinterop.bridge import Bridge, Endpoint, _watcher
from gpuinterop.handles import Timeline
from gpuinterop.system import PAGE
from tests.limits import LIMIT

from ..fake import FakeWords

RELEASED = 2**63 - 1
Script = Callable[[], object]


class Scripted(Endpoint):
    """A foreign semaphore that the test moves."""

    label = "a scripted semaphore"

    def __init__(self, kind: type = Timeline) -> None:
        self.kind = kind
        self.reached = 0
        self.signals = 0
        """Of a binary one: how many are there to be taken."""
        self.told: list[int] = []
        self.closed = 0
        self.on_wait: Script = lambda: None
        self.on_signal: Script = lambda: None

    def wait(self, value: int, timeout: float) -> bool:
        self.on_wait()
        if self.kind is Timeline:
            return self.reached >= value
        if self.signals:
            self.signals -= 1
            return True
        return False

    def signal(self, value: int) -> None:
        self.on_signal()
        self.told.append(value)

    def close(self) -> None:
        self.closed += 1


class WordsBackend(FakeWords):
    """Streams that do nothing by themselves: what they were to wait for and write stands in lists.

    They are idle when their waits have passed, whatever is left to be written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[DriverHandle, int, int]] = []
        """Stream, the process's own address, value."""
        self.pending: list[tuple[DriverHandle, int, int]] = []
        """Those that may not have passed."""
        self.writes: list[tuple[DriverHandle, int, int]] = []
        self.before_wait: Script = lambda: None
        self.before_write: Script = lambda: None

    def write_value(self, stream: DriverHandle, word: int, value: int) -> None:
        self.before_write()
        self._use_word("write_value", stream, word)
        self.writes.append((stream, word - self.APART, value))

    def wait_value(self, stream: DriverHandle, word: int, value: int) -> None:
        self.before_wait()
        super().wait_value(stream, word, value)
        self.waits.append((stream, word - self.APART, value))
        self.pending.append(self.waits[-1])

    def pass_all(self) -> None:
        super().pass_all()
        for _, word, value in self.pending:
            if word // PAGE * PAGE in self.pins.values():
                ctypes.c_uint64.from_address(word).value = value

    def is_waiting(self) -> bool:
        self.pending = [it for it in self.pending if ctypes.c_uint64.from_address(it[1]).value < it[2]]
        return bool(self.pending)

    def is_idle(self, stream: DriverHandle) -> bool:
        return not self.is_waiting() or all(it[0] != stream for it in self.pending)

    def is_done(self, event: DriverHandle) -> bool:
        return self.is_idle(self.event_streams[event])

    def run_writes(self) -> None:
        """The streams get to their stores."""
        while self.writes:
            _, word, value = self.writes.pop(0)
            ctypes.c_uint64.from_address(word).value = value


def until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(1e-4)


def blocked(stream: gi.Stream) -> bool:
    with suppress(gi.SemaphoreTimeoutError):
        stream.record().wait(0.02)
        return False
    return True


def bridged(device: Device, scope: ExitStack, kind: type = Timeline, **options: Any) -> tuple[Scripted, Any, gi.Stream]:
    """A scripted endpoint, its semaphore on a bridge of its own, and a stream; `scope` closes them."""
    endpoint = Scripted(kind)
    bridge = scope.enter_context(Bridge(device))
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint, **options))
    return endpoint, semaphore, scope.enter_context(device.create_stream())


def lane_of(semaphore: Any) -> _watcher.Lane:
    lane = semaphore._handle
    assert isinstance(lane, _watcher.Lane)
    return lane


def word_of(semaphore: Any) -> int:
    return lane_of(semaphore).words.load(0)


def spare(device: Device) -> int:
    """How many pages are kept for the next semaphores."""
    return len(spare_words(device)._pages)


def end(*resources: Any) -> None:
    for resource in resources:
        resource.close(timeout=LIMIT)


def fails() -> None:
    raise gi.DriverError("cuStreamWaitValue64", 1, "CUDA_ERROR_INVALID_VALUE", "the test says so")


def interrupts() -> None:
    raise KeyboardInterrupt


def count_of(fd: int) -> int | None:
    try:
        return int(struct.unpack("=Q", os.read(fd, 8))[0])
    except BlockingIOError:
        return None
