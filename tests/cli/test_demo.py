"""`gpuinterop demo`, as a user calls it: the exit status, the JSON and the picture.

In a process of its own where that shows. Where something is taken out of the run, nothing of the demo's is patched but
what it calls: an exporter's `submit`, and gpuinterop's semaphores and streams.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import gpuinterop as gi
from gpuinterop.testing.exporters.process import ProcessExporter
from gpuinterop.testing.exporters.vulkan import VulkanExporter
from tests.limits import LIMIT
from tests.programs import python

from .invoke import Done, invoke
from .parties import require_driver

KEYS = [
    "backend", "device", "exporter", "driver", "sync", "memory_handle", "semaphore_handle", "frames", "size",
    "shared_bytes", "frame_us", "max_error", "correct", "output",
]  # fmt: skip
SHORT = ("--exporter", "process", "--frames", "4", "--json")
EXPORTERS = {
    "process": ["--exporter", "process"],
    "process-bridged": ["--exporter", "process", "--sync", "bridged"],
    "swiftshader": ["--driver", "swiftshader"],
    "swiftshader-bridged": ["--driver", "swiftshader", "--sync", "bridged"],
    "lavapipe": ["--driver", "lavapipe"],
}


def demo(folder: Path, *arguments: str) -> Done:
    with contextlib.chdir(folder):
        return invoke("demo", "--size", "64x48", *arguments)


def demo_process(folder: Path, *arguments: str, **environment: str) -> Done:
    done = python("-W", "error", "-m", "gpuinterop", "demo", *arguments, cwd=folder, **environment)
    return Done(done.returncode, done.stdout, done.stderr)


def parsed(result: Done) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)  # and nothing beside it
    assert list(found) == KEYS
    return found


@pytest.fixture(params=EXPORTERS)
def exporter(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if not name.startswith("process"):
        require_driver(name.partition("-")[0])
    return name


def test_a_process(tmp_path: Path) -> None:
    result = demo_process(tmp_path, "--exporter", "process", "--size", "64x48", "--frames", "30", "--json")
    assert (result.exit_code, result.stderr) == (0, "")  # warnings are errors, which finalizers can only print
    found = parsed(result)
    median, p99 = found.pop("frame_us").values()
    assert 0 < median <= p99
    assert found.items() >= {
        "exporter": "process", "sync": "timeline", "semaphore_handle": "timeline_fd", "memory_handle": "opaque_fd",
        "frames": 30, "shared_bytes": 2 * 64 * 48 * 4, "max_error": 0.0, "correct": True, "output": "wave.png",
    }.items()  # fmt: skip
    assert found["size"] == [64, 48]
    with Image.open(tmp_path / "wave.png") as image:
        assert (image.format, image.size) == ("PNG", (512, 384))


@pytest.mark.parametrize("frames", [1, 2, 33])
def test_each_exporter_and_way_to_take_turns(exporter: str, frames: int, tmp_path: Path) -> None:
    result = demo(tmp_path, *EXPORTERS[exporter], "--frames", f"{frames}", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = parsed(result)
    sync = {"process": "timeline", "swiftshader": "binary"}.get(exporter, "bridged")
    assert (found["exporter"] == "process") is exporter.startswith("process")
    assert found["sync"] == sync
    assert found["semaphore_handle"] == {"timeline": "timeline_fd", "binary": "opaque_fd"}.get(sync)
    assert found["frames"] == frames
    assert found["correct"] is True


def test_the_picture_shows_the_wave_that_the_other_side_reads(tmp_path: Path) -> None:
    """It is the same whoever the other side is, and another one after more frames."""
    require_driver("swiftshader")
    drawn = []
    for exporter, frames in (("process", 30), ("swiftshader", 30), ("process", 31)):
        result = demo(tmp_path, *EXPORTERS[exporter], "--size", "512x96", "--frames", f"{frames}")
        assert (result.exit_code, result.stderr) == (0, "")
        assert "correct" in result.stdout
        with Image.open(tmp_path / "wave.png") as image:
            assert (image.format, image.size) == ("PNG", (512, 96))
            drawn.append(np.asarray(image, np.int16))
    assert drawn[0].std() > 20, "there are waves"
    assert (drawn[0] == drawn[1]).all()
    assert np.abs(drawn[0] - drawn[2]).max() > 20


def test_without_vulkan_a_process_and_it_is_said(tmp_path: Path) -> None:
    nowhere = dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), "/nowhere.json")
    result = demo_process(tmp_path, "--frames", "3", "--json", **nowhere)
    assert result.exit_code == 0, result.stderr
    assert parsed(result)["exporter"] == "process"
    assert "no Vulkan driver to share with" in result.stderr
    result = demo_process(tmp_path, "--exporter", "vulkan", **nowhere)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--exporter process" in result.stderr


def test_a_way_that_does_not_work_is_refused(tmp_path: Path) -> None:
    """A driver without semaphores that it exports, and then no bridge either."""
    require_driver("lavapipe")
    result = demo(tmp_path, "--driver", "lavapipe", "--sync", "native")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "VK_KHR_external_semaphore_fd" in result.stderr
    result = demo_process(tmp_path, "--driver", "lavapipe", GPUINTEROP_DISABLE="stream_memory_ops")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "GPUINTEROP_DISABLE" in result.stderr


# -- what is wrong shows -----------------------------------------------------------------------------------------------


def submits(exporter: str) -> tuple[type[Any], Callable[..., Any]]:
    kind: type[Any] = ProcessExporter if exporter.startswith("process") else VulkanExporter
    return kind, kind.submit


def test_what_the_exporter_waits_for_and_signals(
    exporter: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every frame but the first waits for the device's frame before it; on a CPU the field cannot show that."""
    calls = []

    def submit(self: Any, **work: Any) -> Any:
        calls.append(work)
        return real(self, **work)

    kind, real = submits(exporter)
    monkeypatch.setattr(kind, "submit", submit)
    assert demo(tmp_path, *EXPORTERS[exporter], "--frames", "4").exit_code == 0
    waits = [[value for _, value in work["wait"]] for work in calls]
    signals = [[value for _, value in work["signal"]] for work in calls]
    assert (waits, signals) == ([[], [2], [4], [6]], [[1], [3], [5], [7]])
    semaphores = {semaphore for work in calls for pairs in (work["wait"], work["signal"]) for semaphore, _ in pairs}
    assert len(semaphores) == (2 if exporter == "swiftshader" else 1)


