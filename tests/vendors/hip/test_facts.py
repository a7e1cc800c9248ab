"""What AMD's HIP runtime does: each fact once, on the simulated runtime, on AMD's and, by an owner, on hardware.

Raw calls by ctypes; of gpuinterop only the other side's memory, and `facts.toml`, which has what one version does and
another does not. All else holds in each version that is named there. Files and lines here are those of ROCm/clr
f9f995c6, the release build of ROCm 6.3 (``hip_*`` in hipamd/src); a number is an issue or a pull request of the
repository named. What crashes AMD's runtime runs in a child process, and there the simulated one notes a violation.

Not here, because calls on this side of the runtime do not show it:

- Address ranges that come back before their commands retire end in a crash (platform/memory.cpp:427, rocm-systems
  #2980): a race, which comes and goes.
- Names of objects, Direct3D, timelines as OPAQUE_WIN32: Windows, where AMD has another implementation. What the
  simulated runtime makes of them is in ../test_descriptors.py.
- Fabric handles, tiled images, ``hipMemSetAccess`` of a part (rocm-systems #2667), caches: hardware.
- Pointers that are asked what is behind them, HIP IPC: test_sharing.py.
- hipDeviceGetUuid is not Vulkan's deviceUUID (ROCm/hipamd #50): the stand-in device has no Vulkan driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from tests.beside import beside
from tests.limits import LIMIT
from tests.programs import python
from tests.simulated.driver import Simulator, loaded

from ..parties import MODE, PARTIES, SIMULATED, open_party
from .runtime import (
    INVALID_VALUE,
    MIB,
    NO_DEVICE,
    NOT_READY,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    SUCCESS,
    Access,
    Location,
    Runtime,
    is_open,
    word,
)

SHORT = 0.1
"""And for what is not."""
SIZE = 65536
GTE, EQ, AND, NOR = range(4)
EVERY_BIT = 2**64 - 1
CONTEXT_IS_DESTROYED = 709
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901
BY_VALUE = 70100000
NON_BLOCKING = 1


@pytest.fixture(scope="module")
def party() -> Iterator[Any]:
    with open_party(PARTIES[0], gi.get_backend("hip").device(0)) as opened:
        yield opened


@pytest.fixture
def noted(request: pytest.FixtureRequest) -> Callable[[str], AbstractContextManager[Any]]:
    """What AMD's runtime takes without a word: the simulated one takes it and notes it."""
    if SIMULATED:
        simulator: Simulator = request.getfixturevalue("simulator")
        return simulator.expect_violation
    return lambda text: contextlib.nullcontext()


START = f"""
import ctypes, os
from tests.vendors.hip.runtime import *
GTE, EVERY_BIT, BY_VALUE, SIZE = {GTE}, {EVERY_BIT}, {BY_VALUE}, {SIZE}
hip = Runtime("libamdhip64.so")
"""


def child(program: str, **environment: Any) -> subprocess.CompletedProcess[str]:
    """Run a program that has the runtime as `hip`."""
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    return python("-c", START + textwrap.dedent(program), PYTHONPATH=path, **environment)


def printed(program: str, **environment: Any) -> list[str]:
    done = child(program, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def assert_it_dies(program: str, violation: str) -> None:
    """AMD's runtime ends the process; the simulated one says what would have."""
    if SIMULATED:
        violations = "from tests.simulated.driver import Simulator\nprint(*Simulator.attach('hip').violations())"
        done = child(f"{textwrap.dedent(program)}\n{violations}")
        assert violation in done.stdout, done.stdout + done.stderr
    else:
        done = child(program)
        assert done.returncode in (-signal.SIGABRT, -signal.SIGSEGV), done.stdout + done.stderr


def finishes(call: Callable[[], object], release: Callable[[], None], *, expected: bool) -> bool:
    """Whether a call returns before `release` is called; it has to behind it.

    One that should gets all the time that it takes; one that should not gets some to show it.
    """
    failed: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)
        done.set()

    with beside(work):
        early = done.wait(LIMIT if expected else SHORT)
        release()
    assert not failed, failed
    return early


# -- devices, streams, errors ------------------------------------------------------------------------------------------


