"""The host memory that a caller copies from or to, in C order.

In the core, only this module, `layout`, `dlpack` and `view` import NumPy, on first use.
"""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentTypeError, InvalidArgumentError
from .dlpack import HOST_TYPES
from .foreign_arrays import Described, by_dlpack, is_torch, with_values
from .layout import instead_of


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
            if not (writable and seen.nbytes) or is_torch(array) or np.asarray(array).ctypes.data == seen.ctypes.data:
                return seen
            problem = "NumPy gets a copy of it, whose bytes would be lost"
        except Exception as error:  # torch: a CUDA tensor, or an element type that NumPy lacks
            problem = str(error)
    # autograd would not notice a write into a tensor that requires a gradient.
    description = "" if writable and getattr(array, "requires_grad", False) else by_dlpack(array)
    if isinstance(description, Described) and description.place[0] in HOST_TYPES:
        return np.asarray(description)
    raise ArgumentTypeError(argument, f"expected host memory, got {type(array).__name__} ({problem}).")


class HostArray:
    """A caller's host memory during a copy."""

    __slots__ = ("keep", "nbytes", "pageable", "ptr")

    def __init__(self, array: object, *, argument: str, writable: bool) -> None:
        import numpy as np

        if type(array) is not np.ndarray:
            array = with_values(array, argument, in_place=writable)
        host = array if isinstance(array, np.ndarray) else _as_array(array, argument, writable=writable)
        if host.dtype.hasobject:
            raise ArgumentTypeError(argument, f"expected numbers, got elements of {instead_of(host.dtype)}.")
        if writable and not host.flags.writeable:
            raise InvalidArgumentError(argument, "is read-only; pass a writable array.")
        if writable and not host.flags.c_contiguous:
            raise InvalidArgumentError(argument, "is not contiguous; copy into a contiguous array first.")
        pinned = getattr(array, "is_pinned", None)
        self.pageable = not (callable(pinned) and pinned())
        self.keep = host if host.flags.c_contiguous else np.ascontiguousarray(host)
        self.ptr: int = self.keep.ctypes.data
        self.nbytes: int = self.keep.nbytes
