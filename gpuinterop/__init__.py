"""Share GPU memory and semaphores between Vulkan or Direct3D, other processes, and CUDA or HIP compute.

Importing this reads no environment, touches no driver and imports neither NumPy nor a vendor's binding: names are
loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = ("backend", "capabilities", "errors", "handles", "handoff", "ipc", "vulkan")
_NAMES = {
    "gpuinterop._core.allocation": ("Allocation",),
    "gpuinterop._core.array": ("ArrayLevel", "MipmappedArray"),
    "gpuinterop._core.device": ("Device",),
    "gpuinterop._core.interchange": ("View",),
    "gpuinterop._core.memory": ("Buffer", "ExternalMemory"),
    "gpuinterop._core.registry": (
        "InstalledBackend", "LoadedBackend", "backends", "device", "devices", "get_backend", "match_device",
    ),
    "gpuinterop._core.semaphore": ("ExternalSemaphore", "SemaphoreBatch"),
    "gpuinterop._core.stream": ("Event", "Stream"),
    "gpuinterop.capabilities": ("Capabilities", "Capability", "Cell", "Operation", "Scope", "Support"),
    "gpuinterop.errors": (
        "ArgumentTypeError", "BackendNotFoundError", "BackendUnavailableError", "DeviceNotFoundError", "DriverError",
        "GpuInteropError", "HandleError", "InvalidArgumentError", "LeakedResourceWarning", "OutOfMemoryError",
        "PeerError", "ResourceBusyError", "ResourceClosedError", "SemaphoreTimeoutError", "UnsupportedError",
    ),
    "gpuinterop.handles": (
        "Binary", "D3D11Fence", "D3D11Resource", "D3D11ResourceKmt", "D3D12Fence", "D3D12Heap", "D3D12Resource",
        "DeviceIdentity", "DmaBufFd", "DrmSyncobjFd", "EventFd", "FabricHandle", "Fence", "HandleOrigin", "Keyed",
        "KeyedMutex", "KeyedMutexKmt", "NvSciBuf", "NvSciSync", "OpaqueFd", "OpaqueWin32", "OpaqueWin32Kmt",
        "SciSync", "SyncFd", "Timeline", "TimelineFd", "TimelineWin32", "VmmFd",
    ),
    "gpuinterop.handoff": ("Handoff",),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_MODULES, *_HOME]  # noqa: PLE0604 - every entry is a str

if TYPE_CHECKING:
    from . import backend, capabilities, errors, handles, handoff, ipc, vulkan
    from ._core.allocation import Allocation
    from ._core.array import ArrayLevel, MipmappedArray
    from ._core.device import Device
    from ._core.interchange import View
    from ._core.memory import Buffer, ExternalMemory
    from ._core.registry import (
        InstalledBackend,
        LoadedBackend,
        backends,
        device,
        devices,
        get_backend,
        match_device,
    )
    from ._core.semaphore import ExternalSemaphore, SemaphoreBatch
    from ._core.stream import Event, Stream
    from .capabilities import Capabilities, Capability, Cell, Operation, Scope, Support
    from .errors import *
    from .handles import (
        Binary,
        D3D11Fence,
        D3D11Resource,
        D3D11ResourceKmt,
        D3D12Fence,
        D3D12Heap,
        D3D12Resource,
        DeviceIdentity,
        DmaBufFd,
        DrmSyncobjFd,
        EventFd,
        FabricHandle,
        Fence,
        HandleOrigin,
        Keyed,
        KeyedMutex,
        KeyedMutexKmt,
        NvSciBuf,
        NvSciSync,
        OpaqueFd,
        OpaqueWin32,
        OpaqueWin32Kmt,
        SciSync,
        SyncFd,
        Timeline,
        TimelineFd,
        TimelineWin32,
        VmmFd,
    )
    from .handoff import Handoff


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
