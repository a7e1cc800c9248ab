"""The other way round: memory that a device allocated, used by Vulkan."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._arguments import check_flags, check_timeout, check_type
from ..capabilities import Operation
from ..errors import InvalidArgumentError, LeakedResourceWarning, ResourceClosedError, UnsupportedError
from ..handles import AllocationHandle, OpaqueFd, VmmFd
from . import _api as c
from ._buffer import BufferTransfer
from ._context import VulkanContext, check_context
from ._export import Bound
from ._query import BUFFER_USAGE
from ._shared import Shared, agree, check_device

if TYPE_CHECKING:
    from .._core.allocation import Allocation
    from .._core.memory import Buffer


class ImportedBuffer(Shared, BufferTransfer):
    """A VkBuffer on a device's allocation. Made by :func:`import_allocation`.

    Attributes
    ----------
    allocation : Allocation
        Not owned.

    Examples
    --------
    >>> with device.allocate(65536) as allocation:
    ...     imported = gi.vulkan.import_allocation(vk, allocation)
    ...     imported.buffer.fill(7)
    ...     submit(record(imported.acquire))  # before the commands that read the buffer
    ...     vk.close()  # waits for the queue, and destroys the VkBuffer
    """

    _as_array = "numpy.asarray(imported.buffer.view(shape, dtype))"

    def __init__(self, vk: VulkanContext, allocation: Allocation, native: Bound) -> None:
        super().__init__(vk)
        self._foreign = c.QUEUE_FAMILY_EXTERNAL
        self._ended = False
        self.vulkan_object: Bound = native
        self.allocation = allocation

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:  # by then there may be no `sys`
        native = getattr(self, "vulkan_object", None)
        if native is not None and not native.closed and not self._ended and not _ending():
            warnings.warn("an ImportedBuffer was dropped without close()", LeakedResourceWarning, stacklevel=2)

    @property
    def vk_memory(self) -> Any:
        """The VkDeviceMemory. Raises `ResourceClosedError` after `close`."""
        self.check_open()
        return self.vulkan_object.memory

    def check_open(self) -> None:
        if self._ended or self.vulkan_object.closed:
            raise ResourceClosedError("the imported buffer was closed.")

    @property
    def buffer(self) -> Buffer:
        """The compute side's buffer, which is the allocation's own."""
        return self.allocation.buffer

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.allocation.size

    def close(self, timeout: float | None = None) -> None:
        """Destroy the VkBuffer and its memory; the allocation stays. Idempotent. Vulkan must be done with them."""
        check_timeout(timeout)
        self.vulkan_object.close()

    def _end_use(self) -> None:
        self._ended = True


def import_allocation(vk: VulkanContext, allocation: Allocation, *, usage: int = BUFFER_USAGE) -> ImportedBuffer:
    """Use a device's shareable allocation in Vulkan, in place.

    As ``OPAQUE_FD`` (``VkImportMemoryFdInfoKHR``); on lavapipe, whose file descriptors have a header of their own,
    through ``VK_EXT_external_memory_host`` and this process's mapping.

    Parameters
    ----------
    vk : VulkanContext
    allocation : Allocation
        What ``Device.allocate(size, VmmFd)`` made. It has to stay open while Vulkan uses it.
    usage : int
        ``VkBufferUsageFlags``; by default storage and transfers both ways.

    Returns
    -------
    ImportedBuffer
        Owns the Vulkan side; close it. One that is dropped instead is destroyed when `vk` is closed.

    Raises
    ------
    UnsupportedError
        The driver cannot; nothing was created.
    InvalidArgumentError
        The allocation is another GPU's, or not one that this driver takes, or the application did not enable an
        extension.
    DriverError
        A native call failed.

    Examples
    --------
    >>> with device.allocate(65536) as allocation, gi.vulkan.import_allocation(vk, allocation) as imported:
    ...     vk_buffer = imported.vk_buffer  # for vkCmdCopyBuffer and the like
    ...     np.asarray(imported.buffer.view(4))
    array([0, 0, 0, 0], dtype=uint8)
    """
    from .._core.allocation import Allocation

    check_context(vk)
    check_type(allocation, Allocation, "allocation", "one of Device.allocate()")
    usage = check_flags(usage, "usage")
    device = allocation.device
    check_device(vk, device)
    agree(vk, device, (Operation.EXPORT_ALLOCATION,), (allocation.handle_type,))
    if allocation.handle_type is not VmmFd:
        raise InvalidArgumentError("allocation", f"expected one for VmmFd, got {allocation.handle_type.__name__}.")
    if vk.physical.is_lavapipe:
        return ImportedBuffer(vk, allocation, _import_pointer(vk, allocation, usage))
    _ = vk.functions.vkGetMemoryFdKHR  # says which extension the application forgot
    with allocation.export() as handle:
        native = import_fd(vk, handle, allocation.size, usage, argument="allocation", user="vkAllocateMemory")
    return ImportedBuffer(vk, allocation, native)


def _buffer(
    vk: VulkanContext, size: int, usage: int, bit: int, argument: str, bind: Callable[[Bound, Any, int], object]
) -> Bound:
    """A VkBuffer, to which `bind` binds external memory of a type among those that the buffer takes."""
    native = Bound(vk, "Buffer", OpaqueFd)
    native.size = size

    def make() -> Any:
        external = vk.api.new("VkExternalMemoryBufferCreateInfo", handleTypes=bit)
        info = vk.api.new("VkBufferCreateInfo", pNext=external, size=size, usage=usage)
        buffer = native.new("vkCreateBuffer", "VkBuffer", info)
        requirements = vk.api.ffi.new("VkMemoryRequirements *")
        vk.call("vkGetBufferMemoryRequirements", vk.device, buffer, requirements)
        if requirements.size > size:
            raise InvalidArgumentError(
                argument, f"{vk.identity.name} wants {requirements.size} bytes for a buffer of {size}: allocate more."
            )
        bind(native, buffer, int(requirements.memoryTypeBits))
        return buffer

    native.make(make)
    return native


def import_fd(vk: VulkanContext, handle: AllocationHandle, size: int, usage: int, *, argument: str, user: str) -> Bound:
    """A VkBuffer over the whole of a device's allocation (``VkImportMemoryFdInfoKHR``, as ``OPAQUE_FD``)."""
    from .._core.ownership import lend

    bit = c.MEMORY_HANDLE_OPAQUE_FD

    def bind(native: Bound, buffer: Any, bits: int) -> None:
        def take(lent: Any) -> None:
            chain = vk.api.new("VkImportMemoryFdInfoKHR", handleType=bit, fd=lent.fd)
            native.whole(lambda: native.bind(buffer, bits, chain))

        lend(handle, take, user=user)  # drivers differ on whose the descriptor is after a failure

    return _buffer(vk, size, usage, bit, argument, bind)


