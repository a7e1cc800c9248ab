"""The place where other processes come: one socket and one thread for each process that shares, and the counts.

The thread serves all that the process shares, and watches the links that the process has with others; or the user's own
loop does (`ArrayShare.serve`). It starts with the first share or link that needs it, and ends with the last.
"""

from __future__ import annotations

import contextlib
import errno
import functools
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
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, TypeVar, TypeVarTuple, cast

from .. import system, timeline
from .._arguments import NoCopy, check_int
from .._core.device import Device
from .._core.drain import shown
from .._core.monitor import after_fork
from ..backend import Block, SharingBackend
from ..errors import ArgumentTypeError, DriverError, InvalidArgumentError, PeerError, ResourceClosedError, report
from ..handles import EventFd, FdHandle, Handle, IpcMemHandle, OpaqueFd, VmmFd
from ..ipc import MAX_FDS, Connection, Message, peer_user
from .counts import Holds, Sums, Words, counts
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

VARIABLE: Final = "GPUINTEROP_SHARE_DIR"
_OVERFLOW: Final = 65534
"""What a user looks like that this user namespace does not know."""
driver_lock: Final = threading.RLock()
"""Held round every export and every attach: HIP's race with each other (rocm-systems #11892)."""
CLOSED: Final = "the share was closed; ask its process for a new descriptor."
_TICK_S: Final = 0.02
"""Seconds between the looks at what has to be looked at again, and between two sums of the counts."""
_LOOK_S: Final = 5.0
"""Seconds between the looks whether the socket is still there."""


Ts = TypeVarTuple("Ts")
T = TypeVar("T")


def _alone(method: Callable[[Server, *Ts], T]) -> Callable[[Server, *Ts], T]:
    """Run a method under the server's lock."""

    @functools.wraps(method)
    def entered(self: Server, *arguments: *Ts) -> T:
        return system.under(self._lock, method, self, *arguments)

    return entered


class Offer:
    """What has a slot: by default something that is not attached, and has no order. The loop calls the methods."""

    token = secrets.token_bytes(16)
    serial = slot = 0
    users: Collection[int] = ()
    threaded = True
    blocks: Sequence[Exported] = ()

    def contents(self) -> bytes:
        """What a process that attaches is told."""
        raise PeerError("expected the descriptor of a share, got another.")

    def enrol(self, guest: Guest) -> tuple[int, Sequence[Handle]]:
        """A place in the order: its number, and the handles."""
        raise PeerError("expected the descriptor of something that has an order, got another.")

    def look(self) -> None:
        """See which readers have left the order."""

    def end(self) -> None:
        """End it."""


class Exported:
    """A block that other processes may ask for."""

    def __init__(self, number: int, device: Device, block: Block) -> None:
        self.number, self.device, self.block = number, device, block
        self.uses = 0
        self.data = b""

    def export(self) -> Handle:
        """A handle for another process."""
        backend = cast(SharingBackend, self.device.driver)
        handle = system.under(driver_lock, backend.export_block, self.device._handle, self.block)
        if isinstance(handle, FdHandle):
            handle.trusted = True  # this process's own file blocks no close
        return handle

    @property
    def handle_data(self) -> bytes:
        """The handle itself, where it is not a descriptor: it is made once."""
        if not self.data and self.block.behind.handle_type is IpcMemHandle:
            self.data = cast(IpcMemHandle, self.export()).data
        return self.data


def region_of(blocks: Sequence[Exported]) -> Region:
    """Blocks at consecutive addresses, as other processes are told of them."""
    kind, sizes = blocks[0].block.behind.handle_type, tuple(one.block.size for one in blocks)
    return Region(kind, tuple(one.number for one in blocks), sizes, blocks[0].handle_data)


class Guest(NoCopy):
    """A process that has a link to this one, or this process itself, which has no connection."""

    def __init__(self, link: socket.socket | None) -> None:
        self.connection = None if link is None else Connection(link)
        self.user = os.geteuid() if link is None else peer_user(link)
        self.counts: Words | None = None
        self.blocks: set[int] = set()
        """What a process of another user may ask for: the blocks of the shares that it has attached."""
        self.ended = self.full = False


