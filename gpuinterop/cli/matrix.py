"""``gpuinterop matrix``: the reports of several machines as one table."""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    parser.add_argument("--compare", nargs=2, metavar="ROW", help="also show where these two rows differ")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the page as Markdown too")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the page as HTML too")


def _time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a time such as 2026-01-31T12:00:00Z, got {text!r}") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def command(given: argparse.Namespace) -> int:
    """Merge the reports of several runs, machines and vendors into one page.

    It shows what ran where and with which versions, what failed, which capabilities no row has shown, which tests were
    skipped in every row, and where two rows differ. A row is a device of a report, and has the name of its file.

    Exit status 0: every expected row is there and new enough, every run ended, something passed in each, and nothing
    failed. Otherwise
    1; a report that cannot be read is a red row too. 2 for wrong arguments.
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
    page = list(_page(rows, bad, _pair(rows, given.compare)))
    say((text(page), ""))
    for file, write in ((given.markdown, markdown), (given.html, html)):
        if file is not None:
            try:
                file.write_text(write(page), encoding="utf-8", errors="backslashreplace")
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
    def facts(self) -> dict[str, str]:
        """Versions and places, by their names."""
        run, found = self.run.facts, {}
        found["gpuinterop"], found["python"], found["platform"] = run["gpuinterop"], run["python"], run["platform"]
        if device := run["devices"].get(self.device):
            found["device"] = device["name"] + (f" ({device['stand_in']})" if device["stand_in"] else "")
            for backend in run["backends"]:
                if backend["name"] == device["backend"]:
                    found |= {name: str(version) for name, version in backend["versions"].items()}
        found |= {result.party.partition("@")[0]: result.driver for result in self.results if result.driver}
        return found | {name: str(value) for name, value in run["variables"].items() if value}

    @property
    def numbers(self) -> str:
        """The counts of the tests' outcomes."""
        part = ["a part of the tests"] if self.run.end and self.run.end["partial"] else []
        return ", ".join([f"{count} {word}" for word, count in counts(self.results).items() if count] + part)


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


def _pair(rows: Sequence[_Row], wanted: Sequence[str] | None) -> tuple[_Row, _Row] | None:
    if wanted is None:
        return (rows[0], rows[1]) if len(rows) == 2 else None
    known = {row.name: row for row in rows}
    if unknown := [name for name in wanted if name not in known]:
        raise InvalidArgumentError("--compare", f"expected two of the rows {', '.join(known)}, got {unknown[0]}.")
    return known[wanted[0]], known[wanted[1]]


# -- the page ----------------------------------------------------------------------------------------------------------


def _page(
    rows: Sequence[_Row], bad: Mapping[str, tuple[str, str]], pair: tuple[_Row, _Row] | None
) -> Iterator[Section]:
    """Make the page. `bad` has what could not be read: by name, a word and the reason."""
    ran = [(name, word, "", "", "", "") for name, (word, _) in bad.items()]
    for row in rows:
        when = row.run.facts["started"].replace("T", " ").removesuffix("+00:00")
        ran.append((row.name, row.problem or "passed", when, row.facts.get("device", ""), row.numbers, _shown(row)))
    reds = [number for number, one in enumerate(ran) if one[1] != "passed"]
    yield (
        f"{len(ran)} row{'s' if len(ran) > 1 else ''}: {len(reds) or 'none'} red",
        [Table(("row", "result", "UTC", "device", "tests", "cells shown"), ran, reds)],
    )
    yield "What failed", [Items([*(f"{name}: {why}" for name, (_, why) in bad.items()), *_failures(rows)])]
    yield "Versions", [Table(("of", "version", "rows"), list(_versions(rows)))]
    tables = [row for row in rows if row.cells]
    if tables:
        shown = list(_cell_rows(tables))
        signs = {sign for _, *signs in shown for sign in signs}
        legend = "; ".join(f"{sign} {meaning}" for sign, meaning in _LEGEND.items() if sign in signs)
        yield "Capabilities", [Table(("cell", *(row.name for row in tables)), shown), legend]
        yield "Cells that no row has shown", [Items(_never_shown(tables))]
    else:
        yield "Capabilities", ["no row has a test that uses a device"]
    yield "Tests that every row skipped", [Items(_never_run(rows))]
    if pair is not None:
        one, other = pair
        yield f"Where {one.name} and {other.name} differ", [Table(("", one.name, other.name), _differ(one, other))]


