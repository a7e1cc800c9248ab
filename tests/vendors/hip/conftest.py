"""What the tests of HIP alone begin with."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def hip(bindings: Any) -> Any:
    """hip-python's module."""
    return bindings
