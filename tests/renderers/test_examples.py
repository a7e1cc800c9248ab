"""The examples of renderers, each in a process of its own: what they draw, and that their own checks can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.fetched import newer_lavapipe
from tests.limits import LIMIT
from tests.missing_vulkan import give_up

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SHARING = ("moderngl_attractor", "pyglet_tiles", "pyopengl_ink", "slangpy_glass", "vispy_beads", "vtk_knot")
RUN = """
import faulthandler, os, runpy, sys

faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
exec(sys.argv[3])
runpy.run_path(sys.argv[1], run_name="__main__")
"""
COPIED = "import torch; view = torch.from_dlpack; torch.from_dlpack = lambda array: view(array).clone()"
NOT_UPLOADED = "import pygfx; pygfx.Buffer.update_full = lambda self: None"


def run(name: str, folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run an example in this folder, after other code."""
    if name.startswith("vispy") and not find_library("fontconfig"):
        give_up("vispy finds no fontconfig: apt install libfontconfig1")
    command = [sys.executable, "-c", RUN, str(EXAMPLES / f"{name}.py"), str(LIMIT), before]
    environment = newer_lavapipe() if name.startswith("slangpy") else None
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT + 20, check=False
    )


@pytest.mark.parametrize("name", [*SHARING, "pygfx_sea"])
def test_it_draws_what_the_tensor_has(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LeakedResourceWarning" not in done.stderr
    assert f"{name}.png" in done.stdout.splitlines()
    with Image.open(tmp_path / f"{name}.png") as picture:
        texels = np.asarray(picture.convert("RGB"), dtype=float)
    assert texels.std(axis=(0, 1)).max() > 20, "the picture is nearly of one colour"
    assert np.abs(np.diff(texels, axis=0)).max() > 20, "the picture has no edges"


@pytest.mark.parametrize("name", [*SHARING, "pygfx_sea"])
def test_its_check_fails_where_the_renderer_has_other_bytes(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path, NOT_UPLOADED if name.startswith("pygfx") else COPIED)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^AssertionError: .*(tensor|torch)", done.stderr, re.MULTILINE), done.stderr
