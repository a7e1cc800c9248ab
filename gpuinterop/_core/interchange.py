"""DLPack and the array interfaces: array libraries use memory without a copy.

In the core, only this module imports NumPy, on first use.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import sys
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from .._arguments import MAX_64, MAX_SIZE, NoCopy, NotAnArray, check_int
from ..errors import ArgumentTypeError, InvalidArgumentError
from .lifetime import LIVE

if TYPE_CHECKING:
    from .memory import Buffer
    from .stream import Stream
    from .streams import KnownStream

# -- dtypes: DLPack's (code, bits) and the array interface's typestr ------------------------------------------------

TYPES: Final = {
    "bool": (6, 8), "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64), "uint8": (1, 8),
    "uint16": (1, 16), "uint32": (1, 32), "uint64": (1, 64), "float16": (2, 16), "float32": (2, 32), "float64": (2, 64),
    "complex64": (5, 64), "complex128": (5, 128), "complex32": (5, 32), "bfloat16": (4, 16), "float8_e3m4": (7, 8),
    "float8_e4m3": (8, 8), "float8_e4m3b11fnuz": (9, 8), "float8_e4m3fn": (10, 8), "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8), "float8_e5m2fnuz": (13, 8), "float8_e8m0fnu": (14, 8),
}  # fmt: skip
_NAMES: Final = {facts: name for name, facts in TYPES.items()}


class DType:
    """An element type and its names in DLPack and the array interfaces."""

    __slots__ = ("alignment", "bits", "code", "is_numpys", "itemsize", "name", "typestr")

    def __init__(self, dtype: object) -> None:
        import numpy as np

        name = str(dtype).removeprefix("torch.")
        if name not in TYPES:
            with suppress(Exception):  # NumPy raises several types when it parses a string
                parsed = np.dtype(dtype)  # type: ignore[call-overload]
                name = parsed.name if parsed.isnative and dtype is not None else ""  # NumPy reads None as float64
        if name not in TYPES:
            raise ArgumentTypeError("dtype", f"expected one of {', '.join(TYPES)}, got {_instead_of(dtype)}.")
        self.name, (self.code, self.bits) = name, TYPES[name]
        self.is_numpys = not name.startswith(("complex32", "bfloat16", "float8"))  # ml_dtypes adds these
        self.typestr = np.dtype(name if self.is_numpys else f"uint{self.bits}").str
        self.itemsize = self.bits // 8
        self.alignment = self.itemsize // 2 if self.code == 5 else self.itemsize

    def for_numpy(self) -> Any:
        """Return NumPy's dtype. Raise `ImportError` or `AttributeError` if it needs ml_dtypes, or a newer one."""
        import numpy as np

        if self.is_numpys:
            return np.dtype(self.typestr)
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, self.name))


def _instead_of(dtype: object) -> str:
    """Name an element type that only NumPy has, and what to take instead."""
    is_addresses = getattr(dtype, "hasobject", dtype is object or dtype == "object")
    got = dtype if hasattr(dtype, "hasobject") else repr(dtype)
    return f"{got}; take {'numbers, not objects' if is_addresses else 'bytes (uint8), and view those'}"


_PLAIN: Final = frozenset({int})


def resolve_ints(values: Sequence[int], argument: str, *, minimum: int = -MAX_SIZE) -> tuple[int, ...]:
    """Return a tuple of ints, or raise an error that names the argument."""
    try:
        if isinstance(values, str | bytes):  # these are sequences too
            raise TypeError
        listed = tuple(values)
    except TypeError:
        raise ArgumentTypeError(argument, f"expected a sequence of ints, got {values!r}.") from None
    if _PLAIN.issuperset(map(type, listed)) and minimum <= min(listed, default=0) <= max(listed, default=0) <= MAX_SIZE:
        return listed
    return tuple(check_int(value, argument, minimum=minimum, maximum=MAX_SIZE) for value in listed)


def contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for dim in reversed(shape):
        strides.append(step)
        step *= max(dim, 1)
    return tuple(reversed(strides))


