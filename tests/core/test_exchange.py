"""Ranks that agree, and how they fail: processes over sockets, without a GPU.

What needs a driver is in tests/vendors/cuda/test_exchange.py, as are the other transports.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.exchange import SocketTransport, Team, Transport, delivery
from tests.descriptors import named_fds
from tests.limits import LIMIT
from tests.programs import printed

from .fake import FakeMulticast, fake_team

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract names, memfds")


KILLED = "killed"


class Ranks:
    """Processes that have been forked, one a rank: what each has returned or raised, and that it has left nothing."""

    def __init__(self, size: int, body: Callable[[int], Any]) -> None:
        self._pipes: list[Any] = []
        self.pids = [self._start(rank, body) for rank in range(size)]

    def _start(self, rank: int, body: Callable[[int], Any]) -> int:
        here, there = multiprocessing.Pipe(duplex=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: they hold nothing of ours
            child = os.fork()
        if child:
            there.close()
            self._pipes.append(here)
            return child
        try:
            signal.alarm(int(LIMIT))
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in programs that embed Python
            before = named_fds()
            try:
                result = body(rank)
            except BaseException as error:
                result = error
            there.send((result, named_fds() - before))
        finally:
            os._exit(0)

    def end(self) -> list[Any]:
        results: list[Any] = []
        for pipe, child in zip(self._pipes, self.pids, strict=True):
            with pipe:
                try:
                    result, left = pipe.recv()
                    assert left == set(), "descriptors leaked"
                except EOFError:
                    result = KILLED
            os.waitpid(child, 0)
            results.append(result)
        return results


def teams(size: int, place: Any, body: Callable[[Team], Any], timeout: float = LIMIT, **more: Any) -> list[Any]:
    """What `body` has returned or raised on each rank."""

    def rank_body(rank: int) -> Any:
        with SocketTransport(place, rank, size, timeout=LIMIT, **more) as transport:
            return body(Team(transport, timeout=timeout))

    return Ranks(size, rank_body).end()


def same(errors: list[Any], kind: type[Exception], match: str = "") -> Any:
    """The one error that all of them are."""
    assert {type(error) for error in errors} == {kind}, errors
    assert len({str(error) for error in errors}) == 1, errors
    assert all(vars(error) == vars(errors[0]) for error in errors)
    assert re.search(match, str(errors[0])), errors[0]
    return errors[0]


@pytest.fixture(params=["folder", "abstract"])
def each_place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return tmp_path if request.param == "folder" else f"@{tmp_path}"


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"@{tmp_path}"


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


class Derived(gi.HandleError):
    pass


ERRORS: list[tuple[Exception, type[gi.GpuInteropError], str]] = [
    (error, type(error), str(error))
    for error in (
        gi.DriverError("cuMulticastBindMem", 47, "CUDA_ERROR_MULTICAST_RESOURCE_FULL", "no room"),
        gi.OutOfMemoryError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY"),
        gi.InvalidArgumentError("size", "does not fit."),
        gi.BackendUnavailableError("no driver.", fix="Install one.", absent=True),
        gi.UnsupportedError(CAPABILITY, context="a device"),
        gi.PeerError("left no handle \u2014 \ud800."),
    )
] + [
    (KeyError("lost"), gi.PeerError, "KeyError: 'lost'"),
    (Derived("derived"), gi.HandleError, "derived"),
    (type("HandleError", (Exception,), {})("not ours"), gi.PeerError, "HandleError: not ours"),
    (gi.HandleError("y" * 100_000), gi.HandleError, "y" * 4000),
]


@pytest.mark.parametrize(("error", "kind", "text"), ERRORS, ids=lambda one: getattr(one, "__name__", None))
def test_the_error_of_one_is_everybodys(place: str, error: Exception, kind: type[Any], text: str) -> None:
    """Class, attributes and text, with the lowest rank that failed and the step; and again in each later call."""

    def body(team: Team) -> Any:
        with pytest.raises(gi.GpuInteropError) as first, team.step("bind"):
            if team.rank in (1, 2):
                raise error
        for call in (lambda: team.vote("more"), lambda: team.gather_handles(gi.FabricHandle(bytes(64)))):
            with pytest.raises(kind) as later:
                call()
            assert (str(later.value), vars(later.value)) == (str(first.value), vars(first.value))
        assert repr(team) == f"<Team rank {team.rank} of 3, broken>"
        assert (first.value.__cause__ is error) == (team.rank in (1, 2))
        return first.value

    found = same(teams(3, place, body), kind)
    assert str(found) == f"rank 1, step 'bind': {text}"
    expected = vars(error) if isinstance(error, gi.GpuInteropError) else {}
    assert vars(found) == {**expected, "rank": 1, "step": "bind"}


DIFFERENCES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "steps": (
        lambda team: team.vote("map" if team.rank == 2 else "bind"),
        gi.PeerError,
        r"^rank 2, step 'map': the ranks are out of step: bind \(ranks 0 and 1\), map \(rank 2\)",
    ),
    "calls": (
        lambda team: team.gather_handles(gi.FabricHandle(bytes(64))) if team.rank else team.vote("a"),
        gi.PeerError,
        r"out of step: a \(rank 0\), gather_handles: offer \(ranks 1 and 2\)",
    ),
    "an error elsewhere": (
        lambda team: team.vote("b", gi.HandleError("no")) if team.rank else team.vote("a"),
        gi.HandleError,
        "^rank 1, step 'b': no$",
    ),
    "time-outs": (
        lambda team: Team(team._transport, timeout=LIMIT + team.rank % 2).vote("x"),
        gi.InvalidArgumentError,
        r"^step 'x': timeout: expected the same on all ranks, got 300.0 \(ranks 0 and 2\), 301.0 \(rank 1\)\.$",
    ),
    "roots": (
        lambda team: share(team, True, min(team.rank, 1) * 2 or 0, gi.VmmFd) if team.rank != 1 else share(team, False),
        gi.InvalidArgumentError,
        r"root: expected the same on all ranks, got 0 \(ranks 0 and 1\), 2 \(rank 2\)",
    ),
    "types": (
        lambda team: share(team, team.rank == 0, 0, gi.OpaqueFd if team.rank else gi.VmmFd),
        gi.InvalidArgumentError,
        r"handle: expected the same on all ranks, got vmm_fd \(rank 0\), opaque_fd \(ranks 1 and 2\)",
    ),
    "no handle": (
        lambda team: share(team, False),
        gi.InvalidArgumentError,
        "^rank 0.* handle: .* got None on rank 0",
    ),
    "every handle": (lambda team: share(team, True), gi.InvalidArgumentError, "^rank 1.* rank 0, got <VmmFd"),
    "another type": (
        lambda team: share(team, team.rank == 0, 0, gi.OpaqueFd),
        gi.ArgumentTypeError,
        "^rank 0.*expected OpaqueFd, got VmmFd",
    ),
    "no type": (lambda team: share(team, False, 0, gi.OpaqueWin32), gi.ArgumentTypeError, "OpaqueWin32 cannot be"),
    "a root": (lambda team: share(team, False, 7), gi.InvalidArgumentError, "root: expected 0 to 2, got 7"),
    "no handles": (lambda team: team.gather_handles(7), gi.ArgumentTypeError, "handle: int"),
    "a closed handle": (lambda team: gather(team, closed=team.rank == 1), gi.HandleError, "^rank 1.* is closed"),
    "no allocation": (lambda team: team.gather_allocations(None), gi.ArgumentTypeError, "^rank 0.*allocation: "),
    "no object": (lambda team: team.map(None), gi.ArgumentTypeError, "^rank 0.*multicast: "),
    "hosts": (
        lambda team: gather(team, hosts="abb"),
        gi.HandleError,
        r"^step 'gather_handles.* a \(rank 0\), b \(ranks 1 and 2\).*FabricHandle",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_do_not_make_the_same_call(place: str, name: str) -> None:
    """And mistakes of one: everybody's error, at once, which names who gave what."""
    call, kind, match = DIFFERENCES[name]
    same(teams(3, place, call), kind, match)


