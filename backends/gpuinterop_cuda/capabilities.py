"""The capability table: device attributes, symbol probes and the platform. Asking creates no context."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterable
from typing import Final

from gpuinterop import handles as h
from gpuinterop.capabilities import DOMAIN, MULTICAST, Capability, Cell, Operation, Scope

from .driver import Driver

_DOC = "CUDA driver API: "
_EXTERNAL: Final = _DOC + "External Resource Interoperability"
_VMM: Final = _DOC + "Virtual Memory Management"
_MULTICAST_DOC: Final = _DOC + "Multicast Object Management"
_PEERS: Final = "one allocation that each device maps: Device.allocate(size, access=peers)."

_MEMORY = {Operation.IMPORT_MEMORY, Operation.MAP_BUFFER, Operation.MAP_MIPMAPPED_ARRAY}
_SEMAPHORE = {Operation.IMPORT_SEMAPHORE, Operation.SIGNAL_SEMAPHORE, Operation.WAIT_SEMAPHORE}
_ALLOCATION = {Operation.EXPORT_ALLOCATION, Operation.IMPORT_ALLOCATION}
_KEYED = (h.KeyedMutex, h.KeyedMutexKmt)
_NVSCI = (h.NvSciBuf, h.NvSciSync)

# CUdevice_attribute by number: bindings older than the driver have no name for the later ones, and a driver older than
# the attribute says INVALID_VALUE, which is read as no.
_INTEGRATED, _MAJOR = 18, 75
_VMM_SUPPORTED, _HANDLE_FD, _HANDLE_WIN32, _HANDLE_KMT, _HANDLE_FABRIC = 102, 103, 104, 105, 128
_TIMELINE = 114
_STREAM_WORDS = 122
_MULTICAST_SUPPORTED = 132

_MULTICAST_SYMBOLS: Final = (
    "cuMulticastGetGranularity",
    "cuMulticastCreate",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMulticastBindAddr",
    "cuMulticastUnbind",
    "cuMemMap",
    "cuMemSetAccess",
)
_SYMBOLS: Final = {
    Operation.IMPORT_MEMORY: ("cuImportExternalMemory", "cuDestroyExternalMemory"),
    Operation.MAP_BUFFER: ("cuExternalMemoryGetMappedBuffer",),
    Operation.MAP_MIPMAPPED_ARRAY: ("cuExternalMemoryGetMappedMipmappedArray", "cuMemcpy3DAsync"),
    Operation.IMPORT_SEMAPHORE: ("cuImportExternalSemaphore", "cuDestroyExternalSemaphore"),
    Operation.SIGNAL_SEMAPHORE: ("cuSignalExternalSemaphoresAsync",),
    Operation.WAIT_SEMAPHORE: ("cuWaitExternalSemaphoresAsync",),
    Operation.EXPORT_ALLOCATION: ("cuMemCreate", "cuMemExportToShareableHandle", "cuMemSetAccess"),
    Operation.IMPORT_ALLOCATION: ("cuMemImportFromShareableHandle", "cuMemSetAccess"),
    Operation.CREATE_MULTICAST: _MULTICAST_SYMBOLS,
    Operation.EXPORT_MULTICAST: (*_MULTICAST_SYMBOLS, "cuMemExportToShareableHandle"),
    Operation.IMPORT_MULTICAST: (*_MULTICAST_SYMBOLS, "cuMemImportFromShareableHandle"),
    Operation.STREAM_MEMORY_OPS: (
        "cuMemHostRegister",
        "cuMemHostGetDevicePointer",
        "cuStreamWriteValue64",
        "cuStreamWaitValue64",
    ),
    Operation.CREATE_SEMAPHORE: ("cuMemHostRegister", "cuStreamWriteValue64", "cuStreamWaitValue64"),
    Operation.GRAPH_CAPTURE: (
        "cuStreamBeginCapture",
        "cuGraphInstantiate",
        "cuGraphLaunch",
        "cuGraphExternalSemaphoresSignalNodeGetParams",
        "cuGraphExternalSemaphoresWaitNodeGetParams",
        "cuGraphExecExternalSemaphoresSignalNodeSetParams",
        "cuGraphExecExternalSemaphoresWaitNodeSetParams",
    ),
}


class _Probe:
    """What the driver says of one device."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver = driver
        self._device = driver.call("cuDeviceGet", ordinal)
        self.windows = sys.platform == "win32"
        self.integrated = self.attribute(_INTEGRATED) != 0

    def attribute(self, number: int) -> int:
        """0 for one that the driver does not know."""
        try:
            wanted = self._driver.api.CUdevice_attribute(number)
        except ValueError:
            return 0
        result = self._driver.status("cuDeviceGetAttribute", wanted, self._device)
        return 0 if result[0] else int(result[1])

    def missing(self, symbols: Iterable[str]) -> list[str]:
        return [symbol for symbol in symbols if not self._driver.has(symbol)]

    @property
    def has_dma_buf_type(self) -> bool:
        """Whether the bindings know the type: from 13.0 on."""
        return hasattr(self._driver.api.CUexternalMemoryHandleType, "CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD")


