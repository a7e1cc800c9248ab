"""A timeline semaphore of the application, for use by a bridge's watcher."""

from __future__ import annotations

from typing import Any

from .. import system
from .._arguments import MAX_64, check_int
from ..bridge import BridgedSemaphore, Endpoint
from ..errors import InvalidArgumentError
from ..handles import Timeline
from ._context import VulkanContext, VulkanObject, Watched, check_context
from ._export import counter


class TimelineEndpoint(Endpoint):
    """A timeline ``VkSemaphore`` of a Vulkan device in this process, for :class:`gpuinterop.bridge.Bridge`.

    The host polls it (``vkGetSemaphoreCounterValue``) and signals it (``vkSignalSemaphore``), so the driver need not
    export it: every driver with timeline semaphores works, including lavapipe and SwiftShader. ``vkWaitSemaphores`` is
    not used, because some drivers wait in steps of 10 ms.

    Parameters
    ----------
    vk : VulkanContext
        Context with ``VkPhysicalDeviceTimelineSemaphoreFeatures::timelineSemaphore`` enabled by the application.
    vk_semaphore : VkSemaphore
        Semaphore of type ``VK_SEMAPHORE_TYPE_TIMELINE``, which is not checked. The caller owns it: destroy it when the
        bridged semaphore is released (`ExternalSemaphore.on_released`), or use :func:`share_semaphore`, which does
        that. :meth:`VulkanContext.close` closes its bridged semaphores, and waits for that.

    Raises
    ------
    ArgumentTypeError
        `vk` is not a context, or `vk_semaphore` is not a handle.
    ResourceClosedError
        The context was closed.
    InvalidArgumentError
        The device has no timeline semaphores, or the application did not enable them.

    Examples
    --------
    >>> import vulkan
    >>> kind = vulkan.VkSemaphoreTypeCreateInfo(semaphoreType=vulkan.VK_SEMAPHORE_TYPE_TIMELINE)
    >>> vk_semaphore = vulkan.vkCreateSemaphore(vk_device, vulkan.VkSemaphoreCreateInfo(pNext=kind), None)
    >>> with gi.bridge.Bridge(device) as bridge:
    ...     semaphore = bridge.from_endpoint(gi.vulkan.TimelineEndpoint(vk, vk_semaphore))
    ...     semaphore.signal(stream, 1)
    ...     stream.synchronize(timeout=10)
    ...     semaphore.close(timeout=10)
    >>> vulkan.vkDestroySemaphore(vk_device, vk_semaphore, None)
    """

    kind = Timeline

    def __init__(self, vk: VulkanContext, vk_semaphore: Any) -> None:
        self._vk = check_context(vk)
        self._semaphore = vk.api.handle("VkSemaphore", vk_semaphore, "vk_semaphore")
        self._through: VulkanContext | VulkanObject = vk
        """The native whose calls keep it alive: the context's, or the one that owns the semaphore."""
        _ = vk.functions.vkGetSemaphoreCounterValue  # raises if the application has not enabled timelines
        self.label = f"Vulkan timeline {vk.api.address(self._semaphore):#x}"

    def counter(self) -> int:
        """Return the semaphore's current value."""
        return counter(self._vk, self._through, self._semaphore)

    def wait(self, value: int, timeout: float) -> bool:
        return system.until(lambda: self.counter() >= value, timeout)

    def signal(self, value: int) -> None:
        value = check_int(value, "value", minimum=0, maximum=MAX_64)
        if (now := self.counter()) >= value:  # drivers accept it, and later waits never return
            raise InvalidArgumentError("value", f"{self.label} stands at {now}: a timeline only grows; got {value}.")
        info = self._vk.api.new("VkSemaphoreSignalInfo", semaphore=self._semaphore, value=value)
        self._through._call("vkSignalSemaphore", self._vk.device, info)

    def close(self) -> None:
        """Do nothing: the caller owns the semaphore."""

    def _bridged(self, semaphore: BridgedSemaphore[Any]) -> None:
        native = Watched(self._vk, semaphore.label)
        native.open()
        try:
            native.pair(semaphore)
            semaphore.on_released(native.close)
        except BaseException:  # or the context would wait for it
            native.close()
            raise
