"""Shareable allocations, over the driver's virtual memory management.

What it maps, exports, imports and releases is a generic handle, of memory or of a multicast object.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpuinterop.backend import Address
from gpuinterop.errors import ArgumentTypeError, DriverError
from gpuinterop.handles import AllocationHandle, FabricHandle, Granularity, OpaqueWin32, OpaqueWin32Kmt, VmmFd

from .driver import Context, Driver

TYPES: Final[Mapping[type[AllocationHandle], int]] = {VmmFd: 1, OpaqueWin32: 2, OpaqueWin32Kmt: 4, FabricHandle: 8}
"""``CUmemAllocationHandleType`` by number."""


@dataclass(frozen=True, slots=True)
class Mappable:
    """What has a ``CUmemGenericAllocationHandle``; it has no address until it is mapped."""

    context: Context
    handle: Any
    size: int
    alignment: int
    """Of its address; 0 leaves that to the driver."""


@dataclass(frozen=True, slots=True)
class Allocation(Mappable):
    """Physical memory of one device."""

    kind: type[AllocationHandle]


@dataclass(frozen=True, slots=True)
class Reservation:
    """An address range with something mapped in it."""

    context: Context
    pointer: Any
    size: int


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
    with context.aside():
        handle = driver.call("cuMemCreate", size, _properties(driver, context, kind), 0)
    return Allocation(context, handle, size, 0, kind)


def export(driver: Driver, mappable: Mappable, kind: type[AllocationHandle]) -> AllocationHandle:
    """``cuMemExportToShareableHandle``."""
    with mappable.context.aside():
        found = driver.call("cuMemExportToShareableHandle", mappable.handle, handle_type(driver, kind), 0)
    if kind is VmmFd:
        os.set_inheritable(int(found), False)
        return VmmFd.adopt(int(found))
    if kind is FabricHandle:
        return FabricHandle(bytes(found.data))
    return OpaqueWin32(handle=int(found)) if kind is OpaqueWin32 else OpaqueWin32Kmt(handle=int(found))


def load(driver: Driver, context: Context, handle: AllocationHandle, size: int) -> Allocation:
    """``cuMemImportFromShareableHandle``."""
    return Allocation(context, load_handle(driver, context, handle), size, 0, type(handle))


def load_handle(driver: Driver, context: Context, handle: AllocationHandle) -> Any:
    """``cuMemImportFromShareableHandle``. The driver does not take the descriptor, so it is closed here."""
    kind = handle_type(driver, type(handle))
    shared, keep = _shared(driver, handle)
    with context.aside():
        native = driver.call("cuMemImportFromShareableHandle", shared, kind)
    del keep
    if isinstance(handle, VmmFd):
        os.close(handle.fd)
    return native


def location(driver: Driver, allocation: Allocation) -> int | None:
    """``cuMemGetAllocationPropertiesFromHandle``; None where the memory's device is not visible to this process."""
    with allocation.context.aside():
        found = driver.call("cuMemGetAllocationPropertiesFromHandle", allocation.handle)
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
    with context.aside():
        pointer = driver.call("cuMemAddressReserve", size, mappable.alignment, 0, 0)
        try:
            driver.call("cuMemMap", pointer, size, 0, mappable.handle, 0)
            access = [_access(driver, device) for device in devices]
            driver.call("cuMemSetAccess", pointer, size, access, len(access))
        except BaseException as error:
            refused = isinstance(error, DriverError) and error.call == "cuMemMap"
            if not refused:  # also where Ctrl-C has struck behind the map
                driver.undo("cuMemUnmap", pointer, size)
            driver.undo("cuMemAddressFree", pointer, size)
            raise
    return Reservation(context, pointer, size), int(pointer)


def unmap(driver: Driver, mapping: Reservation) -> None:
    """``cuMemUnmap``, ``cuMemAddressFree``."""
    with mapping.context.aside():
        driver.call("cuMemUnmap", mapping.pointer, mapping.size)
        driver.call("cuMemAddressFree", mapping.pointer, mapping.size)


def release(driver: Driver, mappable: Mappable) -> None:
    """``cuMemRelease``."""
    with mappable.context.aside():
        driver.call("cuMemRelease", mappable.handle)


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
