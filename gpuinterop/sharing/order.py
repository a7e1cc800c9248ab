"""The order of one writer and many readers, of shares and of frames, on timelines that gpuinterop makes.

The sharing process has a control page, a sealed memfd that each reader maps. Its words have 8 bytes::

    0      magic GIPORDER
    1      version 1
    2      turn: 2v if value v of the writer's timeline publishes the newest version; 2v - 1 while it writes that one.
           The top byte is the number of the version's buffer. The lower four bytes are a futex
    4      1 if a thread may sleep until `turn` changes
    8 ...  for each buffer a row with one slot per reader: the last turn in which the reader uses the buffer
    ...    for frames, the number of the frame in each buffer

The writer's timeline reaches n + 1 when version n is complete; a reader's reaches k after its k-th release.

A reader that acquires stores its turn in its slot. It waits for the newest version, or for the next one while the
writer is writing. The writer that acquires makes `turn` odd, reads the slots, and waits for the last version and for
the readers that have not released. Both hold the page's lock meanwhile, which the kernel frees if its holder exits. A
release needs no lock. Each store is one word, so if a process exits between two stores, the others can continue: they
then add `POISON` to the value of its timeline.

**Frames** (`FrameWriter`, `FrameReader`) use several buffers and no lock. A reader claims the newest buffer: it writes
`POISON` into its slot there, then checks that the buffer is still the newest. The writer publishes another buffer
first, then checks the slots of the buffers that it may write next. So at least one of the two sees the other. When a
reader reads its claimed buffer, it replaces the claim with its turn, which the writer's stream can wait for: all work
before that turn is on streams already. The writer never takes the newest buffer, and `turn` is never odd.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Self, cast
from weakref import WeakSet

from .. import system, timeline
from .._arguments import NoCopy, check_timeout
from .._core.lifetime import after_fork
from .._core.own_timeline import refuse_capture
from .._core.semaphore import ExternalSemaphore
from .._core.stream import Stream
from .._core.streams import CapturedError, KnownStream, awaited, fail_waits
from ..errors import GpuInteropError, InvalidArgumentError, PeerError, ResourceClosedError, SemaphoreTimeoutError, again
from ..handles import OpaqueFd, Timeline
from .counts import Memfd
from .link import ENDED, SecondsLeft
from .loop import loop

OwnTimeline = ExternalSemaphore[Timeline]

_HEAD: Final = b"GIPORDER" + (1).to_bytes(8, "little")
_TURN, _ASLEEP, _SLOTS = 2, 4, 8
_BUFFER: Final = 56
"""Lowest bit of the buffer's number in `turn`."""
MAX_BUFFERS: Final = 256
SLOTS: Final = system.PAGE // 8 - _SLOTS
POISON: Final = 1 << 62
"""What other processes add to the value of a timeline whose process has exited, so that all waits for it pass."""
_NO_LIMIT: Final = system.seconds_left(None)
DEPARTED: Final = 2**64 - 1
"""A reader's slot after the reader has left the order."""


