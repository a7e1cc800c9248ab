"""The forwarding runtime: AMD's rules where they differ from CUDA's, and CUDA's calls for everything else.

The oracle is the CUDA driver: what the simulated one has counted, logged and been given, what cuda.bindings say of the
same device, and the bytes that the other party sees.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from gpuinterop.exporters.base import Exporter
from tests.simulated.build import build
from tests.simulated.driver import Simulator

from .conftest import MODE
from .runtime import (
    INSUFFICIENT_DRIVER,
    INVALID_DEVICE,
    INVALID_VALUE,
    MIB,
    NO_DEVICE,
    NOT_READY,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    SUCCESS,
    UNKNOWN,
    Access,
    Location,
    Runtime,
    is_open,
    word,
)

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 20.0
SHORT = 0.1
GTE, EQ = 0, 1
DEFAULT_KIND = 4  # hipMemcpyDefault


def ok(result: tuple[Any, ...]) -> Any:
    """Of cuda.bindings."""
    assert int(result[0]) == 0, result[0]
    return result[1]


@pytest.fixture
def two_devices(hip: Runtime) -> None:
    if hip.number("hipGetDeviceCount") < 2:
        pytest.skip("needs two devices")


def cuda_device_of(pointer: int) -> int:
    attribute = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(ok(cuda.cuPointerGetAttribute(attribute, pointer)))


@contextmanager
def somebodys_file() -> Iterator[int]:
    """An fd that no driver has made."""
    fd = os.memfd_create("nobody's")
    os.ftruncate(fd, 1 << 16)
    yield fd
    os.close(fd)


def device_of(hip: Runtime, stream: int) -> int:
    found = ctypes.c_int(-1)
    hip.ok("hipStreamGetDevice", stream, ctypes.byref(found))
    return found.value


def child(program: str, *, with_driver: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has the runtime as `hip`."""
    driver = f"ctypes.CDLL({str(build('cuda'))!r}, mode=ctypes.RTLD_GLOBAL)" if MODE == "simulated" else ""
    start = f"""
    import ctypes, os
    from tests.forwarding.runtime import *
    {driver if with_driver else ""}
    hip = Runtime({str(build("forwarding"))!r})
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def printed(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [int(number) for number in done.stdout.split()]


# -- the library -------------------------------------------------------------------------------------------------------


def test_it_is_this_library_over_that_driver(hip: Runtime) -> None:
    assert hip.has("gpuinterop_forwarding_hip")
    assert not hip.has("gpuinterop_simulated_driver")
    assert Path(hip.driver).name.startswith("libcuda.so")
    if MODE == "simulated":
        assert Path(hip.driver) == build("cuda")
    else:
        assert not hasattr(ctypes.CDLL(hip.driver), "gpuinterop_simulated_driver")


def test_it_exports_what_it_declares_and_knows_no_multicast() -> None:
    raw = build("forwarding").read_bytes()
    assert b"cuMulticast" not in raw
    # Its own text says which CUDA functions it looks up, and that is all it needs of the driver.
    assert b"cuImportExternalMemory" in raw
    assert b"cuImportExternalSemaphore" not in raw


@pytest.mark.skipif(MODE != "simulated", reason="of the simulated driver")
def test_what_hip_init_says(tmp_path: Path) -> None:
    ask = "print(hip('hipInit', 0), hip('hipGetDeviceCount', ctypes.byref(ctypes.c_int())))"
    assert printed(child(ask)) == [SUCCESS, SUCCESS]
    assert printed(child(ask, GPUINTEROP_SIM_INIT="100")) == [NO_DEVICE, NO_DEVICE]
    # Versions have an answer without a driver: they are asked for before anything else.
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    done = child(f"{ask}; print(hip.number('hipRuntimeGetVersion'))", with_driver=False, LD_LIBRARY_PATH=str(tmp_path))
    assert printed(done) == [INSUFFICIENT_DRIVER, INSUFFICIENT_DRIVER, 70100000]
    assert "libamdhip64 (forwarding): " in done.stderr


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda_code", "hip_code"),
    [
        *((code, code) for code in (1, 2, 100, 201, 400, 801, 906, 999)),
        *((34, 35), (803, 35), (714, 719), (715, 719), (718, 719)),  # CUDA tells more of them apart
        *((code, 999) for code in (802, 911, 912, 12345)),  # of which HIP knows nothing, or something else
    ],
)
def test_codes(hip: Runtime, simulator: Simulator, cuda_code: int, hip_code: int) -> None:
    simulator.fail("cuMemAlloc", code=cuda_code)
    assert hip("hipMalloc", ctypes.byref(ctypes.c_size_t()), 4096) == hip_code
    assert hip.library.hipGetErrorName(hip_code).startswith(b"hip")
    assert hip.library.hipGetErrorString(hip_code)


def test_the_last_error_is_a_threads_own(hip: Runtime) -> None:
    assert hip("hipSetDevice", 99) == INVALID_DEVICE
    assert hip("hipGetDevice", ctypes.byref(ctypes.c_int())) == SUCCESS
    assert hip("hipPeekAtLastError") == INVALID_DEVICE, "success leaves it"
    other: list[int] = []
    thread = threading.Thread(target=lambda: other.append(hip("hipGetLastError")))
    thread.start()
    thread.join(LIMIT)
    assert other == [SUCCESS]
    assert [hip("hipGetLastError"), hip("hipGetLastError")] == [INVALID_DEVICE, SUCCESS]
    with hip.stream() as stream, hip.pinned() as host:
        hip.ok("hipStreamWaitValue64", stream, host, 1, GTE, -1)
        assert hip("hipStreamQuery", stream) == NOT_READY
        assert hip("hipPeekAtLastError") == SUCCESS, "an answer, no error"
        word(host).value = 1
        hip.ok("hipStreamSynchronize", stream)


# -- devices and contexts ----------------------------------------------------------------------------------------------


def test_attributes(hip: Runtime, simulator: Simulator) -> None:
    for number, other in ((89, 102), (93, 124), (10013, 122), (87, 10)):
        device = ok(cuda.cuDeviceGet(0))
        assert hip.attribute(number) == ok(cuda.cuDeviceGetAttribute(cuda.CUdevice_attribute(other), device))
        simulator.set_attribute(0, other, 7)
        assert hip.attribute(number) == 7
    assert hip.attribute(95) == 0, "no fabric handles"
    assert hip("hipDeviceGetAttribute", ctypes.byref(ctypes.c_int()), 4711, 0) == INVALID_VALUE


def test_each_thread_has_a_device_of_its_own(hip: Runtime, two_devices: None) -> None:
    hip.ok("hipSetDevice", 1)
    found: list[int] = []

    def work() -> None:
        pointer = hip.object("hipMalloc", 4096)
        found.extend([hip.number("hipGetDevice"), cuda_device_of(pointer)])
        hip.ok("hipFree", pointer)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LIMIT)
    assert found == [0, 0]
    assert hip.number("hipGetDevice") == 1
    pointer = hip.object("hipMalloc", 4096)
    assert cuda_device_of(pointer) == 1
    with hip.stream() as stream:
        hip.ok("hipSetDevice", 0)
        assert [device_of(hip, one) for one in (stream, 0, 2)] == [1, 0, 0]
    hip.ok("hipFree", pointer)


def test_another_librarys_context_stays_current(hip: Runtime, two_devices: None) -> None:
    """The process may use CUDA as well: its context is there again after a call, and the call was on HIP's device."""
    pointers: list[int] = []
    device = ok(cuda.cuDeviceGet(1))
    context = ok(cuda.cuDevicePrimaryCtxRetain(device))

    def work() -> None:
        cuda.cuCtxSetCurrent(context)
        pointers.append(hip.object("hipMalloc", 4096))
        pointers.append(int(ok(cuda.cuCtxGetCurrent())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LIMIT)
    assert pointers[1] == int(context)
    assert cuda_device_of(pointers[0]) == 0
    hip.ok("hipFree", pointers[0])
    cuda.cuDevicePrimaryCtxRelease(device)


# -- external memory: descriptors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["open", "closed"])
@pytest.mark.parametrize("code", [1, 801, 999])
def test_every_failure_is_out_of_memory(hip: Runtime, simulator: Simulator, code: int, fate: Any) -> None:
    """Whatever CUDA says, and whatever it does with the duplicate."""
    with somebodys_file() as fd:
        mark, count = os.fstat(fd), len(os.listdir("/proc/self/fd"))
        simulator.fail("cuImportExternalMemory", code=code, fd=fate)
        assert hip.import_fd(fd, 1 << 16)[0] == OUT_OF_MEMORY
        assert os.path.samestat(os.fstat(fd), mark)
        assert len(os.listdir("/proc/self/fd")) == count


def test_threads_lose_no_descriptor(hip: Runtime, simulator: Simulator) -> None:
    """CUDA closes the duplicate of a failed import, and another thread is given its number: that one is not closed."""
    simulator.fail("cuImportExternalMemory", every=1, code=UNKNOWN, fd="closed")
    problems: list[str] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait(LIMIT)
        for _ in range(1000):
            with somebodys_file() as fd:
                mark = os.fstat(fd)
                opened = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 300) for _ in range(3)]  # as the duplicates are
                if hip.import_fd(fd, 4096)[0] != OUT_OF_MEMORY:
                    problems.append("imported")
                opened += [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 300) for _ in range(3)]
                for one in (fd, *opened):
                    try:
                        if not os.path.samestat(os.fstat(one), mark):
                            problems.append("another file")
                    except OSError as error:
                        problems.append(errno.errorcode[error.errno or 0])
                for one in opened:
                    os.close(one)

    count = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert problems == []
    assert len(os.listdir("/proc/self/fd")) == count


