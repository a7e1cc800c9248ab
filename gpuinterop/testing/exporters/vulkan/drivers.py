"""The drivers that the Vulkan loader finds."""

from __future__ import annotations

from collections.abc import Sequence

from ...._arguments import check_int, check_type
from ....capabilities import Operation
from ....errors import BackendUnavailableError, DeviceNotFoundError, DriverError
from ....graphics.modes import mode_gaps
from ....handles import OpaqueFd
from ....installing import install_vulkan
from ....vulkan._device import Instance
from ....vulkan._query import PhysicalDevice
from ..base import Driver, DriverList

__all__ = ["choose", "list_drivers"]


def list_drivers() -> DriverList:
    """List every physical device that the Vulkan loader finds. Never raises because Vulkan is missing.

    A device whose driver fails is left out, and the list's `reason` names it. `reason` also explains why it is empty.
    """
    found = DriverList()
    try:
        with Instance() as instance:
            for index, physical in enumerate(instance.physical_devices()):
                with found.noting(f"physical device {index}"), found.noting(physical.name):
                    found.append(_describe(index, physical))
    except (BackendUnavailableError, DriverError) as error:
        found.reason = str(error)
    if not found and not found.reason:
        found.reason = f"the Vulkan loader lists no physical device. {install_vulkan()}"
    return found


def _describe(index: int, physical: PhysicalDevice) -> Driver:
    return Driver(
        api="vulkan",
        index=index,
        name=physical.name,
        driver=physical.driver_name,
        version=physical.driver_version,
        identity=physical.identity,
        capabilities=physical.capabilities,
        endpoint_gap=physical.endpoint_gap,
        gaps=mode_gaps,
    )


def choose(devices: Sequence[PhysicalDevice], driver: str | None, index: int | None) -> PhysicalDevice:
    """Choose the physical device for `VulkanExporter`'s arguments."""
    if index is not None:
        index = check_int(index, "device_index")
    matching = devices
    if driver is not None:
        # lavapipe's driver reports the name llvmpipe.
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
