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
"""

from __future__ import annotations

import ctypes
import struct
from typing import Final

from gpuinterop import system

MEMORY_NAME: Final = "SwiftShader.Memory."
SEMAPHORE_NAME: Final = "SwiftShader.Semaphore."


class Page:
    """A semaphore's page by fields. Only touch `ref_count`, and clear or set `signaled`, with the lock held."""

    def __init__(self, address: int) -> None:
        assert system.LAYOUT is not None
        size = system.LAYOUT.mutex_size
        self.mutex = system.SharedMutex(address)
        self.cond = address + size
        self._references = ctypes.c_int32.from_address(address + size + system.LAYOUT.cond_size)
        self._signaled = ctypes.c_uint8.from_address(address + size + system.LAYOUT.cond_size + 4)

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


def problem(page: bytes) -> str | None:
    """Why a page is no live semaphore of SwiftShader's, or None."""
    assert system.LAYOUT is not None
    (kind,) = struct.unpack_from("i", page, system.LAYOUT.kind)
    if kind == -1:
        return "its last user has destroyed it"
    if kind != system.KIND_SHARED:
        return f"it does not begin with a process-shared mutex (kind {kind:#x})"
    references, signaled = struct.unpack_from("iB", page, system.LAYOUT.mutex_size + system.LAYOUT.cond_size)
    if signaled > 1 or not 0 <= references < 1 << 24:
        return f"signaled is {signaled} and ref_count {references}"
    return None


def initialise(address: int) -> None:
    """Make an unsignaled semaphore of a zeroed page: one reference for the maker, one for descriptors under way."""
    page = Page(address)
    system.init_mutex(address, robust=False)
    system.init_cond(page.cond)
    page.ref_count = 2
