"""Against the real drivers: SwiftShader and lavapipe, in this process and in others."""

from __future__ import annotations

import ctypes
import fcntl
import os
from typing import TYPE_CHECKING, Any

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop.errors import HandleError, PeerError
from gpuinterop.handles import OpaqueFd
from gpuinterop_host import semaphores
from gpuinterop_host.backend import Device, HostBackend
from gpuinterop_host.formats import lavapipe as lavapipe_format, swiftshader as swiftshader_format
from tests.limits import LIMIT

from . import peers

if TYPE_CHECKING:
    from .software_vulkan import Driver

SIZE = 64 * 1024


def test_a_bare_number_of_our_own_driver_is_not_said_to_be_another_process_s(swiftshader: Driver) -> None:
    """Nothing tells the library who else holds it, so it says that, and what to pass; the number stays ours."""
    ours = gi.get_backend("host").device()
    buffer, size = swiftshader.buffer(SIZE)
    memory, memory_fd = swiftshader.allocate(buffer, size)
    semaphore, semaphore_fd = swiftshader.semaphore()
    for take, number in (
        (lambda handle: ours.import_memory(handle, size=size), memory_fd),
        (ours.import_semaphore, semaphore_fd),
    ):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(gi.HandleError) as caught:
            take(OpaqueFd(number))
        said = str(caught.value)
        assert "elsewhere" not in said
        assert "OpaqueFd(fd, trusted=True)" in said
        assert len(os.listdir("/proc/self/fd")) == before
        take(OpaqueFd(number, trusted=True)).close(timeout=LIMIT)
        assert len(os.listdir("/proc/self/fd")) == before - 1
    swiftshader.destroy(semaphore)
    swiftshader.free(buffer, memory)


def test_how_the_drivers_make_memory(driver: Driver) -> None:
    """What the rule rests on; when a driver changes it, this says so first."""
    buffer, size = driver.buffer(SIZE)
    memory, fd = driver.allocate(buffer, size)
    link = os.readlink(f"/proc/self/fd/{fd}")
    seals = fcntl.fcntl(fd, system.F_GET_SEALS)
    total = os.fstat(fd).st_size
    if lavapipe_format.NAME in link:
        assert seals == system.SEAL_SEAL | system.SEAL_SHRINK | system.SEAL_GROW
        assert lavapipe_format.data_offset(fd, total) + size <= total
    else:
        assert link.startswith(f"/memfd:{swiftshader_format.MEMORY_NAME}")
        assert seals == system.SEAL_SEAL
        assert total >= size
    os.close(fd)
    driver.free(buffer, memory)


# -- semaphores --------------------------------------------------------------------------------------------------


def test_swiftshader_signals_us(backend: HostBackend, device: Device, stream: Any, swiftshader: Driver) -> None:
    native, fd = swiftshader.semaphore()
    assert os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{swiftshader_format.SEMAPHORE_NAME}")
    assert fcntl.fcntl(fd, system.F_GET_SEALS) == system.SEAL_SEAL
    semaphore: Any = backend.import_semaphore(device, OpaqueFd(fd, trusted=True))
    assert semaphore._page.references.value == 2
    backend.wait(backend.prepare([semaphore]), stream, [0], 300_000)
    event = backend.record(stream)
    swiftshader.submit(signal=native)
    assert backend.wait_done(event, LIMIT)
    assert not semaphore._page.signaled.value  # consumed
    swiftshader.idle()
    swiftshader.destroy(native)
    assert semaphore._page.references.value == 1
    backend.destroy_semaphore(semaphore)


def test_we_signal_swiftshader(backend: HostBackend, device: Device, stream: Any, swiftshader: Driver) -> None:
    """The semaphore is made here; SwiftShader's queue waits for it before we signal."""
    semaphore: Any = backend.create_semaphore(device, OpaqueFd)
    handle = backend.export_semaphore(semaphore)
    assert isinstance(handle, OpaqueFd)
    native = swiftshader.import_semaphore(handle.detach())
    assert semaphore._page.references.value == 3
    back, fd = swiftshader.semaphore()
    answer: Any = backend.import_semaphore(device, OpaqueFd(fd, trusted=True))
    for _ in range(20):
        swiftshader.submit(wait=native, signal=back)
        backend.signal(backend.prepare([semaphore]), stream, [0])
        backend.wait(backend.prepare([answer]), stream, [0], 300_000)
        backend.synchronize(stream)
        swiftshader.idle()
    swiftshader.destroy(native)
    swiftshader.destroy(back)
    assert semaphore._page.references.value == 2
    assert swiftshader_format.problem(ctypes.string_at(semaphore._address, system.PAGE)) is None
    backend.destroy_semaphore(answer)
    backend.destroy_semaphore(semaphore)


def test_swiftshader_last(backend: HostBackend, device: Device, swiftshader: Driver) -> None:
    """Its own semaphore dies with its last user; one made here does not, while descriptors are under way."""
    native, fd = swiftshader.semaphore()
    swiftshader.destroy(native)
    with pytest.raises(HandleError, match="destroyed"):
        backend.import_semaphore(device, OpaqueFd(fd, trusted=True))
    os.close(fd)

    semaphore: Any = backend.create_semaphore(device, OpaqueFd)
    handle = backend.export_semaphore(semaphore)
    assert isinstance(handle, OpaqueFd)
    native = swiftshader.import_semaphore(os.dup(handle.fd))
    backend.destroy_semaphore(semaphore)
    swiftshader.destroy(native)
    again = backend.import_semaphore(device, OpaqueFd(handle.detach(), trusted=True))
    backend.host_signal(again, 0)
    assert backend.host_wait(again, 0, 0)
    backend.destroy_semaphore(again)


@pytest.mark.leaves("memfd:SwiftShader.Semaphore")
def test_a_peer_dies_in_swiftshaders_lock(
    backend: HostBackend, device: Device, swiftshader: Driver, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We notice. (SwiftShader would hang: its semaphore is left alone from here on, and leaked.)"""
    monkeypatch.setattr(semaphores, "LOCK_LIMIT", 0.1)
    _, fd = swiftshader.semaphore()
    semaphore: Any = backend.import_semaphore(device, OpaqueFd(os.dup(fd), trusted=True))
    with OpaqueFd.adopt(fd) as handle:
        start(peers.die_in_lock, handle, None).join()
    for _ in range(2):
        with pytest.raises(PeerError, match="unusable"):
            backend.host_signal(semaphore, 0)
    backend.destroy_semaphore(semaphore)
