"""Vulkan as the independent party: memory, semaphores and a compute shader on a device of its own.

Importable without PyPI's `vulkan`; only making a :class:`VulkanExporter` needs it.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

from .._arguments import check_nbytes
from .._core.ownership import check_size, lend
from ..bridge import Endpoint
from ..capabilities import Capabilities, Cell, Operation, Scope
from ..errors import (
    ArgumentTypeError,
    BackendUnavailableError,
    DeviceNotFoundError,
    DriverError,
    GpuInteropError,
    HandleError,
    InvalidArgumentError,
    LeakedResourceWarning,
    ResourceClosedError,
)
from ..handles import (
    AllocationHandle,
    AnySemaphoreHandle,
    Binary,
    DeviceIdentity,
    FdHandle,
    MemoryHandle,
    OpaqueFd,
    Timeline,
    VmmFd,
)
from ..vulkan import _api as c
from ..vulkan._api import Api, Functions, check, check_call
from ..vulkan._context import VulkanContext
from ..vulkan._endpoint import TimelineEndpoint
from ..vulkan._export import (
    ExportableBuffer,
    create_buffer,
    create_semaphore,
    export_semaphore,
    import_semaphore_fd,
    memory_types,
    semaphore_handle_type,
)
from ..vulkan._query import BUFFER_USAGE, PhysicalDevice, device_extensions
from .base import (
    Exporter,
    ExporterMemory,
    ExporterSemaphore,
    Fill,
    ImageParameters,
    Submission,
    Wave,
    WaveParameters,
)

if TYPE_CHECKING:
    from .images import VulkanImage

__all__ = ["DriverList", "VulkanDriver", "VulkanExporter", "list_drivers"]

_VALIDATION_LAYER = "VK_LAYER_KHRONOS_validation"
_PATIENCE = 5.0
"""Seconds that a close waits for work before it takes the signals that the work waits for for lost."""
_GROUP = 16  # local_size in wave.comp


@dataclass(frozen=True, slots=True, kw_only=True)
class VulkanDriver:
    """One physical device, for reports.

    Attributes
    ----------
    index : int
        Its place in the loader's order: what ``VulkanExporter(device_index=...)`` opens exactly this one with.
    name : str
        Of the device.
    driver, version : str
        Of the driver.
    identity : DeviceIdentity
    capabilities : Capabilities
        As :func:`gpuinterop.vulkan.capabilities`.
    """

    index: int
    name: str
    driver: str
    version: str
    identity: DeviceIdentity
    capabilities: Capabilities


class DriverList(list[VulkanDriver]):
    """What :func:`list_drivers` found.

    Attributes
    ----------
    reason : str
        Why the list is empty, or what is wrong with a device that is missing from it; empty otherwise.
    """

    reason: str = ""


def list_drivers() -> DriverList:
    """List every physical device that the Vulkan loader finds. Never raises for want of Vulkan.

    Returns
    -------
    DriverList
        Empty, with its `reason`, where PyPI's `vulkan`, the loader or every driver is missing. A device whose driver
        fails is left out, and stands in the `reason`.
    """
    found = DriverList()
    try:
        with _Instance(validation=False) as instance:
            problems = []
            for index, physical in enumerate(instance.physical_devices()):
                label = f"physical device {index}"
                try:
                    label = physical.name
                    found.append(_describe(index, physical))
                except GpuInteropError as error:  # one broken driver must not hide the others
                    problems.append(f"{label}: {error}")
            found.reason = "; ".join(problems)
    except (BackendUnavailableError, DriverError) as error:
        found.reason = str(error)
    if not found and not found.reason:
        found.reason = "the Vulkan loader lists no physical device."
    return found


def _describe(index: int, physical: PhysicalDevice) -> VulkanDriver:
    return VulkanDriver(
        index=index,
        name=physical.name,
        driver=physical.driver_name,
        version=physical.driver_version,
        identity=physical.identity,
        capabilities=physical.capabilities,
    )


class _Instance:
    """A VkInstance, with the validation layer's messages where it was asked for."""

    def __init__(self, *, validation: bool) -> None:
        self.api = api = Api()
        self.validation_messages: list[str] = []
        ffi, new = api.ffi, api.new
        loader = api.global_functions()
        layers: list[str] = []
        extensions: list[str] = []
        chain = ffi.NULL
        if validation:
            if _VALIDATION_LAYER not in _layers(api, loader):
                raise BackendUnavailableError(
                    f"validation was asked for, and the loader finds no {_VALIDATION_LAYER}.",
                    fix="Install the Vulkan validation layers (vulkan-validationlayers), or set VK_LAYER_PATH.",
                )
            layers, extensions = [_VALIDATION_LAYER], ["VK_EXT_debug_utils"]
            self._callback = ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT", self._message)
            chain = new(
                "VkDebugUtilsMessengerCreateInfoEXT",
                messageSeverity=0x1000 | 0x100,  # error, warning
                messageType=0x2 | 0x4,  # validation, performance; "general" is the loader on others' drivers
                pfnUserCallback=self._callback,
            )
        application = new("VkApplicationInfo", apiVersion=1 << 22 | 1 << 12)
        version = ffi.new("uint32_t *")
        if loader.has("vkEnumerateInstanceVersion"):
            check_call(loader, "vkEnumerateInstanceVersion", version)
            if version[0] >= (1 << 22 | 2 << 12):  # 1.2: timeline semaphores without an extension
                application.apiVersion = 1 << 22 | 2 << 12
        _keep_drivers_loaded(api, loader)
        info = new(
            "VkInstanceCreateInfo",
            pNext=chain,
            pApplicationInfo=application,
            enabledLayerCount=len(layers),
            ppEnabledLayerNames=api.strings(layers),
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=api.strings(extensions),
        )
        out = ffi.new("VkInstance *")
        check_call(loader, "vkCreateInstance", info, ffi.NULL, out)
        self.handle = out[0]
        self.functions = api.instance_functions(self.handle)
        self._messenger = ffi.NULL
        if validation:
            messenger = ffi.new("VkDebugUtilsMessengerEXT *")
            check_call(self.functions, "vkCreateDebugUtilsMessengerEXT", self.handle, chain, ffi.NULL, messenger)
            self._messenger = messenger[0]

    def _message(self, severity: int, kind: int, data: Any, user: Any) -> int:
        self.validation_messages.append(self.api.text(data.pMessage))
        return 0

    def physical_devices(self) -> list[PhysicalDevice]:
        """In the loader's order."""
        ffi = self.api.ffi
        count = ffi.new("uint32_t *")
        check_call(self.functions, "vkEnumeratePhysicalDevices", self.handle, count, ffi.NULL)
        handles = ffi.new("VkPhysicalDevice[]", count[0])
        check_call(self.functions, "vkEnumeratePhysicalDevices", self.handle, count, handles)
        return [PhysicalDevice(self.api, self.functions, handles[i]) for i in range(count[0])]

    def close(self) -> None:
        null = self.api.ffi.NULL
        handle, self.handle = self.handle, None
        if handle is not None:
            if self._messenger != null:
                self.functions.vkDestroyDebugUtilsMessengerEXT(handle, self._messenger, null)
            self.functions.vkDestroyInstance(handle, null)

    def __enter__(self) -> _Instance:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_anchor: list[Any] = []
