"""The demo's engine: an exporter steps a wave in shared memory, a consumer disturbs it, and a simulation checks both.

Tests remove its waits and signals one by one.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..._core.device import Device
from ..._core.memory import Buffer
from ..._core.resource import Resource
from ..._core.semaphore import ExternalSemaphore
from ..._core.stream import Event, Stream
from ...bridge import Bridge
from ...errors import GpuInteropError, InvalidArgumentError, SemaphoreTimeoutError, UnsupportedError
from ...graphics.handoff import Handoff
from ...graphics.modes import MODES, mode_gaps
from ...graphics.sides import Graphics
from ...handles import Binary, Timeline
from ...testing.exporters.base import Exporter, ExporterSemaphore, Submission
from .consumer import Consumer, open_consumer
from .producer import Producer
from .simulation import Field, Sources, WaveParameters, simulate

if TYPE_CHECKING:
    from ...opengl import SharedHandoff

__all__ = ["Run", "Sabotage", "Sync", "WaveRun", "choose_sync", "run_wave"]

TOLERANCE = 1e-4
"""The field's tolerance; its sources have amplitude 1. A correct run differs by 0, or by flushed denormals."""
_STAGED_FRAMES = 100
_RESCUES = 10  # most signals sent for a wait that is still pending


class Sabotage(Enum):
    """Leave out one of the four waits and signals, to prove that the demo needs it.

    The other three stay. Without the exporter's wait, a timeline has passed 2 k + 2 before the consumer signals for
    frame k, and must not go back, so the consumer signals 2 k + 4 instead. That ends no wait: the exporter has none,
    and the consumer waits for 2 k + 3, which is signalled by then, and for 2 k + 5.
    """

    EXPORTER_SIGNAL = "exporter_signal"
    CONSUMER_WAIT = "consumer_wait"
    CONSUMER_SIGNAL = "consumer_signal"
    EXPORTER_WAIT = "exporter_wait"


@dataclass(frozen=True, slots=True)
class Sync:
    """How the two sides take turns.

    `name` is ``timeline``; ``binary``; ``bridged``, a timeline of the exporter's that streams reach through a bridge;
    or ``host``: no semaphore is shared, and the calling thread waits for each side. `kind` is `Producer`'s argument;
    `reason` says why no better mode works, and is empty for a timeline.
    """

    name: str
    kind: type | None
    reason: str = ""


_ALLOWED = {"native": MODES[:-1], "bridged": MODES[-1:], "auto": MODES}
_KINDS = {"timeline": Timeline, "binary": Binary, "bridged": Timeline}


Gaps: TypeAlias = Callable[[Any, Device], Mapping[str, UnsupportedError | None]]


def choose_sync(exporter: Graphics, device: Device, mode: str = "auto", *, gaps_of: Gaps = mode_gaps) -> Sync:
    """Choose the best mode that both sides support: a timeline, binary semaphores, a bridged timeline, or the host.

    `mode` ``native`` allows a timeline and binary semaphores, ``bridged`` a bridge, and ``auto`` everything; if none of
    those works, it raises `UnsupportedError`. `gaps_of` is `gpuinterop.handoff.mode_gaps`, or its equivalent for the
    exporter's API. The result's reason is from the capability table.
    """
    gaps = gaps_of(exporter, device)
    worse: list[UnsupportedError] = []
    for name in _ALLOWED[mode]:
        if (gap := gaps[name]) is None:
            return Sync(name, _KINDS[name], _reasons(worse))
        worse.append(gap)
    if mode == "native" and gaps["bridged"] is None:
        raise UnsupportedError(replace(worse[0].capability, workaround="sync bridged, or auto."), context=device.name)
    if mode != "auto":
        raise worse[0]
    return Sync("host", None, _reasons(worse))


