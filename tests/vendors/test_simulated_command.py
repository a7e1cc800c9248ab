"""`python -m gpuinterop.testing.simulated`: another library's suite runs on the simulated driver, and on no other."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Final

import pytest

from gpuinterop.testing.results import RUNS, UNRECORDED, read_run
from gpuinterop.testing.simulated.build import build
from tests.cli.parties import require_driver
from tests.programs import python

from .parties import SIMULATED
from .table import VENDOR

pytestmark = pytest.mark.skipif(not SIMULATED, reason="a driver is there")

ON_IT: Final = ("-m", "gpuinterop.testing.simulated")
COMMAND: Final = (*ON_IT, VENDOR.name, "--", sys.executable, "-m")
PYTEST: Final = ("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
SUITE: Final = """
import gpuinterop as gi
from gpuinterop.testing import requires
from gpuinterop.testing.simulated import assert_simulated

def test_no_gpu_takes_part():
    if (backend := gi.device().backend) != "host":
        assert_simulated(backend)

def test_a_stream_waits_for_another(gpuinterop_device):
    with (
        gpuinterop_device.allocate(4096) as memory,
        gpuinterop_device.create_stream() as writes,
        gpuinterop_device.create_stream() as reads,
        gpuinterop_device.create_semaphore(gi.TimelineFd) as semaphore,
    ):
        semaphore.wait(reads, 1)
        copied = bytearray(4096)
        memory.buffer.fill(7, stream=writes)
        semaphore.signal(writes, 1)
        reads.synchronize(300)
        memory.buffer.copy_to_host(copied)
        assert copied == b"\\7" * 4096

@requires((gi.Operation.IMPORT_MEMORY, gi.OpaqueFd), (gi.Operation.MAP_BUFFER, gi.OpaqueFd))
def test_a_renderer_sees_it(gpuinterop_harness):
    theirs, ours = gpuinterop_harness.buffer(4096)
    ours.fill(7)
    assert theirs.read(0, 4096) == b"\\7" * 4096
"""


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment that leads to no driver, as users have it, and a folder with their suite."""
    for name in os.environ:
        if re.match(r"GPUINTEROP_|PYTEST_|ROCM_PATH$", name):
            monkeypatch.delenv(name)
    paths = os.environ["LD_LIBRARY_PATH"].split(os.pathsep)
    monkeypatch.setenv(
        "LD_LIBRARY_PATH", os.pathsep.join(path for path in paths if "/gpuinterop/simulated/" not in path)
    )
    (tmp_path / "test_theirs.py").write_text(SUITE)
    return tmp_path


@pytest.mark.parametrize("backend", ["host", VENDOR.name])
def test_a_suite_runs_on_it(clean: Path, backend: str) -> None:
    """With the Vulkan driver that is there; what it shows may be recorded only for the host."""
    require_driver("swiftshader")
    report = clean / "run.xml"
    run = (*PYTEST, f"--junitxml={report}", "test_theirs.py")
    if backend == "host":
        done = python("-m", *run, cwd=clean, GPUINTEROP_BACKEND="host")
    else:
        done = python(*COMMAND, *run, cwd=clean)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_run(report)
    assert {test.device for test in found.results if test.device} == {f"{backend}:0"}
    assert found.properties.get(f"gpuinterop.stand-in.{backend}:0", "") == ("" if backend == "host" else "simulated")
    assert {"vulkan:swiftshader", "memfd"} <= {test.party for test in found.results}
    assert {test.outcome for test in found.results} == {"passed"}
    assert (f"{RUNS}{backend}" in found.properties) is (backend == "host")
    assert (VENDOR.library in found.properties.get(f"{UNRECORDED}.{backend}", "")) is (backend != "host")


def test_what_it_can_do_is_told_of_no_device(clean: Path) -> None:
    require_driver("swiftshader")  # simulated CUDA's first device has its UUID, and HIP has none
    command = [word for word in COMMAND if word != "--"]  # it is not needed
    text, document = (
        python(*command, "gpuinterop", "info", *form, cwd=clean, GPUINTEROP_SIM_DEVICES="2").stdout
        for form in ([], ["--json"])
    )
    assert text.count("no Vulkan driver for this device [") == (1 if VENDOR.name == "cuda" else 2)
    (found,) = (one for one in json.loads(document)["backends"] if one["name"] == VENDOR.name)
    assert Path(found["stand_in"]).name == VENDOR.library
    assert [device["pci_bus_id"] in text for device in found["devices"]] == [True, True]
    said = {cell["support"] for device in found["devices"] for cell in device["capabilities"]}
    assert said == {"unverified", "unsupported"}


def test_without_the_command_the_suite_is_red(clean: Path) -> None:
    done = python("-m", *PYTEST, "-k", "no_gpu", cwd=clean, GPUINTEROP_BACKEND=VENDOR.name)
    assert done.returncode == 1, done.stdout
    program = f"from gpuinterop.testing.simulated import assert_simulated; assert_simulated({VENDOR.name!r})"
    done = python("-c", program, cwd=clean)
    assert f"AssertionError: expected the simulated {VENDOR.library}, got" in done.stderr
    assert f"python -m gpuinterop.testing.simulated {VENDOR.name} -- COMMAND" in done.stderr


@pytest.mark.parametrize("case", ["another driver", "no bindings", "no cache", "no command", "host"])
def test_where_it_cannot_begin_it_says_why(clean: Path, case: str) -> None:
    """Before the command, which might take no driver for a reason to skip everything."""
    environment = {}
    command = [*COMMAND[:-2], "touch", "began"]
    if case == "another driver":
        marker = b"gpuinterop_simulated_driver"
        (clean / VENDOR.library).write_bytes(build(VENDOR.name).read_bytes().replace(marker, marker[::-1]))
        environment["LD_PRELOAD"] = str(clean / VENDOR.library)
        says = f"expected the simulated {VENDOR.library}, got another"
    elif case == "no bindings":
        for package in ("cuda", "hip", "rocm"):
            (clean / package).mkdir()
            (clean / package / "__init__.py").touch()
        environment["PYTHONPATH"] = os.pathsep.join([str(clean), *filter(None, [os.environ.get("PYTHONPATH")])])
        says = VENDOR.no_bindings[0]
    elif case == "no cache":
        (clean / f"gpuinterop-{os.geteuid()}").symlink_to(clean)
        environment = {"XDG_CACHE_HOME": os.devnull, "TMPDIR": str(clean)}
        says = "set XDG_CACHE_HOME"
    elif case == "host":
        command[2] = "host"
        says = "got 'host'; the host backend needs no driver: GPUINTEROP_BACKEND=host COMMAND"
    else:
        command[-2:] = ["none"]
        says = "none: No such file or directory"
    done = python(*command, cwd=clean, **environment)
    assert done.returncode != 0
    assert says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (clean / "began").exists()
