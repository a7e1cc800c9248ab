"""The simulated HIP runtime itself: what it makes of Windows, fabrics and faults, and what it notes, through ctypes.

What AMD's runtime does as well is in test_facts.py. What this one shares with the simulated CUDA driver, streams and
events, faults and counts, is tested there.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gpuinterop.exporters import open_exporter
from tests.forwarding.runtime import (
    INVALID_VALUE,
    MIB,
    NOT_SUPPORTED,
    OPAQUE_FD,
    SUCCESS,
    AllocationProp,
    MemoryDesc,
    Runtime,
    SemaphoreDesc,
    is_open,
)
from tests.simulated.driver import Simulator

from .test_facts import EVERY_BIT, GTE, START, batch, import_semaphore, printed, raw

pytestmark = pytest.mark.usefixtures("simulator")

INVALID_HANDLE = 400


@pytest.fixture
def runtime(simulator: Simulator) -> Runtime:
    found = raw()
    found.ok("hipSetDevice", 0)
    found("hipGetLastError")
    return found


@pytest.fixture
def memfd() -> Iterator[Any]:
    with open_exporter("memfd") as exporter:
        yield exporter


# -- the runtime -------------------------------------------------------------------------------------------------------


def test_a_runtime_that_does_not_work(simulator: Simulator) -> None:
    assert printed('print(hip("hipInit", 0))', GPUINTEROP_SIM_INIT="35") == ["35"]


def test_it_says_the_version_it_is_told(simulator: Simulator) -> None:
    program = 'print(hip.number("hipRuntimeGetVersion"), hip.number("hipDriverGetVersion"))'
    assert printed(program, GPUINTEROP_SIM_HIP_VERSION="50221153") == ["50221153"] * 2


def test_it_needs_no_init(simulator: Simulator) -> None:
    assert printed('print(hip.number("hipGetDeviceCount"))', GPUINTEROP_SIM_DEVICES="3") == ["3"]


def test_each_thread_has_its_device_and_its_error(simulator: Simulator) -> None:
    program = """
    import threading
    hip.ok("hipSetDevice", 1)
    assert hip("hipSetDevice", 2) == 101
    def other():
        print(hip.number("hipGetDevice"), hip("hipPeekAtLastError"))
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    print(hip.number("hipGetDevice"), hip("hipPeekAtLastError"), hip("hipGetLastError"), hip("hipGetLastError"))
    """
    assert printed(program, GPUINTEROP_SIM_DEVICES="2") == ["0", "0", "1", "101", "101", "0"]


def test_its_uuid_is_not_vulkans_and_its_pci_address_is(runtime: Runtime) -> None:
    """ROCm/hipamd #50: sixteen characters of a serial number."""
    uuid = (ctypes.c_char * 16)()
    runtime.ok("hipDeviceGetUuid", uuid, 0)
    assert bytes(uuid).isalnum()
    text = ctypes.create_string_buffer(32)
    runtime.ok("hipDeviceGetPCIBusId", text, 32, 0)
    assert text.value == b"0000:c3:00.0"
    assert runtime.attribute(67) == 0xC3


# -- semaphores --------------------------------------------------------------------------------------------------------


@pytest.fixture
def windows(simulator: Simulator) -> Iterator[Simulator]:
    simulator.set_platform("windows")
    yield simulator
    simulator.set_platform("linux")