class ControlPage(NoCopy):
    """The control page, of this process or of another one, whose handle it owns. It stays mapped while words exist."""

    def __init__(self, handle: OpaqueFd | None = None, buffers: int = 1) -> None:
        memory = Memfd("gpuinterop.control", system.PAGE * buffers, handle)
        self.handle, self.words = memory.handle, memory.words(ctypes.c_uint64, 5)
        self.slots = memory.words(ctypes.c_uint64, SLOTS * buffers, _SLOTS)
        if buffers > 1:
            self.numbers = memory.words(ctypes.c_uint64, buffers, _SLOTS + SLOTS * buffers)
        self._futex = ctypes.addressof(self.words) + 8 * _TURN
        self.wake = system.futex_waker(self._futex)
        memory.begin_with(_HEAD, "the control page of a share of this version")
        self.lock = timeline.Lock(self.handle.fd, "a share's control page")

    def newest(self) -> tuple[int, int]:
        """The newest version, and the word `turn` that contains it."""
        word = self.words[_TURN]
        return (word & (1 << _BUFFER) - 1) // 2 - 1, word

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleep until `turn` may differ from the word that the caller saw."""
        self.words[_ASLEEP] = 1
        system.full_fence()  # either `set_turn` sees the flag, or this sees the new version
        if self.words[_TURN] == seen:
            system.futex_wait(self._futex, seen & 0xFFFFFFFF, seconds)

    def set_turn(self, turn: int, buffer: int) -> None:
        if asleep := self.words[_ASLEEP]:
            self.words[_ASLEEP] = 0  # first: a thread that sets it later sees the version, or is seen below
        self.words[_TURN] = 2 * turn | buffer << _BUFFER
        system.full_fence()
        if asleep or self.words[_ASLEEP]:
            self.wake()

    def close(self) -> None:
        self.lock.close()  # first, because it borrows the handle's descriptor
        self.handle.close()

    def __del__(self) -> None:  # for a reader that had not released when the writer exited
        if hasattr(self, "lock"):
            self.close()


class Side(NoCopy):
    """One side's acquires and releases, alternately and by one thread at a time. Any thread can end it at any time."""

    def __init__(self, page: ControlPage, writer: OwnTimeline, own: OwnTimeline, label: str) -> None:
        self.page, self.writer, self.label = page, writer, label
        self.own = own
        """The timeline that a release signals: it reaches n when turn n is over."""
        own.lifetime.warns = writer.lifetime.warns = False  # the share or the attachment gives the warning
        writer.lifetime.unsignalled = unsignalled
        self.failure: GpuInteropError | None = None
        """Why this side does not acquire any more. The code that sets it then checks `is_free`."""
        self.inside = False
        self._turn = 0  # the number of the last turn
        self.abandoned = 0  # the turn whose `with` an interrupt has ended
        _sides.add(self)
        self._stream: KnownStream | None = None
        """The stream that acquired or released last."""
        self._signaller: KnownStream | None = None
        """The stream that has the last signal; None if the host signals."""
        self._lock = threading.RLock()
        """Held by a thread that acquires or releases, until everything is enqueued on the stream."""

    @system.locked
    def acquire(self, stream: Stream, left: SecondsLeft) -> None:
        """Make the stream, or with a limit the calling thread, wait for the other side."""
        self._acquire(stream, stream._known_as(), left)

    def _acquire(self, stream: Stream, known: KnownStream, left: SecondsLeft) -> None:
        self._check(known, enters=True)
        try:
            for word, value in self._enter(known):
                self._wait(stream, word, value, left)
        except BaseException:  # the other side may already wait for the release of this turn
            self._host_release()
            raise

    def _enter(self, known: KnownStream) -> Sequence[tuple[OwnTimeline, int]]:
        return self.page.lock.run(self._begin_turn, known)

    def _begin_turn(self, known: KnownStream) -> Sequence[tuple[OwnTimeline, int]]:
        self._turn, self._stream, self.inside = self._turn + 1, known, True
        return self._note_acquire()

    @system.locked
    def release(self, stream: Stream, *, whole: bool = True) -> None:
        """Release after the stream's work so far. Only a `whole` frame is published."""
        known = stream._known_as()
        self._check(known, enters=False)
        self._stream = known
        try:
            if known is not self._signaller and value_of(self.own) < self._turn - 1:
                self.own.wait(stream, self._turn - 1)  # values must not decrease
            self.own.signal(stream, self._turn)
            self._note_release(known, whole)
        except BaseException:  # an interrupt can strike after the signal
            self._host_release()
            raise

    def end(self, failure: GpuInteropError) -> None:
        """Release after the work of the stream that acquired; do not acquire again."""
        self.failure = self.failure or failure
        if not self._release_if_free():
            loop().repeat(self._release_if_free)

    def drop(self, turn: int) -> bool:
        """Release a turn that an interrupt has left open; False while another thread acquires or releases."""
        return system.under(self._lock, self._drop, turn, limit=0)

    def _drop(self, turn: int) -> bool:
        if (free := system.holds(self._lock)) and self.inside and self._turn == turn:
            self._host_release()
        return free

    def is_over(self) -> bool:
        """Whether this side, which has ended, has released, and its stream has executed the release."""
        return self.is_free() and value_of(self.own) >= self._turn

    def is_free(self) -> bool:
        """Whether no other thread acquires or releases. If `failure` is set, none will."""
        return system.under(self._lock, system.holds, self._lock, limit=0)

    def unblock(self, word: OwnTimeline) -> bool:
        """Let streams continue that wait for a side which has left or exited; False while more waits can follow."""
        free = self.is_free()  # first
        return store(word) and free

    def _check(self, known: KnownStream, *, enters: bool) -> None:
        if self.failure is not None:
            raise again(self.failure)
        if enters and self.inside and self.abandoned == self._turn:
            self._host_release()
        if self.inside is enters:
            this, other = ("acquire", "release") if enters else ("release", "acquire")
            way_out = f"call {other}, or end the last with, first"
            raise InvalidArgumentError("order", f"expected {other} of {self.label}, got {this}; {way_out}.")
        if known.is_capturing():
            refuse_capture(known, self.label)

    @abstractmethod
    def _note_acquire(self) -> Sequence[tuple[OwnTimeline, int]]:
        """Note on the control page that this side acquires; return what its stream must wait for."""

    def _wait(self, stream: Stream, word: OwnTimeline, value: int, left: SecondsLeft) -> None:
        if (now := value_of(word)) < value:
            if left is not _NO_LIMIT or _is_here(stream):
                now = self._wait_here(word, value, left)
            else:
                word.wait(stream, value)
        if now >= POISON and word is self.writer:  # another process may have noticed the exit first
            self.failure = self.failure or PeerError(ENDED)
            raise again(self.failure)
        system.fence()  # later loads must follow the load of the value

    def _wait_here(self, word: OwnTimeline, value: int, left: SecondsLeft) -> int:
        """Wait in the calling thread; check now and then whether another thread has ended this side."""
        while (now := value_of(word)) < value:
            if self.failure is not None:
                raise again(self.failure)
            if (rest := left()) == 0:
                who = "the writer" if word is self.writer else _name(word)
                reason = f"{who} is between acquire and release, or its stream is still working."
                raise SemaphoreTimeoutError(f"{self.label} was not free in time: {reason}")
            with contextlib.suppress(SemaphoreTimeoutError):
                word.host_wait(value, timeout=system.SLICE if rest is None else min(system.SLICE, rest))
        return now

    def _note_release(self, signaller: KnownStream | None, whole: bool) -> None:
        """Note the release, after the stream has the signal."""
        self._signaller, self.inside = signaller, False

    def _release_if_free(self) -> bool:
        """Release, unless another thread is acquiring or releasing; that thread may be waiting."""
        if free := self.is_free():
            self._host_release()
        return free

    def _host_release(self) -> None:
        """Release from the host: the stream may be closed, another thread's, or have failed and skip signals."""
        before, turn = self._signaller, self._turn
        if (stream := self._stream if self.inside else before) is None:
            return
        signal = partial(self._host_signal, turn, _end_of(stream), before)
        loop().repeat(signal)  # first, because another interrupt can strike
        self._note_release(None, whole=False)
        signal()

    def _host_signal(self, turn: int, passed: Callable[[], bool], before: KnownStream | None) -> bool:
        """Signal after a stream's work so far, and after the signal or failure of the stream `before`."""
        try:
            if (value := value_of(self.own)) < turn:
                if not passed() or (value < turn - 1 and (before is None or not before.is_idle())):
                    return False
                self.own.host_signal(turn)
        except GpuInteropError:
            return self.own.closed
        return True


