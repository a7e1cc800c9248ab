"""The memory of VkBuffers and VkImages: allocated for them, exported, and handed over by barriers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from .._arguments import MAX_32, check_flags, check_int, check_nbytes, check_sequence, check_type
from ..capabilities import Operation
from ..errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError
from ..graphics.sides import agree
from ..handles import DmaBufFd, HandleOrigin, MemoryHandle, OpaqueFd, OriginKind
from . import _api as c
from ._context import VulkanContext, VulkanObject, check_context
from ._pair import Pair, export_fd, share
from ._query import MEMORY_BITS, Support

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.memory import ExternalMemory, Mappable


S = TypeVar("S")

EVERYTHING: Final = c.ACCESS_MEMORY_READ | c.ACCESS_MEMORY_WRITE
_MEMORY_TYPES: Final[tuple[type[MemoryHandle], ...]] = (OpaqueFd, DmaBufFd)


class BarrierSide(NamedTuple):
    """One side of a barrier: ``VkPipelineStageFlags``, ``VkAccessFlags``, queue family, an image's layout."""

    stage: int
    access: int
    family: int
    layout: int | None


class BoundObject(VulkanObject):
    """A VkBuffer or a VkImage (its `handle`) with its own memory.

    Attributes
    ----------
    memory
        VkDeviceMemory, owned.
    size : int
        Size of the memory in bytes, which an importer must state.
    flags : int
        ``VkMemoryPropertyFlags`` of the memory's type.
    kind : str
        ``Buffer`` or ``Image``.
    handle_type : type
        Handle type for exports.
    bit : int
        ``VkExternalMemoryHandleTypeFlagBits`` of its memory.
    family : int
        Queue family that owns it while the other side has it.
    """

    memory: Any
    size: int
    dedicated: bool = False
    flags: int

    def __init__(
        self, vk: VulkanContext, kind: str, handle_type: type[MemoryHandle], bit: int, usage: int, **fields: Any
    ) -> None:
        super().__init__(vk, f"Vk{kind}")
        self.kind, self.handle_type, self.bit = kind, handle_type, bit
        self.family = c.QUEUE_FAMILY_FOREIGN if handle_type is DmaBufFd else c.QUEUE_FAMILY_EXTERNAL
        self._addressed = kind == "Buffer" and usage & c.BUFFER_DEVICE_ADDRESS
        external = vk.api.new(f"VkExternalMemory{kind}CreateInfo", handleTypes=bit)
        self._info = vk.api.new(f"Vk{kind}CreateInfo", pNext=external, usage=usage, **fields)

    def build(self, place: Callable[[Any, Any, bool], None]) -> Self:
        """Create it. `place` binds it; it gets the handle, the requirements, and whether memory must be dedicated."""
        vk, kind = self._vk, self.kind

        def create() -> Any:
            handle = self.new(f"vkCreate{kind}", f"Vk{kind}", self._info)
            dedicated = vk.api.new("VkMemoryDedicatedRequirements")
            requirements = vk.api.new("VkMemoryRequirements2", pNext=dedicated)
            info = vk.api.new(f"Vk{kind}MemoryRequirementsInfo2", **{kind.lower(): handle})
            vk._call(f"vkGet{kind}MemoryRequirements2", vk.device, info, requirements)
            place(handle, requirements.memoryRequirements, bool(dedicated.requiresDedicatedAllocation))
            return handle

        self.make(create)
        return self

    def bind(self, handle: Any, bits: int, chain: Any, offset: int = 0) -> None:
        """Allocate `size` bytes of a memory type among `bits`, and bind the object to them."""
        vk = self._vk
        host, local = c.MEMORY_HOST_VISIBLE | c.MEMORY_HOST_COHERENT, c.MEMORY_DEVICE_LOCAL
        # On a GPU device memory; on a CPU, also visible to the host.
        index, self.flags = vk._memory_type(bits, *((local | host, host) if vk.is_cpu else (local,)))
        if self._addressed:
            chain = vk.api.new("VkMemoryAllocateFlagsInfo", pNext=chain, flags=c.MEMORY_ALLOCATE_DEVICE_ADDRESS)
        info = vk.api.new("VkMemoryAllocateInfo", pNext=chain, allocationSize=self.size, memoryTypeIndex=index)
        self.memory = self.new("vkAllocateMemory", "VkDeviceMemory", info)
        vk._call(f"vkBind{self.kind}Memory", vk.device, handle, self.memory, offset)

    def export(self) -> MemoryHandle:
        """Return a new handle, which the caller owns."""
        return self.use(
            lambda _: export_memory(
                self._vk, self.memory, size=self.size, dedicated=self.dedicated, handle_type=self.handle_type
            )
        )

    def vulkan_side(self, stage: int, access: int, layout: int | None = None) -> BarrierSide:
        """Vulkan's use of it."""
        return BarrierSide(stage, access, self._vk._family(), layout)

    def other_side(self, stage: int, layout: int | None = None) -> BarrierSide:
        """The other side's use. Vulkan sees only the stage at which a semaphore orders it."""
        return BarrierSide(stage, 0, self.family, layout)

    def transfer(self, cmd: Any, source: BarrierSide, target: BarrierSide) -> None:
        """Record its transfer from one side to the other: ``vkCmdPipelineBarrier``."""
        api, noun = self._vk.api, self.kind.lower()
        for side in (source, target):
            check_flags(side.stage, "stage")
            check_flags(side.access, "access", empty=True)
        fields: dict[str, Any] = {noun: self.handle, "size": c.WHOLE_SIZE}
        families = source.family, target.family
        if self.kind == "Image":
            check_int(source.layout, "layout", minimum=0, maximum=MAX_32)
            check_int(target.layout, "layout", minimum=1, maximum=MAX_32)  # UNDEFINED cannot be a new layout
            if source[2:] == (self.family, c.LAYOUT_UNDEFINED):  # the other side has no contents to hand over
                families = c.QUEUE_FAMILY_IGNORED, c.QUEUE_FAMILY_IGNORED
            levels, layers = self._info.mipLevels, self._info.arrayLayers
            subresources = {"aspectMask": c.ASPECT_COLOR, "levelCount": levels, "layerCount": layers}
            layouts = {"oldLayout": source.layout, "newLayout": target.layout}
            fields = {noun: self.handle, "subresourceRange": subresources, **layouts}
        barrier = api.new(
            f"Vk{self.kind}MemoryBarrier",
            srcAccessMask=source.access,
            dstAccessMask=target.access,
            srcQueueFamilyIndex=families[0],
            dstQueueFamilyIndex=families[1],
            **fields,
        )
        none, this = (0, api.ffi.NULL), (1, barrier)
        counted = (*none, *this, *none) if noun == "buffer" else (*none, *none, *this)
        commands = api.handle("VkCommandBuffer", cmd, "cmd")
        self._call("vkCmdPipelineBarrier", commands, source.stage, target.stage, 0, *counted)