def memfd(text: str = "", kind: type[Any] = gi.VmmFd) -> Any:
    handle = kind.adopt(os.memfd_create("shared"))
    os.write(handle.fd, text.encode())
    return handle


def share(team: Team, given: bool, root: int = 0, expect: type[Any] = gi.VmmFd) -> None:
    with memfd() as mine:
        team.share_handle(mine if given else None, root, expect=expect)


def gather(team: Team, *, closed: bool = False, hosts: str = "") -> None:
    if hosts:
        delivery.host = lambda: hosts[team.rank]
    with memfd() as mine:
        if closed:
            mine.close()
        team.gather_handles(mine)


def test_a_rank_of_another_version(place: str) -> None:
    def body(team: Team) -> Any:
        if team.rank == 1:
            return team._transport.all_gather(b'{"format": "gpuinterop vote 9"}', LIMIT)
        return team.vote("bind")

    results = teams(3, place, body)
    assert len(results.pop(1)) == 3
    same(results, gi.PeerError, r"^rank 1, step 'bind': expected .*vote 3.*, got b'\{.*vote 9.*; install the same")


def test_ctrl_c_leaves_at_once(place: str) -> None:
    """This rank tells nobody, and cannot come back; the others find it gone."""

    def body(team: Team) -> Any:
        if team.rank != 1:
            return team.vote("work")
        with pytest.raises(KeyboardInterrupt), team.step("work"):
            raise KeyboardInterrupt
        with pytest.raises(gi.PeerError, match=r"rank 1, step 'work': .*left"):
            team.vote("more")
        return "left"

    results = teams(3, place, body)
    assert results.pop(1) == "left"
    same(results, gi.PeerError, "^step 'work': rank 1: gone, or no answer")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"transport": object()}, "transport: expected a"),
        *(({"timeout": timeout}, "timeout: expected") for timeout in (0, -1.0, float("inf"), 1e7, None, "x", True)),
    ],
)
def test_arguments(place: str, arguments: dict[str, Any], match: str) -> None:
    with SocketTransport(place, 0, 1) as transport:
        with pytest.raises(gi.InvalidArgumentError, match=match):
            Team(**{"transport": transport, **arguments})
        for name, kind in ((7, gi.ArgumentTypeError), ("x" * 1001, gi.InvalidArgumentError)):
            team = Team(transport)
            with pytest.raises(kind):
                team.vote(name)  # type: ignore[arg-type]
            team.vote("x" * 1000)  # nobody was told
        transport.rank = 2
        with pytest.raises(gi.InvalidArgumentError, match="rank 2 of 1"):
            Team(transport)


