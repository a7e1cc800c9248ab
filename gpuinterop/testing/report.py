"""``verified.toml``: the results of runs, written by a command and never by hand."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from .. import __version__
from ..capabilities import MULTICAST, Cell, VerifiedRun, read_verified
from ..errors import InvalidArgumentError

__all__ = ["format_document", "format_runs", "make_run", "merge_runs", "of_suites", "write_document", "write_report"]

_HEADER = """\
# The results of runs on the named devices and drivers: of the conformance suite (`gpuinterop selftest --report`), and
# of multicast (`gpuinterop selftest multicast --report`). Only the cells listed here are SUPPORTED. Do not edit.
"""


def of_suites(cells: Iterable[Cell]) -> set[Cell]:
    """Cells that a run of the suites can prove: not multicast, which it runs only on test doubles."""
    return {cell for cell in cells if cell.operation not in MULTICAST}


def merge_runs(runs: Iterable[VerifiedRun], fresh: Iterable[VerifiedRun]) -> list[VerifiedRun]:
    """Add `fresh` to `runs`; a fresh run replaces an earlier one of the same platform, device and command."""
    fresh = list(fresh)
    replaced = set(map(_kind, fresh))
    return [run for run in runs if _kind(run) not in replaced] + fresh


def _kind(run: VerifiedRun) -> tuple[str, str, bool]:
    """Tell runs of the suites from runs of `gpuinterop selftest multicast`, which have only multicast's cells."""
    return run.platform, run.device, bool(of_suites(run.cells))


def format_runs(runs: Iterable[VerifiedRun]) -> str:
    """The text of a ``verified.toml``; `gpuinterop.capabilities.read_verified` reads it."""
    import tomli_w

    entries = [
        {
            "date": run.date,
            "platform": run.platform,
            "device": run.device,
            "cells": sorted(map(str, run.cells)),
            "versions": dict(sorted(run.versions.items())),
            **({"tests": dict(run.tests)} if run.tests else {}),
        }
        for run in runs
    ]
    return _HEADER + "\n" + tomli_w.dumps({"run": entries})


def write_report(path: str | os.PathLike[str], fresh: Iterable[VerifiedRun]) -> None:
    """Add runs to a file (see `merge_runs`) and replace it in one step."""
    target = Path(path)
    text = format_runs(merge_runs(read_verified(target), fresh))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(target)


def make_run(
    device: str, versions: Mapping[str, str], cells: Iterable[Cell], tests: Mapping[str, int] | None = None
) -> VerifiedRun:
    """Make a run of today, on this platform."""
    return VerifiedRun(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        platform=sys.platform,
        device=device,
        versions={"gpuinterop": __version__, **versions},
        cells=frozenset(cells),
        tests=dict(tests or {}),
    )


_BEGIN = "<!-- Written by `gpuinterop selftest --report --document`; do not edit between the two marks. -->"
_END = "<!-- The end of what is written. -->"


def format_document(runs: Mapping[str, Iterable[VerifiedRun]]) -> str:
    """Format the runs of several files as Markdown, a section per run; the keys of `runs` are headings."""
    lines = []
    for owner, entries in sorted(runs.items()):
        for run in entries:
            lines += [f"### {owner}: {run.device}", ""]
            versions = ", ".join(_with_version(*one) for one in sorted(run.versions.items()))
            lines.append(f"Run on {run.date}, on {run.platform}, with {versions}.")
            if run.tests:
                lines.append("Tests: " + ", ".join(f"{count} {name}" for name, count in run.tests.items()) + ".")
            lines += ["", *_cells_by_operation(run), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _with_version(name: str, version: str) -> str:
    exporter = name.removeprefix("exporter ")
    return f"{name} {version}" if exporter == name else f"exporter `{exporter}` ({version})"


def _cells_by_operation(run: VerifiedRun) -> list[str]:
    found: dict[str, list[str]] = {}
    for cell in sorted(run.cells, key=str):
        kind = f"`{cell.handle_type.type_name}`" if cell.handle_type else "none"
        found.setdefault(cell.operation.value, []).append(kind)
    return ["| operation | handle types |", "|---|---|"] + [
        f"| `{operation}` | {', '.join(kinds)} |" for operation, kinds in found.items()
    ]


def write_document(path: str | os.PathLike[str], runs: Mapping[str, Iterable[VerifiedRun]]) -> None:
    """Replace the text between the two marks of a Markdown file.

    Raises `InvalidArgumentError` if the file has no such marks.
    """
    target = Path(path)
    text = target.read_text(encoding="utf-8") if target.is_file() else ""
    before, mark, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (mark and end):
        raise InvalidArgumentError("document", f"{target} lacks the lines {_BEGIN!r} and {_END!r}.")
    target.write_text(f"{before}{_BEGIN}\n\n{format_document(runs)}\n{_END}{after}", encoding="utf-8")
