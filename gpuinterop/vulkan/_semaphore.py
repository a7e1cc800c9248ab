"""Semaphores that both sides use: made in Vulkan, imported by a gpuinterop device, or bridged."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from ..bridge import Bridge, BridgedSemaphore
from ..capabilities import Operation
from ..errors import ArgumentTypeError, InvalidArgumentError
from ..handles import Binary, SemaphoreHandle, Timeline
from ._context import Native, VulkanContext
from ._endpoint import TimelineEndpoint
from ._export import create_semaphore, export_semaphore, semaphore_handle_type
from ._shared import Shared, agree, check_device

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.semaphore import ExternalSemaphore

__all__ = ["SharedSemaphore", "share_semaphore"]

K = TypeVar("K")


class SharedSemaphore(Shared, Generic[K]):
    """One semaphore, in Vulkan and on the compute side. Made by :func:`share_semaphore`.

    Attributes
    ----------
    semaphore : ExternalSemaphore
        The compute side's.
    kind : type
        ``Binary`` or ``Timeline``.
    """

    def __init__(
        self, vk: VulkanContext, native: _NativeSemaphore, semaphore: ExternalSemaphore[K], kind: type[K]
    ) -> None:
        super().__init__(vk)
        native.pair(semaphore)
        self._native = native
        self.semaphore = semaphore
        self.kind = kind

    @property
    def vk_semaphore(self) -> Any:
        """The VkSemaphore, PyPI vulkan's handle. Raises `ResourceClosedError` after `close`, or the context's."""
        self._require_open(self.semaphore)
        return self._native.semaphore

    def counter(self) -> int:
        """A timeline's value now, without waiting (``vkGetSemaphoreCounterValue``)."""
        if self.kind is not Timeline:
            raise InvalidArgumentError("kind", "a binary semaphore has no counter.")
        value = self._vk.api.ffi.new("uint64_t *")
        self._native.call("vkGetSemaphoreCounterValue", self._vk.device, self.vk_semaphore, value)
        return int(value[0])

    def close(self, timeout: float | None = None) -> None:
        """End use on both sides; as `SharedBuffer.close`. One that is bridged goes when no stream uses it any more."""
        if isinstance(self.semaphore, BridgedSemaphore):
            self.semaphore.close(timeout)
        else:
            self._close(self.semaphore, self._native, timeout)


class _NativeSemaphore(Native):
    """A VkSemaphore."""

    def __init__(self, vk: VulkanContext, kind: type, *, exportable: bool = True) -> None:
        super().__init__(vk, "VkSemaphore")
        self.semaphore = self.make(lambda: create_semaphore(vk, kind, self.new, exportable=exportable))


@overload
def share_semaphore(
    vk: VulkanContext, device: Device, kind: type[Timeline], *, bridge: Bridge | None = None
) -> SharedSemaphore[Timeline]: ...
@overload
def share_semaphore(vk: VulkanContext, device: Device, kind: type[Binary] = ...) -> SharedSemaphore[Binary]: ...
@overload
def share_semaphore(
    vk: VulkanContext, device: Device, kind: type[Any], *, bridge: Bridge | None = None
) -> SharedSemaphore[Any]: ...
def share_semaphore(
    vk: VulkanContext, device: Device, kind: type[Any] = Binary, *, bridge: Bridge | None = None
) -> SharedSemaphore[Any]:
    """Make a VkSemaphore that the compute side's streams wait for and signal.

    ``vkCreateSemaphore``, ``vkGetSemaphoreFdKHR``, and the device's import.

    Parameters
    ----------
    vk : VulkanContext
    device : Device
    kind : type
        ``gpuinterop.handles.Binary`` or ``Timeline``. For a timeline the application has enabled the feature
        (``VkPhysicalDeviceTimelineSemaphoreFeatures``).
    bridge : Bridge, optional
        A bridge of `device`: streams reach the semaphore through it, and neither side exports or imports. For
        timelines.

    Returns
    -------
    SharedSemaphore
        Owns both sides; close it.

    Raises
    ------
    UnsupportedError
        One side cannot; nothing was created.
    InvalidArgumentError
        `device` is another GPU, or not the bridge's; a bridge for a binary semaphore; or the application did not
        enable an extension.
    DriverError
        A native call failed.
    """
    check_device(vk, device)
    if bridge is not None:
        return _bridge_semaphore(vk, device, kind, bridge)
    agree(vk, device, (Operation.IMPORT_SEMAPHORE,), (semaphore_handle_type(kind),))
    native = _NativeSemaphore(vk, kind)
    with ExitStack() as undo:
        undo.callback(native.close)
        # Exported at once: SwiftShader blocks in vkGetSemaphoreFdKHR while a queue waits for the semaphore.
        with native.use(lambda _: export_semaphore(vk, native.semaphore, kind)) as handle:
            semaphore = device.import_semaphore(cast(SemaphoreHandle[Any], handle))
        undo.callback(semaphore.close)
        shared = SharedSemaphore(vk, native, semaphore, kind)
        undo.pop_all()
    return shared


def _bridge_semaphore(vk: VulkanContext, device: Device, kind: type[Any], bridge: Bridge) -> SharedSemaphore[Any]:
    if not isinstance(bridge, Bridge):
        raise ArgumentTypeError("bridge", f"expected a gpuinterop.bridge.Bridge, got {type(bridge).__name__}.")
    if bridge.device is not device:
        raise InvalidArgumentError("bridge", f"is of {bridge.device.name}, not of {device.name}.")
    if kind is not Timeline:
        raise InvalidArgumentError("kind", "Vulkan's binary semaphores cannot be reached from the host: Timeline.")
    native = _NativeSemaphore(vk, kind, exportable=False)
    with ExitStack() as undo:
        undo.callback(native.close)
        endpoint = TimelineEndpoint(vk, native.semaphore)
        endpoint._through = native
        semaphore = bridge.from_endpoint(endpoint)
        undo.callback(semaphore.close)
        shared = SharedSemaphore(vk, native, semaphore, kind)
        undo.pop_all()
    semaphore.on_released(native.close)
    return shared