def table(driver: Driver, ordinal: int) -> list[Capability]:
    """Every cell of DOMAIN."""
    probe = _Probe(driver, ordinal)
    return [_capability(cell, probe) for cell in DOMAIN]


def _capability(cell: Cell, probe: _Probe) -> Capability:
    operation = cell.operation
    if missing := probe.missing(_SYMBOLS.get(operation, ())):
        reference = _MULTICAST_DOC if operation in MULTICAST else _VMM if operation in _ALLOCATION else _EXTERNAL
        return cell.gap(
            Scope.DRIVER, f"the driver lacks {', '.join(missing)}.", reference, "install a newer NVIDIA driver."
        )
    if operation in MULTICAST:
        return _multicast(cell, probe)
    if operation is Operation.STREAM_MEMORY_OPS:
        return _words(cell, probe)
    if operation is Operation.CREATE_SEMAPHORE:
        return _created(cell, probe)
    if operation is Operation.GRAPH_CAPTURE:
        return _usable(cell, "signals and waits are captured as nodes", _DOC + "Graph Management")
    if operation in _ALLOCATION:
        return _allocation(cell, probe)
    if operation is Operation.WAIT_TIMEOUT and cell.handle_type not in _KEYED:
        return cell.gap(
            Scope.RUNTIME,
            "CUDA has a time-out for keyed mutexes only; any other wait ends with its signal.",
            _DOC + "cuWaitExternalSemaphoresAsync",
            "Stream.synchronize(timeout=...) names what a stream waits for.",
        )
    return _external(cell, probe)


def _external(cell: Cell, probe: _Probe) -> Capability:
    """External memory and semaphores, by handle type."""
    operation, kind = cell.operation, cell.handle_type
    assert kind is not None
    if kind is h.DmaBufFd:
        return _dma_buf(cell, probe)
    if kind in _NVSCI:
        if probe.integrated and not probe.windows:
            return _usable(cell, "an integrated GPU with NvSci", "NVIDIA DriveOS: NvStreams")
        return cell.gap(
            Scope.PLATFORM,
            "NvSci exists on NVIDIA's embedded platforms (DRIVE OS, Jetson) only; the driver here says NOT_SUPPORTED.",
            "NVIDIA DriveOS: NvStreams",
            "OpaqueFd memory, TimelineFd semaphores.",
        )
    if issubclass(kind, h.FdHandle):
        if probe.windows:
            return cell.gap(
                Scope.PLATFORM, "Windows has no file descriptors to share.", _EXTERNAL, "OpaqueWin32, TimelineWin32."
            )
    elif not probe.windows:
        return cell.gap(
            Scope.PLATFORM,
            "Win32 and Direct3D handles exist on Windows only; the driver says NOT_SUPPORTED here.",
            _EXTERNAL,
            "OpaqueFd memory, OpaqueFd and TimelineFd semaphores.",
        )
    if kind in (h.TimelineFd, h.TimelineWin32) and not probe.attribute(_TIMELINE):
        return cell.gap(
            Scope.DEVICE,
            "the device says that it has no interop with timeline semaphores (attribute 114 is 0).",
            _DOC + "CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED",
            "binary semaphores, one each way.",
        )
    if operation is Operation.MAP_MIPMAPPED_ARRAY and kind is h.D3D12Heap:
        return _usable(cell, "as any mapped array; the image's offset in the heap is given", _EXTERNAL)
    return _usable(cell, "the driver documents this type", _EXTERNAL)


def _dma_buf(cell: Cell, probe: _Probe) -> Capability:
    if cell.operation is Operation.MAP_MIPMAPPED_ARRAY:
        return cell.gap(
            Scope.RUNTIME,
            "CUDA maps dma-bufs as buffers only.",
            _DOC + "CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD",
            "export the image's memory as OpaqueFd.",
        )
    if probe.windows or not probe.integrated or probe.attribute(_MAJOR) < 10:
        return cell.gap(
            Scope.PLATFORM,
            "CUDA imports dma-bufs on Tegra from Thor on; on discrete GPUs the driver says NOT_SUPPORTED.",
            _DOC + "CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD",
            "export the memory as OpaqueFd; the Vulkan driver of the same GPU can.",
        )
    if not probe.has_dma_buf_type:
        return cell.gap(
            Scope.BINDINGS,
            "cuda-bindings before 13.0 has no name for dma-bufs.",
            _DOC + "CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD",
            "pip install 'cuda-bindings>=13'.",
        )
    return _usable(cell, "an integrated GPU from Thor on", _DOC + "CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD")


