"""Measure single calls: signals, waits, batches, imports, views; and the effect of threads and of many objects."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from ..._core.semaphore import SemaphoreBatch
from ...capabilities import Operation
from ...errors import DriverError
from ...handles import FdHandle, HandleOrigin, OpaqueFd, OriginKind, Timeline, TimelineFd
from .clock import OURS, Contender, Figure, Spread, Values, calls_of, in_turns
from .floor import Compute, Memory

if TYPE_CHECKING:
    from ..._core.semaphore import ExternalSemaphore
    from .rig import Bench

REUSED, ANEW, BY_HAND, IN_C = "by hand, reused structs", "by hand, new structs", "by hand", "C"
_OPERATIONS: Final = (Operation.IMPORT_SEMAPHORE, Operation.SIGNAL_SEMAPHORE, Operation.WAIT_SEMAPHORE)
BATCH: Final = 16
THREADS: Final = 8
STREAMS, OBJECTS = 256, 1000
MEMORY: Final = 2 << 20
SHAPE: Final = (512, 512)


def _timeline(bench: Bench, scope: ExitStack) -> TimelineFd:
    """Create a timeline of the independent exporter; it stays open."""
    handle = scope.enter_context(bench.party.create_semaphore(Timeline)).export()
    assert isinstance(handle, TimelineFd)
    return handle


class _Pair:
    """Semaphores and a stream of gpuinterop's, and hand-written ones if the backend has yardsticks."""

    def __init__(self, bench: Bench, scope: ExitStack, count: int) -> None:
        bench.device.capabilities.require(*((operation, TimelineFd) for operation in _OPERATIONS))
        self.stream = scope.enter_context(bench.device.create_stream())
        self.ours: list[ExternalSemaphore[Any]] = []
        for _ in range(count):
            with _timeline(bench, scope) as handle:
                self.ours.append(scope.enter_context(bench.device.import_semaphore(handle)))
        self.mine, self.others = Values(), Values()
        self.by_hand, self.theirs = bench.by_hand, None
        if self.by_hand is not None:
            self.their_stream = self.by_hand.stream()
            fds = [_timeline(bench, scope).detach() for _ in range(count)]
            self.theirs = self.by_hand.timelines(fds, self.their_stream)
            self.others = Values(self.theirs.signalled)

    def settle(self) -> None:
        self.stream.synchronize()
        if self.theirs is not None:
            self.by_hand.synchronize(self.their_stream)


def semaphores(bench: Bench) -> Iterator[Figure]:
    """A signal and a wait of an imported semaphore."""
    with ExitStack() as scope:
        pair = _Pair(bench, scope, 1)
        (ours,), stream, theirs = pair.ours, pair.stream, pair.theirs

        def wait(count: int) -> None:
            for value in (2,) * count:
                ours.wait(stream, value)

        signals: dict[str, Contender] = {OURS: _signals(pair)}
        waits: dict[str, Contender] = {OURS: wait}
        if theirs is not None:
            signals |= {
                REUSED: calls_of(theirs.signal, pair.others), ANEW: calls_of(theirs.signal_new_struct, pair.others)
            }  # fmt: skip
            waits |= {REUSED: calls_of(theirs.wait), ANEW: calls_of(theirs.wait_new_struct)}
            if floor := bench.in_c:
                to_signal, to_wait = (Compute(*theirs.addresses(signal=signal)) for signal in (True, False))
                signals[IN_C] = lambda count: done(floor.calls(to_signal, pair.others.take(count).start, 1, count))
                waits[IN_C] = lambda count: done(floor.calls(to_wait, 2, 0, count))
        for name, contenders in (("signal", signals), ("wait", waits)):
            times = in_turns(contenders, calls=50, rounds=bench.rounds(300), settle=pair.settle)
            yield Figure(name, times=times)


def done(status: int) -> None:
    """Raise if a yardstick has failed: a failed call is fast."""
    if status:
        raise DriverError("a call of the yardstick in C", status, "a status that is not 0")


