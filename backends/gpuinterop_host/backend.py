"""The host backend: one module per part of the contract, and the description of the machine."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from gpuinterop import system
from gpuinterop.backend import DeviceInfo
from gpuinterop.capabilities import Capability
from gpuinterop.errors import BackendUnavailableError

from . import capabilities
from .allocations import Allocations
from .memory import Memory
from .semaphores import Semaphores
from .sharing import Sharing
from .stream_memory import StreamMemory
from .streams import Device as Device, Streams


class HostBackend(Streams, Memory, Semaphores, Allocations, StreamMemory, Sharing):
    """The CPU as a device. Streams are threads; memory and semaphores are memfds that other processes share."""

    name = "host"
    priority = -1
    pageable_copies_block: ClassVar[bool] = False  # the worker thread copies any memory
    survives_fork: ClassVar[bool] = True

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise BackendUnavailableError(
                f"the host backend needs memfds and futexes, which {sys.platform} does not have.",
                fix="Use it on Linux.",
            )
        self._info = DeviceInfo(
            ordinal=0, name=_cpu_name(), is_cpu=True, dlpack=(1, 0), array_interface="__array_interface__"
        )

    def versions(self) -> Mapping[str, str]:
        return {
            "python": platform.python_version(),
            "libc": " ".join(platform.libc_ver()).strip(),
            "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        }

    def libraries(self) -> Mapping[str, str]:
        path = system.loaded_library("libc.so", "libc-", "ld-musl")
        return {"libc": path} if path else {}

    def devices(self) -> Sequence[DeviceInfo]:
        return (self._info,)

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return capabilities.table()

    def open_device(self, ordinal: int) -> Device:
        return Device(ordinal)


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "CPU"
