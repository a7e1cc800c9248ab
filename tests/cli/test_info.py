"""What ``gpuinterop info`` prints, for programs and for people."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuinterop import OpaqueFd, Operation
from gpuinterop._core.discovery import LoadedBackend
from gpuinterop.capabilities import DOMAIN, Cell
from gpuinterop.testing.exporters import vulkan
from tests.programs import python

from .invoke import invoke
from .parties import require_driver, require_opengl


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What it prints as JSON, in a process of its own, without a note that something is missing."""
    for driver in ("swiftshader", "lavapipe"):
        require_driver(driver)
    require_opengl()
    done = python("-W", "error", "-m", "gpuinterop", "info", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout))


def test_the_shape(facts: dict[str, Any]) -> None:
    cells = [(cell.operation.value, cell.handle_type.type_name if cell.handle_type else None) for cell in DOMAIN]
    keys = ["operation", "handle_type", "support", "scope", "reason", "reference", "workaround"]
    assert list(facts) == ["backends", "exporters"]
    assert [one["name"] for one in facts["backends"] if one["available"]] == ["host"]
    assert [one["name"] for one in facts["exporters"]] == ["vulkan", "vulkan", "opengl", "process"]
    for backend in facts["backends"]:
        assert list(backend) == [
            "name", "available", "reason", "versions", "libraries", "stand_in", "unknown_version", "devices",
        ]  # fmt: skip
    devices = [device for backend in facts["backends"] for device in backend["devices"]]
    assert list(devices[0]) == ["ordinal", "name", "uuid", "pci_bus_id", "luid", "capabilities"]
    assert {tuple(exporter) for exporter in facts["exporters"]} == {("name", "driver", "device", "capabilities")}
    for owner in (*devices, *facts["exporters"]):
        assert [(cell["operation"], cell["handle_type"]) for cell in owner["capabilities"]] == cells
        assert all(list(cell) == keys for cell in owner["capabilities"])


