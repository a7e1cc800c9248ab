"""gi.opengl in a context of other code: bytes both ways, textures, turns, refusals and ends."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.graphics.handoff import NextCall
from tests.limits import LIMIT
from tools.fetch_vulkan import TREE

if TYPE_CHECKING:
    from tests.graphics.opengl_application import Doubled, OpenGLApplication, with_extensions
    from tests.graphics.vulkan_application import Application
else:
    from opengl_application import Doubled, OpenGLApplication, with_extensions
    from vulkan_application import Application

ALL = ("timeline", "binary", "bridged")
TEXTURE_2D, RECTANGLE, TEXTURE_3D, CUBE_MAP = 0x0DE1, 0x84F5, 0x806F, 0x8513
RGBA8, R32F, RG16UI, RGBA16F = 0x8058, 0x822E, 0x823A, 0x881A
PACK_BUFFER, UNPACK_BUFFER = 0x88EB, 0x88EC
SSBO, TRIANGLES, FRAGMENT_SHADER, VERTEX_SHADER = 0x90D2, 4, 0x8B30, 0x8B31
RNG = np.random.default_rng(7)


def made(opengl: OpenGLApplication, call: str, *arguments: int) -> int:
    name = ctypes.c_uint()
    opengl.gl(call, *arguments, 1, ctypes.byref(name))
    return name.value


def read(opengl: OpenGLApplication, buffer: int, size: int) -> np.ndarray[Any, Any]:
    """Bytes of a buffer, by a copy: NVIDIA's driver keeps what the host has read, and gives it again."""
    found, copy = np.zeros(size, "uint8"), made(opengl, "glCreateBuffers")
    opengl.gl("glNamedBufferStorage", copy, size, None, 0)
    opengl.gl("glCopyNamedBufferSubData", buffer, copy, 0, 0, size)
    opengl.gl("glGetNamedBufferSubData", copy, 0, size, found.ctypes.data)
    delete(opengl, copy)
    assert not opengl.gl("glGetError", returns=ctypes.c_uint)
    return found


def write(opengl: OpenGLApplication, buffer: int, content: np.ndarray[Any, Any], offset: int = 0) -> None:
    opengl.gl("glNamedBufferSubData", buffer, offset, content.nbytes, content.ctypes.data)
    assert not opengl.gl("glGetError", returns=ctypes.c_uint)


def texture_of(
    opengl: OpenGLApplication, format_: int, width: int, height: int, *, target: int = TEXTURE_2D, levels: int = 1
) -> int:
    name = made(opengl, "glCreateTextures", target)
    opengl.gl("glTextureStorage2D", name, levels, format_, width, height)
    return name


def delete(opengl: OpenGLApplication, buffer: int) -> None:
    opengl.gl("glDeleteBuffers", 1, ctypes.byref(ctypes.c_uint(buffer)))


def failing(opengl: OpenGLApplication, call: str, parameters: int) -> Doubled:
    """A loader whose function of that name does nothing, and is told to be an invalid operation."""
    errors: list[int] = []
    kind = None, *[ctypes.c_uint] * parameters
    return Doubled(
        opengl,
        glGetError=(
            (ctypes.c_uint,), lambda: errors.pop() if errors else opengl.gl("glGetError", returns=ctypes.c_uint),
        ),
        **{call: (kind, lambda *_: errors.append(0x0502))},
    )  # fmt: skip


@pytest.fixture
def device(opengl: OpenGLApplication) -> gi.Device:
    return gi.match_device(gi.opengl.identity())


@pytest.fixture
def compatible(opengl: OpenGLApplication) -> Iterator[OpenGLApplication]:
    """A compatible context of the same driver, which is current from then on."""
    with closing(OpenGLApplication(opengl.text(0x1F01).lower(), core=False)) as made:
        yield made


@pytest.fixture
def stream(device: gi.Device) -> Iterator[gi.Stream]:
    with device.create_stream() as stream:
        yield stream


