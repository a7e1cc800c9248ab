"""As of CUDA, see ``tests/cuda_backend/test_interrupts.py``: on the simulated runtime, and its second device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interrupted import Table, table
from tests.simulated.driver import Simulator


@pytest.fixture
def methods(simulator: Simulator) -> Iterator[Table]:
    with table("hip", simulator) as found:
        yield found


def test_an_interrupt_leaves_nothing(methods: Table) -> None:
    """Neither an object, nor a device, nor a mode; and what is released twice goes once."""
    places = {name: methods.strike(name) for name in methods.cases}
    assert min(places.values()) > 1, places
    assert sum(places.values()) > 800, places
