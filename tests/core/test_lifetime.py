"""close() ends use at once; the native release waits for pending work and exported arrays."""

import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop._core.lifetime import count_alive

from .fake import FakeBackend, fake_device, memory_of, semaphore_of


def test_pending_work_holds_the_release_back(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    with device.create_stream() as stream:
        backend.blocked.add(stream.ptr)
        memory = memory_of(device)
        buffer = memory.map_buffer()
        buffer.fill(1, stream=stream)
        memory.close()
        assert memory.closed
        assert buffer.closed
        assert backend.count("memory") == backend.count("mapping") == 1
        with pytest.raises(gi.ResourceBusyError, match="pending"):
            memory.close(timeout=0)
        backend.blocked.clear()
        device.synchronize()
        assert backend.count("memory") == backend.count("mapping") == 0
    unmapped, destroyed = [call[1] for call in backend.calls if call[0] == "destroy"][:2]
    assert (unmapped, destroyed) == ("mapping", "memory")


def test_the_last_exported_array_releases_the_mapping(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    memory = memory_of(device)
    buffer = memory.map_buffer()
    through_dlpack = np.from_dlpack(buffer.view((4,), "float32"))
    through_interface = np.asarray(buffer.view((4,), "float32"))
    memory.close()
    with pytest.raises(gi.ResourceBusyError, match="2 exported array"):
        memory.close(timeout=0)
    through_interface[:] = 3
    assert through_dlpack.sum() == 12
    del through_dlpack, through_interface
    gc.collect()
    memory.close(timeout=5)
    assert not backend.count("memory")


def test_work_enqueued_while_an_array_lives_on_is_waited_for(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    with device.create_stream() as stream:
        memory = memory_of(device)
        array = np.from_dlpack(memory.map_buffer().view(4))
        memory.close()
        backend.blocked.add(stream.ptr)  # a kernel of the array's library, enqueued after our close()
        del array
        gc.collect()
        with pytest.raises(gi.ResourceBusyError):
            memory.close(timeout=0)
        backend.blocked.clear()
        memory.close(timeout=5)


def test_memory_that_a_waiting_stream_never_touched_is_not_held(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    with device.create_stream() as stream, memory_of(device) as other:
        used = other.map_buffer()
        used.fill(1, stream=stream)
        backend.blocked.add(stream.ptr)
        memory = memory_of(device)
        _untouched = memory.map_buffer()
        memory.close()
        assert (backend.count("memory"), backend.count("mapping")) == (1, 1)
        backend.blocked.clear()


def test_a_closed_stream_still_counts_as_pending(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    stream = device.create_stream()
    memory = memory_of(device)
    used = memory.map_buffer()
    used.fill(1, stream=stream)
    backend.blocked.add(stream.ptr)
    stream.close()
    memory.close()
    assert backend.count("stream") == backend.count("memory") == 1
    backend.blocked.clear()
    memory.close(timeout=5)
    assert backend.count("stream") == backend.count("memory") == backend.count("event") == 0


def test_on_released_runs_once_after_the_native_release(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    with device.create_stream() as stream:
        backend.blocked.add(stream.ptr)
        memory = memory_of(device)
        used = memory.map_buffer()
        used.fill(1, stream=stream)
        seen: list[int] = []
        memory.on_released(lambda: seen.append(backend.count("memory")))
        memory.close()
        memory.on_released(lambda: seen.append(backend.count("memory")))
        assert not seen
        backend.blocked.clear()
        memory.close(timeout=5)
        assert seen == [0, 0]
        memory.on_released(lambda: seen.append(99))
        assert seen == [0, 0, 99]


def test_a_chain_of_callbacks_does_not_nest(host: Device) -> None:
    """Each closes the next: more of them than Python's stack has room for."""
    chain = [host.create_semaphore(gi.TimelineFd) for _ in range(1200)]
    told: list[int] = []

    def next_one(number: int) -> None:
        told.append(number)
        if number + 1 < len(chain):
            chain[number + 1].close(timeout=5)

    for number, semaphore in enumerate(chain):
        semaphore.on_released(functools.partial(next_one, number))
    chain[0].close(timeout=5)
    assert told == list(range(len(chain)))


def test_a_device_drains_what_is_its_own(fake: tuple[Device, FakeBackend]) -> None:
    """An object of another device is not waited for, and what can never be released is not, on any."""
    device, _ = fake
    other, theirs = fake_device()
    used = memory_of(other)
    held = used.map_buffer().hold()
    used.close()
    device.drain(timeout=5)
    with pytest.raises(gi.ResourceBusyError, match="1 exported array"):
        other.drain(timeout=0)
    del held
    other.drain(timeout=5)
    assert theirs.count("memory") == 0


def test_close_is_idempotent_from_many_threads(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    for _ in range(50):
        memory = memory_of(device)
        buffer = memory.map_buffer()
        threads = [threading.Thread(target=memory.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        memory.close(timeout=5)
        assert buffer.closed
    assert not backend.count("memory")
    assert not backend.count("mapping")


@pytest.mark.parametrize("what", ["memory", "buffer", "stream", "semaphore"])
def test_dropping_warns_and_releases_and_never_raises(fake: tuple[Device, FakeBackend], what: str) -> None:
    device, backend = fake
    keep: gi.ExternalMemory | None = None
    if what == "buffer":
        keep = memory_of(device)

    def drop() -> None:
        if what == "memory":
            memory_of(device)
        elif keep is not None:
            keep.map_buffer()
        elif what == "stream":
            device.create_stream()
        else:
            device.import_semaphore(gi.TimelineWin32(handle=8))

    with pytest.warns(gi.LeakedResourceWarning, match=r"dropped without close\(\)"):
        drop()
        gc.collect()
    if keep is not None:
        keep.close()
    device.synchronize()
    assert not backend.live


def test_children_hold_parents(fake: tuple[Device, FakeBackend]) -> None:
    device, _backend = fake
    memory = memory_of(device)
    buffer = memory.map_buffer()
    parent = weakref.ref(memory)
    del memory
    gc.collect()
    assert parent() is not None
    parent().close()  # type: ignore[union-attr]
    with pytest.raises(gi.ResourceClosedError, match="Buffer"):
        _ = buffer.ptr


def test_the_last_buffer_of_a_mapping_unmaps_it(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    with memory_of(device) as memory:
        whole = memory.map_buffer()
        part = memory.map_buffer(offset=256, size=256)
        assert part.ptr == whole.ptr + 256
        whole.close()
        assert backend.count("mapping") == 1
        part.close(timeout=5)
        assert backend.count("mapping") == 0
        memory.map_buffer(offset=128, size=1024).close()


def test_a_mapping_that_is_still_in_use_cannot_be_made_again(fake: tuple[Device, FakeBackend]) -> None:
    device, _backend = fake
    with memory_of(device) as memory:
        buffer = memory.map_buffer()
        array = np.from_dlpack(buffer.view(4))
        buffer.close()
        with pytest.raises(gi.ResourceBusyError, match="still in use"):
            memory.map_buffer()
        del array
        gc.collect()
        memory.map_buffer().close()


def test_a_drain_names_the_semaphore_that_holds_a_stream(fake: tuple[Device, FakeBackend]) -> None:
    """Ctrl-C in a fill or a copy closes the stream of ours that it was on, whose end is an event."""
    device, backend = fake
    with device.create_stream() as stream, memory_of(device) as memory, semaphore_of(device) as semaphore:
        buffer = memory.map_buffer()
        buffer.fill(2)
        backend.blocked.update(number for kind, number in backend.live if kind == "stream")
        semaphore.wait(stream, 7)
        buffer.fill(1, stream=stream)
        before = threading.active_count(), count_alive()

        def interrupt() -> None:
            raise KeyboardInterrupt

        backend.on_synchronize = interrupt
        with pytest.raises(KeyboardInterrupt):
            buffer.fill(2)
        with pytest.raises(gi.ResourceBusyError, match=rf"pending; .* {semaphore.label} to reach 7\.$") as caught:
            device.drain(timeout=0)
        assert "event" not in str(caught.value)
        backend.blocked.clear()
        backend.on_synchronize = lambda: None
        device.drain(timeout=5)
        buffer.fill(2)
        assert (threading.active_count(), count_alive()) == before


def test_exit_does_not_mask_an_exception(fake: tuple[Device, FakeBackend]) -> None:
    device, _backend = fake
    with pytest.raises(ZeroDivisionError), memory_of(device):
        raise ZeroDivisionError


def test_use_after_close_names_the_object(fake: tuple[Device, FakeBackend]) -> None:
    device, _backend = fake
    stream = device.create_stream()
    semaphore = device.import_semaphore(gi.TimelineWin32(handle=8))
    memory = memory_of(device)
    buffer = memory.map_buffer()
    view = buffer.view(4)
    for resource in (stream, semaphore, memory):
        resource.close()
    uses: list[Callable[[], object]] = [
        stream.query, stream.synchronize, stream.record, memory.map_buffer, lambda: buffer.view(4), buffer.fill,
        view.__dlpack__, lambda: semaphore.host_signal(1),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(gi.ResourceClosedError, match="closed"):
            use()
    with device.create_stream() as other, pytest.raises(gi.ResourceClosedError):
        semaphore.signal(other, 1)


def test_a_busy_semaphore_is_abandoned_when_its_time_is_over(fake: tuple[Device, FakeBackend]) -> None:
    device, backend = fake
    with device.create_stream() as stream:
        semaphore = device.import_semaphore(gi.TimelineWin32(handle=8))
        semaphore.wait(stream, 1)
        backend.blocked.add(stream.ptr)
        with pytest.raises(gi.ResourceBusyError):
            semaphore.close(timeout=0)
        assert backend.calls[-1][0] == "abandon"
        backend.blocked.clear()


def test_releases_that_fail_warn(fake: tuple[Device, FakeBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    device, backend = fake

    def fail(memory: object) -> None:
        raise gi.DriverError("cuDestroyExternalMemory", 1, "CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(backend, "destroy_memory", fail)
    with pytest.warns(gi.LeakedResourceWarning, match="cuDestroyExternalMemory"):
        memory_of(device).close(timeout=5)


def test_a_keepalive_lives_as_long_as_what_was_imported(fake: tuple[Device, FakeBackend]) -> None:
    class Owner:
        pass

    device, _backend = fake
    owner = Owner()
    alive = weakref.ref(owner)
    memory = device.import_memory(gi.OpaqueWin32Kmt(handle=8, keepalive=owner), size=64)
    del owner
    gc.collect()
    assert alive() is not None
    memory.close(timeout=5)
    del memory
    gc.collect()
    assert alive() is None


def test_many_rounds_leak_no_descriptor() -> None:
    device, backend = fake_device()
    fd = os.memfd_create("rounds")
    os.ftruncate(fd, 4096)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(500):
        with device.import_memory(gi.OpaqueFd.adopt(os.dup(fd)), size=4096) as memory:
            buffer = memory.map_buffer()
        assert buffer.closed
    device.synchronize()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not backend.count("memory")
    os.close(fd)
