"""Results of a run's tests: collected from their reports, written as JSON, and read by `gpuinterop matrix`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from ..capabilities import Cell
from ..errors import InvalidArgumentError
from .report import of_suites

if TYPE_CHECKING:
    import pytest

__all__ = [
    "CELLS", "DECLARED", "DEVICE", "DRIVER", "OUTCOMES", "PARTY", "SKIP", "Document", "Result", "Results", "Run",
    "read_run", "reason_of",
]  # fmt: skip

DEVICE, PARTY, DRIVER, CELLS, SKIP = (
    f"gpuinterop.{name}" for name in ("device", "exporter", "driver", "cells", "skip")
)
"""Properties of a test's report, and of JUnit's XML: a worker's report has the test's device, exporter and cells."""

OUTCOMES: Final = ("unfinished", "failed", "undeclared", "passed", "xfailed", "skipped", "gap")
"""Outcomes of a test. Failures come first, then what ran, then skips: see `Result`."""

DECLARED: Final = "declared: "
"""The start of a declared skip's reason."""

FORMAT: Final = 1
_UNFINISHED: Final = ', "outcome": "unfinished"}'


@dataclass(slots=True)
class Result:
    """Result of one test.

    `id` is pytest's; `test` is the ID without device and exporter, to compare machines. `device` (``cuda:0``), `party`
    (the exporter, ``vulkan:nvidia@process``) and `driver` (that exporter's, with version) are empty if the test uses
    none. `cells` are the capabilities that it exercises. `outcome` is ``passed``, ``failed``, ``gap`` (skipped as
    declared), ``undeclared`` (skipped by the kit for another reason), ``skipped`` (by itself), ``xfailed`` or
    ``unfinished``. `reason` is why it failed or was skipped, in one line.
    """

    id: str
    test: str = ""
    device: str = ""
    party: str = ""
    driver: str = ""
    cells: list[str] = field(default_factory=list)
    outcome: str = "unfinished"
    reason: str = ""
    seconds: float = 0.0

    def hear(self, report: pytest.TestReport) -> None:
        """Add one of the test's reports: setup, call or teardown. A failed one counts, whatever follows."""
        said = _ours(report)
        self.device, self.party, self.driver = (said.get(name, "") for name in (DEVICE, PARTY, DRIVER))
        self.cells = said.get(CELLS, "").split()
        self.test = _without(self.id, self.device, self.party)
        self.seconds = round(self.seconds + report.duration, 3)
        if self.outcome == "failed":
            return
        if report.failed:
            self.outcome, self.reason = "failed", reason_of(report)
        elif report.skipped:
            self.outcome = "xfailed" if hasattr(report, "wasxfail") else said.get(SKIP, "skipped")
            self.reason = getattr(report, "wasxfail", "") or reason_of(report)
        elif report.when == "call":
            self.outcome = "passed"


def _ours(report: pytest.TestReport) -> dict[str, str]:
    """The properties of a report that the kit has set; a test can have others, of any kind."""
    found: dict[str, str] = {}
    entries: list[Any] = list(report.user_properties)
    for entry in entries:
        name, value = entry if isinstance(entry, tuple | list) and len(entry) == 2 else ("", "")
        if name in (DEVICE, PARTY, DRIVER, CELLS, SKIP) and isinstance(value, str):
            found.setdefault(name, value)
    return found


def _without(name: str, device: str, party: str) -> str:
    """The name of a test without the parameters of device and exporter."""
    base, bracket, inside = name.partition("[")
    for one in (f"{device}-{party}", device, device.partition(":")[0]) if device else ():
        text = inside.removesuffix("]")
        if text == one:
            return base
        if text.startswith(f"{one}-"):
            return f"{base}[{text.removeprefix(f'{one}-')}]"
        if text.endswith(f"-{one}"):
            return f"{base}[{text.removesuffix(f'-{one}')}]"
    return base + bracket + inside


def reason_of(report: Any) -> str:
    """Why a test failed or was skipped, in one line."""
    found = report.longrepr
    crash = getattr(found, "reprcrash", None)
    text = found[2] if isinstance(found, tuple) else crash.message if crash else found
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    # A doctest's text ends with the exception; all others begin with it.
    return lines[0 if isinstance(text, str) else -1].removeprefix("Skipped: ")[:500] if lines else ""


class Results:
    """Results of a run so far, by the test's ID."""

    def __init__(self) -> None:
        self.by_id: dict[str, Result] = {}

    def hear(self, report: pytest.TestReport) -> Result:
        result = self.by_id.setdefault(report.nodeid, Result(report.nodeid))
        result.hear(report)
        return result

    def hear_collection(self, report: pytest.CollectReport) -> None:
        """Add a module that could not be collected, or skipped itself."""
        outcome, reason = "skipped", reason_of(report)
        if report.failed:
            outcome, reason = "failed", (str(report.longrepr).strip().splitlines() or [""])[-1]
        self.by_id[report.nodeid] = Result(report.nodeid, report.nodeid, outcome=outcome, reason=reason)

    def of(self, *devices: str) -> list[Result]:
        """Results of these devices."""
        return [result for result in self.by_id.values() if result.device in devices]


