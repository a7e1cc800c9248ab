"""Draw a field: a diverging colour map, lit from the upper left, on a dark ground."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from .simulation import Field

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["render"]

# From trough to crest: cold to warm, in equal steps of lightness on both sides of a dark middle.
_PLACES: Final = (-1.00, -0.78, -0.52, -0.28, -0.10, 0.00, 0.10, 0.28, 0.52, 0.78, 1.00)
_COLOURS: Final = (
    "e9fbff", "8fddf2", "37a3d0", "1e6399", "12304f", "0b1322", "3b1d3f", "8c2f5b", "db5a4a", "f8ae5c", "fff3cf"
)  # fmt: skip
_SMALLEST: Final = 512
_LIGHT: Final = np.array([-0.55, -0.65, 0.52])


def render(field: Field) -> Image.Image:
    """Draw a ``(height, width)`` field; a small one is drawn larger."""
    from PIL import Image

    height, width = field.shape
    values = np.nan_to_num(field.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    factor = max(1, -(-_SMALLEST // max(field.shape)))  # pixels along a cell's edge
    if factor > 1:
        image = Image.fromarray(values.astype(np.float32))
        image = image.resize((width * factor, height * factor), Image.Resampling.BICUBIC)
        values = np.asarray(image, dtype=np.float64)
    # Cells near a source are many times higher than distant rings. A root makes small heights visible.
    crest = float(np.percentile(np.abs(values), 99.5)) or 1.0
    level = np.clip(values / crest, -1.35, 1.35)
    tone = np.sign(level) * np.abs(level / 1.35) ** 0.82
    # Colours mix well in linear light.
    stops = (np.array([[*bytes.fromhex(colour)] for colour in _COLOURS]) / 255.0) ** 2.2
    colours = np.stack([np.interp(tone, _PLACES, channel) ** (1 / 2.2) for channel in stops.T], axis=-1)
    # Diffuse light on the field as a landscape, and the glint on slopes that face the light.
    down, right = np.gradient(level * 5.0 * factor)
    light = _LIGHT / np.linalg.norm(_LIGHT)
    facing = np.clip((light[2] - right * light[0] - down * light[1]) / np.sqrt(down**2 + right**2 + 1.0), 0.0, 1.0)
    lit = colours * (0.62 + 0.72 * facing)[..., None] + (0.22 * facing**18)[..., None]
    y, x = np.linspace(-1.0, 1.0, lit.shape[0])[:, None], np.linspace(-1.0, 1.0, lit.shape[1])[None, :]
    lit *= (1.0 - 0.28 * ((x**2 + y**2) / 2.0) ** 1.5)[..., None]  # darker corners
    return Image.fromarray((np.clip(lit, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8))
