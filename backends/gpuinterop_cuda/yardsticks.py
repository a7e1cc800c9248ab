"""The same work with only cuda-python, for ``gpuinterop bench``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpuinterop.native_driver.yardsticks import NativeYardsticks

from .table import CUDA


class Yardsticks(NativeYardsticks):
    """Direct calls for the device `ordinal`."""

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver

        super().__init__(CUDA, driver)
        self.check(driver.cuInit(0))
        context = self.check(driver.cuDevicePrimaryCtxRetain(self.check(driver.cuDeviceGet(ordinal))))
        self.check(driver.cuCtxSetCurrent(context))
        self._handle = driver.CUipcMemHandle()

    def timelines(self, fds: Sequence[int], stream: Any) -> Timelines:
        """Import timeline semaphores. Their file descriptors are consumed."""
        return Timelines(self, self.api, fds, stream)

    def memory(self, size: int) -> Memory:
        """Memory of `size` bytes that can be imported from a file descriptor."""
        return Memory(self.api, size)

    @contextmanager
    def registered(self, buffer: int, nbytes: int, stream: Any) -> Iterator[Callable[[int], None]]:
        """Register a buffer of the current OpenGL context. Yields a call that maps it, fills it and unmaps it."""
        cu, check = self.api, self.check
        resource = check(cu.cuGraphicsGLRegisterBuffer(buffer, 2))  # CU_GRAPHICS_REGISTER_FLAGS_WRITE_DISCARD

        def fill(byte: int) -> None:
            check(cu.cuGraphicsMapResources(1, resource, stream))
            pointer, _ = check(cu.cuGraphicsResourceGetMappedPointer(resource))
            check(cu.cuMemsetD8Async(pointer, byte, nbytes, stream))
            check(cu.cuGraphicsUnmapResources(1, resource, stream))

        yield fill
        self.synchronize(stream)
        check(cu.cuGraphicsUnregisterResource(resource))

    def allocate(self, nbytes: int) -> int:
        """Memory that other processes can open."""
        return int(self.check(self.api.cuMemAlloc(nbytes)))

    def export(self, block: int) -> bytes:
        """The handle of allocated memory."""
        return ctypes.string_at(int(self.check(self.api.cuIpcGetMemHandle(block)).getPtr()), 64)

    def open(self, handle: bytes) -> int:
        """Another process's memory."""
        ctypes.memmove(int(self._handle.getPtr()), handle, len(handle))
        return int(self.check(self.api.cuIpcOpenMemHandle(self._handle, 1)))  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

    def shut(self, block: int) -> None:
        """Close memory from `open`."""
        self.check(self.api.cuIpcCloseMemHandle(block))

    def free(self, block: int) -> None:
        """Free memory from `allocate`."""
        self.check(self.api.cuMemFree(block))


class Timelines:
    """Imported timelines that one call signals or waits for."""

    def __init__(self, by_hand: Yardsticks, cu: Any, fds: Sequence[int], stream: Any) -> None:
        self._cu = cu
        self._stream = stream
        self._handles = [by_hand.check(cu.cuImportExternalSemaphore(self._desc(fd))) for fd in fds]
        self._signals = [cu.CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS() for _ in fds]
        self._waits = [cu.CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS() for _ in fds]
        signal, wait = cu.cuSignalExternalSemaphoresAsync, cu.cuWaitExternalSemaphoresAsync
        self.signal, self.wait = self._reused(signal, self._signals[0]), self._reused(wait, self._waits[0])
        self.signal_all, self.wait_all = self._all(signal, self._signals), self._all(wait, self._waits)
        self.signal_new_struct = self._new_struct(signal, cu.CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS)
        self.wait_new_struct = self._new_struct(wait, cu.CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS)
        for each in (self.signal_all, self.wait_all):
            by_hand.check(each([1] * len(fds)))
        by_hand.synchronize(stream)
        self.signalled = 1  # the next value must be greater

    def _desc(self, fd: int) -> Any:
        kinds = self._cu.CUexternalSemaphoreHandleType
        desc = self._cu.CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC()
        desc.type = kinds.CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD
        desc.handle.fd = fd
        return desc

    def _reused(self, function: Any, params: Any) -> Callable[[int], object]:
        """Return a call for the first semaphore that always uses the same struct."""
        handles, reused, stream, fence = self._handles[:1], [params], self._stream, params.params.fence

        def run(value: int) -> object:
            fence.value = value
            return function(handles, reused, 1, stream)

        return run

    def _all(self, function: Any, params: list[Any]) -> Callable[[Sequence[int]], Any]:
        """Return a call for all semaphores that always uses the same structs."""
        handles, count, stream = self._handles, len(self._handles), self._stream
        fences = [struct.params.fence for struct in params]

        def run(values: Sequence[int]) -> Any:
            for fence, value in zip(fences, values, strict=True):
                fence.value = value
            return function(handles, params, count, stream)

        return run

    def _new_struct(self, function: Any, new: Callable[[], Any]) -> Callable[[int], object]:
        """Return a call for the first semaphore that creates a new struct each time."""
        handles, stream = self._handles[:1], self._stream

        def run(value: int) -> object:
            params = new()
            params.params.fence.value = value
            return function(handles, [params], 1, stream)

        return run

    def addresses(self, *, signal: bool) -> tuple[int, int, int, int, int]:
        """For C: the driver's function, the semaphore, its params, the address of their value, and the stream."""
        function = _entry(self._cu, f"cu{'Signal' if signal else 'Wait'}ExternalSemaphoresAsync")
        params = (self._signals if signal else self._waits)[0]
        where = int(params.getPtr())  # the value of a fence is the first field
        return function, int(self._handles[0]), where, where, int(self._stream)

    def graph(self) -> Graph:
        """A captured frame, which waits for the first timeline and signals it."""
        return Graph(self._cu, self)


