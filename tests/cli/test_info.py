"""What ``gpuinterop info`` says, for programs and for people."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop.capabilities import DOMAIN, Capabilities, Scope, Support
from gpuinterop.cli import overview
from gpuinterop.cli.info import Findings
from gpuinterop.exporters.vulkan import VulkanDriver
from gpuinterop.handles import handle_types, is_here
from gpuinterop.testing.simulated.build import build
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
    require_driver("swiftshader")  # else a note says that there is no Vulkan
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
    assert len(lines) == 6, "one for each backend and driver, and one that says what to try"
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
        mode, reason = {
            "SwiftShader": ("binary", "No timeline handoff: SwiftShader driver reports no exportable handle types"),
            "llvmpipe": (
                "bridged, if allowed",
                "No timeline or binary handoff: llvmpipe does not offer VK_KHR_external_",
            ),
        }[exporter["device"].split()[0]]
        assert f"with host:0: memory OpaqueFd; handoff {mode} [" in line
        assert reasons[number(line)].startswith(reason)
    assert "exports memory VmmFd; arrays OpaqueFd; semaphores OpaqueFd, TimelineFd" in lines["host:0"]
    assert lines["try"].startswith("gpuinterop demo")


def test_without_the_bridge_the_host_waits() -> None:
    require_driver("lavapipe")
    text = printed("-m", "gpuinterop", "info", GPUINTEROP_DISABLE="stream_memory_ops")
    lines, reasons = answer(text)
    (line,) = [line for line in lines.values() if line.startswith("llvmpipe")]
    assert "handoff by the host, which waits" in line
    assert "No bridged handoff: turned off by GPUINTEROP_DISABLE" in reasons[number(line)]


def test_gaps_of_other_systems_are_told_to_those_who_ask(facts: dict[str, Any]) -> None:
    brief, whole = invoke("info").stdout, invoke("info", "--all").stdout
    foreign = {cell.handle_type.__name__ for cell in DOMAIN if cell.handle_type and not is_here(cell.handle_type)}
    foreign |= {"NvSciBuf", "NvSciSync"}
    assert not [name for name in foreign if name in brief]
    for name in foreign | {cell.operation.value for cell in DOMAIN}:
        assert name in whole
    names = "|".join(handle_types())
    assert not re.search(rf"\b({names})\b", brief)
    assert not re.search(rf"^  (un)?(supported|verified) .*\b({names})\b", whole, re.MULTILINE)
    for reason in {
        cell["reason"] for backend in facts["backends"] for one in backend["devices"] for cell in one["capabilities"]
    }:
        assert not reason or " ".join(reason.split()) in " ".join(whole.split())


@dataclass
class Gpu:
    """As much of a device as the text asks for."""

    ordinal: int
    capabilities: Capabilities
    backend: str = "gpu"
    name: str = "Big GPU"
    identity: gi.DeviceIdentity = field(default_factory=gi.DeviceIdentity)


def table(*supports: Support) -> Capabilities:
    """What a device says, each in turn, of the cells of this system; the others are gaps."""
    turns = itertools.cycle(supports)
    cells = []
    for cell in DOMAIN:
        here = cell.handle_type is None or is_here(cell.handle_type)
        cells.append(
            replace(cell.gap(Scope.DEVICE, "said.", "test"), support=next(turns) if here else Support.UNSUPPORTED)
        )
    return Capabilities(cells, owner="Big GPU")


def findings(*gpus: Gpu) -> Findings:
    found = Findings()
    found.devices += cast("list[Any]", gpus)
    facts = [{"ordinal": gpu.ordinal, "uuid": None, "pci_bus_id": None, "luid": None} for gpu in gpus]
    none: dict[str, Any] = {"stand_in": None, "unknown_version": None, "versions": {}, "libraries": {}}
    found.backends.append({"name": "gpu", "available": True, "devices": facts, **none})
    return found


LEGEND = {"✓": "shown by a run", "○": "said by the vendor", "·": "a gap"}


@pytest.mark.parametrize("supports", [[*Support], [*Support][:1], [*Support][1:2], [*Support][:2], [*Support][1:3]])
def test_the_legend_has_the_signs_that_stand_above_it(
    supports: list[Support], capsys: pytest.CaptureFixture[str]
) -> None:
    overview.show(findings(Gpu(0, table(*supports)), Gpu(1, table(supports[-1]))), every=False)
    *above, legend = capsys.readouterr().out.splitlines()
    signs = {sign for sign in LEGEND if sign in "\n".join(above)}
    assert len(signs) == len(supports[:3])
    assert legend.count(";") == len(signs) - 1
    assert all(f"{sign} {LEGEND[sign]}" in legend for sign in signs)


def test_eight_gpus_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And a GPU of another kind, with no Vulkan driver, is told so; a CPU misses none."""
    every = table(Support.UNVERIFIED)
    gpus = [Gpu(place, every) for place in range(8)]
    cpu = Gpu(9, every, name="CPU", identity=gi.DeviceIdentity(is_cpu=True))
    found = findings(*gpus, Gpu(8, every, name="Old GPU"), cpu)
    for place in range(8):
        driver = VulkanDriver(
            index=place, name="Big GPU", driver="driver", version="1", capabilities=every,
            identity=gi.DeviceIdentity(uuid=bytes([place] * 16)), endpoint_gap="",
        )  # fmt: skip
        found.drivers.append(driver)
    monkeypatch.setattr(overview, "match_device", lambda identity: gpus[identity.uuid[0]])
    overview.show(found, every=False)
    lines, reasons = answer(capsys.readouterr().out)
    assert lines["gpu:0-7"].startswith("works: Big GPU exports memory VmmFd, FabricHandle")
    assert (
        lines["vulkan:0-7"] == "Big GPU, driver 1 with gpu:0-7: memory OpaqueFd, DmaBufFd, NvSciBuf; handoff timeline"
    )
    assert "no Vulkan driver here is this device" in lines["gpu:8"]
    assert "Install the Vulkan driver" in reasons[number(lines["gpu:8"])]
    assert "no Vulkan driver" not in lines["gpu:9"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("arguments", [[], ["--all"]])
def test_an_output_without_unicode(arguments: list[str], encoding: str) -> None:
    result = invoke("info", *arguments, encoding=encoding)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.isascii()
    assert ("+ shown by a run" in result.stdout) == (not arguments)


def test_a_wrong_backend_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUINTEROP_BACKEND", "nowhere")
    result = invoke("info", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["backends"]
    assert "GPUINTEROP_BACKEND: there is no backend 'nowhere'; installed:" in result.stderr
    text = invoke("info")
    assert "host:0" in text.stdout
    assert "no backend 'nowhere'" in text.stderr


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


ICD = '{"file_format_version": "1.0.0", "ICD": {"library_path": "/nowhere.so", "api_version": "1.3.0"}}'
DRIVERS = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
BROKEN: dict[str, tuple[dict[str, str], dict[str, str], str, str]] = {
    "a library that is none": ({"libcuda.so.1": "none"}, {}, "cuda", "file too short. Install the NVIDIA driver again"),
    "a loader that is none": ({"libvulkan.so.1": "none"}, {}, "vulkan", "file too short). Install the GPU's"),
    "a driver that is not there": (
        {"icd.json": ICD},
        dict.fromkeys(DRIVERS, "icd.json"),
        "vulkan",
        "VK_DRIVER_FILES=icd.json; VK_ICD_FILENAMES=icd.json). With VK_LOADER_DEBUG=error",
    ),
    "no file of a driver": ({}, dict.fromkeys(DRIVERS, "/nowhere.json"), "vulkan", "or a software driver: "),
}


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are found otherwise elsewhere")
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_told_with_what_to_do(case: str, tmp_path: Path) -> None:
    files, variables, label, words = BROKEN[case]
    if variables:
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


@pytest.mark.parametrize(
    ("tool", "command"),
    [("apt", "make -C "), ("dnf", "sudo dnf install "), ("pacman", "sudo pacman -S "), ("", "install your system's ")],
)
def test_the_command_that_installs_vulkan_is_that_of_the_system(
    monkeypatch: pytest.MonkeyPatch, tool: str, command: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name == tool)
    assert f"software driver: {command}" in system.install_vulkan()


def test_a_gpu_without_a_vulkan_driver_of_its_own() -> None:
    library = build("cuda")
    path = f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    require_driver("swiftshader")
    variables = {"LD_LIBRARY_PATH": path, "GPUINTEROP_SIM_DEVICES": "2"}
    lines, reasons = answer(printed("-W", "error", "-m", "gpuinterop", "info", **variables))
    assert lines["cuda:1"].startswith("works: Simulated GPU 1 [")
    assert "no Vulkan driver here is this device" not in lines["cuda:0"]  # it is SwiftShader's
    assert "no Vulkan driver here is this device" in lines["cuda:1"]
    numbers = re.findall(r"\[(\d+)\]", lines["cuda:1"])
    assert str(library) in reasons[numbers[0]]
    assert "Install the Vulkan driver of this GPU" in reasons[numbers[1]]
    assert "with cuda:0: memory OpaqueFd; handoff binary" in lines["vulkan:0"]


_LIGHT = """
import sys

from gpuinterop.cli.app import run
assert run(sys.argv[1:]) == 0
heavy = {"click", "rich", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"]])
def test_info_needs_numpy_alone(arguments: list[str]) -> None:
    assert "host" in printed("-c", _LIGHT, *arguments)


@pytest.mark.parametrize("as_json", [True, False])
def test_without_pillow_the_demo_draws_nothing_and_says_so(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "PIL" else find(name, *more))
    monkeypatch.setitem(sys.modules, "PIL", None)
    picture = tmp_path / "wave.png"
    arguments = ["--exporter", "process", "--frames", "2", "--output", str(picture), *["--json"] * as_json]
    done = invoke("demo", *arguments)
    assert done.exit_code == 0, done.stderr
    assert "no picture is drawn, which needs PIL" in done.stderr
    assert not picture.exists()
    assert str(picture) not in done.stdout
    if as_json:
        assert json.loads(done.stdout)["output"] is None
