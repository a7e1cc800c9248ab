"""A VkInstance and a VkDevice of the library's own, for uses without an application's Vulkan objects."""

from __future__ import annotations

import os
import threading
from typing import Any

from .._arguments import NoCopy
from ..errors import BackendUnavailableError, DeviceNotFoundError, DriverError
from ..handles import DeviceIdentity
from ..installing import install_vulkan
from . import _api as c
from ._api import Api, Functions, check_call
from ._context import VulkanContext
from ._query import PhysicalDevice, device_extensions


class Instance(NoCopy):
    """A VkInstance of the library's own."""

    def __init__(self) -> None:
        self.api = api = Api({})
        ffi, new = api.ffi, api.new
        loader = api.global_functions()
        application = new("VkApplicationInfo", apiVersion=1 << 22 | 1 << 12)
        version = ffi.new("uint32_t *")
        if loader.has("vkEnumerateInstanceVersion"):
            check_call(loader, "vkEnumerateInstanceVersion", version)
            if version[0] >= (1 << 22 | 2 << 12):  # 1.2: timeline semaphores without an extension
                application.apiVersion = 1 << 22 | 2 << 12
        _keep_drivers_loaded(api, loader)
        self.handle = _create_instance(api, loader, new("VkInstanceCreateInfo", pApplicationInfo=application))
        self.functions = api.instance_functions(self.handle)

    def physical_devices(self) -> list[PhysicalDevice]:
        """List the physical devices in the loader's order."""
        listed = self.api.listed("VkPhysicalDevice", self.functions, "vkEnumeratePhysicalDevices", self.handle)
        return [PhysicalDevice(self.api, self.functions, handle) for handle in listed]

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            self.functions.vkDestroyInstance(handle, self.api.ffi.NULL)

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_LIMITS = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
"""If one of these is set, the loader uses only the drivers that it names."""
_anchor: list[Any] = []
_anchor_lock = threading.Lock()


def _keep_drivers_loaded(api: Api, loader: Functions) -> None:
    """Keep one bare instance until the process exits, so that the loader never unloads the drivers.

    A process can load NVIDIA's driver (580) only some thirty times. Then "cannot allocate memory in static TLS block"
    hides the GPU.
    """
    with _anchor_lock:
        if not _anchor:
            _anchor.append(_create_instance(api, loader, api.new("VkInstanceCreateInfo")))


def _create_instance(api: Api, loader: Functions, info: Any) -> Any:
    out = api.ffi.new("VkInstance *")
    try:
        check_call(loader, "vkCreateInstance", info, api.ffi.NULL, out)
    except DriverError as error:
        limits = "".join(f"; {name}={os.environ[name]}" for name in _LIMITS if name in os.environ)
        raise BackendUnavailableError(
            f"the Vulkan loader found no usable driver ({error}{limits}).",
            fix=f"VK_LOADER_DEBUG=error makes the loader print the reason. {install_vulkan()}",
        ) from error
    return out[0]


class _Context(VulkanContext):
    """A context that can present its handles as those of a device that is simulated on top of it."""

    presented_identity: DeviceIdentity | None = None

    @property
    def identity(self) -> DeviceIdentity:
        return self.presented_identity or super().identity


class VulkanDevice(NoCopy):
    """A VkDevice with one or two queues of a family; by default, of a family that supports compute."""

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
        self.vk.physical = physical  # it has cached the driver's answers
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
