"""What ``gpuinterop info`` says, for programs and for people."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuinterop.capabilities import DOMAIN, Scope, Support
from tests.programs import printed, python

from .invoke import invoke
from .parties import require_driver


def info(**environment: str) -> tuple[dict[str, Any], str]:
    """What it prints as JSON, in a process of its own; and what it says."""
    done = python("-W", "error", "-m", "gpuinterop", "info", "--json", seconds=100, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
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


@pytest.mark.skipif(sys.platform != "linux", reason="the host backend is Linux's")
def test_the_host_is_there(facts: dict[str, Any]) -> None:
    (host,) = [backend for backend in facts["backends"] if backend["name"] == "host"]
    assert host["available"] is True
    assert host["reason"] is None
    assert "python" in host["versions"]
    assert len(host["devices"]) == 1
    assert "process" in [exporter["name"] for exporter in facts["exporters"]]


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
    people = invoke("info").stdout
    assert "llvmpipe" in people
    assert "VK_KHR_external_semaphore_fd" in people


def test_for_people() -> None:
    result, whole = invoke("info"), invoke("info", "--all")
    assert result.exit_code == whole.exit_code == 0
    for word in ("Backends", "host", "works", "import_memory", "opaque_fd", "--all", "✓ shown by a recorded run"):
        assert word in result.stdout
    assert whole.stdout.count("nvscibuf") > result.stdout.count("nvscibuf")
    assert "✓ shown by a recorded run" in whole.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("arguments", [[], ["--all"]])
def test_an_output_without_unicode(arguments: list[str], encoding: str) -> None:
    result = invoke("info", *arguments, encoding=encoding)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.isascii()
    assert "+ shown by a recorded run" in result.stdout


def test_a_wrong_backend_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUINTEROP_BACKEND", "nowhere")
    result = invoke("info", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["backends"]
    assert "GPUINTEROP_BACKEND: there is no backend 'nowhere'; installed:" in result.stderr
    assert "Backends" in invoke("info").stdout


def test_what_is_disabled_says_so() -> None:
    found, _ = info(GPUINTEROP_DISABLE="import_memory:opaque_fd")
    for backend in found["backends"]:
        for device in backend["devices"]:
            gap = cell(device["capabilities"], "import_memory", "opaque_fd")
            assert gap["support"] == "disabled"
            assert "GPUINTEROP_DISABLE" in gap["reason"]


def test_a_wrong_pattern_is_the_reason() -> None:
    found, _ = info(GPUINTEROP_DISABLE="nonsense")
    for backend in found["backends"]:
        assert backend["available"] is False
        assert backend["reason"]
    assert any("nonsense" in backend["reason"] for backend in found["backends"])


def test_without_vulkan_the_reason_is_told() -> None:
    found, said = info(VK_DRIVER_FILES="/nowhere.json", VK_ICD_FILENAMES="/nowhere.json")
    assert not [exporter for exporter in found["exporters"] if exporter["name"] == "vulkan"]
    assert "vulkan: " in said


_LIGHT = """
import sys

from gpuinterop.cli.app import run
assert run(["info", "--json"]) == 0
heavy = {"click", "rich", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""


def test_json_needs_numpy_alone() -> None:
    assert "host" in [entry["name"] for entry in json.loads(printed("-c", _LIGHT))["backends"]]


@pytest.mark.parametrize(("command", "lacks"), [("info", "rich"), ("demo", "rich"), ("demo", "PIL")])
def test_without_the_extra_one_line_says_what_to_install(
    command: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == lacks else find(name, *more))
    done = invoke(command)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"needs {lacks}. pip install 'gpuinterop[cli]'.")


@pytest.mark.parametrize("lacks", ["rich", "PIL"])
def test_the_demo_in_json_needs_no_extra(lacks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == lacks else find(name, *more))
    monkeypatch.setitem(sys.modules, lacks, None)
    picture = tmp_path / "wave.png"
    done = invoke("demo", "--json", "--exporter", "process", "--frames", "2", "--output", str(picture))
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["output"] == (str(picture) if lacks == "rich" else None)
    assert picture.exists() == (lacks == "rich")
