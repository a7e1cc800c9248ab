"""The contract of backends.

A backend may import only this module, `errors`, `installing`, `handles`, `capabilities` and `native_driver`. If it uses
gpuinterop's timeline semaphores on the CPU, it may also import `system` and `timeline`.

The core checks capabilities, arguments, ownership and lifetimes; a backend translates the call and makes it. A backend
raises `DriverError`, and `BackendUnavailableError` from ``__init__`` only. Several threads may call it at once. If the
driver needs a current device, the backend sets it.

A handle that the core passes in is a duplicate for this call. If the call succeeds, the driver owns the descriptor or
the backend has closed it. If the call raises, the backend leaves the handle alone, and the core checks who owns
the descriptor. The caller owns a returned handle, and the handle owns its descriptor (:meth:`FdHandle.adopt`).

If a method that creates something raises an error of gpuinterop, nothing is left of it (see `leave_to_core`).
The core calls a method that releases something only once. A signal handler may raise anywhere; the core then gives up
the object that was being created or released. A method needs no code for that case, but must not keep a lock or a
changed current device.

An interface that a backend does not inherit becomes a gap, with the interface's name as the reason.

If a semaphore returned by a backend has an attribute ``label``, the core sets it to the semaphore's name in messages.

Examples
--------
``docs/examples/backend`` is a backend that you can copy. An entry point names the class:

From ``docs/examples/backend/pyproject.toml``::

    [project.entry-points."gpuinterop.backends"]
    mine = "gpuinterop_mine.backend:MyBackend"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from . import system
from .capabilities import Capability, Operation
from .handles import (
    AllocationHandle,
    AnySemaphoreHandle,
    ArrayLayout,
    DeviceIdentity,
    Granularity,
    Handle,
    IpcMemHandle,
    MemoryHandle,
    OpaqueFd,
    VmmFd,
)

__all__ = [
    "INTERFACES",
    "Address",
    "AllocationBackend",
    "ArrayBackend",
    "Backend",
    "Block",
    "DeviceInfo",
    "DriverHandle",
    "GraphBackend",
    "HostSemaphoreBackend",
    "MemoryKind",
    "MulticastBackend",
    "SemaphoreNode",
    "SharingBackend",
    "StreamMemoryBackend",
    "pci_bus_id",
]

DriverHandle: TypeAlias = Any
"""An object of a backend, opaque to the core and never None.

