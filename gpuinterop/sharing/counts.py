"""Counts of holders and of messages: each process writes a page of words, and the sharing process adds them up."""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import os
import threading
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np

from .. import system
from .._arguments import NoCopy
from ..errors import HandleError, InvalidArgumentError
from ..handles import EventFd, OpaqueFd
from .messages import SLOTS

_SERIAL, _HELD, _BALANCE = range(3)
"""Rows of a page: each slot's current serial (in the sharing process's page only); how often a process holds the slot;
and the slot's messages that the process has received, minus those that it has sent."""
_LOW: Final = 0xFFFFFFFF


class Memfd(NoCopy):
    """A memfd of a fixed size, of this process or another one. It stays mapped until all its words are gone."""

    def __init__(self, name: str, size: int, handle: OpaqueFd | None = None) -> None:
        self._is_new = handle is None
        if handle is None:
            handle = OpaqueFd.adopt(system.create_memfd(name, size))
        elif not system.is_fixed(handle.fd, size):
            raise HandleError(f"handle: expected {name} of {size} bytes, got another file.")
        self.handle = handle
        self._address, self._size = system.map_shared(handle.fd, size), size

    def begin_with(self, head: bytes, expected: str) -> None:
        """Write the first bytes of a memfd of this process; check those of another one's."""
        start = (ctypes.c_char * len(head)).from_address(self._address)
        if self._is_new:
            start.raw = head
        elif start.raw != head:
            raise HandleError(f"handle: expected {expected}, got another page.")

    def words(self, kind: type[Any], count: int, first: int = 0) -> Any:
        """Words of the memfd, which keep it mapped."""
        words = (kind * count).from_address(self._address + ctypes.sizeof(kind) * first)
        words.memory = self
        return words

    def __del__(self, _unmap: Callable[[int, int], object] = system.munmap) -> None:
        if address := getattr(self, "_address", 0):
            _unmap(address, self._size)


class Words(NoCopy):
    """Three rows of `SLOTS` 32-bit words that two processes map. The kernel allocates only the pages that are used."""

    def __init__(self, handle: OpaqueFd | None = None) -> None:
        memory = Memfd("gpuinterop.counts", 12 * SLOTS, handle)
        self.handle = memory.handle
        """Owned until `close`, which leaves the page mapped."""
        rows = (memory.words(ctypes.c_uint32, SLOTS, row * SLOTS) for row in range(3))
        self.rows: list[ctypes.Array[ctypes.c_uint32]] = list(rows)

    def holds(self, slot: int) -> bool:
        return bool(self.rows[_HELD][slot])

    def arrays(self) -> list[Any]:
        return [np.frombuffer(cast(Any, row), np.uint32) for row in self.rows]


class Holds(NoCopy):
    """The slots that this process holds of a sharing process, which holds its own slots in the same way."""

    counts: Words
    theirs: Words
    bell: EventFd
    """Rung when this process drops a slot."""
    ended = False

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.readers: dict[Any, None] = {}
        """Poisoned when the sharing process exits."""

    @system.locked
    def hold(self, slot: int) -> bool:
        """Hold a slot once more; return whether this process held it before. Check `is_open` afterwards."""
        held = self.counts.rows[_HELD]
        held[slot] += 1
        return held[slot] > 1

    @system.locked
    def drop(self, *slots: int) -> None:
        """Drop each slot once; ring if it was the last time."""
        held = self.counts.rows[_HELD]
        for slot in slots:
            held[slot] -= 1
        if not all(held[slot] for slot in slots):
            self.ring()

    def ring(self) -> None:
        """Make the sharing process check who holds what, and who has left the order."""
        with contextlib.suppress(OSError, HandleError):  # the process has exited
            self.bell._use(lambda fd: os.eventfd_write(fd, 1))

    @system.locked
    def move(self, slot: int, by: int) -> None:
        """Count received messages, or sent ones (negative). The caller holds the slot."""
        system.fence()  # the hold must become visible first
        self.counts.rows[_BALANCE][slot] += by

    def is_open(self, slot: int, serial: int) -> bool:
        """Whether the slot still has that serial."""
        system.full_fence()
        return self.theirs.rows[_SERIAL][slot] == serial & _LOW

    @system.locked
    def receive(self, slot: int, serial: int) -> bool:
        """Count a message and hold its slot; False if the slot has ended."""
        if self.ended:  # the sharing process does not read the counts any more
            return False
        _, held, balance = self.counts.rows
        held[slot] += 1
        if not self.is_open(slot, serial):
            held[slot] -= 1
            return False
        balance[slot] += 1
        return True


