"""Sends handles to another process over a Unix socket. A binary message carries their descriptors.

All messages between processes of gpuinterop have one form (`Connection`), little-endian: magic ``GIPH``, u8 version 2,
u8 kind, u16 count of descriptors, u32 number, u32 bytes of the body; then the body. The descriptors arrive with the
first byte (SCM_RIGHTS). Handles are kind 0. For each handle the body has 128 bytes: u16 handle type (the index in
`WIRE_TYPES`), u8 origin kind (0: no origin), u8 dedicated (0 unknown, 1 no, 2 yes), u8 whether the device is a CPU, 3
bytes zero, u64 size, 16 bytes uuid, 8 bytes luid, 16 bytes PCI bus id, the 64 bytes of a handle without a descriptor, 8
bytes zero. An unknown size or identifier is zero.

``multiprocessing`` passes handles too, as arguments of a Process or through a Pipe; plain pickle is refused. Do not
use a Queue, a Pool or an executor, because they pickle in their own thread after ``put()`` has returned. A ``with``
block has closed the handle by then, so the receiver waits forever. Without a ``with`` block the handle leaks.

Examples
--------
A child process receives an allocation through a socket pair:

>>> import socket
>>> here, there = socket.socketpair()
>>> with here, there, device.allocate(65536) as allocation, allocation.export() as handle:
...     gi.ipc.send_handle(here, handle)
...     received = gi.ipc.receive_handle(there, gi.VmmFd)  # in the child
...     with device.import_allocation(received, received.origin.size) as imported:
...         imported.buffer.fill(7)
"""

from __future__ import annotations

import array
import contextlib
import errno
import math
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, TypeVar, cast

from . import system
from ._arguments import NoCopy, check_type
from .errors import ArgumentTypeError, InvalidArgumentError, PeerError
from .handles import (
    BytesHandle,
    DeviceIdentity,
    DmaBufFd,
    DrmSyncobjFd,
    EventFd,
    FabricHandle,
    FdHandle,
    Handle,
    HandleOrigin,
    IpcMemHandle,
    OpaqueFd,
    OriginKind,
    SyncFd,
    TimelineFd,
    VmmFd,
    use_all,
)

__all__ = ["WIRE_TYPES", "receive_handle", "receive_handles", "send_handle", "send_handles"]

WIRE_TYPES: tuple[type[Handle], ...] = (
    OpaqueFd, TimelineFd, DmaBufFd, VmmFd, DrmSyncobjFd, SyncFd, EventFd, FabricHandle, IpcMemHandle,
)  # fmt: skip
"""Handle types that can be sent. The wire format uses their order, so only append.

Examples
--------
>>> gi.OpaqueFd in gi.ipc.WIRE_TYPES, gi.D3D12Heap in gi.ipc.WIRE_TYPES
(True, False)
"""
_KINDS: tuple[OriginKind | None, ...] = (
    None, OriginKind.MEMORY, OriginKind.ALLOCATION, OriginKind.BINARY, OriginKind.TIMELINE, OriginKind.FENCE,
    OriginKind.KEYED, OriginKind.OTHER, OriginKind.MULTICAST,
)  # fmt: skip

MAGIC = b"GIPH"
VERSION = 2
HEAD = struct.Struct("<4sBBHII")  # magic, version, kind, count of descriptors, number, bytes of the body
HANDLES = 0  # the kind of a message of handles
MAX_HANDLES = 64
MAX_FDS = 253  # that the kernel accepts with one message (SCM_MAX_FD)
MAX_BODY = 64 << 20
_PIECE = 1 << 18
_ENTRY = struct.Struct("<HBBB3xQ16s8s16s64s8x")
_DEDICATED = None, False, True
_CREDENTIALS = struct.Struct("3i")  # struct ucred (pid, user, group), before descriptors if a socket has SO_PASSCRED
if sys.platform != "win32":
    _RECEIVES = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    _SENDS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL  # programs that embed Python may not ignore SIGPIPE
    _ROOM = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)

H = TypeVar("H", bound=Handle)
T = TypeVar("T")
FdT = TypeVar("FdT", bound=FdHandle)


