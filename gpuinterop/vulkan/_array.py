"""The other way round: memory that exists on the compute side, used by Vulkan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

from .. import system
from .._arguments import check_flags
from ..backend import SharingBackend
from ..capabilities import Cell, Operation, Scope
from ..errors import InvalidArgumentError, UnsupportedError
from ..handles import AllocationHandle, FdHandle, OpaqueFd
from . import _api as c
from ._buffer import SharedBuffer
from ._context import VulkanContext, check_context
from ._export import Bound, plan_buffer
from ._query import BUFFER_USAGE
from ._shared import agree, share

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.interchange import Described
    from ..backend import Block

_READS: Final = (
    c.BUFFER_TRANSFER_SRC
    | c.BUFFER_USAGE_UNIFORM_TEXEL_BUFFER
    | c.BUFFER_USAGE_UNIFORM_BUFFER
    | c.BUFFER_USAGE_INDEX_BUFFER
    | c.BUFFER_USAGE_VERTEX_BUFFER
    | c.BUFFER_USAGE_INDIRECT_BUFFER
)
"""``VkBufferUsageFlags`` by which Vulkan only reads."""
_MEMORY: Final = ("/memfd:", "/dev/shm/", "/dev/zero", "/dev/hugepages/", "/anon_hugepage", "/SYSV")
"""Paths of shared mappings that are the system's memory; pinned memory of CUDA is ``/dev/zero``."""


def import_array(
    vk: VulkanContext, array: object, *, usage: int = BUFFER_USAGE, label: str | None = None
) -> SharedBuffer:
    """Use an array that exists as a VkBuffer, in place.

    Nothing is copied: the VkBuffer begins at the array's first byte, and ends behind its last. What the array's memory
    is, its driver is asked (``cuPointerGetAttribute`` / ``hipPointerGetAttribute``), and nothing is tried:

    - Memory of a GPU must be one allocation with a virtual-memory handle: a tensor of torch's expandable segments, an
      array of JAX's pool, `Device.allocate`. Vulkan imports the whole handle (``cuMemRetainAllocationHandle``,
      ``cuMemExportToShareableHandle``; ``hipMemExportToShareableHandle``; ``VkImportMemoryFdInfoKHR``).
    - Memory of the host is imported by its address, in whole pages (``VkImportMemoryHostPointerInfoEXT``). Every Vulkan
      device takes it that imports buffers through ``VK_EXT_external_memory_host``, a GPU's as well. SwiftShader does
      not, and takes memfds, as `Device.allocate` makes them.

    Parameters
    ----------
    vk : VulkanContext
    array : array
        Array with ``__dlpack__``, ``__cuda_array_interface__`` or ``__array_interface__``; see `gpuinterop.share`. It
        is kept alive until Vulkan's objects are destroyed and the compute side lets go. It must keep its memory
        meanwhile: do not resize it. Its first byte must lie at a multiple of ``VkMemoryRequirements::alignment`` in its
        allocation; NumPy's own memory often does not, that of ``device.allocate(nbytes).buffer.view(...)`` does.
    usage : int
        ``VkBufferUsageFlags``; by default storage and transfers both ways. An immutable array, as all of JAX's are,
        takes only usages by which Vulkan reads: transfer source, uniform, index, vertex, indirect. With
        ``VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT`` the memory is allocated for addresses.
    label : str, optional
        Name of the object in messages, warnings and its `repr`.

    Returns
    -------
    SharedBuffer
        Owns Vulkan's objects; close it. `SharedBuffer.memory` stands for the array's memory, and
        `SharedBuffer.exposes` tells what else Vulkan could touch. It does not order any stream: hand over by
        :func:`share_handoff`, as with :func:`share_buffer`. A memfd that is imported as a descriptor is sealed
        against shrinking.

    Raises
    ------
    UnsupportedError
        Vulkan cannot import this kind of memory: that of ``cudaMalloc``, of a stream-ordered pool, managed memory.
        The error says what to change. Nothing was imported.
    InvalidArgumentError
        The array is another GPU's, or lies across several handles, or begins where no VkBuffer may; or the handle is
        larger than ``maxMemoryAllocationSize``; or Vulkan could write an immutable array; or the driver does not import
        buffers of this usage; or the application did not enable an extension. Nothing was imported.
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
    ...     shared.acquire(commands)  # the compute side had it
    ...     vulkan.vkCmdFillBuffer(commands, shared.vk_buffer, 0, shared.size, 7)
    ...     shared.release(commands)
    >>> submit(record(work))
    >>> vk.close()  # waits for the queue, and destroys the VkBuffer
    >>> field[0, :3]
    array([7, 7, 7], dtype=uint32)
    >>> allocation.close()
    """
    from ..sharing.attachment import SharedMemory
    from ..sharing.origin import describe, device_of

    check_context(vk)
    usage = check_flags(usage, "usage")
    found = describe(array, "array")
    if found.read_only and usage & ~_READS:
        raise InvalidArgumentError(
            "usage",
            f"expected usages by which Vulkan only reads an immutable array, got {usage:#x}; pass usage="
            "VK_BUFFER_USAGE_TRANSFER_SRC_BIT, or those of vertices, indices and uniforms; or import a copy.",
        )
    device = device_of(found, "array")
    if device.info.is_cpu:
        agree(vk, device, (Operation.EXPORT_ARRAY,), (OpaqueFd,))
    by_address = device.info.is_cpu and vk.physical.host_pointer_features(usage) & c.MEMORY_IMPORTABLE
    native = _import_pages(vk, found, usage) if by_address else _import_handle(vk, device, found, usage)
    native.keep = found.keep
    start, end = found.span
    return share(
        native,
        lambda: SharedMemory(device, start, end - start, keep=found.keep, noun="imported array", label=label),
        lambda memory: SharedBuffer(vk, native, memory, memory.buffer, immutable=found.read_only),
    )