@pytest.mark.skipif("GPUINTEROP_TEST_DRIVERS" in os.environ, reason="the system's drivers are meant")
def test_none_of_the_systems_is_in_the_process(opengl: OpenGLApplication) -> None:
    """Where the system has one of another version, or another vendor's, its libraries have the same names."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    loaded = {Path(line.split(maxsplit=5)[5]) for line in maps if line.count("/")}
    of_opengl = ("libEGL", "libGL", "libgbm", "libglapi", "libgallium", "swrast_dri")
    found = {path for path in loaded if path.name.startswith(of_opengl)}
    assert {path.name.partition(".")[0] for path in found} >= {"libEGL", "libGLdispatch", "libEGL_mesa"}
    assert all(path.is_relative_to(TREE) for path in found), found


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4096, 65536 + 17, 1 << 20])
def test_a_buffer_has_the_bytes_of_both_sides(opengl: OpenGLApplication, device: gi.Device, size: int) -> None:
    with gi.opengl.share_buffer(device, size) as shared:
        theirs, ours = RNG.integers(256, size=(2, size), dtype="uint8")
        shared.copy_from_host(theirs)
        assert (read(opengl, shared.name, size) == theirs).all()
        write(opengl, shared.name, ours)
        opengl.gl("glFinish")
        found = np.zeros(size, "uint8")
        shared.copy_to_host(found)
        assert (found == ours).all()
        assert shared.size == size


def test_an_existing_buffer_gets_the_memory_as_its_storage(opengl: OpenGLApplication, device: gi.Device) -> None:
    name = made(opengl, "glCreateBuffers")
    opengl.gl("glNamedBufferData", name, 4096, None, 0x88E8)
    with gi.opengl.share_buffer(device, 4096, buffer=name) as shared:
        assert shared.name == name
        shared.fill(7)
        assert (read(opengl, name, 4096) == 7).all()
        write(opengl, name, np.full(16, 9, "uint8"), 4080)
        opengl.gl("glFinish")
        found = np.zeros(4096, "uint8")
        shared.copy_to_host(found)
        assert found.tolist() == [7] * 4080 + [9] * 16
    gi.opengl.share_buffer(device, 64).close()
    assert (read(opengl, name, 4096)[:4080] == 7).all()  # the name is the caller's, and has its storage
    delete(opengl, name)


@pytest.mark.parametrize(
    ("core", "then"),
    [(True, "deleted"), (False, "deleted"), (False, "of other storage"), (False, "larger"), (False, "shared again")],
)
def test_a_buffer_that_the_renderer_has_deleted_is_refused(
    opengl: OpenGLApplication, device: gi.Device, core: bool, then: str, request: pytest.FixtureRequest
) -> None:
    """OpenGL takes an offset for an address if no buffer is bound. In a compatible context a bind makes one."""
    with ExitStack() as scope:
        if not core:
            opengl = request.getfixturevalue("compatible")
        name, texture = made(opengl, "glCreateBuffers"), texture_of(opengl, RGBA8, 8, 8)
        opengl.gl("glTextureSubImage2D", texture, 0, 0, 0, 8, 8, 0x1908, 0x1401, np.zeros(256, "uint8").ctypes.data)
        opengl.gl("glNamedBufferData", name, 1024, None, 0x88E8)
        shared = scope.enter_context(gi.opengl.share_buffer(device, 1024, buffer=name))
        shared.fill(7)
        delete(opengl, name)
        if then != "deleted":  # another buffer gets the name
            opengl.gl("glBindBuffer", 0x8892, name)
            if then == "larger":
                opengl.gl("glNamedBufferStorage", name, 2048, None, 0x100)
            else:
                opengl.gl("glNamedBufferData", name, 1024, None, 0x88E8)
            if then == "shared again":
                scope.enter_context(gi.opengl.share_buffer(device, 1024, buffer=name))
            write(opengl, name, np.full(1024, 9, "uint8"))
        for copy in (shared.upload_to, shared.download_from):
            for offset in (0, 64):
                with pytest.raises(gi.ResourceClosedError, match=rf"\b{name}\b"):
                    copy(texture, (8, 8, 4), offset=offset)
        assert not opengl.gl("glGetError", returns=ctypes.c_uint)
        found = np.zeros(1024, "uint8")
        opengl.gl("glGetTextureImage", texture, 0, 0x1908, 0x1401, found.nbytes, found.ctypes.data)
        assert not found.any()
        assert opengl.gl("glIsBuffer", name, returns=ctypes.c_ubyte) == (then != "deleted")
        if then != "deleted":
            assert (read(opengl, name, 1024) == 9).all()
        shared.copy_to_host(found)
        assert (found == 7).all()


def test_what_cannot_get_new_storage_is_refused_before_the_call(opengl: OpenGLApplication, device: gi.Device) -> None:
    immutable, mapped, large = (made(opengl, "glCreateBuffers") for _ in range(3))
    opengl.gl("glNamedBufferStorage", immutable, 64, None, 0x100)
    opengl.gl("glNamedBufferData", mapped, 64, None, 0x88E8)
    assert opengl.gl("glMapNamedBuffer", mapped, 0x88B9, returns=ctypes.c_void_p)
    opengl.gl("glNamedBufferData", large, 128, None, 0x88E8)
    with pytest.raises(gi.ArgumentTypeError, match=r"buffer\.glo"):
        gi.opengl.share_buffer(device, 64, buffer=opengl)  # type: ignore[arg-type]
    kind = None, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_int64)
    loader = Doubled(opengl, glGetNamedBufferParameteri64v=(kind, lambda _, what, out: out.__setitem__(0, 3 << 30)))
    gi.opengl._context._contexts.clear()
    with pytest.raises(gi.InvalidArgumentError, match="3221225472 bytes"):
        gi.opengl.share_buffer(device, 64, buffer=large, get_proc_address=loader)
    never = 4040404
    for name, said in (
        (immutable, "immutable"),
        (mapped, "unmap it first"),
        (large, "128 bytes"),
        (never, "the name of"),
    ):
        with pytest.raises(gi.InvalidArgumentError, match=said):
            gi.opengl.share_buffer(device, 64, buffer=name)
    opengl.gl("glUnmapNamedBuffer", mapped, returns=ctypes.c_ubyte)


@pytest.mark.parametrize("array", [np.ma.zeros(4), np.zeros((0, 3))], ids=["masked", "empty"])
def test_an_array_that_no_buffer_can_be_is_refused(opengl: OpenGLApplication, array: Any) -> None:
    with pytest.raises(gi.InvalidArgumentError) as caught:
        gi.opengl.import_array(array)
    assert caught.value.argument == "array"


def test_an_imported_array_is_the_buffer(opengl: OpenGLApplication, device: gi.Device) -> None:
    with device.allocate(1 << 16) as allocation:
        array = allocation.view((64, 4), "float32", 8192)
        if device.info.is_cpu:
            with pytest.raises(gi.UnsupportedError, match="imports only"):
                gi.opengl.import_array(array)
            return
        with gi.opengl.import_array(array) as shared:
            array.copy_from(np.arange(256, dtype="float32").reshape(64, 4))
            assert read(opengl, shared.name, 1024).view("float32").tolist() == [*range(256)]
            write(opengl, shared.name, np.ones(1, "float32"), 4)
            opengl.gl("glFinish")
            assert array.to_numpy()[0].tolist() == [0, 1, 2, 3]


# -- textures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["2D", "in a compatible context", "level 1", "rectangle"])
@pytest.mark.parametrize(
    ("format_", "channels", "dtype"), [(RGBA8, 4, "uint8"), (RGBA8, 3, "uint8"), (R32F, 1, "float32"),
                                       (RG16UI, 2, "uint16"), (RGBA16F, 4, "float16")]
)  # fmt: skip
def test_texels_go_to_a_texture_and_back(
    opengl: OpenGLApplication, device: gi.Device, format_: int, channels: int, dtype: str, way: str,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if way == "in a compatible context":
        opengl = request.getfixturevalue("compatible")
    height, width, level = 5, 7, int(way == "level 1")
    target = RECTANGLE if way == "rectangle" else TEXTURE_2D
    texture = texture_of(opengl, format_, 16 << level, 12 << level, target=target, levels=1 + level)
    texels = RNG.integers(0, 200, size=(height, width, channels)).astype(dtype)
    content = RNG.integers(256, size=1024, dtype="uint8")  # the rows have a gap, and lie after 24 other bytes
    pitch = (width + 3) * texels.strides[1]
    strides = pitch, *texels.strides[1:]
    np.ndarray(texels.shape, dtype, content, 24, strides)[:] = texels
    with gi.opengl.share_buffer(device, 1024) as shared:
        shared.copy_from_host(content)
        place = {"offset": 24, "row_pitch": pitch, "level": level, "x": 2, "y": 4}
        shared.upload_to(texture, texels.shape, dtype, **place)
        whole = np.zeros((12, 16, channels), dtype)
        names = [(0x1903, 0x8D94), (0x8227, 0x8228), (0x1907, 0x8D98), (0x1908, 0x8D99)][channels - 1]
        kind = {"uint8": 0x1401, "float32": 0x1406, "uint16": 0x1403, "float16": 0x140B}[dtype]
        opengl.gl("glPixelStorei", 0x0D05, 1)
        name = names[format_ == RG16UI]
        opengl.gl("glGetTextureImage", texture, level, name, kind, whole.nbytes, whole.ctypes.data)
        assert (whole[4:9, 2:9] == texels).all()
        shared.fill(0)
        if level:  # NVIDIA's driver would write older bytes to the whole buffer
            with pytest.raises(gi.InvalidArgumentError, match=r"level: .*got 1\b"):
                shared.download_from(texture, texels.shape, dtype, **place)
            return
        shared.download_from(texture, texels.shape, dtype, **place)
        opengl.gl("glFinish")
        found = np.zeros(1024, "uint8")
        shared.copy_to_host(found)
        assert (np.ndarray(texels.shape, dtype, found, 24, strides) == texels).all()
        assert not found[:24].any()
        assert not found[24 + width * texels.strides[1] : 24 + pitch].any()


STORES = {
    "unpack": (0x0CF5, 0x0CF2, 0x0CF3, 0x0CF4, 0x0CF1, 0x806E, 0x806D, 0x0CF0),
    "pack": (0x0D05, 0x0D02, 0x0D03, 0x0D04, 0x0D01, 0x806C, 0x806B, 0x0D00),
}
"""ALIGNMENT, ROW_LENGTH, SKIP_ROWS, SKIP_PIXELS, LSB_FIRST, IMAGE_HEIGHT, SKIP_IMAGES, SWAP_BYTES."""


@pytest.mark.parametrize("swapped", STORES)
def test_the_pixel_store_and_the_bindings_are_left_as_they_were(
    opengl: OpenGLApplication, device: gi.Device, swapped: str
) -> None:
    """The renderer's are other than OpenGL's defaults, and than those of a copy. One way swaps the bytes."""
    texture, texels = texture_of(opengl, RG16UI, 8, 8), np.arange(128, dtype="uint16")
    theirs = [made(opengl, "glCreateBuffers") for _ in range(2)]
    for target, other in zip((UNPACK_BUFFER, PACK_BUFFER), theirs, strict=True):
        opengl.gl("glBindBuffer", target, other)
    for way, stores in STORES.items():
        values = 2, 11, 3, 5, 1, 13, 2, int(way == swapped)
        for one, value in zip(stores, values, strict=True):
            opengl.gl("glPixelStorei", one, value)
        theirs += values

    def state() -> list[int]:
        found = ctypes.c_int()
        values = []
        for one in (0x88EF, 0x88ED, *STORES["unpack"], *STORES["pack"]):
            opengl.gl("glGetIntegerv", one, ctypes.byref(found))
            values.append(found.value)
        return values

    assert state() == theirs
    with gi.opengl.share_buffer(device, 256) as shared:
        shared.copy_from_host(texels)
        shared.upload_to(texture, (8, 8, 2), "uint16")
        assert state() == theirs
        opengl.gl("glFinish")
        shared.fill(0)
        shared.download_from(texture, (8, 8, 2), "uint16")
        assert state() == theirs
        opengl.gl("glFinish")
        found = np.zeros_like(texels)
        shared.copy_to_host(found)
        assert (found == texels).all()
        depth = texture_of(opengl, 0x81A5, 8, 8)  # DEPTH_COMPONENT16, which has no red
        for copy in (shared.upload_to, shared.download_from):
            with suppress(gi.DriverError):  # Mesa's; NVIDIA's driver takes the depth for red
                copy(depth, (8, 8), "uint16")
            with pytest.raises(gi.InvalidArgumentError, match="height"):
                copy(texture, (4, 8, 2), "uint16", y=5)
        assert state() == theirs


@pytest.mark.parametrize("target", [TEXTURE_3D, CUBE_MAP, 0x8C1A, 0x0DE0, 0x8C18, 0x9100])
def test_textures_of_other_kinds_are_refused(opengl: OpenGLApplication, device: gi.Device, target: int) -> None:
    """3D, cube maps, arrays, 1D, arrays of 1D, multisampled. Of some, OpenGL would copy the first layer."""
    texture = made(opengl, "glCreateTextures", target)
    match target:
        case 0x806F | 0x8C1A:
            opengl.gl("glTextureStorage3D", texture, 1, RGBA8, 8, 8, 2)
        case 0x0DE0:
            opengl.gl("glTextureStorage1D", texture, 1, RGBA8, 8)
        case 0x9100:
            opengl.gl("glTextureStorage2DMultisample", texture, 4, RGBA8, 8, 8, 1)
        case _:
            opengl.gl("glTextureStorage2D", texture, 1, RGBA8, 8, 8)
    assert not opengl.gl("glGetError", returns=ctypes.c_uint)
    with gi.opengl.share_buffer(device, 256) as shared:
        shared.fill(7)
        for copy in (shared.upload_to, shared.download_from):
            with pytest.raises(gi.InvalidArgumentError, match=rf"^texture: .*got {texture}\b"):
                copy(texture, (1, 8, 4))
        assert (read(opengl, shared.name, 256) == 7).all()


@pytest.mark.parametrize("call", ["glBindBuffer", "glTextureParameteri"])
def test_a_call_that_fails_is_told(opengl: OpenGLApplication, device: gi.Device, call: str) -> None:
    """Without it, texels would come from an address of the host, or an image would have another tiling."""
    loader = failing(opengl, call, 2 if call == "glBindBuffer" else 3)
    gi.opengl._context._contexts.clear()
    with ExitStack() as scope:
        if call == "glBindBuffer":
            shared = scope.enter_context(gi.opengl.share_buffer(device, 512, get_proc_address=loader))
            texture = texture_of(opengl, RGBA8, 8, 8)
            for copy in (shared.upload_to, shared.download_from):
                with pytest.raises(gi.DriverError, match=call):
                    copy(texture, (8, 8, 4), offset=64)
        else:
            application = Application("lavapipe" if device.info.is_cpu else "nvidia")
            scope.callback(application.close)
            size, tiling = (24, 10), "linear" if device.info.is_cpu else "optimal"
            image = gi.vulkan.share_image(application.vk, device, size, "R32_SFLOAT", tiling=tiling, initial=1)
            with scope.enter_context(image), pytest.raises(gi.DriverError, match=call):
                gi.opengl.import_image(image, get_proc_address=loader)
    gi.opengl._context._contexts.clear()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shape": (7, 9, 4)}, r"got \(7, 9\)"),
        ({"shape": (8, 8, 4), "offset": 1}, r"\b257\b"),
        ({"shape": (8, 8, 4), "row_pitch": 30}, "row_pitch"),
        ({"shape": (4, 4, 4), "row_pitch": 18}, "whole texels of 4 bytes"),
        ({"shape": (4, 4, 2), "dtype": "float32", "offset": 2}, "whole elements of 4"),
        ({"shape": (8, 8, 5)}, "shape"),
        ({"shape": (8,)}, "height, width"),
        ({"shape": (2, 2), "dtype": "float64"}, "float32"),
        ({"texture": 4040404, "shape": (2, 2)}, "name of a texture"),
        ({"shape": (1, 1, 4), "level": 1}, r"\(0, 0\)"),
        ({"shape": (8, 8, 4), "level": 1 << 32}, r"^level: .*\b4294967296\b"),  # as a GLint they are 0
        ({"shape": (1, 8, 4), "row_pitch": 4 << 32}, r"^row_pitch: .*\b17179869184\b"),
        ({"shape": (8, 8, 4), "x": 1 << 32}, r"\b4294967296\b"),
    ],
)
def test_texels_that_do_not_fit_are_refused(
    opengl: OpenGLApplication, device: gi.Device, options: dict[str, Any], said: str
) -> None:
    texture = texture_of(opengl, RGBA8, 8, 8)
    with gi.opengl.share_buffer(device, 256) as shared:
        with pytest.raises(gi.InvalidArgumentError, match=said):
            shared.upload_to(**{"texture": texture, **options})
        integers = texture_of(opengl, RG16UI, 8, 8)
        with pytest.raises(gi.InvalidArgumentError, match="expected integers"):
            shared.download_from(integers, (2, 2, 2), "float32")


@pytest.mark.parametrize("format_", ["R8G8B8A8_UNORM", "R32_SFLOAT"])
def test_an_image_of_vulkan_is_a_texture(
    opengl: OpenGLApplication, device: gi.Device, stream: gi.Stream, format_: str
) -> None:
    software = device.info.is_cpu
    application = Application("lavapipe" if software else "nvidia")
    tiling = "linear" if software else "optimal"
    channels, dtype, args = (
        (4, "uint8", (0x1908, 0x1401)) if format_ == "R8G8B8A8_UNORM" else (1, "float32", (0x1903, 0x1406))
    )
    texels, found = RNG.integers(0, 200, size=(2, 10, 24, channels)).astype(dtype)
    image = gi.vulkan.share_image(application.vk, device, (24, 10), format_, tiling=tiling, initial=1)
    tilings = []

    def parameter(name: int, what: int, value: int) -> None:
        tilings.append((what, value))
        opengl.gl("glTextureParameteri", name, what, value)

    loader = Doubled(opengl, glTextureParameteri=((None, *[ctypes.c_uint] * 3), parameter))
    gi.opengl._context._contexts.clear()
    with image, gi.opengl.import_image(image, get_proc_address=loader) as texture:
        assert tilings == [(0x9580, 0x9585 if software else 0x9584)]  # llvmpipe lays both out alike
        if image.array is None:
            np.asarray(image.view())[:] = texels
        else:
            image.array.level(0).copy_from_host(texels, stream=stream)
            stream.synchronize(timeout=LIMIT)
        opengl.gl("glGetTextureImage", texture.name, 0, *args, found.nbytes, found.ctypes.data)
        assert (found == texels).all()
        texels += 1
        opengl.gl("glTextureSubImage2D", texture.name, 0, 0, 0, 24, 10, *args, texels.ctypes.data)
        opengl.gl("glFinish")
        if image.array is None:
            found = np.array(image.view())
        else:
            image.array.level(0).copy_to_host(found, stream=stream)
            stream.synchronize(timeout=LIMIT)
        assert (found == texels).all()
    if not software:
        linear = gi.vulkan.share_image(application.vk, device, (24, 10), format_, tiling="linear", initial=1)
        with linear, pytest.raises(gi.InvalidArgumentError, match="linear"):
            gi.opengl.import_image(linear)
    application.close()


def test_each_format_has_the_texels_of_the_image(opengl: OpenGLApplication, device: gi.Device) -> None:
    """By their bytes: what the image has in a row is what OpenGL reads as that many channels of that type."""
    if not device.info.is_cpu:
        pytest.skip("NVIDIA's driver imports no linear images")
    types = {"uint8": 0x1401, "int8": 0x1400, "uint16": 0x1403, "int16": 0x1402, "uint32": 0x1405, "int32": 0x1404,
             "float16": 0x140B, "float32": 0x1406}  # fmt: skip
    application, shown = Application("lavapipe"), set()
    for format_ in gi.opengl._texture._FORMATS:
        try:
            image = gi.vulkan.share_image(application.vk, device, (5, 3), format_, tiling="linear", initial=1)
        except gi.InvalidArgumentError:  # lavapipe has no such linear images, or they are no array
            continue
        with image, gi.opengl.import_image(image) as texture:
            view = np.asarray(image.view())
            texels = RNG.integers(1, 100, size=view.shape).astype(view.dtype)
            view[:] = texels
            names = {1: (0x1903, 0x8D94), 2: (0x8227, 0x8228), 4: (0x1908, 0x8D99)}[view.shape[2]]
            found, integer = np.zeros_like(texels), format_.endswith("INT")
            opengl.gl("glPixelStorei", 0x0D05, 1)
            kind = types[view.dtype.name]
            opengl.gl("glGetTextureImage", texture.name, 0, names[integer], kind, found.nbytes, found.ctypes.data)
            assert (found == texels).all(), format_
            del view
        shown.add(format_)
    application.close()
    assert len(shown) >= 30, shown


# -- turns -------------------------------------------------------------------------------------------------------------


class SlowDraw:
    """A draw that takes 50 ms and more on llvmpipe, which ends a loop after 65,535, then one that writes a number."""

    WORDS = 64

    def __init__(self, opengl: OpenGLApplication) -> None:
        self._opengl, gl = opengl, opengl.gl
        self._program = gl("glCreateProgram", returns=ctypes.c_uint)
        self._add(
            VERTEX_SHADER, "void main() { gl_Position = vec4(gl_VertexID % 2 * 4 - 1, gl_VertexID / 2 * 4 - 1, 0, 1); }"
        )
        self._add(
            FRAGMENT_SHADER,
            """
            layout(std430, binding = 0) buffer Words { uint words[]; };
            layout(location = 0) uniform uint number; layout(location = 1) uniform uint rounds; out vec4 color;
            void main() {
                uint found = number, word = uint(gl_FragCoord.x) + 8u * uint(gl_FragCoord.y);
                for (uint k = 0u; k < rounds; k++) found = found * 1664525u + 1013904223u;
                color = vec4(found & 1u);
                if (rounds == 0u && word < 64u && gl_FragCoord.x < 8.0) words[word] = number;
            }""",
        )
        gl("glLinkProgram", self._program)
        gl("glUseProgram", self._program)
        self._target, renders = made(opengl, "glCreateFramebuffers"), made(opengl, "glCreateRenderbuffers")
        gl("glNamedRenderbufferStorage", renders, RGBA8, 64, 64)
        gl("glNamedFramebufferRenderbuffer", self._target, 0x8CE0, 0x8D41, renders)
        gl("glBindFramebuffer", 0x8D40, self._target)
        gl("glBindVertexArray", made(opengl, "glCreateVertexArrays"))
        gl("glViewport", 0, 0, 64, 64)

    def _add(self, kind: int, code: str) -> None:
        gl = self._opengl.gl
        shader = gl("glCreateShader", kind, returns=ctypes.c_uint)
        text = ctypes.c_char_p(b"#version 450\n" + code.encode())
        gl("glShaderSource", shader, 1, ctypes.byref(text), None)
        gl("glCompileShader", shader)
        gl("glAttachShader", self._program, shader)

    def __call__(self, buffer: int, number: int) -> None:
        gl = self._opengl.gl
        gl("glBindBufferBase", SSBO, 0, buffer)
        gl("glUniform1ui", 0, number)
        for rounds in 65000, 0:
            gl("glUniform1ui", 1, rounds)
            gl("glDrawArrays", TRIANGLES, 0, 3)
        assert not gl("glGetError", returns=ctypes.c_uint)


class HeldOpenGL:
    """A GPU's context that waits, by a handoff of its own, until the host signals `gate`."""

    def __init__(self, device: gi.Device) -> None:
        self.gate = device.create_semaphore(gi.TimelineFd)
        self.stream = device.create_stream()
        self.handoff = gi.opengl.share_handoff(device)

    def hold(self, frame: int) -> None:
        self.handoff.acquire(self.stream)
        self.gate.wait(self.stream, frame)
        self.handoff.release(self.stream)
        with self.handoff.gl():
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for one in (self.handoff, self.stream, self.gate):
            one.close()


