"""The bridge, rule by rule: on the host's streams, and on a backend whose words the test stores itself."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop._core.native import GONE, retire
from gpuinterop._core.native_stream import NativeStream
from gpuinterop._core.semaphore import ExternalSemaphore, SemaphoreBatch
from gpuinterop._core.stream_memory import SPARE, spare_words
from gpuinterop.backend import Native, StreamMemoryBackend
from gpuinterop.bridge import Bridge, Endpoint, SemaphoreEndpoint, SyncobjEndpoint, _endpoints, _watcher
from gpuinterop.capabilities import Operation
from gpuinterop.handles import Binary, Timeline

from .fake import FakeBackend, fake_device

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors and pidfds are Linux's")

LIMIT = 20.0
RELEASED = 2**63 - 1
Script = Callable[[], object]


class Scripted(Endpoint):
    """A foreign semaphore that the test moves."""

    label = "a scripted semaphore"

    def __init__(self, kind: type = Timeline) -> None:
        self.kind = kind
        self.reached = 0
        self.signals = 0
        """Of a binary one: how many are there to be taken."""
        self.told: list[int] = []
        self.closed = 0
        self.on_wait: Script = lambda: None
        self.on_signal: Script = lambda: None

    def wait(self, value: int, timeout: float) -> bool:
        self.on_wait()
        if self.kind is Timeline:
            return self.reached >= value
        if self.signals:
            self.signals -= 1
            return True
        return False

    def signal(self, value: int) -> None:
        self.on_signal()
        self.told.append(value)

    def close(self) -> None:
        self.closed += 1


class WordsBackend(FakeBackend, StreamMemoryBackend):
    """Streams that do nothing by themselves: what they were to wait for and write stands in lists.

    They are idle when their waits have passed, whatever is left to be written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pins: dict[int, int] = {}
        self.waits: list[tuple[Native, int, int]] = []
        """Stream, address, value."""
        self.pending: list[tuple[Native, int, int]] = []
        """Those that may not have passed."""
        self.writes: list[tuple[Native, int, int]] = []
        self.captured: set[int] = set()
        self.on_pin: Script = lambda: None
        self.before_wait: Script = lambda: None
        self.before_write: Script = lambda: None

    def pin(self, device: Native, address: int, size: int) -> tuple[Native, int]:
        self.on_pin()
        self.pins[address] = size
        return address, address

    def unpin(self, pin: Native) -> None:
        del self.pins[pin]

    def write_value(self, stream: Native, word: int, value: int) -> None:
        self.before_write()
        self.writes.append((stream, word, value))

    def wait_value(self, stream: Native, word: int, value: int) -> None:
        self.before_wait()
        self.waits.append((stream, word, value))
        self.pending.append((stream, word, value))

    def is_waiting(self) -> bool:
        self.pending = [it for it in self.pending if ctypes.c_uint64.from_address(it[1]).value < it[2]]
        return bool(self.pending)

    def is_idle(self, stream: Native) -> bool:
        return not self.is_waiting() or all(it[0] != stream for it in self.pending)

    def is_done(self, event: Native) -> bool:
        return self.is_idle(self.event_streams[event])

    def is_capturing(self, stream: Native) -> bool:
        return stream[1] in self.captured

    def run_writes(self) -> None:
        """The streams get to their stores."""
        while self.writes:
            _, word, value = self.writes.pop(0)
            ctypes.c_uint64.from_address(word).value = value


@pytest.fixture
def host() -> Device:
    return gi.get_backend("host").device()


@pytest.fixture
def scope() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def words(scope: ExitStack) -> tuple[Device, WordsBackend]:
    backend = WordsBackend()
    device, _ = fake_device(backend=backend)
    return device, backend


def until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(1e-4)


def blocked(stream: gi.Stream) -> bool:
    with suppress(gi.SemaphoreTimeoutError):
        stream.record().wait(0.02)
        return False
    return True


def lane_of(semaphore: Any) -> _watcher.Lane:
    lane = semaphore._native
    assert isinstance(lane, _watcher.Lane)
    return lane


def word_of(semaphore: Any) -> int:
    return lane_of(semaphore).words.load(0)


def spare(device: Device) -> int:
    """How many pages are kept for the next semaphores."""
    return len(spare_words(device)._pages)


def end(*resources: Any) -> None:
    for resource in resources:
        resource.close(timeout=LIMIT)


# -- endpoints -------------------------------------------------------------------------------------------------------


def count_of(fd: int) -> int | None:
    try:
        return int(struct.unpack("=Q", os.read(fd, 8))[0])
    except BlockingIOError:
        return None


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


def test_two_signals_of_a_plain_eventfd_pass_two_waits(host: Device, scope: ExitStack) -> None:
    mine = os.eventfd(0)
    scope.callback(os.close, mine)
    bridge = scope.enter_context(Bridge(host))
    semaphore: Any = scope.enter_context(bridge.import_semaphore(gi.EventFd(os.dup(mine))))
    stream = scope.enter_context(host.create_stream())
    for _ in range(2):
        os.write(mine, struct.pack("=Q", 1))
    semaphore.wait(stream)
    semaphore.wait(stream)
    stream.synchronize(LIMIT)
    semaphore.wait(stream)
    assert blocked(stream)
    os.write(mine, struct.pack("=Q", 1))
    stream.synchronize(LIMIT)


