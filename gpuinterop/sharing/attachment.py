"""Another process's arrays, here: the lease, the imports that attachments share, and the views on them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final, cast
from weakref import WeakSet

from .. import ipc, system
from .._arguments import NoCopy, check_timeout
from .._core.device import Device, check_access, check_device
from .._core.drain import behind_default_stream, drain
from .._core.lifetime import LIVE, Lifetime, retire
from .._core.memory import Buffer, Mappable, Mapping as Mapped
from .._core.monitor import after_fork
from .._core.registry import get_backend, search
from ..backend import AllocationBackend, DriverHandle, SharingBackend
from ..capabilities import Cell, Operation, Scope
from ..errors import (
    InvalidArgumentError,
    PeerError,
    ResourceClosedError,
    UnsupportedError,
)
from ..handles import FdHandle, Handle, IpcMemHandle, OpaqueFd, TimelineFd, VmmFd
from .arrays import Arrays
from .descriptor import ANSWER, ATTACH, BLOCKS, COUNT, ENROL, Contents, Descriptor, Region, boot_id, parse_answer
from .order import Board, Reader
from .rendezvous import VARIABLE, check_peer, here, is_here, users_of

driver_lock: Final = threading.RLock()
"""Held round every export and every attach: HIP's race with each other (rocm-systems #11892)."""
_importing: Final = threading.RLock()
"""Held while a region is looked for and imported, so that it is imported once."""
_TRIES: Final = 5
"""Number of connections that an attach makes, where the exporter drops them."""
_links: Final[WeakSet[socket.socket]] = WeakSet()
"""Connections to exporters, each of which is a lease."""


@after_fork
def _forked() -> None:
    """End the child's part in its parent's leases, which would outlive the parent; and what its threads may hold."""
    for link in _links:
        link.close()
    for lock in (driver_lock, _importing):
        lock._at_fork_reinit()  # type: ignore[attr-defined]


class Import(Lifetime):
    """Another process's region, mapped once for all attachments of this process."""

    __slots__ = ("__weakref__", "address", "keys", "kind", "owner", "sizes")

    def __init__(self, device: Device, region: Region, owner: bytes) -> None:
        backend = cast(SharingBackend, device.driver)
        blocks = backend.releases_block or getattr(backend, "map_allocation_blocks", False)
        gate = device.gate if blocks else None
        super().__init__("shared memory", backend.detach_blocks, gate=gate, device=device.streams)
        self.ends_with_children = True
        self.owner, self.kind, self.keys, self.sizes = owner, region.kind, region.keys, region.sizes
        self.address = 0

    def offset_of(self, device: Device, region: Region, owner: bytes) -> int | None:
        """Offset of a region in this one; None if the region is not a part of it."""
        if (self.owner, self.device, self.kind) != (owner, device.streams, region.kind) or self.state is not LIVE:
            return None
        count = len(region.keys)
        for at, key in enumerate(self.keys):
            if key == region.keys[0] and self.keys[at : at + count] == region.keys:
                return sum(self.sizes[:at]) if self.sizes[at : at + count] == region.sizes else None
        return None


_imports: WeakSet[Import] = WeakSet()


class SharedMemory(Mappable):
    """A region as one share or attachment has it: its arrays keep this, and not the other attachments.

    Memory that this process has already stays as long as `keep`, which this holds.
    """

    def __init__(
        self, device: Device, address: int, size: int, parents: Sequence[Lifetime] = (), *, keep: object = None,
        noun: str = "", label: str | None = None,
    ) -> None:  # fmt: skip
        noun, streams = noun or "shared memory", device.streams
        super().__init__(Lifetime(noun, parents=parents, keep=keep, device=streams, label=label, size=size))
        self.lifetime.warns = not parents  # a share or an attachment warns of its own
        self.device, self.driver, self._size, self._address = device, device.driver, size, address
        self.lifetime.open()
        self.buffer: Buffer = self._buffer(0, size, device, label)
        self.buffer.lifetime.warns = False

    def _new_mapping(self) -> Mapped:
        return Mapped(self, (self.device,), _nothing, blocks=False, waits=False)

    def _map(self, mapping: Mapped) -> DriverHandle:
        mapping.address = self._address
        return self._address


def _nothing(_: object) -> None:
    """Unmap nothing: an import does, or another library."""


