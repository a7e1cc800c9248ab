"""Behaviour of AMD's runtime that depends on its version. `facts.toml` has AMD's file and line for each fact."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any, Final

_CONTENT: Final[dict[str, Any]] = tomllib.loads((files(__package__) / "facts.toml").read_text(encoding="utf-8"))

SEEN: Final[list[str]] = _CONTENT["seen"]
"""Versions whose code has run, in order; the newest is last."""


class Facts:
    """The facts of a runtime version such as ``7.1.0``. A version that has not run has the newest one's facts."""

    def __init__(self, version: str) -> None:
        known = ".".join(version.split(".")[:2])
        taken = known if known in SEEN else SEEN[-1]
        self.unknown = "" if known in SEEN else f"unknown version: HIP {version} is taken for {taken}"
        held = [fact for fact in _CONTENT["fact"] if taken in fact["versions"]]
        self.holds = {fact["name"]: fact in held for fact in _CONTENT["fact"]}
        self.failures = {test: f"{fact['says']} ({fact['where']})" for fact in held for test in fact.get("fails", ())}
