"""One rule on top of drivers that have none: success consumes, failure leaves the caller's fd alone."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core import importing
from gpuinterop.handles import FdHandle, HandleOrigin, OriginKind
from tests.descriptors import open_fds
from tests.limits import LIMIT

from .fake import FakeBackend, fake_device


@pytest.fixture
def fd() -> Iterator[int]:
    number = os.memfd_create("lent", os.MFD_CLOEXEC)
    os.ftruncate(number, 8192)
    yield number
    with contextlib.suppress(OSError):  # consumed
        os.close(number)


def test_success_consumes_whether_the_driver_closes_or_not(device: gi.Device, backend: FakeBackend, fd: int) -> None:
    for on_import in (lambda handle: os.close(handle.fd), lambda handle: os.close(handle.detach())):
        before = open_fds()
        backend.on_import = on_import
        handle = gi.OpaqueFd.adopt(os.dup(fd))
        device.import_memory(handle, size=4096).close(timeout=LIMIT)
        assert handle.closed
        assert open_fds() == before
        with pytest.raises(gi.HandleError, match=r"consumed.*duplicate"):
            device.import_memory(handle, size=4096)


def fail_keeping(handle: FdHandle) -> None:
    raise gi.DriverError("cuImportExternalMemory", 1, "CUDA_ERROR_INVALID_VALUE")


def fail_closing(handle: FdHandle) -> None:
    os.close(handle.fd)
    raise gi.DriverError("cuImportExternalMemory", 999, "CUDA_ERROR_UNKNOWN")


@pytest.mark.parametrize("failure", [fail_keeping, fail_closing])
@pytest.mark.parametrize("kind", ["memory", "semaphore"])
def test_failure_leaves_the_fd_open_and_nothing_leaks(fd: int, failure: object, kind: str) -> None:
    device, backend = fake_device()
    backend.on_import = failure  # type: ignore[assignment]
    before = open_fds()
    handle = gi.OpaqueFd(fd)
    with pytest.raises(gi.DriverError, match="cuImportExternalMemory"):
        device.import_memory(handle, size=4096) if kind == "memory" else device.import_semaphore(handle)
    assert open_fds() == before
    os.write(handle.fd, b"still ours")
    backend.on_import = lambda handle: os.close(handle.fd)
    device.import_memory(handle, size=4096).close(timeout=LIMIT)  # and it can be tried again


@pytest.mark.parametrize("failure", [None, fail_keeping, fail_closing])
@pytest.mark.parametrize("kind", [gi.OpaqueFd, gi.DmaBufFd, gi.TimelineFd])
def test_the_owner_of_a_number_keeps_its_file(fd: int, kind: Any, failure: Any) -> None:
    """It closes the number when it likes, and no other file: at each step the number is open, and the same file's."""
    device, backend = fake_device()
    backend.on_import = failure or (lambda handle: os.close(handle.fd))
    file, before = os.fstat(fd).st_ino, open_fds()
    with kind.adopt_duplicate(fd, trusted=True) as handle:
        size = {} if kind is gi.TimelineFd else {"size": 4096}
        with pytest.raises(gi.DriverError) if failure else contextlib.nullcontext():
            getattr(device, "import_memory" if size else "import_semaphore")(handle, **size).close(timeout=LIMIT)
        assert (os.fstat(fd).st_ino, handle.trusted) == (file, True)
    with pytest.raises(gi.ArgumentTypeError, match="trusted"):
        kind.adopt_duplicate(fd, trusted="yes")
    assert (os.fstat(fd).st_ino, open_fds()) == (file, before)


def test_a_number_that_became_somebody_elses_is_not_closed(device: gi.Device, backend: FakeBackend, fd: int) -> None:
    stranger = os.memfd_create("stranger")
    reused = []

    def fail_and_reuse(handle: FdHandle) -> None:
        os.dup2(stranger, handle.fd)
        reused.append(handle.fd)
        raise gi.DriverError("cuImportExternalMemory", 999, "CUDA_ERROR_UNKNOWN")

    backend.on_import = fail_and_reuse
    with pytest.raises(gi.DriverError):
        device.import_memory(gi.OpaqueFd(fd), size=4096)
    assert os.fstat(reused[0]).st_ino == os.fstat(stranger).st_ino
    os.close(reused[0])
    os.close(stranger)


