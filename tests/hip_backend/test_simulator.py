"""The simulated HIP runtime itself: AMD's documented behaviour, one by one, through ctypes.

What it shares with the simulated CUDA driver, streams and events, faults and counts, is tested there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpuinterop.exporters import open_exporter
from tests.forwarding.runtime import (
    INVALID_DEVICE,
    INVALID_VALUE,
    MIB,
    NO_DEVICE,
    NOT_READY,
    NOT_SUPPORTED,
    OPAQUE_FD,
    OUT_OF_MEMORY,
    SUCCESS,
    Access,
    AllocationProp,
    Location,
    MemoryDesc,
    Runtime,
    SemaphoreDesc,
    is_open,
    word,
)
from tests.simulated.driver import Simulator

LIMIT = 20.0
SHORT = 0.1
GTE, EQ, AND, NOR = range(4)
EVERY_BIT = 2**64 - 1
ALREADY_REGISTERED, NOT_REGISTERED, INVALID_HANDLE = 712, 713, 400


class Simulated(Runtime):
    """The runtime at `path`, which is no forwarding one."""

    def __init__(self, path: Any) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.hipGetErrorName.restype = self.library.hipGetErrorString.restype = ctypes.c_char_p


@pytest.fixture
def runtime(simulator: Simulator) -> Iterator[Runtime]:
    found = Simulated(simulator.path)
    found.ok("hipSetDevice", 0)
    found("hipGetLastError")
    found.library.gis_control_set_aborting(0)
    yield found
    found.library.gis_control_set_aborting(int(os.environ["GPUINTEROP_SIM_HIP_ABORT"]))


@pytest.fixture
def memfd() -> Iterator[Any]:
    with open_exporter("memfd") as exporter:
        yield exporter


def program_of(simulator: Simulator, program: str) -> str:
    """With the runtime as `hip`."""
    start = f"""
    import ctypes, os
    from tests.hip_backend.test_simulator import *
    hip = Simulated({str(simulator.path)!r})
    """
    return textwrap.dedent(start) + textwrap.dedent(program)


def child(simulator: Simulator, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has the runtime as `hip`."""
    return subprocess.run(
        [sys.executable, "-c", program_of(simulator, program)],
        env=simulator.environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def printed(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# -- the runtime -------------------------------------------------------------------------------------------------------


def test_without_a_device(simulator: Simulator) -> None:
    """hipInit says 101, hipGetDeviceCount and what needs a device 100; the version is there all the same."""
    program = """
    print(hip("hipInit", 0), hip("hipGetDeviceCount", ctypes.byref(ctypes.c_int())), hip("hipDeviceSynchronize"))
    print(hip.number("hipRuntimeGetVersion"))
    """
    done = child(simulator, program, GPUINTEROP_SIM_DEVICES="0")
    assert printed(done) == [str(INVALID_DEVICE), str(NO_DEVICE), str(NO_DEVICE), "70253211"]


def test_a_runtime_that_does_not_work(simulator: Simulator) -> None:
    assert printed(child(simulator, 'print(hip("hipInit", 0))', GPUINTEROP_SIM_INIT="35")) == ["35"]


def test_it_says_the_version_it_is_told(simulator: Simulator) -> None:
    program = 'print(hip.number("hipRuntimeGetVersion"), hip.number("hipDriverGetVersion"))'
    assert printed(child(simulator, program, GPUINTEROP_SIM_HIP_VERSION="50221153")) == ["50221153"] * 2


def test_it_needs_no_init(simulator: Simulator) -> None:
    assert printed(child(simulator, 'print(hip.number("hipGetDeviceCount"))', GPUINTEROP_SIM_DEVICES="3")) == ["3"]


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
    done = child(simulator, program, GPUINTEROP_SIM_DEVICES="2")
    assert printed(done) == ["0", "0", "1", "101", "101", "0"]


def test_not_ready_is_no_error_of_the_thread(runtime: Runtime) -> None:
    with runtime.stream() as stream, runtime.pinned() as place:
        runtime.ok("hipStreamWaitValue64", stream, place, 1, GTE, EVERY_BIT)
        assert runtime("hipStreamQuery", stream) == NOT_READY
        assert runtime("hipPeekAtLastError") == SUCCESS
        word(place).value = 1
        runtime.ok("hipStreamSynchronize", stream)


def test_its_uuid_is_not_vulkans_and_its_pci_address_is(runtime: Runtime) -> None:
    """ROCm/hipamd #50: sixteen characters of a serial number."""
    uuid = (ctypes.c_char * 16)()
    runtime.ok("hipDeviceGetUuid", uuid, 0)
    assert bytes(uuid).isalnum()
    text = ctypes.create_string_buffer(32)
    runtime.ok("hipDeviceGetPCIBusId", text, 32, 0)
    assert text.value == b"0000:c3:00.0"
    assert runtime.attribute(67) == 0xC3


# -- external memory ---------------------------------------------------------------------------------------------------


def test_the_descriptor_is_never_closed(runtime: Runtime, memfd: Any) -> None:
    with memfd.create_memory(8192) as theirs, theirs.export() as handle:
        code, memory = runtime.import_fd(handle.fd, 8192)
        assert code == SUCCESS
        assert is_open(handle.fd)
        runtime.ok("hipDestroyExternalMemory", memory)
        assert is_open(handle.fd)
    pipe = os.pipe()
    for fd in pipe:
        assert runtime.import_fd(fd, 8192)[0] == OUT_OF_MEMORY
        assert is_open(fd)
        os.close(fd)


def test_every_failure_is_out_of_memory(runtime: Runtime) -> None:
    for fd in (99999, -1):
        assert runtime.import_fd(fd, 4096)[0] == OUT_OF_MEMORY
    for kind in range(2, 8):  # of Windows
        assert runtime.import_fd(5, 4096, kind=kind)[0] == OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("kind", "flags", "fd", "size"),
    [(0, 0, 5, 1), (8, 0, 5, 1), (9, 0, 5, 1), (1, 2, 5, 1), (1, 0, 0, 1), (1, 0, 5, 0)],
)
def test_what_is_refused_before_that(runtime: Runtime, kind: int, flags: int, fd: int, size: int) -> None:
    assert runtime.import_fd(fd, size, kind=kind, flags=flags)[0] == INVALID_VALUE


def test_the_size_is_not_checked(runtime: Runtime, simulator: Simulator, memfd: Any) -> None:
    """Four times the object is taken; what says so here is a note of ours when it is mapped."""
    with memfd.create_memory(65536) as theirs, theirs.export() as handle:
        code, memory = runtime.import_fd(handle.fd, 4 * 65536)
        assert code == SUCCESS
        with simulator.expect_violation("that has 65536"):
            address = runtime.mapped(memory, 0, 4 * 65536)
        assert runtime.map(memory, 0, 4 * 65536 + 1)[0] == INVALID_VALUE
        runtime.ok("hipFree", address)
        runtime.ok("hipDestroyExternalMemory", memory)


def test_one_offset_is_one_pointer(runtime: Runtime, simulator: Simulator, memfd: Any) -> None:
    with runtime.imported(memfd, 65536) as (theirs, memory):
        base, again = runtime.mapped(memory, 0, 65536), runtime.mapped(memory, 0, 4096)
        part = runtime.mapped(memory, 4096, 4096)
        assert (again, part) == (base, base + 4096)
        theirs.write(4096, b"their bytes")
        found = ctypes.create_string_buffer(11)
        runtime.ok("hipMemcpy", found, part, 11, 4)
        assert found.raw == b"their bytes"
        runtime.ok("hipFree", part)
        runtime.ok("hipFree", base)
        with simulator.expect_violation("it was freed before"):
            assert runtime("hipFree", again) == INVALID_VALUE


@pytest.mark.parametrize("first", ["free", "destroy"])
def test_free_and_destroy_in_either_order(runtime: Runtime, simulator: Simulator, memfd: Any, first: str) -> None:
    """Both are needed: the first alone leaves the memory where it is."""
    with memfd.create_memory(65536) as theirs, theirs.export() as handle:
        before = simulator.live()
        _, memory = runtime.import_fd(handle.fd, 65536)
        address = runtime.mapped(memory, 0, 65536)
        if first == "destroy":
            runtime.ok("hipDestroyExternalMemory", memory)
            runtime.ok("hipMemset", address, 7, 16)
            assert theirs.read(0, 16) == b"\x07" * 16
            runtime.ok("hipFree", address)
        else:
            runtime.ok("hipFree", address)
            assert runtime.mapped(memory, 0, 16) == address
            runtime.ok("hipFree", address)
            runtime.ok("hipDestroyExternalMemory", memory)
        assert simulator.live() == before


def test_a_free_waits_for_the_device(runtime: Runtime, memfd: Any) -> None:
    """And every other call waits for it."""
    done = threading.Event()
    with runtime.imported(memfd, 65536) as (_, memory), runtime.stream() as stream, runtime.pinned() as place:
        address = runtime.mapped(memory, 0, 65536)
        runtime.ok("hipStreamWaitValue64", stream, place, 1, GTE, EVERY_BIT)

        def free() -> None:
            runtime.ok("hipFree", address)
            done.set()

        thread = threading.Thread(target=free)
        thread.start()
        assert not done.wait(SHORT)
        word(place).value = 1
        thread.join(LIMIT)
        assert done.is_set()


def test_arrays_are_not_exported(runtime: Runtime) -> None:
    """ROCm/hip #3779."""
    if os.environ.get("GPUINTEROP_TEST_HIP_MIPMAP"):
        pytest.skip("this is the library that has them")
    assert not runtime.has("hipExternalMemoryGetMappedMipmappedArray")
    assert runtime.has("hipFreeMipmappedArray")


# -- semaphores --------------------------------------------------------------------------------------------------------


def import_semaphore(runtime: Runtime, kind: int, fd: int = 0, handle: int = 0) -> tuple[int, int]:
    desc = SemaphoreDesc(type=kind)
    if fd:
        desc.handle.fd = fd
    else:
        desc.handle.win32[0] = handle
    made = ctypes.c_size_t()
    return runtime("hipImportExternalSemaphore", ctypes.byref(made), ctypes.byref(desc)), made.value


def batch(runtime: Runtime, name: str, semaphores: list[int], values: list[int], stream: int) -> int:
    params = (ctypes.c_uint64 * (18 * len(values)))()  # 144 bytes each, and the value comes first
    for index, value in enumerate(values):
        params[18 * index] = value
    return runtime(name, (ctypes.c_size_t * len(semaphores))(*semaphores), params, len(semaphores), stream)


def test_no_semaphores_on_linux(runtime: Runtime) -> None:
    fd = os.memfd_create("semaphore")
    for kind in (1, 2, 3, 4):
        assert import_semaphore(runtime, kind, fd=fd)[0] == NOT_SUPPORTED
    for kind in (0, 5, 6, 7, 8, 9, 10):
        assert import_semaphore(runtime, kind, fd=fd)[0] == INVALID_VALUE
    assert import_semaphore(runtime, 1)[0] == INVALID_VALUE  # the descriptor 0
    assert is_open(fd)
    os.close(fd)


def test_builds_with_assertions_abort(simulator: Simulator) -> None:
    """ROCm/clr #72. A type that is refused is refused there as well."""
    program = """
    print(import_semaphore(hip, 9, fd=5)[0], flush=True)
    print(import_semaphore(hip, 1, fd=5)[0], flush=True)
    """
    done = child(simulator, program, GPUINTEROP_SIM_HIP_ABORT="1")
    assert (done.returncode, done.stdout.split()) == (-signal.SIGABRT, [str(INVALID_VALUE)])
    done = child(simulator, program, GPUINTEROP_SIM_HIP_ABORT="0")
    assert printed(done) == [str(INVALID_VALUE), str(NOT_SUPPORTED)]


@pytest.mark.parametrize("name", ["hipSignalExternalSemaphoresAsync", "hipWaitExternalSemaphoresAsync"])
def test_signal_and_wait_do_nothing(runtime: Runtime, simulator: Simulator, name: str) -> None:
    """They say success, whatever they are given: the trap that the gate keeps everybody from."""
    with runtime.stream() as stream:
        assert batch(runtime, name, [12345], [1], stream) == SUCCESS
        runtime.ok("hipStreamSynchronize", stream)
    assert simulator.log() == []


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


@pytest.mark.parametrize(
    ("condition", "value", "mask", "before", "after"),
    [(GTE, 5, EVERY_BIT, 4, 6), (GTE, 0x10, 0xF0, 0x0F, 0x1F), (EQ, 5, EVERY_BIT, 6, 5), (AND, 4, EVERY_BIT, 3, 12)],
)
def test_a_stream_waits_for_a_word(
    runtime: Runtime, condition: int, value: int, mask: int, before: int, after: int
) -> None:
    with runtime.stream() as stream, runtime.pinned() as place:
        word(place).value = before
        runtime.ok("hipStreamWaitValue64", stream, place, value, condition, mask)
        runtime.ok("hipStreamWriteValue64", stream, place + 8, 77, 0)
        assert runtime("hipStreamQuery", stream) == NOT_READY
        assert word(place + 8).value == 0
        word(place).value = after
        runtime.ok("hipStreamSynchronize", stream)
        assert word(place + 8).value == 77


def test_words_that_are_refused(runtime: Runtime) -> None:
    """An address that HIP does not know, one that is no multiple of the word, a flag that there is not."""
    ours = ctypes.create_string_buffer(64)
    address = ctypes.addressof(ours) + 63 & ~7
    with runtime.stream() as stream, runtime.pinned() as place:
        for name, rest in (("hipStreamWaitValue64", (1, GTE, EVERY_BIT)), ("hipStreamWriteValue64", (1, 0))):
            for where in (0, address, place + 4):
                assert runtime(name, stream, where, *rest) == INVALID_VALUE
        assert runtime("hipStreamWaitValue64", stream, place, 1, 4, EVERY_BIT) == INVALID_VALUE
        runtime.ok("hipStreamSynchronize", stream)


def test_where_the_command_processor_waits(simulator: Simulator) -> None:
    """GPU_STREAMOPS_CP_WAIT=1: on eight bytes of signal memory, and on nothing else."""
    program = """
    made = ctypes.c_size_t()
    print(hip("hipExtMallocWithFlags", ctypes.byref(made), 16, 2))
    signal = hip.object("hipExtMallocWithFlags", 8, 2)
    with hip.stream() as stream, hip.pinned() as place:
        for where in (place, signal):
            print(hip("hipStreamWaitValue64", stream, where, 0, GTE, EVERY_BIT))
    """
    refused, taken = str(INVALID_VALUE), str(SUCCESS)
    assert printed(child(simulator, program, GPU_STREAMOPS_CP_WAIT="1")) == [refused, refused, taken]
    assert printed(child(simulator, program)) == [refused, taken, taken]


def test_a_device_without_words(runtime: Runtime, simulator: Simulator) -> None:
    assert runtime.attribute(10013) == 1
    simulator.set_attribute(0, 10013, 0)
    with runtime.stream() as stream, runtime.pinned() as place:
        assert runtime("hipStreamWriteValue64", stream, place, 1, 0) == NOT_SUPPORTED


def test_registered_memory(runtime: Runtime) -> None:
    page = ctypes.create_string_buffer(8192)
    address = ctypes.addressof(page) + 4095 & ~4095
    runtime.ok("hipHostRegister", address, 4096, 3)
    assert runtime("hipHostRegister", address, 4096, 3) == ALREADY_REGISTERED
    assert runtime.object("hipHostGetDevicePointer", address, 0) == address
    with runtime.stream() as stream:
        runtime.ok("hipStreamWriteValue64", stream, address, 9, 0)
        runtime.ok("hipStreamSynchronize", stream)
    assert word(address).value == 9
    runtime.ok("hipHostUnregister", address)


# -- virtual memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["70053211", "70100000"])
def test_the_descriptor_by_pointer_and_by_value(simulator: Simulator, version: str) -> None:
    """A pointer to it before 7.1, itself from then on; whoever mixes them up is told so, or fails."""
    program = """
    from tests.simulated.driver import Simulator
    from pathlib import Path
    made = hip.object("hipMemCreate", 2 << 20, ctypes.byref(hip.properties()), 0)
    fd = ctypes.c_int(-1)
    hip.ok("hipMemExportToShareableHandle", ctypes.byref(fd), made, 1, 0)
    other = ctypes.c_size_t()
    print(hip("hipMemImportFromShareableHandle", ctypes.byref(other), fd.value, 1))
    print(hip("hipMemImportFromShareableHandle", ctypes.byref(other), ctypes.addressof(fd), 1))
    print(is_open(fd.value), len(Simulator(Path(hip.library._name)).violations()))
    """
    found = printed(child(simulator, program, GPUINTEROP_SIM_HIP_VERSION=version))
    by_value = version >= "701"
    refused, taken = str(INVALID_VALUE), str(SUCCESS)
    assert found == ([taken, refused, "True", "0"] if by_value else [refused, taken, "True", "1"])


def test_an_offset_is_refused(runtime: Runtime) -> None:
    made = runtime.object("hipMemCreate", 2 * MIB * 2, ctypes.byref(runtime.properties()), 0)
    address = runtime.object("hipMemAddressReserve", 2 * MIB, 0, 0, 0)
    assert runtime("hipMemMap", address, 2 * MIB, 2 * MIB, made, 0) == INVALID_VALUE
    runtime.ok("hipMemMap", address, 2 * MIB, 0, made, 0)
    access = Access(where=Location(1, 0), flags=3)
    runtime.ok("hipMemSetAccess", address, 2 * MIB, ctypes.byref(access), 1)
    runtime.ok("hipMemset", address, 3, 16)
    runtime.ok("hipMemUnmap", address, 2 * MIB)
    runtime.ok("hipMemAddressFree", address, 2 * MIB)
    runtime.ok("hipMemRelease", made)


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
    found = printed(child(simulator, PEERS, GPUINTEROP_SIM_DEVICES="2"))
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
    assert printed(child(simulator, FABRIC)) == ["0", refused, refused]
    assert printed(child(simulator, FABRIC, GPUINTEROP_SIM_FABRIC="one")) == ["1", taken, refused]
    with subprocess.Popen(
        [sys.executable, "-c", program_of(simulator, EXPORTS)],
        env=simulator.environment(GPUINTEROP_SIM_FABRIC="one"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as exporter:
        assert exporter.stdout
        theirs = exporter.stdout.readline().strip()
        assert printed(child(simulator, IMPORTS, THEIRS=theirs)) == [refused]
        assert printed(child(simulator, IMPORTS, THEIRS=theirs, GPUINTEROP_SIM_FABRIC="two")) == [refused]
        assert printed(child(simulator, IMPORTS, THEIRS=theirs, GPUINTEROP_SIM_FABRIC="one")) == [taken, "77"]
        exporter.kill()
    assert printed(child(simulator, IMPORTS, THEIRS=theirs, GPUINTEROP_SIM_FABRIC="one")) == [str(INVALID_VALUE)]


def test_there_is_no_multicast(runtime: Runtime) -> None:
    for name in ("hipMulticastCreate", "hipMulticastAddDevice", "hipMulticastBindMem"):
        assert not runtime.has(name)


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
    with simulator.expect_violation("no memory to be freed"):
        assert runtime("hipHostUnregister", 12345) == NOT_REGISTERED


def test_a_fault_comes_first(runtime: Runtime, simulator: Simulator, memfd: Any) -> None:
    with memfd.create_memory(65536) as theirs, theirs.export() as handle:
        simulator.fail("hipImportExternalMemory", code=999, nth=2)
        _, memory = runtime.import_fd(handle.fd, 65536)
        assert runtime.import_fd(handle.fd, 65536)[0] == 999
        assert is_open(handle.fd)
        runtime.ok("hipDestroyExternalMemory", memory)
    assert simulator.calls("hipImportExternalMemory") >= 2
    assert simulator.descriptors("hipImportExternalMemory")[0].type == OPAQUE_FD
