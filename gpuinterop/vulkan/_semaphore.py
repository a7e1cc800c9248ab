"""Semaphores that both sides use: made in Vulkan, imported by a gpuinterop device, or bridged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from .._arguments import check_type
from ..bridge import Bridge, BridgedSemaphore
from ..capabilities import Operation
from ..errors import InvalidArgumentError
from ..handles import Binary, SemaphoreHandle, Timeline
from ._context import VulkanContext, VulkanObject
from ._endpoint import TimelineEndpoint
from ._export import counter, create_semaphore, export_semaphore, semaphore_handle_type
from ._shared import Pair, agree, check_device, share

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.semaphore import ExternalSemaphore


K = TypeVar("K")


class SharedSemaphore(Pair, Generic[K]):
    """One semaphore, in Vulkan and on the compute side. Made by :func:`share_semaphore`.

    Attributes
    ----------
    semaphore : ExternalSemaphore
        The compute side's.
    kind : type
        ``Binary`` or ``Timeline``.

    Examples
    --------
    >>> shared = gi.vulkan.share_semaphore(vk, device, gi.Binary)
    >>> submit(record(lambda commands: None), signal_semaphores=[shared.vk_semaphore], signal_values=[0])
    >>> shared.semaphore.wait(stream)
    >>> stream.synchronize(timeout=10)
    >>> vk.close()  # waits for the queue
    """

    def __init__(self, vk: VulkanContext, native: VulkanObject, semaphore: ExternalSemaphore[K], kind: type[K]) -> None:
        super().__init__(vk, native, semaphore)
        self.semaphore = semaphore
        self.kind = kind

    @property
    def vk_semaphore(self) -> Any:
        """The VkSemaphore, an object of PyPI's `vulkan` or an int (`VulkanContext` says which).

        Raises `ResourceClosedError` after `close`, or the context's.
        """
        return self._vk.api.for_caller(self._open_handle())

    def counter(self) -> int:
        """A timeline's value now, without waiting (``vkGetSemaphoreCounterValue``)."""
        if self.kind is not Timeline:
            raise InvalidArgumentError("kind", "expected a timeline, got a binary semaphore, which has no counter.")
        return counter(self._vk, self.vulkan_object, self._open_handle())

    def close(self, timeout: float | None = None) -> None:
        """End use on both sides; as `SharedBuffer.close`. One that is bridged goes when no stream uses it any more."""
        if isinstance(self.semaphore, BridgedSemaphore):
            self.semaphore.close(timeout)
        else:
            super().close(timeout)


@overload
def share_semaphore(
    vk: VulkanContext, device: Device, kind: type[K], *, bridge: Bridge | None = None, label: str | None = None
) -> SharedSemaphore[K]: ...
@overload
def share_semaphore(vk: VulkanContext, device: Device, *, label: str | None = None) -> SharedSemaphore[Binary]: ...
def share_semaphore(
    vk: VulkanContext, device: Device, kind: type[Any] = Binary, *, bridge: Bridge | None = None,
    label: str | None = None,
) -> SharedSemaphore[Any]:  # fmt: skip
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
    label : str, optional
        Name of the object in messages, warnings and its `repr`.

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

    Examples
    --------
    >>> with gi.bridge.Bridge(device) as bridge:
    ...     with gi.vulkan.share_semaphore(vk, device, gi.Timeline, bridge=bridge) as shared:
    ...         shared.semaphore.signal(stream, 1)
    ...         stream.synchronize(timeout=10)
    """
    check_device(vk, device)
    if bridge is not None:
        return _bridge_semaphore(vk, device, kind, bridge, label)
    agree(vk, device, (Operation.IMPORT_SEMAPHORE,), (semaphore_handle_type(kind),))
    native = create_semaphore(vk, kind)

    def take() -> ExternalSemaphore[Any]:
        # Exported at once: SwiftShader blocks in vkGetSemaphoreFdKHR while a queue waits for the semaphore.
        with native.use(lambda semaphore: export_semaphore(vk, semaphore, kind)) as handle:
            return device.import_semaphore(cast(SemaphoreHandle[Any], handle), label=label)

    return share(native, take, lambda semaphore: SharedSemaphore(vk, native, semaphore, kind))


def _bridge_semaphore(
    vk: VulkanContext, device: Device, kind: type[Any], bridge: Bridge, label: str | None
) -> SharedSemaphore[Any]:
    check_type(bridge, Bridge, "bridge", "a gpuinterop.bridge.Bridge")
    if bridge.device is not device:
        raise InvalidArgumentError("bridge", f"expected one of {device.name}, got one of {bridge.device.name}.")
    if kind is not Timeline:
        raise InvalidArgumentError("kind", "expected Timeline, which the host can reach, got Binary.")
    native = create_semaphore(vk, kind, exportable=False)

    def take() -> BridgedSemaphore[Any]:
        endpoint = TimelineEndpoint(vk, native.handle)
        endpoint._through = native
        return bridge.from_endpoint(endpoint, label=label)

    shared = share(native, take, lambda semaphore: SharedSemaphore(vk, native, semaphore, kind))
    shared.semaphore.on_released(native.close)
    return shared