def _end_of(stream: KnownStream) -> Callable[[], bool]:
    """Return a function that reports whether the stream has done all of its work so far."""
    with contextlib.suppress(CapturedError):
        if not stream.of_other_thread and (fence := stream.fence()) is not None:
            return fence.is_reached
    return stream.is_idle


class Writer(Side):
    """The side of the sharing process."""

    buffer = 0
    """The buffer that is written."""

    def __init__(self, page: ControlPage, own: OwnTimeline, label: str) -> None:
        super().__init__(page, own, own, label)
        self.reader_timelines: dict[int, OwnTimeline] = {}
        """The timeline of each reader in the order, by its slot."""
        self.thread = 0

    @property
    def version(self) -> int:
        return self.page.newest()[0]

    def publish_first(self, stream: Stream | None) -> None:
        """Publish version 0, after the stream's queued work."""
        self._turn = 1
        self.own.host_signal(1) if stream is None else self.own.signal(stream, 1)
        self._note_release(None if stream is None else stream._known_as(), whole=False)

    def _note_acquire(self) -> Sequence[tuple[OwnTimeline, int]]:
        self.thread = threading.get_ident()
        waits = self._take()
        if self._stream is not self._signaller:
            waits.append((self.own, self._turn - 1))  # another stream may have signalled the last version
        return waits

    def _take(self) -> list[tuple[OwnTimeline, int]]:
        """Take a buffer to write; return the releases to wait for."""
        self.page.words[_TURN] = 2 * self._turn - 1
        return self._readers_of(0)

    def _readers_of(self, buffer: int) -> list[tuple[OwnTimeline, int]]:
        """The readers that have not released a buffer, and the turn whose release each still owes."""
        slots, first = self.page.slots, SLOTS * buffer
        readers = []
        for slot, lease in self.reader_timelines.copy().items():
            turn = min(slots[first + slot], POISON)
            if slots[slot] != DEPARTED and value_of(lease) < turn:  # a reader that has left has released
                readers.append((lease, turn))
        system.fence()  # later loads must follow the loads of the values
        return readers

    def _note_release(self, signaller: KnownStream | None, whole: bool) -> None:
        self.page.set_turn(self._turn, self.buffer)
        self._signaller, self.inside = signaller, False


