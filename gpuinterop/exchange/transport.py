"""Ways for the ranks to talk that they already have: Unix sockets and torch.distributed."""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import hashlib
import os
import queue
import secrets
import selectors
import socket
import stat
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from .. import system
from .._arguments import NoCopy, check_int, check_timeout, check_type
from ..errors import GpuInteropError, InvalidArgumentError, PeerError
from .delivery import is_our_user
from .votes import names

if sys.platform != "win32":
    import fcntl

_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a process or system that is short of something: neither the path nor the others are to blame."""

_LIMIT: Final = 1 << 26
"""Bytes of the longest payload that is sent, or taken from a peer."""


class Transport(NoCopy, ABC):
    """What a `Team` talks through. Used by one thread at a time, and by one team at a time.

    Attributes
    ----------
    rank : int
        This process's, from 0.
    size : int
        How many ranks there are.

    Examples
    --------
    >>> class Alone(gi.exchange.Transport):
    ...     rank, size = 0, 1
    ...     def exchange(self, payload, deadline):
    ...         return [payload]
    >>> gi.exchange.Team(Alone()).vote("ready")
    """

    rank: int
    size: int

    @abstractmethod
    def exchange(self, payload: bytes, deadline: float) -> list[bytes | None]:
        """Give `payload` to every rank, and take theirs: one round. Every rank makes the same calls.

        Parameters
        ----------
        payload : bytes
            What this rank says, 64 MiB at most.
        deadline : float
            A time of ``time.monotonic()``; the call ends when all is there, and at the deadline at the latest.

        Returns
        -------
        list of bytes or None
            By rank, this one's own included. None for a rank that is dead, or has sent nothing so far. What comes too
            late is dropped, and never taken for an answer of a later round. A peer's death or silence never raises.

        Raises
        ------
        InvalidArgumentError
            `payload` is longer than 64 MiB.
        """


def _check_payload(payload: bytes) -> None:
    if len(payload) > _LIMIT:
        raise InvalidArgumentError("payload", f"expected {_LIMIT} bytes or fewer, got {len(payload)}.")


class SocketTransport(Transport):
    """Unix stream sockets between all ranks of one host and one user; needs nothing else. Linux.

    Parameters
    ----------
    path : str
        A directory that all ranks can read and write, or ``@name`` for an abstract name, which needs no files. The same
        on every rank, and this team's alone until it is closed. In a directory each rank has a socket,
        ``.gpuinterop-rank-0``; one that was killed leaves it, and the next takes it over. Nothing else there is
        touched.
    rank : int
        This rank, from 0.
    size : int
        How many ranks there are.
    timeout : float
        Seconds to wait for the others to come.
    job : str
        Tells the ranks of this job from those of another that uses the path by mistake. The same on every rank, such as
        the launcher's ``SLURM_JOB_ID``.

    Raises
    ------
    PeerError
        Not all have come in time, and the message names those; or a rank is of another job, or another version of
        gpuinterop, or has met another rank 0 than this one.
    InvalidArgumentError
        Another process has this rank at this path; or a file is there that is not a socket.
    DriverError
        This process has no free descriptor or no memory left.

    Notes
    -----
    A peer that has ended is found at once, unless a process that it has forked still holds its connections: then at the
    time-out.

    A path has one team at a time, whose ranks have all met the same rank 0. When two jobs use it, every rank outside
    that team gets an error. Without `job` a rank in the team may be the other job's: two ranks that come first cannot
    tell.

    Examples
    --------
    >>> with gi.exchange.SocketTransport(folder, rank=0, size=1, job="render 7") as transport:
    ...     gi.exchange.Team(transport).vote("ready")
    """

    def __init__(
        self, path: str | os.PathLike[str], rank: int, size: int, timeout: float = 30.0, *, job: str = ""
    ) -> None:
        self.size = check_int(size, "size", minimum=1)
        self.rank = check_int(rank, "rank", minimum=0, maximum=self.size - 1)
        limit = check_seconds(timeout)
        check_type(job, str, "job", "a str")
        self._round = 0
        mine = _Hello.of(self.rank, self.size, job)
        with contextlib.ExitStack() as scope:
            self._peers = _mesh(scope, os.fspath(path), mine, time.monotonic() + limit, limit)
            self._place = scope.pop_all()

    def exchange(self, payload: bytes, deadline: float) -> list[bytes | None]:
        _check_payload(payload)
        self._round += 1
        results: list[bytes | None] = [None] * self.size
        results[self.rank] = payload
        for peer in self._peers.values():
            peer.send(self._round, payload)
        expired = False
        while not expired:  # what needs no waiting is done in any case
            with selectors.PollSelector() as selector:
                for peer in self._peers.values():
                    if events := peer.wanted(self._round):
                        selector.register(peer.socket, events, peer)
                if not selector.get_map():
                    break
                left = deadline - time.monotonic()
                expired = left <= 0
                for key, ready in selector.select(max(0.0, left)):
                    key.data.serve(ready)
        for rank, peer in self._peers.items():
            results[rank] = peer.take(self._round)
        return results

    def close(self) -> None:
        """End the connections. Idempotent. The others find this rank gone."""
        self._place.close()
        for peer in self._peers.values():
            peer.gone = True

    def __enter__(self) -> SocketTransport:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


class _Peer:
    """One connection: frames of (round, length, payload) each way."""

    HEAD: Final = struct.Struct("<QI")
    AHEAD: Final = 8
    """Frames that are kept for later rounds. A rank that goes on without another's word is a few ahead, and fails."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.gone = False
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._frames: dict[int, bytes] = {}

    def send(self, number: int, payload: bytes) -> None:
        if not self.gone:
            self._outgoing += self.HEAD.pack(number, len(payload)) + payload

    def take(self, number: int) -> bytes | None:
        frame = self._frames.get(number)
        self._frames = {key: value for key, value in self._frames.items() if key > number}
        return frame

    def wanted(self, number: int) -> int:
        """The events to wait for. All that a dead peer sent was read with its end."""
        if self.gone:
            return 0
        wants = 0 if number in self._frames else selectors.EVENT_READ
        return wants | (selectors.EVENT_WRITE if self._outgoing else 0)

    def serve(self, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read()
            if self._outgoing:  # else the peer has ended, or has all
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except ConnectionError:
            # The peer takes nothing any more; what it sent before may still be there.
            self._outgoing.clear()
            with contextlib.suppress(OSError):
                while not self.gone:
                    self._read()
            self._end()

    def _read(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            self._end()
            return
        self._incoming += data
        while len(self._incoming) >= self.HEAD.size:
            number, length = self.HEAD.unpack_from(self._incoming)
            if length > _LIMIT or len(self._frames) > self.AHEAD:  # more than a rank sends
                self._end()
                return
            end = self.HEAD.size + length
            if len(self._incoming) < end:
                return
            self._frames[number] = bytes(self._incoming[self.HEAD.size : end])
            del self._incoming[:end]

    def _end(self) -> None:
        self.gone = True
        self._outgoing.clear()
        self.socket.close()


_HELLO: Final = struct.Struct("<4sHII16s16s")
_MAGIC: Final = b"GIPX"
_VERSION: Final = 2


class _Hello(NamedTuple):
    """The first message, both ways: each rank finds out by the same comparison what the other does."""

    rank: int
    size: int
    job: bytes
    token: bytes
    """The team's, which rank 0 has made up; zeros of a rank that has not met rank 0 yet."""

    @classmethod
    def of(cls, rank: int, size: int, job: str) -> _Hello:
        digest = hashlib.sha256(job.encode("utf-8", "surrogatepass")).digest()
        return cls(rank, size, digest[:16], bytes(16) if rank else secrets.token_bytes(16))

    def send(self, connection: socket.socket) -> bool:
        """False where the other has ended."""
        try:
            connection.sendall(_HELLO.pack(_MAGIC, _VERSION, *self))
        except ConnectionError:
            return False
        return True

    @classmethod
    def receive(cls, connection: socket.socket, deadline: float) -> _Hello | None:
        """The peer's hello; None if the peer ends before."""
        connection.settimeout(_left(deadline))
        try:
            data = connection.recv(_HELLO.size)
        except ConnectionError:
            return None
        if not data:
            return None
        magic, version, *fields = _HELLO.unpack(data.ljust(_HELLO.size, b"\0"))
        if magic != _MAGIC:
            raise PeerError(f"what has connected sent {data!r}, and not the hello of a gpuinterop team's rank.")
        if version != _VERSION:
            speaks = f"a rank speaks version {version} of the exchange, and this one {_VERSION}"
            raise PeerError(f"{speaks}; all need the same gpuinterop.")
        return cls(*fields)

    def stranger(self, other: _Hello) -> str | None:
        """Why `other` is of another team; None if it is of this one."""
        if other.job != self.job:
            return "is of another job than this rank"
        if 0 not in (self.rank, other.rank) and other.token != self.token:
            return "has met another rank 0 than this rank"
        return None


def _mesh(scope: contextlib.ExitStack, path: str, mine: _Hello, deadline: float, timeout: float) -> dict[int, _Peer]:
    """Connect to the ranks below, and let those above connect. The name is kept in `scope`."""
    connections: dict[int, socket.socket] = {}
    rank, size = mine.rank, mine.size
    try:
        listener = scope.enter_context(_listen(path, rank, size, deadline))
        for peer in range(rank):
            connection, theirs = _connect(path, peer, mine, deadline)
            connections[peer] = scope.enter_context(connection)
            mine = mine._replace(token=theirs.token)
        while len(connections) < size - 1:
            peer, connection = _accept(listener, mine, deadline)
            scope.enter_context(connection)
            if connections.setdefault(peer, connection) is not connection:
                raise PeerError(f"two processes say that they are rank {peer}; each rank is one.")
    except OSError as error:
        if isinstance(error, GpuInteropError):
            raise
        if error.errno in _SHORT:
            problem = f"{os.strerror(error.errno)}; this rank needs {size + 1} descriptors"
            raise system.driver_error("open" if error.filename else "socket", error.errno, problem) from error
        missing = [peer for peer in range(size) if peer != rank and peer not in connections]
        raise PeerError(f"{names(missing)} did not come to {path!r} within {timeout:g} s.") from error
    for connection in connections.values():
        connection.setblocking(False)
    return {peer: _Peer(connection) for peer, connection in connections.items()}


def _address(path: str, rank: int) -> str:
    if path.startswith("@"):
        return f"\0gpuinterop-exchange/{path[1:]}/{rank}"
    return os.path.join(path, f".gpuinterop-rank-{rank}")


@contextlib.contextmanager
def _listen(path: str, rank: int, size: int, deadline: float) -> Iterator[socket.socket]:
    address, process = _address(path, rank), os.getpid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        ours = None
        try:
            with _alone(path, deadline):
                _bind(listener, address)
                listener.listen(size)
                ours = _file(address)
        except OSError as error:
            if isinstance(error, GpuInteropError) or error.errno in _SHORT:
                raise
            if error.errno == errno.EADDRINUSE:
                problem = f"another process is rank {rank} at this path already; each job needs a path of its own."
                raise InvalidArgumentError("rank", problem) from error
            raise InvalidArgumentError(
                "path", f"expected one for a socket, got {address!r}: {error.strerror or error}."
            ) from error
        try:
            yield listener
        finally:
            # If the folder was cleaned, the file may be another team's by now. A forked child leaves it to its parent.
            if ours is not None and _file(address) == ours and os.getpid() == process:
                with contextlib.suppress(OSError):
                    os.unlink(address)


def _file(address: str) -> tuple[int, int] | None:
    """The socket's file. No other file gets its number while the socket is open."""
    if address.startswith("\0"):
        return None
    try:
        found = os.lstat(address)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _alone(path: str, deadline: float) -> Iterator[None]:
    """One rank at a time looks whether a directory's socket is a dead rank's, and replaces it."""
    if path.startswith("@"):
        yield
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        pauses = system.pauses()
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if (left := deadline - time.monotonic()) <= 0:
                    problem = f"another process has kept the lock of the folder {path!r} all the time"
                    raise PeerError(f"{problem}; is it a rank that was stopped?") from error
                time.sleep(min(next(pauses), left))
        yield
    finally:
        os.close(folder)


def _bind(listener: socket.socket, address: str) -> None:
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or address.startswith("\0"):
            raise
        if not stat.S_ISSOCK(os.lstat(address).st_mode):
            raise InvalidArgumentError(
                "path", f"expected a free path, or the socket of a rank, got {address!r}, another file."
            ) from error
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)  # a rank that hangs, with a full queue, is one that lives
            if probe.connect_ex(address) != errno.ECONNREFUSED:
                raise
        os.unlink(address)  # a rank that was killed has left it
        listener.bind(address)


def _connect(path: str, peer: int, mine: _Hello, deadline: float) -> tuple[socket.socket, _Hello]:
    pauses = system.pauses()
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_left(deadline))
            connection.connect(_address(path, peer))
            if not is_our_user(connection):
                raise PeerError("a process of another user is at this path.")
            if mine.send(connection) and (theirs := _Hello.receive(connection, deadline)):
                if why := mine.stranger(theirs):
                    raise PeerError(f"rank {peer} at {path!r} {why}. Each job needs a path of its own.")
                if (theirs.rank, theirs.size) != (peer, mine.size):
                    raise PeerError(_odd(theirs, mine))
                return connection, theirs
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            pass
        except BaseException:
            connection.close()
            raise
        connection.close()  # the peer is not there yet, or has gone
        time.sleep(min(next(pauses), _left(deadline)))


