"""``gpuinterop bench``: figures, each beside its yardsticks in the same run."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from ... import __version__
from ...errors import InvalidArgumentError
from ..console import note, progress, say
from . import calls, frames, opengl, sharing
from .clock import Figure, Spread, why
from .page import rewrite
from .rig import Bench

__all__ = ["add_arguments", "command"]

FORMAT: Final = 1
_NAME: Final = 29
Parts: TypeAlias = Mapping[str, Callable[[Bench], Iterator[Figure]]]
_PARTS: Final[Parts] = {**calls.PARTS, **frames.PARTS, **opengl.PARTS, **sharing.PARTS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``gpuinterop bench``."""
    parser.add_argument("--backend", metavar="NAME", help="by default the one that gpuinterop chooses here")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")
    parser.add_argument(
        "--only",
        metavar="WORD",
        action="append",
        help="measure only the parts that have this in their name; may be repeated. The parts:\n" + "\n".join(_PARTS),
    )
    parser.add_argument("--quick", action="store_true", help="take few times: to see that it works")
    parser.add_argument(
        "--page",
        metavar="FILE",
        type=Path,
        action="append",
        help="measure nothing: write the figures of RUNs into this page, and a plot beside it; may be repeated",
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="*", help="with --page: what --json has printed")


def command(given: argparse.Namespace) -> int:
    """Measure what calls, frames and sharing cost, in microseconds.

    Each figure is measured alternately with its baselines: the same calls through the vendor's binding, with structs
    that are made once or for each call; only vkQueueSubmit; the same calls in C, if there is a compiler; copies
    through the host; an OpenGL buffer that CUDA registers and maps; torch's own way to other processes; and
    multiprocessing.shared_memory. A ratio below 1 means that gpuinterop is faster. If the device lacks a feature, the
    command prints the reason. Without a GPU it measures the host backend, with software drivers if there are any.

    The exit status is 1 if something failed that the device supports.
    """
    if given.page is not None:
        if not given.runs:
            raise InvalidArgumentError("RUN", "expected what gpuinterop bench --json has printed, got no file.")
        rewrite(given.page, given.runs)
        return 0
    if given.runs:
        raise InvalidArgumentError("RUN", f"expected no file without --page, got {given.runs[0]}.")
    parts = _chosen(given.only)
    found = []
    with Bench(given.backend, quick=given.quick) as bench:
        facts = _facts(bench)
        if not given.json:
            _show_facts(facts)
        for figure in _measured(bench, parts):
            found.append(figure)
            if not given.json:
                _show(figure)
    if given.json:
        print(json.dumps({**facts, "figures": [*map(as_dict, found)]}, indent=1))
    return int(any(figure.failed for figure in found))


def _chosen(only: list[str] | None) -> Parts:
    """The parts that have one of the words in their names."""
    if only is None:
        return _PARTS
    words = [word.lower() for word in only]
    for word in words:
        if not any(word in name for name in _PARTS):
            raise InvalidArgumentError("--only", f"expected a word of {', '.join(_PARTS)}; got {word!r}.")
    return {name: part for name, part in _PARTS.items() if any(word in name for word in words)}


def _facts(bench: Bench) -> dict[str, Any]:
    vulkan = bench.vulkan
    if bench.stand_in:
        note(f"{bench.device.name} is not a device: its driver is {bench.stand_in}. The times are the library's own.")
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpuinterop": __version__,
        "backend": bench.backend.name,
        "device": bench.device.name,
        "stand_in": bench.stand_in or None,
        "versions": dict(bench.backend.versions),
        "vulkan": None if vulkan is None else f"{vulkan.name}, {vulkan.driver} {vulkan.version}",
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _cpu() -> str:
    """The processor's name, as far as the system says it: Linux does on x86-64."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _measured(bench: Bench, parts: Parts) -> Iterator[Figure]:
    """The figures of each part; one that cannot be measured says why, and the others go on."""
    try:
        for number, (name, measure) in enumerate(parts.items(), 1):
            progress(f"measures {name} ({number} of {len(parts)})")
            try:
                for figure in measure(bench):
                    yield figure
                    progress(f"measures {name} ({number} of {len(parts)})")
            except Exception as error:  # of whatever kind: what was measured before is worth more
                problem, failed = why(error)
                yield Figure(name, problem=problem, failed=failed)
    finally:
        progress("")


def _show_facts(facts: Mapping[str, Any]) -> None:
    say((f"{facts['device']} ({facts['backend']}), {facts['cpu']}, {facts['cores']} cores", "bold"))
    if facts["vulkan"]:
        say((f"Vulkan: {facts['vulkan']}", ""))
    columns = f"{'median':>9}{'10 to 90 %':^22}{'99 %':>9}{'ratio':>9}"
    say((f"\n  {'microseconds':{_NAME}}{columns}", "dim"))


def _show(figure: Figure) -> None:
    of = f", per {figure.unit}" + (", judged by 99 %" if figure.judged_by == "p99" else "")
    say((f"\n{figure.name}", "bold"), (f": {figure.problem}" if figure.problem else of, "dim"))
    for name, spread in figure.times.items():
        median, p10, p90, p99 = map(_number, (spread.median, spread.p10, spread.p90, spread.p99))
        row = f"  {name:{_NAME}}{median:>9}{p10:>9} to {p90:<9}{p99:>9}"
        ratio = figure.ratio(name)
        if ratio is None:
            say((row, ""))
        else:
            say((row, ""), (f"{ratio:>9.{2 if ratio >= 0.1 else 3}f}", "green" if ratio <= 1 else ""))


def _number(microseconds: float) -> str:
    return f"{microseconds:,.{0 if microseconds >= 100 else 2}f}"


def as_dict(figure: Figure) -> dict[str, Any]:
    """A figure as JSON has it."""
    return {
        "name": figure.name,
        "unit": figure.unit,
        "judged_by": figure.judged_by,
        "problem": figure.problem or None,
        "times": [
            {"name": name, **_spread(spread), "ratio": figure.ratio(name)} for name, spread in figure.times.items()
        ],
    }


def _spread(spread: Spread) -> Mapping[str, float]:
    return {name: getattr(spread, name) for name in ("median", "p10", "p90", "p99", "samples")}
