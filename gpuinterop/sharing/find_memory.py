"""Finds an array's device and memory blocks through queries to the driver, and checks that they can be shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias, cast

from .._core.device import Device
from .._core.discovery import search
from .._core.dlpack import CPU, HOST_TYPES
from .._core.foreign_arrays import Described, described
from .._core.layout import overlap
from ..backend import Block, MemoryKind, SharingBackend
from ..capabilities import Capability, Cell, Operation, Scope
from ..errors import HandleError, InvalidArgumentError, ResourceClosedError, UnsupportedError
from ..handles import OpaqueFd, VmmFd

_CUDA, _MANAGED = 2, 13  # kDLCUDA, kDLCUDAManaged
_PLATFORMS: Final = {CPU: "the CPU", _CUDA: "CUDA", 8: "Metal", 10: "ROCm", 14: "oneAPI"}


def describe(array: object, name: str, *, in_place: bool = True, empty: bool = True) -> Described:
    """Describe an array as `described` does; check that no two elements share a byte, and whether it may be empty."""
    description = described(array, name, in_place=in_place)
    layout = description.layout
    if not empty and 0 in layout.shape:
        raise InvalidArgumentError(name, f"expected an element or more, got {layout}; do not import an empty array.")
    if overlap(layout):
        got = f"the strides {list(layout.strides)}, with which some overlap"
        way_out = "pass the array that it is a view of, or a copy."
        raise InvalidArgumentError(name, f"expected elements that each have their own bytes, got {got}; {way_out}")
    if in_place and description.pointer % layout.dtype.alignment and 0 not in layout.shape:
        expected = f"a multiple of {layout.dtype.alignment}, which libraries require for {layout.dtype.name}"
        got = f"{description.pointer:#x}; pass a copy, or the bytes (uint8) that it is a view of."
        raise InvalidArgumentError(name, f"expected an address that is {expected}, got {got}")
    return description


# -- the memory --------------------------------------------------------------------------------------------------------


def device_of(arrays: Mapping[str, Described]) -> Device:
    """The device that has all the arrays. If only an address identifies it, `locate` checks each block."""
    devices: dict[object, Device] = {}
    # An array without bytes can have any address.
    located = {name: a for name, a in arrays.items() if isinstance(a.place, tuple) or 0 not in a.layout.shape}
    for name, array in (located or arrays).items():
        if array.place not in devices:
            devices[array.place] = device = _device_of(array, name or "array")
            if device is not (first := next(iter(devices.values()))):
                got = f"one of {device!r}; share each device's separately."
                raise InvalidArgumentError(name or "array", f"expected arrays of one device, {first!r}, got {got}")
    return next(iter(devices.values()))


def _device_of(array: Described, name: str) -> Device:
    place = array.place
    if isinstance(place, str):
        got = f"{array.pointer:#x} from {place}, an address that no driver here recognizes"
    else:
        kind = {_MANAGED: _CUDA, **dict.fromkeys(HOST_TYPES, CPU)}.get(place[0], place[0])
        got = f"that of {_PLATFORMS.get(kind, 'another platform')}, DLPack's device {place}"

    def fits(device: Device) -> bool:
        if isinstance(place, str):
            empty = not array.span[1]  # no bytes, at the address 0: any device fits
            return device.info.array_interface == place and (empty or _ordinal(device, array.pointer) == device.ordinal)
        return device.info.dlpack == (kind, 0 if kind == CPU else place[1])

    return search(fits, f"{name}: expected memory of a device that works here, got {got}")


def _ordinal(device: Device, pointer: int) -> int | None:
    backend = device.driver
    return backend.find_blocks()(pointer).ordinal if isinstance(backend, SharingBackend) else None


def check_block(device: Device, block: Block, name: str) -> None:
    """Raise if another process cannot map the memory."""
    cell = Cell(Operation.EXPORT_ARRAY, block.kind.handle_type)
    capability = device.capabilities.of(cell) if block.kind.travels else _gap(cell, block.kind)
    if not capability:
        raise UnsupportedError(capability, context=device.name + (f", array {name!r}" if name else ""))
    if block.ordinal != device.ordinal:
        got = f"one of device {block.ordinal}; share each device's separately."
        raise InvalidArgumentError(name or "array", f"expected arrays of one device, {device!r}, got {got}")


Check: TypeAlias = Callable[[Device, Block, str], None]
"""Raises if a block, which contains the array of this name, cannot be shared."""


def locate(
    device: Device, arrays: Mapping[str, Described], allowed: Check = check_block
) -> tuple[list[tuple[Block, ...]], dict[str, tuple[int, int]]]:
    """The memory that contains the arrays, and each array's place in it.

    Returns runs of blocks at consecutive addresses, ordered by address, which a reader maps as a whole; and for each
    array the number of its run and its first element's offset there (-1 and 0 without bytes). Raises `UnsupportedError`
    if another process cannot map the memory, and `InvalidArgumentError` if the driver does not recognize it or if it is
    not one allocation.
    """
    runs, numbers = find_runs(device, [(*array.span, name) for name, array in arrays.items()], allowed, set())
    places = dict.fromkeys(arrays, (-1, 0))
    for name, number in numbers.items():
        places[name] = number, arrays[name].pointer - runs[number][0].address
    return runs, places


def find_runs(
    device: Device, spans: Iterable[tuple[int, int, str]], allowed: Check, seen: set[tuple[MemoryKind, int]]
) -> tuple[list[tuple[Block, ...]], dict[str, int]]:
    """Like `locate`, for start and end addresses: the runs, and the number of each array's run.

    `seen` contains the kinds of memory and the devices that `allowed` has accepted.
    """
    backend = _backend_of(device)
    ask, joins = backend.find_blocks(), backend.joins_blocks
    runs, numbers = list[list[Block]](), dict[str, int]()
    last = Block(kind=MemoryKind.NOTHING)
    for start, end, name in sorted(spans):
        while (place := max(start, last.end)) < end:
            try:
                block = ask(place)
            except HandleError as error:
                problem = f"expected memory that can be shared, got some that cannot: {error}"
                raise InvalidArgumentError(name or "array", problem) from None
            if (block.kind, block.ordinal) not in seen:
                allowed(device, block, name)
                seen.add((block.kind, block.ordinal))
            joined = joins and last.end == block.address and last.kind is block.kind is MemoryKind.VMM
            if not block.address <= place < block.end or not (joined or place == start):
                got = f"one that is unknown to its driver from {place:#x} on; copy it into one."
                problem = f"expected an array in one allocation of {device.name}, got {got}"
                raise InvalidArgumentError(name or "array", problem)
            if not joined:
                runs.append([])
            runs[-1].append(block)
            last = block
        if start < end:
            numbers[name] = len(runs) - 1
    return list(map(tuple, runs)), numbers


def check_pointers(arrays: Mapping[str, Described]) -> None:
    """Raise `ResourceClosedError` if a torch array has moved to other memory."""
    for name, array in arrays.items():
        if array.data_ptr is not None and array.data_ptr != array.keep[0].data_ptr():
            called = f"array {name!r}" if name else "the array"
            raise ResourceClosedError(f"{called} has other memory now than it had when it was shared.")


def _backend_of(device: Device) -> SharingBackend:
    backend = device.driver
    if not isinstance(backend, SharingBackend):
        device.capabilities.require((Operation.EXPORT_ARRAY, OpaqueFd if device.info.is_cpu else VmmFd))
    return cast(SharingBackend, backend)


def _gap(cell: Cell, kind: MemoryKind) -> Capability:
    """Why memory of this kind cannot be shared, and what to change."""
    allocate = "make the array with device.empty(shape, dtype), or pass copy=True and use share.view."
    pools = (
        "use another pool: torch with PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.9 "
        "PYTORCH_CUDA_ALLOC_CONF) or without backend:cudaMallocAsync, CuPy with cupy.cuda.MemoryPool, or pass "
        "copy=True."
    )
    reasons = {
        MemoryKind.POOL: ("and the pool was not made for export.", pools),
        MemoryKind.CLOSED: ("or of another process; only that process can share it.", allocate),
        MemoryKind.HOST: ("which only its own process has: no open memfd, mapped from its start.", allocate),
    }
    reason, way_out = reasons.get(kind, ("which no call can export.", allocate))
    return cell.gap(Scope.DEVICE, f"the memory is {kind.value}, {reason}", "docs/howto/share_arrays.md", way_out)