def _reasons(gaps: Sequence[UnsupportedError]) -> str:
    return " ".join(dict.fromkeys(gap.capability.reason for gap in gaps))


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveRun:
    """Result of a run.

    `frames` is the number asked for, and `frame_us` has the microseconds of each frame that was done; `staged_us` has
    those of the same frames with copies through the host. `shared_bytes` is the size of the shared memory.

    `max_error` is the largest error of the final field (both slots) against the simulation, infinite without a field.
    `problem` is what ended the run early, or empty. `picture` is the final field as OpenGL drew it, RGBA, or None;
    `field` is the final field as the exporter reads it.
    """

    backend: str
    device: str
    exporter: str
    driver: str
    consumer: str
    sync: Sync
    memory_handle: str
    semaphore_handle: str | None
    frames: int
    parameters: WaveParameters
    shared_bytes: int
    frame_us: list[float]
    staged_us: list[float]
    max_error: float
    problem: str
    picture: NDArray[np.uint8] | None = field(default=None, repr=False)
    field: Field = field(repr=False)

    @property
    def correct(self) -> bool:
        """Whether every frame was done and the field equals the simulation's."""
        return not self.problem and self.max_error <= TOLERANCE

    @property
    def median_us(self) -> float | None:
        return float(np.median(self.frame_us)) if self.frame_us else None

    @property
    def p99_us(self) -> float | None:
        return float(np.percentile(self.frame_us, 99)) if self.frame_us else None

    @property
    def staging_ratio(self) -> float | None:
        """How many times as long the median frame takes with copies through the host."""
        if not self.staged_us or not self.median_us:
            return None
        return float(np.median(self.staged_us)) / self.median_us

    def as_dict(self, output: str | None = None) -> dict[str, Any]:
        """Return what ``gpuinterop demo --json`` prints; `output` is the picture's file."""
        return {
            "backend": self.backend,
            "device": self.device,
            "exporter": self.exporter,
            "driver": self.driver,
            "sync": self.sync.name,
            "memory_handle": self.memory_handle,
            "semaphore_handle": self.semaphore_handle,
            "frames": self.frames,
            "size": [self.parameters.width, self.parameters.height],
            "shared_bytes": self.shared_bytes,
            "frame_us": {"median": _rounded(self.median_us, 1), "p99": _rounded(self.p99_us, 1)},
            "staging_ratio": _rounded(self.staging_ratio, 3),
            # JSON has no infinity.
            "max_error": self.max_error if math.isfinite(self.max_error) else None,
            "correct": self.correct,
            "output": output,
        }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def run_wave(
    exporter: Exporter,
    device: Device,
    parameters: WaveParameters,
    frames: int,
    *,
    sync: Sync | None = None,
    timeout: float = 300.0,
    staging: bool = True,
    tick: Callable[[int, int], object] | None = None,
    sabotage: Sabotage | None = None,
    make_producer: Callable[..., Producer] = Producer,
    make_run: Callable[..., Run] | None = None,
) -> WaveRun:
    """Run the wave and check it.

    In frame k the exporter steps slot ``k % 2`` into slot ``(k + 1) % 2`` and signals. The consumer's stream waits,
    reads the new field, writes into it, and signals back.

    `sync` defaults to the result of `choose_sync`. Each wait takes at most `timeout` seconds: if a signal is missing,
    the run ends, and `WaveRun.problem` names it. `staging` also times the frames with copies. `tick` is called after
    each frame with the number done and the total. `make_producer` and `make_run` replace `Producer` and `Run`.

    `sabotage` leaves a wait or signal out. If it is a wait, each frame delays the other side until the side without the
    wait is done, so the error shows every time.

    Raises `InvalidArgumentError` for less than one frame, or a sabotage without a shared semaphore, and
    `GpuInteropError` if memory or semaphores cannot be shared. Later errors are in `WaveRun.problem`.
    """
    _check(parameters, frames)
    chosen = choose_sync(exporter, device) if sync is None else sync
    if chosen.name == "host" and sabotage:
        raise InvalidArgumentError("sabotage", f"there is no semaphore to leave out: {chosen.reason}")
    with ExitStack() as cleanup:
        exportable = chosen.name != "bridged"
        producer = cleanup.enter_context(make_producer(exporter, parameters, chosen.kind, exportable=exportable))
        run = (make_run or Run)(producer, device, frames, timeout, tick, sabotage, chosen, cleanup)
        result = _result(run, exporter, parameters, staging=staging)
        del run
    return result


