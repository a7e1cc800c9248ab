"""Streams of ours, streams of others, events."""

import asyncio

import numpy as np
import pytest

import gpuinterop as gi

from .fake import FakeBackend, fake_device


class Torch:
    cuda_stream = 64


class CuPy:
    ptr = 80


class Protocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 96)


class NewerProtocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (7, 96)


def test_other_libraries_streams_are_understood_and_kept_alive() -> None:
    device, backend = fake_device()
    for foreign, pointer in ((Torch(), 64), (CuPy(), 80), (Protocol(), 96), (0, 0), (112, 112)):
        stream = device.wrap_stream(foreign)
        assert stream.ptr == pointer
        assert stream._keepalive in (foreign, None)
        stream.close()
    assert not [call for call in backend.calls if call == ("destroy", "stream")]
    with device.create_stream() as ours:
        assert device.wrap_stream(ours) is ours
        with pytest.raises(gi.InvalidArgumentError, match="belongs to"):
            fake_device()[0].wrap_stream(ours)


@pytest.mark.parametrize("bad", [None, True, "stream", -1, object(), NewerProtocol(), np.zeros(1)])
def test_what_is_no_stream_is_refused(bad: object) -> None:
    device, _ = fake_device()
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


def test_events_are_done_waited_for_awaited_and_freed() -> None:
    device, backend = fake_device()
    with device.create_stream() as stream:
        event = stream.record()
        backend.blocked.add(stream.ptr)
        assert not event.done
        assert not stream.query()
        with pytest.raises(gi.SemaphoreTimeoutError, match="did not reach"):
            event.wait(timeout=0)

        assert asyncio.run(asyncio.wait_for(watch(event, backend), 30)) == "done"
        event.wait()
        del event
    device.synchronize()
    assert not backend.count("event")


def test_wait_stream_orders_behind_the_others_work() -> None:
    device, backend = fake_device()
    other_device, _ = fake_device()
    with device.create_stream() as one, device.create_stream() as two, other_device.create_stream() as far:
        one.wait_stream(two)
        assert backend.calls[-1] == ("wait_event", one._native, two._native)
        count = len(backend.calls)
        one.wait_stream(one)
        with pytest.raises(gi.InvalidArgumentError, match="another backend"):
            one.wait_stream(far)
        with pytest.raises(gi.ArgumentTypeError):
            one.wait_stream(0)  # type: ignore[arg-type]
        assert len(backend.calls) == count


def test_a_binding_that_holds_the_gil_is_polled_never_blocked_in() -> None:
    device, backend = fake_device()
    backend.holds_gil = True
    with device.create_stream() as stream:
        stream.synchronize()
        assert not [call for call in backend.calls if call[0] == "synchronize"]


def test_host_memory_of_an_asynchronous_copy_is_kept_until_it_is_done() -> None:
    device, backend = fake_device()
    with device.import_memory(gi.OpaqueWin32(handle=8), size=64) as memory, device.create_stream() as stream:
        buffer = memory.map_buffer()
        backend.blocked.add(stream.ptr)
        buffer.copy_from_host(np.arange(8), stream=stream)
        assert len(stream._kept) == 1
        backend.blocked.clear()
        stream.synchronize()
        assert not stream._kept
    assert device.info.name == "fake"
    assert "fake" in repr(device)
