"""The README's sample, as it stands there, for 1,000 frames against an exporter that is slower than the consumer."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application
else:
    from vulkan_application import Application

pytestmark = pytest.mark.usefixtures("device")
README = Path(__file__).parents[2] / "README.md"
SIZE = 1024
SLOW = 1 << 20  # bytes that Vulkan fills before each frame's own work
LOOP = "for frame in frames:"


def sample() -> tuple[str, str]:
    """The code block with the frame loop: what precedes the loop, and the loop."""
    blocks = re.findall(r"```python[^\n]*\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    setup, loop = next(block for block in blocks if LOOP in block).split(LOOP)
    return setup, LOOP + loop


def left(frame: int) -> int:
    """The four bytes that the sample leaves in a frame; Vulkan's own are never two that are equal."""
    return frame % 256 * 0x01010101


class SlowRenderer:
    """Each frame: much other work, log what the consumer left in the shared buffer, then write the frame's number.

    The log is Vulkan's own, and is read back through Vulkan.
    """

    def __init__(self, application: Application, frames: int) -> None:
        self.application = application
        self.frames = frames
        self.count = 0
        self.buffer: Any = None
        vulkan = application.api
        self.slow = self._buffer(SLOW, vulkan.VK_BUFFER_USAGE_TRANSFER_DST_BIT)
        usage = vulkan.VK_BUFFER_USAGE_TRANSFER_DST_BIT | vulkan.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
        self.log = self._buffer(4 * (frames + 1), usage)

    def _buffer(self, size: int, usage: int) -> tuple[Any, Any]:
        vulkan, device = self.application.api, self.application.device
        buffer = vulkan.vkCreateBuffer(device, vulkan.VkBufferCreateInfo(size=size, usage=usage), None)
        needs = vulkan.vkGetBufferMemoryRequirements(device, buffer)
        properties = vulkan.vkGetPhysicalDeviceMemoryProperties(self.application.physical_device)
        wanted = vulkan.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | vulkan.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
        kind = next(
            index
            for index in range(properties.memoryTypeCount)
            if needs.memoryTypeBits >> index & 1 and properties.memoryTypes[index].propertyFlags & wanted == wanted
        )
        info = vulkan.VkMemoryAllocateInfo(allocationSize=needs.size, memoryTypeIndex=kind)
        memory = vulkan.vkAllocateMemory(device, info, None)
        vulkan.vkBindBufferMemory(device, buffer, memory, 0)
        return buffer, memory

    def record(self) -> Any:
        vulkan, shared = self.application.api, self.buffer.vk_buffer
        frame = self.count
        self.count += 1

        def work(commands: Any) -> None:
            stage, write = vulkan.VK_PIPELINE_STAGE_TRANSFER_BIT, vulkan.VK_ACCESS_TRANSFER_WRITE_BIT
            behind = vulkan.VkMemoryBarrier(srcAccessMask=write, dstAccessMask=write)
            for _ in range(4):
                vulkan.vkCmdPipelineBarrier(commands, stage, stage, 0, 1, [behind], 0, None, 0, None)
                vulkan.vkCmdFillBuffer(commands, self.slow[0], 0, SLOW, frame)
            if frame:
                self.buffer.acquire(commands)
            region = vulkan.VkBufferCopy(srcOffset=0, dstOffset=4 * frame, size=4)
            vulkan.vkCmdCopyBuffer(commands, shared, self.log[0], 1, [region])
            barrier = vulkan.VkMemoryBarrier(srcAccessMask=vulkan.VK_ACCESS_TRANSFER_READ_BIT, dstAccessMask=write)
            vulkan.vkCmdPipelineBarrier(commands, stage, stage, 0, 1, [barrier], 0, None, 0, None)
            if frame < self.frames:
                vulkan.vkCmdFillBuffer(commands, shared, 0, SIZE, 0x01020304)
            self.buffer.release(commands)

        return self.application.record(work)

    def submit(self, commands: object, **waits: list[Any]) -> None:
        """The sample's `submit`."""
        vulkan = self.application.api
        timeline = vulkan.VkTimelineSemaphoreSubmitInfo(
            pWaitSemaphoreValues=waits["wait_values"] or None, pSignalSemaphoreValues=waits["signal_values"]
        )
        info = vulkan.VkSubmitInfo(
            pNext=timeline,
            pWaitSemaphores=waits["wait_semaphores"],
            pWaitDstStageMask=waits["wait_stages"],
            pCommandBuffers=[self.record()],
            pSignalSemaphores=waits["signal_semaphores"],
        )
        vulkan.vkQueueSubmit(self.application.queue, 1, [info], None)

    def give(self) -> dict[str, Any]:
        """The names that the README's sample uses without making them."""
        return {
            "instance": self.application.instance,
            "physical_device": self.application.physical_device,
            "vk_device": self.application.device,
            "queue": self.application.queue,
            "queue_family": 0,
            "size": SIZE,
            "frames": (frame % 256 for frame in range(self.frames)),
            "commands": None,
            "submit": self.submit,
        }

    def finish(self) -> list[int]:
        """Log the last frame too, and read the log through Vulkan."""
        self.application.idle()
        commands = self.record()
        vulkan = self.application.api
        vulkan.vkQueueSubmit(self.application.queue, 1, [vulkan.VkSubmitInfo(pCommandBuffers=[commands])], None)
        self.application.idle()
        size = 4 * (self.frames + 1)
        data = vulkan.vkMapMemory(self.application.device, self.log[1], 0, size, 0)
        values = list(struct.unpack(f"<{self.frames + 1}I", bytes(data[:size])))
        vulkan.vkUnmapMemory(self.application.device, self.log[1])
        return values[1:]

    def close(self) -> None:
        self.application.idle()
        for buffer, memory in (self.slow, self.log):
            self.application.api.vkDestroyBuffer(self.application.device, buffer, None)
            self.application.api.vkFreeMemory(self.application.device, memory, None)


def run(application: Application, frames: int) -> list[int]:
    """What Vulkan found in the buffer after each frame."""
    setup, loop = sample()
    renderer = SlowRenderer(application, frames)
    names = renderer.give()
    exec(compile(setup, str(README), "exec"), names)
    renderer.buffer = names["buffer"]
    try:
        exec(compile(loop, str(README), "exec"), names)
        return renderer.finish()
    finally:
        application.idle()
        names["handoff"].close()
        names["buffer"].close()
        names["vk"].close()
        renderer.close()


def test_a_thousand_frames(application: Application) -> None:
    assert run(application, 1000) == [left(frame) for frame in range(1000)]
