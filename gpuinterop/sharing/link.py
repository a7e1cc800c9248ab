"""The link to a process that shares: one connection, over which this process asks, and the counts that it writes."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from .. import system
from .._core.drain import shown
from .._core.monitor import after_fork
from ..errors import DriverError, PeerError
from ..handles import EventFd, OpaqueFd
from ..ipc import Connection, Message
from .counts import Holds, counts, serials
from .descriptor import BLOCKS, DONE, ERRORS, FAILED, HELLO, Contents, Descriptor
from .rendezvous import VARIABLE, check_peer, server

if TYPE_CHECKING:
    from .._core.device import Device

LINGER_S: Final = 1.0
"""Seconds that a link stays open with nothing to hold: the next message may come."""


class Link(Holds):
    """The connection to one process that shares. Its end is that process's end, for all that came over it."""

    def __init__(self, process: bytes) -> None:
        self.process = process
        super().__init__()
        self._asking = threading.RLock()
        self._connection: Connection | None = None
        self._number = 0
        self._idle_since = 0.0
        self._watched = False
        self.importing = threading.RLock()
        """Held while blocks are looked for and imported, so that each is imported once."""
        self.imports: dict[tuple[object, int], list[Any]] = {}
        """What is mapped of a block, by device and number."""
        self.known: WeakValueDictionary[tuple[int, bytes], Contents] = WeakValueDictionary()
        """The contents of shares that are attached, by serial and token."""
        self.devices: dict[object, Device] = {}
        """The device that has been found for memory."""

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask(self, kind: int, body: bytes, left: Callable[[], float | None]) -> Message:
        """Ask, and return the answer, which the caller closes. One thread asks at a time."""
        rest = left()
        try:
            return system.under(self._asking, self._ask, kind, body, left, limit=-1 if rest is None else rest)
        finally:
            if self.ended:  # meanwhile, and `end` has left the connection to who asks
                system.under(self._asking, self._close, limit=0)

    def _ask(self, kind: int, body: bytes, left: Callable[[], float | None]) -> Message:
        if not system.holds(self._asking):
            raise _lost(TimeoutError())
        if self.ended or self._connection is None:
            raise PeerError(ENDED)
        self._number = number = (self._number + 1) & 0xFFFFFFFF
        try:
            self._connection.send(kind, number, body, left=left)
            while (message := self._connection.receive(left)).number != number:
                with message:  # the answer to a call that gave up
                    if message.number == 1:
                        self._welcomed(message)
        except TimeoutError as error:
            raise _lost(error) from None
        except DriverError:  # no room for a descriptor
            if self.serials is None:
                self.end()
            raise
        except (OSError, PeerError) as error:
            self.end()
            raise error if isinstance(error, PeerError) else _lost(error) from None
        if message.kind == DONE:
            return message
        with message:
            if not 0 <= message.kind - FAILED < len(ERRORS):
                raise PeerError(f"expected an answer of this version, got one of kind {message.kind}.")
            raise ERRORS[message.kind - FAILED](message.body.decode(errors="replace"))

    def connect(self, path: str, left: Callable[[], float | None], users: Collection[int]) -> None:
        """Connect, and say hello: the answer comes with the next one."""
        place = os.path.join(given, os.path.basename(path)) if (given := os.environ.get(VARIABLE)) else path
        link = system.call("socket", socket.socket, socket.AF_UNIX)

        def connects() -> bool:
            with contextlib.suppress(BlockingIOError):  # the socket's queue is full, and the kernel does not wait
                link.connect(place)
                return True
            return False

        try:
            link.settimeout(left())
            if not system.until(connects, left()):
                raise TimeoutError
            link.settimeout(None)  # Python itself would wait before a call that is not to wait
            check_peer(link, users)
            self.counts = counts()
            self._connection = Connection(link)
            self._number = 1
            self._connection.send(HELLO, 1, self.process, [self.counts.handle], owned=True, left=left)
        except BaseException as error:
            if self._connection is not None:
                self._connection.discard()
            link.close()
            self._connection = None
            if isinstance(error, FileNotFoundError | ConnectionRefusedError):
                raise PeerError(_why_not_there(error, place)) from None
            if isinstance(error, OSError) and not isinstance(error, PeerError):
                raise _lost(error) from None
            raise

    def _welcomed(self, message: Message) -> None:
        if message.kind != DONE:
            raise PeerError(message.body.decode(errors="replace"))
        if len(message.fds) != 2:
            raise PeerError(f"expected the page of serials and an eventfd, got {len(message.fds)} descriptor(s).")
        with message.take(OpaqueFd) as page:
            self.serials = serials(page)
        self.bell = message.take(EventFd)

    def welcomed(self, left: Callable[[], float | None]) -> Link:
        """Return the link once the answer to its hello has come."""
        if self.serials is None:
            with self.ask(BLOCKS, b"", left):
                pass
        return self

    # -- counting ----------------------------------------------------------------------------------------------------

    def idle(self) -> None:
        """End the link in a while, unless it is used again."""
        self._idle_since = time.monotonic()
        server().look_again(self._has_ended)

    # -- the end -----------------------------------------------------------------------------------------------------

    def watch(self, reader: Any = None) -> None:
        """Notice the other process's end from now on, and tell a reader of it."""
        if reader is not None:
            self.readers[reader] = None
        if (connection := self._connection) is not None and not self._watched:
            self._watched = True
            server().watch(connection.socket, select.EPOLLRDHUP, self.end)
        if self.ended:  # meanwhile
            self.end()

    def _has_ended(self) -> bool:
        """End the link once it has been idle for a while; True also if it is used again."""
        waits = time.monotonic() < self._idle_since + LINGER_S
        if not (waits and not self.total) and system.under(self.counting, self._is_idle):
            self.end()
        return bool(self.ended or self.total)

    def _is_idle(self) -> bool:
        self.ended = self.ended or not self.total  # who holds from now on sees it
        return not self.total

    def end(self, _events: int = 0) -> None:
        """End the link: the other process has ended, or nothing of it is left here."""
        self.ended = True
        if links.get(self.process) is self:
            links.pop(self.process, None)
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)  # who asks is told, and closes it
            system.under(self._asking, self._close, limit=0)
        if self.bell is not None:
            self.bell.close()
        while self.readers:
            shown(self.readers.popitem()[0].poison)

    def _close(self) -> None:
        """Close the connection, unless another thread asks."""
        if system.holds(self._asking) and (connection := self._connection) is not None:
            self._connection = None
            connection.discard()
            server().unwatch(connection.socket)
            connection.socket.close()


