"""What the simulated driver notes and refuses where no suite provokes it: else the tests that stand on it prove little.

What it shares with the real one is in test_facts.py. What works, the suites use; and they end where it notes anything.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from cuda.bindings import driver as cuda

import gpuinterop as gi
from gpuinterop.exporters import open_exporter
from gpuinterop.testing.simulated import assert_simulated
from tests.programs import python
from tests.simulated.driver import Simulator

from .test_facts import (
    FD_TYPE,
    INVALID_VALUE,
    LIMIT,
    MIB,
    NOT_SUPPORTED,
    SHORT,
    code_of,
    detached,
    import_memory,
    import_semaphore,
    map_buffer,
    ok,
    properties,
    signal as signalled,
    stream_of,
    wait,
)

MINIMUM, SIZE = 2 * MIB, 4 * MIB
GPU = gi.DeviceIdentity(name="a GPU's driver")
INVALID_DEVICE, INVALID_HANDLE, ILLEGAL_ADDRESS = 101, 400, 700


@pytest.fixture(autouse=True)
def _contexts(simulator: Simulator) -> Iterator[None]:
    """Of devices 1 and, current, 0."""
    assert_simulated()
    ok(cuda.cuInit(0))
    for device in (1, 0):
        ok(cuda.cuCtxPushCurrent(ok(cuda.cuDevicePrimaryCtxRetain(device))))
    yield
    for device in (0, 1):
        ok(cuda.cuCtxPopCurrent())
        ok(cuda.cuDevicePrimaryCtxRelease(device))


@contextmanager
def on(device: int) -> Iterator[Any]:
    """A stream of the device, whose context is current."""
    ok(cuda.cuCtxPushCurrent(ok(cuda.cuDevicePrimaryCtxRetain(device))))
    with stream_of() as stream:
        yield stream
    ok(cuda.cuCtxPopCurrent())
    ok(cuda.cuDevicePrimaryCtxRelease(device))


def fails(simulator: Simulator, enqueue: Callable[[Any], tuple[Any, ...]], text: str, device: int = 0) -> None:
    """What is enqueued is noted, and its stream fails."""
    with on(device) as stream, simulator.expect_violation(text):
        ok(enqueue(stream))
        assert code_of(cuda.cuStreamSynchronize(stream)) == ILLEGAL_ADDRESS
        event = ok(cuda.cuEventCreate(2))
        assert code_of(cuda.cuEventRecord(event, stream)) == ILLEGAL_ADDRESS
        ok(cuda.cuEventDestroy(event))


# -- objects and addresses ---------------------------------------------------------------------------------------------


def test_handles_that_are_none(simulator: Simulator) -> None:
    with stream_of() as stream:
        pass
    with simulator.expect_violation("is no live stream: it was destroyed"):
        assert code_of(cuda.cuStreamQuery(stream)) == INVALID_HANDLE
    with simulator.expect_violation("is no live event"):
        assert code_of(cuda.cuEventQuery(cuda.CUevent(int(stream)))) == INVALID_HANDLE


def test_memory_that_was_freed(simulator: Simulator) -> None:
    device = ok(cuda.cuMemAlloc(4096))
    ok(cuda.cuMemFree(device))
    with simulator.expect_violation("it was freed before"):
        assert code_of(cuda.cuMemFree(device)) == INVALID_VALUE
    with stream_of() as stream, simulator.expect_violation("after its memory was freed"):
        assert code_of(cuda.cuMemsetD8Async(device, 1, 16, stream)) == INVALID_VALUE


def test_external_memory_under_its_mapping(simulator: Simulator) -> None:
    with open_exporter("memfd", identity=GPU) as exporter, exporter.create_memory(1 << 16) as theirs:
        memory = ok(import_memory(detached(theirs.export()), theirs.size))
    pointer = ok(map_buffer(memory, 0, 4096))
    with simulator.expect_violation("still has 1 mappings"):
        ok(cuda.cuDestroyExternalMemory(memory))
    with stream_of() as stream, simulator.expect_violation("external memory was destroyed"):
        ok(cuda.cuMemsetD8Async(pointer, 1, 16, stream))
        ok(cuda.cuStreamSynchronize(stream))
    ok(cuda.cuMemFree(pointer))


@pytest.mark.parametrize("what", ["cuMemFree", "cuDestroyExternalSemaphore"])
def test_what_a_stream_still_uses_is_released(simulator: Simulator, what: str) -> None:
    """It is noted; and the call waits for the device, and every other call for it."""
    with (
        open_exporter("memfd", identity=GPU) as exporter,
        exporter.create_semaphore(gi.Timeline) as theirs,
        stream_of() as stream,
    ):
        semaphore, device = ok(import_semaphore(detached(theirs.export()), 9)), ok(cuda.cuMemAlloc(4096))
        ok(wait(semaphore, stream, 1))
        ok(cuda.cuMemsetD8Async(device, 1, 4096, stream))
        releases: dict[str, Callable[[], Any]] = {
            "cuMemFree": lambda: cuda.cuMemFree(device),
            "cuDestroyExternalSemaphore": lambda: cuda.cuDestroyExternalSemaphore(semaphore),
        }
        done: list[str] = []
        calls = (lambda: done.append(str(releases.pop(what)())), lambda: done.append(str(cuda.cuDriverGetVersion())))
        with simulator.expect_violation("is still used by 1 operations"):
            threads = [threading.Thread(target=call) for call in calls]
            threads[0].start()
            while not simulator.violations(take=False):
                assert threads[0].is_alive()
            threads[1].start()
            threads[1].join(SHORT)
            assert done == []
            theirs.signal(1)
            for thread in threads:
                thread.join(LIMIT)
            assert len(done) == 2
        for release in releases.values():
            ok(release())


def test_a_graph_outlives_what_it_uses(simulator: Simulator) -> None:
    with (
        open_exporter("memfd", identity=GPU) as exporter,
        exporter.create_semaphore(gi.Timeline) as theirs,
        stream_of() as stream,
    ):
        semaphore = ok(import_semaphore(detached(theirs.export()), 9))
        ok(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        ok(signalled(semaphore, stream, 1))
        graph = ok(cuda.cuStreamEndCapture(stream))
        executable = ok(cuda.cuGraphInstantiate(graph, 0))
        ok(cuda.cuDestroyExternalSemaphore(semaphore))
        with simulator.expect_violation("external_semaphore"):
            ok(cuda.cuGraphLaunch(executable, stream))
        ok(cuda.cuStreamSynchronize(stream))
        ok(cuda.cuGraphExecDestroy(executable))
        ok(cuda.cuGraphDestroy(graph))


def test_memory_of_the_other_gpu(simulator: Simulator) -> None:
    with on(1):
        theirs = ok(cuda.cuMemAlloc(4096))
        with on(0) as stream:
            mine = ok(cuda.cuMemAlloc(4096))
            ok(cuda.cuMemcpyAsync(theirs, mine, 4096, stream))
            assert simulator.violations() == [], "a copy between the two is the driver's business"
            with simulator.expect_violation("memory of device 1, used on a stream of device 0 without peer access"):
                ok(cuda.cuMemsetD8Async(theirs, 1, 4096, stream))
            ok(cuda.cuStreamSynchronize(stream))
            ok(cuda.cuMemFree(mine))
        ok(cuda.cuMemFree(theirs))


PENDING = """
from tests.vendors.cuda.test_simulator import *
ok(cuda.cuInit(0))
with on(1):  # of whose context the word is
    word = int(ok(cuda.cuMemHostAlloc(4096, 0)))
    ctypes.memset(word, 0, 4096)
    ok(cuda.cuCtxPushCurrent(ok(cuda.cuDevicePrimaryCtxRetain(0))))
    ok(cuda.cuStreamWaitValue64(ok(cuda.cuStreamCreate(1)), word, 1, 0))
    ok(cuda.cuDevicePrimaryCtxRelease(0))
    (found,) = Simulator.attach().violations()
    assert "work pending" in found, found
    ctypes.c_uint64.from_address(word).value = 1
    assert Simulator.attach().settle(0, LIMIT)