def _check(parameters: WaveParameters, frames: int) -> None:
    if frames < 1:
        raise InvalidArgumentError("frames", f"expected 1 or more, got {frames}.")
    if min(parameters.width, parameters.height) < 16:
        raise InvalidArgumentError("size", f"expected 16x16 or more, got {parameters.width}x{parameters.height}.")


def _result(run: Run, exporter: Exporter, parameters: WaveParameters, *, staging: bool) -> WaveRun:
    """Do the run, and compare its final field with NumPy's wave."""
    problem = run.go()
    found = run.read()
    expected = simulate(parameters, run.frames, run.sources)
    field = np.zeros_like(expected[0]) if found is None else found[run.frames % 2]
    picture = None if problem else run.draw(field)
    staged = run.staged() if staging and not problem else []
    return WaveRun(
        backend=run.device.backend,
        device=run.device.name,
        exporter=exporter.name,
        driver=exporter.driver,
        consumer=run.consumer.description,
        sync=run.sync,
        memory_handle=run.memory_handle,
        semaphore_handle=run.semaphore_handle,
        frames=run.frames,
        parameters=parameters,
        shared_bytes=parameters.size,
        frame_us=run.frame_us,
        staged_us=staged,
        max_error=_difference(found, expected),
        problem=problem,
        field=field,
        picture=picture,
    )


def _difference(found: Field | None, expected: Field) -> float:
    worst = math.inf if found is None else float(np.max(np.abs(found - expected)))  # np.max propagates a NaN
    return worst if math.isfinite(worst) else math.inf


