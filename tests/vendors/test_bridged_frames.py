"""Frames in flight between a Vulkan queue and a device's stream that only a bridge keeps in order.

Neither side is waited for by the host inside a frame. In frame f Vulkan waits for the device's release of the frame
before, copies what that has left into memory of its own, sets every word to `word(f)` and signals; the device waits for
that, copies what it finds into pinned host memory, sets every byte anew and signals. Both copies are compared with what
was to be there, every word of every frame: one handoff that comes too early, or not at all, is a wrong word.

GPUINTEROP_TEST_FRAMES says how many.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

import gpuinterop as gi
from gpuinterop.backend import StreamMemoryBackend
from gpuinterop.testing.exporters.vulkan import VulkanExporter, VulkanMemory, VulkanSemaphore
from gpuinterop.testing.exporters.vulkan.staging import Staging
from gpuinterop.vulkan import _api as c
from tests.limits import LIMIT

from .parties import PARTIES, open_party

FRAMES: Final = int(os.environ.get("GPUINTEROP_TEST_FRAMES", "300"))
SIZE: Final = 1 << 16
IN_FLIGHT: Final = 6


def word(frame: int) -> int:
    """What Vulkan sets every word to: each frame another, because the factor is odd."""
    return frame * 0x9E3779B1 + 0x51 & 0xFFFFFFFF


def halves(frame: int) -> tuple[int, int]:
    """The bytes that the device sets each half to: not those of the frames round about, nor of each other."""
    first = frame * 89 % 251 + 1
    return first, first ^ 0xFF


def device_left(frame: int) -> NDArray[np.uint8]:
    """The buffer as the device leaves it; all zeroes before its first frame."""
    left = np.zeros(SIZE, np.uint8)
    if frame >= 0:
        left[: SIZE // 2], left[SIZE // 2 :] = halves(frame)
    return left


@contextmanager
def pinned(device: gi.Device, size: int) -> Iterator[NDArray[np.uint8]]:
    """Host memory that the device's copies do not block for."""
    backend = device.driver
    assert isinstance(backend, StreamMemoryBackend)
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pin, _ = backend.pin(device._handle, address, size)
    try:
        yield np.frombuffer(memory, np.uint8)
    finally:
        device.synchronize(LIMIT)
        backend.unpin(pin)


class VulkanSide:
    """The exporter's queue: what a frame does there, and where it copies to what it finds."""

    def __init__(self, exporter: VulkanExporter, memory: VulkanMemory, timeline: VulkanSemaphore) -> None:
        self._exporter = exporter
        self.vk = exporter.vk
        self._memory = memory
        self._timeline = timeline
        self._found = Staging(self.vk, SIZE * IN_FLIGHT)
        self._work: dict[int, Any] = {}

    def submit(self, frame: int, *, last: bool = False) -> None:
        """Enqueue; the `last` one only looks."""
        vk, buffer = self.vk, self._memory.vk_buffer
        new, null = vk.api.new, vk.api.ffi.NULL
        to = (frame % IN_FLIGHT) * SIZE
        access = c.ACCESS_TRANSFER_READ | c.ACCESS_TRANSFER_WRITE

        def barrier(commands: Any, stage: int, target: int) -> None:
            between = new("VkMemoryBarrier", srcAccessMask=access, dstAccessMask=target)
            vk.functions.vkCmdPipelineBarrier(commands, c.STAGE_TRANSFER, stage, 0, 1, between, 0, null, 0, null)

        def record(commands: Any) -> None:
            with self._memory.taken(commands, c.STAGE_TRANSFER, access):
                region = new("VkBufferCopy", srcOffset=0, dstOffset=to, size=SIZE)
                vk.functions.vkCmdCopyBuffer(commands, buffer, self._found.handle, 1, region)
                if not last:
                    barrier(commands, c.STAGE_TRANSFER, access)
                    vk.functions.vkCmdFillBuffer(commands, buffer, 0, SIZE, word(frame))
                barrier(commands, c.STAGE_HOST, c.ACCESS_HOST_READ)

        waits = [(self._timeline, 2 * frame)] if frame else []
        signals = [] if last else [(self._timeline, 2 * frame + 1)]
        uses = (self._memory,)
        self._work[frame] = self._exporter.submit_to_queue(waits, record, signals, uses=uses)

    def found(self, frame: int) -> NDArray[np.uint8]:
        """What the device's frame before has left, once Vulkan has copied it."""
        assert self._work.pop(frame).done(LIMIT), f"frame {frame}: Vulkan still waits for the device"
        start = (frame % IN_FLIGHT) * SIZE
        return np.frombuffer(self._found.bytes, np.uint8, SIZE, start)

    def close(self) -> None:
        self._found.close()


