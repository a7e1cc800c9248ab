"""A GPU's memory in OpenGL: which handle, size and offset its driver is given. No GPU's OpenGL is here to take it."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import gpuinterop as gi
from tests.graphics.opengl_application import Doubled, OpenGLApplication, OpenGLMissingError
from tests.missing_vulkan import give_up
from tests.simulated.driver import Simulator

from .foreign_memory import memory
from .table import VENDOR


class OpenGLOfGPU:
    """A context of llvmpipe's that says that it is a GPU's, and notes what it is told to import."""

    def __init__(self) -> None:
        self.application = opengl = OpenGLApplication("llvmpipe")
        self.imported: list[tuple[int, int]] = []
        self.storage: list[tuple[int, int]] = []
        self.dedicated: list[int] = []
        self.uuid = self.driver_uuid = b""
        name = ctypes.create_string_buffer(b"made up GPU")
        unsigned, large = ctypes.c_uint, ctypes.c_uint64

        def string(what: int) -> Any:
            if what == 0x1F01:  # GL_RENDERER
                return ctypes.addressof(name)
            return opengl.gl("glGetString", what, returns=ctypes.c_void_p)

        self.loader = Doubled(
            opengl,
            glGetString=((ctypes.c_void_p, unsigned), string),
            glGetUnsignedBytei_vEXT=(
                (None, unsigned, unsigned, ctypes.c_void_p),
                lambda _, index, out: ctypes.memmove(out, self.uuid, len(self.uuid)),
            ),
            glGetUnsignedBytevEXT=(
                (None, unsigned, ctypes.c_void_p),
                lambda _, out: ctypes.memmove(out, self.driver_uuid, len(self.driver_uuid)),
            ),
            glMemoryObjectParameterivEXT=(
                (None, unsigned, unsigned, ctypes.POINTER(ctypes.c_int)),
                lambda _, what, value: self.dedicated.append(value[0] if what == 0x9581 else -1),
            ),
            glImportMemoryFdEXT=((None, unsigned, large, unsigned, ctypes.c_int), self.take),
            glNamedBufferStorageMemEXT=(
                (None, unsigned, ctypes.c_ssize_t, unsigned, large),
                lambda _, size, memory, offset: self.storage.append((size, offset)),
            ),
        )

    def take(self, _: int, size: int, kind: int, fd: int) -> None:
        self.imported.append((size, os.fstat(fd).st_ino))
        os.close(fd)


@pytest.fixture
def opengl() -> Iterator[OpenGLOfGPU]:
    try:
        context = OpenGLOfGPU()
    except OpenGLMissingError as error:
        give_up(str(error))
    yield context
    context.application.close()


def test_a_buffer_is_of_the_devices_memory(simulator: Simulator, opengl: OpenGLOfGPU) -> None:
    with gi.opengl.share_buffer(gi.device(), 5000, get_proc_address=opengl.loader) as shared:
        assert isinstance(shared.memory, gi.Allocation)
        with shared.memory.export() as handle:
            assert isinstance(handle, gi.VmmFd)
            assert opengl.imported == [(shared.memory.size, os.fstat(handle.fd).st_ino)]
        assert opengl.storage == [(5000, 0)]
        assert opengl.dedicated == [1]  # as NVIDIA's driver needs it
        assert shared.size == 5000


def test_an_array_is_a_buffer_where_it_lies(simulator: Simulator, opengl: OpenGLOfGPU) -> None:
    with gi.device().allocate(1 << 16) as allocation:
        array = allocation.view((32, 4), "float32", 12288)
        with gi.opengl.import_array(array, get_proc_address=opengl.loader) as shared:
            assert (shared.size, shared.ptr) == (512, allocation.buffer.ptr + 12288)
        assert [size for size, _ in opengl.imported] == [allocation.size]
        assert opengl.storage == [(512, 12288)]


@pytest.mark.parametrize("existing", [False, True])
def test_an_immutable_array_is_not_written(simulator: Simulator, opengl: OpenGLOfGPU, existing: bool) -> None:
    """As JAX's: OpenGL gets it to read; neither the compute side nor a copy from a texture may write it."""
    theirs = ctypes.c_uint()
    opengl.application.gl("glCreateBuffers", 1, ctypes.byref(theirs))
    buffer = theirs.value if existing else None
    with gi.device().allocate(4096) as allocation:
        interface = {"shape": (4096,), "typestr": "|u1", "data": (allocation.buffer.ptr, True), "version": 3}
        array = SimpleNamespace(__cuda_array_interface__=interface)
        with gi.opengl.import_array(array, buffer=buffer, get_proc_address=opengl.loader) as shared:
            assert opengl.storage == [(4096, 0)]
            assert shared.size == 4096
            assert (shared.name == buffer) is existing
            for write in (
                shared.fill,
                lambda: shared.copy_from_host(bytes(4)),
                lambda: shared.view(4),
                lambda: shared.ptr,
                lambda: shared.download_from(1, (1, 1)),
            ):
                with pytest.raises(gi.InvalidArgumentError, match=r"^array: .*immutable"):
                    write()


def test_amds_context_is_matched_by_the_address_in_its_uuid(simulator: Simulator, opengl: OpenGLOfGPU) -> None:
    opengl.driver_uuid = b"AMD-MESA-DRV"
    opengl.uuid = struct.pack("<4I", 0, 0x17, 0, 1)
    assert gi.opengl.identity(get_proc_address=opengl.loader).pci_bus_id == "0000:17:00.1"
    opengl.driver_uuid = b""
    assert gi.opengl.identity(get_proc_address=opengl.loader).pci_bus_id is None


@pytest.mark.skipif(VENDOR.name == "hip", reason="HIP knows no UUID")
def test_another_gpus_context_is_refused(simulator: Simulator, opengl: OpenGLOfGPU) -> None:
    opengl.uuid = b"another device.."
    with pytest.raises(gi.InvalidArgumentError, match=r"gpuinterop.match_device\(gpuinterop.opengl.identity\(\)\)"):
        gi.opengl.share_buffer(gi.device(), 4096, get_proc_address=opengl.loader)
    there = "create the context on that GPU"
    with gi.device().allocate(4096) as allocation, pytest.raises(gi.InvalidArgumentError, match=there):
        gi.opengl.import_array(allocation.view(4096), get_proc_address=opengl.loader)
    assert not opengl.imported


@pytest.mark.parametrize("kind", ["legacy", "pool"])
def test_memory_without_a_handle_is_refused(simulator: Simulator, opengl: OpenGLOfGPU, kind: Any) -> None:
    with memory(kind, 4096) as it, pytest.raises(gi.UnsupportedError, match="expandable_segments:True"):
        gi.opengl.import_array(it, get_proc_address=opengl.loader)
    assert not opengl.imported
