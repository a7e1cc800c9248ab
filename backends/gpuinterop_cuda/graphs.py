"""Graphs: capture, launch, and the values of the nodes that signal and wait."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from gpuinterop.backend import GraphBackend, SemaphoreNode

from .driver import Context, Driver, Made, Room
from .semaphores import Batch, ImportedSemaphore
from .streams import Stream

# CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS and ..._WAIT_PARAMS: 144 bytes each, a fence's value first.
_PARAMS_BYTES: Final = 144
_SIGNAL_NODE, _WAIT_NODE = 8, 9  # CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL, ..._WAIT


class _Capture(Made):
    __slots__ = ()
    back = "cuStreamEndCapture"

    def free(self) -> None:
        if (graph := super().free()) is not None:
            self.device.driver.call("cuGraphDestroy", graph)


class _Graph(Made):
    __slots__ = ("number",)
    back = "cuGraphDestroy"
    number: Number


class _Executable(_Graph):
    __slots__ = ()
    back = "cuGraphExecDestroy"


class Number(int):
    """A ``CUgraph`` or ``CUgraphExec`` that this backend made."""

    made: _Graph


class _Params(ctypes.Structure):
    """The beginning of ``CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS``; a signal's has no timeout."""

    _fields_ = (
        ("value", ctypes.c_uint64),
        ("fence", ctypes.c_void_p),
        ("key", ctypes.c_uint64),
        ("timeout_ms", ctypes.c_uint32),
    )


class _NodeParams(ctypes.Structure):
    """``CUDA_EXT_SEM_SIGNAL_NODE_PARAMS``, and the same for waits. The node owns the arrays."""

    _fields_ = (
        ("semaphores", ctypes.POINTER(ctypes.c_size_t)),
        ("params", ctypes.c_size_t),
        ("count", ctypes.c_uint),
    )


class Graphs(Room, GraphBackend):
    """Signals and waits that a graph holds."""

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
        native = self._driver.api.CUgraphExec(executable)
        stream.device.call("cuGraphLaunch", native, stream.handle, aside=False)

    def destroy_graph(self, device: Context, graph: int) -> None:
        """``cuGraphDestroy``."""
        assert isinstance(graph, Number)
        graph.made.release()

    def destroy_executable(self, device: Context, executable: int) -> None:
        """``cuGraphExecDestroy``."""
        assert isinstance(executable, Number)
        executable.made.release()

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
        api = self._driver.api
        batch = Batch(api, semaphores)
        if node.signals:
            params = api.CUDA_EXT_SEM_SIGNAL_NODE_PARAMS()
            slot = batch.signals.take(values)
            call = "cuGraphExecExternalSemaphoresSignalNodeSetParams"
        else:
            params = api.CUDA_EXT_SEM_WAIT_NODE_PARAMS()
            slot = batch.waits.take(values)
            for index in batch.keyed:
                slot[1][index].timeoutMs = node.native[1][index]  # as it was captured
            call = "cuGraphExecExternalSemaphoresWaitNodeSetParams"
        params.extSemArray = batch.handles
        params.paramsArray = slot[0]
        params.numExtSems = batch.count
        self._driver.call(call, api.CUgraphExec(executable), node.native[0], params)


def _numbered(graph: _Graph, call: str, *arguments: Any, aside: bool = True) -> Number:
    def work() -> None:
        graph.make(call, *arguments)
        graph.number = Number(int(graph.handle))
        graph.number.made = graph

    return graph.device.create(graph, work, aside=aside).number


def _node(driver: Driver, node: Any, *, signals: bool) -> SemaphoreNode:
    """``cuGraphExternalSemaphoresSignalNodeGetParams``, or ``cuGraphExternalSemaphoresWaitNodeGetParams``."""
    params = driver.call(f"cuGraphExternalSemaphores{'Signal' if signals else 'Wait'}NodeGetParams", node)
    # The bindings return the arrays that were set through them, not those of the driver's answer.
    found = _NodeParams.from_address(params.getPtr())
    params_at = [_Params.from_address(found.params + index * _PARAMS_BYTES) for index in range(found.count)]
    return SemaphoreNode(
        native=(node, () if signals else tuple(one.timeout_ms for one in params_at)),
        signals=signals,
        semaphores=tuple(int(found.semaphores[index]) for index in range(found.count)),
        # Each kind has its own field, and the others are 0.
        values=tuple(int(one.value or one.key or one.fence or 0) for one in params_at),
    )
