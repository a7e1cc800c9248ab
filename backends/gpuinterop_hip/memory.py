"""Mapped buffers, whose release waits for the wrong device, and arrays.

Arrays need a runtime with ``hipExternalMemoryGetMappedMipmappedArray``. AMD's runtime for Linux lacks it.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from gpuinterop.backend import Address
from gpuinterop.handles import ArrayLayout
from gpuinterop.native_driver.memory import MappedArray, MappedBuffer, NativeArrays

_SIGNED, _UNSIGNED, _FLOAT = 0, 1, 2  # hipChannelFormatKind
# UNORM and SNORM are integers here: a texture normalizes when it reads.
_KINDS: Final = {"UNORM": _UNSIGNED, "SNORM": _SIGNED, "UINT": _UNSIGNED, "SINT": _SIGNED, "SFLOAT": _FLOAT}
_DEFAULT: Final = 4  # hipMemcpyDefault

# Offset, bits of four channels and their kind, extent, flags, levels: hipExternalMemoryMipmappedArrayDesc.
_DESCRIPTOR: Final = Struct("=Q5i4x3QII")
# Each end of a copy: array, position, hipPitchedPtr (address, pitch, width, height). Then extent and kind:
# hipMemcpy3DParms.
_END: Final = "Q24x4Q"
_COPY: Final = Struct(f"={_END}{_END}3Qi4x")


class _Byte(MappedBuffer):
    """A byte that is freed to wait for its device. Undoing it may wait too, so it is not left to the core."""

    blocks = False


class Memory(NativeArrays):
    """External memory, copies between any two addresses, and mipmapped arrays."""

    def unmap_buffer(self, mapping: MappedBuffer) -> None:
        """``hipFree``. It waits for device 0, even if another device imported the memory (hip_memory.cpp, ihipFree).

        So this also frees a byte that is allocated on the importing device, which waits for that device.
        Synchronizing the device instead would end every capture.
        """
        byte = _Byte(mapping.device)

        def work() -> None:
            if mapping.device.ordinal:
                byte.make("Malloc", 1)
                byte.free()
            mapping.free()

        mapping.device.create(byte, work)

    def array_descriptor(self, layout: ArrayLayout, extent: tuple[int, ...], flags: int) -> bytes:
        texel = layout.texel
        bits = (texel.bits if index < texel.channels else 0 for index in range(4))
        return _DESCRIPTOR.pack(layout.offset, *bits, _KINDS[texel.numeric], *extent, flags, layout.levels)

    def level_copy(
        self, array: MappedArray, plane: int, extent: tuple[int, ...], address: Address, to_array: bool
    ) -> bytes:
        width, height, _ = extent
        ends = (0, address, width * array.layout.texel.nbytes, width, height), (plane, 0, 0, 0, 0)
        source, target = ends if to_array else ends[::-1]
        return _COPY.pack(*source, *target, *extent, _DEFAULT)  # the extent is in texels, because one side is an array
