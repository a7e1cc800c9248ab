"""Multicast on the simulated driver, through the bindings alone: what NVIDIA documents, the blocking, other processes.

It runs on nothing else: every test here first asks whose driver this is. What was written is read through each device's
own mapping, by the CPU. The tests of a team need four devices; `test_on_four_devices` runs them in a process that has.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from tests.simulated.driver import Simulator, assert_simulated

from .test_facts import (
    FD_TYPE,
    HOLDS_GIL,
    INVALID_VALUE,
    LIMIT,
    MIB,
    NOT_SUPPORTED,
    UNKNOWN,
    Number,
    code_of,
    ok,
    properties as fd_properties,
)
from .test_simulator import address, child

MULTICAST_FULL, INVALID_DEVICE, INVALID_PTX, ILLEGAL_ADDRESS, NOT_PERMITTED = 47, 101, 218, 700, 800
MINIMUM, RECOMMENDED = 2 * MIB, 4 * MIB
TEAM = 4
FD, FABRIC = 1, 8
HAS_V2 = hasattr(cuda, "cuMulticastBindMem_v2")
needs_threads = pytest.mark.skipif(HOLDS_GIL, reason="these bindings hold the GIL in every call")


@pytest.fixture(autouse=True)
def _simulated(simulator: Simulator) -> None:
    assert_simulated()
    ok(cuda.cuInit(0))


@pytest.fixture
def four() -> None:
    if ok(cuda.cuDeviceGetCount()) < TEAM:
        pytest.skip("needs four devices: test_on_four_devices runs it in a process that has them")


def test_on_four_devices(simulator: Simulator) -> None:
    """Those of this file that say so; there nothing is left out for want of a device."""
    arguments = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", __file__, "-m", "usefixtures")
    printed = child(simulator, "", *arguments, GPUINTEROP_SIM_DEVICES=str(TEAM))
    assert "needs four devices" not in printed
    assert " passed" in printed


# -- the calls ---------------------------------------------------------------------------------------------------------


def group_properties(devices: int, size: int = RECOMMENDED, handle_types: int = FD, flags: int = 0) -> Any:
    prop = cuda.CUmulticastObjectProp()
    prop.numDevices, prop.size, prop.handleTypes, prop.flags = devices, size, handle_types, flags
    return prop


def create(devices: int, size: int = RECOMMENDED, handle_types: int = FD) -> Any:
    return ok(cuda.cuMulticastCreate(group_properties(devices, size, handle_types)))


def created(devices: Sequence[int], size: int = RECOMMENDED, handle_types: int = FD) -> Any:
    """With all its devices."""
    group = create(len(devices), size, handle_types)
    for device in devices:
        ok(cuda.cuMulticastAddDevice(group, device))
    return group


def properties(device: int, handle_types: int = FD) -> Any:
    prop = fd_properties(device)
    prop.requestedHandleTypes = Number(handle_types)
    return prop


def memory(device: int, size: int = RECOMMENDED, handle_types: int = FD) -> Any:
    return ok(cuda.cuMemCreate(size, properties(device, handle_types), 0))


def bind(
    group: Any, device: int, handle: Any, size: int = RECOMMENDED, *, offset: int = 0, start: int = 0, flags: int = 0
) -> int:
    if HAS_V2:
        return code_of(cuda.cuMulticastBindMem_v2(group, device, offset, handle, start, size, flags))
    return code_of(cuda.cuMulticastBindMem(group, offset, handle, start, size, flags))


def bind_address(
    group: Any, device: int, pointer: int, size: int = RECOMMENDED, *, offset: int = 0, flags: int = 0
) -> int:
    if HAS_V2:
        return code_of(cuda.cuMulticastBindAddr_v2(group, device, offset, pointer, size, flags))
    return code_of(cuda.cuMulticastBindAddr(group, offset, pointer, size, flags))


def unbind(group: Any, device: int, size: int = RECOMMENDED, *, offset: int = 0) -> int:
    return code_of(cuda.cuMulticastUnbind(group, device, offset, size))


def release(*handles: Any) -> None:
    for handle in handles:
        ok(cuda.cuMemRelease(handle))


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
def mapped(handle: Any, devices: Sequence[int], size: int = RECOMMENDED, offset: int = 0) -> Iterator[int]:
    pointer = int(ok(cuda.cuMemAddressReserve(size, 0, 0, 0)))
    ok(cuda.cuMemMap(pointer, size, offset, handle, 0))
    assert access(pointer, size, devices) == 0
    yield pointer
    ok(cuda.cuMemUnmap(pointer, size))
    ok(cuda.cuMemAddressFree(pointer, size))


def words(pointer: int, count: int) -> list[int]:
    """What the CPU sees there: device memory of the simulated driver is memory."""
    return list((ctypes.c_uint32 * count).from_address(pointer))


@contextmanager
def no_more_files() -> Iterator[None]:
    """Nothing can be opened: what is open goes on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def stream_on(device: int) -> Iterator[Any]:
    ok(cuda.cuCtxPushCurrent(ok(cuda.cuDevicePrimaryCtxRetain(device))))
    stream = ok(cuda.cuStreamCreate(1))
    yield stream
    ok(cuda.cuStreamDestroy(stream))
    ok(cuda.cuCtxPopCurrent())
    ok(cuda.cuDevicePrimaryCtxRelease(device))


# -- in one process ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("four")
def test_the_whole_life(simulator: Simulator) -> None:
    """Every word reaches every device's memory, where that is bound, and nothing else; and nothing is left."""
    before = simulator.live()
    group = created(range(TEAM))
    size = 2 * RECOMMENDED
    memories = [memory(device, size) for device in range(TEAM)]
    starts = [device % 2 * MINIMUM for device in range(TEAM)]
    for device in range(TEAM):
        assert bind(group, device, memories[device], start=starts[device]) == 0
    assert simulator.live()["multicast"] == before["multicast"] + 1
    assert simulator.live()["multicast_binding"] == before["multicast_binding"] + TEAM
    with ExitStack() as stack:
        everywhere = stack.enter_context(mapped(group, range(TEAM)))
        own = [stack.enter_context(mapped(memories[device], [device], size)) for device in range(TEAM)]
        simulator.multimem_store(everywhere + 4, [11, 22])
        simulator.multimem_store(everywhere + RECOMMENDED - 4, [33])
        for device in range(TEAM):
            first = own[device] + starts[device]
            assert words(first, 4) == [0, 11, 22, 0]
            assert words(first + RECOMMENDED - 4, 1) == [33]
            assert words(own[device] + MINIMUM - starts[device], 4) != [0, 11, 22, 0], "not bound"
        ctypes.c_uint32.from_address(own[3] + starts[3] + 4).value = 2**32 - 1
        assert simulator.multimem_sum(everywhere, 3) == [0, (3 * 11 - 1) % 2**32, 4 * 22]
    for device in range(TEAM):
        assert unbind(group, device) == 0
    release(group, *memories)
    assert {kind: count for kind, count in simulator.live().items() if count != before[kind]} == {}


