"""Reads a DLPack capsule as a consumer does, with nothing of gpuinterop's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """The content of a capsule."""

    data: int
    device: tuple[int, int]
    dtype: tuple[int, int, int]
    """Code, bits, lanes."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """Elements per dimension; None means C order, and only in an unversioned capsule."""
    byte_offset: int
    flags: int | None
    """Read-only is 1, copied is 2; None in an unversioned capsule."""


class _Fields(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def read_capsule(capsule: object) -> Tensor:
    """Read a capsule without consuming it."""
    # A separate library handle: signatures on ctypes.pythonapi are shared by everyone.
    python = ctypes.PyDLL(None)
    python.PyCapsule_GetName.restype, python.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = python.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name = python.PyCapsule_GetName(capsule)
    assert name in (b"dltensor", b"dltensor_versioned"), name
    versioned = name == b"dltensor_versioned"
    address = pointer(capsule, name)
    assert address
    # DLManagedTensorVersioned has version, manager, deleter and flags before the tensor.
    found = _Fields.from_address(address + (32 if versioned else 0))
    return Tensor(
        data=found.data or 0,
        device=(found.device_type, found.device_id),
        dtype=(found.code, found.bits, found.lanes),
        shape=tuple(found.shape[: found.ndim]),
        strides=tuple(found.strides[: found.ndim]) if found.strides else None,
        byte_offset=found.byte_offset,
        flags=ctypes.c_uint64.from_address(address + 24).value if versioned else None,
    )
