"""What the examples of the reference may assume. An example finds these names, and imports everything else itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np

import gpuinterop as gi
from gpuinterop.exporters import open_exporter
from gpuinterop.handles import FdHandle

SIZE = 65536


@contextmanager
def common(backend: str = "host") -> Iterator[dict[str, Any]]:
    """Names of every example.

    ``gi``, ``np``
        gpuinterop and NumPy.
    ``device``
        The device: the host backend's, so an example runs on every machine. On a GPU, write ``gi.device()``.
    ``stream``
        A stream of the device (``device.create_stream()``).
    ``buffer``
        Memory of the device: 65536 bytes or more, all zero.
    ``fd``
        The descriptor of 65536 bytes, all zero, that another API exported. The example owns it.
    ``timeline_fd``
        The descriptor of a timeline semaphore, at 0, that another API exported. The example owns it.
    ``folder``
        An empty directory.
    ``devices``
        The devices of the backend: one on the host, two on the simulated driver.
    """
    devices = gi.get_backend(backend).devices()
    device = devices[0]
    with ExitStack() as scope:
        stream = scope.enter_context(device.create_stream())
        buffer = scope.enter_context(device.allocate(SIZE)).buffer
        buffer.fill(0)
        identity = None if device.identity.is_cpu else device.identity  # a simulated GPU is on the CPU too
        other = scope.enter_context(open_exporter("memfd", identity=identity))
        theirs = (
            scope.enter_context(other.create_memory(SIZE)),
            scope.enter_context(other.create_semaphore(gi.Timeline)),
        )
        handles = [one.export() for one in theirs]
        fd, timeline_fd = (scope.enter_context(_descriptor(one)) for one in handles)
        folder = scope.enter_context(tempfile.TemporaryDirectory())
        yield {
            "gi": gi, "np": np, "device": device, "devices": devices, "stream": stream, "buffer": buffer, "fd": fd,
            "timeline_fd": timeline_fd, "folder": folder,
        }  # fmt: skip


@contextmanager
def _descriptor(handle: gi.handles.Handle) -> Iterator[int]:
    """Give the handle's descriptor to the example, and close it unless an import has consumed it."""
    assert isinstance(handle, FdHandle)
    fd = handle.detach()
    made = os.fstat(fd)
    yield fd
    with suppress(OSError):
        if os.path.samestat(made, os.fstat(fd)):
            os.close(fd)


@contextmanager
def graphics() -> Iterator[dict[str, Any]]:
    """Names of the examples that use Vulkan, here SwiftShader's, made by PyPI's ``vulkan``.

    ``instance``, ``physical_device``, ``vk_device``, ``queue``
        The application's objects. The device has the extensions that `gpuinterop.vulkan.required_extensions` names, and
        timeline semaphores.
    ``vk``
        ``gi.vulkan.VulkanContext(instance, physical_device, vk_device, queue, 0)``.
    ``commands``
        A command buffer of queue family 0 that is being recorded.
    ``submit``
        A function of the application. ``submit(commands)`` ends the command buffer and submits it to the queue.
        Keywords are those of `gpuinterop.vulkan.VulkanSubmit`.
    """
    import vulkan

    with ExitStack() as scope:
        app = vulkan.VkApplicationInfo(apiVersion=vulkan.VK_MAKE_VERSION(1, 2, 0))
        instance = vulkan.vkCreateInstance(vulkan.VkInstanceCreateInfo(pApplicationInfo=app), None)
        scope.callback(vulkan.vkDestroyInstance, instance, None)
        physical_device = next(
            one
            for one in vulkan.vkEnumeratePhysicalDevices(instance)
            if "SwiftShader" in vulkan.vkGetPhysicalDeviceProperties(one).deviceName
        )
        _, extensions = gi.vulkan.required_extensions(physical_device)
        queues = vulkan.VkDeviceQueueCreateInfo(queueFamilyIndex=0, queueCount=1, pQueuePriorities=[1.0])
        timelines = vulkan.VkPhysicalDeviceTimelineSemaphoreFeatures(timelineSemaphore=vulkan.VK_TRUE)
        info = vulkan.VkDeviceCreateInfo(
            pNext=timelines, pQueueCreateInfos=[queues], ppEnabledExtensionNames=extensions
        )
        vk_device = vulkan.vkCreateDevice(physical_device, info, None)
        scope.callback(vulkan.vkDestroyDevice, vk_device, None)
        queue = vulkan.vkGetDeviceQueue(vk_device, 0, 0)
        pool = vulkan.vkCreateCommandPool(vk_device, vulkan.VkCommandPoolCreateInfo(queueFamilyIndex=0), None)
        scope.callback(vulkan.vkDestroyCommandPool, vk_device, pool, None)
        info = vulkan.VkCommandBufferAllocateInfo(
            commandPool=pool, level=vulkan.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1
        )
        commands = vulkan.vkAllocateCommandBuffers(vk_device, info)[0]
        again = vulkan.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT
        vulkan.vkBeginCommandBuffer(commands, vulkan.VkCommandBufferBeginInfo(flags=again))
        ended: list[Any] = []

        def submit(
            commands: Any,
            *,
            wait_semaphores: list[Any] = [],  # noqa: B006 - never changed
            wait_values: list[int] = [],  # noqa: B006
            wait_stages: list[int] = [],  # noqa: B006
            signal_semaphores: list[Any] = [],  # noqa: B006
            signal_values: list[int] = [],  # noqa: B006
        ) -> None:
            if not ended:
                vulkan.vkEndCommandBuffer(commands)
                ended.append(commands)
            values = vulkan.VkTimelineSemaphoreSubmitInfo(
                pWaitSemaphoreValues=wait_values or None, pSignalSemaphoreValues=signal_values or None
            )
            info = vulkan.VkSubmitInfo(
                pNext=values,
                pWaitSemaphores=wait_semaphores,
                pWaitDstStageMask=wait_stages,
                pCommandBuffers=[commands],
                pSignalSemaphores=signal_semaphores,
            )
            vulkan.vkQueueSubmit(queue, 1, [info], None)

        vk = scope.enter_context(gi.vulkan.VulkanContext(instance, physical_device, vk_device, queue, 0))
        yield {
            "instance": instance, "physical_device": physical_device, "vk_device": vk_device, "queue": queue, "vk": vk,
            "commands": commands, "submit": submit,
        }  # fmt: skip
