"""Textures on Vulkan's images."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

from .._arguments import MAX_32, check_int, check_type
from ..capabilities import Operation
from ..errors import InvalidArgumentError
from ..handles import OpaqueFd
from ..vulkan import SharedImage
from . import _api as gl
from ._context import current_context
from ._names import Names
from ._pair import SharedObject

if TYPE_CHECKING:
    from ._api import Lookup

_FORMATS: Final = {
    "R8_UNORM": 0x8229, "R8G8_UNORM": 0x822B, "R8G8B8A8_UNORM": 0x8058, "R8G8B8A8_SRGB": 0x8C43,
    "R8_SNORM": 0x8F94, "R8G8_SNORM": 0x8F95, "R8G8B8A8_SNORM": 0x8F97,
    "R16_UNORM": 0x822A, "R16G16_UNORM": 0x822C, "R16G16B16A16_UNORM": 0x805B,
    "R16_SFLOAT": 0x822D, "R16G16_SFLOAT": 0x822F, "R16G16B16A16_SFLOAT": 0x881A,
    "R32_SFLOAT": 0x822E, "R32G32_SFLOAT": 0x8230, "R32G32B32A32_SFLOAT": 0x8814,
    "R8_SINT": 0x8231, "R8_UINT": 0x8232, "R16_SINT": 0x8233, "R16_UINT": 0x8234, "R32_SINT": 0x8235,
    "R32_UINT": 0x8236, "R8G8_SINT": 0x8237, "R8G8_UINT": 0x8238, "R16G16_SINT": 0x8239, "R16G16_UINT": 0x823A,
    "R32G32_SINT": 0x823B, "R32G32_UINT": 0x823C, "R32G32B32A32_UINT": 0x8D70, "R16G16B16A16_UINT": 0x8D76,
    "R8G8B8A8_UINT": 0x8D7C, "R32G32B32A32_SINT": 0x8D82, "R16G16B16A16_SINT": 0x8D88, "R8G8B8A8_SINT": 0x8D8E,
    "A2B10G10R10_UNORM_PACK32": 0x8059, "B10G11R11_UFLOAT_PACK32": 0x8C3A,
}  # fmt: skip
"""OpenGL's internal format for each ``VkFormat``. Formats that begin with blue have none."""


class SharedTexture(SharedObject):
    """One image, in OpenGL, in Vulkan and on the compute side. Made by :func:`import_image`.

    Attributes
    ----------
    name : int
        OpenGL's name, which moderngl accepts in ``external_texture``.
    layout : int
        See :func:`import_image`.

    Examples
    --------
    >>> with gi.vulkan.share_image(vk, device, (64, 32), "R8G8B8A8_UNORM", tiling="linear", initial=1) as image:
    ...     with gi.opengl.import_image(image) as texture:
    ...         name = texture.name
    ...         np.asarray(image.view())[:] = 255
    """

    def __init__(self, names: Names, name: int, layout: int) -> None:
        super().__init__(names, name)
        self.layout = layout


def import_image(
    image: SharedImage, *, layout: int = gl.LAYOUT_GENERAL, get_proc_address: Lookup | None = None
) -> SharedTexture:
    """Use a shared Vulkan image as an OpenGL texture, in place.

    Native call: ``glTextureStorageMem2DEXT`` on the image's memory, with its format, extent, levels and tiling.

    Parameters
    ----------
    image : SharedImage
        Made by :func:`gpuinterop.vulkan.share_image`, exported as ``OpaqueFd``. You still own it. The texture keeps its
        memory, but not its VkImage.
    layout : int
        OpenGL's enum of the layout in which the image is handed over, for the barriers of :meth:`SharedHandoff.gl`:
        ``GL_LAYOUT_GENERAL_EXT``, or the enum that matches the layout of Vulkan's release.
    get_proc_address : callable, optional
        See :func:`share_buffer`.

    Returns
    -------
    SharedTexture
        The texture, which owns OpenGL's side; close it.

    Raises
    ------
    UnsupportedError
        The context cannot import images.
    InvalidArgumentError
        The image is another device's or driver's, or has several layers. Or OpenGL has no such format, or cannot import
        it with this tiling (``glGetInternalformativ``). NVIDIA's driver imports no linear images: fill a texture with
        `SharedBuffer.upload_to`.
    DriverError
        A native call failed.

    Examples
    --------
    >>> with gi.vulkan.share_image(vk, device, (64, 32), "R32_SFLOAT", tiling="linear", initial=1) as image:
    ...     texture = gi.opengl.import_image(image)
    ...     texture.close()
    """
    check_type(image, SharedImage, "image", "an image of gpuinterop.vulkan.share_image")
    context = current_context(get_proc_address)
    context.capabilities.require((Operation.IMPORT_MEMORY, OpaqueFd))
    context.vulkan(image._vk)
    image.check_open()
    functions = context.functions
    if (format_ := _FORMATS.get(image.format)) is None or image.handle_type is not OpaqueFd:
        raise InvalidArgumentError(
            "image",
            f"expected an image exported as OpaqueFd of one of {', '.join(_FORMATS)}, got {image.handle_type.__name__} "
            f"and {image.format}.",
        )
    info = image.vulkan_object._info
    if info.arrayLayers != 1:
        raise InvalidArgumentError("image", f"expected one layer, got {info.arrayLayers}; share each as an image.")
    target = gl.TEXTURE_2D
    tiling = gl.LINEAR_TILING if image.row_pitch else gl.OPTIMAL_TILING
    count = functions.integer("glGetInternalformativ", target, format_, gl.NUM_TILING_TYPES, 1)
    offered = (ctypes.c_int * max(1, count))()
    functions.glGetInternalformativ(target, format_, gl.TILING_TYPES, count, offered)
    if tiling not in offered:
        raise InvalidArgumentError(
            "image",
            f"expected a tiling in which {context.name} imports {image.format} images, got "
            f"{'linear' if image.row_pitch else 'optimal'}; use the other tiling, or SharedBuffer.upload_to.",
        )
    with Names(context) as names:
        with image.vulkan_object.export() as handle:
            memory = names.import_memory(handle, image.allocation_size)
        name = names.new("glCreateTextures", target)
        functions.check("glTextureParameteri", name, gl.TEXTURE_TILING, tiling)
        functions.check("glTextureStorageMem2DEXT", name, info.mipLevels, format_, *image.extent, memory, 0)
    return SharedTexture(names, name, check_int(layout, "layout", minimum=0, maximum=MAX_32))
