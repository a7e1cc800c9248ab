"""Shareable allocations, through the driver's virtual memory management.

The driver maps, exports, imports and releases generic handles, each of which is memory or a multicast object.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

from gpuinterop.backend import Address, AllocationBackend
from gpuinterop.errors import ArgumentTypeError
from gpuinterop.handles import AllocationHandle, FabricHandle, Granularity, OpaqueWin32, OpaqueWin32Kmt, VmmFd
from gpuinterop.native_driver import exported

from .driver import Context, Driver, Made, Room

TYPES: Final[Mapping[type[AllocationHandle], int]] = {VmmFd: 1, OpaqueWin32: 2, OpaqueWin32Kmt: 4, FabricHandle: 8}
"""The number of each ``CUmemAllocationHandleType``."""
_MINIMUM, _RECOMMENDED = 0, 1  # CUmemAllocationGranularity_flags, and CUmulticastGranularity_flags


class Mappable(Made):
    """An object with a ``CUmemGenericAllocationHandle``; it has no address until it is mapped."""

    back = "cuMemRelease"

    def __init__(self, context: Context, size: int, alignment: int = 0) -> None:
        super().__init__(context)
        self.size = size
        self.alignment = alignment
        """The address's alignment; 0 leaves that to the driver."""

    def take(self, handle: AllocationHandle) -> Self:
        """``cuMemImportFromShareableHandle``, which does not take over the descriptor."""
        driver = self.device.driver
        kind = native_handle_type(driver, type(handle))
        shared, _keep = _shared(driver, handle)
        return self.load(handle, "cuMemImportFromShareableHandle", shared, kind)

    def export(self, kind: type[AllocationHandle]) -> AllocationHandle:
        """``cuMemExportToShareableHandle``."""
        wanted = native_handle_type(self.device.driver, kind)
        found = self.device.call("cuMemExportToShareableHandle", self.handle, wanted, 0)
        return exported(kind, bytes(found.data) if kind is FabricHandle else int(found))


class Allocation(Mappable):
    """Physical memory of one device."""

    def __init__(self, context: Context, size: int, kind: type[AllocationHandle]) -> None:
        super().__init__(context, size)
        self.kind = kind


class Mapped(Made):
    """A mapping of one generic handle."""

    back = "cuMemUnmap"


class Reservation(Made):
    """An address range with something mapped in it."""

    back = "cuMemAddressFree"
    address: Address

    def __init__(self, context: Context, size: int) -> None:
        super().__init__(context, size)
        self.mapped = Mapped(context, size)

    def free(self) -> None:
        self.mapped.free()
        super().free()


class _ObjectAttributes(ctypes.Structure):
    """Windows' ``OBJECT_ATTRIBUTES``, with which the driver makes an NT handle."""

    _fields_ = (
        ("length", ctypes.c_ulong),
        ("root", ctypes.c_void_p),
        ("name", ctypes.c_void_p),
        ("attributes", ctypes.c_ulong),
        ("security", ctypes.c_void_p),
        ("quality", ctypes.c_void_p),
    )


_OBJECT_ATTRIBUTES: Final = _ObjectAttributes(ctypes.sizeof(_ObjectAttributes), None, None, 0, None, None)


class Allocations(Room, AllocationBackend):
    """Shareable allocations. Multicast objects are mapped and released by the same calls."""

    def granularity(self, device: Context, handle_type: type[AllocationHandle]) -> Granularity:
        """``cuMemGetAllocationGranularity`` gives the minimum, and what is recommended."""
        flags = self._driver.api.CUmemAllocationGranularity_flags
        return granularity_of(self._driver, "cuMemGetAllocationGranularity", _properties(device, handle_type), flags)

    def allocate(self, device: Context, size: int, handle_type: type[AllocationHandle]) -> Allocation:
        """``cuMemCreate``."""
        allocation = Allocation(device, size, handle_type)
        return allocation.create("cuMemCreate", size, _properties(device, handle_type), 0)

    def export_allocation(self, allocation: Allocation) -> AllocationHandle:
        """``cuMemExportToShareableHandle``."""
        return allocation.export(allocation.kind)

    def import_allocation(self, device: Context, handle: AllocationHandle, *, size: int) -> Allocation:
        """``cuMemImportFromShareableHandle``."""
        return Allocation(device, size, type(handle)).take(handle)

    def map_allocation(self, allocation: Mappable, devices: Sequence[Context]) -> tuple[Reservation, Address]:
        """``cuMemAddressReserve``, ``cuMemMap``, and ``cuMemSetAccess`` for every device."""
        size, driver = allocation.size, self._driver
        place = Reservation(allocation.device, size)

        def work() -> None:
            place.make("cuMemAddressReserve", size, allocation.alignment, 0, 0)
            place.address = int(place.handle)
            place.mapped.add("cuMemMap", place.handle, size, 0, allocation.handle, 0)
            access = [access_of(device) for device in devices]
            driver.call("cuMemSetAccess", place.handle, size, access, len(access))

        return allocation.device.create(place, work), place.address

    def can_access(self, ordinal: int, peer: int) -> bool:
        """``cuDeviceCanAccessPeer``."""
        device, other = (self._driver.call("cuDeviceGet", one) for one in (ordinal, peer))
        return bool(self._driver.call("cuDeviceCanAccessPeer", device, other))

    def location(self, allocation: Allocation) -> int | None:
        """``cuMemGetAllocationPropertiesFromHandle``; None if this process does not see the memory's device."""
        found = allocation.device.call("cuMemGetAllocationPropertiesFromHandle", allocation.handle)
        where = found.location  # a view, which does not keep `found` alive (12.9)
        on_device = int(where.type) == int(self._driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
        return int(where.id) if on_device and where.id >= 0 else None  # -2 (measured): mapping works all the same


def granularity_of(driver: Driver, call: str, properties: Any, flags: Callable[[int], Any]) -> Granularity:
    minimum, recommended = (int(driver.call(call, properties, flags(number))) for number in (_MINIMUM, _RECOMMENDED))
    return Granularity(minimum, recommended)


def native_handle_type(driver: Driver, kind: type[AllocationHandle]) -> Any:
    """The ``CUmemAllocationHandleType``."""
    if kind not in TYPES:
        raise ArgumentTypeError("handle_type", f"expected a type that CUDA shares allocations as, got {kind.__name__}.")
    return driver.api.CUmemAllocationHandleType(TYPES[kind])


def _properties(device: Context, kind: type[AllocationHandle]) -> Any:
    api = device.driver.api
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.ordinal
    properties.requestedHandleTypes = native_handle_type(device.driver, kind)
    if kind is OpaqueWin32 and sys.platform == "win32":
        properties.win32HandleMetaData = ctypes.addressof(_OBJECT_ATTRIBUTES)
    return properties


def access_of(device: Context) -> Any:
    api = device.driver.api
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.ordinal
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _shared(driver: Driver, handle: AllocationHandle) -> tuple[Any, object]:
    """The driver's form of the handle, and the object to keep alive until the call."""
    if isinstance(handle, VmmFd):
        return handle.fd, None
    if isinstance(handle, FabricHandle):
        fabric = driver.api.CUmemFabricHandle()
        fabric.data = handle.data
        return fabric.getPtr(), fabric
    if isinstance(handle, OpaqueWin32 | OpaqueWin32Kmt):
        return handle.handle, None
    raise ArgumentTypeError("handle", f"expected a handle of an allocation of CUDA's, got {type(handle).__name__}.")
