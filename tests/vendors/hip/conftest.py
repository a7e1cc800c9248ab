"""What the tests of HIP alone begin with."""

from __future__ import annotations

from typing import Any

import pytest

import gpuinterop as gi


@pytest.fixture(scope="session")
def hip(bindings: Any) -> Any:
    """hip-python's module."""
    return bindings


@pytest.fixture
def holds() -> dict[str, bool]:
    """What AMD's runtime does in the version under test, of what it does in some."""
    found: dict[str, bool] = gi.get_backend("hip").driver._driver.facts.holds  # type: ignore[attr-defined]
    return found
