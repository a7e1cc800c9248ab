"""Arrays of other libraries, shared with another process: what the driver is asked and given, and how it fails.

The memory is made by ctypes. A simulated driver's is the CPU's, so both processes read and write it by its address, and
not through what is tested.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import shutil
import subprocess
import sys
import threading
import weakref
from contextlib import ExitStack
from typing import IO, Any, Final, cast

import pytest

import gpuinterop as gi
from gpuinterop.capabilities import Operation
from tests.simulated.driver import Simulator

from .foreign_memory import STEP, Foreign, Kind, current, make, memory
from .parties import SEVERAL
from .table import VENDOR
from .test_foreign_memory import CUDA

SIZE: Final = 3 * STEP
SHARED: Final[tuple[Kind, ...]] = ("legacy", "vmm") if CUDA else ("legacy",)

NAMESPACES = ("unshare", "--pid", "--fork", "--net", "--ipc", "--mount-proc")

READER = """
import ctypes, json, sys
import gpuinterop as gi
from tests.simulated.driver import Simulator
from tests.vendors.table import VENDOR
opens = VENDOR.call("IpcOpenMemHandle"), VENDOR.call("MemImportFromShareableHandle")
driver, line = Simulator.attach(VENDOR.name), sys.stdin.readline()
while line:
    try:
        with gi.attach(bytes.fromhex(line), timeout=20) as shared:
            views = {name: shared[name] for name in shared}
            seen = {name: ctypes.string_at(view.ptr, 4).hex() for name, view in views.items()}
            for view in views.values():
                ctypes.memset(view.ptr, 0xAB, 1)
            del views
        gi.device().drain(20)
        print(json.dumps([seen, sum(map(driver.calls, opens))]), flush=True)
    except gi.GpuInteropError as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
    line = sys.stdin.readline()
