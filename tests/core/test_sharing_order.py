"""A share's order, in many interleavings of writers, readers, streams and deaths (`sharing_model`)."""

from __future__ import annotations

import os

import pytest

from .sharing_model import Mutant, problem

SEEDS = int(os.environ.get("GPUINTEROP_SEEDS", "2000"))
MUTANTS: dict[str, Mutant] = {
    "the reader waits for the newest while the writer is in": (
        "(self.page.turn.value + 1) // 2",
        "self.page.turn.value // 2",
    ),
    "the reader does not count on the control page": ("        self._slot.value = self._count\n", ""),
    "the writer does not tell that it is in": ("self.page.turn.value |= 1\n", "pass\n"),
    "the writer does not wait for its own last version": ("if self._known is self._told_by:", "if True:"),
    "they acquire without the lock": ("[page.lock for page in pages]", "[]"),
    "several are acquired one after the other": (
        "_guarded(turns, pages, entered)",
        "for pair, page in zip(turns, pages): _guarded([pair], [page], entered)",
    ),
    "an acquire takes no guard": ("one._guard.acquire()", "pass"),
    "neither end() nor the acquiring thread releases": ("one.acquiring = None  #", "pass  #"),
    "an acquire that fails stays in": ("for one in reversed(entered):", "for one in ():"),
    "an acquire takes a closed stream for a reader that has left": ("if not word.closed:", "if False:"),
    "another stream signals before the earlier one": ("self.own._wait_asked(stream, value - 1)", "pass"),
    "release publishes before it signals": (
        "        self._tell(stream)\n        self._leave()\n",
        "        self._leave()\n        self._tell(stream)\n",
    ),
    "end() and release run at once": ("system.under(self._guard, self._end, failure)", "self._end(failure)"),
    "a closed stream's work is not waited for": ("if has_passed is not None and not has_passed():", "if False:"),
    "the host signals before an earlier stream": ("if not failed and self.own.value < value - 1:", "if False:"),
    "a dead writer's timeline is not stored": ("return store(self.writer) and not comes", "return True"),
    "a dead one's timeline is stored once": ("return not awaited(word.lifetime)", "return True"),
    "a reader's timeline that was stored counts as its own": (
        "if not store(own) or",
        "if own.value < POISON and not store(own) or",
    ),
}


@pytest.mark.parametrize("first", range(0, SEEDS, 2000))
def test_no_seed_hangs_or_takes_old_bytes_for_new_ones(first: int) -> None:
    for seed in range(first, min(first + 2000, SEEDS)):
        assert (found := problem(seed)) is None, found


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_the_order_is_found(name: str) -> None:
    found = next(filter(None, (problem(seed, MUTANTS[name]) for seed in range(6000))), None)
    assert found is not None
    print(found.partition("\n")[0])
