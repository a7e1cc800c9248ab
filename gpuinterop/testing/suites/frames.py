"""Frames that one process publishes under a name, and others read."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import pytest

from ..._core.device import Device
from ..._core.stream import Stream
from ..._core.view import View
from ...capabilities import Operation
from ...errors import SemaphoreTimeoutError
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


def fill(frame: View, byte: int, stream: Stream) -> None:
    """Fill a frame on a stream."""
    frame._buffer.fill(byte, offset=frame._start, size=frame.nbytes, stream=stream)
