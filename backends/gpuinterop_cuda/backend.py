"""The CUDA backend: versions, devices and capabilities. The other modules contain CUDA's specifics."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from gpuinterop import system
from gpuinterop.capabilities import Capability
from gpuinterop.native_driver.memory import NativeStreamMemory
from gpuinterop.native_driver.semaphores import NativeSemaphores

from . import capabilities
from .arrays import Arrays
from .driver import Context, Driver
from .graphs import Graphs
from .multicast import Multicast
from .sharing import Sharing
from .streams import Streams


class CudaBackend(Streams, Arrays, NativeSemaphores, Sharing, Multicast, NativeStreamMemory, Graphs):
    """NVIDIA GPUs. Each device uses its primary context, like torch, CuPy, JAX and numba."""

    name = "cuda"
    priority = 20
    driver_type: ClassVar[type[Driver]] = Driver

    def versions(self) -> Mapping[str, str]:
        major, minor = divmod(self._driver.version, 1000)
        versions = {"CUDA": f"{major}.{minor // 10}", "cuda-bindings": self._driver.bindings_version}
        if kernel := _kernel_module():
            versions["driver"] = kernel
        return versions

    def libraries(self) -> Mapping[str, str]:
        path = system.loaded_library("libcuda.so")
        return {"libcuda": path} if path else {}

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return capabilities.table(self._driver, ordinal)

    def open_device(self, ordinal: int) -> Context:
        return Context(self._driver, ordinal)

    def number(self, ordinal: int) -> int:
        """``cuDeviceGet``."""
        return int(self._driver.ask("DeviceGet", ordinal))

    def identity(self, device: int) -> tuple[bytes | None, bytes | None, str]:
        """``cuDeviceGetUuid``. Under MIG it returns the instance's UUID, which other APIs do not have."""
        driver = self._driver
        uuid, luid, mask = ctypes.create_string_buffer(16), ctypes.create_string_buffer(8), ctypes.c_uint()
        driver.call("DeviceGetUuid", uuid, device)
        known = sys.platform == "win32" and not driver.status("DeviceGetLuid", luid, ctypes.byref(mask), device)
        return uuid.raw, luid.raw if known else None, _mig(driver, device, uuid.raw)


def _mig(driver: Driver, device: int, uuid: bytes) -> str:
    """A note if the device is a MIG instance. The call's first version still returns the whole GPU's UUID."""
    address = driver.address("cuDeviceGetUuid", 9020)
    gpu_uuid = ctypes.create_string_buffer(16)
    if not address or ctypes.CFUNCTYPE(ctypes.c_int)(address)(gpu_uuid, device) != 0 or gpu_uuid.raw == uuid:
        return ""
    return (
        f"a MIG instance of the GPU with UUID {gpu_uuid.raw.hex()}: CUDA reports the instance's UUID, which Vulkan "
        "does not have, so it cannot match a Vulkan device"
    )


def _kernel_module() -> str:
    """The kernel module's version; empty if the system does not show it."""
    with suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii", errors="replace").strip()
    return ""