def test_without_the_devices_wait_the_field_is_wrong(
    exporter: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every time: the exporter draws each frame only when the device, which does not wait, has stepped it."""
    held: list[Callable[[], Any]] = []

    def submit(self: Any, **work: Any) -> Any:
        held.append(partial(real_submit, self, **work))
        return SimpleNamespace(done=lambda timeout: not held, close=lambda: None)

    def signal_after_the_exporter(semaphore: Any, stream: gi.Stream, *value: int) -> None:
        stream.synchronize(LIMIT)
        assert held.pop()().done(LIMIT)
        real_signal(semaphore, stream, *value)

    kind, real_submit = submits(exporter)
    real_signal: Any = gi.ExternalSemaphore.signal
    monkeypatch.setattr(kind, "submit", submit)
    monkeypatch.setattr(gi.ExternalSemaphore, "wait", lambda *arguments, **options: None)
    monkeypatch.setattr(gi.ExternalSemaphore, "signal", signal_after_the_exporter)
    result = demo(tmp_path, *EXPORTERS[exporter], "--frames", "4", "--json")
    found = parsed(result)
    assert (result.exit_code, found["correct"]) == (1, False)
    assert found["max_error"] > 0.1
    assert found["frame_us"]["median"] > 0
    assert "not correct: the final field" in result.stderr


@pytest.mark.parametrize("side", ["exporter", "device"])
def test_without_a_signal_the_run_ends_and_says_what_is_missing(
    side: str, exporter: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    streams = []

    def signal_unless_it_is_the_demos(semaphore: Any, stream: gi.Stream, *value: int) -> None:
        streams.append(stream)
        if stream is not streams[0]:  # the stream that ends the wait at last
            real_signal(semaphore, stream, *value)

    def synchronize_soon(stream: gi.Stream, timeout: float) -> None:
        real_synchronize(stream, min(timeout, 0.25))

    kind, real_submit = submits(exporter)
    real_signal: Any = gi.ExternalSemaphore.signal
    real_synchronize = gi.Stream.synchronize
    if side == "exporter":
        monkeypatch.setattr(kind, "submit", lambda self, **work: real_submit(self, **{**work, "signal": ()}))
    else:
        monkeypatch.setattr(gi.ExternalSemaphore, "signal", signal_unless_it_is_the_demos)
    monkeypatch.setattr(gi.Stream, "synchronize", synchronize_soon)
    result = demo(tmp_path, *EXPORTERS[exporter], "--frames", "4", "--json")
    found = parsed(result)
    assert (result.exit_code, found["correct"], found["max_error"], found["output"]) == (1, False, None, None)
    assert "not correct: frame " in result.stderr
    assert "may be waiting for" in result.stderr


def test_one_row_that_the_exporter_draws_wrong_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def submit(self: Any, **work: Any) -> Any:
        frames.append(work)
        if len(frames) == 2:
            work["fill"][0] = replace(work["fill"][0], word=0)
        return real(self, **work)

    frames: list[Any] = []
    kind, real = submits("process")
    monkeypatch.setattr(kind, "submit", submit)
    result = demo(tmp_path, *SHORT)
    found = parsed(result)
    assert (result.exit_code, found["correct"]) == (1, False)
    assert 1e-3 < found["max_error"] < 2


def test_an_exporter_that_dies_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def submit(self: ProcessExporter, **work: Any) -> Any:
        frames.append(real(self, **work))
        if len(frames) == 3:
            assert frames[-1].done(LIMIT)
            self.kill()
        return frames[-1]

    frames: list[Any] = []
    kind, real = submits("process")
    monkeypatch.setattr(kind, "submit", submit)
    result = demo(tmp_path, *SHORT)
    assert (result.exit_code, parsed(result)["correct"]) == (1, False)
    assert "SIGKILL" in result.stderr


# -- what it refuses, and what fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--backend", "nowhere"],
        ["--driver", "swiftshader", "--exporter", "process"],
        ["--size", "8x8"],
        ["--size", "64"],
        ["--frames", "0"],
        ["--output", "no/where/wave.png"],
        ["--output", "."],
    ],
)
def test_what_cannot_be_is_refused_before_the_run(arguments: list[str], tmp_path: Path) -> None:
    result = demo(tmp_path, "--json", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert arguments[0].strip("-") in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_picture_that_fails_costs_no_result(tmp_path: Path) -> None:
    result = demo(tmp_path, *SHORT, "--output", "/dev/full")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: /dev/full cannot be written: ")
    found = parsed(result)
    assert (found["correct"], found["output"]) == (True, None)


def test_without_pillow_the_demo_draws_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "PIL" else find(name, *more))
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = demo(tmp_path, *SHORT)
    assert result.exit_code == 0, result.stderr
    assert "PIL" in result.stderr
    assert parsed(result)["output"] is None
    assert not (tmp_path / "wave.png").exists()


def test_an_interrupt_is_one_line(exporter: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While the device waits for a signal that does not come, because the exporter leaves it out."""

    def interrupted(stream: gi.Stream, timeout: float | None = None) -> None:
        if not calls:
            calls.append(timeout)
            signal.raise_signal(signal.SIGINT)
        real_synchronize(stream, timeout)

    kind, real_submit = submits(exporter)
    real_synchronize, calls = gi.Stream.synchronize, list[float | None]()
    monkeypatch.setattr(kind, "submit", lambda self, **work: real_submit(self, **{**work, "signal": ()}))
    monkeypatch.setattr(gi.Stream, "synchronize", interrupted)
    result = demo(tmp_path, *EXPORTERS[exporter], "--frames", "4", "--json")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")