def test_a_transport_of_ones_own() -> None:
    """Its error is the step's, and it is not used again."""

    class Lost(Transport):
        rank, size = 0, 2

        def all_gather(self, payload: bytes, timeout: float) -> list[bytes]:
            raise gi.PeerError("the line is cut.")

    team = Team(Lost())
    for _ in range(2):
        with pytest.raises(gi.PeerError, match=r"^step 'x': the line is cut\.$") as caught:
            team.vote("x")
        assert vars(caught.value) == {"rank": None, "step": "x"}


def test_importing_it_imports_nothing_else() -> None:
    """The transports' libraries come with the transports."""
    program = "import sys, gpuinterop.exchange; print({'torch', 'mpi4py', 'numpy'} & set(sys.modules))"
    assert printed("-c", program) == "set()\n"


# -- deaths ------------------------------------------------------------------------------------------------------------


def life(team: Team) -> str:
    """All-gathers of every kind: one, and two of each call."""
    team.vote("first")
    with memfd() as mine:
        team.share_handle(mine if team.rank == 1 else None, 1, expect=gi.VmmFd).close()
        for handle in team.gather_handles(mine):
            handle.close()
    return "all went well"


GATHERS = 5


def dying(team: Team, number: int, when: str) -> None:
    """Let this rank kill itself before or after one all-gather, or within it: when it has said its part."""
    numbers = itertools.count(1)
    transport: Any = team._transport
    gathered = transport.all_gather

    def all_gather(payload: bytes, timeout: float) -> Any:
        if next(numbers) != number:
            return gathered(payload, timeout)
        if when == "within":
            for link in transport._links.values() if team.rank else ():
                link.send((time.monotonic() + LIMIT, payload))
            for link in list(transport._links.values())[:1] if not team.rank else ():  # one has all, the others nothing
                link.send([link.recv()[1]] * team.size)
        elif when == "after":
            gathered(payload, timeout)
        os.kill(os.getpid(), signal.SIGKILL)

    transport.all_gather = all_gather


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("number", range(1, GATHERS + 1))
@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_death_at_every_point(place: str, when: str, number: int, victim: int) -> None:
    """The survivors find it at once; each raises an error that names the rank, or has ended; nothing is left."""

    def body(team: Team) -> str:
        if team.rank == victim:
            dying(team, number, when)
        return life(team)

    results = teams(3, place, body, timeout=2 * LIMIT)  # else the alarm ends a rank that waits
    assert results.pop(victim) == KILLED
    if number == GATHERS and when != "before":
        results = [one for one in results if one != "all went well"]
    if results and (when, victim) != ("within", 0):
        same(results, gi.PeerError, f"^step .*: rank {victim}(: gone, or no answer within 600 s| gives no handle: )")
    for error in results:
        assert isinstance(error, gi.PeerError)
        assert error.rank == victim  # type: ignore[attr-defined]


