"""All that a backend implements, and all that it may import besides errors, handles and capabilities.

(And `gpuinterop.system` and `gpuinterop.timeline`, if it uses our timeline semaphores on the CPU.)

The core has checked capability, arguments, ownership and lifetime; a backend translates and calls. It raises
`BackendUnavailableError` (from ``__init__`` only) and `DriverError`. Any thread may call, several at once; a backend
makes its device current where the driver wants that.

A handle passed in is a duplicate made for the call: on success the driver has it, or the backend has closed it; on an
exception the backend leaves it alone, and the core settles who owns the number. A handle returned is the caller's and
owns its descriptor (:meth:`FdHandle.adopt`).

A signal handler may raise after any call of C's, at the entry of any function, and where a loop turns back. A method
that makes something has then undone what it made. One that releases something makes each native call once, however
often it is called: the core calls it again after an interrupt. (One that has failed, and was told, may be made again.)

An interface that a backend does not inherit becomes a gap by itself, with the interface's name as the reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from . import system
from .capabilities import Capability, Operation
from .handles import (
    AllocationHandle,
    AnySemaphoreHandle,
    ArrayLayout,
    DeviceIdentity,
    Granularity,
    MemoryHandle,
)

__all__ = [
    "INTERFACES",
    "Address",
    "AllocationBackend",
    "ArrayBackend",
    "Backend",
    "DeviceInfo",
    "GraphBackend",
    "HostSemaphoreBackend",
    "MulticastBackend",
    "Native",
    "SemaphoreNode",
    "StreamMemoryBackend",
    "pci_bus_id",
]

Native: TypeAlias = Any  # opaque to the core; `Any` lets a backend narrow it under mypy --strict
Address: TypeAlias = int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device as its backend sees it.

    Attributes
    ----------
    ordinal : int
    name : str
    uuid : bytes, optional
        16 bytes that equal Vulkan's ``deviceUUID``; None where the vendor's own differs (HIP).
    pci_bus_id : str, optional
        ``dddd:bb:dd.f``, lower case.
    luid : bytes, optional
        8 bytes, Windows only.
    is_cpu : bool
        Matches Vulkan's CPU devices.
    dlpack : tuple of int
        DLPack's ``(DLDeviceType, device id)`` of a mapped buffer.
    array_interface : str
        The attribute under which a view offers itself: ``__array_interface__`` or ``__cuda_array_interface__``.
    note : str
        What keeps the device from matching others' devices, if anything does (a MIG instance).
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
        return DeviceIdentity(
            name=self.name, uuid=self.uuid, luid=self.luid, pci_bus_id=self.pci_bus_id, is_cpu=self.is_cpu
        )


def pci_bus_id(text: str) -> str:
    """A PCI address as `DeviceInfo.pci_bus_id` has it, of one that a vendor's call has written."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


