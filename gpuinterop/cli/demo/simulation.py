"""What the demo computes: a step of the wave, the sources that the consumer writes, and the whole run in NumPy alone.

The simulation has a memory and a step of its own: it is the oracle, and shares no code with what it checks. A step
rounds as the shader does, operation by operation in float32, so that a correct run differs from the simulation by
nothing at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Field", "Patch", "Sources", "WaveParameters", "simulate"]

Field: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveParameters:
    """Two slots of ``height x width`` float32, the field of frame k in slot ``k % 2``.

    A step computes slot ``(k + 1) % 2`` in place over frame k - 1:
    ``next = damping * (2 * u - previous + courant2 * (north + south + west + east - 4 * u))``
    with the border held at zero.
    """

    width: int = 512
    height: int = 512
    courant2: float = 0.25
    damping: float = 0.999

    @property
    def slot_bytes(self) -> int:
        return self.width * self.height * 4

    @property
    def size(self) -> int:
        return 2 * self.slot_bytes

    def step(self, frame: int) -> tuple[int, int, float, float, int, int]:
        """The arguments of a frame's step, as the producer's shader and function take them."""
        return self.width, self.height, self.courant2, self.damping, frame % 2, (frame + 1) % 2


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


def simulate(parameters: WaveParameters, frames: int, sources: Sources) -> Field:
    """Compute the two slots after `frames` frames, with NumPy alone.

    Parameters
    ----------
    parameters : WaveParameters
    frames : int
    sources : Sources
        What the consumer writes.

    Returns
    -------
    ndarray
        ``(2, height, width)`` float32.
    """
    slots = np.zeros((2, parameters.height, parameters.width), np.float32)
    for frame in range(frames):
        _step(parameters, slots[frame % 2], slots[(frame + 1) % 2])
        for patch in sources.patches(frame):
            rows, columns = slice(patch.top, patch.top + patch.size), slice(patch.left, patch.left + patch.size)
            cells = slots[(frame + 1) % 2, rows, columns]
            cells += sources.window * (np.float32(patch.target) - cells)
    return slots


def _step(p: WaveParameters, now: Field, after: Field) -> None:
    """Step the field `now` into `after`, which holds the frame before. The border stays as it is: zero."""
    u, previous = now[1:-1, 1:-1], after[1:-1, 1:-1]
    around = now[:-2, 1:-1] + now[2:, 1:-1] + now[1:-1, :-2] + now[1:-1, 2:]
    laplacian = around - np.float32(4) * u
    after[1:-1, 1:-1] = np.float32(p.damping) * (np.float32(2) * u - previous + np.float32(p.courant2) * laplacian)
