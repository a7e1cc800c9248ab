"""The capability table: device attributes, symbol probes, environment and platform. Asking makes no device current.

No AMD GPU has run this project: whatever is usable here is so on AMD's word, or on that of those who have tried.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from gpuinterop import handles as h
from gpuinterop.capabilities import DOMAIN, MULTICAST, Capability, Cell, Operation, Scope

from . import descriptors
from .driver import Driver, install

_DOC: Final = "HIP runtime API: "
_EXTERNAL: Final = _DOC + "External Resource Interoperability"
_VMM: Final = _DOC + "Virtual Memory Management"
_WORDS: Final = _DOC + "Stream Memory Operations"
_BRIDGE: Final = (
    "gpuinterop.bridge.Bridge(device) imports the other side's semaphore and keeps streams in order with it."
)

_ALLOCATION = {Operation.EXPORT_ALLOCATION, Operation.IMPORT_ALLOCATION}
_SEMAPHORE = {
    Operation.IMPORT_SEMAPHORE,
    Operation.SIGNAL_SEMAPHORE,
    Operation.WAIT_SEMAPHORE,
    Operation.WAIT_TIMEOUT,
}
_MEMORY = {Operation.IMPORT_MEMORY, Operation.MAP_BUFFER, Operation.MAP_MIPMAPPED_ARRAY}
_ARRAY_SYMBOL: Final = "hipExternalMemoryGetMappedMipmappedArray"

# hipDeviceAttribute_t by number: bindings older than the runtime have no name for the later ones, and a runtime older
# than the attribute says hipErrorInvalidValue, which is read as no.
_VMM_SUPPORTED, _FABRIC, _WAIT_VALUE = 89, 95, 10013

_MAPPING: Final = (
    "hipMemAddressReserve",
    "hipMemMap",
    "hipMemUnmap",
    "hipMemSetAccess",
    "hipMemRelease",
)
_SYMBOLS: Final[Mapping[Operation, tuple[str, tuple[str, ...]]]] = {
    Operation.IMPORT_MEMORY: (_EXTERNAL, ("hipImportExternalMemory", "hipDestroyExternalMemory")),
    Operation.MAP_BUFFER: (_EXTERNAL, ("hipExternalMemoryGetMappedBuffer",)),
    Operation.IMPORT_SEMAPHORE: (_EXTERNAL, ("hipImportExternalSemaphore", "hipDestroyExternalSemaphore")),
    Operation.SIGNAL_SEMAPHORE: (_EXTERNAL, ("hipSignalExternalSemaphoresAsync",)),
    Operation.WAIT_SEMAPHORE: (_EXTERNAL, ("hipWaitExternalSemaphoresAsync",)),
    Operation.EXPORT_ALLOCATION: (
        _VMM,
        ("hipMemGetAllocationGranularity", "hipMemCreate", "hipMemExportToShareableHandle", *_MAPPING),
    ),
    Operation.IMPORT_ALLOCATION: (_VMM, ("hipMemImportFromShareableHandle", *_MAPPING)),
}
"""What a runtime must have for an operation, and where it is documented."""
_WORD_SYMBOLS: Final = (
    "hipStreamWaitValue64",
    "hipStreamWriteValue64",
    "hipHostRegister",
    "hipHostGetDevicePointer",
    "hipHostUnregister",
)


class _Probe:
    """What the runtime says of one device."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver = driver
        self._ordinal = ordinal
        self.windows = sys.platform == "win32"

    def attribute(self, number: int) -> int:
        """0 for one that the bindings or the runtime do not know."""
        try:
            wanted = self._driver.api.hipDeviceAttribute_t(number)
        except ValueError:
            return 0
        result = self._driver.status("hipDeviceGetAttribute", wanted, self._ordinal)
        return 0 if result[0] else int(result[1])

    def missing(self, symbols: Iterable[str]) -> list[str]:
        return [symbol for symbol in symbols if not self._driver.has(symbol)]

    @property
    def has_fabric_type(self) -> bool:
        """Whether the bindings know the type: from 10 on."""
        return hasattr(self._driver.api.hipMemAllocationHandleType, "hipMemHandleTypeFabric")


def table(driver: Driver, ordinal: int) -> list[Capability]:
    """Every cell of DOMAIN."""
    probe = _Probe(driver, ordinal)
    return [_capability(cell, probe) for cell in DOMAIN]


