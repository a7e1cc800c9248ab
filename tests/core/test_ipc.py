"""Handles over a Unix socket, and peers that lie."""

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop import ipc
from gpuinterop.handles import HandleOrigin, OriginKind
from tests.beside import elsewhere
from tests.descriptors import is_open

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
        with pytest.raises(gi.PeerError, match="expected TimelineFd, the peer sent OpaqueFd"):
            ipc.receive_handle(pair[1], gi.TimelineFd)


def entry(kind: int = 0, origin: int = 0) -> bytes:
    return struct.pack("<HBB", kind, origin, 0) + bytes(124)


@pytest.mark.parametrize(
    ("message", "fds", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\n" + bytes(200), 0, "expected gpuinterop handles"),
        (struct.pack("<4sHH", b"GIPH", 9, 1) + entry(), 1, "version 9"),
        (struct.pack("<4sHH", b"GIPH", 1, 2) + entry(), 1, r"expected 1 handle\(s\), the peer sent 2"),
        (struct.pack("<4sHH", b"GIPH", 1, 1) + entry(kind=999), 1, "type 999"),
        (struct.pack("<4sHH", b"GIPH", 1, 1) + entry(kind=len(ipc.WIRE_TYPES)), 1, f"type {len(ipc.WIRE_TYPES)}"),
        (struct.pack("<4sHH", b"GIPH", 1, 1) + entry(origin=77), 1, "origin"),
        (struct.pack("<4sHH", b"GIPH", 1, 1) + entry(), 0, "do not fit"),
        (struct.pack("<4sHH", b"GIPH", 1, 1) + entry(), 2, "more descriptors came than the 1 expected"),
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


def message(count: int = 1) -> bytes:
    return struct.pack("<4sHH", b"GIPH", 1, count) + entry() * count


class Watched(socket.socket):
    """One whose time-out may not be changed, and after each receive of which `seen` is called."""

    seen: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, other: socket.socket) -> None:
        timeout = other.gettimeout()
        super().__init__(fileno=other.detach())
        super().settimeout(timeout)

    def settimeout(self, value: float | None) -> None:
        raise AssertionError("others use this socket")

    def setblocking(self, flag: bool) -> None:
        raise AssertionError("others use this socket")

    def recvmsg(self, *arguments: Any) -> Any:
        result = super().recvmsg(*arguments)
        self.seen()
        return result


def test_a_message_that_drips_has_one_time_out() -> None:
    """Each byte comes long before the time-out, and the message long after it."""
    here, there = socket.socketpair()
    there.settimeout(0.3)
    over = threading.Event()

    def drip() -> None:
        number = memfd()
        socket.send_fds(here, [message()[:1]], [number])
        os.close(number)
        for byte in message()[1:]:
            if over.wait(0.1):
                return
            here.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    before = set(os.listdir("/proc/self/fd"))
    with Watched(there) as watched:
        thread.start()
        with pytest.raises(gi.PeerError, match=r"\d of 136 bytes came within the socket's time-out"):
            ipc.receive_handle(watched, gi.OpaqueFd)
        over.set()
        thread.join()
        assert watched.gettimeout() == 0.3
        assert set(os.listdir("/proc/self/fd")) == before, "descriptors leaked"
    here.close()


@pytest.mark.parametrize("passes_credentials", [False, True])
@pytest.mark.parametrize("first", [0, 2])
def test_a_flood_of_descriptors_is_left_to_the_kernel(first: int, passes_credentials: bool) -> None:
    """Beside any byte of a message may come a few dozen; no more are ever open here than were expected."""
    here, there = socket.socketpair()
    there.settimeout(10)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, passes_credentials)
    body = message(2)
    number = memfd()
    socket.send_fds(here, [body[:1]], [number] * first)
    for byte in body[1:5]:
        socket.send_fds(here, [bytes([byte])], [number] * 60)
    here.send(body[5:])
    os.close(number)
    before = set(os.listdir("/proc/self/fd"))
    most: list[int] = []
    with Watched(there) as watched, here:
        watched.seen = lambda: most.append(len(set(os.listdir("/proc/self/fd")) - before))
        with pytest.raises(gi.PeerError, match="more descriptors came than the 2 expected"):
            ipc.receive_handles(watched, [gi.OpaqueFd] * 2)
        assert set(os.listdir("/proc/self/fd")) == before, "descriptors leaked"
    assert max(most) <= 2


def test_the_count_of_a_message_makes_no_room() -> None:
    """The peer's header says 64 handles, which here have no descriptors; none is let in behind it."""
    here, there = socket.socketpair()
    there.settimeout(10)
    body, number, most = message(64), memfd(), list[int]()
    here.send(body[:8])
    before = set(os.listdir("/proc/self/fd"))

    def seen() -> None:
        most.append(len(set(os.listdir("/proc/self/fd")) - before))
        if len(most) == 1:  # the header was read, alone
            socket.send_fds(here, [body[8:]], [number] * 60)

    with Watched(there) as watched, here:
        watched.seen = seen
        with pytest.raises(gi.PeerError, match="more descriptors came than the 0 expected"):
            ipc.receive_handles(watched, [gi.FabricHandle] * 64)
    os.close(number)
    assert max(most) == 0


def test_a_socket_that_passes_credentials(pair: Pair) -> None:
    """They come in the place of descriptors."""
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, True)
    sent = [gi.OpaqueFd.adopt(memfd()) for _ in range(64)]
    ipc.send_handles(pair[0], sent)
    received = ipc.receive_handles(pair[1], [gi.OpaqueFd] * 64)
    assert [os.fstat(one.fd).st_ino for one in received] == [os.fstat(one.fd).st_ino for one in sent]
    for handle in [*sent, *received]:
        handle.close()


