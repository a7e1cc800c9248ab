"""What a worker of pytest-xdist has started ends with it, whatever ends it."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.programs import python

TESTS = """
import os, subprocess, sys
from pathlib import Path

def test_it():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    Path("child").write_text(str(child.pid))
    os._exit(1)  # as pytest-timeout ends a worker that hangs
"""
LIMIT = 20.0


@pytest.mark.skipif(sys.platform != "linux", reason="by /proc, and a guard of Linux's")
def test_a_worker_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    shutil.copy(root / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = ("-m", "pytest", "-n", "1", "--max-worker-restart=0", "-p", "no:cacheprovider", ".")
    done = python(*command, cwd=tmp_path, env=clean, PYTHONPATH=str(root))
    assert "crashed" in done.stdout, done.stdout + done.stderr
    state = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    limit = time.monotonic() + LIMIT
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < limit, "it runs on"
        time.sleep(0.05)
