"""Layouts: element types, shapes and strides of arrays."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from .._arguments import MAX_SIZE, check_int
from ..errors import ArgumentTypeError, InvalidArgumentError

# DLPack's (code, bits) of each element type
TYPES: Final = {
    "bool": (6, 8), "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64), "uint8": (1, 8),
    "uint16": (1, 16), "uint32": (1, 32), "uint64": (1, 64), "float16": (2, 16), "float32": (2, 32), "float64": (2, 64),
    "complex64": (5, 64), "complex128": (5, 128), "complex32": (5, 32), "bfloat16": (4, 16), "float8_e3m4": (7, 8),
    "float8_e4m3": (8, 8), "float8_e4m3b11fnuz": (9, 8), "float8_e4m3fn": (10, 8), "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8), "float8_e5m2fnuz": (13, 8), "float8_e8m0fnu": (14, 8),
}  # fmt: skip
NAMES: Final = {facts: name for name, facts in TYPES.items()}


class DType:
    """An element type and its names in DLPack and the array interfaces."""

    __slots__ = ("alignment", "bits", "code", "in_numpy", "itemsize", "name", "typestr")

    def __init__(self, dtype: object) -> None:
        import numpy as np

        name = str(dtype).removeprefix("torch.")
        if name not in TYPES:
            with suppress(Exception):  # NumPy raises several types when it parses a string
                parsed = np.dtype(dtype)  # type: ignore[call-overload]
                name = parsed.name if parsed.isnative and dtype is not None else ""  # NumPy reads None as float64
        if name not in TYPES:
            raise ArgumentTypeError("dtype", f"expected one of {', '.join(TYPES)}, got {instead_of(dtype)}.")
        self.name, (self.code, self.bits) = name, TYPES[name]
        self.in_numpy = not name.startswith(("complex32", "bfloat16", "float8"))  # ml_dtypes adds these
        self.typestr = np.dtype(name if self.in_numpy else f"uint{self.bits}").str
        self.itemsize = self.bits // 8
        self.alignment = self.itemsize // 2 if self.code == 5 else self.itemsize

    def for_numpy(self) -> Any:
        """Return NumPy's dtype. Raise `ImportError` or `AttributeError` if it needs ml_dtypes, or a newer one."""
        import numpy as np

        if self.in_numpy:
            return np.dtype(self.typestr)
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, self.name))


def instead_of(dtype: object) -> str:
    """Name an element type that only NumPy has, and what to take instead."""
    is_addresses = getattr(dtype, "hasobject", dtype is object or dtype == "object")
    got = dtype if hasattr(dtype, "hasobject") else repr(dtype)
    return f"{got}; take {'numbers, not objects' if is_addresses else 'bytes (uint8), and view those'}"


def resolve_ints(values: Sequence[int], argument: str, *, minimum: int = -MAX_SIZE) -> tuple[int, ...]:
    """Return a tuple of ints, or raise an error that names the argument."""
    try:
        if isinstance(values, str | bytes):  # these are sequences too
            raise TypeError
        listed = tuple(values)
    except TypeError:
        raise ArgumentTypeError(argument, f"expected a sequence of ints, got {values!r}.") from None
    if set(map(type, listed)) <= {int} and minimum <= min(listed, default=0) <= max(listed, default=0) <= MAX_SIZE:
        return listed
    return tuple(check_int(value, argument, minimum=minimum, maximum=MAX_SIZE) for value in listed)


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for dim in reversed(shape):
        strides.append(step)
        step *= max(dim, 1)
    return tuple(reversed(strides))


class _Base:
    """The base of a NumPy array; it keeps other objects alive as long as the array."""

    __slots__ = ("__array_interface__", "hold")

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


class Layout:
    """Shape, element type and strides of a view, with derived values. `layout_of` makes it once for all such views."""

    __slots__ = ("blank", "dtype", "high", "low", "shape", "strides", "unaligned_stride")

    def __init__(self, shape: tuple[int, ...], dtype: object, strides: tuple[int, ...] | None) -> None:
        self.shape = shape
        self.dtype = _known_type(dtype) if isinstance(dtype, str) else DType(dtype)
        size = self.dtype.itemsize
        self.strides = _contiguous(shape, size) if strides is None else strides
        if len(self.strides) != len(shape):
            got = len(self.strides)
            raise InvalidArgumentError("strides", f"expected {len(shape)} entries, as in shape, got {got}.")
        reaches = [] if 0 in shape else [(dim - 1) * stride for dim, stride in zip(shape, self.strides, strict=True)]
        self.low = sum(reach for reach in reaches if reach < 0)  # first byte used, relative to the first element
        self.high = 0 if 0 in shape else size + sum(reach for reach in reaches if reach > 0)  # end of the last byte
        # DLPack cannot express a stride that is not a multiple of the element size.
        self.unaligned_stride = next((stride for stride in self.strides if stride % size), None)
        self.blank: Any = None  # see `dlpack.blank_array`

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.dtype.name}, strides {list(self.strides)}"

    def array(self, address: int, read_only: bool, whose: object) -> Any:
        """Return a NumPy array at an address. Its base has a slot for what must stay alive; it is still empty."""
        import numpy as np

        try:
            return np.asarray(_Base(self.interface(address, read_only)))
        except (ValueError, OverflowError) as error:  # too many dimensions, or larger than the address space
            raise BufferError(f"expected a shape that NumPy can describe, got {whose}: {error}.") from None

    def interface(self, pointer: int, read_only: bool) -> dict[str, Any]:
        """Return the array interface of elements at an address, as numbers of their size."""
        data, typestr = (pointer, read_only), self.dtype.typestr
        return {"shape": self.shape, "strides": self.strides, "typestr": typestr, "data": data, "version": 3}


_known_type = functools.lru_cache(256)(DType)
known_layout = functools.lru_cache(1024)(Layout)
_MOST_PLACES: Final = 1 << 16  # elements that `overlap` compares at most


def layout_of(shape: int | Sequence[int], dtype: Any, strides: Sequence[int] | None) -> Layout:
    is_count = type(shape) is not tuple and not isinstance(shape, Iterable)
    dims = resolve_ints((shape,) if is_count else shape, "shape", minimum=0)  # type: ignore[arg-type]
    steps = None if strides is None else resolve_ints(strides, "strides")
    make = known_layout if isinstance(dtype, Hashable) else Layout
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
