"""The bridge: the tests of a driver's semaphores, order and sabotage, and what only a bridge promises.

The foreign side is the exporter's own semaphore as this process's CPU sees it (`ExporterSemaphore.endpoint`). It needs
no export, and no semaphore of the device. The oracle is the exporter: what its queue has waited for, and what it reads.
"""

from __future__ import annotations

import os
import select
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest

from ..._core.device import Device
from ..._core.semaphore import ExternalSemaphore, SemaphoreBatch
from ..._core.stream import Stream
from ...bridge import Bridge, Endpoint
from ...capabilities import Operation
from ...errors import (
    ArgumentTypeError,
    GpuInteropError,
    InvalidArgumentError,
    PeerError,
    ResourceBusyError,
    ResourceClosedError,
    UnsupportedError,
)
from ...handles import Binary, EventFd, OpaqueFd, Timeline, TimelineFd
from ..exporters.base import Exporter, ExporterSemaphore
from ..plugin import kit_of
from ..requirements import requires, skip_declared
from .base import GRACE, KINDS, LIMIT, Harness, Suite, args, becomes_idle, end, held, leaves_nothing, new_stream, raises
from .ordering import OrderingSuite, SabotageSuite
from .semaphores import SemaphoreSuite

WORDS = Operation.STREAM_MEMORY_OPS


class BridgedBench(Harness):
    """A harness with bridged semaphores."""

    def __init__(self, device: Device, exporter: Exporter, scope: ExitStack, *, simulated: bool = False) -> None:
        super().__init__(device, exporter, scope, simulated=simulated)
        self.bridge = Bridge(device)
        scope.callback(end, self.bridge)

    def make_semaphore(self, kind: type) -> ExporterSemaphore:
        if kind is Timeline and self.exporter.endpoint_gap:
            skip_declared(self.exporter.endpoint_gap)
        with ExitStack() as undo:
            try:
                theirs = undo.enter_context(self.exporter.create_semaphore(kind, exportable=False))
                theirs.endpoint().close()
            except (InvalidArgumentError, UnsupportedError) as error:
                if kind is Binary:
                    skip_declared(f"a binary semaphore that the CPU cannot reach: {error}")
                raise
            undo.pop_all()
        return theirs

    def import_semaphore(self, theirs: ExporterSemaphore) -> ExternalSemaphore[Any]:
        return self.bridge.from_endpoint(theirs.endpoint())


class Bridged(Suite):
    """Runs a suite's tests of a driver's semaphores with bridged ones."""

    # A device without semaphores has a bridge too.
    gpuinterop_instead: ClassVar[Mapping[Operation, Operation]] = {
        Operation.IMPORT_SEMAPHORE: WORDS,
        Operation.WAIT_SEMAPHORE: WORDS,
        Operation.SIGNAL_SEMAPHORE: WORDS,
        Operation.WAIT_TIMEOUT: WORDS,
    }

    @pytest.fixture
    def harness(self, device: Device, exporter: Exporter, scope: ExitStack, request: pytest.FixtureRequest) -> Harness:
        """Makes objects that device and exporter share, with semaphores through a bridge for this test only."""
        return BridgedBench(device, exporter, scope, simulated=kit_of(request.config).is_simulated(device.backend))


class BridgedSemaphoreSuite(Bridged, SemaphoreSuite):
    """Bridged semaphores do what imported semaphores do."""


class BridgedOrderingSuite(Bridged, OrderingSuite):
    """Intact: the consumer comes after the producer, however long the producer is held."""


class BridgedSabotageSuite(Bridged, SabotageSuite):
    """Without a wait or a signal, stale data shows every time."""


