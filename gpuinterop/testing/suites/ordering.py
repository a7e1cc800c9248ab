"""Order, and the proof that the tests of it can fail.

**Sabotage is deterministic.** A race that is only likely proves nothing. Here a semaphore holds the producer until the
consumer's stream is idle, or, if the consumer waits as it should, until it has been seen waiting. Without the
consumer's wait or the producer's signal, stale data shows every time; intact, under the same hold, never. The last
write is read by the exporter, or from an array that the consumer's copy filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import ResourceBusyError
from ..exporters.base import Fill, Submission
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

    def rounds(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The value of each round, and the arguments for it; the memory has stale bytes again."""
        for value in range(1, ROUNDS + 1):
            self.theirs.write(0, bytes([STALE]) * SIZE)
            yield value, args(self.kind, value)

    def fill(self, byte: int) -> None:
        """Let the device's stream fill the memory."""
        self.buffer.fill(byte, size=SIZE, stream=self.stream)

    def produce(self, value: int, *, signals: bool = True) -> Submission:
        """Let the exporter, as producer, fill the memory when it is released."""
        signal = [(self.ready_theirs, value)] if signals else []
        return self._submit(PRODUCED, [(self.hold_theirs, value)], signal)

    def consume(self, value: int | None) -> Submission:
        """Let the exporter, as consumer, fill the memory after a wait for `value`; None means that it does not wait."""
        return self._submit(CONSUMED, [] if value is None else [(self.ready_theirs, value)], [])

    def release(self, value: int) -> None:
        self.hold_theirs.signal(value)

    def finish(self, value: int, work: Submission) -> None:
        """Release the producer, and wait for both sides."""
        self.release(value)
        self.stream.synchronize(LIMIT)
        assert work.done(LIMIT), "the signal did not arrive"

    def seen(self) -> int:
        """The byte that the exporter finds in the memory."""
        data = self.theirs.read(0, SIZE)
        assert data == data[:1] * SIZE, "half of a fill"
        return data[0]

    def _submit(self, byte: int, wait: list[Any], signal: list[Any]) -> Submission:
        fill = [Fill(memory=self.theirs, offset=0, size=SIZE, word=word(byte))]
        return self.harness.exporter.submit(wait=wait, fill=fill, signal=signal)


@requires(IMPORT, WAIT, SIGNAL, *MEMORY)
class OrderingSuite(Suite):
    """Intact: the consumer comes after the producer, however long the producer is held."""

    @KINDS
    def test_exporter_then_device(self, harness: Harness, kind: type) -> None:
        """The device's work after a wait follows the exporter's work before the signal, every time."""
        scene = _Scene(harness, kind)
        for value, given in scene.rounds():
            work = scene.produce(value)
            scene.ready.wait(scene.stream, *given)
            scene.fill(CONSUMED)
            assert held(scene.stream, SHORT_GRACE), "the wait did not hold the stream"
            assert scene.seen() == STALE, "the consumer has run before the producer"
            scene.finish(value, work)
            assert scene.seen() == CONSUMED

    @KINDS
    def test_device_reads_after_exporter(self, harness: Harness, kind: type) -> None:
        """A copy after a wait reads what the exporter wrote before the signal, every time."""
        scene = _Scene(harness, kind)
        for value, given in scene.rounds():
            work = scene.produce(value)
            scene.ready.wait(scene.stream, *given)
            target = np.zeros(SIZE, np.uint8)
            try:
                scene.buffer.copy_to_host(target, stream=scene.stream)
            except ResourceBusyError:
                scene.finish(value, work)
                skip_declared("copies of pageable memory after a pending wait are refused on this device")
            assert held(scene.stream, SHORT_GRACE)
            assert not target.any(), "the copy has run before the producer"
            scene.finish(value, work)
            assert target.tobytes() == bytes([PRODUCED]) * SIZE

    @KINDS
    def test_device_then_exporter(self, harness: Harness, kind: type) -> None:
        """The exporter's work after a wait follows the device's work before the signal, every time."""
        scene = _Scene(harness, kind)
        for value, given in scene.rounds():
            scene.hold.wait(scene.stream, *given)
            scene.fill(PRODUCED)
            scene.ready.signal(scene.stream, *given)
            work = scene.consume(value)
            assert not work.done(SHORT_GRACE), "the signal overtook the work before it"
            assert held(scene.stream, SHORT_GRACE)
            assert scene.seen() == STALE
            scene.finish(value, work)
            assert scene.seen() == CONSUMED


@requires(IMPORT, WAIT, SIGNAL, *MEMORY)
class SabotageSuite(Suite):
    """Without a wait or a signal, stale data shows every time: the tests above can fail."""

    @KINDS
    def test_device_without_its_wait(self, harness: Harness, kind: type) -> None:
        """The device does not wait: its work runs before the exporter's, in every round."""
        scene = _Scene(harness, kind)
        for value, _ in scene.rounds():
            work = scene.produce(value, signals=False)
            target = np.zeros(SIZE, np.uint8)
            scene.buffer.copy_to_host(target, stream=scene.stream)
            scene.fill(CONSUMED)
            scene.stream.synchronize(LIMIT)
            scene.finish(value, work)
            assert (target[0], scene.seen()) == (STALE, PRODUCED)

    @KINDS
    def test_exporter_without_its_signal(self, harness: Harness, kind: type) -> None:
        """The exporter does not signal: its work is done, and the device still waits, in every round."""
        scene = _Scene(harness, kind)
        for value, given in scene.rounds():
            work = scene.produce(value, signals=False)
            scene.ready.wait(scene.stream, *given)
            scene.fill(CONSUMED)
            scene.release(value)
            assert work.done(LIMIT)
            assert (held(scene.stream, SHORT_GRACE), scene.seen()) == (True, PRODUCED)
            scene.ready_theirs.signal(value)
            scene.stream.synchronize(LIMIT)

    @KINDS
    def test_exporter_without_its_wait(self, harness: Harness, kind: type) -> None:
        """The exporter does not wait: its work runs before the device's, in every round."""
        scene = _Scene(harness, kind)
        for value, given in scene.rounds():
            scene.hold.wait(scene.stream, *given)
            scene.fill(PRODUCED)
            work = scene.consume(None)
            assert work.done(LIMIT)
            scene.finish(value, work)
            assert scene.seen() == PRODUCED

    @KINDS
    def test_device_without_its_signal(self, harness: Harness, kind: type) -> None:
        """The device does not signal: its work is done, and the exporter still waits, in every round."""
        scene = _Scene(harness, kind)
        for value, given in scene.rounds():
            scene.hold.wait(scene.stream, *given)
            scene.fill(PRODUCED)
            work = scene.consume(value)
            scene.release(value)
            scene.stream.synchronize(LIMIT)
            assert (work.done(SHORT_GRACE), scene.seen()) == (False, PRODUCED)
            scene.ready_theirs.signal(value)
            assert work.done(LIMIT)
