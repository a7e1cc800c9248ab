"""Common parts of all shared objects: the choice of a handle type, both sides' end, barriers' arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from .._arguments import NoCopy, check_flags, check_sequence, check_timeout, check_type
from ..capabilities import Operation
from ..errors import ArgumentTypeError, InvalidArgumentError, ResourceClosedError, UnsupportedError
from ..handles import DmaBufFd, MemoryHandle, OpaqueFd
from . import _api as c
from ._context import VulkanContext, VulkanObject, check_context
from ._export import Bound

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.memory import ExternalMemory, Mappable
    from .._core.resource import Resource


R = TypeVar("R", bound="Resource")
S = TypeVar("S")

EVERYTHING: Final = c.ACCESS_MEMORY_READ | c.ACCESS_MEMORY_WRITE
_MEMORY_TYPES: Final[tuple[type[MemoryHandle], ...]] = (OpaqueFd, DmaBufFd)


def check_device(vk: VulkanContext, device: Device) -> None:
    """Refuse what is certainly another GPU: drivers would import its memory without a word."""
    from .._core.device import Device

    check_context(vk)
    check_type(device, Device, "device", "a device of gpuinterop")
    if vk.identity.conflicts(device.identity):
        raise InvalidArgumentError(
            "device",
            f"{device.name} is not Vulkan's {vk.identity.name}; "
            "use gpuinterop.match_device(gpuinterop.vulkan.identity(physical_device)).",
        )


def agree(vk: VulkanContext, device: Device, operations: Sequence[Operation], types: Sequence[type[Any]]) -> type[Any]:
    """The first handle type in which both sides can do all of `operations`; the first gap otherwise."""
    gap = None
    for kind in types:
        cells = [(operation, kind) for operation in operations]
        for table, owner in ((device.capabilities, device.name), (vk.capabilities, vk.identity.name)):
            if missing := table.missing(*cells):
                gap = gap or UnsupportedError(missing[0], context=owner)
                break
        else:
            return kind
    assert gap is not None  # no caller gives no types
    raise gap


def agree_on_memory(
    vk: VulkanContext, device: Device, mapping: Operation, handle_types: Sequence[type[MemoryHandle]] | None
) -> type[MemoryHandle]:
    """The handle type of memory that Vulkan exports, and the device imports and maps."""
    kind = agree(vk, device, (Operation.IMPORT_MEMORY, mapping), _memory_types_of(handle_types))
    _ = vk.functions.vkGetMemoryFdKHR  # says which extension the application forgot, before anything is made
    return kind


def _memory_types_of(handle_types: Sequence[type[MemoryHandle]] | None) -> Sequence[type[MemoryHandle]]:
    """The argument `handle_types`, checked."""
    if handle_types is None:
        return _MEMORY_TYPES
    check_sequence(handle_types, "handle_types", "a sequence of handle types")
    given: Sequence[object] = handle_types
    for kind in given:
        if not isinstance(kind, type) or not issubclass(kind, MemoryHandle):
            raise ArgumentTypeError("handle_types", f"expected types of memory handles such as OpaqueFd, got {kind!r}.")
    if not handle_types:
        raise InvalidArgumentError("handle_types", "expected one type or more, got none.")
    return handle_types


class Shared(NoCopy):
    """The end of a ``with`` block closes it.

    If an exception ends it, the compute side's half is closed, and Vulkan's waits for the context's `close`, or for its
    own: the queue may be waiting for a signal that will not come, and a driver blocks or crashes if its semaphore is
    destroyed then. A bridged semaphore is closed whole.
    """

    def __init__(self, vk: VulkanContext) -> None:
        self._vk = vk

    def close(self, timeout: float | None = None) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._end_use()

    def _end_use(self) -> None:
        raise NotImplementedError


class Pair(Shared):
    """Vulkan's half and the compute side's half of one object."""

    def __init__(self, vk: VulkanContext, native: VulkanObject, other: Resource) -> None:
        super().__init__(vk)
        native.pair(other)
        self.vulkan_object = native
        self._other = other

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._other.label}{' closed' if self._other.closed else ''}>"

    def check_open(self) -> None:
        """Refuse to hand out a Vulkan object that is destroyed, or will be any moment."""
        self._vk._check_open()
        if self._other.closed:
            raise ResourceClosedError(f"the {type(self).__name__} of {self._other.label} was closed.")

    def _open_handle(self) -> Any:
        """Vulkan's handle, after `check_open`."""
        self.check_open()
        return self.vulkan_object.handle

    def close(self, timeout: float | None = None) -> None:
        """End use on both sides. Idempotent; never blocks unless `timeout` is given.

        The Vulkan objects are destroyed: Vulkan's own work with them must be done before. Pending work of the compute
        side and exported arrays keep the payload, and may outlive even the VkDevice.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the compute side to let go of the payload too.

        Raises
        ------
        ResourceBusyError
            `timeout` passed, and the compute side still uses the payload; it is released later all the same.
        """
        check_timeout(timeout)  # what is refused destroys nothing
        try:
            self._other.close(timeout)
        finally:
            self.vulkan_object.close()

    def _end_use(self) -> None:
        self.vulkan_object.end_use()


