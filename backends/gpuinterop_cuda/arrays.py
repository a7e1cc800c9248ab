"""Mipmapped arrays: formats by Vulkan's names, and copies of whole levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuinterop.backend import Address, ArrayBackend
from gpuinterop.handles import ArrayLayout, ArrayUsage
from gpuinterop.native_driver import NativeArray, array_flags

from .driver import Made, Room
from .memory import ImportedMemory
from .streams import Stream

_USES: Final = {ArrayUsage.SURFACE: 0x02, ArrayUsage.CUBEMAP: 0x04, ArrayUsage.COLOR_ATTACHMENT: 0x20}
"""The other flags, CUDA_ARRAY3D_*."""
_HOST, _ARRAY = 1, 3  # CUmemorytype

# UNORM and SNORM are integers here: a texture normalises when it reads.
_CHANNELS: Final[Mapping[str, Mapping[int, int]]] = {
    "UNORM": {8: 0x01, 16: 0x02},
    "SNORM": {8: 0x08, 16: 0x09},
    "UINT": {8: 0x01, 16: 0x02, 32: 0x03},
    "SINT": {8: 0x08, 16: 0x09, 32: 0x0A},
    "SFLOAT": {16: 0x10, 32: 0x20},
}
"""Each ``CUarray_format``, by the numeric format and bits of a channel."""


class MappedArray(Made, NativeArray):
    """A mapped mipmapped array."""

    back = "cuMipmappedArrayDestroy"


class Arrays(Room, ArrayBackend):
    """Mipmapped arrays."""

    def map_array(self, memory: ImportedMemory, layout: ArrayLayout) -> MappedArray:
        """``cuExternalMemoryGetMappedMipmappedArray``."""
        api = self._driver.api
        desc = api.CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC()
        desc.offset = layout.offset
        one = desc.arrayDesc
        one.Width, one.Height, depth = layout.extent
        one.Depth = layout.layers or depth  # a layered array's depth is its layers
        one.Format = api.CUarray_format(_CHANNELS[layout.texel.numeric][layout.texel.bits])
        one.NumChannels = layout.texel.channels
        one.Flags = array_flags(layout, _USES)
        desc.numLevels = _levels(layout)
        return MappedArray(memory.device, layout).create("cuExternalMemoryGetMappedMipmappedArray", memory.handle, desc)

    def copy_level(
        self, stream: Stream, array: MappedArray, level: int, address: Address, size: int, *, to_array: bool
    ) -> None:
        """``cuMemcpy3DAsync`` copies between a level, all its layers, and tightly packed bytes."""
        api = self._driver.api
        width, height, depth = (max(1, edge >> level) for edge in array.layout.extent)
        pitch = width * array.layout.texel.nbytes
        plane = self._driver.call("cuMipmappedArrayGetLevel", array.handle, level)
        types = api.CUmemorytype
        job = api.CUDA_MEMCPY3D()
        job.WidthInBytes = pitch
        job.Height = height
        job.Depth = array.layout.layers or depth
        # The driver recognises memory that it knows.
        pageable = self.is_pageable(array.device, address)
        end, other = ("src", "dst") if to_array else ("dst", "src")
        setattr(job, f"{other}MemoryType", types(_ARRAY))
        setattr(job, f"{other}Array", plane)
        setattr(job, f"{end}MemoryType", types(_HOST) if pageable else types.CU_MEMORYTYPE_UNIFIED)
        setattr(job, f"{end}Host" if pageable else f"{end}Device", address if pageable else api.CUdeviceptr(address))
        setattr(job, f"{end}Pitch", pitch)
        setattr(job, f"{end}Height", height)
        stream.device.call("cuMemcpy3DAsync", job, stream.handle, aside=False)


def _levels(layout: ArrayLayout) -> int:
    """Number of levels to pass to the driver.

    CUDA spaces the layers by the levels passed. The Vulkan driver spaces the layers of an image with more than one
    level by all the levels that such an image can have (measured: driver 580.159.04, an H200). With the image's own
    number of levels, CUDA would misplace every layer but the first. The extra levels are never used.
    """
    if layout.layers > 1 and layout.levels > 1:
        return max(layout.extent).bit_length()
    return layout.levels
