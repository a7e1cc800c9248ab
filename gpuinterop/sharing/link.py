"""Links this process to one that shares: requests, what was imported from it, and the notice of its exit."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any, Final
from weakref import WeakValueDictionary

from .. import system
from .._core.lifetime import after_fork
from .._core.release import shown
from ..errors import PeerError
from ..handles import EventFd, Handle, OpaqueFd
from ..ipc import Connection, Message
from .counts import Holds, Words
from .folder import VARIABLE, check_peer
from .loop import loop
from .messages import DONE, HELLO, Contents, Descriptor, failure_of
from .server import HANG_UP, has_hung_up

SecondsLeft = Callable[[], "float | None"]


class Link(Holds):
    """The connection to one sharing process, which counts as exited once the kernel hangs up.

    Neither process closes its socket before it exits. After any other failure only requests fail.
    """

    def __init__(self, process: bytes) -> None:
        super().__init__()
        self.process, self._asking = process, threading.RLock()
        """`_asking` is held by the thread that connects, asks or closes."""
        self._connection: Connection | None = None
        self._owned, self._number = ExitStack(), 0
        self.importing = threading.RLock()
        """Held while imports are looked up and made, so that each block is imported once."""
        self.imports: dict[tuple[object, int], list[Any]] = {}
        self.known: WeakValueDictionary[tuple[int, bytes], Contents] = WeakValueDictionary()
        """The contents of attached shares, by serial and token."""

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask(self, kind: int, body: bytes, left: SecondsLeft, handles: Sequence[Handle] = ()) -> Message:
        """Ask, and return the answer, which the caller closes. Only one thread asks at a time."""
        rest = left()
        try:
            return system.under(self._asking, self._ask, kind, body, left, handles, limit=-1 if rest is None else rest)
        finally:
            if self.ended:  # `end` leaves closing the connection to the thread that asks
                system.under(self._asking, self._close, limit=0)

    def _ask(self, kind: int, body: bytes, left: SecondsLeft, handles: Sequence[Handle]) -> Message:
        if not system.holds(self._asking):
            raise _lost(TimeoutError())
        if self.ended or self._connection is None:
            raise PeerError(ENDED)
        connection, number = self._connection, (self._number + 1) & 0xFFFFFFFF
        self._number = number
        try:
            with contextlib.suppress(BrokenPipeError):  # an answer that has arrived may say why
                connection.send(kind, number, body, handles, owned=True, left=left)
            while (message := connection.receive(left)).number != number:
                with message:  # the answer to a call that gave up
                    pass
        except (OSError, PeerError) as error:
            has_ended = not isinstance(error, TimeoutError) and self._poll()
            if isinstance(error, PeerError) and not connection.has_ended:
                raise
            raise PeerError(ENDED) if has_ended else _lost(error) from None
        if message.kind == DONE:
            return message
        with message:
            raise failure_of(message.kind, message.body)

    def connect(self, descriptor: Descriptor, left: SecondsLeft, users: Collection[int]) -> None:
        """Connect if not connected. The caller holds `_asking`, unless the time has passed."""
        if not system.holds(self._asking):
            raise _lost(TimeoutError())
        if (connection := self._connection) is not None:
            check_peer(connection.socket, users)  # the first call may have allowed other users
        elif not self.ended:
            try:
                self._connect(descriptor.address, left, users)
            except BaseException:
                self.end()
                self._owned.close()
                raise

    def _connect(self, path: str, left: SecondsLeft, users: Collection[int]) -> None:
        folder = os.environ.get(VARIABLE)
        place = os.path.join(folder, os.path.basename(path)) if folder else path
        loop().start()  # it notices when the other process exits
        link = system.call("socket", socket.socket, socket.AF_UNIX)
        self._owned.callback(link.close)

        def connects() -> bool:
            with contextlib.suppress(BlockingIOError):  # the socket's queue is full
                link.connect(place)
                return True
            return False

        try:
            link.settimeout(left())
            if not system.until(connects, left()):
                raise TimeoutError
        except OSError as error:
            raise _lost(error, place) from None
        link.settimeout(None)  # else Python waits even before a call that does not block
        check_peer(link, users)
        self.counts, self._connection = Words(), Connection(link)
        self._owned.callback(self._connection.discard)
        with self.ask(HELLO, self.process, left, [self.counts.handle]) as answer:
            with answer.take(OpaqueFd) as page:
                self.theirs = Words(page)
            self.bell = self._owned.enter_context(answer.take(EventFd))
        loop().watch(link.fileno(), lambda _: self._poll(), HANG_UP)

    # -- imports -----------------------------------------------------------------------------------------------------

    @system.locked
    def enter(self, imported: Any) -> None:
        """Register an import under the numbers of its blocks."""
        for number in imported.numbers:
            self.imports.setdefault((imported.device, number), []).append(imported)

    @system.locked
    def leave(self, imported: Any) -> None:
        for key in [(imported.device, number) for number in imported.numbers]:
            if rest := [other for other in self.imports.pop(key, ()) if other is not imported]:
                self.imports[key] = rest

    # -- the end -----------------------------------------------------------------------------------------------------

    def watch(self, reader: Any) -> None:
        """Tell a reader when the other process exits."""
        self.readers[reader] = None
        if self.ended:  # it may have exited before this call
            self.end()

    def _poll(self) -> bool:
        """End the link if the kernel has hung up."""
        if (connection := self._connection) is not None and has_hung_up(connection.socket):
            self.end()
        return self.ended

    def end(self) -> None:
        """End the link, because the other process has exited."""
        self.ended = True
        if links.get(self.process) is self:
            links.pop(self.process, None)
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that asks, which closes it
            system.under(self._asking, self._close, limit=0)
        with contextlib.suppress(KeyError):  # another thread may also end it
            while True:
                shown(self.readers.popitem()[0].poison)

    def _close(self) -> None:
        """Close the connection, unless another thread is asking."""
        if system.holds(self._asking):
            if (connection := self._connection) is not None:
                self._connection = None
                loop().unwatch(connection.socket.fileno())
            self._owned.close()


links: Final[dict[bytes, Link]] = {}
"""This process's links, by the number of the sharing process."""

