"""Who owns a descriptor, and when."""

import gc
import multiprocessing
import os
import pickle
from collections.abc import Iterator

import pytest

import gpuinterop as gi
from gpuinterop.handles import FdHandle, HandleOrigin, OriginKind, handle_types


@pytest.fixture
def fd() -> Iterator[int]:
    number = os.memfd_create("handle")
    yield number
    if is_open(number):
        os.close(number)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


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
    with pytest.raises(gi.ArgumentTypeError, match="fd"):
        kind("7")  # type: ignore[arg-type]
    with pytest.raises(gi.ArgumentTypeError, match="fd"):
        kind(True)
    with pytest.raises(gi.HandleError, match="fd"):
        kind(-1)
    number = os.dup(fd)
    os.close(number)
    with pytest.raises(gi.HandleError, match="not open"):
        kind(number)


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


def test_plain_pickle_is_refused_with_the_way_that_works(fd: int) -> None:
    with pytest.raises(TypeError, match=r"gpuinterop\.ipc"):
        pickle.dumps(gi.OpaqueFd(fd))


def test_multiprocessing_passes_the_descriptor_itself(fd: int) -> None:
    origin = HandleOrigin(kind=OriginKind.MEMORY, size=16)
    there, here = multiprocessing.Pipe()
    there.send(gi.OpaqueFd(fd, origin=origin))
    with here.recv() as received:
        assert received.fd != fd
        assert os.fstat(received.fd).st_ino == os.fstat(fd).st_ino
        assert received.owned
        assert received.origin == origin.untrusted()
    assert is_open(fd)


def test_fabric_handles_mean_the_same_everywhere_and_so_pickle() -> None:
    again = pickle.loads(pickle.dumps(gi.FabricHandle(bytes(range(64)))))
    assert again.data == bytes(range(64))
