"""Devices: they import memory and semaphores, allocate, and create streams, semaphores and arrays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .. import errors, system, timeline
from .._arguments import MAX_32, NoCopy, check_int, check_nbytes, check_timeout, check_type
from ..backend import AllocationBackend, GraphBackend, HostSemaphoreBackend, MulticastBackend, StreamMemoryBackend
from ..capabilities import Capabilities, Cell, Operation, Scope, multicast_needs
from ..errors import ArgumentTypeError, GpuInteropError, InvalidArgumentError
from ..handles import AllocationHandle, Granularity, MemoryHandle, OriginKind, SemaphoreHandle, TimelineFd, VmmFd
from . import importing
from .allocation import Allocation, DeviceArray
from .graph import Graph, capture
from .layout import layout_of
from .lifetime import LIVE, RETIRED, after_fork, alive, generation, lingering
from .memory import ExternalMemory, round_up
from .own_timeline import OwnTimelines
from .release import drain, make_room, tidy, wait_for
from .resource import undo
from .semaphore import DriverSemaphores, ExternalSemaphore, origin_kind
from .stream import Stream, check_foreign_device, foreign_pointer
from .streams import CapturedError, Gate, Streams

if TYPE_CHECKING:
    from ..backend import Backend, DeviceInfo, DriverHandle

K = TypeVar("K")
T = TypeVar("T")


_gates: weakref.WeakKeyDictionary[Backend, Gate] = weakref.WeakKeyDictionary()  # shared by all devices of a backend
_devices: weakref.WeakSet[Device] = weakref.WeakSet()

_COPIERS = 4  # idle copy streams that a device keeps
_CONSUMERS = 64  # streams of array libraries that a device remembers
_LEGACY = 1  # the array API's number for CUDA's legacy default stream


class Device(NoCopy):
    """One device of one backend, which several threads can use at once. It is never closed.

    Get it from `gpuinterop.device` or `gpuinterop.match_device`. You close what its calls return. A `label` is the
    object's name in messages, warnings and its `repr`.

    Attributes
    ----------
    info : DeviceInfo
        The device as its backend describes it.
    capabilities : Capabilities
        What the device can do, and the reason for every gap.
    backend : str
        The backend's name.
    ordinal : int
        Number of the device in its backend, from 0.
    name : str
        Name that the driver reports.
    uuid : bytes or None
        16 bytes, equal to Vulkan's ``deviceUUID``; None if the vendor's own UUID differs from it.
    pci_bus_id : str or None
        ``dddd:bb:dd.f``, lower case.
    luid : bytes or None
        8 bytes; Windows only.
    identity : DeviceIdentity
        Compare it with the identity that another API reports.

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
        self, backend: Backend, info: DeviceInfo, capabilities: Capabilities,
        siblings: Callable[[], Sequence[Device]] = tuple,
    ) -> None:  # fmt: skip
        self.driver, self.info, self.capabilities = backend, info, capabilities
        self._siblings = siblings
        self._born = generation()
        self.backend, self.ordinal, self.name = backend.name, info.ordinal, info.name
        self.uuid, self.pci_bus_id, self.luid = info.uuid, info.pci_bus_id, info.luid
        self.identity = info.identity
        self._begin()
        _devices.add(self)

    def _begin(self) -> None:
        """Start empty. A forked child starts again, because objects made before the fork belong to its parent."""
        self._opened: dict[Callable[[Device], Any], Any] = {}
        self.gate = _gates.setdefault(self.driver, Gate()) if self.driver.releases_block_for_all else Gate()
        self.streams = Streams(self.driver, self.gate)
        self._copiers: list[Stream] = []
        self._last_stream: Stream | None = None  # of another library; set by `check_stream`
        self._consumers: dict[Hashable, weakref.ref[Stream]] = {}
        self._semaphores: weakref.WeakValueDictionary[int, ExternalSemaphore[Any]] = weakref.WeakValueDictionary()

    @property
    def _handle(self) -> DriverHandle:
        """The native device. It is opened on first use, so listing devices creates no context."""
        return self._once(Device._open)

    def _open(self) -> DriverHandle:
        if self._born != generation() and not self.driver.survives_fork:
            raise errors.ResourceClosedError(
                f"expected a device of this process, got {self.name}, opened before a fork, which no driver survives; "
                "start processes with spawn or forkserver, or use the device only in the child."
            )
        return self.driver.open_device(self.info.ordinal)

    def _once(self, make: Callable[[Device], T]) -> T:
        """Call `make` on first use, and return its result. If two threads do so at once, both get the first result."""
        made: T = self._opened[make] if make in self._opened else self._opened.setdefault(make, make(self))
        return made

    def can_access(self, peer: Device) -> bool:
        """Return whether this device can use `peer`'s memory (``cuDeviceCanAccessPeer``, ``hipDeviceCanAccessPeer``).

        True for the device itself, False for a device of another backend.
        """
        check_device(peer, "peer")
        return peer is self or (peer.driver is self.driver and _reaches(self, peer.ordinal))

    @property
    def peers(self) -> list[Device]:
        """The other devices whose memory this device can use, in the order of the backend."""
        return [device for device in self._siblings() if device is not self and self.can_access(device)]

    def __repr__(self) -> str:
        return f"<Device {self.backend}:{self.ordinal} {self.name!r}>"

    def import_memory(
        self, handle: MemoryHandle, *, size: int, dedicated: bool | None = None, label: str | None = None
    ) -> ExternalMemory:
        """Import memory (``cuImportExternalMemory`` / ``hipImportExternalMemory``). You close it.

        To import an object twice, `duplicate` its handle first.

        Parameters
        ----------
        handle : MemoryHandle
            A successful import consumes it: the driver owns the descriptor, or has closed it. After an error you still
            own it, open and unchanged. NT and KMT handles always remain yours.
        size : int
            Size of the whole allocation in bytes (``VkMemoryRequirements::size``), not of the part that you use.
        dedicated : bool, optional
            Whether the exporting allocation is dedicated. By default the handle's origin decides; Direct3D resources
            are always dedicated.

        Raises
        ------
        ArgumentTypeError
            `handle` is an int, or its type is not a memory handle type.
        HandleError
            `handle` is closed or consumed, is of another device or kind, or its descriptor is of another type.
        InvalidArgumentError
            `size` is zero, or larger than the object.
        UnsupportedError
            The device cannot import this handle type. The driver was not called.
        DriverError
            The driver refused the import.
        """
        return self._take_memory(handle, size=size, dedicated=dedicated, label=label)

    def _take_memory(
        self, handle: MemoryHandle, *, size: int, dedicated: bool | None, label: str | None, noun: str = ""
    ) -> ExternalMemory:
        importing.check_handle(handle, MemoryHandle, "import_memory", "OpaqueFd(fd)")
        importing.require_import(self.capabilities, Operation.IMPORT_MEMORY, handle)
        kind, count = type(handle), check_nbytes(size)
        importing.check_origin(handle, (OriginKind.MEMORY, OriginKind.ALLOCATION), self.identity)
        importing.check_size(handle, count)
        is_dedicated = importing.is_dedicated(handle, dedicated)
        make_room()
        memory = ExternalMemory(
            self, kind, size=count, dedicated=is_dedicated, keepalive=getattr(handle, "keepalive", None), noun=noun,
            label=label,
        )  # fmt: skip
        device, backend, lifetime = self._handle, self.driver, memory.lifetime

        def load(duplicate: MemoryHandle) -> None:
            lifetime.create(partial(backend.import_memory, device, duplicate, size=count, dedicated=is_dedicated))

        importing.import_duplicate(handle, load, user=f"{self.backend} import_memory", lifetime=lifetime)
        return memory

    def import_semaphore(self, handle: SemaphoreHandle[K], *, label: str | None = None) -> ExternalSemaphore[K]:
        """Import a semaphore (``cuImportExternalSemaphore`` / ``hipImportExternalSemaphore``). You close it.

        The handle's type sets the kind, and drivers do not check it: `OpaqueFd` is a binary semaphore, `TimelineFd` a
        timeline. A successful import consumes the handle, as in `import_memory`. Every device that can create timelines
        imports those of `create_semaphore`, from any process and backend, even if its driver cannot import semaphores.

        Raises
        ------
        ArgumentTypeError, HandleError, UnsupportedError, DriverError
            See `import_memory`.
        """
        importing.check_handle(handle, SemaphoreHandle, "import_semaphore", "TimelineFd(fd)")
        if isinstance(handle, TimelineFd) and self._makes_timelines and handle._use(timeline.is_ours):
            self.capabilities.require((Operation.CREATE_SEMAPHORE, TimelineFd))
            importing.check_origin(handle, (OriginKind.TIMELINE,))  # host memory, so no device to compare
            drain()
            return cast("ExternalSemaphore[K]", self._once(OwnTimelines).load(handle, label))
        importing.require_import(self.capabilities, Operation.IMPORT_SEMAPHORE, handle)
        importing.check_origin(handle, (origin_kind(handle.kind),), self.identity)
        drain()
        calls, keepalive = self._once(DriverSemaphores), getattr(handle, "keepalive", None)
        semaphore = ExternalSemaphore(self, type(handle), calls, keepalive=keepalive, label=label)
        device, backend = self._handle, self.driver

        def load(duplicate: SemaphoreHandle[K]) -> None:
            semaphore._make(partial(backend.import_semaphore, device, duplicate))

        importing.import_duplicate(handle, load, user=f"{self.backend} import_semaphore", lifetime=semaphore.lifetime)
        return semaphore

    def import_allocation(
        self, handle: AllocationHandle, size: int, *, access: Sequence[Device] = (), label: str | None = None
    ) -> Allocation:
        """Import a shareable allocation (``cuMemImportFromShareableHandle`` / ``hipMemImport...``). You close it.

        It cannot be exported again.

        Parameters
        ----------
        handle : AllocationHandle
            A successful import consumes a descriptor, as in `import_memory`. A fabric handle is bytes, and stays yours.
        size : int
            Allocated size in bytes (`Allocation.size`); drivers do not report it.
        access : sequence of Device, optional
            Other devices that map it too, see `allocate`. If the memory is on yet another device, all these devices
            need peer access to that one.

        Raises
        ------
        ArgumentTypeError, HandleError, InvalidArgumentError, UnsupportedError, DriverError
            See `import_memory`. Also UnsupportedError if one of the devices has no peer access to the memory; if only
            the import shows that, gpuinterop undoes it.
        """
        importing.check_handle(handle, AllocationHandle, "import_allocation", "VmmFd(fd)")
        kind = type(handle)
        self.capabilities.require((Operation.IMPORT_ALLOCATION, kind))
        count = check_nbytes(size)
        # Only the kind is checked: a device can map the allocation of a peer.
        importing.check_origin(handle, (OriginKind.ALLOCATION,))
        importing.check_size(handle, count)
        members = self._with(access)
        backend = cast(AllocationBackend, self.driver)  # otherwise the capability is a gap
        cell = Cell(Operation.IMPORT_ALLOCATION, kind)
        check_access(members, importing.ordinal_of(handle, backend), cell)
        step = backend.granularity(self._handle, kind).minimum
        if count % step:
            raise InvalidArgumentError(
                "size", f"expected a multiple of the granularity, {step}, got {count}; pass Allocation.size."
            )
        make_room()
        allocation = Allocation(members, backend, kind, size=count, exportable=False, label=label)
        lifetime = allocation.lifetime

        def load(duplicate: AllocationHandle) -> None:
            lifetime.create(partial(_import_allocation, allocation, duplicate, cell))

        importing.import_duplicate(handle, load, user=f"{self.backend} import_allocation", lifetime=lifetime)
        return allocation

    def allocate(
        self, size: int, handle_type: type[AllocationHandle] = VmmFd, *, access: Sequence[Device] = (),
        label: str | None = None,
    ) -> Allocation:  # fmt: skip
        """Allocate memory that other processes and APIs can import (``cuMemCreate`` / ``hipMemCreate``). You close it.

        Parameters
        ----------
        size : int
            Size in bytes. It is rounded up to the granularity (`allocation_granularity`). The content is undefined.
        handle_type : type
            Type of the handles that `Allocation.export` returns.
        access : sequence of Device, optional
            Other devices of the backend that map the memory too (`Allocation.buffer_on`). It is on this device.

        Raises
        ------
        UnsupportedError
            The device cannot export such allocations (`Operation.EXPORT_ALLOCATION`), or one of `access` cannot use its
            memory (`can_access`).
        OutOfMemoryError
            The device does not have enough free memory.
        """
        if isinstance(size, Sequence):
            raise ArgumentTypeError("size", f"expected bytes, got {size!r}; call device.empty(shape, dtype).")
        importing.check_handle_type(handle_type, AllocationHandle, "handle_type")
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
        """Create a C-contiguous array in its own shareable memory, for `gpuinterop.share` and Vulkan.

        It calls `allocate` and `Allocation.view`, so even a small array uses one whole granule: 4 KiB on the host,
        usually 2 MiB on a GPU. The content is undefined. To free it, close it or drop the last reference to it.

        Parameters
        ----------
        shape : int or sequence of int
            Number of elements in each dimension; 0 is allowed.
        dtype : str or dtype
            See `Buffer.view`.

        Raises
        ------
        ArgumentTypeError, InvalidArgumentError, UnsupportedError, OutOfMemoryError
            See `allocate` and `Buffer.view`.
        """
        layout = layout_of(shape, dtype, None)
        return DeviceArray(self.allocate(max(layout.high, 1), label=label), layout)

    def allocation_granularity(self, handle_type: type[AllocationHandle] = VmmFd) -> Granularity:
        """Return the granularity of `allocate`'s sizes (``cuMemGetAllocationGranularity`` / ``hipMemGet...``).

        In bytes: the minimum, and the value recommended for the best performance.

        Raises
        ------
        UnsupportedError
            The device cannot export such allocations (`Operation.EXPORT_ALLOCATION`).
        """
        importing.check_handle_type(handle_type, AllocationHandle, "handle_type")
        self.capabilities.require((Operation.EXPORT_ALLOCATION, handle_type))
        backend = cast(AllocationBackend, self.driver)  # otherwise the capability is a gap
        return backend.granularity(self._handle, handle_type)

    def multicast_granularity(
        self, devices: int | Sequence[Device], size: int,
        handle_types: type[AllocationHandle] | Sequence[type[AllocationHandle]] = (),
    ) -> Granularity:  # fmt: skip
        """Return the granularity of a multicast object's size and offsets (``cuMulticastGetGranularity``).

        In bytes: the minimum, which is enforced, and the value recommended for the best performance. Pass the values
        that you will pass to `create_multicast`.

        Raises
        ------
        UnsupportedError
            The device does not support multicast (`Operation.CREATE_MULTICAST`).
        """
        kinds, is_number = importing.check_handle_types(handle_types), not isinstance(devices, Iterable)
        members = [] if is_number else check_devices(devices, "devices", self.driver, as_team=True)
        count = check_int(devices if is_number else len(members), "devices", minimum=1, maximum=MAX_32)
        for device in dict.fromkeys([self, *members]):
            device.capabilities.require(*multicast_needs(kinds))
        return cast(MulticastBackend, self.driver).multicast_granularity(count, check_nbytes(size), kinds)

    def create_semaphore(
        self, handle_type: type[SemaphoreHandle[K]], *, label: str | None = None
    ) -> ExternalSemaphore[K]:
        """Create a semaphore that you can share with `ExternalSemaphore.export`. You close it.

        It is a timeline at 0, or a binary semaphore that is not signalled.

        A GPU creates timelines if its streams can write and wait for values in memory (`Operation.STREAM_MEMORY_OPS`).
        Each is a sealed page of host memory, pinned by every process and device (``cuMemHostRegister``,
        ``cuStreamWaitValue64``, ``cuStreamWriteValue64``; ``hip...``). The host backend and all such devices can import
        it, whatever their vendor; graphics APIs cannot. Its values must be below 2**63.

        Parameters
        ----------
        handle_type : type
            `TimelineFd`, or on the host backend also `OpaqueFd`.

        Raises
        ------
        UnsupportedError
            The backend cannot create this type (`Operation.CREATE_SEMAPHORE`).
        DriverError
            The driver cannot pin the page.
        """
        importing.check_handle_type(handle_type, SemaphoreHandle, "handle_type")
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
                "handle_type", f"expected TimelineFd, the only type of {self.backend}, got {handle_type!r}; pass that."
            )
        return cast("ExternalSemaphore[K]", self._once(OwnTimelines).create(label))

    def create_stream(self, *, high_priority: bool = False, label: str | None = None) -> Stream:
        """Create a stream (``cuStreamCreateWithPriority`` / ``hip...``). You close it.

        It is independent of the default stream. With `high_priority` it has the device's highest priority. Use that
        for long waits: on AMD, a waiting stream stalls the others on its hardware queue, and each priority has four
        queues.
        """
        drain()
        return self._new_stream(high_priority=bool(high_priority), label=label)

    def wrap_stream(self, stream: object, *, label: str | None = None) -> Stream:
        """Wrap another library's stream. Calls with a `stream` argument do this for you.

        torch's current stream is ``device.wrap_stream(torch.cuda.current_stream())``.

        Parameters
        ----------
        stream : int, stream of torch, CuPy or numba, or object with ``__cuda_stream__``
            The other library still owns it; the wrapper keeps it alive, and you need not close the wrapper. 0 is the
            device's default stream. On the host backend, 0 is the calling thread, where NumPy and torch's CPU tensors
            work: waits block it, and signals happen at once.
        label : str, optional
            If you wrap a stream again, the new label replaces the old.

        Raises
        ------
        ArgumentTypeError
            `stream` is not a stream.
        InvalidArgumentError
            `stream` belongs to another device, or its number is not a valid pointer.
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
        """Block until all streams that gpuinterop knows on the device are idle, then release closed objects.

        If one stream has failed, it still waits for the others.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; None sets no limit.

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` seconds passed. The message names the stream and what it waits for.
        GpuInteropError
            Work on a stream has failed. If several streams have failed, the last failure is raised.
        """
        limit = check_timeout(timeout)
        left = system.seconds_left(limit)
        problem: GpuInteropError | None = None
        drain()
        for stream in self.streams.known():
            try:
                if not stream.synchronize(left()):
                    closed = "" if stream.state is LIVE else ", which is closed,"
                    problem = stream.timeout_error(f"{closed} is not idle after {limit:g} s")
                elif (failure := stream.take_failure()) is not None:
                    problem = cast(GpuInteropError, errors.again(failure))
            except CapturedError:  # such work runs when the graph is launched
                continue
            except GpuInteropError as error:
                problem = error
        drain()
        if problem is not None:
            raise problem

    def drain(self, timeout: float | None = None) -> None:
        """Release closed objects that are no longer in use, on all devices. Blocks only if you pass `timeout`.

        Imports, `close` and `synchronize` drain as well.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait until every closed object of this device is released. Objects that a driver failed to
            release do not count; a `LeakedResourceWarning` has named them.

        Raises
        ------
        ResourceBusyError
            `timeout` seconds passed. The message names what is still in use.
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
                late = f"{lifetime.label} is still in use after {limit:g} s"
                raise errors.ResourceBusyError(f"{late}: {lifetime.what_holds()}.")

    def _consumer(self, pointer: int) -> Stream:
        """Wrap the stream of an array library. Arrays keep the wrapper alive, and share it."""
        key: Hashable = pointer
        handle: Any = None
        if pointer != _LEGACY:  # any other number can be reused by a later stream
            handle = self.driver.adopt_stream(self._handle, pointer)
            key = self.driver.stream_key(handle)
        if (reference := self._consumers.get(key)) is not None and (stream := reference()) is not None:
            known = stream.known  # None for each thread's own default stream
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
        """Lend a stream for one copy without `stream=`, so that no copy waits for another. A failed one is closed."""
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
        """Implement `Stream.capture`: module `graph` imports `stream`, not the other way round."""
        return capture(stream, label)

    def _new_stream(self, *, high_priority: bool, label: str | None = None) -> Stream:
        device, backend = self._handle, self.driver
        create = partial(backend.create_stream, device, high_priority=high_priority)
        return self.streams.create(create, lambda known: Stream(self, known, known), label)

    def _know(self, semaphore: ExternalSemaphore[Any]) -> None:
        """Note a semaphore, because graph nodes name semaphores by number; pass its label to the backend."""
        if hasattr(semaphore._handle, "label"):
            with suppress(AttributeError):  # read-only
                semaphore._handle.label = semaphore.label
        if isinstance(self.driver, GraphBackend) and semaphore._handle is not None:
            self._semaphores[self.driver.semaphore_pointer(semaphore._handle)] = semaphore

    @property
    def _makes_timelines(self) -> bool:
        """Whether the core makes timelines from words that streams write; not if the backend makes and imports them."""
        backend = self.driver
        if not isinstance(backend, StreamMemoryBackend):
            return False
        natively = (Operation.IMPORT_SEMAPHORE, TimelineFd)
        return not (isinstance(backend, HostSemaphoreBackend) and self.capabilities.supports(natively))

    def _with(self, access: Sequence[Device]) -> list[Device]:
        return list(dict.fromkeys([self, *check_devices(access, "access", self.driver)]))


@after_fork
def _forked() -> None:
    _gates.clear()
    for device in _devices:
        device._begin()


def check_device(device: object, argument: str) -> Device:
    return check_type(device, Device, argument, "a gpuinterop Device")


def check_devices(devices: object, argument: str, backend: Backend, *, as_team: bool = False) -> list[Device]:
    """Return the devices as a list. Raise unless all belong to `backend`; a team has one or more, each once."""
    sequence: Iterable[object] = check_type(devices, Iterable, argument, "a sequence of gpuinterop Devices")
    members = [check_device(device, argument) for device in sequence]
    for device in members:
        if device.driver is not backend:
            raise InvalidArgumentError(argument, f"expected devices of one backend, got {device!r} of another backend.")
        if as_team and members.count(device) > 1:
            raise InvalidArgumentError(argument, f"expected each device once, got {device!r} twice.")
    if as_team and not members:
        raise InvalidArgumentError(argument, "expected one device or more, got an empty team.")
    return members


def _reaches(device: Device, ordinal: int) -> bool:
    backend = device.driver
    return isinstance(backend, AllocationBackend) and backend.can_access(device.ordinal, ordinal)


def check_access(members: Iterable[Device], ordinal: int | None, cell: Cell) -> None:
    """Raise if one of `members` cannot use the memory of device `ordinal`; None means that the device is unknown."""
    if ordinal is None:
        return
    for device in members:
        if device.ordinal != ordinal and not _reaches(device, ordinal):
            infos = {info.ordinal: info.name for info in device.driver.devices()}
            raise errors.UnsupportedError(
                cell.gap(
                    Scope.DEVICE,
                    f"the memory is on device {ordinal}, {infos.get(ordinal, 'unknown')}, and device "
                    f"{device.ordinal}, {device.name}, has no peer access to it.",
                    "gpuinterop.backend.AllocationBackend.can_access: cuDeviceCanAccessPeer, hipDeviceCanAccessPeer",
                    "choose a device for which device.can_access(peer) is true, or copy through the host.",
                ),
                context=device.name,
            )


def _import_allocation(allocation: Allocation, duplicate: AllocationHandle, cell: Cell) -> DriverHandle:
    """Import an allocation. Undo the import if one of its devices has no access to the memory."""
    backend = allocation.driver
    imported = backend.import_allocation(allocation.device._handle, duplicate, size=allocation.size)
    try:
        allocation.location = backend.location(imported)
        check_access(allocation.devices, allocation.location, cell)
    except BaseException:
        undo("an imported allocation", lambda: backend.release_allocation(imported))
        raise
    return imported
