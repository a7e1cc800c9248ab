"""Physical devices, and what their drivers can share, as the drivers' properties say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..capabilities import Capabilities, Rules, promote, recorded
from ..handles import DeviceIdentity, DmaBufFd, Handle, OpaqueFd, TimelineFd
from . import _api as c
from ._api import Api, Functions

if TYPE_CHECKING:
    from ._context import VulkanContext


_INSTANCE_EXTENSIONS = (
    "VK_KHR_get_physical_device_properties2",
    "VK_KHR_external_memory_capabilities",
    "VK_KHR_external_semaphore_capabilities",
)
_FORMAT_R32G32B32A32_SFLOAT = 109

RULES = Rules(files(__package__) / "capabilities.toml")

BUFFER_USAGE = c.BUFFER_STORAGE | c.BUFFER_TRANSFER_SRC | c.BUFFER_TRANSFER_DST
IMAGE_USAGE = c.IMAGE_STORAGE | c.IMAGE_SAMPLED | c.IMAGE_TRANSFER_SRC | c.IMAGE_TRANSFER_DST

MEMORY_BITS: dict[type[Handle], int] = {OpaqueFd: c.MEMORY_HANDLE_OPAQUE_FD, DmaBufFd: c.MEMORY_HANDLE_DMA_BUF}
_MEMORY_EXTENSION = {
    c.MEMORY_HANDLE_OPAQUE_FD: "VK_KHR_external_memory_fd",
    c.MEMORY_HANDLE_DMA_BUF: "VK_EXT_external_memory_dma_buf",
    c.MEMORY_HANDLE_HOST_ALLOCATION: "VK_EXT_external_memory_host",
}
_VIEWS = {
    c.IMAGE_SAMPLED: c.FORMAT_FEATURE_SAMPLED_IMAGE,
    c.IMAGE_STORAGE: c.FORMAT_FEATURE_STORAGE_IMAGE,
    c.IMAGE_COLOR_ATTACHMENT: c.FORMAT_FEATURE_COLOR_ATTACHMENT,
    c.IMAGE_INPUT_ATTACHMENT: c.FORMAT_FEATURE_COLOR_ATTACHMENT,
}
"""The ``VkFormatFeatureFlagBits`` that the format needs for each usage."""
_SEMAPHORE_TYPES: dict[type[Handle], int] = {OpaqueFd: c.SEMAPHORE_BINARY, TimelineFd: c.SEMAPHORE_TIMELINE}


@dataclass(frozen=True, slots=True)
class Support:
    """What a driver shares as one handle type: buffers of one usage, or images of one format, tiling and usage.

    Attributes
    ----------
    features : int
        ``VkExternalMemoryFeatureFlags``; 0 if they cannot be shared.
    extent : tuple of int
        Largest width, height and depth of an image.
    levels, layers : int
        Largest numbers of mip levels and layers.
    size : int
        Largest size in bytes.
    """

    features: int = 0
    extent: tuple[int, int, int] = (0, 0, 0)
    levels: int = 0
    layers: int = 0
    size: int = 0


class PhysicalDevice:
    """A physical device and the functions to query it."""

    def __init__(self, api: Api, functions: Functions, handle: Any) -> None:
        self.api = api
        self.functions = functions
        self.handle = handle

    @classmethod
    def of(cls, physical_device: Any, instance: Any = None, get_instance_proc_addr: Any = None) -> PhysicalDevice:
        """Query a VulkanContext, or a handle with or without its instance."""
        physical = getattr(physical_device, "physical", None)
        if isinstance(physical, PhysicalDevice):
            physical_device._check_open()
            return physical
        api = Api({"VkPhysicalDevice": physical_device, "VkInstance": instance}, get_instance_proc_addr)
        handle = api.handle("VkPhysicalDevice", physical_device, "physical_device")
        if instance is None and get_instance_proc_addr is None:
            return cls(api, api.exported_functions(), handle)
        return cls(api, api.instance_functions(api.handle("VkInstance", instance, "instance")), handle)

    @cached_property
    def extensions(self) -> frozenset[str]:
        call, null = "vkEnumerateDeviceExtensionProperties", self.api.ffi.NULL
        listed = self.api.listed("VkExtensionProperties", self.functions, call, self.handle, null)
        return frozenset(self.api.text(each.extensionName) for each in listed)

    @cached_property
    def api_version(self) -> tuple[int, int]:
        version: int = self._properties.properties.apiVersion
        return version >> 22 & 0x7F, version >> 12 & 0x3FF

    @cached_property
    def _properties(self) -> Any:
        properties = self.api.new("VkPhysicalDeviceProperties2")
        self.functions.vkGetPhysicalDeviceProperties2(self.handle, properties)
        return properties

    @property
    def max_allocation(self) -> int:
        """Size up to which the driver does not refuse an allocation as too large; a larger one may still succeed."""
        return int(self.extended("VkPhysicalDeviceMaintenance3Properties").maxMemoryAllocationSize)

    def extended(self, kind: str) -> Any:
        extended = self.api.new(kind)
        properties = self.api.new("VkPhysicalDeviceProperties2", pNext=extended)
        self.functions.vkGetPhysicalDeviceProperties2(self.handle, properties)
        return extended

    @cached_property
    def name(self) -> str:
        return self.api.text(self._properties.properties.deviceName)

    @cached_property
    def is_cpu(self) -> bool:
        return bool(self._properties.properties.deviceType == c.DEVICE_TYPE_CPU)

    @cached_property
    def _driver(self) -> Any:
        if self.api_version < (1, 2) and "VK_KHR_driver_properties" not in self.extensions:
            return None
        return self.extended("VkPhysicalDeviceDriverProperties")

    @cached_property
    def driver_name(self) -> str:
        """``driverName``, or the device's name if the driver has none."""
        return self.api.text(self._driver.driverName) if self._driver else self.name

    @cached_property
    def driver_version(self) -> str:
        """``driverInfo``, or ``driverVersion`` in Vulkan's version format if the driver has none."""
        info = self.api.text(self._driver.driverInfo) if self._driver else ""
        packed: int = self._properties.properties.driverVersion
        return info or f"{packed >> 22}.{packed >> 12 & 0x3FF}.{packed & 0xFFF}"

    @cached_property
    def is_lavapipe(self) -> bool:
        """Whether the driver is lavapipe, whose memory fds begin with a header that no property reports."""
        return bool(self._driver and self._driver.driverID == c.DRIVER_ID_MESA_LLVMPIPE)

    @cached_property
    def identity(self) -> DeviceIdentity:
        """Identity with every identifier that the driver reports."""
        ids = self.extended("VkPhysicalDeviceIDProperties")
        uuid, driver_uuid = bytes(ids.deviceUUID), bytes(ids.driverUUID)
        pci = None
        if "VK_EXT_pci_bus_info" in self.extensions:
            bus = self.extended("VkPhysicalDevicePCIBusInfoPropertiesEXT")
            pci = f"{bus.pciDomain:04x}:{bus.pciBus:02x}:{bus.pciDevice:02x}.{bus.pciFunction:x}"
        return DeviceIdentity(
            name=self.name,
            uuid=uuid if any(uuid) else None,
            luid=bytes(ids.deviceLUID) if ids.deviceLUIDValid else None,
            pci_bus_id=pci,
            driver_uuid=driver_uuid if any(driver_uuid) else None,
            is_cpu=self.is_cpu,
        )

    @cached_property
    def queue_families(self) -> list[tuple[int, int]]:
        """``VkQueueFlags`` and number of queues of each family."""
        call = "vkGetPhysicalDeviceQueueFamilyProperties"
        listed = self.api.listed("VkQueueFamilyProperties", self.functions, call, self.handle)
        return [(int(family.queueFlags), int(family.queueCount)) for family in listed]

    # -- what can be shared ------------------------------------------------------------------------------------------

    def buffer_features(self, bit: int, usage: int = BUFFER_USAGE) -> int:
        """``VkExternalMemoryFeatureFlags`` of buffers for a handle type; 0 if its extension is missing."""
        if _MEMORY_EXTENSION[bit] not in self.extensions:
            return 0
        info = self.api.new("VkPhysicalDeviceExternalBufferInfo", usage=usage, handleType=bit)
        properties = self.api.new("VkExternalBufferProperties")
        self.functions.vkGetPhysicalDeviceExternalBufferProperties(self.handle, info, properties)
        return int(properties.externalMemoryProperties.externalMemoryFeatures)

    def image_support(
        self,
        handle_type: type[Handle],
        format_: int,
        tiling: int,
        usage: int,
        kind: int = c.IMAGE_TYPE_2D,
        flags: int = 0,
    ) -> Support:
        """Query the limits of shared images."""
        bit = MEMORY_BITS[handle_type]
        if _MEMORY_EXTENSION[bit] not in self.extensions:
            return Support()
        # In the query below, NVIDIA claims linear images for attachments, but it cannot make views of them.
        formats = self.api.new("VkFormatProperties2")
        self.functions.vkGetPhysicalDeviceFormatProperties2(self.handle, format_, formats)
        by_tiling = formats.formatProperties
        features = by_tiling.linearTilingFeatures if tiling == c.TILING_LINEAR else by_tiling.optimalTilingFeatures
        if any(usage & bit and not features & feature for bit, feature in _VIEWS.items()):
            return Support()
        external = self.api.new("VkPhysicalDeviceExternalImageFormatInfo", handleType=bit)
        info = self.api.new(
            "VkPhysicalDeviceImageFormatInfo2",
            pNext=external,
            format=format_,
            type=kind,
            tiling=tiling,
            usage=usage,
            flags=flags,
        )
        external_properties = self.api.new("VkExternalImageFormatProperties")
        properties = self.api.new("VkImageFormatProperties2", pNext=external_properties)
        # An error means "no": drivers refuse a handle type with VK_ERROR_FORMAT_NOT_SUPPORTED.
        if self.functions.vkGetPhysicalDeviceImageFormatProperties2(self.handle, info, properties) < 0:
            return Support()
        limits = properties.imageFormatProperties
        return Support(
            features=int(external_properties.externalMemoryProperties.externalMemoryFeatures),
            extent=(int(limits.maxExtent.width), int(limits.maxExtent.height), int(limits.maxExtent.depth)),
            levels=int(limits.maxMipLevels),
            layers=int(limits.maxArrayLayers),
            size=int(limits.maxResourceSize),
        )

    def semaphore_features(self, handle_type: type[Handle]) -> int:
        """``VkExternalSemaphoreFeatureFlags``.

        Check them before every export: SwiftShader reports timelines as not exportable, and its vkGetSemaphoreFdKHR
        crashes for them.
        """
        if "VK_KHR_external_semaphore_fd" not in self.extensions:
            return 0
        kind = _SEMAPHORE_TYPES[handle_type]
        if kind == c.SEMAPHORE_TIMELINE and not self.has_timelines:
            return 0
        chain = self.api.new("VkSemaphoreTypeCreateInfo", semaphoreType=kind)
        info = self.api.new(
            "VkPhysicalDeviceExternalSemaphoreInfo", pNext=chain, handleType=c.SEMAPHORE_HANDLE_OPAQUE_FD
        )
        properties = self.api.new("VkExternalSemaphoreProperties")
        self.functions.vkGetPhysicalDeviceExternalSemaphoreProperties(self.handle, info, properties)
        return int(properties.externalSemaphoreFeatures)

    @cached_property
    def has_timelines(self) -> bool:
        if self.api_version < (1, 2) and "VK_KHR_timeline_semaphore" not in self.extensions:
            return False
        timeline = self.api.new("VkPhysicalDeviceTimelineSemaphoreFeatures")
        features = self.api.new("VkPhysicalDeviceFeatures2", pNext=timeline)
        self.functions.vkGetPhysicalDeviceFeatures2(self.handle, features)
        return bool(timeline.timelineSemaphore)

    @property
    def endpoint_gap(self) -> str:
        """Why no bridge can use this driver's timelines; empty if one can."""
        return "" if self.has_timelines else "the driver has no timeline semaphores"

    @cached_property
    def capabilities(self) -> Capabilities:
        """The capability table (see :func:`capabilities`)."""
        runs = recorded(files("gpuinterop") / "vulkan" / "verified.toml")
        cells = RULES.table(
            {
                "driver": self.driver_name,
                **{extension: extension in self.extensions for extension in RULES.facts if extension.startswith("VK_")},
                "exports buffers as opaque_fd": self.buffer_features(c.MEMORY_HANDLE_OPAQUE_FD) & c.MEMORY_EXPORTABLE,
                "exports buffers as dma_buf_fd": self.buffer_features(c.MEMORY_HANDLE_DMA_BUF) & c.MEMORY_EXPORTABLE,
                "exports images as opaque_fd": self._image_features(OpaqueFd) & c.MEMORY_EXPORTABLE,
                "exports images as dma_buf_fd": self._image_features(DmaBufFd) & c.MEMORY_EXPORTABLE,
                "imports buffers": self.buffer_features(c.MEMORY_HANDLE_OPAQUE_FD) & c.MEMORY_IMPORTABLE,
                "imports host pointers": self.buffer_features(c.MEMORY_HANDLE_HOST_ALLOCATION) & c.MEMORY_IMPORTABLE,
                "has timelines": self.has_timelines,
                "exports timelines": self.semaphore_features(TimelineFd) & c.SEMAPHORE_EXPORTABLE,
                "exports binary semaphores": self.semaphore_features(OpaqueFd) & c.SEMAPHORE_EXPORTABLE,
                "lavapipe": self.is_lavapipe,
                "software": self.is_cpu,
            }
        )
        return Capabilities(promote(cells, runs, device=self.driver_name), owner=self.name)

    def _image_features(self, handle_type: type[Handle]) -> int:
        """``VkExternalMemoryFeatureFlags`` of images that compute can use."""
        return self.image_support(handle_type, _FORMAT_R32G32B32A32_SFLOAT, c.TILING_OPTIMAL, IMAGE_USAGE).features