def test_granularity() -> None:
    options = cuda.CUmulticastGranularity_flags
    found = [
        ok(cuda.cuMulticastGetGranularity(group_properties(TEAM, size), option))
        for option in (options.CU_MULTICAST_GRANULARITY_MINIMUM, options.CU_MULTICAST_GRANULARITY_RECOMMENDED)
        for size in (100, MINIMUM, MINIMUM + 1, 100 * MINIMUM)
    ]
    assert found == [MINIMUM] * 4 + [MINIMUM, MINIMUM, RECOMMENDED, RECOMMENDED]
    assert code_of(cuda.cuMulticastGetGranularity(group_properties(0), Number(0))) == INVALID_VALUE
    assert code_of(cuda.cuMulticastGetGranularity(group_properties(2, flags=1), Number(0))) == INVALID_VALUE
    assert code_of(cuda.cuMulticastGetGranularity(group_properties(2), Number(2))) == INVALID_VALUE


def test_the_granularity_of_allocations() -> None:
    found = [ok(cuda.cuMemGetAllocationGranularity(properties(0), Number(option))) for option in (0, 1)]
    assert found == [MINIMUM, RECOMMENDED]


@pytest.mark.parametrize(
    "change", [{"devices": 0}, {"size": 0}, {"size": MINIMUM + 4096}, {"handle_types": 16}, {"flags": 1}], ids=str
)
def test_objects_that_are_not_created(change: dict[str, int]) -> None:
    assert code_of(cuda.cuMulticastCreate(group_properties(**{"devices": 2, **change}))) == INVALID_VALUE


def test_handle_types_that_linux_has_not() -> None:
    assert code_of(cuda.cuMulticastCreate(group_properties(2, handle_types=2))) == NOT_SUPPORTED


@pytest.mark.usefixtures("four")
def test_devices_that_are_not_added(simulator: Simulator) -> None:
    group = create(2)
    assert code_of(cuda.cuMulticastAddDevice(group, TEAM)) == INVALID_DEVICE
    simulator.set_attribute(1, 132, 0)
    assert code_of(cuda.cuMulticastAddDevice(group, 1)) == NOT_SUPPORTED
    simulator.reset()
    ok(cuda.cuMulticastAddDevice(group, 1))
    assert code_of(cuda.cuMulticastAddDevice(group, 1)) == INVALID_VALUE, "twice"
    ok(cuda.cuMulticastAddDevice(group, 0))
    assert code_of(cuda.cuMulticastAddDevice(group, 2)) == INVALID_VALUE, "one too many"
    release(group)
    with simulator.expect_violation("is no live multicast"):
        assert code_of(cuda.cuMulticastAddDevice(group, 0)) == INVALID_VALUE


def test_without_a_device_that_has_it(simulator: Simulator) -> None:
    for device in range(ok(cuda.cuDeviceGetCount())):
        simulator.set_attribute(device, 132, 0)
    assert code_of(cuda.cuMulticastCreate(group_properties(1))) == NOT_SUPPORTED
    assert code_of(cuda.cuMulticastGetGranularity(group_properties(1), Number(0))) == NOT_SUPPORTED


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 4096},
        {"start": 4096},
        {"size": 4096},
        {"size": 0},
        {"flags": 1},
        {"offset": MINIMUM, "size": RECOMMENDED},
        {"start": MINIMUM, "size": RECOMMENDED},
        {"offset": 2 * RECOMMENDED},
    ],
    ids=str,
)
def test_binds_that_are_refused(change: dict[str, int]) -> None:
    group, handle = created([0]), memory(0)
    assert bind(group, 0, handle, **{"size": MINIMUM, **change}) == INVALID_VALUE
    assert bind(group, 0, handle) == 0, "nothing was bound"
    assert bind(group, 0, handle, MINIMUM, offset=MINIMUM) == INVALID_VALUE, "now there is something"
    assert unbind(group, 0) == 0
    release(group, handle)


def test_a_bind_wants_memory(simulator: Simulator) -> None:
    group = created([0])
    with simulator.expect_violation("is no live vmm_handle"):
        assert bind(group, 0, group) == INVALID_VALUE
    release(group)


@pytest.mark.usefixtures("four")
def test_a_bind_is_for_the_memorys_device() -> None:
    group, second, third = created([0, 1]), memory(1), memory(2)
    if HAS_V2:
        assert bind(group, 0, second) == INVALID_DEVICE
    assert bind(group, 2, third) == INVALID_DEVICE, "it is not of the team"
    release(group, second, third)


def test_a_shareable_object_takes_shareable_memory() -> None:
    group, alone, handle = created([0]), created([0], handle_types=0), memory(0, handle_types=0)
    assert bind(group, 0, handle) == INVALID_VALUE
    fd = int(ok(cuda.cuMemExportToShareableHandle(group, FD_TYPE, 0)))
    imported = ok(cuda.cuMemImportFromShareableHandle(fd, FD_TYPE))
    assert bind(imported, 0, handle) == INVALID_VALUE
    assert code_of(cuda.cuMemExportToShareableHandle(imported, FD_TYPE, 0)) == INVALID_VALUE
    with mapped(handle, [0]) as pointer:
        assert bind_address(group, 0, pointer) == INVALID_VALUE
    assert bind(alone, 0, handle) == 0
    assert unbind(alone, 0) == 0
    os.close(fd)
    release(group, alone, imported, handle)


def test_mapped_memory_is_bound(simulator: Simulator) -> None:
    """From within a mapping that begins within the memory."""
    group, handle = created([0]), memory(0, 3 * RECOMMENDED)
    with mapped(group, [0]) as everywhere, mapped(handle, [0], 2 * RECOMMENDED, RECOMMENDED) as own:
        assert bind_address(group, 0, own + MINIMUM) == 0
        simulator.multimem_store(everywhere, [5])
        assert words(own + MINIMUM, 2) == [5, 0]
        assert unbind(group, 0) == 0
        assert bind_address(group, 0, own + RECOMMENDED) == 0
        assert simulator.multimem_sum(everywhere, 1) == [0]
        assert unbind(group, 0) == 0
        refused = (
            (own + 4096, MINIMUM),
            (own + RECOMMENDED, RECOMMENDED + MINIMUM),
            (everywhere, MINIMUM),
            (int(ok(cuda.cuMemAddressReserve(MINIMUM, 0, 0, 0))), MINIMUM),
        )
        for pointer, size in refused:
            assert bind_address(group, 0, pointer, size) == INVALID_VALUE
        assert bind_address(group, 0, own, MINIMUM, flags=1) == INVALID_VALUE
        ok(cuda.cuMemAddressFree(refused[-1][0], MINIMUM))
    release(group, handle)


def test_mapped_memory_is_bound_whose_handle_was_released() -> None:
    group, handle = created([0]), memory(0)
    with mapped(handle, [0]) as own:
        release(handle)
        assert bind_address(group, 0, own) == 0
        assert unbind(group, 0) == 0
    release(group)


