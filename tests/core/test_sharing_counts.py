"""The counts of a link, in many orders of messages, drops and deaths, which also come while they are added up."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.sharing import counts
from gpuinterop.sharing.counts import Holds, Sums, Words


def page() -> Words:
    """One process's, mapped."""
    made = Words()
    made.handle.close()
    return made


def process(sums: Sums, theirs: Words) -> Holds:
    made = Holds()
    made.counts, made.theirs = page(), theirs
    made.ring = lambda: None  # type: ignore[method-assign]
    sums.add(made.counts)
    return made


class Rows(list[Any]):
    """The counts of one process, before each look at which others go on."""

    goes_on: Any = None

    def __getitem__(self, row: Any) -> Any:
        self.goes_on()
        return super().__getitem__(row)


class World:
    """A slot, of which messages are sent to several processes, and by them; what is so stands in plain Python."""

    def __init__(self, seed: int) -> None:
        self.random, self.page, self.due, self.ended, self.closed = random.Random(seed), page(), 0, True, False
        self.sums = Sums(self.page)
        self.pace = self.random.choice([0.0, 0.05, 0.3])
        self.sender, *others = (self.process() for _ in range(4))
        self.held = dict.fromkeys(others, 0)

    def process(self) -> Holds:
        made = process(self.sums, self.page)
        rows = self.sums._each[made.counts] = Rows(self.sums._each[made.counts])
        rows.goes_on = self.beside
        return made

    def begin(self, serial: int) -> None:
        self.serial, self.slot, self.due, self.closed = serial, self.sums.take(serial), 0, False
        for _ in range(self.random.randrange(1, 3)):
            self.send(self.sender)
        self.sums.end_unheld(self.slot)
        self.ended = False

    def send(self, one: Holds) -> None:
        one.move(self.slot, -1)
        self.due += 1

    def beside(self) -> None:
        if self.random.random() < self.pace:
            self.step()

    def step(self) -> None:
        for _ in range(0 if self.ended else self.random.randrange(4)):
            one = self.random.choice(list(self.held))
            if self.due and self.random.random() < 0.6:
                assert one.receive(self.slot, self.serial) is not self.closed, "a message was refused, or came too late"
                self.due, self.held[one] = self.due - 1, self.held[one] + (not self.closed)
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
            assert self.closed or not self.due, "a message had not come"
            assert not any(self.held.values()), "a process had it"


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_what_is_held_or_due_does_not_end_and_all_else_does(first: int) -> None:
    """And what has the slot next counts anew."""
    for seed in range(first, first + 250):
        world = World(seed)
        for serial in (1, 2):
            world.begin(serial)
            assert world.slot == 0
            for _ in range(60):
                if not world.ended and world.random.random() < 0.02:
                    world.closed = True
                    world.sums.close(0)
                if len(world.held) > 1 and world.random.random() < 0.02:
                    world.dies()
                (world.step if world.random.random() < 0.5 else world.looks)()
            while not world.ended and (world.due or any(world.held.values())):
                world.step()
            if not world.ended:
                world.looks()
            assert world.ended
            assert not world.sender.receive(0, serial), "what has ended was received"


@pytest.mark.parametrize("looks", [0, 1, 2, 3])
def test_a_message_that_comes_again_while_its_slot_ends(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """It is received, and the slot stays; or it has come too late. 0: the slot ends while it is being received."""
    sums, came = Sums(own := page()), list[bool]()
    reader, slot, made = process(sums, own), sums.take(7), itertools.count(1)
    sums.end_unheld(slot)
    over = list[int]()

    def looked(slots: Any, seen: Any = sums._seen) -> Any:
        found = seen(slots)
        if next(made) == looks:
            came.append(reader.receive(slot, 7))
        return found

    def is_open(*asked: int, is_open: Any = reader.is_open) -> Any:
        found = is_open(*asked)
        over.extend(sums.over())
        return found

    if looks:
        monkeypatch.setattr(sums, "_seen", looked)
        over.extend(sums.over())
    else:
        monkeypatch.setattr(reader, "is_open", is_open)
        came.append(reader.receive(slot, 7))
    assert (over, came) == ([slot] if looks == 3 else [], [looks < 3])
    assert (own.rows[0][slot] == 7) is (looks < 3)


def test_a_process_that_drops_several_rings_if_it_had_one_of_them_once() -> None:
    sums, rung = Sums(own := page()), list[bool]()
    reader = process(sums, own)
    reader.ring = lambda: rung.append(True)  # type: ignore[method-assign]
    for slot in (0, 0, 0, 1):
        reader.hold(slot)
    reader.drop(0)
    assert not rung
    reader.drop(0, 1)
    assert rung == [True]


def test_one_slot_more_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused until one ends."""
    monkeypatch.setattr(counts, "SLOTS", 2)
    sums = Sums(page())
    assert [sums.take(1), sums.take(2)] == [0, 1]
    with pytest.raises(gi.InvalidArgumentError, match=r"\b2 shares"):
        sums.take(3)
    sums.end_unheld(1)
    assert sums.over() == [1]
    assert sums.take(3) == 1
