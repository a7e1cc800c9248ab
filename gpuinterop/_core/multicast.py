"""Multicast objects: one store reaches memory of every device of the team.

If a rule is broken, drivers often accept the call, or block forever. So this module checks the rules first: sizes and
offsets are multiples of the granularity; all devices are added before anything is bound or mapped; bytes are bound
once; an unbind matches its bind; mappings are released before bindings, and bindings before the object.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar, cast

from .. import system
from .._arguments import MAX_32, NotAnArray, check_int, check_nbytes, check_type
from ..backend import MulticastBackend
from ..capabilities import Cell, Operation, Scope, multicast_needs
from ..errors import InvalidArgumentError, ResourceBusyError, UnsupportedError
from ..handles import AllocationHandle, HandleOrigin, OriginKind
from . import discovery
from .allocation import Allocation
from .device import Device, check_device, check_devices
from .importing import HandleTypes, check_handle, check_handle_types, check_origin, import_duplicate
from .lifetime import BORN, LEAKED, LIVE, RELEASED, RETIRED, Lifetime, Marks, alive, hold, locked
from .memory import SETTLE_S, Buffer, Mapping, Sized, round_up
from .release import drain, wait_for
from .resource import Resource

T = TypeVar("T")


def create_multicast(
    devices: int | Sequence[Device], size: int, handle_types: HandleTypes = (), *, device: Device | None = None,
    label: str | None = None,
) -> MulticastObject:  # fmt: skip
    """Create a multicast object (``cuMulticastCreate``). You close it.

    Parameters
    ----------
    devices : sequence of Device or int
        The team. If you pass all its devices, this call adds them. If you pass the number of devices in the team, each
        process then adds its own devices with `MulticastObject.add_device`.
    size : int
        Size in bytes, a multiple of the minimum granularity (`Device.multicast_granularity`).
    handle_types : type or sequence of type, optional
        Types of the handles that `MulticastObject.export` returns.
    device : Device, optional
        Device for the driver calls; by default the first of the team, or ``gpuinterop.device()``.
    label : str, optional
        Name in messages, warnings and the object's `repr`.

    Raises
    ------
    UnsupportedError
        `device` or a device of the team does not support multicast (`Operation.CREATE_MULTICAST`), or cannot export
        this handle type.
    InvalidArgumentError
        `size` is not a valid multiple; the message names the next one. Or the team is empty, contains a device twice,
        or a device of another backend.
    DriverError
        The driver refused. What this call had created is released.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> size = 4 << 20
    >>> first, second = (device.allocate(size) for device in devices)
    >>> with first, second, gi.create_multicast(devices, size) as multicast:
    ...     bindings = [multicast.bind_memory(first), multicast.bind_memory(second)]
    ...     with multicast.map() as mapping:
    ...         address = mapping.ptr  # an argument of a kernel with multimem instructions
    """
    kinds = check_handle_types(handle_types)
    size = check_nbytes(size)
    multicast = MulticastObject(devices, device, size, kinds, multicast_needs(kinds), exportable=True, label=label)
    backend, leader, count = multicast.driver, multicast.device._handle, multicast.device_count
    return _make(multicast, lambda: multicast._create(lambda: backend.create_multicast(leader, count, size, kinds)))


def import_multicast(
    handle: AllocationHandle, devices: int | Sequence[Device], size: int, *, device: Device | None = None,
    label: str | None = None,
) -> MulticastObject:  # fmt: skip
    """Import a multicast object of another process (``cuMemImportFromShareableHandle``). You close it.

    Parameters
    ----------
    handle : AllocationHandle
        Handle from `MulticastObject.export`. A successful import consumes a descriptor; after an error you still own
        it, open and unchanged. A fabric handle is only bytes, and remains yours.
    devices, device, label
        See `create_multicast`.
    size : int
        `MulticastObject.size`; drivers do not report it.

    Raises
    ------
    HandleError
        `handle` is closed or consumed, or is not a handle to a multicast object.
    ArgumentTypeError, InvalidArgumentError, UnsupportedError, DriverError
        See `create_multicast`.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> size = 4 << 20
    >>> with gi.create_multicast(2, size, gi.VmmFd) as theirs, theirs.export() as handle:  # the other process
    ...     with gi.import_multicast(handle, 2, size, device=devices[1]) as mine:
    ...         mine.add_device(devices[1])
    ...         mine.device_count, mine.devices
    (2, (<Device cuda:1 ...>,))
    """
    check_handle(handle, AllocationHandle, "import_multicast", "VmmFd(fd)")
    kind = type(handle)
    size = check_nbytes(size)
    check_origin(handle, (OriginKind.MULTICAST,))
    if handle.origin is not None and handle.origin.size not in (None, size):
        raise InvalidArgumentError("size", f"expected the exported object's {handle.origin.size} bytes, got {size}.")
    needs = [Cell(Operation.IMPORT_MULTICAST, kind)]
    multicast = MulticastObject(devices, device, size, (kind,), needs, exportable=False, label=label)
    backend, leader, count = multicast.driver, multicast.device._handle, multicast.device_count

    def load(duplicate: AllocationHandle) -> None:  # adds the devices too: if that fails, the handle stays the caller's
        multicast._create(lambda: backend.import_multicast(leader, duplicate, devices=count, size=size))

    user = f"{multicast.device.backend} import_multicast"
    return _make(multicast, lambda: import_duplicate(handle, load, user=user, lifetime=multicast.lifetime))


def _team_of(devices: int | Iterable[Device], device: Device | None) -> tuple[Device | None, int, list[Device]]:
    """Return the leader (`device`, or the first of `devices`), the team's size, and the devices to add to the team."""
    leader = None if device is None else check_device(device, "device")
    if not isinstance(devices, Iterable):
        return leader, check_int(devices, "devices", minimum=1, maximum=MAX_32), []
    devices = list(devices)
    leader = leader or check_device(next(iter(devices), None), "devices")
    members = check_devices(devices, "devices", leader.driver, as_team=True)
    return leader, len(members), members