def test_windows_takes_handles(runtime: Runtime, windows: Simulator) -> None:
    """By handle: of a semaphore the name is not read, of memory it is (rocm-systems #6021, #6632)."""
    name = ctypes.create_string_buffer("Local\\theirs".encode("utf-16-le") + b"\0\0")
    for kind in (2, 3, 4):
        code, semaphore = import_semaphore(runtime, kind, handle=0x40)
        assert code == SUCCESS
        runtime.ok("hipDestroyExternalSemaphore", semaphore)
        desc = SemaphoreDesc(type=kind)
        desc.handle.win32[1] = ctypes.addressof(name)
        made = ctypes.c_size_t()
        assert runtime("hipImportExternalSemaphore", ctypes.byref(made), ctypes.byref(desc)) == INVALID_VALUE
    for kind in (5, 6, 7, 8, 9, 10):
        assert import_semaphore(runtime, kind, handle=0x40)[0] == INVALID_VALUE
    for kind in range(2, 8):
        for handle, text in ((0x44, 0), (0, ctypes.addressof(name))):
            memory = MemoryDesc(type=kind, size=4096)
            memory.handle.win32[0], memory.handle.win32[1] = handle, text
            made = ctypes.c_size_t()
            runtime.ok("hipImportExternalMemory", ctypes.byref(made), ctypes.byref(memory))
            runtime.ok("hipDestroyExternalMemory", made.value)
    assert windows.descriptors("hipImportExternalMemory")[-1].name == "Local\\theirs"
    assert runtime.import_fd(5, 4096)[0] == INVALID_VALUE


def test_a_batch_goes_entry_by_entry(runtime: Runtime, windows: Simulator) -> None:
    """One in the middle that is no semaphore fails the call behind those before it; only the value is read."""
    made = [import_semaphore(runtime, 2, handle=number)[1] for number in (16, 20, 24)]
    with runtime.stream() as stream:
        name = "hipSignalExternalSemaphoresAsync"
        assert batch(runtime, name, made, [3, 4, 5], stream) == SUCCESS
        assert batch(runtime, name, [made[0], 0, made[2]], [6, 7, 8], stream) == INVALID_VALUE
        runtime.ok("hipStreamSynchronize", stream)
    assert [(entry.operation, entry.value) for entry in windows.log()] == [("signal", it) for it in (3, 4, 5, 6)]
    for semaphore in made:
        runtime.ok("hipDestroyExternalSemaphore", semaphore)


# -- words -------------------------------------------------------------------------------------------------------------


def test_a_device_without_words(runtime: Runtime, simulator: Simulator) -> None:
    assert runtime.attribute(10013) == 1
    simulator.set_attribute(0, 10013, 0)
    with runtime.stream() as stream, runtime.pinned() as place:
        assert runtime("hipStreamWriteValue64", stream, place, 1, 0) == NOT_SUPPORTED


def test_a_word_at_no_multiple_of_its_size(runtime: Runtime) -> None:
    """AMD's runtime takes it; what hardware does is not known. Stricter here, so that no such call goes unseen."""
    with runtime.stream() as stream, runtime.pinned() as place:
        assert runtime("hipStreamWaitValue64", stream, place + 4, 1, GTE, EVERY_BIT) == INVALID_VALUE
        assert runtime("hipStreamWriteValue64", stream, place + 4, 1, 0) == INVALID_VALUE


# -- virtual memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["70053211", "70100000"])
def test_a_descriptor_passed_the_other_way(version: str) -> None:
    """By value before 7.1, by pointer from then on: AMD's runtime would crash, or take another one."""
    program = """
    made = hip.object("hipMemCreate", 2 << 20, ctypes.byref(hip.properties()), 0)
    fd = ctypes.c_int(-1)
    hip.ok("hipMemExportToShareableHandle", ctypes.byref(fd), made, 1, 0)
    wrong = ctypes.addressof(fd) if hip.number("hipRuntimeGetVersion") >= BY_VALUE else fd.value
    print(hip("hipMemImportFromShareableHandle", ctypes.byref(ctypes.c_size_t()), wrong, 1))
    print(is_open(fd.value), len(Simulator(Path(hip.library._name)).violations()))
    """
    noted = "1" if int(version) < 70100000 else "0"
    assert printed(program, GPUINTEROP_SIM_HIP_VERSION=version) == [str(INVALID_VALUE), "True", noted]


def test_the_granularity_and_the_device_of_an_allocation(runtime: Runtime) -> None:
    prop = runtime.properties()
    found = [
        runtime.number("hipMemGetAllocationGranularity", ctypes.byref(prop), option, kind=ctypes.c_size_t)
        for option in (0, 1)
    ]
    assert found == [2 * MIB, 4 * MIB]
    made = runtime.object("hipMemCreate", 2 * MIB, ctypes.byref(prop), 0)
    told = AllocationProp()
    runtime.ok("hipMemGetAllocationPropertiesFromHandle", ctypes.byref(told), made)
    assert (told.type, told.handle_types, told.where.type, told.where.id) == (1, 1, 1, 0)
    runtime.ok("hipMemRelease", made)


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