class PairedMemory(Pair):
    """A VkBuffer or a VkImage whose memory both sides have."""

    vulkan_object: Bound

    def __init__(self, vk: VulkanContext, native: Bound, memory: Mappable) -> None:
        super().__init__(vk, native, memory)
        self.memory = memory
        self.handle_type = native.handle_type
        self.allocation_size = native.size
        self.dedicated = native.dedicated
        self._foreign = c.QUEUE_FAMILY_FOREIGN if native.handle_type is DmaBufFd else c.QUEUE_FAMILY_EXTERNAL

    @property
    def vk_memory(self) -> Any:
        """The VkDeviceMemory, an object of PyPI's `vulkan` or an int (`VulkanContext` says which).

        Raises `ResourceClosedError` after `close`, or the context's.
        """
        self.check_open()
        return self._vk.api.for_caller(self.vulkan_object.memory)


def command_buffer(vk: VulkanContext, cmd: Any, source: Sequence[int], target: Sequence[int]) -> Any:
    """The command buffer of a barrier from (stage, access, ...) to another; checks what a caller may have given."""
    vk._check_open()
    check_flags(source[0], "stage")
    check_flags(target[0], "stage")
    check_flags(source[1], "access", empty=True)
    check_flags(target[1], "access", empty=True)
    return vk.api.handle("VkCommandBuffer", cmd, "cmd")


def barrier(vk: VulkanContext, kind: str, source: Sequence[int], target: Sequence[int], **fields: Any) -> Any:
    """Make a barrier of one buffer or image, between two of (stage, access, queue family, ...)."""
    return vk.api.new(
        f"Vk{kind}MemoryBarrier",
        srcAccessMask=source[1],
        dstAccessMask=target[1],
        srcQueueFamilyIndex=source[2],
        dstQueueFamilyIndex=target[2],
        **fields,
    )


def share(native: VulkanObject, take: Callable[[], R], make: Callable[[R], S]) -> S:
    """Have the compute side `take` what Vulkan has made, and `make` the pair; if that raises, close both halves."""
    with ExitStack() as undo:
        undo.callback(native.close)
        other = take()
        undo.callback(other.close)
        shared = make(other)
        undo.pop_all()
    return shared


def share_memory(device: Device, native: Bound, make: Callable[[ExternalMemory], S], label: str | None) -> S:
    """Import the memory that Vulkan has made, and `make` the pair."""

    def take() -> ExternalMemory:
        with native.export() as handle:  # closes the handle unless it was consumed
            return device._take_memory(
                handle, size=native.size, dedicated=native.dedicated, label=label, noun="Vulkan memory"
            )

    return share(native, take, make)
