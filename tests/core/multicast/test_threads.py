"""Several threads, and what is closed during a call."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core import monitor
from tests.beside import beside

from ..fake import FakeMulticast
from .calls import LIMIT, SIZE, STEP, Devices, allocations, close_all, releases


def is_held(lock: Any) -> bool:
    """Another thread would wait for it."""

    def take() -> bool:
        taken = lock.acquire(blocking=False)
        if taken:
            lock.release()
        return not taken

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(take).result(LIMIT)


def test_a_device_is_added_by_one_thread_at_a_time(devices: Devices, backend: FakeMulticast) -> None:
    """The second one to come sees what the first has done."""
    seen: list[bool] = []
    with gi.create_multicast(2, SIZE, device=devices[0]) as multicast:
        backend.on["add_device"] = lambda: seen.append(is_held(multicast._lock))
        multicast.add_device(devices[0])
        with pytest.raises(gi.InvalidArgumentError, match="expected each device once"):
            multicast.add_device(devices[0])
    assert seen == [True]


def test_bytes_are_reserved_by_one_thread_at_a_time(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody finds them free while another is about to take them."""
    with gi.create_multicast(devices[:1], SIZE) as multicast, devices[0].allocate(SIZE) as memory:
        overlapping, seen = multicast._overlapping, list[bool]()

        def look(*wanted: Any) -> Any:
            seen.append(is_held(monitor._lock))
            return overlapping(*wanted)

        monkeypatch.setattr(multicast, "_overlapping", look)
        multicast.bind_memory(memory)
    assert seen[:2] == [False, True], "the second one decides"


@pytest.mark.parametrize("closing", ["multicast", "allocation"])
def test_what_is_closed_while_it_is_bound_is_unbound_again(
    devices: Devices, backend: FakeMulticast, closing: str
) -> None:
    """And released behind that; a driver that blocks holds nothing else up."""
    inside, go_on = threading.Event(), threading.Event()
    allocation, other = allocations([devices[0], devices[0]])
    multicast = gi.create_multicast(2, SIZE, gi.VmmFd, device=devices[0])
    multicast.add_device(devices[0])

    def block() -> None:
        inside.set()
        assert go_on.wait(LIMIT)

    backend.on["bind_memory"] = block

    def bind() -> None:
        with pytest.raises(gi.ResourceClosedError):
            multicast.bind_memory(allocation, size=STEP, assume_all_added=True)

    with beside(bind):
        assert inside.wait(LIMIT)
        del backend.on["bind_memory"]
        assert multicast.bindings == ()
        with pytest.raises(gi.InvalidArgumentError, match="overlaps"):
            multicast.bind_memory(other, assume_all_added=True)
        multicast.bind_memory(other, STEP, size=STEP, assume_all_added=True)
        multicast.export().close()
        {"multicast": multicast, "allocation": allocation}[closing].close()
        thing = multicast._handle if closing == "multicast" else allocation._handle
        assert ("release_allocation", thing) not in backend.calls
        go_on.set()
    close_all(multicast, allocation, other)
    unbound = backend.calls.index(("unbind", multicast._handle, 0, 0, STEP))
    assert unbound < backend.calls.index(("release_allocation", thing))
    assert not backend.live


@pytest.mark.parametrize("asking", [False, True])
@pytest.mark.parametrize("pending", [False, True])
def test_a_buffer_that_is_closed_while_it_is_bound_stays_mapped_until_it_is_unbound(
    devices: Devices, backend: FakeMulticast, pending: bool, asking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where work of another device of the team, which does not map the memory, holds the unbind up."""
    multicast = gi.create_multicast(devices[:2], SIZE, gi.VmmFd)
    allocation = devices[0].allocate(SIZE)
    buffer = allocation.buffer
    stream = devices[1].create_stream()
    if pending:
        backend.blocked.add(stream.ptr)

    def close() -> None:
        buffer.close()
        allocation.close()
        devices[0].drain()

    def is_shareable(device: object, address: int) -> bool:
        close()
        return not releases(backend)

    if asking:
        monkeypatch.setattr(backend, "is_shareable", is_shareable)
    else:
        backend.on["bind_address"] = close
    with pytest.raises(gi.ResourceClosedError, match="Buffer"):
        multicast.bind_address(devices[0], buffer, STEP)
    devices[0].drain()
    assert releases(backend) == ([] if pending else ["unbind", "unmap", "release"])
    backend.blocked.clear()
    close_all(allocation, stream)
    assert releases(backend) == ["unbind", "unmap", "release"]
    multicast.close(timeout=LIMIT)
    assert not backend.live
