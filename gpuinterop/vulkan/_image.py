"""Images that both sides use: made in Vulkan and imported by a gpuinterop device."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from .. import system
from .._arguments import MAX_32, NotAnArray, check_flags, check_int, check_sequence
from ..capabilities import Operation
from ..errors import GpuInteropError, InvalidArgumentError, ResourceBusyError
from ..handles import MemoryHandle, usage_of
from . import _api as c
from ._context import VulkanContext, VulkanObject
from ._memory import EVERYTHING, BoundObject, PairedMemory, agree_on_memory, create, require_exportable, share_memory
from ._pair import check_device
from ._query import IMAGE_USAGE, Support

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.image import MipmappedArray
    from .._core.lifetime import Lifetime
    from .._core.memory import Buffer, ExternalMemory
    from .._core.view import View


_USAGES: Final = {
    "TRANSFER_SRC": c.IMAGE_TRANSFER_SRC,
    "TRANSFER_DST": c.IMAGE_TRANSFER_DST,
    "SAMPLED": c.IMAGE_SAMPLED,
    "STORAGE": c.IMAGE_STORAGE,
    "COLOR_ATTACHMENT": c.IMAGE_COLOR_ATTACHMENT,
    "INPUT_ATTACHMENT": c.IMAGE_INPUT_ATTACHMENT,
}
"""Usages that a driver can offer for colour images, by their name in ``VkImageUsageFlagBits``."""

_SUBMISSION_S: Final = 10.0
_NO_FORMATS: Final = ("VK_FORMAT_UNDEFINED", "VK_FORMAT_MAX_ENUM")
_FORMAT: Final = re.compile(r"((?:[RGBA]\d+)+)_(UNORM|SNORM|UINT|SINT|SFLOAT|SRGB)")
_NUMERIC: Final = {"UNORM": "uint", "SNORM": "int", "UINT": "uint", "SINT": "int", "SFLOAT": "float", "SRGB": "uint"}


def _format(vk: VulkanContext, format: int | str) -> tuple[int, str]:
    """A VkFormat's number and its name without the prefix."""
    known = {
        name.removeprefix("VK_FORMAT_"): value
        for name, value in sorted(vk.api.enumerators("VkFormat").items(), reverse=True)
        if name not in _NO_FORMATS
    }
    if isinstance(format, str):
        name = format.removeprefix("VK_FORMAT_")
    else:
        name = {value: name for name, value in known.items()}.get(check_int(format, "format"), "")
    if name not in known:
        raise InvalidArgumentError("format", f"expected a VkFormat, got {format!r}.")
    return known[name], name


def _texel(name: str) -> tuple[int, str, int]:
    """Number, dtype and bytes of a texel's channels, which must all be alike."""
    match = _FORMAT.fullmatch(name)
    sizes = re.findall(r"\d+", match[1]) if match else []
    if not match or len(set(sizes)) != 1 or sizes[0] not in ("8", "16", "32", "64"):
        raise InvalidArgumentError(
            "format", f"expected channels of one type and size, got {name}; use tiling='optimal'."
        )
    return len(sizes), _NUMERIC[match[2]] + sizes[0], int(sizes[0]) // 8