class Layout:
    """Shape, element type and strides of a view, with derived values. `layout_of` makes it once for all such views."""

    __slots__ = ("blank", "dtype", "high", "low", "misfit", "shape", "strides")

    def __init__(self, shape: tuple[int, ...], dtype: object, strides: tuple[int, ...] | None) -> None:
        self.shape = shape
        self.dtype = _known_type(dtype) if isinstance(dtype, str) else DType(dtype)
        size = self.dtype.itemsize
        self.strides = contiguous(shape, size) if strides is None else strides
        if len(self.strides) != len(shape):
            got = len(self.strides)
            raise InvalidArgumentError("strides", f"expected {len(shape)} entries, as in shape, got {got}.")
        reaches = [] if 0 in shape else [(dim - 1) * stride for dim, stride in zip(shape, self.strides, strict=True)]
        self.low = sum(reach for reach in reaches if reach < 0)  # first byte used, relative to the first element
        self.high = 0 if 0 in shape else size + sum(reach for reach in reaches if reach > 0)  # end of the last byte
        # DLPack cannot express a stride that is not a multiple of the element size.
        self.misfit = next((stride for stride in self.strides if stride % size), None)
        self.blank: Any = None  # a NumPy array of this layout without memory; exports use views of it

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.dtype.name}, strides {list(self.strides)}"

    def array(self, address: int, read_only: bool, whose: object) -> Any:
        """Return a NumPy array at an address. Its base has a slot for what must stay alive; it is still empty."""
        import numpy as np

        try:
            return np.asarray(_Base(self.interface(address, read_only)))
        except (ValueError, OverflowError) as error:  # too many dimensions, or larger than the address space
            raise BufferError(f"expected a shape that NumPy can describe, got {whose}: {error}.") from None

    def blank_array(self, whose: object) -> Any:
        if self.blank is None:
            self.blank = self.array(_NOWHERE, False, whose).view(_exported())
        return self.blank.view()

    def interface(self, pointer: int, read_only: bool) -> dict[str, Any]:
        """Return the array interface of elements at an address, as numbers of their size."""
        data, typestr = (pointer, read_only), self.dtype.typestr
        return {"shape": self.shape, "strides": self.strides, "typestr": typestr, "data": data, "version": 3}


_known_type = functools.lru_cache(256)(DType)
_known_layout = functools.lru_cache(1024)(Layout)
_MOST_PLACES: Final = 1 << 16  # elements that `overlap` compares at most


def layout_of(shape: int | Sequence[int], dtype: Any, strides: Sequence[int] | None) -> Layout:
    one = type(shape) is not tuple and not isinstance(shape, Iterable)
    dims = resolve_ints((shape,) if one else shape, "shape", minimum=0)  # type: ignore[arg-type]
    steps = None if strides is None else resolve_ints(strides, "strides")
    make = _known_layout if isinstance(dtype, Hashable) else Layout
    return make(dims, dtype, steps)


@functools.lru_cache(1024)
def overlap(layout: Layout) -> bool:
    """Whether two elements share a byte. Also True if the answer would take long."""
    if 0 in layout.shape:
        return False
    size = layout.dtype.itemsize
    dims = sorted((abs(step), count) for step, count in zip(layout.strides, layout.shape, strict=True) if count > 1)
    while dims and dims[0][0] == size:  # elements without gaps count as one element
        size *= dims.pop(0)[1]
    reach = size + sum(step * (count - 1) for step, count in dims)
    while dims and (reach := reach - dims[-1][0] * (dims[-1][1] - 1)) <= dims[-1][0]:
        dims.pop()  # this dimension cannot overlap unless the others do
    if math.prod(count for _, count in dims) > _MOST_PLACES:
        return True
    places = [0]
    for step, count in dims:
        places = [place + step * at for at in range(count) for place in places]
    places.sort()
    return any(after - place < size for place, after in itertools.pairwise(places))


@functools.lru_cache(1024)
def dense_order(layout: Layout) -> tuple[object, ...] | None:
    """Return a key, equal for layouts that fill the same bytes in one order; None if they have gaps or overlaps."""
    if layout.high - layout.low != math.prod(layout.shape) * layout.dtype.itemsize or overlap(layout):
        return None
    steps = [step for step, count in zip(layout.strides, layout.shape, strict=True) if count > 1 and layout.high]
    return layout.dtype.name, layout.shape, *steps


# -- DLPack ----------------------------------------------------------------------------------------------------------

CPU, _CUDA, _CUDA_HOST, _ROCM = 1, 2, 3, 10
HOST_TYPES: Final = (CPU, _CUDA_HOST, 11)  # kDLROCMHost
_AMBIGUOUS: Final[dict[int, tuple[int, ...]]] = {_CUDA: (0,), _CUDA_HOST: (0,), _ROCM: (1, 2)}  # forbidden streams

# NumPy makes every capsule because its deleter is C code. A deleter in Python would lose an exception that is being
# raised when the array is freed. NumPy believes that all memory is the host's; we overwrite device and element type.
_NOWHERE: Final = 64  # NumPy refuses the address 0, and does not read this one


class DLTensor(ctypes.Structure):
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