def _capability(cell: Cell, probe: _Probe) -> Capability:
    operation = cell.operation
    if operation in MULTICAST:
        return cell.gap(
            Scope.RUNTIME,
            "no version of HIP has a call for multicast objects, and AMD's links reduce and broadcast nothing by "
            "themselves.",
            "HIPIFY: cuMulticast* are unsupported; pytorch/pytorch #150580",
            "one allocation that each device maps: Device.allocate(size, access=peers).",
        )
    if operation is Operation.GRAPH_CAPTURE:
        return cell.gap(
            Scope.RUNTIME,
            "graphs are captured for the signals and waits in them, and HIP has no semaphores on Linux; on Windows "
            "nobody has shown such nodes. What others capture is recognised, and left alone.",
            _DOC + "Graph Management; ROCm/hipamd #48",
            "signal and wait outside of the graph, before and after its launch.",
        )
    reference, symbols = _SYMBOLS.get(operation, ("", ()))
    if missing := probe.missing(symbols):
        return _lacks(cell, missing, reference)
    return _BY_OPERATION[operation](cell, probe)


# -- external memory -------------------------------------------------------------------------------------------------


def _memory(cell: Cell, probe: _Probe) -> Capability:
    kind = cell.handle_type
    assert kind is not None
    if kind not in descriptors.MEMORY_TYPES:
        return cell.gap(
            Scope.RUNTIME,
            "HIP refuses every memory type above D3D11_RESOURCE_KMT with hipErrorInvalidValue, although its enum has "
            "names for them.",
            "ROCm/clr: hipImportExternalMemory",
            "OpaqueFd or DmaBufFd on Linux, OpaqueWin32 on Windows.",
        )
    if (gap := _other_platform(cell, probe, "OpaqueFd, DmaBufFd memory")) is not None:
        return gap
    if cell.operation is Operation.MAP_MIPMAPPED_ARRAY:
        return _array(cell, probe)
    if cell.operation is Operation.MAP_BUFFER and not probe.windows:
        return _usable(
            cell,
            "ROCm 6.3 sends work on a mapping at an offset to the object's first bytes, and its hipFree waits for "
            "device 0 alone: gpuinterop maps whole objects at offset 0, and synchronises the device itself",
            f"ROCm/rocm-systems #1749; ROCm/clr: ihipFree; {_EXTERNAL}",
        )
    if kind is h.OpaqueFd:
        return _usable(
            cell,
            "HIP takes the descriptor for a dma-buf, which is what RADV's and AMDVLK's opaque ones are",
            "ROCm/clr: amd::Device::importExtMemory; " + _EXTERNAL,
        )
    if kind is h.DmaBufFd:
        return _usable(
            cell,
            "passed as OPAQUE_FD, which HIP takes for a dma-buf",
            "ROCm/clr: amd::Device::importExtMemory; VK_EXT_external_memory_dma_buf",
        )
    return _usable(cell, "AMD documents this type on Windows", _EXTERNAL)


def _array(cell: Cell, probe: _Probe) -> Capability:
    if missing := probe.missing((_ARRAY_SYMBOL, "hipGetMipmappedArrayLevel", "hipMemcpy3DAsync")):
        return cell.gap(
            Scope.RUNTIME,
            f"AMD's library does not export {', '.join(missing)}.",
            "ROCm/hip #3779",
            "share a linear image or a buffer (map_buffer), and copy to and from the tiled image on the other side.",
        )
    if cell.handle_type is h.DmaBufFd:
        return cell.gap(
            Scope.RUNTIME,
            "an image's tiling is known to the driver that made it, and HIP is not told the modifier of a dma-buf.",
            "ROCm/hip #3779; VK_EXT_image_drm_format_modifier",
            "a linear image or a buffer (map_buffer).",
        )
    return _usable(cell, "this runtime exports the call; whether tiled images come out right is not known", _EXTERNAL)


# -- external semaphores ---------------------------------------------------------------------------------------------


def _semaphore(cell: Cell, probe: _Probe) -> Capability:
    kind = cell.handle_type
    assert kind is not None
    if not probe.windows:
        return _linux_semaphore(cell, kind)
    if issubclass(kind, h.FdHandle):
        return cell.gap(
            Scope.PLATFORM,
            "Windows has no file descriptors to share.",
            _EXTERNAL,
            "OpaqueWin32, TimelineWin32, D3D12Fence.",
        )
    if kind not in descriptors.SEMAPHORE_TYPES:
        return cell.gap(
            Scope.RUNTIME,
            "HIP refuses every semaphore type above D3D12_FENCE with hipErrorInvalidValue on every system, although "
            "its enum has names for them.",
            "ROCm/clr: hipImportExternalSemaphore",
            "D3D12Fence, TimelineWin32.",
        )
    if cell.operation is Operation.WAIT_TIMEOUT:
        return _no_timeout(cell)
    if kind is h.TimelineWin32:
        return _usable(
            cell,
            "HIP refuses the type itself and takes a timeline that is passed as OPAQUE_WIN32, as others report",
            "RenderKit/oidn #288",
        )
    return _usable(
        cell,
        "implemented on Windows since 2026; AMD's own sample does not signal from HIP to Vulkan there",
        "ROCm/rocm-systems #6021, #6632",
    )


