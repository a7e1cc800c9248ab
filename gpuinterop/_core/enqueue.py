"""The one protocol by which a stream is given waits and signals: of a semaphore, a batch, or a graph's launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import GpuInteropError
from .drain import relieve
from .gate import waiting
from .native import LIVE, MARK, Native
from .stream import Stream, check_stream

if TYPE_CHECKING:
    from .device import Device
    from .graph import Graph
    from .native_stream import NativeStream, Wait


class Enqueues(ABC):
    """What a stream waits for, signals or launches by one call."""

    _device: Device

    def _gives(self, marked: Native, device: Device, noted: dict[NativeStream, Any]) -> None:
        """Set what each call marks beside the stream, and what is noted of each stream that has used it."""
        self._marked = marked
        self._device = device
        self._gate = device._gate
        self._noted = noted

    @abstractmethod
    def _look_closer(self, stream: Stream) -> None:
        """Raise if something is closed or of another device, or the stream has failed or begins a capture."""

    @abstractmethod
    def _note_use(self, stream: Stream, native: NativeStream) -> Any:
        """Note a stream's first use of it; return what `_noted` has of that from now on."""

    @abstractmethod
    def _hold_in(self, graph: Graph) -> None:
        """Have the graph that captures the call keep what that uses."""

    def _enqueue(
        self, stream: Stream, give: Callable[..., None], numbers: Sequence[int] = (), pending: Wait | None = None
    ) -> None:
        """Mark, look, note, call, unmark.

        `give` calls the driver: with the native stream, what is noted of it, the values, and the pending wait.
        """
        if type(stream) is not Stream:
            check_stream(self._device, stream)
        marked, native, gate = self._marked, stream._stream or stream._known_as(), self._gate
        if pending is not None and gate.crowded:
            relieve(gate)  # before the marks: callbacks run here
        calls, streams = marked.calls, native.calls
        calls += MARK
        streams += MARK
        try:
            if native.odd or marked.state is not LIVE or stream._lifetime.state is not LIVE:
                self._look_closer(stream)
            noted = self._noted.get(native)
            if noted is None:  # before the call, which may fail half-way: the release waits for the stream
                noted = self._note_use(stream, native)
            if (graph := native.graph) is not None:  # it waits and signals when the graph is launched
                self._hold_in(graph)
            elif pending is not None:
                native.waits.append(pending)  # as in `NativeStream.note`
                waiting[native] = None  # before the look at the gate: see there
                if gate.shut:
                    gate.let_releases_end()
            give(native, noted, numbers, pending)
            if len(native.waits) > native.limit:
                if pending is not None:
                    pending.enqueued = True
                native.came_along()
        except GpuInteropError:  # it has enqueued nothing
            if pending is not None:
                pending.passed = True
            raise
        finally:
            if pending is not None:
                pending.enqueued = True
            del calls[-1], streams[-1]
