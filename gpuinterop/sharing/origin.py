"""What an array is, and what memory it lies in: it is asked, and nothing is exported to find out."""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, TypeAlias, cast

from .._arguments import NotAnArray
from .._core.device import Device
from .._core.interchange import CAPSULES, DLTensor, DType, contiguous, pointer_of, span
from .._core.registry import search
from ..backend import Behind, Block, SharingBackend
from ..capabilities import Capability, Cell, Operation, Scope
from ..errors import ArgumentTypeError, HandleError, InvalidArgumentError, ResourceClosedError, UnsupportedError
from ..handles import OpaqueFd, VmmFd
from .descriptor import Placed, Region

_CPU, _CUDA, _MANAGED = 1, 2, 13  # kDLCPU, kDLCUDA, kDLCUDAManaged
_HOST_TYPES: Final = (_CPU, 3, 11)  # kDLCUDAHost, kDLROCMHost
_READ_ONLY: Final = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_FLAGS_AT: Final = 24
_CODES: Final = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """An array of any library: its memory, its layout, and an object that keeps both."""

    place: tuple[int, int] | str
    """DLPack's device; the name of the interface, if that does not say."""
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    read_only: bool
    keep: tuple[object, object]
    data_ptr: object = None
    """What `_data_ptr` gives, where the array has it."""

    @property
    def span(self) -> tuple[int, int]:
        """Addresses of the first byte, and behind the last."""
        low, high = span(self.shape, self.strides, DType(self.dtype).itemsize)
        return self.pointer + low, self.pointer + high


def _data_ptr(array: object) -> object:
    """The address that torch gives: its storage may be given other memory. Other libraries' capsules keep theirs."""
    ask = getattr(array, "data_ptr", None)
    return ask() if callable(ask) else None


def describe(array: object, name: str) -> Described:
    """Describe an array by DLPack or an array interface, without a copy, and without ordering any stream."""
    found = _by_dlpack(array) if hasattr(array, "__dlpack__") else _by_interface(array, name)
    if isinstance(found, str):
        raise InvalidArgumentError(name, f"expected an array that DLPack can describe, got a {_kind(array)}: {found}")
    if 0 in found.shape:
        raise InvalidArgumentError(name, f"expected an array with elements, got the shape {list(found.shape)}.")
    reach = DType(found.dtype).itemsize
    for step, count in sorted((abs(step), count) for step, count in zip(found.strides, found.shape, strict=True)):
        if count > 1 and step < reach:
            raise InvalidArgumentError(
                name,
                f"expected elements that each have their own bytes, got the strides {list(found.strides)}, by which "
                "some overlap; take the array that it is a view of, or a copy.",
            )
        reach += (count - 1) * step
    return found


def _kind(array: object) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"


def _by_dlpack(array: Any) -> Described | str:
    try:
        place = tuple(map(int, array.__dlpack_device__()))
        capsule = _capsule(array, {} if place[0] in _HOST_TYPES else {"stream": -1})
    except Exception as error:  # each library has its own: a tensor that requires a gradient, a sparse one
        return f"{str(error).rstrip('.')}."
    found = next((one for one in CAPSULES if f'"{one[0].decode()}"' in repr(capsule)), None)
    if found is None:
        return f"{capsule!r} is not a capsule of DLPack."
    address, offset = pointer_of(capsule, found[0]), found[1]
    # A capsule without a version says nothing of it: JAX's array interface does, and on the CPU its array of NumPy.
    if offset:
        read_only = ctypes.c_uint64.from_address(address + _FLAGS_AT).value & _READ_ONLY
    else:
        read_only = _is_read_only(array, on_host=place[0] in _HOST_TYPES)
    tensor = DLTensor.from_address(address + offset)
    if tensor.code not in _CODES or tensor.lanes != 1 or tensor.bits % 8:
        return f"the element type (code {tensor.code}, {tensor.bits} bits) has no name here; take a view of uint8."
    dtype = "bool" if tensor.code == 6 else f"{_CODES[tensor.code]}{tensor.bits}"
    shape, size = tuple(tensor.shape[: tensor.ndim]), tensor.bits // 8
    steps = tuple(step * size for step in tensor.strides[: tensor.ndim]) if tensor.strides else contiguous(shape, size)
    return Described(
        place=cast("tuple[int, int]", place),
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=steps,
        dtype=dtype,
        read_only=bool(read_only),
        keep=(array, capsule),
        data_ptr=_data_ptr(array),
    )


