"""The application's Vulkan objects."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet, ref

from .. import system
from .._core.resource import check_timeout
from ..capabilities import Capabilities
from ..errors import ArgumentTypeError, GpuInteropError, InvalidArgumentError, ResourceBusyError, ResourceClosedError
from ..handles import DeviceIdentity
from ._api import NOT_READY, Api, check_call, check_int
from ._query import PhysicalDevice

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.resource import Resource

__all__ = ["Native", "VulkanContext", "check_context"]

_GRACE_S = 1.0
"""Seconds that Vulkan's work gets where an exception leaves the block. A frame ends in that time; what waits for a
signal that the exception has prevented never does."""


class Native:
    """Vulkan objects that were made to be shared. The context holds them: they outlive whoever drops their owner.

    A finalizer may not destroy them, because a queue may still be at work with them. The compute side may be: what it
    has imported keeps the payload, on every driver (docs/vulkan.md).

    Parameters
    ----------
    vk : VulkanContext
    objects : sequence of (str, object)
        Function that destroys it and handle, in the order of destruction.
    keep : object
        Held until they are destroyed.
    """

    def __init__(self, vk: VulkanContext, objects: Sequence[tuple[str, Any]], keep: object = None) -> None:
        self._vk = vk
        self._objects = list(objects)
        self._keep = keep
        self._other: ref[Resource] | None = None
        self.label = ""
        self.closed = False
        vk._natives[self] = None

    def pair(self, other: Resource) -> None:
        """Name the compute side's half. Its use ends with the context."""
        self.label = other.label
        self._other = ref(other)

    def end_use(self) -> None:
        """Close the compute side's half."""
        other = None if self._other is None else self._other()
        if other is not None and not other.closed:
            other.close()

    def close(self) -> None:
        """Destroy the objects; idempotent. Vulkan's own work with them must be done."""
        with self._vk._calling:
            self.closed = True
            while self._objects:  # forgotten first: Ctrl-C raises right after the call, and the next close comes here
                self._vk.destroy(*self._objects.pop(0))
            self._keep = None
            self._vk._natives.pop(self, None)
            self._vk._watched.pop(self, None)


