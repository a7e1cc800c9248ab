"""Devices that are simulated on the CPU: the parties that they get, and that nothing they do is recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuinterop.errors import InvalidArgumentError
from gpuinterop.testing.exporters.vulkan import list_drivers
from tests.missing_vulkan import give_up
from tools import record

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds")

GPU = "toybackend:ToyGpu"
SIMULATED = ("--gpuinterop-require=toy", "--gpuinterop-simulated=toy")


def _need_swiftshader() -> None:
    if not any("SwiftShader" in found.driver for found in list_drivers()):
        give_up("there is no SwiftShader")


def test_the_simulated_toy_passes(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """Every suite, with a memfd and a Vulkan driver; and it is not recorded."""
    _need_swiftshader()
    report = tmp_path / "run.xml"
    options = (f"--junitxml={report}", "--gpuinterop-exporter=@here")
    done = run_pytest(*SIMULATED, *options, toy="toybackend:ToyArrays", limit="20")
    assert done.status == 0, done.output[-4000:]
    assert "0 unexpected skips" in done.output
    assert "toy:0 (simulated): " in done.output
    assert "9 cells exercised" in done.output
    assert done.counts["passed"] > 200
    with pytest.raises(InvalidArgumentError, match=r"on hardware, .*its devices are simulated"):
        record.runs_of(report)


EACH_ITS_OWN = """
import pytest
from gpuinterop import HandleError, OpaqueFd, Operation, get_backend
from gpuinterop.testing.exporters import open_exporter
from gpuinterop.testing import requires
from gpuinterop.testing.suites import Suite

@requires((Operation.IMPORT_MEMORY, OpaqueFd))
class TestMine(Suite):
    def test_identity(self, harness):
        assert harness.simulated
        assert harness.exporter.identity == harness.device.identity
        assert not harness.exporter.identity.is_cpu
        with harness.exporter.create_memory(4096) as theirs, theirs.export() as handle:
            assert handle.origin.device.uuid == harness.device.uuid
            others = [found for found in get_backend("toy").devices() if found is not harness.device]
            assert len(others) == 1
            for other in others:
                with pytest.raises(HandleError, match="exported by"):
                    other.import_memory(handle, size=theirs.size)
"""


def test_each_device_has_parties_of_its_own(run_pytest: Callable[..., Any]) -> None:
    """What was exported for one simulated GPU is refused on the other, as on real ones."""
    done = run_pytest(*SIMULATED, kit=False, files={"test_mine.py": EACH_ITS_OWN}, toy="toybackend:TwoToyGpus")
    assert done.status == 0, done.output
    assert done.counts["passed"] >= 4