def identity(
    physical_device: VulkanContext | Any, *, instance: Any = None, get_instance_proc_addr: Any = None
) -> DeviceIdentity:
    """Identify a physical device for ``gpuinterop.match_device``.

    Calls ``vkGetPhysicalDeviceProperties2``. For the PCI bus id, which needs ``VK_EXT_pci_bus_info``, it also calls
    ``vkEnumerateDeviceExtensionProperties``.

    Parameters
    ----------
    physical_device : VulkanContext or VkPhysicalDevice
        A context, a handle of PyPI's vulkan, or a handle's value as an int.
    instance : VkInstance, optional
        Required if another loader than the system's made the handle.
    get_instance_proc_addr : int, optional
        Address of ``vkGetInstanceProcAddr`` in that loader.

    Returns
    -------
    DeviceIdentity

    Raises
    ------
    BackendUnavailableError
        cffi or the loader is missing.
    ArgumentTypeError
        A value is not a handle, or is a handle of another kind.
    ResourceClosedError
        The context was closed.

    Examples
    --------
    >>> identity = gi.vulkan.identity(physical_device)
    >>> gi.match_device(identity).identity.matches(identity)
    True
    """
    return PhysicalDevice.of(physical_device, instance, get_instance_proc_addr).identity


def capabilities(
    physical_device: VulkanContext | Any, *, instance: Any = None, get_instance_proc_addr: Any = None
) -> Capabilities:
    """Return this driver's capabilities as the *other* side of a ``gpuinterop`` device.

    A cell is usable if the driver supports its counterpart: ``import_memory:opaque_fd`` and ``map_buffer:opaque_fd`` if
    it exports such buffers, ``map_mipmapped_array:opaque_fd`` if it exports images with optimal tiling,
    ``import_semaphore:timeline_fd`` if it exports timelines, ``export_allocation:vmm_fd`` if it imports a device's
    allocations, ``export_array:vmm_fd`` if :func:`import_array` accepts GPU arrays, and ``export_array:opaque_fd`` if
    it accepts host arrays. All other cells are gaps with a reason. Cells that a driver reports are UNVERIFIED until a
    recorded run has tested them.

    Calls ``vkGetPhysicalDeviceExternalBufferProperties``, ``vkGetPhysicalDeviceExternalSemaphoreProperties`` and
    ``vkGetPhysicalDeviceImageFormatProperties2``.

    Parameters
    ----------
    physical_device, instance, get_instance_proc_addr
        See :func:`identity`.

    Returns
    -------
    Capabilities

    Raises
    ------
    BackendUnavailableError, ArgumentTypeError, ResourceClosedError
        See :func:`identity`.

    Examples
    --------
    >>> table = gi.vulkan.capabilities(physical_device)
    >>> table.supports((gi.Operation.MAP_BUFFER, gi.OpaqueFd))
    True
    >>> both = [cell for cell, capability in table.items() if capability and device.capabilities[cell]]
    """
    return PhysicalDevice.of(physical_device, instance, get_instance_proc_addr).capabilities