def _linux_semaphore(cell: Cell, kind: type[h.Handle]) -> Capability:
    if not issubclass(kind, h.FdHandle):
        what = (
            "NvSci exists on NVIDIA's embedded platforms" if kind is h.NvSciSync else "Win32 handles exist on Windows"
        )
        return cell.gap(Scope.PLATFORM, f"{what} only, and HIP has no semaphores on Linux.", _EXTERNAL, _BRIDGE)
    if cell.operation is Operation.WAIT_TIMEOUT:
        return _no_timeout(cell)
    how = {
        Operation.IMPORT_SEMAPHORE: "HIP imports no semaphores on Linux: the call aborts the process in builds with "
        "assertions up to ROCm 7.2, and says hipErrorNotSupported in others.",
        Operation.SIGNAL_SEMAPHORE: "HIP signals no semaphores on Linux: the call returns success and does nothing.",
        Operation.WAIT_SEMAPHORE: "HIP waits for no semaphores on Linux: the call returns success and does nothing.",
    }[cell.operation]
    return cell.gap(Scope.PLATFORM, how, "ROCm/clr #72; ROCm/hipamd #48", _BRIDGE)


def _no_timeout(cell: Cell) -> Capability:
    return cell.gap(
        Scope.RUNTIME,
        "HIP reads nothing of a wait but the value; it ends with its signal.",
        _DOC + "hipWaitExternalSemaphoresAsync",
        "Stream.synchronize(timeout=...) names what a stream waits for.",
    )


def _by_name(cell: Cell, probe: _Probe) -> Capability:
    kind = cell.handle_type
    assert kind is not None
    if not probe.windows:
        return cell.gap(
            Scope.PLATFORM, "objects have names on Windows only.", _EXTERNAL, "OpaqueFd or DmaBufFd memory, by fd."
        )
    # OpaqueWin32 is a memory's type as well as a semaphore's, and the cell cannot say which: a semaphore with a name is
    # refused at its import.
    if kind in descriptors.MEMORY_TYPES:
        return _usable(cell, "the name is read for memory; for semaphores it is ignored", "ROCm/rocm-systems #6021")
    if kind not in descriptors.SEMAPHORE_TYPES:
        return cell.gap(
            Scope.RUNTIME,
            "HIP imports no semaphore of this type.",
            "ROCm/clr: hipImportExternalSemaphore",
            "D3D12Fence, TimelineWin32, by handle.",
        )
    return nameless(cell)


def nameless(cell: Cell) -> Capability:
    """Of IMPORT_BY_NAME, for semaphores."""
    return cell.gap(
        Scope.RUNTIME,
        "HIP ignores the name of a semaphore, and refuses one without a handle.",
        "ROCm/rocm-systems #6021, #6632",
        "open the object by its name (ID3D12Device::OpenSharedHandleByName, OpenSemaphore) and pass the handle.",
    )


# -- made here -------------------------------------------------------------------------------------------------------


def _allocation(cell: Cell, probe: _Probe) -> Capability:
    kind = cell.handle_type
    assert kind is not None
    if not probe.attribute(_VMM_SUPPORTED):
        return cell.gap(
            Scope.DEVICE,
            "the device has no virtual memory management (attribute 89 is 0).",
            _VMM,
            "memory that Vulkan allocates and exports (gpuinterop.vulkan.share_buffer).",
        )
    if kind is h.FabricHandle:
        return _fabric(cell, probe)
    if kind is not h.VmmFd:
        return cell.gap(
            Scope.PLATFORM,
            "HIP's virtual memory exports POSIX descriptors; AMD's documentation has it under development on Windows.",
            _VMM,
            "memory that Vulkan or Direct3D allocates and exports." if probe.windows else "VmmFd.",
        )
    if probe.windows:
        return cell.gap(
            Scope.PLATFORM,
            "Windows has no file descriptors to share.",
            _VMM,
            "memory that Vulkan or Direct3D allocates and exports.",
        )
    if cell.operation is Operation.IMPORT_ALLOCATION:
        return _usable(
            cell,
            "the device's attribute 89 says so; ROCm 6.3 never gives imported memory back before the process ends",
            f"ROCm/clr #193; {_VMM}",
        )
    return _usable(cell, "the device's attribute 89 says so", _VMM)


