"""AMD's own HIP runtime on our stand-in for the HSA runtime below it (``hsa/``), and the stand-in's control.

What a process has from its start, by ``GPUINTEROP_STANDIN_...``: ``DEVICES``, how many; ``GFX``, of what kind
(``gfx1030``); ``LARGE_BAR``: the host sees device memory; ``NO_PEERS``: devices do not see each other's;
``LOG``: every call is printed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Iterator
from typing import Final

import gpuinterop as gi
from tests.limits import LIMIT
from tests.spare_pages import unpin_spare_pages

_SONAME: Final = "libhsa-runtime64.so.1"

_KEPT: Final = ("interop_mapping", "ipc_mapping", "mapping", "registration")
"""Objects that no test may leave behind. Of handles AMD's runtime keeps those that were imported (clr #193), of queues
and allocations some for its own later use; the backend keeps reservations."""


class StandIn:
    """The stand-in that this process has loaded, below AMD's runtime."""

    def __init__(self) -> None:
        library = ctypes.CDLL(_SONAME)
        self._fail = library.gpuinterop_stand_in_fail
        self._fail.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int)
        self._clear = library.gpuinterop_stand_in_clear
        self._live = library.gpuinterop_stand_in_live
        self._live.restype, self._live.argtypes = ctypes.c_int64, (ctypes.c_char_p,)

    def fail(self, call: str, *, nth: int = 1, status: int = 0x1008) -> None:
        """Let the `nth` call from now on fail with `status`: by default, out of resources.

        ``hsa_amd_memory_pool_allocate``, ``hsa_amd_interop_map_buffer``, ``hsa_queue_create``,
        ``hsa_amd_memory_lock_to_pool``, ``hsa_amd_portable_export_dmabuf``, or one of ``hsa_amd_ipc_...`` and
        ``hsa_amd_vmem_...``.
        """
        self._fail(call.encode(), nth, status)

    def clear_faults(self) -> int:
        """Take away all faults; returns how many had not struck."""
        return int(self._clear())

    def live(self, kind: str) -> int:
        """How many there are of ``allocation``, ``registration``, ``interop_mapping``, ``ipc_mapping``,
        ``reservation``, ``handle``, ``mapping`` (of a handle) or ``queue``."""
        count = int(self._live(kind.encode()))
        if count < 0:
            raise ValueError(f"expected a kind of object that the stand-in counts, got {kind!r}.")
        return count

    @contextlib.contextmanager
    def kept_rules(self) -> Iterator[None]:
        """Round a test: no fault outlives it, and nothing is left over."""
        before = {kind: self.live(kind) for kind in _KEPT}
        yield
        self.clear_faults()
        gc.collect()
        # AMD's runtime gives back what a command has used when it retires the command, which a later call finds out.
        limit = time.monotonic() + LIMIT
        while (after := self._settled()) != before and time.monotonic() < limit:
            time.sleep(0.001)
        assert after == before, f"expected {before}, got {after}"

    def _settled(self) -> dict[str, int]:
        for device in gi.get_backend("hip").devices():
            device.synchronize()
            device.drain()
            unpin_spare_pages(device)
        return {kind: self.live(kind) for kind in _KEPT}
