"""Readers and exporters that lie, for programs of `shells`. What they do follows from a seed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import socket
import struct
import time
from collections import Counter, deque
from typing import Any, Final

from gpuinterop.sharing.descriptor import ANSWER, ATTACH, BLOCKS, ENROL, REQUEST, Descriptor, boot_id

LIMIT: Final = 20.0
WAYS: Final[dict[str, tuple[set[int], ...]]] = {
    "mutated": ({1}, {2}, {3}), "guessed token": ({2},), "token of another": ({2},), "enrol first": ({2},),
    "attach twice": ({0, 2},), "enrol twice": ({0, 2},), "noise": (), "partial": (), "at once": (), "gone": (),
}  # fmt: skip
"""How readers are wrong, and the statuses that they may get; none where they do not wait for any."""
JUNK: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1, 3, 64, 2**31, 2**63, 2**64, 10**400, 1e308, "", "x", "float64", "opaque_fd", "vmm_fd",
    "ipc_mem_handle", "\ud800", "ab" * 16, "x" * 10000, [], [[]], [1], [-8], [2**62, 4], {}, {"": 0}, [0] * 100,
)  # fmt: skip


def connected(descriptor: bytes, request: int | None = None) -> socket.socket:
    """A connection to an exporter, over which a request has gone."""
    found, link = Descriptor.parse(descriptor), socket.socket(socket.AF_UNIX)
    link.settimeout(LIMIT)
    link.connect(found.address)
    link.sendall(b"" if request is None else found.request(request))
    return link


def _requests(way: str, found: Descriptor, other: Descriptor, chance: random.Random) -> list[bytes]:
    good, enrol = found.request(ATTACH), found.request(ENROL)
    changed = bytearray(chance.choice([good, enrol]))
    for at in chance.sample(range(46), chance.randint(1, 4)):  # behind them are zeros
        changed[at] ^= chance.randint(1, 255)
    return {
        "mutated": [bytes(changed)],
        "guessed token": [REQUEST.pack(b"GIPR", 1, 1, found.process, found.share, chance.randbytes(16), 0)],
        "token of another": [REQUEST.pack(b"GIPR", 1, 1, found.process, found.share, other.token, 0)],
        "enrol first": [enrol],
        "attach twice": [good, good],
        "enrol twice": [good, enrol, enrol],
        "noise": [chance.randbytes(chance.randint(1, 200))],
        "partial": [good[: chance.randrange(64)]],
        "at once": [good + enrol],
        "gone": [good],
    }[way]


def pester(descriptor: bytes, other: bytes, count: int, seed: int) -> Counter[str]:
    """Make as many connections that are wrong in some way, half of them with descriptors; return how many of each."""
    chance = random.Random(seed)
    done: Counter[str] = Counter()
    for _ in range(count):
        way, got = chance.choice(list(WAYS)), set()
        with connected(descriptor) as link, contextlib.suppress(ConnectionError):
            for number, data in enumerate(
                _requests(way, Descriptor.parse(descriptor), Descriptor.parse(other), chance)
            ):
                beside = [os.memfd_create("sent along") for _ in range(chance.choice([0, 0, 1, 5]) if data else 0)]
                socket.send_fds(link, [data], beside) if beside else link.sendall(data)
                for fd in beside:
                    os.close(fd)
                if WAYS[way] and (head := link.recv(ANSWER.size, socket.MSG_WAITALL)):
                    _, _, status, size = ANSWER.unpack(head)
                    got.add(status)
                    link.recv(size if status else 8 + 128 * (3 if number else 1), socket.MSG_WAITALL)
            assert got in (WAYS[way] or [set()]), (way, got)
        done[way] += 1
    return done


def drip(descriptor: bytes) -> int:
    """Send a request so slowly that it takes minutes; return the number of bytes that went until it was closed."""
    with connected(descriptor) as link:
        for at in range(63):
            try:
                if select.select([link], [], [], 0.25)[0]:
                    return at
                link.send(b"G")
            except BrokenPipeError:  # closed meanwhile
                return at
    raise AssertionError("it was never closed")


def ask_on(descriptor: bytes) -> int:
    """Attach, ask for the memory again and again, and read no answer; return the number of bytes that went."""
    request, sent = Descriptor.parse(descriptor).request(BLOCKS), 0
    with connected(descriptor, ATTACH) as link, contextlib.suppress(ConnectionError):
        while True:
            sent += link.send(request)
    return sent


def flood(descriptor: bytes, seconds: float) -> int:
    """Connect again and again, and keep a thousand connections; return how many were made."""
    kept: deque[socket.socket] = deque()
    address, end, made = Descriptor.parse(descriptor).address, time.monotonic() + seconds, 0
    while time.monotonic() < end:
        kept.append(link := socket.socket(socket.AF_UNIX))
        link.setblocking(False)
        made += not link.connect_ex(address)
        if len(kept) > 1000:
            kept.popleft().close()
    for link in kept:
        link.close()
    return made


# -- exporters ---------------------------------------------------------------------------------------------------------


def listen(folder: str) -> tuple[socket.socket, str]:
    """A socket, and a descriptor that names it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path := os.path.join(folder, "fake.sock"))
    listener.listen()
    listener.settimeout(LIMIT)
    return listener, bytes(Descriptor(boot_id(), bytes(16), 1, bytes(16), path)).hex()


