"""A program that has a binding of its own, and no PyPI vulkan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from gpuinterop.exporters.vulkan import VulkanExporter
from gpuinterop.handles import Binary
from tests.programs import printed

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import DECLARED_GAPS, match
else:
    from vulkan_application import DECLARED_GAPS, match

PROGRAM = Path(__file__).with_name("integers.py")


def test_a_renderer_that_has_integers_alone(driver: str, exporter: VulkanExporter) -> None:
    """The program compares each byte itself."""
    match(exporter.vk)
    told = json.loads(printed(str(PROGRAM), driver))
    assert told["device"] == exporter.physical.name
    assert told["binary"] == (Binary not in DECLARED_GAPS.get(driver, ()))
    assert told["timeline"] == 5