def _import_handle(vk: VulkanContext, device: Device, array: Described, usage: int) -> Bound:
    """A VkBuffer on the one handle that an array lies in: a GPU's VMM handle, or a memfd."""
    from ..sharing.attachment import driver_lock
    from ..sharing.origin import check_block, ranges_of

    if vk.identity.conflicts(device.identity):
        raise InvalidArgumentError(
            "array",
            f"expected memory of Vulkan's {vk.identity.name}, got that of {device.name}; create the VkDevice on that "
            "GPU.",
        )

    def check(device: Device, block: Block, what: str) -> None:
        agree(vk, device, (Operation.EXPORT_ARRAY,), (block.behind.handle_type,))
        if not block.behind.travels:
            wanted = "a memfd" if device.info.is_cpu else "an exportable VMM handle"
            gap = Cell(Operation.EXPORT_ARRAY, block.behind.handle_type).gap(
                Scope.DRIVER,
                f"the driver imports memory as {wanted} alone, and this array is in none: it is {block.behind.value}.",
                "VK_EXT_external_memory_host",
                "put the array into Device.allocate(nbytes).buffer.view(shape, dtype). A physical device with "
                "VK_EXT_external_memory_host, such as lavapipe's, imports all memory of the host.",
            )
            raise UnsupportedError(gap, context=vk.identity.name)
        check_block(device, block, what)

    blocks = [block for one in ranges_of(device, {"array": array}, check) for block in one.blocks]
    if len(blocks) > 1:
        raise InvalidArgumentError(
            "array",
            f"expected an array in one handle, got one that lies across {len(blocks)}; "
            "put it into Device.allocate(nbytes).buffer.view(shape, dtype), which is one handle of any size.",
        )
    (block,) = blocks
    _check_size(vk, block.size)
    _ = vk.functions.vkGetMemoryFdKHR  # says which extension the application forgot
    with system.under(driver_lock, cast(SharingBackend, device.driver).export_block, device._handle, block) as handle:
        assert isinstance(handle, FdHandle)
        start, end = array.span
        part = start - block.address, end - start
        return import_fd(vk, handle, block.size, usage, part, argument="array", user="import_array()")


def _import_pages(vk: VulkanContext, array: Described, usage: int) -> Bound:
    """A VkBuffer on the pages that an array of the host lies in."""
    from .._core.memory import round_up

    new, bit = vk.api.new, c.MEMORY_HANDLE_HOST_ALLOCATION
    limits = vk.physical.extended("VkPhysicalDeviceExternalMemoryHostPropertiesEXT")
    step = int(limits.minImportedHostPointerAlignment)
    first, end = array.span
    start = first - first % system.PAGE
    size = round_up(end - start, system.PAGE)
    _check_size(vk, size)
    if start % step or size % step:  # only whole pages are certain to be mapped
        raise InvalidArgumentError(
            "array",
            f"expected pages in multiples of {step} bytes, got {size} bytes from {start:#x}; put the array into "
            "Device.allocate(nbytes).buffer.view(shape, dtype).",
        )
    mapped = 0
    for one in system.mappings():
        within = min(one.addresses.stop, start + size) - max(one.addresses.start, start)
        if within > 0:
            mapped += within
            _check_pages(one)
    if mapped < size:
        raise InvalidArgumentError("array", f"expected {size} bytes mapped from {start:#x}, got {mapped}; copy it.")

    def bind(native: Bound, buffer: Any, bits: int, offset: int) -> None:
        pointer = vk.api.ffi.cast("void *", start)
        properties = new("VkMemoryHostPointerPropertiesEXT")
        vk._call("vkGetMemoryHostPointerPropertiesEXT", vk.device, bit, pointer, properties)
        chain = new("VkImportMemoryHostPointerInfoEXT", handleType=bit, pHostPointer=pointer)
        native.bind(buffer, bits & properties.memoryTypeBits, chain, offset)

    features = vk.physical.host_pointer_features(usage)
    return _buffer(vk, size, usage, (first - start, end - first), bit, features, "array", bind)


