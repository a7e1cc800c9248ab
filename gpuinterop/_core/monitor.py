"""The monitor, the only lock under which objects change their state; and the queue of finalizers.

No native call, wait, callback or I/O happens under it. A signal handler's exception may end a function under it at any
point. It may then leave an object that is never released, but no object that is released too early. So of two writes,
the one that keeps the object comes first.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from ..errors import ResourceBusyError

if TYPE_CHECKING:
    from .lifetime import Lifetime

Ts = TypeVarTuple("Ts")
T = TypeVar("T")

_lock = threading.RLock()  # a signal handler may enter again in the same thread, see `refuse_reentry`
_resets: list[Callable[[], None]] = []
_generation = 0

dropped: deque[Lifetime] = deque()
"""Dropped objects, and closed mappings that have lost an array. Finalizers append them for the next drain."""
lingering: deque[object] = deque(maxlen=64)
"""Wrapped streams of array libraries, kept until the next drain for reuse by arrays made before then."""


def locked(transition: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """Run a function under the monitor, like `system.under`, but without its frame because this is a hot path."""

    @functools.wraps(transition)
    def entered(*arguments: *Ts) -> T:
        lock = _lock
        try:
            lock.acquire()
            return transition(*arguments)
        finally:
            try:  # noqa: SIM105 - see system.under
                lock.release()
            except RuntimeError:
                pass

    return entered


def interrupted() -> bool:
    """Whether the caller is a signal handler or finalizer that interrupted a transition of its thread."""
    return _lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def refuse_reentry() -> None:
    """Raise if `interrupted`: the handler cannot change objects now, and waiting for the transition would never end."""
    if interrupted():
        raise ResourceBusyError(
            "a signal handler made this call inside a gpuinterop state change; set a flag there and make the call in "
            "the program, or call close(), which is queued."
        )


def generation() -> int:
    """Return how often this process and its ancestors were forked after the import of gpuinterop."""
    return _generation


def after_fork(reset: Callable[[], None]) -> Callable[[], None]:
    """Run `reset` in every forked child, to replace what a thread of the parent may have held."""
    _resets.append(reset)
    return reset


def _forked() -> None:
    global _generation, _lock  # noqa: PLW0603 - a thread of the parent may hold the lock
    _lock = threading.RLock()
    _generation += 1
    dropped.clear()
    for reset in _resets:
        reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