def _capsule(array: Any, stream: dict[str, int]) -> Any:
    library: Any = sys.modules.get(type(array).__module__.partition(".")[0])
    failure: Exception | None = None
    try:
        for more in ({"max_version": (1, 0), **stream}, stream, {"max_version": (1, 0)}):
            try:
                return array.__dlpack__(**more)
            except (TypeError, RuntimeError, BufferError) as error:  # an older protocol; JAX 0.11 knows no stream -1
                # torch: of another device than the current one, or with a gradient. It takes no notice of lazy signs.
                lazy = any(getattr(array, sign, bool)() for sign in ("is_conj", "is_neg"))
                if isinstance(error, BufferError) and hasattr(library, "to_dlpack") and not lazy:
                    return library.to_dlpack(array)
                failure = error
        assert failure is not None
        raise failure
    finally:
        del failure  # else the frame, and with it the array, lives until the next collection


def _interface(array: object) -> tuple[str, Mapping[str, Any]] | None:
    for name in ("__cuda_array_interface__", "__array_interface__"):
        try:
            if isinstance(found := getattr(array, name, None), Mapping):
                return name, found
        except Exception:  # torch, of element types that the interface does not know
            continue
    return None


def _is_read_only(array: Any, *, on_host: bool) -> bool:
    if (found := _interface(array)) is not None:
        return bool(found[1]["data"][1])
    with suppress(Exception):  # each library has its own
        return on_host and not array.__array__().flags.writeable
    return False


def _by_interface(array: Any, argument: str) -> Described | str:
    if (found := _interface(array)) is None:
        from_lists = "numpy.asarray(...) of a list or numpy.frombuffer(...) of bytes"
        instead = "a view of it, such as view(shape, dtype)" if isinstance(array, NotAnArray) else from_lists
        raise ArgumentTypeError(
            argument, f"expected an array with __dlpack__ or an array interface, got {_kind(array)}; pass {instead}."
        )
    name, facts = found
    try:
        pointer, read_only = facts["data"]
        shape, dtype = tuple(facts["shape"]), DType(facts["typestr"])
        return Described(
            place=(_CPU, 0) if name == "__array_interface__" else name,
            pointer=int(pointer),
            shape=shape,
            strides=facts.get("strides") or contiguous(shape, dtype.itemsize),
            dtype=dtype.name,
            read_only=bool(read_only),
            keep=(array, facts),
        )
    except (LookupError, TypeError, ValueError) as error:  # as an image of PIL, whose data are bytes
        return f"its {name} has {type(error).__name__}: {error}."


# -- the memory --------------------------------------------------------------------------------------------------------


def device_of(array: Described) -> Device:
    """The device whose memory the array is."""
    place = array.place

    def fits(device: Device) -> bool:
        if isinstance(place, str):
            return device.info.array_interface == place and _ordinal(device, array.pointer) == device.ordinal
        kind = {_MANAGED: _CUDA, **dict.fromkeys(_HOST_TYPES, _CPU)}.get(place[0], place[0])
        return device.info.dlpack == (kind, 0 if kind == _CPU else place[1])

    return search(fits, f"arrays: no device has the memory that DLPack calls {place}")