print("ok")
"""


def test_a_context_goes_with_work_pending(simulator: Simulator) -> None:
    assert simulator.run(PENDING) == "ok\n"


# -- virtual memory and multicast --------------------------------------------------------------------------------------


def access(pointer: int, size: int, devices: Sequence[int]) -> int:
    entries = []
    for device in devices:
        entry = cuda.CUmemAccessDesc()
        entry.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        entry.location.id = device
        entry.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        entries.append(entry)
    return code_of(cuda.cuMemSetAccess(pointer, size, entries, len(entries)))


@contextmanager
def mapped(handle: Any, devices: Sequence[int], size: int = SIZE) -> Iterator[int]:
    pointer = int(ok(cuda.cuMemAddressReserve(size, 0, 0, 0)))
    ok(cuda.cuMemMap(pointer, size, 0, handle, 0))
    assert not devices or access(pointer, size, devices) == 0
    yield pointer
    ok(cuda.cuMemUnmap(pointer, size))
    ok(cuda.cuMemAddressFree(pointer, size))


def memory(device: int = 0) -> Any:
    return ok(cuda.cuMemCreate(SIZE, properties(device), 0))


def team(devices: int) -> Any:
    """A multicast object with no device yet."""
    prop = cuda.CUmulticastObjectProp()
    prop.numDevices, prop.size, prop.handleTypes, prop.flags = devices, SIZE, 1, 0
    return ok(cuda.cuMulticastCreate(prop))


def bind(group: Any, handle: Any, size: int = SIZE, *, offset: int = 0) -> int:
    return code_of(cuda.cuMulticastBindMem(group, offset, handle, 0, size, 0))


@contextmanager
def bound(devices: int = 1, sizes: Sequence[int] = (SIZE, SIZE)) -> Iterator[tuple[Any, list[Any]]]:
    """A team and the memory of each, which is bound so far."""
    group, memories = team(devices), [memory(device) for device in range(devices)]
    for device in range(devices):
        ok(cuda.cuMulticastAddDevice(group, device))
    for handle, size in zip(memories, sizes, strict=False):
        assert bind(group, handle, size) == 0
    yield group, memories
    for device, size in zip(range(devices), sizes, strict=False):
        ok(cuda.cuMulticastUnbind(group, device, 0, size))
    for handle in (group, *memories):
        ok(cuda.cuMemRelease(handle))


def words(pointer: int, count: int) -> list[int]:
    """What the CPU sees there: device memory of the simulated driver is memory."""
    return list((ctypes.c_uint32 * count).from_address(pointer))


def test_virtual_memory_without_access(simulator: Simulator) -> None:
    pointer = ok(cuda.cuMemAddressReserve(SIZE, 0, 0, 0))
    with stream_of() as stream, simulator.expect_violation("no memory behind it"):
        assert code_of(cuda.cuMemsetD8Async(pointer, 1, 16, stream)) == INVALID_VALUE
    ok(cuda.cuMemAddressFree(pointer, SIZE))
    with simulator.expect_violation("was freed before"):
        assert code_of(cuda.cuMemAddressFree(pointer, SIZE)) == INVALID_VALUE
    with simulator.expect_violation("is not mapped so"):
        assert code_of(cuda.cuMemUnmap(pointer, SIZE)) == INVALID_VALUE
    handle = memory()
    with mapped(handle, []) as pointer:
        fails(simulator, lambda stream: cuda.cuMemsetD8Async(pointer, 1, 16, stream), "was not given access")
        with simulator.expect_violation("still have memory mapped"):
            assert code_of(cuda.cuMemAddressFree(pointer, SIZE)) == INVALID_VALUE
    ok(cuda.cuMemRelease(handle))


def test_access_without_peer_access(simulator: Simulator) -> None:
    simulator.set_peer_access(1, 0, False)
    handle = memory()
    with mapped(handle, []) as pointer:
        assert access(pointer, SIZE, [0, 1]) == NOT_SUPPORTED
        simulator.set_peer_access(1, 0, True)
        assert access(pointer, SIZE, [0, 1]) == 0
    ok(cuda.cuMemRelease(handle))


def test_only_multimem_touches_a_multicast_mapping(simulator: Simulator) -> None:
    with bound() as (group, (handle,)), mapped(group, [0]) as everywhere, mapped(handle, [0]) as own:
        attempts: tuple[Callable[[Any], tuple[Any, ...]], ...] = (
            lambda stream: cuda.cuMemsetD8Async(everywhere, 1, 16, stream),
            lambda stream: cuda.cuMemcpyAsync(cuda.CUdeviceptr(own), cuda.CUdeviceptr(everywhere), 16, stream),
        )
        for attempt in attempts:
            fails(simulator, attempt, "only multimem instructions")
        assert words(own, 4) == [0] * 4


PLAIN_STORE = """
from tests.vendors.cuda.test_simulator import *
ok(cuda.cuInit(0))
with bound() as (group, (handle,)), mapped(group, [0]) as everywhere, mapped(handle, [0]) as own:
    ctypes.c_uint32.from_address(own).value = 1
    print("its own", flush=True)
    ctypes.c_uint32.from_address(everywhere).value = 1
    print("and all")
