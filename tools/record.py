"""Record runs: merge reports of `gpuinterop selftest` into ``verified.toml``, and write docs/reference/runs.md.

A run replaces an earlier one of the same platform, device and command. Check the difference with `git diff`: only the
cells in these files are SUPPORTED.

Usage:
    python -m tools.record REPORT...                        runs of this checkout's backends and of Vulkan drivers
    python -m tools.record REPORT... --file VERIFIED_TOML   runs of another backend, into its own file
    python -m tools.record                                  only write the page
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from gpuinterop.capabilities import MULTICAST, Cell, VerifiedRun, read_verified
from gpuinterop.errors import GpuInteropError, InvalidArgumentError
from gpuinterop.testing.results import RUNS, UNRECORDED, read_run

ROOT = Path(__file__).resolve().parents[1]
FILES = {name: ROOT / "backends" / f"gpuinterop_{name}" / "verified.toml" for name in ("cuda", "hip", "host")}
FILES["vulkan"] = ROOT / "gpuinterop" / "vulkan" / "verified.toml"
PAGE = ROOT / "docs" / "reference" / "runs.md"
BEGIN = "<!-- Written by `python -m tools.record`; do not edit between the two marks. -->"
END = "<!-- The end of what is written. -->"
HEADER = """\
# The results of runs on the named devices and drivers: of the conformance suite (`gpuinterop selftest`), and of
# multicast (`gpuinterop selftest multicast`). Only the cells listed here are SUPPORTED. `python -m tools.record` writes
# this file; do not edit.
"""


def runs_of(report: Path) -> dict[str, list[dict[str, Any]]]:
    """The entries in a report, by backend (or ``vulkan``)."""
    properties = read_run(report).properties
    every = {name.removeprefix(RUNS): json.loads(text) for name, text in properties.items() if name.startswith(RUNS)}
    runs = {owner: entries for owner, entries in every.items() if entries}
    if not runs or UNRECORDED in properties:
        reasons = [f"{name}: {text}" for name, text in properties.items() if name.startswith(UNRECORDED)]
        raise InvalidArgumentError(
            "report",
            f"expected what `gpuinterop selftest --report FILE` wrote for a whole run on hardware, got {report}"
            + "".join(f"; {reason}" for reason in reasons),
        )
    return runs


def merge(file: Path, fresh: Sequence[Mapping[str, Any]]) -> None:
    """Add entries to a ``verified.toml``, and replace the file in one step."""
    before = tomllib.loads(file.read_text(encoding="utf-8")).get("run", []) if file.exists() else []
    replaced = [_kind(run) for run in fresh]
    runs = [*(run for run in before if _kind(run) not in replaced), *fresh]
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(HEADER + "\n" + tomli_w.dumps({"run": runs}), encoding="utf-8")
    try:
        read_verified(temporary)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _kind(run: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Tell runs of the suites from runs of `gpuinterop selftest multicast`, which have only multicast's cells."""
    return run["platform"], run["device"], all(Cell.parse(cell).operation in MULTICAST for cell in run["cells"])


def page(runs: Mapping[str, Sequence[VerifiedRun]]) -> str:
    """Format the runs as Markdown, a section per run; the keys of `runs` are headings."""
    return "\n".join(line for owner, some in runs.items() for run in some for line in _section(owner, run))


def _section(owner: str, run: VerifiedRun) -> Iterator[str]:
    versions = ", ".join(_with_version(*version) for version in sorted(run.versions.items()))
    yield f"### {owner}: {run.device}"
    yield f"\nRun on {run.date}, on {run.platform}, with {versions}."
    if run.tests:
        yield "Tests: " + ", ".join(f"{count} {name}" for name, count in run.tests.items()) + "."
    kinds: dict[str, list[str]] = {}
    for cell in sorted(run.cells, key=str):
        kind = f"`{cell.handle_type.type_name}`" if cell.handle_type else "none"
        kinds.setdefault(cell.operation.value, []).append(kind)
    yield "\n| operation | handle types |\n|---|---|"
    yield from (f"| `{operation}` | {', '.join(names)} |" for operation, names in kinds.items())
    yield ""


def _with_version(name: str, version: str) -> str:
    exporter = name.removeprefix("exporter ")
    return f"{name} {version}" if exporter == name else f"exporter `{exporter}` ({version})"


def write_page() -> None:
    """Replace the text between the page's two marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    runs = {"Vulkan driver" if name == "vulkan" else name: read_verified(file) for name, file in FILES.items()}
    PAGE.write_text(f"{before}{BEGIN}\n\n{page(dict(sorted(runs.items())))}\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("tools.record", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("reports", nargs="*", metavar="REPORT", type=Path)
    parser.add_argument("--file", metavar="VERIFIED_TOML", type=Path)
    given = parser.parse_args(arguments)
    try:
        reported = [pair for report in given.reports for pair in runs_of(report).items()]
        others = sorted({owner for owner, _ in reported} - FILES.keys())
        if given.file is None and others:
            raise InvalidArgumentError(
                "report",
                f"expected runs of {', '.join(FILES)}, got one of {others[0]}; pass its verified.toml: --file.",
            )
        if given.file is not None and len(others) != 1:
            owners = ", ".join(others) or "none"
            raise InvalidArgumentError("--file", f"expected runs of one backend not in this checkout, got {owners}.")
        for owner, runs in reported:
            if given.file is not None and owner in FILES:
                print(f"skipped {len(runs)} of {owner}: --file takes only runs of a backend not in this checkout")
            else:
                merge(given.file or FILES[owner], runs)
                print(f"recorded {len(runs)} of {owner} in {given.file or FILES[owner]}")
    except (GpuInteropError, LookupError, TypeError, ValueError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    write_page()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
