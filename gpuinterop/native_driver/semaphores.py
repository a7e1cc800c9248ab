"""External semaphores, and batches that reuse their parameters.

Creating a struct for each call would cost as much as the call (measured). A batch keeps a pool of slots, which are
arrays of structs. A call pops a slot or creates one, and appends it afterwards. Both steps are atomic, so two threads
never write to the same array.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

from ..handles import AnySemaphoreHandle, Keyed, SciSync
from . import descriptors
from .driver import NativeBackend, NativeDevice, NativeObject
from .streams import NativeStream

_FOREVER: Final = 0xFFFFFFFF  # INFINITE, in milliseconds
_CALLS: Final = ("SignalExternalSemaphoresAsync", "WaitExternalSemaphoresAsync")


class Params(ctypes.Structure):
    """``CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS``, ``hipExternalSemaphoreWaitParams``. A signal has no timeout."""

    _fields_ = (
        ("value", ctypes.c_uint64),
        ("fence", ctypes.c_void_p),
        ("key", ctypes.c_uint64),
        ("timeout_ms", ctypes.c_uint32),
        ("rest", ctypes.c_uint32 * 29),
    )


_BYTES: Final = ctypes.sizeof(Params)
assert _BYTES == 144
_PLACES: Final[dict[type, int]] = {SciSync: Params.fence.offset, Keyed: Params.key.offset}
"""Offset of a kind's value. Other kinds have it first; binary semaphores ignore it."""


class ImportedSemaphore(NativeObject):
    """An imported semaphore."""

    release_call = "DestroyExternalSemaphore"
    blocks = True

    def __init__(self, device: NativeDevice, kind: type) -> None:
        super().__init__(device)
        self.kind = kind


class Batch:
    """Semaphores that one call signals or waits for."""

    __slots__ = ("_place", "count", "handles", "keyed", "layout", "pools", "semaphores")

    def __init__(self, semaphores: Sequence[ImportedSemaphore]) -> None:
        self.count = len(semaphores)
        self.semaphores = (ctypes.c_void_p * self.count)(*(semaphore.handle for semaphore in semaphores))
        self.handles = ctypes.byref(self.semaphores)  # the argument for the driver
        places = [_PLACES.get(semaphore.kind, 0) for semaphore in semaphores]
        self._place = places[0]
        self.layout = None  # writes all values into the structs of a slot, if there are several
        if self.count > 1:
            self.layout = Struct("=" + "".join(f"{place}xQ{_BYTES - 8 - place}x" for place in places))
        self.keyed = [index for index, semaphore in enumerate(semaphores) if semaphore.kind is Keyed]
        self.pools: tuple[list[Any], list[Any]] = ([], [])  # slots that no signal and no wait uses now

    def slot(self) -> Any:
        """Create the parameters of a call: the structs, the place of the first value, and the driver's argument."""
        structs = (Params * self.count)()
        return structs, ctypes.c_uint64.from_buffer(structs, self._place), ctypes.byref(structs)


def _caller(index: int) -> Any:
    """Return `signal` or `wait`. They are the hot path: the index selects the function and the pool."""

    def enqueue(
        self: Any, batch: Batch, stream: NativeStream, values: Sequence[int], timeout_ms: int | None = None
    ) -> None:
        pool = batch.pools[index]
        try:
            slot = pool.pop()
        except IndexError:
            slot = batch.slot()
        structs, first, params = slot
        if batch.layout is None:
            (first.value,) = values
        else:
            batch.layout.pack_into(structs, 0, *values)
        if index and batch.keyed:  # only waits have a timeout
            for position in batch.keyed:
                structs[position].timeout_ms = _FOREVER if timeout_ms is None else timeout_ms
        call = self._enqueue[index]
        if stream.relative:
            code = stream.run(call, batch.handles, params, batch.count, stream.argument)
        else:
            code = call(batch.handles, params, batch.count, stream.argument)
        pool.append(slot)
        if code:
            raise self._driver.error(_CALLS[index], code)

    return enqueue


class NativeSemaphores(NativeBackend):
    """External semaphores."""

    def __init__(self) -> None:
        super().__init__()
        self._enqueue = tuple(map(self._driver.function, _CALLS))

    def import_semaphore(self, device: NativeDevice, handle: AnySemaphoreHandle) -> ImportedSemaphore:
        """``cuImportExternalSemaphore``, ``hipImportExternalSemaphore``."""
        descriptor, _name = descriptors.semaphore(self._driver.table, handle)
        return ImportedSemaphore(device, handle.kind).create("ImportExternalSemaphore", descriptor)

    prepare: Any = staticmethod(Batch)

    signal: Any = _caller(0)
    """``cuSignalExternalSemaphoresAsync``, ``hipSignalExternalSemaphoresAsync``."""
    wait: Any = _caller(1)
    """``cuWaitExternalSemaphoresAsync``, ``hipWaitExternalSemaphoresAsync``."""
