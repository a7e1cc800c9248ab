"""The interrupts strike where CPython lets signals in: all of them, each once."""

from __future__ import annotations

from collections.abc import Iterator

from gpuinterop import system
from tests.strikes import OURS, Strikes


def wait(looks: Iterator[bool]) -> None:
    assert system.until(lambda: next(looks), None)


def places(rounds: int) -> list[str]:
    strikes, found = Strikes(OURS), list[str]()
    count = strikes.everywhere(
        lambda: iter([False] * rounds + [True]), wait, lambda struck, *_: found.append(strikes.where)
    )
    assert count == len(found) - 1
    assert found.pop() == ""  # the last is not struck
    return found


def test_every_place_is_struck_once() -> None:
    """Each round of a loop has as many: behind its C call, at the entry of a generator, where it turns back."""
    first, second, third = (places(rounds) for rounds in (1, 2, 3))
    assert len(third) - len(second) == len(second) - len(first) >= 3
    assert set(third) == set(second)


def test_the_second_strikes_in_what_cleans_up() -> None:
    strikes = Strikes(OURS, 1)

    def call() -> None:
        try:
            wait(iter([True]))
        finally:
            wait(iter([True]))

    assert strikes.at(1, call) == (True, None)
    assert strikes.where.count(".py:") == 2


def test_a_call_without_a_place_is_not_struck() -> None:
    assert Strikes(OURS).at(1, int) == (False, 0)