def _memfd(size: int, seals: int, content: bytes = b"") -> int:
    fd = os.memfd_create("fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, 1033, seals)  # F_ADD_SEALS
    return fd


def _files(chance: random.Random) -> list[int]:
    """Descriptors of anything."""
    odd = _memfd(chance.choice([0, 1, 4095, 4096, 8192]), chance.choice([0, 1, 2, 6, 15]))
    return [*os.pipe(), os.open("/dev/null", os.O_RDWR), os.open("/proc/self/exe", os.O_RDONLY), odd, os.eventfd(0)]


def _changed(thing: Any, chance: random.Random) -> Any:
    """The thing, with one part of it replaced."""
    if not isinstance(thing, dict | list) or not thing or chance.random() < 0.1:
        return chance.choice(JUNK)
    key: Any = chance.choice(list(thing)) if isinstance(thing, dict) else chance.randrange(len(thing))
    thing[key] = _changed(thing[key], chance)
    return thing


def _answer(number: int, files: list[int], kinds: list[int], odd: str, chance: random.Random) -> tuple[bytes, bytes]:
    """An answer, and its handles, of which something is odd."""
    head = [b"GIPA", 1, 0, number]
    if odd == "head":
        at = chance.randrange(4)
        head[at] = chance.choice([2, 0, 3, 64, 255, 2**31]) % (256 if at < 3 else 2**32) if at else b"HTTP"
    elif odd == "files":
        files[chance.randrange(len(files))] = _files(chance)[chance.randrange(6)]
    elif odd == "handles":
        kinds = [chance.randrange(12) for _ in range(chance.randint(0, 20))]
        files[:] = files * chance.randint(0, 3)
    origin = (chance.randrange(12), chance.randrange(256)) if odd == "handles" else (7, 32)  # of the CPU
    handles = b"".join(struct.pack("<HBB124x", kind, *origin) for kind in kinds)
    return ANSWER.pack(*head), struct.pack("<4sHH", b"GIPH", 1, len(kinds)) + handles


def lie(listener: socket.socket, told: Any, seed: int) -> str:
    """Answer one reader, wrongly in one respect, at one of its requests; return in which."""
    chance = random.Random(seed)
    odd, wrong = (
        chance.choice(["json", "json", "json", "bytes", "head", "files", "handles", "short"]),
        chance.randrange(3),
    )
    if odd in ("json", "bytes"):
        wrong = 0
    text = json.dumps(_changed(told, chance) if odd == "json" else told).encode()
    if odd == "bytes":
        at = chance.randrange(len(text))
        text = text[:at] + chance.randbytes(chance.randint(0, 9)) + text[at + chance.randint(0, 9) :]
    words = [magic + bytes([version, 0, 0, 0]) for magic, version in ((b"GIPTLSM1", 2),) * 2 + ((b"GIPBOARD", 1),)]
    board = [_memfd(4096, 6, one + bytes(4) + chance.randbytes(64)) for one in words]
    answers = [
        (0, [_memfd(len(text), 6, text)], [0]),
        (0, [_memfd(4096, 6)], [0]),
        (chance.choice([0, 1, 503, 504, 2**31]), board, [1, 1, 0]),
    ]
    link, _ = listener.accept()
    with link, contextlib.suppress(OSError):
        link.settimeout(LIMIT)
        for turn, (number, files, kinds) in enumerate(answers):
            if len(link.recv(REQUEST.size, socket.MSG_WAITALL)) < REQUEST.size:
                break
            this = odd if turn == wrong else ""
            made, handles = _answer(number, files, kinds, this, chance)
            link.sendall(made[: chance.randrange(len(made))] if this == "short" else made)
            if this == "short":
                break
            socket.send_fds(link, [handles], files)
        select.select([link], [], [], LIMIT)
    os.closerange(listener.fileno() + 1, 256)
    return f"{odd}, at {('attach', 'blocks', 'enrol')[wrong]}"


def drips(listener: socket.socket) -> None:
    """Answer one reader with a byte now and then, until it gives up."""
    link, _ = listener.accept()
    with link, contextlib.suppress(OSError):
        link.recv(REQUEST.size, socket.MSG_WAITALL)
        head = iter(ANSWER.pack(b"GIPA", 1, 3, 2048) + bytes(2048))
        while not select.select([link], [], [], 0.05)[0]:
            link.send(bytes([next(head)]))
