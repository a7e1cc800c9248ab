"""Drivers that fail: what the caller still has, what is undone, and what the error says."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.suites.base import fds
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

from .table import ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY, VENDOR

pytestmark = pytest.mark.usefixtures("simulator")

UNNAMED = 12345


@pytest.mark.parametrize("fate", VENDOR.import_fds)
@pytest.mark.parametrize("code", VENDOR.import_codes)
def test_a_failed_import_leaves_the_handle_alone(
    simulator: Simulator, device: gi.Device, memfd: Any, code: int, fate: Any
) -> None:
    """Whether the driver closes its descriptor or not: the caller's is open, and there is neither one more nor less."""
    memory, semaphore = memfd.create_memory(4096), memfd.create_semaphore(gi.Timeline)
    imports: list[tuple[str, Callable[[Any], Any], Any]] = [
        ("ImportExternalMemory", lambda handle: device.import_memory(handle, size=4096), memory)
    ]
    if device.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, gi.TimelineFd)):
        imports.append(("ImportExternalSemaphore", device.import_semaphore, semaphore))
    for name, load, owner in imports:
        handle = owner.export()
        before = fds()
        simulator.fail(VENDOR.call(name), code=code, fd=fate)
        with pytest.raises(gi.DriverError) as caught:
            load(handle)
        assert (caught.value.call, caught.value.code) == (VENDOR.call(name), code)
        # HIP says so of every import that fails.
        assert isinstance(caught.value, MemoryError) == (code == OUT_OF_MEMORY and VENDOR.name == "cuda")
        assert fds() == before
        with load(handle) as imported:  # the same handle, once more
            assert handle.closed
            assert not imported.closed
            assert len(fds()) <= len(before), "the handle's descriptor is closed"
        device.drain()
    memory.close()
    semaphore.close()


def test_a_pointer_that_is_no_stream(simulator: Simulator, device: gi.Device) -> None:
    """It is refused by the one call that survives it on each version: of HIP's, `hipStreamGetDevice`."""
    with pytest.raises(gi.DriverError):
        device.wrap_stream(0xDEAD000)
    asked = simulator.trace("hipStreamGetDevice", "hipStreamIsCapturing", "hipStreamQuery")
    assert asked == ["hipStreamGetDevice"] * (VENDOR.name == "hip")
    assert len(simulator.violations()) == 1  # no documentation allows it


def test_an_allocation_without_memory(simulator: Simulator, device: gi.Device) -> None:
    simulator.fail(VENDOR.call("MemCreate"), code=OUT_OF_MEMORY)
    with pytest.raises(gi.OutOfMemoryError) as caught:
        device.allocate(1)
    assert caught.value.call == VENDOR.call("MemCreate")


@pytest.mark.parametrize("call", VENDOR.beyond)
def test_a_mapping_that_fails_leaves_the_memory(simulator: Simulator, device: gi.Device, memfd: Any, call: str) -> None:
    with memfd.create_memory(1 << 16) as theirs, device.import_memory(theirs.export(), size=theirs.size) as memory:
        simulator.fail(VENDOR.call(call), code=INVALID_VALUE)
        with pytest.raises(gi.DriverError, match=VENDOR.beyond[call]) as caught:
            if call.endswith("Buffer"):
                memory.map_buffer()
            else:
                memory.map_mipmapped_array("R8_UNORM", (16, 16))
        assert caught.value.symbol == VENDOR.symbols[INVALID_VALUE]
        memory.map_buffer().close()


def test_a_stream_that_has_failed_says_so(simulator: Simulator, device: gi.Device, memfd: Any) -> None:
    """An asynchronous failure: later calls raise it, with the symbol and what it means; closing goes on."""
    with memfd.create_memory(4096) as theirs, device.import_memory(theirs.export(), size=4096) as memory:
        buffer, stream = memory.map_buffer(), device.create_stream()
        simulator.fail_stream(stream.ptr, code=ILLEGAL_ADDRESS)
        buffer.fill(1, stream=stream)
        with pytest.raises(gi.DriverError) as caught:
            stream.synchronize(LIMIT)
        assert caught.value.symbol == VENDOR.symbols[ILLEGAL_ADDRESS]
        assert "context is lost" in str(caught.value)
        stream.close()
        buffer.close()
    device.drain()


@pytest.mark.parametrize("strict", [False, True])
def test_what_was_made_is_handed_out_where_the_call_after_it_fails(
    simulator: Simulator, devices: list[gi.Device], monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """The mode of captures or the context is not put back: a warning says so, also where warnings are errors.

    Where it cannot be put in place, nothing is made.
    """
    reported: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: reported.append(str(hook.exc_value)))
    device = devices[1]
    driver: Any = device.driver._driver  # type: ignore[attr-defined]
    _ = device._handle  # its context is made, and stays
    before = simulator.live()
    for enters, leaves, nth in VENDOR.switches:
        for make in (device.create_stream, lambda: device.allocate(1)):
            simulator.fail(enters, code=UNNAMED)
            with pytest.raises(gi.DriverError, match=f"{enters} failed with .*{UNNAMED}"):
                make()
            assert simulator.live() == before
            simulator.fail(leaves, code=UNNAMED, nth=nth)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("error" if strict else "always")
                made: Any = make()
            (told,) = reported if strict else [str(warning.message) for warning in caught]
            assert told.startswith(f"{leaves} failed with {VENDOR.unnamed} {UNNAMED} ({UNNAMED}): unknown to this")
            reported.clear()
            if leaves == "cuCtxPopCurrent":
                driver.ask("RestoreCurrent", kind=ctypes.c_void_p)
            elif leaves == "hipSetDevice":
                driver.call("MakeCurrent", 0)
            driver.call("ThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(0)))
            made.close()
            device.drain()
    assert simulator.live() == before
