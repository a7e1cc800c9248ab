"""Another thread comes in exactly between two steps: each window here has let something through once."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.device import Device
from gpuinterop._core.graph import Graph
from gpuinterop._core.known_stream import CapturedError, KnownStream, Wait, fail_wait
from gpuinterop._core.memory import Buffer
from gpuinterop.bridge import Bridge, SemaphoreEndpoint
from gpuinterop.bridge._watcher import _Out, _Signal, _Waiting

from .fake import FakeEverything, fake_device, memory_of, semaphore_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* was dropped without close"),
]


@pytest.fixture
def fake() -> tuple[Device, FakeEverything]:
    backend = FakeEverything()
    device, _ = fake_device(backend=backend)
    return device, backend


def in_thread(call: Callable[[], object]) -> None:
    """Run it in another thread, and wait for its end."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    if problems:
        raise problems[0]


def once_behind(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: Callable[[], object],
    begun: Callable[[], bool] | None = None,
) -> list[threading.Thread]:  # fmt: skip
    """Let another thread come in behind the next call of a method: to its end, or until it has `begun`."""
    real = getattr(owner, name)
    threads: list[threading.Thread] = []

    def method(self: Any, *arguments: Any) -> Any:
        found = real(self, *arguments)
        monkeypatch.setattr(owner, name, real)
        if begun is None:
            in_thread(call)
        else:
            threads.append(threading.Thread(target=call))
            threads[0].start()
            assert system.until(begun, 20)
        return found

    monkeypatch.setattr(owner, name, method)
    return threads


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuinterop._core.graph._PATIENCE_S", 0.01)  # who is waited for stands in these tests


