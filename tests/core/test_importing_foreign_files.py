"""Descriptors of files for which another process answers, and never does: nothing here waits for it.

As a file of a mute FUSE server would be: what asks that process is written down, and waits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop import ipc, system
from gpuinterop._core import importing
from gpuinterop.bridge import Bridge
from tests.limits import LIMIT

from .fake import fake_team

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors over sockets, /proc, FUSE")


class Mute:
    """A file that is served by a process that answers nothing.

    Attributes
    ----------
    fd : int
    asked : callable
        What that process was asked so far: ``GETATTR`` by fstat, ``FLUSH`` by close.
    """

    def __init__(self, fd: int, asked: Callable[[], list[str]]) -> None:
        self.fd = fd
        self.asked = asked


@contextlib.contextmanager
def _watched(file: Path) -> Iterator[Mute]:
    file.touch()
    fd = os.open(file, os.O_RDWR)
    there, over = os.fstat(fd), threading.Event()
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        fstat, close = os.fstat, os.close

        def ours(one: Any) -> bool:
            with contextlib.suppress(OSError):
                return isinstance(one, int) and os.path.samestat(fstat(one), there)
            return False

        def wait(request: str) -> None:
            seen.append(request)
            over.wait()

        def watch(module: Any, name: str, request: str) -> None:
            real = getattr(module, name)

            def asks(*arguments: Any, **options: Any) -> Any:
                if arguments and ours(arguments[0]):
                    wait(request)
                    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
                return real(*arguments, **options)

            patch.setattr(module, name, asks)

        def flush(one: int) -> None:
            is_ours = ours(one)
            close(one)
            if is_ours:
                wait("FLUSH")

        for name, request in (
            ("fstat", "GETATTR"), ("stat", "GETATTR"), ("lseek", "GETATTR"), ("fstatvfs", "STATFS"), ("pread", "READ"),
            ("preadv", "READ"), ("read", "READ"),
        ):  # fmt: skip
            watch(os, name, request)
        watch(fcntl, "ioctl", "IOCTL")
        patch.setattr(os, "close", flush)
        poll = select.poll

        class Poll:
            def __init__(self) -> None:
                self._real = poll()

            def register(self, one: Any, events: int) -> None:
                if ours(one):
                    wait("POLL")
                self._real.register(one, events)

            def poll(self, timeout: float | None = None) -> Any:
                return self._real.poll(timeout)

        patch.setattr(select, "poll", Poll)
        try:
            yield Mute(fd, lambda: list(seen))
        finally:
            over.set()
            close(fd)


@pytest.fixture
def mute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mute]:
    monkeypatch.setattr(system, "_CLOSE_LIMIT", 0.1)  # a close waits for so long, in each of these tests
    with _watched(tmp_path / "file") as found:
        yield found


def returns(call: Callable[[], Any]) -> Any:
    """What the call returned or raised: it did."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert outcome, "it waits for the file's server"
    return outcome[0]


def is_closed(fd: int) -> bool:
    """Soon: a thread does it, before it waits."""

    def closed() -> bool:
        try:
            fcntl.fcntl(fd, fcntl.F_GETFD)
        except OSError:
            return True
        return False

    return system.until(closed, LIMIT)


def _sent(connection: socket.socket, fd: int, count: int = 1) -> None:
    """As OpaqueFds without an origin."""
    socket.send_fds(
        connection, [struct.pack("<4sBBHII", b"GIPH", 2, 0, count, 0, 128 * count) + bytes(128 * count)], [fd] * count
    )


def test_it_is_received(mute: Mute) -> None:
    """As what the peer says that it is: nothing is asked."""
    here, there = socket.socketpair()
    with here, there:
        there.settimeout(LIMIT)
        _sent(here, mute.fd)
        handle = returns(lambda: ipc.receive_handle(there, gi.OpaqueFd))
    assert type(handle) is gi.OpaqueFd
    assert mute.asked() == []
    with returns(handle.duplicate) as second:
        assert mute.asked() == []
        returns(second.close)
    returns(handle.close)
    assert all(is_closed(one._fd) for one in (handle, second))
    assert set(mute.asked()) <= {"FLUSH"}


