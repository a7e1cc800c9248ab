"""Which bytes a reader gets, and when: memfds of others, copies, many allocations, versions."""

from __future__ import annotations

import os
import signal
from typing import Final

import pytest

from .shells import Raised, Shell, pair, stop

THEIRS: Final = """
import mmap
theirs = os.memfd_create("theirs", os.MFD_ALLOW_SEALING)

def mapped(size, **more):
    return np.frombuffer(mmap.mmap(theirs, size, **more), np.uint8)

os.ftruncate(theirs, 4096)
"""
GATE: Final = """
device = gi.device()
stream, gate = device.create_stream(), device.create_semaphore(gi.TimelineFd)

def tries(call):
    try:
        call()
    except gi.GpuInteropError as error:
        return str(error)
"""
TENSOR: Final = """
class Tensor:
    place = 8

    def __init__(self, array):
        self.__dlpack_device__, self.__dlpack__ = array.__dlpack_device__, array.__dlpack__

    def data_ptr(self):
        return self.place

tensor = Tensor(array)
other = gi.share(tensor)
"""
TORCH: Final = """
from types import ModuleType, SimpleNamespace
torch, reductions = ModuleType("torch"), ModuleType("torch.multiprocessing.reductions")
reductions.reduce_tensor = reductions.rebuild_cuda_tensor = lambda *_: None
torch.multiprocessing = SimpleNamespace(reductions=reductions)
torch.utils = SimpleNamespace(hooks=SimpleNamespace(warn_if_has_hooks=lambda _: None))
torch.UntypedStorage, torch.empty = None, lambda count, device: np.empty(count)
sys.modules.update({"torch": torch, "torch.multiprocessing": torch.multiprocessing})
import gpuinterop.sharing.torch

class Storage:
    device, _cdata = "cpu", 1
    resizable = is_shared = lambda _: False
    data_ptr = lambda self: self.bytes.ctypes.data
    nbytes = lambda self: self.bytes.nbytes

class Tensor:
    requires_grad, is_leaf, is_cuda, is_cpu, dtype = False, True, False, True, "uint8"
    size = stride = storage_offset = is_conj = is_neg = lambda _: 0
    untyped_storage = lambda _: storage

storage = Storage()

def sent(bytes):
    # The place of the storage's bytes in their block, the block, their number, and the storage's slot.
    storage.bytes = bytes
    _, arguments = reductions.reduce_tensor(Tensor())
    slot, _, offset, ((block, *_), *_) = arguments[12]
    return offset, block, arguments[8], slot
"""


def attach(reader: Shell, exporter: Shell, name: str) -> None:
    """Attach a share of the exporter, by the name that it has there."""
    reader(f"{name} = gi.attach({exporter.descriptor(name)})")


def test_a_memfd_that_grows_and_does_not_shrink() -> None:
    """What was mapped of it before is not all of it."""
    with pair() as (exporter, reader):
        exporter(THEIRS)
        exporter("small = gi.share(mapped(4096))")
        attach(reader, exporter, "small")
        with pytest.raises(Raised, match="PermissionError"):
            exporter("os.ftruncate(theirs, 0)")
        exporter("os.ftruncate(theirs, 1 << 24); more = mapped(1 << 24); more[:] = 5; large = gi.share(more)")
        attach(reader, exporter, "large")
        assert reader("int(np.asarray(large.view)[-1])") == 5


def test_arrays_of_more_allocations_than_one_answer_has_descriptors_for() -> None:
    """Neighbours are not taken for one."""
    with pair() as (exporter, reader):
        exporter("all = {str(one): np.asarray(gi.device().allocate(4096).buffer.view(4096)) for one in range(300)}")
        exporter("for one in all: all[one][:] = int(one) % 251")
        exporter("many = gi.share(all)")
        attach(reader, exporter, "many")
        assert reader("[int(np.asarray(many[str(one)])[9]) for one in range(300)]") == [one % 251 for one in range(300)]


def test_a_share_attached_twice_has_its_bytes_in_both() -> None:
    """Parts of two allocations: while both attachments live, after the first has ended, and after both have."""
    with pair() as (exporter, reader):
        exporter("whole = np.asarray(gi.device().allocate(8192).buffer.view(8192))")
        exporter("array[:], whole[:] = np.arange(4096) % 251, np.arange(8192) % 241")
        exporter("parts = gi.share({'low': array[100:103], 'high': whole[5000:5003]})")
        reader("def seen(one): return [np.asarray(one[name]).tolist() for name in ('low', 'high')]")
        reader(f"parts = {exporter.descriptor('parts')}; first, second = gi.attach(parts), gi.attach(parts)")
        assert reader("[seen(first), seen(second)]") == [[[100, 101, 102], [180, 181, 182]]] * 2
        reader("np.asarray(second['high'])[0] = 7; np.asarray(first['low'])[1] = 8")
        assert exporter("[array[99:104].tolist(), whole[4999:5004].tolist()]") == [
            [99, 100, 8, 102, 103], [179, 7, 181, 182, 183],
        ]  # fmt: skip
        for first, second in (("first", "second"), ("second", "first")):
            reader(f"{first}.close()")
            assert reader(f"seen({second})") == [[100, 8, 102], [7, 181, 182]]
            reader(f"{first} = gi.attach(parts)")
            assert reader(f"seen({first})") == [[100, 8, 102], [7, 181, 182]]
        reader("first.close(); second.close(); gi.device().drain()")
        exporter("array[100] = whole[5002] = 9")
        reader("first, second = gi.attach(parts), gi.attach(parts)")
        assert reader("[seen(first), seen(second)]") == [[[9, 8, 102], [7, 181, 9]]] * 2


