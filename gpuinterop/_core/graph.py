"""Graphs: signals and waits that are captured once and launched many times.

A graph bakes the values of its semaphores in. A binary semaphore has none; a timeline must grow, so each launch wants
values of its own: `GraphSemaphores.advance` or `GraphStep.set` gives them to the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..backend import GraphBackend, SemaphoreNode
from ..capabilities import Operation
from ..errors import InvalidArgumentError
from ..handles import Fence, Timeline
from .resource import Resource, check_int
from .semaphore import ExternalSemaphore
from .stream import Stream, check_stream

if TYPE_CHECKING:
    from .device import Device

__all__ = ["Graph", "GraphSemaphores", "GraphStep", "capture"]

_IN_A_GRAPH = "a graph that is not closed uses it"


class GraphStep:
    """One node of a graph that waits or signals. Made by `GraphSemaphores`.

    Attributes
    ----------
    signals : bool
        Whether it signals; else it waits.
    semaphores : tuple of ExternalSemaphore or None
        In the node's order; None where gpuinterop has not imported it, or it was released.
    values : tuple of int
        What the next launch waits for or signals; 0 where the semaphore is binary.
    """

    def __init__(self, owner: GraphSemaphores, node: SemaphoreNode) -> None:
        self._owner = owner
        self._node = node
        known = owner.device._semaphores
        self.signals = node.signals
        found = [known.get(pointer) for pointer in node.semaphores]
        self.semaphores: tuple[ExternalSemaphore[Any] | None, ...] = tuple(
            None if semaphore is None or semaphore._retirement.done else semaphore for semaphore in found
        )
        self.values = node.values

    def set(self, *values: int | None) -> None:
        """Set the values of the launches to come (``cuGraphExecExternalSemaphoresSignalNodeSetParams`` and its like).

        Parameters
        ----------
        *values : int or None
            One for each of `semaphores`; None for a binary one. Launches that were enqueued before keep theirs.

        Raises
        ------
        InvalidArgumentError
            Another number of values than semaphores, one that does not fit its semaphore, or a semaphore that is not
            ours.
        """
        self._apply(self._checked(values))

    def _checked(self, values: tuple[int | None, ...]) -> tuple[int, ...]:
        """The values as the backend takes them."""
        if len(values) != len(self.semaphores):
            raise InvalidArgumentError("values", f"there are {len(values)} for {len(self.semaphores)} semaphores.")
        return tuple(semaphore._check_value(value) for semaphore, value in zip(self._ours(), values, strict=True))

    def _apply(self, numbers: tuple[int, ...]) -> None:
        self._owner._set(self, self._ours(), numbers)
        self.values = numbers

    def _ours(self) -> list[ExternalSemaphore[Any]]:
        ours = [semaphore for semaphore in self.semaphores if semaphore is not None]
        if len(ours) != len(self.semaphores):
            raise InvalidArgumentError("values", "a semaphore of this node was not imported by this library.")
        return ours

    def _advanced(self, by: int) -> tuple[int | None, ...]:
        """The values, `by` later; of what counts up: a key or a fence's address is no counter."""
        return tuple(
            None if semaphore is not None and not semaphore._takes_value
            else value + by if semaphore is None or semaphore.kind in (Timeline, Fence)
            else value
            for semaphore, value in zip(self.semaphores, self.values, strict=True)
        )  # fmt: skip

    def __repr__(self) -> str:
        what = "signal" if self.signals else "wait"
        return f"<GraphStep {what} {', '.join(map(str, self.values))}>"


class GraphSemaphores(Resource):
    """The signals and waits of a graph, and their values.

    Parameters
    ----------
    device : Device
    graph : int
        A ``CUgraph``: torch's ``CUDAGraph(keep_graph=True).raw_cuda_graph()``, CuPy's ``Graph.graph``. It stays its
        owner's.
    executable : int
        The ``CUgraphExec`` made of it: torch's ``raw_cuda_graph_exec()``, CuPy's ``Graph.graphExec``. It stays its
        owner's. Both must live until this is closed: a node is the graph's.

    The semaphores are not released before this is closed, whatever else is closed.

    Examples
    --------
    >>> with gi.GraphSemaphores(device, graph.raw_cuda_graph(), graph.raw_cuda_graph_exec()) as semaphores:
    ...     for _ in frames:
    ...         graph.replay()
    ...         semaphores.advance(2)
    """

    _noun = "GraphSemaphores"

    def __init__(self, device: Device, graph: int, executable: int, *, _parent: Graph | None = None) -> None:
        device.capabilities.require(Operation.GRAPH_CAPTURE)
        backend = device._backend
        assert isinstance(backend, GraphBackend)  # otherwise the capability is a gap
        self.device = device
        self._backend = backend
        numbers = [check_int(number, name) for number, name in ((graph, "graph"), (executable, "executable"))]
        if min(numbers) <= 0:
            raise InvalidArgumentError("graph", "and executable must be pointers, not 0.")
        self._executable = numbers[1]
        held: list[Resource] = []
        serial: int
        launched = None if _parent is None else _parent._used  # where another library launches its graph, nobody tells
        super().__init__(
            device._reclaimer,
            lambda: _let_go(held, serial),
            parents=() if _parent is None else (_parent,),
            streams=None if launched is None else lambda: (list(launched.values()), ()),
        )
        self._warns = _parent is None
        serial = self._retirement.serial
        try:
            self.steps = tuple(GraphStep(self, node) for node in backend.semaphore_nodes(numbers[0]))
        except BaseException:
            self.close()
            raise
        for step in self.steps:
            for semaphore in step.semaphores:
                if semaphore is not None:
                    _hold(semaphore, held, serial)
                    if _parent is None:  # that library's launches move its counter, and nobody here sees them
                        semaphore._forget_values()

    @property
    def waits(self) -> tuple[GraphStep, ...]:
        """The nodes that wait, in the driver's order."""
        return tuple(step for step in self.steps if not step.signals)

    @property
    def signals(self) -> tuple[GraphStep, ...]:
        """The nodes that signal, in the driver's order."""
        return tuple(step for step in self.steps if step.signals)

    def advance(self, by: int) -> None:
        """Add `by` to every timeline's and fence's value: what one frame after another wants.

        Raises
        ------
        InvalidArgumentError
            A value would leave the range of 64 bits, or a semaphore is not ours; nothing was set.
        """
        step_by = check_int(by, "by")
        self._check_open()
        plans = [(step, step._checked(step._advanced(step_by))) for step in self.steps]
        for step, numbers in plans:
            step._apply(numbers)

    def _set(self, step: GraphStep, semaphores: list[ExternalSemaphore[Any]], values: tuple[int, ...]) -> None:
        with self._in_use():
            self._backend.set_node(self._executable, step._node, [one._native for one in semaphores], values)