def _make(multicast: MulticastObject, make: Callable[[], None]) -> MulticastObject:
    """Make the object. Close it again if that fails, or adding a device."""
    try:
        make()
    except BaseException:
        multicast.close()
        raise
    return multicast


def _bytes_of(device: Device, offset: int, size: int) -> str:
    return f"device {device.ordinal}, offset={offset}, size={size}"


def _mapping_at(device: Device, address: int) -> Mapping | None:
    """Return gpuinterop's mapping at an address of a device, if there is one."""
    mappings = (lifetime for lifetime in alive() if isinstance(lifetime, Mapping) and lifetime.state is LIVE)
    here = (mapping for mapping in mappings if mapping.address <= address < mapping.address + mapping.size)
    return next((mapping for mapping in here if mapping.is_of(device.streams)), None)


class _Group(Lifetime):
    __slots__ = ()

    def ending(self) -> None:
        children = list(self.dependents)
        mappings = [child for child in children if isinstance(child, _Mapping) and child.state in (LIVE, RETIRED)]
        for binding in [child for child in children if not isinstance(child, _Mapping) and child.state is LIVE]:
            for mapping in mappings:
                hold(binding, mapping)


class _Mapping(Lifetime):
    __slots__ = ()


class MulticastObject(Sized):
    """An object that spreads each store to memory of every device of the team.

    `create_multicast` and `import_multicast` return it. Add all devices of the team, then bind memory of each device,
    then map the object for kernels. Only ``multimem`` instructions can access it.

    `close` unmaps, unbinds and releases, in this order, each when the earlier work of `devices` is done. The process
    that created the object must keep it open until every other process has imported it.

    Attributes
    ----------
    granularity : Granularity
        Granularity of the bindings' offsets and sizes.
    handle_types : tuple of type
        Handle types for `export`; for an imported object, the type of the imported handle.
    device_count : int
        Number of devices in the whole team, over all processes.
    devices : tuple of Device
        Devices added by this process.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> size = 4 << 20
    >>> first, second = (device.allocate(size) for device in devices)
    >>> with first, second, gi.create_multicast(devices, size) as multicast:
    ...     for allocation in (first, second):
    ...         binding = multicast.bind_memory(allocation)
    ...     multicast.complete, len(multicast.bindings)
    (True, 2)
    """

    def __init__(
        self, devices: int | Iterable[Device], device: Device | None, size: int,
        handle_types: tuple[type[AllocationHandle], ...], needs: Sequence[Cell], *, exportable: bool, label: str | None,
    ) -> None:  # fmt: skip
        leader, self.device_count, self._team = _team_of(devices, device)
        device = leader or discovery.device()
        for member in dict.fromkeys([device, *self._team]):
            member.capabilities.require(*needs)
        self.driver = backend = cast(MulticastBackend, device.driver)  # otherwise the capability is a gap
        self.granularity = steps = backend.multicast_granularity(self.device_count, size, handle_types)
        if size % steps.minimum:
            raise InvalidArgumentError(
                "size",
                f"expected a multiple of the granularity, {steps.minimum}, got {size}; pass "
                f"{round_up(size, steps.minimum)}, or the recommended {round_up(size, steps.recommended)}, a multiple "
                f"of {steps.recommended}.",
            )
        drain()
        # Streams use mappings and bindings, which wait for the streams, and not the object itself.
        self.device, self._size = device, size
        release, streams = backend.release_allocation, device.streams
        super().__init__(_Group("MulticastObject", release, device=streams, label=label, size=size))
        self.devices: tuple[Device, ...] = ()
        self._lock = threading.RLock()
        self._seals: list[Any] = Marks()  # finished and running binds and maps; afterwards no device can be added
        self._bindings: dict[MulticastBinding, None] = {}  # also closed ones that the driver has not unbound yet
        self.handle_types, self._needs, self._exportable = handle_types, needs, exportable

    @property
    def complete(self) -> bool:
        """Whether this process has added the whole team. It cannot see other processes' devices (see `exchange`)."""
        return len(self.devices) == self.device_count

    @property
    def bindings(self) -> tuple[MulticastBinding, ...]:
        """The open bindings."""
        return tuple(binding for binding in self._bindings.copy() if not binding.closed)

    def add_device(self, device: Device) -> None:
        """Add a device of this process (``cuMulticastAddDevice``). Do this before you bind or map anything.

        Each process adds its own devices.

        Raises
        ------
        InvalidArgumentError
            The device is already added, is of another backend, or the team is full; or something is bound or mapped.
        UnsupportedError
            The device does not support multicast.
        """
        self._check_open()
        check_devices((device,), "device", self.driver)
        device.capabilities.require(*self._needs)
        system.under(self._lock, self._add_device, device)

    def _add_device(self, device: Device) -> None:
        if device in self.devices:
            raise InvalidArgumentError("device", f"expected each device once, got {device!r} again.")
        if self.complete:
            wanted = f"expected the {self.device_count} devices of the team"
            raise InvalidArgumentError("device", f"{wanted}, got {device!r} in addition to {self._added()}.")
        if self._seals:
            raise InvalidArgumentError(
                "device", "add devices before anything is bound or mapped; make a new multicast object."
            )
        handle = device._handle
        self.lifetime.use(lambda group: self.driver.add_device(group, handle))
        self.devices = (*self.devices, device)

    def bind_memory(
        self, allocation: Allocation, offset: int = 0, *, start: int = 0, size: int | None = None,
        assume_all_added: bool = False,
    ) -> MulticastBinding:  # fmt: skip
        """Bind memory of one device (``cuMulticastBindMem``). This object keeps the binding until you close it.

        Parameters
        ----------
        allocation : Allocation
            Memory on a device that this process has added. Closing it closes the binding. If this object is shared, the
            memory must be shareable and not imported: drivers report no handle type for imported memory.
        offset, start : int
            Offsets in this object and in the allocation, in bytes.
        size : int
            Size in bytes; by default as much as fits into both. All three are multiples of the minimum granularity.
        assume_all_added : bool
            Pass True to confirm that all processes have added their devices; until then the driver blocks, perhaps
            forever. With `gpuinterop.exchange`, the processes can agree on this first.

        Raises
        ------
        InvalidArgumentError
            A device was not added, the allocation is on another device, or the bytes do not fit or are already bound.
        ResourceBusyError
            The bytes were bound, and the unbind still waits for pending work.
        DriverError
            The driver refused.
        """
        self._check_open()
        self._check_allocation(allocation)
        at = self._offset(offset, "offset", self._size)
        first = self._offset(start, "start", allocation.size)
        count = min(self._size - at, allocation.size - first) if size is None else size
        count = self._count_at(at, count)
        allocation._check_range(first, count)
        device = allocation.device

        def bind() -> None:
            self.driver.bind_memory(self._handle, device._handle, at, allocation._handle, first, count)

        return self._bind(device, at, count, bind, allocation, allocation.lifetime, assume_all_added)

    def bind_address(
        self, device: Device, address: int | Buffer, size: int, offset: int = 0, *, assume_all_added: bool = False
    ) -> MulticastBinding:
        """Bind mapped memory of one device by its address (``cuMulticastBindAddr``). See `bind_memory`.

        Parameters
        ----------
        device : Device
            Device with the memory. It must have been added by this process.
        address : int or Buffer
            A buffer, or the address of the first byte, a multiple of the minimum granularity. The binding keeps a
            buffer alive. Closing the buffer, or the allocation of gpuinterop at the address, closes the binding. Keep
            another library's memory until you `unbind` it.
        size, offset : int
            Size, and offset in this object, in bytes: multiples of the minimum granularity.

        Raises
        ------
        InvalidArgumentError
            See `bind_memory`. Also if this object is shared, and the memory was not allocated here to be shared.
        ResourceBusyError, DriverError
            See `bind_memory`.
        """
        self._check_open()
        check_devices((device,), "device", self.driver)
        buffer = address if isinstance(address, Buffer) else None
        number = buffer.ptr if buffer is not None else check_nbytes(address, "address")
        at = self._offset(offset, "offset", self._size)
        count = self._count_at(at, size)
        if buffer is None:
            self._check_added(device, "device")
            self._multiple(number, "address")
        else:
            self._check_buffer(device, buffer, count)

        def bind() -> None:
            # Checked here because the buffer now stays mapped.
            if self.handle_types and not self.driver.is_shareable(device._handle, number):
                raise InvalidArgumentError(
                    "address",
                    f"{self.label} is shared, but the memory at {number:#x} was not allocated here to be shared; bind "
                    "memory of Device.allocate.",
                )
            self.driver.bind_address(self._handle, device._handle, at, number, count)

        mapping = _mapping_at(device, number) if buffer is None else buffer.lifetime
        return self._bind(device, at, count, bind, buffer, mapping, assume_all_added)

    def unbind(self, device: Device, offset: int, size: int) -> None:
        """Close a binding like `MulticastBinding.close` (``cuMulticastUnbind`` after pending work).

        Raises
        ------
        InvalidArgumentError
            No binding of `device` has exactly these bytes. The message lists the existing bindings.
        """
        self._check_open()
        check_device(device, "device")
        at, count = check_int(offset, "offset"), check_int(size, "size")
        for binding in self.bindings:
            if binding.device is device and (binding.offset, binding.size) == (at, count):
                binding.close()
                return
        bound = "; ".join(binding._bytes for binding in self.bindings) or "none"
        got = _bytes_of(device, at, count)
        raise InvalidArgumentError("offset", f"expected exactly the bytes of a binding, got {got}; bound: {bound}.")

    def map(self, devices: Sequence[Device] | None = None, *, assume_all_added: bool = False) -> MulticastMapping:
        """Map the whole object for kernels (``cuMemAddressReserve``, ``cuMemMap``, ``cuMemSetAccess``).

        You close the mapping; closing this object closes it too.

        Parameters
        ----------
        devices : sequence of Device, optional
            Devices whose kernels use the mapping; by default all that this process has added.
        assume_all_added : bool
            See `bind_memory`.

        Raises
        ------
        InvalidArgumentError
            A device of the team or of `devices` was not added.
        DriverError
            The driver refused.
        """
        self._check_open()
        chosen = self.devices if devices is None else check_devices(devices, "devices", self.driver)
        members = list(dict.fromkeys(chosen))
        for device in members:
            self._check_added(device, "devices")
        if not members:
            raise InvalidArgumentError("devices", "expected a device added here, got none; add_device() first.")
        self._check_complete("mapping", assume_all_added)
        drain()  # before the marks, because callbacks run here
        return self._sealed(lambda: MulticastMapping(self, members))

    def export(self, handle_type: type[AllocationHandle] | None = None) -> AllocationHandle:
        """Return a new handle for `import_multicast`. You own it (``cuMemExportToShareableHandle``).

        Without `handle_type`, it has the only one of `handle_types`.

        Raises
        ------
        InvalidArgumentError
            The object was imported, or was not created for this handle type.
        """
        self._check_exportable("multicast")
        names = ", ".join(kind.__name__ for kind in self.handle_types) or "none"
        if handle_type is None and len(self.handle_types) == 1:
            handle_type = self.handle_types[0]
        if handle_type is None or handle_type not in self.handle_types:
            wanted = f"expected a type that {self.label} was created with: {names}"
            raise InvalidArgumentError("handle_type", f"{wanted}; pass handle_types= to create_multicast.")
        kind = handle_type
        handle = self.lifetime.use(lambda group: self.driver.export_multicast(group, kind))
        handle.origin = HandleOrigin(kind=OriginKind.MULTICAST, size=self._size, trusted=True)
        return handle

    def _create(self, call: Callable[[], Any]) -> None:
        self.lifetime.create(call)
        for device in self._team:
            self.add_device(device)

    def _added(self) -> str:
        return ", ".join(map(repr, self.devices)) or "none"

    def _check_added(self, device: Device, argument: str) -> None:
        if device not in self.devices:
            raise InvalidArgumentError(
                argument, f"{device!r} was not added to {self.label} here; add_device() first; added: {self._added()}."
            )

    def _check_complete(self, what: str, assume_all_added: bool) -> None:
        if not (self.complete or assume_all_added):
            raise InvalidArgumentError(
                "assume_all_added",
                f"this process added {len(self.devices)} of the team's {self.device_count} devices, and {what} blocks "
                "until all are added; if other processes add the rest, agree with them through gpuinterop.exchange, or "
                "pass assume_all_added=True once they have.",
            )

    def _check_home(self, device: Device, allocation: Allocation | None, argument: str) -> None:
        """Raise unless the device was added and the allocation is on it."""
        self._check_added(device, argument)
        if allocation is not None and allocation.location not in (None, device.ordinal):
            got = f"{allocation.label}, which is on device {allocation.location}"
            raise InvalidArgumentError(argument, f"expected memory of {device!r}, got {got}.")

    def _check_allocation(self, allocation: Allocation) -> None:
        check_type(allocation, Allocation, "allocation", "an Allocation of Device.allocate")
        allocation._check_open()
        self._check_home(allocation.device, allocation, "allocation")
        if self.handle_types and not allocation._exportable:
            raise InvalidArgumentError(
                "allocation",
                f"{self.label} is shared and needs shareable memory, but {allocation.label} was imported; bind it in "
                "the process that made it with Device.allocate.",
            )

    def _check_buffer(self, device: Device, buffer: Buffer, size: int) -> None:
        mapping = buffer.mapping
        (owner,) = buffer._parents
        if mapping.devices[0] is not device:
            raise InvalidArgumentError(
                "address", f"expected memory of {device!r}, got {buffer.label}, memory of {mapping.devices[0]!r}."
            )
        self._check_home(device, owner if isinstance(owner, Allocation) else None, "address")
        step = self.granularity.minimum
        if buffer.offset % step:
            raise InvalidArgumentError(
                "address", f"expected a buffer at a multiple of {step} in its memory, got one at byte {buffer.offset}."
            )
        if size > buffer.size:
            raise InvalidArgumentError(
                "size", f"expected at most {buffer.size}, the bytes of {buffer.label}, got {size}."
            )

    def _multiple(self, value: int, argument: str) -> int:
        step = self.granularity.minimum
        if value % step:
            raise InvalidArgumentError(
                argument, f"expected a multiple of the granularity, {step}, got {value}; pass {round_up(value, step)}."
            )
        return value

    def _offset(self, value: int, argument: str, end: int) -> int:
        offset = self._multiple(check_nbytes(value, argument, minimum=0), argument)
        if offset >= end:
            raise InvalidArgumentError(argument, f"expected less than {end} bytes, got {offset}.")
        return offset

    def _count_at(self, offset: int, size: int) -> int:
        count = self._multiple(check_nbytes(size), "size")
        self._check_range(offset, count)
        return count

    def _bind(
        self, device: Device, offset: int, size: int, call: Callable[[], None], memory: Allocation | Buffer | None,
        mapping: Lifetime | None, assume_all_added: bool,
    ) -> MulticastBinding:  # fmt: skip
        self._check_complete("binding", assume_all_added)
        drain()  # before the marks, because callbacks run here
        for binding in self._overlapping(device, offset, size):
            if binding.closed:
                wait_for(binding.lifetime, SETTLE_S)
        return self._sealed(lambda: MulticastBinding(self, device, offset, size, memory, mapping, call))

    def _sealed(self, make: Callable[[], T]) -> T:
        """Bind or map. Afterwards no device can be added, unless this call fails."""
        system.under(self._lock, self._seals.append, None)  # not while a device is being added
        try:  # without the lock: the driver may block until another thread has made its call
            return make()
        except BaseException:
            del self._seals[-1]
            raise

    def _reserve(self, binding: MulticastBinding) -> None:
        other = _claim(self, binding)
        if other is None:
            return
        state, taken = other.lifetime.state, other._bytes
        if state in (BORN, LIVE):
            overlap = f"{binding._bytes} overlaps the binding of {taken}"
            raise InvalidArgumentError("offset", f"{overlap}; unbind that first.")
        if state is LEAKED:
            raise ResourceBusyError(
                f"{taken} was bound, and its unbind failed: the driver may still bind it; make a new multicast object."
            )
        holds = other.lifetime.what_holds()
        raise ResourceBusyError(
            f"{taken} was bound, and is not unbound yet ({holds}); call close(timeout=...) on that binding."
        )

    def _overlapping(self, device: Device, offset: int, size: int) -> list[MulticastBinding]:
        bindings = (binding for binding in self._bindings.copy() if binding.device is device)
        return [other for other in bindings if other.offset < offset + size and offset < other.offset + other.size]