CAPSULES: Final = ((b"dltensor", 0), (b"dltensor_versioned", 32))
"""Unversioned and versioned: name, and offset of the ``DLTensor`` after version, manager, deleter and flags."""
_READ_ONLY: Final = 1  # DLPACK_FLAG_BITMASK_READ_ONLY

# A separate library object, because any module can change argument types on the shared ctypes.pythonapi.
pointer_of = ctypes.PyDLL(None, handle=ctypes.pythonapi._handle).PyCapsule_GetPointer
pointer_of.restype = ctypes.c_void_p
pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _flags_at(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address + 24)


class _Base:
    """The base of a NumPy array; it keeps other objects alive as long as the array."""

    __slots__ = ("__array_interface__", "hold")

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


@functools.cache
def _exported() -> type[Any]:
    """Return the type of the arrays that capsules keep: NumPy's, with slots for objects that must stay alive."""
    import numpy as np

    class Exported(np.ndarray[Any, Any]):
        __slots__ = ("consumer", "hold")

    return Exported


@functools.cache
def _numpy_knows_versions() -> bool:
    """Whether NumPy makes versioned capsules (from 2.1). Consumers that ask for one accept the other kind too."""
    import numpy as np

    try:
        np.empty(0).__dlpack__(max_version=(1, 0))
    except TypeError:
        return False
    return True


# -- the view --------------------------------------------------------------------------------------------------------


