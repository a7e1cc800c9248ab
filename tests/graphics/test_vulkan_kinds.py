"""Handles of the wrong kind are refused at every public entry: drivers take them, and crash or hand out rubbish."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ctypes import c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import gpuinterop as gi
from gpuinterop.handles import Binary
from tests.programs import printed

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application
else:
    from vulkan_application import Application

Entry = tuple[str, str, Callable[[Any], object]]


def entries(application: Application, handles: dict[str, Any], shared: list[Any], handoff: Any) -> Iterator[Entry]:
    """Argument, the kind that it takes, and the call."""
    g: Any = gi.vulkan
    vk = application.vk
    kinds = {"instance": "VkInstance", "physical_device": "VkPhysicalDevice", "device": "VkDevice", "queue": "VkQueue"}
    for name, count in (("identity", 2), ("capabilities", 2), ("required_extensions", 2), ("VulkanContext", 4)):
        right = {argument: handles[kind] for argument, kind in list(kinds.items())[:count]}
        for argument in (*right, "get_instance_proc_addr"):
            call = partial(lambda it, call, right, to: call(**right | {to: it}), call=getattr(g, name), right=right)
            yield argument, kinds.get(argument, "PFN_vkGetInstanceProcAddr"), partial(call, to=argument)
    yield "vk_memory", "VkDeviceMemory", lambda it: g.export_memory(vk, it, size=4096, dedicated=False)
    yield "vk_semaphore", "VkSemaphore", lambda it: g.export_semaphore(vk, it, Binary)
    yield "vk_semaphore", "VkSemaphore", lambda it: g.TimelineEndpoint(vk, it).counter()
    for one in shared:
        yield "cmd", "VkCommandBuffer", one.acquire
        yield "cmd", "VkCommandBuffer", one.release
    yield "queue", "VkQueue", lambda it: handoff.submit(queue=it)
    yield "command_buffers", "VkCommandBuffer", lambda it: handoff.submit(command_buffers=[it])
    yield "fence", "VkFence", lambda it: handoff.submit(fence=it)


def wrong(application: Application, kind: str, handles: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is no `kind`, by name."""
    vulkan = application.api
    ffi = vulkan.ffi
    yield from ((name, handle) for name, handle in handles.items() if name != kind)
    yield f"{kind} *", ffi.new(f"{kind} *")
    yield "VkBufferCreateInfo", vulkan.VkBufferCreateInfo()
    yield "VkBufferCreateInfo *", ffi.new("VkBufferCreateInfo *")
    if not kind.startswith("PFN"):
        yield "PFN_vkGetInstanceProcAddr", vulkan.lib.vkGetInstanceProcAddr
    yield "PFN_vkGetDeviceProcAddr", vulkan.lib.vkGetDeviceProcAddr
    for name in ("char[4096]", "int *"):
        yield name, ffi.new(name)
    for name, value in (("double", 1.5), ("_Bool", 1), ("int", -1)):
        yield f"{name} {value}", ffi.cast(name, value)
    yield from ((repr(value), value) for value in ("handle", b"handle", 1.5, True, -1, 1 << 64, object()))


def test_every_entry_refuses_every_other_kind(application: Application, device: gi.Device) -> None:
    vulkan, vk = application.api, application.vk
    with ExitStack() as scope:
        buffer = scope.enter_context(gi.vulkan.share_buffer(vk, device, 4096))
        image = scope.enter_context(gi.vulkan.share_image(vk, device, (8, 8), "R8_UNORM", tiling="linear", initial=1))
        application.record(image.acquire)
        handoff = scope.enter_context(gi.vulkan.share_handoff(vk, device, allow=("binary", "bridged")))
        fence = vulkan.vkCreateFence(application.device, vulkan.VkFenceCreateInfo(), None)
        scope.callback(vulkan.vkDestroyFence, application.device, fence, None)
        handles = {
            "VkInstance": application.instance,
            "VkPhysicalDevice": application.physical_device,
            "VkDevice": application.device,
            "VkQueue": application.queue,
            "VkCommandPool": application.pool,
            "VkCommandBuffer": application.record(lambda _: None),
            "VkDeviceMemory": buffer.vulkan_object.memory,
            "VkBuffer": buffer.vulkan_object.handle,
            "VkImage": image.vulkan_object.handle,
            "VkSemaphore": handoff._vk_to_compute.vulkan_object.handle,
            "VkFence": fence,
        }
        for argument, kind, call in entries(application, handles, [buffer, image], handoff):
            for given, thing in wrong(application, kind, handles):
                with pytest.raises(gi.InvalidArgumentError) as caught:
                    call(thing)
                case = f"{argument}: {kind} from {given}: {caught.value}"
                negative = given in ("-1", str(1 << 64), "int -1")
                assert caught.value.argument == argument, case
                assert negative != isinstance(caught.value, gi.ArgumentTypeError), case
                if given.startswith("Vk"):
                    assert re.search(rf"(?<!\w){kind}(?![\w*])", str(caught.value)), case
                    assert given in str(caught.value), case


