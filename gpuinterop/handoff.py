"""Handing one object back and forth between a graphics API and a stream, frame by frame.

Binary: one semaphore each way. Timeline: one semaphore, the graphics side signals ``2 k + 1`` for frame k (from 0), the
compute side ``2 k + 2``. The order submit, acquire, release is kept for the user: out of order it raises at once,
instead of a wait that never returns. A handoff over a timeline that was used before goes on where that stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

from ._arguments import check_int
from ._core.semaphore import ExternalSemaphore
from ._core.stream import Stream
from .errors import ArgumentTypeError, InvalidArgumentError, SemaphoreTimeoutError, UnsupportedError
from .handles import Binary, Timeline

__all__ = ["Handoff", "HandoffStep"]


@dataclass(frozen=True, slots=True)
class HandoffStep:
    """What the graphics side's next submission waits for and signals.

    Attributes
    ----------
    frame : int
    wait_value : int or None
        None: nothing to wait for (the very first frame). 0 for a binary semaphore.
    signal_value : int
        0 for a binary semaphore.
    """

    frame: int
    wait_value: int | None
    signal_value: int


class _Turn(Enum):
    SUBMIT = "the graphics side's submit"
    ACQUIRE = "acquire"
    RELEASE = "release"


_promised: WeakKeyDictionary[ExternalSemaphore[Any], int] = WeakKeyDictionary()
"""What the last submission that was asked for here signals, or has signalled."""


class Handoff:
    """The compute side of a handoff; it owns no semaphore.

    Parameters
    ----------
    to_compute : ExternalSemaphore
        Signalled by the graphics side. Binary, or a timeline that serves both directions.
    to_graphics : ExternalSemaphore, optional
        Signalled by the compute side; for binary ones only.
    tracks_submits : bool
        Whether the graphics side asks `next_submit` here. False when it lives in another process: then only acquire
        and release are kept in order.
    frame : int, optional
        The frame to begin with, where neither side is in the middle of one. By default a timeline says it, by the
        values that were signalled to it here and, where the CPU can look (`ExternalSemaphore.host_wait`), by its
        counter; else it is 0. What another process did to a driver's timeline before cannot be seen.

    Raises
    ------
    ArgumentTypeError
    InvalidArgumentError
        The semaphores do not fit together. `frame` has gone by: its values were signalled. Or the timeline stands where
        no frame begins, and `frame` must say which is next.
    """

    def __init__(
        self,
        to_compute: ExternalSemaphore[Any],
        to_graphics: ExternalSemaphore[Any] | None = None,
        *,
        tracks_submits: bool = True,
        frame: int | None = None,
    ) -> None:
        given: list[tuple[str, object]] = [("to_compute", to_compute)]
        if to_graphics is not None:
            given.append(("to_graphics", to_graphics))
        for argument, semaphore in given:
            if not isinstance(semaphore, ExternalSemaphore):
                raise ArgumentTypeError(argument, f"must be an ExternalSemaphore, not {type(semaphore).__name__}.")
        if to_compute.kind is Timeline:
            if to_graphics is not None:
                raise InvalidArgumentError("to_graphics", "one timeline serves both directions; leave it out.")
        elif to_compute.kind is Binary:
            if to_graphics is None or to_graphics.kind is not Binary:
                raise InvalidArgumentError("to_graphics", "a binary handoff takes a second binary semaphore.")
            if to_graphics is to_compute:
                raise InvalidArgumentError("to_graphics", "must be another semaphore than to_compute.")
        else:
            raise InvalidArgumentError("to_compute", "must be binary or a timeline.")
        self._to_compute = to_compute
        self._to_graphics = to_graphics
        self._timeline = to_compute.kind is Timeline
        self._tracks_submits = tracks_submits
        self._turn = _Turn.SUBMIT if tracks_submits else _Turn.ACQUIRE
        stands = self._stands() if self._timeline else 0
        self._frame = self._begin(stands) if frame is None else check_int(frame, "frame")
        if self._frame < stands // 2 or (tracks_submits and frame is not None and 2 * self._frame < stands):
            raise InvalidArgumentError(
                "frame", f"{self._frame} has gone by: {to_compute.label} stands at {stands}; pass {(stands + 1) // 2}."
            )
        # What nobody will release is not waited for: where the caller has said the frame, that of the one before.
        self._first = self._frame if self._timeline and stands < 2 * self._frame else 0

    @property
    def mode(self) -> str:
        """``timeline`` or ``binary``."""
        return "timeline" if self._timeline else "binary"

    @property
    def frame(self) -> int:
        """The frame that is under way; of semaphores that were never used before, from 0."""
        return self._frame

    def next_submit(self) -> HandoffStep:
        """What the graphics side's next submission must wait for and signal; call it once a frame.

        Raises
        ------
        InvalidArgumentError
            The frame before was not released yet.
        """
        self._take(_Turn.SUBMIT, _Turn.ACQUIRE)
        frame = self._frame
        waits = frame != self._first
        if self._timeline:
            _promised[self._to_compute] = 2 * frame + 1
            return HandoffStep(frame, 2 * frame if waits else None, 2 * frame + 1)
        return HandoffStep(frame, 0 if waits else None, 0)

    def undo_submit(self) -> None:
        """Take `next_submit` back: the submission it was asked for has failed, and nothing of it was queued.

        Raises
        ------
        InvalidArgumentError
            No submission is under way: none was asked for, or it was acquired already.
        """
        self._take(_Turn.ACQUIRE, _Turn.SUBMIT)
        _promised.pop(self._to_compute, None)

    def acquire(self, stream: Stream, *, timeout: float | None = None) -> None:
        """Enqueue: `stream` waits for the graphics side. Returns at once.

        Raises
        ------
        InvalidArgumentError
            Nothing was submitted for this frame: the wait would never return.
        """
        self._check(_Turn.ACQUIRE)
        if self._timeline:
            self._to_compute.wait(stream, 2 * self._frame + 1, timeout=timeout)
        else:
            self._to_compute.wait(stream, timeout=timeout)
        self._turn = _Turn.RELEASE

    def release(self, stream: Stream) -> None:
        """Enqueue: `stream` signals the graphics side. Returns at once.

        Raises
        ------
        InvalidArgumentError
            The frame was not acquired.
        """
        self._check(_Turn.RELEASE)
        if self._to_graphics is not None:
            self._to_graphics.signal(stream)
        else:
            self._to_compute.signal(stream, 2 * self._frame + 2)
        self._turn = _Turn.SUBMIT if self._tracks_submits else _Turn.ACQUIRE
        self._frame += 1

    def _stands(self) -> int:
        """The timeline's value, as far as it can be known here; what is enqueued counts as signalled."""
        return max(_counter(self._to_compute), self._to_compute._last_signalled(), _promised.get(self._to_compute, 0))

    def _begin(self, stands: int) -> int:
        """The frame that a timeline's value says, and whose turn it is."""
        frame, submitted = divmod(stands, 2)
        if submitted and self._tracks_submits and _promised.get(self._to_compute) == stands:
            self._turn = _Turn.ACQUIRE  # it was asked for here, and never released
        elif submitted and (self._tracks_submits or self._to_compute._last_signalled() == stands):
            raise InvalidArgumentError(
                "frame",
                f"{self._to_compute.label} stands at {stands}, where no frame begins: somebody used values of "
                f"their own. Pass frame={frame + 1}, whose values are {stands + 2} and {stands + 3}, or more.",
            )
        return frame

    def _check(self, turn: _Turn) -> None:
        if self._turn is not turn:
            raise InvalidArgumentError(
                "handoff", f"{turn.value} is out of turn: frame {self._frame} is due for {self._turn.value}."
            )

    def _take(self, turn: _Turn, following: _Turn) -> None:
        if not self._tracks_submits:
            raise InvalidArgumentError("handoff", "the graphics side is elsewhere (tracks_submits=False).")
        self._check(turn)
        self._turn = following


def _counter(semaphore: ExternalSemaphore[Any]) -> int:
    """What the timeline has been signalled to; 0 where only the driver knows."""

    def reached(value: int) -> bool:
        try:
            semaphore.host_wait(value, timeout=0)
        except SemaphoreTimeoutError:
            return False
        return True

    try:
        low, high = 0, 1
        while reached(high):
            low, high = high, 2 * high
    except (UnsupportedError, InvalidArgumentError):  # it cannot be asked, or not for so much
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if reached(middle) else (low, middle)
    return low
