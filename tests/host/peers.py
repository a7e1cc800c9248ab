"""What other processes do in these tests: started by multiprocessing's spawn, given handles; and scripts by `run`."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from typing import Any

from gpuinterop.handles import OpaqueFd, TimelineFd
from gpuinterop_host.backend import HostBackend
from gpuinterop_host.formats import swiftshader
from gpuinterop_host.semaphores import BinarySemaphore
from tests.limits import LIMIT
from tests.programs import python


def run(code: str) -> subprocess.CompletedProcess[str]:
    return python("-W", "error", "-c", code, seconds=LIMIT, PYTHONPATH=os.pathsep.join(sys.path))


def _import(backend: HostBackend, handle: OpaqueFd | TimelineFd) -> Any:
    handle.trusted = True
    semaphore = backend.import_semaphore(backend.open_device(0), handle)
    handle.detach()
    return semaphore


def die_in_lock(handle: OpaqueFd | TimelineFd, value: int | None) -> None:
    """Be killed while holding the semaphore's lock, after storing `value` if there is one."""
    semaphore = _import(HostBackend(), handle)

    def die() -> None:
        if value is not None:
            semaphore._page.counter.value = value
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