def batch(bench: Bench) -> Iterator[Figure]:
    """One call that signals, or waits for, sixteen semaphores."""
    with ExitStack() as scope:
        pair = _Pair(bench, scope, BATCH)
        ours, stream, theirs = SemaphoreBatch(*pair.ours), pair.stream, pair.theirs

        def signal(count: int) -> None:
            for value in pair.mine.take(count):
                ours.signal(stream, [value] * BATCH)

        def wait(count: int) -> None:
            for value in (2,) * count:
                ours.wait(stream, [value] * BATCH)

        signals: dict[str, Contender] = {OURS: signal}
        waits: dict[str, Contender] = {OURS: wait}
        if theirs is not None:
            signals[REUSED] = calls_of(lambda value: theirs.signal_all([value] * BATCH), pair.others)
            waits[REUSED] = calls_of(lambda value: theirs.wait_all([value] * BATCH))
        for name, contenders in (("signal", signals), ("wait", waits)):
            times = in_turns(contenders, calls=25, rounds=bench.rounds(300), settle=pair.settle)
            yield Figure(f"{name}, batch of {BATCH}", "batch", times)


def own_timeline(bench: Bench) -> Iterator[Figure]:
    """A timeline of gpuinterop's own: a stream writes a word in pinned memory, and waits for it."""
    with ExitStack() as scope:
        stream = scope.enter_context(bench.device.create_stream())
        ours = scope.enter_context(bench.device.create_semaphore(TimelineFd))
        mine, by_hand = Values(), bench.by_hand

        def signal(count: int) -> None:
            for value in mine.take(count):
                ours.signal(stream, value)

        def wait(count: int) -> None:
            for value in (2,) * count:
                ours.wait(stream, value)

        signals: dict[str, Contender] = {OURS: signal}
        waits: dict[str, Contender] = {OURS: wait}
        if by_hand is not None:
            their_stream = by_hand.stream()
            write, wait_for = by_hand.word(their_stream)
            signals[BY_HAND], waits[BY_HAND] = calls_of(write, Values(1)), calls_of(wait_for)

        def settle() -> None:
            stream.synchronize()
            if by_hand is not None:
                by_hand.synchronize(their_stream)

        for name, contenders in (("signal", signals), ("wait", waits)):
            times = in_turns(contenders, calls=50, rounds=bench.rounds(300), settle=settle)
            yield Figure(f"{name}, gpuinterop timeline", times=times)


def threads(bench: Bench) -> Iterator[Figure]:
    """Threads that signal at the same time, each its own semaphore on its own stream."""
    with ExitStack() as scope:
        pairs = [_Pair(bench, scope, 1) for _ in range(THREADS)]

        def settle() -> None:
            for pair in pairs:
                pair.settle()

        contenders = {OURS: _at_once([_signals(pair) for pair in pairs])}
        if by_hand := [calls_of(pair.theirs.signal, pair.others) for pair in pairs if pair.theirs is not None]:
            contenders[REUSED] = _at_once(by_hand)
        times = in_turns(contenders, calls=THREADS * 500, rounds=bench.rounds(30), settle=settle)
        yield Figure(f"signal, {THREADS} threads at once", times=times)


def _signals(pair: _Pair) -> Contender:
    (semaphore,), stream = pair.ours, pair.stream

    def run(count: int) -> None:
        for value in pair.mine.take(count):
            semaphore.signal(stream, value)

    return run


