"""Memory that other libraries have allocated: what is behind a pointer, and its way to another process.

AMD's runtime has no attribute that tells how memory may travel (10, 14 and 17 of ``hipPointerGetAttribute``), and
writes a size as 32 bits (12); 3 and 11 lose what was opened by IPC where another device is current. Other calls tell as
much. A handle of VMM memory that others mapped is not asked for: ``hipMemRetainAllocationHandle`` ends the process for
memory of a pool, which from 7.1 on looks like any VMM mapping, and does not count (mended by #2696, #5807).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakValueDictionary

from gpuinterop.backend import Address, Behind, Block, SharingBackend
from gpuinterop.errors import HandleError
from gpuinterop.handles import Handle, IpcMemHandle, VmmFd

from .allocations import DEVICE, Allocation, Allocations, Reservation, share_of
from .driver import Gpu, Made

_MEMORY_TYPE, _BUFFER_ID, _MANAGED, _ORDINAL = 2, 7, 8, 9  # hipPointer_attribute
_HOST: Final = 1  # hipMemoryTypeHost
_LAZY_PEERS: Final = 1  # hipIpcMemLazyEnablePeerAccess


class _Handle(ctypes.Structure):
    """``hipIpcMemHandle_t``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * IpcMemHandle.SIZE),)


class Opened(Made):
    """Memory of another process, opened by an IPC handle."""

    back = "hipIpcCloseMemHandle"
    blocks = True

    def open(self, data: bytes) -> None:
        place, driver = ctypes.c_void_p(), self.device.driver
        handle = _Handle.from_buffer_copy(data)
        if code := driver.library.hipIpcOpenMemHandle(ctypes.byref(place), handle, _LAZY_PEERS):
            raise driver.error("hipIpcOpenMemHandle", code)
        self.handle = place.value or 0
        self.made = True


class Sharing(Allocations, SharingBackend):
    """Arrays of other libraries by legacy IPC; memory of `Allocations` as VMM handles."""

    def __init__(self) -> None:
        super().__init__()
        self._open: WeakValueDictionary[bytes, Opened] = WeakValueDictionary()

    def block_at(self, address: Address) -> Block:
        """``hipPointerGetAttribute``, ``hipMemGetAddressRange``, ``hipMemGetAccess``."""
        place, ordinal, library = self._ask(address, _MEMORY_TYPE), self._ask(address, _ORDINAL), self._driver.library
        start, size = ctypes.c_void_p(), ctypes.c_size_t()
        ends = ctypes.byref(start), ctypes.byref(size)
        if not place or library.hipMemGetAddressRange(*ends, ctypes.c_void_p(address)):
            self._driver.forget_error()
            return Block(behind=Behind.NOTHING)
        behind = Behind.MANAGED if self._ask(address, _MANAGED) else Behind.HOST if place == _HOST else Behind.IPC
        flags, where = ctypes.c_ulonglong(), (ctypes.c_int * 2)(DEVICE, ordinal)
        if behind is Behind.IPC and not library.hipMemGetAccess(ctypes.byref(flags), where, start):
            behind = Behind.VMM if self._placed(start.value) else Behind.CLOSED
        self._driver.forget_error()
        key = self._ask(address, _BUFFER_ID)
        return Block(behind=behind, address=start.value or 0, size=size.value, key=key, ordinal=ordinal)

    def export_block(self, device: Gpu, block: Block) -> Handle:
        """``hipIpcGetMemHandle``, of the allocation's base; ``hipMemExportToShareableHandle``."""
        if (place := self._placed(block.address)) is not None:
            return self.export_allocation(place.allocation)
        handle, base = _Handle(), ctypes.c_void_p(block.address)
        if code := device.run(self._driver.library.hipIpcGetMemHandle, ctypes.byref(handle), base):
            raise self._driver.error("hipIpcGetMemHandle", code)
        return IpcMemHandle(bytes(handle))

    def attach_blocks(
        self, device: Gpu, handles: Sequence[Handle], sizes: Sequence[int]
    ) -> tuple[Opened | Reservation, Address]:
        """``hipIpcOpenMemHandle``; ``hipMemImportFromShareableHandle``, ``hipMemMap``, ``hipMemSetAccess``."""
        if len(handles) != 1:
            raise HandleError(f"handle: expected one allocation, got {len(handles)}; HIP maps each by itself.")
        (handle,), (size,) = handles, sizes
        if isinstance(handle, VmmFd):
            allocation = Allocation(device, size, VmmFd, imported=True)
            shared, _keep = share_of(self._driver, handle)
            allocation.create("hipMemImportFromShareableHandle", shared, 1)
            try:
                return self.map_allocation(allocation, [device])
            finally:
                allocation.release()  # the mapping keeps the memory
        assert isinstance(handle, IpcMemHandle)
        known = self._open.get(handle.data)
        if known is not None and known.made and known.device is not device:  # 7.1 moves it there, then crashes
            raise HandleError(
                f"handle: expected memory that no other device has open, as HIP wants it, got that of device "
                f"{known.device.ordinal}; use it there."
            )
        opened = Opened(device)
        device.create(opened, lambda: opened.open(handle.data))
        self._open[handle.data] = opened
        return opened, opened.handle

    detach_blocks: Any = staticmethod(Made.release)
    """``hipIpcCloseMemHandle``, ``hipMemUnmap``."""

    def _placed(self, address: Address | None) -> Reservation | None:
        """Our own mapping at an address."""
        found = self.placed.get(address or 0)
        ours = found is not None and found.made and found.allocation.made and not found.allocation.imported
        return found if ours else None

    def _ask(self, address: Address, attribute: int) -> int:
        """An attribute, 0 if HIP does not know the address; each has 8 bytes or fewer."""
        found = ctypes.c_uint64()
        code = self._driver.library.hipPointerGetAttribute(ctypes.byref(found), attribute, ctypes.c_void_p(address))
        return 0 if code else found.value
