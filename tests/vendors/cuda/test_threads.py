"""Bindings that keep the GIL, streams of threads that ended, and a MIG instance."""

from __future__ import annotations

import textwrap

import cuda.bindings
import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop_cuda.backend import CudaBackend
from tests.beside import elsewhere
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

ROUNDS = 50


@pytest.mark.parametrize("version", ["12.9.0", "12.8.0rc1"])
def test_bindings_that_keep_the_gil_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(cuda.bindings, "__version__", version)
    with pytest.raises(gi.BackendUnavailableError, match=rf"expected .* 12\.9\.1 or newer, got {version}\.") as caught:
        CudaBackend()
    assert "pip install 'gpuinterop[cuda]'" in str(caught.value)


def test_events_outlive_the_thread_whose_default_stream_they_are_of(device: gi.Device) -> None:
    """CUDA lets them be asked, and what their streams did be waited for; HIP deletes such a stream with its thread."""
    events: list[gi.Event] = []
    with device.allocate(1) as allocation:
        buffer = allocation.buffer

        def work(turn: int) -> None:
            stream = device.wrap_stream(2)
            buffer.fill(turn, offset=turn, size=1, stream=stream)
            events.append(stream.record())

        for turn in range(ROUNDS):
            elsewhere(work, turn)
        for event in events:
            event.wait(LIMIT)
            assert event.done
        found = np.zeros(ROUNDS, np.uint8)
        buffer.copy_to_host(found)
        assert found.tolist() == [*range(ROUNDS)]
        allocation.close(timeout=LIMIT)


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
