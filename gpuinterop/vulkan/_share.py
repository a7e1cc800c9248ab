"""Buffers, images and semaphores that both sides use: made in Vulkan, imported by a gpuinterop device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar, cast, overload

from .._arguments import MAX_32, check_flags, check_int, check_sequence, check_timeout
from ..bridge import Bridge, BridgedSemaphore
from ..capabilities import Operation
from ..errors import ArgumentTypeError, InvalidArgumentError, ResourceClosedError, UnsupportedError
from ..handles import ArrayUsage, Binary, DmaBufFd, MemoryHandle, OpaqueFd, SemaphoreHandle, Timeline
from . import _api as c
from ._context import Native, VulkanContext, check_context
from ._endpoint import TimelineEndpoint
from ._export import (
    ExportableBuffer,
    allocate_exportable,
    create_buffer,
    create_semaphore,
    export_memory,
    export_semaphore,
    memory_types,
    require_exportable,
    semaphore_handle_type,
)
from ._query import BUFFER_USAGE, IMAGE_USAGE, MEMORY_BITS, ImageSupport

if TYPE_CHECKING:
    from .._core.array import MipmappedArray
    from .._core.device import Device
    from .._core.interchange import View
    from .._core.memory import Buffer, ExternalMemory
    from .._core.resource import Resource
    from .._core.semaphore import ExternalSemaphore
    from .._core.stream import Stream

__all__ = ["SharedBuffer", "SharedImage", "SharedSemaphore", "share_buffer", "share_image", "share_semaphore"]

K = TypeVar("K")

_EVERYTHING: Final = c.ACCESS_MEMORY_READ | c.ACCESS_MEMORY_WRITE
_MEMORY_TYPES: Final[tuple[type[MemoryHandle], ...]] = (OpaqueFd, DmaBufFd)


def check_device(vk: VulkanContext, device: Device) -> None:
    """Refuse what is certainly another GPU: drivers would import its memory without a word."""
    from .._core.device import Device

    check_context(vk)
    if not isinstance(device, Device):
        raise ArgumentTypeError("device", f"must be a device of gpuinterop, not {type(device).__name__}.")
    if vk.identity.conflicts(device.identity):
        raise InvalidArgumentError(
            "device",
            f"{device.name} is not Vulkan's {vk.identity.name}; "
            "use gpuinterop.match_device(gpuinterop.vulkan.identity(physical_device)).",
        )


def agree(vk: VulkanContext, device: Device, operations: Sequence[Operation], types: Sequence[type[Any]]) -> type[Any]:
    """The first handle type in which both sides can do all of `operations`; the first gap otherwise."""
    gap = None
    for kind in types:
        cells = [(operation, kind) for operation in operations]
        for table, owner in ((device.capabilities, device.name), (vk.capabilities, vk.identity.name)):
            if missing := table.missing(*cells):
                gap = gap or UnsupportedError(missing[0], context=owner)
                break
        else:
            return kind
    assert gap is not None  # no caller gives no types
    raise gap


def memory_types_of(handle_types: Sequence[type[MemoryHandle]] | None) -> Sequence[type[MemoryHandle]]:
    """The argument `handle_types`, checked."""
    if handle_types is None:
        return _MEMORY_TYPES
    check_sequence(handle_types, "handle_types", "a sequence of handle types")
    given: Sequence[object] = handle_types
    for kind in given:
        if not isinstance(kind, type) or not issubclass(kind, MemoryHandle):
            raise ArgumentTypeError("handle_types", f"{kind!r} is no type of memory handle, such as OpaqueFd.")
    if not handle_types:
        raise InvalidArgumentError("handle_types", "must name one handle type or more.")
    return handle_types


class _Shared:
    """Ends use on the compute side, and destroys Vulkan's half."""

    def __init__(self, vk: VulkanContext) -> None:
        self._vk = vk

    def _require_open(self, resource: Resource) -> None:
        """Refuse to hand out a Vulkan object that is destroyed, or will be any moment."""
        self._vk.check_open()
        if resource.closed:
            raise ResourceClosedError(f"the {type(self).__name__} was closed.")

    def _close(self, resource: Resource, native: Native, timeout: float | None) -> None:
        """Both, whether or not the compute side is done in time: its import keeps the payload."""
        check_timeout(timeout)  # what is refused destroys nothing
        try:
            resource.close(timeout)
        finally:
            native.close()

    def close(self, timeout: float | None = None) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BufferTransfer:
    """Ownership transfers of a VkBuffer to and from the other side."""

    _vk: VulkanContext
    _native: Native
    _foreign: int

    @property
    def vk_buffer(self) -> Any:
        """The VkBuffer."""
        raise NotImplementedError

    def release(self, cmd: Any, *, stage: int = c.STAGE_ALL_COMMANDS, access: int = _EVERYTHING) -> None:
        """Record: Vulkan gives the buffer away. Required after Vulkan's use and before the signal.

        ``vkCmdPipelineBarrier`` to ``VK_QUEUE_FAMILY_EXTERNAL`` (``FOREIGN`` for a dma-buf).

        Parameters
        ----------
        cmd : VkCommandBuffer
            Being recorded, for a queue of the context's family.
        stage, access : int
            ``VkPipelineStageFlags`` and ``VkAccessFlags`` of Vulkan's use; by default all.

        Raises
        ------
        ResourceClosedError
            The buffer was closed, or the context.
        """
        self._barrier(cmd, stage, access, self._vk.family(), c.STAGE_BOTTOM_OF_PIPE, 0, self._foreign)

    def acquire(self, cmd: Any, *, stage: int = c.STAGE_ALL_COMMANDS, access: int = _EVERYTHING) -> None:
        """Record: Vulkan takes the buffer over. Required after the wait and before Vulkan's use.

        Not before the very first use, unless the compute side wrote first. The submission's wait stage has to be
        `stage` or an earlier one.

        Parameters
        ----------
        cmd, stage, access
            As for `release`.

        Raises
        ------
        ResourceClosedError
            As for `release`.
        """
        self._barrier(cmd, stage, 0, self._foreign, stage, access, self._vk.family())

    def _barrier(
        self,
        cmd: Any,
        source_stage: int,
        source_access: int,
        source_family: int,
        target_stage: int,
        target_access: int,
        target_family: int,
    ) -> None:
        vk = self._vk
        vk.check_open()
        commands = _commands(vk, cmd, source_stage, source_access | target_access, target_stage)
        null = vk.api.ffi.NULL
        barrier = vk.api.new(
            "VkBufferMemoryBarrier",
            srcAccessMask=source_access,
            dstAccessMask=target_access,
            srcQueueFamilyIndex=source_family,
            dstQueueFamilyIndex=target_family,
            buffer=self.vk_buffer,
            size=c.WHOLE_SIZE,
        )
        self._native.call("vkCmdPipelineBarrier", commands, source_stage, target_stage, 0, 0, null, 1, barrier, 0, null)


