"""Releases come in order, and wait for what is pending."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest

import gpuinterop as gi

from ..fake import FakeMulticast, fake_team
from .calls import LIMIT, SIZE, STEP, Devices, allocations, close_all, releases


@pytest.mark.parametrize("unmapped_before", [False, True])
@pytest.mark.parametrize("mapped_first", [False, True])
@pytest.mark.parametrize("done_after", range(8))
def test_releases_come_in_order(done_after: int, mapped_first: bool, unmapped_before: bool) -> None:
    """Whatever was made or closed first, and whoever's work is seen as done first."""
    devices, backend = fake_team()
    stream = devices[1].create_stream()
    multicast = gi.create_multicast(devices[:2], SIZE)
    memory = allocations(devices[:2])
    if mapped_first:
        mapping = multicast.map()
    for one in memory:
        multicast.bind_memory(one)
    if not mapped_first:
        mapping = multicast.map()
    backend.blocked.add(stream.ptr)
    looks = [done_after]

    def look() -> None:
        looks[0] -= 1
        if looks[0] < 0:
            backend.blocked.clear()

    if unmapped_before:
        mapping.close()
    backend.on_is_done = look
    multicast.close()
    multicast.close(timeout=LIMIT)
    assert releases(backend) == ["unmap", "unbind", "unbind", "release"]
    assert backend.calls[-1] == ("release_allocation", multicast.lifetime.handle)
    close_all(mapping, *memory, stream)
    assert not backend.live


@pytest.mark.parametrize("what", ["mapping", "binding", "multicast"])
@pytest.mark.parametrize("closed", [False, True])
def test_the_work_of_every_device_is_waited_for(
    devices: Devices, backend: FakeMulticast, what: str, closed: bool
) -> None:
    """Also that of a stream that is closed: its device drains with the others."""
    multicast = gi.create_multicast(devices[:3], SIZE)
    allocation = devices[0].allocate(SIZE)
    mapping, binding = multicast.map(), multicast.bind_memory(allocation)
    things: dict[str, Any] = {"mapping": mapping, "binding": binding, "multicast": multicast}
    stream = devices[2].create_stream()
    backend.blocked.add(stream.ptr)
    if closed:
        stream.close()
    things[what].close()
    devices[0].drain()
    assert releases(backend) == []
    with pytest.raises(gi.ResourceBusyError, match="pending"):
        things[what].close(timeout=0)
    backend.blocked.clear()
    things[what].close(timeout=LIMIT)
    assert releases(backend) == {
        "mapping": ["unmap"], "binding": ["unbind"], "multicast": ["unmap", "unbind", "release"],
    }[what]  # fmt: skip
    close_all(multicast, allocation, stream)
    assert not backend.live


def test_a_mapping_for_some_waits_for_the_work_of_all(devices: Devices, backend: FakeMulticast) -> None:
    with gi.create_multicast(devices[:2], SIZE) as multicast, devices[1].create_stream() as stream:
        mapping = multicast.map(devices[:1])
        backend.blocked.add(stream.ptr)
        mapping.close()
        devices[0].drain()
        assert releases(backend) == []
        backend.blocked.clear()
        mapping.close(timeout=LIMIT)
        assert releases(backend) == ["unmap"]


def test_another_devices_work_is_not(devices: Devices, backend: FakeMulticast) -> None:
    stream = devices[3].create_stream()
    backend.blocked.add(stream.ptr)
    with gi.create_multicast(devices[:2], SIZE) as multicast, multicast.map():
        pass
    assert releases(backend) == ["unmap", "release"]
    backend.blocked.clear()
    stream.close()


def test_bound_memory_stays_until_it_is_unbound(devices: Devices, backend: FakeMulticast) -> None:
    """Closing it ends the binding, and its own release comes after the unbind, which waits for all of the team."""
    multicast = gi.create_multicast(devices[:2], SIZE)
    allocation = devices[0].allocate(SIZE)
    binding = multicast.bind_memory(allocation)
    stream = devices[1].create_stream()  # not the memory's own device
    backend.blocked.add(stream.ptr)
    allocation.close()
    assert binding.closed
    assert multicast.bindings == ()
    assert not multicast.closed
    assert releases(backend) == []
    with pytest.raises(gi.ResourceBusyError, match="MulticastBinding"):
        allocation.close(timeout=0)
    backend.blocked.clear()
    allocation.close(timeout=LIMIT)
    assert releases(backend) == ["unbind", "release"]
    assert backend.calls[-1] == ("release_allocation", allocation._handle)
    close_all(multicast, stream)
    assert not backend.live


def test_a_bound_buffer_is_kept_alive_and_closing_it_unbinds(devices: Devices, backend: FakeMulticast) -> None:
    multicast = gi.create_multicast(devices[:2], SIZE, gi.VmmFd)
    allocation = devices[0].allocate(SIZE)
    binding = multicast.bind_address(devices[0], allocation.buffer, STEP)
    allocation.buffer.close()
    assert binding.closed
    assert releases(backend) == ["unbind", "unmap"]

    binding = multicast.bind_address(devices[0], allocation.buffer, STEP)
    alive = weakref.ref(allocation)
    stream = devices[1].create_stream()
    backend.blocked.add(stream.ptr)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del allocation
        gc.collect()
    assert alive() is not None, "the binding holds the buffer, and that the allocation"
    backend.calls.clear()
    alive().close()  # type: ignore[union-attr]
    assert binding.closed
    assert releases(backend) == []
    backend.blocked.clear()
    devices[0].drain()
    assert releases(backend) == ["unbind", "unmap", "release"]
    close_all(multicast, stream)
    assert not backend.live


def test_a_binding_that_nobody_holds_stays(devices: Devices, backend: FakeMulticast) -> None:
    with gi.create_multicast(devices[:1], SIZE) as multicast, devices[0].allocate(SIZE) as allocation:
        multicast.bind_memory(allocation)
        gc.collect()
        devices[0].drain()
        assert len(multicast.bindings) == 1
        assert releases(backend) == []
        with pytest.warns(gi.LeakedResourceWarning, match="MulticastMapping"):  # a mapping is its holder's
            multicast.map()
            gc.collect()
        devices[0].drain()
        assert releases(backend) == ["unmap"]


def test_an_allocation_does_not_keep_the_object_alive(devices: Devices, backend: FakeMulticast) -> None:
    allocation = devices[0].allocate(SIZE)
    multicast = gi.create_multicast(devices[:1], SIZE)
    multicast.bind_memory(allocation)
    alive = weakref.ref(multicast)
    with pytest.warns(gi.LeakedResourceWarning, match="MulticastObject"):
        del multicast
        gc.collect()
    assert alive() is None
    devices[0].drain()
    assert releases(backend) == ["unbind", "release"]
    allocation.close(timeout=LIMIT)