class VulkanContext:
    """The application's Vulkan objects, as everything in :mod:`gpuinterop.vulkan` takes them.

    It owns none of them. Call `close` here, or leave its ``with`` block, before the VkDevice is destroyed: that
    destroys what was made through it to be shared. Arrays, and work that is pending on the compute side, stay.

    Parameters
    ----------
    instance, physical_device, device : VkInstance, VkPhysicalDevice, VkDevice
        PyPI vulkan's handles, or their values as ints.
    queue : VkQueue, optional
        For ``submit`` of a shared handoff; and `close` waits for its work. It must not be used by another thread
        during either.
    queue_family_index : int, optional
        Of the queue that uses what is shared: ownership is transferred from and to this family. A transfer-only
        family makes a handoff to CUDA a fortieth as dear as a graphics or compute family, on NVIDIA.
    get_instance_proc_addr : int, optional
        The address of ``vkGetInstanceProcAddr``, when the handles are not of the loader that PyPI's `vulkan` opened.

    Raises
    ------
    BackendUnavailableError
        PyPI's `vulkan` or the loader is missing.
    ArgumentTypeError
        A handle of another kind, where its type tells, or something that is no handle.
    InvalidArgumentError
        A handle is null, or the physical device has no such queue family.
    """

    def __init__(
        self,
        instance: Any,
        physical_device: Any,
        device: Any,
        queue: Any = None,
        queue_family_index: int | None = None,
        get_instance_proc_addr: Any = None,
    ) -> None:
        self.api = Api(get_instance_proc_addr)
        self.instance = self.api.handle("VkInstance", instance, "instance")
        self.physical_device = self.api.handle("VkPhysicalDevice", physical_device, "physical_device")
        self.device = self.api.handle("VkDevice", device, "device")
        self.queue = None if queue is None else self.api.handle("VkQueue", queue, "queue")
        self.instance_functions = self.api.instance_functions(self.instance)
        self.functions = self.api.device_functions(self.instance_functions, self.device)
        self._physical = PhysicalDevice(self.api, self.instance_functions, self.physical_device)
        if queue_family_index is not None:
            check_int("queue_family_index", queue_family_index, 0, 32)
            if queue_family_index >= (count := len(self._physical.queue_families)):
                raise InvalidArgumentError(
                    "queue_family_index",
                    f"expected one of 0 to {count - 1}, got {queue_family_index}: {self._physical.name} has {count}; "
                    "pass the family that the queue was got from.",
                )
        self.queue_family_index = queue_family_index
        self._natives: dict[Native, None] = {}
        self._watched: dict[Native, Device] = {}  # those that a bridge of this device calls Vulkan for
        self._fences: list[Any] = []  # behind the queue's work, once `close` was called
        self._closed = False
        self._calling = threading.RLock()  # a finalizer may come in between
        _contexts.add(self)

    @property
    def identity(self) -> DeviceIdentity:
        """As :func:`gpuinterop.vulkan.identity`."""
        self.check_open()
        return self._physical.identity

    @property
    def capabilities(self) -> Capabilities:
        """As :func:`gpuinterop.vulkan.capabilities`."""
        self.check_open()
        return self._physical.capabilities

    @property
    def is_cpu(self) -> bool:
        """A software device."""
        self.check_open()
        return self._physical.is_cpu

    def close(self, timeout: float | None = 10.0) -> None:
        """Close whatever was shared or bridged through it, and destroy Vulkan's half. Idempotent.

        Waits for what Vulkan needs: for the work of the context's queue, and for streams whose waits and signals a
        bridge carries, because it calls Vulkan. Not for exported arrays, nor for other work of the compute side: an
        import keeps the payload by itself. Work that other queues do with what was shared must be done before.

        Afterwards this library calls nothing of the VkDevice any more; the application may destroy it.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; None for no limit. A ``with`` block that an exception ends waits for one second.

        Raises
        ------
        ArgumentTypeError
            `timeout` is no number.
        ResourceBusyError
            `timeout` passed. What the queue may still use is left undestroyed to the VkDevice; streams that wait
            through a bridge are let go, and fail.
        """
        limit = check_timeout(timeout)
        self._fence_queue()
        system.until(self._is_unused, limit)
        with self._calling:  # behind the calls that are under way; from here on there are none
            if self._closed:
                return
            idle, streams = self._is_idle(), sorted({native.label for native in self._watched})
            if idle:
                for native in list(self._natives):
                    native.close()
            self._closed = True
        if not idle:
            raise ResourceBusyError(
                f"Vulkan's queue is still at work {timeout:g} s after close(): what was shared through the context is "
                "not destroyed, because the queue may use it. Wait for the queue before the context is closed."
            )
        if streams:
            raise ResourceBusyError(
                f"a stream still uses {', '.join(streams)} {timeout:g} s after close(): it is let go, and fails."
            )

    def _fence_queue(self) -> None:
        """Put a fence behind the queue's work, unless there is no queue, or nothing that it could be at work with."""
        with self._calling:  # another thread may be closing, too
            if self._closed or self.queue is None or not self._natives:
                return
            fence = self.create("vkCreateFence", "VkFence", self.api.new("VkFenceCreateInfo"))
            Native(self, [("vkDestroyFence", fence)])
            # A queue that takes nothing any more is a lost device's, and does nothing any more.
            if self.functions.vkQueueSubmit(self.queue, 0, self.api.ffi.NULL, fence) >= 0:
                self._fences.append(fence)

    def _is_idle(self) -> bool:
        """Whether the queue has come to its fences, or never will."""
        with self._calling:
            status = self.functions.vkGetFenceStatus
            return self._closed or all(status(self.device, fence) != NOT_READY for fence in self._fences)

    def _is_unused(self) -> bool:
        """End use on the compute side, also of what another thread has shared meanwhile; and look at the queue."""
        if self._closed:
            return True
        for native in list(self._natives):
            native.end_use()
        for device in set(self._watched.values()):
            device.drain()
        return not self._watched and self._is_idle()

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(GpuInteropError):  # never hide what went wrong first
            self.close(_GRACE_S)

    # -- for the rest of the package ---------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> int:
        """Call a device function and raise for a negative VkResult."""
        self.check_open()
        return check_call(self.functions, name, *arguments)

    @contextmanager
    def calling(self) -> Generator[None]:
        """Round a call that another thread than the application's makes: `close` waits for it. Raises after `close`."""
        with self._calling:
            self.check_open()
            yield

    def create(self, name: str, kind: str, info: Any) -> Any:
        """A ``vkCreate*`` or ``vkAllocateMemory`` of the usual form; returns the handle."""
        out = self.api.ffi.new(f"{kind} *")
        self.call(name, self.device, info, self.api.ffi.NULL, out)
        return out[0]

    def check_open(self) -> None:
        """Raise after `close`."""
        if self._closed:
            raise ResourceClosedError("the VulkanContext was closed.")

    def destroy(self, name: str, handle: Any) -> None:
        """A ``vkDestroy*`` or ``vkFreeMemory`` of the usual form; nothing once the VkDevice may be gone."""
        with self._calling:
            if not self._closed:
                getattr(self.functions, name)(self.device, handle, self.api.ffi.NULL)

    def memory_type(self, bits: int, *preferences: int) -> int:
        """The first memory type of `bits` that has all flags of the earliest preference; then any of them."""
        properties = self.api.ffi.new("VkPhysicalDeviceMemoryProperties *")
        self.instance_functions.vkGetPhysicalDeviceMemoryProperties(self.physical_device, properties)
        for flags in (*preferences, 0):
            for index in range(properties.memoryTypeCount):
                if bits >> index & 1 and properties.memoryTypes[index].propertyFlags & flags == flags:
                    return index
        raise InvalidArgumentError("memory", f"the device has no memory type among {bits:#x}.")

    def memory_flags(self, index: int) -> int:
        """The property flags of a memory type."""
        properties = self.api.ffi.new("VkPhysicalDeviceMemoryProperties *")
        self.instance_functions.vkGetPhysicalDeviceMemoryProperties(self.physical_device, properties)
        return int(properties.memoryTypes[index].propertyFlags)

    def family(self) -> int:
        """The queue family, which ownership transfers need."""
        if self.queue_family_index is None:
            raise InvalidArgumentError(
                "queue_family_index", "give VulkanContext the queue family that uses what is shared."
            )
        return self.queue_family_index

    def address(self, handle: Any) -> int:
        """A handle's value, for those who pass it on."""
        return self.api.address(handle)


_contexts: WeakSet[VulkanContext] = WeakSet()


def _forked() -> None:
    for vk in list(_contexts):  # a thread of the parent may be in a call, and does not exist in the child
        vk._calling = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def check_context(vk: Any) -> VulkanContext:
    """Refuse what is no open context, before a function of a VkDevice is looked up that may be gone."""
    if not isinstance(vk, VulkanContext):
        raise ArgumentTypeError("vk", f"must be a gpuinterop.vulkan.VulkanContext, not {type(vk).__name__}.")
    vk.check_open()
    return vk
