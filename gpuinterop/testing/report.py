"""``verified.toml``: what runs have shown, written by a command and never by hand."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..capabilities import Cell, VerifiedRun, read_verified

__all__ = ["format_runs", "merge_runs", "write_report"]

_HEADER = """\
# What runs of the conformance suite have shown, on the devices and with the drivers named. Only cells named here are
# called SUPPORTED. Written by `gpuinterop selftest --report`; do not edit.
"""


def merge_runs(runs: Iterable[VerifiedRun], fresh: Iterable[VerifiedRun]) -> list[VerifiedRun]:
    """`runs` with `fresh` added; a fresh run replaces an earlier one of the same platform and device."""
    fresh = list(fresh)
    replaced = {(run.platform, run.device) for run in fresh}
    return [run for run in runs if (run.platform, run.device) not in replaced] + fresh


def format_runs(runs: Iterable[VerifiedRun]) -> str:
    """The text of a ``verified.toml``; `gpuinterop.capabilities.read_verified` reads it back."""
    import tomli_w

    entries = [
        {
            "date": run.date,
            "platform": run.platform,
            "device": run.device,
            "cells": sorted(map(str, run.cells)),
            "versions": dict(sorted(run.versions.items())),
        }
        for run in runs
    ]
    return _HEADER + "\n" + tomli_w.dumps({"run": entries})


def write_report(path: str | os.PathLike[str], fresh: Iterable[VerifiedRun]) -> None:
    """Add runs to a file; see `merge_runs`. The file is replaced in one step."""
    target = Path(path)
    text = format_runs(merge_runs(read_verified(target), fresh))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(target)


def make_run(
    *, date: str, platform: str, device: str, versions: Mapping[str, str], cells: Iterable[Cell]
) -> VerifiedRun:
    """One run, its cells sorted out."""
    return VerifiedRun(date=date, platform=platform, device=device, versions=dict(versions), cells=frozenset(cells))
