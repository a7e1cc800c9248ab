"""A DRM syncobj, against the kernel's own numbers and structs, written down once more from drm.h."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge, SyncobjEndpoint, _endpoints

from .scripted import LIMIT, until


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
    iowr(0xCB, SyncobjTimelineArray): SyncobjTimelineArray,
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
                if number == iowr(0xCB, SyncobjTimelineArray):  # QUERY
                    ctypes.c_uint64.from_address(it.points).value = self.point
                else:
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
    kernel.point = 8
    assert endpoint.counter() == 8
    kernel.error = 22
    with pytest.raises(gi.DriverError, match="DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT"):
        endpoint.wait(6, 0.0)
    kernel.error = 0
    endpoint.close()
    assert kernel.calls[-1] == "SyncobjDestroy"
    assert len(os.listdir("/proc/self/fd")) == before


def test_frames_over_a_syncobj(kernel: Kernel, bridge: Bridge, stream: gi.Stream, scope: ExitStack) -> None:
    semaphore = scope.enter_context(bridge.import_semaphore(gi.DrmSyncobjFd(os.dup(0))))
    for value in range(1, 21, 2):
        semaphore.wait(stream, value)
        semaphore.signal(stream, value + 1)
        kernel.point = value
        stream.synchronize(LIMIT)
        until(lambda value=value: kernel.point == value + 1)


def test_a_syncobj_that_is_none_stays_the_callers(kernel: Kernel, bridge: Bridge) -> None:
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
        with pytest.raises(gi.InvalidArgumentError, match="expected a DRM render node that can be opened"):
            SyncobjEndpoint(handle)
        with pytest.raises(gi.InvalidArgumentError, match="/dev/none/such"):
            SyncobjEndpoint(handle, node="/dev/none/such")
