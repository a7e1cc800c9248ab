"""Draw a field: a diverging colour map, lit from the upper left, on a dark ground."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["SHADER_VALUES", "factor_of", "render", "scale_of"]

_Array: TypeAlias = NDArray[np.float64]

# From trough to crest: cold to warm, in equal steps of lightness on both sides of a dark middle.
_STOPS = (
    (-1.00, 0xE9FBFF),
    (-0.78, 0x8FDDF2),
    (-0.52, 0x37A3D0),
    (-0.28, 0x1E6399),
    (-0.10, 0x12304F),
    (0.00, 0x0B1322),
    (0.10, 0x3B1D3F),
    (0.28, 0x8C2F5B),
    (0.52, 0xDB5A4A),
    (0.78, 0xF8AE5C),
    (1.00, 0xFFF3CF),
)
_SMALLEST = 512
_LIGHT = np.array([-0.55, -0.65, 0.52])


def _channels(colour: int) -> list[float]:
    """Red, green and blue in linear light, in which colours mix well."""
    return [((colour >> shift & 255) / 255.0) ** 2.2 for shift in (16, 8, 0)]


def _vector(*values: float) -> str:
    return ", ".join(map(str, values))


SHADER_VALUES: Final = {
    "/* LIGHT */": _vector(*_LIGHT),
    "/* STOPS */": ", ".join(f"vec4({_vector(*_channels(colour), place)})" for place, colour in _STOPS),
}
"""Replacements for the marks in ``picture.frag``."""


def factor_of(field: NDArray[np.float32]) -> int:
    """Pixels along a cell's edge."""
    return max(1, -(-_SMALLEST // int(max(field.shape))))


def scale_of(field: NDArray[np.floating]) -> float:
    """The height to draw as a crest; cells near a source are many times higher than distant rings."""
    return float(np.percentile(np.abs(field), 99.5)) or 1.0


def render(field: NDArray[np.float32]) -> Image.Image:
    """Draw a ``(height, width)`` field; a small one is drawn larger."""
    from PIL import Image

    height, width = field.shape
    values = np.nan_to_num(field.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    factor = factor_of(field)
    if factor > 1:
        image = Image.fromarray(values.astype(np.float32))
        image = image.resize((width * factor, height * factor), Image.Resampling.BICUBIC)
        values = np.asarray(image, dtype=np.float64)
    level = np.clip(values / scale_of(values), -1.35, 1.35)
    # A root makes small heights visible, and stays symmetric.
    tone = np.sign(level) * np.abs(level / 1.35) ** 0.82
    colours = _colours(tone)
    shade, gloss = _relief(level, factor)
    lit = colours * shade[..., None] + gloss[..., None]
    lit *= _vignette(lit.shape[0], lit.shape[1])[..., None]
    return Image.fromarray((np.clip(lit, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8))


def _colours(tone: _Array) -> _Array:
    places = [place for place, _ in _STOPS]
    channels = zip(*(_channels(colour) for _, colour in _STOPS), strict=True)
    return np.stack([np.interp(tone, places, stops) ** (1 / 2.2) for stops in channels], axis=-1)


def _relief(level: _Array, factor: int) -> tuple[_Array, _Array]:
    """Diffuse light on the field as a landscape, and the glint on slopes that face the light."""
    down, right = np.gradient(level * 5.0 * factor)
    length = np.sqrt(down**2 + right**2 + 1.0)
    light = _LIGHT / np.linalg.norm(_LIGHT)
    facing = (-right * light[0] - down * light[1] + light[2]) / length
    shade = 0.62 + 0.72 * np.clip(facing, 0.0, 1.0)
    gloss = 0.22 * np.clip(facing, 0.0, 1.0) ** 18
    return shade, gloss


def _vignette(height: int, width: int) -> _Array:
    y = np.linspace(-1.0, 1.0, height)[:, None]
    x = np.linspace(-1.0, 1.0, width)[None, :]
    return 1.0 - 0.28 * np.clip((x**2 + y**2) / 2.0, 0.0, 1.0) ** 1.5
