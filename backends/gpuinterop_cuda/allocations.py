"""Shareable allocations, over the driver's virtual memory management."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpuinterop.backend import Address
from gpuinterop.errors import ArgumentTypeError
from gpuinterop.handles import AllocationHandle, FabricHandle, OpaqueWin32, OpaqueWin32Kmt, VmmFd

from .driver import Context, Driver

# CUmemAllocationHandleType by number.
_TYPES: Final[Mapping[type[AllocationHandle], int]] = {VmmFd: 1, OpaqueWin32: 2, OpaqueWin32Kmt: 4, FabricHandle: 8}


@dataclass(frozen=True, slots=True)
class Allocation:
    """Physical memory of one device, which has no address until it is mapped."""

    context: Context
    handle: Any
    size: int
    kind: type[AllocationHandle]


@dataclass(frozen=True, slots=True)
class Reservation:
    """An address range with an allocation in it."""

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


def granularity(driver: Driver, context: Context, kind: type[AllocationHandle]) -> int:
    """``cuMemGetAllocationGranularity``, the minimum, in bytes."""
    option = driver.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(driver.call("cuMemGetAllocationGranularity", _properties(driver, context, kind), option))


def allocate(driver: Driver, context: Context, size: int, kind: type[AllocationHandle]) -> Allocation:
    """``cuMemCreate``."""
    with context.aside():
        handle = driver.call("cuMemCreate", size, _properties(driver, context, kind), 0)
    return Allocation(context, handle, size, kind)


def export(driver: Driver, allocation: Allocation) -> AllocationHandle:
    """``cuMemExportToShareableHandle``."""
    number = driver.api.CUmemAllocationHandleType(_TYPES[allocation.kind])
    with allocation.context.aside():
        found = driver.call("cuMemExportToShareableHandle", allocation.handle, number, 0)
    if allocation.kind is VmmFd:
        os.set_inheritable(int(found), False)
        return VmmFd.adopt(int(found))
    if allocation.kind is FabricHandle:
        return FabricHandle(bytes(found.data))
    if allocation.kind is OpaqueWin32:
        return OpaqueWin32(handle=int(found))
    return OpaqueWin32Kmt(handle=int(found))


def load(driver: Driver, context: Context, handle: AllocationHandle, size: int) -> Allocation:
    """``cuMemImportFromShareableHandle``. The driver does not take the descriptor, so it is closed here."""
    api = driver.api
    number = api.CUmemAllocationHandleType(_TYPES[type(handle)])
    shared, keep = _shared(driver, handle)
    with context.aside():
        native = driver.call("cuMemImportFromShareableHandle", shared, number)
    del keep
    if isinstance(handle, VmmFd):
        os.close(handle.fd)
    return Allocation(context, native, size, type(handle))


def map_allocation(driver: Driver, allocation: Allocation, devices: Sequence[Context]) -> tuple[Reservation, Address]:
    """``cuMemAddressReserve``, ``cuMemMap``, ``cuMemSetAccess`` for every device."""
    api, size, context = driver.api, allocation.size, allocation.context
    with context.aside():
        pointer = driver.call("cuMemAddressReserve", size, 0, 0, 0)
        try:
            driver.call("cuMemMap", pointer, size, 0, allocation.handle, 0)
            try:
                access = [_access(driver, device) for device in devices]
                driver.call("cuMemSetAccess", pointer, size, access, len(access))
            except BaseException:
                api.cuMemUnmap(pointer, size)
                raise
        except BaseException:
            api.cuMemAddressFree(pointer, size)
            raise
    return Reservation(context, pointer, size), int(pointer)


def unmap(driver: Driver, mapping: Reservation) -> None:
    """``cuMemUnmap``, ``cuMemAddressFree``."""
    with mapping.context.aside():
        driver.call("cuMemUnmap", mapping.pointer, mapping.size)
        driver.call("cuMemAddressFree", mapping.pointer, mapping.size)


def release(driver: Driver, allocation: Allocation) -> None:
    """``cuMemRelease``."""
    with allocation.context.aside():
        driver.call("cuMemRelease", allocation.handle)


def _properties(driver: Driver, context: Context, kind: type[AllocationHandle]) -> Any:
    api = driver.api
    if kind not in _TYPES:
        raise ArgumentTypeError("handle_type", f"CUDA has no allocations for {kind.__name__}.")
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = context.ordinal
    properties.requestedHandleTypes = api.CUmemAllocationHandleType(_TYPES[kind])
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
