"""Vulkan objects that can be exported, and their export."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, overload

from .._arguments import check_flags, check_nbytes
from ..capabilities import Operation
from ..errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError
from ..handles import (
    Binary,
    DmaBufFd,
    FdHandle,
    HandleOrigin,
    MemoryHandle,
    OpaqueFd,
    OriginKind,
    Timeline,
    TimelineFd,
)
from . import _api as c
from ._context import Native, VulkanContext, check_context
from ._query import MEMORY_BITS

_FdHandle = TypeVar("_FdHandle", bound=FdHandle)

__all__ = ["ExportableBuffer", "create_buffer", "create_semaphore", "export_memory", "export_semaphore"]

Create: TypeAlias = Callable[[str, str, Any], Any]
"""`VulkanContext.create`, or `Native.new` of what the object is to be part of."""


def semaphore_handle_type(kind: type) -> type[OpaqueFd | TimelineFd]:
    """The handle type in which a kind of semaphore is exported."""
    if kind is Binary:
        return OpaqueFd
    if kind is Timeline:
        return TimelineFd
    raise ArgumentTypeError("kind", f"must be gpuinterop.handles.Binary or Timeline, not {kind!r}.")


class ExportableBuffer(Native):
    """A VkBuffer with memory of its own that can be exported.

    Attributes
    ----------
    buffer, memory
        VkBuffer and VkDeviceMemory, owned.
    size : int
        ``VkMemoryRequirements::size``: what an importer has to state, in bytes.
    dedicated : bool
    flags : int
        ``VkMemoryPropertyFlags`` of the memory's type.
    """

    buffer: Any
    memory: Any
    size: int
    dedicated: bool
    flags: int
    handle_type: type[MemoryHandle]

    def export(self) -> MemoryHandle:
        """A new handle that the caller owns."""
        return self.use(
            lambda _: export_memory(
                self._vk, self.memory, size=self.size, dedicated=self.dedicated, handle_type=self.handle_type
            )
        )


def memory_types(vk: VulkanContext, bits: int) -> int:
    """The memory type to use: near the device on a GPU; on a CPU what the host can see as well."""
    host = c.MEMORY_HOST_VISIBLE | c.MEMORY_HOST_COHERENT
    near = c.MEMORY_DEVICE_LOCAL
    return vk.memory_type(bits, *((near | host, host) if vk.is_cpu else (near,)))


def require_exportable(vk: VulkanContext, features: int, operation: Operation, handle_type: type[MemoryHandle]) -> None:
    """Refuse before anything is created."""
    if not features & c.MEMORY_EXPORTABLE:
        found = vk.capabilities.of((operation, handle_type))
        if not found:
            raise UnsupportedError(found, context=vk.identity.name)
        raise InvalidArgumentError(
            "usage", f"{vk.identity.name} does not export objects of this format and usage as {handle_type.__name__}."
        )


def create_buffer(
    vk: VulkanContext, size: int, usage: int, handle_type: type[MemoryHandle] = OpaqueFd
) -> ExportableBuffer:
    """Create a buffer whose memory can be exported, after having asked whether it can be."""
    size = check_nbytes(size)
    usage = check_flags(usage, "usage")
    features = vk._physical.buffer_features(handle_type, usage)
    require_exportable(vk, features, Operation.MAP_BUFFER, handle_type)
    native = ExportableBuffer(vk, "VkBuffer")
    native.make(lambda: _make_buffer(vk, native, size, usage, features, handle_type))
    return native


def _make_buffer(
    vk: VulkanContext, native: ExportableBuffer, size: int, usage: int, features: int, handle_type: type[MemoryHandle]
) -> None:
    bit, new = MEMORY_BITS[handle_type], vk.api.new
    external = new("VkExternalMemoryBufferCreateInfo", handleTypes=bit)
    info = new("VkBufferCreateInfo", pNext=external, size=size, usage=usage)
    native.buffer = buffer = native.new("vkCreateBuffer", "VkBuffer", info)
    wants = new("VkMemoryDedicatedRequirements")
    requirements = new("VkMemoryRequirements2", pNext=wants)
    asked = new("VkBufferMemoryRequirementsInfo2", buffer=buffer)
    vk.call("vkGetBufferMemoryRequirements2", vk.device, asked, requirements)
    native.handle_type = handle_type
    native.dedicated = bool(features & c.FEATURE_DEDICATED_ONLY or wants.requiresDedicatedAllocation)
    native.size = int(requirements.memoryRequirements.size)
    index = memory_types(vk, requirements.memoryRequirements.memoryTypeBits)
    native.flags = vk.memory_flags(index)
    chain = new("VkMemoryDedicatedAllocateInfo", buffer=buffer) if native.dedicated else vk.api.ffi.NULL
    native.memory = allocate_exportable(vk, native.size, index, bit, chain, native.new)
    vk.call("vkBindBufferMemory", vk.device, buffer, native.memory, 0)


def allocate_exportable(vk: VulkanContext, size: int, index: int, bit: int, chain: Any, create: Create) -> Any:
    """``vkAllocateMemory`` with export of handle type `bit`."""
    new = vk.api.new
    export = new("VkExportMemoryAllocateInfo", pNext=chain, handleTypes=bit)
    info = new("VkMemoryAllocateInfo", pNext=export, allocationSize=size, memoryTypeIndex=index)
    return create("vkAllocateMemory", "VkDeviceMemory", info)


def export_memory(
    vk: VulkanContext,
    vk_memory: Any,
    *,
    size: int,
    dedicated: bool,
    handle_type: type[MemoryHandle] = OpaqueFd,
) -> MemoryHandle:
    """Export a ``VkDeviceMemory`` of the application. Calls ``vkGetMemoryFdKHR``.

    Parameters
    ----------
    vk : VulkanContext
    vk_memory : VkDeviceMemory
        Allocated with ``VkExportMemoryAllocateInfo`` for this handle type.
    size : int
        The whole allocation's, in bytes (``VkMemoryAllocateInfo::allocationSize``).
    dedicated : bool
        Whether it was allocated with ``VkMemoryDedicatedAllocateInfo``.
    handle_type : type
        ``OpaqueFd`` or ``DmaBufFd``.

    Returns
    -------
    MemoryHandle
        The caller's, with its origin filled in; an import consumes it.

    Raises
    ------
    InvalidArgumentError
        The application did not enable the extension, the handle type is another, or `vk_memory` is null.
    DriverError
        ``vkGetMemoryFdKHR`` failed.
    """
    check_context(vk)
    size = check_nbytes(size)
    if not isinstance(dedicated, bool):
        raise ArgumentTypeError("dedicated", f"must be True or False, not {dedicated!r}.")
    if handle_type not in (OpaqueFd, DmaBufFd):
        raise InvalidArgumentError("handle_type", f"must be OpaqueFd or DmaBufFd, not {handle_type!r}.")
    memory = vk.api.handle("VkDeviceMemory", vk_memory, "vk_memory")
    info = vk.api.new("VkMemoryGetFdInfoKHR", memory=memory, handleType=MEMORY_BITS[handle_type])
    origin = HandleOrigin(kind=OriginKind.MEMORY, device=vk.identity, size=size, dedicated=dedicated, trusted=True)
    kind: type[OpaqueFd | DmaBufFd] = DmaBufFd if handle_type is DmaBufFd else OpaqueFd
    return _descriptor(vk, "vkGetMemoryFdKHR", info, kind, origin)


def create_semaphore(vk: VulkanContext, kind: type, create: Create, *, exportable: bool = True) -> Any:
    """A VkSemaphore; refused before the driver is called where it cannot be exported."""
    handle_type = semaphore_handle_type(kind)
    new, ffi = vk.api.new, vk.api.ffi
    chain = ffi.NULL
    if exportable:
        require_exportable_semaphore(vk, handle_type)
        chain = new("VkExportSemaphoreCreateInfo", handleTypes=c.SEMAPHORE_HANDLE_OPAQUE_FD)
    if kind is Timeline:
        chain = new("VkSemaphoreTypeCreateInfo", pNext=chain, semaphoreType=c.SEMAPHORE_TIMELINE)
    return create("vkCreateSemaphore", "VkSemaphore", new("VkSemaphoreCreateInfo", pNext=chain))


def require_exportable_semaphore(vk: VulkanContext, handle_type: type[OpaqueFd | TimelineFd]) -> None:
    """Ask first: a driver that exports none may crash when asked to (SwiftShader, timelines)."""
    vk.capabilities.require((Operation.IMPORT_SEMAPHORE, handle_type))
    _ = vk.functions.vkGetSemaphoreFdKHR  # says which extension the application forgot


@overload
def export_semaphore(vk: VulkanContext, vk_semaphore: Any, kind: type[Timeline]) -> TimelineFd: ...
@overload
def export_semaphore(vk: VulkanContext, vk_semaphore: Any, kind: type[Binary]) -> OpaqueFd: ...
@overload
def export_semaphore(vk: VulkanContext, vk_semaphore: Any, kind: type) -> OpaqueFd | TimelineFd: ...
def export_semaphore(vk: VulkanContext, vk_semaphore: Any, kind: type) -> OpaqueFd | TimelineFd:
    """Export a ``VkSemaphore`` of the application. Calls ``vkGetSemaphoreFdKHR``.

    Parameters
    ----------
    vk : VulkanContext
    vk_semaphore : VkSemaphore
        Created with ``VkExportSemaphoreCreateInfo`` for ``OPAQUE_FD``.
    kind : type
        ``gpuinterop.handles.Binary`` or ``Timeline``: what the semaphore is. No driver tells.

    Returns
    -------
    OpaqueFd or TimelineFd
        The caller's, with its origin filled in; an import consumes it.

    Raises
    ------
    UnsupportedError
        The driver reports that it exports none of this kind; it was not called.
    InvalidArgumentError
        The application did not enable the extension, or `vk_semaphore` is null.
    DriverError
        ``vkGetSemaphoreFdKHR`` failed.
    """
    check_context(vk)
    handle_type = semaphore_handle_type(kind)
    semaphore = vk.api.handle("VkSemaphore", vk_semaphore, "vk_semaphore")
    require_exportable_semaphore(vk, handle_type)
    info = vk.api.new("VkSemaphoreGetFdInfoKHR", semaphore=semaphore, handleType=c.SEMAPHORE_HANDLE_OPAQUE_FD)
    origin_kind = OriginKind.TIMELINE if kind is Timeline else OriginKind.BINARY
    origin = HandleOrigin(kind=origin_kind, device=vk.identity, trusted=True)
    return _descriptor(vk, "vkGetSemaphoreFdKHR", info, handle_type, origin)


def _descriptor(vk: VulkanContext, call: str, info: Any, kind: type[_FdHandle], origin: HandleOrigin) -> _FdHandle:
    """What the driver exports; no interrupt loses it."""
    fd, made = vk.api.ffi.new("int *", -1), list[int]()
    try:
        vk.call(call, vk.device, info, fd)
        made.append(fd[0])
        fd[0] = -1
        return kind._adopt_made(made, origin=origin)
    except BaseException:
        if made:
            os.close(made.pop())
        elif fd[0] >= 0:
            os.close(fd[0])
        raise


def import_semaphore_fd(vk: VulkanContext, kind: type, fd: int) -> Any:
    """A VkSemaphore on the payload of `fd`, which is the driver's afterwards."""
    semaphore = create_semaphore(vk, kind, vk.create, exportable=False)
    info = vk.api.new("VkImportSemaphoreFdInfoKHR", semaphore=semaphore, handleType=c.SEMAPHORE_HANDLE_OPAQUE_FD, fd=fd)
    try:
        vk.call("vkImportSemaphoreFdKHR", vk.device, info)
    except BaseException:
        vk.destroy("vkDestroySemaphore", semaphore)
        raise
    return semaphore
