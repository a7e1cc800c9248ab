"""Drivers that fail: what the caller still has, what is undone, and what the error says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.suites.base import fds
from tests.core.forged import forge
from tests.kept_streams import destroy_kept_streams
from tests.simulated.driver import Simulator

from .table import ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY, UNKNOWN, VENDOR

pytestmark = pytest.mark.usefixtures("simulator")

LIMIT = 20.0


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


@pytest.mark.parametrize(
    ("size", "call"),  # sizes of their own: of each HIP's backend reserves an address range once
    [
        (40 << 20, "MemCreate"),
        (42 << 20, "MemAddressReserve"),
        (44 << 20, "MemMap"),
        (46 << 20, "MemSetAccess"),
        (48 << 20, "MemExportToShareableHandle"),
    ],
)
def test_an_allocation_that_fails_half_way_is_undone(
    simulator: Simulator, device: gi.Device, size: int, call: str
) -> None:
    before = simulator.live()
    simulator.fail(VENDOR.call(call), code=OUT_OF_MEMORY)
    with pytest.raises(gi.OutOfMemoryError) as caught, device.allocate(size) as allocation:
        _ = allocation.buffer
        allocation.export().close()
    assert caught.value.call == VENDOR.call(call)
    device.drain()
    assert simulator.live() == before


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
        assert "process must be started again" in str(caught.value)
        stream.close()
        buffer.close()
    device.drain()


def test_every_call_that_fails_is_named(simulator: Simulator, device: gi.Device, memfd: Any) -> None:
    """Whatever call fails, the error has its name, the number, the symbol, and a meaning."""
    backend = device.driver
    with memfd.create_memory(4096) as theirs, device.import_memory(theirs.export(), size=4096) as memory:
        buffer, stream = memory.map_buffer(), device.create_stream()
        calls: dict[str, Callable[[], object]] = {
            "StreamCreateWithPriority": device.create_stream,
            "StreamQuery": stream.query,
            "StreamSynchronize": lambda: backend.synchronize(stream.handle),  # the core may ask instead
            "EventRecord": stream.record,
            "StreamIsCapturing": lambda: backend.is_capturing(stream.handle),
            "MemsetD8Async": lambda: buffer.fill(1, stream=stream),
            "MemCreate": lambda: device.allocate(1),
        }
        if VENDOR.name == "hip":
            destroy_kept_streams(backend)
        for name, attempt in calls.items():
            call = VENDOR.call(name)
            simulator.fail(call, code=UNKNOWN)
            with pytest.raises(gi.DriverError, match=call) as caught:
                attempt()
            symbol = VENDOR.symbols[UNKNOWN]
            assert (caught.value.call, caught.value.code, caught.value.symbol) == (call, UNKNOWN, symbol)
            assert str(caught.value).startswith(f"{call} failed with {symbol} (999): ")
        stream.close()
        buffer.close()


def test_a_code_that_the_bindings_do_not_know(simulator: Simulator, device: gi.Device) -> None:
    stream = device.create_stream()
    event = stream.record()
    calls: dict[str, Callable[[], object]] = {
        "StreamCreateWithPriority": device.create_stream,
        "StreamQuery": stream.query,
        "StreamIsCapturing": lambda: device.driver.is_capturing(stream.handle),
        "EventQuery": lambda: event.done,
    }
    if VENDOR.name == "hip":
        destroy_kept_streams(device.driver)
    for name, attempt in calls.items():
        simulator.fail(VENDOR.call(name), code=12345)
        with pytest.raises(gi.DriverError, match="12345") as caught:
            attempt()
        assert (caught.value.call, caught.value.code) == (VENDOR.call(name), 12345)
    stream.close()


@pytest.mark.parametrize("call", VENDOR.pins)
def test_a_page_that_cannot_be_pinned_is_undone(simulator: Simulator, device: gi.Device, call: str) -> None:
    """Nothing is made, nothing stays registered; a handle stays the caller's."""
    _ = device.handle  # which opens it: a context is alive as well
    before, descriptors = simulator.live(), fds()
    simulator.fail(VENDOR.call(call), code=UNKNOWN)
    with pytest.raises(gi.DriverError) as caught:
        device.create_semaphore(gi.TimelineFd)
    assert (caught.value.call, caught.value.code) == (VENDOR.call(call), UNKNOWN)
    device.drain()  # what blocks is undone at the gate
    assert (simulator.live(), fds()) == (before, descriptors)
    with gi.TimelineFd.adopt(forge()) as handle:
        simulator.fail(VENDOR.call(call), code=UNKNOWN)
        with pytest.raises(gi.DriverError, match=call):
            device.import_semaphore(handle)
        device.import_semaphore(handle).close(timeout=LIMIT)


def test_a_release_that_fails_is_a_warning_that_names_it(simulator: Simulator, device: gi.Device, memfd: Any) -> None:
    theirs = memfd.create_memory(4096)
    memory = device.import_memory(theirs.export(), size=4096)
    call = VENDOR.call("DestroyExternalMemory")
    simulator.fail(call, code=UNKNOWN)
    with pytest.warns(gi.LeakedResourceWarning, match=f"{call} failed with {VENDOR.symbols[UNKNOWN]}"):
        memory.close()
    device.driver.destroy_memory(memory.handle)  # the second time it works
    theirs.close()
