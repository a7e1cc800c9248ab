"""Shareable allocations, over HIP's virtual memory management."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpuinterop.backend import Address
from gpuinterop.errors import ArgumentTypeError
from gpuinterop.handles import AllocationHandle, FabricHandle, Granularity, OpaqueWin32, OpaqueWin32Kmt, VmmFd

from .driver import Driver, Gpu
from .memory import knows

TYPES: Final[Mapping[type[AllocationHandle], int]] = {VmmFd: 1, OpaqueWin32: 2, OpaqueWin32Kmt: 4, FabricHandle: 8}
"""``hipMemAllocationHandleType`` by number."""
_BY_VALUE: Final = 70_100_000
"""From 7.1 on the descriptor itself is passed, before a pointer to it (so does torch tell them apart)."""
_FABRIC_BYTES: Final = 64
_LEAST: Final = 2 << 20
"""RDNA4 says 4 KiB, and its kernels fault in what is mapped in smaller steps than this (rocm-systems #9360)."""
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # hipMemAllocationTypePinned, hipMemLocationTypeDevice, ...ProtReadWrite


class _Properties(ctypes.Structure):
    """``hipMemAllocationProp``, whose handle type the bindings' own struct has no field for."""

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


@dataclass(frozen=True, slots=True)
class Allocation:
    """Physical memory of one device, which has no address until it is mapped."""

    gpu: Gpu
    handle: int
    size: int
    kind: type[AllocationHandle]
    imported: bool = False


@dataclass(frozen=True, slots=True)
class Reservation:
    """An address range with an allocation in it."""

    gpu: Gpu
    pointer: Address
    size: int


def granularity(driver: Driver, gpu: Gpu, kind: type[AllocationHandle]) -> Granularity:
    """``hipMemGetAllocationGranularity``, for the minimum and what is recommended."""
    flags = driver.api.hipMemAllocationGranularity_flags
    properties = _properties(gpu, kind)
    place = ctypes.addressof(properties)
    options = flags.hipMemAllocationGranularityMinimum, flags.hipMemAllocationGranularityRecommended
    with gpu.aside():  # HIP answers for the current device, whatever the properties say
        found = [int(driver.call("hipMemGetAllocationGranularity", place, option)) for option in options]
    return Granularity(*(max(_LEAST, size) for size in found))


def allocate(driver: Driver, gpu: Gpu, size: int, kind: type[AllocationHandle]) -> Allocation:
    """``hipMemCreate``."""
    properties = _properties(gpu, kind)
    with gpu.aside():
        handle = int(driver.call("hipMemCreate", size, ctypes.addressof(properties), 0))
    return Allocation(gpu, handle, size, kind)


def export(driver: Driver, allocation: Allocation) -> AllocationHandle:
    """``hipMemExportToShareableHandle``."""
    kind = allocation.kind
    number = driver.api.hipMemAllocationHandleType(TYPES[kind])
    room: Any = (ctypes.c_ubyte * _FABRIC_BYTES)() if kind is FabricHandle else ctypes.c_uint64()
    with allocation.gpu.aside():
        driver.call("hipMemExportToShareableHandle", ctypes.addressof(room), allocation.handle, number, 0)
    if kind is VmmFd:
        fd = ctypes.c_int.from_buffer(room).value
        os.set_inheritable(fd, False)
        return VmmFd.adopt(fd)
    if kind is FabricHandle:
        return FabricHandle(bytes(room))
    return OpaqueWin32(handle=room.value) if kind is OpaqueWin32 else OpaqueWin32Kmt(handle=room.value)


def load(driver: Driver, gpu: Gpu, handle: AllocationHandle, size: int) -> Allocation:
    """``hipMemImportFromShareableHandle``. HIP does not take the descriptor, so it is closed here."""
    number = driver.api.hipMemAllocationHandleType(TYPES[type(handle)])
    shared, keep = _shared(driver, handle)
    with gpu.aside():
        native = int(driver.call("hipMemImportFromShareableHandle", shared, number))
    del keep
    if isinstance(handle, VmmFd):
        os.close(handle.fd)
    return Allocation(gpu, native, size, type(handle), imported=True)


def location(driver: Driver, allocation: Allocation) -> int | None:
    """``hipMemGetAllocationPropertiesFromHandle``; None where that does not tell.

    It names no device of this process, or, of imported memory, the one that has imported it: so do runtimes that do not
    know whose it is (ROCm/rocm-systems #4784, #11606), and no version says which they are.
    """
    call = "hipMemGetAllocationPropertiesFromHandle"
    if not driver.has(call):
        return None
    where = _Properties()
    with allocation.gpu.aside():
        if driver.is_new:
            made = driver.call(call, allocation.handle)
            where = _Properties.from_buffer_copy(ctypes.string_at(int(made), ctypes.sizeof(_Properties)))
        else:
            driver.call(call, ctypes.addressof(where), allocation.handle)
    if where.locationType != _DEVICE or not 0 <= where.locationId < driver.call("hipGetDeviceCount"):
        return None
    if allocation.imported and where.locationId == allocation.gpu.ordinal:
        return None
    return int(where.locationId)


def can_access(driver: Driver, ordinal: int, peer: int) -> bool:
    """``hipDeviceCanAccessPeer``."""
    return bool(driver.call("hipDeviceCanAccessPeer", ordinal, peer))


class Ranges:
    """Address ranges, which are reserved once and used again: by size.

    AMD's runtime frees a range with the last command that used it, after it was given back. Where the system has
    given the same addresses out again meanwhile, the new range is taken for the old (rocm-systems #2980).
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: dict[int, list[Address]] = {}

    def take(self, size: int) -> Address:
        """One that is mapped nowhere (``hipMemAddressReserve``)."""
        try:
            return self._free[size].pop()
        except LookupError:
            return int(self._driver.call("hipMemAddressReserve", size, 0, 0, 0))

    def give_back(self, pointer: Address, size: int) -> None:
        self._free.setdefault(size, []).append(pointer)


def map_allocation(
    driver: Driver, ranges: Ranges, allocation: Allocation, gpus: Sequence[Gpu]
) -> tuple[Reservation, Address]:
    """``hipMemMap`` (of offset 0, as HIP wants it), ``hipMemSetAccess`` for every device."""
    size = allocation.size
    with allocation.gpu.aside():
        pointer = ranges.take(size)
        try:
            driver.call("hipMemMap", pointer, size, 0, allocation.handle, 0)
            access = (_Access * len(gpus))(*(_Access(_DEVICE, gpu.ordinal, _READ_WRITE) for gpu in gpus))
            driver.call("hipMemSetAccess", pointer, size, ctypes.addressof(access), len(gpus))
        except BaseException:
            # A map that has failed says success, and to unmap what is not mapped ends the process (hip_vm.cpp).
            if knows(driver, allocation.gpu, pointer):
                driver.undo("hipMemUnmap", pointer, size)
            if not knows(driver, allocation.gpu, pointer):
                ranges.give_back(pointer, size)
            raise
    return Reservation(allocation.gpu, pointer, size), pointer


def unmap(driver: Driver, ranges: Ranges, mapping: Reservation) -> None:
    """``hipMemUnmap``."""
    with mapping.gpu.aside():
        driver.call("hipMemUnmap", mapping.pointer, mapping.size)
    ranges.give_back(mapping.pointer, mapping.size)


def release(driver: Driver, allocation: Allocation) -> None:
    """``hipMemRelease``."""
    with allocation.gpu.aside():
        driver.call("hipMemRelease", allocation.handle)


def _properties(gpu: Gpu, kind: type[AllocationHandle]) -> _Properties:
    if kind not in TYPES:
        raise ArgumentTypeError("handle_type", f"HIP has no allocations for {kind.__name__}.")
    return _Properties(type=_PINNED, handleType=TYPES[kind], locationType=_DEVICE, locationId=gpu.ordinal)


def _shared(driver: Driver, handle: AllocationHandle) -> tuple[int, object]:
    """What HIP takes, and what must stay alive until the call."""
    if isinstance(handle, VmmFd):
        if driver.version >= _BY_VALUE:
            return handle.fd, None
        place = ctypes.c_int(handle.fd)
        return ctypes.addressof(place), place
    if isinstance(handle, FabricHandle):
        room = ctypes.create_string_buffer(handle.data, _FABRIC_BYTES)
        return ctypes.addressof(room), room
    if isinstance(handle, OpaqueWin32 | OpaqueWin32Kmt):
        assert handle.handle is not None  # a name is refused by the table
        return handle.handle, None
    raise ArgumentTypeError("handle", f"HIP has no allocations for {type(handle).__name__}.")
