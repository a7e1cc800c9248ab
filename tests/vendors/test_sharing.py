"""Arrays of other libraries, shared with another process: what the driver is asked and given, and how it fails.

The memory is made by ctypes. A simulated driver's is the CPU's, so both processes read and write it by its address, and
not through what is tested.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any, Final

import pytest

import gpuinterop as gi
from gpuinterop.capabilities import Operation
from tests.host.shells import Raised, Shell
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

from .foreign_memory import STEP, Foreign, Kind, current, make, memory
from .parties import SEVERAL
from .table import VENDOR
from .test_foreign_memory import CUDA

SIZE: Final = 3 * STEP
SHARED: Final[tuple[Kind, ...]] = ("legacy", "vmm") if CUDA else ("legacy",)

NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--mount-proc")

SIDE: Final = """
import ctypes
from tests.vendors.foreign_memory import *
from tests.simulated.driver import Simulator
driver = Simulator.attach(VENDOR.name)

def attach(*descriptors):
    # What is seen of each array, where, relative to the first, and the driver's calls.
    driver.forget_log()
    with contextlib.ExitStack() as scope:
        shares = [scope.enter_context(gi.attach(bytes.fromhex(one), timeout=300)) for one in descriptors]
        views = [shared[name] for shared in shares for name in shared]
        seen = [ctypes.string_at(view.ptr, 4).hex() for view in views]
        places = [view.ptr - views[0].ptr for view in views]
        for view in views:
            ctypes.memset(view.ptr, 0xAB, 1)
        del views, view
    gi.device().drain(300)
    return seen, places, driver.trace()
