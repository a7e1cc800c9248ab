"""Closing while a stream waits for a semaphore: no call of ours may block behind it.

The driver's ``cuMemFree`` and ``cuDestroyExternalSemaphore`` wait for all work of the device, and hold every other call
of the process meanwhile: also the signal that would end the wait. A backend that called them at once would hang here,
on the GPU and on the simulator alike.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpuinterop as gi

from .parties import PARTIES, context, open_party

LIMIT = 20.0


@pytest.fixture
def device() -> gi.Device:
    return gi.get_backend("cuda").device()


@pytest.fixture(params=PARTIES)
def exporter(request: pytest.FixtureRequest, device: gi.Device) -> Iterator[Any]:
    with open_party(request.param, device) as exporter:
        yield exporter


def semaphore_of(exporter: Any, device: gi.Device) -> tuple[Any, Any]:
    """Binary: every party has those."""
    theirs = exporter.create_semaphore(gi.Binary)
    return theirs, device.import_semaphore(theirs.export())


def test_a_stream_of_this_process_can_still_signal(device: gi.Device, exporter: Any) -> None:
    """The signal that ends the wait is a CUDA call of this very thread, and comes after the close."""
    gate_theirs, gate = semaphore_of(exporter, device)
    other_theirs, other = semaphore_of(exporter, device)
    theirs = exporter.create_memory(1 << 16)
    memory = device.import_memory(theirs.export(), size=theirs.size)
    buffer = memory.map_buffer()
    with device.create_stream() as waiting, device.create_stream() as signalling:
        gate.wait(waiting)
        released: list[str] = []
        buffer.on_released(lambda: released.append("buffer"))
        other.on_released(lambda: released.append("semaphore"))
        buffer.close()
        memory.close()
        other.close()
        device.drain()
        with device.import_memory(theirs.export(), size=theirs.size):  # imports drain, too
            pass
        assert released == [], "released behind a pending wait"
        with pytest.raises(gi.ResourceBusyError, match="may be waiting for a semaphore"):
            other.close(timeout=0.01)
        gate.signal(signalling)
        waiting.synchronize(LIMIT)
        device.drain()
        assert sorted(released) == ["buffer", "semaphore"]
        signalling.synchronize(LIMIT)
    gate.close(timeout=LIMIT)
    for closing in (gate_theirs, other_theirs, theirs):
        closing.close()


@pytest.mark.parametrize("closing", ["buffer", "semaphore"])
def test_the_other_side_signals_after_the_close(device: gi.Device, exporter: Any, closing: str) -> None:
    gate_theirs, gate = semaphore_of(exporter, device)
    other_theirs, other = semaphore_of(exporter, device)
    theirs = exporter.create_memory(1 << 16)
    memory = device.import_memory(theirs.export(), size=theirs.size)
    buffer = memory.map_buffer()
    close: Callable[[], None] = buffer.close if closing == "buffer" else other.close
    with device.create_stream() as stream:
        for _ in range(3):
            gate.wait(stream)
            close()
            gate_theirs.signal()
            stream.synchronize(LIMIT)
    memory.close(timeout=LIMIT)
    other.close(timeout=LIMIT)
    gate.close(timeout=LIMIT)
    for one in (gate_theirs, other_theirs, theirs):
        one.close()


def test_closing_leaves_a_capture_elsewhere_alone(device: gi.Device, exporter: Any) -> None:
    """A stream that blocks the default stream is captured: the default stream cannot even be asked meanwhile."""
    cuda: Any = importlib.import_module("cuda.bindings.driver")
    theirs = exporter.create_memory(1 << 16)
    memory = device.import_memory(theirs.export(), size=theirs.size)
    buffer = memory.map_buffer()
    assert not cuda.cuCtxPushCurrent(context(device).handle)[0]
    code, blocking = cuda.cuStreamCreate(0)
    assert not code
    zero = device.wrap_stream(0)
    buffer.fill(1, stream=zero)
    assert not cuda.cuStreamBeginCapture(blocking, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)[0]
    released: list[str] = []
    memory.on_released(lambda: released.append("memory"))
    buffer.close()
    memory.close()
    zero.close()
    device.drain()
    assert released == [], "released without a look at the default stream's work"
    code, graph = cuda.cuStreamEndCapture(blocking)
    assert not code, "the capture has become invalid"
    assert not cuda.cuGraphDestroy(graph)[0]
    device.synchronize(LIMIT)
    memory.close(timeout=LIMIT)
    assert released == ["memory"]
    assert not cuda.cuStreamDestroy(blocking)[0]
    assert not cuda.cuCtxPopCurrent()[0]
    theirs.close()
