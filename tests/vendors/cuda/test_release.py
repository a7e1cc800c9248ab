"""Closing while a stream elsewhere is captured."""

from __future__ import annotations

import importlib
from typing import Any

import gpuinterop as gi

from ..parties import native

LIMIT = 20.0


def test_closing_leaves_a_capture_elsewhere_alone(device: gi.Device, exporter: Any) -> None:
    """A stream that blocks the default stream is captured: the default stream cannot even be asked meanwhile."""
    cuda: Any = importlib.import_module("cuda.bindings.driver")
    theirs = exporter.create_memory(1 << 16)
    memory = device.import_memory(theirs.export(), size=theirs.size)
    buffer = memory.map_buffer()
    assert not cuda.cuCtxPushCurrent(native(device).handle)[0]
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
