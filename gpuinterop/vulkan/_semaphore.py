"""Semaphores that both sides use: made in Vulkan, and imported by a gpuinterop device or bridged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from .. import system
from .._arguments import MAX_64, check_int, check_type
from .._core.lifetime import LIVE, Lifetime, marked
from ..bridge import Bridge, BridgedSemaphore, Endpoint
from ..capabilities import Operation
from ..errors import ArgumentTypeError, InvalidArgumentError
from ..graphics.sides import agree
from ..handles import Binary, HandleOrigin, OpaqueFd, OriginKind, SemaphoreHandle, Timeline, TimelineFd
from . import _api as c
from ._api import check
from ._context import VulkanContext, VulkanObject, Watched, check_context
from ._pair import Pair, check_device, export_fd, share

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.semaphore import ExternalSemaphore


K = TypeVar("K")


def semaphore_handle_type(kind: type) -> type[OpaqueFd | TimelineFd]:
    """The handle type that exports a kind of semaphore."""
    if kind is Binary:
        return OpaqueFd
    if kind is Timeline:
        return TimelineFd
    raise ArgumentTypeError("kind", f"expected gpuinterop.handles.Binary or Timeline, got {kind!r}.")


def create_semaphore(vk: VulkanContext, kind: type, *, exportable: bool = True) -> VulkanObject:
    """Create a VkSemaphore, the native's `handle`. Raises before any call to the driver if it cannot be exported."""
    handle_type = semaphore_handle_type(kind)
    new, chain = vk.api.new, vk.api.ffi.NULL
    if exportable:
        require_exportable_semaphore(vk, handle_type)
        chain = new("VkExportSemaphoreCreateInfo", handleTypes=c.SEMAPHORE_HANDLE_OPAQUE_FD)
    if kind is Timeline:
        chain = new("VkSemaphoreTypeCreateInfo", pNext=chain, semaphoreType=c.SEMAPHORE_TIMELINE)
    info, native = new("VkSemaphoreCreateInfo", pNext=chain), VulkanObject(vk, "VkSemaphore")
    native.make(lambda: native.new("vkCreateSemaphore", "VkSemaphore", info))
    return native


def require_exportable_semaphore(vk: VulkanContext, handle_type: type[OpaqueFd | TimelineFd]) -> None:
    """Raise if the driver cannot export this kind, because then the export call may crash (SwiftShader, timelines)."""
    vk.capabilities.require((Operation.IMPORT_SEMAPHORE, handle_type))
    _ = vk.functions.vkGetSemaphoreFdKHR  # raises if the application did not enable the extension


@overload
def export_semaphore(vk: VulkanContext, vk_semaphore: Any, kind: type[Timeline]) -> TimelineFd: ...
@overload
def export_semaphore(vk: VulkanContext, vk_semaphore: Any, kind: type[Binary]) -> OpaqueFd: ...
@overload
def export_semaphore(vk: VulkanContext, vk_semaphore: Any, kind: type) -> OpaqueFd | TimelineFd: ...
def export_semaphore(vk: VulkanContext, vk_semaphore: Any, kind: type) -> OpaqueFd | TimelineFd:
    """Export a ``VkSemaphore`` of your application. Calls ``vkGetSemaphoreFdKHR``.

    Parameters
    ----------
    vk : VulkanContext
    vk_semaphore : VkSemaphore
        Semaphore created with ``VkExportSemaphoreCreateInfo`` for ``OPAQUE_FD``.
    kind : type
        ``gpuinterop.handles.Binary`` or ``Timeline``: the semaphore's kind, which drivers do not report.

    Returns
    -------
    OpaqueFd or TimelineFd
        Handle with its origin, owned by the caller; an import consumes it.

    Raises
    ------
    UnsupportedError
        The driver reports that it cannot export this kind. The export call was not made.
    InvalidArgumentError
        The application did not enable the extension, or `vk_semaphore` is null.
    DriverError
        ``vkGetSemaphoreFdKHR`` failed.

    Examples
    --------
    >>> with gi.vulkan.share_semaphore(vk, device, gi.Binary) as shared:  # or a VkSemaphore of your own
    ...     with gi.vulkan.export_semaphore(vk, shared.vk_semaphore, gi.Binary) as handle:
    ...         semaphore = device.import_semaphore(handle)
    ...         semaphore.close()
    """
    check_context(vk)
    handle_type = semaphore_handle_type(kind)
    semaphore = vk.api.handle("VkSemaphore", vk_semaphore, "vk_semaphore")
    require_exportable_semaphore(vk, handle_type)
    info = vk.api.new("VkSemaphoreGetFdInfoKHR", semaphore=semaphore, handleType=c.SEMAPHORE_HANDLE_OPAQUE_FD)
    origin_kind = OriginKind.TIMELINE if kind is Timeline else OriginKind.BINARY
    origin = HandleOrigin(kind=origin_kind, device=vk.identity, trusted=True)
    return export_fd(vk, "vkGetSemaphoreFdKHR", info, handle_type, origin)


