"""Images of a Vulkan driver as the independent party's: optimally tiled, exported, copied to and from as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...capabilities import Operation
from ...errors import InvalidArgumentError, ResourceClosedError
from ...handles import MemoryHandle, OpaqueFd
from ...vulkan import _api as c
from ...vulkan._context import VulkanContext
from ...vulkan._export import create_image
from ...vulkan._image import ImageSide, image_barrier
from ...vulkan._query import IMAGE_USAGE, ImageSupport, image_type
from ..base import ExporterImage, ImageParameters
from .staging import TRANSFERS, Staged

if TYPE_CHECKING:
    from .exporter import VulkanExporter

__all__ = ["VulkanImage", "image_gap"]

_CUBE_COMPATIBLE = 0x10
_SOURCE, _TARGET = 6, 7  # VK_IMAGE_LAYOUT_TRANSFER_SRC_OPTIMAL, _TRANSFER_DST_OPTIMAL


class _Plan(NamedTuple):
    """What an image is to be, in Vulkan's numbers, and what the driver said of it."""

    format: int
    flags: int
    usage: int
    support: ImageSupport
    gap: str


def _plan(vk: VulkanContext, p: ImageParameters) -> _Plan:
    """Ask the driver; the first usage that it shares."""
    number = vk.api.enumerators("VkFormat")[f"VK_FORMAT_{p.format.removeprefix('VK_FORMAT_')}"]
    flags = _CUBE_COMPATIBLE if p.cube else 0
    for usage in (IMAGE_USAGE, IMAGE_USAGE & ~c.IMAGE_STORAGE) if p.usage is None else (p.usage,):
        support = vk.physical.image_support(OpaqueFd, number, c.TILING_OPTIMAL, usage, image_type(p.extent), flags)
        plan = _Plan(number, flags, usage, support, _gap(vk.physical.name, p, support))
        if not plan.gap:
            break
    return plan


def _gap(name: str, p: ImageParameters, support: ImageSupport) -> str:
    """Why the image cannot be shared; empty if it can."""
    if not support.features & c.MEMORY_EXPORTABLE:
        return f"{name} does not export such images of {p.format}."
    most = (*support.extent, support.levels, support.layers)
    for what, limit in zip(("width", "height", "depth", "levels", "layers"), most, strict=True):
        if (wanted := getattr(p, what)) > limit:
            return f"{name} shares {p.format} images with {what} {limit} at most, not {wanted}."
    return ""


def image_gap(vk: VulkanContext, parameters: ImageParameters) -> str:
    """Say what `Exporter.image_gap` says."""
    table = vk.capabilities.of((Operation.MAP_MIPMAPPED_ARRAY, OpaqueFd))
    return table.reason if not table.usable else _plan(vk, parameters).gap


class VulkanImage(Staged, ExporterImage):
    """An image with exportable memory, in ``GENERAL`` layout and the other side's possession between calls."""

    def __init__(self, exporter: VulkanExporter, parameters: ImageParameters) -> None:
        super().__init__(exporter)
        self.parameters = parameters
        self.vk = vk = exporter.open()
        exporter.capabilities.require((Operation.MAP_MIPMAPPED_ARRAY, OpaqueFd))
        plan = _plan(vk, parameters)
        if plan.gap:
            raise InvalidArgumentError("parameters", plan.gap)
        self.usage = plan.usage
        layers = max(1, parameters.layers)
        self._range = vk.api.new(
            "VkImageSubresourceRange", aspectMask=c.ASPECT_COLOR, levelCount=parameters.levels, layerCount=layers
        )
        self.vulkan_object = create_image(
            vk, plan.support, OpaqueFd, parameters.extent, format=plan.format, flags=plan.flags,
            mipLevels=parameters.levels, arrayLayers=layers, tiling=c.TILING_OPTIMAL, usage=plan.usage,
        )  # fmt: skip
        self.size = self.vulkan_object.size
        self.dedicated = self.vulkan_object.dedicated
        exporter.children[self] = None
        try:
            self._hand_over(vk)
        except BaseException:
            self.close()  # the image may be on the queue already
            raise

    def _hand_over(self, vk: VulkanContext) -> None:
        """The first transition, which is to the other side."""
        self._copy(lambda commands: self.release(vk, commands, c.LAYOUT_UNDEFINED))

    # -- the interface ------------------------------------------------------------------------------------------------

    def export(self) -> MemoryHandle:
        self.check()
        return self.vulkan_object.export()

    def write(self, level: int, data: bytes) -> None:
        self.check()
        size = self.parameters.level_bytes(level)
        if len(data) != size:
            raise InvalidArgumentError("data", f"has {len(data)} bytes, level {level} has {size}.")
        region, vk = self._region(level), self.vk
        with self._lock:
            staging = self._stage(size)
            staging.bytes[:size] = data

            def record(commands: Any) -> None:
                self._acquire(vk, commands, _TARGET)
                vk.functions.vkCmdCopyBufferToImage(
                    commands, staging.handle, self.vulkan_object.handle, _TARGET, 1, region
                )
                self.release(vk, commands, _TARGET)

            self._copy(record)

    def read(self, level: int) -> bytes:
        self.check()
        size = self.parameters.level_bytes(level)
        region, vk = self._region(level), self.vk
        with self._lock:
            staging = self._stage(size)

            def record(commands: Any) -> None:
                self._acquire(vk, commands, _SOURCE)
                vk.functions.vkCmdCopyImageToBuffer(
                    commands, self.vulkan_object.handle, _SOURCE, staging.handle, 1, region
                )
                self._to_host(commands)
                self.release(vk, commands, _SOURCE)

            self._copy(record)
            return bytes(staging.bytes[:size])

    def close(self) -> None:
        if not self.vulkan_object.closed and self.exporter.settle(self):
            self._unstage()
            self.vulkan_object.close()
        self.exporter.children.pop(self, None)

    # -- inside -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self.vulkan_object.closed:
            raise ResourceClosedError("the exporter's image was closed.")

    def _region(self, level: int) -> Any:
        """A whole level, all its layers, tightly packed in the buffer."""
        region = self.vk.api.new("VkBufferImageCopy")
        region.imageSubresource.aspectMask = c.ASPECT_COLOR
        region.imageSubresource.mipLevel = level
        region.imageSubresource.layerCount = max(1, self.parameters.layers)
        width, height, depth = self.parameters.level_extent(level)
        region.imageExtent.width, region.imageExtent.height, region.imageExtent.depth = width, height, max(1, depth)
        return region

    def _acquire(self, vk: VulkanContext, commands: Any, layout: int) -> None:
        """Take ownership back from the other side, and make the transition to the copy's layout."""
        self._barrier(
            commands,
            (c.STAGE_TRANSFER, 0, c.QUEUE_FAMILY_EXTERNAL, c.LAYOUT_GENERAL),
            (c.STAGE_TRANSFER, TRANSFERS, vk._family(), layout),
        )

    def release(self, vk: VulkanContext, commands: Any, layout: int) -> None:
        self._barrier(
            commands,
            (c.STAGE_TRANSFER, TRANSFERS, vk._family(), layout),
            (c.STAGE_BOTTOM_OF_PIPE, 0, c.QUEUE_FAMILY_EXTERNAL, c.LAYOUT_GENERAL),
        )

    def _barrier(self, commands: Any, source: ImageSide, target: ImageSide) -> None:
        barrier = image_barrier(self.vk, self.vulkan_object.handle, self._range, source, target)
        self.vk.functions.vkCmdPipelineBarrier(commands, *barrier)
