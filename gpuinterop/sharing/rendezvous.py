"""The place where other processes come: one socket for each process that shares, its links, and the counts.

They are made with the first share, and live until the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import os
import secrets
import select
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property
from multiprocessing.util import Finalize
from typing import Any, Final, cast

from .. import system
from .._arguments import NoCopy, check_int
from .._core.device import Device
from .._core.drain import shown
from .._core.monitor import after_fork
from ..backend import Block, SharingBackend
from ..errors import ArgumentTypeError, DriverError, InvalidArgumentError, PeerError, ResourceClosedError
from ..handles import EventFd, FdHandle, Handle, IpcMemHandle, OpaqueFd
from ..ipc import MAX_FDS, Connection, Message, peer
from .counts import Holds, Sums, Words
from .descriptor import (
    ATTACH,
    BLOCKS,
    DONE,
    ENROL,
    ERRORS,
    FAILED,
    HELLO,
    MAX_ADDRESS,
    MAX_ERROR,
    SHARE,
    Descriptor,
    Region,
    boot_id,
)
from .loop import TICK_S, One, loop

VARIABLE: Final = "GPUINTEROP_SHARE_DIR"
_OVERFLOW: Final = 65534
"""What a user looks like that this user namespace does not know."""
driver_lock: Final = threading.RLock()
"""Held round every export and every attach: HIP's race with each other (rocm-systems #11892)."""
CLOSED: Final = "the share was closed; ask its process for a new descriptor."


class Offer:
    """What has a slot. It has `contents`, if it is attached, and `enrol`, if it has an order. The loop calls these."""

    token = secrets.token_bytes(16)
    serial = slot = 0
    users: Collection[int] = ()
    threaded = True
    blocks: Sequence[Exported] = ()

    def end(self) -> None:
        """End it."""


class Exported:
    """A block that other processes may ask for."""

    def __init__(self, number: int, device: Device, block: Block) -> None:
        self.number, self.device, self.block = number, device, block
        self.uses = 0

    def export(self) -> Handle:
        """A handle for another process."""
        backend = cast(SharingBackend, self.device.driver)
        handle = system.under(driver_lock, backend.export_block, self.device._handle, self.block)
        if isinstance(handle, FdHandle):
            handle.trusted = True  # this process's own file blocks no close
        return handle

    @cached_property
    def data(self) -> bytes:
        """The handle itself, where it is not a descriptor."""
        return cast(IpcMemHandle, self.export()).data if self.block.behind.handle_type is IpcMemHandle else b""


def region_of(blocks: Sequence[Exported]) -> Region:
    """Blocks at consecutive addresses, as other processes are told of them."""
    kind, sizes = blocks[0].block.behind.handle_type, tuple(one.block.size for one in blocks)
    return Region(kind, tuple(one.number for one in blocks), sizes, blocks[0].data)


class Guest(NoCopy):
    """A process that has a link to this one."""

    def __init__(self, link: socket.socket) -> None:
        self.connection = Connection(link)
        self.pid, self.user = peer(link)
        self.counts: Words | None = None
        self.blocks: set[int] = set()
        """What a process of another user may ask for: the blocks of the shares that it has attached."""
        self.ended = False


