"""What no schedule of `pairs` and `scenes` shows of lifetime: failures, messages, callbacks, cost, exit and fork."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core import release
from gpuinterop._core.device import Device
from gpuinterop._core.lifetime import locked
from gpuinterop._core.resource import Resource
from gpuinterop._core.streams import Wait, fail_wait
from tests.beside import beside, elsewhere
from tests.limits import LIMIT
from tests.programs import python

from .fake import FakeBackend, FakeEverything, FakeGraphs, Handle, Pinned, fake_device, memory_of, semaphore_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::gpuinterop.LeakedResourceWarning")


def everything(backend: FakeEverything | None = None) -> tuple[Device, Any]:
    return fake_device(backend=backend or FakeEverything(), dlpack=(2, 0))


def note_passed(device: Device, backend: FakeEverything, *closing: Any) -> None:
    """Everything ends, is closed and released, but for what may be kept: copy streams, and pages of our own."""
    backend.at = lambda *_: None
    backend.blocked.clear()
    backend.pass_all()
    for one in closing:
        one.close()
    with contextlib.suppress(gi.GpuInteropError):
        device.synchronize(timeout=LIMIT)
    gc.collect()
    device.drain()
    assert backend.count("pin") <= 4
    assert {native for native in backend.live if native[0] not in ("stream", "pin")} == set()


def _fail(*_: object) -> None:
    raise gi.DriverError("cuEventRecord", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")


def failing(backend: FakeBackend, name: str) -> None:
    """From now on the driver refuses this call."""

    def at(call: str, place: str, handles: Sequence[Handle]) -> None:
        if (call, place) == (name, "start"):
            _fail()

    backend.at = at


def destroyed(backend: FakeBackend) -> list[str]:
    return [call[1] for call in backend.calls if call[0] == "destroy"]


class Owner:
    """Of a stream of somebody's, who may keep other things as well."""

    array: object = None

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 64


def ends_well(code: str, *arguments: str) -> str:
    """What another interpreter says that runs the code."""
    done = python("-c", code, *arguments, cwd=ROOT, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["copy_from_host", "copy_to_host"])
def test_the_host_memory_of_a_copy_that_is_to_come_is_kept(what: str) -> None:
    device, backend = everything(Pinned())
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
    note_passed(device, backend, stream, memory, gate)


def test_a_failed_stream_fails_its_own_buffers_copies_only(host: Device) -> None:
    with host.allocate(4096) as one, host.allocate(4096) as two, host.create_semaphore(gi.TimelineFd) as semaphore:
        with host.create_stream() as stream:
            semaphore.wait(stream, 1)
            one.buffer.fill(1, stream=stream)
            with pytest.raises(gi.ResourceBusyError):
                semaphore.close(timeout=0)
            with pytest.raises(gi.ResourceClosedError):
                one.buffer.fill(2)
        two.buffer.fill(3)
        assert np.asarray(two.buffer.view(4)).tolist() == [3] * 4
    host.synchronize()


def test_synchronize_visits_every_stream() -> None:
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
    note_passed(device, backend, *streams)