class SharedImage(PairedMemory, NotAnArray):
    """One image, in Vulkan and on the compute side. Made by :func:`share_image`.

    Attributes
    ----------
    memory : ExternalMemory
    buffer : Buffer or None
        The compute side's bytes of a linear image.
    array : MipmappedArray or None
        The compute side's array of an optimally tiled image.
    format : str
        The format's name without ``VK_FORMAT_``.
    extent : tuple of int
        Width and height, in texels.
    row_pitch : int
        Bytes from row to row of a linear image (``vkGetImageSubresourceLayout``); 0 for an optimal image.
    allocation_size : int
        Size in bytes.
    dedicated : bool
    handle_type : type

    Examples
    --------
    >>> with gi.vulkan.share_image(vk, device, (60, 32), "R8G8B8A8_UNORM", tiling="linear") as image:
    ...     vk_image = image.vk_image  # Vulkan's
    ...     texels = np.asarray(image.view())
    ...     texels[:] = 255
    ...     texels.shape, image.row_pitch
    ((32, 60, 4), 240)
    """

    _as_array = "numpy.asarray(image.view()), or image.array of an optimally tiled image"

    def __init__(
        self, vk: VulkanContext, native: BoundObject, memory: ExternalMemory, plan: _ImagePlan, label: str | None = None
    ) -> None:
        super().__init__(vk, native, memory)
        self.format = plan.name
        self.extent = plan.extent
        self.row_pitch = 0
        self.buffer: Buffer | None = None
        self.array: MipmappedArray | None = None
        self._shared_layout = c.LAYOUT_UNDEFINED
        """Layout while the other side has it, according to the recorded barriers; UNDEFINED while it is new."""
        self._vulkan_layout: int | None = None
        """Layout after the last recorded `acquire`."""
        self._mapped: Lifetime
        if plan.linear:
            layout = vk.api.ffi.new("VkSubresourceLayout *")
            subresource = vk.api.new("VkImageSubresource", aspectMask=c.ASPECT_COLOR)
            native._call("vkGetImageSubresourceLayout", vk.device, native.handle, subresource, layout)
            self.row_pitch, self._offset = int(layout.rowPitch), int(layout.offset)
            self.buffer = memory.map_buffer(offset=0, size=native.size, label=label)
            self._mapped = self.buffer.mapping
        else:
            self.array = memory.map_mipmapped_array(
                plan.name,
                plan.extent,
                levels=plan.levels,
                layers=plan.layers if plan.layers > 1 else 0,
                usage=usage_of(plan.usage),
                label=label,
            )
            self._mapped = self.array.lifetime

    @property
    def vk_image(self) -> Any:
        """The VkImage (see `SharedBuffer.vk_buffer`)."""
        return self._vk_handle()

    def view(self) -> View:
        """A linear image's texels in place: (height, width, channels), rows `row_pitch` bytes apart.

        If compute writes through an array of this view before Vulkan's first use, pass `initial` to
        :func:`share_image`: gpuinterop cannot see such writes, and Vulkan's first `acquire` would discard them.

        Raises
        ------
        InvalidArgumentError
            The image has optimal tiling (use `array`), or its channels do not fit array elements.
        """
        if self.buffer is None:
            raise InvalidArgumentError("tiling", "an image with optimal tiling has no rows; use `array`.")
        channels, dtype, item = _texel(self.format)
        width, height = self.extent
        return self.buffer.view((height, width, channels), dtype, self._offset, (self.row_pitch, channels * item, item))

    def release(
        self,
        cmd: Any,
        *,
        stage: int = c.STAGE_ALL_COMMANDS,
        access: int = EVERYTHING,
        layout: int | None = None,
        shared_layout: int = c.LAYOUT_GENERAL,
    ) -> None:
        """Record Vulkan's release of the image. Required after Vulkan's use and before the signal.

        Native call: ``vkCmdPipelineBarrier`` to ``VK_QUEUE_FAMILY_EXTERNAL`` (``FOREIGN`` for a dma-buf). From then on
        the image has contents.

        Parameters
        ----------
        cmd, stage, access
            See `SharedBuffer.release`.
        layout : int, optional
            ``VkImageLayout`` in which Vulkan leaves the image. Default: the layout of the last `acquire`. Pass
            ``VK_IMAGE_LAYOUT_UNDEFINED`` if the image has no contents because compute writes first (see `share_image`'s
            `initial`).
        shared_layout : int
            ``VkImageLayout`` while the other side has the image.

        Raises
        ------
        InvalidArgumentError
            The image is new and `layout` is missing. Or `layout` is ``UNDEFINED``, and compute has copied to the new
            image or filled it.
        ResourceClosedError
            The image or the context was closed.
        """
        native = self._open()
        layout = self._vulkan_layout if layout is None else layout
        if layout is None:
            raise InvalidArgumentError(
                "layout",
                "expected the layout that Vulkan leaves the image in, got none; pass VK_IMAGE_LAYOUT_UNDEFINED if the "
                "image has no contents, or the layout after your own barriers.",
            )
        self._check_loss(layout)
        other_side = native.other_side(c.STAGE_BOTTOM_OF_PIPE, shared_layout)
        native.transfer(cmd, native.vulkan_side(stage, access, layout), other_side)
        self._shared_layout = shared_layout

    def acquire(
        self,
        cmd: Any,
        *,
        stage: int = c.STAGE_ALL_COMMANDS,
        access: int = EVERYTHING,
        layout: int = c.LAYOUT_GENERAL,
        shared_layout: int | None = None,
    ) -> None:
        """Record Vulkan's acquire of the image. Required after the wait and before Vulkan's use.

        Before the first `release` the image has no contents and no owner, so the barrier is from ``UNDEFINED``, without
        a transfer. Submit that command buffer only once, because it discards the contents each time. If you record once
        and submit every frame, pass `initial` to :func:`share_image`.

        The barriers assume that you submit every command buffer, in the order of recording. If you dropped the command
        buffer with the first barriers, pass ``shared_layout=VK_IMAGE_LAYOUT_UNDEFINED`` to the next one.

        Parameters
        ----------
        cmd, stage, access
            See `SharedBuffer.release`.
        layout : int
            ``VkImageLayout`` in which Vulkan uses the image.
        shared_layout : int, optional
            ``VkImageLayout`` while the other side has the image. Default: the layout of the last `release`.
            ``UNDEFINED`` discards the contents.

        Raises
        ------
        InvalidArgumentError
            The image is new, and compute has copied to it or filled it, which the first barrier would discard. (An
            exported array does not count: Vulkan may draw first.) If compute writes first, pass `initial` to
            :func:`share_image`.
        ResourceClosedError
            The image or the context was closed.
        """
        old = self._shared_layout if shared_layout is None else shared_layout
        self._check_loss(old)
        native = self._open()
        native.transfer(cmd, native.other_side(stage, old), native.vulkan_side(stage, access, layout))
        self._vulkan_layout = layout

    def _check_loss(self, old: int) -> None:
        """Refuse a barrier from the layout `old` that would discard what compute has written to a new image."""
        if old == c.LAYOUT_UNDEFINED == self._shared_layout and self._mapped.written:
            raise InvalidArgumentError(
                "image",
                "expected a new image that compute has not written, got one that it has copied to or filled, which the "
                "first barrier would discard; pass initial= to share_image, or submit "
                "release(cmd, layout=VK_IMAGE_LAYOUT_UNDEFINED) before compute's first use.",
            )