_anchor_lock = threading.Lock()


def _keep_drivers_loaded(api: Api, loader: Functions) -> None:
    """Keep one bare instance for the life of the process, so that the loader never unloads the drivers.

    NVIDIA's (580) can be loaded some thirty times in one process; then "cannot allocate memory in static TLS block"
    hides the GPU.
    """
    with _anchor_lock:
        if not _anchor:
            out = api.ffi.new("VkInstance *")
            check_call(loader, "vkCreateInstance", api.new("VkInstanceCreateInfo"), api.ffi.NULL, out)
            _anchor.append(out[0])


def _layers(api: Api, loader: Functions) -> set[str]:
    count = api.ffi.new("uint32_t *")
    check_call(loader, "vkEnumerateInstanceLayerProperties", count, api.ffi.NULL)
    listed = api.ffi.new("VkLayerProperties[]", count[0])
    check_call(loader, "vkEnumerateInstanceLayerProperties", count, listed)
    return {api.text(listed[i].layerName) for i in range(count[0])}


def _choose(devices: Sequence[PhysicalDevice], driver: str | None, index: int | None) -> PhysicalDevice:
    if driver is not None and not isinstance(driver, str):
        raise ArgumentTypeError("driver", f"must be a str, not {type(driver).__name__}.")
    if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
        raise ArgumentTypeError("device_index", f"must be an int, not {type(index).__name__}.")
    matching = devices
    if driver is not None:
        # "lavapipe" is what everybody calls it; it calls itself llvmpipe.
        wanted = driver.lower().replace("lavapipe", "llvmpipe")
        matching = [d for d in devices if wanted in f"{d.name}\n{d.driver_name}".lower()]
    elif index is None:

        def rank(device: PhysicalDevice) -> int:
            if not device.is_cpu:
                return 0
            return 1 if device.capabilities.supports((Operation.IMPORT_SEMAPHORE, OpaqueFd)) else 2

        matching = sorted(devices, key=rank)
    position = index or 0
    if not 0 <= position < len(matching):
        names = ", ".join(f"{d.name!r} ({d.driver_name})" for d in devices) or "none"
        wanted = f"driver {driver!r}, device_index {position}" if driver else f"device_index {position}"
        raise DeviceNotFoundError(f"no Vulkan device for {wanted}; the loader finds: {names}.")
    return matching[position]


class _Context(VulkanContext):
    """A context whose handles may say that they come from another device: one that is simulated on top of this."""

    said: DeviceIdentity | None = None

    @property
    def identity(self) -> DeviceIdentity:
        return self.said or super().identity


class _Device:
    """A VkDevice with one or two queues of a family that computes."""

    def __init__(self, instance: _Instance, physical: PhysicalDevice) -> None:
        api, ffi, new = instance.api, instance.api.ffi, instance.api.new
        family, queues = self._family(physical)
        extensions = device_extensions(physical)
        chain = ffi.NULL
        if physical.has_timelines:
            chain = new("VkPhysicalDeviceTimelineSemaphoreFeatures", timelineSemaphore=1)
        queue_info = new(
            "VkDeviceQueueCreateInfo",
            queueFamilyIndex=family,
            queueCount=queues,
            pQueuePriorities=ffi.new("float[]", [1.0] * queues),
        )
        info = new(
            "VkDeviceCreateInfo",
            pNext=chain,
            queueCreateInfoCount=1,
            pQueueCreateInfos=queue_info,
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=api.strings(extensions),
        )
        out = ffi.new("VkDevice *")
        check_call(instance.functions, "vkCreateDevice", physical.handle, info, ffi.NULL, out)
        self.vk = _Context(instance.handle, physical.handle, out[0], queue_family_index=family)
        self.vk._physical = physical  # what it was asked already need not be asked again
        queue = ffi.new("VkQueue *")
        self.queues = []
        for index in range(queues):
            self.vk.functions.vkGetDeviceQueue(out[0], family, index, queue)
            self.queues.append(queue[0])
        self.vk.queue = self.queues[0]

    @staticmethod
    def _family(physical: PhysicalDevice) -> tuple[int, int]:
        for wanted in (c.QUEUE_GRAPHICS | c.QUEUE_COMPUTE, c.QUEUE_COMPUTE):
            for index, (flags, queues) in enumerate(physical.queue_families):
                if flags & wanted == wanted:
                    return index, min(2, queues)
        raise DeviceNotFoundError(f"{physical.name} has no queue that computes.")

    def close(self) -> None:
        self.vk.functions.vkDestroyDevice(self.vk.device, self.vk.api.ffi.NULL)


class _Pending(Submission):
    """Work on a queue, with the fence that tells its end."""

    def __init__(
        self,
        exporter: VulkanExporter,
        fence: Any,
        waits: Sequence[tuple[VulkanSemaphore, int]],
        uses: frozenset[object],
        commands: Any,
    ) -> None:
        self._exporter = exporter
        self._fence = fence
        self._waits = waits
        self._uses = uses
        self._commands = commands
        self._finished = False
        self._waiters = 0
        self._sent = False  # whether the queue may have it

    def done(self, timeout: float = 0.0) -> bool:
        exporter = self._exporter
        with exporter._lock:
            if self._finished:
                return True
            if exporter._closed:
                raise ResourceClosedError("the Vulkan exporter was closed.")
            self._waiters += 1  # the fence is not used again while somebody waits for it
        vk = exporter._vk
        try:
            fences = vk.api.array("VkFence", [self._fence])
            nanoseconds = max(0, min(int(timeout * 1e9), 2**63))
            code = vk.functions.vkWaitForFences(vk.device, 1, fences, 1, nanoseconds)
        finally:
            with exporter._lock:
                self._waiters -= 1
        check("vkWaitForFences", code)
        if code == c.SUCCESS:
            exporter._retire(self)
        return self._finished

    def close(self) -> None:
        """Wait for the work. What waits for a signal that never comes stays with the exporter until it closes."""
        if not self._finished and not self._exporter._closed:
            self.done(_PATIENCE)

    def _release(self) -> None:
        """Signal what the work waits for."""
        for semaphore, value in self._waits:
            semaphore._force(value)


