"""A camera and two viewers in three processes: one viewer keeps up with the camera, the other is slow.

    python camera.py                   writes camera.png, and prints what the viewers saw

The camera films a ball, and waits for no viewer. The viewers find the ball in the camera's own bytes. The fast viewer
sees the whole path. The slow viewer misses frames, and makes a multiple exposure of the frames that it sees.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np

import gpuinterop as gi

SIZE, LAP, FPS = 512, 120, 60


class Seen(NamedTuple):
    """What a viewer saw."""

    path: dict[int, tuple[float, float]]  # the ball's position by frame number
    missed: int
    exposure: np.ndarray[Any, Any]  # the maximum of each pixel


def where(frame: int) -> tuple[float, float]:
    """Return the ball's centre in a frame."""
    angle = 2 * np.pi * frame / LAP
    return 256 + 200 * np.cos(angle), 256 + 180 * np.sin(3 * angle)


def library(device: gi.Device) -> tuple[Any, Any, Any]:
    """NumPy on the host, torch on a GPU: the module, a function that makes an array of a view, and the stream."""
    if device.identity.is_cpu:
        return np, np.asarray, None
    import torch

    return torch, torch.from_dlpack, torch.cuda.current_stream()


def view(pause: float) -> Seen:
    """Watch one lap of the ball, with a pause after each frame."""
    path, missed, exposure = {}, 0, None
    with gi.subscribe("camera", timeout=60) as camera:
        xp, array, stream = library(camera.device)
        for frame in camera:
            with frame.read(stream) as picture:
                pixels = array(picture)
                y, x = xp.where(pixels > 128)
                path[frame.number] = float(x.sum() / len(x)), float(y.sum() / len(y))
                exposure = pixels + 0 if exposure is None else xp.maximum(exposure, pixels)
            missed += frame.dropped
            if frame.number >= min(path) + LAP:
                break
            time.sleep(pause)
    assert exposure is not None
    return Seen(path, missed, np.array(exposure.tolist(), np.uint8))


def film() -> list[Seen]:
    """Film the ball until both viewers have seen a lap."""
    y, x = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    noise = np.random.default_rng(7).integers(0, 40, (SIZE, SIZE))
    spawn = multiprocessing.get_context("spawn")  # GPU drivers do not work after a fork
    # Two viewers can read at once, so use four slots.
    with gi.publish("camera", (SIZE, SIZE), slots=4) as camera, ProcessPoolExecutor(2, spawn) as pool:
        xp, array, stream = library(camera.device)
        viewers = [pool.submit(view, pause) for pause in (0, 0.2)]
        for number in itertools.count(1):
            if all(one.done() for one in viewers):
                return [one.result() for one in viewers]
            cx, cy = where(number)
            ball = 255 * np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / 500)
            with camera.write(stream) as frame:
                array(frame)[:] = xp.asarray(np.maximum(noise, ball).astype(np.uint8))
            time.sleep(1 / FPS)
    raise AssertionError


def draw(fast: Seen, slow: Seen) -> None:
    """Draw the path that the fast viewer saw on the slow viewer's exposure."""
    from PIL import Image, ImageDraw, ImageOps

    grey = Image.fromarray(slow.exposure)
    picture = ImageOps.colorize(grey, "#0b1020", "#fff0c0", mid="#c2452d", blackpoint=40, midpoint=140)
    pen = ImageDraw.Draw(picture)
    pen.line(list(fast.path.values()), fill=(64, 190, 210), width=2)
    for x, y in slow.path.values():
        pen.rectangle((x - 30, y - 30, x + 30, y + 30), outline=(250, 200, 80), width=2)
    picture.save("camera.png")


def main() -> None:
    fast, slow = film()
    draw(fast, slow)
    for name, seen in (("fast", fast), ("slow", slow)):
        error = max(np.abs(np.subtract(centre, where(number))).max() for number, centre in seen.path.items())
        assert error < 1, f"the ball is {error} pixels away from where it was filmed"
        assert len(seen.path) + seen.missed == max(seen.path) - min(seen.path) + 1
        print(f"the {name} viewer saw {len(seen.path)} frames, missed {seen.missed}, found the ball within a pixel")
    assert slow.missed > fast.missed
    print("camera.png")


if __name__ == "__main__":
    main()
