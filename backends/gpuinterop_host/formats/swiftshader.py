"""Layout of SwiftShader's memory and binary semaphores, exported as OPAQUE_FD on Linux.

Memory is a memfd named ``SwiftShader.Memory.<n>``. The data begins at 0; the size is the allocation's plus 15 bytes.

A binary semaphore is a memfd of one page named ``SwiftShader.Semaphore.<n>`` (``VkSemaphoreExternalLinux.hpp``):

=================  ==========================================================================================
offset             content
=================  ==========================================================================================
0                  ``pthread_mutex_t``, process-shared, not robust (40 bytes on x86-64, 48 on aarch64)
40 (48)            ``pthread_cond_t``, process-shared, CLOCK_REALTIME (48 bytes)
88 (96)            int ref_count: number of objects in all processes that have the page mapped
92 (100)           bool signaled
=================  ==========================================================================================

SwiftShader creates both without MFD_ALLOW_SEALING, so they cannot be sealed: see :mod:`..memory` for the consequences.

The object that brings ref_count to 0 destroys the mutex and the condition. glibc then gives the mutex the kind -1. If a
descriptor was still on its way to another process then, that process would import an unusable semaphore. So a semaphore
created here counts one more reference, for such descriptors. It is never returned, because the memory is freed with its
last mapping anyway.

**Why this module does not call libc's mutex functions.** They depend on the mutex's kind, which every process can
change at any moment. For some kinds they follow list pointers, so a lock would write to any address that another
process chooses. A mutex of kind 0x80 is one word, which this module locks itself: 0 is free, 1 is held, more is held
with waiters. The condition has no pointers; libc's broadcast on it can block forever, but cannot write elsewhere.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from gpuinterop import system

T = TypeVar("T")

MEMORY_NAME: Final = "SwiftShader.Memory."
SEMAPHORE_NAME: Final = "SwiftShader.Semaphore."

_MUTEX_SIZES: Final = {"x86_64": 40, "aarch64": 48}
MUTEX_SIZE: Final = _MUTEX_SIZES.get(platform.machine(), 0)
_COND_SIZE: Final = 48
_OWNER, _KIND = 8, 16  # offsets in the mutex: i32, the holder's thread id; i32
REFERENCES: Final = MUTEX_SIZE + _COND_SIZE
SIGNALED: Final = REFERENCES + 4

_SHARED: Final = 0x80  # glibc's __kind of a plain PTHREAD_PROCESS_SHARED mutex
_PROCESS_SHARED: Final = 1
_DESTROYED: Final = -1

_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def _fetch_and_add() -> Any:
    """An atomic ``old = *word; *word += n``. Python lacks it; NumPy needs the C++ library, which exports one."""
    try:
        function = ctypes.CDLL("libstdc++.so.6")._ZN9__gnu_cxx18__exchange_and_addEPVii
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_int)
    return function


_add: Final = _fetch_and_add()


def gap() -> str | None:
    """Why this machine cannot use the layout; None if it can."""
    if system.SYS_FUTEX is None or not MUTEX_SIZE or platform.libc_ver()[0] != "glibc":
        return "the layout is known for glibc on x86-64 and aarch64 Linux; this is another machine or C library."
    if _add is None:
        return "its lock needs an atomic operation of libstdc++.so.6, which is not installed."
    return None


class Mutex:
    """The word of the page's mutex. It is only locked with a time limit."""

    def __init__(self, address: int) -> None:
        self._address = address
        self._word = ctypes.c_uint32.from_address(address)
        self._owner = ctypes.c_int32.from_address(address + _OWNER)
        self._wake = system.futex_waker(address)

    @property
    def held(self) -> bool:
        """Whether a thread holds the mutex now."""
        return self._word.value != 0

    @property
    def owner(self) -> int:
        """The holder's thread id in its own process; 0 if it is free."""
        return self._owner.value

    def run(self, action: Callable[[], T], limit: float) -> T:
        """Call `action` (it must be short) with the lock held. `TimeoutError` after `limit` seconds; 0 tries once."""
        previous: list[int] = []

        def take() -> bool:
            if self.held:
                return False
            # C code stores the result, so no interrupt can come between the call and the store. If another thread was
            # faster, this has only increased a word that was not 0, so the holder wakes a waiter.
            previous.extend(map(_add, (self._address,), (1,)))
            return previous[-1] == 0

        try:
            if not system.until(take, limit):
                raise TimeoutError
            self._owner.value = threading.get_native_id()  # for processes that wait for it
            return action()
        finally:
            if 0 in previous:  # an interrupt in one step must not skip the later ones
                try:
                    self._owner.value = 0
                    system.fence()
                finally:
                    try:
                        self._word.value = 0
                    finally:
                        self._wake()  # libc's waiters have set the word to 2 and sleep; they check it again


class Page:
    """The fields of a semaphore's page. Access `references`, and change `signaled`, only with the lock held."""

    def __init__(self, address: int) -> None:
        self.mutex = Mutex(address)
        self._address = address
        self._cond = address + MUTEX_SIZE
        self.references = ctypes.c_int32.from_address(address + REFERENCES)
        self.signaled = ctypes.c_uint8.from_address(address + SIGNALED)

    @property
    def slept_on(self) -> bool:
        """Whether a thread has ever waited on the condition. With the lock held, later waiters see `signaled`."""
        return ctypes.string_at(self._cond, _COND_SIZE) != _INITIAL_COND

    def broadcast(self) -> None:
        """``pthread_cond_broadcast``, which blocks forever if a process was killed in its wait (glibc < 2.41)."""
        _libc.pthread_cond_broadcast(ctypes.c_void_p(self._cond))


def problem(page: bytes) -> str | None:
    """Why a page is not a usable semaphore of SwiftShader; None if it is one."""
    (kind,) = struct.unpack_from("i", page, _KIND)
    if kind == _DESTROYED:
        return "its last user has destroyed it"
    if kind != _SHARED:
        return f"it does not begin with a process-shared mutex (kind {kind:#x})"
    return None


def initialise(address: int) -> None:
    """Turn a zeroed page into an unsignaled semaphore. It has one reference for its creator and one for descriptors."""
    ctypes.c_int32.from_address(address + _KIND).value = _SHARED  # all other fields of a free mutex are 0
    ctypes.memmove(address + MUTEX_SIZE, _INITIAL_COND, _COND_SIZE)
    Page(address).references.value = 2


def _initial_cond() -> bytes:
    """The bytes that ``pthread_cond_init`` with PTHREAD_PROCESS_SHARED writes."""
    attributes, cond = ctypes.create_string_buffer(64), ctypes.create_string_buffer(_COND_SIZE)
    _libc.pthread_condattr_init(attributes)
    _libc.pthread_condattr_setpshared(attributes, _PROCESS_SHARED)
    _libc.pthread_cond_init(cond, attributes)
    _libc.pthread_condattr_destroy(attributes)
    return cond.raw


_INITIAL_COND: Final = _initial_cond() if gap() is None else b""