# -- external memory: addresses ----------------------------------------------------------------------------------------


def test_an_address_is_base_and_offset(hip: Runtime, party: Exporter) -> None:
    with hip.imported(party) as (_, memory):
        base = hip.mapped(memory, 0, 1 << 16)
        assert hip.mapped(memory, 8192, 4096) == base + 8192
        assert hip.mapped(memory, 100, 7) == base + 100
        assert hip.mapped(memory, 8192, 16) == base + 8192, "the same pointer for the same offset"
        for offset in (0, 8192):
            hip.ok("hipFree", base + offset)
            assert hip("hipFree", base + offset) == INVALID_VALUE, "freed twice"
        assert hip("hipFree", base + 4096) == INVALID_VALUE, "never handed out"
        hip.ok("hipFree", base + 100)
        again = hip.mapped(memory, 4096, 4096)
        hip.ok("hipFree", again)


@pytest.mark.parametrize("first", ["free", "destroy"])
def test_free_and_destroy_in_either_order(
    hip: Runtime, party: Exporter, first: str, request: pytest.FixtureRequest
) -> None:
    """Both are needed. To destroy an object under its mapping is a violation of CUDA's rules, so that is put off."""
    with hip.imported(party) as (theirs, memory):
        pointer = hip.mapped(memory, 0, 4096)
        if first == "free":
            hip.ok("hipFree", pointer)
            hip.ok("hipDestroyExternalMemory", memory)
        else:
            hip.ok("hipDestroyExternalMemory", memory)
            assert hip.map(memory, 0, 4096)[0] == INVALID_VALUE, "it is gone"
            hip.ok("hipMemset", pointer, 0x21, 16)
            hip.ok("hipDeviceSynchronize")
            assert theirs.read(0, 16) == b"\x21" * 16
            hip.ok("hipFree", pointer)
        assert hip("hipDestroyExternalMemory", memory) == INVALID_VALUE
        if MODE == "simulated":
            live = request.getfixturevalue("simulator").live()
            assert (live["external_memory"], live["mapping"]) == (0, 0), "before the block ends"


