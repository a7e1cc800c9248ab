"""The interface of an independent exporter: it makes memory and semaphores, and uses them, without a backend.

The demo and the conformance kit test backends with exporters. What an exporter writes, reads, signals and waits for
goes through Vulkan, or through its own mapping of the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..._arguments import NoCopy, check_int
from ...bridge import Endpoint
from ...capabilities import Capabilities, Operation
from ...errors import ArgumentTypeError, GpuInteropError, InvalidArgumentError, UnsupportedError
from ...handles import (
    AllocationHandle,
    AnySemaphoreHandle,
    ArrayUsage,
    DeviceIdentity,
    MemoryHandle,
    OpaqueFd,
    VmmFd,
    texel_of,
    usage_of,
)

if TYPE_CHECKING:
    from ..._core.device import Device

__all__ = [
    "Driver",
    "DriverList",
    "Exporter",
    "ExporterImage",
    "ExporterMemory",
    "ExporterSemaphore",
    "Fill",
    "ImageParameters",
    "Submission",
]

_IMAGES = (Operation.MAP_MIPMAPPED_ARRAY, OpaqueFd)
_ALLOCATIONS = (Operation.EXPORT_ALLOCATION, VmmFd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A driver of Vulkan or OpenGL for one device.

    Attributes
    ----------
    api : str
        ``vulkan`` or ``opengl``.
    index : int
        Its place in the loader's order. ``VulkanExporter(device_index=...)`` or ``HeadlessContext(...)`` opens it.
    name : str
        The device's name.
    driver, version : str
        The driver's name and version.
    identity : DeviceIdentity
    capabilities : Capabilities
        The table of :func:`gpuinterop.vulkan.capabilities` or :func:`gpuinterop.opengl.capabilities`.
    endpoint_gap : str
        Why a bridge cannot use its timelines; empty if it can.
    gaps : callable
        ``gaps(driver, device)`` returns for each handoff mode the error that prevents it, or None if it works.
    """

    api: str
    index: int
    name: str
    driver: str
    version: str
    identity: DeviceIdentity
    capabilities: Capabilities
    endpoint_gap: str
    gaps: Callable[[Driver, Device], Mapping[str, UnsupportedError | None]]


class DriverList(list[Driver]):
    """The drivers that were found.

    Attributes
    ----------
    reason : str
        Why the list is empty, or why a device is missing from it; otherwise empty.
    """

    reason: str = ""

    @contextmanager
    def noting(self, label: str) -> Iterator[None]:
        """Note the reason if a driver fails, and continue, so that it does not hide the others."""
        try:
            yield
        except GpuInteropError as error:
            self.reason = "; ".join(filter(None, (self.reason, f"{label}: {error}")))


