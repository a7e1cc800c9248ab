"""The application's Vulkan objects."""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import ref

from .. import system
from .._arguments import MAX_32, check_int, check_timeout
from .._core import native as lifetime
from .._core.drain import drain
from .._core.monitor import locked, refuse_reentry
from .._core.native import LIVE, retire
from ..capabilities import Capabilities
from ..errors import ArgumentTypeError, GpuInteropError, InvalidArgumentError, ResourceBusyError, ResourceClosedError
from ..handles import DeviceIdentity
from ._api import NOT_READY, Api, check_call
from ._query import PhysicalDevice

if TYPE_CHECKING:
    from .._core.resource import Resource

__all__ = ["Native", "VulkanContext", "Watched", "check_context"]

T = TypeVar("T")

_GRACE_S = 1.0
"""Seconds that Vulkan's work gets where an exception leaves the block. A frame ends in that time; what waits for a
signal that the exception has prevented never does."""


class Native(lifetime.Native):
    """Vulkan objects that were made to be shared. They stand on the context, which holds them.

    A finalizer may not destroy them, because a queue may still be at work with them. The compute side may be: what it
    has imported keeps the payload, on every driver (docs/vulkan.md).
    """

    def __init__(self, vk: VulkanContext, noun: str) -> None:
        super().__init__(noun, lambda _: self._destroy(), parents=(vk._lifetime,), how=lifetime.Standing.HOLDS)
        self._vk = vk
        self._made: list[tuple[str, Any]] = []
        self._pending: Iterator[Callable[[], None]] | None = None
        self._other: ref[Resource] | None = None

    def make(self, call: Callable[[], T]) -> T:
        """Make them: `call` does, with `new`. Where it raises, or the context is closed meanwhile, they go."""
        made: T = self.create(lambda: self.whole(call))
        return made

    def whole(self, call: Callable[[], T]) -> T:
        """Make them, or a part; where that raises, they go."""
        try:
            return call()
        except BaseException:
            self._destroy()
            raise

    def new(self, call: str, kind: str, info: Any) -> Any:
        """As `VulkanContext.create`, for one of them."""
        return self._vk.create(call, kind, info, self._made)

    def call(self, name: str, *arguments: Any) -> int:
        """As `VulkanContext.call`, with one of them."""
        return self.use(lambda _: self._vk.call(name, *arguments))

    def status(self, name: str, *arguments: Any) -> int:
        """As `call`, but unchecked, and also after `close`; 0 where they are destroyed, or left to the VkDevice."""
        vk = self._vk
        code = vk._lifetime.ask(lambda _: self.ask(lambda _: getattr(vk.functions, name)(*arguments), 0), 0)
        return int(code)

    def pair(self, other: Resource) -> None:
        """Name the compute side's half. Its use ends with the context; raises where that is closed already."""
        self.label = other.label
        self._other = ref(other)
        self._vk.check_open()

    def end_use(self) -> None:
        """Close the compute side's half."""
        other = None if self._other is None else self._other()
        if other is not None and not other.closed:
            other.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.state is not LIVE

    def close(self) -> None:
        """Destroy them; idempotent. Vulkan's own work with them must be done."""
        retire(self)
        drain()

    def _destroy(self) -> None:
        self._vk._lifetime.ask(self._destroy_each, None)  # nothing, once the VkDevice may be gone

    def _destroy_each(self, _: Any) -> None:
        """Each once, however often it is called."""
        vk = self._vk
        if self._pending is None:
            made = [(name.replace("Create", "Destroy").replace("Allocate", "Free"), out[0]) for name, out in self._made]
            calls = [partial(getattr(vk.functions, name), vk.device, one, vk.api.ffi.NULL) for name, one in made if one]
            self._pending = iter(calls)
        deque(map(operator.call, self._pending), 0)  # taken and called by C: no interrupt comes in between


