"""Which objects are taken as memory, what happens to the descriptor, and that nothing leaks."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpuinterop import system
from gpuinterop.errors import HandleError, OutOfMemoryError
from gpuinterop.handles import OpaqueFd, TimelineFd, VmmFd
from gpuinterop_host import memory
from gpuinterop_host.backend import Device, HostBackend
from gpuinterop_host.formats import lavapipe, swiftshader
from gpuinterop_host.semaphores import BinarySemaphore

SEALABLE = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
SIZE = 3 * system.PAGE + 100


def memfd(size: int = SIZE, *, name: str = "test", flags: int = SEALABLE, seals: int = 0) -> int:
    fd = os.memfd_create(name, flags)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, system.F_ADD_SEALS, seals)
    return fd


def seals_of(fd: int) -> int:
    return fcntl.fcntl(fd, system.F_GET_SEALS)


def _state(fd: int) -> tuple[int, int | None]:
    """Its size and seals."""
    try:
        return os.fstat(fd).st_size, seals_of(fd)
    except OSError:
        return os.fstat(fd).st_size, None


def take(backend: HostBackend, device: Device, fd: int, size: int = SIZE) -> Any:
    return backend.import_memory(device, OpaqueFd(fd), size=size, dedicated=False)


def test_it_is_sealed_against_shrinking_only(backend: HostBackend, device: Device) -> None:
    fd = memfd()
    other = os.dup(fd)
    imported = take(backend, device, fd)
    assert seals_of(other) == system.SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(other, system.PAGE)
    os.ftruncate(other, 2 * SIZE)  # its owner may still grow it
    backend.destroy_memory(imported)
    os.close(other)


def test_a_sealed_one_is_left_as_it_is(backend: HostBackend, device: Device) -> None:
    fd = memfd(seals=system.SEAL_SHRINK | system.SEAL_SEAL)
    other = os.dup(fd)
    imported = take(backend, device, fd)
    assert seals_of(other) == system.SEAL_SHRINK | system.SEAL_SEAL
    backend.destroy_memory(imported)
    os.close(other)


def _read_only() -> int:
    fd = memfd()
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


def _regular_file() -> int:
    return os.open(os.environ["TEST_FILE"], os.O_RDWR | os.O_CREAT)


def _shm() -> int:
    path = f"/dev/shm/gpuinterop-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.ftruncate(fd, SIZE)
    os.unlink(path)
    return fd


def _pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def _semaphore(kind: Any) -> int:
    backend = HostBackend()
    semaphore = backend.create_semaphore(backend.open_device(0), kind)
    handle: Any = backend.export_semaphore(semaphore)
    backend.destroy_semaphore(semaphore)
    return int(handle.detach())


REFUSED: list[tuple[str, Callable[[], int], str]] = [
    ("regular file", _regular_file, "/file' cannot be .*MFD_ALLOW_SEALING"),
    ("dev shm", _shm, "a known driver, or one that can be sealed against shrinking, got '/dev/shm/"),
    ("pipe", _pipe, "'pipe:"),
    ("socket", lambda: socket.socket().detach(), "'socket:"),
    ("device", lambda: os.open("/dev/zero", os.O_RDWR), "'/dev/zero'"),
    ("directory", lambda: os.open("/", os.O_RDONLY), "'/' cannot be"),
    ("unsealable memfd", lambda: memfd(flags=os.MFD_CLOEXEC), "can be sealed against shrinking, got '/memfd:"),
    ("nearly SwiftShader's", lambda: memfd(flags=os.MFD_CLOEXEC, name="SwiftShader"), "can be sealed"),
    ("read only", _read_only, "not open for reading and writing"),
    ("sealed against writing", lambda: memfd(seals=0x8), "F_SEAL_WRITE"),
    ("binary semaphore", lambda: _semaphore(OpaqueFd), "of a semaphore"),
    ("timeline semaphore", lambda: _semaphore(TimelineFd), "of a semaphore"),
    ("too small", lambda: memfd(SIZE - 1), rf"size: .*\b{SIZE - 1}\b"),
    ("empty", lambda: memfd(0), "size: "),
    ("memory as such", lambda: memfd(system.PAGE), rf"size: .*\b{system.PAGE}\b"),
    ("no lavapipe", lambda: memfd(name=lavapipe.NAME), "without the header"),
]


@pytest.mark.parametrize(("make", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_refused(
    backend: HostBackend,
    device: Device,
    make: Callable[[], int],
    message: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_FILE", str(tmp_path / "file"))
    fd = make()
    before = _state(fd)
    with pytest.raises(HandleError, match=message):
        take(backend, device, fd)
    if make in [case[1] for case in REFUSED[:10]]:  # what is no memfd of memory is no semaphore either
        for kind in (OpaqueFd, TimelineFd):
            with pytest.raises(HandleError):
                backend.import_semaphore(device, kind(fd))
    assert _state(fd) == before  # open and untouched: not even sealed
    os.close(fd)


def test_truncated_meanwhile(backend: HostBackend, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the size and the seal: noticed behind the seal."""
    fd = memfd()
    secure = memory.Object.secure

    def truncated(found: memory.Object) -> None:
        os.ftruncate(fd, 100)
        secure(found)

    monkeypatch.setattr(memory.Object, "secure", truncated)
    with pytest.raises(HandleError, match="truncated while"):
        take(backend, device, fd)
    os.close(fd)


