"""The simulated driver itself: counts, faults, what it notes, two GPUs, its personalities, other processes.

What it shares with the real one is in test_facts.py.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

import gpuinterop as gi
from gpuinterop.exporters import open_exporter
from gpuinterop.exporters.base import Exporter
from tests.simulated.driver import Simulator

from .test_facts import (
    FD_TYPE,
    HOLDS_GIL,
    INVALID_VALUE,
    LIMIT,
    MIB,
    NOT_SUPPORTED,
    SHORT,
    TIMELINE_FD,
    UNKNOWN,
    Number,
    code_of,
    context,
    detached,
    foreign_fd,
    idle,
    import_memory,
    import_semaphore,
    is_open,
    map_buffer,
    mapped,
    memory_desc,
    ok,
    pinned,
    primary,
    properties,
    signal,
    stream_of,
    wait,
    word,
)

__all__ = ["context", "primary"]  # fixtures

INVALID_HANDLE, ILLEGAL_ADDRESS = 400, 700
needs_threads = pytest.mark.skipif(HOLDS_GIL, reason="these bindings hold the GIL in every call")


@pytest.fixture(autouse=True)
def _simulated(simulator: Simulator, context: Any) -> None:
    """All of these need both."""


@pytest.fixture
def memfd() -> Iterator[Exporter]:
    with open_exporter("memfd", identity=gi.DeviceIdentity(name="a GPU's driver")) as exporter:
        yield exporter


@pytest.fixture
def stream() -> Iterator[Any]:
    with stream_of() as made:
        yield made


def imported(memfd: Exporter, size: int = 1 << 16) -> Any:
    with memfd.create_memory(size) as theirs:
        return ok(import_memory(detached(theirs.export()), theirs.size))


def timeline(memfd: Exporter) -> tuple[Any, Any]:
    theirs = memfd.create_semaphore(gi.Timeline)
    return theirs, ok(import_semaphore(detached(theirs.export()), TIMELINE_FD))


def child(simulator: Simulator, program: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, *arguments] if arguments else [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command,
        env=simulator.environment(**environment),
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- counts and logs ---------------------------------------------------------------------------------------------------


def test_every_kind_of_object_is_counted(simulator: Simulator, memfd: Exporter) -> None:
    before = simulator.live()
    undo: list[Callable[[], Any]] = []

    def made(kind: str, release: Callable[[], Any], by: int = 1) -> None:
        assert simulator.live()[kind] == before[kind] + by, kind
        undo.append(release)

    stream = ok(cuda.cuStreamCreate(1))
    made("stream", lambda: cuda.cuStreamDestroy(stream))
    event = ok(cuda.cuEventCreate(2))
    made("event", lambda: cuda.cuEventDestroy(event))
    pointer = ok(cuda.cuMemAlloc(12345))
    made("allocation", lambda: cuda.cuMemFree(pointer))
    assert simulator.live()["bytes"] == before["bytes"] + 12345
    host = ok(cuda.cuMemHostAlloc(100, 0))
    made("host_allocation", lambda: cuda.cuMemFreeHost(host))
    local = ctypes.create_string_buffer(100)
    ok(cuda.cuMemHostRegister(local, 100, 0))
    made("registration", lambda: cuda.cuMemHostUnregister(local))
    memory = imported(memfd)
    made("external_memory", lambda: cuda.cuDestroyExternalMemory(memory))
    mapping = ok(map_buffer(memory, 0, 4096))
    made("mapping", lambda: cuda.cuMemFree(mapping))
    theirs, semaphore = timeline(memfd)
    made("external_semaphore", lambda: cuda.cuDestroyExternalSemaphore(semaphore))
    handle = ok(cuda.cuMemCreate(2 * MIB, properties(), 0))
    made("vmm_handle", lambda: cuda.cuMemRelease(handle))
    addresses = ok(cuda.cuMemAddressReserve(2 * MIB, 0, 0, 0))
    made("reservation", lambda: cuda.cuMemAddressFree(addresses, 2 * MIB))
    ok(cuda.cuMemMap(addresses, 2 * MIB, 0, handle, 0))
    made("vmm_mapping", lambda: cuda.cuMemUnmap(addresses, 2 * MIB))
    ok(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    graph = ok(cuda.cuStreamEndCapture(stream))
    made("graph", lambda: cuda.cuGraphDestroy(graph))
    executable = ok(cuda.cuGraphInstantiate(graph, 0))
    made("executable", lambda: cuda.cuGraphExecDestroy(executable))
    for release in reversed(undo):
        ok(release())
    assert simulator.live() == before
    theirs.close()


def test_the_log_says_where_something_ran(simulator: Simulator, memfd: Exporter, stream: Any) -> None:
    theirs, semaphore = timeline(memfd)
    memory = imported(memfd)
    pointer = int(ok(map_buffer(memory, 0, 4096)))
    simulator.forget_log()
    ok(signal(semaphore, stream, 7))
    ok(wait(semaphore, stream, 7))
    ok(cuda.cuMemsetD8Async(pointer, 3, 4096, stream))
    assert idle(stream)
    assert [(e.operation, e.device, e.stream, e.value, e.address, e.size) for e in simulator.log()] == [
        ("signal", 0, int(stream), 7, int(semaphore), 0),
        ("wait", 0, int(stream), 7, int(semaphore), 0),
        ("memset", 0, int(stream), 3, pointer, 4096),
    ]
    ok(cuda.cuMemFree(pointer))
    ok(cuda.cuDestroyExternalMemory(memory))
    ok(cuda.cuDestroyExternalSemaphore(semaphore))
    theirs.close()


# -- entry points ------------------------------------------------------------------------------------------------------


def address(name: str, version: int) -> int:
    flags = cuda.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    code, pointer, _ = cuda.cuGetProcAddress(name.encode(), version, flags)
    return 0 if int(code) else int(pointer or 0)


def test_entry_points_are_found_by_name_and_version() -> None:
    older, newer = address("cuCtxCreate", 11040), address("cuCtxCreate", 13000)
    assert older
    assert newer
    assert older != newer
    assert address("cuCtxCreate", 12000) == older
    assert address("cuCtxCreate", 3000) == 0
    assert address("cuStreamGetCtx", 12000) != address("cuStreamGetCtx", 12050)
    assert address("cuNoSuchThing", 13000) == 0


def test_a_function_that_is_missing_raises() -> None:
    with pytest.raises(RuntimeError, match=r"cuMemAllocPitch.* (not|is not) found"):
        cuda.cuMemAllocPitch(16, 16, 4)


def test_what_nothing_else_asks(context: Any, memfd: Exporter) -> None:
    """The rest of the entry points, through the bindings: the versions' arguments are the right ones."""
    device = ok(cuda.cuDeviceGet(0))
    assert ok(cuda.cuDriverGetVersion()) == 13010
    assert ok(cuda.cuDeviceGetName(64, device)).partition(b"\0")[0] == b"Simulated GPU 0"
    assert ok(cuda.cuDeviceGetPCIBusId(32, device)).partition(b"\0")[0] == b"0000:51:00.0"
    assert code_of(cuda.cuDeviceGetLuid(device)) == NOT_SUPPORTED
    total = ok(cuda.cuDeviceTotalMem(device))
    assert code_of(cuda.cuMemAlloc(2 * total)) == 2
    assert cuda.cuDevicePrimaryCtxGetState(device)[2] == 1
    assert int(ok(cuda.cuCtxGetDevice())) == 0
    with stream_of() as stream, pinned() as host:
        _, free, _ = cuda.cuMemGetInfo()
        pointer = ok(cuda.cuMemAlloc(4096))
        assert cuda.cuMemGetInfo()[1] == free - 4096
        assert int(ok(cuda.cuMemHostGetDevicePointer(host, 0))) == host
        ok(cuda.cuMemsetD32(pointer, 0x01020304, 1024))
        ok(cuda.cuMemcpy(cuda.CUdeviceptr(host), pointer, 4096))
        assert ctypes.string_at(host, 8) == bytes([4, 3, 2, 1]) * 2
        ok(cuda.cuMemcpyHtoD(pointer, b"\x77" * 4096, 4096))
        ok(cuda.cuMemcpyDtoH(host, pointer, 4096))
        assert ctypes.string_at(host, 4096) == b"\x77" * 4096
        ok(cuda.cuStreamWriteValue32(stream, host, 5, 0))
        ok(cuda.cuStreamWaitValue32(stream, host, 5, 1))
        ok(cuda.cuStreamSynchronize(stream))
        attributes = cuda.CUpointer_attribute
        asked = [attributes.CU_POINTER_ATTRIBUTE_RANGE_SIZE, attributes.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL]
        assert [int(one) for one in ok(cuda.cuPointerGetAttributes(2, asked, pointer))] == [4096, 0]
        ok(cuda.cuMemFree(pointer))
        ok(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        ok(cuda.cuStreamWriteValue64(stream, host, 9, 0))
        info = cuda.cuStreamGetCaptureInfo(stream)
        assert (int(info[0]), int(info[1])) == (0, 1)
        graph = ok(cuda.cuStreamEndCapture(stream))
        executable = ok(cuda.cuGraphInstantiateWithParams(graph, cuda.CUDA_GRAPH_INSTANTIATE_PARAMS()))
        ok(cuda.cuGraphLaunch(executable, stream))
        assert idle(stream)
        assert word(host).value == 9
        ok(cuda.cuGraphExecDestroy(executable))
        ok(cuda.cuGraphDestroy(graph))
    ok(cuda.cuGraphDestroy(ok(cuda.cuGraphCreate(0))))
    handle = ok(cuda.cuMemCreate(2 * MIB, properties(), 0))
    assert int(ok(cuda.cuMemGetAllocationPropertiesFromHandle(handle)).location.id) == 0
    with mapped(handle, 2 * MIB) as pointer:
        again = ok(cuda.cuMemRetainAllocationHandle(int(pointer)))
        assert int(again) == int(handle)
        assert int(ok(cuda.cuMemGetAccess(properties().location, pointer))) == 3
        ok(cuda.cuMemRelease(again))
    ok(cuda.cuMemRelease(handle))


OWN_STREAM = """
from cuda.bindings import driver as cuda
cuda.cuInit(0)
cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])
numbers = [int(cuda.cuStreamGetId(cuda.CUstream(number))[1]) for number in (0, 1, 2)]
print(numbers.index(numbers[0], 1))
"""


@pytest.mark.parametrize(("per_thread", "which"), [("", "1\n"), ("1", "2\n")])
def test_the_stream_0_may_be_the_threads_own(simulator: Simulator, per_thread: str, which: str) -> None:
    # Unset is said by nothing at all: 12.9.0 takes "0" for yes.
    environment = {"CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM": per_thread} if per_thread else {}
    assert child(simulator, OWN_STREAM, **environment) == which


def test_a_process_that_has_a_driver_is_refused(simulator: Simulator) -> None:
    program = f"""
    import ctypes, sys, pytest
    ctypes.CDLL({str(simulator.path)!r})
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/cuda_backend/test_facts.py"]))
    """
    with pytest.raises(AssertionError, match="has a CUDA driver already"):
        child(simulator, program)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_the_nth_call_fails(simulator: Simulator) -> None:
    simulator.fail("cuCtxGetDevice", nth=3, code=UNKNOWN)
    assert [code_of(cuda.cuCtxGetDevice()) for _ in range(5)] == [0, 0, UNKNOWN, 0, 0]
    simulator.fail("cuCtxGetDevice", every=2, code=2)
    assert [code_of(cuda.cuCtxGetDevice()) for _ in range(6)] == [0, 2, 0, 2, 0, 2]
    simulator.fail("cuEventCreate", code=2)
    assert simulator.clear_faults() == 1, "one has not struck"
    assert code_of(cuda.cuCtxGetDevice()) == 0


@pytest.mark.parametrize("fate", ["open", "closed"])
def test_a_failed_import_closes_or_keeps(simulator: Simulator, fate: Any) -> None:
    with foreign_fd("memfd") as fd:
        simulator.fail("cuImportExternalMemory", code=2, fd=fate)
        assert code_of(import_memory(fd, 4096)) == 2
        assert is_open(fd) == (fate == "open")


def test_an_operation_fails_and_the_stream_with_it(simulator: Simulator, stream: Any) -> None:
    device = ok(cuda.cuMemAlloc(4096))
    event = ok(cuda.cuEventCreate(2))
    with pinned() as host:
        simulator.fail_operation(stream, nth=2, code=ILLEGAL_ADDRESS)
        results = [code_of(cuda.cuStreamWriteValue64(stream, host + 8 * i, 1, 0)) for i in range(3)]
        assert results[:2] == [0, 0]
        assert code_of(cuda.cuStreamSynchronize(stream)) == ILLEGAL_ADDRESS
        assert code_of(cuda.cuStreamQuery(stream)) == ILLEGAL_ADDRESS
        assert code_of(cuda.cuEventRecord(event, stream)) == ILLEGAL_ADDRESS
        assert [word(host + 8 * i).value for i in range(3)] == [1, 0, 0]
        with stream_of() as other:
            ok(cuda.cuMemsetD8Async(device, 1, 4096, other))
            assert idle(other)
    ok(cuda.cuEventDestroy(event))
    ok(cuda.cuMemFree(device))


@needs_threads
def test_a_delay_comes_before_the_arguments_are_read(simulator: Simulator, memfd: Exporter, stream: Any) -> None:
    theirs, semaphore = timeline(memfd)
    params = cuda.CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS()
    pointer = ctypes.c_uint64.from_address(int(params.getPtr()))
    pointer.value = 1
    simulator.delay("cuSignalExternalSemaphoresAsync", microseconds=200_000)
    desc = [semaphore]
    calls = simulator.calls("cuSignalExternalSemaphoresAsync")
    native = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p)(
        address("cuSignalExternalSemaphoresAsync", 13000)
    )
    handles = (ctypes.c_uint64 * 1)(*(int(one) for one in desc))
    thread = threading.Thread(target=lambda: native(handles, int(params.getPtr()), 1, int(stream)))
    thread.start()
    while simulator.calls("cuSignalExternalSemaphoresAsync") == calls:
        time.sleep(0.001)
    pointer.value = 9  # as another thread would that shares the struct
    thread.join(LIMIT)
    assert idle(stream)
    assert [entry.value for entry in simulator.log() if entry.operation == "signal"] == [9]
    ok(cuda.cuDestroyExternalSemaphore(semaphore))
    theirs.close()