class _ImagePlan:
    def __init__(
        self, vk: VulkanContext, extent: Sequence[int], format: int | str, tiling: str, levels: int, layers: int,
        usage: int | None,
    ) -> None:  # fmt: skip
        if tiling not in ("linear", "optimal"):
            raise InvalidArgumentError("tiling", f"expected 'linear' or 'optimal', got {tiling!r}.")
        check_sequence(extent, "extent", "(width, height)")
        if len(extent) != 2:
            raise InvalidArgumentError("extent", f"expected (width, height), got {extent!r}.")
        width, height = (check_int(length, "extent", minimum=1, maximum=MAX_32) for length in extent)
        levels = check_int(levels, "levels", minimum=1, maximum=MAX_32)
        layers = check_int(layers, "layers", minimum=1, maximum=MAX_32)
        self.linear = tiling == "linear"
        self.mapping = Operation.MAP_BUFFER if self.linear else Operation.MAP_MIPMAPPED_ARRAY
        for argument, number in (("levels", levels), ("layers", layers)):
            if self.linear and number != 1:
                raise InvalidArgumentError(argument, f"expected 1 for a linear image, got {number}.")
        self.format, self.name = _format(vk, format)
        if self.linear:
            _texel(self.name)
        self.extent = width, height
        self.levels, self.layers = levels, layers
        if usage is None:
            # Every driver can copy to and from a linear image; few can do more with it.
            usage = c.IMAGE_TRANSFER_SRC | c.IMAGE_TRANSFER_DST if self.linear else IMAGE_USAGE
        self.usage = check_flags(usage, "usage")
        self.tiling = c.TILING_LINEAR if self.linear else c.TILING_OPTIMAL

    def create(self, vk: VulkanContext, handle_type: type[MemoryHandle]) -> BoundObject:
        support = vk.physical.image_support(handle_type, self.format, self.tiling, self.usage)
        if self.linear and not support.features & c.MEMORY_EXPORTABLE:
            raise self._linear_gap(vk, handle_type)
        require_exportable(vk, support.features, self.mapping, handle_type)
        self._check_limits(vk, support)
        return create(
            vk, "Image", support, handle_type,
            imageType=c.IMAGE_TYPE_2D, samples=1, extent=(*self.extent, 1), mipLevels=self.levels,
            arrayLayers=self.layers, format=self.format, tiling=self.tiling, usage=self.usage,
        )  # fmt: skip

    def _linear_gap(self, vk: VulkanContext, handle_type: type[MemoryHandle]) -> InvalidArgumentError:
        """Why the driver does not share such a linear image, from a query for each usage."""

        def shares(usage: int) -> bool:
            support = vk.physical.image_support(handle_type, self.format, self.tiling, usage)
            return bool(support.features & c.MEMORY_EXPORTABLE)

        here = f"linear images of {self.name} that {vk.identity.name} shares as {handle_type.__name__}"
        offered = [name for name, usage in _USAGES.items() if shares(usage)]
        if not offered:
            return InvalidArgumentError("format", f"expected {here}, got none; use another format.")
        failing = [name for name, usage in _USAGES.items() if self.usage & usage and name not in offered]
        return InvalidArgumentError(
            "usage",
            f"expected usages of {here}: {', '.join(offered)}; got {', '.join(failing) or 'some of these together'}; "
            "draw into an image of optimal tiling, and copy that: vkCmdCopyImage into a linear one, or "
            "vkCmdCopyImageToBuffer into a shared buffer.",
        )

    def _check_limits(self, vk: VulkanContext, support: Support) -> None:
        """Refuse values over a limit: some drivers create such images all the same, and fail later."""
        width, height = self.extent
        for argument, wanted, most in (
            ("extent", width, support.extent[0]),
            ("extent", height, support.extent[1]),
            ("levels", self.levels, min(support.levels, max(self.extent).bit_length())),  # the last level is one texel
            ("layers", self.layers, support.layers),
        ):
            if wanted > most:
                raise InvalidArgumentError(
                    argument,
                    f"expected at most {most}, the limit of {vk.identity.name} for {self.name} images of this extent, "
                    f"tiling and usage, got {wanted}.",
                )


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
    initial: int | None = None,
    handle_types: Sequence[type[MemoryHandle]] | None = None,
    label: str | None = None,
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
        ``linear``: rows of bytes, with `view` on every backend; what shaders can do with it depends on the driver.
        ``optimal``: a mipmapped array, if the device has them.
    levels : int
        Number of mip levels; 1 for a linear image.
    layers : int
        Number of array layers; 1 for a linear image.
    usage : int, optional
        ``VkImageUsageFlags``. Default: storage, sampled and transfers; for a linear image, only transfers. The driver
        decides about other usages of linear images (``vkGetPhysicalDeviceImageFormatProperties2``): lavapipe shares
        linear images that shaders write, SwiftShader does not. The error lists the possible usages. If shaders cannot
        write a linear image, draw into an image with optimal tiling, and copy that with ``vkCmdCopyImage``.
    initial : int, optional
        ``VkImageLayout`` in which the compute side gets the image before this call returns, through a submission to the
        context's queue that the call waits for. Pass it if compute writes first, or if you submit a command buffer with
        `SharedImage.acquire` more than once. ``VK_IMAGE_LAYOUT_GENERAL`` suits all uses.
    handle_types, label
        See :func:`share_buffer`.

    Returns
    -------
    SharedImage
        The image, which owns both sides; close it. Without `initial` it is empty until Vulkan's first `release`.

    Raises
    ------
    UnsupportedError
        One side does not support it; nothing was created.
    InvalidArgumentError
        `device` is another GPU, or the driver does not share this format, tiling, usage or size. Or `initial` was
        passed, and the context has no queue.
    ResourceBusyError
        Earlier work blocked the queue for 10 seconds, so the image is not in its `initial` layout.
    DriverError
        A native call failed.

    Examples
    --------
    >>> with gi.vulkan.share_image(vk, device, (64, 32), "R32G32B32A32_SFLOAT", tiling="linear") as image:
    ...     np.asarray(image.view()).shape
    (32, 64, 4)

    With `initial`, one command buffer serves every frame, and compute may write first:

    >>> image = gi.vulkan.share_image(vk, device, (64, 32), "R8G8B8A8_UNORM", tiling="linear", initial=1)  # GENERAL
    >>> def frame(commands):
    ...     image.acquire(commands)
    ...     image.release(commands)
    >>> commands, handoff = record(frame), gi.vulkan.share_handoff(vk, device)
    >>> for number in range(3):
    ...     submit(commands, **handoff.vulkan_submit())
    ...     handoff.acquire(stream)
    ...     image.buffer.fill(number, stream=stream)
    ...     handoff.release(stream)
    >>> vk.close()  # waits for the queue
    """
    check_device(vk, device)
    if initial is not None:
        check_int(initial, "initial", minimum=1, maximum=MAX_32)
        _ = vk._family()  # raises before anything is made
        if vk.queue is None:
            raise InvalidArgumentError(
                "initial",
                "expected a context with a queue, got one without; pass the queue to VulkanContext, or submit "
                "release(cmd, layout=VK_IMAGE_LAYOUT_UNDEFINED) yourself.",
            )
    plan = _ImagePlan(vk, extent, format, tiling, levels, layers, usage)
    native = plan.create(vk, agree_on_memory(vk, device, plan.mapping, handle_types))

    def make(memory: ExternalMemory) -> SharedImage:
        image = SharedImage(vk, native, memory, plan, label)
        if initial is not None:

            def release_first(commands: Any) -> None:
                image.release(commands, layout=c.LAYOUT_UNDEFINED, shared_layout=initial)

            _run_once(vk, release_first, native)
        return image

    return share_memory(device, native, make, label)


def _run_once(vk: VulkanContext, record: Callable[[Any], None], uses: VulkanObject) -> None:
    """Record commands that use an object, submit them to the context's queue, and wait until they are done.

    Raises `ResourceBusyError` on a time-out. The context's `close` destroys what is left.
    """
    new, work = vk.api.new, VulkanObject(vk, "submission", (uses,))

    def make() -> Any:
        info = new("VkCommandPoolCreateInfo", queueFamilyIndex=vk._family())
        pool = work.new("vkCreateCommandPool", "VkCommandPool", info)
        fence = work.new("vkCreateFence", "VkFence", new("VkFenceCreateInfo"))
        commands = vk.api.ffi.new("VkCommandBuffer *")
        allocate = new("VkCommandBufferAllocateInfo", commandPool=pool, commandBufferCount=1)
        vk._call("vkAllocateCommandBuffers", vk.device, allocate, commands)
        begin = new("VkCommandBufferBeginInfo", flags=c.COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT)
        vk._call("vkBeginCommandBuffer", commands[0], begin)
        record(commands[0])
        vk._call("vkEndCommandBuffer", commands[0])
        submit = new("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=commands)
        system.under(vk._submitting, vk._call, "vkQueueSubmit", vk.queue, 1, submit, fence)
        return fence

    fence = work.make(make)
    try:
        done = system.until(lambda: work._call("vkGetFenceStatus", vk.device, fence) != c.NOT_READY, _SUBMISSION_S)
    except GpuInteropError:  # the VkDevice is lost, so no work is pending
        work.close()
        raise
    if not done:
        raise ResourceBusyError(
            f"expected the context's queue to finish a submission in {_SUBMISSION_S:g} s, but earlier work still "
            "blocks it; first submit what that work waits for."
        )
    work.close()