def _known(device: Device, region: Region, owner: bytes, lease: Lifetime) -> SharedMemory | None:
    """The region, if it is imported already."""
    for known in list(_imports):
        if (offset := known.offset_of(device, region, owner)) is not None:
            with contextlib.suppress(ResourceClosedError):  # the last attachment ends
                return SharedMemory(device, known.address + offset, region.size, (known, lease))
    return None


def _mapped(device: Device, region: Region, handles: Sequence[Handle], owner: bytes, lease: Lifetime) -> SharedMemory:
    """The region, imported."""
    backend, native = cast(SharingBackend, device.driver), device._handle
    fresh = Import(device, region, owner)

    def attach() -> DriverHandle:
        made, fresh.address = system.under(driver_lock, lambda: backend.attach_blocks(native, handles, region.sizes))
        return made

    blocks = isinstance(backend, AllocationBackend) and backend.map_allocation_blocks and region.kind is VmmFd
    make = partial(fresh.create, attach)
    if blocks:
        make = partial(behind_default_stream, device.gate, make, "attaching arrays")
    try:
        make()
        found = SharedMemory(device, fresh.address, region.size, (fresh, lease))
    except BaseException:
        retire(fresh)
        raise
    _imports.add(fresh)
    return found


class Lease(NoCopy):
    """A reader's right to the memory, until it is out and its arrays are gone."""

    def __init__(
        self, enrol: Callable[[str], Reader], end: Callable[[Reader | None], None], count: Callable[[bool], object]
    ) -> None:
        self._enrol, self._end, self.count = enrol, end, count
        self._enrolling = threading.RLock()
        self.reader: Reader | None = None
        self.label: str
        """That of the arrays."""

    def turns(self) -> Reader:
        """The lease's place in the order, taken on first use."""
        return self.reader or system.under(self._enrolling, self._first)

    def _first(self) -> Reader:
        self.reader = self.reader or self._enrol(self.label)
        return self.reader

    def leave(self) -> None:
        """Release, and do not acquire again."""
        if self.reader is not None:
            self.reader.end(ResourceClosedError(f"{self.reader.label} is closed; attach again."))

    def end(self) -> None:
        """Give the lease back once the reader is out."""
        self.leave()
        self._end(self.reader)


class AttachedArrays(Arrays):
    """Arrays of another process, in place. Made by `gpuinterop.attach`.

    Closing gives the arrays back once their streams have done what they were given, and once the last array that was
    made of a view is gone. Until then the sharing process holds its own. The driver maps memory once, however many
    attachments of a process have it.

    Examples
    --------
    >>> with gi.share({"field": buffer.view((2, 2), "float32")}) as shared:
    ...     with gi.attach(bytes(shared)) as attached:
    ...         attached.acquire(stream)
    ...         stream.synchronize(timeout=10)
    ...         field = np.asarray(attached["field"])  # a GPU: torch.from_dlpack, without the synchronize
    ...         float(field.sum())
    ...         attached.release(stream)
    ...         del field
    0.0
    """

    def __init__(
        self, device: Device, descriptor: Descriptor, contents: Contents, lease: Lease, label: str | None
    ) -> None:
        super().__init__(Lifetime("AttachedArrays", Lease.end, device=device.streams, label=label))
        self.device, self._contents = device, contents
        self.key = descriptor.process, descriptor.share
        lease.label = self.label
        self._regions: Sequence[SharedMemory] = ()
        self.lifetime.create(lambda: lease)

    def close(self, timeout: float | None = None) -> None:
        """Release after the work of the stream that acquired, and give the arrays back (see `Resource.close`).

        Native releases: ``cuIpcCloseMemHandle``, or ``cuMemUnmap`` and ``cuMemAddressFree`` (``hip...``), for the last
        attachment of that memory in this process.
        """
        lease: Lease = self.lifetime.handle
        check_timeout(timeout)  # first: what is refused ends nothing
        if not self.closed:
            lease.leave()
        super().close(timeout)

    def _count(self, *, coming: bool) -> None:
        """Tell the exporter of one more reader that is to come, or has; also if closed, while arrays are left."""
        self.lifetime.ask(lambda lease: lease.count(coming), None)

    def _memory(self) -> Sequence[SharedMemory]:
        return self._regions

    def _turns(self) -> Reader:
        return self.lifetime.use(Lease.turns)


