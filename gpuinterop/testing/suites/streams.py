"""Streams and events: work in order, events when it is done, and streams that others have made."""

from __future__ import annotations

from typing import Any, ClassVar

from ..._core.device import Device
from ..._core.stream import Stream
from ...capabilities import Operation
from ...errors import SemaphoreTimeoutError
from ...handles import OpaqueFd
from ..requirements import requires, skip_declared
from .base import GRACE, LIMIT, Gate, Harness, Suite, becomes_idle, held, raises, read
from .libraries import libraries


def in_this_process(spec: object) -> bool:
    """Select exporters in this process: another process would test nothing more."""
    return not getattr(spec, "process", False)


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
        """A pointer is wrapped; the stream stays its owner's."""
        with device.wrap_stream(stream.ptr) as wrapped:
            assert wrapped.ptr == stream.ptr
            wrapped.synchronize(LIMIT)
        stream.synchronize(LIMIT)

    def test_default_stream(self, device: Device) -> None:
        """0 is the device's default stream."""
        default = device.wrap_stream(0)
        default.synchronize(LIMIT)
        default.record().wait(LIMIT)
        default.close()

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