"""


def test_a_plain_store_is_stopped(simulator: Simulator) -> None:
    done = python("-c", PLAIN_STORE, env=simulator.environment())
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "its own\n"), done.stderr


PTX = b"""
.version 8.1
.target sm_90
.address_size 64
.visible .entry gpuinterop_multimem_store(.param .u64 address, .param .u32 value, .param .u32 count) { ret; }
.visible .entry gpuinterop_multimem_add(.param .u64 target, .param .u64 address, .param .u32 count) { ret; }
"""


def store(stream: Any, address: int) -> tuple[int]:
    """Two words, by the kernel; returns behind it."""
    module = ok(cuda.cuModuleLoadData(PTX))
    function = ok(cuda.cuModuleGetFunction(module, b"gpuinterop_multimem_store"))
    arguments = (address, 1, 2), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
    code = code_of(cuda.cuLaunchKernel(function, 1, 1, 1, 256, 1, 1, 0, stream, arguments, 0))
    cuda.cuStreamSynchronize(stream)
    ok(cuda.cuModuleUnload(module))
    return (code,)


def test_kernels_want_a_multicast_address_and_access(simulator: Simulator) -> None:
    with bound(2) as (group, handles), mapped(group, [0]) as everywhere, mapped(handles[0], [0]) as own:
        for pointer in (own, everywhere + SIZE - 4, everywhere + 2):
            fails(simulator, partial(store, address=pointer), "is no multicast address")
        fails(simulator, partial(store, address=everywhere), "device 1 was not given access", device=1)
        assert words(own, 2) == [0, 0]
        assert access(everywhere, SIZE, [1]) == 0
        with on(1) as stream:
            ok(store(stream, everywhere))
        assert words(own, 3) == [1, 1, 0]


def test_what_is_not_bound_everywhere(simulator: Simulator) -> None:
    with bound(2, (SIZE, MINIMUM)) as (group, _), mapped(group, [0, 1]) as everywhere:
        simulator.multimem_store(everywhere + MINIMUM - 4, [1])
        with simulator.expect_violation("device 1 has no memory bound to all"), pytest.raises(ValueError, match="700"):
            simulator.multimem_store(everywhere + MINIMUM - 4, [1, 1])


def test_an_unbind_equals_its_bind(simulator: Simulator) -> None:
    with bound() as (group, (handle,)):
        assert bind(group, handle, MINIMUM, offset=MINIMUM) == INVALID_VALUE, "there is something"
        assert code_of(cuda.cuMulticastUnbind(group, 1, 0, SIZE)) == INVALID_DEVICE
        for offset, size in ((0, MINIMUM), (MINIMUM, MINIMUM)):
            with simulator.expect_violation("nothing of device 0 was bound"):
                assert code_of(cuda.cuMulticastUnbind(group, 0, offset, size)) == INVALID_VALUE


def test_what_is_released_in_the_wrong_order(simulator: Simulator) -> None:
    group, handle = team(1), memory()
    ok(cuda.cuMulticastAddDevice(group, 0))
    assert bind(group, handle) == 0
    with simulator.expect_violation("is released while it is bound"):
        ok(cuda.cuMemRelease(handle))
    with simulator.expect_violation("is released while memory of device 0 is bound"):
        ok(cuda.cuMemRelease(group))


def test_memory_that_goes_under_a_blocked_bind(simulator: Simulator) -> None:
    group, handle = team(1), memory()
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(bind(group, handle)))
    thread.start()
    assert simulator.held("cuMulticastBindMem", LIMIT)
    ok(cuda.cuMemRelease(handle))
    with simulator.expect_violation("while it was being bound"):
        ok(cuda.cuMulticastAddDevice(group, 0))
        thread.join(LIMIT)
        assert codes == [INVALID_VALUE]
    ok(cuda.cuMemRelease(group))


FOR_EVER = """
from tests.vendors.cuda.test_simulator import *
ok(cuda.cuInit(0))
group, handle = team(2), memory()
ok(cuda.cuMulticastAddDevice(group, 0))
assert bind(group, handle) == 999
(found,) = Simulator.attach().violations()
assert "1 of 2 devices were added" in found and "block for ever" in found, found
print("ok")
"""


def test_nothing_waits_for_ever(simulator: Simulator) -> None:
    assert simulator.run(FOR_EVER, GPUINTEROP_SIM_TEAM_SECONDS="0.05") == "ok\n"


MEMBER = """
from tests.vendors.cuda.test_simulator import *
ok(cuda.cuInit(0))
group, handle = ok(cuda.cuMemImportFromShareableHandle(int(sys.argv[1]), FD_TYPE)), memory(1)
ok(cuda.cuMulticastAddDevice(group, 1))
assert bind(group, handle) == 0
print("bound", flush=True)
sys.stdin.read()
"""


def test_memory_of_a_process_that_was_killed_is_gone(simulator: Simulator) -> None:
    """Also where nobody has waited for the process: its files are there for root alone, which has none."""
    group, handle = team(2), memory()
    fd = int(ok(cuda.cuMemExportToShareableHandle(group, FD_TYPE, 0)))
    ok(cuda.cuMulticastAddDevice(group, 0))
    with subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(fd)],
        env=simulator.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(fd,),
    ) as member:
        assert member.stdout
        assert member.stdout.readline() == "bound\n"
        assert bind(group, handle) == 0
        with mapped(group, [0]) as everywhere:
            simulator.multimem_store(everywhere, [3])
            assert simulator.multimem_sum(everywhere, 1) == [6]
            member.kill()
            os.waitid(os.P_PID, member.pid, os.WEXITED | os.WNOWAIT)
            simulator.multimem_store(everywhere, [7])
            assert simulator.multimem_sum(everywhere, 1) == [7]
    ok(cuda.cuMulticastUnbind(group, 0, 0, SIZE))
    os.close(fd)
    for one in (group, handle):
        ok(cuda.cuMemRelease(one))
