"""The other process is killed: every wait can be limited, the error names the process, and the device continues."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import pytest

from ..._core.device import Device
from ...capabilities import Operation
from ...errors import GpuInteropError, PeerError, SemaphoreTimeoutError
from ...handles import OpaqueFd, Timeline
from ..exporters.process import ProcessExporter, ProcessSemaphore
from ..participants import ExporterSpec
from ..requirements import KIND, requires, skip_declared
from .base import KINDS, LIMIT, Harness, Suite, args, raises, read


def in_another_process(spec: object) -> bool:
    """Select exporters in another process: only they can be killed separately."""
    return bool(getattr(spec, "process", False))


class PeerDeathSuite(Suite):
    """An exporter in another process, killed with SIGKILL."""

    exporter_filter: ClassVar = staticmethod(in_another_process)

    @pytest.fixture
    def doomed(self, device: Device, exporter_spec: ExporterSpec, scope: ExitStack) -> Harness:
        """A harness with an exporter for this test only."""
        exporter = scope.enter_context(exporter_spec.open())
        assert isinstance(exporter, ProcessExporter)
        return Harness(device, exporter, scope)

    @requires((Operation.IMPORT_MEMORY, OpaqueFd), (Operation.MAP_BUFFER, OpaqueFd))
    def test_memory_stays(self, doomed: Harness) -> None:
        """Imported memory stays valid, with its bytes, and is released as always."""
        theirs, buffer = doomed.buffer()
        theirs.write(0, b"last words")
        _kill(doomed)
        assert read(buffer, 0, 10) == b"last words"
        buffer.fill(0x4F)
        assert read(buffer, 0, 4) == b"OOOO"
        buffer.close(timeout=LIMIT)

    @KINDS
    @requires((Operation.IMPORT_SEMAPHORE, KIND), (Operation.WAIT_SEMAPHORE, KIND), (Operation.SIGNAL_SEMAPHORE, KIND))
    def test_wait_for_the_dead(self, doomed: Harness, kind: type) -> None:
        """`synchronize` on a stream that waits for a killed process ends in time, and names semaphore and value.

        The stream is not lost: every process that has the semaphore can signal it.
        """
        _, ours = doomed.semaphore(kind)
        stream, other = doomed.stream(), doomed.stream()
        ours.wait(stream, *args(kind, 41))
        _kill(doomed)
        error = raises(SemaphoreTimeoutError, lambda: stream.synchronize(0.05))
        assert ours.label in str(error)
        assert kind is not Timeline or "41" in str(error)
        other.synchronize(LIMIT)
        ours.signal(other, *args(kind, 41))
        stream.synchronize(LIMIT)

    @KINDS
    @requires((Operation.IMPORT_SEMAPHORE, KIND), (Operation.WAIT_SEMAPHORE, KIND), (Operation.SIGNAL_SEMAPHORE, KIND))
    def test_dead_inside_the_lock(self, doomed: Harness, kind: type) -> None:
        """If a process is killed while it holds a semaphore's lock, the semaphore still works or raises an error.

        It does not hang, and other semaphores are not affected.
        """
        if not isinstance(doomed.exporter, ProcessExporter) or doomed.exporter.inner != "memfd":
            skip_declared("the driver's semaphores have no lock that a killed process could hold")
        theirs, ours = doomed.semaphore(kind)
        assert isinstance(theirs, ProcessSemaphore)
        theirs.hold_lock()
        _kill(doomed)

        def use(value: int) -> None:
            with doomed.device.create_stream() as stream:
                ours.signal(stream, *args(kind, value))
                ours.wait(stream, *args(kind, value))
                stream.synchronize(LIMIT)

        given_up = None
        try:
            use(1)
        except PeerError as error:
            given_up = error
        if given_up is not None:
            assert ours.label in str(given_up)
            raises(GpuInteropError, lambda: use(2))  # every time, not only once
        with doomed.device.create_stream() as healthy:
            healthy.synchronize(LIMIT)

    @KINDS
    @requires((Operation.IMPORT_SEMAPHORE, KIND), (Operation.SIGNAL_SEMAPHORE, KIND))
    def test_dead_while_waiting(self, doomed: Harness, kind: type) -> None:
        """A process is killed while its work waits for the device: the device's signal does not hang."""
        theirs, ours = doomed.semaphore(kind)
        work: Any = doomed.exporter.submit(wait=[(theirs, 1)])
        assert not work.done(0.0)
        _kill(doomed)
        stream = doomed.stream()
        ours.signal(stream, *args(kind, 1))
        stream.synchronize(LIMIT)


def _kill(harness: Harness) -> None:
    assert isinstance(harness.exporter, ProcessExporter)
    harness.exporter.kill()
