"""A camera process and a model process, and no copy between them.

    python camera.py                   writes camera.png, and prints what a frame took

The camera owns a ring of frames. It writes one, and signals a timeline. The model waits for that, looks at the frame in
place, and signals back: then the slot is free. Both wait on streams of their own, and with a time-out: when one process
dies, the other ends with an error that says what it has waited for.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np

import gpuinterop as gi

SIZE, SLOTS, FRAMES = 256, 4, 120
LIMIT = 10.0  # seconds


def where(frame: int) -> tuple[int, int]:
    """The centre of the ball in a frame."""
    angle = 2 * np.pi * frame / FRAMES
    return int(128 + 80 * np.cos(angle)), int(128 + 80 * np.sin(3 * angle))


def camera(connection: socket.socket) -> None:
    """Make the ring, send it, and film a ball."""
    device = gi.device()
    step = device.allocation_granularity().minimum
    nbytes = -(-SLOTS * SIZE * SIZE // step) * step
    with (
        device.allocate(nbytes) as ring,
        device.create_semaphore(gi.TimelineFd) as ready,  # frame k is there: k + 1
        device.create_semaphore(gi.TimelineFd) as free,  # the model is done with frame k: k + 1
        device.create_stream() as stream,
    ):
        with ring.export() as memory, ready.export() as filled, free.export() as emptied:
            gi.ipc.send_handles(connection, [memory, filled, emptied])  # which sends copies
        y, x = np.mgrid[:SIZE, :SIZE]
        noise = np.random.default_rng(7).integers(0, 60, (SIZE, SIZE)).astype(np.uint8)
        for frame in range(FRAMES):
            cx, cy = where(frame)
            picture = np.where((x - cx) ** 2 + (y - cy) ** 2 < 225, 255, noise).astype(np.uint8)
            if frame >= SLOTS:
                free.wait(stream, frame - SLOTS + 1)
                stream.synchronize(timeout=LIMIT)  # pageable memory is not copied behind a pending wait
            ring.buffer.copy_from_host(picture, offset=frame % SLOTS * SIZE * SIZE, stream=stream)
            ready.signal(stream, frame + 1)
            stream.synchronize(timeout=LIMIT)  # the picture is a new array in the next frame
        free.wait(stream, FRAMES)
        stream.synchronize(timeout=LIMIT)


def model(connection: socket.socket) -> None:
    """Find the ball in each frame."""
    device = gi.device()
    ring_handle, *timelines = gi.ipc.receive_handles(connection, [gi.VmmFd, gi.TimelineFd, gi.TimelineFd])
    step = device.allocation_granularity().minimum
    nbytes = -(-SLOTS * SIZE * SIZE // step) * step
    found: list[tuple[int, int]] = []
    times: list[float] = []
    last = np.empty((SIZE, SIZE), np.uint8)
    with (
        device.import_allocation(ring_handle, nbytes) as ring,
        device.import_semaphore(timelines[0]) as ready,
        device.import_semaphore(timelines[1]) as free,
        device.create_stream() as stream,
    ):
        frames, xp = arrays(ring.buffer)
        for frame in range(FRAMES):
            began = time.perf_counter()
            ready.wait(stream, frame + 1)
            stream.synchronize(timeout=LIMIT)
            bright = frames[frame % SLOTS] > 200  # in place: these are the camera's bytes
            total = bright.sum()
            centre = (
                (bright * xp.arange(SIZE)[None, :]).sum() / total,
                (bright * xp.arange(SIZE)[:, None]).sum() / total,
            )
            found.append((round(float(centre[0])), round(float(centre[1]))))
            if frame == FRAMES - 1:
                last[:] = frames[frame % SLOTS].tolist()  # for the picture alone
            free.signal(stream, frame + 1)  # `float` has waited for the array library
            times.append(1e6 * (time.perf_counter() - began))
        stream.synchronize(timeout=LIMIT)
        del frames
    report(found, times, last)


def arrays(buffer: gi.Buffer) -> tuple[Any, Any]:
    """The ring as an array of the library that computes here: CuPy on a GPU, NumPy on the host."""
    view = buffer.view((SLOTS, SIZE, SIZE), "uint8")
    if buffer.device.identity.is_cpu:
        return np.asarray(view), np
    import cupy

    return cupy.from_dlpack(view), cupy


def report(found: list[tuple[int, int]], times: list[float], last: np.ndarray[Any, Any]) -> None:
    """Say how far off the model was, and draw what it has seen."""
    from PIL import Image, ImageDraw

    error = max(
        max(abs(a - b) for a, b in zip(centre, where(frame), strict=True)) for frame, centre in enumerate(found)
    )
    picture = Image.merge("RGB", [Image.fromarray(last // 3)] * 3).resize((512, 512))
    draw = ImageDraw.Draw(picture)
    draw.line([(2 * x, 2 * y) for x, y in found], fill=(64, 190, 210), width=3)
    x, y = found[-1]
    draw.rectangle((2 * x - 34, 2 * y - 34, 2 * x + 34, 2 * y + 34), outline=(250, 200, 80), width=4)
    picture.save("camera.png")
    assert error <= 1, f"the ball is {error} pixels away from where it was filmed"
    print(f"{FRAMES} frames, the ball found within {error} pixel(s)")
    print(f"a frame took {np.median(times):.0f} us in the model, without a copy; camera.png")


def main() -> int:
    if len(sys.argv) == 3:
        with socket.socket(fileno=int(sys.argv[2])) as connection:
            {"camera": camera, "model": model}[sys.argv[1]](connection)
        return 0
    ends = socket.socketpair()
    with ends[0], ends[1]:
        programs = [
            subprocess.Popen([sys.executable, __file__, role, str(end.fileno())], pass_fds=[end.fileno()])
            for role, end in zip(("camera", "model"), ends, strict=True)
        ]
    return max(program.wait(timeout=120) for program in programs)


if __name__ == "__main__":
    sys.exit(main())
