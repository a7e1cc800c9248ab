"""Frames that one process publishes under a name, and others read."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import pytest

from ... import system
from ..._core.device import Device
from ..._core.stream import Stream
from ..._core.view import View
from ...capabilities import Operation
from ...errors import InvalidArgumentError, PeerError, ResourceBusyError, ResourceClosedError, SemaphoreTimeoutError
from ...handles import OpaqueFd, TimelineFd, VmmFd
from ...sharing import Publisher, publish
from ..peer import BackendPeer
from ..requirements import requires, skip_declared
from .base import LIMIT, Suite, held, raises

SIZE = 5000
NAME = f"kit-{os.getpid()}"


@requires((Operation.EXPORT_ALLOCATION, VmmFd), (Operation.CREATE_SEMAPHORE, TimelineFd))
class FrameSuite(Suite):
    """The writer is here, a reader in another process."""

    @pytest.fixture(autouse=True)
    def exports(self, device: Device) -> None:
        """Slots are shared like arrays."""
        if not any(device.capabilities.supports((Operation.EXPORT_ARRAY, kind)) for kind in (VmmFd, OpaqueFd)):
            skip_declared("the device exports no arrays of its allocations")

    @pytest.fixture
    def camera(self, device: Device, scope: ExitStack) -> Publisher:
        """A publisher of frames with `SIZE` bytes, with memory for three."""
        return scope.enter_context(publish(NAME, SIZE, "uint8", device))

    @pytest.fixture
    def peer(self, device: Device, camera: Publisher, scope: ExitStack) -> Any:
        """A process that has subscribed to them."""
        peer = scope.enter_context(BackendPeer(device))
        peer.subscribe(camera.name)
        return peer

    def test_the_stream_waits_and_the_host_does_not(
        self, device: Device, camera: Publisher, peer: Any, stream: Stream, scope: ExitStack
    ) -> None:
        """A reader has a frame before its bytes are written; its stream waits for them. The writer does not wait."""
        gate = scope.enter_context(device.create_semaphore(TimelineFd))
        with camera.write(stream) as frame:
            gate.wait(stream, 1)
            fill(frame, 7, stream)
        assert peer.take(LIMIT) == (1, 0, False)
        assert not peer.idle(0.01)
        for value in range(20, 30):
            with camera.write(stream) as frame:
                fill(frame, value, stream)
        assert held(stream)
        gate.host_signal(1)
        assert peer.read(0, SIZE) == b"\7" * SIZE
        stream.synchronize(LIMIT)  # while the reader still reads the first one
        assert peer.read(0, SIZE) == b"\7" * SIZE
        peer.give_back()
        assert peer.take(LIMIT) == (11, 9, False)
        assert peer.read(0, SIZE) == bytes([29]) * SIZE
        peer.give_back()
        raises(SemaphoreTimeoutError, lambda: peer.take(0.01))

    def test_too_few_slots(self, device: Device, peer: Any, stream: Stream, scope: ExitStack) -> None:
        """The writer's stream waits for the stream of a reader that has given its frame back."""
        camera = scope.enter_context(publish(f"{NAME}-few", SIZE, "uint8", device, slots=2))
        peer.subscribe(camera.name)
        gate = scope.enter_context(device.create_semaphore(TimelineFd))
        with camera.write(stream) as frame:
            fill(frame, 1, stream)
        peer.import_semaphore(gate.export())
        peer.take(LIMIT)
        peer.enqueue(wait=1)
        peer.give_back()
        with camera.write(stream) as frame:
            fill(frame, 2, stream)
        with pytest.warns(RuntimeWarning, match="2 slots, all in use"), camera.write(stream) as frame:
            fill(frame, 3, stream)
        assert held(stream)
        assert peer.take(LIMIT)[0] == 3
        gate.host_signal(1)
        assert peer.read(0, SIZE) == b"\3" * SIZE
        peer.give_back()
        stream.synchronize(LIMIT)

    def test_a_frame_that_fails_is_never_seen(self, camera: Publisher, peer: Any, stream: Stream) -> None:
        """If the body of a `write` raises, the last frame stays the newest."""
        with camera.write(stream) as frame:
            fill(frame, 1, stream)
        access = camera.write(stream)
        fill(access.__enter__(), 2, stream)
        access.__exit__(ValueError, ValueError(), None)
        assert peer.take(LIMIT)[0] == 1
        assert peer.read(0, SIZE) == b"\1" * SIZE

    def test_turns(self, camera: Publisher, stream: Stream) -> None:
        """Only one frame is written at a time, and the name belongs to the writer until it closes."""
        with camera.write(stream):
            raises(InvalidArgumentError, lambda: camera.write(stream).__enter__(), argument="order")
        raises(ResourceBusyError, lambda: publish(NAME, SIZE, device=camera.device))

    def test_the_end(self, camera: Publisher, peer: Any, stream: Stream) -> None:
        """A reader takes the last frame, and then learns that the writer has closed."""
        with camera.write(stream) as frame:
            fill(frame, 7, stream)
        camera.close()
        assert peer.take(LIMIT)[0] == 1
        assert peer.read(0, SIZE) == b"\7" * SIZE
        peer.give_back()
        raises(ResourceClosedError, lambda: peer.take(LIMIT))

    def test_another_writer(self, device: Device, peer: Any, stream: Stream, scope: ExitStack) -> None:
        """When a writer is killed, its readers continue with the next one, and are told."""
        name = f"{NAME}-next"
        writer = scope.enter_context(BackendPeer(device))
        writer.publish(name, SIZE)
        writer.write_frame(5)
        peer.subscribe(name)
        assert peer.take(LIMIT) == (1, 0, False)
        raises(ResourceBusyError, lambda: publish(name, SIZE, device=device))
        writer.kill()
        assert peer.read(0, SIZE) == b"\5" * SIZE
        peer.give_back()
        assert system.until(lambda: _has_ended(peer), LIMIT)
        with publish(name, SIZE, "uint8", device) as camera:
            with camera.write(stream) as frame:
                fill(frame, 6, stream)
            assert peer.take(LIMIT) == (1, 0, True)
            assert peer.read(0, SIZE) == b"\6" * SIZE
            peer.give_back()


def _has_ended(peer: Any) -> bool:
    """Whether the reader knows that the writer has exited."""
    try:
        peer.take(0.01)
    except SemaphoreTimeoutError:
        return False
    except PeerError:
        return True
    pytest.fail("the reader has taken a frame of a writer that was killed before")


def fill(frame: View, byte: int, stream: Stream) -> None:
    """Fill a frame on a stream."""
    frame._buffer.fill(byte, offset=frame._start, size=frame.nbytes, stream=stream)