It is ``Any``, so that a backend can narrow it under ``mypy --strict``.
"""
Address: TypeAlias = int
"""An address on the device or the host."""


def leave_to_core(error: BaseException, release: Callable[[], object]) -> None:
    """Let the core release the object of a failed call later, because its release blocks the device.

    The call raises `error`. The core calls `release` once no stream waits for a semaphore that is not signalled yet.
    """
    error.__dict__["_gpuinterop_release"] = release


def left_to_core(error: BaseException) -> Callable[[], object] | None:
    """Return and forget the release that `leave_to_core` attached to an error, or None."""
    release: Callable[[], object] | None = error.__dict__.pop("_gpuinterop_release", None)
    return release


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """A device as its backend reports it.

    Attributes
    ----------
    ordinal : int
        Number of the device in the backend, from 0.
    name : str
        Name of the device as its driver reports it.
    uuid : bytes, optional
        16 bytes that equal Vulkan's ``deviceUUID``; None if the vendor's UUID differs from that (HIP).
    pci_bus_id : str, optional
        ``dddd:bb:dd.f``, lower case.
    luid : bytes, optional
        8 bytes, Windows only.
    is_cpu : bool
        Whether it matches Vulkan's CPU devices. If so, a copy without a stream uses stream 0.
    dlpack : tuple of int
        DLPack's ``(DLDeviceType, device id)`` of mapped buffers.
    array_interface : str
        For host memory ``__array_interface__``: NumPy calls the view's ``__array__``, whose array has that interface.
        For GPU memory ``__cuda_array_interface__``, which the view itself has.
    note : str
        Why the device cannot match other APIs' devices (a MIG instance); empty if it can.

    Examples
    --------
    >>> from gpuinterop.backend import DeviceInfo
    >>> info = DeviceInfo(ordinal=0, name="My GPU", dlpack=(2, 0), array_interface="__cuda_array_interface__")
    >>> info.identity.name
    'My GPU'
    >>> device.info.array_interface
    '__array_interface__'
    """

    ordinal: int
    name: str
    uuid: bytes | None = None
    pci_bus_id: str | None = None
    luid: bytes | None = None
    is_cpu: bool = False
    dlpack: tuple[int, int]
    array_interface: str
    note: str = ""

    @property
    def identity(self) -> DeviceIdentity:
        """Identity to compare with the identity that another API reports."""
        return DeviceIdentity(
            name=self.name, uuid=self.uuid, luid=self.luid, pci_bus_id=self.pci_bus_id, is_cpu=self.is_cpu
        )


def pci_bus_id(text: str) -> str:
    """Convert a PCI address from a vendor's call, such as ``cuDeviceGetPCIBusId``, to `DeviceInfo.pci_bus_id`.

    Examples
    --------
    >>> from gpuinterop.backend import pci_bus_id
    >>> pci_bus_id("00000000:3F:00.0")
    '0000:3f:00.0'
    """
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


class Backend(ABC):
    """The calls of every backend: streams, events, copies, external memory and external semaphores.

    Examples
    --------
    An import that succeeds owns the descriptor. An import that raises leaves it alone.

    From ``docs/examples/backend/gpuinterop_mine/memory.py``::

        if size > self.size_of(handle.fd):
            raise HandleError("size: beyond the memfd.")
        memory = Imported(handle.fd, size)
        os.close(handle.fd)
        return memory
    """

    name: ClassVar[str]
    """Name of the backend in ``GPUINTEROP_BACKEND``."""
    priority: ClassVar[int] = 0
    """Rank of the backend if the user chooses none. The core uses the highest that works; the host backend has -1."""
    holds_gil: bool = False
    """Whether blocking calls keep the GIL. If so, the core polls `is_done` and never calls `synchronize`."""

    @property
    def releases_hold_gil(self) -> bool:
        """Whether blocking releases keep the GIL. By default the same as `holds_gil`.

        If so, no thread of this process can signal the semaphore that a release waits for. The core then releases only
        while every stream is idle.
        """
        return self.holds_gil

    synchronize_blocks_others: ClassVar[bool] = False
    """Whether `synchronize` may block the calls of other threads, even a call that would end the wait (HIP:
    ROCm/rocm-systems #11678). If so, the core polls `is_done` instead."""
    pageable_copies_block: ClassVar[bool] = True
    """Whether `copy` from or to pageable host memory blocks the caller until the stream reaches it (CUDA, HIP). While
    the stream has a pending wait that would deadlock, so the core refuses it."""

    releases_block: ClassVar[bool] = False
    """Whether `unmap_buffer`, `destroy_array` and `destroy_semaphore` wait for all work of the device and block every
    other call of the process meanwhile (CUDA: ``cuMemFree``, ``cuDestroyExternalSemaphore``). If a stream waits for a
    semaphore whose signal is not submitted yet, that deadlocks. The core calls them only while no wait is pending."""

    survives_fork: ClassVar[bool] = False
    """Whether a forked child can use the backend (host). A GPU's driver does not work in a forked child."""

    releases_block_for_all: ClassVar[bool] = False
    """Whether these releases also wait for other devices, as HIP's ``hipFree`` waits for device 0."""

    unknown_version: str = ""
    """A remark on a driver version that no recorded run covers, if the backend depends on the version; otherwise empty.
    `gpuinterop info` and the conformance kit print it, and the kit records nothing of such a run."""

    known_failures: Mapping[str, str] = MappingProxyType({})
    """Tests of the kit (``Suite.test``) that fail because of a defect of this driver version, each with the reason.
    The kit expects the failure (pytest's xfail)."""

    @abstractmethod
    def __init__(self) -> None:
        """Load the driver, or raise `BackendUnavailableError` with the reason. Must not create a context."""

    @abstractmethod
    def versions(self) -> Mapping[str, str]:
        """Versions of the driver, the runtime and the bindings by name."""

    def libraries(self) -> Mapping[str, str]:
        """Paths of the native libraries in use, by name."""
        return {}

    @abstractmethod
    def devices(self) -> Sequence[DeviceInfo]: ...

    @abstractmethod
    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        """Declare the device's capabilities: UNVERIFIED if the vendor supports one, else UNSUPPORTED with a reason.

        Never SUPPORTED: the core promotes the cells that ``verified.toml`` records for devices of this name, and adds
        the recorded runs to the reasons. A cell becomes a gap if it is not declared, or if its interface is not
        inherited. Must not create a context.
        """

    @abstractmethod
    def open_device(self, ordinal: int) -> DriverHandle:
        """Open a device. The core calls this once per device and process, and never closes the device."""

    # -- streams and events --------------------------------------------------------------------------------------

    @abstractmethod
    def create_stream(self, device: DriverHandle, *, high_priority: bool = False) -> DriverHandle:
        """Create a stream that does not block on the default stream.

        `high_priority` selects the device's highest priority, if it has several.
        """

    @abstractmethod
    def adopt_stream(self, device: DriverHandle, pointer: int) -> DriverHandle:
        """Wrap a stream that another library owns. 0 is the device's default stream."""

    @abstractmethod
    def stream_pointer(self, stream: DriverHandle) -> int:
        """The native stream as the number that other libraries accept."""

    def stream_key(self, stream: DriverHandle) -> Hashable:
        """A key that is equal for two handles of one native stream, and differs between streams.

        A driver may reuse a pointer, so a pointer is not always unique. The core adds the thread for per-thread
        streams. The key of a stream may change while it is being captured, because some drivers cannot be asked then.
        """
        return self.stream_pointer(stream)

    def blocks_default(self, stream: DriverHandle) -> bool:
        """Whether the default stream waits for an adopted stream's work. Called only if `map_allocation_blocks`."""
        return True

    @abstractmethod
    def destroy_stream(self, stream: DriverHandle) -> None:
        """Destroy a created stream; the core never passes an adopted one."""

    @abstractmethod
    def synchronize(self, stream: DriverHandle) -> None:
        """Block until the stream is idle; raise the stream's failure if it failed."""

    def is_idle(self, stream: DriverHandle) -> bool:
        """Whether all enqueued work is done. Never blocks; raises the stream's failure.

        The default records an event, which may be reported as done a moment late. Override it if the driver has a
        query (``cuStreamQuery``).
        """
        event = self.record(stream)
        try:
            return self.is_done(event)
        finally:
            self.destroy_event(event)

    @abstractmethod
    def wait_event(self, stream: DriverHandle, event: DriverHandle) -> None:
        """Make later work of `stream` wait for `event`."""

    @abstractmethod
    def record(self, stream: DriverHandle) -> DriverHandle:
        """Enqueue an event."""

    @abstractmethod
    def is_done(self, event: DriverHandle) -> bool:
        """Whether the event is done. Never blocks; raises the failure if the stream failed before the event."""

    @abstractmethod
    def destroy_event(self, event: DriverHandle) -> None: ...

    def is_capturing(self, stream: DriverHandle) -> bool:
        """Whether any library is capturing the stream's work into a graph, even if the capture has become invalid.

        The default suits a backend whose streams cannot be captured.
        """
        return False

    def wait_done(self, event: DriverHandle, timeout: float | None) -> bool:
        """Block the calling thread without the GIL until the event is done; False after `timeout` seconds.

        Drivers have no wait with a timeout, so the default polls `is_done`: without a sleep for a millisecond, then
        every 20 us, and later every 1 ms.
        """
        return system.until(lambda: self.is_done(event), timeout)

    @abstractmethod
    def copy(self, stream: DriverHandle, target: Address, source: Address, size: int) -> None:
        """Enqueue a copy of `size` bytes between two addresses of any kind (device, pinned or pageable)."""

    def is_pageable(self, device: DriverHandle, address: Address) -> bool:
        """Whether a copy of the host memory at `address` blocks. Called only if `pageable_copies_block`.

        The default is True for all memory. Override it if the driver can distinguish pinned memory.
        """
        return True

    @abstractmethod
    def fill(self, stream: DriverHandle, target: Address, byte: int, size: int) -> None: ...

    # -- external memory -----------------------------------------------------------------------------------------

    @abstractmethod
    def import_memory(
        self, device: DriverHandle, handle: MemoryHandle, *, size: int, dedicated: bool
    ) -> DriverHandle: ...

    @abstractmethod
    def map_buffer(self, memory: DriverHandle, *, size: int) -> tuple[DriverHandle, Address]:
        """Map the whole memory of `size` bytes; called again only after `unmap_buffer`.

        Returns the mapping and the address of its first byte. The core derives ranges from it, because two mappings of
        the same bytes are not coherent on CUDA, and HIP's runtimes 6.x and 7.x ignore a mapping's offset and write at
        offset 0.
        """

    @abstractmethod
    def unmap_buffer(self, mapping: DriverHandle) -> None: ...

    @abstractmethod
    def destroy_memory(self, memory: DriverHandle) -> None:
        """Destroy the memory. All its mappings are unmapped by then."""

    # -- external semaphores -------------------------------------------------------------------------------------

    @abstractmethod
    def import_semaphore(self, device: DriverHandle, handle: AnySemaphoreHandle) -> DriverHandle: ...

    @abstractmethod
    def prepare(self, semaphores: Sequence[DriverHandle]) -> DriverHandle:
        """Prepare a batch for `signal` and `wait`. Reuse parameter structs, but never share one between threads."""

    # values: timeline or fence value, mutex key, NvSciSyncFence address; 0 for binary
    @abstractmethod
    def signal(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int]) -> None: ...

    @abstractmethod
    def wait(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int], timeout_ms: int | None) -> None:
        """Enqueue a wait. `timeout_ms` is None except for keyed mutexes, if `Operation.WAIT_TIMEOUT` is usable."""

    @abstractmethod
    def destroy_semaphore(self, semaphore: DriverHandle) -> None: ...

    def abandon_semaphore(self, semaphore: DriverHandle) -> None:  # noqa: B027 - most drivers cannot cancel waits
        """Cancel pending waits if the driver can: ``close(timeout=...)`` has expired. The default does nothing."""