@pytest.mark.parametrize("child", ["mapping", "array"])
def test_a_child_that_could_not_be_released_keeps_its_parent(child: str) -> None:
    device, backend = everything()
    memory = memory_of(device)
    _held = memory.map_buffer() if child == "mapping" else memory.map_mipmapped_array("R8_UNORM", (4, 4))
    failing(backend, "unmap_buffer" if child == "mapping" else "destroy_array")
    memory.close()
    device.drain()
    assert (backend.count(child), backend.count("memory")) == (1, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_whatever_fails_in_a_release_is_reported_and_masks_nothing(
    device: Device, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: shown.append(repr(args.exc_value)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory_of(device)  # the warning of a leak is an error, too
        gc.collect()
    device.drain()
    assert not backend.count("memory")

    def fail(memory: object) -> None:
        raise OSError("the driver is gone")

    monkeypatch.setattr(backend, "destroy_memory", fail)
    called: list[str] = []

    def bad() -> None:
        called.append("bad")
        raise KeyError("a callback's own")

    memory = memory_of(device)
    memory.on_released(bad)
    memory.on_released(lambda: called.append("good"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="the real error"), memory:
            raise ValueError("the real error")
    memory.close(timeout=LIMIT)
    assert called == ["bad", "good"]
    assert all(any(error in text for text in shown) for error in ("a callback's own", "the driver is gone"))


def test_a_stream_that_can_record_nothing_is_closed_all_the_same(device: Device, backend: FakeBackend) -> None:
    stream, memory = device.create_stream(), memory_of(device)
    backend.on_record = _fail
    stream.close(timeout=LIMIT)
    memory.close(timeout=LIMIT)
    assert (backend.count("stream"), backend.count("memory")) == (0, 0)


@pytest.mark.filterwarnings("ignore:releasing event .* failed")
def test_nothing_waits_for_what_can_never_be_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak was warned of once. What stands on it stays, and is no reason to wait, or to raise, later."""
    device, backend = everything()
    stream, semaphore = device.create_stream(), device.import_semaphore(gi.TimelineWin32(handle=8))
    semaphore.wait(stream, 1)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "destroy_event", _fail)
        stream.close()
    backend.arrive(semaphore._handle, 1)
    device.synchronize()
    assert backend.count("stream") == 1
    device.drain(timeout=LIMIT)
    device.synchronize(timeout=LIMIT)
    device.synchronize()
    semaphore.close(timeout=LIMIT)
    with pytest.raises(gi.ResourceBusyError, match="could not be released"):
        stream.close(timeout=LIMIT)


def test_a_capture_that_could_not_be_ended_leaves_no_stream_pending() -> None:
    backend = FakeGraphs()
    device, _ = fake_device(backend=backend)
    stream = device.create_stream()
    failing(backend, "end_capture")
    with pytest.raises(gi.DriverError), stream.capture():
        pass
    backend.at = lambda *_: None
    stream.close(timeout=LIMIT)
    memory_of(device).close(timeout=LIMIT)


def test_a_stream_that_is_captured_is_refused_not_ignored() -> None:
    """Its work of before the capture is still to come, and nothing can be ordered behind that."""
    device, backend = everything(Pinned())
    stream, gate, memory = device.create_stream(), semaphore_of(device), memory_of(device)
    buffer = memory.map_buffer()
    gate.wait(stream, 1)
    buffer.fill(7, stream=stream)
    target = bytearray(4096)
    with stream.capture():
        with pytest.raises(gi.InvalidArgumentError, match="before its"):
            buffer.copy_to_host(target)
        with pytest.raises(gi.GpuInteropError):
            buffer.view(4).__dlpack__(stream=64)
    note_passed(device, backend, stream, memory, gate)


def test_a_follow_that_fails_leaves_the_follower_out_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    device, backend = everything()
    with device.create_stream() as stream, device.create_stream() as follower:
        with stream.capture() as graph:
            with monkeypatch.context() as patch:
                patch.setattr(backend, "wait_event", _fail)
                with pytest.raises(gi.DriverError):
                    follower.wait_stream(stream)
            seen = [follower.capturing]
            follower.synchronize(LIMIT)
            follower.wait_stream(stream)
            seen.append(follower.capturing)
        assert [*seen, follower.capturing] == [False, True, False]
        graph.close()


def test_a_stream_does_not_fail_with_what_it_only_may_stand_behind() -> None:
    """Streams of others may wait for their device's default stream; whether these do, nobody can tell."""
    device, _ = everything()
    semaphore = semaphore_of(device)
    wait = Wait.of(semaphore.lifetime, 1)
    with device.create_stream() as behind, device.create_stream() as sure:
        first = device.wrap_stream(77)
        first._known_as().note(wait)
        wait.enqueued = True
        behind.wait_stream(device.wrap_stream(88))
        sure.wait_stream(first)
        assert [len(one._known_as().pending()) for one in (behind, sure)] == [1, 1]
        fail_wait(wait, gi.PeerError("gone"))
        behind._check_failure()
        with pytest.raises(gi.PeerError):
            sure._check_failure()
        behind.wait_stream(first.device.wrap_stream(88))


# -- messages and callbacks --------------------------------------------------------------------------------------------


def test_a_chain_of_callbacks_does_not_nest(host: Device) -> None:
    """Each closes the next: more of them than Python's stack has room for."""
    chain = [host.create_semaphore(gi.TimelineFd) for _ in range(1200)]
    told: list[int] = []

    def next_one(number: int) -> None:
        told.append(number)
        if number + 1 < len(chain):
            chain[number + 1].close(timeout=LIMIT)

    for number, semaphore in enumerate(chain):
        semaphore.on_released(functools.partial(next_one, number))
    chain[0].close(timeout=LIMIT)
    assert told == list(range(len(chain)))


def test_a_device_drains_what_is_its_own(device: Device) -> None:
    """An object of another device is not waited for, and what can never be released is not, on any."""
    other, theirs = fake_device()
    used = memory_of(other)
    held = used.map_buffer().hold()
    used.close()
    device.drain(timeout=LIMIT)
    with pytest.raises(gi.ResourceBusyError, match="1 exported array"):
        other.drain(timeout=0)
    del held
    other.drain(timeout=LIMIT)
    assert theirs.count("memory") == 0


def test_a_mapping_that_is_still_in_use_cannot_be_made_again(device: Device) -> None:
    with memory_of(device) as memory:
        buffer = memory.map_buffer()
        array = np.from_dlpack(buffer.view(4))
        buffer.close()
        with pytest.raises(gi.ResourceBusyError, match="still in use"):
            memory.map_buffer()
        del array
        gc.collect()
        memory.map_buffer().close()


def test_what_is_closed_behind_a_stream_that_hangs(device: Device, backend: FakeBackend) -> None:
    """A semaphore is abandoned when its time is over; a stream is waited for as if it were open."""
    stream, semaphore = device.create_stream(), device.import_semaphore(gi.TimelineWin32(handle=8))
    semaphore.wait(stream, 1)
    backend.blocked.add(stream.ptr)
    with pytest.raises(gi.ResourceBusyError):
        semaphore.close(timeout=0)
    assert backend.calls[-1][0] == "abandon"
    stream.close()
    with pytest.raises(gi.SemaphoreTimeoutError, match=r"Stream #\d+, which is closed, is not idle"):
        device.synchronize(timeout=0)
    backend.blocked.clear()
    device.synchronize(timeout=LIMIT)


def test_streams_0_and_1_are_one() -> None:
    device, backend = everything()
    gate, semaphore = semaphore_of(device), semaphore_of(device)
    null, legacy = device.wrap_stream(0), device.wrap_stream(1)
    gate.wait(null, 5)
    semaphore.signal(null, 5)
    with pytest.raises(gi.InvalidArgumentError, match="only grows"):
        semaphore.signal(legacy, 3)
    with pytest.raises(gi.SemaphoreTimeoutError, match="to reach 5"):
        legacy.synchronize(timeout=0)
    note_passed(device, backend, null, legacy, gate, semaphore)


@pytest.mark.parametrize("inside", [False, True], ids=["between", "in the middle of a transition"])
def test_a_signal_handler_closes_at_once_or_by_the_next_drain(host: Device, inside: bool) -> None:
    semaphore = host.create_semaphore(gi.TimelineFd)
    before = signal.signal(signal.SIGINT, lambda number, frame: semaphore.close())
    try:
        (locked(signal.raise_signal) if inside else signal.raise_signal)(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert semaphore.closed is not inside
    host.drain()
    assert semaphore.closed


# -- what lives how long -----------------------------------------------------------------------------------------------


def test_a_keepalive_lives_as_long_as_what_was_imported(device: Device) -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    memory = device.import_memory(gi.OpaqueWin32Kmt(handle=8, keepalive=owner), size=64)
    del owner
    gc.collect()
    assert alive() is not None
    memory.close(timeout=LIMIT)
    del memory
    gc.collect()
    assert alive() is None


def test_a_wrapped_streams_owner_outlives_its_events(device: Device) -> None:
    """Also where another wrapper, which names no owner, keeps the stream open."""
    owner = Owner()
    alive = weakref.ref(owner)
    stream = device.wrap_stream(owner)
    event = stream.record()
    with device.wrap_stream(64):
        stream.close()
        del owner, stream
        device.drain()
        gc.collect()
        assert alive() is not None
        del event
        device.drain()
        gc.collect()
        assert alive() is None


def test_a_collected_cycle_goes_children_first(device: Device, backend: FakeBackend) -> None:
    class Holder:
        memory: gi.ExternalMemory
        buffer: gi.Buffer
        me: Holder

    holder = Holder()
    holder.memory = memory_of(device)
    holder.buffer = holder.memory.map_buffer()
    holder.me = holder
    with pytest.warns(gi.LeakedResourceWarning):
        del holder
        gc.collect()
    device.drain()
    assert destroyed(backend) == ["mapping", "memory"]


def test_a_capsule_that_nobody_takes_destroys_no_error_and_no_memory(device: Device, backend: FakeBackend) -> None:
    memory = memory_of(device)
    view = memory.map_buffer().view(4, "bfloat16")  # NumPy has none, and says so after it took the capsule
    with pytest.raises((BufferError, RuntimeError), match=r"[Dd]type"):
        np.from_dlpack(view)
    capsule = memory.map_buffer().view(4).__dlpack__()
    memory.close()
    with pytest.raises(gi.ResourceBusyError, match="1 exported array"):
        memory.close(timeout=0)
    del capsule
    memory.close(timeout=LIMIT)
    assert not backend.count("memory")


def _import(device: Device) -> list[Resource]:
    memory = memory_of(device)
    return [memory.map_buffer(), memory]


KINDS: dict[str, Callable[[Device], list[Resource]]] = {
    "memory and buffer": _import,
    "allocation": lambda device: [allocation := device.allocate(4096), allocation.buffer],
    "semaphore": lambda device: [device.import_semaphore(gi.TimelineWin32(handle=8))],
    "own timeline": lambda device: [device.create_semaphore(gi.TimelineFd)],
    "stream": lambda device: [device.create_stream()],
    "wrapped stream": lambda device: [device.wrap_stream(64)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_closed_is_no_garbage(kind: str) -> None:
    """It goes with its last reference: a cycle would wait for a collection, which may come in the middle of a frame."""
    device, _ = fake_device(backend=FakeEverything())

    def use() -> list[weakref.ref[Resource]]:
        made = KINDS[kind](device)
        for one in made:
            one.close(timeout=LIMIT)
        return [weakref.ref(one) for one in made]

    use()  # what is made once
    for _ in range(2):  # a collection queues what other tests have dropped, a drain releases it
        gc.collect()
        device.drain()
    gc.disable()
    try:
        assert {ref() for ref in use()} == {None}
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert gc.garbage == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_semaphore_keeps_no_stream_that_is_gone() -> None:
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
    note_passed(device, backend, semaphore)


def test_a_stream_that_is_wrapped_anew_is_waited_for_again(device: Device, backend: FakeBackend) -> None:
    """By what a batch signals, though the semaphores had other streams since the batch last had this one."""
    one, two = semaphore_of(device), semaphore_of(device)
    batch = gi.SemaphoreBatch(one, two)
    batch.signal(device.wrap_stream(64), (1, 1))
    device.drain()
    with device.create_stream() as other:
        one.signal(other, 2)
        backend.blocked.add(64)
        batch.signal(device.wrap_stream(64), (3, 3))
        one.close()
        device.drain()
        assert backend.count("semaphore") == 2
        backend.blocked.clear()
        device.drain()
        assert backend.count("semaphore") == 1
    two.close()


def test_the_work_of_a_thread_that_has_ended_holds_releases_up() -> None:
    """Also once its own default stream is forgotten: the events behind that work tell of its end."""
    device, backend = everything()
    gate, other, third = (semaphore_of(device) for _ in range(3))
    stream = device.wrap_stream(2)
    elsewhere(lambda: gate.wait(stream, 1))
    device.streams.limit = 0  # each new stream has those of threads that have ended forgotten
    for value in (1, 2, 3):
        elsewhere(functools.partial(third.signal, stream, value))
    other.close()
    device.drain()
    assert (backend.count("semaphore"), backend.violations) == (3, [])
    note_passed(device, backend, gate, third)


@pytest.mark.parametrize("error", [gi.SemaphoreTimeoutError, MemoryError, KeyboardInterrupt])
def test_work_that_no_event_stands_behind_holds_what_it_uses(error: type[BaseException]) -> None:
    """Only its own thread can ask whether it is done."""
    device, backend = everything()
    stream, memory = device.wrap_stream(2), memory_of(device)
    buffer = memory.map_buffer()
    filled, closed = threading.Event(), threading.Event()

    def strike() -> None:
        backend.on_record = lambda: None
        raise error

    def work() -> None:
        backend.blocked.add(-threading.get_ident())
        backend.on_record = strike
        with contextlib.suppress(error):
            buffer.fill(7, stream=stream)
        filled.set()
        assert closed.wait(LIMIT)
        backend.blocked.clear()
        device.drain()
        assert not backend.count("mapping")

    with beside(work):
        assert filled.wait(LIMIT)
        memory.close()
        device.drain()
        held = (backend.count("mapping"), backend.violations)
        closed.set()
    assert held == (1, [])
    note_passed(device, backend)


def test_a_wait_is_not_over_before_an_event_stands_behind_it() -> None:
    """Another thread that synchronizes the device while the event is recorded waits for the one before."""
    device, backend = everything()
    gate, other = semaphore_of(device), semaphore_of(device)
    stream = device.wrap_stream(2)

    def look() -> None:
        backend.on_record = lambda: None
        with contextlib.suppress(gi.SemaphoreTimeoutError):
            elsewhere(lambda: device.synchronize(timeout=0.01))
        other.close()
        device.drain()

    def work() -> None:
        backend.on_record = look
        gate.wait(stream, 1)

    elsewhere(work)
    assert (backend.count("semaphore"), backend.violations) == (2, [])
    note_passed(device, backend, gate)


# -- cost --------------------------------------------------------------------------------------------------------------


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


def test_a_round_costs_the_same_however_many_streams_there_are() -> None:
    device, backend = everything(Counted())
    import_map_close(device)  # opens the device
    costs = {0: calls_of(backend, lambda: import_map_close(device))}
    streams: list[gi.Stream] = []
    for count in (1, 16, 64):
        streams += [device.create_stream() for _ in range(count - len(streams))]
        costs[count] = calls_of(backend, lambda: import_map_close(device))
    assert set(costs.values()) == {costs[0]}, costs
    note_passed(device, backend, *streams)


def test_a_wrapper_a_frame_leaves_nothing_behind(device: Device, backend: FakeBackend) -> None:
    with device.import_semaphore(gi.TimelineWin32(handle=8)) as semaphore:
        for frame in range(1, 200):
            semaphore.wait(device.wrap_stream(64), frame)
            semaphore.signal(device.wrap_stream(64), frame)
        assert len(semaphore.lifetime.uses) == 1
        assert len(device.streams.known()) == 1
        with pytest.raises(gi.InvalidArgumentError, match="only grows"):
            semaphore.signal(device.wrap_stream(64), 3)
    device.synchronize()
    assert backend.count("event") <= 2


def test_waits_that_stay_pending_are_not_asked_for_at_each_call() -> None:
    backend = FakeEverything()
    device, _ = fake_device(backend=backend)
    with device.create_stream() as stream, device.import_semaphore(gi.TimelineWin32(handle=8)) as semaphore:
        for value in range(1, 1001):
            semaphore.wait(stream, value)
        assert 1 <= backend.looks <= 10
        memory = memory_of(device)
        memory.map_buffer().close()  # it is blocked: each drain looks at the stream
        for value in range(1001, 1101):
            semaphore.wait(stream, value)
            device.drain()
        assert 1 <= backend.count("event") <= 10
        backend.arrive(semaphore._handle, 1100)
        memory.close(timeout=LIMIT)
        assert not stream._known_as().waits


@pytest.mark.filterwarnings("ignore:256 closed objects cannot be released")
def test_a_pipeline_that_is_never_idle_releases_where_it_synchronizes() -> None:
    """Two frames are always in flight, so what each closes is held, until the pipeline runs dry."""
    device, backend = everything()
    held: list[int] = []
    with device.create_stream() as stream, semaphore_of(device) as semaphore:
        for frame in range(1, 501):
            semaphore.wait(stream, frame)
            semaphore_of(device).close()
            backend.arrive(semaphore._handle, frame - 2 if frame < 500 else frame)
            held.append(backend.count("semaphore"))
        device.synchronize()
        assert max(held) > 256
        assert backend.count("semaphore") == 1


# -- exit and fork -----------------------------------------------------------------------------------------------------


def test_arrays_that_outlive_everything_do_not_crash_the_exit() -> None:
    code = """
import logging, os, sys
import numpy as np
import gpuinterop as gi
allocation = gi.get_backend("host").device().allocate(4096)
sys.late = np.from_dlpack(allocation.buffer.view(4))
logging.root.late = np.asarray(allocation.buffer.view(4))
logging.root.later = allocation.buffer.view(4).__dlpack__()
allocation.close()
"""
    assert ends_well(code) == ""


def test_the_exit_waits_for_work_and_not_for_arrays(
    device: Device, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_of(device)
    array = np.from_dlpack(memory.map_buffer().view(4))
    memory.close()
    monkeypatch.setattr(system, "EXIT_S", 1e9)  # for the array it would be there for ever
    monkeypatch.setattr(system, "_exit_began", [])
    monkeypatch.setattr(system, "end_threads", lambda: None)
    monkeypatch.setattr(release, "_exiting", False)  # as it is again afterwards
    release._drain_at_exit()
    assert backend.count("memory") == 1
    del array
    gc.collect()
    memory.close(timeout=LIMIT)


def test_the_exit_takes_two_seconds_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads are stuck, and wherever: each waits for what is left."""
    now = [100.0]

    class Stuck:
        def join(self, limit: float) -> None:
            now[0] += limit

    monkeypatch.setattr(system, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(system, "until", lambda condition, limit: Stuck().join(limit))
    monkeypatch.setattr(system, "_exit_began", [])
    monkeypatch.setattr(system, "_ending", False)
    monkeypatch.setattr(system, "_threads", {Stuck(): lambda: None, Stuck(): lambda: None})
    monkeypatch.setattr(release, "_exiting", False)
    system.end_threads()
    assert now[0] == 101.0, "the drain, which comes last, has a second left"
    release._drain_at_exit()
    assert now[0] == 102.0


_FORK = """
import os, signal, sys, threading, warnings
import gpuinterop as gi
from gpuinterop._core import lifetime, importing, discovery
from tests.core.fake import FakeEverything, fake_device
warnings.simplefilter("ignore")
backend = FakeEverything()
device, _ = fake_device(backend=backend)
memory = device.import_memory(gi.OpaqueWin32(handle=8), size=4096)
allocation = device.allocate(4096)
semaphore = device.create_semaphore(gi.TimelineFd)
stream = device.create_stream()
fresh, _ = fake_device(backend=FakeEverything())
inside, go_on, taken = threading.Event(), threading.Event(), threading.Event()
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
        go_on.wait(300)
found.at = at
thread = threading.Thread(target=call, daemon=True)
thread.start()
assert inside.wait(300)
importing._import_lock.acquire(blocking=False)
def hold():
    for lock in (discovery._lock, lifetime._lock):
        lock.acquire()
    taken.set()
    threading.Event().wait()
threading.Thread(target=hold).start()
assert taken.wait(300)
child = os.fork()
if not child:
    signal.alarm(300)
    for use in (call, memory.close, allocation.close, semaphore.close, stream.close, device.drain,
                lambda: fresh.create_stream(), lambda: device.import_memory(gi.OpaqueWin32(handle=8), size=64),
                lambda: gi.get_backend("host").device().allocate(4096).close(timeout=300)):
        try:
            use()
        except gi.ResourceClosedError as error:
            assert "fork" in str(error), error
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize(
    "name", ["map_buffer", "map_allocation", "open_device", "import_memory", "unmap_buffer", "wait_value"]
)
def test_a_child_does_not_wait_for_the_parents_threads(name: str) -> None:
    assert ends_well(_FORK, name) == "7"
