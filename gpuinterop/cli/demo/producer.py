"""The exporter's half of the demo: it steps the field, frame by frame."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

from ...errors import SemaphoreTimeoutError
from ...handles import Binary, Timeline
from ...testing.exporters.base import Exporter, ExporterSemaphore, Kernel, Submission
from .simulation import WaveParameters

__all__ = ["Producer", "step"]

GROUP = 16  # local_size in wave.comp
_FIRST_STEP_S = 300.0


def step(slots: Any, width: int, height: int, courant2: float, damping: float, current: int, following: int) -> None:
    """Step the field without a shader, in this process's own mapping of both slots.

    It is written differently from the simulation, which checks it.
    """
    import numpy as np

    fields = np.frombuffer(slots, np.float32, 2 * width * height).reshape(2, height, width)
    u, here, target = fields[current], fields[current, 1:-1, 1:-1], fields[following, 1:-1, 1:-1]
    result = u[:-2, 1:-1] + u[2:, 1:-1]
    result += u[1:-1, :-2]
    result += u[1:-1, 2:]
    result -= here * np.float32(4)
    result *= np.float32(courant2)
    result += here * np.float32(2) - target
    result *= np.float32(damping)
    target[:] = result


class Producer:
    """The wave in an exporter's memory, all zero at first.

    In frame k (from 0) the exporter waits for the consumer's signal of frame k - 1 (not for k = 0), steps slot
    ``k % 2`` into slot ``(k + 1) % 2``, and signals. With `kind` Binary, `forth` and `back` are two semaphores. With
    Timeline they are one: the exporter signals ``2 k + 1``, the consumer ``2 k + 2``. With None there are no
    semaphores, and the host orders the frames. If `exportable` is False, a timeline has only an endpoint.
    """

    def __init__(
        self,
        exporter: Exporter,
        parameters: WaveParameters,
        kind: type | None,
        *,
        exportable: bool = True,
    ) -> None:
        self._exporter = exporter
        self.parameters = parameters
        self.forth: ExporterSemaphore | None = None
        self.back: ExporterSemaphore | None = None
        with ExitStack() as undo:
            self.memory = undo.enter_context(exporter.create_memory(parameters.size))
            if kind is not None:
                self.forth = self.back = undo.enter_context(exporter.create_semaphore(kind, exportable=exportable))
            if kind is Binary:
                self.back = undo.enter_context(exporter.create_semaphore(kind))
            self.memory.write(0, bytes(parameters.size))
            # A step of an all-zero field changes nothing, and prepares what the first frame needs.
            if not self.submit(0, wait=False, signal=False).done(_FIRST_STEP_S):
                raise SemaphoreTimeoutError(f"the exporter's first step is not done after {_FIRST_STEP_S:g} s.")
            self._undo = undo.pop_all()

    def submit(self, frame: int, *, wait: bool = True, signal: bool = True) -> Submission:
        """Enqueue a frame and return at once. Only tests that remove a wait or a signal pass False."""
        p = self.parameters
        timeline = self.forth is not None and self.forth.kind is Timeline
        kernel = Kernel(
            memory=self.memory,
            function="gpuinterop.cli.demo.producer:step",
            shader="gpuinterop.cli.demo:wave.spv",
            groups=(-(-p.width // GROUP), -(-p.height // GROUP), 1),
            arguments=p.step(frame),
        )
        return self._exporter.submit(
            wait=[(self.back, 2 * frame if timeline else 0)] if wait and self.back and frame else (),
            run=[kernel],
            signal=[(self.forth, 2 * frame + 1 if timeline else 0)] if signal and self.forth else (),
        )

    def read(self, slot: int) -> bytes:
        """Copy a slot out through the exporter, as a program without sharing does in each frame."""
        return self.memory.read(slot * self.parameters.slot_bytes, self.parameters.slot_bytes)

    def write(self, slot: int, data: bytes) -> None:
        """Replace a slot through the exporter; returns when the bytes are there."""
        self.memory.write(slot * self.parameters.slot_bytes, data)

    def abort(self) -> None:
        """Release every wait for a signal that will never be sent; nothing can be submitted afterwards."""
        for semaphore in (self.back, self.forth):  # frames wait for `back`: closing it releases them
            if semaphore is not None:
                semaphore.close()

    def close(self) -> None:
        """Release pending waits, and free the memory."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
