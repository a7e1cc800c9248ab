"""What the demo computes: the sources that the consumer writes, and the whole wave once more in NumPy alone.

The simulation shares no code with any exporter and no memory with anybody. It rounds as the shader does, operation by
operation in float32, so that a correct run differs from it by nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..exporters.base import WaveParameters

__all__ = ["Field", "Patch", "Sources", "simulate"]

Field: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Patch:
    """A square of the field that one source moves in one frame, and where to.

    Attributes
    ----------
    top, left : int
        The position of the first cell.
    size : int
        Cells along each edge.
    target : float
        A float32 value: the window pulls the cells towards it, in the middle all the way.
    """

    top: int
    left: int
    size: int
    target: float


@dataclass(frozen=True)
class Sources:
    """Paddles that travel along Lissajous curves and beat up and down; what the consumer writes into the field.

    A paddle reads the cells under it and writes ``cells += window * (target - cells)``: what it writes depends on what
    it read, so a field that is stale in either direction becomes a wrong one.

    Parameters
    ----------
    width, height : int
        The field's size in cells; 16 or more.
    """

    width: int
    height: int

    @property
    def radius(self) -> int:
        """The size of a paddle in cells."""
        return max(2, min(self.width, self.height) // 48)

    @cached_property
    def window(self) -> Field:
        """How strongly a paddle holds each cell under it: a bell, 1 in the middle."""
        reach = np.arange(-self.radius, self.radius + 1, dtype=np.float64) / (self.radius + 1)
        distance = np.minimum(np.hypot(reach[:, None], reach[None, :]), 1.0)
        return np.ascontiguousarray(np.cos(distance * (math.pi / 2)) ** 2, dtype=np.float32)

    def patches(self, frame: int) -> list[Patch]:
        """The paddles of a frame, none of them over the border, which is held at zero."""
        span = 2 * self.radius + 1
        edge = min(self.width, self.height)
        scale = min(1.0, edge / 512)  # smaller fields have shorter waves, of 7 cells at least, and shorter journeys
        found = []
        for paddle in _PADDLES:
            angle = 2 * math.pi * frame / (paddle.journey * scale)
            # The reach is a share of the shorter edge, so that no paddle outruns its own waves.
            x = paddle.x * self.width + paddle.reach * edge * math.sin(paddle.turns[0] * angle + paddle.phase)
            y = paddle.y * self.height + paddle.reach * edge * math.cos(paddle.turns[1] * angle + paddle.phase)
            beat = paddle.strength * math.cos(2 * math.pi * frame / max(14.0, paddle.period * scale))
            found.append(
                Patch(
                    top=min(max(1, round(y) - self.radius), self.height - 1 - span),
                    left=min(max(1, round(x) - self.radius), self.width - 1 - span),
                    size=span,
                    target=float(np.float32(beat)),
                )
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paddle:
    x: float  # the middle of the curve, as a share of the field
    y: float
    reach: float
    turns: tuple[int, int]
    phase: float
    journey: float  # frames for the whole curve
    period: float  # frames of a beat
    strength: float


_PADDLES = (
    _Paddle(x=0.30, y=0.36, reach=0.12, turns=(1, 2), phase=0.4, journey=2600, period=40, strength=1.0),
    _Paddle(x=0.70, y=0.66, reach=0.12, turns=(2, 1), phase=3.5, journey=2600, period=40, strength=1.0),
    _Paddle(x=0.74, y=0.22, reach=0.06, turns=(1, 1), phase=1.2, journey=1800, period=30, strength=0.8),
)


def simulate(
    parameters: WaveParameters,
    frames: int,
    sources: Sources,
    *,
    tick: Callable[[], object] | None = None,
) -> tuple[Field, Field]:
    """Compute the two slots after `frames` frames, with NumPy alone.

    Parameters
    ----------
    parameters : WaveParameters
    frames : int
    sources : Sources
        What the consumer writes.
    tick : callable, optional
        Called after each frame.

    Returns
    -------
    tuple of ndarray
        Slot 0 and slot 1, ``(height, width)`` float32.
    """
    shape = (parameters.height, parameters.width)
    before, now = np.zeros(shape, np.float32), np.zeros(shape, np.float32)  # frame -1, and frame 0's start
    two, four = np.float32(2), np.float32(4)
    courant2, damping = np.float32(parameters.courant2), np.float32(parameters.damping)
    inside = (slice(1, -1), slice(1, -1))
    laplacian = np.empty((shape[0] - 2, shape[1] - 2), np.float32)
    scratch = np.empty_like(laplacian)
    window = sources.window
    for frame in range(frames):
        centre = now[inside]
        np.add(now[:-2, 1:-1], now[2:, 1:-1], out=laplacian)
        laplacian += now[1:-1, :-2]
        laplacian += now[1:-1, 2:]
        np.multiply(centre, four, out=scratch)
        laplacian -= scratch
        laplacian *= courant2
        np.multiply(centre, two, out=scratch)
        scratch -= before[inside]
        scratch += laplacian
        scratch *= damping
        before[inside] = scratch
        before, now = now, before
        for patch in sources.patches(frame):
            cells = now[patch.top : patch.top + patch.size, patch.left : patch.left + patch.size]
            cells += window * (np.float32(patch.target) - cells)
        if tick is not None:
            tick()
    # Frame k leaves its field in slot (k + 1) % 2.
    return (now, before) if frames % 2 == 0 else (before, now)
