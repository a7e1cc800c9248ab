"""Another process's arrays, here: the lease, the imports that attachments share, and the views on them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, cast
from weakref import WeakSet

from .. import ipc, system
from .._arguments import Sole, check_timeout, inside
from .._core.device import Device, check_access, check_device
from .._core.drain import behind_default_stream, drain
from .._core.interchange import View, layout_of
from .._core.lifetime import LIVE, Lifetime, retire
from .._core.memory import Buffer, Mappable, Mapping as Mapped
from .._core.registry import get_backend, search
from .._core.resource import Resource
from .._core.stream import Stream
from ..backend import AllocationBackend, DriverHandle, SharingBackend
from ..capabilities import Cell, Operation, Scope
from ..errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    PeerError,
    ResourceClosedError,
    UnsupportedError,
)
from ..handles import FdHandle, Handle, IpcMemHandle, OpaqueFd, TimelineFd, VmmFd
from .descriptor import ANSWER, ATTACH, BLOCKS, ENROL, Contents, Descriptor, Region, boot_id, parse_answer
from .order import Board, Reader, Word, Writer, come_in
from .rendezvous import VARIABLE, check_peer, here, is_here

driver_lock: Final = threading.RLock()
"""Held round every export and every attach: HIP's race with each other (rocm-systems #11892)."""
_importing: Final = threading.RLock()
"""Held while a region is looked for and imported, so that it is imported once."""


class Import(Lifetime):
    """Another process's region, mapped once for all attachments of this process; or memory of this process."""

    __slots__ = ("__weakref__", "address", "keys", "kind", "owner", "sizes")

    def __init__(self, device: Device, region: Region, owner: bytes = b"", *, keep: object = None) -> None:
        backend = device.driver
        blocks = backend.releases_block or getattr(backend, "map_allocation_blocks", False)
        detach = None if keep is not None else cast(SharingBackend, backend).detach_blocks
        gate = device.gate if blocks and keep is None else None
        super().__init__("shared memory", detach, gate=gate, keep=keep, device=device.streams)
        self.ends_with_children = True
        self.owner, self.kind, self.keys, self.sizes = owner, region.kind, region.keys, region.sizes
        self.address = 0

    def offset_of(self, device: Device, region: Region, owner: bytes) -> int | None:
        """Where a region lies in it; None if it does not."""
        if (self.owner, self.device, self.kind) != (owner, device.streams, region.kind) or self.state is not LIVE:
            return None
        count = len(region.keys)
        for at, key in enumerate(self.keys):
            if key == region.keys[0] and self.keys[at : at + count] == region.keys:
                return sum(self.sizes[:at]) if self.sizes[at : at + count] == region.sizes else None
        return None


_imports: WeakSet[Import] = WeakSet()


class SharedMemory(Mappable):
    """A region as one share or attachment has it: its arrays keep this, and not the other attachments."""

    def __init__(self, device: Device, address: int, size: int, parents: Sequence[Lifetime]) -> None:
        super().__init__(Lifetime("shared memory", parents=parents, device=device.streams))
        self._warns = False
        self.device, self.driver, self._size, self._address = device, device.driver, size, address
        self.lifetime.open()
        self.buffer: Buffer = self._buffer(0, size, device)
        self.buffer._warns = False

    def _new_mapping(self) -> Mapped:
        return Mapped(self, (self.device,), _nothing, blocks=False, waits=False)

    def _map(self, mapping: Mapped) -> DriverHandle:
        mapping.address = self._address
        return self


def _nothing(_: object) -> None:
    """Unmap nothing: the import does."""


def _known(device: Device, region: Region, owner: bytes, lease: Lifetime) -> SharedMemory | None:
    """The region, if it is imported already."""
    for known in list(_imports):
        if (offset := known.offset_of(device, region, owner)) is not None:
            with contextlib.suppress(ResourceClosedError):  # its last attachment ends
                return SharedMemory(device, known.address + offset, region.size, (known, lease))
    return None


