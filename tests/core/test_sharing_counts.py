"""The counts of a link, in many orders of messages, drops and deaths, which also come while they are added up."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gpuinterop.sharing.counts import Holds, Sums, Words

SERIAL = 7


def page() -> Words:
    """One process's, mapped."""
    made = Words()
    made.handle.close()
    return made


class Rows(list[Any]):
    """The counts of one process, before each look at which others go on."""

    goes_on: Any = None

    def __getitem__(self, row: Any) -> Any:
        self.goes_on()
        return super().__getitem__(row)


class World:
    """A tensor that is sent to several processes, and by them; what is so stands in plain Python."""

    def __init__(self, seed: int) -> None:
        self.random, self.page, self.due, self.ended = random.Random(seed), page(), 0, False
        self.sums = Sums(self.page)
        self.held: dict[Holds, int] = {}
        self.pace = 0.0
        self.sender, *others = (self.process() for _ in range(4))
        self.held = dict.fromkeys(others, 0)
        self.pace = self.random.choice([0.0, 0.05, 0.3])
        self.slot = self.sums.take()
        self.sums.open(self.slot, SERIAL)
        for _ in range(self.random.randrange(1, 3)):
            self.send(self.sender)
        self.sums.end_unheld(self.slot)

    def process(self) -> Holds:
        made = Holds()
        made.counts, made.theirs = page(), self.page
        made.ring = lambda: None  # type: ignore[method-assign]
        self.sums.add(made.counts)
        rows = self.sums._each[made.counts] = Rows(self.sums._each[made.counts])
        rows.goes_on = self.beside
        return made

    def send(self, one: Holds) -> None:
        one.move(self.slot, -1)
        self.due += 1

    def beside(self) -> None:
        """What comes while one look is under way: often nothing, seldom much."""
        if self.random.random() < self.pace:
            self.step()

    def step(self) -> None:
        if self.ended or not self.held:
            return
        for _ in range(self.random.randrange(4)):
            one = self.random.choice(list(self.held))
            if self.due and self.random.random() < 0.6:
                assert one.receive(self.slot, SERIAL), "a message was refused"
                self.due, self.held[one] = self.due - 1, self.held[one] + 1
            elif self.held[one] and self.random.random() < 0.2:
                self.send(one)
            elif self.held[one]:
                one.drop(self.slot)
                self.held[one] -= 1

    def dies(self) -> None:
        one = self.random.choice(list(self.held))
        del self.held[one]
        self.sums.remove(one.counts)

    def looks(self) -> None:
        if self.sums.over():
            self.ended = True
            assert not self.due, "a message had not come"
            assert not any(self.held.values()), "a process had it"


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_what_is_held_or_due_does_not_end_and_all_else_does(first: int) -> None:
    for seed in range(first, first + 250):
        world = World(seed)
        for _ in range(60):
            if world.ended:
                break
            if len(world.held) > 1 and world.random.random() < 0.02:
                world.dies()
            (world.step if world.random.random() < 0.5 else world.looks)()
        while not world.ended and (world.due or any(world.held.values())):
            world.step()
        world.held.clear()
        world.looks()
        assert world.ended
        assert world.sums.take() == world.slot
        assert not world.sender.receive(world.slot, SERIAL), "what has ended was received"


def test_a_slot_that_was_closed_with_a_message_on_its_way_counts_anew() -> None:
    sums = Sums(own := page())
    sender, reader = Holds(), Holds()
    for one in (sender, reader):
        one.counts, one.theirs, one.ring = page(), own, lambda: None  # type: ignore[method-assign]
        sums.add(one.counts)
    for serial in (1, 2):
        slot = sums.take()
        sums.open(slot, serial)
        sender.move(slot, -1)
        sums.end_unheld(slot)
        assert sums.over() == []
        if serial == 1:
            sums.close(slot)
            assert not reader.receive(slot, serial)
        else:
            assert reader.receive(slot, serial)
            assert sums.over() == []
            reader.drop(slot)
        assert sums.over() == [slot]
