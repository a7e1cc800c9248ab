"""Memory is bound and unbound: every rule holds before the driver is called."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import gpuinterop as gi

from ..fake import FakeMulticast
from .calls import LIMIT, SIZE, STEP, Devices, close_all, fail, names, refused


def test_binding_memory(devices: Devices, backend: FakeMulticast) -> None:
    with (
        gi.create_multicast(devices[:2], SIZE) as multicast,
        devices[1].allocate(4 * STEP) as small,
        devices[0].allocate(2 * SIZE) as large,
    ):
        whole = multicast.bind_memory(small)
        part = multicast.bind_memory(large, 2 * STEP, start=STEP, size=3 * STEP)
        rest = multicast.bind_memory(large, 5 * STEP, start=SIZE)
        group = multicast._handle
        assert [call for call in backend.calls if call[0] == "bind_memory"] == [
            ("bind_memory", group, 1, 0, small._handle, 0, 4 * STEP),
            ("bind_memory", group, 0, 2 * STEP, large._handle, STEP, 3 * STEP),
            ("bind_memory", group, 0, 5 * STEP, large._handle, SIZE, 3 * STEP),
        ]
        assert multicast.bindings == (whole, part, rest)
        assert (part.device, part.offset, part.size, part.memory) == (devices[0], 2 * STEP, 3 * STEP, large)
        assert part.multicast is multicast


def test_bad_ranges_are_refused(devices: Devices, backend: FakeMulticast) -> None:
    multicast = gi.create_multicast(devices[:2], SIZE)
    allocation = devices[0].allocate(4 * STEP)
    odd = devices[1].allocate(STEP + STEP // 2)
    buffer = allocation.buffer

    def bind(offset: Any = 0, start: Any = 0, size: Any = None) -> None:
        multicast.bind_memory(allocation, offset, start=start, size=size)

    def bind_address(size: Any = STEP, offset: Any = 0, address: Any = buffer) -> None:
        multicast.bind_address(devices[0], address, size, offset)

    half = STEP // 2
    cases: list[tuple[str, Callable[[], object]]] = [
        ("offset", lambda: bind(offset=half)),
        ("start", lambda: bind(start=half)),
        ("size", lambda: bind(size=half)),
        ("size", lambda: bind(size=STEP + 1)),
        ("size", lambda: multicast.bind_memory(odd)),
        ("offset", lambda: bind(offset=SIZE)),
        ("offset", lambda: bind(offset=-STEP)),
        ("start", lambda: bind(start=4 * STEP)),
        ("size", lambda: bind(size=5 * STEP)),
        ("size", lambda: bind(start=STEP, size=4 * STEP)),
        ("size", lambda: bind(offset=SIZE - STEP, size=2 * STEP)),
        ("size", lambda: bind(size=0)),
        ("offset", lambda: bind(offset=1 << 64)),
        ("size", lambda: bind(size="4")),
        ("size", lambda: bind_address(half)),
        ("offset", lambda: bind_address(offset=half)),
        ("size", lambda: bind_address(5 * STEP)),
        ("size", lambda: bind_address(2 * STEP, SIZE - STEP)),
        ("offset", lambda: bind_address(offset=SIZE)),
        ("address", lambda: bind_address(address=0)),
        ("address", lambda: bind_address(address=(1 << 33) + half)),
        ("address", lambda: bind_address(address=1 << 64)),
        ("address", lambda: bind_address(address=(1 << 64) + half)),
        ("address", lambda: bind_address(address="0x1000")),
        ("address", lambda: bind_address(address=True)),
    ]
    for argument, call in cases:
        refused(backend, call, argument)
    match = f"a multiple of the granularity, {STEP}, got {STEP + half}; pass {2 * STEP}"
    refused(backend, lambda: multicast.bind_memory(odd, size=STEP + half), "size", match)
    close_all(multicast, allocation, odd)


def test_a_device_binds_its_own_memory_and_was_added(devices: Devices, backend: FakeMulticast) -> None:
    multicast = gi.create_multicast(devices[:2], SIZE)
    foreign, shared = devices[2].allocate(SIZE), devices[0].allocate(SIZE, access=[devices[1]])
    seen = shared.buffer_on(devices[1])
    backend.lies_on = 0
    handle = gi.VmmFd.adopt(os.memfd_create("peer"))
    os.ftruncate(handle.fd, SIZE)
    peers = devices[1].import_allocation(handle, SIZE)
    there = peers.buffer
    added = "was not added to .* here; add_device"
    refused(backend, lambda: multicast.bind_memory(foreign), "allocation", added)
    refused(backend, lambda: multicast.bind_address(devices[2], 1 << 30, STEP), "device", added)
    refused(backend, lambda: multicast.bind_address(devices[1], seen, STEP), "address", "expected memory of")
    refused(backend, lambda: multicast.bind_memory(peers), "allocation", "lies on device 0")
    refused(backend, lambda: multicast.bind_address(devices[1], there, STEP), "address", "lies on device 0")
    wrong: Any = shared.buffer
    refused(backend, lambda: multicast.bind_memory(wrong), "allocation", error=gi.ArgumentTypeError)
    wrong = 1
    refused(backend, lambda: multicast.bind_address(wrong, 8, STEP), "device", error=gi.ArgumentTypeError)
    closed = devices[0].allocate(SIZE)
    buffer = closed.buffer
    closed.close(timeout=LIMIT)
    before = len(backend.calls)
    with pytest.raises(gi.ResourceClosedError):
        multicast.bind_memory(closed)
    with pytest.raises(gi.ResourceClosedError):
        multicast.bind_address(devices[0], buffer, STEP)
    assert len(backend.calls) == before
    backend.lies_on = None
    close_all(multicast, foreign, shared, peers)


def test_binding_an_address(devices: Devices, backend: FakeMulticast) -> None:
    with (
        gi.create_multicast(devices[:2], SIZE, gi.VmmFd) as multicast,
        devices[0].allocate(SIZE) as allocation,
    ):
        by_number = multicast.bind_address(devices[1], 1 << 33, STEP, 2 * STEP)
        by_buffer = multicast.bind_address(devices[0], allocation.buffer, 3 * STEP, STEP)
        group = multicast._handle
        assert [call for call in backend.calls if call[0] == "bind_address"] == [
            ("bind_address", group, 1, 2 * STEP, 1 << 33, STEP),
            ("bind_address", group, 0, STEP, allocation.buffer.ptr, 3 * STEP),
        ]
        assert by_number.memory is None
        assert by_buffer.memory is allocation.buffer
        assert multicast.bindings == (by_number, by_buffer)


def test_a_part_of_a_buffer_starts_at_the_granularity(devices: Devices, backend: FakeMulticast) -> None:
    with (
        gi.create_multicast(devices[:2], SIZE) as multicast,
        devices[0].import_memory(gi.OpaqueWin32(handle=8), size=4 * STEP) as memory,
    ):
        whole = memory.map_buffer()
        odd, even = memory.map_buffer(STEP // 2, STEP), memory.map_buffer(STEP, STEP)
        refused(backend, lambda: multicast.bind_address(devices[0], odd, STEP), "address", "a multiple")
        multicast.bind_address(devices[0], even, STEP)
        assert backend.calls[-1][-2:] == (whole.ptr + STEP, STEP)


@pytest.mark.parametrize("imported", [False, True])
def test_a_shared_object_takes_shareable_memory_only(devices: Devices, backend: FakeMulticast, imported: bool) -> None:
    if imported:
        shared = gi.import_multicast(gi.FabricHandle(bytes(64)), devices[:2], SIZE)
    else:
        shared = gi.create_multicast(devices[:2], SIZE, gi.VmmFd)
    backend.shareable = False
    match = r"0x200000000 was not allocated here to be shared.*Device\.allocate"
    refused(backend, lambda: shared.bind_address(devices[1], 1 << 33, STEP), "address", match)
    assert backend.asked[-1] == ("is_shareable", 1, 1 << 33)
    with devices[0].allocate(SIZE) as allocation:
        buffer = allocation.buffer
        refused(backend, lambda: shared.bind_address(devices[0], buffer, STEP), "address", match[14:])
    handle = gi.VmmFd.adopt(os.memfd_create("allocation"))
    os.ftruncate(handle.fd, SIZE)
    with devices[0].import_allocation(handle, SIZE) as theirs:
        refused(backend, lambda: shared.bind_memory(theirs), "allocation", r"was imported.*Device\.allocate")
        shared.close(timeout=LIMIT)
        with gi.create_multicast(devices[:2], SIZE) as private:
            private.bind_address(devices[1], 1 << 33, STEP)
            private.bind_memory(theirs)


def test_nothing_is_bound_twice(devices: Devices, backend: FakeMulticast) -> None:
    with (
        gi.create_multicast(devices[:2], SIZE) as multicast,
        devices[0].allocate(SIZE) as first,
        devices[1].allocate(SIZE) as second,
    ):
        buffer = first.buffer
        multicast.bind_memory(first, 2 * STEP, size=2 * STEP)
        for offset, size in ((0, SIZE), (2 * STEP, 2 * STEP), (0, 3 * STEP), (3 * STEP, STEP)):
            match = rf"overlaps the binding of device 0, offset={2 * STEP}, size={2 * STEP}"
            refused(backend, partial(multicast.bind_memory, first, offset, size=size), "offset", match)
            refused(backend, partial(multicast.bind_address, devices[0], buffer, size, offset), "offset", match)
        multicast.bind_memory(second)  # another device's bytes are others
        multicast.bind_memory(first, 0, size=2 * STEP)
        multicast.bind_memory(first, 4 * STEP, size=STEP)
        assert len(multicast.bindings) == 4


def test_a_failed_bind_leaves_the_bytes_free(devices: Devices, backend: FakeMulticast) -> None:
    with (
        gi.create_multicast(devices[:1], SIZE) as multicast,
        devices[0].allocate(SIZE) as allocation,
    ):
        for call in ("bind_memory", "bind_address"):
            backend.on[call] = fail
        with pytest.raises(gi.DriverError):
            multicast.bind_memory(allocation)
        with pytest.raises(gi.DriverError):
            multicast.bind_address(devices[0], allocation.buffer, STEP)
        assert multicast.bindings == ()
        backend.on.clear()
        multicast.bind_memory(allocation)
    multicast.close(timeout=LIMIT)
    assert names(backend).count("unbind") == 1


def test_an_unbind_equals_its_bind(devices: Devices, backend: FakeMulticast) -> None:
    with (
        gi.create_multicast(devices[:2], SIZE) as multicast,
        devices[0].allocate(SIZE) as first,
        devices[1].allocate(SIZE) as second,
    ):
        refused(backend, lambda: multicast.unbind(devices[0], 0, STEP), "offset", "bound: none")
        binding = multicast.bind_memory(first, 2 * STEP, size=2 * STEP)
        multicast.bind_memory(second, size=STEP)
        for device, offset, size in (
            (devices[0], 2 * STEP, STEP),
            (devices[0], 3 * STEP, STEP),
            (devices[0], 2 * STEP, 4 * STEP),
            (devices[0], 0, STEP),
            (devices[1], 2 * STEP, 2 * STEP),
        ):
            refused(
                backend, partial(multicast.unbind, device, offset, size), "offset",
                rf"bound: device 0, offset={2 * STEP}, size={2 * STEP}; device 1, offset=0, size={STEP}",
            )  # fmt: skip
        multicast.unbind(devices[0], 2 * STEP, 2 * STEP)
        assert binding.closed
        assert backend.calls[-1] == ("unbind", multicast._handle, 0, 2 * STEP, 2 * STEP)
        assert [one.device for one in multicast.bindings] == [devices[1]]
        refused(backend, lambda: multicast.unbind(devices[0], 2 * STEP, 2 * STEP), "offset", "bytes of a binding")
        multicast.bind_memory(first, 2 * STEP, size=STEP)  # free again
    with pytest.raises(gi.ResourceClosedError):
        multicast.unbind(devices[1], 0, STEP)


def test_a_closed_object_says_so_first(devices: Devices) -> None:
    """Not that devices are missing: nothing would be gained by adding them."""
    multicast = gi.create_multicast(2, SIZE, device=devices[0])
    multicast.add_device(devices[0])
    multicast.close()
    with devices[0].allocate(SIZE) as allocation:
        calls: list[Callable[[], object]] = [
            lambda: multicast.bind_memory(allocation),
            lambda: multicast.bind_address(devices[0], 1 << 33, STEP),
            multicast.map,
            multicast.export,
            lambda: multicast.add_device(devices[1]),
            lambda: multicast.unbind(devices[0], 0, STEP),
        ]
        for call in calls:
            with pytest.raises(gi.ResourceClosedError, match=re.escape(multicast.label)):
                call()


def test_bytes_whose_unbind_is_to_come_are_busy(devices: Devices, backend: FakeMulticast) -> None:
    """A driver gets the moment that it needs to see work as done: the first look may come too early."""
    with (
        devices[1].create_stream() as stream,
        gi.create_multicast(devices[:2], SIZE) as multicast,
        devices[0].allocate(SIZE) as allocation,
    ):
        binding = multicast.bind_memory(allocation, size=STEP)
        backend.blocked.add(stream.ptr)
        binding.close()
        before = len(backend.calls)
        with pytest.raises(gi.ResourceBusyError, match=r"not unbound yet.*pending.*close\(timeout"):
            multicast.bind_memory(allocation)
        assert len(backend.calls) == before
        multicast.bind_memory(allocation, STEP, start=STEP)
        looks: list[Callable[[], None]] = [backend.blocked.clear, lambda: setattr(backend, "on_is_done", looks[0])]
        backend.on_is_done = looks[1]
        multicast.bind_memory(allocation, size=STEP)


def test_bytes_that_could_not_be_unbound_stay_taken(devices: Devices, backend: FakeMulticast) -> None:
    multicast = gi.create_multicast(devices[:1], SIZE)
    allocation = devices[0].allocate(SIZE)
    backend.on["unbind"] = fail
    with pytest.warns(gi.LeakedResourceWarning, match="cuSomething"):
        multicast.bind_memory(allocation).close(timeout=LIMIT)
    with pytest.raises(gi.ResourceBusyError, match=r"its unbind failed.*make a new multicast object"):
        multicast.bind_memory(allocation)
    for parent in (multicast, allocation):  # the driver may still use both
        with pytest.raises(gi.ResourceBusyError, match=r"MulticastBinding #\d+ .*could not be released"):
            parent.close(timeout=0)
    assert backend.live == {multicast._handle, allocation._handle}
