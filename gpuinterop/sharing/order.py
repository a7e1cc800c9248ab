"""The order of one writer and many readers, on timelines of our own.

The sharing process has a control page, a sealed memfd, that each reader maps. Its words are of 8 bytes::

    0      magic GIPORDER
    1      version 1
    2      turn: 2v once value v of the writer's timeline publishes the newest version; 2v - 1 while it writes that.
           The top byte is the number of the buffer that has the version. The lower four bytes are a futex
    3      what the writer's timeline had come to when the writer died
    4      1 once a thread may sleep until `turn` changes
    8 ...  for each buffer a row of one slot a reader: the reader's last turn that uses the buffer

The writer's timeline is at n + 1 once version n is there; each reader's is at k once it has released k times.

A reader that acquires adds 1 to its slot, and waits for the newest version; while the writer writes, for the next. The
writer that acquires makes `turn` odd, reads the slots, and waits for the last version and for the readers that have not
released. Both do so under the page's lock, which the kernel frees at its holder's death. A release needs no lock.
A process that acquires several shares at once holds all their locks meanwhile. Each store is one word, so that a
death between two leaves a state that the survivors can go on with: they then store the dead one's timeline.

**Frames** (`FrameWriter`, `FrameReader`) have several buffers, and no lock. A reader claims the newest buffer: it
writes `POISON` into its slot there, and then looks whether that buffer is still the newest one. The writer publishes
another buffer first, and then looks at the slots of those that it may write next. So one of the two sees the other. A
reader that reads what it has claimed writes its turn there, which the writer's stream can wait for: it was published,
so all that it waits for was given to streams before. The writer never takes the newest buffer, and `turn` is never odd.
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
from typing import Any, Final, cast

from .. import system, timeline
from .._arguments import NoCopy, check_timeout
from .._core.known_stream import CapturedError, KnownStream, awaited, fail_waits
from .._core.semaphore import ExternalSemaphore
from .._core.stream import Stream
from .._core.stream_memory import refuse_capture
from ..errors import (
    GpuInteropError,
    HandleError,
    InvalidArgumentError,
    PeerError,
    ResourceClosedError,
    SemaphoreTimeoutError,
    again,
)
from ..handles import OpaqueFd, Timeline
from .counts import Memfd
from .link import ENDED
from .loop import loop

Word = ExternalSemaphore[Timeline]

_HEAD: Final = [int.from_bytes(b"GIPORDER", "little"), 1]
_TURN, _REACHED, _ASLEEP, _SLOTS = 2, 3, 4, 8
_BUFFER: Final = 56
"""The first bit of a buffer's number in `turn`."""
MAX_BUFFERS: Final = 256
SLOTS: Final = system.PAGE // 8 - _SLOTS
"""Number of readers of a share that can be in at once."""
POISON: Final = timeline.MAX_DEVICE_VALUE
"""The value that a survivor stores in place of a dead process."""
_ALWAYS: Final = system.seconds_left(None)
"""The limit of a wait without a time-out."""
LEFT: Final = 2**64 - 1
"""What a reader's slot says once the reader has left the order."""


