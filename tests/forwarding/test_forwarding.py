"""The forwarding runtime: AMD's rules where they differ from CUDA's, and CUDA's calls for everything else.

The oracle is the CUDA driver: what the simulated one has counted, logged and been given, what cuda.bindings say of the
same device, and the bytes that the other party sees.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib
import os
import re
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
    OPAQUE_FD,
    OUT_OF_MEMORY,
    SUCCESS,
    UNKNOWN,
    Access,
    ArrayDesc,
    Copy3D,
    Location,
    MemoryDesc,
    Pitched,
    PointerAttributes,
    Runtime,
    SemaphoreDesc,
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


@contextmanager
def allowed(request: pytest.FixtureRequest, text: str) -> Iterator[None]:
    """What the simulated driver notes on purpose; the real one notes nothing."""
    if MODE == "real":
        yield
        return
    with request.getfixturevalue("simulator").expect_violation(text):
        yield


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


def hip_python() -> Any:
    for name in ("rocm.bindings.hip", "hip.hip"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    assert not os.environ.get("GPUINTEROP_TEST_HIP_BINDINGS"), "make has installed hip-python, and it is not here"
    pytest.skip("hip-python is not here")


def test_hip_python_calls_it(hip: Runtime) -> None:
    bindings = hip_python()
    before = hip.calls("hipMalloc"), hip.calls("hipFree"), hip.calls("hipGetDeviceCount")
    code, pointer = bindings.hipMalloc(4096)
    assert int(code) == SUCCESS
    assert int(bindings.hipFree(pointer)[0]) == SUCCESS
    code, count = bindings.hipGetDeviceCount()
    assert (int(code), count) == (SUCCESS, hip.number("hipGetDeviceCount"))
    assert (hip.calls("hipMalloc"), hip.calls("hipFree")) == (before[0] + 1, before[1] + 1)
    assert hip.calls("hipGetDeviceCount") == before[2] + 2


def test_calls_are_counted_one_by_one(hip: Runtime) -> None:
    assert hip.calls("hipNoSuchThing") == 0
    before = hip.calls("hipGetDevice")
    hip.number("hipGetDevice")
    assert hip("hipGetDevice", 0) == INVALID_VALUE
    assert hip.calls("hipGetDevice") == before + 2, "failures too"


@pytest.mark.skipif(MODE != "simulated", reason="of the simulated driver")
def test_what_hip_init_says(tmp_path: Path) -> None:
    ask = "print(hip('hipInit', 0), hip('hipGetDeviceCount', ctypes.byref(ctypes.c_int())))"
    assert printed(child(ask)) == [SUCCESS, SUCCESS]
    assert printed(child(ask, GPUINTEROP_SIM_INIT="100")) == [NO_DEVICE, NO_DEVICE]
    # Versions have an answer without a driver: they are asked for before anything else.
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    done = child(f"{ask}; print(hip.number('hipRuntimeGetVersion'))", with_driver=False, LD_LIBRARY_PATH=str(tmp_path))
    assert printed(done) == [INSUFFICIENT_DRIVER, INSUFFICIENT_DRIVER, 70200000]
    assert "libamdhip64 (forwarding): " in done.stderr


def test_versions(hip: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hip.number("hipRuntimeGetVersion") == hip.number("hipDriverGetVersion") == 70200000
    monkeypatch.setenv("GPUINTEROP_SIM_HIP_VERSION", "50221153")
    assert hip.number("hipRuntimeGetVersion") == hip.number("hipDriverGetVersion") == 50221153


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


def test_names(hip: Runtime) -> None:
    text: Any = ctypes.c_char_p()
    hip.ok("hipDrvGetErrorName", OUT_OF_MEMORY, ctypes.byref(text))
    assert text.value == b"hipErrorOutOfMemory" == hip.library.hipGetErrorName(OUT_OF_MEMORY)
    assert hip("hipDrvGetErrorName", 4711, ctypes.byref(text)) == INVALID_VALUE
    assert text.value is None
    hip.ok("hipDrvGetErrorString", NOT_SUPPORTED, ctypes.byref(text))
    assert text.value == hip.library.hipGetErrorString(NOT_SUPPORTED)
    # Where the number means something else to CUDA, its text is not shown.
    assert hip.library.hipGetErrorString(911) == b"hipErrorInvalidChannelDescriptor"
    assert hip.library.hipGetErrorString(4711) == b"unrecognized error code"


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


def test_a_device_is_cudas(hip: Runtime) -> None:
    assert hip.number("hipGetDeviceCount") == ok(cuda.cuDeviceGetCount())
    device = ok(cuda.cuDeviceGet(0))
    name, bus = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    hip.ok("hipDeviceGetName", name, 256, 0)
    assert name.value == ok(cuda.cuDeviceGetName(256, device)).partition(b"\0")[0] + b" (HIP over CUDA)"
    hip.ok("hipDeviceGetPCIBusId", bus, 32, 0)
    assert bus.value == ok(cuda.cuDeviceGetPCIBusId(32, device)).partition(b"\0")[0].lower()
    assert hip.object("hipDeviceTotalMem", 0) == ok(cuda.cuDeviceTotalMem(device))
    assert hip.number("hipDeviceGet", 0) == 0
    assert hip("hipDeviceGetName", name, 256, 99) == INVALID_DEVICE


def test_its_uuid_is_not(hip: Runtime) -> None:
    """ROCm/hipamd #50: hexadecimal digits of the chip's number, and nothing that Vulkan's could be matched with."""
    found = ctypes.create_string_buffer(16)
    hip.ok("hipDeviceGetUuid", found, 0)
    assert re.fullmatch(rb"[0-9a-f]{16}", found.raw)
    assert found.raw != bytes(ok(cuda.cuDeviceGetUuid(ok(cuda.cuDeviceGet(0)))).bytes)
    properties = ctypes.create_string_buffer(1472)
    hip.ok("hipGetDevicePropertiesR0600", properties, 0)
    assert properties.raw[256:272] == found.raw


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
        attributes = PointerAttributes()
        hip.ok("hipPointerGetAttributes", ctypes.byref(attributes), pointer)
        found.extend([hip.number("hipGetDevice"), attributes.device])
        hip.ok("hipFree", pointer)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LIMIT)
    assert found == [0, 0]
    assert hip.number("hipGetDevice") == 1
    pointer = hip.object("hipMalloc", 4096)
    assert (
        int(ok(cuda.cuPointerGetAttribute(cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer))) == 1
    )
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
    attribute = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    assert int(ok(cuda.cuPointerGetAttribute(attribute, pointers[0]))) == 0
    hip.ok("hipFree", pointers[0])
    cuda.cuDevicePrimaryCtxRelease(device)


