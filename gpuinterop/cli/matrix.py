"""``gpuinterop matrix``: the reports of several machines as one table."""

from __future__ import annotations

import argparse
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ..capabilities import DOMAIN, Cell, Operation
from ..errors import InvalidArgumentError
from ..handles import is_here
from ..testing.results import DECLARED, OUTCOMES, Result, Run, counts, exercised, read_run
from .console import cell_name, say
from .pages import Items, Section, Table, html, markdown, text

__all__ = ["add_arguments", "command"]

_SKIPPED: Final = ("gap", "undeclared", "skipped")
_REASON: Final = 100
"""Characters of a skip's reason in the summary."""
_MARKS: Final = {"shown": "✓", "stand-in": "○", "failed": "✗", "usable": "?", "gap": "·"}
_LEGEND: Final = {
    "✓": "shown on the row's device",
    "○": "shown on a stand-in for it",
    "✗": "a test failed",
    "?": "usable, and no test has shown it",
    "·": "a gap",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``gpuinterop matrix``."""
    parser.add_argument(
        "reports", nargs="*", metavar="REPORT", type=Path, help="files of pytest --gpuinterop-json=FILE"
    )
    parser.add_argument(
        "--expect", action="append", default=[], metavar="ROW", help="fail where this row is missing (repeatable)"
    )
    parser.add_argument(
        "--since", metavar="TIME", type=_time, help="fail where a report's run began before (2026-01-31T12:00:00Z)"
    )
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the summary as Markdown too")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write it as HTML, with all details")


def _time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a time such as 2026-01-31T12:00:00Z, got {text!r}") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def command(given: argparse.Namespace) -> int:
    """Merge the reports of several runs, machines and vendors into one summary, and one page of details.

    The summary shows what ran where, what failed, and which tests a row skipped or lacks, and why. --html adds all
    versions, and which capabilities each row has shown: what ran on a simulated driver has shown no device's. A row is
    a device of a report, and has the name of its file.

    Exit status 0: every expected row is there and new enough, every run ended, something passed in each, and nothing
    failed. Otherwise 1; a report that cannot be read is a red row too. 2 for wrong arguments.
    """
    if not given.reports and not given.expect:
        raise InvalidArgumentError(
            "reports", "expected files that `pytest --gpuinterop-json=FILE` has written, got none."
        )
    rows: list[_Row] = []
    bad: dict[str, tuple[str, str]] = {}
    for name, file in _names(given.reports).items():
        try:
            run = read_run(file)
            if given.since and (began := _time(run.facts["started"])) < given.since:
                bad[name] = "OLD", f"expected a report of a run since {given.since}, got one of {began}"
            else:
                rows += _rows(name, run)
        except (InvalidArgumentError, argparse.ArgumentTypeError) as error:
            bad[name] = "UNREADABLE", str(error)
    there = {row.report for row in rows} | bad.keys()
    bad |= {name: ("MISSING", "no report has this name") for name in given.expect if name not in there}
    summary = list(_summary(rows, bad, _REASON))
    say((text(summary), ""))
    whole = html([*_summary(rows, bad), *_details(rows)])
    for file, content in ((given.markdown, markdown(summary)), (given.html, whole)):
        if file is not None:
            try:
                file.write_text(content, encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                raise InvalidArgumentError("page", f"expected a file that can be written, got {error}.") from error
    return int(bool(bad) or any(row.problem for row in rows))


@dataclass
class _Row:
    """One device of a report, or the tests of a report that have none."""

    report: str
    device: str
    run: Run
    results: list[Result]
    name: str = ""
    problem: str = ""
    why: Sequence[str] = ()
    """Why the row is red, where no failed test says so."""
    cells: dict[Cell, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.problem, self.why = self._problem()
        if self.device in self.run.facts["devices"]:
            self.cells = self._cells()

    def _problem(self) -> tuple[str, Sequence[str]]:
        """Why the row is red; empty where it is green. What passed without a device says nothing of one."""
        outcomes = Counter(result.outcome for result in self.results)
        passed = [result for result in self.results if result.outcome == "passed" and result.device == self.device]
        if self.run.end is None:
            last = self.run.results[-1] if self.run.results else None
            where = f" in {last.id}" if last and last.outcome == "unfinished" else ""
            return "ENDED EARLY", [f"the run was ended{where}; its log has the stacks"]
        if outcomes["failed"] or outcomes["unfinished"]:
            return "FAILED", ()
        backends = self.run.facts["backends"]
        if any(one["required"] and one["problem"] for one in backends):
            return "NO BACKEND", [one["problem"] for one in backends if one["problem"]]
        if not passed:
            return "NOTHING PASSED", [f"no test of {self.device or 'the run'} passed"]
        if status := self.run.end["status"]:
            return f"FAILED with status {status}", [f"no test failed, and pytest ended with status {status}"]
        return "", ()

    def _cells(self) -> dict[Cell, str]:
        facts = self.run.facts["devices"][self.device]
        shown = exercised(self.results)
        failed = {cell for result in self.results if result.outcome == "failed" for cell in result.cells}
        found = {}
        for name, said in facts["capabilities"].items():
            cell = Cell.parse(name)
            if said["support"] not in ("supported", "unverified"):
                found[cell] = "gap"
            elif name in failed:
                found[cell] = "failed"
            elif cell in shown:
                found[cell] = "stand-in" if facts["stand_in"] else "shown"
            else:
                found[cell] = "usable"
        return found

    @property
    def double(self) -> str:
        """`` (simulated)``: what stands in for the device; empty for a device."""
        said = self.run.facts["devices"].get(self.device, {}).get("stand_in")
        return f" ({said})" if said else ""

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the device's backend, by their names."""
        device = self.run.facts["devices"].get(self.device, {}).get("backend")
        found = [backend["versions"] for backend in self.run.facts["backends"] if backend["name"] == device]
        return {name: str(version) for name, version in found[0].items()} if found else {}

    @property
    def facts(self) -> dict[str, str]:
        """Versions, places and numbers, by their names."""
        run = self.run.facts
        found = {name: run[name] for name in ("started", "gpuinterop", "python", "platform")}
        if self.device in run["devices"]:
            found["device"] = run["devices"][self.device]["name"] + self.double
        found |= self.versions
        found |= {result.party.partition("@")[0]: result.driver for result in self.results if result.driver}
        found["tests"] = ", ".join(f"{count} {word}" for word, count in counts(self.results).items() if count)
        return found | {name: str(value) for name, value in run["variables"].items() if value}

    @property
    def line(self) -> tuple[str, ...]:
        """What the summary says of the row."""
        numbers = Counter("skipped" if result.outcome in _SKIPPED else result.outcome for result in self.results)
        said = [f"{count} {word}" for word, count in sorted(numbers.items())]
        said += ["a part of the tests"] if self.run.end and self.run.end["partial"] else []
        # Where no version calls itself the driver's, the first one says most.
        names = [name for name in self.versions if "driver" in name] or list(self.versions)[:1]
        driver = ", ".join(f"{name} {self.versions[name]}" for name in names)
        return self.name, self.problem or "passed", ", ".join(said), self.facts.get("device", ""), driver


def _names(files: Sequence[Path]) -> dict[str, Path]:
    """The files by the name of their row: the file's own, or where several have it, with the folders that differ."""
    if not files:
        return {}
    if len({file.resolve() for file in files}) < len(files):
        raise InvalidArgumentError("reports", "expected each file once, got one of them twice.")
    stems = Counter(file.stem for file in files)
    folder = os.path.commonpath([file.absolute().parent for file in files])
    named = (file.absolute().relative_to(folder).with_suffix("").as_posix() for file in files)
    return {file.stem if stems[file.stem] == 1 else name: file for name, file in zip(named, files, strict=True)}


def _rows(name: str, run: Run) -> Iterator[_Row]:
    """One for each device that has tests, and one for the tests that have no device, where only those are there.

    What fails and is of no device makes each row red: a run that lacks what it requires has shown nothing.
    """
    used = dict.fromkeys(result.device for result in run.results)
    devices = [device for device in run.facts["devices"] if device in used]
    others = [result for result in run.results if result.device not in devices]
    if not devices:
        # A backend that does not work has a name, and no device: where its tests were skipped, nothing was shown.
        absent = next((one["name"] for one in run.facts["backends"] if one["name"] in used), "")
        yield _Row(name, absent, run, others, name)
    for device in devices:
        mine = [result for result in run.results if result.device == device]
        label = name if len(devices) == 1 else f"{name} {device}"
        yield _Row(name, device, run, [*mine, *others], label)


# -- the page ----------------------------------------------------------------------------------------------------------


def _summary(rows: Sequence[_Row], bad: Mapping[str, tuple[str, str]], limit: int = 1000) -> Iterator[Section]:
    """The part that is printed, with reasons of `limit` characters. `bad` names what is unread, with a word and why."""
    ran = [*((name, word, "", "", "") for name, (word, _) in bad.items()), *(row.line for row in rows)]
    reds = [number for number, one in enumerate(ran) if one[1] != "passed"]
    doubles = sum(bool(row.double) for row in rows)
    heading = f"{len(ran)} row{'s' * (len(ran) > 1)}" + f", {doubles} simulated" * bool(doubles)
    table = Table(("row", "result", "tests", "device", "driver"), ran, reds)
    yield f"{heading}: {len(reds) or 'none'} red", [table]
    if failed := [*(f"{name}: {why}" for name, (_, why) in bad.items()), *_failures(rows)]:
        yield "What failed", [Items(failed)]
    if skipped := list(_skipped(rows, limit)):
        yield "What was skipped, or is not in every row", [Items(skipped)]


def _details(rows: Sequence[_Row]) -> Iterator[Section]:
    """The rest of the page."""
    yield "Versions and counts", [Table(("of", "is", "rows"), list(_versions(rows)))]
    if tables := [row for row in rows if row.cells]:
        legend = "; ".join(f"{sign} {meaning}" for sign, meaning in _LEGEND.items())
        columns = ("cell", *(row.name + row.double for row in tables))
        yield "Capabilities", [Table(columns, list(_cell_rows(tables))), legend]
        yield "Cells that no device has shown", [Items(_never_shown(tables))]


def _versions(rows: Sequence[_Row]) -> Iterator[tuple[str, str, str]]:
    """Each version once, with the rows that have it."""
    for name in dict.fromkeys(name for row in rows for name in row.facts):
        found: dict[str, list[str]] = {}
        for row in rows:
            if name in row.facts:
                found.setdefault(row.facts[name], []).append(row.name)
        for value, names in found.items():
            yield name, value, "all" if len(names) == len(rows) else ", ".join(names)


def _failures(rows: Sequence[_Row]) -> list[str]:
    found = []
    for row in rows:
        found += [f"{row.name}: {why}" for why in row.why]
        bad: dict[str, list[str]] = {}
        for result in row.results:
            if result.outcome == "failed" or (result.outcome == "unfinished" and row.run.end is not None):
                bad.setdefault(result.reason or "it did not end", []).append(result.id)
        for reason, tests in bad.items():
            more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
            found.append(f"{row.name}: {tests[0]}{more}: {reason}")
    return found


def _cell_rows(rows: Sequence[_Row]) -> Iterator[tuple[str, ...]]:
    """Those cells that some row can use; what is a gap in all is told below."""
    for cell in DOMAIN:
        states = [row.cells.get(cell, "gap") for row in rows]
        if set(states) != {"gap"}:
            yield cell_name(cell), *(_MARKS[state] for state in states)


def _never_shown(rows: Sequence[_Row]) -> list[str]:
    """First what some row says it can do; then, by operation, what is a gap in every row and a platform's own."""
    found = []
    gaps: dict[Operation, list[str]] = {}
    for cell in DOMAIN:
        states = {row.name: row.cells.get(cell, "gap") for row in rows}
        if "shown" in states.values():
            continue
        if claims := [f"{state} in {name}" for name, state in states.items() if state != "gap"]:
            found.append(f"{cell_name(cell)}: {', '.join(claims)}")
        elif (kind := cell.handle_type) is None or any(is_here(kind, row.run.facts["platform"]) for row in rows):
            gaps.setdefault(cell.operation, []).append(kind.__name__ if kind else "")
    for operation, kinds in gaps.items():
        found.append(f"{operation.value}, a gap in every row" + (f": {', '.join(kinds)}" if all(kinds) else ""))
    return found


def _skipped(rows: Sequence[_Row], limit: int) -> Iterator[str]:
    """Tests that a row skipped with whatever party, expected to fail, or does not have: by rows and reason."""
    sides: dict[str, dict[str, Result]] = {row.name: {} for row in rows}
    for row in rows:
        for result in sorted(row.results, key=lambda result: OUTCOMES.index(result.outcome)):
            # The kit's own lie in site-packages, which is elsewhere on each machine.
            test = re.sub(r"^\S*/(?=gpuinterop/testing/\w+\.py)", "", result.test)
            sides[row.name].setdefault(test, result)  # a failure counts most, then what ran, and a skip least
    every = dict.fromkeys(test for side in sides.values() for test in side)
    modules = {test.partition("::")[0] for test in every if "::" in test}
    found: dict[tuple[str, str], list[str]] = {}
    # A module that skipped itself in a row may have tests in another. The kit's own test can only fail. A test that was
    # under way when a run was killed has no name.
    for test in every.keys() - modules - {"gpuinterop::environment", ""}:
        whys: dict[tuple[str, str], list[str]] = {}
        for name, side in sides.items():
            result = side.get(test) or side.get(test.partition("::")[0]) or Result(test, outcome="not there")
            if result.outcome not in ("passed", "failed", "unfinished"):
                word = "skipped" if result.outcome in _SKIPPED else result.outcome
                whys.setdefault((word, result.reason.removeprefix(DECLARED)), []).append(name)
        if sum(map(len, whys.values())) == len(rows):
            words, reasons = (" / ".join(filter(None, dict.fromkeys(one))) for one in zip(*whys, strict=True))
            whys = {(words, reasons): ["every row"]}
        for (word, reason), names in whys.items():
            found.setdefault((f"{word} in {', '.join(names)}", reason), []).append(test)
    for (where, reason), tests in sorted(found.items()):
        short = textwrap.shorten(reason, limit, placeholder="...")
        yield f"{where}: {_together(sorted(tests))}" + f": {short}" * bool(short)


def _together(tests: Sequence[str]) -> str:
    """The one test, or how many of which class."""
    if len(tests) == 1:
        return tests[0]
    found = Counter(test.partition("[")[0].rpartition("::")[0] or test for test in tests)
    return ", ".join(f"{count} of {where}" for where, count in sorted(found.items()))