class ControlPage(NoCopy):
    """The page: made here, or another process's, whose handle it takes over. It is mapped until its words are gone."""

    def __init__(self, handle: OpaqueFd | None = None, buffers: int = 1) -> None:
        memory = Memfd("gpuinterop.control", system.PAGE * buffers, handle)
        self.handle = memory.handle
        self.words = memory.words(ctypes.c_uint64, 5)
        self.slots = memory.words(ctypes.c_uint64, SLOTS * buffers, _SLOTS)
        self._futex = ctypes.addressof(self.words) + 8 * _TURN
        self.wake = system.futex_waker(self._futex)
        """Makes the threads look again that wait for a version."""
        if handle is None:
            self.words[:2] = _HEAD
        elif self.words[:2] != _HEAD:
            raise HandleError("handle: expected the control page of a share of this version, got another page.")
        self.lock = timeline.Lock(self.handle.fd, "a share's control page")

    def newest(self) -> tuple[int, int]:
        """The newest version, and the word that says so."""
        word = self.words[_TURN]
        return (word & (1 << _BUFFER) - 1) // 2 - 1, word

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleep until `turn` may be another word than the one seen."""
        self.words[_ASLEEP] = 1
        system.full_fence()  # `publish` sees that, or this what it has published
        if self.words[_TURN] == seen:
            system.futex_wait(self._futex, seen & 0xFFFFFFFF, seconds)

    def publish(self, turn: int, buffer: int) -> None:
        """Tell of a version, and wake the threads that wait for it."""
        if asleep := self.words[_ASLEEP]:
            self.words[_ASLEEP] = 0  # first: who sets it from now on sees the version, or is seen below
        self.words[_TURN] = 2 * turn | buffer << _BUFFER
        system.full_fence()
        if asleep or self.words[_ASLEEP]:
            self.wake()

    def close(self) -> None:
        """Close its descriptors."""
        self.lock.close()  # first: it borrows the other
        self.handle.close()

    def __del__(self) -> None:  # of a reader that was in when the writer died
        if hasattr(self, "lock"):
            self.close()


class _Turns(NoCopy):
    """Acquires and releases, each once in turn, by one thread at a time. Another may end it at any time."""

    def __init__(self, page: ControlPage, writer: Word, own: Word, label: str) -> None:
        self.page = page
        self.writer = writer
        self.own = own
        """The timeline that a release signals: at n once turn n is over."""
        self.label = label
        own.lifetime.warns = writer.lifetime.warns = False  # the share or the attachment warns
        self.failure: GpuInteropError | None = None
        """The reason why this side does not acquire any more. Who sets it looks then whether the side is free."""
        self.inside = False
        self._turn = 0
        """Number of the last turn."""
        self._stream: KnownStream | None = None
        """The stream that acquired last, or released."""
        self._told_by: KnownStream | None = None
        """The stream that was given the last signal; None if the host signals."""
        self._guard = threading.RLock()
        """Held by a thread that acquires or releases, until the stream has been given all of that."""

    def release(self, stream: Stream) -> None:
        """Release, after the stream's work."""
        system.under(self._guard, self._release, stream, stream._known_as())

    def end(self, failure: GpuInteropError) -> None:
        """Release after the work of the stream that acquired, and do not acquire again."""
        self.failure = self.failure or failure
        if not self._ends():
            loop().look_again(self._ends)

    def drop(self, turn: int) -> bool:
        """Release a turn that was left without a release; False while another thread acquires or releases."""
        return system.under(self._guard, self._drop, turn, limit=0)

    def _drop(self, turn: int) -> bool:
        if (free := system.holds(self._guard)) and self.inside and self._turn == turn:
            self._give_up()
        return free

    def is_over(self) -> bool:
        """Whether the side, which has ended, has released, and its streams have done that."""
        return self.is_free() and value_of(self.own) >= self._turn

    def is_free(self) -> bool:
        """Whether no other thread acquires or releases. With a `failure` none will."""
        return system.under(self._guard, system.holds, self._guard, limit=0)

    def lets_pass(self, word: Word) -> bool:
        """Let streams go on that wait for another side, which has left or died; False while one may yet be to wait."""
        free = self.is_free()  # first
        return store(word) and free

    def _check(self, known: KnownStream, *, enters: bool) -> None:
        if self.failure is not None:
            raise again(self.failure)
        if self.inside is enters:
            this, other = ("acquire", "release") if enters else ("release", "acquire")
            raise InvalidArgumentError("order", f"{this} of {self.label} is out of turn; call {other} first.")
        if known.is_capturing():
            refuse_capture(known, self.label)

    @abstractmethod
    def _note(self) -> Sequence[tuple[Word, int]]:
        """Note on the control page that the side acquires; return what the stream is to wait for."""

    def _wait(self, stream: Stream, word: Word, value: int, left: Callable[[], float | None]) -> None:
        if (now := value_of(word)) < value:
            if left is not _ALWAYS or _is_here(stream):
                now = self._wait_here(word, value, left)
            else:
                word._wait_asked(stream, value)
        if now >= POISON and word is self.writer:  # another process may have noticed first
            self.failure = self.failure or PeerError(ENDED)
            raise again(self.failure)
        system.fence()  # later loads come after that of the value

    def _wait_here(self, word: Word, value: int, left: Callable[[], float | None]) -> int:
        """Wait in the calling thread, and look now and then whether another thread has ended this."""
        while (now := value_of(word)) < value:
            if self.failure is not None:
                raise again(self.failure)
            if (rest := left()) == 0:
                who = "the writer" if word is self.writer else _name(word)
                raise SemaphoreTimeoutError(
                    f"{self.label} was not free in time: {who} is between acquire and release, or its stream is still "
                    "at work."
                )
            with contextlib.suppress(SemaphoreTimeoutError):
                word.host_wait(value, timeout=system.SLICE if rest is None else min(system.SLICE, rest))
        return now

    def _release(self, stream: Stream, known: KnownStream) -> None:
        self._check(known, enters=False)
        self._stream = known
        try:
            if known is not self._told_by and value_of(self.own) < self._turn - 1:
                self.own._wait_asked(stream, self._turn - 1)  # a value must not come after a greater one
            self.own._signal_asked(stream, self._turn)
            self._leave(known)
        except BaseException:  # an interrupt may have struck after the signal
            self._give_up()
            raise

    def _leave(self, told_by: KnownStream | None) -> None:
        """Note the release, once the stream has the signal."""
        self._told_by, self.inside = told_by, False

    def _ends(self) -> bool:
        """Release if no other thread is at it, which may be waiting."""
        if free := self.is_free():
            self._give_up()
        return free

    def _give_up(self) -> None:
        """Have the host signal: the stream may be closed, another thread's own, or have failed and skip its signal."""
        before, turn = self._told_by, self._turn
        if (stream := self._stream if self.inside else before) is None:
            return
        tells = partial(self._tells, turn, _end_of(stream), before)
        loop().look_again(tells)  # first: another interrupt may strike
        self._leave(None)
        tells()

    def _tells(self, turn: int, passed: Callable[[], bool], before: KnownStream | None) -> bool:
        """Signal once a stream has done its work so far, and the one `before` has signalled or failed."""
        try:
            if (value := value_of(self.own)) < turn:
                if not passed() or (value < turn - 1 and (before is None or not before.is_idle())):
                    return False
                self.own.host_signal(turn)
        except GpuInteropError:
            return self.own.closed
        return True


