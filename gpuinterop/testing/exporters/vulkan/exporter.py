"""Vulkan as the independent exporter: memory and semaphores on its own device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...._arguments import check_type
from ...._core.importing import check_size
from ....capabilities import Capabilities, Operation
from ....errors import (
    ArgumentTypeError,
    DriverError,
    HandleError,
    InvalidArgumentError,
    LeakedResourceWarning,
    ResourceClosedError,
)
from ....handles import AllocationHandle, Binary, DeviceIdentity, FdHandle, Timeline, VmmFd
from ....vulkan import _api as c
from ....vulkan._api import Api, check
from ....vulkan._context import VulkanContext
from ....vulkan._device import Instance, VulkanDevice
from ....vulkan._handoff import VulkanSubmit
from ....vulkan._query import BUFFER_USAGE, PhysicalDevice
from ....vulkan._semaphore import import_binary_fd
from ..base import Exporter, ExporterSemaphore, Fill, ImageParameters, Submission
from .drivers import choose
from .image import VulkanImage, image_gap
from .memory import VulkanMemory
from .semaphore import VulkanSemaphore

__all__ = ["VulkanExporter"]

_PATIENCE = 5.0
"""Seconds that a close waits for work before it gives the work the signals it waits for."""


@dataclass(eq=False)
class Pending(Submission):
    """Work on a queue, with the fence that shows its end."""

    exporter: VulkanExporter
    fence: Any
    _waits: Sequence[tuple[VulkanSemaphore, int]]
    _signals: Sequence[tuple[VulkanSemaphore, int]]
    uses: frozenset[object]
    commands: Any
    _finished: bool = False
    _waiters: int = 0

    def done(self, timeout: float = 0.0) -> bool:
        exporter = self.exporter
        with exporter._lock:
            if self._finished:
                return True
            if exporter._closed:
                raise ResourceClosedError("the Vulkan exporter was closed.")
            self._waiters += 1  # the fence is not reused while a thread waits for it
        vk = exporter.vk
        try:
            fences = vk.api.array("VkFence", [self.fence])
            nanoseconds = max(0, min(int(timeout * 1e9), 2**63))
            code = vk.functions.vkWaitForFences(vk.device, 1, fences, 1, nanoseconds)
        finally:
            with exporter._lock:
                self._waiters -= 1
        check("vkWaitForFences", code)
        if code == c.SUCCESS:
            for semaphore, value in self._signals:  # lavapipe sets a timeline a little after the fence
                if semaphore.kind is Timeline:
                    semaphore.wait(value, timeout=_PATIENCE)
            exporter._retire(self)
        return self._finished

    def close(self) -> None:
        """Wait for the work. Work that waits for a missing signal stays pending until the exporter closes."""
        if not self._finished and not self.exporter._closed:
            self.done(_PATIENCE)

    def release(self) -> None:
        """Signal what the work waits for."""
        for semaphore, value in self._waits:
            semaphore.force(value)


class VulkanExporter(Exporter):
    """A Vulkan driver as the independent exporter, on its own instance and device.

    Raises `BackendUnavailableError` if cffi, the loader or a driver is missing, and `DeviceNotFoundError` if no device
    matches.

    Parameters
    ----------
    driver : str, optional
        Part of the device's or driver's name, in any case: ``swiftshader``, ``lavapipe``, ``nvidia``. Default: a GPU,
        otherwise a driver that exports semaphores (SwiftShader), otherwise any.
    device_index : int, optional
        The index among the devices that match `driver`, in the loader's order. Without `driver`, the index among all,
        so ``VulkanExporter(device_index=found.index)`` opens exactly the one from :func:`list_drivers`.
    staged : bool, optional
        Write and read through a staging buffer and the queue even if the host can map the memory. A GPU always does.
    identity : DeviceIdentity, optional
        See :func:`gpuinterop.testing.exporters.open_exporter`.
    """

    name = "vulkan"

    def __init__(
        self,
        driver: str | None = None,
        *,
        device_index: int | None = None,
        staged: bool = False,
        identity: DeviceIdentity | None = None,
    ) -> None:
        self._closed = True  # until the constructor is done: an error may call close()
        with ExitStack() as undo:
            self._instance = instance = undo.enter_context(Instance())
            self.physical = physical = choose(instance.physical_devices(), driver, device_index)
            self._device = VulkanDevice(instance, physical)
            undo.callback(self._device.close)
            self.vk = vk = self._device.vk
            info = vk.api.new("VkCommandPoolCreateInfo", flags=0x2, queueFamilyIndex=vk._family())  # resettable
            self._pool = vk._create("vkCreateCommandPool", "VkCommandPool", info)
            undo.pop_all()
        self.driver = f"{physical.driver_name} {physical.driver_version}"
        self.device = physical.name
        vk.presented_identity = identity
        self.identity = vk.identity
        self._staged = staged
        self._lock = threading.Lock()  # for the queue, the command pool, and the lists below
        self._pending: list[Pending] = []
        self._fences: list[Any] = []
        self.children: dict[Any, None] = {}  # in order of creation; keeps objects that were dropped unclosed
        self._rescuer: _Rescuer | None = None
        self._stuck = False
        self._closed = False

    # -- the interface ------------------------------------------------------------------------------------------------

    @cached_property
    def capabilities(self) -> Capabilities:  # queried for each test
        return self.physical.capabilities

    def create_memory(self, size: int) -> VulkanMemory:
        return VulkanMemory(self, size)

    def import_memory(self, handle: AllocationHandle, size: int) -> VulkanMemory:
        check_type(handle, VmmFd, "handle", "a VmmFd")
        self.capabilities.require((Operation.EXPORT_ALLOCATION, VmmFd))
        check_size(handle, size)  # SwiftShader maps beyond the object, and crashes on the first access
        maker = handle.origin.device if handle.origin is not None else None
        if maker is not None and maker.conflicts(self.identity):
            raise HandleError(f"handle: expected one allocated on {self.device}, got {maker.name or 'another device'}.")
        return VulkanMemory(self, size, handle)

    def import_array(self, array: object, usage: int = BUFFER_USAGE) -> VulkanMemory:
        """Import an existing array in place, as this exporter's memory (:func:`gpuinterop.vulkan.import_array`)."""
        return VulkanMemory(self, 0, array=array, usage=usage)

    def image_gap(self, parameters: ImageParameters) -> str:
        return image_gap(self.open(), parameters)

    def create_image(self, parameters: ImageParameters) -> VulkanImage:
        return VulkanImage(self, parameters)

    def create_semaphore(self, kind: type, *, exportable: bool = True) -> VulkanSemaphore:
        return VulkanSemaphore(self, kind, exportable=exportable or kind is Binary)

    def submit(
        self,
        *,
        wait: Sequence[tuple[ExporterSemaphore, int]] = (),
        fill: Sequence[Fill] = (),
        signal: Sequence[tuple[ExporterSemaphore, int]] = (),
    ) -> Submission:
        for item in fill:
            if item.offset % 4 or item.size % 4 or item.size <= 0:
                raise InvalidArgumentError(
                    "fill", f"expected multiples of 4, got offset {item.offset} and size {item.size}."
                )
            self._own(item.memory, VulkanMemory).check(item.offset, item.size)
        waits = [(self._own(semaphore, VulkanSemaphore), value) for semaphore, value in wait]
        signals = [(self._own(semaphore, VulkanSemaphore), value) for semaphore, value in signal]

        def record(commands: Any) -> None:
            for item in fill:
                with item.memory.taken(commands, c.STAGE_TRANSFER, c.ACCESS_TRANSFER_WRITE):
                    self.vk.functions.vkCmdFillBuffer(
                        commands, item.memory.vk_buffer, item.offset, item.size, item.word
                    )

        memories = [item.memory for item in fill]
        return self.submit_to_queue(waits, record if memories else None, signals, uses=memories)

    def close(self) -> None:
        if self._closed:
            return
        for child in reversed(list(self.children)):
            child.close()
        if self.settle():
            self._closed = True
            vk = self.vk
            for fence in self._fences:
                vk._destroy("vkDestroyFence", fence)
            vk._destroy("vkDestroyCommandPool", self._pool)
            rescued = self._rescuer is None or self._rescuer.close()
            self._device.close()
            if rescued:
                self._instance.close()
        self._closed = True

    # -- used by the objects ------------------------------------------------------------------------------------------

    def open(self) -> VulkanContext:
        if self._closed:
            raise ResourceClosedError("the Vulkan exporter was closed.")
        return self.vk

    def _own(self, thing: Any, kind: type[Any]) -> Any:
        if not isinstance(thing, kind):
            raise ArgumentTypeError("submit", f"expected objects of this exporter, got {type(thing).__name__}.")
        if thing.exporter is not self:  # a driver crashes on objects of another device
            raise ArgumentTypeError("submit", f"expected objects of this exporter, got another's {kind.__name__}.")
        return thing

    def submit_to_queue(
        self,
        waits: Sequence[tuple[VulkanSemaphore, int]],
        record: Callable[[Any], None] | None,
        signals: Sequence[tuple[VulkanSemaphore, int]],
        *,
        uses: Iterable[object] = (),
        queue: Any = None,
    ) -> Pending:
        adopted: list[tuple[VulkanSemaphore, Pending]] = []
        left = []
        try:
            for semaphore, value in waits:
                # A wait that is already on the queue delays later work just as this one would.
                if earlier := semaphore.adopt():
                    adopted.append((semaphore, earlier))
                else:
                    left.append((semaphore, value))
            used: frozenset[object] = frozenset((*uses, *(semaphore for semaphore, _ in (*waits, *signals))))
            return self._enqueue(left, record, signals, used, queue)
        except BaseException:
            for semaphore, earlier in adopted:
                semaphore.unheard.insert(0, earlier)
            raise

    def _enqueue(
        self,
        waits: Sequence[tuple[VulkanSemaphore, int]],
        record: Callable[[Any], None] | None,
        signals: Sequence[tuple[VulkanSemaphore, int]],
        uses: frozenset[object],
        queue: Any,
    ) -> Pending:
        vk = self.open()
        self._reap()
        commands = None
        with self._lock:
            if record is not None:
                commands = self._allocate()
                try:
                    begin = vk.api.new("VkCommandBufferBeginInfo", flags=0x1)  # one time
                    vk._call("vkBeginCommandBuffer", commands, begin)
                    record(commands)
                    vk._call("vkEndCommandBuffer", commands)
                except BaseException:
                    self._free(commands)
                    raise
            what = VulkanSubmit(
                wait_semaphores=[semaphore.vk_handle() for semaphore, _ in waits],
                wait_values=[value for _, value in waits],
                wait_stages=[c.STAGE_ALL_COMMANDS] * len(waits),
                signal_semaphores=[semaphore.vk_handle() for semaphore, _ in signals],
                signal_values=[value for _, value in signals],
            )
            timeline = any(semaphore.kind is Timeline for semaphore, _ in (*waits, *signals))
            info = _submit_info(vk.api, what, [] if commands is None else [commands], timeline=timeline)
            fence = self.fence()
            pending = Pending(self, fence, tuple(waits), tuple(signals), uses, commands)
            # Added before the submission: after an interrupt, work that may be on the queue keeps its fence, commands
            # and semaphores until the fence is signalled.
            self._pending.append(pending)
            try:
                vk._call("vkQueueSubmit", vk.queue if queue is None else queue, 1, info, fence)
            except DriverError:
                self._pending.remove(pending)
                self._fences.append(fence)
                self._free(commands)
                raise
        return pending

    def fence(self) -> Any:
        vk = self.vk
        if not self._fences:
            return vk._create("vkCreateFence", "VkFence", vk.api.new("VkFenceCreateInfo"))
        fence = self._fences.pop()
        vk._call("vkResetFences", vk.device, 1, vk.api.array("VkFence", [fence]))
        return fence

    def _allocate(self) -> Any:
        vk = self.vk
        info = vk.api.new("VkCommandBufferAllocateInfo", commandPool=self._pool, commandBufferCount=1)
        out = vk.api.ffi.new("VkCommandBuffer *")
        vk._call("vkAllocateCommandBuffers", vk.device, info, out)
        return out[0]

    def _free(self, commands: Any) -> None:
        vk = self.vk
        if commands is not None:
            vk.functions.vkFreeCommandBuffers(vk.device, self._pool, 1, vk.api.array("VkCommandBuffer", [commands]))

    def _retire(self, pending: Pending) -> None:
        """Reuse what the work held, because the fence of `pending` is signalled."""
        with self._lock:
            pending._finished = True
            if pending in self._pending and not pending._waiters:
                self._pending.remove(pending)
                self._fences.append(pending.fence)
                self._free(pending.commands)

    def _reap(self) -> None:
        """Reuse what finished work held, even if no caller waited for it."""
        with self._lock:
            unfinished = list(self._pending)
        for pending in unfinished:
            pending.done()

    def _busy(self) -> bool:
        self._reap()
        return bool(self._pending)

    def rescue(self, payload: FdHandle) -> None:
        """Signal a binary semaphore from a second device, because work on this device's queue may never end."""
        with self._lock:
            if self._rescuer is None:
                self._rescuer = _Rescuer(self._instance, self.physical)
            self._rescuer.signal(payload)

    def _unblock(self, stuck: Pending) -> bool:
        """Release every wait up to `stuck`, because a queue runs in order."""
        for pending in list(self._pending):
            if not pending.done(0.0):
                pending.release()
                if not pending.done(_PATIENCE):
                    return False
            if pending is stuck:
                break
        return True

    def settle(self, *things: VulkanMemory | VulkanImage | VulkanSemaphore) -> bool:
        """Wait for work that uses `things`, or for all work, and release waits that would never end.

        Work that waits for a semaphore among `things` is released at once, because the semaphore is being closed.
        Returns False if nothing may be destroyed.
        """
        if self._stuck or self._closed:
            return False
        try:
            for pending in list(self._pending):
                doomed = any(semaphore in things for semaphore, _ in pending._waits)
                if (things and pending.uses.isdisjoint(things)) or pending.done(0.0 if doomed else _PATIENCE):
                    continue
                if doomed:
                    pending.release()
                if not (doomed and pending.done(_PATIENCE)) and not self._unblock(pending):
                    return self._give_up()
        except DriverError:  # a lost device has no pending work
            pass
        return True

    def _give_up(self) -> bool:
        # Destroying a device with pending work is undefined, and on SwiftShader hangs for ever. Leave everything.
        self._stuck = True
        warnings.warn(
            f"work on {self.device} waits for a signal that cannot come; the Vulkan device is left undestroyed",
            LeakedResourceWarning,
            stacklevel=4,
        )
        return False