class ArrayBackend(Backend):
    """Mipmapped arrays.

    Examples
    --------
    >>> from gpuinterop.backend import ArrayBackend, Backend
    >>> sorted(ArrayBackend.__abstractmethods__ - Backend.__abstractmethods__)
    ['copy_level', 'destroy_array', 'map_array']
    """

    @abstractmethod
    def map_array(self, memory: DriverHandle, layout: ArrayLayout) -> DriverHandle: ...

    @abstractmethod
    def copy_level(
        self, stream: DriverHandle, array: DriverHandle, level: int, address: Address, size: int, *, to_array: bool
    ) -> None:
        """Enqueue a copy between a level (all its layers, tightly packed) and `size` bytes at `address`."""

    @abstractmethod
    def destroy_array(self, array: DriverHandle) -> None: ...


class HostSemaphoreBackend(Backend):
    """Semaphores that the backend creates and exports, and that a thread can wait for without a stream.

    Examples
    --------
    >>> from gpuinterop.backend import Backend, HostSemaphoreBackend
    >>> sorted(HostSemaphoreBackend.__abstractmethods__ - Backend.__abstractmethods__)
    ['create_semaphore', 'export_semaphore', 'host_signal', 'host_value', 'host_wait']
    """

    @abstractmethod
    def create_semaphore(self, device: DriverHandle, handle_type: type[AnySemaphoreHandle]) -> DriverHandle: ...

    @abstractmethod
    def export_semaphore(self, semaphore: DriverHandle) -> AnySemaphoreHandle:
        """A new handle that the caller owns. The core sets its origin."""

    @abstractmethod
    def host_value(self, semaphore: DriverHandle) -> int:
        """The counter. Called only for a timeline or a fence."""

    @abstractmethod
    def host_signal(self, semaphore: DriverHandle, value: int) -> None: ...

    @abstractmethod
    def host_wait(self, semaphore: DriverHandle, value: int, timeout: float | None) -> bool:
        """Block the calling thread without the GIL; False after `timeout` seconds."""