class Backend(ABC):
    """The calls every backend has: streams, events, copies, external memory, external semaphores."""

    name: ClassVar[str]
    """As in ``GPUINTEROP_BACKEND``."""
    priority: ClassVar[int] = 0
    """The highest that works is chosen when nobody asks for one; the host backend has -1."""
    holds_gil: bool = False
    """Blocking calls keep the GIL: the core then polls `is_done` and never calls `synchronize`."""
    synchronize_blocks_others: ClassVar[bool] = False
    """While a thread is in `synchronize`, calls of other threads may wait for it (HIP: ROCm/rocm-systems #11678), also
    the one that would end the wait: the core polls `is_done` instead."""
    pageable_copies_block: ClassVar[bool] = True
    """`copy` from or to pageable host memory blocks the caller until the stream gets there (CUDA, HIP): behind a
    pending wait that deadlocks, and the core refuses it."""

    releases_block: ClassVar[bool] = False
    """`unmap_buffer`, `destroy_array` and `destroy_semaphore` wait for all work of the device, and until then every
    other call of the process waits for them (CUDA: ``cuMemFree``, ``cuDestroyExternalSemaphore``). Behind a semaphore
    wait whose signal is still to be submitted that deadlocks: the core calls them only while none is pending."""

    survives_fork: ClassVar[bool] = False
    """There is no driver behind it that a fork leaves dead: a child process may make things anew (the host)."""

    releases_block_for_all: ClassVar[bool] = False
    """They wait for work of other devices, too (HIP: ``hipFree`` waits for device 0's)."""

    @abstractmethod
    def __init__(self) -> None:
        """Load the driver, or raise `BackendUnavailableError` saying why not. Creates no context."""

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
        """What the device can do: UNVERIFIED where the vendor says yes, UNSUPPORTED with a reason where not.

        Never SUPPORTED: the core promotes what ``verified.toml`` has shown on devices of this name, and adds to the
        reasons what is recorded. Cells that are not named, and cells of an interface that is not inherited, become
        gaps. Creates no context.
        """

    @abstractmethod
    def open_device(self, ordinal: int) -> Native:
        """Called once a device and process; never closed."""

    # -- streams and events --------------------------------------------------------------------------------------

    @abstractmethod
    def create_stream(self, device: Native, *, high_priority: bool = False) -> Native:
        """A stream that does not block on the default one.

        With `high_priority` it has the device's highest, where there are several; else the normal one.
        """

    @abstractmethod
    def adopt_stream(self, device: Native, pointer: int) -> Native:
        """Wrap a stream that somebody else owns. 0 is the device's default stream."""

    @abstractmethod
    def stream_pointer(self, stream: Native) -> int:
        """The number by which others know the stream."""

    def stream_key(self, stream: Native) -> Hashable:
        """What tells native streams apart: the same for two that are one, whatever their pointers say.

        A driver may use a pointer again. Of streams that each thread has its own of, the core adds the thread. A stream
        that is being captured cannot always be asked, and then has another key than before.
        """
        return self.stream_pointer(stream)

    @abstractmethod
    def destroy_stream(self, stream: Native) -> None:
        """Only for created streams, never for adopted ones."""

    @abstractmethod
    def synchronize(self, stream: Native) -> None:
        """Block until the stream is idle; raise its failure, if it has failed."""

    def is_idle(self, stream: Native) -> bool:
        """Whether all that was enqueued is done; never blocks, and raises the stream's failure.

        The default records an event, which a driver may need a moment to see as done: override it where the driver
        can be asked (``cuStreamQuery``).
        """
        event = self.record(stream)
        try:
            return self.is_done(event)
        finally:
            self.destroy_event(event)

    @abstractmethod
    def wait_event(self, stream: Native, event: Native) -> None:
        """Enqueue: what follows on `stream` runs after `event`."""

    @abstractmethod
    def record(self, stream: Native) -> Native:
        """Enqueue an event."""

    @abstractmethod
    def is_done(self, event: Native) -> bool:
        """Never blocks; raises the failure of the stream when that has failed before the event."""

    @abstractmethod
    def destroy_event(self, event: Native) -> None: ...

    def is_capturing(self, stream: Native) -> bool:
        """Whether what is enqueued goes into a graph, whoever captures; also of a capture that has become invalid.

        The default is of a backend whose streams cannot be captured.
        """
        return False

    def wait_done(self, event: Native, timeout: float | None) -> bool:
        """Block the calling thread, GIL released, until the event is done; False when `timeout` seconds passed.

        The default polls `is_done`, 20 us apart at first and 1 ms later on: no vendor has a wait with a time-out.
        """
        return system.until(lambda: self.is_done(event), timeout)

    @abstractmethod
    def copy(self, stream: Native, target: Address, source: Address, size: int) -> None:
        """Enqueue a copy of `size` bytes between any two addresses (device, pinned or pageable)."""

    def is_pageable(self, device: Native, address: Address) -> bool:
        """Whether a copy of the host memory at `address` blocks; asked only where `pageable_copies_block`.

        The default knows of no memory that does not: override it where the driver can be asked what it has pinned.
        """
        return True

    @abstractmethod
    def fill(self, stream: Native, target: Address, byte: int, size: int) -> None: ...

    # -- external memory -----------------------------------------------------------------------------------------

    @abstractmethod
    def import_memory(self, device: Native, handle: MemoryHandle, *, size: int, dedicated: bool) -> Native: ...

    @abstractmethod
    def map_buffer(self, memory: Native, *, size: int) -> tuple[Native, Address]:
        """Map all of it, which is `size` bytes; called again only after `unmap_buffer`.

        Returns the mapping and the address of its first byte. Parts are the core's: two mappings of the same bytes are
        not coherent on CUDA, and HIP's runtimes of 6.x and 7.x write to offset 0 of the object, whatever a mapping's.
        """

    @abstractmethod
    def unmap_buffer(self, mapping: Native) -> None: ...

    @abstractmethod
    def destroy_memory(self, memory: Native) -> None:
        """Called after every mapping was unmapped."""

    # -- external semaphores -------------------------------------------------------------------------------------

    @abstractmethod
    def import_semaphore(self, device: Native, handle: AnySemaphoreHandle) -> Native: ...

    @abstractmethod
    def prepare(self, semaphores: Sequence[Native]) -> Native:
        """A batch for `signal` and `wait`; its parameter structs are pooled, never shared by two threads."""

    # values: timeline or fence value, mutex key, NvSciSyncFence address; 0 for binary
    @abstractmethod
    def signal(self, batch: Native, stream: Native, values: Sequence[int]) -> None: ...

    @abstractmethod
    def wait(self, batch: Native, stream: Native, values: Sequence[int], timeout_ms: int | None) -> None:
        """Enqueue; `timeout_ms` is None wherever WAIT_TIMEOUT is not usable."""

    @abstractmethod
    def destroy_semaphore(self, semaphore: Native) -> None: ...

    def abandon_semaphore(self, semaphore: Native) -> None:  # noqa: B027 - a driver whose waits cannot be cancelled
        """Cancel pending waits, where the driver can: ``close(timeout=...)`` has expired. Default: nothing."""


