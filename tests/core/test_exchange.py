"""Ranks that agree, and how they fail: votes, transports and handles, without a GPU.

The ranks are threads here. What arrives where is decided by a `Grid`, so that every way of dying is tried; sockets are
tried beside it. Ranks that are processes, and are killed, are in tests/vendors/cuda/test_exchange.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import re
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.errors import again
from gpuinterop.exchange import SocketTransport, Team, Transport, delivery, transport as transports
from tests.beside import beside
from tests.programs import printed

from .fake import FakeMulticast, fake_team

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract names, memfds")

LIMIT = 30.0
"""Seconds for what takes none."""


class Died(BaseException):
    """A rank's end: nothing of it runs any more."""


class Grid:
    """Between ranks that are threads: every round is over when all who live have come to it.

    `deaths`: by (round, rank), the ranks that still get what the dying rank has sent in that round. `says`: by rank,
    what it sends in place of its payloads.
    """

    def __init__(
        self,
        size: int,
        deaths: dict[tuple[int, int], set[int]] | None = None,
        says: dict[int, bytes] | None = None,
    ) -> None:
        self.size = size
        self.deaths = deaths or {}
        self.says = says or {}
        self.rounds = 0
        self._changed = threading.Condition()
        self._alive = set(range(size))
        self._sent: dict[int, dict[int, bytes]] = {}

    def leave(self, rank: int) -> None:
        with self._changed:
            self._alive.discard(rank)
            self._changed.notify_all()

    def exchange(self, rank: int, number: int, payload: bytes) -> list[bytes | None]:
        with self._changed:
            sent = self._sent.setdefault(number, {})
            sent[rank] = self.says.get(rank, payload)
            self.rounds = max(self.rounds, number)
            self._changed.notify_all()
            if (number, rank) in self.deaths:
                raise Died
            assert self._changed.wait_for(lambda: sent.keys() >= self._alive, LIMIT)
            return [self._heard(sent, number, sender, rank) for sender in range(self.size)]

    def _heard(self, sent: dict[int, bytes], number: int, sender: int, rank: int) -> bytes | None:
        return sent.get(sender) if rank in self.deaths.get((number, sender), {rank}) else None


class GridTransport(Transport):
    def __init__(self, grid: Grid, rank: int) -> None:
        self.rank = rank
        self.size = grid.size
        self.round = 0
        self._grid = grid

    def exchange(self, payload: bytes, deadline: float) -> list[bytes | None]:
        self.round += 1
        return self._grid.exchange(self.rank, self.round, payload)

    def close(self) -> None:
        self._grid.leave(self.rank)


def run(size: int, body: Callable[[int], Any]) -> list[Any]:
    """What `body` has returned or raised for each rank."""
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def teams(grid: Grid, body: Callable[[Team], Any], *timeouts: float) -> list[Any]:
    """What `body` has returned or raised for each rank; each has its time-out, or all have one."""

    def rank_body(rank: int) -> Any:
        transport = GridTransport(grid, rank)
        try:
            return body(Team(transport, timeout=(timeouts or (LIMIT,))[rank % max(1, len(timeouts))]))
        finally:
            transport.close()

    return run(grid.size, rank_body)


def sockets(path: Path, size: int, body: Callable[[Team, SocketTransport], Any], timeout: float = LIMIT) -> list[Any]:
    def rank_body(rank: int) -> Any:
        with SocketTransport(path, rank, size, timeout=LIMIT) as transport:
            return body(Team(transport, timeout=timeout), transport)

    return run(size, rank_body)


def same(errors: list[Any], kind: type[Exception]) -> Any:
    """The one error that all of them are."""
    assert {type(error) for error in errors} == {kind}, errors
    assert len({str(error) for error in errors}) == 1, errors
    assert len({(error.rank, error.step) for error in errors}) == 1
    return errors[0]


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before, "descriptors leaked"


# -- one outcome -------------------------------------------------------------------------------------------------------


CAPABILITY = gi.Capability(
    operation=gi.Operation.IMPORT_MULTICAST,
    handle_type=gi.FabricHandle,
    support=gi.Support.UNSUPPORTED,
    scope=gi.Scope.DEVICE,
    reason="of a kind.",
    reference="a page",
    workaround="another.",
)


