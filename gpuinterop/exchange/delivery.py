"""Descriptors from rank to rank of one host, without waiting for a rank that has died.

Each receiver listens, each sender connects, leaves its handle in the kernel's queue and goes; when a vote has shown
that all have, each receiver finds everything there. Every process of the host can connect to an abstract name, so each
side asks the kernel for the other's user, and a receiver passes over the others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from .. import ipc, system
from ..errors import GpuInteropError, PeerError
from ..handles import Handle
from .votes import names

_RANK: Final = struct.Struct("<I")


def host() -> str:
    """Kernel that runs, and its namespace of sockets: descriptors can go between ranks that have both in common."""
    path = "/proc/sys/kernel/random/boot_id"
    boot = system.call(f"open({path})", Path(path).read_text, "ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def is_our_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is of the same user."""
    return ipc.peer_user(connection) == os.geteuid()


class Inbox:
    """The place where the other ranks leave handles for this one; `name` is for `post`."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self._listener = system.call("socket", socket.socket, socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(self.name))
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)

    def take(self, senders: Collection[int], expect: type[Handle], scope: contextlib.ExitStack) -> dict[int, Any]:
        """The handles that all of `senders` have left; `scope` closes them.

        Raises
        ------
        PeerError
            A rank has left none, or something else.
        """
        taken: dict[int, Any] = {}
        for _ in range(socket.SOMAXCONN + 1):  # the queue has no more, though more processes may come all the time
            if not set(senders) - taken.keys():
                return taken
            try:
                connection = system.opened("accept", self._listener.accept)[0]
            except BlockingIOError:
                break
            with connection:
                if is_our_user(connection):
                    connection.setblocking(False)  # all was sent before the vote
                    (rank,) = _RANK.unpack(connection.recv(_RANK.size))
                    taken[rank] = scope.enter_context(ipc.receive_handle(connection, expect))
        raise PeerError(f"{names(set(senders) - taken.keys())} left no handle.")

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._listener.close()


def post(handle: Handle, name: str, rank: int, to: int, deadline: float) -> None:
    """Leave a handle for rank `to`, as rank `rank`; it stays the caller's."""
    try:
        with system.call("socket", socket.socket, socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.connect(_address(name))
            if not is_our_user(connection):
                raise PeerError(f"rank {to} is a process of another user.")
            connection.sendall(_RANK.pack(rank))
            ipc.send_handle(connection, handle)
    except OSError as error:
        if isinstance(error, GpuInteropError):
            raise
        raise PeerError(f"rank {to} takes no handle: {error}.") from error


def _address(name: str) -> str:
    return f"\0gpuinterop-handles/{name}"
