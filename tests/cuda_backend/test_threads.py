"""Several threads, several devices, and the GIL: each call sees its own values, on its own GPU."""

from __future__ import annotations

import textwrap
import threading
from typing import Any

import pytest

import gpuinterop as gi
from tests.simulated.driver import Simulator

from .parties import open_party

LIMIT = 30.0
THREADS = 8
ROUNDS = 50


def test_eight_threads_signal_one_semaphore(simulator: Simulator) -> None:
    """The driver reads the parameters late: a struct that two threads shared would show the other's value."""
    device = gi.get_backend("cuda").device()
    with open_party("memfd", device) as exporter, exporter.create_semaphore(gi.Timeline) as theirs:
        semaphore: Any = device.import_semaphore(theirs.export())
        streams = [device.create_stream() for _ in range(THREADS)]
        start = threading.Barrier(THREADS)
        problems: list[BaseException] = []

        def work(index: int) -> None:
            try:
                start.wait(LIMIT)
                for turn in range(ROUNDS):
                    semaphore.signal(streams[index], 1 + turn * THREADS + index)
            except BaseException as error:
                problems.append(error)

        simulator.delay("cuSignalExternalSemaphoresAsync", microseconds=2000)
        simulator.forget_log()
        threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not problems
        for stream in streams:
            stream.synchronize(LIMIT)
        ran: dict[int, list[int]] = {}
        for entry in simulator.log():
            if entry.operation == "signal":
                ran.setdefault(entry.stream, []).append(entry.value)
        mine = [[1 + turn * THREADS + index for turn in range(ROUNDS)] for index in range(THREADS)]
        assert sorted(ran.values()) == sorted(mine)
        for stream in streams:
            stream.close()
        semaphore.close(timeout=LIMIT)


def test_other_threads_run_while_one_synchronises(simulator: Simulator) -> None:
    """The bindings let go of the GIL in a blocking call; for those that do not, no such call is made."""
    device = gi.get_backend("cuda").device()
    stream = device.create_stream()
    if device._backend.holds_gil:
        before = simulator.calls("cuStreamSynchronize")
        stream.synchronize()
        assert simulator.calls("cuStreamSynchronize") == before
        stream.close()
        return
    with simulator.block("cuStreamSynchronize") as gate:
        thread = threading.Thread(target=stream.synchronize)
        thread.start()
        assert gate.entered(LIMIT)  # would not get here with the GIL held in there
        assert thread.is_alive()
    thread.join(LIMIT)
    assert not thread.is_alive()
    stream.close()


TWO_DEVICES = textwrap.dedent(
    """
    import gpuinterop as gi
    from cuda.bindings import driver as cuda
    from gpuinterop.exporters import open_exporter
    from tests.simulated.driver import Simulator

    simulator = Simulator.attach()
    first, second = gi.get_backend("cuda").devices()

    class Device:
        def __init__(self, index):
            self.index = index

    class TorchStream:  # torch's default stream: 0, whatever the GPU
        def __init__(self, index):
            self.cuda_stream = 0
            self.device = Device(index)

    with open_exporter("memfd", identity=first.identity) as exporter:
        theirs = exporter.create_semaphore(gi.Timeline)
        memory = exporter.create_memory(4096)
        semaphore = first.import_semaphore(theirs.export())
        mine = first.import_memory(memory.export(), size=memory.size)
        buffer = mine.map_buffer()
        # Somebody has made GPU 1 the current one, as torch.cuda.set_device does.
        second.create_stream().close()
        cuda.cuCtxSetCurrent(second._native.handle)
        for wrapped in (0, 1, 2, TorchStream(0)):
            stream = first.wrap_stream(wrapped)
            simulator.forget_log()
            value = semaphore_value = getattr(exporter, "value", 0) + 2
            exporter.value = value
            theirs.signal(value - 1)
            semaphore.wait(stream, value - 1)
            buffer.fill(value, stream=stream)
            semaphore.signal(stream, value)
            stream.synchronize(20)
            assert theirs.wait(value, timeout=20)
            ran = [(entry.operation, entry.device) for entry in simulator.log()]
            assert [operation for operation, _ in ran] == ["wait", "memset", "signal"], ran
            assert {device for _, device in ran} == {0}, ran
            assert memory.read(0, 4096) == bytes([value]) * 4096
            assert int(cuda.cuCtxGetCurrent()[1]) == second._native.pointer, "the caller's context is left as it was"
            stream.close()
        try:
            first.wrap_stream(TorchStream(1))
        except gi.InvalidArgumentError as error:
            assert "gpuinterop.device(1)" in str(error), error
        else:
            raise AssertionError("a stream of the other GPU was taken")
        explicit = second.create_stream()
        try:
            first.wrap_stream(explicit.ptr)
        except gi.InvalidArgumentError as error:
            assert "CUDA device 1" in str(error), error
        else:
            raise AssertionError("a stream of the other GPU was taken")
        try:
            semaphore.wait(explicit, 1)
        except gi.InvalidArgumentError:
            pass
        else:
            raise AssertionError("a stream of the other GPU was waited on")
        explicit.close()
        buffer.close()
        mine.close(timeout=20)
        semaphore.close(timeout=20)
        memory.close()
        theirs.close()
    assert simulator.violations() == [], simulator.violations()
    print("ok")
    """
)


@pytest.mark.parametrize("per_thread", ["0", "1"])
def test_default_streams_stay_on_their_gpu(simulator: Simulator, per_thread: str) -> None:
    """Also where the bindings turn the stream 0 into the thread's own."""
    environment = {"GPUINTEROP_SIM_DEVICES": "2", "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM": per_thread}
    assert simulator.run(TWO_DEVICES, **environment) == "ok\n"


MIG = textwrap.dedent(
    """
    import gpuinterop as gi
    device = gi.get_backend("cuda").device()
    assert "MIG instance" in device.info.note, device.info
    whole = bytes.fromhex(device.info.note.partition("UUID ")[2][:32])
    assert whole != device.uuid
    try:
        gi.match_device(gi.DeviceIdentity(name="the whole GPU", uuid=whole))
    except gi.DeviceNotFoundError as error:
        assert "MIG instance" in str(error), error
    else:
        raise AssertionError("a guess")
    print("ok")
    """
)


def test_a_mig_instance_is_said_and_not_guessed(simulator: Simulator) -> None:
    assert simulator.run(MIG, GPUINTEROP_SIM_MIG="1", GPUINTEROP_BACKEND="cuda") == "ok\n"


FORK = textwrap.dedent(
    """
    import os
    import gpuinterop as gi
    device = gi.get_backend("cuda").device()
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
)


def test_after_a_fork_the_error_says_spawn(simulator: Simulator) -> None:
    assert simulator.run(FORK, PYTHONWARNINGS="ignore") == "ok\n"
