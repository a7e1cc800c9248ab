"""Shareable allocations, and memory that other libraries have allocated.

AMD's runtime has no attribute for the ways to share memory (10, 14 and 17 of ``hipPointerGetAttribute``) and writes a
size as 32 bits (12). If another device is current, 3 and 11 fail for memory opened through IPC. Other calls return the
same facts. Handles of others' VMM memory are not requested: ``hipMemRetainAllocationHandle`` kills the process for a
pool's memory, which from 7.1 on looks like any VMM mapping, and it counts no reference (fixed in #2696, #5807).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p
from typing import ClassVar
from weakref import WeakValueDictionary

from gpuinterop.backend import Address, Block, MemoryKind
from gpuinterop.errors import HandleError
from gpuinterop.handles import Handle, IpcMemHandle
from gpuinterop.native_driver.allocations import (
    ON_DEVICE,
    Allocation,
    GenericObject,
    NativeSharing,
    Opened,
    Reservation,
)
from gpuinterop.native_driver.driver import NativeDevice
from gpuinterop.native_driver.memory import BUFFER_ID, HOST, IS_MANAGED, MEMORY_TYPE, ORDINAL, pointer_attribute


class ReusedRange(Reservation):
    """An address range with an allocation in it. The range is never released, but reused.

    AMD's runtime keeps a released range until the last command that used it is done. If the system assigns the same
    addresses again before that, the runtime confuses the two ranges (rocm-systems #2980).
    """

    blocks = True  # hipMemUnmap waits
    allocation: GenericObject | None = None

    def reserve(self, alignment: int = 0) -> None:
        """``hipMemAddressReserve``, unless a range of this size is free."""
        try:
            self.handle, self.made = self.device.driver.free_ranges[self.size].pop(), True
        except IndexError:
            super().reserve(alignment)

    def free(self) -> None:
        for mapping in self.mappings:
            mapping.free()
        self._keep_range()

    def undo_parts(self) -> None:
        # A failed map returns success, and unmapping an unmapped range kills the process (hip_vm.cpp).
        if self._is_mapped():
            self.release()
        if not self._is_mapped():
            self._keep_range()

    def _is_mapped(self) -> bool:
        driver = self.device.driver
        return self.made and bool(self.device.run(pointer_attribute, driver, self.handle, MEMORY_TYPE))

    def _keep_range(self) -> None:
        if self.made:
            self.made = False
            self.device.driver.free_ranges[self.size].append(self.handle)


class Sharing(NativeSharing):
    """Shareable allocations as VMM handles, and other libraries' arrays through legacy IPC."""

    reservation_type: ClassVar[type[Reservation]] = ReusedRange

    def __init__(self) -> None:
        super().__init__()
        self._ranges: WeakValueDictionary[Address, ReusedRange] = WeakValueDictionary()  # mapped allocations
        self._open: WeakValueDictionary[bytes, Opened] = WeakValueDictionary()

    def map_allocation(self, allocation: GenericObject, devices: Sequence[NativeDevice]) -> tuple[Reservation, Address]:
        place, address = super().map_allocation(allocation, devices)
        assert isinstance(place, ReusedRange)
        place.allocation = allocation
        self._ranges[address] = place
        return place, address

    def location(self, allocation: Allocation) -> int | None:
        """``hipMemGetAllocationPropertiesFromHandle``; None if its answer is unusable.

        That is a device outside this process or, for imported memory, the importing device: runtimes that cannot find
        the owner report it too (ROCm/rocm-systems #4784, #11606), and their version does not show which ones do.
        """
        if not self._driver.has("hipMemGetAllocationPropertiesFromHandle"):
            return None
        ordinal = super().location(allocation)
        if ordinal is None or ordinal >= self._driver.ask("DeviceGetCount"):
            return None
        return None if allocation.imported and ordinal == allocation.device.ordinal else ordinal

    def find_blocks(self) -> Callable[[Address], Block]:
        return self.block_at

    def block_at(self, address: Address) -> Block:
        """``hipPointerGetAttribute``, ``hipMemGetAddressRange``, ``hipMemGetAccess``."""
        driver, start, size = self._driver, c_void_p(), c_size_t()
        place, ordinal, managed, key = (
            pointer_attribute(driver, address, attribute) for attribute in (MEMORY_TYPE, ORDINAL, IS_MANAGED, BUFFER_ID)
        )
        if not place or driver.status("MemGetAddressRange", byref(start), byref(size), address):
            return Block(kind=MemoryKind.NOTHING)
        kind = MemoryKind.MANAGED if managed else MemoryKind.HOST if place == HOST else MemoryKind.IPC
        where = (c_int * 2)(ON_DEVICE, ordinal)
        if kind is MemoryKind.IPC and not driver.status("MemGetAccess", byref(c_ulonglong()), where, start):
            kind = MemoryKind.VMM if self._allocation_at(start.value) else MemoryKind.CLOSED
        return Block(kind=kind, address=start.value or 0, size=size.value, key=key, ordinal=ordinal)

    def is_there(self, block: Block) -> bool:
        """``hipPointerGetAttribute``."""
        return pointer_attribute(self._driver, block.address, BUFFER_ID) == block.key

    def export_block(self, device: NativeDevice, block: Block) -> Handle:
        """``hipIpcGetMemHandle``; ``hipMemExportToShareableHandle``."""
        if (allocation := self._allocation_at(block.address)) is not None:
            return self.export_allocation(allocation)
        return super().export_block(device, block)

    def attach_blocks(
        self, device: NativeDevice, handles: Sequence[Handle], sizes: Sequence[int]
    ) -> tuple[Opened | Reservation, Address]:
        """``hipIpcOpenMemHandle``; ``hipMemImportFromShareableHandle``, ``hipMemMap``, ``hipMemSetAccess``."""
        if len(handles) != 1:
            raise HandleError(f"handle: expected one allocation, got {len(handles)}; HIP maps each one separately.")
        data = handle.data if isinstance(handle := handles[0], IpcMemHandle) else b""
        opened = self._open.get(data)
        if opened is not None and opened.made and opened.device is not device:  # 7.1 moves it there, then crashes
            raise HandleError(
                f"handle: expected memory that no other device has open, as HIP requires, got memory of device "
                f"{opened.device.ordinal}; use it there."
            )
        attached, address = super().attach_blocks(device, handles, sizes)
        if isinstance(attached, Opened):
            self._open[data] = attached
        return attached, address

    def _allocation_at(self, address: Address | None) -> Allocation | None:
        """This backend's allocation that is mapped at an address."""
        place = self._ranges.get(address or 0)
        held = place.allocation if place is not None and place.made else None
        return held if isinstance(held, Allocation) and held.made and not held.imported else None
