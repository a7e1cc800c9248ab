"""What `--gpuinterop-json` writes: every test of a run, whatever ended it; and the fixtures of a user's own tests."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.results import read_run

OWN = """
import pytest
import gpuinterop as gi
from gpuinterop.testing import requires
from gpuinterop.testing.requirements import skip_declared

NEEDS = ((gi.Operation.IMPORT_MEMORY, gi.OpaqueFd), (gi.Operation.MAP_BUFFER, gi.OpaqueFd))

@requires(*NEEDS)
def test_pair(gpuinterop_harness):
    theirs, ours = gpuinterop_harness.buffer(4096)
    ours.fill(7)
    assert theirs.read(0, 4096) == bytes([7]) * 4096

@pytest.mark.parametrize("size", [1, 2])
def test_device(size, gpuinterop_device, gpuinterop_backend):
    assert gpuinterop_device in gpuinterop_backend.devices()

def test_backend(gpuinterop_backend):
    assert gpuinterop_backend.name in ("toy", "host")

def test_exporter(gpuinterop_exporter, gpuinterop_backend):
    with gpuinterop_exporter.create_memory(4096) as theirs:
        theirs.write(0, b"drawn")
        assert theirs.read(0, 5) == b"drawn"

@pytest.fixture
def gap():
    return 3

def test_a_fixture_of_mine(gpuinterop_device, gap, record_property):
    record_property("gpuinterop.device", 5)
    assert gap == 3

@requires(gi.Operation.CREATE_MULTICAST)
def test_gap(gpuinterop_device):
    raise AssertionError("it runs where there is a gap")

def test_declared(gpuinterop_device):
    skip_declared("the manual says so")

def test_of_no_device():
    pytest.skip("no mood for it")

@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""


