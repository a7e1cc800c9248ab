"""The contract of backends. A backend may import only this module, errors, handles, capabilities and native_driver.

(And `gpuinterop.system` and `gpuinterop.timeline`, if it uses our timeline semaphores on the CPU.)

The core checks capability, arguments, ownership and lifetime; a backend translates and calls. It raises
`BackendUnavailableError` (from ``__init__`` only) and `DriverError`. Several threads may call it at once. A backend
makes its device current if the driver needs that.

A handle passed in is a duplicate made for the call. On success the driver owns it, or the backend has closed it. On an
exception the backend leaves it alone, and the core settles who owns the number. The caller owns a returned handle,
which owns its descriptor (:meth:`FdHandle.adopt`).

A method that makes something, and raises an error of gpuinterop, has made nothing, or has undone it (`leave_to_core`).
The core calls a method that releases something once. A signal handler may raise anywhere. The core then leaves alone
what was being made or released; a method needs no code for that, but leaves no lock held and the current device as it
was.

The core makes an interface that a backend does not inherit a gap, with the interface's name as the reason.

If a semaphore that a backend returns has an attribute ``label``, the core sets it to the semaphore's name in messages.

Examples
--------
``docs/examples/backend`` is a backend to copy. An entry point names the class:

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
    "Behind",
    "Block",
    "DeviceInfo",
    "DriverHandle",
    "GraphBackend",
    "HostSemaphoreBackend",
    "MulticastBackend",
    "SemaphoreNode",
    "SharingBackend",
    "StreamMemoryBackend",
    "pci_bus_id",
]

DriverHandle: TypeAlias = Any
"""An object of a backend, opaque to the core, and not None.