def test_more_is_imported_than_there_is(hip: Runtime, party: Exporter) -> None:
    """Nobody checks the size of an import. What is mapped of it must be there."""
    with party.create_memory(1 << 16) as theirs:
        handle: Any = theirs.export()
        code, memory = hip.import_fd(handle.fd, 4 * theirs.size, flags=int(theirs.dedicated))
        assert code == SUCCESS
        handle.close()
        pointer = hip.mapped(memory, 4096, (1 << 16) - 4096)
        hip.ok("hipMemset", pointer, 0x44, (1 << 16) - 4096)
        hip.ok("hipDeviceSynchronize")
        assert theirs.read(4096, (1 << 16) - 4096) == b"\x44" * ((1 << 16) - 4096)
        assert hip.map(memory, 0, 5 * theirs.size)[0] == INVALID_VALUE
        assert hip.map(memory, 4 * theirs.size, 1)[0] == INVALID_VALUE
        assert hip.map(memory, 0, 0)[0] == INVALID_VALUE
        hip.ok("hipFree", pointer)
        hip.ok("hipDestroyExternalMemory", memory)


@pytest.mark.parametrize("last", [True, False])
def test_a_free_waits_for_the_device(hip: Runtime, simulator: Simulator, memfd: Exporter, last: bool) -> None:
    """Also of a pointer that is not the last one, where nothing is unmapped."""
    with hip.imported(memfd) as (_, memory), hip.pinned() as host, hip.stream() as stream:
        pointer, other = hip.mapped(memory, 0, 4096), hip.mapped(memory, 4096, 4096)
        if last:
            hip.ok("hipFree", other)
        hip.ok("hipStreamWaitValue64", stream, host, 1, GTE, -1)
        freed = threading.Event()

        def free() -> None:
            hip.ok("hipFree", pointer)
            freed.set()

        name = "cuMemFree" if last else "cuCtxSynchronize"
        before = simulator.calls(name)
        thread = threading.Thread(target=free)
        thread.start()
        while simulator.calls(name) == before:
            assert thread.is_alive()
        assert not freed.wait(SHORT)
        word(host).value = 1
        thread.join(LIMIT)
        assert freed.is_set()
        if not last:
            hip.ok("hipFree", other)


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_free_beside_one_that_is_under_way(
    hip: Runtime, simulator: Simulator, memfd: Exporter, fails: bool
) -> None:
    """The memory stays mapped until both are through: the first may fail yet, and its pointer is then still there."""
    with hip.imported(memfd) as (theirs, memory):
        first, second = hip.mapped(memory, 0, 4096), hip.mapped(memory, 4096, 4096)
        before = simulator.calls("cuMemFree")
        codes: list[int] = []
        if fails:
            simulator.fail("cuCtxSynchronize", nth=2, code=906)  # one passes it while the first is held
        with simulator.block("cuCtxSynchronize") as gate:
            thread = threading.Thread(target=lambda: codes.append(hip("hipFree", first)))
            thread.start()
            assert gate.entered(LIMIT)
            hip.ok("hipFree", second)
            assert simulator.calls("cuMemFree") == before
            assert hip("hipFree", second) == INVALID_VALUE, "it is freed"
        thread.join(LIMIT)
        assert codes == [906 if fails else SUCCESS]
        assert simulator.calls("cuMemFree") == before + (not fails)
        if fails:
            hip.ok("hipMemset", first, 0x31, 16)
            hip.ok("hipDeviceSynchronize")
            assert theirs.read(0, 16) == b"\x31" * 16
            assert hip.mapped(memory, 4096, 4096) == second, "of the same region"
            hip.ok("hipFree", second)
            hip.ok("hipFree", first)
        assert simulator.calls("cuMemFree") == before + 1


