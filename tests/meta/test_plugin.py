"""The plugin: out of the way in other people's runs, and strict where it is asked to be."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.capabilities import Cell, VerifiedRun, read_verified
from gpuinterop.testing import participants
from gpuinterop.testing.report import format_runs, merge_runs, write_report

OTHERS = """
import sys

def test_of_somebody_else():
    loaded = [name for name in sys.modules if name.startswith(("gpuinterop_", "toybackend", "gpuinterop.testing."))]
    assert loaded == ["gpuinterop.testing.plugin"], loaded
    assert "numpy" not in sys.modules
"""

IN_PLACE = "ignore:Module already imported so cannot be rewritten; _editable_impl:pytest.PytestAssertRewriteWarning"


@pytest.mark.parametrize("chosen", ["", "nonesuch", "\x01 no name"])
def test_other_peoples_runs(run_pytest: Callable[..., Any], chosen: str) -> None:
    """A run without our tests loads no backend, prints nothing of ours, and a wrong variable breaks nothing."""
    environment = {"GPUINTEROP_BACKEND": chosen, "GPUINTEROP_DISABLE": "no such pattern"}
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
    "chosen, and locked": ((), {"GPUINTEROP_BACKEND": "toy"}, LOCKED, KEY),
    "required wrongly": (("--gpuinterop-require=tyo",), {}, TOY, "--gpuinterop-require: there is no backend 'tyo'"),
    "selected wrongly": ((*SELECTED, "--gpuinterop-backend=tyo"), {}, TOY, "-backend: there is no backend 'tyo'"),
    "chosen wrongly": ((), {"GPUINTEROP_BACKEND": "tyo"}, TOY, "_BACKEND: there is no backend 'tyo'"),
    "chosen wrongly, to no effect": (
        SELECTED,
        {"GPUINTEROP_BACKEND": "tyo"},
        TOY,
        "_BACKEND: there is no backend 'tyo'",
    ),
    "chosen, and empty": (SELECTED, {"GPUINTEROP_BACKEND": ""}, TOY, "GPUINTEROP_BACKEND: expected toy, got ''"),
    "chosen, empty and alone": ((), {"GPUINTEROP_BACKEND": ""}, TOY, "expected the name of a backend, got ''"),
    "chosen twice": (
        REQUIRED,
        {"GPUINTEROP_BACKEND": "host"},
        TOY,
        "GPUINTEROP_BACKEND: expected toy, got 'host'",
    ),
    "a variable that there is not": (
        SELECTED,
        {"GPUINTEROP_REQUIRE": "toy"},
        TOY,
        "GPUINTEROP_REQUIRE: expected GPUINTEROP_BACKEND, .*, got a variable that gpuinterop does not know",
    ),
    "one that is nearly the simulated drivers'": (
        SELECTED,
        {"GPUINTEROP_SIM_DEVICE": "2"},
        TOY,
        "GPUINTEROP_SIM_DEVICE: expected .*GPUINTEROP_SIM_DEVICES",
    ),
    "one that is nearly ours": (SELECTED, {"GPUINTEROP_EXPLORER": "1"}, TOY, "GPUINTEROP_EXPLORER: expected "),
    "disabled wrongly": (SELECTED, {"GPUINTEROP_DISABLE": "map_bufer"}, TOY, "_DISABLE: .*'map_bufer'"),
    "disabled wrongly, to no effect": (
        SELECTED,
        {"GPUINTEROP_DISABLE": "map_bufer"},
        LOCKED,
        "_DISABLE: .*'map_bufer'",
    ),
    "simulated wrongly": ((*SELECTED, "--gpuinterop-simulated=tyo"), {}, TOY, "-simulated: there is no backend 'tyo'"),
    "a party that cannot be": ((*SELECTED, "--gpuinterop-exporter=mefmd"), {}, TOY, "-exporter: .*got 'mefmd'"),
    "a party's misspelt place": ((*SELECTED, "--gpuinterop-exporter=memfd@proc"), {}, TOY, "-exporter: .*@proc'"),
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


def test_every_variable_of_the_simulated_drivers_is_known() -> None:
    """Those that their sources read."""
    home = Path(gi.__file__).parent / "testing" / "simulated"
    sources = [file.read_text(encoding="utf-8") for file in (*home.rglob("*.c"), home / "build.py")]
    read = set(re.findall(r"\"(GPUINTEROP_SIM_\w+)\"", "".join(sources)))
    assert len(read) > 10
    known = {name for name in read if name in participants._VARIABLES or participants._OTHERS.fullmatch(name)}
    assert known == read


def test_a_wrong_limit_names_the_variable(run_pytest: Callable[..., Any]) -> None:
    """And what it takes; nothing runs."""
    done = run_pytest(limit="abc")
    assert done.status == 2
    assert "InvalidArgumentError: GPUINTEROP_KIT_LIMIT: expected seconds" in done.output
    assert "got 'abc'" in done.output
    from gpuinterop.testing.suites import base  # collected by then: pytest has it rewritten

    for text in ("nan", "inf", "-1", "0", "1e300", "20 s"):
        with pytest.raises(gi.InvalidArgumentError, match=f"GPUINTEROP_KIT_LIMIT: .* got '{text}'"):
            base._limit(text)
    assert base._limit("0.5") == 0.5


def test_what_is_lacking_fails_once_in_several_processes(run_pytest: Callable[..., Any]) -> None:
    """Under pytest-xdist, in whatever order its processes take the tests."""
    done = run_pytest("--gpuinterop-require=toy", "-n2", kit=False, files={"test_mine.py": SUBCLASSED}, toy=LOCKED)
    assert done.status == 1, done.output
    assert done.failed == {MISSING}, done.output
    assert done.counts["failed"] == 1
    assert KEY in done.output


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


def test_the_kits_own_module_fails_as_a_subclass_does(run_pytest: Callable[..., Any]) -> None:
    done = run_pytest("--gpuinterop-require=toy", toy=LOCKED)
    assert (done.status, done.failed) == (1, {MISSING}), done.output


def test_unavailable(run_pytest: Callable[..., Any]) -> None:
    """A backend that this run only selects, and that does not work, is skipped with its reason."""
    done = run_pytest("--gpuinterop-backend=toy", "-rs", kit=False, files={"test_mine.py": SUBCLASSED}, toy=LOCKED)
    assert done.status == 0, done.output
    assert f"gpuinterop: --gpuinterop-backend: the backend 'toy' is not available: {KEY}" in done.output


SKIPS = """
import pytest
from gpuinterop.testing.requirements import skip_declared
from gpuinterop.testing.suites import BadArgumentSuite, Suite
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