def _at_once(contenders: Sequence[Contender]) -> Contender:
    def run(count: int) -> None:
        with ThreadPoolExecutor(len(contenders)) as pool:
            for _ in pool.map(lambda one: one(count // len(contenders)), contenders):  # raises the first error
                pass

    return run


def imports(bench: Bench) -> Iterator[Figure]:
    """Import, map and close a memory: with few other objects, and with many."""
    with ExitStack() as scope:
        device = bench.device
        device.capabilities.require((Operation.IMPORT_MEMORY, OpaqueFd), (Operation.MAP_BUFFER, OpaqueFd))
        theirs = scope.enter_context(bench.party.create_memory(MEMORY))
        handle = scope.enter_context(theirs.export())
        assert isinstance(handle, FdHandle)
        size, fd = theirs.size, handle.fd
        origin = HandleOrigin(kind=OriginKind.MEMORY, device=device.identity, size=size, dedicated=False, trusted=True)

        def ours(count: int) -> None:
            for _ in range(count):
                with OpaqueFd.adopt(os.dup(fd), origin=origin) as mine:
                    memory = device.import_memory(mine, size=size)
                buffer = memory.map_buffer()
                memory.close()
                del buffer  # not before the memory has closed it

        contenders: dict[str, Contender] = {OURS: ours}
        if bench.by_hand is not None:
            once = bench.by_hand.memory(size)
            contenders[BY_HAND] = lambda count: [once(fd) for _ in range(count)]
            if hasattr(once, "addresses") and (floor := bench.in_c):
                in_c = Memory(*once.addresses())
                contenders[IN_C] = lambda count: done(floor.memories(in_c, fd, count))
        alone = in_turns(contenders, calls=1, rounds=bench.rounds(300))
        yield Figure("import + map + close", "memory", alone)
        for _ in range(STREAMS):
            scope.enter_context(device.create_stream())
        for _ in range(OBJECTS):
            scope.enter_context(device.create_semaphore(TimelineFd))
        among = in_turns(contenders, calls=1, rounds=bench.rounds(300))
        ours_among = among.pop(OURS)
        times = {OURS: ours_among, "gpuinterop, without them": alone[OURS], **among}
        yield Figure(f"import + map + close, among {STREAMS} streams and {OBJECTS:,} objects", "memory", times)


def views(bench: Bench) -> Iterator[Figure]:
    """Hand a buffer to an array library, compared with another array library's own export."""
    device = bench.device
    with ExitStack() as scope:
        buffer = scope.enter_context(device.allocate(4 * SHAPE[0] * SHAPE[1])).buffer
        take: Any
        if device.info.dlpack[0] == 1:
            import numpy as np

            own = np.zeros(SHAPE, np.float32)
            take, name, whose = np.from_dlpack, "view + np.from_dlpack", "NumPy's array to NumPy"
        else:
            try:
                import cupy
                import torch

                with cupy.cuda.Device(device.ordinal):
                    own = cupy.zeros(SHAPE, cupy.float32)
                torch.zeros(1, device=f"cuda:{device.ordinal}")
            except (ImportError, AssertionError, RuntimeError) as error:  # not installed, or built for another device
                yield Figure("view + torch.from_dlpack", "array", problem=f"it needs CuPy and torch: {error}")
                return
            take, name, whose = torch.from_dlpack, "view + torch.from_dlpack", "CuPy's array to torch"
        view = buffer.view(SHAPE, "float32")

        def ours(count: int) -> None:
            for _ in range(count):
                take(buffer.view(SHAPE, "float32"))

        def reused(count: int) -> None:
            for _ in range(count):
                take(view)

        def theirs(count: int) -> None:
            for _ in range(count):
                take(own)

        contenders = {OURS: ours, "gpuinterop, one view": reused, whose: theirs}
        yield Figure(name, "array", in_turns(contenders, calls=20, rounds=bench.rounds(300)))


def package(bench: Bench) -> Iterator[Figure]:
    """``import gpuinterop`` in a new process, compared with ``import numpy``."""
    program = "import time; began = time.perf_counter_ns(); import {}; print(time.perf_counter_ns() - began)"
    times: dict[str, list[float]] = {"gpuinterop": [], "numpy": []}
    for _ in range(bench.rounds(20)):
        for name, found in times.items():
            command = [sys.executable, "-c", program.format(name)]
            found.append(int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) / 1000)
    spreads = {OURS: Spread.of(times["gpuinterop"]), "import numpy": Spread.of(times["numpy"])}
    yield Figure("import gpuinterop", "import", spreads)


PARTS: Final = {
    "signal and wait": semaphores,
    "batches": batch,
    "gpuinterop timelines": own_timeline,
    "threads": threads,
    "import + map + close": imports,
    "views": views,
    "import of the package": package,
}
