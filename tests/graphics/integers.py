"""A program: a renderer with a binding of its own, ctypes on the loader, shares all that gpuinterop.vulkan offers.

    python integers.py DRIVER

PyPI's vulkan cannot be imported here, and every handle is an int. The program prints what it has shared, as JSON.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from ctypes import CDLL, addressof, c_uint64, create_string_buffer, string_at
from typing import Any

import numpy as np

import gpuinterop as gi
from gpuinterop.handles import Binary

sys.modules["vulkan"] = None  # type: ignore[assignment] # an import of it raises

WORD = 0x01010101
WHOLE = 1, 0, 1, 0, 1  # the colour of the first level and layer
GENERAL, IGNORED = 1, 0xFFFFFFFF

loader = CDLL("libvulkan.so.1")
kept: list[object] = []


def made(members: str, *values: Any) -> int:
    """The address of a C struct or array that never goes."""
    kept.append(memory := create_string_buffer(struct.pack(f"@{members}0P", *values)))
    return addressof(memory)


def strings(names: Iterable[str]) -> int:
    texts = [made(f"{len(name) + 1}s", name.encode()) for name in names]
    return made(f"{len(texts)}P", *texts)


def call(name: str, *arguments: int) -> None:
    code = getattr(loader, name)(*map(c_uint64, arguments))
    if not name.startswith(("vkCmd", "vkDestroy", "vkGet")):  # which return nothing
        assert code == 0, (name, code)


def created(name: str, *arguments: int) -> int:
    """Call what returns a handle or another number through its last parameter."""
    out = c_uint64()
    call(name, *arguments, addressof(out))
    return out.value


class Renderer:
    """An instance, a device and a queue."""

    def __init__(self, driver: str) -> None:
        names, _ = gi.vulkan.required_extensions()
        application = made("iPPIPII", 0, 0, 0, 0, 0, 0, 1 << 22 | 2 << 12)
        info = made("iPIPIPIP", 1, 0, 0, application, 0, 0, len(names), strings(names))
        self.instance = created("vkCreateInstance", info, 0)
        count = addressof(number := c_uint64())
        call("vkEnumeratePhysicalDevices", self.instance, count, 0)
        devices = (c_uint64 * number.value)()
        call("vkEnumeratePhysicalDevices", self.instance, count, addressof(devices))
        self.physical, self.name = next(
            (device, name) for device in devices if driver in (name := self._name(device)).lower()
        )
        _, names = gi.vulkan.required_extensions(self.physical, instance=self.instance)
        queue = made("iPIIIP", 2, 0, 0, 0, 1, made("f", 1.0))
        timelines = made("iPI", 1000207000, 0, 1)
        info = made("iPIIPIPIPP", 3, timelines, 0, 1, queue, 0, 0, len(names), strings(names), 0)
        self.device = created("vkCreateDevice", self.physical, info, 0)
        self.queue = created("vkGetDeviceQueue", self.device, 0, 0)
        self.pool = created("vkCreateCommandPool", self.device, made("iPII", 39, 0, 0, 0), 0)

    @staticmethod
    def _name(device: int) -> str:
        call("vkGetPhysicalDeviceProperties", device, properties := made("1024x"))
        return string_at(properties + 20).decode()

    def record(self, work: Callable[[int], None]) -> int:
        commands = created("vkAllocateCommandBuffers", self.device, made("iPPiI", 40, 0, self.pool, 0, 1))
        call("vkBeginCommandBuffer", commands, made("iPIP", 42, 0, 4, 0))
        work(commands)
        call("vkEndCommandBuffer", commands)
        return commands

    def submit(
        self, commands: int, wait_semaphores: Sequence[int] = (), wait_values: Sequence[int] = (),
        wait_stages: Sequence[int] = (), signal_semaphores: Sequence[int] = (), signal_values: Sequence[int] = (),
    ) -> None:  # fmt: skip
        waits, signals = len(wait_semaphores), len(signal_semaphores)
        values = made(f"{waits}Q", *wait_values), made(f"{signals}Q", *signal_values)
        info = made(
            "iPIPPIPIP", 4, made("iPIPIP", 1000207003, 0, waits, values[0], signals, values[1]),
            waits, made(f"{waits}Q", *wait_semaphores), made(f"{waits}I", *wait_stages), 1, made("Q", commands),
            signals, made(f"{signals}Q", *signal_semaphores),
        )  # fmt: skip
        call("vkQueueSubmit", self.queue, 1, info, 0)

    def run(self, work: Callable[[int], None]) -> None:
        self.submit(self.record(work))
        call("vkQueueWaitIdle", self.queue)

    def close(self) -> None:
        call("vkDestroyCommandPool", self.device, self.pool, 0)
        call("vkDestroyDevice", self.device, 0)
        call("vkDestroyInstance", self.instance, 0)


def content(buffer: Any) -> Any:
    """A buffer's bytes now."""
    buffer.copy_to_host(found := np.empty(buffer.size, np.uint8))
    return found