def _mapped(device: Device, region: Region, handles: Sequence[Handle], owner: bytes, lease: Lifetime) -> SharedMemory:
    """The region, imported."""
    backend, native = cast(SharingBackend, device.driver), device.handle
    fresh = Import(device, region, owner)

    def attach() -> DriverHandle:
        made, fresh.address = system.under(driver_lock, lambda: backend.attach_blocks(native, handles, region.sizes))
        return made

    blocks = isinstance(backend, AllocationBackend) and backend.map_allocation_blocks and region.kind is VmmFd
    create = partial(fresh.create, attach)
    behind_default_stream(device.gate, create, "attaching arrays") if blocks else create()
    try:
        found = SharedMemory(device, fresh.address, region.size, (fresh, lease))
    except BaseException:
        retire(fresh)
        raise
    _imports.add(fresh)
    return found


class Arrays(Resource):
    """What `ArrayShare` and `AttachedArrays` have in common: arrays by name, their way, and the order."""

    _contents: Contents
    device: Device
    """The device that has them."""
    key: tuple[bytes, int]
    """The exporter and the number of its share."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, in their order; one empty name for a single array."""
        return tuple(self._contents.arrays)

    @property
    def view(self) -> View:
        """The single array, in place."""
        if not self._contents.single:
            raise InvalidArgumentError("view", f"expected a single array, got {len(self.names)}; take one by its name.")
        return self[self.names[0]]

    def __getitem__(self, name: str) -> View:
        self.check_open()
        if (placed := self._contents.arrays.get(name)) is None:
            known, more = ", ".join(map(repr, self.names[:8])), ", ..." if len(self.names) > 8 else ""
            raise InvalidArgumentError("name", f"expected one of {known}{more}, got {name!r}.")
        return self._memory()[placed.region].buffer.view(placed.shape, placed.dtype, placed.offset, placed.strides)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def way(self) -> str:
        """By which handles the memory travels, such as ``VmmFd``."""
        return self._contents.way

    @property
    def exposes(self) -> str:
        """What a reader can touch, in words: whole allocations, of which the arrays are a part."""
        regions = self._contents.regions
        pieces, whole = sum(len(region.keys) for region in regions), sum(region.size for region in regions)
        arrays = sum(layout_of(one.shape, one.dtype, one.strides).high for one in self._contents.arrays.values())
        return f"{pieces} allocation(s) of {whole:,} bytes in all, of which the arrays span {arrays:,}"

    def acquire(self, stream: Stream | object = None, *, timeout: float | None = None) -> None:
        self._turns().acquire(self._stream(stream), timeout)

    def release(self, stream: Stream | object = None) -> None:
        self._turns().release(self._stream(stream))

    @inside
    def place(self, name: str) -> tuple[Buffer, int]:
        """The buffer that an array lies in, and the offset of its first element."""
        placed = self._contents.arrays[name]
        return self._memory()[placed.region].buffer, placed.offset

    def _memory(self) -> Sequence[SharedMemory]:
        raise NotImplementedError

    def _turns(self) -> Writer | Reader:
        raise NotImplementedError

    def _stream(self, stream: object) -> Stream:
        self.check_open()
        if isinstance(stream, Stream):
            return stream
        if stream is None and not self.device.info.is_cpu:
            raise ArgumentTypeError(
                "stream", "expected a stream, got None, which stands for the calling thread of a CPU."
            )
        return self.device.wrap_stream(0 if stream is None else stream)


def acquire(arrays: Iterable[Arrays], stream: object = None, *, timeout: float | None = None) -> None:
    """Acquire several shares, all at once: one by one, streams could wait for each other. None if one fails."""
    ordered = sorted(dict.fromkeys(arrays), key=_key)
    turns = [(one._turns(), one._stream(stream)) for one in ordered]
    if turns:
        locks = {array.key: one.board.lock for array, (one, _) in zip(ordered, turns, strict=True)}
        come_in(turns, list(locks.values()), timeout)


def _key(arrays: Arrays) -> tuple[bytes, int]:
    return arrays.key