def test_an_error_while_the_size_is_found_out(hip: Runtime, simulator: Simulator, memfd: Exporter) -> None:
    """More was imported than there is. What says nothing of the size is told, and nothing stays mapped."""
    with memfd.create_memory(1 << 16) as theirs:
        handle: Any = theirs.export()
        code, memory = hip.import_fd(handle.fd, 3 << 16, flags=int(theirs.dedicated))
        assert code == SUCCESS
        handle.close()
        live = simulator.live()["mapping"]
        # Of 192 KiB: 192 and 96 are too much, 48 fits, 72 is asked next.
        simulator.fail("cuExternalMemoryGetMappedBuffer", nth=4, code=700)
        assert hip.map(memory, 0, 4096) == (700, 0)
        assert simulator.live()["mapping"] == live
        pointer = hip.mapped(memory, 0, 1 << 16)
        hip.ok("hipFree", pointer)
        hip.ok("hipDestroyExternalMemory", memory)


# -- semaphores --------------------------------------------------------------------------------------------------------


def test_builds_with_assertions_abort() -> None:
    """ROCm/clr #72; not before the arguments were looked at."""
    program = """
    desc = SemaphoreDesc(type=5)
    desc.handle.fd = 1
    print(hip("hipImportExternalSemaphore", ctypes.byref(ctypes.c_size_t()), ctypes.byref(desc)), flush=True)
    desc.type = 1
    print(hip("hipImportExternalSemaphore", ctypes.byref(ctypes.c_size_t()), ctypes.byref(desc)), flush=True)
    """
    done = child(program, GPUINTEROP_SIM_HIP_ABORT="1")
    assert (done.stdout, done.returncode) == (f"{INVALID_VALUE}\n", -signal.SIGABRT)
    assert printed(child(program, GPUINTEROP_SIM_HIP_ABORT="0")) == [INVALID_VALUE, NOT_SUPPORTED]


