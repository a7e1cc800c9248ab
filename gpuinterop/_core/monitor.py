"""The monitor: the one lock of the process under which objects change their state; and the queue of finalizers.

No native call, wait, callback or I/O happens under it. CPython runs signal handlers after calls, at the entry of
functions and at backward jumps; an exception of a handler ends the function there. So two writes that belong together
have no call between them, and each iteration of a loop leaves a valid state.
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
    from .native import Native

Ts = TypeVarTuple("Ts")
T = TypeVar("T")

_lock = threading.RLock()  # a signal handler may come back in the same thread: see `refuse_reentry`
_resets: list[Callable[[], None]] = []
_generation = 0

dropped: deque[Native] = deque()
"""Natives without a reference, and closed mappings that an array has left. Finalizers append to it, and the next drain
retires them, or looks at them again."""
lingering: deque[object] = deque(maxlen=64)
"""Array libraries' streams, as wrapped. The next drain lets them go; an array that is made before takes them again."""


def locked(transition: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """Run a function under the monitor. An interrupt right after it can lose its return value."""

    @functools.wraps(transition)
    def entered(*arguments: *Ts) -> T:
        try:  # not `with`: an interrupt can then leak the lock on CPython 3.14 (cpython #148874)
            _lock.acquire()
            return transition(*arguments)
        finally:
            try:  # noqa: SIM105 - a call in between could be interrupted
                _lock.release()
            except RuntimeError:  # the interrupt came before the lock
                pass

    return entered


def interrupted() -> bool:
    """Whether this is a signal handler or a finalizer that struck inside a transition of this thread."""
    return _lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def refuse_reentry() -> None:
    """Raise in such a handler: it cannot change objects now, and waiting for the transition would never end."""
    if interrupted():
        raise ResourceBusyError(
            "a signal handler made this call inside a gpuinterop state change: set a flag there and make the call in "
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