class Server(NoCopy):
    """The socket, the links of other processes, and the counts of this process, until it ends."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(16)
        self.offers: dict[int, Any] = {}
        """What is shared, by slot."""
        self.ordered: dict[Any, None] = {}
        """The offers whose order has readers."""
        self._lock = threading.RLock()
        """Held to change offers, counts and blocks; the rest is the loop's."""
        self._users: frozenset[int] = frozenset()
        """Those of all shares."""
        self._serials = itertools.count(1)
        self._guests: dict[Guest, None] = {}
        self._blocks: dict[tuple[Device, Block], Exported] = {}
        self._numbers: dict[int, Exported] = {}
        self._name = f"gpuinterop-{secrets.token_hex(8)}.sock"
        _tidy(place := folder())
        self.me = Holds()
        """What this process holds of its own."""
        with ExitStack() as undo:
            self.me.counts = self.me.theirs = page = Words()
            undo.callback(page.handle.close)
            wake = system.call("eventfd", os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.me.bell = undo.enter_context(EventFd.adopt(wake))
            self._listener, self._path = self._listen(place)
            undo.pop_all()
        self._sums = Sums(page)
        loop().watch(wake, self._rung)
        loop().on_pass = self._look_at_socket
        Finalize(None, self._unlink, exitpriority=0)  # also in a child of multiprocessing, which runs no other exit

    # -- what is shared ----------------------------------------------------------------------------------------------

    @system.locked
    def enter(self, offer: Offer, messages: int) -> None:
        """Let readers in, give the offer a serial and a slot, and count messages."""
        if offer.threaded:
            loop().start()  # first: it may fail
        if offer.users:
            system.call(f"chmod({self._path})", _open_to_all, self._path)
            self._users = self._users.union(offer.users)
        serial = next(self._serials)
        offer.slot = self._sums.take(serial)
        self.offers[offer.slot], offer.serial = offer, serial
        if messages:
            self._send(offer, messages)

    @system.locked
    def find(self, one: Descriptor, attached: bool) -> Any:
        """The offer of this process that a descriptor opens; one that is closed only to those who have attached."""
        offer = self.offers.get(one.slot)
        if offer is None or offer.serial != one.serial or not (attached or self.me.stands(one.slot, one.serial)):
            raise ResourceClosedError(CLOSED)
        if not hmac.compare_digest(one.token, offer.token):
            raise PeerError("the token is not this share's; take the descriptor as it came.")
        return offer

    def holders(self, slot: int) -> int:
        """How often a slot is held, by all processes."""
        return self._sums.holders(slot)

    def descriptor(self, offer: Offer) -> bytes:
        """The bytes of an offer's descriptor, once the socket is there; of this process, if the offer has no slot."""
        self._look_at_socket()
        return bytes(Descriptor(boot_id(), self.nonce, offer.serial, offer.slot, offer.token, self._path))

    def withdraw(self, offer: Offer) -> None:
        """Let no reader in any more, and end the offer once nobody holds it and all its messages have come."""
        if not offer.serial:  # it has let nobody in
            offer.end()
            return
        self.shut(offer, ends=True)
        self.look()  # the program may not serve any more
        loop().wake()

    @system.locked
    def shut(self, offer: Offer, *, ends: bool) -> None:
        """Let no reader in any more; end the offer once nobody holds it, if it ends."""
        if self.offers.get(offer.slot) is offer:  # else it has ended, and another has the slot
            self._sums.close(offer.slot)
            if ends:
                self._sums.end_unheld(offer.slot)

    @system.locked
    def send(self, offer: Offer) -> bool:
        """Count a message more, which keeps the offer until it has come; False if that has ended."""
        if stands := self.offers.get(offer.slot) is offer:
            self._sums.forget_surplus(offer.slot)
            self._send(offer, 1)
        return stands

    def _send(self, offer: Offer, messages: int) -> None:
        self.me.move(offer.slot, -messages)
        self._sums.end_unheld(offer.slot)

    def look(self) -> None:
        """Add up the counts, and end what nobody holds."""
        for offer in self._over():
            shown(offer.end)

    @system.locked
    def _over(self) -> list[Any]:
        for offer in list(self.ordered):
            offer.look()
        return [self.offers.pop(slot) for slot in self._sums.over()]

    @system.locked
    def use(self, device: Device, blocks: Iterable[Block]) -> list[Exported]:
        """Number blocks, or find their numbers; each is used until `drop`."""
        found = []
        for block in blocks:
            if (one := self._blocks.get((device, block))) is None:
                one = self._blocks[device, block] = Exported(next(self._serials), device, block)
                self._numbers[one.number] = one
            one.uses += 1
            found.append(one)
        return found

    @system.locked
    def drop(self, blocks: Iterable[Exported]) -> None:
        """Use blocks no more."""
        for one in blocks:
            one.uses -= 1
            if not one.uses:
                del self._blocks[one.device, one.block], self._numbers[one.number]
                for guest in list(self._guests):
                    guest.blocks.discard(one.number)

    def serve(self, timeout: float | None) -> None:
        """Serve in the calling thread for `timeout` seconds, or until the last offer that no thread serves is over."""
        loop().run(system.seconds_left(timeout), lambda: all(one.threaded for one in list(self.offers.values())))

    def _rung(self, _events: int) -> None:
        """Add up the counts, and then not again for a moment, however often it rings."""
        bell, again = self.me.bell.fd, time.monotonic() + TICK_S
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(bell)
        self.look()
        loop().change(bell, 0)

        def listens() -> bool:
            if late := time.monotonic() >= again:
                loop().change(bell, select.EPOLLIN)
            return late

        loop().look_again(listens)

    def forget(self) -> None:
        """Close the descriptors: this is a child's copy."""
        for link in (self._listener, *(one.connection.socket for one in self._guests)):
            link.close()
        for handle in (self.me.bell, self.me.counts.handle):
            handle.close()

    # -- the socket --------------------------------------------------------------------------------------------------

    def _listen(self, place: str) -> tuple[socket.socket, str]:
        path = os.path.join(place, self._name)
        if len(os.fsencode(path)) > MAX_ADDRESS:
            raise InvalidArgumentError(
                VARIABLE, f"expected a path of {MAX_ADDRESS} bytes or fewer, got {path}; set a shorter folder."
            )
        hidden = os.path.join(place, f".gpuinterop-{secrets.token_hex(8)}")  # shorter than the path
        listener = system.call("socket", socket.socket, socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(listener.fileno(), 0o600)  # so the file is made with this mode; the umask is the process's
            listener.bind(hidden)
            listener.listen(1024)
            os.rename(hidden, path)  # who sees it can connect, or its process has died
            loop().watch(listener.fileno(), self._welcome)
        except OSError as error:
            listener.close()
            with contextlib.suppress(OSError):
                os.unlink(hidden)
            raise system.driver_error(f"bind({path})", error.errno or 0) from error
        return listener, path

    @system.locked
    def _look_at_socket(self) -> None:
        """Make the socket anew where something, as a cleaner of /tmp, has removed it: descriptors name it."""
        if not os.path.exists(self._path):
            gone, place = self._listener, os.path.dirname(self._path)
            system.call(f"mkdir({place})", os.makedirs, place, 0o711 if self._users else 0o700, True)
            self._listener, _ = self._listen(place)
            loop().unwatch(gone.fileno())
            gone.close()
            if self._users:
                _open_to_all(self._path)

    def _unlink(self) -> None:
        loop().on_pass = bool  # it would make the socket anew
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _welcome(self, _events: int) -> None:
        try:
            link, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors: the others have theirs meanwhile
            time.sleep(TICK_S)
            return
        link.settimeout(None)  # where the program has a default: Python would wait for it
        guest = Guest(link)
        self._guests[guest] = None
        loop().watch(link.fileno(), lambda _: self._serve(guest))

    # -- guests ------------------------------------------------------------------------------------------------------

    def _serve(self, guest: Guest) -> None:
        connection = guest.connection
        try:
            if connection.flush() and (message := connection.part()) is not None:
                with message:
                    self._answer(guest, message)
            loop().change(connection.socket.fileno(), select.EPOLLIN if connection.flush() else select.EPOLLOUT)
        except (OSError, PeerError, DriverError) as error:  # it has gone, or is of another version
            with contextlib.suppress(OSError):
                connection.send(FAILED + ERRORS.index(PeerError), 1, str(error).encode(errors="replace"))
            self._dismiss(guest)
        except BaseException:
            self._dismiss(guest)
            raise

    def _dismiss(self, guest: Guest) -> None:
        """Take back what a process holds that has ended."""
        link = guest.connection.socket
        loop().unwatch(link.fileno())
        guest.connection.discard()
        link.close()
        del self._guests[guest]
        guest.ended = True
        if guest.counts is not None:
            system.under(self._lock, self._sums.remove, guest.counts)
        self.look()

    def _answer(self, guest: Guest, message: Message) -> None:
        body, handles, kind = b"", list[Handle](), DONE
        try:
            body = self._asked(guest, message, handles)
        except Exception as error:  # also a driver's, or one of an array's library
            for handle in handles:
                handle.close()
            which = type(error) if type(error) in ERRORS else ERRORS[-1]
            text = str(error) if which is type(error) else f"{type(error).__name__}: {error}"
            kind, body, handles = FAILED + ERRORS.index(which), text.encode(errors="replace")[:MAX_ERROR], []
        guest.connection.send(kind, message.number, body, handles, owned=True)

    def _asked(self, guest: Guest, message: Message, handles: list[Handle]) -> bytes:
        """The body of the answer; adds its handles."""
        if message.kind == HELLO:
            check_peer(guest.connection.socket, self._users)
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
            handles.extend(one.export() for one in blocks if one is not None)
            return b""
        if message.kind not in (ATTACH, ENROL):
            raise PeerError(f"expected a request of this version, got one of kind {message.kind}.")
        serial, slot, token = SHARE.unpack_from(message.body)
        offer = self.find(Descriptor(b"", self.nonce, serial, slot, token, ""), message.kind == ENROL)
        check_peer(guest.connection.socket, offer.users)
        if message.kind == ENROL:
            place, found = offer.enrol(guest, message.body[SHARE.size :])
            handles.extend(found)
            return int(place).to_bytes(4, "little")
        contents: bytes = offer.contents()
        numbers = [one.number for one in offer.blocks]
        if guest.blocks.isdisjoint(numbers):  # else it asks for those that it does not have
            beside = [one for one in offer.blocks if one.block.behind.handle_type is not IpcMemHandle]
            handles.extend(one.export() for one in beside[:MAX_FDS])
        guest.blocks.update(numbers)
        return contents


# -- users, and the folder ---------------------------------------------------------------------------------------------


def check_peer(link: socket.socket, users: Collection[int]) -> None:
    """Refuse the other side's user, unless it is this process's own or one of `users`; pids are not looked at."""
    (_, user), mine = peer(link), os.geteuid()
    if user == _OVERFLOW or (user != mine and user not in users):
        raise PeerError(
            f"expected a process of user {mine}, got one of user {user}"
            + (", which stands for users of other namespaces" if user == _OVERFLOW else "")
            + "; run both as one user, or name it in users= on both sides."
        )


def users_of(users: Iterable[int]) -> frozenset[int]:
    """Check ``users=``."""
    if not isinstance(users, Iterable):
        raise ArgumentTypeError("users", f"expected user ids, got {type(users).__name__}; pass a list of int.")
    return frozenset(check_int(user, "users", minimum=0) for user in users)


def folder() -> str:
    """Folder of this process's socket."""
    for name in (VARIABLE, "XDG_RUNTIME_DIR"):
        if given := os.environ.get(name):
            if not os.path.isdir(given):
                raise InvalidArgumentError(name, f"expected a folder, got {given!r}; make it, or set {VARIABLE}.")
            return os.path.abspath(given)
    return private_folder(VARIABLE)


def private_folder(variable: str) -> str:
    """Make a folder of this user alone in the temporary folder; `variable` is what sets another one."""
    private = os.path.join(system.call("tempdir", tempfile.gettempdir), f"gpuinterop-{os.geteuid()}")
    system.call(f"mkdir({private})", os.makedirs, private, 0o700, True)  # True: the folder may be there
    found = system.call(f"lstat({private})", os.lstat, private)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidArgumentError(
            variable, f"expected {private!r} to be a folder of this user alone, it is another's; set {variable}."
        )
    return private


def _is_our_socket(found: os.stat_result) -> bool:
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def _tidy(place: str) -> None:
    """Remove the sockets of this user's processes that were killed.

    Those that live notice nothing: a stream socket refuses one of datagrams without its listener.
    """
    with contextlib.suppress(OSError), os.scandir(place) as files:
        for file in files:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                if not (file.name.startswith("gpuinterop-") and file.name.endswith(".sock")):
                    continue
                if not _is_our_socket(file.stat(follow_symlinks=False)):
                    continue
                if probe.connect_ex(file.path) == errno.ECONNREFUSED:
                    os.unlink(file.path)


def _open_to_all(path: str) -> None:
    """Let every user connect: `check_peer` looks who it is. Another user's folder may have another file at the path."""
    file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_our_socket(os.fstat(file)):
            raise InvalidArgumentError(VARIABLE, f"expected this process's socket at {path}, got another file.")
        os.chmod(f"/proc/self/fd/{file}", 0o666)
    finally:
        os.close(file)


# -- the one of this process -------------------------------------------------------------------------------------------

server: Final = One(Server)
"""This process's server."""


def is_here(process: bytes) -> bool:
    """Whether a number is this process's."""
    return any(one.nonce == process for one in server.made)


@after_fork
def _forked() -> None:
    driver_lock._at_fork_reinit()  # type: ignore[attr-defined]