class _Closing(NoCopy, ABC):
    remote_attributes: ClassVar[tuple[str, ...]]
    """What a process has of such an object that stays in its child (`gpuinterop.testing.child`)."""

    @abstractmethod
    def close(self) -> None:
        """Release it; idempotent. Blocks until the exporter's pending work is done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ExporterMemory(_Closing):
    """Memory that the exporter owns.

    Attributes
    ----------
    size : int
        Size of the whole allocation in bytes; at least the requested size.
    dedicated : bool
        Whether the allocation is dedicated.
    """

    remote_attributes = ("size", "dedicated")
    size: int
    dedicated: bool

    @abstractmethod
    def export(self) -> MemoryHandle:
        """A new handle that the caller owns, with its origin filled in."""

    @abstractmethod
    def write(self, offset: int, data: bytes) -> None:
        """Write through the exporter; returns when every process and device can see the bytes."""

    @abstractmethod
    def read(self, offset: int, size: int) -> bytes:
        """Read through the exporter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageParameters:
    """Parameters of an optimally tiled image with one sample per texel.

    Attributes
    ----------
    format : str
        Vulkan's name without ``VK_FORMAT_``.
    width, height : int
        Size in texels.
    depth : int
        Size in texels; 0 makes a 2D image.
    levels : int
        Number of mip levels.
    layers : int
        Number of array layers; 0 if the image is not an array.
    cube : bool
        Whether every six layers are the faces of a cube.
    usage : int, optional
        ``VkImageUsageFlags``. Default: storage, sampled and transfers both ways, without storage if the driver cannot
        share storage images of this format.
    """

    format: str
    width: int
    height: int
    depth: int = 0
    levels: int = 1
    layers: int = 0
    cube: bool = False
    usage: int | None = None

    def __post_init__(self) -> None:
        texel_of(self.format)
        for name, least in (("width", 1), ("height", 1), ("depth", 0), ("levels", 1), ("layers", 0)):
            number = check_int(getattr(self, name), name, minimum=least, maximum=2**31 - 1)
            object.__setattr__(self, name, number)  # turns NumPy's integers into Python's
        if not isinstance(self.cube, bool):
            raise ArgumentTypeError("cube", f"expected True or False, got {self.cube!r}.")
        if self.depth and self.layers:
            raise InvalidArgumentError("layers", f"expected 0 for a 3D image, got {self.layers}.")
        if self.cube and (self.layers == 0 or self.layers % 6 or self.width != self.height):
            got = f"{self.width} x {self.height} texels and {self.layers} layers"
            raise InvalidArgumentError("cube", f"expected square faces and a multiple of 6 layers, got {got}.")
        if self.levels > (most := max(self.extent).bit_length()):  # the last level has one texel
            what = f"expected at most {most} levels for an image of {self.extent}"
            raise InvalidArgumentError("levels", f"{what}, got {self.levels}.")

    @property
    def extent(self) -> tuple[int, int, int]:
        """Width, height and depth for ``map_mipmapped_array``; a 2D image has a depth of 0."""
        return self.width, self.height, self.depth

    def level_extent(self, level: int) -> tuple[int, int, int]:
        """Width, height and depth of a level."""
        if not 0 <= level < self.levels:
            raise InvalidArgumentError("level", f"expected 0 to {self.levels - 1}, got {level}.")
        width, height, depth = (max(1, edge >> level) if edge else 0 for edge in self.extent)
        return width, height, depth

    def level_bytes(self, level: int) -> int:
        """The size of a level in bytes, with all its layers, tightly packed."""
        width, height, depth = self.level_extent(level)
        return width * height * max(1, depth) * max(1, self.layers) * texel_of(self.format).nbytes


class ExporterImage(_Closing):
    """An image that the exporter owns, with its own memory. Between calls it is in ``VK_IMAGE_LAYOUT_GENERAL``.

    Attributes
    ----------
    parameters : ImageParameters
    size : int
        Size of the whole allocation in bytes.
    dedicated : bool
        Whether the allocation is dedicated.
    usage : int
        The ``VkImageUsageFlags`` that it was created with.
    """

    remote_attributes = ("parameters", "size", "dedicated", "usage")
    parameters: ImageParameters
    size: int
    dedicated: bool
    usage: int

    @property
    def array_usage(self) -> ArrayUsage:
        """The usage argument that ``map_mipmapped_array`` needs for this image."""
        usage = usage_of(self.usage)
        return usage | ArrayUsage.CUBEMAP if self.parameters.cube else usage

    @abstractmethod
    def export(self) -> MemoryHandle:
        """A new handle of its memory that the caller owns, with its origin filled in."""

    @abstractmethod
    def write(self, level: int, data: bytes) -> None:
        """Replace a level with all its layers, tightly packed; returns when every process and device can see it."""

    @abstractmethod
    def read(self, level: int) -> bytes:
        """Read a level with all its layers, tightly packed."""