class TestKit(BadArgumentSuite):
    pass

@pytest.mark.skip(reason="nor for these")
class TestMarkedKit(BadArgumentSuite):
    pass
"""

SKIPPING_CONFTEST = """
import pytest

def pytest_runtest_setup(item):
    if item.cls.__name__ == "TestKit":
        pytest.skip("no mood for the kit's either")
"""


@pytest.mark.parametrize(
    ("options", "environment", "required"),
    [
        (("--gpuinterop-backend=toy",), {}, False),
        (("--gpuinterop-require=toy",), {}, True),
        ((), {"GPUINTEROP_BACKEND": "toy"}, True),
    ],
    ids=["selected", "required", "chosen"],
)
def test_skips(
    run_pytest: Callable[..., Any], options: tuple[str, ...], environment: dict[str, str], required: bool
) -> None:
    """A test of a user's own may skip itself. What the kit skips, and the kit's own tests, must be declared."""
    only = ("-k", "TestMine or test_bare_int", "-rsfE")
    files = {"test_skips.py": SKIPS, "conftest.py": SKIPPING_CONFTEST}
    done = run_pytest(*options, *only, kit=False, files=files, environment=environment, toy="toybackend:ToyGpu")
    assert done.status == int(required), done.output
    undeclared = {"TestMine::test_that_the_kit_skips", "TestKit::test_bare_int", "TestMarkedKit::test_bare_int"}
    assert done.failed == (undeclared if required else set())
    unexpected = 0 if required else 3
    counts = f"1 skipped as declared, {unexpected} unexpected skips, 2 skipped by themselves;"
    assert counts in done.output, done.output
    assert "no mood for it" in done.output


@pytest.mark.parametrize(
    "options", [("--gpuinterop-require=toy",), ("--gpuinterop-backend=toy", "--gpuinterop-strict")]
)
def test_a_device_that_shares_with_nobody_fails_once(run_pytest: Callable[..., Any], options: tuple[str, ...]) -> None:
    """A GPU without its Vulkan driver, say: one failure says so, and hundreds of tests of sharing are skipped."""
    done = run_pytest(*options, "-k", "TestMemory", toy="toybackend:ToyGpu", seconds=100)
    assert done.failed == {"gpuinterop::environment"}, done.output
    assert done.counts["failed"] == 1
    assert "toy:0: no independent party shares this device; Vulkan: " in done.output
    assert ", 0 unexpected skips" in done.output


KNOWN = """
import gpuinterop as gi

gi.get_backend("host").driver.known_failures = {FAILURES}
"""
FAILS_IN_ONE = """
class TestMine:
    def test_it(self, gpuinterop_device):
        raise AssertionError

    def test_another(self, gpuinterop_device):
        pass