def test_without_a_device() -> None:
    """hipInit says 100, as all that needs a device does; the version is there all the same (5.2.3: 101)."""
    program = """
    print(hip("hipInit", 0), hip("hipGetDeviceCount", ctypes.byref(ctypes.c_int())), hip("hipDeviceSynchronize"))
    print(hip.number("hipRuntimeGetVersion") >= 60000000)
    """
    found = printed(program, HIP_VISIBLE_DEVICES="-1", GPUINTEROP_SIM_DEVICES="0")
    assert found == [*[str(NO_DEVICE)] * 3, "True"]


def test_attributes(runtime: Runtime) -> None:
    """Virtual memory (89) and stream words (10013); a number that the runtime does not know is refused."""
    assert runtime.attribute(89) == runtime.attribute(10013) == 1
    assert runtime("hipDeviceGetAttribute", ctypes.byref(ctypes.c_int()), 9999, 0) == INVALID_VALUE


def test_there_is_no_multicast_and_no_mipmapped_array(runtime: Runtime) -> None:
    """HIPIFY marks the first unsupported; ROCm/hip #3779."""
    for name in ("hipMulticastCreate", "hipMulticastAddDevice", "hipMulticastBindMem"):
        assert not runtime.has(name)
    if not os.environ.get("GPUINTEROP_TEST_HIP_MIPMAP"):  # else this is our library that has them
        assert not runtime.has("hipExternalMemoryGetMappedMipmappedArray")
    assert runtime.has("hipFreeMipmappedArray")


def test_not_ready_is_the_threads_error_before_7(runtime: Runtime) -> None:
    """hip_internal.hpp:171. Others ask for it behind launches of their own: who queries takes it back."""
    expected = NOT_READY if runtime.number("hipRuntimeGetVersion") < 70000000 else SUCCESS
    with runtime.stream() as stream, runtime.pinned() as place:
        runtime.ok("hipStreamWaitValue64", stream, place, 1, GTE, EVERY_BIT)
        found = runtime("hipStreamQuery", stream), runtime("hipGetLastError")
        word(place).value = 1
        runtime.ok("hipStreamSynchronize", stream)
        assert found == (NOT_READY, expected)


@pytest.mark.parametrize("call", ["hipStreamQuery", "hipStreamIsCapturing"])
def test_a_stream_that_is_none(call: str, holds: dict[str, bool]) -> None:
    """hip_stream.cpp, hip::isValid: the context is destroyed (709, and not 400). hipStreamGetDevice always asks it."""
    program = """
    stream, place = 0x12340, ctypes.c_size_t()
    print(hip("hipStreamGetDevice", stream, ctypes.byref(place)), flush=True)
    """
    asked = f'print(hip("{call}", stream, ctypes.byref(place)))'
    assert printed(program) == [str(CONTEXT_IS_DESTROYED)]
    if not SIMULATED and holds["another pointer than a stream's is refused"]:
        assert printed(textwrap.dedent(program) + asked) == [str(CONTEXT_IS_DESTROYED)] * 2
    else:
        assert_it_dies(textwrap.dedent(program) + asked, "no live stream")


def test_the_first_query_of_what_is_done_says_that_it_is_not(runtime: Runtime) -> None:
    """hip_stream.cpp:522: it enqueues the marker that tells. A synchronisation and an event bring one as well."""
    with runtime.stream() as stream, runtime.pinned() as place:
        assert runtime("hipStreamQuery", stream) == SUCCESS
        event = runtime.object("hipEventCreateWithFlags", 2)
        for marker in (None, "hipStreamSynchronize", "hipDeviceSynchronize", "hipEventRecord"):
            word(place).value = 0
            runtime.ok("hipStreamWriteValue64", stream, place, 5, 0)
            if marker == "hipEventRecord":
                runtime.ok(marker, event, stream)
            elif marker:
                runtime.ok(marker, *([stream] if marker == "hipStreamSynchronize" else []))
            until(lambda: word(place).value == 5)
            if marker == "hipEventRecord":
                until(lambda: runtime("hipEventQuery", event) == SUCCESS)
            assert runtime("hipStreamQuery", stream) == (SUCCESS if marker else NOT_READY)
            until(lambda: runtime("hipStreamQuery", stream) == SUCCESS)
        runtime.ok("hipEventDestroy", event)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("whose", ["destroyed", "of a thread that ended"])
