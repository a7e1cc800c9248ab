"""Graphs: work that is captured once and launched many times, with the values of its signals and waits.

A graph contains the values of its semaphores. Timelines must grow, so each launch needs new values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, cast

from .. import system
from .._arguments import check_int
from ..backend import GraphBackend, SemaphoreNode
from ..capabilities import Operation
from ..errors import GpuInteropError, InvalidArgumentError
from ..handles import Fence, Timeline
from .lifetime import FINAL, Lifetime, hold, locked, marked, note_use
from .resource import Resource
from .semaphore import Enqueueable, ExternalSemaphore, LastSignalled, note_signalled
from .stream import Stream, check_stream
from .streams import CapturedError, KnownStream, Waits

if TYPE_CHECKING:
    from .device import Device
    from .memory import Mapping

_PATIENCE_S: Final = 1.0  # how long a capture waits for calls on its streams

__all__ = ["Graph", "GraphSemaphores", "GraphStep", "capture"]


class GraphStep:
    """One node of a graph that waits or signals; `GraphSemaphores.steps` lists them.

    Attributes
    ----------
    signals : bool
        True if the node signals, False if it waits.
    semaphores : tuple of ExternalSemaphore or None
        The node's semaphores, in order; None for a semaphore that gpuinterop did not import, or has released.
    values : tuple of int
        Values that the next launch waits for or signals; 0 for a binary semaphore.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> with device.import_semaphore(gi.TimelineFd(timeline_fd)) as semaphore, stream.capture() as graph:
    ...     semaphore.signal(stream, 1)
    >>> graph.semaphores.signals[0].set(7)  # what the next launch signals
    >>> graph.close()
    """

    def __init__(self, owner: GraphSemaphores, node: SemaphoreNode) -> None:
        self._owner = owner
        self._node = node
        known = owner.device._semaphores
        self.signals = node.signals
        imported = (known.get(pointer) for pointer in node.semaphores)
        self.semaphores: tuple[ExternalSemaphore[Any] | None, ...] = tuple(
            None if semaphore is None or semaphore.lifetime.state in FINAL else semaphore for semaphore in imported
        )
        self._imported = [semaphore for semaphore in self.semaphores if semaphore is not None]
        self._handles = [semaphore._handle for semaphore in self._imported]
        counts = all(semaphore is not None and semaphore.kind in (Timeline, Fence) for semaphore in self.semaphores)
        # The largest value that all semaphores accept; None if one of them does not count.
        self._largest = min(semaphore.max_value for semaphore in self._imported) if counts else None
        self.values = node.values
        self._largest_set = node.values  # no launch waits for more, even if another thread sets values meanwhile

    def set(self, *values: int | None) -> None:
        """Set the values of later launches (``cuGraphExecExternalSemaphores{Signal,Wait}NodeSetParams``).

        Takes one value per entry of `semaphores`; None for a binary semaphore. Launches already enqueued keep theirs.

        Raises
        ------
        InvalidArgumentError
            The number of values differs from the number of semaphores, a value does not fit its semaphore, or
            gpuinterop did not import one of the semaphores.
        """
        numbers = self._checked(values)
        self._owner.lifetime.use(lambda _: self._apply(numbers))

    def _checked(self, values: tuple[int | None, ...]) -> tuple[int, ...]:
        if len(values) != len(self.semaphores):
            raise InvalidArgumentError(
                "values", f"expected {len(self.semaphores)}, one for each semaphore, got {len(values)}."
            )
        if len(self._handles) != len(self.semaphores):
            raise InvalidArgumentError(
                "values", "expected semaphores imported here, got one of another library; set its value there."
            )
        return tuple([semaphore._checked(value) for semaphore, value in zip(self._imported, values, strict=True)])

    def _apply(self, numbers: tuple[int, ...]) -> None:
        owner = self._owner
        # First, so that a launch with these values waits for no more.
        self._largest_set = tuple(map(max, self._largest_set, numbers))
        owner.driver.set_node(owner._executable, self._node, self._handles, numbers)
        self.values = numbers

    def _advanced(self, by: int) -> tuple[int, ...]:
        """Return the values plus `by` for semaphores that count; keys and fence addresses do not change."""
        if self._largest is not None:
            numbers = tuple([value + by for value in self.values])
            if by >= 0 and max(numbers) <= self._largest:
                return numbers
        return self._checked(
            tuple(
                None if semaphore is not None and not semaphore.takes_value
                else value + by if semaphore is None or semaphore.kind in (Timeline, Fence)
                else value
                for semaphore, value in zip(self.semaphores, self.values, strict=True)
            )
        )  # fmt: skip

    def __repr__(self) -> str:
        what = "signal" if self.signals else "wait"
        return f"<GraphStep {what} {', '.join(map(str, self.values))}>"


class GraphSemaphores(Resource):
    """The signals and waits of a graph, and their values. You create it for a graph of another library.

    Parameters
    ----------
    device : Device
    graph : int
        A ``CUgraph``: torch's ``CUDAGraph(keep_graph=True).raw_cuda_graph()``, CuPy's ``Graph.graph``.
    executable : int
        The ``CUgraphExec`` instantiated from it: torch's ``raw_cuda_graph_exec()``, CuPy's ``Graph.graphExec``.

    Attributes
    ----------
    steps : tuple of GraphStep
        The nodes that wait or signal, in the driver's order.

    Raises
    ------
    UnsupportedError
        The device cannot capture graphs (`Operation.GRAPH_CAPTURE`).

    Notes
    -----
    You own both graphs. Keep them until this object is closed, because its nodes belong to them. The semaphores stay
    valid until then, even if you close them earlier.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> with device.import_semaphore(gi.TimelineFd(timeline_fd)) as semaphore, stream.capture() as graph:  # torch's
    ...     semaphore.wait(stream, 1)
    ...     semaphore.signal(stream, 2)
    >>> with graph, gi.GraphSemaphores(device, graph.ptr, graph.executable_ptr) as semaphores:
    ...     semaphores.advance(2)
    ...     semaphores.steps
    (<GraphStep wait 3>, <GraphStep signal 4>)
    """

    def __init__(self, device: Device, graph: int, executable: int, *, _parent: Graph | None = None) -> None:
        device.capabilities.require(Operation.GRAPH_CAPTURE)
        self.device = device
        self.driver = cast(GraphBackend, device.driver)  # otherwise the capability is a gap
        nodes_of = check_int(graph, "graph", minimum=1)
        self._executable = check_int(executable, "executable", minimum=1)
        parents = () if _parent is None else (_parent,)
        super().__init__(Lifetime("GraphSemaphores", parents=[parent._marked for parent in parents]), *parents)
        self.lifetime.warns = _parent is None
        self.lifetime.open()
        try:
            self.steps = tuple(GraphStep(self, node) for node in self.driver.semaphore_nodes(nodes_of))
            for semaphore in {semaphore for step in self.steps for semaphore in step._imported}:
                hold(semaphore.lifetime, self.lifetime)
                if _parent is None:  # another library launches the graph, so its signals cannot be tracked
                    semaphore._forget_values()
            if _parent is None:
                self.lifetime.untracked = (device.streams,)
        except BaseException:
            self.close()
            raise

    @property
    def waits(self) -> tuple[GraphStep, ...]:
        """The nodes that wait, in the driver's order."""
        return tuple(step for step in self.steps if not step.signals)

    @property
    def signals(self) -> tuple[GraphStep, ...]:
        """The nodes that signal, in the driver's order."""
        return tuple(step for step in self.steps if step.signals)

    def advance(self, by: int) -> None:
        """Add `by` to the value of every timeline and fence, usually once per frame.

        Raises
        ------
        InvalidArgumentError
            A value would exceed 64 bits, or gpuinterop did not import a semaphore. No value was changed.
        """
        step_by = by if type(by) is int else check_int(by, "by")
        plans = [(step, step._advanced(step_by)) for step in self.steps]
        with marked(self.lifetime.calls):
            self._check_open()
            for step, numbers in plans:
                step._apply(numbers)


