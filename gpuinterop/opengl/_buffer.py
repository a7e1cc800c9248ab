"""Buffers that OpenGL and the compute side both use, and copies between them and textures."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from .._arguments import MAX_32, check_int, check_nbytes, check_sequence
from ..capabilities import Operation
from ..errors import ArgumentTypeError, InvalidArgumentError, ResourceClosedError
from ..graphics.buffer import BufferMethods, exported_block
from ..graphics.sides import check_same_device
from ..handles import Handle, OpaqueFd, VmmFd
from ..vulkan._buffer import share_buffer as share_vulkan_buffer
from . import _api as gl
from ._context import Context, current_context
from ._names import Names
from ._pair import SharedObject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .._core.allocation import Allocation
    from .._core.device import Device
    from .._core.memory import Buffer, Mappable
    from ..vulkan import SharedBuffer as VulkanBuffer, VulkanContext
    from ._api import Lookup

_SPARE: Final = 4096
"""Bytes that software OpenGL needs after a buffer's last; no query returns it. llvmpipe 22.3 and 25.0 need 47."""

_MAX_INT: Final = 2**31 - 1
"""The largest ``GLint``."""
_CHANNELS: Final = ((0x1903, 0x8D94), (0x8227, 0x8228), (0x1907, 0x8D98), (0x1908, 0x8D99))
"""``GL_RED``, ``RG``, ``RGB``, ``RGBA``, each with its integer format, by the number of channels."""
_ELEMENTS: Final = {
    "uint8": (0x1401, 1), "int8": (0x1400, 1), "uint16": (0x1403, 2), "int16": (0x1402, 2), "uint32": (0x1405, 4),
    "int32": (0x1404, 4), "float16": (0x140B, 2), "float32": (0x1406, 4),
}  # fmt: skip
"""``GL_UNSIGNED_BYTE`` and so on, and the size of an element in bytes."""
_INTEGERS: Final = {*range(0x8231, 0x823D), *range(0x8D70, 0x8D90), 0x906F}
"""Internal formats that shaders read as integers: ``GL_R8I`` to ``RG32UI``, ``RGBA32UI`` to ``RGB8I``, RGB10_A2UI."""
_TARGETS: Final = (gl.TEXTURE_2D, gl.TEXTURE_BINDING_2D), (gl.TEXTURE_RECTANGLE, gl.TEXTURE_BINDING_RECTANGLE)
_STORE: Final = {
    # ALIGNMENT, ROW_LENGTH, SKIP_ROWS, SKIP_PIXELS, SWAP_BYTES; and IMAGE_HEIGHT, SKIP_IMAGES, which NVIDIA's driver
    # applies in glGetTextureSubImage to 2D textures too
    gl.PIXEL_UNPACK_BUFFER: (gl.PIXEL_UNPACK_BUFFER_BINDING, (0x0CF5, 0x0CF2, 0x0CF3, 0x0CF4, 0x0CF0)),
    gl.PIXEL_PACK_BUFFER: (gl.PIXEL_PACK_BUFFER_BINDING, (0x0D05, 0x0D02, 0x0D03, 0x0D04, 0x0D00, 0x806C, 0x806B)),
}