@pytest.mark.parametrize(
    "error",
    [
        gi.DriverError("cuMulticastBindMem", 47, "CUDA_ERROR_MULTICAST_RESOURCE_FULL", "no room"),
        gi.OutOfMemoryError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY"),
        gi.InvalidArgumentError("size", "does not fit."),
        gi.ArgumentTypeError("handle", "is none."),
        gi.BackendUnavailableError("no driver.", fix="Install one.", absent=True),
        gi.UnsupportedError(CAPABILITY, context="a device"),
        gi.HandleError("closed."),
        gi.PeerError("left no handle \u2014 \ud800."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_error_of_one_is_everybodys(error: gi.GpuInteropError) -> None:
    """Class, attributes and text, with the rank and the step; its own error is the cause where it failed."""

    def body(team: Team) -> None:
        with team.step("bind"):
            if team.rank == 2:
                raise error

    raised = teams(Grid(4), body)
    found = same(raised, type(error))
    assert str(found) == f"rank 2, step 'bind': {error}"
    assert (found.rank, found.step) == (2, "bind")
    expected = {**vars(error), "rank": 2, "step": "bind"}
    assert [vars(one) for one in raised] == [expected] * 4
    assert [one.__cause__ for one in raised] == [None, None, error, None]
    assert str(again(found)) == str(found)


def test_an_error_that_is_not_ours_is_named() -> None:
    """By its class; and a class of our name is not taken for ours."""

    class Mine(gi.HandleError):
        pass

    same_name = type("HandleError", (Exception,), {})
    for error, kind, text in (
        (KeyError("lost"), gi.PeerError, "KeyError: 'lost'"),
        (Mine("derived"), gi.HandleError, "derived"),
        (same_name("no"), gi.PeerError, "HandleError: no"),
    ):

        def body(team: Team, error: Exception = error) -> None:
            team.vote("look", error if team.rank == 1 else None)

        raised = teams(Grid(3), body)
        assert str(same(raised, kind)) == f"rank 1, step 'look': {text}"


def test_the_lowest_of_those_that_failed_is_named() -> None:
    raised = teams(Grid(4), lambda team: team.vote("x", gi.HandleError(f"of {team.rank}") if team.rank % 2 else None))
    assert str(same(raised, gi.HandleError)) == "rank 1, step 'x': of 1"


def test_a_long_error_is_cut_alike_for_all() -> None:
    raised = teams(Grid(3), lambda team: team.vote("x", gi.HandleError("y" * 100_000) if team.rank else None))
    assert len(str(same(raised, gi.HandleError))) < 5000


def test_a_broken_team_says_so_again() -> None:
    """Each later call raises the same, without a word to the others."""

    def body(team: Team) -> str:
        with pytest.raises(gi.HandleError) as first:
            team.vote("x", gi.HandleError("no") if team.rank else None)
        calls: list[Callable[[], Any]] = [
            lambda: team.vote("y"),
            lambda: team.step("y").__enter__(),
            lambda: team.share_handle(expect=gi.VmmFd),
            lambda: team.gather_handles(gi.FabricHandle(bytes(64))),
            lambda: team.create_multicast(None, 1),  # type: ignore[arg-type]
            lambda: team.map(None),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(gi.HandleError) as later:
                call()
            assert str(later.value) == str(first.value)
            assert vars(later.value) == vars(first.value)
        return repr(team)

    grid = Grid(2)
    assert teams(grid, body) == [f"<Team rank {rank} of 2, broken>" for rank in range(2)]
    assert grid.rounds == 3


def test_time_outs_are_the_same_on_every_rank() -> None:
    error = same(teams(Grid(3), lambda team: team.vote("x"), 20, 30, 20), gi.InvalidArgumentError)
    text = "step 'x': timeout: expected the same time-outs from all ranks, got 20.0 (ranks 0 and 2), 30.0 (rank 1)."
    assert (str(error), error.argument, error.rank) == (text, "timeout", None)


def test_a_vote_ends_by_its_time_out() -> None:
    """Each round has its part; and who has failed waits for nobody in the last one."""
    until: list[list[float]] = []

    class Recording(GridTransport):
        def exchange(self, payload: bytes, deadline: float) -> list[bytes | None]:
            until[-1].append(deadline)
            return super().exchange(payload, deadline)

    team = Team(Recording(Grid(1), 0), timeout=8.0)
    for error in (None, gi.HandleError("no")):
        until.append([])
        before = time.monotonic()
        with contextlib.suppress(gi.HandleError):
            team.vote("x", error)
        after = time.monotonic()
        first, second, last = until[-1]
        assert before + 4 <= first <= after + 4
        assert before + 8 <= second <= after + 8
        assert before <= last <= after if error else last == second


def test_ranks_that_are_out_of_step() -> None:
    raised = teams(Grid(4), lambda team: team.vote("map" if team.rank == 2 else "bind"))
    error = same(raised, gi.PeerError)
    assert str(error).startswith("the ranks are out of step: bind (ranks 0, 1 and 3), map (rank 2)")
    assert error.rank == 2
    raised = teams(Grid(2), lambda team: team.vote(f"step {team.rank}"))
    same(raised, gi.PeerError)
    # What is a value in one step is none in another.
    raised = teams(
        Grid(3), lambda team: team.gather_handles(gi.FabricHandle(bytes(64))) if team.rank else team.vote("a")
    )
    assert "the ranks are out of step: a (rank 0), gather_handles" in str(same(raised, gi.PeerError))
    # The one that is elsewhere because it has failed is what matters.
    raised = teams(Grid(3), lambda team: team.vote("b", gi.HandleError("no")) if team.rank else team.vote("a"))
    assert str(same(raised, gi.HandleError)) == "rank 1, step 'b': no"


def test_what_is_no_exception_leaves_at_once() -> None:
    """Ctrl-C in the body: this rank does not vote, the others find it silent, and it cannot come back."""

    def body(team: Team) -> None:
        try:
            with team.step("work"):
                if team.rank == 1:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            with pytest.raises(
                gi.PeerError, match=r"this rank, 1, has left the team in step 'work': KeyboardInterrupt\."
            ):
                team.vote("more")
            raise

    raised = teams(Grid(3), body)
    assert isinstance(raised.pop(1), KeyboardInterrupt)
    assert same(raised, gi.PeerError).rank == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"transport": object()}, "transport: expected a"),
        *(({"timeout": timeout}, "timeout: expected") for timeout in (0, -1.0, float("inf"), 1e7, None, "x", True)),
    ],
)
def test_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(gi.InvalidArgumentError, match=match):
        Team(**{"transport": GridTransport(Grid(1), 0), **arguments})
    wrong = GridTransport(Grid(2), 0)
    wrong.rank = 2
    with pytest.raises(gi.InvalidArgumentError, match="rank 2 of 2"):
        Team(wrong)


# -- deaths ------------------------------------------------------------------------------------------------------------


def _subsets(ranks: set[int]) -> Iterator[set[int]]:
    for count in range(len(ranks) + 1):
        yield from map(set, itertools.combinations(sorted(ranks), count))


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("number", range(1, 7))
def test_one_death_at_every_point(number: int, victim: int) -> None:
    """In each round of either of two votes, heard by any part of the others: one outcome, and the rank is named."""
    others = set(range(4)) - {victim}
    for heard in _subsets(others):

        def body(team: Team) -> str:
            team.vote("first")
            with team.step("second"):
                pass
            team.vote("third")
            return "all went well"

        results = teams(Grid(4, {(number, victim): heard}), body)
        assert isinstance(results.pop(victim), Died)
        error = same(results, gi.PeerError)
        # Heard by nobody in a vote's first round, it is missed in that vote; else in the next one.
        vote, place = divmod(number - 1, 3)
        step = ("first", "second", "third")[vote + bool(heard or place)]
        assert str(error) == f"rank {victim} is gone or did not answer within 30 s, step {step!r}."
        assert (error.rank, error.step) == (victim, step)