# -- violations --------------------------------------------------------------------------------------------------------


def test_external_memory_is_destroyed_under_a_mapping(simulator: Simulator, memfd: Exporter) -> None:
    memory = imported(memfd)
    pointer = ok(map_buffer(memory, 0, 4096))
    with simulator.expect_violation("still has 1 mappings"):
        ok(cuda.cuDestroyExternalMemory(memory))
    with simulator.expect_violation("external memory was destroyed"):
        ok(cuda.cuMemsetD8(pointer, 1, 16))
        ok(cuda.cuCtxSynchronize())
    ok(cuda.cuMemFree(pointer))


@pytest.mark.parametrize("what", ["cuMemFree", "cuMemFreeHost", "cuDestroyExternalSemaphore"])
@needs_threads
def test_something_is_released_that_a_stream_still_uses(
    simulator: Simulator, memfd: Exporter, stream: Any, what: str
) -> None:
    """It is noted; and the call waits for the device, and every other call for it."""
    theirs, semaphore = timeline(memfd)
    other_theirs, other = timeline(memfd)
    device, host = ok(cuda.cuMemAlloc(4096)), int(ok(cuda.cuMemHostAlloc(4096, 0)))
    ok(wait(semaphore, stream, 1))
    ok(cuda.cuMemcpyAsync(cuda.CUdeviceptr(host), device, 4096, stream))
    ok(signal(other, stream, 1))
    releases: dict[str, Callable[[], Any]] = {
        "cuMemFree": lambda: cuda.cuMemFree(device),
        "cuMemFreeHost": lambda: cuda.cuMemFreeHost(host),
        "cuDestroyExternalSemaphore": lambda: cuda.cuDestroyExternalSemaphore(other),
    }
    done: list[str] = []

    def release() -> None:
        ok(releases[what]())
        done.append("release")

    def ask() -> None:
        ok(cuda.cuDriverGetVersion())
        done.append("call")

    with simulator.expect_violation("is still used by 1 operations"):
        threads = [threading.Thread(target=release), threading.Thread(target=ask)]
        threads[0].start()
        while not any("still used" in entry for entry in simulator.violations(take=False)):
            time.sleep(0.001)
        threads[1].start()
        time.sleep(SHORT)
        assert done == []
        theirs.signal(1)
        for thread in threads:
            thread.join(LIMIT)
        assert sorted(done) == ["call", "release"]
    for name, call in releases.items():
        if name != what:
            ok(call())
    ok(cuda.cuDestroyExternalSemaphore(semaphore))
    theirs.close()
    other_theirs.close()


