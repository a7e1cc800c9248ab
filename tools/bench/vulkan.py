"""Measure frames: Vulkan submits; the compute side waits, works and signals; Vulkan waits for that signal."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import gpuinterop as gi
from gpuinterop.vulkan import _api as c
from gpuinterop.vulkan._device import Instance, VulkanDevice

from .by_hand import in_c
from .calls import IN_C, PATIENCE_S
from .clock import OURS, Action, Calls, Figure, Values, nothing
from .device import Bench

MODES: Final = ("timeline", "binary", "bridged")
NBYTES: Final = 1 << 20
_DRAWS: Final = c.QUEUE_GRAPHICS | c.QUEUE_COMPUTE
_AT_ONCE: Final = 0x4  # VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT


def on_queue(bench: Bench, name: str, wanted: int) -> Iterator[Figure]:
    """Frames on a queue of a family that supports `wanted`, and otherwise neither drawing nor computing."""
    driver = bench.vulkan
    with ExitStack() as scope:
        instance = scope.enter_context(Instance())
        physical = instance.physical_devices()[driver.index]
        kinds = [flags & (wanted | _DRAWS) for flags, _ in physical.queue_families]
        if wanted not in kinds:
            raise gi.DeviceNotFoundError(f"expected {driver.name} to have a {name}, got none")
        frames = Frames(bench, scope, VulkanDevice(instance, physical, kinds.index(wanted)))
        where = f"{name}, bridged" if frames.handoff.mode == "bridged" else name
        yield frames.without_work(f"submit + acquire + release, {where}", 20, until_done=False)
        yield frames.without_work(f"frame, queued ahead, {where}, no work", 200, until_done=True)
        yield frames.each(f"frame, wait_host each, {where}, 1 MiB")


class Frames:
    """Frames on a queue, by several means."""

    def __init__(self, bench: Bench, scope: ExitStack, device: VulkanDevice) -> None:
        self.bench, self._scope = bench, scope
        scope.callback(device.close)
        self.vk = vk = scope.enter_context(device.vk)
        scope.callback(lambda: vk.functions.vkDeviceWaitIdle(vk.device))
        self.stream = scope.enter_context(bench.device.create_stream())
        self.buffer = scope.enter_context(gi.vulkan.share_buffer(vk, bench.device, NBYTES))
        self.commands = self._record()
        self.handoff = scope.enter_context(gi.vulkan.share_handoff(vk, bench.device, allow=MODES))
        self.by_hand = None
        if bench.by_hand is not None and self.handoff.mode == "timeline":
            self.by_hand = FramesByHand(bench, scope, vk)

    def _record(self) -> Any:
        """Record a frame's work in Vulkan."""
        vk, api = self.vk, self.vk.api
        info = api.new("VkCommandPoolCreateInfo", queueFamilyIndex=vk.queue_family_index)
        pool = vk._create("vkCreateCommandPool", "VkCommandPool", info)
        self._scope.callback(vk._destroy, "vkDestroyCommandPool", pool)
        info = api.new("VkCommandBufferAllocateInfo", commandPool=pool, commandBufferCount=1)
        out = api.ffi.new("VkCommandBuffer *")
        vk._call("vkAllocateCommandBuffers", vk.device, info, out)
        vk._call("vkBeginCommandBuffer", out[0], api.new("VkCommandBufferBeginInfo", flags=_AT_ONCE))
        self.buffer.acquire(out[0])
        vk.functions.vkCmdFillBuffer(out[0], self.buffer.vulkan_object.handle, 0, NBYTES, 0x01010101)
        self.buffer.release(out[0])
        vk._call("vkEndCommandBuffer", out[0])
        return out[0]

    def run(self, count: int, commands: Sequence[Any] = ()) -> None:
        """Run frames as an application writes them; with commands, the compute side works too."""
        handoff, stream, queue = self.handoff, self.stream, self.vk.queue
        for _ in range(count):
            handoff.submit(queue, commands)
            handoff.acquire(stream)
            if commands:
                self.buffer.fill(7, stream=stream)
            handoff.release(stream)

    def _settle(self) -> None:
        self.stream.synchronize()
        if self.by_hand is not None:
            self.by_hand.timeline.synchronize()
        self.vk.functions.vkQueueWaitIdle(self.vk.queue)

    def without_work(self, name: str, count: int, *, until_done: bool) -> Figure:
        """Time the calls of frames without work; or with `until_done`, of frames that are queued ahead, and their end.

        The calls run in more rounds, because only a few frames fit into a queue.
        """
        comparison, by_hand = self.bench.compare(30 if until_done else 300), self.by_hand

        def add(contender: str, run: Calls, finish: Action = nothing) -> None:
            calls: Calls = (lambda count: (run(count), finish())) if until_done else run
            comparison.add_calls(contender, {"": calls}, count, self._settle, finish)

        add(OURS, self.run, partial(self.handoff.wait_host, PATIENCE_S))
        if by_hand is not None:
            add("by hand, prepared structs", by_hand.run, by_hand.finish)
            with comparison.noting(IN_C):
                add(IN_C, by_hand.in_c(), by_hand.finish)
        if not until_done:
            info, null = self.vk.api.new("VkSubmitInfo"), self.vk.api.ffi.NULL
            submit = partial(self.vk.functions.vkQueueSubmit, self.vk.queue, 1, info, null)
            c.check("vkQueueSubmit", submit())
            add("only vkQueueSubmit", lambda count: [submit() for _ in range(count)])
        return comparison.measure().figure(name, "frame")

    def each(self, name: str) -> Figure:
        """Time frames that change 1 MiB on both sides, when the host waits for each."""
        comparison, commands = self.bench.compare(600), [self.commands]
        theirs = self._scope.enter_context(self.bench.graphics.create_memory(NBYTES))
        buffer = self._scope.enter_context(self.bench.device.allocate(NBYTES)).buffer
        pages = mmap.mmap(-1, NBYTES)  # the memory that NumPy allocates for this size

        def ours(count: int) -> None:
            self.run(count, commands)
            self.handoff.wait_host(PATIENCE_S)

        def staged(_: int) -> None:
            pages[:] = theirs.read(0, NBYTES)
            buffer.copy_from_host(pages)
            buffer.fill(7)
            buffer.copy_to_host(pages)
            theirs.write(0, pages[:])

        view = self.buffer.view(NBYTES, "uint8")
        comparison.add_calls(OURS, {"": ours}, 1, self._settle, lambda: _filled(bytes(view.to_numpy())))
        comparison.add_calls(
            "copies through the host", {"": staged}, 1, self._settle, lambda: _filled(theirs.read(0, NBYTES))
        )
        return comparison.measure().figure(name, "frame")


