"""What the tests of Vulkan's side share.

There is no ``__init__.py`` beside this: the tests import this module by its bare name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import gpuinterop as gi
from gpuinterop.handles import Binary, Timeline
from gpuinterop.testing.exporters.vulkan import VulkanExporter
from tests.missing_vulkan import give_up

DRIVERS = os.environ.get("GPUINTEROP_TEST_DRIVERS", "swiftshader,lavapipe").split(",")
DECLARED_GAPS: dict[str, set[type]] = {"lavapipe": {Binary, Timeline}, "swiftshader": {Timeline}}
"""Kinds of semaphore that a driver is known not to export; of any other, and of every GPU, all are expected."""


def semaphores_missing(driver: str, *kinds: type) -> NoReturn:
    """Skip where the driver is known to share none of `kinds`; else something is broken."""
    names = " or ".join(kind.__name__.lower() for kind in kinds)
    if set(kinds) <= DECLARED_GAPS.get(driver, set()):
        pytest.skip(f"{driver} shares no {names} semaphores")
    give_up(f"{driver} should share {names} semaphores, and does not, or the device does not")


def open_exporter(driver: str, **options: Any) -> VulkanExporter:
    try:
        return VulkanExporter(driver, **options)
    except (gi.BackendUnavailableError, gi.DeviceNotFoundError) as error:
        give_up(str(error))


class Application:
    """A program that uses PyPI's vulkan, as its users write it; with `raw`, it hands over its handles as ints."""

    def __init__(self, driver: str, *, extensions: bool = True, raw: bool = False) -> None:
        import vulkan

        self.api, self.raw = vulkan, raw
        app = vulkan.VkApplicationInfo(apiVersion=vulkan.VK_MAKE_VERSION(1, 2, 0))
        self.instance = vulkan.vkCreateInstance(vulkan.VkInstanceCreateInfo(pApplicationInfo=app), None)
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
        handles = (self.instance, self.physical_device, self.device, self.queue)
        instance, physical, device, queue = (self.number(each) if raw else each for each in handles)
        self.vk = gi.vulkan.VulkanContext(instance, physical, device, queue, 0)

    def number(self, handle: Any) -> int:
        """The value of a handle."""
        return int(self.api.ffi.cast("uintptr_t", handle))

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
        self.submit(self.record(record))

    def submit(self, commands: Any) -> None:
        """Submit, and wait until it is done."""
        vulkan = self.api
        fence = vulkan.vkCreateFence(self.device, vulkan.VkFenceCreateInfo(), None)
        submit = vulkan.VkSubmitInfo(pCommandBuffers=[commands])
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
        self.api.vkDestroyInstance(self.instance, None)


class Calls:
    """Functions of a context's VkDevice: those that were called, in order; told to, one fails after so many."""

    def __init__(self, vk: Any, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.made: list[str] = []
        self.failing: dict[str, int] = {}
        for name in names:
            monkeypatch.setitem(vk.functions.__dict__, name, self._counted(name, getattr(vk.functions, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.failing.get(name) == self.made.count(name):
                return -1  # VK_ERROR_OUT_OF_HOST_MEMORY
            self.made.append(name)
            return real(*arguments)

        return call

    def level(self) -> bool:
        """Whether what was made is destroyed."""
        pairs = ("vkCreateBuffer", "vkDestroyBuffer"), ("vkAllocateMemory", "vkFreeMemory")
        return all(self.made.count(make) == self.made.count(end) for make, end in pairs)


class HeldQueue:
    """The application's queue, at work until it is let go: by hand, or at the block's end."""

    def __init__(self, application: Application, work: Callable[[Any], None] = lambda _: None) -> None:
        self._application, vulkan = application, application.api
        kind = vulkan.VkSemaphoreTypeCreateInfo(semaphoreType=vulkan.VK_SEMAPHORE_TYPE_TIMELINE)
        info = vulkan.VkSemaphoreCreateInfo(pNext=kind)
        self._semaphore = vulkan.vkCreateSemaphore(application.device, info, None)
        submit = vulkan.VkSubmitInfo(
            pNext=vulkan.VkTimelineSemaphoreSubmitInfo(pWaitSemaphoreValues=[1], pSignalSemaphoreValues=[]),
            pWaitSemaphores=[self._semaphore],
            pWaitDstStageMask=[vulkan.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT],
            pCommandBuffers=[application.record(work)],
        )
        vulkan.vkQueueSubmit(application.queue, 1, [submit], vulkan.VK_NULL_HANDLE)
        self._held = True

    def let_go(self) -> None:
        if self._held:
            self._held = False
            info = self._application.api.VkSemaphoreSignalInfo(semaphore=self._semaphore, value=1)
            self._application.api.vkSignalSemaphore(self._application.device, info)

    def __enter__(self) -> HeldQueue:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.let_go()
        self._application.idle()
        self._application.api.vkDestroySemaphore(self._application.device, self._semaphore, None)


def match(vk: Any) -> gi.Device:
    try:
        return gi.match_device(gi.vulkan.identity(vk))
    except (gi.DeviceNotFoundError, gi.BackendNotFoundError) as error:
        reason = f"no backend's device is this Vulkan device: {error}"
    if vk.is_cpu:
        give_up(reason)  # the host's backend is always there
    pytest.skip(reason)  # Vulkan's side of a GPU is tested without its backend too


def require_allocations(application: Application, device: gi.Device) -> None:
    """The host has shareable allocations; not every GPU's backend has."""
    if not device.capabilities.supports((gi.Operation.EXPORT_ALLOCATION, gi.VmmFd)):
        if application.vk.is_cpu:
            give_up("the host should have shareable allocations")
        pytest.skip("the device has no shareable allocations")
