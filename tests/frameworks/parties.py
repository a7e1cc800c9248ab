"""The memory that the frameworks are given, and who looks at its bytes: never gpuinterop, never the framework."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.device import Device
from gpuinterop.handles import Timeline
from gpuinterop.testing.exporters.base import Fill
from gpuinterop.testing.exporters.memfd import MemfdExporter
from gpuinterop.testing.exporters.vulkan import VulkanExporter
from tests.limits import LIMIT
from tests.missing_vulkan import give_up

SIZE = 1 << 16
COUNT = 256
"""Elements of a view; the bytes behind them must stay as they are."""
BEHIND = b"\x5a" * 64


class Party(ABC):
    """Memory of one device, and an independent way to its bytes.

    Attributes
    ----------
    memory
        What is closed at the end: the imported memory, or the allocation.
    """

    memory: Any
    device: Device
    buffer: gi.Buffer

    @abstractmethod
    def write(self, data: bytes, offset: int = 0) -> None: ...

    @abstractmethod
    def read(self, size: int, offset: int = 0) -> bytes: ...

    @abstractmethod
    def check_stream(self, stream: object, add_one: Callable[[], object]) -> None:
        """Work that a framework enqueues by `add_one` on its `stream` stands behind our wait, and before our signal."""


class HostParty(Party):
    """A memfd, by the exporter that shares no code with the host backend."""

    def __init__(self, scope: ExitStack) -> None:
        self._scope = scope
        self._exporter = scope.enter_context(MemfdExporter())
        self._theirs = scope.enter_context(self._exporter.create_memory(SIZE))
        self.device = gi.get_backend("host").devices()[0]
        self.memory = scope.enter_context(self.device.import_memory(self._theirs.export(), size=self._theirs.size))
        self.buffer = self.memory.map_buffer()

    def write(self, data: bytes, offset: int = 0) -> None:
        self._theirs.write(offset, data)

    def read(self, size: int, offset: int = 0) -> bytes:
        return self._theirs.read(offset, size)

    def check_stream(self, stream: object, add_one: Callable[[], object]) -> None:
        """The framework works in the calling thread, whose stream waits for the exporter's thread.

        That is held until this thread waits: with the wait taken out, the framework comes first every time.
        """
        go, done, told = (self._scope.enter_context(self._exporter.create_semaphore(Timeline)) for _ in range(3))
        filled, added = (self._scope.enter_context(self.device.import_semaphore(it.export())) for it in (done, told))
        fill = Fill(memory=self._theirs, offset=0, size=4 * COUNT, word=5)
        work: Any = self._exporter.submit(wait=[(go, 1)], fill=[fill], signal=[(done, 1)])

        def let_it_go() -> None:
            if system.until(lambda: bool(filled.lifetime.calls.copy()), 2.0):
                go.signal(1)

        helper = threading.Thread(target=let_it_go)
        helper.start()
        wait: Any = filled.wait
        wait(stream, 1)
        add_one()
        assert self.read(4 * COUNT) == (6).to_bytes(4, "little") * COUNT
        signal: Any = added.signal
        signal(stream, 1)
        assert told.wait(1, timeout=LIMIT)
        helper.join()
        assert work.done(LIMIT)


class CudaParty(Party):
    """Memory of CUDA's device 0, and the driver's own copies on a stream of their own."""

    def __init__(self, scope: ExitStack) -> None:
        self._scope = scope
        self.device = gi.get_backend("cuda").device(0)
        self.memory = scope.enter_context(self.device.allocate(SIZE))
        self.buffer = self.memory.buffer
        self._driver = _Driver()
        self._address = self.buffer.ptr

    def write(self, data: bytes, offset: int = 0) -> None:
        self._driver.write(self._address + offset, data)

    def read(self, size: int, offset: int = 0) -> bytes:
        return self._driver.read(self._address + offset, size)

    def check_stream(self, stream: object, add_one: Callable[[], object]) -> None:
        ours = self.device.wrap_stream(stream)
        assert self.device.wrap_stream(stream).ptr == ours.ptr
        semaphore: Any = self._scope.enter_context(self.device.create_semaphore(gi.TimelineFd))
        self.write(bytes(4 * COUNT))
        add_one()  # compiles and loads what may wait for the whole device
        ours.synchronize(LIMIT)
        assert self.read(4) == (1).to_bytes(4, "little")
        semaphore.wait(stream, 1)
        add_one()
        semaphore.signal(stream, 2)
        with contextlib.suppress(gi.SemaphoreTimeoutError):
            semaphore.host_wait(2, timeout=0.1)
            raise AssertionError("the framework's work did not stand behind the wait")
        assert self.read(4 * COUNT) == (1).to_bytes(4, "little") * COUNT
        semaphore.host_signal(1)
        semaphore.host_wait(2, timeout=LIMIT)
        assert self.read(4 * COUNT) == (2).to_bytes(4, "little") * COUNT


class _Driver:
    """The calls of libcuda that copy, in the primary context, on a stream that does not wait for the default one."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._context, self._stream, self._pinned = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        with self._current():
            self._call("cuStreamCreate", ctypes.byref(self._stream), 1)  # CU_STREAM_NON_BLOCKING
            self._call("cuMemHostAlloc", ctypes.byref(self._pinned), ctypes.c_size_t(SIZE), 0)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(self._pinned, data, len(data))
        self._copy("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), self._pinned, len(data))

    def read(self, address: int, size: int) -> bytes:
        self._copy("cuMemcpyDtoHAsync_v2", self._pinned, ctypes.c_uint64(address), size)
        return ctypes.string_at(self._pinned, size)

    def _copy(self, name: str, target: Any, source: Any, size: int) -> None:
        with self._current():
            self._call(name, target, source, ctypes.c_size_t(size), self._stream)
            self._call("cuStreamSynchronize", self._stream)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        assert (status := getattr(self._cuda, name)(*arguments)) == 0, f"{name}: {status}"


def vulkan_exporter(driver: str) -> VulkanExporter:
    try:
        return VulkanExporter(driver)
    except (gi.BackendUnavailableError, gi.DeviceNotFoundError) as error:
        give_up(str(error))


def cuda_gap() -> str:
    """Why there is no CUDA device to test with; empty where there is one."""
    try:
        devices = gi.get_backend("cuda").devices()
    except gi.GpuInteropError as error:
        return str(error)
    return "" if devices else "no CUDA device"