@pytest.mark.parametrize("name", ["hipSignalExternalSemaphoresAsync", "hipWaitExternalSemaphoresAsync"])
def test_signal_and_wait_do_nothing(hip: Runtime, name: str) -> None:
    params = ctypes.create_string_buffer(2 * 144)
    handles = (ctypes.c_void_p * 2)(0x1230, 0x4560)
    with hip.stream() as stream:
        hip.ok(name, handles, params, 2, stream)
        hip.ok("hipStreamQuery", stream)
        handles[1] = None
        assert hip(name, handles, params, 2, stream) == INVALID_VALUE
        assert hip(name, handles, params, 1, stream) == SUCCESS
        assert hip(name, None, params, 1, stream) == INVALID_VALUE


# -- mipmapped arrays --------------------------------------------------------------------------------------------------


ARRAY_CALL = "hipExternalMemoryGetMappedMipmappedArray"


def test_arrays_are_not_exported(hip: Runtime) -> None:
    """ROCm/hip #3779. In the variant they are."""
    assert not hip.has(ARRAY_CALL)
    assert Runtime(build("forwarding", extra=("-DGIP_MIPMAP=1",))).has(ARRAY_CALL)


# -- virtual memory management -----------------------------------------------------------------------------------------


@contextmanager
def allocated(hip: Runtime, size: int = 2 * MIB) -> Iterator[int]:
    handle = hip.object("hipMemCreate", size, ctypes.byref(hip.properties()), 0)
    yield handle
    hip.ok("hipMemRelease", handle)


@contextmanager
def reachable(hip: Runtime, handle: int, size: int = 2 * MIB) -> Iterator[int]:
    address = hip.object("hipMemAddressReserve", size, 0, 0, 0)
    hip.ok("hipMemMap", address, size, 0, handle, 0)
    hip.ok("hipMemSetAccess", address, size, ctypes.byref(Access(Location(1, 0), 3)), 1)
    yield address
    hip.ok("hipMemUnmap", address, size)
    hip.ok("hipMemAddressFree", address, size)


