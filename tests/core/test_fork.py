"""A child of `fork` can do all with a host device from its first call on, whatever its parent has made and kept."""

from __future__ import annotations

import os
import sys

import pytest

from tests.programs import python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or sys.platform != "linux", reason="the host backend forks")

PROGRAM = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of every fork with threads
import numpy as np
import gpuinterop as gi
device = gi.get_backend("host").device()
signal.alarm(300)

class Passed(gi.bridge.Endpoint):
    kind, label = gi.Timeline, "passed"
    def wait(self, value, timeout): return True
    def signal(self, value): pass
    def close(self): pass

def everything():
    with device.allocate(4096) as one, device.create_stream() as stream:
        one.buffer.copy_from_host(bytes([3] * 4096))
        data = bytearray(4096)
        one.buffer.copy_to_host(data)
        assert data == bytes([3] * 4096)
        one.buffer.fill(4, stream=stream)
        stream.record().wait(300)
        assert np.from_dlpack(one.buffer.view(4096)).tolist() == [4] * 4096
        for kind in (gi.TimelineFd, gi.OpaqueFd):
            with device.create_semaphore(kind) as semaphore, device.create_stream() as other:
                semaphore.wait(other, 1) if kind is gi.TimelineFd else semaphore.wait(other)
                one.buffer.fill(5, stream=other)
                semaphore.signal(stream, 1) if kind is gi.TimelineFd else semaphore.signal(stream)
                other.synchronize(300)
                one.buffer.fill(6)
        with device.create_semaphore(gi.TimelineFd) as semaphore, semaphore.export() as handle:
            with device.import_semaphore(handle) as theirs:
                semaphore.host_signal(1)
                assert theirs.host_wait(1, timeout=300) is None
        with gi.bridge.Bridge(device) as bridge, bridge.from_endpoint(Passed()) as bridged:
            bridged.wait(stream, 1)
            stream.synchronize(300)
    device.synchronize(300)
    device.drain(300)

everything()
device.create_semaphore(gi.TimelineFd).close()  # its page was never exported: it is kept
child = os.fork()
mine = device.create_semaphore(gi.TimelineFd)
if child == 0:
    try:
        everything()
        mine.host_signal(5)
        os._exit(7)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
try:
    mine.host_wait(1, timeout=0)
except gi.SemaphoreTimeoutError:
    pass
else:
    raise AssertionError("the child signalled the parent's semaphore")
mine.close()
everything()
"""


@pytest.mark.parametrize("disable", ["", "import_semaphore:timeline_fd"], ids=["the backend's", "of stream words"])
def test_a_child_can_do_all_from_its_first_call(disable: str) -> None:
    """In the second case the core makes the timelines, and keeps spare pages of memory that parent and child share."""
    done = python("-c", PROGRAM, GPUINTEROP_DISABLE=disable)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_a_child_of_a_fork_in_a_callback_runs_callbacks() -> None:
    program = """
import os, warnings
warnings.simplefilter("ignore")
import gpuinterop as gi
device = gi.get_backend("host").device()
def fork():
    if os.fork():
        assert os.wait()[1] == 0
        return
    told = []
    with device.allocate(4096) as allocation:
        allocation.on_released(lambda: told.append(1))
    os._exit(0 if told == [1] else 9)
allocation = device.allocate(4096)
allocation.on_released(fork)
allocation.close(timeout=300)
"""
    done = python("-c", program)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_wrapped_stream_is_the_parents() -> None:
    program = """
import os, warnings
warnings.simplefilter("ignore")
import gpuinterop as gi
device = gi.get_backend("host").device()
with device.allocate(4096) as allocation:
    wrapped = device.wrap_stream(0)
    allocation.buffer.fill(1, stream=wrapped)
    wrapped.synchronize(300)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        for call in (wrapped.query, wrapped.record, wrapped.synchronize):
            try:
                call()
            except gi.ResourceClosedError:
                continue
            os._exit(9)
        device.wrap_stream(0).synchronize(300)
        os._exit(0)
"""
    done = python("-c", program)
    assert (done.returncode, done.stderr) == (0, "")
