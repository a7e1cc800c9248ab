"""``gpuinterop demo``: a wave in memory that two sides share."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from ...errors import InvalidArgumentError
from ...installing import pip_install
from ..console import bar, complain, handle_name, note, progress, say
from .opengl import OpenGLParty, run_wave_in_opengl
from .parties import find_device, open_party
from .picture import render
from .simulation import WaveParameters
from .wave import Sabotage, WaveRun, choose_sync, run_wave

__all__ = ["add_arguments", "command"]

DAMPING = 0.9955
"""Damping: waves fade before their echoes return from the border to the middle, so the rings stay clear."""
_BAR: Final = 40
"""Characters of a full bar."""
_CHEAP: Final = 1.2
"""Copies that take less than this many times as long count as equally fast: runs differ that much."""
_LABEL: Final = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpuinterop demo``."""
    parser.add_argument(
        "--backend", metavar="NAME", help="the compute side; by default the backend that matches the exporter"
    )
    parser.add_argument(
        "--exporter",
        choices=["vulkan", "opengl", "process"],
        help="the other side: a compute shader in Vulkan or OpenGL, which also draws the picture, or a child process "
        "with NumPy; by default Vulkan if there is a driver",
    )
    parser.add_argument("--driver", metavar="NAME", help="part of the driver's name: swiftshader, lavapipe, nvidia")
    parser.add_argument(
        "--sync",
        choices=["auto", "native", "bridged"],
        default="auto",
        help="how the two take turns. native: semaphores that both drivers support; bridged: the exporter's, whose "
        "signals a CPU thread passes to the stream and back (in OpenGL, the host polls fences); "
        "auto (the default): the first mode that works, otherwise the host waits for each side",
    )
    parser.add_argument("--frames", metavar="N", type=_frames, default=600, help="frames on each side (default: 600)")
    parser.add_argument(
        "--size", metavar="WxH", type=_size, default=(512, 512), help="the field's size in cells (default: 512x512)"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("wave.png"),
        help="file of the picture (default: wave.png)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    parser.add_argument("--sabotage", choices=[entry.value for entry in Sabotage], help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=float, default=10.0, help=argparse.SUPPRESS)


def _frames(text: str) -> int:
    frames = int(text)
    if not 1 <= frames <= 1_000_000:
        raise argparse.ArgumentTypeError(f"expected 1 to 1000000 frames, got {frames}.")
    return frames


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected a size such as 512x512, got {text!r}.")
    size = int(width), int(height)
    if not all(16 <= edge <= 8192 for edge in size):
        raise argparse.ArgumentTypeError(f"expected 16 to 8192 cells along each edge, got {text!r}.")
    return size


def command(given: argparse.Namespace) -> int:
    """Run a wave in shared memory, alternating between both sides, and check every number.

    In each frame the exporter steps the field and signals. The backend's stream waits for the signal, reads the field
    through a view without a copy, writes a disturbance that depends on it, and signals back. The final field is
    compared with a NumPy simulation of the same frames; the exit status is 0 only if they agree.
    """
    draws = importlib.util.find_spec("PIL") is not None
    if not draws:
        note(f"no picture is drawn: that needs PIL. {pip_install('cli')}")
    _check_target(given.output)
    with ExitStack() as cleanup:
        with _noted_warnings():
            party: Any = cleanup.enter_context(open_party(given.exporter, given.driver, given.backend))
            device = find_device(party.identity, given.backend)
        if in_opengl := isinstance(party, OpenGLParty):
            chosen = choose_sync(party.facts, device, given.sync, gaps_of=party.facts.gaps)
        else:
            chosen = choose_sync(party, device, given.sync)
        run = (run_wave_in_opengl if in_opengl else run_wave)(
            party,
            device,
            WaveParameters(width=given.size[0], height=given.size[1], damping=DAMPING),
            given.frames,
            sync=chosen,
            timeout=given.timeout,
            tick=None if given.json else _show_progress,
            sabotage=Sabotage(given.sabotage) if given.sabotage else None,
        )
    failure = ""
    try:
        if draws:
            from PIL import Image

            image = render(run.field) if run.picture is None else Image.fromarray(run.picture).convert("RGB")
            image.save(given.output, format="PNG", optimize=True)
    except Exception as error:  # of any kind: the result matters more than its picture, and is printed first
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        failure = f"error: {given.output} cannot be written: {why}."
    if given.json:
        print(json.dumps(run.as_dict(str(given.output) if draws and not failure else None), indent=2))
    else:
        _show(run, given.output if draws and not failure else None, is_cpu=device.identity.is_cpu)
    if failure:
        complain(failure)
    if not run.correct:
        complain(_verdict(run))
        return 1
    return 2 if failure else 0


def _check_target(output: Path) -> None:
    """Check the options before the run, which can take long."""
    if output.is_dir():
        raise InvalidArgumentError("--output", f"{str(output)!r} is a directory.")
    if not output.parent.is_dir():
        raise InvalidArgumentError("--output", f"expected an existing folder, got {str(output.parent)!r}.")
    if not output.exists() and not os.access(output.parent, os.W_OK | os.X_OK):
        raise InvalidArgumentError("--output", f"the folder {str(output.parent)!r} is not writable.")
    if output.exists() and not os.access(output, os.W_OK):
        raise InvalidArgumentError("--output", f"{str(output)!r} is not writable.")


@contextmanager
def _noted_warnings() -> Iterator[None]:
    """Print warnings as notes, before an error too, while exporter and device are chosen; not during the run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            yield
        finally:
            for warning in caught:
                note(str(warning.message))


def _show_progress(done: int, frames: int) -> None:
    """Show a bar on a terminal, but only when it grows: printing takes longer than a frame."""
    if done * _BAR // frames != (done - 1) * _BAR // frames:
        progress(f"wave {bar(done / frames, _BAR):{_BAR}} {done} of {frames} frames")


def _show(run: WaveRun, output: Path | None, *, is_cpu: bool) -> None:
    def line(name: str, text: str, *more: tuple[str, str]) -> None:
        say((f"{name:{_LABEL}}", "bold"), (text, ""), *more, hang=_LABEL)

    line("exporter", f"{run.exporter}: {run.driver}")
    line("device", f"{run.backend}: {run.device}")
    line("consumer", run.consumer)
    line("memory", f"{handle_name(run.memory_handle)}, {_bytes(run.shared_bytes)} shared, not copied")
    line("semaphores", _semaphores(run))
    line("frames", f"{len(run.frame_us)} of {run.parameters.width} x {run.parameters.height} cells")
    if run.median_us is not None and run.p99_us is not None:
        line("a frame", f"median {run.median_us:,.0f} us, p99 {run.p99_us:,.0f} us")
    if (ratio := run.staging_ratio) is not None:
        assert run.median_us is not None
        if is_cpu and ratio < _CHEAP:
            line("with copies", "no GPU here, and almost no difference: a GPU's copies cost more")
        else:
            for name, times in (("  shared", 1.0), ("  with copies", ratio)):
                length = times / max(1.0, ratio)
                line(name, f"{times * run.median_us:>9,.0f} us  ", (bar(length, _BAR), "green"))
    if output is not None:
        line("picture", str(output))
    if run.correct:
        off = f"within {run.max_error:.1g} of" if run.max_error else "equal in every cell to"
        line("field", "", ("correct", "green"), (f": {off} the NumPy simulation", ""))
    else:
        line("field", "", ("WRONG", "red"), (f": {run.max_error:.3g} off the NumPy simulation", ""))


def _semaphores(run: WaveRun) -> str:
    if run.sync.name == "host":
        return f"none are shared, so the host waits for each side. {run.sync.reason}"
    if run.sync.name == "bridged":
        how = "a timeline of the exporter's, bridged: a CPU thread passes its signals to the stream and back."
        if run.exporter == OpenGLParty.name:
            how = "none are shared; bridged: the host polls an OpenGL fence, and waits for the stream."
        return f"{how} {run.sync.reason}".strip()
    what = "one timeline for both ways" if run.sync.name == "timeline" else "two binary semaphores, one each way"
    assert run.semaphore_handle is not None
    return f"{handle_name(run.semaphore_handle)}, {what}, shared"


def _verdict(run: WaveRun) -> str:
    if run.problem:
        return f"not correct: {run.problem}"
    return (
        f"not correct: the final field is {run.max_error:.3g} off the NumPy simulation: "
        "the two sides were out of step, or did not see each other's writes."
    )


def _bytes(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}"
        count = count // 1024 if count % 1024 == 0 else round(count / 1024)
    return f"{count:g} GiB"