print(json.dumps(driver.left()), flush=True)
"""


def in_namespaces() -> tuple[str, ...]:
    if not shutil.which("unshare") or subprocess.run([*NAMESPACES, "true"], check=False).returncode:
        pytest.skip("needs the right to make namespaces")
    return NAMESPACES


class Reader:
    """Another process, which attaches descriptors one after the other."""

    def __init__(self, simulator: Simulator, *before: str) -> None:
        environment = simulator.environment(GPUINTEROP_BACKEND=VENDOR.name)
        self.process = subprocess.Popen(
            [*before, sys.executable, "-X", "faulthandler", "-c", READER],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        left, _nothing = self.process.communicate(timeout=20)
        assert json.loads(left) == {}, "the reader's driver has something left"

    def attach(self, descriptor: bytes) -> Any:
        """What it sees of each array, and how often it has opened memory; or the error."""
        assert self.process.stdin
        print(descriptor.hex(), file=self.process.stdin, flush=True)
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())


def parts(foreign: Foreign, count: int) -> dict[str, Foreign]:
    """Arrays all over the memory, each of 512 bytes."""
    return {str(one): foreign.part(one * (SIZE // count) + 256, 512) for one in range(count)}


@pytest.mark.parametrize("kind", SHARED)
def test_many_arrays_of_one_allocation_are_opened_once(simulator: Simulator, kind: Kind) -> None:
    with memory(kind, SIZE) as it, Reader(simulator) as reader:
        ctypes.memset(it.ptr, 7, SIZE)
        arrays = parts(it, 60)
        with gi.share(arrays) as shared:
            pieces = 1 if kind == "legacy" else 3
            assert shared.exposes.startswith(f"{pieces} allocation(s) of {SIZE:,} bytes")
            seen, opened = reader.attach(bytes(shared))
            assert (set(seen.values()), opened) == ({"07070707"}, pieces)
            assert all(ctypes.string_at(one.ptr, 2) == b"\xab\x07" for one in arrays.values())
            assert reader.attach(bytes(shared))[1] == 2 * pieces, "it had detached"
        shared.close(timeout=20)


def test_transports_mix(simulator: Simulator) -> None:
    device = gi.device()
    with memory("legacy", SIZE) as it, device.allocate(4096) as ours, Reader(simulator) as reader:
        mine = ours.buffer.view(4096)
        with gi.share({"theirs": it.part(64, 64), "ours": mine}) as shared:
            assert shared.transport == "IpcMemHandle, VmmFd"
            assert set(reader.attach(bytes(shared))[0]) == {"theirs", "ours"}
            assert ctypes.string_at(mine.ptr, 1) == ctypes.string_at(it.ptr + 64, 1) == b"\xab"
        shared.close(timeout=20)


def test_the_old_name_of_a_transport_warns() -> None:
    with ExitStack() as scope:
        shared = scope.enter_context(gi.share(scope.enter_context(gi.device().allocate(64)).buffer.view(64)))
        told = scope.enter_context(pytest.warns(DeprecationWarning, match="way is now transport"))
        assert shared.way == shared.transport == "VmmFd"
    assert [one.filename for one in told] == [__file__]


@pytest.mark.parametrize("kind", ["pool", "managed"])
def test_what_does_not_travel_is_refused_in_words(simulator: Simulator, kind: Kind) -> None:
    """Nothing is tried; a copy travels."""
    exported = simulator.calls(VENDOR.call("IpcGetMemHandle"))
    with memory(kind, 4096) as it, Reader(simulator) as reader:
        ctypes.memset(it.ptr, 9, 4096)
        if CUDA or kind == "managed":  # before 7.1 AMD's runtime opens a pool's memory
            with pytest.raises(gi.UnsupportedError, match="export_array") as caught:
                gi.share(it)
            assert "copy=True" in str(caught.value)
            assert caught.value.capability.operation is Operation.EXPORT_ARRAY
        with gi.share(it, copy=True) as shared:
            assert reader.attach(bytes(shared)) == [{"": "09090909"}, 1]
            assert ctypes.string_at(shared.view.ptr, 1) == b"\xab"
            assert ctypes.string_at(it.ptr, 1) == b"\x09"
        shared.close(timeout=20)
    assert simulator.calls(VENDOR.call("IpcGetMemHandle")) == exported


def test_memory_that_was_freed_is_not_shared_on(simulator: Simulator) -> None:
    """Another allocation at its address is another."""
    with current(), Reader(simulator) as reader:
        it = make("legacy", SIZE)
        with gi.share(it) as shared:
            it.free()
            again = make("legacy", SIZE)
            assert reader.attach(bytes(shared))[0] == "ResourceClosedError"
            again.free()
        shared.close(timeout=20)


def test_arrays_that_cannot_be_shared(simulator: Simulator) -> None:
    with memory("legacy", SIZE) as it:
        stored = it.__cuda_array_interface__

        def array(**more: Any) -> Any:
            return type("Array", (), {"__cuda_array_interface__": stored | more})()

        for wrong, words in (
            (array(shape=(4, 4), strides=(1, 1)), "some overlap"),
            (array(shape=(4, 4), strides=(0, 1)), "some overlap"),
            (object(), "expected an array with __dlpack__"),
            ({}, "expected an array or more"),
            ({1: it}, "expected names as keys"),
        ):
            with pytest.raises(gi.InvalidArgumentError, match=words):
                gi.share(wrong)
        with pytest.raises(gi.DeviceNotFoundError, match=r"^array: expected memory .*, got 0x1000 by .*; devices: "):
            gi.share(array(data=(4096, False)))
        shared, stream = gi.share(array(data=(it.ptr, True))), gi.device().create_stream()
        with shared, stream, pytest.raises(gi.InvalidArgumentError, match="immutable"):
            assert shared.view.__cuda_array_interface__["data"] == (it.ptr, True)
            shared.acquire(stream)
        shared.close(timeout=20)


@pytest.mark.skipif(not SEVERAL, reason="needs two devices")
def test_arrays_of_two_devices_are_two_shares(simulator: Simulator) -> None:
    with (
        memory("legacy", SIZE) as first,
        memory("legacy", SIZE, 1) as second,
        pytest.raises(gi.InvalidArgumentError) as caught,
    ):
        gi.share({"first": first, "second": second})
    assert "expected arrays of one device" in str(caught.value)


@pytest.mark.skipif(not CUDA, reason="captures are CUDA's")
def test_a_capture_is_refused(simulator: Simulator) -> None:
    device = gi.device()
    with memory("legacy", SIZE) as it, gi.share(it) as shared, device.create_stream() as stream:
        with stream.capture() as graph, pytest.raises(gi.InvalidArgumentError, match="captured"):
            shared.acquire(stream)
        graph.close()
        shared.acquire(stream)
        shared.release(stream)
        stream.synchronize(20)
    shared.close(timeout=20)


class Theirs:
    """Another library's stream."""

    def __init__(self, stream: gi.Stream) -> None:
        self.cuda_stream = stream.ptr