def send_handle(connection: socket.socket, handle: Handle) -> None:
    """Send one handle. You still own it, because the peer receives a duplicate.

    Parameters
    ----------
    connection : socket.socket
        See `send_handles`.
    handle : Handle
        A handle of a type in `WIRE_TYPES`.

    Raises
    ------
    ArgumentTypeError, InvalidArgumentError, HandleError, PeerError
        See `send_handles`.

    Examples
    --------
    >>> import socket
    >>> here, there = socket.socketpair()
    >>> with here, there, device.create_semaphore(gi.TimelineFd) as semaphore, semaphore.export() as handle:
    ...     gi.ipc.send_handle(here, handle)
    ...     with gi.ipc.receive_handle(there, gi.TimelineFd) as received:
    ...         received.origin.kind
    <OriginKind.TIMELINE: 'timeline'>
    """
    send_handles(connection, [handle])


def send_handles(connection: socket.socket, handles: Sequence[Handle]) -> None:
    """Send handles over a Unix stream socket. You still own them, because the peer receives duplicates.

    Parameters
    ----------
    connection : socket.socket
        The socket. Its timeout applies to the whole message and is not changed.
    handles : sequence of Handle
        1 to 64 handles of types in `WIRE_TYPES`.

    Raises
    ------
    ArgumentTypeError
        A handle has no meaning in another process (Win32, NvSci), or an argument has the wrong type.
    InvalidArgumentError
        The socket is not a Unix stream socket, or there are not 1 to 64 handles.
    HandleError
        A handle is closed, or another thread closes it while this call waits for room. Nothing was sent.
    PeerError
        The peer is gone, or did not read the whole message within the timeout. Close the connection: it is unusable.

    Examples
    --------
    >>> import socket
    >>> here, there = socket.socketpair()
    >>> with here, there, gi.OpaqueFd(fd) as memory, gi.TimelineFd(timeline_fd) as semaphore:
    ...     gi.ipc.send_handles(here, [memory, semaphore])
    ...     for handle in gi.ipc.receive_handles(there, [gi.OpaqueFd, gi.TimelineFd]):
    ...         handle.close()
    """
    _check_connection(connection)
    _check_sequence("handles", handles, "send_handle")
    body = b"".join(map(pack, handles))
    with _connected(connection, "sent") as link:
        link.send(HANDLES, 0, body, handles, left=system.seconds_left(connection.gettimeout()))


def receive_handle(connection: socket.socket, expect: type[H]) -> H:
    """Receive one handle of the type that you expect.

    Parameters
    ----------
    connection : socket.socket
        See `receive_handles`.
    expect : type
        Type of the handle, one of `WIRE_TYPES`.

    Returns
    -------
    Handle
        The handle, which you own. Its origin is from the peer and not trusted.

    Raises
    ------
    ArgumentTypeError, InvalidArgumentError, PeerError, DriverError
        See `receive_handles`.

    Examples
    --------
    >>> import socket
    >>> here, there = socket.socketpair()
    >>> here.settimeout(10)
    >>> there.settimeout(10)
    >>> with here, there, gi.OpaqueFd(fd) as memory:
    ...     gi.ipc.send_handle(here, memory)
    ...     with gi.ipc.receive_handle(there, gi.OpaqueFd) as received:
    ...         received.owned, received.trusted
    (True, False)
    """
    handle: H = receive_handles(connection, [expect])[0]
    return handle