class _Opaque(Waits):
    """Waits of a launch with semaphores that are unknown here. They pass only when the stream has passed them."""

    def is_there(self) -> bool:
        return self.passed


class Graph(Resource, Enqueueable):
    """Work that is captured once and launched many times. `Stream.capture` returns it.

    It keeps the semaphores and mappings that its work uses, even if you close them, until it is released itself. After
    `close`, the driver's graph is released when its launches are done (``cuGraphExecDestroy``, ``cuGraphDestroy``).

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> with device.import_semaphore(gi.TimelineFd(timeline_fd)) as semaphore, stream.capture() as graph:
    ...     buffer.fill(7, stream=stream)
    ...     semaphore.signal(stream, 1)
    >>> with graph:
    ...     for frame in range(3):
    ...         graph.launch(stream)
    ...         graph.semaphores.advance(1)
    ...     stream.synchronize(timeout=10)
    """

    def __init__(self, device: Device, backend: GraphBackend, label: str | None) -> None:
        super().__init__(Lifetime("Graph", device=device.streams, label=label))
        self.device, self.driver = device, backend
        self._batch, self._direct = None, False
        # After the capture: the driver's graph, its executable, and what they wait for and signal.
        self._result: tuple[Lifetime, Lifetime, GraphSemaphores] | None = None
        self._awaited: list[Lifetime] = []  # semaphores that it waits for and that this process imported
        self._waits: list[tuple[GraphStep, int, bool]] = []  # step, index of its value, whether it takes a value
        self._passing: type[Waits] = Waits
        self._signals: list[tuple[GraphStep, int, Lifetime]] = []
        self._mappings: dict[Mapping, tuple[int, int]] = {}
        self._joined: list[KnownStream] = []  # streams whose work is being captured
        self._semaphores: list[ExternalSemaphore[Any]] = []  # until the end of the capture, for the steps
        self.lifetime.open()

    @property
    def ptr(self) -> int:
        """The native graph (``CUgraph``) as an integer."""
        return int(self._captured()[0].handle)

    @property
    def executable_ptr(self) -> int:
        """The native executable (``CUgraphExec``) as an integer."""
        self._passing = _Opaque  # with this pointer, a caller can set other values
        return int(self._captured()[1].handle)

    @property
    def semaphores(self) -> GraphSemaphores:
        """The signals and waits of the graph, with the values of the next launch."""
        return self._captured()[2]

    def launch(self, stream: Stream | object) -> None:
        """Enqueue the graph's work on a stream of the same device (``cuGraphLaunch``). Returns at once.

        Raises
        ------
        InvalidArgumentError
            The capture has not ended, or the stream is being captured.
        """
        if self._result is None:
            self._captured()
        pending: Waits | None = None
        if self._waits:  # `pending` can exist for long, so it refers to the semaphores and not to the graph
            pending = self._passing()
            pending.semaphores, pending.semaphore = self._awaited, self._awaited[0]
            pending.values = [None] * len(self._awaited)  # nothing passes before this launch's values are set
        known = (stream := check_stream(self.device, stream))._known_as()
        places = self._enqueue(stream, known, self._notes.get(known), self._launch_now, (), pending)
        for (step, place, _semaphore), (values, at) in zip(self._signals, places, strict=True):
            values[at] = max(step.values[place], values[at])

    def _launch_now(self, _batch: None, known: KnownStream, _numbers: object, pending: Waits | None = None) -> None:
        if known.graph is not None or self.driver.is_capturing(known.handle):  # by any library
            raise InvalidArgumentError(
                "stream", "is being captured: values of a graph inside a graph cannot be set; launch them one by one."
            )
        self.driver.launch(self._marked.handle, known.handle)
        if pending is not None:
            pending.values = [step._largest_set[place] if valued else None for step, place, valued in self._waits]

    def _check_closely(self, stream: Stream) -> None:
        self._check_open()
        self._marked.check()
        check_stream(self.device, stream)
        stream._known_as().refuse_capture_change()

    def _note_use(self, stream: Stream, known: KnownStream) -> Sequence[LastSignalled]:
        check_stream(self.device, stream)
        for mapping, (first, last) in self._mappings.items():
            mapping.used_on(known, first, last)
        note_use(self._marked, known, note_signalled([semaphore for _, _, semaphore in self._signals], known))
        return cast(Sequence[LastSignalled], self._marked.uses[known])

    def _hold_in(self, graph: Graph) -> None:
        """Do nothing, because such a launch is refused."""

    def _captured(self) -> tuple[Lifetime, Lifetime, GraphSemaphores]:
        self._check_open()
        if self._result is None:
            raise InvalidArgumentError("graph", "is being captured, or its capture failed; use it after the `with`.")
        return self._result

    def _hold(self, lifetime: Lifetime) -> None:
        hold(lifetime, self.lifetime)

    def _note(self, mapping: Mapping, start: int, end: int) -> None:
        first, last = self._mappings.get(mapping, (start, end))
        self._mappings[mapping] = min(first, start), max(last, end)

    def _enter(self, known: KnownStream) -> None:
        """Capture the stream's work from now on. Waits for other calls, but not for long: one may be `synchronize`."""
        self._claim(known)
        system.until(lambda: not known.calls.copy(), _PATIENCE_S)

    @locked
    def _claim(self, known: KnownStream) -> None:
        if known.captured:  # another thread was faster
            raise CapturedError(known)
        self._joined.append(known)
        known.captured = True  # other calls no longer query it, because a query would end the capture
        known.update_checks()

    @locked
    def _join(self, known: KnownStream) -> None:
        """Add the stream's new work to the graph until the capture ends."""
        if known in self._joined:
            known.graph = self

    @locked
    def _drop_streams(self, streams: Sequence[KnownStream]) -> None:
        """End the capture of these streams: all at its end, or a single stream that failed to join."""
        for known in streams:
            if known in self._joined:
                known.graph = None
                known.captured = False
                known.update_checks()
                self._joined.remove(known)

    def _end(self, known: KnownStream) -> None:
        """End the capture, even one that failed, so that the stream runs again. Idempotent."""
        if self._joined and self._result is None:
            self._leave()
            with suppress(GpuInteropError):  # the capture was invalid: there is no graph
                if known.try_use(self.driver.is_capturing, False):  # otherwise the failed call has ended it
                    self.driver.destroy_graph(self.device._handle, known.try_use(self.driver.end_capture, None))
            with suppress(GpuInteropError):
                known.broken = known.try_use(self.driver.is_capturing, False)
        self._drop_streams(self._joined.copy())
        self._semaphores.clear()

    def _leave(self) -> None:
        """Refuse new work until the capture has ended. Waits as `_enter` does."""
        for known in self._joined.copy():  # another thread may shorten the list
            known.graph = None
        system.until(lambda: not any(known.calls.copy() for known in self._joined.copy()), _PATIENCE_S)

    def _finish(self, known: KnownStream) -> None:
        device, backend = self.device._handle, self.driver
        graph = Lifetime("captured graph", lambda it: backend.destroy_graph(device, it), parents=(self.lifetime,))
        graph.create(lambda: known.try_use(backend.end_capture, None))  # works on a closed stream, too
        executable = Lifetime("executable", lambda it: backend.destroy_executable(device, it), parents=(graph,))
        executable.create(lambda: backend.instantiate(device, graph.handle))
        self._init_calls(executable, self.device, executable.uses)
        semaphores = GraphSemaphores(self.device, graph.handle, executable.handle, _parent=self)
        for step in semaphores.steps:
            for place, semaphore in enumerate(step.semaphores):
                if semaphore is not None and step.signals:
                    self._signals.append((step, place, semaphore.lifetime))
                elif semaphore is not None:
                    self._waits.append((step, place, semaphore.takes_value))
                    self._awaited.append(semaphore.lifetime)
                elif not step.signals:
                    self._passing = _Opaque
        self._result = graph, executable, semaphores


@contextmanager
def capture(stream: Stream, label: str | None) -> Iterator[Graph]:
    device = stream.device
    stream._check_open()
    device.capabilities.require(Operation.GRAPH_CAPTURE)
    backend = cast(GraphBackend, device.driver)  # otherwise the capability is a gap
    if stream.capturing:
        raise InvalidArgumentError(
            "stream", "expected a stream that is not being captured, got one that is; end that capture first."
        )
    known = stream._known_as()
    graph = Graph(device, backend, label)
    try:
        graph._enter(known)
        known.use(backend.begin_capture)
        graph._join(known)
        yield graph
        graph._leave()
        graph._finish(known)
        graph._end(known)
    except BaseException:
        graph._end(known)
        graph.close()
        raise
