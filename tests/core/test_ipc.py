"""Handles over a Unix socket, and peers that die, stall, or speak otherwise."""

import contextlib
import gc
import itertools
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop import ipc, system
from gpuinterop.handles import HandleOrigin, OriginKind
from tests.beside import beside, elsewhere
from tests.descriptors import is_open, open_fds
from tests.limits import LIMIT

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair()
    here.settimeout(LIMIT)
    there.settimeout(LIMIT)
    before = open_fds()
    with here, there:
        yield here, there
        assert open_fds() == before, "descriptors leaked"


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
        *(gi.VmmFd.adopt(memfd(), origin=HandleOrigin(kind=kind, size=4096)) for kind in OriginKind),
    ]
    ipc.send_handles(pair[0], sent)
    received = ipc.receive_handles(pair[1], [type(handle) for handle in sent])
    for ours, theirs in zip(sent, received, strict=True):
        assert type(ours) is type(theirs)
        if (origin := ours.origin) is None:
            assert theirs.origin is None
        else:
            found = theirs.origin
            assert (found.kind, found.size, found.dedicated) == (origin.kind, origin.size, origin.dedicated)
            assert not found.trusted
        if isinstance(ours, gi.FabricHandle):
            assert theirs.data == ours.data
            continue
        assert os.path.sameopenfile(ours.fd, theirs.fd)
        assert theirs.owned
        assert not os.get_inheritable(theirs.fd)
        theirs.close()
        ours.close()
    got = received[0].origin.device
    assert (got.uuid, got.luid, got.pci_bus_id) == (device.uuid, device.luid, device.pci_bus_id)


def message(
    count: int = 1, *, magic: bytes = b"GIPH", version: int = 2, kind: int = 0, origin: int = 0, fds: int | None = None,
    size: int | None = None,
) -> bytes:  # fmt: skip
    head = struct.pack("<4sBBHII", magic, version, 0, count if fds is None else fds, 0, size or 128 * count)
    return head + (struct.pack("<HB", kind, origin) + bytes(125)) * count


@pytest.mark.parametrize(
    ("sent", "fds", "reason"),
    [
        (message(magic=b"HTTP"), 0, "expected a message of gpuinterop, version 2, got magic b'HTTP'"),
        (message(version=3), 1, "version 3, .*install one version"),
        (message(size=ipc.MAX_BODY + 1), 1, f"{ipc.MAX_BODY + 1} bytes"),
        (message(2), 2, "expected OpaqueFd, the peer sent OpaqueFd, OpaqueFd"),
        (message(kind=1), 1, "expected OpaqueFd, the peer sent TimelineFd"),
        (message(kind=len(ipc.WIRE_TYPES)), 1, "expected handles of this version"),
        (message(origin=77), 1, "expected handles of this version"),
        (message(size=100)[:116], 1, "expected handles of this version"),
        (message(fds=0), 0, "expected a descriptor for a OpaqueFd, got none"),
        (message()[:40], 1, "closed the connection after 40 of 144"),
        (b"", 0, "closed the connection after 0"),
    ],
)
def test_what_is_no_message_is_refused_and_every_descriptor_closed(
    pair: Pair, sent: bytes, fds: int, reason: str
) -> None:
    here, there = pair
    number = memfd()
    if sent:
        socket.send_fds(here, [sent], [number] * fds)
    os.close(number)
    here.shutdown(socket.SHUT_WR)
    with pytest.raises(gi.PeerError, match=reason):
        ipc.receive_handle(there, gi.OpaqueFd)


def test_a_message_with_descriptors_for_which_there_is_no_room_is_lost_alone(pair: Pair) -> None:
    """The kernel drops some of them. Those that arrived are closed once, and not later under another file's number."""
    near, far = pair
    far.settimeout(None)
    connection, number = ipc.Connection(far), memfd()
    socket.send_fds(near, [message(fds=2, size=128)], [number])
    with pytest.raises(gi.DriverError, match="EMFILE"):
        connection.receive(lambda: LIMIT)
    others = [os.dup(number) for _ in range(2)]  # one has the number of the descriptor that arrived
    near.sendall(message(fds=0, kind=1, size=128))
    with connection.receive(lambda: LIMIT) as second:
        assert (second.fds, second.body[:2]) == ([], b"\1\0")
    connection.discard()
    assert all(map(is_open, others))
    for fd in (number, *others):
        os.close(fd)


