"""Copies on the exporter's queue, to and from memory that the host sees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...._arguments import NoCopy
from ....errors import DriverError
from ....vulkan import _api as c
from ....vulkan._context import VulkanContext, VulkanObject

if TYPE_CHECKING:
    from .exporter import VulkanExporter

__all__ = ["Staged", "Staging", "map_memory"]

TRANSFERS = c.ACCESS_TRANSFER_READ | c.ACCESS_TRANSFER_WRITE
_LIMIT = 300.0


def map_memory(vk: VulkanContext, memory: Any, size: int) -> Any:
    """Map a VkDeviceMemory and return its bytes; freeing the memory unmaps them."""
    address = vk.api.ffi.new("void **")
    vk._call("vkMapMemory", vk.device, memory, 0, c.WHOLE_SIZE, 0, address)
    return vk.api.ffi.buffer(address[0], size)


class Staging(VulkanObject):
    """A VkBuffer (its `handle`) in host memory that the queue can copy from and to."""

    bytes: Any

    def __init__(self, vk: VulkanContext, size: int) -> None:
        super().__init__(vk, "staging buffer")
        self.size = size
        self.make(self._make)

    def _make(self) -> Any:
        vk = self._vk
        usage = c.BUFFER_TRANSFER_SRC | c.BUFFER_TRANSFER_DST
        buffer = self.new("vkCreateBuffer", "VkBuffer", vk.api.new("VkBufferCreateInfo", size=self.size, usage=usage))
        requirements = vk.api.ffi.new("VkMemoryRequirements *")
        vk.functions.vkGetBufferMemoryRequirements(vk.device, buffer, requirements)
        index, _ = vk._memory_type(requirements.memoryTypeBits, c.MEMORY_HOST_VISIBLE | c.MEMORY_HOST_COHERENT)
        info = vk.api.new("VkMemoryAllocateInfo", allocationSize=requirements.size, memoryTypeIndex=index)
        memory = self.new("vkAllocateMemory", "VkDeviceMemory", info)
        vk._call("vkBindBufferMemory", vk.device, buffer, memory, 0)
        self.bytes = map_memory(vk, memory, self.size)
        return buffer


class Staged(NoCopy):
    """Memory accessed through a staging buffer, which is kept because an interrupted copy may still use it."""

    exporter: VulkanExporter

    def __init__(self, exporter: VulkanExporter) -> None:
        self.exporter = exporter
        self._lock = threading.Lock()
        self._staging: Staging | None = None

    def _stage(self, size: int) -> Staging:
        """Return a staging buffer of at least `size` bytes."""
        if self._staging is None or self._staging.size < size:
            self._unstage()
            self._staging = Staging(self.exporter.vk, size)
        return self._staging

    def _unstage(self) -> None:
        staging, self._staging = self._staging, None  # first, as in VulkanObject.close()
        if staging is not None:
            staging.close()

    def _to_host(self, commands: Any) -> None:
        """Record a barrier, so that the host sees what the copy has written."""
        vk = self.exporter.vk
        barrier = vk.api.new("VkMemoryBarrier", srcAccessMask=c.ACCESS_TRANSFER_WRITE, dstAccessMask=c.ACCESS_HOST_READ)
        null = vk.api.ffi.NULL
        vk.functions.vkCmdPipelineBarrier(commands, c.STAGE_TRANSFER, c.STAGE_HOST, 0, 1, barrier, 0, null, 0, null)

    def _copy(self, record: Callable[[Any], None]) -> None:
        """Submit what `record` records, and wait for it."""
        # Use a queue that does not wait for semaphores if there is one: an oracle must not wait for them.
        pending = self.exporter.submit_to_queue((), record, (), uses=(self,), queue=self.exporter._device.queues[-1])
        if not pending.done(_LIMIT):
            raise DriverError("vkWaitForFences", c.TIMEOUT, c.result_name(c.TIMEOUT), f"a copy took over {_LIMIT:g} s")
