"""Who shares memory and semaphores with the device here: the GPU's Vulkan driver, or what a simulated driver knows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.exporters import open_exporter
from gpuinterop.testing.exporters.base import Exporter
from gpuinterop.testing.exporters.vulkan import list_drivers
from tests.missing_vulkan import give_up

from .table import VENDOR

MODE = VENDOR.mode
REAL = MODE == "real"
SIMULATED = MODE == "simulated"
WITHOUT_GPU = MODE in ("simulated", "amd")
SEVERAL = WITHOUT_GPU and int(os.environ.get("GPUINTEROP_STANDIN_DEVICES", "2")) > 1
"""Whether there must be several devices."""
PARTIES = ("memfd", "swiftshader") if WITHOUT_GPU else ("vulkan",)
"""By the name of `open_party`."""


def native(device: gi.Device) -> Any:
    """What the backend knows the device by, whose type is the vendor's own."""
    return device._handle


def watch(monkeypatch: pytest.MonkeyPatch, device: gi.Device, name: str, seen: Callable[..., Any]) -> None:
    """Have `seen` know the arguments of a driver's function, as numbers where they are, before each call."""
    driver = device.driver._driver  # type: ignore[attr-defined]
    real = driver.function(name)

    def watched(*arguments: Any) -> int:
        seen(*(getattr(argument, "value", argument) or 0 for argument in arguments))
        return int(real(*arguments))

    monkeypatch.setitem(driver._functions, name, watched)


@contextmanager
def open_party(name: str, device: gi.Device) -> Iterator[Exporter]:
    """On the simulator it says that it is the simulated GPU: that stands on the CPU's memory, as the party does.

    So does AMD's runtime on the stand-in, which takes memfds for dma-bufs.
    """
    if name == "memfd":
        with open_exporter("memfd", identity=device.identity) as exporter:
            yield exporter
        return
    drivers = list_drivers()
    if name == "vulkan":
        for found in drivers:
            if found.identity.matches(device.identity) or found.identity.pci_bus_id == device.pci_bus_id:
                with open_exporter("vulkan", device_index=found.index) as exporter:
                    yield exporter
                return
        give_up(f"no Vulkan driver has the device {device!r}")
    if not any(name in f"{found.name} {found.driver}".lower() for found in drivers):
        give_up(f"there is no Vulkan driver {name!r} ({drivers.reason or [found.name for found in drivers]})")
    with open_exporter("vulkan", driver=name, identity=device.identity) as exporter:
        yield exporter
