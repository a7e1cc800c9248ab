"""Words that streams write and wait for, and the timelines made of them: what reaches the driver, and what does not.

The page is looked at through its descriptor, and the backend's streams wait for nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop import timeline
from gpuinterop._core.device import Device
from gpuinterop._core.own_timeline import SPARE, PinnedWords
from gpuinterop.backend import leave_to_core
from gpuinterop.handles import HandleOrigin, OriginKind
from tests.limits import LIMIT

from .fake import FakeWords, fake_device
from .forged import GROW, PAGE, SHRINK, forge, put

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds")

MAX = 2**63 - 1
GET_SEALS = 1034


@pytest.fixture
def backend() -> FakeWords:
    return FakeWords()


@pytest.fixture
def device(backend: FakeWords) -> Device:
    return fake_device(backend=backend)[0]


@pytest.fixture
def stream(device: Device) -> Iterator[Any]:
    with device.create_stream() as made:
        yield made


def made_by(device: Device) -> Any:
    return device.create_semaphore(gi.TimelineFd)


def counter(fd: int) -> int:
    """The page's value, read through the descriptor."""
    return int.from_bytes(os.pread(fd, 8, 16), sys.byteorder)


def store(fd: int, value: int) -> None:
    """A device's store: the value, and nothing else."""
    os.pwrite(fd, value.to_bytes(8, sys.byteorder), 16)


def operations(backend: FakeWords) -> list[tuple[Any, ...]]:
    """What streams were given."""
    return [call for call in backend.calls if call[0] in ("write_value", "wait_value", "signal", "wait")]


def exported(semaphore: Any) -> Any:
    """The semaphore, of which others may have the page: it is unpinned, not used again."""
    semaphore.export().close()
    return semaphore


def mapped(fd: int) -> int:
    """How often this process has mapped the object."""
    inode = os.fstat(fd).st_ino
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return sum(line.split()[4] == str(inode) for line in lines)


def descriptors(fd: int) -> int:
    """How many descriptors of this process are the object."""
    wanted = os.fstat(fd)
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            there = os.fstat(int(name))
            found += (there.st_dev, there.st_ino) == (wanted.st_dev, wanted.st_ino)
    return found


# -- pinned words ----------------------------------------------------------------------------------------------------


def test_each_word_is_its_own(device: Device, backend: FakeWords, stream: Any) -> None:
    words = PinnedWords(device)
    (_, address, size) = next(call for call in backend.calls if call[0] == "pin")
    assert size == PAGE
    assert words.COUNT == PAGE // 64
    assert [words.load(index) for index in range(words.COUNT)] == [0] * words.COUNT
    for index in range(words.COUNT):
        words.write(stream._known_as(), index, 1000 + index)
        words.wait(stream._known_as(), index, 2000 + index)
    for index in range(words.COUNT):
        # a cache line each, by the device's address; where the process sees it 0 to 7 are the value
        there = address + backend.APART + 64 * index
        assert ("write_value", stream._handle, there, 1000 + index) in backend.calls
        assert ("wait_value", stream._handle, there, 2000 + index) in backend.calls
        assert ctypes.c_uint64.from_address(address + 64 * index).value == 1000 + index
    words.store(3, MAX)
    assert ctypes.c_uint64.from_address(address + 192).value == words.load(3) == MAX
    assert words.load(2) == 1002
    words.close()
    assert backend.count("pin") == 0


def test_without_the_capability_nothing_is_called() -> None:
    backend = FakeWords()
    device, _ = fake_device(gi.Operation.STREAM_MEMORY_OPS, backend=backend)
    with pytest.raises(gi.UnsupportedError, match="stream_memory_ops"):
        PinnedWords(device)
    assert backend.calls == []


def fail() -> None:
    raise gi.DriverError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY", "nothing can be pinned.")


def test_words_that_cannot_be_pinned_leave_nothing(device: Device, backend: FakeWords) -> None:
    backend.on_pin = fail

    def kept() -> tuple[list[str], int]:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            pages = [line for line in lines if "/dev/zero" in line or "memfd:gpuinterop.timeline" in line]
        return pages, len(os.listdir("/proc/self/fd"))

    before = kept()  # other devices keep theirs for the next semaphores
    for make in (PinnedWords, made_by) * 3:
        with pytest.raises(gi.DriverError, match="cuMemHostRegister"):
            make(device)
    gc.collect()
    assert kept() == before


# -- making one --------------------------------------------------------------------------------------------------------


