"""Results of a run's tests: collected from pytest's reports, and read from the JUnit XML that pytest writes."""

from __future__ import annotations

import datetime
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import __version__
from ..capabilities import MULTICAST, Cell
from ..errors import InvalidArgumentError

if TYPE_CHECKING:
    import pytest

__all__ = [
    "CELLS", "DECLARED", "DEVICE", "DRIVER", "OUTCOMES", "PART", "PARTY", "RUNS", "SKIP", "STAND_IN", "STATUS",
    "UNRECORDED", "Result", "Results", "Run", "counts", "exercised", "make_run", "of_suites", "read_run", "reason_of",
]  # fmt: skip

DEVICE, PARTY, DRIVER, CELLS, SKIP = (
    f"gpuinterop.{name}" for name in ("device", "exporter", "driver", "cells", "skip")
)
"""Properties of a test, in its reports and in the XML. `DEVICE`, followed by ``.cuda:0``, is a property of a run: that
device's name and versions."""

STAND_IN: Final = "gpuinterop.stand-in"
"""Property of a run, followed by ``.cuda:0``: what replaces that device's driver."""

STATUS: Final = "gpuinterop.status"
"""Property of a run: pytest's exit status."""

RUNS: Final = "gpuinterop.runs."
"""Property of a run, followed by ``cuda``: the entries for that backend's ``verified.toml``, as JSON."""

UNRECORDED: Final = "gpuinterop.unrecorded"
"""Property of a run that may not be recorded, or, followed by ``.cuda``, of a backend in it: the reason."""

OUTCOMES: Final = ("failed", "undeclared", "passed", "xfailed", "skipped", "gap")
"""Outcomes of a test. Failures come first, then what ran, then skips: see `Result`."""

PART: Final = "only part of the tests was run"
"""A reason of `UNRECORDED`."""

DECLARED: Final = "declared: "
"""The start of a declared skip's reason."""


@dataclass(slots=True)
class Result:
    """Result of one test.

    `id` is pytest's, or in the XML the test's class and name; `test` is the ID without device and exporter, to compare
    machines. `device` (``cuda:0``), `party` (the exporter, ``vulkan:nvidia@process``) and `driver` (that exporter's,
    with version) are empty if the test uses none. `cells` are the capabilities that it exercises. `outcome` is
    ``passed``, ``failed``, ``gap`` (skipped as declared), ``undeclared`` (skipped by the kit for another reason),
    ``skipped`` (by itself) or ``xfailed``. `reason` is why it failed or was skipped, in one line.
    """

    id: str
    test: str = ""
    device: str = ""
    party: str = ""
    driver: str = ""
    cells: list[str] = field(default_factory=list)
    outcome: str = ""
    reason: str = ""

    def set_properties(self, properties: Iterable[Any]) -> str:
        """Take the kit's properties, and return how it classified a skip; a test can have others, of any kind."""
        ours: dict[str, str] = {}
        for name, value in properties:
            if name in (DEVICE, PARTY, DRIVER, CELLS, SKIP) and isinstance(value, str):
                ours.setdefault(name, value)
        self.device, self.party, self.driver = (ours.get(name, "") for name in (DEVICE, PARTY, DRIVER))
        self.cells = ours.get(CELLS, "").split()
        return ours.get(SKIP, "skipped")


def reason_of(report: Any) -> str:
    """Why a test was skipped, in one line."""
    longrepr = report.longrepr
    text = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).strip()
    return text.partition("\n")[0].removeprefix("Skipped: ")


class Results:
    """Results of a run so far, by the test's ID."""

    def __init__(self) -> None:
        self.by_id: dict[str, Result] = {}

    def add(self, report: pytest.TestReport) -> None:
        """Add one of a test's reports: setup, call or teardown. A failed one counts, whatever follows."""
        result = self.by_id.setdefault(report.nodeid, Result(report.nodeid))
        skip = result.set_properties(report.user_properties)
        if report.failed:
            result.outcome = "failed"
        elif report.skipped and result.outcome != "failed":
            result.outcome = "xfailed" if hasattr(report, "wasxfail") else skip
        elif report.when == "call" and result.outcome != "failed":
            result.outcome = "passed"

    def of(self, *devices: str) -> list[Result]:
        """Results of these devices."""
        return [result for result in self.by_id.values() if result.device in devices]