ENDED: Final = "the process that shared the arrays has ended; discard what was read since."


def link_to(descriptor: Descriptor, left: SecondsLeft, users: Collection[int]) -> Link:
    """The link to a sharing process. The first call connects."""
    while True:
        process, rest = descriptor.process, left()
        link = links.get(process) or links.setdefault(process, Link(process))
        system.under(link._asking, link.connect, descriptor, left, users, limit=-1 if rest is None else rest)
        if not link.ended:
            return link
        link.end()  # another thread's call has failed but not removed the link yet


def _lost(error: OSError, path: str = "") -> PeerError:
    if isinstance(error, ConnectionRefusedError):
        return PeerError(f"the process that listened at {path} has ended; ask for a new descriptor.")
    if isinstance(error, FileNotFoundError):
        reasons = "the process has ended, or its folder is not mounted in this container; mount it, and name it in"
        return PeerError(f"expected the sharing process's socket at {path}, it is not there: {reasons} {VARIABLE}.")
    late = "it did not answer within the time-out" if isinstance(error, TimeoutError) else str(error)
    if isinstance(error, PermissionError):
        return PeerError(f"expected a socket that this user can reach, got {late}; see users= and {VARIABLE}.")
    return PeerError(f"the sharing process is not there: {late}; is it alive and serving, with a free descriptor?")


@after_fork
def _forked() -> None:
    """Close the child's copies of its parent's links, which would otherwise stay open after the parent exits."""
    for link in links.values():
        if link._connection is not None:
            link._connection.socket.close()
    links.clear()