class Watched(Native):
    """What a bridge calls Vulkan for."""


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
            check_int(queue_family_index, "queue_family_index", minimum=0, maximum=MAX_32)
            if queue_family_index >= (count := len(self._physical.queue_families)):
                raise InvalidArgumentError(
                    "queue_family_index",
                    f"expected one of 0 to {count - 1}, got {queue_family_index}: {self._physical.name} has {count}; "
                    "pass the family that the queue was got from.",
                )
        self.queue_family_index = queue_family_index
        self._submitting = threading.RLock()  # the queue is one thread's at a time
        self._fences: list[Native] = []  # behind the queue's work, once `close` was called
        self._lifetime = lifetime.Native("VulkanContext")
        self._lifetime.open()

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
        refuse_reentry()
        context = self._lifetime
        if context.state is lifetime.DEAD:
            return
        self._fence_queue()
        system.until(self._is_unused, limit)
        streams = sorted({native.label for native in self._shared() if isinstance(native, Watched)})
        left: list[str] = []
        if self._is_idle():
            retire(context)
        else:
            _leave(context, LIVE, "Vulkan's queue is still at work", left)
        # A call that is under way takes a moment, however little time there is for the queue.
        if not system.until(self._is_over, None if limit is None else max(limit, _GRACE_S)):
            _leave(context, lifetime.RETIRED, context.what_holds(), left)
        if left:
            raise ResourceBusyError(
                f"{left[0]} {timeout:g} s after close(): what was shared through the context is not destroyed. Wait "
                "for that before the context is closed."
            )
        if streams:
            raise ResourceBusyError(
                f"a stream still uses {', '.join(streams)} {timeout:g} s after close(): it is let go, and fails."
            )

    def _fence_queue(self) -> None:
        """Put a fence behind the queue's work, unless there is no queue, or nothing that it could be at work with."""
        try:
            self._submitting.acquire()
            if self.queue is not None and self._lifetime.standing:
                fence, info = Native(self, "fence"), self.api.new("VkFenceCreateInfo")
                fence.make(lambda: fence.new("vkCreateFence", "VkFence", info))
                self._lifetime.use(lambda _: self._submit(fence))
        except ResourceClosedError:  # by another thread
            pass
        finally:
            try:  # noqa: SIM105 - as in `monitor.locked`
                self._submitting.release()
            except RuntimeError:
                pass

    def _submit(self, fence: Native) -> None:
        # A queue that takes nothing any more is a lost device's, and does nothing any more.
        if fence.status("vkQueueSubmit", self.queue, 0, self.api.ffi.NULL, fence.handle) >= 0:
            self._fences.append(fence)

    def _is_idle(self) -> bool:
        """Whether the queue has come to its fences, or never will."""
        fences = self._fences.copy()
        return all(fence.status("vkGetFenceStatus", self.device, fence.handle) != NOT_READY for fence in fences)

    def _is_unused(self) -> bool:
        """End use on the compute side, also of what another thread has shared meanwhile; and look at the queue."""
        if self._lifetime.state is not LIVE:
            return True
        for native in self._shared():
            native.end_use()
        drain()
        return not any(isinstance(native, Watched) for native in self._shared()) and self._is_idle()

    def _is_over(self) -> bool:
        """Whether nobody calls the VkDevice any more. What was shared goes once no call, nor a fence, is under way."""
        context = self._lifetime
        if context.calls.copy():
            return False
        if context.state is lifetime.RETIRED and self._is_idle():
            for native in self._shared():
                retire(native)
                native.end_use()
            drain()
        return context.state in lifetime.GONE

    def _shared(self) -> list[Native]:
        return [native for native in self._lifetime.standing.copy() if isinstance(native, Native)]

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
        """Call a device function and raise for a negative VkResult; `close` waits for it. Raises after `close`."""
        return self._lifetime.use(lambda _: check_call(self.functions, name, *arguments))

    def create(self, name: str, kind: str, info: Any, made: list[tuple[str, Any]] | None = None) -> Any:
        """A ``vkCreate*`` or ``vkAllocateMemory`` of the usual form; returns the handle, and notes it in `made`."""
        out, made = self.api.ffi.new(f"{kind} *"), [] if made is None else made
        made.append((name, out))  # first: an interrupt may strike behind the call
        try:
            self.call(name, self.device, info, self.api.ffi.NULL, out)
        except GpuInteropError:
            made.pop()
            raise
        return out[0]

    def check_open(self) -> None:
        """Raise after `close`."""
        self._lifetime.check()

    def destroy(self, name: str, handle: Any) -> None:
        """A ``vkDestroy*`` or ``vkFreeMemory`` of the usual form; nothing once the VkDevice may be gone."""
        self._lifetime.ask(lambda _: getattr(self.functions, name)(self.device, handle, self.api.ffi.NULL), None)

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


@locked
def _leave(context: lifetime.Native, state: lifetime.State, why: str, left: list[str]) -> None:
    """Call nothing of the VkDevice any more, and leave to it what is not destroyed."""
    if context.state is state:
        context.state = lifetime.LEAKED
        left.append(why)


def check_context(vk: Any) -> VulkanContext:
    """Refuse what is no open context, before a function of a VkDevice is looked up that may be gone."""
    if not isinstance(vk, VulkanContext):
        raise ArgumentTypeError("vk", f"must be a gpuinterop.vulkan.VulkanContext, not {type(vk).__name__}.")
    vk.check_open()
    return vk
