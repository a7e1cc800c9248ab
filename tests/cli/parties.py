"""The exporters that the tests run over."""

from __future__ import annotations

from typing import Any

from gpuinterop.testing.exporters import open_exporter, opengl
from gpuinterop.testing.exporters.base import Exporter
from gpuinterop.testing.exporters.vulkan import list_drivers
from gpuinterop.testing.missing_vulkan import give_up


def require_driver(name: str) -> None:
    drivers = list_drivers()
    if not any(name.replace("lavapipe", "llvmpipe") in f"{found.name} {found.driver}".lower() for found in drivers):
        give_up(f"there is no Vulkan driver {name!r} ({drivers.reason or [found.name for found in drivers]})")


def require_opengl() -> None:
    if not (drivers := opengl.list_drivers()):
        give_up(f"there is no OpenGL ({drivers.reason})")


def open_party(name: str, **options: Any) -> Exporter:
    """``memfd``, a ``process`` with one, or a Vulkan driver by name."""
    if name in ("memfd", "process"):
        return open_exporter("memfd", **{"process": name == "process", **options})
    require_driver(name)
    return open_exporter("vulkan", driver=name, **options)