def test_an_event_is_queried_after_its_stream_was_destroyed(whose: str) -> None:
    """hip_event.cpp:439, 461: the stream is read, which is freed memory by then (ROCm/clr #157).

    A thread's own default stream (2) is deleted when the thread ends (hip_stream.cpp:216).
    """
    program = """
    event = hip.object("hipEventCreateWithFlags", 2)
    def work(stream):
        hip.ok("hipEventRecord", event, stream)
    if WHOSE == "destroyed":
        stream = hip.object("hipStreamCreateWithFlags", 1)
        work(stream)
        hip.ok("hipStreamDestroy", stream)
    else:
        import threading
        thread = threading.Thread(target=work, args=(2,))
        thread.start()
        thread.join()
        while os.path.exists(f"/proc/self/task/{thread.native_id}"):
            pass
    hip("hipEventQuery", event)
    hip("hipEventSynchronize", event)
    """.replace("WHOSE", repr(whose))
    if SIMULATED and whose != "destroyed":
        pytest.skip("the simulated runtime's streams of threads stay")
    if SIMULATED:
        assert_it_dies(program, "is asked for after its stream was destroyed")
        return
    if not loaded("/libasan.so"):
        pytest.skip("what reads freed memory shows where AMD's runtime was built with AddressSanitizer")
    # A thread that ends has an alternate stack of AMD's, which AddressSanitizer would take for its own.
    done = child(program, ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":use_sigaltstack=0")
    assert "heap-use-after-free" in done.stderr, done.stdout + done.stderr


@pytest.mark.skipif(SIMULATED, reason="what a stream of the simulated runtime was given is its own")
def test_a_map_spoils_what_the_default_stream_has_still_to_do(holds: dict[str, bool]) -> None:
    """rocvirtual.cpp:568 with 130: behind an event's marker the wait for the stream is none, and the memory of the
    arguments of its kernels is used again (1195). hipMemMap waits so (hip_vm.cpp:269).
    """
    spoils = holds["a map spoils the default stream"]
    program = """
    place = hip.object("hipHostMalloc", 4096, 0)
    ctypes.memset(place, 0, 4096)
    event = hip.object("hipEventCreateWithFlags", 2)
    handle = hip.object("hipMemCreate", 2 << 20, ctypes.byref(hip.properties()), 0)
    address = hip.object("hipMemAddressReserve", 2 << 20, 0, 0, 0)
    write = lambda at: [hip.ok("hipStreamWriteValue64", 0, place + at + 8 * n, 1, 0) for n in range(8)]
    written = lambda at: sum(word(place + at + 8 * n).value for n in range(8))
    stream = hip.object("hipStreamCreateWithFlags", 1)  # the default stream waits for it, by no kernel of its own
    hip.ok("hipStreamWaitValue64", stream, place, 1, GTE, EVERY_BIT)
    hip.ok("hipEventRecord", event, stream)
    hip.ok("hipStreamWaitEvent", 0, event, 0)
    write(64)
    hip.ok("hipEventRecord", event, 0)
    import threading
    release = lambda: setattr(word(place), "value", 1)
    threading.Timer(0.2, release).start()  # where the map waits, it ends with this
    hip.ok("hipMemMap", address, 2 << 20, 0, handle, 0)
    print(word(place).value)
    write(128)
    release()
    hip.ok("hipStreamSynchronize", 0)
    print(written(64) < 8)
    print(written(128))
    """
    assert printed(program) == (["0", "True", "8"] if spoils else ["1", "False", "8"])


BLOCKED = {
    "hipFree": (True, True),
    "hipHostUnregister": (True, True),
    "hipStreamDestroy": (True, True),
    "hipMemUnmap": (True, False),
    "hipMemcpy": (True, False),
    "hipMemset": (False, False),
    "hipMalloc": (False, False),
    "hipHostRegister": (False, False),
    "hipStreamCreateWithFlags": (False, False),
    "hipImportExternalMemory": (False, False),  # and hipDestroyExternalMemory
    "hipExternalMemoryGetMappedBuffer": (False, False),
    "hipMemCreate": (False, False),
    "hipMemMap": (None, False),
}
"""Whether a call blocks behind a blocking stream that waits, and behind one that is not; None: by `facts.toml`."""


