"""Bare connections between a sharing process and a reader, for programs of `shells`."""

from __future__ import annotations

import random
import socket

from gpuinterop.ipc import HEAD, MAGIC, VERSION, Connection
from gpuinterop.sharing.counts import Words
from gpuinterop.sharing.messages import ATTACH, HELLO, Descriptor
from tests.limits import LIMIT


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


def half_asked(descriptor: bytes) -> Connection:
    """A connection over which a part of a request's head has gone."""
    connection = connected(descriptor)
    connection.socket.send(HEAD.pack(MAGIC, VERSION, HELLO, 1, 1, 16)[:9])
    return connection


def ask_on(descriptor: bytes) -> Connection:
    """Attach again and again, and read no answer, until no more request goes."""
    connection = connected(descriptor, HELLO)
    while not connection._unsent:
        connection.send(ATTACH, 2, Descriptor.parse(descriptor).request)
    return connection


def mutate(seed: int) -> None:
    """Have every second message that this process sends go out with other bytes, fewer of them, or more descriptors."""
    pick, flush = random.Random(seed), Connection.flush

    def flushes(one: Connection) -> bool:
        if one._unsent and not one._unsent[-1][-1]:  # a new one
            data, beside, owned, sent = one._unsent[-1]
            changed = bytearray(data)
            if pick.random() < 0.5:
                for _ in range(pick.randrange(4)):
                    changed[pick.randrange(len(changed))] = pick.choice((0, 1, 127, 255, pick.randrange(256)))
                beside = pick.choice((beside, [*beside, *beside[:1]]))
                changed = changed[: pick.choice((len(changed), len(changed), pick.randrange(1, len(changed) + 1)))]
            one._unsent[-1] = bytes(changed), beside, owned, sent
        return flush(one)

    Connection.flush = flushes  # type: ignore[assignment, method-assign]
