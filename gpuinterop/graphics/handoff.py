"""The order of the two sides in a frame."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final

from .._arguments import MAX_SIZE, NoCopy, check_int, check_timeout, check_type
from .._core.semaphore import ExternalSemaphore
from .._core.stream import Stream, check_stream
from ..errors import InvalidArgumentError, UnsupportedError
from ..handles import Binary, Timeline

_MAX_FRAME: Final = MAX_SIZE // 2


@dataclass(frozen=True, slots=True)
class HandoffStep:
    """The wait and the signal of the graphics side's next submission.

    Attributes
    ----------
    frame : int
        Number of the frame, from 0.
    wait_value : int or None
        Value to wait for, 0 for a binary semaphore; None if there is no wait (the very first frame).
    signal_value : int
        Value to signal, 0 for a binary semaphore.

    Examples
    --------
    >>> with device.create_semaphore(gi.TimelineFd) as semaphore:
    ...     step = gi.Handoff(semaphore).next_submit()
    >>> step.wait_value is None, step.signal_value
    (True, 1)
    """

    frame: int
    wait_value: int | None
    signal_value: int


def _question(value: int | None) -> str:
    """Ask what may be missing when a stream waits too long. The handoff may no longer exist."""
    if value is None:
        return "of a handoff: was its frame submitted?"
    frame, back = divmod(value - 1, 2)
    return f"of a handoff: was frame {frame} {'released' if back else 'submitted'}?"


class NextCall(Enum):
    """The call that is due next."""

    SUBMIT = "submit"
    ACQUIRE = "acquire"
    RELEASE = "release"


SUBMIT, ACQUIRE, RELEASE = NextCall


class CallOrder(NoCopy):
    """The order of a handoff's calls: submit, acquire, release."""

    _submits: ClassVar[str] = "next_submit"  # the call that submits
    _draws: ClassVar[str] = "submit"  # a word for what that call does
    _next_call = SUBMIT
    _frame = 0

    @property
    def frame(self) -> int:
        """Number of the current frame. It starts at 0 on unused semaphores."""
        return self._frame

    def __repr__(self) -> str:
        closed = any(semaphore.closed for semaphore in self._semaphores())
        due = self._draws if self._next_call is SUBMIT else self._next_call.value
        state = " closed" if closed else f": frame {self._frame} is due for {due}"
        return f"<{type(self).__name__} of {self._label()}{state}>"

    def _semaphores(self) -> Sequence[ExternalSemaphore[Any]]:
        raise NotImplementedError

    def _label(self) -> str:
        return " and ".join(semaphore.label for semaphore in self._semaphores())

    def _check(self, next_call: NextCall, call: str) -> None:
        if self._next_call is not next_call:
            for semaphore in self._semaphores():
                semaphore._check_open()
            due = self._submits if self._next_call is SUBMIT else self._next_call.value
            expected = f"expected {due} for frame {self._frame} of {self._label()}"
            raise InvalidArgumentError("handoff", f"{expected}, got {call}; call {due} first.")