def test_a_stream_is_resolved_once(simulator: Simulator) -> None:
    """From the second call on an acquire and a release are each one look for a capture, and at most one operation."""
    device, counted = (
        gi.device(),
        (*map(VENDOR.call, ("StreamIsCapturing", "StreamWaitValue64", "StreamWriteValue64")),),
    )
    with (
        memory("legacy", SIZE) as it,
        gi.share(it) as shared,
        device.create_stream() as ours,
        gi.attach(bytes(shared)) as attached,
    ):
        theirs = Theirs(ours)
        kept = weakref.ref(theirs)
        for arrays in (shared, attached):
            arrays.acquire(theirs)
            arrays.release(theirs)
        del theirs
        assert kept() is not None, "its number could be another's"
        ours.synchronize(20)
        for arrays in (shared, attached):
            before = [simulator.calls(call) for call in counted]
            arrays.acquire(Theirs(ours))
            arrays.release(Theirs(ours))
            asked, waits, writes = (simulator.calls(call) - was for call, was in zip(counted, before, strict=True))
            ours.synchronize(20)
            assert (asked, waits <= 1, writes) == (2, True, 1)
    shared.close(timeout=20)
    assert kept() is None


@pytest.mark.skipif(not SEVERAL, reason="needs two devices")
def test_a_stream_of_another_device_is_refused_before_anything_changes(simulator: Simulator) -> None:
    with memory("legacy", SIZE) as it, gi.share(it) as shared, gi.device().create_stream() as stream:
        host = gi.get_backend("host").device().create_stream()
        with host, gi.device(1).create_stream() as other:
            for wrong in (other, host):
                with pytest.raises(gi.InvalidArgumentError, match="use a stream of that device"):
                    shared.acquire(wrong)
        shared.acquire(stream)
        shared.release(stream)
        stream.synchronize(20)
    shared.close(timeout=20)


EXPORTS: Final = ("MemRetainAllocationHandle", "MemExportToShareableHandle")
OPENS: Final = ("IpcOpenMemHandle", "MemImportFromShareableHandle", "MemAddressReserve", "MemMap", "MemSetAccess")


@pytest.mark.skipif(not CUDA, reason="of AMD's only memory of gpuinterop is exported")
@pytest.mark.parametrize("call", EXPORTS)
def test_each_call_of_an_export_fails_once(simulator: Simulator, call: str) -> None:
    """The reader is told, and the next attempt works."""
    with memory("vmm", SIZE) as it, Reader(simulator) as reader, gi.share(it) as shared:
        before = simulator.left()
        simulator.fail(VENDOR.call(call), code=12345)
        kind, words = reader.attach(bytes(shared))
        assert (kind, VENDOR.call(call) in words) == ("HandleError", True)
        assert reader.attach(bytes(shared))[0] == {"": "00000000"}
        assert simulator.left() == before
    shared.close(timeout=20)


def test_the_handle_of_legacy_memory_fails_once(simulator: Simulator) -> None:
    with memory("legacy", SIZE) as it, Reader(simulator) as reader:
        simulator.fail(VENDOR.call("IpcGetMemHandle"), code=12345)
        with pytest.raises(gi.DriverError, match=VENDOR.call("IpcGetMemHandle")):
            gi.share(it)
        with gi.share(it) as shared:
            assert reader.attach(bytes(shared))[0] == {"": "00000000"}
        shared.close(timeout=20)


FAILING: Final = """
import sys
import gpuinterop as gi
from tests.simulated.driver import Simulator
from tests.vendors.table import VENDOR
driver, device = Simulator.attach(VENDOR.name), gi.device()
for call in sys.argv[2:]:
    driver.fail(VENDOR.call(call), code=12345)
    try:
        gi.attach(bytes.fromhex(sys.argv[1])).close()
    except gi.DriverError as error:
        assert error.call == VENDOR.call(call), error
    else:
        assert driver.clear_faults(), f"{call} was made, and its failure was not told"
    device.drain(20)
    assert not driver.left(), (call, driver.left())
gi.attach(bytes.fromhex(sys.argv[1])).close()
print("done")
"""


