"""The Vulkan loader, and the drivers that it finds."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import system
from ..._arguments import NoCopy, check_int, check_type
from ...capabilities import Capabilities, Operation
from ...errors import (
    BackendUnavailableError,
    DeviceNotFoundError,
    DriverError,
    GpuInteropError,
)
from ...handles import DeviceIdentity, OpaqueFd
from ...vulkan._api import Api, Functions, check_call
from ...vulkan._query import PhysicalDevice

__all__ = ["DriverList", "Instance", "VulkanDriver", "choose", "list_drivers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VulkanDriver:
    """One physical device, for reports.

    Attributes
    ----------
    index : int
        Its place in the loader's order: what ``VulkanExporter(device_index=...)`` opens exactly this one with.
    name : str
        The device's name.
    driver, version : str
        The driver's name and version.
    identity : DeviceIdentity
    capabilities : Capabilities
        The table of :func:`gpuinterop.vulkan.capabilities`.
    endpoint_gap : str
        Why no bridge can use its timelines; empty if one can.
    """

    index: int
    name: str
    driver: str
    version: str
    identity: DeviceIdentity
    capabilities: Capabilities
    endpoint_gap: str


class DriverList(list[VulkanDriver]):
    """What :func:`list_drivers` found.

    Attributes
    ----------
    reason : str
        Why the list is empty, or what is wrong with a device that is missing from it; empty otherwise.
    """

    reason: str = ""


def list_drivers() -> DriverList:
    """List every physical device that the Vulkan loader finds. Never raises for want of Vulkan.

    Returns
    -------
    DriverList
        Empty, with its `reason`, where cffi, the loader or every driver is missing. A device whose driver
        fails is left out, and stands in the `reason`.
    """
    found = DriverList()
    try:
        with Instance() as instance:
            problems = []
            for index, physical in enumerate(instance.physical_devices()):
                label = f"physical device {index}"
                try:
                    label = physical.name
                    found.append(_describe(index, physical))
                except GpuInteropError as error:  # one broken driver must not hide the others
                    problems.append(f"{label}: {error}")
            found.reason = "; ".join(problems)
    except (BackendUnavailableError, DriverError) as error:
        found.reason = str(error)
    if not found and not found.reason:
        found.reason = f"the Vulkan loader lists no physical device. {system.install_vulkan()}"
    return found


def _describe(index: int, physical: PhysicalDevice) -> VulkanDriver:
    return VulkanDriver(
        index=index,
        name=physical.name,
        driver=physical.driver_name,
        version=physical.driver_version,
        identity=physical.identity,
        capabilities=physical.capabilities,
        endpoint_gap=physical.endpoint_gap,
    )


class Instance(NoCopy):
    """A VkInstance."""

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
"""The loader takes drivers from these variables alone, if one is set."""
_anchor: list[Any] = []
_anchor_lock = threading.Lock()


def _keep_drivers_loaded(api: Api, loader: Functions) -> None:
    """Keep one bare instance for the life of the process, so that the loader never unloads the drivers.

    NVIDIA's (580) can be loaded some thirty times in one process; then "cannot allocate memory in static TLS block"
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
            fix=f"With VK_LOADER_DEBUG=error the loader says what is wrong with a file. {system.install_vulkan()}",
        ) from error
    return out[0]


def choose(devices: Sequence[PhysicalDevice], driver: str | None, index: int | None) -> PhysicalDevice:
    """The physical device that `VulkanExporter` is asked for."""
    if index is not None:
        index = check_int(index, "device_index")
    matching = devices
    if driver is not None:
        # The driver known as "lavapipe" calls itself llvmpipe.
        wanted = check_type(driver, str, "driver", "a str").lower().replace("lavapipe", "llvmpipe")
        matching = [d for d in devices if wanted in f"{d.name}\n{d.driver_name}".lower()]
    elif index is None:

        def rank(device: PhysicalDevice) -> int:
            if not device.is_cpu:
                return 0
            return 1 if device.capabilities.supports((Operation.IMPORT_SEMAPHORE, OpaqueFd)) else 2

        matching = sorted(devices, key=rank)
    position = index or 0
    if not 0 <= position < len(matching):
        names = ", ".join(f"{d.name!r} ({d.driver_name})" for d in devices) or "none"
        wanted = f"driver {driver!r}, device_index {position}" if driver else f"device_index {position}"
        raise DeviceNotFoundError(f"no Vulkan device for {wanted}; the loader finds: {names}.")
    return matching[position]
