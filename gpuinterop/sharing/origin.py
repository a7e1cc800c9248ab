"""What memory an array lies in: the driver is asked, and nothing is exported to find out."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, TypeAlias, cast

from .._core.device import Device
from .._core.interchange import CPU, HOST_TYPES, Described, DType, data_ptr, described
from .._core.registry import search
from ..backend import Behind, Block, SharingBackend
from ..capabilities import Capability, Cell, Operation, Scope
from ..errors import HandleError, InvalidArgumentError, ResourceClosedError, UnsupportedError
from ..handles import OpaqueFd, VmmFd
from .descriptor import Placed, Region

_CUDA, _MANAGED = 2, 13  # kDLCUDA, kDLCUDAManaged
_PLATFORMS: Final = {CPU: "the CPU", _CUDA: "CUDA", 8: "Metal", 10: "ROCm", 14: "oneAPI"}


def describe(array: object, name: str, *, in_place: bool = True) -> Described:
    """Describe an array, as `described` does; its elements must not overlap."""
    found = described(array, name, in_place=in_place)
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


# -- the memory --------------------------------------------------------------------------------------------------------


def device_of(array: Described, name: str) -> Device:
    """The device whose memory the array is."""
    place = array.place
    if isinstance(place, str):
        got = f"{array.pointer:#x} by {place}, an address that no driver here knows"
    else:
        kind = {_MANAGED: _CUDA, **dict.fromkeys(HOST_TYPES, CPU)}.get(place[0], place[0])
        got = f"that of {_PLATFORMS.get(kind, 'another platform')}, DLPack's device {place}"

    def fits(device: Device) -> bool:
        if isinstance(place, str):
            return device.info.array_interface == place and _ordinal(device, array.pointer) == device.ordinal
        return device.info.dlpack == (kind, 0 if kind == CPU else place[1])

    return search(fits, f"{name}: expected memory of a device that works here, got {got}")


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
            name or "array",
            f"expected memory of device {device.ordinal}, {device.name}, got that of device {block.ordinal}.",
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
        problem = f"expected memory that can be shared, got some that cannot: {error}"
        raise InvalidArgumentError(name or "array", problem) from None
    check(device, block, name)
    if not block.address <= address < block.end:
        raise InvalidArgumentError(
            name or "array", f"expected memory of {device.name}, got {address:#x}, where its driver knows none."
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
            if array.data_ptr != data_ptr(array.keep[0]):
                raise ResourceClosedError(f"array {name!r} has other memory now than it had when it was shared.")
        for block in (block for one in self.ranges for block in one.blocks):
            if block.behind is not Behind.FILE and backend.block_at(block.address) != block:
                raise ResourceClosedError("the memory that was shared has been freed, and may be another array's now.")
