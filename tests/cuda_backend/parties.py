"""Who shares memory and semaphores with the CUDA device here: the GPU's Vulkan driver, or what the simulator knows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gpuinterop as gi
from gpuinterop.cli.demo.wave import Sync
from gpuinterop.exporters import open_exporter
from gpuinterop.exporters.base import Exporter
from gpuinterop.exporters.vulkan import list_drivers
from gpuinterop.testing.missing_vulkan import give_up

REAL = os.environ.get("GPUINTEROP_TEST_CUDA") == "real"

PARTIES = ("nvidia",) if REAL else ("memfd", "swiftshader")
"""By the name of `open_party`."""
SYNCS = (
    ("nvidia-timeline", "nvidia-binary", "nvidia-bridged")
    if REAL
    else ("memfd-timeline", "memfd-binary", "memfd-bridged", "swiftshader-binary", "swiftshader-bridged")
)
"""And what they keep in order with."""


def context(device: gi.Device) -> Any:
    """What the backend knows the device by."""
    return device._native


@contextmanager
def open_party(name: str, device: gi.Device) -> Iterator[Exporter]:
    """On the simulator it says that it is the simulated GPU: that stands on the CPU's memory, as the party does."""
    if name == "nvidia":
        for found in list_drivers():
            if "nvidia" in f"{found.name} {found.driver}".lower() and found.identity.matches(device.identity):
                with open_exporter("vulkan", device_index=found.index) as exporter:
                    yield exporter
                return
        give_up(f"no Vulkan driver has the device {device!r}")
    if name == "memfd":
        with open_exporter("memfd", identity=device.identity) as exporter:
            yield exporter
        return
    drivers = list_drivers()
    if not any(name in f"{found.name} {found.driver}".lower() for found in drivers):
        give_up(f"there is no Vulkan driver {name!r} ({drivers.reason or [found.name for found in drivers]})")
    with open_exporter("vulkan", driver=name, identity=device.identity) as exporter:
        yield exporter


def sync(name: str) -> Sync:
    """``timeline``, ``binary`` or ``bridged``."""
    return Sync(name, gi.Binary if name == "binary" else gi.Timeline)