def _import_pointer(vk: VulkanContext, allocation: Allocation, usage: int) -> Bound:
    new, bit = vk.api.new, c.MEMORY_HANDLE_HOST_ALLOCATION
    if not allocation.device.identity.is_cpu:
        gap = vk.capabilities.of((Operation.IMPORT_ALLOCATION, VmmFd))
        raise UnsupportedError(gap, context=vk.identity.name)
    limits = vk.physical.extended("VkPhysicalDeviceExternalMemoryHostPropertiesEXT")
    step = int(limits.minImportedHostPointerAlignment)
    address = allocation.buffer.ptr
    if address % step or allocation.size % step:
        raise InvalidArgumentError(
            "allocation", f"expected address and size in multiples of {step}, got {address:#x} and {allocation.size}."
        )

    def bind(native: Bound, buffer: Any, bits: int) -> None:
        native.keep = allocation.buffer.hold()  # as long as it lives, the device does not unmap the bytes
        pointer = vk.api.ffi.cast("void *", address)
        properties = new("VkMemoryHostPointerPropertiesEXT")
        vk.call("vkGetMemoryHostPointerPropertiesEXT", vk.device, bit, pointer, properties)
        chain = new("VkImportMemoryHostPointerInfoEXT", handleType=bit, pHostPointer=pointer)
        native.bind(buffer, bits & properties.memoryTypeBits, chain)

    return _buffer(vk, allocation.size, usage, bit, "allocation", bind)
