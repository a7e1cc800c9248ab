"""A handle that several threads use at once, or whose import is interrupted: nobody else's descriptor is touched."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop.handles import FdHandle, Handle
from tests.beside import beside
from tests.descriptors import open_fds
from tests.limits import LIMIT

from .fake import FakeBackend, fake_device


@pytest.fixture
def fd() -> Iterator[int]:
    number = os.memfd_create("lent", os.MFD_CLOEXEC)
    os.ftruncate(number, 8192)
    yield number
    os.close(number)


def fail_closing(lent: Handle) -> None:
    assert isinstance(lent, FdHandle)
    os.close(lent.fd)
    raise gi.DriverError("cuImportExternalMemory", 999, "CUDA_ERROR_UNKNOWN")


# -- other threads ---------------------------------------------------------------------------------------------------


class Strangers:
    """Descriptors of somebody else, who is given whatever number was closed last."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._inodes: list[int] = []

    def arrive(self) -> None:
        for _ in range(8):
            self._fds.append(os.memfd_create("stranger", os.MFD_CLOEXEC))
            self._inodes.append(os.fstat(self._fds[-1]).st_ino)

    def leave(self) -> None:
        """Fail unless all of them are still there, untouched."""
        assert [os.fstat(fd).st_ino for fd in self._fds] == self._inodes
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def strangers() -> Strangers:
    return Strangers()


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


ENDS: dict[str, Callable[[FdHandle], object]] = {"close": FdHandle.close, "detach": FdHandle.detach}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_what_ends_a_handle_during_its_import_takes_effect_afterwards(
    device: gi.Device, backend: FakeBackend, fd: int, strangers: Strangers, end: str, owned: bool, fails: bool
) -> None:
    before = open_fds()
    number = os.dup(fd)
    handle = gi.OpaqueFd.adopt(number) if owned else gi.OpaqueFd(number)
    got: list[object] = []

    def in_another_thread() -> None:
        try:
            got.append(ENDS[end](handle))
        except gi.HandleError as error:
            got.append(error)
        strangers.arrive()

    thread = threading.Thread(target=in_another_thread)

    def importing(lent: FdHandle) -> None:
        thread.start()
        thread.join(0.1)
        os.fstat(number)
        if fails:
            fail_closing(lent)
        os.close(lent.fd)

    backend.on_import = importing
    with contextlib.suppress(gi.DriverError):
        device.import_memory(handle, size=4096).close(timeout=LIMIT)
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert handle.closed
    mine = fails and (end == "detach" or not owned)  # it was the import's, or it is the caller's
    if end == "detach":
        assert (got == [number]) is fails, got
        assert fails or isinstance(got[0], gi.HandleError)
    if mine:
        assert inode(number) == inode(fd)
        os.close(number)
    handle.close()
    strangers.leave()
    assert open_fds() == before


@pytest.mark.parametrize("how", ["duplicate", "import", "pipe"])
@pytest.mark.parametrize("end", ENDS)
def test_a_number_that_is_about_to_be_duplicated_is_not_closed_before(
    fd: int, strangers: Strangers, monkeypatch: pytest.MonkeyPatch, how: str, end: str
) -> None:
    """The duplicate would be of whatever has the number by then, and to close it would end that one's locks."""
    handle = gi.OpaqueFd.adopt(os.dup(fd))
    wanted = inode(fd)
    made: list[int] = []

    def in_another_thread() -> None:
        number = ENDS[end](handle)
        if isinstance(number, int):
            os.close(number)
        strangers.arrive()

    thread = threading.Thread(target=in_another_thread)

    def duplicate(call: Callable[..., int], *arguments: int) -> int:
        if not made and system.F_GET_SEALS not in arguments:
            if thread.ident is None:  # else the process may have no number as high as the one that was asked for
                thread.start()
                thread.join(0.1)
            made.append(call(*arguments))
            return made[-1]
        return call(*arguments)

    device, backend = fake_device()
    seen: list[int] = []
    backend.on_import = lambda lent: (seen.append(inode(lent.fd)), fail_closing(lent))[1]  # type: ignore[func-returns-value]
    with monkeypatch.context() as patches:
        patches.setattr(os, "dup", functools.partial(duplicate, os.dup))
        patches.setattr(fcntl, "fcntl", functools.partial(duplicate, fcntl.fcntl))
        if how == "duplicate":
            with handle.duplicate() as twin:
                seen.append(inode(twin.fd))
        elif how == "pipe":
            here, there = multiprocessing.Pipe()
            with here, there:
                there.send(handle)
                with here.recv() as twin:
                    seen.append(inode(twin.fd))
        else:
            with pytest.raises(gi.DriverError):
                device.import_memory(handle, size=4096)
    thread.join(LIMIT)
    assert seen == [wanted]
    strangers.leave()


def test_what_is_lent_is_apart_from_what_threads_open(device: gi.Device, backend: FakeBackend, fd: int) -> None:
    """Also in a process that has hundreds open: a driver that closes it makes no room among their numbers."""
    lent: list[int] = []

    def importing(handle: Handle) -> None:
        assert isinstance(handle, FdHandle)
        lent.append(handle.fd)
        os.close(handle.fd)

    backend.on_import = importing
    with contextlib.ExitStack() as many:
        for _ in range(300):
            many.callback(os.close, os.dup(fd))
        highest = os.dup(fd)
        many.callback(os.close, highest)
        device.import_memory(gi.OpaqueFd.adopt(os.dup(fd)), size=4096).close()
    assert lent[0] > highest + 100


def test_a_signal_handler_that_comes_into_an_import_waits_for_nothing(fd: int) -> None:
    """Neither for the lock nor for the call that it has interrupted."""
    device, backend = fake_device()
    before = open_fds()
    handle, borrowed = gi.OpaqueFd.adopt(os.dup(fd)), gi.OpaqueFd(os.dup(fd))
    number = borrowed.fd

    def handler(lent: FdHandle) -> None:
        backend.on_import = lambda lent: os.close(lent.fd)
        device.import_memory(gi.OpaqueFd(os.dup(fd)), size=4096).close(timeout=LIMIT)
        os.close(lent.fd)

    backend.on_import = handler
    device.import_memory(handle, size=4096).close(timeout=LIMIT)
    assert handle.closed

    def closing(lent: FdHandle) -> None:
        borrowed.close()
        os.close(lent.fd)

    backend.on_import = closing
    device.import_memory(borrowed, size=4096).close(timeout=LIMIT)
    assert inode(number) == inode(fd)
    os.close(number)
    assert open_fds() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_waits_for_no_import_of_its_parents_threads(fd: int) -> None:
    handle = gi.OpaqueFd(fd)
    begun, forked = threading.Event(), threading.Event()

    def wait(_fd: int) -> None:
        begun.set()
        forked.wait(LIMIT)

    with beside(lambda: handle._use(wait)):
        assert begun.wait(LIMIT)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                threading.Timer(LIMIT, os._exit, (1,)).start()
                os._exit(7 if handle.detach() == fd else 2)
            os._exit(3)
        forked.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