"""


@pytest.mark.parametrize("known", [False, True])
def test_what_a_drivers_version_fails_in_is_expected(run_pytest: Callable[..., Any], known: bool) -> None:
    failures = {"TestMine.test_it": "this version keeps imports (hip_vm.cpp:246)"} if known else {}
    files = {"test_fails.py": FAILS_IN_ONE, "conftest.py": KNOWN.replace("FAILURES", repr(failures)[1:-1])}
    done = run_pytest("--gpuinterop-require=host", "-rx", kit=False, files=files, toy=None)
    assert done.status == int(not known), done.output
    assert ("this version keeps imports (hip_vm.cpp:246)" in done.output) is known
    assert ("1 failed as expected" in done.output) is known


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


@pytest.mark.parametrize("processes", [(), ("-n2",)], ids=["one process", "xdist"])
def test_a_strict_run(run_pytest: Callable[..., Any], processes: tuple[str, ...]) -> None:
    """What skips itself is red, and what is declared is not."""
    files = {"test_mine.py": ITSELF}
    assert run_pytest(*REQUIRED, *processes, kit=False, files=files).status == 0
    done = run_pytest(*REQUIRED, "--gpuinterop-strict", *processes, kit=False)
    assert (done.status, done.counts) == (1, {"failed": 2, "skipped": 2}), done.output
    assert "--gpuinterop-strict: expected a test that runs, got a skip: no mood for it" in done.output
    files |= {f"test_module_{name}.py": "import pytest; pytest.importorskip('nonesuch')" for name in "ab"}
    done = run_pytest("--gpuinterop-strict", *processes, "-k", "declared", kit=False, files=files)
    assert (done.status, done.failed) == (1, {MISSING}), done.output
    for name in "ab":
        assert f"expected the tests of test_module_{name}.py, got a skip: could not import 'nonesuch'" in done.output


HANGS = """
import threading
import pytest
from gpuinterop.testing.suites import Suite

class TestMine(Suite):
    @pytest.mark.timeout(1, method="thread")
    def test_that_hangs(self, device):
        threading.Event().wait()

    def test_marked(self, device, request):
        assert request.node.get_closest_marker("timeout").args[0] > 10
"""


def test_hanging(run_pytest: Callable[..., Any]) -> None:
    """A test that hangs is ended, and the stacks are shown; every test of a suite has such a limit."""
    done = run_pytest("--gpuinterop-backend=toy", "-k", "marked", kit=False, files={"test_hangs.py": HANGS})
    assert done.status == 0, done.output
    done = run_pytest("--gpuinterop-backend=toy", "-k", "hangs", kit=False)
    assert done.status != 0
    assert "in test_that_hangs" in done.output
    assert "threading.Event().wait()" in done.output


def test_header(run_pytest: Callable[..., Any]) -> None:
    """The header has versions, drivers and the variables that are set."""
    environment = {"GPUINTEROP_DISABLE": "graph_capture"}
    done = run_pytest("--gpuinterop-backend=toy", "-k", "test_total", environment=environment)
    assert "GPUINTEROP_DISABLE=graph_capture" in done.output
    assert "gpuinterop device toy:0: Toy (toy 0.1)" in done.output
    assert "Python " in done.output
    assert "gpuinterop exporters of toy:0: " in done.output


# -- the report ----------------------------------------------------------------------------------------------------


def _run(device: str, date: str = "2026-01-02", platform: str = "linux", cells: tuple[str, ...] = ()) -> VerifiedRun:
    return VerifiedRun(
        date=date,
        platform=platform,
        device=device,
        versions={"driver": '5 "final"', "a b": "\\x\n"},
        cells=frozenset(map(Cell.parse, cells or ("map_buffer:opaque_fd", "graph_capture"))),
    )


def test_report_is_read_back(tmp_path: Path) -> None:
    """What is written is what is read, whatever a driver calls itself."""
    runs = [_run('Büro "GPU" \\ 7'), _run("other", platform=sys.platform)]
    (tmp_path / "verified.toml").write_text(format_runs(runs), encoding="utf-8")
    assert read_verified(tmp_path / "verified.toml") == runs


def test_report_replaces_the_same_device(tmp_path: Path) -> None:
    """A fresh run replaces the one of the same platform and device, and leaves the others."""
    path = tmp_path / "verified.toml"
    write_report(path, [_run("one"), _run("two")])
    write_report(path, [_run("one", date="2026-03-04", cells=("stream_memory_ops",))])
    found = {run.device: run for run in read_verified(path)}
    assert found["one"].date == "2026-03-04"
    assert {str(cell) for cell in found["one"].cells} == {"stream_memory_ops"}
    assert found["two"].date == "2026-01-02"
    assert [path.name] == [entry.name for entry in tmp_path.iterdir()]
    assert merge_runs([_run("one")], [_run("one", platform="win32")]) == [_run("one"), _run("one", platform="win32")]


def test_report_keeps_what_another_command_has_shown(tmp_path: Path) -> None:
    """The suites' run and that of `gpuinterop selftest multicast` replace their own kind alone."""
    path = tmp_path / "verified.toml"
    multicast = ("create_multicast", "import_multicast:vmm_fd")
    suites = _run("one")
    write_report(path, [suites])
    write_report(path, [_run("one", cells=multicast)])
    write_report(path, [_run("one", date="2026-03-04", cells=multicast)])
    assert read_verified(path) == [suites, _run("one", date="2026-03-04", cells=multicast)]
    write_report(path, [_run("one", date="2026-05-06")])
    assert read_verified(path) == [_run("one", date="2026-03-04", cells=multicast), _run("one", date="2026-05-06")]


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

