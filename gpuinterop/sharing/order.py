"""The order of one writer and many readers, on timelines of our own.

The sharing process has a control page, a sealed memfd of one page, that each reader maps::

    0   8 bytes   magic GIPORDER
    8   u32       version 1
    16  u64       turn: 2v once value v of the writer's timeline publishes the newest version; 2v + 1 while it writes
    24            zero
    64  u64 ...   one slot a reader: how often it has acquired

The writer's timeline is at n + 1 once version n is there; each reader's is at k once it has released k times.

A reader that acquires adds 1 to its slot, and waits for the newest version; while the writer writes, for the next. The
writer that acquires makes `turn` odd, reads the slots, and waits for the last version and for the readers that have not
released. Both do so under the page's lock, which the kernel frees at its holder's death. A release needs no lock.
A process that acquires several shares at once holds all their locks meanwhile. Each store is one word, so that a
death between two leaves a state that the survivors can go on with: they then store the dead one's timeline.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

from .. import system, timeline
from .._arguments import NoCopy, check_timeout
from .._core.known_stream import CapturedError, KnownStream, awaited, fail_waits
from .._core.lifetime import Lifetime
from .._core.resource import Resource
from .._core.semaphore import ExternalSemaphore
from .._core.stream import Stream
from .._core.stream_memory import refuse_capture
from ..errors import (
    DriverError,
    GpuInteropError,
    HandleError,
    InvalidArgumentError,
    PeerError,
    ResourceClosedError,
    SemaphoreTimeoutError,
    again,
)
from ..handles import FdHandle, OpaqueFd, Timeline
from .loop import loop

Word = ExternalSemaphore[Timeline]

NAME: Final = "gpuinterop.control"
_MAGIC: Final = b"GIPORDER"
_VERSION: Final = 1
_TURN, _SLOTS = 16, 64
SLOTS: Final = (system.PAGE - _SLOTS) // 8
"""Number of readers of a share that can be in at once."""
POISON: Final = timeline.MAX_DEVICE_VALUE
"""The value that a survivor stores in place of a dead process."""
LEFT: Final = 2**64 - 1
"""What a reader's slot says once the reader has left the order."""
DIED: Final = "the process that shared the arrays has ended; discard what was read since."


class ControlPage(Resource):
    """The page, mapped."""

    def __init__(self, make: Callable[[], tuple[int, int]]) -> None:
        super().__init__(Lifetime("control page", _unmap))
        self.lifetime.warns = False
        self.fd, self._address, self.lock = self.lifetime.create(lambda: _locked(*make()))
        self.turn = self._word(_TURN)

    @classmethod
    def make(cls) -> ControlPage:
        """Make a share's."""

        def initialise(address: int) -> None:
            ctypes.c_uint32.from_address(address + len(_MAGIC)).value = _VERSION
            ctypes.memmove(address, _MAGIC, len(_MAGIC))

        return cls(lambda: system.create_page(NAME, initialise))

    @classmethod
    def load(cls, handle: FdHandle) -> ControlPage:
        """Map another process's, by a descriptor that came from there."""
        head = _MAGIC + _VERSION.to_bytes(4, "little")
        if (system.seals(handle.fd) or 0) & system.FIXED != system.FIXED or os.fstat(handle.fd).st_size != system.PAGE:
            raise HandleError("handle: expected the control page of a share, got another file.")
        if os.pread(handle.fd, len(head), 0) != head:
            raise HandleError("handle: expected the control page of a share of this version, got another page.")

        def take() -> tuple[int, int]:
            fd = system.call("dup", os.dup, handle.fd)
            try:
                return fd, system.map_shared(fd, system.PAGE)
            except DriverError:
                os.close(fd)
                raise

        return cls(take)

    def slot(self, number: int) -> ctypes.c_uint64:
        """A reader's slot, by a number that came."""
        if number >= SLOTS:
            raise PeerError(f"expected the number of a slot, got {number!r}.")
        return self._word(_SLOTS + 8 * number)

    def has_left(self, number: int) -> bool:
        """Whether the reader with that slot has left the order."""
        return self.slot(number).value == LEFT

    def export(self) -> OpaqueFd:
        """A handle for another process."""
        return OpaqueFd.adopt_duplicate(self.fd)

    def _word(self, offset: int) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_address(self._address + offset)


