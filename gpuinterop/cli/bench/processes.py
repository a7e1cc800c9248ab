"""What other processes see: how fast one wakes another, and how long an import takes."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from ... import system
from ...errors import PeerError
from ...handles import TimelineFd
from .clock import OURS, Figure, Spread, in_turns

if TYPE_CHECKING:
    from ..._core.semaphore import ExternalSemaphore
    from .rig import Bench

PTHREAD, FUTEX = "a pthread mutex and condition", "a futex"
IDLE_S: Final = 0.004
"""How long a wait has slept when it is ended."""
PATIENCE_S: Final = 10
"""How long each means waits for the other process before it gives it up."""
_FUTEX_CALLS: Final = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1  # FUTEX_WAIT, FUTEX_WAKE
_LINE: Final = 128
"""Bytes from one direction's words to the next."""


class _Direction(Protocol):
    """One process signals numbers that grow, and the other waits for them."""

    def signal(self, value: int) -> object: ...

    def wait(self, value: int) -> object: ...


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _lost() -> PeerError:
    return PeerError(f"expected the other process to answer within {PATIENCE_S} s, got nothing; its error is above.")


class _Futex:
    """A word of a shared page, by the system call alone."""

    def __init__(self, libc: Any, address: int) -> None:
        self._word = ctypes.c_uint32.from_address(address)
        self._patience = _Timespec(PATIENCE_S)
        long, pointer, integer, unsigned = ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
        prototype = ctypes.CFUNCTYPE(
            long, long, pointer, integer, unsigned, pointer, pointer, integer, use_errno=True
        )  # fmt: skip
        call = prototype(ctypes.cast(libc.syscall, pointer).value or 0)
        self._call: Callable[..., int] = partial(call, _FUTEX_CALLS[platform.machine()], address)
        self._limit = ctypes.addressof(self._patience)

    def signal(self, value: int) -> None:
        self._word.value = value
        self._call(_WAKE, 1, None, None, 0)

    def wait(self, value: int) -> None:
        while (found := self._word.value) < value:
            if self._call(_WAIT, found, self._limit, None, 0) and ctypes.get_errno() == errno.ETIMEDOUT:
                raise _lost()


class _Pthread:
    """A mutex and a condition in a shared page."""

    def __init__(self, libc: Any, address: int, *, make: bool) -> None:
        self._value = ctypes.c_uint64.from_address(address)
        self._mutex, self._condition = ctypes.c_void_p(address + 16), ctypes.c_void_p(address + 64)
        if make:
            for kind, what in (("mutex", self._mutex), ("cond", self._condition)):
                attributes = ctypes.create_string_buffer(64)
                getattr(libc, f"pthread_{kind}attr_init")(attributes)
                getattr(libc, f"pthread_{kind}attr_setpshared")(attributes, 1)
                getattr(libc, f"pthread_{kind}_init")(what, attributes)
        self._lock, self._unlock = libc.pthread_mutex_lock, libc.pthread_mutex_unlock
        self._signal, self._wait = libc.pthread_cond_signal, libc.pthread_cond_timedwait
        self._limit = _Timespec()
        self._limit_at = ctypes.byref(self._limit)

    def signal(self, value: int) -> None:
        self._lock(self._mutex)
        self._value.value = value
        self._signal(self._condition)
        self._unlock(self._mutex)

    def wait(self, value: int) -> None:
        status = 0
        self._lock(self._mutex)
        while self._value.value < value and not status:
            self._limit.seconds = int(time.time()) + PATIENCE_S
            status = self._wait(self._condition, self._mutex, self._limit_at)
        self._unlock(self._mutex)
        if status:
            raise _lost()


class _Ours:
    """A timeline, from the calling threads."""

    def __init__(self, semaphore: ExternalSemaphore[Any]) -> None:
        self._semaphore = semaphore
        self.signal = semaphore.host_signal

    def wait(self, value: int) -> None:
        self._semaphore.host_wait(value, timeout=PATIENCE_S)