def test_default_streams_are_the_current_devices(hip: Runtime, simulator: Simulator, two_devices: None) -> None:
    hip.ok("hipSetDevice", 1)
    pointer = hip.object("hipMalloc", 4096)
    for stream in (0, 1, 2):
        simulator.forget_log()
        hip.ok("hipMemsetD8Async", pointer, 3, 4096, stream)
        hip.ok("hipStreamSynchronize", stream)
        assert [(entry.operation, entry.device) for entry in simulator.log()] == [("memset", 1)]
    hip.ok("hipFree", pointer)


# -- external memory: descriptors --------------------------------------------------------------------------------------


def test_the_descriptor_stays_the_callers(hip: Runtime, party: Exporter) -> None:
    with party.create_memory(1 << 16) as theirs:
        handle: Any = theirs.export()
        mark, count = os.fstat(handle.fd), len(os.listdir("/proc/self/fd"))
        memories = []
        for _ in range(3):  # again and again: nothing has taken it
            code, memory = hip.import_fd(handle.fd, theirs.size, flags=int(theirs.dedicated))
            assert code == SUCCESS
            memories.append(memory)
        assert os.path.samestat(os.fstat(handle.fd), mark)
        if MODE == "simulated":
            assert len(os.listdir("/proc/self/fd")) == count, "the duplicates were CUDA's"
        for memory in memories:
            hip.ok("hipDestroyExternalMemory", memory)
        handle.close()


