"""Two jobs that use one path at the same time: which teams come of it, in every order of their steps.

The ranks are threads of which one runs at a time. At each step of a socket another may go on in its place: an order is
a list of such choices, so each is tried once, and one that fails can be run again. The sockets are the kernel's. Who is
at the other end of one is known by who had the name, not by what the ranks tell each other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.exchange import SocketTransport, transport

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="abstract names"),
    pytest.mark.timeout(300, method="thread"),
]

LIMIT = 30.0
"""Seconds by the ranks' own clock, which goes on when none of them can."""


class Killed(BaseException):
    """A rank's end: nothing of it runs any more but that its sockets are closed."""


@dataclass(eq=False)
class Rank:
    job: str
    rank: int
    dies_at: int | None = None
    """At which of its steps."""
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None
    """When it can go on; None: at any time."""
    steps: int = 0
    outcome: Any = None

    def __repr__(self) -> str:
        return f"{self.job}{self.rank}"


class World:
    """One order of the steps: `choices` says which of those that can go on does, 0 being who went last."""

    def __init__(self, ranks: Sequence[Rank], choices: Sequence[int]) -> None:
        self.ranks = ranks
        self.options: list[int] = []
        """How many could go on at each choice."""
        self.clock = 0.0
        self.changes = 0
        """What a rank may have slept for: names, queues and locks."""
        self.listeners: dict[Any, Rank] = {}
        self.queues: dict[Rank, list[Rank]] = {}
        self._choices = iter(choices)
        self._turn = threading.Semaphore(0)
        self._local = threading.local()

    def run(self, make: Callable[[Rank], SocketTransport]) -> None:
        def work(rank: Rank) -> None:
            self._local.rank = rank
            rank.gate.acquire()
            try:
                rank.outcome = make(rank)
            except BaseException as error:
                rank.outcome = error
            self._turn.release()

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in self.ranks]
        for thread in threads:
            thread.start()
        current = self.ranks[0]
        while going := [rank for rank in self.ranks if rank.outcome is None]:
            able = [rank for rank in going if rank.ready is None or rank.ready()]
            if not able:
                self.clock = LIMIT  # the time-out of all
            if self.clock == LIMIT:
                able = going
            able.sort(key=lambda rank: rank is not current)  # stable: then in the order of the ranks
            self.options.append(len(able))
            assert len(self.options) < 1000, "they go round in circles"
            current = able[next(self._choices, 0)]
            current.ready = None
            current.gate.release()
            self._turn.acquire()
        for thread in threads:
            thread.join()

    @property
    def me(self) -> Rank:
        rank: Rank = self._local.rank
        return rank

    def step(self, ready: Callable[[], bool] | None = None) -> None:
        """Let others go on; and this rank when it is ready, or at the end of all time."""
        rank = self.me
        if rank.dies_at == rank.steps:
            rank.dies_at = None
            raise Killed
        rank.steps += 1
        rank.ready = ready
        self._turn.release()
        rank.gate.acquire()

    def sleep(self, _seconds: float) -> None:
        seen = self.changes
        self.step(lambda: self.changes != seen)


class Socket:
    """A real one, with a step before each call, of which the other end is known."""

    def __init__(self, world: World, real: socket.socket) -> None:
        self.world = world
        self.real = real
        self.real.setblocking(False)
        self.other: Rank | None = None
        self._name: Any = None

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def getsockopt(self, *arguments: Any) -> Any:
        return self.real.getsockopt(*arguments)

    def _changed(self) -> None:
        self.world.changes += 1

    def bind(self, name: Any) -> None:
        self.world.step()
        self.real.bind(name)
        self._name = name
        self._changed()

    def listen(self, size: int) -> None:
        self.world.step()
        self.real.listen(size)
        self.world.listeners[self._name] = self.world.me
        self._changed()

    def connect(self, name: Any) -> None:
        self.world.step()
        self.real.connect(name)
        self.other = self.world.listeners[name]
        self.world.queues.setdefault(self.other, []).append(self.world.me)

    def connect_ex(self, name: Any) -> int:
        try:
            self.connect(name)
        except OSError as error:
            return error.errno or -1
        return 0

    def accept(self) -> tuple[Socket, Any]:
        self._wait()
        real, address = self.real.accept()
        accepted = Socket(self.world, real)
        accepted.other = self.world.queues[self.world.me].pop(0)
        self._changed()
        return accepted, address

    def recv(self, size: int) -> bytes:
        self._wait()
        return self.real.recv(size)

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self.real, select.POLLIN)
        self.world.step(lambda: bool(poller.poll(0)))
        if not poller.poll(0):
            raise TimeoutError

    def sendall(self, data: bytes) -> None:
        self.world.step()
        self.real.sendall(data)

    def close(self) -> None:
        self.real.close()
        if self._name is not None:
            self._changed()

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


