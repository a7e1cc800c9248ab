"""64-bit words in host memory that streams write and wait for: pinned pages, and timeline semaphores made of them.

A stream's store wakes nobody and no driver knows of it, so nothing here is stream-ordered by itself: a wait is ordered
behind whatever stores the value. What is written is a word at a time, at an address that nobody unmaps before the
streams that use it are done.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import operator
import os
import time
from typing import TYPE_CHECKING, Final, Generic, Protocol, Self, TypeVar, cast

from .. import system, timeline
from ..backend import StreamMemoryBackend
from ..capabilities import Capability, Cell, Operation, Scope
from ..errors import HandleError, InvalidArgumentError
from ..handles import AnySemaphoreHandle, Timeline, TimelineFd
from .monitor import generation
from .native import Native, retire
from .native_stream import NativeStream, Wait
from .ownership import lend
from .semaphore import ExternalSemaphore, SemaphoreCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..backend import Address, Native as Handle
    from .device import Device

__all__ = ["OwnTimelines", "PinnedWords", "Spare", "no_timeout", "spare_words", "stream_words"]

MAX_VALUE: Final = timeline.MAX_DEVICE_VALUE
"""Of a word that streams wait for: they compare cyclically."""
SPARE: Final = 64
"""Pages that are kept for the next semaphores, of a device and kind."""
_STRIDE: Final = 64
"""Bytes from one word to the next: a cache line each, because one is written by the CPU, another by a device."""


def stream_words(device: Device) -> StreamMemoryBackend:
    """The backend, if its streams write and wait for words.

    Raises
    ------
    UnsupportedError
        `Operation.STREAM_MEMORY_OPS` is a gap, with its reason.
    """
    device.capabilities.require(Operation.STREAM_MEMORY_OPS)
    backend = device._backend
    assert isinstance(backend, StreamMemoryBackend)  # otherwise the capability is a gap
    return backend


def no_timeout() -> Capability:
    """What `ExternalSemaphore.wait` says to a time-out where streams wait for words."""
    return Cell(Operation.WAIT_TIMEOUT, TimelineFd).gap(
        Scope.RUNTIME,
        "a stream that waits for a word waits until it is stored.",
        "cuStreamWaitValue64, hipStreamWaitValue64",
        "Stream.synchronize(timeout=...) names what a stream waits for.",
    )


class PinnedWords:
    """A page of words, all 0 at first, that the CPU and one device's streams share (``cuMemHostRegister``).

    Parameters
    ----------
    device : Device

    Raises
    ------
    UnsupportedError
        The device has no `Operation.STREAM_MEMORY_OPS`.
    DriverError
        The page could not be pinned.
    """

    COUNT: Final = system.PAGE // _STRIDE
    """How many words a page has."""

    def __init__(self, device: Device) -> None:
        self._backend = stream_words(device)
        self._memory = mmap.mmap(-1, system.PAGE)
        self._words = [ctypes.c_uint64.from_buffer(self._memory, index * _STRIDE) for index in range(self.COUNT)]
        _pinned[self] = None  # first: whatever strikes, the driver's page is not unmapped
        try:
            self._pin, self._address = self._backend.pin(device._native, ctypes.addressof(self._words[0]), system.PAGE)
        except BaseException:
            self._unmap()
            raise

    def anew(self) -> Self:
        """As it was made."""
        for word in self._words:
            word.value = 0
        return self

    def load(self, index: int) -> int:
        """A word as it stands, ahead of what the CPU does next."""
        value = self._words[index].value
        system.fence()
        return value

    def store(self, index: int, value: int) -> None:
        """One aligned 8-byte store of the CPU's, behind whatever this thread did before."""
        system.fence()
        self._words[index].value = value

    def write(self, stream: NativeStream, index: int, value: int) -> None:
        """Enqueue: the stream stores the word (``cuStreamWriteValue64`` / ``hipStreamWriteValue64``)."""
        self._backend.write_value(stream.handle, self._address + index * _STRIDE, value)

    def wait(self, stream: NativeStream, index: int, value: int) -> None:
        """Enqueue: the stream waits for the word (``cuStreamWaitValue64`` / ``hipStreamWaitValue64``)."""
        self._backend.wait_value(stream.handle, self._address + index * _STRIDE, value)

    def close(self) -> None:
        """Unpin and unmap; no stream uses it any more. May block as `Backend.releases_block` says."""
        self._backend.unpin(self._pin)
        self._unmap()

    def _unmap(self) -> None:
        self._words = []
        self._memory.close()
        _pinned.pop(self, None)


_pinned: Final[dict[PinnedWords, None]] = {}
"""Also what is left behind: unmapped and still registered, it would be in the way of whatever comes to lie there."""


class _Page(Protocol):
    def anew(self) -> Self: ...

    def close(self) -> None: ...


P = TypeVar("P", bound=_Page)


class Spare(Generic[P]):
    """Pages of a device that nobody else ever had: they are used again, because to unpin one waits for all its work."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pages: list[P] = []

    def take(self, make: Callable[[], P]) -> P:
        """One that stands at 0."""
        self._device._native  # noqa: B018 - raises in a child that cannot have it
        taken: list[P] = []
        try:
            taken.extend(map(operator.call, (self._pages.pop,)))
            return taken[0].anew()
        except IndexError:
            return make()
        except BaseException:
            self._pages += taken
            raise

    def give(self, page: Iterator[P]) -> None:
        """Keep the one that is left in `page`: after an interrupt nobody gives it twice."""
        self._pages.extend(page)
        if len(self._pages) > SPARE:
            gate = self._device._gate if self._device._backend.releases_block else None
            surplus = Native("pinned page", operator.methodcaller("close"), gate=gate)
            try:
                with contextlib.suppress(IndexError):  # others have taken them
                    surplus.create(self._pages.pop)
            finally:
                retire(surplus)


def spare_words(device: Device) -> Spare[PinnedWords]:
    """The device's; in a child of a fork others, because the pages are shared with the parent."""
    return device._once(f"spare words of {generation()}", lambda: Spare[PinnedWords](device))