def require_exportable(vk: VulkanContext, features: int, operation: Operation, handle_type: type[MemoryHandle]) -> None:
    """Raise before anything is created if the driver cannot export it."""
    if not features & c.MEMORY_EXPORTABLE:
        capability = vk.capabilities.of((operation, handle_type))
        if not capability:
            raise UnsupportedError(capability, context=vk.identity.name)
        raise InvalidArgumentError(
            "usage",
            f"expected a format and usages that {vk.identity.name} exports as {handle_type.__name__}, got others; pass "
            "fewer usages.",
        )


def create(
    vk: VulkanContext, kind: str, support: Support, handle_type: type[MemoryHandle], **fields: Any
) -> BoundObject:
    """Create a buffer or an image with exportable memory. `support` is the driver's answer for this kind.

    `fields` are the fields of ``VkBufferCreateInfo`` or ``VkImageCreateInfo``.
    """
    native, new = BoundObject(vk, kind, handle_type, MEMORY_BITS[handle_type], **fields), vk.api.new

    def place(handle: Any, needs: Any, dedicated: bool) -> None:
        native.size = int(needs.size)
        if native.size > support.size:
            bounds = f"at most {support.size} bytes, the limit of {vk.identity.name}, got {native.size}"
            raise InvalidArgumentError("extent", f"expected an image of {bounds}.")
        # An image's memory is always dedicated. From other memory, NVIDIA's driver (580, H200) reads a linear image
        # without undoing the compression of repeated bytes that CUDA wrote: it finds 32 of each 128. The driver does
        # not ask for dedicated memory.
        native.dedicated = bool(kind == "Image" or dedicated or support.features & c.FEATURE_DEDICATED_ONLY)
        chain = new("VkMemoryDedicatedAllocateInfo", **{kind.lower(): handle}) if native.dedicated else vk.api.ffi.NULL
        export = new("VkExportMemoryAllocateInfo", pNext=chain, handleTypes=native.bit)
        native.bind(handle, needs.memoryTypeBits, export)

    return native.build(place)


