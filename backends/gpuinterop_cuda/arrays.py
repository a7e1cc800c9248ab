"""CUDA's structs for mipmapped arrays and their copies."""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import Final

from gpuinterop.backend import Address
from gpuinterop.handles import ArrayLayout
from gpuinterop.native_driver.memory import MappedArray, NativeArrays

_HOST, _ARRAY, _UNIFIED = 1, 3, 4  # CUmemorytype; the driver detects the kind of a unified address

# UNORM and SNORM are integers here: a texture normalizes when it reads.
_CHANNELS: Final[Mapping[str, Mapping[int, int]]] = {
    "UNORM": {8: 0x01, 16: 0x02},
    "SNORM": {8: 0x08, 16: 0x09},
    "UINT": {8: 0x01, 16: 0x02, 32: 0x03},
    "SINT": {8: 0x08, 16: 0x09, 32: 0x0A},
    "SFLOAT": {16: 0x10, 32: 0x20},
}
"""Each ``CUarray_format``, by the numeric format and bits of a channel."""


# Offset, extent, format, channels, flags, levels: CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC.
_DESCRIPTOR: Final = Struct("=Q3QiII4xI68x")
# Each end of a copy: kind, host or device address, array, pitch, height. Then its extent: CUDA_MEMCPY3D.
_END: Final = "32xi4xQQQ8xQQ"
_COPY: Final = Struct(f"={_END}{_END}3Q")


class Arrays(NativeArrays):
    """Mipmapped arrays."""

    def array_descriptor(self, layout: ArrayLayout, extent: tuple[int, ...], flags: int) -> bytes:
        texel = layout.texel
        channels = _CHANNELS[texel.numeric][texel.bits], texel.channels
        return _DESCRIPTOR.pack(layout.offset, *extent, *channels, flags, _levels(layout))

    def level_copy(
        self, array: MappedArray, plane: int, extent: tuple[int, ...], address: Address, to_array: bool
    ) -> bytes:
        width, height, depth = extent
        pitch = width * array.layout.texel.nbytes
        kind = (_HOST, address, 0) if self.is_pageable(array.device, address) else (_UNIFIED, 0, address)
        ends = (*kind, 0, pitch, height), (_ARRAY, 0, 0, plane, 0, 0)
        source, target = ends if to_array else ends[::-1]
        return _COPY.pack(*source, *target, pitch, height, depth)


def _levels(layout: ArrayLayout) -> int:
    """Number of levels to pass to the driver.

    CUDA computes the distance between layers from this number. For an image with several levels, the Vulkan driver uses
    the highest possible number (measured: driver 580.159.04, an H200). With the image's own number, CUDA would misplace
    every layer but the first. The extra levels are never used.
    """
    if layout.layers > 1 and layout.levels > 1:
        return max(layout.extent).bit_length()
    return layout.levels
