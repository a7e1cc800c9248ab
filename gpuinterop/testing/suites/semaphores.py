"""External semaphores: both kinds, both directions, and no wait ends without its signal."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from typing import Any

import pytest

from ..._core.device import Device
from ..._core.discovery import get_backend
from ..._core.semaphore import SemaphoreBatch
from ...capabilities import Operation
from ...errors import (
    GpuInteropError,
    SemaphoreTimeoutError,
    UnsupportedError,
)
from ...handles import Binary, OpaqueFd, Timeline, TimelineFd, VmmFd
from ..exporters.base import Fill
from ..peer import BackendPeer
from ..requirements import KIND, requires, skip_declared
from .base import (
    GRACE,
    HANDLE_TYPES,
    KINDS,
    LIMIT,
    Harness,
    Suite,
    args,
    becomes_idle,
    differ,
    end,
    held,
    leaves_nothing,
    new_stream,
    raises,
    read,
    same_file,
    together,
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
    """An exporter's semaphores on the device's streams."""

    @KINDS
    @requires(IMPORT, WAIT)
    def test_stream_waits_for_exporter(self, harness: Harness, kind: type) -> None:
        """A stream waits until the exporter signals, and then continues."""
        theirs, ours = harness.semaphore(kind)
        stream = harness.stream()
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
    def test_exporter_waits_for_stream(self, harness: Harness, kind: type) -> None:
        """The exporter's work waits until a stream signals, and then continues."""
        theirs, ours = harness.semaphore(kind)
        stream = harness.stream()
        for value in range(1, 6):
            work = harness.exporter.submit(wait=[(theirs, value)])
            assert not work.done(GRACE), "the exporter saw a signal before one was given"
            ours.signal(stream, *args(kind, value))
            assert work.done(LIMIT), "the signal did not arrive"
            stream.synchronize(LIMIT)

    @KINDS
    @requires(IMPORT, WAIT)
    def test_signal_before_wait(self, harness: Harness, kind: type) -> None:
        """A wait for an earlier signal passes."""
        theirs, ours = harness.semaphore(kind)
        theirs.signal(3)
        stream = harness.stream()
        ours.wait(stream, *args(kind, 3))
        stream.synchronize(LIMIT)

    @KINDS
    @requires(IMPORT, SIGNAL)
    def test_stream_signals_before_exporter_waits(self, harness: Harness, kind: type) -> None:
        """A signal is kept for a later wait."""
        theirs, ours = harness.semaphore(kind)
        stream = harness.stream()
        ours.signal(stream, *args(kind, 3))
        stream.synchronize(LIMIT)
        assert theirs.wait(3, timeout=LIMIT)

    @requires(*BINARY)
    def test_binary_wait_consumes(self, harness: Harness) -> None:
        """One signal of a binary semaphore ends one wait."""
        theirs, ours = harness.semaphore(Binary)
        stream = harness.stream()
        theirs.signal()
        ours.wait(stream)
        stream.synchronize(LIMIT)
        ours.wait(stream)
        assert held(stream), "the first wait did not consume the signal"
        theirs.signal()
        stream.synchronize(LIMIT)

    @requires(*TIMELINE)
    def test_timeline_waits_for_at_least(self, harness: Harness) -> None:
        """A timeline wait ends at its value or higher, not before; values can be skipped and large."""
        theirs, ours = harness.semaphore(Timeline)
        stream = harness.stream()
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
    def test_timeline_signal_reaches_its_value(self, harness: Harness) -> None:
        """A stream's signal sets the counter to exactly its value."""
        theirs, ours = harness.semaphore(Timeline)
        stream = harness.stream()
        ours.signal(stream, 7)
        stream.synchronize(LIMIT)
        assert theirs.wait(7, timeout=LIMIT)
        assert not theirs.wait(8, timeout=GRACE)

    @KINDS
    @requires(IMPORT, WAIT, SIGNAL, *MEMORY)
    def test_ping_pong(self, harness: Harness, kind: type) -> None:
        """Work on both sides alternates, in order, over many rounds."""
        memory, buffer = harness.buffer(4096)
        forth_theirs, forth = harness.semaphore(kind)
        back_theirs, back = (forth_theirs, forth) if kind is Timeline else harness.semaphore(kind)
        stream = harness.stream()
        for frame in range(30):
            work = harness.exporter.submit(
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
    @requires(IMPORT, WAIT, SIGNAL)
    def test_batch(self, harness: Harness, kind: type) -> None:
        """A batch waits for all of its semaphores, and signals all of them."""
        pairs = [harness.semaphore(kind) for _ in range(3)]
        batch = SemaphoreBatch(*(ours for _, ours in pairs))
        stream = harness.stream()
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
    def test_mixed_batch(self, harness: Harness) -> None:
        """A batch can have binary and timeline semaphores."""
        one, binary = harness.semaphore(Binary)
        other, timeline = harness.semaphore(Timeline)
        batch = SemaphoreBatch(binary, timeline)
        stream = harness.stream()
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
    def test_other_streams_go_on(self, harness: Harness, kind: type) -> None:
        """A wait holds its own stream, and streams that wait for that stream; no others.

        Waiting streams need high priority, or they share AMD's few queues (see `Device.create_stream`).
        """
        theirs, ours = harness.semaphore(kind)
        first, behind = harness.stream(high_priority=True), harness.stream(high_priority=True)
        free = harness.stream()
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
    def test_between_streams(self, harness: Harness, kind: type) -> None:
        """Two imports of one semaphore order two streams of the same device."""
        theirs = harness.scope.enter_context(harness.make_semaphore(kind))
        first: Any = harness.scope.enter_context(harness.import_semaphore(theirs))
        second: Any = harness.scope.enter_context(harness.import_semaphore(theirs))
        one, other = harness.stream(), harness.stream()
        first.wait(one, *args(kind, 5))
        assert held(one)
        second.signal(other, *args(kind, 5))
        one.synchronize(LIMIT)
        other.synchronize(LIMIT)

    @KINDS
    @requires(IMPORT, WAIT, (Operation.WAIT_TIMEOUT, KIND))
    def test_wait_with_timeout(self, harness: Harness, kind: type) -> None:
        """A wait with a time-out blocks the host until the signal; if it raises, the stream has no wait."""
        theirs, ours = harness.semaphore(kind)
        stream = harness.stream()
        error = raises(SemaphoreTimeoutError, lambda: ours.wait(stream, *args(kind, 1), timeout=0.02))
        assert ours.label in str(error)
        assert becomes_idle(stream), "a wait that timed out was enqueued"
        signalled: list[int] = []

        def wait() -> None:
            ours.wait(stream, *args(kind, 1), timeout=LIMIT)
            assert signalled

        def signal() -> None:
            signalled.append(1)
            theirs.signal(1)

        together([wait, signal])
        stream.synchronize(LIMIT)
        if kind is Binary:  # the host has consumed the signal
            ours.wait(stream)
            assert held(stream)
        theirs.signal(2)
        stream.synchronize(LIMIT)

    @KINDS
    @requires(IMPORT, WAIT, SIGNAL)
    def test_nothing_is_left_over(self, harness: Harness, kind: type) -> None:
        """Repeated rounds of export, import, use and close leave no descriptor and no mapping."""
        stream = harness.stream()

        def round_trip(_turn: int) -> None:
            with harness.make_semaphore(kind) as theirs:
                ours: Any = harness.import_semaphore(theirs)
                theirs.signal(1)
                ours.wait(stream, *args(kind, 1))
                ours.signal(stream, *args(kind, 2))
                stream.synchronize(LIMIT)
                assert theirs.wait(2, timeout=LIMIT)
                ours.close(timeout=LIMIT)

        leaves_nothing(round_trip)


CREATE = (Operation.CREATE_SEMAPHORE, KIND)


class CreatedSemaphoreSuite(Suite):
    """Semaphores that are made and exported here, by the backend, or by the core with words that streams write.

    A device that makes them also imports them, waits for them and signals them, even if it cannot use other APIs'.
    """

    @pytest.fixture
    def made(self, device: Device, scope: ExitStack, kind: type) -> Any:
        """A semaphore that was made here."""
        semaphore = device.create_semaphore(HANDLE_TYPES[kind])
        scope.callback(end, semaphore)
        return semaphore

    @pytest.fixture
    def peer(self, device: Device, scope: ExitStack) -> BackendPeer:
        """Another process with the same device."""
        return scope.enter_context(BackendPeer(device))

    @KINDS
    @requires(CREATE)
    def test_export_and_import(self, device: Any, scope: Any, kind: type, made: Any) -> None:
        """A semaphore exported here can be imported here, and is the same semaphore."""
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

    @KINDS
    @requires(CREATE)
    def test_a_handle_is_consumed_or_left_alone(self, device: Any, scope: Any, kind: type, made: Any) -> None:
        """An import consumes the handle, and refuses it a second time; as another type it stays unchanged."""
        handle = made.export()
        before = os.fstat(handle.fd)
        for origin in (handle.origin, None):
            wrong = (TimelineFd if kind is Binary else OpaqueFd)(handle.fd)
            wrong.origin = origin
            raises(GpuInteropError, lambda wrong=wrong: device.import_semaphore(wrong))
            assert same_file(handle.fd, before)
        raises(GpuInteropError, lambda: device.import_memory(handle, size=4096))
        assert same_file(handle.fd, before)
        scope.enter_context(device.import_semaphore(handle))
        raises(GpuInteropError, lambda: device.import_semaphore(handle))

    @KINDS
    @requires(CREATE)
    def test_host_side(self, stream: Any, kind: type, made: Any) -> None:
        """The calling thread waits and signals, without a stream."""
        raises(SemaphoreTimeoutError, lambda: made.host_wait(*args(kind, 1), timeout=0.0))
        made.wait(stream, *args(kind, 1))
        assert held(stream)
        made.host_signal(*args(kind, 1))
        stream.synchronize(LIMIT)
        made.signal(stream, *args(kind, 2))
        made.host_wait(*args(kind, 2), timeout=LIMIT)

    @requires(*TIMELINE)
    def test_the_counter_is_read_or_the_way_out_works(self, harness: Harness) -> None:
        """If the driver cannot read a semaphore, the error names that, and no capability it has; an event works."""
        theirs, ours = harness.semaphore(Timeline)
        theirs.signal(3)
        found: Any = None
        try:
            assert ours.value == 3
        except UnsupportedError as error:
            found = error.capability
        if found is not None:
            assert (bool(found), found.handle_type) == (False, ours.handle_type)
            for call in (lambda: ours.host_wait(1, timeout=0), lambda: ours.host_signal(4)):
                raises(UnsupportedError, call, match=re.escape(found.reason))
        stream = harness.stream()
        ours.wait(stream, 4)
        event = stream.record()
        assert not event.done
        theirs.signal(4)
        event.wait(LIMIT)

    @requires((Operation.CREATE_SEMAPHORE, TimelineFd))
    def test_value(self, device: Device, stream: Any, scope: Any, peer: BackendPeer) -> None:
        """The counter shows what this and another process have signalled."""
        made = scope.enter_context(device.create_semaphore(TimelineFd))
        again = scope.enter_context(device.import_semaphore(made.export()))
        peer.import_semaphore(made.export())
        assert made.value == again.value == 0
        for value, signal in ((3, peer.signal), (7, peer.host_signal), (2**62, made.host_signal)):
            signal(value)
            assert made.value == again.value == value
        made.signal(stream, 2**62 + 5)
        assert peer.wait(2**62 + 5, timeout=LIMIT)
        assert not peer.wait(made.value + 1, timeout=0.0)
        assert made.value == again.value == 2**62 + 5

    @requires((Operation.CREATE_SEMAPHORE, TimelineFd))
    def test_values(self, device: Device, stream: Any, scope: Any) -> None:
        """A thread's signal must be larger than the counter; values up to 2**63 - 1 are valid."""
        made = scope.enter_context(device.create_semaphore(TimelineFd))
        large = 2**63 - 1
        made.signal(stream, 5)
        made.host_wait(5, timeout=LIMIT)
        raises(GpuInteropError, lambda: made.host_signal(5))
        raises(SemaphoreTimeoutError, lambda: made.host_wait(6, timeout=GRACE))
        made.wait(stream, large)
        assert held(stream)
        made.host_signal(large - 1)
        assert held(stream), f"a wait for {large} passed at {large - 1}"
        made.host_signal(large)
        assert becomes_idle(stream)
        raises(GpuInteropError, lambda: made.host_signal(large - 2))
        made.host_wait(large, timeout=LIMIT)

    @KINDS
    @requires(CREATE)
    def test_made_in_another_process(self, device: Device, stream: Any, scope: Any, kind: type) -> None:
        """A semaphore from another process is imported here, and stays valid after that process."""
        with BackendPeer(device) as peer:
            ours: Any = scope.enter_context(
                device.import_semaphore(peer.create_semaphore(HANDLE_TYPES[kind].type_name))
            )
            ours.wait(stream, *args(kind, 1))
            assert held(stream)
            peer.host_signal(1)
            assert becomes_idle(stream)
            peer.enqueue(wait=2)
            assert not peer.idle(GRACE)
            ours.signal(stream, *args(kind, 2))
            assert peer.idle(LIMIT)
        ours.wait(stream, *args(kind, 3))
        assert held(stream)
        ours.host_signal(*args(kind, 3))
        assert becomes_idle(stream)

    @requires(
        (Operation.CREATE_SEMAPHORE, TimelineFd),
        (Operation.EXPORT_ALLOCATION, VmmFd),
        (Operation.IMPORT_ALLOCATION, VmmFd),
    )
    def test_work_of_two_processes(self, device: Device, scope: ExitStack, peer: BackendPeer) -> None:
        """Work on either stream follows what the other did before its signal, frame after frame.

        The first frame is held until all are enqueued, so work that does not wait runs too early every time.
        """
        made = device.create_semaphore(TimelineFd)
        scope.callback(end, made)
        allocation = device.allocate(1 << 21)
        scope.callback(end, allocation)
        buffer, half = allocation.buffer, allocation.size // 2
        seen = device.allocate(1 << 21)
        scope.callback(end, seen)
        stream = new_stream(device, scope)
        exported: Any = allocation.export()
        peer.import_allocation(exported, allocation.size)
        peer.import_semaphore(made.export())
        backend: Any = device.driver
        frames, size = 8, 4096
        for frame in range(frames):
            base = 3 * frame + 1
            made.wait(stream, base)
            buffer.fill(frame + 1, stream=stream)
            made.signal(stream, base + 1)
            peer.enqueue(wait=base + 1, fill=(0x80 + frame, half, half), signal=base + 2)
            made.wait(stream, base + 2)
            for part in range(2):  # both halves' final bytes, checked at the end
                target = seen.buffer.ptr + (2 * frame + part) * size
                backend.copy(stream._handle, target, buffer.ptr + (part + 1) * half - size, size)
            made.signal(stream, base + 3)
        assert held(stream)
        assert not peer.idle(GRACE)
        made.host_signal(1)
        stream.synchronize(LIMIT)
        assert peer.idle(LIMIT)
        found = read(seen.buffer, 0, 2 * frames * size)
        expected = b"".join(bytes([frame + 1]) * size + bytes([0x80 + frame]) * size for frame in range(frames))
        assert not differ(found, expected)

    @KINDS
    @requires(CREATE)
    def test_between_devices(self, device: Device, stream: Any, scope: Any, kind: type, made: Any) -> None:
        """Another device of the backend imports it: its streams and this device's order each other."""
        others = [found for found in get_backend(device.backend).devices() if found is not device]
        if not others:
            skip_declared(f"{device.backend} has one device here")
        for other in others:
            there: Any = scope.enter_context(other.import_semaphore(made.export()))
            far = new_stream(other, scope)
            base = 10 * (other.ordinal + 1)
            there.wait(far, *args(kind, base + 1))
            assert held(far)
            made.signal(stream, *args(kind, base + 1))
            assert becomes_idle(far)
            made.wait(stream, *args(kind, base + 2))
            assert held(stream)
            there.signal(far, *args(kind, base + 2))
            assert becomes_idle(stream)

    @KINDS
    @requires(CREATE)
    def test_peer_dies_while_it_waits(self, device: Device, stream: Any, scope: Any, kind: type, made: Any) -> None:
        """A process killed while its stream or thread waits blocks no other; the semaphore keeps working."""
        for turn in range(2):
            peer = scope.enter_context(BackendPeer(device))
            peer.import_semaphore(made.export())
            peer.enqueue(wait=10 * turn + 2)
            peer.kill()
            made.signal(stream, *args(kind, 10 * turn + 2))
            made.host_wait(*args(kind, 10 * turn + 2), timeout=LIMIT)
            made.wait(stream, *args(kind, 10 * turn + 3))
            assert held(stream)
            made.host_signal(*args(kind, 10 * turn + 3))
            assert becomes_idle(stream)

    @KINDS
    @requires(CREATE)
    def test_many_threads(self, device: Device, scope: ExitStack, kind: type) -> None:
        """Eight threads make, use and close their own semaphores at the same time."""

        def work() -> None:
            with device.create_stream() as stream:
                for _ in range(8):
                    made: Any = device.create_semaphore(HANDLE_TYPES[kind])
                    with device.import_semaphore(made.export()) as other:
                        theirs: Any = other
                        made.wait(stream, *args(kind, 1))
                        theirs.host_signal(*args(kind, 1))
                        stream.synchronize(LIMIT)  # any waiter can consume a binary signal
                        theirs.signal(stream, *args(kind, 2))
                        made.host_wait(*args(kind, 2), timeout=LIMIT)
                        stream.synchronize(LIMIT)
                    made.close()

        together([work] * 8)

    @KINDS
    @requires(CREATE)
    def test_nothing_is_left_over(self, device: Device, stream: Any, kind: type) -> None:
        """Repeated rounds of making, exporting, importing, using and closing leave nothing."""

        def round_trip(_turn: int) -> None:
            made: Any = device.create_semaphore(HANDLE_TYPES[kind])
            ours: Any = device.import_semaphore(made.export())
            made.export().close()
            ours.wait(stream, *args(kind, 1))
            made.host_signal(*args(kind, 1))
            stream.synchronize(LIMIT)
            made.signal(stream, *args(kind, 2))
            ours.host_wait(*args(kind, 2), timeout=LIMIT)
            stream.synchronize(LIMIT)
            made.close(timeout=LIMIT)
            ours.close(timeout=LIMIT)

        leaves_nothing(round_trip)