def _accept(listener: socket.socket, mine: _Hello, deadline: float) -> tuple[int, socket.socket]:
    """The next rank above.

    One that ends without a word was only looking whether this rank lives. One of another team hears so, and is let be.
    """
    while True:
        listener.settimeout(_left(deadline))
        connection, _ = listener.accept()
        try:
            if (
                is_our_user(connection)  # every process of the host can connect
                and (theirs := _Hello.receive(connection, deadline))
                and mine.send(connection)
                and not mine.stranger(theirs)
            ):
                if theirs.size != mine.size or not mine.rank < theirs.rank < mine.size:
                    raise PeerError(_odd(theirs, mine))
                return theirs.rank, connection
        except BaseException:
            connection.close()
            raise
        connection.close()


def _odd(theirs: _Hello, mine: _Hello) -> str:
    says = f"that it is rank {theirs.rank} of {theirs.size}; this is {mine.rank} of {mine.size}"
    return f"what has connected says {says}."


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class TorchTransport(Transport):
    """A process group of ``torch.distributed`` that sends CPU tensors: gloo.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The process group; all ranks by default. A group of NCCL alone sends no CPU tensors;
        ``dist.new_group(backend="gloo")`` makes one that does.

    Raises
    ------
    InvalidArgumentError
        torch.distributed is not initialised, this process is not in the group, or the group sends no CPU tensors.

    Notes
    -----
    The tags from 0x47490000 on are the transport's. A rank that hangs leaves a thread behind on the others, which waits
    for it.

    Examples
    --------
    With torch:

    >>> import torch.distributed
    >>> torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    >>> team = gi.exchange.Team(gi.exchange.TorchTransport())
    >>> team.vote("ready")
    >>> torch.distributed.destroy_process_group()
    """

    _TAG: Final = 0x47490000

    def __init__(self, group: Any = None) -> None:
        import torch
        import torch.distributed

        self._torch: Any = torch
        self._distributed: Any = torch.distributed
        if not self._distributed.is_initialized():
            raise InvalidArgumentError(
                "group", "expected a group of torch.distributed, got none; call init_process_group() first."
            )
        self.rank = self._distributed.get_rank(group)
        if self.rank < 0:
            raise InvalidArgumentError("group", "expected a group that this process is in, got another.")
        backends = self._distributed.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
        if "cpu:" not in backends:
            raise InvalidArgumentError(
                "group",
                f"sends no CPU tensors, having {backends} only; make a group with "
                'torch.distributed.new_group(backend="gloo").',
            )
        self._group = group
        self.size = self._distributed.get_world_size(group)
        self._round = 0

    def exchange(self, payload: bytes, deadline: float) -> list[bytes | None]:
        _check_payload(payload)
        # A wait of gloo's that expires closes the connections to all: so the waits have no end, each in a thread of
        # its own, and it is this thread that gives up.
        tag = self._TAG + self._round % 0x8000 * 2
        self._round += 1
        results: list[bytes | None] = [None] * self.size
        results[self.rank] = payload
        answers: queue.SimpleQueue[tuple[int, bytes | None]] = queue.SimpleQueue()
        asked = [peer for peer in range(self.size) if peer != self.rank]
        for peer in asked:
            system.start_thread(functools.partial(self._talk, peer, payload, tag, answers))
        for _ in asked:
            try:
                peer, answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            results[peer] = answer
        return results

    def _talk(self, peer: int, payload: bytes, tag: int, answers: queue.SimpleQueue[tuple[int, bytes | None]]) -> None:
        answer = None
        with contextlib.suppress(Exception):  # RuntimeError, mostly: the connection is closed
            answer = self._converse(peer, payload, tag)
        answers.put((peer, answer))

    def _converse(self, peer: int, payload: bytes, tag: int) -> bytes | None:
        """Both send before either waits; a rank that has sent and died may still be heard."""
        torch = self._torch
        length = torch.zeros(1, dtype=torch.int64)
        parts = [torch.tensor([len(payload)])]
        if payload:  # an empty tensor is not sent
            parts.append(self._tensor(bytearray(payload)))
        sent = []
        with contextlib.suppress(RuntimeError):
            for number, tensor in enumerate(parts):
                sent.append((self._start("isend", tensor, peer, tag + number), tensor))
        self._start("irecv", length, peer, tag).wait(_DAY)
        if not 0 <= int(length) <= _LIMIT:
            return None
        answer = bytearray(int(length))
        if answer:
            self._start("irecv", self._tensor(answer), peer, tag + 1).wait(_DAY)
        with contextlib.suppress(RuntimeError):
            for work, _ in sent:
                work.wait(_DAY)
        return bytes(answer)

    def _tensor(self, content: bytearray) -> Any:
        return self._torch.frombuffer(content, dtype=self._torch.uint8)

    def _start(self, call: str, tensor: Any, peer: int, tag: int) -> Any:
        distributed = self._distributed
        number = peer if self._group is None else distributed.get_global_rank(self._group, peer)
        work = getattr(distributed, call)(tensor, number, group=self._group, tag=tag)
        if work is None:
            raise RuntimeError(f"{call} to rank {peer} was refused")
        return work


_DAY: Final = datetime.timedelta(days=1)


def check_seconds(timeout: Any) -> float:
    """A time-out that ends."""
    if not (seconds := check_timeout(timeout)):
        raise InvalidArgumentError("timeout", f"expected more than 0 seconds, and a limit, got {timeout}.")
    return seconds