@pytest.mark.parametrize("victim", range(3))
def test_a_rank_that_hangs_and_then_comes(place: str, victim: int) -> None:
    """It is named by all when their time is up, and raises the same when it goes on."""

    def body(transport: SocketTransport) -> None:
        Team(transport, timeout=LIMIT).vote("first")
        if transport.rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            Team(transport, timeout=4.0).vote("second")
        finally:
            if transport.rank != victim:
                over.release()
                woken.acquire()  # the late one finds the others alive

    over, woken = (multiprocessing.get_context("fork").Semaphore(0) for _ in range(2))

    def rank_body(rank: int) -> None:
        with SocketTransport(place, rank, 3, timeout=LIMIT) as transport:
            body(transport)

    ranks = Ranks(3, rank_body)
    assert over.acquire(timeout=LIMIT)
    assert over.acquire(timeout=LIMIT)
    os.kill(ranks.pids[victim], signal.SIGCONT)
    woken.release()
    woken.release()
    same(ranks.end(), gi.PeerError, f"^step 'second': rank {victim}: gone, or no answer within 4 s")


def test_the_first_that_gives_up_speaks_for_all(place: str) -> None:
    """Rank 0 would wait longer, and tells the other all the same which rank is missing."""
    over = multiprocessing.get_context("fork").Semaphore(0)

    def body(rank: int) -> Any:
        with SocketTransport(place, rank, 3, timeout=LIMIT) as transport:
            if rank == 2:
                return [over.acquire(timeout=LIMIT) for _ in range(2)]
            try:
                return transport.all_gather(b"", 4.0 if rank else 4 * LIMIT)
            finally:
                over.release()

    *errors, last = Ranks(3, body).end()
    assert last == [True, True]
    same(errors, gi.PeerError, "^rank 2: gone, or no answer")


# -- sockets -----------------------------------------------------------------------------------------------------------


def test_sockets_carry_what_is_sent(each_place: Any) -> None:
    """Empty, and more than a socket takes at once; no file stays."""
    sizes = [0, 1, 100, 1_000_000]

    def content(rank: int, number: int) -> bytes:
        return bytes([rank, number]) * sizes[(rank + number) % len(sizes)]

    def body(team: Team) -> bool:
        found = [team._transport.all_gather(content(team.rank, number), LIMIT) for number in range(4)]
        return found == [[content(rank, number) for rank in range(4)] for number in range(4)]

    assert teams(4, each_place, body) == [True] * 4
    if isinstance(each_place, Path):
        assert list(each_place.iterdir()) == []


def test_a_path_is_free_again_when_all_have_come(each_place: Any) -> None:
    """Ranks may come to the next team before the others have closed the first."""

    def body(team: Team) -> list[bytes]:
        with SocketTransport(each_place, team.rank, 3, timeout=LIMIT) as second:
            return second.all_gather(b"%d" % team.rank, LIMIT)

    assert teams(3, each_place, body) == [[b"0", b"1", b"2"]] * 3


