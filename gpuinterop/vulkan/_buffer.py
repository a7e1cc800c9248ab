"""Buffers that both sides use: VkBuffers imported by a gpuinterop device, or existing arrays imported by Vulkan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from .. import system
from .._arguments import MAX_SIZE, check_flags, check_nbytes
from ..capabilities import Operation
from ..errors import InvalidArgumentError, OutOfMemoryError
from ..graphics.buffer import BufferMethods, exported_block
from ..graphics.sides import agree
from ..handles import AllocationHandle, FdHandle, MemoryHandle, OpaqueFd
from . import _api as c
from ._context import VulkanContext, check_context
from ._memory import EVERYTHING, BoundObject, PairedMemory, agree_on_memory, create, require_exportable, share_memory
from ._pair import check_device, share
from ._query import BUFFER_USAGE, MEMORY_BITS, Support

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.foreign_arrays import Described
    from .._core.memory import Buffer, ExternalMemory, Mappable


_READS: Final = (
    c.BUFFER_TRANSFER_SRC
    | c.BUFFER_USAGE_UNIFORM_TEXEL_BUFFER
    | c.BUFFER_USAGE_UNIFORM_BUFFER
    | c.BUFFER_USAGE_INDEX_BUFFER
    | c.BUFFER_USAGE_VERTEX_BUFFER
    | c.BUFFER_USAGE_INDIRECT_BUFFER
)
"""``VkBufferUsageFlags`` with which Vulkan only reads."""
_MEMORY: Final = ("/memfd:", "/dev/shm/", "/dev/zero", "/dev/hugepages/", "/anon_hugepage", "/SYSV")
"""Paths of shared mappings of system memory; CUDA's pinned memory is ``/dev/zero``."""


