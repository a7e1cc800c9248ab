"""The order of shares and frames, in many interleavings of writers, readers, streams and deaths (`sharing_model`)."""

from __future__ import annotations

import os

import pytest

from .sharing_model import FrameWorld, Mutant, World, problem

SEEDS = int(os.environ.get("GPUINTEROP_SEEDS", "2000"))
MUTANTS: dict[str, Mutant] = {
    "the reader waits for the newest while the writer is in": (
        "(self.page.words[_TURN] + 1) // 2",
        "self.page.words[_TURN] // 2",
    ),
    "the reader does not count on the control page": ("self.page.slots[self._slot] = self._turn\n", "pass\n"),
    "the writer does not tell that it is in": ("self.page.words[_TURN] = 2 * self._turn - 1\n", "pass\n"),
    "the writer does not wait for its own last version": ("if self._stream is not self._signaller:", "if False:"),
    "they acquire without the page's lock": ("self.page.lock.run(self._begin_turn, known)", "self._begin_turn(known)"),
    "an acquire takes no lock": (
        '    @system.locked\n    def acquire(self, stream: Stream, left: SecondsLeft) -> None:\n        """Make',
        '    def acquire(self, stream: Stream, left: SecondsLeft) -> None:\n        """Make',
    ),
    "end() does not release": (
        "if free := self.is_free():\n            self._host_release()",
        "if free := self.is_free():\n            pass",
    ),
    "end() does not wait for the thread that acquires": (
        "if not self._release_if_free():",
        "if self._release_if_free() and False:",
    ),
    "end() releases beside a thread that acquires": ("if free := self.is_free():", "if free := True:"),
    "an acquire that fails stays in": (
        "  # the other side may already wait for the release of this turn\n            self._host_release()",
        "\n            pass",
    ),
    "an acquire takes what was stored for a dead writer's": ("if now >= POISON and", "if False and"),
    "another stream signals before the earlier one": ("self.own.wait(stream, self._turn - 1)", "pass"),
    "a closed stream's work is not waited for": ("if not passed() or", "if"),
    "the host signals before an earlier stream": ("(value < turn - 1 and", "(False and"),
    "the host does not wait for a thread that gives a wait": ("return store(word) and free", "return store(word)"),
    "a dead writer's timeline is not stored": ("return store(word) and free", "return True"),
    "a dead one's timeline is stored once": ("return not awaited(word.lifetime)", "return True"),
    "a reader's timeline that was stored counts as its own": (
        "if over := writer.unblock(own):",
        "if over := value_of(own) >= POISON or writer.unblock(own):",
    ),
}
FRAME_MUTANTS: dict[str, Mutant] = {
    "a reader does not look whether its frame is still the newest": ("if self.page.words[_TURN] == word:", "if True:"),
    "the writer takes the newest buffer": ("if buffer != newest]", "]"),
    "the writer does not look who uses a buffer": (
        "self._readers = used[self.buffer] = self._readers_of(self.buffer)",
        "self._readers = []",
    ),
    "a stream waits for a claim": ("if queues and all(turn < POISON for _, turn in self._readers):", "if queues:"),
    "a frame that was given up is published": ("        if whole:\n", "        if True:\n"),
    "a frame whose stream fails is published": (
        "self._note_release(None, whole=False)",
        "self._note_release(None, whole=True)",
    ),
    "a reader does not tell its turn": (
        "], self._replaced = self._turn, None",
        "], self._replaced = self._turn - 1, None",
    ),
    "a frame of a dead writer passes for whole": ("value_of(self.writer) % POISON > self._version", "True"),
    "a stream writes beside another that was given up": ("if self._stream is not self._signaller:", "if False:"),
    "a reader does not wait for the writer": ("return [(self.writer, self._version + 1)]", "return []"),
}


@pytest.mark.parametrize("world", [World, FrameWorld])
@pytest.mark.parametrize("first", range(0, SEEDS, 2000))
def test_no_seed_hangs_or_takes_old_bytes_for_new_ones(first: int, world: type[World]) -> None:
    for seed in range(first, min(first + 2000, SEEDS)):
        assert (found := problem(seed, world=world)) is None, found


@pytest.mark.parametrize("name", [*MUTANTS, *FRAME_MUTANTS])
def test_a_mistake_in_the_order_is_found(name: str) -> None:
    mutant, world = (MUTANTS[name], World) if name in MUTANTS else (FRAME_MUTANTS[name], FrameWorld)
    found = next(filter(None, (problem(seed, mutant, world) for seed in range(60_000))), None)
    assert found is not None
    print(found.partition("\n")[0])