def test_a_rank_that_does_not_come(each_place: Any) -> None:
    def body(rank: int) -> None:
        SocketTransport(each_place, rank, 3, timeout=LIMIT if rank else 4.0)

    same(Ranks(2, body).end(), gi.PeerError, "^rank 2 did not come to .* within 4 s")
    with pytest.raises(gi.PeerError, match=r"rank 0\b.* did not come"):
        SocketTransport(each_place, 2, 3, timeout=0.1)
    if isinstance(each_place, Path):
        assert list(each_place.iterdir()) == []


STRANGERS: dict[str, tuple[Any, str]] = {
    "another job": (lambda path: SocketTransport(path, 1, 2, job="b"), r"\[3, 2, 'b'\], and rank 0 has \[3, 2, 'a'\]"),
    "another size": (lambda path: SocketTransport(path, 2, 3, job="a"), r"\[3, 3, 'a'\], and rank 0 has \[3, 2, 'a'\]"),
    "another version": (lambda path: of_version(9, path), r"\[9, 2, 'a'\], and rank 0 has \[3, 2, 'a'\]"),
    "another rank 0": (lambda path: SocketTransport(path, 0, 2, job="a"), "^path: .*gpuinterop-(rank-0|exchange)"),
    "no rank": (lambda path: knock(path, b"HTTP/1.1 200 OK\r\n\r\n"), ""),
    "nobody": (lambda path: knock(path, b""), ""),
}


def of_version(number: int, path: Any) -> None:
    setattr(sys.modules[SocketTransport.__module__], "_VERSION", number)  # noqa: B010
    SocketTransport(path, 1, 2, job="a")


def knock(path: Any, words: bytes) -> None:
    name = f"\0gpuinterop-exchange{path}" if isinstance(path, str) else str(path / ".gpuinterop-rank-0")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        while connection.connect_ex(name):
            time.sleep(0.001)
        connection.sendall(words)


@pytest.mark.parametrize("name", STRANGERS)
def test_who_is_not_of_the_team_is_told(each_place: Any, name: str) -> None:
    """Rank 0 waits on for its own."""
    come, match = STRANGERS[name]

    def body(rank: int) -> Any:
        if rank == 2:
            knock(each_place, b"")  # rank 0 is there
            told = None
            try:
                come(each_place)
            except gi.GpuInteropError as error:
                told = error
            gone.set()
            return told
        if rank == 1:
            assert gone.wait(LIMIT)
        with SocketTransport(each_place, rank, 2, timeout=LIMIT, job="a") as transport:
            return transport.all_gather(b"%d" % rank, LIMIT)

    gone = multiprocessing.get_context("fork").Event()
    *team, told = Ranks(3, body).end()
    assert team == [[b"0", b"1"]] * 2
    assert (told is None) == (match == "")
    assert told is None or re.search(match, str(told)), told


def test_two_that_say_that_they_are_the_same_rank(place: str) -> None:
    """One is in the team; the other is told."""

    def body(rank: int) -> Any:
        number = min(rank, 1)
        if rank == 3:
            assert told.acquire(timeout=LIMIT)
            number = 2
        try:
            with SocketTransport(place, number, 3, timeout=LIMIT) as transport:
                return transport.all_gather(b"%d" % number, LIMIT)
        except gi.PeerError:
            told.release()
            raise

    told = multiprocessing.get_context("fork").Semaphore(0)
    results = Ranks(4, body).end()
    refused = [one for one in results if isinstance(one, gi.PeerError)]
    assert [one for one in results if one not in refused] == [[b"0", b"1", b"2"]] * 3
    same(refused, gi.PeerError, "two processes say that they are rank 1")