class SharedBuffer(PairedMemory, BufferMethods):
    """One buffer, in Vulkan and on the compute side. Made by :func:`share_buffer` and :func:`import_array`.

    Attributes
    ----------
    memory : ExternalMemory or SharedMemory
        The buffer's memory: the import of Vulkan's memory, or the array's memory.
    handle_type : type
        Type of the handle that Vulkan exported; ``OpaqueFd`` for an imported array.
    allocation_size : int
        Size of the VkDeviceMemory, in bytes.
    dedicated : bool
        Whether the allocation is dedicated.

    Examples
    --------
    >>> with gi.vulkan.share_buffer(vk, device, 4096) as shared:
    ...     vk_buffer = shared.vk_buffer  # Vulkan's
    ...     shared.copy_from_host(np.arange(4, dtype="float32"))
    ...     np.asarray(shared.view(4, "float32"))
    array([0., 1., 2., 3.], dtype=float32)
    """

    def __init__(
        self, vk: VulkanContext, native: BoundObject, memory: Mappable, buffer: Buffer, *, immutable: bool = False
    ) -> None:
        super().__init__(vk, native, memory)
        self._buffer, self._immutable = buffer, immutable

    @property
    def exposes(self) -> str:
        """A sentence about the memory that Vulkan can access: the whole VkDeviceMemory.

        For an imported array, that is the whole allocation or the whole pages, including other data in them: other
        tensors in torch's segment, all of JAX's pool, or neighbours on the heap.
        """
        return f"{self.allocation_size:,} bytes, of which the buffer is {self.size:,}"

    @property
    def vk_buffer(self) -> Any:
        """The VkBuffer: an object of PyPI's `vulkan` or an int, as your handles (see `VulkanContext`).

        Raises `ResourceClosedError` after you close the buffer or the context.
        """
        return self._vk_handle()

    def release(self, cmd: Any, *, stage: int = c.STAGE_ALL_COMMANDS, access: int = EVERYTHING) -> None:
        """Record Vulkan's release of the buffer. Required after Vulkan's use and before the signal.

        Native call: ``vkCmdPipelineBarrier`` to ``VK_QUEUE_FAMILY_EXTERNAL`` (``FOREIGN`` for a dma-buf).

        Parameters
        ----------
        cmd : VkCommandBuffer
            A command buffer that is being recorded, for a queue of the context's family.
        stage : int
            ``VkPipelineStageFlags`` of Vulkan's use; by default all.
        access : int
            ``VkAccessFlags`` of Vulkan's use; by default all.

        Raises
        ------
        ResourceClosedError
            The buffer or the context was closed.

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
        native = self._open()
        native.transfer(cmd, native.vulkan_side(stage, access), native.other_side(c.STAGE_BOTTOM_OF_PIPE))

    def acquire(self, cmd: Any, *, stage: int = c.STAGE_ALL_COMMANDS, access: int = EVERYTHING) -> None:
        """Record Vulkan's acquire of the buffer. Required after the wait and before Vulkan's use.

        Skip it before the very first use, unless the compute side wrote first. The wait stage of the submission
        must be `stage` or an earlier one.

        Parameters
        ----------
        cmd, stage, access
            See `release`.

        Raises
        ------
        ResourceClosedError
            See `release`.
        """
        native = self._open()
        # The source stage chains the barrier to the semaphore's wait.
        native.transfer(cmd, native.other_side(stage), native.vulkan_side(stage, access))


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

    Native calls: ``vkGetPhysicalDeviceExternalBufferProperties``, ``vkCreateBuffer``, ``vkAllocateMemory`` (dedicated
    if the driver requires it; on a GPU in device memory), ``vkGetMemoryFdKHR``, and the device's import and mapping.

    Parameters
    ----------
    vk : VulkanContext
    device : Device
    size : int
        Size in bytes.
    usage : int
        ``VkBufferUsageFlags``. Default: storage and transfers in both directions.
    handle_types : sequence of type, optional
        Handle types in order of preference. Default: ``OpaqueFd``, then ``DmaBufFd``.
    label : str, optional
        Name of the object in messages, warnings and its `repr`.

    Returns
    -------
    SharedBuffer
        The buffer, which owns both sides; close it.

    Raises
    ------
    UnsupportedError
        One side does not support it; nothing was created.
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


def create_buffer(vk: VulkanContext, size: int, usage: int, handle_type: type[MemoryHandle] = OpaqueFd) -> BoundObject:
    """Create a buffer with exportable memory, after a check that the driver can export it."""
    size = check_nbytes(size)
    usage = check_flags(usage, "usage")
    support = Support(vk.physical.buffer_features(MEMORY_BITS[handle_type], usage), size=MAX_SIZE)
    require_exportable(vk, support.features, Operation.MAP_BUFFER, handle_type)
    try:
        return create(vk, "Buffer", support, handle_type, size=size, usage=usage)
    except OutOfMemoryError as error:
        most = vk.physical.max_allocation
        limit = f"; the driver allocates at most {most:,} at once" if size > most else ""
        meaning = f"{size:,} bytes are wanted{limit}"
        raise OutOfMemoryError(error.call, error.code, error.symbol, meaning) from None


# -- importing arrays of the compute side ------------------------------------------------------------------------------


def import_array(
    vk: VulkanContext, array: object, *, usage: int = BUFFER_USAGE, label: str | None = None
) -> SharedBuffer:
    """Use an existing array as a VkBuffer, in place.

    Nothing is copied: the VkBuffer covers the bytes from the array's first to its last. `import_array` asks the driver
    about the array's memory (``cuPointerGetAttribute`` / ``hipPointerGetAttribute``):

    - GPU memory must be one allocation with a virtual-memory handle: a tensor in torch's expandable segments, an array
      in JAX's pool, memory of `Device.allocate`. Vulkan imports the whole handle (``cuMemRetainAllocationHandle``,
      ``cuMemExportToShareableHandle``; ``hipMemExportToShareableHandle``; ``VkImportMemoryFdInfoKHR``).
    - Host memory is imported by address, in whole pages (``VkImportMemoryHostPointerInfoEXT``). That needs a device
      that imports buffers through ``VK_EXT_external_memory_host``; GPUs can do so too. SwiftShader cannot, but imports
      memfds, which `Device.allocate` makes.

    Parameters
    ----------
    vk : VulkanContext
    array : array
        Array with ``__dlpack__``, ``__cuda_array_interface__`` or ``__array_interface__`` (see `gpuinterop.share`). It
        is kept until Vulkan's objects are destroyed and the compute side has closed it. Do not resize it meanwhile: it
        must keep its memory. Its offset in its allocation must be a multiple of ``VkMemoryRequirements::alignment``;
        memory of `Device.empty` fits, NumPy's own often does not.
    usage : int
        ``VkBufferUsageFlags``. Default: storage and transfers in both directions. For an immutable array, such as
        JAX's, pass only usages with which Vulkan reads: transfer source, uniform, index, vertex, indirect. With
        ``VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT`` the memory is allocated for device addresses.
    label : str, optional
        Name of the object in messages, warnings and its `repr`.

    Returns
    -------
    SharedBuffer
        The buffer, which owns Vulkan's objects; close it. `SharedBuffer.exposes` reports what else Vulkan can access.
        It does not order any stream: use :func:`share_handoff`, as with :func:`share_buffer`. A memfd that is imported
        as a descriptor is sealed against shrinking.

    Raises
    ------
    UnsupportedError
        Vulkan cannot import this kind of memory: ``cudaMalloc``, a stream-ordered pool, managed memory. The error says
        what to change. Nothing was imported.
    InvalidArgumentError
        The array has no element, is on another GPU, spans several handles, starts at an offset that a VkBuffer cannot
        have, or is in a handle larger than ``maxMemoryAllocationSize``. Or Vulkan could write an immutable array, the
        driver does not import buffers with this usage, or the application did not enable an extension. Nothing was
        imported.
    ArgumentTypeError
        `array` is not an array.
    DriverError
        A native call failed.

    Examples
    --------
    >>> import vulkan
    >>> allocation = device.allocate(4096)
    >>> field = np.asarray(allocation.buffer.view((32, 32), "uint32"))  # or a tensor that you have
    >>> shared = gi.vulkan.import_array(vk, field)
    >>> def work(commands):
    ...     shared.acquire(commands)  # the compute side used it before
    ...     vulkan.vkCmdFillBuffer(commands, shared.vk_buffer, 0, shared.size, 7)
    ...     shared.release(commands)
    >>> submit(record(work))
    >>> vk.close()  # waits for the queue, and destroys the VkBuffer
    >>> field[0, :3]
    array([7, 7, 7], dtype=uint32)
    >>> allocation.close()
    """
    from ..sharing.find_memory import describe, device_of
    from ..sharing.memory import SharedMemory

    check_context(vk)
    usage = check_flags(usage, "usage")
    described = describe(array, "array", empty=False)
    if described.read_only and usage & ~_READS:
        raise InvalidArgumentError(
            "usage",
            f"expected usages with which Vulkan only reads an immutable array, got {usage:#x}; pass usage="
            "VK_BUFFER_USAGE_TRANSFER_SRC_BIT, or flags for vertices, indices and uniforms; or import a copy.",
        )
    device = device_of({"array": described})
    if device.info.is_cpu:
        agree(vk, device, (Operation.EXPORT_ARRAY,), (OpaqueFd,))
    by_address = (
        device.info.is_cpu and vk.physical.buffer_features(c.MEMORY_HANDLE_HOST_ALLOCATION, usage) & c.MEMORY_IMPORTABLE
    )
    native = _import_pages(vk, described, usage) if by_address else _import_handle(vk, device, described, usage)
    native.keep = described.keep
    start, end = described.span
    return share(
        native,
        lambda: SharedMemory(device, start, end - start, keep=described.keep, noun="imported array", label=label),
        lambda memory: SharedBuffer(vk, native, memory, memory.buffer, immutable=described.read_only),
    )


def _import_handle(vk: VulkanContext, device: Device, array: Described, usage: int) -> BoundObject:
    """Make a VkBuffer on the one handle that contains an array: a GPU's VMM handle, or a memfd."""

    def check_size(size: int) -> None:
        _check_size(vk, size)
        _ = vk.functions.vkGetMemoryFdKHR  # raises if the application did not enable the extension

    way_out = "A physical device with VK_EXT_external_memory_host, such as lavapipe's, imports all host memory."
    with exported_block(vk, device, array, "VkDevice", check_size, way_out) as (handle, size, offset):
        start, end = array.span
        return import_fd(vk, handle, size, usage, (offset, end - start), argument="array", user="import_array()")


