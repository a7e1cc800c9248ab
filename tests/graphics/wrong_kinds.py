"""A program: every public entry of gpuinterop.vulkan that takes a Vulkan handle, given every other kind of object.

    python wrong_kinds.py DRIVER HANDLES FIRST

HANDLES says what the context is given: "typed", PyPI vulkan's handles, or "raw", ints. From case FIRST on the program
prints what it is about to do and what came of it, as JSON. It ends behind a case that was not refused: what the driver
has made of that is not known. Drivers crash over such cases, so a test starts it again there.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import gpuinterop as gi
from gpuinterop.handles import Binary

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application, match
else:
    from vulkan_application import Application, match

HANDLES: Final = ("Any", "Sequence[Any]", "VulkanContext | Any")
"""Annotations of parameters that take handles."""
INTERNAL: Final = tuple(f"VulkanContext.{name}." for name in ("address", "call", "create", "destroy"))
"""The package's own, in spite of their names: no user has anything to call them with."""
HANG_S: Final = 20


def parameters() -> set[str]:
    """Every public parameter that takes a handle, as ``name.parameter``."""
    found = set()
    for name in gi.vulkan.__all__:
        thing = getattr(gi.vulkan, name)
        calls = {name: thing}
        if inspect.isclass(thing):  # what share_* and import_* return is not made by users
            own = not name.startswith(("Shared", "Imported"))
            calls = {name: thing.__init__} if own else {}
            calls |= {f"{name}.{key}": value for key, value in inspect.getmembers(thing, inspect.isfunction)
                      if not key.startswith("_")}  # fmt: skip
        for call, function in calls.items():
            for parameter in inspect.signature(function).parameters.values():
                if parameter.annotation in HANDLES:
                    found.add(f"{call}.{parameter.name}")
    return {parameter for parameter in found if not parameter.startswith(INTERNAL)}


KINDS: Final = {
    "instance": "VkInstance",
    "physical_device": "VkPhysicalDevice",
    "device": "VkDevice",
    "queue": "VkQueue",
    "get_instance_proc_addr": "PFN_vkGetInstanceProcAddr",
}


def give(call: Callable[..., object], right: dict[str, Any], argument: str, thing: Any) -> object:
    """Call with the right arguments, but for one."""
    return call(**right | {argument: thing})