def of_suites(cells: Iterable[Cell]) -> set[Cell]:
    """Cells that a run of the suites can prove: not multicast, which it runs only on test doubles."""
    return {cell for cell in cells if cell.operation not in MULTICAST}


def exercised(results: Iterable[Result]) -> set[Cell]:
    """The cells that the suites can prove, and whose tests have all passed."""
    shown: set[str] = set()
    failed: set[str] = set()
    for result in results:
        if result.outcome == "passed":
            shown.update(result.cells)
        elif result.outcome in ("failed", ""):
            failed.update(result.cells)
    return of_suites(map(Cell.parse, shown - failed))


def counts(results: Iterable[Result]) -> dict[str, int]:
    """Numbers of each outcome, by the words of the summary line."""
    number = Counter(result.outcome for result in results)
    words = {"passed": "passed", "failed": "failed", "gap": "skipped as declared", "undeclared": "unexpected skips"}
    others = {"skipped": "skipped by themselves", "xfailed": "failed as expected"}
    words |= {outcome: word for outcome, word in others.items() if number[outcome]}
    return {word: number[outcome] for outcome, word in words.items()}


def make_run(
    device: str, versions: Mapping[str, str], cells: Iterable[Cell], tests: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Make an entry of ``verified.toml``: a run of today, on this platform."""
    entry = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "platform": sys.platform,
        "device": device,
        "cells": sorted(map(str, cells)),
        "versions": dict(sorted({"gpuinterop": __version__, **versions}.items())),
    }
    return entry | ({"tests": dict(tests)} if tests else {})


# -- JUnit XML -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """A run that was read from a file: when it began, its properties by name, and the results of its tests."""

    started: datetime.datetime
    properties: dict[str, str]
    results: list[Result]


def read_run(file: Path) -> Run:
    """Read a file of ``--junitxml``. Raises `InvalidArgumentError` if that is not possible."""
    try:
        root = ET.parse(file).getroot()
        suites = list(root.iter("testsuite"))
        if not suites:
            raise ValueError(f"it has no test suite, but <{root.tag}>")
        started = datetime.datetime.fromisoformat(suites[0].get("timestamp", ""))
        if started.tzinfo is None:
            raise ValueError(f"its time {started} has no offset from UTC; run the tests with pytest 8.3 or newer")
        results: dict[str, Result] = {}
        for result in (_read_case(case) for suite in suites for case in suite.iter("testcase")):
            # A test that failed, and then failed in its teardown, has two entries.
            first = results.setdefault(result.id, result)
            if OUTCOMES.index(result.outcome) < OUTCOMES.index(first.outcome):
                results[result.id] = result
        properties = dict(pair for suite in suites for pair in _properties(suite))
        return Run(started.astimezone(datetime.UTC), properties, list(results.values()))
    except (OSError, ET.ParseError, LookupError, OverflowError, ValueError) as error:
        raise InvalidArgumentError(
            "report", f"expected what `pytest --junitxml=FILE` writes, got {file}: {error}"
        ) from error


def _properties(element: ET.Element) -> list[tuple[str, str]]:
    return [(item.get("name", ""), item.get("value", "")) for item in element.findall("properties/property")]


def _read_case(case: ET.Element) -> Result:
    module, name = case.get("classname", ""), case.get("name", "")
    result = Result(f"{module}::{name}" if module else name)
    skip = result.set_properties(_properties(case))
    result.test = _without_parameters(result)
    bad = next((child for tag in ("failure", "error", "skipped") for child in case.findall(tag)), None)
    if bad is None:
        result.outcome = "passed"
        return result
    message, text = bad.get("message", ""), (bad.text or "").strip()
    if message.startswith("collection "):  # then only the text names the reason
        message = text.rpartition("\n")[2]
    result.reason = message.strip().partition("\n")[0]
    result.outcome = "failed"
    if bad.tag == "skipped":
        result.outcome = "xfailed" if bad.get("type") == "pytest.xfail" else skip
    return result


def _without_parameters(result: Result) -> str:
    """The ID of a test without the parameters of device and exporter."""
    names = (f"{result.device}-{result.party}", result.device, result.device.partition(":")[0])
    any_name = "|".join(re.escape(name) for name in names if result.device)
    if not any_name:
        return result.id
    return re.sub(rf"\[(?:{any_name})\]|(?<=\[)(?:{any_name})-|-(?:{any_name})(?=\]$)", "", result.id, count=1)