class Server(NoCopy):
    """The socket, the links of other processes, the counts and the loop of one process."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(16)
        self.offers: dict[int, Any] = {}
        """What is shared, by slot."""
        self.ordered: dict[Any, None] = {}
        """The offers whose order has readers."""
        self._serials = itertools.count(1)
        self._name, self._path = f"gpuinterop-{secrets.token_hex(8)}.sock", ""
        self._lock = threading.RLock()
        """Held to change offers, counts, blocks, listener and thread; the rest is the loop's."""
        self._looping = threading.Lock()
        """Held by the thread that runs the loop; taken before the other."""
        self._listener: socket.socket | None = None
        self._next_look = 0.0
        self._thread: system.Thread | None = None
        self._jobs: deque[Callable[[], object]] = deque()
        self._again: deque[Callable[[], bool]] = deque()
        self._handlers: dict[int, Callable[[int], object]] = {}
        """What the loop calls, by descriptor."""
        self._watched: set[int] = set()
        """Descriptors of links to others."""
        self.exits = False
        """Whether the interpreter exits."""
        self._opened: tuple[select.epoll, int] | None = None
        """What the loop waits by, and the eventfd that wakes it."""
        self._guests: dict[Guest, None] = {}
        self._me: tuple[Holds, Guest] | None = None
        """This process among those that attach."""
        self._sums: Sums | None = None
        self._bell: EventFd | None = None
        """Rung by those who hold something no more."""
        self._blocks: dict[tuple[Device, Block], Exported] = {}
        self._numbers: dict[int, Exported] = {}

    # -- what is shared ----------------------------------------------------------------------------------------------

    @_alone
    def enter(self, offer: Offer, messages: int) -> None:
        """Let readers in, give the offer a serial and a slot, and count messages; the first offer opens the socket."""
        try:
            self._open_loop()  # first: with an offer nothing fails for want of a descriptor
            sums = self._opened_sums()
            if offer.users:
                _check_open(os.path.dirname(self._path))
                system.call(f"chmod({self._path})", _open_to_all, self._path)
            offer.serial, offer.slot = next(self._serials), sums.take()
            self.offers[offer.slot] = offer
            sums.open(offer.slot, offer.serial)
            if messages:
                self._send(offer, messages)
        finally:
            if self._thread is None:
                self.post(_wake_up)  # also without an offer: the loop then ends, and closes the socket

    def _opened_sums(self) -> Sums:
        """The sums, once the socket is there."""
        if self._sums is None:
            sums, me = Sums(), Holds()
            bell = EventFd.adopt(system.call("eventfd", os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            me.counts, me.serials, me.bell = counts(), sums.serials, bell
            me.counts.handle.close()
            sums.add(me.counts)
            self._sums, self._bell, self._me = sums, bell, (me, Guest(None))
            self._jobs.append(lambda: self._register(bell.fd, self._rung))
        if self._listener is None:
            self._listen(self._new_path())
        return self._sums

    @_alone
    def here(self) -> tuple[Holds, Guest]:
        """Return what the process holds of its own, and itself among those that attach."""
        if self._me is None:
            raise ResourceClosedError(CLOSED)
        return self._me

    @_alone
    def find(self, one: Descriptor, attached: bool) -> Any:
        """The offer of this process that a descriptor opens; one that is closed only to those who have attached."""
        offer = self.offers.get(one.slot)
        stands = self._sums is not None and self._sums.stands(one.slot, one.serial)
        if offer is None or offer.serial != one.serial or not (stands or attached):
            raise ResourceClosedError(CLOSED)
        if not one.opens(offer.token):
            raise PeerError("the token is not this share's; take the descriptor as it came.")
        return offer

    def holders(self, slot: int) -> int:
        """How often a slot is held, by all processes."""
        return 0 if self._sums is None else self._sums.holders(slot)

    @_alone
    def descriptor(self, offer: Offer) -> bytes:
        """The bytes of an offer's descriptor, once the socket is there; of this process, if the offer has no slot."""
        self._opened_sums()
        self._look_at_socket()
        return bytes(Descriptor(boot_id(), self.nonce, offer.serial, offer.slot, offer.token, self._path))

    def abandon(self, offer: Offer) -> None:
        """Take back an offer that its caller does not get."""
        if offer.serial:
            self.withdraw(offer.slot)
        else:
            offer.end()

    def withdraw(self, slot: int) -> None:
        """Let no reader in any more, and end the offer once nobody holds it and all its messages have come."""
        self._withdraw(slot)
        self.look()  # the program may not serve any more
        self.post(_wake_up)

    @_alone
    def _withdraw(self, slot: int) -> None:
        if self._sums is not None:
            self._sums.close(slot)

    @_alone
    def send(self, offer: Offer) -> bool:
        """Count a message more, which keeps the offer until it has come; False if that has ended."""
        if stands := self.offers.get(offer.slot) is offer:
            cast(Sums, self._sums).forget_surplus(offer.slot)
            self._send(offer, 1)
        return stands

    def _send(self, offer: Offer, messages: int) -> None:
        self.here()[0].move(offer.slot, -messages)
        cast(Sums, self._sums).end_unheld(offer.slot)

    def look(self) -> None:
        """Add up the counts, and end what nobody holds."""
        for offer in self._over():
            shown(offer.end)

    @_alone
    def _over(self) -> list[Any]:
        for offer in list(self.ordered):
            offer.look()
        return [] if self._sums is None else [self.offers.pop(slot) for slot in self._sums.over()]

    @_alone
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

    @_alone
    def use_again(self, block: Exported) -> bool:
        """Use a block once more, if it is used still."""
        if block.uses:
            block.uses += 1
        return bool(block.uses)

    @_alone
    def drop(self, blocks: Iterable[Exported]) -> None:
        """Use blocks no more."""
        for one in blocks:
            one.uses -= 1
            if not one.uses:
                del self._blocks[one.device, one.block], self._numbers[one.number]

    # -- by any thread -----------------------------------------------------------------------------------------------

    def watch(self, link: socket.socket, events: int, call: Callable[[int], object]) -> None:
        """Call with the events of a link to another process."""
        self._watched.add(link.fileno())

        def register() -> None:
            if (fd := link.fileno()) >= 0:
                self._register(fd, call, events)

        self.post(register)

    def unwatch(self, link: socket.socket) -> None:
        """Watch a link no more. The caller then closes it."""
        fd = link.fileno()
        self._watched.discard(fd)
        if self._handlers.pop(fd, None) is not None and (opened := self._opened) is not None:
            with contextlib.suppress(OSError, ValueError):
                opened[0].unregister(fd)

    def look_again(self, until: Callable[[], bool]) -> None:
        """Call `until` in the loop, again and again until it returns True."""
        self._again.append(until)
        self.post(_wake_up)

    def close_later(self, handles: Sequence[Handle]) -> None:
        """Close handles; a GPU's in the loop, because the driver takes more time for that than for the import."""
        if any(isinstance(handle, VmmFd) for handle in handles):
            self.post(lambda: _close_all(handles))
        else:
            _close_all(handles)

    def post(self, job: Callable[[], object]) -> None:
        """Have the loop do something."""
        self._jobs.append(job)
        try:
            self._start()
        except ResourceClosedError:  # the interpreter exits, and the thread has ended: this one does what is left
            self.exits = True
            if self._looping.acquire(blocking=False):  # else a job, or another thread, is at it
                try:
                    while self._jobs:
                        shown(self._jobs.popleft())
                    self._look()
                finally:
                    self._looping.release()

    def stop(self) -> None:
        """Have the thread end: the interpreter exits."""
        self._jobs.append(self._end)
        self._wake_loop()

    def serve(self, timeout: float | None) -> None:
        """Serve in the calling thread for `timeout` seconds, or until a share is closed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._looping.acquire(timeout=-1 if timeout is None else timeout):
            return  # the thread serves meanwhile: a link of ours needs it
        try:
            left = timeout
            while self.offers:
                self._pass(left)
                if left == 0:
                    break
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._goes_on()
        finally:
            self._looping.release()

    def _wake_loop(self) -> None:
        if (opened := self._opened) is not None:
            with contextlib.suppress(OSError):
                os.eventfd_write(opened[1], 1)

    def _open_loop(self) -> None:
        if self._opened is None:
            wake = system.call("eventfd", os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            try:
                epoll = system.call("epoll_create", select.epoll)
            except DriverError:
                os.close(wake)
                raise
            self._opened = epoll, wake
            self._register(wake, lambda _: os.eventfd_read(wake))

    @_alone
    def _start(self) -> None:
        self._open_loop()
        self._wake_loop()
        if self._thread is None and not self._is_users():
            self._thread = system.start_thread(self._loop, self.stop)

    def _is_users(self) -> bool:
        """Whether all that there is to do is the user's own loop's."""
        offers = list(self.offers.values())  # another thread may withdraw one
        ours = self._watched or self._again
        return bool(offers) and not (any(one.threaded for one in offers) or ours)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        with self._looping:
            while self._goes_on() and self._thread is not None:
                try:
                    self._pass(None)
                except BaseException as error:  # of an array's library: it ends no loop that serves others
                    report(error)

    @_alone
    def _goes_on(self) -> bool:
        if self._is_users():
            self._thread = None
        remote = any(one.connection is not None for one in self._guests)
        if self.offers or remote or self._watched or self._again or self._jobs:
            return True
        self._thread = None
        if (listener := self._listener) is not None:
            self._listener = None
            listener.close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        if (opened := self._opened) is not None:
            self._opened = None
            self._handlers.clear()
            opened[0].close()
            os.close(opened[1])
        if self._sums is not None and self._bell is not None:
            self._sums.serials.handle.close()
            self._bell.close()
            self._sums = self._bell = self._me = None
        return False

    def _pass(self, timeout: float | None) -> None:
        patience, timeline.patience.seconds = timeline.patience.seconds, 0.0  # a lock that a peer holds is tried again
        try:
            self._make_pass(timeout)
        finally:
            timeline.patience.seconds = patience

    def _make_pass(self, timeout: float | None) -> None:
        assert self._opened is not None
        for fd, events in self._opened[0].poll(self._patience(timeout)):
            if (handler := self._handlers.get(fd)) is not None:
                handler(events)
        while self._jobs:
            shown(self._jobs.popleft())
        self._look()
        now = time.monotonic()
        if self._listener is not None and now >= self._next_look:
            shown(self._look_at_socket)

    def _patience(self, timeout: float | None) -> float | None:
        now = time.monotonic()
        limits = [0.0] if self._jobs else [] if timeout is None else [timeout]
        limits.extend([_TICK_S] if self._again else [])
        limits.extend([max(0.0, self._next_look - now)] if self._listener is not None else [])
        return min(limits, default=None)

    def _look(self) -> None:
        """Call each of what is to be called again."""
        for _ in range(len(self._again)):
            if shown(self._again[0]) is False:
                self._again.append(self._again[0])
            self._again.popleft()  # after the call: an exception may strike in it

    def _rung(self, _events: int) -> None:
        """Add up the counts, and then not again for a moment, however often it rings."""
        if (bell := self._bell) is None or self._opened is None:
            return
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(bell.fd)
        self.look()
        self._opened[0].modify(bell.fd, 0)
        again = time.monotonic() + _TICK_S

        def listens() -> bool:
            if late := time.monotonic() >= again:
                self._register(bell.fd, self._rung)
            return late

        self._again.append(listens)

    def _register(self, fd: int, call: Callable[[int], object], events: int = select.EPOLLIN) -> None:
        assert self._opened is not None
        try:
            self._opened[0].register(fd, events)
        except FileExistsError:
            self._opened[0].modify(fd, events)
        self._handlers[fd] = call

    def _end(self) -> None:
        """Leave nothing to do; the process's end closes the connections."""
        self.exits = True
        for look in list(self._again):
            shown(look)
        for one in (self.offers, self._guests, self._watched, self._again, self._jobs):
            one.clear()

    def forget(self) -> None:
        """Close this process's descriptors, and leave the parent's objects as they are."""
        if self._opened is not None:
            self._opened[0].close()
            os.close(self._opened[1])
        links = [one.connection.socket for one in self._guests if one.connection is not None]
        for link in (self._listener, *links):
            if link is not None:
                link.close()
        for handle in (self._bell, None if self._sums is None else self._sums.serials.handle):
            if handle is not None:
                handle.close()

    # -- the socket --------------------------------------------------------------------------------------------------

    def _new_path(self) -> str:
        place = folder()
        _tidy(place)
        path = os.path.join(place, self._name)  # the same again: messages may have it that have not come
        if len(os.fsencode(path)) > MAX_ADDRESS:
            raise InvalidArgumentError(
                VARIABLE, f"expected a path of {MAX_ADDRESS} bytes or fewer, got {path}; set a shorter folder."
            )
        return path

    def _listen(self, path: str) -> None:
        hidden = os.path.join(os.path.dirname(path), f".gpuinterop-{secrets.token_hex(8)}")  # shorter than the path
        listener = system.call("socket", socket.socket, socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(listener.fileno(), 0o600)  # so the file is made with this mode; the umask is the process's
            listener.bind(hidden)
            listener.listen(1024)
            os.rename(hidden, path)  # who sees it can connect, or its process has died
        except OSError as error:
            listener.close()
            with contextlib.suppress(OSError):
                os.unlink(hidden)
            raise system.driver_error(f"bind({path})", error.errno or 0) from error
        self._listener, self._path = listener, path
        self._next_look = time.monotonic() + _LOOK_S
        self._jobs.append(self._await_guests)
        self._wake_loop()

    def _await_guests(self) -> None:
        if (listener := self._listener) is not None:
            self._register(listener.fileno(), self._welcome)

    @_alone
    def _look_at_socket(self) -> None:
        """Make the socket anew where something has removed it, at the same path: descriptors name it."""
        self._next_look = time.monotonic() + _LOOK_S
        if (listener := self._listener) is None or os.path.exists(self._path):
            return
        self._listen(self._path)
        self._handlers.pop(listener.fileno(), None)
        listener.close()
        if any(one.users for one in self.offers.values()):
            _open_to_all(self._path)

    def _welcome(self, _events: int) -> None:
        if (listener := self._listener) is None:
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    link, _ = listener.accept()
                except BlockingIOError:
                    raise
                except OSError:  # out of descriptors: the others have theirs meanwhile
                    time.sleep(_TICK_S)
                    return
                link.settimeout(None)  # where the program has a default: Python would wait for it
                guest = Guest(link)
                self._guests[guest] = None
                self._register(link.fileno(), lambda _, guest=guest: self._serve(guest))  # type: ignore[misc]
                self._serve(guest)  # most often it has asked

    # -- guests ------------------------------------------------------------------------------------------------------

    def _serve(self, guest: Guest) -> None:
        connection = cast(Connection, guest.connection)
        try:
            for _ in range(2):  # who says hello asks with it
                if connection.flush() and (message := connection.part()) is not None:
                    with message:
                        self._answer(guest, message)
            if (full := not connection.flush()) is not guest.full and self._opened is not None:
                guest.full = full
                self._opened[0].modify(connection.socket.fileno(), select.EPOLLOUT if full else select.EPOLLIN)
        except (OSError, PeerError, DriverError) as error:  # it has gone, or is of another version
            with contextlib.suppress(OSError):
                connection.send(FAILED + ERRORS.index(PeerError), 1, str(error).encode(errors="replace"))
            self._dismiss(guest)
        except BaseException:
            self._dismiss(guest)
            raise

    def _dismiss(self, guest: Guest) -> None:
        """Take back what a process holds that has ended, or has ended its link."""
        connection = cast(Connection, guest.connection)
        if (fd := connection.socket.fileno()) >= 0:
            self._handlers.pop(fd, None)
            if self._opened is not None:
                with contextlib.suppress(OSError):
                    self._opened[0].unregister(fd)
            connection.discard()
            connection.socket.close()
        self._take_back(guest)
        self.look()

    @_alone
    def _add(self, counts: Words) -> None:
        cast(Sums, self._sums).add(counts)

    @_alone
    def _take_back(self, guest: Guest) -> None:
        guest.ended = True
        if guest in self._guests:
            del self._guests[guest]
            if guest.counts is not None and self._sums is not None:
                self._sums.remove(guest.counts)

    def _answer(self, guest: Guest, message: Message) -> None:
        body, handles, kind = b"", list[Handle](), DONE
        try:
            body = self._asked(guest, message, handles)
        except Exception as error:  # also a driver's, or one of an array's library
            _close_all(handles)
            which = type(error) if type(error) in ERRORS else ERRORS[-1]
            text = str(error) if which is type(error) else f"{type(error).__name__}: {error}"
            kind, body, handles = FAILED + ERRORS.index(which), text.encode(errors="replace")[:MAX_ERROR], []
        cast(Connection, guest.connection).send(kind, message.number, body, handles, owned=True)

    def _asked(self, guest: Guest, message: Message, handles: list[Handle]) -> bytes:
        """The body of the answer; adds its handles."""
        if message.kind == HELLO:
            if message.body != self.nonce or self._sums is None or self._bell is None:
                raise ResourceClosedError("another process has this address now; ask for a new descriptor.")
            with message.take(OpaqueFd) as page:
                guest.counts = counts(page)
            self._add(guest.counts)
            handles.append(OpaqueFd.adopt_duplicate(self._sums.serials.handle.fd))
            handles.append(EventFd.adopt_duplicate(self._bell.fd))
            return b""
        if guest.counts is None:
            raise PeerError("expected a process that says hello first; use gpuinterop.attach.")
        if message.kind == BLOCKS:
            numbers = [number for (number,) in struct.iter_unpack("<Q", message.body)]
            blocks = [self._numbers.get(number) for number in numbers]
            if None in blocks or not (guest.user == os.geteuid() or guest.blocks.issuperset(numbers)):
                raise ResourceClosedError(CLOSED)
            handles.extend(one.export() for one in blocks if one is not None)
            return b""
        if message.kind not in (ATTACH, ENROL):
            raise PeerError(f"expected a request of this version, got one of kind {message.kind}.")
        serial, slot, token = SHARE.unpack(message.body)
        offer = self.find(Descriptor(b"", self.nonce, serial, slot, token, ""), message.kind == ENROL)
        check_peer(cast(Connection, guest.connection).socket, offer.users)
        if message.kind == ENROL:
            place, found = offer.enrol(guest)
            handles.extend(found)
            return int(place).to_bytes(4, "little")
        fresh = [one for one in offer.blocks if one.number not in guest.blocks]
        guest.blocks.update(one.number for one in fresh)
        beside = [one for one in fresh if one.block.behind.handle_type is not IpcMemHandle][:MAX_FDS]
        contents: bytes = offer.contents()
        handles.extend(one.export() for one in beside)
        return struct.pack(f"<I{len(beside)}Q", len(beside), *(one.number for one in beside)) + contents


def _close_all(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.close()


def _wake_up() -> None:
    """Do nothing: the loop then looks whether it still has something to do."""


# -- users, and the folder ---------------------------------------------------------------------------------------------


def check_peer(link: socket.socket, users: Collection[int]) -> None:
    """Refuse the other side's user, unless it is this process's own or one of `users`; pids are not looked at."""
    user, mine = peer_user(link), os.geteuid()
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
    """Remove the sockets of this user's processes that were killed."""
    with contextlib.suppress(OSError), os.scandir(place) as files:
        for file in files:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                if not (file.name.startswith("gpuinterop-") and file.name.endswith(".sock")):
                    continue
                if not _is_our_socket(file.stat(follow_symlinks=False)):
                    continue
                probe.setblocking(False)
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


def _check_open(place: str) -> None:
    """Refuse a folder that other users cannot enter."""
    mode = system.call(f"stat({place})", os.stat, place).st_mode
    if not mode & (stat.S_IXGRP | stat.S_IXOTH):
        raise InvalidArgumentError(
            "users", f"expected a folder that they can enter, got {place} (mode {mode & 0o777:o}); set {VARIABLE}."
        )


# -- the one of this process -------------------------------------------------------------------------------------------

_servers: list[Server] = []
_making = threading.RLock()


def server() -> Server:
    """Return this process's, made on first use."""
    return system.under(_making, _first)


def _first() -> Server:
    if not _servers:
        _servers.append(Server())
    return _servers[0]


def is_here(process: bytes) -> bool:
    """Whether a number is this process's."""
    return any(one.nonce == process for one in _servers)


@after_fork
def _forked() -> None:
    """Give back what the child shares with its parent; that goes on."""
    for one in _servers:
        one.forget()
    _servers.clear()
    for lock in (_making, driver_lock):
        lock._at_fork_reinit()  # type: ignore[attr-defined]
