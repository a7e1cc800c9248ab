"""External semaphores: both kinds, both directions, and nothing passes that was not signalled."""

from __future__ import annotations

from typing import Any

from ..._core.semaphore import SemaphoreBatch
from ...capabilities import Operation
from ...errors import GpuInteropError, SemaphoreTimeoutError
from ...exporters.base import Fill
from ...handles import Binary, OpaqueFd, Timeline, TimelineFd
from ..kit import KIND, requires
from ..peer import BackendPeer
from .base import (
    GRACE,
    HANDLE_TYPES,
    KINDS,
    LIMIT,
    Bench,
    Suite,
    args,
    becomes_idle,
    held,
    leaves_nothing,
    new_stream,
    raises,
    word,
)

IMPORT = (Operation.IMPORT_SEMAPHORE, KIND)
WAIT = (Operation.WAIT_SEMAPHORE, KIND)
SIGNAL = (Operation.SIGNAL_SEMAPHORE, KIND)
TIMELINE = tuple(
    (operation, TimelineFd)
    for operation in (Operation.IMPORT_SEMAPHORE, Operation.WAIT_SEMAPHORE, Operation.SIGNAL_SEMAPHORE)
)
BINARY = tuple(
    (operation, OpaqueFd)
    for operation in (Operation.IMPORT_SEMAPHORE, Operation.WAIT_SEMAPHORE, Operation.SIGNAL_SEMAPHORE)
)
MEMORY = ((Operation.IMPORT_MEMORY, OpaqueFd), (Operation.MAP_BUFFER, OpaqueFd))


