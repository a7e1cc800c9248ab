"""The monitor: the one lock of the process under which objects change their state; and the queue of finalizers.

No native call, wait, callback or I/O happens under it. An exception of a signal handler may end a function under it
anywhere. What it leaves may keep an object for good, and must not release one early: so the first of two writes is the
one that keeps.
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

_lock = threading.RLock()  # a signal handler may come back in the same thread: see `refuse_reentry`
_resets: list[Callable[[], None]] = []
_generation = 0

dropped: deque[Lifetime] = deque()
"""Objects without a reference, and closed mappings that an array has left. Finalizers append to it, and the next drain
retires them, or looks at them again."""
lingering: deque[object] = deque(maxlen=64)
"""Array libraries' streams, as wrapped. The next drain lets them go; an array that is made before takes them again."""


def locked(transition: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """Run a function under the monitor, as `system.under` does it, without its frame: calls come here many times."""

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
    """Whether the caller is a signal handler or finalizer that struck inside a transition of its thread."""
    return _lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def refuse_reentry() -> None:
    """Raise in such a handler: it cannot change objects now, and waiting for the transition would never end."""
    if interrupted():
        raise ResourceBusyError(
            "a signal handler made this call inside a gpuinterop state change; set a flag there and make the call in "
            "the program, or call close(), which is queued."
        )


def generation() -> int:
    """How often this process and its ancestors were forked since the library was loaded."""
    return _generation


def after_fork(reset: Callable[[], None]) -> Callable[[], None]:
    """Run `reset` in every child of a fork, to replace what a thread of the parent may have held."""
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
