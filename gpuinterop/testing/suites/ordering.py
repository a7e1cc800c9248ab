"""Order, and the proof that the tests of it can fail.

**Sabotage is deterministic.** A race that is only likely proves nothing. Here a semaphore holds the producer until the
consumer's stream is idle, or, if the consumer waits as it should, until it has been seen waiting. Without the
consumer's wait or the producer's signal, stale data shows every time; intact, under the same hold, never. The last
write is read by the exporter, or from an array that the consumer's copy filled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import ResourceBusyError
from ..exporters.base import Fill
from ..requirements import requires, skip_declared
from .base import KINDS, LIMIT, SHORT_GRACE, Harness, Suite, args, held, word
from .semaphores import IMPORT, MEMORY, SIGNAL, WAIT

ROUNDS = 20
SIZE = 256
PRODUCED, CONSUMED, STALE = 0xA5, 0x5A, 0x11


class _Scene:
    """Shared memory, the semaphore that orders the two sides, and one that holds the producer."""

    def __init__(self, harness: Harness, kind: type) -> None:
        self.harness = harness
        self.kind = kind
        self.theirs, self.buffer = harness.buffer(4096)
        self.ready_theirs, self.ready = harness.semaphore(kind)
        self.hold_theirs, self.hold = harness.semaphore(kind)
        self.stream = harness.stream()

    def reset(self) -> None:
        self.theirs.write(0, bytes([STALE]) * SIZE)

    def release(self, value: int) -> None:
        self.hold_theirs.signal(value)

    def seen(self) -> int:
        """The byte that the exporter finds in the memory."""
        data = self.theirs.read(0, SIZE)
        assert data == data[:1] * SIZE, "half of a fill"
        return data[0]

    # The exporter as producer or consumer.

    def submit(self, byte: int, *, wait: list[Any], signal: list[Any]) -> Any:
        fill = [Fill(memory=self.theirs, offset=0, size=SIZE, word=word(byte))]
        return self.harness.exporter.submit(wait=wait, fill=fill, signal=signal)


@requires(IMPORT, WAIT, SIGNAL, *MEMORY)
class OrderingSuite(Suite):
    """Intact: the consumer comes after the producer, however long the producer is held."""

    @KINDS
    def test_exporter_then_device(self, harness: Harness, kind: type) -> None:
        """The device's work after a wait follows the exporter's work before the signal, every time."""
        scene = _Scene(harness, kind)
        for value in range(1, ROUNDS + 1):
            scene.reset()
            work = scene.submit(PRODUCED, wait=[(scene.hold_theirs, value)], signal=[(scene.ready_theirs, value)])
            scene.ready.wait(scene.stream, *args(kind, value))
            scene.buffer.fill(CONSUMED, size=SIZE, stream=scene.stream)
            assert held(scene.stream, SHORT_GRACE), "the wait did not hold the stream"
            assert scene.seen() == STALE, "the consumer has run before the producer"
            scene.release(value)
            scene.stream.synchronize(LIMIT)
            assert work.done(LIMIT)
            assert scene.seen() == CONSUMED

    @KINDS
    def test_device_reads_after_exporter(self, harness: Harness, kind: type) -> None:
        """A copy after a wait reads what the exporter wrote before the signal, every time."""
        scene = _Scene(harness, kind)
        for value in range(1, ROUNDS + 1):
            scene.reset()
            work = scene.submit(PRODUCED, wait=[(scene.hold_theirs, value)], signal=[(scene.ready_theirs, value)])
            scene.ready.wait(scene.stream, *args(kind, value))
            target = np.zeros(SIZE, np.uint8)
            try:
                scene.buffer.copy_to_host(target, stream=scene.stream)
            except ResourceBusyError:
                scene.release(value)
                scene.stream.synchronize(LIMIT)
                skip_declared("copies of pageable memory after a pending wait are refused on this device")
            assert held(scene.stream, SHORT_GRACE)
            assert not target.any(), "the copy has run before the producer"
            scene.release(value)
            scene.stream.synchronize(LIMIT)
            assert work.done(LIMIT)
            assert target.tobytes() == bytes([PRODUCED]) * SIZE

    @KINDS
    def test_device_then_exporter(self, harness: Harness, kind: type) -> None:
        """The exporter's work after a wait follows the device's work before the signal, every time."""
        scene = _Scene(harness, kind)
        for value in range(1, ROUNDS + 1):
            scene.reset()
            scene.hold.wait(scene.stream, *args(kind, value))
            scene.buffer.fill(PRODUCED, size=SIZE, stream=scene.stream)
            scene.ready.signal(scene.stream, *args(kind, value))
            work = scene.submit(CONSUMED, wait=[(scene.ready_theirs, value)], signal=[])
            assert not work.done(SHORT_GRACE), "the signal overtook the work before it"
            assert held(scene.stream, SHORT_GRACE)
            assert scene.seen() == STALE
            scene.release(value)
            scene.stream.synchronize(LIMIT)
            assert work.done(LIMIT), "the signal did not arrive"
            assert scene.seen() == CONSUMED


@requires(IMPORT, WAIT, SIGNAL, *MEMORY)
class SabotageSuite(Suite):
    """Without a wait or a signal, stale data shows every time: the tests above can fail."""

    @KINDS
    def test_device_without_its_wait(self, harness: Harness, kind: type) -> None:
        """The device does not wait: its work runs before the exporter's, in every round."""
        scene = _Scene(harness, kind)
        stale = 0
        for value in range(1, ROUNDS + 1):
            scene.reset()
            work = scene.submit(PRODUCED, wait=[(scene.hold_theirs, value)], signal=[])
            target = np.zeros(SIZE, np.uint8)
            scene.buffer.copy_to_host(target, stream=scene.stream)
            scene.buffer.fill(CONSUMED, size=SIZE, stream=scene.stream)
            scene.stream.synchronize(LIMIT)
            scene.release(value)
            assert work.done(LIMIT)
            stale += target[0] == STALE and scene.seen() == PRODUCED
        assert stale == ROUNDS

    @KINDS
    def test_exporter_without_its_signal(self, harness: Harness, kind: type) -> None:
        """The exporter does not signal: its work is done, and the device still waits, in every round."""
        scene = _Scene(harness, kind)
        stale = 0
        for value in range(1, ROUNDS + 1):
            scene.reset()
            work = scene.submit(PRODUCED, wait=[(scene.hold_theirs, value)], signal=[])
            scene.ready.wait(scene.stream, *args(kind, value))
            scene.buffer.fill(CONSUMED, size=SIZE, stream=scene.stream)
            scene.release(value)
            assert work.done(LIMIT)
            stale += held(scene.stream, SHORT_GRACE) and scene.seen() == PRODUCED
            scene.ready_theirs.signal(value)
            scene.stream.synchronize(LIMIT)
        assert stale == ROUNDS

    @KINDS
    def test_exporter_without_its_wait(self, harness: Harness, kind: type) -> None:
        """The exporter does not wait: its work runs before the device's, in every round."""
        scene = _Scene(harness, kind)
        stale = 0
        for value in range(1, ROUNDS + 1):
            scene.reset()
            scene.hold.wait(scene.stream, *args(kind, value))
            scene.buffer.fill(PRODUCED, size=SIZE, stream=scene.stream)
            assert scene.submit(CONSUMED, wait=[], signal=[]).done(LIMIT)
            scene.release(value)
            scene.stream.synchronize(LIMIT)
            stale += scene.seen() == PRODUCED
        assert stale == ROUNDS

    @KINDS
    def test_device_without_its_signal(self, harness: Harness, kind: type) -> None:
        """The device does not signal: its work is done, and the exporter still waits, in every round."""
        scene = _Scene(harness, kind)
        stale = 0
        for value in range(1, ROUNDS + 1):
            scene.reset()
            scene.hold.wait(scene.stream, *args(kind, value))
            scene.buffer.fill(PRODUCED, size=SIZE, stream=scene.stream)
            work = scene.submit(CONSUMED, wait=[(scene.ready_theirs, value)], signal=[])
            scene.release(value)
            scene.stream.synchronize(LIMIT)
            stale += not work.done(SHORT_GRACE) and scene.seen() == PRODUCED
            scene.ready_theirs.signal(value)
            assert work.done(LIMIT)
        assert stale == ROUNDS
