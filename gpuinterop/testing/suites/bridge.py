"""The bridge: the tests of a driver's semaphores, order and sabotage, with bridged semaphores.

The foreign side is the exporter's own semaphore as this process's CPU sees it (`ExporterSemaphore.endpoint`). It needs
no export, and no semaphore of the device. The oracle is the exporter: what its queue has waited for, and what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest

from ..._core.device import Device
from ..._core.semaphore import ExternalSemaphore
from ...bridge import Bridge
from ...capabilities import Operation
from ...errors import (
    InvalidArgumentError,
    UnsupportedError,
)
from ...handles import Binary, Timeline
from ..exporters.base import Exporter, ExporterSemaphore
from ..plugin import kit_of
from ..requirements import skip_declared
from .base import Harness, Suite, end
from .ordering import OrderingSuite, SabotageSuite
from .semaphores import SemaphoreSuite

WORDS = Operation.STREAM_MEMORY_OPS


class BridgedHarness(Harness):
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
        return BridgedHarness(device, exporter, scope, simulated=kit_of(request.config).is_simulated(device.backend))


class BridgedSemaphoreSuite(Bridged, SemaphoreSuite):
    """Bridged semaphores do what imported semaphores do."""


class BridgedOrderingSuite(Bridged, OrderingSuite):
    """Intact: the consumer comes after the producer, however long the producer is held."""


class BridgedSabotageSuite(Bridged, SabotageSuite):
    """Without a wait or a signal, stale data shows every time."""
