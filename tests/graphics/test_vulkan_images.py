"""The exporter's images, with the validation layer silent; what a device makes of them is the kit's business."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

import gpuinterop as gi
from gpuinterop.handles import ArrayUsage
from gpuinterop.testing.exporters.base import ExporterImage, ImageParameters
from gpuinterop.testing.exporters.vulkan import VulkanExporter
from gpuinterop.vulkan import _api as c

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import open_exporter
else:
    from vulkan_application import open_exporter

FORMATS = [
    "R8_UNORM", "R8G8B8A8_UNORM", "R16_UINT", "R16G16_SFLOAT", "R32_SFLOAT", "R16G16B16A16_SFLOAT",
    "R32G32B32A32_SFLOAT",
]  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "2d": {"width": 64, "height": 32},
    "levels": {"width": 37, "height": 21, "levels": 6},
    "layers": {"width": 20, "height": 12, "layers": 3, "levels": 2},
    "3d": {"width": 8, "height": 6, "depth": 4, "levels": 3},
    "cube": {"width": 16, "height": 16, "layers": 6, "cube": True},
    "cubes": {"width": 16, "height": 16, "layers": 12, "cube": True, "levels": 5},
    "texel": {"width": 1, "height": 1},
}
PLAIN = ImageParameters(format="R8G8B8A8_UNORM", width=37, height=21, levels=3)


@pytest.fixture(autouse=True)
def _images(exporter: VulkanExporter) -> None:
    if gap := exporter.image_gap(PLAIN):
        pytest.skip(gap)


def _fill(image: ExporterImage, seed: int) -> list[bytes]:
    shuffled = random.Random(seed)
    data = [shuffled.randbytes(image.parameters.level_bytes(level)) for level in range(image.parameters.levels)]
    for level, texels in reversed(list(enumerate(data))):
        image.write(level, texels)
    return data


def _contents(image: ExporterImage) -> list[bytes]:
    return [image.read(level) for level in range(image.parameters.levels)]


@pytest.mark.parametrize(
    ("format", "shape"),
    [
        *((format, "levels") for format in FORMATS),
        *(("R8G8B8A8_UNORM", shape) for shape in SHAPES if shape != "levels"),
    ],
)
def test_images_are_written_and_read(exporter: VulkanExporter, format: str, shape: str) -> None:
    parameters = ImageParameters(format=format, **SHAPES[shape])
    if gap := exporter.image_gap(parameters):
        with pytest.raises(gi.InvalidArgumentError, match="parameters"):
            exporter.create_image(parameters)
        pytest.skip(gap)
    with exporter.create_image(parameters) as image:
        first = _fill(image, 1)
        assert _contents(image) == first
        assert _contents(image) == first, "reading changes nothing"
        assert _fill(image, 2) == _contents(image)
        assert image.size >= sum(map(parameters.level_bytes, range(parameters.levels)))


def test_usage(exporter: VulkanExporter) -> None:
    """What the other side has to be told follows from what the image was created with."""
    with exporter.create_image(PLAIN) as image:
        assert image.usage & (c.IMAGE_TRANSFER_SRC | c.IMAGE_TRANSFER_DST)
        assert bool(image.usage & c.IMAGE_STORAGE) is (image.array_usage is ArrayUsage.SURFACE)
    usage = c.IMAGE_TRANSFER_SRC | c.IMAGE_TRANSFER_DST | c.IMAGE_COLOR_ATTACHMENT
    cube = ImageParameters(format="R8G8B8A8_UNORM", width=8, height=8, layers=6, cube=True, usage=usage)
    if gap := exporter.image_gap(cube):
        pytest.skip(gap)
    with exporter.create_image(cube) as image:
        assert image.usage == usage
        assert image.array_usage == ArrayUsage.COLOR_ATTACHMENT | ArrayUsage.CUBEMAP


def test_what_a_driver_does_not_share_is_refused(exporter: VulkanExporter) -> None:
    for wrong in ({"width": 1 << 20}, {"layers": 1 << 20}):
        fields: dict[str, Any] = {"format": "R8_UNORM", "width": 8, "height": 8, **wrong}
        parameters = ImageParameters(**fields)
        gap = exporter.image_gap(parameters)
        assert "at most" in gap
        with pytest.raises(gi.InvalidArgumentError) as caught:
            exporter.create_image(parameters)
        assert gap in str(caught.value)


def test_wrong_levels_and_sizes(exporter: VulkanExporter) -> None:
    with exporter.create_image(PLAIN) as image:
        data = _fill(image, 3)
        for level in (-1, PLAIN.levels):
            for call in (lambda level=level: image.read(level), lambda level=level: image.write(level, b"")):
                with pytest.raises(gi.InvalidArgumentError, match="level"):
                    call()
        for size in (0, PLAIN.level_bytes(1) - 1, PLAIN.level_bytes(1) + 1):
            with pytest.raises(gi.InvalidArgumentError, match="data"):
                image.write(1, bytes(size))
        assert _contents(image) == data


def test_closed(driver: str) -> None:
    with open_exporter(driver) as exporter:
        image = exporter.create_image(PLAIN)
        exporter.create_image(PLAIN).close()
    image.close()
    for call in (image.export, lambda: image.read(0), lambda: image.write(0, bytes(PLAIN.level_bytes(0)))):
        with pytest.raises(gi.ResourceClosedError):
            call()


# -- the other way round: what a device has allocated --------------------------------------------------------------


def test_allocations_are_imported(exporter: VulkanExporter) -> None:
    """The host's, which are memfds: SwiftShader takes them, lavapipe's table says why not."""
    device = gi.get_backend("host").device()
    if not exporter.identity.is_cpu:
        pytest.skip("a GPU's driver takes allocations of its own GPU; the kit tests them")
    with device.allocate(1 << 16) as ours:
        handle = ours.export()
        assert isinstance(handle, gi.VmmFd)
        if not exporter.capabilities.supports((gi.Operation.EXPORT_ALLOCATION, gi.VmmFd)):
            with pytest.raises(gi.UnsupportedError, match="header"):
                exporter.import_memory(handle, ours.size)
            assert not handle.closed
            handle.close()
            return
        with exporter.import_memory(handle, ours.size) as theirs:
            assert handle.closed
            theirs.write(5, b"from Vulkan")
            with memoryview(bytearray(11)) as found:
                ours.buffer.copy_to_host(found, offset=5)
                assert bytes(found) == b"from Vulkan"
            ours.buffer.fill(0x77)
            assert theirs.read(0, ours.size) == b"\x77" * ours.size
            with pytest.raises(gi.InvalidArgumentError):
                theirs.export()