class ArrayBackend(Backend):
    """Mipmapped arrays."""

    @abstractmethod
    def map_array(self, memory: Native, layout: ArrayLayout) -> Native: ...

    @abstractmethod
    def copy_level(
        self, stream: Native, array: Native, level: int, address: Address, size: int, *, to_array: bool
    ) -> None:
        """Enqueue a copy between a level (all its layers, tightly packed) and `size` bytes at `address`."""

    @abstractmethod
    def destroy_array(self, array: Native) -> None: ...


class HostSemaphoreBackend(Backend):
    """Semaphores made here, exported, and waited for by the calling thread instead of a stream."""

    @abstractmethod
    def create_semaphore(self, device: Native, handle_type: type[AnySemaphoreHandle]) -> Native: ...

    @abstractmethod
    def export_semaphore(self, semaphore: Native) -> AnySemaphoreHandle:
        """A new handle that the caller owns; the core fills in its origin."""

    @abstractmethod
    def host_signal(self, semaphore: Native, value: int) -> None: ...

    @abstractmethod
    def host_wait(self, semaphore: Native, value: int, timeout: float | None) -> bool:
        """Block the calling thread, GIL released; False when `timeout` seconds passed."""


class AllocationBackend(Backend):
    """Memory allocated here that other processes and APIs can import."""

    unmap_allocation_blocks: ClassVar[bool] = False
    """`unmap_allocation` waits for work of other streams than those that have used it."""

    @abstractmethod
    def granularity(self, device: Native, handle_type: type[AllocationHandle]) -> Granularity:
        """Sizes are multiples of the minimum."""

    @abstractmethod
    def allocate(self, device: Native, size: int, handle_type: type[AllocationHandle]) -> Native: ...

    @abstractmethod
    def export_allocation(self, allocation: Native) -> AllocationHandle:
        """A new handle that the caller owns; the core fills in its origin."""

    @abstractmethod
    def import_allocation(self, device: Native, handle: AllocationHandle, *, size: int) -> Native: ...

    @abstractmethod
    def map_allocation(self, allocation: Native, devices: Sequence[Native]) -> tuple[Native, Address]:
        """Map all of it at one address that each of the devices may read and write; `can_access` has allowed it."""

    @abstractmethod
    def unmap_allocation(self, mapping: Native) -> None: ...

    @abstractmethod
    def release_allocation(self, allocation: Native) -> None: ...

    def can_access(self, ordinal: int, peer: int) -> bool:
        """Whether the device `ordinal` may use memory that lies on `peer`, another one. Creates no context.

        The default is of a backend whose devices cannot.
        """
        return False

    def location(self, allocation: Native) -> int | None:
        """The ordinal of the device that an imported allocation lies on.

        None where the driver does not tell, as of a device that is hidden from this process.
        """
        return None


class StreamMemoryBackend(Backend):
    """64-bit words in host memory that streams write and wait for; our own semaphores and the bridge stand on it.

    The core makes `Operation.CREATE_SEMAPHORE` of it for timelines: see `gpuinterop.timeline`.
    """

    @abstractmethod
    def pin(self, device: Native, address: Address, size: int) -> tuple[Native, Address]:
        """Make whole pages of host memory usable by the device's streams (``cuMemHostRegister``, ``hipHostRegister``).

        They may be shared with other processes, and pinned there and by other devices as well. Returns the pin, and
        the address by which the device's streams know the first byte.
        """

    @abstractmethod
    def unpin(self, pin: Native) -> None:
        """Called when no stream uses the memory any more; before it is unmapped. May block as `releases_block` says."""

    @abstractmethod
    def write_value(self, stream: Native, word: Address, value: int) -> None:
        """Enqueue: store a 64-bit word when all earlier work is done, and what that wrote is visible to the system."""

    @abstractmethod
    def wait_value(self, stream: Native, word: Address, value: int) -> None:
        """Enqueue: wait until the word is `value` or more. Values are below 2**63: devices compare cyclically."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SemaphoreNode:
    """A graph's node that signals or waits.

    Attributes
    ----------
    native : Native
        The node.
    signals : bool
        Else it waits.
    semaphores : tuple of int
        Which, as `GraphBackend.semaphore_pointer` numbers them.
    values : tuple of int
        As captured.
    """

    native: Native
    signals: bool
    semaphores: tuple[int, ...]
    values: tuple[int, ...]


class GraphBackend(Backend):
    """Signals and waits captured into graphs, with values set anew for each launch.

    Graphs and their executables are plain numbers (``CUgraph``, ``CUgraphExec``): most are other libraries'.
    """

    @abstractmethod
    def begin_capture(self, stream: Native) -> None: ...

    @abstractmethod
    def end_capture(self, stream: Native) -> int:
        """The graph."""

    @abstractmethod
    def instantiate(self, device: Native, graph: int) -> int:
        """The executable."""

    @abstractmethod
    def launch(self, executable: int, stream: Native) -> None: ...

    @abstractmethod
    def destroy_graph(self, device: Native, graph: int) -> None: ...

    @abstractmethod
    def destroy_executable(self, device: Native, executable: int) -> None: ...

    @abstractmethod
    def semaphore_pointer(self, semaphore: Native) -> int:
        """The number under which a graph's nodes know it."""

    @abstractmethod
    def semaphore_nodes(self, graph: int) -> Sequence[SemaphoreNode]:
        """Those that signal and wait, in the driver's order."""

    @abstractmethod
    def set_node(
        self, executable: int, node: SemaphoreNode, semaphores: Sequence[Native], values: Sequence[int]
    ) -> None:
        """Set the values of later launches; launches that are under way keep theirs."""


