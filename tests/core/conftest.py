"""What holds for all tests of the core: a scripted backend that was given something dead fails its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .fake import VIOLATIONS


@pytest.fixture(autouse=True)
def _nothing_dead_reached_a_driver() -> Iterator[None]:
    VIOLATIONS.clear()
    yield
    found = VIOLATIONS.copy()
    VIOLATIONS.clear()
    assert found == []
