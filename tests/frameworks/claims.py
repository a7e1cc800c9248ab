"""What the tests here claim: the rows of the tables in docs/reference/frameworks.md."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T", bound=Callable[..., object])

REQUIRED = frozenset(filter(None, os.environ.get("GPUINTEROP_REQUIRE_FRAMEWORKS", "").split(",")))
"""Frameworks, and `cuda`, whose absence is a failure."""
loaded: dict[str, str] = {}
"""Version of each framework that a test has used."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one test proves of one call.

    Attributes
    ----------
    framework : str
        Name in the table.
    call : str
        What a user writes.
    memory : tuple of str
        Where the memory lies: ``host``, ``CUDA``. The test runs once for each.
    access : str
        ``reads``, ``reads and writes``, ``copies``; ``stream`` is a row of the table of streams.
    note : str
    not_run : tuple of str
        Those of `memory` on which no recorded run has the test.
    """

    framework: str
    call: str
    memory: tuple[str, ...]
    access: str
    note: str = ""
    not_run: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The memory, as the tables have it."""
        return ", ".join(f"{one} (not run)" if one in self.not_run else one for one in self.memory)


def claim(
    framework: str,
    call: str,
    *,
    memory: Iterable[str] = ("host", "CUDA"),
    access: str,
    note: str = "",
    not_run: Iterable[str] = (),
) -> Callable[[T], T]:
    def note_it(test: T) -> T:
        test.claim = Claim(framework, call, tuple(memory), access, note, tuple(not_run))  # type: ignore[attr-defined]
        return test

    return note_it


def load(name: str, distribution: str = "") -> Any:
    """Import a framework; skip the test where it is not installed, unless it is required."""
    top = name.partition(".")[0]
    if top not in REQUIRED and name not in REQUIRED and not _is_there(name):
        pytest.skip(f"{name} is not installed")
    module = importlib.import_module(name)
    loaded[name] = metadata.version(distribution or top)
    return module


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def collect() -> list[Claim]:
    """Every claim, in the order of the modules and of the tests in each."""
    found = []
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"{__package__}.{file.stem}")
        found += [test.claim for test in vars(module).values() if hasattr(test, "claim")]
    return sorted(found, key=lambda claim: claim.framework.lower())


def tables() -> str:
    """The two tables of the page."""
    claims = collect()
    memory = _table(
        ("Framework", "Call", "Memory", "In place", "Remarks"),
        [(c.framework, f"`{c.call}`", c.where, c.access, c.note) for c in claims if c.access != "stream"],
    )
    streams = _table(
        ("Framework", "Call", "Memory", "Remarks"),
        [(c.framework, f"`{c.call}`", c.where, c.note) for c in claims if c.access == "stream"],
    )
    return f"## Memory\n\n{memory}\n\n## Streams\n\n{streams}\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))