def test_names_are_not_taken_from_other_objects(backend: HostBackend, device: Device, tmp_path: Any) -> None:
    """A file in /dev/shm called like SwiftShader's memfd is still a file."""
    path = f"/dev/shm/{swiftshader.MEMORY_NAME}{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(fd, SIZE)
        with pytest.raises(HandleError, match="sealed"):
            take(backend, device, fd)
    finally:
        os.unlink(path)
        os.close(fd)


@pytest.mark.parametrize("offset", [system.PAGE, 2 * system.PAGE, 64])
def test_lavapipe_header(backend: HostBackend, device: Device, offset: int) -> None:
    """The offset is the header's, whatever it is."""
    fd = memfd(name=lavapipe.NAME, seals=7)
    other = os.dup(fd)
    os.pwrite(other, struct.pack("QQ16s", SIZE, offset, b"any build's hash"), 0)
    os.pwrite(other, struct.pack("Q", offset) + b"data", offset - 8)
    imported = take(backend, device, fd, SIZE - offset)
    _, address = backend.map_buffer(imported, size=SIZE - offset)
    assert ctypes.string_at(address, 4) == b"data"
    backend.destroy_memory(imported)
    with pytest.raises(HandleError, match="size"):
        take(backend, device, other, SIZE - offset + 1)
    os.close(other)


@pytest.mark.parametrize(
    ("total", "offset", "again"),
    [(SIZE + 1, 4096, 4096), (SIZE, SIZE + 8, 0), (SIZE, 32, 32), (SIZE, 4096, 4095), (SIZE, 1 << 63, 0)],
)
def test_lavapipe_header_wrong(backend: HostBackend, device: Device, total: int, offset: int, again: int) -> None:
    fd = memfd(name=lavapipe.NAME, seals=7)
    os.pwrite(fd, struct.pack("QQ16s", total, offset, b"hash"), 0)
    if 8 < offset <= SIZE:
        os.pwrite(fd, struct.pack("Q", again), offset - 8)
    with pytest.raises(HandleError, match="without the header"):
        take(backend, device, fd, 100)
    os.close(fd)


def test_what_can_be_truncated_wants_trust(backend: HostBackend, device: Device) -> None:
    """Never mapped, so that there is nothing to die of: a name is all that it has of SwiftShader."""
    for name, take in (
        (swiftshader.MEMORY_NAME, lambda h: backend.import_memory(device, h, size=4096, dedicated=False)),
        (swiftshader.SEMAPHORE_NAME, lambda h: backend.import_semaphore(device, h)),
    ):
        fd = os.memfd_create(f"{name}truncatable", os.MFD_CLOEXEC)
        page = BinarySemaphore.create()
        os.write(fd, os.pread(page.fd, system.PAGE, 0))
        page.close()
        with pytest.raises(Exception, match=r"SIGBUS.*trusted=True") as caught:
            take(OpaqueFd(fd))
        assert caught.type.__name__ == "HandleError"
        assert not any("truncatable" in one.path for one in system.mappings())
        taken: Any = take(OpaqueFd(os.dup(fd), trusted=True))
        (backend.destroy_memory if name == swiftshader.MEMORY_NAME else backend.destroy_semaphore)(taken)
        os.close(fd)


# -- allocations -------------------------------------------------------------------------------------------------


@pytest.fixture
def allocation(backend: HostBackend, device: Device) -> Iterator[Any]:
    made = backend.allocate(device, 4 * system.PAGE, VmmFd)
    yield made
    backend.release_allocation(made)


def test_allocation(backend: HostBackend, device: Device, allocation: Any) -> None:
    assert backend.granularity(device, VmmFd) == (system.PAGE, system.PAGE)
    handle = backend.export_allocation(allocation)
    assert isinstance(handle, VmmFd)
    assert seals_of(handle.fd) == 7
    assert not os.get_inheritable(handle.fd)
    imported = backend.import_allocation(device, handle, size=4 * system.PAGE)
    backend.release_allocation(imported)
    with pytest.raises(OSError, match="descriptor"):  # the import took it over
        os.fstat(handle.detach())


@pytest.mark.parametrize(
    ("seals", "size", "message"),
    [
        (0, SIZE, "expected a shareable allocation"),
        (system.SEAL_SHRINK, SIZE, "expected a shareable allocation"),
        (6, SIZE + 1, "size"),
    ],
)
def test_import_allocation_refused(backend: HostBackend, device: Device, seals: int, size: int, message: str) -> None:
    fd = memfd(seals=seals)
    before = _state(fd)
    with pytest.raises(HandleError, match=message):
        backend.import_allocation(device, VmmFd(fd), size=size)
    assert _state(fd) == before
    os.close(fd)


def test_what_is_no_allocation(backend: HostBackend, device: Device) -> None:
    for fd in (_semaphore(TimelineFd), memfd(name=lavapipe.NAME, seals=7)):
        with pytest.raises(HandleError, match="expected an allocation"):
            backend.import_allocation(device, VmmFd(fd), size=system.PAGE)
        os.close(fd)


def test_too_much(backend: HostBackend, device: Device) -> None:
    with pytest.raises(OutOfMemoryError, match="available") as caught:
        backend.allocate(device, 1 << 50, VmmFd)
    assert caught.value.symbol == "ENOMEM"
