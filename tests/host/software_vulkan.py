"""A small Vulkan client for the two software drivers, through PyPI's `vulkan`; it knows nothing of gpuinterop."""

from __future__ import annotations

from typing import Any

import vulkan as vk

MEMORY_FD = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT
SEMAPHORE_FD = vk.VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT


class Driver:
    """One device, one queue."""

    def __init__(self, name: str) -> None:
        application = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 2, 0))
        self.instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=application), None)
        self.device: Any = None
        try:
            found = [
                device
                for device in vk.vkEnumeratePhysicalDevices(self.instance)
                if name in vk.vkGetPhysicalDeviceProperties(device).deviceName
            ]
            if not found:
                raise LookupError(f"no Vulkan device is called {name}")
            there = {e.extensionName for e in vk.vkEnumerateDeviceExtensionProperties(found[0], None)}
            wanted = {"VK_KHR_external_memory_fd", "VK_KHR_external_semaphore_fd"} & there
            queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=0, pQueuePriorities=[1.0])
            create = vk.VkDeviceCreateInfo(pQueueCreateInfos=[queue], ppEnabledExtensionNames=sorted(wanted))
            self.device = vk.vkCreateDevice(found[0], create, None)
        except BaseException:
            self.close()
            raise
        self.queue = vk.vkGetDeviceQueue(self.device, 0, 0)

    def _call(self, name: str) -> Any:
        return vk.vkGetDeviceProcAddr(self.device, name)

    def close(self) -> None:
        if self.device is not None:
            vk.vkDeviceWaitIdle(self.device)
            vk.vkDestroyDevice(self.device, None)
        vk.vkDestroyInstance(self.instance, None)

    # -- memory --------------------------------------------------------------------------------------------------

    def buffer(self, size: int) -> tuple[Any, int]:
        """An unbound buffer and its allocation size."""
        external = vk.VkExternalMemoryBufferCreateInfo(handleTypes=MEMORY_FD)
        usage = vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        buffer = vk.vkCreateBuffer(self.device, vk.VkBufferCreateInfo(pNext=external, size=size, usage=usage), None)
        return buffer, int(vk.vkGetBufferMemoryRequirements(self.device, buffer).size)

    def allocate(self, buffer: Any, size: int) -> tuple[Any, int]:
        """Exportable memory bound to `buffer`, and its fd."""
        export = vk.VkExportMemoryAllocateInfo(handleTypes=MEMORY_FD)
        allocate = vk.VkMemoryAllocateInfo(pNext=export, allocationSize=size, memoryTypeIndex=0)
        memory = vk.vkAllocateMemory(self.device, allocate, None)
        vk.vkBindBufferMemory(self.device, buffer, memory, 0)
        get = vk.VkMemoryGetFdInfoKHR(memory=memory, handleType=MEMORY_FD)
        return memory, int(self._call("vkGetMemoryFdKHR")(self.device, get))

    def free(self, buffer: Any, memory: Any) -> None:
        vk.vkDestroyBuffer(self.device, buffer, None)
        vk.vkFreeMemory(self.device, memory, None)

    # -- semaphores ----------------------------------------------------------------------------------------------

    def semaphore(self) -> tuple[Any, int]:
        """An exported binary semaphore and its fd. Never a timeline one: SwiftShader crashes."""
        export = vk.VkExportSemaphoreCreateInfo(handleTypes=SEMAPHORE_FD)
        semaphore = vk.vkCreateSemaphore(self.device, vk.VkSemaphoreCreateInfo(pNext=export), None)
        get = vk.VkSemaphoreGetFdInfoKHR(semaphore=semaphore, handleType=SEMAPHORE_FD)
        return semaphore, int(self._call("vkGetSemaphoreFdKHR")(self.device, get))

    def import_semaphore(self, fd: int) -> Any:
        """Import `fd` (consumed)."""
        semaphore = vk.vkCreateSemaphore(self.device, vk.VkSemaphoreCreateInfo(), None)
        info = vk.VkImportSemaphoreFdInfoKHR(semaphore=semaphore, handleType=SEMAPHORE_FD, fd=fd)
        self._call("vkImportSemaphoreFdKHR")(self.device, info)
        return semaphore

    def destroy(self, semaphore: Any) -> None:
        vk.vkDestroySemaphore(self.device, semaphore, None)

    def submit(self, *, wait: Any = None, signal: Any = None) -> None:
        info = vk.VkSubmitInfo(
            waitSemaphoreCount=1 if wait else 0,
            pWaitSemaphores=[wait] if wait else [],
            pWaitDstStageMask=[vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT] if wait else [],
            signalSemaphoreCount=1 if signal else 0,
            pSignalSemaphores=[signal] if signal else [],
        )
        vk.vkQueueSubmit(self.queue, 1, [info], None)

    def idle(self) -> None:
        vk.vkQueueWaitIdle(self.queue)
