"""An exception out of a signal handler, at each place where one may come, in each method that calls the driver.

The places are those of `tests.strikes`: after every call of C's, at the entry of every function, and where every loop
turns back; in the backend, and in the Python's code of the bindings behind the driver's calls.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interrupted import Table, table
from tests.simulated.driver import Simulator


@pytest.fixture
def methods(simulator: Simulator) -> Iterator[Table]:
    with table("cuda", simulator) as found:
        yield found


def test_an_interrupt_leaves_nothing(methods: Table) -> None:
    """Neither an object, nor a context, nor a mode; and what is released twice goes once."""
    places = {name: methods.strike(name) for name in methods.cases}
    assert min(places.values()) > 1, places
    assert sum(places.values()) > 1000, places
