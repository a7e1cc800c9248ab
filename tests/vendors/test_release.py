"""Closing while a stream waits: no call of ours may block behind it.

What gives memory or a semaphore back (``cuMemFree``, ``cuDestroyExternalSemaphore``, ``hipFree``) waits for all work of
the device. CUDA's hold every other call of the process meanwhile: also the signal that would end the wait. A backend
that called them at once would hang here, on the GPU and on the simulator alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import gpuinterop as gi
from tests.limits import LIMIT

from .table import VENDOR


class Gate:
    """What a stream waits for: the other side's binary semaphore, which each has; HIP on Linux has only its own."""

    def __init__(self, exporter: Any, device: gi.Device) -> None:
        self.imported = device.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd))
        self._theirs = exporter.create_semaphore(gi.Binary) if self.imported else None
        self.ours: Any = (
            device.import_semaphore(self._theirs.export()) if self._theirs else device.create_semaphore(gi.TimelineFd)
        )
        self._waits = self._signals = 0

    def _next(self, count: int) -> tuple[int, ...]:
        return () if self._theirs else (count,)

    def wait(self, stream: gi.Stream) -> None:
        self._waits += 1
        self.ours.wait(stream, *self._next(self._waits))

    def signal(self, stream: gi.Stream) -> None:
        self._signals += 1
        self.ours.signal(stream, *self._next(self._signals))

    def signal_past_streams(self) -> None:
        self._signals += 1
        if self._theirs:
            self._theirs.signal()
        else:
            self.ours.host_signal(self._signals)

    def close(self) -> None:
        self.ours.close(timeout=LIMIT)
        if self._theirs:
            self._theirs.close()


@pytest.fixture
def gates(exporter: Any, device: gi.Device) -> Iterator[list[Gate]]:
    made = [Gate(exporter, device) for _ in range(2)]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def memory(exporter: Any, device: gi.Device) -> Iterator[tuple[Any, gi.ExternalMemory]]:
    with exporter.create_memory(1 << 16) as theirs:
        made = device.import_memory(theirs.export(), size=theirs.size)
        yield theirs, made
        made.close(timeout=LIMIT)


def test_a_stream_of_this_process_can_still_signal(
    device: gi.Device, gates: list[Gate], memory: tuple[Any, gi.ExternalMemory]
) -> None:
    """The signal that ends the wait is a call of this very thread, and comes after the close."""
    (gate, other), (theirs, ours) = gates, memory
    buffer = ours.map_buffer()
    with device.create_stream() as waiting, device.create_stream() as signalling:
        gate.wait(waiting)
        released: list[str] = []
        for name, one in (("buffer", buffer), ("memory", ours), ("semaphore", other.ours)):
            one.on_released(partial(released.append, name))
            one.close()
        device.drain()
        with device.import_memory(theirs.export(), size=theirs.size):  # imports drain, too
            pass
        mine = [] if other.imported else ["semaphore"]  # of words of its own, which no stream has touched
        assert released == mine, "released behind a pending wait"
        with pytest.raises(gi.ResourceBusyError, match=VENDOR.busy):
            ours.close(timeout=0.01)
        gate.signal(signalling)
        waiting.synchronize(LIMIT)
        ours.close(timeout=LIMIT)
        other.ours.close(timeout=LIMIT)
        assert sorted(released) == ["buffer", "memory", "semaphore"]
        signalling.synchronize(LIMIT)


def test_a_wait_that_came_after_the_close(
    device: gi.Device, gates: list[Gate], memory: tuple[Any, gi.ExternalMemory]
) -> None:
    """The driver waits for all work of the device, also for what was enqueued since: it is not called meanwhile."""
    (gate, other), (_, ours) = gates, memory
    buffer = ours.map_buffer()
    with device.create_stream() as using, device.create_stream() as waiting:
        released: list[str] = []
        buffer.on_released(lambda: released.append("buffer"))
        gate.wait(using)
        buffer.fill(1, stream=using)
        buffer.close()
        other.wait(waiting)
        gate.signal_past_streams()
        using.synchronize(LIMIT)
        device.drain()
        assert released == [], "the driver would have blocked until a signal"
        other.signal_past_streams()
        buffer.close(timeout=LIMIT)
        assert released == ["buffer"]
        waiting.synchronize(LIMIT)
