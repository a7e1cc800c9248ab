"""``gpuinterop matrix``: the reports of several machines as one table."""

from __future__ import annotations

import argparse
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ..errors import InvalidArgumentError
from ..testing.results import DECLARED, DEVICE, OUTCOMES, PART, STAND_IN, STATUS, UNRECORDED, Result, Run, read_run
from .console import say
from .pages import Items, Section, Table, markdown, text

__all__ = ["add_arguments", "command"]

_SKIPPED: Final = ("gap", "undeclared", "skipped")
_REASON: Final = 100
"""Most characters of a skip's reason."""
_NOTHING: Final = "NOTHING PASSED"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpuinterop matrix``."""
    parser.add_argument(
        "reports", nargs="*", metavar="REPORT", type=Path, help="JUnit XML: files that pytest --junitxml=FILE wrote"
    )
    parser.add_argument(
        "--expect", action="append", default=[], metavar="ROW", help="fail if this row is missing (repeatable)"
    )
    since = "fail if a report's run began before this time, in ISO 8601 (by default UTC): 2026-01-31T12:00:00Z"
    parser.add_argument("--since", metavar="TIME", type=_time, help=since)
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="also write the table as Markdown")


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a time such as 2026-01-31T12:00:00Z, got {text!r}.") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def command(given: argparse.Namespace) -> int:
    """Merge the JUnit XML of several runs, machines and vendors into one table.

    A row is a device of a report, named after the report's file. The table shows what ran where, what failed, and
    which tests a row skipped or does not have, and why.

    A run that was killed writes no report: name its row with --expect.

    Exit status 0: every expected row is present and new enough, something passed in each, and nothing failed.
    Otherwise 1, also if a report cannot be read, which makes its row red. 2 for wrong arguments.
    """
    if not given.reports and not given.expect:
        raise InvalidArgumentError("reports", "expected files that `pytest --junitxml=FILE` wrote, got none.")
    rows: list[_Row] = []
    bad: dict[str, tuple[str, str]] = {}
    for name, file in _names(given.reports).items():
        try:
            run = read_run(file)
        except InvalidArgumentError as error:
            bad[name] = "UNREADABLE", str(error)
            continue
        if given.since and run.started < given.since:
            bad[name] = "OLD", f"expected a report of a run since {given.since}, got one of {run.started}"
        else:
            rows += _rows(name, run)
    there = {row.report for row in rows} | bad.keys()
    bad |= {name: ("MISSING", "no report has this name") for name in given.expect if name not in there}
    page = list(_page(rows, bad))
    say((text(page), ""))
    if given.markdown is not None:
        try:
            given.markdown.write_text(markdown(page), encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise InvalidArgumentError("--markdown", f"expected a file that can be written, got {error}.") from error
    return int(bool(bad) or any(row.problem for row in rows))


@dataclass
class _Row:
    """One device of a report, or the tests of a report without a device."""

    report: str
    device: str
    run: Run
    results: list[Result]
    name: str

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.outcome == "failed"]

    @property
    def problem(self) -> str:
        """Why the row is red; empty if it is green. Tests that passed without a device prove nothing about one."""
        status = self.run.properties.get(STATUS, "0")
        if self.failed:
            return "FAILED"
        if not any(result.outcome == "passed" and result.device == self.device for result in self.results):
            return _NOTHING
        return f"FAILED with status {status}" * (status != "0")

    @property
    def double(self) -> str:
        """``simulated``: what replaces the device's driver; empty for hardware."""
        return self.run.properties.get(f"{STAND_IN}.{self.device}", "")

    @property
    def line(self) -> tuple[str, ...]:
        """The row in the table."""
        numbers = Counter("skipped" if result.outcome in _SKIPPED else result.outcome for result in self.results)
        words = [f"{count} {outcome}" for outcome, count in sorted(numbers.items())]
        words += [PART] * (self.run.properties.get(UNRECORDED) == PART)
        device = self.run.properties.get(f"{DEVICE}.{self.device}", self.device)
        return self.name, self.problem or "passed", ", ".join(words), device + f" ({self.double})" * bool(self.double)


def _names(files: Sequence[Path]) -> dict[str, Path]:
    """The files by row name: the file's name, with the folders that differ if several files have that name."""
    folders = [file.parent.resolve().parts for file in files]
    common = len(os.path.commonprefix(folders))  # noqa: RUF071 - of parts, not of strings
    stems = Counter(file.stem for file in files)
    pairs = [("/".join((*folder[common:], file.stem)), file) for folder, file in zip(folders, files, strict=True)]
    names = {name if stems[file.stem] > 1 else file.stem: file for name, file in pairs}
    if len(names) < len(files):
        raise InvalidArgumentError("reports", f"expected files with different names, got {', '.join(map(str, files))}.")
    return names