class View(NoCopy):
    """A typed, strided view of a buffer for any array library. `Buffer.view` returns it.

    It has the protocols that fit the memory: DLPack everywhere, NumPy's ``__array__`` on the host, and
    ``__cuda_array_interface__`` on a GPU. The array that a library makes keeps the bytes mapped, even if you close the
    buffer; the view does not. The exception is ``__cuda_array_interface__``, used by ``cupy.asarray``: then the array
    keeps the view, and the view keeps the bytes, so drop both.

    Attributes
    ----------
    shape : tuple of int
        Number of elements in each dimension.
    strides : tuple of int
        Strides in bytes.
    ndim : int
        Number of dimensions.
    nbytes : int
        Number of elements times the element size.
    dtype : numpy.dtype
        Element type, which compares equal to its name. bfloat16, float8 and complex32 are types of ml_dtypes; if that
        is not installed, `dtype` is the name.
    ptr : int
        Address of the first element on the device.
    read_only : bool
        True if array libraries must not write, because another process shares an immutable array.

    Examples
    --------
    >>> view = buffer.view((2, 3), "float32")
    >>> view.shape, view.strides, view.nbytes
    ((2, 3), (12, 4), 24)
    >>> field = np.asarray(view)  # or torch.from_dlpack(view), cupy.from_dlpack(view)
    >>> field[:] = 1
    """

    _instead = "send view.to_numpy(), which is a copy, or bytes(gpuinterop.share(view))."
    _token: object = None  # the hold that the first use of `__cuda_array_interface__` takes

    def __init__(self, buffer: Buffer, layout: Layout, offset: int, *, read_only: bool = False) -> None:
        self._buffer = buffer
        self._layout = layout
        self.read_only = read_only
        self._pointer = buffer.address + offset
        self._start = offset + layout.low
        self.shape = layout.shape
        self.strides = layout.strides

    @property
    def dtype(self) -> Any:
        try:
            return self._layout.dtype.for_numpy()
        except (ImportError, AttributeError):
            return self._layout.dtype.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self._layout.dtype.itemsize

    @property
    def ptr(self) -> int:
        self._buffer._check_open()
        self._buffer.mapping.expose()
        return self._pointer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._layout.dtype.name}{list(self.shape)} of {self._buffer.label}>"

    def to_numpy(self) -> Any:
        """Copy to the host and return a NumPy array; works on any device (``cuMemcpyAsync`` / ``hipMemcpyAsync``).

        The copy waits for every stream that used these bytes through gpuinterop, and is complete on return. It also
        transfers the bytes between the elements of a strided view.

        Returns
        -------
        numpy.ndarray
            The view's shape and element type, C-contiguous and writable, in new memory.

        Raises
        ------
        ArgumentTypeError
            The element type needs ml_dtypes (bfloat16, for example), which is not installed.
        ValueError
            NumPy cannot describe the shape.
        ResourceBusyError
            On a GPU, one of those streams waits for a semaphore, so the copy would block and could deadlock.
            Synchronize the stream first.
        GpuInteropError
            Work on one of those streams has failed.
        InvalidArgumentError
            One of those streams is being captured.

        Examples
        --------
        >>> buffer.fill(7, stream=stream)
        >>> buffer.view((2, 3)).to_numpy()
        array([[7, 7, 7],
               [7, 7, 7]], dtype=uint8)
        """
        import numpy as np

        own, low = self._numpys_type(), self._layout.low
        raw = np.empty(self._layout.high - low, np.uint8)
        self._buffer.copy_to_host(raw, offset=self._start)
        return np.asarray(np.ndarray(self.shape, own, raw, -low, self.strides), order="C")

    def copy_from(self, source: Any, *, stream: Stream | object = None) -> None:
        """Copy a view of the same device, or host memory, into this view (``cuMemcpyAsync`` / ``hipMemcpyAsync``).

        Both must have no gaps between elements, and store them in the same order.

        Parameters
        ----------
        source : View, numpy.ndarray, or CPU tensor of torch
            Must have the same shape and element type. If this view is C-contiguous, a host array can have any strides.
            If you pass a stream, do not change the source until the stream has copied it.
        stream : Stream, optional
            Stream that does the copy. With None, the copy waits for every stream that used the bytes of either side
            through gpuinterop, and is complete on return.

        Raises
        ------
        ArgumentTypeError
            `source` is neither a view on this device nor host memory.
        InvalidArgumentError
            Shapes, element types or strides differ, elements have gaps between them, source and target share bytes,
            this view is read-only, or `stream` belongs to another device.
        ResourceBusyError
            See `Buffer.copy_from_host`.

        Examples
        --------
        >>> frame, kept = buffer.view((2, 3)), buffer.view((2, 3), offset=256)
        >>> frame.copy_from(np.full((2, 3), 7, np.uint8))
        >>> kept.copy_from(frame, stream=stream)
        >>> kept.to_numpy()
        array([[7, 7, 7],
               [7, 7, 7]], dtype=uint8)
        """
        buffer, mine = self._buffer, self._layout
        is_ours = isinstance(source, View) and source._buffer.device is buffer.device
        array = None if is_ours else HostArray(source, argument="source", writable=False)
        theirs = source._layout if is_ours else described(source, "source", in_place=False).layout
        if array is not None:  # a `HostArray` has C order
            theirs = layout_of(theirs.shape, theirs.dtype.name, None)
        if (order := dense_order(mine)) is None or order != dense_order(theirs):
            raise InvalidArgumentError(
                "source",
                f"expected {mine}, in which each byte belongs to one element, got {theirs}; pass its to_numpy(), or "
                "copy with a library, for example torch.from_dlpack(view).copy_(other).",
            )
        if self.read_only:
            raise InvalidArgumentError("view", f"expected a writable view, got {self!r} of immutable bytes.")
        if array is not None:
            buffer._copy(array, "source", self._start, stream, to_host=False)
            return
        there, first = source._buffer, source._pointer + theirs.low
        if abs(first - self._pointer - mine.low) < self.nbytes:
            raise InvalidArgumentError("source", f"expected bytes outside of {self!r}, got an overlap; copy twice.")

        def copy(_: object) -> None:
            buffer._copy_from(first, self.nbytes, offset=self._start, stream=stream, owners=[(there, source._start)])

        there.lifetime.use(copy)  # keeps the source mapped until its use on the stream is noted

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._buffer.device.info.dlpack

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule, following the rules of the array API.

        Parameters
        ----------
        stream : int, optional
            The consumer's stream. It will wait for every stream that used the buffer through gpuinterop. CUDA: None and
            1 are the legacy default stream, 2 is the per-thread default stream, -1 means no ordering, 0 is refused.
            ROCm: None and 0 are the default stream, -1 means no ordering, 1 and 2 are refused. CPU: None or -1; the
            call itself waits for those streams, because CPU consumers have no streams.
        max_version, dl_device, copy
            See the array API. A copy is never made.

        Raises
        ------
        BufferError
            The consumer asks for a copy or another device, a stride is not a multiple of the element size, or the shape
            has more dimensions than NumPy supports (64; 32 before NumPy 2).
        InvalidArgumentError
            The array API refuses this stream.

        Examples
        --------
        >>> view = buffer.view(4, "float32")
        >>> np.from_dlpack(view)
        array([0., 0., 0., 0.], dtype=float32)
        """
        buffer, layout = self._buffer, self._layout
        device = buffer.device.info.dlpack
        _check_request(stream, max_version, dl_device, copy, device)
        if (misfit := layout.misfit) is not None:
            raise BufferError(
                f"DLPack counts strides in elements: expected a multiple of {self._layout.dtype.itemsize} bytes, got "
                f"{misfit}; use {'numpy.asarray' if self._is_of_host() else 'cupy.asarray'}, or a view of bytes."
            )
        array = layout.blank_array(self)
        array.hold = buffer.hold()  # before the wait, during which the buffer may be closed
        array.consumer = self._order(stream, device[0])
        versioned = max_version is not None and max_version[0] >= 1 and _numpy_knows_versions()
        return _capsule_at(array, self._pointer, layout, device, versioned=versioned, read_only=self.read_only)

    def _order(self, stream: int | None, device_type: int) -> Stream | None:
        """Return the consumer's stream. The array keeps it, so that the release waits for its work."""
        if stream == -1:
            return None
        buffer = self._buffer
        if device_type == CPU:
            buffer._wait_for_users()
            return None
        if stream is None:
            stream = 0 if device_type == _ROCM else 1
        consumer = buffer.device._consumer(stream)
        if not buffer._is_used_by(consumer):  # skips the most frequent case
            for user in buffer._users(consumer):
                if user.elsewhere or not user.uncaptured(buffer.driver.is_idle, True):
                    consumer._follow(user)
            buffer._use_on(consumer, 0, buffer._size)
        return consumer

    def _described(self) -> Described:
        """Describe the view as an array to share. The description keeps the bytes mapped."""
        keep = self, self._buffer.hold()
        if self._is_of_host():
            self._buffer._wait_for_users()  # as for other CPU consumers
        return Described(self.__dlpack_device__(), self._pointer, self._layout, self.read_only, keep)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface of GPU memory. From the first access on, the view keeps the bytes mapped.

        A library keeps only the view alive with its array, so nothing else could keep the bytes.
        """
        if self._is_of_host():  # a library would pass the pointer to a GPU
            raise AttributeError("memory of the host has no __cuda_array_interface__; use numpy.asarray(view).")
        if not (dtype := self._layout.dtype).is_numpys:
            raise AttributeError(
                f"__cuda_array_interface__ has no name for {dtype.name}; use from_dlpack(view), or a view of "
                f"'uint{dtype.bits}'."
            )
        token = self._token or self._buffer.hold()
        self._buffer._check_open()
        self._token = token
        interface = self._layout.interface(self._pointer, self.read_only)
        if users := self._buffer._users(None):
            interface["stream"] = self._behind(users) or 1
        return interface

    def _behind(self, users: list[KnownStream]) -> int:
        """Return the one stream that the interface can name; it waits for the users."""
        if len(users) == 1 and users[0].state is LIVE and not users[0].elsewhere:
            return users[0].pointer
        meeting: Stream | None = self.__dict__.get("_meeting")
        if meeting is None:  # a stream for this view, so that no unrelated work waits for the users
            fresh = self._buffer.device.create_stream()
            fresh.lifetime.warns = False
            meeting = self.__dict__.setdefault("_meeting", fresh)  # another thread may have been first
        for user in users:
            meeting._follow(user)
        return meeting.ptr

    def __buffer__(self, flags: int) -> memoryview:
        """Return host memory as a `memoryview` (PEP 688, Python 3.12 and newer). It counts as an exported array.

        Raises
        ------
        ArgumentTypeError
            The memory is not on the host, or the buffer protocol has no format for the elements, such as bfloat16.
        """
        if not self._is_of_host():
            self._refuse_numpy()
        if not (dtype := self._layout.dtype).is_numpys:
            raise ArgumentTypeError(
                "view",
                f"expected elements with a format of the buffer protocol, got {self!r}; take a view of "
                f"'uint{dtype.bits}'.",
            )
        return memoryview(self.__array__())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return a NumPy array on host memory, without a copy. NumPy calls this.

        Raises
        ------
        ArgumentTypeError
            The memory is not on the host, or the element type needs ml_dtypes, which is not installed.
        BufferError
            NumPy cannot describe the shape.
        """
        import numpy as np

        if not self._is_of_host():
            self._refuse_numpy()
        own = self._numpys_type()
        array = self._layout.array(self._pointer, self.read_only, self)
        array.base.hold = self._buffer.hold()
        self._buffer._wait_for_users()  # CPU consumers have no streams
        array = array.view(own)
        return np.asarray(array, dtype) if copy is None else np.array(array, dtype, copy=copy)

    def _numpys_type(self) -> Any:
        try:
            return self._layout.dtype.for_numpy()
        except (ImportError, AttributeError):
            raise ArgumentTypeError(
                "view",
                f"expected an element type of NumPy, got {self!r}: pip install ml_dtypes, whose newest version adds "
                f"{self._layout.dtype.name} to NumPy, or use torch.from_dlpack(view).",
            ) from None

    def _is_of_host(self) -> bool:
        return self._buffer.device.info.array_interface == "__array_interface__"

    def _refuse_numpy(self) -> NoReturn:
        raise ArgumentTypeError(
            "view",
            f"expected memory of the host, got {self!r} on {self._buffer.device.name}; use torch.from_dlpack(view) or "
            "cupy.asarray(view), or copy it to the host with view.to_numpy().",
        )


