"""Devices that are simulated on the CPU: the parties that they get, and that nothing they do is reported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.capabilities import read_verified
from gpuinterop.exporters import open_exporter
from gpuinterop.exporters.vulkan import list_drivers
from gpuinterop.handles import Binary, DeviceIdentity
from gpuinterop.testing.missing_vulkan import give_up

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds")

GPU = "toybackend:ToyGpu"
SIMULATED = ("--gpuinterop-require=toy", "--gpuinterop-simulated=toy")
IDENTITY = DeviceIdentity(name="a simulated GPU", uuid=bytes(range(16)), pci_bus_id="0000:17:00.0")


def _need_swiftshader() -> None:
    if not any("SwiftShader" in found.driver for found in list_drivers()):
        give_up("there is no SwiftShader")


@pytest.mark.timeout(300)
def test_the_simulated_toy_passes(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """Every suite, with every party, in this process and in others; and it is not reported."""
    _need_swiftshader()
    reports = tmp_path / "verified.toml", tmp_path / "exporters.toml"
    options = (f"--gpuinterop-report={reports[0]}", f"--gpuinterop-exporter-report={reports[1]}")
    done = run_pytest(*SIMULATED, *options, toy="toybackend:ToyArrays", limit="20", seconds=280)
    assert done.status == 0, done.output[-4000:]
    assert "0 unexpected skips" in done.output
    assert "toy:0 (simulated): " in done.output
    assert f"{reports[0]} was not written" in done.output
    assert "9 cells exercised" in done.output
    assert done.counts["passed"] > 400
    for report in reports:
        assert not report.exists()


EACH_ITS_OWN = """
import pytest
from gpuinterop import HandleError, OpaqueFd, Operation, get_backend
from gpuinterop.exporters import open_exporter
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
                with pytest.raises(HandleError, match="was exported by"):
                    other.import_memory(handle, size=theirs.size)
"""


def test_each_device_has_parties_of_its_own(run_pytest: Callable[..., Any]) -> None:
    """What was exported for one simulated GPU is refused on the other, as on real ones."""
    done = run_pytest(*SIMULATED, kit=False, files={"test_mine.py": EACH_ITS_OWN}, toy="toybackend:TwoToyGpus")
    assert done.status == 0, done.output
    assert done.counts["passed"] >= 4


MIXED = """
from gpuinterop import OpaqueFd, Operation
from gpuinterop.testing import requires
from gpuinterop.testing.requirements import skip_declared
from gpuinterop.testing.suites import Suite

class TestMine(Suite):
    @requires((Operation.IMPORT_MEMORY, OpaqueFd))
    def test_of_all(self, harness):
        pass

    @requires((Operation.MAP_BUFFER, OpaqueFd))
    def test_of_the_simulated(self, harness):
        if not harness.simulated:
            skip_declared("not for this one")
"""


def test_only_real_devices_are_reported(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """Beside a real device a simulated one adds nothing: no run, no party, and no cell of a driver's."""
    reports = tmp_path / "verified.toml", tmp_path / "exporters.toml"
    options = (f"--gpuinterop-report={reports[0]}", f"--gpuinterop-exporter-report={reports[1]}")
    chosen = ("--gpuinterop-backend=host", "--gpuinterop-backend=toy")
    files = {"test_mixed.py": MIXED}
    done = run_pytest(*chosen, "--gpuinterop-simulated=toy", *options, kit=False, files=files, toy=GPU)
    assert done.status == 0, done.output
    (run,) = read_verified(reports[0])
    assert run.device == gi.get_backend("host").device().name
    assert {str(cell) for cell in run.cells} == {"import_memory:opaque_fd"}
    for driver in read_verified(reports[1]):
        assert {str(cell) for cell in driver.cells} == {"import_memory:opaque_fd"}


@pytest.mark.parametrize("process", [False, True], ids=["here", "process"])
@pytest.mark.parametrize("name", ["memfd", "vulkan"])
def test_what_is_said_of_the_origin(name: str, process: bool) -> None:
    """`identity` is what the exporter says of itself, and what every handle says of where it comes from."""
    options: dict[str, Any] = {}
    if name == "vulkan":
        _need_swiftshader()
        options["driver"] = "swiftshader"
    with open_exporter(name, process=process, identity=IDENTITY, **options) as exporter:
        assert exporter.identity == IDENTITY
        with exporter.create_memory(4096) as memory, exporter.create_semaphore(Binary) as semaphore:
            for thing in (memory, semaphore):
                with thing.export() as handle:
                    assert handle.origin is not None
                    assert handle.origin.device is not None
                    assert handle.origin.device.uuid == IDENTITY.uuid
                    assert not handle.origin.device.is_cpu
    with open_exporter(name, process=process, **options) as exporter:
        assert exporter.identity.is_cpu


TWINS = """
from gpuinterop import OpaqueFd, Operation
from gpuinterop.testing import requires
from gpuinterop.testing.suites import Suite

class TestMine(Suite):
    @requires((Operation.IMPORT_MEMORY, OpaqueFd))
    def test_of_both(self, device):
        pass

    @requires((Operation.MAP_BUFFER, OpaqueFd))
    def test_of_one(self, device):
        assert device.ordinal == 0
"""


def test_twins_are_one_run(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """Two real GPUs of one name are reported once, with what has failed on neither."""
    report = tmp_path / "verified.toml"
    options = ("--gpuinterop-backend=toy", f"--gpuinterop-report={report}")
    done = run_pytest(*options, kit=False, files={"test_twins.py": TWINS}, toy="toybackend:TwoToyGpus")
    assert done.counts == {"passed": 3, "failed": 1}
    (run,) = read_verified(report)
    assert run.device == "Toy GPU"
    assert {str(cell) for cell in run.cells} == {"import_memory:opaque_fd"}