def test_freed_memory(simulator: Simulator, stream: Any) -> None:
    device = ok(cuda.cuMemAlloc(4096))
    ok(cuda.cuMemFree(device))
    with simulator.expect_violation("it was freed before"):
        assert code_of(cuda.cuMemFree(device)) == INVALID_VALUE
    with simulator.expect_violation("after its memory was freed"):
        assert code_of(cuda.cuMemsetD8Async(device, 1, 16, stream)) == INVALID_VALUE


def test_handles_that_are_none(simulator: Simulator) -> None:
    stream = ok(cuda.cuStreamCreate(1))
    ok(cuda.cuStreamDestroy(stream))
    with simulator.expect_violation("is no live stream: it was destroyed"):
        assert code_of(cuda.cuStreamQuery(stream)) == INVALID_HANDLE
    with simulator.expect_violation("is no live external_memory"):
        assert code_of(cuda.cuDestroyExternalMemory(cuda.CUexternalMemory(0x1230))) == INVALID_HANDLE
    with simulator.expect_violation("is no live event"):
        assert code_of(cuda.cuEventQuery(cuda.CUevent(int(stream)))) == INVALID_HANDLE


def test_virtual_memory_without_access(simulator: Simulator) -> None:
    size = 2 * MIB
    handle = ok(cuda.cuMemCreate(size, properties(), 0))
    pointer = ok(cuda.cuMemAddressReserve(size, 0, 0, 0))
    with stream_of() as stream, simulator.expect_violation("no memory behind it"):
        assert code_of(cuda.cuMemsetD8Async(pointer, 1, 16, stream)) == INVALID_VALUE
    ok(cuda.cuMemMap(pointer, size, 0, handle, 0))
    with stream_of() as stream, simulator.expect_violation("was not given access"):
        ok(cuda.cuMemsetD8Async(pointer, 1, 16, stream))
        assert code_of(cuda.cuStreamSynchronize(stream)) == ILLEGAL_ADDRESS
    with simulator.expect_violation("still have memory mapped"):
        assert code_of(cuda.cuMemAddressFree(pointer, size)) == INVALID_VALUE
    ok(cuda.cuMemUnmap(pointer, size))
    ok(cuda.cuMemAddressFree(pointer, size))
    ok(cuda.cuMemRelease(handle))


