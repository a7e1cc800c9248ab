"""What ``gpuinterop info`` says, for programs and for people."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuinterop.capabilities import DOMAIN, Scope, Support
from tests.programs import printed, python

from .invoke import invoke
from .parties import require_driver, require_opengl


def info(**environment: str) -> tuple[dict[str, Any], str]:
    """What it prints as JSON, in a process of its own; and what it says."""
    done = python("-W", "error", "-m", "gpuinterop", "info", "--json", **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    require_driver("swiftshader")  # else a note says that there is no Vulkan
    require_opengl()
    found, said = info()
    assert said == ""
    return found


def check_table(cells: list[dict[str, Any]]) -> None:
    """Every cell of the domain, in its order, each with all that is to be known of it."""
    expected = [(cell.operation.value, cell.handle_type.type_name if cell.handle_type else None) for cell in DOMAIN]
    assert [(cell["operation"], cell["handle_type"]) for cell in cells] == expected
    for cell in cells:
        assert list(cell) == [
            "operation", "handle_type", "support", "scope", "reason", "reference", "workaround",
        ]  # fmt: skip
        assert cell["support"] in {support.value for support in Support}
        if cell["support"] != "supported":
            assert cell["scope"] in {scope.value for scope in Scope}
            assert cell["reason"]
            assert cell["reference"]


def test_the_shape(facts: dict[str, Any]) -> None:
    assert list(facts) == ["backends", "exporters"]
    assert [one["name"] for one in facts["backends"] if one["available"]] == ["host"]
    assert {one["name"] for one in facts["exporters"]} == {"vulkan", "opengl", "process"}
    for backend in facts["backends"]:
        assert list(backend) == [
            "name", "available", "reason", "versions", "libraries", "stand_in", "unknown_version", "devices",
        ]  # fmt: skip
        assert backend["available"] or backend["reason"]
        for device in backend["devices"]:
            assert list(device) == ["ordinal", "name", "uuid", "pci_bus_id", "luid", "capabilities"]
            check_table(device["capabilities"])
    for exporter in facts["exporters"]:
        assert list(exporter) == ["name", "driver", "device", "capabilities"]
        check_table(exporter["capabilities"])


def cell(table: list[dict[str, Any]], operation: str, handle_type: str) -> dict[str, Any]:
    (found,) = [entry for entry in table if (entry["operation"], entry["handle_type"]) == (operation, handle_type)]
    return found


def test_both_drivers_and_why_lavapipe_shares_no_semaphore(facts: dict[str, Any]) -> None:
    require_driver("swiftshader")
    require_driver("lavapipe")
    exporters = [exporter for exporter in facts["exporters"] if exporter["name"] == "vulkan"]
    (swiftshader,) = [exporter for exporter in exporters if "SwiftShader" in exporter["device"]]
    (lavapipe,) = [exporter for exporter in exporters if "llvmpipe" in exporter["device"]]
    for exporter in (swiftshader, lavapipe):
        assert cell(exporter["capabilities"], "import_memory", "opaque_fd")["support"] != "unsupported"
    assert cell(swiftshader["capabilities"], "import_semaphore", "opaque_fd")["support"] != "unsupported"
    for handle_type in ("opaque_fd", "timeline_fd"):
        gap = cell(lavapipe["capabilities"], "import_semaphore", handle_type)
        assert gap["support"] == "unsupported"
        assert "VK_KHR_external_semaphore_fd" in gap["reason"]


def answer(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """What stands behind each label of the first lines, and the reasons by their numbers."""
    first, reasons, _ = text.split("\n\n", 2)
    lines: dict[str, str] = {}
    for line in first.splitlines()[1:]:
        label, _, rest = line.partition("  ")
        label = label or list(lines)[-1]
        lines[label] = f"{lines.get(label, '')} {rest.strip()}".strip()
    numbered = dict(re.findall(r"^\[(\d+)\] (.*(?:\n    .*)*)", reasons, re.MULTILINE))
    return lines, {number: " ".join(reason.split()) for number, reason in numbered.items()}


def number(line: str) -> str:
    (found,) = re.findall(r"\[(\d+)\]", line)
    return str(found)


def test_a_line_answers_for_each_backend_and_driver(facts: dict[str, Any]) -> None:
    require_driver("swiftshader")
    require_driver("lavapipe")
    text = invoke("info").stdout
    lines, reasons = answer(text)
    assert len(lines) == 7, "one for each backend and driver, and one that says what to try"
    for backend in facts["backends"]:
        if backend["available"]:
            assert all(
                f"works: {one['name']}" in lines[f"{backend['name']}:{one['ordinal']}"] for one in backend["devices"]
            )
        else:
            assert reasons[number(lines[backend["name"]])] == " ".join(backend["reason"].split())
    drivers = [exporter for exporter in facts["exporters"] if exporter["name"] == "vulkan"]
    for index, exporter in enumerate(drivers):
        line = lines[f"vulkan:{index}"]
        assert line.startswith(f"{exporter['device']}, {exporter['driver']}")
        mode = {"SwiftShader": "binary", "llvmpipe": "bridged, if allowed"}[exporter["device"].split()[0]]
        assert f"with host:0: memory OpaqueFd; handoff {mode} [" in line
        assert reasons[number(line)].startswith("No timeline ")
    (llvmpipe,) = [exporter for exporter in facts["exporters"] if exporter["name"] == "opengl"]
    assert lines["opengl:0"].startswith(f"{llvmpipe['device']}, {llvmpipe['driver']}")
    assert "with host:0: memory OpaqueFd; handoff bridged, if allowed [" in lines["opengl:0"]
    assert "does not offer GL_EXT_semaphore_fd" in reasons[number(lines["opengl:0"])]
    assert "exports memory VmmFd; arrays OpaqueFd; semaphores OpaqueFd, TimelineFd" in lines["host:0"]


DRIVERS = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
BROKEN: dict[str, tuple[dict[str, str], dict[str, str], str, str]] = {
    "a library that is none": ({"libcuda.so.1": "none"}, {}, "cuda", "file too short. Install the NVIDIA driver again"),
    "no OpenGL": ({"libEGL.so.1": "none"}, {}, "opengl", "libgl1-mesa-dri"),
    "no driver of OpenGL": ({}, {"__EGL_VENDOR_LIBRARY_FILENAMES": "/nowhere.json"}, "opengl", "EGL finds no driver."),
    "no file of a driver": ({}, dict.fromkeys(DRIVERS, "/nowhere.json"), "vulkan", "or a software driver: "),
}


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are found otherwise elsewhere")
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_told_with_what_to_do(case: str, tmp_path: Path) -> None:
    files, variables, label, words = BROKEN[case]
    if label == "vulkan":
        require_driver("swiftshader")  # of whose loader it tells
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    path = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    done = python("-W", "error", "-m", "gpuinterop", "info", cwd=tmp_path, LD_LIBRARY_PATH=path, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    lines, reasons = answer(done.stdout)
    assert lines[label].startswith(("does not work [", "no driver works ["))
    assert words in reasons[number(lines[label])]
    assert lines["host:0"].startswith("works")


_LIGHT = """
import sys

from gpuinterop.cli.app import run
assert run(sys.argv[1:]) == 0
heavy = {"click", "rich", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""


def test_info_needs_numpy_alone() -> None:
    assert "host" in printed("-c", _LIGHT, "info")
