"""What the demo computes: a step of the wave, the consumer's sources, and the whole run with NumPy.

The simulation is the oracle: it shares no memory and no step with what it checks. It rounds as the shader does,
operation by operation in float32, so a correct run agrees with it exactly.
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

    A step computes slot ``(k + 1) % 2`` in place over frame k - 1; the border stays zero:
    ``next = damping * (2 * u - previous + courant2 * (north + south + west + east - 4 * u))``
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
        """The arguments of a frame's step, for the producer's shader and function."""
        return self.width, self.height, self.courant2, self.damping, frame % 2, (frame + 1) % 2


@dataclass(frozen=True, slots=True)
class Patch:
    """A square of the field that one source moves in one frame; the cell `top`, `left` is its first.

    The window pulls the cells towards `target`, a float32 value, and all the way in the middle.
    """

    top: int
    left: int
    size: int
    target: float


@dataclass(frozen=True)
class Sources:
    """Paddles that travel along Lissajous curves and beat up and down: what the consumer writes into the field.

    A paddle reads the cells under it and writes ``cells += window * (target - cells)``. What it writes depends on what
    it reads, so a stale field in either direction makes the result wrong. A field has at least 16 x 16 cells.
    """

    width: int
    height: int

    @property
    def radius(self) -> int:
        """A paddle's radius in cells."""
        return max(2, min(self.width, self.height) // 48)

    @cached_property
    def window(self) -> Field:
        """How strongly a paddle pulls each cell under it: a bell, 1 in the middle."""
        reach = np.arange(-self.radius, self.radius + 1, dtype=np.float64) / (self.radius + 1)
        distance = np.minimum(np.hypot(reach[:, None], reach[None, :]), 1.0)
        return np.ascontiguousarray(np.cos(distance * (math.pi / 2)) ** 2, dtype=np.float32)

    def patches(self, frame: int) -> list[Patch]:
        """The paddles of a frame; none touches the border, which stays zero."""
        span = 2 * self.radius + 1
        edge = min(self.width, self.height)
        scale = min(1.0, edge / 512)  # smaller fields have shorter journeys and waves, of at least 7 cells
        found = []
        for paddle in _PADDLES:
            angle = 2 * math.pi * frame / (paddle.journey * scale)
            # The reach is a share of the shorter edge, so that no paddle overtakes its own waves.
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
    """Compute both slots after `frames` frames with NumPy: ``(2, height, width)`` float32."""
    slots = np.zeros((2, parameters.height, parameters.width), np.float32)
    for frame in range(frames):
        _step(parameters, slots[frame % 2], slots[(frame + 1) % 2])
        for patch in sources.patches(frame):
            rows, columns = slice(patch.top, patch.top + patch.size), slice(patch.left, patch.left + patch.size)
            cells = slots[(frame + 1) % 2, rows, columns]
            cells += sources.window * (np.float32(patch.target) - cells)
    return slots


def _step(p: WaveParameters, now: Field, after: Field) -> None:
    """Step the field `now` into `after`, which holds the frame before. The border stays zero."""
    u, previous = now[1:-1, 1:-1], after[1:-1, 1:-1]
    around = now[:-2, 1:-1] + now[2:, 1:-1] + now[1:-1, :-2] + now[1:-1, 2:]
    laplacian = around - np.float32(4) * u
    after[1:-1, 1:-1] = np.float32(p.damping) * (np.float32(2) * u - previous + np.float32(p.courant2) * laplacian)