def _end_of(stream: KnownStream) -> Callable[[], bool]:
    """Make a question: whether the stream has done all that the stream was given so far."""
    with contextlib.suppress(CapturedError):
        if not stream.elsewhere and (fence := stream.fence()) is not None:
            return fence.is_reached
    return stream.is_idle


class Writer(_Turns):
    """The process that shares."""

    taken = 0
    """The buffer that is written."""

    def __init__(self, page: ControlPage, own: Word, label: str) -> None:
        super().__init__(page, own, own, label)
        self.leases: dict[int, Word] = {}
        """The timeline of each reader that may acquire, by its slot."""
        self.thread = 0
        """The thread that acquired last."""

    @property
    def version(self) -> int:
        """The newest version."""
        return self.page.newest()[0]

    def publish_first(self, stream: Stream | None) -> None:
        """Publish version 0, after what the stream was given."""
        self._turn = 1
        if stream is None:
            self.own.host_signal(1)
        else:
            self.own.signal(stream, 1)
        self._leave(None if stream is None else stream._known_as())

    def _note(self) -> Sequence[tuple[Word, int]]:
        self.thread = threading.get_ident()
        waits = self._take()
        if self._stream is not self._told_by:
            waits.append((self.own, self._turn - 1))  # the last version may come from another stream
        return waits

    def _take(self) -> list[tuple[Word, int]]:
        """Take a buffer to write; return whose release is to be waited for."""
        self.page.words[_TURN] = 2 * self._turn - 1
        return self._uses(0)

    def _uses(self, buffer: int) -> list[tuple[Word, int]]:
        """The readers of a buffer that have not released it, and the turn in which each will have."""
        slots, first = self.page.slots, SLOTS * buffer
        found = []
        for slot, lease in self.leases.copy().items():
            count = min(slots[first + slot], POISON)
            if slots[slot] != LEFT and value_of(lease) < count:  # who has left has released
                found.append((lease, count))
        system.fence()  # later loads come after those of the values
        return found

    def _leave(self, told_by: KnownStream | None) -> None:
        self.page.publish(self._turn, self.taken)
        self._told_by, self.inside = told_by, False