def test_reserved_words(simulator: Simulator, memfd: Exporter) -> None:
    with memfd.create_memory(4096) as theirs:
        desc = memory_desc(detached(theirs.export()), 4096)
        ctypes.c_uint32.from_address(int(desc.getPtr()) + 100).value = 1  # the last of them
        ctypes.c_uint32.from_address(int(desc.getPtr()) + 36).value = 2
        with simulator.expect_violation("reserved words"):
            memory = ok(cuda.cuImportExternalMemory(desc))
    found = simulator.descriptors("cuImportExternalMemory")[-1]
    assert found.reserved[0] == 2
    ok(cuda.cuDestroyExternalMemory(memory))


def test_a_context_is_destroyed_with_work_pending(simulator: Simulator, context: Any) -> None:
    with pinned() as host:
        second = ok(cuda.cuDevicePrimaryCtxRetain(0))
        assert int(second) == int(context)
        ok(cuda.cuDevicePrimaryCtxRelease(0))
        create: Any = cuda.cuCtxCreate
        made = create(None, 0, 0) if "ctxCreateParams" in (create.__doc__ or "").split("\n", 1)[0] else create(0, 0)
        ok(made)
        stream = ok(cuda.cuStreamCreate(1))
        ok(cuda.cuStreamWaitValue64(stream, host, 1, 0))
        with simulator.expect_violation("work pending"):
            ok(cuda.cuCtxDestroy(made[1]))
        word(host).value = 1
        assert simulator.settle(0, LIMIT)