It is ``Any``, so a backend may narrow it under ``mypy --strict``.
"""
Address: TypeAlias = int
"""An address on the device or the host."""


def leave_to_core(error: BaseException, release: Callable[[], object]) -> None:
    """Leave to the core what a call has made before it failed, if its release blocks the device.

    The call raises `error`. The core then calls `release` when the object's own release could run: while no stream
    waits for a semaphore that is not signalled yet.

    Examples
    --------
    >>> from gpuinterop.backend import leave_to_core, left_to_core
    >>> error = KeyboardInterrupt()
    >>> leave_to_core(error, print)
    >>> left_to_core(error) is print
    True
    """
    error.__dict__["_gpuinterop_release"] = release


def left_to_core(error: BaseException) -> Callable[[], object] | None:
    """Take what `leave_to_core` has left with an error; None if nothing."""
    release: Callable[[], object] | None = error.__dict__.pop("_gpuinterop_release", None)
    return release


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device as its backend sees it.

    Attributes
    ----------
    ordinal : int
        Number of the device among the backend's devices, from 0.
    name : str
        Name of the device as its driver reports it.
    uuid : bytes, optional
        16 bytes that equal Vulkan's ``deviceUUID``; None if the vendor's UUID differs from that (HIP).
    pci_bus_id : str, optional
        ``dddd:bb:dd.f``, lower case.
    luid : bytes, optional
        8 bytes, Windows only.
    is_cpu : bool
        Whether it matches Vulkan's CPU devices. A copy without a stream then goes to stream 0.
    dlpack : tuple of int
        DLPack's ``(DLDeviceType, device id)`` of mapped buffers.
    array_interface : str
        ``__array_interface__`` if its memory is the host's: NumPy takes a view of it by ``__array__``, and the array
        has that interface. ``__cuda_array_interface__`` if its memory is a GPU's: the view has that interface.
    note : str
        Why the device cannot match other APIs' devices, if it cannot (a MIG instance).

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
        """Identity to compare with the one that another API reports."""
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
    """The calls of every backend: streams, events, copies, external memory, external semaphores.

    Examples
    --------
    An import owns the descriptor when it returns, and leaves it alone when it raises.

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
    """Rank of the backend when none is chosen. The core takes the highest that works; the host backend has -1."""
    holds_gil: bool = False
    """Whether blocking calls keep the GIL. If so, the core polls `is_done` and never calls `synchronize`."""

    @property
    def releases_hold_gil(self) -> bool:
        """Whether releases that block keep the GIL, as `holds_gil` says unless it is overridden.

        If so, no thread of this process can signal what they wait for, and the core makes them only while every stream
        is idle.
        """
        return self.holds_gil

    synchronize_blocks_others: ClassVar[bool] = False
    """Whether calls of other threads, even one that would end the wait, may block while a thread is in `synchronize`
    (HIP: ROCm/rocm-systems #11678): the core then polls `is_done` instead."""
    pageable_copies_block: ClassVar[bool] = True
    """Whether `copy` from or to pageable host memory blocks the caller until the stream gets there (CUDA, HIP). Behind
    a pending wait that deadlocks, so the core refuses it."""

    releases_block: ClassVar[bool] = False
    """Whether `unmap_buffer`, `destroy_array` and `destroy_semaphore` wait for all work of the device, while every
    other call of the process waits for them (CUDA: ``cuMemFree``, ``cuDestroyExternalSemaphore``). Behind a semaphore
    wait whose signal is not submitted yet that deadlocks, so the core calls them only while no wait is pending."""

    survives_fork: ClassVar[bool] = False
    """Whether a forked child may use the backend anew (host). A GPU's driver does not work in a forked child."""

    releases_block_for_all: ClassVar[bool] = False
    """Whether those releases also wait for work of other devices, as HIP's ``hipFree`` does for that of device 0."""

    unknown_version: str = ""
    """Remark on a driver whose version no run has shown, where the backend goes by the version; empty for others.
    `gpuinterop info` and the header of a run of the kit print it, and nothing is recorded of such a run."""

    known_failures: Mapping[str, str] = MappingProxyType({})
    """Tests of the kit that fail for what this version of the driver does, as ``Suite.test``, each with the reason.
    The kit expects the failure (pytest's xfail)."""

    @abstractmethod
    def __init__(self) -> None:
        """Load the driver, or raise `BackendUnavailableError` with the reason. Must not create a context."""

    @abstractmethod
    def versions(self) -> Mapping[str, str]:
        """Versions of driver, runtime and bindings by name."""

    def libraries(self) -> Mapping[str, str]:
        """Paths of the native libraries in use by name."""
        return {}

    @abstractmethod
    def devices(self) -> Sequence[DeviceInfo]: ...

    @abstractmethod
    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        """Declare what the device can do: UNVERIFIED if the vendor supports it, else UNSUPPORTED with a reason.

        Never SUPPORTED: the core promotes cells that ``verified.toml`` has shown on devices of this name, and adds
        recorded runs to the reasons. Cells that are not declared, and those of interfaces that are not inherited,
        become gaps. Must not create a context.
        """

    @abstractmethod
    def open_device(self, ordinal: int) -> DriverHandle:
        """Open a device. The core calls it once per device and process, and never closes the device."""

    # -- streams and events --------------------------------------------------------------------------------------

    @abstractmethod
    def create_stream(self, device: DriverHandle, *, high_priority: bool = False) -> DriverHandle:
        """Create a stream that does not block on the default one.

        With `high_priority` it has the device's highest priority, if there are several; else the normal one.
        """

    @abstractmethod
    def adopt_stream(self, device: DriverHandle, pointer: int) -> DriverHandle:
        """Wrap a stream that another library owns. 0 is the device's default stream."""

    @abstractmethod
    def stream_pointer(self, stream: DriverHandle) -> int:
        """The native stream's number, as other libraries pass it."""

    def stream_key(self, stream: DriverHandle) -> Hashable:
        """A key that is equal for two handles of one native stream, and differs for any other stream.

        A driver may reuse a pointer, so that is not always such a key. For per-thread streams, the core adds the
        thread. A stream that is being captured cannot always be asked, and then has another key than before.
        """
        return self.stream_pointer(stream)

    def blocks_default(self, stream: DriverHandle) -> bool:
        """Whether the default stream waits for an adopted stream's work; asked only if `map_allocation_blocks`."""
        return True

    @abstractmethod
    def destroy_stream(self, stream: DriverHandle) -> None:
        """Destroy a created stream; the core never passes an adopted one."""

    @abstractmethod
    def synchronize(self, stream: DriverHandle) -> None:
        """Block until the stream is idle; raise its failure, if it has failed."""

    def is_idle(self, stream: DriverHandle) -> bool:
        """Whether all enqueued work is done; never blocks, and raises the stream's failure.

        The default records an event, which a driver may need a moment to see as done. Override it if the driver has a
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
        """Whether the event is done; never blocks. Raises the stream's failure if it failed before the event."""

    @abstractmethod
    def destroy_event(self, event: DriverHandle) -> None: ...

    def is_capturing(self, stream: DriverHandle) -> bool:
        """Whether the stream's work goes into a graph of any library, even if the capture has become invalid.

        The default suits a backend whose streams cannot be captured.
        """
        return False

    def wait_done(self, event: DriverHandle, timeout: float | None) -> bool:
        """Block the calling thread, GIL released, until the event is done; False if `timeout` seconds passed.

        The default polls `is_done`, for a millisecond without a sleep, then every 20 us, and every 1 ms later: vendors
        have no wait with a timeout.
        """
        return system.until(lambda: self.is_done(event), timeout)

    @abstractmethod
    def copy(self, stream: DriverHandle, target: Address, source: Address, size: int) -> None:
        """Enqueue a copy of `size` bytes between any two addresses (device, pinned or pageable)."""

    def is_pageable(self, device: DriverHandle, address: Address) -> bool:
        """Whether a copy of the host memory at `address` blocks; called only if `pageable_copies_block`.

        The default is True for all memory. Override it if the driver can tell which memory is pinned.
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

        Returns the mapping and the address of its first byte. The core makes ranges of it: on CUDA two mappings of the
        same bytes are not coherent, and HIP's runtimes 6.x and 7.x ignore a mapping's offset and write at offset 0.
        """

    @abstractmethod
    def unmap_buffer(self, mapping: DriverHandle) -> None: ...

    @abstractmethod
    def destroy_memory(self, memory: DriverHandle) -> None:
        """Destroy the memory, after every mapping was unmapped."""

    # -- external semaphores -------------------------------------------------------------------------------------

    @abstractmethod
    def import_semaphore(self, device: DriverHandle, handle: AnySemaphoreHandle) -> DriverHandle: ...

    @abstractmethod
    def prepare(self, semaphores: Sequence[DriverHandle]) -> DriverHandle:
        """Prepare a batch for `signal` and `wait`; pool its parameter structs, but do not share one between threads."""

    # values: timeline or fence value, mutex key, NvSciSyncFence address; 0 for binary
    @abstractmethod
    def signal(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int]) -> None: ...

    @abstractmethod
    def wait(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int], timeout_ms: int | None) -> None:
        """Enqueue a wait; `timeout_ms` is None but for keyed mutexes, where WAIT_TIMEOUT is usable."""

    @abstractmethod
    def destroy_semaphore(self, semaphore: DriverHandle) -> None: ...

    def abandon_semaphore(self, semaphore: DriverHandle) -> None:  # noqa: B027 - most drivers cannot cancel waits
        """Cancel pending waits, if the driver can: ``close(timeout=...)`` has expired. The default does nothing."""