def _directions(page: int, semaphores: list[ExternalSemaphore[Any]], *, make: bool) -> dict[str, list[_Direction]]:
    """There and back, by each means that this machine has, on one page that two processes share."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = system.map_shared(page, system.PAGE)
    means: dict[str, list[_Direction]] = {
        OURS: [_Ours(semaphore) for semaphore in semaphores],
        PTHREAD: [_Pthread(libc, address + place * _LINE, make=make) for place in (0, 1)],
    }
    if platform.machine() in _FUTEX_CALLS:
        means[FUTEX] = [_Futex(libc, address + place * _LINE) for place in (2, 3)]
    return means


def wakes(bench: Bench) -> Iterator[Figure]:
    """Half a round trip between two processes: at once, and after the other one has slept."""
    with players(bench) as (game, means):
        once = {name: partial(game.play, name, there, back) for name, (there, back) in means.items()}
        times = in_turns(once, calls=300, rounds=bench.rounds(60))
        yield Figure("a wake in another process, at once", "wake", {name: _half(one) for name, one in times.items()})
        slept: dict[str, list[float]] = {name: [] for name in means}
        for _ in range(bench.rounds(200)):
            for name, (there, back) in means.items():
                slept[name].append(game.play_late(name, there, back) / 2)
        yield Figure("a wake in another process, which sleeps", "wake", {k: Spread.of(one) for k, one in slept.items()})


@contextmanager
def players(bench: Bench, page: int | None = None) -> Iterator[tuple[_Game, dict[str, list[_Direction]]]]:
    """A game with another process, and the means to play it; `page` is a memfd of one page, by default a new one."""
    with ExitStack() as scope:
        semaphores = [scope.enter_context(bench.device.create_semaphore(TimelineFd)) for _ in range(2)]
        handles = [scope.enter_context(semaphore.export()) for semaphore in semaphores]
        fds = [handle.fd for handle in handles if isinstance(handle, TimelineFd)]
        if page is None:
            page = os.memfd_create("gpuinterop-bench")
            scope.callback(os.close, page)
            os.ftruncate(page, system.PAGE)
        means = _directions(page, [*semaphores], make=True)
        peer = scope.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", __name__, bench.backend.name, *map(str, (page, *fds))],
                pass_fds=[page, *fds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                start_new_session=True,  # Ctrl-C is this process's, which ends that one
            )
        )  # fmt: skip
        scope.callback(peer.kill)
        game = _Game(peer)
        game.expect("ready")
        yield game, means


def _half(spread: Spread) -> Spread:
    halves = (round(one / 2, 3) for one in (spread.median, spread.p10, spread.p90, spread.p99))
    median, p10, p90, p99 = halves
    return Spread(median, p10, p90, p99, spread.samples)


class _Game:
    """Ping-pong with a process that plays `main` below."""

    def __init__(self, peer: subprocess.Popen[str]) -> None:
        assert peer.stdin is not None
        assert peer.stdout is not None
        self.peer = peer
        self._to, self._from = peer.stdin.fileno(), peer.stdout
        self._next: dict[str, int] = {}

    def expect(self, word: str) -> None:
        """Read a line."""
        line = self._from.readline().strip()
        if line != word:
            raise PeerError(f"expected the other process to say {word!r}, got {line!r}; its error is above.")

    def _begin(self, name: str, count: int) -> range:
        first = self._next.get(name, 1)
        self._next[name] = first + count
        with suppress(BrokenPipeError):  # then the process does not answer either
            os.write(self._to, f"{first} {count} {name}\n".encode())  # unbuffered: nothing is left to be flushed
        self.expect("go")
        return range(first, first + count)

    def play(self, name: str, there: _Direction, back: _Direction, count: int) -> None:
        """So many round trips."""
        for value in self._begin(name, count):
            there.signal(value)
            back.wait(value)

    def play_late(self, name: str, there: _Direction, back: _Direction) -> float:
        """Microseconds of a round trip that begins when the other process has slept."""
        (value,) = self._begin(name, 1)
        time.sleep(IDLE_S)
        began = time.perf_counter_ns()
        there.signal(value)
        back.wait(value)
        return (time.perf_counter_ns() - began) / 1000


def imports(bench: Bench) -> Iterator[Figure]:
    """How long ``import gpuinterop`` takes in a new process, beside ``import numpy``."""
    program = "import time; began = time.perf_counter_ns(); import {}; print(time.perf_counter_ns() - began)"
    times: dict[str, list[float]] = {"gpuinterop": [], "numpy": []}
    for _ in range(bench.rounds(20)):
        for name, found in times.items():
            command = [sys.executable, "-c", program.format(name)]
            found.append(int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) / 1000)
    spreads = {OURS: Spread.of(times["gpuinterop"]), "import numpy": Spread.of(times["numpy"])}
    yield Figure("import gpuinterop", "import", spreads)


def main() -> None:
    """Play the second player: read the first value, the count and the means of each set, and answer each value."""
    from ..._core.registry import get_backend

    backend, page, *fds = sys.argv[1:]
    device = get_backend(backend).device()
    semaphores: list[ExternalSemaphore[Any]] = [device.import_semaphore(TimelineFd(int(fd))) for fd in fds]
    means = _directions(int(page), semaphores, make=False)
    print("ready", flush=True)
    for line in sys.stdin:
        first, count, name = line.strip().split(" ", 2)
        there, back = means[name]
        print("go", flush=True)
        for value in range(int(first), int(first) + int(count)):
            there.wait(value)
            back.signal(value)


PARTS: Final = {"wakes between two processes": wakes, "import of the package": imports}
"""Functions that measure the figures."""

if __name__ == "__main__":
    main()
