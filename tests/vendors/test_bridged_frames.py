"""Frames that only a bridge keeps in order: a simulated GPU over SwiftShader, or a real one over its Vulkan driver."""

from __future__ import annotations

import pytest

import gpuinterop as gi
from gpuinterop.testing.exporters.vulkan import VulkanExporter
from tests.graphics.bridged_frames import FRAMES, run_frames

from .parties import PARTIES, open_party


@pytest.mark.timeout(1000 + FRAMES // 10)
def test_every_word_of_every_frame(device: gi.Device) -> None:
    with open_party(PARTIES[-1], device) as exporter:
        assert isinstance(exporter, VulkanExporter)
        assert run_frames(exporter, device) == FRAMES
