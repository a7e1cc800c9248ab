"""Multicast objects: every rule holds before the driver is called, and releases come in order."""

import gc
import os
import queue
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop._core import drain, monitor, registry
from gpuinterop._core.device import Device
from gpuinterop.capabilities import DOMAIN, Capability, Operation, Scope, Support
from gpuinterop.handles import HandleOrigin, OriginKind

from .fake import FakeMulticast, fake_device, fake_team

LIMIT = 20.0
STEP, GOOD = FakeMulticast.GROUPS
SIZE = 8 * STEP
REFUSED = gi.DriverError("cuSomething", 1, "CUDA_ERROR_INVALID_VALUE")
Team = tuple[list[Device], FakeMulticast]


@pytest.fixture
def team() -> Team:
    return fake_team()


def names(backend: FakeMulticast) -> list[str]:
    return [call[0] for call in backend.calls]


def releases(backend: FakeMulticast) -> list[str]:
    """The native releases of a multicast object and what hangs on it, in the order they came in."""
    kinds = {"unmap_allocation": "unmap", "unbind": "unbind", "release_allocation": "release"}
    return [kinds[call[0]] for call in backend.calls if call[0] in kinds]


def fail() -> None:
    raise REFUSED


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


def allocations(devices: Iterable[Device], size: int = SIZE) -> list[gi.Allocation]:
    return [device.allocate(size) for device in devices]


def close_all(*resources: Any) -> None:
    for one in resources:
        one.close(timeout=LIMIT)


# -- creating --------------------------------------------------------------------------------------------------------


def test_a_team_of_devices_is_added_at_once(team: Team) -> None:
    devices, backend = team
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


