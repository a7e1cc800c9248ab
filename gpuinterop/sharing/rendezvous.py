"""The place where readers come: a Unix socket for each process that shares, and its connections, which are leases.

One thread serves all shares of the process, and watches the leases that the process has with others; or the user's own
loop does (`ArrayShare.serve`). It starts with the first share or lease that needs it, and ends with the last.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import selectors
import socket
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, Protocol, TypeVar

from .. import ipc, system, timeline
from .._arguments import NoCopy, check_int
from .._core.drain import shown
from .._core.monitor import after_fork
from ..errors import ArgumentTypeError, DriverError, HandleError, InvalidArgumentError, PeerError, ResourceClosedError
from ..handles import FdHandle, Handle
from .descriptor import (
    ATTACH,
    ERRORS,
    MAX_ADDRESS,
    MOST_WORDS,
    REQUEST,
    TOKEN,
    VERBS,
    Descriptor,
    answer,
    boot_id,
    parse_request,
)

T = TypeVar("T")
OfferT = TypeVar("OfferT", bound="Offer")

VARIABLE: Final = "GPUINTEROP_SHARE_DIR"
_PATIENCE_S: Final = 5.0
"""Seconds that a connection has for its first request."""
_STRANGERS: Final = 128
"""Connections without a lease that are open at once; one more closes the oldest."""
_TICK_S: Final = 0.02
"""Seconds between the looks at what has to be looked at again."""
OVERFLOW: Final = 65534
"""What a user looks like that this user namespace does not know."""


class Offer(Protocol):
    """A share that is served. The loop calls these methods."""

    descriptor: Descriptor
    users: Collection[int]
    threaded: bool

    def answer(self, lease: Connection, verb: int, number: int) -> tuple[int, Sequence[Handle]]:
        """A number and handles for a reader that has shown the token; the first answer makes it a lease."""

    def left(self, lease: Connection) -> object:
        """A lease has ended."""


def check_peer(connection: socket.socket, users: Collection[int]) -> None:
    """Refuse the other side's user, unless it is this process's own or one of `users`; pids are not looked at."""
    user, mine = ipc.peer_user(connection), os.geteuid()
    if user == OVERFLOW or (user != mine and user not in users):
        raise PeerError(
            f"expected a process of user {mine}, got one of user {user}"
            + (", which stands for users of other namespaces" if user == OVERFLOW else "")
            + "; run both as one user, or name it in users= on both sides."
        )


def users_of(users: Iterable[int]) -> frozenset[int]:
    """Check ``users=``."""
    if not isinstance(users, Iterable):
        raise ArgumentTypeError("users", f"expected user ids, got {type(users).__name__}; pass a list of int.")
    return frozenset(check_int(user, "users", minimum=0) for user in users)


def folder() -> str:
    """Folder of this process's rendezvous."""
    for name in (VARIABLE, "XDG_RUNTIME_DIR"):
        if given := os.environ.get(name):
            if not os.path.isdir(given):
                raise InvalidArgumentError(name, f"expected a folder, got {given!r}; make it, or set {VARIABLE}.")
            return given
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


def _tidy(place: str) -> None:
    """Remove the sockets of processes that were killed."""
    with contextlib.suppress(OSError), os.scandir(place) as files:
        for file in files:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                if not (file.name.startswith("gpuinterop-") and file.name.endswith(".sock")):
                    continue
                probe.setblocking(False)
                if probe.connect_ex(file.path) == errno.ECONNREFUSED:
                    os.unlink(file.path)


def _open_to_all(path: str) -> None:
    """Let every user connect: `check_peer` looks who it is. Another user's folder may have another file at the path."""
    file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
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


