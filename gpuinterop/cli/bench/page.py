"""Writes recorded figures into a page of the manual, with a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import log10
from pathlib import Path
from typing import Any, Final

from ...errors import InvalidArgumentError
from ..pages import Section, Table, markdown
from .clock import OURS

__all__ = ["rewrite"]

BEGIN, END = "<!-- figures: gpuinterop bench --page -->", "<!-- end of figures -->"
_ROW, _BAR, _LEFT, _WIDTH, _TOP = 20, 12, 400, 700, 48
_COLOURS: Final = ("#2a6fbb", "#8a97a6")
"""The colours of gpuinterop's bars, and of others."""


def rewrite(page: Path, runs: Sequence[Path]) -> None:
    """Write the figures of recorded runs between the page's two comments, and the plot of the first run beside it.

    Raises
    ------
    InvalidArgumentError
        The page does not have the comments, or a file is not a run's.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("--page", f"expected a page in UTF-8, got {page}: {error}.") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise InvalidArgumentError("--page", f"expected {page} to have {BEGIN} and {END} once each; add the two lines.")
    found = [_drawn(run) for run in runs]
    tables = markdown([section for sections, _ in found for section in sections]).strip()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")
    page.with_suffix(".svg").write_text(found[0][1], encoding="utf-8")


def _drawn(file: Path) -> tuple[list[Section], str]:
    """The tables and the plot of a run."""
    try:
        run: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if run["format"] != 1:
            raise ValueError(f"format {run['format']}")
        return [*_sections(run)], _plot(run)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(
            "RUN", f"expected what gpuinterop bench --json has printed, got {file}: {type(error).__name__}: {error}."
        ) from error


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
            rows.append((figure["name"], figure["problem"], "", "", "", ""))
    yield _title(run), [about, Table(("", "by", "median", "10 to 90 %", "99 %", "ratio"), rows)]


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _plot(run: Mapping[str, Any]) -> str:
    """Bars on a logarithmic scale: it spans a call and a frame."""
    bars: list[tuple[str, str, float, bool]] = []
    for figure in run["figures"]:
        for number, one in enumerate(figure["times"]):
            name = "" if number else figure["name"]
            bars.append((name, one["name"], one["median"], one["name"].startswith(OURS)))
    low, high = 0.1, max(1, *(median for *_, median, _ in bars)) * 1.6
    scale = _WIDTH / _decades(low, high)
    height = _TOP + _ROW * len(bars) + 8 * sum(bool(name) for name, *_ in bars) + 30
    size = f'viewBox="0 0 {_LEFT + _WIDTH + 90} {height}" font-family="system-ui, sans-serif" font-size="12"'
    title = f"{escape(_title(run))}: microseconds, median, logarithmic"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f'<rect width="100%" height="100%" fill="#ffffff"/><text x="10" y="20" font-size="15">{title}</text>',
    ]
    mark = low
    while mark < high:
        x = _LEFT + scale * _decades(low, mark)
        parts.append(
            f'<path d="M{x:.1f} {_TOP - 8}V{height - 22}" stroke="#d5dae0"/>'
            f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle" fill="#66707c">{mark:g}</text>'
        )
        mark *= 10
    y = _TOP
    for name, by, median, ours in bars:
        if name:
            y += 8
        width = max(1.0, scale * _decades(low, median))
        text = f'{escape(name)}<tspan fill="#66707c">{" · " if name else ""}{escape(by)}</tspan>'
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + _BAR - 2}" text-anchor="end" font-size="11">{text}</text>'
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{_COLOURS[not ours]}"/>'
            f'<text x="{_LEFT + width + 5:.1f}" y="{y + _BAR - 2}" font-size="11">{_number(median)}</text>'
        )
        y += _ROW
    return "\n".join([*parts, "</svg>", ""])


def _decades(low: float, value: float) -> float:
    return log10(max(value, low) / low)
