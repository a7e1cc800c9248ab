"""Bare connections between an exporter and a reader, for programs of `shells`."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

from gpuinterop.sharing.descriptor import ANSWER, ATTACH, BLOCKS, REQUEST, Descriptor, boot_id

LIMIT: Final = 20.0


def connected(descriptor: bytes, request: int | None = None) -> socket.socket:
    """A connection to an exporter, over which a request has gone."""
    found, link = Descriptor.parse(descriptor), socket.socket(socket.AF_UNIX)
    link.settimeout(LIMIT)
    link.connect(found.address)
    link.sendall(b"" if request is None else found.request(request))
    return link


def ask_on(descriptor: bytes) -> int:
    """Attach, ask for the memory again and again, and read no answer; return the number of bytes that went."""
    request, sent = Descriptor.parse(descriptor).request(BLOCKS), 0
    with connected(descriptor, ATTACH) as link, contextlib.suppress(ConnectionError):
        while True:
            sent += link.send(request)
    return sent


def listen(folder: str) -> tuple[socket.socket, str]:
    """A socket, and a descriptor that names it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path := os.path.join(folder, "other.sock"))
    listener.listen()
    listener.settimeout(LIMIT)
    return listener, bytes(Descriptor(boot_id(), bytes(16), 1, bytes(16), path)).hex()


def answer(listener: socket.socket, version: int) -> None:
    """Answer one reader as an exporter of that version."""
    link, _ = listener.accept()
    with link:
        link.recv(REQUEST.size, socket.MSG_WAITALL)
        link.sendall(ANSWER.pack(b"GIPA", version, 0, 0))