def test_version_0_is_behind_the_stream() -> None:
    with pair() as (exporter, reader):
        exporter(GATE)
        exporter("gate.wait(stream, 1); late = gi.share(array, stream=stream)")
        attach(reader, exporter, "late")
        with pytest.raises(Raised, match=r"SemaphoreTimeoutError: .* was not free in time: the writer is"):
            reader("late.acquire(timeout=0.1)")
        exporter("gate.host_signal(1)")
        reader("late.acquire(timeout=300); late.release()")


def test_a_closed_reader_whose_stream_is_in_is_waited_for() -> None:
    with pair() as (exporter, reader):
        reader(GATE)
        reader("attached = gi.attach(descriptor); attached.acquire(stream)")
        reader("gate.wait(stream, 1); attached.release(stream); attached.close()")
        with pytest.raises(Raised, match=r"SemaphoreTimeoutError: ArrayShare .* was not free in time: .*the reader in"):
            exporter("share.acquire(timeout=0.3)")
        reader("gate.host_signal(1); stream.synchronize(300)")
        exporter("share.acquire(timeout=300); share.release()")
        exporter.until("leases() == 0")


def test_an_array_that_has_other_memory_now() -> None:
    """Readers would never see what is written there. Of many arrays a few are looked at by each acquire."""
    with pair() as (exporter, reader):
        exporter(TENSOR)
        exporter("many = [Tensor(array) for _ in range(20)]; several = gi.share(dict(zip(map(str, range(20)), many)))")
        attach(reader, exporter, "other")
        reader("other.close(); other = None")  # which has been told the contents
        exporter("many[19].place = tensor.place = 16")
        attaches = f"gi.attach({exporter.descriptor('other')})"
        for one, call in (reader, attaches), (exporter, attaches), (exporter, "other.acquire(timeout=300)"):
            with pytest.raises(Raised, match=r"ResourceClosedError: .*other memory"):
                one(call)
        with pytest.raises(Raised, match=r"ResourceClosedError: array '19' .*other memory"):
            exporter("for _ in range(3): several.acquire(timeout=300); several.release()")
        exporter("several.close(); tensor.place = 8; other.acquire(timeout=300); other.release()")


def test_a_torch_storage_that_was_resized_is_another_one() -> None:
    """A stand-in of torch's: its bytes are elsewhere, or fewer, or in another block, when it is sent again."""
    with Shell() as one:
        one(TORCH)
        one("first, second = array(), array()")
        parts = "first[1024:2048]", "first[1024:2048]", "first[2048:3072]", "first[2048:2560]", "second[2048:2560]"
        found = [one(f"sent({part})") for part in parts]
        assert [(offset, count) for offset, _, count, _ in found] == [
            (1024, 1024), (1024, 1024), (2048, 1024), (2048, 512), (2048, 512),
        ]  # fmt: skip
        blocks, slots = [[told[at] for told in found] for at in (1, 3)]
        assert blocks[0] == blocks[3] != blocks[4]
        assert slots[0] == slots[1]
        assert len({*slots}) == 4


@pytest.mark.parametrize("side", ["exporter", "reader"])
def test_a_close_without_a_release_lets_the_other_side_go_on(side: str) -> None:
    with pair() as (exporter, reader):
        reader("attached = gi.attach(descriptor); attached.acquire(timeout=300); attached.release()")
        one, other, name, theirs = {
            "exporter": (exporter, reader, "share", "attached"),
            "reader": (reader, exporter, "attached", "share"),
        }[side]
        one(f"{name}.acquire(timeout=300); lives = np.asarray({name}.view); {name}.close()")
        other(f"{theirs}.acquire(timeout=300); {theirs}.release()")
        assert one("len(lives)") == 4096


def test_a_stream_that_is_refused_changes_nothing() -> None:
    with pair() as (exporter, reader):
        reader("attached = gi.attach(descriptor)")
        for one, name in ((exporter, "share"), (reader, "attached")):
            one("stream = gi.device().create_stream(); stream.close()")
            with pytest.raises(Raised, match=r"ResourceClosedError: Stream .* is closed"):
                one(f"{name}.acquire(stream)")
            one(f"{name}.acquire(timeout=300); {name}.release()")


def test_the_first_acquire_of_a_reader_has_a_limit() -> None:
    with pair() as (exporter, reader):
        reader("attached = gi.attach(descriptor, timeout=None)")
        pid = int(exporter("os.getpid()"))
        stop(pid)
        try:
            with pytest.raises(Raised, match=r"PeerError: .*did not answer"):
                reader("attached.acquire(timeout=0.1)")
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_failed_enrol_takes_no_slot() -> None:
    with pair() as (exporter, reader):
        exporter("whole = gi.OpaqueFd.duplicate")
        exporter("def fails(_): gi.OpaqueFd.duplicate = whole; raise OSError(24, 'full')")
        exporter("gi.OpaqueFd.duplicate = fails")
        with pytest.raises(Raised, match=r"PeerError: .*full"):
            reader("attached = gi.attach(descriptor); attached.acquire(timeout=300)")
        assert exporter("[len(one._writer.reader_timelines) for one in server.server().offers.values()]") == [0]
        reader("attached.acquire(timeout=300); attached.release()")
