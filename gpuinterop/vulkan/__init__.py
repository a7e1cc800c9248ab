"""Share memory and semaphores with your application's own Vulkan objects, with one call for each.

Pass handles as PyPI vulkan's objects, or as ints from any other binding; you get handles back in the same form. Only
calling a function needs cffi and a Vulkan loader, importing this module does not. PyPI's ``vulkan`` is optional.

Examples
--------
>>> device = gi.match_device(gi.vulkan.identity(physical_device))
>>> buffer = gi.vulkan.share_buffer(vk, device, 4096)
>>> handoff = gi.vulkan.share_handoff(vk, device)
>>> commands = record(buffer.release)  # after the commands that write the buffer
>>> for frame in range(3):
...     submit(commands, **handoff.vulkan_submit())
...     handoff.acquire(stream)
...     buffer.fill(frame, stream=stream)
...     handoff.release(stream)
>>> vk.close()  # waits for the queue, and closes the shared objects
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