def test_a_graph_outlives_what_it_uses(simulator: Simulator, memfd: Exporter, stream: Any) -> None:
    theirs, semaphore = timeline(memfd)
    ok(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    ok(signal(semaphore, stream, 1))
    graph = ok(cuda.cuStreamEndCapture(stream))
    executable = ok(cuda.cuGraphInstantiate(graph, 0))
    ok(cuda.cuDestroyExternalSemaphore(semaphore))
    with simulator.expect_violation("external_semaphore"):
        ok(cuda.cuGraphLaunch(executable, stream))
    assert idle(stream)
    ok(cuda.cuGraphExecDestroy(executable))
    ok(cuda.cuGraphDestroy(graph))
    theirs.close()


# -- two GPUs ----------------------------------------------------------------------------------------------------------

PEERS = """
from cuda.bindings import driver as cuda
from tests.simulated.driver import Simulator

def ok(result):
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None

simulator = Simulator.attach()
ok(cuda.cuInit(0))
assert ok(cuda.cuDeviceGetCount()) == 2
first, second = (ok(cuda.cuDevicePrimaryCtxRetain(i)) for i in (0, 1))
assert ok(cuda.cuDeviceGetUuid(0)).bytes != ok(cuda.cuDeviceGetUuid(1)).bytes
ok(cuda.cuCtxSetCurrent(second))
theirs = ok(cuda.cuMemAlloc(4096))
ok(cuda.cuCtxSetCurrent(first))
mine, stream = ok(cuda.cuMemAlloc(4096)), ok(cuda.cuStreamCreate(1))
ok(cuda.cuMemcpyAsync(theirs, mine, 4096, stream))
assert simulator.violations() == [], "a copy between the two is the driver's business"
ok(cuda.cuMemsetD8Async(theirs, 1, 4096, stream))
(found,) = simulator.violations()
assert "memory of device 1, used on a stream of device 0 without peer access" in found, found
ok(cuda.cuCtxEnablePeerAccess(second, 0))
ok(cuda.cuMemsetD8Async(theirs, 1, 4096, stream))
ok(cuda.cuStreamSynchronize(stream))
assert simulator.violations() == []
assert {(entry.device, entry.stream) for entry in simulator.log()} == {(0, int(stream))}
print("ok")
"""


def test_memory_of_the_other_gpu(simulator: Simulator) -> None:
    assert child(simulator, PEERS, GPUINTEROP_SIM_DEVICES="2") == "ok\n"


def test_the_facts_about_two_gpus(simulator: Simulator) -> None:
    arguments = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/cuda_backend/test_facts.py",
        "-k",
        "another_gpu",
    )
    assert "1 passed" in child(simulator, "", *arguments, GPUINTEROP_SIM_DEVICES="2")


