"""Measure single calls: a signal, a wait, and an import with its mapping and close."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from gpuinterop.handles import HandleOrigin, OpaqueFd, OriginKind, Timeline
from gpuinterop.testing.exporters.base import ExporterSemaphore

from .by_hand import in_c
from .clock import OURS, Calls, Figure, Values
from .device import Bench

REUSED, BY_HAND, IN_C = "by hand, reused structs", "by hand", "C"
PATIENCE_S: Final = 300
"""Longest time for work to finish."""
_COUNT: Final = 50


def semaphores(bench: Bench) -> Iterator[Figure]:
    """A signal and a wait of an imported semaphore; each contender has one."""
    comparison, by_hand = bench.compare(300), bench.by_hand
    with ExitStack() as scope:
        theirs = {name: scope.enter_context(bench.exporter.create_semaphore(Timeline)) for name in (OURS, REUSED, IN_C)}
        handles: dict[str, Any] = {name: scope.enter_context(semaphore.export()) for name, semaphore in theirs.items()}
        stream = scope.enter_context(bench.device.create_stream())
        ours, values = scope.enter_context(bench.device.import_semaphore(handles[OURS])), Values()
        calls = _calls(partial(ours.signal, stream), partial(ours.wait, stream), values)
        comparison.add_calls(OURS, calls, _COUNT, stream.synchronize, partial(_check, theirs[OURS], values))
        if by_hand is not None:
            for name in (REUSED, IN_C):
                with comparison.noting(name):
                    timeline, values = by_hand.timeline(handles[name].detach()), Values(1)
                    by_hands = _calls(timeline.signal, timeline.wait, values)
                    calls = _calls_in_c(timeline, values) if name == IN_C else by_hands
                    check = partial(_check, theirs[name], values)
                    comparison.add_calls(name, calls, _COUNT, timeline.synchronize, check)
        comparison.measure()
        yield comparison.figure("signal", key="signal")
        yield comparison.figure("wait", key="wait")


def _calls(signal: Callable[[int], object], wait: Callable[[int], object], values: Values) -> Mapping[str, Calls]:
    """Signal growing values; wait for 2, which was signalled before."""
    return {
        "signal": lambda count: [signal(value) for value in values.take(count)],
        "wait": lambda count: [wait(value) for value in (2,) * count],
    }


def _calls_in_c(timeline: Any, values: Values) -> Mapping[str, Calls]:
    signal, wait = (in_c("calls", timeline.in_c(signal=which)) for which in (True, False))
    return {
        "signal": lambda count: signal(values.take(count).start, 1, count),
        "wait": lambda count: wait(2, 0, count),
    }


def _check(semaphore: ExporterSemaphore, values: Values) -> None:
    """Raise if a contender's signals have not reached its semaphore: a failed call is fast."""
    if not semaphore.wait(values.last, timeout=PATIENCE_S):
        raise ValueError(f"expected the last signal to set the semaphore to {values.last}, got a lower value")


def imports(bench: Bench) -> Iterator[Figure]:
    """Import, map and close a memory."""
    comparison, device = bench.compare(300), bench.device
    with ExitStack() as scope:
        theirs = scope.enter_context(bench.exporter.create_memory(2 << 20))
        handle: Any = scope.enter_context(theirs.export())
        size, fd = theirs.size, handle.fd
        origin = HandleOrigin(kind=OriginKind.MEMORY, device=device.identity, size=size, dedicated=False, trusted=True)

        def ours(_: int) -> None:
            with OpaqueFd.adopt(os.dup(fd), origin=origin) as mine:
                memory = device.import_memory(mine, size=size)
            buffer = memory.map_buffer()
            memory.close()
            del buffer  # not before the memory has closed it

        comparison.add_calls(OURS, {"": ours})
        if bench.by_hand is not None:
            once = bench.by_hand.memory(size)
            comparison.add_calls(BY_HAND, {"": lambda _: once(fd)})
            if hasattr(once, "in_c"):
                with comparison.noting(IN_C):
                    comparison.add_calls(IN_C, {"": partial(in_c("memories", once.in_c()), fd)})
        yield comparison.measure().figure("import + map + close", "memory")


PARTS: Final = {"signal and wait": semaphores, "import + map + close": imports}