def test_sockets_that_do_not_wait_and_closed_ones(pair: Pair) -> None:
    """What is there is taken; what is not there is not waited for."""
    pair[1].setblocking(False)
    with gi.OpaqueFd.adopt(memfd()) as handle:
        ipc.send_handle(pair[0], handle)
        ipc.receive_handle(pair[1], gi.OpaqueFd).close()
        pair[0].send(message()[:7])
        with pytest.raises(gi.PeerError, match="7 of 136 bytes came"):
            ipc.receive_handle(pair[1], gi.OpaqueFd)
        here, there = socket.socketpair()
        there.close()
        here.close()
        for call in (lambda: ipc.send_handle(here, handle), lambda: ipc.receive_handle(there, gi.OpaqueFd)):
            with pytest.raises(gi.PeerError, match="Bad file descriptor"):
                call()


def test_what_cannot_be_sent_is_refused(pair: Pair) -> None:
    with pytest.raises(gi.ArgumentTypeError, match="OpaqueWin32 cannot be sent"):
        ipc.send_handle(pair[0], gi.OpaqueWin32(handle=8))
    with pytest.raises(gi.ArgumentTypeError, match="KeyedMutex cannot be received"):
        ipc.receive_handles(pair[0], [gi.KeyedMutex])
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


class Interfering(socket.socket):
    """Calls `act` the first time that the library makes the call `at` on it, before the call itself."""

    at = ""
    act: Callable[[], object] = staticmethod(lambda: None)

    def _now(self, call: str) -> None:
        if call == self.at:
            self.at = ""
            self.act()

    def fileno(self) -> int:
        self._now("fileno")
        return super().fileno()

    def sendmsg(self, *arguments: Any) -> int:
        self._now("sendmsg")
        return super().sendmsg(*arguments)


@pytest.mark.parametrize("at", ["fileno", "sendmsg"])
@pytest.mark.parametrize("count", [1, 64])
def test_a_handle_that_another_thread_closes_meanwhile_sends_no_other_file(at: str, count: int) -> None:
    """While the message waits for room it is not sent; at the very call, it is the one that was to go."""
    before = set(os.listdir("/proc/self/fd"))
    here, there = socket.socketpair()
    sent: list[Any] = [gi.OpaqueFd.adopt(memfd()) for _ in range(count)]
    last = sent[-1]
    number, wanted = last.fd, [os.fstat(one.fd).st_ino for one in sent]
    secret: list[int] = []

    def end() -> None:
        elsewhere(last.close)
        while not is_open(number):
            secret.append(os.memfd_create("secret"))

    with Interfering(fileno=here.detach()) as connection, there:
        connection.at, connection.act = at, end
        if at == "fileno":
            with pytest.raises(gi.HandleError, match="is closed"):
                ipc.send_handles(connection, sent)
        else:
            ipc.send_handles(connection, sent)
        connection.shutdown(socket.SHUT_WR)
        data, fds, _, _ = socket.recv_fds(there, 1 << 16, 64)
        assert [os.fstat(fd).st_ino for fd in fds] == (wanted if at == "sendmsg" else [])
        assert len(data) == (8 + 128 * count if at == "sendmsg" else 0)
    for fd in (*fds, *secret):
        os.close(fd)
    for handle in sent:
        handle.close()
    assert set(os.listdir("/proc/self/fd")) == before, "descriptors leaked"


@pytest.mark.parametrize("of", ["TCP", "a datagram socket", "one that was said to be Unix's"])
def test_a_socket_that_passes_no_descriptors_is_refused(of: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, gi.OpaqueFd.adopt(memfd()) as handle:
        if of == "a datagram socket":
            here, there = socket.socketpair(type=socket.SOCK_DGRAM)
        else:
            here = socket.create_connection(server.getsockname())
            there = server.accept()[0]
        if of == "one that was said to be Unix's":
            here, there = (socket.socket(socket.AF_UNIX, fileno=one.detach()) for one in (here, there))
        with here, there:
            for call in (
                lambda: ipc.send_handle(here, handle),
                lambda: ipc.send_handle(here, gi.FabricHandle(bytes(64))),
                lambda: ipc.receive_handle(there, gi.OpaqueFd),
            ):
                with pytest.raises(gi.InvalidArgumentError, match="expected a Unix stream socket, got") as caught:
                    call()
                assert caught.value.argument == "connection"
            there.setblocking(False)
            with pytest.raises(BlockingIOError):
                there.recv(1)
        assert not handle.closed
    here, there = socket.socketpair()
    with here, there, socket.fromfd(here.fileno(), socket.AF_INET, socket.SOCK_STREAM) as mistaken:
        ipc.send_handle(mistaken, gi.FabricHandle(bytes(64)))  # it is Unix's, whatever Python was told
        assert ipc.receive_handle(there, gi.FabricHandle).data == bytes(64)


def test_descriptors_of_a_message_that_goes_in_parts_are_sent_once() -> None:
    near, far = socket.socketpair()
    with near, far:
        for one in (near, far):
            one.settimeout(10)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        sent = [gi.OpaqueFd.adopt(memfd()) for _ in range(64)]
        thread = threading.Thread(target=ipc.send_handles, args=(near, sent))
        thread.start()
        received = ipc.receive_handles(far, [gi.OpaqueFd] * 64)
        thread.join()
        assert [os.fstat(one.fd).st_ino for one in received] == [os.fstat(one.fd).st_ino for one in sent]
        for handle in [*sent, *received]:
            handle.close()