def receive_handles(connection: socket.socket, expect: Sequence[type[Any]]) -> list[Any]:
    """Receive handles over a Unix stream socket. You own them, and they own their descriptors.

    Parameters
    ----------
    connection : socket.socket
        The socket. Its timeout applies to the whole message and is not changed.
    expect : sequence of type
        Handle types in order. The peer must not choose how its descriptors are used.

    Returns
    -------
    list of Handle
        The handles, which you own. Their origins are from the peer and not trusted.

    Raises
    ------
    ArgumentTypeError
        An argument has the wrong type, or handles of a type cannot be sent.
    InvalidArgumentError
        The socket is not a Unix stream socket, or there are not 1 to 64 types.
    PeerError
        The peer is gone, did not send the whole message within the timeout, or sent other data. gpuinterop closes the
        descriptors that arrived.
    DriverError
        This process has no room for a descriptor that arrived.

    Examples
    --------
    >>> import socket
    >>> here, there = socket.socketpair()
    >>> with here, there, gi.OpaqueFd(fd) as memory:
    ...     gi.ipc.send_handles(here, [memory])
    ...     gi.ipc.receive_handles(there, [gi.TimelineFd])  # a different type
    Traceback (most recent call last):
        ...
    gpuinterop.errors.PeerError: expected TimelineFd, the peer sent OpaqueFd.
    """
    _check_connection(connection)
    _check_sequence("expect", expect, "receive_handle")
    for kind in expect:
        check_sendable(kind, "expect")
    left = system.seconds_left(connection.gettimeout())
    with _connected(connection, "received") as link, link.receive(left) as message:
        return unpack(message.body, message, expect)


@contextlib.contextmanager
def _connected(connection: socket.socket, done: str) -> Iterator[Connection]:
    """A connection over the same socket without its time-out, because with one Python waits before each call."""
    try:
        number = connection.fileno()
        with system.opened("dup", socket.fromfd, number, socket.AF_UNIX, socket.SOCK_STREAM) as own:
            if own.gettimeout() is not None:  # the program's default; the caller's socket shares these flags
                own.settimeout(None)
                os.set_blocking(number, connection.gettimeout() is None)
            link = Connection(own)
            try:
                yield link
            finally:
                link.discard()
    except PeerError:
        raise
    except OSError as error:
        raise PeerError(f"the handles could not be {done}: {error.strerror or error}; is the peer alive?") from error


class Message(NoCopy):
    """A received message. It owns its descriptors until `take` transfers them."""

    def __init__(self, kind: int, number: int, body: bytes, fds: list[int]) -> None:
        self.kind, self.number, self.body, self.fds = kind, number, body, fds

    def take(self, kind: type[FdT], origin: HandleOrigin | None = None) -> FdT:
        """Return the next descriptor as a handle, which owns it."""
        if not self.fds:
            raise PeerError(f"expected a descriptor for a {kind.__name__}, got none.")
        return kind.adopt(self.fds.pop(0), origin=origin)

    def __enter__(self) -> Message:
        return self

    def __exit__(self, *_: object) -> None:
        _close(self.fds)


def _close(fds: list[int]) -> None:
    """Close descriptors. An exception may leave some open, but none is closed twice, when it may be another file."""
    closing, fds[:] = fds[:], []
    system.close(*closing)


def _collect(results: list[T], call: Callable[..., T], *arguments: object) -> None:
    """Append the result of a system call, in C: an interrupt strikes before the call or after the result is kept."""
    results.extend(map(call, *([argument] for argument in arguments)))