def capsule_of(layout: Layout, pointer: int, device: tuple[int, int], hold: object) -> Any:
    """Return a capsule of memory that stays valid as long as `hold`. No stream is ordered."""
    array = layout.blank_array("a tensor")
    array.hold = hold
    return _capsule_at(array, pointer, layout, device, versioned=False, read_only=False)


def _capsule_at(
    array: Any, pointer: int, layout: Layout, device: tuple[int, int], *, versioned: bool, read_only: bool
) -> Any:
    capsule = array.__dlpack__(max_version=(1, 0)) if versioned else array.__dlpack__()
    name, offset = CAPSULES[versioned]
    address = pointer_of(capsule, name)
    if versioned and read_only:  # unversioned capsules cannot express it
        _flags_at(address).value |= _READ_ONLY
    tensor = DLTensor.from_address(address + offset)
    tensor.data, tensor.code = pointer, layout.dtype.code
    tensor.device_type, tensor.device_id = device
    return capsule


def _check_request(stream: Any, max_version: Any, dl_device: Any, copy: bool | None, device: tuple[int, int]) -> None:
    """Raise if the array API forbids the request, or a view cannot fulfil it."""
    if max_version is not None and not (isinstance(max_version, tuple) and len(max_version) == 2):
        raise ArgumentTypeError("max_version", f"expected a pair of ints or None, got {max_version!r}.")
    if dl_device is not None:
        if not (isinstance(dl_device, tuple) and len(dl_device) == 2):
            raise ArgumentTypeError("dl_device", f"expected a pair of ints or None, got {dl_device!r}.")
        if dl_device != device:
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
        default, allowed = ("0", "0") if device[0] == _ROCM else ("1", "1, 2")
        raise InvalidArgumentError(
            "stream", f"expected {allowed} or a stream's address, got {stream}; pass {default} for the default stream."
        )