class AllocationBackend(Backend):
    """Memory that the backend allocates, and that other processes and APIs can import.

    Examples
    --------
    >>> from gpuinterop.backend import AllocationBackend, Backend
    >>> sorted(AllocationBackend.__abstractmethods__ - Backend.__abstractmethods__)
    ['allocate', 'export_allocation', 'granularity', 'import_allocation', 'map_allocation', 'release_allocation',
     'unmap_allocation']
    """

    map_allocation_blocks: ClassVar[bool] = False
    """Whether `map_allocation` and `unmap_allocation` wait for the default stream (and so for all streams that block
    it), and block the other calls of the process meanwhile (HIP). The core calls them only while none of these streams
    has a pending wait."""

    @abstractmethod
    def granularity(self, device: DriverHandle, handle_type: type[AllocationHandle]) -> Granularity:
        """Granularity of sizes. A size must be a multiple of the minimum."""

    @abstractmethod
    def allocate(self, device: DriverHandle, size: int, handle_type: type[AllocationHandle]) -> DriverHandle: ...

    @abstractmethod
    def export_allocation(self, allocation: DriverHandle) -> AllocationHandle:
        """A new handle that the caller owns. The core sets its origin."""

    @abstractmethod
    def import_allocation(self, device: DriverHandle, handle: AllocationHandle, *, size: int) -> DriverHandle: ...

    @abstractmethod
    def map_allocation(self, allocation: DriverHandle, devices: Sequence[DriverHandle]) -> tuple[DriverHandle, Address]:
        """Map the allocation at one address for reads and writes of all `devices`, which `can_access` allows."""

    @abstractmethod
    def unmap_allocation(self, mapping: DriverHandle) -> None: ...

    @abstractmethod
    def release_allocation(self, allocation: DriverHandle) -> None: ...

    def can_access(self, ordinal: int, peer: int) -> bool:
        """Whether the device `ordinal` can use the memory of the device `peer`. Must not create a context.

        The default is for backends whose devices cannot.
        """
        return False

    def location(self, allocation: DriverHandle) -> int | None:
        """The ordinal of the device that holds an imported allocation.

        None if the driver does not report it, for example because the device is hidden from this process.
        """
        return None


