"""A multicast object: its rules hold before the driver is called, and its calls come in order. On the fake backend."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.capabilities import Operation
from gpuinterop.handles import HandleOrigin, OriginKind
from tests.beside import beside
from tests.limits import LIMIT

from .fake import FakeMulticast, fake_team

STEP, GOOD = FakeMulticast.GROUPS
SIZE = 8 * STEP
Devices = list[Device]


@pytest.fixture
def fake() -> tuple[Devices, FakeMulticast]:
    return fake_team()


@pytest.fixture
def devices(fake: tuple[Devices, FakeMulticast]) -> Devices:
    return fake[0]


def names(backend: FakeMulticast) -> list[str]:
    return [call[0] for call in backend.calls]


def releases(backend: FakeMulticast) -> list[str]:
    """The native releases of a multicast object and what hangs on it, in the order they came in."""
    kinds = {"unmap_allocation": "unmap", "unbind": "unbind", "release_allocation": "release"}
    return [kinds[call[0]] for call in backend.calls if call[0] in kinds]


def fail() -> None:
    raise gi.DriverError("cuSomething", 1, "CUDA_ERROR_INVALID_VALUE")


def refused(
    backend: FakeMulticast,
    call: Callable[[], object],
    argument: str,
    match: str | None = None,
    error: type[Exception] = gi.InvalidArgumentError,
) -> None:
    """The call is refused for `argument`, before anything is changed."""
    before = list(backend.calls)
    with pytest.raises(error, match=match) as caught:
        call()
    assert isinstance(caught.value, gi.InvalidArgumentError)
    assert caught.value.argument == argument
    assert backend.calls == before


def close_all(*resources: Any) -> None:
    for one in resources:
        one.close(timeout=LIMIT)


# -- creation ---------------------------------------------------------------------------------------------------------


def test_a_team_of_devices_is_added_at_once(devices: Devices, backend: FakeMulticast) -> None:
    with gi.create_multicast(devices[1:3], SIZE, gi.VmmFd) as multicast:
        assert multicast.devices == (devices[1], devices[2])
        assert multicast.complete
        assert (multicast.device, multicast.device_count, multicast.size) == (devices[1], 2, SIZE)
        assert multicast.handle_types == (gi.VmmFd,)
        assert multicast.granularity == gi.Granularity(STEP, GOOD)
        assert multicast.bindings == ()
    group = ("group", backend.calls[1][1][1])
    assert backend.calls == [
        ("create_multicast", 1, 2, SIZE, (gi.VmmFd,)),
        ("add_device", group, 1),
        ("add_device", group, 2),
        ("release_allocation", group),
    ]
    assert backend.asked == [("multicast_granularity", 2, SIZE, (gi.VmmFd,))]
    assert not backend.live


def test_a_team_over_processes_is_a_number(devices: Devices, backend: FakeMulticast) -> None:
    kinds = (gi.VmmFd, gi.FabricHandle, gi.VmmFd)
    with gi.create_multicast(np.int64(3), SIZE, kinds, device=devices[2]) as multicast:  # type: ignore[arg-type]
        assert backend.calls == [("create_multicast", 2, 3, SIZE, (gi.VmmFd, gi.FabricHandle))]
        for index in range(3):
            assert (multicast.devices, multicast.complete) == (tuple(devices[:index]), False)
            multicast.add_device(devices[index])
        assert (multicast.devices, multicast.complete) == (tuple(devices[:3]), True)


def test_a_size_beside_the_granularity_names_the_next_good_one(devices: Devices, backend: FakeMulticast) -> None:
    for size in (1, STEP - 1, STEP + 1, SIZE + STEP // 2):
        good, best = -(-size // STEP) * STEP, -(-size // GOOD) * GOOD
        match = rf"granularity, {STEP}, got .*; pass {good},.* {best}, a multiple of {GOOD}\."
        refused(backend, partial(gi.create_multicast, devices, size), "size", match)
        gi.create_multicast(devices, good).close()  # what it names is good
    for size in (0, -STEP, 1 << 63):
        refused(backend, partial(gi.create_multicast, devices, size), "size")


def test_bad_teams_are_refused(devices: Devices, backend: FakeMulticast) -> None:
    stranger = fake_team()[0][0]
    refused(backend, lambda: gi.create_multicast([], SIZE, device=devices[0]), "devices", "one device or more")
    refused(backend, lambda: gi.create_multicast(0, SIZE, device=devices[0]), "devices", "expected 1 to .*, got 0")
    refused(backend, lambda: gi.create_multicast([devices[0], devices[0]], SIZE), "devices", "twice")
    refused(backend, lambda: devices[0].multicast_granularity([devices[0], devices[0]], SIZE), "devices", "twice")
    refused(backend, lambda: devices[0].multicast_granularity([], SIZE), "devices", "empty")
    refused(backend, lambda: gi.create_multicast([devices[0], stranger], SIZE), "devices", "another backend")
    refused(backend, lambda: gi.create_multicast(devices, SIZE, device=stranger), "devices", "another backend")
    wrong: Any = "01"
    refused(backend, lambda: gi.create_multicast(wrong, SIZE), "devices", error=gi.ArgumentTypeError)
    refused(backend, lambda: gi.create_multicast(2, SIZE, device=wrong), "device", error=gi.ArgumentTypeError)
    refused(backend, lambda: gi.create_multicast(devices, SIZE, wrong), "handle_types", error=gi.ArgumentTypeError)


@pytest.mark.parametrize(
    ("gap", "call"),
    [
        (Operation.CREATE_MULTICAST, lambda devices: gi.create_multicast(devices, SIZE)),
        (Operation.CREATE_MULTICAST, lambda devices: devices[0].multicast_granularity(devices, SIZE)),
        (Operation.EXPORT_MULTICAST, lambda devices: gi.create_multicast(devices, SIZE, gi.VmmFd)),
        (Operation.IMPORT_MULTICAST, lambda devices: gi.import_multicast(gi.FabricHandle(bytes(64)), devices, SIZE)),
    ],
)
def test_every_device_must_have_it(gap: Operation, call: Callable[[Devices], object]) -> None:
    devices, backend = fake_team()
    devices[1] = fake_team(gap, backend=backend)[0][
        1
    ]  # one of the team, and not the one that the driver is called through
    with pytest.raises(gi.UnsupportedError, match=f"{gap.value}.*the test says so"):
        call(devices[:3])
    assert not backend.calls
    assert not backend.asked


@pytest.mark.parametrize("call", ["create_multicast", "add_device"])
def test_a_failed_creation_leaves_nothing(devices: Devices, backend: FakeMulticast, call: str) -> None:
    backend.on[call] = fail
    with pytest.raises(gi.DriverError):
        gi.create_multicast(devices, SIZE)
    assert not backend.live
    assert releases(backend) == (["release"] if call == "add_device" else [])


def test_adding_devices(devices: Devices, backend: FakeMulticast) -> None:
    with gi.create_multicast(2, SIZE, device=devices[3]) as multicast:
        refused(backend, lambda: multicast.add_device(fake_team()[0][0]), "device", "another backend")
        backend.on["add_device"] = fail
        with pytest.raises(gi.DriverError):
            multicast.add_device(devices[0])
        assert multicast.devices == ()
        del backend.on["add_device"]
        multicast.add_device(devices[0])
        refused(backend, lambda: multicast.add_device(devices[0]), "device", "expected each device once")
        multicast.add_device(devices[1])
        refused(backend, lambda: multicast.add_device(devices[2]), "device", "expected the 2 devices")


@pytest.mark.parametrize("use", ["bind_memory", "bind_address", "map"])
def test_no_device_is_added_after_a_bind_or_a_map(devices: Devices, backend: FakeMulticast, use: str) -> None:
    with (
        gi.create_multicast(3, SIZE, gi.VmmFd, device=devices[0]) as multicast,
        devices[0].allocate(SIZE) as allocation,
    ):
        multicast.add_device(devices[0])
        arguments: dict[str, tuple[Any, ...]] = {
            "bind_memory": (allocation,), "bind_address": (devices[0], allocation.buffer, SIZE), "map": (),
        }  # fmt: skip
        _used = getattr(multicast, use)(*arguments[use], assume_all_added=True)
        refused(backend, lambda: multicast.add_device(devices[1]), "device", "before anything is bound or mapped")


def test_nothing_is_bound_or_mapped_before_all_were_added(devices: Devices, backend: FakeMulticast) -> None:
    """The driver would block, for ever if need be."""
    with (
        gi.create_multicast(2, SIZE, gi.VmmFd, device=devices[0]) as multicast,
        devices[0].allocate(SIZE) as allocation,
    ):
        multicast.add_device(devices[0])
        buffer = allocation.buffer
        match = r"1 of the team's 2 devices.*gpuinterop\.exchange.*assume_all_added=True"
        refused(backend, lambda: multicast.bind_memory(allocation), "assume_all_added", match)
        refused(backend, lambda: multicast.bind_address(devices[0], buffer, STEP), "assume_all_added", match)
        refused(backend, multicast.map, "assume_all_added", match)
        multicast.add_device(devices[1])
        multicast.bind_memory(allocation)
        multicast.map().close()


# -- binding ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("offset", {"offset": STEP // 2}),
        ("start", {"start": STEP // 2}),
        ("size", {"size": STEP + 1}),
        ("size", {"size": 0}),
        ("size", {"size": "4"}),
        ("offset", {"offset": SIZE}),
        ("offset", {"offset": -STEP}),
        ("start", {"start": 4 * STEP}),
        ("size", {"start": STEP, "size": 4 * STEP}),
        ("size", {"offset": SIZE - STEP, "size": 2 * STEP}),
        ("size", {"address": 1 << 33, "size": STEP // 2}),
        ("size", {"address": 1 << 33, "size": 2 * STEP, "offset": SIZE - STEP}),
        ("offset", {"address": 1 << 33, "size": STEP, "offset": SIZE}),
        ("address", {"address": 0, "size": STEP}),
        ("address", {"address": (1 << 33) + STEP // 2, "size": STEP}),
        ("address", {"address": 1 << 64, "size": STEP}),
        ("address", {"address": True, "size": STEP}),
    ],
)
def test_bad_ranges_are_refused(devices: Devices, backend: FakeMulticast, argument: str, wrong: dict[str, Any]) -> None:
    with gi.create_multicast(devices[:2], SIZE) as multicast, devices[0].allocate(4 * STEP) as allocation:
        if "address" in wrong:
            refused(backend, lambda: multicast.bind_address(devices[0], **wrong), argument)
        else:
            refused(backend, lambda: multicast.bind_memory(allocation, **wrong), argument)


def test_a_device_binds_its_own_memory_and_was_added(devices: Devices, backend: FakeMulticast) -> None:
    multicast = gi.create_multicast(devices[:2], SIZE)
    foreign, shared = devices[2].allocate(SIZE), devices[0].allocate(SIZE, access=[devices[1]])
    seen = shared.buffer_on(devices[1])
    backend.lies_on = 0
    handle = gi.VmmFd.adopt(os.memfd_create("peer"))
    os.ftruncate(handle.fd, SIZE)
    peers = devices[1].import_allocation(handle, SIZE)
    added = "was not added to .* here; add_device"
    refused(backend, lambda: multicast.bind_memory(foreign), "allocation", added)
    refused(backend, lambda: multicast.bind_address(devices[2], 1 << 30, STEP), "device", added)
    refused(backend, lambda: multicast.bind_address(devices[1], seen, STEP), "address", "expected memory of")
    refused(backend, lambda: multicast.bind_memory(peers), "allocation", "on device 0")
    wrong: Any = shared.buffer
    refused(backend, lambda: multicast.bind_memory(wrong), "allocation", error=gi.ArgumentTypeError)
    backend.lies_on = None
    foreign.close(timeout=LIMIT)
    with pytest.raises(gi.ResourceClosedError):
        multicast.bind_memory(foreign)
    close_all(multicast, shared, peers)


def test_binding_an_address(devices: Devices, backend: FakeMulticast) -> None:
    """A buffer's is its own, with its offset, and a multiple of the granularity."""
    with (
        gi.create_multicast(devices[:2], SIZE) as multicast,
        devices[0].import_memory(gi.OpaqueWin32(handle=8), size=4 * STEP) as memory,
    ):
        whole, odd, even = memory.map_buffer(), memory.map_buffer(STEP // 2, STEP), memory.map_buffer(STEP, STEP)
        refused(backend, lambda: multicast.bind_address(devices[0], odd, STEP), "address", "a multiple")
        by_buffer = multicast.bind_address(devices[0], even, STEP, STEP)
        by_number = multicast.bind_address(devices[1], 1 << 33, STEP, 2 * STEP)
        assert [call for call in backend.calls if call[0] == "bind_address"] == [
            ("bind_address", multicast._handle, 0, STEP, whole.ptr + STEP, STEP),
            ("bind_address", multicast._handle, 1, 2 * STEP, 1 << 33, STEP),
        ]
        assert (by_number.memory, by_buffer.memory) == (None, even)
        assert multicast.bindings == (by_buffer, by_number)


def test_a_shared_object_takes_shareable_memory_only(devices: Devices, backend: FakeMulticast) -> None:
    backend.shareable = False
    handle = gi.VmmFd.adopt(os.memfd_create("allocation"))
    os.ftruncate(handle.fd, SIZE)
    with (
        gi.create_multicast(devices[:2], SIZE, gi.VmmFd) as shared,
        devices[0].import_allocation(handle, SIZE) as theirs,
    ):
        match = r"0x200000000 was not allocated here to be shared.*Device\.allocate"
        refused(backend, lambda: shared.bind_address(devices[1], 1 << 33, STEP), "address", match)
        assert backend.asked[-1] == ("is_shareable", 1, 1 << 33)
        refused(backend, lambda: shared.bind_memory(theirs), "allocation", r"was imported.*Device\.allocate")
        with gi.create_multicast(devices[:2], SIZE) as private:
            private.bind_address(devices[1], 1 << 33, STEP)
            private.bind_memory(theirs)


def test_nothing_is_bound_twice(devices: Devices, backend: FakeMulticast) -> None:
    with (
        gi.create_multicast(devices[:2], SIZE) as multicast,
        devices[0].allocate(SIZE) as first,
        devices[1].allocate(SIZE) as second,
    ):
        multicast.bind_memory(first, 2 * STEP, size=2 * STEP)
        for offset, size in ((0, SIZE), (2 * STEP, 2 * STEP), (0, 3 * STEP), (3 * STEP, STEP)):
            match = rf"overlaps the binding of device 0, offset={2 * STEP}, size={2 * STEP}"
            refused(backend, partial(multicast.bind_memory, first, offset, size=size), "offset", match)
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
    with gi.create_multicast(devices[:2], SIZE) as multicast, devices[0].allocate(SIZE) as first:
        binding = multicast.bind_memory(first, 2 * STEP, size=2 * STEP)
        match = rf"bound: device 0, offset={2 * STEP}, size={2 * STEP}"
        for offset, size in ((2 * STEP, STEP), (3 * STEP, STEP), (2 * STEP, 4 * STEP), (0, STEP)):
            refused(backend, partial(multicast.unbind, devices[0], offset, size), "offset", match)
        refused(backend, lambda: multicast.unbind(devices[1], 2 * STEP, 2 * STEP), "offset", match)
        multicast.unbind(devices[0], 2 * STEP, 2 * STEP)
        assert binding.closed
        assert backend.calls[-1] == ("unbind", multicast._handle, 0, 2 * STEP, 2 * STEP)
        multicast.bind_memory(first, 2 * STEP, size=STEP)  # free again


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
    with pytest.raises(gi.ResourceBusyError, match="unbind failed"):
        multicast.bind_memory(allocation)
    for parent in (multicast, allocation):  # the driver may still use both
        with pytest.raises(gi.ResourceBusyError, match=r"MulticastBinding #\d+ "):
            parent.close(timeout=0)
    assert backend.live == {multicast._handle, allocation._handle}


# -- mapping, export and import ---------------------------------------------------------------------------------------


def test_mapping_for_devices(devices: Devices, backend: FakeMulticast) -> None:
    with gi.create_multicast(devices[:3], SIZE) as multicast:
        everybody = multicast.map()
        some = multicast.map([devices[2], devices[0], devices[2]])
        group = multicast._handle
        assert [call for call in backend.calls if call[0] == "map_allocation"] == [
            ("map_allocation", group, (0, 1, 2)),
            ("map_allocation", group, (2, 0)),
        ]
        assert everybody.devices == tuple(devices[:3])
        assert some.devices == (devices[2], devices[0])
        assert (everybody.ptr, everybody.size, everybody.multicast) == (1 << 40, SIZE, multicast)
        refused(backend, lambda: multicast.map([devices[3]]), "devices", "was not added")
        refused(backend, lambda: multicast.map([]), "devices", "add_device")
        some.close(timeout=LIMIT)
        assert releases(backend) == ["unmap"]
        with pytest.raises(gi.ResourceClosedError):
            _ = some.ptr
    with pytest.raises(gi.ResourceClosedError):
        _ = everybody.ptr
    with pytest.raises(gi.ResourceClosedError):
        multicast.map()
    with gi.create_multicast(2, SIZE, device=devices[0]) as multicast:
        refused(backend, lambda: multicast.map(assume_all_added=True), "devices", "add_device")


def test_only_multimem_may_touch_a_mapping(devices: Devices, backend: FakeMulticast) -> None:
    with gi.create_multicast(devices, SIZE) as multicast, devices[0].allocate(SIZE) as allocation:
        mapping: Any = multicast.map()
        buffer = allocation.buffer
        calls: list[Callable[[], object]] = [
            lambda: hasattr(mapping, "__cuda_array_interface__"),  # a library that looks must hear it, too
            lambda: np.asarray(mapping),
            lambda: np.from_dlpack(mapping),
            lambda: buffer.copy_from_host(mapping),
        ]
        for call in calls:
            with pytest.raises(gi.UnsupportedError, match=r"only multimem.*\.ptr.*ordinary buffer"):
                call()
        assert "copy" not in names(backend)


def test_export(devices: Devices, backend: FakeMulticast) -> None:
    with gi.create_multicast(devices, SIZE, gi.VmmFd) as multicast, multicast.export() as handle:
        assert isinstance(handle, gi.VmmFd)
        assert handle.origin == HandleOrigin(kind=OriginKind.MULTICAST, size=SIZE, trusted=True)
        refused(backend, lambda: multicast.export(gi.FabricHandle), "handle_type", "VmmFd")
    with gi.create_multicast(devices, SIZE, (gi.VmmFd, gi.FabricHandle)) as multicast:
        refused(backend, multicast.export, "handle_type", "VmmFd, FabricHandle")
        assert isinstance(multicast.export(gi.FabricHandle), gi.FabricHandle)
    with gi.create_multicast(devices, SIZE) as multicast:
        refused(backend, multicast.export, "handle_type", "none; pass handle_types= to create_multicast")


def test_import_consumes_the_handle(devices: Devices, backend: FakeMulticast) -> None:
    with gi.create_multicast(3, SIZE, gi.VmmFd, device=devices[0]) as multicast:
        handle = multicast.export()
    backend.calls.clear()
    with gi.import_multicast(handle, 3, SIZE, device=devices[1]) as imported:
        assert handle.closed
        assert backend.calls == [("import_multicast", 1, 3, SIZE)]
        assert (imported.device, imported.device_count, imported.devices) == (devices[1], 3, ())
        assert imported.handle_types == (gi.VmmFd,)
        imported.add_device(devices[1])
        refused(backend, imported.export, "multicast", r"was imported.*; duplicate\(\)")
    assert not backend.live
    with pytest.raises(gi.HandleError):
        gi.import_multicast(handle, 3, SIZE, device=devices[1])


def test_what_was_exported_is_not_taken_for_another_thing(devices: Devices, backend: FakeMulticast) -> None:
    with gi.create_multicast(devices, SIZE, gi.VmmFd) as multicast, devices[0].allocate(SIZE) as allocation:
        group, memory = multicast.export(), allocation.export()
    backend.calls.clear()
    with pytest.raises(gi.HandleError, match="exported from an allocation"):
        gi.import_multicast(memory, devices, SIZE)
    with pytest.raises(gi.HandleError, match="exported from a multicast"):
        devices[0].import_allocation(group, SIZE)
    for size in (SIZE - STEP, SIZE + STEP, SIZE + 1):
        refused(backend, partial(gi.import_multicast, group, devices, size), "size", f"{SIZE} bytes")
    wrong: Any = gi.SyncFd(3)
    refused(backend, lambda: gi.import_multicast(wrong, devices, SIZE), "handle", error=gi.ArgumentTypeError)
    assert not backend.calls
    with group, memory:
        assert not group.closed
        assert not memory.closed


@pytest.mark.parametrize("call", ["import_multicast", "add_device"])
def test_a_failed_import_leaves_the_handle(devices: Devices, backend: FakeMulticast, call: str) -> None:
    backend.on[call] = fail
    handle = gi.VmmFd.adopt(os.memfd_create("group"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(gi.DriverError):
        gi.import_multicast(handle, devices, SIZE)
    assert not backend.live
    assert not handle.closed
    os.fstat(handle.fd)
    assert len(os.listdir("/proc/self/fd")) == before
    backend.on.clear()
    gi.import_multicast(handle, devices, SIZE).close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


# -- releases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped_first", [False, True])
@pytest.mark.parametrize("done_after", range(8))
def test_releases_come_in_order(devices: Devices, backend: FakeMulticast, done_after: int, mapped_first: bool) -> None:
    """Whatever was made first, and whoever's work is seen as done first."""
    stream, multicast = devices[1].create_stream(), gi.create_multicast(devices[:2], SIZE)
    memory = [device.allocate(SIZE) for device in devices[:2]]
    makes: list[Callable[[], object]] = [multicast.map, *(partial(multicast.bind_memory, one) for one in memory)]
    made: list[Any] = [make() for make in (makes if mapped_first else reversed(makes))]
    backend.blocked.add(stream.ptr)
    looks = [done_after]

    def look() -> None:
        looks[0] -= 1
        if looks[0] < 0:
            backend.blocked.clear()

    backend.on_is_done = look
    multicast.close(timeout=LIMIT)
    assert releases(backend) == ["unmap", "unbind", "unbind", "release"]
    close_all(*made, *memory, stream)
    assert not backend.live


@pytest.mark.parametrize("what", ["mapping", "binding", "multicast"])
def test_the_work_of_every_device_is_waited_for(devices: Devices, backend: FakeMulticast, what: str) -> None:
    """Also that of a stream that is closed, and for a mapping of one device; not that of a device of no team."""
    multicast = gi.create_multicast(devices[:3], SIZE)
    allocation = devices[0].allocate(SIZE)
    mapping, binding = multicast.map(devices[:1]), multicast.bind_memory(allocation)
    things: dict[str, Any] = {"mapping": mapping, "binding": binding, "multicast": multicast}
    stream, other = devices[2].create_stream(), devices[3].create_stream()
    pending = stream.ptr
    backend.blocked |= {pending, other.ptr}
    stream.close()
    things[what].close()
    devices[0].drain()
    assert releases(backend) == []
    with pytest.raises(gi.ResourceBusyError, match="pending"):
        things[what].close(timeout=0)
    backend.blocked.remove(pending)
    things[what].close(timeout=LIMIT)
    assert releases(backend) == {
        "mapping": ["unmap"], "binding": ["unbind"], "multicast": ["unmap", "unbind", "release"],
    }[what]  # fmt: skip
    backend.blocked.clear()
    close_all(multicast, allocation, other)


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


@pytest.mark.parametrize("closing", ["multicast", "allocation"])
def test_what_is_closed_while_it_is_bound_is_unbound_again(
    devices: Devices, backend: FakeMulticast, closing: str
) -> None:
    """And released after that; a driver that blocks holds nothing else up."""
    inside, go_on = threading.Event(), threading.Event()
    allocation, other = devices[0].allocate(SIZE), devices[0].allocate(SIZE)
    multicast = gi.create_multicast(devices[:1], SIZE, gi.VmmFd)

    def block() -> None:
        inside.set()
        assert go_on.wait(LIMIT)

    def bind() -> None:
        with pytest.raises(gi.ResourceClosedError):
            multicast.bind_memory(allocation, size=STEP)

    backend.on["bind_memory"] = block
    with beside(bind):
        assert inside.wait(LIMIT)
        del backend.on["bind_memory"]
        refused(backend, lambda: multicast.bind_memory(other), "offset", "overlaps")
        multicast.bind_memory(other, STEP, size=STEP)
        {"multicast": multicast, "allocation": allocation}[closing].close()
        assert "release" not in releases(backend)
        go_on.set()
    close_all(multicast, allocation, other)
    handle = {"multicast": multicast, "allocation": allocation}[closing]._handle
    unbound = backend.calls.index(("unbind", multicast._handle, 0, 0, STEP))
    assert unbound < backend.calls.index(("release_allocation", handle))
    assert not backend.live


def test_a_buffer_that_is_closed_while_it_is_bound_stays_mapped_until_it_is_unbound(
    devices: Devices, backend: FakeMulticast
) -> None:
    """Also where work of another device of the team, which does not map the memory, holds the unbind up."""
    multicast, allocation = gi.create_multicast(devices[:2], SIZE, gi.VmmFd), devices[0].allocate(SIZE)
    buffer, stream = allocation.buffer, devices[1].create_stream()
    backend.blocked.add(stream.ptr)
    backend.on["bind_address"] = allocation.close
    with pytest.raises(gi.ResourceClosedError, match="Buffer"):
        multicast.bind_address(devices[0], buffer, STEP)
    devices[0].drain()
    assert releases(backend) == []
    backend.blocked.clear()
    close_all(allocation, stream)
    assert releases(backend) == ["unbind", "unmap", "release"]
    multicast.close(timeout=LIMIT)
