"""Streams and events: work in order, events when it is done, and other libraries' streams."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from ..._core.device import Device
from ..._core.semaphore import SemaphoreBatch
from ..._core.stream import Stream
from ...capabilities import Operation
from ...errors import ArgumentTypeError, InvalidArgumentError, ResourceClosedError, SemaphoreTimeoutError
from ...graphics.handoff import Handoff
from ...handles import OpaqueFd, TimelineFd
from ..requirements import requires, skip_declared
from .base import GRACE, LIMIT, Gate, Harness, Suite, becomes_idle, held, raises, read
from .libraries import libraries


def in_this_process(spec: object) -> bool:
    """Select exporters in this process: another process would test nothing more."""
    return not getattr(spec, "process", False)


class _Numba:
    def __init__(self, pointer: int) -> None:
        self.handle = ctypes.c_void_p(pointer)

    def __int__(self) -> int:
        return self.handle.value or 0


_LIBRARIES: dict[str, Callable[[int], object]] = {
    "int": int,
    "protocol": lambda pointer: SimpleNamespace(__cuda_stream__=lambda: (0, pointer)),
    "torch": lambda pointer: SimpleNamespace(cuda_stream=pointer),
    "cupy": lambda pointer: SimpleNamespace(ptr=pointer),
    "numba": _Numba,
}
"""Makes another library's stream from a pointer."""


class StreamSuite(Suite):
    """Streams without shared memory."""

    def test_idle(self, device: Device, stream: Stream) -> None:
        """A new stream is idle and belongs to its device, and its events are done."""
        assert stream.device is device
        stream.synchronize(LIMIT)
        event = stream.record()
        event.wait(LIMIT)
        assert event.done
        assert becomes_idle(stream)

    def test_pointers_differ(self, device: Device, stream: Stream) -> None:
        """Two streams have different pointers."""
        with device.create_stream() as other:
            assert other.ptr != stream.ptr

    def test_wrap(self, device: Device, stream: Stream) -> None:
        """A pointer, or an object with one, is wrapped; gpuinterop's own stream is returned; the owner stays alive."""
        assert device.wrap_stream(stream) is stream
        for library in _LIBRARIES.values():
            wrapped = device.wrap_stream(library(stream.ptr))
            assert wrapped.ptr == stream.ptr
            wrapped.synchronize(LIMIT)
            wrapped.close()
        stream.synchronize(LIMIT)

    def test_wrap_refuses_what_is_no_stream(self, device: Device) -> None:
        """An object that is not a stream raises a TypeError, and a negative pointer an error about its value."""
        for thing in (None, True, "0", 1.0, object()):
            raises(ArgumentTypeError, lambda thing=thing: device.wrap_stream(thing), argument="stream")
        raises(InvalidArgumentError, lambda: device.wrap_stream(-1), argument="stream")

    def test_default_stream(self, device: Device) -> None:
        """0 is the device's default stream."""
        default = device.wrap_stream(0)
        default.synchronize(LIMIT)
        default.record().wait(LIMIT)
        default.close()

    def test_closed(self, device: Device) -> None:
        """Every call on a closed stream raises; closing again does nothing."""
        stream, other = device.create_stream(), device.create_stream()
        stream.close()
        stream.close()
        assert stream.closed
        for call in (stream.query, stream.synchronize, stream.record, lambda: stream.ptr):
            raises(ResourceClosedError, call)
        raises(ResourceClosedError, lambda: other.wait_stream(stream))
        other.close(timeout=LIMIT)

    def test_device_synchronize(self, device: Device, stream: Stream) -> None:
        """`Device.synchronize` returns when every stream is idle."""
        stream.record()
        device.synchronize(LIMIT)
        assert becomes_idle(stream)