def required_extensions(
    physical_device: VulkanContext | Any = None, *, instance: Any = None, get_instance_proc_addr: Any = None
) -> tuple[list[str], list[str]]:
    """List the extensions that the application must enable to share everything that this driver offers.

    The instance extensions are part of Vulkan 1.1, and ``VK_KHR_timeline_semaphore`` is part of 1.2; you may enable
    them there too. Also enable the timeline feature (``VkPhysicalDeviceTimelineSemaphoreFeatures``).

    Parameters
    ----------
    physical_device, instance, get_instance_proc_addr
        See :func:`identity`. Without arguments the call needs neither an instance nor a loader, and lists only the
        instance extensions.

    Returns
    -------
    instance_extensions : list of str
        Names for ``VkInstanceCreateInfo``.
    device_extensions : list of str
        Names for ``VkDeviceCreateInfo``; empty without a physical device.

    Raises
    ------
    BackendUnavailableError, ArgumentTypeError, ResourceClosedError
        See :func:`identity`.

    Examples
    --------
    Call it before you create the instance, and again before you create the device:

    >>> instance_extensions, _ = gi.vulkan.required_extensions()
    >>> instance_extensions[0]
    'VK_KHR_get_physical_device_properties2'
    >>> _, device_extensions = gi.vulkan.required_extensions(physical_device)
    >>> "VK_KHR_external_memory_fd" in device_extensions
    True
    """
    if physical_device is None and instance is None and get_instance_proc_addr is None:
        return list(_INSTANCE_EXTENSIONS), []
    physical = PhysicalDevice.of(physical_device, instance, get_instance_proc_addr)
    return list(_INSTANCE_EXTENSIONS), device_extensions(physical)


def device_extensions(physical: PhysicalDevice) -> list[str]:
    """The device extensions for sharing that the driver offers."""
    wanted: Sequence[str] = (
        "VK_KHR_external_memory",
        "VK_KHR_external_memory_fd",
        "VK_KHR_get_memory_requirements2",
        "VK_KHR_dedicated_allocation",
    )
    if physical.semaphore_features(OpaqueFd) or physical.semaphore_features(TimelineFd):
        wanted = (*wanted, "VK_KHR_external_semaphore", "VK_KHR_external_semaphore_fd")
    if physical.has_timelines:
        wanted = (*wanted, "VK_KHR_timeline_semaphore")
    if physical.buffer_features(c.MEMORY_HANDLE_DMA_BUF):
        wanted = (*wanted, "VK_EXT_external_memory_dma_buf", "VK_EXT_queue_family_foreign")
    if physical.buffer_features(c.MEMORY_HANDLE_HOST_ALLOCATION):
        wanted = (*wanted, "VK_EXT_external_memory_host")
    return [name for name in wanted if name in physical.extensions]
