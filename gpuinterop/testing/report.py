"""``verified.toml``: what runs have shown, written by a command and never by hand."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..capabilities import Cell, VerifiedRun, read_verified

__all__ = ["format_runs", "merge_runs", "write_report"]

_HEADER = """\
# What runs of the conformance suite have shown on real hardware: `gpuinterop selftest --report`.
# Only cells named here are called SUPPORTED. Written by that command; do not edit.
"""


def merge_runs(runs: Iterable[VerifiedRun], fresh: Iterable[VerifiedRun]) -> list[VerifiedRun]:
    """`runs` with `fresh` added; a fresh run replaces an earlier one of the same platform and device."""
    fresh = list(fresh)
    replaced = {(run.platform, run.device) for run in fresh}
    return [run for run in runs if (run.platform, run.device) not in replaced] + fresh


def format_runs(runs: Iterable[VerifiedRun]) -> str:
    """The text of a ``verified.toml``; `gpuinterop.capabilities.read_verified` reads it back."""
    parts = [_HEADER]
    for run in runs:
        lines = [
            "[[run]]",
            f"date = {_string(run.date)}",
            f"platform = {_string(run.platform)}",
            f"device = {_string(run.device)}",
            "cells = [",
            *(f"    {_string(text)}," for text in sorted(map(str, run.cells))),
            "]",
            "[run.versions]",
            *(f"{_string(name)} = {_string(version)}" for name, version in sorted(run.versions.items())),
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


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


def _string(text: str) -> str:
    escaped = "".join(
        {'"': '\\"', "\\": "\\\\"}.get(letter, letter) if letter.isprintable() else f"\\u{ord(letter):04x}"
        for letter in text
    )
    return f'"{escaped}"'
