"""The HIP backend: versions, devices and capabilities. The other modules translate the rest of the contract."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from gpuinterop.backend import DeviceInfo, pci_bus_id
from gpuinterop.capabilities import Capability

from . import capabilities
from .arrays import Arrays
from .driver import Driver, Gpu, text_of, version_text
from .memory import Memory
from .semaphores import Semaphores
from .sharing import Sharing
from .stream_memory import StreamMemory
from .streams import Streams

_WINDOWS = sys.platform.startswith("win")
_LUID_OFFSET = 272  # in hipDeviceProp_t, behind name and uuid


class HipBackend(Streams, Memory, Arrays, Semaphores, Sharing, StreamMemory):
    """AMD GPUs, used through the runtime and each device's only context, as torch and CuPy on ROCm do."""

    name = "hip"
    priority = 10
    _infos: tuple[DeviceInfo, ...] | None = None
    pageable_copies_block: ClassVar[bool] = True
    synchronize_blocks_others: ClassVar[bool] = True  # ROCm/rocm-systems #11678
    releases_block: ClassVar[bool] = True
    releases_hold_gil = False  # ctypes releases the GIL
    releases_block_for_all: ClassVar[bool] = True  # hipFree waits for device 0, not the one that imported the memory
    map_allocation_blocks: ClassVar[bool] = True  # hipMemMap and hipMemUnmap go through the null stream

    def __init__(self) -> None:
        super().__init__()
        facts = self._driver.facts
        self.unknown_version, self.known_failures = facts.unknown, facts.failures
        self.holds_gil = not self._driver.is_new  # 7.2 keeps the GIL in every call, 10 releases it

    def versions(self) -> Mapping[str, str]:
        driver = self._driver
        return {
            "HIP": version_text(driver.version),
            "HIP driver": version_text(driver.call("hipDriverGetVersion")),
            "hip-python": driver.bindings_version,
        }

    def libraries(self) -> Mapping[str, str]:
        path = self._driver.library_file()
        return {"libamdhip64": path} if path else {}

    def devices(self) -> Sequence[DeviceInfo]:
        if self._infos is None:  # a cached_property would make every later look at an attribute slower
            self._infos = tuple(map(self._info, range(self._driver.call("hipGetDeviceCount"))))
        return self._infos

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return capabilities.table(self._driver, ordinal)

    def open_device(self, ordinal: int) -> Gpu:
        return Gpu(self._driver, ordinal, ordinal)

    def _info(self, ordinal: int) -> DeviceInfo:
        driver = self._driver
        return DeviceInfo(
            ordinal=ordinal,
            name=text_of(driver.call("hipDeviceGetName", 256, ordinal)),
            uuid=None,  # hipDeviceGetUuid returns another UUID than Vulkan (ROCm/hipamd #50)
            pci_bus_id=pci_bus_id(text_of(driver.call("hipDeviceGetPCIBusId", 32, ordinal))),
            luid=_luid(driver, ordinal) if _WINDOWS else None,
            dlpack=(10, ordinal),  # kDLROCM
            array_interface="__cuda_array_interface__",  # CuPy and torch on ROCm use it, too
            note="HIP's own UUID is not the one that Vulkan knows: it is matched by its PCI bus id",
        )


def _luid(driver: Driver, ordinal: int) -> bytes | None:
    """The LUID of ``hipGetDeviceProperties``, which is 8 zero bytes if it is not known."""
    if driver.is_new:
        properties: Any = driver.call("hipGetDeviceProperties", ordinal)
    else:
        properties = driver.api.hipDeviceProp_t()
        driver.call("hipGetDeviceProperties", properties, ordinal)
    found = ctypes.string_at(int(properties) + _LUID_OFFSET, 8)
    return found if any(found) else None
