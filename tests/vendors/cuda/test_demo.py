"""`gpuinterop demo` on a GPU, or on the simulated one, which has no array library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.parties import require_driver
from tests.programs import python

from ..parties import REAL

DEMO = ("-W", "error", "-m", "gpuinterop", "demo", "--backend", "cuda")


@pytest.mark.parametrize("sync", ["auto", "bridged"])
def test_the_field_is_right(sync: str, tmp_path: Path) -> None:
    driver = () if REAL else ("--driver", "swiftshader")
    if not REAL:
        require_driver("swiftshader")
    done = python(*DEMO, *driver, "--sync", sync, "--size", "128x96", "--frames", "60", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["backend"] == "cuda"
    assert found["correct"]
    assert (found["sync"] == "bridged") is (sync == "bridged")
    assert (tmp_path / "wave.png").exists()


@pytest.mark.skipif(not REAL, reason="a simulated GPU has no array library")
def test_an_array_library_works_in_place(tmp_path: Path) -> None:
    done = python(*DEMO, "--frames", "10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "in place" in done.stdout, f"CuPy or torch is to be installed: {done.stdout}"
