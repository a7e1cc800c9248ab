"""Where recorded runs are kept."""

from __future__ import annotations

import importlib.util
from importlib.metadata import entry_points
from pathlib import Path

from .._core.registry import GROUP
from ..capabilities import VerifiedRun, read_verified
from ..errors import BackendUnavailableError

__all__ = ["EXPORTERS", "need", "recorded_runs", "verified_file"]

EXPORTERS = Path(__file__).parents[1] / "exporters" / "verified.toml"
"""What the Vulkan drivers have shown."""


def recorded_runs() -> dict[str, list[VerifiedRun]]:
    """Every recorded run, by the backend's name, or as the Vulkan drivers'."""
    runs = {entry.name: read_verified(verified_file(entry.name)) for entry in entry_points(group=GROUP)}
    return {**runs, "Vulkan driver": read_verified(EXPORTERS)}


def verified_file(backend: str) -> Path:
    """Return where a backend keeps its recorded runs: beside its package's code.

    Parameters
    ----------
    backend : str
        The name of an installed backend.
    """
    (entry_point,) = set(entry_points(group=GROUP, name=backend))
    spec = importlib.util.find_spec(entry_point.module.partition(".")[0])
    assert spec is not None  # it was imported to get here
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "verified.toml"


def need(module: str, what: str) -> None:
    """Raise `BackendUnavailableError` where a module of the extra 'test' is not installed, which `what` needs."""
    if importlib.util.find_spec(module) is None:
        raise BackendUnavailableError(
            f"{what} needs {module.replace('_', '-')}.", fix="Install gpuinterop with its extra 'test'."
        )