def test_the_page_is_as_specified(device: Device) -> None:
    """`gpuinterop.timeline`, read with nothing but the descriptor."""
    with made_by(device) as made, made.export() as handle:
        page = os.pread(handle.fd, PAGE + 1, 0)
        assert len(page) == PAGE
        assert struct.unpack_from("=8sIIQI", page) == (b"GIPTLSM1", 2, 0, 0, 1)
        assert page[28:64] == bytes(36)
        assert page[128:] == bytes(PAGE - 128)
        assert fcntl.fcntl(handle.fd, GET_SEALS) & (SHRINK | GROW) == SHRINK | GROW
        assert not os.get_inheritable(handle.fd)


def test_streams_use_the_word_in_the_page(device: Device, backend: FakeWords, stream: Any) -> None:
    with made_by(device) as made, made.export() as handle:
        (_, address, size) = backend.calls[-1]
        assert size == PAGE
        made.signal(stream, 5)
        assert counter(handle.fd) == 5
        made.wait(stream, 9)
        word = address + backend.APART + 16
        assert operations(backend) == [
            ("write_value", stream._handle, word, 5),
            ("wait_value", stream._handle, word, 9),
        ]
        assert stream._known_as().waiting_for().endswith(f"{made.label} to reach 9")


@pytest.mark.parametrize("value", [2**63, -1])
def test_values_that_a_stream_cannot_wait_for(device: Device, backend: FakeWords, stream: Any, value: int) -> None:
    with made_by(device) as made, made.export() as handle:
        calls: tuple[Callable[[], object], ...] = (
            lambda: made.signal(stream, value),
            lambda: made.wait(stream, value),
            lambda: made.host_signal(value),
            lambda: made.host_wait(value, timeout=0.0),
            lambda: gi.SemaphoreBatch(made).wait(stream, (value,)),
            lambda: gi.SemaphoreBatch(made).signal(stream, (value,)),
        )
        for call in calls:
            with pytest.raises(gi.InvalidArgumentError, match=rf"^value: expected 0 to 2\*\*63 - 1, got {value}"):
                call()
        assert operations(backend) == []
        assert counter(handle.fd) == 0


def test_it_never_goes_back(device: Device, backend: FakeWords, stream: Any) -> None:
    """On one stream, and wherever the counter has got already; across streams an order to come may be legal."""
    with made_by(device) as made, device.create_stream() as other, made.export() as handle:
        made.signal(stream, 5)
        for value in (5, 4, 0):
            with pytest.raises(gi.InvalidArgumentError, match=r"^value: .* same stream for .*: .* signal 6 or more"):
                made.signal(stream, value)
        for value in (5, 1):
            with pytest.raises(gi.InvalidArgumentError, match=r"^value: .* is at 5\b.* signal 6\b"):
                made.signal(other, value)
        made.host_signal(8)
        with pytest.raises(gi.InvalidArgumentError, match=r"is at 8\b"):
            made.signal(stream, 7)
        assert counter(handle.fd) == 8
        made.signal(other, 9)
        assert [call[3] for call in operations(backend)] == [5, 9]


def test_a_batch_is_checked_before_it_begins(device: Device, backend: FakeWords, stream: Any) -> None:
    with made_by(device) as one, made_by(device) as two:
        two.host_signal(3)
        batch = gi.SemaphoreBatch(one, two)
        with pytest.raises(gi.InvalidArgumentError, match=r"is at 3\b"):
            batch.signal(stream, (1, 3))
        assert operations(backend) == []
        batch.wait(stream, (1, 4))
        batch.signal(stream, (1, 4))
        assert [(call[0], call[3]) for call in operations(backend)] == [
            ("wait_value", 1),
            ("wait_value", 4),
            ("write_value", 1),
            ("write_value", 4),
        ]
        with device.import_semaphore(gi.TimelineWin32(handle=8)) as driver_s:
            for mixed in ((one, driver_s), (driver_s, one)):
                with pytest.raises(gi.InvalidArgumentError, match=r"^semaphores: .*batch for each"):
                    gi.SemaphoreBatch(*mixed)


def test_a_batch_of_which_one_is_closed_gives_the_stream_nothing(
    device: Device, backend: FakeWords, stream: Any
) -> None:
    """Not what stands before that one either, though each wait is a call of its own."""
    with made_by(device) as one:
        other = made_by(device)
        batch = gi.SemaphoreBatch(one, other)
        other.close()
        for call in (batch.wait, batch.signal):
            with pytest.raises(gi.ResourceClosedError, match=f"{other.label} is closed"):
                call(stream, (1, 1))
        assert operations(backend) == []