class SemaphoreSuite(Suite):
    """Semaphores that an exporter made, on the device's streams."""

    @KINDS
    @requires(IMPORT, WAIT)
    def test_stream_waits_for_exporter(self, bench: Bench, kind: type) -> None:
        """A stream waits until the exporter signals, and then goes on."""
        theirs, ours = bench.semaphore(kind)
        stream = bench.stream()
        for value in range(1, 6):
            ours.wait(stream, *args(kind, value))
            before: Any = stream.record()
            assert held(stream), "the wait did not hold the stream"
            assert not before.done
            theirs.signal(value)
            stream.synchronize(LIMIT)
            assert before.done
            assert becomes_idle(stream)

    @KINDS
    @requires(IMPORT, SIGNAL)
    def test_exporter_waits_for_stream(self, bench: Bench, kind: type) -> None:
        """The exporter's work waits until a stream signals, and then goes on."""
        theirs, ours = bench.semaphore(kind)
        stream = bench.stream()
        for value in range(1, 6):
            work = bench.exporter.submit(wait=[(theirs, value)])
            assert not work.done(GRACE), "the exporter saw a signal that nobody gave"
            ours.signal(stream, *args(kind, value))
            assert work.done(LIMIT), "the signal did not arrive"
            stream.synchronize(LIMIT)

    @KINDS
    @requires(IMPORT, WAIT)
    def test_signal_before_wait(self, bench: Bench, kind: type) -> None:
        """A wait for what was signalled already passes."""
        theirs, ours = bench.semaphore(kind)
        theirs.signal(3)
        stream = bench.stream()
        ours.wait(stream, *args(kind, 3))
        stream.synchronize(LIMIT)

    @KINDS
    @requires(IMPORT, SIGNAL)
    def test_stream_signals_before_exporter_waits(self, bench: Bench, kind: type) -> None:
        """A signal is kept for who waits later."""
        theirs, ours = bench.semaphore(kind)
        stream = bench.stream()
        ours.signal(stream, *args(kind, 3))
        stream.synchronize(LIMIT)
        assert theirs.wait(3, timeout=LIMIT)

    @requires(*BINARY)
    def test_binary_wait_consumes(self, bench: Bench) -> None:
        """One signal of a binary semaphore lets one wait pass."""
        theirs, ours = bench.semaphore(Binary)
        stream = bench.stream()
        theirs.signal()
        ours.wait(stream)
        stream.synchronize(LIMIT)
        ours.wait(stream)
        assert held(stream), "the first wait did not consume the signal"
        theirs.signal()
        stream.synchronize(LIMIT)

    @requires(*TIMELINE)
    def test_timeline_waits_for_at_least(self, bench: Bench) -> None:
        """A timeline wait passes from its value on, and not before; values may be skipped and large."""
        theirs, ours = bench.semaphore(Timeline)
        stream = bench.stream()
        ours.wait(stream, 10)
        for value in (1, 9):
            theirs.signal(value)
            assert held(stream), f"a wait for 10 passed at {value}"
        theirs.signal(1 << 40)
        stream.synchronize(LIMIT)
        ours.wait(stream, 1 << 40)
        ours.wait(stream, 5)
        stream.synchronize(LIMIT)
        ours.wait(stream, (1 << 40) + 1)
        assert held(stream)
        theirs.signal((1 << 40) + 1)
        stream.synchronize(LIMIT)

    @requires(*TIMELINE)
    def test_timeline_signal_reaches_its_value(self, bench: Bench) -> None:
        """A stream's signal sets the counter to its value: no less, and no more."""
        theirs, ours = bench.semaphore(Timeline)
        stream = bench.stream()
        ours.signal(stream, 7)
        stream.synchronize(LIMIT)
        assert theirs.wait(7, timeout=LIMIT)
        assert not theirs.wait(8, timeout=GRACE)

    @KINDS
    @requires(IMPORT, WAIT, SIGNAL, *MEMORY)
    def test_ping_pong(self, bench: Bench, kind: type) -> None:
        """Work on both sides alternates, in order, over many rounds."""
        memory, buffer = bench.buffer(4096)
        forth_theirs, forth = bench.semaphore(kind)
        back_theirs, back = (forth_theirs, forth) if kind is Timeline else bench.semaphore(kind)
        stream = bench.stream()
        for frame in range(30):
            work = bench.exporter.submit(
                wait=[(back_theirs, 2 * frame)] if frame else [],
                fill=[Fill(memory=memory, offset=0, size=4096, word=word(frame + 1))],
                signal=[(forth_theirs, 2 * frame + 1)],
            )
            forth.wait(stream, *args(kind, 2 * frame + 1))
            buffer.fill(0x80 + frame, offset=frame * 8, size=8, stream=stream)
            back.signal(stream, *args(kind, 2 * frame + 2))
            if frame % 10 == 9:
                stream.synchronize(LIMIT)
                assert work.done(LIMIT)
                expected = bytearray([frame + 1]) * 4096
                expected[frame * 8 : frame * 8 + 8] = bytes([0x80 + frame]) * 8
                assert memory.read(0, 4096) == bytes(expected)
            work.close()
        assert back_theirs.wait(60, timeout=LIMIT)

    @KINDS
    @requires(IMPORT, WAIT, SIGNAL, *MEMORY)
    def test_signal_comes_after_the_work(self, bench: Bench, kind: type) -> None:
        """What a stream did before its signal is there for who has waited for it."""
        memory, buffer = bench.buffer(1 << 22)
        theirs, ours = bench.semaphore(kind)
        stream = bench.stream()
        for value in range(1, 6):
            buffer.fill(value, stream=stream)
            ours.signal(stream, *args(kind, value))
            assert theirs.wait(value, timeout=LIMIT)
            assert memory.read((1 << 22) - 64, 64) == bytes([value]) * 64

    @KINDS
    @requires(IMPORT, WAIT, SIGNAL)
    def test_batch(self, bench: Bench, kind: type) -> None:
        """A batch waits for all of its semaphores, and signals all of them."""
        pairs = [bench.semaphore(kind) for _ in range(3)]
        batch = SemaphoreBatch(*(ours for _, ours in pairs))
        stream = bench.stream()
        values = None if kind is Binary else (1, 2, 3)
        batch.wait(stream, values)
        for index, (theirs, _) in enumerate(pairs):
            assert held(stream), f"the batch passed with {index} of 3 signalled"
            theirs.signal(index + 1)
        stream.synchronize(LIMIT)
        batch.signal(stream, None if kind is Binary else (4, 5, 6))
        stream.synchronize(LIMIT)
        for index, (theirs, _) in enumerate(pairs):
            assert theirs.wait(index + 4, timeout=LIMIT)

    @requires(*BINARY, *TIMELINE)
    def test_mixed_batch(self, bench: Bench) -> None:
        """Binary and timeline semaphores go into one batch."""
        one, binary = bench.semaphore(Binary)
        other, timeline = bench.semaphore(Timeline)
        batch = SemaphoreBatch(binary, timeline)
        stream = bench.stream()
        batch.wait(stream, (None, 4))
        one.signal()
        assert held(stream)
        other.signal(4)
        stream.synchronize(LIMIT)
        batch.signal(stream, (None, 9))
        assert one.wait(timeout=LIMIT)
        assert other.wait(9, timeout=LIMIT)

    @KINDS
    @requires(IMPORT, WAIT)
    def test_other_streams_go_on(self, bench: Bench, kind: type) -> None:
        """A wait holds its own stream, and those that wait for that stream; nobody else."""
        theirs, ours = bench.semaphore(kind)
        first, behind, free = bench.stream(), bench.stream(), bench.stream()
        ours.wait(first, *args(kind, 1))
        behind.wait_stream(first)
        event = behind.record()
        free.record().wait(LIMIT)
        free.synchronize(LIMIT)
        assert held(first)
        assert not event.done
        theirs.signal(1)
        event.wait(LIMIT)
        first.synchronize(LIMIT)

    @KINDS
    @requires(IMPORT, WAIT, SIGNAL)
    def test_between_streams(self, bench: Bench, kind: type) -> None:
        """Two imports of one semaphore order two streams of the same device."""
        theirs = bench.scope.enter_context(bench.exporter.create_semaphore(kind))
        first: Any = bench.scope.enter_context(bench.device.import_semaphore(theirs.export()))
        second: Any = bench.scope.enter_context(bench.device.import_semaphore(theirs.export()))
        one, other = bench.stream(), bench.stream()
        first.wait(one, *args(kind, 5))
        assert held(one)
        second.signal(other, *args(kind, 5))
        one.synchronize(LIMIT)
        other.synchronize(LIMIT)

    @KINDS
    @requires(IMPORT, WAIT)
    def test_synchronize_names_what_it_waits_for(self, bench: Bench, kind: type) -> None:
        """A time-out of `synchronize` or of an event names the semaphore and the value; the stream goes on."""
        theirs, ours = bench.semaphore(kind)
        stream = bench.stream()
        ours.wait(stream, *args(kind, 77))
        event = stream.record()
        for call in (lambda: stream.synchronize(0.01), lambda: event.wait(0.01)):
            error = raises(SemaphoreTimeoutError, call)
            assert repr(ours).strip("<>").split(" closed")[0] in str(error)
            assert kind is Binary or "77" in str(error)
        theirs.signal(77)
        stream.synchronize(LIMIT)
        event.wait(LIMIT)

    @KINDS
    @requires(IMPORT, WAIT, (Operation.WAIT_TIMEOUT, KIND))
    def test_wait_with_timeout(self, bench: Bench, kind: type) -> None:
        """Where waits take a time-out: in time it passes; too late the stream fails, and says for what it waited."""
        theirs, ours = bench.semaphore(kind)
        stream = bench.stream()
        ours.wait(stream, *args(kind, 1), timeout=LIMIT)
        assert held(stream)
        theirs.signal(1)
        stream.synchronize(LIMIT)
        failing = bench.device.create_stream()
        try:
            ours.wait(failing, *args(kind, 2), timeout=0.02)
            raises(SemaphoreTimeoutError, lambda: failing.synchronize(LIMIT))
        finally:
            failing.close()
        theirs.signal(2)
        ours.wait(stream, *args(kind, 2), timeout=LIMIT)
        stream.synchronize(LIMIT)

    @KINDS
    @requires(IMPORT, WAIT, SIGNAL)
    def test_nothing_is_left_over(self, bench: Bench, kind: type) -> None:
        """Round after round of export, import, use and close leaves no descriptor and no mapping behind."""
        stream = bench.stream()

        def round_trip(_turn: int) -> None:
            with bench.exporter.create_semaphore(kind) as theirs:
                ours: Any = bench.device.import_semaphore(theirs.export())
                theirs.signal(1)
                ours.wait(stream, *args(kind, 1))
                ours.signal(stream, *args(kind, 2))
                stream.synchronize(LIMIT)
                assert theirs.wait(2, timeout=LIMIT)
                ours.close(timeout=LIMIT)

        leaves_nothing(round_trip)

    @KINDS
    @requires(IMPORT, SIGNAL)
    def test_wrong_value_is_refused(self, bench: Bench, kind: type) -> None:
        """A value for a binary semaphore, none for a timeline, and a timeline that does not grow are refused."""
        theirs, ours = bench.semaphore(kind)
        stream = bench.stream()
        if kind is Binary:
            raises(GpuInteropError, lambda: ours.signal(stream, 1), argument="value")
            raises(GpuInteropError, lambda: ours.wait(stream, 0), argument="value")
            ours.signal(stream)
            assert theirs.wait(timeout=LIMIT)
            return
        raises(GpuInteropError, lambda: ours.signal(stream), argument="value")
        raises(GpuInteropError, lambda: ours.wait(stream), argument="value")
        raises(GpuInteropError, lambda: ours.signal(stream, -1), argument="value")
        raises(GpuInteropError, lambda: ours.signal(stream, 1 << 64), argument="value")
        ours.signal(stream, 5)
        for value in (5, 4, 0):
            raises(GpuInteropError, lambda value=value: ours.signal(stream, value), argument="value")
        ours.signal(stream, 6)
        stream.synchronize(LIMIT)
        assert theirs.wait(6, timeout=LIMIT)
        assert not theirs.wait(7, timeout=GRACE)


