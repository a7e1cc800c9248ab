"""64-bit words that streams write and wait for: `StreamMemoryBackend`, on pages that the test has mapped itself.

gpuinterop's own semaphores and the bridge build on these calls. The test reads and writes the words with plain loads
and stores, without any of the library's code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from ..._core.device import Device
from ..._core.own_timeline import stream_words
from ..._core.stream import Stream
from ...capabilities import Operation
from ...errors import GpuInteropError
from ...handles import OpaqueFd
from ..requirements import requires, skip_declared
from .base import LIMIT, Harness, Suite, becomes_idle, held, leaves_nothing, new_stream, pattern, together

WORDS = Operation.STREAM_MEMORY_OPS
MEMORY = ((Operation.IMPORT_MEMORY, OpaqueFd), (Operation.MAP_BUFFER, OpaqueFd))
MAX = 2**63 - 1
"""The largest value: streams compare cyclically, or as signed numbers."""
PAGE = mmap.PAGESIZE


class Page:
    """A page of words that the test has mapped, pinned by the backend under test.

    `fd` is the object to map, which others can map too; -1 means memory of this process only.
    """

    def __init__(self, device: Device, fd: int = -1) -> None:
        self._backend = stream_words(device)
        self.memory = mmap.mmap(fd, PAGE)
        self.words = (ctypes.c_uint64 * (PAGE // 8)).from_buffer(self.memory)
        self._streams: list[Stream] = []
        self._waits: dict[int, int] = {}
        try:
            pinned = self._backend.pin(device._handle, ctypes.addressof(self.words), PAGE)
        except BaseException:
            del self.words
            self.memory.close()
            raise
        self._pin, self.address = pinned

    def wait(self, stream: Stream, index: int, value: int) -> None:
        """Let the stream wait until the word is `value` or more."""
        self._streams.append(stream)
        self._waits[index] = max(value, self._waits.get(index, 0))
        self._backend.wait_value(stream._handle, self.address + 8 * index, value)

    def write(self, stream: Stream, index: int, value: int) -> None:
        """Let the stream store the word."""
        self._streams.append(stream)
        self._backend.write_value(stream._handle, self.address + 8 * index, value)

    def comes(self, index: int, value: int) -> bool:
        """Whether the word reaches `value`; polls it, without the driver."""
        deadline = time.monotonic() + LIMIT
        while self.words[index] != value:
            if time.monotonic() > deadline:
                return False
            os.sched_yield()
        return True

    def close(self) -> None:
        """Release waiting streams, and unpin when every stream is done with the page; close the streams after that."""
        for index, value in self._waits.items():
            self.words[index] = max(value, self.words[index])
        for stream in dict.fromkeys(self._streams):
            with contextlib.suppress(GpuInteropError):
                stream.synchronize(LIMIT)
        self._backend.unpin(self._pin)
        del self.words
        self.memory.close()


@requires(WORDS)
class StreamWordsSuite(Suite):
    """A stream waits for a word or stores one; the other side is the CPU, or another stream."""

    @pytest.fixture
    def streams(self, device: Device, scope: ExitStack) -> list[Stream]:
        """Two streams, which are closed after the page."""
        return [new_stream(device, scope) for _ in range(2)]

    @pytest.fixture
    def page(self, device: Device, streams: list[Stream], scope: ExitStack) -> Page:
        """A page of zeros."""
        page = Page(device)
        scope.callback(page.close)
        return page

    def test_waits_for_at_least(self, page: Page, streams: list[Stream]) -> None:
        """A wait ends when the CPU stores its value or more, not before; for an earlier value it does not wait."""
        stream = streams[0]
        large = 1 << 40
        for step, (less, value, stored) in enumerate(((1, 2, 2), (9, 10, large), (large + 1, large + 2, MAX))):
            page.wait(stream, step, value)
            assert held(stream), "the wait did not hold the stream"
            page.words[step] = less
            assert held(stream), f"a wait for {value} passed at {less}"
            page.words[step] = stored
            assert becomes_idle(stream), f"a wait for {value} did not pass at {stored}"
        page.wait(stream, 0, 0)
        page.wait(stream, 1, 5)
        page.wait(stream, 2, MAX)
        assert becomes_idle(stream)

    def test_all_64_bits_count(self, page: Page, streams: list[Stream]) -> None:
        """A word is compared and stored as a whole, and its neighbours stay unchanged."""
        stream = streams[0]
        page.wait(stream, 8, (3 << 32) + 7)
        page.words[8] = (2 << 32) + 0xFFFFFFFF
        assert held(stream), "only the lower half was compared"
        page.words[8] = (3 << 32) + 6
        assert held(stream), "only the upper half was compared"
        page.words[8] = (3 << 32) + 7
        assert becomes_idle(stream)
        for value in (0x0123456789ABCDEF, 1, MAX):
            page.words[15:18] = [MAX, 0, MAX]
            page.write(stream, 16, value)
            assert page.comes(16, value)
            assert page.words[15:18] == [MAX, value, MAX]
        last = PAGE // 8 - 1
        page.write(stream, last, 77)
        assert page.comes(last, 77)

    def test_stores_in_order(self, page: Page, streams: list[Stream]) -> None:
        """A store waits for earlier work on its stream; stores keep their order, and the last one stays."""
        stream = streams[0]
        page.wait(stream, 0, 1)
        for value in range(1, 200):
            page.write(stream, 1, value)
        assert held(stream)
        assert page.words[1] == 0, "a store did not wait for the wait before it"
        page.words[0] = 1
        deadline = time.monotonic() + LIMIT
        last = 0
        while last < 199 and time.monotonic() < deadline:
            seen = page.words[1]
            assert seen >= last, "a store came before an earlier one"
            last = seen
        assert last == 199
        assert becomes_idle(stream)
        assert page.words[1] == 199

    def test_streams_do_not_hold_each_other(self, page: Page, streams: list[Stream]) -> None:
        """A wait holds its own stream, and streams that wait for that stream; another stream's store ends it."""
        first, second = streams
        page.wait(first, 0, 1)
        event = first.record()
        page.write(second, 1, 1)
        assert page.comes(1, 1)
        assert becomes_idle(second)
        assert held(first)
        assert not event.done
        page.write(second, 0, 1)
        event.wait(LIMIT)
        assert becomes_idle(first)

    def test_ping_pong(self, page: Page, streams: list[Stream]) -> None:
        """Stream and CPU alternate in order; all rounds are enqueued before the first one."""
        stream = streams[0]
        rounds = 200
        for value in range(1, rounds + 1):
            page.wait(stream, 0, value)
            page.write(stream, 8, value)
        for value in range(1, rounds + 1):
            assert page.words[8] == value - 1, "the stream did not wait"
            page.words[0] = value
            assert page.comes(8, value)
        assert becomes_idle(stream)

    def test_one_object_pinned_twice(self, device: Device, streams: list[Stream], scope: ExitStack) -> None:
        """Two pinned mappings of one memory object have the same words, so processes can share them."""
        if not hasattr(os, "memfd_create"):
            skip_declared("memory objects without a file are Linux's")
        fd = os.memfd_create("gpuinterop.words", os.MFD_CLOEXEC)
        scope.callback(os.close, fd)
        os.ftruncate(fd, PAGE)
        pages = []
        for _ in range(2):
            pages.append(Page(device, fd))
            scope.callback(pages[-1].close)
        first, second = streams
        pages[0].wait(first, 3, 4)
        assert held(first)
        pages[1].write(second, 3, 4)
        assert becomes_idle(first)
        assert pages[0].words[3] == pages[1].words[3] == 4
        assert os.pread(fd, 8, 24) == (4).to_bytes(8, sys.byteorder)

    @requires(*MEMORY)
    def test_a_store_comes_behind_the_work(self, harness: Harness, page: Page, streams: list[Stream]) -> None:
        """Once the stored word is visible, so is the stream's earlier work, without a call to the driver."""
        memory, buffer = harness.buffer(1 << 22)
        stream = streams[0]
        for value in range(1, 9):
            buffer.fill(value, stream=stream)
            page.write(stream, 0, value)
            assert page.comes(0, value)
            assert memory.read((1 << 22) - 64, 64) == bytes([value]) * 64
        stream.synchronize(LIMIT)

    @requires(*MEMORY)
    def test_work_comes_behind_the_wait(self, harness: Harness, page: Page, streams: list[Stream]) -> None:
        """After its wait, the stream reads bytes that were written before the word was stored."""
        memory, buffer = harness.buffer(4096)
        stream = streams[0]
        backend: Any = harness.device.driver
        for value in range(1, 9):
            page.wait(stream, 0, value)
            backend.copy(stream._handle, page.address + 1024, buffer.ptr, 1024)  # the page is pinned host memory
            page.write(stream, 1, value)
            expected = pattern(1024, value)
            memory.write(0, expected)
            page.words[0] = value
            assert page.comes(1, value)
            assert ctypes.string_at(ctypes.addressof(page.words) + 1024, 1024) == expected

    def test_threads(self, device: Device, scope: ExitStack) -> None:
        """Eight threads, each with its own stream, enqueue at the same time on one page."""
        streams = [new_stream(device, scope) for _ in range(8)]
        page = Page(device)
        scope.callback(page.close)
        failures: list[str] = []
        start = threading.Barrier(8)

        def work(index: int) -> None:
            stream = streams[index]
            start.wait(LIMIT)
            for value in range(1, 51):
                page.wait(stream, 16 * index, value)
                page.write(stream, 16 * index + 8, value)
                page.words[16 * index] = value
                if not page.comes(16 * index + 8, value):
                    failures.append(f"thread {index} did not see {value}")
                    return

        together([functools.partial(work, index) for index in range(8)])
        assert not failures

    def test_nothing_is_left_over(self, device: Device, streams: list[Stream]) -> None:
        """Repeated rounds of pinning, use and unpinning leave no mapping and no descriptor."""
        fd = os.memfd_create("gpuinterop.words", os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else -1
        if fd >= 0:
            os.ftruncate(fd, PAGE)

        def round_trip(turn: int) -> None:
            page = Page(device, fd)
            try:
                page.wait(streams[0], 0, turn + 1)
                page.write(streams[1], 0, turn + 1)
                assert becomes_idle(streams[0])
            finally:
                page.close()

        try:
            leaves_nothing(round_trip)
        finally:
            if fd >= 0:
                os.close(fd)
