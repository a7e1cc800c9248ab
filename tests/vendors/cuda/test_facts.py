"""What the CUDA driver does, as measured: the simulated driver has to do the same, and the real one still to do it.

These call ``cuda.bindings.driver``; of gpuinterop only the other side: memfd and SwiftShader for the simulated driver,
NVIDIA's Vulkan driver for the real one. No stream is left waiting: what was waited for is signalled in the end.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cuda.bindings import driver as cuda

import gpuinterop as gi
from gpuinterop.testing.exporters import open_exporter
from gpuinterop.testing.exporters.base import Exporter
from gpuinterop.testing.exporters.vulkan import list_drivers
from tests.beside import beside, elsewhere
from tests.core.forged import forge
from tests.descriptors import is_open
from tests.limits import LIMIT
from tests.missing_vulkan import give_up

from ..parties import REAL

SHORT = 0.1
"""And for what is not."""

SUCCESS, INVALID_VALUE, INVALID_CONTEXT, NOT_READY, UNKNOWN = 0, 1, 201, 600, 999
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901
OPAQUE_FD, TIMELINE_FD = 1, 9
GEQ, EQ, AND, NOR = 0, 1, 2, 3
MIB = 1 << 20


class Number(int):
    """For an enum that the bindings may not have: they ask for its value."""

    @property
    def value(self) -> int:
        return int(self)


def code_of(result: tuple[Any, ...]) -> int:
    return int(result[0])


def ok(result: tuple[Any, ...]) -> Any:
    assert code_of(result) == SUCCESS, result[0]
    return result[1] if len(result) > 1 else None


def until(condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def idle(stream: Any, seconds: float = LIMIT) -> bool:
    """Polls: a call that blocks could block for ever."""

    def done() -> bool:
        code = code_of(cuda.cuStreamQuery(stream))
        assert code in (SUCCESS, NOT_READY), code
        return code == SUCCESS

    return until(done, seconds)


# -- what the tests work with ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def primary() -> Iterator[Any]:
    ok(cuda.cuInit(0))
    context = ok(cuda.cuDevicePrimaryCtxRetain(ok(cuda.cuDeviceGet(0))))
    yield context
    ok(cuda.cuDevicePrimaryCtxRelease(ok(cuda.cuDeviceGet(0))))


@pytest.fixture
def context(primary: Any) -> Iterator[Any]:
    ok(cuda.cuCtxPushCurrent(primary))
    yield primary
    ok(cuda.cuCtxPopCurrent())


@pytest.fixture(params=("nvidia",) if REAL else ("memfd", "swiftshader"))
def party(request: pytest.FixtureRequest, context: Any) -> Iterator[Exporter]:
    """Whoever makes the descriptors."""
    if request.param == "memfd":
        with open_exporter("memfd", identity=gi.DeviceIdentity(name="a GPU's driver")) as exporter:
            yield exporter
        return
    if not any(request.param in f"{found.name} {found.driver}".lower() for found in list_drivers()):
        give_up(f"there is no Vulkan driver {request.param!r}")
    with open_exporter("vulkan", driver=request.param) as exporter:
        yield exporter


def detached(handle: Any) -> int:
    """The descriptor, which is ours from here on."""
    return int(handle.detach())


@contextmanager
def stream_of(flags: int = 1) -> Iterator[Any]:
    stream = ok(cuda.cuStreamCreate(flags))
    yield stream
    ok(cuda.cuStreamDestroy(stream))


@contextmanager
def pinned(size: int = 4096) -> Iterator[int]:
    """Memory of the host that the device reaches, zeroed."""
    pointer = int(ok(cuda.cuMemHostAlloc(size, 0)))
    ctypes.memset(pointer, 0, size)
    yield pointer
    ok(cuda.cuMemFreeHost(pointer))


def word(pointer: int) -> Any:
    return ctypes.c_uint64.from_address(pointer)


def import_memory(fd: int, size: int, flags: int = 0) -> tuple[Any, ...]:
    desc = cuda.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
    desc.type, desc.handle.fd, desc.size, desc.flags = Number(OPAQUE_FD), fd, size, flags
    result: tuple[Any, ...] = cuda.cuImportExternalMemory(desc)
    return result


def map_buffer(memory: Any, offset: int, size: int) -> tuple[Any, ...]:
    desc = cuda.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
    desc.offset, desc.size = offset, size
    result: tuple[Any, ...] = cuda.cuExternalMemoryGetMappedBuffer(memory, desc)
    return result


def import_semaphore(fd: int, kind: int) -> tuple[Any, ...]:
    desc = cuda.CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC()
    desc.type = Number(kind)
    desc.handle.fd = fd
    result: tuple[Any, ...] = cuda.cuImportExternalSemaphore(desc)
    return result


@contextmanager
def foreign_fd(what: str) -> Iterator[int]:
    """An fd that no driver has made; closed in the end, if it still is one."""
    other = -1
    if what == "null":
        fd = os.open("/dev/null", os.O_RDWR)
    elif what == "memfd":
        fd = os.memfd_create("nobody's", 0)
        os.ftruncate(fd, 1 << 16)
    elif what == "timeline":
        fd = forge()
    else:
        fd, other = os.pipe()
    mark = os.fstat(fd)
    yield fd
    if is_open(fd) and os.path.samestat(os.fstat(fd), mark):
        os.close(fd)
    if other >= 0:
        os.close(other)


# -- file descriptors --------------------------------------------------------------------------------------------------


def test_an_import_that_succeeds_closes_the_descriptor(party: Exporter) -> None:
    with party.create_memory(1 << 16) as theirs:
        fd = detached(theirs.export())
        memory = ok(import_memory(fd, theirs.size, flags=1 if theirs.dedicated else 0))
        assert not is_open(fd)
        ok(cuda.cuDestroyExternalMemory(memory))
    with party.create_semaphore(gi.Binary) as binary:
        fd = detached(binary.export())
        semaphore = ok(import_semaphore(fd, OPAQUE_FD))
        assert not is_open(fd)
        ok(cuda.cuDestroyExternalSemaphore(semaphore))


@pytest.mark.parametrize("what", ["null", "memfd", "pipe"])
def test_memory_of_nobody_fails_and_is_closed(context: Any, what: str) -> None:
    with foreign_fd(what) as fd:
        assert code_of(import_memory(fd, 1 << 16)) == UNKNOWN
        assert not is_open(fd)


@pytest.mark.parametrize("what", ["null", "memfd", "timeline"])
@pytest.mark.parametrize("kind", [OPAQUE_FD, TIMELINE_FD])
def test_a_semaphore_of_nobody_fails_and_is_open(context: Any, what: str, kind: int) -> None:
    with foreign_fd(what) as fd:
        assert code_of(import_semaphore(fd, kind)) == UNKNOWN
        assert is_open(fd)


# -- contexts ----------------------------------------------------------------------------------------------------------


def test_an_import_needs_a_context_and_leaves_it_open(party: Exporter) -> None:
    with party.create_memory(1 << 16) as theirs, party.create_semaphore(gi.Binary) as binary:
        memory_fd, semaphore_fd = detached(theirs.export()), detached(binary.export())
        found: dict[str, int] = {}

        def work() -> None:
            """A thread of its own: nobody has made a context current there."""
            found["current"] = int(ok(cuda.cuCtxGetCurrent()))
            found["memory"] = code_of(import_memory(memory_fd, theirs.size))
            found["semaphore"] = code_of(import_semaphore(semaphore_fd, OPAQUE_FD))
            found["stream"] = code_of(cuda.cuStreamCreate(1))
            found["event"] = code_of(cuda.cuEventCreate(2))
            found["allocation"] = code_of(cuda.cuMemAlloc(4096))

        elsewhere(work)
        assert found.pop("current") == 0
        assert len(found) == 5
        assert set(found.values()) == {INVALID_CONTEXT}
        for fd in (memory_fd, semaphore_fd):
            assert is_open(fd)
            os.close(fd)


def test_signal_and_wait_on_a_stream_need_no_context(party: Exporter) -> None:
    waiting, signalling = cuda.CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS(), cuda.CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS()
    with party.create_semaphore(gi.Binary) as theirs, stream_of() as stream:
        semaphore = ok(import_semaphore(detached(theirs.export()), OPAQUE_FD))
        results: list[int] = []

        def work() -> None:
            results.append(int(ok(cuda.cuCtxGetCurrent())))
            results.append(code_of(cuda.cuWaitExternalSemaphoresAsync([semaphore], [waiting], 1, stream)))
            results.append(code_of(cuda.cuSignalExternalSemaphoresAsync([semaphore], [signalling], 1, stream)))

        theirs.signal()
        elsewhere(work)
        assert results == [0, SUCCESS, SUCCESS]
        assert idle(stream)
        assert theirs.wait(timeout=LIMIT)
        ok(cuda.cuDestroyExternalSemaphore(semaphore))


def test_too_large_a_size_is_found_by_the_mapping(party: Exporter) -> None:
    # The real driver's objects are rounded up: to what, it does not say. So far beyond.
    with party.create_memory(1 << 16) as theirs:
        memory = ok(import_memory(detached(theirs.export()), 4 * theirs.size + 64 * MIB))
        assert code_of(map_buffer(memory, 0, 4 * theirs.size + 64 * MIB)) == INVALID_VALUE
        ok(cuda.cuMemFree(ok(map_buffer(memory, 0, theirs.size))))
        ok(cuda.cuDestroyExternalMemory(memory))


# -- memory ------------------------------------------------------------------------------------------------------------


def properties() -> Any:
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = 0
    prop.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return prop


FD_TYPE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


@contextmanager
def mapped(handle: Any, size: int) -> Iterator[Any]:
    pointer = ok(cuda.cuMemAddressReserve(size, 0, 0, 0))
    ok(cuda.cuMemMap(pointer, size, 0, handle, 0))
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(cuda.cuMemSetAccess(pointer, size, [access], 1))
    yield pointer
    ok(cuda.cuMemUnmap(pointer, size))
    ok(cuda.cuMemAddressFree(pointer, size))


def of_handle(handle: Any) -> tuple[int, int, int]:
    """Where its memory is, the ordinal there, and what it may be exported as."""
    found = ok(cuda.cuMemGetAllocationPropertiesFromHandle(handle))
    return int(found.location.type), int(found.location.id), int(found.requestedHandleTypes)


def test_what_is_known_of_an_import(context: Any) -> None:
    """The device that its memory is on, and no handle type; of memory made here both. As handle and as address."""
    allowed = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
    private = properties()
    private.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    shared, alone = (ok(cuda.cuMemCreate(2 * MIB, prop, 0)) for prop in (properties(), private))
    fd = int(ok(cuda.cuMemExportToShareableHandle(shared, FD_TYPE, 0)))
    again = ok(cuda.cuMemImportFromShareableHandle(fd, FD_TYPE))
    os.close(fd)
    for handle, kinds in ((shared, 1), (alone, 0), (again, 0)):
        assert of_handle(handle) == (1, 0, kinds)
        with mapped(handle, 2 * MIB) as address:
            assert int(ok(cuda.cuPointerGetAttribute(allowed, int(address) + MIB))) == kinds
            assert int(ok(cuda.cuMemRetainAllocationHandle(int(address) + MIB))) == int(handle)
            ok(cuda.cuMemRelease(handle))
    assert code_of(cuda.cuMemExportToShareableHandle(again, FD_TYPE, 0)) == INVALID_VALUE
    plain = ok(cuda.cuMemAlloc(4096))
    assert int(ok(cuda.cuPointerGetAttribute(allowed, plain))) == 0
    assert code_of(cuda.cuMemRetainAllocationHandle(plain)) == INVALID_VALUE
    ok(cuda.cuMemFree(plain))
    for handle in (shared, alone, again):
        ok(cuda.cuMemRelease(handle))


def test_the_granularities_of_multicast_need_no_object(primary: Any) -> None:
    """Nor a context. The minimum is the same for every size, and what is recommended a multiple of it."""
    if not ok(cuda.cuDeviceGetAttribute(Number(132), 0)):
        pytest.skip("the device has no multicast")
    flags = cuda.CUmulticastGranularity_flags
    prop = cuda.CUmulticastObjectProp()
    prop.numDevices = 2
    for kinds in (0, 1):
        for size in (1, 2 * MIB, 64 * MIB, 1024 * MIB):
            prop.handleTypes, prop.size = kinds, size
            minimum = ok(cuda.cuMulticastGetGranularity(prop, flags.CU_MULTICAST_GRANULARITY_MINIMUM))
            assert minimum == 2 * MIB
            recommended = ok(cuda.cuMulticastGetGranularity(prop, flags.CU_MULTICAST_GRANULARITY_RECOMMENDED))
            assert recommended % minimum == 0


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_pageable_copy_blocks_behind_a_wait_and_a_pinned_one_does_not(context: Any) -> None:
    device = ok(cuda.cuMemAlloc(4096))
    pageable = ctypes.create_string_buffer(4096)
    with stream_of() as stream, pinned() as flag, pinned() as host:
        ok(cuda.cuMemsetD8Async(device, 9, 4096, stream))
        ok(cuda.cuStreamWaitValue64(stream, flag, 1, GEQ))
        ok(cuda.cuMemcpyAsync(cuda.CUdeviceptr(host), device, 4096, stream))
        returned = threading.Event()

        def work() -> None:
            ok(cuda.cuCtxSetCurrent(context))
            ok(cuda.cuMemcpyDtoHAsync(pageable, device, 4096, stream))
            returned.set()

        with beside(work):
            blocked = not returned.wait(SHORT)
            word(flag).value = 1
        assert blocked
        assert idle(stream)
        assert pageable.raw == ctypes.string_at(host, 4096) == b"\x09" * 4096
    ok(cuda.cuMemFree(device))


@pytest.mark.parametrize(("flags", "stalls"), [(0, True), (1, False)])
def test_a_blocking_stream_stalls_the_default_stream(context: Any, flags: int, stalls: bool) -> None:
    device = ok(cuda.cuMemAlloc(4096))
    legacy, event = cuda.CUstream(1), ok(cuda.cuEventCreate(2))
    with stream_of(flags) as stream, pinned() as flag:
        ok(cuda.cuStreamWaitValue64(stream, flag, 1, GEQ))
        ok(cuda.cuMemsetD8Async(device, 1, 4096, legacy))
        ok(cuda.cuEventRecord(event, legacy))
        done = until(lambda: code_of(cuda.cuEventQuery(event)) == SUCCESS, SHORT if stalls else LIMIT)
        word(flag).value = 1
        assert done != stalls
        assert until(lambda: code_of(cuda.cuEventQuery(event)) == SUCCESS)
        assert idle(stream)
    ok(cuda.cuEventDestroy(event))
    ok(cuda.cuMemFree(device))


@pytest.mark.parametrize(
    ("condition", "value", "before", "passes"),
    [
        (GEQ, 5, 4, 5),
        (GEQ, 1, 2**63 + 1, 2**63),  # half the circle is ahead, the other half behind
        (EQ, 7, 8, 7),
        (AND, 0b0110, 0b1001, 0b0100),
        (NOR, 0xFF, 2**64 - 1, 0xFF),
    ],
)
def test_64_bit_waits_for_a_word(context: Any, condition: int, value: int, before: int, passes: int) -> None:
    with stream_of() as stream, pinned() as flag:
        word(flag).value = before
        ok(cuda.cuStreamWaitValue64(stream, flag, value, condition))
        ok(cuda.cuStreamWriteValue64(stream, flag + 64, 2**64 - 2, 0))
        early = idle(stream, SHORT)
        word(flag).value = passes
        late = idle(stream)
        assert (early, late) == (False, True)
        assert word(flag + 64).value == 2**64 - 2


# -- graphs ------------------------------------------------------------------------------------------------------------

GLOBAL = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
THREAD_LOCAL = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def end_invalid(stream: Any) -> None:
    assert int(ok(cuda.cuStreamIsCapturing(stream))) == 2
    assert code_of(cuda.cuStreamEndCapture(stream)) == CAPTURE_INVALIDATED
    assert int(ok(cuda.cuStreamIsCapturing(stream))) == 0


def test_asking_a_stream_in_a_capture_ends_it(context: Any) -> None:
    with stream_of() as stream:
        for ask in (cuda.cuStreamQuery, cuda.cuStreamSynchronize):
            ok(cuda.cuStreamBeginCapture(stream, RELAXED))
            assert code_of(ask(stream)) == CAPTURE_UNSUPPORTED
            end_invalid(stream)
        assert idle(stream)


def test_a_global_capture_forbids_what_is_unsafe_to_every_thread_but_relaxed_ones(context: Any) -> None:
    event = ok(cuda.cuEventCreate(2))
    found: list[int] = []

    def ask(mode: Any) -> None:
        ok(cuda.cuThreadExchangeStreamCaptureMode(mode))
        found.append(code_of(cuda.cuEventQuery(event)))

    with stream_of() as stream:
        for capture, asking, expected in (
            (GLOBAL, GLOBAL, CAPTURE_UNSUPPORTED),
            (GLOBAL, THREAD_LOCAL, SUCCESS),
            (GLOBAL, RELAXED, SUCCESS),
            (THREAD_LOCAL, GLOBAL, SUCCESS),
        ):
            found.clear()
            ok(cuda.cuStreamBeginCapture(stream, capture))
            elsewhere(ask, asking)
            assert found == [expected]
            if expected:
                end_invalid(stream)
            else:
                ok(cuda.cuGraphDestroy(ok(cuda.cuStreamEndCapture(stream))))
    ok(cuda.cuEventDestroy(event))
