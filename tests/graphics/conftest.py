"""Software Vulkan drivers by default; GPUINTEROP_TEST_DRIVERS names others, GPUINTEROP_REQUIRE_VULKAN forbids skips."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

import gpuinterop as gi
from gpuinterop.handles import Binary
from gpuinterop.testing.exporters.vulkan import VulkanExporter, list_drivers
from tests import leftovers
from tests.missing_vulkan import give_up
from tests.validation import _validation, is_installed, validation

__all__ = ["_validation", "validation"]

if TYPE_CHECKING:
    from tests.graphics.opengl_application import OpenGLApplication, OpenGLMissingError
    from tests.graphics.vulkan_application import (
        DRIVERS,
        Application,
        match,
        open_exporter,
        semaphores_missing,
    )
else:
    from opengl_application import OpenGLApplication, OpenGLMissingError
    from vulkan_application import DRIVERS, Application, match, open_exporter, semaphores_missing


if not {*DRIVERS} <= {"swiftshader", "lavapipe"}:  # what a GPU's driver starts and opens it keeps, as CUDA does
    files = r"descriptor \d+ of (/dev/|.*/GLCache/|anon_inode:\[eventfd\]|pipe:|socket:)"
    leftovers.kept_by_drivers.extend([files, r"thread \d+, .* nor what runs $"])


@pytest.fixture(scope="session", autouse=True)
def _warm_drivers() -> None:
    """What a driver makes once for a process, such as Mesa 25's memfd of its allocations, is no test's."""
    for driver in DRIVERS:
        with suppress(gi.BackendUnavailableError, gi.DeviceNotFoundError), VulkanExporter(driver) as exporter:
            exporter.create_memory(4096).export().close()


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    found = list_drivers()
    wanted = name.replace("lavapipe", "llvmpipe")
    if not any(wanted in f"{d.name} {d.driver}".lower() for d in found):
        give_up(f"there is no Vulkan driver {name!r} ({[d.name for d in found]} {found.reason})")
    if not is_installed():
        give_up("the validation layer is not installed")
    return name


@pytest.fixture
def exporter(driver: str) -> Iterator[VulkanExporter]:
    with open_exporter(driver) as exporter:
        yield exporter


@pytest.fixture
def signalling(driver: str, exporter: VulkanExporter) -> VulkanExporter:
    """Of a driver that exports binary semaphores."""
    if not exporter.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd)):
        semaphores_missing(driver, Binary)
    return exporter


@pytest.fixture(params=[False, True], ids=["typed", "raw"])
def application(driver: str, request: pytest.FixtureRequest) -> Iterator[Application]:
    """Each test runs with PyPI vulkan's handles and with ints."""
    application = Application(driver, raw=request.param)
    yield application
    application.close()


@pytest.fixture
def device(application: Application) -> gi.Device:
    return match(application.vk)


@pytest.fixture(params=[name for name in DRIVERS if name != "swiftshader"])  # which has no OpenGL
def opengl(request: pytest.FixtureRequest) -> Iterator[OpenGLApplication]:
    """A context on that driver's device, current in this thread, and without a surface."""
    try:
        application = OpenGLApplication(request.param.replace("lavapipe", "llvmpipe"))
    except OpenGLMissingError as error:
        give_up(str(error))
    yield application
    application.close()
