"""Mipmapped arrays: formats by Vulkan's names, and copies of whole levels.

Usable only if the runtime exports ``hipExternalMemoryGetMappedMipmappedArray``: AMD's library for Linux does not.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from gpuinterop.backend import Address, ArrayBackend
from gpuinterop.handles import ArrayLayout, ArrayUsage
from gpuinterop.native_driver import NativeArray, array_flags

from .driver import Made, Room
from .memory import ImportedMemory
from .streams import Stream

# hipArraySurfaceLoadStore, hipArrayCubemap; HIP has no flag for colour attachments.
_USES: Final = {ArrayUsage.SURFACE: 0x02, ArrayUsage.CUBEMAP: 0x04}
_SIGNED, _UNSIGNED, _FLOAT = 0, 1, 2  # hipChannelFormatKind
# UNORM and SNORM are integers here: a texture normalises when it reads.
_KINDS: Final = {"UNORM": _UNSIGNED, "SNORM": _SIGNED, "UINT": _UNSIGNED, "SINT": _SIGNED, "SFLOAT": _FLOAT}


_Pos: Final = ctypes.c_size_t * 3  # hipPos
_Pitched: Final = ctypes.c_size_t * 4  # hipPitchedPtr: address, pitch, width, height


class _Copy(ctypes.Structure):
    """``hipMemcpy3DParms``; the struct of the bindings 7.2 lacks the fields for arrays."""

    _fields_ = (
        ("srcArray", ctypes.c_void_p),
        ("srcPos", _Pos),
        ("srcPtr", _Pitched),
        ("dstArray", ctypes.c_void_p),
        ("dstPos", _Pos),
        ("dstPtr", _Pitched),
        ("extent", ctypes.c_size_t * 3),
        ("kind", ctypes.c_int),
    )


_DEFAULT: Final = 4  # hipMemcpyDefault


class MappedArray(Made, NativeArray):
    """A mapped mipmapped array."""

    back = "hipFreeMipmappedArray"


class Arrays(Room, ArrayBackend):
    """Mipmapped arrays."""

    def map_array(self, memory: ImportedMemory, layout: ArrayLayout) -> MappedArray:
        """``hipExternalMemoryGetMappedMipmappedArray``."""
        api = self._driver.api
        texel = layout.texel
        desc = api.hipExternalMemoryMipmappedArrayDesc_st()
        desc.offset = layout.offset
        for index, name in enumerate("xyzw"):
            setattr(desc.formatDesc, name, texel.bits if index < texel.channels else 0)
        desc.formatDesc.f = api.hipChannelFormatKind(_KINDS[texel.numeric])
        desc.extent.width, desc.extent.height, depth = layout.extent
        desc.extent.depth = layout.layers or depth  # a layered array's depth is its layers
        desc.flags = array_flags(layout, _USES)
        desc.numLevels = layout.levels
        return MappedArray(memory.device, layout).create(
            "hipExternalMemoryGetMappedMipmappedArray", memory.handle, desc
        )

    def copy_level(
        self, stream: Stream, array: MappedArray, level: int, address: Address, size: int, *, to_array: bool
    ) -> None:
        """``hipMemcpy3DAsync`` copies between a level, all its layers, and tightly packed bytes."""
        width, height, depth = (max(1, edge >> level) for edge in array.layout.extent)
        plane = int(self._driver.call("hipGetMipmappedArrayLevel", array.handle, level))
        pitched = _Pitched(address, width * array.layout.texel.nbytes, width, height)
        # The extent is in texels, because one side is an array.
        job: Any = _Copy(extent=(width, height, array.layout.layers or depth), kind=_DEFAULT)
        if to_array:
            job.srcPtr, job.dstArray = pitched, plane
        else:
            job.srcArray, job.dstPtr = plane, pitched
        stream.device.call("hipMemcpy3DAsync", ctypes.addressof(job), stream.handle, aside=False)