@pytest.mark.parametrize("query", [True, False])
@pytest.mark.parametrize("kcmp", [True, False])
def test_same_open_file_by_whatever_the_kernel_has(
    fd: int, query: bool, kcmp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not query:
        monkeypatch.setattr(importing, "_F_DUPFD_QUERY", 99999)
    if not kcmp:
        monkeypatch.setattr(importing, "_KCMP", None)
    duplicate, other = os.dup(fd), os.memfd_create("other")
    assert importing.same_open_file(fd, duplicate) is True
    assert importing.same_open_file(fd, other) is False
    os.close(duplicate)
    assert importing.same_open_file(fd, duplicate) is False
    os.close(other)


def test_where_nothing_can_prove_it_the_duplicate_is_left_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_F_DUPFD_QUERY", 99999)
    monkeypatch.setattr(importing, "_KCMP", None)
    left = []

    def fail(handle: FdHandle) -> None:
        left.append(handle.fd)
        raise gi.DriverError("cuImportExternalSemaphore", 1, "CUDA_ERROR_INVALID_VALUE")

    device, backend = fake_device()
    backend.on_import = fail
    number = os.open("/dev/null", os.O_RDWR)
    with pytest.warns(gi.LeakedResourceWarning, match="left open"), pytest.raises(gi.DriverError):
        device.import_semaphore(gi.TimelineFd(number))
    os.fstat(left[0])
    os.close(left[0])
    os.close(number)


def test_a_size_beyond_the_object_is_refused_before_the_driver_sees_it(fd: int) -> None:
    device, backend = fake_device()
    for said in (None, 1 << 20, 4096):  # of the origin, which is another process's: more is not believed
        handle = gi.OpaqueFd(fd, origin=HandleOrigin(kind=OriginKind.MEMORY, size=said))
        with pytest.raises(gi.InvalidArgumentError, match=r"at most [0-9]+ bytes, as the .+ says, got 8193") as caught:
            device.import_memory(handle, size=8193)
        assert caught.value.argument == "size"
    with pytest.raises(gi.InvalidArgumentError, match="4096 bytes"):
        device.import_memory(handle, size=8192)
    assert not backend.calls


def test_what_the_origin_contradicts_is_refused(device: gi.Device, backend: FakeBackend, fd: int) -> None:
    other = gi.DeviceIdentity(name="another GPU", uuid=b"x" * 16)
    with pytest.raises(gi.HandleError, match=r"another GPU.*match_device"):
        device.import_memory(gi.OpaqueFd(fd, origin=HandleOrigin(kind=OriginKind.MEMORY, device=other)), size=1)
    with pytest.raises(gi.HandleError, match=r"another GPU.*match_device"):
        device.import_semaphore(gi.TimelineFd(fd, origin=HandleOrigin(kind=OriginKind.TIMELINE, device=other)))
    with pytest.raises(gi.HandleError, match="timeline"):
        device.import_semaphore(gi.OpaqueFd(fd, origin=HandleOrigin(kind=OriginKind.TIMELINE)))
    with pytest.raises(gi.HandleError, match="memory"):
        device.import_semaphore(gi.TimelineFd(fd, origin=HandleOrigin(kind=OriginKind.MEMORY)))
    with pytest.raises(gi.InvalidArgumentError, match="dedicated"):
        device.import_memory(
            gi.OpaqueFd(fd, origin=HandleOrigin(kind=OriginKind.MEMORY, dedicated=True)), size=1, dedicated=False
        )
    assert not backend.calls
    same = gi.DeviceIdentity(name="the same, less known", pci_bus_id="0000:01:00.0")
    device.import_memory(
        gi.OpaqueFd(os.dup(fd), origin=HandleOrigin(kind=OriginKind.MEMORY, device=same, dedicated=True)), size=1
    ).close(timeout=LIMIT)
    assert backend.calls[0] == ("import_memory", "OpaqueFd", 1, True)


def test_direct3d_resources_are_always_dedicated(device: gi.Device, backend: FakeBackend) -> None:
    device.import_memory(gi.D3D12Resource(handle=8), size=64).close(timeout=LIMIT)
    assert backend.calls[0] == ("import_memory", "D3D12Resource", 64, True)
    with pytest.raises(gi.InvalidArgumentError, match="dedicated"):
        device.import_memory(gi.D3D11ResourceKmt(handle=8), size=64, dedicated=False)
