"""What the tests of Vulkan's side share.

There is no ``__init__.py`` beside this: as a package, this folder would hide PyPI's `vulkan` from the other tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import gpuinterop as gi
from gpuinterop.exporters.vulkan import VulkanExporter

DRIVERS = os.environ.get("GPUINTEROP_TEST_DRIVERS", "swiftshader,lavapipe").split(",")
REQUIRED = bool(os.environ.get("GPUINTEROP_REQUIRE_VULKAN"))


def give_up(reason: str) -> NoReturn:
    if REQUIRED:
        pytest.fail(f"GPUINTEROP_REQUIRE_VULKAN is set, and {reason}")
    pytest.skip(reason)


def open_exporter(driver: str, **options: Any) -> VulkanExporter:
    try:
        return VulkanExporter(driver, **options)
    except (gi.BackendUnavailableError, gi.DeviceNotFoundError) as error:
        give_up(str(error))


class Application:
    """A program that uses PyPI's vulkan, as its users write it."""

    def __init__(self, driver: str, *, extensions: bool = True) -> None:
        import vulkan

        self.api = vulkan
        app = vulkan.VkApplicationInfo(apiVersion=vulkan.VK_MAKE_VERSION(1, 2, 0))
        self.messages: list[str] = []
        layers = ["VK_LAYER_KHRONOS_validation"]
        info = vulkan.VkInstanceCreateInfo(
            pApplicationInfo=app, ppEnabledLayerNames=layers, ppEnabledExtensionNames=["VK_EXT_debug_utils"]
        )
        try:
            self.instance = vulkan.vkCreateInstance(info, None)
        except vulkan.VkErrorLayerNotPresent:
            give_up("the validation layer is not installed")
        create = vulkan.vkGetInstanceProcAddr(self.instance, "vkCreateDebugUtilsMessengerEXT")

        def message(*arguments: Any) -> int:
            self.messages.append(vulkan.ffi.string(arguments[2].pMessage).decode())
            return 0

        self.callback = vulkan.ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT", message)
        self.messenger = create(
            self.instance,
            vulkan.VkDebugUtilsMessengerCreateInfoEXT(
                messageSeverity=0x1100, messageType=0x6, pfnUserCallback=self.callback
            ),
            None,
        )
        wanted = driver.replace("lavapipe", "llvmpipe")
        self.physical_device = next(
            device
            for device in vulkan.vkEnumeratePhysicalDevices(self.instance)
            if wanted in vulkan.vkGetPhysicalDeviceProperties(device).deviceName.lower()
        )
        names = gi.vulkan.required_extensions(self.physical_device)[1] if extensions else []
        queue = vulkan.VkDeviceQueueCreateInfo(queueFamilyIndex=0, queueCount=1, pQueuePriorities=[1.0])
        timeline = vulkan.VkPhysicalDeviceTimelineSemaphoreFeatures(timelineSemaphore=vulkan.VK_TRUE)
        self.device = vulkan.vkCreateDevice(
            self.physical_device,
            vulkan.VkDeviceCreateInfo(pNext=timeline, pQueueCreateInfos=[queue], ppEnabledExtensionNames=names),
            None,
        )
        self.queue = vulkan.vkGetDeviceQueue(self.device, 0, 0)
        self.pool = vulkan.vkCreateCommandPool(self.device, vulkan.VkCommandPoolCreateInfo(queueFamilyIndex=0), None)
        self.vk = gi.vulkan.VulkanContext(self.instance, self.physical_device, self.device, self.queue, 0)

    def record(self, record: Callable[[Any], None]) -> Any:
        vulkan = self.api
        info = vulkan.VkCommandBufferAllocateInfo(
            commandPool=self.pool, level=vulkan.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1
        )
        commands = vulkan.vkAllocateCommandBuffers(self.device, info)[0]
        # Submitted again and again without a fence in between, as far as Vulkan can see.
        again = vulkan.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT
        vulkan.vkBeginCommandBuffer(commands, vulkan.VkCommandBufferBeginInfo(flags=again))
        record(commands)
        vulkan.vkEndCommandBuffer(commands)
        return commands

    def run(self, record: Callable[[Any], None]) -> None:
        vulkan = self.api
        fence = vulkan.vkCreateFence(self.device, vulkan.VkFenceCreateInfo(), None)
        submit = vulkan.VkSubmitInfo(pCommandBuffers=[self.record(record)])
        vulkan.vkQueueSubmit(self.queue, 1, [submit], fence)
        vulkan.vkWaitForFences(self.device, 1, [fence], vulkan.VK_TRUE, 30 * 10**9)
        vulkan.vkDestroyFence(self.device, fence, None)

    def idle(self) -> None:
        self.api.vkQueueWaitIdle(self.queue)

    def close(self) -> None:
        self.idle()
        self.vk.close()
        self.api.vkDestroyCommandPool(self.device, self.pool, None)
        self.api.vkDestroyDevice(self.device, None)
        destroy = self.api.vkGetInstanceProcAddr(self.instance, "vkDestroyDebugUtilsMessengerEXT")
        destroy(self.instance, self.messenger, None)
        self.api.vkDestroyInstance(self.instance, None)


def match(vk: Any) -> gi.Device:
    try:
        return gi.match_device(gi.vulkan.identity(vk))
    except (gi.DeviceNotFoundError, gi.BackendNotFoundError) as error:
        pytest.skip(f"no backend's device is this Vulkan device: {error}")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
