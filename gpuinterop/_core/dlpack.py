"""DLPack: capsules of memory, and what their consumers may request."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

from .._arguments import MAX_64
from ..errors import ArgumentTypeError, InvalidArgumentError
from .layout import Layout

CPU, CUDA, _CUDA_HOST, ROCM = 1, 2, 3, 10
HOST_TYPES: Final = (CPU, _CUDA_HOST, 11)  # kDLROCMHost
_AMBIGUOUS: Final[dict[int, tuple[int, ...]]] = {CUDA: (0,), _CUDA_HOST: (0,), ROCM: (1, 2)}  # forbidden streams

# NumPy makes every capsule because its deleter is C code. A deleter in Python would lose an exception that is being
# raised when the array is freed. NumPy believes that all memory is the host's; we overwrite device and element type.


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


CAPSULES: Final = ((b"dltensor", 0), (b"dltensor_versioned", 32))
"""Unversioned and versioned: name, and offset of the ``DLTensor`` after version, manager, deleter and flags."""
READ_ONLY: Final = 1  # DLPACK_FLAG_BITMASK_READ_ONLY

# A separate library object, because any module can change argument types on the shared ctypes.pythonapi.
pointer_of = ctypes.PyDLL(None, handle=ctypes.pythonapi._handle).PyCapsule_GetPointer
pointer_of.restype = ctypes.c_void_p
pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def flags_at(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address + 24)


@functools.cache
def numpy_knows_versions() -> bool:
    """Whether NumPy makes versioned capsules (from 2.1). Consumers that ask for one accept the other kind too."""
    import numpy as np

    try:
        np.empty(0).__dlpack__(max_version=(1, 0))
    except TypeError:
        return False
    return True


_NOWHERE: Final = 64  # NumPy refuses the address 0, and does not read this one


@functools.cache
def _exported() -> type[Any]:
    """Return the type of the arrays that capsules keep: NumPy's, with slots for objects that must stay alive."""
    import numpy as np

    class Exported(np.ndarray[Any, Any]):
        __slots__ = ("consumer", "hold")

    return Exported


def blank_array(layout: Layout, whose: object) -> Any:
    """Return a NumPy array without memory, for `capsule_at`."""
    if layout.blank is None:
        layout.blank = layout.array(_NOWHERE, False, whose).view(_exported())
    return layout.blank.view()


def capsule_of(layout: Layout, pointer: int, device: tuple[int, int], hold: object) -> Any:
    """Return a capsule of memory that stays valid as long as `hold`. No stream is ordered."""
    array = blank_array(layout, "a tensor")
    array.hold = hold
    return capsule_at(array, pointer, layout, device, versioned=False, read_only=False)


def capsule_at(
    array: Any, pointer: int, layout: Layout, device: tuple[int, int], *, versioned: bool, read_only: bool
) -> Any:
    """Return a capsule of memory that keeps `array`, a blank one."""
    capsule = array.__dlpack__(max_version=(1, 0)) if versioned else array.__dlpack__()
    name, offset = CAPSULES[versioned]
    address = pointer_of(capsule, name)
    if versioned and read_only:  # unversioned capsules cannot express it
        flags_at(address).value |= READ_ONLY
    tensor = DLTensor.from_address(address + offset)
    tensor.data, tensor.code = pointer, layout.dtype.code
    tensor.device_type, tensor.device_id = device
    return capsule


def check_request(stream: Any, max_version: Any, dl_device: Any, copy: bool | None, device: tuple[int, int]) -> None:
    """Raise if the array API forbids the request, or a view cannot fulfil it."""
    for argument, pair in (("max_version", max_version), ("dl_device", dl_device)):
        if pair is not None and not (isinstance(pair, tuple) and len(pair) == 2):
            raise ArgumentTypeError(argument, f"expected a pair of ints or None, got {pair!r}.")
    if dl_device is not None and dl_device != device:
        raise BufferError(f"expected dl_device={device}, where the memory is, got {dl_device}; a view cannot copy.")
    if copy:
        raise BufferError("expected copy=None or False, got True; copy the array that from_dlpack returns.")
    if stream is None:
        return
    if isinstance(stream, bool) or not isinstance(stream, int):
        raise ArgumentTypeError("stream", f"expected an int or None, got {type(stream).__name__}.")
    if device[0] == CPU and stream != -1:
        raise InvalidArgumentError("stream", f"expected None or -1 for a CPU array, got {stream}.")
    if not -1 <= stream <= MAX_64:
        raise InvalidArgumentError("stream", f"expected the number of a stream, None or -1, got {stream}.")
    if stream in _AMBIGUOUS.get(device[0], ()):
        default, allowed = ("0", "0") if device[0] == ROCM else ("1", "1, 2")
        raise InvalidArgumentError(
            "stream", f"expected {allowed} or a stream's address, got {stream}; pass {default} for the default stream."
        )
