"""Copies on the exporter's queue, to and from memory that the host sees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ...errors import DriverError
from ...vulkan import _api as c
from ...vulkan._context import VulkanContext

if TYPE_CHECKING:
    from .exporter import VulkanExporter

__all__ = ["Staged", "Staging", "map_memory"]

TRANSFERS = c.ACCESS_TRANSFER_READ | c.ACCESS_TRANSFER_WRITE
_LIMIT = 30.0


def map_memory(vk: VulkanContext, memory: Any, size: int) -> Any:
    """The bytes of a VkDeviceMemory; freeing it unmaps them."""
    address = vk.api.ffi.new("void **")
    vk.call("vkMapMemory", vk.device, memory, 0, c.WHOLE_SIZE, 0, address)
    return vk.api.ffi.buffer(address[0], size)


class Staging:
    """Host memory that the queue can copy from and to."""

    def __init__(self, vk: VulkanContext, size: int) -> None:
        self._vk = vk
        self.size = size
        with ExitStack() as undo:
            usage = c.BUFFER_TRANSFER_SRC | c.BUFFER_TRANSFER_DST
            info = vk.api.new("VkBufferCreateInfo", size=size, usage=usage)
            self.buffer = vk.create("vkCreateBuffer", "VkBuffer", info)
            undo.callback(vk.destroy, "vkDestroyBuffer", self.buffer)
            requirements = vk.api.ffi.new("VkMemoryRequirements *")
            vk.functions.vkGetBufferMemoryRequirements(vk.device, self.buffer, requirements)
            index, _ = vk.memory_type(requirements.memoryTypeBits, c.MEMORY_HOST_VISIBLE | c.MEMORY_HOST_COHERENT)
            info = vk.api.new("VkMemoryAllocateInfo", allocationSize=requirements.size, memoryTypeIndex=index)
            self.memory = vk.create("vkAllocateMemory", "VkDeviceMemory", info)
            undo.callback(vk.destroy, "vkFreeMemory", self.memory)
            vk.call("vkBindBufferMemory", vk.device, self.buffer, self.memory, 0)
            self.bytes = map_memory(vk, self.memory, size)
            undo.pop_all()

    def close(self) -> None:
        """Destroy it; no queue may be at work with it."""
        self._vk.destroy("vkDestroyBuffer", self.buffer)
        self._vk.destroy("vkFreeMemory", self.memory)


class Staged:
    """What is written and read through a staging buffer, which is kept: an interrupted copy may still be at work."""

    _exporter: VulkanExporter

    def __init__(self, exporter: VulkanExporter) -> None:
        self._exporter = exporter
        self._lock = threading.Lock()
        self._staging: Staging | None = None

    def _stage(self, size: int) -> Staging:
        """A staging buffer of `size` bytes or more."""
        if self._staging is None or self._staging.size < size:
            self._unstage()
            self._staging = Staging(self._exporter._vk, size)
        return self._staging

    def _unstage(self) -> None:
        staging, self._staging = self._staging, None  # first, as in Native.close()
        if staging is not None:
            staging.close()

    def _to_host(self, commands: Any) -> None:
        """Record: the host sees what the copy has written."""
        vk = self._exporter._vk
        barrier = vk.api.new("VkMemoryBarrier", srcAccessMask=c.ACCESS_TRANSFER_WRITE, dstAccessMask=c.ACCESS_HOST_READ)
        null = vk.api.ffi.NULL
        vk.functions.vkCmdPipelineBarrier(commands, c.STAGE_TRANSFER, c.STAGE_HOST, 0, 1, barrier, 0, null, 0, null)

    def _copy(self, record: Callable[[Any], None]) -> None:
        """Do what `record` records, and wait for it."""
        # Not on the queue that waits for semaphores, where there is another: an oracle must not wait behind them.
        pending = self._exporter._submit((), record, (), uses=(self,), queue=self._exporter._device.queues[-1])
        if not pending.done(_LIMIT):
            raise DriverError("vkWaitForFences", c.TIMEOUT, c.result_name(c.TIMEOUT), f"a copy took over {_LIMIT:g} s")
