"""Lifetime in the corners: whatever is still in use is not released, and whatever is not is, once, in order."""

import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core import drain
from gpuinterop._core.device import Device
from gpuinterop._core.lifetime import RELEASED
from gpuinterop._core.resource import Resource

from .fake import FakeBackend, FakeEverything, fake_device, memory_of


def destroyed(backend: FakeBackend) -> list[str]:
    return [call[1] for call in backend.calls if call[0] == "destroy"]


# -- streams that go before the memory ---------------------------------------------------------------------------


def test_a_stream_closed_after_the_memory_while_an_array_lived(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    memory, stream = memory_of(device), device.create_stream()
    array = np.from_dlpack(memory.map_buffer().view(4))
    memory.close()
    backend.blocked.add(stream.ptr)  # work on the array
    stream.close()
    del array
    gc.collect()
    device.drain()
    assert destroyed(backend) == []
    backend.blocked.clear()
    memory.close(timeout=5)
    device.synchronize()
    assert sorted(destroyed(backend)) == ["mapping", "memory", "stream"]
    assert destroyed(backend).index("mapping") < destroyed(backend).index("memory")


def test_a_stream_that_is_being_drained_still_counts(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    memory, stream = memory_of(device), device.create_stream()
    used = memory.map_buffer()
    used.fill(1, stream=stream)
    backend.blocked.add(stream.ptr)
    stream.close()

    def close() -> None:
        backend.on_is_done = lambda: None
        memory.close()

    backend.on_is_done = close  # another thread's close, just while this one looks at the stream's events
    device.drain()
    assert memory.closed
    device.drain()
    assert destroyed(backend) == []
    backend.blocked.clear()
    memory.close(timeout=5)


@pytest.mark.parametrize("drop", [False, True])
def test_a_wrapped_streams_work_is_waited_for(fake: tuple[Device, FakeBackend], drop: bool) -> None:
    device, backend = fake
    memory = memory_of(device)
    buffer = memory.map_buffer()
    stream = device.wrap_stream(64)
    buffer.fill(1, stream=stream)
    backend.blocked.add(64)
    if drop:
        del stream
        gc.collect()
    else:
        stream.close()
    memory.close()
    device.drain()
    assert destroyed(backend) == []
    backend.blocked.clear()
    memory.close(timeout=5)


def test_a_wrapper_a_frame_leaves_nothing_behind(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
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


# -- order -------------------------------------------------------------------------------------------------------


def test_a_collected_cycle_goes_children_first(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake

    class Holder:
        memory: gi.ExternalMemory
        buffer: gi.Buffer
        me: "Holder"

    holder = Holder()
    holder.memory = memory_of(device)
    holder.buffer = holder.memory.map_buffer()
    holder.me = holder
    with pytest.warns(gi.LeakedResourceWarning):
        del holder
        gc.collect()
    device.drain()
    assert destroyed(backend) == ["mapping", "memory"]


def test_a_range_is_not_mapped_again_because_its_buffer_was_dropped(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    with memory_of(device) as memory, device.create_stream() as stream:
        buffer = memory.map_buffer()
        buffer.fill(1, stream=stream)
        backend.blocked.add(stream.ptr)
        buffer.close()
        del buffer
        gc.collect()
        with pytest.raises(gi.ResourceBusyError, match="still in use"):
            memory.map_buffer()
        memory.close()
        device.drain()
        assert destroyed(backend) == []
        backend.blocked.clear()
        memory.close(timeout=5)
        assert destroyed(backend) == ["mapping", "memory"]


def test_what_a_callback_closes_cannot_be_mapped(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    memory, other = memory_of(device), memory_of(device)
    with device.create_stream() as stream:
        used = other.map_buffer()
        used.fill(1, stream=stream)
        backend.blocked.add(stream.ptr)
        other.on_released(memory.close)
        other.close()
        backend.blocked.clear()
        with pytest.raises(gi.ResourceClosedError):
            memory.map_buffer()  # drains, and so closes itself
    assert len([call for call in backend.calls if call[0] == "map_buffer"]) == 1, "only the other's"


def test_memory_closed_while_it_is_being_mapped(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    memory = memory_of(device)
    backend.on_map = memory.close  # another thread's, while the driver maps
    with pytest.raises(gi.ResourceClosedError, match="ExternalMemory"):
        memory.map_buffer()
    memory.close(timeout=5)
    assert destroyed(backend) == ["mapping", "memory"]


def test_mapping_and_closing_at_once_never_leaves_an_open_buffer(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    for _ in range(300):
        memory = memory_of(device)
        buffers: list[gi.Buffer] = []
        start = threading.Barrier(2)

        def map_it(
            memory: gi.ExternalMemory = memory, buffers: list[gi.Buffer] = buffers, start: threading.Barrier = start
        ) -> None:
            start.wait(30)
            try:
                buffers.append(memory.map_buffer())
            except gi.ResourceClosedError:
                return

        thread = threading.Thread(target=map_it)
        thread.start()
        start.wait(30)
        memory.close()
        thread.join(30)
        assert all(buffer.closed for buffer in buffers)
        memory.close(timeout=5)
    assert not backend.count("memory")
    assert not backend.count("mapping")


# -- arrays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [np.from_dlpack, np.asarray])
def test_a_buffer_closed_while_an_array_is_made(
    fake: tuple[Device, FakeBackend], protocol: Callable[[object], np.ndarray[tuple[int], np.dtype[np.uint8]]]
) -> None:
    device, backend = fake
    memory = memory_of(device)
    with device.create_stream() as stream:
        buffer = memory.map_buffer()
        buffer.fill(7, stream=stream)
        backend.on_synchronize = memory.close
        array = protocol(buffer.view(4))
        backend.on_synchronize = lambda: None
        assert memory.closed
        device.drain()
        assert backend.count("mapping") == 1
        assert array.tolist() == [7] * 4
        del array
        gc.collect()
        memory.close(timeout=5)


def test_a_capsule_that_nobody_takes_destroys_no_error_and_no_memory(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    memory = memory_of(device)
    view = memory.map_buffer().view(4, "bfloat16")  # NumPy has none, and says so after it took the capsule
    with pytest.raises((BufferError, RuntimeError), match=r"[Dd]type"):
        np.from_dlpack(view)
    capsule = memory.map_buffer().view(4).__dlpack__()
    memory.close()
    with pytest.raises(gi.ResourceBusyError, match="1 exported array"):
        memory.close(timeout=0)
    del capsule
    memory.close(timeout=5)
    assert not backend.count("memory")


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
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_exit_waits_for_work_and_not_for_arrays(
    fake: tuple[Device, FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, backend = fake
    memory = memory_of(device)
    array = np.from_dlpack(memory.map_buffer().view(4))
    memory.close()
    monkeypatch.setattr(system, "EXIT_S", 1e9)  # for the array it would be there for ever
    monkeypatch.setattr(system, "_exit_began", [])
    monkeypatch.setattr(system, "end_threads", lambda: None)
    monkeypatch.setattr(drain, "_exiting", False)  # as it is again afterwards
    drain._drain_at_exit()
    assert backend.count("memory") == 1
    del array
    gc.collect()
    memory.close(timeout=5)


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
    monkeypatch.setattr(drain, "_exiting", False)
    system.end_threads()
    assert now[0] == 101.0, "the drain, which comes last, has a second left"
    drain._drain_at_exit()
    assert now[0] == 102.0


# -- copies without a stream ---------------------------------------------------------------------------------------


def test_an_interrupted_copy_keeps_the_host_memory(fake: tuple[Device, FakeBackend]) -> None:
    class Array(np.ndarray[Any, Any]): ...

    device, backend = fake
    with memory_of(device) as memory:
        buffer = memory.map_buffer()

        def interrupt() -> None:
            backend.blocked.update(native[1] for native in backend.live if native[0] == "stream")
            raise KeyboardInterrupt

        backend.on_synchronize = interrupt
        target = np.zeros(16, "uint8").view(Array)
        kept = weakref.ref(target)
        with pytest.raises(KeyboardInterrupt):
            buffer.copy_to_host(target)
        backend.on_synchronize = lambda: None
        del target
        assert kept() is not None  # the copy is still to come
        buffer.fill(1)  # on another stream than the one that is stuck
        backend.blocked.clear()
    device.synchronize()
    assert kept() is None


def test_a_failed_stream_fails_its_own_buffers_copies_only(host: Device) -> None:
    with host.allocate(4096) as one, host.allocate(4096) as two, host.create_semaphore(gi.TimelineFd) as semaphore:
        with host.create_stream() as stream:
            semaphore.wait(stream, 1, timeout=0)
            one.buffer.fill(1, stream=stream)
            with pytest.raises(gi.SemaphoreTimeoutError):
                one.buffer.fill(2)
        two.buffer.fill(3)
        assert np.asarray(two.buffer.view(4)).tolist() == [3] * 4
    host.synchronize()


def test_a_copy_that_waits_holds_up_no_other(host: Device) -> None:
    with host.allocate(4096) as one, host.allocate(4096) as two, host.create_semaphore(gi.TimelineFd) as semaphore:
        stream = host.create_stream()
        semaphore.wait(stream, 1)
        one.buffer.fill(1, stream=stream)
        target = bytearray(4)
        thread = threading.Thread(target=lambda: one.buffer.copy_to_host(target))
        thread.start()
        two.buffer.fill(2)
        semaphore.host_signal(1)
        thread.join(60)
        assert not thread.is_alive()
        assert bytes(target) == bytes([1] * 4)
        stream.close()


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_whatever_fails_in_a_release_is_reported_and_masks_nothing(
    fake: tuple[Device, FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, backend = fake
    shown: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: shown.append(repr(args.exc_value)))

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
    memory.close(timeout=5)
    assert called == ["bad", "good"]
    assert any("a callback's own" in text for text in shown)
    assert any("the driver is gone" in text for text in shown)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_dropping_releases_also_when_warnings_are_errors(
    fake: tuple[Device, FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, backend = fake
    monkeypatch.setattr(sys, "unraisablehook", lambda args: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory_of(device)
        gc.collect()
    device.drain()
    assert not backend.count("memory")


def test_a_stream_that_can_record_nothing_is_closed_all_the_same(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake

    def fail() -> None:
        raise gi.DriverError("cuEventRecord", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")

    stream, memory = device.create_stream(), memory_of(device)
    backend.on_record = fail
    stream.close(timeout=5)
    memory.close(timeout=5)
    assert not backend.count("stream")
    assert not backend.count("memory")


def test_synchronize_does_not_forget_closed_streams(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    stream = device.create_stream()
    backend.blocked.add(stream.ptr)
    stream.close()
    with pytest.raises(gi.SemaphoreTimeoutError, match=r"Stream #\d+, which is closed, is not idle"):
        device.synchronize(timeout=0)
    backend.blocked.clear()
    device.synchronize(timeout=5)


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
            one.close(timeout=5)
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
        backend.arrive(semaphore.handle, 1100)
        memory.close(timeout=5)
        assert not stream.known_as().waits


@pytest.mark.filterwarnings("ignore:releasing event .* failed")
def test_nothing_waits_for_what_can_never_be_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak was warned of once. What stands on it stays, and is no reason to wait, or to raise, later."""

    def fail(_event: object) -> None:
        raise gi.DriverError("cuEventDestroy", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")

    backend = FakeEverything()
    device, _ = fake_device(backend=backend)
    stream, semaphore = device.create_stream(), device.import_semaphore(gi.TimelineWin32(handle=8))
    semaphore.wait(stream, 1)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "destroy_event", fail)
        stream.close()
    backend.arrive(semaphore.handle, 1)
    device.synchronize()
    assert backend.count("stream") == 1
    device.drain(timeout=5)
    device.synchronize(timeout=5)
    device.synchronize()
    semaphore.close(timeout=5)
    with pytest.raises(gi.ResourceBusyError, match="could not be released"):
        stream.close(timeout=5)


def test_closing_from_many_threads_while_streams_come_and_go(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    errors: list[BaseException] = []
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            device.create_stream().close()

    def close_memory() -> None:
        for _ in range(300):
            seen: list[bool] = []
            memory = memory_of(device)
            memory.on_released(lambda seen=seen, memory=memory: seen.append(memory.lifetime.state is RELEASED))  # type: ignore[misc]
            memory.close(timeout=30)
            if seen != [True]:
                errors.append(AssertionError(seen))

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    churner = threading.Thread(target=run, args=(churn,))
    closers = [threading.Thread(target=run, args=(close_memory,)) for _ in range(3)]
    for thread in [churner, *closers]:
        thread.start()
    for thread in closers:
        thread.join(100)
    stop.set()
    churner.join(30)
    assert not errors
    device.synchronize()
    assert not backend.count("memory")


def test_an_allocation_is_mapped_once_for_all_threads(host: Device) -> None:
    for _ in range(100):
        with host.allocate(4096) as allocation:
            found: list[gi.Buffer] = []
            start = threading.Barrier(4)

            def look(
                allocation: gi.Allocation = allocation,
                found: list[gi.Buffer] = found,
                start: threading.Barrier = start,
            ) -> None:
                start.wait(30)
                found.append(allocation.buffer)

            threads = [threading.Thread(target=look) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert len({id(buffer) for buffer in found}) == 1


# -- closing semaphores ----------------------------------------------------------------------------------------------


def test_close_lets_a_streams_wait_go_on_and_a_timed_one_cancels_it(host: Device) -> None:
    semaphore = host.create_semaphore(gi.TimelineFd)
    with semaphore.export() as handle, host.import_semaphore(handle) as peer, host.create_stream() as stream:
        semaphore.wait(stream, 1)
        semaphore.close()
        assert not stream.query()
        peer.host_signal(1)
        stream.synchronize(timeout=30)
    stuck = host.create_semaphore(gi.TimelineFd)
    with host.create_stream() as stream:
        stuck.wait(stream, 1)
        with pytest.raises(gi.ResourceBusyError):
            stuck.close(timeout=0)
        with pytest.raises(gi.ResourceClosedError, match="timeline"):
            stream.synchronize(timeout=30)


def test_close_cancels_a_thread_that_waits(host: Device) -> None:
    semaphore = host.create_semaphore(gi.TimelineFd)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            semaphore.host_wait(1)
        except gi.GpuInteropError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not semaphore.lifetime.calls.copy():
        os.sched_yield()
    semaphore.close()
    thread.join(60)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [gi.ResourceClosedError]
    semaphore.close(timeout=5)


# -- fork ------------------------------------------------------------------------------------------------------------


def test_a_child_imports_and_closes_whatever_the_parents_threads_were_at() -> None:
    code = """
import os, threading, warnings
import gpuinterop as gi
from gpuinterop._core import monitor, ownership

warnings.simplefilter("ignore")  # newer Pythons warn of fork() beside threads: that is the point here
device = gi.get_backend("host").device()
stream = device.create_stream()
semaphore = device.create_semaphore(gi.TimelineFd)
semaphore.wait(stream, 1)
pending = device.allocate(4096)
pending.buffer.fill(1, stream=stream)
pending.close()
allocation = device.allocate(4096)
handle = allocation.export()
ownership._import_lock.acquire()
taken = threading.Event()
threading.Thread(target=lambda: (monitor._lock.acquire(), taken.set(), threading.Event().wait()), daemon=True).start()
taken.wait()
child = os.fork()
if not child:
    for use in (allocation.export, stream.query, lambda: semaphore.host_signal(1), lambda: allocation.buffer):
        try:
            use()
        except gi.ResourceClosedError as error:
            assert "before the fork" in str(error), error
        else:
            os._exit(8)
    with device.import_allocation(handle, size=4096) as mine:
        mine.buffer.fill(1)
    mine.close(timeout=30)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.strip() == "7", result.stderr


class Owner:
    """Of a stream of somebody's, who may keep other things as well."""

    array: object = None

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 64


def test_a_wrapped_streams_owner_outlives_what_was_recorded_there(fake: tuple[Device, FakeBackend]) -> None:
    """HIP looks at the stream of an event that it is asked for, also when all work is done."""
    device, backend = fake
    owner = Owner()
    alive = weakref.ref(owner)
    memory = memory_of(device)
    stream = device.wrap_stream(owner)
    used = memory.map_buffer()
    used.fill(1, stream=stream)
    backend.blocked.add(64)
    memory.close()  # it records there
    looks: list[bool] = []

    def look() -> None:
        looks.append(alive() is not None)
        if len(looks) == 2:  # the memory's event was not done yet; that of the stream, which comes next, is
            backend.blocked.clear()

    stream.close()
    del owner, stream
    backend.on_is_done = look
    memory.close(timeout=5)
    assert looks, "nothing was recorded there"
    assert all(looks), "an event was asked for after its stream's owner was gone"
    gc.collect()
    assert alive() is None


def test_an_owner_that_keeps_an_array_of_the_memory_is_let_go(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    owner = Owner()
    alive = weakref.ref(owner)
    memory = memory_of(device)
    owner.array = np.from_dlpack(memory.map_buffer().view(4))
    with device.wrap_stream(owner) as stream:
        memory.close()
    del owner, stream
    device.drain()
    gc.collect()
    device.drain()
    assert alive() is None
    assert (backend.count("mapping"), backend.count("memory")) == (0, 0)