class FrameWriter(Writer):
    """The process that publishes frames, each in a buffer that no reader uses."""

    whole = False
    """Whether the release publishes what was written."""

    def __init__(self, page: ControlPage, own: Word, label: str, buffers: int) -> None:
        super().__init__(page, own, label)
        self._written = [0] * buffers
        """The turn in which each buffer was published last."""
        self._readers: list[tuple[Word, int]] = []
        """Who uses the buffer that is taken."""
        self._warned = False

    def begin(self, stream: Stream, timeout: float | None) -> None:
        """Acquire a buffer, which `taken` is then: one that nobody uses, or whose readers' streams will release it."""
        system.under(self._guard, self._begin, stream, _time_left(timeout))

    def _begin(self, stream: Stream, left: Callable[[], float | None]) -> None:
        known, queues = stream._known_as(), left is _ALWAYS and not _is_here(stream)
        if self.inside:
            self._check(known, enters=True)
        if self._find(queues=queues) is not None:
            self._check(known, enters=True)
            self._wait_for_buffer(left, queues=queues)
        _acquire([(self, stream, known)], (), left)

    def _wait_for_buffer(self, left: Callable[[], float | None], *, queues: bool) -> None:
        """Block the calling thread until a buffer is free, or may be waited for by the stream."""
        for pause in system.pauses():
            if (holders := self._find(queues=queues)) is None:
                return
            if self.failure is not None:
                raise again(self.failure)
            if left() == 0:
                raise SemaphoreTimeoutError(f"{self.label} had no slot that is free; in use by {holders}.")
            time.sleep(pause)

    def _find(self, *, queues: bool) -> str | None:
        """Find a buffer to take, if it queues also one that the stream waits for; else return who holds all."""
        newest = self.page.words[_TURN] >> _BUFFER
        system.full_fence()  # who claims another buffer from now on sees that it is not the newest
        others = [one for one in range(len(self._written)) if one != newest]
        others.sort(key=self._written.__getitem__)
        used: dict[int, list[tuple[Word, int]]] = {}
        for self.taken in others:
            self._readers = used[self.taken] = self._uses(self.taken)
            if not self._readers:
                return None
        holders = ", ".join(dict.fromkeys(_name(lease) for uses in used.values() for lease, _ in uses))
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.label} has {len(others) + 1} slots, all in use; the writer waits for {holders}. Publish with "
                "more slots: the readers that may read at once + 2.",
                RuntimeWarning,
                stacklevel=2,
            )
        for self.taken, self._readers in reversed(used.items()):  # a slow reader has an old one
            if queues and all(turn < POISON for _, turn in self._readers):  # a stream cannot wait for a claim
                return None
        return holders

    def _take(self) -> list[tuple[Word, int]]:
        self.whole = False
        return self._readers  # who has written a claim since then sees that the buffer is not the newest

    def _leave(self, told_by: KnownStream | None) -> None:
        if self.whole:
            self._written[self.taken] = self._turn
            super()._leave(told_by)
        self._told_by, self.inside = told_by, False

    def _give_up(self) -> None:
        self.whole = False
        super()._give_up()