class FrameWriter(Writer):
    """The side that publishes frames, each in a buffer that no reader uses."""

    def __init__(self, page: ControlPage, own: OwnTimeline, label: str, buffers: int) -> None:
        super().__init__(page, own, label)
        self._written, self._warned = [0] * buffers, False
        """The turn in which each buffer was last published; whether the user knows that there are too few."""
        self._readers: list[tuple[OwnTimeline, int]] = []
        """The readers of `buffer`, whose releases the stream waits for."""

    _enter = Side._begin_turn  # frames need no lock

    @system.locked
    def acquire(self, stream: Stream, left: SecondsLeft) -> None:
        """Acquire a buffer, `buffer`: a free one, or one that its readers' streams will release."""
        known, queues = stream._known_as(), left is _NO_LIMIT and not _is_here(stream)
        if self.inside:
            self._check(known, enters=True)
        if self._choose_buffer(queues=queues) is not None:
            self._check(known, enters=True)
            self._wait_for_buffer(left, queues=queues)
        self._acquire(stream, known, left)

    def _wait_for_buffer(self, left: SecondsLeft, *, queues: bool) -> None:
        """Block the calling thread until a buffer is free, or a stream can wait for one."""
        for pause in system.pauses():
            if (holders := self._choose_buffer(queues=queues)) is None:
                return
            if self.failure is not None:
                raise again(self.failure)
            if left() == 0:
                raise SemaphoreTimeoutError(f"{self.label} had no free slot in time; in use by {holders}.")
            time.sleep(pause)

    def _choose_buffer(self, *, queues: bool) -> str | None:
        """Take a free buffer, or with `queues` one that the stream can wait for; else return the holders' names."""
        newest = self.page.words[_TURN] >> _BUFFER
        system.full_fence()  # a reader that claims a buffer after this sees that it is not the newest
        others = [buffer for buffer in range(len(self._written)) if buffer != newest]
        others.sort(key=self._written.__getitem__)
        used: dict[int, list[tuple[OwnTimeline, int]]] = {}
        for self.buffer in others:
            self._readers = used[self.buffer] = self._readers_of(self.buffer)
            if not self._readers:
                return None
        holders = ", ".join(dict.fromkeys(_name(lease) for uses in used.values() for lease, _ in uses))
        if not self._warned:
            self._warned = True
            problem = f"{self.label} has {len(others) + 1} slots, all in use; the writer waits for {holders}."
            way_out = "Publish with more slots: the readers that may read at once + 2."
            warnings.warn(f"{problem} {way_out}", RuntimeWarning, stacklevel=2)
        for self.buffer, self._readers in reversed(used.items()):  # a slow reader holds an old one
            if queues and all(turn < POISON for _, turn in self._readers):  # a stream cannot wait for a claim
                return None
        return holders

    def _take(self) -> list[tuple[OwnTimeline, int]]:
        return self._readers  # a reader that has claimed the buffer since then sees that it is not the newest

    def _note_release(self, signaller: KnownStream | None, whole: bool) -> None:
        if whole:
            self._written[self.buffer] = self._turn
            self.page.numbers[self.buffer] = self.page.numbers[self.page.words[_TURN] >> _BUFFER] + 1
            super()._note_release(signaller, whole)
        self._signaller, self.inside = signaller, False


