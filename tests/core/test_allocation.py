"""Allocations that several devices map: who may, at what cost, and when they are unmapped."""

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.capabilities import Operation, Scope
from gpuinterop.handles import HandleOrigin, OriginKind
from tests.limits import LIMIT

from .fake import FakeBackend, FakeMulticast, fake_team

STEP = FakeMulticast.ALLOCATIONS.minimum
SIZE = 4 * STEP
Devices = list[Device]


@pytest.fixture
def fake() -> tuple[Devices, FakeMulticast]:
    return fake_team()


@pytest.fixture
def devices(fake: tuple[Devices, FakeMulticast]) -> Devices:
    return fake[0]


def handle_of(**origin: Any) -> gi.VmmFd:
    """A handle as another process would send it."""
    fd = os.memfd_create("allocation")
    os.ftruncate(fd, SIZE)
    return gi.VmmFd.adopt(fd, origin=HandleOrigin(kind=OriginKind.ALLOCATION, **origin) if origin else None)


def called(backend: FakeMulticast, *names: str) -> list[Any]:
    return [call for call in backend.calls if call[0] in names]


def refused(
    backend: FakeBackend, call: Callable[[], object], match: str, error: type[Exception] = gi.InvalidArgumentError
) -> Exception:
    """The call is refused before anything is changed."""
    before = list(backend.calls)
    with pytest.raises(error, match=match) as caught:
        call()
    assert backend.calls == before
    return caught.value


# -- granularity and peers -------------------------------------------------------------------------------------------


def test_sizes_are_rounded_up_to_the_minimum(devices: Devices, backend: FakeMulticast) -> None:
    for asked, rounded in ((1, STEP), (STEP, STEP), (STEP + 1, 2 * STEP), (3 * STEP, 3 * STEP)):
        with devices[1].allocate(asked) as allocation:
            assert allocation.size == rounded
        assert called(backend, "allocate")[-1] == ("allocate", 1, rounded, gi.VmmFd)
    with handle_of() as handle:
        refused(backend, lambda: devices[0].import_allocation(handle, STEP + 1), f"granularity, {STEP}, got")
        refused(backend, lambda: devices[0].import_allocation(handle, SIZE + STEP), f"at most {SIZE} bytes")
        assert not handle.closed


def test_peers(devices: Devices, backend: FakeMulticast) -> None:
    backend.strangers = {(0, 2), (1, 0)}
    assert devices[0].peers == [devices[1], devices[3]]
    assert devices[1].peers == [devices[2], devices[3]]
    assert devices[2].peers == [devices[0], devices[1], devices[3]]
    assert not devices[0].can_access(devices[2])
    assert devices[2].can_access(devices[0])  # each way is another question
    backend.strangers.add((0, 0))
    assert devices[0].can_access(devices[0])
    assert not devices[0].can_access(fake_team()[0][1])
    wrong: Any = 1
    with pytest.raises(gi.ArgumentTypeError, match="peer"):
        devices[0].can_access(wrong)
    assert not backend.calls


# -- access ----------------------------------------------------------------------------------------------------------


def test_access_for_a_list_of_devices(devices: Devices, backend: FakeMulticast) -> None:
    with devices[2].allocate(SIZE, access=[devices[0], devices[2], devices[0], devices[3]]) as allocation:
        assert allocation.device is devices[2]
        assert allocation.devices == (devices[2], devices[0], devices[3])
        assert not called(backend, "map_allocation")
        buffers = [allocation.buffer_on(device) for device in (devices[3], devices[0], devices[2])]
        assert called(backend, "map_allocation") == [("map_allocation", allocation._handle, (2, 0, 3))]
        assert len({buffer.ptr for buffer in buffers}) == 1
        assert [buffer.device for buffer in buffers] == [devices[3], devices[0], devices[2]]
        assert [buffer.view(4).__dlpack_device__() for buffer in buffers] == [(2, 3), (2, 0), (2, 2)]
        assert allocation.buffer is buffers[2]
        assert allocation.buffer_on(devices[3]) is buffers[0]
    assert [call[0] for call in called(backend, "unmap_allocation", "release_allocation")] == [
        "unmap_allocation", "release_allocation",
    ]  # fmt: skip
    assert not backend.live
    with devices[1].allocate(SIZE) as alone:
        assert alone.devices == (devices[1],)
        refused(backend, lambda: alone.buffer_on(devices[0]), "device: .*fake 0.* has no access.*access=")
        wrong: list[Any] = [0, None, "cuda"]
        for device in wrong:
            refused(backend, partial(alone.buffer_on, device), "^device: .*Device", gi.ArgumentTypeError)
    with pytest.raises(gi.ResourceClosedError):
        alone.buffer_on(devices[1])


