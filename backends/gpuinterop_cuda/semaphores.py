"""External semaphores, and the batches whose parameter structs are used again.

A new struct for each call costs as much as the call (facts of cuda-bindings: 1.4 us against 0.43 us). So a batch keeps
a pool: a call pops a set of structs, or makes one, and appends it afterwards. Both are atomic, and no two threads ever
write into the same struct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from gpuinterop.handles import AnySemaphoreHandle, Keyed, SciSync

from . import descriptors
from .driver import UNNAMED, Context, Driver, Made, unnamed
from .streams import Stream

_FOREVER: Final = 0xFFFFFFFF  # INFINITE, in milliseconds

# The structs of one call, as the driver takes them, and for each what its value is written to.
Slot: TypeAlias = tuple[list[Any], list[Any]]


class Semaphore(Made):
    """An imported semaphore."""

    __slots__ = ("kind",)
    back = "cuDestroyExternalSemaphore"

    def __init__(self, context: Context, kind: type) -> None:
        super().__init__(context)
        self.kind = kind


def load(driver: Driver, context: Context, handle: AnySemaphoreHandle) -> Semaphore:
    """``cuImportExternalSemaphore``."""
    desc, _keep = descriptors.semaphore(driver.api, handle)
    return Semaphore(context, handle.kind).create("cuImportExternalSemaphore", desc)


class Batch:
    """Semaphores that are signalled or waited for in one call."""

    __slots__ = ("_fields", "_new_signal", "_new_wait", "count", "fences", "handles", "signals", "waits")

    def __init__(self, driver: Driver, semaphores: Sequence[Semaphore]) -> None:
        api = driver.api
        self.handles = [semaphore.handle for semaphore in semaphores]
        self.count = len(semaphores)
        self.signals: list[Slot] = []
        self.waits: list[Slot] = []
        self._fields = [_FIELDS.get(semaphore.kind, _FENCE) for semaphore in semaphores]
        # Timelines, fences and binary semaphores, which take the value 0 and ignore it, need no telling apart.
        self.fences = all(field is _FENCE for field in self._fields)
        self._new_signal: Callable[[], Any] = api.CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS
        self._new_wait: Callable[[], Any] = api.CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS

    def signal_slot(self, values: Sequence[int]) -> Slot:
        """Structs with `values`; to be appended to `signals` after the call."""
        try:
            slot = self.signals.pop()
        except IndexError:
            slot = self._slot(self._new_signal)
        if self.fences:
            for target, value in zip(slot[1], values, strict=False):  # the core has counted them
                target.value = value
        else:
            self._fill(slot, values)
        return slot

    def wait_slot(self, values: Sequence[int], timeout_ms: int | None) -> Slot:
        """Structs with `values`; to be appended to `waits` after the call."""
        try:
            slot = self.waits.pop()
        except IndexError:
            slot = self._slot(self._new_wait)
        if self.fences:
            for target, value in zip(slot[1], values, strict=False):
                target.value = value
        else:
            self._fill(slot, values)
            limit = _FOREVER if timeout_ms is None else timeout_ms
            for field, target in zip(self._fields, slot[1], strict=True):
                if field is _KEY:
                    target.timeoutMs = limit
        return slot

    def _fill(self, slot: Slot, values: Sequence[int]) -> None:
        for (_, name), target, value in zip(self._fields, slot[1], values, strict=True):
            setattr(target, name, value)

    def _slot(self, new: Callable[[], Any]) -> Slot:
        roots = [new() for _ in self.handles]
        # The views do not keep their struct alive on 12.9: the slot holds both.
        return roots, [getattr(root.params, arm) for (arm, _), root in zip(self._fields, roots, strict=True)]


# Where a kind's value goes: the struct in `params`, and its field.
_FENCE: Final = ("fence", "value")
_KEY: Final = ("keyedMutex", "key")
_FIELDS: Final[dict[type, tuple[str, str]]] = {Keyed: _KEY, SciSync: ("nvSciSync", "fence")}


class Semaphores:
    """The hot path: what each call needs is bound once."""

    __slots__ = ("_driver", "_signal", "_wait")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._signal = driver.api.cuSignalExternalSemaphoresAsync
        self._wait = driver.api.cuWaitExternalSemaphoresAsync

    def signal(self, batch: Batch, stream: Stream, values: Sequence[int]) -> None:
        slot = batch.signal_slot(values)
        try:
            if stream.relative:
                (code,) = stream.run(partial(self._signal, batch.handles, slot[0], batch.count, stream.handle))
            else:
                (code,) = self._signal(batch.handles, slot[0], batch.count, stream.handle)
        except UNNAMED as error:
            (code,) = unnamed(error)
        batch.signals.append(slot)
        if code:
            raise self._driver.error("cuSignalExternalSemaphoresAsync", code)

    def wait(self, batch: Batch, stream: Stream, values: Sequence[int], timeout_ms: int | None) -> None:
        slot = batch.wait_slot(values, timeout_ms)
        try:
            if stream.relative:
                (code,) = stream.run(partial(self._wait, batch.handles, slot[0], batch.count, stream.handle))
            else:
                (code,) = self._wait(batch.handles, slot[0], batch.count, stream.handle)
        except UNNAMED as error:
            (code,) = unnamed(error)
        batch.waits.append(slot)
        if code:
            raise self._driver.error("cuWaitExternalSemaphoresAsync", code)
