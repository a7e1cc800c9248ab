"""Endpoints of descriptors: eventfds, sync files, our own semaphores."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge, SemaphoreEndpoint, _endpoints
from gpuinterop.handles import Binary

from ..fake import fake_device
from .scripted import LIMIT, Scripted, blocked, count_of, end, until


def test_an_eventfd_adds_one_and_takes_one() -> None:
    mine = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
    endpoint = gi.bridge.EventFdEndpoint(gi.EventFd(os.dup(mine)))
    assert not endpoint.wait(0, 0.0)
    assert not endpoint.wait(0, 0.01)
    os.write(mine, struct.pack("=Q", 2))
    assert endpoint.wait(0, 0.0)
    assert endpoint.wait(0, LIMIT)
    assert not endpoint.wait(0, 0.0)
    endpoint.signal(0)
    endpoint.signal(0)
    assert [count_of(mine) for _ in range(3)] == [1, 1, None]
    endpoint.close()
    os.write(mine, struct.pack("=Q", 1))  # still open: only the endpoint's own was closed
    os.close(mine)


def test_without_the_semaphore_flag_no_signal_is_lost() -> None:
    """A read takes them all: what is left over is for the next waits, and goes back when the endpoint is closed."""
    mine = os.eventfd(3, os.EFD_NONBLOCK)
    endpoint = gi.bridge.EventFdEndpoint(gi.EventFd(os.dup(mine)))
    assert endpoint.wait(0, 0.0)
    assert count_of(mine) is None
    os.write(mine, struct.pack("=Q", 1))
    assert [endpoint.wait(0, 0.0) for _ in range(4)] == [True, True, True, False]
    os.write(mine, struct.pack("=Q", 5))
    assert endpoint.wait(0, 0.0)
    endpoint.close()
    assert count_of(mine) == 4
    os.close(mine)


def test_a_signal_that_somebody_else_takes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the read; the descriptor blocks, and the watcher must not."""
    endpoint = gi.bridge.EventFdEndpoint(gi.EventFd(os.eventfd(0)))
    monkeypatch.setattr(_endpoints, "_polls", lambda fd, wanted, timeout: True)
    assert not endpoint.wait(0, 0.0)
    endpoint.signal(0)
    assert endpoint.wait(0, 0.0)
    endpoint.close()
    with pytest.raises(gi.DriverError, match="EBADF") as caught:
        endpoint.wait(0, 0.0)
    assert "fence" not in str(caught.value)


@pytest.mark.parametrize("flags", [os.EFD_NONBLOCK, 0], ids=["nonblocking", "blocking"])
def test_a_failing_eventfd_says_so(flags: int) -> None:
    """Also one that blocks: the watcher must not."""
    endpoint = gi.bridge.EventFdEndpoint(gi.EventFd(os.eventfd(0, flags)))
    os.write(endpoint._fd, struct.pack("=Q", 2**64 - 2))  # full
    with pytest.raises(gi.DriverError, match=r"write\(eventfd\)"):
        endpoint.signal(0)
    endpoint.close()


@pytest.mark.parametrize("kind", [gi.EventFd, gi.TimelineFd])
def test_an_endpoint_takes_the_descriptor_of_a_handle_that_owned_it(host: Device, kind: Any) -> None:
    """The handle ends, and the number stays open: other files do not get it while the endpoint uses it."""
    before = sorted(os.listdir("/proc/self/fd"))
    with host.create_semaphore(gi.TimelineFd) as semaphore:
        handle: Any = kind.adopt(os.eventfd(0)) if kind is gi.EventFd else semaphore.export()
        number = handle.fd
        make: Any = gi.bridge.EventFdEndpoint if kind is gi.EventFd else gi.bridge.OwnTimelineEndpoint
        endpoint = make(handle)
        handle.close()
        other = os.memfd_create("other")
        assert (handle.closed, other == number) == (True, False)
        endpoint.signal(1)
        assert endpoint.wait(1, 0.0)
        endpoint.close()
        assert os.fstat(other).st_size == 0
        os.close(other)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("make", [gi.bridge.EventFdEndpoint, gi.bridge.SyncFdEndpoint])