def test_access_takes_devices_of_the_same_backend(devices: Devices, backend: FakeMulticast) -> None:
    stranger = fake_team()[0][1]
    bad: list[Any] = [[0], [None], devices[1], 1, "1"]
    for access in bad:
        refused(backend, partial(devices[0].allocate, SIZE, access=access), "^access: ", gi.ArgumentTypeError)
        with handle_of() as handle:
            refused(
                backend, partial(devices[0].import_allocation, handle, SIZE, access=access), "^access: ",
                gi.ArgumentTypeError,
            )  # fmt: skip
    refused(backend, lambda: devices[0].allocate(SIZE, access=[stranger]), "access: .*another backend")
    with handle_of() as handle:
        refused(
            backend, lambda: devices[0].import_allocation(handle, SIZE, access=[stranger]), "access: .*another backend"
        )


def test_array_libraries_are_ordered_behind_the_other_devices_work(devices: Devices, backend: FakeMulticast) -> None:
    with (
        devices[0].allocate(SIZE, access=[devices[1]]) as allocation,
        devices[1].create_stream() as theirs,
    ):
        allocation.buffer_on(devices[1]).fill(7, stream=theirs)
        backend.blocked.add(backend.number(theirs._handle))
        allocation.buffer.view(4).__dlpack__(stream=40)
        assert called(backend, "wait_event")[-1] == ("wait_event", ("adopted", 40), theirs._handle)
        allocation.buffer.copy_to_host(bytearray(1))  # on a stream of ours, behind theirs as well
        users = {call[2] for call in called(backend, "wait_event")[-2:]}
        assert users == {theirs._handle, ("adopted", 40)}  # and behind the library's


def test_the_default_streams_of_two_devices_are_two(devices: Devices, backend: FakeMulticast) -> None:
    with devices[0].allocate(SIZE, access=[devices[1]]) as allocation:
        streams = [device.wrap_stream(0) for device in devices[:2]]
        for device, stream in zip(devices, streams, strict=False):
            allocation.buffer_on(device).fill(7, stream=stream)
        before = len(called(backend, "wait_event"))
        allocation.buffer.copy_to_host(bytearray(1))
        assert len(called(backend, "wait_event")) == before + 2


def test_a_peer_without_access_is_named_before_anything_is_allocated(devices: Devices, backend: FakeMulticast) -> None:
    backend.strangers = {(2, 0)}
    error = refused(
        backend, lambda: devices[0].allocate(SIZE, access=devices[1:]),
        r"export_allocation:vmm_fd .*device 0, fake 0.*device 2, fake 2, has no peer access.*can_access",
        gi.UnsupportedError,
    )  # fmt: skip
    assert isinstance(error, gi.UnsupportedError)
    assert error.capability.operation is Operation.EXPORT_ALLOCATION
    assert error.capability.handle_type is gi.VmmFd
    assert error.capability.scope is Scope.DEVICE
    assert error.capability.workaround
    devices[0].allocate(SIZE, access=[devices[1], devices[3]]).close()
    devices[2].allocate(SIZE, access=[devices[0]]).close()  # the other way round there is access


# -- imports ---------------------------------------------------------------------------------------------------------


def test_imports_for_a_list_of_devices(devices: Devices, backend: FakeMulticast) -> None:
    backend.lies_on = 3
    handle = handle_of(device=devices[3].identity, trusted=False)
    with devices[1].import_allocation(handle, SIZE, access=[devices[0], devices[1]]) as allocation:
        assert handle.closed
        assert allocation.devices == (devices[1], devices[0])
        assert allocation.buffer_on(devices[0]).ptr == allocation.buffer.ptr
        assert called(backend, "map_allocation") == [("map_allocation", allocation._handle, (1, 0))]
    assert {question[1:] for question in backend.asked if question[0] == "can_access"} == {(1, 3), (0, 3)}


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("member", [0, 2])
def test_what_the_origin_says_is_refused_before_the_import(
    devices: Devices, backend: FakeMulticast, trusted: bool, member: int
) -> None:
    """Itself needs access to the memory's device, as those of `access` do."""
    backend.strangers = {(member, 3)}
    with handle_of(device=devices[3].identity, trusted=trusted) as handle:
        error = refused(
            backend, lambda: devices[0].import_allocation(handle, SIZE, access=[devices[2]]),
            rf"import_allocation:vmm_fd .*device 3, fake 3.*device {member}, fake {member}, has no peer access",
            gi.UnsupportedError,
        )  # fmt: skip
        assert isinstance(error, gi.UnsupportedError)
        assert error.capability.operation is Operation.IMPORT_ALLOCATION
        assert error.capability.scope is Scope.DEVICE
        assert not handle.closed
        os.fstat(handle.fd)


