"""Handing memory to array libraries without a copy: DLPack and the array interfaces.

NumPy is imported on first use, here and nowhere else in the core.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentTypeError, InvalidArgumentError
from .resource import ExportToken

if TYPE_CHECKING:
    from .memory import Buffer

# -- dtypes: DLPack's (code, bits) and the array interface's typestr ------------------------------------------------

_KINDS = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_BFLOAT16 = 4


class DType:
    """An element type, as DLPack and the array interfaces name it."""

    __slots__ = ("bits", "code", "itemsize", "name", "typestr")

    def __init__(self, dtype: object) -> None:
        name = str(dtype)
        name = name.removeprefix("torch.").removeprefix("<class 'numpy.").removesuffix("'>")
        if name == "bfloat16":
            self.name, self.code, self.bits, self.typestr = name, _BFLOAT16, 16, "<V2"
        else:
            import numpy as np

            try:
                parsed = np.dtype(name if name in np.sctypeDict else dtype)  # type: ignore[call-overload]
            except TypeError:
                raise ArgumentTypeError(
                    "dtype", f"{dtype!r} is no element type; use a name such as 'float32'."
                ) from None
            if parsed.kind not in _KINDS or parsed.byteorder == ">":
                raise InvalidArgumentError("dtype", f"{parsed} cannot be shared; use a native number type.")
            self.name, self.code, self.bits = parsed.name, _KINDS[parsed.kind], parsed.itemsize * 8
            self.typestr = parsed.str
        self.itemsize = self.bits // 8


def resolve_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    try:
        resolved = tuple(operator.index(dim) for dim in dims)
    except TypeError:
        raise ArgumentTypeError("shape", f"{shape!r} is no sequence of ints.") from None
    if any(dim < 0 for dim in resolved):
        raise InvalidArgumentError("shape", f"{resolved} has a negative dimension.")
    return resolved


def contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for dim in reversed(shape):
        strides.append(step)
        step *= max(dim, 1)
    return tuple(reversed(strides))


def span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """First and one-past-last byte touched, relative to the first element."""
    if 0 in shape:
        return 0, 0
    low = sum(min(0, (dim - 1) * stride) for dim, stride in zip(shape, strides, strict=True))
    high = sum(max(0, (dim - 1) * stride) for dim, stride in zip(shape, strides, strict=True))
    return low, high + itemsize


# -- DLPack ----------------------------------------------------------------------------------------------------------


class _Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", _Deleter)]


class _Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("version", _Version),
        ("manager", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


# Everything a live tensor points at, by the address of its managed struct. The consumer's deleter call drops it.
_alive: dict[int, tuple[Any, ...]] = {}


def _release(address: int) -> None:
    _alive.pop(address, None)


_delete = _Deleter(_release)  # kept for ever: a consumer may call it as long as the process lives


# A library object of our own: on ctypes.pythonapi, which everybody shares, anybody may set other argument types.
_python = ctypes.PyDLL(None, handle=ctypes.pythonapi._handle)
_capsule_new = _python.PyCapsule_New
_capsule_new.restype = ctypes.py_object
_capsule_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_is_valid = _python.PyCapsule_IsValid
_capsule_is_valid.restype = ctypes.c_int
_capsule_is_valid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_capsule_pointer = _python.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]

_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"


def _destroy(capsule: int) -> None:
    # A capsule that was consumed was renamed "used_dltensor": then the tensor is its consumer's.
    for name in (_NAME, _NAME_VERSIONED):
        if _capsule_is_valid(capsule, name):
            _release(_capsule_pointer(capsule, name))


_destroy_capsule = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy)


def make_capsule(
    *,
    pointer: int,
    device: tuple[int, int],
    dtype: DType,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    token: ExportToken,
    versioned: bool,
) -> object:
    """A DLPack capsule that keeps `token` alive until its consumer lets go."""
    ndim = len(shape)
    dims = (ctypes.c_int64 * ndim)(*shape)
    steps = (ctypes.c_int64 * ndim)(*(stride // dtype.itemsize for stride in strides))
    managed = _ManagedVersioned() if versioned else _Managed()
    if versioned:
        managed.version = _Version(1, 0)
        managed.flags = 0
    tensor = managed.tensor
    tensor.data = pointer
    tensor.device = _Device(*device)
    tensor.ndim = ndim
    tensor.dtype = _DataType(dtype.code, dtype.bits, 1)
    tensor.shape = dims
    tensor.strides = steps
    tensor.byte_offset = 0
    managed.deleter = _delete
    address = ctypes.addressof(managed)
    _alive[address] = (managed, dims, steps, token)
    name = _NAME_VERSIONED if versioned else _NAME
    return _capsule_new(address, name, ctypes.cast(_destroy_capsule, ctypes.c_void_p))


# -- the view --------------------------------------------------------------------------------------------------------

_CPU, _CUDA, _CUDA_HOST, _ROCM = 1, 2, 3, 10


class View:
    """A typed, strided window on a buffer, for ``from_dlpack`` of any array library. Made by `Buffer.view`.

    Attributes
    ----------
    shape : tuple of int
    strides : tuple of int
        In bytes.
    dtype : str
        The element type's name.
    ptr : int
        Address of the first element.
    """

    def __init__(
        self, buffer: Buffer, shape: tuple[int, ...], dtype: DType, offset: int, strides: tuple[int, ...]
    ) -> None:
        self._buffer = buffer
        self._dtype = dtype
        self._pointer = buffer._address + offset
        self._token: ExportToken | None = None
        self.shape = shape
        self.strides = strides

    @property
    def dtype(self) -> str:
        return self._dtype.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self._dtype.itemsize

    @property
    def ptr(self) -> int:
        self._buffer._check_open()
        return self._pointer

    def __repr__(self) -> str:
        return f"<View {self.dtype}{list(self.shape)} of {self._buffer._label}>"

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._buffer._device.info.dlpack

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule, by the array API's rules.

        Parameters
        ----------
        stream : int, optional
            The consumer's stream. CUDA: None and 1 the legacy default, 2 the per-thread default, -1 no ordering, 0
            is refused. ROCm: None and 0 the default, -1 no ordering, 1 and 2 are refused. CPU: None or -1. The
            consumer's stream is ordered behind the last stream that wrote the buffer through gpuinterop; on a CPU,
            whose consumers know no streams, the call waits for it.
        max_version, dl_device, copy
            As in the array API; a copy is never made.
        """
        self._buffer._check_open()
        device = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) != device:
            raise BufferError(f"the memory is on {device}, not on {dl_device}; a view makes no copies.")
        if copy:
            raise BufferError("a view makes no copies; copy the array that you get.")
        misfits = [stride for stride in self.strides if stride % self._dtype.itemsize]
        if misfits:
            raise BufferError(
                f"DLPack counts strides in elements: {misfits[0]} bytes is no multiple of {self._dtype.itemsize}; "
                f"use {self._buffer._device.info.array_interface}, or a view of bytes."
            )
        self._order(stream, device[0])
        return make_capsule(
            pointer=self._pointer,
            device=device,
            dtype=self._dtype,
            shape=self.shape,
            strides=self.strides,
            token=self._buffer._mapping.exports.token(self._buffer),
            versioned=max_version is not None and max_version[0] >= 1,
        )

    def _order(self, stream: int | None, device_type: int) -> None:
        if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int)):
            raise ArgumentTypeError("stream", f"must be an int or None, not {type(stream).__name__}.")
        last = self._buffer._mapping.last_stream()
        if device_type == _CPU:
            if stream not in (None, -1):
                raise InvalidArgumentError("stream", "a CPU array has no stream; pass None.")
            if last is not None and stream is None:
                last.synchronize()
            return
        refused = (0,) if device_type in (_CUDA, _CUDA_HOST) else (1, 2) if device_type == _ROCM else ()
        if stream in refused:
            raise InvalidArgumentError("stream", f"the array API forbids {stream} here: it is ambiguous.")
        if stream == -1 or last is None:
            return
        default = 1 if device_type in (_CUDA, _CUDA_HOST) else 0
        consumer = self._buffer._device.wrap_stream(default if stream is None else stream)
        consumer.wait_stream(last)

    def _interface(self) -> dict[str, Any]:
        self._buffer._check_open()
        if self._token is None:
            # NumPy and CuPy keep this very object as the array's base, so the view's life is the export's.
            self._token = self._buffer._mapping.exports.token(self._buffer)
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self._dtype.typestr,
            "data": (self._pointer, False),
            "version": 3,
        }

    def __getattr__(self, name: str) -> Any:
        # Only the one interface that the device's memory really has: a library that finds
        # __cuda_array_interface__ on host memory would hand the pointer to a GPU.
        if name.startswith("__") and name.endswith("array_interface__"):
            info = self.__dict__["_buffer"]._device.info
            if name == info.array_interface:
                interface = self._interface()
                if name == "__cuda_array_interface__" and (last := self._buffer._mapping.last_stream()) is not None:
                    interface["stream"] = last._ptr or 1
                return interface
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


