"""``gpuinterop demo``: a wave in memory that an exporter and a device share."""

from __future__ import annotations

import argparse
import importlib.util
import json
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from ..._core.device import Device
from ..._core.discovery import get_backend, match_device
from ...errors import BackendUnavailableError, DeviceNotFoundError, InvalidArgumentError
from ...handles import DeviceIdentity
from ...installing import pip_install
from ...testing.exporters import open_exporter, vulkan
from ...testing.exporters.base import Exporter
from ..console import bar, complain, handle_name, note, progress, say
from .picture import render
from .wave import WaveRun, choose_sync, run_wave

__all__ = ["add_arguments", "command"]

_BAR: Final = 40
"""Characters of a full bar."""
_LABEL: Final = 12
_SEMAPHORES: Final = {
    "timeline": "one timeline for both ways, shared",
    "binary": "two binary semaphores, one each way, shared",
    "bridged": "the exporter's timeline, bridged: a CPU thread passes its signals to the stream and back",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpuinterop demo``."""
    argument = parser.add_argument
    argument("--backend", metavar="NAME", help="the compute side; by default the backend that matches the exporter")
    argument(
        "--exporter",
        choices=["vulkan", "process"],
        help="the other side: Vulkan, or a child process with the CPU; by default Vulkan if there is a driver",
    )
    argument("--driver", metavar="NAME", help="part of the Vulkan driver's name: swiftshader, lavapipe, nvidia")
    argument(
        "--sync",
        choices=["auto", "native", "bridged"],
        default="auto",
        help="how the two take turns. native: semaphores that both drivers support; bridged: the exporter's, whose "
        "signals a CPU thread passes to the stream and back; auto (the default): the first mode that works",
    )
    argument("--frames", metavar="N", type=_frames, default=600, help="frames on each side (default: 600)")
    argument("--size", metavar="WxH", type=_size, default=(512, 512), help="the field in cells (default: 512x512)")
    argument("--output", metavar="FILE", type=Path, default="wave.png", help="file of the picture (default: wave.png)")
    argument("--json", action="store_true", help="print only the result, as JSON")


def _frames(text: str) -> int:
    if not 1 <= (frames := int(text)) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"expected 1 to 1000000 frames, got {frames}.")
    return frames


def _size(text: str) -> tuple[int, int]:
    width, height = map(int, text.lower().split("x"))
    if not 16 <= min(width, height) <= max(width, height) <= 8192:
        raise argparse.ArgumentTypeError(f"expected 16 to 8192 cells along each edge, got {text!r}.")
    return width, height


def command(given: argparse.Namespace) -> int:
    """Run a wave in shared memory, alternating between both sides, and check every number.

    In each frame the exporter draws into the field and signals. The backend's stream waits for the signal, steps the
    wave through a view without a copy, and signals back. The final field is compared with a NumPy simulation of the
    same frames; the exit status is 0 only if they agree.
    """
    draws = importlib.util.find_spec("PIL") is not None
    if not draws:
        note(f"no picture is drawn: that needs PIL. {pip_install('cli')}")
    if given.output.is_dir() or not given.output.parent.is_dir():
        raise InvalidArgumentError("--output", f"expected a file in an existing folder, got {str(given.output)!r}.")
    with ExitStack() as scope:
        with warnings.catch_warnings(action="always", category=RuntimeWarning):
            warnings.showwarning = lambda message, *_, **__: note(str(message))
            exporter = scope.enter_context(_open_exporter(given.exporter, given.driver, given.backend))
            device = _find_device(exporter.identity, given.backend)
        sync = choose_sync(exporter, device, given.sync)
        run = run_wave(exporter, device, given.size, given.frames, sync, _show_progress)
    failure = ""
    if draws and run.field is not None:
        try:
            render(run.field).save(given.output, format="PNG", optimize=True)
            run.report["output"] = str(given.output)
        except Exception as error:  # of any kind: the result matters more than its picture, and is printed first
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            failure = f"error: {given.output} cannot be written: {why}."
    progress("")
    if given.json:
        print(json.dumps(run.report, indent=2))
    else:
        _show(run)
    if failure:
        complain(failure)
    if not run.report["correct"]:
        off = "the final field is not that of the NumPy simulation: a side missed a write of the other."
        complain(f"not correct: {run.problem or off}")
        return 1
    return 2 if failure else 0


def _show_progress(done: int, frames: int) -> None:
    """Show a bar on a terminal, but only when it grows: printing takes longer than a frame."""
    if done * _BAR // frames != (done - 1) * _BAR // frames:
        progress(f"wave {bar(done / frames, _BAR):{_BAR}} {done} of {frames} frames")


def _find_device(identity: DeviceIdentity, backend: str | None) -> Device:
    """Find the device of an exporter's identity: among `backend`'s devices, or with `gpuinterop.match_device`."""
    if backend is None:
        return match_device(identity)
    devices = get_backend(backend).devices()
    for device in devices:
        if not device.identity.conflicts(identity):
            return device
    names = ", ".join(device.name for device in devices) or "none"
    raise DeviceNotFoundError(
        f"expected backend {backend!r} to have the device {identity.name}, got {names}; choose another driver."
    )


def _open_exporter(name: str | None, driver: str | None, backend: str | None) -> Exporter:
    """Open the other side: by default Vulkan if a driver matches a device of `backend`, otherwise a process."""
    if name == "process":
        if driver is not None:
            raise InvalidArgumentError("--driver", "expected --exporter vulkan; a process has no drivers.")
        return open_exporter("memfd", process=True)
    if driver is not None:
        return open_exporter("vulkan", driver=driver)
    drivers, matching, unmatched = vulkan.list_drivers(), [], ""
    for candidate in drivers:
        try:
            device = _find_device(candidate.identity, backend)
        except DeviceNotFoundError as error:
            unmatched = unmatched or str(error)
            continue
        # GPUs first; then drivers that share semaphores.
        gaps = [gap is not None for gap in candidate.gaps(candidate, device).values()]
        matching.append((candidate.identity.is_cpu, gaps, candidate.index))
    if matching:
        return open_exporter("vulkan", device_index=min(matching)[-1])  # two GPUs can have the same name
    reason = " ".join(filter(None, (drivers.reason, unmatched)))
    if name is not None:
        raise BackendUnavailableError(reason, fix="`gpuinterop demo --exporter process` needs no driver.")
    note(f"no Vulkan driver to share with ({reason}) The other side is a process instead.")
    return open_exporter("memfd", process=True)


def _show(run: WaveRun) -> None:
    report = run.report
    median, p99 = report["frame_us"].values()
    lines = {
        "exporter": f"{report['exporter']}: {report['driver']}",
        "device": f"{report['backend']}: {report['device']}",
        "steps": run.stepper,
        "memory": f"{handle_name(report['memory_handle'])}, {report['shared_bytes'] / 2**20:.3g} MiB, not copied",
        "semaphores": _SEMAPHORES[report["sync"]],
        "frames": f"{report['frames']}, each in {median} us (median; p99 {p99} us)",
        "picture": report["output"],
        "field": f"largest error against the NumPy simulation: {report['max_error']}",
        "": "correct" if report["correct"] else "WRONG",
    }
    for name, text in lines.items():
        if text:
            style = {"correct": "green", "WRONG": "red"}.get(text, "")
            say((f"{name:{_LABEL}}", "bold"), (text, style), hang=_LABEL)