class _Link(NoCopy):
    """The connection to an exporter, whose answers are not trusted."""

    def __init__(
        self, descriptor: Descriptor, timeout: float | None, deadline: float | None, users: Collection[int]
    ) -> None:
        self.descriptor = descriptor
        path = descriptor.address
        if place := os.environ.get(VARIABLE):  # the volume may be mounted elsewhere here
            path = os.path.join(place, os.path.basename(path))
        self._limit, self.deadline = timeout, deadline
        """When the attach has to be done; later answers have the limit each."""
        self.dropped = False
        """Whether the exporter has closed the connection without a look at what it was asked."""
        self.cut_off = False
        """Whether an answer may still come, or has come in part. What came next would be taken for another's."""
        self.socket = system.call("socket", socket.socket, socket.AF_UNIX)
        _links.add(self.socket)

        def connect() -> bool:
            with contextlib.suppress(BlockingIOError):  # the socket's queue is full, and the kernel does not wait
                self.socket.connect(path)
                return True
            return False

        try:
            self.socket.settimeout(timeout)
            if not system.until(connect, timeout):
                raise TimeoutError
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
        if self.cut_off:
            raise PeerError("an earlier answer of the exporter was cut off; close these arrays, and attach them again.")
        try:
            self.cut_off = True
            left = self._limit if self.deadline is None else self.deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self.socket.settimeout(left)
            self.socket.sendall(self.descriptor.request(verb, number))
            head = self.socket.recv(ANSWER.size)  # one call has sent the head, as the words below
            if len(head) < ANSWER.size:
                raise ConnectionError("it closed the connection")
            failed, told = parse_answer(head)
            words = self.socket.recv(told) if failed is not None else b""
        except PeerError:
            raise
        except OSError as error:
            self.dropped = isinstance(error, ConnectionResetError | BrokenPipeError)
            raise _lost(error) from None
        if failed is not None:
            self.cut_off = False
            raise failed(words.decode(errors="replace"))
        handles = ipc.receive_handles(self.socket, expect) if expect else []
        self.cut_off = False
        return told, handles


def _first_answer(descriptor: Descriptor, timeout: float | None, users: Collection[int]) -> tuple[_Link, OpaqueFd]:
    """Connect, and ask for the contents: again, where an exporter in a flood of strangers has dropped this one."""
    deadline = None if timeout is None else time.monotonic() + timeout
    for left in reversed(range(_TRIES)):
        link = _Link(descriptor, timeout, deadline, users)
        try:
            return link, link.ask(ATTACH, (OpaqueFd,))[1][0]
        except BaseException:
            link.socket.close()
            if not (link.dropped and left):
                raise
    raise AssertionError


def _lost(error: OSError) -> PeerError:
    late = "it did not answer within the time-out" if isinstance(error, TimeoutError) else str(error)
    if isinstance(error, PermissionError):
        return PeerError(f"expected a socket that this user can reach, got {late}; see users= and {VARIABLE}.")
    return PeerError(f"the exporting process is not there: {late}; is it alive and serving, with a free descriptor?")


