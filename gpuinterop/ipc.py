"""Sends handles to another process over a Unix socket: the descriptors beside a fixed binary message.

The message, little-endian: magic ``GIPH``, u16 version 1, u16 count, then for each handle 128 bytes: u16 handle type
(the index in `WIRE_TYPES`), u8 origin kind (0: no origin), u8 flags (1 dedicated known, 2 dedicated, 4 size known, 8
uuid known, 16 luid known, 32 the device is a CPU), u32 zero, u64 size, 16 bytes uuid, 8 bytes luid, 16 bytes PCI bus
id (NUL padded), the 64 bytes of a handle without a descriptor, 8 bytes zero. The message has a fixed length and no
pickle: a hostile peer can send wrong handles, which imports check, but not code that runs.

``multiprocessing`` passes handles too, as arguments of a Process and through a Pipe; plain pickle is refused. Do not
use a Queue, a Pool or an executor: they pickle in their own thread, after ``put()`` has returned. By then a ``with``
block has closed the handle, and the other side waits in vain. Without a ``with`` block the handle leaks.

Examples
--------
A child process gets an allocation through a socket pair:

>>> import socket
>>> here, there = socket.socketpair()
>>> with here, there, device.allocate(65536) as mine, mine.export() as handle:
...     gi.ipc.send_handle(here, handle)
...     received = gi.ipc.receive_handle(there, gi.VmmFd)  # in the child
...     with device.import_allocation(received, received.origin.size) as theirs:
...         theirs.buffer.fill(7)
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
import time
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

from . import system
from ._arguments import check_type
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
"""Handle types that can be sent. Their order is that of the wire format, so append only.

Examples
--------
>>> gi.OpaqueFd in gi.ipc.WIRE_TYPES, gi.D3D12Heap in gi.ipc.WIRE_TYPES
(True, False)
"""
_KINDS: tuple[OriginKind | None, ...] = (
    None, OriginKind.MEMORY, OriginKind.ALLOCATION, OriginKind.BINARY, OriginKind.TIMELINE, OriginKind.FENCE,
    OriginKind.KEYED, OriginKind.OTHER, OriginKind.MULTICAST,
)  # fmt: skip

_MAGIC = b"GIPH"
_VERSION = 1
_HEADER = struct.Struct("<4sHH")
_ENTRY = struct.Struct("<HBBIQ16s8s16s64s8x")
MAX_HANDLES = 64
_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, user, group. They come before descriptors if a socket has SO_PASSCRED."""
_DEDICATED_KNOWN, _DEDICATED, _SIZE_KNOWN, _UUID_KNOWN, _LUID_KNOWN, _IS_CPU = 1, 2, 4, 8, 16, 32

H = TypeVar("H", bound=Handle)


def send_handle(connection: socket.socket, handle: Handle) -> None:
    """Send one handle. The caller still owns it: the peer gets a duplicate.

    Parameters
    ----------
    connection : socket.socket
        See `send_handles`.
    handle : Handle
        Handle of one of `WIRE_TYPES`.

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
    """Send handles over a Unix stream socket. The caller still owns them: the peer gets duplicates.

    Parameters
    ----------
    connection : socket.socket
        The socket, whose timeout applies to the whole message and is not changed.
    handles : sequence of Handle
        Up to 64 handles, each of one of `WIRE_TYPES`.

    Raises
    ------
    ArgumentTypeError
        A handle means nothing in another process (Win32, NvSci), or an argument is not of these types.
    InvalidArgumentError
        The socket is not a Unix stream socket, or the number of handles is not 1 to 64.
    HandleError
        A handle is closed, or another thread closes it while this one waits for room. Nothing was sent.
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
    body = packed(handles)
    beside = [handle for handle in handles if isinstance(handle, FdHandle)]
    patience, rest = _Patience(connection), memoryview(body)
    try:
        while rest:
            patience.wait(select.POLLOUT)
            with contextlib.suppress(BlockingIOError):  # another thread has taken the room
                rest = rest[send_part(connection, rest, beside) :]
                beside = []  # the descriptors went with the first byte
    except OSError as error:
        raise PeerError(f"the handles could not be sent: {error.strerror or error}; is the peer alive?") from error