@locked
def _claim(multicast: MulticastObject, binding: MulticastBinding) -> MulticastBinding | None:
    """Reserve the bytes of a binding, or return another binding that overlaps them and is not yet unbound."""
    for known in list(multicast._bindings):
        if known.lifetime.state is RELEASED:
            del multicast._bindings[known]
    other = next(iter(multicast._overlapping(binding.device, binding.offset, binding.size)), None)
    if other is None:
        multicast._bindings[binding] = None
    return other


class MulticastBinding(Sized):
    """Memory of `device` bound to a multicast object. `MulticastObject.bind_memory` and `bind_address` return it.

    `close` unbinds it (``cuMulticastUnbind``) when the earlier work of the object's `devices` is done. Only then is the
    memory unmapped and released. It does not wait for mappings or other processes: stop all stores to the bytes before
    you close a binding.

    Attributes
    ----------
    multicast : MulticastObject
        The object.
    offset : int
        Offset in the multicast object, in bytes.
    memory : Allocation or Buffer or None
        The bound memory; None if you passed an address.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> with device.allocate(4 << 20) as allocation, gi.create_multicast([device], 4 << 20) as multicast:
    ...     binding = multicast.bind_memory(allocation)
    ...     binding.memory is allocation
    ...     binding.close(timeout=10)  # unbinds, once earlier work is done
    True
    """

    def __init__(
        self, multicast: MulticastObject, device: Device, offset: int, size: int, memory: Allocation | Buffer | None,
        mapping: Lifetime | None, call: Callable[[], None],
    ) -> None:  # fmt: skip
        backend, group, handle = multicast.driver, multicast.lifetime, device._handle

        def unbind(_: object) -> None:
            backend.unbind(group.handle, handle, offset, size)

        lifetime = Lifetime("MulticastBinding", unbind, parents=(group,) if mapping is None else (group, mapping))
        super().__init__(lifetime, multicast, *(() if memory is None else (memory,)))
        self.lifetime.untracked = tuple(member.streams for member in multicast.devices)
        self.multicast, self.memory = multicast, memory
        self.device, self.offset, self._size = device, offset, size
        self._bytes = _bytes_of(device, offset, size)
        multicast._reserve(self)
        self.lifetime.create(call)

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Do nothing: a binding is dropped only with its object, which unmaps and then unbinds."""

    def close(self, timeout: float | None = None) -> None:
        """Close the binding (see `Resource.close`)."""
        super().close(timeout)
        if self.lifetime.state is RELEASED:
            self.multicast._bindings.pop(self, None)


class MulticastMapping(Resource, NotAnArray):
    """A multicast object's address for kernels. `MulticastObject.map` returns it.

    Only ``multimem`` instructions can access it. Array libraries cannot, so it is not a `Buffer`; the devices' own
    allocations have buffers. `close` unmaps it when the earlier work of the devices added here is done.

    Attributes
    ----------
    multicast : MulticastObject
        The object.
    size : int
        Size in bytes.
    devices : tuple of Device
        Devices whose kernels can use it.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> with device.allocate(4 << 20) as allocation, gi.create_multicast([device], 4 << 20) as multicast:
    ...     binding = multicast.bind_memory(allocation)
    ...     with multicast.map() as mapping:
    ...         address = mapping.ptr  # an argument of the kernel
    ...         mapping.devices
    (<Device cuda:0 ...>,)
    """

    def __init__(self, multicast: MulticastObject, devices: Sequence[Device]) -> None:
        backend, group = multicast.driver, multicast.lifetime
        mapping = _Mapping("MulticastMapping", backend.unmap_allocation, parents=(group,))
        super().__init__(mapping, multicast)
        mapping.untracked = tuple(device.streams for device in multicast.devices)
        self.multicast, self.size, self.devices = multicast, multicast.size, tuple(devices)
        handles = [device._handle for device in devices]

        def map_group() -> Any:
            handle, self._address = backend.map_allocation(group.handle, handles)
            return handle

        mapping.create(map_group)

    @property
    def ptr(self) -> int:
        """Address of the first byte, equal on all `devices`. Use it only with ``multimem`` instructions."""
        self._check_open()
        return self._address

    # -- refused: without these methods, array libraries would report an unknown type, or look for a pointer -----

    def _refuse_arrays(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise UnsupportedError(
            Cell(Operation.MAP_BUFFER).gap(
                Scope.DEVICE,
                "only multimem instructions can access a multicast address, so array libraries cannot use it.",
                "CUDA driver API, Multicast Object Management",
                "pass .ptr to a kernel; each device's own allocation is an ordinary buffer (Allocation.buffer).",
            ),
            context=self.label,
        )

    __dlpack__ = __dlpack_device__ = _refuse_arrays
    __array_interface__ = __array_struct__ = __cuda_array_interface__ = property(_refuse_arrays)