# -- host memory of callers --------------------------------------------------------------------------------------------


def _as_array(array: object, argument: str) -> Any:
    """Host memory as a NumPy array over the same bytes, never over a copy."""
    import numpy as np

    try:
        return np.asarray(memoryview(array))  # type: ignore[arg-type]
    except TypeError:
        pass
    if hasattr(array, "__array_interface__") or hasattr(array, "__array__"):
        try:
            return np.asarray(array)
        except Exception as error:  # torch: a CUDA tensor
            raise ArgumentTypeError(argument, f"must be host memory ({error}).") from None
    raise ArgumentTypeError(argument, f"a {type(array).__name__} is no host array; pass a NumPy array or a buffer.")


class HostArray:
    """A caller's host memory for the length of a copy."""

    __slots__ = ("keep", "nbytes", "pageable", "ptr")

    def __init__(self, array: object, *, argument: str, writable: bool) -> None:
        import numpy as np

        found = array if isinstance(array, np.ndarray) else _as_array(array, argument)
        if found.dtype.hasobject:
            raise ArgumentTypeError(argument, f"a {type(array).__name__} of Python objects holds no numbers.")
        if writable and not found.flags.writeable:
            raise InvalidArgumentError(argument, "is read-only.")
        if writable and not found.flags.c_contiguous:
            raise InvalidArgumentError(argument, "is not contiguous; copy into a contiguous array first.")
        if not found.flags.c_contiguous:
            found = np.ascontiguousarray(found)
        pinned = getattr(array, "is_pinned", None)
        self.pageable = not (callable(pinned) and pinned())
        self.keep = found
        self.ptr: int = found.ctypes.data
        self.nbytes: int = found.nbytes


__all__ = ["DType", "HostArray", "View", "contiguous", "make_capsule", "resolve_shape", "span"]