def receive_handle(connection: socket.socket, expect: type[H]) -> H:
    """Receive one handle of the type that the caller expects.

    Parameters
    ----------
    connection : socket.socket
        See `receive_handles`.
    expect : type
        Type of the handle, one of `WIRE_TYPES`.

    Returns
    -------
    Handle
        The handle, which the caller owns. Its origin came from the peer, and is not trusted.

    Raises
    ------
    ArgumentTypeError, InvalidArgumentError, PeerError
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
    """Receive handles over a Unix stream socket. The caller owns them, and they own their descriptors.

    Parameters
    ----------
    connection : socket.socket
        The socket, whose timeout applies to the whole message and is not changed.
    expect : sequence of type
        Handle types in order: the peer must not choose the type of its descriptors.

    Returns
    -------
    list of Handle
        The handles, which the caller owns. Their origins came from the peer, and are not trusted.

    Raises
    ------
    ArgumentTypeError
        An argument is not of these types, or handles of a type cannot be sent.
    InvalidArgumentError
        The socket is not a Unix stream socket, or the number of types is not 1 to 64.
    PeerError
        The peer is gone, did not send the whole message within the timeout, or sent other data or too many descriptors.
        This process never opens more descriptors than it expects, and closes all that came.
    DriverError
        This process has no room for a descriptor that came.

    Examples
    --------
    >>> import socket
    >>> here, there = socket.socketpair()
    >>> with here, there, gi.OpaqueFd(fd) as memory:
    ...     gi.ipc.send_handles(here, [memory])
    ...     gi.ipc.receive_handles(there, [gi.TimelineFd])  # what this process expects is another type
    Traceback (most recent call last):
        ...
    gpuinterop.errors.PeerError: expected TimelineFd, the peer sent OpaqueFd.
    """
    _check_connection(connection)
    _check_sequence("expect", expect, "receive_handle")
    for kind in expect:
        check_sendable(kind, "expect")
    size = _HEADER.size + _ENTRY.size * len(expect)
    fds: list[int] = []
    try:
        data = _receive(connection, size, sum(issubclass(kind, FdHandle) for kind in expect), fds)
        return _unpack(data, expect, fds)
    except BaseException:
        system.close(*fds)
        raise


class _Patience:
    """One timeout for several calls. It leaves the socket's own unchanged, which another thread may use meanwhile."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        timeout = connection.gettimeout()
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def wait(self, event: int) -> None:
        """Return once a call would not block; at the deadline, raise TimeoutError if it would."""
        if (fd := self._connection.fileno()) < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        left = None if self._deadline is None else math.ceil(max(0.0, self._deadline - time.monotonic()) * 1000)
        if not system.poll(fd, event, left):
            raise TimeoutError("timed out")


def send_part(connection: socket.socket, data: memoryview, beside: Sequence[FdHandle]) -> int:
    """Send what there is room for, with the descriptors; return how many bytes went. It does not wait."""

    def send(fds: Sequence[int]) -> int:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        return connection.sendmsg([data], rights, socket.MSG_DONTWAIT)

    return use_all(beside, send)


