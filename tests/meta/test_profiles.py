"""A profile turns the host into a device with another's gaps, and the suites pass on it as they do on that device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import record

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the host backend is for Linux")


def test_the_suites_pass(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """What they exercise is what is left. Where semaphores cannot be imported, timelines are words of streams."""
    report = tmp_path / "run.xml"
    done = run_pytest(
        "--gpuinterop-require=host",
        "--gpuinterop-exporter=memfd@here",
        f"--junitxml={report}",
        environment={"GPUINTEROP_DISABLE": "profile:hip-linux"},
        limit="20",
    )
    assert done.status == 0, done.output[-4000:]
    assert "0 unexpected skips" in done.output
    (run,) = record.runs_of(report)["host"]
    assert set(run["cells"]) == {
        "import_memory:opaque_fd",
        "map_buffer:opaque_fd",
        "export_allocation:vmm_fd",
        "import_allocation:vmm_fd",
        "stream_memory_ops",
        "create_semaphore:timeline_fd",
    }