FABRIC = """
prop = hip.properties()
prop.handle_types = 8
made = ctypes.c_size_t()
print(hip.attribute(95), hip("hipMemCreate", ctypes.byref(made), 2 * MIB, ctypes.byref(prop), 0))
Simulator.attach("hip").set_platform("windows")
print(hip("hipMemCreate", ctypes.byref(made), 2 * MIB, ctypes.byref(prop), 0))
"""

EXPORTS = """
import sys
prop = hip.properties()
prop.handle_types = 8
made = hip.object("hipMemCreate", 2 * MIB, ctypes.byref(prop), 0)
address = hip.object("hipMemAddressReserve", 2 * MIB, 0, 0, 0)
hip.ok("hipMemMap", address, 2 * MIB, 0, made, 0)
hip.ok("hipMemSetAccess", address, 2 * MIB, ctypes.byref(Access(where=Location(1, 0), flags=3)), 1)
word(address).value = 77
handle = (ctypes.c_ubyte * 64)()
hip.ok("hipMemExportToShareableHandle", handle, made, 8, 0)
print(bytes(handle).hex(), flush=True)
sys.stdin.readline()
"""

IMPORTS = """
data = (ctypes.c_ubyte * 64)(*bytes.fromhex(os.environ["THEIRS"]))
made = ctypes.c_size_t()
code = hip("hipMemImportFromShareableHandle", ctypes.byref(made), data, 8)
print(code)
if not code:
    address = hip.object("hipMemAddressReserve", 2 * MIB, 0, 0, 0)
    hip.ok("hipMemMap", address, 2 * MIB, 0, made, 0)
    hip.ok("hipMemSetAccess", address, 2 * MIB, ctypes.byref(Access(where=Location(1, 0), flags=3)), 1)
    print(word(address).value)
"""


def test_fabric_handles(simulator: Simulator) -> None:
    """Between processes with the same channel, on Linux; HIP has no number for what is not permitted."""
    refused, taken = str(NOT_SUPPORTED), str(SUCCESS)
    assert printed(FABRIC) == ["0", refused, refused]
    assert printed(FABRIC, GPUINTEROP_SIM_FABRIC="one") == ["1", taken, refused]
    with subprocess.Popen(
        [sys.executable, "-c", START + EXPORTS],
        env=simulator.environment(GPUINTEROP_SIM_FABRIC="one"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as exporter:
        assert exporter.stdout
        theirs = exporter.stdout.readline().strip()
        assert printed(IMPORTS, THEIRS=theirs) == [refused]
        assert printed(IMPORTS, THEIRS=theirs, GPUINTEROP_SIM_FABRIC="two") == [refused]
        assert printed(IMPORTS, THEIRS=theirs, GPUINTEROP_SIM_FABRIC="one") == [taken, "77"]
        exporter.kill()
    assert printed(IMPORTS, THEIRS=theirs, GPUINTEROP_SIM_FABRIC="one") == [str(INVALID_VALUE)]


# -- what it notes -----------------------------------------------------------------------------------------------------


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


def test_a_fault_comes_first(runtime: Runtime, simulator: Simulator, memfd: Any) -> None:
    with memfd.create_memory(65536) as theirs, theirs.export() as handle:
        simulator.fail("hipImportExternalMemory", code=999, nth=2)
        _, memory = runtime.import_fd(handle.fd, 65536)
        assert runtime.import_fd(handle.fd, 65536)[0] == 999
        assert is_open(handle.fd)
        runtime.ok("hipDestroyExternalMemory", memory)
    assert simulator.calls("hipImportExternalMemory") >= 2
    assert simulator.descriptors("hipImportExternalMemory")[0].type == OPAQUE_FD