class _Rescuer:
    """A second VkDevice on the physical device, which shares the payload of the first one's semaphores."""

    def __init__(self, instance: Instance, physical: PhysicalDevice) -> None:
        self._device = VulkanDevice(instance, physical)
        # Bare handles: closing a native object drains, and the exporter's lock is held here.
        self._garbage: list[tuple[Any, Any]] = []

    def signal(self, payload: FdHandle) -> None:
        vk = self._device.vk
        handle = payload.duplicate()
        try:
            imported = import_binary_fd(vk, handle.fd)
        except BaseException:
            handle.close()
            raise
        handle.detach()  # the driver owns it now
        fence = vk._create("vkCreateFence", "VkFence", vk.api.new("VkFenceCreateInfo"))
        self._garbage.append((imported, fence))
        info = vk.api.new(
            "VkSubmitInfo", signalSemaphoreCount=1, pSignalSemaphores=vk.api.array("VkSemaphore", [imported])
        )
        vk._call("vkQueueSubmit", vk.queue, 1, info, fence)
        self._collect(_PATIENCE)

    def _collect(self, timeout: float) -> bool:
        vk = self._device.vk
        while self._garbage:
            imported, fence = self._garbage[0]
            fences = vk.api.array("VkFence", [fence])
            if vk.functions.vkWaitForFences(vk.device, 1, fences, 1, int(timeout * 1e9)) != c.SUCCESS:
                return False
            del self._garbage[0]
            vk._destroy("vkDestroySemaphore", imported)
            vk._destroy("vkDestroyFence", fence)
        return True

    def close(self) -> bool:
        """Destroy the device. Returns False if it is left undestroyed; its instance must then stay as well."""
        idle = self._collect(_PATIENCE)
        if idle:
            self._device.close()
        return idle


def _submit_info(api: Api, what: VulkanSubmit, commands: Sequence[Any], *, timeline: bool) -> Any:
    """Make a ``VkSubmitInfo``; `timeline` is True if one of the semaphores is a timeline."""
    chain = api.ffi.NULL
    if timeline:
        chain = api.new(
            "VkTimelineSemaphoreSubmitInfo",
            waitSemaphoreValueCount=len(what["wait_values"]),
            pWaitSemaphoreValues=api.array("uint64_t", what["wait_values"]),
            signalSemaphoreValueCount=len(what["signal_values"]),
            pSignalSemaphoreValues=api.array("uint64_t", what["signal_values"]),
        )
    return api.new(
        "VkSubmitInfo",
        pNext=chain,
        waitSemaphoreCount=len(what["wait_semaphores"]),
        pWaitSemaphores=api.array("VkSemaphore", what["wait_semaphores"]),
        pWaitDstStageMask=api.array("VkPipelineStageFlags", what["wait_stages"]),
        commandBufferCount=len(commands),
        pCommandBuffers=api.array("VkCommandBuffer", commands),
        signalSemaphoreCount=len(what["signal_semaphores"]),
        pSignalSemaphores=api.array("VkSemaphore", what["signal_semaphores"]),
    )
