"""Several threads, several devices, forks: each call sees its own values on its own GPU, and changes no current one."""

from __future__ import annotations

import functools
import textwrap
import threading
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.suites.base import together
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

from .table import VENDOR

THREADS = 8
ROUNDS = 50


def test_eight_threads_signal_one_batch(backend: Any, windows: Simulator) -> None:
    """The driver reads the parameters late: a struct that two threads shared would show the other's value."""
    device = backend.open_device(0)
    semaphore = backend.import_semaphore(device, gi.TimelineWin32(handle=77))
    batch = backend.prepare([semaphore])
    streams = [backend.create_stream(device) for _ in range(THREADS)]
    start = threading.Barrier(THREADS)

    def work(index: int) -> None:
        start.wait(LIMIT)
        for turn in range(ROUNDS):
            backend.signal(batch, streams[index], (1 + turn * THREADS + index,))

    call = VENDOR.call("SignalExternalSemaphoresAsync")
    windows.delay(call, microseconds=500)
    windows.forget_descriptors()
    together([functools.partial(work, index) for index in range(THREADS)])
    told: dict[int, list[int]] = {}
    for (params,) in windows.descriptors(call):
        told.setdefault(params.stream, []).append(params.value)
    mine = [[1 + turn * THREADS + index for turn in range(ROUNDS)] for index in range(THREADS)]
    assert told == {stream.pointer: values for stream, values in zip(streams, mine, strict=True)}
    for stream in streams:
        backend.synchronize(stream)
        backend.destroy_stream(stream)
    backend.destroy_semaphore(semaphore)


PARTS = {
    "cuda": """
    from cuda.bindings import driver as cuda
    OWN = (2,)
    def make_current(device):
        cuda.cuCtxSetCurrent(device._handle.pointer)
    def is_current(device):
        return int(cuda.cuCtxGetCurrent()[1]) == device._handle.pointer
    def semaphore_of(device, exporter):
        return device.import_semaphore(exporter.create_semaphore(gi.Timeline).export())
    """,
    "hip": """
    try:
        from rocm.bindings import hip
    except ImportError:
        from hip import hip
    OWN = ()
    def make_current(device):
        assert int(hip.hipSetDevice(device.ordinal)[0]) == 0
    def is_current(device):
        return hip.hipGetDevice()[1] == device.ordinal
    def semaphore_of(device, exporter):
        return device.create_semaphore(gi.TimelineFd)
    """,
}
"""Who is current, asked past gpuinterop; a semaphore whose signal another stream can wait for; and the number of a
thread's own default stream, which HIP's backend refuses."""

TWO_DEVICES = """
import gpuinterop as gi
from gpuinterop.testing.exporters import open_exporter
from tests.simulated.driver import Simulator

simulator = Simulator.attach(VENDOR)
first, second = gi.get_backend(VENDOR).devices()

class Device:
    def __init__(self, index):
        self.index = index

class TorchStream:  # torch's default stream: 0, whatever the GPU
    def __init__(self, index):
        self.cuda_stream = 0
        self.device = Device(index)

def is_refused(call, words):
    try:
        call()
    except gi.InvalidArgumentError as error:
        assert words in str(error), error
    else:
        raise AssertionError("a stream of the other GPU was taken")

with open_exporter("memfd", identity=first.identity) as exporter:
    memory = exporter.create_memory(4096)
    semaphore = semaphore_of(first, exporter)
    mine = first.import_memory(memory.export(), size=memory.size)
    buffer = mine.map_buffer()
    # Somebody has made GPU 1 the current one, as torch.cuda.set_device does.
    second.create_stream().close()
    make_current(second)
    with first.create_stream() as other:
        for turn, wrapped in enumerate((0, 1, *OWN, TorchStream(0))):
            value = 2 * turn + 2
            stream = first.wrap_stream(wrapped)
            semaphore.signal(other, value - 1)
            other.synchronize(300)
            simulator.forget_log()
            semaphore.wait(stream, value - 1)
            buffer.fill(value, stream=stream)
            semaphore.signal(stream, value)
            stream.synchronize(300)
            ran = [(entry.operation, entry.device) for entry in simulator.log()]
            assert len(ran) == 3 and ran[1][0] == "memset", ran
            assert {device for _, device in ran} == {0}, ran
            assert memory.read(0, 4096) == bytes([value]) * 4096
            assert is_current(second), "the caller's device is left as it was"
            stream.close()
    is_refused(lambda: first.wrap_stream(TorchStream(1)), "gpuinterop.device(1)")
    explicit = second.create_stream()
    is_refused(lambda: first.wrap_stream(explicit.ptr), f"{VENDOR.upper()} device 1")
    is_refused(lambda: semaphore.wait(explicit, 1), "")
    assert second.wrap_stream(explicit.ptr).ptr == explicit.ptr
    explicit.close()
    # Objects are made on their own GPU, whatever is current.
    allocation = first.allocate(1)
    first.create_stream().close()
    assert is_current(second)
    for one in (allocation, buffer, mine, semaphore):
        one.close(timeout=300)
    memory.close()
assert simulator.violations() == [], simulator.violations()
print("ok")
"""


@pytest.mark.parametrize("per_thread", ["0", "1"])
def test_default_streams_stay_on_their_gpu(simulator: Simulator, per_thread: str) -> None:
    """Also where the bindings, CUDA's alone, turn the stream 0 into the thread's own."""
    parts = f"import gpuinterop as gi\nVENDOR = {VENDOR.name!r}\n{textwrap.dedent(PARTS[VENDOR.name])}"
    environment = {"GPUINTEROP_SIM_DEVICES": "2", "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM": per_thread}
    assert simulator.run(parts + TWO_DEVICES, **environment) == "ok\n"


FORK = f"""
import os
import gpuinterop as gi
device = gi.get_backend({VENDOR.name!r}).device()
stream = device.create_stream()
child = os.fork()
if child == 0:
    try:
        device.create_stream()
    except gi.ResourceClosedError as error:
        os._exit(0 if "spawn" in str(error) else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stream.close()
print("ok")
"""


def test_after_a_fork_the_error_says_spawn(simulator: Simulator) -> None:
    assert simulator.run(FORK, PYTHONWARNINGS="ignore") == "ok\n"