class VulkanMemory(ExporterMemory):
    """A buffer with exportable memory, or on memory that a device has allocated.

    Written and read through the mapping where the host sees the memory, else through a staging buffer and the queue.
    """

    def __init__(self, exporter: VulkanExporter, size: int, handle: VmmFd | None = None) -> None:
        self._exporter = exporter
        self._lock = threading.Lock()
        vk = exporter._open()
        self._imported = handle is not None
        self._buffer = create_buffer(vk, size, BUFFER_USAGE) if handle is None else _import_buffer(vk, size, handle)
        self.size = self._buffer.size
        self.dedicated = self._buffer.dedicated
        host = c.MEMORY_HOST_VISIBLE | c.MEMORY_HOST_COHERENT
        self._staging: _Staging | None = None
        self._bytes: Any = None
        try:
            # A GPU's caches are its own: also where the host sees its memory, a copy with a barrier to the host's
            # reads is what makes the bytes certain.
            if vk.is_cpu and self._buffer.flags & host == host and not exporter._staged:
                self._bytes = _map(vk, self._buffer.memory, self.size)
            exporter._children[self] = None
        except BaseException:
            self._buffer.close()
            raise

    @property
    def vk_buffer(self) -> Any:
        """The VkBuffer."""
        return self._buffer.buffer

    def export(self) -> MemoryHandle:
        self._check()
        if self._imported:
            raise InvalidArgumentError("memory", "was imported; export it where it was allocated.")
        return self._buffer.export()

    def write(self, offset: int, data: bytes) -> None:
        self._check(offset, len(data))
        if not data:
            return
        if self._bytes is not None:
            self._bytes[offset : offset + len(data)] = data
            return
        with self._lock:
            staging = self._stage(len(data))
            staging.bytes[: len(data)] = data
            self._copy(staging.buffer, self._buffer.buffer, 0, offset, len(data))

    def read(self, offset: int, size: int) -> bytes:
        self._check(offset, size)
        if not size:
            return b""
        if self._bytes is not None:
            return bytes(self._bytes[offset : offset + size])
        with self._lock:
            staging = self._stage(size)
            self._copy(self._buffer.buffer, staging.buffer, offset, 0, size)
            return bytes(staging.bytes[:size])

    def _stage(self, size: int) -> _Staging:
        """A staging buffer of `size` bytes or more; the last one is kept."""
        if self._staging is None or self._staging.size < size:
            staging, self._staging = self._staging, None
            if staging is not None:
                staging.close()
            self._staging = _Staging(self._exporter._vk, size)
        return self._staging

    def _copy(self, source: Any, target: Any, source_offset: int, target_offset: int, size: int) -> None:
        exporter, vk, shared = self._exporter, self._exporter._vk, self._buffer.buffer
        new, functions, null = vk.api.new, vk.functions, vk.api.ffi.NULL
        region = new("VkBufferCopy", srcOffset=source_offset, dstOffset=target_offset, size=size)

        def record(commands: Any) -> None:
            _acquire(vk, commands, shared, c.STAGE_TRANSFER, c.ACCESS_TRANSFER_READ | c.ACCESS_TRANSFER_WRITE)
            functions.vkCmdCopyBuffer(commands, source, target, 1, region)
            to_host = new("VkMemoryBarrier", srcAccessMask=c.ACCESS_TRANSFER_WRITE, dstAccessMask=c.ACCESS_HOST_READ)
            functions.vkCmdPipelineBarrier(commands, c.STAGE_TRANSFER, c.STAGE_HOST, 0, 1, to_host, 0, null, 0, null)
            _release(vk, commands, shared, c.STAGE_TRANSFER, c.ACCESS_TRANSFER_READ | c.ACCESS_TRANSFER_WRITE)

        # Not on the queue that waits for semaphores, where there is another: an oracle must not wait behind them.
        pending = exporter._submit((), record, (), uses=(self,), queue=exporter._device.queues[-1])
        if not pending.done(30.0):
            raise DriverError("vkWaitForFences", c.TIMEOUT, c.result_name(c.TIMEOUT), "a copy took over 30 s")

    def _check(self, offset: int = 0, size: int = 0) -> None:
        if self._buffer.closed:
            raise ResourceClosedError("the exporter's memory was closed.")
        if offset < 0 or size < 0 or offset + size > self.size:
            raise InvalidArgumentError(
                "offset", f"bytes {offset} to {offset + size} do not lie in {self.size} bytes of memory."
            )

    def close(self) -> None:
        if not self._buffer.closed and self._exporter._settle(self):
            self._bytes = None  # freeing the memory unmaps it
            staging, self._staging = self._staging, None  # first, as in Native.close()
            if staging is not None:
                staging.close()
            self._buffer.close()
        self._exporter._children.pop(self, None)


def _import_buffer(vk: VulkanContext, size: int, handle: VmmFd) -> ExportableBuffer:
    """A VkBuffer over the whole of a device's allocation (``VkImportMemoryFdInfoKHR``, as ``OPAQUE_FD``)."""
    size = check_nbytes(size)
    native = ExportableBuffer(vk, "VkBuffer")
    native.size, native.dedicated, native.handle_type = size, False, OpaqueFd
    native.make(lambda: _import_into(vk, native, handle))
    return native


def _import_into(vk: VulkanContext, native: ExportableBuffer, handle: VmmFd) -> None:
    new, size, bit = vk.api.new, native.size, c.MEMORY_HANDLE_OPAQUE_FD
    external = new("VkExternalMemoryBufferCreateInfo", handleTypes=bit)
    info = new("VkBufferCreateInfo", pNext=external, size=size, usage=BUFFER_USAGE)
    native.buffer = native.new("vkCreateBuffer", "VkBuffer", info)
    requirements = vk.api.ffi.new("VkMemoryRequirements *")
    vk.call("vkGetBufferMemoryRequirements", vk.device, native.buffer, requirements)
    if requirements.size > size:
        raise InvalidArgumentError("size", f"a buffer of {size} bytes needs {requirements.size}: allocate more.")
    index = memory_types(vk, requirements.memoryTypeBits)
    native.flags = vk.memory_flags(index)

    def take(lent: Any) -> None:
        chain = new("VkImportMemoryFdInfoKHR", handleType=bit, fd=lent.fd)
        info = new("VkMemoryAllocateInfo", pNext=chain, allocationSize=size, memoryTypeIndex=index)
        native.memory = native.new("vkAllocateMemory", "VkDeviceMemory", info)
        vk.call("vkBindBufferMemory", vk.device, native.buffer, native.memory, 0)

    # Drivers differ on whose the descriptor is after a failure; lend() settles that.
    lend(handle, lambda lent: native.whole(lambda: take(lent)), user="VulkanExporter.import_memory()")


