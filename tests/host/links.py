"""Bare connections between a sharing process and a reader, for programs of `shells`."""

from __future__ import annotations

import os
import random
import socket
from typing import Final

from gpuinterop import ipc
from gpuinterop.ipc import HEAD, Connection
from gpuinterop.sharing.counts import Words
from gpuinterop.sharing.descriptor import ATTACH, HELLO, Descriptor, boot_id

LIMIT: Final = 20.0


def connected(descriptor: bytes, *kinds: int) -> Connection:
    """A connection to a sharing process, over which requests have gone; nothing was read."""
    found, link = Descriptor.parse(descriptor), socket.socket(socket.AF_UNIX)
    link.settimeout(LIMIT)
    link.connect(found.address)
    link.settimeout(None)  # Python would wait before it asks the kernel not to
    connection = Connection(link)
    for number, kind in enumerate(kinds, 1):
        body = found.process if kind == HELLO else found.request
        handles = [Words().handle] if kind == HELLO else []
        connection.send(kind, number, body, handles, owned=True)
    return connection


def ask_on(descriptor: bytes) -> Connection:
    """Attach again and again, and read no answer, until no more request goes."""
    connection = connected(descriptor, HELLO)
    while not connection._rest:
        connection.send(ATTACH, 2, Descriptor.parse(descriptor).request)
    return connection


def listen(folder: str) -> tuple[socket.socket, str]:
    """A socket, and a descriptor that names it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path := os.path.join(folder, "other.sock"))
    listener.listen()
    listener.settimeout(LIMIT)
    return listener, bytes(Descriptor(boot_id(), bytes(16), 1, 0, bytes(16), path)).hex()


def answer(listener: socket.socket, version: int) -> socket.socket:
    """Answer one reader as a process of that version; the connection stays open."""
    link, _ = listener.accept()
    link.sendall(HEAD.pack(ipc.MAGIC, version, 0, 0, 1, 0))
    return link


def mutate(seed: int) -> None:
    """Have every second message that this process sends go out with other bytes, fewer of them, or more descriptors."""
    pick, flush = random.Random(seed), Connection.flush

    def flushes(one: Connection) -> bool:
        if one._rest and isinstance(one._rest[-1][0].obj, bytes):  # a new one
            data, beside, owned = one._rest[-1]
            changed = bytearray(data)
            if pick.random() < 0.5:
                for _ in range(pick.randrange(4)):
                    changed[pick.randrange(len(changed))] = pick.choice((0, 1, 127, 255, pick.randrange(256)))
                beside = pick.choice((beside, [*beside, *beside[:1]]))
                changed = changed[: pick.choice((len(changed), len(changed), pick.randrange(1, len(changed) + 1)))]
            one._rest[-1] = memoryview(changed), beside, owned
        return flush(one)

    Connection.flush = flushes  # type: ignore[assignment, method-assign]
