"""Streams of ours, streams of others, events."""

import asyncio
import ctypes
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop._core.lifetime import Lifetime, State, alive
from gpuinterop._core.stream import check_stream
from gpuinterop._core.streams import KnownStream, Wait, fail_wait, order
from gpuinterop.backend import DriverHandle
from tests.beside import elsewhere
from tests.limits import LIMIT

from .fake import FakeBackend, FakeDriver, FakeEverything, fake_device, memory_of, semaphore_of


class Torch:
    cuda_stream = 64


class Default:
    cuda_stream = 0

    def __init__(self, index: int) -> None:
        self.device = SimpleNamespace(index=index)


class CuPy:
    ptr = 80


class Protocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 96)


class Numba:
    handle = ctypes.c_void_p(104)

    def __int__(self) -> int:
        return 104


class NewerProtocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (7, 96)


def test_other_libraries_streams_are_understood_and_kept_alive(device: gi.Device, backend: FakeBackend) -> None:
    for foreign, pointer in ((Torch(), 64), (CuPy(), 80), (Protocol(), 96), (Numba(), 104), (0, 0), (112, 112)):
        stream = device.wrap_stream(foreign)
        assert stream.ptr == pointer
        assert stream.lifetime.keep in (foreign, None)
        stream.close()
    assert not [call for call in backend.calls if call == ("destroy", "stream")]
    with device.create_stream() as ours:
        assert device.wrap_stream(ours) is ours
        with pytest.raises(gi.InvalidArgumentError, match="belongs to"):
            fake_device()[0].wrap_stream(ours)


def test_the_last_stream_of_another_library_is_remembered(backend: FakeBackend) -> None:
    """By its pointer, if the object owns it; a number, or a wrapper of one, may be another stream by then."""
    device, _ = fake_device(dlpack=(2, 0), backend=backend)
    Owner = type("Stream", (Torch,), {"__module__": "torch.cuda.streams"})
    first = check_stream(device, Owner())
    assert check_stream(device, Owner()) is first
    assert check_stream(device, CuPy()) is not check_stream(device, CuPy())
    assert first.lifetime.keep is not None
    assert check_stream(device, CuPy()).ptr == 80
    assert check_stream(device, 112) is not check_stream(device, 112)
    default = check_stream(device, 0)
    assert check_stream(device, Default(0)) is default
    with pytest.raises(gi.InvalidArgumentError, match="device 1"):
        check_stream(device, Default(1))

    for others in (False, True):  # a failure is told once, by whatever wrapper
        wrapper = check_stream(device, Owner())
        (wrapper.known or wrapper._known_as()).fail(gi.PeerError("died"))
        with pytest.raises(gi.PeerError, match="died"):
            check_stream(device, Owner())
        if others:
            device.wrap_stream(Owner())
        assert check_stream(device, Owner()) is not wrapper


@pytest.mark.parametrize("bad", [None, True, "stream", -1, object(), NewerProtocol(), np.zeros(1)])
def test_what_is_no_stream_is_refused(device: gi.Device, bad: object) -> None:
    with pytest.raises(gi.InvalidArgumentError, match=r"^stream:"):
        device.wrap_stream(bad)


def test_cuda_stream_protocol_only_where_streams_are_cudas() -> None:
    device, _ = fake_device(dlpack=(2, 0))
    with device.create_stream() as stream:
        assert stream.__cuda_stream__() == (0, stream.ptr)
    host, _ = fake_device()
    with host.create_stream() as stream, pytest.raises(gi.InvalidArgumentError):
        stream.__cuda_stream__()


async def until_done(event: gi.Event) -> str:
    await event
    return "done"


async def watch(event: gi.Event, backend: FakeBackend) -> str:
    task = asyncio.ensure_future(until_done(event))
    await asyncio.sleep(0)
    backend.blocked.clear()
    return await task


def test_events_are_done_waited_for_awaited_and_freed(device: gi.Device, backend: FakeBackend) -> None:
    with device.create_stream() as stream:
        event = stream.record()
        backend.blocked.add(stream.ptr)
        assert not event.done
        assert not stream.query()
        with pytest.raises(gi.SemaphoreTimeoutError, match="did not reach"):
            event.wait(timeout=0)

        assert asyncio.run(asyncio.wait_for(watch(event, backend), LIMIT)) == "done"
        event.wait()
        del event
    device.synchronize()
    assert not backend.count("event")