def words(shared: gi.opengl.SharedBuffer, stream: gi.Stream) -> set[int]:
    found = np.zeros(SlowDraw.WORDS, "uint32")
    stream.synchronize(timeout=LIMIT)
    shared.copy_to_host(found)
    return set(found.tolist())


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "sabotaged"])
def test_the_stream_sees_what_opengl_has_drawn(
    opengl: OpenGLApplication, device: gi.Device, stream: gi.Stream, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """A draw that takes long, or that a GPU is held before. Without the wait it shows the bytes of the frame before."""
    draw = SlowDraw(opengl)
    with (
        ExitStack() as scope,
        gi.opengl.share_buffer(device, 256) as shared,
        gi.opengl.share_handoff(device, allow=ALL) as handoff,
    ):
        shared.fill(0)
        if not waits:
            monkeypatch.setattr(handoff, "acquire", lambda _: setattr(handoff, "_next_call", NextCall.RELEASE))
        held = None if handoff.mode == "bridged" else scope.enter_context(HeldOpenGL(device))
        seen = []
        for frame in range(1, 21 if not waits else 6):
            with handoff.gl(shared):
                if held:
                    held.hold(frame)
                draw(shared.name, frame)
            if held and waits:
                held.gate.host_signal(frame)
            handoff.acquire(stream)
            seen.append(words(shared, stream))
            if held and not waits:
                held.gate.host_signal(frame)
            handoff.release(stream)
            if not waits:
                opengl.gl("glFinish")
        assert seen == [{frame if waits else frame - 1} for frame in range(1, len(seen) + 1)]


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "sabotaged"])
def test_opengl_sees_what_the_stream_has_written(
    opengl: OpenGLApplication, device: gi.Device, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The stream is held until OpenGL waits, or has read."""
    if not device.capabilities.supports((gi.Operation.CREATE_SEMAPHORE, gi.TimelineFd)):
        pytest.skip("the host cannot hold a stream of this device")
    with (
        gi.opengl.share_buffer(device, 256) as shared,
        gi.opengl.share_handoff(device, allow=ALL) as handoff,
        device.create_semaphore(gi.TimelineFd) as held,
        device.create_stream() as stream,
    ):
        shared.fill(0)
        if not waits:
            monkeypatch.setattr(handoff._sync, "wait_in_gl", lambda *_: None)
        for frame in range(1, 21):
            handoff.acquire(stream)
            held.wait(stream, frame)
            shared.fill(frame, stream=stream)
            handoff.release(stream)
            if waits:
                threading.Timer(0.005, held.host_signal, (frame,)).start()
            with handoff.gl(shared):
                found = read(opengl, shared.name, 256)
            if not waits:
                held.host_signal(frame)
            assert set(found.tolist()) == {frame if waits else frame - 1}
            stream.synchronize(timeout=LIMIT)


def test_a_call_out_of_turn_raises(opengl: OpenGLApplication, device: gi.Device, stream: gi.Stream) -> None:
    with gi.opengl.share_buffer(device, 256) as shared, gi.opengl.share_handoff(device, allow=ALL) as handoff:
        with pytest.raises(gi.InvalidArgumentError, match=r"^handoff: .*\brelease\b"):
            handoff.release(stream)
        with handoff.gl(shared):
            with pytest.raises(gi.InvalidArgumentError, match=r"^handoff: .*\bacquire\b"):
                handoff.acquire(stream)
            with handoff.gl(shared):  # ends the frame; the outer block's end does nothing
                pass
        with pytest.raises(gi.InvalidArgumentError, match=r"^handoff: .*\bacquire\b.* gl;"), handoff.gl(shared):
            pass
        handoff.acquire(stream)
        handoff._next_call = NextCall.ACQUIRE  # as after an interrupt at the end of acquire
        handoff.acquire(stream)
        handoff.release(stream)
        with pytest.raises(KeyError), handoff.gl(shared):  # a block that raises has ended all the same
            raise KeyError
        with pytest.raises(gi.ArgumentTypeError, match="buffers and textures"):
            handoff.gl(shared.name)  # type: ignore[arg-type]
        handoff.acquire(stream)
        assert handoff.frame == 1
    with pytest.raises(gi.ResourceClosedError):
        handoff.acquire(stream)
    with pytest.raises(gi.ResourceClosedError), handoff.gl(shared):
        pass


def test_bridged_only_by_name(opengl: OpenGLApplication, device: gi.Device) -> None:
    table = gi.opengl.capabilities()
    if table.supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd)):
        with gi.opengl.share_handoff(device) as handoff:
            assert handoff.mode != "bridged"
    else:
        with pytest.raises(gi.UnsupportedError, match=r"(?s)GL_EXT_semaphore_fd.*bridged"):
            gi.opengl.share_handoff(device)


class Half:
    """What stands in for a semaphore of Vulkan's, which llvmpipe's does not share: one that the host has made."""

    def __init__(self, device: gi.Device, kind: type) -> None:
        self.kind, self._vk = kind, None
        made: Any = device.create_semaphore(gi.TimelineFd if kind is gi.Timeline else gi.OpaqueFd)
        self.semaphore = self.vk_semaphore = made

    def close(self, timeout: float | None = None) -> None:
        self.semaphore.close(timeout)


class SemaphoresOfGL:
    """OpenGL's functions of semaphores, on imports of the host's, and their calls in order."""

    def __init__(self, device: gi.Device) -> None:
        self.device, self.calls = device, list[tuple[Any, ...]]()
        self.imported: dict[int, Any] = {}
        self.value: dict[int, int] = {}
        self.timelines: set[int] = set()
        unsigned, pointer = ctypes.c_uint, ctypes.POINTER(ctypes.c_uint)
        barrier = None, unsigned, unsigned, pointer, unsigned, pointer, pointer
        parameter = None, unsigned, unsigned, ctypes.POINTER(ctypes.c_uint64)
        self.functions = {
            "glGenSemaphoresEXT": ((None, unsigned, pointer), self.make),
            "glCreateSemaphoresNV": ((None, unsigned, pointer), self.make),
            "glDeleteSemaphoresEXT": ((None, unsigned, pointer), lambda _, names: self.imported.pop(names[0]).close()),
            "glSemaphoreParameterivNV": (parameter, lambda name, *_: self.timelines.add(name)),
            "glImportSemaphoreFdEXT": ((None, unsigned, unsigned, unsigned), self.take),
            "glSemaphoreParameterui64vEXT": (parameter, self.set),
            "glWaitSemaphoreEXT": (barrier, lambda *given: self.go("wait", *given)),
            "glSignalSemaphoreEXT": (barrier, lambda *given: self.go("signal", *given)),
            "glFlush": ((None,), lambda: self.calls.append(("flush",))),
        }

    def make(self, _: int, out: Any) -> None:
        out[0] = 100 + len(self.imported)
        self.imported[out[0]] = None

    def take(self, name: int, _: int, fd: int) -> None:
        handle: Any = gi.TimelineFd(fd) if name in self.timelines else gi.OpaqueFd(fd, trusted=True)
        self.imported[name] = self.device.import_semaphore(handle)

    def set(self, name: int, _: int, value: Any) -> None:
        self.value[name] = value[0]

    def go(self, what: str, name: int, count: int, buffers: Any, some: int, textures: Any, layouts: Any) -> None:
        values = [self.value[name]] if name in self.timelines else []
        self.calls.append((what, *values, buffers[:count], textures[:some], layouts[:some]))
        semaphore = self.imported[name]
        if what == "wait":
            semaphore.host_wait(*values, timeout=LIMIT)
        else:
            semaphore.host_signal(*values)


@pytest.mark.parametrize("draws_first", [True, False])
@pytest.mark.parametrize("mode", ["timeline", "binary"])
def test_semaphores_of_both_kinds_order_both_sides(
    opengl: OpenGLApplication, device: gi.Device, stream: gi.Stream, monkeypatch: pytest.MonkeyPatch, mode: str,
    draws_first: bool,
) -> None:  # fmt: skip
    """With semaphores in place of the driver's: llvmpipe has none."""
    if not device.info.is_cpu:
        pytest.skip("a GPU's driver has its own")
    make = gi.vulkan._handoff
    monkeypatch.setattr(make, "share_semaphore", lambda _, device, kind, bridge, label: Half(device, kind))
    monkeypatch.setattr(gi.opengl._handoff, "export_semaphore", lambda _, semaphore, kind: semaphore.export())
    theirs = SemaphoresOfGL(device)
    extensions = ["GL_EXT_memory_object", "GL_EXT_memory_object_fd", "GL_EXT_semaphore_fd", "GL_NV_timeline_semaphore"]
    loader = with_extensions(opengl, extensions, 5, **theirs.functions)
    handoff = gi.opengl.share_handoff(device, allow=(mode,), get_proc_address=loader)
    shared = gi.opengl.share_buffer(device, 64)
    names = gi.opengl._names.Names(shared.context)
    texture = gi.opengl.SharedTexture(names, names.new("glCreateTextures", TEXTURE_2D), 0x9591)
    assert handoff.mode == mode
    name, timeline, found = shared.name, mode == "timeline", np.zeros(64, "uint8")
    shared.fill(0)

    def draw(frame: int) -> None:
        with handoff.gl(texture, shared):
            assert set(read(opengl, name, 64).tolist()) == {frame}
            write(opengl, name, np.full(64, frame + 100, "uint8"))

    for frame in range(5):
        if draws_first:
            draw(frame)
        handoff.acquire(stream)
        shared.copy_to_host(found, stream=stream)
        shared.fill(frame + 1, stream=stream)
        handoff.release(stream)
        stream.synchronize(timeout=LIMIT)
        assert set(found.tolist()) == {frame + 100} if draws_first else {frame + 99 if frame else 0}
        if not draws_first:
            draw(frame + 1)
    first = 0 if draws_first else 1
    expected: list[tuple[Any, ...]] = []
    barrier = [name], [texture.name], [0x9591]
    for frame in range(first, first + 5):
        expected += [("wait", *[2 * frame] * timeline, *barrier)] * bool(frame)
        expected += [("signal", *[2 * frame + 1] * timeline, *barrier), ("flush",)]
    assert theirs.calls == expected
    with handoff.gl() if draws_first else nullcontext():
        handoff.close()  # in the block
    assert theirs.calls[len(expected) :] == [("wait", *[10] * timeline, [], [], [])] * draws_first
    texture.close()
    shared.close()
    gi.opengl.identity()
    assert not theirs.imported


# -- who may call, and where -------------------------------------------------------------------------------------------


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call in another thread returns or raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT)
    return found[0]