class CreatedSemaphoreSuite(Suite):
    """Semaphores that the backend itself makes and exports."""

    @KINDS
    @requires((Operation.CREATE_SEMAPHORE, KIND), IMPORT, WAIT, SIGNAL)
    def test_export_and_import(self, device: Any, scope: Any, kind: type) -> None:
        """What is exported here can be imported here, and is the same semaphore."""
        made = scope.enter_context(device.create_semaphore(HANDLE_TYPES[kind]))
        handle = made.export()
        assert isinstance(handle, HANDLE_TYPES[kind])
        assert handle.origin is not None
        again = scope.enter_context(device.import_semaphore(handle))
        one, other = new_stream(device, scope), new_stream(device, scope)
        for value in (1, 2, 3):
            again.wait(one, *args(kind, value))
            assert held(one)
            made.signal(other, *args(kind, value))
            one.synchronize(LIMIT)
        raises(GpuInteropError, again.export, argument="semaphore")

    @KINDS
    @requires((Operation.CREATE_SEMAPHORE, KIND), WAIT, SIGNAL)
    def test_host_side(self, device: Any, stream: Any, scope: Any, kind: type) -> None:
        """The calling thread waits and signals, without a stream."""
        made = scope.enter_context(device.create_semaphore(HANDLE_TYPES[kind]))
        raises(SemaphoreTimeoutError, lambda: made.host_wait(*args(kind, 1), timeout=0.0))
        made.wait(stream, *args(kind, 1))
        assert held(stream)
        made.host_signal(*args(kind, 1))
        stream.synchronize(LIMIT)
        made.signal(stream, *args(kind, 2))
        made.host_wait(*args(kind, 2), timeout=LIMIT)

    @KINDS
    @requires((Operation.CREATE_SEMAPHORE, KIND), IMPORT, WAIT, SIGNAL)
    def test_across_processes(self, device: Any, stream: Any, scope: Any, kind: type) -> None:
        """Another process imports it and is ordered by it, both ways."""
        made = scope.enter_context(device.create_semaphore(HANDLE_TYPES[kind]))
        peer = scope.enter_context(BackendPeer(device))
        peer.import_semaphore(made.export())
        made.wait(stream, *args(kind, 1))
        assert held(stream)
        peer.signal(1)
        stream.synchronize(LIMIT)
        assert not peer.wait(2, timeout=0.0)
        made.signal(stream, *args(kind, 2))
        assert peer.wait(2, timeout=LIMIT)