def _read(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    content = json.loads(file.read_text())
    return content, {entry["id"].partition("::")[2]: entry for entry in content["tests"]}


@pytest.mark.parametrize("processes", [(), ("-n2",)], ids=["one process", "two"])
def test_tests_of_a_users_own(run_pytest: Callable[..., Any], tmp_path: Path, processes: tuple[str, ...]) -> None:
    """Each with its device, its party, its cells and its outcome; JUnit's XML has them as properties."""
    file, junit = tmp_path / "run.json", tmp_path / "junit.xml"
    options = ("--gpuinterop-require=toy", "--gpuinterop-exporter=memfd@here", f"--gpuinterop-json={file}")
    done = run_pytest(
        *options, *processes, f"--junitxml={junit}", kit=False, files={"test_own.py": OWN}, environment={"CI": "true"}
    )
    assert done.status == 0, done.output
    content, tests = _read(file)
    assert {name: entry["outcome"] for name, entry in tests.items()} == {
        "test_pair[toy:0-memfd]": "passed",
        "test_device[toy:0-1]": "passed",
        "test_device[toy:0-2]": "passed",
        "test_backend[toy]": "passed",
        "test_exporter[toy:0-memfd]": "passed",
        "test_a_fixture_of_mine[toy:0]": "passed",
        "test_gap[toy:0]": "gap",
        "test_declared[toy:0]": "gap",
        "test_of_no_device": "skipped",
        "test_known": "xfailed",
    }
    pair = tests["test_pair[toy:0-memfd]"]
    assert (pair["device"], pair["party"], pair["test"]) == ("toy:0", "memfd", "test_own.py::test_pair")
    assert pair["cells"] == ["import_memory:opaque_fd", "map_buffer:opaque_fd"]
    assert pair["driver"].startswith("memfd ")
    assert tests["test_device[toy:0-2]"]["test"] == "test_own.py::test_device[2]"
    assert tests["test_backend[toy]"]["test"] == "test_own.py::test_backend"
    assert tests["test_a_fixture_of_mine[toy:0]"]["device"] == "toy:0"
    assert "create_multicast on toy:0: " in tests["test_gap[toy:0]"]["reason"]
    assert tests["test_of_no_device"]["reason"] == "no mood for it"
    assert content["end"] == {"status": 0, "partial": False}
    assert content["gpuinterop"] == gi.__version__
    (toy,) = content["backends"]
    assert (toy["name"], toy["required"], toy["problem"], toy["versions"]) == ("toy", True, "", {"toy": "0.1"})
    assert content["devices"]["toy:0"]["name"] == "Toy"
    assert content["devices"]["toy:0"]["capabilities"]["map_buffer:opaque_fd"]["support"] == "unverified"
    assert set(content["variables"]) == {"GPUINTEROP_KIT_LIMIT"}
    (case,) = (one for one in ET.parse(junit).iter("testcase") if one.get("name") == "test_pair[toy:0-memfd]")
    properties = {one.get("name"): one.get("value") for one in case.iter("property")}
    assert properties["gpuinterop.device"] == "toy:0"
    assert properties["gpuinterop.cells"] == "import_memory:opaque_fd map_buffer:opaque_fd"


def test_a_part_is_called_that(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """However it was chosen: pytest deselects nothing for --lf and for -x."""
    file = tmp_path / "run.json"
    files = {"test_own.py": "def test_a(): pass\ndef test_b(): assert False\ndef test_c(): pass\n"}
    for options in ((), ("--lf",), ("-x", "-n2")):
        run_pytest(f"--gpuinterop-json={file}", "-pcacheprovider", *options, kit=False, files=files)
        end = read_run(file).end
        assert end is not None
        assert end["partial"] == bool(options), options


HANGS = """
import threading
import pytest

def test_first():
    pass

@pytest.mark.timeout(1, method="thread")
def test_that_hangs():
    threading.Event().wait()

def test_that_never_runs():
    pass
"""


def test_a_run_that_was_ended(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """What was written until then can be read, and names the test; a run that never began leaves none of before."""
    file = tmp_path / "run.json"
    done = run_pytest(f"--gpuinterop-json={file}", kit=False, files={"test_hangs.py": HANGS})
    assert done.status == 1
    assert "in test_that_hangs" in done.output
    run = read_run(file)
    assert run.end is None
    assert [(result.id, result.outcome) for result in run.results] == [
        ("test_hangs.py::test_first", "passed"),
        ("test_hangs.py::test_that_hangs", "unfinished"),
    ]
    text = file.read_text()
    for cut in range(text.index('"tests"') + 12, len(text)):  # killed by a signal, it may end anywhere
        file.write_text(text[:cut])
        assert {result.id for result in read_run(file).results} <= {result.id for result in run.results}
    done = run_pytest(f"--gpuinterop-json={file}", "--no-such-option", kit=False)
    assert done.status == 4
    done = run_pytest(f"--gpuinterop-json={file}", kit=False, files={"conftest.py": "raise SystemExit(3)"})
    assert done.status != 0
    with pytest.raises(gi.InvalidArgumentError, match="did not begin"):
        read_run(file)


def test_what_could_not_be_collected_and_a_worker_that_crashes(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """Both are failures of the run."""
    file = tmp_path / "run.json"
    done = run_pytest(f"--gpuinterop-json={file}", kit=False, files={"test_typo.py": "import nonesuch"})
    assert done.status == 2
    run = read_run(file)
    assert run.end == {"status": 2, "partial": False}
    (found,) = run.results
    assert (found.id, found.outcome) == ("test_typo.py", "failed")
    assert "nonesuch" in found.reason
    (tmp_path / "work" / "test_typo.py").unlink()
    crashes = "import os\ndef test_it(): os._exit(1)\ndef test_other(): pass\n"
    done = run_pytest(f"--gpuinterop-json={file}", "-n2", kit=False, files={"test_crashes.py": crashes})
    assert done.status == 1
    outcomes = {result.id: result.outcome for result in read_run(file).results}
    assert outcomes["test_crashes.py::test_it"] == "failed"
    assert run.end is not None


def test_a_module_that_skips_itself(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """It has no tests, and is in the report."""
    file = tmp_path / "run.json"
    files = {
        "test_one.py": "def test_one(): pass",
        "test_import.py": "import pytest; pytest.importorskip('nonesuch')",
    }
    done = run_pytest(f"--gpuinterop-json={file}", "-n2", kit=False, files=files)
    assert done.status == 0, done.output
    found = {result.test: (result.outcome, result.reason) for result in read_run(file).results}
    assert found == {
        "test_one.py::test_one": ("passed", ""),
        "test_import.py": ("skipped", "could not import 'nonesuch': No module named 'nonesuch'"),
    }


def test_what_is_no_report_is_refused(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """By its name; a stranger's file does nothing else."""
    file = tmp_path / "run.json"
    run_pytest(f"--gpuinterop-json={file}", kit=False, files={"test_one.py": "def test_one(): pass"})
    good = file.read_text()
    assert read_run(file).results
    facts = json.loads(good)
    broken = [
        "", "[]", '{"format": 1}', "[" * 100_000, json.dumps(facts | {"format": 2}), json.dumps(facts | {"tests": [3]}),
        json.dumps(facts | {"devices": {"a": 1}}), json.dumps(facts | {"end": {"status": "0"}}),
        json.dumps(facts | {"tests": [facts["tests"][0] | {"cells": ["no_such_cell"]}]}),
    ]  # fmt: skip
    for text in broken:
        file.write_text(text)
        with pytest.raises(gi.InvalidArgumentError, match=r"report: expected what .* writes, got .*run\.json"):
            read_run(file)
    with pytest.raises(gi.InvalidArgumentError, match="No such file"):
        read_run(tmp_path / "none.json")
