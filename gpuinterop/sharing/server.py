"""Answers other processes' requests, notices that they have exited, and ends the shares that nobody holds.

A process has one server: a socket, the links of other processes, and the counts. The first share makes it, and it lasts
until the process exits.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property
from multiprocessing.util import Finalize
from typing import Final, TypeVar, TypeVarTuple, cast

from .. import system
from .._arguments import NoCopy
from .._core.device import Device
from .._core.lifetime import after_fork
from .._core.release import shown
from ..backend import Block, SharingBackend
from ..errors import DriverError, InvalidArgumentError, PeerError, ResourceClosedError
from ..handles import EventFd, FdHandle, Handle, IpcMemHandle, OpaqueFd
from ..ipc import MAX_FDS, Connection, Message, peer
from .counts import Holds, Sums, Words
from .folder import VARIABLE, check_peer, folder, in_folder, open_to_all, remove_old_sockets
from .loop import TICK_S, Singleton, loop
from .messages import ATTACH, BLOCKS, DONE, ENROL, HELLO, MAX_ADDRESS, SHARE, Descriptor, Region, boot_id, failure

SomeOffer = TypeVar("SomeOffer", bound="Offer")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

HANG_UP: Final = 0x2000  # EPOLLRDHUP and POLLRDHUP
driver_lock: Final = threading.RLock()
"""Held during every export and attach, because HIP's race with each other (rocm-systems #11892)."""
CLOSED: Final = "the share was closed; ask its process for a new descriptor."


class Offer:
    """An object with a slot, which other processes can hold: all that the server calls.

    The server enters and finds it under its lock, and calls the methods without that lock, except `poll`.
    """

    token = secrets.token_bytes(16)
    serial = slot = 0
    users: Collection[int] = ()
    blocks: Sequence[SharedBlock] = ()

    def encoded(self) -> bytes:
        """The `Contents`, for a process that attaches."""
        raise PeerError("expected a share of arrays, got an object that cannot be attached.")

    def enrol(self, guest: Guest, number: bytes) -> tuple[int, Sequence[Handle]]:
        """A reader's place in the order, and the handles for its process."""
        raise PeerError("expected a share of arrays, got an object without an order.")

    def poll(self) -> None:
        """Drop the readers that have left. Called while readers are in the order."""

    def end(self) -> None:
        """No process holds the object any more."""


class SharedBlock:
    """A block that other processes can request."""

    def __init__(self, number: int, device: Device, block: Block) -> None:
        self.number, self.device, self.block, self.uses = number, device, block, 0

    def export(self) -> Handle:
        """Make a handle for another process."""
        backend = cast(SharingBackend, self.device.driver)
        handle = system.under(driver_lock, backend.export_block, self.device._handle, self.block)
        if isinstance(handle, FdHandle):
            handle.trusted = True  # closing this process's own file cannot block
        return handle

    @cached_property
    def data(self) -> bytes:
        return cast(IpcMemHandle, self.export()).data if self.block.kind.handle_type is IpcMemHandle else b""


def region_of(blocks: Sequence[SharedBlock]) -> Region:
    """Blocks at consecutive addresses, in the form that other processes receive."""
    numbers, sizes = tuple(shared.number for shared in blocks), tuple(shared.block.size for shared in blocks)
    return Region(blocks[0].block.kind.handle_type, numbers, sizes, blocks[0].data)


class Guest(NoCopy):
    """Another process with a link to this one."""

    def __init__(self, link: socket.socket) -> None:
        self.connection, self.ended = Connection(link), False
        self.pid, self.user = peer(link)
        self.counts: Words | None = None
        self.blocks = set[int]()
        """The blocks of the shares it has attached; a process of another user can request only these."""