class Connection(NoCopy):
    """One reader at the rendezvous."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.offer: Offer | None = None
        """The offer that this reader has a lease of."""
        self.came = bytearray()
        self.deadline = time.monotonic() + _PATIENCE_S


class Rendezvous(NoCopy):
    """The socket, the connections and the loop of one process."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(16)
        self.offers: dict[int, Offer] = {}
        self._serials = itertools.count(1)
        self._path = ""
        self._lock = threading.RLock()
        """Held to change the offers, the listener and the thread; the rest is the loop's."""
        self._looping = threading.Lock()
        """Held by the thread that runs the loop; taken before the other."""
        self._listener: socket.socket | None = None
        self._thread: system.Thread | None = None
        self._jobs: deque[Callable[[], object]] = deque()
        self._connections: dict[Connection, None] = {}
        self._watched: dict[socket.socket, Callable[[], object]] = {}
        self._again: deque[Callable[[], bool]] = deque()
        self._exits = False
        self._opened: tuple[selectors.BaseSelector, int] | None = None
        """What the loop waits by, and the eventfd that wakes it."""

    # -- by any thread -----------------------------------------------------------------------------------------------

    def offer(self, make: Callable[[Descriptor], OfferT], users: Collection[int]) -> OfferT:
        """Let readers in; the first offer opens the socket."""
        return system.under(self._lock, self._offer, make, users)

    def _offer(self, make: Callable[[Descriptor], OfferT], users: Collection[int]) -> OfferT:
        if self._listener is None:
            self._listen()
        try:
            if users:
                _check_open(os.path.dirname(self._path))
                system.call(f"chmod({self._path})", _open_to_all, self._path)
            descriptor = Descriptor(boot_id(), self.nonce, next(self._serials), secrets.token_bytes(TOKEN), self._path)
            offer = self.offers[descriptor.share] = make(descriptor)
            return offer
        finally:
            self.post(_wake_up)  # also without an offer: the loop then ends, and closes the socket

    def withdraw(self, offer: Offer) -> None:
        """Let no reader in any more; leases stay."""
        self.offers.pop(offer.descriptor.share, None)
        self.post(_wake_up)

    def watch(self, link: socket.socket, ended: Callable[[], object]) -> None:
        """Call `ended` when the exporter of a lease of ours dies."""
        self._watched[link] = ended
        self.post(lambda: self._selector.register(link, selectors.EVENT_READ, link))

    def end_lease(self, link: socket.socket, is_released: Callable[[], bool] | None) -> None:
        """Close the connection of a lease of ours, once `is_released`; at once, if it has no reader."""

        def end() -> bool:
            if is_released is not None and not is_released() and not self._exits:  # the exporter lets go what dies
                return False
            if self._watched.pop(link, None) is not None:
                with contextlib.suppress(KeyError):  # an exception struck before it was registered
                    self._selector.unregister(link)
            link.close()
            return True

        if is_released is None and link not in self._watched:  # else an exception struck while it enrolled
            link.close()
        else:
            self.look_again(end)

    def look_again(self, until: Callable[[], bool]) -> None:
        """Call `until` in the loop, again and again until it returns True."""
        self._again.append(until)
        self.post(_wake_up)

    def post(self, job: Callable[[], object]) -> None:
        """Have the loop do something."""
        self._jobs.append(job)
        try:
            system.under(self._lock, self._start)
        except ResourceClosedError:  # the interpreter exits, and the thread has ended: this one does what is left
            self._exits = True
            while self._jobs:
                shown(self._jobs.popleft())
            self._look()

    def stop(self) -> None:
        """Have the thread end: the interpreter exits."""
        self._jobs.append(self._end)
        self._wake_loop()

    @property
    def _selector(self) -> selectors.BaseSelector:
        assert self._opened is not None
        return self._opened[0]

    def serve(self, timeout: float | None) -> None:
        """Serve in the calling thread for `timeout` seconds, or until a share is closed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._looping.acquire(timeout=-1 if timeout is None else timeout):
            return  # the thread serves meanwhile: a lease of ours needs it
        try:
            left = timeout
            while self.offers:
                self._pass(left)
                if left == 0:
                    break
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
            system.under(self._lock, self._goes_on)
        finally:
            self._looping.release()

    def _wake_loop(self) -> None:
        if (opened := self._opened) is not None:
            with contextlib.suppress(OSError):
                os.eventfd_write(opened[1], 1)

    def _start(self) -> None:
        if self._opened is None:
            wake = system.call("eventfd", os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            try:
                selector = system.call("epoll_create", selectors.DefaultSelector)
            except DriverError:
                os.close(wake)
                raise
            selector.register(wake, selectors.EVENT_READ)
            self._opened = selector, wake
        self._wake_loop()
        if self._thread is None and not self._is_users():
            self._thread = system.start_thread(self._loop, self.stop)

    def _is_users(self) -> bool:
        """Whether all that there is to do is the user's own loop's."""
        offers = list(self.offers.values())  # another thread may withdraw one
        return bool(offers) and not (any(one.threaded for one in offers) or self._watched or self._again)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        with self._looping:
            while system.under(self._lock, self._goes_on) and self._thread is not None:
                self._pass(None)

    def _goes_on(self) -> bool:
        if self._is_users():
            self._thread = None
        if self.offers or self._connections or self._watched or self._again or self._jobs:
            return True
        self._thread = None
        if (listener := self._listener) is not None:
            self._listener = None
            listener.close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        if (opened := self._opened) is not None:
            self._opened = None
            opened[0].close()
            os.close(opened[1])
        return False

    def _pass(self, timeout: float | None) -> None:
        patience, timeline.patience.seconds = timeline.patience.seconds, 0.0  # a lock that a peer holds is tried again
        try:
            self._make_pass(timeout)
        finally:
            timeline.patience.seconds = patience

    def _make_pass(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(self._patience(timeout)):
            if isinstance(key.data, Connection):
                self._receive(key.data)
            elif isinstance(key.data, socket.socket):
                self._selector.unregister(key.data)
                shown(self._watched.pop(key.data, _wake_up))
            elif key.data is self:
                self._welcome()
            else:
                os.eventfd_read(key.fd)
        while self._jobs:
            shown(self._jobs[0])
            if self._jobs:  # the last job clears them
                self._jobs.popleft()
        self._look()
        now = time.monotonic()
        for one in list(self._connections):
            if one.link.fileno() < 0 or (one.offer is None and one.deadline < now):
                self._drop(one)

    def _patience(self, timeout: float | None) -> float | None:
        limits = [0.0] if self._jobs else [] if timeout is None else [timeout]
        if self._again:
            limits.append(_TICK_S)
        limits.extend(_PATIENCE_S / 8 for one in self._connections if one.offer is None)
        return min(limits, default=None)

    def _listen(self) -> None:
        place = folder()
        _tidy(place)
        hidden = os.path.join(place, f".gpuinterop-{secrets.token_hex(8)}")
        path = os.path.join(place, f"gpuinterop-{secrets.token_hex(8)}.sock")
        if len(os.fsencode(path)) > MAX_ADDRESS:  # the hidden one is shorter
            raise InvalidArgumentError(
                VARIABLE, f"expected a path of {MAX_ADDRESS} bytes or fewer, got {path}; set a shorter folder."
            )
        listener = system.call("socket", socket.socket, socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(listener.fileno(), 0o600)  # so the file is made with this mode; the umask is the process's
            listener.bind(hidden)
            listener.listen(1024)
            os.rename(hidden, path)  # who sees it can connect, or its process has died
            self._jobs.append(lambda: self._selector.register(listener, selectors.EVENT_READ, self))
        except OSError as error:
            listener.close()
            with contextlib.suppress(OSError):
                os.unlink(hidden)
            raise system.driver_error(f"bind({path})", error.errno or 0) from error
        self._listener, self._path = listener, path

    def _end(self) -> None:
        """Leave nothing to do; the process's end closes the connections."""
        self._exits = True
        for look in self._again:
            shown(look)
        for one in (self.offers, self._connections, self._watched, self._again, self._jobs):
            one.clear()

    def forget(self) -> None:
        """Close this process's descriptors, and leave the parent's objects as they are."""
        if self._opened is not None:
            self._selector.close()
            os.close(self._opened[1])
        for link in (self._listener, *self._watched, *(one.link for one in self._connections)):
            if link is not None:
                link.close()

    # -- connections -------------------------------------------------------------------------------------------------

    def _welcome(self) -> None:
        assert self._listener is not None
        for _ in range(_STRANGERS):
            try:
                link, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of descriptors: strangers give theirs back
                self._make_room(0)
                time.sleep(_TICK_S)
                return
            link.setblocking(False)
            self._make_room(_STRANGERS - 1)
            connection = Connection(link)
            self._connections[connection] = None
            self._selector.register(link, selectors.EVENT_READ, connection)
            self._receive(connection)  # most often it has asked: a flood behind it comes too late

    def _look(self) -> None:
        """Call each of what is to be called again."""
        for _ in range(len(self._again)):
            if shown(self._again[0]) is False:
                self._again.append(self._again[0])
            self._again.popleft()  # behind the call: an exception may strike in it

    def _make_room(self, most: int) -> None:
        strangers = [one for one in self._connections if one.offer is None]
        for one in strangers[: max(0, len(strangers) - most)]:
            self._drop(one)

    def _drop(self, connection: Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):  # called again, where an exception has struck in `serve`
            self._selector.unregister(connection.link)
        connection.link.close()
        if (offer := connection.offer) is not None:
            shown(lambda: offer.left(connection))
        del self._connections[connection]

    def _receive(self, connection: Connection) -> None:
        if connection not in self._connections:  # this pass has dropped the connection
            return
        try:  # the kernel closes descriptors that come too
            came = connection.link.recv(REQUEST.size - len(connection.came))
            connection.came += came
            if not came:
                raise ConnectionError
            if len(connection.came) == REQUEST.size:
                request = bytes(connection.came)
                connection.came.clear()
                self._answer(connection, request)
        except BlockingIOError:
            return
        except OSError:  # the reader has gone, or does not read what it asked for
            self._drop(connection)

    def _answer(self, connection: Connection, request: bytes) -> None:
        handles: Sequence[Handle] = ()
        try:
            number, handles = self._asked(connection, request)
            body = ipc.packed(handles) if handles else b""
            data = answer(number)
        except Exception as error:  # also a driver's, or one of an array's library
            kind = type(error) if type(error) in ERRORS else HandleError
            body = (str(error) if kind is type(error) else f"{type(error).__name__}: {error}").encode()[:MOST_WORDS]
            data = answer(len(body), kind)
        try:
            beside = [one for one in handles if isinstance(one, FdHandle)]
            if connection.link.send(data) + ipc.send_part(connection.link, memoryview(body), beside) < len(data + body):
                raise ConnectionError
        except BlockingIOError as error:
            raise ConnectionError from error
        finally:
            for handle in handles:
                handle.close()

    def _asked(self, connection: Connection, request: bytes) -> tuple[int, Sequence[Handle]]:
        verb, process, share, token, number = parse_request(request)
        offer = connection.offer or self.offers.get(share)
        if process != self.nonce or offer is None:
            raise ResourceClosedError("the share was closed; ask its process for a new descriptor.")
        if offer.descriptor.share != share or not offer.descriptor.opens(token):
            raise PeerError("the token is not this share's; take the descriptor as it came.")
        check_peer(connection.link, offer.users)
        if verb not in VERBS or (verb == ATTACH) is (connection.offer is not None):
            raise PeerError("expected a reader that attaches once, then asks for more; use gpuinterop.attach.")
        connection.offer = offer  # first: where an exception strikes below, the lease ends with the connection
        try:
            return offer.answer(connection, verb, number)
        except Exception:
            if verb == ATTACH:
                connection.offer = None
            raise


def _wake_up() -> None:
    """Do nothing: the loop then looks whether it still has something to do."""


_here: list[Rendezvous] = []
_making = threading.RLock()


def here() -> Rendezvous:
    """Return this process's, made on first use."""
    return system.under(_making, _first)


def _first() -> Rendezvous:
    if not _here:
        _here.append(Rendezvous())
    return _here[0]


def is_here(process: bytes) -> bool:
    """Whether a nonce is this process's."""
    return any(one.nonce == process for one in _here)


@after_fork
def _forked() -> None:
    """Give back what the child shares with its parent; that goes on."""
    for one in _here:
        one.forget()
    _here.clear()
    _making._at_fork_reinit()  # type: ignore[attr-defined]
