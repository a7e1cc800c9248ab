"""Exceptions at random, in all public operations."""

from tests.simulated import interrupts


def test_interrupts_at_random() -> None:
    found = interrupts.run("host", seconds=5, seed=1)
    assert found["failures"] == []
    assert found["interrupts"]