@pytest.mark.parametrize("victim", range(3))
def test_an_error_and_a_death(victim: int) -> None:
    """Of a rank that fails and dies at once, and of one that dies while another fails: one outcome in every case."""
    for heard, failing in itertools.product(_subsets(set(range(3)) - {victim}), range(3)):

        def body(team: Team, failing: int = failing) -> None:
            team.vote("x", gi.HandleError("no") if team.rank == failing else None)

        results = teams(Grid(3, {(1, victim): heard}), body)
        assert isinstance(results.pop(victim), Died)
        error = same(results, gi.HandleError if heard else gi.PeerError)
        assert error.rank == (failing if heard else victim)


@pytest.mark.parametrize("first", range(4))
def test_two_deaths_within_a_vote(first: int) -> None:
    """One dies in the first round, and one that may alone have heard it in the second: all fail, or all succeed."""
    for second in set(range(4)) - {first}:
        others = set(range(4)) - {first, second}
        for heard, passed_on in itertools.product(_subsets({*others, second}), _subsets(others)):
            deaths = {(1, first): heard, (2, second): passed_on}
            results = teams(Grid(4, deaths), lambda team: team.vote("x"))
            assert all(isinstance(results[rank], Died) for rank in (first, second))
            known = {type(results[rank]) for rank in others}
            assert known in ({type(None)}, {gi.PeerError}), (deaths, results)
            if known == {gi.PeerError}:
                assert same([results[rank] for rank in others], gi.PeerError).rank == first


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [b"", b"\x80\x04\x95", b"[1]", b'{"format": "gpuinterop vote 1", "votes": {}}'])
def test_a_rank_of_another_version(message: bytes) -> None:
    """The others name it, all alike."""
    results = teams(Grid(3, says={1: message}), lambda team: team.vote("bind"))
    error = same([results[0], results[2]], gi.PeerError)
    expected = f"expected 'gpuinterop vote 2', got {message[:40]!r}; install the same gpuinterop on all ranks."
    assert str(error) == f"rank 1, step 'bind': {expected}"
    assert (error.rank, error.step) == (1, "bind")


@pytest.mark.parametrize(("name", "kind"), [(7, gi.ArgumentTypeError), (None, gi.ArgumentTypeError),
                                            ("x" * 1001, gi.InvalidArgumentError)])  # fmt: skip
def test_names_of_steps(name: Any, kind: type[Exception]) -> None:
    """One that is none is refused before anybody is told, and the team goes on."""
    team = Team(GridTransport(Grid(1), 0), timeout=LIMIT)
    with pytest.raises(kind):
        team.vote(name)
    with pytest.raises(kind), team.step(name):
        raise AssertionError
    team.vote("x" * 1000)


# -- sockets -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "abstract"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return tmp_path if request.param == "folder" else f"@{tmp_path}"


def test_sockets_carry_what_is_sent(place: Any) -> None:
    """Empty, and far more than a socket takes at once, from all to all, for many rounds; no file stays."""
    sizes = [0, 1, 100, 70_000, 1_000_000]

    def content(rank: int, number: int) -> bytes:
        return bytes([rank, number]) * sizes[(rank + number) % len(sizes)]

    def body(_: Team, transport: SocketTransport) -> bool:
        for number in range(5):
            got = transport.exchange(content(transport.rank, number), deadline())
            assert got == [content(rank, number) for rank in range(5)]
        return True

    assert sockets(place, 5, body) == [True] * 5
    if isinstance(place, Path):
        assert list(place.iterdir()) == []


def deadline(seconds: float = LIMIT) -> float:
    return time.monotonic() + seconds


def test_a_socket_that_closes_is_a_death(tmp_path: Path) -> None:
    """What it has sent before is heard; there is no waiting for more."""

    def body(team: Team, transport: SocketTransport) -> Any:
        if team.rank == 1:
            transport.exchange(b"last words", deadline())
            return None
        return [transport.exchange(b"%d %d" % (team.rank, number), deadline()) for number in range(3)]

    results = sockets(tmp_path, 3, body)
    for rank in (0, 2):
        assert results[rank] == [
            [b"0 0", b"last words", b"2 0"],
            [b"0 1", None, b"2 1"],
            [b"0 2", None, b"2 2"],
        ]


def test_a_socket_that_closes_with_unread_data(tmp_path: Path) -> None:
    """The kernel says so with an error in place of the end; the last words come first, more than are read at once."""
    sent = threading.Event()
    words = b"w" * 100_000

    def body(team: Team, transport: SocketTransport) -> Any:
        if team.rank == 1:
            assert sent.wait(LIMIT)
            frame = struct.pack("<QI", 1, len(words)) + words
            assert transport._peers[0].socket.send(frame) == len(frame)
            transport.close()
            closed.set()
            return None
        first = transport._peers[1]
        first.socket.send(b"never read")
        sent.set()
        assert closed.wait(LIMIT)
        return [transport.exchange(b"a" * 3_000_000, deadline()), transport.exchange(b"b", deadline())]

    closed = threading.Event()
    results = sockets(tmp_path, 2, body)
    assert results[0] == [[b"a" * 3_000_000, words], [b"b", None]]


def test_a_late_rank_is_waited_for(tmp_path: Path) -> None:
    """Also when the others have given the first round up; what comes too late for one is no answer of the next."""
    given_up = threading.Barrier(3)

    def body(team: Team, transport: SocketTransport) -> list[Any]:
        exchange, rounds = transport.exchange, itertools.count(1)

        def watched(payload: bytes, until: float) -> list[bytes | None]:
            if team.rank != 1 and next(rounds) == 2:
                given_up.wait(LIMIT)
            return exchange(payload, until)

        transport.exchange = watched  # type: ignore[assignment, method-assign]
        if team.rank == 1:
            given_up.wait(LIMIT)
        return [team._do("first", lambda: team.rank), team._do("second", lambda: 10 + team.rank)]

    assert sockets(tmp_path, 3, body, timeout=4.0) == [[[0, 1, 2], [10, 11, 12]]] * 3


