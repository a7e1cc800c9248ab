"""The compute side of the demo: it steps the wave in shared memory, with the array library that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import numpy as np

from ..._core.memory import Buffer
from ..._core.stream import Stream
from .simulation import COURANT2, DAMPING

__all__ = ["Stepper"]


def _step(slots: Any, frame: int) -> None:
    """Step slot ``frame % 2`` into the other one, which holds the frame before. The border stays zero.

    Each operation rounds separately, so every library computes the same numbers.
    """
    now, target = slots[frame % 2], slots[(frame + 1) % 2][1:-1, 1:-1]
    here = now[1:-1, 1:-1]
    result = now[:-2, 1:-1] + now[2:, 1:-1]
    result += now[1:-1, :-2]
    result += now[1:-1, 2:]
    result -= here * 4.0
    result *= COURANT2
    result += here * 2.0 - target
    result *= DAMPING
    target[:] = result


class Stepper:
    """Steps two slots of float32 in `buffer`, in the order of `stream`.

    If the CPU can address the memory, NumPy works on it in place. On a GPU, CuPy or torch works on the stream, without
    the host. Without them, NumPy works on copies.
    """

    description: str
    """The library, and how it reaches the memory."""

    def __init__(self, stream: Stream, buffer: Buffer, width: int, height: int) -> None:
        self._stream = stream
        self._on_stream: Callable[[], AbstractContextManager[None]] | None = None
        self._copied: Buffer | None = None
        view = buffer.view((2, height, width), "float32")
        self.description = f"NumPy {np.__version__}, in place"
        if buffer.device.info.array_interface == "__array_interface__":
            self._slots: Any = np.asarray(view)
            return
        for library in ("cupy", "torch"):
            with suppress(Exception):  # absent, or built for another vendor
                self._open(library, view)
                return
        self._copied, self._slots = buffer, np.empty((2, height, width), np.float32)
        self.description = "NumPy, on copies (install CuPy or torch to work in place)"

    def _open(self, name: str, view: Any) -> None:
        """Open CuPy or torch, which are found by their functions and not by the GPU's vendor."""
        library: Any = importlib.import_module(name)
        cuda, ordinal, stream = library.cuda, view.__dlpack_device__()[1], self._stream
        adopt = getattr(getattr(cuda, "Stream", None), "from_external", None)  # CuPy 14 and later
        if adopt is None:
            foreign = cuda.ExternalStream(stream.ptr, ordinal)
        else:
            with cuda.Device(ordinal):
                foreign = adopt(stream)

        @contextmanager
        def on_stream() -> Iterator[None]:
            if name == "torch":  # also makes the stream's device the current one
                with cuda.stream(foreign):
                    yield
            else:
                with cuda.Device(ordinal), foreign:
                    yield

        with on_stream():
            slots = library.from_dlpack(view)
            # A kernel is loaded on first use, and loading waits for the whole device: for ever, if a stream waits for a
            # later signal. So use every kernel before the first wait.
            _step(library.zeros_like(slots), 0)
        stream.synchronize()
        self._slots, self._on_stream = slots, on_stream
        self.description = f"{name} {library.__version__}, in place"

    def step(self, frame: int, timeout: float) -> None:
        """Enqueue the step of a frame, after what the stream already waits for.

        If the calling thread does the step, it raises `SemaphoreTimeoutError` when the stream is not ready within
        `timeout` seconds.
        """
        if self._on_stream is not None:
            with self._on_stream():
                return _step(self._slots, frame)
        self._stream.synchronize(timeout)
        if self._copied is not None:
            self._copied.copy_to_host(self._slots)
        _step(self._slots, frame)
        if self._copied is not None:
            after = (frame + 1) % 2
            self._copied.copy_from_host(self._slots[after], offset=after * self._slots[after].nbytes)

    def close(self) -> None:
        """Release the shared memory; close the buffer afterwards."""
        self._slots = self._copied = None