class MulticastBackend(AllocationBackend):
    """Multicast objects, called groups here: what is written to one reaches memory of every device of its team.

    A group is mapped, unmapped and released as an allocation: `map_allocation`, `unmap_allocation`,
    `release_allocation`. The core has checked granularity, ranges, devices and the order of the calls: that every
    device of the team was added before a call that would block until then (binding and mapping do), that nothing is
    bound twice, and that an unbind equals its bind. The work of the team's devices is done before a binding or a
    mapping goes; where the whole group is closed, mappings go before bindings.
    """

    @abstractmethod
    def multicast_granularity(
        self, devices: int, size: int, handle_types: Sequence[type[AllocationHandle]]
    ) -> Granularity:
        """Of a group of so many devices. Creates no context."""

    @abstractmethod
    def create_multicast(
        self, device: Native, devices: int, size: int, handle_types: Sequence[type[AllocationHandle]]
    ) -> Native:
        """A group for a team of so many devices; adds none. `device` is only what the call is made through."""

    @abstractmethod
    def export_multicast(self, group: Native, handle_type: type[AllocationHandle]) -> AllocationHandle:
        """A new handle that the caller owns; the core fills in its origin."""

    @abstractmethod
    def import_multicast(self, device: Native, handle: AllocationHandle, *, devices: int, size: int) -> Native:
        """As `import_allocation`; `device` is only what the call is made through."""

    @abstractmethod
    def add_device(self, group: Native, device: Native) -> None: ...

    @abstractmethod
    def bind_memory(
        self, group: Native, device: Native, offset: int, allocation: Native, start: int, size: int
    ) -> None:
        """Bind bytes from `start` of an allocation on `device` to the group's bytes from `offset` on."""

    @abstractmethod
    def bind_address(self, group: Native, device: Native, offset: int, address: Address, size: int) -> None:
        """Bind mapped memory of `device`."""

    @abstractmethod
    def unbind(self, group: Native, device: Native, offset: int, size: int) -> None: ...

    @abstractmethod
    def is_shareable(self, device: Native, address: Address) -> bool:
        """Whether the mapped memory at `address` was allocated to be exported: a shareable group takes no other."""

    @abstractmethod
    def multimem_store(self, stream: Native, address: Address, value: int, count: int) -> None:
        """Enqueue: store a 32-bit word `count` times to a mapped group, so to all memory bound (``multimem.st``)."""

    @abstractmethod
    def multimem_add(self, stream: Native, target: Address, address: Address, count: int) -> None:
        """Enqueue: store at `target` the sums, over all memory bound, of `count` 32-bit words (``multimem.ld_reduce``).

        Each word is summed by itself, modulo 2**32.
        """


INTERFACES: Mapping[Operation, tuple[type[Backend], ...]] = {
    Operation.MAP_MIPMAPPED_ARRAY: (ArrayBackend,),
    Operation.CREATE_SEMAPHORE: (HostSemaphoreBackend, StreamMemoryBackend),
    Operation.EXPORT_ALLOCATION: (AllocationBackend,),
    Operation.IMPORT_ALLOCATION: (AllocationBackend,),
    Operation.CREATE_MULTICAST: (MulticastBackend,),
    Operation.EXPORT_MULTICAST: (MulticastBackend,),
    Operation.IMPORT_MULTICAST: (MulticastBackend,),
    Operation.STREAM_MEMORY_OPS: (StreamMemoryBackend,),
    Operation.GRAPH_CAPTURE: (GraphBackend,),
}
"""Which optional interfaces an operation can stand on; it needs one of them."""
