"""The CUDA backend: versions, devices and capabilities. The other modules translate the rest of the contract."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from gpuinterop import system
from gpuinterop.backend import DeviceInfo, pci_bus_id
from gpuinterop.capabilities import Capability

from . import capabilities
from .allocations import Allocations
from .arrays import Arrays
from .driver import Context, Driver
from .graphs import Graphs
from .memory import Memory
from .multicast import Multicast
from .semaphores import Semaphores
from .sharing import Sharing
from .stream_memory import StreamMemory
from .streams import Streams

_WINDOWS = sys.platform.startswith("win")


class CudaBackend(Streams, Memory, Arrays, Semaphores, Allocations, Multicast, StreamMemory, Graphs, Sharing):
    """NVIDIA GPUs. Every device is used through its primary context, as torch, CuPy, JAX and numba do."""

    name = "cuda"
    priority = 20
    _infos: tuple[DeviceInfo, ...] | None = None
    pageable_copies_block: ClassVar[bool] = True
    releases_block: ClassVar[bool] = True

    def versions(self) -> Mapping[str, str]:
        major, minor = divmod(self._driver.version, 1000)
        found = {"CUDA": f"{major}.{minor // 10}", "cuda-bindings": self._driver.bindings_version}
        if kernel := _kernel_module():
            found["driver"] = kernel
        return found

    def libraries(self) -> Mapping[str, str]:
        path = system.loaded_library("libcuda.so")
        return {"libcuda": path} if path else {}

    def devices(self) -> Sequence[DeviceInfo]:
        if self._infos is None:  # a cached_property would make every later look at an attribute slower
            self._infos = tuple(map(self._info, range(self._driver.call("cuDeviceGetCount"))))
        return self._infos

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return capabilities.table(self._driver, ordinal)

    def open_device(self, ordinal: int) -> Context:
        return Context(self._driver, ordinal)

    def _info(self, ordinal: int) -> DeviceInfo:
        driver = self._driver
        device = driver.call("cuDeviceGet", ordinal)
        name = driver.call("cuDeviceGetName", 128, device)
        uuid = bytes(_uuid(driver, device))
        bus = driver.call("cuDeviceGetPCIBusId", 32, device)
        return DeviceInfo(
            ordinal=ordinal,
            name=_text(name),
            uuid=uuid,
            pci_bus_id=pci_bus_id(_text(bus)),
            luid=_luid(driver, device),
            dlpack=(2, ordinal),  # kDLCUDA
            array_interface="__cuda_array_interface__",
            note=_mig(driver, device, uuid),
        )


def _text(value: bytes) -> str:
    return value.partition(b"\0")[0].decode()


def _uuid(driver: Driver, device: object) -> bytes:
    """``cuDeviceGetUuid``. Under MIG it returns the instance's UUID, which other APIs do not know."""
    # 13.x has one function, which is the second version; 12.9 has both.
    call = "cuDeviceGetUuid_v2" if hasattr(driver.api, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    found: bytes = driver.call(call, device).bytes
    return found


def _mig(driver: Driver, device: object, uuid: bytes) -> str:
    """A note on MIG, or an empty one. The first version of the call still returns the whole GPU's UUID."""
    address = driver.address("cuDeviceGetUuid", 9020)
    if not address:
        return ""
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(address)
    whole = ctypes.create_string_buffer(16)
    if function(whole, int(device)) != 0 or whole.raw == uuid:  # type: ignore[call-overload]
        return ""
    return (
        f"a MIG instance of the GPU with UUID {whole.raw.hex()}: CUDA reports the instance's UUID, which Vulkan does "
        "not know, so it cannot match a Vulkan device"
    )


def _luid(driver: Driver, device: object) -> bytes | None:
    if not _WINDOWS:
        return None
    result = driver.status("cuDeviceGetLuid", device)
    return None if result[0] else bytes(result[1])[:8]


def _kernel_module() -> str:
    """The kernel module's version; empty if the system does not show it."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