def test_what_is_at_the_path(tmp_path: Path) -> None:
    """The socket of a rank 0 that was killed is taken over; that of one that hangs, and other files, stay."""
    file = tmp_path / ".gpuinterop-rank-0"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(file))
        other.listen(0)
        with contextlib.ExitStack() as scope:  # it hangs, so its queue is full
            while True:
                one = scope.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                one.setblocking(False)
                if one.connect_ex(str(file)):
                    break
            with pytest.raises(gi.InvalidArgumentError, match=r"^path: .*: Address already in use"):
                SocketTransport(tmp_path, 0, 2, timeout=0.1)
    assert teams(2, tmp_path, lambda team: team.vote("x")) == [None, None]
    file.write_text("another")
    with pytest.raises(gi.InvalidArgumentError, match=r"path: expected .*: Address already in use"):
        SocketTransport(tmp_path, 0, 2, timeout=0.1)
    assert file.read_text() == "another"
    for path, match in ((tmp_path / "missing", "No such file"), (tmp_path / ("x" * 200), "too long")):
        with pytest.raises(gi.InvalidArgumentError, match=f"path: expected .*{match}"):
            SocketTransport(path, 0, 2, timeout=0.1)
    with pytest.raises(gi.ArgumentTypeError, match="job: expected a str, got int"):
        SocketTransport(tmp_path, 0, 2, job=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("victim", range(2))
def test_another_user(place: str, victim: int) -> None:
    """The kernel says who is at the other end: a stranger is not let in, nor connected to, nor given a handle."""

    def body(rank: int) -> None:
        with SocketTransport(f"{place}-", rank, 2, timeout=LIMIT) as transport, memfd() as mine:
            user = os.geteuid()
            if rank == victim:
                os.geteuid = lambda: user + 1
            with pytest.raises(gi.PeerError, match=r"gives no handle: .*(another user|the peer closed)"):
                Team(transport, timeout=LIMIT).gather_handles(mine)
            SocketTransport(place, rank, 2, timeout=4.0)

    first, second = Ranks(2, body).end()
    assert isinstance(first, gi.PeerError)
    assert isinstance(second, gi.PeerError)
    assert ("another user" if victim else "did not come") in str(second)


def test_a_handle_is_not_given_to_another_user(place: str) -> None:
    """It is a thread that gives it."""

    def body(team: Team) -> None:
        user, main = os.geteuid(), threading.get_ident()
        if team.rank == 1:
            os.geteuid = lambda: user + (threading.get_ident() != main)
        gather(team)

    same(teams(2, place, body), gi.PeerError, "^step .*: rank 1 gives no handle: ")


# -- handles -----------------------------------------------------------------------------------------------------------


def read(handle: Any) -> str:
    with handle:
        assert handle.owned
        return os.pread(handle.fd, 100, 0).decode()


@pytest.mark.parametrize("kind", [gi.VmmFd, gi.OpaqueFd])
def test_handles_for_all(place: str, kind: type[Any]) -> None:
    """Of each root, and of all; the sender's own stays its own. Fabric handles go from host to host."""

    def body(team: Team) -> list[Any]:
        with memfd(f"of {team.rank}", kind) as mine:
            found = [
                read(team.share_handle(mine if team.rank == root else None, root, expect=kind)) for root in range(3)
            ]
            found += map(read, team.gather_handles(mine))
            assert not mine.closed
        delivery.host = lambda: f"host {team.rank}"
        fabric = gi.FabricHandle(bytes([team.rank]) * 64)
        shared = team.share_handle(fabric if team.rank == 1 else None, 1, expect=gi.FabricHandle)
        return [*found, *(handle.data[0] for handle in (shared, *team.gather_handles(fabric)))]

    assert teams(3, place, body) == [["of 0", "of 1", "of 2"] * 2 + [1, 0, 1, 2]] * 3


# -- multicast, on a backend that notes what it is asked ---------------------------------------------------------------

STEP = FakeMulticast.GROUPS.minimum
SIZE = 4 * STEP
Cast = Callable[[Team, gi.Device, FakeMulticast, contextlib.ExitStack], Any]


def casting(place: str, body: Cast, size: int = 3) -> list[Any]:
    """Ranks with a backend and a device each; what came of it, and which calls each made, of which nothing is left."""

    def rank_body(team: Team) -> Any:
        devices, backend = fake_team()
        backend.on_import = lambda handle: os.close(handle.fd)
        with contextlib.ExitStack() as own:
            try:
                result = body(team, devices[team.rank], backend, own)
            except gi.GpuInteropError as error:
                result = error
        left = [native for native in backend.live if native[0] in ("group", "mapping", "allocation")]
        return result, [call[0] for call in backend.calls], left

    found = teams(size, place, rank_body)
    assert all(isinstance(one, tuple) and one[2] == [] for one in found), found
    return [one[:2] for one in found]


def refused(outcome: list[Any], kind: type[Exception], match: str, *unmade: str) -> Any:
    """The one error of all; the driver was not asked for what would have blocked."""
    assert not {call for _, calls in outcome for call in calls} & set(unmade)
    return same([result for result, _ in outcome], kind, match)


def test_a_life_of_all(place: str) -> None:
    def body(team: Team, device: gi.Device, backend: FakeMulticast, own: contextlib.ExitStack) -> Any:
        allocation = own.enter_context(device.allocate(SIZE))
        multicast = own.enter_context(team.create_multicast(device, SIZE))
        assert [call[0] for call in backend.calls if "multicast" in call[0] or call[0] == "add_device"] == (
            ["import_multicast", "add_device"] if team.rank else ["create_multicast", "export_multicast", "add_device"]
        )
        with team.bind_memory(multicast, allocation, STEP, size=STEP) as bound:
            assert (bound.offset, bound.size) == (STEP, STEP)
        with team.bind_address(multicast, device, allocation.buffer, SIZE) as bound, team.map(multicast) as mapped:
            assert (bound.memory is allocation.buffer, mapped.size) == (True, SIZE)
        return [(call[0], call[2], call[3], call[-1]) for call in backend.calls if call[0].startswith("bind")]

    for rank, (binds, _) in enumerate(casting(place, body)):
        assert binds == [("bind_memory", rank, STEP, STEP), ("bind_address", rank, 0, SIZE)]


OBJECTS: dict[str, tuple[Callable[[int, gi.Device], Any], str]] = {
    "size": (lambda rank, device: (device, SIZE + STEP * (rank == 2)), "size: .* 32768 .ranks 0 and 1., 40960 .rank 2"),
    "handle": (
        lambda rank, device: (device, SIZE, gi.FabricHandle if rank else gi.VmmFd),
        r"got vmm_fd .*, fabric",
    ),
    "device": (
        lambda rank, device: (fake_team()[0][0], SIZE),
        "device: .* got 0{32} .ranks 0, 1",
    ),
    "no device": (lambda rank, device: (None if rank == 1 else device, SIZE), "rank 1, step .*expected a Device"),
    "handle_type": (lambda rank, device: (device, SIZE, gi.OpaqueWin32), "OpaqueWin32 cannot be sent"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_arguments_of_a_multicast_object(place: str, name: str) -> None:
    given, match = OBJECTS[name]

    def body(team: Team, device: gi.Device, *_: Any) -> None:
        team.create_multicast(*given(team.rank, device))

    outcome = casting(place, body)
    error = refused(outcome, type(outcome[0][0]), match, "import_multicast", "add_device")
    assert isinstance(error, gi.InvalidArgumentError)


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
        ("closed", r"rank 2, step '.*: offer': .* is closed"),
        ("size", r"got 32768 bytes for 3 devices \(ranks 0 and 1\), 65536 bytes for 3 devices \(rank 2\)"),
        ("count", r"got 32768 bytes for 3 devices \(ranks 0 and 1\), 32768 bytes for 4 devices \(rank 2\)"),
    ],
)
def test_nobody_goes_into_a_driver_that_would_block(place: str, use: str, case: str, match: str) -> None:
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
    refused(casting(place, body), kind, match, "bind_memory", "bind_address", "map_allocation")


@pytest.mark.parametrize(
    ("bytes_bound", "match"),
    [
        (lambda rank: (STEP * (rank % 2), STEP), r"offset: .* got 0 \(ranks 0 and 2\), 8192 \(rank 1\)"),
        (lambda rank: (0, STEP * (1 + rank)), "size: expected the same on all ranks, got 8192"),
    ],
)
def test_all_bind_the_same_bytes(place: str, bytes_bound: Callable[[int], Any], match: str) -> None:
    def body(team: Team, device: gi.Device, _: FakeMulticast, own: contextlib.ExitStack) -> None:
        allocation = own.enter_context(device.allocate(SIZE))
        multicast = own.enter_context(team.create_multicast(device, SIZE))
        offset, size = bytes_bound(team.rank)
        try:
            team.bind_memory(multicast, allocation, offset, size=size)
        finally:
            assert multicast.bindings == ()

    outcome = casting(place, body)
    refused(outcome, gi.InvalidArgumentError, match)
    assert all(calls.count("bind_memory") == calls.count("unbind") == 1 for _, calls in outcome)
