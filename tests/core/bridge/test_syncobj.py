"""A DRM syncobj, against the kernel's own numbers and structs, written down once more from drm.h."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge, SyncobjEndpoint, _endpoints
from tests.limits import LIMIT

from .scripted import until


def iowr(number: int, size: int) -> int:
    """``_IOWR('d', number, struct)`` of asm-generic/ioctl.h, for a struct of so many bytes."""
    return 3 << 30 | size << 16 | ord("d") << 8 | number


FD_TO_HANDLE = iowr(0xC2, 16)  # u32 handle, u32 flags, s32 fd, u32 pad
DESTROY = iowr(0xC0, 8)  # u32 handle, u32 pad
WAIT = iowr(0xCA, 40)  # u64 handles, u64 points, s64 timeout, u32 count, u32 flags, u32 first_signaled, u32 pad
SIGNAL = iowr(0xCD, 24)  # u64 handles, u64 points, u32 count, u32 flags
QUERY = iowr(0xCB, 24)


class Kernel:
    """Plays DRM: one timeline syncobj, of handle 77."""

    def __init__(self) -> None:
        self.point = 0
        self.calls: list[int] = []
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
        assert len(request) == number >> 16 & 0x3FFF
        self.calls.append(number)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        if number == FD_TO_HANDLE:
            handle, flags, fd, pad = struct.unpack("=IIiI", request)
            assert (handle, flags, pad) == (0, 0, 0)
            self.fds.append(fd)
            struct.pack_into("=I", request, 0, 77)
        elif number == DESTROY:
            assert struct.unpack("=II", request) == (77, 0)
        else:
            handles, points = struct.unpack_from("=QQ", request)
            assert ctypes.c_uint32.from_address(handles).value == 77
            point = ctypes.c_uint64.from_address(points)
            if number == WAIT:
                deadline, *rest = struct.unpack_from("=qIIII", request, 16)
                assert rest == [1, 2, 0, 0]  # DRM_SYNCOBJ_WAIT_FLAGS_WAIT_FOR_SUBMIT
                self.deadlines.append(deadline)
                if self.point < point.value:
                    raise OSError(62, "Timer expired")  # ETIME
                return 0
            assert struct.unpack_from("=II", request, 16) == (1, 0)
            if number == QUERY:
                point.value = self.point
            else:
                assert number == SIGNAL
                self.point = point.value
        return 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(_endpoints, "fcntl", SimpleNamespace(ioctl=kernel.ioctl))
    monkeypatch.setattr(_endpoints, "_NODES", os.devnull)
    monkeypatch.setattr("gpuinterop.bridge._bridge.render_nodes", lambda: [os.devnull])
    return kernel


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
    assert kernel.calls[-1] == DESTROY
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
        with pytest.raises(gi.InvalidArgumentError, match="DRM render node"):
            SyncobjEndpoint(handle)
        with pytest.raises(gi.InvalidArgumentError, match="/dev/none/such"):
            SyncobjEndpoint(handle, node="/dev/none/such")