class Sums(NoCopy):
    """The sums of all processes' counts, and the slots that end because of them. The caller has a lock."""

    def __init__(self, page: Words) -> None:
        self._serials = page.rows[_SERIAL]
        self._base, self._gone = np.zeros(SLOTS, np.uint32), np.zeros(SLOTS, np.uint32)
        """Each slot's balance when it was last free, and the balance of processes that have exited."""
        self._ends = np.zeros(SLOTS, np.bool_)
        """Whether a slot ends once no process holds it."""
        self._each: dict[Words, list[Any]] = {page: page.arrays()}
        self._free, self._high = list[int](), 0

    def add(self, counts: Words) -> None:
        self._each[counts] = counts.arrays()

    def remove(self, counts: Words) -> None:
        """Drop the holds of a process that has exited. Messages that it has sent can still arrive."""
        if (rows := self._each.pop(counts, None)) is not None:
            self._gone[: self._high] += rows[_BALANCE][: self._high]

    def take(self, serial: int) -> int:
        """Take a free slot, and give it a serial."""
        if not self._free:
            if self._high == SLOTS:
                raise InvalidArgumentError("arrays", f"expected {SLOTS:,} shares at once or fewer, got one more.")
            self._free, self._high = [self._high], self._high + 1
        slot = heapq.heappop(self._free)
        self._serials[slot] = serial & _LOW
        return slot

    def close(self, slot: int) -> None:
        self._serials[slot] = 0

    def end_unheld(self, slot: int) -> None:
        """End a slot once no process holds it and all its messages have arrived."""
        self._ends[slot] = True

    def forget_surplus(self, slot: int) -> None:
        """Do not let messages that were received twice count against later ones."""
        seen, again = ([int(rows[_BALANCE][slot]) for rows in self._each.values()] for _ in range(2))
        balance = (sum(seen) + int(self._gone[slot])) & _LOW
        if seen == again and 0 < (balance - int(self._base[slot])) & _LOW < 1 << 31:
            self._base[slot] = balance

    def holders(self, slot: int) -> int:
        """How often all processes together hold a slot."""
        return sum(int(rows[_HELD][slot]) for rows in list(self._each.values()))

    def over(self) -> list[int]:
        """Free the slots that end now, and return them.

        Counts change while they are read, for example when a holder sends a slot on and drops it. Two equal readings
        show a state that existed at one time.
        """
        slots, serials = np.flatnonzero(self._ends[: self._high]), np.frombuffer(cast(Any, self._serials), np.uint32)
        closed = serials[slots] == 0  # no process receives its messages any more
        seen, again = self._seen(slots), self._seen(slots)
        over = self._unheld(again, slots, closed) & (seen == again).all(axis=(0, 1))
        slots, closed = slots[over], closed[over]
        before = serials[slots]
        serials[slots] = 0
        system.full_fence()
        seen = self._seen(slots)
        still = self._unheld(seen, slots, closed)
        serials[slots[~still]] = before[~still]  # a message was received twice
        self._ends[slots[still]], self._base[slots[still]] = False, self._balance(seen, slots)[still]
        ended: list[int] = slots[still].tolist()
        for slot in ended:
            heapq.heappush(self._free, slot)
        return ended

    def _seen(self, slots: Any) -> Any:
        """Each process's counts of the slots: the holds of all processes first, then their balances."""
        counts = [[rows[row][slots] for rows in self._each.values()] for row in (_HELD, _BALANCE)]
        return np.array(counts, np.uint32).reshape(2, len(self._each), len(slots))

    def _balance(self, seen: Any, slots: Any) -> Any:
        return self._gone[slots] + seen[1].sum(axis=0, dtype=np.uint32)

    def _unheld(self, seen: Any, slots: Any, closed: Any) -> Any:
        all_arrived = (self._balance(seen, slots) - self._base[slots]).astype(np.int32) >= 0
        return ~seen[0].any(axis=0) & (closed | all_arrived)
