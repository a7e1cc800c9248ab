"""The entry points of installed backends, and the packages that they name."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

GROUP = "gpuinterop.backends"


def installed_backends() -> dict[str, list[EntryPoint]]:
    """Return the entry points by name; several for one name if distributions disagree."""
    by_name: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=GROUP):
        rivals = by_name.setdefault(entry_point.name, [])
        if all(entry_point.value != rival.value for rival in rivals):
            rivals.append(entry_point)
    return by_name


def top_package(entry_point: EntryPoint) -> str:
    """Return the package with a backend's tables and records; empty if the entry point names none."""
    return entry_point.value.partition(":")[0].partition(".")[0]


def package_folder(package: str) -> Path | None:
    """Return the folder of a top package without importing it; None for a single module or no package."""
    spec = find_spec(package) if package else None
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next(map(Path, folders), None)