def _locked(fd: int, address: int) -> tuple[int, int, timeline.Lock]:
    return fd, address, timeline.Lock(fd, "a share's control page")


def _unmap(page: tuple[int, int, timeline.Lock]) -> None:
    fd, address, lock = page
    lock.close()  # first: it borrows the descriptor
    system.unmap(address, system.PAGE)
    os.close(fd)


class _Turns(NoCopy):
    """Acquires and releases, each once in turn; another thread may end it at any time."""

    def __init__(self, page: ControlPage, writer: Word, own: Word, label: str) -> None:
        self.page = page
        self.writer = writer
        self.own = own
        """The timeline that a release signals."""
        self.label = label
        own.lifetime.warns = writer.lifetime.warns = False  # the share or the attachment warns
        self.inside: Stream | None = None
        """The stream that acquired."""
        self.failure: GpuInteropError | None = None
        """The reason why this side does not acquire any more."""
        self.acquiring: Sequence[tuple[Word, int]] | None = None
        """The waits, while the stream is still being given them."""
        self._guard = threading.RLock()
        self._known: KnownStream | None = None
        """The native stream of `inside`."""
        self._told = self._tried = 0
        self._told_by: KnownStream | None = None

    def release(self, stream: Stream) -> None:
        """Release, after the stream's work."""
        system.under(self._guard, self._release, stream)

    def end(self, failure: GpuInteropError) -> None:
        """Release after the work of the stream that acquired, and do not acquire again."""
        system.under(self._guard, self._end, failure)

    def _wait(self, stream: Stream, timeout: float | None) -> None:
        for word, value in self.acquiring or ():
            try:
                if word.value < value:
                    self._await(word, value, stream, timeout)
            except ResourceClosedError:
                if not word.closed:  # else the reader has left meanwhile
                    raise

    def _await(self, word: Word, value: int, stream: Stream, timeout: float | None) -> None:
        if stream._ptr or not stream.device.info.is_cpu:
            if timeout is None:
                word._wait_asked(stream, value)
            else:
                word.wait(stream, value, timeout=timeout)
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:  # the calling thread itself: it looks now and then whether another thread has ended this
            left = system.SLICE if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                return word.host_wait(value, timeout=min(system.SLICE, left))
            except SemaphoreTimeoutError:
                self._check_failure()
                if deadline is not None and time.monotonic() >= deadline:
                    who = "the writer" if word is self.writer else "a reader"
                    raise SemaphoreTimeoutError(
                        f"{self.label} was not free in {timeout:g} s: {who} is between acquire and release, or its "
                        "stream is still at work."
                    ) from None

    def _release(self, stream: Stream) -> None:
        self._check(stream, enters=False)
        self._tell(stream)
        self._leave()

    def _end(self, failure: GpuInteropError) -> None:
        self.failure = self.failure or failure
        if self.acquiring is None:  # else the acquiring thread releases, which may be waiting
            self._end_turn()
        if self._told_by is not None:  # a stream of the host skips the signal once it has failed
            self._see_to(self._told, self._told_by)

    def _enter(self, stream: Stream) -> None:
        """Acquire, under the page's lock."""
        self.inside, self._known = stream, stream._known_as()
        self.acquiring = self._note()

    @abstractmethod
    def _note(self) -> Sequence[tuple[Word, int]]:
        """Note it on the control page; return what the stream is to wait for."""

    @abstractmethod
    def _value(self) -> int:
        """The value that a release signals."""

    def _leave(self) -> None:
        """Note the release, once the stream has the signal."""
        self.inside = None

    def _check(self, stream: Stream, *, enters: bool) -> None:
        self._check_failure()
        if (self.inside is None) is not enters:
            this, other = ("acquire", "release") if enters else ("release", "acquire")
            raise InvalidArgumentError("order", f"{this} of {self.label} is out of turn; call {other} first.")
        refuse_capture(stream._known_as(), self.label)

    def _check_failure(self) -> None:
        if self.failure is not None:
            raise again(self.failure)

    def _tell(self, stream: Stream) -> None:
        """Signal, after the stream that signalled before: a value must not come after a greater one."""
        if (value := self._value()) <= self._told:
            return  # an interrupt struck after it
        known = stream._known_as()
        if known is not self._told_by and self.own.value < value - 1:
            self.own._wait_asked(stream, value - 1)
        tried, self._tried = self._tried == value, value
        try:
            self.own._signal_asked(stream, value)
        except GpuInteropError:
            if not tried or self.own.value < value:  # else an interrupt struck after the signal
                raise
        self._told, self._told_by = value, known

    def _end_turn(self) -> None:
        self.acquiring = None
        if (stream := self.inside) is None:
            return
        known, before = self._known, self._told_by
        try:
            if stream._known_as() is not known:
                raise ResourceClosedError("the stream is another thread's own.")
            if before is not known and self.own.value < self._value() - 1:
                raise ResourceClosedError("a wait for the other stream would block the calling thread's.")
            refuse_capture(known, self.label)
            self._tell(stream)
        except GpuInteropError:  # as above, or the stream is closed, or has failed
            if (value := self._value()) > self._told:
                self._told, self._told_by = value, None
                self._see_to(value, known, before)
        self._leave()

    def _see_to(self, value: int, known: KnownStream | None, before: KnownStream | None = None) -> None:
        """Signal from the loop once the stream has done its work so far, and `before` has signalled or failed."""
        has_passed = None if known is None else _end_of(known)

        def is_told() -> bool:
            try:
                if self.own.value >= value:
                    return True
                if has_passed is not None and not has_passed():
                    return False
                failed = before is not None and before.is_idle()
                if not failed and self.own.value < value - 1:
                    return False
                self.own.host_signal(value)
            except GpuInteropError:
                return self.own.closed
            return True

        if not is_told():
            loop().look_again(is_told)