class Reader(Side):
    """One attachment's side."""

    def __init__(
        self,
        page: ControlPage,
        writer: OwnTimeline,
        own: OwnTimeline,
        slot: int,
        label: str,
        lender: Writer | None = None,
    ) -> None:
        super().__init__(page, writer, own, label)
        if slot >= SLOTS:
            raise PeerError(f"expected the number of a slot, got {slot!r}.")
        self._slot, self._version, self._lender = slot, 0, lender
        """The lender is the writer, if it is in this process. It owns and closes the words and the page."""

    @property
    def version(self) -> int:
        return self._version if self.inside else self.page.newest()[0]

    def _note_acquire(self) -> Sequence[tuple[OwnTimeline, int]]:
        writer, stream = self._lender, cast(KnownStream, self._stream)
        if (
            writer is not None
            and writer.inside
            and (writer._stream is stream if stream.pointer else writer.thread == threading.get_ident())
        ):
            problem = f"expected {writer.label} to be released, but this thread or stream still writes it"
            raise InvalidArgumentError("order", f"{problem}; release it, or {self.label} waits forever.")
        self.page.slots[self._slot] = self._turn
        value = min((self.page.words[_TURN] + 1) // 2, POISON)
        self._version = value - 1
        return [(self.writer, value)]

    def await_version(self, newer_than: int, left: SecondsLeft, over: Callable[[], GpuInteropError | None]) -> int:
        """Block the calling thread until there is a newer version, or `over` returns why there will be none."""
        spins = time.monotonic() + system.SPIN_S
        while True:
            reason = over()  # first, so that the last version is seen before the end
            version, word = self.page.newest()
            if version > newer_than:
                return version
            if reason is not None:
                raise reason
            if (rest := left()) == 0:
                raise SemaphoreTimeoutError(f"{self.label} has no version newer than {newer_than} in time.")
            if time.monotonic() < spins:
                system.relax()
            else:
                self.page.sleep(word, system.SLICE if rest is None else min(system.SLICE, rest))

    def close_if_released(self) -> bool:
        """If the reader has released, leave the order, and close the words and the page."""
        if not self.is_over():
            return False
        self.page.slots[self._slot] = DEPARTED
        if self._lender is None:
            self.own.close()
            self.writer.close()
            self.page.close()
        return True

    def poison(self) -> None:
        """The writer has exited: fail the streams that wait for it, and let them continue."""
        self.failure = PeerError(ENDED)
        fail_waits(self.writer.lifetime)
        loop().repeat(partial(self.unblock, self.writer))


class FrameReader(Reader):
    """One subscription's side: it claims a frame, and reads the frame in its next turn."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.buffer, self._replaced = 0, cast("int | None", None)
        """The claimed buffer, and what the claim replaced in its slot; None without a claim."""

    @property
    def number(self) -> int:
        """Number of the claimed frame. Its version is greater if the writer has discarded frames."""
        return int(self.page.numbers[self.buffer])

    @system.locked
    def claim(self, newer_than: int) -> int | None:
        """Claim the newest frame instead of the last claim; return its version, or None if there is no newer one."""
        slots = self.page.slots
        while not isinstance(self.failure, ResourceClosedError):  # after that it may have left the order
            version, word = self.page.newest()
            if version <= newer_than:
                return None
            if self._replaced is not None:
                self.unclaim()
            self.buffer = word >> _BUFFER
            at = SLOTS * self.buffer + self._slot
            self._replaced = slots[at]
            slots[at] = POISON
            system.full_fence()  # either the writer sees the claim, or this sees what the writer has published
            if self.page.words[_TURN] == word:
                self._version = version
                return version
        return None

    def claims(self, version: int) -> bool:
        """Whether this frame is claimed and not read yet."""
        return self._replaced is not None and self._version == version

    @system.locked
    def unclaim(self) -> None:
        """Drop the claim, if there is one."""
        if self._replaced is not None and not isinstance(self.failure, ResourceClosedError):
            self.page.slots[SLOTS * self.buffer + self._slot], self._replaced = self._replaced, None

    def is_whole(self) -> bool:
        """Whether the writer had written the frame before it exited."""
        return value_of(self.writer) % POISON > self._version

    _enter = Side._begin_turn

    @system.locked
    def acquire(self, stream: Stream, left: SecondsLeft) -> None:
        """Acquire the claimed frame."""
        known = stream._known_as()
        if left is not _NO_LIMIT:  # first, so that after a time-out the frame is still claimed
            self._check(known, enters=True)
            self._wait_here(self.writer, self._version + 1, left)
        self._acquire(stream, known, left)

    def _note_acquire(self) -> Sequence[tuple[OwnTimeline, int]]:
        self.page.slots[SLOTS * self.buffer + self._slot], self._replaced = self._turn, None
        return [(self.writer, self._version + 1)]

    def release(self, stream: Stream, *, whole: bool = True) -> None:
        """Release, unless the writer has exited, so that no process writes the buffer, or `end` has released."""
        try:
            if self.failure is None:
                super().release(stream)
        except PeerError:  # the writer has just exited
            pass


class Turn(NoCopy):
    """A side's turn in a ``with``. If an interrupt loses it, the loop releases."""

    _number = 0

    def __init__(self, side: Side, stream: Stream) -> None:
        self._side, self._stream, self._number = side, stream, side._turn + 1

    def begin(self, left: SecondsLeft) -> Self:
        try:
            self._side.acquire(self._stream, left)
        except Exception:  # nothing is acquired, or it is released already
            self._number = 0
            raise
        return self

    def publish(self) -> None:
        """Release after the stream's work. A writer's bytes are the next version, or frame."""
        self._side.release(self._stream)

    def drop(self) -> None:
        """Release without publishing the frame. Arrays, which have changed in place, are published all the same."""
        self._side.release(self._stream, whole=False)

    def __del__(self) -> None:
        if (number := self._number) and self._side.inside and self._side._turn == number:
            self._side.abandoned = number
            loop().repeat(partial(self._side.drop, number))


def _is_here(stream: Stream) -> bool:
    return not stream._ptr and stream.device.info.is_cpu


def _name(word: OwnTimeline) -> str:
    """The name of a timeline's process in messages."""
    return word.lifetime.naming[2] or word.label


def time_left(timeout: float | None) -> SecondsLeft:
    """The seconds left of a time-out that begins now; None means no limit, which streams can wait for."""
    limit = check_timeout(timeout)
    return _NO_LIMIT if limit is None else system.seconds_left(limit)


_sides: Final[WeakSet[Side]] = WeakSet()


@after_fork
def _forked() -> None:
    """Keep a child from the pages of its parent, whose threads may hold the locks."""
    for side in _sides.copy():
        side.failure, side.inside, side._lock = side.own.lifetime.refusal(), False, threading.RLock()


def value_of(word: OwnTimeline) -> int:
    """A timeline's current value, even if it is closed; `POISON` if it is gone."""
    lifetime: Any = word.lifetime
    value: int = lifetime.try_use(lifetime.counter, POISON)
    return value


def unsignalled(counter: int, value: int) -> PeerError | None:
    """Why streams go on that wait for a value, although the timeline's process had not signalled it."""
    return PeerError(f"{ENDED} Make a new stream: this one has waited for it.") if value > counter % POISON else None


def store(word: OwnTimeline) -> bool:
    """Add `POISON` to the timeline of a process that has exited; False while a stream may still wait for it.

    Then call again: that process's GPU may store a smaller value late.
    """
    try:
        if (value := value_of(word)) < POISON:
            word.host_signal(POISON + value)
        return not awaited(word.lifetime)
    except GpuInteropError:
        return word.closed
