"""An object with a half in Vulkan and one in the compute API: exported, imported, and closed together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .._arguments import NoCopy, check_timeout
from ..errors import DriverError, ResourceClosedError
from ..graphics.sides import check_same_device
from ..handles import FdHandle, HandleOrigin
from ._context import VulkanContext, VulkanObject, check_context

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.resource import Resource

FdT = TypeVar("FdT", bound=FdHandle)
R = TypeVar("R", bound="Resource")
S = TypeVar("S")


def check_device(vk: VulkanContext, device: Device) -> None:
    """Check for an open context, and a device that is not certainly another GPU."""
    check_same_device(check_context(vk), device)


class Shared(NoCopy):
    """Closes at the end of a ``with`` block.

    If an exception ends the block, only the compute side's half is closed (a bridged semaphore wholly). Vulkan's half
    stays until its `close` or the context's: the queue may be waiting for a signal that will not come, and a driver
    blocks or crashes if its semaphore is destroyed then.
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

    def __init__(self, vk: VulkanContext, native: VulkanObject, compute_half: Resource) -> None:
        super().__init__(vk)
        native.pair(compute_half)
        self.vulkan_object = native
        self._compute_half = compute_half

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._compute_half.label}{' closed' if self._compute_half.closed else ''}>"

    def check_open(self) -> None:
        """Raise if the Vulkan object is destroyed, or will be soon."""
        self._vk._check_open()
        if self._compute_half.closed:
            raise ResourceClosedError(f"the {type(self).__name__} of {self._compute_half.label} was closed.")

    def _vk_handle(self) -> Any:
        """Vulkan's handle in the caller's form."""
        self.check_open()
        return self._vk.api.for_caller(self.vulkan_object.handle)

    def close(self, timeout: float | None = None) -> None:
        """End use on both sides. Idempotent; never blocks unless `timeout` is given.

        The Vulkan objects are destroyed, so Vulkan's own work with them must be done before. Pending compute work and
        exported arrays keep the payload, and can outlive even the VkDevice.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait until the compute side has also released the payload.

        Raises
        ------
        ResourceBusyError
            `timeout` passed, and the compute side still uses the payload, which is released later.
        """
        check_timeout(timeout)  # first, so that a bad argument destroys nothing
        try:
            self._compute_half.close(timeout)
        finally:
            self.vulkan_object.close()

    def _end_use(self) -> None:
        self.vulkan_object.end_use()


def share(native: VulkanObject, take: Callable[[], R], make: Callable[[R], S]) -> S:
    """Import Vulkan's object with `take`, and make the pair with `make`; if that raises, close both halves."""
    with ExitStack() as undo:
        undo.callback(native.close)
        compute_half = take()
        undo.callback(compute_half.close)
        shared = make(compute_half)
        undo.pop_all()
    return shared


def export_fd(vk: VulkanContext, call: str, info: Any, kind: type[FdT], origin: HandleOrigin) -> FdT:
    """Export a descriptor with a ``vkGet*FdKHR``."""
    fd = vk.api.ffi.new("int *", -1)
    vk._call(call, vk.device, info, fd)
    if fd[0] < 0:  # lavapipe reports success although it has no descriptor left
        raise DriverError(call, fd[0], "no descriptor")
    return kind.adopt(fd[0], origin=origin)
