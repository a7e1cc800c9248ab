"""The names that the reference's examples use.

Each example runs on the host backend (``GPUINTEROP_BACKEND=host``), so it runs on every machine. It can use these
names, and imports everything else:

``gi``, ``np``
    gpuinterop and NumPy.
``device``, ``devices``
    The backend's first device, and all of them. On a GPU, write ``gi.device()``.
``stream``
    A stream of the device: ``device.create_stream()``.
``buffer``
    A buffer of the device: 65536 bytes or more, all zero.
``fd``
    The descriptor of 65536 bytes, all zero, that another API exported. The example owns it.
``timeline_fd``
    The descriptor of a timeline semaphore, at 0, that another API exported. The example owns it.
``folder``
    An empty directory.

An example that begins with "On CUDA (here a simulated driver):" uses two CUDA devices on a simulated
driver instead. It shows the calls, not the hardware.

An example that uses Vulkan can also use these names, from ``docs/examples/vulkan_application.py`` on SwiftShader:

``instance``, ``physical_device``, ``vk_device``, ``queue``
    The application's objects, made with PyPI's ``vulkan``. The device has timeline semaphores, and the extensions that
    `gpuinterop.vulkan.required_extensions` lists.
``vk``
    ``gi.vulkan.VulkanContext(instance, physical_device, vk_device, queue, 0)``.
``record``
    A function of the application: ``record(work)`` calls ``work(commands)`` and returns that command buffer.
``submit``
    A function of the application: ``submit(commands)`` submits a command buffer. Its keywords are the
    semaphores of a `gpuinterop.vulkan.VulkanSubmit`.

An example that uses `gpuinterop.opengl` runs in an llvmpipe context without a window. It can use the Vulkan names, on
lavapipe, and this one:

``texture``
    The OpenGL name of an RGBA8 texture of 64 x 64 texels.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np

import gpuinterop as gi
from gpuinterop.handles import FdHandle
from gpuinterop.testing.exporters import open_exporter
from gpuinterop.testing.exporters.opengl import HeadlessContext

SIZE = 65536
APPLICATION = Path(__file__).parents[2] / "docs" / "examples" / "vulkan_application.py"


@contextmanager
def common(backend: str = "host") -> Iterator[dict[str, Any]]:
    """Names of every example."""
    devices = gi.get_backend(backend).devices()
    device = devices[0]
    with ExitStack() as scope:
        stream = scope.enter_context(device.create_stream())
        buffer = scope.enter_context(device.allocate(SIZE)).buffer
        buffer.fill(0)
        identity = None if device.identity.is_cpu else device.identity  # a simulated GPU is on the CPU too
        other = scope.enter_context(open_exporter("memfd", identity=identity))
        memory = scope.enter_context(other.create_memory(SIZE))
        timeline = scope.enter_context(other.create_semaphore(gi.Timeline))
        fd, timeline_fd = (scope.enter_context(_descriptor(one.export())) for one in (memory, timeline))
        folder = scope.enter_context(tempfile.TemporaryDirectory())
        yield {
            "gi": gi, "np": np, "device": device, "devices": devices, "stream": stream, "buffer": buffer, "fd": fd,
            "timeline_fd": timeline_fd, "folder": folder,
        }  # fmt: skip


@contextmanager
def _descriptor(handle: gi.handles.Handle) -> Iterator[int]:
    """Give the handle's descriptor to the example, and close it unless an import has consumed it."""
    assert isinstance(handle, FdHandle)
    fd = handle.detach()
    made = os.fstat(fd)
    os.set_inheritable(fd, True)  # what a signaller opens anew of the same file, perhaps by this number, is not
    yield fd
    with suppress(OSError):
        if os.get_inheritable(fd) and os.path.samestat(made, os.fstat(fd)):
            os.close(fd)


@contextmanager
def context() -> Iterator[dict[str, Any]]:
    """Names of the examples that use OpenGL."""
    with HeadlessContext() as made:
        create = made.function("glCreateTextures", None, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p)
        store = made.function("glTextureStorage2D", None, *[ctypes.c_uint] * 5)
        create(0x0DE1, 1, ctypes.byref(texture := ctypes.c_uint()))
        store(texture, 1, 0x8058, 64, 64)
        yield {"texture": texture.value}
        gi.opengl.identity()  # deletes what was dropped


@contextmanager
def graphics(*, of_opengl: bool = False) -> Iterator[dict[str, Any]]:
    """Names of the examples that use Vulkan."""
    with run_path(str(APPLICATION))["Application"](shader_images=of_opengl) as application:
        yield {
            "instance": application.instance, "physical_device": application.physical_device,
            "vk_device": application.device, "queue": application.queue, "vk": application.vk,
            "record": application.record, "submit": application.submit,
        }  # fmt: skip