def _shown(row: _Row) -> str:
    return str(sum(state in ("shown", "stand-in") for state in row.cells.values())) if row.cells else ""


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
        if not states or {"shown", "stand-in"} & set(states.values()):
            continue
        if claims := [name for name, state in states.items() if state != "gap"]:
            found.append(f"{cell_name(cell)}: usable in {', '.join(claims)}")
        elif (kind := cell.handle_type) is None or any(is_here(kind, row.run.facts["platform"]) for row in rows):
            gaps.setdefault(cell.operation, []).append(kind.__name__ if kind else "")
    for operation, kinds in gaps.items():
        found.append(f"{operation.value}, a gap in every row" + (f": {', '.join(kinds)}" if all(kinds) else ""))
    return found


def _never_run(rows: Sequence[_Row]) -> list[str]:
    """Group by reason the tests whose every run, on whatever device and with whatever party, was a skip."""
    by_reason: dict[str, list[str]] = {}
    tests = _by_test([result for row in rows for result in row.results])
    skipped = {test for test, results in tests.items() if all(result.outcome in _SKIPPED for result in results)}
    ran = {test.partition("::")[0] for test in tests.keys() - skipped}
    for test, results in tests.items():
        if test in skipped and test not in ran:  # a module that skipped itself may have run elsewhere
            reason = " / ".join(dict.fromkeys(result.reason.removeprefix(DECLARED) for result in results))
            by_reason.setdefault(reason, []).append(test)
    return [f"{_together(tests)}: {reason}" for reason, tests in sorted(by_reason.items())]


def _by_test(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The runs of each test, on whatever device and with whatever party."""
    found: dict[str, list[Result]] = {}
    for result in results:
        # The kit's own lie in site-packages, which is elsewhere on each machine.
        found.setdefault(re.sub(r"^\S*/(?=gpuinterop/testing/\w+\.py)", "", result.test), []).append(result)
    return found


def _together(tests: Sequence[str]) -> str:
    """The one test, or how many of which class."""
    if len(tests) == 1:
        return tests[0]
    found = Counter(test.partition("[")[0].rpartition("::")[0] or test for test in tests)
    return ", ".join(f"{count} of {where}" for where, count in sorted(found.items()))


def _differ(one: _Row, other: _Row) -> list[tuple[str, str, str]]:
    """Versions, cells and tests of which the two say different things."""
    found = [
        (name, one.facts.get(name, "-"), other.facts.get(name, "-"))
        for name in one.facts | other.facts
        if one.facts.get(name) != other.facts.get(name)
    ]
    for cell in DOMAIN:
        mine, theirs = (row.cells.get(cell, "gap") for row in (one, other))
        if mine != theirs:
            found.append((cell_name(cell), mine, theirs))
    sides = [{test: _worst(results) for test, results in _by_test(row.results).items()} for row in (one, other)]
    tests: dict[tuple[str, str], list[str]] = {}
    for test in sides[0] | sides[1]:
        outcomes = sides[0].get(test, "not there"), sides[1].get(test, "not there")
        if outcomes[0] != outcomes[1]:
            tests.setdefault(outcomes, []).append(test)
    return found + [(_together(names), *outcomes) for outcomes, names in tests.items()]


def _worst(results: Iterable[Result]) -> str:
    """What a test came to over its parties: a failure counts most, then what ran, and a skip least; with its reason."""
    worst = min(results, key=lambda result: OUTCOMES.index(result.outcome))
    return worst.outcome + (f": {worst.reason.removeprefix(DECLARED)}" if worst.reason else "")
