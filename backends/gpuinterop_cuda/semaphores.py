"""External semaphores, and batches that reuse their parameter structs.

A new struct for each call costs as much as the call (measured for cuda-bindings: 1.4 us against 0.43 us). So a batch
keeps a pool of slots, which are sets of structs: a call pops a slot or makes one, and appends it afterwards. Both steps
are atomic, so two threads never write into the same struct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from gpuinterop.handles import AnySemaphoreHandle, Keyed, SciSync

from . import descriptors
from .driver import UNNAMED, Context, Made, Room, unnamed
from .streams import Stream

_FOREVER: Final = 0xFFFFFFFF  # INFINITE, in milliseconds

# The structs of one call, as the driver takes them, and for each the field for its value.
Slot: TypeAlias = tuple[list[Any], list[Any]]
# The field for a kind's value: the struct in `params`, and its field.
_FENCE: Final = ("fence", "value")
_FIELDS: Final[dict[type, tuple[str, str]]] = {Keyed: ("keyedMutex", "key"), SciSync: ("nvSciSync", "fence")}


class ImportedSemaphore(Made):
    """An imported semaphore."""

    __slots__ = ("kind",)
    back = "cuDestroyExternalSemaphore"

    def __init__(self, context: Context, kind: type) -> None:
        super().__init__(context)
        self.kind = kind


class Slots:
    """The pool of a batch for one of the driver's calls."""

    __slots__ = ("_are_fences", "_fields", "_new", "spare")

    def __init__(self, new: Callable[[], Any], fields: Sequence[tuple[str, str]]) -> None:
        self.spare: list[Slot] = []
        self._new = new
        self._fields = fields
        # Timelines, fences and binary semaphores share a field; binary ones ignore its value, 0.
        self._are_fences = all(field is _FENCE for field in fields)

    def take(self, values: Sequence[int]) -> Slot:
        """A slot with `values`; the caller appends it to `spare` after its call."""
        try:
            slot = self.spare.pop()
        except IndexError:
            roots = [self._new() for _ in self._fields]
            # The views do not keep their struct alive on 12.9: the slot holds both.
            slot = roots, [getattr(root.params, arm) for (arm, _), root in zip(self._fields, roots, strict=True)]
        if self._are_fences:
            for target, value in zip(slot[1], values):  # noqa: B905 - the core has counted them
                target.value = value
        else:
            for (_, name), target, value in zip(self._fields, slot[1], values, strict=True):
                setattr(target, name, value)
        return slot


class Batch:
    """Semaphores that one call signals or waits for."""

    __slots__ = ("count", "handles", "keyed", "signals", "waits")

    def __init__(self, api: Any, semaphores: Sequence[ImportedSemaphore]) -> None:
        self.handles = [semaphore.handle for semaphore in semaphores]
        self.count = len(semaphores)
        self.keyed = [index for index, semaphore in enumerate(semaphores) if semaphore.kind is Keyed]
        """Keyed mutexes among them, whose waits take a timeout."""
        fields = [_FIELDS.get(semaphore.kind, _FENCE) for semaphore in semaphores]
        self.signals = Slots(api.CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, fields)
        self.waits = Slots(api.CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, fields)


class Semaphores(Room):
    """External semaphores. `signal` and `wait` are the hot path: they bind the functions that they need once."""

    def __init__(self) -> None:
        super().__init__()
        self._signal: Callable[..., tuple[Any]] = self._driver.api.cuSignalExternalSemaphoresAsync
        self._wait: Callable[..., tuple[Any]] = self._driver.api.cuWaitExternalSemaphoresAsync

    def import_semaphore(self, device: Context, handle: AnySemaphoreHandle) -> ImportedSemaphore:
        """``cuImportExternalSemaphore``."""
        desc, _keep = descriptors.semaphore(self._driver.api, handle)
        return ImportedSemaphore(device, handle.kind).create("cuImportExternalSemaphore", desc)

    def prepare(self, semaphores: Sequence[ImportedSemaphore]) -> Batch:
        return Batch(self._driver.api, semaphores)

    def signal(self, batch: Batch, stream: Stream, values: Sequence[int]) -> None:
        """``cuSignalExternalSemaphoresAsync``."""
        slots = batch.signals
        slot = slots.take(values)
        try:
            if stream.relative:
                (code,) = stream.run(self._signal, batch.handles, slot[0], batch.count, stream.handle)
            else:
                (code,) = self._signal(batch.handles, slot[0], batch.count, stream.handle)
        except UNNAMED as error:
            (code,) = unnamed(error)
        slots.spare.append(slot)
        if code:
            raise self._driver.error("cuSignalExternalSemaphoresAsync", code)

    def wait(self, batch: Batch, stream: Stream, values: Sequence[int], timeout_ms: int | None) -> None:
        """``cuWaitExternalSemaphoresAsync``."""
        slots = batch.waits
        slot = slots.take(values)
        for index in batch.keyed:
            slot[1][index].timeoutMs = _FOREVER if timeout_ms is None else timeout_ms
        try:
            if stream.relative:
                (code,) = stream.run(self._wait, batch.handles, slot[0], batch.count, stream.handle)
            else:
                (code,) = self._wait(batch.handles, slot[0], batch.count, stream.handle)
        except UNNAMED as error:
            (code,) = unnamed(error)
        slots.spare.append(slot)
        if code:
            raise self._driver.error("cuWaitExternalSemaphoresAsync", code)