def test_wait_stream_orders_behind_the_others_work(device: gi.Device, backend: FakeBackend) -> None:
    other_device, _ = fake_device()
    with device.create_stream() as one, device.create_stream() as two, other_device.create_stream() as far:
        one.wait_stream(two)
        assert backend.calls[-1] == ("wait_event", one._handle, two._handle)
        count = len(backend.calls)
        one.wait_stream(one)
        with pytest.raises(gi.InvalidArgumentError, match="another backend"):
            one.wait_stream(far)
        with pytest.raises(gi.ArgumentTypeError):
            one.wait_stream("two")
        assert len(backend.calls) == count


class Blocking(FakeBackend):
    """Its unmaps wait for the whole device."""

    releases_block = True

    def __init__(self) -> None:
        super().__init__()
        self.on_wait_event: Callable[[], None] = lambda: None

    def is_idle(self, stream: DriverHandle) -> bool:
        return stream[1] not in self.blocked

    def wait_event(self, stream: DriverHandle, event: DriverHandle) -> None:
        super().wait_event(stream, event)
        self.on_wait_event()


def test_no_release_blocks_behind_a_wait_that_another_devices_stream_hands_on() -> None:
    """From the moment on when the driver has it: the wait itself is the other device's."""
    backend = Blocking()
    device, peer = (fake_device(backend=backend)[0] for _ in range(2))
    mine, theirs = device.create_stream(), peer.create_stream()
    memory = device.import_memory(gi.OpaqueWin32(handle=8), size=64)
    buffer = memory.map_buffer()
    buffer.fill(1, stream=mine)
    backend.blocked.update({mine.ptr, theirs.ptr})
    buffer.close()  # goes when what `mine` has done so far is seen as done
    pending(theirs)

    def look() -> None:
        backend.blocked.remove(mine.ptr)
        device.drain()
        backend.blocked.add(mine.ptr)

    backend.on_wait_event = look
    mine.wait_stream(theirs)
    device.drain()
    assert backend.count("mapping") == 1
    backend.blocked.clear()
    for one in (buffer, memory, mine, theirs):
        one.close(timeout=LIMIT)
    assert not backend.live


