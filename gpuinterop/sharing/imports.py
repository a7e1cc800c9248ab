"""Imports of another process's memory, each mapped once for all attachments and tensors, and the device for it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, islice
from struct import pack
from typing import Any, cast

from .. import system
from .._core.device import Device, check_access
from .._core.discovery import get_backend, search
from .._core.lifetime import LIVE, Lifetime, locked, retire
from .._core.release import once_default_is_free
from ..backend import AllocationBackend, DriverHandle, SharingBackend
from ..capabilities import Cell, Operation, Scope
from ..errors import PeerError, UnsupportedError
from ..handles import DeviceIdentity, FdHandle, Handle, IpcMemHandle, VmmFd
from ..ipc import MAX_FDS
from .link import Link, SecondsLeft
from .loop import loop
from .messages import BLOCKS, Contents, Region
from .server import driver_lock


class Import(Lifetime):
    """Another process's region, mapped once for all attachments and tensors of this process."""

    __slots__ = ("address", "count", "link", "numbers", "starts")

    def __init__(self, device: Device, region: Region, link: Link) -> None:
        backend = cast(SharingBackend, device.driver)
        blocks = backend.releases_block or getattr(backend, "map_allocation_blocks", False)
        gate = device.gate if blocks else None
        super().__init__("shared memory", self._detach, gate=gate, device=device.streams)
        self.ends_with_children = True
        self.link, self.numbers = link, region.numbers
        self.starts = tuple(accumulate(region.sizes, initial=0))
        self.address = self.count = 0
        """Where it is mapped; the number of torch tensors in it, which keep it as attachments do."""

    def find(self, region: Region) -> int | None:
        """Address of a region that begins with one of these blocks; None if this import does not contain all of it."""
        at, count = self.numbers.index(region.numbers[0]), len(region.numbers)
        fits = self.state is LIVE and self.numbers[at : at + count] == region.numbers
        return self.address + self.starts[at] if fits else None

    def attach(self, device: Device, handles: Sequence[Handle], sizes: Sequence[int]) -> None:
        """Map the region; the caller keeps the handles."""
        backend = cast(SharingBackend, device.driver)

        def attach() -> DriverHandle:
            attached, self.address = system.under(driver_lock, backend.attach_blocks, device._handle, handles, sizes)
            return attached

        self.create(attach)
        self.link.enter(self)

    def _detach(self, handle: DriverHandle) -> None:
        self.link.leave(self)
        cast(Any, self.device).backend.detach_blocks(handle)


@locked
def keep(imported: Import) -> bool:
    """Count one more torch tensor in an import; False if the import has ended."""
    if imported.state is LIVE:
        imported.count += 1
        imported.ends_with_children = False
    return imported.state is LIVE


@locked
def end_unused(imported: Import) -> None:
    """End an import that nothing uses."""
    if not (imported.dependents or imported.count):
        retire(imported)


Received = dict[int, FdHandle]
"""Received descriptors of blocks, by number, until they are mapped."""
Mapped = tuple[Import, int]
"""An import that contains a region, and the region's address in it."""


def import_all(
    link: Link, device: Device, regions: Sequence[Region], left: SecondsLeft, received: Received
) -> list[Mapped]:
    """The import of each region; imports what is missing. Closes `received`."""
    limit = -1 if (rest := left()) is None else rest
    return system.under(link.importing, _import_all, link, device, regions, left, received, limit=limit)


def _import_all(
    link: Link, device: Device, regions: Sequence[Region], left: SecondsLeft, received: Received
) -> list[Mapped]:
    if not system.holds(link.importing):
        raise PeerError("another thread waits for that process, which did not answer within the time-out.")
    mapped = list[Mapped]()
    try:
        for at, region in enumerate(regions):
            existing = import_of(link, device, region)
            mapped.append(existing or _imported(link, device, region, _handles(link, regions, at, left, received)))
    except BaseException:
        for imported, _ in mapped:
            end_unused(imported)
        raise
    finally:
        _close_later(list(received.values()))
        received.clear()
    return mapped


def import_of(link: Link, device: Device, region: Region) -> Mapped | None:
    """The existing import that contains a region."""
    for imported in link.imports.get((device.streams, region.numbers[0]), ()):
        if (address := imported.find(region)) is not None:
            return imported, address
    return None


def _handles(link: Link, regions: Sequence[Region], at: int, left: SecondsLeft, received: Received) -> Sequence[Handle]:
    """The handles of a region. Asks for missing descriptors, and for those of the regions after it."""
    region = regions[at]
    if region.kind is IpcMemHandle:
        return [IpcMemHandle(region.data)]
    while not received.keys() >= set(region.numbers):
        missing = (block for block in sent_blocks(islice(regions, at, None)) if block[0] not in received)
        asked = list(islice(missing, MAX_FDS))
        with link.ask(BLOCKS, pack(f"<{len(asked)}Q", *(number for number, _ in asked)), left) as answer:
            received.update((number, answer.take(kind)) for number, kind in asked)
    return [received.pop(number) for number in region.numbers]


def sent_blocks(regions: Iterable[Region]) -> Iterator[tuple[int, type[FdHandle]]]:
    """Number and type of each block that is sent as a descriptor."""
    return ((number, kind) for kind, numbers, *_ in regions if issubclass(kind, FdHandle) for number in numbers)


def _close_later(handles: Sequence[Handle]) -> None:
    """Close handles; a GPU's in the loop, because closing takes the driver longer than importing."""

    def close() -> None:
        for handle in handles:
            handle.close()

    loop().repeat(close) if any(isinstance(handle, VmmFd) for handle in handles) else close()


def _imported(link: Link, device: Device, region: Region, handles: Sequence[Handle]) -> Mapped:
    backend, imported = device.driver, Import(device, region, link)
    attach = partial(imported.attach, device, handles, region.sizes)
    if isinstance(backend, AllocationBackend) and backend.map_allocation_blocks and region.kind is VmmFd:
        attach = partial(once_default_is_free, device.gate, attach, "attaching arrays")
    try:
        attach()
        for handle in handles:
            if isinstance(handle, FdHandle):
                handle.trusted = True  # the driver accepted it, so closing its file cannot block
    except BaseException:
        retire(imported)
        raise
    finally:
        _close_later(handles)
    return imported, imported.address


def device_for(contents: Contents, wanted: Device | None) -> Device:
    """The device that attaches: by default the one with the memory's identity."""
    kinds = frozenset(region.kind for region in contents.regions)
    device = _device_for(contents.device, kinds, wanted)
    if IpcMemHandle in kinds and contents.pid == os.getpid():
        reason = f"both processes have the PID {contents.pid}, each in its own namespace: drivers take them for one."
        way_out = "run one container with `docker run --init`, or use torch's expandable segments."
        legacy = Cell(Operation.IMPORT_ARRAY, IpcMemHandle)
        raise UnsupportedError(legacy.gap(Scope.PLATFORM, reason, "LMCache #4551", way_out), context=device.name)
    return device


@lru_cache
def _device_for(place: DeviceIdentity, kinds: Collection[type[Handle]], device: Device | None) -> Device:
    if device is None:
        problem = f"the memory is on a device that is hidden from this process ({place.name}); pass another as device="
        device = search(lambda device: device.identity.matches(place), f"descriptor: {problem}")
    cells = [Cell(Operation.IMPORT_ARRAY, kind) for kind in kinds]
    device.capabilities.require(*cells)
    devices = get_backend(device.backend).devices()
    if cells:
        ordinal = next((other.ordinal for other in devices if other.identity.matches(place)), None)
        check_access([device], ordinal, cells[0])
    return device