class Graph:
    """A graph with a wait and a signal, and the data that C needs to set their values and launch it."""

    def __init__(self, cu: Any, timelines: Timelines) -> None:
        check, stream = Yardsticks.check, timelines._stream
        check(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        check(timelines.wait(1))  # type: ignore[arg-type]
        check(timelines.signal(2))  # type: ignore[arg-type]
        self._graph = check(cu.cuStreamEndCapture(stream))
        self._executable = check(cu.cuGraphInstantiate(self._graph, 0))
        _, count = check(cu.cuGraphGetNodes(self._graph))
        nodes = check(cu.cuGraphGetNodes(self._graph, count))[0]
        kinds = [int(check(cu.cuGraphNodeGetType(node))) for node in nodes]
        self._keep: list[Any] = []

        def setter(kind: int, what: str, params: Any, node_params: Any) -> tuple[int, ...]:
            node_params.extSemArray = timelines._handles[:1]
            node_params.paramsArray = [params]
            node_params.numExtSems = 1
            self._keep.append(node_params)
            # The bindings copy the structs into their own array, whose address is in the node's params.
            array = ctypes.c_size_t.from_address(int(node_params.getPtr()) + 8).value
            function = _entry(cu, f"cuGraphExecExternalSemaphores{what}NodeSetParams")
            return function, int(self._executable), int(nodes[kinds.index(kind)]), int(node_params.getPtr()), array

        self.signal = setter(8, "Signal", timelines._signals[0], cu.CUDA_EXT_SEM_SIGNAL_NODE_PARAMS())
        self.wait = setter(9, "Wait", timelines._waits[0], cu.CUDA_EXT_SEM_WAIT_NODE_PARAMS())
        self.launch = _entry(cu, "cuGraphLaunch"), int(self._executable), int(stream)


class Memory:
    """Memory that is imported, mapped and closed repeatedly."""

    def __init__(self, cu: Any, size: int) -> None:
        self._cu = cu
        self._desc = cu.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
        self._desc.type = cu.CUexternalMemoryHandleType.CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD
        self._desc.size = size
        self._range = cu.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
        self._range.size = size

    def __call__(self, fd: int) -> None:
        """Import a duplicate of `fd`, map and close it."""
        cu, check, desc = self._cu, Yardsticks.check, self._desc
        desc.handle.fd = os.dup(fd)
        memory = check(cu.cuImportExternalMemory(desc))
        pointer = check(cu.cuExternalMemoryGetMappedBuffer(memory, self._range))
        check(cu.cuMemFree(pointer))
        check(cu.cuDestroyExternalMemory(memory))

    def addresses(self) -> tuple[int, ...]:
        """For C: the driver's functions, their structs, and the address of the fd, ordered as in ``struct memory``."""
        names = "cuImportExternalMemory", "cuExternalMemoryGetMappedBuffer", "cuMemFree", "cuDestroyExternalMemory"
        load, place, unmap, destroy = (_entry(self._cu, name) for name in names)
        desc = int(self._desc.getPtr())
        return load, desc, desc + 8, place, int(self._range.getPtr()), unmap, destroy  # the fd is after the type


def _entry(cu: Any, name: str) -> int:
    """The address of a function of CUDA 12.1."""
    flags = cu.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    return int(Yardsticks.check(cu.cuGetProcAddress(name.encode(), 12010, flags))[0])
