"""Who owns a descriptor, and when."""

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import handles
from gpuinterop.handles import FdHandle, HandleOrigin, OriginKind, handle_types
from tests.beside import elsewhere
from tests.descriptors import is_open
from tests.limits import LIMIT


@pytest.fixture
def fd() -> Iterator[int]:
    number = os.memfd_create("handle")
    yield number
    if is_open(number):
        os.close(number)


class _LazyArray:
    """As torch's tensor that requires a gradient: the attribute is there, and reading it raises."""

    @property
    def __cuda_array_interface__(self) -> object:
        raise RuntimeError("it requires a gradient")


@pytest.mark.parametrize("array", [np.zeros(4), _LazyArray()], ids=lambda one: type(one).__name__)
def test_an_array_in_place_of_a_handle_is_told_of_sharing(array: Any) -> None:
    device = gi.get_backend("host").devices()[0]
    for call in (lambda: device.import_memory(array, size=32), lambda: device.import_allocation(array, 32)):
        with pytest.raises(gi.ArgumentTypeError, match=r"got \w+, an array") as caught:
            call()
        for way in ("gpuinterop.share(array)", "gpuinterop.vulkan.import_array(vk, array)"):
            assert way in str(caught.value)
    with pytest.raises(gi.ArgumentTypeError) as caught:
        device.import_memory("array", size=32)  # type: ignore[arg-type]
    assert "gpuinterop.share" not in str(caught.value)


def test_a_borrowed_fd_outlives_its_handle(fd: int) -> None:
    with gi.OpaqueFd(fd) as handle:
        assert handle.fd == handle.fileno() == fd
        assert not handle.owned
    assert is_open(fd)
    with pytest.raises(gi.HandleError, match="closed"):
        _ = handle.fd


def test_an_owned_fd_goes_with_its_handle(fd: int) -> None:
    handle = gi.OpaqueFd.adopt(fd)
    handle.close()
    handle.close()
    assert not is_open(fd)


def test_no_program_inherits_an_owned_fd(fd: int) -> None:
    os.set_inheritable(fd, True)  # as drivers return them
    with gi.OpaqueFd.adopt(fd) as handle:
        command = [sys.executable, "-c", f"import os; os.fstat({handle.fd})"]
        done = subprocess.run(command, close_fds=False, stderr=subprocess.PIPE, check=False)
    assert b"Bad file descriptor" in done.stderr


def test_detach_gives_the_fd_back(fd: int) -> None:
    handle = gi.OpaqueFd.adopt(fd)
    assert handle.detach() == fd
    del handle
    gc.collect()
    assert is_open(fd)


def test_a_leaked_owned_fd_is_closed_with_a_warning(fd: int) -> None:
    with pytest.warns(gi.LeakedResourceWarning, match="OpaqueFd"):
        gi.OpaqueFd.adopt(fd)
        gc.collect()
    assert not is_open(fd)


def test_duplicate_owns_another_number(fd: int) -> None:
    with gi.OpaqueFd(fd).duplicate() as second:
        assert second.fd != fd
        assert second.owned
        assert not os.get_inheritable(second.fd)


@pytest.mark.parametrize("kind", [kind for kind in handle_types().values() if issubclass(kind, FdHandle)])
def test_every_fd_type_refuses_what_is_no_fd(kind: type[FdHandle], fd: int) -> None:
    for impossible in (-1, 2**31, 2**40, 2**70):
        with pytest.raises((gi.HandleError, gi.InvalidArgumentError), match=r"^fd: "):
            kind(impossible)
    number = os.dup(fd)
    os.close(number)
    with pytest.raises(gi.HandleError, match="not open"):
        kind(number)


@pytest.mark.parametrize(
    ("base", "named"),
    [
        (handles.FdHandle, "OpaqueFd, TimelineFd, DmaBufFd"),
        (handles.SemaphoreHandle, "OpaqueFd, TimelineFd"),
        (handles.Handle, "OpaqueFd"),
    ],
)
def test_a_base_is_not_constructed_and_names_what_is(base: Any, named: str, fd: int) -> None:
    for arguments in ((fd,), ()):
        with pytest.raises(gi.ArgumentTypeError, match=named) as caught:
            base(*arguments)
        assert caught.value.argument == "handle"
    with pytest.raises(gi.ArgumentTypeError, match=rf"\b{base.__name__}\b"):
        base(handle=fd, origin=None)
    assert is_open(fd)


def test_an_fd_that_somebody_else_closed_is_a_handle_error(fd: int) -> None:
    with gi.OpaqueFd(os.dup(fd)) as borrowed:
        os.close(borrowed.fd)
        with pytest.raises(gi.HandleError, match="closed elsewhere"):
            borrowed.duplicate()
    owned = gi.OpaqueFd.adopt(os.dup(fd))
    os.close(owned.fd)
    with pytest.raises(gi.HandleError, match="closed elsewhere"):
        owned.close()
    owned.close()
    assert owned.closed
    with pytest.raises(gi.HandleError, match="closed elsewhere"), gi.OpaqueFd.adopt(os.dup(fd)) as second:
        os.close(second.fd)