def test_a_handle_that_ends_while_an_endpoint_looks_at_it(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint would use, and close, whatever file gets the number."""
    kind, link = (gi.EventFd, "[eventfd]") if make is gi.bridge.EventFdEndpoint else (gi.SyncFd, "sync_file")
    handle: Any = kind.adopt(os.eventfd(0))
    before = len(os.listdir("/proc/self/fd"))

    thread = threading.Thread(target=handle.close)

    def readlink(path: str) -> str:
        if thread.ident is None:  # to close it looks, too
            thread.start()
            thread.join(LIMIT)
        return f"anon_inode:{link}"

    monkeypatch.setattr(os, "readlink", readlink)
    with pytest.raises(gi.HandleError, match="is closed"):
        make(handle)
    assert len(os.listdir("/proc/self/fd")) == before - 1


class SyncFileInfo(ctypes.Structure):
    """``struct sync_file_info`` of linux/sync_file.h."""

    _fields_: ClassVar = [
        ("name", ctypes.c_char * 32), ("status", ctypes.c_int32), ("flags", ctypes.c_uint32),
        ("num_fences", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("sync_fence_info", ctypes.c_uint64),
    ]  # fmt: skip


class SyncFiles:
    """Plays the sync files of a machine with DRM: eventfds stand in, whose poll() is that of a fence."""

    def __init__(self) -> None:
        self.status = 1
        self.asked: list[int] = []
        self.error = 0

    def ioctl(self, fd: int, number: int, request: bytearray, mutate: bool) -> int:
        assert mutate
        assert number == 3 << 30 | ctypes.sizeof(SyncFileInfo) << 16 | ord(">") << 8 | 4  # _IOWR('>', 4, ...)
        assert len(request) == ctypes.sizeof(SyncFileInfo)
        info = SyncFileInfo.from_buffer(request)
        assert (info.flags, info.num_fences, info.pad, info.sync_fence_info) == (0, 0, 0, 0)
        self.asked.append(fd)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        info.name, info.status = b"a fence", self.status
        return 0


@pytest.fixture
def sync_files(monkeypatch: pytest.MonkeyPatch) -> SyncFiles:
    files = SyncFiles()
    monkeypatch.setattr(_endpoints, "_check_link", lambda *_: None)
    monkeypatch.setattr(_endpoints, "fcntl", SimpleNamespace(ioctl=files.ioctl))
    return files


def test_a_sync_file_passes_every_wait_and_takes_no_signal(
    sync_files: SyncFiles, bridge: Bridge, stream: gi.Stream, scope: ExitStack
) -> None:
    mine = os.eventfd(0, os.EFD_NONBLOCK)
    scope.callback(os.close, mine)
    semaphore: Any = scope.enter_context(bridge.import_semaphore(gi.SyncFd(os.dup(mine))))
    assert semaphore.kind is Binary
    for call in (lambda: semaphore.signal(stream), semaphore.host_signal):
        with pytest.raises(gi.UnsupportedError, match="only the driver that made a sync file"):
            call()
    semaphore.wait(stream)
    assert blocked(stream)
    assert sync_files.asked == [], "it is not signalled yet"
    os.write(mine, struct.pack("=Q", 1))
    for _ in range(3):
        stream.synchronize(LIMIT)
        semaphore.wait(stream)
    stream.synchronize(LIMIT)
    assert len(sync_files.asked) == 1


def test_a_fence_in_error_fails_the_stream(host: Device, scope: ExitStack, sync_files: SyncFiles) -> None:
    """poll() calls it signalled; its status says what it is: here -ECANCELED."""
    sync_files.status = -125
    mine = os.eventfd(1)
    semaphore: Any = scope.enter_context(scope.enter_context(Bridge(host)).import_semaphore(gi.SyncFd(mine)))
    stream = scope.enter_context(host.create_stream())
    behind = stream.record
    with suppress(gi.DriverError):  # the stream may be known to have failed by then
        semaphore.wait(stream)
        behind().wait(LIMIT)
    with pytest.raises(gi.DriverError, match=r"ECANCELED.*the fence was in error"):
        stream.synchronize(LIMIT)


def test_a_sync_file_that_cannot_be_asked(sync_files: SyncFiles) -> None:
    endpoint = gi.bridge.SyncFdEndpoint(gi.SyncFd(os.eventfd(1)))
    sync_files.error = 25  # ENOTTY
    with pytest.raises(gi.DriverError, match="SYNC_IOC_FILE_INFO") as caught:
        endpoint.wait(0, 0.0)
    assert "fence was in error" not in str(caught.value)
    endpoint.close()


@pytest.mark.parametrize("make", [gi.EventFd, gi.SyncFd, gi.TimelineFd, gi.OpaqueFd])
def test_a_descriptor_of_another_kind_stays_the_callers(bridge: Bridge, make: Any) -> None:
    fd, other = os.pipe()
    handle = make(fd)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((gi.HandleError, gi.UnsupportedError)) as caught:
        bridge.import_semaphore(handle)
    assert "TimelineEndpoint" in str(caught.value) or make not in (gi.TimelineFd, gi.OpaqueFd)
    assert handle.fd == fd
    assert len(os.listdir("/proc/self/fd")) == before
    os.write(other, b"x")
    assert os.read(fd, 1) == b"x"
    os.close(fd)
    os.close(other)


def test_success_consumes_the_handle(bridge: Bridge) -> None:
    fd = os.eventfd(0)
    handle = gi.EventFd(fd)
    semaphore: Any = bridge.import_semaphore(handle)
    with pytest.raises(gi.GpuInteropError):
        _ = handle.fd
    with pytest.raises(gi.GpuInteropError):
        bridge.import_semaphore(handle)
    end(semaphore)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_one_of_our_own_timelines(host: Device, bridge: Bridge, stream: gi.Stream, scope: ExitStack) -> None:
    """The value is read from the memfd as `gpuinterop.timeline` specifies it: 8 bytes at 16."""
    made = scope.enter_context(host.create_semaphore(gi.TimelineFd))
    look = made.export()
    scope.callback(look.close)
    semaphore = scope.enter_context(bridge.import_semaphore(made.export()))
    semaphore.wait(stream, 4)
    assert blocked(stream)
    made.host_signal(4)
    stream.synchronize(LIMIT)
    semaphore.signal(stream, 9)
    fd: int = look.fd  # type: ignore[attr-defined]
    until(lambda: struct.unpack("=Q", os.pread(fd, 8, 16)) == (9,))
    made.host_wait(9, timeout=LIMIT)
    assert semaphore.value == 9
    made.host_signal(2**40)
    assert semaphore.value == 2**40


def test_the_counter_of_an_endpoint(bridge: Bridge, scope: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridged timeline has its endpoint's; one without is a gap, from which a handoff begins at 0."""
    endpoint = Scripted()
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
    endpoint.reached = 6
    with pytest.raises(gi.UnsupportedError, match=r"Endpoint|counter"):
        _ = semaphore.value
    assert gi.Handoff(semaphore).frame == 0
    monkeypatch.setattr(Scripted, "counter", lambda endpoint: endpoint.reached)
    assert semaphore.value == 6
    assert gi.Handoff(semaphore).frame == 3
    binary = scope.enter_context(bridge.from_endpoint(Scripted(gi.Binary)))
    with pytest.raises(gi.InvalidArgumentError, match="has no counter"):
        _ = binary.value


@pytest.mark.parametrize("kind", [gi.OpaqueFd, gi.TimelineFd])
def test_a_host_semaphore_as_the_foreign_side(host: Device, bridge: Bridge, scope: ExitStack, kind: Any) -> None:
    made: Any = scope.enter_context(host.create_semaphore(kind))
    semaphore: Any = scope.enter_context(bridge.from_endpoint(SemaphoreEndpoint(made)))
    stream, other = (scope.enter_context(host.create_stream()) for _ in range(2))
    for turn in range(1, 20, 2):
        first, second = ((), ()) if kind is gi.OpaqueFd else ((turn,), (turn + 1,))
        semaphore.wait(stream, *first)
        made.signal(other, *first)
        stream.synchronize(LIMIT)
        other.synchronize(LIMIT)
        semaphore.signal(stream, *second)
        made.host_wait(*second, timeout=LIMIT)
    end(semaphore)
    made.host_signal(*(() if kind is gi.OpaqueFd else (99,)))  # it stays its owner's


def test_an_endpoint_for_semaphores_that_the_cpu_cannot_reach() -> None:
    device, _ = fake_device()
    with (
        device.import_semaphore(gi.TimelineWin32(handle=8)) as semaphore,
        pytest.raises(gi.UnsupportedError, match="without a stream"),
    ):
        SemaphoreEndpoint(semaphore)
    with pytest.raises(gi.ArgumentTypeError, match="semaphore"):
        SemaphoreEndpoint(8)  # type: ignore[arg-type]
