"""Multicast objects: what is written to one reaches memory of every device of its team.

The drivers let much pass, or block for ever, where a rule is broken; so the rules are held to here, before they are
called: sizes and offsets are multiples of the granularity, every device was added before anything is bound or mapped,
nothing is bound twice, an unbind equals its bind, and releases come in order: mappings, bindings, the object.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

from .._arguments import check_int, check_nbytes
from ..backend import MulticastBackend
from ..capabilities import Cell, Operation, Scope
from ..errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    ResourceBusyError,
    UnsupportedError,
)
from ..handles import AllocationHandle, Granularity, Handle, HandleOrigin, OriginKind
from . import registry
from .allocation import Allocation
from .device import Device, check_device, check_devices, check_handle, check_handle_type
from .drain import drain, wait_for
from .memory import MOMENT_S, Buffer, round_up
from .monitor import locked
from .native import BORN, LEAKED, LIVE, MARK, RELEASED, RETIRED, Marks, Native, hold
from .ownership import lend
from .resource import Resource

T = TypeVar("T")

HandleTypes: TypeAlias = "type[AllocationHandle] | Sequence[type[AllocationHandle]]"
Needs: TypeAlias = "tuple[tuple[Operation, type[AllocationHandle] | None], ...]"


def create_multicast(
    devices: int | Sequence[Device], size: int, handle_types: HandleTypes = (), *, device: Device | None = None
) -> MulticastObject:
    """Make a multicast object (``cuMulticastCreate``).

    Parameters
    ----------
    devices : sequence of Device or int
        The team. Devices: all of it, each added at once. A number: how many devices the team has over all processes,
        each of which adds its own with `MulticastObject.add_device`.
    size : int
        In bytes, a multiple of the minimum granularity (`Device.multicast_granularity`).
    handle_types : type or sequence of type, optional
        What `MulticastObject.export` gives.
    device : Device, optional
        What the driver is called through; by default the team's first, or `gpuinterop.device`.

    Raises
    ------
    UnsupportedError
        `device` or one of the team has no multicast (`Operation.CREATE_MULTICAST`), or exports none of this type.
    InvalidArgumentError
        `size` does not fit; the message names the next that does. The team is empty, has a device twice, or one of
        another backend.
    DriverError
        The driver refused; whatever was made is gone again.
    """
    kinds = _kinds(handle_types)
    leader, count, members = _team(devices, device)
    needs = _creating(kinds)
    backend = _backend(needs, leader, members)
    size = check_nbytes(size)
    steps = _check_size(backend, count, size, kinds)
    drain()
    multicast = MulticastObject(
        leader, backend, device_count=count, size=size, handle_types=kinds, granularity=steps, needs=needs,
        exportable=True,
    )  # fmt: skip
    native = leader._native
    return _make(
        multicast, lambda: multicast._create(lambda: backend.create_multicast(native, count, size, kinds), members)
    )


def import_multicast(
    handle: AllocationHandle, devices: int | Sequence[Device], size: int, *, device: Device | None = None
) -> MulticastObject:
    """Import a multicast object that another process has made (``cuMemImportFromShareableHandle``).

    Parameters
    ----------
    handle : AllocationHandle
        Of `MulticastObject.export`. A descriptor is consumed by success; after an error it is the caller's, open and
        untouched. A fabric handle is only bytes, and stays the caller's.
    devices, device
        As `create_multicast`.
    size : int
        `MulticastObject.size`; drivers do not tell it.

    Raises
    ------
    HandleError
        `handle` is closed or consumed, or of another kind.
    ArgumentTypeError, InvalidArgumentError, UnsupportedError, DriverError
        As `create_multicast`.
    """
    check_handle(handle, AllocationHandle, "import_multicast", "VmmFd(fd)")
    handle._check_open()
    kind = type(handle)
    leader, count, members = _team(devices, device)
    needs: Needs = ((Operation.IMPORT_MULTICAST, kind),)
    backend = _backend(needs, leader, members)
    size = check_nbytes(size)
    leader._check_origin(handle, (OriginKind.MULTICAST,), same_device=False)
    if handle.origin is not None and handle.origin.size not in (None, size):
        raise InvalidArgumentError("size", f"is {handle.origin.size} bytes of the exported object, not {size}.")
    steps = _check_size(backend, count, size, (kind,))
    drain()
    multicast = MulticastObject(
        leader, backend, device_count=count, size=size, handle_types=(kind,), granularity=steps, needs=needs,
        exportable=False,
    )  # fmt: skip
    native = leader._native

    def load(lent: Handle) -> None:  # where a device cannot be added, the handle is still the caller's
        loaned = cast(AllocationHandle, lent)
        multicast._create(lambda: backend.import_multicast(native, loaned, devices=count, size=size), members)

    return _make(multicast, lambda: lend(handle, load, user=f"{leader.backend} import_multicast"))


def granularity(
    device: Device, devices: int | Sequence[Device], size: int, handle_types: HandleTypes = ()
) -> Granularity:
    """`Device.multicast_granularity`."""
    kinds = _kinds(handle_types)
    _, count, members = _team(devices, device)
    backend = _backend(_creating(kinds), device, members)
    return backend.multicast_granularity(count, check_nbytes(size), kinds)


# -- arguments -------------------------------------------------------------------------------------------------------


def _kinds(handle_types: HandleTypes) -> tuple[type[AllocationHandle], ...]:
    kinds: tuple[Any, ...] = tuple(handle_types) if isinstance(handle_types, Iterable) else (handle_types,)
    for kind in kinds:
        check_handle_type(kind, AllocationHandle, "handle_types")
    return tuple(dict.fromkeys(kinds))


def _team(devices: int | Iterable[Device], device: Device | None) -> tuple[Device, int, list[Device]]:
    """What the driver is called through, how many devices there are, and those that are added at once."""
    leader = None if device is None else check_device(device, "device")
    if not isinstance(devices, Iterable):
        count = check_int(devices, "devices", minimum=1)
        return leader or registry.device(), count, []
    given = list(devices)
    leader = leader or check_device(next(iter(given), None), "devices")
    members = check_devices(given, "devices", leader._backend)
    if not members:
        raise InvalidArgumentError("devices", "a team has one device or more.")
    if twice := next((one for one in members if members.count(one) > 1), None):
        raise InvalidArgumentError("devices", f"{twice!r} is there twice.")
    return leader, len(members), members


def _creating(kinds: Sequence[type[AllocationHandle]]) -> Needs:
    return (Operation.CREATE_MULTICAST, None), *((Operation.EXPORT_MULTICAST, kind) for kind in kinds)


def _backend(needs: Needs, leader: Device, members: Iterable[Device]) -> MulticastBackend:
    for device in dict.fromkeys([leader, *members]):
        device.capabilities.require(*needs)
    backend = leader._backend
    assert isinstance(backend, MulticastBackend)  # otherwise the capability is a gap
    return backend


def _check_size(
    backend: MulticastBackend, count: int, size: int, kinds: Sequence[type[AllocationHandle]]
) -> Granularity:
    steps = backend.multicast_granularity(count, size, kinds)
    if size % steps.minimum:
        raise InvalidArgumentError(
            "size",
            f"{size} is no multiple of the granularity, {steps.minimum}: the next good size is "
            f"{round_up(size, steps.minimum)}; recommended is a multiple of {steps.recommended}: "
            f"{round_up(size, steps.recommended)}.",
        )
    return steps


def _make(multicast: MulticastObject, make: Callable[[], None]) -> MulticastObject:
    """Make it; where a device cannot be added, it goes."""
    try:
        make()
    except BaseException:
        multicast.close()
        raise
    return multicast


class _Range:
    """Bytes of the object that are bound to one device's memory, until they are unbound natively."""

    def __init__(self, device: Device, offset: int, size: int) -> None:
        self.device = device
        self.offset = offset
        self.size = size

    def __str__(self) -> str:
        return f"device {self.device.ordinal}, offset={self.offset}, size={self.size}"

    def overlaps(self, other: _Range) -> bool:
        return (
            self.device is other.device
            and self.offset < other.offset + other.size
            and other.offset < self.offset + self.size
        )


