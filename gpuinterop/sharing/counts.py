"""Who holds what: pages of words that each process writes for itself, and their sums in the process that shares."""

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
from .descriptor import SLOTS

_SERIAL, _HELD, _BALANCE = range(3)
"""Rows of a page: the serial of what each slot stands for now, in the sharing process's page; how often a process holds
it; and the messages of it that the process has received, less those sent."""
_LOW: Final = 0xFFFFFFFF


class Memfd(NoCopy):
    """A memfd of a fixed size: made here, or another process's. It stays mapped until all its words are gone."""

    def __init__(self, name: str, size: int, handle: OpaqueFd | None = None) -> None:
        if handle is None:
            handle = OpaqueFd.adopt(system.create_memfd(name, size))
        elif not system.is_fixed(handle.fd, size):
            raise HandleError(f"handle: expected {name} of {size} bytes, got another file.")
        self.handle = handle
        self._address, self._size = system.map_shared(handle.fd, size), size

    def words(self, kind: type[Any], count: int, first: int = 0) -> Any:
        """Words of it, which keep it mapped."""
        found = (kind * count).from_address(self._address + ctypes.sizeof(kind) * first)
        found.memory = self
        return found

    def __del__(self, _unmap: Callable[[int, int], object] = system.munmap) -> None:
        if address := getattr(self, "_address", 0):
            _unmap(address, self._size)


class Words(NoCopy):
    """Three rows of `SLOTS` 32-bit words, which two processes map. The kernel gives memory to what is used."""

    def __init__(self, handle: OpaqueFd | None = None) -> None:
        memory = Memfd("gpuinterop.counts", 12 * SLOTS, handle)
        self.handle = memory.handle
        """Owned until `close`, which leaves the page mapped."""
        self.rows: list[ctypes.Array[ctypes.c_uint32]] = [
            memory.words(ctypes.c_uint32, SLOTS, row * SLOTS) for row in range(3)
        ]

    def holds(self, slot: int) -> bool:
        """Whether the process holds a slot."""
        return bool(self.rows[_HELD][slot])

    def arrays(self) -> list[Any]:
        """The rows, for NumPy."""
        return [np.frombuffer(cast(Any, row), np.uint32) for row in self.rows]


class Holds(NoCopy):
    """What this process holds of one that shares; by itself, of its own."""

    counts: Words
    theirs: Words
    """The page of the process that shares."""
    bell: EventFd
    """Rung when this process holds something no more."""
    ended = False

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.readers: dict[Any, None] = {}
        """Told when the process that shares ends."""

    @system.locked
    def hold(self, slot: int) -> bool:
        """Hold what a slot stands for, once more; return whether this process held it. Look at `stands` then."""
        held = self.counts.rows[_HELD]
        held[slot] += 1
        return held[slot] > 1

    @system.locked
    def drop(self, *slots: int) -> None:
        """Hold each once less, and ring where it was the last time."""
        held = self.counts.rows[_HELD]
        for slot in slots:
            held[slot] -= 1
        if not all(held[slot] for slot in slots):
            self.ring()

    def ring(self) -> None:
        """Have the process that shares look who holds what, and who has left the order."""
        with contextlib.suppress(OSError, HandleError):  # it has ended
            self.bell._use(lambda fd: os.eventfd_write(fd, 1))

    @system.locked
    def move(self, slot: int, by: int) -> None:
        """Count messages that have come, or are sent (less than 0), by one who holds the slot."""
        system.fence()  # who holds it is to be seen first
        self.counts.rows[_BALANCE][slot] += by

    def stands(self, slot: int, serial: int) -> bool:
        """Whether the slot stands for that serial."""
        system.full_fence()
        return self.theirs.rows[_SERIAL][slot] == serial & _LOW

    @system.locked
    def receive(self, slot: int, serial: int) -> bool:
        """Hold what a message brings, and count the message; False if it has come too late."""
        if self.ended:  # what it holds is not looked at any more
            return False
        _, held, balance = self.counts.rows
        held[slot] += 1
        if not self.stands(slot, serial):
            held[slot] -= 1
            return False
        balance[slot] += 1
        return True