def test_other_memory_is_not_bound() -> None:
    group = created([0])
    with stream_on(0):
        pointer = int(ok(cuda.cuMemAlloc(2 * RECOMMENDED)))
        assert bind_address(group, 0, pointer + -pointer % MINIMUM, MINIMUM) == INVALID_VALUE
        ok(cuda.cuMemFree(pointer))
    release(group)


def test_the_calls_of_cuda_12_take_no_device(simulator: Simulator) -> None:
    for name in ("cuMulticastBindMem", "cuMulticastBindAddr"):
        assert address(name, 12000) == 0
        assert address(name, 12010) not in (0, address(name, 13010))
    group, handle = created([0]), memory(0)
    ok(cuda.cuMulticastBindMem(group, 0, handle, 0, RECOMMENDED, 0))
    assert unbind(group, 0) == 0
    with mapped(handle, [0]) as pointer:
        ok(cuda.cuMulticastBindAddr(group, 0, pointer, RECOMMENDED, 0))
        assert unbind(group, 0) == 0
    release(group, handle)


OLDER = """
from tests.cuda_backend.test_simulated_multicast import *
assert_simulated()
assert ok(cuda.cuDriverGetVersion()) == 13000
assert address("cuMulticastBindMem", 13010) == address("cuMulticastBindMem", 12010) != 0
print("ok")
"""


def test_an_older_driver_has_only_those(simulator: Simulator) -> None:
    assert child(simulator, OLDER, GPUINTEROP_SIM_CUDA_VERSION="13000") == "ok\n"


def test_an_unbind_equals_its_bind(simulator: Simulator) -> None:
    group, handle = created([0], 2 * RECOMMENDED), memory(0)
    assert bind(group, 0, handle, MINIMUM) == 0
    assert bind(group, 0, handle, MINIMUM, offset=MINIMUM, start=MINIMUM) == 0
    for offset, size in ((0, 2 * MINIMUM), (RECOMMENDED, MINIMUM)):
        with simulator.expect_violation("nothing of device 0 was bound"):
            assert unbind(group, 0, size, offset=offset) == INVALID_VALUE
    assert unbind(group, 0, MINIMUM, offset=4096) == INVALID_VALUE
    assert unbind(group, 0, RECOMMENDED, offset=2 * RECOMMENDED) == INVALID_VALUE
    assert unbind(group, 1, MINIMUM) == INVALID_DEVICE
    assert unbind(group, 0, MINIMUM, offset=MINIMUM) == 0
    assert unbind(group, 0, MINIMUM) == 0
    with simulator.expect_violation("nothing of device 0 was bound"):
        assert unbind(group, 0, MINIMUM) == INVALID_VALUE
    release(group, handle)


@pytest.mark.skipif(not HAS_V2, reason="these bindings have no name for the error")
def test_there_are_only_so_many(simulator: Simulator) -> None:
    group, handle = created([0], 65 * MINIMUM), memory(0)
    for index in range(64):
        assert bind(group, 0, handle, MINIMUM, offset=index * MINIMUM) == 0
    assert bind(group, 0, handle, MINIMUM, offset=64 * MINIMUM) == MULTICAST_FULL
    for index in range(64):
        assert unbind(group, 0, MINIMUM, offset=index * MINIMUM) == 0
    release(group, handle)


def test_what_is_released_in_the_wrong_order(simulator: Simulator) -> None:
    group, handle = created([0]), memory(0)
    assert bind(group, 0, handle) == 0
    with simulator.expect_violation("is released while it is bound"):
        release(handle)
    with simulator.expect_violation("is released while memory of device 0 is bound"):
        release(group)
    group, handle = created([0]), memory(0)
    assert bind(group, 0, handle) == 0
    with mapped(handle, [0]):
        release(handle)
        assert simulator.violations() == [], "what is mapped is still there"
        simulator.forget_log()
    assert "is released while it is bound" in simulator.violations()[0]
    assert unbind(group, 0) == 0
    release(group)
    assert simulator.trace("cuMulticastUnbind", "cuMemUnmap", "cuMemRelease") == [
        "cuMemUnmap", "cuMulticastUnbind", "cuMemRelease"
    ]  # fmt: skip


def test_a_mapping_keeps_the_object(simulator: Simulator) -> None:
    group, handle = created([0]), memory(0)
    assert bind(group, 0, handle) == 0
    pointer = int(ok(cuda.cuMemAddressReserve(RECOMMENDED, 0, 0, 0)))
    ok(cuda.cuMemMap(pointer, RECOMMENDED, 0, group, 0))
    again = ok(cuda.cuMemRetainAllocationHandle(pointer + MINIMUM))
    assert int(again) == int(group)
    release(group)
    simulator.multimem_store(pointer, [9])
    assert simulator.multimem_sum(pointer, 1) == [9]
    assert unbind(again, 0) == 0
    release(again, handle)
    assert simulator.live()["multicast"] == 0
    ok(cuda.cuMemUnmap(pointer, RECOMMENDED))
    ok(cuda.cuMemAddressFree(pointer, RECOMMENDED))


# -- who may touch it --------------------------------------------------------------------------------------------------


PTX = b"""
.version 8.1
.target sm_90
.address_size 64
.visible .entry gpuinterop_multimem_store(.param .u64 address, .param .u32 value, .param .u32 count) { ret; }
.visible .entry gpuinterop_multimem_add(.param .u64 target, .param .u64 address, .param .u32 count) { ret; }
"""
ADDRESS, WORD = ctypes.c_uint64, ctypes.c_uint32


@contextmanager
def kernels() -> Iterator[tuple[Callable[..., int], Callable[..., int]]]:
    """The two of the current context: store(stream, address, value, count) and add(stream, target, address, count)."""
    module = ok(cuda.cuModuleLoadData(PTX))
    assert code_of(cuda.cuModuleGetFunction(module, b"gpuinterop_no_such_kernel")) == 500

    def launcher(name: bytes, types: tuple[Any, ...]) -> Callable[..., int]:
        function = ok(cuda.cuModuleGetFunction(module, name))

        def launch(stream: Any, *values: int, threads: int = 256, shared: int = 0) -> int:
            return code_of(cuda.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, shared, stream, (values, types), 0))

        return launch

    yield (
        launcher(b"gpuinterop_multimem_store", (ADDRESS, WORD, WORD)),
        launcher(b"gpuinterop_multimem_add", (ADDRESS, ADDRESS, WORD)),
    )
    ok(cuda.cuModuleUnload(module))


