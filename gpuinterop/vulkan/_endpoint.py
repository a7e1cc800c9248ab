"""A timeline semaphore of the application, as a bridge's watcher uses it."""

from __future__ import annotations

import time
from typing import Any

from .. import system
from .._arguments import MAX_64, check_int
from ..bridge import BridgedSemaphore, Endpoint
from ..errors import InvalidArgumentError
from ..handles import Timeline
from ._context import Native, VulkanContext, Watched, check_context

__all__ = ["TimelineEndpoint"]


class TimelineEndpoint(Endpoint):
    """A ``VkSemaphore`` with a counter, of a Vulkan device in this process, for :class:`gpuinterop.bridge.Bridge`.

    It is looked at (``vkGetSemaphoreCounterValue``) and signalled from the host (``vkSignalSemaphore``), so the driver
    need not export it: every driver with timeline semaphores will do, lavapipe and SwiftShader among them. Not waited
    for with ``vkWaitSemaphores``, which some drivers do in steps of 10 ms.

    Parameters
    ----------
    vk : VulkanContext
        The application has enabled ``VkPhysicalDeviceTimelineSemaphoreFeatures::timelineSemaphore``.
    vk_semaphore : VkSemaphore
        Of type ``VK_SEMAPHORE_TYPE_TIMELINE``, which nobody checks. It stays the caller's: destroy it when the bridged
        semaphore is released (`ExternalSemaphore.on_released`), or let :func:`share_semaphore` see to that.
        :meth:`VulkanContext.close` closes what was bridged of it, and waits for that.

    Raises
    ------
    ArgumentTypeError
        `vk` is no context, or `vk_semaphore` no handle.
    ResourceClosedError
        The context was closed.
    InvalidArgumentError
        The device has no timeline semaphores, or the application did not enable them.
    """

    kind = Timeline

    def __init__(self, vk: VulkanContext, vk_semaphore: Any) -> None:
        self._vk = check_context(vk)
        self._semaphore = vk.api.handle("VkSemaphore", vk_semaphore, "vk_semaphore")
        self._through: VulkanContext | Native = vk
        """Whose calls with it keep it: what it is the context's, or the native's that owns it."""
        _ = vk.functions.vkGetSemaphoreCounterValue  # says that the application has enabled none
        self.label = f"Vulkan timeline {vk.address(self._semaphore):#x}"

    def counter(self) -> int:
        """The semaphore's value now."""
        value = self._vk.api.ffi.new("uint64_t *")
        self._through.call("vkGetSemaphoreCounterValue", self._vk.device, self._semaphore, value)
        return int(value[0])

    def wait(self, value: int, timeout: float) -> bool:
        if self.counter() >= value:
            return True
        deadline = time.monotonic() + timeout
        pauses = system.pauses()
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(next(pauses), left))
            if self.counter() >= value:
                return True
        return False

    def signal(self, value: int) -> None:
        check_int(value, "value", minimum=0, maximum=MAX_64)
        if (now := self.counter()) >= value:  # drivers take it, and later waits never return
            raise InvalidArgumentError("value", f"{self.label} stands at {now}: it cannot be signalled to {value}.")
        info = self._vk.api.new("VkSemaphoreSignalInfo", semaphore=self._semaphore, value=value)
        self._through.call("vkSignalSemaphore", self._vk.device, info)

    def close(self) -> None:
        """The semaphore is the caller's."""

    def _bridged(self, semaphore: BridgedSemaphore[Any]) -> None:
        native = Watched(self._vk, semaphore.label)
        native.open()
        try:
            native.pair(semaphore)
            semaphore.on_released(native.close)
        except BaseException:  # or the context would wait for it
            native.close()
            raise
