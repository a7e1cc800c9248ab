"""The application's VkDevice: calls on it, the objects that sharing makes on it, and how these end before it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast
from weakref import ref

from .. import system
from .._arguments import MAX_32, NoCopy, check_int, check_timeout, check_type
from .._core import lifetime
from .._core.lifetime import LIVE, locked, refuse_reentry, retire
from .._core.release import drain
from ..capabilities import Capabilities
from ..errors import GpuInteropError, InvalidArgumentError, ResourceBusyError, ResourceClosedError, warn_leak
from ..handles import DeviceIdentity
from ._api import NOT_READY, Api, check_call
from ._query import PhysicalDevice

if TYPE_CHECKING:
    from .._core.resource import Resource


T = TypeVar("T")

_GRACE_S = 1.0
"""Seconds to wait for Vulkan's work when an exception leaves the block. A frame is done by then; work that waits for a
signal which the exception has prevented never is."""


class VulkanObject(lifetime.Lifetime):
    """Vulkan objects made for sharing. The context holds them.

    A finalizer must not destroy them, because a queue may still use them. The compute side's import may outlive them:
    it keeps the payload on every driver (docs/howto/vulkan-buffer.md).
    """

    def __init__(self, vk: VulkanContext, noun: str, keeps: Sequence[VulkanObject] = ()) -> None:
        parents = (vk.lifetime, *keeps)
        super().__init__(noun, lambda _: self._destroy(), parents=parents, dependency=lifetime.Dependency.HOLDS)
        self._vk = vk
        self._handles: list[tuple[str, Any]] = []
        self._compute_half: ref[Resource] | None = None

    def make(self, call: Callable[[], T]) -> T:
        """Call `call`, which makes the objects; destroy them if it raises or the context was closed meanwhile."""
        return cast(T, self.create(lambda: self.all_or_nothing(call)))

    def all_or_nothing(self, call: Callable[[], T]) -> T:
        """Call `call`; if it raises, destroy the objects that it made."""
        try:
            return call()
        except GpuInteropError:
            self._destroy()
            raise

    def new(self, call: str, kind: str, info: Any) -> Any:
        """Create an object (see `VulkanContext._create`)."""
        handle = self._vk._create(call, kind, info)
        self._handles.append((call.replace("Create", "Destroy").replace("Allocate", "Free"), handle))
        return handle

    def _call(self, name: str, *arguments: Any) -> int:
        """Call a device function while the objects are open (see `VulkanContext._call`)."""
        return self.use(lambda _: self._vk._call(name, *arguments))

    def status(self, name: str, *arguments: Any) -> int:
        """Call without a check, even after `close`; 0 if the objects are destroyed or left to the VkDevice."""
        vk = self._vk
        code = vk.lifetime.try_use(lambda _: self.try_use(lambda _: getattr(vk.functions, name)(*arguments), 0), 0)
        return int(code)

    def pair(self, compute_half: Resource) -> None:
        """Set the compute side's half, which the context's `close` closes. Raises if the context is closed."""
        self.naming = compute_half.lifetime.naming
        self._compute_half = ref(compute_half)
        self._vk._check_open()

    def end_use(self) -> None:
        """Close the compute side's half."""
        compute_half = None if self._compute_half is None else self._compute_half()
        if compute_half is not None and not compute_half.closed:
            compute_half.close()

    @property
    def closed(self) -> bool:
        return self.state is not LIVE

    def close(self) -> None:
        """Destroy the objects. Idempotent. Vulkan's own work with them must be done."""
        retire(self)
        drain()

    def _destroy(self) -> None:
        self._vk.lifetime.try_use(self._destroy_each, None)  # does nothing once the VkDevice may be gone

    def _destroy_each(self, _: Any) -> None:
        vk = self._vk
        while self._handles:
            name, handle = self._handles.pop(0)
            getattr(vk.functions, name)(vk.device, handle, vk.api.ffi.NULL)