@dataclass(eq=False)
class Run:
    """The frames of a run; `go` starts them."""

    producer: Producer
    device: Device
    frames: int
    timeout: float
    tick: Callable[[int, int], object] | None
    sabotage: Sabotage | None
    sync: Sync
    cleanup: InitVar[ExitStack]

    def __post_init__(self, cleanup: ExitStack) -> None:
        producer = self.producer
        self.sources = Sources(producer.parameters.width, producer.parameters.height)
        self.frame_us: list[float] = []
        self.semaphore_handle: str | None = None
        self._submissions: dict[int, Submission] = {}
        self._awaited: int | None = None  # the last frame that the stream waits for
        self.shared: tuple[ExternalSemaphore[Any], ExternalSemaphore[Any] | None] | None = None
        self.bridge: Bridge | None = None
        self.handoff: Handoff | SharedHandoff | None = None
        map_buffer = self._connect(cleanup)
        self.stream: Stream = cleanup.enter_context(self.device.create_stream(high_priority=True))
        buffer = cleanup.enter_context(map_buffer())
        self.consumer: Consumer = open_consumer(self.stream, buffer, producer.parameters, self.sources)
        cleanup.callback(self.consumer.close)

    def _connect(self, cleanup: ExitStack) -> Callable[[], Buffer]:
        """Share memory and semaphores with the exporter; returns a function that maps the memory."""
        producer, device, timeout, sync = self.producer, self.device, self.timeout, self.sync
        theirs = producer.memory
        with theirs.export() as handle:
            self.memory_handle = handle.type_name
            memory = device.import_memory(handle, size=theirs.size, dedicated=theirs.dedicated)
        # The exporter frees its memory when the device is done with it, so wait for a while. After a failed run the
        # stream may never be done; that has been reported by then.
        cleanup.callback(_close_in_time, memory, timeout)
        if sync.name == "bridged":
            self.bridge = Bridge(device)
            # The watcher uses the exporter's semaphore, so it must stop first.
            cleanup.callback(_close_in_time, self.bridge, timeout)
            assert producer.forth is not None
            self.shared = cleanup.enter_context(_bridged(self.bridge, producer.forth)), None
        elif producer.forth is not None and producer.back is not None:
            forth = self._import(producer.forth, cleanup)
            self.shared = forth, self._import(producer.back, cleanup) if sync.kind is Binary else None
        self.handoff = Handoff(*self.shared, tracks_submits=False) if self.shared else None
        return partial(memory.map_buffer, offset=0, size=producer.parameters.size)

    def _import(self, theirs: ExporterSemaphore, cleanup: ExitStack) -> ExternalSemaphore[Any]:
        with theirs.export() as handle:
            self.semaphore_handle = handle.type_name
            return cleanup.enter_context(self.device.import_semaphore(handle))

    # -- the frames --------------------------------------------------------------------------------------------

    def go(self) -> str:
        """Do all frames; returns what ended them early, or an empty text."""
        try:
            self._frames()
            self.stream.synchronize(self.timeout)
            for submission in self._submissions.values():
                self._finish(submission, "last frame")
                submission.close()
        except GpuInteropError as error:
            self._release_all()
            return f"frame {len(self.frame_us)}: {error}"
        except BaseException:  # above all Ctrl-C: pending work would block the cleanup
            self._release_all()
            raise
        return ""

    def _frames(self) -> None:
        previous: Event | None = None
        for frame in range(self.frames):
            start = time.perf_counter()
            if self.handoff is None:
                self._by_host(frame)
            elif self.sabotage is Sabotage.CONSUMER_WAIT:
                self._with_producer_held(frame)
            else:
                if frame not in self._submissions:
                    self._submit(frame)
                self._acquire(frame)
                if self.sabotage is Sabotage.EXPORTER_WAIT and frame + 1 < self.frames:
                    self._until_next_is_done(frame)
                self.consumer.work(frame, self.timeout)
                self._release(frame)
                event = self.stream.record()
                if previous is not None:
                    previous.wait(self.timeout)  # at most one frame ahead of the device
                previous = event
            self.frame_us.append((time.perf_counter() - start) * 1e6)
            if self.tick is not None:
                self.tick(frame + 1, self.frames)

    def _submit(self, frame: int) -> Submission:
        submission = self.producer.submit(
            frame,
            wait=self.sabotage is not Sabotage.EXPORTER_WAIT,
            signal=self.sabotage is not Sabotage.EXPORTER_SIGNAL,
        )
        self._submissions[frame] = submission
        if frame - 2 in self._submissions:  # it is done, because the consumer's next frame was
            self._submissions.pop(frame - 2).close()
        return submission

    def _finish(self, submission: Submission, what: str = "frame") -> None:
        """Wait for the exporter to do a frame."""
        if not submission.done(self.timeout):
            raise SemaphoreTimeoutError(f"the exporter's {what} is not done after {self.timeout:g} s.")

    def _acquire(self, frame: int) -> None:
        self._awaited = frame
        if self.sabotage is None:
            assert self.handoff is not None
            self.handoff.acquire(self.stream)
            return
        assert self.shared is not None
        forth, back = self.shared
        # With something left out, signal by hand: the handoff refuses calls in the wrong order.
        if back is None:
            forth.wait(self.stream, 2 * frame + 1)
        else:
            forth.wait(self.stream)

    def _release(self, frame: int) -> None:
        if self.sabotage is Sabotage.CONSUMER_SIGNAL:
            return
        if self.sabotage is None:
            assert self.handoff is not None
            self.handoff.release(self.stream)
            return
        assert self.shared is not None
        forth, back = self.shared
        if back is not None:
            back.signal(self.stream)
        else:
            # Without the wait, the exporter's next frame has already signalled 2 k + 3.
            forth.signal(self.stream, 2 * frame + (4 if self.sabotage is Sabotage.EXPORTER_WAIT else 2))

    def _by_host(self, frame: int) -> None:
        self._finish(self._submit(frame))
        self.consumer.work(frame, self.timeout)
        self.stream.synchronize(self.timeout)

    def _with_producer_held(self, frame: int) -> None:
        """Submit the exporter's frame once the consumer, which does not wait for it, is idle."""
        idle = threading.Event()

        def submit() -> Submission:
            idle.wait(self.timeout)
            return self._submit(frame)

        with ThreadPoolExecutor(1, "gpuinterop-demo-producer") as thread:
            submitted = thread.submit(submit)
            try:
                self.consumer.work(frame, self.timeout)
                self.stream.synchronize(self.timeout)
            finally:
                idle.set()
        self._finish(submitted.result())
        self._settle_at(2 * frame + 1)
        self._release(frame)

    def _until_next_is_done(self, frame: int) -> None:
        """Hold the consumer in `frame` until the exporter, which does not wait, has done the next one."""
        self.stream.synchronize(self.timeout)
        if frame:
            self._settle_at(2 * frame + 2)
        self._finish(self._submit(frame + 1))
        self._settle_at(2 * frame + 3)

    def _settle_at(self, value: int) -> None:
        """Wait until a bridged timeline has reached `value`, because the wait that would do so is left out.

        The watcher signals a little after the stream has, and a driver's semaphore may show a frame's end a little
        late. The next signal must not come before either: a timeline that is set back stays there.
        """
        if self.bridge is not None and self.shared is not None:
            self.shared[0].host_wait(value, timeout=self.timeout)

    # -- afterwards --------------------------------------------------------------------------------------------

    def _release_all(self) -> None:
        """Signal every pending wait so that nothing hangs: no GPU cancels a wait."""
        limit = max(self.timeout, 10.0)  # tests have a shorter one, for a signal that never comes
        if self.bridge is not None:
            _close_in_time(self.bridge, 0)  # releases every stream, and the stream fails
            with contextlib.suppress(GpuInteropError):
                self.stream.synchronize(limit)
            _close_in_time(self.bridge, limit)  # the watcher does not read the exporter's semaphore any more
        with contextlib.suppress(GpuInteropError):
            self.producer.abort()
        if self.bridge is not None or self.shared is None or self._awaited is None:
            return
        forth, back = self.shared
        with contextlib.suppress(GpuInteropError), self.device.create_stream() as rescue:
            # One signal may not be enough. A binary signal releases one wait, and is lost if it meets a late one of the
            # exporter's; a timeline goes back when the consumer's stream signals a lower value after its wait.
            for attempt in range(_RESCUES):
                forth.signal(rescue, *(() if back is not None else (2 * self._awaited + 1 + attempt,)))
                with contextlib.suppress(SemaphoreTimeoutError):
                    self.stream.synchronize(1.0)
                    return

    def draw(self, field: Field) -> NDArray[np.uint8] | None:
        """Let the exporter draw the final field; None if it draws nothing."""
        return None

    def read(self) -> Field | None:
        """Both slots as the exporter sees them; None if even that fails."""
        p = self.producer.parameters
        try:
            data = self.producer.read(0) + self.producer.read(1)
        except GpuInteropError:
            return None
        return np.frombuffer(data, np.float32).reshape(2, p.height, p.width).copy()

    def staged(self) -> list[float]:
        """Time the same frames without sharing: exporter and consumer both copy out and in."""
        times = []
        for frame in range(self.frames, self.frames + min(self.frames, _STAGED_FRAMES)):
            start = time.perf_counter()
            slot = (frame + 1) % 2
            submission = self.producer.submit(frame, wait=False, signal=False)
            self._finish(submission)
            submission.close()
            self.producer.write(slot, self.consumer.work_on_copy(frame, self.producer.read(slot)))
            times.append((time.perf_counter() - start) * 1e6)
        return times


def _bridged(bridge: Bridge, theirs: ExporterSemaphore) -> ExternalSemaphore[Any]:
    endpoint = theirs.endpoint()
    try:
        return bridge.from_endpoint(endpoint)
    except BaseException:
        endpoint.close()
        raise


def _close_in_time(resource: Resource, timeout: float) -> None:
    with contextlib.suppress(GpuInteropError):
        resource.close(timeout)
