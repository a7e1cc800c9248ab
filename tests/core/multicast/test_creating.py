"""A multicast object is created: every rule holds before the driver is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop._core import registry
from gpuinterop._core.device import Device
from gpuinterop.capabilities import Operation

from ..fake import FakeMulticast, fake_team
from .calls import GOOD, SIZE, STEP, Devices, close_all, fail, names, refused, releases

# -- creating --------------------------------------------------------------------------------------------------------


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


def test_a_team_over_processes_is_a_number(
    devices: Devices, backend: FakeMulticast, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_granularity_is_known_before_creation(devices: Devices, backend: FakeMulticast) -> None:
    for asked in (3, devices[:3]):
        found = devices[0].multicast_granularity(asked, 12345, gi.VmmFd)
        assert (found.minimum, found.recommended) == (STEP, GOOD)
        assert backend.asked[-1] == ("multicast_granularity", 3, 12345, (gi.VmmFd,))
    assert not backend.calls


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
    refused(backend, lambda: gi.create_multicast([], SIZE), "devices", error=gi.ArgumentTypeError)
    refused(backend, lambda: gi.create_multicast([], SIZE, device=devices[0]), "devices", "one device or more")
    refused(backend, lambda: gi.create_multicast(0, SIZE, device=devices[0]), "devices", "expected 1 to .*, got 0")
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
        (Operation.CREATE_MULTICAST, lambda devices: devices[0].multicast_granularity(devices, SIZE)),
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


@pytest.mark.parametrize("call", ["create_multicast", "add_device"])
def test_a_failed_creation_leaves_nothing(devices: Devices, backend: FakeMulticast, call: str) -> None:
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


def test_adding_devices(devices: Devices, backend: FakeMulticast) -> None:
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
        refused(backend, lambda: multicast.add_device(devices[0]), "device", "expected each device once")
        multicast.add_device(devices[1])
        refused(backend, lambda: multicast.add_device(devices[2]), "device", "expected 2 devices, the team's, got")
    with pytest.raises(gi.ResourceClosedError):
        multicast.add_device(devices[2])


@pytest.mark.parametrize("use", ["bind_memory", "bind_address", "map"])
def test_no_device_is_added_behind_a_bind_or_a_map(devices: Devices, backend: FakeMulticast, use: str) -> None:
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


def test_what_the_driver_refused_does_not_end_the_adding(devices: Devices, backend: FakeMulticast) -> None:
    with gi.create_multicast(2, SIZE, device=devices[0]) as multicast, devices[0].allocate(SIZE) as allocation:
        multicast.add_device(devices[0])
        backend.on.update(bind_memory=fail, map_allocation=fail)
        for call in (partial(multicast.bind_memory, allocation), multicast.map):
            with pytest.raises(gi.DriverError):
                call(assume_all_added=True)
        multicast.add_device(devices[1])


# -- all were added --------------------------------------------------------------------------------------------------


def test_nothing_is_bound_or_mapped_before_all_were_added(devices: Devices, backend: FakeMulticast) -> None:
    """The driver would block, for ever if need be."""
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
