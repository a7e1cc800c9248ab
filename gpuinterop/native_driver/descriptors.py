"""Descriptors of handles. The drivers have the same structs with different numbers for the types."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from struct import Struct
from typing import Final

from ..errors import ArgumentTypeError
from ..handles import FdHandle, Handle, PointerHandle, Win32Handle
from .table import Table

# The type; a union of descriptor, pointer and named NT handle; the size (memory only); flags; reserved.
_MEMORY: Final = Struct("=i4xQQQI68x")  # CUDA_EXTERNAL_MEMORY_HANDLE_DESC, hipExternalMemoryHandleDesc
_SEMAPHORE: Final = Struct("=i4xQQI68x")  # CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC, hipExternalSemaphoreHandleDesc
_DEDICATED: Final = 1  # CUDA_EXTERNAL_MEMORY_DEDICATED, hipExternalMemoryDedicated


Descriptor = tuple[bytes, object]
"""A descriptor, and an object to keep alive until the call."""


def memory(table: Table, handle: Handle, *, size: int, dedicated: bool) -> Descriptor:
    """The descriptor of a memory object."""
    flags = _DEDICATED if dedicated and not isinstance(handle, table.types_without_flags) else 0
    return _pack(_MEMORY, table, table.memory_types, handle, size, flags)


def semaphore(table: Table, handle: Handle) -> Descriptor:
    """The descriptor of a semaphore."""
    return _pack(_SEMAPHORE, table, table.semaphore_types, handle, 0)


def _pack(struct: Struct, table: Table, types: Mapping[type[Handle], int], handle: Handle, *fields: int) -> Descriptor:
    if type(handle) not in types:
        known, got = ", ".join(kind.__name__ for kind in types), type(handle).__name__
        raise ArgumentTypeError("handle", f"expected one of {known} for {table.title}, got {got}.")
    value, name = _union(handle)
    return struct.pack(types[type(handle)], value, ctypes.addressof(name) if name else 0, *fields), name


def _union(handle: Handle) -> tuple[int, ctypes.Array[ctypes.c_char] | None]:
    """The number or pointer of a handle, and its name if it has one."""
    if isinstance(handle, FdHandle):
        return handle.fd, None
    if isinstance(handle, PointerHandle):
        return handle.pointer, None
    assert isinstance(handle, Win32Handle)
    if handle.name is None:
        return handle.handle or 0, None
    return 0, ctypes.create_string_buffer(handle.name.encode("utf-16-le") + b"\0\0")