class Reader(_Turns):
    """One attachment that acquires."""

    def __init__(
        self, page: ControlPage, writer: Word, own: Word, slot: int, label: str, lender: Writer | None = None
    ) -> None:
        super().__init__(page, writer, own, label)
        if slot >= SLOTS:
            raise PeerError(f"expected the number of a slot, got {slot!r}.")
        self._slot = slot
        self._lender = lender
        """The writer, where it is of this process: words and page are its, and it closes them."""
        self._version = 0

    @property
    def version(self) -> int:
        """The version that is read; the newest one, if none is."""
        return self._version if self.inside else self.page.newest()[0]

    def _note(self) -> Sequence[tuple[Word, int]]:
        writer, stream = self._lender, cast(KnownStream, self._stream)
        if (
            writer is not None
            and writer.inside
            and (writer._stream is stream if stream.pointer else writer.thread == threading.get_ident())
        ):
            raise InvalidArgumentError(
                "order",
                f"expected {writer.label} to be released, this thread or stream still writes it; release it, or "
                f"{self.label} waits for ever.",
            )
        self.page.slots[self._slot] = self._turn
        value = min((self.page.words[_TURN] + 1) // 2, POISON)
        self._version = value - 1
        return [(self.writer, value)]

    def close_if_released(self) -> bool:
        """Leave the order, and close the words and the control page, if the reader has released."""
        if not self.is_over():
            return False
        self.page.slots[self._slot] = LEFT
        if self._lender is None:
            self.own.close()
            self.writer.close()
            self.page.close()
        return True

    def poison(self) -> None:
        """The writer has died: fail the streams that wait for it, and have them go on."""
        self.failure = error = PeerError(ENDED)
        if (reached := value_of(self.writer)) < POISON:
            self.page.words[_REACHED] = reached
        # Another reader may have stored it: which waits have passed by that, nothing tells.
        fail_waits(self.writer.lifetime, error, passed=reached >= POISON)
        loop().look_again(partial(self.lets_pass, self.writer))


class FrameReader(Reader):
    """One subscription: it claims a frame, and reads that in its next turn."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.buffer = 0
        """The buffer that is claimed."""
        self._before: int | None = None
        """What the slot there has said before; None if none is claimed."""

    def claim(self, newer_than: int) -> int | None:
        """Claim the newest frame, in place of the one that is claimed; its number, or None if there is no newer one."""
        return system.under(self._guard, self._claim, newer_than)

    def _claim(self, newer_than: int) -> int | None:
        slots = self.page.slots
        while not isinstance(self.failure, ResourceClosedError):  # else it may have left the order
            number, word = self.page.newest()
            if number <= newer_than:
                return None
            self._unclaim()
            self.buffer = word >> _BUFFER
            at = SLOTS * self.buffer + self._slot
            self._before = slots[at]
            slots[at] = POISON
            system.full_fence()  # the writer sees the claim, or this sees what the writer has published
            if self.page.words[_TURN] == word:
                self._version = number
                return number
        return None

    def claims(self, number: int) -> bool:
        """Whether a frame is claimed, and not read yet."""
        return self._before is not None and self._version == number

    def unclaim(self) -> None:
        """Claim no frame; one that is read is not a claim any more."""
        system.under(self._guard, self._unclaim)

    def _unclaim(self) -> None:
        if self._before is not None and not isinstance(self.failure, ResourceClosedError):
            self.page.slots[SLOTS * self.buffer + self._slot], self._before = self._before, None

    def is_whole(self) -> bool:
        """Whether the writer, which has died, had written the frame."""
        return bool(self.page.words[_REACHED] > self._version)

    def begin(self, stream: Stream, timeout: float | None) -> None:
        """Acquire the frame that is claimed."""
        system.under(self._guard, self._begin, stream, _time_left(timeout))

    def _begin(self, stream: Stream, left: Callable[[], float | None]) -> None:
        known = stream._known_as()
        if left is not _ALWAYS:  # first: a frame that is late stays claimed
            self._check(known, enters=True)
            self._wait_here(self.writer, self._version + 1, left)
        _acquire([(self, stream, known)], (), left)

    def _note(self) -> Sequence[tuple[Word, int]]:
        self.page.slots[SLOTS * self.buffer + self._slot], self._before = self._turn, None
        return [(self.writer, self._version + 1)]


Side = tuple[_Turns, Stream, KnownStream]
"""What acquires, and for which stream."""


def acquire_all(sides: Sequence[Side], locks: Sequence[timeline.Lock], timeout: float | None) -> None:
    """Acquire several, whose pages have the locks, all at once; none if one fails.

    A stream acquires long before it has waited. Two that acquired one page after the other could each be the first
    at one, and would wait for each other.
    """
    left = _time_left(timeout)
    guards: list[threading.RLock] = []
    try:
        for one, *_ in sides:
            guards.append(one._guard)
            one._guard.acquire()
        _acquire(sides, locks, left)
    finally:
        for guard in reversed(guards):
            try:  # noqa: SIM105 - as `system.under`
                guard.release()
            except RuntimeError:
                pass


def _is_here(stream: Stream) -> bool:
    """Whether a stream is the calling thread."""
    return not stream._ptr and stream.device.info.is_cpu


def _name(word: Word) -> str:
    """What a message calls a timeline's process."""
    return word.lifetime.naming[2] or word.label


def _time_left(timeout: float | None) -> Callable[[], float | None]:
    limit = check_timeout(timeout)
    return _ALWAYS if limit is None else system.seconds_left(limit)


def _acquire(sides: Sequence[Side], locks: Sequence[timeline.Lock], left: Callable[[], float | None]) -> None:
    for one, _, known in sides:
        one._check(known, enters=True)
    try:
        waits = timeline.Lock.run_all(locks, _enter, sides)
        for one, stream, word, value in waits:
            one._wait(stream, word, value, left)
    except BaseException:  # others may wait already for the release after this
        for one, *_ in sides:
            one._give_up()
        raise


def _enter(sides: Sequence[Side]) -> list[tuple[_Turns, Stream, Word, int]]:
    waits = []
    for one, stream, known in sides:
        one._turn, one._stream, one.inside = one._turn + 1, known, True
        for word, value in one._note():
            waits.append((one, stream, word, value))
    return waits


def value_of(word: Word) -> int:
    """The value of a timeline now, also of a closed one; `POISON` of one that is gone."""
    lifetime: Any = word.lifetime
    value: int = lifetime.ask(lifetime.counter, POISON)
    return value


def store(word: Word) -> bool:
    """Store a dead process's timeline; False while a stream may still wait for it, so that it is stored again.

    What that process's GPU had yet to store, a smaller value, may come late.
    """
    try:
        if value_of(word) < POISON:
            word.host_signal(POISON)
        return not awaited(word.lifetime)
    except GpuInteropError:
        return word.closed
