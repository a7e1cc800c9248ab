"""The plugin: out of the way in other people's runs, and strict where it is asked to be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuinterop.testing.results import RUNS, read_run

OTHERS = """
import sys

def test_of_somebody_else():
    loaded = [name for name in sys.modules if name.startswith(("gpuinterop_", "toybackend", "gpuinterop.testing."))]
    assert loaded == ["gpuinterop.testing.plugin"], loaded
    assert "numpy" not in sys.modules
"""

IN_PLACE = "ignore:Module already imported so cannot be rewritten; _editable_impl:pytest.PytestAssertRewriteWarning"


def test_other_peoples_runs(run_pytest: Callable[..., Any]) -> None:
    """A run without our tests loads no backend, prints nothing of ours, and a wrong variable breaks nothing."""
    environment = {"GPUINTEROP_BACKEND": "nonesuch", "GPUINTEROP_DISABLE": "no such pattern"}
    options = ("-W", "error", "-W", IN_PLACE, "--strict-markers")
    done = run_pytest(*options, kit=False, files={"test_others.py": OTHERS}, environment=environment)
    assert done.status == 0, done.output
    assert done.counts == {"passed": 1}
    assert "gpuinterop device" not in done.output
    assert "conformance" not in done.output


MISSING = "gpuinterop::environment"
"""The one test that fails for what a run lacks."""

SUBCLASSED = """
from gpuinterop.testing.suites import MemorySuite, Suite

class TestMemory(MemorySuite):
    pass

class TestMine(Suite):
    def test_without_a_device(self):
        pass
"""
"""As `help(gpuinterop.testing)` says."""

TOY, LOCKED = "toybackend:ToyBackend", "toybackend.broken:Unavailable"
CRASHING, MUTE = "toybackend.broken:Crashing", "toybackend.broken:Mute"
KEY = "the toy box is locked. Find the key."
NO_VULKAN = {"VK_DRIVER_FILES": "/nonexistent.json", "VK_ICD_FILENAMES": "/nonexistent.json"}

SELECTED, REQUIRED = ("--gpuinterop-backend=toy",), ("--gpuinterop-require=toy",)
LACKING: dict[str, tuple[tuple[str, ...], dict[str, str], str, str]] = {
    "required, and locked": (REQUIRED, {}, LOCKED, KEY),
    "required in two processes": ((*REQUIRED, "-n2"), {}, LOCKED, KEY),
    "chosen, and locked": ((), {"GPUINTEROP_BACKEND": "toy"}, LOCKED, KEY),
    "required wrongly": (("--gpuinterop-require=tyo",), {}, TOY, "--gpuinterop-require: there is no backend 'tyo'"),
    "chosen, and empty": (SELECTED, {"GPUINTEROP_BACKEND": ""}, TOY, "GPUINTEROP_BACKEND: expected toy, got ''"),
    "chosen twice": (REQUIRED, {"GPUINTEROP_BACKEND": "host"}, TOY, "GPUINTEROP_BACKEND: expected toy, got 'host'"),
    "a variable that there is not": (SELECTED, {"GPUINTEROP_REQUIRE": "toy"}, TOY, "GPUINTEROP_REQUIRE: expected "),
    "disabled wrongly": (SELECTED, {"GPUINTEROP_DISABLE": "map_bufer"}, TOY, "_DISABLE: .*'map_bufer'"),
    "simulated wrongly": ((*SELECTED, "--gpuinterop-simulated=tyo"), {}, TOY, "-simulated: there is no backend 'tyo'"),
    "a party that cannot be": ((*SELECTED, "--gpuinterop-exporter=mefmd"), {}, TOY, "-exporter: .*got 'mefmd'"),
    "a party": (SELECTED, {"GPUINTEROP_REQUIRE_VULKAN": "1"}, TOY, "vulkan"),
    "broken": (SELECTED, {}, CRASHING, "RuntimeError.*the toy broke"),
    "mute": (SELECTED, {}, MUTE, "RuntimeError.*the toy is mute"),
}


@pytest.mark.parametrize("case", LACKING)
def test_what_is_lacking_fails_once(run_pytest: Callable[..., Any], case: str) -> None:
    """Whichever of the suites a run has."""
    options, variables, toy, reason = LACKING[case]
    environment = {**NO_VULKAN, **variables}
    files = {"test_mine.py": SUBCLASSED, "test_others.py": "def test_of_somebody_else(): pass"}
    done = run_pytest(*options, kit=False, files=files, environment=environment, toy=toy)
    assert done.status == 1, done.output
    assert done.failed == {MISSING}, done.output
    assert done.counts["failed"] == 1
    assert done.counts["passed"] >= 2, "what needs no device runs, and so does somebody else's test"
    _, _, failures = done.output.partition("= FAILURES =")
    assert re.search(reason, failures.partition("gpuinterop conformance")[0]), done.output


def test_what_is_required_is_required_by_tests_without_fixtures_too(run_pytest: Callable[..., Any]) -> None:
    """They may ask for a device themselves; where a backend is only selected, they say so themselves."""
    files = {"test_mine.py": SUBCLASSED, "test_others.py": "def test_of_somebody_else(): pass"}
    for option, status in (("backend", 0), ("require", 1)):
        options = (f"--gpuinterop-{option}=toy", "-k", "somebody_else")
        done = run_pytest(*options, kit=False, files=files, toy=LOCKED)
        assert done.status == status, done.output
        assert done.failed == ({MISSING} if status else set()), done.output
        assert done.counts["passed"] == 1
    # A party they do not use.
    done = run_pytest(*options, kit=False, files=files, environment={**NO_VULKAN, "GPUINTEROP_REQUIRE_VULKAN": "1"})
    assert (done.status, done.counts) == (0, {"passed": 1}), done.output


SKIPS = """
import pytest
from gpuinterop.testing.requirements import skip_declared
from gpuinterop.testing.suites import BackendSuite, Suite
from gpuinterop.testing.suites.libraries import libraries

