"""Vulkan as the independent exporter, on its own instance and device.

You can import this without cffi; only :class:`VulkanExporter` needs it.
"""

from __future__ import annotations

from .drivers import list_drivers
from .exporter import VulkanExporter
from .image import VulkanImage
from .memory import VulkanMemory
from .semaphore import VulkanSemaphore

__all__ = [
    "VulkanExporter",
    "VulkanImage",
    "VulkanMemory",
    "VulkanSemaphore",
    "list_drivers",
]
