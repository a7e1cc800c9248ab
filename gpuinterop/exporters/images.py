"""Images of a Vulkan driver as the independent party's: optimally tiled, exported, copied to and from as a whole."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..capabilities import Operation
from ..errors import DriverError, InvalidArgumentError, ResourceClosedError
from ..handles import MemoryHandle, OpaqueFd
from ..vulkan import _api as c
from ..vulkan._context import VulkanContext
from ..vulkan._export import allocate_exportable, export_memory, memory_types
from ..vulkan._query import IMAGE_USAGE
from .base import ExporterImage, ImageParameters
from .vulkan import _Staging

if TYPE_CHECKING:
    from .vulkan import VulkanExporter

__all__ = ["VulkanImage", "image_gap"]

_CUBE_COMPATIBLE = 0x10
_TYPE_3D = 2
_UNDEFINED, _SOURCE, _TARGET = 0, 6, 7  # VK_IMAGE_LAYOUT_UNDEFINED, _TRANSFER_SRC_OPTIMAL, _TRANSFER_DST_OPTIMAL
_IGNORED = 0xFFFFFFFF  # VK_QUEUE_FAMILY_IGNORED
_TOP_OF_PIPE = 0x1
_TRANSFERS = c.ACCESS_TRANSFER_READ | c.ACCESS_TRANSFER_WRITE
_LIMIT = 30.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """What an image is to be, in Vulkan's numbers, and what the driver said of it."""

    format: int
    kind: int
    flags: int
    usage: int
    dedicated_only: bool
    gap: str = ""


def _plan(vk: VulkanContext, parameters: ImageParameters) -> _Plan:
    """Ask the driver; the first usage that it shares."""
    p = parameters
    number = getattr(vk.api.module, f"VK_FORMAT_{p.format.removeprefix('VK_FORMAT_')}")
    kind = _TYPE_3D if p.depth else c.IMAGE_TYPE_2D
    flags = _CUBE_COMPATIBLE if p.cube else 0
    usages = (IMAGE_USAGE, IMAGE_USAGE & ~c.IMAGE_STORAGE) if p.usage is None else (p.usage,)
    reasons = []
    for usage in usages:
        features, reason = _ask(vk, p, number, kind, flags, usage)
        if not reason:
            return _Plan(number, kind, flags, usage, bool(features & c.FEATURE_DEDICATED_ONLY))
        reasons.append(reason)
    return _Plan(number, kind, flags, usages[-1], False, reasons[-1])


def _ask(vk: VulkanContext, p: ImageParameters, number: int, kind: int, flags: int, usage: int) -> tuple[int, str]:
    """``vkGetPhysicalDeviceImageFormatProperties2``: the features, and what speaks against the image."""
    new = vk.api.new
    info = new(
        "VkPhysicalDeviceImageFormatInfo2",
        pNext=new("VkPhysicalDeviceExternalImageFormatInfo", handleType=c.MEMORY_HANDLE_OPAQUE_FD),
        format=number,
        type=kind,
        tiling=c.TILING_OPTIMAL,
        usage=usage,
        flags=flags,
    )
    external = new("VkExternalImageFormatProperties")
    found = new("VkImageFormatProperties2", pNext=external)
    name = vk._physical.name
    query = vk.instance_functions.vkGetPhysicalDeviceImageFormatProperties2
    if (code := query(vk.physical_device, info, found)) < 0:
        return 0, f"{name} shares no such images of {p.format} ({c.result_name(code)})."
    features = int(external.externalMemoryProperties.externalMemoryFeatures)
    if not features & c.MEMORY_EXPORTABLE:
        return 0, f"{name} does not export such images of {p.format}."
    limits = found.imageFormatProperties
    for what, wanted, most in (
        ("width", p.width, limits.maxExtent.width),
        ("height", p.height, limits.maxExtent.height),
        ("depth", p.depth, limits.maxExtent.depth),
        ("levels", p.levels, limits.maxMipLevels),
        ("layers", p.layers, limits.maxArrayLayers),
    ):
        if wanted > most:
            return features, f"{name} shares {p.format} images with {what} {most} at most, not {wanted}."
    return features, ""


def image_gap(vk: VulkanContext, parameters: ImageParameters) -> str:
    """As `Exporter.image_gap`."""
    table = vk.capabilities.of((Operation.MAP_MIPMAPPED_ARRAY, OpaqueFd))
    return table.reason if not table.usable else _plan(vk, parameters).gap


