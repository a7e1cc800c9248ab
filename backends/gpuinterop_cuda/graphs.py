"""Graphs: capture, launch, and the values of nodes that signal and wait."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from gpuinterop.backend import GraphBackend, SemaphoreNode
from gpuinterop.native_driver.driver import NativeBackend, NativeDevice, NativeObject, as_pointer
from gpuinterop.native_driver.semaphores import Batch, ImportedSemaphore, Params
from gpuinterop.native_driver.streams import NativeStream

from .driver import Driver

_SIGNAL_NODE, _WAIT_NODE = 8, 9  # CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL, ..._WAIT
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class _Graph(NativeObject):
    release_call = "GraphDestroy"
    number: Number

    def make(self, name: str, *arguments: Any) -> None:
        super().make(name, *arguments)
        self.set_number()

    def end_capture(self, stream: NativeStream) -> None:
        graph = ctypes.c_void_p()
        self.device.driver.call("StreamEndCapture", stream.handle, ctypes.byref(graph))
        self.handle, self.made = graph.value or 0, True
        self.set_number()

    def set_number(self) -> None:
        self.number = Number(self.handle)
        self.number.owner = self
        self.number.argument = as_pointer(self.handle)


class _Executable(_Graph):
    release_call = "GraphExecDestroy"


class NodeParams(ctypes.Structure):
    """``CUDA_EXT_SEM_SIGNAL_NODE_PARAMS``, also for waits. In the driver's answer the node owns the arrays."""

    _fields_ = (
        ("semaphores", ctypes.POINTER(ctypes.c_size_t)),
        ("params", ctypes.c_size_t),
        ("count", ctypes.c_uint),
    )


class _NodeBatch(Batch):
    """Semaphores of a node. A slot also contains the node's parameters."""

    def slot(self) -> Any:
        structs, first, _ = super().slot()
        handles = ctypes.cast(self.semaphores, ctypes.POINTER(ctypes.c_size_t))
        return structs, first, ctypes.byref(NodeParams(handles, ctypes.addressof(structs), self.count))


class Number(int):
    """A ``CUgraph`` or ``CUgraphExec`` that this backend created."""

    owner: _Graph
    argument: Any


class _Node:
    """A node that signals or waits, with reusable arguments for its calls."""

    def __init__(self, node: int, timeouts: Sequence[int]) -> None:
        self.argument = as_pointer(node)
        self.timeouts = timeouts  # the semaphores' captured ones in milliseconds; empty for signals
        self.batch: _NodeBatch | None = None
        self.executable: tuple[int, Any] = (0, None)  # the graph's, as a number and for ctypes


class Graphs(NativeBackend, GraphBackend):
    """Signals and waits in graphs."""

    def __init__(self) -> None:
        super().__init__()
        self._launch = self._driver.function("GraphLaunch")
        self._set_signal = self._driver.function("GraphExecExternalSemaphoresSignalNodeSetParams")
        self._set_wait = self._driver.function("GraphExecExternalSemaphoresWaitNodeSetParams")

    def begin_capture(self, stream: NativeStream) -> None:
        """``cuStreamBeginCapture``, thread-local, so that calls of other threads do not affect the capture."""
        stream.device.call("StreamBeginCapture", stream.handle, _THREAD_LOCAL, relaxed=False)

    def end_capture(self, stream: NativeStream) -> Number:
        """``cuStreamEndCapture``."""
        graph = _Graph(stream.device)
        return stream.device.create(graph, graph.end_capture, stream, relaxed=False).number

    def instantiate(self, device: NativeDevice, graph: int) -> Number:
        """``cuGraphInstantiate``."""
        return _Executable(device).create("GraphInstantiate", int(graph), 0).number

    def launch(self, executable: int, stream: NativeStream) -> None:
        """``cuGraphLaunch``."""
        assert isinstance(executable, Number)  # a graph of this backend
        if code := stream.run(self._launch, executable.argument, stream.argument):
            raise self._driver.error("GraphLaunch", code)

    def destroy_graph(self, device: NativeDevice, graph: int) -> None:
        """``cuGraphDestroy``."""
        assert isinstance(graph, Number)
        graph.owner.release()

    destroy_executable: Any = destroy_graph
    """``cuGraphExecDestroy``."""

    def semaphore_pointer(self, semaphore: ImportedSemaphore) -> int:
        return semaphore.handle

    def semaphore_nodes(self, graph: int) -> list[SemaphoreNode]:
        """``cuGraphGetNodes`` lists the nodes; ``cuGraphNodeGetType`` shows which of them signal and wait."""
        driver, native = self._driver, int(graph)
        count, kind = ctypes.c_size_t(), ctypes.c_int()
        driver.call("GraphGetNodes", native, None, ctypes.byref(count))
        if not count.value:  # the driver refuses an empty array
            return []
        nodes = (ctypes.c_size_t * count.value)()
        driver.call("GraphGetNodes", native, nodes, ctypes.byref(count))
        result = []
        for node in nodes:
            driver.call("GraphNodeGetType", node, ctypes.byref(kind))
            if kind.value in (_SIGNAL_NODE, _WAIT_NODE):
                result.append(_node(driver, node, signals=kind.value == _SIGNAL_NODE))
        return result

    def set_node(
        self, executable: int, node: SemaphoreNode, semaphores: Sequence[ImportedSemaphore], values: Sequence[int]
    ) -> None:
        """``cuGraphExecExternalSemaphoresSignalNodeSetParams``; ``cuGraphExecExternalSemaphoresWaitNodeSetParams``."""
        native: _Node = node.native
        batch = native.batch
        if batch is None:
            batch = native.batch = _NodeBatch(semaphores)
        pool, call = batch.pools[0], self._set_signal if node.signals else self._set_wait
        try:
            slot = pool.pop()
        except IndexError:
            slot = batch.slot()
        structs, first, params = slot
        if batch.layout is None:
            (first.value,) = values
        else:
            batch.layout.pack_into(structs, 0, *values)
        for index in native.timeouts and batch.keyed:
            structs[index].timeout_ms = native.timeouts[index]
        if native.executable[0] != executable:
            native.executable = executable, as_pointer(executable)
        code = call(native.executable[1], native.argument, params)
        pool.append(slot)
        if code:
            what = "Signal" if node.signals else "Wait"
            raise self._driver.error(f"GraphExecExternalSemaphores{what}NodeSetParams", code)


def _node(driver: Driver, node: int, *, signals: bool) -> SemaphoreNode:
    """``cuGraphExternalSemaphoresSignalNodeGetParams``, ``cuGraphExternalSemaphoresWaitNodeGetParams``."""
    params = NodeParams()
    name = f"GraphExternalSemaphores{'Signal' if signals else 'Wait'}NodeGetParams"
    driver.call(name, node, ctypes.byref(params))
    structs = (Params * params.count).from_address(params.params)
    return SemaphoreNode(
        native=_Node(node, () if signals else tuple(struct.timeout_ms for struct in structs)),
        signals=signals,
        semaphores=tuple(params.semaphores[: params.count]),
        # Each kind has its own field; the others are 0.
        values=tuple(int(struct.value or struct.key or struct.fence or 0) for struct in structs),
    )