@pytest.mark.parametrize("flags", [0, NON_BLOCKING])
@pytest.mark.parametrize("call", BLOCKED)
def test_what_blocks_behind_a_stream_that_waits(
    runtime: Runtime, party: Any, call: str, flags: int, holds: dict[str, bool]
) -> None:
    """Measured. hip_memory.cpp:79 (hipFree), hip_vm.cpp:353 (hipMemUnmap: the null stream).

    The stream has a high priority: else it may share a hardware queue with the null stream, which then stalls.
    """
    pages = ctypes.create_string_buffer(4 * 4096)
    host = ctypes.addressof(pages) + 4095 & ~4095
    prop, access, made = runtime.properties(), Access(where=Location(1, 0), flags=3), ctypes.c_size_t()
    handle = runtime.object("hipMemCreate", 2 * MIB, ctypes.byref(prop), 0)
    ranges = [runtime.object("hipMemAddressReserve", 2 * MIB, 0, 0, 0) for _ in range(2)]
    runtime.ok("hipMemMap", ranges[0], 2 * MIB, 0, handle, 0)
    runtime.ok("hipMemSetAccess", ranges[0], 2 * MIB, ctypes.byref(access), 1)
    allocated = runtime.object("hipMalloc", 4096)
    runtime.ok("hipHostRegister", host, 4096, 3)
    with (
        party.create_memory(SIZE) as theirs,
        theirs.export() as exported,
        runtime.imported(party) as (_, memory),
        runtime.pinned() as place,
    ):
        address = runtime.mapped(memory, 0, SIZE)
        stream = runtime.object("hipStreamCreateWithPriority", flags, -1)
        runtime.ok("hipStreamWaitValue64", stream, place, 1, GTE, EVERY_BIT)

        extra: list[int] = []

        def destroy() -> None:
            other = runtime.import_fd(exported.fd, SIZE)[1]
            runtime.ok("hipDestroyExternalMemory", other)

        calls: dict[str, Callable[[], object]] = {
            "hipFree": lambda: runtime.ok("hipFree", address),
            "hipHostUnregister": lambda: runtime.ok("hipHostUnregister", host),
            "hipStreamDestroy": lambda: runtime.ok("hipStreamDestroy", stream),
            "hipMemUnmap": lambda: runtime.ok("hipMemUnmap", ranges[0], 2 * MIB),
            "hipMemcpy": lambda: runtime.ok("hipMemcpy", pages, allocated, 64, 2),
            "hipMemset": lambda: runtime.ok("hipMemset", allocated, 1, 64),
            "hipMalloc": lambda: extra.append(runtime.object("hipMalloc", 4096)),
            "hipHostRegister": lambda: runtime.ok("hipHostRegister", host + 8192, 4096, 3),
            "hipStreamCreateWithFlags": lambda: extra.append(runtime.object("hipStreamCreateWithFlags", flags)),
            "hipImportExternalMemory": destroy,
            "hipExternalMemoryGetMappedBuffer": lambda: runtime.mapped(memory, 4096, 16),
            "hipMemCreate": lambda: runtime.ok("hipMemCreate", ctypes.byref(made), 2 * MIB, ctypes.byref(prop), 0),
            "hipMemMap": lambda: runtime.ok("hipMemMap", ranges[1], 2 * MIB, 0, handle, 0),
        }
        blocks = BLOCKED[call][flags]
        if blocks is None:
            blocks = holds["a map waits for blocking streams"]
        assert finishes(calls[call], lambda: setattr(word(place), "value", 1), expected=not blocks) is not blocks
        if call != "hipStreamDestroy":
            runtime.ok("hipStreamSynchronize", stream)
            runtime.ok("hipStreamDestroy", stream)
        if call == "hipExternalMemoryGetMappedBuffer":
            runtime.ok("hipFree", address + 4096)
        if call != "hipFree":
            runtime.ok("hipFree", address)
        for one in extra:
            runtime.ok("hipFree" if call == "hipMalloc" else "hipStreamDestroy", one)
    if call == "hipHostRegister":
        runtime.ok("hipHostUnregister", host + 8192)
    if call != "hipHostUnregister":
        runtime.ok("hipHostUnregister", host)
    if call != "hipMemUnmap":
        runtime.ok("hipMemUnmap", ranges[0], 2 * MIB)
    if call == "hipMemMap":
        runtime.ok("hipMemUnmap", ranges[1], 2 * MIB)
    if made.value:
        runtime.ok("hipMemRelease", made.value)
    for address in ranges:
        runtime.ok("hipMemAddressFree", address, 2 * MIB)
    runtime.ok("hipMemRelease", handle)
    runtime.ok("hipFree", allocated)


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread", "relaxed"])
def test_to_synchronize_a_device_ends_every_capture(runtime: Runtime, mode: int) -> None:
    """hip_internal.hpp:225. Whatever the mode; hipFree keeps to it."""
    with runtime.stream() as stream:
        runtime.ok("hipStreamBeginCapture", stream, mode)
        assert runtime("hipDeviceSynchronize") == CAPTURE_UNSUPPORTED
        assert runtime("hipStreamEndCapture", stream, ctypes.byref(ctypes.c_size_t())) == CAPTURE_INVALIDATED


