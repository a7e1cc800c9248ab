"""Semaphores of the Vulkan exporter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from .... import system
from ....bridge import Endpoint
from ....capabilities import Operation
from ....errors import InvalidArgumentError, ResourceClosedError
from ....handles import AnySemaphoreHandle, Binary, FdHandle, Timeline
from ....vulkan._semaphore import (
    TimelineEndpoint,
    counter_reader,
    create_semaphore,
    export_semaphore,
    semaphore_handle_type,
)
from ..base import ExporterSemaphore

if TYPE_CHECKING:
    from .exporter import Pending, VulkanExporter

__all__ = ["VulkanSemaphore"]


class VulkanSemaphore(ExporterSemaphore):
    """A semaphore that can be exported; with ``exportable=False``, only this device and its host can use it."""

    def __init__(self, exporter: VulkanExporter, kind: type, *, exportable: bool = True) -> None:
        self.exporter = exporter
        self.kind = kind
        vk = exporter.open()
        self.vulkan_object = create_semaphore(vk, kind, exportable=exportable)
        self._payload: FdHandle | None = None
        self.unheard: list[Pending] = []
        """Waits that timed out but are still on the queue. Each consumes a signal, and the next wait takes it over."""
        if not exportable:
            exporter.children[self] = None
            return
        try:
            # Export once, while nothing waits: SwiftShader's vkGetSemaphoreFdKHR blocks while a queue waits for the
            # semaphore. Duplicates of the descriptor are the same payload.
            self._payload = export_semaphore(vk, self.vulkan_object.handle, kind)
        except BaseException:
            self.vulkan_object.close()
            raise
        exporter.children[self] = None

    def export(self) -> AnySemaphoreHandle:
        self.vk_handle()
        if self._payload is None:
            self.exporter.capabilities.require((Operation.IMPORT_SEMAPHORE, semaphore_handle_type(self.kind)))
            raise InvalidArgumentError("semaphore", "was made with exportable=False, only for this device.")
        return cast(AnySemaphoreHandle, self._payload.duplicate())

    def vk_handle(self) -> Any:
        if self.vulkan_object.closed:
            raise ResourceClosedError("the exporter's semaphore was closed.")
        return self.vulkan_object.handle

    def signal(self, value: int = 0) -> None:
        self.vk_handle()
        if self.kind is Timeline:
            self._host_signal(value)
        elif self.exporter._busy():
            # A queue runs in order: after a wait for this signal, the signal would never run.
            self.rescue()
        else:
            self.exporter.submit_to_queue((), None, ((self, 0),))

    def wait(self, value: int = 0, *, timeout: float) -> bool:
        """Wait as :meth:`ExporterSemaphore.wait` does, except that a binary wait that timed out stays on the queue.

        The next wait for this semaphore, here or in a submission, takes it over, so a signal sent in between is not
        lost. Until then it delays all later submissions, because a queue runs in order. Reads and writes of memory
        avoid the delay if the family has a second queue; SwiftShader's has none.
        """
        self.vk_handle()
        if self.kind is Binary:
            pending = self.adopt() or self.exporter.submit_to_queue(((self, 0),), None, ())
            finished = False
            try:
                finished = pending.done(timeout)
            finally:
                if not finished:
                    self.unheard.append(pending)
            return finished
        # Poll the counter: vkWaitSemaphores sleeps in steps of 10 ms on NVIDIA.
        return system.until(lambda: self.counter() >= value, timeout)

    def adopt(self) -> Pending | None:
        """Take over a wait that timed out."""
        try:
            return self.unheard.pop(0)
        except IndexError:
            return None

    def endpoint(self) -> Endpoint:
        if self.kind is Binary:
            raise InvalidArgumentError("kind", "Vulkan's binary semaphores cannot be reached from the host.")
        return TimelineEndpoint(self.exporter.open(), self.vk_handle())

    def counter(self) -> int:
        """Read a timeline's current value."""
        return counter_reader(self.exporter.vk, self.vulkan_object, self.vk_handle())()

    def _host_signal(self, value: int) -> None:
        vk = self.exporter.vk
        info = vk.api.new("VkSemaphoreSignalInfo", semaphore=self.vk_handle(), value=value)
        self.vulkan_object._call("vkSignalSemaphore", vk.device, info)

    def rescue(self) -> None:
        assert self._payload is not None  # binary semaphores are always exported
        self.exporter.rescue(self._payload)

    def force(self, value: int) -> None:
        """Signal a pending wait whose own signal will never come."""
        self.vk_handle()
        if self.kind is Binary:
            self.rescue()
        elif self.counter() < value:
            self._host_signal(value)

    def close(self) -> None:
        exporter = self.exporter
        if not self.vulkan_object.closed and exporter.settle(self):
            self.vulkan_object.close()
        if self._payload is not None:
            self._payload.close()
        exporter.children.pop(self, None)
