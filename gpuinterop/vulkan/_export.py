"""Exportable Vulkan objects, and their export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from .._arguments import check_flags, check_nbytes, check_type
from .._core.lifetime import LIVE, MARK
from ..capabilities import Operation
from ..errors import ArgumentTypeError, DriverError, InvalidArgumentError, OutOfMemoryError, UnsupportedError
from ..handles import Binary, DmaBufFd, FdHandle, HandleOrigin, MemoryHandle, OpaqueFd, OriginKind, Timeline, TimelineFd
from . import _api as c
from ._api import check
from ._context import VulkanContext, VulkanObject, check_context
from ._query import MEMORY_BITS, ImageSupport, image_type

_FdHandle = TypeVar("_FdHandle", bound=FdHandle)


def semaphore_handle_type(kind: type) -> type[OpaqueFd | TimelineFd]:
    """The handle type as which a kind of semaphore is exported."""
    if kind is Binary:
        return OpaqueFd
    if kind is Timeline:
        return TimelineFd
    raise ArgumentTypeError("kind", f"expected gpuinterop.handles.Binary or Timeline, got {kind!r}.")


class Bound(VulkanObject):
    """A VkBuffer or a VkImage (its `handle`) with its own memory.

    Attributes
    ----------
    memory
        VkDeviceMemory, owned.
    size : int
        Size of the memory in bytes, which an importer must state.
    dedicated : bool
    flags : int
        ``VkMemoryPropertyFlags`` of the memory's type.
    addressed : bool
        Whether shaders may use addresses in it (``VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT``).
    kind : str
        ``Buffer`` or ``Image``.
    handle_type : type
        Handle type as which it is exported.
    """

    memory: Any
    size: int
    dedicated: bool = False
    flags: int
    addressed: bool = False

    def __init__(self, vk: VulkanContext, kind: str, handle_type: type[MemoryHandle]) -> None:
        super().__init__(vk, f"Vk{kind}")
        self.kind = kind
        self.handle_type = handle_type

    def bind(self, made: Any, bits: int, chain: Any, offset: int = 0) -> None:
        """Allocate `size` bytes of a memory type among `bits`, and bind what was made to them."""
        vk = self._vk
        host, near = c.MEMORY_HOST_VISIBLE | c.MEMORY_HOST_COHERENT, c.MEMORY_DEVICE_LOCAL
        # Near the device on a GPU; on a CPU what the host can see as well.
        index, self.flags = vk._memory_type(bits, *((near | host, host) if vk.is_cpu else (near,)))
        if self.addressed:
            chain = vk.api.new("VkMemoryAllocateFlagsInfo", pNext=chain, flags=c.MEMORY_ALLOCATE_DEVICE_ADDRESS)
        info = vk.api.new("VkMemoryAllocateInfo", pNext=chain, allocationSize=self.size, memoryTypeIndex=index)
        self.memory = self.new("vkAllocateMemory", "VkDeviceMemory", info)
        vk._call(f"vkBind{self.kind}Memory", vk.device, made, self.memory, offset)

    def export(self) -> MemoryHandle:
        """Return a new handle that the caller owns."""
        return self.use(
            lambda _: export_memory(
                self._vk, self.memory, size=self.size, dedicated=self.dedicated, handle_type=self.handle_type
            )
        )


def require_exportable(vk: VulkanContext, features: int, operation: Operation, handle_type: type[MemoryHandle]) -> None:
    """Raise before anything is created."""
    if not features & c.MEMORY_EXPORTABLE:
        found = vk.capabilities.of((operation, handle_type))
        if not found:
            raise UnsupportedError(found, context=vk.identity.name)
        raise InvalidArgumentError(
            "usage",
            f"expected a format and usages that {vk.identity.name} exports as {handle_type.__name__}, got others; pass "
            "fewer usages.",
        )


def create_buffer(vk: VulkanContext, size: int, usage: int, handle_type: type[MemoryHandle] = OpaqueFd) -> Bound:
    """Create a buffer whose memory can be exported, after checking that the driver can export it."""
    size = check_nbytes(size)
    usage = check_flags(usage, "usage")
    features = vk.physical.buffer_features(handle_type, usage)
    require_exportable(vk, features, Operation.MAP_BUFFER, handle_type)
    native, info = plan_buffer(vk, size, usage, MEMORY_BITS[handle_type], handle_type)
    try:
        native.make(lambda: _make(vk, native, info, features))
    except OutOfMemoryError as error:
        most = vk.physical.max_allocation
        limit = f"; {most:,} at once are the driver's limit" if size > most else ""
        meaning = f"{size:,} bytes are wanted{limit}"
        raise OutOfMemoryError(error.call, error.code, error.symbol, meaning) from None
    return native


def plan_buffer(
    vk: VulkanContext, size: int, usage: int, bit: int, handle_type: type[MemoryHandle] = OpaqueFd
) -> tuple[Bound, Any]:
    """A buffer on external memory that is to be made, and its ``VkBufferCreateInfo``."""
    external = vk.api.new("VkExternalMemoryBufferCreateInfo", handleTypes=bit)
    native = Bound(vk, "Buffer", handle_type)
    native.addressed = bool(usage & c.BUFFER_DEVICE_ADDRESS)
    return native, vk.api.new("VkBufferCreateInfo", pNext=external, size=size, usage=usage)


def create_image(
    vk: VulkanContext, support: ImageSupport, handle_type: type[MemoryHandle], extent: tuple[int, int, int],
    **fields: int,
) -> Bound:  # fmt: skip
    """Create an image whose memory can be exported; `support` is the driver's answer for such images.

    `extent` has a depth of 0 for a 2D image; `fields` are more of ``VkImageCreateInfo``.
    """
    external = vk.api.new("VkExternalMemoryImageCreateInfo", handleTypes=MEMORY_BITS[handle_type])
    kind = image_type(extent)
    info = vk.api.new("VkImageCreateInfo", pNext=external, imageType=kind, samples=1, **fields)
    info.extent.width, info.extent.height, info.extent.depth = *extent[:2], max(1, extent[2])
    native = Bound(vk, "Image", handle_type)
    native.make(lambda: _make(vk, native, info, support.features, support.size))
    return native


def _make(vk: VulkanContext, native: Bound, info: Any, features: int, most: int | None = None) -> Any:
    """A VkImage on dedicated memory that can be exported; a VkBuffer, where the driver requires that."""
    new, kind = vk.api.new, native.kind
    made = native.new(f"vkCreate{kind}", f"Vk{kind}", info)
    itself = {kind.lower(): made}
    wants = new("VkMemoryDedicatedRequirements")
    found = new("VkMemoryRequirements2", pNext=wants)
    asked = new(f"Vk{kind}MemoryRequirementsInfo2", **itself)
    vk._call(f"vkGet{kind}MemoryRequirements2", vk.device, asked, found)
    native.size = int(found.memoryRequirements.size)
    if most is not None and native.size > most:
        raise InvalidArgumentError(
            "extent", f"expected an image of {most} bytes or fewer, which {vk.identity.name} shares, got {native.size}."
        )
    # An image's always: of other memory NVIDIA's driver (580, H200) reads a linear image without undoing the
    # compression in which CUDA writes bytes that repeat. It finds 32 of each 128, and does not prefer dedicated memory.
    only = features & c.FEATURE_DEDICATED_ONLY or wants.requiresDedicatedAllocation
    native.dedicated = bool(kind == "Image" or only)
    chain = new("VkMemoryDedicatedAllocateInfo", **itself) if native.dedicated else vk.api.ffi.NULL
    export = new("VkExportMemoryAllocateInfo", pNext=chain, handleTypes=MEMORY_BITS[native.handle_type])
    native.bind(made, found.memoryRequirements.memoryTypeBits, export)
    return made


def export_memory(
    vk: VulkanContext, vk_memory: Any, *, size: int, dedicated: bool, handle_type: type[MemoryHandle] = OpaqueFd
) -> MemoryHandle:
    """Export a ``VkDeviceMemory`` of the application. Calls ``vkGetMemoryFdKHR``.

    Parameters
    ----------
    vk : VulkanContext
    vk_memory : VkDeviceMemory
        Memory that was allocated with ``VkExportMemoryAllocateInfo`` for this handle type.
    size : int
        Size of the whole allocation in bytes (``VkMemoryAllocateInfo::allocationSize``).
    dedicated : bool
        Whether it was allocated with ``VkMemoryDedicatedAllocateInfo``.
    handle_type : type
        ``OpaqueFd`` or ``DmaBufFd``.

    Returns
    -------
    MemoryHandle
        Handle with its origin, owned by the caller; an import consumes it.

    Raises
    ------
    InvalidArgumentError
        The application did not enable the extension, the handle type is another, or `vk_memory` is null.
    DriverError
        ``vkGetMemoryFdKHR`` failed.

    Examples
    --------
    >>> with gi.vulkan.share_buffer(vk, device, 4096) as shared:  # or a VkDeviceMemory of your own
    ...     size = shared.allocation_size
    ...     with gi.vulkan.export_memory(vk, shared.vk_memory, size=size, dedicated=shared.dedicated) as handle:
    ...         handle.origin.kind  # send it with gi.ipc.send_handle(connection, handle)
    <OriginKind.MEMORY: 'memory'>
    """
    check_context(vk)
    size = check_nbytes(size)
    check_type(dedicated, bool, "dedicated", "True or False")
    if handle_type not in (OpaqueFd, DmaBufFd):
        raise InvalidArgumentError("handle_type", f"expected OpaqueFd or DmaBufFd, got {handle_type!r}.")
    memory = vk.api.handle("VkDeviceMemory", vk_memory, "vk_memory")
    info = vk.api.new("VkMemoryGetFdInfoKHR", memory=memory, handleType=MEMORY_BITS[handle_type])
    origin = HandleOrigin(kind=OriginKind.MEMORY, device=vk.identity, size=size, dedicated=dedicated, trusted=True)
    kind: type[OpaqueFd | DmaBufFd] = DmaBufFd if handle_type is DmaBufFd else OpaqueFd
    return _descriptor(vk, "vkGetMemoryFdKHR", info, kind, origin)


def create_semaphore(vk: VulkanContext, kind: type, *, exportable: bool = True) -> VulkanObject:
    """Create a VkSemaphore, the native's `handle`; raise before the driver is called if it cannot be exported."""
    handle_type = semaphore_handle_type(kind)
    new, chain = vk.api.new, vk.api.ffi.NULL
    if exportable:
        require_exportable_semaphore(vk, handle_type)
        chain = new("VkExportSemaphoreCreateInfo", handleTypes=c.SEMAPHORE_HANDLE_OPAQUE_FD)
    if kind is Timeline:
        chain = new("VkSemaphoreTypeCreateInfo", pNext=chain, semaphoreType=c.SEMAPHORE_TIMELINE)
    info, native = new("VkSemaphoreCreateInfo", pNext=chain), VulkanObject(vk, "VkSemaphore")
    native.make(lambda: native.new("vkCreateSemaphore", "VkSemaphore", info))
    return native


