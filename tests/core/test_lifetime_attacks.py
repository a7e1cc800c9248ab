"""What has once crashed, given stale bytes, hung, leaked or cost too much: each attack, through public calls only.

The backend is the strict one: what is dead and reaches it fails the test, whoever swallows the error. No test stands on
luck: another thread comes in from a hook of the backend, at the start or inside of a native call, and waits fail the
test when they last.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core import registry
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge

from .bridge.scripted import Scripted
from .fake import (
    LIMIT,
    FakeBackend,
    FakeDriver,
    FakeEverything,
    FakeGraphs,
    Handle,
    fake_device,
    memory_of,
    semaphore_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::gpuinterop.LeakedResourceWarning"),
]


CUDA = (2, 0)


def everything(ordinal: int = 0, *, backend: FakeEverything | None = None) -> tuple[Device, FakeEverything]:
    found = backend or FakeEverything()
    device, _ = fake_device(backend=found, dlpack=CUDA, ordinal=ordinal)
    return device, found


def elsewhere(call: Callable[[], object]) -> Any:
    """Run it to its end in another thread; what it gives or has raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive(), "it does not come back"
    return found[0]


def meet(backend: FakeBackend, call: str, come_in: Callable[[], object], place: str = "start") -> None:
    """Once, when `call` is made: another thread does something, to its end."""

    def at(name: str, where: str, handles: Sequence[Handle]) -> None:
        if (name, where) == (call, place):
            backend.at = lambda *_: None
            elsewhere(come_in)

    backend.at = at


def settle(device: Device, backend: FakeBackend, *closing: Any) -> None:
    """Everything ends, is closed and released."""
    backend.at = lambda *_: None
    backend.blocked.clear()
    if isinstance(backend, FakeDriver):
        backend.pass_all()
    for one in closing:
        one.close()
    with contextlib.suppress(gi.GpuInteropError):
        device.synchronize(timeout=LIMIT)
    gc.collect()
    device.drain()
    assert left_in(backend) == set()


def left_in(backend: FakeBackend) -> set[tuple[str, int]]:
    """What is not released, but for what may be kept: copy streams, and a few pages of our own that are used again."""
    assert backend.count("pin") <= 4
    return {native for native in backend.live if native[0] not in ("stream", "pin")}


# -- 1: signal and wait beside close ----------------------------------------------------------------------------------


class Soft(FakeEverything):
    """Its releases do not block, so no gate is between them and a wait."""

    releases_block = False


@pytest.mark.parametrize("backend", [FakeEverything, Soft])
@pytest.mark.parametrize("kind", ["native", "own", "batch"])
@pytest.mark.parametrize("what", ["signal", "wait"])
def test_1_a_semaphore_closed_beside_a_call(kind: str, what: str, backend: Any) -> None:
    device, backend = everything(backend=backend())
    stream = device.create_stream()
    semaphore: Any = device.create_semaphore(gi.TimelineFd) if kind == "own" else semaphore_of(device)
    used = gi.SemaphoreBatch(semaphore) if kind == "batch" else semaphore
    value: Any = (1,) if kind == "batch" else 1
    call = {"signal": "write_value", "wait": "wait_value"}[what] if kind == "own" else what
    meet(backend, call, semaphore.close)
    with contextlib.suppress(gi.ResourceClosedError):
        getattr(used, what)(stream, value)
    settle(device, backend, stream)


@pytest.mark.parametrize("what", ["signal", "wait"])
def test_1_a_bridged_semaphore_closed_beside_a_call(what: str) -> None:
    device, backend = everything()
    stream = device.create_stream()
    with Bridge(device) as bridge:
        semaphore: Any = bridge.from_endpoint(Scripted())
        meet(backend, {"signal": "write_value", "wait": "wait_value"}[what], semaphore.close)
        with contextlib.suppress(gi.ResourceClosedError):
            getattr(semaphore, what)(stream, 1)
        backend.at = lambda *_: None
        backend.pass_all()
    settle(device, backend, stream)