"""


class Side(Shell):
    """Another process that has the driver."""

    def __init__(self, simulator: Simulator, *before: str, **variables: str) -> None:
        super().__init__(*before, **simulator.environment(GPUINTEROP_BACKEND=VENDOR.name, **variables))
        self(SIDE)

    def attach(self, *shares: Any) -> Any:
        """Attach them all at once; return what `attach` says there."""
        return self(f"attach(*{[bytes(one).hex() for one in shares]})")


@pytest.fixture
def reader(simulator: Simulator) -> Iterator[Side]:
    with Side(simulator) as made:
        yield made
        assert made("driver.left()") == {}


def opened(calls: list[str]) -> int:
    """How often memory was opened."""
    return sum(call in map(VENDOR.call, ("IpcOpenMemHandle", "MemImportFromShareableHandle")) for call in calls)


def parts(foreign: Foreign, count: int) -> dict[str, Foreign]:
    """Arrays all over the memory, each of 512 bytes."""
    return {str(one): foreign.part(one * (SIZE // count) + 256, 512) for one in range(count)}


@pytest.mark.parametrize("kind", SHARED)
def test_the_drivers_calls_do_not_grow_with_the_arrays(simulator: Simulator, reader: Side, kind: Kind) -> None:
    """Memory is opened once, for all attachments that live at once; and again once they have ended."""
    pieces = 1 if kind == "legacy" else 3
    with memory(kind, SIZE) as it:
        made = []
        for count in (60, 240):
            ctypes.memset(it.ptr, 7, SIZE)
            arrays = parts(it, count)
            simulator.forget_log()
            with gi.share(arrays) as shared:
                seen, places, calls = reader.attach(shared)
                made.append(Counter(simulator.trace() + calls))
                assert (seen, opened(calls)) == (["07070707"] * count, pieces)
                assert made[-1][VENDOR.call("MemExportToShareableHandle")] == (pieces if kind == "vmm" else 0)
                assert all(ctypes.string_at(one.ptr, 2) == b"\xab\x07" for one in arrays.values())
                with gi.share({"one": it.part(256, 512), "all": it}) as other:
                    seen, again, calls = reader.attach(shared, other, shared)
                assert (again, opened(calls)) == ([*places, 0, -256, *places], pieces)
            shared.close(timeout=LIMIT)
        assert made[1] <= made[0]


@pytest.mark.skipif(not CUDA, reason="of AMD's only memory of gpuinterop is exported")
def test_a_part_of_a_range_of_several_blocks(simulator: Simulator, reader: Side) -> None:
    """Its blocks are mapped as one; and are found in the whole, where this process has that."""
    with memory("vmm", SIZE) as it:
        for block in range(3):
            ctypes.memset(it.ptr + block * STEP, block + 1, STEP)
        with (
            gi.share(it.part(0, STEP + 2)) as first,
            gi.share(it.part(2 * STEP - 2, STEP)) as last,
            gi.share(it) as whole,
        ):
            seen, places, calls = reader.attach(whole, last)
            assert (seen, places, opened(calls)) == (["01010101", "02020303"], [0, 2 * STEP - 2], 3)
            seen, _, calls = reader.attach(last)
            assert (seen, opened(calls)) == (["ab020303"], 2)
            seen, _, calls = reader.attach(first, whole)
            assert (seen, opened(calls)) == (["ab010101"] * 2, 5)
        for shared in (first, last, whole):
            shared.close(timeout=LIMIT)


@pytest.mark.parametrize("copy", [False, True])
def test_an_array_without_bytes_has_no_address(simulator: Simulator, reader: Side, copy: bool) -> None:
    """Its interface says 0, by which no driver finds a device."""
    with gi.share(Foreign("legacy", 0, 0, lambda: None), copy=copy) as shared:
        assert shared.device == gi.device()
        assert reader(f"with gi.attach({str(shared)!r}) as one: seen = one.view.shape") is None
        assert reader("seen") == [0]
    shared.close(timeout=20)


def test_transports_mix(simulator: Simulator, reader: Side) -> None:
    with memory("legacy", SIZE) as it, gi.device().allocate(4096) as ours:
        mine = ours.buffer.view(4096)
        with gi.share({"theirs": it.part(64, 64), "ours": mine}) as shared:
            assert shared.transport == "IpcMemHandle, VmmFd"
            assert len(reader.attach(shared)[0]) == 2
            assert ctypes.string_at(mine.ptr, 1) == ctypes.string_at(it.ptr + 64, 1) == b"\xab"
        shared.close(timeout=LIMIT)


@pytest.mark.parametrize("kind", ["pool", "managed"])
def test_what_does_not_travel_is_refused_in_words(simulator: Simulator, reader: Side, kind: Kind) -> None:
    """Nothing is tried; a copy travels."""
    exported = simulator.calls(VENDOR.call("IpcGetMemHandle"))
    with memory(kind, 4096) as it:
        ctypes.memset(it.ptr, 9, 4096)
        if CUDA or kind == "managed":  # before 7.1 AMD's runtime opens a pool's memory
            with pytest.raises(gi.UnsupportedError, match="copy=True") as caught:
                gi.share(it)
            assert caught.value.capability.operation is Operation.EXPORT_ARRAY
        with gi.share(it, copy=True) as shared:
            assert reader.attach(shared)[0] == ["09090909"]
            assert ctypes.string_at(shared.view.ptr, 1) == b"\xab"
            assert ctypes.string_at(it.ptr, 1) == b"\x09"
        shared.close(timeout=LIMIT)
    assert simulator.calls(VENDOR.call("IpcGetMemHandle")) == exported


def test_memory_that_was_freed_is_not_shared_on(simulator: Simulator, reader: Side) -> None:
    """Another allocation at its address is another."""
    with current():
        it = make("legacy", SIZE)
        with gi.share(it) as shared:
            it.free()
            again = make("legacy", SIZE)
            with pytest.raises(Raised, match="ResourceClosedError"):
                reader.attach(shared)
            again.free()
        shared.close(timeout=LIMIT)


@pytest.mark.skipif(not SEVERAL, reason="needs two devices")
def test_arrays_and_streams_of_other_devices_are_refused_before_anything_changes(simulator: Simulator) -> None:
    with memory("legacy", SIZE) as it, memory("legacy", SIZE, 1) as second:
        with pytest.raises(gi.InvalidArgumentError, match=r"^second: .*of one device"):
            gi.share({"first": it, "second": second})
        nothing = type("Array", (), {"__cuda_array_interface__": it.__cuda_array_interface__ | {"data": (4096, False)}})
        with pytest.raises(gi.DeviceNotFoundError, match=r"^array: expected memory .*, got 0x1000 .*; devices: "):
            gi.share(nothing())
        host = gi.get_backend("host").device().create_stream()
        with gi.share(it) as shared, gi.device().create_stream() as stream, host, gi.device(1).create_stream() as other:
            for wrong in (other, host):
                with pytest.raises(gi.InvalidArgumentError, match="use a stream of that device"):
                    shared.acquire(wrong)
            shared.acquire(stream)
            shared.release(stream)
            stream.synchronize(LIMIT)
        shared.close(timeout=LIMIT)


@pytest.mark.skipif(not CUDA, reason="captures are CUDA's")
def test_a_capture_is_refused(simulator: Simulator) -> None:
    device = gi.device()
    with memory("legacy", SIZE) as it, gi.share(it) as shared, device.create_stream() as stream:
        with stream.capture() as graph, pytest.raises(gi.InvalidArgumentError, match="captured"):
            shared.acquire(stream)
        graph.close()
        shared.acquire(stream)
        shared.release(stream)
        stream.synchronize(LIMIT)
    shared.close(timeout=LIMIT)


class Theirs:
    """torch's stream."""

    def __init__(self, stream: gi.Stream) -> None:
        self.cuda_stream = stream.ptr


Theirs.__module__, Theirs.__name__ = "torch.cuda.streams", "Stream"


