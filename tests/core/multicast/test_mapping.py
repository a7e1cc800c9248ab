"""An object is mapped, exported and imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.handles import HandleOrigin, OriginKind

from ..fake import FakeMulticast
from .calls import LIMIT, SIZE, STEP, Devices, fail, names, refused, releases

# -- mapping ---------------------------------------------------------------------------------------------------------


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
        refused(backend, lambda: multicast.map(assume_all_added=True), "devices", "no device that could map it")


def test_only_multimem_may_touch_a_mapping(devices: Devices, backend: FakeMulticast) -> None:
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


def test_export(devices: Devices, backend: FakeMulticast) -> None:
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
    with pytest.raises(gi.HandleError, match="exported from an allocation object"):
        gi.import_multicast(memory, devices, SIZE)
    with pytest.raises(gi.HandleError, match="exported from a multicast object"):
        devices[0].import_allocation(group, SIZE)
    for size in (SIZE - STEP, SIZE + STEP, SIZE + 1):
        refused(backend, partial(gi.import_multicast, group, devices, size), "size", f"{SIZE} bytes")
    bad: list[Any] = [3, "fd", gi.VmmFd, None, gi.SyncFd(3)]
    for wrong in bad:
        refused(backend, partial(gi.import_multicast, wrong, devices, SIZE), "handle", error=gi.ArgumentTypeError)
    assert not backend.calls
    with group, memory:
        assert not group.closed
        assert not memory.closed
    bare = gi.VmmFd.adopt(os.memfd_create("bare"))
    with bare:
        refused(backend, lambda: gi.import_multicast(bare, devices, SIZE + 1), "size", "a multiple")


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