def _rows(name: str, run: Run) -> Iterator[_Row]:
    """Return a row for each device that has tests; without one, a row for the tests that have no device.

    A failure outside of any device makes each row red: a run that lacks what it requires has proved nothing.
    """
    devices = list(dict.fromkeys(result.device for result in run.results if result.device)) or [""]
    for device in devices:
        results = [result for result in run.results if result.device in (device, "")]
        yield _Row(name, device, run, results, name if len(devices) == 1 else f"{name} {device}")


# -- the page ----------------------------------------------------------------------------------------------------------


def _page(rows: Sequence[_Row], bad: Mapping[str, tuple[str, str]]) -> Iterator[Section]:
    """The table, what failed, and what was skipped. `bad` has a word and a reason for each report without a row."""
    ran = [*((name, word, "", "") for name, (word, _) in bad.items()), *(row.line for row in rows)]
    red = sum(line[1] != "passed" for line in ran)
    doubles = sum(bool(row.double) for row in rows)
    heading = f"{len(ran)} row{'s' * (len(ran) > 1)}" + f", {doubles} simulated" * bool(doubles)
    yield f"{heading}: {red or 'none'} red", Table(("row", "result", "tests", "device"), ran)
    if failed := [*(f"{name}: {why}" for name, (_, why) in bad.items()), *_failures(rows)]:
        yield "What failed", Items(failed)
    if skipped := list(_skipped(rows)):
        yield "What was skipped, or is not in every row", Items(skipped)


def _failures(rows: Sequence[_Row]) -> Iterator[str]:
    for row in rows:
        if row.problem and not row.failed:
            what = "passed" if row.problem == _NOTHING else "failed"
            status = row.run.properties.get(STATUS, "0")
            yield f"{row.name}: no test of {row.device or 'the run'} {what}; pytest's exit status is {status}"
        reasons: dict[str, list[str]] = {}
        for result in row.failed:
            reasons.setdefault(result.reason, []).append(result.id)
        for reason, tests in reasons.items():
            more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
            yield f"{row.name}: {tests[0]}{more}: {reason}"


def _skipped(rows: Sequence[_Row]) -> Iterator[str]:
    """Tests that a row skipped on every exporter, expected to fail, or does not have: by rows and reason."""
    sides: dict[str, dict[str, Result]] = {row.name: {} for row in rows}
    for row in rows:
        for result in sorted(row.results, key=lambda result: OUTCOMES.index(result.outcome)):
            # The kit's tests are in site-packages, whose path differs between machines.
            test = re.sub(r"^\S*\.(?=gpuinterop\.testing\.)", "", result.test)
            sides[row.name].setdefault(test, result)  # failures come first, then what ran, then skips
    every = dict.fromkeys(test for side in sides.values() for test in side)
    modules = {test: _module(test, every) for test in every}
    groups: dict[tuple[str, str], list[str]] = {}
    # A module that skipped itself in one row may have tests in another. The kit's own test can only fail.
    for test in every.keys() - set(modules.values()) - {"gpuinterop::environment"}:
        whys: dict[tuple[str, str], list[str]] = {}
        for name, side in sides.items():
            result = side.get(test) or side.get(modules[test]) or Result(test, outcome="not there")
            if result.outcome not in ("passed", "failed"):
                word = "skipped" if result.outcome in _SKIPPED else result.outcome
                whys.setdefault((word, result.reason.removeprefix(DECLARED)), []).append(name)
        if sum(map(len, whys.values())) == len(rows):
            words, reasons = (" / ".join(filter(None, dict.fromkeys(texts))) for texts in zip(*whys, strict=True))
            whys = {(words, reasons): ["every row"]}
        for (word, reason), names in whys.items():
            groups.setdefault((f"{word} in {', '.join(names)}", reason), []).append(test)
    for (where, reason), tests in sorted(groups.items()):
        short = textwrap.shorten(reason, _REASON, placeholder="...")
        yield f"{where}: {_together(sorted(tests))}" + f": {short}" * bool(short)


def _module(test: str, every: Mapping[str, object]) -> str:
    """The module of a test, if some row has only that because it could not be collected; otherwise empty."""
    names = test.partition("::")[0].split(".") if "::" in test else []
    return next((name for end in range(len(names), 0, -1) if (name := ".".join(names[:end])) in every), "")


def _together(tests: Sequence[str]) -> str:
    """The one test, or how many tests of which class."""
    if len(tests) == 1:
        return tests[0]
    classes = Counter(test.partition("[")[0].rpartition("::")[0] or test for test in tests)
    return ", ".join(f"{count} of {name}" for name, count in sorted(classes.items()))
