"""Numbers: every public call takes NumPy's, and refuses by the argument's name what fits no field of a driver."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.exporters import open_exporter
from gpuinterop.sharing.rendezvous import users_of

from .fake import FakeEverything, fake_device, memory_of, semaphore_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds")

A_WHILE = 0.015625


@pytest.fixture
def a(host: gi.Device) -> Iterator[Any]:
    """What the calls are made with; `scope` closes what they make."""
    fake, _ = fake_device(backend=FakeEverything())
    with ExitStack() as scope:
        enter = scope.enter_context
        allocation, stream = enter(host.allocate(8192)), enter(host.create_stream())
        allocation.buffer.fill(0)
        graphs = enter(fake.create_stream())
        counter = enter(semaphore_of(fake))
        with graphs.capture() as graph:
            counter.signal(graphs, 3)
        enter(graph)
        shared = enter(gi.share(allocation.view(8), threaded=False))
        yield SimpleNamespace(
            scope=scope, enter=enter, host=host, allocation=allocation, buffer=allocation.buffer, stream=stream,
            timeline=enter(host.create_semaphore(gi.TimelineFd)), graph=graph, step=graph.semaphores.signals[0],
            memory=enter(enter(open_exporter("memfd")).create_memory(8192)), images=enter(memory_of(fake, 65536)),
            bridge=enter(gi.bridge.Bridge(host)), fabric=gi.FabricHandle(bytes(64)), shared=shared,
            Handoff=gi.Handoff, event=enter(gi.EventFd.adopt(os.eventfd(0))), attached=enter(gi.attach(bytes(shared))),
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
    a.stream.synchronize(20)
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


def transport(a: Any, **more: Any) -> Any:
    return a.enter(gi.exchange.SocketTransport(f"@{secrets.token_hex(8)}", **{"rank": 0, "size": 1} | more))


def restored(a: Any, offset: Any) -> int:
    a.buffer.copy_from_host(bytes(range(200)))
    a.buffer.copy_to_host(found := bytearray(1), offset=offset)
    return found[0]


def stored(a: Any, n: Any) -> int:
    a.scope.callback((endpoint := gi.bridge.OwnTimelineEndpoint(a.enter(a.timeline.export()))).close)
    endpoint.signal(n)
    return int(a.timeline.value)


# The argument, a value, and a call that takes it and tells what has come of it.
INTEGERS: list[tuple[str, int, Callable[[Any, Any], Any]]] = [
    ("size", 4096, lambda a, n: a.enter(a.host.import_memory(a.enter(a.memory.export()), size=n)).size),
    ("size", 8192, lambda a, n: a.enter(a.host.import_allocation(a.enter(a.allocation.export()), n)).size),
    ("size", 4096, lambda a, n: a.enter(a.host.allocate(n)).size),
    ("offset", 100, lambda a, n: a.enter(a.images.map_buffer(n)).offset),
    ("size", 100, lambda a, n: a.enter(a.images.map_buffer(0, n)).size),
    ("shape", 100, lambda a, n: np.asarray(a.buffer.view(n)).size),
    ("shape", 100, lambda a, n: np.asarray(a.allocation.view((2, n))).shape[1]),
    ("offset", 100, lambda a, n: a.buffer.view(4, "uint8", n).ptr - a.buffer.ptr),
    ("strides", 100, lambda a, n: np.asarray(a.buffer.view(2, strides=[n])).strides[0]),
    ("byte", 100, lambda a, n: (a.buffer.fill(n), np.asarray(a.buffer.view(1))[0])[1]),
    ("offset", 100, lambda a, n: first(a, lambda: a.buffer.fill(7, offset=n, size=1))),
    ("size", 100, lambda a, n: (a.buffer.fill(7, size=n), len(bytes_set(a)))[1]),
    ("offset", 100, lambda a, n: first(a, lambda: a.buffer.copy_from_host(b"7", offset=n))),
    ("offset", 100, restored),
    ("extent", 100, lambda a, n: image(a, (n, 2)).layout.extent[0]),
    ("levels", 3, lambda a, n: image(a, (64,), levels=n).layout.levels),
    ("layers", 3, lambda a, n: image(a, (64,), layers=n).layout.layers),
    ("offset", 64, lambda a, n: image(a, (64,), offset=n).layout.offset),
    ("n", 2, lambda a, n: image(a, (64,), levels=3).level(n).index),
    ("value", 100, lambda a, n: counts(a, lambda: a.timeline.signal(a.stream, n))),
    ("value", 100, lambda a, n: counts(a, lambda: a.timeline.host_signal(n))),
    ("value", 100, lambda a, n: counts(a, lambda: gi.SemaphoreBatch(a.timeline).signal(a.stream, (n,)))),
    ("value", 100, lambda a, n: awaits(a, lambda: a.timeline.wait(a.stream, n))),
    ("value", 100, lambda a, n: awaits(a, lambda: gi.SemaphoreBatch(a.timeline).wait(a.stream, (n,)))),
    ("value", 100, lambda a, n: awaits(a, lambda: a.timeline.host_wait(n, timeout=0))),
    ("value", 100, lambda a, n: (a.step.set(n), a.step.values[0])[1]),
    ("by", 100, lambda a, n: (a.graph.semaphores.advance(n), a.step.values[0] - 3)[1]),
    ("value", 100, stored),
    ("stream", 0, lambda a, n: a.enter(a.host.wrap_stream(n)).ptr),
    ("stream", 0, lambda a, n: a.enter(a.host.wrap_stream(SimpleNamespace(ptr=n))).ptr),
    ("stream", 0, lambda a, n: a.enter(a.host.wrap_stream(SimpleNamespace(__cuda_stream__=(0, n)))).ptr),
    ("ordinal", 0, lambda a, n: gi.get_backend("host").device(n).ordinal),
    ("fd", 0, lambda a, n: gi.OpaqueFd(n).fd),
    ("handle", 100, lambda a, n: gi.D3D12Heap(handle=n).detach()),
    ("pointer", 100, lambda a, n: gi.NvSciBuf(n).pointer),
    ("frame", 100, lambda a, n: gi.Handoff(a.timeline, frame=n).frame),
    ("peer", 1, lambda a, n: a.bridge.import_semaphore(a.enter(a.event.duplicate()), peer=n).close() or 1),
    ("users", 100, lambda _, n: max(users_of([n]))),
    ("rank", 0, lambda a, n: transport(a, rank=n).rank),
    ("size", 1, lambda a, n: transport(a, size=n).size),
    (
        "root",
        0,
        lambda a, n: gi.exchange.Team(transport(a)).share_handle(a.fabric, expect=gi.FabricHandle, root=n).data[0],
    ),
]
WRONG = [True, np.True_, 1.5, np.float64(1), "1", 2**64, 10**5000, -(2**64), np.float32(1)]


@pytest.mark.parametrize("number", range(len(INTEGERS)), ids=[f"{at}-{row[0]}" for at, row in enumerate(INTEGERS)])
def test_an_integer_is_an_integer_of_any_library(a: Any, number: int) -> None:
    argument, value, call = INTEGERS[number]
    for wrong in [*WRONG, *([] if argument in ("by", "strides") else [-1])]:
        with pytest.raises(gi.GpuInteropError, match=f"(^|: )(values?|{argument}): "):
            call(a, wrong)
    kind = (np.int64, np.uint16, np.int32, np.uint64)[number % 4]
    assert call(a, kind(value)) == value


# The argument, a call with a time-out, and what its error says of the time-out; "" if nothing has to be waited for.
SECONDS: list[tuple[str, Callable[[Any, Any], Any], str]] = [
    ("timeout", lambda a, t: pending(a).synchronize(t), "after {} s"),
    ("timeout", lambda a, t: pending(a).record().wait(t), "in {} s"),
    ("timeout", lambda a, t: pending(a).device.synchronize(t), "after {} s"),
    ("timeout", lambda a, t: a.timeline.host_wait(1, timeout=t), "in {} s"),
    ("timeout", lambda a, t: (a.timeline.wait(a.stream, 1, timeout=t), a.stream.synchronize(20)), "within 16 ms"),
    (
        "timeout",
        lambda a, t: (
            a.Handoff(a.timeline, tracks_submits=False).acquire(a.stream, timeout=t),
            a.stream.synchronize(20),
        ),
        "16 ms",
    ),
    ("timeout", lambda a, t: a.allocation.close(t), "close[(]{}[)]"),
    ("timeout", lambda a, t: a.buffer.close(t), "close[(]{}[)]"),
    ("timeout", lambda a, t: (a.buffer.close(), a.host.drain(t)), "after {} s"),
    ("timeout", lambda a, t: a.enter(gi.share(a.allocation.view(8))).close(t), ""),
    ("timeout", lambda a, t: a.shared.close(t), "close[(]{}[)]"),
    ("timeout", lambda a, t: a.shared.acquire(timeout=t), "in {} s"),
    ("timeout", lambda a, t: gi.sharing.acquire([a.shared], timeout=t), "in {} s"),
    ("timeout", lambda a, t: a.attached.close(t), ""),
    ("timeout", lambda a, t: a.shared.serve(t), ""),
    ("timeout", lambda a, t: gi.attach(bytes(a.shared), timeout=t).close(), ""),
    ("timeout", lambda a, t: a.bridge.close(t), ""),
    ("grace", lambda a, t: gi.bridge.Bridge(a.host, grace=t).close(), ""),
    ("timeout", lambda a, t: transport(a, timeout=t), ""),
    ("timeout", lambda a, t: gi.exchange.Team(transport(a), timeout=t), ""),
]


def pending(a: Any) -> gi.Stream:
    a.timeline.wait(a.stream, 1)
    return a.stream  # type: ignore[no-any-return]


@pytest.mark.parametrize(("argument", "call", "says"), SECONDS, ids=range(len(SECONDS)))
def test_seconds_are_any_real_number(a: Any, argument: str, call: Callable[[Any, Any], Any], says: str) -> None:
    """What is refused ends nothing. The longest is what ``poll`` takes; beyond that Python raises OverflowError."""
    array = np.asarray(a.allocation.view(8))  # keeps the memory
    a.attached.acquire()
    for wrong in (True, np.True_, "1", -1, np.float64("nan"), np.float32(-0.5), 2e6 + 1, 1e300, 10**5000, 2**63):
        with pytest.raises(gi.InvalidArgumentError, match=f"^{argument}: "):
            call(a, wrong)
    for kind in (np.float32, np.float64, Fraction) if says else (np.float32, Fraction):
        with pytest.raises(gi.GpuInteropError, match=says.format(A_WHILE)) if says else nullcontext():
            call(a, kind(A_WHILE))
    a.timeline.host_signal(2**62)
    del array
