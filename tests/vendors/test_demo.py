"""`gpuinterop demo` on a GPU, or on a simulated one, which has no array library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.parties import require_driver
from tests.programs import python

from .parties import REAL, SIMULATED
from .table import VENDOR


@pytest.mark.skipif(not (REAL or SIMULATED), reason="AMD's runtime on the stand-in is on no Vulkan driver's device")
@pytest.mark.parametrize("sync", ["auto", "bridged"])
def test_the_field_is_right(sync: str, tmp_path: Path) -> None:
    driver = []
    if SIMULATED:
        require_driver("swiftshader")
        driver = ["--driver", "swiftshader"]
    command = ("-W", "error", "-m", "gpuinterop", "demo", "--backend", VENDOR.name, *driver, "--sync", sync)
    done = python(*command, "--size", "128x96", "--frames", "60", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["backend"] == VENDOR.name
    assert found["correct"]
    assert (found["sync"] == "bridged") is (sync == "bridged" or VENDOR.name == "hip")
    assert (tmp_path / "wave.png").exists()


@pytest.mark.skipif(not REAL, reason="a simulated GPU has no array library")
def test_an_array_library_works_in_place(tmp_path: Path) -> None:
    done = python("-m", "gpuinterop", "demo", "--backend", VENDOR.name, "--frames", "10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "in place" in done.stdout, f"CuPy or torch is to be installed: {done.stdout}"
