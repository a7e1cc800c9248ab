"""Who takes part in a demo; and what GPUINTEROP_REQUIRE_VULKAN asks of these tests."""

from __future__ import annotations

from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.cli.demo import parties
from gpuinterop.exporters import open_exporter
from gpuinterop.exporters.vulkan import DriverList, VulkanDriver, list_drivers

from .parties import open_party, require_driver


@pytest.mark.parametrize(
    ("value", "raised"),
    [
        ("1", pytest.fail.Exception),
        ("yes", pytest.fail.Exception),
        ("", pytest.skip.Exception),
        (None, pytest.skip.Exception),
    ],
)
def test_what_is_required_and_missing_fails(
    value: str | None, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("GPUINTEROP_REQUIRE_VULKAN", raising=False)
    else:
        monkeypatch.setenv("GPUINTEROP_REQUIRE_VULKAN", value)
    for look in (require_driver, open_party):
        # Both are caught: this test must not be skipped for want of a failure.
        with pytest.raises((pytest.fail.Exception, pytest.skip.Exception)) as caught:
            look("no such driver")
        assert caught.type is raised


def test_of_two_gpus_of_one_name_the_one_that_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_device(identity: gi.DeviceIdentity, backend: str | None) -> gi.Device:
        if identity is not second.identity:
            raise gi.DeviceNotFoundError("another GPU.")
        return gi.device()

    def opened(name: str, **options: Any) -> tuple[str, dict[str, Any]]:
        return name, options

    first, second = (
        VulkanDriver(
            index=index,
            name="GPU",
            driver="driver",
            version="1",
            identity=gi.DeviceIdentity(name="GPU", uuid=bytes([index] * 16)),
            capabilities=gi.device().capabilities,
            endpoint_gap="",
        )
        for index in range(2)
    )
    monkeypatch.setattr(parties, "list_drivers", lambda: DriverList([first, second]))
    monkeypatch.setattr(parties, "find_device", find_device)
    monkeypatch.setattr(parties, "open_exporter", opened)
    found: Any = parties.open_party(None, None, None)
    assert found == ("vulkan", {"device_index": 1})


def test_each_driver_is_opened_by_its_place() -> None:
    require_driver("swiftshader")
    for driver in list_drivers():
        with open_exporter("vulkan", device_index=driver.index) as exporter:
            assert exporter.device == driver.name
            assert exporter.identity.uuid == driver.identity.uuid
