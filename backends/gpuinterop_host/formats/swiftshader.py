"""Layout of SwiftShader's memory and binary semaphores, exported as OPAQUE_FD on Linux.

Memory is a memfd named ``SwiftShader.Memory.<n>``: the data lies at 0, and the size is the allocation's plus 15 bytes.

A binary semaphore is a memfd of one page named ``SwiftShader.Semaphore.<n>`` (``VkSemaphoreExternalLinux.hpp``):

=================  ==========================================================================================
offset             content
=================  ==========================================================================================
0                  ``pthread_mutex_t``, process-shared, not robust (40 bytes on x86-64, 48 on aarch64)
40 (48)            ``pthread_cond_t``, process-shared, CLOCK_REALTIME (48 bytes)
88 (96)            int ref_count: number of objects, in all processes, that have the page mapped
92 (100)           bool signaled
=================  ==========================================================================================

SwiftShader makes both without MFD_ALLOW_SEALING, so they cannot be sealed: see :mod:`..memory` for the consequences.

The object that brings ref_count to 0 destroys mutex and condition. glibc then marks the mutex as kind -1, and a process
that imports a descriptor that was still in flight finds a dead semaphore. So a semaphore made here counts one more
reference, for descriptors in flight. It is never given back: the memory goes with its last mapping anyway.

**Why libc's mutex functions are not called on it.** They follow the mutex's kind, which every peer can change at any
moment, and for some kinds its list pointers: a lock then writes to any address that the peer chooses. A mutex of kind
0x80 is one word, which this module locks itself: 0 free, 1 held, more: held with waiters. The condition has no
pointers; libc's broadcast on it can block for ever, but cannot write elsewhere.
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

_SHARED: Final = 0x80
"""glibc's ``__kind`` of a plain PTHREAD_PROCESS_SHARED mutex."""
_PROCESS_SHARED: Final = 1
_DESTROYED: Final = -1

_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def _fetch_and_add() -> Any:
    """An atomic ``old = *word; *word += n``, which Python lacks; the C++ library, which NumPy needs, exports one."""
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
        return "its lock is taken with an atomic operation of libstdc++.so.6, which is not installed."
    return None


class Mutex:
    """The word of the page's mutex; only ever locked with a time limit."""

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
        """Call `action` while holding the lock.

        Parameters
        ----------
        action : callable
            Must be short: other processes wait.
        limit : float
            Seconds to try; 0 tries once.

        Raises
        ------
        TimeoutError
            Another thread or process held the lock all the time.
        """
        before: list[int] = []

        def take() -> bool:
            if self.held:
                return False
            # C code stores it: an interrupt cannot come between the call and the store. A late attempt has added to a
            # word that was not 0, which only makes the holder wake a waiter.
            before.extend(map(_add, (self._address,), (1,)))
            return before[-1] == 0

        try:
            if not system.until(take, limit):
                raise TimeoutError
            self._owner.value = threading.get_native_id()  # for processes that find it held
            return action()
        finally:
            if 0 in before:  # an interrupted step does not skip the later ones
                try:
                    self._owner.value = 0
                    system.fence()
                finally:
                    try:
                        self._word.value = 0
                    finally:
                        self._wake()  # libc's waiters have set the word to 2 and sleep; they check it again


class Page:
    """The fields of a semaphore's page. Access `references`, and clear or set `signaled`, only with the lock held."""

    def __init__(self, address: int) -> None:
        self.mutex = Mutex(address)
        self._address = address
        self._cond = address + MUTEX_SIZE
        self.references = ctypes.c_int32.from_address(address + REFERENCES)
        self.signaled = ctypes.c_uint8.from_address(address + SIGNALED)

    @property
    def slept_on(self) -> bool:
        """Whether a thread has ever waited on the condition. With the lock held, later ones will see `signaled`."""
        return ctypes.string_at(self._cond, _COND_SIZE) != _FRESH_COND

    def broadcast(self) -> None:
        """Call ``pthread_cond_broadcast``, which blocks for ever if a process was killed in its wait (glibc < 2.41)."""
        _libc.pthread_cond_broadcast(ctypes.c_void_p(self._cond))


def problem(page: bytes) -> str | None:
    """Why a page is not a live semaphore of SwiftShader; None if it is."""
    (kind,) = struct.unpack_from("i", page, _KIND)
    if kind == _DESTROYED:
        return "its last user has destroyed it"
    if kind != _SHARED:
        return f"it does not begin with a process-shared mutex (kind {kind:#x})"
    return None


def initialise(address: int) -> None:
    """Make an unsignaled semaphore of a zeroed page: one reference for the maker, one for descriptors in flight."""
    ctypes.c_int32.from_address(address + _KIND).value = _SHARED  # all other fields of a free mutex are 0
    ctypes.memmove(address + MUTEX_SIZE, _FRESH_COND, _COND_SIZE)
    Page(address).references.value = 2


def _fresh_cond() -> bytes:
    """The bytes that ``pthread_cond_init`` with PTHREAD_PROCESS_SHARED writes."""
    attributes, cond = ctypes.create_string_buffer(64), ctypes.create_string_buffer(_COND_SIZE)
    _libc.pthread_condattr_init(attributes)
    _libc.pthread_condattr_setpshared(attributes, _PROCESS_SHARED)
    _libc.pthread_cond_init(cond, attributes)
    _libc.pthread_condattr_destroy(attributes)
    return cond.raw


_FRESH_COND: Final = _fresh_cond() if gap() is None else b""