class _Fence(VulkanObject):
    """A fence after the queue's work at the context's `close`. It keeps the objects that the work may use."""

    allows_closed_parent = True


class Watched(VulkanObject):
    """A Vulkan semaphore that a bridge polls and signals."""


class VulkanContext(NoCopy):
    """The application's Vulkan objects, for the functions of :mod:`gpuinterop.vulkan`.

    You still own them. Before you destroy the VkDevice, call `close` or leave the ``with`` block: that destroys the
    Vulkan objects that were shared through the context. Exported arrays and pending compute work stay valid.

    If you pass an object of PyPI's ``vulkan`` as one of the handles, properties such as `SharedBuffer.vk_buffer` return
    such objects too; otherwise they return ints. PyPI's ``vulkan`` need not be installed.

    Parameters
    ----------
    instance, physical_device, device : VkInstance, VkPhysicalDevice, VkDevice
        PyPI vulkan's handles, or their values as ints.
    queue : VkQueue, optional
        Queue for `SharedHandoff.submit`. `close` waits for its work. Other threads must not use it during either call.
    queue_family_index : int, optional
        Family of the queue that uses the shared objects: ownership is transferred from and to it. On NVIDIA a handoff
        to CUDA costs much less on a transfer-only family than on a graphics or compute family.
    get_instance_proc_addr : int, optional
        Address of ``vkGetInstanceProcAddr``, if the handles come from another loader than the system's.
    label : str, optional
        Name of the object in messages, warnings and its `repr`.

    Raises
    ------
    BackendUnavailableError
        cffi or the loader is missing.
    ArgumentTypeError
        A value is not a handle, or its type shows another kind of handle.
    InvalidArgumentError
        A handle is null, or the physical device has no such queue family.

    Examples
    --------
    >>> with gi.vulkan.VulkanContext(instance, physical_device, vk_device, queue, queue_family_index=0) as context:
    ...     with gi.vulkan.share_buffer(context, device, 4096) as shared:
    ...         shared.fill(7)
    """

    def __init__(
        self,
        instance: Any,
        physical_device: Any,
        device: Any,
        queue: Any = None,
        queue_family_index: int | None = None,
        get_instance_proc_addr: Any = None,
        *,
        label: str | None = None,
    ) -> None:
        self.lifetime = lifetime.Lifetime("VulkanContext", label=label)
        handles = {
            "VkInstance": instance,
            "VkPhysicalDevice": physical_device,
            "VkDevice": device,
            "VkQueue": queue,
        }
        self.api = Api(handles, get_instance_proc_addr)
        self.instance = self.api.handle("VkInstance", instance, "instance")
        self.physical_device = self.api.handle("VkPhysicalDevice", physical_device, "physical_device")
        self.device = self.api.handle("VkDevice", device, "device")
        self.queue = None if queue is None else self.api.handle("VkQueue", queue, "queue")
        self.instance_functions = self.api.instance_functions(self.instance)
        self.functions = self.api.device_functions(self.instance_functions, self.device)
        self.physical = PhysicalDevice(self.api, self.instance_functions, self.physical_device)
        if queue_family_index is not None:
            queue_family_index = check_int(queue_family_index, "queue_family_index", minimum=0, maximum=MAX_32)
            if queue_family_index >= (count := len(self.physical.queue_families)):
                raise InvalidArgumentError(
                    "queue_family_index",
                    f"expected one of 0 to {count - 1}, got {queue_family_index}: {self.physical.name} has {count}; "
                    "pass the family of the queue.",
                )
        self.queue_family_index = queue_family_index
        self._submitting = threading.RLock()  # only one thread at a time may use the queue
        self._fences: list[VulkanObject] = []  # after the queue's work, once `close` was called
        self.lifetime.open()

    side: ClassVar[str] = "Vulkan"
    how_to_match: ClassVar[str] = "gpuinterop.vulkan.identity(physical_device)"

    @property
    def identity(self) -> DeviceIdentity:
        """Identity of the physical device (:func:`gpuinterop.vulkan.identity`)."""
        self._check_open()
        return self.physical.identity

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the driver (:func:`gpuinterop.vulkan.capabilities`)."""
        self._check_open()
        return self.physical.capabilities

    @property
    def is_cpu(self) -> bool:
        """Whether the device is software."""
        self._check_open()
        return self.physical.is_cpu

    @property
    def endpoint_gap(self) -> str:
        """Why no bridge can use the driver's timelines; empty if one can."""
        return self.physical.endpoint_gap

    def close(self, timeout: float | None = 10.0) -> None:
        """Close everything that was shared or bridged through the context, and destroy the Vulkan objects. Idempotent.

        `close` waits for the queue's work, and for streams with bridged waits and signals, because the bridge calls
        Vulkan. It does not wait for exported arrays or other compute work, because an import keeps the payload. Work of
        other queues with the shared objects must be done before.

        Afterwards gpuinterop does not call the VkDevice any more, so you can destroy it.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; None: no limit. If an exception ends a ``with`` block, the block waits for one second.

        Raises
        ------
        ArgumentTypeError
            `timeout` is not a number.
        ResourceBusyError
            `timeout` passed. Objects that the queue may still use are left to the VkDevice, and a
            `LeakedResourceWarning` names them. Streams that wait through a bridge continue and fail.
        """
        limit = check_timeout(timeout)
        refuse_reentry()
        context = self.lifetime
        if context.state is lifetime.OF_PARENT:
            return
        seconds_left = system.seconds_left(limit)
        system.under(self._submitting, self._fence_queue)
        system.until(self._is_unused, limit)
        streams = sorted({native.label for native in self._shared() if isinstance(native, Watched)})
        leaked: list[str] = []
        # Another closing thread may have submitted its fence meanwhile.
        if system.until(self._is_idle, seconds_left()):
            retire(context)
        else:
            _leave(context, LIVE, "Vulkan's queue is still working", leaked)
        # A call in progress needs a moment, even if waiting for the queue used up `timeout`.
        ended = system.until(lambda: self._is_over() or context.stays, None if limit is None else max(limit, _GRACE_S))
        if not ended or context.stays:
            _leave(context, lifetime.RETIRED, context.what_holds(), leaked)
        if leaked:
            late = f"{leaked[0]} {timeout:g} s after close()"
            if leaked[1:]:
                warn_leak(f"the Vulkan objects of {', '.join(leaked[1:])} are left to the VkDevice: {late}")
            raise ResourceBusyError(
                f"{late}, so the objects shared through the context are not destroyed; "
                "wait for that work before you close the context."
            )
        if streams:
            raise ResourceBusyError(
                f"a stream still uses {', '.join(streams)} {timeout:g} s after close(), and will fail; close the "
                "context when the streams are idle."
            )

    def _fence_queue(self) -> None:
        """Submit a fence to the queue, unless there is no queue, or no object that it could be using."""
        while self.queue is not None and self.lifetime.dependents and self.lifetime.state is LIVE:
            used = [native for native in self._shared() if not isinstance(native, Watched) and native.state is LIVE]
            fence, info = _Fence(self, "fence", used), self.api.new("VkFenceCreateInfo")
            with suppress(ResourceClosedError):  # another thread closed the context or one of `used`
                fence.make(lambda: fence.new("vkCreateFence", "VkFence", info))  # noqa: B023 - at once
                self.lifetime.use(lambda _: self._submit(fence))  # noqa: B023
                return

    def _submit(self, fence: VulkanObject) -> None:
        # A queue that refuses submissions belongs to a lost device, so no work is pending.
        if fence.status("vkQueueSubmit", self.queue, 0, self.api.ffi.NULL, fence.handle) >= 0:
            self._fences.append(fence)

    def _is_idle(self) -> bool:
        """Whether the queue has reached its fences, or never will."""
        fences = self._fences.copy()
        return all(fence.status("vkGetFenceStatus", self.device, fence.handle) != NOT_READY for fence in fences)

    def _is_unused(self) -> bool:
        """Close the compute side's halves, also those that another thread has just shared; then check the queue."""
        if self.lifetime.state is not LIVE:
            return True
        for native in self._shared():
            native.end_use()
        drain()
        return not any(isinstance(native, Watched) for native in self._shared()) and self._is_idle()

    def _is_over(self) -> bool:
        """Whether calls to the VkDevice have ended. Destroys the shared objects once no call or fence is pending."""
        context = self.lifetime
        if context.calls.copy():
            return False
        if context.state is lifetime.RETIRED and self._is_idle():
            for native in self._shared():
                retire(native)
                native.end_use()
            drain()
        return context.state in lifetime.FINAL

    def _shared(self) -> list[VulkanObject]:
        return [native for native in self.lifetime.dependents.copy() if isinstance(native, VulkanObject)]

    def __repr__(self) -> str:
        return f"<{self.lifetime.label} of {self.physical.name}{'' if self.lifetime.state is LIVE else ' closed'}>"

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        with suppress(GpuInteropError):  # never hide the first exception
            self.close(_GRACE_S)

    # -- for this package --------------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> int:
        """Call a device function; raise for a negative VkResult, or after `close`. `close` waits for the call."""
        return self.lifetime.use(lambda _: check_call(self.functions, name, *arguments))

    def _create(self, name: str, kind: str, info: Any) -> Any:
        """Call a ``vkCreate*`` or ``vkAllocateMemory`` of the usual form; return the handle."""
        out = self.api.ffi.new(f"{kind} *")
        self._call(name, self.device, info, self.api.ffi.NULL, out)
        return out[0]

    def _check_open(self) -> None:
        self.lifetime.check()

    def _destroy(self, name: str, handle: Any) -> None:
        """Call a ``vkDestroy*`` or ``vkFreeMemory`` of the usual form, unless the VkDevice may be destroyed."""
        self.lifetime.try_use(lambda _: getattr(self.functions, name)(self.device, handle, self.api.ffi.NULL), None)

    def _memory_type(self, bits: int, *preferences: int) -> tuple[int, int]:
        """The first memory type of `bits` with all flags of the earliest preference, or any type; and its flags."""
        properties = self.api.ffi.new("VkPhysicalDeviceMemoryProperties *")
        self.instance_functions.vkGetPhysicalDeviceMemoryProperties(self.physical_device, properties)
        types = [int(properties.memoryTypes[index].propertyFlags) for index in range(properties.memoryTypeCount)]
        for wanted in (*preferences, 0):
            for index, flags in enumerate(types):
                if bits >> index & 1 and flags & wanted == wanted:
                    return index, flags
        raise InvalidArgumentError("memory", f"expected a memory type of the device among {bits:#x}, got none.")

    def _family(self) -> int:
        """The queue family for ownership transfers."""
        if self.queue_family_index is None:
            raise InvalidArgumentError(
                "queue_family_index",
                "expected the family of the queue that uses the shared objects, got none; pass it to VulkanContext.",
            )
        return self.queue_family_index


@locked
def _leave(context: lifetime.Lifetime, state: lifetime.State, why: str, leaked: list[str]) -> None:
    """Stop calling the VkDevice, and leave it the objects that are not destroyed: they are never released."""
    if context.state is not state:
        return
    context.state = lifetime.LEAKED
    leaked.append(why)
    for native in context.dependents:
        if native.state in (LIVE, lifetime.RETIRED):
            native.problem = why
            native.state = lifetime.LEAKED
            leaked += () if isinstance(native, _Fence) else (native.label,)


def check_context(vk: object) -> VulkanContext:
    """Check for an open context first: looking up functions on a destroyed VkDevice would crash."""
    wanted = "a gpuinterop.vulkan.VulkanContext(instance, physical_device, device, queue, queue_family_index)"
    context = check_type(vk, VulkanContext, "vk", wanted)
    context._check_open()
    return context