def test_cuda_is_given_a_duplicate(hip: Runtime, simulator: Simulator, memfd: Exporter) -> None:
    for flags in (0, 1):
        simulator.forget_descriptors()
        with memfd.create_memory(1 << 16) as theirs:
            handle: Any = theirs.export()
            code, memory = hip.import_fd(handle.fd, theirs.size, flags=flags)
            assert code == SUCCESS
            (given,) = simulator.descriptors("cuImportExternalMemory")
            assert given.fd != handle.fd
            assert (given.type, given.size, given.flags) == (OPAQUE_FD, theirs.size, flags)
            assert not is_open(given.fd)
            handle.close()
            hip.ok("hipDestroyExternalMemory", memory)


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


def test_memory_of_nobody_is_out_of_memory(hip: Runtime) -> None:
    with somebodys_file() as fd:
        hip.import_fd(fd, 1 << 16)  # the first one may open what the driver then keeps
        count = len(os.listdir("/proc/self/fd"))
        assert hip.import_fd(fd, 1 << 16)[0] == OUT_OF_MEMORY
        assert hip.import_fd(fd, 0)[0] == OUT_OF_MEMORY
        assert is_open(fd)
        assert len(os.listdir("/proc/self/fd")) == count
    assert hip.import_fd(fd, 1 << 16)[0] == OUT_OF_MEMORY, "closed"


@pytest.mark.parametrize("kind", [-1, 0, 8, 9, 100])
def test_types_that_hip_refuses(hip: Runtime, kind: int) -> None:
    """Above D3D11ResourceKmt (7) everything is refused, although the enum has names."""
    with somebodys_file() as fd:
        assert hip.import_fd(fd, 4096, kind=kind)[0] == INVALID_VALUE
        assert is_open(fd)


@pytest.mark.parametrize("kind", range(2, 8))
def test_types_of_windows(hip: Runtime, kind: int) -> None:
    desc = MemoryDesc(type=kind, size=4096, flags=1)
    desc.handle.win32[0] = 0x1234
    assert hip("hipImportExternalMemory", ctypes.byref(ctypes.c_size_t()), ctypes.byref(desc)) == OUT_OF_MEMORY


def test_arguments_that_hip_refuses(hip: Runtime) -> None:
    assert hip.import_fd(0, 4096)[0] == INVALID_VALUE, "0 is a descriptor to everybody else"
    with somebodys_file() as fd:
        assert hip.import_fd(fd, 4096, flags=2)[0] == INVALID_VALUE
        assert is_open(fd)
    assert hip("hipImportExternalMemory", 0, 0) == INVALID_VALUE
    assert hip("hipDestroyExternalMemory", 0) == INVALID_VALUE
    assert hip("hipDestroyExternalMemory", 0x1230) == INVALID_VALUE
    assert hip.map(0x1230, 0, 4096)[0] == INVALID_VALUE


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