@pytest.mark.filterwarnings("ignore::gpuinterop.LeakedResourceWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("taken", [True, False])
def test_an_interrupt_gives_no_descriptor_two_owners(monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    """Struck at each instruction: some may stay open, and no number is closed again, when it is another file's."""
    before, decoy, close = set(os.listdir("/proc/self/fd")), memfd(), os.close
    closed: list[int] = []

    def close_once(fd: int) -> None:
        closed.append(fd)
        os.dup2(decoy, fd)  # the number is given to another file at once

    def strike(at: int) -> bool:
        here, there = socket.socketpair()
        seen = itertools.count(1)

        def trace(frame: Any, event: str, _: object) -> Any:
            if frame.f_code.co_filename != ipc.__file__:
                return None
            frame.f_trace, frame.f_trace_opcodes = trace, True
            if event == "opcode" and next(seen) == at:
                raise KeyboardInterrupt
            return trace

        with here, there, monkeypatch.context() as patch:
            socket.send_fds(here, [message(2)], [decoy, decoy])
            patch.setattr(os, "close", close_once)
            outer = sys.gettrace()
            sys.settrace(trace)
            try:
                for handle in ipc.receive_handles(there, [gi.OpaqueFd] * (1 + taken)):
                    handle.close()
            except KeyboardInterrupt:
                return True
            except gi.PeerError:
                assert not taken
            finally:
                sys.settrace(outer)
        return False

    for at in itertools.count(1):
        struck: list[bool] = []
        elsewhere(lambda at=at, struck=struck: struck.append(strike(at)))  # what it strikes may stay handled there
        assert len(closed) == len(set(closed)), f"closed again after the strike at {at}: {closed}"
        closed.clear()
        gc.collect()
        for fd in map(int, set(os.listdir("/proc/self/fd")) - before - {str(decoy)}):
            if is_open(fd):
                close(fd)
        if struck != [True]:
            break
    close(decoy)
    assert at > 100


@pytest.mark.parametrize("default", [None, 0.05])
def test_the_callers_socket_keeps_its_flags(default: float | None) -> None:
    for limit in (None, 0.0, 5.0):
        here, there = socket.socketpair()
        with here, there, gi.OpaqueFd.adopt(os.memfd_create("kept")) as handle:
            here.settimeout(limit)
            before = os.get_blocking(here.fileno())
            socket.setdefaulttimeout(default)
            try:
                gi.ipc.send_handle(here, handle)
            finally:
                socket.setdefaulttimeout(None)
            assert os.get_blocking(here.fileno()) is before


def test_a_silent_peer_is_a_timeout_and_one_that_is_gone_an_error(pair: Pair) -> None:
    """A socket that does not wait takes what is there."""
    here, there = socket.socketpair()
    there.close()
    with gi.OpaqueFd.adopt(memfd()) as handle:
        with pytest.raises(gi.PeerError, match="sent: Broken pipe"):
            ipc.send_handle(here, handle)
        here.close()
        for call in (lambda: ipc.send_handle(here, handle), lambda: ipc.receive_handle(there, gi.OpaqueFd)):
            with pytest.raises(gi.PeerError, match="Bad file descriptor"):
                call()
        ipc.send_handle(pair[0], handle)
    for limit in (0.0, 0.01):
        pair[1].settimeout(limit)
        if not limit:
            ipc.receive_handle(pair[1], gi.OpaqueFd).close()
        with pytest.raises(gi.PeerError, match="timed out"):
            ipc.receive_handle(pair[1], gi.OpaqueFd)


def test_a_message_that_drips_has_one_time_out(pair: Pair) -> None:
    """Each byte comes long before the time-out, and the message long after it."""
    here, there = pair
    there.settimeout(0.3)
    over = threading.Event()

    def drip() -> None:
        for byte in message(fds=0):
            here.send(bytes([byte]))
            if over.wait(0.1):
                return

    with beside(drip):
        with pytest.raises(gi.PeerError, match="timed out"):
            ipc.receive_handle(there, gi.OpaqueFd)
        over.set()
    assert there.gettimeout() == 0.3


def test_wrong_arguments_are_named(pair: Pair) -> None:
    here, there = pair
    with gi.OpaqueFd.adopt(memfd()) as handle:
        calls: list[tuple[str, Any, Any, Any]] = [
            ("handles", ipc.send_handles, here, handle),
            ("handles", ipc.send_handles, here, []),
            ("handle", ipc.send_handle, here, gi.OpaqueWin32(handle=8)),
            ("connection", ipc.send_handle, here.fileno(), handle),
            ("expect", ipc.receive_handles, there, gi.OpaqueFd),
            ("expect", ipc.receive_handles, there, []),
            ("expect", ipc.receive_handle, there, gi.OpaqueWin32),
        ]
        for argument, call, *given in calls:
            with pytest.raises((gi.ArgumentTypeError, gi.InvalidArgumentError)) as caught:
                call(*given)
            assert caught.value.argument == argument


@pytest.mark.parametrize("at", ["poll", "sendmsg"])
@pytest.mark.parametrize("count", [1, 64])
def test_a_handle_that_another_thread_closes_meanwhile_sends_no_other_file(
    monkeypatch: pytest.MonkeyPatch, pair: Pair, at: str, count: int
) -> None:
    """While the message waits for room it is not sent; at the very call, it is the one that was to go."""
    here, there = pair
    sent: list[Any] = [gi.OpaqueFd.adopt(memfd()) for _ in range(count)]
    last = sent[-1]
    number, wanted = last.fd, [os.fstat(one.fd).st_ino for one in sent]
    secret: list[int] = []
    module: Any = system if at == "poll" else socket.socket
    real, filling = getattr(module, at), 0

    def interfere(*arguments: Any) -> Any:
        monkeypatch.setattr(module, at, real)
        elsewhere(last.close)
        while not is_open(number):
            secret.append(os.memfd_create("secret"))
        there.recv(filling, socket.MSG_WAITALL)
        return real(*arguments)

    if at == "poll":
        here.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                filling += here.send(bytes(4096))
        here.settimeout(LIMIT)
    monkeypatch.setattr(module, at, interfere)
    if at == "poll":
        with pytest.raises(gi.HandleError, match="is closed"):
            ipc.send_handles(here, sent)
    else:
        ipc.send_handles(here, sent)
    here.shutdown(socket.SHUT_WR)
    data, fds, _, _ = socket.recv_fds(there, 1 << 16, 64)
    assert [os.fstat(fd).st_ino for fd in fds] == (wanted if at == "sendmsg" else [])
    assert len(data) == (16 + 128 * count if at == "sendmsg" else 0)
    for fd in (*fds, *secret):
        os.close(fd)
    for handle in sent:
        handle.close()


@pytest.mark.parametrize("of", ["TCP", "a datagram socket", "one that was said to be Unix's"])
def test_a_socket_that_passes_no_descriptors_is_refused(of: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, gi.OpaqueFd.adopt(memfd()) as handle:
        if of == "a datagram socket":
            here, there = socket.socketpair(type=socket.SOCK_DGRAM)
        else:
            here = socket.create_connection(server.getsockname())
            there = server.accept()[0]
        if of == "one that was said to be Unix's":
            here = socket.socket(socket.AF_UNIX, fileno=here.detach())
        with here, there:
            for call in (lambda: ipc.send_handle(here, handle), lambda: ipc.receive_handle(here, gi.OpaqueFd)):
                with pytest.raises(gi.InvalidArgumentError, match="connection: expected a Unix stream socket, got"):
                    call()


def test_descriptors_of_a_message_that_goes_in_parts_are_sent_once(pair: Pair) -> None:
    """And credentials may come before them."""
    near, far = pair
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    sent, parts, numbers = [gi.OpaqueFd.adopt(memfd()) for _ in range(64)], list[bytes](), list[int]()
    with beside(lambda: ipc.send_handles(near, sent)):
        while sum(map(len, parts)) < 16 + 128 * 64:
            data, fds, _, _ = socket.recv_fds(far, 1 << 16, 64)
            parts.append(data)
            numbers += fds
    assert len(parts) > 1
    far.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, True)
    with beside(lambda: ipc.send_handles(near, sent)):
        received = ipc.receive_handles(far, [gi.OpaqueFd] * 64)
    for came in (numbers, [one.fd for one in received]):
        assert [os.fstat(fd).st_ino for fd in came] == [os.fstat(one.fd).st_ino for one in sent]
    for fd in numbers:
        os.close(fd)
    for handle in [*sent, *received]:
        handle.close()