def attach(
    descriptor: bytes, *, timeout: float | None = 10.0, device: Device | None = None, users: Iterable[int] = (),
    label: str | None = None,
) -> AttachedArrays:  # fmt: skip
    """Attach the arrays of a share: the same memory, here.

    Connects to the sharing process, receives the handles, and maps them: ``cuIpcOpenMemHandle``, or
    ``cuMemImportFromShareableHandle``, ``cuMemMap`` and ``cuMemSetAccess`` (``hip...``); ``mmap`` on the host. Memory
    that another attachment of this process has is not mapped again. The connection is the lease: it ends with the
    attachment or with the process. In the sharing process itself it is that process's own memory.

    The bytes are read and written as the sharing process has them, at any time. Order them by
    `AttachedArrays.acquire`, or otherwise.

    Parameters
    ----------
    descriptor : bytes
        ``bytes(share)``. It opens any number of attachments, one after the other or at once, until the share is closed.
    timeout : float, optional
        Seconds for the whole call, and again for each answer that the first `acquire` needs. None: no limit.
        Default: 10.
    device : Device, optional
        Device that maps the memory. Another one than the arrays' needs peer access to that
        (`Device.can_access`). Default: the arrays' own, by its identity and not by its number.
    users : iterable of int
        User ids whose processes may be the sharing one, beside this process's own.
    label : str, optional
        Name of the object in messages, warnings and its `repr`.

    Returns
    -------
    AttachedArrays
        The arrays, which the caller closes. Whatever handles came are consumed, also after an error.

    Raises
    ------
    ArgumentTypeError, InvalidArgumentError
        `descriptor` is not a share's, is damaged, or is of another version of gpuinterop.
    ResourceClosedError
        The share was closed, or its memory was freed: ask its process for a new descriptor.
    PeerError
        The sharing process is not there, does not answer, runs as another user, or sends what it cannot mean. Or the
        descriptor is of another host, or of before a restart.
    DeviceNotFoundError
        This process does not see the device that has the memory. Pass another as `device`.
    UnsupportedError
        The device cannot import such memory (`Operation.IMPORT_ARRAY`), has no peer access to it, or both processes
        have one PID value, each in its own namespace, which drivers take for one process.
    DriverError
        The driver refused.

    Examples
    --------
    >>> with gi.share(buffer.view((2, 2), "float32")) as shared:
    ...     descriptor = bytes(shared)  # send it by any way
    ...     with gi.attach(descriptor) as attached:  # in any process of this host
    ...         attached.view.shape
    (2, 2)

    Closed shares let no reader in:

    >>> gi.attach(descriptor)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.ResourceClosedError: the share was closed...
    """
    found = Descriptor.parse(descriptor)
    if found.boot != boot_id():
        raise PeerError("the share is another host's, or of before a restart; attach it where its process runs.")
    limit = check_timeout(timeout)
    if device is not None:
        check_device(device, "device")
    drain()
    if is_here(found.process):
        return _attach_here(found, device, label)
    link, told = _first_answer(found, limit, users_of(users))
    try:
        with told:
            contents = Contents.read(told)
        used = device_for(contents, device)
        lease = Lease(partial(_enrol, link, used), partial(_end, link.socket), partial(link.ask, COUNT, ()))
        attached = AttachedArrays(used, found, contents, lease, label)
    except BaseException:
        link.socket.close()
        raise
    try:
        attached._regions = _map_all(attached, link)
    except BaseException:
        attached.close()
        raise
    link.deadline = None
    return attached


def _map_all(attached: AttachedArrays, link: _Link) -> list[SharedMemory]:
    """Map the regions; ask for handles if one is not imported yet."""
    regions, owner, lease = attached._contents.regions, link.descriptor.process, attached.lifetime
    found = system.under(_importing, lambda: [_known(attached.device, one, owner, lease) for one in regions])
    if None not in found:
        return cast("list[SharedMemory]", found)
    kinds = [cast("type[FdHandle]", region.kind) for region in regions if not region.handles for _ in region.keys]
    handles: list[FdHandle] = []
    try:
        while rest := kinds[len(handles) :]:
            handles += link.ask(BLOCKS, rest[: ipc.MAX_HANDLES], len(handles))[1]
        left = iter(handles)

        def place(at: int, region: Region) -> None:
            mine = region.handles or [next(left) for _ in region.keys]
            known = found[at] or _known(attached.device, region, owner, lease)
            found[at] = known or _mapped(attached.device, region, mine, owner, lease)

        for at, region in enumerate(regions):
            system.under(_importing, place, at, region)
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
        problem = (
            f"descriptor: the memory is of a device that is hidden here ({place.name}); pass another one as device="
        )
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


def _attach_here(descriptor: Descriptor, device: Device | None, label: str | None) -> AttachedArrays:
    """Attach a share of this process."""
    offer: Any = here().offers.get(descriptor.share)
    if offer is None or not offer.descriptor.opens(descriptor.token):
        raise ResourceClosedError(
            "the share was closed or dropped, or the descriptor is another's; share anew, and keep the share."
        )
    if device not in (None, offer.laid.device):
        raise InvalidArgumentError("device", f"expected {offer.laid.device!r} in the sharing process, got {device!r}.")
    attached: AttachedArrays = offer.attach_here(label)
    return attached


def _end(link: socket.socket, reader: Reader | None) -> None:
    here().end_lease(link, None if reader is None else reader.close_if_released)


def _enrol(link: _Link, device: Device, label: str) -> Reader:
    """Take a place in the order; from now on the exporter's death is noticed."""
    number, handles = link.ask(ENROL, (TimelineFd, TimelineFd, OpaqueFd))
    with handles[0], handles[1], handles[2], contextlib.ExitStack() as undo:
        board = undo.enter_context(Board.load(handles[2]))
        slot = board.slot(number)
        writer, own = (undo.enter_context(device.import_semaphore(one)) for one in handles[:2])
        reader = Reader(board, writer, own, slot, label)
        here().watch(link.socket, reader.let_go)
        undo.pop_all()
        return reader
