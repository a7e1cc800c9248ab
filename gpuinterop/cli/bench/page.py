"""Writes recorded figures into a page of the manual, with a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from ...errors import InvalidArgumentError
from ..pages import Section, Table, markdown
from .clock import OURS
from .frames import STAGED

__all__ = ["rewrite"]

FIGURES = "<!-- figures: gpuinterop bench --page -->", "<!-- end of figures -->"
SPEEDS = "<!-- speeds -->", "<!-- /speeds -->"
_LEFT, _WIDTH = 12, 340
_STYLE: Final = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2933 } .title, tspan { font-weight: bold }
.page { fill: #f5f7fb } .ours { fill: #2a6fbb } .theirs { fill: #76828f }
@media (prefers-color-scheme: dark) { text { fill: #e3e7ec } .page { fill: #1d2126 } .ours { fill: #62a8f0 } }
</style>"""


def rewrite(pages: Sequence[Path], runs: Sequence[Path]) -> None:
    """Write the figures of recorded runs between the comments of each page.

    A page has a place for all figures (a plot is then drawn beside it), for a sentence with three speeds, or both. The
    plot and the sentence show the first run that compares frames with copies.

    Raises
    ------
    InvalidArgumentError
        If a page has neither place, a file is not a run, or no run compares frames with copies.
    """
    found = [_read(run) for run in runs]
    shown = next((run for run in found if _staged(run)), None)
    if shown is None:
        raise InvalidArgumentError("RUN", "expected a run that measured frames, got none; measure without --only.")
    tables = markdown([section for run in found for section in _sections(run)]).strip()
    for page in pages:
        try:
            text = page.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError("--page", f"expected a page in UTF-8, got {page}: {error}.") from error
        places = [marks for marks in (FIGURES, SPEEDS) if text.count(marks[0]) == text.count(marks[1]) == 1]
        if not places:
            expected = " or ".join(f"{begin} and {end}" for begin, end in (FIGURES, SPEEDS))
            raise InvalidArgumentError("--page", f"expected {page} to have {expected} once; add the two lines.")
        for begin, end in places:
            new = f"\n{tables}\n" if begin == FIGURES[0] else _speeds(shown)
            text = f"{text.split(begin)[0]}{begin}\n{new}\n{end}{text.split(end)[1]}"
        page.write_text(text, encoding="utf-8")
        if FIGURES in places:
            page.with_suffix(".svg").write_text(_plot(shown), encoding="utf-8")


def _read(file: Path) -> dict[str, Any]:
    """A run, all of which can be shown."""
    try:
        run: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if run["format"] != 1:
            raise ValueError(f"format {run['format']}")
        list(_sections(run))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(
            "RUN", f"expected what gpuinterop bench --json has printed, got {file}: {type(error).__name__}: {error}."
        ) from error
    return run


def _staged(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The frames that were measured beside copies through the host."""
    return [one for one in run["figures"] if any(time["name"] == STAGED for time in one["times"])]


def _speeds(run: Mapping[str, Any]) -> str:
    frame = {time["name"]: time["median"] for time in _staged(run)[-1]["times"]}
    (calls,) = (one["times"][0] for one in run["figures"] if one["name"] == "submit + acquire + release, compute queue")
    return (
        f"On an {run['device']}, a frame that shares 1 MiB with Vulkan takes {frame[OURS] / 1000:.1f} ms; with copies "
        f"through the host\nit takes {frame[STAGED] / 1000:.1f} ms. "
        f"gpuinterop's calls take {calls['median']:.1f} us per frame."
    )


def _title(run: Mapping[str, Any]) -> str:
    return f"{run['device']}, {run['cores']} CPU cores"


def _sections(run: Mapping[str, Any]) -> Iterator[Section]:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    about = (
        f"{run['date']}, gpuinterop {run['gpuinterop']}, {run['cpu']}, Python {run['python']}"
        + (f", {versions}" if versions else "")
        + (f"; Vulkan: {run['vulkan']}" if run["vulkan"] else "")
        + ". Microseconds; the last column is gpuinterop's time as a multiple of the row's."
    )
    rows = []
    for figure in run["figures"]:
        for number, one in enumerate(figure["times"]):
            name = "" if number else figure["name"]
            of = " (p99)" if figure["judged_by"] == "p99" else ""
            ratio = "" if one["ratio"] is None else f"{one['ratio']:.2f}{of}"
            spread = f"{_number(one['p10'])} to {_number(one['p90'])}"
            rows.append((name, one["name"], _number(one["median"]), spread, _number(one["p99"]), ratio))
        if figure["problem"]:
            rows.append(("" if figure["times"] else figure["name"], figure["problem"], "", "", "", ""))
    yield _title(run), [about, Table(("", "by", "median", "10 to 90 %", "99 %", "ratio"), rows)]


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _plot(run: Mapping[str, Any]) -> str:
    """Bars of the frames that copies through the host were measured beside.

    It is as wide as a phone. Its colours are its own, and follow the reader's scheme.
    """
    parts, y = [], 30
    frames = _staged(run)
    scale = (_WIDTH - 2 * _LEFT) / max(time["median"] for one in frames for time in one["times"])
    for figure in frames:
        y += 28
        parts.append(f'<text x="{_LEFT}" y="{y}">{escape(figure["name"])}</text>')
        for time in figure["times"]:
            whose = "ours" if time["name"].startswith(OURS) else "theirs"
            label = f"{escape(time['name'])}: <tspan>{time['median'] / 1000:.2g} ms</tspan>"
            parts.append(
                f'<text x="{_LEFT}" y="{y + 20}">{label}</text>'
                f'<rect class="{whose}" x="{_LEFT}" y="{y + 26}" width="{scale * time["median"]:.1f}" height="10"/>'
            )
            y += 40
    title = f'<text x="{_LEFT}" y="24" class="title">{escape(run["device"])}: time of a frame</text>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 12}" width="{_WIDTH * 3 // 2}">'
    return "\n".join([head, _STYLE, '<rect class="page" width="100%" height="100%"/>', title, *parts, "</svg>", ""])
