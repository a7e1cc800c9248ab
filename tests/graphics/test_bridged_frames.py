"""Frames that only a bridge keeps in order, each of their words checked on both sides.

GPUINTEROP_TEST_FRAMES says how many, GPUINTEROP_TEST_BRIDGE_BACKEND on which backend's first device; default: the one
that matches the Vulkan driver.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import gpuinterop as gi
from gpuinterop.testing.exporters.vulkan import VulkanExporter

if TYPE_CHECKING:
    from tests.graphics.bridged_frames import FRAMES, run_frames
    from tests.graphics.vulkan_application import match
else:
    from bridged_frames import FRAMES, run_frames
    from vulkan_application import match

pytestmark = pytest.mark.signals_beside

_BACKEND = os.environ.get("GPUINTEROP_TEST_BRIDGE_BACKEND")


@pytest.fixture
def bridging(exporter: VulkanExporter) -> gi.Device:
    """A device whose streams write and wait for words."""
    device = gi.get_backend(_BACKEND).device() if _BACKEND else match(exporter.vk)
    if not device.capabilities.supports(gi.Operation.STREAM_MEMORY_OPS):
        pytest.skip(device.capabilities.of(gi.Operation.STREAM_MEMORY_OPS).reason)
    return device


@pytest.mark.timeout(1000 + FRAMES // 10)
def test_every_word_of_every_frame(exporter: VulkanExporter, bridging: gi.Device) -> None:
    assert run_frames(exporter, bridging) == FRAMES