def require_exportable_semaphore(vk: VulkanContext, handle_type: type[OpaqueFd | TimelineFd]) -> None:
    """Raise if the driver cannot export this kind: the export call may crash then (SwiftShader, timelines)."""
    vk.capabilities.require((Operation.IMPORT_SEMAPHORE, handle_type))
    _ = vk.functions.vkGetSemaphoreFdKHR  # raises and names the extension that the application did not enable


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
        Semaphore that was created with ``VkExportSemaphoreCreateInfo`` for ``OPAQUE_FD``.
    kind : type
        ``gpuinterop.handles.Binary`` or ``Timeline``, the kind of the semaphore, which drivers do not report.

    Returns
    -------
    OpaqueFd or TimelineFd
        Handle with its origin, owned by the caller; an import consumes it.

    Raises
    ------
    UnsupportedError
        The driver reports that it cannot export this kind; it was not called.
    InvalidArgumentError
        The application did not enable the extension, or `vk_semaphore` is null.
    DriverError
        ``vkGetSemaphoreFdKHR`` failed.

    Examples
    --------
    >>> with gi.vulkan.share_semaphore(vk, device, gi.Binary) as shared:  # or a VkSemaphore of your own
    ...     with gi.vulkan.export_semaphore(vk, shared.vk_semaphore, gi.Binary) as handle:
    ...         semaphore = device.import_semaphore(handle)
    ...         semaphore.close()
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
    fd = vk.api.ffi.new("int *", -1)
    vk._call(call, vk.device, info, fd)
    if fd[0] < 0:  # lavapipe reports success where it has no descriptor left
        raise DriverError(call, fd[0], "no descriptor")
    return kind.adopt(fd[0], origin=origin)