@contextmanager
def team_of(devices: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """The multicast address, which all may use, and each device's own."""
    group, memories = created(devices), [memory(device) for device in devices]
    with ExitStack() as stack:
        everywhere = stack.enter_context(mapped(group, devices))
        own = []
        for device, handle in zip(devices, memories, strict=True):
            assert bind(group, device, handle) == 0
            own.append(stack.enter_context(mapped(handle, [device])))
        yield everywhere, own
        for device in devices:
            assert unbind(group, device) == 0
    release(group, *memories)


@pytest.mark.usefixtures("four")
def test_kernels_go_in_the_order_of_their_stream(simulator: Simulator) -> None:
    before = simulator.live()
    with team_of(range(TEAM)) as (everywhere, own), stream_on(2) as stream, kernels() as (store, add):
        for device in range(TEAM):
            ctypes.c_uint32.from_address(own[device] + 12).value = 10**device
        event = ok(cuda.cuEventCreate(2))
        target = own[2] + MINIMUM
        ok(cuda.cuStreamWaitValue32(stream, target, 1, 0))
        assert store(stream, everywhere, 7, 3) == 0
        assert add(stream, target + 4, everywhere, 4) == 0
        ok(cuda.cuEventRecord(event, stream))
        assert code_of(cuda.cuEventQuery(event)) == 600, "it comes after what was enqueued before"
        assert words(own[0], 4) == [0, 0, 0, 1]
        ctypes.c_uint32.from_address(target).value = 1
        assert simulator.settle(2, LIMIT)
        assert [words(pointer, 3) for pointer in own] == TEAM * [[7, 7, 7]]
        assert words(target, 6) == [1, 28, 28, 28, 1111, 0]
        done = [(entry.operation, entry.device, entry.address, entry.size) for entry in simulator.log()[-2:]]
        assert done == [("multimem_store", 2, everywhere, 12), ("multimem_add", 2, everywhere, 16)]
        ok(cuda.cuEventDestroy(event))
    assert simulator.live()["module"] == before["module"]
    assert simulator.live()["function"] == before["function"]


def test_kernels_in_a_graph(simulator: Simulator) -> None:
    with team_of([0]) as (everywhere, own), stream_on(0) as stream, kernels() as (store, _):
        ok(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        assert store(stream, everywhere, 3, 2) == 0
        graph = ok(cuda.cuStreamEndCapture(stream))
        (node,) = cuda.cuGraphGetNodes(graph, 1)[1]
        assert ok(cuda.cuGraphNodeGetType(node)) == cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        executable = ok(cuda.cuGraphInstantiate(graph, 0))
        assert words(own[0], 1) == [0]
        ok(cuda.cuGraphLaunch(executable, stream))
        assert simulator.settle(0, LIMIT)
        assert words(own[0], 3) == [3, 3, 0]
        ok(cuda.cuGraphExecDestroy(executable))
        ok(cuda.cuGraphDestroy(graph))


def test_parts(simulator: Simulator) -> None:
    """The mapping is a part of the object, and two bindings lie behind it, the other way round than in the memory."""
    group, handle = created([0], 3 * MINIMUM), memory(0)
    assert bind(group, 0, handle, MINIMUM, offset=MINIMUM, start=MINIMUM) == 0
    assert bind(group, 0, handle, MINIMUM, offset=2 * MINIMUM) == 0
    with mapped(group, [0], 2 * MINIMUM, MINIMUM) as part, mapped(handle, [0]) as own:
        border = part + MINIMUM - 4
        first, second = own + 2 * MINIMUM - 4, own
        simulator.multimem_store(border, [1, 2])
        assert (words(first, 1), words(second, 2)) == ([1], [2, 0])
        assert simulator.multimem_sum(border, 3) == [1, 2, 0]
        with stream_on(0) as stream, kernels() as (store, add):
            assert store(stream, border - 4, 9, 2) == 0
            assert add(stream, own + 4096, border - 4, 3) == 0
            assert simulator.settle(0, LIMIT)
        assert (words(first - 4, 2), words(second, 1)) == ([9, 9], [2])
        assert words(own + 4096, 4) == [9, 9, 2, 0]
    assert unbind(group, 0, MINIMUM, offset=MINIMUM) == 0
    assert unbind(group, 0, MINIMUM, offset=2 * MINIMUM) == 0
    release(group, handle)


def test_other_modules_are_refused(simulator: Simulator) -> None:
    with stream_on(0) as stream:
        assert code_of(cuda.cuModuleLoadData(b"no PTX at all")) == INVALID_PTX
        module = ok(cuda.cuModuleLoadData(PTX.partition(b".visible")[0]))
        assert code_of(cuda.cuModuleGetFunction(module, b"gpuinterop_multimem_store")) == 500
        ok(cuda.cuModuleUnload(module))
        with simulator.expect_violation("is no live module"):
            assert code_of(cuda.cuModuleUnload(module)) == 400
        with kernels() as (store, _):
            pass
        with simulator.expect_violation("is no live function"):
            assert store(stream, 4096, 1, 1) == 400


@pytest.mark.usefixtures("four")
def test_launches_that_are_refused(simulator: Simulator) -> None:
    with team_of([0, 1]) as (everywhere, own), stream_on(1) as other, stream_on(0) as stream, kernels() as (store, _):
        assert store(other, everywhere, 1, 1) == 400, "the function is of another context"
        assert store(stream, everywhere, 1, 1, threads=1025) == INVALID_VALUE
        assert store(stream, everywhere, 1, 1, shared=4) == INVALID_VALUE, "these kernels have none"
        assert simulator.settle(0, LIMIT)
        assert words(own[0], 1) == [0]
        assert store(stream, everywhere, 1, 1, threads=1024) == 0
        assert simulator.settle(0, LIMIT)
        assert words(own[0], 1) == [1]


@pytest.mark.usefixtures("four")
def test_where_sums_are_written_to(simulator: Simulator) -> None:
    """Memory that the device reaches: not pageable memory, and that of another device with peer access alone."""
    host = ctypes.create_string_buffer(16)
    with team_of([0]) as (everywhere, _), stream_on(1):
        foreign = int(ok(cuda.cuMemAlloc(16)))
        with stream_on(0) as stream, kernels() as (_, add):
            with simulator.expect_violation("is memory of device 1, used on a stream of device 0"):
                assert add(stream, foreign, everywhere, 1) == 0
                assert simulator.settle(0, LIMIT)
            assert add(stream, ctypes.addressof(host), everywhere, 1) == 0
            assert code_of(cuda.cuStreamSynchronize(stream)) == ILLEGAL_ADDRESS
        ok(cuda.cuMemFree(foreign))


def failing(simulator: Simulator, enqueue: Callable[[Any], tuple[Any, ...]], device: int, text: str) -> None:
    """What is enqueued makes its stream fail, and is noted."""
    with stream_on(device) as stream, simulator.expect_violation(text):
        ok(enqueue(stream))
        assert code_of(cuda.cuStreamSynchronize(stream)) == ILLEGAL_ADDRESS


def test_only_multimem_touches_it(simulator: Simulator) -> None:
    with team_of([0]) as (everywhere, own):
        pointer = cuda.CUdeviceptr(everywhere)
        host = ctypes.create_string_buffer(4096)
        attempts: tuple[Callable[[Any], tuple[Any, ...]], ...] = (
            lambda stream: cuda.cuMemsetD8Async(pointer, 1, 16, stream),
            lambda stream: cuda.cuMemcpyAsync(pointer, cuda.CUdeviceptr(own[0]), 16, stream),
            lambda stream: cuda.cuMemcpyAsync(cuda.CUdeviceptr(own[0]), pointer, 16, stream),
            lambda stream: cuda.cuStreamWriteValue32(stream, pointer, 1, 0),
        )
        for attempt in attempts:
            failing(simulator, attempt, 0, "only multimem instructions")
        # On a stream of its own: gpuinterop keeps the context, and so the default stream that had failed.
        with stream_on(0) as stream, simulator.expect_violation("only multimem instructions"):
            cuda.cuMemcpyDtoHAsync(host, pointer, 16, stream)  # into pageable memory, which may wait for it
            assert code_of(cuda.cuStreamSynchronize(stream)) == ILLEGAL_ADDRESS
        assert words(own[0], 4) == [0] * 4


PLAIN_STORE = """
import ctypes
from tests.cuda_backend.test_simulated_multicast import *
assert_simulated()
ok(cuda.cuInit(0))
with team_of([0]) as (everywhere, own):
    ctypes.c_uint32.from_address(own[0]).value = 1
    print("its own", flush=True)
    ctypes.c_uint32.from_address(everywhere).value = 1
    print("and all")
"""


def test_a_plain_store_is_stopped(simulator: Simulator) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_STORE],
        env=simulator.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "its own\n"), done.stderr


