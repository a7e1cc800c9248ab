"""A device: imports, allocates, matches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from .. import system, timeline
from .._arguments import MAX_32, NoCopy, check_int, check_nbytes, check_timeout, check_type
from ..backend import AllocationBackend, GraphBackend, HostSemaphoreBackend, MulticastBackend, StreamMemoryBackend
from ..capabilities import Capabilities, Cell, Operation, Scope
from ..errors import (
    ArgumentTypeError,
    GpuInteropError,
    InvalidArgumentError,
    ResourceBusyError,
    ResourceClosedError,
    UnsupportedError,
    again,
)
from ..handles import (
    AllocationHandle,
    Granularity,
    Handle,
    MemoryHandle,
    OriginKind,
    SemaphoreHandle,
    TimelineFd,
    VmmFd,
    Win32Handle,
)
from .allocation import Allocation, DeviceArray
from .drain import drain, make_room, tidy, wait_for
from .gate import Gate
from .graph import Graph, capture
from .handle_checks import check_handle, check_handle_type, check_handle_types, check_origin, check_size, is_dedicated
from .interchange import layout_of
from .known_stream import CapturedError, Streams
from .lifetime import LIVE, RETIRED, alive
from .memory import ExternalMemory, round_up
from .monitor import after_fork, generation, lingering
from .ownership import import_duplicate
from .resource import undo
from .semaphore import DriverSemaphores, ExternalSemaphore, origin_kind
from .stream import Stream, check_foreign_device, foreign_pointer
from .stream_memory import OwnTimelines

if TYPE_CHECKING:
    from ..backend import Backend, DeviceInfo, DriverHandle

K = TypeVar("K")
T = TypeVar("T")

Needs: TypeAlias = "tuple[tuple[Operation, type[AllocationHandle] | None], ...]"

_gates: weakref.WeakKeyDictionary[Backend, Gate] = weakref.WeakKeyDictionary()  # of all devices together
_devices: weakref.WeakSet[Device] = weakref.WeakSet()

_COPIERS = 4  # streams of ours that wait for the next copy
_CONSUMERS = 64  # streams of array libraries that are remembered
_LEGACY = 1  # the array API's number for CUDA's legacy default stream


class Device(NoCopy):
    """One device of one backend. Made by `gpuinterop.device` and `gpuinterop.match_device`; never closed.

    Several threads may use it at once.

    Attributes
    ----------
    info : DeviceInfo
        The device as its backend describes it.
    capabilities : Capabilities
        What the device can do, and the reason for every gap.
    backend : str
        The backend's name.
    ordinal : int
        Number of the device among its backend's devices, from 0.
    name : str
        Name of the device as its driver reports it.
    uuid : bytes or None
        16 bytes, equal to Vulkan's ``deviceUUID``; None if the vendor's UUID differs from that.
    pci_bus_id : str or None
        ``dddd:bb:dd.f``, lower case.
    luid : bytes or None
        8 bytes; Windows only.
    identity : DeviceIdentity
        Identity to compare with the one that another API reports.

    Examples
    --------
    >>> device.backend, device.ordinal
    ('host', 0)
    >>> gi.match_device(device.identity) is device
    True
    >>> device.capabilities.supports((gi.Operation.IMPORT_MEMORY, gi.OpaqueFd))
    True
    >>> with device.import_memory(gi.OpaqueFd(fd), size=65536) as memory, device.create_stream() as stream:
    ...     buffer = memory.map_buffer()
    ...     buffer.fill(7, stream=stream)
    ...     stream.synchronize(timeout=10)
    """

    def __init__(
        self,
        backend: Backend,
        info: DeviceInfo,
        capabilities: Capabilities,
        siblings: Callable[[], Sequence[Device]] = tuple,
    ) -> None:
        self.driver = backend
        self._siblings = siblings
        self._born = generation()
        self.info = info
        self.backend, self.ordinal, self.name = backend.name, info.ordinal, info.name
        self.uuid, self.pci_bus_id, self.luid = info.uuid, info.pci_bus_id, info.luid
        self.identity = info.identity
        self.capabilities = capabilities
        self._begin()
        _devices.add(self)

    def _begin(self) -> None:
        """Begin with nothing made. A forked child does so again: what its parent has made is the parent's."""
        backend = self.driver
        self._opened: dict[Callable[[Device], Any], Any] = {}
        self.gate = _gates.setdefault(backend, Gate()) if backend.releases_block_for_all else Gate()
        self.streams = Streams(backend, self.gate)
        self._copiers: list[Stream] = []
        self._last_stream: Stream | None = None
        """The last stream of another library that a call was given (`check_stream`)."""
        self._consumers: dict[Hashable, weakref.ref[Stream]] = {}
        # Keyed by the number under which a graph's nodes know them.
        self._semaphores: weakref.WeakValueDictionary[int, ExternalSemaphore[Any]] = weakref.WeakValueDictionary()

    @property
    def _handle(self) -> DriverHandle:
        """The native device, which the first use opens. To list devices creates no context."""
        return self._once(Device._open)

    def _open(self) -> DriverHandle:
        if self._born != generation() and not self.driver.survives_fork:
            raise ResourceClosedError(
                f"expected a device of this process, got {self.name} of its parent: no driver survives a fork; "
                "start processes by spawn or forkserver, or use the device in the child alone."
            )
        return self.driver.open_device(self.info.ordinal)

    def _once(self, make: Callable[[Device], T]) -> T:
        """What `make` makes of the device on first use; when two threads make it, the first one's stays."""
        found: T = self._opened[make] if make in self._opened else self._opened.setdefault(make, make(self))
        return found

    def can_access(self, peer: Device) -> bool:
        """Whether this device can use memory of `peer` (``cuDeviceCanAccessPeer`` / ``hipDeviceCanAccessPeer``).

        Parameters
        ----------
        peer : Device
            The device that has the memory.

        Returns
        -------
        bool
            True for the device itself; False for a device of another backend.

        Examples
        --------
        On CUDA (here a simulated driver):

        >>> first, second = devices
        >>> second.can_access(first)
        True
        >>> with first.allocate(1 << 20, access=[second]) as allocation:
        ...     allocation.buffer_on(second).ptr == allocation.buffer.ptr
        True
        """
        check_device(peer, "peer")
        return peer is self or (peer.driver is self.driver and _reaches(self, peer.ordinal))

    @property
    def peers(self) -> list[Device]:
        """The other devices whose memory this device can use, in the backend's order."""
        return [one for one in self._siblings() if one is not self and self.can_access(one)]

    def __repr__(self) -> str:
        return f"<Device {self.backend}:{self.ordinal} {self.name!r}>"

    # -- imports -----------------------------------------------------------------------------------------------

    def import_memory(
        self, handle: MemoryHandle, *, size: int, dedicated: bool | None = None, label: str | None = None
    ) -> ExternalMemory:
        """Import memory (``cuImportExternalMemory`` / ``hipImportExternalMemory``).

        Parameters
        ----------
        handle : MemoryHandle
            Success consumes it: the driver owns the descriptor, or has closed it. After an error the caller still owns
            it, open and untouched. NT and KMT handles always stay the caller's.
        size : int
            Size of the whole allocation in bytes (``VkMemoryRequirements::size``), not of the payload.
        dedicated : bool, optional
            Whether the exporting allocation is dedicated. Default: what the handle's origin says, and True for
            Direct3D resources.
        label : str, optional
            Name of the object in messages, warnings and its `repr`.

        Returns
        -------
        ExternalMemory
            The memory, which the caller closes.

        Raises
        ------
        ArgumentTypeError
            `handle` is a bare int, or its type is not a memory handle type.
        HandleError
            `handle` is closed or consumed, or belongs to another device or kind, or its descriptor is of another type.
        InvalidArgumentError
            `size` is zero, or exceeds the object.
        UnsupportedError
            The device cannot import this type; the driver was not called.
        DriverError
            The driver refused.

        Examples
        --------
        >>> with device.import_memory(gi.OpaqueFd(fd), size=65536) as memory:
        ...     buffer = memory.map_buffer(offset=4096, size=1024)
        ...     buffer.fill(7)
        ...     np.asarray(buffer.view((2, 2), "uint8"))
        array([[7, 7],
               [7, 7]], dtype=uint8)

        The import has consumed the handle. To import the object twice, duplicate the handle before.
        """
        return self._take_memory(handle, size=size, dedicated=dedicated, label=label)

    def _take_memory(
        self, handle: MemoryHandle, *, size: int, dedicated: bool | None, label: str | None, noun: str = ""
    ) -> ExternalMemory:
        """Import memory, as `import_memory` does. Messages call it by the noun."""
        check_handle(handle, MemoryHandle, "import_memory", "OpaqueFd(fd)")
        kind = type(handle)
        self._require_import(Operation.IMPORT_MEMORY, handle)
        count = check_nbytes(size)
        check_origin(handle, (OriginKind.MEMORY, OriginKind.ALLOCATION), self.identity)
        check_size(handle, count)
        whole = is_dedicated(handle, dedicated)
        make_room()
        keepalive = getattr(handle, "keepalive", None)
        memory = ExternalMemory(self, kind, size=count, dedicated=whole, keepalive=keepalive, noun=noun, label=label)
        device, backend, lifetime = self._handle, self.driver, memory.lifetime

        def load(duplicate: MemoryHandle) -> None:
            lifetime.create(partial(backend.import_memory, device, duplicate, size=count, dedicated=whole))

        import_duplicate(handle, load, user=f"{self.backend} import_memory", lifetime=lifetime)
        return memory

    def import_semaphore(self, handle: SemaphoreHandle[K], *, label: str | None = None) -> ExternalSemaphore[K]:
        """Import a semaphore (``cuImportExternalSemaphore`` / ``hipImportExternalSemaphore``).

        Parameters
        ----------
        handle : SemaphoreHandle
            Its type names the kind, which drivers do not check: `OpaqueFd` is a binary semaphore, `TimelineFd` a
            timeline. Success consumes it, as in `import_memory`. Every device that can create timelines imports those
            of `create_semaphore`, from any process and backend, even if it cannot import its vendor's.
        label : str, optional
            Name of the object in messages, warnings and its `repr`.

        Returns
        -------
        ExternalSemaphore
            The semaphore, which the caller closes.

        Raises
        ------
        ArgumentTypeError, HandleError, UnsupportedError, DriverError
            See `import_memory`.

        Examples
        --------
        >>> with device.import_semaphore(gi.TimelineFd(timeline_fd)) as semaphore:
        ...     semaphore.signal(stream, 1)
        ...     stream.synchronize(timeout=10)
        """
        check_handle(handle, SemaphoreHandle, "import_semaphore", "TimelineFd(fd)")
        kind = type(handle)
        if isinstance(handle, TimelineFd) and self._makes_timelines and handle._use(timeline.is_ours):
            self.capabilities.require((Operation.CREATE_SEMAPHORE, TimelineFd))
            check_origin(handle, (OriginKind.TIMELINE,))  # the page is host memory
            drain()
            return cast("ExternalSemaphore[K]", self._once(OwnTimelines).load(handle, label))
        self._require_import(Operation.IMPORT_SEMAPHORE, handle)
        check_origin(handle, (origin_kind(handle.kind),), self.identity)
        drain()
        calls, keepalive = self._once(DriverSemaphores), getattr(handle, "keepalive", None)
        semaphore = ExternalSemaphore(self, kind, calls, keepalive=keepalive, label=label)
        device, backend = self._handle, self.driver

        def load(duplicate: SemaphoreHandle[K]) -> None:
            semaphore._make(partial(backend.import_semaphore, device, duplicate))

        import_duplicate(handle, load, user=f"{self.backend} import_semaphore", lifetime=semaphore.lifetime)
        return semaphore

    def import_allocation(
        self, handle: AllocationHandle, size: int, *, access: Sequence[Device] = (), label: str | None = None
    ) -> Allocation:
        """Import a shareable allocation (``cuMemImportFromShareableHandle`` / ``hipMemImport...``).

        Parameters
        ----------
        handle : AllocationHandle
            Success consumes a descriptor, as in `import_memory`; a fabric handle is only bytes, and stays the caller's.
        size : int
            Allocated size in bytes; drivers do not report it.
        access : sequence of Device, optional
            Further devices that map it, see `allocate`. The memory may lie on another device: then this device and
            each of `access` need peer access to that one.
        label : str, optional
            Name of the object in messages, warnings and its `repr`.

        Returns
        -------
        Allocation
            The allocation, which the caller closes. It cannot be exported again.

        Raises
        ------
        ArgumentTypeError, HandleError, InvalidArgumentError, UnsupportedError, DriverError
            See `import_memory`; UnsupportedError also if one of the devices has no peer access to the memory. When
            only the import shows that, the import is undone.

        Examples
        --------
        The handle comes from another process, through `gpuinterop.ipc`. Here one process has both sides:

        >>> with device.allocate(65536) as mine, device.import_allocation(mine.export(), mine.size) as theirs:
        ...     mine.buffer.fill(7)
        ...     np.asarray(theirs.buffer.view(4))
        array([7, 7, 7, 7], dtype=uint8)
        """
        check_handle(handle, AllocationHandle, "import_allocation", "VmmFd(fd)")
        kind = type(handle)
        self.capabilities.require((Operation.IMPORT_ALLOCATION, kind))
        count = check_nbytes(size)
        # A peer may map another GPU's allocation, so only the kind is checked here.
        check_origin(handle, (OriginKind.ALLOCATION,))
        check_size(handle, count)
        members = self._with(access)
        backend = cast(AllocationBackend, self.driver)  # otherwise the capability is a gap
        cell = Cell(Operation.IMPORT_ALLOCATION, kind)
        check_access(members, self._ordinal_of(handle), cell)
        step = backend.granularity(self._handle, kind).minimum
        if count % step:
            raise InvalidArgumentError(
                "size", f"expected a multiple of the granularity, {step}, got {count}; pass Allocation.size."
            )
        make_room()
        allocation = Allocation(members, backend, kind, size=count, exportable=False, label=label)
        lifetime = allocation.lifetime

        def load(duplicate: AllocationHandle) -> None:
            lifetime.create(partial(_load, allocation, duplicate, cell))

        import_duplicate(handle, load, user=f"{self.backend} import_allocation", lifetime=lifetime)
        return allocation

    # -- makes -------------------------------------------------------------------------------------------------

    def allocate(
        self, size: int, handle_type: type[AllocationHandle] = VmmFd, *, access: Sequence[Device] = (),
        label: str | None = None,
    ) -> Allocation:  # fmt: skip
        """Allocate memory that others can import (``cuMemCreate`` / ``hipMemCreate``).

        Parameters
        ----------
        size : int
            Size in bytes; rounded up to the granularity (`allocation_granularity`).
        handle_type : type
            Type of the handles that `Allocation.export` returns.
        access : sequence of Device, optional
            Further devices of the same backend that map it (`Allocation.buffer_on`). The memory lies on this device.
        label : str, optional
            Name of the object in messages, warnings and its `repr`.

        Returns
        -------
        Allocation
            The allocation, which the caller closes. Its bytes are undefined at first.

        Raises
        ------
        UnsupportedError
            The device cannot export such allocations (`Operation.EXPORT_ALLOCATION`), or one of `access` cannot use
            its memory (`can_access`).
        OutOfMemoryError
            The device has not enough free memory.

        Examples
        --------
        >>> with device.allocate(1000) as allocation, allocation.export() as handle:
        ...     allocation.buffer.fill(0)
        ...     allocation.size  # rounded up
        ...     handle.origin.kind
        4096
        <OriginKind.ALLOCATION: 'allocation'>
        """
        if isinstance(size, Sequence):
            raise ArgumentTypeError("size", f"expected bytes, got {size!r}; call device.empty(shape, dtype).")
        check_handle_type(handle_type, AllocationHandle, "handle_type")
        self.capabilities.require((Operation.EXPORT_ALLOCATION, handle_type))
        count = check_nbytes(size)
        members = self._with(access)
        check_access(members, self.ordinal, Cell(Operation.EXPORT_ALLOCATION, handle_type))
        backend = cast(AllocationBackend, self.driver)  # otherwise the capability is a gap
        count = round_up(count, backend.granularity(self._handle, handle_type).minimum)
        make_room()
        allocation = Allocation(members, backend, handle_type, size=count, exportable=True, label=label)
        handle = self._handle
        allocation.lifetime.create(lambda: backend.allocate(handle, count, handle_type))
        return allocation

    def empty(self, shape: int | Sequence[int], dtype: object, *, label: str | None = None) -> DeviceArray:
        """Make an array in memory of its own, which `gpuinterop.share` and Vulkan take.

        It calls `allocate` and `Allocation.view`, so a small array takes a whole granule: 4 KiB on the host, mostly
        2 MiB on a GPU.

        Parameters
        ----------
        shape : int or sequence of int
            Number of elements in each dimension; 0 is allowed.
        dtype : str or dtype
            See `Buffer.view`.
        label : str, optional
            Name of the object in messages, warnings and its `repr`.

        Returns
        -------
        DeviceArray
            The array, C-contiguous; its bytes are undefined at first. The caller closes it, or drops it.

        Raises
        ------
        ArgumentTypeError, InvalidArgumentError, UnsupportedError, OutOfMemoryError
            See `allocate` and `Buffer.view`.

        Examples
        --------
        >>> with device.empty((2, 3), "float32") as array:
        ...     field = np.asarray(array)  # a GPU: torch.from_dlpack(array), cupy.from_dlpack(array)
        >>> field[:] = 1  # keeps the bytes
        """
        layout = layout_of(shape, dtype, None)
        return DeviceArray(self.allocate(max(layout.high, 1), label=label), layout)

    def allocation_granularity(self, handle_type: type[AllocationHandle] = VmmFd) -> Granularity:
        """Granularity to which `allocate` rounds sizes up (``cuMemGetAllocationGranularity`` / ``hipMemGet...``).

        Parameters
        ----------
        handle_type : type
            The argument of the planned `allocate` call.

        Returns
        -------
        Granularity
            The minimum, and the one recommended for the best performance, in bytes.

        Raises
        ------
        UnsupportedError
            The device cannot export such allocations (`Operation.EXPORT_ALLOCATION`).

        Examples
        --------
        >>> device.allocation_granularity()
        Granularity(minimum=4096, recommended=4096)
        """
        check_handle_type(handle_type, AllocationHandle, "handle_type")
        self.capabilities.require((Operation.EXPORT_ALLOCATION, handle_type))
        backend = cast(AllocationBackend, self.driver)  # otherwise the capability is a gap
        return backend.granularity(self._handle, handle_type)

    def multicast_granularity(
        self,
        devices: int | Sequence[Device],
        size: int,
        handle_types: type[AllocationHandle] | Sequence[type[AllocationHandle]] = (),
    ) -> Granularity:
        """Granularity of a multicast object's size and offsets (``cuMulticastGetGranularity``).

        Parameters
        ----------
        devices, size, handle_types
            The arguments of the planned `create_multicast` call.

        Returns
        -------
        Granularity
            The minimum, which is enforced, and the one recommended for the best performance, in bytes.

        Raises
        ------
        UnsupportedError
            The device does not support multicast (`Operation.CREATE_MULTICAST`).

        Examples
        --------
        On CUDA (here a simulated driver):

        >>> step = device.multicast_granularity(devices, 3 << 20).minimum
        >>> size = -(-(3 << 20) // step) * step
        >>> size
        4194304
        """
        kinds = check_handle_types(handle_types)
        _, count, members = team_of(devices, self)
        backend = multicast_backend(to_multicast(kinds), self, members)
        return backend.multicast_granularity(count, check_nbytes(size), kinds)

    def create_semaphore(
        self, handle_type: type[SemaphoreHandle[K]], *, label: str | None = None
    ) -> ExternalSemaphore[K]:
        """Create a semaphore that `ExternalSemaphore.export` shares.

        The host backend creates both kinds. GPUs create timelines if their streams can write and wait for words
        (`Operation.STREAM_MEMORY_OPS`): a sealed page of host memory that each process and device pins
        (``cuMemHostRegister``, ``cuStreamWaitValue64``, ``cuStreamWriteValue64``; ``hip...``). Every vendor's devices
        with this capability import it, and so does the host backend; graphics APIs do not. Values stay below 2**63.

        Parameters
        ----------
        handle_type : type
            `TimelineFd`; `OpaqueFd` on the host backend.
        label : str, optional
            Name of the object in messages, warnings and its `repr`.

        Returns
        -------
        ExternalSemaphore
            The semaphore, which the caller closes: a timeline at 0, or a binary semaphore that is not signalled.

        Raises
        ------
        UnsupportedError
            The backend does not create this type (`Operation.CREATE_SEMAPHORE`).
        DriverError
            The page could not be pinned.

        Examples
        --------
        >>> with device.create_semaphore(gi.TimelineFd) as semaphore, semaphore.export() as handle:
        ...     with device.import_semaphore(handle) as theirs:  # in another process
        ...         semaphore.signal(stream, 1)
        ...         theirs.host_wait(1, timeout=10)
        """
        check_handle_type(handle_type, SemaphoreHandle, "handle_type")
        self.capabilities.require((Operation.CREATE_SEMAPHORE, handle_type))
        backend = self.driver
        drain()
        if isinstance(backend, HostSemaphoreBackend) and not (handle_type is TimelineFd and self._makes_timelines):
            calls, handle = self._once(DriverSemaphores), self._handle
            semaphore = ExternalSemaphore(self, handle_type, calls, exportable=True, label=label)
            semaphore._make(lambda: backend.create_semaphore(handle, handle_type))
            return semaphore
        if handle_type is not TimelineFd:
            raise ArgumentTypeError(
                "handle_type", f"expected TimelineFd, which {self.backend} creates, got {handle_type!r}."
            )
        return cast("ExternalSemaphore[K]", self._once(OwnTimelines).create(label))

    def create_stream(self, *, high_priority: bool = False, label: str | None = None) -> Stream:
        """Create a stream that does not block on the default one (``cuStreamCreateWithPriority`` / ``hip...``).

        Parameters
        ----------
        high_priority : bool
            Give the stream the device's highest priority. Streams that wait for long need it: on AMD a waiting stream
            stalls the others on its hardware queue, and each priority has four queues.
        label : str, optional
            Name of the object in messages, warnings and its `repr`.

        Returns
        -------
        Stream
            The stream, which the caller closes.

        Examples
        --------
        >>> with device.create_stream(high_priority=True) as stream:
        ...     buffer.fill(7, stream=stream)
        ...     stream.synchronize(timeout=10)
        """
        drain()
        return self._new_stream(high_priority=bool(high_priority), label=label)

    def wrap_stream(self, stream: object, *, label: str | None = None) -> Stream:
        """Use another library's stream.

        Parameters
        ----------
        stream : int, torch's, CuPy's or numba's stream, object with ``__cuda_stream__``
            The other library still owns it; this call keeps it alive. 0 is the device's default stream. On the host
            backend, 0 is the calling thread, where NumPy and torch's CPU tensors work: waits block it, signals are
            immediate.
        label : str, optional
            Name of the stream in messages, warnings and its `repr`. The last one given to a native stream counts.

        Returns
        -------
        Stream
            The stream, which needs no `close`.

        Raises
        ------
        ArgumentTypeError
            `stream` is not a stream.
        InvalidArgumentError
            `stream` belongs to another device, or its number cannot be a pointer.

        Examples
        --------
        torch's current stream is ``device.wrap_stream(torch.cuda.current_stream())``. The default stream serves on each
        backend:

        >>> stream = device.wrap_stream(0)
        >>> buffer.fill(7, stream=stream)
        >>> np.asarray(buffer.view(4))
        array([7, 7, 7, 7], dtype=uint8)
        """
        if isinstance(stream, Stream):
            if stream.device is not self:
                raise InvalidArgumentError("stream", f"belongs to {stream.device.name}; use a stream of {self.name}.")
            return stream
        pointer, keepalive = foreign_pointer(stream)
        check_foreign_device(self, stream)
        tidy()
        handle = self.driver.adopt_stream(self._handle, pointer)
        return self.streams.adopt(handle, keepalive, partial(Stream, self), label)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until every stream that this library knows on the device is idle, then release closed objects.

        It waits for each stream, even if another one has failed.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; None sets no limit.

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` seconds passed in total; the message names the stream and its waits.
        GpuInteropError
            An operation on one of the streams has failed; the last such failure is raised.

        Examples
        --------
        >>> buffer.fill(7, stream=stream)
        >>> device.synchronize(timeout=10)
        >>> stream.query()
        True
        """
        limit = check_timeout(timeout)
        left = system.seconds_left(limit)
        problem: GpuInteropError | None = None
        drain()
        for stream in self.streams.known():
            try:
                if not stream.synchronize(left()):
                    closed = "" if stream.state is LIVE else ", which is closed,"
                    problem = stream.late(f"{closed} is not idle after {limit:g} s")
                elif (failure := stream.tell_failure()) is not None:
                    problem = cast(GpuInteropError, again(failure))
            except CapturedError:  # such work runs when the graph is launched
                continue
            except GpuInteropError as error:
                problem = error
        drain()
        if problem is not None:
            raise problem

    def drain(self, timeout: float | None = None) -> None:
        """Release closed objects that are no longer in use, on all devices; blocks only if `timeout` is given.

        Imports, `close` and `synchronize` drain as well.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait until every closed object of this device is released. What can never be released is not
            waited for: a warning has named what a driver did not release (`LeakedResourceWarning`).

        Raises
        ------
        ResourceBusyError
            `timeout` passed; the message names what is still in use.

        Examples
        --------
        >>> allocation = device.allocate(4096)
        >>> array = np.asarray(allocation.buffer.view(4096))
        >>> allocation.close()
        >>> del array  # until now the allocation stayed mapped
        >>> device.drain(timeout=10)
        """
        limit = check_timeout(timeout)
        drain()
        if timeout is None:
            return
        left = system.seconds_left(limit)
        for lifetime in alive():
            if not (lifetime.state is RETIRED and lifetime.is_of(self.streams)):
                continue
            if not (wait_for(lifetime, left()) or lifetime.stays):
                raise ResourceBusyError(f"{lifetime.label} is still in use after {limit:g} s: {lifetime.what_holds()}.")

    # -- inside ------------------------------------------------------------------------------------------------

    def _consumer(self, pointer: int) -> Stream:
        """Wrap the stream of an array library. Arrays keep the wrapper; those that live at once share it."""
        key: Hashable = pointer
        handle: Any = None
        if pointer != _LEGACY:  # other numbers may come again as other streams'
            handle = self.driver.adopt_stream(self._handle, pointer)
            key = self.driver.stream_key(handle)
        if (found := self._consumers.get(key)) is not None and (stream := found()) is not None:
            known = stream.known  # None: each thread's own
            if known is not None and known.failure is None and stream.lifetime.state is LIVE:
                return stream
        if handle is None:
            handle = self.driver.adopt_stream(self._handle, pointer)
        stream = self.streams.adopt(handle, None, partial(Stream, self))
        lingering.append(stream)
        if len(self._consumers) >= _CONSUMERS:
            self._consumers.clear()
        self._consumers[key] = weakref.ref(stream)
        return stream

    @contextmanager
    def _copy_stream(self) -> Generator[Stream]:
        """A stream of ours for a copy without a `stream=` argument.

        Each copy under way has its own, so that no copy waits behind another. A failed stream is not used again.
        """
        try:
            copier = self._copiers.pop()
        except IndexError:
            copier = self._new_stream(high_priority=False)
            copier.lifetime.warns = False
        try:
            copier._check_open()
            yield copier
        except BaseException:
            copier.close()
            raise
        if len(self._copiers) < _COPIERS:
            self._copiers.append(copier)
        else:
            copier.close()

    def _capture(self, stream: Stream, label: str | None) -> AbstractContextManager[Graph]:
        """`Stream.capture`: a graph stands on streams."""
        return capture(stream, label)

    def _new_stream(self, *, high_priority: bool, label: str | None = None) -> Stream:
        device, backend = self._handle, self.driver
        return self.streams.create(
            lambda: backend.create_stream(device, high_priority=high_priority),
            lambda known: Stream(self, known, known),
            label,
        )

    def _know(self, semaphore: ExternalSemaphore[Any]) -> None:
        """Remember an import: a graph's nodes name semaphores by number, and a backend's messages by the label."""
        if hasattr(semaphore._handle, "label"):
            with suppress(AttributeError):  # a label to read alone
                semaphore._handle.label = semaphore.label
        if isinstance(self.driver, GraphBackend) and semaphore._handle is not None:
            self._semaphores[self.driver.semaphore_pointer(semaphore._handle)] = semaphore

    @property
    def _makes_timelines(self) -> bool:
        """Whether timelines of our own are the core's, of words that streams write, and not the backend's.

        A backend that creates semaphores imports them too. Where ``GPUINTEROP_DISABLE`` has turned that import off, the
        core makes them as on the devices that lack it. A backend without stream words may know our timelines itself.
        """
        backend = self.driver
        if not isinstance(backend, StreamMemoryBackend):
            return False
        natively = (Operation.IMPORT_SEMAPHORE, TimelineFd)
        return not (isinstance(backend, HostSemaphoreBackend) and self.capabilities.supports(natively))

    def _with(self, access: Sequence[Device]) -> list[Device]:
        """The device and those of `access`, each once."""
        return list(dict.fromkeys([self, *check_devices(access, "access", self.driver)]))

    def _ordinal_of(self, handle: Handle) -> int | None:
        """The ordinal of the backend's device that the handle's origin names; None if unknown."""
        identity = handle.origin.device if handle.origin is not None else None
        if identity is None:
            return None
        return next((info.ordinal for info in self.driver.devices() if info.identity.matches(identity)), None)

    def _require_import(self, operation: Operation, handle: Handle) -> None:
        self.capabilities.require((operation, type(handle)))
        if isinstance(handle, Win32Handle) and handle.name is not None:
            self.capabilities.require((Operation.IMPORT_BY_NAME, type(handle)))


@after_fork
def _forked() -> None:
    _gates.clear()
    for device in _devices:
        device._begin()


def check_device(device: object, argument: str) -> Device:
    return check_type(device, Device, argument, "a gpuinterop Device")


def check_devices(devices: object, argument: str, backend: Backend) -> list[Device]:
    """Devices of one backend."""
    given: Iterable[object] = check_type(devices, Iterable, argument, "a sequence of gpuinterop Devices")
    found = [check_device(device, argument) for device in given]
    for device in found:
        if device.driver is not backend:
            raise InvalidArgumentError(argument, f"expected devices of one backend, got {device!r} of another backend.")
    return found


def _reaches(device: Device, ordinal: int) -> bool:
    backend = device.driver
    return isinstance(backend, AllocationBackend) and backend.can_access(device.ordinal, ordinal)


def check_access(members: Iterable[Device], ordinal: int | None, cell: Cell) -> None:
    """Refuse a device that cannot use memory of the device `ordinal`, as far as that is known."""
    if ordinal is None:
        return
    for device in members:
        if device.ordinal != ordinal and not _reaches(device, ordinal):
            infos = {info.ordinal: info.name for info in device.driver.devices()}
            raise UnsupportedError(
                cell.gap(
                    Scope.DEVICE,
                    f"the memory lies on device {ordinal}, {infos.get(ordinal, 'unknown')}, and device "
                    f"{device.ordinal}, {device.name}, has no peer access to it.",
                    "gpuinterop.backend.AllocationBackend.can_access: cuDeviceCanAccessPeer, hipDeviceCanAccessPeer",
                    "choose a device for which device.can_access(peer) is true, or copy through the host.",
                ),
                context=device.name,
            )


def _load(allocation: Allocation, duplicate: AllocationHandle, cell: Cell) -> DriverHandle:
    """Import an allocation, if all its devices reach the memory."""
    backend = allocation.driver
    loaded = backend.import_allocation(allocation.device._handle, duplicate, size=allocation.size)
    try:
        allocation.location = backend.location(loaded)
        check_access(allocation.devices, allocation.location, cell)
    except BaseException:  # while the handle is still the caller's
        undo("an imported allocation", lambda: backend.release_allocation(loaded))
        raise
    return loaded


def team_of(devices: int | Iterable[Device], device: Device | None) -> tuple[Device | None, int, list[Device]]:
    """`device`, or a team's first; the size of the team; and the devices that it names, which are to be added."""
    leader = None if device is None else check_device(device, "device")
    if not isinstance(devices, Iterable):
        return leader, check_int(devices, "devices", minimum=1, maximum=MAX_32), []
    given = list(devices)
    leader = leader or check_device(next(iter(given), None), "devices")
    members = check_devices(given, "devices", leader.driver)
    if not members:
        raise InvalidArgumentError("devices", "expected one device or more, got an empty team.")
    if twice := next((one for one in members if members.count(one) > 1), None):
        raise InvalidArgumentError("devices", f"expected each device once, got {twice!r} twice.")
    return leader, len(members), members


def to_multicast(kinds: Sequence[type[AllocationHandle]]) -> Needs:
    return (Operation.CREATE_MULTICAST, None), *((Operation.EXPORT_MULTICAST, kind) for kind in kinds)


def multicast_backend(needs: Needs, leader: Device, members: Iterable[Device]) -> MulticastBackend:
    for device in dict.fromkeys([leader, *members]):
        device.capabilities.require(*needs)
    return cast(MulticastBackend, leader.driver)  # otherwise the capability is a gap
