"""Shareable allocations, through HIP's virtual memory management."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Final
from weakref import WeakValueDictionary

from gpuinterop.backend import Address, AllocationBackend
from gpuinterop.errors import ArgumentTypeError
from gpuinterop.handles import AllocationHandle, FabricHandle, Granularity, OpaqueWin32, OpaqueWin32Kmt, VmmFd
from gpuinterop.native_driver import exported

from .driver import Driver, Gpu, Made, Room
from .memory import knows

TYPES: Final[Mapping[type[AllocationHandle], int]] = {VmmFd: 1, OpaqueWin32: 2, OpaqueWin32Kmt: 4, FabricHandle: 8}
"""``hipMemAllocationHandleType`` by number."""
_BY_VALUE: Final = 70_100_000
"""HIP version from which the descriptor itself is passed, instead of a pointer to it (torch checks the same)."""
_FABRIC_BYTES: Final = 64
_ROOMS: Final[Mapping[type[AllocationHandle], Any]] = {
    VmmFd: ctypes.c_int, OpaqueWin32: ctypes.c_uint64, OpaqueWin32Kmt: ctypes.c_uint64,
    FabricHandle: ctypes.c_ubyte * _FABRIC_BYTES,
}  # fmt: skip
_LEAST: Final = 2 << 20
"""Minimum granularity: RDNA4 reports 4 KiB, but kernels fault in smaller mappings than this (rocm-systems #9360)."""
_PINNED, DEVICE, _READ_WRITE = 1, 1, 3  # hipMemAllocationTypePinned, hipMemLocationTypeDevice, ...ProtReadWrite


class _Properties(ctypes.Structure):
    """``hipMemAllocationProp``; the bindings' own struct lacks the field for the handle type."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handleType", ctypes.c_int),
        ("locationType", ctypes.c_int),
        ("locationId", ctypes.c_int),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
    )


class _Access(ctypes.Structure):
    """``hipMemAccessDesc``; several are passed as an array."""

    _fields_ = (("locationType", ctypes.c_int), ("locationId", ctypes.c_int), ("flags", ctypes.c_int))


class Allocation(Made):
    """Physical memory of one device, which has no address until it is mapped."""

    back = "hipMemRelease"

    def __init__(self, gpu: Gpu, size: int, kind: type[AllocationHandle], *, imported: bool = False) -> None:
        super().__init__(gpu)
        self.size = size
        self.kind = kind
        self.imported = imported


class Range(Made):
    """Reserved addresses, which are never released: see `Ranges`."""


class Reservation(Made):
    """An address range with an allocation in it."""

    back = "hipMemUnmap"
    blocks = True

    def __init__(self, allocation: Allocation, ranges: Ranges) -> None:
        super().__init__(allocation.device, allocation.size)
        self.allocation = allocation
        self._ranges = ranges
        self.range: Range | None = None

    def free(self) -> None:
        super().free()
        self._ranges.give_back(self)

    def take_back(self) -> None:
        # A failed map returns success, and unmapping a range that is not mapped ends the process (hip_vm.cpp).
        if self.handle and knows(self.device, self.handle):
            super().take_back()
        if not (self.handle and knows(self.device, self.handle)):
            self._ranges.give_back(self)


class Ranges:
    """Address ranges by size, which are reserved once and reused.

    AMD's runtime frees a range only with the last command that used it, after the range was released. If the system has
    handed out the same addresses meanwhile, the runtime confuses the new range with the old (rocm-systems #2980).
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Range]] = {}

    def take(self, place: Reservation, size: int) -> Address:
        """Return a range that is not mapped (``hipMemAddressReserve``)."""
        try:
            place.range = self._free[size].pop()
        except LookupError:
            fresh = Range(place.device)
            fresh.make("hipMemAddressReserve", size, 0, 0, 0)
            place.range = fresh
        return place.range.handle

    def give_back(self, place: Reservation) -> None:
        if (found := place.range) is not None:
            place.range = None
            self._free.setdefault(place.more[0], []).append(found)