def test_kernels_want_a_multicast_address(simulator: Simulator) -> None:
    with team_of([0]) as (everywhere, own):
        for pointer in (own[0], everywhere + RECOMMENDED - 4, everywhere + 2):

            def store(stream: Any, pointer: int = pointer) -> tuple[int]:
                with kernels() as (it, _):
                    code = it(stream, pointer, 1, 2)
                    assert simulator.settle(0, LIMIT)
                return (code,)

            failing(simulator, store, 0, "is no multicast address")
        assert words(own[0], 2) == [0, 0]


@pytest.mark.usefixtures("four")
def test_a_device_without_access(simulator: Simulator) -> None:
    group, handle = created([0, 1]), [memory(0), memory(1)]
    for device in (0, 1):
        assert bind(group, device, handle[device]) == 0
    with mapped(group, [0]) as everywhere:

        def store(stream: Any) -> tuple[int]:
            with kernels() as (it, _):
                code = it(stream, everywhere, 1, 1)
                assert simulator.settle(1, LIMIT)
            return (code,)

        assert access(everywhere, RECOMMENDED, [2]) == INVALID_DEVICE, "it is not of the team"
        failing(simulator, store, 1, "device 1 was not given access")
        assert access(everywhere, RECOMMENDED, [1]) == 0
        with stream_on(1) as stream:
            ok(store(stream))
        assert simulator.multimem_sum(everywhere, 1) == [2]
    assert [unbind(group, device) for device in (0, 1)] == [0, 0]
    release(group, *handle)


@pytest.mark.usefixtures("four")
def test_what_is_not_bound_everywhere(simulator: Simulator) -> None:
    group, first, second = created([0, 1]), memory(0), memory(1)
    assert bind(group, 0, first) == 0
    assert bind(group, 1, second, MINIMUM) == 0
    with mapped(group, [0, 1]) as everywhere:
        simulator.multimem_store(everywhere + MINIMUM - 4, [1])
        with simulator.expect_violation("device 1 has no memory bound to all"), pytest.raises(ValueError, match="700"):
            simulator.multimem_store(everywhere + MINIMUM - 4, [1, 1])
    assert unbind(group, 0) == 0
    assert unbind(group, 1, MINIMUM) == 0
    release(group, first, second)


def test_an_unbind_under_way(simulator: Simulator) -> None:
    group, handle = created([0]), memory(0)
    assert bind(group, 0, handle) == 0
    with mapped(group, [0]) as everywhere, mapped(handle, [0]) as own, stream_on(0) as stream, kernels() as (store, _):
        ok(cuda.cuStreamWaitValue32(stream, own + 4096, 1, 0))
        assert store(stream, everywhere, 1, 1) == 0
        with simulator.expect_violation("is still used by 1 operations"):
            assert unbind(group, 0) == 0
        assert bind(group, 0, handle) == 0
        ctypes.c_uint32.from_address(own + 4096).value = 1
        assert simulator.settle(0, LIMIT)
        assert words(own, 1) == [1]
        assert unbind(group, 0) == 0
    release(group, handle)


def test_what_a_pending_kernel_uses(simulator: Simulator) -> None:
    """Its mapping, although the object has others, and its module."""
    group, handle = created([0]), memory(0)
    assert bind(group, 0, handle) == 0
    with mapped(handle, [0]) as own, mapped(group, [0]), stream_on(0) as stream:
        with ExitStack() as mapping:
            everywhere = mapping.enter_context(mapped(group, [0]))
            ok(cuda.cuStreamWaitValue32(stream, own + 4096, 1, 0))
            with simulator.expect_violation("cuModuleUnload: the function"), kernels() as (store, _):
                assert store(stream, everywhere, 1, 1) == 0
            with simulator.expect_violation("cuMemUnmap: the vmm_mapping"):
                mapping.close()
        ctypes.c_uint32.from_address(own + 4096).value = 1
        assert simulator.settle(0, LIMIT)
        assert words(own, 1) == [1]
    assert unbind(group, 0) == 0
    release(group, handle)


def test_nothing_is_gone_that_cannot_be_looked_at(simulator: Simulator) -> None:
    """A process that is out of descriptors drops no binding, and takes no memory for gone."""
    group, handle = created([0]), memory(0)
    assert bind(group, 0, handle, MINIMUM) == 0
    with mapped(group, [0]) as everywhere:
        with no_more_files():
            assert bind(group, 0, handle, MINIMUM, offset=MINIMUM) == UNKNOWN
            for touch in (
                lambda: simulator.multimem_store(everywhere, [1]),
                lambda: simulator.multimem_sum(everywhere, 1),
            ):
                with (
                    simulator.expect_violation("a stream, or the control: memory of device 0 could not be reached"),
                    pytest.raises(ValueError, match="999"),
                ):
                    touch()
        simulator.multimem_store(everywhere, [2])
        assert simulator.multimem_sum(everywhere, 1) == [2]
    assert unbind(group, 0, MINIMUM) == 0
    release(group, handle)


