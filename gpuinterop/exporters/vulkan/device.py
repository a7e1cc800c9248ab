"""A VkDevice of the exporter's own."""

from __future__ import annotations

from ..._arguments import NoCopy
from ...errors import DeviceNotFoundError
from ...handles import DeviceIdentity
from ...vulkan import _api as c
from ...vulkan._api import check_call
from ...vulkan._context import VulkanContext
from ...vulkan._query import PhysicalDevice, device_extensions
from .drivers import Instance

__all__ = ["Device"]


class _Context(VulkanContext):
    """A context whose handles may say that they come from another device: one that is simulated on top of this."""

    said: DeviceIdentity | None = None

    @property
    def identity(self) -> DeviceIdentity:
        return self.said or super().identity


class Device(NoCopy):
    """A VkDevice with one or two queues of a family: by default, of one that computes."""

    def __init__(self, instance: Instance, physical: PhysicalDevice, family: int | None = None) -> None:
        api, ffi, new = instance.api, instance.api.ffi, instance.api.new
        if family is None:
            family = self._computing(physical)
        queues = min(2, physical.queue_families[family][1])
        extensions = device_extensions(physical)
        chain = ffi.NULL
        if physical.has_timelines:
            chain = new("VkPhysicalDeviceTimelineSemaphoreFeatures", timelineSemaphore=1)
        queue_info = new(
            "VkDeviceQueueCreateInfo",
            queueFamilyIndex=family,
            queueCount=queues,
            pQueuePriorities=ffi.new("float[]", [1.0] * queues),
        )
        info = new(
            "VkDeviceCreateInfo",
            pNext=chain,
            queueCreateInfoCount=1,
            pQueueCreateInfos=queue_info,
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=api.strings(extensions),
        )
        out = ffi.new("VkDevice *")
        check_call(instance.functions, "vkCreateDevice", physical.handle, info, ffi.NULL, out)
        self.vk = _Context(instance.handle, physical.handle, out[0], queue_family_index=family)
        self.vk.physical = physical  # `physical` has asked the driver already
        queue = ffi.new("VkQueue *")
        self.queues = []
        for index in range(queues):
            self.vk.functions.vkGetDeviceQueue(out[0], family, index, queue)
            self.queues.append(queue[0])
        self.vk.queue = self.queues[0]

    @staticmethod
    def _computing(physical: PhysicalDevice) -> int:
        for wanted in (c.QUEUE_GRAPHICS | c.QUEUE_COMPUTE, c.QUEUE_COMPUTE):
            for index, (flags, _) in enumerate(physical.queue_families):
                if flags & wanted == wanted:
                    return index
        raise DeviceNotFoundError(f"{physical.name} has no queue that computes.")

    def close(self) -> None:
        self.vk.close()
        self.vk.functions.vkDestroyDevice(self.vk.device, self.vk.api.ffi.NULL)
