"""Buffers of a renderer that does not use gpuinterop: it provides descriptors, offsets and sizes.

    python renderer_buffers.py         prints the particles before and after

The renderer here only calls Vulkan, as a C++ engine would. It puts two vertex buffers into one allocation. Like an
engine's plugin interface, it returns a descriptor of the memory, and the buffers' offsets. The compute side imports
the descriptor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import vulkan as api
from vulkan_application import Application

import gpuinterop as gi

COUNT = 512
SHAPE = (COUNT, 4)  # x, y, z, w as float32
NBYTES = 16 * COUNT


class Renderer:
    """Two vertex buffers in one VkDeviceMemory that Vulkan exports."""

    def __init__(self, application: Application) -> None:
        self.application = application
        device = application.device
        kind = api.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT
        external = api.VkExternalMemoryBufferCreateInfo(handleTypes=kind)
        usage = api.VK_BUFFER_USAGE_VERTEX_BUFFER_BIT | api.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        info = api.VkBufferCreateInfo(
            pNext=external, size=NBYTES, usage=usage, sharingMode=api.VK_SHARING_MODE_EXCLUSIVE
        )
        self.buffers = [api.vkCreateBuffer(device, info, None) for _ in ("positions", "velocities")]
        needs = [api.vkGetBufferMemoryRequirements(device, buffer) for buffer in self.buffers]
        step = max(need.alignment for need in needs)
        self.offsets = [0, -(-needs[0].size // step) * step]
        self.size = self.offsets[1] + needs[1].size
        types = needs[0].memoryTypeBits & needs[1].memoryTypeBits
        info = api.VkMemoryAllocateInfo(
            pNext=api.VkExportMemoryAllocateInfo(handleTypes=kind),
            allocationSize=self.size,
            memoryTypeIndex=(types & -types).bit_length() - 1,
        )
        self.memory = api.vkAllocateMemory(device, info, None)
        for buffer, offset in zip(self.buffers, self.offsets, strict=True):
            api.vkBindBufferMemory(device, buffer, self.memory, offset)

    def descriptor(self) -> int:
        """Return a descriptor number, as a plugin interface does."""
        export = api.vkGetDeviceProcAddr(self.application.device, "vkGetMemoryFdKHR")
        kind = api.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT
        return int(export(self.application.device, api.VkMemoryGetFdInfoKHR(memory=self.memory, handleType=kind)))

    def fill(self, commands: Any) -> None:
        """The engine's code: all positions 1.0, all velocities 0.5."""
        one, half = (int(np.float32(value).view(np.uint32)) for value in (1.0, 0.5))
        api.vkCmdFillBuffer(commands, self.buffers[0], 0, NBYTES, one)
        api.vkCmdFillBuffer(commands, self.buffers[1], 0, NBYTES, half)

    def destroy(self) -> None:
        for buffer in self.buffers:
            api.vkDestroyBuffer(self.application.device, buffer, None)
        api.vkFreeMemory(self.application.device, self.memory, None)


def main() -> None:
    with Application() as application:
        renderer = Renderer(application)
        application.run(renderer.fill)  # the host waits here; a loop would use semaphores
        device = gi.match_device(gi.vulkan.identity(application.physical_device))
        fd = renderer.descriptor()
        print(
            f"{application.name} -> {device.name}: descriptor of {renderer.size} bytes, buffers at {renderer.offsets}"
        )

        # The import consumes the descriptor. `trusted`: this process's own driver has made it.
        handle = gi.OpaqueFd(fd, trusted=True)
        with device.import_memory(handle, size=renderer.size, dedicated=False) as memory:
            positions = memory.map_buffer(offset=renderer.offsets[0], size=NBYTES)
            velocities = memory.map_buffer(offset=renderer.offsets[1], size=NBYTES)
            before, speed = np.empty(SHAPE, np.float32), np.empty(SHAPE, np.float32)
            positions.copy_to_host(before)
            velocities.copy_to_host(speed)
            positions.copy_from_host(before + speed * 2)  # on a GPU: a kernel of torch or CuPy, in place
            after = np.empty(SHAPE, np.float32)
            positions.copy_to_host(after)
        print("           x    y    z    w")
        print("before ", *(f"{value:4.1f}" for value in before[-1]))
        print("after  ", *(f"{value:4.1f}" for value in after[-1]))
        assert (after == 2).all(), "the positions are not those that were computed"
        assert (speed == 0.5).all(), "the velocities are not the renderer's"
        print("the descriptor is", "consumed" if handle.closed else "still open")
        application.vk.close()
        renderer.destroy()


if __name__ == "__main__":
    main()
