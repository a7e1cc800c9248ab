"""Handles over a Unix socket, and peers that lie."""

import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop import ipc
from gpuinterop.handles import HandleOrigin, OriginKind

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair()
    here.settimeout(10)
    there.settimeout(10)
    before = set(os.listdir("/proc/self/fd"))
    yield here, there
    assert set(os.listdir("/proc/self/fd")) == before, "descriptors leaked"
    here.close()
    there.close()


def memfd() -> int:
    return os.memfd_create("sent")


def test_handles_arrive_owned_typed_and_untrusted(pair: Pair) -> None:
    device = gi.DeviceIdentity(name="mine", uuid=bytes(range(16)), luid=b"12345678", pci_bus_id="0000:01:00.0")
    origin = HandleOrigin(kind=OriginKind.MEMORY, device=device, size=2**40, dedicated=True)
    sent: list[Any] = [
        gi.OpaqueFd.adopt(memfd(), origin=origin),
        gi.FabricHandle(bytes(range(64))),
        gi.TimelineFd.adopt(memfd(), origin=HandleOrigin(kind=OriginKind.TIMELINE, dedicated=False)),
        gi.VmmFd.adopt(memfd()),
    ]
    ipc.send_handles(pair[0], sent)
    received = ipc.receive_handles(pair[1], [type(handle) for handle in sent])
    for ours, theirs in zip(sent, received, strict=True):
        assert type(ours) is type(theirs)
        if isinstance(ours, gi.FabricHandle):
            assert theirs.data == ours.data
            continue
        assert os.fstat(ours.fd).st_ino == os.fstat(theirs.fd).st_ino
        assert theirs.owned
        assert not os.get_inheritable(theirs.fd)
        theirs.close()
        ours.close()
    got = received[0].origin
    assert (got.kind, got.size, got.dedicated, got.trusted) == (OriginKind.MEMORY, 2**40, True, False)
    assert (got.device.uuid, got.device.luid, got.device.pci_bus_id) == (device.uuid, device.luid, "0000:01:00.0")
    assert received[2].origin.dedicated is False
    assert received[2].origin.size is None
    assert received[3].origin is None


@pytest.mark.parametrize("kind", OriginKind)
def test_every_kind_of_origin_arrives(pair: Pair, kind: OriginKind) -> None:
    with gi.VmmFd.adopt(memfd(), origin=HandleOrigin(kind=kind, size=4096)) as sent:
        ipc.send_handle(pair[0], sent)
    with ipc.receive_handle(pair[1], gi.VmmFd) as received:
        origin = received.origin
        assert origin is not None
        assert (origin.kind, origin.size, origin.trusted) == (kind, 4096, False)


def test_a_peer_does_not_choose_the_type(pair: Pair) -> None:
    with gi.OpaqueFd.adopt(memfd()) as handle:
        ipc.send_handle(pair[0], handle)
        with pytest.raises(gi.PeerError, match="OpaqueFd, TimelineFd expected"):
            ipc.receive_handle(pair[1], gi.TimelineFd)


def entry(kind: int = 0, origin: int = 0) -> bytes:
    return struct.pack("<HBB", kind, origin, 0) + bytes(124)


@pytest.mark.parametrize(
    ("message", "fds", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\n" + bytes(200), 0, "no gpuinterop handles"),
        (struct.pack("<4sHH", b"GIPH", 9, 1) + entry(), 1, "version 9"),
        (struct.pack("<4sHH", b"GIPH", 1, 2) + entry(), 1, r"2 handle\(s\), 1 expected"),
        (struct.pack("<4sHH", b"GIPH", 1, 1) + entry(kind=999), 1, "type 999"),
        (struct.pack("<4sHH", b"GIPH", 1, 1) + entry(origin=77), 1, "origin"),
        (struct.pack("<4sHH", b"GIPH", 1, 1) + entry(), 0, "do not fit"),
        (struct.pack("<4sHH", b"GIPH", 1, 1) + entry(), 3, "do not fit"),
        (struct.pack("<4sHH", b"GIPH", 1, 1), 1, "closed the connection after 8 of 136"),
        (b"", 0, "closed the connection after 0"),
    ],
)
def test_what_is_no_message_is_refused_and_every_descriptor_closed(
    pair: Pair, message: bytes, fds: int, reason: str
) -> None:
    here, there = socket.socketpair()
    numbers = [memfd() for _ in range(fds)]
    if message:
        socket.send_fds(here, [message], numbers)
    for number in numbers:
        os.close(number)
    here.close()
    there.settimeout(10)
    with pytest.raises(gi.PeerError, match=reason):
        ipc.receive_handle(there, gi.OpaqueFd)
    there.close()


def test_a_silent_peer_is_a_timeout_and_a_dead_one_an_error(pair: Pair) -> None:
    pair[1].settimeout(0.01)
    with pytest.raises(gi.PeerError, match="time-out"):
        ipc.receive_handle(pair[1], gi.OpaqueFd)
    here, there = socket.socketpair()
    there.close()
    with gi.OpaqueFd.adopt(memfd()) as handle, pytest.raises(gi.PeerError, match="is the peer alive"):
        ipc.send_handle(here, handle)
    here.close()


def test_what_cannot_be_sent_is_refused(pair: Pair) -> None:
    with pytest.raises(gi.ArgumentTypeError, match="OpaqueWin32 cannot be sent"):
        ipc.send_handle(pair[0], gi.OpaqueWin32(handle=8))
    with pytest.raises(gi.InvalidArgumentError, match="handles"):
        ipc.send_handles(pair[0], [])


def test_wrong_arguments_are_named(pair: Pair) -> None:
    anything: Any = gi.OpaqueFd.adopt(memfd())
    there: Any = pair[1]
    for argument, call in (
        ("handles", lambda: ipc.send_handles(pair[0], anything)),
        ("handles", lambda: ipc.send_handles(pair[0], iter([anything]))),  # type: ignore[arg-type]
        ("connection", lambda: ipc.send_handles(pair[0].fileno(), [anything])),  # type: ignore[arg-type]
        ("connection", lambda: ipc.send_handle(None, anything)),  # type: ignore[arg-type]
        ("connection", lambda: ipc.receive_handle(3, gi.OpaqueFd)),  # type: ignore[arg-type]
        ("connection", lambda: ipc.receive_handles(None, [gi.OpaqueFd])),  # type: ignore[arg-type]
        ("expect", lambda: ipc.receive_handles(there, gi.OpaqueFd)),  # type: ignore[arg-type]
        ("expect", lambda: ipc.receive_handle(there, int)),  # type: ignore[type-var]
        ("expect", lambda: ipc.receive_handle(there, gi.OpaqueWin32)),
        ("expect", lambda: ipc.receive_handle(there, "opaque_fd")),  # type: ignore[arg-type]
    ):
        with pytest.raises(gi.ArgumentTypeError) as caught:
            call()
        assert caught.value.argument == argument
    with pytest.raises(gi.InvalidArgumentError, match="expect"):
        ipc.receive_handles(there, [])
    anything.close()
