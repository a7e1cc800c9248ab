"""What AMD's runtime answers about memory that exists, and how that memory gets into another process.

As in test_facts.py: raw calls, and lines of ROCm/clr f9f995c6 (6.3); 7.1 has run as well. The other process is a child.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from tests.simulated.driver import loaded
from tests.simulated.stand_in import StandIn

from ..parties import MODE
from .runtime import INVALID_VALUE, MIB, NOT_SUPPORTED, SUCCESS, Access, Location, Runtime
from .test_facts import BY_VALUE, printed

pytestmark = pytest.mark.skipif(MODE != "amd", reason="needs AMD's runtime on the stand-in")

SIZE = 2 * MIB
INVALID_CONTEXT, NOT_FOUND = 201, 500


@pytest.fixture
def later(runtime: Runtime) -> bool:
    return runtime.number("hipRuntimeGetVersion") >= BY_VALUE


@pytest.fixture
def array(runtime: Runtime) -> Iterator[int]:
    address = runtime.object("hipMalloc", SIZE)
    runtime.ok("hipMemset", address, 1, SIZE)
    yield address
    runtime.ok("hipFree", address)


def map_in_a_row(hip: Runtime, *handles: int) -> int:
    """Map two handles in one reservation; the mappings keep them.

    Access is set for both at once: 7.1 compares the size with sums of mappings in the order of their objects' addresses
    and may refuse one of several.
    """
    address = hip.object("hipMemAddressReserve", 2 * SIZE, 0, 0, 0)
    for place, handle in zip((address, address + SIZE), handles, strict=True):
        hip.ok("hipMemMap", place, SIZE, 0, handle, 0)
        hip.ok("hipMemRelease", handle)
    hip.ok("hipMemSetAccess", address, 2 * SIZE, ctypes.byref(Access(Location(1, 0), 3)), 1)
    return address


def unmap(hip: Runtime, address: int) -> None:
    """Each by itself: of both at once 6.3 says success, unmaps none, and ends with the next call (hip_vm.cpp:353)."""
    for place in (address, address + SIZE):
        hip.ok("hipMemUnmap", place, SIZE)
    hip.ok("hipMemAddressFree", address, 2 * SIZE)


@pytest.fixture
def mapped(runtime: Runtime, stand_in: StandIn) -> Iterator[int]:
    """In the end all is given back."""
    before = stand_in.live("handle")
    properties = ctypes.byref(runtime.properties())
    address = map_in_a_row(runtime, *[runtime.object("hipMemCreate", SIZE, properties, 0) for _ in range(2)])
    yield address
    unmap(runtime, address)
    assert stand_in.live("handle") == before


def test_what_is_behind_a_pointer(runtime: Runtime, array: int, mapped: int, later: bool) -> None:
    """No attribute tells (hip_memory.cpp:3968, 4012-4040). hipMemGetAccess answers for what is mapped, as 7.1's pools
    are within; HIP IPC takes the rest, but no memory of the host. The size in attribute 12 has 32 bits.
    """
    others = {
        runtime.object("hipMallocAsync", SIZE, 0): ("hipFree", 2, 0, later, not later),
        runtime.object("hipMallocManaged", SIZE, 1): ("hipFree", 1, 1, False, False),
        runtime.object("hipHostMalloc", SIZE, 0): ("hipHostFree", 1, 0, False, False),
    }
    ours = {array: ("", 2, 0, False, True), mapped: ("", 2, 0, True, False), mapped + SIZE: ("", 2, 0, True, False)}
    for base, (_, kind, managed, is_mapped, shared) in {**ours, **others}.items():
        for at in (base, base + SIZE // 2):
            assert [runtime.asked(number, at)[1] for number in (2, 8)] == [bytes([kind, 0, 0, 0]), bytes([managed])]
            assert {runtime.asked(number, at) for number in (10, 14, 15, 17)} == {(NOT_SUPPORTED, b"")}
            assert runtime.range_of(at) == (SUCCESS, base, SIZE)
            assert runtime.access(at) == ((SUCCESS, 3) if is_mapped else (INVALID_VALUE, 0))
            assert runtime.ipc_handle(at)[0] == (SUCCESS if shared else INVALID_VALUE)
    for address, (free, *_) in others.items():
        runtime.ok(free, address)
    large = runtime.object("hipMalloc", (4 << 30) + SIZE)
    assert (runtime.asked(12, large)[1], runtime.range_of(large)[2]) == (SIZE.to_bytes(4, "little"), (4 << 30) + SIZE)
    runtime.ok("hipFree", large)
    plain = ctypes.create_string_buffer(64)
    assert runtime.range_of(ctypes.addressof(plain))[0] == NOT_FOUND


def test_another_process_opens_an_allocation(runtime: Runtime, array: int, later: bool) -> None:
    """It gets the base, and has to add the offset (Mooncake #3546). Opened again, 6.3 has it twice and 7.1 counts.

    To close waits for the device, as hipFree does; to open does not.
    """
    runtime.ok("hipMemset", array + 8, 2, 8)
    code, handle = runtime.ipc_handle(array + 8)
    assert (code, handle.size, handle.offset, handle.process) == (SUCCESS, SIZE, 8, os.getpid())
    assert runtime.ipc_open(bytes(handle))[0] == INVALID_CONTEXT
    program = f"""
    from tests.vendors.hip.test_facts import *
    handle = bytes.fromhex("{bytes(handle).hex()}")
    stream, place = hip.object("hipStreamCreateWithFlags", 1), hip.object("hipHostMalloc", 4096, 0)
    word(place).value = 0
    hip.ok("hipStreamWaitValue64", stream, place, 1, GTE, EVERY_BIT)
    (code, base), (_, again), (refused, _) = (hip.ipc_open(handle, flags) for flags in (1, 1, 0))
    print(code, refused, hip.range_of(again + 8) == (0, again, {SIZE}), base == again)
    close = lambda: hip.ok("hipIpcCloseMemHandle", base + 8)
    print(finishes(close, lambda: setattr(word(place), "value", 1), expected=False), hip.read(again + 6).hex())
    hip.ok("hipMemset", again, 7, 4)
    print(*[hip("hipIpcCloseMemHandle", again) for _ in range(2)])
    """
    assert printed(program) == f"0 {INVALID_VALUE} True {later} False 01010202 0 {INVALID_VALUE}".split()
    assert runtime.read(array, 6) == b"\x07\x07\x07\x07\x01\x01"
    legacy = 'print(hip.ipc_handle(hip.object("hipMalloc", 4096))[0])'  # rocm-systems #2209
    assert printed(legacy, HSA_ENABLE_IPC_MODE_LEGACY="1") == [str(INVALID_VALUE)]


def test_an_opened_pointer_is_lost_when_another_device_asks(runtime: Runtime, array: int) -> None:
    """Attributes 3 and 11 attach once more, by a handle in a frame that is gone, and detach what was there
    (rocmemory.cpp:624, 757).
    """
    if runtime.number("hipGetDeviceCount") < 2 or loaded("/libasan.so"):
        pytest.skip("needs two devices; and AddressSanitizer ends a process that reads such a frame")
    program = f"""
    from tests.simulated.stand_in import StandIn
    hip.ok("hipSetDevice", 1)
    base = hip.ipc_open(bytes.fromhex("{bytes(runtime.ipc_handle(array)[1]).hex()}"))[1]
    hip.ok("hipSetDevice", 0)
    print(hip.range_of(base)[0], hip.asked(9, base)[1].hex(), StandIn().live("ipc_mapping"))
    print(hip.asked(11, base)[0], StandIn().live("ipc_mapping"))
    """
    assert printed(program) == ["0", "01000000", "1", "2", "0"]
