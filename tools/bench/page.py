"""Write recorded runs, ``docs/performance/*.json``, into the manual: ``python -m tools.bench.page``.

``docs/performance.md`` gets a table for each machine, with a plot beside the page. It and the README get a sentence
with three speeds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, Final, TypeAlias

from .clock import OURS, PERCENTILES, number

FIGURES = "<!-- figures: python -m tools.bench.page -->", "<!-- end of figures -->"
SPEEDS = "<!-- speeds -->", "<!-- /speeds -->"
_NOT_SHOWN: Final = {"by hand, new structs", "gpuinterop, a captured graph", "C, a captured graph"}
"""Contenders of older runs."""
_QUEUES: Final = ("transfer queue", "compute queue")
_CALLS, _FRAME = "submit + acquire + release, {}", "frame, wait_host each, {}, 1 MiB"
_LISTS: Final = ("400 tensors of 16 KiB", "400 tensors of 1 MiB", "4 tensors of 256 MiB")
ROWS: Final = (
    *("signal", "wait", "import + map + close"),
    *(row.format(queue) for row in (_CALLS, "frame, queued ahead, {}, no work", _FRAME) for queue in _QUEUES),
    *(f"torch: {what} {tensors}" for tensors in _LISTS for what in ("dump", "load")),
    "frame of 1,024 bytes to another process and back",
)
"""The figures that the manual talks about; the others stay in the runs."""
_LEFT, _WIDTH = 12, 340
_STYLE: Final = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2933 } .title, tspan { font-weight: bold }
.page { fill: #f5f7fb } .ours { fill: #2a6fbb } .theirs { fill: #76828f }
@media (prefers-color-scheme: dark) { text { fill: #e3e7ec } .page { fill: #1d2126 } .ours { fill: #62a8f0 } }
</style>"""
Figures: TypeAlias = Mapping[str, tuple[list[dict[str, Any]], dict[str, Any]]]
"""The times of each row, and the run that they are from."""


def write(root: Path) -> None:
    """Write the figures between the comments of the pages, and the plot of the first machine."""
    machines: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((root / "docs" / "performance").glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        machines.setdefault(f"{run['device']}, {run['cores']} CPU cores", []).append(run)
    figures = {machine: _figures(runs) for machine, runs in machines.items()}
    tables = "\n".join(line for machine, found in figures.items() for line in _table(machine, found))
    first, readme, page = next(iter(figures.values())), root / "README.md", root / "docs" / "performance.md"
    texts = {file: _replaced(file.read_text(encoding="utf-8"), SPEEDS, _speeds(first)) for file in (readme, page)}
    texts[page] = _replaced(texts[page], FIGURES, f"{tables}\n")
    for file, text in (*texts.items(), (page.with_suffix(".svg"), _plot(first))):
        file.write_text(text, encoding="utf-8")


def _replaced(text: str, marks: tuple[str, str], new: str) -> str:
    begin, end = marks
    if [text.count(mark) for mark in marks] != [1, 1]:
        sys.exit(f"expected a page to have {begin} and {end}, once; add the two lines")
    return f"{text.partition(begin)[0]}{begin}\n{new}\n{end}{text.partition(end)[2]}"


def _figures(runs: list[dict[str, Any]]) -> Figures:
    """The newest figure of each row that has a yardstick."""
    found = {}
    for run in sorted(runs, key=lambda run: str(run["date"])):
        for figure in run["figures"]:
            times = [time for time in figure["times"] if time["name"] not in _NOT_SHOWN]
            if len(times) > 1:
                found[figure["name"]] = times, run
    return {row: found[row] for row in ROWS if row in found}


def _table(machine: str, figures: Figures) -> Iterator[str]:
    yield f"\n### {machine}\n"
    for run in {str(run["date"]) + run["gpuinterop"]: run for _, run in figures.values()}.values():
        versions = "".join(f", {name} {version}" for name, version in run["versions"].items() if name != "python")
        facts = f"{run['date']}: gpuinterop {run['gpuinterop']}, {run['cpu']}, Python {run['python']}{versions}"
        yield f"- {facts}" + (f"; Vulkan: {run['vulkan']}" if run["vulkan"] else "")
    yield "\n|  | by | median | 10 to 90 % | 99 % | ratio |\n| --- | --- | --- | --- | --- | --- |"
    for row, (times, _) in figures.items():
        for time in times:
            median, p10, p90, p99 = (number(time[part]) for part in PERCENTILES)
            name, ratio = (row, "") if time is times[0] else ("", f"{times[0]['median'] / time['median']:.2f}")
            cells = f"| {name} | {time['name']} | {median} | {p10} to {p90} | {p99} | {ratio} |"
            yield cells.replace("_", r"\_")


def _speeds(figures: Figures) -> str:
    frame, calls = (figures[row.format(_QUEUES[1])] for row in (_FRAME, _CALLS))
    shared, copied = (time["median"] / 1000 for time in frame[0])
    return (
        f"Measured on {frame[1]['device']}: a frame that shares 1 MiB with Vulkan takes {shared:.1f} ms;\n"
        f"with copies through the host, it takes {copied:.1f} ms. "
        f"gpuinterop's calls take {calls[0][0]['median']:.1f} us per frame."
    )


def _plot(figures: Figures) -> str:
    """Bars of the frames beside copies. It is as wide as a phone, and its colours follow the reader's scheme."""
    rows = {row: figures[row][0] for row in map(_FRAME.format, _QUEUES) if row in figures}
    scale = (_WIDTH - 2 * _LEFT) / max(time["median"] for times in rows.values() for time in times)
    parts, y, device = [], 30, next(iter(figures.values()))[1]["device"]
    for row, times in rows.items():
        y += 28
        parts.append(f'<text x="{_LEFT}" y="{y}">{escape(row)}</text>')
        for time in times:
            whose = "ours" if time["name"] == OURS else "theirs"
            label = f"{escape(time['name'])}: <tspan>{time['median'] / 1000:.2g} ms</tspan>"
            parts.append(
                f'<text x="{_LEFT}" y="{y + 20}">{label}</text>'
                f'<rect class="{whose}" x="{_LEFT}" y="{y + 26}" width="{scale * time["median"]:.1f}" height="10"/>'
            )
            y += 40
    title = f'<text x="{_LEFT}" y="24" class="title">{escape(device)}: time of a frame</text>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 12}" width="{_WIDTH * 3 // 2}">'
    return "\n".join([head, _STYLE, '<rect class="page" width="100%" height="100%"/>', title, *parts, "</svg>", ""])


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2])