def test_a_signal_that_somebody_else_takes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the read; the descriptor blocks, and the watcher must not."""
    endpoint = gi.bridge.EventFdEndpoint(gi.EventFd(os.eventfd(0)))
    monkeypatch.setattr(_endpoints, "_readable", lambda fd, timeout: True)
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
    host: Device, scope: ExitStack, sync_files: SyncFiles
) -> None:
    mine = os.eventfd(0, os.EFD_NONBLOCK)
    scope.callback(os.close, mine)
    bridge = scope.enter_context(Bridge(host))
    semaphore: Any = scope.enter_context(bridge.import_semaphore(gi.SyncFd(os.dup(mine))))
    stream = scope.enter_context(host.create_stream())
    assert semaphore.kind is Binary
    for call in (lambda: semaphore.signal(stream), semaphore.host_signal):
        with pytest.raises(gi.UnsupportedError, match="signalled by the driver that made it"):
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
def test_a_descriptor_of_another_kind_stays_the_callers(host: Device, scope: ExitStack, make: Any) -> None:
    bridge = scope.enter_context(Bridge(host))
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


def test_success_consumes_the_handle(host: Device, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(host))
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


def test_one_of_our_own_timelines(host: Device, scope: ExitStack) -> None:
    """The value is read from the memfd as `gpuinterop.timeline` specifies it: 8 bytes at 16."""
    made = scope.enter_context(host.create_semaphore(gi.TimelineFd))
    look = made.export()
    scope.callback(look.close)
    bridge = scope.enter_context(Bridge(host))
    semaphore = scope.enter_context(bridge.import_semaphore(made.export()))
    stream = scope.enter_context(host.create_stream())
    semaphore.wait(stream, 4)
    assert blocked(stream)
    made.host_signal(4)
    stream.synchronize(LIMIT)
    semaphore.signal(stream, 9)
    fd: int = look.fd  # type: ignore[attr-defined]
    until(lambda: struct.unpack("=Q", os.pread(fd, 8, 16)) == (9,))
    made.host_wait(9, timeout=LIMIT)


@pytest.mark.parametrize("kind", [gi.OpaqueFd, gi.TimelineFd])
def test_a_host_semaphore_as_the_foreign_side(host: Device, scope: ExitStack, kind: Any) -> None:
    made: Any = scope.enter_context(host.create_semaphore(kind))
    bridge = scope.enter_context(Bridge(host))
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


# -- DRM: the kernel's own numbers and structs, written down once more from drm.h ------------------------------------


class SyncobjHandle(ctypes.Structure):
    _fields_: ClassVar = [
        ("handle", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("fd", ctypes.c_int32), ("pad", ctypes.c_uint32),
    ]  # fmt: skip


class SyncobjDestroy(ctypes.Structure):
    _fields_: ClassVar = [("handle", ctypes.c_uint32), ("pad", ctypes.c_uint32)]


class SyncobjTimelineWait(ctypes.Structure):
    _fields_: ClassVar = [
        ("handles", ctypes.c_uint64), ("points", ctypes.c_uint64), ("timeout_nsec", ctypes.c_int64),
        ("count_handles", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("first_signaled", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    ]  # fmt: skip


class SyncobjTimelineArray(ctypes.Structure):
    _fields_: ClassVar = [
        ("handles", ctypes.c_uint64), ("points", ctypes.c_uint64), ("count_handles", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    ]  # fmt: skip


def iowr(number: int, what: type[ctypes.Structure]) -> int:
    """``_IOWR('d', number, struct)`` of asm-generic/ioctl.h."""
    return 3 << 30 | ctypes.sizeof(what) << 16 | ord("d") << 8 | number


DRM = {
    iowr(0xC2, SyncobjHandle): SyncobjHandle,
    iowr(0xC0, SyncobjDestroy): SyncobjDestroy,
    iowr(0xCA, SyncobjTimelineWait): SyncobjTimelineWait,
    iowr(0xCD, SyncobjTimelineArray): SyncobjTimelineArray,
}


class Kernel:
    """Plays DRM: one timeline syncobj, of handle 77."""

    def __init__(self) -> None:
        self.point = 0
        self.calls: list[str] = []
        self.deadlines: list[int] = []
        self.fds: list[int] = []
        self.error = 0
        self.without: list[int] = []
        """Device numbers of nodes whose driver knows no syncobjs."""

    def ioctl(self, node: int, number: int, request: bytearray, mutate: bool) -> int:
        if os.fstat(node).st_rdev in self.without:
            raise OSError(95, "Operation not supported")
        assert os.fstat(node).st_rdev == os.stat(os.devnull).st_rdev
        assert mutate
        assert len(request) == ctypes.sizeof(DRM[number])
        it: Any = DRM[number].from_buffer(request)
        self.calls.append(type(it).__name__)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        if isinstance(it, SyncobjHandle):
            assert (it.handle, it.flags, it.pad) == (0, 0, 0)
            self.fds.append(it.fd)
            it.handle = 77
        elif isinstance(it, SyncobjDestroy):
            assert (it.handle, it.pad) == (77, 0)
        else:
            assert it.count_handles == 1
            assert ctypes.c_uint32.from_address(it.handles).value == 77
            point = ctypes.c_uint64.from_address(it.points).value
            if isinstance(it, SyncobjTimelineArray):
                assert it.flags == 0
                self.point = point
            else:
                assert it.flags == 2  # DRM_SYNCOBJ_WAIT_FLAGS_WAIT_FOR_SUBMIT
                self.deadlines.append(it.timeout_nsec)
                if self.point < point:
                    raise OSError(62, "Timer expired")  # ETIME
        return 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(_endpoints, "fcntl", SimpleNamespace(ioctl=kernel.ioctl))
    monkeypatch.setattr(_endpoints, "_NODES", os.devnull)
    monkeypatch.setattr("gpuinterop.bridge._bridge.render_nodes", lambda: [os.devnull])
    return kernel


@pytest.mark.parametrize("mounted", [True, False])
@pytest.mark.parametrize(
    ("endpoint", "handle", "wanted"),
    [(gi.bridge.EventFdEndpoint, gi.EventFd, "eventfd"), (gi.bridge.SyncFdEndpoint, gi.SyncFd, "sync file")],
)
def test_what_a_descriptor_is_cannot_be_told_without_proc(
    monkeypatch: pytest.MonkeyPatch, endpoint: Any, handle: Any, wanted: str, mounted: bool
) -> None:
    """Of a closed one /proc tells nothing either."""

    def readlink(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", readlink)
    monkeypatch.setattr(os.path, "isdir", lambda path: mounted)
    with handle.adopt(os.eventfd(0)) as given:
        with pytest.raises(gi.HandleError, match=wanted) as caught:
            endpoint(given)
        assert ("/proc is not mounted" in str(caught.value)) != mounted
        assert "this is no" not in str(caught.value)


def test_the_calls_of_a_syncobj(kernel: Kernel) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = os.dup(0)
    endpoint = SyncobjEndpoint(gi.DrmSyncobjFd(fd))
    assert kernel.fds == [fd]
    assert not endpoint.wait(5, 0.0)
    assert kernel.deadlines == [0], "a look does not wait"
    now = time.monotonic_ns()
    assert not endpoint.wait(5, 10.0)
    assert now + 9e9 < kernel.deadlines[-1] < time.monotonic_ns() + 11e9, "an absolute time of the monotonic clock"
    endpoint.signal(5)
    assert kernel.point == 5
    assert endpoint.wait(5, 0.0)
    kernel.error = 22
    with pytest.raises(gi.DriverError, match="DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT"):
        endpoint.wait(6, 0.0)
    kernel.error = 0
    endpoint.close()
    assert kernel.calls[-1] == "SyncobjDestroy"
    assert len(os.listdir("/proc/self/fd")) == before


def test_frames_over_a_syncobj(kernel: Kernel, host: Device, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(host))
    semaphore = scope.enter_context(bridge.import_semaphore(gi.DrmSyncobjFd(os.dup(0))))
    stream = scope.enter_context(host.create_stream())
    for value in range(1, 21, 2):
        semaphore.wait(stream, value)
        semaphore.signal(stream, value + 1)
        kernel.point = value
        stream.synchronize(LIMIT)
        until(lambda value=value: kernel.point == value + 1)


def test_a_syncobj_that_is_none_stays_the_callers(kernel: Kernel, host: Device, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(host))
    kernel.error = 22
    with gi.DrmSyncobjFd.adopt(os.dup(0)) as handle:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(gi.DriverError, match="FD_TO_HANDLE"):
            bridge.import_semaphore(handle)
        assert os.fstat(handle.fd)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_node_without_syncobjs_is_passed_over(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first render node may be another driver's (EOPNOTSUPP)."""
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/zero", "/dev/full", os.devnull])
    kernel.without = [os.stat(path).st_rdev for path in ("/dev/zero", "/dev/full")]
    endpoint = SyncobjEndpoint(gi.DrmSyncobjFd(os.dup(0)))
    endpoint.signal(3)
    assert kernel.point == 3
    endpoint.close()
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/full", "/dev/zero"])
    with gi.DrmSyncobjFd.adopt(os.dup(0)) as handle:
        with pytest.raises(gi.DriverError, match="ENOTSUP"):
            SyncobjEndpoint(handle)
        assert os.fstat(handle.fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_render_node_it_is_a_gap(host: Device, scope: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuinterop.bridge._bridge.render_nodes", list)
    monkeypatch.setattr(_endpoints, "_NODES", "/dev/none*")
    found = Bridge.capabilities(host)[gi.DrmSyncobjFd]
    assert not found
    assert "/dev/dri" in found.reason
    assert "TimelineEndpoint" in found.workaround
    with gi.DrmSyncobjFd.adopt(os.dup(0)) as handle:
        with pytest.raises(gi.UnsupportedError):
            scope.enter_context(Bridge(host)).import_semaphore(handle)
        with pytest.raises(gi.InvalidArgumentError, match="no DRM render node"):
            SyncobjEndpoint(handle)
        with pytest.raises(gi.InvalidArgumentError, match="/dev/none/such"):
            SyncobjEndpoint(handle, node="/dev/none/such")


# -- endpoints that others write -------------------------------------------------------------------------------------


def test_an_endpoint_that_exits_the_interpreter_fails_its_streams_alone(host: Device, scope: ExitStack) -> None:
    """Whatever it raises, SystemExit among it: the watcher goes on with the others."""
    bridge = scope.enter_context(Bridge(host))
    bad, good = Scripted(), Scripted()
    bad.on_wait = sys.exit
    first, second = (scope.enter_context(bridge.from_endpoint(endpoint)) for endpoint in (bad, good))
    one, other = (scope.enter_context(host.create_stream()) for _ in range(2))
    first.wait(one, 1)
    second.wait(other, 1)
    with pytest.raises(gi.PeerError, match="SystemExit"):
        one.synchronize(LIMIT)
    good.reached = 1
    other.synchronize(LIMIT)
    with pytest.raises(gi.PeerError):
        first.host_wait(1, timeout=LIMIT)


def test_a_signal_that_the_endpoint_refuses_reaches_the_owner(host: Device, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(host))
    endpoint = Scripted()

    def refuse() -> None:
        raise gi.InvalidArgumentError("value", "it stands at 9 already.")

    endpoint.on_signal = refuse
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
    stream = scope.enter_context(host.create_stream())
    semaphore.signal(stream, 1)
    until(lambda: stream._known_as().failure is not None)
    with pytest.raises(gi.InvalidArgumentError, match="it stands at 9"):
        stream.synchronize(LIMIT)
    assert endpoint.told == []


def test_a_slow_endpoint_holds_up_nobody_for_good(host: Device, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(host))
    slow, quick = Scripted(), Scripted()
    slow.on_wait = lambda: time.sleep(0.01)
    first, second = (scope.enter_context(bridge.from_endpoint(endpoint)) for endpoint in (slow, quick))
    one, other = (scope.enter_context(host.create_stream()) for _ in range(2))
    first.wait(one, 1)
    for value in range(1, 6):
        second.wait(other, value)
        quick.reached = value
        other.synchronize(LIMIT)
    slow.reached = 1
    one.synchronize(LIMIT)


def test_an_endpoint_that_is_stuck_cannot_keep_a_stream(host: Device, scope: ExitStack) -> None:
    """Its look never ends: close() lets the stream go all the same."""
    stuck, inside = threading.Event(), threading.Event()
    scope.callback(stuck.set)
    endpoint = Scripted()

    def block() -> None:
        inside.set()
        stuck.wait(60)

    endpoint.on_wait = block
    bridge = Bridge(host)
    semaphore = bridge.from_endpoint(endpoint)
    stream = scope.enter_context(host.create_stream())
    semaphore.wait(stream, 1)
    assert inside.wait(LIMIT)
    behind = stream.record()
    with pytest.raises(gi.SemaphoreTimeoutError):
        semaphore.host_wait(1, timeout=0.01)
    with pytest.raises(gi.ResourceBusyError, match="stuck in a look"):
        semaphore.host_signal(1)
    with pytest.raises(gi.ResourceBusyError):
        bridge.close(timeout=0.01)
    lane = lane_of(semaphore)
    with pytest.raises(gi.ResourceClosedError, match="bridge was closed"):
        behind.wait(LIMIT)
    endpoint.reached = 1  # the look ends late, and with a yes: it must not take the release back
    with pytest.warns(gi.LeakedResourceWarning, match="stuck in a look"):
        host.drain()
    thread = bridge._watcher._thread
    assert thread is not None
    stuck.set()
    end(bridge)
    thread.join(LIMIT)
    assert lane.words.load(0) == RELEASED
    assert endpoint.closed == 0
    assert lane.words not in spare_words(host)._pages
    lane.words.close()


def test_what_is_no_endpoint_is_refused(host: Device, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(host))
    for wrong in (None, 3, Scripted, gi.EventFd):
        with pytest.raises(gi.ArgumentTypeError, match="endpoint"):
            bridge.from_endpoint(wrong)  # type: ignore[arg-type]
    for kind in ("timeline", gi.Fence, None):
        strange = Scripted(kind)  # type: ignore[arg-type]
        with pytest.raises(gi.InvalidArgumentError, match="kind must be"):
            bridge.from_endpoint(strange)
    nameless = Scripted()
    nameless.label = None  # type: ignore[assignment]
    with pytest.raises(gi.InvalidArgumentError, match="label must be"):
        bridge.from_endpoint(nameless)
    others: list[Any] = [5, "fd", None, gi.OpaqueWin32(handle=8)]
    for other in others:
        with pytest.raises(gi.ArgumentTypeError, match="handle"):
            bridge.import_semaphore(other)
    with pytest.raises(gi.ArgumentTypeError, match="device"):
        Bridge(bridge)  # type: ignore[arg-type]
    for grace in (-1, float("nan"), None, float("inf")):
        with pytest.raises(gi.InvalidArgumentError, match=r"grace|timeout"):
            Bridge(host, grace=grace)  # type: ignore[arg-type]


def test_a_device_without_stream_words_has_no_bridge() -> None:
    device, _ = fake_device(Operation.STREAM_MEMORY_OPS)
    with pytest.raises(gi.UnsupportedError, match="stream_memory_ops"):
        Bridge(device)
    found = Bridge.capabilities(device)
    assert not any(found.values())
    assert all(cell.reason == "the test says so." for cell in found.values())


# -- words: what is enqueued, what is stored, what is told -----------------------------------------------------------


def test_values_may_be_skipped_and_signals_are_told_once(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    device, backend = words
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    semaphore.wait(stream, 10)
    endpoint.reached = 9
    semaphore.wait(stream, 5)
    until(lambda: word_of(semaphore) == 5)
    assert [value for _, _, value in backend.waits] == [10, 5]
    endpoint.reached = 1 << 40
    until(lambda: word_of(semaphore) == 10)
    for value in (11, 12, 20):
        semaphore.signal(stream, value)
    assert endpoint.told == []
    _, word, last = backend.writes[-1]
    ctypes.c_uint64.from_address(word).value = last  # all three at once, as far as the watcher sees
    until(lambda: endpoint.told)
    end(semaphore)
    assert endpoint.told == [20]


def test_two_streams_have_words_of_their_own(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    """Their stores are not in order with each other: the second one's says nothing about the first one's."""
    device, backend = words
    endpoint = Scripted(Binary)
    semaphore: Any = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    one, other = (scope.enter_context(device.create_stream()) for _ in range(2))
    semaphore.signal(one)
    semaphore.signal(one)
    semaphore.signal(other)
    first, second, third = backend.writes
    assert first[1] == second[1] != third[1]
    ctypes.c_uint64.from_address(third[1]).value = third[2]
    until(lambda: len(endpoint.told) == 1)
    backend.run_writes()
    until(lambda: len(endpoint.told) == 3)


def test_every_signal_lets_one_binary_wait_pass(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    """Eight threads enqueue at once; numbers and queue stay in one order, however they interleave."""
    device, _ = words
    endpoint = Scripted(Binary)
    semaphore: Any = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    numbers = itertools.count(1)

    class Slow:
        def __next__(self) -> int:
            number = next(numbers)
            time.sleep(0.002 if number % 2 else 0.0)
            return number

    lane = lane_of(semaphore)
    lane._numbers = Slow()  # type: ignore[assignment]
    streams = [scope.enter_context(device.create_stream()) for _ in range(8)]
    threads = [
        threading.Thread(target=lambda stream=stream: [semaphore.wait(stream) for _ in range(5)]) for stream in streams
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert [pending.value for pending in lane._waits] == list(range(1, 41))
    for passed in range(1, 41):
        endpoint.signals = 1
        until(lambda passed=passed: len(lane._waits) == 40 - passed)
        assert word_of(semaphore) == passed


def test_no_more_streams_signal_at_once_than_there_are_words(
    words: tuple[Device, WordsBackend], scope: ExitStack
) -> None:
    most = os.sysconf("SC_PAGESIZE") // 64 - 1  # one is for the waits
    device, backend = words
    endpoint = Scripted(Binary)
    semaphore: Any = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    streams = [scope.enter_context(device.create_stream()) for _ in range(most + 1)]
    for stream in streams[:most]:
        semaphore.signal(stream)
    assert len({word for _, word, _ in backend.writes}) == most
    with pytest.raises(gi.InvalidArgumentError, match=f"{most} streams have still to signal"):
        semaphore.signal(streams[most])
    taken = backend.writes[5][1]
    streams[5].close()
    with pytest.raises(gi.InvalidArgumentError, match=f"{most} streams"):  # its signal is still to come
        semaphore.signal(streams[most])
    ctypes.c_uint64.from_address(taken).value = 1
    until(lambda: endpoint.told)
    del backend.writes[5]
    semaphore.signal(streams[most])
    assert backend.writes[-1][1:] == (taken, 2), "the word goes on counting"
    backend.run_writes()
    until(lambda: len(endpoint.told) == most + 1)


def test_words_go_from_stream_to_stream(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    """Also of streams that are open: there may be as many as one likes, as long as few signal at once."""
    device, backend = words
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    streams = [scope.enter_context(device.create_stream()) for _ in range(100)]
    for value, stream in enumerate(streams + streams, 1):
        semaphore.signal(stream, value)
        backend.run_writes()
        until(lambda value=value: endpoint.told[-1:] == [value])
    assert not lane_of(semaphore).busy


def test_the_default_stream_of_each_thread_is_another(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    """CUDA and HIP call every thread's own by the number 2."""
    device, backend = words
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = device.wrap_stream(2)
    semaphore.signal(stream, 1)
    for value in range(2, 10):  # one after the other: a new thread gets the ident of one that has ended
        thread = threading.Thread(target=semaphore.signal, args=(stream, value))
        thread.start()
        thread.join(LIMIT)
    assert len({word for _, word, _ in backend.writes}) == 9


@pytest.mark.parametrize("batch", [False, True], ids=["semaphore", "batch"])
def test_the_calling_threads_own_stream_raises_what_has_failed(host: Device, scope: ExitStack, batch: bool) -> None:
    """It has no synchronize() later on: NumPy works on what it gets as soon as the wait returns."""
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(host)).from_endpoint(endpoint))
    lane, stream = lane_of(semaphore), host.wrap_stream(0)

    def fail_when_it_waits() -> None:
        if lane._waits:
            fails()

    endpoint.on_wait = fail_when_it_waits
    with pytest.raises(gi.DriverError, match="the test says so"):
        if batch:
            SemaphoreBatch(semaphore).wait(stream, (1,))
        else:
            semaphore.wait(stream, 1)


def test_many_waits_queued_ahead_are_looked_at_one_by_one(
    words: tuple[Device, WordsBackend], scope: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, _ = words
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    compared = itertools.count()
    value_of = _watcher._value_of

    def counted(pending: Any) -> int:
        next(compared)
        return value_of(pending)

    monkeypatch.setattr(_watcher, "_value_of", counted)
    for value in range(1, 501):
        semaphore.wait(stream, value)
    endpoint.reached = 500
    until(lambda: word_of(semaphore) == 500)
    assert next(compared) == 0, "in order, the first is the least"
    semaphore.wait(stream, 700)
    semaphore.wait(stream, 600)
    endpoint.reached = 600
    until(lambda: word_of(semaphore) == 600)
    endpoint.reached = 700
    until(lambda: word_of(semaphore) == 700)


# -- pages ------------------------------------------------------------------------------------------------------------


class Blocking(WordsBackend):
    """To unpin a page waits for all work of the device, as on CUDA."""

    releases_block = True

    def unpin(self, pin: Native) -> None:
        assert not self.is_waiting(), "it would block"
        super().unpin(pin)


@pytest.fixture
def blocking() -> tuple[Device, Blocking]:
    backend = Blocking()
    return fake_device(backend=backend)[0], backend


def test_a_closed_semaphores_page_is_the_next_ones(blocking: tuple[Device, Blocking], scope: ExitStack) -> None:
    """Its words stand at 0 again. Nothing is unpinned, so it is released while another stream waits."""
    device, backend = blocking
    bridge = scope.enter_context(Bridge(device))
    waiting, stream = (scope.enter_context(device.create_stream()) for _ in range(2))
    scope.enter_context(pending := bridge.from_endpoint(never := Scripted())).wait(waiting, 1)
    for frame in range(5):
        endpoint = Scripted()
        semaphore = bridge.from_endpoint(endpoint)
        page = lane_of(semaphore).words
        assert [page.load(index) for index in range(page.COUNT)] == [0] * page.COUNT
        semaphore.signal(stream, 7)
        semaphore.wait(stream, 9)
        assert not stream.query()
        endpoint.reached = 9
        backend.run_writes()
        until(lambda told=endpoint.told: told == [7])
        end(semaphore)
        assert len(backend.pins) == 2, frame
    assert word_of(pending) == 0
    never.reached = 1


def test_pages_that_are_not_kept_are_unpinned_when_nobody_waits(
    blocking: tuple[Device, Blocking], scope: ExitStack
) -> None:
    device, backend = blocking
    bridge = scope.enter_context(Bridge(device))
    stream = scope.enter_context(device.create_stream())
    waited = scope.enter_context(bridge.from_endpoint(endpoint := Scripted()))
    many = [bridge.from_endpoint(Scripted()) for _ in range(SPARE + 3)]
    waited.wait(stream, 1)
    end(*many)  # each is released
    assert len(backend.pins) == SPARE + 4
    endpoint.reached = 1
    until(stream.query)
    device.drain(LIMIT)
    assert spare(device) == SPARE
    assert len(backend.pins) == SPARE + 1
    assert word_of(waited) == 1


def test_an_interrupted_release_gives_its_page_once(
    words: tuple[Device, WordsBackend], scope: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is released anew, and meanwhile another semaphore may have the page: that is its own."""
    device, backend = words
    bridge = scope.enter_context(Bridge(device))
    semaphore = bridge.from_endpoint(endpoint := Scripted())
    give = spare_words(device).give
    others: list[Any] = []

    def interrupted(page: Any) -> None:
        give(page)
        if not others:
            others.append(bridge.from_endpoint(Scripted()))
            lane_of(others[0]).words.store(0, 5)
            raise KeyboardInterrupt

    monkeypatch.setattr(spare_words(device), "give", interrupted)
    with pytest.raises(KeyboardInterrupt):
        semaphore.close()
    until(lambda: semaphore._lifetime.state in GONE)
    others.append(bridge.from_endpoint(Scripted()))
    assert endpoint.closed == 1
    assert (word_of(others[0]), word_of(others[1])) == (5, 0)
    assert len(backend.pins) == 2
    end(*others)


def test_a_lock_outlives_no_interrupt() -> None:
    """One strikes behind acquire(): the watcher, or whoever comes next, must not wait for ever."""
    lock = threading.RLock()

    class Struck:
        release = staticmethod(lock.release)

        @staticmethod
        def acquire(timeout: float) -> bool:
            lock.acquire(timeout=timeout)
            raise KeyboardInterrupt

    def free() -> bool:
        taken: list[bool] = []
        thread = threading.Thread(target=lambda: taken.append(_watcher._with(lock, bool, 0.0)))
        thread.start()
        thread.join(LIMIT)
        return taken[0]

    with pytest.raises(KeyboardInterrupt):
        _watcher._with(Struck(), bool)  # type: ignore[arg-type]
    assert free()
    with lock:
        assert not free()
        assert _watcher._with(lock, bool)
        assert not free(), "another's hold was given up"
    assert free()


# -- what cannot be enqueued -----------------------------------------------------------------------------------------


def fails() -> None:
    raise gi.DriverError("cuStreamWaitValue64", 1, "CUDA_ERROR_INVALID_VALUE", "the test says so")


def interrupts() -> None:
    raise KeyboardInterrupt


def test_a_stream_that_is_captured_is_refused(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    """Each launch of the graph would write, and wait for, the same value again."""
    device, backend = words
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(Scripted()))
    stream = scope.enter_context(device.create_stream())
    backend.captured.add(stream.ptr)
    for call in (semaphore.wait, semaphore.signal):
        with pytest.raises(gi.InvalidArgumentError, match="is being captured"):
            call(stream, 1)
    backend.captured.clear()
    assert (backend.waits, backend.writes) == ([], [])
    assert not lane_of(semaphore).busy


@pytest.mark.parametrize("kind", [Binary, Timeline])
def test_a_wait_that_fails_is_nobodys(words: tuple[Device, WordsBackend], scope: ExitStack, kind: type) -> None:
    device, backend = words
    endpoint = Scripted(kind)
    semaphore: Any = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    backend.before_wait = fails
    with pytest.raises(gi.DriverError, match="the test says so"):
        semaphore.wait(stream, *([7] if kind is Timeline else []))
    assert not lane_of(semaphore).busy
    assert backend.waits == []
    backend.before_wait = lambda: None
    semaphore.wait(stream, *([8] if kind is Timeline else []))
    endpoint.reached, endpoint.signals = 8, 1
    until(lambda: word_of(semaphore) == backend.waits[0][2])


def test_a_signal_taken_for_a_wait_that_failed_is_not_lost(
    words: tuple[Device, WordsBackend], scope: ExitStack
) -> None:
    device, backend = words
    endpoint = Scripted(Binary)
    semaphore: Any = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    endpoint.signals = 1

    def late() -> None:
        until(lambda: endpoint.signals == 0 and not lane_of(semaphore)._waits)
        fails()

    backend.before_wait = late
    with pytest.raises(gi.DriverError):
        semaphore.wait(stream)
    backend.before_wait = lambda: None
    semaphore.wait(stream)
    until(lambda: word_of(semaphore) >= backend.waits[0][2])
    semaphore.wait(stream)
    until(lambda: lane_of(semaphore).busy)
    assert word_of(semaphore) < backend.waits[1][2], "one signal, two waits"


def test_a_signal_that_fails_is_not_counted(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    device, backend = words
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    backend.before_write = fails
    with pytest.raises(gi.DriverError):
        semaphore.signal(stream, 1)
    backend.before_write = lambda: None
    semaphore.signal(stream, 2)
    assert [value for _, _, value in backend.writes] == [1]
    backend.run_writes()
    until(lambda: endpoint.told == [2])


def test_ctrl_c_behind_the_call_strands_nobody(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    """It may strike when the stream waits already: the wait is seen to all the same."""
    device, backend = words
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    backend.before_wait = interrupts
    with pytest.raises(KeyboardInterrupt):
        semaphore.wait(stream, 3)
    endpoint.reached = 3
    until(lambda: word_of(semaphore) == 3)
    backend.before_write = interrupts
    with pytest.raises(KeyboardInterrupt):
        semaphore.signal(stream, 4)
    backend.before_write = lambda: None
    semaphore.signal(stream, 5)
    assert backend.writes[0][2] == 2, "the one before may have been written"


def test_ctrl_c_behind_the_write_wakes_the_watcher_all_the_same(
    words: tuple[Device, WordsBackend], scope: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else does, if that was the last signal."""
    device, backend = words
    endpoint = Scripted()
    bridge = scope.enter_context(Bridge(device))
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    semaphore.signal(stream, 1)
    backend.run_writes()
    until(lambda: endpoint.told == [1] and bridge._watcher._sleeping)
    lane = lane_of(semaphore)
    write = lane.words.write

    def interrupted(*arguments: Any) -> None:
        write(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(lane.words, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        semaphore.signal(stream, 2)
    backend.run_writes()
    until(lambda: endpoint.told == [1, 2])


def test_ctrl_c_ahead_of_the_write_miscounts_nothing(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    """Binary: each store is one signal, and the one that was never written is not told before those behind it."""
    device, backend = words
    endpoint = Scripted(Binary)
    semaphore: Any = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    out = lane_of(semaphore)._out(stream._known_as())
    out.written += 1  # Ctrl-C between this and what follows it
    for _ in range(3):
        semaphore.signal(stream)
    for told in range(1, 4):
        _, word, value = backend.writes.pop(0)
        ctypes.c_uint64.from_address(word).value = value
        until(lambda told=told: len(endpoint.told) == told)
        assert sum(len(each.pending) for each in lane_of(semaphore)._outs.values()) == 3 - told


def test_cancelled_while_a_wait_is_being_enqueued(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    device, backend = words
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(Scripted()))
    stream = scope.enter_context(device.create_stream())
    lane = lane_of(semaphore)
    late: list[Any] = []

    def cancel() -> None:
        late.extend(lane._waits)  # as if the other thread's look had come before this one's append
        lane._waits.clear()
        lane.cancel(gi.ResourceClosedError("cancelled"))
        lane._waits.extend(late)

    backend.before_wait = cancel
    with pytest.raises(gi.ResourceClosedError, match="cancelled"):  # it is idle: nobody is to go on with it
        semaphore.wait(stream, 3)
    assert word_of(semaphore) == RELEASED
    assert not lane._waits
    with pytest.raises(gi.ResourceClosedError, match="cancelled"):
        stream.synchronize(LIMIT)


def test_failed_while_a_signal_is_being_enqueued(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    """Nobody looks at that lane any more: the stream is told by the call itself."""
    device, backend = words
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(endpoint))
    stream, other = (scope.enter_context(device.create_stream()) for _ in range(2))
    lane = lane_of(semaphore)
    endpoint.on_wait = fails

    def fail() -> None:
        backend.before_write = lambda: None
        kept = list(lane._outs.values())
        lane._outs.clear()  # as if the entry came after the watcher's look
        semaphore.wait(other, 1)
        until(lambda: lane.failed)
        lane._outs.update((out.key, out) for out in kept)

    backend.before_write = fail
    semaphore.signal(stream, 1)
    with pytest.raises(gi.DriverError):
        stream.synchronize(LIMIT)
    assert endpoint.told == []


def test_a_page_that_cannot_be_pinned(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    device, backend = words
    bridge = scope.enter_context(Bridge(device))
    endpoint = Scripted()
    backend.on_pin = fails
    fd = os.eventfd(0)
    handle = gi.EventFd(fd)
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    with pytest.raises(gi.DriverError):
        bridge.from_endpoint(endpoint)
    with pytest.raises(gi.DriverError):
        bridge.import_semaphore(handle)
    assert handle.fd == fd
    assert endpoint.closed == 0
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    os.close(fd)
    assert backend.pins == {}


def test_what_is_refused_has_pinned_nothing(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    """To unpin may block behind a stream that waits for the caller (CUDA)."""
    device, backend = words
    bridge = scope.enter_context(Bridge(device))
    backend.on_pin = lambda: pytest.fail("pinned before the checks")
    fd, other = os.pipe()
    for call in (
        lambda: bridge.import_semaphore(gi.EventFd(fd)),
        lambda: bridge.import_semaphore(gi.SyncFd(fd)),
        lambda: bridge.from_endpoint(Scripted(), peer=2**31 - 1),
    ):
        with pytest.raises((gi.HandleError, gi.PeerError)):
            call()
    os.close(fd)
    os.close(other)


@pytest.mark.parametrize("when", ["pinned", "bridged"])
def test_closed_while_a_semaphore_is_being_made(
    words: tuple[Device, WordsBackend], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another thread closes the bridge: the call fails, and what it was given is still the caller's."""
    device, backend = words
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    handle = gi.EventFd(fd)
    endpoint = Scripted()
    before = len(os.listdir("/proc/self/fd"))
    devices = [device, fake_device(backend=backend)[0]]  # the first one's page is used again
    for give, on in zip(("endpoint", "handle"), devices, strict=True):
        bridge = Bridge(on)
        if when == "pinned":
            backend.on_pin = bridge.close
        else:
            monkeypatch.setattr(Endpoint, "_bridged", lambda endpoint, semaphore, bridge=bridge: bridge.close())
        with pytest.raises(gi.ResourceClosedError):
            if give == "endpoint":
                bridge.from_endpoint(endpoint)
            else:
                bridge.import_semaphore(handle)
        bridge.close(timeout=LIMIT)
    device.drain()
    assert endpoint.closed == 0
    assert handle.fd == fd
    os.write(fd, struct.pack("=Q", 1))
    assert count_of(fd) == 1
    assert len(os.listdir("/proc/self/fd")) == before
    assert [spare(one) for one in devices] == [1, 1]
    assert len(backend.pins) == 2
    backend.on_pin = lambda: None
    monkeypatch.undo()
    with Bridge(device) as anew:  # and can be used once more
        end(anew.from_endpoint(endpoint), anew.import_semaphore(handle))
    assert endpoint.closed == 1
    assert spare(device) == len(backend.pins) - 1 == 2


@pytest.mark.parametrize("when", ["before it is made", "made"])
def test_closed_while_it_is_being_constructed(
    words: tuple[Device, WordsBackend], scope: ExitStack, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another thread closes the bridge between two lines of the constructor: nothing is enqueued on what is gone."""
    device, backend = words
    stream = scope.enter_context(device.create_stream())
    create = ExternalSemaphore._create
    bridges: list[Bridge] = []

    def interrupted(self: Any, make: Any) -> None:
        if when == "made":
            create(self, make)
        for bridge in bridges:
            retire(bridge._lifetime)  # as in its close(); the drain is still to come
        if when != "made":
            create(self, make)

    monkeypatch.setattr(ExternalSemaphore, "_create", interrupted)
    for use in ("wait", "signal"):
        bridges[:] = [Bridge(device)]
        endpoint = Scripted()
        with pytest.raises(gi.ResourceClosedError):
            getattr(bridges[0].from_endpoint(endpoint), use)(stream, 1)
        bridges[0].close(timeout=LIMIT)
        assert endpoint.closed == (when == "made")  # otherwise it is still the caller's
    assert (backend.waits, backend.writes) == ([], [])


def test_a_thread_that_cannot_be_started(
    words: tuple[Device, WordsBackend], scope: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, backend = words
    semaphore = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(Scripted()))
    stream = scope.enter_context(device.create_stream())

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for call in (semaphore.wait, semaphore.signal):
            with pytest.raises(gi.DriverError, match="pthread_create"):
                call(stream, 1)
    assert (backend.waits, backend.writes) == ([], [])
    assert not lane_of(semaphore).busy
    semaphore.wait(stream, 1)


def test_a_mistake_in_the_watcher_strands_nobody(
    host: Device, scope: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = scope.enter_context(Bridge(host))
    semaphore = scope.enter_context(bridge.from_endpoint(Scripted()))
    stream = scope.enter_context(host.create_stream())

    def wrong(watcher: Any) -> None:
        raise ZeroDivisionError("ours")

    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    monkeypatch.setattr(_watcher.Watcher, "_watch", wrong)
    with suppress(gi.PeerError):  # it may be known by then
        semaphore.wait(stream, 1)
        with pytest.raises(gi.PeerError, match=r"watcher has failed.*ours"):
            stream.synchronize(LIMIT)
    other = scope.enter_context(host.create_stream())
    for call in (lambda: bridge.from_endpoint(Scripted()), lambda: semaphore.wait(other, 1)):
        with pytest.raises(gi.PeerError, match="watcher has failed"):
            call()
    until(lambda: shown)
    assert shown[0].exc_type is ZeroDivisionError


# -- failures reach their owners -------------------------------------------------------------------------------------


def test_who_is_ordered_behind_a_wait_fails_with_it(host: Device, scope: ExitStack) -> None:
    """`wait_stream` behind a bridged wait, twice over: they ran without it, too, and what they signal is not told."""
    bridge = scope.enter_context(Bridge(host))
    broken, told = Scripted(), Scripted()
    first, second = (scope.enter_context(bridge.from_endpoint(endpoint)) for endpoint in (broken, told))
    waiting, behind, last, before = (scope.enter_context(host.create_stream()) for _ in range(4))
    before.wait_stream(waiting)  # nothing is pending there yet
    first.wait(waiting, 1)
    behind.wait_stream(waiting)
    last.wait_stream(behind)
    second.signal(last, 8)
    broken.on_wait = fails
    until(lambda: last._known_as().failure is not None)
    for stream in (waiting, behind, last):
        with pytest.raises(gi.DriverError, match="the test says so"):
            stream.synchronize(LIMIT)
    before.synchronize(LIMIT)
    second.signal(before, 9)
    until(lambda: told.told)
    assert told.told == [9]


def test_another_devices_stream_fails_with_what_it_was_ordered_behind(host: Device, scope: ExitStack) -> None:
    """An allocation's devices work on the same bytes, each ordered behind the other."""
    peer = Device(host._backend, host.info, host.capabilities)
    bridge = scope.enter_context(Bridge(host))
    broken = Scripted()
    semaphore = scope.enter_context(bridge.from_endpoint(broken))
    waiting, theirs, last = (scope.enter_context(one.create_stream()) for one in (host, peer, peer))
    semaphore.wait(waiting, 1)
    theirs.wait_stream(waiting)
    last.wait_stream(theirs)
    broken.on_wait = fails
    until(lambda: last._known_as().failure is not None)
    for stream in (waiting, theirs, last):
        with pytest.raises(gi.DriverError, match="the test says so"):
            stream.synchronize(LIMIT)


def test_what_another_devices_stream_signals_behind_a_failed_wait_is_not_told(
    words: tuple[Device, WordsBackend], scope: ExitStack
) -> None:
    """Streams of two devices may have one number."""
    device, backend = words
    peer, _ = fake_device(backend=backend)
    broken, told = Scripted(), Scripted()
    first = scope.enter_context(scope.enter_context(Bridge(device)).from_endpoint(broken))
    second = scope.enter_context(scope.enter_context(Bridge(peer)).from_endpoint(told))
    waiting, theirs, last = device.wrap_stream(64), peer.wrap_stream(64), peer.wrap_stream(80)
    first.wait(waiting, 1)
    theirs.wait_stream(waiting)
    second.signal(theirs, 9)
    last.wait_stream(theirs)
    broken.on_wait = fails
    until(lambda: lane_of(first).failed)
    for stream in (waiting, theirs, last):
        until(lambda stream=stream: stream._known_as().failure is not None)
    backend.run_writes()
    second.signal(scope.enter_context(peer.create_stream()), 8)
    backend.run_writes()
    until(lambda: told.told)
    assert told.told == [8]


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_wait_that_fails_while_a_stream_is_ordered_behind_it(
    words: tuple[Device, WordsBackend], scope: ExitStack, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Before or behind the note of it: whoever follows fails, and what it signals is not told."""
    device, backend = words
    bridge = scope.enter_context(Bridge(device))
    broken, told = Scripted(), Scripted()
    first, second = (scope.enter_context(bridge.from_endpoint(endpoint)) for endpoint in (broken, told))
    waiting, behind, other = (scope.enter_context(device.create_stream()) for _ in range(3))
    first.wait(waiting, 1)
    note = NativeStream.note

    def fail() -> None:
        broken.on_wait = fails
        until(lambda: lane_of(first).failed)

    def noted(stream: NativeStream, wait: Any) -> None:
        if when == "before":
            fail()
        note(stream, wait)
        if when == "behind":
            fail()

    with monkeypatch.context() as patch:
        patch.setattr(NativeStream, "note", noted)
        with pytest.raises(gi.DriverError, match="the test says so"):
            behind.wait_stream(waiting)
    for stream in (waiting, behind):
        with pytest.raises(gi.DriverError, match="the test says so"):
            stream.synchronize(LIMIT)
    with pytest.raises(gi.DriverError, match="the test says so"):
        second.signal(behind, 3)
    second.signal(other, 2)
    backend.run_writes()
    until(lambda: told.told)
    assert told.told == [2]


def test_a_stream_that_fails_as_it_signals_tells_nobody(
    words: tuple[Device, WordsBackend], scope: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the call's own look at the stream."""
    device, backend = words
    bridge = scope.enter_context(Bridge(device))
    broken, told = Scripted(), Scripted()
    first, second = (scope.enter_context(bridge.from_endpoint(endpoint)) for endpoint in (broken, told))
    stream = scope.enter_context(device.create_stream())
    first.wait(stream, 1)
    lane = lane_of(second)
    check = lane._check

    def late() -> None:
        check()
        broken.on_wait = fails
        until(lambda: lane_of(first).failed)

    monkeypatch.setattr(lane, "_check", late)
    with pytest.raises(gi.DriverError, match="the test says so"):
        second.signal(stream, 1)
    assert backend.writes == []
    assert not lane.busy


def test_whoever_wraps_a_failed_stream_next_is_told(host: Device, scope: ExitStack) -> None:
    """As with torch's current stream, of which each frame makes a wrapper, and drops it."""
    bridge = scope.enter_context(Bridge(host))
    broken, told = Scripted(), Scripted()
    first, second = (scope.enter_context(bridge.from_endpoint(endpoint)) for endpoint in (broken, told))
    theirs = scope.enter_context(host.create_stream())  # stands for torch's
    wrapper = host.wrap_stream(theirs.ptr)
    first.wait(wrapper, 1)
    del wrapper
    gc.collect()
    broken.on_wait = fails
    until(lambda: lane_of(first).failed)
    following = host.wrap_stream(theirs.ptr)
    with pytest.raises(gi.DriverError, match="the test says so"):
        second.signal(following, 8)
    later = host.wrap_stream(theirs.ptr)  # the application knows
    second.signal(later, 9)
    until(lambda: told.told)
    assert told.told == [9]


def test_one_native_stream_of_several_wrappers(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    """A library's stream is wrapped anew each frame: the failure of a wait through one wrapper is that of all.

    What was enqueued before the stream was let go is not told, through whichever; what a later wrapper does is.
    """
    device, backend = words
    bridge = scope.enter_context(Bridge(device))
    broken, told = Scripted(), Scripted()
    first, second = (scope.enter_context(bridge.from_endpoint(endpoint)) for endpoint in (broken, told))
    one = device.wrap_stream(64)
    second.signal(one, 1)
    first.wait(one, 1)
    del one
    gc.collect()
    two = device.wrap_stream(64)
    second.signal(two, 2)
    healthy = scope.enter_context(device.create_stream())
    broken.on_wait = fails
    until(lambda: two._known_as().failure is not None)
    backend.run_writes()
    until(lambda: told.told)
    calls: list[Script] = [lambda: two.synchronize(LIMIT), lambda: second.signal(two, 3), lambda: second.wait(two, 3)]
    for call in calls:
        with pytest.raises(gi.DriverError, match="the test says so"):
            call()
    second.signal(healthy, 4)
    anew = device.wrap_stream(64)
    second.signal(anew, 5)
    backend.run_writes()
    until(lambda: told.told[-1] == 5)
    assert 2 not in told.told
    assert told.told[0] == 1


def test_void_signals_of_two_bridges(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    """A stream that fails in one bridge tells nobody through another either."""
    device, backend = words
    bridges = [scope.enter_context(Bridge(device)) for _ in range(2)]
    broken, told = Scripted(), Scripted(Binary)
    first: Any = scope.enter_context(bridges[0].from_endpoint(broken))
    second: Any = scope.enter_context(bridges[1].from_endpoint(told))
    stream, other = (scope.enter_context(device.create_stream()) for _ in range(2))
    second.signal(stream)
    first.wait(stream, 1)
    second.signal(stream)
    broken.on_wait = fails
    until(lambda: stream._known_as().failure is not None)
    backend.run_writes()
    second.signal(other)
    backend.run_writes()
    until(lambda: not lane_of(second).busy)
    assert len(told.told) == 2


def test_an_event_before_the_failure_was_reached(host: Device, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(host))
    endpoint = Scripted()
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
    stream = scope.enter_context(host.create_stream())
    before = stream.record()
    before.wait(LIMIT)
    semaphore.wait(stream, 1)
    behind = stream.record()
    endpoint.on_wait = fails
    with pytest.raises(gi.DriverError):
        behind.wait(LIMIT)
    before.wait(LIMIT)
    assert before.done
    with pytest.raises(gi.DriverError):
        _ = behind.done


# -- a peer that dies ------------------------------------------------------------------------------------------------


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_dead_peer_lets_the_stream_go(host: Device, scope: ExitStack, peer: subprocess.Popen[bytes]) -> None:
    mine = os.eventfd(0, os.EFD_NONBLOCK)
    scope.callback(os.close, mine)
    bridge = scope.enter_context(Bridge(host))
    before = len(os.listdir("/proc/self/fd"))
    semaphore = bridge.import_semaphore(gi.EventFd(os.dup(mine)), peer=peer.pid)
    stream = scope.enter_context(host.create_stream())
    semaphore.wait(stream)
    assert blocked(stream)
    os.write(mine, struct.pack("=Q", 1))
    stream.synchronize(LIMIT)
    semaphore.wait(stream)
    os.kill(peer.pid, signal.SIGKILL)
    with pytest.raises(gi.PeerError, match=rf"process {peer.pid}, which was to signal eventfd \d+, has died"):
        stream.synchronize(LIMIT)
    other = scope.enter_context(host.create_stream())
    with pytest.raises(gi.PeerError):
        semaphore.wait(other)
    end(semaphore)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_the_peer_signalled_before_it_died_counts(
    words: tuple[Device, WordsBackend], scope: ExitStack, peer: subprocess.Popen[bytes]
) -> None:
    device, _ = words
    endpoint = Scripted()
    bridge = scope.enter_context(Bridge(device))
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint, peer=peer.pid))
    stream = scope.enter_context(device.create_stream())
    peer.kill()
    peer.wait()
    looks = itertools.count()

    def last_words() -> None:  # between the look and that for the process
        if next(looks) == 1:
            endpoint.reached = 3

    endpoint.on_wait = last_words
    semaphore.wait(stream, 3)
    until(lambda: word_of(semaphore) == 3)
    assert stream.query()


def test_a_peer_that_has_gone_may_still_be_told(
    words: tuple[Device, WordsBackend], scope: ExitStack, peer: subprocess.Popen[bytes]
) -> None:
    """It was to signal, and no stream waits for it: that it ends is no failure."""
    device, backend = words
    endpoint = Scripted()
    bridge = scope.enter_context(Bridge(device))
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint, peer=peer.pid))
    waiting = scope.enter_context(bridge.from_endpoint(other := Scripted()))
    stream, second = (scope.enter_context(device.create_stream()) for _ in range(2))
    semaphore.signal(stream, 1)
    peer.kill()
    peer.wait()
    lane = lane_of(semaphore)
    for _ in range(3):  # each time past the pause between two looks for the process
        lane._peer_checked = 0.0
        other.reached += 1
        waiting.wait(second, other.reached)
        until(lambda: word_of(waiting) == other.reached)
    backend.run_writes()
    until(lambda: endpoint.told == [1])
    assert stream.query()


def test_a_thread_that_waits_hears_of_a_dead_peer(
    host: Device, scope: ExitStack, peer: subprocess.Popen[bytes]
) -> None:
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(host)).from_endpoint(endpoint, peer=peer.pid))
    endpoint.reached = 1
    semaphore.host_wait(1, timeout=LIMIT)
    peer.kill()
    peer.wait()
    semaphore.host_wait(1, timeout=LIMIT)  # what it signalled counts
    with pytest.raises(gi.PeerError, match=f"process {peer.pid}, which was to signal"):
        semaphore.host_wait(2, timeout=LIMIT)


def test_what_is_no_process(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(words[0]))
    for wrong, kind in (
        ("x", gi.ArgumentTypeError),
        (1.5, gi.ArgumentTypeError),
        (True, gi.ArgumentTypeError),
        (0, gi.InvalidArgumentError),
        (-1, gi.InvalidArgumentError),
        (2**40, gi.InvalidArgumentError),
    ):
        with pytest.raises(kind, match="peer"):
            bridge.from_endpoint(Scripted(), peer=wrong)  # type: ignore[arg-type]
    assert words[1].pins == {}


def test_a_peer_that_is_none(words: tuple[Device, WordsBackend], scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(words[0]))
    gone = subprocess.Popen(["true"])
    gone.wait()
    fd = os.eventfd(0)
    handle = gi.EventFd(fd)
    endpoint = Scripted()
    before = len(os.listdir("/proc/self/fd"))
    for call in (
        lambda: bridge.import_semaphore(handle, peer=gone.pid),
        lambda: bridge.from_endpoint(endpoint, peer=gone.pid),
    ):
        with pytest.raises(gi.PeerError, match="has it died already"):
            call()
    assert handle.fd == fd
    assert endpoint.closed == 0
    assert words[1].pins == {}
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)


def test_a_large_descriptor_of_a_process() -> None:
    """select() would refuse it."""
    import fcntl
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= 1500:
        pytest.skip("this system allows no large descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    small = os.pidfd_open(process.pid)
    large = fcntl.fcntl(small, fcntl.F_DUPFD_CLOEXEC, 1500)
    try:
        assert not _watcher.ended(large)
        process.kill()
        process.communicate()
        assert _watcher.ended(large)
    finally:
        os.close(small)
        os.close(large)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- no driver call on the watcher -----------------------------------------------------------------------------------


class Noting:
    """In front of a backend: notes which thread has made each call."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.calls: list[tuple[str, int]] = []
        self.done: Counter[str] = Counter()
        self.holds_gil = False
        self.on_synchronize: Script = lambda: None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append((name, threading.get_ident()))
            if name == "synchronize":
                self.on_synchronize()
            result = found(*arguments, **keywords)
            self.done[name] += 1
            return result

        return call

    @property  # type: ignore[misc]  # isinstance() is to see the backend's interfaces
    def __class__(self) -> type:
        return type(self._backend)


@pytest.fixture
def noting(host: Device) -> tuple[Device, Noting]:
    backend = Noting(host._backend)
    backend._backend.open_device(0)
    return Device(backend, host.info, host.capabilities), backend  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::gpuinterop.errors.LeakedResourceWarning")
def test_the_watcher_never_calls_the_driver(noting: tuple[Device, Noting], scope: ExitStack) -> None:
    """Not for waits, signals, failures and ends, nor for what the collector finds there."""
    device, backend = noting
    threads: set[int] = set()
    collected = threading.Event()
    endpoint, failing = Scripted(), Scripted()

    def litter() -> None:
        stream = device.create_stream()
        things: list[Any] = [stream, stream.record(), device.create_semaphore(gi.TimelineFd), Bridge(device)]
        things += [things[-1].from_endpoint(Scripted()), device.wrap_stream(stream.ptr)]
        things.append(things)

    def collect() -> None:
        threads.add(threading.get_ident())
        gc.collect()
        collected.set()

    gc.collect()
    gc.disable()
    scope.callback(gc.enable)
    with Bridge(device) as bridge:
        first, second = (bridge.from_endpoint(one) for one in (endpoint, failing))
        stream, doomed = device.create_stream(), device.create_stream()
        litter()
        endpoint.on_wait = collect
        first.wait(stream, 1)
        assert collected.wait(LIMIT)
        endpoint.on_wait = lambda: None
        endpoint.reached = 1
        first.signal(stream, 2)
        stream.synchronize(LIMIT)
        until(lambda: endpoint.told == [2])
        second.wait(doomed, 1)
        failing.on_wait = fails
        failure = doomed.record()
        with pytest.raises(gi.DriverError):
            failure.wait(LIMIT)
        end(second)
        del doomed, failure, second  # the bridge's list may be the last to have it
        end(bridge, stream)
    assert threads
    assert threading.get_ident() not in threads
    named = {name for name, thread in backend.calls if thread in threads}
    assert named == set()
    # And what was found there is released by others.
    gc.collect()
    device.drain()

    pairs = (("create_stream", "destroy_stream"), ("record", "destroy_event"))

    def released() -> bool:
        device.drain()
        pages = backend.done["pin"] == spare(device) > 0
        return pages and all(backend.done[made] == backend.done[gone] > 0 for made, gone in pairs)

    until(released)


def test_a_binding_that_holds_the_gil_is_polled(noting: tuple[Device, Noting], scope: ExitStack) -> None:
    """Blocked inside `synchronize`, with the GIL held, nobody could ever signal."""
    device, backend = noting
    backend.holds_gil = True
    backend.on_synchronize = lambda: pytest.fail("the core blocked in the binding")
    endpoint = Scripted()
    bridge = scope.enter_context(Bridge(device))
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
    stream = scope.enter_context(device.create_stream())
    for value in range(1, 20, 2):
        semaphore.wait(stream, value)
        semaphore.signal(stream, value + 1)
        timer = threading.Timer(0.005, lambda value=value: setattr(endpoint, "reached", value))
        timer.start()
        stream.synchronize()
        device.synchronize()
        until(lambda value=value: endpoint.told[-1:] == [value + 1])
        timer.join()


# -- cost, ends and orders -------------------------------------------------------------------------------------------


def share_of(thread: threading.Thread, seconds: float) -> float:
    """The share of a core that a thread uses."""
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    used, began = time.clock_gettime(clock), time.monotonic()
    threading.Event().wait(seconds)
    return (time.clock_gettime(clock) - used) / (time.monotonic() - began)


def test_a_bridge_that_waits_costs_next_to_nothing(host: Device, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(host))
    endpoint = Scripted()
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint))
    stream = scope.enter_context(host.create_stream())
    assert not _watcher_of(bridge), "no thread before there is work for it"
    semaphore.wait(stream, 1)
    (thread,) = _watcher_of(bridge)
    share_of(thread, 0.1)  # it is quick at first
    assert share_of(thread, 0.5) < 0.1, "a stream waits, and nothing happens"
    endpoint.reached = 1
    stream.synchronize(LIMIT)
    until(lambda: bridge._watcher._sleeping)
    assert share_of(thread, 0.3) < 0.01, "nobody waits"


def _watcher_of(bridge: Bridge) -> list[threading.Thread]:
    thread = bridge._watcher._thread
    return [] if thread is None else [thread]


@pytest.mark.parametrize("order", list(itertools.permutations(("bridge", "semaphore", "stream"))), ids="-".join)
@pytest.mark.parametrize("reached", [True, False], ids=["reached", "never"])
def test_closed_in_every_order(host: Device, order: tuple[str, ...], reached: bool) -> None:
    endpoint = Scripted()
    bridge = Bridge(host, grace=0.05)
    semaphore = bridge.from_endpoint(endpoint)
    stream = host.create_stream()
    semaphore.wait(stream, 1)
    semaphore.signal(stream, 2)
    things = {"bridge": bridge, "semaphore": semaphore, "stream": stream}
    for name in order:
        things[name].close()
        if reached:
            endpoint.reached = 1
    for name in order:
        with suppress(gi.ResourceBusyError):
            things[name].close(timeout=LIMIT)
    assert endpoint.closed == 1
    assert endpoint.told == ([2] if reached else [])
    thread = bridge._watcher._thread
    assert thread is not None
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_dropped_without_close(host: Device) -> None:
    """A warning each, and nothing hangs or stays."""
    gc.collect()
    host.drain()
    before = len(os.listdir("/proc/self/fd"))
    mine = os.eventfd(0, os.EFD_NONBLOCK)
    with pytest.warns(gi.LeakedResourceWarning, match="Bridge #"), pytest.warns(match="bridged eventfd"):
        bridge = Bridge(host, grace=0.05)
        semaphore = bridge.import_semaphore(gi.EventFd(os.dup(mine)))
        stream = host.create_stream()
        semaphore.wait(stream)
        thread = bridge._watcher._thread
        del bridge, semaphore
        gc.collect()
    with pytest.raises(gi.ResourceClosedError):
        stream.synchronize(LIMIT)
    end(stream)
    assert thread is not None

    def ended() -> bool:
        host.drain()
        return not thread.is_alive()

    until(ended)
    os.close(mine)
    assert len(os.listdir("/proc/self/fd")) == before


def test_closed_things_are_refused(host: Device, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(host))
    semaphore: Any = bridge.from_endpoint(Scripted())
    stream = scope.enter_context(host.create_stream())
    end(semaphore)
    calls: list[Script] = [
        lambda: semaphore.wait(stream, 1), lambda: semaphore.host_signal(1), lambda: semaphore.host_wait(1),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(gi.ResourceClosedError):
            call()
    end(bridge)
    with pytest.raises(gi.ResourceClosedError), gi.EventFd.adopt(os.eventfd(0)) as handle:
        bridge.import_semaphore(handle)
    with pytest.raises(gi.ResourceClosedError):
        bridge.from_endpoint(Scripted())
    end(bridge)


def test_a_thread_in_host_wait_is_let_go_by_close(host: Device, scope: ExitStack) -> None:
    """At once, and alone: a stream's wait stays pending, as without that thread."""
    bridge = scope.enter_context(Bridge(host))
    endpoint = Scripted()
    semaphore: Any = bridge.from_endpoint(endpoint)
    stream = scope.enter_context(host.create_stream())
    semaphore.wait(stream, 1)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            semaphore.host_wait(1, timeout=LIMIT)
        except gi.GpuInteropError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: semaphore._lifetime.calls)
    semaphore.close()
    thread.join(LIMIT)
    assert [type(error) for error in caught] == [gi.ResourceClosedError]
    assert blocked(stream)
    endpoint.reached = 1
    stream.synchronize(LIMIT)
    semaphore.close(timeout=LIMIT)


def test_a_semaphore_that_is_closed_with_a_timeout_lets_its_streams_go(host: Device, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(host))
    semaphore = bridge.from_endpoint(Scripted())
    stream = scope.enter_context(host.create_stream())
    semaphore.wait(stream, 1)
    with pytest.raises(gi.ResourceBusyError):
        semaphore.close(timeout=0.01)
    with pytest.raises(gi.ResourceClosedError, match="was closed while a stream still waited"):
        stream.synchronize(LIMIT)


def test_a_bridge_waits_as_long_as_it_is_told_to(host: Device, scope: ExitStack) -> None:
    """Longer than what pending waits get otherwise."""
    endpoint = Scripted()
    bridge = Bridge(host, grace=0.0)
    semaphore = bridge.from_endpoint(endpoint)
    stream = scope.enter_context(host.create_stream())
    semaphore.wait(stream, 1)
    looks = itertools.count()

    def late() -> None:
        if bridge.closed and next(looks) == 20:
            endpoint.reached = 1

    endpoint.on_wait = late
    bridge.close(timeout=LIMIT)
    stream.synchronize(LIMIT)


def test_the_collector_ends_a_bridge_in_its_own_watchers_sleep(host: Device, scope: ExitStack) -> None:
    """Any allocation there may do so; what wakes the watcher must be reentrant."""
    gc.collect()
    gc.disable()
    scope.callback(gc.enable)
    endpoint = Scripted()
    bridge = Bridge(host)
    semaphore = bridge.from_endpoint(endpoint)
    stream = scope.enter_context(host.create_stream())
    semaphore.wait(stream, 1)
    thread = bridge._watcher._thread
    collected = threading.Event()
    allocate = threading._allocate_lock  # type: ignore[attr-defined]

    def collect() -> None:
        if threading.current_thread() is thread and not collected.is_set():
            gc.collect()
            collected.set()

    def allocates() -> Any:  # what threading's own conditions call in the middle of a wait
        collect()
        return allocate()

    class Collecting:
        """The watcher's queue, in the middle of whose get() the collector comes."""

        def __init__(self, wake: Any) -> None:
            self._wake = wake

        def __getattr__(self, name: str) -> Any:
            return getattr(self._wake, name)

        def get(self, timeout: float | None) -> None:
            collect()
            self._wake.get(timeout=timeout)

    semaphore.close()
    with pytest.MonkeyPatch.context() as patch, pytest.warns(gi.LeakedResourceWarning, match="Bridge #"):
        del semaphore
        patch.setattr(threading, "_allocate_lock", allocates)
        bridge._watcher._wake = Collecting(bridge._watcher._wake)  # type: ignore[assignment]
        cycle: list[Any] = [bridge]
        cycle.append(cycle)
        del bridge, cycle
        until(collected.is_set)
    endpoint.reached = 1
    stream.synchronize(LIMIT)


def test_many_threads(host: Device, scope: ExitStack) -> None:
    """Eight threads with a stream each, on one bridge: a ring of semaphores that each of them passes on."""
    bridge = scope.enter_context(Bridge(host))
    made = [scope.enter_context(host.create_semaphore(gi.TimelineFd)) for _ in range(8)]
    ring = [scope.enter_context(bridge.import_semaphore(one.export())) for one in made]
    failures: list[BaseException] = []
    rounds = 25

    def pass_on(index: int) -> None:
        try:
            with host.create_stream() as stream:
                for turn in range(1, rounds + 1):
                    ring[index].wait(stream, turn)
                    ring[(index + 1) % 8].signal(stream, turn + (index == 7))
                stream.synchronize(LIMIT)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=pass_on, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    made[0].host_signal(1)
    for thread in threads:
        thread.join(2 * LIMIT)
    assert failures == []
    made[0].host_wait(rounds + 1, timeout=LIMIT)


def test_batches(host: Device, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(host))
    endpoints = [Scripted(), Scripted(Binary)]
    one, other = (scope.enter_context(bridge.from_endpoint(endpoint)) for endpoint in endpoints)
    own: Any = scope.enter_context(host.create_semaphore(gi.TimelineFd))
    with pytest.raises(gi.InvalidArgumentError, match="batches of their own"):
        SemaphoreBatch(one, own)
    batch = SemaphoreBatch(one, other)
    stream = scope.enter_context(host.create_stream())
    batch.wait(stream, (3, None))
    endpoints[0].reached = 3
    assert blocked(stream)
    endpoints[1].signals = 1
    stream.synchronize(LIMIT)
    batch.signal(stream, (4, None))
    until(lambda: (endpoints[0].told, endpoints[1].told) == ([4], [0]))
    with pytest.raises(gi.UnsupportedError, match="waits until it is stored"):
        batch.wait(stream, (5, None), timeout=1.0)


# -- other processes -------------------------------------------------------------------------------------------------


def run(script: str, limit: float = 60.0) -> str:
    """A child's output; it must end by itself, without an error."""
    preamble = """
        import atexit, faulthandler, os, struct, sys, threading, time
        last = []
        atexit.register(lambda: [call() for call in last])  # first, so it runs behind those of the library
        faulthandler.dump_traceback_later(40, exit=True)
        import gpuinterop as gi
        device = gi.get_backend("host").device()
        class Never(gi.bridge.Endpoint):
            kind, label = gi.Timeline, "never"
            def wait(self, value, timeout): return False
            def signal(self, value): pass
            def close(self): pass
    """
    code = textwrap.dedent(preamble) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_interpreter_exits_while_a_stream_waits() -> None:
    """It waits until then, and has failed afterwards."""
    out = run(
        """
        bridge = gi.bridge.Bridge(device)
        semaphore = bridge.from_endpoint(Never())
        stream = device.create_stream()
        semaphore.wait(stream, 1)
        atexit.register(lambda: print("idle", stream.query(), flush=True))
        last.append(lambda: print("refused", semaphore._native.refusal, flush=True))
        """
    )
    assert out.splitlines() == ["idle False", "refused the interpreter is exiting while a stream still waits."]


def test_exit_lets_the_stream_go() -> None:
    """An exit function that runs behind the bridge's finds the stream let go, and failed."""
    out = run(
        """
        bridge = gi.bridge.Bridge(device)
        semaphore = bridge.from_endpoint(Never())
        stream = device.create_stream()
        semaphore.wait(stream, 1)
        from gpuinterop.bridge import _watcher
        _watcher._exit()
        try:
            stream.synchronize(20)
        except gi.ResourceClosedError as error:
            print(error)
        """
    )
    assert "the interpreter is exiting" in out


def test_a_fork_leaves_the_bridge_to_the_parent() -> None:
    out = run(
        """
        import warnings
        warnings.simplefilter("ignore")
        bridge = gi.bridge.Bridge(device)
        mine = os.eventfd(0, os.EFD_NONBLOCK)
        semaphore = bridge.import_semaphore(gi.EventFd(os.dup(mine)))
        stream = device.create_stream()
        semaphore.wait(stream)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                other = device.create_stream()
                for call in (semaphore.wait, semaphore.signal):
                    try:
                        call(other)
                    except gi.ResourceClosedError as error:
                        assert "made before the fork" in str(error), error
                    else:
                        os._exit(2)
                with gi.bridge.Bridge(device) as anew:  # one of its own works
                    fresh = os.eventfd(0, os.EFD_NONBLOCK)
                    again = anew.import_semaphore(gi.EventFd(os.dup(fresh)))
                    again.wait(other)
                    os.write(fresh, struct.pack("=Q", 1))
                    other.synchronize(20)
                    again.close(timeout=20)
                status = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                os._exit(status)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os.write(mine, struct.pack("=Q", 1))
        stream.synchronize(20)  # the parent's goes on
        bridge.close(timeout=20)
        stream.close()
        """
    )
    assert out.split() == ["child", "0"]


def test_a_childs_exit_leaves_the_parents_stream_waiting() -> None:
    """The words are shared with it: whatever it closes, and its exit functions, must not store."""
    out = run(
        """
        import warnings
        warnings.simplefilter("ignore")
        class Watched(Never):
            reached = False
            def wait(self, value, timeout): return self.reached
            def signal(self, value): os.write(told, b"s")
            def close(self): os.write(told, b"c")
        heard, told = os.pipe()
        endpoint = Watched()
        bridge = gi.bridge.Bridge(device)
        semaphore, second = bridge.from_endpoint(endpoint), bridge.from_endpoint(Watched())
        stream = device.create_stream()
        semaphore.wait(stream, 1)
        semaphore.signal(stream, 2)
        words = semaphore._native.words
        faulthandler.cancel_dump_traceback_later()  # its thread would be waited for in the child, which has none
        child = os.fork()
        if child == 0:
            second.close()
            semaphore.close()
            device.drain()
            sys.exit(0)
        os.set_blocking(heard, False)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        try:
            print("it has called", os.read(heard, 9))
        except BlockingIOError:
            print("it has called nothing")
        print("word", words.load(0), "idle", stream.query())
        endpoint.reached = True
        stream.synchronize(20)
        bridge.close(timeout=20)
        stream.close()
        """
    )
    assert out.splitlines() == ["child 0", "it has called nothing", "word 0 idle False"]


def test_a_bridge_takes_nothing_more_in_a_child_nor_at_the_end() -> None:
    """New semaphores neither: no thread would see to them."""
    script = """
        import warnings
        warnings.simplefilter("ignore")
        bridge = gi.bridge.Bridge(device)
        early = bridge.from_endpoint(Never())
        fd = os.eventfd(0)
        handle = gi.EventFd(fd)
        def refused(words):
            stream = device.create_stream()
            for call in (
                lambda: bridge.from_endpoint(Never()), lambda: bridge.import_semaphore(handle),
                lambda: early.wait(stream, 1), lambda: early.host_wait(1, timeout=20),
            ):
                try:
                    call()
                except gi.ResourceClosedError as error:
                    assert words in str(error), error
                else:
                    os._exit(3)
            assert handle.fd == fd
        """
    child = """
        child = os.fork()
        if child == 0:
            status = 1
            try:
                refused("made before the fork")
                status = 0
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    at_exit = """
        from gpuinterop.bridge import _watcher
        _watcher._exit()
        refused("the interpreter is exiting")
        print(0)
        """
    for rest in (child, at_exit):
        assert run(textwrap.dedent(script) + textwrap.dedent(rest)).split() == ["0"]


def test_two_processes_over_an_eventfd(host: Device, scope: ExitStack) -> None:
    """A child that knows nothing of this library takes part."""
    there, back = (os.eventfd(0, os.EFD_SEMAPHORE) for _ in range(2))
    for fd in (there, back):
        os.set_inheritable(fd, True)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import os\nfor _ in range(50): os.read({there}, 8); os.write({back}, (1).to_bytes(8, 'little'))",
        ],
        pass_fds=(there, back),
    )
    bridge = scope.enter_context(Bridge(host))
    ask = scope.enter_context(bridge.import_semaphore(gi.EventFd(there)))
    answer = scope.enter_context(bridge.import_semaphore(gi.EventFd(back), peer=child.pid))
    stream = scope.enter_context(host.create_stream())
    for _ in range(50):
        ask.signal(stream)
        answer.wait(stream)
    stream.synchronize(LIMIT)
    assert child.wait(LIMIT) == 0