def import_binary_fd(vk: VulkanContext, fd: int) -> Any:
    """Make a VkSemaphore, owned by the caller, on the payload of `fd`, which the driver then owns."""
    semaphore = vk._create("vkCreateSemaphore", "VkSemaphore", vk.api.new("VkSemaphoreCreateInfo"))
    info = vk.api.new("VkImportSemaphoreFdInfoKHR", semaphore=semaphore, handleType=c.SEMAPHORE_HANDLE_OPAQUE_FD, fd=fd)
    try:
        vk._call("vkImportSemaphoreFdKHR", vk.device, info)
    except BaseException:
        vk._destroy("vkDestroySemaphore", semaphore)
        raise
    return semaphore


def counter(vk: VulkanContext, through: VulkanContext | VulkanObject, semaphore: Any) -> int:
    """A timeline's value now, by a call of the context or of the native that owns the semaphore."""
    value = vk.api.ffi.new("uint64_t *")
    through._call("vkGetSemaphoreCounterValue", vk.device, semaphore, value)
    return int(value[0])


def counter_reader(vk: VulkanContext, native: VulkanObject) -> Callable[[], int]:
    """A function that reads a timeline's value, for a loop: what is the same each time is made once."""
    function, device, semaphore = vk.functions.vkGetSemaphoreCounterValue, vk.device, native.handle
    value, context = vk.api.ffi.new("uint64_t *"), vk.lifetime

    def read() -> int:
        calls, contexts = native.calls, context.calls
        calls += MARK
        contexts += MARK
        try:
            if native.state is not LIVE or context.state is not LIVE:
                vk._check_open()
                native.check()
            check("vkGetSemaphoreCounterValue", function(device, semaphore, value))
            return int(value[0])
        finally:
            del calls[-1], contexts[-1]

    return read