def test_a_thread_without_the_context_is_refused(
    opengl: OpenGLApplication, device: gi.Device, stream: gi.Stream
) -> None:
    with gi.opengl.share_buffer(device, 256) as shared, gi.opengl.share_handoff(device, allow=ALL) as handoff:
        for call in (
            gi.opengl.identity,
            lambda: gi.opengl.share_buffer(device, 256),
            lambda: handoff.gl(shared).__enter__(),
            lambda: shared.upload_to(1, (1, 1)),
            lambda: gi.opengl.identity(get_proc_address=opengl.address),
        ):
            error = in_thread(call)
            assert isinstance(error, gi.InvalidArgumentError), error
            assert "current in" in str(error)


def test_what_another_thread_closes_is_deleted_in_the_context(opengl: OpenGLApplication, device: gi.Device) -> None:
    shared = gi.opengl.share_buffer(device, 256)
    name = shared.name
    assert in_thread(shared.close) is None
    assert opengl.gl("glIsBuffer", name, returns=ctypes.c_ubyte)
    with pytest.raises(gi.ResourceClosedError):
        _ = shared.name
    gi.opengl.identity()  # any call there
    assert not opengl.gl("glIsBuffer", name, returns=ctypes.c_ubyte)


def test_what_vertex_arrays_still_have_can_be_drawn(opengl: OpenGLApplication, device: gi.Device) -> None:
    """llvmpipe frees the memory under it with the memory object."""
    draw = SlowDraw(opengl)
    shared, array = gi.opengl.share_buffer(device, 1 << 20), made(opengl, "glCreateVertexArrays")
    opengl.gl("glVertexArrayVertexBuffer", array, 0, shared.name, 0, 16)
    opengl.gl("glVertexArrayAttribBinding", array, 0, 0)
    opengl.gl("glEnableVertexArrayAttrib", array, 0)
    opengl.gl("glVertexArrayAttribFormat", array, 0, 4, 0x1406, 0, 0)
    shared.close()
    gi.opengl.identity()
    opengl.gl("glBindVertexArray", array)
    with gi.opengl.share_buffer(device, 256) as words:
        draw(words.name, 1)
        opengl.gl("glFinish")