@pytest.mark.parametrize("habit", ["holds_gil", "synchronize_blocks_others"])
def test_a_driver_is_polled_where_blocking_in_it_stops_others(habit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, backend = fake_device()
    monkeypatch.setattr(type(backend), habit, True)
    with device.create_stream() as stream:
        stream.synchronize()
        assert not [call for call in backend.calls if call[0] == "synchronize"]


def told(call: Callable[[], object]) -> bool:
    try:
        call()
    except gi.PeerError:
        return True
    return False


def test_a_failed_stream_says_so_wherever_it_is_used(device: gi.Device) -> None:
    with device.create_stream() as failed, device.create_stream() as other:
        failed._known_as().fail(gi.PeerError("gone"))
        calls = (
            failed.synchronize,
            failed.query,
            failed.record,
            lambda: failed.wait_stream(other),
            lambda: other.wait_stream(failed),
        )
        assert [told(call) for call in calls] == [True] * len(calls)
        assert not told(other.synchronize)


def test_the_default_streams_of_threads_that_have_ended_do_not_pile_up() -> None:
    """Threads that come one after the other have the same number; a few hundred streams are remembered."""
    device, _ = fake_device(backend=FakeEverything())
    with device.create_semaphore(gi.TimelineFd) as semaphore, device.wrap_stream(2) as stream:
        before = len(alive())
        for value in range(1, 801):
            elsewhere(semaphore.signal, stream, value)
        device.drain()
        assert len(alive()) - before < 400


def pending(stream: gi.Stream) -> Wait:
    """A wait that was enqueued, and that nobody has signalled."""
    semaphore = Lifetime("a semaphore", lambda _: None)
    semaphore.state = State.LIVE
    wait = Wait.of(semaphore, 1)
    stream._known_as().note(wait)
    wait.enqueued = True
    return wait


def test_who_was_ordered_behind_a_wait_fails_with_it(device: gi.Device, backend: FakeBackend) -> None:
    """By the native streams: wrappers come and go. Not one that was ordered behind what came before it."""
    with device.create_stream() as waiting, device.create_stream() as before, device.create_stream() as behind:
        before.wait_stream(waiting)
        wait = pending(waiting)
        backend.blocked.update({waiting.ptr, behind.ptr})
        for _ in range(1000):
            behind.wait_stream(device.wrap_stream(waiting.ptr))
        assert [one.origin for one in behind._known_as().waits] == [wait], "it is noted once"
        first = behind._known_as().waits[0].number
        fail_wait(wait, gi.PeerError("gone"))
        assert [told(stream.record) for stream in (waiting, before, behind)] == [True, False, True]
        assert behind._known_as().is_void(first)
        assert not behind._known_as().is_void(first - 1), "what it was given before is right"
        assert not behind._known_as().is_void(next(order)), "and what it is given from now on"
        backend.blocked.clear()


def test_who_is_ordered_behind_a_wait_while_others_are_told_fails_too(
    device: gi.Device, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note of a wait takes no lock: it may come when the list of those that are told is made."""
    with device.create_stream() as waiting, device.create_stream() as late:
        wait, fail = pending(waiting), KnownStream.fail
        backend.blocked.add(waiting.ptr)

        def fail_late(stream: KnownStream, error: gi.GpuInteropError) -> None:
            monkeypatch.setattr(KnownStream, "fail", fail)
            late.wait_stream(waiting)
            stream.fail(error)

        monkeypatch.setattr(KnownStream, "fail", fail_late)
        fail_wait(wait, gi.PeerError("gone"))
        assert [told(stream.record) for stream in (waiting, late)] == [True, True]
        backend.blocked.clear()


def test_an_event_tells_other_threads_of_the_stream_that_it_is_of() -> None:
    """A wrapper of 2 stands for a stream of each thread's own; its event does not, and one failure is not all's."""
    device, _ = fake_device(backend=FakeEverything())
    stream, events = device.wrap_stream(2), list[gi.Event]()

    def fail() -> None:
        wait = pending(stream)
        events.append(stream.record())
        fail_wait(wait, gi.PeerError("gone"))
        assert told(stream.record)

    elsewhere(fail)
    assert [told(stream.record), told(lambda: events[0].done)] == [False, True]


def test_an_event_that_is_late_names_what_its_stream_waits_for_in_other_threads_too() -> None:
    backend = FakeDriver()
    device, _ = fake_device(backend=backend)
    stream, events = device.wrap_stream(2), list[gi.Event]()
    with semaphore_of(device) as semaphore:

        def record() -> None:
            semaphore.wait(stream, 1)
            events.append(stream.record())

        elsewhere(record)
        with pytest.raises(gi.SemaphoreTimeoutError, match=f"waiting for {semaphore.label} to reach 1.*host_signal"):
            events[0].wait(timeout=0)
        backend.arrive(semaphore._handle, 1)
        events[0].wait(timeout=0)


def test_a_time_out_names_no_wait_that_an_event_shows_to_have_passed() -> None:
    backend = FakeDriver()
    device, _ = fake_device(backend=backend)
    with device.create_stream() as stream, semaphore_of(device) as past, semaphore_of(device) as awaited:
        past.wait(stream, 5)
        event = stream.record()
        backend.arrive(past._handle, 5)
        awaited.wait(stream, 77)
        with pytest.raises(gi.SemaphoreTimeoutError, match=f"waiting for {awaited.label} to reach 77[.]"):
            stream.synchronize(timeout=0)
        assert event.done
        backend.arrive(awaited._handle, 77)


def test_a_copy_behind_a_wait_that_fails_leaves_its_stream_to_no_other(device: gi.Device, backend: FakeBackend) -> None:
    """The stream of ours that it was on has failed; the next copy, of other bytes, has another."""
    with device.create_stream() as waiting, memory_of(device) as first, memory_of(device) as second:
        wait, buffer, other = pending(waiting), first.map_buffer(), second.map_buffer()
        buffer.fill(1, stream=waiting)
        backend.on_synchronize = lambda: fail_wait(wait, gi.PeerError("gone"))
        assert told(lambda: buffer.fill(2))
        backend.on_synchronize = lambda: None
        assert not told(lambda: other.fill(3))


@pytest.mark.parametrize("take", [np.asarray, np.from_dlpack])
def test_the_host_gets_no_array_of_work_that_fails_while_it_waits(
    device: gi.Device, backend: FakeBackend, take: Callable[[object], object]
) -> None:
    """When the call began the stream had not failed."""
    with device.create_stream() as waiting, memory_of(device) as memory:
        wait, buffer = pending(waiting), memory.map_buffer()
        buffer.fill(1, stream=waiting)
        backend.on_synchronize = lambda: fail_wait(wait, gi.PeerError("gone"))
        assert told(lambda: take(buffer.view(4)))


def test_a_blocking_stream_passes_on_what_it_waits_for_behind_the_default_stream(device: gi.Device) -> None:
    """Another library's stream may stand behind its device's default stream; one of ours never does."""
    with device.create_stream() as ours, device.create_stream() as behind, device.create_stream() as aside:
        wait = pending(device.wrap_stream(0))
        behind.wait_stream(device.wrap_stream(64))
        aside.wait_stream(ours)
        assert [one.origin for one in behind._known_as().pending()] == [wait]
        assert aside._known_as().pending() == []


def test_a_wait_that_is_inherited_twice_is_noted_until_the_second_event() -> None:
    """The first event may have been recorded before the wait was enqueued, and is passed when the second is not."""
    backend = FakeEverything()
    device, _ = fake_device(backend=backend)
    with device.create_stream() as first, device.create_stream() as behind:
        semaphore = device.import_semaphore(gi.TimelineWin32(handle=8))
        backend.on_wait = lambda: behind.wait_stream(first)  # the wait is noted, and not enqueued
        semaphore.wait(first, 1)

        def at(call: str, place: str, handles: object) -> None:
            if (call, place) == ("wait_event", "start"):
                assert behind.query()  # and what it was behind the first time has passed

        backend.at = at
        behind.wait_stream(first)
        assert not behind.query()
        assert [str(wait) for wait in behind._known_as().pending()] == [f"{semaphore.label} to reach 1"]
        backend.arrive(semaphore._handle, 1)
        assert behind.query()
        semaphore.close(timeout=LIMIT)


def test_a_wait_that_is_done_is_nobodys_any_more(device: gi.Device, backend: FakeBackend) -> None:
    with device.create_stream() as waiting, device.create_stream() as behind:
        wait = pending(waiting)
        backend.blocked.add(waiting.ptr)
        assert not waiting.query()
        assert str(wait) in waiting._known_as().waiting_for()
        backend.blocked.clear()
        assert waiting.query()
        behind.wait_stream(waiting)
        assert not behind._known_as().waits
        fail_wait(wait, gi.PeerError("gone"))
        assert not told(waiting.record)


def test_a_failure_waits_for_the_next_wrapper_until_somebody_was_told(device: gi.Device, backend: FakeBackend) -> None:
    first, other = device.wrap_stream(64), device.wrap_stream(80)
    first._known_as().fail(gi.PeerError("gone"))
    first.close()
    device.drain()
    second = device.wrap_stream(64)
    assert told(second.record)
    assert told(second.synchronize), "the first failure stays"
    third = device.wrap_stream(64)
    assert not told(third.synchronize), "the application knows"
    assert told(second.synchronize)
    assert not told(other.synchronize)
    number = 1 << 20  # what the next stream will be numbered
    stale = device.wrap_stream(number)
    stale._known_as().fail(gi.PeerError("of a stream that is gone"))
    stale.close()
    device.drain()
    backend._serial = itertools.count(number)
    with device.create_stream() as ours:
        assert ours.ptr == number
        assert not told(ours.synchronize)


def test_the_priority_is_the_users(device: gi.Device, backend: FakeBackend) -> None:
    device.create_stream().close()
    device.create_stream(high_priority=True).close()
    assert [call[1] for call in backend.calls if call[0] == "create_stream"] == [False, True]