def _commands(vk: VulkanContext, cmd: Any, source_stage: int, access: int, target_stage: int) -> Any:
    """The command buffer of a barrier; checks what a caller may have given for the rest."""
    check_flags(source_stage, "stage")
    check_flags(target_stage, "stage")
    check_flags(access, "access", empty=True)
    return vk.api.handle("VkCommandBuffer", cmd, "cmd")


class SharedBuffer(_Shared, BufferTransfer):
    """One buffer, in Vulkan and on the compute side. Made by :func:`share_buffer`.

    Attributes
    ----------
    buffer : Buffer
        The compute side's; `ptr`, `size`, `view`, `copy_from_host`, `copy_to_host` and `fill` are its.
    memory : ExternalMemory
        What the buffer was mapped from.
    handle_type : type
        In which it was exported.
    """

    def __init__(self, vk: VulkanContext, native: ExportableBuffer, memory: ExternalMemory, size: int) -> None:
        super().__init__(vk)
        native.pair(memory)
        self._native: ExportableBuffer = native
        self.memory = memory
        self.handle_type = native.handle_type
        self._foreign = _foreign_family(native.handle_type)
        self.buffer: Buffer = memory.map_buffer(offset=0, size=size)

    @property
    def vk_buffer(self) -> Any:
        """The VkBuffer, PyPI vulkan's handle. Raises `ResourceClosedError` after `close`, or the context's."""
        self._require_open(self.memory)
        return self._native.buffer

    @property
    def vk_memory(self) -> Any:
        """The VkDeviceMemory. Raises as `vk_buffer`."""
        self._require_open(self.memory)
        return self._native.memory

    @property
    def allocation_size(self) -> int:
        """``VkMemoryRequirements::size``, in bytes."""
        return self._native.size

    @property
    def dedicated(self) -> bool:
        """Whether the allocation is a dedicated one."""
        return self._native.dedicated

    @property
    def ptr(self) -> int:
        """As `Buffer.ptr`."""
        return self.buffer.ptr

    @property
    def size(self) -> int:
        """As `Buffer.size`: what was asked for, in bytes."""
        return self.buffer.size

    def view(
        self, shape: int | Sequence[int], dtype: object = "uint8", offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> View:  # fmt: skip
        """As `Buffer.view`."""
        return self.buffer.view(shape, dtype, offset, strides)

    def copy_from_host(self, source: object, *, offset: int = 0, stream: Stream | None = None) -> None:
        """As `Buffer.copy_from_host`."""
        self.buffer.copy_from_host(source, offset=offset, stream=stream)

    def copy_to_host(self, target: object, *, offset: int = 0, stream: Stream | None = None) -> None:
        """As `Buffer.copy_to_host`."""
        self.buffer.copy_to_host(target, offset=offset, stream=stream)

    def fill(self, byte: int = 0, *, offset: int = 0, size: int | None = None, stream: Stream | None = None) -> None:
        """As `Buffer.fill`."""
        self.buffer.fill(byte, offset=offset, size=size, stream=stream)

    def close(self, timeout: float | None = None) -> None:
        """End use on both sides. Idempotent; never blocks unless `timeout` is given.

        The VkBuffer and its memory are destroyed: Vulkan's own work with them must be done before. Pending work of the
        compute side and exported arrays keep the bytes, and may outlive even the VkDevice.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the compute side to let go of the bytes too.

        Raises
        ------
        ResourceBusyError
            `timeout` passed, and the compute side still uses the memory; it is released later all the same.
        """
        self._close(self.memory, self._native, timeout)


def share_buffer(
    vk: VulkanContext,
    device: Device,
    size: int,
    *,
    usage: int = BUFFER_USAGE,
    handle_types: Sequence[type[MemoryHandle]] | None = None,
) -> SharedBuffer:
    """Make a VkBuffer whose bytes the compute side uses in place.

    Asks ``vkGetPhysicalDeviceExternalBufferProperties``; then ``vkCreateBuffer``, ``vkAllocateMemory`` (dedicated
    where the driver wants that; near the device on a GPU), ``vkGetMemoryFdKHR``, and the device's import and mapping.

    Parameters
    ----------
    vk : VulkanContext
    device : Device
    size : int
        In bytes.
    usage : int
        ``VkBufferUsageFlags``; by default storage and transfers both ways.
    handle_types : sequence of type, optional
        In order of preference; by default ``OpaqueFd``, then ``DmaBufFd``.

    Returns
    -------
    SharedBuffer
        Owns both sides; close it.

    Raises
    ------
    UnsupportedError
        One side cannot; nothing was created.
    InvalidArgumentError
        `device` is another GPU, the usage cannot be shared, or the application did not enable an extension.
    DriverError
        A native call failed.
    """
    check_device(vk, device)
    types = memory_types_of(handle_types)
    kind = agree(vk, device, (Operation.IMPORT_MEMORY, Operation.MAP_BUFFER), types)
    _ = vk.functions.vkGetMemoryFdKHR  # says which extension the application forgot, before anything is made
    native = create_buffer(vk, size, usage, kind)
    with ExitStack() as undo:
        undo.callback(native.close)
        memory = _import(device, native.export(), native.size, native.dedicated)
        undo.callback(memory.close)
        shared = SharedBuffer(vk, native, memory, size)
        undo.pop_all()
    return shared


def _import(device: Device, handle: MemoryHandle, size: int, dedicated: bool) -> ExternalMemory:
    with handle:  # closes it unless the import has consumed it
        return device.import_memory(handle, size=size, dedicated=dedicated)


def _foreign_family(handle_type: type[MemoryHandle]) -> int:
    return c.QUEUE_FAMILY_FOREIGN if handle_type is DmaBufFd else c.QUEUE_FAMILY_EXTERNAL


# -- images ------------------------------------------------------------------------------------------------------------

_NO_FORMATS: Final = ("VK_FORMAT_UNDEFINED", "VK_FORMAT_FEATURE_", "VK_FORMAT__")
_FORMAT: Final = re.compile(r"((?:[RGBA]\d+)+)_(UNORM|SNORM|UINT|SINT|SFLOAT|SRGB)")
_NUMERIC: Final = {"UNORM": "uint", "SNORM": "int", "UINT": "uint", "SINT": "int", "SFLOAT": "float", "SRGB": "uint"}


def _format(vk: VulkanContext, format: int | str) -> tuple[int, str]:
    """A VkFormat by number and by name without its prefix."""
    known = {
        name.removeprefix("VK_FORMAT_"): value
        for name, value in sorted(vars(vk.api.module).items())
        if name.startswith("VK_FORMAT_") and not name.startswith(_NO_FORMATS) and isinstance(value, int)
    }
    if isinstance(format, str):
        name = format.removeprefix("VK_FORMAT_")
        if name not in known:
            raise InvalidArgumentError("format", f"{format!r} is no VkFormat.")
        return known[name], name
    if isinstance(format, bool) or not isinstance(format, int):
        raise ArgumentTypeError("format", f"must be a VkFormat or its name, not {type(format).__name__}.")
    for name, value in known.items():
        if value == format:
            return value, name
    raise InvalidArgumentError("format", f"{format} is no VkFormat that PyPI's vulkan knows.")


def _texel(name: str) -> tuple[int, str]:
    """Channels and dtype of a texel whose channels are alike."""
    found = _FORMAT.fullmatch(name)
    sizes = re.findall(r"\d+", found[1]) if found else []
    if not found or len(set(sizes)) != 1 or sizes[0] not in ("8", "16", "32", "64"):
        raise InvalidArgumentError("format", f"{name} has no channels that an array's elements could be.")
    return len(sizes), _NUMERIC[found[2]] + sizes[0]


class SharedImage(_Shared):
    """One image, in Vulkan and on the compute side. Made by :func:`share_image`.

    Attributes
    ----------
    memory : ExternalMemory
    buffer : Buffer or None
        The compute side's bytes of a linear image.
    array : MipmappedArray or None
        The compute side's array of an optimally tiled image.
    format : str
        Without ``VK_FORMAT_``.
    extent : tuple of int
        Width and height, in texels.
    row_pitch : int
        Of a linear image, in bytes (``vkGetImageSubresourceLayout``); 0 for an optimal one, which has none.
    allocation_size : int
        In bytes.
    dedicated : bool
    handle_type : type
    """

    def __init__(self, vk: VulkanContext, native: _NativeImage, imported: ExternalMemory, make: _ImagePlan) -> None:
        super().__init__(vk)
        native.pair(imported)
        self._native = native
        self.memory = imported
        self.format = make.name
        self.extent = make.extent
        self.allocation_size = make.size
        self.dedicated = make.dedicated
        self.handle_type = make.handle_type
        self.row_pitch = make.row_pitch
        self._offset = make.offset
        self._range = make.range
        self._foreign = _foreign_family(make.handle_type)
        self.buffer: Buffer | None = None
        self.array: MipmappedArray | None = None
        if make.linear:
            self.buffer = imported.map_buffer(offset=0, size=make.size)
        else:
            usage = ArrayUsage.NONE
            if make.usage & c.IMAGE_STORAGE:
                usage |= ArrayUsage.SURFACE
            if make.usage & c.IMAGE_COLOR_ATTACHMENT:
                usage |= ArrayUsage.COLOR_ATTACHMENT
            self.array = imported.map_mipmapped_array(
                make.name,
                make.extent,
                levels=make.levels,
                layers=make.layers if make.layers > 1 else 0,
                usage=usage,
            )

    @property
    def vk_image(self) -> Any:
        """The VkImage, PyPI vulkan's handle. Raises `ResourceClosedError` after `close`, or the context's."""
        self._require_open(self.memory)
        return self._native.image

    @property
    def vk_memory(self) -> Any:
        """The VkDeviceMemory. Raises as `vk_image`."""
        self._require_open(self.memory)
        return self._native.memory

    def view(self) -> View:
        """A linear image's texels in place: (height, width, channels), rows `row_pitch` bytes apart.

        Raises
        ------
        InvalidArgumentError
            The image is tiled optimally (use `array`), or its channels are no array elements.
        """
        if self.buffer is None:
            raise InvalidArgumentError("tiling", "an optimally tiled image has no rows; use `array`.")
        channels, dtype = _texel(self.format)
        item = int(dtype.lstrip("uintfloa")) // 8
        width, height = self.extent
        return self.buffer.view((height, width, channels), dtype, self._offset, (self.row_pitch, channels * item, item))

    def release(
        self,
        cmd: Any,
        *,
        stage: int = c.STAGE_ALL_COMMANDS,
        access: int = _EVERYTHING,
        layout: int = c.LAYOUT_GENERAL,
        shared_layout: int = c.LAYOUT_GENERAL,
    ) -> None:
        """Record: Vulkan gives the image away. Required after Vulkan's use and before the signal.

        Parameters
        ----------
        cmd : VkCommandBuffer
            Being recorded, for a queue of the context's family.
        stage, access : int
            Of Vulkan's use; by default all.
        layout : int
            ``VkImageLayout`` that Vulkan leaves it in.
        shared_layout : int
            That it is in while the other side has it; the same in `acquire`.
        """
        source = stage, access, self._vk.family(), layout
        self._barrier(cmd, source, (c.STAGE_BOTTOM_OF_PIPE, 0, self._foreign, shared_layout))

    def acquire(
        self,
        cmd: Any,
        *,
        stage: int = c.STAGE_ALL_COMMANDS,
        access: int = _EVERYTHING,
        layout: int = c.LAYOUT_GENERAL,
        shared_layout: int = c.LAYOUT_GENERAL,
    ) -> None:
        """Record: Vulkan takes the image over. Required after the wait and before Vulkan's use.

        A new image's layout is undefined: make the transition from ``UNDEFINED`` yourself before the first use.

        Parameters
        ----------
        cmd, stage, access, shared_layout
            As for `release`.
        layout : int
            ``VkImageLayout`` that Vulkan uses it in.
        """
        self._barrier(cmd, (stage, 0, self._foreign, shared_layout), (stage, access, self._vk.family(), layout))

    def _barrier(self, cmd: Any, source: tuple[int, int, int, int], target: tuple[int, int, int, int]) -> None:
        vk = self._vk
        vk.check_open()
        commands = _commands(vk, cmd, source[0], source[1] | target[1], target[0])
        check_int(source[3], "layout", minimum=0, maximum=MAX_32)
        check_int(target[3], "layout", minimum=0, maximum=MAX_32)
        null = vk.api.ffi.NULL
        barrier = vk.api.new(
            "VkImageMemoryBarrier",
            srcAccessMask=source[1],
            dstAccessMask=target[1],
            oldLayout=source[3],
            newLayout=target[3],
            srcQueueFamilyIndex=source[2],
            dstQueueFamilyIndex=target[2],
            image=self.vk_image,
            subresourceRange=self._range[0],
        )
        self._native.call("vkCmdPipelineBarrier", commands, source[0], target[0], 0, 0, null, 0, null, 1, barrier)

    def close(self, timeout: float | None = None) -> None:
        """End use on both sides; as `SharedBuffer.close`."""
        self._close(self.memory, self._native, timeout)


class _NativeImage(Native):
    """A VkImage and its VkDeviceMemory."""

    image: Any
    memory: Any


class _ImagePlan:
    """What an image is to be, checked; and how it came out."""

    size = 0
    dedicated = False
    row_pitch = 0
    offset = 0

    def __init__(
        self, vk: VulkanContext, extent: Sequence[int], format: int | str, tiling: str, levels: int, layers: int,
        usage: int | None,
    ) -> None:  # fmt: skip
        if tiling not in ("linear", "optimal"):
            raise InvalidArgumentError("tiling", f"must be 'linear' or 'optimal', not {tiling!r}.")
        check_sequence(extent, "extent", "(width, height)")
        if len(extent) != 2:
            raise InvalidArgumentError("extent", f"must be (width, height), not {extent!r}.")
        for length in extent:
            check_int(length, "extent", minimum=1, maximum=MAX_32)
        check_int(levels, "levels", minimum=1, maximum=MAX_32)
        check_int(layers, "layers", minimum=1, maximum=MAX_32)
        self.linear = tiling == "linear"
        for argument, number in (("levels", levels), ("layers", layers)):
            if self.linear and number != 1:
                raise InvalidArgumentError(argument, "a linear image has one level and one layer.")
        self.format, self.name = _format(vk, format)
        if self.linear:
            _texel(self.name)
        self.extent = extent[0], extent[1]
        self.levels, self.layers = levels, layers
        if usage is None:
            # A linear image can be copied to and from on every driver; few can do more with it.
            usage = c.IMAGE_TRANSFER_SRC | c.IMAGE_TRANSFER_DST if self.linear else IMAGE_USAGE
        self.usage = check_flags(usage, "usage")
        self.tiling = c.TILING_LINEAR if self.linear else c.TILING_OPTIMAL
        self.handle_type: type[MemoryHandle] = OpaqueFd
        self.range = vk.api.new(
            "VkImageSubresourceRange", aspectMask=c.ASPECT_COLOR, levelCount=levels, layerCount=layers
        )

    def create(self, vk: VulkanContext) -> _NativeImage:
        """Make it."""
        native = _NativeImage(vk, "VkImage")
        native.make(lambda: self._create(vk, native))
        return native

    def _create(self, vk: VulkanContext, native: _NativeImage) -> None:
        new = vk.api.new
        support = vk._physical.image_support(self.handle_type, self.format, self.tiling, self.usage)
        features = support.features
        operation = Operation.MAP_BUFFER if self.linear else Operation.MAP_MIPMAPPED_ARRAY
        require_exportable(vk, features, operation, self.handle_type)
        self._check_limits(vk, support)
        bit = MEMORY_BITS[self.handle_type]
        info = new(
            "VkImageCreateInfo",
            pNext=new("VkExternalMemoryImageCreateInfo", handleTypes=bit),
            imageType=c.IMAGE_TYPE_2D,
            format=self.format,
            mipLevels=self.levels,
            arrayLayers=self.layers,
            samples=1,
            tiling=self.tiling,
            usage=self.usage,
        )
        info.extent.width, info.extent.height, info.extent.depth = *self.extent, 1
        native.image = image = native.new("vkCreateImage", "VkImage", info)
        wants = new("VkMemoryDedicatedRequirements")
        requirements = new("VkMemoryRequirements2", pNext=wants)
        asked = new("VkImageMemoryRequirementsInfo2", image=image)
        vk.call("vkGetImageMemoryRequirements2", vk.device, asked, requirements)
        self.dedicated = bool(
            features & c.FEATURE_DEDICATED_ONLY or wants.requiresDedicatedAllocation or wants.prefersDedicatedAllocation
        )
        self.size = int(requirements.memoryRequirements.size)
        if self.size > support.size:
            raise InvalidArgumentError(
                "extent", f"the image has {self.size} bytes; {vk.identity.name} shares {support.size} at most."
            )
        index = memory_types(vk, requirements.memoryRequirements.memoryTypeBits)
        chain = new("VkMemoryDedicatedAllocateInfo", image=image) if self.dedicated else vk.api.ffi.NULL
        native.memory = allocate_exportable(vk, self.size, index, bit, chain, native.new)
        vk.call("vkBindImageMemory", vk.device, image, native.memory, 0)
        if self.linear:
            layout = vk.api.ffi.new("VkSubresourceLayout *")
            subresource = new("VkImageSubresource", aspectMask=c.ASPECT_COLOR)
            vk.call("vkGetImageSubresourceLayout", vk.device, image, subresource, layout)
            self.row_pitch, self.offset = int(layout.rowPitch), int(layout.offset)

    def _check_limits(self, vk: VulkanContext, support: ImageSupport) -> None:
        """What is over a limit some drivers make all the same, and fail later."""
        most = f"{vk.identity.name} shares {self.name} images of this tiling and usage with"
        if self.extent[0] > support.extent[0] or self.extent[1] > support.extent[1]:
            raise InvalidArgumentError(
                "extent",
                f"{most} {support.extent[0]} x {support.extent[1]} texels at most, "
                f"not {self.extent[0]} x {self.extent[1]}.",
            )
        levels = min(support.levels, max(self.extent).bit_length())  # the last level is one texel
        if self.levels > levels:
            raise InvalidArgumentError("levels", f"{most} {levels} at most, at this extent, not {self.levels}.")
        if self.layers > support.layers:
            raise InvalidArgumentError("layers", f"{most} {support.layers} at most, not {self.layers}.")


def share_image(
    vk: VulkanContext,
    device: Device,
    extent: Sequence[int],
    format: int | str,
    *,
    tiling: str = "optimal",
    levels: int = 1,
    layers: int = 1,
    usage: int | None = None,
    handle_types: Sequence[type[MemoryHandle]] | None = None,
) -> SharedImage:
    """Make a 2D VkImage that the compute side uses in place.

    Parameters
    ----------
    vk : VulkanContext
    device : Device
    extent : sequence of int
        Width and height, in texels.
    format : int or str
        A ``VkFormat``, or its name with or without ``VK_FORMAT_``.
    tiling : str
        ``linear``: rows of bytes, `view` on every backend. ``optimal``: a mipmapped array, where the device has them.
    levels, layers : int
        Mip levels and array layers; 1 for a linear image.
    usage : int, optional
        ``VkImageUsageFlags``. Default: storage, sampled and transfers; transfers alone for a linear image.
    handle_types : sequence of type, optional
        As for :func:`share_buffer`.

    Returns
    -------
    SharedImage
        Owns both sides; close it. The image's layout is undefined at first.

    Raises
    ------
    UnsupportedError
        One side cannot; nothing was created.
    InvalidArgumentError
        `device` is another GPU, or the driver does not share this format, tiling and usage, or none so large.
    DriverError
        A native call failed.
    """
    check_device(vk, device)
    plan = _ImagePlan(vk, extent, format, tiling, levels, layers, usage)
    operation = Operation.MAP_BUFFER if plan.linear else Operation.MAP_MIPMAPPED_ARRAY
    plan.handle_type = agree(vk, device, (Operation.IMPORT_MEMORY, operation), memory_types_of(handle_types))
    _ = vk.functions.vkGetMemoryFdKHR  # says which extension the application forgot, before anything is made
    native = plan.create(vk)
    with ExitStack() as undo:
        undo.callback(native.close)
        handle = native.use(
            lambda _: export_memory(
                vk, native.memory, size=plan.size, dedicated=plan.dedicated, handle_type=plan.handle_type
            )
        )
        imported = _import(device, handle, plan.size, plan.dedicated)
        undo.callback(imported.close)
        shared = SharedImage(vk, native, imported, plan)
        undo.pop_all()
    return shared


# -- semaphores --------------------------------------------------------------------------------------------------------


class SharedSemaphore(_Shared, Generic[K]):
    """One semaphore, in Vulkan and on the compute side. Made by :func:`share_semaphore`.

    Attributes
    ----------
    semaphore : ExternalSemaphore
        The compute side's.
    kind : type
        ``Binary`` or ``Timeline``.
    """

    def __init__(
        self, vk: VulkanContext, native: _NativeSemaphore, semaphore: ExternalSemaphore[K], kind: type[K]
    ) -> None:
        super().__init__(vk)
        native.pair(semaphore)
        self._native = native
        self.semaphore = semaphore
        self.kind = kind

    @property
    def vk_semaphore(self) -> Any:
        """The VkSemaphore, PyPI vulkan's handle. Raises `ResourceClosedError` after `close`, or the context's."""
        self._require_open(self.semaphore)
        return self._native.semaphore

    def counter(self) -> int:
        """A timeline's value now, without waiting (``vkGetSemaphoreCounterValue``)."""
        if self.kind is not Timeline:
            raise InvalidArgumentError("kind", "a binary semaphore has no counter.")
        value = self._vk.api.ffi.new("uint64_t *")
        self._native.call("vkGetSemaphoreCounterValue", self._vk.device, self.vk_semaphore, value)
        return int(value[0])

    def close(self, timeout: float | None = None) -> None:
        """End use on both sides; as `SharedBuffer.close`. One that is bridged goes when no stream uses it any more."""
        if isinstance(self.semaphore, BridgedSemaphore):
            self.semaphore.close(timeout)
        else:
            self._close(self.semaphore, self._native, timeout)


class _NativeSemaphore(Native):
    """A VkSemaphore."""

    def __init__(self, vk: VulkanContext, kind: type, *, exportable: bool = True) -> None:
        super().__init__(vk, "VkSemaphore")
        self.semaphore = self.make(lambda: create_semaphore(vk, kind, self.new, exportable=exportable))


@overload
def share_semaphore(
    vk: VulkanContext, device: Device, kind: type[Timeline], *, bridge: Bridge | None = None
) -> SharedSemaphore[Timeline]: ...
@overload
def share_semaphore(vk: VulkanContext, device: Device, kind: type[Binary] = ...) -> SharedSemaphore[Binary]: ...
@overload
def share_semaphore(
    vk: VulkanContext, device: Device, kind: type[Any], *, bridge: Bridge | None = None
) -> SharedSemaphore[Any]: ...
def share_semaphore(
    vk: VulkanContext, device: Device, kind: type[Any] = Binary, *, bridge: Bridge | None = None
) -> SharedSemaphore[Any]:
    """Make a VkSemaphore that the compute side's streams wait for and signal.

    ``vkCreateSemaphore``, ``vkGetSemaphoreFdKHR``, and the device's import.

    Parameters
    ----------
    vk : VulkanContext
    device : Device
    kind : type
        ``gpuinterop.handles.Binary`` or ``Timeline``. For a timeline the application has enabled the feature
        (``VkPhysicalDeviceTimelineSemaphoreFeatures``).
    bridge : Bridge, optional
        Of `device`: streams reach the semaphore through it, and neither side exports or imports anything. For
        timelines.

    Returns
    -------
    SharedSemaphore
        Owns both sides; close it.

    Raises
    ------
    UnsupportedError
        One side cannot; nothing was created.
    InvalidArgumentError
        `device` is another GPU, or not the bridge's; a bridge for a binary semaphore; or the application did not
        enable an extension.
    DriverError
        A native call failed.
    """
    check_device(vk, device)
    if bridge is not None:
        return _bridge_semaphore(vk, device, kind, bridge)
    agree(vk, device, (Operation.IMPORT_SEMAPHORE,), (semaphore_handle_type(kind),))
    native = _NativeSemaphore(vk, kind)
    with ExitStack() as undo:
        undo.callback(native.close)
        # Exported at once: SwiftShader blocks in vkGetSemaphoreFdKHR while a queue waits for the semaphore.
        with native.use(lambda _: export_semaphore(vk, native.semaphore, kind)) as handle:
            semaphore = device.import_semaphore(cast(SemaphoreHandle[Any], handle))
        undo.callback(semaphore.close)
        shared = SharedSemaphore(vk, native, semaphore, kind)
        undo.pop_all()
    return shared


def _bridge_semaphore(vk: VulkanContext, device: Device, kind: type[Any], bridge: Bridge) -> SharedSemaphore[Any]:
    if not isinstance(bridge, Bridge):
        raise ArgumentTypeError("bridge", f"must be a gpuinterop.bridge.Bridge, not {type(bridge).__name__}.")
    if bridge.device is not device:
        raise InvalidArgumentError("bridge", f"is of {bridge.device.name}, not of {device.name}.")
    if kind is not Timeline:
        raise InvalidArgumentError("kind", "Vulkan's binary semaphores cannot be reached from the host: Timeline.")
    native = _NativeSemaphore(vk, kind, exportable=False)
    with ExitStack() as undo:
        undo.callback(native.close)
        endpoint = TimelineEndpoint(vk, native.semaphore)
        endpoint._through = native
        semaphore = bridge.from_endpoint(endpoint)
        undo.callback(semaphore.close)
        shared = SharedSemaphore(vk, native, semaphore, kind)
        undo.pop_all()
    semaphore.on_released(native.close)
    return shared
