"""Buffers that both sides use: made in Vulkan, imported by a gpuinterop device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..capabilities import Operation
from ..handles import MemoryHandle
from . import _api as c
from ._context import Native, VulkanContext
from ._export import Bound, create_buffer
from ._query import BUFFER_USAGE
from ._shared import (
    EVERYTHING,
    Shared,
    agree,
    check_device,
    command_buffer,
    foreign_family,
    import_exported,
    memory_types_of,
)

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.interchange import View
    from .._core.memory import Buffer, ExternalMemory
    from .._core.stream import Stream

__all__ = ["BufferTransfer", "SharedBuffer", "buffer_barrier", "share_buffer"]


def buffer_barrier(
    vk: VulkanContext, buffer: Any, source: tuple[int, int, int], target: tuple[int, int, int]
) -> tuple[Any, ...]:
    """What ``vkCmdPipelineBarrier`` takes behind the command buffer, between two of (stage, access, queue family)."""
    null = vk.api.ffi.NULL
    barrier = vk.api.new(
        "VkBufferMemoryBarrier",
        srcAccessMask=source[1],
        dstAccessMask=target[1],
        srcQueueFamilyIndex=source[2],
        dstQueueFamilyIndex=target[2],
        buffer=buffer,
        size=c.WHOLE_SIZE,
    )
    return source[0], target[0], 0, 0, null, 1, barrier, 0, null


class BufferTransfer:
    """Ownership transfers of a VkBuffer to and from the other side."""

    _vk: VulkanContext
    _native: Native
    _foreign: int

    @property
    def vk_buffer(self) -> Any:
        """The VkBuffer."""
        raise NotImplementedError

    def release(self, cmd: Any, *, stage: int = c.STAGE_ALL_COMMANDS, access: int = EVERYTHING) -> None:
        """Record: Vulkan gives the buffer away. Required after Vulkan's use and before the signal.

        ``vkCmdPipelineBarrier`` to ``VK_QUEUE_FAMILY_EXTERNAL`` (``FOREIGN`` for a dma-buf).

        Parameters
        ----------
        cmd : VkCommandBuffer
            Being recorded, for a queue of the context's family.
        stage, access : int
            ``VkPipelineStageFlags`` and ``VkAccessFlags`` of Vulkan's use; by default all.

        Raises
        ------
        ResourceClosedError
            The buffer was closed, or the context.
        """
        source = stage, access, self._vk.family()
        self._transfer(cmd, source, (c.STAGE_BOTTOM_OF_PIPE, 0, self._foreign))

    def acquire(self, cmd: Any, *, stage: int = c.STAGE_ALL_COMMANDS, access: int = EVERYTHING) -> None:
        """Record: Vulkan takes the buffer over. Required after the wait and before Vulkan's use.

        Not before the very first use, unless the compute side wrote first. The submission's wait stage has to be
        `stage` or an earlier one.

        Parameters
        ----------
        cmd, stage, access
            See `release`.

        Raises
        ------
        ResourceClosedError
            See `release`.
        """
        self._transfer(cmd, (stage, 0, self._foreign), (stage, access, self._vk.family()))

    def _transfer(self, cmd: Any, source: tuple[int, int, int], target: tuple[int, int, int]) -> None:
        commands = command_buffer(self._vk, cmd, source, target)
        barrier = buffer_barrier(self._vk, self.vk_buffer, source, target)
        self._native.call("vkCmdPipelineBarrier", commands, *barrier)


class SharedBuffer(Shared, BufferTransfer):
    """One buffer, in Vulkan and on the compute side. Made by :func:`share_buffer`.

    Attributes
    ----------
    buffer : Buffer
        The compute side's; `ptr`, `size`, `view`, `copy_from_host`, `copy_to_host` and `fill` are its.
    memory : ExternalMemory
        What the buffer was mapped from.
    handle_type : type
        The type of the handle that it was exported as.
    """

    def __init__(self, vk: VulkanContext, native: Bound, memory: ExternalMemory, size: int) -> None:
        super().__init__(vk)
        native.pair(memory)
        self._native: Bound = native
        self.memory = memory
        self.handle_type = native.handle_type
        self._foreign = foreign_family(native.handle_type)
        self.buffer: Buffer = memory.map_buffer(offset=0, size=size)

    @property
    def vk_buffer(self) -> Any:
        """The VkBuffer, PyPI vulkan's handle. Raises `ResourceClosedError` after `close`, or the context's."""
        self._require_open(self.memory)
        return self._native.handle

    @property
    def vk_memory(self) -> Any:
        """The VkDeviceMemory. Raises as `vk_buffer`."""
        self._require_open(self.memory)
        return self._native.memory

    @property
    def allocation_size(self) -> int:
        """``VkMemoryRequirements::size``, in bytes."""
        return self._native.size

    @property
    def dedicated(self) -> bool:
        """Whether the allocation is a dedicated one."""
        return self._native.dedicated

    @property
    def ptr(self) -> int:
        """`Buffer.ptr`."""
        return self.buffer.ptr

    @property
    def size(self) -> int:
        """`Buffer.size`: the size in bytes that was asked for."""
        return self.buffer.size

    def view(
        self, shape: int | Sequence[int], dtype: object = "uint8", offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> View:  # fmt: skip
        """Call `Buffer.view`."""
        return self.buffer.view(shape, dtype, offset, strides)

    def copy_from_host(self, source: object, *, offset: int = 0, stream: Stream | None = None) -> None:
        """Call `Buffer.copy_from_host`."""
        self.buffer.copy_from_host(source, offset=offset, stream=stream)

    def copy_to_host(self, target: object, *, offset: int = 0, stream: Stream | None = None) -> None:
        """Call `Buffer.copy_to_host`."""
        self.buffer.copy_to_host(target, offset=offset, stream=stream)

    def fill(self, byte: int = 0, *, offset: int = 0, size: int | None = None, stream: Stream | None = None) -> None:
        """Call `Buffer.fill`."""
        self.buffer.fill(byte, offset=offset, size=size, stream=stream)

    def close(self, timeout: float | None = None) -> None:
        """End use on both sides. Idempotent; never blocks unless `timeout` is given.

        The VkBuffer and its memory are destroyed: Vulkan's own work with them must be done before. Pending work of the
        compute side and exported arrays keep the bytes, and may outlive even the VkDevice.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the compute side to let go of the bytes too.

        Raises
        ------
        ResourceBusyError
            `timeout` passed, and the compute side still uses the memory; it is released later all the same.
        """
        self._close(self.memory, self._native, timeout)


def share_buffer(
    vk: VulkanContext,
    device: Device,
    size: int,
    *,
    usage: int = BUFFER_USAGE,
    handle_types: Sequence[type[MemoryHandle]] | None = None,
) -> SharedBuffer:
    """Make a VkBuffer whose bytes the compute side uses in place.

    Asks ``vkGetPhysicalDeviceExternalBufferProperties``; then ``vkCreateBuffer``, ``vkAllocateMemory`` (dedicated
    where the driver wants that; near the device on a GPU), ``vkGetMemoryFdKHR``, and the device's import and mapping.

    Parameters
    ----------
    vk : VulkanContext
    device : Device
    size : int
        Size in bytes.
    usage : int
        ``VkBufferUsageFlags``; by default storage and transfers both ways.
    handle_types : sequence of type, optional
        The types in order of preference; by default ``OpaqueFd``, then ``DmaBufFd``.

    Returns
    -------
    SharedBuffer
        Owns both sides; close it.

    Raises
    ------
    UnsupportedError
        One side cannot; nothing was created.
    InvalidArgumentError
        `device` is another GPU, the usage cannot be shared, or the application did not enable an extension.
    DriverError
        A native call failed.
    """
    check_device(vk, device)
    types = memory_types_of(handle_types)
    kind = agree(vk, device, (Operation.IMPORT_MEMORY, Operation.MAP_BUFFER), types)
    _ = vk.functions.vkGetMemoryFdKHR  # says which extension the application forgot, before anything is made
    native = create_buffer(vk, size, usage, kind)
    with ExitStack() as undo:
        undo.callback(native.close)
        memory = import_exported(device, native)
        undo.callback(memory.close)
        shared = SharedBuffer(vk, native, memory, size)
        undo.pop_all()
    return shared
