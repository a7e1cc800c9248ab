"""Measure frames: Vulkan submits; the compute side waits, works and signals; Vulkan waits for that signal."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ...capabilities import Operation
from ...errors import DeviceNotFoundError, SemaphoreTimeoutError
from ...handles import Timeline
from ...vulkan import _api as c
from ...vulkan._api import check
from ...vulkan._buffer import share_buffer
from ...vulkan._device import Instance, VulkanDevice
from ...vulkan._handoff import share_handoff
from ...vulkan._semaphore import share_semaphore
from .calls import IN_C, done
from .clock import OURS, Contender, Figure, Values, in_turns
from .floor import Compute, Graphics, Launch, Node

if TYPE_CHECKING:
    from .rig import Bench

PREPARED: Final = "by hand, prepared structs"
BARE: Final = "only vkQueueSubmit"
GRAPH, GRAPH_IN_C = "gpuinterop, a captured graph", "C, a captured graph"
STAGED: Final = "copies through the host"
MODES: Final = ("timeline", "binary", "bridged")
AHEAD: Final = 200
"""Frames that are queued ahead."""
SIZES: Final = {"no work": 0, "1 MiB": 1 << 20}
PATIENCE_S: Final = 300
"""Longest time for frames to finish."""
_AT_ONCE: Final = 0x4  # VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT


def on_transfer_queue(bench: Bench) -> Iterator[Figure]:
    """Frames on a transfer-only queue family."""
    return _on_queue(bench, "transfer queue", c.QUEUE_TRANSFER)


def on_compute_queue(bench: Bench) -> Iterator[Figure]:
    """Frames on a queue family that draws and computes."""
    return _on_queue(bench, "compute queue", c.QUEUE_GRAPHICS | c.QUEUE_COMPUTE)


def _on_queue(bench: Bench, name: str, wanted: int) -> Iterator[Figure]:
    driver = bench.need_vulkan()
    with ExitStack() as scope:
        instance = scope.enter_context(Instance())
        physical = instance.physical_devices()[driver.index]
        kinds = [flags & (wanted | c.QUEUE_GRAPHICS | c.QUEUE_COMPUTE) for flags, _ in physical.queue_families]
        if wanted not in kinds:
            flags = ", ".join(f"{flags:#x}" for flags, _ in physical.queue_families)
            raise DeviceNotFoundError(
                f"expected {driver.name} to have a {name}, got queue families with flags {flags}."
            )
        rig = _Rig(bench, scope, VulkanDevice(instance, physical, kinds.index(wanted)))
        for what, nbytes in SIZES.items():
            frames = _Frames(rig, scope, nbytes)
            where = f"{name}, bridged" if frames.handoff.mode == "bridged" else name
            if not nbytes:
                yield frames.calls(f"submit + acquire + release, {where}")
            yield frames.ahead(f"frame, queued ahead, {where}, {what}")
            yield frames.each(f"frame, wait_host each, {where}, {what}")


class _Rig:
    """A VkDevice with a queue, a stream, and the memory and semaphores they share."""

    def __init__(self, bench: Bench, scope: ExitStack, device: VulkanDevice) -> None:
        self.bench = bench
        scope.callback(device.close)
        self.vk = vk = scope.enter_context(device.vk)
        self.api, self.queue = vk.api, vk.queue
        scope.callback(lambda: vk.functions.vkDeviceWaitIdle(vk.device))
        self.stream = scope.enter_context(bench.device.create_stream())
        info = self.api.new("VkCommandPoolCreateInfo", queueFamilyIndex=vk.queue_family_index)
        self.pool = vk._create("vkCreateCommandPool", "VkCommandPool", info)
        scope.callback(vk._destroy, "vkDestroyCommandPool", self.pool)
        self.buffer = scope.enter_context(share_buffer(vk, bench.device, max(SIZES.values())))

    def commands(self, nbytes: int) -> list[Any]:
        """Record a frame's work in Vulkan: fill `nbytes` bytes."""
        if not nbytes:
            return []
        api, vk = self.api, self.vk
        info = api.new("VkCommandBufferAllocateInfo", commandPool=self.pool, commandBufferCount=1)
        out = api.ffi.new("VkCommandBuffer *")
        vk._call("vkAllocateCommandBuffers", vk.device, info, out)
        vk._call("vkBeginCommandBuffer", out[0], api.new("VkCommandBufferBeginInfo", flags=_AT_ONCE))
        self.buffer.acquire(out[0])
        vk.functions.vkCmdFillBuffer(out[0], self.buffer.vulkan_object.handle, 0, nbytes, 0x01010101)
        self.buffer.release(out[0])
        vk._call("vkEndCommandBuffer", out[0])
        return [out[0]]

    def fill(self, nbytes: int) -> None:
        """Enqueue a frame's work on the compute side."""
        if nbytes:
            self.buffer.fill(7, size=nbytes, stream=self.stream)