class Allocations(Room, AllocationBackend):
    """Shareable allocations."""

    def __init__(self) -> None:
        super().__init__()
        self._ranges = Ranges()
        self.placed: WeakValueDictionary[Address, Reservation] = WeakValueDictionary()
        """Mapped allocations, by address."""

    def granularity(self, device: Gpu, handle_type: type[AllocationHandle]) -> Granularity:
        """``hipMemGetAllocationGranularity`` gives the minimum, and what is recommended."""
        flags = self._driver.api.hipMemAllocationGranularity_flags
        properties = _properties(device, handle_type)
        place = ctypes.addressof(properties)
        options = flags.hipMemAllocationGranularityMinimum, flags.hipMemAllocationGranularityRecommended
        # HIP answers for the current device and ignores the device in the properties.
        found = [int(device.call("hipMemGetAllocationGranularity", place, option)) for option in options]
        return Granularity(*(max(_LEAST, size) for size in found))

    def allocate(self, device: Gpu, size: int, handle_type: type[AllocationHandle]) -> Allocation:
        """``hipMemCreate``."""
        properties = _properties(device, handle_type)
        return Allocation(device, size, handle_type).create("hipMemCreate", size, ctypes.addressof(properties), 0)

    def export_allocation(self, allocation: Allocation) -> AllocationHandle:
        """``hipMemExportToShareableHandle``."""
        kind = allocation.kind
        room = _ROOMS[kind]()
        allocation.device.run(
            self._driver.direct, "hipMemExportToShareableHandle", ctypes.byref(room), allocation.handle, TYPES[kind], 0
        )
        return exported(kind, bytes(room) if kind is FabricHandle else room.value)

    def import_allocation(self, device: Gpu, handle: AllocationHandle, *, size: int) -> Allocation:
        """``hipMemImportFromShareableHandle``, which does not take over the descriptor."""
        shared, _keep = share_of(self._driver, handle)
        kind = type(handle)
        return Allocation(device, size, kind, imported=True).load(
            handle, "hipMemImportFromShareableHandle", shared, TYPES[kind]
        )

    def map_allocation(self, allocation: Allocation, devices: Sequence[Gpu]) -> tuple[Reservation, Address]:
        """``hipMemMap`` (at offset 0, as HIP requires), and ``hipMemSetAccess`` for every device."""
        size = allocation.size
        place = Reservation(allocation, self._ranges)

        def work() -> None:
            place.add("hipMemMap", self._ranges.take(place, size), size, 0, allocation.handle, 0)
            access = (_Access * len(devices))(*(_Access(DEVICE, gpu.ordinal, _READ_WRITE) for gpu in devices))
            self._driver.call("hipMemSetAccess", place.handle, size, ctypes.addressof(access), len(devices))

        allocation.device.create(place, work)
        self.placed[place.handle] = place
        return place, place.handle

    def can_access(self, ordinal: int, peer: int) -> bool:
        """``hipDeviceCanAccessPeer``."""
        return bool(self._driver.call("hipDeviceCanAccessPeer", ordinal, peer))

    def location(self, allocation: Allocation) -> int | None:
        """``hipMemGetAllocationPropertiesFromHandle``; None if its answer cannot be used.

        That is a device outside this process, or, for imported memory, the importing device: runtimes that do not know
        the owner report that too (ROCm/rocm-systems #4784, #11606), and their version does not tell which do.
        """
        call = "hipMemGetAllocationPropertiesFromHandle"
        driver = self._driver
        if not driver.has(call):
            return None
        where = _Properties()
        if driver.is_new:
            made = allocation.device.call(call, allocation.handle)
            where = _Properties.from_buffer_copy(ctypes.string_at(int(made), ctypes.sizeof(_Properties)))
        else:
            allocation.device.call(call, ctypes.addressof(where), allocation.handle)
        if where.locationType != DEVICE or not 0 <= where.locationId < driver.call("hipGetDeviceCount"):
            return None
        if allocation.imported and where.locationId == allocation.device.ordinal:
            return None
        return int(where.locationId)


def _properties(gpu: Gpu, kind: type[AllocationHandle]) -> _Properties:
    if kind not in TYPES:
        raise ArgumentTypeError("handle_type", f"expected a type that HIP shares allocations as, got {kind.__name__}.")
    return _Properties(type=_PINNED, handleType=TYPES[kind], locationType=DEVICE, locationId=gpu.ordinal)


def share_of(driver: Driver, handle: AllocationHandle) -> tuple[int, object]:
    """HIP's form of the handle, and the object to keep alive until the call."""
    if isinstance(handle, VmmFd):
        if driver.version >= _BY_VALUE:
            return handle.fd, None
        place = ctypes.c_int(handle.fd)
        return ctypes.addressof(place), place
    if isinstance(handle, FabricHandle):
        room = ctypes.create_string_buffer(handle.data, _FABRIC_BYTES)
        return ctypes.addressof(room), room
    if isinstance(handle, OpaqueWin32 | OpaqueWin32Kmt):
        assert handle.handle is not None  # the table refuses names
        return handle.handle, None
    raise ArgumentTypeError("handle", f"expected a handle of an allocation of HIP's, got {type(handle).__name__}.")