def test_threads_import_one_descriptor(hip: Runtime, simulator: Simulator, memfd: Exporter) -> None:
    """One's duplicate may get the number that CUDA has closed for another, and is of the same file: it stays open."""
    rounds, threads_at_once = 4000, 8
    outcomes: list[int] = []
    start = threading.Barrier(threads_at_once)
    with memfd.create_memory(4096) as theirs:
        handle: Any = theirs.export()
        simulator.fail("cuImportExternalMemory", every=2, code=UNKNOWN, fd="closed")

        def work() -> None:
            start.wait(LIMIT)
            for _ in range(rounds):
                code, memory = hip.import_fd(handle.fd, 4096)
                outcomes.append(code)
                if code == SUCCESS:
                    hip.ok("hipDestroyExternalMemory", memory)

        threads = [threading.Thread(target=work) for _ in range(threads_at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        handle.close()
    assert outcomes.count(SUCCESS) == outcomes.count(OUT_OF_MEMORY) == rounds * threads_at_once // 2


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


def test_both_sides_see_the_same_bytes(hip: Runtime, party: Exporter) -> None:
    with hip.imported(party) as (theirs, memory), hip.stream() as stream, hip.pinned(16384) as host:
        theirs.write(0, bytes(range(256)) * 16)
        part = hip.mapped(memory, 4096, 8192)
        whole = hip.mapped(memory, 0, 1 << 16)
        hip.ok("hipMemcpyAsync", host, whole, 4096, DEFAULT_KIND, stream)
        hip.ok("hipMemsetAsync", part, 0x5A, 8192, stream)
        hip.ok("hipMemcpyAsync", whole + 12288, host, 4096, DEFAULT_KIND, stream)
        hip.ok("hipStreamSynchronize", stream)
        assert ctypes.string_at(host, 4096) == bytes(range(256)) * 16
        assert theirs.read(0, 4096) == bytes(range(256)) * 16
        assert theirs.read(4096, 8192) == b"\x5a" * 8192
        assert theirs.read(12288, 4096) == bytes(range(256)) * 16
        hip.ok("hipFree", part)
        hip.ok("hipMemset", whole, 0x33, 64)
        hip.ok("hipDeviceSynchronize")
        assert theirs.read(0, 64) == b"\x33" * 64
        hip.ok("hipFree", whole)


def test_cuda_maps_it_once_and_unmaps_it_with_the_last(hip: Runtime, simulator: Simulator, memfd: Exporter) -> None:
    with hip.imported(memfd) as (_, memory):
        before, maps = simulator.live()["mapping"], simulator.calls("cuExternalMemoryGetMappedBuffer")
        first, second = hip.mapped(memory, 4096, 4096), hip.mapped(memory, 8192, 4096)
        (given,) = simulator.descriptors("cuExternalMemoryGetMappedBuffer")
        assert (given.offset, given.size) == (0, 1 << 16)
        assert simulator.calls("cuExternalMemoryGetMappedBuffer") == maps + 1
        hip.ok("hipFree", first)
        assert simulator.live()["mapping"] == before + 1
        hip.ok("hipFree", second)
        assert simulator.live()["mapping"] == before
        hip.ok("hipFree", hip.mapped(memory, 0, 4096))
        assert simulator.calls("cuExternalMemoryGetMappedBuffer") == maps + 2


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


def test_a_free_that_fails_has_freed_nothing(hip: Runtime, simulator: Simulator, memfd: Exporter) -> None:
    """Under somebody's capture, for one: it can be made up for afterwards."""
    with hip.imported(memfd) as (theirs, memory):
        pointers = [hip.mapped(memory, offset, 4096) for offset in (0, 4096)]
        for call, pointer in zip(("cuCtxSynchronize", "cuMemFree"), pointers, strict=True):
            simulator.fail(call, code=906)
            assert hip("hipFree", pointer) == 906
            hip.ok("hipMemset", pointer, 0x13, 16)
            hip.ok("hipDeviceSynchronize")
            hip.ok("hipFree", pointer)
        assert theirs.read(0, 16) == theirs.read(4096, 16) == b"\x13" * 16


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


def import_semaphore(hip: Runtime, fd: int, kind: int = 1) -> int:
    desc = SemaphoreDesc(type=kind)
    desc.handle.fd = fd
    return hip("hipImportExternalSemaphore", ctypes.byref(ctypes.c_size_t()), ctypes.byref(desc))


def test_there_are_no_semaphores(hip: Runtime) -> None:
    with somebodys_file() as fd:
        assert [import_semaphore(hip, fd, kind) for kind in (1, 2, 3, 4)] == [NOT_SUPPORTED] * 4
        assert [import_semaphore(hip, fd, kind) for kind in (0, 5, 6, 7, 8, 9, 10)] == [INVALID_VALUE] * 7
        assert is_open(fd)
    assert import_semaphore(hip, 0) == INVALID_VALUE


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


@pytest.mark.parametrize(
    ("channels", "kind", "texel", "count"),
    [
        ((8, 0, 0, 0), 1, 0x01, 1),
        ((16, 16, 0, 0), 0, 0x09, 2),
        ((32, 32, 32, 32), 2, 0x20, 4),
        ((16, 16, 16, 16), 2, 0x10, 4),
        ((32, 0, 0, 0), 1, 0x03, 1),
    ],
)
def test_what_cuda_is_told_of_an_array(
    simulator: Simulator, memfd: Exporter, channels: tuple[int, ...], kind: int, texel: int, count: int
) -> None:
    variant = Runtime(build("forwarding", extra=("-DGIP_MIPMAP=1",)))
    with variant.imported(memfd, MIB) as (_, memory):
        desc = ArrayDesc(offset=0, channels=channels, kind=kind, extent=(20, 12, 1), flags=2, levels=3)
        array = variant.object(ARRAY_CALL, memory, ctypes.byref(desc))
        (given,) = simulator.descriptors("cuExternalMemoryGetMappedMipmappedArray")
        assert (given.width, given.height, given.depth, given.levels, given.flags) == (20, 12, 1, 3, 2)
        assert (given.format, given.channels) == (texel, count)
        assert variant.object("hipGetMipmappedArrayLevel", array, 2)
        assert variant("hipGetMipmappedArrayLevel", ctypes.byref(ctypes.c_size_t()), array, 3) == INVALID_VALUE
        variant.ok("hipDestroyExternalMemory", memory)  # put off until the array is gone
        variant.ok("hipFreeMipmappedArray", array)
        assert simulator.live()["external_memory"] == 0


def test_an_array_with_layers_and_levels(simulator: Simulator, memfd: Exporter) -> None:
    """NVIDIA's driver wants to be told of all levels that there could be; whoever asks HIP for those gets none."""
    variant = Runtime(build("forwarding", extra=("-DGIP_MIPMAP=1",)))
    with variant.imported(memfd, MIB) as (_, memory):
        desc = ArrayDesc(channels=(8, 0, 0, 0), kind=1, extent=(20, 12, 4), flags=1, levels=2)
        array = variant.object(ARRAY_CALL, memory, ctypes.byref(desc))
        (given,) = simulator.descriptors("cuExternalMemoryGetMappedMipmappedArray")
        assert given.levels == 5  # 20, 10, 5, 2, 1
        assert variant.object("hipMipmappedArrayGetLevel", array, 1)
        assert variant("hipMipmappedArrayGetLevel", ctypes.byref(ctypes.c_size_t()), array, 2) == INVALID_VALUE
        variant.ok("hipMipmappedArrayDestroy", array)


@pytest.mark.parametrize(
    "wrong",
    [
        {"channels": (8, 8, 8, 0)},
        {"channels": (8, 16, 0, 0)},
        {"channels": (0, 0, 0, 0)},
        {"channels": (8, 0, 8, 0)},
        {"channels": (8, 0, 0, 0), "kind": 2},
        {"kind": 3},
        {"levels": 0},
        {"flags": 0x10},
    ],
)
def test_arrays_that_there_are_not(simulator: Simulator, memfd: Exporter, wrong: dict[str, Any]) -> None:
    variant = Runtime(build("forwarding", extra=("-DGIP_MIPMAP=1",)))
    fields: dict[str, Any] = {"channels": (8, 0, 0, 0), "kind": 1, "extent": (16, 16, 1), "levels": 1, **wrong}
    with variant.imported(memfd, MIB) as (_, memory):
        desc = ArrayDesc(**fields)
        assert variant(ARRAY_CALL, ctypes.byref(ctypes.c_size_t()), memory, ctypes.byref(desc)) == INVALID_VALUE
        assert simulator.descriptors("cuExternalMemoryGetMappedMipmappedArray") == []


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


def test_what_is_known_of_an_allocation(hip: Runtime) -> None:
    properties = hip.properties()
    with allocated(hip) as handle, reachable(hip, handle) as address:
        hip.ok("hipMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), handle)
        assert (properties.type, properties.handle_types, properties.where.type, properties.where.id) == (1, 1, 1, 0)
        flags = ctypes.c_uint64()
        hip.ok("hipMemGetAccess", ctypes.byref(flags), ctypes.byref(Location(1, 0)), address)
        assert flags.value == 3
        again = hip.object("hipMemRetainAllocationHandle", address)
        assert again == handle
        hip.ok("hipMemRelease", again)


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


def test_virtual_memory_that_hip_refuses(hip: Runtime) -> None:
    made = ctypes.c_size_t()
    with allocated(hip) as handle:
        address = hip.object("hipMemAddressReserve", 4 * MIB, 0, 0, 0)
        assert hip("hipMemMap", address, 2 * MIB, 2 * MIB, handle, 0) == INVALID_VALUE, "mapped from the start only"
        assert hip("hipMemMap", address, 2 * MIB, 0, handle, 1) == INVALID_VALUE
        hip.ok("hipMemAddressFree", address, 4 * MIB)
    elsewhere = hip.properties(device=99)
    assert hip("hipMemCreate", ctypes.byref(made), 2 * MIB, ctypes.byref(elsewhere), 0) == INVALID_DEVICE
    elsewhere = hip.properties()
    elsewhere.where.type = 2
    assert hip("hipMemCreate", ctypes.byref(made), 2 * MIB, ctypes.byref(elsewhere), 0) == INVALID_VALUE


# -- host memory, stream words -----------------------------------------------------------------------------------------


def test_host_memory_is_registered(hip: Runtime, request: pytest.FixtureRequest) -> None:
    room = ctypes.create_string_buffer(3 * 4096)
    page = (ctypes.addressof(room) + 4095) // 4096 * 4096
    hip.ok("hipHostRegister", page, 4096, 3)
    assert hip("hipHostRegister", page, 4096, 3) == 712, "already"
    there = hip.object("hipHostGetDevicePointer", page, 0)
    with hip.stream() as stream:
        hip.ok("hipStreamWriteValue64", stream, there + 8, 2**63 - 1, 0)
        hip.ok("hipStreamSynchronize", stream)
    assert word(page + 8).value == 2**63 - 1
    hip.ok("hipHostUnregister", page)
    with allowed(request, "no memory to be freed"):
        assert hip("hipHostUnregister", page) == 713
    assert hip("hipHostRegister", page, 4096, 0x10) == INVALID_VALUE


def test_words(hip: Runtime) -> None:
    with hip.pinned() as host, hip.stream() as stream, hip.stream() as other:
        hip.ok("hipStreamWaitValue64", stream, host, 5, GTE, -1)
        hip.ok("hipStreamWriteValue64", stream, host + 8, 7, 0)
        assert hip("hipStreamQuery", stream) == NOT_READY
        assert word(host + 8).value == 0
        hip.ok("hipStreamWriteValue64", other, host, 6, 0)  # more will do
        hip.ok("hipStreamSynchronize", stream)
        assert word(host + 8).value == 7
        ctypes.c_uint32.from_address(host + 16).value = 3
        hip.ok("hipStreamWaitValue32", stream, host + 16, 3, EQ, 0xFFFFFFFF)
        hip.ok("hipStreamWriteValue32", stream, host + 20, 9, 0)
        hip.ok("hipStreamSynchronize", stream)
        assert word(host + 16).value == 3 + (9 << 32)


def test_words_that_hip_refuses(hip: Runtime) -> None:
    nobody = ctypes.create_string_buffer(64)
    address = (ctypes.addressof(nobody) + 7) // 8 * 8
    with hip.pinned() as host, hip.stream() as stream:
        for at in (0, address, host + 4):
            assert hip("hipStreamWriteValue64", stream, at, 1, 0) == INVALID_VALUE
            assert hip("hipStreamWaitValue64", stream, at, 0, GTE, -1) == INVALID_VALUE
        assert hip("hipStreamWaitValue64", stream, host, 0, 4, -1) == INVALID_VALUE
        assert hip("hipStreamWaitValue64", stream, host, 0, GTE, 0xFF) == NOT_SUPPORTED, "CUDA has no masks"
        hip.ok("hipStreamQuery", stream)


def test_signal_memory(hip: Runtime) -> None:
    """hipMallocSignalMemory: eight bytes, which hipFree takes back."""
    made = ctypes.c_size_t()
    assert hip("hipExtMallocWithFlags", ctypes.byref(made), 16, 2) == INVALID_VALUE
    address = hip.object("hipExtMallocWithFlags", 8, 2)
    with hip.stream() as stream:
        hip.ok("hipStreamWriteValue64", stream, address, 4, 0)
        hip.ok("hipStreamWaitValue64", stream, address, 4, GTE, -1)
        hip.ok("hipStreamSynchronize", stream)
    assert word(address).value == 4
    hip.ok("hipFree", address)
    pointer = hip.object("hipExtMallocWithFlags", 4096, 1)
    hip.ok("hipFree", pointer)


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


def test_streams_and_events(hip: Runtime) -> None:
    event = hip.object("hipEventCreateWithFlags", 2)
    with hip.pinned() as host, hip.stream() as stream, hip.stream(0) as other:
        for one, expected in ((stream, 1), (other, 0)):
            found = ctypes.c_uint()
            hip.ok("hipStreamGetFlags", one, ctypes.byref(found))
            assert found.value == expected
            assert device_of(hip, one) == 0
        hip.ok("hipStreamWaitValue64", stream, host, 1, GTE, -1)
        hip.ok("hipEventRecord", event, stream)
        hip.ok("hipStreamWaitEvent", other, event, 0)
        hip.ok("hipStreamWriteValue64", other, host + 8, 1, 0)
        assert [hip("hipEventQuery", event), hip("hipStreamQuery", other)] == [NOT_READY, NOT_READY]
        word(host).value = 1
        hip.ok("hipEventSynchronize", event)
        hip.ok("hipStreamSynchronize", other)
        assert word(host + 8).value == 1
        assert hip("hipEventQuery", event) == SUCCESS
    hip.ok("hipEventDestroy", event)
    assert hip("hipStreamDestroy", 0) == hip("hipEventRecord", 0, 0) == 400


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


def test_what_a_pointer_is(hip: Runtime, party: Exporter) -> None:
    attributes = PointerAttributes()
    device = hip.object("hipMalloc", 4096)
    with hip.imported(party) as (_, memory), hip.pinned() as host:
        mapped = hip.mapped(memory, 4096, 4096)
        for pointer, expected in ((device, 2), (mapped + 10, 2), (host, 1)):
            hip.ok("hipPointerGetAttributes", ctypes.byref(attributes), pointer)
            assert (attributes.type, attributes.device) == (expected, 0)
            kind = ctypes.c_uint()
            hip.ok("hipPointerGetAttribute", ctypes.byref(kind), 2, pointer)
            assert kind.value == expected
        assert attributes.host_pointer == host
        hip.ok("hipFree", mapped)
    nobody = ctypes.create_string_buffer(64)
    hip.ok("hipPointerGetAttributes", ctypes.byref(attributes), nobody)
    assert attributes.type == 0, "unregistered, and no error, since 6.0"
    kind = ctypes.c_uint(9)
    assert hip("hipPointerGetAttribute", ctypes.byref(kind), 2, nobody) == INVALID_VALUE
    assert kind.value == 0
    hip.ok("hipFree", device)


def test_copies(hip: Runtime) -> None:
    device = hip.object("hipMalloc", 8192)
    pageable = ctypes.create_string_buffer(bytes(range(256)) * 16, 4096)
    with hip.pinned() as host, hip.stream() as stream:
        hip.ok("hipMemcpy", device, pageable, 4096, 1)
        hip.ok("hipMemcpyWithStream", device + 4096, device, 4096, 3, stream)
        hip.ok("hipMemcpyAsync", host, device + 4096, 4096, DEFAULT_KIND, stream)
        hip.ok("hipStreamSynchronize", stream)
        assert ctypes.string_at(host, 4096) == pageable.raw
        for name in ("hipMemcpyAsync", "hipMemcpyWithStream"):
            assert hip(name, host, device, 16, 5, stream) == 21, "no such direction"
            assert hip(name, host, 0, 16, DEFAULT_KIND, stream) == INVALID_VALUE
            assert hip(name, 0, 0, 0, DEFAULT_KIND, stream) == SUCCESS
        assert hip("hipMemcpy", host, device, 16, 5) == 21
    hip.ok("hipFree", device)


@pytest.mark.parametrize("to_host", ["pinned", "pageable"])
def test_a_block_is_copied(hip: Runtime, to_host: str) -> None:
    """hipMemcpy3DAsync without an array counts bytes; what CUDA does not know is pageable memory of the host."""
    device = hip.object("hipMalloc", 8192)
    pageable = ctypes.create_string_buffer(4096)
    with hip.pinned() as pinned, hip.stream() as stream:
        target = pinned if to_host == "pinned" else ctypes.addressof(pageable)
        data = bytes(range(256)) * 32
        hip.ok("hipMemcpy", device, data, 8192, 1)
        job = Copy3D(
            source_at=(3, 1, 1),
            source=Pitched(device, 64, 64, 8),
            target=Pitched(target, 16, 16, 4),
            extent=(16, 4, 2),
            kind=DEFAULT_KIND,
        )
        hip.ok("hipMemcpy3DAsync", ctypes.byref(job), stream)
        hip.ok("hipStreamSynchronize", stream)
        expected = b"".join(
            data[(z + 1) * 512 + (y + 1) * 64 + 3 : (z + 1) * 512 + (y + 1) * 64 + 19] for z in (0, 1) for y in range(4)
        )
        assert ctypes.string_at(target, 128) == expected
        job.kind = 5
        assert hip("hipMemcpy3DAsync", ctypes.byref(job), stream) == 21
    hip.ok("hipFree", device)


def test_a_levels_texels_are_copied(hip: Runtime, simulator: Simulator, memfd: Exporter) -> None:
    """With an array the extent counts texels, there and back."""
    variant = Runtime(build("forwarding", extra=("-DGIP_MIPMAP=1",)))
    data = bytes(range(256)) * 4
    with variant.imported(memfd, MIB) as (_, memory), variant.stream() as stream, variant.pinned() as host:
        desc = ArrayDesc(channels=(32, 32, 32, 32), kind=2, extent=(16, 4, 1), flags=2, levels=1)
        array = variant.object(ARRAY_CALL, memory, ctypes.byref(desc))
        level = variant.object("hipGetMipmappedArrayLevel", array, 0)
        ctypes.memmove(host, data, 1024)
        extent: Any = (16, 4, 1)
        there = Copy3D(source=Pitched(host, 256, 16, 4), target_array=level, extent=extent, kind=DEFAULT_KIND)
        variant.ok("hipMemcpy3DAsync", ctypes.byref(there), stream)
        part = Copy3D(
            source_array=level,
            source_at=(2, 1, 0),
            target=Pitched(host + 2048, 32, 2, 2),
            extent=(2, 2, 1),
            kind=DEFAULT_KIND,
        )
        variant.ok("hipMemcpy3DAsync", ctypes.byref(part), stream)
        variant.ok("hipStreamSynchronize", stream)
        assert ctypes.string_at(host + 2048, 64) == data[256 + 32 : 256 + 64] + data[512 + 32 : 512 + 64]
        assert [entry.size for entry in simulator.log()] == [1024, 64]
        variant.ok("hipFreeMipmappedArray", array)


def test_peers(hip: Runtime, two_devices: None) -> None:
    if not hip.number("hipDeviceCanAccessPeer", 0, 1):
        pytest.skip("the devices have no access to each other")
    hip.ok("hipDeviceEnablePeerAccess", 1, 0)
    assert hip("hipDeviceEnablePeerAccess", 1, 0) == 704, "already"
    hip.ok("hipDeviceDisablePeerAccess", 1)
    assert hip("hipDeviceDisablePeerAccess", 1) == 705


def test_memory_is_what_the_device_has(hip: Runtime) -> None:
    unused, total = ctypes.c_size_t(), ctypes.c_size_t()
    hip.ok("hipMemGetInfo", ctypes.byref(unused), ctypes.byref(total))
    assert 0 < unused.value <= total.value <= hip.object("hipDeviceTotalMem", 0)
