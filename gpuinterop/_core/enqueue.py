"""The one protocol by which a stream is given waits and signals: of a semaphore, a batch, or a graph's launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import GpuInteropError
from .drain import relieve
from .gate import waiting
from .lifetime import LIVE, MARK, Lifetime
from .stream import Stream

if TYPE_CHECKING:
    from .device import Device
    from .graph import Graph
    from .known_stream import KnownStream, Wait


class Enqueues(ABC):
    """What a stream waits for, signals or launches by one call."""

    _batch: Any
    _direct: bool
    """Whether the driver's own call is all that a wait or a signal makes."""

    def _gives(self, marked: Lifetime, device: Device, noted: dict[KnownStream, Any]) -> None:
        """Set the object that each call marks beside the stream, and what is noted of each stream."""
        self._marked = marked
        self.device = device
        self.gate = device.gate
        self._noted = noted

    @abstractmethod
    def _look_closer(self, stream: Stream) -> None:
        """Raise if something is closed or of another device, or the stream has failed or begins a capture."""

    @abstractmethod
    def _note_use(self, stream: Stream, known: KnownStream) -> Any:
        """Note a stream's first use; return what `_noted` has of the stream from now on."""

    @abstractmethod
    def _hold_in(self, graph: Graph) -> None:
        """Have the graph that captures the call keep what the call uses."""

    def _enqueue(
        self,
        stream: Stream,
        known: KnownStream,
        noted: Any,
        give: Callable[..., None],
        numbers: Sequence[int] = (),
        pending: Wait | None = None,
    ) -> Any:
        """Mark, look, note, call, unmark. Return what is noted of the stream; None if a graph captures the call.

        The caller has looked up `noted`, what is noted of the stream: None before the stream's first use.
        `give` enqueues. A driver's takes the batch, the stream's handle, the values, and of a wait the milliseconds;
        another one takes the known stream in place of the handle, and the wait.
        """
        if pending is not None and (gate := self.gate).crowded:
            relieve(gate)  # before the marks: callbacks run here
        marked = self._marked
        calls, streams = marked.calls, known.calls
        calls += MARK
        streams += MARK
        try:
            if (odd := known.odd) or marked.state is not LIVE or stream.lifetime.state is not LIVE:
                self._look_closer(stream)
                known.bare = known.thread is not None  # until `came_along` has an event behind the call
            if noted is None:  # before the call, which may fail half-way: the release waits for the stream
                noted = self._note_use(stream, known)
            if odd and (graph := known.graph) is not None:  # the graph's launches wait and signal
                self._hold_in(graph)
                noted = None
            elif pending is not None:
                known.waits.append(pending)  # as in `KnownStream.note`
                waiting[known] = None  # before the look at the gate: see there
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
        except GpuInteropError:  # the call has enqueued nothing
            if pending is not None:
                pending.passed = True
            raise
        finally:
            if pending is not None:
                pending.enqueued = True
            del calls[-1], streams[-1]
        return noted
