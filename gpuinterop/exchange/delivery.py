"""Send handles from rank to rank: bytes with the offers, descriptors over Unix sockets between processes of one host.

Before the first all-gather each sender listens, and offers its socket's name. Afterwards the others connect, and a
thread of the sender gives each of them the handle; if the sender has exited, connecting fails at once. Any process on
the host can connect to an abstract name, so each side asks the kernel for the other's user.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import ipc, system
from ..errors import GpuInteropError, HandleError, PeerError
from ..handles import BytesHandle, FdHandle, Handle
from ..ipc import check_sendable
from .votes import Vote, blamed, listed


def is_our_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as the same user."""
    return ipc.peer(connection)[1] == os.geteuid()


def host() -> str:
    """The running kernel and its socket namespace: ranks can exchange descriptors if they have both in common."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


class Delivery:
    """Some ranks' handles, to be delivered to all ranks.

    `handle` is this rank's, if it is a sender; the caller keeps it. All have the type `expect`. `scope` ends the
    delivery.
    """

    def __init__(self, handle: Handle | None, expect: type[Handle], scope: contextlib.ExitStack) -> None:
        check_sendable(expect, "handle")
        self._handle, self._expect = handle, expect
        self.offer: Vote = {"handle": expect.type_name, "name": secrets.token_hex(16), "host": "", "data": ""}
        if handle is not None:
            handle._check_open()
        if isinstance(handle, BytesHandle):
            self.offer["data"] = handle.data.hex()
        if issubclass(expect, FdHandle):
            self.offer["host"] = host()
            if handle is not None:
                self._serve(handle, scope)

    def _serve(self, handle: Handle, scope: contextlib.ExitStack) -> None:
        listener = scope.enter_context(_socket())
        listener.bind(_address(self.offer["name"]))
        listener.listen(socket.SOMAXCONN)

        def serve() -> None:
            with listener, contextlib.suppress(OSError):  # the shutdown; or no free descriptor, which receivers notice
                while True:
                    connection = listener.accept()[0]
                    with connection, contextlib.suppress(GpuInteropError):  # the receiver notices
                        if is_our_user(connection):
                            ipc.send_handle(connection, handle)

        scope.callback(system.start_thread(serve).join, 1.0)
        scope.callback(_shut, listener)

    def take(
        self, offers: Sequence[Vote], senders: Sequence[int], timeout: float, scope: contextlib.ExitStack
    ) -> list[Any]:
        """Receive the handles of `senders`, in this order; `scope` closes them."""
        if not issubclass(self._expect, FdHandle):
            made: Any = self._expect
            return [made(bytes.fromhex(offers[sender]["data"])) for sender in senders]
        hosts = [offer["host"] for offer in offers]
        if len(set(hosts)) > 1:
            problem = f"expected ranks on one host and network namespace for file descriptors, got {listed(hosts)}"
            raise blamed(HandleError(f"handle: {problem}; use FabricHandle if the hosts have one NVLink domain."))
        taken: list[Any] = []
        for sender in senders:
            with _socket() as connection:
                connection.settimeout(timeout)
                try:
                    connection.connect(_address(offers[sender]["name"]))
                    if not is_our_user(connection):
                        raise PeerError("it is a process of another user")
                    taken.append(scope.enter_context(ipc.receive_handle(connection, self._expect)))
                except OSError as error:
                    raise blamed(PeerError(f"rank {sender} gives no handle: {error}."), sender) from error
        return taken


def _shut(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the thread has closed it already
        listener.shutdown(socket.SHUT_RDWR)


def _socket() -> socket.socket:
    return system.opened("socket", socket.socket, socket.AF_UNIX, socket.SOCK_STREAM)


def _address(name: str) -> str:
    return f"\0gpuinterop-handles/{name}"
