"""Exceptions at random, in all public operations."""

from tests.simulated import interrupts
from tests.simulated.driver import Simulator

from .table import VENDOR


def test_interrupts_at_random(simulator: Simulator) -> None:
    found = interrupts.run(VENDOR.name, seconds=5, seed=1)
    assert found["failures"] == []
    assert found["interrupts"]
