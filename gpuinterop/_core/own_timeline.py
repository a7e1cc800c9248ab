"""Timelines and pinned pages: 64-bit words in host memory that streams write and wait for.

A stream's store wakes no host thread, and drivers do not track it: only the value tells a wait that the store is done.
Each store writes one word. A page stays mapped until all streams that use it have finished.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import operator
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar, cast

from .. import system, timeline
from ..backend import StreamMemoryBackend, leave_to_core, left_to_core
from ..capabilities import Operation
from ..errors import GpuInteropError, HandleError, InvalidArgumentError
from ..handles import Timeline, TimelineFd
from .importing import import_duplicate
from .lifetime import Lifetime, retire
from .semaphore import ExternalSemaphore, SemaphoreCalls
from .streams import KnownStream, Wait, order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..backend import Address, DriverHandle
    from .device import Device

__all__ = ["OwnTimelines", "PinnedWords", "Spare", "spare_words", "stream_words"]

MAX_VALUE: Final = timeline.MAX_DEVICE_VALUE  # a stream cannot wait for more, because comparisons wrap around
SPARE: Final = 64  # pages kept for later semaphores, per device and kind
_STRIDE: Final = 64  # bytes between words: a cache line, because CPU and device write different words


def stream_words(device: Device) -> StreamMemoryBackend:
    """Return the backend if its streams write and wait for words. Otherwise raise `UnsupportedError`."""
    device.capabilities.require(Operation.STREAM_MEMORY_OPS)
    return cast(StreamMemoryBackend, device.driver)  # otherwise the capability is a gap


class PinnedWords:
    """A page of words, initially 0, shared by the CPU and one device's streams (``cuMemHostRegister``)."""

    COUNT: Final = system.PAGE // _STRIDE  # number of words in a page

    def __init__(self, device: Device) -> None:
        self.driver = stream_words(device)
        self._memory = mmap.mmap(-1, system.PAGE)
        self._words = [ctypes.c_uint64.from_buffer(self._memory, index * _STRIDE) for index in range(self.COUNT)]
        _pinned[self] = None  # first: after an exception, the page must stay mapped for the driver
        try:
            self._pin, self._address = self.driver.pin(device._handle, ctypes.addressof(self._words[0]), system.PAGE)
        except GpuInteropError as error:
            _free_unpinned(error, self._unmap)
            raise

    def reset(self) -> Self:
        for word in self._words:
            word.value = 0
        return self

    def load(self, index: int) -> int:
        """Load a word before later memory accesses of this thread."""
        value = self._words[index].value
        system.fence()
        return value

    def store(self, index: int, value: int) -> None:
        """Store a word with the CPU (one aligned 8-byte store), after earlier memory accesses of this thread."""
        system.fence()
        self._words[index].value = value

    def write(self, stream: KnownStream, index: int, value: int) -> None:
        """Make the stream store a value in the word (``cuStreamWriteValue64`` / ``hipStreamWriteValue64``)."""
        self.driver.write_value(stream.handle, self._address + index * _STRIDE, value)

    def wait(self, stream: KnownStream, index: int, value: int) -> None:
        """Make the stream wait until the word has the value (``cuStreamWaitValue64`` / ``hipStreamWaitValue64``)."""
        self.driver.wait_value(stream.handle, self._address + index * _STRIDE, value)

    def close(self) -> None:
        """Unpin and unmap the page when no stream uses it any more. Blocks if `Backend.releases_block` is True."""
        self.driver.unpin(self._pin)
        self._unmap()

    def _unmap(self) -> None:
        self._words = []
        self._memory.close()
        _pinned.pop(self, None)


_pinned: Final[dict[PinnedWords, None]] = {}
"""Pinned pages, even those whose unpin failed: if they were unmapped, their address could not be pinned again."""


def _free_unpinned(error: GpuInteropError, *calls: Callable[[], object], duplicate: bool = False) -> None:
    """Free a page after `pin` has failed: at once, or after the core's unpin if it was pinned.

    With `duplicate`, the last call closes a descriptor, and is made only if the page was pinned (`import_duplicate`).
    """
    if (unpin := left_to_core(error)) is not None:
        leave_to_core(error, lambda: [call() for call in (unpin, *calls)])
        return
    for call in calls[:-1] if duplicate else calls:
        call()


class _Page(Protocol):
    def reset(self) -> Self: ...

    def close(self) -> None: ...


P = TypeVar("P", bound=_Page)