def _import_pages(vk: VulkanContext, array: Described, usage: int) -> BoundObject:
    """Make a VkBuffer on the pages that contain a host array."""
    from .._core.memory import round_up

    new, bit = vk.api.new, c.MEMORY_HANDLE_HOST_ALLOCATION
    limits = vk.physical.extended("VkPhysicalDeviceExternalMemoryHostPropertiesEXT")
    step = int(limits.minImportedHostPointerAlignment)
    first, end = array.span
    start = first - first % system.PAGE
    size = round_up(end - start, system.PAGE)
    _check_size(vk, size)
    if start % step or size % step:  # do not round up to `step`: only whole pages are certainly mapped
        raise InvalidArgumentError(
            "array",
            f"expected pages in multiples of {step} bytes, got {size} bytes from {start:#x}; put it into "
            "Device.empty(shape, dtype).",
        )
    mapped = 0
    for pages in system.mappings(within=range(start, start + size)):
        mapped += min(pages.addresses.stop, start + size) - max(pages.addresses.start, start)
        _check_pages(pages)
    if mapped < size:
        raise InvalidArgumentError("array", f"expected {size} bytes mapped from {start:#x}, got {mapped}; copy it.")

    def bind(native: BoundObject, buffer: Any, bits: int, offset: int) -> None:
        pointer = vk.api.ffi.cast("void *", start)
        properties = new("VkMemoryHostPointerPropertiesEXT")
        vk._call("vkGetMemoryHostPointerPropertiesEXT", vk.device, bit, pointer, properties)
        chain = new("VkImportMemoryHostPointerInfoEXT", handleType=bit, pHostPointer=pointer)
        native.bind(buffer, bits & properties.memoryTypeBits, chain, offset)

    return _buffer(vk, size, usage, (first - start, end - first), bit, "array", bind)