def test_a_stream_is_resolved_once(simulator: Simulator) -> None:
    """From the second call on an acquire and a release are each one look for a capture, and at most one operation."""
    with (
        memory("legacy", SIZE) as it,
        gi.share(it) as shared,
        gi.device().create_stream() as ours,
        gi.attach(bytes(shared)) as attached,
    ):
        theirs = Theirs(ours)
        kept = weakref.ref(theirs)
        for arrays in (shared, attached):
            arrays.acquire(theirs)
            arrays.release(theirs)
        del theirs
        assert kept() is not None, "its number could be another's"
        ours.synchronize(LIMIT)
        for arrays in (shared, attached):
            simulator.forget_log()
            arrays.acquire(Theirs(ours))
            arrays.release(Theirs(ours))
            made = Counter(simulator.trace())
            assert made.pop(VENDOR.call("StreamWaitValue64"), 0) <= 1
            assert made == {VENDOR.call("StreamIsCapturing"): 2, VENDOR.call("StreamWriteValue64"): 1}
            ours.synchronize(LIMIT)
    shared.close(timeout=LIMIT)
    assert kept() is None


OPENS: Final = ("IpcOpenMemHandle", "MemImportFromShareableHandle", "MemAddressReserve", "MemMap", "MemSetAccess")


@pytest.mark.parametrize("kind", SHARED)
def test_each_call_of_an_export_fails_once(simulator: Simulator, reader: Side, kind: Kind) -> None:
    """Who asked is told, and the next attempt works."""
    calls = ("IpcGetMemHandle",) if kind == "legacy" else ("MemRetainAllocationHandle", "MemExportToShareableHandle")
    for call in map(VENDOR.call, calls):
        with memory(kind, SIZE) as it, ExitStack() as scope:
            if kind == "legacy":
                simulator.fail(call, code=12345)
                with pytest.raises(gi.DriverError, match=call):
                    gi.share(it)
            shared, before = scope.enter_context(gi.share(it)), simulator.left()
            if kind == "vmm":
                simulator.fail(call, code=12345)
                with pytest.raises(Raised, match=f"PeerError: .*{call}"):
                    reader.attach(shared)
            assert reader.attach(shared)[0] == ["00000000"]
            assert simulator.left() == before
        shared.close(timeout=LIMIT)


@pytest.mark.parametrize("kind", SHARED)
def test_each_call_of_an_attachment_fails_once(simulator: Simulator, reader: Side, kind: Kind) -> None:
    with memory(kind, SIZE) as it, gi.share(it) as shared:
        for call in map(VENDOR.call, OPENS):
            reader(f"driver.fail({call!r}, code=12345)")
            try:
                made, told = call in reader.attach(shared)[2], ""
            except Raised as error:
                made, told = True, str(error)
            assert not made or (told.startswith("DriverError: ") and call in told)
            assert reader("(driver.clear_faults(), gi.device().drain(300), driver.left())[-1]") == {}
        assert reader.attach(shared)[0] == ["ab000000"]
    shared.close(timeout=LIMIT)


@pytest.mark.parametrize("kind", SHARED)
def test_equal_numbers_of_processes(simulator: Simulator, kind: Kind) -> None:
    """As in two containers, whose main process is number 1: legacy memory is refused before the driver sees it."""
    if not shutil.which("unshare") or subprocess.run([*NAMESPACES, "true"], check=False).returncode:
        pytest.skip("needs the right to make namespaces")
    with Side(simulator, *NAMESPACES) as exporter, Side(simulator, *NAMESPACES) as reader:
        exporter(f"undo = contextlib.ExitStack(); it = undo.enter_context(memory({kind!r}, 4096))")
        exporter("shared = undo.enter_context(gi.share(it))")
        refused = pytest.raises(Raised, match=r"UnsupportedError: .*both processes have the PID 1")
        with refused if kind == "legacy" else nullcontext():
            assert reader(f"attach({exporter('bytes(shared).hex()')!r})")[0] == ["00000000"]
        exporter("undo.close()")


@pytest.mark.skipif(CUDA, reason="AMD's alone")
def test_the_legacy_mode_is_a_gap(simulator: Simulator) -> None:
    refused = pytest.raises(Raised, match=r"UnsupportedError: .*HSA_ENABLE_IPC_MODE_LEGACY")
    with Side(simulator, HSA_ENABLE_IPC_MODE_LEGACY="1") as exporter, refused:
        exporter("with memory('legacy', 4096) as it: gi.share(it)")


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
        shared.close(timeout=LIMIT)


@pytest.mark.parametrize("kind", SHARED)
def test_exporters_that_number_their_allocations_alike(simulator: Simulator, reader: Side, kind: str) -> None:
    with Side(simulator) as one, Side(simulator) as other:
        for number, each in enumerate((one, other), 1):
            each(f"undo = contextlib.ExitStack(); it = undo.enter_context(memory({kind!r}, 4096))")
            each(f"shared = undo.enter_context(gi.share(it)); ctypes.memset(it.ptr, {number}, 4096)")
        descriptors = [bytes.fromhex(each("bytes(shared).hex()")) for each in (one, other)]
        assert reader.attach(*descriptors)[0] == ["01010101", "02020202"]
        one("undo.close()")
        other("undo.close()")
