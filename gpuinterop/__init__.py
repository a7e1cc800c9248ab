"""Share GPU memory and semaphores between Vulkan, OpenGL or Direct3D, other processes, and CUDA or HIP compute.

Importing it reads no environment variables, uses no driver, and imports neither NumPy nor a vendor's bindings. Names
are loaded on first use.
"""

from __future__ import annotations

import atexit
import sys
from importlib import import_module

TYPE_CHECKING = False  # type checkers assume True; importing `typing` would take longer than all else here

__version__: str
"""Version of the installed library; ``0.0+unknown`` for a folder on Python's path that is not installed.

Examples
--------
>>> gi.__version__.split(".")[0]
'0'
"""

_MODULES = (
    "backend", "bridge", "capabilities", "errors", "exchange", "handles", "handoff", "ipc", "opengl", "sharing",
    "vulkan",
)  # fmt: skip
_NAMES = {
    "gpuinterop._core.allocation": ("Allocation", "DeviceArray"),
    "gpuinterop._core.image": ("ArrayLevel", "MipmappedArray"),
    "gpuinterop._core.device": ("Device",),
    "gpuinterop._core.graph": ("Graph", "GraphSemaphores", "GraphStep"),
    "gpuinterop._core.view": ("View",),
    "gpuinterop._core.memory": ("Buffer", "ExternalMemory"),
    "gpuinterop._core.multicast": (
        "MulticastBinding", "MulticastMapping", "MulticastObject", "create_multicast", "import_multicast",
    ),
    "gpuinterop._core.discovery": (
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
        "ArrayUsage", "Binary", "D3D11Fence", "D3D11Resource", "D3D11ResourceKmt", "D3D12Fence", "D3D12Heap",
        "D3D12Resource",
        "DeviceIdentity", "DmaBufFd", "DrmSyncobjFd", "EventFd", "FabricHandle", "Fence", "Granularity", "HandleOrigin",
        "IpcMemHandle", "Keyed", "KeyedMutex", "KeyedMutexKmt", "NvSciBuf", "NvSciSync", "OpaqueFd", "OpaqueWin32",
        "OpaqueWin32Kmt", "SciSync", "SyncFd", "Timeline", "TimelineFd", "TimelineWin32", "VmmFd",
    ),
    "gpuinterop.handoff": ("Handoff",),
    "gpuinterop.sharing": (
        "ArrayShare", "AttachedArrays", "Frame", "Publisher", "Subscription", "attach", "publish", "share", "subscribe",
    ),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_MODULES, *_HOME]  # noqa: PLE0604 - every entry is a str

if TYPE_CHECKING:
    from typing import Any

    # For type checkers; a test in tests/core checks that this list equals _NAMES.
    from . import (
        backend as backend,
        bridge as bridge,
        capabilities as capabilities,
        errors as errors,
        exchange as exchange,
        handles as handles,
        handoff as handoff,
        ipc as ipc,
        opengl as opengl,
        sharing as sharing,
        vulkan as vulkan,
    )
    from ._core.allocation import Allocation as Allocation, DeviceArray as DeviceArray
    from ._core.device import Device as Device
    from ._core.discovery import (
        InstalledBackend as InstalledBackend,
        LoadedBackend as LoadedBackend,
        backends as backends,
        device as device,
        devices as devices,
        get_backend as get_backend,
        match_device as match_device,
    )
    from ._core.graph import Graph as Graph, GraphSemaphores as GraphSemaphores, GraphStep as GraphStep
    from ._core.image import ArrayLevel as ArrayLevel, MipmappedArray as MipmappedArray
    from ._core.memory import Buffer as Buffer, ExternalMemory as ExternalMemory
    from ._core.multicast import (
        MulticastBinding as MulticastBinding,
        MulticastMapping as MulticastMapping,
        MulticastObject as MulticastObject,
        create_multicast as create_multicast,
        import_multicast as import_multicast,
    )
    from ._core.semaphore import ExternalSemaphore as ExternalSemaphore, SemaphoreBatch as SemaphoreBatch
    from ._core.stream import Event as Event, Stream as Stream
    from ._core.view import View as View
    from .capabilities import (
        Capabilities as Capabilities,
        Capability as Capability,
        Cell as Cell,
        Operation as Operation,
        Scope as Scope,
        Support as Support,
    )
    from .errors import (
        ArgumentTypeError as ArgumentTypeError,
        BackendNotFoundError as BackendNotFoundError,
        BackendUnavailableError as BackendUnavailableError,
        DeviceNotFoundError as DeviceNotFoundError,
        DriverError as DriverError,
        GpuInteropError as GpuInteropError,
        HandleError as HandleError,
        InvalidArgumentError as InvalidArgumentError,
        LeakedResourceWarning as LeakedResourceWarning,
        OutOfMemoryError as OutOfMemoryError,
        PeerError as PeerError,
        ResourceBusyError as ResourceBusyError,
        ResourceClosedError as ResourceClosedError,
        SemaphoreTimeoutError as SemaphoreTimeoutError,
        UnsupportedError as UnsupportedError,
    )
    from .handles import (
        ArrayUsage as ArrayUsage,
        Binary as Binary,
        D3D11Fence as D3D11Fence,
        D3D11Resource as D3D11Resource,
        D3D11ResourceKmt as D3D11ResourceKmt,
        D3D12Fence as D3D12Fence,
        D3D12Heap as D3D12Heap,
        D3D12Resource as D3D12Resource,
        DeviceIdentity as DeviceIdentity,
        DmaBufFd as DmaBufFd,
        DrmSyncobjFd as DrmSyncobjFd,
        EventFd as EventFd,
        FabricHandle as FabricHandle,
        Fence as Fence,
        Granularity as Granularity,
        HandleOrigin as HandleOrigin,
        IpcMemHandle as IpcMemHandle,
        Keyed as Keyed,
        KeyedMutex as KeyedMutex,
        KeyedMutexKmt as KeyedMutexKmt,
        NvSciBuf as NvSciBuf,
        NvSciSync as NvSciSync,
        OpaqueFd as OpaqueFd,
        OpaqueWin32 as OpaqueWin32,
        OpaqueWin32Kmt as OpaqueWin32Kmt,
        SciSync as SciSync,
        SyncFd as SyncFd,
        Timeline as Timeline,
        TimelineFd as TimelineFd,
        TimelineWin32 as TimelineWin32,
        VmmFd as VmmFd,
    )
    from .handoff import Handoff as Handoff
    from .sharing import (
        ArrayShare as ArrayShare,
        AttachedArrays as AttachedArrays,
        Frame as Frame,
        Publisher as Publisher,
        Subscription as Subscription,
        attach as attach,
        publish as publish,
        share as share,
        subscribe as subscribe,
    )


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # this import takes longer than all of `import gpuinterop`

        try:
            return metadata.version(__name__)
        except metadata.PackageNotFoundError:
            return "0.0+unknown"
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


@atexit.register
def _tell_open() -> None:
    """Warn about open objects. Registered here, so that the program's exit handlers run before and can close them."""
    release = sys.modules.get(f"{__name__}._core.release")
    if release is not None and (left := release.open_at_exit()):
        release.warn_leak(left)