def import_binary_fd(vk: VulkanContext, fd: int) -> Any:
    """Make a VkSemaphore with the payload of `fd`. The caller owns the semaphore, and the driver owns `fd`."""
    semaphore = vk._create("vkCreateSemaphore", "VkSemaphore", vk.api.new("VkSemaphoreCreateInfo"))
    info = vk.api.new("VkImportSemaphoreFdInfoKHR", semaphore=semaphore, handleType=c.SEMAPHORE_HANDLE_OPAQUE_FD, fd=fd)
    try:
        vk._call("vkImportSemaphoreFdKHR", vk.device, info)
    except BaseException:
        vk._destroy("vkDestroySemaphore", semaphore)
        raise
    return semaphore


def counter_reader(vk: VulkanContext, keeper: Lifetime, semaphore: Any) -> Callable[[], int]:
    """Return a function for loops that reads a timeline's value, with reused arguments. One thread calls it at a time.

    `keeper` is the lifetime that keeps the semaphore: the context's, or the native's that owns it.
    """
    function, device = vk.functions.vkGetSemaphoreCounterValue, vk.device
    value, context = vk.api.ffi.new("uint64_t *"), vk.lifetime

    def read() -> int:
        with marked(keeper.calls, context.calls):
            if keeper.state is not LIVE or context.state is not LIVE:
                vk._check_open()
                keeper.check()
            check("vkGetSemaphoreCounterValue", function(device, semaphore, value))
            return int(value[0])

    return read


class TimelineEndpoint(Endpoint):
    """A timeline ``VkSemaphore`` of a Vulkan device in this process, for :class:`gpuinterop.bridge.Bridge`.

    The host polls it (``vkGetSemaphoreCounterValue``) and signals it (``vkSignalSemaphore``), so the driver need not
    export it: every driver with timeline semaphores works, including lavapipe and SwiftShader. ``vkWaitSemaphores`` is
    not used, because on some drivers it sleeps in steps of 10 ms.

    Parameters
    ----------
    vk : VulkanContext
        Context with ``VkPhysicalDeviceTimelineSemaphoreFeatures::timelineSemaphore`` enabled by the application.
    vk_semaphore : VkSemaphore
        Semaphore of type ``VK_SEMAPHORE_TYPE_TIMELINE``, which is not checked. You own it: destroy it when the bridged
        semaphore is released (`ExternalSemaphore.on_released`), or use :func:`share_semaphore`, which does that.
        :meth:`VulkanContext.close` closes its bridged semaphores and waits for them.

    Raises
    ------
    ArgumentTypeError
        `vk` is not a context, or `vk_semaphore` is not a handle.
    ResourceClosedError
        The context was closed.
    InvalidArgumentError
        The device has no timeline semaphores, or the application did not enable them.

    Examples
    --------
    >>> import vulkan
    >>> kind = vulkan.VkSemaphoreTypeCreateInfo(semaphoreType=vulkan.VK_SEMAPHORE_TYPE_TIMELINE)
    >>> vk_semaphore = vulkan.vkCreateSemaphore(vk_device, vulkan.VkSemaphoreCreateInfo(pNext=kind), None)
    >>> with gi.bridge.Bridge(device) as bridge:
    ...     semaphore = bridge.from_endpoint(gi.vulkan.TimelineEndpoint(vk, vk_semaphore))
    ...     semaphore.signal(stream, 1)
    ...     stream.synchronize(timeout=10)
    ...     semaphore.close(timeout=10)
    >>> vulkan.vkDestroySemaphore(vk_device, vk_semaphore, None)
    """

    kind = Timeline

    def __init__(self, vk: VulkanContext, vk_semaphore: Any) -> None:
        self._vk = check_context(vk)
        self._semaphore = vk.api.handle("VkSemaphore", vk_semaphore, "vk_semaphore")
        self._keeper: Lifetime = vk.lifetime
        """The lifetime that keeps the semaphore: the context's, or the native's that owns it."""
        _ = vk.functions.vkGetSemaphoreCounterValue  # raises if the application has not enabled timelines
        self.label = f"Vulkan timeline {vk.api.address(self._semaphore):#x}"

    def counter(self) -> int:
        """Return the semaphore's current value."""
        return counter_reader(self._vk, self._keeper, self._semaphore)()

    def wait(self, value: int, timeout: float) -> bool:
        return system.until(lambda: self.counter() >= value, timeout)

    def signal(self, value: int) -> None:
        value = check_int(value, "value", minimum=0, maximum=MAX_64)
        if (now := self.counter()) >= value:  # drivers accept it, but later waits never return
            raise InvalidArgumentError("value", f"{self.label} is at {now}: a timeline only grows; got {value}.")
        info = self._vk.api.new("VkSemaphoreSignalInfo", semaphore=self._semaphore, value=value)
        self._keeper.use(lambda _: self._vk._call("vkSignalSemaphore", self._vk.device, info))

    def close(self) -> None:
        """Do nothing: the caller owns the semaphore."""

    def _bridged(self, semaphore: BridgedSemaphore[Any]) -> None:
        native = Watched(self._vk, semaphore.label)
        native.open()
        semaphore.on_released(native.close)
        native.pair(semaphore)  # if that raises, the bridge closes the semaphore


