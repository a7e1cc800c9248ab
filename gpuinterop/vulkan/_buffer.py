"""Buffers that both sides use: made in Vulkan, imported by a gpuinterop device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._arguments import NotAnArray
from ..capabilities import Operation
from ..errors import InvalidArgumentError
from ..handles import MemoryHandle
from . import _api as c
from ._context import VulkanContext
from ._export import Bound, create_buffer
from ._query import BUFFER_USAGE
from ._shared import EVERYTHING, PairedMemory, agree_on_memory, barrier, check_device, command_buffer, share_memory

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.interchange import View
    from .._core.memory import Buffer, ExternalMemory, Mappable
    from .._core.stream import Stream


def buffer_barrier(
    vk: VulkanContext, buffer: Any, source: tuple[int, int, int], target: tuple[int, int, int]
) -> tuple[Any, ...]:
    """What ``vkCmdPipelineBarrier`` takes behind the command buffer, between two of (stage, access, queue family)."""
    null = vk.api.ffi.NULL
    one = barrier(vk, "Buffer", source, target, buffer=buffer, size=c.WHOLE_SIZE)
    return source[0], target[0], 0, 0, null, 1, one, 0, null


class SharedBuffer(PairedMemory, NotAnArray):
    """One buffer, in Vulkan and on the compute side. Made by :func:`share_buffer` and :func:`import_array`.

    Attributes
    ----------
    memory : ExternalMemory or SharedMemory
        What the buffer is of: the import of Vulkan's memory, or what stands for the array's.
    handle_type : type
        The type of the handle that Vulkan exported it as; ``OpaqueFd`` for an imported array.
    allocation_size : int
        Size of the VkDeviceMemory, in bytes.
    dedicated : bool
        Whether the allocation is a dedicated one.

    Examples
    --------
    >>> with gi.vulkan.share_buffer(vk, device, 4096) as shared:
    ...     vk_buffer = shared.vk_buffer  # Vulkan's
    ...     shared.copy_from_host(np.arange(4, dtype="float32"))
    ...     np.asarray(shared.view(4, "float32"))
    array([0., 1., 2., 3.], dtype=float32)
    """

    _as_array = "numpy.asarray(shared.view(shape, dtype))"

    def __init__(
        self, vk: VulkanContext, native: Bound, memory: Mappable, buffer: Buffer, *, immutable: bool = False
    ) -> None:
        super().__init__(vk, native, memory)
        self._buffer, self._immutable = buffer, immutable

    @property
    def buffer(self) -> Buffer:
        """The compute side's buffer; `ptr`, `view`, `copy_from_host`, `copy_to_host` and `fill` are its.

        Raises
        ------
        InvalidArgumentError
            It is an imported array that its library takes for immutable: read the array itself.
        """
        if self._immutable:
            raise InvalidArgumentError(
                "array", "expected an array that may be written, got an immutable one; read it by its own library."
            )
        return self._buffer

    @property
    def exposes(self) -> str:
        """The memory that Vulkan could touch, in words.

        Vulkan has the whole VkDeviceMemory. That of an imported array is the whole allocation that the array is a part
        of, or the whole pages: with other tensors of torch's segment, all of JAX's pool, the heap's neighbours.

        Examples
        --------
        >>> with gi.vulkan.import_array(vk, buffer.view(512, offset=256)) as shared:
        ...     shared.exposes
        '65,536 bytes, of which the buffer is 512'
        """
        return f"{self.allocation_size:,} bytes, of which the buffer is {self.size:,}"

    @property
    def vk_buffer(self) -> Any:
        """The VkBuffer, an object of PyPI's `vulkan` or an int (`VulkanContext` says which).

        Raises `ResourceClosedError` after `close`, or the context's.
        """
        return self._vk.api.for_caller(self._open_handle())

    def release(self, cmd: Any, *, stage: int = c.STAGE_ALL_COMMANDS, access: int = EVERYTHING) -> None:
        """Record: Vulkan gives the buffer away. Required after Vulkan's use and before the signal.

        ``vkCmdPipelineBarrier`` to ``VK_QUEUE_FAMILY_EXTERNAL`` (``FOREIGN`` for a dma-buf).

        Parameters
        ----------
        cmd : VkCommandBuffer
            Being recorded, for a queue of the context's family.
        stage : int
            ``VkPipelineStageFlags`` of Vulkan's use; by default all.
        access : int
            ``VkAccessFlags`` of Vulkan's use; by default all.

        Raises
        ------
        ResourceClosedError
            The buffer was closed, or the context.

        Examples
        --------
        >>> import vulkan
        >>> shared = gi.vulkan.share_buffer(vk, device, 4096)
        >>> def work(commands):
        ...     vulkan.vkCmdFillBuffer(commands, shared.vk_buffer, 0, 4096, 0x07070707)
        ...     shared.release(commands)
        >>> submit(record(work))
        >>> vk.close()  # waits for the queue
        """
        source = stage, access, self._vk._family()
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

        Examples
        --------
        >>> shared = gi.vulkan.share_buffer(vk, device, 4096)
        >>> shared.fill(7)  # the compute side writes first
        >>> submit(record(shared.acquire))  # before the commands that read the buffer
        >>> vk.close()  # waits for the queue
        """
        self._transfer(cmd, (stage, 0, self._foreign), (stage, access, self._vk._family()))

    def _transfer(self, cmd: Any, source: tuple[int, int, int], target: tuple[int, int, int]) -> None:
        commands = command_buffer(self._vk, cmd, source, target)
        what = buffer_barrier(self._vk, self._open_handle(), source, target)
        self.vulkan_object._call("vkCmdPipelineBarrier", commands, *what)

    @property
    def ptr(self) -> int:
        """`Buffer.ptr`."""
        return self.buffer.ptr

    @property
    def size(self) -> int:
        """Size in bytes that was asked for, or of the imported array."""
        return self._buffer.size

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


def share_buffer(
    vk: VulkanContext,
    device: Device,
    size: int,
    *,
    usage: int = BUFFER_USAGE,
    handle_types: Sequence[type[MemoryHandle]] | None = None,
    label: str | None = None,
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
    label : str, optional
        Name of the object in messages, warnings and its `repr`.

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

    Examples
    --------
    >>> with gi.vulkan.share_buffer(vk, device, 1 << 20) as shared:
    ...     field = np.asarray(shared.view((512, 512), "float32"))
    ...     field[:] = 1
    ...     vk_buffer = shared.vk_buffer
    """
    check_device(vk, device)
    kind = agree_on_memory(vk, device, Operation.MAP_BUFFER, handle_types)
    native = create_buffer(vk, size, usage, kind)

    def make(memory: ExternalMemory) -> SharedBuffer:
        return SharedBuffer(vk, native, memory, memory.map_buffer(offset=0, size=size, label=label))

    return share_memory(device, native, make, label)
