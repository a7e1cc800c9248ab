"""A run on a library of ours is recorded of no device, whatever the run was told of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpuinterop.testing.results import RUNS, UNRECORDED, read_run
from gpuinterop.testing.simulated.build import build
from tests.programs import printed

from ..parties import SIMULATED

pytestmark = pytest.mark.skipif(not SIMULATED, reason="once is enough")

BINDINGS = os.environ.get("PYTHONPATH", "")
PLAIN = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")  # the latter takes as long as the run
SUITE = """
from gpuinterop import Operation
from gpuinterop.testing import requires
from gpuinterop.testing.suites import Suite

class TestMine(Suite):
    @requires(Operation.STREAM_MEMORY_OPS)
    def test_it(self, device):
        device.create_stream().close()
"""


def clean(libraries: str, **more: str) -> dict[str, str]:
    """An environment in which these libraries are found, and nothing is said to gpuinterop or pytest."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUINTEROP_", "PYTEST_"))}
    return {**kept, "LD_LIBRARY_PATH": libraries, "PYTHONPATH": BINDINGS, "COLUMNS": "400", **more}


def told(folder: Path, environment: dict[str, str], *command: str) -> str:
    """What a command of Python's prints that succeeds."""
    return printed(*command, cwd=folder, env=environment)


def properties(folder: Path, environment: dict[str, str], *options: str) -> dict[str, str]:
    """What pytest's XML says of a run of the suite."""
    (folder / "test_mine.py").write_text(SUITE)
    command = ("-m", "pytest", "-q", *PLAIN, *options, f"--junitxml={folder / 'run.xml'}", str(folder))
    told(folder, environment, *command)
    return read_run(folder / "run.xml").properties


def test_amds_runtime_without_a_gpu_is_called_that(tmp_path: Path) -> None:
    """Nothing is recorded of it, and `gpuinterop info` says so: here our runtime, marked as theirs."""
    what = "AMD's runtime 6.3 on a stand-in device"
    data = build("hip", extra=("-Dgpuinterop_simulated_driver=gpuinterop_stand_in_device",)).read_bytes()
    (tmp_path / "libamdhip64.so.6.3.42").write_bytes(data)
    (tmp_path / "libamdhip64.so").symlink_to("libamdhip64.so.6.3.42")
    environment = clean(str(tmp_path))
    run = properties(tmp_path, environment, "--gpuinterop-require=hip")
    info = told(tmp_path, environment, "-m", "gpuinterop", "info", "--json")
    assert run["gpuinterop.stand-in.hip:0"] == what
    assert run[f"{UNRECORDED}.hip"] == f"it ran on {what}"
    assert not [name for name in run if name.startswith(RUNS)]
    found = {one["name"]: one["stand_in"] for one in json.loads(info)["backends"]}
    assert found["hip"] == what
    assert found["host"] is None
    text = " ".join(told(tmp_path, environment, "-m", "gpuinterop", "info").split())
    assert f"No hardware: its driver is {what}." in text


@pytest.mark.parametrize("version", ["70151831", "70953211"])
def test_of_a_version_that_no_run_has_shown_nothing_is_recorded(tmp_path: Path, version: str) -> None:
    """It is taken for the newest that is known, which the header says, and `gpuinterop info`."""
    marker = "gpuinterop_simulated_driver"  # without it our runtime is taken for AMD's
    (tmp_path / "libamdhip64.so").write_bytes(build("hip").read_bytes().replace(marker.encode(), marker[::-1].encode()))
    environment = clean(str(tmp_path), GPUINTEROP_SIM_HIP_VERSION=version)
    run = properties(tmp_path, environment, "--gpuinterop-require=hip")
    infos = [told(tmp_path, environment, "-m", "gpuinterop", "info", *form) for form in ([], ["--json"])]
    says = "unknown version: HIP 7.9.53211 is taken for 7.1"
    known = version == "70151831"
    recorded = {entry["device"] for entry in json.loads(run.get(f"{RUNS}hip", "[]"))}
    assert recorded == ({"Simulated AMD GPU 0"} if known else set())
    assert (says in run.get(f"{UNRECORDED}.hip", "")) is not known
    for text in (run["gpuinterop.device.hip:0"], *infos):
        assert (says in text) is not known, text