# -- personalities -----------------------------------------------------------------------------------------------------


def test_attributes_can_be_set(simulator: Simulator) -> None:
    number: Any = Number(114)
    assert ok(cuda.cuDeviceGetAttribute(number, 0)) == 1
    simulator.set_attribute(0, 114, 0)
    assert ok(cuda.cuDeviceGetAttribute(number, 0)) == 0
    simulator.reset()
    assert ok(cuda.cuDeviceGetAttribute(number, 0)) == 1


def test_a_mig_instance_has_a_uuid_of_its_own(simulator: Simulator) -> None:
    def uuid(version: int) -> bytes:
        room = ctypes.create_string_buffer(16)
        native = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(address("cuDeviceGetUuid", version))
        assert native(room, 0) == 0
        return room.raw

    assert uuid(10000) == uuid(13000)
    simulator.set_mig(True)
    assert uuid(10000) != uuid(13000)


def test_windows_takes_what_linux_does_not(simulator: Simulator) -> None:
    assert code_of(import_memory(-1, 4096, kind=5, flags=1)) == NOT_SUPPORTED
    simulator.set_platform("windows")
    for kind in range(2, 9):
        memory = ok(import_memory(-1, 4096, kind=kind, flags=1))
        ok(cuda.cuMemFree(ok(map_buffer(memory, 0, 4096))))
        ok(cuda.cuDestroyExternalMemory(memory))
        code, memory = import_memory(-1, 4096, kind=kind)
        assert int(code) == (INVALID_VALUE if kind in (5, 6, 7) else 0), "those are always dedicated"
        if not int(code):
            ok(cuda.cuDestroyExternalMemory(memory))


# -- processes and threads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["memfd", "vulkan"])
def test_the_other_side_in_another_process(stream: Any, inner: str) -> None:
    options: dict[str, Any] = {"driver": "swiftshader"} if inner == "vulkan" else {}
    with open_exporter(inner, process=True, **options) as exporter:
        forth, back = exporter.create_semaphore(gi.Binary), exporter.create_semaphore(gi.Binary)
        theirs = exporter.create_memory(1 << 16)
        memory = ok(import_memory(detached(theirs.export()), theirs.size, flags=1 if theirs.dedicated else 0))
        pointer = ok(map_buffer(memory, 0, 1 << 16))
        mine = [ok(import_semaphore(detached(one.export()), 1)) for one in (forth, back)]
        for turn in range(1, 6):
            ok(wait(mine[0], stream))
            ok(cuda.cuMemsetD8Async(pointer, turn, 1 << 16, stream))
            ok(signal(mine[1], stream))
            forth.signal()
            assert back.wait(timeout=LIMIT)
            assert theirs.read(0, 1 << 16) == bytes([turn]) * (1 << 16)
        assert idle(stream)
        ok(cuda.cuMemFree(pointer))
        ok(cuda.cuDestroyExternalMemory(memory))
        for one in mine:
            ok(cuda.cuDestroyExternalSemaphore(one))
        for closing in (forth, back, theirs):
            closing.close()


