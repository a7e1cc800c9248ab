"""Vulkan as the independent party, on an instance and a device of its own.

Importable without cffi; only making a :class:`VulkanExporter` needs it.
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
