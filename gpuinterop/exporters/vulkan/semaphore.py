"""Semaphores of a Vulkan driver, as the independent party's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ... import system
from ...bridge import Endpoint
from ...capabilities import Operation
from ...errors import InvalidArgumentError, ResourceClosedError
from ...handles import AnySemaphoreHandle, Binary, FdHandle, Timeline
from ...vulkan._semaphore import (
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
    """A semaphore that can be exported; or, with ``exportable=False``, one for this device and its host alone."""

    def __init__(self, exporter: VulkanExporter, kind: type, *, exportable: bool = True) -> None:
        self.exporter = exporter
        self.kind = kind
        vk = exporter.open()
        self.vulkan_object = create_semaphore(vk, kind, exportable=exportable)
        self._payload: FdHandle | None = None
        self.unheard: list[Pending] = []
        """Waits on the queue whose caller ran out of time: each takes a signal, and is whose wait comes next."""
        if not exportable:
            exporter.children[self] = None
            return
        try:
            # Exported once, while nothing waits: on SwiftShader vkGetSemaphoreFdKHR blocks as long as a queue waits
            # for the semaphore. Duplicates of the descriptor are the same payload.
            self._payload = export_semaphore(vk, self.vulkan_object.handle, kind)
        except BaseException:
            self.vulkan_object.close()
            raise
        exporter.children[self] = None

    def export(self) -> AnySemaphoreHandle:
        self.vk_handle()
        if self._payload is None:
            self.exporter.capabilities.require((Operation.IMPORT_SEMAPHORE, semaphore_handle_type(self.kind)))
            raise InvalidArgumentError("semaphore", "was made for this device alone.")
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
            # A queue runs in order: behind a wait for this very signal it would never be reached.
            self.rescue()
        else:
            self.exporter.submit_to_queue((), None, ((self, 0),))

    def wait(self, value: int = 0, *, timeout: float) -> bool:
        """Wait as :meth:`ExporterSemaphore.wait` does, with one difference.

        A binary wait that ran out of time stays on the queue. The next wait for this semaphore, here or of a
        submission, takes its place: a signal that came in between is seen, not lost. Until then whatever is submitted
        later stays behind it, also what has nothing to do with this semaphore, since a queue runs in order; reads and
        writes of memory pass it where the family has a second queue, which SwiftShader's has not.
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
        # The counter is polled: vkWaitSemaphores sleeps in steps of 10 ms on NVIDIA.
        return system.until(lambda: self.counter() >= value, timeout)

    def adopt(self) -> Pending | None:
        """Take over a wait whose caller ran out of time."""
        try:
            return self.unheard.pop(0)
        except IndexError:
            return None

    def endpoint(self) -> Endpoint:
        if self.kind is Binary:
            raise InvalidArgumentError("kind", "Vulkan's binary semaphores cannot be reached from the host.")
        return TimelineEndpoint(self.exporter.open(), self.vk_handle())

    def counter(self) -> int:
        """A timeline's value now."""
        return counter_reader(self.exporter.vk, self.vulkan_object, self.vk_handle())()

    def _host_signal(self, value: int) -> None:
        vk = self.exporter.vk
        info = vk.api.new("VkSemaphoreSignalInfo", semaphore=self.vk_handle(), value=value)
        self.vulkan_object._call("vkSignalSemaphore", vk.device, info)

    def rescue(self) -> None:
        assert self._payload is not None  # binary ones are always exported
        self.exporter.rescue(self._payload)

    def force(self, value: int) -> None:
        """Give a pending wait the signal that will never come."""
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