class _Frames:
    """Frames with `nbytes` of work, by several means."""

    def __init__(self, rig: _Rig, scope: ExitStack, nbytes: int) -> None:
        self.rig, self.bench, self.nbytes = rig, rig.bench, nbytes
        self.commands = rig.commands(nbytes)
        self.handoff = scope.enter_context(share_handoff(rig.vk, rig.bench.device, allow=MODES))
        self._scope = scope
        self.by_hand: _ByHand | None = None
        self.graph: Contender | None = None
        if self.bench.by_hand is not None and self.handoff.mode == "timeline":
            if not nbytes:
                self.by_hand = _ByHand(rig, scope, self.commands)
            if self.bench.device.capabilities.supports(Operation.GRAPH_CAPTURE):
                self.graph = self._captured(scope)

    def frames(self, count: int) -> None:
        """Run frames as an application writes them."""
        handoff, stream, queue, commands = self.handoff, self.rig.stream, self.rig.queue, self.commands
        for _ in range(count):
            handoff.submit(queue, commands)
            handoff.acquire(stream)
            self.rig.fill(self.nbytes)
            handoff.release(stream)

    def _captured(self, scope: ExitStack) -> Contender:
        """Run frames whose compute side is a graph, captured once."""
        stream = self.rig.stream
        timeline = scope.enter_context(share_semaphore(self.rig.vk, self.bench.device, Timeline))
        with stream.capture() as graph:
            timeline.semaphore.wait(stream, 1)
            self.rig.fill(self.nbytes)
            timeline.semaphore.signal(stream, 2)
        scope.enter_context(graph)
        submission = _Submission(self.rig, timeline.vulkan_object.handle, self.commands)
        values, semaphores = Values(), graph.semaphores

        def frames(count: int) -> None:
            for value in values.take(count, 2):
                submission.submit(value - 1, value)
                graph.launch(stream)
                semaphores.advance(2)
            stream.synchronize()

        return frames

    def calls(self, name: str) -> Figure:
        """Time the calls of a frame, without its work."""
        contenders: dict[str, Contender] = {OURS: self.frames}
        if self.by_hand is not None:
            contenders[PREPARED] = self.by_hand.frames
        contenders[BARE] = _Submission(self.rig, None, ()).checked().submits
        times = in_turns(contenders, calls=20, rounds=self.bench.rounds(300), settle=self._settle)
        return Figure(name, "frame", times)

    def ahead(self, name: str) -> Figure:
        """Time frames that are queued ahead, until the last one's work is done."""

        def ours(count: int) -> None:
            self.frames(count)
            self.handoff.wait_host(PATIENCE_S)

        contenders: dict[str, Contender] = {OURS: ours}
        if self.graph is not None:
            contenders[GRAPH] = self.graph
        if self.by_hand is not None:
            contenders[PREPARED] = self.by_hand.ahead
            if self.bench.in_c:
                contenders[IN_C] = self.by_hand.in_c
                if self.graph is not None:
                    contenders[GRAPH_IN_C] = self.by_hand.graph()
        times = in_turns(contenders, calls=AHEAD, rounds=self.bench.rounds(30), settle=self._settle)
        return Figure(name, "frame", times)

    def each(self, name: str) -> Figure:
        """Time frames when the host waits for each."""

        def ours(count: int) -> None:
            for _ in range(count):
                self.frames(1)
                self.handoff.wait_host(PATIENCE_S)

        contenders: dict[str, Contender] = {OURS: ours}
        if self.by_hand is not None and self.bench.in_c:
            contenders["C, polling"] = self.by_hand.in_c
        if self.nbytes:
            contenders[STAGED] = self._staged()
        times = in_turns(contenders, calls=1, rounds=self.bench.rounds(600), settle=self._settle)
        return Figure(name, "frame", times, judged_by="p99")

    def _staged(self) -> Contender:
        """Copy the same bytes without sharing: Vulkan and the compute side each copy, and the host waits for each."""
        theirs = self._scope.enter_context(self.bench.graphics.create_memory(self.nbytes))
        buffer = self._scope.enter_context(self.bench.device.allocate(self.nbytes)).buffer
        pages = mmap.mmap(-1, self.nbytes)  # the memory that NumPy allocates for this size

        def frames(count: int) -> None:
            for _ in range(count):
                pages[:] = theirs.read(0, self.nbytes)
                buffer.copy_from_host(pages)
                buffer.fill(7)
                buffer.copy_to_host(pages)
                theirs.write(0, pages[:])

        return frames

    def _settle(self) -> None:
        self.rig.stream.synchronize()
        if self.by_hand is not None:
            self.bench.by_hand.synchronize(self.by_hand.stream)
        self.rig.vk.functions.vkQueueWaitIdle(self.rig.queue)