class VulkanImage(ExporterImage):
    """An image with exportable memory, in ``GENERAL`` layout and the other side's possession between calls."""

    def __init__(self, exporter: VulkanExporter, parameters: ImageParameters) -> None:
        self._exporter = exporter
        self._lock = threading.Lock()
        self.parameters = parameters
        self._vk = vk = exporter._open()
        exporter.capabilities.require((Operation.MAP_MIPMAPPED_ARRAY, OpaqueFd))
        plan = _plan(vk, parameters)
        if plan.gap:
            raise InvalidArgumentError("parameters", plan.gap)
        self.usage = plan.usage
        self._image: Any = None
        self._staging: _Staging | None = None
        self._range = vk.api.new(
            "VkImageSubresourceRange",
            aspectMask=c.ASPECT_COLOR,
            levelCount=parameters.levels,
            layerCount=max(1, parameters.layers),
        )
        with ExitStack() as undo:
            self._create(vk, plan, undo)
            undo.pop_all()
        exporter._children[self] = None
        try:
            self._hand_over(vk)
        except BaseException:
            self.close()  # it may be on the queue already
            raise

    def _create(self, vk: VulkanContext, plan: _Plan, undo: ExitStack) -> None:
        new, p, bit = vk.api.new, self.parameters, c.MEMORY_HANDLE_OPAQUE_FD
        info = new(
            "VkImageCreateInfo",
            pNext=new("VkExternalMemoryImageCreateInfo", handleTypes=bit),
            flags=plan.flags,
            imageType=plan.kind,
            format=plan.format,
            mipLevels=p.levels,
            arrayLayers=max(1, p.layers),
            samples=1,
            tiling=c.TILING_OPTIMAL,
            usage=plan.usage,
            initialLayout=_UNDEFINED,
        )
        info.extent.width, info.extent.height, info.extent.depth = p.width, p.height, max(1, p.depth)
        image = vk.create("vkCreateImage", "VkImage", info)
        undo.callback(vk.destroy, "vkDestroyImage", image)
        wants = new("VkMemoryDedicatedRequirements")
        requirements = new("VkMemoryRequirements2", pNext=wants)
        vk.functions.vkGetImageMemoryRequirements2(
            vk.device, new("VkImageMemoryRequirementsInfo2", image=image), requirements
        )
        # Also where the driver only prefers it, as gpuinterop.vulkan.share_image does: importers ask for no less.
        self.dedicated = bool(
            plan.dedicated_only or wants.requiresDedicatedAllocation or wants.prefersDedicatedAllocation
        )
        self.size = int(requirements.memoryRequirements.size)
        index = memory_types(vk, requirements.memoryRequirements.memoryTypeBits)
        chain = new("VkMemoryDedicatedAllocateInfo", image=image) if self.dedicated else vk.api.ffi.NULL
        memory = allocate_exportable(vk, self.size, index, bit, chain, vk.create)
        undo.callback(vk.destroy, "vkFreeMemory", memory)
        vk.call("vkBindImageMemory", vk.device, image, memory, 0)
        self._image, self._memory = image, memory

    def _hand_over(self, vk: VulkanContext) -> None:
        """The first transition, and to the other side."""

        def record(commands: Any) -> None:
            self._barrier(
                commands,
                (_TOP_OF_PIPE, 0, _IGNORED, _UNDEFINED),
                (c.STAGE_TRANSFER, _TRANSFERS, _IGNORED, _TARGET),
            )
            self._release(vk, commands, _TARGET)

        self._do(record)

    # -- the interface ------------------------------------------------------------------------------------------------

    def export(self) -> MemoryHandle:
        self._check()
        return export_memory(self._vk, self._memory, size=self.size, dedicated=self.dedicated)

    def write(self, level: int, data: bytes) -> None:
        self._check()
        size = self.parameters.level_bytes(level)
        if len(data) != size:
            raise InvalidArgumentError("data", f"has {len(data)} bytes, level {level} has {size}.")
        region, vk = self._region(level), self._vk
        with self._lock:
            staging = self._stage(size)
            staging.bytes[:size] = data

            def record(commands: Any) -> None:
                self._acquire(vk, commands, _TARGET)
                vk.functions.vkCmdCopyBufferToImage(commands, staging.buffer, self._image, _TARGET, 1, region)
                self._release(vk, commands, _TARGET)

            self._do(record)

    def read(self, level: int) -> bytes:
        self._check()
        size = self.parameters.level_bytes(level)
        region, vk = self._region(level), self._vk
        new, functions, null = vk.api.new, vk.functions, vk.api.ffi.NULL
        with self._lock:
            staging = self._stage(size)

            def record(commands: Any) -> None:
                self._acquire(vk, commands, _SOURCE)
                functions.vkCmdCopyImageToBuffer(commands, self._image, _SOURCE, staging.buffer, 1, region)
                to_host = new(
                    "VkMemoryBarrier", srcAccessMask=c.ACCESS_TRANSFER_WRITE, dstAccessMask=c.ACCESS_HOST_READ
                )
                functions.vkCmdPipelineBarrier(
                    commands, c.STAGE_TRANSFER, c.STAGE_HOST, 0, 1, to_host, 0, null, 0, null
                )
                self._release(vk, commands, _SOURCE)

            self._do(record)
            return bytes(staging.bytes[:size])

    def close(self) -> None:
        exporter = self._exporter
        if self._image is not None and exporter._settle(self):
            image, self._image = self._image, None  # first, as in Native.close()
            staging, self._staging = self._staging, None
            if staging is not None:
                staging.close()
            self._vk.destroy("vkDestroyImage", image)
            self._vk.destroy("vkFreeMemory", self._memory)
        exporter._children.pop(self, None)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._image is None:
            raise ResourceClosedError("the exporter's image was closed.")

    def _stage(self, size: int) -> _Staging:
        """A staging buffer of `size` bytes or more; kept, since an interrupted copy may still be at work with it."""
        if self._staging is None or self._staging.size < size:
            staging, self._staging = self._staging, None
            if staging is not None:
                staging.close()
            self._staging = _Staging(self._vk, size)
        return self._staging

    def _region(self, level: int) -> Any:
        """A whole level, all its layers, tightly packed in the buffer."""
        region = self._vk.api.new("VkBufferImageCopy")
        region.imageSubresource.aspectMask = c.ASPECT_COLOR
        region.imageSubresource.mipLevel = level
        region.imageSubresource.layerCount = max(1, self.parameters.layers)
        width, height, depth = self.parameters.level_extent(level)
        region.imageExtent.width, region.imageExtent.height, region.imageExtent.depth = width, height, max(1, depth)
        return region

    def _do(self, record: Any) -> None:
        exporter = self._exporter
        # Not on the queue that waits for semaphores, where there is another: an oracle must not wait behind them.
        pending = exporter._submit((), record, (), uses=(self,), queue=exporter._device.queues[-1])
        if not pending.done(_LIMIT):
            raise DriverError("vkWaitForFences", c.TIMEOUT, c.result_name(c.TIMEOUT), f"a copy took over {_LIMIT:g} s")

    def _acquire(self, vk: VulkanContext, commands: Any, layout: int) -> None:
        """Take ownership back from the other side, and make the transition to the copy's layout."""
        self._barrier(
            commands,
            (c.STAGE_TRANSFER, 0, c.QUEUE_FAMILY_EXTERNAL, c.LAYOUT_GENERAL),
            (c.STAGE_TRANSFER, _TRANSFERS, vk.family(), layout),
        )

    def _release(self, vk: VulkanContext, commands: Any, layout: int) -> None:
        self._barrier(
            commands,
            (c.STAGE_TRANSFER, _TRANSFERS, vk.family(), layout),
            (c.STAGE_BOTTOM_OF_PIPE, 0, c.QUEUE_FAMILY_EXTERNAL, c.LAYOUT_GENERAL),
        )

    def _barrier(self, commands: Any, source: tuple[int, int, int, int], target: tuple[int, int, int, int]) -> None:
        """A barrier between two of (stage, access, queue family, layout)."""
        null = self._vk.api.ffi.NULL
        barrier = self._vk.api.new(
            "VkImageMemoryBarrier",
            srcAccessMask=source[1],
            dstAccessMask=target[1],
            oldLayout=source[3],
            newLayout=target[3],
            srcQueueFamilyIndex=source[2],
            dstQueueFamilyIndex=target[2],
            image=self._image,
            subresourceRange=self._range[0],
        )
        self._vk.functions.vkCmdPipelineBarrier(commands, source[0], target[0], 0, 0, null, 0, null, 1, barrier)
