"""`gpuinterop matrix`: what is red, what was skipped, where rows differ, and what no device has shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpuinterop.capabilities import DOMAIN

from .invoke import invoke

MAP, WORDS, GRAPH = "map_buffer:opaque_fd", "stream_memory_ops", "graph_capture"
SHOWN = "map_buffer OpaqueFd"
SKIPPED = "What was skipped, or is not in every row"


def _test(name: str, outcome: str = "passed", device: str = "a:0", *cells: str, reason: str = "") -> dict[str, Any]:
    test = f"tests/test_own.py::{name}"
    return {"id": f"{test}[{device}]", "test": test, "device": device, "party": "", "driver": "", "cells": list(cells),
            "outcome": outcome, "reason": reason, "seconds": 0.1}  # fmt: skip


def _report(
    folder: Path, name: str, tests: list[dict[str, Any]], *, status: int | None = 0, python: str = "3.12", **more: Any
) -> str:
    """A machine with one device ``a:0``, which says that it can map and has graphs."""
    usable = more.pop("usable", (MAP, GRAPH))
    cells = {
        str(cell): {"support": "unverified" if str(cell) in usable else "unsupported", "reason": "why"}
        for cell in DOMAIN
    }
    facts = {
        "format": 1, "started": "2026-11-22T20:00:00+00:00", "gpuinterop": "1", "python": python, "platform": "Linux",
        "variables": {}, "drivers": [],
        "backends": [{"name": "a", "required": True, "problem": "", "versions": {"driver": "5"}}],
        "devices": {"a:0": {"backend": "a", "name": "A", "stand_in": more.pop("stand_in", ""), "capabilities": cells}},
        "tests": tests, **more,
    }  # fmt: skip
    if status is not None:
        facts["end"] = {"status": status, "partial": False}
    text = json.dumps(facts)
    file = folder / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text if status is not None else text[:-2])
    return str(file)


PASSED = [_test("test_maps", "passed", "a:0", MAP)]
RED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "a test that failed": ([*PASSED, _test("test_b", "failed", reason="1 != 2")], {"status": 1}, "FAILED"),
    "a status alone": (PASSED, {"status": 3}, "FAILED with status 3"),
    "a run that was killed": (PASSED, {"status": None}, "ENDED EARLY"),
    "a run in which all was skipped": ([_test("test_b", "gap", reason="declared: why")], {}, "NOTHING PASSED"),
    "a backend that is absent": ([_test("test_b", "gap", "a"), _test("test_pure", "passed", "")], {}, "NOTHING PASSED"),
    "a required backend that is absent": (
        [_test("test_pure", "passed", "")],
        {"devices": {}, "backends": [{"name": "a", "required": True, "problem": "no driver", "versions": {}}]},
        "NO BACKEND",
    ),
}


@pytest.mark.parametrize("case", RED)
def test_what_is_red(tmp_path: Path, case: str) -> None:
    tests, options, word = RED[case]
    done = invoke("matrix", _report(tmp_path, "good", PASSED), _report(tmp_path, "bad", tests, **options))
    assert done.exit_code == 1, done.output
    assert "2 rows: 1 red" in done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("bad ")]
    assert word in line
    (line,) = [line for line in done.output.splitlines() if line.startswith("good ")]
    assert " passed " in line
    assert "- bad: " in _section(done.output, "What failed")


def test_what_is_green_and_what_is_missing(tmp_path: Path) -> None:
    reports = [_report(tmp_path, name, PASSED) for name in ("one", "two")]
    done = invoke("matrix", *reports, "--expect", "one", "--expect", "two")
    assert (done.exit_code, "2 rows: none red" in done.output) == (0, True), done.output
    (tmp_path / "empty.json").write_text("")
    page = tmp_path / "page.md"
    files = (str(tmp_path / name) for name in ("none.json", "empty.json"))
    done = invoke("matrix", *reports, *files, "--expect", "three", "--markdown", str(page))
    assert (done.exit_code, "5 rows: 3 red" in done.output) == (1, True), done.output
    for name, word in (("none", "UNREADABLE"), ("empty", "UNREADABLE"), ("three", "MISSING")):
        assert f"| {name} | {word} |" in page.read_text()
    assert invoke("matrix", str(tmp_path)).exit_code == 1
    assert invoke("matrix").exit_code == 2
    assert invoke("matrix", *reports, "--html", str(tmp_path / "no" / "folder")).exit_code == 2


def _section(output: str, heading: str) -> str:
    _, found, rest = output.partition(f"{heading}\n")
    assert found, output
    return rest.partition("\n\n")[0]


def test_cells_and_skips(tmp_path: Path) -> None:
    """A cell is shown where each of its tests has passed, on the device or a stand-in; a failure takes it away."""
    one = [
        _test("test_maps", "passed", "a:0", MAP), _test("test_graphs[1]", "failed", "a:0", GRAPH, reason="E"),
        _test("test_graphs[2]", "passed", "a:0", GRAPH), _test("test_both", "gap", reason="declared: why not"),
        _test("test_once", "gap", reason="declared: not here"), _test("test_known", "xfailed", reason="known"),
    ]  # fmt: skip
    two = [
        _test("test_maps", "passed", "a:0", MAP), _test("test_both", "skipped", reason="no mood " * 99),
        _test("test_once"), _test("test_once", "gap", reason="not with that party"), _test("test_known"),
        _test("test_words", "passed", "a:0", WORDS),
    ]  # fmt: skip
    reports = (
        _report(tmp_path, "one", one, status=1),
        _report(tmp_path, "two", two, stand_in="simulated", python="3.14", usable=(MAP, WORDS)),
    )
    done = invoke("matrix", *reports, "--html", str(page := tmp_path / "page.html"))
    details = page.read_text()
    assert "<th>cell</th><th>one</th><th>two (simulated)</th>" in details
    for cell, *marks in ((SHOWN, "✓", "○"), (GRAPH, "✗", "·"), (WORDS, "·", "○")):
        assert f"<tr><td>{cell}</td><td>{marks[0]}</td><td>{marks[1]}</td></tr>" in details
    never = details.partition("<h2>Cells that no device has shown</h2>")[2]
    assert f"<li>{GRAPH}: failed in one</li>" in never
    assert f"<li>{WORDS}: stand-in in two</li>" in never, "no stand-in counts as a device"
    assert SHOWN not in never
    assert "<li>map_mipmapped_array, a gap in every row: OpaqueFd, DmaBufFd, NvSciBuf</li>" in never
    assert "Win32" not in never, "no row's platform has it"
    assert "<td>python</td><td>3.14</td><td>two</td>" in details
    assert "no mood " * 50 in details, "the page has the whole reason"
    assert "2 rows, 1 simulated: 1 red" in done.output
    skipped = _section(done.output, SKIPPED)
    assert "- skipped in every row: tests/test_own.py::test_both: why not / no mood" in skipped
    assert "- skipped in one: tests/test_own.py::test_once: not here\n" in skipped
    assert "- xfailed in one: tests/test_own.py::test_known: known" in skipped
    assert "- not there in one: tests/test_own.py::test_words\n" in skipped
    assert "test_maps" not in skipped
    assert _section(done.output, "What failed").endswith("- one: tests/test_own.py::test_graphs[1][a:0]: E")


def test_a_report_of_an_earlier_run(tmp_path: Path) -> None:
    old = _report(tmp_path, "old", PASSED)
    new = _report(tmp_path, "new", PASSED, started="2026-11-22T21:00:00+00:00")
    done = invoke("matrix", old, new, "--since", "2026-11-22T22:30:00+02:00")
    assert (done.exit_code, "2 rows: 1 red" in done.output) == (1, True), done.output
    assert re.search("^old +OLD", done.output, re.MULTILINE)
    assert invoke("matrix", old, "--since", "2026-11-22T20:00:00").exit_code == 0
    assert invoke("matrix", old, "--since", "yesterday").exit_code == 2


def test_names_of_rows(tmp_path: Path) -> None:
    """The file's name; with its folder where several have it; and the device, where a report has several."""
    reports = _report(tmp_path, "amd/run", PASSED), _report(tmp_path, "nvidia/run", PASSED)
    both = json.loads(Path(reports[0]).read_text())
    both["devices"]["a:1"] = both["devices"]["a:0"]
    both["tests"] += [_test("test_maps", "failed", "a:1", MAP, reason="E")]
    Path(reports[0]).write_text(json.dumps(both))
    output = invoke("matrix", *reports).output
    for words in ("amd/run a:0  passed", "amd/run a:1  FAILED", "nvidia/run   passed"):
        assert f"\n{words}" in output, output


EVIL = "\udce9 <script>alert(1)</script> | `x` [a](javascript:1) \x1b[2J\n# heading"


def test_a_strangers_words(tmp_path: Path) -> None:
    """What a report says is text: in a terminal, in a forge's summary and in a browser."""
    tests = [*PASSED, _test(EVIL, "failed", reason=EVIL), _test("test_b", "gap", reason=EVIL)]
    report = _report(tmp_path, "evil", tests, status=1, python=EVIL, stand_in=EVIL, variables={EVIL: EVIL})
    page, summary = tmp_path / "page.html", tmp_path / "page.md"
    done = invoke("matrix", report, "--html", str(page), "--markdown", str(summary))
    assert done.exit_code == 1
    assert "\x1b" not in done.output
    assert "<script" not in page.read_text()
    assert "alert(1)" in page.read_text()
    text = summary.read_text()
    assert not re.search(r"(?<!\\)(<script|\[a)", text)
    (row,) = (line for line in text.splitlines() if line.startswith("| evil"))
    assert row.replace(r"\|", "").count("|") == 6
    assert not any(line.startswith("# heading") for line in text.splitlines())