class TestMine(Suite):
    def test_of_my_own(self, device):
        pytest.skip("no mood for it")

    @pytest.mark.skip(reason="nor for this")
    def test_marked(self, device):
        pass

    def test_declared(self, device):
        skip_declared("the manual says so")

    def test_that_the_kit_skips(self, device):
        libraries(device, simulated=False)

class TestKit(BackendSuite):
    pass

@pytest.mark.skip(reason="nor for these")
class TestMarkedKit(BackendSuite):
    pass
"""

SKIPPING_CONFTEST = """
import pytest

def pytest_runtest_setup(item):
    if item.cls.__name__ == "TestKit":
        pytest.skip("no mood for the kit's either")
"""


@pytest.mark.parametrize("required", [False, True], ids=["selected", "required"])
def test_skips(run_pytest: Callable[..., Any], required: bool) -> None:
    """A test of a user's own may skip itself. What the kit skips, and the kit's own tests, must be declared."""
    only = ("-k", "TestMine or test_same_device_every_time", "-rsfE")
    files = {"test_skips.py": SKIPS, "conftest.py": SKIPPING_CONFTEST}
    done = run_pytest(*(REQUIRED if required else SELECTED), *only, kit=False, files=files, toy="toybackend:ToyGpu")
    assert done.status == int(required), done.output
    undeclared = {
        "TestMine::test_that_the_kit_skips",
        "TestKit::test_same_device_every_time",
        "TestMarkedKit::test_same_device_every_time",
    }
    assert done.failed == (undeclared if required else set())
    unexpected = 0 if required else 3
    counts = f"1 skipped as declared, {unexpected} unexpected skips, 2 skipped by themselves;"
    assert counts in done.output, done.output


ITSELF = """
import pytest
from gpuinterop.testing.requirements import skip_declared

def test_of_mine():
    pytest.skip("no mood for it")

def test_with_a_device(gpuinterop_device):
    pytest.skip("nor for this")

def test_declared(gpuinterop_device):
    skip_declared("the manual says so")

def test_declared_without_a_device():
    skip_declared("the manual says so, too")

@pytest.mark.xfail
def test_that_fails_as_expected():
    raise ValueError
"""


def test_a_strict_run(run_pytest: Callable[..., Any]) -> None:
    """What skips itself is red, and what is declared is not."""
    processes = ("-n2",)
    files = {"test_mine.py": ITSELF}
    done = run_pytest(*REQUIRED, "--gpuinterop-strict", *processes, kit=False, files=files)
    assert (done.status, done.counts) == (1, {"failed": 2, "skipped": 2}), done.output
    assert "--gpuinterop-strict: expected a test that runs, got a skip: no mood for it" in done.output
    files |= {f"test_module_{name}.py": "import pytest; pytest.importorskip('nonesuch')" for name in "ab"}
    done = run_pytest("--gpuinterop-strict", *processes, "-k", "declared", kit=False, files=files)
    assert (done.status, done.failed) == (1, {MISSING}), done.output
    for name in "ab":
        assert f"expected the tests of test_module_{name}.py, got a skip: could not import 'nonesuch'" in done.output


MULTICAST = """
from gpuinterop.backend import Backend, MulticastBackend
import gpuinterop as gi
from gpuinterop.capabilities import Cell, Operation, Scope
from gpuinterop.handles import VmmFd
from toybackend import TwoToyGpus