def test_a_capture_records_no_words(runtime: Runtime) -> None:
    """hip_stream_ops.cpp:26: a word is written at once."""
    with runtime.stream() as stream, runtime.pinned() as place:
        runtime.ok("hipStreamBeginCapture", stream, 1)
        runtime.ok("hipStreamWriteValue64", stream, place, 77, 0)
        until(lambda: word(place).value == 77)
        graph = ctypes.c_size_t()
        runtime.ok("hipStreamEndCapture", stream, ctypes.byref(graph))
        runtime.ok("hipGraphDestroy", graph.value)


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "value", "mask", "before", "after"),
    [
        (GTE, 5, EVERY_BIT, 4, 6),
        (GTE, 2**63 + 5, EVERY_BIT, 0, 2**64 - 1),  # unsigned: not CUDA's circle, half of which is ahead
        (GTE, 0x10, 0xF0, 0x0F, 0x1F),
        (EQ, 5, EVERY_BIT, 6, 5),
        (AND, 4, EVERY_BIT, 3, 12),
        (NOR, 0xFF, EVERY_BIT, EVERY_BIT, 0xFF),
    ],
)
def test_a_stream_waits_for_a_word(
    runtime: Runtime, condition: int, value: int, mask: int, before: int, after: int
) -> None:
    """rocclr's kernel __amd_streamOpsWait, on memory of the host, not signal memory."""
    with runtime.stream() as stream, runtime.pinned() as place:
        word(place).value = before
        runtime.ok("hipStreamWaitValue64", stream, place, value, condition, mask)
        runtime.ok("hipStreamWriteValue64", stream, place + 8, 77, 0)
        time.sleep(SHORT)
        early = runtime("hipStreamQuery", stream), word(place + 8).value
        word(place).value = after
        runtime.ok("hipStreamSynchronize", stream)
        assert early == (NOT_READY, 0)
        assert word(place + 8).value == 77


