"""The application's Vulkan objects."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet, ref

from .. import system
from .._core.resource import check_timeout
from ..capabilities import Capabilities
from ..errors import ArgumentTypeError, InvalidArgumentError, ResourceBusyError, ResourceClosedError
from ..handles import DeviceIdentity
from ._api import Api, check_call, check_int
from ._query import PhysicalDevice

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.resource import Resource

__all__ = ["Lease", "Native", "VulkanContext", "check_context"]


class Lease:
    """A Vulkan object that the compute side uses: freed when that has let go, whoever dropped what in between."""

    def __init__(self, vk: VulkanContext, resource: Resource, device: Device, free: Callable[[], None]) -> None:
        self.resource = ref(resource)
        self.device = device
        self.label = resource.label
        self._vk = vk
        self._free = free
        vk._leases.add(self)
        resource.on_released(self._released)

    def _released(self) -> None:
        self._vk._leases.discard(self)
        self._free()


class Native:
    """Vulkan objects that only Vulkan uses. The context holds them: they outlive whoever drops their owner.

    A finalizer may not free them, because a queue may still be at work with them.

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
        self.closed = False
        vk._natives[self] = None

    def close(self) -> None:
        """Destroy them; idempotent."""
        self.closed = True
        while self._objects:
            self._vk.destroy(*self._objects.pop(0))
        self._keep = None
        self._vk._natives.pop(self, None)


class VulkanContext:
    """The application's Vulkan objects, as everything in :mod:`gpuinterop.vulkan` takes them.

    It owns none of them. What is shared through it uses them until the compute side has let go, which can be after
    its `close`: call `close` here, or leave its ``with`` block, before the VkDevice is destroyed.

    Parameters
    ----------
    instance, physical_device, device : VkInstance, VkPhysicalDevice, VkDevice
        PyPI vulkan's handles, or their values as ints.
    queue : VkQueue, optional
        For ``submit`` of a shared handoff.
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
        self._leases: set[Lease] = set()
        self._natives: dict[Native, None] = {}
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

    def close(self, timeout: float = 10.0) -> None:
        """Close whatever was shared or bridged through it, and wait until the compute side has let go. Idempotent.

        Afterwards this library calls nothing of the VkDevice any more; the application may destroy it. Vulkan's own
        work with what was shared must be done before.

        Parameters
        ----------
        timeout : float
            Seconds to wait.

        Raises
        ------
        ResourceBusyError
            `timeout` passed, and pending work or exported arrays still use something. Its Vulkan half is abandoned:
            memory that is still in use must not be freed. A bridge's streams that wait for it are let go, and fail.
        """
        check_timeout(timeout)
        if self._closed:
            return
        self._close_leases()
        for native in list(self._natives):
            native.close()
        deadline = time.monotonic() + timeout
        pauses = system.pauses()
        while not self._end(time.monotonic() >= deadline):
            self._close_leases()  # another thread may have bridged one more meanwhile
            for device in {lease.device for lease in list(self._leases)}:
                device.drain()
            time.sleep(next(pauses))
        if self._leases:
            names = ", ".join(sorted({lease.label for lease in self._leases}))
            self._leases.clear()
            raise ResourceBusyError(
                f"the compute side still uses {names} {timeout:g} s after close(): work is pending, or an exported "
                "array is alive. The Vulkan half is abandoned."
            )

    def _close_leases(self) -> None:
        for lease in list(self._leases):
            if (resource := lease.resource()) is not None and not resource.closed:
                resource.close()

    def _end(self, late: bool) -> bool:
        """Take no more calls, if nothing is lent any more or it is late; behind those that are under way."""
        with self._calling:
            if not self._leases or late:
                self._closed = True
            return self._closed

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ResourceBusyError:
            if error is None:  # never hide what went wrong first
                raise

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
        if self._closed:
            return
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