class _Group(Native):
    """A multicast object."""

    __slots__ = ()

    def ending(self) -> None:
        """Where the whole of it is closed, what is mapped goes before what is bound."""
        mappings = [one for one in self.standing if isinstance(one, _Mapping) and one.state in (LIVE, RETIRED)]
        for binding in [one for one in self.standing if not isinstance(one, _Mapping) and one.state is LIVE]:
            for mapping in mappings:
                hold(binding, mapping)


class _Mapping(Native):
    """A mapping of one."""

    __slots__ = ("address",)
    address: int


# -- the object ------------------------------------------------------------------------------------------------------


class MulticastObject(Resource):
    """What is written to it reaches memory of every device of its team.

    Made by `create_multicast` and `import_multicast`. Its life: every device of the team is added, each device binds
    memory of its own, and the object is mapped for kernels, whose ``multimem`` instructions alone may touch it.

    `close` unmaps, unbinds and releases, in this order, each when the work of `devices` so far is done. Who has made
    it keeps it open until everybody has imported it.
    """

    def __init__(
        self,
        device: Device,
        backend: MulticastBackend,
        *,
        device_count: int,
        size: int,
        handle_types: tuple[type[AllocationHandle], ...],
        granularity: Granularity,
        needs: Needs,
        exportable: bool,
    ) -> None:
        # No stream's work touches the object itself, only what is mapped and bound: those wait.
        super().__init__(_Group("MulticastObject", backend.release_allocation))
        self._members: tuple[Device, ...] = ()
        self._lock = threading.Lock()
        # The binds and maps that there were, or are under way: who makes one has said that all devices are there.
        self._seals: list[Any] = Marks()
        self._bound: dict[_Range, Native] = {}  # until it is unbound natively
        self._bindings: dict[Native, MulticastBinding] = {}
        self._device = device
        self._backend = backend
        self._device_count = device_count
        self._size = size
        self._handle_types = handle_types
        self._granularity = granularity
        self._needs = needs
        self._exportable = exportable

    # -- what it is --------------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """What the driver is called through."""
        return self._device

    @property
    def size(self) -> int:
        """In bytes."""
        return self._size

    @property
    def granularity(self) -> Granularity:
        """What offsets and sizes of bindings are multiples of."""
        return self._granularity

    @property
    def handle_types(self) -> tuple[type[AllocationHandle], ...]:
        """What it was created to be exported as; of an imported one, what it was imported from."""
        return self._handle_types

    @property
    def device_count(self) -> int:
        """Of the whole team, over all processes."""
        return self._device_count

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those that were added here."""
        return self._members

    @property
    def complete(self) -> bool:
        """Whether the whole team was added here. Of a team in several processes nobody can know it (`exchange`)."""
        return len(self.devices) == self._device_count

    @property
    def bindings(self) -> tuple[MulticastBinding, ...]:
        """Those that are open."""
        return tuple(binding for binding in self._bindings.copy().values() if not binding.closed)

    # -- its life ----------------------------------------------------------------------------------------------

    def add_device(self, device: Device) -> None:
        """Add a device of the team (``cuMulticastAddDevice``); before anything is bound or mapped.

        Raises
        ------
        InvalidArgumentError
            It was added already, is of another backend, or is one too many; or something was bound or mapped.
        UnsupportedError
            It has no multicast.
        """
        self._check_open()
        check_devices((device,), "device", self._backend)
        device.capabilities.require(*self._needs)
        with self._lock:
            if device in self._members:
                raise InvalidArgumentError("device", f"{device!r} was added already.")
            if self.complete:
                raise InvalidArgumentError(
                    "device", f"the team has {self._device_count} devices, and all were added: {self._added()}."
                )
            if self._seals:
                raise InvalidArgumentError(
                    "device", "devices are added before anything is bound or mapped; make a new multicast object."
                )
            native = device._native
            self._lifetime.use(lambda group: self._backend.add_device(group, native))
            self._members = (*self._members, device)

    def bind_memory(
        self,
        allocation: Allocation,
        offset: int = 0,
        *,
        start: int = 0,
        size: int | None = None,
        assume_all_added: bool = False,
    ) -> MulticastBinding:
        """Bind memory of one device (``cuMulticastBindMem``).

        Parameters
        ----------
        allocation : Allocation
            Of a device that was added here, and on it. Closing it closes the binding. An object that is shared takes
            none that was imported: its memory must be shareable, and the driver names no handle type for imported
            memory. That it would refuse such a bind is inferred from that, and was not tried.
        offset : int
            Where in this object, in bytes.
        start, size : int
            Which bytes of the allocation; by default as many as both have. All three are multiples of the minimum
            granularity.
        assume_all_added : bool
            The caller knows that every device of the team was added, in other processes as well. The driver blocks
            until that is so, for ever if need be: `gpuinterop.exchange` lets the processes agree first.

        Returns
        -------
        MulticastBinding
            Held by this object until it is closed, or unbound.

        Raises
        ------
        InvalidArgumentError
            Not every device was added, the allocation is another device's, or the bytes do not fit or are bound.
        ResourceBusyError
            The bytes were bound, and the unbind waits for pending work.
        DriverError
        """
        self._check_open()
        if not isinstance(allocation, Allocation):
            raise ArgumentTypeError(
                "allocation", f"must be an Allocation of Device.allocate, not {type(allocation).__name__}."
            )
        allocation._check_open()
        device = allocation.device
        self._check_home(device, allocation, "allocation")
        if self._handle_types and not allocation._exportable:
            raise InvalidArgumentError(
                "allocation",
                f"{allocation.label} was imported, so it was not allocated here to be shared, and {self.label} is: "
                "bind it where it was made with Device.allocate.",
            )
        at = self._offset(offset, "offset", self._size)
        first = self._offset(start, "start", allocation.size)
        count = min(self._size - at, allocation.size - first) if size is None else size
        bound = self._range(device, at, count)
        if first + bound.size > allocation.size:
            raise InvalidArgumentError(
                "size",
                f"bytes {first} to {first + bound.size} are outside the allocation, which has {allocation.size}.",
            )
        native = device._native
        return self._bind(
            bound,
            lambda: self._backend.bind_memory(self._native, native, at, allocation._native, first, bound.size),
            allocation,
            assume_all_added,
        )

    def bind_address(
        self,
        device: Device,
        address: int | Buffer,
        size: int,
        offset: int = 0,
        *,
        assume_all_added: bool = False,
    ) -> MulticastBinding:
        """Bind memory of one device that is mapped already (``cuMulticastBindAddr``).

        Parameters
        ----------
        device : Device
            Whose memory it is; it was added here.
        address : int or Buffer
            Of the first byte; a number is a multiple of the minimum granularity. A buffer is kept alive, and closing
            it closes the binding; memory behind a number must stay until it is unbound.
        size, offset : int
            In bytes, multiples of the minimum granularity; `offset` in this object.
        assume_all_added : bool
            As in `bind_memory`.

        Raises
        ------
        InvalidArgumentError
            As `bind_memory`; also memory that was not allocated here to be shared, for an object that is.
        ResourceBusyError, DriverError
            As `bind_memory`.
        """
        self._check_open()
        check_devices((device,), "device", self._backend)
        buffer = address if isinstance(address, Buffer) else None
        number = buffer.ptr if buffer is not None else check_int(address, "address")
        at = self._offset(offset, "offset", self._size)
        bound = self._range(device, at, size)
        if buffer is None:
            self._check_home(device, None, "device")
            if not 0 < number < 1 << 63:
                raise InvalidArgumentError("address", f"{number} is no address.")
            self._multiple(number, "address")
        else:
            self._check_buffer(device, buffer, bound.size)
        native = device._native

        def bind() -> None:  # asked here, too: only now the buffer stays mapped
            if self._handle_types and not self._backend.is_shareable(native, number):
                raise InvalidArgumentError(
                    "address",
                    f"the memory at {number:#x} was not allocated here to be shared, and {self.label} is: bind memory "
                    "of Device.allocate.",
                )
            self._backend.bind_address(self._native, native, at, number, bound.size)

        return self._bind(bound, bind, buffer, assume_all_added)

    def unbind(self, device: Device, offset: int, size: int) -> None:
        """End a binding (``cuMulticastUnbind``, when pending work is done); as `MulticastBinding.close`.

        Raises
        ------
        InvalidArgumentError
            There is none of exactly these bytes of this device; the message lists those there are.
        """
        self._check_open()
        check_device(device, "device")
        at, count = check_int(offset, "offset"), check_int(size, "size")
        for binding in self.bindings:
            if binding.device is device and (binding.offset, binding.size) == (at, count):
                binding.close()
                return
        there = "; ".join(str(binding._bound) for binding in self.bindings) or "none"
        raise InvalidArgumentError(
            "offset",
            f"{_Range(device, at, count)} was not bound like this, and an unbind equals its bind; bound: {there}.",
        )

    def map(self, devices: Sequence[Device] | None = None, *, assume_all_added: bool = False) -> MulticastMapping:
        """Map all of it for kernels (``cuMemAddressReserve``, ``cuMemMap``, ``cuMemSetAccess``).

        Parameters
        ----------
        devices : sequence of Device, optional
            Whose kernels are to use it; they were added here. All by default.
        assume_all_added : bool
            As in `bind_memory`.

        Raises
        ------
        InvalidArgumentError
            Not every device was added, or one of `devices` was not added here.
        DriverError
        """
        self._check_open()
        chosen = self.devices if devices is None else check_devices(devices, "devices", self._backend)
        members = list(dict.fromkeys(chosen))
        for device in members:
            self._check_added(device, "devices")
        if not members:
            raise InvalidArgumentError("devices", "no device was added here that could map it; add_device() first.")
        self._check_complete("mapping", assume_all_added)
        return self._sealed(lambda: MulticastMapping(self, members))

    def export(self, handle_type: type[AllocationHandle] | None = None) -> AllocationHandle:
        """A new handle that the caller owns (``cuMemExportToShareableHandle``), for `import_multicast`.

        Parameters
        ----------
        handle_type : type, optional
            One of `handle_types`; may be left out where there is one only.
        """
        self._check_open()
        if not self._exportable:
            raise InvalidArgumentError(
                "multicast", f"{self.label} was imported; duplicate() the handle before the import instead."
            )
        names = ", ".join(kind.__name__ for kind in self._handle_types) or "none"
        if handle_type is None and len(self._handle_types) == 1:
            handle_type = self._handle_types[0]
        if handle_type is None or handle_type not in self._handle_types:
            raise InvalidArgumentError(
                "handle_type",
                f"must be one that {self.label} was created with: {names}; give handle_types= to create_multicast.",
            )
        kind = handle_type
        handle = self._lifetime.use(lambda group: self._backend.export_multicast(group, kind))
        handle.origin = HandleOrigin(kind=OriginKind.MULTICAST, size=self._size, trusted=True)
        return handle

    # -- inside ------------------------------------------------------------------------------------------------

    def _create(self, call: Callable[[], Any], members: Iterable[Device]) -> None:
        self._lifetime.create(call)
        for device in members:
            self.add_device(device)

    def _added(self) -> str:
        return ", ".join(map(repr, self.devices)) or "none"

    def _check_added(self, device: Device, argument: str) -> None:
        if device not in self.devices:
            raise InvalidArgumentError(
                argument, f"{device!r} was not added to {self.label} here: add_device() first; added: {self._added()}."
            )

    def _check_complete(self, what: str, assume_all_added: bool) -> None:
        if not (self.complete or assume_all_added):
            raise InvalidArgumentError(
                "assume_all_added",
                f"{len(self.devices)} of the team's {self._device_count} devices were added here, and {what} blocks "
                "until all were. Where others add theirs in other processes, let them agree through "
                "gpuinterop.exchange, or say assume_all_added=True when you know that they have.",
            )

    def _check_home(self, device: Device, allocation: Allocation | None, argument: str) -> None:
        """A device binds its own memory, and was added."""
        self._check_added(device, argument)
        if allocation is not None and allocation._location not in (None, device.ordinal):
            raise InvalidArgumentError(
                argument,
                f"{allocation.label} lies on device {allocation._location}, and {device!r} binds its own memory only.",
            )

    def _check_buffer(self, device: Device, buffer: Buffer, size: int) -> None:
        mapping = buffer._mapping
        (owner,) = buffer._parents
        if mapping.devices[0] is not device:
            raise InvalidArgumentError(
                "address", f"{buffer.label} is memory of {mapping.devices[0]!r}, and {device!r} binds its own only."
            )
        self._check_home(device, owner if isinstance(owner, Allocation) else None, "address")
        step = self._granularity.minimum
        if buffer.offset % step:
            raise InvalidArgumentError(
                "address", f"starts at byte {buffer.offset} of its memory, no multiple of {step}."
            )
        if size > buffer.size:
            raise InvalidArgumentError("size", f"{size} bytes are beyond {buffer.label}, which has {buffer.size}.")

    def _multiple(self, value: int, argument: str) -> int:
        step = self._granularity.minimum
        if value % step:
            raise InvalidArgumentError(
                argument, f"{value} is no multiple of the granularity, {step}; the next is {round_up(value, step)}."
            )
        return value

    def _offset(self, value: int, argument: str, end: int) -> int:
        offset = self._multiple(check_nbytes(value, argument, minimum=0), argument)
        if offset >= end:
            raise InvalidArgumentError(argument, f"{offset} is outside: there are {end} bytes.")
        return offset

    def _range(self, device: Device, offset: int, size: int) -> _Range:
        count = self._multiple(check_nbytes(size), "size")
        if offset + count > self._size:
            raise InvalidArgumentError(
                "size", f"bytes {offset} to {offset + count} are outside {self.label}, which has {self._size}."
            )
        return _Range(device, offset, count)

    def _bind(
        self, bound: _Range, call: Callable[[], None], memory: Allocation | Buffer | None, assume_all_added: bool
    ) -> MulticastBinding:
        self._check_complete("binding", assume_all_added)
        return self._sealed(lambda: MulticastBinding(self, bound, memory, call))

    def _sealed(self, make: Callable[[], T]) -> T:
        """Bind or map: no device is added any more, unless it is refused."""
        seals = self._seals
        seals += MARK
        try:
            with self._lock:  # behind a device that is being added
                pass
            # Without the lock: a driver that blocks must not hold up what would let it go on.
            return make()
        except BaseException:
            del seals[-1]
            raise

    def _reserve(self, binding: MulticastBinding) -> None:
        wanted = binding._bound
        drain()
        for there in self._overlapping(wanted).values():
            if there.state is not LIVE:  # the driver may only need a moment to see work as done
                wait_for(there, MOMENT_S)
        taken: dict[_Range, Native] = {}
        _reserve(self, binding, taken)
        for range_, there in taken.items():
            if there.state in (BORN, LIVE):
                raise InvalidArgumentError("offset", f"{wanted} overlaps what is bound: {range_}; unbind that first.")
            if there.state is LEAKED:
                raise ResourceBusyError(
                    f"{range_} was bound, and its unbind failed: the driver may still have it so; make a new multicast "
                    "object."
                )
            raise ResourceBusyError(
                f"{range_} was bound, and is not unbound yet ({there.what_holds()}); call close(timeout=...) on that "
                "binding."
            )

    def _overlapping(self, wanted: _Range) -> dict[_Range, Native]:
        return {there: native for there, native in self._bound.copy().items() if there.overlaps(wanted)}


@locked
def _reserve(multicast: MulticastObject, binding: MulticastBinding, taken: dict[_Range, Native]) -> None:
    for there, native in list(multicast._bound.items()):
        if native.state is RELEASED or (native.state is BORN and not native.calls.copy()):
            del multicast._bound[there]
        if there not in multicast._bound or native.state not in (BORN, LIVE):
            multicast._bindings.pop(native, None)  # its memory, too, may have closed it
    taken.update(multicast._overlapping(binding._bound))
    if not taken:
        multicast._bound[binding._bound] = binding._lifetime
        multicast._bindings[binding._lifetime] = binding


class MulticastBinding(Resource):
    """Memory of one device, bound to a multicast object. Made by `MulticastObject.bind_memory` and `bind_address`.

    `close` unbinds it (``cuMulticastUnbind``) when the work so far of the object's `devices`, those that were added
    here, is done; the memory is neither unmapped nor released before that. It waits for no mapping, and for no other
    process: nobody stores to these bytes any more when it is closed.
    """

    def __init__(
        self, multicast: MulticastObject, bound: _Range, memory: Allocation | Buffer | None, call: Callable[[], None]
    ) -> None:
        backend, group = multicast._backend, multicast._lifetime
        native, offset, size = bound.device._native, bound.offset, bound.size
        parents = (group,) if memory is None else (group, memory._lifetime)
        super().__init__(
            Native("MulticastBinding", lambda _: backend.unbind(group.handle, native, offset, size), parents=parents),
            multicast,
            *(() if memory is None else (memory,)),
        )
        self._lifetime.untracked = tuple(device._streams for device in multicast.devices)
        self._bound = bound
        self._multicast = multicast
        self._memory = memory
        making = self._lifetime.calls  # the range is taken as long as it is marked, or bound
        making += MARK
        try:
            multicast._reserve(self)
            self._lifetime.create(call)
        except BaseException:
            if self.closed:
                multicast._bindings.pop(self._lifetime, None)
            raise
        finally:
            del making[-1]

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """It is dropped with its object only, which unbinds when it has unmapped."""

    @property
    def multicast(self) -> MulticastObject:
        return self._multicast

    @property
    def device(self) -> Device:
        """Whose memory is bound."""
        return self._bound.device

    @property
    def offset(self) -> int:
        """In the multicast object, in bytes."""
        return self._bound.offset

    @property
    def size(self) -> int:
        """In bytes."""
        return self._bound.size

    @property
    def memory(self) -> Allocation | Buffer | None:
        """What is bound; None where it was given as a number."""
        return self._memory

    def close(self, timeout: float | None = None) -> None:
        """End use at once; as `Resource.close`."""
        super().close(timeout)
        self._multicast._bindings.pop(self._lifetime, None)


class MulticastMapping(Resource):
    """A multicast object's address, for kernels. Made by `MulticastObject.map`.

    Only ``multimem`` instructions may touch it, so no array library can have it, and it is no `Buffer`: each device's
    own allocation is one. Unmapped when it is closed and the work so far of the devices added here is done.
    """

    def __init__(self, multicast: MulticastObject, devices: Sequence[Device]) -> None:
        backend, group = multicast._backend, multicast._lifetime
        mapping = _Mapping("MulticastMapping", backend.unmap_allocation, parents=(group,))
        super().__init__(mapping, multicast)
        mapping.untracked = tuple(device._streams for device in multicast.devices)
        self._multicast = multicast
        self._devices = tuple(devices)
        natives = [device._native for device in devices]

        def map_it() -> Any:
            native, mapping.address = backend.map_allocation(group.handle, natives)  # no call in which to lose it
            return native

        drain()
        mapping.create(map_it)
        self._address = mapping.address

    @property
    def multicast(self) -> MulticastObject:
        return self._multicast

    @property
    def ptr(self) -> int:
        """The address of the first byte, the same on each of `devices`; for ``multimem`` instructions only."""
        self._check_open()
        return self._address

    @property
    def size(self) -> int:
        """In bytes."""
        return self._multicast.size

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those whose kernels may use it."""
        return self._devices

    # -- refused -----------------------------------------------------------------------------------------------
    # They are there to say so: without them an array library would say only that it does not know the type, and
    # some would look for a pointer by themselves.

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise UnsupportedError(
            Cell(Operation.MAP_BUFFER).gap(
                Scope.DEVICE,
                "only multimem instructions may touch a multicast address, so no array library can have it.",
                "CUDA driver API, Multicast Object Management",
                "pass .ptr to a kernel; each device's own allocation is an ordinary buffer (Allocation.buffer).",
            ),
            context=self.label,
        )

    __dlpack__ = __dlpack_device__ = __array__ = _refuse
    __array_interface__ = __array_struct__ = __cuda_array_interface__ = property(_refuse)


__all__ = ["MulticastBinding", "MulticastMapping", "MulticastObject", "create_multicast", "import_multicast"]
