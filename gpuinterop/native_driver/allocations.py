"""Shareable allocations (the driver's virtual memory management), and memory that other libraries have allocated.

A generic handle refers to memory or to a multicast object. The driver maps, exports, imports and releases it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64
from struct import Struct
from typing import Any, ClassVar, Final, Self, cast

from ..backend import Address, AllocationBackend, Block, SharingBackend
from ..errors import ArgumentTypeError
from ..handles import (
    AllocationHandle,
    FabricHandle,
    Granularity,
    Handle,
    IpcMemHandle,
    OpaqueWin32,
    OpaqueWin32Kmt as Kmt,
    VmmFd,
)
from .driver import NativeBackend, NativeDevice, NativeDriver, NativeObject

TYPES: Final[Mapping[type[Handle], int]] = {VmmFd: 1, OpaqueWin32: 2, Kmt: 4, FabricHandle: 8}
"""The number of each ``CUmemAllocationHandleType`` and ``hipMemAllocationHandleType``."""
_EXPORTED: Final[Mapping[type[Handle], Any]] = {VmmFd: c_int, FabricHandle: c_ubyte * 64}
"""The type that the driver writes in an export; for other kinds a Windows handle."""
_MINIMUM, _RECOMMENDED = 0, 1  # CUmemAllocationGranularity_flags, and CUmulticastGranularity_flags
_PINNED, ON_DEVICE, _READ_WRITE = 1, 1, 3
_LAZY_PEERS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, hipIpcMemLazyEnablePeerAccess

# Type, handle type, type and number of the location, Windows metadata: CUmemAllocationProp, hipMemAllocationProp.
_PROPERTIES: Final = Struct("=iiiiQ8x")
_ACCESS: Final = Struct("=iii")  # type and number of the location, flags: CUmemAccessDesc, hipMemAccessDesc


class _IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``, ``hipIpcMemHandle_t``; passed by value."""

    _fields_ = (("reserved", c_ubyte * IpcMemHandle.SIZE),)


class GenericObject(NativeObject):
    """An object with a generic handle. It has no address until it is mapped."""

    release_call = "MemRelease"

    def __init__(self, device: NativeDevice, size: int, alignment: int = 0) -> None:
        super().__init__(device)
        self.size = size
        self.alignment = alignment  # of the address; 0 lets the driver choose

    def load(self, handle: AllocationHandle) -> Self:
        """``cuMemImportFromShareableHandle``, ``hipMemImportFromShareableHandle``. They leave the descriptor open."""
        return self.create("MemImportFromShareableHandle", *_shared(self.device.driver, handle), closes=handle)

    def export(self, kind: type[AllocationHandle]) -> AllocationHandle:
        """``cuMemExportToShareableHandle``, ``hipMemExportToShareableHandle``."""
        shared, number = _EXPORTED.get(kind, c_uint64)(), native_handle_type(self.device.driver, kind)
        self.device.call("MemExportToShareableHandle", byref(shared), self.handle, number, 0)
        if kind is VmmFd:
            return VmmFd.adopt(shared.value)
        if kind is FabricHandle:
            return FabricHandle(bytes(shared))
        return (OpaqueWin32 if kind is OpaqueWin32 else Kmt)(handle=shared.value)


class Allocation(GenericObject):
    """Physical memory of one device."""

    def __init__(self, device: NativeDevice, size: int, kind: type[Any], *, imported: bool = False) -> None:
        super().__init__(device, size)
        self.kind = kind
        self.imported = imported


class _Mapping(NativeObject):
    """A mapping of one generic handle."""

    release_call = "MemUnmap"


class Reservation(NativeObject):
    """An address range with consecutive mappings."""

    release_call = "MemAddressFree"

    def __init__(self, device: NativeDevice, size: int) -> None:
        super().__init__(device, size)
        self.size = size
        self.mappings: list[_Mapping] = []

    def reserve(self, alignment: int = 0) -> None:
        self.make("MemAddressReserve", self.size, alignment, 0, 0)

    def map(self, part: GenericObject, offset: int = 0) -> None:
        """Map memory at an offset of the range. HIP can map memory only from its start."""
        mapping = _Mapping(self.device, part.size)
        mapping.add("MemMap", self.handle + offset, part.size, 0, part.handle, 0)
        self.mappings.append(mapping)

    def grant(self, devices: Sequence[NativeDevice]) -> None:
        """Give devices access to all mappings."""
        access = b"".join(_ACCESS.pack(ON_DEVICE, device.ordinal, _READ_WRITE) for device in devices)
        self.device.driver.call("MemSetAccess", self.handle, self.size, access, len(devices))

    def free(self) -> None:
        for mapping in self.mappings:
            mapping.free()
        super().free()


