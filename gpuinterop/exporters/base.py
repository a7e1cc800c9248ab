"""What an independent party can do: make memory and semaphores by its own means, and use them by its own means.

The demo and the conformance kit drive these. An exporter never calls the backend under test: what it
writes, reads, signals and waits for goes through Vulkan, or through its own mapping of the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from .._arguments import NoCopy, check_int
from ..bridge import Endpoint
from ..capabilities import Capabilities, Operation
from ..errors import ArgumentTypeError, GpuInteropError, InvalidArgumentError, UnsupportedError
from ..handles import (
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
    from .._core.device import Device

__all__ = [
    "Driver",
    "DriverList",
    "Exporter",
    "ExporterImage",
    "ExporterMemory",
    "ExporterSemaphore",
    "Fill",
    "ImageParameters",
    "Kernel",
    "Submission",
]

_IMAGES = (Operation.MAP_MIPMAPPED_ARRAY, OpaqueFd)
_ALLOCATIONS = (Operation.EXPORT_ALLOCATION, VmmFd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What draws on one device, for reports.

    Attributes
    ----------
    api : str
        ``vulkan`` or ``opengl``.
    index : int
        Its place in the loader's order: what ``VulkanExporter(device_index=...)`` or ``HeadlessContext(...)`` opens
        exactly this one with.
    name : str
        The device's name.
    driver, version : str
        The driver's name and version.
    identity : DeviceIdentity
    capabilities : Capabilities
        The table of :func:`gpuinterop.vulkan.capabilities` or :func:`gpuinterop.opengl.capabilities`.
    endpoint_gap : str
        Why no bridge can use its timelines; empty if one can.
    gaps : callable
        Says of this and a device, for each mode of a handoff, why they cannot hand over in it; None where they can.
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
    """What was found.

    Attributes
    ----------
    reason : str
        Why the list is empty, or what is wrong with a device that is missing from it; empty otherwise.
    """

    reason: str = ""

    @contextmanager
    def noting(self, label: str) -> Iterator[None]:
        """Note why one of them fails, and go on: it must not hide the others."""
        try:
            yield
        except GpuInteropError as error:
            self.reason = "; ".join(filter(None, (self.reason, f"{label}: {error}")))


class _Closing(NoCopy, ABC):
    @abstractmethod
    def close(self) -> None:
        """Idempotent. Blocks until the exporter's own pending work is done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ExporterMemory(_Closing):
    """A memory object that the exporter owns.

    Attributes
    ----------
    size : int
        Size of the whole allocation in bytes; at least the size that was asked for.
    dedicated : bool
        Whether the allocation is a dedicated one.
    """

    size: int
    dedicated: bool

    @abstractmethod
    def export(self) -> MemoryHandle:
        """A new handle that the caller owns, with its origin filled in."""

    @abstractmethod
    def write(self, offset: int, data: bytes) -> None:
        """Write by the exporter's own means; returns when the bytes are there for everybody."""

    @abstractmethod
    def read(self, offset: int, size: int) -> bytes:
        """Read by the exporter's own means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageParameters:
    """An optimally tiled image of one sample a texel.

    Attributes
    ----------
    format : str
        Vulkan's name, without ``VK_FORMAT_``.
    width : int
        Size in texels.
    height : int
        Size in texels.
    depth : int
        Size in texels; 0: a 2D image.
    levels : int
        Mip levels.
    layers : int
        Array layers; 0: no array.
    cube : bool
        Every six layers are the faces of a cube.
    usage : int, optional
        ``VkImageUsageFlags``. Default: storage, sampled and transfers both ways; without storage where the driver
        shares no storage images of the format.
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
            object.__setattr__(self, name, number)  # NumPy's are Python's from now on
        if not isinstance(self.cube, bool):
            raise ArgumentTypeError("cube", f"expected True or False, got {self.cube!r}.")
        if self.depth and self.layers:
            raise InvalidArgumentError("layers", "a 3D image has none.")
        if self.cube and (self.layers == 0 or self.layers % 6 or self.width != self.height):
            raise InvalidArgumentError("cube", "has square faces, and a multiple of 6 layers.")
        if self.levels > max(self.extent).bit_length():  # the last level is one texel
            raise InvalidArgumentError("levels", f"an image of {self.extent} has no {self.levels} levels.")

    @property
    def extent(self) -> tuple[int, int, int]:
        """Width, height, depth; a depth of 0 for a 2D image, as ``map_mipmapped_array`` takes it."""
        return self.width, self.height, self.depth

    def level_extent(self, level: int) -> tuple[int, int, int]:
        """The same at a level."""
        if not 0 <= level < self.levels:
            raise InvalidArgumentError("level", f"there are levels 0 to {self.levels - 1}, not {level}.")
        width, height, depth = (max(1, edge >> level) if edge else 0 for edge in self.extent)
        return width, height, depth

    def level_bytes(self, level: int) -> int:
        """The size of a level, all its layers, tightly packed."""
        width, height, depth = self.level_extent(level)
        return width * height * max(1, depth) * max(1, self.layers) * texel_of(self.format).nbytes


class ExporterImage(_Closing):
    """An image that the exporter owns, with memory of its own. Between calls it is in ``VK_IMAGE_LAYOUT_GENERAL``.

    Attributes
    ----------
    parameters : ImageParameters
    size : int
        Size of the whole allocation in bytes.
    dedicated : bool
        Whether the allocation is a dedicated one.
    usage : int
        ``VkImageUsageFlags`` that it was created with.
    """

    parameters: ImageParameters
    size: int
    dedicated: bool
    usage: int

    @property
    def array_usage(self) -> ArrayUsage:
        """What ``map_mipmapped_array`` has to be told of it."""
        usage = usage_of(self.usage)
        return usage | ArrayUsage.CUBEMAP if self.parameters.cube else usage

    @abstractmethod
    def export(self) -> MemoryHandle:
        """A new handle of its memory that the caller owns, with its origin filled in."""

    @abstractmethod
    def write(self, level: int, data: bytes) -> None:
        """Replace a level, all its layers, by tightly packed bytes; returns when they are there for everybody."""

    @abstractmethod
    def read(self, level: int) -> bytes:
        """A level, all its layers, tightly packed."""