class Objects:
    """One real object of each kind, and what takes them."""

    def __init__(self, driver: str, *, raw: bool) -> None:
        self.application = application = Application(driver, raw=raw)
        vulkan, self.vk = application.api, application.vk
        device = match(self.vk)
        self.semaphore = vulkan.vkCreateSemaphore(application.device, vulkan.VkSemaphoreCreateInfo(), None)
        self.fence = vulkan.vkCreateFence(application.device, vulkan.VkFenceCreateInfo(), None)
        self.buffer = gi.vulkan.share_buffer(self.vk, device, 4096)
        self.image = gi.vulkan.share_image(self.vk, device, (8, 8), "R8_UNORM", tiling="linear", initial=1)
        self.application.record(self.image.acquire)
        self.allocation = device.allocate(8192)
        self.imported = gi.vulkan.import_array(self.vk, self.allocation.buffer.view(8192))
        self.handoff = gi.vulkan.share_handoff(self.vk, device, allow=("binary", "bridged"))
        self.handles = {
            "VkInstance": application.instance,
            "VkPhysicalDevice": application.physical_device,
            "VkDevice": application.device,
            "VkQueue": application.queue,
            "VkCommandPool": application.pool,
            "VkCommandBuffer": application.record(lambda _: None),
            "VkDeviceMemory": self.buffer.vulkan_object.memory,
            "VkBuffer": self.buffer.vulkan_object.handle,
            "VkImage": self.image.vulkan_object.handle,
            "VkSemaphore": self.semaphore,
            "VkFence": self.fence,
        }

    def entries(self) -> Iterator[tuple[str, str, Callable[[Any], object]]]:
        """Parameter, the kind that it takes, and the call."""
        g: Any = gi.vulkan
        a, vk = self.application, self.vk
        right = {"instance": a.instance, "physical_device": a.physical_device}
        for name in ("identity", "capabilities", "required_extensions", "VulkanContext"):
            if name == "VulkanContext":
                right = right | {"device": a.device, "queue": a.queue}
            for argument in (*right, "get_instance_proc_addr"):
                kind = KINDS[argument]
                yield f"{name}.{argument}", kind, partial(give, getattr(g, name), right, argument)
        memory = {"size": self.buffer.allocation_size, "dedicated": self.buffer.dedicated}
        yield "export_memory.vk_memory", "VkDeviceMemory", lambda it: g.export_memory(vk, it, **memory)
        yield "export_semaphore.vk_semaphore", "VkSemaphore", lambda it: g.export_semaphore(vk, it, Binary)
        yield "TimelineEndpoint.vk_semaphore", "VkSemaphore", lambda it: g.TimelineEndpoint(vk, it).counter()
        for shared in (self.buffer, self.image, self.imported):
            for method in ("release", "acquire"):
                yield f"{type(shared).__name__}.{method}.cmd", "VkCommandBuffer", getattr(shared, method)
        submit = self.handoff.submit
        yield "SharedHandoff.submit.queue", "VkQueue", lambda it: submit(queue=it)
        yield "SharedHandoff.submit.command_buffers", "VkCommandBuffer", lambda it: submit(command_buffers=[it])
        yield "SharedHandoff.submit.fence", "VkFence", lambda it: submit(fence=it)

    def wrong(self, kind: str) -> Iterator[tuple[str, Any]]:
        """What is no `kind`, by name."""
        vulkan = self.application.api
        ffi = vulkan.ffi
        yield from ((name, handle) for name, handle in self.handles.items() if name != kind)
        yield f"{kind} *", ffi.new(f"{kind} *")
        yield "VkBufferCreateInfo", vulkan.VkBufferCreateInfo()
        yield "VkBufferCreateInfo *", ffi.new("VkBufferCreateInfo *")
        if not kind.startswith("PFN"):
            yield "PFN_vkGetInstanceProcAddr", vulkan.lib.vkGetInstanceProcAddr
        yield "PFN_vkGetDeviceProcAddr", vulkan.lib.vkGetDeviceProcAddr
        yield "char[4096]", ffi.new("char[4096]")
        yield "int *", ffi.new("int *")
        yield "double", ffi.cast("double", 1.5)
        yield "_Bool", ffi.cast("_Bool", 1)
        yield "int -1", ffi.cast("int", -1)
        yield "str", "handle"
        yield "bytes", b"handle"
        yield "float", 1.5
        yield "bool", True
        yield "-1", -1
        yield "2**64", 1 << 64
        yield "object", object()

    def close(self) -> None:
        vulkan, device = self.application.api, self.application.device
        for thing in (self.handoff, self.imported, self.allocation, self.image, self.buffer):
            thing.close()
        vulkan.vkDestroyFence(device, self.fence, None)
        vulkan.vkDestroySemaphore(device, self.semaphore, None)
        self.application.close()


def main(driver: str, handles: str, first: int) -> None:
    objects = Objects(driver, raw=handles == "raw")
    entries = list(objects.entries())
    say(missing=sorted(parameters() ^ {parameter for parameter, _, _ in entries}))
    cases = [(*entry, name, thing) for entry in entries for name, thing in objects.wrong(entry[1])]
    for parameter, kind, call, name, thing in cases[first:]:
        say(parameter=parameter, kind=kind, given=name)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            call(thing)
        except BaseException as error:
            argument = getattr(error, "argument", "")
            ours = isinstance(error, gi.GpuInteropError)
            say(error=type(error).__name__, ours=ours, argument=argument, text=str(error))
            if not ours:
                return
        else:
            say(error="")
            return
        finally:
            faulthandler.cancel_dump_traceback_later()
    objects.close()
    say(ended=True)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
