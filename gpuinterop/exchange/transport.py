"""The transport of a team: the interface, and an implementation with Unix sockets on one host."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from .. import system
from .._arguments import NoCopy, check_int, check_timeout, check_type
from ..errors import GpuInteropError, InvalidArgumentError, PeerError
from .delivery import is_our_user
from .votes import blamed, names

_VERSION: Final = 3
"""Version of the messages over sockets."""

_LONGEST_HELLO: Final = 1 << 16

_HELLO_S: Final = 5.0
"""Seconds that rank 0 waits for a connection's hello, while others queue."""

_NOT_THERE: Final = (
    FileNotFoundError, ConnectionRefusedError, ConnectionResetError, BrokenPipeError, BlockingIOError, EOFError,
)  # fmt: skip
"""Errors that a rank gets while rank 0 is not there yet, or has just exited."""


class Transport(NoCopy, ABC):
    """Connects the ranks of a `Team`. Used by one thread and one team at a time.

    Attributes
    ----------
    rank : int
        The rank of this process, from 0.
    size : int
        Number of ranks.

    Examples
    --------
    >>> class Alone(gi.exchange.Transport):
    ...     rank, size = 0, 1
    ...     def all_gather(self, payload, timeout):
    ...         return [payload]
    >>> gi.exchange.Team(Alone()).vote("ready")
    """

    rank: int
    size: int

    @abstractmethod
    def all_gather(self, payload: bytes, timeout: float) -> list[bytes]:
        """Give `payload` to every rank, and return all ranks' payloads. Every rank makes the same calls.

        Parameters
        ----------
        payload : bytes
            This rank's bytes.
        timeout : float
            Longest time of the call in seconds. A rank can be late by three quarters of it.

        Returns
        -------
        list of bytes
            By rank, including this rank's own.

        Raises
        ------
        PeerError
            A rank has exited or does not answer; the message names it. You can then only close the transport.
        """


def silent(ranks: Iterable[int], timeout: float) -> GpuInteropError:
    """The error of an all-gather that misses these ranks."""
    missing = sorted(ranks)
    return blamed(PeerError(f"{names(missing)}: gone, or no answer within {timeout:g} s."), missing[0])


def check_seconds(timeout: Any) -> float:
    """Check a time-out, which must be positive and limited."""
    if not (seconds := check_timeout(timeout)):
        raise InvalidArgumentError("timeout", f"expected more than 0 seconds, and a limit, got {timeout}.")
    return seconds


