"""Numbers: every public call takes NumPy's, and refuses by the argument's name what fits no field of a driver."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from tests.limits import LIMIT

from .fake import FakeEverything, fake_device, memory_of, semaphore_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds")

A_WHILE = 0.015625


@pytest.fixture
def a(host: gi.Device) -> Iterator[Any]:
    """What the calls are made with; `scope` closes what they make."""
    fake, _ = fake_device(backend=FakeEverything())
    with ExitStack() as scope:
        enter: Any = scope.enter_context
        allocation, stream, graphs = (
            enter(one) for one in (host.allocate(8192), host.create_stream(), fake.create_stream())
        )
        allocation.buffer.fill(0)
        counter = enter(semaphore_of(fake))
        with graphs.capture() as graph:
            counter.signal(graphs, 3)
        enter(graph)
        yield SimpleNamespace(
            enter=enter, host=host, allocation=allocation, buffer=allocation.buffer, stream=stream,
            timeline=enter(host.create_semaphore(gi.TimelineFd)), graph=graph, step=graph.semaphores.signals[0],
            images=enter(memory_of(fake, 65536)),
        )  # fmt: skip


def bytes_set(a: Any) -> list[int]:
    a.buffer.copy_to_host(found := np.empty(8192, "uint8"))
    return np.flatnonzero(found).tolist()


def first(a: Any, call: Callable[[], object]) -> int:
    """The offset of the first byte that a call has set."""
    call()
    return bytes_set(a)[0]


def counts(a: Any, signal: Callable[[], object]) -> int:
    signal()
    a.stream.synchronize(LIMIT)
    return int(a.timeline.value)


def awaits(a: Any, wait: Callable[[], object]) -> int:
    """The value that a wait waits for, as its time-out says; then let it pass."""
    with pytest.raises(gi.SemaphoreTimeoutError) as late:
        wait()
        a.stream.synchronize(0)
    a.timeline.host_signal(2**63)
    return int(re.findall(r" to (?:reach )?(\d+)", str(late.value))[0])


def image(a: Any, *arguments: Any, **more: Any) -> Any:
    return a.enter(a.images.map_mipmapped_array("R8_UNORM", *arguments, **more))


def restored(a: Any, offset: Any) -> int:
    a.buffer.copy_from_host(bytes(range(200)))
    a.buffer.copy_to_host(found := bytearray(1), offset=offset)
    return found[0]


# The argument, a value, and a call that takes it and tells what has come of it.
INTEGERS: list[tuple[str, int, Callable[[Any, Any], Any]]] = [
    ("size", 8192, lambda a, n: a.enter(a.host.import_allocation(a.enter(a.allocation.export()), n)).size),
    ("size", 4096, lambda a, n: a.enter(a.host.allocate(n)).size),
    ("offset", 100, lambda a, n: a.enter(a.images.map_buffer(n)).offset),
    ("size", 100, lambda a, n: a.enter(a.images.map_buffer(0, n)).size),
    ("shape", 100, lambda a, n: np.asarray(a.buffer.view(n)).size),
    ("offset", 100, lambda a, n: a.buffer.view(4, "uint8", n).ptr - a.buffer.ptr),
    ("strides", 100, lambda a, n: np.asarray(a.buffer.view(2, strides=[n])).strides[0]),
    ("byte", 100, lambda a, n: (a.buffer.fill(n), np.asarray(a.buffer.view(1))[0])[1]),
    ("offset", 100, lambda a, n: first(a, lambda: a.buffer.fill(7, offset=n, size=1))),
    ("size", 100, lambda a, n: (a.buffer.fill(7, size=n), len(bytes_set(a)))[1]),
    ("offset", 100, lambda a, n: first(a, lambda: a.buffer.copy_from_host(b"7", offset=n))),
    ("offset", 100, restored),
    ("extent", 100, lambda a, n: image(a, (n, 2)).layout.extent[0]),
    ("levels", 3, lambda a, n: image(a, (64,), levels=n).layout.levels),
    ("value", 100, lambda a, n: counts(a, lambda: a.timeline.signal(a.stream, n))),
    ("value", 100, lambda a, n: counts(a, lambda: a.timeline.host_signal(n))),
    ("value", 100, lambda a, n: counts(a, lambda: gi.SemaphoreBatch(a.timeline).signal(a.stream, (n,)))),
    ("value", 100, lambda a, n: awaits(a, lambda: a.timeline.wait(a.stream, n))),
    ("value", 100, lambda a, n: awaits(a, lambda: gi.SemaphoreBatch(a.timeline).wait(a.stream, (n,)))),
    ("value", 100, lambda a, n: awaits(a, lambda: a.timeline.host_wait(n, timeout=0))),
    ("value", 100, lambda a, n: (a.step.set(n), a.step.values[0])[1]),
    ("by", 100, lambda a, n: (a.graph.semaphores.advance(n), a.step.values[0] - 3)[1]),
    ("stream", 0, lambda a, n: a.enter(a.host.wrap_stream(n)).ptr),
    ("ordinal", 0, lambda a, n: gi.get_backend("host").device(n).ordinal),
    ("fd", 0, lambda a, n: gi.OpaqueFd(n).fd),
    ("handle", 100, lambda a, n: gi.D3D12Heap(handle=n).detach()),
    ("pointer", 100, lambda a, n: gi.NvSciBuf(n).pointer),
    ("frame", 100, lambda a, n: gi.Handoff(a.timeline, frame=n).frame),
]
WRONG = [True, np.True_, 1.5, np.float64(1), "1", 2**64, 10**5000, -(2**64), np.float32(1)]


@pytest.mark.parametrize("number", range(len(INTEGERS)), ids=[f"{at}-{row[0]}" for at, row in enumerate(INTEGERS)])
def test_an_integer_is_an_integer_of_any_library(a: Any, number: int) -> None:
    argument, value, call = INTEGERS[number]
    for wrong in [*WRONG, *([] if argument in ("by", "strides") else [-1]), *([0] if argument == "size" else [])]:
        with pytest.raises(gi.GpuInteropError, match=f"(^|: )(values?|{argument}): "):
            call(a, wrong)
    kind = (np.int64, np.uint16, np.int32, np.uint64)[number % 4]
    assert call(a, kind(value)) == value


# A call with a time-out, and what its error says of the time-out.
SECONDS: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda a, t: pending(a).synchronize(t), "after {} s"),
    (lambda a, t: pending(a).record().wait(t), "in {} s"),
    (lambda a, t: pending(a).device.synchronize(t), "after {} s"),
    (lambda a, t: a.timeline.host_wait(1, timeout=t), "in {} s"),
    (lambda a, t: a.timeline.wait(a.stream, 1, timeout=t), "in {} s"),
    (lambda a, t: a.allocation.close(t), "close[(]{}[)]"),
    (lambda a, t: (a.buffer.close(), a.host.drain(t)), "after {} s"),
]


def pending(a: Any) -> gi.Stream:
    a.timeline.wait(a.stream, 1)
    return a.stream  # type: ignore[no-any-return]


@pytest.mark.parametrize(("call", "says"), SECONDS, ids=range(len(SECONDS)))
def test_seconds_are_any_real_number(a: Any, call: Callable[[Any, Any], Any], says: str) -> None:
    """What is refused ends nothing. The longest is what ``poll`` takes; beyond that Python raises OverflowError."""
    array = np.asarray(a.allocation.view(8))  # keeps the memory
    for wrong in (True, "1", -1, np.float64("nan"), 2e6 + 1, 10**5000):
        with pytest.raises(gi.InvalidArgumentError, match=r"^timeout: "):
            call(a, wrong)
    for kind in (np.float32, Fraction):
        with pytest.raises(gi.GpuInteropError, match=says.format(A_WHILE)):
            call(a, kind(A_WHILE))
    a.timeline.host_signal(2**62)
    del array