def run_frames(exporter: VulkanExporter, device: gi.Device, frames: int = FRAMES) -> int:
    """Run the frames; returns how many were compared, word by word, on each side.

    On failure an AssertionError that names the frame, or the error of the side that has hung.
    """
    compared = 0
    with (
        exporter.create_memory(SIZE) as theirs,
        exporter.create_semaphore(gi.Timeline, exportable=False) as timeline,
        device.import_memory(theirs.export(), size=theirs.size) as memory,
        memory.map_buffer(size=SIZE) as buffer,
        pinned(device, SIZE * IN_FLIGHT) as seen,
        gi.bridge.Bridge(device) as bridge,
        bridge.from_endpoint(timeline.endpoint()) as semaphore,
        device.create_stream() as stream,
    ):
        theirs.write(0, bytes(SIZE))
        side = VulkanSide(exporter, theirs, timeline)
        events: dict[int, gi.Event] = {}

        def compare(frame: int) -> None:
            """What both sides have found in a frame."""
            events.pop(frame).wait(LIMIT)
            slot = seen[(frame % IN_FLIGHT) * SIZE :][:SIZE]
            wrong = np.flatnonzero(slot.view(np.uint32) != word(frame))
            assert not wrong.size, f"frame {frame}: the device found {wrong.size} wrong words, from {wrong[0]} on"
            wrong = np.flatnonzero(side.found(frame) != device_left(frame - 1))
            assert not wrong.size, f"frame {frame}: Vulkan found {wrong.size} wrong bytes, from {wrong[0]} on"

        with ExitStack() as undo:  # from the last line up; all of it also after a failure
            for resource in (memory, buffer, bridge, semaphore):
                undo.callback(resource.close, timeout=LIMIT)
            undo.callback(side.close)
            undo.callback(exporter.settle)
            undo.callback(stream.synchronize, LIMIT)
            undo.callback(timeline.force, 2 * frames + 2)  # neither side is left waiting
            for frame in range(frames):
                if frame >= IN_FLIGHT:  # the slots are needed again
                    compare(frame - IN_FLIGHT)
                    compared += 1
                side.submit(frame)
                start = (frame % IN_FLIGHT) * SIZE
                semaphore.wait(stream, 2 * frame + 1)
                buffer.copy_to_host(seen[start : start + SIZE], stream=stream)
                for half, byte in enumerate(halves(frame)):
                    buffer.fill(byte, offset=half * SIZE // 2, size=SIZE // 2, stream=stream)
                semaphore.signal(stream, 2 * frame + 2)
                events[frame] = stream.record()
            for frame in sorted(events):
                compare(frame)
                compared += 1
            side.submit(frames, last=True)
            assert (side.found(frames) == device_left(frames - 1)).all(), "what the last frame has left"
            stream.synchronize(LIMIT)
            assert timeline.counter() == 2 * frames
    return compared


@pytest.mark.timeout(1000 + FRAMES // 10)
def test_every_word_of_every_frame(device: gi.Device) -> None:
    with open_party(PARTIES[-1], device) as exporter:
        assert isinstance(exporter, VulkanExporter)
        assert run_frames(exporter, device) == FRAMES