class Connection(NoCopy):
    """Messages over a Unix stream socket, which is borrowed. All received data is read here.

    An interrupt in any call loses no byte: the next call continues.

    The socket must have no time-out, because with one Python waits before each call.
    """

    has_ended = False
    """Whether the peer has closed the connection, and everything that it sent was read."""

    def __init__(self, link: socket.socket) -> None:
        self.socket = link
        # What each `recvmsg` has returned of the next message.
        self._received: list[tuple[bytes, list[tuple[int, int, bytes]], int, object]] = []
        # Messages, their handles, whether these are owned, and what each `sendmsg` has sent.
        self._unsent: deque[tuple[bytes, Sequence[FdHandle], bool, list[int]]] = deque()

    def send(
        self, kind: int, number: int = 0, body: bytes = b"", handles: Sequence[Handle] = (), *, owned: bool = False,
        left: Callable[[], float | None] | None = None,
    ) -> None:  # fmt: skip
        """Send a message. With `left`, wait that many seconds for room; without it, `flush` sends the rest later.

        `owned` handles are closed once they are sent. If this raises, `flush` can send the rest of the message later.
        """
        carried = [handle for handle in handles if isinstance(handle, FdHandle)]
        head = HEAD.pack(MAGIC, VERSION, kind, len(carried), number, len(body))
        self._unsent.append((head + body, carried, owned, []))
        while not self.flush() and left is not None:
            self.wait(select.POLLOUT, left)

    def flush(self) -> bool:
        """Send as much as there is room for; return whether everything is sent."""
        while self._unsent:
            data, carried, owned, sent = self._unsent[0]

            def send(fds: Sequence[int], data: bytes = data, sent: list[int] = sent) -> None:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                _collect(sent, self.socket.sendmsg, [memoryview(data)[sum(sent) :]], rights, _SENDS)

            while sum(sent) < len(data):
                handles = () if sent else carried  # the first byte carries the descriptors
                try:
                    send([handle.fd for handle in handles]) if owned else use_all(handles, send)
                except BlockingIOError:
                    return False
            for handle in carried if owned else ():
                handle.close()
            self._unsent.popleft()
        return True

    def receive(self, left: Callable[[], float | None]) -> Message:
        """Wait `left` seconds for a message, or raise `TimeoutError`. A part that has arrived is kept."""
        spins = time.perf_counter() + system.SPIN_S
        while (message := self.part()) is None:
            if time.perf_counter() >= spins:  # an answer often arrives before the system would wake a thread
                self.wait(select.POLLIN, left)
        return message

    def part(self) -> Message | None:
        """Read what has arrived of a message, without waiting. None until the message is complete.

        Raises `PeerError` for other data or a closed connection, and `DriverError` if this process has no room for a
        descriptor; then only this message is lost.
        """
        while (count := sum(len(piece[0]) for piece in self._received)) < (size := self._size()):
            try:
                _collect(self._received, self.socket.recvmsg, min(size - count, _PIECE), _ROOM, _RECEIVES)
            except BlockingIOError:
                return None
            if not self._received[-1][0]:
                self.has_ended = True
                raise PeerError(f"the peer closed the connection after {count} of {size} bytes.")
        data = b"".join(piece[0] for piece in self._received)
        _, _, kind, wanted, number, _ = HEAD.unpack_from(data)
        message = Message(kind, number, data[HEAD.size :], self._fds())
        self._received = []
        if wanted > len(message.fds):  # the kernel drops descriptors for which there is no room
            with message:
                raise system.driver_error("recvmsg", errno.EMFILE)
        return message

    def _size(self) -> int:
        """Bytes of the next message; of its head, until all of that has arrived."""
        head = b"".join(piece[0][: HEAD.size] for piece in self._received[: HEAD.size])[: HEAD.size]
        if len(head) < HEAD.size:
            return HEAD.size
        magic, version, _, _, _, size = HEAD.unpack(head)
        if magic != MAGIC or version != VERSION or size > MAX_BODY:
            raise PeerError(
                f"expected a message of gpuinterop, version {VERSION}, got magic {magic!r}, version {version}, "
                f"{size} bytes; install one version of gpuinterop on both sides."
            )
        return HEAD.size + int(size)

    def _fds(self) -> list[int]:
        """The descriptors that have arrived."""
        fds = array.array("i")
        for level, kind, content in (message for piece in self._received for message in piece[1]):
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content)
        return fds.tolist()

    def wait(self, event: int, left: Callable[[], float | None]) -> None:
        """Return once a call would not block; raise `TimeoutError` after `left` seconds."""
        if (fd := self.socket.fileno()) < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        seconds = left()
        if not system.poll(fd, event, None if seconds is None else math.ceil(seconds * 1000)):
            raise TimeoutError("timed out")

    def discard(self) -> None:
        """Close the descriptors that have arrived and the owned ones that are not sent."""
        fds, self._received = self._fds(), []
        _close(fds)
        for _, carried, owned, _ in self._unsent:
            for handle in carried if owned else ():
                handle.close()
        self._unsent.clear()


