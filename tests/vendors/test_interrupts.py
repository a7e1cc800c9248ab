"""An exception out of a signal handler, at each place where one may come, in each method that calls the driver.

The places are those of `tests.strikes`: after every call of C's, at the entry of every function, and where every loop
turns back; in the backend, and in the Python's code of the bindings behind the driver's calls. Public calls, which make
and release through these methods, are struck in `tests/core/test_interrupted_calls.py`.
"""

from __future__ import annotations

from tests.simulated.driver import Simulator

from .interrupted import table
from .table import VENDOR


def test_an_interrupt_leaves_nothing(simulator: Simulator) -> None:
    """Neither an object, nor a context or device, nor a mode; and what is released twice goes once."""
    with table(VENDOR.name, simulator) as methods:
        places = {name: methods.strike(name) for name in methods.cases}
    assert min(places.values()) > 1, places
    assert sum(places.values()) >= VENDOR.interrupts, places
