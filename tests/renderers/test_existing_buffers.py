"""Buffers that renderers have made, with our memory as new storage: bytes in both directions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import LIMIT


@pytest.mark.parametrize("renderer", ["moderngl", "pyglet", "vtk"])
def test_bytes_go_both_ways(renderer: str) -> None:
    program = Path(__file__).with_name("existing_buffers.py")
    done = subprocess.run(
        [sys.executable, program, renderer], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{renderer}: both ways\n"
    assert "LeakedResourceWarning" not in done.stderr