class ExporterSemaphore(_Closing):
    """A semaphore that the exporter owns; `kind` is ``gpuinterop.handles.Binary`` or ``Timeline``."""

    kind: type

    @abstractmethod
    def export(self) -> AnySemaphoreHandle:
        """A new handle that the caller owns, with its origin filled in."""

    @abstractmethod
    def signal(self, value: int = 0) -> None:
        """Signal by the exporter's own means; returns when the signal is on its way."""

    @abstractmethod
    def wait(self, value: int = 0, *, timeout: float) -> bool:
        """Wait by the exporter's own means, consuming a binary one; False when `timeout` seconds passed.

        After False a binary wait is still pending on Vulkan's queue: it consumes the next signal.
        """

    def endpoint(self) -> Endpoint:
        """Give the semaphore to a bridge: this process's CPU waits for it and signals it. It stays the exporter's.

        Raises
        ------
        InvalidArgumentError
            The CPU cannot: a binary semaphore of Vulkan's.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Work for a submission: a program of the caller's that changes `memory`, in the form that the party can run.

    Programs are named, and imported where they run: by the party's process, from its own ``sys.path``.

    Attributes
    ----------
    memory : ExporterMemory
    function : str
        ``module:name``, which a party on the CPU calls with a memoryview of the bytes and with `arguments`. The
        function keeps nothing of the view.
    shader : str
        ``package:file``, which Vulkan dispatches: SPIR-V, whose ``main`` finds the memory as the storage buffer at
        binding 0 of set 0, and `arguments` as push constants.
    groups : tuple of int
        Work groups of the shader in each of three dimensions.
    arguments : tuple of int or float
        Numbers of 32 bits, unsigned or floating; 32 at most.
    """

    memory: Any
    function: str = ""
    shader: str = ""
    groups: Sequence[int] = (1, 1, 1)
    arguments: Sequence[int | float] = ()

    def __post_init__(self) -> None:
        for name, form in (("function", "module:name"), ("shader", "package:file")):
            given = getattr(self, name)
            if given and not all(given.partition(":")):
                raise InvalidArgumentError(name, f"expected {form}, got {given!r}.")

    def program(self, form: str) -> str:
        """The name in one form, ``function`` or ``shader``.

        Raises
        ------
        InvalidArgumentError
            The kernel has no program in that form.
        """
        name: str = getattr(self, form)
        if not name:
            raise InvalidArgumentError("run", f"expected a kernel with a {form}, which this party runs; got {self!r}.")
        return name


class Submission(_Closing):
    """Asynchronous work of the exporter."""

    @abstractmethod
    def done(self, timeout: float = 0.0) -> bool:
        """Whether the work has finished; waits up to `timeout` seconds. After True nothing is left to close."""


class Exporter(_Closing):
    """An independent party.

    Attributes
    ----------
    name : str
        ``vulkan``, ``memfd`` or ``process``.
    driver : str
        Name and version of the driver, for reports.
    device : str
        Name of the device, for reports.
    identity : DeviceIdentity
        What ``gpuinterop.match_device`` takes: its own device, or the one that its handles are said to come from.
    """

    name: str
    driver: str
    device: str
    identity: DeviceIdentity

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Capabilities of this party. A cell is usable if the party can play the other part in that operation."""

    @abstractmethod
    def create_memory(self, size: int) -> ExporterMemory: ...

    @property
    def endpoint_gap(self) -> str:
        """Why the timelines have no `endpoint`; empty where they have one."""
        return ""

    def import_memory(self, handle: AllocationHandle, size: int) -> ExporterMemory:
        """Take over what a device has allocated and exported.

        The result is memory like any other, but is not exported again. Success consumes `handle`.

        Raises
        ------
        UnsupportedError
            This party cannot (its table: ``export_allocation`` of that handle type).
        """
        raise UnsupportedError(self.capabilities.of(_ALLOCATIONS), context=self.device)

    def image_gap(self, parameters: ImageParameters) -> str:
        """Why this party cannot make and share such an image; empty when it can."""
        return self.capabilities.of(_IMAGES).reason

    def create_image(self, parameters: ImageParameters) -> ExporterImage:
        """Make an image; its texels are undefined.

        Raises
        ------
        UnsupportedError
            This party shares no images (its table: ``map_mipmapped_array``).
        InvalidArgumentError
            It shares none like this; `image_gap` gives the same reason.
        """
        raise UnsupportedError(self.capabilities.of(_IMAGES), context=self.device)

    @abstractmethod
    def create_semaphore(self, kind: type, *, exportable: bool = True) -> ExporterSemaphore:
        """Make a semaphore of `kind`; one that is not `exportable` is for this process's CPU (`endpoint`)."""

    @abstractmethod
    def submit(
        self,
        *,
        wait: Sequence[tuple[ExporterSemaphore, int]] = (),
        fill: Sequence[Fill] = (),
        run: Sequence[Kernel] = (),
        signal: Sequence[tuple[ExporterSemaphore, int]] = (),
    ) -> Submission:
        """Enqueue: after `wait`, do `fill`, then `run`, then `signal`. Returns at once."""
