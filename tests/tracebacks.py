"""How far the traceback of a user's mistake goes into the library."""

from __future__ import annotations

from types import TracebackType
from typing import Final

MOST: Final = 2
"""Frames of the library that a user has to read."""


def ours(trace: TracebackType | None) -> list[str]:
    """The library's functions in a traceback."""
    return functions(trace, "gpuinterop")


def functions(trace: TracebackType | None, package: str = "") -> list[str]:
    """The functions in a traceback, those of one package or all."""
    found = []
    while trace is not None:
        if trace.tb_frame.f_globals["__name__"].startswith(package):
            found.append(trace.tb_frame.f_code.co_qualname)
        trace = trace.tb_next
    return found
