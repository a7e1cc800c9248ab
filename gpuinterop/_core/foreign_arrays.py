"""Arrays of other libraries: address, layout, and whether the memory has the values."""

from __future__ import annotations

import functools
import sys
from abc import abstractmethod
from contextlib import suppress
from types import BuiltinFunctionType
from typing import Any, NamedTuple

from .._arguments import NoCopy, NotAnArray
from ..errors import ArgumentTypeError, InvalidArgumentError
from .dlpack import CAPSULES, CPU, HOST_TYPES, READ_ONLY, DLTensor, flags_at, pointer_of
from .layout import NAMES, Layout, instead_of, known_layout, layout_of


class Described(NamedTuple):
    """An array of any library: its memory, its layout, and the objects that keep both alive."""

    place: tuple[int, int] | str  # DLPack's device, or the name of the interface, which does not contain the device
    pointer: int
    layout: Layout
    read_only: bool
    keep: tuple[Any, object]  # the array, and what its library returned for it
    data_ptr: object = None  # of an array with a `data_ptr` method: torch can move the array to other memory

    @property
    def span(self) -> tuple[int, int]:
        """Addresses of the first byte, and after the last byte."""
        return self.pointer + self.layout.low, self.pointer + self.layout.high

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The bytes for NumPy, as numbers of the element size. NumPy keeps this object alive."""
        return self.layout.interface(self.pointer, self.read_only)


class Describable(NoCopy):
    """An array of gpuinterop, which describes itself."""

    @abstractmethod
    def _described(self) -> Described:
        """Describe the array. The description keeps its bytes mapped."""


def described(array: Any, argument: str, *, in_place: bool) -> Described:
    """Describe an array through DLPack or an array interface, without ordering a stream.

    It is a copy only if a tensor's bytes are not its values, and the array need not be used in place.
    """
    if isinstance(array, Describable):
        return array._described()
    array = with_values(array, argument, in_place=in_place)
    problem = ""
    for describe in (by_dlpack, _by_interface):  # the interface serves ml_dtypes' element types and older libraries
        if isinstance(answer := describe(array), Described):
            return answer
        problem = answer or problem
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
    if not problem and is_torch(array) and (array.is_conj() or array.is_neg()):
        if not in_place and array.is_cpu:  # on a GPU, torch's current stream would do it, which we do not wait for
            return array.resolve_conj().resolve_neg()
        problem = "one with a conjugate or negative bit; pass x.resolve_conj().resolve_neg(), which is a copy"
    if problem:
        raise InvalidArgumentError(argument, f"expected an array whose memory has its values, got {problem}.")
    return array


def is_torch(array: Any) -> bool:
    """Whether it is a torch tensor. Does not import torch."""
    return hasattr(type(array), "__torch_dispatch__")


def hidden_values(array: Any) -> str:
    """Describe an array whose memory does not contain its values, with what to pass; empty for others."""
    if isinstance(array, NoCopy):  # gpuinterop's own; to ask for its interface would hold its bytes
        return ""
    if not is_torch(array):
        return _mask_or_nulls(array)
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


def _mask_or_nulls(array: Any) -> str:
    """What `hidden_values` returns for libraries other than torch: masks and nulls are not in the memory."""
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


def by_dlpack(array: Any) -> Described | str:
    """Describe an array through DLPack, or return why it cannot; empty without that protocol."""
    if not hasattr(array, "__dlpack__"):
        return ""
    place, on_host, of_torch = None, False, is_torch(array)
    try:
        if of_torch:  # its method is slow, and refuses gradients and devices other than the current one
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
        read_only = bool(flags_at(address).value & READ_ONLY)
    else:
        read_only = not of_torch and _is_read_only(array, on_host=on_host)
    place, pointer = place or (tensor.device_type, tensor.device_id), (tensor.data or 0) + tensor.byte_offset
    return Described(place, pointer, layout, read_only, (array, capsule), _data_ptr(array))


@functools.lru_cache(1024)
def _dlpack_layout(
    shape: tuple[int, ...], steps: tuple[int, ...] | None, code: int, bits: int, lanes: int
) -> Layout | str:
    dtype = NAMES.get((code, bits))
    if dtype is None or lanes != 1:
        return f"the element type (code {code}, {bits} bits) is not supported; take a view of uint8."
    return known_layout(shape, dtype, None if steps is None else tuple(step * bits // 8 for step in steps))


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
            if isinstance(interface := getattr(array, name, None), dict):
                return name, interface
        except Exception:  # torch, for element types without a name in the interface
            pass
    return None


def _is_read_only(array: Any, *, on_host: bool) -> bool:
    if (interface := _interface(array)) is not None:
        return bool(interface[1]["data"][1])
    with suppress(Exception):  # each library has its own
        return on_host and not array.__array__().flags.writeable
    return False


def _by_interface(array: Any) -> Described | str:
    if (interface := _interface(array)) is None:
        return ""
    name, facts = interface
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
        return f"DLPack has no element type {instead_of(dtype)}." if error.argument == "dtype" else str(error)
    except (LookupError, TypeError, ValueError) as error:
        return f"its {name} has {type(error).__name__}: {str(error).rstrip('.')}."
