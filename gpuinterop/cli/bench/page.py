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
_FRAME, _CALLS = "frame, wait_host each, compute queue, 1 MiB", "submit + acquire + release, compute queue"
_LEFT, _WIDTH = 12, 340
_STYLE: Final = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2933 } .title, tspan { font-weight: bold }
.page { fill: #f5f7fb } .ours { fill: #2a6fbb } .theirs { fill: #76828f }
@media (prefers-color-scheme: dark) { text { fill: #e3e7ec } .page { fill: #1d2126 } .ours { fill: #62a8f0 } }
</style>"""


def rewrite(pages: Sequence[Path], runs: Sequence[Path]) -> None:
    """Write the figures of recorded runs between the comments of each page.

    A page has a place for all figures, for a sentence with three speeds, or both. A plot is drawn beside a page with
    all figures.

    Raises
    ------
    InvalidArgumentError
        If a page has neither place, or a comment without its other one; if a file is not a run; or if no run has the
        frames and calls that the plot and the sentence show.
    """
    found = [_drawn(run) for run in runs]
    texts = {page: _text(page) for page in pages}
    tables = markdown([section for sections, *_ in found for section in sections]).strip()
    speeds = next((speeds for *_, speeds in found if speeds), None)
    if speeds is None:
        raise InvalidArgumentError("RUN", f"expected a run with {_FRAME!r} and {_CALLS!r}; measure without --only.")
    plot = next(plot for _, plot, _ in found if plot)
    new = {FIGURES: f"\n{tables}\n", SPEEDS: speeds}
    for page, text in texts.items():
        for (begin, end), written in new.items():
            if begin in text:
                text = f"{text.split(begin)[0]}{begin}\n{written}\n{end}{text.split(end)[1]}"
        page.write_text(text, encoding="utf-8")
        if FIGURES[0] in text:
            page.with_suffix(".svg").write_text(plot, encoding="utf-8")


def _text(page: Path) -> str:
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("--page", f"expected a page in UTF-8, got {page}: {error}.") from error
    counts = {tuple(map(text.count, marks)) for marks in (FIGURES, SPEEDS)}
    if (1, 1) not in counts or not counts <= {(0, 0), (1, 1)}:
        expected = " or ".join(" and ".join(marks) for marks in (FIGURES, SPEEDS))
        raise InvalidArgumentError("--page", f"expected {page} to have {expected}, once; add the two lines.")
    return text


def _drawn(file: Path) -> tuple[list[Section], str, str]:
    """The tables, the plot and the sentence of a run. The last two are empty if it does not have their figures."""
    try:
        run: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if run["format"] != 1:
            raise ValueError(f"format {run['format']}")
        return [*_sections(run)], _plot(run), _speeds(run)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(
            "RUN", f"expected what gpuinterop bench --json has printed, got {file}: {type(error).__name__}: {error}."
        ) from error


def _speeds(run: Mapping[str, Any]) -> str:
    medians = {(one["name"], time["name"]): time["median"] for one in run["figures"] for time in one["times"]}
    if not {(_FRAME, OURS), (_FRAME, STAGED), (_CALLS, OURS)} <= medians.keys():
        return ""
    return (
        f"Measured on {run['device']}: a frame that shares 1 MiB with Vulkan takes "
        f"{medians[_FRAME, OURS] / 1000:.1f} ms;\nwith copies through the host, it takes "
        f"{medians[_FRAME, STAGED] / 1000:.1f} ms. gpuinterop's calls take {medians[_CALLS, OURS]:.1f} us per frame."
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
    frames = [one for one in run["figures"] if any(time["name"] == STAGED for time in one["times"])]
    if not frames:
        return ""
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