def never(*arguments, **options):
    raise AssertionError("it was called")

def capabilities(self, ordinal):
    yield from super(ToyMulticast, self).capabilities(ordinal)
    cells = (
        (Operation.EXPORT_ALLOCATION, VmmFd),
        (Operation.CREATE_MULTICAST, None),
        (Operation.EXPORT_MULTICAST, VmmFd),
        (Operation.IMPORT_MULTICAST, VmmFd),
    )
    for cell in cells:
        yield Cell(*cell).unverified(Scope.DEVICE, "it says so itself", "this test")

calls = dict.fromkeys(MulticastBackend.__abstractmethods__ - Backend.__abstractmethods__, never)
calls |= {"capabilities": capabilities, "__module__": TwoToyGpus.__module__}
ToyMulticast = type("ToyMulticast", (TwoToyGpus, MulticastBackend), calls)
"""
"""A backend of two devices that says that it has multicast, and no simulated driver."""

NEVER = """
from gpuinterop.testing.suites import MulticastSuite

class TestMine(MulticastSuite):
    pass
"""


def test_multicast_is_not_tried_on_hardware(run_pytest: Callable[..., Any]) -> None:
    """Where no simulated driver answers to its symbol, each of its tests is a declared skip that names the command."""
    options = ("--gpuinterop-require=toy", "--gpuinterop-simulated=toy", "-rs")
    files = {"test_never.py": NEVER, "toymulticast.py": MULTICAST}
    done = run_pytest(*options, kit=False, files=files, toy="toymulticast:ToyMulticast")
    assert done.status == 0, done.output
    assert set(done.counts) == {"skipped"}, done.output
    assert "gpuinterop selftest multicast" in done.output


# -- pytest-xdist --------------------------------------------------------------------------------------------------

SIDE_BY_SIDE = """
import os
from pathlib import Path
import pytest
from gpuinterop import OpaqueFd, Operation, TimelineFd
from gpuinterop.testing import requires
from gpuinterop.testing.suites import Suite

class TestOne(Suite):
    @requires((Operation.IMPORT_MEMORY, OpaqueFd))
    def test_alone(self, device):
        Path(os.environ["PYTEST_XDIST_WORKER"]).touch()

    @requires((Operation.IMPORT_SEMAPHORE, TimelineFd))
    def test_that_passes(self, device):
        pass

class TestAnother(Suite):
    @requires((Operation.MAP_BUFFER, OpaqueFd))
    def test_alone(self, device):
        Path(os.environ["PYTEST_XDIST_WORKER"]).touch()

    @requires((Operation.IMPORT_SEMAPHORE, TimelineFd))
    def test_that_does_not(self, device):
        {does}
"""


def test_side_by_side(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """There is one report and one summary, of what all workers of pytest-xdist have done.

    A cell counts as exercised when every test that claims it has passed.
    """
    report = tmp_path / "run.xml"
    options = ("--gpuinterop-backend=toy", f"--junitxml={report}", "-n2", "--dist=loadscope")
    done = run_pytest(*options, kit=False, files={"test_side.py": SIDE_BY_SIDE.format(does="assert False")})
    assert {file.name for file in (tmp_path / "work").glob("gw*")} == {"gw0", "gw1"}
    assert done.failed == {"TestAnother::test_that_does_not"}, done.output
    counts = "3 passed, 1 failed, 0 skipped as declared, 0 unexpected skips; 2 cells exercised"
    assert f"toy:0: {counts}\n" in done.output
    assert "gpuinterop device toy:0: Toy (toy 0.1)" in done.output
    (run,) = json.loads(read_run(report).properties[f"{RUNS}toy"])
    assert run["cells"] == ["import_memory:opaque_fd", "map_buffer:opaque_fd"]
    assert (run["tests"]["passed"], run["tests"]["failed"]) == (3, 1)
