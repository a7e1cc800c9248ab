"""What the simulated HIP runtime notes and refuses where no suite provokes it.

What AMD's runtime does as well is in test_facts.py. What this one shares with the simulated CUDA driver is tested with
that.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.simulated.driver import Simulator

from .runtime import (
    INVALID_VALUE,
    NOT_SUPPORTED,
    Runtime,
)
from .test_facts import printed

pytestmark = pytest.mark.usefixtures("simulator")

INVALID_HANDLE = 400


def test_its_uuid_is_not_vulkans_and_its_pci_address_is(runtime: Runtime) -> None:
    """ROCm/hipamd #50: sixteen characters of a serial number."""
    uuid = (ctypes.c_char * 16)()
    runtime.ok("hipDeviceGetUuid", uuid, 0)
    assert bytes(uuid).isalnum()
    text = ctypes.create_string_buffer(32)
    runtime.ok("hipDeviceGetPCIBusId", text, 32, 0)
    assert text.value == b"0000:c3:00.0"
    assert runtime.attribute(67) == 0xC3


@pytest.mark.parametrize("version", ["70053211", "70100000"])
def test_a_descriptor_passed_the_other_way(version: str) -> None:
    """By value before 7.1, by pointer from then on: AMD's runtime would crash, or take another one."""
    program = """
    from pathlib import Path
    from tests.simulated.driver import Simulator
    made = hip.object("hipMemCreate", 2 << 20, ctypes.byref(hip.properties()), 0)
    fd = ctypes.c_int(-1)
    hip.ok("hipMemExportToShareableHandle", ctypes.byref(fd), made, 1, 0)
    wrong = ctypes.addressof(fd) if hip.number("hipRuntimeGetVersion") >= BY_VALUE else fd.value
    print(hip("hipMemImportFromShareableHandle", ctypes.byref(ctypes.c_size_t()), wrong, 1))
    print(is_open(fd.value), len(Simulator(Path(hip.library._name)).violations()))
    """
    noted = "1" if int(version) < 70100000 else "0"
    assert printed(program, GPUINTEROP_SIM_HIP_VERSION=version) == [str(INVALID_VALUE), "True", noted]


PEERS = """
from pathlib import Path
from tests.simulated.driver import Simulator
simulator = Simulator(Path(hip.library._name))
can = lambda device, peer: hip.number("hipDeviceCanAccessPeer", device, peer)
simulator.set_peer_access(1, 0, False)
print(can(0, 0), can(0, 1), can(1, 0))
made = hip.object("hipMemCreate", 2 * MIB, ctypes.byref(hip.properties(0)), 0)
address = hip.object("hipMemAddressReserve", 2 * MIB, 0, 0, 0)
hip.ok("hipMemMap", address, 2 * MIB, 0, made, 0)
access = (Access * 2)(Access(where=Location(1, 0), flags=3), Access(where=Location(1, 1), flags=3))
print(hip("hipMemSetAccess", address, 2 * MIB, access, 2))
hip.ok("hipSetDevice", 1)
print(hip("hipDeviceEnablePeerAccess", 0, 0))
simulator.reset()
print(can(1, 0), hip("hipMemSetAccess", address, 2 * MIB, access, 2), hip("hipDeviceEnablePeerAccess", 0, 0))
"""


def test_peer_access_is_per_pair(simulator: Simulator) -> None:
    found = printed(PEERS, GPUINTEROP_SIM_DEVICES="2")
    assert found == ["0", "1", "0", str(NOT_SUPPORTED), "217", "1", "0", "0"]


def test_what_is_noted(runtime: Runtime, simulator: Simulator, memfd: Any) -> None:
    with runtime.imported(memfd, 65536) as (_, memory), runtime.stream() as stream:
        address = runtime.mapped(memory, 0, 65536)
        runtime.ok("hipFree", address)
        with simulator.expect_violation("used after its memory was freed"):
            assert runtime("hipMemsetD8Async", address, 1, 16, stream) == INVALID_VALUE
    with simulator.expect_violation("no live external_memory"):
        assert runtime.map(memory, 0, 16)[0] == INVALID_VALUE
    with simulator.expect_violation("no live event"):
        assert runtime("hipEventQuery", 12345) == INVALID_HANDLE