# -- arrays of other libraries -----------------------------------------------------------------------------------------


class Described(NamedTuple):
    """An array of any library: its memory, its layout, and the objects that keep both alive."""

    place: tuple[int, int] | str  # DLPack's device, or the name of the interface, which does not contain the device
    pointer: int
    layout: Layout
    read_only: bool
    keep: tuple[Any, object]  # the array, and what its library returned for it
    data_ptr: object = None  # the array's `data_ptr`, if it has one: torch can move an array to other memory

    @property
    def span(self) -> tuple[int, int]:
        """Addresses of the first byte, and after the last byte."""
        return self.pointer + self.layout.low, self.pointer + self.layout.high

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The bytes for NumPy, as numbers of the element size. NumPy keeps this object alive."""
        return self.layout.interface(self.pointer, self.read_only)


def described(array: Any, argument: str, *, in_place: bool) -> Described:
    """Describe an array through DLPack or an array interface, without ordering a stream.

    It is a copy only if a tensor's bytes are not its values, and the array need not be used in place.
    """
    if isinstance(array, View):
        return array._described()
    array = with_values(array, argument, in_place=in_place)
    problem = ""
    for way in (_by_dlpack, _by_interface):  # the interface serves ml_dtypes' element types and older libraries
        if isinstance(found := way(array), Described):
            return found
        problem = found or problem
    kind = f"{type(array).__module__}.{type(array).__qualname__}"
    if problem:
        raise InvalidArgumentError(argument, f"expected an array that DLPack can describe, got a {kind}: {problem}")
    from_lists = "numpy.asarray(...) of a list or numpy.frombuffer(...) of bytes"
    instead = "a view of it, such as view(shape, dtype)" if isinstance(array, NotAnArray) else from_lists
    raise ArgumentTypeError(
        argument, f"expected an array with __dlpack__ or an array interface, got {kind}; pass {instead}."
    )


def with_values(array: Any, argument: str, *, in_place: bool) -> Any:
    """Return the array, or a copy, whose bytes are its values. Every call that takes an array asks this first."""
    problem = hidden_values(array)
    if not problem and _is_torchs(array) and (array.is_conj() or array.is_neg()):
        if not in_place and array.is_cpu:  # on a GPU, torch's current stream would do it, which we do not wait for
            return array.resolve_conj().resolve_neg()
        problem = "one with a conjugate or negative bit; pass x.resolve_conj().resolve_neg(), which is a copy"
    if problem:
        raise InvalidArgumentError(argument, f"expected an array whose memory has its values, got {problem}.")
    return array


def _is_torchs(array: Any) -> bool:
    """Whether it is a torch tensor. Does not import torch."""
    return hasattr(type(array), "__torch_dispatch__")


def hidden_values(array: Any) -> str:
    """Describe an array whose memory does not contain its values, with what to pass; empty for others."""
    if isinstance(array, NoCopy):  # gpuinterop's own; to ask for its interface would hold its bytes
        return ""
    if not _is_torchs(array):
        return _left_out(array)
    # torch may compute values later, or elsewhere.
    dispatch = type(array).__torch_dispatch__
    if not isinstance(dispatch, BuiltinFunctionType):
        return f"a {type(array).__name__}, whose class computes them; pass a plain tensor, such as DTensor.to_local()"
    try:
        if array.is_quantized or array.is_nested or str(array.layout) != "torch.strided":
            return "a quantized, nested or sparse one; pass x.dequantize(), x.values() or x.to_dense()"
        if array.untyped_storage().data_ptr() or not array.numel():
            return ""
        reason = f"on {array.device}"
    except Exception as error:  # torch has several, for tensors without storage
        reason = str(error).rstrip(".")
    return f"one without memory ({reason}); pass x.clone() of a zero tensor, else a tensor from outside of torch.func"


def _left_out(array: Any) -> str:
    """What `hidden_values` says of other libraries' arrays: masks and nulls are not in the memory."""
    kind, interface = type(array).__name__, _interface(array)
    mask: Any = None
    nulls: Any = 0
    with suppress(Exception):  # of JAX's tracers, and of what a class computes
        if getattr(array, "is_deleted", bool)():
            return f"a deleted or donated one of type {kind}; pass what the jitted function returned"
        mask = getattr(array, "mask", None) if hasattr(type(array), "mask") else None  # a recarray's can be a field
        nulls = getattr(array, "null_count", 0)  # PyArrow's number, and a method of polars
        nulls = nulls() if callable(nulls) else nulls
    if not hasattr(mask, "dtype"):  # pandas has a method of that name
        mask = interface and interface[1].get("mask")
    if mask is not None or (isinstance(nulls, int) and nulls):
        return f"one of type {kind} with a mask or nulls; pass plain values: x.filled(0), x.fill_null(0) or x.data"
    return ""