class ArrayBackend(Backend):
    """Mipmapped arrays.

    Examples
    --------
    What a backend implements for it:

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
    """Semaphores that the backend creates and exports, and that the calling thread can wait for without a stream.

    Examples
    --------
    What a backend implements for it:

    >>> from gpuinterop.backend import Backend, HostSemaphoreBackend
    >>> sorted(HostSemaphoreBackend.__abstractmethods__ - Backend.__abstractmethods__)
    ['create_semaphore', 'export_semaphore', 'host_signal', 'host_value', 'host_wait']
    """

    @abstractmethod
    def create_semaphore(self, device: DriverHandle, handle_type: type[AnySemaphoreHandle]) -> DriverHandle: ...

    @abstractmethod
    def export_semaphore(self, semaphore: DriverHandle) -> AnySemaphoreHandle:
        """A new handle that the caller owns; the core fills in its origin."""

    @abstractmethod
    def host_value(self, semaphore: DriverHandle) -> int:
        """The counter of a timeline or fence; called of no other kind."""

    @abstractmethod
    def host_signal(self, semaphore: DriverHandle, value: int) -> None: ...

    @abstractmethod
    def host_wait(self, semaphore: DriverHandle, value: int, timeout: float | None) -> bool:
        """Block the calling thread, GIL released; False if `timeout` seconds passed."""


class AllocationBackend(Backend):
    """Memory that the backend allocates and other processes and APIs can import.

    Examples
    --------
    What a backend implements for it:

    >>> from gpuinterop.backend import AllocationBackend, Backend
    >>> sorted(AllocationBackend.__abstractmethods__ - Backend.__abstractmethods__)
    ['allocate', 'export_allocation', 'granularity', 'import_allocation', 'map_allocation', 'release_allocation',
     'unmap_allocation']
    """

    map_allocation_blocks: ClassVar[bool] = False
    """Whether `map_allocation` and `unmap_allocation` wait for the default stream, and so for streams that block it,
    while other calls of the process wait for them (HIP). The core calls them only while none of these has a pending
    wait."""

    @abstractmethod
    def granularity(self, device: DriverHandle, handle_type: type[AllocationHandle]) -> Granularity:
        """Granularity of sizes, which are multiples of the minimum."""

    @abstractmethod
    def allocate(self, device: DriverHandle, size: int, handle_type: type[AllocationHandle]) -> DriverHandle: ...

    @abstractmethod
    def export_allocation(self, allocation: DriverHandle) -> AllocationHandle:
        """A new handle that the caller owns; the core fills in its origin."""

    @abstractmethod
    def import_allocation(self, device: DriverHandle, handle: AllocationHandle, *, size: int) -> DriverHandle: ...

    @abstractmethod
    def map_allocation(self, allocation: DriverHandle, devices: Sequence[DriverHandle]) -> tuple[DriverHandle, Address]:
        """Map the allocation at one address that all of the devices, which `can_access` allows, may read and write."""

    @abstractmethod
    def unmap_allocation(self, mapping: DriverHandle) -> None: ...

    @abstractmethod
    def release_allocation(self, allocation: DriverHandle) -> None: ...

    def can_access(self, ordinal: int, peer: int) -> bool:
        """Whether the device `ordinal` can use memory of another device, `peer`. Must not create a context.

        The default suits a backend whose devices cannot.
        """
        return False

    def location(self, allocation: DriverHandle) -> int | None:
        """The ordinal of the device that an imported allocation lies on.

        None if the driver does not tell, as for a device that is hidden from this process.
        """
        return None


class StreamMemoryBackend(Backend):
    """64-bit words in host memory that streams write and wait for. Our own timelines and the bridge use them.

    The core implements `Operation.CREATE_SEMAPHORE` for timelines with it: see `gpuinterop.timeline`.

    Examples
    --------
    What a backend implements for it:

    >>> from gpuinterop.backend import Backend, StreamMemoryBackend
    >>> sorted(StreamMemoryBackend.__abstractmethods__ - Backend.__abstractmethods__)
    ['pin', 'unpin', 'wait_value', 'write_value']
    """

    @abstractmethod
    def pin(self, device: DriverHandle, address: Address, size: int) -> tuple[DriverHandle, Address]:
        """Make whole pages of host memory usable by the device's streams (``cuMemHostRegister``, ``hipHostRegister``).

        Other processes may share and pin them, and other devices may pin them as well. Returns the pin, and the
        address that the device's streams use for the first byte.
        """

    @abstractmethod
    def unpin(self, pin: DriverHandle) -> None:
        """Undo `pin`, once streams no longer use the memory and before it is unmapped. May block (`releases_block`)."""

    @abstractmethod
    def write_value(self, stream: DriverHandle, word: Address, value: int) -> None:
        """Make the stream store a 64-bit word once its earlier work is done and that work's writes are visible."""

    @abstractmethod
    def wait_value(self, stream: DriverHandle, word: Address, value: int) -> None:
        """Make the stream wait until the word is `value` or more. Values are below 2**63: comparisons wrap around."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SemaphoreNode:
    """A graph's node that signals or waits.

    Attributes
    ----------
    native : DriverHandle
        The node.
    signals : bool
        True if the node signals, False if it waits.
    semaphores : tuple of int
        The semaphores, as `GraphBackend.semaphore_pointer` numbers them.
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
    """Signals and waits captured into graphs, whose values can be set for each launch.

    Graphs and their executables are plain numbers (``CUgraph``, ``CUgraphExec``): other libraries own most of them.

    Examples
    --------
    What a backend implements for it:

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
        """The number that a graph's nodes have for the semaphore."""

    @abstractmethod
    def semaphore_nodes(self, graph: int) -> Sequence[SemaphoreNode]:
        """The nodes that signal and wait, in the driver's order."""

    @abstractmethod
    def set_node(
        self, executable: int, node: SemaphoreNode, semaphores: Sequence[DriverHandle], values: Sequence[int]
    ) -> None:
        """Set the values of later launches; launches that are under way keep theirs."""


