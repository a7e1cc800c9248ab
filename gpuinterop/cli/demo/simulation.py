"""The demo's wave: what the exporter draws in each frame, and the whole run with NumPy, which checks the demo."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["COURANT2", "DAMPING", "Field", "Row", "draw", "simulate"]

Field: TypeAlias = NDArray[np.float32]

COURANT2: Final = 0.25
"""The square of the cells that a wave moves in a frame."""
DAMPING: Final = float(np.float32(0.9955))
"""Waves fade before their echoes return from the border to the middle, so the rings stay clear."""


class Row(NamedTuple):
    """Cells of one row that get one value."""

    row: int
    left: int
    cells: int
    value: float


class _Paddle(NamedTuple):
    x: float  # the middle of its curve, as a share of the field
    y: float
    reach: float  # the curve's radius, as a share of the shorter edge, so that no paddle overtakes its own waves
    turns: tuple[int, int]
    phase: float
    journey: float  # frames for the whole curve
    period: float  # frames of a beat
    strength: float


_PADDLES: Final = (
    _Paddle(x=0.30, y=0.36, reach=0.12, turns=(1, 2), phase=0.4, journey=2600, period=40, strength=1.0),
    _Paddle(x=0.70, y=0.66, reach=0.12, turns=(2, 1), phase=3.5, journey=2600, period=40, strength=1.0),
    _Paddle(x=0.74, y=0.22, reach=0.06, turns=(1, 1), phase=1.2, journey=1800, period=30, strength=0.8),
)


def draw(width: int, height: int, frame: int) -> list[Row]:
    """Three round paddles, which travel along Lissajous curves and beat up and down. None touches the border."""
    edge = min(width, height)
    radius, scale = max(1, edge // 64), min(1.0, edge / 512)  # smaller fields have shorter journeys and waves
    rows = []
    for paddle in _PADDLES:
        angle = 2 * math.pi * frame / (paddle.journey * scale)
        x = paddle.x * width + paddle.reach * edge * math.sin(paddle.turns[0] * angle + paddle.phase)
        y = paddle.y * height + paddle.reach * edge * math.cos(paddle.turns[1] * angle + paddle.phase)
        beat = paddle.strength * math.sin(2 * math.pi * (frame + 1) / max(14.0, paddle.period * scale))
        for down in range(-radius, radius + 1):
            half = math.isqrt(radius * radius + radius - down * down)
            rows.append(Row(round(y) + down, round(x) - half, 2 * half + 1, float(np.float32(beat))))
    return rows


def simulate(width: int, height: int, frames: int) -> Field:
    """Compute both slots after `frames` frames with NumPy: ``(2, height, width)`` float32.

    It shares no memory and no step with what it checks, but rounds in the same order, so a correct run is equal to it.
    """
    slots = np.zeros((2, height, width), np.float32)
    for frame in range(frames):
        now, after = slots[frame % 2], slots[(frame + 1) % 2]
        for row, left, cells, value in draw(width, height, frame):
            now[row, left : left + cells] = value
        u, previous = now[1:-1, 1:-1], after[1:-1, 1:-1]
        laplacian = now[:-2, 1:-1] + now[2:, 1:-1] + now[1:-1, :-2] + now[1:-1, 2:] - np.float32(4) * u
        after[1:-1, 1:-1] = np.float32(DAMPING) * (np.float32(2) * u - previous + np.float32(COURANT2) * laplacian)
    return slots