def _by_dlpack(array: Any) -> Described | str:
    if not hasattr(array, "__dlpack__"):
        return ""
    place, on_host, is_torchs = None, False, _is_torchs(array)
    try:
        if is_torchs:  # its method is slow, and refuses gradients and devices other than the current one
            capsule = sys.modules["torch"].to_dlpack(array)
        else:
            kind, number = array.__dlpack_device__()
            place = int(kind), int(number)
            on_host = place[0] in HOST_TYPES
            capsule = _capsule(array, {} if on_host else {"stream": -1})
        name, offset = CAPSULES["dltensor_versioned" in repr(capsule)]
        address = pointer_of(capsule, name)
    except Exception as error:  # each library has its own, for element types or tracers
        return f"{str(error).rstrip('.')}."
    tensor = DLTensor.from_address(address + offset)
    count = tensor.ndim
    steps = tuple(tensor.strides[:count]) if tensor.strides else None
    layout = _dlpack_layout(tuple(tensor.shape[:count]), steps, tensor.code, tensor.bits, tensor.lanes)
    if isinstance(layout, str):
        return layout
    # An unversioned capsule has no read-only flag. JAX shows it in the array interface, or on the CPU in NumPy's array.
    if offset:
        read_only = bool(_flags_at(address).value & _READ_ONLY)
    else:
        read_only = not is_torchs and _is_read_only(array, on_host=on_host)
    place, pointer = place or (tensor.device_type, tensor.device_id), (tensor.data or 0) + tensor.byte_offset
    return Described(place, pointer, layout, read_only, (array, capsule), _data_ptr(array))


