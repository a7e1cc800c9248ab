"""What the tests of HIP alone begin with."""

from __future__ import annotations

from typing import Any

import pytest

import gpuinterop as gi

from .runtime import Runtime


@pytest.fixture(scope="session")
def hip(bindings: Any) -> Any:
    """hip-python's module."""
    return bindings


@pytest.fixture
def holds() -> dict[str, bool]:
    """What AMD's runtime does in the version under test, of what it does in some."""
    found: dict[str, bool] = gi.get_backend("hip").driver._driver.facts.holds  # type: ignore[attr-defined]
    return found


@pytest.fixture
def runtime() -> Runtime:
    """The library that the process has loaded by then, or finds by this name; on device 0, without an error."""
    found = Runtime("libamdhip64.so")
    found.ok("hipSetDevice", 0)
    found("hipGetLastError")
    return found
