"""Graphs: capture, launch, and the values of the nodes that signal and wait."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

from gpuinterop.backend import GraphBackend, SemaphoreNode

from .driver import Context, Driver, Made, Room, at
from .semaphores import Batch, ImportedSemaphore, NodeParams, Params
from .streams import Stream

_SIGNAL_NODE, _WAIT_NODE = 8, 9  # CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL, ..._WAIT


class _Capture(Made):
    back = "cuStreamEndCapture"

    def free(self) -> None:
        if (graph := super().free()) is not None:
            self.device.driver.call("cuGraphDestroy", graph)


class _Graph(Made):
    back = "cuGraphDestroy"
    number: Number


class _Executable(_Graph):
    back = "cuGraphExecDestroy"


class Number(int):
    """A ``CUgraph`` or ``CUgraphExec`` that this backend made."""

    made: _Graph
    argument: Any


class _Node:
    """A node that signals or waits, with what its calls need, which is made once."""

    def __init__(self, node: Any, timeouts: Sequence[int]) -> None:
        self.argument = at(int(node))
        self.timeouts = timeouts
        """Timeouts of the semaphores, in milliseconds, as captured; empty for signals."""
        self.batch: Batch | None = None
        self.executable: tuple[int, Any] = (0, None)
        """The graph's executable, and the same for ctypes."""


class Graphs(Room, GraphBackend):
    """Signals and waits that a graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self._launch = self._driver.entry("cuGraphLaunch")
        self._set_signal = self._driver.entry("cuGraphExecExternalSemaphoresSignalNodeSetParams")
        self._set_wait = self._driver.entry("cuGraphExecExternalSemaphoresWaitNodeSetParams")

    def begin_capture(self, stream: Stream) -> None:
        """``cuStreamBeginCapture`` begins a thread-local capture, which calls of other threads do not affect."""
        mode = self._driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        capture = _Capture(stream.device)
        begin = partial(capture.add, "cuStreamBeginCapture", stream.handle, mode)
        stream.device.create(capture, begin, aside=False)

    def end_capture(self, stream: Stream) -> Number:
        """``cuStreamEndCapture``."""
        return _numbered(_Graph(stream.device), "cuStreamEndCapture", stream.handle, aside=False)

    def instantiate(self, device: Context, graph: int) -> Number:
        """``cuGraphInstantiate``."""
        return _numbered(_Executable(device), "cuGraphInstantiate", self._driver.api.CUgraph(graph), 0)

    def launch(self, executable: int, stream: Stream) -> None:
        """``cuGraphLaunch``."""
        assert isinstance(executable, Number)  # a graph of ours
        if code := stream.run(self._launch, executable.argument, stream.argument):
            raise self._driver.error("cuGraphLaunch", code)

    def destroy_graph(self, device: Context, graph: int) -> None:
        """``cuGraphDestroy``."""
        assert isinstance(graph, Number)
        graph.made.release()

    destroy_executable: Any = destroy_graph
    """``cuGraphExecDestroy``."""

    def semaphore_pointer(self, semaphore: ImportedSemaphore) -> int:
        return int(semaphore.handle)

    def semaphore_nodes(self, graph: int) -> list[SemaphoreNode]:
        """``cuGraphGetNodes`` gives all nodes, and ``cuGraphNodeGetType`` tells which of them signal and wait."""
        driver = self._driver
        native = driver.api.CUgraph(graph)
        _, count = driver.call("cuGraphGetNodes", native)
        found, _ = driver.call("cuGraphGetNodes", native, count)
        result = []
        for node in found[:count]:
            kind = int(driver.call("cuGraphNodeGetType", node))
            if kind in (_SIGNAL_NODE, _WAIT_NODE):
                result.append(_node(driver, node, signals=kind == _SIGNAL_NODE))
        return result

    def set_node(
        self, executable: int, node: SemaphoreNode, semaphores: Sequence[ImportedSemaphore], values: Sequence[int]
    ) -> None:
        """``cuGraphExecExternalSemaphoresSignalNodeSetParams``; ``cuGraphExecExternalSemaphoresWaitNodeSetParams``."""
        native: _Node = node.native
        batch = native.batch
        if batch is None:
            batch = native.batch = Batch(semaphores)
        pool, call = (batch.signals, self._set_signal) if node.signals else (batch.waits, self._set_wait)
        try:
            slot = pool.pop()
        except IndexError:
            slot = batch.slot()
        if batch.layout is None:
            (slot.first.value,) = values
        else:
            batch.layout.pack_into(slot.structs, 0, *values)
        for index in native.timeouts and batch.keyed:
            slot.structs[index].timeout_ms = native.timeouts[index]
        if native.executable[0] != executable:
            native.executable = executable, at(executable)
        code = call(native.executable[1], native.argument, slot.node)
        pool.append(slot)
        if code:
            what = "Signal" if node.signals else "Wait"
            raise self._driver.error(f"cuGraphExecExternalSemaphores{what}NodeSetParams", code)


def _numbered(graph: _Graph, call: str, *arguments: Any, aside: bool = True) -> Number:
    def work() -> None:
        graph.make(call, *arguments)
        graph.number = Number(int(graph.handle))
        graph.number.made = graph
        graph.number.argument = at(graph.number)

    return graph.device.create(graph, work, aside=aside).number


def _node(driver: Driver, node: Any, *, signals: bool) -> SemaphoreNode:
    """``cuGraphExternalSemaphoresSignalNodeGetParams``, or ``cuGraphExternalSemaphoresWaitNodeGetParams``."""
    params = driver.call(f"cuGraphExternalSemaphores{'Signal' if signals else 'Wait'}NodeGetParams", node)
    # The bindings return the arrays that were set through them, not those of the driver's answer.
    found = NodeParams.from_address(params.getPtr())
    structs = [Params.from_address(found.params + index * ctypes.sizeof(Params)) for index in range(found.count)]
    return SemaphoreNode(
        native=_Node(node, () if signals else tuple(one.timeout_ms for one in structs)),
        signals=signals,
        semaphores=tuple(int(found.semaphores[index]) for index in range(found.count)),
        # Each kind has its own field, and the others are 0.
        values=tuple(int(one.value or one.key or one.fence or 0) for one in structs),
    )
