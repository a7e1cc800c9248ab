"""The compute side of a demo frame: it reads the field and writes into it, with the array library that is installed.

If the CPU can address the memory, NumPy works on it in place. On a GPU, CuPy or torch works on the stream, without the
host. Without them, the rows under a source are copied to the host and back.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..._core.memory import Buffer
from ..._core.stream import Stream
from .simulation import Sources, WaveParameters

__all__ = ["Consumer", "open_consumer"]


class Consumer(ABC):
    """Reads and writes the field of each frame: two slots of float32 in `buffer`, in the order of `stream`."""

    description: str = ""
    """The library, and how it reaches the memory."""

    def __init__(self, stream: Stream, buffer: Buffer, parameters: WaveParameters, sources: Sources) -> None:
        self._stream = stream
        self._buffer = buffer
        self._parameters = parameters
        self._sources = sources
        self._shape = (parameters.height, parameters.width)
        self._slots: Any = None

    @abstractmethod
    def work(self, frame: int, timeout: float) -> None:
        """Enqueue the frame's work on the shared memory, after what the stream already waits for.

        If the calling thread does the work, it raises `SemaphoreTimeoutError` when the stream is not ready within
        `timeout` seconds.
        """

    def work_on_copy(self, frame: int, data: bytes) -> bytes:
        """Do the same work on separate memory, with the copies in and out that sharing saves."""
        field = np.frombuffer(data, np.float32).reshape(self._shape).copy()
        self._apply(field, self._sources.window, frame)
        return field.tobytes()

    def close(self) -> None:
        """Release the shared memory."""
        self._slots = None

    def _apply(self, field: Any, window: Any, frame: int) -> None:
        """Apply each operator separately, so that every library rounds as the simulation does."""
        for patch in self._sources.patches(frame):
            cells = field[patch.top : patch.top + patch.size, patch.left : patch.left + patch.size]
            cells += window * (patch.target - cells)


class NumpyConsumer(Consumer):
    """NumPy on the shared bytes."""

    def __init__(self, stream: Stream, buffer: Buffer, parameters: WaveParameters, sources: Sources) -> None:
        super().__init__(stream, buffer, parameters, sources)
        self.description = f"NumPy {np.__version__}, in place"
        self._slots = np.asarray(buffer.view((2, *self._shape), "float32"))

    def work(self, frame: int, timeout: float) -> None:
        self._stream.synchronize(timeout)
        self._apply(self._slots[(frame + 1) % 2], self._sources.window, frame)


class ArrayConsumer(Consumer):
    """CuPy or torch on the stream, found by their functions and not by the GPU's vendor."""

    def __init__(
        self, library: str, stream: Stream, buffer: Buffer, parameters: WaveParameters, sources: Sources
    ) -> None:
        super().__init__(stream, buffer, parameters, sources)
        self._library: Any = importlib.import_module(library)
        self._torch = library == "torch"
        self.description = f"{library} {self._library.__version__}, in place"
        view = buffer.view((2, *self._shape), "float32")
        self._ordinal = view.__dlpack_device__()[1]
        self._foreign = self._external(stream)
        with self._on_stream():
            self._slots = self._library.from_dlpack(view)
            self._window: Any = self._upload(sources.window)
            # A kernel is loaded on first use, and loading waits for the whole device: for ever, if a stream waits for
            # a later signal. So use every kernel before the first wait.
            self._apply(self._upload(np.zeros(self._shape, np.float32)), self._window, 0)
        stream.synchronize()

    def _external(self, stream: Stream) -> Any:
        """The stream as the library's own object."""
        cuda = self._library.cuda
        adopt = getattr(getattr(cuda, "Stream", None), "from_external", None)  # CuPy 14 and later
        if adopt is None:
            return cuda.ExternalStream(stream.ptr, self._ordinal)
        with cuda.Device(self._ordinal):
            return adopt(stream)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        cuda = self._library.cuda
        if self._torch:  # also makes the stream's device the current one
            with cuda.stream(self._foreign):
                yield
        else:
            with cuda.Device(self._ordinal), self._foreign:
                yield

    def _upload(self, array: Any) -> Any:
        if self._torch:
            return self._library.from_numpy(array).to(self._slots.device)
        return self._library.asarray(array)

    def work(self, frame: int, timeout: float) -> None:
        with self._on_stream():
            self._apply(self._slots[(frame + 1) % 2], self._window, frame)

    def work_on_copy(self, frame: int, data: bytes) -> bytes:
        with self._on_stream():
            field = self._upload(np.frombuffer(bytearray(data), np.float32).reshape(self._shape))
            self._apply(field, self._window, frame)
            result = field.cpu().numpy() if self._torch else self._library.asnumpy(field)
        return bytes(result.tobytes())


class CopyConsumer(Consumer):
    """Copies the rows under a source to the host and back; for devices without an array library."""

    description = "NumPy, on copies of the rows it touches (install CuPy or torch to work in place)"

    def work(self, frame: int, timeout: float) -> None:
        self._stream.synchronize(timeout)
        row = self._parameters.width * 4
        slot = (frame + 1) % 2 * self._parameters.slot_bytes
        for patch in self._sources.patches(frame):
            rows = np.empty((patch.size, self._parameters.width), np.float32)
            offset = slot + patch.top * row
            self._buffer.copy_to_host(rows, offset=offset, stream=self._stream)
            self._stream.synchronize(timeout)
            cells = rows[:, patch.left : patch.left + patch.size]
            cells += self._sources.window * (patch.target - cells)
            self._buffer.copy_from_host(rows, offset=offset, stream=self._stream)


def open_consumer(stream: Stream, buffer: Buffer, parameters: WaveParameters, sources: Sources) -> Consumer:
    """Choose what the memory allows: NumPy in place, an array library on the stream, or copies.

    Close the consumer before the buffer, because it holds arrays of the shared memory.
    """
    if buffer.device.info.array_interface == "__array_interface__":
        return NumpyConsumer(stream, buffer, parameters, sources)
    for library in ("cupy", "torch"):
        try:
            return ArrayConsumer(library, stream, buffer, parameters, sources)
        except Exception:  # absent, or built for another vendor: try the next, and in the end copies
            continue
    return CopyConsumer(stream, buffer, parameters, sources)
