"""What is kept of a fetch, and that the env file chooses the fetched drivers, whatever the shell had chosen."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import fetch_vulkan

DRIVER = "mesa-vulkan-drivers"


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


def test_the_env_file_chooses_what_was_fetched(fetched: list[str], tmp_path: Path) -> None:
    fetch_vulkan.provide([DRIVER])
    theirs = {name: "theirs" for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_INSTANCE_LAYERS")}
    command = ["sh", "-euc", '. "$0"; . "$0"; echo "$VK_DRIVER_FILES:$VK_ICD_FILENAMES:${VK_INSTANCE_LAYERS-none}"']
    said = subprocess.check_output([*command, str(tmp_path / "env")], env=theirs, text=True)
    driver = tmp_path / "tree" / "icd.d" / "lvp_icd.json"
    assert said == f"{driver}:{driver}:none\n"
