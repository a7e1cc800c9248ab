"""The drivers that the Vulkan loader finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ... import system
from ..._arguments import check_int, check_type
from ...capabilities import Capabilities, Operation
from ...errors import BackendUnavailableError, DeviceNotFoundError, DriverError, GpuInteropError
from ...handles import DeviceIdentity, OpaqueFd
from ...vulkan._device import Instance
from ...vulkan._query import PhysicalDevice

__all__ = ["DriverList", "VulkanDriver", "choose", "list_drivers"]


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
