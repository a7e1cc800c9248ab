"""SwiftShader's memory and binary semaphores, as its OPAQUE_FD hands them out on Linux.

Memory is a memfd named ``SwiftShader.Memory.<n>``: the data lies at 0, and the size is the allocation's plus 15 bytes.

A binary semaphore is a memfd of one page named ``SwiftShader.Semaphore.<n>`` (``VkSemaphoreExternalLinux.hpp``):

=================  ==========================================================================================
offset             content
=================  ==========================================================================================
0                  ``pthread_mutex_t``, process-shared, not robust (40 bytes on x86-64, 48 on aarch64)
40 (48)            ``pthread_cond_t``, process-shared, CLOCK_REALTIME (48 bytes)
88 (96)            int ref_count: how many objects, in all processes, have the page mapped
92 (100)           bool signaled
=================  ==========================================================================================

SwiftShader makes both without MFD_ALLOW_SEALING, so nobody can seal them: see :mod:`..memory` for what follows.

The object that brings ref_count to 0 destroys mutex and condition: glibc then marks the mutex as kind -1, and who
imports a descriptor that was still under way finds a dead semaphore. A semaphore made here therefore counts one
reference more, for the descriptors under way, which nobody gives back: the memory goes with its last mapping anyway.

**Why libc's mutex functions are not called on it.** They follow the mutex's kind, which every peer can change at any
moment, and in some kinds its list pointers: then a lock writes wherever the peer says. What a mutex of kind 0x80 is, is
one word, and that is locked here: 0 free, 1 held, more: held, and waked for. The condition has no pointers; libc's
broadcast on it can block for ever, though, and write nothing else.
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
_OWNER, _KIND = 8, 16  # in the mutex: i32, the holder's thread id; i32
REFERENCES: Final = MUTEX_SIZE + _COND_SIZE
SIGNALED: Final = REFERENCES + 4

_SHARED: Final = 0x80
"""glibc's ``__kind`` of a plain PTHREAD_PROCESS_SHARED mutex."""
_PROCESS_SHARED: Final = 1
_DESTROYED: Final = -1

_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def _fetch_and_add() -> Any:
    """An atomic ``old = *word; *word += n``: Python has none; the C++ library, on which NumPy stands, exports one."""
    try:
        function = ctypes.CDLL("libstdc++.so.6")._ZN9__gnu_cxx18__exchange_and_addEPVii
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_int)
    return function


_add: Final = _fetch_and_add()


def gap() -> str | None:
    """Why this machine cannot use the layout, or None."""
    if system.SYS_FUTEX is None or not MUTEX_SIZE or system.libc_version()[0] != "glibc":
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
        """Whether anybody holds it just now; a glance, not a lock."""
        return self._word.value != 0

    @property
    def owner(self) -> int:
        """The thread id of the holder, as its own process sees it; 0 when it is free."""
        return self._owner.value

    def run(self, action: Callable[[], T], limit: float) -> T:
        """Call `action` while holding the lock.

        Parameters
        ----------
        action : callable
            Short: other processes wait.
        limit : float
            In seconds; 0 tries once.

        Raises
        ------
        TimeoutError
            Somebody else held the lock all the time.
        """
        before: list[int] = []

        def take() -> bool:
            if self.held:
                return False
            # Stored by C: no interrupt comes between the call and the store. One that came too late has added to a
            # word that was not 0, which only makes the holder wake somebody.
            before.extend(map(_add, (self._address,), (1,)))
            return before[-1] == 0

        try:
            if not system.until(take, limit):
                raise TimeoutError
            self._owner.value = threading.get_native_id()  # for those who find it held
            return action()
        finally:
            if 0 in before:  # whatever interrupts one step, those after it are done
                try:
                    self._owner.value = 0
                    system.fence()
                finally:
                    try:
                        self._word.value = 0
                    finally:
                        self._wake()  # libc's waiters set the word to 2 and sleep; they look again


class Page:
    """A semaphore's page by fields. Only touch `ref_count`, and clear or set `signaled`, with the lock held."""

    def __init__(self, address: int) -> None:
        self.mutex = Mutex(address)
        self._address = address
        self._cond = address + MUTEX_SIZE
        self._kind = ctypes.c_int32.from_address(address + _KIND)
        self._references = ctypes.c_int32.from_address(address + REFERENCES)
        self._signaled = ctypes.c_uint8.from_address(address + SIGNALED)

    @property
    def signaled(self) -> bool:
        return self._signaled.value != 0

    @signaled.setter
    def signaled(self, value: bool) -> None:
        self._signaled.value = value

    @property
    def ref_count(self) -> int:
        return self._references.value

    @ref_count.setter
    def ref_count(self, value: int) -> None:
        self._references.value = value

    @property
    def slept_on(self) -> bool:
        """Whether anybody has ever waited on the condition: with the lock held, who has not will see `signaled`."""
        return ctypes.string_at(self._cond, _COND_SIZE) != _FRESH_COND

    def broadcast(self) -> None:
        """``pthread_cond_broadcast``: for ever, where a process was killed in its wait (glibc before 2.41)."""
        _libc.pthread_cond_broadcast(ctypes.c_void_p(self._cond))

    def lock_problem(self) -> str | None:
        """Why the mutex must not be locked, or None."""
        return _lock_problem(self._kind.value)


def _lock_problem(kind: int) -> str | None:
    if kind == _DESTROYED:
        return "its last user has destroyed it"
    if kind != _SHARED:
        return f"it does not begin with a process-shared mutex (kind {kind:#x})"
    return None


def problem(page: bytes) -> str | None:
    """Why a page is no live semaphore of SwiftShader's, or None."""
    (kind,) = struct.unpack_from("i", page, _KIND)
    references, signaled = struct.unpack_from("iB", page, REFERENCES)
    if found := _lock_problem(kind):
        return found
    if signaled > 1 or not 0 <= references < 1 << 24:
        return f"signaled is {signaled} and ref_count {references}"
    return None


def initialise(address: int) -> None:
    """Make an unsignaled semaphore of a zeroed page: one reference for the maker, one for descriptors under way."""
    ctypes.c_int32.from_address(address + _KIND).value = _SHARED  # all else of a free mutex is 0
    ctypes.memmove(address + MUTEX_SIZE, _FRESH_COND, _COND_SIZE)
    Page(address).ref_count = 2


def _fresh_cond() -> bytes:
    """What ``pthread_cond_init`` with PTHREAD_PROCESS_SHARED writes."""
    attributes, cond = ctypes.create_string_buffer(64), ctypes.create_string_buffer(_COND_SIZE)
    _libc.pthread_condattr_init(attributes)
    _libc.pthread_condattr_setpshared(attributes, _PROCESS_SHARED)
    _libc.pthread_cond_init(cond, attributes)
    _libc.pthread_condattr_destroy(attributes)
    return cond.raw


_FRESH_COND: Final = _fresh_cond() if gap() is None else b""
