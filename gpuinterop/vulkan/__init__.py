"""Vulkan's side of sharing, in one call each, from the application's own Vulkan objects.

Handles are PyPI vulkan's, or integers of any other binding; handles come back in the same form. Importing this module
needs neither cffi nor a Vulkan loader; its functions do. PyPI's ``vulkan`` is not needed.

Examples
--------
>>> device = gi.match_device(gi.vulkan.identity(physical_device))
>>> buffer = gi.vulkan.share_buffer(vk, device, 4096)
>>> handoff = gi.vulkan.share_handoff(vk, device)
>>> commands = record(buffer.release)  # behind the commands that write the buffer
>>> for frame in range(3):
...     submit(commands, **handoff.vulkan_submit())
...     handoff.acquire(stream)
...     buffer.fill(frame, stream=stream)
...     handoff.release(stream)
>>> vk.close()  # waits for the queue, and closes what was shared
"""

from __future__ import annotations

from ._buffer import SharedBuffer, import_array, share_buffer
from ._context import VulkanContext
from ._handoff import QueueFamily, SharedHandoff, VulkanSubmit, share_handoff
from ._image import SharedImage, share_image
from ._memory import export_memory
from ._query import capabilities, identity, required_extensions
from ._semaphore import SharedSemaphore, TimelineEndpoint, export_semaphore, share_semaphore

__all__ = [
    "QueueFamily",
    "SharedBuffer",
    "SharedHandoff",
    "SharedImage",
    "SharedSemaphore",
    "TimelineEndpoint",
    "VulkanContext",
    "VulkanSubmit",
    "capabilities",
    "export_memory",
    "export_semaphore",
    "identity",
    "import_array",
    "required_extensions",
    "share_buffer",
    "share_handoff",
    "share_image",
    "share_semaphore",
]