class Behind(Enum):
    """The kind of memory behind an address.

    Examples
    --------
    >>> from gpuinterop.backend import Behind
    >>> Behind.IPC.handle_type
    <class 'gpuinterop.handles.IpcMemHandle'>
    """

    __hash__ = object.__hash__  # C code: each block that is looked for is hashed several times

    IPC = "memory that a legacy IPC handle names"
    VMM = "a VMM handle that can be exported"
    FILE = "a memfd"
    CLOSED = "a VMM handle that was made without the right to export it"
    POOL = "a stream-ordered pool"
    MANAGED = "managed memory"
    HOST = "host memory"
    NOTHING = "memory that the driver does not know"

    @cached_property
    def handle_type(self) -> type[Handle]:
        """The type of handle by which it travels, or by which it would if it could."""
        ways: dict[Behind, type[Handle]] = {Behind.VMM: VmmFd, Behind.CLOSED: VmmFd}
        files = (Behind.FILE, Behind.HOST, Behind.NOTHING)
        return ways.get(self) or (OpaqueFd if self in files else IpcMemHandle)

    @property
    def travels(self) -> bool:
        """Whether another process can have it."""
        return self in (Behind.IPC, Behind.VMM, Behind.FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The piece of memory behind an address that travels as one handle.

    Attributes
    ----------
    behind : Behind
        What it is.
    address : int
        Address of its first byte here.
    size : int
        Size in bytes, 0 where it does not travel.
    key : int
        Number of the allocation. Other memory at the same address has another.
    ordinal : int
        The device that it lies on; -1 if it is not a device's.

    Examples
    --------
    >>> from gpuinterop.backend import Behind, Block
    >>> Block(behind=Behind.VMM, address=0x7F0000000000, size=2 << 20, key=56, ordinal=0).end == 0x7F0000200000
    True
    """

    behind: Behind
    address: Address = 0
    size: int = 0
    key: int = 0
    ordinal: int = -1

    @property
    def end(self) -> Address:
        """Address behind the last byte."""
        return self.address + self.size


class SharingBackend(Backend):
    """Memory that other libraries have allocated, and its way to another process.

    Examples
    --------
    What a backend implements for it:

    >>> from gpuinterop.backend import Backend, SharingBackend
    >>> sorted(SharingBackend.__abstractmethods__ - Backend.__abstractmethods__)
    ['attach_blocks', 'detach_blocks', 'export_block', 'find_blocks', 'is_there']
    """

    joins_blocks: ClassVar[bool] = False
    """Whether `attach_blocks` takes several blocks of `VmmFd`."""

    @abstractmethod
    def find_blocks(self) -> Callable[[Address], Block]:
        """A call that tells what is behind an address (``cuPointerGetAttribute``), for many addresses at one time.

        It may know only what was mapped when it was made. Creates no context, and exports nothing.
        """

    @abstractmethod
    def is_there(self, block: Block) -> bool:
        """Whether the memory at the block's address is still the block's, by its key; one question to the driver.

        Also True where `export_block` would notice.
        """

    @abstractmethod
    def export_block(self, device: DriverHandle, block: Block) -> Handle:
        """A new handle that the caller owns, of the type ``block.behind.handle_type``, as `find_blocks` just said."""

    @abstractmethod
    def attach_blocks(
        self, device: DriverHandle, handles: Sequence[Handle], sizes: Sequence[int]
    ) -> tuple[DriverHandle, Address]:
        """Map another process's blocks at consecutive addresses, for `device` to read and write.

        Handles and descriptors stay the caller's. All are of one type; a peer may send several where `joins_blocks` is
        False, which are refused. The device may be another one than the memory's.
        """

    @abstractmethod
    def detach_blocks(self, attached: DriverHandle) -> None:
        """Unmap what `attach_blocks` mapped. May block, as `releases_block` says."""


class MulticastBackend(AllocationBackend):
    """Multicast objects, called groups here: one store to a group reaches memory of every device of its team.

    `map_allocation`, `unmap_allocation` and `release_allocation` also take groups. The core checks granularity,
    ranges, devices and the order of the calls: every device of the team is added before a call that would block until
    then (bind and map), bytes are bound once, and an unbind equals its bind. The core releases a binding or a mapping
    after the work of the team's devices, and mappings before bindings when the whole group is closed.

    Examples
    --------
    What a backend implements for it, beside those of an `AllocationBackend`:

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
        """Create a group for a team of `devices` devices, without adding one. `device` only makes the call."""

    @abstractmethod
    def export_multicast(self, group: DriverHandle, handle_type: type[AllocationHandle]) -> AllocationHandle:
        """A new handle that the caller owns; the core fills in its origin."""

    @abstractmethod
    def import_multicast(
        self, device: DriverHandle, handle: AllocationHandle, *, devices: int, size: int
    ) -> DriverHandle:
        """Import a group, as `import_allocation`; `device` only makes the call."""

    @abstractmethod
    def add_device(self, group: DriverHandle, device: DriverHandle) -> None: ...

    @abstractmethod
    def bind_memory(
        self, group: DriverHandle, device: DriverHandle, offset: int, allocation: DriverHandle, start: int, size: int
    ) -> None:
        """Bind bytes from `start` of an allocation on `device` to the group's bytes from `offset` on."""

    @abstractmethod
    def bind_address(self, group: DriverHandle, device: DriverHandle, offset: int, address: Address, size: int) -> None:
        """Bind mapped memory of `device`."""

    @abstractmethod
    def unbind(self, group: DriverHandle, device: DriverHandle, offset: int, size: int) -> None: ...

    @abstractmethod
    def is_shareable(self, device: DriverHandle, address: Address) -> bool:
        """Whether the mapped memory at `address` was allocated for export, as a shareable group requires."""

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
"""The optional interfaces that can implement an operation; it needs one of them.

Examples
--------
>>> gi.backend.INTERFACES[gi.Operation.GRAPH_CAPTURE]
(<class 'gpuinterop.backend.GraphBackend'>,)
"""