class SharedSemaphore(Pair, Generic[K]):
    """One semaphore, in Vulkan and on the compute side. Made by :func:`share_semaphore`.

    Attributes
    ----------
    semaphore : ExternalSemaphore
        The compute side's semaphore.
    kind : type
        ``Binary`` or ``Timeline``.

    Examples
    --------
    >>> shared = gi.vulkan.share_semaphore(vk, device, gi.Binary)
    >>> submit(record(lambda commands: None), signal_semaphores=[shared.vk_semaphore], signal_values=[0])
    >>> shared.semaphore.wait(stream)
    >>> stream.synchronize(timeout=10)
    >>> vk.close()  # waits for the queue
    """

    def __init__(self, vk: VulkanContext, native: VulkanObject, semaphore: ExternalSemaphore[K], kind: type[K]) -> None:
        super().__init__(vk, native, semaphore)
        self.semaphore = semaphore
        self.kind = kind

    @property
    def vk_semaphore(self) -> Any:
        """The VkSemaphore (see `SharedBuffer.vk_buffer`)."""
        return self._vk_handle()

    def counter(self) -> int:
        """A timeline's current value (``vkGetSemaphoreCounterValue``). Does not wait."""
        if self.kind is not Timeline:
            raise InvalidArgumentError("kind", "expected a timeline, got a binary semaphore, which has no counter.")
        self.check_open()
        return counter_reader(self._vk, self.vulkan_object, self.vulkan_object.handle)()

    def close(self, timeout: float | None = None) -> None:
        """End use on both sides (see `SharedBuffer.close`). A bridged one ends when no stream uses it any more."""
        if isinstance(self.semaphore, BridgedSemaphore):
            self.semaphore.close(timeout)
        else:
            super().close(timeout)


@overload
def share_semaphore(
    vk: VulkanContext, device: Device, kind: type[K], *, bridge: Bridge | None = None, label: str | None = None
) -> SharedSemaphore[K]: ...
@overload
def share_semaphore(vk: VulkanContext, device: Device, *, label: str | None = None) -> SharedSemaphore[Binary]: ...
def share_semaphore(
    vk: VulkanContext, device: Device, kind: type[Any] = Binary, *, bridge: Bridge | None = None,
    label: str | None = None,
) -> SharedSemaphore[Any]:  # fmt: skip
    """Make a VkSemaphore that the compute side's streams wait for and signal.

    Native calls: ``vkCreateSemaphore``, ``vkGetSemaphoreFdKHR``, and the device's import.

    Parameters
    ----------
    vk : VulkanContext
    device : Device
    kind : type
        ``gpuinterop.handles.Binary`` or ``Timeline``. For a timeline, enable the feature
        (``VkPhysicalDeviceTimelineSemaphoreFeatures``).
    bridge : Bridge, optional
        A bridge of `device`, for timelines only: streams reach the semaphore through it, without export and import.
    label : str, optional
        Name of the object in messages, warnings and its `repr`.

    Returns
    -------
    SharedSemaphore
        The semaphore, which owns both sides; close it.

    Raises
    ------
    UnsupportedError
        One side does not support it; nothing was created.
    InvalidArgumentError
        `device` is another GPU, or not the bridge's. Or a bridge was passed for a binary semaphore, or the application
        did not enable an extension.
    DriverError
        A native call failed.

    Examples
    --------
    >>> with gi.bridge.Bridge(device) as bridge:
    ...     with gi.vulkan.share_semaphore(vk, device, gi.Timeline, bridge=bridge) as shared:
    ...         shared.semaphore.signal(stream, 1)
    ...         stream.synchronize(timeout=10)
    """
    check_device(vk, device)
    if bridge is None:
        agree(vk, device, (Operation.IMPORT_SEMAPHORE,), (semaphore_handle_type(kind),))
    else:
        check_type(bridge, Bridge, "bridge", "a gpuinterop.bridge.Bridge")
        if bridge.device is not device:
            raise InvalidArgumentError("bridge", f"expected one of {device.name}, got one of {bridge.device.name}.")
        if kind is not Timeline:
            raise InvalidArgumentError("kind", "expected Timeline, which the host can reach, got Binary.")
    native = create_semaphore(vk, kind, exportable=bridge is None)

    def take() -> ExternalSemaphore[Any]:
        if bridge is not None:
            endpoint = TimelineEndpoint(vk, native.handle)
            endpoint._keeper = native
            return bridge.from_endpoint(endpoint, label=label)
        # Export at once: SwiftShader blocks in vkGetSemaphoreFdKHR while a queue waits for the semaphore.
        with native.use(lambda semaphore: export_semaphore(vk, semaphore, kind)) as handle:
            return device.import_semaphore(cast(SemaphoreHandle[Any], handle), label=label)

    shared = share(native, take, lambda semaphore: SharedSemaphore(vk, native, semaphore, kind))
    if bridge is not None:
        shared.semaphore.on_released(native.close)
    return shared