def one_order(ranks: list[Rank], choices: Sequence[int], place: Path | None, labels: bool) -> tuple[str, list[int]]:
    """Run it and check what has come of it: the team, if any, and the options that there were."""
    world = World(ranks, choices)
    size = 1 + max(rank.rank for rank in ranks)
    path = f"@test-{os.getpid()}-{next(_serials)}" if place is None else str(place)
    real_alone = transport._alone

    @contextlib.contextmanager
    def alone(*arguments: Any) -> Iterator[None]:
        with real_alone(*arguments):
            yield
        world.changes += 1

    def make(rank: Rank) -> SocketTransport:
        return SocketTransport(path, rank.rank, size, LIMIT, **({"job": rank.job} if labels else {}))

    def new(family: int, kind: int) -> Socket:
        return Socket(world, socket.socket(family, kind))

    with pytest.MonkeyPatch.context() as patch:
        names = {name: getattr(socket, name) for name in ("AF_UNIX", "SOCK_STREAM")}
        patch.setattr(transport, "socket", SimpleNamespace(socket=new, **names))
        patch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: world.clock, sleep=world.sleep))
        patch.setattr(transport, "_alone", alone)
        world.run(make)
        try:
            team = check(ranks, labels)
        finally:
            for rank in ranks:
                if isinstance(rank.outcome, SocketTransport):
                    rank.outcome.close()
    return team, world.options


_serials = itertools.count()


def check(ranks: list[Rank], labels: bool) -> str:
    """One team at the most, the same for all who are in it; every other rank has been told by name."""
    teams: list[dict[int, Rank]] = []
    for rank in ranks:
        if isinstance(rank.outcome, SocketTransport):
            others: dict[int, Any] = {number: peer.socket for number, peer in rank.outcome._peers.items()}
            teams.append({rank.rank: rank, **{number: end.other for number, end in others.items()}})
        elif not isinstance(rank.outcome, Killed):
            assert isinstance(rank.outcome, gi.PeerError | gi.InvalidArgumentError), (rank, rank.outcome)
    if not teams:
        return ""
    assert all(team == teams[0] for team in teams), f"not one team: {teams}"
    assert all(rank.rank == number for number, rank in teams[0].items()), teams
    alone = [rank for rank in teams[0].values() if not isinstance(rank.outcome, SocketTransport | Killed)]
    assert not alone, f"{alone} know nothing of {teams[0]}"
    assert not labels or len({rank.job for rank in teams[0].values()}) == 1, f"of two jobs: {teams}"
    return " ".join(sorted(map(str, teams[0].values())))


def orders(make: Callable[[], list[Rank]], most: int, place: Path | None, labels: bool = False) -> set[str]:
    """The teams that come of all orders in which up to `most` times another goes on than who went last, or is next."""
    found = set()
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        prefix = waiting.pop()
        team, options = one_order(make(), prefix, place, labels)
        found.add(team)
        if sum(map(bool, prefix)) < most:
            for at in range(len(prefix), len(options)):
                rest = (0,) * (at - len(prefix))
                waiting += [(*prefix, *rest, other) for other in range(1, options[at])]
    return found


@pytest.fixture(params=["folder", "abstract"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "folder" else None


def ranks(those: Sequence[tuple[str, int]], dies_at: int | None = None) -> list[Rank]:
    return [Rank(job, rank, dies_at if (job, rank) == ("a", 0) else None) for job, rank in those]


FOUR = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


@pytest.mark.parametrize("labels", [False, True])
def test_two_jobs(place: Path | None, labels: bool) -> None:
    """A team at the most, and none of both jobs where they say which they are of."""
    found: set[str] = set()
    for first in itertools.permutations(FOUR):
        if first[0][0] == "a":  # the others are the same with the jobs exchanged
            found |= orders(partial(ranks, first), 1, place, labels)
    assert found == ({"a0 a1", "b0 b1", ""} if labels else {"a0 a1", "a0 b1", "a1 b0", "b0 b1"})


def test_three_ranks_of_each() -> None:
    """Each of the names goes to one of two, and no connection is between two teams."""
    found: set[str] = set()
    for jobs in ("aaa", "aab", "aba", "abb"):
        others = jobs.translate({ord("a"): "b", ord("b"): "a"})
        six = [(job, rank) for those in (jobs, others) for rank, job in enumerate(those)]
        found |= orders(partial(ranks, six), 1, None, labels=True)
    assert found == {"a0 a1 a2", "b0 b1 b2", ""}


@pytest.mark.parametrize("dies_at", range(14))
def test_a_rank_0_that_is_killed_and_another_job_s(dies_at: int) -> None:
    """A rank that has met the one is in no team with a rank that has met the other."""
    for first in itertools.permutations([("a", 0), ("a", 1), ("a", 2), ("b", 0)]):
        assert orders(partial(ranks, first, dies_at), 0, None) <= {"", "a0 a1 a2", "a1 a2 b0"}
