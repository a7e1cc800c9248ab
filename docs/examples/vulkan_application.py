"""A small Vulkan program with PyPI's ``vulkan``, which the examples and the manual's pages share.

Comments mark the lines for gpuinterop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import gpuinterop as gi
from gpuinterop.testing.exporters.vulkan import list_drivers


def no_vulkan() -> NoReturn:
    """Exit with the missing part, and the command that installs it."""
    raise gi.BackendUnavailableError(list_drivers().reason)


try:
    import vulkan as api
except OSError:  # there is no loader
    no_vulkan()

SEMAPHORES = ((gi.Operation.IMPORT_SEMAPHORE, gi.TimelineFd), (gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd))


class Application:
    """An instance, a device, a queue, and a pool of command buffers.

    Parameters
    ----------
    transfer : bool
        Whether to use a queue that only copies, if the device has one; with NVIDIA, a handoff there is much faster.
    shader_images : bool
        Whether to prefer a device that shares linear images for shaders to write.
    """

    def __init__(self, *, transfer: bool = False, shader_images: bool = False) -> None:
        # gpuinterop: the instance's extensions. They are part of Vulkan 1.1; enabling them again is allowed.
        extensions, _ = gi.vulkan.required_extensions()
        application = api.VkApplicationInfo(apiVersion=api.VK_MAKE_VERSION(1, 2, 0))
        info = api.VkInstanceCreateInfo(pApplicationInfo=application, ppEnabledExtensionNames=extensions)
        try:
            self.instance = api.vkCreateInstance(info, None)
            found = api.vkEnumeratePhysicalDevices(self.instance)
        except api.VkErrorIncompatibleDriver:
            found = []
        if not found:
            no_vulkan()
        self.physical_device = max(found, key=lambda one: _rank(one, shader_images=shader_images))
        self.name = api.vkGetPhysicalDeviceProperties(self.physical_device).deviceName
        families = api.vkGetPhysicalDeviceQueueFamilyProperties(self.physical_device)
        flags = [family.queueFlags for family in families]
        wanted = api.VK_QUEUE_TRANSFER_BIT if transfer else api.VK_QUEUE_COMPUTE_BIT
        does_more = api.VK_QUEUE_GRAPHICS_BIT | api.VK_QUEUE_COMPUTE_BIT if transfer else 0
        fits = [index for index, bits in enumerate(flags) if bits & wanted and not bits & does_more]
        self.queue_family = fits[0] if fits else 0

        # gpuinterop: the extensions and the feature that sharing needs.
        _, extensions = gi.vulkan.required_extensions(self.physical_device)
        timelines = api.VkPhysicalDeviceTimelineSemaphoreFeatures(timelineSemaphore=api.VK_TRUE)
        queue = api.VkDeviceQueueCreateInfo(queueFamilyIndex=self.queue_family, queueCount=1, pQueuePriorities=[1.0])
        info = api.VkDeviceCreateInfo(pNext=timelines, pQueueCreateInfos=[queue], ppEnabledExtensionNames=extensions)
        self.device = api.vkCreateDevice(self.physical_device, info, None)
        self.queue = api.vkGetDeviceQueue(self.device, self.queue_family, 0)
        pool = api.VkCommandPoolCreateInfo(
            queueFamilyIndex=self.queue_family, flags=api.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        )
        self.pool = api.vkCreateCommandPool(self.device, pool, None)

        # gpuinterop: the argument of gi.vulkan's functions. The application still owns these objects.
        self.vk = gi.vulkan.VulkanContext(
            self.instance, self.physical_device, self.device, self.queue, self.queue_family
        )

    def record(self, work: Callable[[Any], None]) -> Any:
        """Record a command buffer with this work; you can submit it in each frame."""
        info = api.VkCommandBufferAllocateInfo(
            commandPool=self.pool, level=api.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1
        )
        (commands,) = api.vkAllocateCommandBuffers(self.device, info)
        # When an external semaphore shows that the last submission is done, Vulkan does not know that.
        again = api.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT
        api.vkBeginCommandBuffer(commands, api.VkCommandBufferBeginInfo(flags=again))
        work(commands)
        api.vkEndCommandBuffer(commands)
        return commands

    def submit(
        self, commands: Any, *, wait_semaphores: Any = (), wait_values: Any = (), wait_stages: Any = (),
        signal_semaphores: Any = (), signal_values: Any = (),
    ) -> None:  # fmt: skip
        """Call vkQueueSubmit with the arguments that ``handoff.vulkan_submit()`` returns."""
        timeline = api.VkTimelineSemaphoreSubmitInfo(
            pWaitSemaphoreValues=wait_values or None, pSignalSemaphoreValues=signal_values or None
        )
        info = api.VkSubmitInfo(
            pNext=timeline,
            pWaitSemaphores=wait_semaphores or None,
            pWaitDstStageMask=wait_stages or None,
            pCommandBuffers=[commands],
            pSignalSemaphores=signal_semaphores or None,
        )
        api.vkQueueSubmit(self.queue, 1, [info], None)

    def run(self, work: Callable[[Any], None]) -> None:
        """Record, submit, and wait until it is done."""
        self.submit(self.record(work))
        api.vkQueueWaitIdle(self.queue)

    def shader(self, file: Path, *bindings: Any, push: int) -> Shader:
        """Make a compute shader with these shared buffers and images as bindings, and `push` bytes of constants."""
        return Shader(self.device, file, bindings, push)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        api.vkQueueWaitIdle(self.queue)
        self.vk.close()  # gpuinterop: before vkDestroyDevice
        api.vkDestroyCommandPool(self.device, self.pool, None)
        api.vkDestroyDevice(self.device, None)
        api.vkDestroyInstance(self.instance, None)


class Shader:
    """A pipeline and its bindings."""

    def __init__(self, device: Any, file: Path, bindings: Sequence[Any], push: int) -> None:
        stage = api.VK_SHADER_STAGE_COMPUTE_BIT
        kinds = [
            api.VK_DESCRIPTOR_TYPE_STORAGE_IMAGE if hasattr(one, "vk_image") else api.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
            for one in bindings
        ]
        self.device, self.views = device, [_view(device, one) if hasattr(one, "vk_image") else None for one in bindings]
        numbered = [api.VkDescriptorSetLayoutBinding(number, kind, 1, stage, None) for number, kind in enumerate(kinds)]
        self.sets = api.vkCreateDescriptorSetLayout(
            device, api.VkDescriptorSetLayoutCreateInfo(pBindings=numbered), None
        )
        constants = api.VkPushConstantRange(stage, 0, push)
        self.layout = api.vkCreatePipelineLayout(
            device, api.VkPipelineLayoutCreateInfo(pSetLayouts=[self.sets], pPushConstantRanges=[constants]), None
        )
        code = file.read_bytes()
        self.module = api.vkCreateShaderModule(
            device, api.VkShaderModuleCreateInfo(codeSize=len(code), pCode=code), None
        )
        main = api.VkPipelineShaderStageCreateInfo(stage=stage, module=self.module, pName="main")
        info = api.VkComputePipelineCreateInfo(stage=main, layout=self.layout)
        (self.pipeline,) = api.vkCreateComputePipelines(device, None, 1, [info], None)
        sizes = [api.VkDescriptorPoolSize(kind, 1) for kind in kinds]
        self.pool = api.vkCreateDescriptorPool(
            device, api.VkDescriptorPoolCreateInfo(maxSets=1, pPoolSizes=sizes), None
        )
        info = api.VkDescriptorSetAllocateInfo(descriptorPool=self.pool, pSetLayouts=[self.sets])
        (self.set,) = api.vkAllocateDescriptorSets(device, info)
        writes = []
        for number, (one, kind, view) in enumerate(zip(bindings, kinds, self.views, strict=True)):
            what: dict[str, Any] = {"dstSet": self.set, "dstBinding": number, "descriptorCount": 1}
            if view is None:
                what["pBufferInfo"] = [api.VkDescriptorBufferInfo(one.vk_buffer, 0, one.size)]
            else:
                what["pImageInfo"] = [api.VkDescriptorImageInfo(None, view, api.VK_IMAGE_LAYOUT_GENERAL)]
            writes.append(api.VkWriteDescriptorSet(descriptorType=kind, **what))
        api.vkUpdateDescriptorSets(device, len(writes), writes, 0, None)

    def bind(self, commands: Any) -> None:
        """Record that the next dispatches run it."""
        compute = api.VK_PIPELINE_BIND_POINT_COMPUTE
        api.vkCmdBindPipeline(commands, compute, self.pipeline)
        api.vkCmdBindDescriptorSets(commands, compute, self.layout, 0, 1, [self.set], 0, None)

    def dispatch(self, commands: Any, values: bytes, groups: int) -> None:
        """Record `groups` x `groups` work groups with these push constants."""
        constants = api.ffi.new("char[]", values)
        api.vkCmdPushConstants(commands, self.layout, api.VK_SHADER_STAGE_COMPUTE_BIT, 0, len(values), constants)
        api.vkCmdDispatch(commands, groups, groups, 1)

    def destroy(self) -> None:
        api.vkDestroyDescriptorPool(self.device, self.pool, None)
        api.vkDestroyPipeline(self.device, self.pipeline, None)
        api.vkDestroyShaderModule(self.device, self.module, None)
        api.vkDestroyPipelineLayout(self.device, self.layout, None)
        api.vkDestroyDescriptorSetLayout(self.device, self.sets, None)
        for view in filter(None, self.views):
            api.vkDestroyImageView(self.device, view, None)


def _view(device: Any, image: Any) -> Any:
    """Make a shader's view of a shared image."""
    whole = api.VkImageSubresourceRange(api.VK_IMAGE_ASPECT_COLOR_BIT, 0, 1, 0, 1)
    info = api.VkImageViewCreateInfo(
        image=image.vk_image,
        viewType=api.VK_IMAGE_VIEW_TYPE_2D,
        format=getattr(api, f"VK_FORMAT_{image.format}"),
        subresourceRange=whole,
    )
    return api.vkCreateImageView(device, info, None)


def _rank(physical_device: Any, *, shader_images: bool) -> tuple[bool, bool, bool]:
    """Rank devices that compute here first, then those with what is preferred, and those that share semaphores."""
    try:
        device = gi.match_device(gi.vulkan.identity(physical_device))
    except gi.GpuInteropError:
        return False, False, False
    linear = api.vkGetPhysicalDeviceFormatProperties(physical_device, api.VK_FORMAT_R8G8B8A8_UNORM).linearTilingFeatures
    theirs = gi.vulkan.capabilities(physical_device)
    semaphores = any(theirs.supports(cell) and device.capabilities.supports(cell) for cell in SEMAPHORES)
    return True, shader_images and bool(linear & api.VK_FORMAT_FEATURE_STORAGE_IMAGE_BIT), semaphores
