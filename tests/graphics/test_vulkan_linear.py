"""Linear images of every usage, where the driver shares such; elsewhere the refusal says what there is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import gpuinterop as gi

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application
else:
    from vulkan_application import Application

USAGES = {"SAMPLED": (0x4, 0x1), "STORAGE": (0x8, 0x2), "COLOR_ATTACHMENT": (0x10, 0x80)}
"""``VkImageUsageFlagBits``, and the ``VkFormatFeatureFlagBits`` that says whether a tiling has it."""
TRANSFERS = 0x3
FORMAT = "R32G32B32A32_SFLOAT"
FORMATS = {FORMAT: 109, "R8G8B8A8_SRGB": 43}


def features(application: Application, format: str) -> int:
    properties = application.api.vkGetPhysicalDeviceFormatProperties(application.physical_device, FORMATS[format])
    return int(properties.linearTilingFeatures)


@pytest.mark.parametrize("format", FORMATS)
def test_usages_of_linear_images(
    application: Application, device: gi.Device, driver: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format has those that the driver's features of linear tiling say; a refusal lists them."""
    create, given = application.vk.functions.vkCreateImage, list[int]()

    def watched(device: Any, info: Any, *rest: Any) -> int:
        given.append(info.usage)
        return int(create(device, info, *rest))

    monkeypatch.setitem(application.vk.functions.__dict__, "vkCreateImage", watched)
    has = {name: bool(features(application, format) & feature) for name, (_, feature) in USAGES.items()}
    assert driver not in ("swiftshader", "lavapipe") or has["COLOR_ATTACHMENT"] == (driver == "lavapipe")
    everything = TRANSFERS
    for name, (usage, _) in USAGES.items():
        everything |= usage
        asked: dict[str, Any] = {"tiling": "linear", "usage": TRANSFERS | usage}
        if has[name]:
            gi.vulkan.share_image(application.vk, device, (8, 8), format, **asked).close()
            assert given.pop() == TRANSFERS | usage
            continue
        with pytest.raises(
            gi.InvalidArgumentError, match=rf"; got {name}; .* optimal .*vkCmdCopyImageToBuffer"
        ) as caught:
            gi.vulkan.share_image(application.vk, device, (8, 8), format, **asked)
        assert caught.value.argument == "usage"
        listed = str(caught.value).split("; got")[0]
        assert {name for name in USAGES if name in listed} == {name for name in USAGES if has[name]}
        assert "TRANSFER_SRC, TRANSFER_DST" in listed
    if missing := [name for name in USAGES if not has[name]]:
        with pytest.raises(gi.InvalidArgumentError, match=f"; got {', '.join(missing)}"):
            gi.vulkan.share_image(application.vk, device, (8, 8), format, tiling="linear", usage=everything)


def test_a_format_that_has_no_views_of_the_usage(
    application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA says of linear images for attachments that it makes them, and has no such feature of the format."""
    name = "vkGetPhysicalDeviceFormatProperties2"
    functions = application.vk.physical.functions
    real = getattr(functions, name)

    def without(physical: Any, format: int, found: Any) -> None:
        real(physical, format, found)
        found.formatProperties.linearTilingFeatures &= ~USAGES["SAMPLED"][1]

    monkeypatch.setitem(functions.__dict__, name, without)
    share = partial(gi.vulkan.share_image, application.vk, device, (8, 8), FORMAT, tiling="linear")
    with pytest.raises(gi.InvalidArgumentError, match="got SAMPLED"):
        share(usage=TRANSFERS | USAGES["SAMPLED"][0])
    share(usage=TRANSFERS).close()
