"""Linear images that shaders write, where the driver shares such; elsewhere the refusal says what there is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuinterop as gi

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application
else:
    from vulkan_application import Application

USAGES = {"SAMPLED": (0x4, 0x1), "STORAGE": (0x8, 0x2), "COLOR_ATTACHMENT": (0x10, 0x80)}
"""``VkImageUsageFlagBits``, and the ``VkFormatFeatureFlagBits`` that says whether a tiling has it."""
TRANSFERS = 0x3
GENERAL = 1
COLOUR = 1
FORMAT = "R32G32B32A32_SFLOAT"  # as gradient.comp says
FORMATS = {FORMAT: 109, "R8G8B8A8_SRGB": 43}


def features(application: Application, format: str) -> int:
    properties = application.api.vkGetPhysicalDeviceFormatProperties(application.physical_device, FORMATS[format])
    return int(properties.linearTilingFeatures)


@pytest.mark.parametrize("format", FORMATS)
def test_usages_of_linear_images(application: Application, device: gi.Device, driver: str, format: str) -> None:
    """A format has those that the driver's features of linear tiling say; a refusal lists them."""
    has = {name: bool(features(application, format) & feature) for name, (_, feature) in USAGES.items()}
    assert driver not in ("swiftshader", "lavapipe") or has["COLOR_ATTACHMENT"] == (driver == "lavapipe")
    everything = TRANSFERS
    for name, (usage, _) in USAGES.items():
        everything |= usage
        asked: dict[str, Any] = {"tiling": "linear", "usage": TRANSFERS | usage}
        if has[name]:
            gi.vulkan.share_image(application.vk, device, (8, 8), format, **asked).close()
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


def test_a_shader_writes_and_numpy_reads(application: Application, device: gi.Device) -> None:
    usage = USAGES["STORAGE"][0]
    share = partial(gi.vulkan.share_image, application.vk, device, (20, 12), FORMAT, tiling="linear", usage=usage)
    if not features(application, FORMAT) & USAGES["STORAGE"][1]:
        with pytest.raises(gi.InvalidArgumentError, match="got STORAGE"):
            share()
        return
    with ExitStack() as scope:
        shared = scope.enter_context(share())
        dispatch = shader(application, scope, shared.vk_image)

        def record(commands: Any) -> None:
            shared.acquire(commands)
            dispatch(commands)
            shared.release(commands)

        application.run(record)
        assert shared.buffer is not None
        rows = np.empty(shared.buffer.size // 4, "float32")
        shared.buffer.copy_to_host(rows)
        y, x = np.mgrid[:12, :20]
        texels = np.lib.stride_tricks.as_strided(rows, (12, 20, 4), (shared.row_pitch, 16, 4))
        assert (texels == np.stack([x, y, x * y, np.ones_like(x)], axis=-1)).all()


# -- the application's own objects -------------------------------------------------------------------------------------


def shader(application: Application, scope: ExitStack, image: Any) -> Callable[[Any], None]:
    """Return what records a dispatch of gradient.comp, which writes each texel."""
    vulkan, device = application.api, application.device

    def made(kind: str, **fields: Any) -> Any:
        one = getattr(vulkan, f"vkCreate{kind}")(device, getattr(vulkan, f"Vk{kind}CreateInfo")(**fields), None)
        scope.callback(getattr(vulkan, f"vkDestroy{kind}"), device, one, None)
        return one

    code = Path(__file__).with_name("gradient.spv").read_bytes()
    compute, storage = vulkan.VK_SHADER_STAGE_COMPUTE_BIT, vulkan.VK_DESCRIPTOR_TYPE_STORAGE_IMAGE
    binding = vulkan.VkDescriptorSetLayoutBinding(
        binding=0, descriptorType=storage, descriptorCount=1, stageFlags=compute
    )
    sets = made("DescriptorSetLayout", pBindings=[binding])
    layout = made("PipelineLayout", pSetLayouts=[sets])
    module = made("ShaderModule", codeSize=len(code), pCode=code)
    stage = vulkan.VkPipelineShaderStageCreateInfo(stage=compute, module=module, pName="main")
    info = vulkan.VkComputePipelineCreateInfo(stage=stage, layout=layout, basePipelineIndex=-1)
    (pipeline,) = vulkan.vkCreateComputePipelines(device, None, 1, [info], None)
    scope.callback(vulkan.vkDestroyPipeline, device, pipeline, None)
    size = vulkan.VkDescriptorPoolSize(type=storage, descriptorCount=1)
    pool = made("DescriptorPool", maxSets=1, pPoolSizes=[size])
    (bound,) = vulkan.vkAllocateDescriptorSets(
        device, vulkan.VkDescriptorSetAllocateInfo(descriptorPool=pool, pSetLayouts=[sets])
    )
    whole = vulkan.VkImageSubresourceRange(aspectMask=COLOUR, levelCount=1, layerCount=1)
    view = made("ImageView", image=image, viewType=1, format=FORMATS[FORMAT], subresourceRange=whole)  # 2D
    written = vulkan.VkDescriptorImageInfo(imageView=view, imageLayout=GENERAL)
    write = vulkan.VkWriteDescriptorSet(
        dstSet=bound, dstBinding=0, descriptorCount=1, descriptorType=storage, pImageInfo=[written]
    )
    vulkan.vkUpdateDescriptorSets(device, 1, [write], 0, None)

    def dispatch(commands: Any) -> None:
        point = vulkan.VK_PIPELINE_BIND_POINT_COMPUTE
        vulkan.vkCmdBindPipeline(commands, point, pipeline)
        vulkan.vkCmdBindDescriptorSets(commands, point, layout, 0, 1, [bound], 0, None)
        vulkan.vkCmdDispatch(commands, 3, 2, 1)

    return dispatch