class NativeAllocations(NativeBackend, AllocationBackend):
    """Shareable allocations. The same calls map and release multicast objects."""

    reservation_type: ClassVar[type[Reservation]] = Reservation

    def properties(self, device: NativeDevice, kind: type[AllocationHandle], metadata: int = 0) -> bytes:
        number = native_handle_type(self._driver, kind)
        return _PROPERTIES.pack(_PINNED, number, ON_DEVICE, device.ordinal, metadata)

    def granularity(self, device: NativeDevice, handle_type: type[AllocationHandle]) -> Granularity:
        """``cuMemGetAllocationGranularity``, ``hipMemGetAllocationGranularity``: the minimum and the recommended one.

        HIP answers for the current device, not for the device in the properties.
        """
        properties = self.properties(device, handle_type)
        return cast(Granularity, device.run(granularity_of, self._driver, "MemGetAllocationGranularity", properties))

    def allocate(self, device: NativeDevice, size: int, handle_type: type[AllocationHandle]) -> Allocation:
        """``cuMemCreate``, ``hipMemCreate``."""
        properties = self.properties(device, handle_type)
        return Allocation(device, size, handle_type).create("MemCreate", size, properties, 0)

    def export_allocation(self, allocation: Allocation) -> AllocationHandle:
        """``cuMemExportToShareableHandle``, ``hipMemExportToShareableHandle``."""
        return allocation.export(allocation.kind)

    def import_allocation(self, device: NativeDevice, handle: AllocationHandle, *, size: int) -> Allocation:
        """``cuMemImportFromShareableHandle``, ``hipMemImportFromShareableHandle``."""
        return Allocation(device, size, type(handle), imported=True).load(handle)

    def map_allocation(self, allocation: GenericObject, devices: Sequence[NativeDevice]) -> tuple[Reservation, Address]:
        """``cuMemAddressReserve``, ``cuMemMap``, and ``cuMemSetAccess`` for every device; also HIP's."""
        place = self.reservation_type(allocation.device, allocation.size)

        def work() -> None:
            place.reserve(allocation.alignment)
            place.map(allocation)
            place.grant(devices)

        return allocation.device.create(place, work), place.handle

    def can_access(self, ordinal: int, peer: int) -> bool:
        """``cuDeviceCanAccessPeer``, ``hipDeviceCanAccessPeer``."""
        return bool(self._driver.ask("DeviceCanAccessPeer", self.number(ordinal), self.number(peer)))

    def location(self, allocation: Allocation) -> int | None:
        """``cuMemGetAllocationPropertiesFromHandle``, ``hipMemGetAllocationPropertiesFromHandle``.

        None if the memory's device is hidden from this process. CUDA then returns -2 (measured); mapping still works.
        """
        properties = ctypes.create_string_buffer(_PROPERTIES.size)
        allocation.device.call("MemGetAllocationPropertiesFromHandle", properties, allocation.handle)
        _, _, place, ordinal, _ = _PROPERTIES.unpack(properties)
        return ordinal if place == ON_DEVICE and ordinal >= 0 else None


class Opened(NativeObject):
    """Another process's memory, opened with an IPC handle."""

    release_call = "IpcCloseMemHandle"
    blocks = True


class NativeSharing(NativeAllocations, SharingBackend):
    """Other libraries' arrays, shared through legacy IPC or through their VMM handles."""

    def export_block(self, device: NativeDevice, block: Block) -> Handle:
        """``cuIpcGetMemHandle``, ``hipIpcGetMemHandle`` for the allocation's base."""
        native = _IpcHandle()
        device.call("IpcGetMemHandle", byref(native), block.address)
        return IpcMemHandle(bytes(native))

    def attach_blocks(
        self, device: NativeDevice, handles: Sequence[Handle], sizes: Sequence[int]
    ) -> tuple[Opened | Reservation, Address]:
        """``cuIpcOpenMemHandle``; ``cuMemImportFromShareableHandle``, ``cuMemMap``, ``cuMemSetAccess``; also HIP's."""
        if isinstance(handle := handles[0], IpcMemHandle):
            native = _IpcHandle.from_buffer_copy(handle.data)
            opened = Opened(device).create("IpcOpenMemHandle", native, _LAZY_PEERS)
            return opened, opened.handle
        place = self.reservation_type(device, sum(sizes))

        def work() -> None:
            place.reserve()
            offset = 0
            for handle, size in zip(handles, sizes, strict=True):
                part = Allocation(device, size, VmmFd, imported=True)
                part.make("MemImportFromShareableHandle", *_shared(self._driver, handle))
                try:
                    place.map(part, offset)
                finally:
                    part.free()  # the mapping keeps the memory alive
                offset += size
            place.grant([device])

        return device.create(place, work), place.handle


def granularity_of(driver: NativeDriver, name: str, properties: bytes) -> Granularity:
    """The minimum and the recommended granularity."""
    options, least = (_MINIMUM, _RECOMMENDED), driver.table.least_granularity
    return Granularity(*(max(least, driver.ask(name, properties, option, kind=c_size_t)) for option in options))


def native_handle_type(driver: NativeDriver, kind: type[Handle]) -> int:
    """The ``CUmemAllocationHandleType``, ``hipMemAllocationHandleType``."""
    if kind not in TYPES:
        expected = f"expected a handle type for allocations that {driver.table.title} can share"
        raise ArgumentTypeError("handle_type", f"{expected}, got {kind.__name__}.")
    return TYPES[kind]


def _shared(driver: NativeDriver, handle: Handle) -> tuple[Any, int]:
    """The driver's form of the handle and the number of its type."""
    number = native_handle_type(driver, type(handle))
    if isinstance(handle, VmmFd):
        return byref(c_int(handle.fd)) if driver.fds_by_address else handle.fd, number
    if isinstance(handle, FabricHandle):
        return handle.data, number
    assert isinstance(handle, OpaqueWin32 | Kmt)
    return handle.handle, number  # capabilities.toml refuses names
