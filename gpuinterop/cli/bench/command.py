"""``gpuinterop bench``: figures, each beside its yardsticks in the same run."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ... import __version__
from ..._core import stand_ins
from ...errors import InvalidArgumentError
from ..console import note, say
from . import calls, frames, processes
from .clock import OURS, Figure, Spread
from .page import rewrite
from .rig import Bench

__all__ = ["add_arguments", "command"]

FORMAT: Final = 1
_NAME, _TIME = 34, 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``gpuinterop bench``."""
    parser.add_argument("--backend", metavar="NAME", help="by default the one that gpuinterop chooses here")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")
    parser.add_argument(
        "--only", metavar="WORD", action="append", help="measure only what has this in its name; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="take few times: to see that it works")
    parser.add_argument(
        "--page",
        metavar="FILE",
        type=Path,
        help="measure nothing: write the figures of RUNs into this page, and a plot",
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="*", help="with --page: what --json has printed")


def command(given: argparse.Namespace) -> int:
    """Measure what calls and frames cost, in microseconds.

    Each figure stands beside its yardsticks, which are measured in turns with it: the same calls by the vendor's
    binding alone, with structs that are made once or anew; vkQueueSubmit alone; the same in C, where there is a
    compiler; a mutex, a condition and a futex for the host; copies through the host. A ratio below 1 is less than the
    yardstick. Without a GPU it measures the host backend, over a software Vulkan driver if there is one.
    """
    if given.page is not None:
        if not given.runs:
            raise InvalidArgumentError("RUN", "expected what gpuinterop bench --json has printed, got no file.")
        rewrite(given.page, given.runs)
        return 0
    if given.runs:
        raise InvalidArgumentError("RUN", f"expected no file without --page, got {given.runs[0]}.")
    with Bench(given.backend, quick=given.quick) as bench:
        facts = _facts(bench)
        if not given.json:
            say((f"{facts['device']} ({facts['backend']}), {facts['cpu']}, {facts['cores']} cores", "bold"))
            say(("microseconds: median, 10th to 90th percentile, 99th percentile, gpuinterop / yardstick", "dim"))
        figures = []
        for figure in _measured(bench, given.only):
            figures.append(figure)
            if not given.json:
                _show(figure)
    if not figures:
        raise InvalidArgumentError("--only", f"expected a part of a figure's name, got {', '.join(given.only)}.")
    if given.json:
        print(json.dumps({**facts, "figures": [*map(as_dict, figures)]}, indent=1))
    return 0


def _facts(bench: Bench) -> dict[str, Any]:
    vulkan = bench.vulkan
    stand_in = stand_ins.stand_in(bench.backend.libraries)
    if stand_in:
        note(f"{bench.device.name} is no device: {stand_in}. The figures are those of the library, not of a driver.")
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpuinterop": __version__,
        "backend": bench.backend.name,
        "device": bench.device.name,
        "stand_in": stand_in or None,
        "versions": dict(bench.backend.versions),
        "vulkan": None if vulkan is None else f"{vulkan.name}, {vulkan.driver} {vulkan.version}",
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _measured(bench: Bench, only: list[str] | None) -> Iterator[Figure]:
    parts = [part for room in (calls, frames, processes) for part in room.figures(bench)]
    chosen = [part for part in parts if only is None or any(word.lower() in part[0] for word in only)]
    for number, (name, measure) in enumerate(chosen, 1):
        _progress(f"measures {name} ({number} of {len(chosen)})")
        for figure in measure():
            _progress("")
            yield figure
            _progress(f"measures {name} ({number} of {len(chosen)})")
    _progress("")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _show(figure: Figure) -> None:
    say((f"\n{figure.name}", "bold"), (f": {figure.problem}" if figure.problem else f", per {figure.unit}", "dim"))
    for name, spread in figure.times.items():
        times = f"{spread.median:>{_TIME},.2f}  {spread.p10:>9,.2f} to {spread.p90:<9,.2f} {spread.p99:>9,.2f}"
        row = f"  {name:{_NAME}}{times}"
        if name == OURS:
            say((row, ""))
        else:
            ratio = figure.ratio(name)
            of = " (of p99)" if figure.judged_by == "p99" else ""
            say((row, ""), (f"{ratio:>9.2f}{of}", "green" if ratio <= 1 else ""))


def as_dict(figure: Figure) -> dict[str, Any]:
    """A figure as JSON has it."""
    return {
        "name": figure.name,
        "unit": figure.unit,
        "judged_by": figure.judged_by,
        "problem": figure.problem or None,
        "times": [
            {"name": name, **_spread(spread), "ratio": None if name == OURS else figure.ratio(name)}
            for name, spread in figure.times.items()
        ],
    }


def _spread(spread: Spread) -> Mapping[str, float]:
    return {name: getattr(spread, name) for name in ("median", "p10", "p90", "p99", "samples")}