class Lease(Sole):
    """A reader's right to the memory, until it is out and its arrays are gone."""

    def __init__(self, enrol: Callable[[], Reader], end: Callable[[Reader | None], None]) -> None:
        self._enrol, self._end = enrol, end
        self._enrolling = threading.RLock()
        self.reader: Reader | None = None

    def turns(self) -> Reader:
        """The lease's place in the order, taken on first use."""
        return self.reader or system.under(self._enrolling, self._first)

    def _first(self) -> Reader:
        self.reader = self.reader or self._enrol()
        return self.reader

    def leave(self) -> None:
        """Go out, and do not come in again."""
        if self.reader is not None:
            self.reader.end(ResourceClosedError(f"{self.reader.label} is closed; attach again."))

    def end(self) -> None:
        """Give the lease back once the reader is out."""
        self.leave()
        self._end(self.reader)


class AttachedArrays(Arrays):
    """Arrays of another process, in place. Made by `gpuinterop.attach`."""

    def __init__(self, device: Device, descriptor: Descriptor, contents: Contents, lease: Lease) -> None:
        super().__init__(Lifetime("AttachedArrays", Lease.end, device=device.streams))
        self.device, self._contents = device, contents
        self.key = descriptor.process, descriptor.share
        self._regions: Sequence[SharedMemory] = ()
        self.lifetime.create(lambda: lease)

    def close(self, timeout: float | None = None) -> None:
        """End use at once (see `Resource.close`)."""
        lease: Lease = self.lifetime.handle
        if not self.closed:
            lease.leave()
        super().close(timeout)

    def _memory(self) -> Sequence[SharedMemory]:
        return self._regions

    def _turns(self) -> Reader:
        return self.lifetime.use(Lease.turns)


class _Link(Sole):
    """The connection to an exporter, whose answers are not trusted."""

    def __init__(self, descriptor: Descriptor, timeout: float | None, users: Collection[int]) -> None:
        self.descriptor = descriptor
        path = descriptor.address
        if place := os.environ.get(VARIABLE):  # the volume may be mounted elsewhere here
            path = os.path.join(place, os.path.basename(path))
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.settimeout(timeout)
            self.socket.connect(path)
            check_peer(self.socket, users)
        except (FileNotFoundError, ConnectionRefusedError):
            self.socket.close()
            raise PeerError(
                f"expected the exporter's socket at {path}, it is not there: the process has ended, or its folder is "
                f"not mounted in this container; mount it, and name it in {VARIABLE}."
            ) from None
        except BaseException as error:
            self.socket.close()
            if isinstance(error, OSError) and not isinstance(error, PeerError):
                raise _lost(error) from None
            raise

    def ask(self, verb: int, expect: Sequence[type[Handle]], number: int = 0) -> tuple[int, list[Any]]:
        """The number and the handles of the answer."""
        try:
            self.socket.sendall(self.descriptor.request(verb, number))
            head = self.socket.recv(ANSWER.size)  # it was sent by one call, as the words below
            if len(head) < ANSWER.size:
                raise ConnectionError("it closed the connection")
            failed, told = parse_answer(head)
            words = self.socket.recv(told) if failed is not None else b""
        except PeerError:
            raise
        except OSError as error:
            raise _lost(error) from None
        if failed is not None:
            raise failed(words.decode(errors="replace"))
        return told, ipc.receive_handles(self.socket, expect)


def _lost(error: OSError) -> PeerError:
    late = "it did not answer within the time-out" if isinstance(error, TimeoutError) else str(error)
    return PeerError(f"the exporting process is not there: {late}; is it alive, and does it serve?")


