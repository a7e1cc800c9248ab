"""The command, as a user calls it. In a process of its own where that shows: its status, its environment, Ctrl-C."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpuinterop.cli.demo import consumer
from gpuinterop.cli.demo.command import DAMPING
from gpuinterop.cli.demo.picture import render
from gpuinterop.cli.demo.simulation import Sources, WaveParameters, simulate
from tests.limits import LIMIT
from tests.programs import python

from .invoke import Done, invoke
from .parties import require_driver, require_opengl

KEYS = [
    "backend", "device", "exporter", "driver", "sync", "memory_handle", "semaphore_handle", "frames", "size",
    "shared_bytes", "frame_us", "staging_ratio", "max_error", "correct", "output",
]  # fmt: skip
SHORT = ("--exporter", "process", "--frames", "4", "--json")


def demo(folder: Path, *arguments: str) -> Done:
    with contextlib.chdir(folder):
        return invoke("demo", "--size", "64x48", "--timeout", f"{LIMIT}", *arguments)


def demo_process(folder: Path, *arguments: str, **environment: str) -> Done:
    command = ("-W", "error", "-m", "gpuinterop", "demo", "--size", "64x48", "--timeout", f"{LIMIT}", *arguments)
    done = python(*command, cwd=folder, **environment)
    return Done(done.returncode, done.stdout, done.stderr)


def parsed(result: Done) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)  # and nothing beside it
    assert list(found) == KEYS
    return found


def test_process(tmp_path: Path) -> None:
    result = demo_process(tmp_path, "--exporter", "process", "--frames", "30", "--json")
    assert (result.exit_code, result.stderr) == (0, "")  # warnings are errors, which finalizers can only print
    found = parsed(result)
    median, p99 = found.pop("frame_us").values()
    assert 0 < median <= p99
    assert found.pop("staging_ratio") > 0
    assert found.items() >= {
        "exporter": "process", "sync": "timeline", "semaphore_handle": "timeline_fd", "memory_handle": "opaque_fd",
        "frames": 30, "shared_bytes": 2 * 64 * 48 * 4, "max_error": 0.0, "correct": True, "output": "wave.png",
    }.items()  # fmt: skip
    assert found["size"] == [64, 48]
    with Image.open(tmp_path / "wave.png") as image:
        assert (image.format, image.size) == ("PNG", (512, 384))


@pytest.mark.parametrize(
    ("driver", "mode", "sync"),
    [
        ("swiftshader", "auto", "binary"),
        ("swiftshader", "bridged", "bridged"),
        ("lavapipe", "auto", "bridged"),
    ],
)
def test_vulkan(driver: str, mode: str, sync: str, tmp_path: Path) -> None:
    require_driver(driver)
    result = demo(tmp_path, "--driver", driver, "--sync", mode, "--frames", "8", "--json", "--output", "a.png")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    found = parsed(result)
    assert found["exporter"] == "vulkan"
    assert found["sync"] == sync
    assert found["memory_handle"] == "opaque_fd"
    assert found["semaphore_handle"] == ("opaque_fd" if sync == "binary" else None)
    assert found["correct"] is True
    assert (tmp_path / "a.png").exists()


def test_opengl_draws_what_numpy_simulates(tmp_path: Path) -> None:
    require_opengl()
    size = 512, 96
    result = demo(tmp_path, "--exporter", "opengl", "--size", "512x96", "--frames", "30", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = parsed(result)
    assert found.items() >= {
        "exporter": "opengl", "sync": "bridged", "memory_handle": "opaque_fd", "semaphore_handle": None,
        "size": [*size], "max_error": 0.0, "correct": True, "output": "wave.png",
    }.items()  # fmt: skip
    fields = simulate(WaveParameters(width=size[0], height=size[1], damping=DAMPING), 30, Sources(*size))
    with Image.open(tmp_path / "wave.png") as image:
        drawn = np.asarray(image, np.int16)
    assert drawn.std() > 20, "there are waves"
    assert np.abs(drawn - np.asarray(render(fields[0]), np.int16)).max() <= 2


def test_a_frame_that_opengl_does_not_see_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_opengl()
    work = consumer.NumpyConsumer.work

    def all_but_one(self: consumer.NumpyConsumer, frame: int, timeout: float) -> None:
        if frame != 2:
            work(self, frame, timeout)

    monkeypatch.setattr(consumer.NumpyConsumer, "work", all_but_one)
    result = demo(tmp_path, "--exporter", "opengl", "--frames", "4", "--json")
    assert (result.exit_code, parsed(result)["correct"]) == (1, False)


def test_without_vulkan_a_process_and_it_is_said(tmp_path: Path) -> None:
    result = demo_process(
        tmp_path, "--frames", "3", "--json", VK_DRIVER_FILES="/nowhere.json", VK_ICD_FILENAMES="/nowhere.json"
    )
    assert result.exit_code == 0, result.stderr
    assert parsed(result)["exporter"] == "process"
    assert "no Vulkan driver to share with" in result.stderr


def test_without_a_bridge_the_host_waits_and_it_is_said(tmp_path: Path) -> None:
    require_driver("lavapipe")
    result = demo_process(tmp_path, "--driver", "lavapipe", "--frames", "3", GPUINTEROP_DISABLE="stream_memory_ops")
    assert result.exit_code == 0
    for word in ("none are shared", "VK_KHR_external_semaphore_fd", "GPUINTEROP_DISABLE", "correct"):
        assert word in result.stdout


PARTIES = {
    "process": ["--exporter", "process"],
    "swiftshader": ["--driver", "swiftshader"],
    "bridged": ["--driver", "lavapipe", "--sync", "bridged"],
}


@pytest.mark.parametrize("party", PARTIES)
@pytest.mark.parametrize("sabotage", ["exporter_signal", "consumer_wait", "consumer_signal", "exporter_wait"])
def test_the_exit_status_tells(sabotage: str, party: str, tmp_path: Path) -> None:
    """Each of the four waits and signals is taken out in turn: the field is wrong, every time."""
    if party != "process":
        require_driver(PARTIES[party][1])
    short = ["--timeout", "0.2"] if "signal" in sabotage else []
    result = demo(tmp_path, *PARTIES[party], "--frames", "4", "--json", "--sabotage", sabotage, *short)
    assert result.exit_code == 1
    found = parsed(result)
    assert found["correct"] is False
    assert found["max_error"] > 0.1
    assert "not correct" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--backend", "nowhere"],
        ["--exporter", "process", "--driver", "swiftshader"],
        ["--driver", "nowhere", "--exporter", "opengl"],
        ["--size", "8x8"],
        ["--frames", "0"],
        ["--output", "no/where/wave.png"],
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


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(consumer.NumpyConsumer, "work", lambda *given: signal.raise_signal(signal.SIGINT))
    result = demo(tmp_path, *SHORT)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")