def test_a_capture_that_ends_behind_a_look_leaves_a_pending_wait_noted(
    fake: tuple[Device, FakeEverything], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, backend = fake
    stream, semaphore, memory = device.create_stream(), semaphore_of(device), memory_of(device)
    semaphore.wait(stream, 1)
    memory.map_buffer().fill(7, stream=stream)
    capture = stream.capture()
    graph = capture.__enter__()
    once_behind(monkeypatch, CapturedError, "__init__", lambda: capture.__exit__(None, None, None))
    memory.close()
    assert len(stream.known_as().pending()) == 1
    assert backend.count("mapping") == 1
    backend.arrive(semaphore.handle, 1)
    for one in (graph, memory, semaphore, stream):
        one.close(timeout=5)


def test_a_stream_that_is_wrapped_again_under_a_drain_is_waited_for(
    fake: tuple[Device, FakeEverything], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, backend = fake
    first, memory, again = device.wrap_stream(77), memory_of(device), list[gi.Stream]()
    once_behind(monkeypatch, KnownStream, "streams", lambda: again.append(device.wrap_stream(77)))
    first.close()
    backend.blocked.add(77)
    memory.map_buffer().fill(stream=again[0])
    memory.close()
    assert backend.count("mapping") == 1
    backend.blocked.clear()
    memory.close(timeout=5)


def test_a_wait_beside_the_end_of_a_capture_is_noted_or_refused(
    fake: tuple[Device, FakeEverything], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture's end stands until the wait has returned, which has read that it goes into the graph."""
    monkeypatch.setattr("gpuinterop._core.graph._PATIENCE_S", 20.0)
    device, backend = fake
    stream, semaphore = device.create_stream(), semaphore_of(device)
    capture = stream.capture()
    graph = capture.__enter__()
    threads = once_behind(
        monkeypatch, Graph, "hold", lambda: capture.__exit__(None, None, None), lambda: stream.known_as().graph is None
    )
    semaphore.wait(stream, 5)
    threads[0].join(20)
    assert not backend.waiting
    assert [step.values for step in graph.semaphores.waits] == [(5,)]
    for one in (graph, semaphore, stream):
        one.close(timeout=5)


def test_work_beside_the_beginning_of_a_capture_is_held_or_runs(
    fake: tuple[Device, FakeEverything], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture does not begin between the look at the stream and the call."""
    monkeypatch.setattr("gpuinterop._core.graph._PATIENCE_S", 20.0)
    device, backend = fake
    stream, memory = device.create_stream(), memory_of(device)
    buffer = memory.map_buffer()
    began = threading.Event()

    def capture() -> None:
        with stream.capture() as graph:
            began.set()
        graph.close()

    threads = once_behind(monkeypatch, Buffer, "use_on", capture, lambda: stream.known_as().captured)
    with pytest.raises(CapturedError):
        buffer.fill(stream=stream)
    threads[0].join(20)
    assert began.is_set()
    assert not [call for call in backend.calls if call[0] == "fill"]
    for one in (memory, stream):
        one.close(timeout=5)


def test_a_follow_that_fails_leaves_the_follower_out_of_the_capture(
    fake: tuple[Device, FakeEverything], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, backend = fake

    def fail(*_arguments: object) -> None:
        raise gi.DriverError("cuStreamWaitEvent", 1, "CUDA_ERROR_INVALID_VALUE")

    with device.create_stream() as stream, device.create_stream() as follower:
        with stream.capture() as graph:
            with monkeypatch.context() as patch:
                patch.setattr(backend, "wait_event", fail)
                with pytest.raises(gi.DriverError):
                    follower.wait_stream(stream)
            seen = [follower.capturing]
            follower.synchronize(5)
            follower.wait_stream(stream)
            seen.append(follower.capturing)
        assert [*seen, follower.capturing] == [False, True, False]
        graph.close()


def test_an_array_is_let_go_however_often_its_stream_is_wrapped(fake: tuple[Device, FakeEverything]) -> None:
    class Array(np.ndarray[Any, Any]): ...

    device, backend = fake
    buffer = memory_of(device).map_buffer()
    for _ in range(3):
        stream, array = device.wrap_stream(77), np.zeros(16, np.uint8).view(Array)
        seen = weakref.ref(array)
        backend.blocked.add(77)
        buffer.copy_from_host(array, stream=stream)
        del array
        backend.blocked.clear()
        stream.close()
        device.drain()
        assert seen() is None


def test_a_stream_does_not_fail_with_what_it_only_may_stand_behind(fake: tuple[Device, FakeEverything]) -> None:
    """Streams of others may wait for their device's default stream; whether these do, nobody can tell."""
    device, _ = fake
    semaphore = semaphore_of(device)
    wait = Wait.of(semaphore.lifetime, 1)
    with device.create_stream() as behind, device.create_stream() as sure:
        first = device.wrap_stream(77)
        first.known_as().note(wait)
        wait.enqueued = True
        behind.wait_stream(device.wrap_stream(88))
        sure.wait_stream(first)
        assert [len(one.known_as().pending()) for one in (behind, sure)] == [1, 1]
        fail_wait(wait, gi.PeerError("gone"))
        behind.check_failure()
        with pytest.raises(gi.PeerError):
            sure.check_failure()
        behind.wait_stream(first.device.wrap_stream(88))


def test_a_refused_timeout_leaves_an_allocation_as_it_is(fake: tuple[Device, FakeEverything]) -> None:
    device, _ = fake
    allocation = device.allocate(4096)
    pointer = allocation.buffer.ptr
    with pytest.raises(gi.ArgumentTypeError):
        allocation.close(timeout="x")  # type: ignore[arg-type]
    device.drain()
    assert (allocation.closed, allocation.buffer.ptr) == (False, pointer)
    allocation.close(timeout=5)


def test_two_threads_that_ask_one_view_for_its_stream_get_one(
    fake: tuple[Device, FakeEverything], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the stream that the first thread was given is dropped, or does not stand behind what used the bytes."""
    device, backend = fake
    buffer, users = memory_of(device).map_buffer(), [device.create_stream() for _ in range(2)]
    for user in users:
        buffer.fill(stream=user)
    view, theirs = buffer.view(16), list[int]()
    native = [user.known_as() for user in users]
    once_behind(monkeypatch, Device, "create_stream", lambda: theirs.append(view._behind(native)))
    assert [view._behind(native)] == theirs
    device.drain()
    behind = [call[2] for call in backend.calls if call[0] == "wait_event" and call[1][1] == theirs[0]]
    assert behind == [user.handle for user in users] * 2
    assert ("stream", theirs[0]) in backend.live


def test_a_release_is_told_when_all_threads_have_called_back(fake: tuple[Device, FakeEverything]) -> None:
    memory = memory_of(fake[0])
    memory.close(timeout=5)
    entered, go_on, told = threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        entered.set()
        assert go_on.wait(20)
        told.append("first")

    thread = threading.Thread(target=memory.on_released, args=(first,))
    thread.start()
    assert entered.wait(20)
    memory.on_released(lambda: told.append("second"))
    with pytest.raises(gi.ResourceBusyError):
        memory.close(timeout=0)
    go_on.set()
    memory.close(timeout=20)
    thread.join(20)
    assert told == ["second", "first"]


def test_callbacks_of_one_release_in_two_threads_may_close_it(fake: tuple[Device, FakeEverything]) -> None:
    """Each finds it released: neither waits for the other."""
    memory = memory_of(fake[0])
    memory.close(timeout=5)
    first, second = threading.Event(), threading.Event()

    def one() -> None:
        first.set()
        assert second.wait(20)
        memory.close(timeout=0)

    def other() -> None:
        second.set()
        memory.close(timeout=0)

    failed: list[str] = []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("sys.unraisablehook", lambda found: failed.append(str(found.exc_value)))
        thread = threading.Thread(target=memory.on_released, args=(one,))
        thread.start()
        assert first.wait(20)
        memory.on_released(other)
        thread.join(20)
    assert failed == []


class OfSeveralThreads(deque[Any]):
    """A deque as it is without the GIL: while one thread iterates, another appends. A copy is one step."""

    def __iter__(self) -> Iterator[Any]:
        for thing in super().__iter__():
            self.append(thing)
            yield thing

    def copy(self) -> Any:
        return deque(super().__iter__())


def test_the_watcher_looks_at_signals_that_others_append() -> None:
    stream: Any = None
    out = _Out(1, stream)
    out.pending = OfSeveralThreads(_Signal(value, number, stream) for value, number in ((5, 1), (6, 2), (7, 4)))
    assert [signal.value for signal in out.ready(3)] == [5, 6]


def test_the_watcher_looks_at_waits_that_others_append(host: Device) -> None:
    with host.create_semaphore(gi.TimelineFd) as own, Bridge(host) as bridge:
        lane = bridge.from_endpoint(SemaphoreEndpoint(own)).handle
        least, *_ = waits = [_Waiting(value, Wait.of(own.lifetime, value)) for value in (1, 3, 2)]
        lane._waits, lane._ordered = OfSeveralThreads(reversed(waits)), False
        assert lane._next() is least
        lane._waits.clear()
