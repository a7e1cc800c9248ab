"""What is kept of a fetch, and which drivers and variables reach the tests, whatever the shell has set."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools import fetch_vulkan

DRIVER = "mesa-vulkan-drivers"
THEIRS = (
    "VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES", "VK_INSTANCE_LAYERS", "GPUINTEROP_BACKEND",
    "GPUINTEROP_DISABLE", "GPUINTEROP_SIM_DEVICES", "GPUINTEROP_TEST_ORDER", "PYTHONPATH", "PYTEST_ADDOPTS",
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
)  # fmt: skip


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The packages that are asked for; apt has one, does not know another, and cannot fetch the third."""
    asked: list[str] = []

    def add(_apt: object, package: str) -> str:
        asked.append(package)
        if package != DRIVER:
            raise fetch_vulkan.FetchError({"glslang-tools": "Unable to locate package"}.get(package, "no network"))
        (tmp_path / "tree" / "icd.d").mkdir(parents=True)
        (tmp_path / "tree" / "icd.d" / "lvp_icd.json").touch()
        return "1.0"

    monkeypatch.setattr(fetch_vulkan, "HOME", tmp_path)
    monkeypatch.setattr(fetch_vulkan, "TREE", tmp_path / "tree")
    monkeypatch.setattr(fetch_vulkan, "Apt", lambda home: None)
    monkeypatch.setattr(fetch_vulkan, "add", add)
    return asked


@pytest.mark.parametrize("broken", ["", "[]", '{"format": 2}', '{"format": 1, "versions": {}, "missing": {}}'])
def test_what_is_there_is_not_fetched_again(fetched: list[str], tmp_path: Path, broken: str) -> None:
    packages = [DRIVER, "glslang-tools", "libvulkan1"]
    assert fetch_vulkan.provide(packages).keys() == {"glslang-tools", "libvulkan1"}
    assert fetch_vulkan.provide(packages).keys() == {"glslang-tools", "libvulkan1"}
    assert fetched == [*packages, "libvulkan1"], "one is there, and one will never be"
    (tmp_path / "stamp.json").write_text(broken)
    fetch_vulkan.provide([DRIVER])
    assert fetched[4:] == [DRIVER]


def test_the_env_file_adds_what_was_fetched(fetched: list[str], tmp_path: Path) -> None:
    fetch_vulkan.provide([DRIVER])
    command = ["sh", "-euc", '. "$0"; . "$0"; echo "$VK_ADD_DRIVER_FILES"', str(tmp_path / "env")]
    driver = tmp_path / "tree" / "icd.d" / "lvp_icd.json"
    assert subprocess.check_output(command, env={}, text=True) == f"{driver}\n"


def test_make_gives_the_tests_no_drivers_and_variables_of_the_shell(tmp_path: Path) -> None:
    """Of another checkout, whose .venv and .vulkan do nothing but tell."""
    (tmp_path / "Makefile").write_bytes((fetch_vulkan.HOME.parent / "Makefile").read_bytes())
    files = {".venv/bin/python": "#!/bin/sh\nenv\n", ".vulkan/env": "export VK_ADD_DRIVER_FILES=fetched"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    made = [".venv/.made", ".venv/.test", ".venv/.compiler", "drivers"]
    theirs = dict.fromkeys(THEIRS, "theirs")
    outermost = {"MAKELEVEL": "0", "MAKEFLAGS": "", "DRIVERS": ""}
    command = ["make", "-s", "test-main", *(f"--assume-old={name}" for name in made)]
    said = subprocess.check_output(command, cwd=tmp_path, env={**os.environ, **outermost, **theirs}, text=True)
    given = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    assert given["VK_DRIVER_FILES"] == given["VK_ICD_FILENAMES"] == "fetched"
    assert [name for name, value in given.items() if value == "theirs"] == ["GPUINTEROP_TEST_ORDER"]
