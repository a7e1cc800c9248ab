"""Common parts of all shared objects: the choice of a handle type, descriptors, both sides' end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .._arguments import NoCopy, check_timeout, check_type
from ..capabilities import Operation
from ..errors import DriverError, InvalidArgumentError, ResourceClosedError, UnsupportedError
from ..handles import FdHandle, HandleOrigin
from ._context import VulkanContext, VulkanObject, check_context

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.resource import Resource


H = TypeVar("H", bound=FdHandle)
R = TypeVar("R", bound="Resource")
S = TypeVar("S")


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

    def _vk_handle(self) -> Any:
        """Vulkan's handle in the caller's form."""
        self.check_open()
        return self._vk.api.for_caller(self.vulkan_object.handle)

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


def share(native: VulkanObject, take: Callable[[], R], make: Callable[[R], S]) -> S:
    """Have the compute side `take` what Vulkan has made, and `make` the pair; if that raises, close both halves."""
    with ExitStack() as undo:
        undo.callback(native.close)
        other = take()
        undo.callback(other.close)
        shared = make(other)
        undo.pop_all()
    return shared


def export_fd(vk: VulkanContext, call: str, info: Any, kind: type[H], origin: HandleOrigin) -> H:
    """Export a descriptor by a ``vkGet*FdKHR``."""
    fd = vk.api.ffi.new("int *", -1)
    vk._call(call, vk.device, info, fd)
    if fd[0] < 0:  # lavapipe reports success where it has no descriptor left
        raise DriverError(call, fd[0], "no descriptor")
    return kind.adopt(fd[0], origin=origin)
