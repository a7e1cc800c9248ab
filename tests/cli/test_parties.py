"""Who takes part in a demo; and what GPUINTEROP_REQUIRE_VULKAN asks of these tests."""

from __future__ import annotations

from gpuinterop.exporters import open_exporter
from gpuinterop.exporters.vulkan import list_drivers

from .parties import require_driver


def test_each_driver_is_opened_by_its_place() -> None:
    require_driver("swiftshader")
    for driver in list_drivers():
        with open_exporter("vulkan", device_index=driver.index) as exporter:
            assert exporter.device == driver.name
            assert exporter.identity.uuid == driver.identity.uuid
