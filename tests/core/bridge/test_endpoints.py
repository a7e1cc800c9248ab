"""Endpoints of descriptors: eventfds, sync files, our own semaphores."""

from __future__ import annotations

import os
import struct
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge, SemaphoreEndpoint, _endpoints
from gpuinterop.handles import Binary
from tests.limits import LIMIT

from .scripted import blocked, count_of, end, until


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
    monkeypatch.setattr(system, "poll", lambda fd, wanted, timeout: wanted)
    assert not endpoint.wait(0, 0.0)
    endpoint.signal(0)
    assert endpoint.wait(0, 0.0)
    endpoint.close()


def test_a_full_eventfd_says_so() -> None:
    """A write to it would block, and the watcher must not."""
    endpoint = gi.bridge.EventFdEndpoint(gi.EventFd(os.eventfd(0)))
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


class SyncFiles:
    """Plays the sync files of a machine with DRM: eventfds stand in, whose poll() is that of a fence."""

    def __init__(self) -> None:
        self.status = 1
        self.asked: list[int] = []

    def ioctl(self, fd: int, number: int, request: bytearray, mutate: bool) -> int:
        # struct sync_file_info: char name[32], s32 status, u32 flags, u32 num_fences, u32 pad, u64 sync_fence_info
        assert (mutate, len(request)) == (True, 56)
        assert number == 3 << 30 | 56 << 16 | ord(">") << 8 | 4  # _IOWR('>', 4, struct sync_file_info)
        assert bytes(request) == bytes(56)
        self.asked.append(fd)
        struct.pack_into("=32si", request, 0, b"a fence", self.status)
        return 0


@pytest.fixture
def sync_files(monkeypatch: pytest.MonkeyPatch) -> SyncFiles:
    files = SyncFiles()
    monkeypatch.setattr(system, "link", lambda fd: "anon_inode:sync_file")
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
        with pytest.raises(gi.UnsupportedError, match="sync file"):
            call()
    semaphore.wait(stream)
    assert blocked(stream)
    assert sync_files.asked == [], "it is not signalled yet"
    os.write(mine, struct.pack("=Q", 1))
    for _ in range(3):
        stream.synchronize(LIMIT)
        semaphore.wait(stream)
    stream.synchronize(LIMIT)


def test_a_fence_in_error_fails_the_stream(
    sync_files: SyncFiles, bridge: Bridge, stream: gi.Stream, scope: ExitStack
) -> None:
    """poll() calls it signalled; its status says what it is: here -ECANCELED."""
    sync_files.status = -125
    semaphore: Any = scope.enter_context(bridge.import_semaphore(gi.SyncFd(os.eventfd(1))))
    with suppress(gi.DriverError):  # the stream may be known to have failed by then
        semaphore.wait(stream)
    with pytest.raises(gi.DriverError, match="ECANCELED"):
        stream.synchronize(LIMIT)


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
    fd: int = look.fd
    until(lambda: struct.unpack("=Q", os.pread(fd, 8, 16)) == (9,))
    made.host_wait(9, timeout=LIMIT)
    assert semaphore.value == 9
    made.host_signal(2**40)
    assert semaphore.value == 2**40


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
        semaphore.signal(stream, *second)
        made.host_wait(*second, timeout=LIMIT)
    end(semaphore)
    assert not made.closed, "it stays its owner's"