def _end_of(stream: KnownStream) -> Callable[[], bool]:
    """Make a question: whether the stream has done all that the stream was given so far."""
    with contextlib.suppress(CapturedError):
        if not stream.elsewhere and (fence := stream.fence()) is not None:
            return fence.is_reached
    return stream.is_idle


class Writer(_Turns):
    """The process that shares."""

    def __init__(self, page: ControlPage, own: Word, label: str) -> None:
        super().__init__(page, own, own, label)
        self.leases: dict[int, Word] = {}
        """The timeline of each reader that may acquire, by its slot."""

    def publish_first(self, stream: Stream | None) -> None:
        """Publish version 0, after what the stream was given."""
        if stream is None:
            self.own.host_signal(1)
        else:
            self.own.signal(stream, 1)
        self._told, self._told_by = 1, None if stream is None else stream._known_as()
        self.page.turn.value = 2

    def _note(self) -> Sequence[tuple[Word, int]]:
        self.page.turn.value |= 1
        counts = [(lease, self.page.slot(slot).value) for slot, lease in self.leases.copy().items()]
        readers = [(lease, min(count, POISON)) for lease, count in counts if count != LEFT]  # who has left has released
        if self._known is self._told_by:
            return readers
        return [(self.own, self.page.turn.value // 2), *readers]  # the last version may come from another stream

    def drops(self, slot: int, own: Word) -> bool:
        """Forget a reader that has left; False while a stream may still wait for it.

        It may have died with stores to come, or closed with a wait for it on its way to a stream.
        """
        try:
            if self.leases.get(slot) is own:
                self.page.lock.run(self.leases.pop, slot)
        except GpuInteropError:
            return False
        comes = any(word is own for word, _ in self.acquiring or ())  # first: a stream may be given the wait meanwhile
        if not store(own) or comes:
            return False
        own.close()
        return True

    def _value(self) -> int:
        return self.page.turn.value // 2 + 1

    def _leave(self) -> None:
        self.page.turn.value = 2 * self._told
        self.inside = None


class Reader(_Turns):
    """One attachment that acquires."""

    def __init__(
        self, page: ControlPage, writer: Word, own: Word, slot: ctypes.c_uint64, label: str, *, lent: bool = False
    ) -> None:
        super().__init__(page, writer, own, label)
        self._slot = slot
        self._lent = lent
        """Whether words and page are the writer's, which closes them."""
        self._count = 0

    def _note(self) -> Sequence[tuple[Word, int]]:
        self._count += 1
        self._slot.value = self._count
        return [(self.writer, min((self.page.turn.value + 1) // 2, POISON))]

    def _value(self) -> int:
        return self._count

    def _check_failure(self) -> None:
        if self.failure is None and self.writer.value >= POISON:  # another reader has noticed first
            self.failure = PeerError(DIED)
        super()._check_failure()

    def is_released(self) -> bool:
        """Whether the reader has released, and its streams have done that."""
        return self.own.closed or self.own.value >= self._count

    def close_if_released(self) -> bool:
        """Close the words and the control page, if the reader has released."""
        if not self.is_released():
            return False
        self._slot.value = LEFT
        if not self._lent:
            self.own.close()
            self.writer.close()
            self.page.close()
        return True

    def poison(self) -> None:
        """The writer has died: fail the streams that wait for it, and have them go on."""
        self.failure = error = PeerError(DIED)
        # Another reader may have stored it: which waits have passed by that, nothing tells.
        gone = self.writer.closed or self.writer.value >= POISON
        fail_waits(self.writer.lifetime, error, passed=gone)
        loop().look_again(self._poisons)

    def _poisons(self) -> bool:
        try:  # first, and under the lock: another thread may acquire, and give its stream the wait meanwhile
            comes = not self.writer.closed and self.page.lock.run(lambda: self.acquiring is not None)
        except GpuInteropError:
            return False
        return store(self.writer) and not comes


def acquire_all(turns: Sequence[tuple[_Turns, Stream]], pages: Sequence[ControlPage], timeout: float | None) -> None:
    """Acquire several, which have the control pages, all at once; none if one fails.

    A stream acquires long before it has waited. Two that acquired one page after the other could each be the first
    at one, and would wait for each other.
    """
    timeout = check_timeout(timeout)
    entered: list[_Turns] = []
    try:
        _guarded(turns, pages, entered)
        for one, stream in turns:
            one._wait(stream, timeout)
        for one, _ in turns:
            one.acquiring = None  # first: `end` leaves what acquires to this thread, and this looks after it
            one._check_failure()
    except BaseException:  # others may wait already for the release after this
        for one in reversed(entered):
            with contextlib.suppress(GpuInteropError):
                system.under(one._guard, one._end_turn)
        raise


def _guarded(turns: Sequence[tuple[_Turns, Stream]], pages: Sequence[ControlPage], entered: list[_Turns]) -> None:
    """Enter all. A page whose turns have not ended stays mapped as long as their guards are held."""
    guards: list[threading.RLock] = []
    try:
        for one, stream in turns:
            guards.append(one._guard)
            one._guard.acquire()
            one._check(stream, enters=True)
        timeline.Lock.run_all([page.lock for page in pages], _enter, turns, entered)
    finally:
        for guard in reversed(guards):
            with contextlib.suppress(RuntimeError):  # as `system.under`
                guard.release()


def _enter(turns: Sequence[tuple[_Turns, Stream]], entered: list[_Turns]) -> None:
    for one, stream in turns:
        entered.append(one)
        one._enter(stream)


def store(word: Word) -> bool:
    """Store a dead process's timeline; False while a stream may still wait for it, so that it is stored again.

    What that process's GPU had yet to store, a smaller value, may come late.
    """
    try:
        if word.value < POISON:
            word.host_signal(POISON)
        return not awaited(word.lifetime)
    except GpuInteropError:
        return word.closed