def test_a_team_over_processes_is_a_number(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, backend = team
    with gi.create_multicast(3, SIZE, (gi.VmmFd, gi.FabricHandle, gi.VmmFd), device=devices[2]) as multicast:
        assert names(backend) == ["create_multicast"]
        assert backend.calls[0][1:] == (2, 3, SIZE, (gi.VmmFd, gi.FabricHandle))
        added: list[Device] = []
        for device in devices[:3]:
            assert (multicast.devices, multicast.complete) == (tuple(added), False)
            multicast.add_device(device)
            added.append(device)
        assert (multicast.devices, multicast.complete) == (tuple(added), True)
    monkeypatch.setattr(registry, "device", lambda: devices[3])
    number: Any = np.int64(3)
    with gi.create_multicast(number, SIZE) as multicast:
        assert multicast.device is devices[3]
        assert multicast.handle_types == ()


@pytest.mark.parametrize("chosen", [False, True])
def test_a_team_may_be_any_iterable(team: Team, chosen: bool) -> None:
    """One that can be gone through once is, and nobody of it is left out."""
    devices, backend = team

    def those() -> Any:
        return (device for device in devices[:3])

    device = devices[3] if chosen else None
    with gi.create_multicast(those(), SIZE, gi.VmmFd, device=device) as multicast, multicast.export() as handle:
        assert (multicast.device_count, multicast.devices) == (3, tuple(devices[:3]))
        assert multicast.device is (device or devices[0])
        with gi.import_multicast(handle, those(), SIZE, device=device) as imported:
            assert (imported.device_count, imported.devices) == (3, tuple(devices[:3]))
    devices[3].multicast_granularity(those(), SIZE)
    assert backend.asked[-1] == ("multicast_granularity", 3, SIZE, ())


def test_granularity_is_known_before_creation(team: Team) -> None:
    devices, backend = team
    for asked in (3, devices[:3]):
        found = devices[0].multicast_granularity(asked, 12345, gi.VmmFd)
        assert (found.minimum, found.recommended) == (STEP, GOOD)
        assert backend.asked[-1] == ("multicast_granularity", 3, 12345, (gi.VmmFd,))
    assert not backend.calls


def test_a_size_beside_the_granularity_names_the_next_good_one(team: Team) -> None:
    devices, backend = team
    for size in (1, STEP - 1, STEP + 1, SIZE + STEP // 2):
        good, best = -(-size // STEP) * STEP, -(-size // GOOD) * GOOD
        match = rf"no multiple of the granularity, {STEP}: the next good size is {good};.* {GOOD}: {best}\."
        refused(backend, partial(gi.create_multicast, devices, size), "size", match)
        gi.create_multicast(devices, good).close()  # what it names is good
    for size in (0, -STEP, 1 << 63):
        refused(backend, partial(gi.create_multicast, devices, size), "size")


def test_bad_teams_are_refused(team: Team) -> None:
    devices, backend = team
    stranger = fake_team()[0][0]
    refused(backend, lambda: gi.create_multicast([], SIZE), "devices", error=gi.ArgumentTypeError)
    refused(backend, lambda: gi.create_multicast([], SIZE, device=devices[0]), "devices", "one device or more")
    refused(backend, lambda: gi.create_multicast(0, SIZE, device=devices[0]), "devices", "expected 1 or more, got 0")
    refused(backend, lambda: gi.create_multicast([devices[0], devices[0]], SIZE), "devices", "twice")
    refused(backend, lambda: gi.create_multicast([devices[0], stranger], SIZE), "devices", "another backend")
    refused(backend, lambda: gi.create_multicast(devices, SIZE, device=stranger), "devices", "another backend")
    bad: list[Any] = [[0, 1], "01", True, 1.5, None]
    for teams in bad:
        refused(
            backend, partial(gi.create_multicast, teams, SIZE, device=devices[0]), "devices",
            error=gi.ArgumentTypeError,
        )  # fmt: skip
    wrong: Any = 0
    refused(backend, lambda: gi.create_multicast(2, SIZE, device=wrong), "device", error=gi.ArgumentTypeError)
    kinds: list[Any] = [gi.OpaqueFd, "vmm_fd", [gi.VmmFd, 3], None]
    for kind in kinds:
        refused(
            backend, partial(gi.create_multicast, devices, SIZE, kind), "handle_types",
            error=gi.ArgumentTypeError,
        )  # fmt: skip


def test_every_device_must_have_multicast_and_the_exports() -> None:
    cases: list[tuple[Operation, Callable[[list[Device]], object]]] = [
        (Operation.CREATE_MULTICAST, lambda devices: gi.create_multicast(devices, SIZE)),
        (Operation.CREATE_MULTICAST, lambda devices: gi.create_multicast(devices[::-1], SIZE)),
        (Operation.CREATE_MULTICAST, lambda devices: devices[1].multicast_granularity(devices, SIZE)),
        (Operation.EXPORT_MULTICAST, lambda devices: gi.create_multicast(devices, SIZE, gi.VmmFd)),
        (Operation.IMPORT_MULTICAST, lambda devices: gi.import_multicast(gi.FabricHandle(bytes(64)), devices, SIZE)),
    ]
    for gap, call in cases:
        devices, backend = fake_team()
        broken, _ = fake_team(gap, backend=backend)
        devices[1] = broken[1]  # one of the team, and not the one that the driver is called through
        with pytest.raises(gi.UnsupportedError, match=f"{gap.value}.*the test says so") as caught:
            call(devices[:3])
        assert caught.value.capability.operation is gap
        assert not backend.calls
        assert not backend.asked
    multicast = gi.create_multicast(2, SIZE, device=devices[0])
    backend.calls.clear()
    hidden, _ = fake_team(Operation.CREATE_MULTICAST, backend=backend)
    with pytest.raises(gi.UnsupportedError):
        multicast.add_device(hidden[1])
    assert not backend.calls
    multicast.close()


def test_a_backend_without_multicast_has_a_gap() -> None:
    for gap in (Operation.CREATE_MULTICAST, Operation.EXPORT_MULTICAST):
        device, backend = fake_device(gap)
        with pytest.raises(gi.UnsupportedError):
            gi.create_multicast([device], SIZE, gi.VmmFd)
        assert not backend.calls
    device, backend = fake_device(Operation.IMPORT_MULTICAST)
    handle = gi.VmmFd.adopt(os.memfd_create("group"))
    with handle, pytest.raises(gi.UnsupportedError):
        gi.import_multicast(handle, [device], SIZE)
    assert not backend.calls


@pytest.mark.parametrize("pattern", ["*multicast*", "create_multicast,export_multicast,import_multicast"])
def test_it_can_be_turned_off(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setenv("GPUINTEROP_BACKEND", "willing")
    point = EntryPoint("willing", f"{__name__}:Willing", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    monkeypatch.delenv("GPUINTEROP_DISABLE", raising=False)
    with gi.create_multicast(2, SIZE, gi.VmmFd) as multicast:  # and the default device is the chosen one
        assert multicast.device is gi.device()
        handle = multicast.export()
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setenv("GPUINTEROP_DISABLE", pattern)
    device = gi.device(1)
    backend = device._backend
    assert isinstance(backend, Willing)
    for call in (
        lambda: gi.create_multicast(2, SIZE),
        lambda: gi.create_multicast(gi.devices(), SIZE),
        lambda: gi.import_multicast(handle, 2, SIZE),
        lambda: device.multicast_granularity(2, SIZE),
    ):
        with pytest.raises(gi.UnsupportedError, match="GPUINTEROP_DISABLE") as caught:
            call()
        assert caught.value.capability.support is Support.DISABLED
    assert not backend.calls
    assert not handle.closed
    handle.close()
    off = [cell for cell in DOMAIN if device.capabilities.of(cell).support is Support.DISABLED]
    assert {cell.operation for cell in off} == {
        Operation.CREATE_MULTICAST, Operation.EXPORT_MULTICAST, Operation.IMPORT_MULTICAST,
    }  # fmt: skip
    with device.allocate(STEP) as allocation:  # nothing else is
        assert allocation.buffer.size == STEP


class Willing(FakeMulticast):
    name = "willing"

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return [cell.unverified(Scope.DRIVER, "says so.", "its manual") for cell in DOMAIN]


@pytest.mark.parametrize("call", ["create_multicast", "add_device"])
def test_a_failed_creation_leaves_nothing(team: Team, call: str) -> None:
    devices, backend = team
    left = [3]

    def fail_at_last() -> None:
        left[0] -= 1
        if call == "create_multicast" or not left[0]:
            fail()

    backend.on[call] = fail_at_last
    with pytest.raises(gi.DriverError):
        gi.create_multicast(devices, SIZE)
    assert not backend.live
    assert names(backend).count("add_device") == (3 if call == "add_device" else 0)
    assert releases(backend) == (["release"] if call == "add_device" else [])


@pytest.mark.parametrize("imported", [False, True])
def test_a_release_that_fails_too_does_not_hide_the_failure(team: Team, imported: bool) -> None:
    devices, backend = team

    def fail_otherwise() -> None:
        raise gi.DriverError("cuMemRelease", 999, "CUDA_ERROR_UNKNOWN")

    backend.on.update(add_device=fail, release_allocation=fail_otherwise)
    with (
        gi.FabricHandle(bytes(64)) as handle,
        pytest.warns(gi.LeakedResourceWarning, match=r"MulticastObject #\d+ failed: cuMemRelease"),
        pytest.raises(gi.DriverError, match="cuSomething"),
    ):
        if imported:
            gi.import_multicast(handle, devices, SIZE)
        else:
            gi.create_multicast(devices, SIZE)


def test_adding_devices(team: Team) -> None:
    devices, backend = team
    with gi.create_multicast(2, SIZE, device=devices[3]) as multicast:
        wrong: Any = 0
        refused(backend, lambda: multicast.add_device(wrong), "device", error=gi.ArgumentTypeError)
        refused(backend, lambda: multicast.add_device(fake_team()[0][0]), "device", "another backend")
        backend.on["add_device"] = fail
        with pytest.raises(gi.DriverError):
            multicast.add_device(devices[0])
        assert multicast.devices == ()
        del backend.on["add_device"]
        multicast.add_device(devices[0])
        refused(backend, lambda: multicast.add_device(devices[0]), "device", "added already")
        multicast.add_device(devices[1])
        refused(backend, lambda: multicast.add_device(devices[2]), "device", "2 devices, and all were added")
    with pytest.raises(gi.ResourceClosedError):
        multicast.add_device(devices[2])


@pytest.mark.parametrize("use", ["bind_memory", "bind_address", "map"])
def test_no_device_is_added_behind_a_bind_or_a_map(team: Team, use: str) -> None:
    devices, backend = team
    with (
        gi.create_multicast(3, SIZE, gi.VmmFd, device=devices[0]) as multicast,
        devices[0].allocate(SIZE) as allocation,
    ):
        multicast.add_device(devices[0])
        if use == "bind_memory":
            multicast.bind_memory(allocation, assume_all_added=True)
        elif use == "bind_address":
            multicast.bind_address(devices[0], allocation.buffer, SIZE, assume_all_added=True)
        else:
            mapping = multicast.map(assume_all_added=True)
            assert mapping.devices == (devices[0],)
        refused(backend, lambda: multicast.add_device(devices[1]), "device", "before anything is bound or mapped")


def test_what_was_refused_does_not_end_the_adding(team: Team) -> None:
    devices, _backend = team
    with gi.create_multicast(2, SIZE, device=devices[0]) as multicast, devices[0].allocate(SIZE) as allocation:
        multicast.add_device(devices[0])
        for call in (lambda: multicast.bind_memory(allocation), multicast.map):
            with pytest.raises(gi.InvalidArgumentError):
                call()
        multicast.add_device(devices[1])


def test_what_the_driver_refused_does_not_end_the_adding(team: Team) -> None:
    devices, backend = team
    with gi.create_multicast(2, SIZE, device=devices[0]) as multicast, devices[0].allocate(SIZE) as allocation:
        multicast.add_device(devices[0])
        backend.on.update(bind_memory=fail, map_allocation=fail)
        for call in (partial(multicast.bind_memory, allocation), multicast.map):
            with pytest.raises(gi.DriverError):
                call(assume_all_added=True)
        multicast.add_device(devices[1])


@pytest.mark.parametrize("use", ["bind_memory", "map_allocation"])
def test_a_refusal_leaves_what_another_has_said(team: Team, use: str) -> None:
    """Somebody else's bind or map went well, or is under way: all devices are there."""
    devices, backend = team
    with gi.create_multicast(2, SIZE, device=devices[0]) as multicast, devices[0].allocate(SIZE) as allocation:
        multicast.add_device(devices[0])

        def meanwhile() -> None:
            backend.on["map_allocation"] = fail
            with pytest.raises(gi.DriverError):
                multicast.map(assume_all_added=True)
            refused(backend, lambda: multicast.add_device(devices[1]), "device", "before anything is bound or mapped")
            del backend.on["map_allocation"]

        backend.on[use] = meanwhile
        if use == "bind_memory":
            multicast.bind_memory(allocation, assume_all_added=True).close()
        else:
            multicast.map(assume_all_added=True).close()
        meanwhile()


# -- all were added --------------------------------------------------------------------------------------------------


def test_nothing_is_bound_or_mapped_before_all_were_added(team: Team) -> None:
    """The driver would block, for ever if need be."""
    devices, backend = team
    allocation = devices[0].allocate(SIZE)
    multicast = gi.create_multicast(2, SIZE, gi.VmmFd, device=devices[0])
    multicast.add_device(devices[0])
    address, buffer = 1 << 33, allocation.buffer
    calls: list[Callable[[], object]] = [
        lambda: multicast.bind_memory(allocation),
        lambda: multicast.bind_address(devices[0], address, STEP),
        lambda: multicast.bind_address(devices[0], buffer, STEP),
        multicast.map,
        lambda: multicast.map([devices[0]]),
    ]
    for call in calls:
        match = r"1 of the team's 2 devices.*gpuinterop\.exchange.*assume_all_added=True"
        refused(backend, call, "assume_all_added", match)
    multicast.add_device(devices[1])
    multicast.bind_memory(allocation)
    with multicast.map():
        close_all(multicast, allocation)


def test_who_knows_that_all_were_added_says_so(team: Team) -> None:
    devices, backend = team
    with (
        gi.create_multicast(2, SIZE, gi.VmmFd, device=devices[0]) as multicast,
        devices[0].allocate(SIZE) as allocation,
    ):
        multicast.add_device(devices[0])
        multicast.bind_memory(allocation, size=STEP, assume_all_added=True)
        multicast.bind_address(devices[0], allocation.buffer, STEP, STEP, assume_all_added=True)
        with multicast.map(assume_all_added=True) as mapping:
            assert mapping.devices == (devices[0],)
        assert [name for name in names(backend) if name.startswith("bind")] == ["bind_memory", "bind_address"]
        assert not multicast.complete


# -- binding ---------------------------------------------------------------------------------------------------------


def test_binding_memory(team: Team) -> None:
    devices, backend = team
    with (
        gi.create_multicast(devices[:2], SIZE) as multicast,
        devices[1].allocate(4 * STEP) as small,
        devices[0].allocate(2 * SIZE) as large,
    ):
        whole = multicast.bind_memory(small)
        part = multicast.bind_memory(large, 2 * STEP, start=STEP, size=3 * STEP)
        rest = multicast.bind_memory(large, 5 * STEP, start=SIZE)
        group = multicast._native
        assert [call for call in backend.calls if call[0] == "bind_memory"] == [
            ("bind_memory", group, 1, 0, small._native, 0, 4 * STEP),
            ("bind_memory", group, 0, 2 * STEP, large._native, STEP, 3 * STEP),
            ("bind_memory", group, 0, 5 * STEP, large._native, SIZE, 3 * STEP),
        ]
        assert multicast.bindings == (whole, part, rest)
        assert (part.device, part.offset, part.size, part.memory) == (devices[0], 2 * STEP, 3 * STEP, large)
        assert part.multicast is multicast


def test_bad_ranges_are_refused(team: Team) -> None:
    devices, backend = team
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
    match = f"{STEP + half} is no multiple of the granularity, {STEP}; the next is {2 * STEP}"
    refused(backend, lambda: multicast.bind_memory(odd, size=STEP + half), "size", match)
    close_all(multicast, allocation, odd)


def test_a_device_binds_its_own_memory_and_was_added(team: Team) -> None:
    devices, backend = team
    multicast = gi.create_multicast(devices[:2], SIZE)
    foreign, shared = devices[2].allocate(SIZE), devices[0].allocate(SIZE, access=[devices[1]])
    seen = shared.buffer_on(devices[1])
    backend.lies_on = 0
    handle = gi.VmmFd.adopt(os.memfd_create("peer"))
    os.ftruncate(handle.fd, SIZE)
    peers = devices[1].import_allocation(handle, SIZE)
    there = peers.buffer
    added = "was not added to .* here: add_device"
    refused(backend, lambda: multicast.bind_memory(foreign), "allocation", added)
    refused(backend, lambda: multicast.bind_address(devices[2], 1 << 30, STEP), "device", added)
    refused(backend, lambda: multicast.bind_address(devices[1], seen, STEP), "address", "binds its own only")
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


def test_binding_an_address(team: Team) -> None:
    devices, backend = team
    with (
        gi.create_multicast(devices[:2], SIZE, gi.VmmFd) as multicast,
        devices[0].allocate(SIZE) as allocation,
    ):
        by_number = multicast.bind_address(devices[1], 1 << 33, STEP, 2 * STEP)
        by_buffer = multicast.bind_address(devices[0], allocation.buffer, 3 * STEP, STEP)
        group = multicast._native
        assert [call for call in backend.calls if call[0] == "bind_address"] == [
            ("bind_address", group, 1, 2 * STEP, 1 << 33, STEP),
            ("bind_address", group, 0, STEP, allocation.buffer.ptr, 3 * STEP),
        ]
        assert by_number.memory is None
        assert by_buffer.memory is allocation.buffer
        assert multicast.bindings == (by_number, by_buffer)


def test_a_part_of_a_buffer_starts_at_the_granularity(team: Team) -> None:
    devices, backend = team
    with (
        gi.create_multicast(devices[:2], SIZE) as multicast,
        devices[0].import_memory(gi.OpaqueWin32(handle=8), size=4 * STEP) as memory,
    ):
        whole = memory.map_buffer()
        odd, even = memory.map_buffer(STEP // 2, STEP), memory.map_buffer(STEP, STEP)
        refused(backend, lambda: multicast.bind_address(devices[0], odd, STEP), "address", "no multiple")
        multicast.bind_address(devices[0], even, STEP)
        assert backend.calls[-1][-2:] == (whole.ptr + STEP, STEP)


@pytest.mark.parametrize("imported", [False, True])
def test_a_shared_object_takes_shareable_memory_only(team: Team, imported: bool) -> None:
    devices, backend = team
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


def test_nothing_is_bound_twice(team: Team) -> None:
    devices, backend = team
    with (
        gi.create_multicast(devices[:2], SIZE) as multicast,
        devices[0].allocate(SIZE) as first,
        devices[1].allocate(SIZE) as second,
    ):
        buffer = first.buffer
        multicast.bind_memory(first, 2 * STEP, size=2 * STEP)
        for offset, size in ((0, SIZE), (2 * STEP, 2 * STEP), (0, 3 * STEP), (3 * STEP, STEP)):
            match = rf"overlaps what is bound: device 0, offset={2 * STEP}, size={2 * STEP}"
            refused(backend, partial(multicast.bind_memory, first, offset, size=size), "offset", match)
            refused(backend, partial(multicast.bind_address, devices[0], buffer, size, offset), "offset", match)
        multicast.bind_memory(second)  # another device's bytes are others
        multicast.bind_memory(first, 0, size=2 * STEP)
        multicast.bind_memory(first, 4 * STEP, size=STEP)
        assert len(multicast.bindings) == 4


def test_a_failed_bind_leaves_the_bytes_free(team: Team) -> None:
    devices, backend = team
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


def test_an_unbind_equals_its_bind(team: Team) -> None:
    devices, backend = team
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
        assert backend.calls[-1] == ("unbind", multicast._native, 0, 2 * STEP, 2 * STEP)
        assert [one.device for one in multicast.bindings] == [devices[1]]
        refused(backend, lambda: multicast.unbind(devices[0], 2 * STEP, 2 * STEP), "offset", "unbind equals its bind")
        multicast.bind_memory(first, 2 * STEP, size=STEP)  # free again
    with pytest.raises(gi.ResourceClosedError):
        multicast.unbind(devices[1], 0, STEP)


def test_a_closed_object_says_so_first(team: Team) -> None:
    """Not that devices are missing: nothing would be gained by adding them."""
    devices, _backend = team
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
            with pytest.raises(gi.ResourceClosedError, match=multicast.label):
                call()


@contextmanager
def unbind_to_come(team: Team) -> Iterator[tuple[gi.MulticastObject, gi.Allocation]]:
    """An object and memory that its first bytes were bound to, with work that the unbind still waits for."""
    devices, backend = team
    with (
        devices[1].create_stream() as stream,
        gi.create_multicast(devices[:2], SIZE) as multicast,
        devices[0].allocate(SIZE) as allocation,
    ):
        binding = multicast.bind_memory(allocation, size=STEP)
        backend.blocked.add(stream.ptr)
        binding.close()
        yield multicast, allocation


def test_bytes_whose_unbind_is_to_come_are_busy(team: Team) -> None:
    _, backend = team
    with unbind_to_come(team) as (multicast, allocation):
        before = len(backend.calls)
        with pytest.raises(gi.ResourceBusyError, match=r"not unbound yet.*pending.*close\(timeout"):
            multicast.bind_memory(allocation)
        assert len(backend.calls) == before
        multicast.bind_memory(allocation, STEP, start=STEP)
        backend.blocked.clear()
        multicast.bind_memory(allocation, size=STEP)


def test_a_driver_that_needs_a_moment_gets_it(team: Team) -> None:
    """To see work as done that is: the first look may come too early."""
    _, backend = team
    with unbind_to_come(team) as (multicast, allocation):
        looks: list[bool] = []

        def look() -> None:
            if looks:
                backend.blocked.clear()
            looks.append(True)

        backend.on_is_done = look
        multicast.bind_memory(allocation, size=STEP)
        assert len(looks) == 2


@pytest.mark.parametrize("call", ["create_multicast", "import_multicast", "map_allocation", "bind_memory"])
def test_what_is_retired_goes_before_the_driver_is_asked_for_more(team: Team, call: str) -> None:
    """Memory whose address was given away: any work so far may use it, and it is unmapped behind that."""
    devices, backend = team
    multicast = gi.create_multicast(devices[:1], SIZE)
    allocation, old = allocations([devices[0], devices[0]])
    stream = devices[0].create_stream()
    backend.blocked.add(stream.ptr)
    assert old.buffer.ptr
    old.close()
    assert releases(backend) == []
    backend.blocked.clear()
    calls: dict[str, Callable[[], Any]] = {
        "create_multicast": lambda: gi.create_multicast(devices[:1], SIZE),
        "import_multicast": lambda: gi.import_multicast(gi.FabricHandle(bytes(64)), devices[:1], SIZE),
        "map_allocation": multicast.map,
        "bind_memory": lambda: multicast.bind_memory(allocation),
    }
    backend.calls.clear()
    made = calls[call]()
    assert names(backend)[:3] == ["unmap_allocation", "release_allocation", call]
    assert backend.calls[1][1] == old._native
    close_all(made, multicast, allocation, stream)


def test_bytes_that_could_not_be_unbound_stay_taken(team: Team) -> None:
    devices, backend = team
    multicast = gi.create_multicast(devices[:1], SIZE)
    allocation = devices[0].allocate(SIZE)
    backend.on["unbind"] = fail
    with pytest.warns(gi.LeakedResourceWarning, match="cuSomething"):
        multicast.bind_memory(allocation).close(timeout=LIMIT)
    with pytest.raises(gi.ResourceBusyError, match=r"its unbind failed.*make a new multicast object"):
        multicast.bind_memory(allocation)
    for parent in (multicast, allocation):  # the driver may still use both
        with pytest.raises(gi.ResourceBusyError, match=r"MulticastBinding #\d+ is closed, and could not be released"):
            parent.close(timeout=0)
    assert backend.live == {multicast._native, allocation._native}


# -- mapping ---------------------------------------------------------------------------------------------------------


def test_mapping_for_devices(team: Team) -> None:
    devices, backend = team
    with gi.create_multicast(devices[:3], SIZE) as multicast:
        everybody = multicast.map()
        some = multicast.map([devices[2], devices[0], devices[2]])
        group = multicast._native
        assert [call for call in backend.calls if call[0] == "map_allocation"] == [
            ("map_allocation", group, (0, 1, 2)),
            ("map_allocation", group, (2, 0)),
        ]
        assert everybody.devices == tuple(devices[:3])
        assert some.devices == (devices[2], devices[0])
        assert (everybody.ptr, everybody.size, everybody.multicast) == (1 << 40, SIZE, multicast)
        refused(backend, lambda: multicast.map([devices[3]]), "devices", "was not added")
        refused(backend, lambda: multicast.map([]), "devices", "no device")
        wrong: Any = devices[0]
        refused(backend, lambda: multicast.map(wrong), "devices", error=gi.ArgumentTypeError)
        some.close(timeout=LIMIT)
        assert releases(backend) == ["unmap"]
        with pytest.raises(gi.ResourceClosedError):
            _ = some.ptr
    with pytest.raises(gi.ResourceClosedError):
        _ = everybody.ptr
    with pytest.raises(gi.ResourceClosedError):
        multicast.map()
    with gi.create_multicast(2, SIZE, device=devices[0]) as multicast:
        refused(backend, lambda: multicast.map(assume_all_added=True), "devices", "no device was added here")


def test_a_failed_map_leaves_nothing(team: Team) -> None:
    devices, backend = team
    backend.on["map_allocation"] = fail
    with gi.create_multicast(devices, SIZE) as multicast, pytest.raises(gi.DriverError):
        multicast.map()
    assert releases(backend) == ["release"]
    assert not backend.live


def test_only_multimem_may_touch_a_mapping(team: Team) -> None:
    devices, backend = team
    with gi.create_multicast(devices, SIZE) as multicast, devices[0].allocate(SIZE) as allocation:
        mapping: Any = multicast.map()
        assert not isinstance(mapping, gi.Buffer)
        for name in ("view", "fill", "copy_from_host", "copy_to_host"):
            assert not hasattr(mapping, name)
        buffer = allocation.buffer
        calls: list[Callable[[], object]] = [
            lambda: mapping.__dlpack__(stream=-1, max_version=(1, 0)),
            mapping.__dlpack_device__,
            lambda: mapping.__array__(dtype="float32", copy=False),
            lambda: mapping.__array_interface__,
            lambda: mapping.__array_struct__,
            lambda: mapping.__cuda_array_interface__,
            lambda: hasattr(mapping, "__cuda_array_interface__"),  # a library that looks must hear it, too
            lambda: hasattr(mapping, "__array_interface__"),
            lambda: np.asarray(mapping),
            lambda: np.from_dlpack(mapping),
            lambda: buffer.copy_from_host(mapping),
        ]
        for call in calls:
            with pytest.raises(gi.UnsupportedError, match=r"only multimem.*\.ptr.*ordinary buffer") as caught:
                call()
            assert not caught.value.capability
            assert mapping.label in str(caught.value)
        assert "copy" not in names(backend)


# -- export and import -----------------------------------------------------------------------------------------------


def test_export(team: Team) -> None:
    devices, backend = team
    with gi.create_multicast(devices, SIZE, gi.VmmFd) as multicast, multicast.export() as handle:
        assert isinstance(handle, gi.VmmFd)
        assert handle.origin == HandleOrigin(kind=OriginKind.MULTICAST, size=SIZE, trusted=True)
        refused(backend, lambda: multicast.export(gi.FabricHandle), "handle_type", "VmmFd")
        wrong: Any = 3
        refused(backend, lambda: multicast.export(wrong), "handle_type")
    with pytest.raises(gi.ResourceClosedError):
        multicast.export()
    with gi.create_multicast(devices, SIZE, (gi.VmmFd, gi.FabricHandle)) as multicast:
        refused(backend, multicast.export, "handle_type", "VmmFd, FabricHandle")
        assert isinstance(multicast.export(gi.FabricHandle), gi.FabricHandle)
    with gi.create_multicast(devices, SIZE) as multicast:
        refused(backend, multicast.export, "handle_type", "none; give handle_types= to create_multicast")


def test_import_consumes_the_handle(team: Team) -> None:
    devices, backend = team
    with gi.create_multicast(3, SIZE, gi.VmmFd, device=devices[0]) as multicast:
        handle = multicast.export()
    backend.calls.clear()
    with gi.import_multicast(handle, 3, SIZE, device=devices[1]) as imported:
        assert handle.closed
        assert backend.calls == [("import_multicast", 1, 3, SIZE)]
        assert (imported.device, imported.device_count, imported.devices) == (devices[1], 3, ())
        assert imported.handle_types == (gi.VmmFd,)
        imported.add_device(devices[1])
        refused(backend, imported.export, "multicast", r"was imported; duplicate\(\)")
    assert not backend.live
    with pytest.raises(gi.HandleError):
        gi.import_multicast(handle, 3, SIZE, device=devices[1])


def test_what_was_exported_is_not_taken_for_another_thing(team: Team) -> None:
    devices, backend = team
    with gi.create_multicast(devices, SIZE, gi.VmmFd) as multicast, devices[0].allocate(SIZE) as allocation:
        group, memory = multicast.export(), allocation.export()
    backend.calls.clear()
    with pytest.raises(gi.HandleError, match="exported from an allocation object"):
        gi.import_multicast(memory, devices, SIZE)
    with pytest.raises(gi.HandleError, match="exported from a multicast object"):
        devices[0].import_allocation(group, SIZE)
    for size in (SIZE - STEP, SIZE + STEP, SIZE + 1):
        refused(backend, partial(gi.import_multicast, group, devices, size), "size", f"is {SIZE} bytes")
    bad: list[Any] = [3, "fd", gi.VmmFd, None, gi.SyncFd(3)]
    for wrong in bad:
        refused(backend, partial(gi.import_multicast, wrong, devices, SIZE), "handle", error=gi.ArgumentTypeError)
    assert not backend.calls
    with group, memory:
        assert not group.closed
        assert not memory.closed
    bare = gi.VmmFd.adopt(os.memfd_create("bare"))
    with bare:
        refused(backend, lambda: gi.import_multicast(bare, devices, SIZE + 1), "size", "no multiple")


@pytest.mark.parametrize("call", ["import_multicast", "add_device"])
def test_a_failed_import_leaves_the_handle(team: Team, call: str) -> None:
    devices, backend = team
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


# -- lifetime --------------------------------------------------------------------------------------------------------


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
    assert backend.calls[-1] == ("release_allocation", multicast._lifetime.handle)
    close_all(mapping, *memory, stream)
    assert not backend.live


@pytest.mark.parametrize("what", ["mapping", "binding", "multicast"])
@pytest.mark.parametrize("closed", [False, True])
def test_the_work_of_every_device_is_waited_for(team: Team, what: str, closed: bool) -> None:
    """Also that of a stream that is closed: its device drains with the others."""
    devices, backend = team
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


def test_another_devices_work_is_not(team: Team) -> None:
    devices, backend = team
    stream = devices[3].create_stream()
    backend.blocked.add(stream.ptr)
    with gi.create_multicast(devices[:2], SIZE) as multicast, multicast.map():
        pass
    assert releases(backend) == ["unmap", "release"]
    backend.blocked.clear()
    stream.close()


def test_a_device_that_was_added_late_counts(team: Team) -> None:
    devices, backend = team
    multicast = gi.create_multicast(2, SIZE, device=devices[0])
    multicast.add_device(devices[0])
    multicast.add_device(devices[1])
    mapping = multicast.map()
    stream = devices[1].create_stream()
    backend.blocked.add(stream.ptr)
    stream.close()
    multicast.close()
    assert mapping.closed
    assert releases(backend) == []
    backend.blocked.clear()
    devices[1].drain()  # whichever of the team drains
    assert releases(backend) == ["unmap", "release"]


def test_bound_memory_stays_until_it_is_unbound(team: Team) -> None:
    """Closing it ends the binding, and its own release comes after the unbind, which waits for all of the team."""
    devices, backend = team
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
    assert backend.calls[-1] == ("release_allocation", allocation._native)
    close_all(multicast, stream)
    assert not backend.live


def test_a_bound_buffer_is_kept_alive_and_closing_it_unbinds(team: Team) -> None:
    devices, backend = team
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


def test_closing_the_object_leaves_the_memory(team: Team) -> None:
    devices, backend = team
    multicast = gi.create_multicast(devices[:1], SIZE)
    allocation = devices[0].allocate(SIZE)
    binding, mapping = multicast.bind_memory(allocation), multicast.map()
    multicast.close(timeout=LIMIT)
    assert binding.closed
    assert mapping.closed
    assert not allocation.closed
    allocation.buffer.fill(1)
    allocation.close(timeout=LIMIT)
    assert releases(backend) == ["unmap", "unbind", "release", "unmap", "release"]


@pytest.mark.parametrize("mapped_first", [False, True])
def test_dropping_it_warns_and_releases_in_order(team: Team, mapped_first: bool) -> None:
    devices, backend = team
    allocation = devices[0].allocate(SIZE)

    def drop() -> None:
        multicast: Any = gi.create_multicast(devices[:2], SIZE)
        if not mapped_first:
            multicast.bind_memory(allocation)
        multicast.mine = multicast.map()  # so that they go together
        if mapped_first:
            multicast.bind_memory(allocation)

    stream = devices[1].create_stream()
    backend.blocked.add(stream.ptr)
    with pytest.warns(gi.LeakedResourceWarning) as caught:
        drop()
        gc.collect()
    dropped = sorted(str(one.message).partition(" #")[0] for one in caught)
    assert dropped == ["MulticastMapping", "MulticastObject"]
    assert releases(backend) == []
    looks = [1]

    def look() -> None:
        looks[0] -= 1
        if looks[0] < 0:
            backend.blocked.clear()

    backend.on_is_done = look
    devices[1].drain()
    devices[1].drain()
    assert releases(backend) == ["unmap", "unbind", "release"]
    close_all(allocation, stream)
    assert not backend.live


def test_a_binding_that_nobody_holds_stays(team: Team) -> None:
    devices, backend = team
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


def test_an_allocation_does_not_keep_the_object_alive(team: Team) -> None:
    devices, backend = team
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


def test_nothing_is_left_at_exit(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a closed stream of another device is released, whichever device is drained first."""
    devices, backend = team
    multicast = gi.create_multicast(devices, SIZE)
    memory = allocations(devices)
    for one in memory:
        multicast.bind_memory(one)
    mapping = multicast.map()
    streams = [device.create_stream() for device in devices]
    for stream in streams:
        backend.blocked.add(stream.ptr)
        stream.close()
    for closing in (multicast, *memory):
        closing.close()
    assert mapping.closed
    assert releases(backend) == []
    backend.blocked.clear()
    monkeypatch.setattr(drain, "_exiting", False)  # it is set now, and back again behind the test
    drain._drain_at_exit()
    assert releases(backend) == ["unmap", *["unbind"] * 4, *["release"] * 5]
    assert not backend.live


def test_many_rounds_leave_nothing(team: Team) -> None:
    devices, backend = team
    allocation = devices[0].allocate(SIZE)
    multicast = gi.create_multicast(devices[:2], SIZE)
    for _ in range(50):
        with multicast.map() as mapping, multicast.bind_memory(allocation, size=STEP) as binding:
            assert not mapping.closed
            assert multicast.bindings == (binding,)
    del mapping, binding
    assert len(multicast._bound) == 1  # the last one, which the next bind forgets
    assert not multicast._bindings
    assert not multicast._lifetime.standing
    assert not allocation._lifetime.standing
    for _ in range(50):
        with devices[0].allocate(SIZE) as memory:  # which closes the binding
            multicast.bind_memory(memory, size=STEP)
    assert len(multicast._bound) == len(multicast._bindings) == 1
    assert not multicast._lifetime.standing
    close_all(multicast, allocation)
    assert not backend.live


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_leaves_the_parents_alone(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, backend = team
    multicast = gi.create_multicast(devices[:2], SIZE)
    mapping = multicast.map()
    stream = devices[1].create_stream()
    backend.blocked.add(stream.ptr)
    multicast.close()
    assert mapping.closed
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with monitor._lock:
            held.set()
            done.wait(LIMIT)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(LIMIT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        signal.alarm(int(LIMIT))
        code = 1
        try:
            backend.blocked.clear()
            devices[0].drain()
            quiet = releases(backend) == []
            with pytest.raises(gi.ResourceClosedError, match=r"MulticastMapping.* of its parent, made before the fork"):
                _ = mapping.ptr
            with pytest.raises(gi.ResourceClosedError, match="no driver survives a fork"):
                gi.create_multicast(devices[2:], SIZE)
            monkeypatch.setattr(backend, "survives_fork", True)
            gi.create_multicast(devices[2:], SIZE).close()  # and the lock is free
            code = 7 if quiet and releases(backend) == ["release"] else 2  # the child's, and nothing of the parent's
        finally:
            os._exit(code)
    done.set()
    thread.join(LIMIT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    backend.blocked.clear()
    close_all(multicast, stream)
    assert releases(backend) == ["unmap", "release"]


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

    def acquire(self) -> None:
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


@pytest.mark.parametrize("turn", range(20))
def test_of_many_threads_one_binds_the_bytes_and_one_adds_the_device(team: Team, turn: int) -> None:
    devices, backend = team
    allocation = devices[0].allocate(SIZE)
    multicast = gi.create_multicast(1, SIZE, device=devices[0])
    added = run_all(*[lambda: multicast.add_device(devices[0])] * 6)
    bound = run_all(*[lambda: multicast.bind_memory(allocation)] * 6)
    for errors in (added, bound):
        assert errors.count(None) == 1
        assert {type(error) for error in errors} == {type(None), gi.InvalidArgumentError}
    assert names(backend).count("add_device") == names(backend).count("bind_memory") == 1
    run_all(multicast.close, multicast.close, allocation.close, multicast.bindings[0].close)
    close_all(multicast, allocation)
    assert releases(backend)[0] == "unbind"
    assert not backend.live


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
        thing = multicast._native if closing == "multicast" else allocation._native
        assert ("release_allocation", thing) not in backend.calls
    finally:
        go_on.set()
        thread.join(LIMIT)
    assert not thread.is_alive()
    assert len(errors) == 1
    close_all(multicast, allocation, other)
    unbound = backend.calls.index(("unbind", multicast._native, 0, 0, STEP))
    assert unbound < backend.calls.index(("release_allocation", thing))
    assert not backend.live


def test_what_is_closed_while_it_is_mapped_is_unmapped_again(team: Team) -> None:
    devices, backend = team
    multicast = gi.create_multicast(devices, SIZE)
    backend.on["map_allocation"] = multicast.close
    with pytest.raises(gi.ResourceClosedError):
        multicast.map()
    multicast.close(timeout=LIMIT)
    assert releases(backend) == ["unmap", "release"]
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


# -- interrupts ------------------------------------------------------------------------------------------------------


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("how", ["bind_memory", "bind_address"])
def test_an_interrupt_in_a_bind_leaves_nothing(team: Team, how: str, closed: bool) -> None:
    """A call that blocks hears of Ctrl-C when it is over, and the memory is bound: the backend undoes that."""
    devices, backend = team
    multicast = gi.create_multicast(2, SIZE, gi.VmmFd, device=devices[0])
    multicast.add_device(devices[0])
    allocation = devices[0].allocate(SIZE)
    buffer = allocation.buffer

    def bind() -> gi.MulticastBinding:
        if how == "bind_memory":
            return multicast.bind_memory(allocation, size=STEP, assume_all_added=True)
        return multicast.bind_address(devices[0], buffer, STEP, assume_all_added=True)

    def strike() -> None:
        if closed:
            multicast.close()
        backend.unbind(multicast._native, 0, 0, STEP)
        interrupt()

    backend.on[how] = strike
    with pytest.raises(KeyboardInterrupt):
        bind()
    assert multicast.bindings == ()
    del backend.on[how]
    if not closed:
        multicast.add_device(devices[1])
        bind().close(timeout=LIMIT)  # the bytes are free
    close_all(multicast, allocation)
    assert backend.calls.count(("unbind", multicast._native, 0, 0, STEP)) == (1 if closed else 2)
    assert sorted(set(releases(backend))) == ["release", "unbind", "unmap"]
    assert releases(backend).index("unbind") < releases(backend).index("release")
    assert not backend.live


def test_an_interrupt_that_bound_and_mapped_nothing_lets_devices_in(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, backend = team
    with gi.create_multicast(2, SIZE, device=devices[0]) as multicast, devices[0].allocate(SIZE) as allocation:
        multicast.add_device(devices[0])
        for name in ("_reserve", "map"):
            if name == "_reserve":
                monkeypatch.setattr(type(multicast), name, lambda *_: interrupt())
                with pytest.raises(KeyboardInterrupt):
                    multicast.bind_memory(allocation, assume_all_added=True)
            else:
                monkeypatch.setattr(type(backend), "map_allocation", lambda *_: interrupt())
                with pytest.raises(KeyboardInterrupt):
                    multicast.map(assume_all_added=True)
            monkeypatch.undo()
        multicast.add_device(devices[1])
        multicast.bind_memory(allocation)
    close_all(multicast, allocation)
    assert not backend.live