@requires((Operation.IMPORT_MEMORY, OpaqueFd), (Operation.MAP_BUFFER, OpaqueFd))
class StreamWorkSuite(Suite):
    """Streams that work on shared memory."""

    exporter_filter: ClassVar = staticmethod(in_this_process)

    def test_work_is_done_in_order(self, harness: Harness) -> None:
        """The last fill on a stream wins."""
        theirs, ours = harness.buffer(1 << 20)
        stream = harness.stream()
        for byte in range(1, 50):
            ours.fill(byte, stream=stream)
        stream.synchronize(LIMIT)
        assert theirs.read(0, 1 << 20) == bytes([49]) * (1 << 20)

    def test_event_is_not_done_early(self, harness: Harness) -> None:
        """An event is done when the work before it is, not earlier; earlier events are done earlier."""
        theirs, ours = harness.buffer()
        gate, stream = Gate(harness), harness.stream()
        ours.fill(1, stream=stream)
        first = stream.record()
        gate.block(stream)
        ours.fill(2, stream=stream)
        second: Any = stream.record()
        first.wait(LIMIT)
        assert first.done
        raises(SemaphoreTimeoutError, lambda: second.wait(GRACE))
        assert not second.done, "an event after a pending wait is done"
        assert not stream.query()
        assert theirs.read(0, 1) == b"\x01"
        gate.open()
        second.wait(LIMIT)
        assert second.done
        assert theirs.read(0, ours.size) == b"\x02" * ours.size
        stream.synchronize(LIMIT)

    def test_await_event(self, harness: Harness) -> None:
        """An event can be awaited, while the loop continues."""
        _, ours = harness.buffer()
        gate, stream = Gate(harness), harness.stream()
        gate.block(stream)
        ours.fill(7, stream=stream)
        event = stream.record()

        async def body() -> list[str]:
            order = []

            async def opener() -> None:
                order.append("open")
                gate.open()

            task = asyncio.create_task(opener())
            await event
            order.append("done")
            await task
            return order

        assert asyncio.run(asyncio.wait_for(body(), LIMIT)) == ["open", "done"]

    def test_wait_stream(self, harness: Harness) -> None:
        """Work after `wait_stream` follows the other stream's work enqueued before it, and only that."""
        theirs, ours = harness.buffer()
        gate, first, second = Gate(harness), harness.stream(), harness.stream()
        gate.block(first)
        ours.fill(3, stream=first)
        second.wait_stream(first)
        ours.fill(4, stream=second)
        assert held(second), "a stream did not wait for the other"
        assert theirs.read(0, 1) != b"\x04"
        gate.open()
        second.synchronize(LIMIT)
        first.synchronize(LIMIT)
        assert theirs.read(0, ours.size) == b"\x04" * ours.size

    def test_copy_without_stream_is_ordered(self, harness: Harness) -> None:
        """A copy without a stream follows the streams that used its bytes, and is done on return."""
        _, ours = harness.buffer(1 << 22)
        stream = harness.stream()
        for byte in range(1, 9):
            ours.fill(byte, stream=stream)
        assert read(ours) == b"\x08" * (1 << 22)
        stream.synchronize(LIMIT)

    def test_arrays_are_ordered(self, harness: Harness) -> None:
        """An array that is taken after a stream's work on the buffer shows that work, even if it is pending."""
        _, ours = harness.buffer(1 << 22)
        stream = harness.stream()
        for library in libraries(harness.device, simulated=harness.simulated):
            makes = [library.from_dlpack, *([library.from_interface] if library.interface_is_ordered else [])]
            for make in makes:
                for byte in range(1, 9):
                    ours.fill(byte, stream=stream)
                assert library.bytes_of(make(ours.view(1 << 22))) == b"\x08" * (1 << 22)

    def test_consumers_stream_is_ordered(self, harness: Harness) -> None:
        """A DLPack consumer's stream waits for every stream that used the buffer; with -1 for none."""
        theirs, ours = harness.buffer()
        if harness.device.info.dlpack[0] == 1:
            skip_declared("consumers of host memory have no stream; test_arrays_are_ordered tests them")
        gate, first, second = Gate(harness), harness.stream(), harness.stream()
        consumer, free = harness.stream(), harness.stream()
        ours.fill(1)
        gate.block(first)
        ours.fill(2, size=16, stream=first)
        ours.fill(3, offset=16, size=16, stream=second)
        view = ours.view(ours.size)
        assert view.__cuda_array_interface__["stream"] is not None
        capsules = view.__dlpack__(stream=consumer.ptr), view.__dlpack__(stream=-1)
        assert held(consumer), "the consumer's stream does not wait for the first"
        assert becomes_idle(free)
        assert theirs.read(0, 1) == b"\x01"
        gate.open()
        consumer.synchronize(LIMIT)
        assert theirs.read(0, 32) == b"\x02" * 16 + b"\x03" * 16
        first.synchronize(LIMIT)
        del capsules

    @pytest.mark.parametrize("library", _LIBRARIES)
    @requires((Operation.CREATE_SEMAPHORE, TimelineFd))
    def test_streams_of_other_libraries(self, harness: Harness, library: str) -> None:
        """Every argument for a stream accepts any library's, each time as a new object, and enqueues there."""
        _, ours = harness.buffer()
        device, stream, other = harness.device, harness.stream(), harness.stream()
        gate, word, frames = (harness.scope.enter_context(device.create_semaphore(TimelineFd)) for _ in range(3))
        batch, handoff = SemaphoreBatch(word), Handoff(frames, tracks_submits=False)
        pointer, size = stream.ptr, ours.size

        def theirs() -> Any:
            return _LIBRARIES[library](pointer)

        ours.copy_from_host(b"\1" * size, stream=theirs())
        ours.copy_to_host(found := bytearray(size), stream=theirs())
        stream.synchronize(LIMIT)
        assert found == b"\1" * size
        gate.wait(theirs(), 1)
        ours.fill(2, stream=theirs())
        word.signal(theirs(), 1)
        word.wait(theirs(), 1)
        batch.signal(theirs(), (2,))
        batch.wait(theirs(), (2,))
        frames.host_signal(1)
        handoff.acquire(theirs())
        handoff.release(theirs())
        other.wait_stream(theirs())
        assert held(other)
        assert (word.value, frames.value) == (0, 1)
        gate.host_signal(1)
        other.synchronize(LIMIT)
        stream.synchronize(LIMIT)
        assert (word.value, frames.value) == (2, 2)
        assert read(ours) == b"\2" * size
        if device.capabilities.supports(Operation.GRAPH_CAPTURE):
            with stream.capture() as graph:
                ours.fill(3, stream=theirs())
            graph.launch(theirs())
            stream.synchronize(LIMIT)
            assert read(ours) == b"\3" * size
            graph.close(timeout=LIMIT)

    def test_what_is_no_stream_is_refused(self, harness: Harness) -> None:
        """A type, a text and a float are refused, and nothing is enqueued."""
        _, ours = harness.buffer()
        stream = harness.stream()
        wrong: list[object] = [None.__class__, "stream", 1.0]
        for thing in wrong:
            raises(ArgumentTypeError, lambda thing=thing: ours.fill(1, stream=thing), argument="stream")
            raises(ArgumentTypeError, lambda thing=thing: stream.wait_stream(thing), argument="stream")