@pytest.mark.parametrize("origin", ["none", "stranger", "lie"])
def test_what_only_the_import_shows_is_undone(devices: Devices, backend: FakeMulticast, origin: str) -> None:
    """An origin may refuse, but never vouch: where the memory lies is asked of the driver."""
    backend.strangers = {(2, 3)}
    backend.lies_on = 3
    elsewhere = gi.DeviceIdentity(name="theirs", uuid=b"x" * 16)
    identities = {"none": {}, "stranger": {"device": elsewhere}, "lie": {"device": devices[2].identity}}
    before = len(os.listdir("/proc/self/fd"))
    with handle_of(**identities[origin]) as handle:
        with pytest.raises(gi.UnsupportedError, match=r"device 3, fake 3\b.*device 2, fake 2\b"):
            devices[0].import_allocation(handle, SIZE, access=[devices[2]])
        assert called(backend, "import_allocation")
        assert called(backend, "release_allocation")
        assert not backend.live
        os.fstat(handle.fd)  # it is still open, and the caller's
        assert len(os.listdir("/proc/self/fd")) == before + 1
        backend.strangers.clear()
        devices[0].import_allocation(handle, SIZE, access=[devices[2]]).close()
        assert handle.closed
    assert len(os.listdir("/proc/self/fd")) == before


# -- lifetime --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fill", "ptr", "view", "array"])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("busy", [0, 1, 2])
def test_unmapping_waits_for_every_devices_work(
    devices: Devices, backend: FakeMulticast, busy: int, closed: bool, how: str
) -> None:
    """That with the memory, and all that there is where its address was given away; also of a closed stream."""
    stream = devices[busy].create_stream()
    backend.blocked.add(stream.ptr)
    allocation = devices[0].allocate(SIZE, access=devices[1:3])
    buffer = allocation.buffer_on(devices[1])
    uses: dict[str, Callable[[], object]] = {
        "fill": lambda: allocation.buffer_on(devices[busy]).fill(7, stream=stream),
        "ptr": lambda: buffer.ptr,
        "view": lambda: buffer.view(4).ptr,
        "array": lambda: buffer.view(4).__dlpack__(stream=-1),
    }
    uses[how]()
    gc.collect()
    if closed:
        stream.close()
    allocation.close()
    assert buffer.closed
    with pytest.raises(gi.ResourceBusyError, match="pending"):
        allocation.close(timeout=0)
    assert not called(backend, "unmap_allocation", "release_allocation")
    backend.blocked.clear()
    allocation.close(timeout=LIMIT)
    stream.close(timeout=LIMIT)
    assert not backend.live


def test_the_last_of_its_buffers_unmaps_it(devices: Devices, backend: FakeMulticast) -> None:
    with devices[0].allocate(SIZE, access=devices[1:]) as allocation:
        buffers = [allocation.buffer_on(device) for device in devices]
        for buffer in buffers[:-1]:
            buffer.close()
        assert not called(backend, "unmap_allocation")
        again = allocation.buffer_on(devices[0])
        assert again is not buffers[0]
        assert again.ptr == buffers[-1].ptr
        buffers[-1].close()
        assert not called(backend, "unmap_allocation")
        again.close(timeout=LIMIT)
        assert len(called(backend, "unmap_allocation")) == 1
        assert allocation.buffer.size == SIZE  # mapped anew
        assert len(called(backend, "map_allocation")) == 2


def test_identities_match_by_proof() -> None:
    mine = gi.DeviceIdentity(uuid=b"a" * 16, pci_bus_id="0000:01:00.0")
    assert mine.matches(gi.DeviceIdentity(uuid=b"a" * 16))
    assert mine.matches(gi.DeviceIdentity(pci_bus_id="0000:01:00.0", luid=b"12345678"))
    assert not mine.matches(gi.DeviceIdentity())
    assert not mine.matches(gi.DeviceIdentity(uuid=b"a" * 16, pci_bus_id="0000:02:00.0"))
    for uuid in (None, b"b" * 16):
        assert mine.conflicts(gi.DeviceIdentity(is_cpu=True, uuid=uuid))
    assert mine.matches(gi.DeviceIdentity(is_cpu=True, uuid=b"a" * 16))  # simulated on a software device
    assert gi.DeviceIdentity(is_cpu=True).matches(gi.DeviceIdentity(is_cpu=True, uuid=b"b" * 16))