class Sums(NoCopy):
    """What all processes hold of this one, and so what ends. The caller has a lock."""

    def __init__(self, page: Words) -> None:
        self._serials = page.rows[_SERIAL]
        self._base, self._gone = np.zeros(SLOTS, np.uint32), np.zeros(SLOTS, np.uint32)
        """The balance at which each slot was free, and that of processes that have ended."""
        self._ends = np.zeros(SLOTS, np.bool_)
        """Whether what a slot stands for ends once nobody holds it."""
        self._each: dict[Words, list[Any]] = {page: page.arrays()}
        self._free: list[int] = []
        self._high = 0

    def add(self, counts: Words) -> None:
        """Add up the counts of one more process."""
        self._each[counts] = counts.arrays()

    def remove(self, counts: Words) -> None:
        """Forget what a process held that has ended. The messages that it has sent may still come."""
        if (found := self._each.pop(counts, None)) is not None:
            self._gone[: self._high] += found[_BALANCE][: self._high]

    def take(self, serial: int) -> int:
        """A slot that was free, and stands for a serial now."""
        if not self._free:
            if self._high == SLOTS:
                raise InvalidArgumentError("arrays", f"expected {SLOTS:,} shares at once or fewer, got one more.")
            self._free, self._high = [self._high], self._high + 1
        slot = heapq.heappop(self._free)
        self._serials[slot] = serial & _LOW
        return slot

    def close(self, slot: int) -> None:
        """Have a slot stand for nothing."""
        self._serials[slot] = 0

    def end_unheld(self, slot: int) -> None:
        """Have what a slot stands for end once nobody holds it and all its messages have come."""
        self._ends[slot] = True

    def forget_surplus(self, slot: int) -> None:
        """Have messages that were received twice not stand for those that are sent from now on."""
        seen, again = ([int(one[_BALANCE][slot]) for one in self._each.values()] for _ in range(2))
        balance = (sum(seen) + int(self._gone[slot])) & _LOW
        if seen == again and 0 < (balance - int(self._base[slot])) & _LOW < 1 << 31:
            self._base[slot] = balance

    def holders(self, slot: int) -> int:
        """How often a slot is held, by all processes."""
        return sum(int(one[_HELD][slot]) for one in list(self._each.values()))

    def over(self) -> list[int]:
        """Free the slots that end now, and return them.

        Processes count while they are looked at: one that holds a slot may send it on and drop it. Two looks that find
        the same have seen what was so at one time.
        """
        slots, serials = np.flatnonzero(self._ends[: self._high]), np.frombuffer(cast(Any, self._serials), np.uint32)
        closed = serials[slots] == 0  # its messages are received no more
        seen, again = self._seen(slots), self._seen(slots)
        over = self._unheld(again, slots, closed) & (seen == again).all(axis=(0, 1))
        slots, closed = slots[over], closed[over]
        before = serials[slots]
        serials[slots] = 0
        system.full_fence()
        seen = self._seen(slots)
        still = self._unheld(seen, slots, closed)
        serials[slots[~still]] = before[~still]  # a message has come twice
        found = slots[still]
        self._ends[found], self._base[found] = False, self._balance(seen, slots)[still]
        for slot in found.tolist():
            heapq.heappush(self._free, slot)
        return cast("list[int]", found.tolist())

    def _seen(self, slots: Any) -> Any:
        """What each process says of the slots: the holds of all first, then their balances."""
        rows = [[one[row][slots] for one in self._each.values()] for row in (_HELD, _BALANCE)]
        return np.array(rows, np.uint32).reshape(2, len(self._each), len(slots))

    def _balance(self, seen: Any, slots: Any) -> Any:
        return self._gone[slots] + seen[1].sum(axis=0, dtype=np.uint32)

    def _unheld(self, seen: Any, slots: Any, closed: Any) -> Any:
        all_came = (self._balance(seen, slots) - self._base[slots]).astype(np.int32) >= 0
        return ~seen[0].any(axis=0) & (closed | all_came)
