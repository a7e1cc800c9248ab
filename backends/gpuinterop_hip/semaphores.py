"""External semaphores, and batches that reuse their parameters. On Windows only.

On Linux the import aborts the process or fails, and signal and wait return success and do nothing. So the capability
table refuses them all, and this module is not called there.

The parameters of a call are an array of structs, which both versions of the bindings accept as an address; 10 would
accept lists too. Making an array costs more than the call, so a batch keeps a pool: a call pops an array or makes one,
and appends it afterwards. Both steps are atomic, so two threads never write into the same array.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from gpuinterop.errors import InvalidArgumentError, UnsupportedError
from gpuinterop.handles import AnySemaphoreHandle, Win32Handle

from . import descriptors
from .capabilities import nameless
from .driver import Gpu, Made, Room
from .streams import Stream


class _Params(ctypes.Structure):
    """``hipExternalSemaphoreSignalParams`` and ``...WaitParams``, of which HIP reads only the fence's value."""

    _fields_ = (
        ("value", ctypes.c_uint64),
        ("rest", ctypes.c_uint8 * 64),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 16),
    )


PARAMS_BYTES: Final = 144
assert ctypes.sizeof(_Params) == PARAMS_BYTES


class ImportedSemaphore(Made):
    """An imported semaphore."""

    back = "hipDestroyExternalSemaphore"
    blocks = True


class Batch:
    """Semaphores that one call signals or waits for."""

    __slots__ = ("_array", "count", "handles", "signals", "waits")

    def __init__(self, semaphores: Sequence[ImportedSemaphore]) -> None:
        self.count = len(semaphores)
        self.handles = (ctypes.c_void_p * self.count)(*(semaphore.handle for semaphore in semaphores))
        self.signals: list[Any] = []
        self.waits: list[Any] = []
        self._array = _Params * self.count

    def take(self, pool: list[Any], values: Sequence[int]) -> Any:
        """An array with `values`; the caller appends it to `pool` after its call."""
        try:
            slot = pool.pop()
        except IndexError:
            slot = self._array()
        for target, value in zip(slot, values):  # noqa: B905 - the core has counted them
            target.value = value
        return slot


class Semaphores(Room):
    """External semaphores. `signal` and `wait` are the hot path: they bind the functions that they need once."""

    def __init__(self) -> None:
        super().__init__()
        self._signal = self._driver.api.hipSignalExternalSemaphoresAsync
        self._wait = self._driver.api.hipWaitExternalSemaphoresAsync

    def import_semaphore(self, device: Gpu, handle: AnySemaphoreHandle) -> ImportedSemaphore:
        """``hipImportExternalSemaphore``."""
        if isinstance(handle, Win32Handle) and handle.name is not None:
            raise UnsupportedError(nameless(type(handle)), context="hip")
        desc = descriptors.semaphore(self._driver.api, handle)
        return ImportedSemaphore(device).create("hipImportExternalSemaphore", desc)

    prepare = staticmethod(Batch)

    def signal(self, batch: Batch, stream: Stream, values: Sequence[int]) -> None:
        """``hipSignalExternalSemaphoresAsync``."""
        self._call("hipSignalExternalSemaphoresAsync", self._signal, batch.signals, batch, stream, values)

    def wait(self, batch: Batch, stream: Stream, values: Sequence[int], timeout_ms: int | None) -> None:
        """``hipWaitExternalSemaphoresAsync``, which has no timeouts."""
        self._call("hipWaitExternalSemaphoresAsync", self._wait, batch.waits, batch, stream, values)

    def _call(
        self, name: str, function: Any, pool: list[Any], batch: Batch, stream: Stream, values: Sequence[int]
    ) -> None:
        if self.is_capturing(stream):  # HIP would not record the call, but run it at once (hip_stream_ops.cpp)
            raise InvalidArgumentError(
                "stream",
                "expected one that is not being captured, got one that is; HIP's graphs hold no semaphores: signal and "
                "wait before and after their launches.",
            )
        slot = batch.take(pool, values)
        try:
            (code,) = stream.run(function, batch.handles, ctypes.addressof(slot), batch.count, stream.handle)
        except ValueError as error:
            (code,) = self._driver.unnamed(error)
        pool.append(slot)
        if code:
            raise self._driver.error(name, code)
