"""The demo's run: an exporter draws into a wave in shared memory, a device steps it, and NumPy checks the result."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ..._core.device import Device
from ..._core.semaphore import ExternalSemaphore
from ..._core.stream import Event
from ...bridge import Bridge
from ...errors import GpuInteropError, SemaphoreTimeoutError
from ...graphics.handoff import Handoff
from ...graphics.modes import BRIDGED, MODES, mode_gaps
from ...handles import Binary, Timeline
from ...testing.exporters.base import Exporter, Fill, Submission
from .simulation import Field, draw, simulate
from .stepper import Stepper

__all__ = ["WaveRun", "choose_sync", "run_wave"]

_ALLOWED: Final = {"native": MODES[:-1], "bridged": (BRIDGED,), "auto": MODES}
_TOLERANCE: Final = 1e-4
"""The sources have amplitude 1. A correct run differs by 0, or by flushed denormals."""
_LIMIT: Final = 60.0
"""Seconds for a frame; it only ends a hang."""
_RESCUES: Final = 10
"""Most signals that are sent for pending waits."""


def choose_sync(exporter: Exporter, device: Device, wanted: str) -> str:
    """Choose how the two sides take turns, the best that works: ``timeline``, ``binary`` or ``bridged``.

    `wanted` ``native`` allows a timeline and binary semaphores, ``bridged`` a bridge, and ``auto`` everything. If none
    of those works, it raises the `UnsupportedError` of the last.
    """
    gaps = mode_gaps(exporter, device)
    for mode in _ALLOWED[wanted]:
        if gaps[mode] is None:
            return mode
    gap = gaps[_ALLOWED[wanted][-1]]
    assert gap is not None
    raise gap


class WaveRun(NamedTuple):
    """Result of a run: what ``--json`` prints, and the final field as the exporter reads it.

    `problem` is what ended the run early, without a field, or empty; `stepper` is the library that stepped the field.
    """

    report: dict[str, Any]
    field: Field | None
    problem: str
    stepper: str


Tick: TypeAlias = Callable[[int, int], object]
"""Called with the number of frames that are done, and the number of all."""


def run_wave(exporter: Exporter, device: Device, size: tuple[int, int], frames: int, sync: str, tick: Tick) -> WaveRun:
    """Run the wave and check it.

    In frame k the exporter draws into slot ``k % 2`` and signals. The device's stream waits, steps that slot into the
    other one, and signals. The exporter's next frame waits for that. A timeline is one semaphore for both: the exporter
    signals ``2 k + 1``, the device ``2 k + 2``. Binary semaphores are two.
    """
    with ExitStack() as scope:
        wave = _Wave(exporter, device, size, sync, scope)
        slots, problem = wave.run(frames, tick)
        times, error = wave.frame_us, math.inf
        if slots is not None:
            error = float(np.max(np.abs(slots - simulate(*size, frames))))  # np.max propagates a NaN
        median, p99 = np.percentile(times, [50, 99]).round(1).tolist() if times else (None, None)
        report = {
            "backend": device.backend,
            "device": device.name,
            "exporter": exporter.name,
            "driver": exporter.driver,
            "sync": sync,
            "memory_handle": wave.memory_handle,
            "semaphore_handle": wave.semaphore_handle,
            "frames": frames,
            "size": [*size],
            "shared_bytes": 8 * math.prod(size),
            "frame_us": {"median": median, "p99": p99},
            "max_error": error if math.isfinite(error) else None,  # JSON has no infinity
            "correct": error <= _TOLERANCE,
            "output": None,
        }
        return WaveRun(report, None if slots is None else slots[frames % 2], problem, wave.stepper.description)


class _Wave:
    """The objects of a run, which `scope` closes."""

    def __init__(self, exporter: Exporter, device: Device, size: tuple[int, int], sync: str, scope: ExitStack) -> None:
        self._exporter, self._device, self._size, nbytes = exporter, device, size, 8 * math.prod(size)
        self._memory = scope.enter_context(exporter.create_memory(nbytes))
        self._memory.write(0, bytes(nbytes))
        self._theirs = []
        for kind in (Binary, Binary) if sync == "binary" else (Timeline,):
            self._theirs.append(scope.enter_context(exporter.create_semaphore(kind, exportable=sync != BRIDGED)))
        with self._memory.export() as handle:
            self.memory_handle = handle.type_name
            memory = device.import_memory(handle, size=self._memory.size, dedicated=self._memory.dedicated)
        scope.enter_context(memory)
        self._bridge = Bridge(device) if sync == BRIDGED else None
        if self._bridge is not None:
            scope.callback(self._bridge.close, _LIMIT)  # before the exporter's semaphore, which it uses
        self.semaphore_handle: str | None = None
        self._ours = [scope.enter_context(self._import(theirs)) for theirs in self._theirs]
        self._handoff = Handoff(*self._ours, tracks_submits=False)
        self._stream = scope.enter_context(device.create_stream(high_priority=True))
        buffer = scope.enter_context(memory.map_buffer(offset=0, size=nbytes))
        self.stepper = Stepper(self._stream, buffer, *size)
        scope.callback(self.stepper.close)
        self.frame_us: list[float] = []
        self._submissions: deque[Submission] = deque()

    def _import(self, theirs: Any) -> ExternalSemaphore[Any]:
        if self._bridge is None:
            with theirs.export() as handle:
                self.semaphore_handle = handle.type_name
                return self._device.import_semaphore(handle)
        return self._bridge.from_endpoint(theirs.endpoint())

    def run(self, frames: int, tick: Tick) -> tuple[Field | None, str]:
        """Do all frames; returns both slots as the exporter sees them, or what ended the run early."""
        event: Event | None = None
        try:
            for frame in range(frames):
                start = time.perf_counter()
                self._submit(frame)
                self._handoff.acquire(self._stream)
                self.stepper.step(frame, _LIMIT)
                self._handoff.release(self._stream)
                if event is not None:
                    event.wait(_LIMIT)  # at most one frame ahead of the device
                event = self._stream.record()
                self.frame_us.append((time.perf_counter() - start) * 1e6)
                tick(frame + 1, frames)
            self._stream.synchronize(_LIMIT)
            if not self._submissions[-1].done(_LIMIT):
                raise SemaphoreTimeoutError(f"the exporter's last frame is not done after {_LIMIT:g} s.")
            shape = 2, *self._size[::-1]
            return np.frombuffer(self._memory.read(0, 4 * math.prod(shape)), np.float32).reshape(shape), ""
        except GpuInteropError as error:
            self._unblock()
            return None, f"frame {len(self.frame_us)}: {error}"
        except BaseException:  # above all Ctrl-C: pending work would block the cleanup
            self._unblock()
            raise

    def _submit(self, frame: int) -> None:
        """Enqueue the exporter's frame. Binary semaphores ignore the values."""
        width, height = self._size
        fills = []
        for row, left, cells, value in draw(width, height, frame):
            offset = ((frame % 2 * height + row) * width + left) * 4
            word = int(np.float32(value).view(np.uint32))
            fills.append(Fill(memory=self._memory, offset=offset, size=cells * 4, word=word))
        wait = [(self._theirs[-1], 2 * frame)] if frame else []
        work = self._exporter.submit(wait=wait, fill=fills, signal=[(self._theirs[0], 2 * frame + 1)])
        self._submissions.append(work)
        if len(self._submissions) > 2:  # it is done, because the device's next frame was
            self._submissions.popleft().close()

    def _unblock(self) -> None:
        """End every pending wait, so that nothing hangs: no GPU cancels a wait."""
        if self._bridge is not None:
            with suppress(GpuInteropError):
                self._bridge.close(0)  # releases every stream, and the stream fails
            return
        for semaphore in self._theirs[::-1]:
            with suppress(GpuInteropError):
                semaphore.close()  # ends the exporter's waits
        # One signal may not be enough. A binary signal releases one wait, and is lost if it meets a late one of the
        # exporter's; a timeline goes back when the stream signals a lower value after its wait.
        with suppress(GpuInteropError), self._device.create_stream() as rescue:
            for value in range(2 * self._handoff.frame + 1, 2 * self._handoff.frame + 1 + _RESCUES):
                self._ours[0].signal(rescue, *([value] if len(self._ours) == 1 else []))
                with suppress(SemaphoreTimeoutError):
                    return self._stream.synchronize(1.0)
