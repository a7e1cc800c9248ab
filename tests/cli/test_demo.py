"""The command, as a user calls it. In a process of its own where that shows: its status, its environment, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpuinterop.cli.demo import command, consumer, parties
from gpuinterop.cli.demo.simulation import WaveParameters
from gpuinterop.cli.demo.wave import Sync, WaveRun
from gpuinterop.exporters import process
from tests.programs import python

from .invoke import Done, invoke
from .parties import require_driver

KEYS = [
    "backend", "device", "exporter", "driver", "sync", "memory_handle", "semaphore_handle", "frames", "size",
    "shared_bytes", "frame_us", "staging_ratio", "max_error", "correct", "output",
]  # fmt: skip
SHORT = ("--exporter", "process", "--frames", "4", "--json")


def demo(folder: Path, *arguments: str) -> Done:
    with contextlib.chdir(folder):
        return invoke("demo", "--size", "64x48", *arguments)


def demo_process(folder: Path, *arguments: str, **environment: str) -> Done:
    command = ("-W", "error", "-m", "gpuinterop", "demo", "--size", "64x48", *arguments)
    done = python(*command, cwd=folder, seconds=100, **environment)
    return Done(done.returncode, done.stdout, done.stderr)


def parsed(result: Done) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)  # and nothing beside it
    assert list(found) == KEYS
    return found


def test_process(tmp_path: Path) -> None:
    result = demo_process(tmp_path, "--exporter", "process", "--frames", "30", "--json")
    assert (result.exit_code, result.stderr) == (0, "")  # warnings are errors, which finalizers can only print
    found = parsed(result)
    assert found["exporter"] == "process"
    assert found["sync"] == "timeline"
    assert found["semaphore_handle"] == "timeline_fd"
    assert found["memory_handle"] == "opaque_fd"
    assert found["frames"] == 30
    assert found["size"] == [64, 48]
    assert found["shared_bytes"] == 2 * 64 * 48 * 4
    assert found["max_error"] == 0.0
    assert found["correct"] is True
    assert found["frame_us"]["median"] > 0
    assert found["frame_us"]["p99"] >= found["frame_us"]["median"]
    assert found["staging_ratio"] > 0
    assert found["output"] == "wave.png"
    with Image.open(tmp_path / "wave.png") as image:
        assert image.format == "PNG"
        assert image.size == (512, 384)


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


def test_by_default_vulkan_with_shared_semaphores(tmp_path: Path) -> None:
    require_driver("swiftshader")
    found = parsed(demo(tmp_path, "--backend", "host", "--frames", "3", "--json"))
    assert found["exporter"] == "vulkan"
    assert found["sync"] == "binary"
    assert found["backend"] == "host"


def test_without_vulkan_a_process_and_it_is_said(tmp_path: Path) -> None:
    result = demo_process(
        tmp_path, "--frames", "3", "--json", VK_DRIVER_FILES="/nowhere.json", VK_ICD_FILENAMES="/nowhere.json"
    )
    assert result.exit_code == 0, result.stderr
    assert parsed(result)["exporter"] == "process"
    assert "no Vulkan driver to share with" in result.stderr


def test_for_people(tmp_path: Path) -> None:
    result = demo(tmp_path, "--exporter", "process", "--frames", "3")
    assert result.exit_code == 0
    for word in (
        "process",
        "host:",
        "OpaqueFd",
        "TimelineFd",
        "3 of 64 x 48",
        "median",
        "p99",
        "wave.png",
        "correct",
    ):
        assert word in result.stdout


def outcome(shared: float, staged: float) -> WaveRun:
    """A run whose frames took so many microseconds, shared and with copies."""
    parameters = WaveParameters(width=16, height=16)
    return WaveRun(
        backend="gpu", device="GPU", exporter="vulkan", driver="driver", consumer="torch", sync=Sync("host", None),
        memory_handle="opaque_fd", semaphore_handle=None, frames=3, parameters=parameters, shared_bytes=2048,
        frame_us=[shared] * 3, staged_us=[staged] * 3, max_error=0.0, problem="", field=np.zeros((16, 16), np.float32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("is_cpu", "shared", "staged"), [(True, 900, 810), (True, 900, 1800), (False, 200, 2000), (False, 300, 100)]
)
def test_what_copies_cost(is_cpu: bool, shared: float, staged: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Two times with a bar each; on a CPU, where there is nothing in it, a sentence instead."""
    command._show(outcome(shared, staged), None, is_cpu=is_cpu)
    shown = capsys.readouterr().out
    times = re.findall(r"^  (shared|with copies) +([\d,]+) us +(█+)$", shown, re.MULTILINE)
    alike = is_cpu and staged < 1.2 * shared
    assert ("no GPU here: a copy is as cheap as sharing" in shown) == alike
    if alike:
        assert times == []
        return
    assert [(name, float(time.replace(",", ""))) for name, time, _ in times] == [
        ("shared", shared), ("with copies", staged),
    ]  # fmt: skip
    ours, theirs = (len(bar) for *_, bar in times)
    assert max(ours, theirs) == 40
    assert ours / theirs == pytest.approx(shared / staged, rel=0.05)


def test_for_people_the_reason_for_the_bridge(tmp_path: Path) -> None:
    require_driver("lavapipe")
    result = demo(tmp_path, "--driver", "lavapipe", "--frames", "3")
    assert result.exit_code == 0
    assert "bridged" in result.stdout
    assert "VK_KHR_external_semaphore_fd" in result.stdout