def _filled(contents: bytes) -> None:
    if contents != b"\7" * NBYTES:
        raise ValueError(f"expected {NBYTES} bytes of 7, got {contents[:8]!r}...")


class FramesByHand:
    """The same frames, without work, through the vendor's bindings and in C, with structs that are made once."""

    def __init__(self, bench: Bench, scope: ExitStack, vk: Any) -> None:
        api, self._vk, self._values = vk.api, vk, Values(1)
        # Only the pair's Vulkan half is used.
        shared = scope.enter_context(gi.vulkan.share_semaphore(vk, bench.device, gi.Timeline))
        self._semaphore = semaphore = shared.vulkan_object.handle
        info = api.new("VkSemaphoreGetFdInfoKHR", semaphore=semaphore, handleType=c.SEMAPHORE_HANDLE_OPAQUE_FD)
        fd = api.ffi.new("int *")
        vk._call("vkGetSemaphoreFdKHR", vk.device, info, fd)
        self.timeline = bench.by_hand.timeline(int(fd[0]))
        self._waits, self._signals = api.ffi.new("uint64_t[1]"), api.ffi.new("uint64_t[1]")
        self._semaphores = api.array("VkSemaphore", [semaphore])
        waits = {"waitSemaphoreValueCount": 1, "pWaitSemaphoreValues": self._waits}
        signals = {"signalSemaphoreValueCount": 1, "pSignalSemaphoreValues": self._signals}
        fields = {
            "pNext": api.new("VkTimelineSemaphoreSubmitInfo", **waits, **signals),
            "waitSemaphoreCount": 1,
            "pWaitSemaphores": self._semaphores,
            "pWaitDstStageMask": api.array("VkPipelineStageFlags", [c.STAGE_ALL_COMMANDS]),
            "signalSemaphoreCount": 1,
            "pSignalSemaphores": self._semaphores,
        }
        self._info = api.new("VkSubmitInfo", **fields)

    def _take(self, count: int) -> int:
        """Take the values of frames; return the one that the first frame waits for: the last signal before it."""
        return self._values.take(count, 2).start - 2

    def run(self, count: int) -> None:
        submit, wait, signal = self._vk.functions.vkQueueSubmit, self.timeline.wait, self.timeline.signal
        queue, info, fence = self._vk.queue, self._info, self._vk.api.ffi.NULL
        first = self._take(count)
        for value in range(first, first + 2 * count, 2):
            self._waits[0], self._signals[0] = value, value + 1
            submit(queue, 1, info, fence)
            wait(value + 1)
            signal(value + 2)

    def finish(self) -> None:
        """Wait until the last frame's work is done."""
        out, limit = self._vk.api.ffi.new("uint64_t *"), time.monotonic() + PATIENCE_S
        while out[0] < self._values.last:
            self._vk.functions.vkGetSemaphoreCounterValue(self._vk.device, self._semaphore, out)
            if time.monotonic() > limit:
                raise gi.SemaphoreTimeoutError(
                    f"expected the frames by hand to reach {self._values.last}, got {out[0]}."
                )

    def in_c(self) -> Calls:
        """The same as `run`, in C."""
        vk, cast = self._vk, partial(self._vk.api.ffi.cast, "uintptr_t")
        pointers = vk.functions.vkQueueSubmit, vk.queue, self._info, self._waits, self._signals
        graphics = [int(cast(pointer)) for pointer in pointers]
        frames = in_c("frames", graphics, self.timeline.in_c(signal=False), self.timeline.in_c(signal=True))
        return lambda count: frames(self._take(count), count)


PARTS: Final = {
    "frames on a transfer queue": partial(on_queue, name="transfer queue", wanted=c.QUEUE_TRANSFER),
    "frames on a compute queue": partial(on_queue, name="compute queue", wanted=_DRAWS),
}
