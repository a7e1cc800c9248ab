"""Descriptors from rank to rank of one host, so that nobody waits for one that has died.

Each receiver listens, each sender connects, leaves its handle in the kernel's queue and goes; when a vote has shown
that all have, each receiver finds everything there. Anybody on the host can connect to an abstract name, so each side
looks at the other's user, and a sender shows a secret that came by the team's transport. Who fills the queue first,
with thousands of connections, makes a delivery fail, and no more.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from .. import ipc
from ..errors import GpuInteropError, PeerError
from ..handles import Handle

_LABEL: Final = struct.Struct("<I16s")
_CREDENTIALS: Final = struct.Struct("3i")


def host() -> str:
    """What ranks have in common between which descriptors can go: a running kernel, and its names of sockets."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def is_our_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is of the same user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


class Inbox:
    """Where the other ranks leave handles for this one.

    Attributes
    ----------
    address : list of str
        For `post`: the name, and the secret.
    """

    def __init__(self) -> None:
        name, self._secret = secrets.token_hex(16), secrets.token_bytes(16)
        self.address = [name, self._secret.hex()]
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_name(name))
        self._listener.listen(socket.SOMAXCONN)  # with room for those who have no business here
        self._listener.setblocking(False)

    def take(self, senders: Iterable[int], expect: type[Handle]) -> dict[int, Any]:
        """The handles that all of `senders` have left; the caller owns them.

        Raises
        ------
        PeerError
            One has left none, or something else. Those that came are closed.
        """
        wanted = set(senders)
        taken: dict[int, Any] = {}
        queued = self._queued()
        try:
            while wanted:
                if (connection := next(queued, None)) is None:
                    raise PeerError(f"rank {min(wanted)} has left no handle, although it says so.")
                with connection:
                    if (rank := self._sender(connection)) in wanted:
                        taken[rank] = ipc.receive_handle(connection, expect)
                        wanted.remove(rank)
        except BaseException:
            for handle in taken.values():
                handle.close()
            raise
        return taken

    def _queued(self) -> Iterator[socket.socket]:
        """Those who have come so far. More may come all the time, but no more were there than the queue takes."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(socket.SOMAXCONN + 1):
                yield self._listener.accept()[0]

    def _sender(self, connection: socket.socket) -> int:
        """The rank at the other end; -1 for a stranger."""
        if is_our_user(connection):
            connection.setblocking(False)
            with contextlib.suppress(OSError, struct.error):
                rank, secret = _LABEL.unpack(connection.recv(_LABEL.size))
                if hmac.compare_digest(secret, self._secret):
                    return int(rank)
        return -1

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


def check_address(address: Any) -> tuple[str, bytes]:
    """The name and the secret of an `Inbox`, or an error: it came from another process."""
    name, secret = address
    key = bytes.fromhex(secret)
    if len(bytes.fromhex(name)) != 16 or len(key) != 16:
        raise ValueError("no address of an inbox")
    return name, key


def post(handle: Handle, address: Any, rank: int, to: int, deadline: float) -> None:
    """Leave a handle for rank `to`, as rank `rank`; it stays the caller's."""
    try:
        name, secret = check_address(address)
        label = _LABEL.pack(rank, secret)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.connect(_name(name))
            if not is_our_user(connection):
                raise PeerError(f"rank {to} is a process of another user.")
            connection.sendall(label)
            ipc.send_handle(connection, handle)
    except (OSError, TypeError, ValueError, struct.error) as error:
        if isinstance(error, GpuInteropError):
            raise
        raise PeerError(f"rank {to} takes no handle: {error}.") from error


def _name(token: str) -> str:
    return f"\0gpuinterop-handles/{token}"
