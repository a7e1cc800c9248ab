"""Reads a DLPack capsule as a consumer does, with nothing of gpuinterop's."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

_OFFSETS = {b"dltensor": 0, b"dltensor_versioned": 32}
"""Where the tensor is; a versioned one has version, manager, deleter and flags before it."""


def read_capsule(capsule: object) -> SimpleNamespace:
    """The content of a capsule, which stays unconsumed. `flags` are None in one without a version."""
    python = ctypes.PyDLL(None)  # a separate library handle: signatures on ctypes.pythonapi are shared by everyone
    get_name, get_pointer = python.PyCapsule_GetName, python.PyCapsule_GetPointer
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name = get_name(capsule)
    address = get_pointer(capsule, name)
    content = ctypes.string_at(address + _OFFSETS[name], 48)
    data, *device, count, code, bits, lanes, shape, strides, byte_offset = struct.unpack("@PiiiBBHPPQ", content)
    return SimpleNamespace(
        data=data, device=tuple(device), dtype=(code, bits, lanes), byte_offset=byte_offset,
        shape=tuple((ctypes.c_int64 * count).from_address(shape)) if count else (),
        strides=tuple((ctypes.c_int64 * count).from_address(strides)) if strides else None,
        flags=ctypes.c_uint64.from_address(address + 24).value if _OFFSETS[name] else None,
    )  # fmt: skip