class Graph(Resource):
    """Work that was captured once, to be launched many times. Made by `Stream.capture`.

    Semaphores and mappings that its work uses are not released before it.
    """

    _noun = "Graph"

    def __init__(self, device: Device, backend: GraphBackend) -> None:
        self._device = device
        self._backend = backend
        used: dict[int, Stream] = {}
        held: list[Resource] = []
        pointers: list[int] = []

        def release() -> None:
            if pointers:
                backend.destroy_executable(device._native, pointers[1])
                backend.destroy_graph(device._native, pointers[0])
            _let_go(held, serial)

        super().__init__(device._reclaimer, release, streams=lambda: (list(used.values()), ()))
        serial = self._retirement.serial
        self._used = used
        self._held = held
        self._pointers = pointers
        self._semaphores: GraphSemaphores | None = None
        self.joined: list[Stream] = []
        """The streams whose work goes into it, while it is captured."""

    @property
    def ptr(self) -> int:
        """The native graph (``CUgraph``) as an integer."""
        return self._captured()[0]

    @property
    def executable_ptr(self) -> int:
        """The native executable (``CUgraphExec``) as an integer."""
        return self._captured()[1]

    @property
    def semaphores(self) -> GraphSemaphores:
        """Its signals and waits, to set the values of the next launch."""
        self._captured()
        assert self._semaphores is not None
        return self._semaphores

    def launch(self, stream: Stream) -> None:
        """Enqueue the whole of it (``cuGraphLaunch``). Returns at once."""
        executable = self.executable_ptr
        check_stream(self._device, stream)
        if stream.capturing:
            raise InvalidArgumentError(
                "stream", "is being captured: a graph inside a graph could not be given values; launch both one by one."
            )
        assert self._semaphores is not None
        with self._in_use(), self._reclaimer.gate.enqueuing_wait():
            self._backend.launch(executable, stream._native)
            self._used[stream._ptr] = stream
            for step in self._semaphores.waits:
                for semaphore, value in zip(step.semaphores, step.values, strict=True):
                    if semaphore is not None:
                        stream._waits.append((semaphore._label, value if semaphore._takes_value else None))
            for step in self._semaphores.signals:
                for semaphore, value in zip(step.semaphores, step.values, strict=True):
                    if semaphore is not None:
                        semaphore._used[stream._ptr] = (stream, max(value, semaphore._last_value(stream)))
        for resource in list(self._held):
            note = getattr(resource, "used_on", None)
            if note is not None:
                note(stream)

    def _captured(self) -> list[int]:
        self._check_open()
        if not self._pointers:
            raise InvalidArgumentError("graph", "is being captured, or its capture failed; use it after the `with`.")
        return self._pointers

    def hold(self, resource: Resource) -> None:
        """Keep what captured work uses."""
        _hold(resource, self._held, self._retirement.serial)

    def _finish(self, graph: int) -> None:
        try:
            executable = self._backend.instantiate(self._device._native, graph)
        except BaseException:
            self._backend.destroy_graph(self._device._native, graph)
            raise
        self._pointers += (graph, executable)
        self._semaphores = GraphSemaphores(self._device, graph, executable, _parent=self)


@contextmanager
def capture(stream: Stream) -> Iterator[Graph]:
    """See `Stream.capture`."""
    device = stream._device
    stream._check_open()
    device.capabilities.require(Operation.GRAPH_CAPTURE)
    backend = device._backend
    assert isinstance(backend, GraphBackend)  # otherwise the capability is a gap
    if stream.capturing:
        raise InvalidArgumentError("stream", "is being captured already.")
    graph = Graph(device, backend)
    try:
        backend.begin_capture(stream._native)
        stream._graph = device._captures[stream._ptr] = graph
        graph.joined.append(stream)
        try:
            yield graph
        except BaseException:
            _abort(backend, device, stream)
            raise
        finally:
            device._captures.pop(stream._ptr, None)
            for joined in graph.joined:
                joined._graph = None
            graph.joined.clear()
        graph._finish(backend.end_capture(stream._native))
    except BaseException:
        graph.close()
        raise


def _abort(backend: GraphBackend, device: Device, stream: Stream) -> None:
    """End a capture whose body has failed: what failed is what is raised."""
    try:
        backend.destroy_graph(device._native, backend.end_capture(stream._native))
    except Exception:  # it was invalid, and there is no graph
        return


def _hold(resource: Resource, held: list[Resource], serial: int) -> None:
    if resource not in held:
        resource._retirement.gates[serial] = _IN_A_GRAPH
        held.append(resource)


def _let_go(held: list[Resource], serial: int) -> None:
    while held:
        held.pop()._retirement.gates.pop(serial, None)
