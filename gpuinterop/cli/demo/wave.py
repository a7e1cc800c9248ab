"""The demo's engine: an exporter steps a wave in shared memory, a consumer disturbs it, and a simulation checks both.

The demo shows it, and the tests take its waits and signals out one by one.
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
from ...exporters.base import Exporter, ExporterSemaphore, Submission
from ...handles import Binary, Timeline
from ...handoff import MODES, Graphics, Handoff, mode_gaps
from .consumer import Consumer, open_consumer
from .producer import Producer
from .simulation import Field, Sources, WaveParameters, simulate

if TYPE_CHECKING:
    from ...opengl import SharedHandoff

__all__ = ["Run", "Sabotage", "Sync", "WaveRun", "choose_sync", "run_wave"]

TOLERANCE = 1e-4
"""The field's tolerance; its sources beat with amplitude 1. A right run is off by 0, or by flushed denormals."""
_STAGED_FRAMES = 100
_RESCUES = 10  # signals, at most, for what a stream still waits for


class Sabotage(Enum):
    """One of the four things that keep the two sides in order, taken out to prove that it does.

    The other three stay. Without the exporter's wait a timeline has passed 2 k + 2 before the consumer signals for
    frame k, and must not go back: the consumer signals every frame all the same, with 2 k + 4. No wait ends by that:
    the exporter has none, and the consumer's next are for 2 k + 3, signalled by then, and for 2 k + 5.
    """

    EXPORTER_SIGNAL = "exporter_signal"
    CONSUMER_WAIT = "consumer_wait"
    CONSUMER_SIGNAL = "consumer_signal"
    EXPORTER_WAIT = "exporter_wait"


@dataclass(frozen=True, slots=True)
class Sync:
    """How the two sides keep in order.

    Attributes
    ----------
    name : str
        ``timeline`` or ``binary``; ``bridged``: a timeline of the exporter's, which streams reach through a bridge; or
        ``host``: no semaphore is shared, the calling thread waits for either side.
    kind : type or None
        What `Producer` takes.
    reason : str
        Why it is no better; empty for a timeline.
    """

    name: str
    kind: type | None
    reason: str = ""


_ALLOWED = {"native": MODES[:-1], "bridged": MODES[-1:], "auto": MODES}
_KINDS = {"timeline": Timeline, "binary": Binary, "bridged": Timeline}


Gaps: TypeAlias = Callable[[Any, Device], Mapping[str, UnsupportedError | None]]


def choose_sync(exporter: Graphics, device: Device, mode: str = "auto", *, gaps_of: Gaps = mode_gaps) -> Sync:
    """Take the best that both sides have: a timeline, binary semaphores, a bridged timeline, or the host.

    Parameters
    ----------
    exporter : Exporter
    device : Device
    mode : str
        ``native``: a timeline or binary semaphores. ``bridged``: that. ``auto``: the first that works.
    gaps_of : callable
        `gpuinterop.handoff.mode_gaps`, or what the exporter's API has in its place.

    Returns
    -------
    Sync
        With the reason of the capability table for what is missing.

    Raises
    ------
    UnsupportedError
        What `mode` names does not work here.
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

    Attributes
    ----------
    backend, device, exporter, driver, consumer : str
        Who took part.
    sync : Sync
    memory_handle : str
    semaphore_handle : str or None
        Handle types by name.
    frames : int
        The number of frames that was asked for.
    parameters : WaveParameters
    shared_bytes : int
        The size in bytes of the memory that both sides work in.
    frame_us : list of float
        Microseconds of each frame that was done.
    staged_us : list of float
        The same frames with copies through the host in place of sharing.
    max_error : float
        The largest error of the final field against the simulation, both slots; infinite without a field to compare.
    problem : str
        What ended the run early; empty otherwise.
    picture : ndarray or None
        The final field as OpenGL has drawn it, RGBA; None elsewhere.
    field : ndarray
        The final field, as the exporter reads it.
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
        """Whether every frame was done and the field is the simulation's."""
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
        """Return what ``gpuinterop demo --json`` prints.

        Parameters
        ----------
        output : str, optional
            The file of the picture.
        """
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
            # JSON has no infinity: without a field to compare there is no number.
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
    timeout: float = 10.0,
    staging: bool = True,
    tick: Callable[[int, int], object] | None = None,
    sabotage: Sabotage | None = None,
    make_producer: Callable[..., Producer] = Producer,
    make_run: Callable[..., Run] | None = None,
) -> WaveRun:
    """Run the wave and check it.

    Frame k: the exporter steps slot ``k % 2`` into slot ``(k + 1) % 2`` and signals; the consumer's stream waits, reads
    the new field and writes into it, and signals back.

    Parameters
    ----------
    exporter : Exporter
    device : Device
        The consumer's backend and device.
    parameters : WaveParameters
    frames : int
    sync : Sync, optional
        The default is what `choose_sync` gives.
    timeout : float
        Seconds that any one wait may take. A missing signal ends the run: `WaveRun.problem` says which.
    staging : bool
        Whether to time the frames with copies, too.
    tick : callable, optional
        Called after each frame, with how many are done, of how many.
    sabotage : Sabotage, optional
        Take this out. Where it is a wait, the other side is held back in each frame until the side without the wait
        is done, so that it shows every time instead of sometimes.
    make_producer, make_run : callable
        `Producer` and `Run`, or what the exporter has in their place.

    Raises
    ------
    InvalidArgumentError
        A sabotage where no semaphore is shared, or no frame.
    GpuInteropError
        The memory or the semaphores could not be shared. What goes wrong later is told in `WaveRun.problem`.
    """
    _check(parameters, frames)
    chosen = choose_sync(exporter, device) if sync is None else sync
    if chosen.name == "host" and sabotage:
        raise InvalidArgumentError("sabotage", f"there is no semaphore to take out: {chosen.reason}")
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
    """Let the run go, and compare what it has left with the wave that NumPy makes."""
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
    worst = math.inf if found is None else float(np.max(np.abs(found - expected)))  # np.max hands on a NaN
    return worst if math.isfinite(worst) else math.inf


