"""What HIP says of where memory is, and what it is asked with which device current; and it has no multicast."""

from __future__ import annotations

import struct
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop_hip.backend import HipBackend
from tests.simulated.driver import Simulator

from ..parties import watch
from ..test_allocations import content, exported


def test_a_runtime_that_names_the_importer(
    simulator: Simulator, devices: list[gi.Device], scope: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know whose the memory is, so nobody is refused for it."""
    first, second = devices
    simulator.set_peer_access(0, 1, False)
    functions = _backend()._driver._functions
    tell = _backend()._driver.function("MemGetAllocationPropertiesFromHandle")

    def naming(place: Any, *handle: Any) -> int:
        code = int(tell(place, *handle))
        struct.pack_into("=i", place, 12, second.ordinal)
        return code

    monkeypatch.setitem(functions, "MemGetAllocationPropertiesFromHandle", naming)
    ours = scope.enter_context(first.allocate(1))
    theirs = scope.enter_context(
        second.import_allocation(exported(ours, known=False), ours.size, access=[first])  # who needs no access
    )
    assert _backend().location(theirs._handle) is None
    theirs.buffer_on(first).fill(6)
    assert content(ours.buffer, 1) == content(theirs.buffer, 1) == b"\x06"


def test_granularity_is_asked_with_the_device_current(
    devices: list[gi.Device], hip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HIP answers for the current device, whatever the properties say."""
    current: list[int] = []
    see = lambda *_: current.append(hip.hipGetDevice()[1])  # noqa: E731
    watch(monkeypatch, devices[0], "MemGetAllocationGranularity", see)
    for device in devices:
        device.allocation_granularity()
    assert current == [0, 0, 1, 1]


def _backend() -> HipBackend:
    native = gi.get_backend("hip").driver
    assert isinstance(native, HipBackend)
    return native


def test_a_runtime_that_does_not_tell_where_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or tells of a device that there is not: then nobody is refused for it."""
    backend = _backend()
    driver = backend._driver
    with gi.get_backend("hip").device().allocate(1) as allocation:
        assert backend.location(allocation._handle) == 0
        monkeypatch.setitem(driver._functions, "DeviceGetCount", lambda _count: 0)
        assert backend.location(allocation._handle) is None
        monkeypatch.undo()
        has, telling = driver.has, "hipMemGetAllocationPropertiesFromHandle"
        monkeypatch.setitem(vars(driver), "has", lambda name: name != telling and has(name))
        assert backend.location(allocation._handle) is None
