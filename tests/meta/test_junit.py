"""The XML of pytest: each test with its device, exporter and cells, the facts of the run; and one table of several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.exporters.vulkan import list_drivers
from gpuinterop.testing.results import PART, UNRECORDED, read_run
from tests.cli.invoke import invoke
from tests.missing_vulkan import give_up

FOUR = """
import pytest
import gpuinterop as gi
from gpuinterop.testing import requires

@requires((gi.Operation.IMPORT_MEMORY, gi.OpaqueFd), (gi.Operation.MAP_BUFFER, gi.OpaqueFd))
def test_pair(gpuinterop_harness):
    theirs, ours = gpuinterop_harness.buffer(4096)
    ours.fill(7)
    assert theirs.read(0, 4096) == bytes([7]) * 4096

@pytest.fixture
def gap():
    return 3

@pytest.mark.parametrize("size", [1, 2])
def test_device(size, gpuinterop_device, gpuinterop_backend, gap, record_property):
    record_property("gpuinterop.device", 5)
    assert gpuinterop_device in gpuinterop_backend.devices()
    assert gap == 3

@requires(gi.Operation.CREATE_MULTICAST)
def test_gap(gpuinterop_backend):
    raise AssertionError("it runs where there is a gap")

@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""
"""A suite of a user's own; its fixture and its property have names of the kit's."""


def test_a_suite_on_three_rows(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """Its tests have their properties also with pytest-xdist; the third row has a gap that the others have not."""
    rows: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "one": ((), {}),
        "two": (("-n2",), {}),
        "off": ((), {"GPUINTEROP_DISABLE": "map_buffer:opaque_fd"}),
    }
    files = {name: tmp_path / f"{name}.xml" for name in rows}
    for name, (processes, variables) in rows.items():
        options = ("--gpuinterop-require=toy", "--gpuinterop-exporter=memfd@here", f"--junitxml={files[name]}")
        done = run_pytest(
            *options, *processes, kit=False, files={"test_own.py": FOUR}, environment={"CI": "true", **variables}
        )
        assert done.status == 0, done.output
    for name in ("one", "two"):
        run = read_run(files[name])
        tests = {result.id.removeprefix("test_own::"): result for result in run.results}
        assert {test: result.outcome for test, result in tests.items()} == {
            "test_pair[toy:0-memfd]": "passed",
            "test_device[toy:0-1]": "passed",
            "test_device[toy:0-2]": "passed",
            "test_gap[toy]": "gap",
            "test_known": "xfailed",
        }
        pair, device, gap = (
            tests[test] for test in ("test_pair[toy:0-memfd]", "test_device[toy:0-2]", "test_gap[toy]")
        )
        assert (pair.device, pair.party, pair.test) == ("toy:0", "memfd", "test_own::test_pair")
        assert pair.cells == ["import_memory:opaque_fd", "map_buffer:opaque_fd"]
        assert pair.driver.startswith("memfd ")
        assert (device.device, device.test) == ("toy:0", "test_own::test_device[2]")
        assert (gap.device, gap.test) == ("toy:0", "test_own::test_gap")
        assert "create_multicast on toy:0: " in gap.reason
        assert run.properties["gpuinterop.version"].startswith(f"{gi.__version__}, Python ")
        assert run.properties["gpuinterop.device.toy:0"] == "Toy (toy 0.1)"
        assert run.properties["gpuinterop.status"] == "0"
        assert run.properties["gpuinterop.variables"] == "GPUINTEROP_KIT_LIMIT=1"
        assert run.properties[UNRECORDED] == "its tests are not those of gpuinterop.testing"
    done = invoke("matrix", *map(str, files.values()))
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert lines[:2] == ["3 rows: none red", "row result tests device"]
    for name, passed, skipped in (("one", 3, 1), ("two", 3, 1), ("off", 2, 2)):
        assert f"{name} passed {passed} passed, {skipped} skipped, 1 xfailed Toy (toy 0.1)" in lines
    assert "- skipped in off: test_own::test_pair: map_buffer:opaque_fd on toy:0: turned off by" in " ".join(lines)
    assert "- skipped in every row: test_own::test_gap: create_multicast on toy:0" in done.output


def test_every_vulkan_driver_is_in_the_xml(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "run.xml"
    files = {"test_own.py": "def test_it(gpuinterop_device): pass"}
    if len(drivers := list_drivers()) < 2:
        give_up(drivers.reason or "there is only one driver")
    run_pytest("--gpuinterop-require=toy", f"--junitxml={file}", kit=False, files=files)
    text = read_run(file).properties["gpuinterop.Vulkan.driver"]
    assert text.split("; ") == [f"{driver.name}: {driver.driver} {driver.version}" for driver in drivers]


def test_a_part_is_called_that(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """However it was chosen: pytest deselects nothing for --lf and -x, and with -n2 only workers know what -k does."""
    file = tmp_path / "run.xml"
    files = {"test_own.py": "def test_a(): pass\ndef test_b(): assert False\ndef test_c(): pass\n"}
    for options in ((), ("--lf",), ("-x", "-n2"), ("-k", "test_a", "-n2")):
        command = (f"--junitxml={file}", "--gpuinterop-require=toy", "-pcacheprovider", *options)
        run_pytest(*command, kit=False, files=files)
        assert (read_run(file).properties[UNRECORDED] == PART) == bool(options), options


CRASHES = "import os\ndef test_it(): os._exit(1)\ndef test_other(): pass\n"
TWICE = """
import pytest

@pytest.fixture
def fails_too():
    yield
    raise ValueError("after it")

def test_twice(fails_too):
    assert False, "in it"
"""


def test_what_cannot_be_collected_crashes_or_fails_twice(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """Each is a failure, once, with its reason; a module that skips itself has no tests, and is in the report."""
    file = tmp_path / "run.xml"
    files = {"test_crashes.py": CRASHES, "test_twice.py": TWICE}
    files |= {"test_import.py": "import pytest; pytest.importorskip('nonesuch')"}
    done = run_pytest(f"--junitxml={file}", "-n2", kit=False, files=files)
    assert done.status == 1, done.output
    results = {result.test: (result.outcome, result.reason) for result in read_run(file).results}
    assert results.pop("test_crashes::test_it")[0] == "failed"
    outcome, reason = results.pop("test_import")
    assert outcome == "skipped"
    assert "could not import 'nonesuch'" in reason
    assert results == {
        "test_crashes::test_other": ("passed", ""),
        "test_twice::test_twice": ("failed", "AssertionError: in it"),
    }
    done = run_pytest(f"--junitxml={file}", kit=False, files={"test_typo.py": "import nonesuch"})
    assert done.status == 2
    (failed,) = (result for result in read_run(file).results if result.outcome == "failed")
    assert failed.test == "test_typo"
    assert "nonesuch" in failed.reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<testsuites",
        "<coverage/>",
        "<testsuite/>",
        "<testsuite timestamp='yesterday'/>",
        "<testsuite timestamp='2026-11-22T21:00:00'/>",  # in an unknown time zone
        "<testsuite timestamp='0001-01-01T00:00:00+23:00'/>",
        "<?xml version='1.0' encoding='foo'?><testsuite timestamp='2026-11-22T21:00:00Z'/>",
        None,
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "run.xml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(gi.InvalidArgumentError, match=r"report: expected what .* writes, got .*run\.xml"):
        read_run(file)