# -- 2: streams closed while others look at them ----------------------------------------------------------------------


@pytest.mark.parametrize("place", ["start", "inside"])
def test_2_a_stream_closed_while_memory_is_closed(place: str) -> None:
    device, backend = everything()
    stream, memory = device.create_stream(), memory_of(device)
    buffer = memory.map_buffer()
    buffer.fill(1, stream=stream)
    meet(backend, "record", stream.close, place)
    memory.close()
    settle(device, backend)


STREAM_CALLS: dict[str, tuple[str, Callable[[gi.Stream, gi.Stream], object]]] = {
    "query": ("is_idle", lambda stream, other: stream.query()),
    "capturing": ("is_capturing", lambda stream, other: stream.capturing),
    "synchronize": ("synchronize", lambda stream, other: stream.synchronize()),
    "synchronize, timed": ("record", lambda stream, other: stream.synchronize(timeout=LIMIT)),
    "record": ("record", lambda stream, other: stream.record()),
    "wait_stream": ("wait_event", lambda stream, other: stream.wait_stream(other)),
    "wait_stream of it": ("record", lambda stream, other: other.wait_stream(stream)),
}


@pytest.mark.parametrize("name", STREAM_CALLS)
def test_2_a_stream_closed_beside_its_own_call(name: str) -> None:
    device, backend = everything()
    stream, other = device.create_stream(), device.create_stream()
    native, call = STREAM_CALLS[name]
    meet(backend, native, stream.close)
    with contextlib.suppress(gi.ResourceClosedError):
        call(stream, other)
    gc.collect()
    settle(device, backend, other)


def test_2_an_event_is_asked_for_when_its_stream_is_gone() -> None:
    device, backend = everything()
    stream = device.create_stream()
    event = stream.record()
    meet(backend, "is_done", stream.close)
    assert event.done
    stream.close(timeout=LIMIT)
    assert event.done
    event.wait(timeout=LIMIT)
    del event
    settle(device, backend)


# -- 3: a close before the call under way has enqueued ----------------------------------------------------------------


@pytest.mark.parametrize("place", ["start", "inside"])
def test_3_what_is_enqueued_behind_the_close_is_waited_for(place: str) -> None:
    """The close comes in the middle of a fill, and the fill lands behind a wait."""
    device, backend = everything()
    stream, gate = device.create_stream(), semaphore_of(device)
    allocation = device.allocate(4096)
    buffer = allocation.buffer

    def come_in() -> None:
        allocation.close()
        gate.wait(stream, 1)

    meet(backend, "fill", come_in, place)
    buffer.fill(7, stream=stream)
    device.drain()
    assert backend.count("mapping") == 1, "unmapped while the fill is to come"
    backend.arrive(semaphores_of(backend)[0], 1)
    allocation.close(timeout=LIMIT)
    settle(device, backend, stream, gate)


def semaphores_of(backend: FakeBackend) -> list[Handle]:
    """The driver's semaphores, the oldest first."""
    return sorted(native for native in backend.live if isinstance(native, Handle) and native[0] == "semaphore")


# -- 4: the per-thread default stream ---------------------------------------------------------------------------------


def test_4_the_default_stream_of_another_thread() -> None:
    device, backend = everything()
    gate, allocation = semaphore_of(device), device.allocate(4096)
    worked, end = threading.Event(), threading.Event()

    def work() -> None:
        stream = device.wrap_stream(2)
        gate.wait(stream, 1)
        allocation.buffer.fill(7, stream=stream)
        worked.set()
        assert end.wait(LIMIT)
        with contextlib.suppress(gi.GpuInteropError):
            stream.synchronize(timeout=LIMIT)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert worked.wait(LIMIT)
    allocation.close()
    device.drain()
    mapped = backend.count("mapping")
    backend.arrive(semaphores_of(backend)[0], 1)
    end.set()
    thread.join(LIMIT)
    assert mapped == 1, "unmapped while the other thread's stream is still to fill it"
    settle(device, backend, allocation, gate)