def _check_size(vk: VulkanContext, size: int) -> None:
    most = vk.physical.max_allocation
    if size > most:
        raise InvalidArgumentError(
            "array",
            f"expected an allocation of at most {most:,} bytes, the limit of {vk.identity.name}, got {size:,}; use a "
            "smaller one (JAX: XLA_PYTHON_CLIENT_PREALLOCATE=false).",
        )


def _check_pages(pages: system.Mapped) -> None:
    """Refuse pages that NVIDIA's driver claims to import: the import fails, and so do all later ones."""
    problem = "" if "w" in pages.access else "that are read-only"
    if "s" in pages.access and not pages.path.startswith(_MEMORY):
        problem = f"of the file {pages.path}"
    if problem:
        raise InvalidArgumentError(
            "array", f"expected pages of memory that this process can write, got pages {problem}; import a copy."
        )


def import_fd(
    vk: VulkanContext, handle: AllocationHandle | FdHandle, size: int, usage: int,
    part: tuple[int, int] | None = None, *, argument: str, user: str,
) -> BoundObject:  # fmt: skip
    """Make a VkBuffer on a device's allocation, or on a part of it (``VkImportMemoryFdInfoKHR``, ``OPAQUE_FD``)."""
    from .._core.importing import import_duplicate

    bit = c.MEMORY_HANDLE_OPAQUE_FD

    def bind(native: BoundObject, buffer: Any, bits: int, offset: int) -> None:
        def take(duplicate: Any) -> None:
            chain = vk.api.new("VkImportMemoryFdInfoKHR", handleType=bit, fd=duplicate.fd)
            native.all_or_nothing(lambda: native.bind(buffer, bits, chain, offset))

        import_duplicate(handle, take, user=user)  # after a failure, drivers differ in who owns the descriptor

    return _buffer(vk, size, usage, part or (0, size), bit, argument, bind)


def _buffer(
    vk: VulkanContext, size: int, usage: int, part: tuple[int, int], bit: int, argument: str,
    bind: Callable[[BoundObject, Any, int, int], object],
) -> BoundObject:  # fmt: skip
    """Make a VkBuffer on a part (offset and size) of `size` bytes, which `bind` imports.

    All checks come before the import, because on NVIDIA a failed import makes later correct ones fail.
    """
    name, (offset, count) = vk.identity.name, part
    features = vk.physical.buffer_features(bit, usage)
    if not features & c.MEMORY_IMPORTABLE:
        raise InvalidArgumentError("usage", f"{name} cannot import buffers of usage {usage:#x}; pass fewer usages.")
    if features & c.FEATURE_DEDICATED_ONLY:
        raise InvalidArgumentError(
            argument,
            f"expected memory that {name} imports, which must be allocated for one buffer; copy the array into "
            "memory of share_buffer.",
        )
    native = BoundObject(vk, "Buffer", OpaqueFd, bit, usage, size=count)
    native.size = size

    def place(buffer: Any, needs: Any, _: bool) -> None:
        if offset % needs.alignment:
            raise InvalidArgumentError(
                argument,
                f"expected a first byte at a multiple of {needs.alignment} bytes, which {name} requires, got an "
                f"address {offset % needs.alignment} bytes past one; put the array into Device.empty(shape, dtype), or "
                "pass a part that starts at one.",
            )
        if offset + needs.size > size:
            raise InvalidArgumentError(
                argument,
                f"expected {needs.size} bytes from the array's first, which {name} requires for a buffer of {count}, "
                f"got {size - offset} to the end of its allocation; allocate more.",
            )
        bind(native, buffer, needs.memoryTypeBits, offset)

    return native.build(place)