def test_an_allocation_goes_round(hip: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """By descriptor, which stays open: by value since 7.1, through a pointer before."""
    granularity = hip.object("hipMemGetAllocationGranularity", ctypes.byref(hip.properties()), 0)
    assert granularity == 2 * MIB
    with allocated(hip) as mine, reachable(hip, mine) as address:
        fd = hip.number("hipMemExportToShareableHandle", mine, 1, 0)
        hip.ok("hipMemset", address, 0x66, 2 * MIB)
        hip.ok("hipDeviceSynchronize")
        for version, passed in (("70100000", fd), ("", fd), ("60300000", ctypes.byref(ctypes.c_int(fd)))):
            monkeypatch.setenv("GPUINTEROP_SIM_HIP_VERSION", version)
            other = hip.object("hipMemImportFromShareableHandle", passed, 1)
            assert is_open(fd)
            with reachable(hip, other) as there, hip.pinned() as host:
                hip.ok("hipMemcpy", host, there + MIB, 4096, DEFAULT_KIND)
                assert ctypes.string_at(host, 4096) == b"\x66" * 4096
            hip.ok("hipMemRelease", other)
        assert hip("hipMemImportFromShareableHandle", ctypes.byref(ctypes.c_size_t()), 0, 1) == INVALID_VALUE
        os.close(fd)


def test_several_devices_have_access(hip: Runtime) -> None:
    """Given in one call; the properties of an import say whose the memory is, and both granularities are CUDA's."""
    if hip.number("hipGetDeviceCount") < 2 or not hip.number("hipDeviceCanAccessPeer", 1, 0):
        pytest.skip("needs two devices with peer access")
    with allocated(hip) as mine, reachable(hip, mine) as address:
        both = (Access * 2)(Access(Location(1, 0), 3), Access(Location(1, 1), 3))
        hip.ok("hipMemSetAccess", address, 2 * MIB, both, 2)
        hip.ok("hipSetDevice", 1)
        hip.ok("hipMemset", address, 0x41, 2 * MIB)
        hip.ok("hipDeviceSynchronize")
        fd = hip.number("hipMemExportToShareableHandle", mine, 1, 0)
        again = hip.object("hipMemImportFromShareableHandle", fd, 1)
        os.close(fd)
        properties = hip.properties(device=1)
        hip.ok("hipMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), again)
        assert (properties.where.type, properties.where.id) == (1, 0)
        hip.ok("hipMemRelease", again)
        hip.ok("hipSetDevice", 0)
        with hip.pinned() as host:
            hip.ok("hipMemcpy", host, address, 4096, DEFAULT_KIND)
            assert ctypes.string_at(host, 4096) == b"\x41" * 4096
        both[1].where.id = 99
        assert hip("hipMemSetAccess", address, 2 * MIB, both, 2) == INVALID_DEVICE
    smallest, best = (
        hip.object("hipMemGetAllocationGranularity", ctypes.byref(hip.properties()), option) for option in (0, 1)
    )
    assert best % smallest == 0


def test_a_device_without_peer_access(hip: Runtime, simulator: Simulator) -> None:
    simulator.set_peer_access(1, 0, False)
    assert hip.number("hipDeviceCanAccessPeer", 1, 0) == 0
    assert hip.number("hipDeviceCanAccessPeer", 0, 1) == 1
    both = (Access * 2)(Access(Location(1, 0), 3), Access(Location(1, 1), 3))
    with allocated(hip) as mine, reachable(hip, mine) as address:
        assert hip("hipMemSetAccess", address, 2 * MIB, both, 2) == NOT_SUPPORTED


# -- host memory, stream words -----------------------------------------------------------------------------------------


def test_where_the_command_processor_waits() -> None:
    """With GPU_STREAMOPS_CP_WAIT=1 a wait takes signal memory only; a write takes anything."""
    program = f"""
    signals = hip.object("hipExtMallocWithFlags", 8, 2)
    with hip.pinned() as host, hip.stream() as stream:
        print(hip("hipStreamWaitValue64", stream, host, 0, {GTE}, -1))
        print(hip("hipStreamWriteValue64", stream, host, 1, 0))
        print(hip("hipStreamWaitValue64", stream, signals, 0, {GTE}, -1))
        hip.ok("hipStreamSynchronize", stream)
        print(word(host).value)
    hip.ok("hipFree", signals)
    """
    assert printed(child(program, GPU_STREAMOPS_CP_WAIT="1")) == [INVALID_VALUE, SUCCESS, SUCCESS, 1]
    assert printed(child(program, GPU_STREAMOPS_CP_WAIT="yes")) == [INVALID_VALUE, SUCCESS, SUCCESS, 1]
    for value in ("0", ""):  # and anything else is as good as 1, as the backend and the simulated runtime have it
        assert printed(child(program, GPU_STREAMOPS_CP_WAIT=value)) == [SUCCESS, SUCCESS, SUCCESS, 1]


# -- streams, events, copies -------------------------------------------------------------------------------------------


def test_a_capture_is_told(hip: Runtime) -> None:
    with hip.pinned() as host, hip.stream() as stream:
        status, graph = ctypes.c_int(), ctypes.c_size_t()
        hip.ok("hipStreamBeginCapture", stream, 2)
        hip.ok("hipStreamWriteValue64", stream, host, 1, 0)
        hip.ok("hipStreamIsCapturing", stream, ctypes.byref(status))
        assert status.value == 1
        hip.ok("hipStreamEndCapture", stream, ctypes.byref(graph))
        hip.ok("hipStreamIsCapturing", stream, ctypes.byref(status))
        assert status.value == 0
        assert word(host).value == 0
        hip.ok("hipGraphDestroy", graph.value)
        mode = ctypes.c_uint(2)
        hip.ok("hipThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        assert mode.value == 0
        hip.ok("hipThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        assert mode.value == 2