def test_fences_are_deleted_and_names_that_another_thread_closed(
    opengl: OpenGLApplication, device: gi.Device, stream: gi.Stream
) -> None:
    synced: list[int] = []
    flushed: list[str] = []

    def fence(*given: int) -> int:
        synced.append(opengl.gl("glFenceSync", *given, returns=ctypes.c_void_p))
        flushed.append("fence")
        return synced[-1]

    def delete(sync: int) -> None:
        synced.remove(sync)
        opengl.gl("glDeleteSync", sync)

    def flush() -> None:
        flushed.append("flush")
        opengl.gl("glFlush")

    loader = Doubled(
        opengl,
        glFenceSync=((ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), fence),
        glDeleteSync=((None, ctypes.c_void_p), delete),
        glFlush=((None,), flush),
    )
    gi.opengl._context._contexts.clear()
    other = gi.opengl.share_buffer(device, 256, get_proc_address=loader)
    name = other.name
    with gi.opengl.share_handoff(device, allow=("bridged",)) as handoff:
        for _ in range(3):
            with handoff.gl(other):
                pass
            handoff.acquire(stream)
            handoff.release(stream)
        assert not synced
        in_thread(other.close)
        with handoff.gl():
            assert not opengl.gl("glIsBuffer", name, returns=ctypes.c_ubyte)
    assert not synced  # of the frame that nobody has acquired
    assert flushed == ["fence", "flush"] * 4
    gi.opengl._context._contexts.clear()


