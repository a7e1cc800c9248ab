"""`gpuinterop matrix`: what is red, what was skipped, and where rows differ."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from gpuinterop.testing.results import PART, UNRECORDED

from .invoke import invoke

SKIPPED = "What was skipped, or is not in every row"


def _test(
    name: str, tag: str = "", message: str = "", device: str = "a:0", party: str = "", module: str = "tests.test_own"
) -> ET.Element:
    """A test that passed, or ended as pytest writes it: ``failure``, ``error``, ``gap``, ``skipped`` or ``xfail``."""
    parameters = "-".join(filter(None, (device, party)))
    case = ET.Element("testcase", classname=module, name=f"{name}[{parameters}]" if parameters else name, time="0.1")
    properties = ET.SubElement(case, "properties")
    for key, value in (("device", device), ("exporter", party)):
        if value:
            ET.SubElement(properties, "property", name=f"gpuinterop.{key}", value=value)
    if tag == "gap":
        ET.SubElement(properties, "property", name="gpuinterop.skip", value="gap")
    if tag in ("gap", "skipped", "xfail"):
        ET.SubElement(case, "skipped", type="pytest.xfail" if tag == "xfail" else "pytest.skip", message=message)
    elif tag:
        ET.SubElement(case, tag, message=message)
    return case


def _report(
    folder: Path, name: str, tests: list[ET.Element], *, started: str = "2026-11-22T21:00:00+01:00", **properties: str
) -> str:
    """A machine with devices ``a:0`` and ``a:1``."""
    suites = ET.Element("testsuites", name="pytest tests")
    suite = ET.SubElement(suites, "testsuite", name="pytest", timestamp=started)
    facts = {"device.a:0": "A (driver 5)", "device.a:1": "B (driver 5)", **properties}
    names = ET.SubElement(suite, "properties")
    for fact, value in facts.items():
        ET.SubElement(names, "property", name=f"gpuinterop.{fact}", value=value)
    suite.extend(tests)
    file = folder / f"{name}.xml"
    file.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suites).write(file, encoding="utf-8")
    return str(file)


PASSED = [_test("test_maps")]
RED: dict[str, tuple[list[ET.Element], dict[str, str], str, str]] = {
    "a test that failed": ([*PASSED, _test("test_b", "failure", "1 != 2")], {"status": "1"}, "FAILED", "1 != 2"),
    "a test without a device": ([*PASSED, _test("test_b", "error", "1 != 2", device="")], {}, "FAILED", "1 != 2"),
    "a status alone": (
        PASSED, {"status": "2"}, "FAILED with status 2", "no test of a:0 failed; pytest's exit status is 2",
    ),
    "a run in which all was skipped": (
        [_test("test_b", "gap", "declared: why")], {}, "NOTHING PASSED", "no test of a:0 passed",
    ),
    "a backend that is absent": (
        [_test("test_b", "gap", "declared: absent", device="a"), _test("test_pure", device="")], {}, "NOTHING PASSED",
        "no test of a passed",
    ),
    "a run of nothing": (
        [], {"status": "5"}, "NOTHING PASSED", "no test of the run passed; pytest's exit status is 5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RED)
def test_what_is_red(tmp_path: Path, case: str) -> None:
    tests, facts, word, reason = RED[case]
    done = invoke("matrix", _report(tmp_path, "good", PASSED), _report(tmp_path, "bad", tests, **facts))
    assert done.exit_code == 1, done.output
    assert "2 rows: 1 red" in done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("bad ")]
    assert word in line
    failures = _section(done.output, "What failed")
    assert failures.startswith("- bad: ")
    assert reason in failures
    (line,) = [line for line in done.output.splitlines() if line.startswith("good ")]
    assert " passed " in line


def test_what_is_green_and_what_is_missing(tmp_path: Path) -> None:
    """A run that was killed has no report: its row is red only if it is expected."""
    reports = [_report(tmp_path, name, PASSED) for name in ("one", "two")]
    done = invoke("matrix", *reports, "--expect", "one", "--expect", "two")
    assert (done.exit_code, "2 rows: none red" in done.output) == (0, True), done.output
    (tmp_path / "empty.xml").write_text("")
    page = tmp_path / "page.md"
    files = (str(tmp_path / name) for name in ("none.xml", "empty.xml"))
    done = invoke("matrix", *reports, *files, "--expect", "killed", "--markdown", str(page))
    assert (done.exit_code, "5 rows: 3 red" in done.output) == (1, True), done.output
    for name, word in (("none", "UNREADABLE"), ("empty", "UNREADABLE"), ("killed", "MISSING")):
        assert f"| {name} | {word} |" in page.read_text()
    assert invoke("matrix", str(tmp_path)).exit_code == 1
    assert invoke("matrix").exit_code == 2
    assert invoke("matrix", *reports, "--markdown", str(tmp_path / "no" / "folder")).exit_code == 2


def _section(output: str, heading: str) -> str:
    _, found, rest = output.partition(f"{heading}\n")
    assert found, output
    return rest.partition("\n\n")[0]


def test_skips(tmp_path: Path) -> None:
    """A test counts as skipped where no exporter has run it; a module that skipped itself is each of its tests."""
    kit = "lib.python3.{}.site-packages.gpuinterop.testing.test_conformance.TestMemory"
    one = [
        _test("test_maps"), _test("test_both", "gap", "declared: why not"), _test("test_fails", "failure", "E"),
        _test("test_once", "gap", "declared: not here"), _test("test_known", "xfail", "known"),
        _test("tests.test_module", "skipped", "collection skipped", device="", module=""),
        _test("test_of_the_kit", module=kit.format(11)),
    ]  # fmt: skip
    two = [
        _test("test_maps"), _test("test_both", "skipped", "no mood " * 99), _test("test_fails"),
        _test("test_once"), _test("test_once", "gap", "not with that party", party="vulkan"), _test("test_known"),
        _test("test_words"), _test("test_in_it", module="tests.test_module.TestIt"),
        _test("test_of_the_kit", module=kit.format(12)),
    ]  # fmt: skip
    reports = _report(tmp_path, "one", one), _report(tmp_path, "two", two, **{"stand-in.a:0": "simulated"})
    done = invoke("matrix", *reports)
    assert "2 rows, 1 simulated: 1 red" in done.output
    assert _section(done.output, SKIPPED).replace("\n  ", " ").splitlines() == [
        "- not there in one: tests.test_own::test_words",
        "- skipped in every row: tests.test_own::test_both: why not /" + " no mood" * 11 + "...",
        "- skipped in one: tests.test_module.TestIt::test_in_it",
        "- skipped in one: tests.test_own::test_once: not here",
        "- xfailed in one: tests.test_own::test_known: known",
    ]
    assert _section(done.output, "What failed") == "- one: tests.test_own::test_fails[a:0]: E"


def test_a_report_of_an_earlier_run(tmp_path: Path) -> None:
    old = _report(tmp_path, "old", PASSED)
    new = _report(tmp_path, "new", PASSED, started="2026-11-22T21:00:00+00:00")
    done = invoke("matrix", old, new, "--since", "2026-11-22T22:30:00+02:00")
    assert (done.exit_code, "2 rows: 1 red" in done.output) == (1, True), done.output
    assert re.search("^old +OLD", done.output, re.MULTILINE)
    assert invoke("matrix", old, "--since", "2026-11-22T20:00:00Z").exit_code == 0
    done = invoke("matrix", old, "--since", "yesterday")
    assert done.exit_code == 2
    assert "expected a time such as 2026-01-31T12:00:00Z, got 'yesterday'" in " ".join(done.output.split())


def test_a_time_without_an_offset_is_in_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the reader is."""
    report = _report(tmp_path, "run", PASSED)  # at 20:00 UTC
    monkeypatch.setenv("TZ", "XXX-8")
    time.tzset()
    try:
        statuses = [invoke("matrix", report, "--since", f"2026-11-22T{hour}:30:00").exit_code for hour in (19, 20)]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert statuses == [0, 1]