class _Own:
    """One of our own timelines as one device uses it."""

    __slots__ = ("_backend", "exported", "fd", "fds", "label", "once", "page", "pages", "pin", "word")

    def __init__(
        self, backend: StreamMemoryBackend, fd: int, page: timeline.Page, pin: Handle, word: Address, *, exported: bool
    ) -> None:
        self._backend = backend
        self.fd = fd
        self.page = page
        self.pin = pin
        self.word = word
        self.label = page.label
        self.exported = exported
        """Others may have it."""
        # Each gives once what is to be done once, however often an interrupt makes us begin again.
        self.once = iter((self,))
        self.pages = iter((page.address,))
        self.fds = iter((fd,))

    def anew(self) -> _Own:
        """The page for another semaphore."""
        self.page.reset()
        return _Own(self._backend, self.fd, self.page, self.pin, self.word, exported=False)

    def close(self) -> None:
        """Where unpinning fails the page stays: the device may still have it."""
        self._backend.unpin(self.pin)
        system.unmap_each(self.pages, system.PAGE)
        for fd in self.fds:
            os.close(fd)


class WordCalls(SemaphoreCalls):
    """What semaphores of stream words have in common."""

    max_value = MAX_VALUE
    in_graphs = False  # each launch would write, and wait for, the same value again

    def prepare(self, handles: Sequence[Handle]) -> Sequence[Handle]:
        return handles

    def gap(self, cell: tuple[Operation, type[AnySemaphoreHandle]]) -> Capability | None:
        """Whoever has made it has seen that streams can do both."""
        return no_timeout() if cell[0] is Operation.WAIT_TIMEOUT else None


class OwnTimelines(WordCalls):
    """Timeline semaphores of our own, which one device's streams use without anybody's help.

    See `gpuinterop.timeline` for what others see of them.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._backend = stream_words(device)
        self._spare: Spare[_Own] = Spare(device)
        self.blocks = device._backend.releases_block

    def create(self) -> ExternalSemaphore[Timeline]:
        """A new one, at 0."""
        semaphore = ExternalSemaphore(self._device, TimelineFd, self, exportable=True)
        semaphore._lifetime.gate = None  # nothing is unpinned before it was exported
        semaphore._create(functools.partial(self._spare.take, self._new))
        return semaphore

    def load(self, handle: TimelineFd) -> ExternalSemaphore[Timeline]:
        """One that another process, device or backend has made; consumes the handle."""
        semaphore = ExternalSemaphore(self._device, TimelineFd, self)
        user = f"{self._device.backend} import_semaphore"
        lend(handle, lambda lent: semaphore._create(lambda: self._map(cast(TimelineFd, lent).fd)), user=user)
        return semaphore

    def _new(self) -> _Own:
        fd, address = timeline.create()
        try:
            return self._take(fd, address, exported=False)
        except BaseException:
            system.unmap(address, system.PAGE)
            os.close(fd)
            raise

    def _map(self, fd: int) -> _Own:
        address = system.map_shared(fd, system.PAGE)
        try:
            return self._take(fd, address, exported=True)
        except BaseException:
            system.unmap(address, system.PAGE)
            raise

    def _take(self, fd: int, address: int, *, exported: bool) -> _Own:
        page = timeline.Page(fd, address, f"timeline semaphore {os.fstat(fd).st_ino}")
        if page.value > MAX_VALUE:
            raise HandleError(
                f"handle: {page.label} stands at {page.value}; streams compare what is below 2**63. Make a new one."
            )
        pin, there = self._backend.pin(self._device._native, address, system.PAGE)
        try:
            page.give_to_device()
            return _Own(self._backend, fd, page, pin, there + timeline.VALUE, exported=exported)
        except BaseException:  # an interrupt
            self._backend.unpin(pin)
            raise

    # -- what a semaphore asks for -------------------------------------------------------------------------------

    def wait(
        self, batch: Sequence[_Own], stream: NativeStream, values: Sequence[int], ms: int | None, waits: list[Wait]
    ) -> None:
        for own, value in zip(batch, values, strict=True):
            self._backend.wait_value(stream.handle, own.word, value)

    def signal(self, batch: Sequence[_Own], stream: NativeStream, values: Sequence[int]) -> None:
        for own, value in zip(batch, values, strict=True):
            if value <= (current := own.page.value):  # it never shrinks, so by the time of the store it is no less
                raise InvalidArgumentError(
                    "value", f"{own.label} stands at {current}: a timeline only grows; signal {current + 1} or more."
                )
        for own, value in zip(batch, values, strict=True):
            self._backend.write_value(stream.handle, own.word, value)

    def looker(self, handle: _Own, value: int) -> Callable[[], bool]:
        return lambda: handle.page.value >= value

    def destroy(self, handle: _Own) -> None:
        if handle.exported:
            handle.close()
        else:
            self._spare.give(handle.once)

    def export(self, handle: _Own) -> TimelineFd:
        handle.exported = True
        return TimelineFd.adopt_duplicate(handle.fd)

    def host_signal(self, handle: _Own, value: int) -> None:
        handle.page.signal(value)

    def host_wait(self, handle: _Own, value: int, timeout: float) -> bool:
        return handle.page.wait(value, time.monotonic() + timeout, lambda: None)