class SharedBuffer(BufferMethods, SharedObject):
    """One buffer, in OpenGL and on the compute side. Made by :func:`share_buffer` and :func:`import_array`.

    You can draw from it, write it (``glBufferSubData``), copy it and bind it like every buffer. You cannot map it
    (``glMapBuffer``) or give it other storage (``glBufferData``, which orphans), because its storage is immutable.

    Attributes
    ----------
    name : int
        OpenGL's name, which moderngl calls ``glo`` and accepts in ``external_buffer``.
    memory : Allocation, ExternalMemory or SharedMemory
        The buffer's memory.

    Examples
    --------
    >>> with gi.opengl.share_buffer(device, 4096) as shared:
    ...     name = shared.name  # OpenGL's
    ...     shared.copy_from_host(np.arange(4, dtype="float32"))
    ...     np.asarray(shared.view(4, "float32"))
    array([0., 1., 2., 3.], dtype=float32)
    """

    def __init__(
        self, names: Names, name: int, buffer: Buffer, memory: Mappable, half: Mappable | VulkanBuffer, *,
        immutable: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(names, name, half)
        self._buffer, self._immutable, self.memory = buffer, immutable, memory
        self.context.buffers[name] = self

    def upload_to(
        self, texture: int, shape: Sequence[int], dtype: object = "uint8", *, offset: int = 0,
        row_pitch: int | None = None, level: int = 0, x: int = 0, y: int = 0,
    ) -> None:  # fmt: skip
        """Copy texels from the buffer to a texture with OpenGL, on the device.

        Native call: ``glTextureSubImage2D`` with the buffer as ``GL_PIXEL_UNPACK_BUFFER``, in the order of the
        context's commands. So call it while OpenGL has the buffer, for example in the block of
        :meth:`SharedHandoff.gl`. The context's pixel store and binding are restored.

        Parameters
        ----------
        texture : int
            OpenGL's name of a texture of ``GL_TEXTURE_2D`` or ``GL_TEXTURE_RECTANGLE``.
        shape : sequence of int
            (height, width) or (height, width, channels), in texels; 1 to 4 channels.
        dtype : dtype or str
            NumPy's, torch's, or a name: ``uint8``, ``int8``, ``uint16``, ``int16``, ``uint32``, ``int32``,
            ``float16``, ``float32``. A texture with an integer format requires integers.
        offset : int
            Byte offset of the first texel in the buffer.
        row_pitch : int, optional
            Bytes from row to row, a multiple of the texel size. Default: the rows are contiguous.
        level : int
            Mip level.
        x, y : int
            Column and row of the first texel in the texture.

        Raises
        ------
        InvalidArgumentError
            The texels do not fit in the buffer or the texture, the formats do not match, or the context is not current
            in the calling thread.
        ResourceClosedError
            The buffer was closed, or other code has deleted it (``glDeleteBuffers``, moderngl's ``release``).
        DriverError
            A native call failed.

        Examples
        --------
        >>> with gi.opengl.share_buffer(device, 64 * 64 * 4) as shared:
        ...     shared.fill(255)
        ...     shared.upload_to(texture, (64, 64, 4))  # an RGBA8 texture of 64 x 64 texels
        """
        with self._bound(gl.PIXEL_UNPACK_BUFFER, texture, shape, dtype, offset, row_pitch, level, x, y) as box:
            check, (width, height, format_, type_) = self.context.functions.check, box
            check("glTextureSubImage2D", texture, level, x, y, width, height, format_, type_, offset)

    def download_from(
        self, texture: int, shape: Sequence[int], dtype: object = "uint8", *, offset: int = 0,
        row_pitch: int | None = None, level: int = 0, x: int = 0, y: int = 0,
    ) -> None:  # fmt: skip
        """Copy texels from a texture to the buffer with OpenGL, so that a drawn image becomes an array.

        Native call: ``glGetTextureSubImage`` with the buffer as ``GL_PIXEL_PACK_BUFFER``.

        Parameters
        ----------
        texture, shape, dtype, offset, row_pitch, level, x, y
            See :meth:`upload_to`.

        Raises
        ------
        InvalidArgumentError
            The buffer is an immutable array (`import_array`), or `level` is not 0: NVIDIA's driver (580) would then
            write older bytes to the whole buffer. Or see :meth:`upload_to`.
        ResourceClosedError, DriverError
            See :meth:`upload_to`.
        """
        if level:
            raise InvalidArgumentError(
                "level", f"expected 0, got {level!r}; copy the level to a texture of its own (glCopyImageSubData)."
            )
        room = self.buffer.size  # refuses an immutable array
        with self._bound(gl.PIXEL_PACK_BUFFER, texture, shape, dtype, offset, row_pitch, level, x, y) as box:
            check, (width, height, format_, type_) = self.context.functions.check, box
            size = min(room - offset, _MAX_INT)
            check("glGetTextureSubImage", texture, level, x, y, 0, width, height, 1, format_, type_, size, offset)

    @contextmanager
    def _bound(
        self, target: int, texture: int, shape: Sequence[int], dtype: object, offset: int, row_pitch: int | None,
        level: int, x: int, y: int,
    ) -> Iterator[tuple[int, int, int, int]]:  # fmt: skip
        """Bind the buffer with a pixel store for these texels; yield width, height, format and type."""
        name, functions = self.name, self.context.functions
        self.context.check_current()
        # If no buffer is bound, drivers take the offset for an address of the host.
        still_shared = self.context.buffers.get(name) is self and functions.glIsBuffer(name)
        if not still_shared or _storage_of(functions, name) != (True, self.size):
            raise ResourceClosedError(
                f"expected buffer {name} with the memory that it shares, got a name that other code has deleted or "
                "given to another buffer; share a new one."
            )
        texture = _check_name(texture, "texture", "moderngl's texture.glo")
        if not functions.glIsTexture(texture):
            raise InvalidArgumentError("texture", f"expected the name of a texture of this context, got {texture}.")
        if not any(_is_of(functions, texture, *target) for target in _TARGETS):
            raise InvalidArgumentError(
                "texture",
                f"expected a texture of GL_TEXTURE_2D or GL_TEXTURE_RECTANGLE, got {texture}, which has another "
                "target; copy a layer to such a texture (glCopyImageSubData).",
            )
        check_sequence(shape, "shape", "(height, width) or (height, width, channels)")
        if len(shape) not in (2, 3):
            raise InvalidArgumentError(
                "shape", f"expected (height, width) or (height, width, channels), got {shape!r}."
            )
        height, width = (check_int(length, "shape", minimum=1, maximum=MAX_32) for length in shape[:2])
        channels = check_int(shape[2], "shape", minimum=1, maximum=4) if len(shape) == 3 else 1
        kind = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
        if kind not in _ELEMENTS:
            raise InvalidArgumentError("dtype", f"expected one of {', '.join(_ELEMENTS)}, got {dtype!r}.")
        type_, item = _ELEMENTS[kind]
        texel = channels * item
        least, most = texel * width, texel * _MAX_INT
        row_pitch = least if row_pitch is None else check_int(row_pitch, "row_pitch", minimum=least, maximum=most)
        offset = check_int(offset, "offset", minimum=0)
        if row_pitch % texel or offset % item:
            raise InvalidArgumentError(
                "row_pitch" if row_pitch % texel else "offset",
                f"expected a row pitch in whole texels of {texel} bytes and an offset in whole elements of {item}, got "
                f"{row_pitch} and {offset}.",
            )
        if (end := offset + row_pitch * (height - 1) + texel * width) > self.size:
            raise InvalidArgumentError(
                "shape",
                f"expected texels within the buffer's {self.size} bytes, got bytes up to {end}; share a larger one.",
            )
        places = (level, "level"), (x, "x"), (y, "y")
        level, x, y = (check_int(place, argument, minimum=0, maximum=_MAX_INT) for place, argument in places)

        def of_level(parameter: int) -> int:
            return functions.integer("glGetTextureLevelParameteriv", texture, level, parameter)

        extent = of_level(gl.TEXTURE_WIDTH), of_level(gl.TEXTURE_HEIGHT)
        functions.drop_errors()  # from a level that does not exist
        if x + width > extent[0] or y + height > extent[1]:
            raise InvalidArgumentError(
                "shape",
                f"expected a height and width within the {(extent[1], extent[0])} of the texture's level {level}, got "
                f"{(height, width)} at x={x}, y={y}.",
            )
        integer = of_level(gl.TEXTURE_INTERNAL_FORMAT) in _INTEGERS
        if integer and kind.startswith("float"):
            raise InvalidArgumentError("dtype", f"expected integers, as in the texture's format, got {dtype}.")
        binding, store = _STORE[target]
        get = partial(functions.integer, "glGetIntegerv")
        before = get(binding), [get(parameter) for parameter in store]
        try:
            functions.check("glBindBuffer", target, name)
            for parameter, value in zip_longest(store, (1, row_pitch // texel), fillvalue=0):
                functions.glPixelStorei(parameter, value)
            yield width, height, _CHANNELS[channels - 1][integer], type_
        finally:
            functions.glBindBuffer(target, before[0])
            for parameter, value in zip(store, before[1], strict=True):
                functions.glPixelStorei(parameter, value)


def share_buffer(
    device: Device, size: int, *, buffer: int | None = None, vk: VulkanContext | None = None,
    label: str | None = None, get_proc_address: Lookup | None = None,
) -> SharedBuffer:  # fmt: skip
    """Make an OpenGL buffer whose bytes the compute side uses in place, or give an existing buffer such storage.

    On a GPU the memory is the compute device's (`Device.allocate`: ``cuMemCreate`` / ``hipMemCreate``). If OpenGL
    cannot import it, as on llvmpipe, a small VkDevice that gpuinterop opens allocates the memory. Then gpuinterop calls
    ``glImportMemoryFdEXT`` and ``glNamedBufferStorageMemEXT``.

    Parameters
    ----------
    device : Device
        The context's GPU: ``gi.match_device(gi.opengl.identity())``.
    size : int
        Size in bytes.
    buffer : int, optional
        OpenGL's name of an existing buffer, which gets the memory as its new storage: moderngl's ``buffer.glo``,
        pyglet's ``buffer.id``, VTK's ``GetHandle()``. Its vertex arrays stay valid; its contents are lost. It must not
        be mapped, have immutable storage (``glBufferStorage``), or be larger than `size`. Afterwards you cannot map it,
        as moderngl's ``read`` and ``clear`` do, or orphan it. Default: a new name.
    vk : VulkanContext, optional
        A VkDevice of this GPU and driver, which then allocates the memory.
    label : str, optional
        Name of the object in messages, warnings and its `repr`.
    get_proc_address : callable, optional
        Maps a function's name to its address, in the current context. Required only if the context is neither EGL's nor
        GLX's.

    Returns
    -------
    SharedBuffer
        The buffer, which owns both sides except `buffer`'s name; close it.

    Raises
    ------
    UnsupportedError
        One side does not support it; nothing was created.
    InvalidArgumentError
        No context is current in the calling thread, `device` is another GPU, or `buffer` cannot get new storage. OpenGL
        was not called.
    DeviceNotFoundError
        Vulkan must allocate the memory, and no Vulkan device has the same driver.
    DriverError
        A native call failed.

    Examples
    --------
    >>> with gi.opengl.share_buffer(device, 1 << 20) as shared:
    ...     points = np.asarray(shared.view((1 << 16, 4), "float32"))
    ...     points[:] = 1
    """
    context = current_context(get_proc_address)
    check_same_device(context, device)
    size = check_nbytes(size)
    context.capabilities.require((Operation.MAP_BUFFER, OpaqueFd))
    _check_target(context, buffer, size)
    cells = Operation.EXPORT_ALLOCATION, VmmFd
    half: Allocation | VulkanBuffer
    memory: Mappable
    export: Callable[[], Handle]
    if vk is None and device.capabilities.supports(cells) and context.capabilities.supports(cells):
        half = memory = device.allocate(size, label=label)
        export, total = half.export, half.size
    else:
        spare = _SPARE if context.is_cpu else 0
        half = share_vulkan_buffer(context.vulkan(vk), device, size + spare, handle_types=(OpaqueFd,), label=label)
        memory, export, total = half.memory, half.vulkan_object.export, half.allocation_size
    with ExitStack() as undo:
        undo.callback(half.close)
        with export() as handle:
            names, name = _import(context, handle, total, 0, size, buffer)
        undo.callback(names.close)
        shared = SharedBuffer(names, name, memory._buffer(0, size, device, label), memory, half)
        undo.pop_all()
    return shared


def import_array(
    array: object, *, buffer: int | None = None, label: str | None = None, get_proc_address: Lookup | None = None
) -> SharedBuffer:
    """Use an existing array as an OpenGL buffer, in place.

    Nothing is copied: the buffer covers the bytes from the array's first to its last. The array's memory must be one
    allocation with a virtual-memory handle: a tensor in torch's expandable segments, an array in JAX's pool, memory of
    `Device.empty`, an attached array. `import_array` asks the driver (``cuPointerGetAttribute`` /
    ``hipPointerGetAttribute``), and OpenGL imports the whole handle. It cannot import host memory.

    Parameters
    ----------
    array : array
        Array with ``__dlpack__``, ``__cuda_array_interface__`` or ``__array_interface__`` (see `gpuinterop.share`). It
        is kept until the buffer is closed. OpenGL must only read an immutable array, such as JAX's;
        `SharedBuffer.buffer` and `SharedBuffer.download_from` refuse it.
    buffer, label, get_proc_address
        See :func:`share_buffer`.

    Returns
    -------
    SharedBuffer
        The buffer, which owns OpenGL's side; close it.

    Raises
    ------
    UnsupportedError
        OpenGL cannot import this kind of memory: ``cudaMalloc``, a stream-ordered pool, managed or host memory. The
        error says what to change. Nothing was imported.
    InvalidArgumentError
        The array has no element, is on another GPU, or spans several handles. Or see :func:`share_buffer`.
    ArgumentTypeError
        `array` is not an array.
    DriverError
        A native call failed.

    Examples
    --------
    >>> points = device.empty((1000, 3), "float32")
    >>> if gi.opengl.capabilities().supports((gi.Operation.EXPORT_ARRAY, gi.VmmFd)):  # a GPU's OpenGL
    ...     shared = gi.opengl.import_array(points)
    ... else:  # llvmpipe imports no arrays
    ...     shared = gi.opengl.share_buffer(device, 12000)
    >>> shared.close()
    """
    from ..sharing.find_memory import describe, device_of
    from ..sharing.memory import SharedMemory

    context = current_context(get_proc_address)
    context.capabilities.require((Operation.MAP_BUFFER, OpaqueFd))
    described = describe(array, "array", empty=False)
    device = device_of({"array": described})
    start, end = described.span
    _check_target(context, buffer, end - start)
    with exported_block(context, device, described, "context", lambda _: None) as (handle, size, offset):
        names, name = _import(context, handle, size, offset, end - start, buffer)
    with ExitStack() as undo:
        undo.callback(names.close)
        memory = SharedMemory(device, start, end - start, keep=described.keep, noun="imported array", label=label)
        shared = SharedBuffer(names, name, memory.buffer, memory, memory, immutable=described.read_only)
        undo.pop_all()
    return shared


def _check_name(value: object, argument: str, example: str) -> int:
    """Check OpenGL's name of an object."""
    if not hasattr(value, "__index__"):
        kind = type(value).__name__
        raise ArgumentTypeError(argument, f"expected OpenGL's name, an int such as {example}, got {kind}.")
    return check_int(value, argument, minimum=1, maximum=MAX_32)


def _check_target(context: Context, buffer: int | None, size: int) -> None:
    """Refuse a buffer that cannot get new storage, or would be read past its end."""
    if buffer is None:
        return
    buffer, functions = _check_name(buffer, "buffer", "moderngl's buffer.glo"), context.functions
    if not functions.glIsBuffer(buffer):
        raise InvalidArgumentError(
            "buffer", f"expected the name of a buffer of this context, such as moderngl's buffer.glo, got {buffer}."
        )
    immutable, least = _storage_of(functions, buffer)
    if immutable:
        raise InvalidArgumentError(
            "buffer",
            f"expected a buffer whose storage can be replaced, got {buffer}, which has immutable storage "
            "(glBufferStorage, or memory that was shared before); leave buffer out, and draw from shared.name.",
        )
    if functions.integer("glGetNamedBufferParameteriv", buffer, gl.BUFFER_MAPPED):
        raise InvalidArgumentError("buffer", f"expected a buffer that is not mapped, got {buffer}; unmap it first.")
    if least > size:
        raise InvalidArgumentError(
            "size",
            f"expected at least the {least} bytes that buffer {buffer} has, got {size}; pass its size.",
        )


def _is_of(functions: gl.Functions, texture: int, target: int, binding: int) -> bool:
    """Whether a texture has this target. Mesa tells the target itself only in core contexts."""
    before = functions.integer("glGetIntegerv", binding)
    functions.drop_errors()
    functions.glBindTexture(target, texture)
    fits = not functions.glGetError()
    functions.glBindTexture(target, before)
    return fits


def _storage_of(functions: gl.Functions, name: int) -> tuple[bool, int]:
    """Whether a buffer's storage is immutable, and its size."""
    size = ctypes.c_int64()
    functions.glGetNamedBufferParameteri64v(name, gl.BUFFER_SIZE, ctypes.byref(size))
    return bool(functions.integer("glGetNamedBufferParameteriv", name, gl.BUFFER_IMMUTABLE_STORAGE)), size.value


def _import(
    context: Context, handle: Handle, allocation: int, offset: int, size: int, buffer: int | None
) -> tuple[Names, int]:
    """Import `allocation` bytes, and make `size` of them from `offset` the storage of a buffer."""
    with Names(context) as names:
        memory = names.import_memory(handle, allocation)
        name = names.new("glCreateBuffers") if buffer is None else buffer
        context.functions.check("glNamedBufferStorageMemEXT", name, size, memory, offset)
    return names, name