class Spare(Generic[P]):
    """Pages that were never exported. They are reused, because unpinning waits for all work of the device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._pages: list[P] = []

    def take(self, make: Callable[[], P]) -> P:
        try:
            return self._pages.pop().reset()
        except IndexError:
            return make()

    def put_back(self, page: P) -> None:
        self._pages.append(page)
        if len(self._pages) > SPARE:
            gate = self.device.gate if self.device.driver.releases_block else None
            device = self.device.streams
            surplus = Lifetime("pinned page", operator.methodcaller("close"), gate=gate, device=device)
            try:
                with contextlib.suppress(IndexError):  # other threads took them
                    surplus.create(self._pages.pop)
            finally:
                retire(surplus)


def spare_words(device: Device) -> Spare[PinnedWords]:
    return device._once(Spare[PinnedWords])


@dataclass(slots=True, eq=False)
class _OwnPage:
    driver: StreamMemoryBackend
    fd: int
    page: timeline.Page
    pin: DriverHandle
    word: Address
    exported: bool  # other processes or devices may use it

    def reset(self) -> Self:
        self.page.reset()
        return self

    def close(self) -> None:
        """Unpin and unmap the page. If the unpin fails, the page stays, because the device may still use it."""
        self.driver.unpin(self.pin)
        self.page.close()
        system.unmap(self.page.address, system.PAGE)
        os.close(self.fd)


def refuse_capture(stream: KnownStream, label: str) -> None:
    """Raise if the stream is being captured, because each launch would write or wait for one and the same value."""
    if stream.is_capturing():
        raise InvalidArgumentError(
            "stream",
            f"{stream.label} is being captured, and each launch would repeat the value of {label}, which is made of "
            "stream words; signal and wait outside of the graph, before and after its launch.",
        )


class WordCalls(SemaphoreCalls):
    max_value = MAX_VALUE

    def prepare(self, handles: Sequence[DriverHandle]) -> Sequence[DriverHandle]:
        return handles


class OwnTimelines(WordCalls):
    """gpuinterop's own timelines, used directly by one device's streams. `gpuinterop.timeline` describes the page."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.driver = stream_words(device)
        self._spare: Spare[_OwnPage] = Spare(device)
        self.blocks = device.driver.releases_block

    def create(self, label: str | None) -> ExternalSemaphore[Timeline]:
        semaphore = ExternalSemaphore(self.device, TimelineFd, self, exportable=True, label=label)
        semaphore._make(functools.partial(self._spare.take, self._new))
        semaphore.lifetime.gate = None  # until it is exported, its page is reused instead of unpinned
        return semaphore

    def load(self, handle: TimelineFd, label: str | None) -> ExternalSemaphore[Timeline]:
        """Import a timeline of another process, device or backend. Consumes the handle."""
        semaphore = ExternalSemaphore(self.device, TimelineFd, self, label=label)

        def load(duplicate: TimelineFd) -> None:
            semaphore._make(functools.partial(self._map, duplicate.fd))

        import_duplicate(handle, load, user=f"{self.device.backend} import_semaphore", lifetime=semaphore.lifetime)
        return semaphore

    def _new(self) -> _OwnPage:
        return self._take(*timeline.create(), exported=False)

    def _map(self, fd: int) -> _OwnPage:
        return self._take(fd, system.map_shared(fd, system.PAGE), exported=True)

    def _take(self, fd: int, address: int, *, exported: bool) -> _OwnPage:
        """Pin a page. If it was exported, its duplicate descriptor belongs to the semaphore once the page is pinned."""
        try:
            page = timeline.Page(fd, address, "this timeline semaphore")
            if (at := page.value) > MAX_VALUE:
                raise HandleError(
                    f"handle: {page.label} is at {at}, but streams compare values below 2**63; make a new one."
                )
            pin, there = self.driver.pin(self.device._handle, address, system.PAGE)
        except GpuInteropError as error:
            unmap = functools.partial(system.unmap, address, system.PAGE)
            _free_unpinned(error, unmap, functools.partial(os.close, fd), duplicate=exported)
            raise
        page.let_devices_write()
        return _OwnPage(self.driver, fd, page, pin, there + timeline.VALUE, exported)

    def wait(self, batch: Sequence[_OwnPage], stream: KnownStream, values: Sequence[int], wait: Wait) -> None:
        if stream.is_capturing():  # checked inline because this is a hot path
            refuse_capture(stream, batch[0].page.label)
        wait.number = next(order)
        self.driver.wait_value(stream.handle, batch[0].word, values[0])

    def signal(self, batch: Sequence[_OwnPage], stream: KnownStream, values: Sequence[int]) -> None:
        if stream.is_capturing():
            refuse_capture(stream, batch[0].page.label)
        for own, value in zip(batch, values):  # noqa: B905 - the caller has checked the lengths
            if value <= (current := own.page.counter.value):  # refused now, because a timeline never shrinks
                raise InvalidArgumentError(
                    "value",
                    f"{own.page.label} is at {current}: a timeline only grows; signal {current + 1} or more.",
                )
        for own, value in zip(batch, values):  # noqa: B905
            self.driver.write_value(stream.handle, own.word, value)

    def register(self, semaphore: ExternalSemaphore[Any]) -> None:
        semaphore._handle.page.label = semaphore.label

    def destroy(self, handle: _OwnPage) -> None:
        if handle.exported:
            handle.close()
        else:
            self._spare.put_back(handle)

    def export(self, handle: _OwnPage) -> TimelineFd:
        handle.exported = True
        return TimelineFd.adopt_duplicate(handle.fd)

    def host_value(self, handle: _OwnPage) -> int:
        return handle.page.counter.value

    def host_signal(self, handle: _OwnPage, value: int) -> None:
        handle.page.signal(value)

    def host_wait(self, handle: _OwnPage, value: int, timeout: float) -> bool:
        return handle.page.wait(value, time.monotonic() + timeout)