@pytest.mark.parametrize("kind", SHARED)
def test_each_call_of_an_attachment_fails_once(simulator: Simulator, kind: Kind) -> None:
    with memory(kind, SIZE) as it, gi.share(it) as shared:
        environment = simulator.environment(GPUINTEROP_BACKEND=VENDOR.name)
        command = [sys.executable, "-c", FAILING, bytes(shared).hex(), *OPENS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    shared.close(timeout=20)


SAME_NUMBER: Final = """
import subprocess, sys
import gpuinterop as gi
from tests.vendors.foreign_memory import *
with memory(sys.argv[1], 4096) as it, gi.share(it) as shared:
    command = [*sys.argv[3:], sys.executable, "-c", sys.argv[2]]
    print(subprocess.run(command, input=bytes(shared).hex(), text=True, capture_output=True).stdout, flush=True)
"""


@pytest.mark.parametrize("kind", SHARED)
def test_equal_numbers_of_processes(simulator: Simulator, kind: Kind) -> None:
    """As in two containers, whose main process is number 1: legacy memory is refused before the driver sees it."""
    command = [*in_namespaces(), sys.executable, "-c", SAME_NUMBER, kind, READER, *NAMESPACES]
    environment = simulator.environment(GPUINTEROP_BACKEND=VENDOR.name)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    told = json.loads(done.stdout.splitlines()[0])
    assert told[0] == ("UnsupportedError" if kind == "legacy" else {"": "00000000"}), done.stderr
    assert kind != "legacy" or "both processes have the PID 1" in told[1]


@pytest.mark.skipif(CUDA, reason="AMD's alone")
def test_the_legacy_mode_is_a_gap(simulator: Simulator) -> None:
    program = """
import gpuinterop as gi
from tests.vendors.foreign_memory import *
with memory("legacy", 4096) as it:
    try:
        gi.share(it)
    except gi.UnsupportedError as error:
        print(error)
"""
    told = simulator.run(program, GPUINTEROP_BACKEND="hip", HSA_ENABLE_IPC_MODE_LEGACY="1")
    assert "HSA_ENABLE_IPC_MODE_LEGACY" in told


def test_another_allocation_at_the_address_is_not_shared_on(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver numbers allocations: another one at the address has another number."""
    module = importlib.import_module(f"gpuinterop_{VENDOR.name}.sharing")
    real = module.pointer_attribute
    with memory("legacy", SIZE) as it, Reader(simulator) as reader:
        with gi.share(it) as shared:
            assert reader.attach(bytes(shared))[0] == {"": "00000000"}
            monkeypatch.setattr(module, "pointer_attribute", lambda *asked: real(*asked) + 1)
            assert reader.attach(bytes(shared))[0] == "ResourceClosedError"
            monkeypatch.undo()
        shared.close(timeout=20)


def test_a_copy_is_there_on_return(simulator: Simulator) -> None:
    device = gi.device()
    with memory("legacy", 4096) as it, device.create_stream() as stream, device.create_semaphore(gi.TimelineFd) as gate:
        ctypes.memset(it.ptr, 9, 4096)
        gate.wait(stream, 1)
        timer = threading.Timer(0.3, gate.host_signal, (1,))
        timer.start()
        with gi.share(it, copy=True, stream=stream) as shared:
            assert ctypes.string_at(shared.view.ptr, 1) == b"\x09"
        timer.join()
        shared.close(timeout=20)


EXPORTER: Final = """
import ctypes, sys
import gpuinterop as gi
from tests.vendors.foreign_memory import *
with memory(sys.argv[1], 4096) as it, gi.share(it) as shared:
    ctypes.memset(it.ptr, int(sys.argv[2]), 4096)
    print(bytes(shared).hex(), flush=True)
    sys.stdin.read()
"""
BOTH: Final = """
import ctypes, sys
import gpuinterop as gi
attached = [gi.attach(bytes.fromhex(one), timeout=20) for one in sys.argv[1:]]
print(*(ctypes.string_at(one.view.ptr, 1).hex() for one in attached))
for one in attached:
    one.close()
"""


@pytest.mark.parametrize("kind", SHARED)
def test_exporters_that_number_their_allocations_alike(simulator: Simulator, kind: str) -> None:
    environment = simulator.environment(GPUINTEROP_BACKEND=VENDOR.name)

    def run(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", *words]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    exporters = [run(EXPORTER, kind, str(number)) for number in (1, 2)]
    descriptors = [cast(IO[str], one.stdout).readline().strip() for one in exporters]
    assert run(BOTH, *descriptors).communicate(timeout=60)[0] == "01 02\n"
    for one in exporters:
        one.communicate(timeout=20)
