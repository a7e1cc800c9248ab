"""External semaphores, and batches whose parameters are made once.

A call by the bindings builds its arguments anew. Here ctypes calls the driver with arguments that were made before: a
new struct for each call costs as much as the call (measured for cuda-bindings: 1.4 us against 0.43 us). A batch keeps a
pool of slots, which are arrays of structs: a call pops a slot or makes one, and appends it afterwards. Both steps are
atomic, so two threads never write into the same array.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Final

from gpuinterop.handles import AnySemaphoreHandle, Keyed, SciSync

from . import descriptors
from .driver import Made, Room
from .streams import Stream

_FOREVER: Final = 0xFFFFFFFF  # INFINITE, in milliseconds


class Params(ctypes.Structure):
    """``CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS``; a signal's has no timeout."""

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
"""The place of a kind's value; that of timelines, fences and, ignored, of binary semaphores comes first."""


class NodeParams(ctypes.Structure):
    """``CUDA_EXT_SEM_SIGNAL_NODE_PARAMS``, and the same for waits. In the driver's answer the node owns the arrays."""

    _fields_ = (
        ("semaphores", ctypes.POINTER(ctypes.c_size_t)),
        ("params", ctypes.c_size_t),
        ("count", ctypes.c_uint),
    )


class Slot:
    """The parameters of a call for a batch.

    Attributes
    ----------
    params : byref of the structs
        What the driver takes.
    first : ctypes.c_uint64
        The place of the first value.
    structs : array of Params
    node : byref of NodeParams
        The same for a node of a graph.
    """

    __slots__ = ("first", "node", "params", "structs")

    def __init__(self, semaphores: Any, place: int) -> None:
        count = len(semaphores)
        self.structs = (Params * count)()
        self.first = ctypes.c_uint64.from_buffer(self.structs, place)
        self.params = ctypes.byref(self.structs)
        handles = ctypes.cast(semaphores, ctypes.POINTER(ctypes.c_size_t))
        self.node = ctypes.byref(NodeParams(handles, ctypes.addressof(self.structs), count))


class ImportedSemaphore(Made):
    """An imported semaphore."""

    back = "cuDestroyExternalSemaphore"
    blocks = True

    def __init__(self, context: Any, kind: type) -> None:
        super().__init__(context)
        self.kind = kind


class Batch:
    """Semaphores that one call signals or waits for.

    Attributes
    ----------
    handles : byref of an array
        What the driver takes.
    signals, waits : list of Slot
        Parameters that no call uses.
    layout : struct.Struct or None
        Writes all values into the structs of a slot; None if there is only one.
    """

    __slots__ = ("_array", "_place", "count", "handles", "keyed", "layout", "signals", "waits")

    def __init__(self, semaphores: Sequence[ImportedSemaphore]) -> None:
        self.count = len(semaphores)
        self._array = (ctypes.c_void_p * self.count)(*(int(semaphore.handle) for semaphore in semaphores))
        self.handles = ctypes.byref(self._array)
        places = [_PLACES.get(semaphore.kind, 0) for semaphore in semaphores]
        self._place = places[0]
        self.layout = None
        if self.count > 1:
            self.layout = Struct("=" + "".join(f"{place}xQ{_BYTES - 8 - place}x" for place in places))
        self.keyed = [index for index, semaphore in enumerate(semaphores) if semaphore.kind is Keyed]
        """Keyed mutexes among them, whose waits take a timeout."""
        self.signals: list[Slot] = []
        self.waits: list[Slot] = []

    def slot(self) -> Slot:
        """Make a slot."""
        return Slot(self._array, self._place)


class Semaphores(Room):
    """External semaphores. `signal` and `wait` are the hot path: they bind the functions that they need once."""

    def __init__(self) -> None:
        super().__init__()
        self._signal: Callable[..., int] = self._driver.entry("cuSignalExternalSemaphoresAsync")
        self._wait: Callable[..., int] = self._driver.entry("cuWaitExternalSemaphoresAsync")

    def import_semaphore(self, device: Any, handle: AnySemaphoreHandle) -> ImportedSemaphore:
        """``cuImportExternalSemaphore``."""
        desc, _keep = descriptors.semaphore(self._driver.api, handle)
        return ImportedSemaphore(device, handle.kind).create("cuImportExternalSemaphore", desc)

    prepare = staticmethod(Batch)

    def signal(self, batch: Batch, stream: Stream, values: Sequence[int]) -> None:
        """``cuSignalExternalSemaphoresAsync``."""
        pool = batch.signals
        try:
            slot = pool.pop()
        except IndexError:
            slot = batch.slot()
        if batch.layout is None:
            (slot.first.value,) = values
        else:
            batch.layout.pack_into(slot.structs, 0, *values)
        if stream.relative:
            code = stream.run(self._signal, batch.handles, slot.params, batch.count, stream.argument)
        else:
            code = self._signal(batch.handles, slot.params, batch.count, stream.argument)
        pool.append(slot)
        if code:
            raise self._driver.error("cuSignalExternalSemaphoresAsync", code)

    def wait(self, batch: Batch, stream: Stream, values: Sequence[int], timeout_ms: int | None) -> None:
        """``cuWaitExternalSemaphoresAsync``."""
        pool = batch.waits
        try:
            slot = pool.pop()
        except IndexError:
            slot = batch.slot()
        if batch.layout is None:
            (slot.first.value,) = values
        else:
            batch.layout.pack_into(slot.structs, 0, *values)
        if batch.keyed:
            for index in batch.keyed:
                slot.structs[index].timeout_ms = _FOREVER if timeout_ms is None else timeout_ms
        if stream.relative:
            code = stream.run(self._wait, batch.handles, slot.params, batch.count, stream.argument)
        else:
            code = self._wait(batch.handles, slot.params, batch.count, stream.argument)
        pool.append(slot)
        if code:
            raise self._driver.error("cuWaitExternalSemaphoresAsync", code)
