"""Measure what calls, frames and sharing cost, in microseconds, each beside the same work by other means.

A ratio below 1 means that gpuinterop is faster. If the device lacks a feature, or a package is missing, the reason is
printed. The exit status is 1 if something failed that the device supports. ``python -m tools.bench.page`` writes
recorded figures into the manual.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeAlias

from gpuinterop import DeviceNotFoundError, __version__, get_backend

from . import calls, messages, tensors, vulkan
from .clock import OURS, PERCENTILES, Figure, explain, number
from .device import Bench
from .processes import LIFE_S

Part: TypeAlias = Callable[[Bench], Iterator[Figure]]
PARTS: Final[dict[str, Part]] = {**calls.PARTS, **vulkan.PARTS, **tensors.PARTS, **messages.PARTS}


def main() -> int:
    parser = argparse.ArgumentParser("python -m tools.bench", description=__doc__)
    parser.add_argument("--backend", metavar="NAME", help="by default the one that gpuinterop chooses here")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to this file")
    only = f"only the parts with this in their name; may be repeated. The parts: {', '.join(PARTS)}"
    parser.add_argument("--only", metavar="WORD", action="append", help=only)
    parser.add_argument("--quick", action="store_true", help="take few times: to see that it works")
    given = parser.parse_args()
    parts = [name for name in PARTS if any(word in name for word in given.only or [""])]
    if not parts:
        parser.error(f"expected a word of {', '.join(PARTS)}; got {', '.join(given.only)}")
    figures = []
    gc.disable()  # as `timeit` does
    faulthandler.dump_traceback_later(LIFE_S, exit=True)
    with Bench(given.backend, quick=given.quick) as bench:
        facts = _facts(bench)
        print(f"{facts['device']} ({facts['backend']}), {facts['cpu']}, {facts['cores']} cores")
        print(f"{'microseconds':31}{'median':>9}{'10 to 90 %':^22}{'99 %':>9}{'ratio':>9}")
        for name in parts:
            for figure in _measured(bench, name):
                figures.append(figure)
                _show(figure)
    if given.json:
        given.json.write_text(json.dumps({**facts, "figures": [*map(asdict, figures)]}, indent=1) + "\n")
    return int(any(figure.failed for figure in figures))


def _facts(bench: Bench) -> dict[str, Any]:
    driver = None
    with suppress(DeviceNotFoundError):
        driver = bench.vulkan
    if bench.stand_in:
        print(f"{bench.device.name} is not a device: its driver is {bench.stand_in}. The times are the library's own.")
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpuinterop": __version__,
        "backend": bench.backend.name,
        "device": bench.device.name,
        "stand_in": bench.stand_in or None,
        "versions": dict(bench.backend.versions),
        "vulkan": driver and f"{driver.name}, {driver.driver} {driver.version}",
        "python": platform.python_version(),
        "cpu": get_backend("host").device().name,
        "cores": len(os.sched_getaffinity(0)),
    }


def _measured(bench: Bench, name: str) -> Iterator[Figure]:
    """The figures of a part. If it cannot be measured, the last one says why."""
    try:
        yield from PARTS[name](bench)
    except Exception as error:  # of whatever kind: what was measured before is worth more
        yield Figure(name, "", [], *explain(error))


def _show(figure: Figure) -> None:
    print(f"\n{figure.name}" + (f", per {figure.unit}" if figure.times else ""))
    for time in figure.times:
        median, p10, p90, p99 = (number(time[part]) for part in PERCENTILES)
        ours = figure.times[0]
        ratio = f"{ours['median'] / time['median']:>9.2f}" if ours["name"] == OURS and time is not ours else ""
        print(f"  {time['name']:29}{median:>9}{p10:>9} to {p90:<9}{p99:>9}{ratio}")
    if figure.problem:
        print(f"  {figure.problem}")


if __name__ == "__main__":
    sys.exit(main())