links: Final[dict[bytes, Link]] = {}
"""The links of this process, by the number of the process that shares."""
_connecting: Final = threading.RLock()

ENDED: Final = "the process that shared the arrays has ended; discard what was read since."


def link_to(descriptor: Descriptor, left: Callable[[], float | None], users: Collection[int]) -> Link:
    """The link to a process that shares; the first call connects."""
    link, rest = system.under(_connecting, _link_of, descriptor.process), left()
    system.under(link._asking, _connected, link, descriptor, left, users, limit=-1 if rest is None else rest)
    return link


def holding(descriptor: Descriptor, left: Callable[[], float | None], users: Collection[int]) -> tuple[Link, int]:
    """The link to a process that shares, over which a share is held once more; and how often it is held."""
    while True:  # a link may end while nobody holds anything
        link = link_to(descriptor, left, users)
        count = link.hold(descriptor.slot)
        if not link.ended:
            return link, count


def _link_of(process: bytes) -> Link:
    link = links.get(process)
    if link is None or link.ended:
        link = links[process] = Link(process)
    return link


def _connected(link: Link, descriptor: Descriptor, left: Callable[[], float | None], users: Collection[int]) -> None:
    if not system.holds(link._asking):
        raise _lost(TimeoutError())
    if (connection := link._connection) is not None:
        check_peer(connection.socket, users)  # the call that made the link may have named others
    elif not link.ended:
        try:
            link.connect(descriptor.address, left, users)
        except BaseException:
            link.end()
            raise


def _why_not_there(error: OSError, path: str) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"the process that listened at {path} has ended; ask for a new descriptor."
    return (
        f"expected the sharing process's socket at {path}, it is not there: the process has closed its last share, or "
        f"has ended, or its folder is not mounted in this container; mount it, and name it in {VARIABLE}."
    )


def _lost(error: OSError) -> PeerError:
    late = "it did not answer within the time-out" if isinstance(error, TimeoutError) else str(error)
    if isinstance(error, PermissionError):
        return PeerError(f"expected a socket that this user can reach, got {late}; see users= and {VARIABLE}.")
    return PeerError(f"the sharing process is not there: {late}; is it alive and serving, with a free descriptor?")


@after_fork
def _forked() -> None:
    """Close the child's copies of its parent's links, which would outlive the parent."""
    for link in links.values():
        if link._connection is not None:
            link._connection.socket.close()
    links.clear()
    _connecting._at_fork_reinit()  # type: ignore[attr-defined]