def _words(cell: Cell, probe: _Probe) -> Capability:
    if not probe.attribute(_STREAM_WORDS):
        return cell.gap(
            Scope.DEVICE,
            "the device says that its streams cannot wait for 64-bit words (attribute 122 is 0).",
            _DOC + "CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS",
            "a timeline semaphore of Vulkan's or Direct3D's.",
        )
    return _usable(cell, "the device's attributes say so", _DOC + "Stream Memory Operations")


def _created(cell: Cell, probe: _Probe) -> Capability:
    if cell.handle_type is not h.TimelineFd:
        return cell.gap(
            Scope.RUNTIME,
            "CUDA imports semaphores and makes none; a word that streams write makes a timeline, which only grows.",
            _EXTERNAL,
            "create_semaphore(TimelineFd); or make it with Vulkan or Direct3D and import it.",
        )
    if probe.windows:
        return cell.gap(
            Scope.PLATFORM,
            "our own timeline is a page in a memfd, which Windows does not have.",
            "gpuinterop.timeline",
            "make it with Vulkan or Direct3D and import it (gpuinterop.vulkan.share_semaphore).",
        )
    words = _words(cell, probe)
    return words if not words else _usable(cell, "a word that streams write and wait for", "gpuinterop.timeline")


def _allocation(cell: Cell, probe: _Probe) -> Capability:
    if not probe.attribute(_VMM_SUPPORTED):
        return cell.gap(
            Scope.DEVICE,
            "the device has no virtual memory management (attribute 102 is 0).",
            _VMM,
            "memory that Vulkan allocates and exports (gpuinterop.vulkan.share_buffer).",
        )
    gap = _handle_gap(cell, probe)
    return _usable(cell, "the device's attributes say so", _VMM) if gap is None else gap


def _multicast(cell: Cell, probe: _Probe) -> Capability:
    if not probe.attribute(_MULTICAST_SUPPORTED):
        return cell.gap(
            Scope.DEVICE,
            "the device says that it has no multicast (attribute 132 is 0): that takes a GPU from Hopper on behind an "
            "NVSwitch, and no MIG.",
            _DOC + "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED",
            _PEERS,
        )
    gap = _handle_gap(cell, probe) if cell.handle_type is not None else None
    if gap is not None:
        return gap
    return _usable(
        cell,
        "the device's attribute 132 says so, which does not prove that it works (the fabric manager may be unwell, "
        "confidential computing forbids it): `gpuinterop selftest multicast` does",
        _MULTICAST_DOC,
    )


def _handle_gap(cell: Cell, probe: _Probe) -> Capability | None:
    """Why memory and multicast objects are not shared as handles of the cell's type, if they are not."""
    kind = cell.handle_type
    assert kind is not None
    numbers = {h.VmmFd: _HANDLE_FD, h.OpaqueWin32: _HANDLE_WIN32, h.OpaqueWin32Kmt: _HANDLE_KMT}
    number = numbers.get(kind, _HANDLE_FABRIC)
    if not probe.attribute(number):
        return cell.gap(
            Scope.DEVICE if kind is h.FabricHandle else Scope.PLATFORM,
            f"the device says that it makes no such handles (attribute {number} is 0).",
            _VMM,
            "OpaqueWin32." if probe.windows else "VmmFd, within one machine.",
        )
    if kind is h.FabricHandle and not probe.windows and not imex_channel():
        return cell.gap(
            Scope.PLATFORM,
            "fabric handles need an IMEX channel, and none in /dev/nvidia-caps-imex-channels is open to this process.",
            "NVIDIA IMEX service documentation: IMEX channels",
            "have the administrator create a channel; VmmFd works within one machine.",
        )
    return None


def imex_channel() -> bool:
    """Whether an IMEX channel is open to this process."""
    return any(os.access(path, os.R_OK | os.W_OK) for path in glob.glob("/dev/nvidia-caps-imex-channels/channel*"))


def _usable(cell: Cell, what: str, reference: str) -> Capability:
    return cell.unverified(Scope.PLATFORM, f"{what}.", reference)
