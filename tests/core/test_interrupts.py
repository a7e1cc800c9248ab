"""The interrupts strike where CPython lets signals in, and nowhere else."""

from __future__ import annotations

from gpuinterop import system

from .interrupts import strike, strikes


def test_every_place_is_struck_once() -> None:
    def call(seen: list[int]) -> None:
        looks = iter(range(3))

        def condition() -> bool:
            seen.append(next(looks))
            return len(seen) == 3

        assert system.until(condition, None)

    found = [(len(seen), struck.first) for seen, struck in strikes(list, call)]
    print(*found, sep="\n")
    assert [count for count, _ in found] == sorted(count for count, _ in found)
    assert any("loop in until" in place for _, place in found)
    assert any("behind sleep in until" in place for _, place in found)
    assert any("at until" in place for _, place in found)
    assert len({place for _, place in found}) < len(found)  # a second round is struck as well


def test_a_call_without_a_place_is_not_struck() -> None:
    struck = strike(lambda: 7, 1)
    assert (struck.first, struck.result, struck.error) == ("", 7, None)


def test_the_second_strikes_in_what_cleans_up() -> None:
    places: list[str] = []

    def call() -> None:
        try:
            system.until(lambda: True, 0)
        finally:
            places.append("cleaned")
            system.until(lambda: True, None)

    struck = strike(call, 1, 1)
    assert struck.first.startswith("at until")
    assert struck.second.startswith("at until")
    assert isinstance(struck.error, KeyboardInterrupt)
    assert places == ["cleaned"]
