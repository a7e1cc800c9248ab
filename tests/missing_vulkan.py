"""If ``GPUINTEROP_REQUIRE_VULKAN`` is set, a missing Vulkan driver fails a test instead of skipping it."""

from __future__ import annotations

import os
from typing import Final, NoReturn

import pytest

WITHOUT: Final = "for want of a software driver"
"""Part of the reason of each such skip."""


def give_up(reason: str) -> NoReturn:
    """Skip a test because Vulkan is missing, or fail it if Vulkan is required."""
    if os.environ.get("GPUINTEROP_REQUIRE_VULKAN"):
        pytest.fail(f"GPUINTEROP_REQUIRE_VULKAN is set, and {reason}")
    pytest.skip(f"{WITHOUT}: {reason}")