class StreamMemoryBackend(Backend):
    """64-bit words in host memory that streams write and wait for.

    The core's timelines (`gpuinterop.timeline`, `Operation.CREATE_SEMAPHORE`) and the bridge use them.

    Examples
    --------
    >>> from gpuinterop.backend import Backend, StreamMemoryBackend
    >>> sorted(StreamMemoryBackend.__abstractmethods__ - Backend.__abstractmethods__)
    ['pin', 'unpin', 'wait_value', 'write_value']
    """

    @abstractmethod
    def pin(self, device: DriverHandle, address: Address, size: int) -> tuple[DriverHandle, Address]:
        """Let the device's streams use whole pages of host memory (``cuMemHostRegister``, ``hipHostRegister``).

        Other processes and other devices may share and pin the pages too. Returns the pin, and the address of the first
        byte for the device's streams.
        """

    @abstractmethod
    def unpin(self, pin: DriverHandle) -> None:
        """Undo `pin`. No stream uses the memory by then, and it is still mapped. May block (`releases_block`)."""

    @abstractmethod
    def write_value(self, stream: DriverHandle, word: Address, value: int) -> None:
        """Make the stream store a 64-bit word once its earlier work is done and that work's writes are visible."""

    @abstractmethod
    def wait_value(self, stream: DriverHandle, word: Address, value: int) -> None:
        """Make the stream wait until the word is at least `value`. Values are below 2**63: comparisons wrap around."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SemaphoreNode:
    """A node of a graph that signals or waits.

    Attributes
    ----------
    native : DriverHandle
        The node.
    signals : bool
        True if the node signals, False if it waits.
    semaphores : tuple of int
        The semaphores, as numbers from `GraphBackend.semaphore_pointer`.
    values : tuple of int
        The captured values.

    Examples
    --------
    >>> from gpuinterop.backend import SemaphoreNode
    >>> SemaphoreNode(native=0x5510, signals=True, semaphores=(0x7F00,), values=(2,)).signals
    True
    """

    native: DriverHandle
    signals: bool
    semaphores: tuple[int, ...]
    values: tuple[int, ...]


class GraphBackend(Backend):
    """Captures signals and waits into graphs, and sets their values for each launch.

    Graphs and executables are plain numbers (``CUgraph``, ``CUgraphExec``), because other libraries own most of them.

    Examples
    --------
    >>> from gpuinterop.backend import Backend, GraphBackend
    >>> sorted(GraphBackend.__abstractmethods__ - Backend.__abstractmethods__)
    ['begin_capture', 'destroy_executable', 'destroy_graph', 'end_capture', 'instantiate', 'launch', 'semaphore_nodes',
     'semaphore_pointer', 'set_node']
    """

    @abstractmethod
    def begin_capture(self, stream: DriverHandle) -> None: ...

    @abstractmethod
    def end_capture(self, stream: DriverHandle) -> int:
        """The graph."""

    @abstractmethod
    def instantiate(self, device: DriverHandle, graph: int) -> int:
        """The executable."""

    @abstractmethod
    def launch(self, executable: int, stream: DriverHandle) -> None: ...

    @abstractmethod
    def destroy_graph(self, device: DriverHandle, graph: int) -> None: ...

    @abstractmethod
    def destroy_executable(self, device: DriverHandle, executable: int) -> None: ...

    @abstractmethod
    def semaphore_pointer(self, semaphore: DriverHandle) -> int:
        """The number that a graph's nodes use for the semaphore."""

    @abstractmethod
    def semaphore_nodes(self, graph: int) -> Sequence[SemaphoreNode]:
        """The nodes that signal or wait, in the driver's order."""

    @abstractmethod
    def set_node(
        self, executable: int, node: SemaphoreNode, semaphores: Sequence[DriverHandle], values: Sequence[int]
    ) -> None:
        """Set the values of later launches. Launches that are already running keep theirs."""