def export_memory(
    vk: VulkanContext, vk_memory: Any, *, size: int, dedicated: bool, handle_type: type[MemoryHandle] = OpaqueFd
) -> MemoryHandle:
    """Export a ``VkDeviceMemory`` of your application. Calls ``vkGetMemoryFdKHR``.

    Parameters
    ----------
    vk : VulkanContext
    vk_memory : VkDeviceMemory
        Memory allocated with ``VkExportMemoryAllocateInfo`` for this handle type.
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
        The application did not enable the extension, `handle_type` is not supported, or `vk_memory` is null.
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
    return export_fd(vk, "vkGetMemoryFdKHR", info, kind, origin)


def agree_on_memory(
    vk: VulkanContext, device: Device, mapping: Operation, handle_types: Sequence[type[MemoryHandle]] | None
) -> type[MemoryHandle]:
    """The handle type of memory that Vulkan exports, and the device imports and maps."""
    kind = agree(vk, device, (Operation.IMPORT_MEMORY, mapping), _memory_types_of(handle_types))
    _ = vk.functions.vkGetMemoryFdKHR  # raises, before anything is made, if the application did not enable it
    return kind


def _memory_types_of(handle_types: Sequence[type[MemoryHandle]] | None) -> Sequence[type[MemoryHandle]]:
    """Check the argument `handle_types`."""
    if handle_types is None:
        return _MEMORY_TYPES
    check_sequence(handle_types, "handle_types", "a sequence of handle types")
    types: Sequence[object] = handle_types
    for kind in types:
        if not isinstance(kind, type) or not issubclass(kind, MemoryHandle):
            raise ArgumentTypeError("handle_types", f"expected types of memory handles such as OpaqueFd, got {kind!r}.")
    if not handle_types:
        raise InvalidArgumentError("handle_types", "expected one type or more, got none.")
    return handle_types


class PairedMemory(Pair):
    """A VkBuffer or a VkImage whose memory both sides use."""

    vulkan_object: BoundObject

    def __init__(self, vk: VulkanContext, native: BoundObject, memory: Mappable) -> None:
        super().__init__(vk, native, memory)
        self.memory = memory
        self.handle_type = native.handle_type
        self.allocation_size = native.size
        self.dedicated = native.dedicated

    def _open(self) -> BoundObject:
        self.check_open()
        return self.vulkan_object

    @property
    def vk_memory(self) -> Any:
        """The VkDeviceMemory (see `SharedBuffer.vk_buffer`)."""
        return self._vk.api.for_caller(self._open().memory)


def share_memory(device: Device, native: BoundObject, make: Callable[[ExternalMemory], S], label: str | None) -> S:
    """Import Vulkan's memory on the compute side, and `make` the pair."""

    def take() -> ExternalMemory:
        with native.export() as handle:  # closes the handle unless it was consumed
            return device._take_memory(
                handle, size=native.size, dedicated=native.dedicated, label=label, noun="Vulkan memory"
            )

    return share(native, take, make)
