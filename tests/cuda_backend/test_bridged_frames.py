"""Frames that only a bridge keeps in order, on CUDA: a simulated GPU over SwiftShader, or a real one."""

from __future__ import annotations

import pytest

import gpuinterop as gi
from gpuinterop.exporters.vulkan import VulkanExporter
from tests.graphics.bridged_frames import FRAMES, run_frames

from .parties import REAL, open_party


@pytest.mark.timeout(60 + FRAMES // 10)
def test_every_word_of_every_frame() -> None:
    device = gi.get_backend("cuda").device()
    with open_party("nvidia" if REAL else "swiftshader", device) as exporter:
        assert isinstance(exporter, VulkanExporter)
        assert run_frames(exporter, device) == FRAMES