def test_what_comes_too_late_is_dropped(tmp_path: Path) -> None:
    """It is no answer in the round after."""
    given_up, late = threading.Event(), threading.Event()

    def body(_: Team, transport: SocketTransport) -> list[list[bytes | None]]:
        if transport.rank == 0:
            first = transport.exchange(b"a1", deadline(0))
            given_up.set()
            assert late.wait(LIMIT)
            return [first, transport.exchange(b"a2", deadline())]
        assert given_up.wait(LIMIT)
        first = transport.exchange(b"b1", deadline())
        late.set()
        return [first, transport.exchange(b"b2", deadline())]

    assert sockets(tmp_path, 2, body) == [[[b"a1", None], [b"a2", b"b2"]], [[b"a1", b"b1"], [b"a2", b"b2"]]]


@pytest.mark.parametrize(
    "junk",
    [
        struct.pack("<QI", 1, (1 << 26) + 1),
        b"".join(struct.pack("<QI", number, 0) for number in range(5, 40)),
    ],
    ids=["too long", "too far ahead"],
)
def test_more_than_a_rank_says(tmp_path: Path, junk: bytes) -> None:
    """The others go on without it at once, not at the time-out."""
    spoken, over = threading.Barrier(3), threading.Barrier(3)

    def body(team: Team, transport: SocketTransport) -> None:
        if team.rank == 1:
            for peer in transport._peers.values():
                peer.socket.send(junk)
        spoken.wait(LIMIT)
        try:
            if team.rank != 1:
                team.vote("bind")
        finally:
            over.wait(LIMIT / 2)

    results = sockets(tmp_path, 3, body)
    assert same([results[0], results[2]], gi.PeerError).rank == 1


def test_a_payload_that_no_peer_takes(tmp_path: Path) -> None:
    """Its sender says so, before anything is sent."""

    def body(_: Team, transport: SocketTransport) -> Any:
        if transport.rank == 0:
            with pytest.raises(gi.InvalidArgumentError, match=r"payload: expected .* or fewer, got 67108865"):
                transport.exchange(bytes((1 << 26) + 1), deadline())
        return transport.exchange(b"%d" % transport.rank, deadline())

    assert sockets(tmp_path, 2, body) == [[b"0", b"1"]] * 2


def test_a_rank_that_does_not_come(place: Any) -> None:
    with pytest.raises(gi.PeerError, match="rank 1 did not come to"):
        SocketTransport(place, 0, 2, timeout=0.1)
    with pytest.raises(gi.PeerError, match="ranks 0 and 1 did not come to"):
        SocketTransport(place, 2, 3, timeout=0.1)
    if isinstance(place, Path):
        assert list(place.iterdir()) == []


@contextlib.contextmanager
def filled(name: str) -> Iterator[None]:
    """The queue of a listener who accepts nobody is full."""
    with contextlib.ExitStack() as scope:
        while True:
            one = scope.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            one.setblocking(False)
            if one.connect_ex(name) == errno.EAGAIN:
                break
        yield


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """Whatever is in the folder; also under the socket's own name."""
    (tmp_path / "rank-0").write_text("a checkpoint")
    file = tmp_path / ".gpuinterop-rank-0"
    file.write_text("another")
    with pytest.raises(
        gi.InvalidArgumentError, match=r"expected a free path, or the socket of a rank, got .*, another file"
    ):
        SocketTransport(tmp_path, 0, 2, timeout=0.1)
    assert sorted(one.read_text() for one in tmp_path.iterdir()) == ["a checkpoint", "another"]


def test_a_place_is_taken_over_by_one_at_a_time(tmp_path: Path) -> None:
    """Else one that has just been taken over looks like a dead rank's, between its bind and its listen."""
    file = tmp_path / ".gpuinterop-rank-0"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(file))
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        for size in (1, 2):
            with pytest.raises(gi.PeerError, match="another process has kept the lock of the folder"):
                SocketTransport(tmp_path, 0, size, timeout=0.1)
        assert file.is_socket()
    finally:
        os.close(folder)
    assert sockets(tmp_path, 2, lambda team, _: team.vote("x")) == [None, None]


def _knock(place: Any, tmp_path: Path) -> socket.socket:
    """A connection to rank 0, as soon as it listens."""
    until = deadline()
    name = str(tmp_path / ".gpuinterop-rank-0") if isinstance(place, Path) else f"\0gpuinterop-exchange/{tmp_path}/0"
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(name)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            assert deadline(0) < until
            os.sched_yield()


HELLO = struct.Struct("<4sHII16s16s")
"""Magic, version, rank, size, the job, and the token of rank 0."""
NO_JOB = hashlib.sha256(b"").digest()[:16]


def test_two_that_say_that_they_are_the_same_rank(tmp_path: Path) -> None:
    hello = HELLO.pack(b"GIPX", 2, 1, 3, NO_JOB, bytes(16))

    def twice() -> None:
        with _knock(None, tmp_path) as one, _knock(None, tmp_path) as other:
            for connection in (one, other):
                connection.sendall(hello)
            over.wait(LIMIT)

    over = threading.Event()
    with beside(twice):
        with pytest.raises(gi.PeerError, match="two processes say that they are rank 1"):
            SocketTransport(f"@{tmp_path}", 0, 3, timeout=5)
        over.set()


