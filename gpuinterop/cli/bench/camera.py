"""Send frames between the bench's processes: with gpuinterop, with a sequence lock in memory, and with a pipe."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from ...sharing import publish, subscribe
from .clock import OURS, Times

if TYPE_CHECKING:
    from .rig import Bench

LOCK, PIPE = "shared memory, sequence lock", "a byte in a pipe"
SMALL: Final = 1024
RATE: Final = 60
"""Frames per second of a camera."""
WORDS: Final = 3
_CAME, _TAKEN, _SEQUENCE = range(WORDS)
"""Shared words: when the reader had a frame, which frame it has read, and the sequence lock."""


class Camera:
    """A writer of frames, a reader, or both.

    `words` and `pixels` are memory that two processes share: `WORDS` words, and the bytes of a small frame. `ends` are
    both ends of a pipe between them, the reading end first.
    """

    _writer: Any = None
    _reader: Any = None
    _picture: Any

    def __init__(self, bench: Bench, words: Any = None, pixels: Any = None, ends: Any = None) -> None:
        self.device, self.is_host = bench.device, bench.device.info.is_cpu
        self._stream: Any = None if self.is_host else self.device.create_stream()
        self._words, self._pixels, self._ends = words, pixels, ends

    def camera(self, writes: bool, name: str, *shape: int) -> None:
        """Start to write frames, or to read them."""
        import numpy as np

        if writes:
            self._writer = publish(name, shape, device=self.device, slots=4)
        else:
            self._reader = subscribe(name)
        self._picture = np.full(shape, 7, np.uint8)

    def sends(self, way: str, numbers: range, pause: float) -> Times:
        """Send frames one by one; time each until it was read, and from a release until the next frame arrived."""
        times, send = Times(), {OURS: self._send, LOCK: self._write, PIPE: self._take_failure}[way]
        for number in numbers:
            began = time.perf_counter_ns()
            sent = send(number)
            if pause:  # the reader has read the frame and waits for the next
                time.sleep(pause)
            while self._words[_TAKEN] != number:
                pass
            took = time.perf_counter_ns() - began
            times.add(way, {"frame": took / 1000, "return": (self._words[_CAME] - sent) / 1000})
        return times

    def takes(self, way: str, numbers: range) -> None:
        """Read those frames and answer each."""
        take = {OURS: self._take, LOCK: self._read, PIPE: self._hear}[way]
        for number in numbers:
            self._words[_CAME] = take(number)
            self._words[_TAKEN] = number

    def films(self, frames: int) -> list[float]:
        """Write this many frames, `RATE` a second, then close; return the microseconds between frames."""
        ends = [time.perf_counter()]
        for number in range(1, frames + 1):
            time.sleep(max(0.0, ends[0] + number / RATE - time.perf_counter()))
            self._send(number)
            if self._stream:
                self._stream.synchronize()
            ends.append(time.perf_counter())
        self._writer.close()
        return [(end - before) * 1e6 for before, end in pairwise(ends)]

    def watches(self, seconds: float) -> int:
        """Read frames until the writer closes, using each for `seconds`; return how many."""
        taken = 0
        for frame in self._reader:
            self._check(frame, seconds)
            taken += 1
        return taken

    def both(self, stream: Any) -> None:
        """Write and read a frame without bytes."""
        with self._writer.write(stream):
            pass
        with self._reader.next().read(stream):
            pass

    # -- one frame, each way: returns when it was sent, or arrived -----------------------------------------------------

    def _send(self, _: int) -> int:
        with self._writer.write(self._stream) as frame:
            if self.is_host:
                frame.__array__()[:] = self._picture
            else:
                buffer = frame._buffer
                buffer.fill(7, offset=frame.ptr - buffer.ptr, size=frame.nbytes, stream=self._stream)
            return time.perf_counter_ns()

    def _take(self, _: int) -> int:
        frame, came = self._reader.next(), time.perf_counter_ns()
        self._check(frame)
        return came

    def _check(self, frame: Any, seconds: float = 0.0) -> None:
        """Copy a frame's bytes to the host, and hold the frame for this long."""
        with frame.read(self._stream) as picture:
            if self.is_host:
                self._picture[:] = picture.__array__()
            else:
                self._stream.synchronize()
                picture._buffer.copy_to_host(self._picture, offset=picture.ptr - picture._buffer.ptr)
            if seconds:
                time.sleep(seconds)

    def _write(self, number: int) -> int:
        self._words[_SEQUENCE] = 2 * number - 1
        self._pixels.raw = bytes(SMALL)
        self._words[_SEQUENCE] = 2 * number
        return time.perf_counter_ns()

    def _read(self, number: int) -> int:
        words, whole = self._words, 2 * number
        while not (words[_SEQUENCE] == whole and self._pixels.raw and words[_SEQUENCE] == whole):
            pass
        return time.perf_counter_ns()

    def _take_failure(self, _: int) -> int:
        sent = time.perf_counter_ns()
        self._ends[1].send_bytes(b".")
        return sent

    def _hear(self, _: int) -> int:
        self._ends[0].recv_bytes()
        return time.perf_counter_ns()
