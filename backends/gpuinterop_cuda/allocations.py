"""Shareable allocations, over the driver's virtual memory management.

What it maps, exports, imports and releases is a generic handle, of memory or of a multicast object.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from gpuinterop.backend import Address
from gpuinterop.errors import ArgumentTypeError
from gpuinterop.handles import AllocationHandle, FabricHandle, Granularity, OpaqueWin32, OpaqueWin32Kmt, VmmFd

from .driver import Context, Driver, Made

TYPES: Final[Mapping[type[AllocationHandle], int]] = {VmmFd: 1, OpaqueWin32: 2, OpaqueWin32Kmt: 4, FabricHandle: 8}
"""``CUmemAllocationHandleType`` by number."""


class Mappable(Made):
    """What has a ``CUmemGenericAllocationHandle``; it has no address until it is mapped."""

    __slots__ = ("alignment", "size")
    back = "cuMemRelease"

    def __init__(self, context: Context, size: int, alignment: int = 0) -> None:
        super().__init__(context)
        self.size = size
        self.alignment = alignment
        """Of its address; 0 leaves that to the driver."""

    def load(self, handle: AllocationHandle) -> Self:
        """``cuMemImportFromShareableHandle``. The driver does not take the descriptor, so it is closed here."""
        driver = self.context.driver
        kind = handle_type(driver, type(handle))
        shared, _keep = _shared(driver, handle)

        def work() -> None:
            self.make("cuMemImportFromShareableHandle", shared, kind)
            if isinstance(handle, VmmFd):
                os.close(handle.fd)

        return self.context.create(self, work)


class Allocation(Mappable):
    """Physical memory of one device."""

    __slots__ = ("kind",)

    def __init__(self, context: Context, size: int, kind: type[AllocationHandle]) -> None:
        super().__init__(context, size)
        self.kind = kind


class _Mapped(Made):
    __slots__ = ()
    back = "cuMemUnmap"


class Reservation(Made):
    """An address range with something mapped in it."""

    __slots__ = ("address", "mapped")
    back = "cuMemAddressFree"
    address: Address

    def __init__(self, context: Context, size: int) -> None:
        super().__init__(context, size)
        self.mapped = _Mapped(context, size)

    def free(self) -> None:
        self.mapped.free()
        super().free()


class _Exported(Made):
    __slots__ = ("is_fd", "result")
    is_fd: bool
    result: AllocationHandle

    def free(self) -> None:
        """A descriptor is closed, by the handle that owns it if there is one; nothing else holds anything."""
        if hasattr(self, "result"):
            self.result.close()
        elif self.is_fd and self.made is not None:
            os.close(int(self.made))


class _ObjectAttributes(ctypes.Structure):
    """Windows' ``OBJECT_ATTRIBUTES``, which the driver makes an NT handle with."""

    _fields_ = (
        ("length", ctypes.c_ulong),
        ("root", ctypes.c_void_p),
        ("name", ctypes.c_void_p),
        ("attributes", ctypes.c_ulong),
        ("security", ctypes.c_void_p),
        ("quality", ctypes.c_void_p),
    )


_OBJECT_ATTRIBUTES: Final = _ObjectAttributes(ctypes.sizeof(_ObjectAttributes), None, None, 0, None, None)


def granularity(driver: Driver, context: Context, kind: type[AllocationHandle]) -> Granularity:
    """``cuMemGetAllocationGranularity``, for the minimum and what is recommended."""
    flags = driver.api.CUmemAllocationGranularity_flags
    properties = _properties(driver, context, kind)
    return Granularity(
        int(driver.call("cuMemGetAllocationGranularity", properties, flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM)),
        int(driver.call("cuMemGetAllocationGranularity", properties, flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)),
    )


def allocate(driver: Driver, context: Context, size: int, kind: type[AllocationHandle]) -> Allocation:
    """``cuMemCreate``."""
    return Allocation(context, size, kind).create("cuMemCreate", size, _properties(driver, context, kind), 0)


def export(driver: Driver, mappable: Mappable, kind: type[AllocationHandle]) -> AllocationHandle:
    """``cuMemExportToShareableHandle``."""
    exported = _Exported(mappable.context)
    exported.is_fd = kind is VmmFd

    def work() -> None:
        exported.make("cuMemExportToShareableHandle", mappable.handle, handle_type(driver, kind), 0)
        found = exported.handle
        if kind is VmmFd:
            os.set_inheritable(int(found), False)
            exported.result = VmmFd.adopt(int(found))
        elif kind is FabricHandle:
            exported.result = FabricHandle(bytes(found.data))
        else:
            exported.result = (OpaqueWin32 if kind is OpaqueWin32 else OpaqueWin32Kmt)(handle=int(found))

    return mappable.context.create(exported, work).result


def location(driver: Driver, allocation: Allocation) -> int | None:
    """``cuMemGetAllocationPropertiesFromHandle``; None where the memory's device is not visible to this process."""
    found = allocation.context.call("cuMemGetAllocationPropertiesFromHandle", allocation.handle)
    where = found.location  # a view, which does not keep `found` alive (12.9)
    on_device = int(where.type) == int(driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
    return int(where.id) if on_device and where.id >= 0 else None  # -2 (measured): mapping works all the same


def can_access(driver: Driver, ordinal: int, peer: int) -> bool:
    """``cuDeviceCanAccessPeer``."""
    device, other = driver.call("cuDeviceGet", ordinal), driver.call("cuDeviceGet", peer)
    return bool(driver.call("cuDeviceCanAccessPeer", device, other))


def map_allocation(driver: Driver, mappable: Mappable, devices: Sequence[Context]) -> tuple[Reservation, Address]:
    """``cuMemAddressReserve``, ``cuMemMap``, ``cuMemSetAccess`` for every device."""
    size, context = mappable.size, mappable.context
    place = Reservation(context, size)

    def work() -> None:
        place.make("cuMemAddressReserve", size, mappable.alignment, 0, 0)
        place.address = int(place.handle)
        place.mapped.add("cuMemMap", place.handle, size, 0, mappable.handle, 0)
        access = [_access(driver, device) for device in devices]
        driver.call("cuMemSetAccess", place.handle, size, access, len(access))

    return context.create(place, work), place.address


def handle_type(driver: Driver, kind: type[AllocationHandle]) -> Any:
    """The ``CUmemAllocationHandleType``."""
    if kind not in TYPES:
        raise ArgumentTypeError("handle_type", f"CUDA has no allocations for {kind.__name__}.")
    return driver.api.CUmemAllocationHandleType(TYPES[kind])


def _properties(driver: Driver, context: Context, kind: type[AllocationHandle]) -> Any:
    api = driver.api
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = context.ordinal
    properties.requestedHandleTypes = handle_type(driver, kind)
    if kind is OpaqueWin32 and sys.platform == "win32":
        properties.win32HandleMetaData = ctypes.addressof(_OBJECT_ATTRIBUTES)
    return properties


def _access(driver: Driver, device: Context) -> Any:
    api = driver.api
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.ordinal
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _shared(driver: Driver, handle: AllocationHandle) -> tuple[Any, object]:
    """What the driver takes, and what must stay alive until the call."""
    if isinstance(handle, VmmFd):
        return handle.fd, None
    if isinstance(handle, FabricHandle):
        fabric = driver.api.CUmemFabricHandle()
        fabric.data = handle.data
        return fabric.getPtr(), fabric
    if isinstance(handle, OpaqueWin32 | OpaqueWin32Kmt):
        return handle.handle, None
    raise ArgumentTypeError("handle", f"CUDA has no allocations for {type(handle).__name__}.")