IMPORTS = """
import sys
from cuda.bindings import driver as cuda
from tests.cuda_backend.test_facts import FD_TYPE, mapped, ok
ok(cuda.cuInit(0))
ok(cuda.cuCtxSetCurrent(ok(cuda.cuDevicePrimaryCtxRetain(0))))
handle = ok(cuda.cuMemImportFromShareableHandle(int(sys.stdin.readline()), FD_TYPE))
with mapped(handle, 2 << 20) as pointer:
    ok(cuda.cuMemsetD8(pointer, 0x5A, 4096))
    ok(cuda.cuCtxSynchronize())
ok(cuda.cuMemRelease(handle))
"""


def test_an_allocation_in_two_processes(simulator: Simulator) -> None:
    handle = ok(cuda.cuMemCreate(2 * MIB, properties(), 0))
    fd = int(ok(cuda.cuMemExportToShareableHandle(handle, FD_TYPE, 0)))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IMPORTS)],
        input=f"{fd}\n",
        pass_fds=(fd,),
        env=simulator.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    os.close(fd)
    with mapped(handle, 2 * MIB) as pointer, pinned() as host, stream_of() as stream:
        ok(cuda.cuMemcpyAsync(cuda.CUdeviceptr(host), pointer, 4096, stream))
        assert idle(stream)
        assert ctypes.string_at(host, 4096) == b"\x5a" * 4096
    ok(cuda.cuMemRelease(handle))


STUCK = """
from cuda.bindings import driver as cuda
cuda.cuInit(0)
cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])
stream, host = cuda.cuStreamCreate(1)[1], cuda.cuMemHostAlloc(4096, 0)[1]
assert int(cuda.cuStreamWaitValue64(stream, host, 1, 1)[0]) == 0
print("ok")
"""


def test_a_stream_that_waits_keeps_no_process(simulator: Simulator) -> None:
    began = time.monotonic()
    assert child(simulator, STUCK) == "ok\n"
    assert time.monotonic() - began < LIMIT


def test_waits_are_given_up(simulator: Simulator, memfd: Exporter, stream: Any) -> None:
    theirs, semaphore = timeline(memfd)
    ok(wait(semaphore, stream, 99))
    assert not idle(stream, SHORT)
    assert not simulator.settle(0, SHORT)
    simulator.cancel_waits()
    assert idle(stream)
    ok(cuda.cuDestroyExternalSemaphore(semaphore))
    theirs.close()


def test_many_threads(memfd: Exporter) -> None:
    """Streams, events, imports, copies and graphs in eight threads; what each does is right, and nothing is left."""
    problems: list[BaseException] = []
    context = ok(cuda.cuCtxGetCurrent())

    def work(index: int) -> None:
        try:
            ok(cuda.cuCtxSetCurrent(context))
            theirs, semaphore = timeline(memfd)
            memory = imported(memfd)
            device = int(ok(map_buffer(memory, 0, 4096)))
            with stream_of(index % 2) as first, stream_of(1) as second, pinned() as host:
                event = ok(cuda.cuEventCreate(2))
                for turn in range(1, 30):
                    ok(cuda.cuMemsetD8Async(device, turn, 4096, first))
                    ok(cuda.cuEventRecord(event, first))
                    ok(cuda.cuStreamWaitEvent(second, event, 0))
                    ok(cuda.cuMemcpyAsync(cuda.CUdeviceptr(host), cuda.CUdeviceptr(device), 4096, second))
                    ok(signal(semaphore, second, turn))
                    ok(wait(semaphore, first, turn))
                    assert idle(first)
                    assert ctypes.string_at(host, 4096) == bytes([turn]) * 4096
                    assert idle(second)
                ok(cuda.cuEventDestroy(event))
            ok(cuda.cuMemFree(device))
            ok(cuda.cuDestroyExternalMemory(memory))
            ok(cuda.cuDestroyExternalSemaphore(semaphore))
            theirs.close()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