def peer_user(connection: socket.socket) -> int:
    """The user of the process at the other end, in this user namespace (SO_PEERCRED)."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _check_connection(connection: object) -> None:
    """Refuse a socket that no descriptor goes through: TCP drops it, and tells neither side."""
    found = check_type(connection, socket.socket, "connection", "a socket.socket")
    if not hasattr(socket, "SO_DOMAIN"):  # no system but Linux; Windows passes no descriptors
        return
    try:  # the kernel, for `socket.fromfd` believes what it is told
        family, kind = (found.getsockopt(socket.SOL_SOCKET, what) for what in (socket.SO_DOMAIN, socket.SO_TYPE))
    except OSError:  # a closed socket, as the next call says
        return
    if (family, kind) != (socket.AF_UNIX, socket.SOCK_STREAM):
        raise InvalidArgumentError(
            "connection",
            f"expected a Unix stream socket, got {_named(socket.AddressFamily, family)} "
            f"{_named(socket.SocketKind, kind)}, which handles do not go through; connect by socket.socketpair(), or "
            "by socket.socket(socket.AF_UNIX).",
        )


def _named(names: Iterable[IntEnum], number: int) -> str:
    return next((one.name for one in names if one == number), str(number))


def _check_sequence(argument: str, things: object, single: str) -> None:
    if not isinstance(things, Sequence):
        raise ArgumentTypeError(argument, f"expected a sequence, got {_name(things)}; use {single} for one.")
    if not 1 <= len(things) <= MAX_HANDLES:
        raise InvalidArgumentError(argument, f"expected 1 to {MAX_HANDLES} at once, got {len(things)}.")


def _name(thing: object) -> str:
    return thing.__name__ if isinstance(thing, type) else f"a {type(thing).__name__}"


def check_sendable(kind: object, argument: str) -> None:
    """Refuse what is not one of `WIRE_TYPES`."""
    if kind not in WIRE_TYPES:
        known = ", ".join(one.__name__ for one in WIRE_TYPES)
        done = "received" if argument == "expect" else "sent"
        raise ArgumentTypeError(argument, f"{_name(kind)} cannot be {done}; expected one of {known}.")


def _receive(connection: socket.socket, size: int, count: int, fds: list[int]) -> bytes:
    """Receive a message of `size` bytes; add at most `count` descriptors that come with it to `fds`."""
    data = bytearray()
    item = array.array("i").itemsize
    patience = _Patience(connection)
    while len(data) < size:
        try:
            patience.wait(select.POLLIN)
            # The kernel drops descriptors that do not fit. CMSG_SPACE would round up, to room for one more.
            room = socket.CMSG_LEN((count - len(fds)) * item)
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED):
                room += socket.CMSG_SPACE(_CREDENTIALS.size)
            part, ancillary, flags, _ = connection.recvmsg(size - len(data), room, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError as error:
            raise PeerError(f"{len(data)} of {size} bytes came within the socket's time-out.") from error
        except OSError as error:
            raise PeerError(f"the handles could not be received: {error.strerror or error}.") from error
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % item])
                fds.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            if len(fds) < count:
                raise system.driver_error("recvmsg", errno.EMFILE)
            raise PeerError(f"more descriptors came than the {count} expected.")
        if not part:
            raise PeerError(f"the peer closed the connection after {len(data)} of {size} bytes.")
        data += part
        if len(data) >= _HEADER.size:
            magic, version, sent = _HEADER.unpack_from(data)
            if magic != _MAGIC or version != _VERSION:
                raise PeerError(f"expected gpuinterop handles, got magic {magic!r}, version {version}.")
            if _HEADER.size + _ENTRY.size * sent != size:
                raise PeerError(f"expected {(size - _HEADER.size) // _ENTRY.size} handle(s), the peer sent {sent}.")
    return bytes(data)


def _unpack(data: bytes, expect: Sequence[type[Any]], fds: list[int]) -> list[Any]:
    entries = [_ENTRY.unpack_from(data, _HEADER.size + _ENTRY.size * index) for index in range(len(expect))]
    for wanted, entry in zip(expect, entries, strict=True):
        if entry[0] >= len(WIRE_TYPES) or WIRE_TYPES[entry[0]] is not wanted:
            got = WIRE_TYPES[entry[0]].__name__ if entry[0] < len(WIRE_TYPES) else f"type {entry[0]}"
            raise PeerError(f"expected {wanted.__name__}, the peer sent {got}.")
    if len(fds) != sum(issubclass(kind, FdHandle) for kind in expect):
        raise PeerError(f"the peer's {len(fds)} descriptor(s) do not fit its {len(expect)} handle(s).")
    origins = [_unpack_origin(entry) for entry in entries]
    handles: list[Any] = []
    for kind, entry, origin in zip(expect, entries, origins, strict=True):
        if issubclass(kind, FdHandle):
            handles.append(kind.adopt(fds[0], origin=origin))
            del fds[0]  # the handle owns it now
        else:
            handles.append(kind(entry[8], origin=origin))
    return handles


def packed(handles: Sequence[Handle]) -> bytes:
    """The message of handles, beside which their descriptors go."""
    return b"".join([_HEADER.pack(_MAGIC, _VERSION, len(handles)), *map(_pack, handles)])


def _pack(handle: Handle) -> bytes:
    check_sendable(type(handle), "handle")
    handle._check_open()
    origin, device = handle.origin, None
    kind = flags = size = 0
    if origin is not None:
        kind = _KINDS.index(origin.kind)
        device = origin.device
        if origin.dedicated is not None:
            flags |= _DEDICATED_KNOWN | (_DEDICATED if origin.dedicated else 0)
        if origin.size is not None:
            flags |= _SIZE_KNOWN
            size = origin.size
    uuid = luid = pci = b""
    if device is not None:
        uuid, luid = device.uuid or b"", device.luid or b""
        pci = (device.pci_bus_id or "").encode()
        flags |= (_UUID_KNOWN if uuid else 0) | (_LUID_KNOWN if luid else 0) | (_IS_CPU if device.is_cpu else 0)
    data = handle.data if isinstance(handle, BytesHandle) else b""
    return _ENTRY.pack(WIRE_TYPES.index(type(handle)), kind, flags, 0, size, uuid, luid, pci, data)


def _unpack_origin(entry: tuple[Any, ...]) -> HandleOrigin | None:
    _, kind, flags, _, size, uuid, luid, pci, _ = entry
    if kind >= len(_KINDS):
        raise PeerError(f"the peer sent an unknown kind of origin, {kind}.")
    found = _KINDS[kind]
    if found is None:
        return None
    pci_text = pci.rstrip(b"\0").decode("ascii", "replace") or None
    device = None
    if flags & (_UUID_KNOWN | _LUID_KNOWN | _IS_CPU) or pci_text:
        device = DeviceIdentity(
            name="a device of another process",
            uuid=uuid if flags & _UUID_KNOWN else None,
            luid=luid if flags & _LUID_KNOWN else None,
            pci_bus_id=pci_text,
            is_cpu=bool(flags & _IS_CPU),
        )
    return HandleOrigin(
        kind=found,
        device=device,
        size=size if flags & _SIZE_KNOWN else None,
        dedicated=bool(flags & _DEDICATED) if flags & _DEDICATED_KNOWN else None,
        trusted=False,
    )