@dataclass(eq=False)
class Run:
    """The frames of a run, which begin with `go`."""

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
        self._awaited: int | None = None  # the frame that the stream was last told to wait for
        self.shared: tuple[ExternalSemaphore[Any], ExternalSemaphore[Any] | None] | None = None
        self.bridge: Bridge | None = None
        self.handoff: Handoff | SharedHandoff | None = None
        map_buffer = self._connect(cleanup)
        self.stream: Stream = cleanup.enter_context(self.device.create_stream(high_priority=True))
        buffer = cleanup.enter_context(map_buffer())
        self.consumer: Consumer = open_consumer(self.stream, buffer, producer.parameters, self.sources)
        cleanup.callback(self.consumer.close)

    def _connect(self, cleanup: ExitStack) -> Callable[[], Buffer]:
        """Share memory and semaphores with the exporter; returns what maps the memory."""
        producer, device, timeout, sync = self.producer, self.device, self.timeout, self.sync
        theirs = producer.memory
        with theirs.export() as handle:
            self.memory_handle = handle.type_name
            memory = device.import_memory(handle, size=theirs.size, dedicated=theirs.dedicated)
        # The exporter frees its memory only when the device is done with it, hence the time; a run that has failed
        # may leave a stream that never is, which has been reported by then.
        cleanup.callback(_close_in_time, memory, timeout)
        if sync.name == "bridged":
            self.bridge = Bridge(device)
            # The watcher uses the exporter's semaphore: it is to be done with it before that goes.
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
        """Do all frames; returns what ended them early, if anything did."""
        try:
            self._frames()
            self.stream.synchronize(self.timeout)
            for submission in self._submissions.values():
                self._finish(submission, "last frame")
                submission.close()
        except GpuInteropError as error:
            self._release_all()
            return f"frame {len(self.frame_us)}: {error}"
        except BaseException:  # Ctrl-C, most of all: what is pending would hold up the cleanup
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
                    previous.wait(self.timeout)  # one frame ahead of the device, and no more
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
        if frame - 2 in self._submissions:  # done: the consumer's frame after it was
            self._submissions.pop(frame - 2).close()
        return submission

    def _finish(self, submission: Submission, what: str = "frame") -> None:
        """Wait until the exporter has done a frame."""
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
        # With something taken out, by hand: the handoff would refuse what is out of turn, before anything goes wrong.
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
            # Without the wait the exporter's next frame has signalled 2 k + 3 already.
            forth.signal(self.stream, 2 * frame + (4 if self.sabotage is Sabotage.EXPORTER_WAIT else 2))

    def _by_host(self, frame: int) -> None:
        self._finish(self._submit(frame))
        self.consumer.work(frame, self.timeout)
        self.stream.synchronize(self.timeout)

    def _with_producer_held(self, frame: int) -> None:
        """Submit the exporter's frame when the consumer, which does not wait for it, is idle."""
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
        """Hold the consumer, which was admitted to `frame`, until the exporter has done the next: it does not wait."""
        self.stream.synchronize(self.timeout)
        if frame:
            self._settle_at(2 * frame + 2)
        self._finish(self._submit(frame + 1))
        self._settle_at(2 * frame + 3)

    def _settle_at(self, value: int) -> None:
        """Wait until a bridged timeline has come to `value`, with a wait taken out that would have seen to that.

        The watcher signals when the stream has, a little later; and a driver may have done a frame, a little before its
        semaphore says so. Neither must be overtaken by the next signal: a timeline that is set back stays there.
        """
        if self.bridge is not None and self.shared is not None:
            self.shared[0].host_wait(value, timeout=self.timeout)

    # -- afterwards --------------------------------------------------------------------------------------------

    def _release_all(self) -> None:
        """Give every pending wait its signal, so that nothing hangs: no GPU cancels one."""
        if self.bridge is not None:
            _close_in_time(self.bridge, 0)  # lets every stream go, and the stream fails
            with contextlib.suppress(GpuInteropError):
                self.stream.synchronize(self.timeout)
            _close_in_time(self.bridge, self.timeout)  # the watcher looks at the exporter's semaphore no more
        with contextlib.suppress(GpuInteropError):
            self.producer.abort()
        if self.bridge is not None or self.shared is None or self._awaited is None:
            return
        forth, back = self.shared
        with contextlib.suppress(GpuInteropError), self.device.create_stream() as rescue:
            # One signal may not be enough. A binary one lets one wait pass, and is lost when it meets a late one of the
            # exporter's; a timeline is set back by a lower value that the consumer's stream signals behind its wait.
            for attempt in range(_RESCUES):
                forth.signal(rescue, *(() if back is not None else (2 * self._awaited + 1 + attempt,)))
                with contextlib.suppress(SemaphoreTimeoutError):
                    self.stream.synchronize(min(self.timeout, 1.0))
                    return

    def draw(self, field: Field) -> NDArray[np.uint8] | None:
        """Have the exporter draw the final field; None if it draws nothing."""
        return None

    def read(self) -> Field | None:
        """Both slots as the exporter sees them; None where even that fails."""
        p = self.producer.parameters
        try:
            data = self.producer.read(0) + self.producer.read(1)
        except GpuInteropError:
            return None
        return np.frombuffer(data, np.float32).reshape(2, p.height, p.width).copy()

    def staged(self) -> list[float]:
        """Time the same frames without sharing: the exporter copies out and in, and so does the consumer."""
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
