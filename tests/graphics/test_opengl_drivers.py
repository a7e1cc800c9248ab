"""The OpenGL that tests run on: that of Vulkan's driver, without a display, and what it offers."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools.fetch_vulkan import TREE

if TYPE_CHECKING:
    from tests.graphics.opengl_application import GL_DEVICE_UUID_EXT, GL_DRIVER_UUID_EXT, OpenGLApplication
else:
    from opengl_application import GL_DEVICE_UUID_EXT, GL_DRIVER_UUID_EXT, OpenGLApplication

FRAMEBUFFER, RENDERBUFFER, COLOR_ATTACHMENT0 = 0x8D40, 0x8D41, 0x8CE0
COLOR, RGBA, RGBA8, UNSIGNED_BYTE = 0x1800, 0x1908, 0x8058, 0x1401


def test_it_takes_memory_and_is_of_vulkans_build(opengl: OpenGLApplication) -> None:
    assert {"GL_EXT_memory_object", "GL_EXT_memory_object_fd"} <= opengl.extensions
    assert (opengl.uuid(GL_DEVICE_UUID_EXT), opengl.uuid(GL_DRIVER_UUID_EXT)) in _uuids_of_vulkan()


def _uuids_of_vulkan() -> list[tuple[bytes, bytes]]:
    """Of each physical device: the UUIDs of the device and of the driver."""
    import vulkan

    info = vulkan.VkApplicationInfo(apiVersion=vulkan.VK_MAKE_VERSION(1, 2, 0))
    instance = vulkan.vkCreateInstance(vulkan.VkInstanceCreateInfo(pApplicationInfo=info), None)
    found = []
    for device in vulkan.vkEnumeratePhysicalDevices(instance):
        ids = vulkan.VkPhysicalDeviceIDProperties()
        vulkan.vkGetPhysicalDeviceProperties2(device, vulkan.VkPhysicalDeviceProperties2(pNext=ids))
        found.append((bytes(ids.deviceUUID), bytes(ids.driverUUID)))
    vulkan.vkDestroyInstance(instance, None)
    return found


def test_it_draws(opengl: OpenGLApplication) -> None:
    names = (ctypes.c_uint * 2)()
    opengl.gl("glCreateFramebuffers", 1, names)
    opengl.gl("glCreateRenderbuffers", 1, ctypes.byref(names, 4))
    opengl.gl("glNamedRenderbufferStorage", names[1], RGBA8, 3, 2)
    opengl.gl("glNamedFramebufferRenderbuffer", names[0], COLOR_ATTACHMENT0, RENDERBUFFER, names[1])
    opengl.gl("glBindFramebuffer", FRAMEBUFFER, names[0])
    opengl.gl("glClearNamedFramebufferfv", names[0], COLOR, 0, (ctypes.c_float * 4)(1, 0, 0.2, 1))
    pixels = (ctypes.c_ubyte * 24)()
    opengl.gl("glReadPixels", 0, 0, 3, 2, RGBA, UNSIGNED_BYTE, pixels)
    assert bytes(pixels) == bytes([255, 0, 51, 255]) * 6


@pytest.mark.skipif("GPUINTEROP_TEST_DRIVERS" in os.environ, reason="the system's drivers are meant")
def test_none_of_the_systems_is_in_the_process(opengl: OpenGLApplication) -> None:
    """Where the system has one of another version, or another vendor's, its libraries have the same names."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    loaded = {Path(line.split(maxsplit=5)[5]) for line in maps if line.count("/")}
    of_opengl = ("libEGL", "libGL", "libgbm", "libglapi", "libgallium", "swrast_dri")
    found = {path for path in loaded if path.name.startswith(of_opengl)}
    assert {path.name.partition(".")[0] for path in found} >= {"libEGL", "libGLdispatch", "libEGL_mesa"}
    assert all(path.is_relative_to(TREE) for path in found), found