def test_a_program_without_pypis_vulkan(driver: str) -> None:
    """The types are our own, and the handles ints. The program compares each byte."""
    code = """
        import sys
        sys.modules["vulkan"] = None
        import numpy as np
        import gpuinterop as gi
        from gpuinterop.testing.exporters.base import Fill
        from gpuinterop.testing.exporters.vulkan import VulkanExporter
        with VulkanExporter(sys.argv[1]) as exporter:
            vk, device = exporter.vk, gi.match_device(exporter.identity)
            with gi.vulkan.share_buffer(vk, device, 4096) as shared, exporter.create_memory(4096) as memory:
                assert type(shared.vk_buffer) is int
                memory.write(0, bytes(range(256)) * 16)
                exporter.submit(fill=[Fill(memory=memory, offset=0, size=4, word=0x01010101)]).done(300)
                with device.import_memory(memory.export(), size=memory.size) as theirs:
                    theirs.map_buffer().copy_to_host(found := np.empty(4096, np.uint8))
            print((found[:4] == 1).all() and (found[4:] == np.arange(4, 4096) % 256).all())
        """
    assert printed("-c", textwrap.dedent(code), driver) == "True\n"


def test_what_does_not_tell_its_kind_is_taken(application: Application) -> None:
    """Ints, ctypes values, and the handles of another cffi, whether or not its types have Vulkan's names."""
    import cffi

    vulkan, vk = application.api, application.vk
    plain, named = cffi.FFI(), cffi.FFI()
    plain.cdef("typedef void *VkInstance; typedef uint64_t VkSemaphore;")
    named.cdef("typedef struct VkPhysicalDevice_T *VkPhysicalDevice; typedef struct VkDevice_T *VkDevice;")
    wanted = gi.vulkan.identity(application.physical_device)
    number = vk.api.address(application.physical_device)
    theirs: Any = named.cast("VkPhysicalDevice", number)
    for handle in (number, c_void_p(number), theirs, plain.cast("void *", number), plain.cast("uint64_t", number)):
        assert gi.vulkan.identity(handle) == wanted
    gi.vulkan.VulkanContext(
        plain.cast("VkInstance", vk.api.address(application.instance)),
        theirs,
        named.cast("VkDevice", vk.api.address(application.device)),
        get_instance_proc_addr=vk.api.address(vulkan.lib.vkGetInstanceProcAddr),
    ).close()
    with pytest.raises(gi.ArgumentTypeError, match="VkInstance, got a VkPhysicalDevice"):
        gi.vulkan.VulkanContext(theirs, theirs, application.device)


def test_handles_come_back_in_the_form_of_those_given(application: Application, device: gi.Device) -> None:
    ffi, vk = application.api.ffi, application.vk
    with (
        gi.vulkan.share_buffer(vk, device, 4096) as buffer,
        gi.vulkan.share_image(vk, device, (8, 8), "R8_UNORM", tiling="linear") as image,
        gi.vulkan.share_handoff(vk, device, allow=("timeline", "binary", "bridged")) as handoff,
    ):
        handles = {
            "VkBuffer": buffer.vk_buffer,
            "VkDeviceMemory": image.vk_memory,
            "VkImage": image.vk_image,
            "VkSemaphore": handoff.vulkan_submit()["signal_semaphores"][0],
        }
    for kind, handle in handles.items():
        assert type(handle) is int if application.raw else ffi.typeof(handle) == ffi.typeof(kind)