# -- external memory ---------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Runtime, int, int, int], None]] = {
    "hipMemsetD8Async": lambda hip, stream, to, host: hip.ok("hipMemsetD8Async", to, 0x77, 8, stream),
    "hipMemsetD32Async": lambda hip, stream, to, host: hip.ok("hipMemsetD32Async", to, 0x77777777, 2, stream),
    "hipMemcpyAsync": lambda hip, stream, to, host: hip.ok("hipMemcpyAsync", to, host, 8, 1, stream),
    "hipStreamWriteValue64": lambda hip, stream, to, host: hip.ok(
        "hipStreamWriteValue64", stream, to, 0x7777777777777777, 0
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_at_an_offset_work_lands_on_the_first_bytes(
    runtime: Runtime, party: Any, operation: str, holds: dict[str, bool]
) -> None:
    """hip_memory.cpp:155: the place that is mapped is taken for the object's beginning. Nothing says so."""
    offset = 4096
    with runtime.imported(party) as (theirs, memory), runtime.stream() as stream, runtime.pinned() as host:
        ctypes.memset(host, 0x77, 8)
        theirs.write(0, bytes(SIZE))
        address = runtime.mapped(memory, offset, 4096)
        OPERATIONS[operation](runtime, stream, address, host)
        runtime.ok("hipStreamSynchronize", stream)
        landed = theirs.read(0, SIZE).find(b"\x77" * 8)
        assert landed == (0 if holds["work at an offset lands on the first bytes"] else offset)
        runtime.ok("hipFree", address)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_behind_the_address_of_the_whole_object_work_lands_where_it_is_sent(
    runtime: Runtime, party: Any, operation: str
) -> None:
    """Mapped once, at offset 0: what we add ourselves is looked up within the object (device.cpp, FindMemObj)."""
    with runtime.imported(party) as (theirs, memory), runtime.stream() as stream, runtime.pinned() as host:
        ctypes.memset(host, 0x77, 8)
        address = runtime.mapped(memory, 0, SIZE)
        for offset in (0, SIZE - 8, *(8 * at for at in random.Random(7).sample(range(SIZE // 8), 98))):
            theirs.write(0, bytes(SIZE))
            OPERATIONS[operation](runtime, stream, address + offset, host)
            runtime.ok("hipStreamSynchronize", stream)
            assert theirs.read(0, SIZE) == bytes(offset) + b"\x77" * 8 + bytes(SIZE - 8 - offset)
        runtime.ok("hipFree", address)


def mappings_of(fd: int) -> int:
    """How often this process has the file mapped."""
    number = str(os.fstat(fd).st_ino)
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return sum(line.split()[4] == number for line in lines)


def test_the_descriptor_is_never_closed(runtime: Runtime, party: Any) -> None:
    """Neither on success nor on failure, where hipErrorOutOfMemory says nothing of memory."""
    with party.create_memory(8192) as theirs, theirs.export() as handle:
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
    for fd in (99999, -1):
        assert runtime.import_fd(fd, 4096)[0] == OUT_OF_MEMORY


def test_a_free_leaves_imported_memory_where_it_is(runtime: Runtime, party: Any) -> None:
    """Only hipFree and hipDestroyExternalMemory together release it; the backend calls them in this order."""
    with party.create_memory(SIZE) as theirs, theirs.export() as handle:
        mapped = mappings_of(handle.fd)
        _, memory = runtime.import_fd(handle.fd, SIZE)
        address = runtime.mapped(memory, 0, SIZE)
        runtime.ok("hipFree", address)
        assert runtime.mapped(memory, 0, SIZE) == address
        runtime.ok("hipFree", address)
        runtime.ok("hipDestroyExternalMemory", memory)
        assert mappings_of(handle.fd) == mapped


@pytest.mark.parametrize("busy", [0, 1])
def test_a_free_waits_for_device_0(
    runtime: Runtime, party: Any, busy: int, noted: Callable[[str], AbstractContextManager[Any]]
) -> None:
    """hip_memory.cpp:79: of imported memory it waits for the work of device 0, whichever has imported it."""
    if runtime.number("hipGetDeviceCount") < 2:
        pytest.skip("there is one device")
    with runtime.pinned() as place:
        runtime.ok("hipSetDevice", 1)
        with runtime.imported(party) as (_, memory):
            address = runtime.mapped(memory, 0, SIZE)
            runtime.ok("hipSetDevice", busy)
            with runtime.stream() as stream:
                runtime.ok("hipStreamWaitValue64", stream, place, 1, GTE, EVERY_BIT)
                free, release = (
                    lambda: runtime.ok("hipFree", address),
                    lambda: setattr(word(place), "value", 1),
                )
                assert finishes(free, release, expected=bool(busy)) is bool(busy)
                runtime.ok("hipStreamSynchronize", stream)
        runtime.ok("hipSetDevice", 0)


# -- semaphores --------------------------------------------------------------------------------------------------------


def test_no_semaphores_on_linux() -> None:
    """hip_memory.cpp:177-208; rocdevice.hpp:258: builds with assertions abort (ROCm/clr #72), the others say 801.

    Types above D3D12Fence are refused before, although the enum has them, and so is the descriptor 0. The end of one
    aborts where an import does (rocdevice.hpp:264); the others say success, of whatever it is.
    """
    calls = {kind: f"hip.import_semaphore({kind}, fd=fd)[0]" for kind in range(11)}
    calls[11] = 'hip("hipDestroyExternalSemaphore", 12345)'
    says = {kind: NOT_SUPPORTED if 1 <= kind <= 4 else INVALID_VALUE for kind in range(11)} | {11: SUCCESS}

    def run(kinds: list[int], aborts: str) -> tuple[int, str]:
        """Of the simulated runtime the variable says whether it has assertions."""
        lines = (f"print({calls[kind]}, is_open(fd), flush=True)\n" for kind in kinds)
        done = child('fd = os.memfd_create("semaphore")\n' + "".join(lines), GPUINTEROP_SIM_HIP_ABORT=aborts)
        return done.returncode, done.stdout

    def answers(kinds: list[int]) -> tuple[int, str]:
        return 0, "".join(f"{says[kind]} True\n" for kind in kinds)

    for aborts in "01":
        asserts = run([1], aborts)[0] == -signal.SIGABRT
        assert asserts == (aborts == "1") or not SIMULATED
        refused = [kind for kind in says if says[kind] == INVALID_VALUE]
        if asserts:
            assert run(refused, aborts) == answers(refused)
            assert run([4], aborts) == run([11], aborts) == (-signal.SIGABRT, "")
        else:
            assert run([*says], aborts) == answers([*says])


# -- virtual memory ----------------------------------------------------------------------------------------------------


def test_a_failed_map_says_success() -> None:
    """hip_vm.cpp:252-272: the command's end is not looked at. hipMemSetAccess is the first to fail."""
    program = """
    made = hip.object("hipMemCreate", 2 * MIB, ctypes.byref(hip.properties()), 0)
    address = hip.object("hipMemAddressReserve", 4 * MIB, 0, 0, 0)
    print(hip("hipMemMap", address, 4 * MIB, 0, made, 0))
    access = Access(where=Location(1, 0), flags=3)
    print(hip("hipMemSetAccess", address, 4 * MIB, ctypes.byref(access), 1), flush=True)
    os._exit(0)
    """
    assert printed(program) == [str(SUCCESS), str(INVALID_VALUE)]


@pytest.mark.parametrize(
    ("call", "violation"), [("hipMemUnmap", "is not mapped so"), ("hipMemAddressFree", "was not reserved so")]
)
def test_the_end_of_what_is_not_there(call: str, violation: str, holds: dict[str, bool]) -> None:
    """hip_vm.cpp:36, 353: the null pointer that the search gave is used."""
    program = f'print(hip("{call}", 0x123456000000, 2 * MIB))'
    if not SIMULATED and call == "hipMemUnmap" and holds["what is not mapped is unmapped with an error"]:
        assert printed(program) == [str(INVALID_VALUE)]
    else:
        assert_it_dies(program, violation)


@pytest.mark.skipif(SIMULATED or MODE == "real", reason="the simulated runtime gives them back; hardware does not tell")
def test_whether_imported_memory_is_given_back(holds: dict[str, bool]) -> None:
    """hip_vm.cpp:246, hip_vm.hpp:41: an import is taken out of the map in which its release looks (ROCm/clr #193)."""
    program = """
    made = hip.object("hipMemCreate", 2 * MIB, ctypes.byref(hip.properties()), 0)
    fd = ctypes.c_int(-1)
    hip.ok("hipMemExportToShareableHandle", ctypes.byref(fd), made, 1, 0)
    shared = fd.value if hip.number("hipRuntimeGetVersion") >= BY_VALUE else ctypes.addressof(fd)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        hip.ok("hipMemRelease", hip.object("hipMemImportFromShareableHandle", shared, 1))
    print(len(os.listdir("/proc/self/fd")) - before)
    """
    assert printed(program) == ["10" if holds["imports are kept"] else "0"]


@pytest.mark.parametrize("version", [70053211, BY_VALUE] if SIMULATED else [0])
def test_the_descriptor_by_pointer_and_by_value(version: int) -> None:
    """A pointer to it before 7.1, itself from then on (torch tells them apart so); it stays the caller's."""
    program = """
    made = hip.object("hipMemCreate", 2 << 20, ctypes.byref(hip.properties()), 0)
    fd = ctypes.c_int(-1)
    hip.ok("hipMemExportToShareableHandle", ctypes.byref(fd), made, 1, 0)
    by_value = hip.number("hipRuntimeGetVersion") >= BY_VALUE
    other = ctypes.c_size_t()
    passed = fd.value if by_value else ctypes.addressof(fd)
    print(hip("hipMemImportFromShareableHandle", ctypes.byref(other), passed, 1), is_open(fd.value))
    """
    environment = {"GPUINTEROP_SIM_HIP_VERSION": str(version)} if SIMULATED else {}
    assert printed(program, **environment) == [str(SUCCESS), "True"]
