"""Whether a missing Vulkan driver is a failure (``GPUINTEROP_REQUIRE_VULKAN``)."""

from __future__ import annotations

import os

__all__ = ["vulkan_is_required"]


def vulkan_is_required() -> bool:
    """Whether this run must not continue without its Vulkan drivers."""
    return bool(os.environ.get("GPUINTEROP_REQUIRE_VULKAN"))