class SocketTransport(Transport):
    """Unix stream sockets from each rank to rank 0, on one host and of one user. Needs no other software. Linux.

    Parameters
    ----------
    path : str
        A directory that all ranks can read and write, or ``@name`` for an abstract name, which needs no files. It is
        the same on every rank, and no other job uses it until all ranks have connected. In a directory rank 0 makes a
        socket, ``.gpuinterop-rank-0``, and replaces one that a killed process left there. It touches nothing else.
    rank : int
        This rank, from 0.
    size : int
        Number of ranks.
    timeout : float
        Seconds to wait until all ranks have connected.
    job : str
        Distinguishes this job's ranks from those of another job that uses the path by mistake. The same on every rank,
        for example the launcher's ``SLURM_JOB_ID``.

    Raises
    ------
    PeerError
        Ranks have not connected in time, and the message names them. Or a rank has another job, size or version of
        gpuinterop, or two processes have the same rank.
    InvalidArgumentError
        Another process is rank 0 at this path, or no socket can be made there.
    DriverError
        This process has no free descriptor left.

    Notes
    -----
    A rank that has exited is noticed at once; only if a process that it forked still holds its connection, at the
    time-out.

    If two jobs use one path, each rank joins the rank 0 that it meets, or gets an error. Without `job` that can be the
    other job's rank 0, because the ranks cannot distinguish the two.

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
        deadline = time.monotonic() + check_seconds(timeout)
        team = [_VERSION, self.size, check_type(job, str, "job", "a str")]
        name = os.fspath(path)
        address = f"\0gpuinterop-exchange{name}" if name.startswith("@") else os.path.join(name, ".gpuinterop-rank-0")
        self._links: dict[int, Connection[Any, Any]] = {}
        """On rank 0, one to each other rank; on another rank, only the one to rank 0."""
        with contextlib.ExitStack() as scope:
            try:
                if self.rank == 0:
                    self._let_in(scope, address, team, deadline)
                else:
                    self._join(scope, address, team, deadline)
            except TimeoutError:
                missing = names(set(range(self.size)) - {0, *self._links})
                who = "rank 0, or a rank that it waits for," if self.rank else missing
                late = PeerError(f"{who} did not come to {path!r} within {timeout:g} s.")
                self._send_all(late)
                raise late from None
            except GpuInteropError:
                raise
            except OSError as error:
                problem = f"expected one for the socket of rank 0, got {address!r}: {error.strerror or error}"
                raise InvalidArgumentError("path", f"{problem}; each job needs its own path.") from error
            self._scope = scope.pop_all()

    def _let_in(self, scope: contextlib.ExitStack, address: str, team: list[Any], deadline: float) -> None:
        """On rank 0, wait for all others, then tell them."""
        with _listening(address, self.size) as listener:
            while len(self._links) < self.size - 1:
                listener.settimeout(_left(deadline))
                connection = system.opened("accept", listener.accept)[0]
                with contextlib.suppress(EOFError, OSError, TypeError, ValueError):  # not a rank, or it has exited
                    link = scope.enter_context(_link(connection))
                    _await(link, min(deadline, time.monotonic() + _HELLO_S))
                    *theirs, rank = json.loads(link.recv_bytes(_LONGEST_HELLO))
                    problem = ""
                    if theirs != team:
                        problem = f"rank {rank} has the version, size and job {theirs}, and rank 0 has {team}"
                    elif rank in self._links:
                        problem = f"two processes say that they are rank {rank}"
                    if problem:
                        link.send(PeerError(f"{problem}; each job needs its own path."))
                        link.close()
                    else:
                        self._links[rank] = link
        self._send_all([])

    def _join(self, scope: contextlib.ExitStack, address: str, team: list[Any], deadline: float) -> None:
        """Connect to rank 0, and wait for its message that all ranks have connected."""
        pauses = system.pauses()
        while not self._links:
            with contextlib.suppress(*_NOT_THERE), _socket() as connection:
                connection.settimeout(_left(deadline))
                connection.connect(address)
                link = scope.enter_context(_link(connection))
                link.send_bytes(json.dumps([*team, self.rank]).encode())
                _answer(link, deadline)
                self._links[0] = link
            time.sleep(min(next(pauses), _left(deadline)))

    def all_gather(self, payload: bytes, timeout: float) -> list[bytes]:
        end = time.monotonic() + timeout
        late = end - timeout / 4
        try:
            if self.rank == 0:
                return self._collect(payload, late, timeout)
            with contextlib.suppress(OSError):  # rank 0 may have sent a message before it exited
                self._links[0].send((late, payload))
            gathered: list[bytes] = _answer(self._links[0], end)
            return gathered
        except (EOFError, OSError) as error:
            if isinstance(error, PeerError):
                raise
            raise silent(self._links, timeout) from error

    def _collect(self, payload: bytes, late: float, timeout: float) -> list[bytes]:
        """On rank 0, collect all payloads until the first rank gives up, then tell the others the result."""
        payloads = {0: payload}
        waiting = {link: rank for rank, link in self._links.items()}
        missing: set[int] = set()
        while waiting and not missing:
            ready: list[Any] = wait(list(waiting), max(0.0, late - time.monotonic()))
            if not ready:
                missing.update(waiting.values())
            for link in ready:
                rank = waiting.pop(link)
                try:
                    gives_up, payloads[rank] = link.recv()
                except (EOFError, OSError):
                    missing.add(rank)
                    continue
                if gives_up < time.monotonic():  # all processes of a host have the same clock
                    missing.add(0)
                late = min(late, gives_up)
        if missing:
            error = silent(missing, timeout)
            self._send_all(error)
            raise error
        gathered = [payloads[rank] for rank in range(self.size)]
        self._send_all(gathered)
        return gathered

    def _send_all(self, answer: Any) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):  # it has exited, which the next all-gather notices
                link.send(answer)

    def close(self) -> None:
        """Close the connections. Idempotent. The other ranks then see this rank as missing."""
        self._scope.close()

    def __enter__(self) -> SocketTransport:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


def _socket() -> socket.socket:
    return system.opened("socket", socket.socket, socket.AF_UNIX, socket.SOCK_STREAM)


@contextlib.contextmanager
def _listening(address: str, size: int) -> Iterator[socket.socket]:
    """The socket of rank 0, whose name is free again when all ranks have connected."""
    with _socket() as listener:
        if _is_left_over(address):
            os.unlink(address)
        listener.bind(address)
        listener.listen(size)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError, ValueError):  # an abstract name has no file
                os.unlink(address)


def _is_left_over(address: str) -> bool:
    """Whether a killed rank 0 has left this socket behind."""
    with _socket() as probe:
        probe.setblocking(False)  # a full queue means that rank 0 is running, even if it hangs
        status = probe.connect_ex(address)
    return status == errno.ECONNREFUSED and address[0] != "\0" and stat.S_ISSOCK(os.lstat(address).st_mode)


class _Link(Connection):
    """A link whose other end may go away. Connection calls `os.write`, which ends a process that takes SIGPIPE."""

    def __init__(self, link: socket.socket) -> None:
        self._socket = link
        super().__init__(link.fileno())

    def _close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data, socket.MSG_NOSIGNAL)


def _link(connection: socket.socket) -> Connection[Any, Any]:
    """Wrap a socket for whole messages, after checking the user at the other end."""
    with connection:
        if not is_our_user(connection):
            raise PeerError("a process of another user is at this path.")
        connection.setblocking(True)
        return _Link(connection.dup())


def _await(link: Connection[Any, Any], deadline: float) -> None:
    if not link.poll(_left(deadline)):
        raise TimeoutError


def _answer(link: Connection[Any, Any], deadline: float) -> Any:
    """Return rank 0's message, or raise the error in it."""
    _await(link, deadline)
    answer = link.recv()
    if isinstance(answer, PeerError):
        raise answer
    return answer


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
