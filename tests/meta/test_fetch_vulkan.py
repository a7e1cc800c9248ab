"""What is kept of a fetch, and which drivers and variables reach the tests, whatever the shell has set."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.missing_vulkan import give_up
from tools import fetch_vulkan

THEIRS = (
    "VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES", "VK_INSTANCE_LAYERS", "GPUINTEROP_BACKEND",
    "GPUINTEROP_DISABLE", "GPUINTEROP_SIM_DEVICES", "GPUINTEROP_TEST_ORDER", "PYTHONPATH", "PYTEST_ADDOPTS",
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "__EGL_VENDOR_LIBRARY_FILENAMES", "__GLX_VENDOR_LIBRARY_NAME",
    "LIBGL_DRIVERS_PATH", "MESA_LOADER_DRIVER_OVERRIDE", "GALLIUM_DRIVER", "EGL_PLATFORM", "DISPLAY",
)  # fmt: skip


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
    assert given["__EGL_VENDOR_LIBRARY_FILENAMES"] == "/nonexistent"
    assert [name for name, value in given.items() if value == "theirs"] == ["GPUINTEROP_TEST_ORDER"]


def test_the_env_file_adds_to_what_is_there_and_may_be_sourced_twice() -> None:
    env = fetch_vulkan.HOME / "env"
    if not (fetch_vulkan.TREE / "egl.d").exists():
        give_up("OpenGL was not fetched")
    command = ["sh", "-euc", '. "$0"; . "$0"; env', str(env)]
    said = subprocess.check_output(command, env={"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/theirs"}, text=True)
    given = dict(line.split("=", 1) for line in said.splitlines())
    ours = str(fetch_vulkan.TREE / "egl.d" / "50_mesa.json")
    assert given["LD_LIBRARY_PATH"] == f"{fetch_vulkan.TREE}/lib:/theirs"
    *others, last = given["__EGL_VENDOR_LIBRARY_FILENAMES"].split(":")
    assert last == ours
    assert not any(other.endswith("mesa.json") for other in others)
    assert given["LIBGL_DRIVERS_PATH"].split(":")[0] == f"{fetch_vulkan.TREE}/dri"
