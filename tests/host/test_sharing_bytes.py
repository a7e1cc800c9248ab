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
        with pytest.raises(Raised, match=r"HandleError: .*full"):
            reader("attached = gi.attach(descriptor); attached.acquire(timeout=300)")
        assert exporter("[len(one._writer.leases) for one in rendezvous.server().offers.values()]") == [0]
        reader("attached.acquire(timeout=300); attached.release()")