def test_no_capture(device: Device, backend: FakeWords, stream: Any) -> None:
    with made_by(device) as made, made.export() as handle:
        backend.capturing.add(stream._ptr)
        for call in (
            lambda: made.wait(stream, 1),
            lambda: made.signal(stream, 1),
            lambda: gi.SemaphoreBatch(made).wait(stream, (1,)),
            lambda: gi.SemaphoreBatch(made).signal(stream, (1,)),
        ):
            with pytest.raises(gi.InvalidArgumentError, match=r"^stream: .* outside of the graph"):
                call()
        with pytest.raises(gi.InvalidArgumentError, match=r"^stream: .* is being captured"):
            made.wait(stream, 1, timeout=LIMIT)
        backend.capturing.clear()
        assert operations(backend) == []
        assert counter(handle.fd) == 0
        made.signal(stream, 1)  # what was refused left no trace
        assert stream._known_as().waiting_for() == ""


@pytest.mark.parametrize("error", [gi.DriverError("cuStreamWaitValue64", 1, "INVALID", "no"), KeyboardInterrupt()])
def test_a_wait_that_fails_behind_the_call_is_known(
    device: Device, backend: FakeWords, stream: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of a batch may be waited for, and Ctrl-C strikes anywhere: no page goes from under the stream."""
    first, second = exported(made_by(device)), exported(made_by(device))
    wait_value = backend.wait_value
    given: list[int] = []

    def fail(native: Any, word: int, value: int) -> None:
        wait_value(native, word, value)
        given.append(word)
        if value == 2:
            raise error

    monkeypatch.setattr(backend, "wait_value", fail)
    backend.blocked.add(stream.ptr)
    with pytest.raises(type(error)):
        gi.SemaphoreBatch(first, second).wait(stream, (1, 2))
    assert len(given) == 2
    assert "to reach 1" in stream._known_as().waiting_for()
    with pytest.raises(type(error)):
        second.wait(stream, 2)
    for semaphore in (first, second):
        semaphore.close()
    device.drain()
    assert backend.count("pin") == 2, "unpinned under a stream that waits"
    backend.blocked.clear()
    device.drain()
    assert not backend.count("pin")


# -- handles -----------------------------------------------------------------------------------------------------------


def test_export_and_import(device: Device, backend: FakeWords, stream: Any) -> None:
    with made_by(device) as made:
        handle = made.export()
        assert handle.origin == HandleOrigin(kind=OriginKind.TIMELINE, trusted=True)
        look = os.dup(handle.fd)
        try:
            assert mapped(look) == 1
            with device.import_semaphore(handle) as other:
                assert mapped(look) == 2
                with pytest.raises(gi.HandleError, match="consumed"):
                    _ = handle.fd
                assert descriptors(look) == 3  # of the maker, the import and this test
                other.signal(stream, 6)
                assert counter(look) == 6
                made.host_wait(6, timeout=LIMIT)
                with pytest.raises(gi.InvalidArgumentError, match="was imported"):
                    other.export()
            made.close()
            assert (mapped(look), descriptors(look)) == (0, 1)
        finally:
            os.close(look)
    assert ("import_semaphore", "TimelineFd") not in backend.calls
    assert backend.count("pin") == 0


def test_an_import_that_fails_behind_the_pin_is_given_back_by_a_drain(device: Device, backend: FakeWords) -> None:
    """The page and its descriptor are there until the core unpins it; the handle stays the caller's."""

    def fail() -> None:
        error = gi.DriverError("cuMemHostGetDevicePointer", 1, "CUDA_ERROR_INVALID_VALUE")
        leave_to_core(error, lambda: unpinned.append((mapped(handle.fd), descriptors(handle.fd))))
        raise error

    unpinned: list[tuple[int, int]] = []
    with made_by(device) as made, made.export() as handle:
        backend.on_pin = fail
        with pytest.raises(gi.DriverError):
            device.import_semaphore(handle)
        device.drain()
        assert unpinned == [(2, 3)]  # of the maker, the handle and the import
        assert (mapped(handle.fd), descriptors(handle.fd)) == (1, 2)


def test_a_failed_import_leaves_the_handle(device: Device, backend: FakeWords) -> None:
    with gi.TimelineFd.adopt(forge()) as handle:
        before = os.pread(handle.fd, PAGE, 0)
        backend.on_pin = fail
        with pytest.raises(gi.DriverError, match="cuMemHostRegister"):
            device.import_semaphore(handle)
        backend.on_pin = lambda: None
        assert (mapped(handle.fd), descriptors(handle.fd)) == (0, 1)
        assert os.pread(handle.fd, PAGE, 0) == before
        handle.origin = HandleOrigin(kind=OriginKind.BINARY)
        with pytest.raises(gi.HandleError, match="exported from a binary"):
            device.import_semaphore(handle)
        handle.origin = None
        store(handle.fd, 2**63)
        with pytest.raises(gi.HandleError, match=r"is at 9223372036854775808\b.* below 2\*\*63"):
            device.import_semaphore(handle)
        assert (mapped(handle.fd), descriptors(handle.fd)) == (0, 1)
        store(handle.fd, MAX)
        device.import_semaphore(handle).close()


def test_another_version_of_our_page_is_refused_by_name(device: Device, backend: FakeWords) -> None:
    """Not handed to the driver, which would say less; version 1 had a lock that led out of the page."""
    with gi.TimelineFd.adopt(forge(put(8, b"\1"))) as handle:
        for refused in (device.import_semaphore, gi.bridge.OwnTimelineEndpoint):
            with pytest.raises(gi.HandleError, match=r"version is 1\b"):
                refused(handle)
        assert not handle.closed
    assert backend.calls == []


FOREIGN: dict[str, Callable[[], int]] = {
    "no magic": lambda: forge(put(0, bytes(8))),
    "may shrink": lambda: forge(seals=GROW),
    "too small": lambda: forge(size=128),
    "a device": lambda: os.open("/dev/null", os.O_RDWR),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_is_not_ours_goes_to_the_driver(device: Device, backend: FakeWords, what: str) -> None:
    """Which refuses it: the descriptor stays open, and nothing was mapped or written."""

    def refuse(handle: Any) -> None:
        raise gi.DriverError("cuImportExternalSemaphore", 999, "CUDA_ERROR_UNKNOWN", "it is none.")

    backend.on_import = refuse
    with gi.TimelineFd.adopt(FOREIGN[what]()) as handle:
        status = os.fstat(handle.fd)
        is_file = status.st_size > 0
        before = os.pread(handle.fd, PAGE, 0) if is_file else b""
        assert not timeline.is_ours(handle.fd)
        with pytest.raises(gi.DriverError, match="cuImportExternalSemaphore"):
            device.import_semaphore(handle)
        assert backend.calls == [("import_semaphore", "TimelineFd")]
        assert os.fstat(handle.fd).st_ino == status.st_ino
        if is_file:
            assert os.pread(handle.fd, PAGE, 0) == before
            assert (mapped(handle.fd), descriptors(handle.fd)) == (0, 1)


# -- waiting and closing -----------------------------------------------------------------------------------------------


def test_closing_waits_for_the_streams(device: Device, backend: FakeWords, stream: Any) -> None:
    """The page stays pinned and mapped while a stream may use it, and goes in order: unpinned, unmapped, closed."""
    made = made_by(device)
    look = made.export().detach()
    seen: list[tuple[int, int]] = []
    backend.on_unpin = lambda address: seen.append((mapped(look), descriptors(look)))
    backend.blocked.add(stream._ptr)
    made.wait(stream, 3)
    made.close()
    for call in (made.export, lambda: made.host_signal(3), lambda: made.wait(stream, 4)):
        with pytest.raises(gi.ResourceClosedError):
            call()
    with pytest.raises(gi.ResourceBusyError):
        made.close(timeout=0.0)
    open_now = descriptors(look)
    assert (mapped(look), seen) == (1, [])
    backend.blocked.clear()
    made.close(timeout=LIMIT)
    assert seen == [(1, open_now)]
    assert (mapped(look), descriptors(look)) == (0, open_now - 1)
    os.close(look)


def test_what_nobody_else_ever_had_is_used_again(device: Device, backend: FakeWords, stream: Any) -> None:
    """To unpin a page waits for the whole device. A later semaphore's begins at 0, and nobody waits at its gate."""
    many = [made_by(device) for _ in range(3)]
    for made in many:
        made.signal(stream, 9)
        made.close(timeout=LIMIT)
    assert backend.count("pin") == 3
    again = [made_by(device) for _ in range(3)]
    assert len([call for call in backend.calls if call[0] == "pin"]) == 3
    for made in again:
        with made.export() as handle:
            assert counter(handle.fd) == 0
        made.close(timeout=LIMIT)
    assert backend.count("pin") == 0


def test_what_others_may_have_is_unpinned_when_nobody_waits() -> None:
    """And so is what is too much to keep: to unpin a page waits for the whole device."""

    class Blocking(FakeWords):
        releases_block = True

    backend = Blocking()
    device, _ = fake_device(backend=backend)
    with device.create_stream() as stream, exported(made_by(device)) as pending:
        many = [made_by(device) for _ in range(SPARE + 1)]
        shared = exported(made_by(device))
        backend.blocked.add(stream._ptr)
        pending.wait(stream, 1)
        for made in many:
            made.close(timeout=LIMIT)
        with pytest.raises(gi.ResourceBusyError, match="whole device"):
            shared.close(timeout=0.0)
        assert backend.count("pin") == SPARE + 3
        backend.blocked.clear()
        device.drain(LIMIT)
        assert backend.count("pin") == SPARE + 1
    device.drain(LIMIT)
    assert backend.count("pin") == SPARE
