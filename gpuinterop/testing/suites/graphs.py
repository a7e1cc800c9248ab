"""Graphs: signals and waits that are captured once, launched many times, and given new values in between."""

from __future__ import annotations

from ...capabilities import Operation
from ...handles import Timeline
from ..requirements import requires
from .base import GRACE, KINDS, LIMIT, Harness, Suite, args, held
from .semaphores import IMPORT, MEMORY, SIGNAL, TIMELINE, WAIT

CAPTURE = Operation.GRAPH_CAPTURE
LAUNCHES = 20


class GraphSuite(Suite):
    """The other side sees what a graph's launches do, in order and with the right values."""

    @KINDS
    @requires(CAPTURE, IMPORT, WAIT, SIGNAL, *MEMORY)
    def test_launch_after_launch(self, harness: Harness, kind: type) -> None:
        """Each launch waits for the exporter, works, and signals, with its own values on a timeline."""
        memory, buffer = harness.buffer(4096)
        forth_theirs, forth = harness.semaphore(kind)
        back_theirs, back = (forth_theirs, forth) if kind is Timeline else harness.semaphore(kind)
        stream = harness.stream()
        with stream.capture() as graph:
            forth.wait(stream, *args(kind, 1))
            buffer.fill(0xC3, size=256, stream=stream)
            back.signal(stream, *args(kind, 2))
        assert not stream.capturing
        memory.write(0, bytes(4096))
        assert memory.read(0, 256) == bytes(256), "captured work has run without a launch"
        for turn in range(LAUNCHES):
            memory.write(0, bytes(4096))
            graph.launch(stream)
            assert held(stream, GRACE / 4), "the launch did not wait"
            assert memory.read(0, 256) == bytes(256), "the work ran before its wait"
            forth_theirs.signal(2 * turn + 1)
            assert back_theirs.wait(2 * turn + 2, timeout=LIMIT), f"launch {turn} did not signal"
            assert memory.read(0, 256) == b"\xc3" * 256
            assert memory.read(256, 256) == bytes(256)
            graph.semaphores.advance(2)
        stream.synchronize(LIMIT)
        graph.close(timeout=LIMIT)

    @requires(CAPTURE, *TIMELINE)
    def test_values_are_set_one_by_one(self, harness: Harness) -> None:
        """A node's values can be set separately, skip values and be large; enqueued launches keep theirs."""
        wait_theirs, wait = harness.semaphore(Timeline)
        signal_theirs, signal = harness.semaphore(Timeline)
        stream = harness.stream()
        with stream.capture() as graph:
            wait.wait(stream, 1)
            signal.signal(stream, 1)
        (waiting,), (signalling,) = graph.semaphores.waits, graph.semaphores.signals
        assert (waiting.semaphores, waiting.values) == ((wait,), (1,))
        assert (signalling.semaphores, signalling.values) == ((signal,), (1,))
        waiting.set(5)
        signalling.set(1 << 40)
        graph.launch(stream)
        waiting.set(6)
        signalling.set((1 << 40) + 7)
        graph.launch(stream)
        wait_theirs.signal(4)
        assert held(stream), "the first launch did not wait for 5"
        wait_theirs.signal(5)
        assert signal_theirs.wait(1 << 40, timeout=LIMIT)
        assert not signal_theirs.wait((1 << 40) + 1, timeout=GRACE), "the second launch did not wait for 6"
        wait_theirs.signal(6)
        assert signal_theirs.wait((1 << 40) + 7, timeout=LIMIT)
        stream.synchronize(LIMIT)
        graph.close(timeout=LIMIT)

    @requires(CAPTURE, *TIMELINE)
    def test_a_batch_is_one_node(self, harness: Harness) -> None:
        """Semaphores waited for in one call keep their order and their values."""
        from ..._core.semaphore import SemaphoreBatch

        pairs = [harness.semaphore(Timeline) for _ in range(3)]
        stream = harness.stream()
        batch = SemaphoreBatch(*(ours for _, ours in pairs))
        with stream.capture() as graph:
            batch.signal(stream, (3, 5, 7))
        (node,) = graph.semaphores.steps
        assert node.semaphores == tuple(ours for _, ours in pairs)
        assert node.values == (3, 5, 7)
        node.set(4, 50, 7)
        graph.launch(stream)
        for (theirs, _), value in zip(pairs, (4, 50, 7), strict=True):
            assert theirs.wait(value, timeout=LIMIT)
        stream.synchronize(LIMIT)
        graph.close(timeout=LIMIT)

    @KINDS
    @requires(CAPTURE, IMPORT, WAIT, SIGNAL, *MEMORY)
    def test_a_capture_survives_what_goes_on_beside_it(self, harness: Harness, kind: type) -> None:
        """Imports, work on other streams, closing and draining neither end a capture nor are captured."""
        memory, buffer = harness.buffer(4096)
        theirs, ours = harness.semaphore(kind)
        stream, other = harness.stream(), harness.stream()
        event = other.record()
        with stream.capture() as graph:
            ours.signal(stream, *args(kind, 1))
            second_theirs, second = harness.semaphore(kind)
            second.wait(other, *args(kind, 1))
            second_theirs.signal(1)
            other.synchronize(LIMIT)
            assert event.done
            second.close()
            with harness.device.create_stream() as third:
                third.synchronize(LIMIT)
            more = harness.device.import_memory((owned := harness.export()).export(), size=owned.size)
            more.map_buffer().close()
            more.close()
            harness.device.drain()
            buffer.fill(7)  # on another stream, done on return
            assert memory.read(0, 8) == b"\x07" * 8
            wrapped = harness.device.wrap_stream(stream.ptr)
            assert wrapped.capturing
            wrapped.close()
        graph.launch(stream)
        assert theirs.wait(1, timeout=LIMIT)
        stream.synchronize(LIMIT)
        assert len(graph.semaphores.steps) == 1
        graph.close(timeout=LIMIT)
