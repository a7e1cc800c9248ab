"""The host's capability table: what it does, and a true reason for everything that it does not."""

from __future__ import annotations

from gpuinterop import handles as h, system
from gpuinterop.capabilities import DOMAIN, MULTICAST, Capability, Cell, Operation, Scope

from .formats import swiftshader

_MAPPABLE = {Operation.IMPORT_MEMORY, Operation.MAP_BUFFER}
_SEMAPHORE = {
    Operation.IMPORT_SEMAPHORE,
    Operation.SIGNAL_SEMAPHORE,
    Operation.WAIT_SEMAPHORE,
    Operation.WAIT_TIMEOUT,
    Operation.CREATE_SEMAPHORE,
}
_SHAREABLE = {Operation.EXPORT_ALLOCATION, Operation.IMPORT_ALLOCATION}

_NO_FUTEX = "futexes are known here for x86-64 and aarch64 Linux; this is another machine, or /proc is not mounted."
_RULE = "gpuinterop_host.memory: which objects are taken"


def table() -> list[Capability]:
    """Every cell of DOMAIN."""
    return [_capability(cell) for cell in DOMAIN]


def _capability(cell: Cell) -> Capability:
    operation, kind = cell.operation, cell.handle_type
    if operation in _MAPPABLE and kind is h.OpaqueFd:
        return _usable(cell, "memfds, SwiftShader's and lavapipe's memory", _RULE)
    if operation in _SEMAPHORE and kind in (h.OpaqueFd, h.TimelineFd):
        reason = swiftshader.gap() if kind is h.OpaqueFd else _NO_FUTEX if system.SYS_FUTEX is None else None
        if reason is not None:
            reference = "gpuinterop_host.formats.swiftshader" if kind is h.OpaqueFd else "gpuinterop.timeline"
            return cell.gap(Scope.PLATFORM, reason, reference, "use x86-64 or aarch64 Linux with glibc and libstdc++.")
        if kind is h.OpaqueFd:
            return _usable(cell, "SwiftShader's layout", "gpuinterop_host.formats.swiftshader")
        return _usable(cell, "the host's own layout", "gpuinterop.timeline")
    if operation is Operation.STREAM_MEMORY_OPS:
        return _usable(cell, "the stream's thread stores and looks", "gpuinterop_host.stream_memory")
    if operation in _SHAREABLE and kind is h.VmmFd:
        return _usable(cell, "sealed memfds", _RULE)
    return _refused(cell)


def _refused(cell: Cell) -> Capability:
    operation, kind = cell.operation, cell.handle_type
    if operation is Operation.GRAPH_CAPTURE:
        return cell.gap(
            Scope.RUNTIME,
            "the CPU has no graphs: a stream runs what it is given, and records nothing for a replay.",
            "gpuinterop_host.streams",
            "call signal and wait on a stream each time.",
        )
    if operation in MULTICAST:
        return cell.gap(
            Scope.DEVICE,
            "multicast writes one store to the memories of several devices; the host is one device with one memory.",
            "CUDA driver API: multicast object management",
            "map one allocation wherever it is needed: allocate(size) and export().",
        )
    if kind in (h.NvSciBuf, h.NvSciSync):
        return cell.gap(
            Scope.RUNTIME,
            "NvSci is NVIDIA's library for its embedded platforms; it has no implementation for the CPU alone.",
            "NVIDIA DriveOS: NvStreams",
            "memfds: OpaqueFd memory, OpaqueFd and TimelineFd semaphores.",
        )
    if kind is h.FabricHandle:
        return cell.gap(
            Scope.DEVICE,
            "fabric handles name memory in an NVLink domain; CPU memory is not part of one.",
            "CUDA driver API: CU_MEM_HANDLE_TYPE_FABRIC",
            "VmmFd, within one machine.",
        )
    if kind is h.DmaBufFd:
        return cell.gap(
            Scope.PLATFORM,
            "the CPU may touch a dma-buf only between DMA_BUF_IOCTL_SYNC start and end, round every access; a view "
            "without copies cannot issue them.",
            "Linux: Documentation/driver-api/dma-buf.rst, CPU access to DMA buffers",
            "export the memory as OpaqueFd; lavapipe and SwiftShader both do.",
        )
    if operation is Operation.MAP_MIPMAPPED_ARRAY and kind is h.OpaqueFd:
        return cell.gap(
            Scope.DEVICE,
            "CPU memory has no opaque tiling that an array could stand for.",
            "Vulkan specification: vkGetImageSubresourceLayout",
            "make the image with VK_IMAGE_TILING_LINEAR, and view the buffer with the strides that its layout says.",
        )
    return cell.gap(
        Scope.PLATFORM,
        "Win32 and Direct3D handles exist on Windows only, and the host backend on Linux only.",
        "Vulkan specification: VkExternalMemoryHandleTypeFlagBits",
        "OpaqueFd, TimelineFd and VmmFd.",
    )


def _usable(cell: Cell, what: str, reference: str) -> Capability:
    return cell.unverified(Scope.PLATFORM, f"implemented: {what}.", reference)