def attach(
    descriptor: bytes, *, timeout: float | None = 10.0, device: Device | None = None, users: Iterable[int] = ()
) -> AttachedArrays:
    """Attach the arrays of a share, in place."""
    found = Descriptor.parse(descriptor)
    if found.boot != boot_id():
        raise PeerError("the share is another host's, or of before a restart; attach it where its process runs.")
    limit = check_timeout(timeout)
    if device is not None:
        check_device(device, "device")
    drain()
    if is_here(found.process):
        return _attach_here(found)
    link = _Link(found, limit, frozenset(users))
    try:
        _, (told,) = link.ask(ATTACH, (OpaqueFd,))
        with told:
            contents = Contents.read(told)
        used = device_for(contents, device)
        lease = Lease(partial(_enrol, link, used), partial(_end, link.socket))
        attached = AttachedArrays(used, found, contents, lease)
    except BaseException:
        link.socket.close()
        raise
    try:
        attached._regions = system.under(_importing, _map_all, attached, link)
    except BaseException:
        attached.close()
        raise
    return attached


def _map_all(attached: AttachedArrays, link: _Link) -> list[SharedMemory]:
    """Map the regions; ask for handles if one is not imported yet."""
    regions, owner, lease = attached._contents.regions, link.descriptor.process, attached.lifetime
    found = [_known(attached.device, region, owner, lease) for region in regions]
    if None not in found:
        return cast("list[SharedMemory]", found)
    kinds = [cast("type[FdHandle]", region.kind) for region in regions if not region.handles for _ in region.keys]
    handles: list[FdHandle] = []
    try:
        while rest := kinds[len(handles) :]:
            handles += link.ask(BLOCKS, rest[: ipc.MAX_HANDLES], len(handles))[1]
        left = iter(handles)
        for at, region in enumerate(regions):
            mine = region.handles or [next(left) for _ in region.keys]
            found[at] = found[at] or _mapped(attached.device, region, mine, owner, lease)
        for handle in handles:
            handle.trusted = True  # the driver has taken it, so its file blocks no close
        return cast("list[SharedMemory]", found)
    finally:
        for handle in handles:
            handle.close()


def device_for(contents: Contents, device: Device | None) -> Device:
    """The device that attaches: by default the one that has the memory, by its identity and not by a number."""
    place = contents.device
    if device is None:
        problem = f"descriptor: the memory is of a device that is hidden here ({place}); pass another one as device="
        device = search(lambda one: one.identity.matches(place), problem)
    cells = [Cell(Operation.IMPORT_ARRAY, kind) for kind in {region.kind for region in contents.regions}]
    device.capabilities.require(*cells)
    there = (one.ordinal for one in get_backend(device.backend).devices() if one.identity.matches(place))
    check_access([device], next(there, None), cells[0])
    legacy = next((cell for cell in cells if cell.handle_type is IpcMemHandle), None)
    if legacy is not None and contents.pid == os.getpid():
        reason = f"both processes have the PID {contents.pid}, each in its own namespace: drivers take them for one."
        way_out = "start one behind another process (docker run --init), or let torch allocate expandable segments."
        raise UnsupportedError(legacy.gap(Scope.PLATFORM, reason, "LMCache #4551", way_out), context=device.name)
    return device


def _attach_here(descriptor: Descriptor) -> AttachedArrays:
    """Attach a share of this process."""
    offer: Any = here().offers.get(descriptor.share)
    if offer is None or not offer.descriptor.opens(descriptor.token):
        raise ResourceClosedError("the share was closed, or the descriptor is another's; share the arrays anew.")
    attached: AttachedArrays = offer.attach_here()
    return attached


def _end(link: socket.socket, reader: Reader | None) -> None:
    if reader is None:
        link.close()
    else:
        here().end_lease(link, reader.close_if_out)


def _enrol(link: _Link, device: Device) -> Reader:
    """Take a place in the order; from now on the exporter's death is noticed."""
    number, handles = link.ask(ENROL, (TimelineFd, TimelineFd, OpaqueFd))
    words: list[Word] = []
    with handles[0], handles[1], handles[2]:
        board = Board.load(handles[2])
        try:
            slot = board.slot(number)
            words.extend(map(device.import_semaphore, handles[:2]))
        except BaseException:
            for word in words:
                word.close()
            board.close()
            raise
    reader = Reader(board, words[0], words[1], slot, "these attached arrays")
    here().watch(link.socket, reader.let_go)
    return reader