def frames(renderer: Renderer, vk: Any, device: gi.Device, stream: gi.Stream) -> str:
    """Vulkan writes the first quarter, and copies the second, which the stream writes, into the third."""
    with gi.vulkan.share_buffer(vk, device, 4096) as shared:
        handoff = gi.vulkan.share_handoff(vk, device, allow=("timeline", "binary", "bridged"))
        for frame in range(3):

            def work(commands: int, frame: int = frame) -> None:
                if frame:
                    shared.acquire(commands)
                call("vkCmdFillBuffer", commands, shared.vk_buffer, 0, 1024, WORD * (frame + 1))
                region = made("QQQ", 1024, 2048, 1024)
                call("vkCmdCopyBuffer", commands, shared.vk_buffer, shared.vk_buffer, 1, region)
                shared.release(commands)

            if frame < 2:
                renderer.submit(renderer.record(work), **handoff.vulkan_submit())
            else:
                handoff.submit(renderer.queue, [renderer.record(work)])
            handoff.acquire(stream)
            stream.synchronize(timeout=30)
            found = content(shared)
            assert (found[:1024] == frame + 1).all()
            assert not frame or (found[2048:3072] == 100 + frame - 1).all()
            shared.buffer.fill(100 + frame, offset=1024, size=1024, stream=stream)
            handoff.release(stream)
        handoff.wait_host(timeout=30)
        call("vkQueueWaitIdle", renderer.queue)
        size, dedicated = shared.allocation_size, shared.dedicated
        handle = gi.vulkan.export_memory(vk, shared.vk_memory, size=size, dedicated=dedicated)
        with device.import_memory(handle, size=size, dedicated=dedicated) as memory:
            assert (content(memory.map_buffer(offset=0, size=shared.size)) == content(shared)).all()
        handoff.close()
        return handoff.mode


def image(renderer: Renderer, vk: Any, device: gi.Device) -> int:
    """Vulkan clears a linear image."""
    with gi.vulkan.share_image(vk, device, (60, 32), "R8G8B8A8_UNORM", tiling="linear") as shared:

        def work(commands: int) -> None:
            shared.acquire(commands)
            colour = made("4f", 1.0, 0.0, 1.0, 0.0)
            call("vkCmdClearColorImage", commands, shared.vk_image, GENERAL, colour, 1, made("5I", *WHOLE))
            shared.release(commands)

        renderer.run(work)
        assert shared.buffer is not None
        found = content(shared.buffer)
        for row in range(32):
            assert (found[row * shared.row_pitch :][:240].reshape(60, 4) == (255, 0, 255, 0)).all()
        return shared.row_pitch


def allocation(renderer: Renderer, vk: Any, device: gi.Device) -> None:
    """Vulkan fills memory that the device has allocated."""
    with device.allocate(65536) as memory, gi.vulkan.import_array(vk, memory.buffer.view(65536)) as imported:
        assert type(imported.vk_memory) is int

        def work(commands: int) -> None:
            call("vkCmdFillBuffer", commands, imported.vk_buffer, 0, imported.size, WORD * 9)
            imported.release(commands)

        renderer.run(work)
        assert (content(imported.buffer) == 9).all()


def semaphore(renderer: Renderer, vk: Any, device: gi.Device, stream: gi.Stream) -> None:
    """Vulkan's queue signals, and a stream waits."""
    with gi.vulkan.share_semaphore(vk, device, Binary) as shared:
        renderer.submit(renderer.record(lambda _: None), signal_semaphores=[shared.vk_semaphore], signal_values=[0])
        shared.semaphore.wait(stream)
        stream.synchronize(timeout=30)
        call("vkQueueWaitIdle", renderer.queue)


def bridge(renderer: Renderer, vk: Any, device: gi.Device, stream: gi.Stream) -> int:
    """A stream signals a timeline that the renderer has created."""
    timeline = made("iPIQ", 1000207002, 0, 1, 0)
    native = created("vkCreateSemaphore", renderer.device, made("iPI", 9, timeline, 0), 0)
    with gi.bridge.Bridge(device) as bridged:
        other = bridged.from_endpoint(gi.vulkan.TimelineEndpoint(vk, native))
        other.signal(stream, 5)
        stream.synchronize(timeout=30)
        other.close(timeout=30)
    value = created("vkGetSemaphoreCounterValue", renderer.device, native)
    call("vkDestroySemaphore", renderer.device, native, 0)
    return value


def main(driver: str) -> None:
    renderer = Renderer(driver.replace("lavapipe", "llvmpipe"))
    device = gi.match_device(gi.vulkan.identity(renderer.physical, instance=renderer.instance))
    binary = gi.vulkan.capabilities(renderer.physical).supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd))
    handles: Any = map(np.uint64, (renderer.instance, renderer.physical, renderer.device, renderer.queue, 0))
    context = gi.vulkan.VulkanContext(*handles)
    with context as vk, device.create_stream() as stream:
        told: dict[str, Any] = {"device": renderer.name, "handoff": frames(renderer, vk, device, stream)}
        told["row pitch"] = image(renderer, vk, device)
        allocation(renderer, vk, device)
        if binary:
            semaphore(renderer, vk, device, stream)
        told |= {"binary": binary, "timeline": bridge(renderer, vk, device, stream)}
    renderer.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