def answer(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """The text of each label of the first lines, and the reasons of those that have one."""
    first, reasons, _ = text.split("\n\n", 2)
    lines: dict[str, str] = {}
    for line in first.splitlines()[1:]:
        label, _, rest = line.partition("  ")
        label = label or list(lines)[-1]
        lines[label] = f"{lines.get(label, '')} {rest.strip()}".strip()
    numbered = dict(re.findall(r"^(\[\d+\]) (.*(?:\n    .*)*)", reasons, re.MULTILINE))
    last = {label: re.findall(r"\[\d+\]", line)[-1:] for label, line in lines.items()}
    return lines, {label: " ".join(numbered[number].split()) for label, numbers in last.items() for number in numbers}


def test_a_line_answers_for_each_backend_and_driver(facts: dict[str, Any]) -> None:
    lines, reasons = answer(invoke("info").stdout)
    assert len(lines) == 7, "one for each backend and driver, and one that says what to try"
    for backend in facts["backends"]:
        if not backend["available"]:
            assert lines[backend["name"]].startswith("does not work [")
            assert reasons[backend["name"]] == " ".join(backend["reason"].split())
        for device in backend["devices"]:
            assert f"works: {device['name']}" in lines[f"{backend['name']}:{device['ordinal']}"]
    assert lines["host:0"].endswith(" exports memory VmmFd; arrays OpaqueFd; semaphores OpaqueFd, TimelineFd")
    bridged = "bridged, by share_handoff(allow=('bridged',))"
    for label, name, handoff, reason in (
        ("vulkan:0", "SwiftShader", "binary", "No timeline handoff: SwiftShader driver reports no exportable"),
        ("vulkan:1", "llvmpipe", bridged, "No timeline or binary handoff: llvmpipe does not offer VK_KHR_ext"),
        ("opengl:0", "llvmpipe", bridged, "No timeline or binary handoff: llvmpipe "),
    ):
        assert lines[label].startswith(name)
        assert f"with host:0: memory OpaqueFd; handoff {handoff} [" in lines[label]
        assert reasons[label].startswith(reason)


def test_versions_and_a_table_follow(facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    text = invoke("info").stdout
    (host,) = (backend for backend in facts["backends"] if backend["available"])
    for name, fact in (*host["versions"].items(), *host["libraries"].items()):
        assert f"{name} {fact}" in " ".join(text.split())
    signs = {"supported": "✓", "unverified": "○", "unsupported": "·"}
    for row, cell in (
        ("OpaqueFd +map_mipmapped_array", Cell(Operation.MAP_MIPMAPPED_ARRAY, OpaqueFd)),
        ("no handle +stream_memory_ops", Cell(Operation.STREAM_MEMORY_OPS)),
    ):
        columns = (owner["capabilities"][DOMAIN.index(cell)] for owner in (*host["devices"], *facts["exporters"][:-1]))
        expected = " +".join(signs[column["support"]] for column in columns)
        assert re.search(rf"^{row} +{expected}$", text, re.MULTILINE)
    assert re.search(r"^✓ shown by .*; ○ documented .*; · a gap", text, re.MULTILINE)
    monkeypatch.setenv("COLUMNS", "50")
    assert invoke("info").stdout.count("stream_memory_ops") > 1, "columns that do not fit follow, with the names again"


def test_all_gives_each_cells_reason(facts: dict[str, Any]) -> None:
    text = " ".join(invoke("info", "--all").stdout.split())
    for owner in (*facts["backends"][-1]["devices"], *facts["exporters"][:-1]):
        for cell in owner["capabilities"]:
            instead = f" Instead: {cell['workaround']}" if cell["workaround"] else ""
            assert " ".join(f" {cell['support']} {cell['reason']}{instead} (".split()) in text
            assert f"{cell['reference']})" in text


def test_equal_drivers_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    require_driver("swiftshader")
    drivers = vulkan.list_drivers()
    drivers[:] = [replace(drivers[0], index=index) for index in range(8)]
    drivers.reason = "physical device 8: out of order."
    monkeypatch.setattr(vulkan, "list_drivers", lambda: drivers)
    lines, reasons = answer(invoke("info").stdout)
    assert [label for label in lines if label.startswith("vulkan")] == ["vulkan:0-7", "vulkan"]
    assert lines["vulkan"].startswith("works in part [")
    assert reasons["vulkan"] == drivers.reason


def test_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUINTEROP_BACKEND", "unheard-of")
    assert "there is no backend 'unheard-of'" in invoke("info").stderr


def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    require_driver("swiftshader")
    monkeypatch.setattr(LoadedBackend, "devices", lambda backend: [])
    lines, reasons = answer(invoke("info").stdout)
    assert lines["host"] == "works, but has no device"
    assert "with no device [" in lines["vulkan:0"]
    assert "no device is SwiftShader" in reasons["vulkan:0"]
    assert "try" not in lines


DRIVERS = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
BROKEN: dict[str, tuple[dict[str, str], dict[str, str], str, str]] = {
    "a library that is none": ({"libcuda.so.1": "none"}, {}, "cuda", "file too short. Install the NVIDIA driver again"),
    "no OpenGL": ({"libEGL.so.1": "none"}, {}, "opengl", "libgl1-mesa-dri"),
    "no driver of OpenGL": ({}, {"__EGL_VENDOR_LIBRARY_FILENAMES": "/nowhere.json"}, "opengl", "EGL finds no driver."),
    "no file of a driver": ({}, dict.fromkeys(DRIVERS, "/nowhere.json"), "vulkan", "or a software driver: "),
}


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are found otherwise elsewhere")
@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.usefixtures("facts")  # the other drivers work
def test_what_is_broken_is_told_with_what_to_do(case: str, tmp_path: Path) -> None:
    files, variables, label, words = BROKEN[case]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    path = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    done = python("-W", "error", "-m", "gpuinterop", "info", cwd=tmp_path, LD_LIBRARY_PATH=path, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    lines, reasons = answer(done.stdout)
    assert lines[label].startswith("does not work [")
    assert words in reasons[label]
    assert lines["host:0"].startswith("works")
    assert ("through Vulkan, which is missing [" in lines.get("opengl:0", "")) is (label == "vulkan")
