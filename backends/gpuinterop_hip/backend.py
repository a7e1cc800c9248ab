"""The HIP backend: versions, devices and capabilities. The other modules contain HIP's specifics."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping
from typing import ClassVar

from gpuinterop.capabilities import Capability
from gpuinterop.native_driver.memory import NativeStreamMemory

from . import capabilities
from .driver import Driver, Gpu, version_text
from .memory import Memory
from .semaphores import Semaphores
from .sharing import Sharing

_PROPERTIES_BYTES, _LUID_OFFSET = 4096, 272  # larger than hipDeviceProp_t; the LUID is after name and uuid


class HipBackend(Semaphores, Memory, Sharing, NativeStreamMemory):
    """AMD GPUs, used through the runtime and each device's only context, like torch and CuPy on ROCm.

    AMD documents `NativeStreamMemory` for memory of ``hipMallocSignalMemory``. By default a wait is a kernel of one
    thread that spins on any address known to HIP, so pinned host memory should work; no AMD GPU has shown it yet. With
    ``GPU_STREAMOPS_CP_WAIT=1`` the command processor waits, and accepts only signal memory.
    """

    name = "hip"
    priority = 10
    driver_type: ClassVar[type[Driver]] = Driver
    synchronize_blocks_others: ClassVar[bool] = True  # ROCm/rocm-systems #11678
    releases_block_for_all: ClassVar[bool] = True  # hipFree waits for device 0, not for the importing device
    map_allocation_blocks: ClassVar[bool] = True  # hipMemMap and hipMemUnmap use the null stream

    def __init__(self) -> None:
        super().__init__()
        facts = self._driver.facts
        self.unknown_version, self.known_failures = facts.unknown, facts.failures

    def versions(self) -> Mapping[str, str]:
        driver = self._driver
        return {
            "HIP": version_text(driver.version),
            "HIP driver": version_text(driver.ask("DriverGetVersion")),
            "hip-python": driver.bindings_version,
        }

    def libraries(self) -> Mapping[str, str]:
        path = self._driver.library_file()
        return {"libamdhip64": path} if path else {}

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return capabilities.table(self._driver, ordinal)

    def open_device(self, ordinal: int) -> Gpu:
        return Gpu(self._driver, ordinal, ordinal)

    def identity(self, device: int) -> tuple[bytes | None, bytes | None, str]:
        """No UUID, because ``hipDeviceGetUuid`` returns a different one than Vulkan (ROCm/hipamd #50)."""
        luid = _luid(self._driver, device) if sys.platform == "win32" else None
        return None, luid, "HIP's UUID differs from Vulkan's, so the PCI bus id matches the device"


def _luid(driver: Driver, ordinal: int) -> bytes | None:
    """The LUID from ``hipGetDeviceProperties``. Eight zero bytes mean unknown."""
    properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
    driver.call("GetDevicePropertiesR0600", properties, ordinal)
    luid = properties.raw[_LUID_OFFSET : _LUID_OFFSET + 8]
    return luid if any(luid) else None