def test_leaving_a_block_masks_no_exception(fd: int) -> None:
    with pytest.raises(KeyError, match="in flight"), gi.OpaqueFd.adopt(os.dup(fd)) as handle:
        os.close(handle.fd)
        raise KeyError("in flight")


def test_win32_handles_take_exactly_one_of_handle_and_name() -> None:
    assert gi.OpaqueWin32(handle=4).handle == 4
    assert gi.D3D12Fence(name="frame").name == "frame"
    for bad in ({}, {"handle": 4, "name": "x"}, {"name": ""}, {"name": "a\0b"}):
        with pytest.raises(gi.InvalidArgumentError):
            gi.OpaqueWin32(**bad)
    with pytest.raises(gi.HandleError):
        gi.OpaqueWin32(handle=0)
    with pytest.raises(gi.ArgumentTypeError):
        gi.OpaqueWin32(handle="4")  # type: ignore[arg-type]
    owner = object()
    kmt = gi.OpaqueWin32Kmt(handle=4, keepalive=owner)
    assert kmt.duplicate().keepalive is owner


def test_pointer_and_fabric_handles_check_their_contents() -> None:
    with pytest.raises(gi.HandleError, match="null"):
        gi.NvSciBuf(0)
    with pytest.raises(gi.InvalidArgumentError, match="64 bytes"):
        gi.FabricHandle(b"short")
    assert gi.FabricHandle(bytes(64)).duplicate().data == bytes(64)


def test_a_queue_is_advised_against(fd: int) -> None:
    with pytest.raises(gi.ArgumentTypeError, match=r"Process\b.*Pipe\b.*Queue\b"):
        pickle.dumps(gi.OpaqueFd(fd))
    with gi.OpaqueFd(fd) as closed:
        pass
    with pytest.raises(gi.HandleError, match=r"is closed.*Queue, which pickles later"):
        multiprocessing.reduction.ForkingPickler.dumps(closed)


METHODS = pytest.mark.parametrize("method", ["spawn", "forkserver"])


def look(handle: gi.OpaqueFd, answers: Any) -> None:
    """In another process: say what has come, and write through it."""
    with handle:
        os.pwrite(handle.fd, b"seen", 0)
        answers.send((handle.owned, os.fstat(handle.fd).st_ino, handle.origin))


def look_at_what_comes(connection: Any) -> None:
    look(connection.recv(), connection)


@METHODS
def test_a_handle_goes_through_a_pipe(fd: int, method: str) -> None:
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=look_at_what_comes, args=(there,))  # type: ignore[attr-defined]
    process.start()
    with gi.OpaqueFd(fd).duplicate() as handle:
        here.send(handle)
    check_answer(process, here, fd, None)  # closed here as soon as send() returned
    there.close()


class Ends:
    """An argument behind a handle: while it is pickled, another thread ends the handle, and its number is taken."""

    def __init__(self, handle: gi.OpaqueFd, taken: list[int]) -> None:
        self.handle = handle
        self.taken = taken

    def __reduce__(self) -> Any:
        number = self.handle.fd
        elsewhere(self.handle.close)
        while not is_open(number):
            self.taken.append(os.memfd_create("another"))
        return int, ()


def look_before(handle: gi.OpaqueFd, answers: Any, _: Ends) -> None:
    look(handle, answers)


@METHODS
def test_a_handle_is_an_argument_of_a_process(fd: int, method: str) -> None:
    """Process.start() pickles all arguments before it passes a number. What it passed is not kept open here."""
    context = multiprocessing.get_context(method)
    origin = HandleOrigin(kind=OriginKind.MEMORY, size=16)
    here, there = context.Pipe(duplex=False)
    handle, taken = gi.OpaqueFd(fd, origin=origin).duplicate(), list[int]()
    process = context.Process(target=look_before, args=(handle, there, Ends(handle, taken)))  # type: ignore[attr-defined]
    process.start()
    there.close()
    with gi.OpaqueFd(fd):  # the end of any handle closes what has been passed
        pass
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    same = [one for one in numbers if is_open(one) and os.path.samestat(os.fstat(one), os.fstat(fd))]
    check_answer(process, here, fd, origin)
    assert same == [fd]
    for number in taken:
        os.close(number)


def check_answer(process: Any, answers: Any, fd: int, origin: HandleOrigin | None) -> None:
    try:
        assert answers.poll(LIMIT)
        assert answers.recv() == (True, os.fstat(fd).st_ino, origin and origin.untrusted())
        assert os.pread(fd, 4, 0) == b"seen"
        process.join(LIMIT)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        process.close()
        answers.close()


def test_fabric_handles_mean_the_same_everywhere_and_so_pickle() -> None:
    again = pickle.loads(pickle.dumps(gi.FabricHandle(bytes(range(64)))))
    assert again.data == bytes(range(64))


def test_a_handle_of_another_imports_class_names_that_import(host: gi.Device) -> None:
    with host.allocate(4096) as allocation, allocation.export() as handle:
        with pytest.raises(gi.ArgumentTypeError, match=r"got VmmFd, .*import_allocation"):
            host.import_memory(handle, size=4096)  # type: ignore[arg-type]
        with pytest.raises(gi.ArgumentTypeError, match=r"got VmmFd, .*import_allocation"):
            host.import_semaphore(handle)  # type: ignore[arg-type]
        assert not handle.closed
