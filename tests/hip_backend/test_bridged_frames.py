"""Frames that only a bridge keeps in order, on HIP: AMD on Linux has no other semaphores."""

from __future__ import annotations

import pytest

import gpuinterop as gi
from gpuinterop.exporters.vulkan import VulkanExporter
from tests.graphics.bridged_frames import FRAMES, run_frames

from .parties import PARTIES, open_party


@pytest.mark.timeout(60 + FRAMES // 10)
def test_every_word_of_every_frame() -> None:
    device = gi.get_backend("hip").device()
    with open_party(PARTIES[-1], device) as exporter:
        assert isinstance(exporter, VulkanExporter)
        assert run_frames(exporter, device) == FRAMES
