"""The exporters that the tests run over."""

from __future__ import annotations

from gpuinterop.testing.exporters import opengl
from gpuinterop.testing.exporters.vulkan import list_drivers
from tests.missing_vulkan import give_up


def require_driver(name: str) -> None:
    drivers = list_drivers()
    if not any(name.replace("lavapipe", "llvmpipe") in f"{found.name} {found.driver}".lower() for found in drivers):
        give_up(f"there is no Vulkan driver {name!r} ({drivers.reason or [found.name for found in drivers]})")


def require_opengl() -> None:
    if not (drivers := opengl.list_drivers()):
        give_up(f"there is no OpenGL ({drivers.reason})")