class MemoryKind(Enum):
    """The kind of memory at an address.

    Examples
    --------
    >>> from gpuinterop.backend import MemoryKind
    >>> MemoryKind.IPC.handle_type
    <class 'gpuinterop.handles.IpcMemHandle'>
    """

    __hash__ = object.__hash__  # faster than Enum's: each search hashes a block several times

    IPC = "memory that a legacy IPC handle names"
    VMM = "a VMM handle that can be exported"
    FILE = "a memfd"
    CLOSED = "a VMM handle that was made without the right to export it"
    POOL = "a stream-ordered pool"
    MANAGED = "managed memory"
    HOST = "host memory"
    NOTHING = "memory unknown to the driver"

    @cached_property
    def handle_type(self) -> type[Handle]:
        """The handle type that carries such memory, or would if it could be shared."""
        ways: dict[MemoryKind, type[Handle]] = {MemoryKind.VMM: VmmFd, MemoryKind.CLOSED: VmmFd}
        files = (MemoryKind.FILE, MemoryKind.HOST, MemoryKind.NOTHING)
        return ways.get(self) or (OpaqueFd if self in files else IpcMemHandle)

    @property
    def travels(self) -> bool:
        """Whether another process can import it."""
        return self in (MemoryKind.IPC, MemoryKind.VMM, MemoryKind.FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The piece of memory around an address that one handle shares.

    Attributes
    ----------
    kind : MemoryKind
        Its kind.
    address : int
        Address of its first byte in this process.
    size : int
        Size in bytes; 0 if it cannot be shared.
    key : int
        Number of the allocation. Other memory at the same address has a different key.
    ordinal : int
        The device that holds it; -1 if none does.

    Examples
    --------
    >>> from gpuinterop.backend import Block, MemoryKind
    >>> Block(kind=MemoryKind.VMM, address=0x7F0000000000, size=2 << 20, key=56, ordinal=0).end == 0x7F0000200000
    True
    """

    kind: MemoryKind
    address: Address = 0
    size: int = 0
    key: int = 0
    ordinal: int = -1

    @property
    def end(self) -> Address:
        """Address after the last byte."""
        return self.address + self.size


class SharingBackend(Backend):
    """Shares memory that other libraries have allocated with other processes.

    Examples
    --------
    >>> from gpuinterop.backend import Backend, SharingBackend
    >>> sorted(SharingBackend.__abstractmethods__ - Backend.__abstractmethods__)
    ['attach_blocks', 'detach_blocks', 'export_block', 'find_blocks', 'is_there']
    """

    joins_blocks: ClassVar[bool] = False
    """Whether `attach_blocks` accepts several blocks of `VmmFd`."""

    @abstractmethod
    def find_blocks(self) -> Callable[[Address], Block]:
        """A call that finds the block at an address (``cuPointerGetAttribute``), for many addresses at one time.

        It may miss memory that is mapped later. It creates no context and exports nothing.
        """

    @abstractmethod
    def is_there(self, block: Block) -> bool:
        """Whether the address still holds the block, compared by its key; one query of the driver.

        Also True if `export_block` would notice the difference.
        """

    @abstractmethod
    def export_block(self, device: DriverHandle, block: Block) -> Handle:
        """A new handle of type ``block.kind.handle_type`` that the caller owns. `find_blocks` has just found it."""

    @abstractmethod
    def attach_blocks(
        self, device: DriverHandle, handles: Sequence[Handle], sizes: Sequence[int]
    ) -> tuple[DriverHandle, Address]:
        """Map another process's blocks at consecutive addresses, for `device` to read and write.

        The caller keeps the handles and their descriptors. All are of one type. A backend refuses several if
        `joins_blocks` is False: a peer may send them. The memory may be on a different device.
        """

    @abstractmethod
    def detach_blocks(self, attached: DriverHandle) -> None:
        """Undo `attach_blocks`. May block (`releases_block`)."""


class MulticastBackend(AllocationBackend):
    """Multicast objects, called groups here: a store to a group reaches the memory of every device of its team.

    `map_allocation`, `unmap_allocation` and `release_allocation` also accept groups. The core checks granularity,
    ranges, devices and the order of the calls: a bind or map would block until every device of the team is added, so
    the core refuses it until then. The core binds bytes once, and an unbind always matches its bind. It releases a
    binding or a mapping after the work of the team's devices, and when a whole group is closed, mappings before
    bindings.

    Examples
    --------
    >>> from gpuinterop.backend import AllocationBackend, MulticastBackend
    >>> sorted(MulticastBackend.__abstractmethods__ - AllocationBackend.__abstractmethods__)
    ['add_device', 'bind_address', 'bind_memory', 'create_multicast', 'export_multicast', 'import_multicast',
     'is_shareable', 'multicast_granularity', 'multimem_add', 'multimem_store', 'unbind']
    """

    @abstractmethod
    def multicast_granularity(
        self, devices: int, size: int, handle_types: Sequence[type[AllocationHandle]]
    ) -> Granularity:
        """Granularity of a group of `devices` devices. Must not create a context."""

    @abstractmethod
    def create_multicast(
        self, device: DriverHandle, devices: int, size: int, handle_types: Sequence[type[AllocationHandle]]
    ) -> DriverHandle:
        """Create a group for a team of `devices` devices without adding any. `device` only makes the call."""

    @abstractmethod
    def export_multicast(self, group: DriverHandle, handle_type: type[AllocationHandle]) -> AllocationHandle:
        """A new handle that the caller owns. The core sets its origin."""

    @abstractmethod
    def import_multicast(
        self, device: DriverHandle, handle: AllocationHandle, *, devices: int, size: int
    ) -> DriverHandle:
        """Import a group like `import_allocation`. `device` only makes the call."""

    @abstractmethod
    def add_device(self, group: DriverHandle, device: DriverHandle) -> None: ...

    @abstractmethod
    def bind_memory(
        self, group: DriverHandle, device: DriverHandle, offset: int, allocation: DriverHandle, start: int, size: int
    ) -> None:
        """Bind bytes of an allocation on `device`, from `start`, to the group's bytes from `offset`."""

    @abstractmethod
    def bind_address(self, group: DriverHandle, device: DriverHandle, offset: int, address: Address, size: int) -> None:
        """Bind mapped memory of `device`."""

    @abstractmethod
    def unbind(self, group: DriverHandle, device: DriverHandle, offset: int, size: int) -> None: ...

    @abstractmethod
    def is_shareable(self, device: DriverHandle, address: Address) -> bool:
        """Whether the mapped memory at `address` can be exported, as a shareable group requires."""

    @abstractmethod
    def multimem_store(self, stream: DriverHandle, address: Address, value: int, count: int) -> None:
        """Make the stream store a 32-bit word `count` times to all memory bound to a mapped group (``multimem.st``)."""

    @abstractmethod
    def multimem_add(self, stream: DriverHandle, target: Address, address: Address, count: int) -> None:
        """Make the stream sum `count` 32-bit words over all bound memory into `target` (``multimem.ld_reduce``).

        Each word has its own sum, modulo 2**32.
        """


INTERFACES: Mapping[Operation, tuple[type[Backend], ...]] = {
    Operation.MAP_MIPMAPPED_ARRAY: (ArrayBackend,),
    Operation.CREATE_SEMAPHORE: (HostSemaphoreBackend, StreamMemoryBackend),
    Operation.EXPORT_ALLOCATION: (AllocationBackend,),
    Operation.IMPORT_ALLOCATION: (AllocationBackend,),
    Operation.CREATE_MULTICAST: (MulticastBackend,),
    Operation.EXPORT_MULTICAST: (MulticastBackend,),
    Operation.IMPORT_MULTICAST: (MulticastBackend,),
    Operation.EXPORT_ARRAY: (SharingBackend,),
    Operation.IMPORT_ARRAY: (SharingBackend,),
    Operation.STREAM_MEMORY_OPS: (StreamMemoryBackend,),
    Operation.GRAPH_CAPTURE: (GraphBackend,),
}
"""The optional interfaces that can implement an operation. The operation needs one of them.

Examples
--------
>>> gi.backend.INTERFACES[gi.Operation.GRAPH_CAPTURE]
(<class 'gpuinterop.backend.GraphBackend'>,)
"""
