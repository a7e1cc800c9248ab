"""Releases that fail: no call raises the error, but a warning reports it."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager

from ..errors import GpuInteropError, LeakedResourceWarning

__all__ = ["Leaked", "leaks_raised"]


class Leaked(GpuInteropError):
    """Something was not released."""


@contextmanager
def leaks_raised() -> Generator[None, None, None]:
    """Raise `Leaked` at the end of the block if something could not be released in it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", LeakedResourceWarning)
        yield
    if leaks := [str(warning.message) for warning in told if issubclass(warning.category, LeakedResourceWarning)]:
        raise Leaked(" ".join(leaks))
