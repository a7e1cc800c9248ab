"""The compute shader of a kernel."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.resources import files
from typing import Any

from ...._arguments import NoCopy
from ....errors import InvalidArgumentError
from ....vulkan import _api as c
from ....vulkan._context import VulkanContext

__all__ = ["Shader"]

_STORAGE_BUFFER = 7  # VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
_COMPUTE = 0x20  # VK_SHADER_STAGE_COMPUTE_BIT
_CONSTANTS = 128  # bytes of push constants, which every driver supports
STAGE, ACCESS = c.STAGE_COMPUTE_SHADER, c.ACCESS_SHADER_READ | c.ACCESS_SHADER_WRITE


class Shader(NoCopy):
    """A pipeline, and the VkBuffer that it uses; `name` is a shader as in `Kernel.shader`."""

    def __init__(self, vk: VulkanContext, name: str, buffer: Any) -> None:
        package, _, file = name.partition(":")
        try:
            code = (files(package) / file).read_bytes()
        except (ImportError, OSError) as error:
            raise InvalidArgumentError("shader", f"expected a readable file, got {name!r}: {error}.") from error
        self.vk = vk
        with ExitStack() as undo:
            self._create(vk, code, buffer, undo)
            self._undo = undo.pop_all()

    def _create(self, vk: VulkanContext, code: bytes, buffer: Any, undo: ExitStack) -> None:
        new, ffi = vk.api.new, vk.api.ffi

        def create(kind: str, **fields: Any) -> Any:
            made = vk._create(f"vkCreate{kind}", f"Vk{kind}", new(f"Vk{kind}CreateInfo", **fields))
            undo.callback(vk._destroy, f"vkDestroy{kind}", made)
            return made

        module = create("ShaderModule", codeSize=len(code), pCode=ffi.from_buffer("uint32_t[]", code))
        binding = new(
            "VkDescriptorSetLayoutBinding", descriptorType=_STORAGE_BUFFER, descriptorCount=1, stageFlags=_COMPUTE
        )
        layouts = vk.api.array(
            "VkDescriptorSetLayout", [create("DescriptorSetLayout", bindingCount=1, pBindings=binding)]
        )
        self._layout = create(
            "PipelineLayout",
            setLayoutCount=1,
            pSetLayouts=layouts,
            pushConstantRangeCount=1,
            pPushConstantRanges=new("VkPushConstantRange", stageFlags=_COMPUTE, size=_CONSTANTS),
        )
        name = ffi.new("char[]", b"main")
        info = new("VkComputePipelineCreateInfo", layout=self._layout, basePipelineIndex=-1)
        info.stage.sType = 18  # VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO
        info.stage.stage = _COMPUTE
        info.stage.module = module
        info.stage.pName = name
        out = ffi.new("VkPipeline *")
        vk._call("vkCreateComputePipelines", vk.device, ffi.NULL, 1, info, ffi.NULL, out)
        self._pipeline = out[0]
        undo.callback(vk._destroy, "vkDestroyPipeline", self._pipeline)
        sizes = new("VkDescriptorPoolSize", type=_STORAGE_BUFFER, descriptorCount=1)
        pool = create("DescriptorPool", maxSets=1, poolSizeCount=1, pPoolSizes=sizes)
        self._sets = ffi.new("VkDescriptorSet[1]")
        info = new("VkDescriptorSetAllocateInfo", descriptorPool=pool, descriptorSetCount=1, pSetLayouts=layouts)
        vk._call("vkAllocateDescriptorSets", vk.device, info, self._sets)
        write = new(
            "VkWriteDescriptorSet",
            dstSet=self._sets[0],
            descriptorCount=1,
            descriptorType=_STORAGE_BUFFER,
            pBufferInfo=new("VkDescriptorBufferInfo", buffer=buffer, range=c.WHOLE_SIZE),
        )
        vk.functions.vkUpdateDescriptorSets(vk.device, 1, write, 0, ffi.NULL)

    def record(self, commands: Any, groups: Sequence[int], arguments: Sequence[int | float]) -> None:
        functions, ffi = self.vk.functions, self.vk.api.ffi
        types = "".join("f" if isinstance(argument, float) else "I" for argument in arguments)
        constants = struct.pack(f"={types}", *arguments).ljust(_CONSTANTS, b"\0")
        functions.vkCmdBindPipeline(commands, 1, self._pipeline)
        functions.vkCmdBindDescriptorSets(commands, 1, self._layout, 0, 1, self._sets, 0, ffi.NULL)
        functions.vkCmdPushConstants(commands, self._layout, _COMPUTE, 0, _CONSTANTS, ffi.from_buffer(constants))
        functions.vkCmdDispatch(commands, *groups)

    def close(self) -> None:
        """Destroy the shader; no queue may be using it."""
        self._undo.close()