def test_a_place_that_is_taken(place: Any, tmp_path: Path) -> None:
    """By a rank that lives: refused, and it is left alone. By one that was killed: taken over."""
    name = (
        f"\0gpuinterop-exchange/{tmp_path}/0" if not isinstance(place, Path) else str(tmp_path / ".gpuinterop-rank-0")
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(name)
        other.listen(1)
        with pytest.raises(gi.InvalidArgumentError, match="another process is rank 0"):
            SocketTransport(place, 0, 2, timeout=0.1)
        if isinstance(place, Path):
            assert (tmp_path / ".gpuinterop-rank-0").exists()
            with filled(name), pytest.raises(gi.InvalidArgumentError, match="another process is rank 0"):
                SocketTransport(place, 0, 2, timeout=0.1)  # it hangs, so its queue is full: it lives all the same
    assert sockets(place, 2, lambda team, _: team.vote("x")) == [None, None]


def test_another_job_is_refused_by_name(place: Any, tmp_path: Path) -> None:
    """On the side that has come; the other waits on for its own ranks, also after one that said nothing."""
    first: list[Any] = []
    thread = threading.Thread(
        target=lambda: first.append(SocketTransport(place, 0, 2, timeout=LIMIT, job="a")), daemon=True
    )
    thread.start()
    _knock(place, tmp_path).close()
    for job in ("", "b", "\udc80"):
        with pytest.raises(gi.PeerError, match=r"rank 0 at .* is of another job than this rank"):
            SocketTransport(place, 1, 2, timeout=LIMIT, job=job)
    with SocketTransport(place, 1, 2, timeout=LIMIT, job="a") as second:
        thread.join(LIMIT)
        assert second.exchange(b"x", deadline(0)) == [None, b"x"]
        first[0].close()


def test_a_path_is_one_teams_until_it_is_closed(place: Any) -> None:
    """Another's ranks are refused by name, though all of the first have come."""

    def body(team: Team, _: SocketTransport) -> None:
        team.vote("there")
        with pytest.raises(gi.InvalidArgumentError, match=f"another process is rank {team.rank} at this path already"):
            SocketTransport(place, team.rank, 2, timeout=LIMIT)
        team.vote("refused")

    for _ in range(2):
        assert sockets(place, 2, body) == [None, None]


def test_a_rank_may_come_again_before_the_others_have_closed(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits at the old rank 0, which says nothing, and then for the new one."""
    listeners: dict[int, socket.socket] = {}
    real = transports._listen

    @contextlib.contextmanager
    def listen(path: str, rank: int, size: int, deadline: float) -> Iterator[socket.socket]:
        with real(path, rank, size, deadline) as listener:
            listeners.setdefault(rank, listener)
            yield listener

    monkeypatch.setattr(transports, "_listen", listen)

    def body(_: Team, transport: SocketTransport) -> list[bytes | None]:
        if transport.rank == 0:
            assert select.select([listeners[0]], [], [], LIMIT)[0] == [listeners[0]]
        transport.close()
        with SocketTransport(place, transport.rank, 2, timeout=LIMIT) as again:
            return again.exchange(b"%d" % again.rank, deadline())

    assert sockets(place, 2, body) == [[b"0", b"1"]] * 2


def test_a_rank_0_of_another_version(tmp_path: Path) -> None:
    """Or one that is none, or of another size: refused by who has come to it."""
    for answer, match in (
        (HELLO.pack(b"GIPX", 3, 0, 2, NO_JOB, bytes(16)), "version 3 of the exchange, and this one 2"),
        (HELLO.pack(b"GIPX", 2, 0, 3, NO_JOB, bytes(16)), "rank 0 of 3; this is 1 of 2"),
        (HELLO.pack(b"GIPX", 2, 1, 2, NO_JOB, bytes(16)), "rank 1 of 2; this is 1 of 2"),
        (b"HTTP/1.1 400 Bad Request\r\n", "not the hello of a gpuinterop team's rank"),
        (b"", "rank 0 did not come"),
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0gpuinterop-exchange/{tmp_path}/0")
            listener.listen(1)

            def serve(listener: socket.socket = listener, answer: bytes = answer) -> None:
                with listener.accept()[0] as connection:
                    connection.recv(100)
                    connection.sendall(answer)

            with beside(serve), pytest.raises(gi.PeerError, match=match):
                SocketTransport(f"@{tmp_path}", 1, 2, timeout=LIMIT if "come" not in match else 0.3)


def test_arguments_of_sockets(tmp_path: Path) -> None:
    with pytest.raises(gi.InvalidArgumentError, match=r"path: expected one for a socket, got .*: No such file"):
        SocketTransport(tmp_path / "missing", 0, 2, timeout=0.1)
    with pytest.raises(gi.InvalidArgumentError, match=r"path: expected one for a socket, got"):
        SocketTransport(tmp_path / ("x" * 200), 0, 2, timeout=0.1)
    with pytest.raises(gi.ArgumentTypeError, match="job: expected a str, got int"):
        SocketTransport(tmp_path, 0, 2, job=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hello", "match"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", "not the hello of a gpuinterop team's rank"),
        (HELLO.pack(b"GIPX", 9, 1, 2, NO_JOB, bytes(16)), "version 9 of the exchange, and this one 2"),
        (HELLO.pack(b"GIPX", 2, 1, 3, NO_JOB, bytes(16)), "rank 1 of 3; this is 0 of 2"),
        (HELLO.pack(b"GIPX", 2, 0, 2, NO_JOB, bytes(16)), "rank 0 of 2; this is 0 of 2"),
    ],
)
def test_what_is_no_rank_is_not_let_in(tmp_path: Path, hello: bytes, match: str) -> None:
    def stranger() -> None:
        with _knock(None, tmp_path) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(hello)
            connection.recv(100)  # a rank waits for an answer

    with beside(stranger), pytest.raises(gi.PeerError, match=match):
        SocketTransport(f"@{tmp_path}", 0, 2, timeout=LIMIT)


def test_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side's user is asked of the kernel; a stranger is not let in, nor connected to."""
    user = os.geteuid()
    here, there = socket.socketpair()
    with here, there:
        assert delivery.is_our_user(here)
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert not delivery.is_our_user(here)
    results = run(2, lambda rank: SocketTransport(tmp_path, rank, 2, timeout=0.3))
    assert "rank 1 did not come" in str(results[0])
    assert "another user" in str(results[1])
    with (
        delivery.Inbox() as inbox,
        gi.VmmFd.adopt(os.memfd_create("x")) as handle,
        pytest.raises(gi.PeerError, match="rank 1 is a process of another user"),
    ):
        delivery.post(handle, inbox.name, 0, 1, deadline())


# -- handles -----------------------------------------------------------------------------------------------------------


def memfd(kind: type[Any] = gi.VmmFd, text: str = "") -> Any:
    handle = kind.adopt(os.memfd_create("shared"))
    os.write(handle.fd, text.encode())
    return handle


def content(handle: Any) -> str:
    with handle:
        return os.pread(handle.fd, 100, 0).decode()


@pytest.mark.parametrize("root", range(3))
@pytest.mark.parametrize("kind", [gi.VmmFd, gi.OpaqueFd])
def test_one_handle_for_all(root: int, kind: type[Any]) -> None:
    def body(team: Team) -> str:
        if team.rank != root:
            return content(team.share_handle(None, root, expect=kind))
        with memfd(kind, "the root's") as mine:
            shared = team.share_handle(mine, root, expect=kind)
            assert not mine.closed
            assert shared.fd != mine.fd
            return content(shared)

    assert teams(Grid(3), body) == ["the root's"] * 3


def test_the_handles_of_all() -> None:
    def body(team: Team) -> list[str]:
        with memfd(text=f"of {team.rank}") as mine:
            handles = team.gather_handles(mine)
        assert all(type(handle) is gi.VmmFd and handle.owned for handle in handles)
        return [content(handle) for handle in handles]

    assert teams(Grid(4), body) == [["of 0", "of 1", "of 2", "of 3"]] * 4


def test_fabric_handles_need_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one host: their bytes are all there is."""
    monkeypatch.setattr("gpuinterop.exchange.team.host", lambda: threading.current_thread().name)
    monkeypatch.setattr("gpuinterop.exchange.team.Inbox", None)

    def body(team: Team) -> list[bytes]:
        mine = gi.FabricHandle(bytes([team.rank]) * 64)
        shared = team.share_handle(mine if team.rank == 1 else None, 1, expect=gi.FabricHandle)
        return [shared.data[:1], *(handle.data[:1] for handle in team.gather_handles(mine))]

    assert teams(Grid(3), body) == [[b"\1", b"\0", b"\1", b"\2"]] * 3


def test_descriptors_stay_on_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(["a", "b", "b"])
    lock = threading.Lock()

    def elsewhere() -> str:
        with lock:
            return next(hosts)

    monkeypatch.setattr("gpuinterop.exchange.team.host", elsewhere)

    def body(team: Team) -> None:
        with memfd() as mine:
            team.gather_handles(mine)

    error = same(teams(Grid(3), body), gi.HandleError)
    assert "FabricHandle does" in str(error)
    assert "a (rank " in str(error)


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        (
            lambda rank: (None, 0, gi.VmmFd),
            gi.InvalidArgumentError,
            "rank 0, step 'share_handle: arguments': handle: expected one from the root, rank 0, alone",
        ),
        (lambda rank: ("own", 0, gi.VmmFd), gi.InvalidArgumentError, "rank 1, step .* alone, got <VmmFd"),
        (
            lambda rank: ("own" if rank == 0 else None, 0, gi.OpaqueFd),
            gi.ArgumentTypeError,
            "rank 0.*expected OpaqueFd, got VmmFd",
        ),
        (lambda rank: ("own" if rank == 0 else None, 0, gi.OpaqueWin32), gi.ArgumentTypeError, "OpaqueWin32 cannot be"),
        (lambda rank: ("own" if rank == 0 else None, 7, gi.VmmFd), gi.InvalidArgumentError, "root: expected 0 to 1"),
        (
            lambda rank: ("own", rank, gi.VmmFd),
            gi.InvalidArgumentError,
            r"same roots from all ranks, got 0 \(rank 0\), 1 \(rank 1\)",
        ),
        (
            lambda rank: (None, 0, gi.OpaqueFd) if rank else ("own", 0, gi.VmmFd),
            gi.InvalidArgumentError,
            r"same types from all ranks, got vmm_fd \(rank 0\), opaque_fd \(rank 1\)",
        ),
    ],
)
def test_arguments_of_handles(arguments: Callable[[int], Any], kind: type[Exception], match: str) -> None:
    """One rank's mistake is everybody's error, and nobody waits for a handle."""

    def body(team: Team) -> None:
        given, root, expect = arguments(team.rank)
        with memfd() as mine:
            team.share_handle(mine if given else None, root, expect=expect)

    error = same(teams(Grid(2), body), kind)
    assert re.search(match, str(error)), error


def test_a_failed_send_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(team: Team) -> None:
        with memfd() as mine:
            if team.rank == 1:
                mine.close()
            team.gather_handles(mine)

    error = same(teams(Grid(3), body), gi.HandleError)
    assert error.rank == 1
    assert "is closed" in str(error)


# -- an inbox ----------------------------------------------------------------------------------------------------------


def test_an_inbox_takes_nothing_of_another_user(scope: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it does not look for ever where another user keeps coming."""
    user = os.geteuid()
    with delivery.Inbox() as inbox, memfd() as handle:

        class Listener:
            looks = 0

            def accept(self) -> Any:
                self.looks += 1
                assert self.looks <= 2 * socket.SOMAXCONN
                monkeypatch.undo()
                delivery.post(handle, inbox.name, 2, 0, deadline())
                monkeypatch.setattr(os, "geteuid", lambda: user + 1)
                return real.accept()

        real = inbox._listener
        inbox._listener = Listener()  # type: ignore[assignment]
        with pytest.raises(gi.PeerError, match="rank 2 left no handle"):
            inbox.take([2], gi.VmmFd, scope)
        inbox._listener = real


def test_an_inbox_without_what_was_said() -> None:
    with contextlib.ExitStack() as scope, delivery.Inbox() as inbox, memfd() as handle:
        delivery.post(handle, inbox.name, 2, 0, deadline())
        with pytest.raises(gi.PeerError, match="rank 3 left no handle"):
            inbox.take([2, 3], gi.VmmFd, scope)
        delivery.post(handle, inbox.name, 2, 0, deadline())
        with pytest.raises(gi.PeerError, match="expected OpaqueFd, the peer sent VmmFd"):
            inbox.take([2], gi.OpaqueFd, scope)


def test_importing_it_imports_nothing_else() -> None:
    """The transports' libraries come with the transports."""
    program = "import sys, gpuinterop.exchange; print({'torch', 'mpi4py', 'numpy'} & set(sys.modules))"
    assert printed("-c", program) == "set()\n"


# -- multicast, on a backend that notes what it is asked ---------------------------------------------------------------

STEP = FakeMulticast.GROUPS.minimum
SIZE = 4 * STEP
Cast = Callable[[Team, gi.Device, FakeMulticast, contextlib.ExitStack], Any]


def casting(body: Cast, size: int = 3, *timeouts: float) -> list[tuple[Any, FakeMulticast]]:
    """Ranks that each have a backend and a device of their own; what came of it, and what is left in the backend."""
    found: dict[int, FakeMulticast] = {}

    def rank_body(team: Team) -> Any:
        devices, found[team.rank] = fake_team()
        with contextlib.ExitStack() as own:
            return body(team, devices[team.rank], found[team.rank], own)

    results = teams(Grid(size), rank_body, *timeouts)
    return [(result, found[rank]) for rank, result in enumerate(results)]


def refused(outcome: list[tuple[Any, FakeMulticast]], kind: type[Exception], *unmade: str) -> Any:
    """The one error of all; the driver was not asked for what would have blocked."""
    for result, backend in outcome:
        if not isinstance(result, kind):
            raise result
        assert not {call[0] for call in backend.calls} & set(unmade)
    return same([result for result, _ in outcome], kind)


def test_a_life_of_all() -> None:
    def body(team: Team, device: gi.Device, _: FakeMulticast, own: contextlib.ExitStack) -> Any:
        allocation = own.enter_context(device.allocate(SIZE))
        multicast = own.enter_context(team.create_multicast(device, SIZE))
        with team.bind_memory(multicast, allocation, STEP, size=STEP) as bound:
            assert (bound.offset, bound.size) == (STEP, STEP)
        with team.bind_address(multicast, device, allocation.buffer, SIZE) as bound, team.map(multicast) as mapped:
            return bound.memory is allocation.buffer, mapped.size

    for rank, (result, backend) in enumerate(casting(body)):
        assert result == (True, SIZE)
        calls = [call for call in backend.calls if call[0].startswith("bind")]
        assert [(call[0], call[2], call[3], call[-1]) for call in calls] == [
            ("bind_memory", rank, STEP, STEP),
            ("bind_address", rank, 0, SIZE),
        ]
        assert not backend.live


@pytest.mark.parametrize(
    ("given", "argument", "match"),
    [
        (
            lambda rank, device: (device, SIZE + STEP * (rank == 2)),
            "size",
            "same sizes from all ranks, got 32768 .*, 40960 .rank 2",
        ),
        (
            lambda rank, device: (device, SIZE, gi.FabricHandle if rank else gi.VmmFd),
            "handle_type",
            r"same types from all ranks, got vmm_fd \(rank 0\), fabric",
        ),
        (
            lambda rank, device: (fake_team()[0][0], SIZE),
            "device",
            "expected another device from each rank, got 0{32} .ranks 0, 1",
        ),
        (lambda rank, device: (None if rank == 1 else device, SIZE), "device", "rank 1, step .*expected a Device"),
        (lambda rank, device: (device, SIZE, gi.OpaqueWin32), "handle_type", "OpaqueWin32 cannot be sent"),
    ],
)
def test_arguments_of_a_multicast_object(given: Callable[..., Any], argument: str, match: str) -> None:
    def body(team: Team, device: gi.Device, *_: Any) -> None:
        team.create_multicast(*given(team.rank, device))

    outcome = casting(body)
    error = refused(outcome, outcome[0][0].__class__, "create_multicast", "import_multicast", "add_device")
    assert isinstance(error, gi.InvalidArgumentError)
    assert error.argument == argument
    assert re.search(match, str(error)), error


def test_arguments_of_gathering() -> None:
    """An error names what was given."""
    for call, argument in (
        (lambda team: team.gather_handles(7), "handle"),
        (lambda team: team.share_handle(7, expect=int), "expect"),
        (lambda team: team.share_handle(None, "x", expect=gi.VmmFd), "root"),
        (lambda team: team.gather_allocations(None), "allocation"),
        (lambda team: team.map(None), "multicast"),
    ):
        assert same(teams(Grid(2), call), gi.ArgumentTypeError).argument == argument


USES: dict[str, Callable[..., Any]] = {
    "bind_memory": lambda team, multicast, allocation: team.bind_memory(multicast, allocation),
    "bind_address": lambda team, multicast, allocation: team.bind_address(
        multicast, allocation.device, allocation.buffer, SIZE
    ),
    "map": lambda team, multicast, allocation: team.map(multicast),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("missing", r"expected all 3 devices .* to be added, .* got 1 \(ranks 0 and 1\), 0 \(rank 2\)"),
        ("closed", r"rank 2, step '.*: ready': .* is closed"),
        ("size", r"same sizes of their objects from all ranks, got 32768 \(ranks 0 and 1\), 65536 \(rank 2\)"),
        ("count", r"same numbers of devices in their objects from all ranks, got 3 \(ranks 0 and 1\), 4 \(rank 2\)"),
    ],
)
def test_nobody_goes_into_a_driver_that_would_block(use: str, case: str, match: str) -> None:
    """All find out first that one's object is closed or another's, or that one has not added its device."""

    def body(team: Team, device: gi.Device, backend: FakeMulticast, own: contextlib.ExitStack) -> None:
        odd = team.rank == 2
        size = SIZE * 2 if odd and case == "size" else SIZE
        count = 4 if odd and case == "count" else 3
        allocation = own.enter_context(device.allocate(SIZE))
        assert allocation.buffer.size == SIZE
        backend.calls.clear()
        multicast = own.enter_context(gi.create_multicast(count, size, gi.VmmFd, device=device))
        if not (odd and case == "missing"):
            multicast.add_device(device)
        if odd and case == "closed":
            multicast.close()
        USES[use](team, multicast, allocation)

    kind = gi.ResourceClosedError if case == "closed" else gi.InvalidArgumentError
    error = refused(casting(body), kind, "bind_memory", "bind_address", "map_allocation")
    assert re.search(match, str(error)), error


@pytest.mark.parametrize(
    ("bytes_bound", "argument", "match"),
    [
        (
            lambda rank: (STEP * (rank % 2), STEP),
            "offset",
            r"same offsets from all ranks, got 0 \(ranks 0 and 2\), 8192 \(rank 1\)",
        ),
        (lambda rank: (0, STEP * (1 + rank)), "size", "same sizes from all ranks, got 8192"),
    ],
)
def test_all_bind_the_same_bytes(bytes_bound: Callable[[int], Any], argument: str, match: str) -> None:
    def body(team: Team, device: gi.Device, backend: FakeMulticast, own: contextlib.ExitStack) -> None:
        allocation = own.enter_context(device.allocate(SIZE))
        multicast = own.enter_context(team.create_multicast(device, SIZE))
        offset, size = bytes_bound(team.rank)
        try:
            team.bind_memory(multicast, allocation, offset, size=size)
        finally:
            assert multicast.bindings == ()
            assert [call[0] for call in backend.calls if "bind" in call[0]] == ["bind_memory", "unbind"]

    error = refused(casting(body), gi.InvalidArgumentError)
    assert error.argument == argument
    assert re.search(match, str(error)), error


def not_ready() -> None:
    raise gi.DriverError("cuMulticastBindMem", 802, "CUDA_ERROR_SYSTEM_NOT_READY")


def test_an_unbind_waits_for_pending_work() -> None:
    """Rank 1's driver is not ready at first; rank 0 has work pending, which holds its unbind up for a while."""

    def body(team: Team, device: gi.Device, backend: FakeMulticast, own: contextlib.ExitStack) -> list[str]:
        allocation = own.enter_context(device.allocate(SIZE))
        multicast = own.enter_context(team.create_multicast(device, SIZE))
        if team.rank == 1:

            def once() -> None:
                del backend.on["bind_memory"]
                not_ready()

            backend.on["bind_memory"] = once
        else:
            pending(device, backend, own)
            looks = itertools.count()
            backend.on_is_done = lambda: backend.blocked.clear() if next(looks) == 50 else None
        with team.bind_memory(multicast, allocation):
            return [call[0] for call in backend.calls if "bind" in call[0]]

    assert [result for result, _ in casting(body, 2)] == [
        ["bind_memory", "unbind", "bind_memory"],
        ["bind_memory", "bind_memory"],
    ]


def pending(device: gi.Device, backend: FakeMulticast, own: contextlib.ExitStack) -> None:
    """Work on the device that is not done."""
    stream = own.enter_context(device.create_stream())
    backend.blocked.add(stream.ptr)
    own.callback(backend.blocked.clear)


def test_an_unbind_that_does_not_end_is_everybodys() -> None:
    def body(team: Team, device: gi.Device, backend: FakeMulticast, own: contextlib.ExitStack) -> None:
        allocation = own.enter_context(device.allocate(SIZE))
        multicast = own.enter_context(team.create_multicast(device, SIZE))
        if team.rank == 1:
            backend.on["bind_memory"] = not_ready
        else:
            pending(device, backend, own)
        team.bind_memory(multicast, allocation)

    error = same([result for result, _ in casting(body, 2, 1.0)], gi.ResourceBusyError)
    assert (error.rank, error.step) == (0, "bind_memory: unbind")


def test_what_was_mapped_is_unmapped_when_another_rank_fails() -> None:
    def body(team: Team, device: gi.Device, backend: FakeMulticast, own: contextlib.ExitStack) -> None:
        multicast = own.enter_context(team.create_multicast(device, SIZE))
        if team.rank == 1:
            backend.on["map_allocation"] = not_ready
        try:
            team.map(multicast)
        finally:
            assert {kind for kind, _ in backend.live} == {"group"}

    assert refused(casting(body), gi.DriverError).step == "map"


@pytest.mark.parametrize("round_of_death", range(1, 25))
@pytest.mark.parametrize("call", ["create_multicast", "gather_allocations"])
def test_no_descriptor_outlives_a_call_that_fails(call: str, round_of_death: int) -> None:
    """The error is still held when it is looked; what the collector would close does not count."""

    def body(team: Team) -> Any:
        devices, backend = fake_team()
        device = devices[team.rank]
        with device.allocate(SIZE) as allocation:
            backend.on_import = lambda handle: os.close(handle.fd)
            made: Any = []
            try:
                if call == "create_multicast":
                    made = [team.create_multicast(device, SIZE)]
                else:
                    made = [one for one in team.gather_allocations(allocation) if one is not allocation]
                team.vote("done")
            except gi.PeerError as error:
                there.wait(LIMIT)
                there_are = backend.count("group") + backend.count("allocation")
                return (error, there_are - 1 - len(made), descriptors())
            finally:
                for one in made:
                    one.close()
            return None

    there = threading.Barrier(2)
    before = descriptors()
    deaths = {(round_of_death, 1): set[int]()}
    results = teams(Grid(3, deaths), body)
    if isinstance(results[0], tuple):
        assert [result[1:] for result in (results[0], results[2])] == [(0, before)] * 2


_looking = threading.Lock()


def descriptors() -> set[str]:
    with _looking:  # looking needs one
        return set(os.listdir("/proc/self/fd"))