def _check_size(vk: VulkanContext, size: int) -> None:
    most = vk.physical.max_allocation
    if size > most:
        raise InvalidArgumentError(
            "array",
            f"expected an allocation of {most:,} bytes or fewer, which {vk.identity.name} imports, got one of "
            f"{size:,}; take less at a time (JAX: XLA_PYTHON_CLIENT_PREALLOCATE=false).",
        )


def _check_pages(one: system.Mapped) -> None:
    """Refuse pages that NVIDIA's driver does not import: it says that it does, fails, and imports nothing any more."""
    problem = "" if "w" in one.access else "which it may only read"
    if "s" in one.access and not one.path.startswith(_MEMORY):
        problem = f"which are those of {one.path}"
    if problem:
        raise InvalidArgumentError(
            "array", f"expected pages of memory that this process may write, got some {problem}; import a copy."
        )


def import_fd(
    vk: VulkanContext, handle: AllocationHandle | FdHandle, size: int, usage: int,
    part: tuple[int, int] | None = None, *, argument: str, user: str,
) -> Bound:  # fmt: skip
    """A VkBuffer on a device's allocation (``VkImportMemoryFdInfoKHR``, as ``OPAQUE_FD``), or on a part of it."""
    from .._core.ownership import import_duplicate

    bit = c.MEMORY_HANDLE_OPAQUE_FD

    def bind(native: Bound, buffer: Any, bits: int, offset: int) -> None:
        def take(duplicate: Any) -> None:
            chain = vk.api.new("VkImportMemoryFdInfoKHR", handleType=bit, fd=duplicate.fd)
            native.whole(lambda: native.bind(buffer, bits, chain, offset))

        import_duplicate(handle, take, user=user)  # drivers differ on whose the descriptor is after a failure

    features = vk.physical.buffer_features(OpaqueFd, usage)
    return _buffer(vk, size, usage, part or (0, size), bit, features, argument, bind)


def _buffer(
    vk: VulkanContext, size: int, usage: int, part: tuple[int, int], bit: int, features: int, argument: str,
    bind: Callable[[Bound, Any, int, int], object],
) -> Bound:  # fmt: skip
    """A VkBuffer on a part (offset and size) of `size` bytes that `bind` imports as a type of memory it can have.

    What the driver would do is asked before anything is imported: on NVIDIA a failed import spoils later good ones.
    """
    name, (offset, count) = vk.identity.name, part
    if not features & c.MEMORY_IMPORTABLE:
        raise InvalidArgumentError("usage", f"{name} imports no buffers of usage {usage:#x}; pass fewer usages.")
    if features & c.FEATURE_DEDICATED_ONLY:
        raise InvalidArgumentError(
            argument,
            f"expected memory that {name} imports, which it does only if that was allocated for one buffer alone; copy "
            "the array into that of share_buffer.",
        )
    native, info = plan_buffer(vk, count, usage, bit)
    native.size = size

    def make() -> Any:
        buffer = native.new("vkCreateBuffer", "VkBuffer", info)
        needs = vk.api.ffi.new("VkMemoryRequirements *")
        vk._call("vkGetBufferMemoryRequirements", vk.device, buffer, needs)
        if offset % needs.alignment:
            raise InvalidArgumentError(
                argument,
                f"expected a first byte at a multiple of {needs.alignment} bytes, which {name} wants of a buffer, got "
                f"an address {offset % needs.alignment} bytes past one; put the array into "
                "Device.allocate(nbytes).buffer.view(shape, dtype), or take a part that begins at one.",
            )
        if offset + needs.size > size:
            raise InvalidArgumentError(
                argument,
                f"expected {needs.size} bytes behind the array's first, which {name} wants for a buffer of {count}, "
                f"got {size - offset} to the end of its allocation; allocate more.",
            )
        bind(native, buffer, int(needs.memoryTypeBits), offset)
        return buffer

    native.make(make)
    return native