# -- errors that come from elsewhere -----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 2, 47, 101, 401, 800, 801, 802])
def test_documented_errors_can_be_had(simulator: Simulator, code: int) -> None:
    """Of every call; and the driver has a name for each."""
    if code == MULTICAST_FULL and not HAS_V2:
        pytest.skip("these bindings have no name for it")
    group, handle = created([0]), memory(0)
    calls: dict[str, Callable[[], int]] = {
        "cuMulticastGetGranularity": lambda: code_of(cuda.cuMulticastGetGranularity(group_properties(1), Number(0))),
        "cuMulticastCreate": lambda: code_of(cuda.cuMulticastCreate(group_properties(1))),
        "cuMulticastAddDevice": lambda: code_of(cuda.cuMulticastAddDevice(group, 0)),
        "cuMulticastBindMem": lambda: bind(group, 0, handle),
        "cuMulticastBindAddr": lambda: bind_address(group, 0, 0),
        "cuMulticastUnbind": lambda: unbind(group, 0),
        "cuMemMap": lambda: code_of(cuda.cuMemMap(0, RECOMMENDED, 0, group, 0)),
        "cuMemExportToShareableHandle": lambda: code_of(cuda.cuMemExportToShareableHandle(group, FD_TYPE, 0)),
        "cuMemImportFromShareableHandle": lambda: code_of(cuda.cuMemImportFromShareableHandle(0, FD_TYPE)),
    }
    for name, call in calls.items():
        simulator.fail(name, code=code)
        assert call() == code, name
    error, text = cuda.cuGetErrorName(cuda.CUresult(code))
    assert int(error) == 0
    assert text.startswith(b"CUDA_ERROR_")
    release(group, handle)


# -- it blocks until all devices were added ----------------------------------------------------------------------------


def started(call: Callable[[], int]) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(call()))
    thread.start()
    return thread, codes


@needs_threads
@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("name", ["cuMulticastBindMem", "cuMulticastBindAddr", "cuMemMap"])
def test_it_blocks_until_all_were_added(simulator: Simulator, name: str) -> None:
    group, handle = create(2), memory(0)
    ok(cuda.cuMulticastAddDevice(group, 0))
    reserved = int(ok(cuda.cuMemAddressReserve(RECOMMENDED, 0, 0, 0)))
    with mapped(handle, [0]) as own:
        calls: dict[str, Callable[[], int]] = {
            "cuMulticastBindMem": lambda: bind(group, 0, handle),
            "cuMulticastBindAddr": lambda: bind_address(group, 0, own),
            "cuMemMap": lambda: code_of(cuda.cuMemMap(reserved, RECOMMENDED, 0, group, 0)),
        }
        thread, codes = started(calls[name])
        assert simulator.held(name, LIMIT)
        release(memory(0))  # other calls go on
        assert thread.is_alive()
        assert simulator.live()["multicast_binding"] == 0
        assert simulator.live()["vmm_mapping"] == 1
        ok(cuda.cuMulticastAddDevice(group, 1))
        thread.join(LIMIT)
        assert codes == [0]
        assert not simulator.held(name, 0)
        if name == "cuMemMap":
            ok(cuda.cuMemUnmap(reserved, RECOMMENDED))
        else:
            assert unbind(group, 0) == 0
    ok(cuda.cuMemAddressFree(reserved, RECOMMENDED))
    release(group, handle)


@needs_threads
def test_a_blocked_bind_is_given_up(simulator: Simulator) -> None:
    group, handle = create(2), memory(0)
    ok(cuda.cuMulticastAddDevice(group, 0))
    thread, codes = started(lambda: bind(group, 0, handle))
    assert simulator.held("cuMulticastBindMem", LIMIT)
    simulator.cancel_waits()
    thread.join(LIMIT)
    assert codes == [UNKNOWN]
    release(group, handle)


@needs_threads
@pytest.mark.usefixtures("four")
def test_an_object_released_under_a_blocked_bind(simulator: Simulator) -> None:
    group, handle = create(2), memory(0)
    fd = int(ok(cuda.cuMemExportToShareableHandle(group, FD_TYPE, 0)))
    thread, codes = started(lambda: bind(group, 0, handle))
    assert simulator.held("cuMulticastBindMem", LIMIT)
    release(group)
    group = ok(cuda.cuMemImportFromShareableHandle(fd, FD_TYPE))
    os.close(fd)
    for device in (0, 1):
        ok(cuda.cuMulticastAddDevice(group, device))
    thread.join(LIMIT)
    assert codes == [INVALID_VALUE]
    release(group, handle)


@needs_threads
@pytest.mark.parametrize("name", ["cuMulticastBindMem", "cuMulticastBindAddr"])
def test_memory_that_goes_under_a_blocked_bind(simulator: Simulator, name: str) -> None:
    group, handle = create(1), memory(0)
    mapping = ExitStack()
    own = mapping.enter_context(mapped(handle, [0]))
    calls: dict[str, Callable[[], int]] = {
        "cuMulticastBindMem": lambda: bind(group, 0, handle),
        "cuMulticastBindAddr": lambda: bind_address(group, 0, own),
    }
    ends: dict[str, Callable[[], None]] = {
        "cuMulticastBindMem": lambda: release(handle),
        "cuMulticastBindAddr": mapping.close,
    }
    thread, codes = started(calls[name])
    assert simulator.held(name, LIMIT)
    ends.pop(name)()
    with simulator.expect_violation("while it was being bound"):
        ok(cuda.cuMulticastAddDevice(group, 0))
        thread.join(LIMIT)
        assert codes == [INVALID_VALUE]
    for end in ends.values():
        end()
    release(group)
    assert simulator.live()["multicast_binding"] == 0


FOR_EVER = """
from tests.cuda_backend.test_simulated_multicast import *
assert_simulated()
ok(cuda.cuInit(0))
group, handle = create(2), memory(0)
ok(cuda.cuMulticastAddDevice(group, 0))
assert bind(group, 0, handle) == UNKNOWN
(found,) = Simulator.attach().violations()
assert "1 of 2 devices were added" in found and "block for ever" in found, found
print("ok")
"""


def test_nobody_waits_for_ever(simulator: Simulator) -> None:
    assert child(simulator, FOR_EVER, GPUINTEROP_SIM_TEAM_SECONDS="0.05") == "ok\n"


# -- several processes -------------------------------------------------------------------------------------------------


MEMBER = """
import json, sys
from tests.cuda_backend.test_simulated_multicast import *
assert_simulated()
ok(cuda.cuInit(0))
simulator = Simulator.attach()
for line in sys.stdin:
    answer = None
    try:
        exec(line, globals())
    except Exception as error:
        answer = repr(error)
    print(json.dumps(answer), flush=True)
"""