class _Staging:
    """Host memory that the queue can copy from and to."""

    def __init__(self, vk: VulkanContext, size: int) -> None:
        self._vk = vk
        self.size = size
        with ExitStack() as undo:
            usage = c.BUFFER_TRANSFER_SRC | c.BUFFER_TRANSFER_DST
            info = vk.api.new("VkBufferCreateInfo", size=size, usage=usage)
            self.buffer = vk.create("vkCreateBuffer", "VkBuffer", info)
            undo.callback(vk.destroy, "vkDestroyBuffer", self.buffer)
            requirements = vk.api.ffi.new("VkMemoryRequirements *")
            vk.functions.vkGetBufferMemoryRequirements(vk.device, self.buffer, requirements)
            index = vk.memory_type(requirements.memoryTypeBits, c.MEMORY_HOST_VISIBLE | c.MEMORY_HOST_COHERENT)
            info = vk.api.new("VkMemoryAllocateInfo", allocationSize=requirements.size, memoryTypeIndex=index)
            self.memory = vk.create("vkAllocateMemory", "VkDeviceMemory", info)
            undo.callback(vk.destroy, "vkFreeMemory", self.memory)
            vk.call("vkBindBufferMemory", vk.device, self.buffer, self.memory, 0)
            self.bytes = _map(vk, self.memory, size)
            undo.pop_all()

    def close(self) -> None:
        self._vk.destroy("vkDestroyBuffer", self.buffer)
        self._vk.destroy("vkFreeMemory", self.memory)


def _map(vk: VulkanContext, memory: Any, size: int) -> Any:
    address = vk.api.ffi.new("void **")
    vk.call("vkMapMemory", vk.device, memory, 0, c.WHOLE_SIZE, 0, address)
    return vk.api.ffi.buffer(address[0], size)


def _acquire(vk: VulkanContext, commands: Any, buffer: Any, stage: int, access: int) -> None:
    """Take ownership back from the other side; the source stage joins the semaphore's wait."""
    _barrier(vk, commands, buffer, (stage, 0, c.QUEUE_FAMILY_EXTERNAL), (stage, access, vk.family()))


def _release(vk: VulkanContext, commands: Any, buffer: Any, stage: int, access: int) -> None:
    _barrier(vk, commands, buffer, (stage, access, vk.family()), (c.STAGE_BOTTOM_OF_PIPE, 0, c.QUEUE_FAMILY_EXTERNAL))


def _barrier(
    vk: VulkanContext, commands: Any, buffer: Any, source: tuple[int, int, int], target: tuple[int, int, int]
) -> None:
    null = vk.api.ffi.NULL
    barrier = vk.api.new(
        "VkBufferMemoryBarrier",
        srcAccessMask=source[1],
        dstAccessMask=target[1],
        srcQueueFamilyIndex=source[2],
        dstQueueFamilyIndex=target[2],
        buffer=buffer,
        size=c.WHOLE_SIZE,
    )
    vk.functions.vkCmdPipelineBarrier(commands, source[0], target[0], 0, 0, null, 1, barrier, 0, null)


class VulkanSemaphore(ExporterSemaphore):
    """A semaphore that can be exported; or, with ``exportable=False``, one for this device and its host alone."""

    def __init__(self, exporter: VulkanExporter, kind: type, *, exportable: bool = True) -> None:
        self._exporter = exporter
        self.kind = kind
        vk = exporter._open()
        self._semaphore = create_semaphore(vk, kind, vk.create, exportable=exportable)
        self._payload: FdHandle | None = None
        self._unheard: list[_Pending] = []
        """Waits on the queue whose caller ran out of time: each takes a signal, and is whose wait comes next."""
        if not exportable:
            exporter._children[self] = None
            return
        try:
            # Exported once, while nothing waits: on SwiftShader vkGetSemaphoreFdKHR blocks as long as a queue waits
            # for the semaphore. Duplicates of the descriptor are the same payload.
            self._payload = export_semaphore(vk, self._semaphore, kind)
        except BaseException:
            vk.destroy("vkDestroySemaphore", self._semaphore)
            raise
        exporter._children[self] = None

    def export(self) -> AnySemaphoreHandle:
        self._handle()
        if self._payload is None:
            self._exporter.capabilities.require((Operation.IMPORT_SEMAPHORE, semaphore_handle_type(self.kind)))
            raise InvalidArgumentError("semaphore", "was made for this device alone.")
        return cast(AnySemaphoreHandle, self._payload.duplicate())

    def _handle(self) -> Any:
        if self._semaphore is None:
            raise ResourceClosedError("the exporter's semaphore was closed.")
        return self._semaphore

    def signal(self, value: int = 0) -> None:
        semaphore = self._handle()
        if self.kind is Timeline:
            self._host_signal(semaphore, value)
        elif self._exporter._busy():
            # A queue runs in order: behind a wait for this very signal it would never be reached.
            self._rescue()
        else:
            self._exporter._submit((), None, ((self, 0),))

    def wait(self, value: int = 0, *, timeout: float) -> bool:
        """As :meth:`ExporterSemaphore.wait`, with one difference.

        A binary wait that ran out of time stays on the queue. The next wait for this semaphore, here or of a
        submission, takes its place: a signal that came in between is seen, not lost. Until then whatever is submitted
        later stays behind it, also what has nothing to do with this semaphore, since a queue runs in order; reads and
        writes of memory pass it where the family has a second queue, which SwiftShader's has not.
        """
        semaphore = self._handle()
        if self.kind is Binary:
            pending = self._adopt() or self._exporter._submit(((self, 0),), None, ())
            finished = False
            try:
                finished = pending.done(timeout)
            finally:
                if not finished:
                    self._unheard.append(pending)
            return finished
        # The counter is polled: vkWaitSemaphores sleeps in steps of 10 ms on NVIDIA.
        deadline = time.monotonic() + timeout
        pause = 20e-6
        while self.counter(semaphore) < value:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)
        return True

    def _adopt(self) -> _Pending | None:
        """Take over a wait whose caller ran out of time."""
        try:
            return self._unheard.pop(0)
        except IndexError:
            return None

    def endpoint(self) -> Endpoint:
        if self.kind is Binary:
            raise InvalidArgumentError("kind", "Vulkan's binary semaphores cannot be reached from the host.")
        return TimelineEndpoint(self._exporter._open(), self._handle())

    def counter(self, semaphore: Any) -> int:
        """A timeline's value now."""
        vk = self._exporter._vk
        value = vk.api.ffi.new("uint64_t *")
        vk.call("vkGetSemaphoreCounterValue", vk.device, semaphore, value)
        return int(value[0])

    def _host_signal(self, semaphore: Any, value: int) -> None:
        vk = self._exporter._vk
        vk.call("vkSignalSemaphore", vk.device, vk.api.new("VkSemaphoreSignalInfo", semaphore=semaphore, value=value))

    def _rescue(self) -> None:
        assert self._payload is not None  # binary ones are always exported
        self._exporter._rescue(self._payload)

    def _force(self, value: int) -> None:
        """Give a pending wait the signal that will never come."""
        semaphore = self._handle()
        if self.kind is Binary:
            self._rescue()
        elif self.counter(semaphore) < value:
            self._host_signal(semaphore, value)

    def close(self) -> None:
        exporter = self._exporter
        if self._semaphore is not None and exporter._settle(self):
            semaphore, self._semaphore = self._semaphore, None  # first, as in Native.close()
            exporter._vk.destroy("vkDestroySemaphore", semaphore)
        if self._payload is not None:
            self._payload.close()
        exporter._children.pop(self, None)