# -- 5: the consumer's stream -----------------------------------------------------------------------------------------


def test_5_a_consumers_stream_is_not_forgotten() -> None:
    device, backend = everything()
    allocation = device.allocate(4096)
    capsule = allocation.buffer.view(16).__dlpack__(stream=64)
    mapping = next(native for native in backend.live if native[0] == "mapping")
    backend._use(backend.adopt_stream(0, 64), mapping)  # the consumer's work
    backend.blocked.add(64)
    del capsule
    gc.collect()
    allocation.close()
    device.drain()
    assert backend.count("mapping") == 1, "unmapped while the consumer's work is pending"
    backend.blocked.clear()
    allocation.close(timeout=LIMIT)
    settle(device, backend)


# -- 6: a copy that is enqueued, and then something fails -------------------------------------------------------------


class Pinned(FakeEverything):
    pageable_copies_block = False


def _fail(*_: object) -> None:
    raise gi.DriverError("cuEventRecord", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")


@pytest.mark.parametrize("what", ["copy_from_host", "copy_to_host"])
def test_6_the_host_memory_of_a_copy_that_is_to_come_is_kept(what: str) -> None:
    device, backend = everything(backend=Pinned())
    stream, gate, memory = device.create_stream(), semaphore_of(device), memory_of(device)
    buffer = memory.map_buffer()
    gate.wait(stream, 1)
    array = np.ones(64, "uint8")
    alive = weakref.ref(array)
    backend.on_record = _fail
    with contextlib.suppress(gi.DriverError):
        getattr(buffer, what)(array, stream=stream)
    backend.on_record = lambda: None
    assert [call for call in backend.calls if call[0] == "copy"], "the driver has it"
    del array
    gc.collect()
    device.drain()
    assert alive() is not None, "freed while the copy is to come"
    backend.pass_all()
    stream.synchronize()
    gc.collect()
    assert alive() is None
    settle(device, backend, stream, memory, gate)


# -- 8: a handle closed during its import -----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["memory", "semaphore", "allocation"])
def test_8_a_handle_closed_during_its_import_closes_nobody_elses(what: str) -> None:
    device, backend = everything()
    mine = os.memfd_create("mine")
    os.ftruncate(mine, 1 << 16)
    handle: Any = {"memory": gi.OpaqueFd, "semaphore": gi.TimelineFd, "allocation": gi.VmmFd}[what].adopt(os.dup(mine))
    others: list[int] = []

    def on_import(lent: Any) -> None:
        os.close(lent.fd)
        elsewhere(handle.close)
        others.extend(os.dup(mine) for _ in range(3))  # another thread's, with the numbers that are free

    backend.on_import = on_import
    if what == "memory":
        imported: Any = device.import_memory(handle, size=4096)
    elif what == "semaphore":
        imported = device.import_semaphore(handle)
    else:
        imported = device.import_allocation(handle, 1 << 14)
    assert handle.closed
    closed = [fd for fd in others if not _is_open(fd)]
    for fd in {*others, mine} - {*closed}:
        os.close(fd)
    assert closed == [], "somebody else's descriptor was closed"
    settle(device, backend, imported)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# -- 9: order ---------------------------------------------------------------------------------------------------------


def test_9_every_stream_that_touched_the_bytes_is_waited_for() -> None:
    device, backend = everything(backend=Pinned())
    first, second, gate, memory = (
        device.create_stream(),
        device.create_stream(),
        semaphore_of(device),
        memory_of(device),
    )
    buffer = memory.map_buffer()
    gate.wait(first, 1)
    buffer.fill(7, size=64, stream=first)
    buffer.fill(9, offset=64, size=64, stream=second)
    target = bytearray(64)
    backend.on_synchronize = backend.pass_all
    buffer.copy_to_host(target)
    assert bytes(target) == bytes([7] * 64)
    settle(device, backend, first, second, memory, gate)


def test_9_a_buffer_closed_beside_a_copy_of_a_level() -> None:
    device, backend = everything()
    stream, memory, other = device.create_stream(), memory_of(device), memory_of(device)
    array, buffer = memory.map_mipmapped_array("R8_UNORM", (4, 4)), other.map_buffer()
    meet(backend, "copy_level", other.close)
    array.level(0).copy_from_buffer(buffer, stream=stream)
    settle(device, backend, stream, memory)


def test_9_a_copy_of_a_level_is_a_use_of_both() -> None:
    device, backend = everything(backend=Pinned())
    stream, gate = device.create_stream(), semaphore_of(device)
    memory, allocation = memory_of(device), device.allocate(4096)
    array = memory.map_mipmapped_array("R8_UNORM", (4, 4))
    gate.wait(stream, 1)
    array.level(0).copy_from_buffer(allocation.buffer, stream=stream)
    allocation.close()
    memory.close()
    stream.close()
    device.drain()
    assert (backend.count("mapping"), backend.count("array")) == (1, 1)
    settle(device, backend, gate)


def test_9_a_stream_that_is_captured_is_refused_not_ignored() -> None:
    """Its work of before the capture is still to come, and nothing can be ordered behind that."""
    device, backend = everything(backend=Pinned())
    stream, gate, memory = device.create_stream(), semaphore_of(device), memory_of(device)
    buffer = memory.map_buffer()
    gate.wait(stream, 1)
    buffer.fill(7, stream=stream)
    target = bytearray(4096)
    with stream.capture():
        with pytest.raises(gi.GpuInteropError):
            buffer.copy_to_host(target)
        with pytest.raises(gi.GpuInteropError):
            buffer.view(4).__dlpack__(stream=64)
    settle(device, backend, stream, memory, gate)


# -- 10: one stream with two names ------------------------------------------------------------------------------------


def test_10_streams_0_and_1_are_one() -> None:
    device, backend = everything()
    gate, semaphore = semaphore_of(device), semaphore_of(device)
    null, legacy = device.wrap_stream(0), device.wrap_stream(1)
    gate.wait(null, 5)
    semaphore.signal(null, 5)
    with pytest.raises(gi.InvalidArgumentError, match="only grows"):
        semaphore.signal(legacy, 3)
    with pytest.raises(gi.SemaphoreTimeoutError, match="to reach 5"):
        legacy.synchronize(timeout=0)
    settle(device, backend, null, legacy, gate, semaphore)


# -- 11: a second handoff ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_11_a_second_handoff_goes_on_or_is_refused(own: bool) -> None:
    device, backend = everything()
    stream = device.create_stream()
    semaphore: Any = device.create_semaphore(gi.TimelineFd) if own else semaphore_of(device)
    handoff = gi.Handoff(semaphore)
    step = handoff.next_submit()
    if own:
        semaphore.host_signal(step.signal_value)
    else:
        backend.arrive(semaphores_of(backend)[0], step.signal_value)
    handoff.acquire(stream)
    handoff.release(stream)
    stream.synchronize(timeout=LIMIT)
    with contextlib.suppress(gi.InvalidArgumentError):
        again = gi.Handoff(semaphore)
        assert again.next_submit().signal_value > 2, "what was signalled long ago would let the next acquire pass"
    settle(device, backend, stream, semaphore)


# -- 13: failures -----------------------------------------------------------------------------------------------------


def failing(backend: FakeBackend, name: str) -> None:
    """From now on the driver refuses this call."""

    def at(call: str, place: str, handles: Sequence[Handle]) -> None:
        if (call, place) == (name, "start"):
            _fail()

    backend.at = at


def test_13_a_failing_call_of_a_drain_is_not_raised_into_others() -> None:
    device, backend = everything()
    stream, memory, other = device.create_stream(), memory_of(device), memory_of(device)
    memory.map_buffer().fill(1, stream=stream)
    backend.blocked.add(stream.ptr)
    memory.close()
    backend.blocked.clear()
    failing(backend, "destroy_event")
    other.close()
    allocation = device.allocate(4096)
    with pytest.raises(ZeroDivisionError), allocation:
        raise ZeroDivisionError


def test_13_synchronize_visits_every_stream() -> None:
    device, backend = everything()
    streams = [device.create_stream() for _ in range(3)]
    pointers = {stream.ptr for stream in streams}
    seen: list[int] = []

    def at(call: str, place: str, handles: Sequence[Handle]) -> None:
        if (call, place) == ("synchronize", "start"):
            seen.append(handles[0][1])
            _fail()

    backend.at = at
    with pytest.raises(gi.DriverError):
        device.synchronize()
    assert set(seen) == pointers
    settle(device, backend, *streams)


@pytest.mark.parametrize("child", ["mapping", "array"])
def test_13_a_child_that_could_not_be_released_keeps_its_parent(child: str) -> None:
    device, backend = everything()
    memory = memory_of(device)
    _held = memory.map_buffer() if child == "mapping" else memory.map_mipmapped_array("R8_UNORM", (4, 4))
    failing(backend, "unmap_buffer" if child == "mapping" else "destroy_array")
    memory.close()
    device.drain()
    assert (backend.count(child), backend.count("memory")) == (1, 1)


def test_13_a_capture_that_could_not_be_ended_leaves_no_stream_pending() -> None:
    backend = FakeGraphs()
    device, _ = fake_device(backend=backend)
    stream = device.create_stream()
    failing(backend, "end_capture")
    with pytest.raises(gi.DriverError), stream.capture():
        pass
    backend.at = lambda *_: None
    stream.close(timeout=1.0)
    memory_of(device).close(timeout=1.0)


# -- 14: callbacks ----------------------------------------------------------------------------------------------------


def test_14_a_callback_that_takes_its_time_holds_up_nobody() -> None:
    device, backend = everything()
    memory, other = memory_of(device), memory_of(device)
    inside, go_on = threading.Event(), threading.Event()

    def callback() -> None:
        inside.set()
        assert go_on.wait(LIMIT)

    memory.on_released(callback)
    thread = threading.Thread(target=memory.close, daemon=True)
    thread.start()
    assert inside.wait(LIMIT)
    try:
        other.close(timeout=0.5)
    finally:
        go_on.set()
        thread.join(LIMIT)
    settle(device, backend)


def test_14_a_callback_closes_something_and_waits_for_it() -> None:
    device, backend = everything()
    memory, other = memory_of(device), memory_of(device)
    done: list[object] = []

    def callback() -> None:
        try:
            other.close(timeout=0.5)
            done.append(None)
        except gi.GpuInteropError as error:
            done.append(error)

    memory.on_released(callback)
    memory.close(timeout=LIMIT)
    assert done == [None]
    settle(device, backend)


# -- 15: fork ---------------------------------------------------------------------------------------------------------

_FORK = """
import contextlib, os, signal, sys, threading, warnings
import gpuinterop as gi
from tests.core.fake import FakeEverything, fake_device
warnings.simplefilter("ignore")
backend = FakeEverything()
device, _ = fake_device(backend=backend)
memory = device.import_memory(gi.OpaqueWin32(handle=8), size=4096)
allocation = device.allocate(4096)
semaphore = device.create_semaphore(gi.TimelineFd)
stream = device.create_stream()
fresh, _ = fake_device(backend=FakeEverything())
inside, go_on = threading.Event(), threading.Event()
memfd = os.memfd_create("m")
os.ftruncate(memfd, 4096)
calls = {
    "map_buffer": (backend, memory.map_buffer),
    "map_allocation": (backend, lambda: allocation.buffer),
    "open_device": (fresh.driver, lambda: fresh.create_stream()),
    "import_memory": (backend, lambda: device.import_memory(gi.OpaqueFd.adopt(memfd), size=4096)),
    "unmap_buffer": (backend, lambda: (memory.map_buffer(), memory.close())),
    "wait_value": (backend, lambda: semaphore.wait(stream, 1)),
}
name = sys.argv[1]
found, call = calls[name]
def at(what, place, handles):
    if (what, place) == (name, "inside") and threading.current_thread() is thread:
        inside.set()
        go_on.wait(60)
found.at = at
thread = threading.Thread(target=call, daemon=True)
thread.start()
assert inside.wait(30)
child = os.fork()
if not child:
    signal.alarm(10)
    for use in (call, memory.close, allocation.close, semaphore.close, stream.close, device.drain,
                lambda: fresh.create_stream(), lambda: device.import_memory(gi.OpaqueWin32(handle=8), size=64),
                lambda: gi.get_backend("host").device().allocate(4096).close(timeout=5)):
        with contextlib.suppress(gi.GpuInteropError):
            use()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize(
    "name", ["map_buffer", "map_allocation", "open_device", "import_memory", "unmap_buffer", "wait_value"]
)
def test_15_a_child_does_not_wait_for_the_parents_threads(name: str) -> None:
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", _FORK, name], capture_output=True, text=True, timeout=60, check=False, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert result.stdout.strip() == "7", result.stderr or f"the child ended with {result.stdout}"


# -- 16: what is never idle -------------------------------------------------------------------------------------------


class Clock:
    """Time that passes where somebody sleeps, and nowhere else."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_16_a_pipeline_that_is_never_idle_still_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame in flight ends when somebody looks often enough, with nothing enqueued in between."""
    monkeypatch.setattr(system, "time", Clock())
    device, backend = everything()
    stream, gate = device.create_stream(), semaphore_of(device)
    native = semaphores_of(backend)[0]
    looks, reached = 0, 0

    def at(call: str, place: str, handles: Sequence[Handle]) -> None:
        nonlocal looks, reached
        if place != "start":
            return
        if call in ("wait", "signal"):
            looks = 0
        if call in ("is_idle", "is_done"):
            looks += 1
            if looks == 8:
                backend.arrive(native, reached)

    backend.at = at
    most = 0
    for frame in range(1, 301):
        gate.wait(stream, frame)
        backend.arrive(native, frame - 1)
        reached = frame
        semaphore_of(device).close()
        most = max(most, backend.count("semaphore"))
    assert most <= 100, f"{most} semaphores that no stream has used wait for their release"
    settle(device, backend, stream, gate)


def test_16_a_waiting_stream_holds_nothing_that_it_never_touched() -> None:
    device, backend = everything()
    stream, gate = device.create_stream(), semaphore_of(device)
    gate.wait(stream, 1)
    for _ in range(100):
        allocation = device.allocate(4096)
        assert allocation.buffer.size
        allocation.close()
    device.drain()
    assert (backend.count("mapping"), backend.count("allocation")) == (0, 0)
    settle(device, backend, stream, gate)


# -- 17: what a semaphore remembers -----------------------------------------------------------------------------------


def test_17_a_semaphore_keeps_no_stream_that_is_gone() -> None:
    device, backend = everything()
    semaphore = semaphore_of(device)
    alive: list[weakref.ref[gi.Stream]] = []
    for value in range(1, 51):
        with device.create_stream() as stream:
            semaphore.signal(stream, value)
            alive.append(weakref.ref(stream))
        del stream
    device.synchronize()
    device.drain()
    gc.collect()
    assert sum(one() is not None for one in alive) <= 2
    assert backend.count("stream") <= 2
    settle(device, backend, semaphore)


# -- 18: what it costs ------------------------------------------------------------------------------------------------


class Counted(FakeEverything):
    def __init__(self) -> None:
        super().__init__()
        self.natives = 0
        self.at = self._count

    def _count(self, call: str, place: str, handles: Sequence[Handle]) -> None:
        self.natives += place == "start" and call not in ("stream_pointer", "stream_key", "prepare")


def calls_of(backend: Counted, call: Callable[[], object]) -> int:
    before = backend.natives
    call()
    return backend.natives - before


def import_map_close(device: Device) -> None:
    memory = memory_of(device)
    memory.map_buffer()
    memory.close()


def test_18_a_round_costs_the_same_however_many_streams_there_are() -> None:
    device, backend = everything(backend=Counted())
    assert isinstance(backend, Counted)
    import_map_close(device)  # opens the device
    costs = {0: calls_of(backend, lambda: import_map_close(device))}
    streams: list[gi.Stream] = []
    for count in (1, 16, 64):
        streams += [device.create_stream() for _ in range(count - len(streams))]
        costs[count] = calls_of(backend, lambda: import_map_close(device))
    assert set(costs.values()) == {costs[0]}, costs
    settle(device, backend, *streams)


def test_18_wrapping_costs_the_same_whatever_is_retired_or_alive() -> None:
    device, backend = everything(backend=Counted())
    assert isinstance(backend, Counted)
    memory, stream, gate = memory_of(device), device.create_stream(), semaphore_of(device)
    buffer = memory.map_buffer()
    alone = calls_of(backend, lambda: device.wrap_stream(64).close())
    gate.wait(stream, 1)
    retired = [semaphore_of(device) for _ in range(200)]
    for semaphore in retired:
        semaphore.signal(stream, 1)
        semaphore.close()
    arrays = [buffer.view(16).__dlpack__(stream=-1) for _ in range(200)]
    wrappers: list[gi.Stream] = []
    assert calls_of(backend, lambda: wrappers.append(device.wrap_stream(64))) <= alone
    del arrays
    settle(device, backend, stream, memory, gate, *wrappers)


def test_18_entry_points_are_scanned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUINTEROP_BACKEND", "host")
    gi.device()
    scans: list[object] = []
    entry_points = registry.entry_points  # type: ignore[attr-defined]

    def count(**how: Any) -> Any:
        scans.append(how)
        return entry_points(**how)

    monkeypatch.setattr(registry, "entry_points", count)
    for _ in range(10):
        gi.device()
    assert scans == []


def test_18_copies_of_many_threads_leave_few_streams() -> None:
    device, backend = everything(backend=Pinned())
    buffer = device.allocate(4096).buffer
    meeting = threading.Barrier(32)

    def meet_here() -> None:
        meeting.wait(LIMIT)

    backend.on_synchronize = meet_here
    threads = [threading.Thread(target=lambda: buffer.copy_to_host(bytearray(16))) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    backend.on_synchronize = lambda: None
    device.synchronize()
    device.drain()
    assert backend.count("stream") <= 8
    backend.at = lambda *_: None


_EXIT = """
import atexit, threading, time, warnings
slept = 0.0
atexit.register(lambda: print(f"{slept:.2f}", flush=True))  # runs last
import gpuinterop as gi
from gpuinterop import system
from tests.core.fake import FakeEverything, fake_device
warnings.simplefilter("ignore")
class Clock:
    now = 1000.0
    def monotonic(self): return self.now
    def sleep(self, seconds):
        global slept
        slept += seconds
        self.now += seconds
    def __getattr__(self, name): return getattr(time, name)
devices = [fake_device(backend=FakeEverything()) for _ in range(3)]
for device, backend in devices:
    stream, allocation = device.create_stream(), device.allocate(4096)
    allocation.buffer.fill(1, stream=stream)
    backend.blocked.add(stream.ptr)
    stream.close()
    allocation.close()
system.time = Clock()
"""


def test_18_the_exit_takes_two_seconds_in_all() -> None:
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", _EXIT], capture_output=True, text=True, timeout=60, check=False, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[-1]) < 2.2