class Member:
    """Another process, which does as it is told."""

    def __init__(self, simulator: Simulator, *fds: int, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(MEMBER)],
            env=simulator.environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )

    def _answer(self, statement: str) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(statement + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def do(self, statement: str) -> None:
        problem = self._answer(statement)
        assert problem is None, problem

    def ask(self, expression: str) -> Any:
        return self._answer(f"answer = {expression}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT)


@pytest.fixture
def members(simulator: Simulator) -> Iterator[Callable[..., Member]]:
    """Starts them, and ends them with the test."""
    made: list[Member] = []

    def end() -> None:
        for member in made:
            member.process.kill()

    watch = threading.Timer(2 * LIMIT, end)  # of what would not answer
    watch.start()

    def start(*fds: int, **variables: str) -> Member:
        made.append(Member(simulator, *fds, **variables))
        return made[-1]

    yield start
    watch.cancel()
    for member in made:
        member.kill()
        for pipe in (member.process.stdin, member.process.stdout):
            if pipe:
                pipe.close()


def joined(member: Member, fd: int, device: int) -> None:
    """The member has imported the object, with memory of its own that is mapped."""
    member.do(f"group, handle = ok(cuda.cuMemImportFromShareableHandle({fd}, FD_TYPE)), memory({device})")
    member.do(f"mapping = mapped(handle, [{device}]); own = mapping.__enter__()")


@pytest.mark.usefixtures("four")
def test_writes_reach_other_processes(simulator: Simulator, members: Callable[..., Member]) -> None:
    """A team of three: device 0 is ours, each other one another process's."""
    group, handle = create(3), memory(0)
    fd = int(ok(cuda.cuMemExportToShareableHandle(group, FD_TYPE, 0)))
    ok(cuda.cuMulticastAddDevice(group, 0))
    others = {device: members(fd) for device in (1, 2)}
    for device, member in others.items():
        joined(member, fd, device)
        assert member.ask(f"code_of(cuda.cuMulticastAddDevice(group, {device}))") == 0
    assert code_of(cuda.cuMulticastAddDevice(group, 1)) == INVALID_VALUE, "another process has added it"
    assert bind(group, 0, handle) == 0
    for device, member in others.items():
        assert member.ask(f"bind(group, {device}, handle)") == 0
    with mapped(group, [0]) as everywhere, mapped(handle, [0]) as own:
        simulator.multimem_store(everywhere, [1, 2, 3])
        for member in others.values():
            assert member.ask("words(own, 4)") == [1, 2, 3, 0]
        others[2].do("all = mapped(group, [2]); address = all.__enter__()")
        others[2].do("simulator.multimem_store(address + 4, [40])")
        assert words(own, 3) == [1, 40, 3]
        assert others[1].ask("words(own, 3)") == [1, 40, 3]
        assert simulator.multimem_sum(everywhere, 3) == [3, 120, 9]

        # Its memory goes with it, and nobody has waited for it: its files are there for root alone, which has none.
        others[1].process.kill()
        os.waitid(os.P_PID, others[1].process.pid, os.WEXITED | os.WNOWAIT)
        simulator.multimem_store(everywhere, [7])
        assert others[2].ask("words(own, 1)") == [7]
        assert simulator.multimem_sum(everywhere, 1) == [14]
        substitute = members(fd)
        joined(substitute, fd, 1)
        assert substitute.ask("code_of(cuda.cuMulticastAddDevice(group, 1))") == INVALID_VALUE, "it stays added"
        assert substitute.ask("bind(group, 1, handle)") == 0, "nothing of device 1 is bound any more"
        simulator.multimem_store(everywhere, [8])
        assert substitute.ask("words(own, 1)") == [8]
        assert substitute.ask("unbind(group, 1)") == 0

        others[2].do("all.__exit__(None, None, None)")
        assert others[2].ask("unbind(group, 2)") == 0
        with simulator.expect_violation("nothing of device 2 was bound"):
            assert unbind(group, 2) == INVALID_VALUE
        for member in (substitute, others[2]):
            member.do("mapping.__exit__(None, None, None); release(handle, group)")
            assert member.ask("simulator.violations()") == []
            left = member.ask("simulator.live()")
            assert {kind: left[kind] for kind in ("multicast", "multicast_binding", "vmm_handle", "bytes")} == {
                "multicast": 0, "multicast_binding": 0, "vmm_handle": 0, "bytes": 0
            }  # fmt: skip
    assert unbind(group, 0) == 0
    os.close(fd)
    release(group, handle)


@needs_threads
@pytest.mark.usefixtures("four")
def test_another_process_blocks(simulator: Simulator, members: Callable[..., Member]) -> None:
    """And goes on when this one adds the last device."""
    group = create(2)
    fd = int(ok(cuda.cuMemExportToShareableHandle(group, FD_TYPE, 0)))
    member = members(fd)
    joined(member, fd, 1)
    assert member.ask("code_of(cuda.cuMulticastAddDevice(group, 1))") == 0
    member.do("thread, codes = started(lambda: bind(group, 1, handle))")
    assert member.ask(f"simulator.held('cuMulticastBindMem', {LIMIT})") is True
    assert member.ask("(thread.is_alive(), codes)") == [True, []]
    ok(cuda.cuMulticastAddDevice(group, 0))
    assert member.ask(f"(thread.join({LIMIT}), codes)") == [None, [0]]
    assert member.ask("unbind(group, 1)") == 0
    os.close(fd)
    release(group)


def test_an_object_outlives_its_creator(simulator: Simulator, members: Callable[..., Member]) -> None:
    group = create(1)
    fd = int(ok(cuda.cuMemExportToShareableHandle(group, FD_TYPE, 0)))
    member = members(fd)
    joined(member, fd, 0)
    release(group)
    os.close(fd)
    assert member.ask("code_of(cuda.cuMulticastAddDevice(group, 0))") == 0
    assert member.ask("bind(group, 0, handle)") == 0
    assert member.ask("unbind(group, 0)") == 0


def test_the_two_kinds_of_handles_are_told_apart(simulator: Simulator) -> None:
    group, handle = create(1), memory(0)
    for original, kind in ((group, "multicast"), (handle, "vmm_handle")):
        before = simulator.live()[kind]
        fd = int(ok(cuda.cuMemExportToShareableHandle(original, FD_TYPE, 0)))
        imported = ok(cuda.cuMemImportFromShareableHandle(fd, FD_TYPE))
        assert simulator.live()[kind] == before + 1
        os.close(fd)
        release(imported)
    alone = create(1, handle_types=0)
    assert code_of(cuda.cuMemExportToShareableHandle(alone, FD_TYPE, 0)) == INVALID_VALUE
    release(group, handle, alone)


@pytest.mark.usefixtures("four")
def test_memory_of_a_device_that_is_not_visible(members: Callable[..., Member]) -> None:
    """As measured: the import is taken and used, its location says -2, and nothing is told of its handle types."""
    handle = memory(3)
    fd = int(ok(cuda.cuMemExportToShareableHandle(handle, FD_TYPE, 0)))
    member = members(fd, GPUINTEROP_SIM_DEVICES="1")
    member.do(f"handle = ok(cuda.cuMemImportFromShareableHandle({fd}, FD_TYPE)); own = mapped(handle, [0])")
    member.do("found = ok(cuda.cuMemGetAllocationPropertiesFromHandle(handle))")
    assert member.ask("[found.location.id, int(found.requestedHandleTypes)]") == [-2, 0]
    member.do("address = own.__enter__(); stream_of = stream_on(0); stream = stream_of.__enter__()")
    member.do("ok(cuda.cuMemsetD32Async(address, 5, 2, stream)); ok(cuda.cuStreamSynchronize(stream))")
    with mapped(handle, [3]) as pointer:
        assert words(pointer, 3) == [5, 5, 0]
    member.do("group = created([0])")
    assert member.ask("bind(group, 0, handle)") == INVALID_DEVICE
    assert member.ask("simulator.violations()") == []
    os.close(fd)
    release(handle)


# -- fabric handles ----------------------------------------------------------------------------------------------------


FABRIC_TYPE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC


def fabric_export(handle: Any) -> str:
    return bytes(ok(cuda.cuMemExportToShareableHandle(handle, FABRIC_TYPE, 0)).data).hex()


def fabric_import(text: str) -> tuple[int, Any]:
    data = cuda.CUmemFabricHandle()
    data.data = bytes.fromhex(text)
    code, handle = cuda.cuMemImportFromShareableHandle(data.getPtr(), FABRIC_TYPE)
    return int(code), handle


def test_without_a_channel_there_are_no_fabric_handles() -> None:
    assert ok(cuda.cuDeviceGetAttribute(Number(128), 0)) == 0
    assert code_of(cuda.cuMemCreate(MINIMUM, properties(0, FABRIC), 0)) == NOT_PERMITTED
    assert code_of(cuda.cuMulticastCreate(group_properties(1, handle_types=FABRIC | FD))) == NOT_PERMITTED


def test_windows_has_no_fabric_handles(simulator: Simulator) -> None:
    simulator.set_platform("windows")
    assert code_of(cuda.cuMemCreate(MINIMUM, properties(0, FABRIC), 0)) == NOT_SUPPORTED
    assert code_of(cuda.cuMulticastCreate(group_properties(1, handle_types=FABRIC))) == NOT_SUPPORTED


def test_fabric_handles(members: Callable[..., Member]) -> None:
    """They name memory and multicast objects to processes with the same channel, and hold neither."""
    first, second = (members(GPUINTEROP_SIM_FABRIC="imex-1", GPUINTEROP_SIM_DEVICES="2") for _ in range(2))
    other, none = members(GPUINTEROP_SIM_FABRIC="imex-2"), members()
    assert first.ask("ok(cuda.cuDeviceGetAttribute(Number(128), 0))") == 1
    first.do("group, handle = create(2, handle_types=FABRIC), memory(0, handle_types=FABRIC | FD)")
    theirs = first.ask("[fabric_export(group), fabric_export(handle)]")
    assert [len(text) for text in theirs] == [128, 128]
    assert first.ask("code_of(cuda.cuMemExportToShareableHandle(group, FD_TYPE, 0))") == INVALID_VALUE, "not its type"
    first.do("plain, brief = memory(0), memory(0, handle_types=FABRIC)")
    assert first.ask("code_of(cuda.cuMemExportToShareableHandle(plain, FABRIC_TYPE, 0))") == INVALID_VALUE
    gone = first.ask("fabric_export(brief)")
    first.do("release(brief); brief = memory(0, handle_types=FABRIC)")
    assert second.ask(f"fabric_import('{gone}')[0]") == INVALID_VALUE, "and it is not what came in its place"
    for stranger in (other, none):
        assert stranger.ask(f"[fabric_import(text)[0] for text in {theirs}]") == [NOT_PERMITTED] * 2
    assert second.ask(f"fabric_import('{'00' * 64}')[0]") == INVALID_VALUE
    second.do(f"with no_more_files(): code = fabric_import('{theirs[1]}')[0]")
    assert second.ask("code") == UNKNOWN, "it is not gone"
    second.do(f"(a, group), (b, memory_0) = map(fabric_import, {theirs})")
    assert second.ask("[a, b]") == [0, 0]
    second.do("handle, view = memory(1, handle_types=FABRIC), mapped(memory_0, [1]).__enter__()")
    second.do("p = ok(cuda.cuMemGetAllocationPropertiesFromHandle(memory_0))")
    assert second.ask("[p.location.id, int(p.requestedHandleTypes)]") == [0, 0]
    for device, member in enumerate((first, second)):
        assert member.ask(f"code_of(cuda.cuMulticastAddDevice(group, {device}))") == 0
    for device, member in enumerate((first, second)):
        assert member.ask(f"bind(group, {device}, handle)") == 0
    first.do("simulator.multimem_store(mapped(group, [0]).__enter__(), [6])")
    assert second.ask("words(view, 2)") == [6, 0]
    first.kill()
    assert second.ask(f"fabric_import('{theirs[1]}')[0]") == INVALID_VALUE, "its memory is gone"
    assert second.ask("words(view, 2)") == [6, 0], "what was imported is not"
    assert second.ask("simulator.violations()") == []


# -- peers -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("four")
def test_peer_access_is_per_pair(simulator: Simulator) -> None:
    def pairs() -> set[tuple[int, int]]:
        both = [(device, peer) for device in range(TEAM) for peer in range(TEAM)]
        return {pair for pair in both if ok(cuda.cuDeviceCanAccessPeer(*pair))}

    everyone = {(device, peer) for device in range(TEAM) for peer in range(TEAM) if device != peer}
    assert pairs() == everyone
    simulator.set_peer_access(1, 0, False)
    assert pairs() == everyone - {(1, 0)}
    handle = memory(0)
    with mapped(handle, [0]) as pointer:
        assert access(pointer, RECOMMENDED, [0, 1, 2]) == NOT_SUPPORTED
        assert access(pointer, RECOMMENDED, [2, 0]) == 0
        with stream_on(0), stream_on(1):
            zero = ok(cuda.cuDevicePrimaryCtxRetain(0))
            assert code_of(cuda.cuCtxEnablePeerAccess(zero, 0)) == 217
            simulator.set_peer_access(1, 0, True)
            assert code_of(cuda.cuCtxEnablePeerAccess(zero, 0)) == 0
            ok(cuda.cuDevicePrimaryCtxRelease(0))
    simulator.set_peer_access(0, 1, False)
    simulator.reset()
    assert pairs() == everyone
    release(handle)


@pytest.mark.usefixtures("four")
def test_multicast_needs_no_peer_access(simulator: Simulator) -> None:
    for device in range(TEAM):
        for peer in range(TEAM):
            simulator.set_peer_access(device, peer, False)
    with team_of([0, 1]) as (everywhere, own):
        simulator.multimem_store(everywhere, [4])
        assert [words(pointer, 1) for pointer in own] == [[4], [4]]


# -- whose driver this is ----------------------------------------------------------------------------------------------


ANOTHER = """
from tests.simulated.driver import assert_simulated
try:
    assert_simulated()
except AssertionError as error:
    print(error)
"""


def test_another_driver_is_recognised(simulator: Simulator, tmp_path: Path) -> None:
    """Any library will do: it lacks our mark."""
    other = importlib.util.find_spec("_ctypes")
    assert other is not None
    assert other.origin is not None
    (tmp_path / "libcuda.so.1").symlink_to(other.origin)
    environment = {**simulator.environment(), "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "libcuda.so.1 of this process is not the simulated driver\n", done.stderr