class Handoff(CallOrder):
    """The compute side of a handoff. You still own the semaphores.

    Parameters
    ----------
    to_compute : ExternalSemaphore
        The semaphore that the graphics side signals: a binary one, or a timeline for both directions.
    to_graphics : ExternalSemaphore, optional
        The semaphore that the compute side signals; only for binary semaphores.
    tracks_submits : bool
        Whether the graphics side calls `next_submit` here. Pass False if it runs in another process; then the handoff
        only checks the order of acquire and release.
    frame : int, optional
        First frame; no frame may be in progress. By default it is derived from the timeline's signals in this process
        and, if the CPU can read it (`ExternalSemaphore.value`), from its counter; otherwise it is 0. gpuinterop cannot
        see earlier signals of other processes to a driver's timeline.

    Raises
    ------
    ArgumentTypeError
        An argument is not a semaphore.
    InvalidArgumentError
        The semaphores do not fit together; the values of `frame` are already signalled; or the timeline's value does
        not begin a frame, so you must pass the next `frame`.

    Examples
    --------
    >>> with device.create_semaphore(gi.OpaqueFd) as ready, device.create_semaphore(gi.OpaqueFd) as done:
    ...     handoff = gi.Handoff(ready, done)  # two binary semaphores
    ...     for frame in range(3):
    ...         handoff.next_submit()
    ...         ready.host_signal()  # the graphics side has drawn
    ...         handoff.acquire(stream)
    ...         buffer.fill(frame, stream=stream)
    ...         handoff.release(stream)
    ...         done.host_wait(timeout=10)  # the graphics side can draw again
    HandoffStep(frame=0, wait_value=None, signal_value=0)
    HandoffStep(frame=1, wait_value=0, signal_value=0)
    HandoffStep(frame=2, wait_value=0, signal_value=0)
    """

    def __init__(
        self,
        to_compute: ExternalSemaphore[Any],
        to_graphics: ExternalSemaphore[Any] | None = None,
        *,
        tracks_submits: bool = True,
        frame: int | None = None,
    ) -> None:
        check_type(to_compute, ExternalSemaphore, "to_compute", "an ExternalSemaphore")
        if to_graphics is not None:
            check_type(to_graphics, ExternalSemaphore, "to_graphics", "an ExternalSemaphore")
        if to_compute.kind is Timeline:
            if to_graphics is not None:
                given = f"expected None with a timeline, got {to_graphics!r}"
                raise InvalidArgumentError("to_graphics", f"{given}; leave it out.")
        elif to_compute.kind is Binary:
            if to_graphics is None or to_graphics.kind is not Binary:
                raise InvalidArgumentError("to_graphics", f"expected a second binary semaphore, got {to_graphics!r}.")
            if to_graphics is to_compute:
                raise InvalidArgumentError("to_graphics", "expected a second semaphore, got to_compute again.")
        else:
            raise InvalidArgumentError("to_compute", f"expected a binary one or a timeline, got {to_compute.label}.")
        self._to_compute = to_compute
        self._to_graphics = to_graphics
        self._timeline = to_compute.kind is Timeline
        self._tracks_submits = tracks_submits
        self._first_call = self._next_call = SUBMIT if tracks_submits else ACQUIRE
        # The stream of the last release to a binary semaphore, which the host cannot read; it can query the stream.
        self._stream: Stream | None = None
        value = self._value_now() if self._timeline else 0
        self._frame = self._begin(value) if frame is None else check_int(frame, "frame", maximum=_MAX_FRAME)
        if self._frame < value // 2 or (tracks_submits and frame is not None and 2 * self._frame < value):
            raise InvalidArgumentError(
                "frame", f"expected {(value + 1) // 2} or more, got {self._frame}: {to_compute.label} is at {value}."
            )
        to_compute.lifetime.remark = _question
        # Before an explicit first `frame` there is no release to wait for.
        self._first = self._frame if self._timeline and value < 2 * self._frame else 0

    @property
    def mode(self) -> str:
        """``timeline`` or ``binary``."""
        return "timeline" if self._timeline else "binary"

    def next_submit(self) -> HandoffStep:
        """Return the wait and the signal of the graphics side's next submission. Call it once per frame.

        Raises
        ------
        InvalidArgumentError
            The previous frame is not released yet.
        """
        return HandoffStep(self._frame, *self._take_submit())

    def _take_submit(self) -> tuple[int | None, int]:
        """The values that the next submission waits for and signals."""
        if self._next_call is not SUBMIT:
            self._check_tracking()
            self._check(SUBMIT, self._submits)
        self._next_call = ACQUIRE
        frame = self._frame
        waits = frame != self._first
        if not self._timeline:
            return (0 if waits else None), 0
        self._to_compute._promised = 2 * frame + 1
        return (2 * frame if waits else None), 2 * frame + 1

    def undo_submit(self) -> None:
        """Undo `next_submit`, because the submission failed and was not queued.

        Raises
        ------
        InvalidArgumentError
            There is no submission to undo: `next_submit` was not called, or its frame is already acquired.
        """
        self._check_tracking()
        self._check(ACQUIRE, "undo_submit")
        self._next_call = SUBMIT
        self._to_compute._promised = 0

    def acquire(self, stream: Stream | object, *, timeout: float | None = None) -> None:
        """Make `stream` wait for the graphics side.

        Parameters
        ----------
        stream : Stream, int, or stream of torch, CuPy or numba
            Stream of the semaphores' device.
        timeout : float, optional
            See `ExternalSemaphore.wait`.

        Raises
        ------
        InvalidArgumentError
            `next_submit` was not called for this frame, so the wait would never return.
        SemaphoreTimeoutError
            `timeout` passed. Call `acquire` again for this frame.
        """
        if self._next_call is not ACQUIRE:
            check_timeout(timeout)
            self._check(ACQUIRE, "acquire")
        value: Any = 2 * self._frame + 1 if self._timeline else None
        self._to_compute.wait(stream, value, timeout=timeout)
        self._next_call = RELEASE

    def release(self, stream: Stream | object) -> None:
        """Make `stream` signal the graphics side once its earlier work is done. Returns at once.

        Parameters
        ----------
        stream : Stream, int, or stream of torch, CuPy or numba
            Stream of the semaphores' device.

        Raises
        ------
        InvalidArgumentError
            The frame is not acquired.
        """
        if self._next_call is not RELEASE:
            self._check(RELEASE, "release")
        if self._to_graphics is not None:
            if type(stream) is not Stream:
                stream = check_stream(self._to_graphics.device, stream)
            self._to_graphics.signal(stream)
            self._stream = stream
        else:
            self._to_compute.signal(stream, 2 * self._frame + 2)
        self._next_call = self._first_call
        self._frame += 1

    def _semaphores(self) -> list[ExternalSemaphore[Any]]:
        return [semaphore for semaphore in (self._to_compute, self._to_graphics) if semaphore is not None]

    def _value_now(self) -> int:
        """The timeline's value, as far as this process can see it. Enqueued signals count."""
        counter = 0
        with suppress(UnsupportedError):  # only the driver can read it
            counter = self._to_compute.value
        return max(counter, self._to_compute._last_signalled(), self._to_compute._promised)

    def _begin(self, value: int) -> int:
        """Derive the frame from a timeline's value, and set the call that is due."""
        frame, submitted = divmod(value, 2)
        if submitted and self._tracks_submits and self._to_compute._promised == value:
            self._next_call = ACQUIRE  # the frame was submitted here and never released
        elif submitted and (self._tracks_submits or self._to_compute._last_signalled() == value):
            raise InvalidArgumentError(
                "frame",
                f"expected a value that begins a frame, got {self._to_compute.label} at {value}: other code signalled "
                f"it; pass frame={frame + 1}, whose values are {value + 2} and {value + 3}, or a later frame.",
            )
        return frame

    def _check_tracking(self) -> None:
        if not self._tracks_submits:
            raise InvalidArgumentError(
                "handoff", "expected a handoff that tracks submits, got tracks_submits=False; submit elsewhere."
            )