def exercised(results: Iterable[Result]) -> set[Cell]:
    """The cells that the suites can prove, and whose tests have all passed."""
    shown: set[str] = set()
    failed: set[str] = set()
    for result in results:
        if result.outcome in ("failed", "unfinished"):
            failed.update(result.cells)
        elif result.outcome == "passed":
            shown.update(result.cells)
    return of_suites(map(Cell.parse, shown - failed))


def counts(results: Iterable[Result]) -> dict[str, int]:
    """Numbers of each outcome, by the words of the summary line."""
    found = Counter(result.outcome for result in results)
    words = {"passed": "passed", "failed": "failed", "gap": "skipped as declared", "undeclared": "unexpected skips"}
    others = {"skipped": "skipped by themselves", "xfailed": "failed as expected", "unfinished": "unfinished"}
    return {word: found[one] for one, word in words.items()} | {
        word: found[one] for one, word in others.items() if found[one]
    }


class Document:
    """The JSON of a run, written line by line, so that a killed run leaves its results so far.

    `header` has the facts known before the first test.
    """

    def __init__(self, file: Path, header: Mapping[str, Any]) -> None:
        self._file: TextIO = file.open("w", encoding="utf-8")
        self._separator = ""
        self._open = ""
        self._written: set[str] = set()
        self.problem = ""
        """Why writing stopped, such as a full disk; the tests continue."""
        self._write(json.dumps({"format": FORMAT, **header})[:-1] + ', "tests": [')

    def begin(self, name: str) -> None:
        """Write which test runs now. If several run at a time, only `add` is called."""
        if name in self._written:  # a test that runs twice counts once: see `Result.hear`
            return
        self._open = json.dumps({"id": name})[:-1]
        self._write(f"{self._separator}\n{self._open}")
        self._separator = ","

    def add(self, result: Result) -> None:
        """Write a test's result, once."""
        if result.id in self._written:
            return
        self._written.add(result.id)
        text = json.dumps(asdict(result))
        if self._open and text.startswith(self._open):
            text = text.removeprefix(self._open)
        else:
            text = f"{self._separator}\n{text}"
        self._open = ""
        self._separator = ","
        self._write(text)

    def end(self, **facts: Any) -> None:
        """Write the end; without it, a run counts as killed."""
        left = _UNFINISHED if self._open else ""
        self._write(f'{left}\n], "end": {json.dumps(facts)}}}\n')
        with suppress(OSError):
            self._file.close()

    def _write(self, text: str) -> None:
        if self.problem:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self.problem = str(error)


@dataclass(frozen=True, slots=True)
class Run:
    """The report of a run.

    `facts` are ``started``, ``gpuinterop``, ``python``, ``platform``, ``variables``, ``backends``, ``devices`` and
    ``drivers``. `end` has pytest's ``status``, and whether only ``partial`` tests were run; it is None for a run that
    was killed.
    """

    facts: dict[str, Any]
    results: list[Result]
    end: dict[str, Any] | None


def read_run(file: Path) -> Run:
    """Read a file of ``--gpuinterop-json``. Raises `InvalidArgumentError` if that is not possible."""
    if file.is_dir():
        raise InvalidArgumentError("report", f"expected a file, got the folder {file}; give {file / '*.json'}.")
    try:
        content = _parse(file.read_text(encoding="utf-8"))
        _check(content, _FACTS)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, and this gpuinterop reads {FORMAT}")
        results = [Result(**entry) for entry in content.pop("tests")]
        for result in results:
            _check(asdict(result), _RESULT)
            if result.outcome not in OUTCOMES:
                raise ValueError(f"expected an outcome of a test, got {result.outcome!r}")
            result.cells = [str(Cell.parse(cell)) for cell in result.cells]
        for device in content["devices"].values():
            _check(device, _DEVICE)
            for cell, said in device["capabilities"].items():
                Cell.parse(cell)
                _check(said, {"support": str, "reason": str})
        for backend in content["backends"]:
            _check(backend, _BACKEND)
        end = content.pop("end", None)
        if end is not None:
            _check(end, {"status": int, "partial": bool})
        return Run(content, results, end)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(
            "report", f"expected what `pytest --gpuinterop-json=FILE` writes, got {file}: {error}."
        ) from error


def _parse(text: str) -> dict[str, Any]:
    """Parse the JSON; the last line of a killed run may be an unfinished test, or half a line."""
    cut = text.rpartition("\n")[0].rstrip(",") + "]}"
    for one in (text, text + "]}", text + _UNFINISHED + "]}", cut):
        with suppress(ValueError):
            content = json.loads(one)
            if isinstance(content, dict):
                return content
    raise ValueError("it has no JSON object" if text.strip() else "the run did not begin")


_FACTS: Final = {
    "format": int, "started": str, "gpuinterop": str, "python": str, "platform": str, "variables": dict,
    "backends": list, "devices": dict, "drivers": list, "tests": list,
}  # fmt: skip
_DEVICE: Final = {"backend": str, "name": str, "stand_in": str, "capabilities": dict}
_BACKEND: Final = {"name": str, "required": bool, "problem": str, "versions": dict}
_RESULT: Final = {
    **dict.fromkeys(("id", "test", "device", "party", "driver", "outcome", "reason"), str), "cells": list,
}  # fmt: skip


def _check(content: Any, kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        if not isinstance(content, dict) or not isinstance(content.get(name), kind):
            raise ValueError(f"{name!r} lacks, or is not of the type {kind.__name__}")
