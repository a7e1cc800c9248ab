"""Facts of this machine. `capabilities.toml` derives the host's capabilities from them."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from gpuinterop import system
from gpuinterop.capabilities import Capability, Rules

from .formats import swiftshader

RULES: Final = Rules(files(__package__) / "capabilities.toml")


def table() -> list[Capability]:
    """Every cell that a rule matches. The other cells are gaps."""
    return RULES.table({"swiftshader gap": swiftshader.gap() or "", "futex": system.SYS_FUTEX is not None})
