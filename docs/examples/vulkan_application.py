"""A small Vulkan program, as an application has one: the examples and the manual's pages share it.

It uses PyPI's ``vulkan``. All that concerns gpuinterop is marked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import vulkan as api

import gpuinterop as gi

SEMAPHORES = ((gi.Operation.IMPORT_SEMAPHORE, gi.TimelineFd), (gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd))


class Application:
    """An instance, a device, a queue, and a pool of command buffers.

    Parameters
    ----------
    transfer : bool
        Whether to take a queue that only copies, if the device has one: there a handoff costs a fortieth on NVIDIA.
    """

    def __init__(self, *, transfer: bool = False) -> None:
        # gpuinterop: the instance's extensions. They are part of Vulkan 1.1; enabling them again is allowed.
        extensions, _ = gi.vulkan.required_extensions()
        application = api.VkApplicationInfo(apiVersion=api.VK_MAKE_VERSION(1, 2, 0))
        info = api.VkInstanceCreateInfo(pApplicationInfo=application, ppEnabledExtensionNames=extensions)
        self.instance = api.vkCreateInstance(info, None)
        self.physical_device = max(api.vkEnumeratePhysicalDevices(self.instance), key=_rank)
        self.name = api.vkGetPhysicalDeviceProperties(self.physical_device).deviceName
        families = api.vkGetPhysicalDeviceQueueFamilyProperties(self.physical_device)
        flags = [family.queueFlags for family in families]
        wanted = api.VK_QUEUE_TRANSFER_BIT if transfer else api.VK_QUEUE_COMPUTE_BIT
        does_more = api.VK_QUEUE_GRAPHICS_BIT | api.VK_QUEUE_COMPUTE_BIT if transfer else 0
        fits = [index for index, bits in enumerate(flags) if bits & wanted and not bits & does_more]
        self.queue_family = fits[0] if fits else 0

        # gpuinterop: the extensions and the feature that sharing needs.
        _, extensions = gi.vulkan.required_extensions(self.physical_device)
        timelines = api.VkPhysicalDeviceTimelineSemaphoreFeatures(timelineSemaphore=api.VK_TRUE)
        queue = api.VkDeviceQueueCreateInfo(queueFamilyIndex=self.queue_family, queueCount=1, pQueuePriorities=[1.0])
        info = api.VkDeviceCreateInfo(pNext=timelines, pQueueCreateInfos=[queue], ppEnabledExtensionNames=extensions)
        self.device = api.vkCreateDevice(self.physical_device, info, None)
        self.queue = api.vkGetDeviceQueue(self.device, self.queue_family, 0)
        pool = api.VkCommandPoolCreateInfo(
            queueFamilyIndex=self.queue_family, flags=api.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        )
        self.pool = api.vkCreateCommandPool(self.device, pool, None)

        # gpuinterop: what the functions of gi.vulkan take. The application still owns these objects.
        self.vk = gi.vulkan.VulkanContext(
            self.instance, self.physical_device, self.device, self.queue, self.queue_family
        )

    def record(self, work: Callable[[Any], None]) -> Any:
        """A command buffer with this work, which can be submitted each frame."""
        info = api.VkCommandBufferAllocateInfo(
            commandPool=self.pool, level=api.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1
        )
        (commands,) = api.vkAllocateCommandBuffers(self.device, info)
        # Vulkan cannot see that the last submission is over when an external semaphore says so.
        again = api.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT
        api.vkBeginCommandBuffer(commands, api.VkCommandBufferBeginInfo(flags=again))
        work(commands)
        api.vkEndCommandBuffer(commands)
        return commands

    def submit(
        self, commands: Any, *, wait_semaphores: Any = (), wait_values: Any = (), wait_stages: Any = (),
        signal_semaphores: Any = (), signal_values: Any = (),
    ) -> None:  # fmt: skip
        """vkQueueSubmit, with what ``handoff.vulkan_submit()`` says."""
        timeline = api.VkTimelineSemaphoreSubmitInfo(
            pWaitSemaphoreValues=wait_values or None, pSignalSemaphoreValues=signal_values or None
        )
        info = api.VkSubmitInfo(
            pNext=timeline,
            pWaitSemaphores=wait_semaphores or None,
            pWaitDstStageMask=wait_stages or None,
            pCommandBuffers=[commands],
            pSignalSemaphores=signal_semaphores or None,
        )
        api.vkQueueSubmit(self.queue, 1, [info], None)

    def run(self, work: Callable[[Any], None]) -> None:
        """Record, submit, and wait until it is done."""
        self.submit(self.record(work))
        api.vkQueueWaitIdle(self.queue)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.vk.close()  # gpuinterop: before vkDestroyDevice
        api.vkDestroyCommandPool(self.device, self.pool, None)
        api.vkDestroyDevice(self.device, None)
        api.vkDestroyInstance(self.instance, None)


def _rank(physical_device: Any) -> tuple[bool, bool]:
    """Take a device that computes here; of those, one whose driver shares semaphores."""
    try:
        device = gi.match_device(gi.vulkan.identity(physical_device))
    except gi.GpuInteropError:
        return False, False
    theirs = gi.vulkan.capabilities(physical_device)
    return True, any(theirs.supports(cell) and device.capabilities.supports(cell) for cell in SEMAPHORES)