def test_what_is_dropped_is_deleted_by_the_next_call(opengl: OpenGLApplication, device: gi.Device) -> None:
    gi.opengl.share_buffer(device, 256).close()
    names = gi.opengl._names.Names(gi.opengl._context.current_context())
    name = names.new("glCreateBuffers")
    del names
    assert opengl.gl("glIsBuffer", name, returns=ctypes.c_ubyte)
    gi.opengl.identity()
    assert not opengl.gl("glIsBuffer", name, returns=ctypes.c_ubyte)


def test_another_context_at_the_same_address_keeps_its_names(opengl: OpenGLApplication, device: gi.Device) -> None:
    """The names of a context that is gone are not deleted in one that has its address, and its own objects."""
    shared = gi.opengl.share_buffer(device, 256)
    context, old = shared.context, shared.context._mark
    context._mark = old[0], b"another's"
    shared.close()
    assert opengl.gl("glIsBuffer", shared._name, returns=ctypes.c_ubyte)
    again, handoff = gi.opengl.share_buffer(device, 256), gi.opengl.share_handoff(device, allow=ALL)
    assert again.context is not context
    shared.closed = False
    with pytest.raises(gi.InvalidArgumentError, match="context that made this"):
        shared.upload_to(texture_of(opengl, RGBA8, 2, 2), (2, 2, 4))
    with pytest.raises(gi.InvalidArgumentError, match="the handoff's context"):
        handoff.gl(shared)
    shared.closed = True
    handoff.close()
    again.close()
    context._mark = old
    gi.opengl._context._contexts[context.key] = context
    gi.opengl.identity()
    assert not opengl.gl("glIsBuffer", shared._name, returns=ctypes.c_ubyte)


