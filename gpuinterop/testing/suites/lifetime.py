"""Lifetime: what is closed is released when all work is done, and nothing of it stays."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from ...capabilities import Operation
from ...errors import ResourceBusyError, ResourceClosedError
from ...handles import OpaqueFd
from ..requirements import requires
from .base import LIMIT, Gate, Harness, Suite, held, mappings, raises
from .streams import in_this_process


@requires((Operation.IMPORT_MEMORY, OpaqueFd), (Operation.MAP_BUFFER, OpaqueFd))
class LifetimeSuite(Suite):
    """Memory, semaphores and streams that are closed while work is pending."""

    exporter_filter: ClassVar = staticmethod(in_this_process)

    def test_close_while_pending(self, harness: Harness) -> None:
        """Closing does not affect enqueued work: the memory is released after it."""
        theirs, memory = harness.memory()
        gate, stream = Gate(harness), harness.stream()
        buffer = memory.map_buffer()
        released: list[str] = []
        gate.block(stream)
        buffer.fill(0x42, stream=stream)
        memory.on_released(lambda: released.append("memory"))
        buffer.on_released(lambda: released.append("mapping"))
        memory.close()
        assert buffer.closed
        assert released == [], "released under pending work"
        gate.open()
        stream.synchronize(LIMIT)
        memory.close(timeout=LIMIT)
        assert released == ["mapping", "memory"]
        assert theirs.read(0, theirs.size) == b"\x42" * theirs.size

    def test_released_means_unmapped(self, harness: Harness) -> None:
        """After the release, nothing of the memory is mapped."""
        theirs = harness.export(1 << 16)
        first = harness.device.import_memory(theirs.export(), size=theirs.size)
        with first.map_buffer() as buffer:
            buffer.fill(1)
        first.close(timeout=LIMIT)  # on first use, a driver may map something that stays
        harness.device.synchronize(LIMIT)
        before = mappings()
        memory = harness.device.import_memory(theirs.export(), size=theirs.size)
        buffer = memory.map_buffer()
        buffer.fill(1)
        released: list[bool] = []
        memory.on_released(lambda: released.append(True))
        memory.close(timeout=LIMIT)
        assert released == [True]
        assert mappings() <= before

    def test_semaphore_closed_while_pending(self, harness: Harness) -> None:
        """A pending wait for a closed semaphore still waits for its signal, and ends with it."""
        gate, stream = Gate(harness), harness.stream()
        gate.block(stream)
        gate.ours.close()
        assert held(stream), "closing a semaphore let its waits pass"
        gate.open()
        stream.synchronize(LIMIT)
        gate.ours.close(timeout=LIMIT)

    def test_busy_semaphore(self, harness: Harness) -> None:
        """``close(timeout=...)`` reports that a semaphore is busy; its stream does not wait for ever."""
        gate = Gate(harness)
        stream = harness.device.create_stream()
        gate.block(stream)
        raises(ResourceBusyError, lambda: gate.ours.close(timeout=0.0))
        gate.open()  # ends the wait if the driver cannot cancel it
        with contextlib.suppress(ResourceClosedError):  # if the driver cancelled it, the stream has failed
            stream.synchronize(LIMIT)
        stream.close()

    def test_stream_closed_while_pending(self, harness: Harness) -> None:
        """A closed stream finishes its work."""
        theirs, buffer = harness.buffer()
        stream = harness.device.create_stream()
        for byte in range(1, 30):
            buffer.fill(byte, stream=stream)
        stream.close(timeout=LIMIT)
        assert theirs.read(0, 8) == b"\x1d" * 8
