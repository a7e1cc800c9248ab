"""Descriptors of handles: the drivers have the same structs, with other numbers of the types."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from struct import Struct
from typing import Final

from ..errors import ArgumentTypeError
from ..handles import FdHandle, Handle, PointerHandle, Win32Handle
from .table import Table

# The type; a union of a descriptor, a pointer, and an NT handle with a name; a memory's size; flags; what is reserved.
_MEMORY: Final = Struct("=i4xQQQI68x")  # CUDA_EXTERNAL_MEMORY_HANDLE_DESC, hipExternalMemoryHandleDesc
_SEMAPHORE: Final = Struct("=i4xQQI68x")  # CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC, hipExternalSemaphoreHandleDesc
_DEDICATED: Final = 1  # CUDA_EXTERNAL_MEMORY_DEDICATED, hipExternalMemoryDedicated


def memory(table: Table, handle: Handle, *, size: int, dedicated: bool) -> tuple[bytes, object]:
    """The descriptor of a memory, and the object to keep alive until the call."""
    flags = _DEDICATED if dedicated and not isinstance(handle, table.types_without_flags) else 0
    value, name = _union(handle)
    number = _number_of(table, table.memory_types, handle)
    return _MEMORY.pack(number, value, ctypes.addressof(name) if name else 0, size, flags), name


def semaphore(table: Table, handle: Handle) -> tuple[bytes, object]:
    """The descriptor of a semaphore, and the object to keep alive until the call."""
    value, name = _union(handle)
    number = _number_of(table, table.semaphore_types, handle)
    return _SEMAPHORE.pack(number, value, ctypes.addressof(name) if name else 0, 0), name


def _union(handle: Handle) -> tuple[int, ctypes.Array[ctypes.c_char] | None]:
    """What is told of a handle: its number or pointer, or its name."""
    if isinstance(handle, FdHandle):
        return handle.fd, None
    if isinstance(handle, PointerHandle):
        return handle.pointer, None
    assert isinstance(handle, Win32Handle)
    if handle.name is None:
        return handle.handle or 0, None
    return 0, ctypes.create_string_buffer(handle.name.encode("utf-16-le") + b"\0\0")


def _number_of(table: Table, types: Mapping[type[Handle], int], handle: Handle) -> int:
    try:
        return types[type(handle)]
    except KeyError:
        known, got = ", ".join(kind.__name__ for kind in types), type(handle).__name__
        raise ArgumentTypeError("handle", f"expected one of {known}, got {got}; {table.title} has no other.") from None