@functools.lru_cache(1024)
def _dlpack_layout(
    shape: tuple[int, ...], steps: tuple[int, ...] | None, code: int, bits: int, lanes: int
) -> Layout | str:
    dtype = _NAMES.get((code, bits))
    if dtype is None or lanes != 1:
        return f"the element type (code {code}, {bits} bits) is not supported; take a view of uint8."
    return _known_layout(shape, dtype, None if steps is None else tuple(step * bits // 8 for step in steps))


def _capsule(array: Any, stream: dict[str, int]) -> Any:
    last = {"max_version": (1, 0)}
    for more in (last | stream, stream, last):
        try:
            return array.__dlpack__(**more)
        except (TypeError, RuntimeError):  # an older protocol; JAX 0.11 does not accept stream -1
            if more is last:
                raise


def _data_ptr(array: Any) -> object:
    ask = getattr(array, "data_ptr", None)
    return ask() if callable(ask) else None


def _interface(array: object) -> tuple[str, dict[str, Any]] | None:
    for name in ("__cuda_array_interface__", "__array_interface__"):
        try:
            if isinstance(found := getattr(array, name, None), dict):
                return name, found
        except Exception:  # torch, for element types without a name in the interface
            pass
    return None


def _is_read_only(array: Any, *, on_host: bool) -> bool:
    if (found := _interface(array)) is not None:
        return bool(found[1]["data"][1])
    with suppress(Exception):  # each library has its own
        return on_host and not array.__array__().flags.writeable
    return False


def _by_interface(array: Any) -> Described | str:
    if (found := _interface(array)) is None:
        return ""
    name, facts = found
    if not isinstance(data := facts.get("data"), tuple | list):  # bytes in PIL's images
        return f"its {name} has no address, but data of type {type(data).__name__}; pass numpy.asarray(x)."
    try:
        pointer, read_only = data
        shape, dtype, strides = facts["shape"], facts["typestr"], facts.get("strides") or None
        try:
            layout = layout_of(shape, dtype, strides)
        except ArgumentTypeError:  # ml_dtypes' types have no name in the interface
            dtype = getattr(array, "dtype", dtype)
            layout = layout_of(shape, dtype, strides)
        place = (CPU, 0) if name == "__array_interface__" else name
        return Described(place, int(pointer or 0), layout, bool(read_only), (array, facts), _data_ptr(array))
    except ArgumentTypeError as error:
        return f"DLPack has no element type {_instead_of(dtype)}." if error.argument == "dtype" else str(error)
    except (LookupError, TypeError, ValueError) as error:
        return f"its {name} has {type(error).__name__}: {str(error).rstrip('.')}."


# -- host memory of callers --------------------------------------------------------------------------------------------


def _as_array(array: Any, argument: str, *, writable: bool) -> Any:
    """Wrap host memory as a NumPy array over the same bytes, never over a copy."""
    import numpy as np

    try:
        return np.asarray(memoryview(array))
    except (TypeError, ValueError, BufferError):  # not a buffer, or an element type without a buffer format
        problem = "it is neither a NumPy array nor a buffer"
    if hasattr(array, "__array_interface__") or hasattr(array, "__array__"):
        try:
            seen = np.asarray(array)
            if not (writable and seen.nbytes) or _is_torchs(array) or np.asarray(array).ctypes.data == seen.ctypes.data:
                return seen
            problem = "NumPy gets a copy of it, whose bytes would be lost"
        except Exception as error:  # torch: a CUDA tensor, or an element type that NumPy lacks
            problem = str(error)
    # autograd would not notice a write into a tensor that requires a gradient.
    found = "" if writable and getattr(array, "requires_grad", False) else _by_dlpack(array)
    if isinstance(found, Described) and found.place[0] in HOST_TYPES:
        return np.asarray(found)
    raise ArgumentTypeError(argument, f"expected host memory, got {type(array).__name__} ({problem}).")


class HostArray:
    """A caller's host memory during a copy."""

    __slots__ = ("keep", "nbytes", "pageable", "ptr")

    def __init__(self, array: object, *, argument: str, writable: bool) -> None:
        import numpy as np

        if type(array) is not np.ndarray:
            array = with_values(array, argument, in_place=writable)
        found = array if isinstance(array, np.ndarray) else _as_array(array, argument, writable=writable)
        if found.dtype.hasobject:
            raise ArgumentTypeError(argument, f"expected numbers, got elements of {_instead_of(found.dtype)}.")
        if writable and not found.flags.writeable:
            raise InvalidArgumentError(argument, "is read-only; pass a writable array.")
        if writable and not found.flags.c_contiguous:
            raise InvalidArgumentError(argument, "is not contiguous; copy into a contiguous array first.")
        if not found.flags.c_contiguous:
            found = np.ascontiguousarray(found)
        pinned = getattr(array, "is_pinned", None)
        self.pageable = not (callable(pinned) and pinned())
        self.keep = found
        self.ptr: int = found.ctypes.data
        self.nbytes: int = found.nbytes