def test_names_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's name; with its folder where several have it; and the device, where a report has several."""
    both = [*PASSED, _test("test_maps", "failure", "E", device="a:1")]
    _report(tmp_path, "amd/run", both)
    _report(tmp_path, "nvidia/run", PASSED, **{UNRECORDED.removeprefix("gpuinterop."): PART})
    monkeypatch.chdir(tmp_path)
    for folder in (Path(), tmp_path, Path("..") / tmp_path.name):  # however the paths are written
        output = invoke("matrix", str(folder / "amd/run.xml"), "nvidia/run.xml").output
        for words in (
            "amd/run a:0  passed  1 passed",
            "amd/run a:1  FAILED  1 failed",
            f"nvidia/run   passed  1 passed, {PART[:8]}",
        ):
            assert f"\n{words}" in output, output
    done = invoke("matrix", "amd/run.xml", str(tmp_path / "amd/run.xml"))
    assert done.exit_code == 2
    assert "expected files with different names, got amd/run.xml, " in " ".join(done.output.split())


EVIL = "<script>alert(1)</script> | `x` [a](javascript:1) \x9b2J\n# heading"


def test_a_strangers_words(tmp_path: Path) -> None:
    """What a report says is text: in a terminal, and in a forge's summary."""
    tests = [*PASSED, _test(EVIL, "failure", EVIL), _test("test_b", "gap", EVIL)]
    report = _report(tmp_path, "evil", tests, **{"device.a:0": EVIL})
    summary = tmp_path / "page.md"
    done = invoke("matrix", report, "--markdown", str(summary))
    assert done.exit_code == 1
    assert "\x9b" not in done.output
    text = summary.read_text()
    assert not re.search(r"(?<!\\)(<script|\[a)", text)
    (row,) = (line for line in text.splitlines() if line.startswith("| evil"))
    assert row.replace(r"\|", "").count("|") == 5
    assert not any(line.startswith("# heading") for line in text.splitlines())