class Server(NoCopy):
    """The socket, the links of other processes, and the counts of this process."""

    def __init__(self) -> None:
        self.nonce, self._name = secrets.token_bytes(16), f"gpuinterop-{secrets.token_hex(8)}.sock"
        self.offers: dict[int, Offer] = {}
        self.ordered: dict[Offer, None] = {}
        """The offers that have readers in their order."""
        self._lock = threading.RLock()
        """Held to change offers, counts and blocks; only the loop changes the rest."""
        self._users, self._serials = frozenset[int](), itertools.count(1)
        self._guests: dict[Guest, None] = {}
        self._blocks: dict[tuple[Device, Block], SharedBlock] = {}
        self._numbers: dict[int, SharedBlock] = {}
        self.me = Holds()
        """The slots of its own that this process holds."""
        remove_old_sockets(place := folder())
        with ExitStack() as undo:
            self.me.counts = self.me.theirs = page = Words()
            undo.callback(page.handle.close)
            wake = system.call("eventfd", os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.me.bell = undo.enter_context(EventFd.adopt(wake))
            self._listener, self._path = self._listen(place)
            undo.pop_all()
        self._sums = Sums(page)
        loop().watch(wake, self._rung)
        loop().on_pass[self._check_socket] = None
        Finalize(None, self._unlink, exitpriority=0)  # runs also in multiprocessing's children, unlike atexit

    # -- what is shared ----------------------------------------------------------------------------------------------

    @system.locked
    def enter(self, offer: Offer, messages: int) -> None:
        """Give the offer a serial and a slot, count its messages, and let readers attach."""
        loop().start()  # first, because it can fail
        if offer.users:
            system.call(f"chmod({self._path})", open_to_all, self._path)
            self._users = self._users.union(offer.users)
        serial = next(self._serials)
        offer.slot = self._sums.take(serial)
        self.offers[offer.slot], offer.serial = offer, serial
        if messages:
            self._send(offer, messages)

    @system.locked
    def find(self, descriptor: Descriptor, kind: type[SomeOffer], *, attached: bool) -> SomeOffer:
        """The offer that a descriptor opens. If it is closed, only for a process that has attached."""
        slot, serial = descriptor.slot, descriptor.serial
        offer = self.offers.get(slot)
        if not isinstance(offer, kind) or offer.serial != serial or not (attached or self.me.is_open(slot, serial)):
            raise ResourceClosedError(CLOSED)
        if not hmac.compare_digest(descriptor.token, offer.token):
            raise PeerError("the token is not this share's; pass the descriptor unchanged.")
        return offer

    def holders(self, slot: int) -> int:
        return self._sums.holders(slot)

    def descriptor(self, offer: Offer) -> bytes:
        """An offer's descriptor; this process's, if the offer has no slot. Repairs the socket first."""
        self._check_socket()
        return bytes(Descriptor(boot_id(), self.nonce, offer.serial, offer.slot, offer.token, self._path))

    def withdraw(self, offer: Offer) -> None:
        """Refuse new readers, and end the offer once no process holds it and all its messages have arrived."""
        if not offer.serial:  # no reader could attach
            offer.end()
            return
        self.shut(offer, ends=True)
        self.poll()  # the program may not serve again
        loop().wake()

    @system.locked
    def shut(self, offer: Offer, *, ends: bool) -> None:
        """Refuse new readers; with `ends`, end the offer once no process holds it."""
        if self.offers.get(offer.slot) is offer:  # else it has ended, and another offer has the slot
            self._sums.close(offer.slot)
            if ends:
                self._sums.end_unheld(offer.slot)

    @system.locked
    def send(self, offer: Offer) -> bool:
        """Count one more message, which keeps the offer until it arrives; False if the offer has ended."""
        if is_open := self.offers.get(offer.slot) is offer:
            self._sums.forget_surplus(offer.slot)
            self._send(offer, 1)
        return is_open

    def _send(self, offer: Offer, messages: int) -> None:
        self.me.move(offer.slot, -messages)
        self._sums.end_unheld(offer.slot)

    def poll(self) -> None:
        """Add up the counts, and end the offers that no process holds."""
        for offer in self._over():
            shown(offer.end)

    @system.locked
    def _over(self) -> list[Offer]:
        for offer in list(self.ordered):
            offer.poll()
        return [self.offers.pop(slot) for slot in self._sums.over()]

    @system.locked
    def use(self, device: Device, blocks: Iterable[Block]) -> list[SharedBlock]:
        """Find or assign the numbers of blocks, which stay in use until `drop`."""
        used = []
        for block in blocks:
            if (shared := self._blocks.get((device, block))) is None:
                shared = self._blocks[device, block] = SharedBlock(next(self._serials), device, block)
                self._numbers[shared.number] = shared
            shared.uses += 1
            used.append(shared)
        return used

    @system.locked
    def drop(self, blocks: Iterable[SharedBlock]) -> None:
        """Undo one `use` of blocks."""
        for shared in blocks:
            shared.uses -= 1
            if not shared.uses:
                del self._blocks[shared.device, shared.block], self._numbers[shared.number]
                for guest in list(self._guests):
                    guest.blocks.discard(shared.number)

    def _rung(self, _events: int) -> None:
        """Add up the counts, at most once in `TICK_S`."""
        bell, again = self.me.bell.fd, time.monotonic() + TICK_S
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(bell)
        self.poll()
        loop().change(bell, 0)

        def listens() -> bool:
            if late := time.monotonic() >= again:
                loop().change(bell, select.EPOLLIN)
            return late

        loop().repeat(listens)

    def forget(self) -> None:
        """Close the descriptors of a forked child's copy."""
        for link in (self._listener, *(guest.connection.socket for guest in self._guests)):
            link.close()
        self.me.bell.close()
        self.me.counts.handle.close()

    # -- the socket --------------------------------------------------------------------------------------------------

    def _listen(self, place: str) -> tuple[socket.socket, str]:
        path = os.path.join(place, self._name)
        if len(os.fsencode(path)) > MAX_ADDRESS:
            problem = f"expected a path of {MAX_ADDRESS} bytes or fewer, got {path}; set a shorter folder."
            raise InvalidArgumentError(VARIABLE, problem)
        hidden = os.path.join(place, f".gpuinterop-{secrets.token_hex(8)}")  # shorter than the path
        listener = system.call("socket", socket.socket, socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

        def bind() -> None:
            os.fchmod(listener.fileno(), 0o600)  # bind creates the file with this mode; the umask is process-wide
            listener.bind(hidden)
            listener.listen(1024)
            os.rename(hidden, path)  # from now on, a refused connection means that the process has exited
            loop().watch(listener.fileno(), self._welcome)

        try:
            in_folder(VARIABLE, f"bind({path})", bind)
        except DriverError:
            listener.close()
            with contextlib.suppress(OSError):
                os.unlink(hidden)
            raise
        return listener, path

    @system.locked
    def _check_socket(self) -> None:
        """Make the socket again if it was removed, for example by a cleaner of /tmp: descriptors contain its path."""
        if not os.path.exists(self._path):
            removed, place = self._listener, os.path.dirname(self._path)
            in_folder(VARIABLE, f"mkdir({place})", os.makedirs, place, 0o711 if self._users else 0o700, True)
            self._listener, _ = self._listen(place)
            loop().unwatch(removed.fileno())
            removed.close()
            if self._users:
                open_to_all(self._path)

    def _unlink(self) -> None:
        loop().on_pass.clear()  # else a pass would make the socket again
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _welcome(self, _events: int) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):  # out of descriptors; meanwhile other threads can close some
                time.sleep(TICK_S)
            return
        link.settimeout(None)  # else Python waits for the program's default time-out
        guest = Guest(link)
        self._guests[guest] = None
        loop().watch(link.fileno(), lambda _: self._serve(guest))
        try:
            check_peer(link, self._users)  # before anything is read
        except PeerError as error:
            self._refuse(guest, error)

    # -- guests ------------------------------------------------------------------------------------------------------

    def _serve(self, guest: Guest) -> None:
        connection = guest.connection
        try:
            if connection.flush() and (message := connection.part()) is not None:
                with message:
                    self._answer(guest, message)
            events = select.EPOLLIN if connection.flush() else select.EPOLLOUT
        except (OSError, PeerError, DriverError) as error:
            if guest.counts is None or has_hung_up(connection.socket):  # it has another version, or has exited
                self._refuse(guest, error)
                return
            # A process that lives keeps what it holds.
            events = 0 if isinstance(error, PeerError) else select.EPOLLOUT
            time.sleep(TICK_S)  # out of memory or descriptors; meanwhile other threads can free some
        loop().change(connection.socket.fileno(), events)

    def _refuse(self, guest: Guest, error: Exception) -> None:
        with contextlib.suppress(OSError):
            guest.connection.send(*failure(error, 1))
        self._dismiss(guest)

    def _dismiss(self, guest: Guest) -> None:
        """Drop everything that an exited process held."""
        link = guest.connection.socket
        loop().unwatch(link.fileno())
        guest.connection.discard()
        link.close()
        del self._guests[guest]
        guest.ended = True
        if guest.counts is not None:
            system.under(self._lock, self._sums.remove, guest.counts)
        self.poll()

    def _answer(self, guest: Guest, message: Message) -> None:
        handles = list[Handle]()
        try:
            body = self._body_of(guest, message, handles)
        except BaseException as error:  # including errors of a driver or an array library
            for handle in handles:
                handle.close()
            guest.connection.send(*failure(error, message.number))
            if not isinstance(error, Exception):
                raise
        else:
            guest.connection.send(DONE, message.number, body, handles, owned=True)

    def _body_of(self, guest: Guest, message: Message, handles: list[Handle]) -> bytes:
        """Return the body of the answer, and append its handles."""
        if message.kind == HELLO:
            if message.body != self.nonce:
                raise PeerError("another process has this address now; ask for a new descriptor.")
            with message.take(OpaqueFd) as page:
                guest.counts = Words(page)
            system.under(self._lock, self._sums.add, guest.counts)
            handles.append(OpaqueFd.adopt_duplicate(self.me.counts.handle.fd))
            handles.append(EventFd.adopt_duplicate(self.me.bell.fd))
            return b""
        if message.kind == BLOCKS:
            numbers = [number for (number,) in struct.iter_unpack("<Q", message.body)]
            blocks = [self._numbers.get(number) for number in numbers]
            if None in blocks or not (guest.user == os.geteuid() or guest.blocks.issuperset(numbers)):
                raise ResourceClosedError(CLOSED)
            handles.extend(shared.export() for shared in blocks if shared is not None)
            return b""
        if message.kind not in (ATTACH, ENROL):
            raise PeerError(f"expected a request of this version, got one of kind {message.kind}.")
        serial, slot, token = SHARE.unpack_from(message.body)
        descriptor = Descriptor(b"", self.nonce, serial, slot, token, "")
        offer = self.find(descriptor, Offer, attached=message.kind == ENROL)
        check_peer(guest.connection.socket, offer.users)
        if message.kind == ENROL:
            place, exported = offer.enrol(guest, message.body[SHARE.size :])
            handles.extend(exported)
            return place.to_bytes(4, "little")
        contents = offer.encoded()
        numbers = [shared.number for shared in offer.blocks]
        if guest.blocks.isdisjoint(numbers):  # else it asks for the blocks that it lacks
            sent = [shared for shared in offer.blocks if shared.block.kind.handle_type is not IpcMemHandle]
            handles.extend(shared.export() for shared in sent[:MAX_FDS])
        guest.blocks.update(numbers)
        return contents


def has_hung_up(link: socket.socket) -> bool:
    """Whether the other process has exited."""
    return bool(system.poll(link.fileno(), HANG_UP, 0))


# -- this process's server ---------------------------------------------------------------------------------------------

server: Final = Singleton(Server)


def is_here(process: bytes) -> bool:
    """Whether a number identifies this process."""
    return any(made.nonce == process for made in server.made)


@after_fork
def _forked() -> None:
    driver_lock._at_fork_reinit()  # type: ignore[attr-defined]
