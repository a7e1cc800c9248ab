"""Closing while a stream elsewhere is captured."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import gpuinterop as gi
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

from ..parties import native


def test_a_context_that_is_current_is_not_switched(simulator: Simulator, device: gi.Device, exporter: Any) -> None:
    """Another one is: the calls are made in the device's own, and the thread has its own again behind each."""
    cuda: Any = importlib.import_module("cuda.bindings.driver")
    theirs = exporter.create_memory(1 << 16)
    other = native(gi.get_backend("cuda").device(1 - device.ordinal))

    def switches(current: Any) -> list[int]:
        calls = ("cuCtxPushCurrent", "cuCtxPopCurrent", "cuImportExternalMemory", "cuMemFree")
        gc.collect()  # what other tests have dropped would be released in between
        device.drain(timeout=LIMIT)
        before = [simulator.calls(call) for call in calls]
        with device.import_memory(theirs.export(), size=theirs.size) as memory:
            buffer = memory.map_buffer()
            assert cuda.cuPointerGetAttribute(
                cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, buffer.ptr
            ) == (0, device.ordinal)
        assert int(cuda.cuCtxGetCurrent()[1]) == current.pointer
        return [simulator.calls(call) - then for call, then in zip(calls, before, strict=True)]

    for current, switched in ((native(device), False), (other, True)):
        assert not cuda.cuCtxPushCurrent(current.pointer)[0]
        try:
            pushed, popped, *made = switches(current)
            assert (pushed, popped, made) == (4 * switched, pushed, [1, 1])
        finally:
            assert not cuda.cuCtxPopCurrent()[0]
    theirs.close()


def test_closing_leaves_a_capture_elsewhere_alone(device: gi.Device, exporter: Any) -> None:
    """A stream that blocks the default stream is captured: the default stream cannot even be asked meanwhile."""
    cuda: Any = importlib.import_module("cuda.bindings.driver")
    theirs = exporter.create_memory(1 << 16)
    memory = device.import_memory(theirs.export(), size=theirs.size)
    buffer = memory.map_buffer()
    assert not cuda.cuCtxPushCurrent(native(device).pointer)[0]
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
