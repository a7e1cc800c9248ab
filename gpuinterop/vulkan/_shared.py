"""What everything that is shared has in common: the choice of a handle type, both sides' end, barriers' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from .._arguments import check_flags, check_sequence, check_timeout
from ..capabilities import Operation
from ..errors import ArgumentTypeError, InvalidArgumentError, ResourceClosedError, UnsupportedError
from ..handles import DmaBufFd, MemoryHandle, OpaqueFd
from . import _api as c
from ._context import Native, VulkanContext, check_context
from ._export import Bound

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.memory import ExternalMemory
    from .._core.resource import Resource

__all__ = ["Shared", "agree", "check_device", "command_buffer", "foreign_family", "import_exported", "memory_types_of"]

EVERYTHING: Final = c.ACCESS_MEMORY_READ | c.ACCESS_MEMORY_WRITE
_MEMORY_TYPES: Final[tuple[type[MemoryHandle], ...]] = (OpaqueFd, DmaBufFd)


def check_device(vk: VulkanContext, device: Device) -> None:
    """Refuse what is certainly another GPU: drivers would import its memory without a word."""
    from .._core.device import Device

    check_context(vk)
    if not isinstance(device, Device):
        raise ArgumentTypeError("device", f"expected a device of gpuinterop, got {type(device).__name__}.")
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


def memory_types_of(handle_types: Sequence[type[MemoryHandle]] | None) -> Sequence[type[MemoryHandle]]:
    """The argument `handle_types`, checked."""
    if handle_types is None:
        return _MEMORY_TYPES
    check_sequence(handle_types, "handle_types", "a sequence of handle types")
    given: Sequence[object] = handle_types
    for kind in given:
        if not isinstance(kind, type) or not issubclass(kind, MemoryHandle):
            raise ArgumentTypeError("handle_types", f"expected types of memory handles such as OpaqueFd, got {kind!r}.")
    if not handle_types:
        raise InvalidArgumentError("handle_types", "must name one handle type or more.")
    return handle_types


class Shared:
    """Ends use on the compute side, and destroys Vulkan's half."""

    def __init__(self, vk: VulkanContext) -> None:
        self._vk = vk

    def _require_open(self, resource: Resource) -> None:
        """Refuse to hand out a Vulkan object that is destroyed, or will be any moment."""
        self._vk.check_open()
        if resource.closed:
            raise ResourceClosedError(f"the {type(self).__name__} was closed.")

    def _close(self, resource: Resource, native: Native, timeout: float | None) -> None:
        """Both, whether or not the compute side is done in time: its import keeps the payload."""
        check_timeout(timeout)  # what is refused destroys nothing
        try:
            resource.close(timeout)
        finally:
            native.close()

    def close(self, timeout: float | None = None) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def command_buffer(vk: VulkanContext, cmd: Any, source: Sequence[int], target: Sequence[int]) -> Any:
    """The command buffer of a barrier from (stage, access, ...) to another; checks what a caller may have given."""
    vk.check_open()
    check_flags(source[0], "stage")
    check_flags(target[0], "stage")
    check_flags(source[1] | target[1], "access", empty=True)
    return vk.api.handle("VkCommandBuffer", cmd, "cmd")


def import_exported(device: Device, native: Bound) -> ExternalMemory:
    """The compute side of what Vulkan has made."""
    with native.export() as handle:  # closes it unless the import has consumed it
        return device.import_memory(handle, size=native.size, dedicated=native.dedicated)


def foreign_family(handle_type: type[MemoryHandle]) -> int:
    """The queue family that stands for the other side."""
    return c.QUEUE_FAMILY_FOREIGN if handle_type is DmaBufFd else c.QUEUE_FAMILY_EXTERNAL