_LATE = """
import warnings; warnings.simplefilter("always")
import gpuinterop as gi
from gpuinterop.testing.exporters.opengl import HeadlessContext
context = HeadlessContext(); device = gi.match_device(gi.opengl.identity())
first, second = gi.opengl.share_buffer(device, 256), gi.opengl.share_buffer(device, 256)
handoff = gi.opengl.share_handoff(device, allow=("timeline", "binary", "bridged"))
context.close()
for one in (first, second, handoff): one.close()
"""


def test_what_is_closed_after_the_context_is_told_once(opengl: OpenGLApplication) -> None:
    done = subprocess.run(
        [sys.executable, "-Xfaulthandler", "-c", _LATE], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("OpenGL object(s)") == 1, done.stderr


# -- what a context lacks ----------------------------------------------------------------------------------------------


def test_missing_extensions_are_named(opengl: OpenGLApplication, device: gi.Device) -> None:
    without = with_extensions(opengl, ["GL_EXT_memory_object"])
    with pytest.raises(gi.UnsupportedError, match="GL_EXT_memory_object_fd"):
        gi.opengl.share_buffer(device, 256, get_proc_address=without)
    only_binary = with_extensions(opengl, ["GL_EXT_memory_object", "GL_EXT_memory_object_fd", "GL_EXT_semaphore_fd"])
    with pytest.raises(gi.UnsupportedError, match="GL_NV_timeline_semaphore"):
        gi.opengl.share_handoff(device, allow=("timeline",), get_proc_address=only_binary)


@pytest.mark.parametrize(("version", "minor"), [("OpenGL ES 3.2 Mesa", 5), ("4.4 Mesa", 4)])
def test_other_versions_are_refused(opengl: OpenGLApplication, device: gi.Device, version: str, minor: int) -> None:
    text = ctypes.create_string_buffer(version.encode())

    def string(what: int) -> int:
        return ctypes.addressof(text) if what == 0x1F02 else opengl.gl("glGetString", what, returns=ctypes.c_void_p)

    extensions = ["GL_EXT_memory_object", "GL_EXT_memory_object_fd"]  # not GL_ARB_direct_state_access
    loader = with_extensions(opengl, extensions, minor, glGetString=((ctypes.c_void_p, ctypes.c_uint), string))
    with pytest.raises(gi.UnsupportedError, match=r"needs OpenGL 4\.5"):
        gi.opengl.share_buffer(device, 256, get_proc_address=loader)
    with pytest.raises(gi.UnsupportedError, match=r"needs OpenGL 4\.5"):
        gi.opengl.share_handoff(device, allow=("bridged",), get_proc_address=loader)


def test_another_gpu_and_another_build_of_the_driver_are_refused(opengl: OpenGLApplication, device: gi.Device) -> None:
    kind = None, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_ubyte)

    def uuid(what: int, index: int, out: Any) -> None:
        ctypes.memmove(out, b"another device..", 16)

    loader = Doubled(opengl, glGetUnsignedBytei_vEXT=(kind, uuid))
    if not device.info.is_cpu:
        with pytest.raises(gi.InvalidArgumentError, match=r"gpuinterop.match_device\(gpuinterop.opengl.identity"):
            gi.opengl.share_buffer(device, 256, get_proc_address=loader)
        return
    with pytest.raises(gi.DeviceNotFoundError, match="of one version"):
        gi.opengl.share_buffer(device, 256, get_proc_address=loader)
    application = Application("lavapipe")
    with pytest.raises(gi.InvalidArgumentError, match="UUIDs differ"):
        gi.opengl.share_buffer(device, 256, vk=application.vk, get_proc_address=loader)
    with gi.opengl.share_buffer(device, 256, vk=application.vk) as shared:
        shared.fill(3)
        assert (read(opengl, shared.name, 256) == 3).all()
    application.close()


@pytest.mark.parametrize("failing", range(6))
def test_a_call_that_fails_leaves_nothing(opengl: OpenGLApplication, device: gi.Device, failing: int) -> None:
    gi.opengl.share_buffer(device, 256).close()  # what a driver makes once
    checks = [0]

    def error() -> int:
        checks[0] += 1
        return 0x0505 if checks[0] == 2 * failing + 2 else opengl.gl("glGetError", returns=ctypes.c_uint)

    loader = Doubled(opengl, glGetError=((ctypes.c_uint,), error))
    gi.opengl._context._contexts.clear()
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(gi.OutOfMemoryError, match="GL_OUT_OF_MEMORY"):
        gi.opengl.share_buffer(device, 256, get_proc_address=loader)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    gi.opengl._context._contexts.clear()