def peer(connection: socket.socket) -> tuple[int, int]:
    """PID and user of the peer in this process's namespaces (SO_PEERCRED); PID 0 if it is not visible here."""
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def _check_connection(connection: object) -> None:
    """Refuse a socket that cannot carry descriptors: TCP drops them without an error on either side."""
    link = check_type(connection, socket.socket, "connection", "a socket.socket")
    if not hasattr(socket, "SO_DOMAIN"):  # only Linux has it; Windows passes no descriptors
        return
    try:  # ask the kernel, because `socket.fromfd` believes its arguments
        family, kind = (link.getsockopt(socket.SOL_SOCKET, option) for option in (socket.SO_DOMAIN, socket.SO_TYPE))
    except OSError:  # a closed socket, which the next call reports
        return
    if (family, kind) != (socket.AF_UNIX, socket.SOCK_STREAM):
        raise InvalidArgumentError(
            "connection",
            f"expected a Unix stream socket, got {_named(socket.AddressFamily, family)} "
            f"{_named(socket.SocketKind, kind)}, which cannot carry handles; use socket.socketpair() or "
            "socket.socket(socket.AF_UNIX).",
        )


def _named(names: Iterable[IntEnum], number: int) -> str:
    return next((member.name for member in names if member == number), str(number))


def _check_sequence(argument: str, values: object, single: str) -> None:
    if not isinstance(values, Sequence):
        raise ArgumentTypeError(argument, f"expected a sequence, got {_name(values)}; use {single} for one.")
    if not 1 <= len(values) <= MAX_HANDLES:
        raise InvalidArgumentError(argument, f"expected 1 to {MAX_HANDLES} at once, got {len(values)}.")


def _name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else f"a {type(value).__name__}"


def check_sendable(kind: object, argument: str) -> None:
    """Refuse types that are not in `WIRE_TYPES`."""
    if kind not in WIRE_TYPES:
        known = ", ".join(sendable.__name__ for sendable in WIRE_TYPES)
        done = "received" if argument == "expect" else "sent"
        raise ArgumentTypeError(argument, f"{_name(kind)} cannot be {done}; expected one of {known}.")


def pack(handle: Handle) -> bytes:
    """The entry of a handle in a message; its descriptor is sent with the message."""
    check_sendable(type(handle), "handle")
    handle._check_open()
    origin = handle.origin or HandleOrigin(kind=OriginKind.OTHER)
    device = origin.device or DeviceIdentity()
    return _ENTRY.pack(
        WIRE_TYPES.index(type(handle)),
        _KINDS.index(handle.origin and origin.kind),
        _DEDICATED.index(origin.dedicated),
        device.is_cpu,
        origin.size or 0,
        device.uuid or b"",
        device.luid or b"",
        (device.pci_bus_id or "").encode(),
        handle.data if isinstance(handle, BytesHandle) else b"",
    )


def unpack(entries: bytes, message: Message, expect: Sequence[type[Any]] | None = None) -> list[Any]:
    """Return the handles of entries, which must have these types, with the message's next descriptors."""
    try:
        fields = list(_ENTRY.iter_unpack(entries))
        kinds = [WIRE_TYPES[entry[0]] for entry in fields]
        origins = [_origin(*entry[1:-1]) for entry in fields]
    except (struct.error, IndexError) as error:
        raise PeerError(f"expected handles of this version, the peer sent other data ({error}).") from None
    if expect is not None and kinds != list(expect):
        wanted, got = (", ".join(kind.__name__ for kind in types) for types in (expect, kinds))
        raise PeerError(f"expected {wanted}, the peer sent {got}.")
    return [
        message.take(kind, origin) if issubclass(kind, FdHandle) else cast(Any, kind)(entry[-1], origin=origin)
        for kind, entry, origin in zip(kinds, fields, origins, strict=True)
    ]


def _origin(
    kind: int, dedicated: int, is_cpu: int, size: int, uuid: bytes, luid: bytes, pci: bytes
) -> HandleOrigin | None:
    origin_kind, is_dedicated = _KINDS[kind], _DEDICATED[dedicated]
    if origin_kind is None:
        return None
    device = DeviceIdentity(
        name="a device of another process",
        uuid=uuid if any(uuid) else None,
        luid=luid if any(luid) else None,
        pci_bus_id=pci.rstrip(b"\0").decode("ascii", "replace") or None,
        is_cpu=bool(is_cpu),
    )
    known = device.uuid or device.luid or device.pci_bus_id or device.is_cpu
    return HandleOrigin(
        kind=origin_kind, device=device if known else None, size=size or None, dedicated=is_dedicated, trusted=False
    )
