"""`python -m tools.record`: what reports become in a ``verified.toml`` and on the page, and what it refuses."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from gpuinterop.capabilities import Cell, read_verified
from gpuinterop.testing.results import RUNS, UNRECORDED
from tools import record


def _run(device: str, date: str, *cells: str) -> dict[str, Any]:
    versions = {"driver": '5 "final"', "a b": "\\x\n"}
    return {"date": date, "platform": "linux", "device": device, "versions": versions, "cells": list(cells)}


def _report(file: Path, *, backend: str = "mine", runs: list[dict[str, Any]], **properties: str) -> str:
    suite = ET.Element("testsuite", timestamp="2026-11-22T21:00:00+00:00")
    facts = {RUNS + backend: json.dumps(runs), **properties}
    names = ET.SubElement(suite, "properties")
    for name, value in facts.items():
        ET.SubElement(names, "property", name=name, value=value)
    ET.ElementTree(suite).write(file, encoding="utf-8")
    return str(file)


@pytest.fixture(autouse=True)
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the page."""
    copy = tmp_path / "runs.md"
    shutil.copy(record.PAGE, copy)
    monkeypatch.setattr(record, "PAGE", copy)
    return copy


def test_the_page_shows_what_is_recorded(page: Path) -> None:
    before = page.read_text(encoding="utf-8")
    page.write_text(before.replace("import_memory", "nonsense"), encoding="utf-8")
    assert record.main([]) == 0
    assert page.read_text(encoding="utf-8") == before, "run `python -m tools.record`"


def test_a_run_replaces_the_one_of_its_device_and_command(tmp_path: Path) -> None:
    """What is written is what is read, whatever a driver calls itself; and nothing else is left in the folder."""
    (folder := tmp_path / "mine").mkdir()
    file = folder / "verified.toml"
    other = _run('Büro "GPU" \\ 7', "2026-01-02", "map_buffer:opaque_fd", "graph_capture")
    multicast = _run("one", "2026-03-04", "create_multicast", "import_multicast:vmm_fd")
    old, new = (_run("one", date, "graph_capture") for date in ("2026-01-02", "2026-05-06"))
    reports = [
        _report(tmp_path / f"{number}.xml", runs=runs) for number, runs in enumerate([[other, old], [multicast], [new]])
    ]
    assert record.main([reports[0], "--file", str(file)]) == 0
    assert record.main([*reports[1:], "--file", str(file)]) == 0
    runs = read_verified(file)
    assert [(run.device, run.date) for run in runs] == [
        (other["device"], "2026-01-02"), ("one", "2026-03-04"), ("one", "2026-05-06"),
    ]  # fmt: skip
    assert runs[0].versions == other["versions"]
    assert runs[0].cells == set(map(Cell.parse, other["cells"]))
    assert [entry.name for entry in folder.iterdir()] == [file.name]


def test_runs_of_this_checkout_go_to_their_backend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And appear on the page. Another backend's file takes only that backend's runs; the tool names the others."""
    file, theirs = tmp_path / "hip.toml", tmp_path / "mine.toml"
    monkeypatch.setitem(record.FILES, "hip", file)
    report = _report(tmp_path / "run.xml", backend="hip", runs=[_run("an AMD GPU", "2026-01-02", "graph_capture")])
    with pytest.raises(SystemExit):
        record.main([report, "--file", str(theirs)])
    assert "expected runs of one backend not in this checkout, got none" in capsys.readouterr().err
    both = _report(
        tmp_path / "both.xml",
        runs=[_run("their GPU", "2026-01-02", "graph_capture")],
        **{f"{RUNS}hip": json.dumps([_run("an AMD GPU", "2026-01-02", "graph_capture")])},
    )
    another = _report(tmp_path / "b.xml", backend="b", runs=[_run("a GPU", "2026-01-02", "graph_capture")])
    with pytest.raises(SystemExit):
        record.main([both, another, "--file", str(theirs)])
    assert "got b, mine" in capsys.readouterr().err
    assert not theirs.exists()
    record.main([both, "--file", str(theirs)])
    assert [run.device for run in read_verified(theirs)] == ["their GPU"]
    assert not file.exists()
    assert capsys.readouterr().out.splitlines() == [
        f"recorded 1 of mine in {theirs}",
        "skipped 1 of hip: --file takes only runs of a backend not in this checkout",
    ]
    record.main([report])
    assert [run.device for run in read_verified(file)] == ["an AMD GPU"]
    assert "### hip: an AMD GPU\n\nRun on 2026-01-02, on linux, with a b" in page.read_text(encoding="utf-8")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a part": ({UNRECORDED: "only part of the tests was run"}, "only part of the tests"),
    "nothing": ({"runs": []}, "for a whole run on hardware, got"),
    "a simulated device": ({"runs": [], f"{UNRECORDED}.mine": "its devices are simulated"}, "are simulated"),
    "a cell that there is not": ({"runs": [_run("one", "2026-01-02", "grasp_capture")]}, "grasp_capture"),
    "a run without a date": ({"runs": [{"platform": "linux", "device": "one", "cells": []}]}, "date"),
    "a run without a platform": ({"runs": [{"date": "2026-01-02", "device": "one", "cells": []}]}, "platform"),
    "another backend, without its file": ({}, "got one of mine"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    properties, words = REFUSED[case]
    options = {"runs": [_run("one", "2026-01-02", "graph_capture")], **properties}
    (folder := tmp_path / "mine").mkdir()
    arguments = [_report(tmp_path / "run.xml", **options)]
    arguments += [] if case.startswith("another") else ["--file", str(folder / "verified.toml")]
    with pytest.raises(SystemExit) as ended:
        record.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert not list(folder.iterdir())
