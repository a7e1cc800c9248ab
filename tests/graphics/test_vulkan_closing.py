"""Once `VulkanContext.close` has returned, nothing of the VkDevice is called any more, by whichever thread."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.lifetime import LIVE
from tests.limits import LIMIT

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application


class Functions:
    """The device's functions. When one of them is about to be called, another thread closes the context."""

    def __init__(self, vk: gi.vulkan.VulkanContext, wanted: str) -> None:
        self.vk = vk
        self._real: Any = vk.functions
        self._wanted = wanted
        self.thread: threading.Thread | None = None
        self.gone = False
        self.late: list[str] = []

    def _close(self) -> None:
        self.vk.close(LIMIT)
        self.gone = True  # the application destroys its VkDevice

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real, name)
        if name == self._wanted and self.thread is None:
            self.thread = threading.Thread(target=self._close, daemon=True)
            self.thread.start()
            # It ends the context's use at once, and then waits for this call.
            system.until(lambda: self.vk.lifetime.state is not LIVE, LIMIT)

        def call(*arguments: Any) -> Any:
            if self.gone:
                self.late.append(name)
            return function(*arguments)

        return call


@pytest.mark.parametrize(
    "name", ["vkCreateBuffer", "vkAllocateMemory", "vkBindBufferMemory", "vkGetMemoryFdKHR", "vkDestroyBuffer"]
)
def test_a_context_closed_while_something_is_shared_or_destroyed(
    application: Application, device: gi.Device, name: str
) -> None:
    vk: Any = application.vk
    shared = gi.vulkan.share_buffer(vk, device, 4096) if name == "vkDestroyBuffer" else None
    functions = vk.functions = Functions(vk, name)
    if shared:
        shared.close()
    else:
        with contextlib.suppress(gi.ResourceClosedError):
            gi.vulkan.share_buffer(vk, device, 4096)
    assert functions.thread is not None
    functions.thread.join(LIMIT)
    assert not functions.thread.is_alive()
    assert functions.late == []