def test_it_is_received_in_place_of_something_else(mute: Mute) -> None:
    """The message is refused, and what came with it closed: of many as soon as of one."""
    here, there = socket.socketpair()
    with here, there:
        there.settimeout(LIMIT)
        _sent(here, mute.fd, 60)
        before = set(os.listdir("/proc/self/fd"))
        error = returns(lambda: ipc.receive_handles(there, [gi.TimelineFd] * 60))
        assert isinstance(error, gi.PeerError)
        assert system.until(lambda: set(os.listdir("/proc/self/fd")) == before, LIMIT), "descriptors leaked"
    assert set(mute.asked()) <= {"FLUSH"}


def test_a_dropped_handle(mute: Mute) -> None:
    """A finalizer does not wait either."""
    handles = [returns(lambda: gi.OpaqueFd.adopt(os.dup(mute.fd)))]
    with pytest.warns(gi.LeakedResourceWarning):
        returns(handles.clear)
    assert set(mute.asked()) <= {"FLUSH"}


def _bridged(device: gi.Device, handle: Any) -> Any:
    with Bridge(device) as bridge:
        return bridge.import_semaphore(handle)


IMPORTS: dict[str, Callable[[gi.Device, int], Any]] = {
    "memory": lambda device, fd: device.import_memory(gi.OpaqueFd(fd), size=4096),
    "binary": lambda device, fd: device.import_semaphore(gi.OpaqueFd(fd)),
    "timeline": lambda device, fd: device.import_semaphore(gi.TimelineFd(fd)),
    "allocation": lambda device, fd: device.import_allocation(gi.VmmFd(fd), 1 << 16),
    "bridged timeline": lambda device, fd: _bridged(device, gi.TimelineFd(fd)),
    "bridged eventfd": lambda device, fd: _bridged(device, gi.EventFd(fd)),
    "bridged sync file": lambda device, fd: _bridged(device, gi.SyncFd(fd)),
}


@pytest.mark.parametrize("what", IMPORTS)
def test_the_host_refuses_it(mute: Mute, host: gi.Device, what: str) -> None:
    """Before it is asked anything; afterwards it is the caller's, open."""
    error = returns(lambda: IMPORTS[what](host, mute.fd))
    assert isinstance(error, gi.HandleError), error
    assert set(mute.asked()) <= {"FLUSH"}
    fcntl.fcntl(mute.fd, fcntl.F_GETFD)


@pytest.mark.parametrize("kernel", ["this one", "an old one"])
@pytest.mark.parametrize("what", ["memory", "binary", "timeline", "allocation"])
@pytest.mark.filterwarnings("ignore::gpuinterop.LeakedResourceWarning")
def test_a_driver_refuses_it(mute: Mute, what: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core asks nothing for the driver, and nothing to find out whose the descriptor is afterwards."""
    (device, *_), backend = fake_team()
    if kernel == "an old one":
        monkeypatch.setattr(importing, "_F_DUPFD_QUERY", 99999)
        monkeypatch.setattr(importing, "_KCMP", None)
    lent: list[int] = []

    def refuse(handle: Any) -> None:
        lent.append(handle.fd)
        raise gi.DriverError("cuImportExternalMemory", 999, "CUDA_ERROR_UNKNOWN")

    backend.on_import = refuse
    error = returns(lambda: IMPORTS[what](device, mute.fd))
    assert isinstance(error, gi.DriverError), error
    assert set(mute.asked()) <= {"FLUSH"}
    if kernel == "an old one":
        returns(lambda: gi.OpaqueFd.adopt(lent[0]).close())
    assert is_closed(lent[0])


@pytest.mark.parametrize(
    ("fdinfo", "size"),
    [
        # An H100's, of cuMemGetHandleForAddressRange.
        ("pos:\t0\nflags:\t02000002\nmnt_id:\t12\nino:\t1\nsize:\t4194304\ncount:\t1\nexp_name:\tnv_dmabuf\n", 4194304),
        ("pos:\t0\nsize:\t64\ncount:\t2\nexp_name:\tsystem\nname:\tx\nsize:\t9\ncount:\t1\nexp_name:\ty\n", 64),
        ("pos:\t0\nflags:\t02100002\nmnt_id:\t24\nino:\t142\n", None),  # /dev/nvidiactl
        ("pos:\t0\nsize:\t64\n", None),
    ],
)
def test_what_the_kernel_notes_of_a_dma_buf(fdinfo: str, size: int | None) -> None:
    """This machine has none."""
    assert importing.dmabuf_size(fdinfo) == size