def _ordinal(device: Device, pointer: int) -> int | None:
    backend = device.driver
    return backend.block_at(pointer).ordinal if isinstance(backend, SharingBackend) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Blocks at consecutive addresses, which travel together."""

    blocks: tuple[Block, ...]

    @property
    def address(self) -> int:
        return self.blocks[0].address

    @property
    def region(self) -> Region:
        keys, sizes = (tuple(getattr(one, what) for one in self.blocks) for what in ("key", "size"))
        return Region(self.blocks[0].behind.handle_type.type_name, keys, sizes)


def check_block(device: Device, block: Block, name: str) -> None:
    """Refuse memory that cannot get to another process."""
    where = device.name + (f", array {name!r}" if name else "")
    cell = Cell(Operation.EXPORT_ARRAY, block.behind.handle_type)
    if not block.behind.travels:
        raise UnsupportedError(_gap(cell, block.behind), context=where)
    if block.ordinal != device.ordinal:
        raise InvalidArgumentError(
            name, f"expected memory of device {device.ordinal}, {device.name}, got that of device {block.ordinal}."
        )
    if not (found := device.capabilities.of(cell)):
        raise UnsupportedError(found, context=where)


Check: TypeAlias = Callable[[Device, Block, str], None]
"""A call that refuses a block of an array of this name."""


def ranges_of(device: Device, arrays: Mapping[str, Described], check: Check = check_block) -> list[Range]:
    """The memory that the arrays lie in, by address.

    Raises
    ------
    UnsupportedError
        An array's memory cannot get to another process; the error says why, and what to change.
    """
    backend = device.driver
    if not isinstance(backend, SharingBackend):
        device.capabilities.require((Operation.EXPORT_ARRAY, OpaqueFd if device.info.is_cpu else VmmFd))
    assert isinstance(backend, SharingBackend)
    blocks: list[Block] = []
    for name, array in arrays.items():
        place, end = array.span
        while place < end:
            at = bisect_right(blocks, place, key=attrgetter("address"))
            if not at or blocks[at - 1].end <= place:
                blocks.insert(at, _block_at(device, backend, place, name, check))
                at += 1
            place = blocks[at - 1].end
    runs: list[list[Block]] = []
    for block in blocks:
        last = runs[-1][-1] if runs and backend.joins_blocks else Block(behind=Behind.NOTHING)
        if last.end == block.address and last.behind is block.behind is Behind.VMM:
            runs[-1].append(block)
        else:
            runs.append([block])
    return [Range(blocks=tuple(run)) for run in runs]


def _block_at(device: Device, backend: SharingBackend, address: int, name: str, check: Check) -> Block:
    try:
        block = backend.block_at(address)
    except HandleError as error:
        raise InvalidArgumentError(name, f"expected memory that can be shared, got some that cannot: {error}") from None
    check(device, block, name)
    if not block.address <= address < block.end:
        raise InvalidArgumentError(
            name, f"expected memory of {device.name}, got {address:#x}, where its driver knows none."
        )
    return block


def _gap(cell: Cell, behind: Behind) -> Capability:
    """Why memory of a kind cannot travel, and what to change."""
    allocate = (
        "make the array as numpy.asarray(device.allocate(size).view(shape, dtype)), for torch by torch.from_dlpack, or "
        "pass copy=True and use share.view."
    )
    pools = (
        f"allocate by another pool: torch with {_torch_variable()}=expandable_segments:True or without "
        "backend:cudaMallocAsync, CuPy with cupy.cuda.MemoryPool, or pass copy=True."
    )
    reasons = {
        Behind.POOL: ("and the pool was not made for export.", pools),
        Behind.CLOSED: ("or of another process, which alone can share it.", allocate),
        Behind.HOST: ("which only its own process has: no open memfd, mapped from its start.", allocate),
    }
    reason, way_out = reasons.get(behind, ("which no call exports.", allocate))
    return cell.gap(Scope.DEVICE, f"the memory is {behind.value}, {reason}", "docs/howto/share_arrays.md", way_out)


def _torch_variable() -> str:
    """The variable that this process's torch reads for its allocator."""
    torch: Any = sys.modules.get("torch")
    version = tuple(map(int, str(getattr(torch, "__version__", "2.9")).split(".")[:2]))
    if version >= (2, 9):
        return "PYTORCH_ALLOC_CONF"
    return "PYTORCH_HIP_ALLOC_CONF" if getattr(torch.version, "hip", None) else "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """Arrays of one device, and where they lie."""

    device: Device
    arrays: Mapping[str, Described]
    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Described], device: Device) -> Laid:
        return cls(device=device, arrays=arrays, ranges=tuple(ranges_of(device, arrays)))

    def placed(self) -> dict[str, Placed]:
        """Each array in its region."""
        starts = [one.address for one in self.ranges]
        found = {}
        for name, array in self.arrays.items():
            number = bisect_right(starts, array.span[0]) - 1
            offset = array.pointer - starts[number]
            found[name] = Placed(number, offset, array.shape, array.strides, array.dtype, array.read_only)
        return found

    def check(self) -> None:
        """Raise `ResourceClosedError` if an array's library has given its memory away."""
        backend = cast(SharingBackend, self.device.driver)
        for name, array in self.arrays.items():
            if array.data_ptr != _data_ptr(array.keep[0]):
                raise ResourceClosedError(f"array {name!r} has other memory now than it had when it was shared.")
        for block in (block for one in self.ranges for block in one.blocks):
            if block.behind is not Behind.FILE and backend.block_at(block.address) != block:
                raise ResourceClosedError("the memory that was shared has been freed, and may be another array's now.")
