"""64-bit words in host memory that streams write and wait for: pinned pages, and timeline semaphores made of them.

A stream's store wakes nobody and no driver knows of it, so nothing here is stream-ordered by itself: a wait is ordered
behind whatever stores the value. What is written is a word at a time, at an address that nobody unmaps before the
streams that use it are done.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING, Final, cast

from .. import system, timeline
from ..backend import StreamMemoryBackend
from ..capabilities import Capability, Cell, Operation, Scope
from ..errors import HandleError, InvalidArgumentError, ResourceClosedError
from ..handles import Timeline, TimelineFd
from .ownership import lend
from .semaphore import ExternalSemaphore, SemaphoreCalls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..backend import Address, Native
    from .device import Device
    from .stream import Stream

__all__ = ["OwnTimelines", "PinnedWords", "no_timeout", "refuse_capture", "stream_words"]

MAX_VALUE: Final = timeline.MAX_DEVICE_VALUE
"""Of a word that streams wait for: they compare cyclically."""
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


def refuse_capture(stream: Stream) -> None:
    """Refuse a stream that is being captured: each launch would write, and wait for, the same value again."""
    if stream.capturing:
        raise InvalidArgumentError(
            "stream",
            f"{stream.label} is being captured, and a semaphore of stream words has its value for one time only: "
            "signal and wait outside of the graph, before and after its launch.",
        )


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
        try:
            self._pin, self._address = self._backend.pin(device._native, ctypes.addressof(self._words[0]), system.PAGE)
        except BaseException:
            self._unmap()
            raise

    def load(self, index: int) -> int:
        """A word as it stands, ahead of what the CPU does next."""
        value = self._words[index].value
        system.fence()
        return value

    def store(self, index: int, value: int) -> None:
        """One aligned 8-byte store of the CPU's, behind whatever this thread did before."""
        system.fence()
        self._words[index].value = value

    def write(self, stream: Stream, index: int, value: int) -> None:
        """Enqueue: the stream stores the word (``cuStreamWriteValue64`` / ``hipStreamWriteValue64``)."""
        self._backend.write_value(stream._native, self._address + index * _STRIDE, value)

    def wait(self, stream: Stream, index: int, value: int) -> None:
        """Enqueue: the stream waits for the word (``cuStreamWaitValue64`` / ``hipStreamWaitValue64``)."""
        self._backend.wait_value(stream._native, self._address + index * _STRIDE, value)

    def close(self) -> None:
        """Unpin and unmap; no stream uses it any more. May block as `Backend.releases_block` says."""
        self._backend.unpin(self._pin)
        self._unmap()

    def _unmap(self) -> None:
        self._words = []
        self._memory.close()


class _Own:
    """One of our own timelines as one device uses it."""

    __slots__ = ("fd", "label", "page", "pin", "stopped", "word")

    def __init__(self, fd: int, page: timeline.Page, pin: Native, word: Address) -> None:
        self.fd = fd
        self.page = page
        self.pin = pin
        self.word = word
        self.label = page.label
        self.stopped = False


class OwnTimelines(SemaphoreCalls):
    """Timeline semaphores of our own, which one device's streams use without anybody's help.

    See `gpuinterop.timeline` for what others see of them.
    """

    max_value = MAX_VALUE
    timeout_gap = no_timeout()

    def __init__(self, device: Device) -> None:
        self._device = device
        self._backend = stream_words(device)

    def create(self) -> ExternalSemaphore[Timeline]:
        """A new one, at 0."""
        return self._semaphore(self._take(*timeline.create()), exportable=True)

    def load(self, handle: TimelineFd) -> ExternalSemaphore[Timeline]:
        """One that another process, device or backend has made; consumes the handle."""
        native = lend(
            handle, lambda lent: self._map(cast(TimelineFd, lent).fd), user=f"{self._device.backend} import_semaphore"
        )
        return self._semaphore(native, exportable=False)

    def _semaphore(self, native: _Own, *, exportable: bool) -> ExternalSemaphore[Timeline]:
        return ExternalSemaphore(self._device, native, TimelineFd, exportable=exportable, calls=self)

    def _map(self, fd: int) -> _Own:
        address = system.map_shared(fd, system.PAGE)
        return self._take(fd, address, ours=False)

    def _take(self, fd: int, address: int, *, ours: bool = True) -> _Own:
        page = timeline.Page(fd, address, f"timeline semaphore {os.fstat(fd).st_ino}")
        try:
            if page.value > MAX_VALUE:
                raise HandleError(
                    f"handle: {page.label} stands at {page.value}; streams compare what is below 2**63. Make a new one."
                )
            pin, there = self._backend.pin(self._device._native, address, system.PAGE)
        except BaseException:
            system.unmap(address, system.PAGE)
            if ours:
                os.close(fd)
            raise
        page.give_to_device()
        return _Own(fd, page, pin, there + timeline.VALUE)

    # -- what a semaphore asks for -------------------------------------------------------------------------------

    def wait(self, batch: Sequence[_Own], stream: Stream, values: Sequence[int], timeout_ms: int | None) -> None:
        refuse_capture(stream)
        for own, value in zip(batch, values, strict=True):
            self._backend.wait_value(stream._native, own.word, value)

    def signal(self, batch: Sequence[_Own], stream: Stream, values: Sequence[int]) -> None:
        refuse_capture(stream)
        for own, value in zip(batch, values, strict=True):
            if value <= (current := own.page.value):  # it never shrinks, so by the time of the store it is no less
                raise InvalidArgumentError(
                    "value", f"{own.label} stands at {current}: a timeline only grows; signal {current + 1} or more."
                )
        for own, value in zip(batch, values, strict=True):
            self._backend.write_value(stream._native, own.word, value)

    def destroy(self, native: _Own) -> None:
        try:
            self._backend.unpin(native.pin)  # where it fails the page stays: the device may still have it
            system.unmap(native.page.address, system.PAGE)
        finally:
            os.close(native.fd)

    def abandon(self, native: _Own) -> None:
        native.stopped = True
        native.page.wake()

    def export(self, native: _Own) -> TimelineFd:
        return TimelineFd.adopt(system.duplicate(native.fd))

    def host_signal(self, native: _Own, value: int) -> None:
        native.page.signal(value)

    def host_wait(self, native: _Own, value: int, deadline: float | None) -> bool:
        def check() -> None:
            if native.stopped:
                raise ResourceClosedError(f"{native.label} was closed while this thread waited for it.")

        return native.page.wait(value, deadline, check)
