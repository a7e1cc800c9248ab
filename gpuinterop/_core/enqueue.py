"""The protocol for enqueueing waits and signals: of a semaphore, of a batch, or of a graph's launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import GpuInteropError
from .lifetime import LIVE, MARK, Lifetime
from .release import relieve
from .stream import Stream
from .streams import waiting

if TYPE_CHECKING:
    from .device import Device
    from .graph import Graph
    from .streams import KnownStream, Wait


class Enqueues(ABC):
    """An object that a stream can wait for, signal or launch with one call."""

    _batch: Any
    _direct: bool  # a wait or signal is a single call of the driver

    def _gives(self, marked: Lifetime, device: Device, noted: dict[KnownStream, Any]) -> None:
        """Set the object that each call marks, besides the stream, and the dict with notes on each stream."""
        self._marked = marked
        self.device = device
        self.gate = device.gate
        self._noted = noted

    @abstractmethod
    def _look_closer(self, stream: Stream) -> None:
        """Raise if something is closed or of another device, or the stream has failed or begins a capture."""

    @abstractmethod
    def _note_use(self, stream: Stream, known: KnownStream) -> Any:
        """Note a stream's first use, and return the entry of `_noted` for the stream."""

    @abstractmethod
    def _hold_in(self, graph: Graph) -> None:
        """Make the graph that captures the call keep what the call uses."""

    def _enqueue(
        self,
        stream: Stream,
        known: KnownStream,
        noted: Any,
        give: Callable[..., None],
        numbers: Sequence[int] = (),
        pending: Wait | None = None,
    ) -> Any:
        """Mark, check, note, call, unmark. Return the stream's notes; None if a graph captures the call.

        `noted` has the stream's notes, None before its first use. `give` enqueues. If it is the driver's, its arguments
        are the batch, the stream's handle, the values, and for a wait the milliseconds. Otherwise they are the batch,
        the known stream, the values, and for a wait the `Wait`.
        """
        if pending is not None and (gate := self.gate).crowded:
            relieve(gate)  # before the marks, because callbacks run here
        marked = self._marked
        calls, streams = marked.calls, known.calls
        calls += MARK
        streams += MARK
        try:
            if (odd := known.odd) or marked.state is not LIVE or stream.lifetime.state is not LIVE:
                self._look_closer(stream)
                known.bare = known.thread is not None  # until `came_along` records an event after the call
            if noted is None:  # before the call, because the release must wait even if the call fails half-way
                noted = self._note_use(stream, known)
            if odd and (graph := known.graph) is not None:  # the graph's launches will wait and signal
                self._hold_in(graph)
                noted = None
            elif pending is not None:
                known.waits.append(pending)  # as `KnownStream.note` does
                waiting[known] = None  # before the check of the gate; module `streams` says why
                if gate.shut:
                    gate.let_releases_end()
            if pending is None:
                give(self._batch, known.handle if self._direct else known, numbers)
            elif self._direct:
                give(self._batch, known.handle, numbers, pending.ms)
            else:
                give(self._batch, known, numbers, pending)
            if (odd or pending is not None) and len(known.waits) > known.limit:
                if pending is not None:
                    pending.enqueued = True
                known.came_along()
        except GpuInteropError:  # nothing was enqueued
            if pending is not None:
                pending.passed = True
            raise
        finally:
            if pending is not None:
                pending.enqueued = True
            del calls[-1], streams[-1]
        return noted