class _Submission:
    """``vkQueueSubmit`` with structs that are made once; without semaphores it submits only the commands."""

    def __init__(self, rig: _Rig, semaphore: Any, commands: Sequence[Any]) -> None:
        api = rig.api
        self.waits, self.signals = api.ffi.new("uint64_t[1]"), api.ffi.new("uint64_t[1]")
        fields: dict[str, Any] = {}
        if semaphore is not None:
            values = api.new(
                "VkTimelineSemaphoreSubmitInfo",
                waitSemaphoreValueCount=1,
                pWaitSemaphoreValues=self.waits,
                signalSemaphoreValueCount=1,
                pSignalSemaphoreValues=self.signals,
            )
            semaphores = api.array("VkSemaphore", [semaphore])
            fields = {
                "pNext": values,
                "waitSemaphoreCount": 1,
                "pWaitSemaphores": semaphores,
                "pWaitDstStageMask": api.array("VkPipelineStageFlags", [c.STAGE_ALL_COMMANDS]),
                "signalSemaphoreCount": 1,
                "pSignalSemaphores": semaphores,
            }
        buffers = api.array("VkCommandBuffer", commands)
        self.info = api.new("VkSubmitInfo", commandBufferCount=len(commands), pCommandBuffers=buffers, **fields)
        self._call, self._queue, self._fence = rig.vk.functions.vkQueueSubmit, rig.queue, api.ffi.NULL

    def checked(self) -> _Submission:
        """Submit once and check that it worked: a failed call is fast. Returns self."""
        check("vkQueueSubmit", self._call(self._queue, 1, self.info, self._fence))
        return self

    def submit(self, wait: int, signal: int) -> None:
        self.waits[0] = wait
        self.signals[0] = signal
        self._call(self._queue, 1, self.info, self._fence)

    def submits(self, count: int) -> None:
        """Submit `count` times."""
        for _ in range(count):
            self._call(self._queue, 1, self.info, self._fence)


class _ByHand:
    """Frames through the backend's yardstick, and in C."""

    def __init__(self, rig: _Rig, scope: ExitStack, commands: Sequence[Any]) -> None:
        bench, api, vk = rig.bench, rig.api, rig.vk
        self.stream, self._floor = bench.by_hand.stream(), bench.in_c
        # Only the pair's Vulkan half is used.
        self._shared = scope.enter_context(share_semaphore(vk, bench.device, Timeline))
        semaphore = self._shared.vulkan_object.handle
        info = api.new("VkSemaphoreGetFdInfoKHR", semaphore=semaphore, handleType=c.SEMAPHORE_HANDLE_OPAQUE_FD)
        fd = api.ffi.new("int *")
        vk._call("vkGetSemaphoreFdKHR", vk.device, info, fd)
        self._timelines = bench.by_hand.timelines([int(fd[0])], self.stream)
        self._submission = _Submission(rig, semaphore, commands)
        self._values = Values(self._timelines.signalled)
        self._counter = partial(vk.functions.vkGetSemaphoreCounterValue, vk.device, semaphore)
        self._out = api.ffi.new("uint64_t *")
        self._graphics = Graphics(
            *(
                int(api.ffi.cast("uintptr_t", one))
                for one in (
                    vk.functions.vkQueueSubmit,
                    rig.queue,
                    self._submission.info,
                    self._submission.waits,
                    self._submission.signals,
                    vk.functions.vkGetSemaphoreCounterValue,
                    vk.device,
                    semaphore,
                )
            )
        )
        self._wait, self._signal = (Compute(*self._timelines.addresses(signal=signals)) for signals in (False, True))

    def _take(self, count: int) -> range:
        """The value that each frame waits for: the last signal of the frame before."""
        first, *_ = taken = self._values.take(count, 2)
        return range(first - 1, first - 1 + 2 * len(taken), 2)

    def frames(self, count: int) -> None:
        """Run frames through the vendor's bindings."""
        submit, wait, signal = self._submission.submit, self._timelines.wait, self._timelines.signal
        for value in self._take(count):
            submit(value, value + 1)
            wait(value + 1)
            signal(value + 2)
            self._last = value + 2

    def ahead(self, count: int) -> None:
        """Run them until the last one's work is done."""
        self.frames(count)
        limit = time.monotonic() + PATIENCE_S
        while self._out[0] < self._last:
            self._counter(self._out)
            if time.monotonic() > limit:
                raise SemaphoreTimeoutError(
                    f"expected the frames by hand to reach {self._last} in {PATIENCE_S} s, got {self._out[0]}."
                )

    def in_c(self, count: int) -> None:
        """Run frames in C until the last one's work is done."""
        first = self._take(count).start
        done(self._floor.frames(self._graphics, self._wait, self._signal, first, count))

    def graph(self) -> Contender:
        """Run frames in C whose compute side is a graph."""
        graph = self._timelines.graph()
        wait, signal, launch = Node(*graph.wait), Node(*graph.signal), Launch(*graph.launch)

        def run(count: int, graph: Any = graph) -> None:  # `graph` keeps alive what the addresses point to
            done(self._floor.launches(self._graphics, wait, signal, launch, self._take(count).start, count))

        return run


PARTS: Final = {
    "frames on a transfer queue": on_transfer_queue,
    "frames on a compute queue": on_compute_queue,
}
