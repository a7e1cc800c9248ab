"""What other processes do in these tests: started by multiprocessing's spawn, given handles; and scripts by `run`."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from typing import Any

from gpuinterop.handles import FdHandle, OpaqueFd, TimelineFd
from gpuinterop_host.backend import HostBackend
from gpuinterop_host.formats import swiftshader
from gpuinterop_host.semaphores import BinarySemaphore

LIMIT = 30.0


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)


def _import(backend: HostBackend, handle: OpaqueFd | TimelineFd) -> Any:
    handle.trusted = True
    semaphore = backend.import_semaphore(backend.open_device(0), handle)
    handle.detach()
    return semaphore


def answer(handle: OpaqueFd | TimelineFd, back: OpaqueFd | TimelineFd, rounds: int) -> None:
    """Wait for 1, 2, ... on the one and signal the same on the other."""
    backend = HostBackend()
    first, second = _import(backend, handle), _import(backend, back)
    for value in range(1, rounds + 1):
        assert backend.host_wait(first, value, LIMIT)
        backend.host_signal(second, value)
    backend.destroy_semaphore(first)
    backend.destroy_semaphore(second)


def die_in_lock(handle: OpaqueFd | TimelineFd, value: int | None) -> None:
    """Be killed while holding the semaphore's lock, after storing `value` if there is one."""
    semaphore = _import(HostBackend(), handle)

    def die() -> None:
        if value is not None:
            semaphore._page._value.value = value
        os.kill(os.getpid(), signal.SIGKILL)

    if isinstance(semaphore, BinarySemaphore):
        semaphore._page.mutex.run(die, LIMIT)
    fcntl.flock(os.open(f"/proc/self/fd/{semaphore.fd}", os.O_RDWR), fcntl.LOCK_EX)
    die()


def sleep_on_condition(handle: OpaqueFd, ready: TimelineFd) -> None:
    """Wait as SwiftShader does, in libc's own functions and for ever; to be killed in it."""
    backend = HostBackend()
    semaphore = _import(backend, handle)
    asleep = _import(backend, ready)
    mutex = semaphore._address
    condition = mutex + swiftshader.MUTEX_SIZE
    libc = ctypes.CDLL(None)
    assert libc.pthread_mutex_lock(ctypes.c_void_p(mutex)) == 0
    # Who takes the mutex after this signal finds this process asleep: the wait gives the mutex back.
    backend.host_signal(asleep, 1)
    libc.pthread_cond_wait(ctypes.c_void_p(condition), ctypes.c_void_p(mutex))


def vulkan_answer(memory: FdHandle, size: int, begin: OpaqueFd, end: OpaqueFd, rounds: int) -> None:
    """SwiftShader, in a process of its own: wait, copy the first half to the second, signal."""
    from .software_vulkan import Driver

    driver = Driver("SwiftShader")
    buffer, _ = driver.buffer(size)
    allocation = driver.adopt(buffer, size, memory.detach())
    first, second = driver.import_semaphore(begin.detach()), driver.import_semaphore(end.detach())
    commands = driver.record_copy(buffer, 0, size // 2, size // 2)
    for _ in range(rounds):
        driver.submit(commands, wait=first, signal=second)
        driver.idle()
    driver.destroy(first)
    driver.destroy(second)
    driver.free(buffer, allocation)
    driver.close()