def _fabric(cell: Cell, probe: _Probe) -> Capability:
    if not probe.has_fabric_type:
        return cell.gap(
            Scope.BINDINGS,
            "hip-python before 10 has no name for fabric handles.",
            _VMM,
            f"{install('hip-python>=10')}.",
        )
    if not probe.attribute(_FABRIC):
        return cell.gap(
            Scope.DEVICE,
            "the device says that it makes no such handles (attribute 95 is 0).",
            _VMM,
            "VmmFd, within one machine.",
        )
    return _usable(cell, "the device's attribute 95 says so", _VMM)


def _create_semaphore(cell: Cell, probe: _Probe) -> Capability:
    words = _words_gap(Cell(Operation.STREAM_MEMORY_OPS), probe)
    if cell.handle_type is not h.TimelineFd:
        return cell.gap(
            Scope.RUNTIME,
            "HIP makes no semaphores, and of stream words only a timeline can be made: a word only counts up.",
            _EXTERNAL,
            "TimelineFd, with one value more for each signal." if words is None else "one that Vulkan has made.",
        )
    if probe.windows:
        return cell.gap(
            Scope.PLATFORM,
            "Windows has no file descriptors to share.",
            _EXTERNAL,
            "make it with Vulkan or Direct3D and import it.",
        )
    if words is not None:
        assert words.scope is not None
        return cell.gap(words.scope, f"it is made of stream words: {words.reason}", words.reference, words.workaround)
    return _usable(
        cell,
        "a word in a sealed page that every process and device registers, not an object of HIP's",
        f"{_WORDS}; gpuinterop.Device.create_semaphore",
    )


def _stream_words(cell: Cell, probe: _Probe) -> Capability:
    if (gap := _words_gap(cell, probe)) is not None:  # a gap is false
        return gap
    if probe.windows:
        return _usable(
            cell,
            "attribute 10013 says so; others report that the CPU's store ends a stream's wait there, and another "
            "stream's does not",
            "ROCm/rocm-systems #11605",
        )
    return _usable(
        cell,
        "attribute 10013 says so, and the wait is a kernel that reads whatever HIP knows; AMD documents the address as "
        "signal memory, and here it is registered host memory. A stream that waits occupies one of the four hardware "
        "queues of its priority: four waits at once stall every stream of that priority",
        f"{_WORDS}; ROCm/clr: hipStreamWaitValue64, roc::Device::acquireQueue",
    )


def _words_gap(cell: Cell, probe: _Probe) -> Capability | None:
    if missing := probe.missing(_WORD_SYMBOLS):
        return _lacks(cell, missing, _WORDS)
    if not probe.attribute(_WAIT_VALUE):
        return cell.gap(
            Scope.DEVICE,
            "the device says that its streams cannot wait for values (attribute 10013 is 0).",
            _WORDS,
            "synchronise on the host: Stream.synchronize() before the other side is told.",
        )
    if os.environ.get("GPU_STREAMOPS_CP_WAIT", "0") not in ("", "0"):
        return cell.gap(
            Scope.RUNTIME,
            "GPU_STREAMOPS_CP_WAIT is set: the command processor then waits, for memory of hipMallocSignalMemory only, "
            "which no other process can have.",
            _WORDS + " (hipStreamWaitValue64)",
            "unset GPU_STREAMOPS_CP_WAIT before the process starts.",
        )
    return None


# -- shared ----------------------------------------------------------------------------------------------------------


def _other_platform(cell: Cell, probe: _Probe, on_linux: str) -> Capability | None:
    """The gap of a handle type that this system does not have."""
    kind = cell.handle_type
    assert kind is not None
    if issubclass(kind, h.FdHandle):
        if probe.windows:
            return cell.gap(Scope.PLATFORM, "Windows has no file descriptors to share.", _EXTERNAL, "OpaqueWin32.")
    elif not probe.windows:
        return cell.gap(Scope.PLATFORM, "Win32 and Direct3D handles exist on Windows only.", _EXTERNAL, f"{on_linux}.")
    return None


def _lacks(cell: Cell, symbols: Iterable[str], reference: str) -> Capability:
    return cell.gap(Scope.RUNTIME, f"the HIP runtime lacks {', '.join(symbols)}.", reference, "install a newer ROCm.")


def _usable(cell: Cell, what: str, reference: str) -> Capability:
    return cell.unverified(Scope.PLATFORM, f"{what}.", reference)


_BY_OPERATION: Final[Mapping[Operation, Callable[[Cell, _Probe], Capability]]] = {
    **dict.fromkeys(_MEMORY, _memory),
    **dict.fromkeys(_SEMAPHORE, _semaphore),
    **dict.fromkeys(_ALLOCATION, _allocation),
    Operation.IMPORT_BY_NAME: _by_name,
    Operation.CREATE_SEMAPHORE: _create_semaphore,
    Operation.STREAM_MEMORY_OPS: _stream_words,
}
