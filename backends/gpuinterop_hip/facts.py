"""Behaviour of AMD's runtime that depends on its version. `facts.toml` has AMD's file and line for each fact."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any, Final

_CONTENT: Final[dict[str, Any]] = tomllib.loads((files(__package__) / "facts.toml").read_text(encoding="utf-8"))

TESTED: Final[list[str]] = _CONTENT["seen"]
"""Versions whose code has run, in order; the newest is last."""


class Facts:
    """The facts of a runtime version such as ``7.1.0``. A version that has not run has the newest one's facts."""

    def __init__(self, version: str) -> None:
        release = ".".join(version.split(".")[:2])
        base = release if release in TESTED else TESTED[-1]
        self.unknown = "" if release in TESTED else f"unknown version: HIP {version} is taken for {base}"
        facts = [fact for fact in _CONTENT["fact"] if base in fact["versions"]]
        self.holds = {fact["name"]: fact in facts for fact in _CONTENT["fact"]}
        self.failures = {test: f"{fact['says']} ({fact['where']})" for fact in facts for test in fact.get("fails", ())}
