"""Several threads, and interrupts, at every place of a call."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core import monitor

from .calls import LIMIT, SIZE, STEP, Team, allocations, close_all, names, releases

# -- threads ---------------------------------------------------------------------------------------------------------


def run_all(*calls: Callable[[], object]) -> list[BaseException | None]:
    """Start them together; what each has raised."""
    start = threading.Barrier(len(calls))
    errors: list[BaseException | None] = [None] * len(calls)

    def run(index: int) -> None:
        start.wait(LIMIT)
        try:
            calls[index]()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return errors


class Pair:
    """Of two threads, the first in `enter` stays there until the other came to it, or to the lock of `owner`."""

    def __init__(self, owner: Any) -> None:
        self.news: list[str] = []
        """What became of the other, as the first has seen it."""
        self._came: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._first = [True]
        self._lock = owner._lock
        self._is_owned = getattr(self._lock, "_is_owned", None)
        owner._lock = self

    def enter(self) -> None:
        try:
            self._first.pop()
        except IndexError:
            self._came.put("entered")
            return
        self.news.append(self._came.get(timeout=LIMIT))

    def acquire(self, timeout: float = -1) -> None:
        if not self._lock.acquire(blocking=False):
            if not self._first:
                self._came.put("held back")
            assert self._lock.acquire(timeout=LIMIT)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_a_device_is_added_by_one_thread_at_a_time(team: Team) -> None:
    """The second one to come sees what the first has done."""
    devices, backend = team
    multicast = gi.create_multicast(2, SIZE, device=devices[0])
    pair = Pair(multicast)
    backend.on["add_device"] = pair.enter
    errors = run_all(*[lambda: multicast.add_device(devices[0])] * 2)
    assert [type(error) for error in errors if error is not None] == [gi.InvalidArgumentError]
    assert names(backend).count("add_device") == 1
    assert pair.news == ["held back"]
    multicast.close()


def test_bytes_are_reserved_by_one_thread_at_a_time(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody finds them free while another is about to take them."""
    devices, backend = team
    multicast = gi.create_multicast(devices[:1], SIZE)
    memory = allocations([devices[0], devices[0]])
    monkeypatch.setattr(monitor, "_lock", monitor._lock)  # put back behind the test
    pair = Pair(monitor)
    overlapping, looks = multicast._overlapping, threading.local()

    def look(wanted: Any) -> dict[Any, Any]:
        found = overlapping(wanted)
        looks.count = getattr(looks, "count", 0) + 1
        if looks.count == 2:  # the one that decides
            pair.enter()
        return found

    monkeypatch.setattr(multicast, "_overlapping", look)
    errors = run_all(*[partial(multicast.bind_memory, one) for one in memory])
    assert [type(error) for error in errors if error is not None] == [gi.InvalidArgumentError]
    assert names(backend).count("bind_memory") == 1
    assert pair.news == ["held back"]
    close_all(multicast, *memory)


@pytest.mark.parametrize("closing", ["multicast", "allocation"])
def test_what_is_closed_while_it_is_bound_is_unbound_again(team: Team, closing: str) -> None:
    """And released behind that; a driver that blocks holds nothing else up."""
    devices, backend = team
    inside, go_on = threading.Event(), threading.Event()
    allocation, other = allocations([devices[0], devices[0]])
    multicast = gi.create_multicast(2, SIZE, gi.VmmFd, device=devices[0])
    multicast.add_device(devices[0])

    def block() -> None:
        inside.set()
        assert go_on.wait(LIMIT)

    backend.on["bind_memory"] = block
    errors: list[BaseException] = []

    def bind() -> None:
        try:
            multicast.bind_memory(allocation, size=STEP, assume_all_added=True)
        except gi.ResourceClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=bind)
    thread.start()
    try:
        assert inside.wait(LIMIT)
        del backend.on["bind_memory"]
        assert multicast.bindings == ()
        with pytest.raises(gi.InvalidArgumentError, match="overlaps"):
            multicast.bind_memory(other, assume_all_added=True)
        multicast.bind_memory(other, STEP, size=STEP, assume_all_added=True)
        multicast.export().close()
        {"multicast": multicast, "allocation": allocation}[closing].close()
        thing = multicast.handle if closing == "multicast" else allocation.handle
        assert ("release_allocation", thing) not in backend.calls
    finally:
        go_on.set()
        thread.join(LIMIT)
    assert not thread.is_alive()
    assert len(errors) == 1
    close_all(multicast, allocation, other)
    unbound = backend.calls.index(("unbind", multicast.handle, 0, 0, STEP))
    assert unbound < backend.calls.index(("release_allocation", thing))
    assert not backend.live


@pytest.mark.parametrize("call", ["export_multicast", "add_device"])
def test_what_is_closed_during_a_call_is_released_behind_it(team: Team, call: str) -> None:
    devices, backend = team
    multicast = gi.create_multicast(1, SIZE, gi.VmmFd, device=devices[0])
    seen: list[list[str]] = []

    def close() -> None:
        multicast.close()
        seen.append(releases(backend))

    backend.on[call] = close
    if call == "add_device":
        multicast.add_device(devices[0])
    else:
        multicast.export().close()
    assert seen == [[]]
    multicast.close(timeout=LIMIT)
    assert releases(backend) == ["release"]


@pytest.mark.parametrize("asking", [False, True])
@pytest.mark.parametrize("pending", [False, True])
def test_a_buffer_that_is_closed_while_it_is_bound_stays_mapped_until_it_is_unbound(
    team: Team, pending: bool, asking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where work of another device of the team, which does not map the memory, holds the unbind up."""
    devices, backend = team
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