CLAIMS = """
from gpuinterop import OpaqueFd, Operation
from gpuinterop.testing import requires
from gpuinterop.testing.suites import Suite

class TestMine(Suite):
    @requires((Operation.IMPORT_MEMORY, OpaqueFd), Operation.CREATE_MULTICAST)
    def test_it(self, device):
        pass
"""


def test_the_suites_never_claim_multicast(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """A test that passed with it on a device that is not simulated records the rest alone."""
    report = tmp_path / "verified.toml"
    options = ("--gpuinterop-backend=toy", f"--gpuinterop-report={report}")
    files = {"test_claims.py": CLAIMS, "toymulticast.py": MULTICAST}
    done = run_pytest(*options, kit=False, files=files, toy="toymulticast:ToyMulticast")
    assert done.counts == {"passed": 2}, done.output
    (run,) = read_verified(report)
    assert {str(cell) for cell in run.cells} == {"import_memory:opaque_fd"}


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


FAILS = """
from gpuinterop import OpaqueFd, Operation
from gpuinterop.testing import requires
from gpuinterop.testing.suites import Suite

@requires((Operation.IMPORT_MEMORY, OpaqueFd))
class TestMine(Suite):
    @requires((Operation.MAP_BUFFER, OpaqueFd))
    def test_that_fails(self, device):
        assert False

    def test_that_passes(self, device):
        pass
"""


def test_failed_cells_are_not_reported(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """A cell counts as exercised when every test that claims it has passed."""
    report = tmp_path / "verified.toml"
    run_pytest("--gpuinterop-backend=toy", f"--gpuinterop-report={report}", kit=False, files={"test_fails.py": FAILS})
    assert report.exists()
    assert read_verified(report) == []


def test_a_part_is_not_reported(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """A run of a part would replace what the whole has shown."""
    report = tmp_path / "verified.toml"
    done = run_pytest("--gpuinterop-backend=toy", f"--gpuinterop-report={report}", "-k", "test_total")
    assert not report.exists()
    assert "was not written" in done.output


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
    """There is one report and one summary, of what all workers of pytest-xdist have done."""
    report = tmp_path / "verified.toml"
    options = ("--gpuinterop-backend=toy", f"--gpuinterop-report={report}", "-n2", "--dist=loadscope")
    done = run_pytest(*options, kit=False, files={"test_side.py": SIDE_BY_SIDE.format(does="assert False")})
    assert {file.name for file in (tmp_path / "work").glob("gw*")} == {"gw0", "gw1"}
    assert done.failed == {"TestAnother::test_that_does_not"}, done.output
    counts = "3 passed, 1 failed, 0 skipped as declared, 0 unexpected skips; 2 cells exercised"
    assert f"toy:0: {counts}\n" in done.output
    assert "gpuinterop device toy:0: Toy (toy 0.1)" in done.output
    (run,) = read_verified(report)
    assert {str(cell) for cell in run.cells} == {"import_memory:opaque_fd", "map_buffer:opaque_fd"}
    assert (run.tests["passed"], run.tests["failed"]) == (3, 1)


def test_a_worker_that_crashes(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """What it has counted is lost, and the rest is not reported; in other people's runs nothing of ours is printed."""
    report = tmp_path / "verified.toml"
    options = ("--gpuinterop-backend=toy", f"--gpuinterop-report={report}", "-n2")
    done = run_pytest(*options, kit=False, files={"test_side.py": SIDE_BY_SIDE.format(does="os._exit(1)")})
    assert done.status == 1
    assert not report.exists()
    assert f"{report} was not written" in done.output
    assert "(a part of the suite)" in done.output
    done = run_pytest(
        "-n2", "test_others.py", kit=False, files={"test_others.py": "import os; test_it = lambda: os._exit(1)"}
    )
    assert done.status == 1
    assert "crashed while running" in done.output
    assert "conformance" not in done.output