class Scripted(Endpoint):
    """A timeline that the test moves, and that fails on request.

    `wait` compares with `reached`; `signalled` has the values that the bridge signalled, in order; the next call raises
    `error`; `threads` are the calling threads.
    """

    kind = Timeline
    label = "a scripted timeline"

    def __init__(self) -> None:
        self.reached = 0
        self.signalled: list[int] = []
        self.error: Exception | None = None
        self.threads: set[int] = set()
        self.closes = 0
        self.looked = threading.Event()

    def wait(self, value: int, timeout: float) -> bool:
        self.threads.add(threading.get_ident())
        self.looked.set()
        if self.error is not None:
            raise self.error
        return self.reached >= value

    def signal(self, value: int) -> None:
        self.threads.add(threading.get_ident())
        self.signalled.append(value)

    def close(self) -> None:
        self.closes += 1


@requires(WORDS)
class BridgeSuite(Suite):
    """What only a bridge promises: refusals, failures that reach the stream's owner, and released streams."""

    @pytest.fixture
    def bridge(self, device: Device, scope: ExitStack) -> Bridge:
        """A bridge for this test only."""
        bridge = Bridge(device)
        scope.callback(end, bridge)
        return bridge

    @pytest.fixture
    def bridged(self, device: Device, exporter: Exporter, scope: ExitStack) -> BridgedBench:
        """The exporter's semaphores, bridged."""
        return BridgedBench(device, exporter, scope)

    # -- what a bridge accepts -------------------------------------------------------------------------------------

    def test_table(self, device: Device) -> None:
        """The bridge's table has a reason and a reference for every type, and a workaround for every gap."""
        table = Bridge.capabilities(device)
        assert not table[OpaqueFd], "an opaque descriptor can refer to anything"
        for found in table.values():
            assert found.reason
            assert found.reference
            assert found or found.workaround
            assert found.scope is not None

    def test_wrong_handles_are_refused(self, bridge: Bridge) -> None:
        """Refused: a bare number, an opaque descriptor, one that is not what its type says. All stay the caller's."""
        first, second = os.pipe()
        try:
            raises(ArgumentTypeError, lambda: bridge.import_semaphore(first), argument="handle")  # type: ignore[call-overload]
            raises(ArgumentTypeError, lambda: bridge.from_endpoint(bridge), argument="endpoint")  # type: ignore[arg-type]
            opaque = OpaqueFd(first)
            raises(UnsupportedError, lambda: bridge.import_semaphore(opaque))
            event = EventFd(first)
            raises(GpuInteropError, lambda: bridge.import_semaphore(event))
            assert opaque.fd == event.fd == first
            assert os.write(second, b"still mine") == 10
            assert os.read(first, 10) == b"still mine"
        finally:
            os.close(first)
            os.close(second)

    def test_values_are_below_2_63(self, bridge: Bridge, stream: Stream, scope: ExitStack) -> None:
        """Streams compare words cyclically: a larger value is refused, the largest is accepted."""
        endpoint = Scripted()
        semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
        for call in (semaphore.wait, semaphore.signal, lambda _, value: semaphore.host_signal(value)):
            raises(InvalidArgumentError, lambda call=call: call(stream, 1 << 63), argument="value")
        endpoint.reached = (1 << 63) - 1
        semaphore.wait(stream, endpoint.reached)
        semaphore.signal(stream, endpoint.reached)
        stream.synchronize(LIMIT)
        _until(lambda: endpoint.signalled == [endpoint.reached])

    @requires(Operation.GRAPH_CAPTURE)
    def test_capture_is_refused(self, bridge: Bridge, stream: Stream, scope: ExitStack) -> None:
        """Capture is refused: each launch of the graph would write and wait for the same values."""
        semaphore = scope.enter_context(bridge.from_endpoint(Scripted()))
        with stream.capture() as graph:
            for call in (semaphore.wait, semaphore.signal):
                raises(InvalidArgumentError, lambda call=call: call(stream, 1), argument="stream")
        graph.close()

    def test_foreign_batch_is_refused(self, bridge: Bridge, device: Device, scope: ExitStack) -> None:
        """A batch can mix semaphores of two bridges, but not bridged ones with a driver's or gpuinterop's own."""
        one = scope.enter_context(bridge.from_endpoint(Scripted()))
        other_bridge = scope.enter_context(Bridge(device))
        other = scope.enter_context(other_bridge.from_endpoint(Scripted()))
        SemaphoreBatch(one, other)
        cell = device.capabilities.of((Operation.CREATE_SEMAPHORE, TimelineFd))
        if not cell:
            skip_declared(cell.reason)
        made = scope.enter_context(device.create_semaphore(TimelineFd))
        raises(InvalidArgumentError, lambda: SemaphoreBatch(one, made), argument="semaphores")

    @pytest.mark.skipif(sys.platform != "linux", reason="declared: eventfds are Linux's")
    def test_eventfd(self, bridge: Bridge, stream: Stream, scope: ExitStack) -> None:
        """An eventfd holds a stream, and the stream signals it; success consumes the handle."""
        mine = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        scope.callback(os.close, mine)
        handle = EventFd.adopt(os.dup(mine))
        semaphore: Any = scope.enter_context(bridge.import_semaphore(handle))
        raises(GpuInteropError, lambda: handle.fd)
        assert semaphore.kind is Binary
        for _ in range(5):
            semaphore.wait(stream)
            assert held(stream)
            os.write(mine, struct.pack("=Q", 1))
            stream.synchronize(LIMIT)
            with pytest.raises(BlockingIOError):
                os.read(mine, 8)  # the wait has consumed it
            semaphore.signal(stream)
            arrival = select.poll()
            arrival.register(mine, select.POLLIN)
            assert arrival.poll(LIMIT * 1000), "the signal did not arrive"
            assert os.read(mine, 8) == struct.pack("=Q", 1)

    # -- what a bridge does ----------------------------------------------------------------------------------------

    def test_streams_wait_out_of_order(self, bridged: BridgedBench) -> None:
        """A wait for a lower value, enqueued later on another stream, is not delayed by one for a higher value."""
        theirs, ours = bridged.semaphore(Timeline)
        more, less = bridged.stream(), bridged.stream()
        ours.wait(more, 5)
        ours.wait(less, 3)
        assert held(less)
        theirs.signal(3)
        less.synchronize(LIMIT)
        assert held(more)
        theirs.signal(5)
        more.synchronize(LIMIT)

    @KINDS
    def test_close_leaves_pending_waits(self, bridged: BridgedBench, kind: type) -> None:
        """A bridged semaphore that is closed while a stream waits is released after the wait."""
        theirs, ours = bridged.semaphore(kind)
        stream = bridged.stream()
        ours.wait(stream, *args(kind, 1))
        ours.close()
        raises(ResourceClosedError, lambda: ours.wait(stream, *args(kind, 2)))
        assert held(stream)
        theirs.signal(1)
        stream.synchronize(LIMIT)
        ours.close(timeout=LIMIT)

    def test_host_side(self, bridged: BridgedBench) -> None:
        """The calling thread waits and signals, without a stream."""
        theirs, ours = bridged.semaphore(Timeline)
        raises(GpuInteropError, lambda: ours.host_wait(1, timeout=0.0))
        theirs.signal(1)
        ours.host_wait(1, timeout=LIMIT)
        ours.host_signal(2)
        assert theirs.wait(2, timeout=LIMIT)

    def test_on_its_own_thread(self, bridge: Bridge, stream: Stream, scope: ExitStack) -> None:
        """One thread, not the caller's, waits and signals for all of a bridge's semaphores."""
        endpoints = [Scripted() for _ in range(4)]
        for endpoint in endpoints:
            semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
            semaphore.wait(stream, 1)
            semaphore.signal(stream, 2)
        for endpoint in endpoints:
            assert held(stream)
            endpoint.reached = 1
        stream.synchronize(LIMIT)
        _until(lambda: all(endpoint.signalled == [2] for endpoint in endpoints))
        threads = set().union(*(endpoint.threads for endpoint in endpoints))
        assert len(threads) == 1
        assert threading.get_ident() not in threads

    # -- what goes wrong -------------------------------------------------------------------------------------------

    def test_failure_reaches_the_owner(self, bridged: BridgedBench) -> None:
        """If the foreign side fails, the waiting stream is released and fails, and forwards no later signals.

        Its earlier signals arrive, and other streams continue.
        """
        theirs, told = bridged.semaphore(Timeline)
        endpoint = Scripted()
        broken = bridged.scope.enter_context(bridged.bridge.from_endpoint(endpoint))
        stream, other = bridged.device.create_stream(), bridged.stream()
        with stream:
            told.signal(stream, 1)
            broken.wait(stream, 1)
            told.signal(stream, 2)
            event = stream.record()
            assert held(stream)
            endpoint.error = RuntimeError("the cable was pulled")
            for call in (lambda: stream.synchronize(LIMIT), lambda: event.wait(LIMIT), stream.query):
                error = raises(PeerError, call)
                assert "the cable was pulled" in str(error)
            raises(PeerError, lambda: told.wait(stream, 1))
            raises(PeerError, lambda: told.signal(stream, 3))
            raises(PeerError, lambda: broken.wait(other, 1))
            raises(PeerError, lambda: broken.signal(other, 1))
        assert theirs.wait(1, timeout=LIMIT)
        assert not theirs.wait(2, timeout=GRACE)
        told.signal(other, 3)
        other.synchronize(LIMIT)
        assert theirs.wait(3, timeout=LIMIT)

    @pytest.mark.parametrize("how", ["grace", "timeout", "semaphore"])
    def test_close_lets_streams_go(self, device: Device, scope: ExitStack, how: str) -> None:
        """Closing a bridge leaves no stream blocked: it continues, and fails."""
        bridge = scope.enter_context(Bridge(device, grace=0.01 if how == "grace" else 60.0))
        endpoint = Scripted()
        semaphore = bridge.from_endpoint(endpoint)
        with device.create_stream() as stream:
            semaphore.wait(stream, 1)
            assert held(stream)
            if how == "grace":
                bridge.close()
            else:
                thing = bridge if how == "timeout" else semaphore
                raises(ResourceBusyError, lambda: thing.close(timeout=0.01))
            raises(ResourceClosedError, lambda: stream.synchronize(LIMIT))
        bridge.close(timeout=LIMIT)
        assert endpoint.closes == 1
        healthy = new_stream(device, scope)
        assert becomes_idle(healthy)

    def test_close_lets_signals_out(self, bridged: BridgedBench) -> None:
        """Signals that a stream has pending when the bridge is closed still arrive."""
        theirs, ours = bridged.semaphore(Timeline)  # first, because a skip here would drop open objects
        hold = Scripted()
        gate = bridged.bridge.from_endpoint(hold)
        stream = bridged.stream()
        gate.wait(stream, 1)
        ours.signal(stream, 7)
        bridged.bridge.close()
        assert not theirs.wait(7, timeout=GRACE)
        hold.reached = 1
        stream.synchronize(LIMIT)
        assert theirs.wait(7, timeout=LIMIT)
        bridged.bridge.close(timeout=LIMIT)

    def test_nothing_is_left_over(self, bridged: BridgedBench) -> None:
        """Repeated rounds of a bridge with both kinds of work leave no descriptor, mapping or thread."""
        stream = bridged.stream()
        threads = threading.active_count()

        def round_trip(_turn: int) -> None:
            with bridged.make_semaphore(Timeline) as theirs:
                bridge = Bridge(bridged.device)
                ours = bridge.from_endpoint(theirs.endpoint())
                theirs.signal(1)
                ours.wait(stream, 1)
                ours.signal(stream, 2)
                stream.synchronize(LIMIT)
                assert theirs.wait(2, timeout=LIMIT)
                bridge.close(timeout=LIMIT)

        leaves_nothing(round_trip)
        _until(lambda: threading.active_count() <= threads)


def _until(condition: Any) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-4)