def test_without_a_bridge_the_host_waits_and_it_is_said(tmp_path: Path) -> None:
    require_driver("lavapipe")
    result = demo_process(tmp_path, "--driver", "lavapipe", "--frames", "3", GPUINTEROP_DISABLE="stream_memory_ops")
    assert result.exit_code == 0
    for word in ("none are shared", "VK_KHR_external_semaphore_fd", "GPUINTEROP_DISABLE", "correct"):
        assert word in result.stdout


def test_a_mode_that_does_not_work_is_refused(tmp_path: Path) -> None:
    require_driver("lavapipe")
    result = demo(tmp_path, "--driver", "lavapipe", "--sync", "native", "--frames", "3", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "VK_KHR_external_semaphore_fd" in result.stderr


@pytest.mark.parametrize("sabotage", ["exporter_signal", "consumer_wait", "consumer_signal", "exporter_wait"])
def test_the_exit_status_tells(sabotage: str, tmp_path: Path) -> None:
    timeout = "0.2" if "signal" in sabotage else "20"
    result = demo(
        tmp_path, "--exporter", "process", "--frames", "4", "--json", "--sabotage", sabotage, "--timeout", timeout
    )
    assert result.exit_code == 1
    found = parsed(result)
    assert found["correct"] is False
    assert found["max_error"] > 0.1
    assert "not correct" in result.stderr


def test_a_device_that_cannot_time_out_hangs_as_little(tmp_path: Path) -> None:
    # As on a GPU: the stream waits until somebody signals, and that is the demo itself, in the end.
    result = demo_process(
        tmp_path, "--exporter", "process", "--frames", "4", "--json", "--sabotage", "exporter_signal", "--timeout",
        "0.2", GPUINTEROP_DISABLE="wait_timeout",
    )  # fmt: skip
    assert result.exit_code == 1, result.stderr
    assert parsed(result)["correct"] is False
    assert "is not idle after 0.2 s" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--backend", "nowhere"], {}, "no backend 'nowhere'; installed:"),
        ([], {"GPUINTEROP_BACKEND": "nowhere"}, "GPUINTEROP_BACKEND: there is no backend 'nowhere'; installed:"),
        (["--exporter", "process", "--driver", "swiftshader"], {}, "--exporter vulkan"),
        (["--size", "64"], {}, "512x512"),
        (["--size", "8x8"], {}, "16 to 8192"),
        (["--frames", "0"], {}, "--frames"),
        (["--output", "no/where/wave.png"], {}, "no folder"),
    ],
)
def test_errors_say_what_to_do(
    arguments: list[str], environment: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = demo(tmp_path, "--json", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


def test_a_picture_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    result = demo(tmp_path, "--exporter", "process", "--frames", "3", "--json", "--output", str(tmp_path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "is a directory" in result.stderr


def test_a_read_only_folder_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def access(path: Path, mode: int) -> bool:  # root may write everywhere
        return real(path, mode) and not (Path(path) == tmp_path and mode & os.W_OK)

    real = os.access
    monkeypatch.setattr(os, "access", access)
    result = invoke("demo", "--exporter", "process", "--output", str(tmp_path / "a.png"))
    assert result.exit_code == 2
    assert "not writable" in result.output
    (tmp_path / "b.png").touch()  # but what is there may be written, whatever its folder
    result = invoke(
        "demo", "--exporter", "process", "--frames", "2", "--size", "16x16", "--output", str(tmp_path / "b.png")
    )
    assert result.exit_code == 0, result.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("as_json", [True, False])
def test_a_picture_that_fails_costs_no_result(as_json: bool, tmp_path: Path) -> None:
    arguments = ["--exporter", "process", "--frames", "3", "--output", "/dev/full", *["--json"] * as_json]
    result = demo(tmp_path, *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: /dev/full cannot be written: ")
    if as_json:
        found = parsed(result)
        assert found["correct"] is True
        assert found["output"] is None
    else:
        assert "correct" in result.stdout
        assert "/dev/full" not in result.stdout


def test_warnings_of_the_choice_are_notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = parties.find_device
    monkeypatch.setattr(
        command,
        "find_device",
        lambda *given: (warnings.warn("fell back", RuntimeWarning, stacklevel=1), real(*given))[1],
    )
    result = demo(tmp_path, *SHORT)
    assert (result.exit_code, result.stderr) == (0, "note: fell back\n")


def test_an_interrupt_among_the_imports_is_one_line(tmp_path: Path) -> None:
    program = (
        "import signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, *more):\n"
        "        if name == 'gpuinterop.cli.demo':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\n"
        "from gpuinterop.cli import main; main()"
    )
    done = python("-c", program, "demo", seconds=100, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def strike(*arguments: object) -> Any:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("owner", "name"), [(process, "_identity"), (consumer.NumpyConsumer, "work")], ids=["choice", "run"]
)
def test_an_interrupt_is_one_line(owner: object, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(owner, name, strike)
    result = demo(tmp_path, *SHORT)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_no_vulkan_and_vulkan_wanted(tmp_path: Path) -> None:
    result = demo_process(
        tmp_path, "--exporter", "vulkan", VK_DRIVER_FILES="/nowhere.json", VK_ICD_FILENAMES="/nowhere.json"
    )
    assert result.exit_code == 2
    assert "--exporter process" in result.stderr
    assert "Traceback" not in result.stderr