class ExporterSemaphore(_Closing):
    """A semaphore that the exporter owns.

    Attributes
    ----------
    kind : type
        ``gpuinterop.handles.Binary`` or ``Timeline``.
    """

    remote_attributes = ("kind",)
    kind: type

    @abstractmethod
    def export(self) -> AnySemaphoreHandle:
        """A new handle that the caller owns, with its origin filled in."""

    @abstractmethod
    def signal(self, value: int = 0) -> None:
        """Signal through the exporter; returns when the signal has been submitted."""

    @abstractmethod
    def wait(self, value: int = 0, *, timeout: float) -> bool:
        """Wait through the exporter; a binary wait consumes the signal. Returns False after `timeout` seconds.

        After False, a binary wait is still pending on Vulkan's queue: it consumes the next signal.
        """

    def endpoint(self) -> Endpoint:
        """Give a bridge access to the semaphore from this process's CPU. The exporter keeps it.

        Raises
        ------
        InvalidArgumentError
            It is a binary semaphore of Vulkan's, which the CPU cannot use.
        """
        return _ExporterEndpoint(self)


class _ExporterEndpoint(Endpoint):
    def __init__(self, semaphore: ExporterSemaphore) -> None:
        self._semaphore = semaphore
        self.kind = semaphore.kind
        self.label = f"{type(semaphore).__name__} {id(semaphore):#x}"

    def wait(self, value: int, timeout: float) -> bool:
        return self._semaphore.wait(value, timeout=timeout)

    def signal(self, value: int) -> None:
        self._semaphore.signal(value)

    def close(self) -> None:
        """Do nothing: the exporter owns the semaphore."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Work for a submission: set `size` bytes from `offset` to the 32-bit word `word` (both multiples of 4)."""

    memory: Any
    offset: int
    size: int
    word: int


class Submission(_Closing):
    """Asynchronous work of an exporter."""

    remote_attributes = ()

    @abstractmethod
    def done(self, timeout: float = 0.0) -> bool:
        """Wait up to `timeout` seconds; return whether the work is done. After True you need not close it."""


class Exporter(_Closing):
    """An independent exporter of memory and semaphores.

    Attributes
    ----------
    name : str
        ``vulkan``, ``memfd`` or ``process``.
    driver : str
        Name and version of the driver, for reports.
    device : str
        Name of the device, for reports.
    identity : DeviceIdentity
        The argument of ``gpuinterop.match_device``: its own device, or the device that its handles name as origin.
    """

    remote_attributes = ("driver", "device", "identity", "capabilities")
    name: str
    driver: str
    device: str
    identity: DeviceIdentity

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The exporter's table. A cell is usable if the exporter can be the other side of that operation."""

    @abstractmethod
    def create_memory(self, size: int) -> ExporterMemory: ...

    @property
    def endpoint_gap(self) -> str:
        """Why its timelines have no `endpoint`; empty if they have one."""
        return ""

    def import_memory(self, handle: AllocationHandle, size: int) -> ExporterMemory:
        """Import what a device has allocated and exported. Success consumes `handle`.

        The result is memory like any other, but cannot be exported again.

        Raises
        ------
        UnsupportedError
            The exporter cannot import it (cell ``export_allocation`` of that handle type in its table).
        """
        raise UnsupportedError(self.capabilities.of(_ALLOCATIONS), context=self.device)

    def image_gap(self, parameters: ImageParameters) -> str:
        """Why this exporter cannot make and share such an image; empty if it can."""
        return self.capabilities.of(_IMAGES).reason

    def create_image(self, parameters: ImageParameters) -> ExporterImage:
        """Make an image with undefined texels.

        Raises
        ------
        UnsupportedError
            The exporter shares no images (cell ``map_mipmapped_array`` in its table).
        InvalidArgumentError
            It cannot share this image; the reason is that of `image_gap`.
        """
        raise UnsupportedError(self.capabilities.of(_IMAGES), context=self.device)

    @abstractmethod
    def create_semaphore(self, kind: type, *, exportable: bool = True) -> ExporterSemaphore:
        """Make a semaphore of `kind`. Without `exportable`, only this process's CPU can use it (`endpoint`)."""

    @abstractmethod
    def submit(
        self,
        *,
        wait: Sequence[tuple[ExporterSemaphore, int]] = (),
        fill: Sequence[Fill] = (),
        signal: Sequence[tuple[ExporterSemaphore, int]] = (),
    ) -> Submission:
        """Enqueue `fill`, after `wait` and before `signal`. Returns at once."""