class VulkanWave(Wave):
    """The wave as a compute shader on the exporter's queue.

    Attributes
    ----------
    memory : VulkanMemory
        Both slots.
    """

    def __init__(
        self, exporter: VulkanExporter, parameters: WaveParameters, kind: type | None, *, exportable: bool = True
    ) -> None:
        if parameters.width < 3 or parameters.height < 3:
            raise InvalidArgumentError(
                "parameters", f"a wave needs 3 x 3 cells, not {parameters.width} x {parameters.height}."
            )
        self._exporter = exporter
        self.parameters = parameters
        self.kind = kind
        vk = exporter._open()
        self._closed = False
        self._aborted = False
        self._undo = ExitStack()
        with ExitStack() as undo:
            # Semaphores first: what the driver does not export is refused before anything else is made.
            self._forth = None
            if kind is not None:
                self._forth = undo.enter_context(exporter.create_semaphore(kind, exportable=exportable))
            self._back = self._forth
            if kind is Binary:
                self._back = undo.enter_context(exporter.create_semaphore(kind))
            self.memory = undo.enter_context(exporter.create_memory(parameters.size))
            self.memory_size = self.memory.size
            self.dedicated = self.memory.dedicated
            self._pipeline(vk, undo)
            self._commands: list[Any] = []
            undo.callback(exporter._free_commands, self._commands)
            with exporter._lock:  # recording uses the pool, as allocating does
                for parity in range(2):
                    self._commands.append(exporter._allocate())
                    self._record(vk, self._commands[-1], parity)
            self._clear(vk)
            self._undo = undo.pop_all()
        exporter._children[self] = None

    def _pipeline(self, vk: VulkanContext, undo: ExitStack) -> None:
        new, ffi = vk.api.new, vk.api.ffi

        def create(call: str, kind: str, info: Any, destroy: str) -> Any:
            handle = vk.create(call, kind, info)
            undo.callback(vk.destroy, destroy, handle)
            return handle

        code = (files("gpuinterop") / "exporters" / "shaders" / "wave.spv").read_bytes()
        info = new("VkShaderModuleCreateInfo", codeSize=len(code), pCode=ffi.from_buffer("uint32_t[]", code))
        module = vk.create("vkCreateShaderModule", "VkShaderModule", info)
        try:
            binding = new(
                "VkDescriptorSetLayoutBinding", descriptorType=7, descriptorCount=1, stageFlags=0x20
            )  # storage buffer, compute
            info = new("VkDescriptorSetLayoutCreateInfo", bindingCount=1, pBindings=binding)
            set_layout = create(
                "vkCreateDescriptorSetLayout", "VkDescriptorSetLayout", info, "vkDestroyDescriptorSetLayout"
            )
            layouts = vk.api.array("VkDescriptorSetLayout", [set_layout])
            constants = new("VkPushConstantRange", stageFlags=0x20, offset=0, size=24)
            info = new(
                "VkPipelineLayoutCreateInfo",
                setLayoutCount=1,
                pSetLayouts=layouts,
                pushConstantRangeCount=1,
                pPushConstantRanges=constants,
            )
            self._layout = create("vkCreatePipelineLayout", "VkPipelineLayout", info, "vkDestroyPipelineLayout")
            name = ffi.new("char[]", b"main")
            info = new("VkComputePipelineCreateInfo", layout=self._layout, basePipelineIndex=-1)
            info.stage.sType = 18  # VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO
            info.stage.stage = 0x20
            info.stage.module = module
            info.stage.pName = name
            out = ffi.new("VkPipeline *")
            vk.call("vkCreateComputePipelines", vk.device, ffi.NULL, 1, info, ffi.NULL, out)
            self._shader = out[0]
            undo.callback(vk.destroy, "vkDestroyPipeline", self._shader)
        finally:
            vk.destroy("vkDestroyShaderModule", module)
        pool_size = new("VkDescriptorPoolSize", type=7, descriptorCount=1)
        info = new("VkDescriptorPoolCreateInfo", maxSets=1, poolSizeCount=1, pPoolSizes=pool_size)
        pool = create("vkCreateDescriptorPool", "VkDescriptorPool", info, "vkDestroyDescriptorPool")
        info = new("VkDescriptorSetAllocateInfo", descriptorPool=pool, descriptorSetCount=1, pSetLayouts=layouts)
        self._sets = ffi.new("VkDescriptorSet[1]")
        vk.call("vkAllocateDescriptorSets", vk.device, info, self._sets)
        buffer_info = new("VkDescriptorBufferInfo", buffer=self.memory.vk_buffer, range=self.parameters.size)
        write = new(
            "VkWriteDescriptorSet",
            dstSet=self._sets[0],
            descriptorCount=1,
            descriptorType=7,
            pBufferInfo=buffer_info,
        )
        vk.functions.vkUpdateDescriptorSets(vk.device, 1, write, 0, ffi.NULL)

    def _record(self, vk: VulkanContext, commands: Any, parity: int) -> None:
        functions, ffi, p = vk.functions, vk.api.ffi, self.parameters
        stage, access = c.STAGE_COMPUTE_SHADER, c.ACCESS_SHADER_READ | c.ACCESS_SHADER_WRITE
        constants = ffi.new("uint32_t[6]")
        floats = ffi.cast("float *", constants)
        constants[0], constants[1] = p.width, p.height
        floats[2], floats[3] = p.courant2, p.damping
        constants[4], constants[5] = parity, 1 - parity
        # Frame k and frame k + 2 may be on the queue at once: the same commands, hence simultaneous use.
        begin = vk.api.new("VkCommandBufferBeginInfo", flags=0x4)
        vk.call("vkBeginCommandBuffer", commands, begin)
        _acquire(vk, commands, self.memory.vk_buffer, stage, access)
        functions.vkCmdBindPipeline(commands, 1, self._shader)
        functions.vkCmdBindDescriptorSets(commands, 1, self._layout, 0, 1, self._sets, 0, ffi.NULL)
        functions.vkCmdPushConstants(commands, self._layout, 0x20, 0, 24, constants)
        functions.vkCmdDispatch(commands, -(-p.width // _GROUP), -(-p.height // _GROUP), 1)
        _release(vk, commands, self.memory.vk_buffer, stage, access)
        vk.call("vkEndCommandBuffer", commands)

    def _clear(self, vk: VulkanContext) -> None:
        def record(commands: Any) -> None:
            vk.functions.vkCmdFillBuffer(commands, self.memory.vk_buffer, 0, c.WHOLE_SIZE, 0)
            _release(vk, commands, self.memory.vk_buffer, c.STAGE_TRANSFER, c.ACCESS_TRANSFER_WRITE)

        if not self._exporter._submit((), record, (), uses=(self.memory,)).done(30.0):
            raise DriverError("vkWaitForFences", c.TIMEOUT, c.result_name(c.TIMEOUT), "a fill took over 30 s")

    def export_memory(self) -> MemoryHandle:
        return self.memory.export()

    def export_semaphores(self) -> tuple[AnySemaphoreHandle, AnySemaphoreHandle | None]:
        if self._forth is None or self._back is None:
            raise InvalidArgumentError("kind", "this wave was made without semaphores.")
        forth = self._forth.export()
        if self._back is self._forth:
            return forth, None
        try:
            return forth, self._back.export()
        except BaseException:
            forth.close()
            raise

    def endpoint(self) -> Endpoint:
        if self._forth is None or self.kind is not Timeline:
            raise InvalidArgumentError("kind", "this wave was made without a timeline.")
        return self._forth.endpoint()

    def submit(self, frame: int, *, wait: bool = True, signal: bool = True) -> Submission:
        if self._closed or self._aborted:
            raise ResourceClosedError("the wave was closed." if self._closed else "the wave was aborted.")
        if isinstance(frame, bool) or not isinstance(frame, int):
            raise ArgumentTypeError("frame", f"must be an int, not {type(frame).__name__}.")
        if frame < 0:
            raise InvalidArgumentError("frame", f"frames count from 0; {frame} is none.")
        if self._forth is None and (wait or signal):
            raise InvalidArgumentError("wait", "a wave without semaphores takes wait=False, signal=False.")
        timeline = self.kind is Timeline
        waits = [(self._back, 2 * frame if timeline else 0)] if self._back and wait and frame > 0 else []
        signals = [(self._forth, 2 * frame + 1 if timeline else 0)] if self._forth and signal else []
        return self._exporter._submit(
            waits,
            None,
            signals,
            commands=self._commands[frame % 2],
            uses=(self.memory,),
            stage=c.STAGE_COMPUTE_SHADER,
        )

    def read(self, slot: int) -> bytes:
        return self.memory.read(self.parameters.slot_offset(slot), self.parameters.slot_bytes)

    def write(self, slot: int, data: bytes) -> None:
        if len(data) != self.parameters.slot_bytes:
            raise InvalidArgumentError("data", f"a slot has {self.parameters.slot_bytes} bytes, not {len(data)}.")
        self.memory.write(self.parameters.slot_offset(slot), data)

    def abort(self) -> None:
        self._aborted = True
        if not self._closed:
            self._exporter._abort(*self._semaphores())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._exporter._children.pop(self, None)
        if self._exporter._settle(*self._semaphores(), self.memory):
            self._undo.close()

    def _semaphores(self) -> list[VulkanSemaphore]:
        return [semaphore for semaphore in (self._forth, self._back) if semaphore is not None]


class VulkanExporter(Exporter):
    """A Vulkan driver as the independent party, on an instance and a device of its own.

    Parameters
    ----------
    driver : str, optional
        Part of the device's or driver's name, in any case: ``swiftshader``, ``lavapipe``, ``nvidia``. Default: a GPU,
        else a driver that exports semaphores (SwiftShader), else any.
    validation : bool, optional
        Enable the Khronos validation layer and collect what it says. Default: whether ``GPUINTEROP_VALIDATION`` is 1.
    device_index : int, optional
        Which of those that match `driver`, from 0 in the loader's order. Without `driver`: which of all, so that
        ``VulkanExporter(device_index=found.index)`` opens exactly what :func:`list_drivers` has listed.
    staged : bool, optional
        Write and read through a staging buffer and the queue, also where the host sees the memory. A GPU always does.
    identity : DeviceIdentity, optional
        As for :func:`gpuinterop.exporters.open_exporter`.

    Attributes
    ----------
    validation_messages : list of str
        Warnings and errors of the validation layer, in order. Those of the destruction of the instance follow when
        the exporter is closed.

    Raises
    ------
    BackendUnavailableError
        PyPI's `vulkan`, the loader, a driver, or the validation layer that was asked for is missing.
    DeviceNotFoundError
        No device matches; the message lists those that there are.
    """

    name = "vulkan"

    def __init__(
        self,
        driver: str | None = None,
        *,
        validation: bool | None = None,
        device_index: int | None = None,
        staged: bool = False,
        identity: DeviceIdentity | None = None,
    ) -> None:
        self._closed = True  # until all is there: close() may be called on the way out
        if validation is None:
            validation = os.environ.get("GPUINTEROP_VALIDATION") == "1"
        with ExitStack() as undo:
            try:
                instance = undo.enter_context(_Instance(validation=validation))
            except DriverError as error:
                raise BackendUnavailableError(
                    f"the Vulkan loader found no usable driver ({error}).",
                    fix="Install a Vulkan driver: the GPU's, or mesa-vulkan-drivers for lavapipe.",
                ) from error
            self._instance = instance
            self.validation_messages = instance.validation_messages
            self._physical = physical = _choose(instance.physical_devices(), driver, device_index)
            self._device = _Device(instance, physical)
            undo.callback(self._device.close)
            self._vk = vk = self._device.vk
            info = vk.api.new("VkCommandPoolCreateInfo", flags=0x2, queueFamilyIndex=vk.family())  # resettable
            self._pool = vk.create("vkCreateCommandPool", "VkCommandPool", info)
            undo.pop_all()
        self.driver = f"{physical.driver_name} {physical.driver_version}"
        self.device = physical.name
        vk.said = identity
        self.identity = vk.identity
        self._staged = staged
        self._lock = threading.Lock()  # of the queue, the command pool, and the lists below
        self._pending: list[_Pending] = []
        self._fences: list[Any] = []
        self._children: dict[Any, None] = {}  # in the order of their making; what is dropped unclosed lives here
        self._rescuer: _Rescuer | None = None
        self._stuck = False
        self._closed = False

    # -- the interface ------------------------------------------------------------------------------------------------

    @cached_property
    def capabilities(self) -> Capabilities:  # asked for each test
        table = self._physical.capabilities
        cell = Cell(Operation.EXPORT_ALLOCATION, VmmFd)
        if self._physical.is_lavapipe:
            # What the table offers there takes the allocation's address, and a handle has none.
            reason = "lavapipe's memory fds have a header of its own: a handle alone cannot be imported."
            gap = cell.gap(Scope.DRIVER, reason, "gpuinterop.vulkan.import_allocation")
            return Capabilities((gap if found.cell == cell else found for found in table.values()), owner=self.device)
        return table

    def create_memory(self, size: int) -> VulkanMemory:
        return VulkanMemory(self, size)

    def import_memory(self, handle: AllocationHandle, size: int) -> VulkanMemory:
        if not isinstance(handle, VmmFd):
            raise ArgumentTypeError("handle", f"must be a VmmFd, not a {type(handle).__name__}.")
        self.capabilities.require((Operation.EXPORT_ALLOCATION, VmmFd))
        check_size(handle, size)  # SwiftShader maps what is not there, and dies of the first touch
        maker = handle.origin.device if handle.origin is not None else None
        if maker is not None and maker.conflicts(self.identity):
            raise HandleError(f"handle: was allocated on {maker.name or 'another device'}, and this is {self.device}.")
        return VulkanMemory(self, size, handle)

    def image_gap(self, parameters: ImageParameters) -> str:
        from .images import image_gap

        return image_gap(self._open(), parameters)

    def create_image(self, parameters: ImageParameters) -> VulkanImage:
        from .images import VulkanImage

        return VulkanImage(self, parameters)

    def create_semaphore(self, kind: type, *, exportable: bool = True) -> VulkanSemaphore:
        return VulkanSemaphore(self, kind, exportable=exportable or kind is Binary)

    def create_wave(self, parameters: WaveParameters, kind: type | None, *, exportable: bool = True) -> VulkanWave:
        return VulkanWave(self, parameters, kind, exportable=exportable)

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
                    "fill", f"offset and size are multiples of 4, not {item.offset} and {item.size}."
                )
            self._own(item.memory, VulkanMemory)._check(item.offset, item.size)
        waits = [(self._own(semaphore, VulkanSemaphore), value) for semaphore, value in wait]
        signals = [(self._own(semaphore, VulkanSemaphore), value) for semaphore, value in signal]

        def record(commands: Any) -> None:
            for item in fill:
                buffer = item.memory.vk_buffer
                _acquire(self._vk, commands, buffer, c.STAGE_TRANSFER, c.ACCESS_TRANSFER_WRITE)
                self._vk.functions.vkCmdFillBuffer(commands, buffer, item.offset, item.size, item.word)
                _release(self._vk, commands, buffer, c.STAGE_TRANSFER, c.ACCESS_TRANSFER_WRITE)

        memories = [item.memory for item in fill]
        return self._submit(waits, record if fill else None, signals, uses=memories, stage=c.STAGE_TRANSFER)

    def close(self) -> None:
        if self._closed:
            return
        for child in reversed(list(self._children)):  # a wave before its memory and semaphores
            child.close()
        if self._settle():
            self._closed = True
            vk = self._vk
            for fence in self._fences:
                vk.destroy("vkDestroyFence", fence)
            vk.destroy("vkDestroyCommandPool", self._pool)
            rescued = self._rescuer is None or self._rescuer.close()
            self._device.close()
            if rescued:
                self._instance.close()
        self._closed = True

    # -- for its objects ----------------------------------------------------------------------------------------------

    def _open(self) -> VulkanContext:
        if self._closed:
            raise ResourceClosedError("the Vulkan exporter was closed.")
        return self._vk

    def _own(self, thing: Any, kind: type[Any]) -> Any:
        if not isinstance(thing, kind):
            raise ArgumentTypeError("submit", f"takes objects of this exporter, not {type(thing).__name__}.")
        if thing._exporter is not self:  # a driver that is given another device's objects crashes
            raise ArgumentTypeError("submit", f"takes objects of this exporter, not a {kind.__name__} of another.")
        return thing

    def _submit(
        self,
        waits: Sequence[tuple[VulkanSemaphore, int]],
        record: Callable[[Any], None] | None,
        signals: Sequence[tuple[VulkanSemaphore, int]],
        *,
        commands: Any = None,
        uses: Iterable[VulkanMemory | VulkanImage] = (),
        stage: int = c.STAGE_ALL_COMMANDS,
        queue: Any = None,
    ) -> _Pending:
        """`record` records commands for this once; `commands` were recorded before."""
        adopted: list[tuple[VulkanSemaphore, _Pending]] = []
        left = []
        try:
            for semaphore, value in waits:
                # A wait that is on the queue already holds back what is submitted after it, as this one would.
                if earlier := semaphore._adopt():
                    adopted.append((semaphore, earlier))
                else:
                    left.append((semaphore, value))
            used: frozenset[object] = frozenset((*uses, *(semaphore for semaphore, _ in (*waits, *signals))))
            return self._enqueue(left, record, signals, commands, used, stage, queue)
        except BaseException:
            for semaphore, earlier in adopted:
                semaphore._unheard.insert(0, earlier)
            raise

    def _enqueue(
        self,
        waits: Sequence[tuple[VulkanSemaphore, int]],
        record: Callable[[Any], None] | None,
        signals: Sequence[tuple[VulkanSemaphore, int]],
        commands: Any,
        uses: frozenset[object],
        stage: int,
        queue: Any,
    ) -> _Pending:
        vk = self._open()
        api, ffi = vk.api, vk.api.ffi
        self._reap()
        chain = ffi.NULL
        if any(semaphore.kind is Timeline for semaphore, _ in (*waits, *signals)):
            chain = api.new(
                "VkTimelineSemaphoreSubmitInfo",
                waitSemaphoreValueCount=len(waits),
                pWaitSemaphoreValues=api.array("uint64_t", [value for _, value in waits]),
                signalSemaphoreValueCount=len(signals),
                pSignalSemaphoreValues=api.array("uint64_t", [value for _, value in signals]),
            )
        own = None
        with self._lock:
            if record is not None:
                own = commands = self._allocate()
                begin = api.new("VkCommandBufferBeginInfo", flags=0x1)  # one time
                vk.call("vkBeginCommandBuffer", commands, begin)
                record(commands)
                vk.call("vkEndCommandBuffer", commands)
            info = api.new(
                "VkSubmitInfo",
                pNext=chain,
                waitSemaphoreCount=len(waits),
                pWaitSemaphores=api.array("VkSemaphore", [semaphore._handle() for semaphore, _ in waits]),
                pWaitDstStageMask=api.array("VkPipelineStageFlags", [stage] * len(waits)),
                commandBufferCount=0 if commands is None else 1,
                pCommandBuffers=api.array("VkCommandBuffer", [] if commands is None else [commands]),
                signalSemaphoreCount=len(signals),
                pSignalSemaphores=api.array("VkSemaphore", [semaphore._handle() for semaphore, _ in signals]),
            )
            fence = self._fence()
            pending = _Pending(self, fence, tuple(waits), uses, own)
            submit, target = vk.functions.vkQueueSubmit, vk.queue if queue is None else queue
            try:
                # Ctrl-C raises between two steps of Python, also right after the call has returned. So the work is on
                # the list before, and `_sent` in the step before: what may be on the queue keeps its fence, its
                # commands and its semaphores until the fence says so.
                self._pending.append(pending)
                pending._sent = True
                code = submit(target, 1, info, fence)
                check("vkQueueSubmit", code)
            except BaseException as error:
                if not pending._sent or isinstance(error, DriverError):
                    self._take_back(pending)
                raise
        return pending

    def _take_back(self, pending: _Pending) -> None:
        """What never got onto the queue."""
        if pending in self._pending:
            self._pending.remove(pending)
        self._fences.append(pending._fence)
        if pending._commands is not None:
            self._free([pending._commands])

    def _fence(self) -> Any:
        vk = self._vk
        if not self._fences:
            return vk.create("vkCreateFence", "VkFence", vk.api.new("VkFenceCreateInfo"))
        fence = self._fences.pop()
        vk.call("vkResetFences", vk.device, 1, vk.api.array("VkFence", [fence]))
        return fence

    def _allocate(self) -> Any:
        vk = self._vk
        info = vk.api.new("VkCommandBufferAllocateInfo", commandPool=self._pool, commandBufferCount=1)
        out = vk.api.ffi.new("VkCommandBuffer *")
        vk.call("vkAllocateCommandBuffers", vk.device, info, out)
        return out[0]

    def _free(self, commands: Sequence[Any]) -> None:
        vk = self._vk
        handles = vk.api.array("VkCommandBuffer", commands)
        vk.functions.vkFreeCommandBuffers(vk.device, self._pool, len(commands), handles)

    def _free_commands(self, commands: Sequence[Any]) -> None:
        if commands:
            with self._lock:
                self._free(commands)

    def _retire(self, pending: _Pending) -> None:
        """The fence of `pending` is signalled: take back what the work held."""
        with self._lock:
            pending._finished = True
            if pending in self._pending and not pending._waiters:
                self._pending.remove(pending)
                self._fences.append(pending._fence)
                if pending._commands is not None:
                    self._free([pending._commands])

    def _reap(self) -> None:
        """Take back what finished work held, whether or not anybody asked for its end."""
        vk = self._vk
        with self._lock:
            unfinished = list(self._pending)
        for pending in unfinished:
            with self._lock:
                gone = pending not in self._pending
                code = c.NOT_READY if gone else vk.functions.vkGetFenceStatus(vk.device, pending._fence)
            if check("vkGetFenceStatus", code) == c.SUCCESS:
                self._retire(pending)

    def _busy(self) -> bool:
        self._reap()
        return bool(self._pending)

    def _rescue(self, payload: FdHandle) -> None:
        """Signal a binary semaphore from a second device, past whatever this device's queue is held up by."""
        with self._lock:
            if self._rescuer is None:
                self._rescuer = _Rescuer(self._instance, self._physical)
            self._rescuer.signal(payload)

    def _abort(self, *semaphores: VulkanSemaphore) -> bool:
        """Release work that waits for these, one submission at a time: each signal lets one wait pass."""
        for pending in list(self._pending):
            if not any(semaphore in semaphores for semaphore, _ in pending._waits):
                continue
            try:
                # The signal may be on its way after all; a second one would be left over, for nobody.
                if not pending.done(0.0):
                    pending._release()
                    if not pending.done(_PATIENCE) and not self._unblock(pending):
                        return False
            except DriverError:  # a lost device has no pending work
                return True
        return True

    def _unblock(self, stuck: _Pending) -> bool:
        """A queue runs in order: release all that waits up to `stuck`."""
        for pending in list(self._pending):
            if not pending.done(0.0):
                pending._release()
                if not pending.done(_PATIENCE):
                    return False
            if pending is stuck:
                break
        return True

    def _settle(self, *things: VulkanMemory | VulkanImage | VulkanSemaphore) -> bool:
        """Wait for the work that uses `things` (none: for all), and release what will wait for ever.

        False: nothing may be destroyed. Work that waits for a semaphore among `things` is released at once: the
        semaphore is being closed.
        """
        if self._stuck or self._closed:
            return False
        if not self._abort(*(thing for thing in things if isinstance(thing, VulkanSemaphore))):
            return self._give_up()
        for pending in list(self._pending):
            if things and pending._uses.isdisjoint(things):
                continue
            try:
                if not pending.done(_PATIENCE) and not self._unblock(pending):
                    return self._give_up()
            except DriverError:  # a lost device has no pending work
                return True
        return True

    def _give_up(self) -> bool:
        # Destroying a device with pending work is undefined; on SwiftShader it hangs for ever. Leave it all be.
        self._stuck = True
        warnings.warn(
            f"work on {self.device} waits for a signal that nobody can give; the Vulkan device is left undestroyed",
            LeakedResourceWarning,
            stacklevel=4,
        )
        return False


class _Rescuer:
    """A second device on the same physical device that shares the payload of the first one's semaphores."""

    def __init__(self, instance: _Instance, physical: PhysicalDevice) -> None:
        self._device = _Device(instance, physical)
        self._garbage: list[tuple[Any, Any]] = []

    def signal(self, payload: FdHandle) -> None:
        vk = self._device.vk
        handle = payload.duplicate()
        try:
            imported = import_semaphore_fd(vk, Binary, handle.fd)
        except BaseException:
            handle.close()
            raise
        handle.detach()  # the driver's
        fence = vk.create("vkCreateFence", "VkFence", vk.api.new("VkFenceCreateInfo"))
        self._garbage.append((imported, fence))
        info = vk.api.new(
            "VkSubmitInfo", signalSemaphoreCount=1, pSignalSemaphores=vk.api.array("VkSemaphore", [imported])
        )
        vk.call("vkQueueSubmit", vk.queue, 1, info, fence)
        self._collect(_PATIENCE)

    def _collect(self, timeout: float) -> bool:
        vk = self._device.vk
        while self._garbage:
            imported, fence = self._garbage[0]
            fences = vk.api.array("VkFence", [fence])
            if vk.functions.vkWaitForFences(vk.device, 1, fences, 1, int(timeout * 1e9)) != c.SUCCESS:
                return False
            del self._garbage[0]
            vk.destroy("vkDestroySemaphore", imported)
            vk.destroy("vkDestroyFence", fence)
        return True

    def close(self) -> bool:
        """False: the device is left undestroyed, and its instance has to be."""
        idle = self._collect(_PATIENCE)
        if idle:
            self._device.close()
        return idle
