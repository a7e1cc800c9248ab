"""Images of the Vulkan exporter: optimally tiled, exported, copied to and from a level at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ....capabilities import Operation
from ....errors import InvalidArgumentError, ResourceClosedError
from ....handles import MemoryHandle, OpaqueFd
from ....vulkan import _api as c
from ....vulkan._context import VulkanContext
from ....vulkan._memory import create
from ....vulkan._query import IMAGE_USAGE, Support
from ..base import ExporterImage, ImageParameters
from .staging import TRANSFERS, Staged

if TYPE_CHECKING:
    from .exporter import VulkanExporter

__all__ = ["VulkanImage", "image_gap"]

_CUBE_COMPATIBLE = 0x10
_SOURCE, _TARGET = 6, 7  # VK_IMAGE_LAYOUT_TRANSFER_SRC_OPTIMAL, _TRANSFER_DST_OPTIMAL


class _Plan(NamedTuple):
    """An image's parameters in Vulkan's numbers, and the driver's answer."""

    format: int
    flags: int
    usage: int
    support: Support
    gap: str


def _image_type(p: ImageParameters) -> int:
    return c.IMAGE_TYPE_3D if p.depth else c.IMAGE_TYPE_2D


def _plan(vk: VulkanContext, p: ImageParameters) -> _Plan:
    """Ask the driver; returns the first usage that it shares."""
    number = vk.api.enumerators("VkFormat")[f"VK_FORMAT_{p.format.removeprefix('VK_FORMAT_')}"]
    flags = _CUBE_COMPATIBLE if p.cube else 0
    for usage in (IMAGE_USAGE, IMAGE_USAGE & ~c.IMAGE_STORAGE) if p.usage is None else (p.usage,):
        support = vk.physical.image_support(OpaqueFd, number, c.TILING_OPTIMAL, usage, _image_type(p), flags)
        plan = _Plan(number, flags, usage, support, _gap(vk.physical.name, p, support))
        if not plan.gap:
            break
    return plan


def _gap(name: str, p: ImageParameters, support: Support) -> str:
    """Why the image cannot be shared; empty if it can."""
    if not support.features & c.MEMORY_EXPORTABLE:
        return f"{name} does not export such images of {p.format}."
    most = (*support.extent, support.levels, support.layers)
    for what, limit in zip(("width", "height", "depth", "levels", "layers"), most, strict=True):
        if (wanted := getattr(p, what)) > limit:
            return f"{name} shares {p.format} images with {what} {limit} at most, not {wanted}."
    return ""


def image_gap(vk: VulkanContext, parameters: ImageParameters) -> str:
    """Implement `Exporter.image_gap`."""
    table = vk.capabilities.of((Operation.MAP_MIPMAPPED_ARRAY, OpaqueFd))
    return table.reason if not table.usable else _plan(vk, parameters).gap


class VulkanImage(Staged, ExporterImage):
    """An image with exportable memory; between calls in ``GENERAL`` layout, and owned by the other side."""

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
        width, height, depth = parameters.extent
        self.vulkan_object = create(
            vk, "Image", plan.support, OpaqueFd, imageType=_image_type(parameters), samples=1, format=plan.format,
            extent=(width, height, max(1, depth)), flags=plan.flags, mipLevels=parameters.levels, arrayLayers=layers,
            tiling=c.TILING_OPTIMAL, usage=plan.usage,
        )  # fmt: skip
        self.size = self.vulkan_object.size
        self.dedicated = self.vulkan_object.dedicated
        exporter.children[self] = None
        try:
            self._hand_over()
        except BaseException:
            self.close()  # the queue may already use the image
            raise

    def _hand_over(self) -> None:
        """Make the first transition, which gives the image to the other side."""
        self._copy(lambda commands: self._release(commands, c.LAYOUT_UNDEFINED))

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
                self._acquire(commands, _TARGET)
                vk.functions.vkCmdCopyBufferToImage(
                    commands, staging.handle, self.vulkan_object.handle, _TARGET, 1, region
                )
                self._release(commands, _TARGET)

            self._copy(record)

    def read(self, level: int) -> bytes:
        self.check()
        size = self.parameters.level_bytes(level)
        region, vk = self._region(level), self.vk
        with self._lock:
            staging = self._stage(size)

            def record(commands: Any) -> None:
                self._acquire(commands, _SOURCE)
                vk.functions.vkCmdCopyImageToBuffer(
                    commands, self.vulkan_object.handle, _SOURCE, staging.handle, 1, region
                )
                self._to_host(commands)
                self._release(commands, _SOURCE)

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
        """A whole level with all its layers, tightly packed in the buffer."""
        region = self.vk.api.new("VkBufferImageCopy")
        region.imageSubresource.aspectMask = c.ASPECT_COLOR
        region.imageSubresource.mipLevel = level
        region.imageSubresource.layerCount = max(1, self.parameters.layers)
        width, height, depth = self.parameters.level_extent(level)
        region.imageExtent.width, region.imageExtent.height, region.imageExtent.depth = width, height, max(1, depth)
        return region

    def _acquire(self, commands: Any, layout: int) -> None:
        """Take ownership back from the other side, with the transition to the copy's layout."""
        native = self.vulkan_object
        other_side = native.other_side(c.STAGE_TRANSFER, c.LAYOUT_GENERAL)
        native.transfer(commands, other_side, native.vulkan_side(c.STAGE_TRANSFER, TRANSFERS, layout))

    def _release(self, commands: Any, layout: int) -> None:
        native = self.vulkan_object
        other_side = native.other_side(c.STAGE_BOTTOM_OF_PIPE, c.LAYOUT_GENERAL)
        native.transfer(commands, native.vulkan_side(c.STAGE_TRANSFER, TRANSFERS, layout), other_side)
